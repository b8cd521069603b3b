//! Launches of the kernels: their arguments, filled in with what only the buffer knows.

use crossrail_kernels::ep::{EP_ANNOUNCE, EP_RECEIVE, EP_SEND, EpCombineArgs, EpDispatchArgs};

use crate::counts::Counts;
use crate::handles::DeviceHandle;
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
