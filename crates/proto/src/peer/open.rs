//! The payload that is coming in.

use crossrail_types::{Head, LaneId, OpId};

/// The stream's frame whose payload is coming in.
#[derive(Clone, Debug)]
pub(super) struct Open {
    /// The lane that brings it: the latest, if several began to.
    pub(super) lane: LaneId,
    pub(super) head: Head,
    pub(super) what: What,
    pub(super) lossy: bool,
}

/// What that payload is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// A message for a receive.
    Receive {
        op: OpId,
        their: u32,
        tag: u64,
    },
    /// A message that no receive matched.
    Kept {
        arrival: u32,
    },
    /// All bytes of that incoming transfer.
    Data {
        index: u32,
    },
    Control,
}
