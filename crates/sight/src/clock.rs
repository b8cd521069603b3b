use nix::time::{ClockId, clock_gettime};

/// Nanoseconds of the machine's monotonic clock: equal in all processes of a machine, in contrast to `Instant`.
pub fn now_ns() -> u64 {
    // It fails only for clocks that do not exist.
    clock_gettime(ClockId::CLOCK_MONOTONIC)
        .map_or(0, |time| time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64)
}
