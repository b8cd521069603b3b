//! Signals are the program's: threads of the library take none, no write raises SIGPIPE, and libraries that are
//! loaded at run time leave no handlers behind.
#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};

#[cfg(not(loom))]
use crate::{Mutex, PerProcess};

/// Signals of a thread's own faults, and that of sampling profilers.
const KEPT: [libc::c_int; 6] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGPROF];

/// Restores the calling thread's mask.
struct Mask(libc::sigset_t);

impl Mask {
    fn block(set: &libc::sigset_t) -> Mask {
        let mut old = MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: both sets are valid for the call; zeros are a valid set where it fails, which it does not.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, set, old.as_mut_ptr()) };
        // SAFETY: as above.
        Mask(unsafe { old.assume_init() })
    }

    fn has(&self, signal: libc::c_int) -> bool {
        // SAFETY: a valid set.
        unsafe { libc::sigismember(&self.0, signal) == 1 }
    }
}

impl Drop for Mask {
    fn drop(&mut self) {
        // SAFETY: the set that the thread had before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut()) };
    }
}

/// Calls `spawn` with all signals blocked on this thread, which threads started by it inherit: a handler of the program
/// then never runs on a thread of the library, which may hold a lock.
pub fn signals_blocked<T>(spawn: impl FnOnce() -> T) -> T {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: `sigfillset` initializes the set, and the others change it.
    let set = unsafe {
        libc::sigfillset(set.as_mut_ptr());
        KEPT.iter().for_each(|signal| _ = libc::sigdelset(set.as_mut_ptr(), *signal));
        set.assume_init()
    };
    let _mask = Mask::block(&set);
    spawn()
}

/// True if the process ignores SIGPIPE, as under the runtimes of Rust and Python.
pub fn ignores_sigpipe() -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: the action is only read, into memory for one.
    unsafe {
        libc::sigaction(libc::SIGPIPE, null(), action.as_mut_ptr()) == 0
            && action.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

/// Calls `write`, whose system call has no flag against SIGPIPE; one that it raises is discarded.
pub fn without_sigpipe<T>(write: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: `sigemptyset` initializes the set.
    let set = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGPIPE);
        set.assume_init()
    };
    let mask = Mask::block(&set);
    let result = write();
    // Where the thread had it blocked before, one may have been pending, and is the program's.
    if matches!(&result, Err(error) if error.raw_os_error() == Some(libc::EPIPE)) && !mask.has(libc::SIGPIPE) {
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: a valid set and time; it does not wait.
        while unsafe { libc::sigtimedwait(&set, std::ptr::null_mut(), &now) } < 0
            && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
        {}
    }
    result
}

/// Signals for which libraries install handlers: those of faults, and those that end a process.
#[cfg(not(loom))]
const HANDLED: [libc::c_int; 8] =
    [libc::SIGINT, libc::SIGILL, libc::SIGABRT, libc::SIGBUS, libc::SIGFPE, libc::SIGSEGV, libc::SIGTERM, libc::SIGHUP];

/// Calls `call`, which loads or enters a library that installs signal handlers, and restores the handlers afterwards.
/// One call at a time in a process: a second thread would take the library's handlers for the program's.
#[cfg(not(loom))]
pub fn keeping_handlers<T>(call: impl FnOnce() -> T) -> T {
    static TURN: PerProcess<Mutex<()>> = PerProcess::new();
    let _turn = TURN.lock();
    let before = HANDLED.map(|signal| {
        let mut action = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: without a new action it only reads the present one, into memory for one.
        let read = unsafe { libc::sigaction(signal, null(), action.as_mut_ptr()) } == 0;
        // SAFETY: read, or zeros, which are an action, too.
        read.then(|| (signal, unsafe { action.assume_init() }))
    });
    let result = call();
    for (signal, action) in before.into_iter().flatten() {
        // SAFETY: an action of this signal, as it was before.
        unsafe { libc::sigaction(signal, &action, null_mut()) };
    }
    result
}
