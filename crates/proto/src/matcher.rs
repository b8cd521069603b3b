use crossrail_types::{EndpointId, OpId};

/// Tag matching for all peers of a worker: posted receives in order, unexpected messages in order.
#[derive(Debug, Default)]
pub struct Matcher {}

impl Matcher {
    /// Nothing posted, nothing unexpected.
    pub fn new() -> Matcher {
        Matcher::default()
    }

    /// Posts a receive for messages with `message_tag & mask == tag & mask`, from that peer or from any.
    ///
    /// `Some((peer, arrival))`: it matched the oldest such message that has already come; hand it to that peer's
    /// [`crate::Peer::accept`]. `None`: it waits.
    pub fn post(
        &mut self,
        op: OpId,
        tag: u64,
        mask: u64,
        from: Option<EndpointId>,
        capacity: u64,
    ) -> Option<(EndpointId, u32)> {
        let _ = (op, tag, mask, from, capacity);
        unimplemented!()
    }

    /// Takes a posted receive back; false if it is not waiting here (any more). The caller completes it.
    pub fn cancel(&mut self, op: OpId) -> bool {
        let _ = op;
        unimplemented!()
    }

    /// Takes back the receives posted for that peer alone ([`crate::Peer::dead`] does so itself).
    pub fn peer_dead(&mut self, peer: EndpointId) -> Vec<OpId> {
        let _ = peer;
        unimplemented!()
    }

    /// Length and tag of the oldest unexpected message that such a receive would match.
    pub fn probe(&self, tag: u64, mask: u64, from: Option<EndpointId>) -> Option<(EndpointId, u64, u64)> {
        let _ = (tag, mask, from);
        unimplemented!()
    }
}
