//! How the ranks of a buffer are reached.

use crossrail::LaneReport;

/// How a rank is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// The rank is this one.
    Myself,
    /// Both map the other's heap.
    Heap,
    /// Through one-sided writes of the engine.
    Network,
}

/// How a rank is reached.
#[derive(Clone, Debug, PartialEq)]
pub struct Link {
    /// The rank.
    pub rank: u32,
    /// The kind of link.
    pub kind: LinkKind,
    /// Whether the rank is masked.
    pub masked: bool,
    /// The engine's lanes to the rank, with the bytes that each carried; empty for this rank itself.
    pub lanes: Vec<LaneReport>,
    /// Rails and copies that were expected to carry data to the rank and do not, with the reasons.
    pub missed: Vec<(String, String)>,
}
