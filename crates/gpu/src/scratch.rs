//! Host memory for the bytes of short messages from and to GPU memory.
#![allow(unsafe_code)]

use std::any::Any;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Bytes of a block: those of the longest message that goes with its first frame.
const BLOCK: usize = 64 << 10;
/// Bytes of all blocks.
pub(crate) const BLOCKS_LEN: usize = BLOCK * u32::BITS as usize / 2;

/// Pinned memory that is lent block by block.
pub(crate) struct Blocks {
    /// The first byte. Its provenance is exposed.
    base: usize,
    /// A bit for each block that is free.
    free: AtomicU32,
    retired: AtomicBool,
    /// Holds the memory.
    _keep: Arc<dyn Any + Send + Sync>,
}

impl Blocks {
    /// Allocates blocks from the [`BLOCKS_LEN`] bytes at `base`, which `keep` owns and nothing else uses.
    pub(crate) fn new(base: *mut u8, keep: Arc<dyn Any + Send + Sync>) -> Arc<Blocks> {
        let free = u32::MAX >> (u32::BITS as usize - BLOCKS_LEN / BLOCK);
        let (base, free, retired) = (base.expose_provenance(), AtomicU32::new(free), AtomicBool::new(false));
        Arc::new(Blocks { base, free, retired, _keep: keep })
    }

    /// Whether these are bytes of a block.
    pub(crate) fn hold(&self, bytes: &[u8]) -> bool {
        (self.base..self.base + BLOCKS_LEN).contains(&bytes.as_ptr().addr())
    }

    /// Stops allocating blocks: a copy has hung, so the GPU may still write to a block after it is freed.
    pub(crate) fn retire(&self) {
        self.retired.store(true, Ordering::Relaxed);
    }

    /// Memory for `len` bytes; `None` when it is more than a block has, or none is free.
    pub(crate) fn lend(self: &Arc<Blocks>, len: usize) -> Option<Scratch> {
        if len > BLOCK || self.retired.load(Ordering::Relaxed) {
            return None;
        }
        let take = |free: u32| (free != 0).then(|| free & (free - 1));
        let free = self.free.fetch_update(Ordering::Acquire, Ordering::Relaxed, take).ok()?;
        Some(Scratch { memory: Memory::Block(self.clone(), free.trailing_zeros()), len })
    }
}

/// Host memory for the bytes of one message: pinned where a block was free, so that the GPU copies from or to it without
/// another copy in between. Its contents are undefined at first.
pub struct Scratch {
    memory: Memory,
    len: usize,
}

enum Memory {
    Block(Arc<Blocks>, u32),
    Plain(Box<[u8]>),
}

impl Scratch {
    pub(crate) fn plain(len: usize) -> Scratch {
        Scratch { memory: Memory::Plain(vec![0; len].into()), len }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Memory::Block(blocks, at) = &self.memory {
            blocks.free.fetch_or(1 << at, Ordering::Release);
        }
    }
}

impl Deref for Scratch {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.memory {
            Memory::Block(blocks, at) => {
                let ptr = std::ptr::with_exposed_provenance(blocks.base + *at as usize * BLOCK);
                // SAFETY: inside the memory that `blocks` holds, initialised by whoever made it, and lent to this value
                // alone.
                unsafe { std::slice::from_raw_parts(ptr, self.len) }
            }
            Memory::Plain(bytes) => bytes,
        }
    }
}

impl DerefMut for Scratch {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.memory {
            Memory::Block(blocks, at) => {
                let ptr = std::ptr::with_exposed_provenance_mut(blocks.base + *at as usize * BLOCK);
                // SAFETY: as above.
                unsafe { std::slice::from_raw_parts_mut(ptr, self.len) }
            }
            Memory::Plain(bytes) => bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks() -> Arc<Blocks> {
        let memory: Arc<Box<[u8]>> = Arc::new(vec![0; BLOCKS_LEN].into());
        Blocks::new(memory.as_ptr().cast_mut(), memory)
    }

    #[test]
    fn blocks_are_lent_once_and_given_back() {
        let blocks = blocks();
        let mut all: Vec<Scratch> = std::iter::from_fn(|| blocks.lend(BLOCK)).collect();
        assert_eq!(all.len(), BLOCKS_LEN / BLOCK);
        for (value, scratch) in (0..).zip(&mut all) {
            assert!(blocks.hold(scratch));
            scratch.fill(value);
        }
        assert!((0..).zip(&all).all(|(value, scratch)| scratch.iter().all(|byte| *byte == value)), "blocks overlap");
        drop(all.swap_remove(3));
        assert!(blocks.lend(1).is_some_and(|one| one.len() == 1));
        assert!(blocks.lend(BLOCK + 1).is_none() && !blocks.hold(&Scratch::plain(BLOCK + 1)));
    }

    #[test]
    fn blocks_that_are_retired_are_not_lent_again() {
        let blocks = blocks();
        let lent = blocks.lend(8);
        blocks.retire();
        drop(lent);
        assert!(blocks.lend(8).is_none());
    }
}
