//! What operations are to do, and how they end.

use std::collections::BTreeMap;

use crossrail_proto as proto;
use crossrail_transport::DirectKind;
use crossrail_types::{EndpointId, Error, ErrorKind, LaneId};

use super::names::Names;
use crate::memory::GpuTimes;

/// What a finished operation leaves behind until its request is dropped.
pub(crate) type Outcome = std::result::Result<Finish, Box<Error>>;

/// The protocol's receipt and what the engine adds to it.
#[derive(Clone, Debug)]
pub(crate) struct Finish {
    pub(crate) endpoint: Option<EndpointId>,
    /// The peer's names, where they are known already. `None`: look the peer up.
    pub(crate) names: Option<Names>,
    pub(crate) tag: u64,
    pub(crate) bytes: u64,
    pub(crate) wire_ns: u64,
    /// `None`: the peer's usual one.
    pub(crate) lane: Option<LaneId>,
    /// All but a message that went with its first frame.
    pub(crate) more: Option<Box<More>>,
}

/// How a short message ended, in good order and over the peer's usual lane: all that its receipt needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShortEnd {
    pub(crate) names: Names,
    pub(crate) tag: u64,
    pub(crate) bytes: u64,
    pub(crate) wire_ns: u64,
}

impl From<ShortEnd> for Finish {
    fn from(end: ShortEnd) -> Finish {
        let ShortEnd { names, tag, bytes, wire_ns } = end;
        Finish { endpoint: None, names: Some(names), tag, bytes, wire_ns, lane: None, more: None }
    }
}

/// What there is to tell of a longer operation.
#[derive(Clone, Debug)]
pub(crate) struct More {
    pub(crate) receipt: proto::Receipt,
    pub(crate) direct: Option<crossrail_transport::DirectKind>,
    /// What GPU memory cost.
    pub(crate) times: Option<Box<GpuTimes>>,
    /// What happened to the peer's lanes meanwhile.
    pub(crate) notes: Vec<String>,
    /// Of several operations in one request: what carried their bytes.
    pub(crate) batch: Option<Carried>,
}

/// What carried the bytes of the parts of a batch: bytes, chunks, and bytes that another lane had lost.
pub(crate) type Carried = BTreeMap<Way, [u64; 3]>;

/// What carries bytes. The name of the peer's usual lane is looked up for the receipt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Way {
    Usual,
    Lane(LaneId),
    CudaIpc,
}

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpKind {
    Send,
    Receive,
    Write,
    Read,
    /// Bytes for the peer's queue of notices.
    Notice,
    /// Several operations in one request.
    Batch,
}

impl OpKind {
    /// Whether the peer decides when it is finished: all but a receive.
    #[inline]
    pub(crate) fn awaits_peer(self) -> bool {
        self != OpKind::Receive
    }

    /// The operation's name in errors.
    pub(crate) fn name(self) -> &'static str {
        match self {
            OpKind::Send => "send",
            OpKind::Receive => "recv",
            OpKind::Write => "write",
            OpKind::Read => "read",
            OpKind::Notice => "notify",
            OpKind::Batch => "batch",
        }
    }
}

impl From<&proto::Operation> for OpKind {
    fn from(operation: &proto::Operation) -> OpKind {
        match operation {
            proto::Operation::Send { .. } => OpKind::Send,
            proto::Operation::Write { .. } | proto::Operation::Put { .. } => OpKind::Write,
            proto::Operation::Read { .. } => OpKind::Read,
        }
    }
}

impl Finish {
    /// Adds what carried the bytes of this operation.
    pub(super) fn add_to(&self, carried: &mut Carried) {
        let mut add = |way, share: [u64; 3]| {
            let sums = carried.entry(way).or_default();
            sums.iter_mut().zip(share).for_each(|(sum, part)| *sum += part);
        };
        match &self.more {
            _ if self.bytes == 0 => {}
            Some(more) if more.direct == Some(DirectKind::CudaIpc) => add(Way::CudaIpc, [self.bytes, 1, 0]),
            Some(more) if !more.receipt.lanes.is_empty() => {
                for share in &more.receipt.lanes {
                    add(Way::Lane(share.lane), [share.bytes, share.chunks.into(), share.resent]);
                }
            }
            more => {
                let lane = more.as_ref().map_or(self.lane, |more| more.receipt.lane);
                add(lane.map_or(Way::Usual, Way::Lane), [self.bytes, 1, 0]);
            }
        }
    }

    /// The end of a batch that moved so many bytes.
    pub(super) fn of_batch(endpoint: Option<EndpointId>, tag: u64, bytes: u64, carried: Carried) -> Finish {
        let receipt = batch_receipt(bytes);
        let more = More { receipt, direct: None, times: None, notes: Vec::new(), batch: Some(carried) };
        Finish { endpoint, names: None, tag, bytes, wire_ns: 0, lane: None, more: Some(Box::new(more)) }
    }
}

fn batch_receipt(bytes: u64) -> proto::Receipt {
    proto::Receipt {
        bytes,
        protocol: proto::Protocol::Eager,
        lane: None,
        lanes: Vec::new(),
        match_ns: 0,
        window_ns: 0,
        wire_ns: 0,
        copy_ns: 0,
        pushed: false,
    }
}

/// The error of a call on a closed worker.
pub(crate) fn gone(what: &str) -> Error {
    Error::new(ErrorKind::Closed, what, "the worker is closed")
}

/// What a caller submits.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Submission {
    /// An operation with a peer.
    Operation(proto::Operation),
    /// A receive, from one peer or from any.
    Receive { tag: u64, mask: u64 },
}

impl Submission {
    #[inline]
    pub(super) fn kind(&self) -> OpKind {
        match self {
            Submission::Operation(operation) => operation.into(),
            Submission::Receive { .. } => OpKind::Receive,
        }
    }

    #[inline]
    pub(super) fn tag(&self) -> u64 {
        match self {
            Submission::Operation(proto::Operation::Send { tag }) | Submission::Receive { tag, .. } => *tag,
            Submission::Operation(_) => 0,
        }
    }
}
