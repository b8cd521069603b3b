//! Handshakes in progress, and which of them makes room for a newer one.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::time::{Duration, Instant};

/// How long a handshake may take before it must make room for a newer one. A peer that means it has sent its proof long
/// before, unless its machine is overloaded; then it is told to try again.
const GRACE: Duration = Duration::from_millis(500);

/// Handshakes in progress at one listener, oldest first, each with its source and what its owner keeps of it.
///
/// Whoever opens connections and says nothing must not lock others out: see [`evict`](Pending::evict).
#[derive(Debug)]
pub struct Pending<S, T> {
    open: BTreeMap<u64, Entry<S, T>>,
}

#[derive(Debug)]
struct Entry<S, T> {
    source: S,
    began: Instant,
    kept: T,
}

impl<S, T> Default for Pending<S, T> {
    fn default() -> Pending<S, T> {
        Pending { open: BTreeMap::new() }
    }
}

impl<S: Copy + Eq + Hash, T> Pending<S, T> {
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

    /// Removes the handshake that makes room for one from `source`: the oldest of the source that has most of them, if it
    /// has had its time ([`GRACE`]), or at once if that source has more than its share. `among`: the oldest of `source`.
    pub fn evict(&mut self, source: &S, among: bool, now: Instant) -> Option<(u64, T)> {
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
        let (id, oldest) = self.open.iter().find(|(_, entry)| fits(entry))?;
        let unfair = !among && most > own + 1;
        let id = (unfair || now.saturating_duration_since(oldest.began) >= GRACE).then_some(*id)?;
        self.open.remove(&id).map(|entry| (id, entry.kept))
    }
}
