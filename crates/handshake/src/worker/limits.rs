use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

/// Limits on handshakes in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most at a time.
    pub half_open: usize,
    /// Most at a time from one IP address, or from one user over the Unix socket.
    pub half_open_per_source: usize,
    /// Longest time that one may take.
    pub timeout: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { half_open: 64, half_open_per_source: 16, timeout: Duration::from_secs(5) }
    }
}

/// Where a connection comes from, as far as limits tell connections apart.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Source {
    Ip(IpAddr),
    User(u32),
}

/// The handshakes in progress at one listener.
pub(super) struct HalfOpen {
    limits: Limits,
    count: Mutex<Count>,
}

#[derive(Default)]
struct Count {
    total: usize,
    by_source: HashMap<Source, usize>,
}

impl HalfOpen {
    pub(super) fn new(limits: Limits) -> HalfOpen {
        HalfOpen { limits, count: Mutex::default() }
    }

    /// Counts one more handshake, until the slot is dropped; or why there is no room for it.
    pub(super) fn take(half_open: &Arc<HalfOpen>, source: Source) -> Result<Slot, String> {
        let limits = &half_open.limits;
        let mut count = half_open.count.lock();
        if count.total >= limits.half_open {
            return Err(format!("{} handshakes are in progress, the limit of this listener", limits.half_open));
        }
        let from_source = count.by_source.entry(source).or_insert(0);
        if *from_source >= limits.half_open_per_source {
            let limit = limits.half_open_per_source;
            return Err(format!("{limit} handshakes from this address are in progress, the limit for one address"));
        }
        *from_source += 1;
        count.total += 1;
        drop(count);
        Ok(Slot { half_open: Arc::clone(half_open), source })
    }
}

/// The right to have one handshake in progress.
pub(super) struct Slot {
    half_open: Arc<HalfOpen>,
    source: Source,
}

impl Slot {
    pub(super) fn source(&self) -> Source {
        self.source
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut count = self.half_open.count.lock();
        count.total -= 1;
        if let Some(from_source) = count.by_source.get_mut(&self.source) {
            *from_source -= 1;
            if *from_source == 0 {
                count.by_source.remove(&self.source);
            }
        }
    }
}
