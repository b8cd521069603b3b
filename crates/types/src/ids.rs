//! Ids of lanes, endpoints and operations.

use std::fmt;

/// A lane of a worker. Unique for the lifetime of the worker, never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LaneId(pub u32);

/// An endpoint (peer) of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EndpointId(pub u32);

/// An operation in flight: a slab index, and a generation that distinguishes reuses of the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpId {
    /// Index into the worker's operation table.
    pub index: u32,
    /// Number of earlier uses of that index.
    pub generation: u32,
}

impl fmt::Display for LaneId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lane {}", self.0)
    }
}

impl fmt::Display for OpId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "op {}.{}", self.index, self.generation)
    }
}
