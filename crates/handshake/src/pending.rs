//! Handshakes in progress, and the choice of one to evict for a newer one.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

/// Grace period of a handshake before it may be evicted for a newer one: bursts of genuine peers complete within it.
pub const GRACE: Duration = Duration::from_millis(50);

/// Handshakes in progress at one listener, oldest first, each with its source and what its owner keeps of it.
///
/// A client that opens connections and sends nothing must not lock others out: see [`evict`](Pending::evict). Sources
/// are counted as [`source_of`] groups them.
#[derive(Debug)]
pub struct Pending<S, T> {
    open: BTreeMap<u64, Entry<S, T>>,
    grace: Duration,
}

#[derive(Debug)]
struct Entry<S, T> {
    source: S,
    began: Instant,
    kept: T,
}

impl<S: Copy + Eq + Hash, T> Pending<S, T> {
    /// None in progress. Each is sure of its place for `grace`, [`GRACE`] as a rule.
    pub fn new(grace: Duration) -> Pending<S, T> {
        Pending { open: BTreeMap::new(), grace }
    }

    /// Adds a handshake; `id` is greater than all before.
    pub fn insert(&mut self, id: u64, source: S, began: Instant, kept: T) {
        self.open.insert(id, Entry { source, began, kept });
    }

    /// Removes a handshake. False: it has been removed already.
    pub fn remove(&mut self, id: u64) -> bool {
        self.open.remove(&id).is_some()
    }

    /// The number of handshakes in progress.
    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// Whether no handshake is in progress.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// The oldest handshake, and when it began.
    pub fn oldest(&self) -> Option<(u64, Instant)> {
        self.open.first_key_value().map(|(id, entry)| (*id, entry.began))
    }

    /// The number of handshakes from `source`.
    pub fn count(&self, source: &S) -> usize {
        self.open.values().filter(|entry| entry.source == *source).count()
    }

    /// Evicts a handshake to make room for one from `source`: one past its grace period of the source that has the
    /// most, or any of that source's if it exceeds its share. `among`: one of `source` itself.
    ///
    /// The victim is random (`draw` is a random number): under a flood from the source of a genuine peer, mostly the
    /// flood's own connections are evicted, however fast it is. The oldest would be the peer's as soon as the flood
    /// fills all slots in less time than a handshake takes.
    pub fn evict(&mut self, source: &S, among: bool, now: Instant, draw: u64) -> Option<(u64, T)> {
        let mut counts: HashMap<S, usize> = HashMap::new();
        for entry in self.open.values() {
            *counts.entry(entry.source).or_default() += 1;
        }
        let own = counts.get(source).copied().unwrap_or(0);
        let most = counts.values().copied().max()?;
        let fits = |entry: &Entry<S, T>| match among {
            true => entry.source == *source,
            false => counts.get(&entry.source) == Some(&most),
        };
        let unfair = !among && most > own + 1;
        let is_due = |entry: &Entry<S, T>| unfair || now.saturating_duration_since(entry.began) >= self.grace;
        let due: Vec<u64> =
            self.open.iter().filter(|(_, entry)| fits(entry) && is_due(entry)).map(|(id, _)| *id).collect();
        let id = *due.get(draw.checked_rem(due.len() as u64)? as usize)?;
        self.open.remove(&id).map(|entry| (id, entry.kept))
    }
}

/// The unit in which limits count sources: all of loopback is one, because any process can use its addresses, and so is
/// an IPv6 /64 network, because one machine can have all of them.
pub fn source_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        address if address.is_loopback() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & u128::MAX << 64).into(),
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_of_loopback_and_an_ipv6_network_are_one_source_each() {
        let of = |text: &str| source_of(text.parse().expect("an address"));
        assert!(["127.0.0.1", "127.9.8.7", "::1", "::ffff:127.0.0.2"].iter().all(|text| of(text) == of("127.0.0.1")));
        assert_eq!(of("2001:db8:0:1::5"), of("2001:db8:0:1:ffff::6"));
        assert_ne!(of("2001:db8:0:1::5"), of("2001:db8:0:2::5"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    }

    #[test]
    fn a_flood_from_a_peers_own_source_evicts_mostly_itself() {
        let (start, places) = (Instant::now(), 64);
        let mut lost = 0;
        for peer in 0..200u64 {
            let mut pending = Pending::new(GRACE);
            pending.insert(0, 1, start, ());
            (1..places).for_each(|id| pending.insert(id, 1, start, ()));
            // Half as many as there are places while the peer's handshake takes longer than others are sure of their
            // place.
            for more in 0..places / 2 {
                let (now, draw) = (start + GRACE, (peer * places + more).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32);
                pending.evict(&1, true, now, draw).expect("all have had their time");
                pending.insert(places + more, 1, now, ());
            }
            lost += u32::from(!pending.remove(0));
        }
        assert!((20..120).contains(&lost), "{lost} of 200 peers");
    }
}
