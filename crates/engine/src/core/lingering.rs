//! Closed lanes whose peer may still be copying from or to memory of this end.
//!
//! A peer that was offered memory, or invited to write it, copies without the lane: closing the lane does not stop it.
//! It ends its own side of the lane once its copies have ended, and a process that has exited copies nothing. Until
//! one of the two is seen, the memory stays lent: its operations are not over, and its regions are in use. Nothing
//! bounds that time, as a stopped process may resume at any moment; waits for it have limits of their own, and end with
//! an error that names the peer.

use std::time::{Duration, Instant};

use crossrail_proto as proto;
use crossrail_transport::{Kept, Lane};
use crossrail_types::{EndpointId, Error, ErrorKind, Result};

/// Interval between two looks whether the peers have ended their side.
const LOOK_NS: u64 = 10_000_000;

struct Entry {
    endpoint: EndpointId,
    peer: String,
    lane: Box<dyn Lane>,
    kept: Vec<Kept>,
}

/// See the module. Protected by the worker's lock.
#[derive(Default)]
pub(crate) struct Lingering(Vec<Entry>);

impl Lingering {
    /// Closes a lane; it lingers if the peer has not ended its side. `kept`: what the peer may be accessing.
    pub(super) fn close(&mut self, (endpoint, peer): (EndpointId, String), mut lane: Box<dyn Lane>, kept: Vec<Kept>) {
        if !kept.is_empty() && !lane.close_and_wait(Duration::ZERO) {
            self.0.push(Entry { endpoint, peer, lane, kept });
        }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn is_with(&self, endpoint: EndpointId) -> bool {
        self.0.iter().any(|entry| entry.endpoint == endpoint)
    }

    /// The peers.
    pub(super) fn endpoints(&self) -> impl Iterator<Item = EndpointId> {
        self.0.iter().map(|entry| entry.endpoint)
    }

    /// Drops lanes whose peers have ended their side, which returns the memory. Whether there were any.
    pub(super) fn look(&mut self) -> bool {
        self.0.extract_if(.., |entry| entry.lane.close_and_wait(Duration::ZERO)).count() > 0
    }

    /// When [`Lingering::look`] is due.
    pub(super) fn timer(&self, now: proto::Time) -> Option<proto::Time> {
        (!self.0.is_empty()).then_some(proto::Time(now.0.saturating_add(LOOK_NS)))
    }

    /// Waits for all peers, at the end of the worker. Memory that a peer may still access is never released.
    ///
    /// # Errors
    /// `Timeout`: which peers have not ended their side within `limit`.
    pub(crate) fn end(self, limit: Duration) -> Result<()> {
        let until = Instant::now() + limit;
        let mut users = Vec::new();
        for Entry { peer, mut lane, kept, .. } in self.0 {
            if !lane.close_and_wait(until.saturating_duration_since(Instant::now())) {
                users.push(peer);
                // Its loans are never returned, so the memory is not used again.
                std::mem::forget(kept);
            }
        }
        if users.is_empty() { Ok(()) } else { Err(still_used(&mut users, limit)) }
    }
}

/// The error of a close after which those peers may still be accessing memory of this end.
pub(crate) fn still_used(users: &mut Vec<String>, waited: Duration) -> Error {
    users.sort_unstable();
    users.dedup();
    let detail = format!("{} may still read or write memory of operations that were in flight", users.join(", "));
    Error::new(ErrorKind::Timeout, "close", detail)
        .with_waited(waited)
        .with_hint("do not reuse or free that memory before the process has ended")
}
