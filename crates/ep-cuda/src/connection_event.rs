//! Connection events for the watching thread.

use crossrail::Receipt;
use crossrail_types::Error;

/// An event of a connection.
pub(crate) enum ConnectionEvent {
    Ended(ConnectionEnd),
    /// The rails to that rank have ended, and why; perhaps with the connection of this generation.
    Rails {
        rank: u32,
        generation: u64,
        why: String,
    },
    /// A notice of that rank has arrived over its connection of this generation.
    Notice {
        rank: u32,
        generation: u64,
        receipt: Receipt,
    },
}

/// A connection ended.
#[derive(Clone)]
pub(crate) struct ConnectionEnd {
    pub(crate) rank: u32,
    pub(crate) generation: u64,
    pub(crate) error: Error,
}
