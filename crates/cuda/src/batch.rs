//! Many operations of a stream in few calls of the driver.
#![allow(unsafe_code)]

use crossrail_types::Result;
use cudarc::driver::sys::{CUstreamBatchMemOpParams, CUstreamBatchMemOpType};

use crate::raw::CopyAttributes;
use crate::stream::Stream;
use crate::stream_ops::FENCED;

/// Enqueues many operations in a stream.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a>(pub &'a Stream);

/// Operations of one call.
const BATCH: usize = 128;

/// The operation that writes a word: its address and value.
fn written((address, value): &(u64, u64)) -> CUstreamBatchMemOpParams {
    let mut operation = CUstreamBatchMemOpParams { pad: [0; 6] };
    operation.writeValue.operation = CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_64;
    operation.writeValue.address = *address;
    operation.writeValue.__bindgen_anon_1.value64 = *value;
    operation.writeValue.flags = FENCED;
    operation
}

impl Batch<'_> {
    /// Enqueues writes of 64-bit words, each an address and a value, in order: as [`Stream::write_value64`] of each, in few
    /// calls.
    ///
    /// # Safety
    /// The words must stay valid until the writes have completed.
    ///
    /// # Errors
    /// As [`Stream::write_value64`]; some of the writes may have been enqueued.
    pub unsafe fn store(&self, words: &[(u64, u64)]) -> Result<()> {
        let (call, raw) = ("cuStreamBatchMemOp", self.0.context().cuda().raw());
        let Some(batch) = raw.cuStreamBatchMemOp_v2.filter(|_| words.len() > 1) else {
            // SAFETY: the caller guarantees the words.
            return words.iter().try_for_each(|(address, value)| unsafe { self.0.write_value64(*address, *value) });
        };
        // One question to the driver: for an address that is not aligned, if there is one.
        if let Some((address, _)) = words.iter().find(|(address, _)| address % 8 != 0).or(words.first()) {
            self.0.value_call(call, 8, *address, Some(()))?;
        }
        for words in words.chunks(BATCH) {
            let mut operations: Vec<CUstreamBatchMemOpParams> = words.iter().map(written).collect();
            let (count, first) = (operations.len() as u32, operations.as_mut_ptr());
            // SAFETY: the stream is alive, the array has `count` entries; the caller guarantees the words.
            self.0.context().run("word", call, |_| unsafe { batch(self.0.raw(), count, first, 0) })?;
        }
        Ok(())
    }

    /// Enqueues copies between GPU memory and pinned host memory, each a destination, a source and a length in bytes: in
    /// one call where the driver can, which copy engines serve. They have no order among themselves.
    ///
    /// # Safety
    /// As [`Stream::copy`], for each.
    ///
    /// # Errors
    /// A failed call; some of the copies may have been enqueued.
    pub unsafe fn copy(&self, copies: &[(u64, u64, usize)]) -> Result<()> {
        let Some(batch) = self.0.context().cuda().raw().cuMemcpyBatchAsync_v2.filter(|_| copies.len() > 1) else {
            // SAFETY: the caller guarantees the ranges.
            return copies.iter().try_for_each(|(to, from, len)| unsafe { self.0.copy(*to, *from, *len) });
        };
        let mut to: Vec<u64> = copies.iter().map(|(to, _, _)| *to).collect();
        let mut from: Vec<u64> = copies.iter().map(|(_, from, _)| *from).collect();
        let mut len: Vec<usize> = copies.iter().map(|(_, _, len)| *len).collect();
        let (mut attributes, mut first) = (CopyAttributes { order: 1, flags: 1, ..CopyAttributes::default() }, 0);
        // SAFETY: three arrays of that many entries, and one attribute that applies from the first on; the caller
        // guarantees the ranges.
        self.0.context().run("copy", "cuMemcpyBatchAsync", |_| unsafe {
            batch(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                len.as_mut_ptr(),
                copies.len(),
                &mut attributes,
                &mut first,
                1,
                self.0.raw(),
            )
        })
    }
}
