//! Launches of the kernels: their arguments, filled in with what only the buffer knows.
#![allow(unsafe_code)]

use crossrail_cuda::Stream;
use crossrail_kernels::ep::{EP_ANNOUNCE, EP_RECEIVE, EP_SEND, EpCombineArgs, EpCommon, EpDispatchArgs};
use crossrail_types::Result;

use crate::counts::Counts;
use crate::handles::{DeviceHandle, layout_of};
use crate::inner::Inner;
use crate::outstanding::Operation;

/// One of the four kernels with its arguments.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Args {
    DispatchExpert(EpDispatchArgs),
    DispatchRank(EpDispatchArgs),
    CombineExpert(EpCombineArgs),
    CombineRank(EpCombineArgs),
}

impl Args {
    pub(crate) fn kind(&self) -> Operation {
        match self {
            Args::DispatchExpert(_) | Args::DispatchRank(_) => Operation::Dispatch,
            Args::CombineExpert(_) | Args::CombineRank(_) => Operation::Combine,
        }
    }

    /// All phases of the operation.
    pub(crate) fn phases(&self) -> u32 {
        match self {
            Args::DispatchRank(_) => EP_ANNOUNCE | EP_SEND | EP_RECEIVE,
            _ => EP_SEND | EP_RECEIVE,
        }
    }

    /// The same arguments for a launch that runs only `phases`.
    pub(crate) fn with(mut self, phases: u32) -> Args {
        match &mut self {
            Args::DispatchExpert(args) | Args::DispatchRank(args) => args.common.phases = phases,
            Args::CombineExpert(args) | Args::CombineRank(args) => args.common.phases = phases,
        }
        self
    }
}

/// An operation to enqueue, or the second half of one.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    pub(crate) args: Args,
    pub(crate) handle: DeviceHandle,
    pub(crate) count: Option<Counts>,
}

impl Inner {
    pub(crate) fn common(&self, handle: &DeviceHandle, waits: u64) -> EpCommon {
        EpCommon {
            heap: self.heap.parts,
            parts: self.shape.handle(layout_of(handle.layout())),
            base: self.heap.base(),
            peers: self.heap.peers(),
            handle: handle.0.address,
            faults: self.faults_at,
            waits,
            limit_ns: u64::try_from(self.config.timeout.as_nanos()).unwrap_or(u64::MAX),
            rank: self.me,
            phases: 0,
            tokens: handle.tokens(),
            max_tokens: self.shape.max_tokens,
        }
    }

    /// `early`: in place of in order behind the kernel before it ([`crossrail_kernels::ep::EpKernels::dispatch_expert`]).
    pub(crate) fn launch(&self, stream: &Stream, args: &Args, blocks: u32, early: bool) -> Result<()> {
        // SAFETY: heaps, table, ring and handle are ours, laid out for this shape, and kept until kernels are done; the
        // order of operations was checked; callers vouch for their own addresses.
        unsafe {
            match args {
                Args::DispatchExpert(args) => self.kernels.dispatch_expert(stream, args, blocks, early),
                Args::DispatchRank(args) => self.kernels.dispatch_rank(stream, args, blocks, early),
                Args::CombineExpert(args) => self.kernels.combine_expert(stream, args, blocks, early),
                Args::CombineRank(args) => self.kernels.combine_rank(stream, args, blocks, early),
            }
        }
    }
}
