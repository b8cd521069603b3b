//! What operations move.

/// What an operation moved, in bytes of rows and their scales.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bytes {
    /// One row per selection, own rank's included.
    pub logical: u64,
    /// What left the rank.
    pub wire: u64,
    /// What left the node.
    pub network: u64,
}
