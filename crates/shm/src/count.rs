//! A counter that each side publishes to the other beside the ring.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::atomics::AtomicU64;
use crate::control::Control;

/// The counters of both sides. The writer's word stays in its cache until it is read, so the reader polls it only when
/// it has nothing else to do.
pub(crate) struct Count {
    mine: NonNull<AtomicU64>,
    theirs: NonNull<AtomicU64>,
    /// What was read last.
    seen: u32,
    /// Keeps the memory mapped.
    _control: Arc<Control>,
}

// SAFETY: the pointers go into the mapping that `_control` keeps; nothing is tied to a thread.
unsafe impl Send for Count {}

impl Count {
    pub(crate) fn new(control: &Arc<Control>, side: usize) -> Count {
        let published = &control.fixed().published;
        Count {
            mine: NonNull::from(&published[1 - side].0),
            theirs: NonNull::from(&published[side].0),
            seen: 0,
            _control: Arc::clone(control),
        }
    }

    /// Release: whoever reads `count` sees the frames that were written before.
    #[inline]
    pub(crate) fn publish(&self, count: u32) {
        // SAFETY: inside the mapping.
        unsafe { self.mine.as_ref() }.store(u64::from(count), Ordering::Release);
    }

    /// Acquire: see [`Count::publish`]. Half of the word is ignored, whatever the peer writes there.
    #[inline]
    pub(crate) fn read(&mut self) -> u32 {
        // SAFETY: inside the mapping.
        self.seen = unsafe { self.theirs.as_ref() }.load(Ordering::Acquire) as u32;
        self.seen
    }

    /// Whether there is another number than the one read last.
    pub(crate) fn has_changed(&self) -> bool {
        // SAFETY: inside the mapping.
        unsafe { self.theirs.as_ref() }.load(Ordering::Relaxed) as u32 != self.seen
    }
}
