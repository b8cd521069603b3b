//! Settings that accept a fixed value or `auto`.

/// The number of connections per rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channels {
    /// Measured: more than one connection only where spare cores exist and throughput improves.
    Auto,
    /// This number, at least 1.
    Count(u32),
}

impl Channels {
    /// Connections that a rail has at first.
    pub fn first(self) -> u32 {
        match self {
            Channels::Auto => 1,
            Channels::Count(count) => count,
        }
    }
}

/// Where threads that serve a device run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Affinity {
    /// On the processors of the device's NUMA node, on machines with several.
    #[default]
    Auto,
    /// Wherever the scheduler puts them.
    Off,
}

/// The number of network I/O threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoThreads {
    /// Chosen from the number of rails and cores.
    #[default]
    Auto,
    /// This number, at least 1.
    Count(u32),
}
