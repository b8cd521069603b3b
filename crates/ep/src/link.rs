//! How the ranks of a buffer are reached.

use crossrail::LaneReport;

/// How a rank is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// It is this rank.
    Myself,
    /// Each maps the other's heap.
    Heap,
    /// By the engine's one-sided writes.
    Network,
}

/// One rank and how it is reached.
#[derive(Clone, Debug, PartialEq)]
pub struct Link {
    /// The rank.
    pub rank: u32,
    /// How.
    pub kind: LinkKind,
    /// Whether it is masked.
    pub masked: bool,
    /// The engine's lanes to it, with the bytes they carried; none to this rank itself.
    pub lanes: Vec<LaneReport>,
}
