//! The memory that is transferred: host memory, aligned to a page.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};

use crossrail_types::{Error, ErrorKind, Result};

const PAGE: usize = 4096;

/// Host memory that plugins read and write while a transfer is in flight.
#[derive(Debug)]
pub struct Memory {
    ptr: *mut u8,
    layout: Layout,
    len: usize,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Memory {}

impl Memory {
    /// `len` bytes of zeros.
    ///
    /// # Errors
    /// `Exhausted`, naming the bytes.
    pub fn new(len: usize) -> Result<Memory> {
        let exhausted = || Error::new(ErrorKind::Exhausted, "net plugin", format!("no memory for {len} bytes"));
        let layout = Layout::from_size_align(len.max(1), PAGE).map_err(|_| exhausted())?;
        // SAFETY: the layout's size is not 0.
        let ptr = unsafe { alloc_zeroed(layout) };
        if ptr.is_null() { Err(exhausted()) } else { Ok(Memory { ptr, layout, len }) }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its bytes, while nothing is in flight.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: allocated with this length, and initialized; lanes borrow the memory mutably while they use it.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }

    pub(crate) fn ptr(&self) -> *mut u8 {
        self.ptr
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `new`, freed once.
        unsafe { dealloc(self.ptr, self.layout) };
    }
}
