//! Counts a batch's tokens per rank and expert before a dispatch. Needs a GPU, but no buffer.
#![allow(unsafe_code)]

use crossrail_cuda::{Capture, Context, Stream};
use crossrail_kernels::ep::{EpLayoutArgs, LayoutKernel};
use crossrail_types::Result;

use crate::{kernel_cache, options};

/// Counts tokens by the ranks and experts that they go to. Usable from any thread.
pub struct TokenLayout {
    cuda: Context,
    kernel: LayoutKernel,
}

impl TokenLayout {
    /// On this GPU. Compiles the kernel unless it is in the cache folder.
    ///
    /// # Errors
    /// `Unsupported` without CUDA or NVRTC; a failed call.
    pub fn new(context: &crossrail::Context, ordinal: u32) -> Result<TokenLayout> {
        let cuda = options::context(ordinal)?;
        let kernel = kernel_cache::layout(&cuda, context.settings())?;
        Ok(TokenLayout { cuda, kernel })
    }

    /// Whether it supports this number of experts and ranks.
    pub fn takes(experts: u32, ranks: u32) -> bool {
        LayoutKernel::takes(experts, ranks)
    }

    /// Whether `stream` is being captured in a graph.
    ///
    /// # Safety
    /// `stream` must be a live stream's handle, or 0.
    ///
    /// # Errors
    /// As [`crate::DeviceBuffer::is_capturing`].
    pub unsafe fn is_capturing(&self, stream: u64) -> Result<bool> {
        // SAFETY: the caller vouches for the stream.
        let stream = unsafe { Stream::borrow(&self.cuda, stream)? };
        Ok(stream.capture()? != Capture::None)
    }

    /// Enqueues a count in `stream`.
    ///
    /// # Safety
    /// `stream` must be a live stream's handle, or 0; for addresses see [`LayoutKernel::launch`].
    ///
    /// # Errors
    /// As there.
    pub unsafe fn count(&self, args: &EpLayoutArgs, stream: u64) -> Result<()> {
        let _entered = self.cuda.enter()?;
        // SAFETY: the caller vouches for the stream and the addresses.
        unsafe { self.kernel.launch(&Stream::borrow(&self.cuda, stream)?, args) }
    }
}

impl std::fmt::Debug for TokenLayout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TokenLayout({:?})", self.cuda)
    }
}
