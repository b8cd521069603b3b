//! A word that threads of this process sleep on.
#![allow(unsafe_code)]

use std::time::Instant;

#[cfg(loom)]
pub(crate) use loom::sync::atomic::AtomicU32;
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::AtomicU32;

/// A word that threads sleep on until another one wakes them.
pub(crate) struct Futex {
    pub(crate) word: AtomicU32,
    #[cfg(loom)]
    kernel: Kernel,
}

/// How a sleep ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slept {
    /// By a wake-up, a signal, or at once because the word had changed.
    Woken,
    /// At the deadline.
    TimedOut,
}

#[cfg(not(loom))]
impl Futex {
    pub(crate) const fn new(value: u32) -> Futex {
        Futex { word: AtomicU32::new(value) }
    }

    /// Sleeps if the word still is `seen`, at most `until`.
    pub(crate) fn sleep(&self, seen: u32, until: Option<Instant>) -> Slept {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Slept::TimedOut;
        }
        let limit = left.and_then(|left| {
            let tv_sec = left.as_secs().try_into().ok()?;
            Some(libc::timespec { tv_sec, tv_nsec: left.subsec_nanos().into() })
        });
        let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: a live word, and a timespec that outlives the call, or none. Callers recheck the word whatever the
        // result.
        let result = unsafe { libc::syscall(libc::SYS_futex, self.word.as_ptr(), operation, seen, limit) };
        let timed_out = result < 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::ETIMEDOUT);
        if timed_out { Slept::TimedOut } else { Slept::Woken }
    }

    /// Wakes at most `most` sleeping threads; returns whether there was one.
    pub(crate) fn wake(&self, most: i32) -> bool {
        let operation = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: the kernel uses only the address of the word, which may already be freed: another thread may have
        // locked, unlocked and dropped the mutex meanwhile. Then no thread sleeps at that address, or only one that
        // tolerates a spurious wake-up.
        unsafe { libc::syscall(libc::SYS_futex, self.word.as_ptr(), operation, most) > 0 }
    }
}

/// The kernel's half of a futex, for the model checker. A sleep with a deadline times out at once there.
#[cfg(loom)]
struct Kernel {
    asleep: loom::sync::Mutex<u32>,
    woken: loom::sync::Condvar,
}

#[cfg(loom)]
impl Futex {
    pub(crate) fn new(value: u32) -> Futex {
        let kernel = Kernel { asleep: loom::sync::Mutex::new(0), woken: loom::sync::Condvar::new() };
        Futex { word: AtomicU32::new(value), kernel }
    }

    /// The kernel compares with the current value in memory, under its lock and behind a full barrier: the model
    /// checker's loads may return older values, its read-modify-writes do not.
    pub(crate) fn sleep(&self, seen: u32, until: Option<Instant>) -> Slept {
        if until.is_some() {
            return Slept::TimedOut;
        }
        let mut asleep = self.kernel.asleep.lock().expect("no thread panics with it");
        if self.word.fetch_add(0, std::sync::atomic::Ordering::SeqCst) == seen {
            *asleep += 1;
            drop(self.kernel.woken.wait(asleep));
        }
        Slept::Woken
    }

    pub(crate) fn wake(&self, most: i32) -> bool {
        let mut asleep = self.kernel.asleep.lock().expect("no thread panics with it");
        let woken = (*asleep).min(most as u32);
        *asleep -= woken;
        (0..woken).for_each(|_| self.kernel.woken.notify_one());
        woken > 0
    }
}
