//! What operations move.

/// The bytes that an operation moved: rows and their scales.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bytes {
    /// One row per selection, this rank's own included.
    pub logical: u64,
    /// Bytes sent to other ranks.
    pub wire: u64,
    /// Bytes sent to other nodes.
    pub network: u64,
}
