/// Which way staged bytes go. Each direction has bounce slots of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From device memory into a slot.
    Out,
    /// From a slot into device memory.
    In,
}
