//! One rank as this one sees it.

use std::time::Duration;

use crossrail::{Endpoint, Mapped, Memory, RegionKey, Request};
use crossrail_ep::LinkKind;

/// A rank that is connected.
pub(crate) struct Peer {
    pub(crate) rank: u32,
    /// Tells its connection from earlier ones.
    pub(crate) generation: u64,
    pub(crate) masked: bool,
    /// Its process has left or died; why. Said once.
    pub(crate) departure: Option<Departure>,
    pub(crate) path: Path,
    /// Fails when the connection ends.
    pub(crate) life: Option<Request>,
}

/// How a connection ended.
#[derive(Clone, Debug)]
pub(crate) struct Departure {
    pub(crate) why: String,
    pub(crate) reported: bool,
}

/// How kernels write to it.
pub(crate) enum Path {
    /// It is this rank.
    Own,
    /// Straight into its heap.
    Mapped { endpoint: Endpoint, heap: Mapped },
    /// Into a mirror of its heap, from which the host carries it there.
    Forwarded(Box<Forwarded>),
}

/// A rank whose heap this rank's GPU does not reach.
#[derive(Clone)]
pub(crate) struct Forwarded {
    pub(crate) rank: u32,
    pub(crate) endpoint: Endpoint,
    /// Its heap.
    pub(crate) key: RegionKey,
    pub(crate) mirror: Memory,
}

impl Peer {
    pub(crate) fn myself(rank: u32) -> Peer {
        Peer { rank, generation: 0, masked: false, departure: None, path: Path::Own, life: None }
    }

    pub(crate) fn endpoint(&self) -> Option<&Endpoint> {
        match &self.path {
            Path::Own => None,
            Path::Mapped { endpoint, .. } => Some(endpoint),
            Path::Forwarded(forwarded) => Some(&forwarded.endpoint),
        }
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.departure.is_none() && self.endpoint().is_none_or(Endpoint::is_alive)
    }

    /// Why its connection has ended; `None` while it has not.
    pub(crate) fn end(&self) -> Option<String> {
        self.endpoint().and_then(Endpoint::end)
    }

    pub(crate) fn forwarded(&self) -> Option<&Forwarded> {
        match &self.path {
            Path::Forwarded(forwarded) => Some(forwarded),
            _ => None,
        }
    }

    /// The mirror of its heap, if it is out of reach.
    pub(crate) fn mirror(&self) -> Option<&Memory> {
        self.forwarded().map(|forwarded| &forwarded.mirror)
    }

    /// Where kernels write what is for it.
    pub(crate) fn base(&self, own: u64) -> u64 {
        match &self.path {
            Path::Own => own,
            Path::Mapped { heap, .. } => heap.ptr() as u64,
            Path::Forwarded(forwarded) => forwarded.mirror.ptr() as u64,
        }
    }

    pub(crate) fn kind(&self) -> LinkKind {
        match &self.path {
            Path::Own => LinkKind::Myself,
            Path::Mapped { .. } => LinkKind::Heap,
            Path::Forwarded(_) => LinkKind::Network,
        }
    }

    /// Says goodbye.
    pub(crate) fn close(self, limit: Duration) {
        if let Some(life) = &self.life {
            life.cancel();
        }
        if let Some(endpoint) = self.endpoint() {
            // A peer that is gone already needs no goodbye.
            let _ = endpoint.close(Some(limit));
        }
    }
}
