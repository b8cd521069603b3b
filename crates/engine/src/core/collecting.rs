//! The outcomes of operations in the user's words: taken out of the table, and rendered as receipts.

use std::sync::Arc;

use crossrail_transport::DirectKind;
use crossrail_types::{EndpointId, LaneId, OpId, Result};

use super::Core;
use super::names::Names;
use super::operations::OpStatus;
use super::outcome::{Carried, Finish, More, Outcome, Way, gone};
use super::receipt::{Collected, HeldTimes, LaneShare, Protocol, Receipt, Rest, us};

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
    // A message that the wait itself received has left the table already.
    if collected.load().is_none() {
        match core.operations().collect(id, collected) {
            OpStatus::InFlight(..) => return None,
            OpStatus::Collected => {}
            OpStatus::Kept => return Some(kept_outcome(core, id, collected)),
        }
    }
    collected.receipt().map(Ok)
}

/// [`outcome`] of an operation that is [`OpStatus::Kept`].
#[cold]
fn kept_outcome(core: &mut Core, id: OpId, collected: &Collected) -> Result<Receipt> {
    match (core.operations().outcome(id), collected.load()) {
        (Some(Ok(finish @ Finish { more: None, .. })), _) => {
            let Finish { tag, bytes, wire_ns, .. } = finish;
            let (names, only) = names(core, &finish);
            // What the request itself can keep need not stay in the table.
            if let (Some(names), None) = (names, &only)
                && core.operations().free_if_bare(id)
            {
                collected.store(names.word(), tag, bytes, wire_ns);
            }
            Ok(Receipt { names, only, ..Receipt::of_bytes(tag, bytes, wire_ns) })
        }
        (Some(outcome), _) => render(core, outcome),
        (None, Some(end)) => Ok(Receipt::of_short(&end)),
        (None, None) => Err(gone("wait")),
    }
}

/// The protocol's receipt in people's words.
pub(crate) fn render(core: &mut Core, outcome: Outcome) -> Result<Receipt> {
    let finish = outcome.map_err(|error| *error)?;
    let (names, only) = names(core, &finish);
    let Finish { endpoint, tag, bytes, wire_ns, more, .. } = finish;
    let mut rendered = Receipt { names, only, ..Receipt::of_bytes(tag, bytes, wire_ns) };
    if let Some(more) = more {
        render_more(core, endpoint, *more, &mut rendered);
    }
    Ok(rendered)
}

/// The peer's names in a receipt, and the name of the lane if it is not the peer's usual one, as far as is known. The
/// lanes of a longer operation are in its own account.
fn names(core: &mut Core, finish: &Finish) -> (Option<Names>, Option<Arc<str>>) {
    let peer = finish.endpoint.and_then(|endpoint| core.peers().get(endpoint));
    let usual = peer.and_then(|peer| peer.message_lane());
    let names = finish.names.or_else(|| peer.map(|peer| peer.names()));
    let only = finish.lane.filter(|lane| finish.more.is_none() && Some(*lane) != usual);
    (names, only.map(|lane| lane_name(core, lane)))
}

#[cold]
fn render_more(core: &mut Core, endpoint: Option<EndpointId>, more: More, rendered: &mut Receipt) {
    let receipt = more.receipt;
    let peer = endpoint.and_then(|endpoint| core.peers().get(endpoint));
    let usual = peer.as_ref().and_then(|peer| peer.message_lane());
    if let Some(carried) = more.batch {
        let names = rendered.names;
        rendered.protocol = Protocol::Batch;
        rendered.rest = Some(Box::new(Rest { shares: shares_of(core, names, carried), ..Rest::default() }));
        return;
    }
    rendered.protocol = protocol(&receipt, more.direct);
    rendered.match_us = us(receipt.match_ns);
    rendered.window_us = us(receipt.window_ns);
    rendered.copy_us = us(receipt.copy_ns);
    rendered.pushed = receipt.pushed;
    let mut held = HeldTimes::default();
    if let Some(times) = more.times {
        let [pack, unpack, slot] = times.held_ns(receipt.lanes.len()).map(us);
        held = HeldTimes { pack_us: pack, unpack_us: unpack, slot_us: slot };
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
        rendered.rest = Some(Box::new(Rest { shares, notes: more.notes, held, peer: None }));
    } else if receipt.lane.is_some() && receipt.lane != usual {
        rendered.only = receipt.lane.map(|lane| lane_name(core, lane));
    }
}

/// The lanes of a batch by name.
fn shares_of(core: &mut Core, names: Option<Names>, carried: Carried) -> Vec<LaneShare> {
    let mut shares: Vec<LaneShare> = Vec::new();
    for (way, [bytes, chunks, resent]) in carried {
        let name = match way {
            Way::Lane(id) => lane_name(core, id),
            Way::Usual => names.map_or_else(Arc::default, Names::message_lane),
            Way::CudaIpc => "cuda_ipc".into(),
        };
        match shares.iter_mut().find(|share| share.name == name) {
            // The peer's usual lane may also be named by its id.
            Some(share) => {
                share.bytes += bytes;
                share.chunks += chunks;
                share.resent += resent;
            }
            None => shares.push(LaneShare { name, bytes, chunks, resent }),
        }
    }
    shares
}

fn lane_name(core: &mut Core, id: LaneId) -> Arc<str> {
    core.transfers().lanes().name(id)
}
