//! The cost model by which ways to a peer are compared; both ends compute the same.
//!
//! The cost of a message is `latency + overhead + size / bandwidth`, the bandwidth being the smaller of the two
//! ends' (the model of UCX's protocol selection). The figures are constants of each transport, except for a
//! network device's own speed; they rank ways, and are no promise.

/// Largest message that goes with its first frame, whatever the cost model says.
pub(crate) const EAGER_LIMIT: usize = 64 << 10;

/// The cost of one way to a peer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Cost {
    pub(crate) latency_us: f64,
    pub(crate) overhead_us: f64,
    /// GB/s, 1e9 bytes.
    pub(crate) gb_per_s: f64,
}

impl Cost {
    pub(crate) const SELF: Cost = Cost { latency_us: 0.1, overhead_us: 0.05, gb_per_s: 10.0 };
    // Two copies, made by two processes concurrently, through lines that go from one's cache to the other's.
    pub(crate) const SHM_RING: Cost = Cost { latency_us: 0.2, overhead_us: 0.05, gb_per_s: 12.0 };
    // One copy by the kernel, which pins every page, but each process has it make half.
    pub(crate) const SHM_CMA: Cost = Cost { latency_us: 0.6, overhead_us: 1.5, gb_per_s: 25.0 };
    pub(crate) const SHM_MAPPED: Cost = Cost { latency_us: 0.6, overhead_us: 0.1, gb_per_s: 30.0 };
    pub(crate) const CUDA_IPC: Cost = Cost { latency_us: 4.0, overhead_us: 6.0, gb_per_s: 300.0 };
    const LOOPBACK: Cost = Cost { latency_us: 3.5, overhead_us: 1.0, gb_per_s: 6.0 };
    const NETWORK: Cost = Cost { latency_us: 15.0, overhead_us: 1.5, gb_per_s: 1.25 };

    /// Microseconds for `size` bytes.
    pub(crate) fn us(&self, size: u64) -> f64 {
        self.latency_us + self.overhead_us + size as f64 / (self.gb_per_s * 1e3)
    }

    pub(crate) fn rail(mine: Option<u32>, theirs: Option<u32>, loopback: bool) -> Cost {
        if loopback {
            return Cost::LOOPBACK;
        }
        let speed = match (mine, theirs) {
            (Some(mine), Some(theirs)) => Some(mine.min(theirs)),
            (one, other) => one.or(other),
        };
        Cost { gb_per_s: speed.map_or(Cost::NETWORK.gb_per_s, |mbps| f64::from(mbps) / 8e3), ..Cost::NETWORK }
    }
}

/// The size up to which `eager` costs less than a rendezvous by `bulk`, which takes a message back and forth first.
pub(crate) fn eager_max(eager: &Cost, bulk: &Cost, limit: usize) -> usize {
    let handshake = 2.0 * eager.latency_us + bulk.overhead_us;
    let per_byte = 1.0 / (eager.gb_per_s * 1e3) - 1.0 / (bulk.gb_per_s * 1e3);
    if per_byte <= 0.0 {
        return limit;
    }
    let bytes = (handshake / per_byte) as usize;
    // The largest power of two that is not beyond it, so that both ends round alike.
    (1 << bytes.max(1).ilog2()).clamp(1024, limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eager_ends_where_a_rendezvous_is_cheaper() {
        let limit = eager_max(&Cost::SHM_RING, &Cost::SHM_MAPPED, 64 << 10);
        assert!((1 << 10..=32 << 10).contains(&limit), "{limit}");
        let ring = Cost::SHM_RING.us(limit as u64);
        let direct = 2.0 * Cost::SHM_RING.latency_us + Cost::SHM_MAPPED.overhead_us + Cost::SHM_RING.us(limit as u64);
        assert!(ring <= direct);
        assert_eq!(eager_max(&Cost::SHM_RING, &Cost::SHM_CMA, 64 << 10), 32 << 10);
        assert_eq!(eager_max(&Cost::SHM_RING, &Cost::SHM_RING, 64 << 10), 64 << 10);
    }
}
