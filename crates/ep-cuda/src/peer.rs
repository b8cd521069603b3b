//! A connected rank.

use std::sync::Arc;
use std::time::Duration;

use crossrail::{Endpoint, Mapped, Request};
use crossrail_ep::{Fault, LinkKind};

use crate::proxy::FarRank;

/// A rank that is connected.
pub(crate) struct Peer {
    pub(crate) rank: u32,
    /// Number of its connection, so that the end of an earlier one is not taken for its own.
    pub(crate) generation: u64,
    pub(crate) masked: bool,
    /// Its loss, until the caller masks, unmasks or disconnects it.
    pub(crate) lost: Option<Fault>,
    /// Set once its process has left or died.
    pub(crate) departure: Option<Departure>,
    pub(crate) path: Path,
    /// A receive that never completes, and fails when the connection ends.
    pub(crate) life: Option<Request>,
}

/// How a connection ended.
#[derive(Clone, Debug)]
pub(crate) struct Departure {
    pub(crate) why: String,
    /// Its process has died, or is out of reach; otherwise it has closed the connection.
    pub(crate) is_dead: bool,
    pub(crate) reported: bool,
}

/// How kernels write to a rank's heap.
pub(crate) enum Path {
    /// This rank itself.
    Own,
    /// Directly, through the mapped heap, in which this rank has inbox `inbox`.
    Mapped { endpoint: Endpoint, heap: Mapped, inbox: u32 },
    /// Into memory of this host that its process maps, too.
    Host { endpoint: Endpoint, far: Arc<FarRank> },
    /// Into pinned memory, from which the proxy sends.
    Far { endpoint: Endpoint, far: Arc<FarRank> },
    /// Not at all: ranks of equal number on both nodes forward what they send each other.
    Through { endpoint: Endpoint },
}

impl Peer {
    pub(crate) fn myself(rank: u32) -> Peer {
        Peer { rank, generation: 0, masked: false, lost: None, departure: None, path: Path::Own, life: None }
    }

    /// The same rank for a variant of the buffer, which does not own the connection.
    pub(crate) fn for_variant(&self) -> Peer {
        let path = match &self.path {
            Path::Own => Path::Own,
            Path::Mapped { endpoint, heap, inbox } => {
                Path::Mapped { endpoint: endpoint.clone(), heap: heap.clone(), inbox: *inbox }
            }
            Path::Host { endpoint, far } => Path::Host { endpoint: endpoint.clone(), far: far.clone() },
            Path::Far { endpoint, far } => Path::Far { endpoint: endpoint.clone(), far: far.clone() },
            Path::Through { endpoint } => Path::Through { endpoint: endpoint.clone() },
        };
        let Peer { rank, generation, masked, ref lost, ref departure, .. } = *self;
        Peer { rank, generation, masked, lost: lost.clone(), departure: departure.clone(), path, life: None }
    }

    pub(crate) fn endpoint(&self) -> Option<&Endpoint> {
        match &self.path {
            Path::Own => None,
            Path::Mapped { endpoint, .. }
            | Path::Host { endpoint, .. }
            | Path::Far { endpoint, .. }
            | Path::Through { endpoint } => Some(endpoint),
        }
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.departure.is_none() && self.endpoint().is_none_or(Endpoint::is_alive)
    }

    /// Reason of the connection's end; `None` while it is open.
    pub(crate) fn end(&self) -> Option<String> {
        self.endpoint().and_then(Endpoint::end)
    }

    /// Its areas, if the proxy sends to it.
    pub(crate) fn far(&self) -> Option<&Arc<FarRank>> {
        match &self.path {
            Path::Far { far, .. } => Some(far),
            _ => None,
        }
    }

    /// Its inbox here, if that does not lie in this rank's heap.
    pub(crate) fn apart(&self) -> Option<&FarRank> {
        match &self.path {
            Path::Host { far, .. } | Path::Far { far, .. } => Some(far),
            _ => None,
        }
    }

    pub(crate) fn kind(&self) -> LinkKind {
        match &self.path {
            Path::Own => LinkKind::Myself,
            Path::Mapped { .. } | Path::Host { .. } => LinkKind::Heap,
            Path::Far { .. } | Path::Through { .. } => LinkKind::Network,
        }
    }

    /// Closes the connection.
    pub(crate) fn close(self, limit: Duration) {
        if let Some(life) = &self.life {
            life.cancel();
        }
        if let Some(endpoint) = self.endpoint() {
            // Best effort: the peer may be dead.
            let _ = endpoint.close(Some(limit));
        }
    }
}
