//! The kernel that counts a batch's tokens by where they go. It is the same for all shapes.
#![allow(unsafe_code)]

use std::time::Duration;

use crossrail_cuda::nvrtc::Compiler;
use crossrail_cuda::{Context, Function, Grid, Module, Stream};
use crossrail_types::{Error, ErrorKind, Result};

use super::{EP_LAYOUT_THREADS, EpLayoutArgs, MOST_GRANTED_RANKS};
use crate::{mangled, sources};

/// Qualified name of the kernel.
pub const LAYOUT: &str = "crossrail::ep::layout";
/// Experts and ranks that have counters in a block's shared memory, of which every GPU has 48 KiB.
const MOST_COUNTERS: u64 = (48 << 10) / 4;

/// The kernel, loaded on one GPU. Usable from any thread.
#[derive(Debug)]
pub struct LayoutKernel(Function);

impl LayoutKernel {
    /// Compiles it, if it is not in the compiler's cache, for at most `limit` waiting for other processes that compile
    /// it, and loads it in `context`.
    ///
    /// # Errors
    /// As [`super::EpKernels::load`].
    pub fn load(context: &Context, compiler: &Compiler, limit: Duration) -> Result<LayoutKernel> {
        compiler.library().check(context.device().cuda())?;
        let code = compiler.compile(&sources::EP_LAYOUT, context.device().arch()?, &[], limit)?;
        Module::load(context, &code)?.function(&mangled::<EpLayoutArgs>(LAYOUT)).map(LayoutKernel)
    }

    /// Whether there are counters for so many experts and ranks.
    pub fn takes(experts: u32, ranks: u32) -> bool {
        (1..=MOST_GRANTED_RANKS).contains(&ranks)
            && experts > 0
            && experts.is_multiple_of(ranks)
            && u64::from(experts) + u64::from(ranks) <= MOST_COUNTERS
    }

    /// Its grid, for so many experts and ranks.
    pub fn grid(experts: u32, ranks: u32) -> Grid {
        Grid { blocks: 1, threads: EP_LAYOUT_THREADS, shared: 4 * (experts + ranks) }
    }

    /// Enqueues a count. It can be captured.
    ///
    /// # Safety
    /// All addresses must be valid for what the fields say until this is done, the ids unchanged and the results not
    /// accessed by others.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for what [`LayoutKernel::takes`] refuses; a failed call.
    pub unsafe fn launch(&self, stream: &Stream, args: &EpLayoutArgs) -> Result<()> {
        if !LayoutKernel::takes(args.experts, args.ranks) {
            let detail = format!("{} experts of {} ranks have no counters", args.experts, args.ranks);
            return Err(Error::new(ErrorKind::Usage, "layout", detail));
        }
        // SAFETY: the kernel takes `EpLayoutArgs`; the caller vouches for the addresses.
        unsafe { self.0.launch(stream, LayoutKernel::grid(args.experts, args.ranks), args) }
    }
}
