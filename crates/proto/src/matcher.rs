use std::collections::VecDeque;

use crossrail_types::{EndpointId, OpId};

/// A receive that waits.
#[derive(Clone, Copy, Debug)]
struct Posted {
    op: OpId,
    tag: u64,
    mask: u64,
    from: Option<EndpointId>,
    capacity: u64,
    at_once: bool,
}

/// A message that came before its receive.
#[derive(Clone, Copy, Debug)]
struct Unexpected {
    peer: EndpointId,
    arrival: u32,
    tag: u64,
    len: u64,
}

/// Tag matching for all peers of a worker: posted receives in order, unexpected messages in order.
#[derive(Debug, Default)]
pub struct Matcher {
    posted: VecDeque<Posted>,
    unexpected: VecDeque<Unexpected>,
}

#[inline]
fn fits(tag: u64, mask: u64, from: Option<EndpointId>, peer: EndpointId, message: u64) -> bool {
    (tag ^ message) & mask == 0 && from.is_none_or(|f| f == peer)
}

impl Matcher {
    /// Nothing posted, nothing unexpected.
    pub fn new() -> Matcher {
        Matcher::default()
    }

    /// Posts a receive for messages with `message_tag & mask == tag & mask`, from that peer or from any.
    ///
    /// `at_once`: its memory may be written whenever a message arrives ([`crate::Placing::Message`]); otherwise (memory
    /// of a device) the engine needs to hear of every step.
    ///
    /// `Some((peer, arrival))`: it matched the oldest such message that has already come; hand it to that peer's
    /// [`crate::Peer::accept`]. `None`: it waits.
    #[inline(always)]
    pub fn post(
        &mut self,
        op: OpId,
        tag: u64,
        mask: u64,
        from: Option<EndpointId>,
        capacity: u64,
        at_once: bool,
    ) -> Option<(EndpointId, u32)> {
        if !self.unexpected.is_empty()
            && let Some(at) = self.unexpected.iter().position(|u| fits(tag, mask, from, u.peer, u.tag))
        {
            let found = self.unexpected.remove(at)?;
            return Some((found.peer, found.arrival));
        }
        self.posted.push_back(Posted { op, tag, mask, from, capacity, at_once });
        None
    }

    /// Takes a posted receive back; false if it is not waiting here (any more). The caller completes it.
    pub fn cancel(&mut self, op: OpId) -> bool {
        match self.posted.iter().position(|p| p.op == op) {
            Some(at) => self.posted.remove(at).is_some(),
            None => false,
        }
    }

    /// Takes back the receives posted for that peer alone ([`crate::Peer::dead`] does so itself).
    pub fn peer_dead(&mut self, peer: EndpointId) -> Vec<OpId> {
        let mut ops = Vec::new();
        self.posted.retain(|p| {
            let stays = p.from != Some(peer);
            if !stays {
                ops.push(p.op);
            }
            stays
        });
        ops
    }

    /// Peer, tag and length of the oldest unexpected message that such a receive would match.
    pub fn probe(&self, tag: u64, mask: u64, from: Option<EndpointId>) -> Option<(EndpointId, u64, u64)> {
        self.unexpected.iter().find(|u| fits(tag, mask, from, u.peer, u.tag)).map(|u| (u.peer, u.tag, u.len))
    }

    /// Receives that wait.
    pub fn posted(&self) -> usize {
        self.posted.len()
    }

    /// Messages that wait.
    pub fn unexpected(&self) -> usize {
        self.unexpected.len()
    }

    /// The receive for a message that has come now, and its capacity.
    #[inline]
    pub(crate) fn arrive(&mut self, peer: EndpointId, tag: u64) -> Option<(OpId, u64)> {
        let first = self.posted.front()?;
        if fits(first.tag, first.mask, first.from, peer, tag) {
            return self.posted.pop_front().map(|p| (p.op, p.capacity));
        }
        let at = self.posted.iter().position(|p| fits(p.tag, p.mask, p.from, peer, tag))?;
        self.posted.remove(at).map(|p| (p.op, p.capacity))
    }

    /// The receive for a message of `len` bytes that has come now, if it is the oldest and has the room, and its memory
    /// may be written `at_once` where that is asked for; otherwise nothing is taken.
    #[inline(always)]
    pub(crate) fn arrive_within(&mut self, peer: EndpointId, tag: u64, len: u64, at_once: bool) -> Option<OpId> {
        let first = self.posted.front()?;
        let fits = fits(first.tag, first.mask, first.from, peer, tag) && len <= first.capacity;
        if !fits || (at_once && !first.at_once) {
            return None;
        }
        let op = first.op;
        self.posted.pop_front();
        Some(op)
    }

    /// Keeps a message that no receive matched.
    pub(crate) fn keep(&mut self, peer: EndpointId, arrival: u32, tag: u64, len: u64) {
        self.unexpected.push_back(Unexpected { peer, arrival, tag, len });
    }

    /// Forgets an unexpected message.
    pub(crate) fn forget(&mut self, peer: EndpointId, arrival: u32) {
        if let Some(at) = self.unexpected.iter().position(|u| u.peer == peer && u.arrival == arrival) {
            self.unexpected.remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: EndpointId = EndpointId(1);
    const B: EndpointId = EndpointId(2);

    fn op(index: u32) -> OpId {
        OpId { index, generation: 0 }
    }

    #[test]
    fn the_oldest_fitting_receive_takes_the_message() {
        let mut m = Matcher::new();
        assert_eq!(m.post(op(1), 7, u64::MAX, Some(B), 10, true), None);
        assert_eq!(m.post(op(2), 0, 0, None, 20, true), None);
        assert_eq!(m.post(op(3), 7, u64::MAX, Some(A), 30, true), None);
        assert_eq!(m.arrive(A, 7), Some((op(2), 20)));
        assert_eq!(m.arrive(A, 7), Some((op(3), 30)));
        assert_eq!(m.arrive(A, 7), None);
        assert_eq!(m.arrive(B, 8), None);
        assert_eq!(m.arrive(B, 7), Some((op(1), 10)));
    }

    #[test]
    fn the_oldest_fitting_message_is_taken() {
        let mut m = Matcher::new();
        m.keep(A, 5, 0x1_07, 1);
        m.keep(B, 6, 0x2_07, 2);
        assert_eq!(m.probe(7, 0xff, None), Some((A, 0x1_07, 1)));
        assert_eq!(m.post(op(1), 7, 0xff, Some(B), 9, true), Some((B, 6)));
        assert_eq!(m.post(op(2), 7, 0xff, None, 9, true), Some((A, 5)));
        assert_eq!(m.post(op(3), 7, 0xff, None, 9, true), None);
        assert!(m.cancel(op(3)));
        assert!(!m.cancel(op(3)));
    }

    #[test]
    fn a_dead_peer_takes_only_its_own_receives_along() {
        let mut m = Matcher::new();
        m.post(op(1), 0, 0, Some(A), 1, true);
        m.post(op(2), 0, 0, None, 1, true);
        m.post(op(3), 0, 0, Some(B), 1, true);
        assert_eq!(m.peer_dead(A), vec![op(1)]);
        assert_eq!(m.posted(), 2);
    }
}
