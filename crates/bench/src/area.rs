//! The memory that a bench moves.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::sync::Arc;

use crossrail::{Buffer, Context, Memory};
use crossrail_types::{Error, ErrorKind, Result};

use crate::MemoryKind;
use crate::pattern;

const PAGE: usize = 4096;

/// Page-aligned memory of one kind. Its bytes are only ever copied in and out, never referenced: the peer may
/// write them.
pub(crate) struct Area {
    ptr: *mut u8,
    len: usize,
    owner: Owner,
}

enum Owner {
    Shared(Memory),
    Ordinary(Arc<dyn Any + Send + Sync>),
}

/// Heap memory, given back when the last operation on it is finished.
struct Heap {
    ptr: *mut u8,
    layout: Layout,
}

// SAFETY: plain memory; it is touched through `Area` and by the engine, not through this owner.
unsafe impl Send for Heap {}
// SAFETY: as above.
unsafe impl Sync for Heap {}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `Area::new`, freed once, here.
        unsafe { dealloc(self.ptr, self.layout) };
    }
}

impl Area {
    pub(crate) fn new(context: &Context, kind: MemoryKind, len: usize) -> Result<Area> {
        match kind {
            MemoryKind::Shared => {
                let memory = context.alloc(len.max(1))?;
                Ok(Area { ptr: memory.ptr(), len, owner: Owner::Shared(memory) })
            }
            MemoryKind::Ordinary => {
                let exhausted = || Error::new(ErrorKind::Exhausted, "bench", format!("no memory for {len} bytes"));
                let layout = Layout::from_size_align(len.max(1), PAGE).map_err(|_| exhausted())?;
                // SAFETY: the layout's size is not 0.
                let ptr = unsafe { alloc_zeroed(layout) };
                if ptr.is_null() {
                    return Err(exhausted());
                }
                Ok(Area { ptr, len, owner: Owner::Ordinary(Arc::new(Heap { ptr, layout })) })
            }
        }
    }

    /// All of it, for one operation. Several receives of the same bytes into it may be under way at once: only the
    /// engine writes then, and nothing reads.
    #[inline]
    pub(crate) fn buffer(&self) -> Buffer {
        match &self.owner {
            // SAFETY: `ptr` is valid for `len` bytes while the owner, which goes along, lives; the loops do not
            // touch it while an operation is under way.
            Owner::Ordinary(heap) => unsafe { Buffer::raw(self.ptr, self.len, Some(heap.clone())) },
            Owner::Shared(memory) if memory.len() == self.len => memory.into(),
            // SAFETY: as above; only for length 0, which touches nothing.
            Owner::Shared(_) => unsafe { Buffer::raw(self.ptr, self.len, None) },
        }
    }

    /// Writes the pattern of `seed` into it. No operation may be under way.
    pub(crate) fn fill(&mut self, seed: u64) -> Result<()> {
        let mut block = [0; PAGE];
        for offset in (0..self.len).step_by(PAGE) {
            let block = &mut block[..PAGE.min(self.len - offset)];
            pattern::fill(seed, offset, block);
            // SAFETY: in bounds; a copy, since the memory may be shared with the peer.
            unsafe { std::ptr::copy_nonoverlapping(block.as_ptr(), self.ptr.add(offset), block.len()) };
        }
        Ok(())
    }

    /// Writes zeros into it. No operation may be under way.
    pub(crate) fn clear(&mut self) -> Result<()> {
        // SAFETY: in bounds, and no operation is under way (callers' rule).
        unsafe { std::ptr::write_bytes(self.ptr, 0, self.len) };
        Ok(())
    }

    /// Checks that it holds the pattern of `seed`.
    pub(crate) fn verify(&self, seed: u64) -> Result<()> {
        let mut block = [0; PAGE];
        for offset in (0..self.len).step_by(PAGE) {
            let block = &mut block[..PAGE.min(self.len - offset)];
            // SAFETY: in bounds; a copy, since the memory may be shared with the peer.
            unsafe { std::ptr::copy_nonoverlapping(self.ptr.add(offset), block.as_mut_ptr(), block.len()) };
            pattern::verify(seed, offset, block)?;
        }
        Ok(())
    }

    /// Its first `len` bytes.
    pub(crate) fn copy_out(&self, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len.min(self.len)];
        // SAFETY: in bounds; a copy, since the memory may be shared with the peer.
        unsafe { std::ptr::copy_nonoverlapping(self.ptr, bytes.as_mut_ptr(), bytes.len()) };
        Ok(bytes)
    }
}
