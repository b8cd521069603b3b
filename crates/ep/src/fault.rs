//! Lost ranks.

use std::fmt;

/// A rank that was lost: its connection ended, or it exceeded the timeout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The rank.
    pub rank: u32,
    /// `dispatch`, `combine` or `sync`; `connection` if the connection ended outside of an operation.
    pub operation: &'static str,
    /// Sequence number of the operation, counted from 1 and equal on all ranks. 0 outside of an operation.
    pub number: u64,
    /// The message that was outstanding.
    pub stage: &'static str,
    /// Why the rank is considered lost.
    pub why: String,
    /// Number of ranks that are left, this one included.
    pub left: u32,
    /// Whether it was masked, so that the others continue without it.
    pub masked: bool,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fault { rank, operation, number, stage, why, left, masked } = self;
        write!(f, "rank {rank} is lost: {why}")?;
        if *number > 0 {
            write!(f, ", while {operation} {number} waited for {stage}")?;
        }
        match (masked, left) {
            (true, 1) => write!(f, "; it is masked, 1 rank continues"),
            (true, left) => write!(f, "; it is masked, {left} ranks continue"),
            (false, _) => write!(f, "; operations fail until it is masked, disconnected, or reconnected"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_rank_that_is_left_is_counted_in_the_singular() {
        let fault = |left| Fault {
            rank: 1,
            operation: "dispatch",
            number: 4,
            stage: "its rows",
            why: "its connection ended".into(),
            left,
            masked: true,
        };
        let text = "rank 1 is lost: its connection ended, while dispatch 4 waited for its rows; it is masked, ";
        assert_eq!(fault(1).to_string(), format!("{text}1 rank continues"));
        assert_eq!(fault(3).to_string(), format!("{text}3 ranks continue"));
    }
}
