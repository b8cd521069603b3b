//! Words in memory that a stream writes, or waits for, without a kernel.
#![allow(unsafe_code)]

use crossrail_types::{Error, ErrorKind, Result};
use cudarc::driver::sys::{CUstreamWaitValue_flags, CUstreamWriteValue_flags};

use crate::stream::Stream;

const AT_LEAST: u32 = CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
const FENCED: u32 = CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;

impl Stream {
    /// Puts in: the 32-bit word at `address` (device memory, or pinned host memory as the GPU sees it) becomes `value`.
    /// Whoever sees it there also sees what the stream did before.
    ///
    /// # Safety
    /// The word must stay valid until this is done.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for an address that is not 4-byte aligned; [`ErrorKind::Unsupported`] where the driver
    /// can't; a failed call.
    pub unsafe fn write_value32(&self, address: u64, value: u32) -> Result<()> {
        let call = "cuStreamWriteValue32";
        let write = self.value_call(call, 4, address, self.context().cuda().raw().cuStreamWriteValue32_v2)?;
        // SAFETY: the stream is alive; the caller vouches for the word.
        self.context().run("word", call, |_| unsafe { write(self.raw(), address, value, FENCED) })
    }

    /// Like [`Stream::write_value32`], for a 64-bit word; [`crate::Device::has_64bit_stream_ops`] says whether the GPU can.
    ///
    /// # Safety
    /// As there.
    ///
    /// # Errors
    /// As there, for 8 bytes.
    pub unsafe fn write_value64(&self, address: u64, value: u64) -> Result<()> {
        let call = "cuStreamWriteValue64";
        let write = self.value_call(call, 8, address, self.context().cuda().raw().cuStreamWriteValue64_v2)?;
        // SAFETY: as above.
        self.context().run("word", call, |_| unsafe { write(self.raw(), address, value, FENCED) })
    }

    /// Puts in: the stream goes on when the 32-bit word at `address` has reached `value`, in the sense that
    /// `word - value`, taken as signed, is not negative. This wait has no limit of its own: whoever puts it in sees to
    /// it that the word is written whatever happens.
    ///
    /// # Safety
    /// The word must stay valid until this is done.
    ///
    /// # Errors
    /// As [`Stream::write_value32`].
    pub unsafe fn wait_value32(&self, address: u64, value: u32) -> Result<()> {
        let call = "cuStreamWaitValue32";
        let wait = self.value_call(call, 4, address, self.context().cuda().raw().cuStreamWaitValue32_v2)?;
        // SAFETY: as above.
        self.context().run("word", call, |_| unsafe { wait(self.raw(), address, value, AT_LEAST) })
    }

    /// Like [`Stream::wait_value32`], for a 64-bit word.
    ///
    /// # Safety
    /// As there.
    ///
    /// # Errors
    /// As there, for 8 bytes.
    pub unsafe fn wait_value64(&self, address: u64, value: u64) -> Result<()> {
        let call = "cuStreamWaitValue64";
        let wait = self.value_call(call, 8, address, self.context().cuda().raw().cuStreamWaitValue64_v2)?;
        // SAFETY: as above.
        self.context().run("word", call, |_| unsafe { wait(self.raw(), address, value, AT_LEAST) })
    }

    /// The function, if driver and GPU have it and the address is one for it.
    fn value_call<F: Copy>(&self, call: &str, bytes: u64, address: u64, function: Option<F>) -> Result<F> {
        if !address.is_multiple_of(bytes) {
            let detail = format!("the word at {address:#x} is not {bytes}-byte aligned");
            return Err(Error::new(ErrorKind::Usage, "word", detail));
        }
        let function = self.context().cuda().optional("word", call, function)?;
        if bytes == 8 && !self.context().device().has_64bit_stream_ops()? {
            let detail = format!("cuda:{} has no 64-bit {call}", self.context().device().ordinal());
            return Err(Error::new(ErrorKind::Unsupported, "word", detail).with_hint("use a 32-bit word, or a kernel"));
        }
        Ok(function)
    }
}
