//! Memory of the caller that an operation reads or writes.
#![allow(unsafe_code)]

use std::any::Any;
use std::sync::Arc;

use crossrail_types::{Error, ErrorKind, Result};

type Keep = Option<Arc<dyn Any + Send + Sync>>;

/// Bytes that an operation reads, kept alive until it is finished.
#[derive(Clone)]
pub struct Tensor {
    ptr: *const u8,
    len: usize,
    _keep: Keep,
}

// SAFETY: a Tensor keeps (or, for `raw`, was promised) memory that any thread may read until it is dropped.
unsafe impl Send for Tensor {}
// SAFETY: as above; it is only read.
unsafe impl Sync for Tensor {}

impl Tensor {
    /// Memory of another owner.
    ///
    /// # Safety
    /// `ptr` is valid for reading `len` bytes until `keep` is dropped or, without it, until the operation is
    /// finished, and is not written meanwhile.
    pub unsafe fn raw(ptr: *const u8, len: usize, keep: Keep) -> Tensor {
        Tensor { ptr, len, _keep: keep }
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the size is zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of `len` bytes at offset `at`.
    pub(crate) fn at(&self, at: usize, len: usize) -> *const u8 {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len), "{len} bytes at {at} of {}", self.len);
        self.ptr.wrapping_add(at)
    }

    /// All of it.
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: valid for reading, and written by nobody, by the contract of `raw`.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }

    /// Its elements, read one by one: alignment does not matter.
    pub(crate) fn words<const N: usize>(&self) -> impl Iterator<Item = [u8; N]> + '_ {
        self.bytes().as_chunks::<N>().0.iter().copied()
    }
}

impl<T: Copy + Send + Sync + 'static> From<Vec<T>> for Tensor {
    /// Elements without padding (numbers).
    fn from(elements: Vec<T>) -> Tensor {
        let keep = Arc::new(elements);
        Tensor { ptr: keep.as_ptr().cast(), len: size_of_val(&keep[..]), _keep: Some(keep) }
    }
}

/// Bytes that an operation writes, kept alive until it is finished.
pub struct TensorMut {
    ptr: *mut u8,
    len: usize,
    _keep: Keep,
}

// SAFETY: as for Tensor; by the contract of `raw` the memory is not accessed otherwise.
unsafe impl Send for TensorMut {}
// SAFETY: as above.
unsafe impl Sync for TensorMut {}

impl TensorMut {
    /// Memory of another owner.
    ///
    /// # Safety
    /// `ptr` is valid for writing `len` bytes until `keep` is dropped or, without it, until the operation is
    /// finished, and is not accessed otherwise meanwhile.
    pub unsafe fn raw(ptr: *mut u8, len: usize, keep: Keep) -> TensorMut {
        TensorMut { ptr, len, _keep: keep }
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the size is zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of `len` bytes at offset `at`.
    pub(crate) fn at(&self, at: usize, len: usize) -> *mut u8 {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len), "{len} bytes at {at} of {}", self.len);
        self.ptr.wrapping_add(at)
    }
}

/// What a rank dispatches.
#[derive(Clone)]
pub struct Input {
    /// bf16 `[tokens, hidden]`.
    pub x: Tensor,
    /// i64 `[tokens, topk]`: experts of each token; -1: none. Each selection counts, also of the same expert.
    pub topk_idx: Tensor,
    /// f32 `[tokens, topk]`.
    pub topk_weights: Option<Tensor>,
}

impl Input {
    /// The number of tokens, once the lengths are known to agree.
    pub(crate) fn tokens(&self, hidden: usize, topk: usize, most: usize) -> Result<usize> {
        let wrong = |text: String| Err(Error::new(ErrorKind::Usage, "dispatch", text));
        if !self.topk_idx.len().is_multiple_of(8 * topk) {
            return wrong(format!("topk_idx has {} bytes, which are no i64 [tokens, {topk}]", self.topk_idx.len()));
        }
        let tokens = self.topk_idx.len() / (8 * topk);
        if self.x.len() != tokens * hidden * 2 {
            return wrong(format!(
                "x: expected {} bytes, bf16 [{tokens}, {hidden}], got {}",
                tokens * hidden * 2,
                self.x.len()
            ));
        }
        if let Some(weights) = &self.topk_weights
            && weights.len() != tokens * topk * 4
        {
            return wrong(format!(
                "topk_weights: expected {} bytes, f32 [{tokens}, {topk}], got {}",
                tokens * topk * 4,
                weights.len()
            ));
        }
        if tokens > most {
            return wrong(format!("{tokens} tokens are more than max_tokens_per_rank, {most}"));
        }
        Ok(tokens)
    }
}
