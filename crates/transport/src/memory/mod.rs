//! Memory, as links know it: below lanes, and below the engine.
//!
//! ```text
//! Domain  direct access to memory: describes ours, accesses, copies and maps what the peer described
//! Loan    an operation's memory, lent to lanes until its owner recalls it
//! List    memory as rows: what an operation moves when it is not one piece
//! ```

mod domain;
mod list;
mod loan;

pub use domain::{Copy, Descriptor, DirectKind, Domain, HALVES_MAX, Job, Step, Window};
pub use list::{Cursor, Index, List, Rows, Stride, copy_between};
pub use loan::{Kept, Loan, LoanUse};
