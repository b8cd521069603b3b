use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crossrail_types::LaneId;

/// The owner wants the memory back.
const RECALLED: u32 = 1 << 31;
/// One [`Kept`]. Below are the uses that are entered at present.
const KEPT: u32 = 1 << 16;

/// One operation's memory, lent to lanes until its owner recalls it.
///
/// A loan is *lent*; after [`Loan::recall`] it is *being returned* while a lane keeps the memory; then it is
/// *returned*: no lane touches the memory again, so the owner may free it.
///
/// A lane that can stop between two calls, because it copies the bytes itself or has the kernel do so, enters the
/// memory around each ([`Loan::enter`]): then it is returned as soon as it is recalled. A lane whose operations run on
/// by themselves keeps it ([`Loan::keep`]) until the operation has ended, or what carries it was torn down.
#[derive(Debug, Default)]
pub struct Loan {
    word: AtomicU32,
    /// The lane of each [`Kept`].
    keepers: Mutex<Vec<LaneId>>,
}

/// Proof that the memory may be touched until this is dropped.
#[derive(Debug)]
pub struct LoanUse<'a>(&'a Loan);

/// Proof that the memory may be touched until this is dropped, by operations that outlive the call which began them.
#[derive(Debug)]
pub struct Kept {
    loan: Arc<Loan>,
    lane: LaneId,
}

impl Loan {
    /// Enters the memory, or `None` if it was recalled. Keep the guard only across one non-blocking call: whoever
    /// recalls the loan waits for it.
    #[inline]
    pub fn enter(&self) -> Option<LoanUse<'_>> {
        let before = self.word.fetch_add(1, Ordering::Acquire);
        if before & RECALLED != 0 {
            self.word.fetch_sub(1, Ordering::Release);
            return None;
        }
        Some(LoanUse(self))
    }

    /// Keeps the memory for an operation of that lane's, or `None` if it was recalled.
    pub fn keep(self: &Arc<Self>, lane: LaneId) -> Option<Kept> {
        let one_more = |word: u32| (word & RECALLED == 0).then(|| word + KEPT);
        self.word.fetch_update(Ordering::Acquire, Ordering::Relaxed, one_more).ok()?;
        self.keepers.lock().unwrap_or_else(PoisonError::into_inner).push(lane);
        Some(Kept { loan: Arc::clone(self), lane })
    }

    /// Keeps the memory even if it was recalled: for memory that another process may be accessing, which no recall
    /// reaches. The owner must not have been notified of the loan's return.
    pub fn hold(self: &Arc<Self>, lane: LaneId) -> Kept {
        self.word.fetch_add(KEPT, Ordering::AcqRel);
        self.keepers.lock().unwrap_or_else(PoisonError::into_inner).push(lane);
        Kept { loan: Arc::clone(self), lane }
    }

    /// Asks for the memory back, and waits for a copy that is in progress right now. Returns whether the memory is
    /// returned: if not, a lane keeps it and reports the return to its sink
    /// ([`Sink::returned`](crate::Sink::returned)), unless the lane is dropped first.
    pub fn recall(&self) -> bool {
        self.word.fetch_or(RECALLED, Ordering::AcqRel);
        loop {
            let word = self.word.load(Ordering::Acquire);
            if word & (KEPT - 1) == 0 {
                return word == RECALLED;
            }
            std::thread::yield_now();
        }
    }

    /// Whether [`Loan::recall`] was called.
    pub fn is_recalled(&self) -> bool {
        self.word.load(Ordering::Acquire) & RECALLED != 0
    }

    /// Whether it was recalled, and no lane touches the memory again.
    pub fn is_returned(&self) -> bool {
        self.word.load(Ordering::Acquire) & !(KEPT - 1) == RECALLED
    }

    /// The lanes that keep the memory.
    pub fn keepers(&self) -> Vec<LaneId> {
        self.keepers.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for LoanUse<'_> {
    fn drop(&mut self) {
        self.0.word.fetch_sub(1, Ordering::Release);
    }
}

impl Kept {
    /// Gives the memory back. Whether that returns a loan that was recalled.
    pub fn give_back(self) -> bool {
        let loan = Arc::clone(&self.loan);
        drop(self);
        loan.is_returned()
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let mut keepers = self.loan.keepers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = keepers.iter().position(|lane| *lane == self.lane) {
            keepers.swap_remove(at);
        }
        drop(keepers);
        self.loan.word.fetch_sub(KEPT, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recalled_loan_admits_nobody() {
        let loan = Arc::new(Loan::default());
        assert!(loan.enter().is_some());
        assert!(!loan.is_recalled() && !loan.is_returned());
        assert!(loan.recall(), "nobody keeps it");
        assert!(loan.enter().is_none() && loan.keep(LaneId(1)).is_none());
        assert!(loan.is_recalled() && loan.is_returned());
    }

    #[test]
    fn a_loan_that_is_kept_is_returned_by_its_last_keeper() {
        let loan = Arc::new(Loan::default());
        let early = loan.keep(LaneId(3)).expect("lent");
        assert!(!early.give_back(), "nobody has asked for it");
        let (first, last) = (loan.keep(LaneId(1)).expect("lent"), loan.keep(LaneId(2)).expect("lent"));
        assert!(!loan.recall());
        assert_eq!((loan.is_recalled(), loan.is_returned(), loan.keepers()), (true, false, vec![LaneId(1), LaneId(2)]));
        assert!(loan.enter().is_none() && loan.keep(LaneId(1)).is_none(), "no further use");
        assert!(!first.give_back());
        assert!(last.give_back(), "the last one returns it");
        assert!(loan.recall() && loan.keepers().is_empty());
    }

    #[test]
    fn memory_that_another_process_may_access_is_not_returned_by_a_recall() {
        let loan = Arc::new(Loan::default());
        assert!(loan.recall());
        let held = loan.hold(LaneId(4));
        assert!(!loan.recall() && !loan.is_returned() && loan.enter().is_none());
        assert_eq!(loan.keepers(), [LaneId(4)]);
        assert!(held.give_back());
    }

    #[test]
    fn recalling_waits_for_whoever_is_inside() {
        let loan = Arc::new(Loan::default());
        let inside = loan.enter().expect("lent");
        std::thread::scope(|scope| {
            let recalling = scope.spawn(|| loan.recall());
            while !loan.is_recalled() {
                std::thread::yield_now();
            }
            assert!(!recalling.is_finished(), "recalled while the memory is in use");
            drop(inside);
            assert!(recalling.join().expect("no panic"));
        });
    }
}
