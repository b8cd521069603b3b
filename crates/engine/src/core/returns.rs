//! Recalled memory that a lane still holds.
//!
//! A lane that cannot stop between two calls holds memory until its outstanding work has ended
//! ([`Loan`](crossrail_transport::Loan)). Until then the operation is not over for its caller, the region is in use,
//! and an unexpected message's memory is not freed. A lane that holds memory for too long is torn down, which ends its
//! work.

use std::sync::Arc;
use std::time::Duration;

use crossrail_proto as proto;
use crossrail_transport::Loan;
use crossrail_types::{LaneId, OpId};
use proto::{RegionRef, Time};

/// How long a lane may keep memory that was recalled before it is torn down. The silence of a lane whose path is broken
/// is noticed sooner; a peer that is stopped may be noticed by nothing else.
pub(crate) const RETURN_MAX: Duration = Duration::from_secs(3);

/// What waits for a loan.
pub(super) enum Owner {
    /// An operation, whose outcome is attached to it.
    Operation(OpId),
    /// A peer's access to a region.
    Access(RegionRef),
    /// Memory of this end, which goes with the entry.
    Memory(Box<[u8]>),
}

struct Return {
    owner: Owner,
    loan: Arc<Loan>,
    /// When it was first found missing.
    since: Option<Time>,
}

/// See the module. Protected by the worker's lock.
#[derive(Default)]
pub(super) struct Returns(Vec<Return>);

impl Returns {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Has a loan that was recalled, and is not returned, waited for.
    #[cold]
    pub(super) fn await_loan(&mut self, owner: Owner, loan: Arc<Loan>) {
        self.0.push(Return { owner, loan, since: None });
    }

    /// Whether a lane keeps memory of that region.
    pub(super) fn has_region(&self, region: RegionRef) -> bool {
        self.0.iter().any(|entry| matches!(entry.owner, Owner::Access(of) if of == region) && !entry.loan.is_returned())
    }

    /// Whether a lane keeps memory of that operation.
    pub(super) fn has_operation(&self, op: OpId) -> bool {
        self.0.iter().any(|entry| matches!(entry.owner, Owner::Operation(of) if of == op) && !entry.loan.is_returned())
    }

    /// Forgets what the worker's end leaves kept for ever: those operations and regions.
    pub(super) fn take_all(&mut self) -> Vec<Owner> {
        std::mem::take(&mut self.0).into_iter().map(|entry| entry.owner).collect()
    }

    /// Takes the owners whose loans are returned.
    pub(super) fn take_returned(&mut self) -> Vec<Owner> {
        self.0.extract_if(.., |entry| entry.loan.is_returned()).map(|entry| entry.owner).collect()
    }

    /// The lanes that have kept memory for [`RETURN_MAX`] since it was first asked for here, or they were last named.
    pub(super) fn overdue(&mut self, now: Time) -> Vec<LaneId> {
        let mut lanes = Vec::new();
        for entry in &mut self.0 {
            let since = *entry.since.get_or_insert(now);
            if now.since(since) >= RETURN_MAX.as_nanos() as u64 {
                // A lane that has ended, and whose peer may still be copying, is named again and again.
                entry.since = Some(now);
                lanes.extend(entry.loan.keepers());
            }
        }
        lanes.sort_unstable();
        lanes.dedup();
        lanes
    }

    /// When [`Returns::overdue`] is worth asking.
    pub(super) fn timer(&self, now: Time) -> Option<Time> {
        let since = self.0.iter().map(|entry| entry.since.unwrap_or(now)).min()?;
        Some(Time(since.0.saturating_add(RETURN_MAX.as_nanos() as u64)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REGION: RegionRef = RegionRef { index: 4, generation: 2 };
    const OP: OpId = OpId { index: 1, generation: 1 };

    #[test]
    fn a_lane_that_keeps_memory_too_long_is_named() {
        let loan = Arc::new(Loan::default());
        let kept = loan.keep(LaneId(7)).expect("lent");
        assert!(!loan.recall());
        let mut returns = Returns::default();
        returns.await_loan(Owner::Access(REGION), Arc::clone(&loan));
        returns.await_loan(Owner::Operation(OP), loan);
        assert!(returns.has_region(REGION) && returns.has_operation(OP));
        assert!(returns.take_returned().is_empty());
        let late = Time(5 + RETURN_MAX.as_nanos() as u64);
        assert!(returns.overdue(Time(5)).is_empty(), "it has just been asked for");
        assert_eq!(returns.timer(Time(9)), Some(late));
        assert_eq!(returns.overdue(late), [LaneId(7)]);
        drop(kept);
        assert!(!returns.has_region(REGION) && !returns.has_operation(OP));
        assert_eq!((returns.take_returned().len(), returns.is_empty()), (2, true));
    }
}
