//! The outcomes of operations in the user's words: taken out of the table, and rendered as receipts.

use std::ops::DerefMut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use crossrail_transport::DirectKind;
use crossrail_types::{EndpointId, LaneId, OpId, Result};

use super::{LaneShare, Protocol, Receipt, Rest, us};
use crate::core::Core;
use crate::core::names::Names;
use crate::core::operations::Standing;
use crate::core::outcome::{Finish, More, Outcome, ShortEnd, gone};

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
