//! The peer's operations, by the ids that it gave them.

use super::ledger;

/// State of an operation of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PeerOp {
    Free,
    Open,
    Arrival(u32),
    In(u32),
    Serve(u32),
}

/// States of the peer's operations, by their ids on the wire.
///
/// [`Peer`](super::Peer) claims an entry when it accepts a frame that begins an operation, and the part that
/// ends the operation frees it. Ids come from the peer: one out of range or in use is refused, and no more than its
/// credit may be claimed at a time, so that the tables stay as short as the credit allows.
#[derive(Debug)]
pub(super) struct PeerOps {
    /// By id less one.
    named: Vec<PeerOp>,
    /// Counted messages, by their places.
    counted: Vec<PeerOp>,
    active: u32,
    credit: u32,
}

impl PeerOps {
    pub(super) fn new(credit: u32) -> PeerOps {
        PeerOps { named: Vec::new(), counted: Vec::new(), active: 0, credit }
    }

    /// Operations that the peer may have in flight.
    pub(super) fn credit(&self) -> u32 {
        self.credit
    }

    /// The table with operation `op`, and where it is there. An id that is not possible is in neither.
    #[inline]
    fn entry(&self, op: u32) -> (&Vec<PeerOp>, usize) {
        match ledger::counted_place(self.credit, op) {
            Some(place) => (&self.counted, place as usize),
            None => (&self.named, op.wrapping_sub(1) as usize),
        }
    }

    #[inline]
    fn entry_mut(&mut self, op: u32) -> (&mut Vec<PeerOp>, usize) {
        match ledger::counted_place(self.credit, op) {
            Some(place) => (&mut self.counted, place as usize),
            None => (&mut self.named, op.wrapping_sub(1) as usize),
        }
    }

    #[inline]
    pub(super) fn at(&self, op: u32) -> PeerOp {
        let (ops, at) = self.entry(op);
        ops.get(at).copied().unwrap_or(PeerOp::Free)
    }

    pub(super) fn set(&mut self, op: u32, what: PeerOp) {
        let (ops, at) = self.entry_mut(op);
        if let Some(their) = ops.get_mut(at) {
            *their = what;
        }
    }

    /// Whether no operation of the peer's is claimed.
    pub(super) fn is_idle(&self) -> bool {
        self.active == 0
    }

    /// Whether `op`, which is free, was used before and the credit permits it: [`PeerOps::open`] may follow.
    #[inline]
    pub(super) fn may_open(&self, op: u32) -> bool {
        (op.wrapping_sub(1) as usize) < self.named.len() && self.active < self.credit
    }

    /// [`PeerOps::claim`] of an id that [`PeerOps::may_open`].
    #[inline]
    pub(super) fn open(&mut self, op: u32) {
        self.named[op as usize - 1] = PeerOp::Open;
        self.active += 1;
    }

    /// An operation begins. `Err`: the peer broke the protocol.
    #[inline]
    pub(super) fn claim(&mut self, op: u32, what: PeerOp) -> Result<(), String> {
        let last = ledger::counted_id(self.credit, self.credit) - 1;
        let (ops, at) = self.entry_mut(op);
        if let Some(their) = ops.get_mut(at) {
            if *their != PeerOp::Free {
                return Err(format!("operation {op} begun twice"));
            }
            *their = what;
        } else {
            if op == 0 || op > last {
                return Err(format!("operation {op} is out of range"));
            }
            ops.resize(at + 1, PeerOp::Free);
            ops[at] = what;
        }
        self.active += 1;
        if self.active > self.credit {
            return Err(format!("more than {} operations in flight", self.credit));
        }
        Ok(())
    }

    /// An operation is over.
    #[inline]
    pub(super) fn free(&mut self, op: u32) {
        let (ops, at) = self.entry_mut(op);
        if let Some(their) = ops.get_mut(at)
            && *their != PeerOp::Free
        {
            *their = PeerOp::Free;
            self.active -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_out_of_range_or_in_use_are_refused() {
        let mut ops = PeerOps::new(4);
        assert_eq!(ops.at(1), PeerOp::Free);
        assert!(ops.claim(0, PeerOp::Open).is_err());
        // Eight operations with names, then four counted ones.
        assert!(ops.claim(13, PeerOp::Open).is_err());
        for id in [8, 9, 12] {
            assert_eq!((ops.claim(id, PeerOp::In(id)), ops.at(id)), (Ok(()), PeerOp::In(id)));
        }
        assert!(ops.claim(9, PeerOp::Open).is_err());
        ops.free(9);
        ops.free(9);
        assert_eq!(ops.at(9), PeerOp::Free);
        assert!(ops.may_open(1) && !ops.may_open(9), "it is a counted one's");
        ops.open(1);
        assert_eq!(ops.claim(2, PeerOp::Open), Ok(()));
        assert!(!ops.may_open(3) && ops.claim(3, PeerOp::Open).is_err(), "the credit is used up");
    }
}
