//! The mutex itself: one word, and threads that sleep on it.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Instant;

use crate::futex::{AtomicU32, Futex, Slept};

const FREE: u32 = 0;
/// Locked, and no thread has to be woken afterwards.
const LOCKED: u32 = 1;
/// Locked, and threads may sleep until it is not.
const AWAITED: u32 = 2;
/// Unlocked for the threads that wait: one of them was woken and takes it, or another one that has come to wait. Nobody
/// takes it in passing, so that whoever locks it again and again does not keep them out.
const PASSED: u32 = 3;

/// Every so many unlocks with waiting threads, one hands the lock on: a thread that is only woken may find it locked again,
/// any number of times.
const PASS_EVERY: u32 = 64;
/// How often a thread looks again before it sleeps, unless others sleep already.
const LOOKS: u32 = 10;
/// The first of these looks follow a few pauses; later ones an offer of the processor to another thread, which may hold the
/// lock.
const SPINS: u32 = 3;

/// A mutex without what it protects.
///
/// A thread that has slept may not be the last one that does, and takes the lock as [`AWAITED`]: so whoever is woken wakes the
/// next in turn, and one that gives up marks a lock that is held before it goes.
pub(crate) struct Word {
    state: Futex,
    /// Unlocks with waiting threads. Changed with the lock held.
    unlocks: AtomicU32,
}

impl Word {
    #[cfg(not(loom))]
    pub(crate) const fn new() -> Word {
        Word { state: Futex::new(FREE), unlocks: AtomicU32::new(0) }
    }

    #[cfg(loom)]
    pub(crate) fn new() -> Word {
        Word { state: Futex::new(FREE), unlocks: AtomicU32::new(0) }
    }

    #[cfg(not(loom))]
    pub(crate) fn is_locked(&self) -> bool {
        matches!(self.state.word.load(Relaxed), LOCKED | AWAITED)
    }

    #[inline]
    pub(crate) fn lock(&self) {
        if !self.take(FREE, LOCKED) {
            self.lock_contended();
        }
    }

    /// Without arguments, so that whoever locks a free mutex prepares none.
    #[cold]
    #[inline(never)]
    fn lock_contended(&self) {
        self.lock_slow(false, None);
    }

    #[cfg(not(loom))]
    #[inline]
    pub(crate) fn try_lock(&self) -> bool {
        self.state.word.load(Relaxed) == FREE && self.take(FREE, LOCKED)
    }

    /// Whether it was locked before `until`.
    pub(crate) fn lock_until(&self, until: Instant) -> bool {
        self.take(FREE, LOCKED) || self.lock_slow(false, Some(until))
    }

    /// Unlocks it. To be called by the thread that locked it.
    #[inline]
    pub(crate) fn unlock(&self) {
        if self.state.word.compare_exchange(LOCKED, FREE, Release, Relaxed).is_err() {
            self.unlock_slow();
        }
    }

    /// As [`Word::unlock`], and hands it to a thread that waits for it, if one does.
    pub(crate) fn unlock_fair(&self) {
        if self.state.word.compare_exchange(LOCKED, FREE, Release, Relaxed).is_err() {
            self.pass();
        }
    }

    /// Unlocks it for a thread that waits, if one does, and locks it again after that.
    #[inline]
    pub(crate) fn bump(&self) {
        if self.state.word.load(Relaxed) == AWAITED {
            self.bump_slow();
        }
    }

    #[inline]
    fn take(&self, from: u32, to: u32) -> bool {
        self.state.word.compare_exchange(from, to, Acquire, Relaxed).is_ok()
    }

    /// `slept`: the caller was woken, perhaps in the place of a thread that sleeps on.
    #[cold]
    fn lock_slow(&self, mut slept: bool, until: Option<Instant>) -> bool {
        let (mut looks, mut over) = (0, false);
        loop {
            match self.state.word.load(Relaxed) {
                FREE if self.take(FREE, if slept { AWAITED } else { LOCKED }) => return true,
                PASSED if self.take(PASSED, AWAITED) => return true,
                FREE | PASSED => continue,
                LOCKED if look_again(&mut looks) => continue,
                LOCKED if self.state.word.compare_exchange(LOCKED, AWAITED, Relaxed, Relaxed).is_err() => continue,
                _ => {}
            }
            if over {
                return false;
            }
            over = self.state.sleep(AWAITED, until) == Slept::TimedOut;
            (slept, looks) = (true, 0);
        }
    }

    #[cold]
    fn unlock_slow(&self) {
        let unlocks = self.unlocks.load(Relaxed).wrapping_add(1);
        self.unlocks.store(unlocks, Relaxed);
        if unlocks.is_multiple_of(PASS_EVERY) {
            return self.pass();
        }
        self.state.word.swap(FREE, Release);
        self.state.wake(1);
    }

    /// Hands it to a thread that waits. If none sleeps it is free.
    #[cold]
    fn pass(&self) {
        self.state.word.swap(PASSED, Release);
        if !self.state.wake(1) && self.state.word.compare_exchange(PASSED, FREE, Release, Relaxed).is_ok() {
            // A thread in `bump_slow` may have gone to sleep on the word meanwhile.
            self.state.wake(1);
        }
    }

    #[cold]
    fn bump_slow(&self) {
        self.state.word.swap(PASSED, Release);
        if !self.state.wake(1) && self.take(PASSED, AWAITED) {
            return;
        }
        // Whoever takes it marks it as awaited. Woken, this thread may take it even if it was passed to another one: it
        // cannot know whether it was passed to this one by now.
        self.state.sleep(PASSED, None);
        self.lock_slow(true, None);
    }
}

/// Lets a moment pass before another look at a lock that is held; false when it is time to sleep.
fn look_again(looks: &mut u32) -> bool {
    if cfg!(loom) || *looks == LOOKS {
        return false;
    }
    *looks += 1;
    if *looks <= SPINS {
        (0..1 << *looks).for_each(|_| std::hint::spin_loop());
    } else {
        std::thread::yield_now();
    }
    true
}
