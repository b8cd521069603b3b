//! Peers that have ended and whose unexpected messages are still to be received.

use std::collections::VecDeque;

use crossrail_types::EndpointId;

/// See the module. The oldest first; protected by the worker's lock.
#[derive(Default)]
pub(super) struct LeftMessages {
    pub(super) peers: VecDeque<EndpointId>,
    /// Cost of the messages when the peers ended.
    pub(super) bytes: u64,
}
