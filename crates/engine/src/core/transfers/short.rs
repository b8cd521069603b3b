//! Short messages in place of a poll: taken from their slot, ended by a count.
#![allow(unsafe_code)]

use crossrail_proto as proto;
use crossrail_transport::Lane;
use crossrail_types::{EndpointId, Head, LaneId, OpId};

use super::Transfers;
use crate::core::data_path::DataPath;
use crate::core::lanes::{Lanes, PolledLanes};
use crate::core::operations::{Received, UsualLane};
use crate::core::peers::Peer;
use crate::core::tables::Tables;

impl Transfers {
    /// Receives the peer's next message in place of a poll, if it is a short one that has arrived on a calm connection
    /// for the receive that was posted first. `spins`: how often to look again. `wanted`: the receive whose end leaves the
    /// table at once.
    #[inline]
    pub(in crate::core) fn receive_short(
        &mut self,
        endpoint: EndpointId,
        spins: u32,
        wanted: Option<OpId>,
    ) -> Option<Received> {
        let DataPath { tables, delivered, .. } = &mut self.data;
        let Tables { clock, operations, matcher, peers, lanes, .. } = tables;
        let peer = peers.get_mut(endpoint)?;
        let id = peer.message_lane()?;
        let polled = self.polled.entry(id)?;
        let lane = &mut *polled.lane;
        let mut head = Head::new(0, 0);
        if !(0..=spins).any(|_| lane.peek(&mut head)) {
            return None;
        }
        let from = UsualLane { endpoint, lane: id, names: peer.names() };
        let mut ended = |short| {
            if !operations.finish_short(&from, &short) {
                deliver_later(delivered, endpoint, short);
            }
        };
        // Where it does not apply, nothing was taken from the lane, and a poll goes the long way.
        let short = peer.protocol.place_short(clock.now(), id, &head, matcher, &mut ended)?;
        polled.used = true;
        // SAFETY: `bytes` is the head's length and no more than the receive has room for, in host memory that may be
        // written at once: `place_short` answers for both. Nothing has been called on the lane since.
        let take = |dst| unsafe { lane.take(dst, short.bytes as usize) };
        let received = match operations.receive_short(&from, &short, wanted, take) {
            Received::Attached => {
                deliver_later(delivered, endpoint, short);
                Received::Ended
            }
            received => received,
        };
        let more = self.wake_ups.is_observed() | !delivered.is_empty() | peer.protocol.has_events();
        if more || !peer.bulk().is_empty() {
            self.settle(endpoint);
        } else {
            publish_on(lane, peer, lanes, id);
        }
        Some(received)
    }

    /// Applies the count of delivered messages that the peer of the lane at `at` has published; whether it was news.
    pub(in crate::core) fn collect_count(&mut self, at: usize) -> bool {
        let Some(polled) = self.polled.at(at) else { return false };
        let (endpoint, id) = (polled.endpoint, polled.id);
        let DataPath { tables, delivered, .. } = &mut self.data;
        let Tables { clock, operations, peers, .. } = tables;
        let Some(peer) = peers.get_mut(endpoint).filter(|peer| peer.protocol.awaits_count()) else { return false };
        // The next poll reports an error, too.
        let Ok(Some(count)) = polled.lane.published() else { return false };
        let mut any = false;
        let usual = UsualLane { endpoint, lane: id, names: peer.names() };
        let mut ended = |short| {
            any = true;
            if !operations.finish_short(&usual, &short) {
                deliver_later(delivered, endpoint, short);
            }
        };
        // An impossible count breaks the connection off, which is one of the protocol's events.
        let broken = peer.protocol.published(clock.now(), count, &mut ended).is_err();
        let more = broken | peer.protocol.has_events();
        // What is owed to the peer was published when it was delivered, or will be when the lane has room.
        let is_rest = more | self.wake_ups.is_observed() | !delivered.is_empty() | !peer.bulk().is_empty();
        if any | more && (is_rest || peer.protocol.presses(id)) {
            self.settle(endpoint);
        }
        any | more
    }
}

/// Publishes to the peer, on its lane `id`, how many of its messages have been delivered here.
#[inline]
pub(super) fn publish_count(peer: &mut Peer, lanes: &Lanes, polled: &mut PolledLanes, id: LaneId) {
    if let Some(lane) = polled.get_mut(id) {
        publish_on(lane, peer, lanes, id);
    }
}

/// [`publish_count`] on that lane.
#[inline(always)]
fn publish_on(lane: &mut dyn Lane, peer: &mut Peer, lanes: &Lanes, id: LaneId) {
    let Some(count) = peer.protocol.untold(id) else { return };
    // What this end sends must be on the lane before the count says that it was.
    if lanes.get(id).is_none_or(|lane| !lane.counts() || lane.has_pending()) {
        return;
    }
    if lane.publish(count) {
        peer.protocol.told(count);
    }
}

/// Leaves a short message's end to [`Transfers::settle`], because it has more to it than most.
#[cold]
fn deliver_later(delivered: &mut Vec<(EndpointId, proto::Short)>, endpoint: EndpointId, short: proto::Short) {
    delivered.push((endpoint, short));
}
