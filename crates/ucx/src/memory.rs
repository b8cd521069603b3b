//! Memory of a lane that UCX refers to by address.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

/// Alignment of the memory: a page, for NICs.
const ALIGN: usize = 4096;

/// Zeroed memory at an address that does not change. Its owner keeps it until UCX no longer refers to it.
pub(crate) struct Memory {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain bytes, which the owner alone touches, beside UCX's transfers that the owner began.
unsafe impl Send for Memory {}

impl Memory {
    /// `len` bytes, of which no page is touched yet; `len` is not 0.
    pub(crate) fn new(len: usize) -> Memory {
        // The lengths are constants of this crate, far below the limit.
        let layout = Layout::from_size_align(len.max(1), ALIGN).unwrap_or(Layout::new::<u8>());
        // SAFETY: the size is not 0.
        let ptr = unsafe { alloc_zeroed(layout) };
        let Some(ptr) = NonNull::new(ptr) else { handle_alloc_error(layout) };
        Memory { ptr, layout }
    }

    /// The byte at `offset`, from which `len` bytes lie inside.
    ///
    /// # Panics
    /// If they do not.
    pub(crate) fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.layout.size()), "{len} bytes at {offset}");
        // SAFETY: inside the allocation by the check.
        unsafe { self.ptr.as_ptr().add(offset) }
    }

    /// Copies `bytes` to `offset`.
    pub(crate) fn write(&mut self, offset: usize, bytes: &[u8]) {
        // SAFETY: `at` checks the range; `bytes` is other memory.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at(offset, bytes.len()), bytes.len()) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) }
    }
}
