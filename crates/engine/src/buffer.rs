//! What an operation reads from or writes to.
#![allow(unsafe_code)]

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use crossrail_shm::Segment;
use crossrail_types::{Error, ErrorKind, Result};

/// Memory from [`Context::alloc`](crate::Context::alloc): peers on the same machine map it, so transfers to
/// them are one plain copy without a system call. Zeroed at first; freed when the last clone (and the last
/// request that uses it) is gone.
///
/// A peer may write into it at any time while it is registered or receiving, so Rust references to its bytes
/// are never handed out; use [`Memory::copy_to`] and [`Memory::fill_from`].
#[derive(Clone, Debug)]
pub struct Memory(pub(crate) Segment);

impl Memory {
    /// First byte.
    pub fn ptr(&self) -> *mut u8 {
        self.0.ptr()
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether it holds no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies `bytes` to `offset`. Errors with `Usage` when they do not fit.
    pub fn fill_from(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        check(self.len(), offset, bytes.len(), "fill_from")?;
        // SAFETY: in bounds by the check; the segment stays mapped while `self` lives.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.ptr().add(offset), bytes.len()) };
        Ok(())
    }

    /// Copies from `offset` into `bytes`. Errors with `Usage` when the range is not there.
    pub fn copy_to(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        check(self.len(), offset, bytes.len(), "copy_to")?;
        // SAFETY: in bounds by the check; the segment stays mapped while `self` lives.
        unsafe { std::ptr::copy_nonoverlapping(self.ptr().add(offset), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// The part `range` of it, as an operation's buffer. Errors with `Usage` when the range is not there.
    pub fn slice(&self, range: Range<usize>) -> Result<Buffer> {
        let len =
            range.end.checked_sub(range.start).ok_or_else(|| usage("slice", "the range ends before it starts"))?;
        check(self.len(), range.start, len, "slice")?;
        // SAFETY: in bounds by the check.
        let ptr = unsafe { self.ptr().add(range.start) };
        Ok(Buffer { ptr, len, keep: Keep::Memory(self.clone()) })
    }
}

/// Whether `len` bytes at `offset` are inside a memory of `whole` bytes.
pub(crate) fn check(whole: usize, offset: usize, len: usize, operation: &str) -> Result<()> {
    match offset.checked_add(len) {
        Some(end) if end <= whole => Ok(()),
        _ => Err(usage(operation, &format!("{len} bytes at {offset} of a memory of {whole} bytes"))),
    }
}

fn usage(operation: &str, detail: &str) -> Error {
    Error::new(ErrorKind::Usage, operation, detail)
}

/// Whatever keeps an operation's bytes alive until it is finished.
pub(crate) enum Keep {
    Nothing,
    Memory(#[allow(dead_code)] Memory),
    Vec(Vec<u8>),
    Shared(#[allow(dead_code)] Arc<dyn Any + Send + Sync>),
}

/// The bytes of one operation, kept alive until the operation is finished.
pub struct Buffer {
    pub(crate) ptr: *mut u8,
    pub(crate) len: usize,
    pub(crate) keep: Keep,
}

// SAFETY: a Buffer owns (or, for `raw`, was promised) memory that any thread may touch until it is dropped.
unsafe impl Send for Buffer {}

impl Buffer {
    /// Memory owned by somebody else.
    ///
    /// # Safety
    /// `ptr` must be valid for `len` bytes, for writing if the operation receives, until `keep` is dropped or,
    /// without `keep`, until the operation is finished; and nobody may write to it while it is sent, nor touch
    /// it while it is received into.
    pub unsafe fn raw(ptr: *mut u8, len: usize, keep: Option<Arc<dyn Any + Send + Sync>>) -> Buffer {
        Buffer { ptr, len, keep: keep.map_or(Keep::Nothing, Keep::Shared) }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl From<&Memory> for Buffer {
    fn from(memory: &Memory) -> Buffer {
        Buffer { ptr: memory.ptr(), len: memory.len(), keep: Keep::Memory(memory.clone()) }
    }
}

impl From<Vec<u8>> for Buffer {
    fn from(mut bytes: Vec<u8>) -> Buffer {
        Buffer { ptr: bytes.as_mut_ptr(), len: bytes.len(), keep: Keep::Vec(bytes) }
    }
}

impl From<Box<[u8]>> for Buffer {
    fn from(bytes: Box<[u8]>) -> Buffer {
        Vec::from(bytes).into()
    }
}
