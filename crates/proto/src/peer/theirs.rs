//! The peer's operations, by the ids that it gave them.

use super::ledger;

/// What became of an operation of the peer's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Their {
    Free,
    Open,
    Arrival(u32),
    In(u32),
    Serve(u32),
}

/// What became of the peer's operations, by their ids on the wire.
///
/// [`Peer`](super::Peer) claims an entry when it accepts a frame that begins an operation, and whoever ends the operation
/// frees it. Ids come from the peer: one out of range or in use is refused, and no more than its credit may be claimed
/// at a time, so that the tables stay as short as the credit allows.
#[derive(Debug)]
pub(super) struct Theirs {
    /// By id less one.
    named: Vec<Their>,
    /// Counted messages, by their places.
    counted: Vec<Their>,
    active: u32,
    credit: u32,
}

impl Theirs {
    pub(super) fn new(credit: u32) -> Theirs {
        Theirs { named: Vec::new(), counted: Vec::new(), active: 0, credit }
    }

    /// The table with operation `op`, and where it is there. An id that is not possible is in neither.
    #[inline]
    fn entry(&self, op: u32) -> (&Vec<Their>, usize) {
        match ledger::counted_place(self.credit, op) {
            Some(place) => (&self.counted, place as usize),
            None => (&self.named, op.wrapping_sub(1) as usize),
        }
    }

    #[inline]
    fn entry_mut(&mut self, op: u32) -> (&mut Vec<Their>, usize) {
        match ledger::counted_place(self.credit, op) {
            Some(place) => (&mut self.counted, place as usize),
            None => (&mut self.named, op.wrapping_sub(1) as usize),
        }
    }

    #[inline]
    pub(super) fn at(&self, op: u32) -> Their {
        let (theirs, at) = self.entry(op);
        theirs.get(at).copied().unwrap_or(Their::Free)
    }

    pub(super) fn set(&mut self, op: u32, what: Their) {
        let (theirs, at) = self.entry_mut(op);
        if let Some(their) = theirs.get_mut(at) {
            *their = what;
        }
    }

    /// Whether no operation of the peer's is claimed.
    pub(super) fn is_idle(&self) -> bool {
        self.active == 0
    }

    /// Whether `op`, which is free, was used before and the credit permits it: [`Theirs::open`] may follow.
    #[inline]
    pub(super) fn may_open(&self, op: u32) -> bool {
        (op.wrapping_sub(1) as usize) < self.named.len() && self.active < self.credit
    }

    /// [`Theirs::claim`] of an id that [`Theirs::may_open`].
    #[inline]
    pub(super) fn open(&mut self, op: u32) {
        self.named[op as usize - 1] = Their::Open;
        self.active += 1;
    }

    /// An operation begins. `Err`: the peer broke the protocol.
    #[inline]
    pub(super) fn claim(&mut self, op: u32, what: Their) -> Result<(), String> {
        let last = ledger::counted_id(self.credit, self.credit) - 1;
        let (theirs, at) = self.entry_mut(op);
        if let Some(their) = theirs.get_mut(at) {
            if *their != Their::Free {
                return Err(format!("operation {op} begun twice"));
            }
            *their = what;
        } else {
            if op == 0 || op > last {
                return Err(format!("operation {op} is out of range"));
            }
            theirs.resize(at + 1, Their::Free);
            theirs[at] = what;
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
        let (theirs, at) = self.entry_mut(op);
        if let Some(their) = theirs.get_mut(at)
            && *their != Their::Free
        {
            *their = Their::Free;
            self.active -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_out_of_range_or_in_use_are_refused() {
        let mut theirs = Theirs::new(4);
        assert_eq!(theirs.at(1), Their::Free);
        assert!(theirs.claim(0, Their::Open).is_err());
        // Eight operations with names, then four counted ones.
        assert!(theirs.claim(13, Their::Open).is_err());
        for id in [8, 9, 12] {
            assert_eq!((theirs.claim(id, Their::In(id)), theirs.at(id)), (Ok(()), Their::In(id)));
        }
        assert!(theirs.claim(9, Their::Open).is_err());
        theirs.free(9);
        theirs.free(9);
        assert_eq!(theirs.at(9), Their::Free);
        assert!(theirs.may_open(1) && !theirs.may_open(9), "it is a counted one's");
        theirs.open(1);
        assert_eq!(theirs.claim(2, Their::Open), Ok(()));
        assert!(!theirs.may_open(3) && theirs.claim(3, Their::Open).is_err(), "the credit is used up");
    }
}
