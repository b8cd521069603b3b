//! Memory and streams of other libraries in this process.
#![allow(unsafe_code)]

use crossrail_gpu::Devices;
use crossrail_types::{Error, Result};

use super::context::Context;
use crate::memory::Ready;

/// The GPUs; not in a forked child, where the driver that the parent has opened answers nothing of use.
fn gpus<'a>(context: &'a Context, operation: &str) -> Result<&'a Devices> {
    context.environment().origin().check(operation)?;
    Ok(context.environment().gpus())
}

impl Context {
    /// Opens a GPU, so that later calls that name its memory find it open. The first call may take seconds, because it
    /// loads the driver and creates a CUDA context.
    ///
    /// # Errors
    /// `Usage` when there is none of that number; `Unsupported` with the reason where there is no CUDA; what the
    /// driver says.
    pub fn open_gpu(&self, ordinal: u32) -> Result<()> {
        gpus(self, "open_gpu")?.device(ordinal).map(drop)
    }

    /// The GPU whose memory `address` is, by number. Any number may be asked for; nothing is read there.
    ///
    /// # Errors
    /// `Usage` when it is no GPU's; `Unsupported` with the reason where there is no CUDA.
    pub fn gpu_of(&self, address: u64) -> Result<u32> {
        gpus(self, "gpu_of")?.owner(address)
    }

    /// Calls `body` with that GPU as this thread's current one: some libraries lend memory of the current GPU only.
    ///
    /// # Errors
    /// `body`'s; as [`Context::open_gpu`].
    pub fn on_gpu<T, E: From<Error>>(
        &self,
        ordinal: u32,
        body: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        gpus(self, "on_gpu")?.device(ordinal)?.current(body)
    }
}

impl Ready {
    /// A point after everything enqueued in the stream of GPU `ordinal` so far: reached once all of that has completed.
    ///
    /// # Safety
    /// `stream` must be a live stream's handle (`torch.cuda.Stream.cuda_stream`), or 0 for the default stream.
    ///
    /// # Errors
    /// `Usage` when the stream is another GPU's, or is being captured; `Unsupported` with the reason where there is
    /// no CUDA; what the driver says.
    pub unsafe fn on_stream(context: &Context, ordinal: u32, stream: u64) -> Result<Ready> {
        // SAFETY: the caller vouches for the stream.
        unsafe { gpus(context, "on_stream")?.device(ordinal)?.stream_point(stream) }.map(Ready)
    }

    /// Runs `ask`, which lets another library enqueue work before a stream of ours on GPU `ordinal`, given by its raw
    /// handle, as DLPack's exporters do. Returns `ask`'s result, and a point to wait for that covers that work only.
    /// The GPU is this thread's current one meanwhile.
    ///
    /// # Errors
    /// `ask`'s; `Usage` when that work is being captured; as [`Context::open_gpu`].
    pub fn ordered<T, E: From<Error>>(
        context: &Context,
        ordinal: u32,
        ask: impl FnOnce(u64) -> std::result::Result<T, E>,
    ) -> std::result::Result<(T, Ready), E> {
        let (answer, point) = gpus(context, "ordered")?.device(ordinal)?.ordered(ask)?;
        Ok((answer, Ready(point)))
    }
}
