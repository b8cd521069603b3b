//! The memory that a bench moves.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::sync::Arc;

use crossrail::{Buffer, Context, Memory, Place};
use crossrail_types::{Error, ErrorKind, Result};

use crate::pattern;

const PAGE: usize = 4096;
const GPU_BLOCK: usize = 4 << 20;

/// What memory a bench moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// From `Context::alloc`: a peer on this machine maps it.
    Shared,
    /// Plain heap memory.
    Ordinary,
    /// Memory of the GPU with this ordinal, from `Context::alloc_on`.
    Gpu(u32),
}

impl MemoryKind {
    /// The memory for small messages beside the data: GPU memory would cost a transfer of its own.
    pub(crate) fn beside(self) -> MemoryKind {
        match self {
            MemoryKind::Gpu(_) => MemoryKind::Ordinary,
            host => host,
        }
    }
}

impl std::str::FromStr for MemoryKind {
    type Err = Error;

    /// `shared`, `ordinary`, or a GPU as `cuda:0`; `Usage` for anything else.
    fn from_str(text: &str) -> Result<MemoryKind> {
        let unknown = || {
            Error::new(ErrorKind::Usage, "bench", format!("no memory {text:?}")).with_hint("shared, ordinary or cuda:0")
        };
        match text {
            "shared" => Ok(MemoryKind::Shared),
            "ordinary" => Ok(MemoryKind::Ordinary),
            gpu => match gpu.parse() {
                Ok(Place::Gpu(ordinal)) => Ok(MemoryKind::Gpu(ordinal)),
                Ok(Place::Host) | Err(_) => Err(unknown()),
            },
        }
    }
}

/// Memory of one kind, aligned to a page. Its bytes are only ever copied in and out, never referenced: the peer may
/// write them, and a GPU's are elsewhere.
pub(crate) struct Area {
    ptr: *mut u8,
    len: usize,
    owner: Owner,
}

enum Owner {
    Shared(Memory),
    Ordinary(Arc<dyn Any + Send + Sync>),
    Gpu(Memory),
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
            MemoryKind::Gpu(ordinal) => {
                let memory = context.alloc_on(len.max(1), Place::Gpu(ordinal))?;
                Ok(Area { ptr: memory.ptr(), len, owner: Owner::Gpu(memory) })
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

    /// All of it, for one operation. Several receives of the same bytes into it may be in flight at once: only the
    /// engine writes then, and nothing reads.
    #[inline]
    pub(crate) fn buffer(&self) -> Buffer {
        match &self.owner {
            // SAFETY: `ptr` is valid for `len` bytes while the owner, passed along, lives; the loops do not access it
            // while an operation is in flight.
            Owner::Ordinary(heap) => unsafe { Buffer::raw(self.ptr, self.len, Some(heap.clone())) },
            Owner::Shared(memory) | Owner::Gpu(memory) if memory.len() == self.len => memory.into(),
            // Of length 0, which touches nothing.
            Owner::Shared(_) | Owner::Gpu(_) => Vec::new().into(),
        }
    }

    /// Writes the pattern of `seed` into it. No operation may be in flight.
    pub(crate) fn fill(&mut self, seed: u64) -> Result<()> {
        let mut block = self.block();
        for offset in (0..self.len).step_by(block.len()) {
            let len = block.len().min(self.len - offset);
            let block = &mut block[..len];
            pattern::fill(seed, offset, block);
            self.put(offset, block)?;
        }
        Ok(())
    }

    /// Writes zeros into it. No operation may be in flight.
    pub(crate) fn clear(&mut self) -> Result<()> {
        let block = self.block();
        for offset in (0..self.len).step_by(block.len()) {
            self.put(offset, &block[..block.len().min(self.len - offset)])?;
        }
        Ok(())
    }

    /// Checks that it holds the pattern of `seed`, every byte.
    pub(crate) fn verify(&self, seed: u64) -> Result<()> {
        let mut block = self.block();
        for offset in (0..self.len).step_by(block.len()) {
            let len = block.len().min(self.len - offset);
            let block = &mut block[..len];
            self.take(offset, block)?;
            pattern::verify(seed, offset, block)?;
        }
        Ok(())
    }

    /// Its first `len` bytes.
    pub(crate) fn copy_out(&self, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len.min(self.len)];
        self.take(0, &mut bytes)?;
        Ok(bytes)
    }

    /// Buffer for one copy: one page, which stays in the cache; larger for a GPU, to save calls.
    fn block(&self) -> Vec<u8> {
        vec![0; if matches!(self.owner, Owner::Gpu(_)) { GPU_BLOCK } else { PAGE }]
    }

    /// `bytes` must lie within it from `offset` on.
    fn put(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        match &self.owner {
            Owner::Gpu(memory) => memory.fill_from(offset, bytes)?,
            // SAFETY: in bounds, as the callers see to; a copy, since the memory may be shared with the peer.
            _ => unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.ptr.add(offset), bytes.len()) },
        }
        Ok(())
    }

    /// As [`put`](Area::put), the other way.
    fn take(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        match &self.owner {
            Owner::Gpu(memory) => memory.copy_to(offset, bytes)?,
            // SAFETY: as for `put`.
            _ => unsafe { std::ptr::copy_nonoverlapping(self.ptr.add(offset), bytes.as_mut_ptr(), bytes.len()) },
        }
        Ok(())
    }
}
