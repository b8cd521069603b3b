//! What receipts call a peer and the lane of its messages.

use std::collections::{HashMap, VecDeque};
use std::num::{NonZeroU32, NonZeroU64};
use std::sync::Arc;

use crossrail_locks::{Mutex, PerProcess};
use crossrail_types::Origin;

/// Names that are kept after the last peer that had them has ended: receipts may still ask for them.
const KEPT: usize = 1024;

/// Generations are counted from this bit of a word on.
const GENERATION: NonZeroU64 = NonZeroU64::new(1 << 32).unwrap();

type Pair = (Arc<str>, Arc<str>);

/// Refers to a pair of names that a peer has or had.
///
/// Receipts outlive peers and workers, and counting their references would cost every short message two atomic
/// operations. So a receipt only has the number of its pair. Pairs are stored once per process; a peer that connects
/// again under the same name adds nothing.
// One word, which is stored with every message: the index, and above it the generation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Names(NonZeroU64);

impl Names {
    fn new(index: u32, generation: NonZeroU32) -> Names {
        Names(NonZeroU64::from(generation).saturating_mul(GENERATION) | u64::from(index))
    }

    /// As a word: never 0.
    #[inline]
    pub(super) fn word(self) -> u64 {
        self.0.get()
    }

    /// What [`Names::word`] returned; `None` for 0.
    #[inline]
    pub(super) fn of_word(word: u64) -> Option<Names> {
        NonZeroU64::new(word).map(Names)
    }

    fn index(self) -> u32 {
        self.0.get() as u32
    }

    fn generation(self) -> u32 {
        (self.0.get() >> 32) as u32
    }

    /// The peer's name; empty once [`KEPT`] other peers have ended since this one has, and in a forked child.
    pub(crate) fn peer(self) -> Arc<str> {
        self.pair().0
    }

    pub(crate) fn message_lane(self) -> Arc<str> {
        self.pair().1
    }

    fn pair(self) -> Pair {
        let known = KNOWN.lock();
        let entry = known.entries.get(self.index() as usize);
        let entry = entry.filter(|entry| entry.generation.get() == self.generation());
        entry.and_then(|entry| entry.pair.clone()).unwrap_or_else(|| ("".into(), "".into()))
    }
}

/// A live peer's names, kept while the peer exists.
#[derive(Debug)]
pub(super) struct NamesOfPeer {
    names: Names,
    origin: Origin,
}

impl NamesOfPeer {
    pub(super) fn new(peer: &str, message_lane: &str) -> NamesOfPeer {
        let names = KNOWN.lock().enter((peer.into(), message_lane.into()));
        NamesOfPeer { names, origin: Origin::here() }
    }

    #[inline]
    pub(super) fn names(&self) -> Names {
        self.names
    }
}

impl Drop for NamesOfPeer {
    fn drop(&mut self) {
        if self.origin.is_here() {
            KNOWN.lock().leave(self.names.index());
        }
    }
}

static KNOWN: PerProcess<Mutex<Known>> = PerProcess::new();

struct Known {
    /// The generation of new entries. A forked child starts with no names, and with another one of these: it must not
    /// take a name of its own for that of its parent's receipts.
    first: NonZeroU32,
    entries: Vec<Entry>,
    by_pair: HashMap<Pair, u32>,
    /// Pairs without a peer, and how often they had been without one then; the oldest in front.
    over: VecDeque<(u32, u64)>,
    free: Vec<u32>,
}

struct Entry {
    generation: NonZeroU32,
    pair: Option<Pair>,
    peers: usize,
    /// How often its last peer has ended.
    ends: u64,
}

impl Default for Known {
    fn default() -> Known {
        // Spread, because generations are counted up from it.
        let first = NonZeroU32::new(std::process::id().wrapping_mul(0x9e37_79b1)).unwrap_or(NonZeroU32::MIN);
        let (entries, by_pair, over, free) = Default::default();
        Known { first, entries, by_pair, over, free }
    }
}

impl Known {
    fn enter(&mut self, pair: Pair) -> Names {
        let index = match self.by_pair.get(&pair) {
            Some(index) => *index,
            None => self.add(pair),
        };
        let entry = &mut self.entries[index as usize];
        entry.peers += 1;
        Names::new(index, entry.generation)
    }

    fn add(&mut self, pair: Pair) -> u32 {
        let index = self.free.pop().unwrap_or(self.entries.len() as u32);
        self.by_pair.insert(pair.clone(), index);
        match self.entries.get_mut(index as usize) {
            Some(entry) => entry.pair = Some(pair),
            None => self.entries.push(Entry { generation: self.first, pair: Some(pair), peers: 0, ends: 0 }),
        }
        index
    }

    fn leave(&mut self, index: u32) {
        let entry = &mut self.entries[index as usize];
        entry.peers -= 1;
        if entry.peers > 0 {
            return;
        }
        entry.ends += 1;
        self.over.push_back((index, entry.ends));
        if self.over.len() <= KEPT {
            return;
        }
        let Some((oldest, ends)) = self.over.pop_front() else { return };
        let entry = &mut self.entries[oldest as usize];
        // A peer has had the names since.
        if entry.peers > 0 || entry.ends != ends {
            return;
        }
        entry.generation = entry.generation.checked_add(1).unwrap_or(NonZeroU32::MIN);
        if let Some(pair) = entry.pair.take() {
            self.by_pair.remove(&pair);
        }
        self.free.push(oldest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(number: usize) -> Pair {
        (format!("peer {number}").into(), "lane".into())
    }

    #[test]
    fn names_of_peers_that_have_ended_are_freed_in_the_end() {
        let mut known = Known::default();
        for number in 0..10 * KEPT {
            let names = known.enter(pair(number));
            known.leave(names.index());
        }
        assert_eq!((known.over.len(), known.by_pair.len()), (KEPT, KEPT));
        assert!(known.entries.len() <= KEPT + 1);
    }

    #[test]
    fn names_of_a_peer_that_is_there_stay() {
        let mut known = Known::default();
        let kept = known.enter(pair(0));
        for number in 0..10 * KEPT {
            let names = known.enter(pair(number));
            known.leave(names.index());
        }
        let entry = &known.entries[kept.index() as usize];
        assert_eq!((entry.generation.get(), entry.pair.clone(), entry.peers), (kept.generation(), Some(pair(0)), 1));
        let old = known.enter(pair(KEPT));
        known.leave(old.index());
        let again = known.enter(pair(0));
        assert_eq!((again.index(), again.generation()), (kept.index(), kept.generation()));
    }
}
