//! [`Condvar`]: a count of notifications that threads sleep on.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use crate::MutexGuard;
use crate::futex::{Futex, Slept};

/// A condition variable, used with a locked [`Mutex`](crate::Mutex).
///
/// A wait may end spuriously: recheck the condition. Notifying costs one load if no thread waits.
pub struct Condvar {
    notified: Futex,
    waiting: AtomicU32,
}

/// How a wait with a deadline ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    /// Whether the deadline had passed.
    pub fn timed_out(self) -> bool {
        self.0
    }
}

impl Condvar {
    /// A condition variable without waiting threads.
    pub const fn new() -> Condvar {
        Condvar { notified: Futex::new(0), waiting: AtomicU32::new(0) }
    }

    /// Unlocks the mutex, waits for a notification, and locks it again.
    pub fn wait<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>) {
        self.sleep(guard, None);
    }

    /// As [`Condvar::wait`], at most `timeout`.
    pub fn wait_for<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>, timeout: Duration) -> WaitTimeoutResult {
        self.sleep(guard, Instant::now().checked_add(timeout))
    }

    /// As [`Condvar::wait`], at most until `deadline`.
    pub fn wait_until<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>, deadline: Instant) -> WaitTimeoutResult {
        self.sleep(guard, Some(deadline))
    }

    /// Wakes one thread that waits.
    #[inline]
    pub fn notify_one(&self) {
        self.notify(1);
    }

    /// Wakes all threads that wait.
    #[inline]
    pub fn notify_all(&self) {
        self.notify(i32::MAX);
    }

    #[inline]
    fn notify(&self, most: i32) {
        // A waiting thread increments `waiting` before it unlocks the mutex, and the caller changed the condition under
        // that mutex: so this load sees every thread that must be woken.
        if self.waiting.load(SeqCst) > 0 {
            self.notified.word.fetch_add(1, SeqCst);
            self.notified.wake(most);
        }
    }

    fn sleep<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>, until: Option<Instant>) -> WaitTimeoutResult {
        self.waiting.fetch_add(1, SeqCst);
        let seen = self.notified.word.load(SeqCst);
        let slept = MutexGuard::unlocked(guard, || {
            let slept = self.notified.sleep(seen, until);
            self.waiting.fetch_sub(1, SeqCst);
            slept
        });
        WaitTimeoutResult(slept == Slept::TimedOut)
    }
}

impl Default for Condvar {
    fn default() -> Condvar {
        Condvar::new()
    }
}

impl std::fmt::Debug for Condvar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Condvar").finish_non_exhaustive()
    }
}
