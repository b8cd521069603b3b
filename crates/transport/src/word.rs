//! Control words in shared memory: storing one publishes everything written before it.
#![allow(unsafe_code)]

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};

/// A word that its writer stores after the data it publishes (release), and that its reader polls (acquire). A reader
/// that observes a value also sees everything written before the store, by whichever thread. Any thread may call
/// either.
#[repr(transparent)]
#[derive(Debug)]
pub struct Word(AtomicU64);

impl Word {
    /// A word of that value.
    #[cfg(loom)]
    pub(crate) fn new(value: u64) -> Word {
        Word(AtomicU64::new(value))
    }

    /// The word at that address.
    ///
    /// # Safety
    /// `at` must be aligned to 8 bytes and valid for reading and writing 8 bytes for as long as the reference is used,
    /// and whatever else accesses them meanwhile must do so atomically.
    #[cfg(not(loom))]
    pub unsafe fn at<'a>(at: *mut u64) -> &'a Word {
        // SAFETY: the caller guarantees the address; a word is a transparent AtomicU64.
        unsafe { &*at.cast::<Word>() }
    }

    /// Stores the value, after everything that this thread has written or observed.
    #[inline]
    pub fn announce(&self, value: u64) {
        self.0.store(value, Ordering::Release);
    }

    /// The value at present, before everything that this thread reads from now on.
    #[inline]
    pub fn observe(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// The atomic itself, for orderings that are too weak.
    #[cfg(all(test, loom))]
    pub(crate) fn atomic(&self) -> &AtomicU64 {
        &self.0
    }
}
