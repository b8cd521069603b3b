//! The control segment of a lane, as it lies in memory.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicU64;

use crate::memory::{Mapping, PAGE, sealed_memfd, verified_size};

/// Slots per direction.
pub(crate) const SLOTS: usize = 1024;
/// Payload bytes that fit into a slot.
pub(crate) const INLINE: usize = 24;
/// Cursors of direct copies per side.
pub(crate) const CURSORS: usize = 64;

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
    /// What that side sleeps for; 0: it is awake.
    pub(crate) sleeping: [Line; 2],
    pub(crate) cursors: [[Line; CURSORS]; 2],
    pub(crate) slots: [[Slot; SLOTS]; 2],
}

const _: () = assert!(size_of::<Slot>() == 64 && size_of::<Fixed>().is_multiple_of(PAGE));

/// A mapped control segment: [`Fixed`], then the two rings of payload bytes.
pub(crate) struct Control {
    map: Mapping,
    ring: usize,
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
        Ok((Control { map, ring }, fd))
    }

    /// The peer's, once its seals and size are as they must be.
    pub(crate) fn open(fd: &OwnedFd, ring: usize) -> Result<Control, String> {
        let size = verified_size(fd)?;
        if size != Control::size(ring) {
            return Err(format!("a control segment of {size} bytes where {} were agreed", Control::size(ring)));
        }
        let map = Mapping::new(fd.as_fd(), size).map_err(|e| format!("mmap of the control segment: {e}"))?;
        Ok(Control { map, ring })
    }

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
