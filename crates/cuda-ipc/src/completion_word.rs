//! Words in pinned memory by which streams report completion to the host.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crossrail_cuda::{Context, PinnedMemory};
use crossrail_types::{Error, ErrorKind, Result};

use crate::lock::locked;

/// Size of a page, and of the cache line that each word has to itself.
const PAGE: usize = 4096;
const LINE: usize = 64;

/// A 64-bit word in pinned memory whose value only grows: a stream writes it, the host polls it.
pub(crate) struct CompletionWord {
    page: Arc<PinnedMemory>,
    offset: usize,
}

impl CompletionWord {
    /// The address on the GPU.
    pub(crate) fn address(&self) -> u64 {
        self.page.address() + self.offset as u64
    }

    /// The current value. Everything the stream did before it wrote this value is visible afterwards.
    #[inline]
    pub(crate) fn value(&self) -> u64 {
        // SAFETY: the page lives as long as `self`, is aligned and long enough. After `WordPool::take` has initialised
        // the word, only the GPU writes it, with single 64-bit stores.
        let word = unsafe { &*self.page.as_ptr().add(self.offset).cast::<AtomicU64>() };
        word.load(Ordering::Acquire)
    }
}

/// The unused words of a GPU.
#[derive(Default)]
pub(crate) struct WordPool(Mutex<Vec<CompletionWord>>);

impl WordPool {
    /// An unused word, with whatever value its last user left.
    pub(crate) fn take(&self, context: &Context) -> Result<CompletionWord> {
        let mut words = locked(&self.0);
        if words.is_empty() {
            let page = Arc::new(PinnedMemory::new(context, PAGE)?);
            // SAFETY: the memory is new and has this length.
            unsafe { std::ptr::write_bytes(page.as_ptr(), 0, PAGE) };
            words
                .extend((0..PAGE / LINE).map(|index| CompletionWord { page: Arc::clone(&page), offset: index * LINE }));
        }
        words.pop().ok_or_else(|| Error::new(ErrorKind::Exhausted, "words", "a page without words"))
    }

    /// Returns a word that no stream will write any more.
    pub(crate) fn put_back(&self, word: CompletionWord) {
        locked(&self.0).push(word);
    }
}
