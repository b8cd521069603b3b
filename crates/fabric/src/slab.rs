//! Memory that the provider reads or writes at any time: pages of their own, which this end touches by copies only.
#![allow(unsafe_code)]

use std::num::NonZeroUsize;
use std::ptr::NonNull;

use crossrail_types::{Error, Result};
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// Pages, zeroed at first. No references to them exist: the provider, and through it the peer, may write them.
pub(crate) struct Slab {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory; accesses go through `&self` with copies of raw bytes.
unsafe impl Send for Slab {}

impl Slab {
    pub(crate) fn new(len: usize) -> Result<Slab> {
        let len = len.max(1);
        let size = NonZeroUsize::MIN.saturating_add(len - 1);
        let (access, flags) = (ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_PRIVATE);
        // SAFETY: new pages.
        let start = unsafe { mmap_anonymous(None, size, access, flags) };
        let start = start.map_err(|errno| Error::io("connect", "mmap", &errno.into()))?;
        Ok(Slab { start: start.cast(), len })
    }

    pub(crate) fn address(&self) -> u64 {
        self.start.as_ptr().addr() as u64
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Copies bytes to `at`; what does not fit is left out.
    pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
        if at <= self.len {
            let count = bytes.len().min(self.len - at);
            // SAFETY: inside the pages.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.as_ptr().add(at), count) }
        }
    }

    /// Copies from `at` on.
    pub(crate) fn read(&self, at: usize, into: &mut [u8]) {
        if at <= self.len {
            let count = into.len().min(self.len - at);
            // SAFETY: inside the pages.
            unsafe { std::ptr::copy_nonoverlapping(self.start.as_ptr().add(at), into.as_mut_ptr(), count) }
        }
    }

    /// Copies foreign memory to `at`; what does not fit is left out.
    ///
    /// # Safety
    /// `from` must be readable for `len` bytes.
    pub(crate) unsafe fn fill(&self, at: usize, from: *const u8, len: usize) {
        if at <= self.len {
            let count = len.min(self.len - at);
            // SAFETY: inside the pages; readable, as the caller guarantees.
            unsafe { std::ptr::copy_nonoverlapping(from, self.start.as_ptr().add(at), count) }
        }
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`; whoever registered it has ended that.
        let _ = unsafe { munmap(self.start.cast(), self.len) };
    }
}
