//! [`Mutex`], from the word and `lock_api`.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use lock_api::{GuardNoSend, RawMutexFair, RawMutexTimed};

use crate::word::Word;

/// A mutex that keeps no list of waiting threads in process memory; see the [crate](crate).
pub type Mutex<T> = lock_api::Mutex<RawMutex, T>;
/// A locked [`Mutex`], until it is dropped.
pub type MutexGuard<'a, T> = lock_api::MutexGuard<'a, RawMutex, T>;

/// What [`Mutex`] locks and unlocks.
pub struct RawMutex(Word);

// SAFETY: one thread at a time holds the word: only a compare-and-swap from an unlocked state acquires it.
unsafe impl lock_api::RawMutex for RawMutex {
    const INIT: RawMutex = RawMutex(Word::new());

    type GuardMarker = GuardNoSend;

    #[inline]
    fn lock(&self) {
        self.0.lock();
    }

    #[inline]
    fn try_lock(&self) -> bool {
        self.0.try_lock()
    }

    #[inline]
    unsafe fn unlock(&self) {
        self.0.unlock();
    }

    #[inline]
    fn is_locked(&self) -> bool {
        self.0.is_locked()
    }
}

// SAFETY: both unlock it, and the second locks it again.
unsafe impl RawMutexFair for RawMutex {
    #[inline]
    unsafe fn unlock_fair(&self) {
        self.0.unlock_fair();
    }

    #[inline]
    unsafe fn bump(&self) {
        self.0.bump();
    }
}

// SAFETY: both lock it where they return true.
unsafe impl RawMutexTimed for RawMutex {
    type Duration = Duration;
    type Instant = Instant;

    fn try_lock_for(&self, timeout: Duration) -> bool {
        match Instant::now().checked_add(timeout) {
            Some(until) => self.0.lock_until(until),
            None => {
                self.0.lock();
                true
            }
        }
    }

    fn try_lock_until(&self, until: Instant) -> bool {
        self.0.lock_until(until)
    }
}
