//! Sleeping until another thread or process writes into shared memory.
#![allow(unsafe_code)]

use std::time::Duration;

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering};

/// A futex-based doorbell in shared memory: its owner sleeps on it while other threads and processes write. One thread
/// sleeps at a time; any number may ring. All-zero bytes are an unrung doorbell.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct Doorbell {
    /// Number of writes announced; the futex word.
    pub(crate) rings: AtomicU32,
    /// Nonzero while the owner sleeps: set and cleared by the owner, read by those who ring.
    pub(crate) sleeping: AtomicU32,
    #[cfg(loom)]
    kernel: Kernel,
}

impl Doorbell {
    /// Announces a write by this thread: wakes the owner if it sleeps.
    #[inline]
    pub fn ring(&self) {
        self.rings.fetch_add(1, Ordering::SeqCst);
        if self.sleeping.load(Ordering::SeqCst) != 0 {
            self.wake();
        }
    }

    /// Sleeps until a ring, for at most `limit`; not at all if `ready` is true once ringing threads can see that this
    /// thread is about to sleep. May return early.
    ///
    /// No wake-up is lost: if the writer rings before `rings` is loaded here, `ready` sees the write that the ring
    /// announces; if it rings later, the futex sees a changed value and returns at once, or the writer sees `sleeping`
    /// and wakes it.
    pub fn sleep(&self, limit: Duration, ready: impl Fn() -> bool) {
        self.sleeping.store(1, Ordering::SeqCst);
        let seen = self.rings.load(Ordering::SeqCst);
        if !ready() {
            self.wait(seen, limit);
        }
        self.sleeping.store(0, Ordering::SeqCst);
    }

    /// Sleeps unless `rings` has changed from `seen`.
    #[cfg(not(loom))]
    fn wait(&self, seen: u32, limit: Duration) {
        let limit =
            libc::timespec { tv_sec: limit.as_secs() as _, tv_nsec: i64::from(limit.subsec_nanos()) as libc::c_long };
        // SAFETY: a live futex word (shared between processes: no PRIVATE flag) and a timespec that outlives the
        // call. Whatever the result, the caller polls again.
        unsafe { libc::syscall(libc::SYS_futex, self.rings.as_ptr(), libc::FUTEX_WAIT, seen, &raw const limit) };
    }

    #[cfg(not(loom))]
    #[cold]
    fn wake(&self) {
        // SAFETY: a live futex word; without a sleeper the call does nothing.
        unsafe { libc::syscall(libc::SYS_futex, self.rings.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
    }
}

/// The kernel's half of a futex, for the model checker. Sleeps never time out there, so a lost wake-up is a deadlock.
#[cfg(loom)]
#[derive(Debug)]
struct Kernel {
    lock: loom::sync::Mutex<()>,
    woken: loom::sync::Condvar,
}

#[cfg(loom)]
impl Doorbell {
    pub(crate) fn new() -> Doorbell {
        let kernel = Kernel { lock: loom::sync::Mutex::new(()), woken: loom::sync::Condvar::new() };
        Doorbell { rings: AtomicU32::new(0), sleeping: AtomicU32::new(0), kernel }
    }

    /// The kernel compares under its lock, behind a full barrier, with what stands in memory: the model checker's loads
    /// may return older values, its read-modify-writes do not.
    pub(crate) fn wait(&self, seen: u32, _: Duration) {
        let asleep = self.kernel.lock.lock().expect("no thread panics with it");
        if self.rings.fetch_add(0, Ordering::SeqCst) == seen {
            drop(self.kernel.woken.wait(asleep));
        }
    }

    pub(crate) fn wake(&self) {
        let _one = self.kernel.lock.lock().expect("no thread panics with it");
        self.kernel.woken.notify_all();
    }
}
