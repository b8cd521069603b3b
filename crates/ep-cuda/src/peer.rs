//! A connected rank.

use std::time::Duration;

use crossrail::{Endpoint, Mapped, Memory, RegionKey, Request};
use crossrail_ep::{Fault, LinkKind};

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
    /// Directly, through the mapped heap.
    Mapped { endpoint: Endpoint, heap: Mapped },
    /// Into a local mirror, which the host forwards to the heap.
    Forwarded(Box<Forwarded>),
}

/// A rank whose heap this GPU cannot map.
#[derive(Clone)]
pub(crate) struct Forwarded {
    pub(crate) rank: u32,
    pub(crate) endpoint: Endpoint,
    /// Key of its heap.
    pub(crate) key: RegionKey,
    pub(crate) mirror: Memory,
}

impl Peer {
    pub(crate) fn myself(rank: u32) -> Peer {
        Peer { rank, generation: 0, masked: false, lost: None, departure: None, path: Path::Own, life: None }
    }

    /// The same rank for a variant of the buffer, which does not own the connection.
    pub(crate) fn for_variant(&self) -> Peer {
        let path = match &self.path {
            Path::Own => Path::Own,
            Path::Mapped { endpoint, heap } => Path::Mapped { endpoint: endpoint.clone(), heap: heap.clone() },
            Path::Forwarded(forwarded) => Path::Forwarded(forwarded.clone()),
        };
        let Peer { rank, generation, masked, ref lost, ref departure, .. } = *self;
        Peer { rank, generation, masked, lost: lost.clone(), departure: departure.clone(), path, life: None }
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

    /// Reason of the connection's end; `None` while it is open.
    pub(crate) fn end(&self) -> Option<String> {
        self.endpoint().and_then(Endpoint::end)
    }

    pub(crate) fn forwarded(&self) -> Option<&Forwarded> {
        match &self.path {
            Path::Forwarded(forwarded) => Some(forwarded),
            _ => None,
        }
    }

    /// The mirror of its heap, if it has one.
    pub(crate) fn mirror(&self) -> Option<&Memory> {
        self.forwarded().map(|forwarded| &forwarded.mirror)
    }

    /// Address at which kernels write its data: its heap as mapped here, or the mirror. `own`: this rank's heap.
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
