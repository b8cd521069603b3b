//! Receipts: what a finished operation reports to the user.

mod collected;

use std::sync::Arc;

use crossrail_types::Result;

pub(crate) use self::collected::Collected;
use super::names::Names;
use super::outcome::ShortEnd;

/// Called with an operation's receipt, or its error.
pub(crate) type Callback = Box<dyn FnOnce(Result<Receipt>) + Send>;

/// How a transfer's bytes travelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Protocol {
    /// With the first frame.
    Eager,
    /// One plain copy between memory that both processes map.
    Mapped,
    /// One copy by the kernel (process_vm_readv or process_vm_writev).
    Cma,
    /// One copy between GPUs, or within one, by the GPU itself.
    CudaIpc,
    /// In chunks over every lane that had room.
    Chunks,
    /// Several operations in one request.
    Batch,
}

impl Protocol {
    const ALL: [Protocol; 6] =
        [Protocol::Eager, Protocol::Mapped, Protocol::Cma, Protocol::CudaIpc, Protocol::Chunks, Protocol::Batch];

    /// The protocol that is displayed as `name`.
    pub fn named(name: &str) -> Option<Protocol> {
        Protocol::ALL.into_iter().find(|protocol| protocol.to_string() == name)
    }
}

impl std::fmt::Display for Protocol {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Protocol::Eager => "eager",
            Protocol::Mapped => "direct(mapped)",
            Protocol::Cma => "direct(cma)",
            Protocol::CudaIpc => "direct(cuda_ipc)",
            Protocol::Chunks => "chunks",
            Protocol::Batch => "batch",
        })
    }
}

/// What one lane carried of a transfer.
#[derive(Clone, Debug, PartialEq)]
pub struct LaneShare {
    /// The lane, as `tcp/eth1`.
    pub name: Arc<str>,
    /// Payload bytes.
    pub bytes: u64,
    /// Chunks.
    pub chunks: u64,
    /// Chunks of these that another lane had lost.
    pub resent: u64,
}

/// For how long a transfer in chunks waited for a stage of its way that no other was waiting for, in microseconds.
///
/// Stages overlap, and a busy one is not what limits the transfer while the connections are busy too. Time counts here
/// in which a connection of the transfer had nothing to do because of the stage, divided by the number of connections.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HeldTimes {
    /// A connection had room for a chunk that was still being copied out of a GPU's memory here.
    pub pack_us: f64,
    /// Nothing could be received, or all had been, while chunks were being copied into a GPU's memory here.
    pub unpack_us: f64,
    /// A chunk waited for bounce memory, and none was being copied here that would have freed some.
    pub slot_us: f64,
}

/// What a finished request did.
#[derive(Clone, Debug)]
pub struct Receipt {
    /// Payload bytes moved.
    pub bytes: u64,
    /// The message's tag (0 for one-sided operations).
    pub tag: u64,
    /// How the bytes travelled.
    pub protocol: Protocol,
    /// Microseconds from start until the other end had matched it.
    pub match_us: f64,
    /// Microseconds in which bytes were waiting and every lane's window was full.
    pub window_us: f64,
    /// Microseconds in which bytes were on the wire.
    pub wire_us: f64,
    /// Microseconds in which this end was copying, or the peer was, if that was left to it.
    pub copy_us: f64,
    /// A direct copy was made by the end that the bytes come from, alone; otherwise by the other, or by both.
    pub pushed: bool,
    /// Microseconds in which bytes were being copied out of a GPU's memory here, before a lane could take them.
    pub pack_us: f64,
    /// Microseconds in which bytes that had come were being copied into a GPU's memory here.
    pub unpack_us: f64,
    /// Microseconds in which bytes waited because all bounce slots of the GPU were in use.
    pub slot_us: f64,
    pub(in crate::core) names: Option<Names>,
    /// The one lane it used, if that is not the peer's usual one.
    pub(in crate::core) only: Option<Arc<str>>,
    /// Short messages have none of it: a receipt that is larger than 128 bytes is copied by a call.
    pub(in crate::core) rest: Option<Box<Rest>>,
}

/// What chunks went through, lane by lane, and what happened on the way.
#[derive(Clone, Debug, Default)]
pub(in crate::core) struct Rest {
    pub(in crate::core) shares: Vec<LaneShare>,
    pub(in crate::core) notes: Vec<String>,
    pub(in crate::core) held: HeldTimes,
    /// The peer's name in a receipt of another process.
    pub(in crate::core) peer: Option<Arc<str>>,
}

impl Receipt {
    /// That of a short message.
    #[inline]
    pub(in crate::core) fn of_short(end: &ShortEnd) -> Receipt {
        Receipt { names: Some(end.names), ..Receipt::of_bytes(end.tag, end.bytes, end.wire_ns) }
    }

    /// That of a message of which nothing else is known.
    #[inline]
    pub(in crate::core) fn of_bytes(tag: u64, bytes: u64, wire_ns: u64) -> Receipt {
        Receipt {
            bytes,
            tag,
            protocol: Protocol::Eager,
            match_us: 0.0,
            window_us: 0.0,
            wire_us: us(wire_ns),
            copy_us: 0.0,
            pushed: false,
            pack_us: 0.0,
            unpack_us: 0.0,
            slot_us: 0.0,
            names: None,
            only: None,
            rest: None,
        }
    }

    /// The peer's name; empty once 1,024 other peers of this process have ended since this one has.
    pub fn peer(&self) -> Arc<str> {
        let restored = || self.rest.as_ref().and_then(|rest| rest.peer.clone()).unwrap_or_default();
        self.names.map_or_else(restored, Names::peer)
    }

    /// A receipt that was told in words, by this process or another: what [`Receipt::peer`] and the methods after it
    /// return. Its fields are 0.
    pub fn restored(
        peer: &str,
        protocol: Protocol,
        lanes: Vec<LaneShare>,
        held: HeldTimes,
        notes: Vec<String>,
    ) -> Receipt {
        let only = lanes.first().filter(|_| !matches!(protocol, Protocol::Chunks | Protocol::Batch));
        let only = only.map(|lane| lane.name.clone());
        let rest = Some(Box::new(Rest { shares: lanes, notes, held, peer: Some(peer.into()) }));
        Receipt { protocol, only, rest, ..Receipt::of_bytes(0, 0, 0) }
    }

    /// A row per lane that carried bytes.
    pub fn lanes(&self) -> Vec<LaneShare> {
        let usual = || self.names.map(Names::message_lane);
        let only = match self.protocol {
            Protocol::Chunks | Protocol::Batch => None,
            // The frames went over another lane, the bytes did not.
            Protocol::CudaIpc => Some("cuda_ipc".into()),
            _ => self.only.clone().or_else(usual),
        };
        match only {
            Some(name) => vec![LaneShare { name, bytes: self.bytes, chunks: 1, resent: 0 }],
            None => self.rest.as_ref().map_or_else(Vec::new, |rest| rest.shares.clone()),
        }
    }

    /// For how long the transfer waited for staging at this end.
    pub fn held(&self) -> HeldTimes {
        self.rest.as_ref().map_or_else(HeldTimes::default, |rest| rest.held)
    }

    /// What happened on the way: lanes lost, slower paths taken.
    pub fn notes(&self) -> &[String] {
        self.rest.as_ref().map_or(&[], |rest| &rest.notes)
    }
}

#[inline]
pub(in crate::core) fn us(ns: u64) -> f64 {
    // From a signed number it is one instruction; 292 years fit.
    ns as i64 as f64 / 1000.0
}
