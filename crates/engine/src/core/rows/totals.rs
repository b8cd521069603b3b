//! Totals of the lists, mails and notices of all peers of a worker, and notices of peers that have ended.
//!
//! Maxima of a peer end with its connection: without maxima of all peers, and an account of the notices that connections
//! have left, a peer could reconnect to exceed them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossrail_types::EndpointId;

use super::wire::ALL_MAILS_MAX;

/// A sum of bytes.
#[derive(Debug, Default)]
pub(super) struct Total(AtomicU64);

impl Total {
    pub(super) fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn add(&self, bytes: u64) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn subtract(&self, bytes: u64) {
        self.0.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Bytes of all peers. Written under the worker's lock, but for lists.
#[derive(Debug, Default)]
pub(super) struct Totals {
    pub(super) lists: Arc<Total>,
    pub(super) mails: Total,
    /// Includes ended peers.
    pub(super) notices: Total,
}

impl Totals {
    pub(super) fn have_room_for_mail(&self, len: u64) -> bool {
        self.mails.bytes().saturating_add(len) <= ALL_MAILS_MAX
    }
}

/// Cost of unread notices of ended peers, per connection and per name.
#[derive(Default)]
pub(super) struct LeftNotices {
    connections: HashMap<EndpointId, (Arc<str>, u64)>,
    names: HashMap<Arc<str>, u64>,
}

impl LeftNotices {
    /// A peer has ended while `bytes` of its notices are queued.
    pub(super) fn add(&mut self, endpoint: EndpointId, name: &Arc<str>, bytes: u64) {
        if bytes > 0 {
            self.connections.insert(endpoint, (name.clone(), bytes));
            *self.names.entry(name.clone()).or_default() += bytes;
        }
    }

    /// A notice that cost `bytes` was taken.
    pub(super) fn take(&mut self, endpoint: EndpointId, bytes: u64) {
        let Some((name, left)) = self.connections.get_mut(&endpoint) else { return };
        *left = left.saturating_sub(bytes);
        let (name, is_empty) = (name.clone(), *left == 0);
        if is_empty {
            self.connections.remove(&endpoint);
        }
        if let Some(of_name) = self.names.get_mut(&name) {
            *of_name = of_name.saturating_sub(bytes);
            if *of_name == 0 {
                self.names.remove(&name);
            }
        }
    }

    /// Bytes that ended connections of that name have left.
    pub(super) fn of(&self, name: &str) -> u64 {
        self.names.get(name).copied().unwrap_or(0)
    }
}
