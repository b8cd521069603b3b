//! The way back from native code to the interpreter, which closes when the interpreter ends.
//!
//! Once the interpreter is finalizing, a thread that asks for the GIL is ended there and then by `pthread_exit`
//! (CPython before 3.14). That unwinds the thread's stack through frames of Rust, which aborts the process. A daemon
//! thread that waits in native code while the program ends would do exactly that. So every thread returns through
//! this gate: those that arrive after it has closed stay in native code until the process ends, and the interpreter
//! waits for those that were let through before ([`close`]).

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use pyo3::ffi;
use pyo3::prelude::*;

/// How long the closing interpreter and a thread at the gate wait for each other. Other handlers of `atexit` run after
/// [`close`], and one may join a thread that is held here: it is let through after this long.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long the workers may take to close while threads are held: a callback of theirs may wait for such a thread.
const CLOSING_MAX: Duration = Duration::from_secs(10);

/// The thread that ends the interpreter; set once, by [`begin_to_close`].
static CLOSED_BY: OnceLock<ThreadId> = OnceLock::new();
static CLOSING: AtomicBool = AtomicBool::new(false);
static CLOSED: AtomicBool = AtomicBool::new(false);
/// Threads that were let through, and may be waiting for the GIL or need it until they are back in Python.
static PASSING: AtomicUsize = AtomicUsize::new(0);
/// Under it the closing thread waits for `PASSING` to be 0.
static LOCK: Mutex<()> = Mutex::new(());
static PASSED: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, ()> {
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Permission to wait for the GIL, and to use the interpreter with it. The interpreter does not end while one exists,
/// for [`PATIENCE`] at most.
pub(crate) struct Pass(());

impl Pass {
    fn new() -> Pass {
        PASSING.fetch_add(1, Ordering::SeqCst);
        Pass(())
    }

    /// For a thread that Python code waits for. It does not return once the interpreter ends, but on the thread that
    /// ends it.
    pub(crate) fn obtain() -> Pass {
        let pass = Pass::new();
        if !CLOSING.load(Ordering::SeqCst) || CLOSED_BY.get() == Some(&thread::current().id()) {
            return pass;
        }
        drop(pass);
        hold();
        Pass::new()
    }

    /// For a thread of ours that may call Python; `None`: the interpreter has ended.
    pub(crate) fn offered() -> Option<Pass> {
        let pass = Pass::new();
        (!CLOSED.load(Ordering::SeqCst)).then_some(pass)
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        let left = PASSING.fetch_sub(1, Ordering::SeqCst) - 1;
        if left == 0 && CLOSED.load(Ordering::SeqCst) {
            let _ordered = lock();
            PASSED.notify_all();
        }
    }
}

/// Holds a thread until the process ends. It returns only if the interpreter does not end for [`PATIENCE`] after
/// [`close`], or does not get that far.
#[cold]
fn hold() {
    let arrived = Instant::now();
    while is_initialized() {
        let closed = CLOSED.load(Ordering::SeqCst);
        let began = Instant::now();
        while let Some(left) = PATIENCE.checked_sub(began.elapsed()).filter(|left| !left.is_zero()) {
            thread::park_timeout(left);
        }
        if is_initialized() && (closed || arrived.elapsed() > CLOSING_MAX) {
            return;
        }
    }
    loop {
        thread::park();
    }
}

#[allow(unsafe_code)]
fn is_initialized() -> bool {
    // SAFETY: may be called by any thread at any time. It reads 0 from when the interpreter begins to finalize.
    unsafe { ffi::Py_IsInitialized() != 0 }
}

/// Runs `work` without the GIL; other Python threads run meanwhile.
#[inline]
pub(crate) fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> T {
    detached_until(py, work).0
}

/// As [`detached`]. The interpreter does not end before the pass is dropped, so that the caller may run Python code
/// before it returns, as making an exception does.
#[inline]
#[expect(clippy::disallowed_methods, reason = "the one place that calls it")]
pub(crate) fn detached_until<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> (T, Pass) {
    py.detach(|| (work(), Pass::obtain()))
}

/// Whether Python may still be called.
pub(crate) fn is_open() -> bool {
    !CLOSED.load(Ordering::Acquire)
}

/// From now on the calling thread alone returns to Python. Threads of ours may still call it.
pub(crate) fn begin_to_close() {
    CLOSED_BY.get_or_init(|| thread::current().id());
    CLOSING.store(true, Ordering::SeqCst);
}

/// Lets nobody through any more but the calling thread, and waits for those that were let through, without the GIL.
#[expect(clippy::disallowed_methods, reason = "the thread that ends the interpreter needs no pass")]
pub(crate) fn close(py: Python<'_>) {
    CLOSED.store(true, Ordering::SeqCst);
    py.detach(|| {
        let until = Instant::now() + PATIENCE;
        let mut ordered = lock();
        while PASSING.load(Ordering::SeqCst) > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            ordered = PASSED.wait_timeout(ordered, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    });
}
