//! Receiving and confirming short messages without a poll.
#![allow(unsafe_code)]

use crossrail_transport::Lane;
use crossrail_types::{EndpointId, Head, LaneId};

use super::Transfers;
use crate::core::lanes::Lanes;
use crate::core::operations::{Received, UsualLane, Wanted};
use crate::core::peers::Peer;
use crate::core::polled_lanes::PolledLanes;
use crate::core::tables::Tables;

impl Transfers {
    /// Receives the peer's next message without a poll, if it is short, has arrived, and matches the oldest posted
    /// receive on a connection whose fast path is on. `spins`: how often to recheck.
    #[inline]
    pub(in crate::core) fn receive_short(
        &mut self,
        endpoint: EndpointId,
        spins: u32,
        wanted: Option<Wanted<'_>>,
    ) -> Received {
        let Tables { clock, operations, matcher, peers, lanes, .. } = &mut self.tables;
        let Some(peer) = peers.get_mut(endpoint) else { return Received::Nothing };
        let Some(id) = peer.message_lane() else { return Received::Nothing };
        let Some(polled) = self.polled.entry(id) else { return Received::Nothing };
        let lane = &mut *polled.lane;
        let mut head = Head::new(0, 0);
        if !(0..=spins).any(|_| lane.peek(&mut head)) {
            return Received::Nothing;
        }
        let from = UsualLane { endpoint, lane: id, names: peer.names() };
        let mut ended = |short| {
            if !operations.finish_short(&from, &short) {
                operations.deliver_later(endpoint, &{ short });
            }
        };
        // Where the fast path does not apply, nothing was taken from the lane, and a poll takes the slow path.
        let placed = peer.protocol.place_short(clock.now(), id, &head, matcher, &mut ended);
        let Some(short) = placed else { return Received::Nothing };
        polled.used = true;
        // What this end sends must be on the lane before the count says that it was.
        let count = lanes.get(id).filter(|lane| !lane.has_pending()).map(|_| peer.protocol.placed_count());
        // SAFETY: `bytes` is the head's length and no more than the receive has room for, in host memory that may be
        // written at once: `place_short` answers for both. Nothing has been called on the lane since.
        let mut take = |dst| unsafe { lane.take(dst, short.bytes as usize, count) };
        let mut told = false;
        let received = operations.receive_short(&from, &short, wanted, |dst| told = take(dst));
        if told {
            peer.protocol.count_published(peer.protocol.placed_count());
        }
        if told && received != Received::Attached {
            let more = self.wake_ups.is_observed() | operations.has_delivered() | peer.protocol.has_events();
            if !more && peer.bulk().is_empty() {
                return received;
            }
        } else if received == Received::Attached {
            operations.deliver_later(endpoint, &{ short });
        }
        self.settle_received(endpoint);
        received
    }

    #[inline(never)]
    fn settle_received(&mut self, endpoint: EndpointId) {
        self.settle(endpoint);
    }

    /// Applies the count of delivered messages that this peer has published; whether it was news.
    pub(in crate::core) fn collect_count(&mut self, endpoint: EndpointId) -> bool {
        let Tables { clock, operations, peers, .. } = &mut self.tables;
        let Some(peer) = peers.get_mut(endpoint) else { return false };
        let Some(id) = peer.message_lane() else { return false };
        if !peer.protocol.awaits_count() {
            return false;
        }
        let Some(lane) = self.polled.get_mut(id) else { return false };
        // The next poll reports an error, too.
        let Ok(Some(count)) = lane.published() else { return false };
        let mut any = false;
        let usual = UsualLane { endpoint, lane: id, names: peer.names() };
        let mut ended = |short| {
            any = true;
            if !operations.finish_short(&usual, &short) {
                operations.deliver_later(endpoint, &{ short });
            }
        };
        // An impossible count breaks the connection off, which is one of the protocol's events.
        let broken = peer.protocol.published(clock.now(), count, &mut ended).is_err();
        let more = broken | peer.protocol.has_events();
        // What is owed to the peer was published when it was delivered, or will be when the lane has room.
        let is_rest = more | self.wake_ups.is_observed() | operations.has_delivered() | !peer.bulk().is_empty();
        if any | more && (is_rest || peer.protocol.has_urgent(id)) {
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
    if let Some(count) = countable(peer, lanes, id)
        && lane.publish(count)
    {
        peer.protocol.count_published(count);
    }
}

/// The count of delivered messages, if it is news to the peer and may be published on its lane `id`.
#[inline(always)]
fn countable(peer: &Peer, lanes: &Lanes, id: LaneId) -> Option<u32> {
    let count = peer.protocol.unpublished_count(id)?;
    // What this end sends must be on the lane before the count says that it was.
    lanes.get(id).is_some_and(|lane| lane.counts() && !lane.has_pending()).then_some(count)
}
