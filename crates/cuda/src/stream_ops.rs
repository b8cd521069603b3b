//! Stream memory operations: words that a stream writes or waits for without a kernel.
#![allow(unsafe_code)]

use crossrail_types::{Error, ErrorKind, Result};
use cudarc::driver::sys::{CUstreamWaitValue_flags, CUstreamWriteValue_flags};

use crate::stream::Stream;

const AT_LEAST: u32 = CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
pub(crate) const FENCED: u32 = CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;

impl Stream {
    /// Enqueues a write of `value` to the 64-bit word at `address`: device memory, or the GPU's address of pinned host
    /// memory. Requires [`crate::Device::has_64bit_stream_ops`].
    ///
    /// The write is a release: a reader that sees `value` also sees everything the stream did before it.
    ///
    /// # Safety
    /// The word must stay valid until the write has completed.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for an address that is not 8-byte aligned; [`ErrorKind::Unsupported`] if the driver or the
    /// GPU lacks the call; a failed call.
    pub unsafe fn write_value64(&self, address: u64, value: u64) -> Result<()> {
        let call = "cuStreamWriteValue64";
        let write = self.value_call(call, 8, address, self.context().cuda().raw().cuStreamWriteValue64_v2)?;
        // SAFETY: the stream is alive; the caller guarantees the word.
        self.context().run("word", call, |_| unsafe { write(self.raw(), address, value, FENCED) })
    }

    /// Enqueues a wait until the 32-bit word at `address` has reached `value`, that is until `word - value`, as a
    /// signed number, is not negative.
    ///
    /// The wait has no timeout. The caller must ensure that the word is written whatever happens.
    ///
    /// # Safety
    /// The word must stay valid until the wait has completed.
    ///
    /// # Errors
    /// As [`Stream::write_value64`], with 4-byte alignment; every GPU has this call.
    pub unsafe fn wait_value32(&self, address: u64, value: u32) -> Result<()> {
        let call = "cuStreamWaitValue32";
        let wait = self.value_call(call, 4, address, self.context().cuda().raw().cuStreamWaitValue32_v2)?;
        // SAFETY: as above.
        self.context().run("word", call, |_| unsafe { wait(self.raw(), address, value, AT_LEAST) })
    }

    /// The function, provided that the driver and the GPU support it and the address is aligned.
    pub(crate) fn value_call<F: Copy>(&self, call: &str, bytes: u64, address: u64, function: Option<F>) -> Result<F> {
        if !address.is_multiple_of(bytes) {
            let detail = format!("the word at {address:#x} is not {bytes}-byte aligned");
            return Err(Error::new(ErrorKind::Usage, "word", detail));
        }
        let function = self.context().cuda().optional("word", call, function)?;
        if bytes == 8 && !self.context().device().has_64bit_stream_ops()? {
            let detail = format!("cuda:{} does not support {call}", self.context().device().ordinal());
            return Err(Error::new(ErrorKind::Unsupported, "word", detail).with_hint("use a 32-bit word, or a kernel"));
        }
        Ok(function)
    }
}
