//! Ranks that were lost.

use std::fmt;

/// A rank that was masked because it died or did not come in time; the others went on without it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The rank.
    pub rank: u32,
    /// `dispatch`, `combine` or `sync`; `connection` when its end was noticed outside of an operation.
    pub operation: &'static str,
    /// Which one: operations are numbered from 1, alike on all ranks. 0 for none.
    pub number: u64,
    /// What was waited for.
    pub stage: &'static str,
    /// Why it is thought to be lost.
    pub why: String,
    /// Ranks that go on, this one included.
    pub left: u32,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fault { rank, operation, number, stage, why, left } = self;
        write!(f, "rank {rank} is lost: {why}")?;
        if *number > 0 {
            write!(f, ", while {operation} {number} waited for {stage}")?;
        }
        write!(f, "; it is masked, {left} ranks go on")
    }
}
