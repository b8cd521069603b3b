//! The control segment of a lane, as it lies in memory.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use crate::atomics::AtomicU64;
use crate::memory::{Mapping, sealed_memfd, verified_size};

/// Slots per direction. A model has few, so that they are used again soon; so has what an interpreter runs.
pub(crate) const SLOTS: usize = if cfg!(loom) {
    2
} else if cfg!(miri) {
    64
} else {
    1024
};
/// Payload bytes that fit into a slot.
pub(crate) const INLINE: usize = 24;
/// Cursors of direct copies per side.
pub(crate) const CURSORS: usize = if cfg!(loom) { 1 } else { 64 };

/// One frame: one cache line.
#[repr(C, align(64))]
pub(crate) struct Slot {
    /// Four words of head, three of payload. Words, not bytes: a peer may write them at any time, and atomic
    /// loads are the same instructions as plain ones.
    pub(crate) words: [AtomicU64; 7],
    /// The frame's number, from 1; written last.
    pub(crate) seq: AtomicU64,
}

/// A word alone in its pair of cache lines (the adjacent-line prefetcher fetches pairs).
#[repr(C, align(128))]
pub(crate) struct Line(pub(crate) AtomicU64);

/// The part whose size is the same for every lane. All zeros is its initial state. Index 0 of a pair is the
/// connector's (what it sends, its flag, its cursors), 1 the acceptor's.
#[repr(C, align(4096))]
pub(crate) struct Fixed {
    /// Frames taken out of that side's ring; written by the other side.
    pub(crate) consumed: [Line; 2],
    /// The count that the other side publishes to that one.
    pub(crate) published: [Line; 2],
    /// Bits for what that side sleeps on; 0: it is awake.
    pub(crate) sleeping: [Line; 2],
    pub(crate) cursors: [[Line; CURSORS]; 2],
    pub(crate) slots: [[Slot; SLOTS]; 2],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Slot>() == 64 && size_of::<Fixed>().is_multiple_of(crate::memory::PAGE));

#[cfg(loom)]
impl Fixed {
    fn zeros() -> Fixed {
        use std::array::from_fn;
        let lines = || from_fn(|_| Line(AtomicU64::new(0)));
        let slot = |_| Slot { words: from_fn(|_| AtomicU64::new(0)), seq: AtomicU64::new(0) };
        Fixed {
            consumed: lines(),
            published: lines(),
            sleeping: lines(),
            cursors: from_fn(|_| from_fn(|_| Line(AtomicU64::new(0)))),
            slots: from_fn(|_| from_fn(slot)),
        }
    }
}

/// A mapped control segment: [`Fixed`], then the two rings of payload bytes.
pub(crate) struct Control {
    map: Mapping,
    ring: usize,
    /// The model checker's atomics are not words of memory.
    #[cfg(loom)]
    modelled: Box<Fixed>,
}

impl Control {
    /// Bytes of a control segment whose byte rings have `ring` bytes each.
    fn size(ring: usize) -> usize {
        size_of::<Fixed>() + 2 * ring
    }

    /// A new one and the memfd to pass to the peer.
    pub(crate) fn create(ring: usize) -> io::Result<(Control, OwnedFd)> {
        let fd = sealed_memfd("crossrail-lane", Control::size(ring))?;
        let map = Mapping::new(fd.as_fd(), Control::size(ring))?;
        Ok((Control::of(map, ring), fd))
    }

    /// The peer's, once its seals and size are as they must be.
    pub(crate) fn open(fd: &OwnedFd, ring: usize) -> Result<Control, String> {
        let size = verified_size(fd)?;
        if size != Control::size(ring) {
            return Err(format!("a control segment of {size} bytes where {} were agreed", Control::size(ring)));
        }
        let map = Mapping::new(fd.as_fd(), size).map_err(|e| format!("mmap of the control segment: {e}"))?;
        Ok(Control::of(map, ring))
    }

    fn of(map: Mapping, ring: usize) -> Control {
        Control {
            map,
            ring,
            #[cfg(loom)]
            modelled: Box::new(Fixed::zeros()),
        }
    }

    #[cfg(loom)]
    pub(crate) fn fixed(&self) -> &Fixed {
        &self.modelled
    }

    #[cfg(not(loom))]
    #[inline]
    pub(crate) fn fixed(&self) -> &Fixed {
        // SAFETY: the mapping is page-aligned, at least as large as Fixed, lives as long as `self`, and Fixed
        // consists of atomics only, for which every bit pattern and every concurrent write is fine.
        unsafe { &*self.map.ptr().cast::<Fixed>() }
    }

    /// First byte of the payload ring that `side` sends through.
    pub(crate) fn bytes(&self, side: usize) -> *mut u8 {
        self.map.ptr().wrapping_add(size_of::<Fixed>() + side * self.ring)
    }

    /// Bytes of each payload ring; a power of two.
    pub(crate) fn ring(&self) -> usize {
        self.ring
    }
}
