//! Receipts: what a finished operation reports to the user.

use std::ops::DerefMut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use crossrail_transport::DirectKind;
use crossrail_types::{EndpointId, LaneId, OpId, Result};

use super::Core;
use super::names::Names;
use super::operations::Standing;
use super::outcome::{Finish, More, Outcome, ShortEnd, gone};

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
    names: Option<Names>,
    /// The one lane it used, if that is not the peer's usual one.
    only: Option<Arc<str>>,
    /// Short messages have none of it: a receipt that is larger than 128 bytes is copied by a call.
    rest: Option<Box<Rest>>,
}

/// What chunks went through, lane by lane, and what happened on the way.
#[derive(Clone, Debug, Default)]
struct Rest {
    shares: Vec<LaneShare>,
    notes: Vec<String>,
}

impl Receipt {
    /// That of a short message. `only`: the lane it went over, if that is not the peer's usual one.
    #[inline]
    fn of_short(end: &ShortEnd, names: Option<Names>, only: Option<Arc<str>>) -> Receipt {
        Receipt {
            bytes: end.bytes,
            tag: end.tag,
            protocol: Protocol::Eager,
            match_us: 0.0,
            window_us: 0.0,
            wire_us: us(end.wire_ns),
            copy_us: 0.0,
            pushed: false,
            pack_us: 0.0,
            unpack_us: 0.0,
            slot_us: 0.0,
            names,
            only,
            rest: None,
        }
    }

    /// The peer's name; empty once 1,024 other peers of this process have ended since this one has.
    pub fn peer(&self) -> Arc<str> {
        self.names.map_or_else(|| "".into(), Names::peer)
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

    /// What happened on the way: lanes lost, slower paths taken.
    pub fn notes(&self) -> &[String] {
        self.rest.as_ref().map_or(&[], |rest| &rest.notes)
    }
}

fn protocol(receipt: &crossrail_proto::Receipt, direct: Option<DirectKind>) -> Protocol {
    match (receipt.protocol, direct) {
        (crossrail_proto::Protocol::Eager, _) => Protocol::Eager,
        (crossrail_proto::Protocol::Direct, Some(DirectKind::Cma)) => Protocol::Cma,
        (crossrail_proto::Protocol::Direct, Some(DirectKind::CudaIpc)) => Protocol::CudaIpc,
        (crossrail_proto::Protocol::Direct, _) => Protocol::Mapped,
        (crossrail_proto::Protocol::Chunks, _) => Protocol::Chunks,
    }
}

/// How a finished operation ended; `None`: it is in flight. What need not stay in the table leaves it.
#[inline]
pub(crate) fn outcome(core: &mut Core, id: OpId, collected: &Collected) -> Option<Result<Receipt>> {
    match core.operations().collect(id) {
        Standing::InFlight => None,
        Standing::Collected(end) => {
            collected.store(&end);
            Some(Ok(short_receipt(core, &end)))
        }
        Standing::Kept => Some(kept_outcome(core, id, collected)),
    }
}

/// [`outcome`], and then `after`, which releases the core: the receipt of a short message is written once, to where the
/// caller wants it.
#[inline(always)]
pub(crate) fn outcome_then<C: DerefMut<Target = Core>>(
    mut core: C,
    id: OpId,
    collected: &Collected,
    after: impl FnOnce(C),
) -> Option<Result<Receipt>> {
    let end = match core.operations().collect(id) {
        Standing::InFlight => {
            after(core);
            return None;
        }
        Standing::Collected(end) => end,
        Standing::Kept => {
            let kept = kept_outcome(&mut core, id, collected);
            after(core);
            return Some(kept);
        }
    };
    collected.store(&end);
    let (names, usual) = short_names(&mut core, &end);
    if !usual {
        let receipt = short_receipt(&mut core, &end);
        after(core);
        return Some(Ok(receipt));
    }
    after(core);
    Some(Ok(Receipt::of_short(&end, names, None)))
}

/// [`outcome`] of an operation that is not, or no longer, the plain end of a short message in the table.
#[cold]
fn kept_outcome(core: &mut Core, id: OpId, collected: &Collected) -> Result<Receipt> {
    match (core.operations().outcome(id), collected.load()) {
        (Some(Ok(Finish { endpoint, tag, bytes, wire_ns, lane, more: None })), _) => {
            let end = ShortEnd { endpoint, tag, bytes, wire_ns, lane };
            if core.operations().free_if_bare(id) {
                collected.store(&end);
            }
            Ok(short_receipt(core, &end))
        }
        (Some(outcome), _) => render(core, outcome),
        (None, Some(end)) => Ok(short_receipt(core, &end)),
        (None, None) => Err(gone("wait")),
    }
}

/// The good end of a short message, once it has been taken out of the worker's table. Written and read under the
/// worker's lock, but for [`Drop`], which has the request to itself.
pub(crate) struct Collected {
    there: AtomicBool,
    /// Endpoint and lane, `NONE` for none.
    endpoint: AtomicU32,
    lane: AtomicU32,
    tag: AtomicU64,
    bytes: AtomicU64,
    wire_ns: AtomicU64,
}

const NONE: u32 = u32::MAX;

impl Collected {
    pub(crate) const fn nothing() -> Collected {
        Collected {
            there: AtomicBool::new(false),
            endpoint: AtomicU32::new(NONE),
            lane: AtomicU32::new(NONE),
            tag: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            wire_ns: AtomicU64::new(0),
        }
    }

    #[inline]
    fn store(&self, finish: &ShortEnd) {
        self.endpoint.store(finish.endpoint.map_or(NONE, |id| id.0), Relaxed);
        self.lane.store(finish.lane.map_or(NONE, |id| id.0), Relaxed);
        self.tag.store(finish.tag, Relaxed);
        self.bytes.store(finish.bytes, Relaxed);
        self.wire_ns.store(finish.wire_ns, Relaxed);
        self.there.store(true, Relaxed);
    }

    /// Whether the operation has left the table. For [`Drop`] of its owner.
    #[inline]
    pub(crate) fn is_collected(&mut self) -> bool {
        *self.there.get_mut()
    }

    pub(crate) fn load(&self) -> Option<ShortEnd> {
        let some = |word: &AtomicU32| Some(word.load(Relaxed)).filter(|id| *id != NONE);
        self.there.load(Relaxed).then(|| ShortEnd {
            endpoint: some(&self.endpoint).map(EndpointId),
            tag: self.tag.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            wire_ns: self.wire_ns.load(Relaxed),
            lane: some(&self.lane).map(LaneId),
        })
    }
}

/// The protocol's receipt in people's words.
pub(crate) fn render(core: &mut Core, outcome: Outcome) -> Result<Receipt> {
    let Finish { endpoint, tag, bytes, wire_ns, lane, more } = outcome.map_err(|error| *error)?;
    // The lanes of a longer operation are in its own account.
    let lane = if more.is_some() { None } else { lane };
    let mut rendered = short_receipt(core, &ShortEnd { endpoint, tag, bytes, wire_ns, lane });
    if let Some(more) = more {
        render_more(core, endpoint, *more, &mut rendered);
    }
    Ok(rendered)
}

/// The receipt of a short message.
#[inline]
fn short_receipt(core: &mut Core, end: &ShortEnd) -> Receipt {
    let (names, usual) = short_names(core, end);
    let only = if usual { None } else { unusual_lane(core, end.lane) };
    Receipt::of_short(end, names, only)
}

/// The names in a short message's receipt, and whether it went over the peer's usual lane, as far as is known.
#[inline]
fn short_names(core: &mut Core, end: &ShortEnd) -> (Option<Names>, bool) {
    let peer = end.endpoint.and_then(|endpoint| core.peers().get(endpoint));
    let (names, usual) = peer.map_or((None, None), |peer| (Some(peer.names()), peer.message_lane()));
    (names, end.lane == usual || end.lane.is_none())
}

#[cold]
fn unusual_lane(core: &mut Core, lane: Option<LaneId>) -> Option<Arc<str>> {
    lane.map(|lane| lane_name(core, lane))
}

#[cold]
fn render_more(core: &mut Core, endpoint: Option<EndpointId>, more: More, rendered: &mut Receipt) {
    let receipt = more.receipt;
    let peer = endpoint.and_then(|endpoint| core.peers().get(endpoint));
    let usual = peer.as_ref().and_then(|peer| peer.message_lane());
    rendered.protocol = if more.batch { Protocol::Batch } else { protocol(&receipt, more.direct) };
    rendered.match_us = us(receipt.match_ns);
    rendered.window_us = us(receipt.window_ns);
    rendered.copy_us = us(receipt.copy_ns);
    rendered.pushed = receipt.pushed;
    if let Some(times) = more.times {
        rendered.pack_us = us(times.pack.ns());
        rendered.unpack_us = us(times.unpack.ns());
        rendered.slot_us = us(times.slot.ns());
    }
    if !receipt.lanes.is_empty() {
        let share = |share: crossrail_proto::LaneShare| LaneShare {
            name: lane_name(core, share.lane),
            bytes: share.bytes,
            chunks: share.chunks.into(),
            resent: share.resent,
        };
        let shares = receipt.lanes.into_iter().map(share).collect();
        rendered.rest = Some(Box::new(Rest { shares, notes: more.notes }));
    } else if receipt.lane.is_some() && receipt.lane != usual {
        rendered.only = receipt.lane.map(|lane| lane_name(core, lane));
    }
}

fn lane_name(core: &mut Core, id: LaneId) -> Arc<str> {
    core.transfers().lanes().name(id)
}

#[inline]
fn us(ns: u64) -> f64 {
    // From a signed number it is one instruction; 292 years fit.
    ns as i64 as f64 / 1000.0
}
