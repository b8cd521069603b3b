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
    pub(crate) gone: Option<Gone>,
    pub(crate) way: Way,
    /// Fails when the connection ends.
    pub(crate) life: Option<Request>,
}

/// How a connection ended.
#[derive(Clone, Debug)]
pub(crate) struct Gone {
    pub(crate) why: String,
    pub(crate) said: bool,
}

/// How kernels write to it.
pub(crate) enum Way {
    /// It is this rank.
    Myself,
    /// Straight into its heap.
    Near { endpoint: Endpoint, heap: Mapped },
    /// Into a mirror of its heap, from which the host carries it there.
    Far(Box<Far>),
}

/// A rank whose heap this rank's GPU does not reach.
#[derive(Clone)]
pub(crate) struct Far {
    pub(crate) rank: u32,
    pub(crate) endpoint: Endpoint,
    /// Its heap.
    pub(crate) key: RegionKey,
    pub(crate) mirror: Memory,
}

impl Peer {
    pub(crate) fn myself(rank: u32) -> Peer {
        Peer { rank, generation: 0, masked: false, gone: None, way: Way::Myself, life: None }
    }

    pub(crate) fn endpoint(&self) -> Option<&Endpoint> {
        match &self.way {
            Way::Myself => None,
            Way::Near { endpoint, .. } => Some(endpoint),
            Way::Far(far) => Some(&far.endpoint),
        }
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.gone.is_none() && self.endpoint().is_none_or(Endpoint::is_alive)
    }

    /// Why its connection has ended; `None` while it has not.
    pub(crate) fn end(&self) -> Option<String> {
        self.endpoint().and_then(Endpoint::end)
    }

    pub(crate) fn far(&self) -> Option<&Far> {
        match &self.way {
            Way::Far(far) => Some(far),
            _ => None,
        }
    }

    /// The mirror of its heap, if it is out of reach.
    pub(crate) fn mirror(&self) -> Option<&Memory> {
        self.far().map(|far| &far.mirror)
    }

    /// Where kernels write what is for it.
    pub(crate) fn base(&self, own: u64) -> u64 {
        match &self.way {
            Way::Myself => own,
            Way::Near { heap, .. } => heap.ptr() as u64,
            Way::Far(far) => far.mirror.ptr() as u64,
        }
    }

    pub(crate) fn kind(&self) -> LinkKind {
        match &self.way {
            Way::Myself => LinkKind::Myself,
            Way::Near { .. } => LinkKind::Heap,
            Way::Far(_) => LinkKind::Network,
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
