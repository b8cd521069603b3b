//! Segments of the peer, as a lane keeps track of them.

use std::sync::Arc;

use crate::descriptors::Held;
use crate::memory::Mapping;

/// A segment of the peer.
#[derive(Debug)]
pub(crate) enum PeerSegment {
    /// Passed, but not referenced and so not mapped yet.
    Passed(Held),
    /// Why there is no descriptor of it.
    Lost(&'static str),
    Mapped(Arc<Mapping>, Identity),
}

/// As `memory::identity`.
pub(crate) type Identity = u64;
