//! Counters and traces of a running process, readable by other processes.
//!
//! Every process that uses Crossrail publishes one [page](Page) of counters in shared memory. The owner of a row (a
//! worker, an expert buffer, a group) writes it without a lock, whenever it chooses; any process of the same user reads
//! it ([`read`]) without disturbing the writer.
//!
//! ```text
//! layout   what a page consists of: header, rows, and the fields of each kind of row, declared once
//! page     this process's page: creation, removal, pages that dead processes left
//! row      one row of it, written as a seqlock
//! read     the pages of other processes, none of which is trusted
//! metrics  the same for Prometheus
//! trace    a timeline of a worker's events, for Perfetto
//! ```

mod clock;
mod layout;
pub mod metrics;
mod page;
mod process;
mod read;
mod row;
mod serve;
pub mod trace;

pub use clock::now_ns;
pub use layout::{ERRORS, Field, Form, HISTOGRAM_LIMITS_NS, HISTOGRAM_WORDS, KINDS, Kind, VERSION, fields};
pub use page::{Page, count_error, open, remove, summary};
pub use read::{Found, PageSnapshot, RowSnapshot, Unreadable, Value, WaitSnapshot, pages, parse};
pub use row::{Histogram, Row, Wait, Writer, ranks_text};
pub use serve::export;

#[cfg(test)]
mod tests;
