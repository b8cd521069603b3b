//! The mutex itself: one futex word.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Instant;

use crate::futex::{AtomicU32, Futex, Slept};

const FREE: u32 = 0;
/// Locked, no waiting thread to wake on unlock.
const LOCKED: u32 = 1;
/// Locked, and threads may be sleeping on the word.
const CONTENDED: u32 = 2;
/// Handed off: unlocked, for waiting threads only. The woken thread takes it, or one that began to wait meanwhile. The
/// fast path does not, so a thread that relocks in a loop cannot starve the others.
const HANDED_OFF: u32 = 3;

/// Every `HANDOFF_EVERY`-th contended unlock hands the lock off: a thread that is merely woken may find it locked
/// again, any number of times.
const HANDOFF_EVERY: u32 = 64;
/// Spin iterations before a thread sleeps, unless others sleep already.
const SPIN_LIMIT: u32 = 10;
/// The first `PAUSE_SPINS` iterations pause the processor; later ones yield it to another thread, perhaps the lock
/// holder.
const PAUSE_SPINS: u32 = 3;

/// The raw mutex, without the data that it protects.
///
/// A thread that has slept takes the lock as [`CONTENDED`], because others may still sleep: so each unlock wakes the
/// next. A thread that times out leaves a held lock marked as [`CONTENDED`] for the same reason.
pub(crate) struct Word {
    state: Futex,
    /// Counts unlocks with waiting threads. Written with the lock held.
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
        matches!(self.state.word.load(Relaxed), LOCKED | CONTENDED)
    }

    #[inline]
    pub(crate) fn lock(&self) {
        if !self.take(FREE, LOCKED) {
            self.lock_contended();
        }
    }

    /// No arguments: the uncontended path sets up none.
    #[cold]
    #[inline(never)]
    fn lock_contended(&self) {
        self.lock_slow(false, None);
    }

    #[cfg(not(loom))]
    #[inline]
    pub(crate) fn try_lock(&self) -> bool {
        self.take(FREE, LOCKED)
    }

    /// Locks it; false if `until` passed first.
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

    /// As [`Word::unlock`], and hands the lock off to a waiting thread, if there is one.
    pub(crate) fn unlock_fair(&self) {
        if self.state.word.compare_exchange(LOCKED, FREE, Release, Relaxed).is_err() {
            self.hand_off();
        }
    }

    /// Hands the lock off to a waiting thread, if there is one, and then locks it again.
    #[inline]
    pub(crate) fn bump(&self) {
        if self.state.word.load(Relaxed) == CONTENDED {
            self.bump_slow();
        }
    }

    #[inline]
    fn take(&self, from: u32, to: u32) -> bool {
        self.state.word.compare_exchange(from, to, Acquire, Relaxed).is_ok()
    }

    /// `slept`: the caller has slept, so other threads may still be sleeping.
    #[cold]
    fn lock_slow(&self, mut slept: bool, until: Option<Instant>) -> bool {
        let (mut spins, mut over) = (0, false);
        loop {
            match self.state.word.load(Relaxed) {
                FREE if self.take(FREE, if slept { CONTENDED } else { LOCKED }) => return true,
                HANDED_OFF if self.take(HANDED_OFF, CONTENDED) => return true,
                FREE | HANDED_OFF => continue,
                LOCKED if spin_once(&mut spins) => continue,
                LOCKED if self.state.word.compare_exchange(LOCKED, CONTENDED, Relaxed, Relaxed).is_err() => continue,
                _ => {}
            }
            if over {
                return false;
            }
            over = self.state.sleep(CONTENDED, until) == Slept::TimedOut;
            (slept, spins) = (true, 0);
        }
    }

    #[cold]
    fn unlock_slow(&self) {
        let unlocks = self.unlocks.load(Relaxed).wrapping_add(1);
        self.unlocks.store(unlocks, Relaxed);
        if unlocks.is_multiple_of(HANDOFF_EVERY) {
            return self.hand_off();
        }
        self.state.word.swap(FREE, Release);
        self.state.wake(1);
    }

    /// Hands the lock off to a waiting thread. Without one it is free.
    #[cold]
    fn hand_off(&self) {
        self.state.word.swap(HANDED_OFF, Release);
        if !self.state.wake(1) && self.state.word.compare_exchange(HANDED_OFF, FREE, Release, Relaxed).is_ok() {
            // A thread in `bump_slow` may have gone to sleep on the word in between.
            self.state.wake(1);
        }
    }

    #[cold]
    fn bump_slow(&self) {
        self.state.word.swap(HANDED_OFF, Release);
        if !self.state.wake(1) && self.take(HANDED_OFF, CONTENDED) {
            return;
        }
        // Whichever thread takes it marks it as [`CONTENDED`]. Once woken, this thread may take it even if it was
        // handed to another one: it cannot tell for whom it is by now.
        self.state.sleep(HANDED_OFF, None);
        self.lock_slow(true, None);
    }
}

/// Spins or yields once before a held lock is checked again; false: time to sleep.
fn spin_once(spins: &mut u32) -> bool {
    if cfg!(loom) || *spins == SPIN_LIMIT {
        return false;
    }
    *spins += 1;
    if *spins <= PAUSE_SPINS {
        (0..1 << *spins).for_each(|_| std::hint::spin_loop());
    } else {
        std::thread::yield_now();
    }
    true
}
