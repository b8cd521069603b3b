//! Long copies from one GPU to several others at once: turns for its copy engines.
//!
//! A GPU's copy engines carry copies to its peers one after the other, whatever streams they are in. Alone, that is the
//! fastest way, and it leaves the multiprocessors to the user. When all GPUs send to all, two of them soon write to the same
//! third, each at half its rate, while another's links are idle: four H200s got 230 to 250 of 395 GB/s (so does a model of
//! four queues whose heads block; smaller pieces in turns are no better).
//!
//! So engines are given one peer's copies after the other's: all that there are for one, beginning with the GPU whose name
//! comes next after this one's. If all GPUs do that, each writes to another one for a long time, and what they begin apart
//! by is little against it, as long as all keep to the order whoever answers first: hosts that begin an exchange answer up
//! to 0.5 ms apart. All to all comes in bursts, so it is kept in mind from one burst to the next who had copies at the same
//! time, and how much. `crowd_model.rs` says what that is worth.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::domain::locked;
use crate::note::Uuid;

/// Bytes that an engine is given ahead; while a burst begins, when others may come that are to be first; and how many are
/// left of a turn when the next begins. All of it so that engines need not wait for the host.
const AHEAD: u64 = 256 << 20;
const FIRST: u64 = 64 << 20;
const LAST: u64 = 128 << 20;
/// Bytes of one peer's turn while others wait.
const TURN: u64 = 2 << 30;
/// How long a burst begins: so long the first turn is kept for the peer that is expected next.
const ANSWERS: Duration = Duration::from_micros(600);
/// After so many bytes to one peer alone, others are not expected any more, even if the burst never ends.
const ALONE: u64 = 64 << 30;

/// Who one GPU of this process writes to, and reads from, by long copies.
pub(crate) struct Crowd {
    own: Uuid,
    turns: Mutex<Turns>,
}

/// The other GPUs, and whose turn it is.
#[derive(Default)]
struct Turns {
    peers: Vec<Peer>,
    current: Option<Uuid>,
    /// Bytes that were begun in this turn, and whether no turn has ended since nothing was under way.
    bytes: u64,
    fresh: bool,
    /// When the first copy of this burst asked for its turn. A burst lasts until nothing waits or is under way.
    since: Option<Instant>,
    /// Bytes that were begun since two peers last had copies at once.
    alone: u64,
    /// Bursts one after the other in which they had.
    together: u32,
}

/// Copies between this GPU and another: those that wait for their turn, those under way, and the bytes of these.
#[derive(Default)]
struct Peer {
    name: Uuid,
    waiting: u32,
    under_way: u32,
    bytes: u64,
    /// Whether it had copies at the same time as another, in this burst and in the one before.
    met: bool,
    before: bool,
    /// Bytes that were begun in this burst, and in the one before if it had met another there.
    begun: u64,
    usual: u64,
}

impl Peer {
    fn is_active(&self) -> bool {
        self.waiting + self.under_way > 0
    }

    /// It has copies, or may be about to: all to all comes in bursts, and a peer's answers when it likes.
    fn is_expected(&self) -> bool {
        self.is_active() || self.met || self.before
    }

    /// It has a copy to begin, or did not begin as much as the last time.
    fn is_due(&self) -> bool {
        self.waiting > 0 || self.begun < self.usual
    }

    /// Whether its turn goes on. `begins`: not all answers need have come yet.
    fn has_more(&self, begins: bool) -> bool {
        let rest = if self.begun < self.usual { begins || self.under_way > 0 } else { self.bytes > LAST };
        self.waiting > 0 || rest
    }
}

impl Turns {
    fn peer(&mut self, name: Uuid) -> &mut Peer {
        let at = self.peers.iter().position(|peer| peer.name == name).unwrap_or_else(|| {
            self.peers.push(Peer { name, ..Peer::default() });
            self.peers.len() - 1
        });
        &mut self.peers[at]
    }

    /// Others than that one which have copies, or are expected to.
    fn others(&self, name: Uuid) -> usize {
        self.peers.iter().filter(|peer| peer.name != name && peer.is_expected()).count()
    }

    /// Keeps in mind who has copies at the same time, now that so many bytes more were begun.
    fn meet(&mut self, len: u64) {
        self.alone = self.alone.saturating_add(len);
        if self.peers.iter().filter(|peer| peer.is_active()).count() > 1 {
            self.alone = 0;
            self.peers.iter_mut().filter(|peer| peer.is_active()).for_each(|peer| peer.met = true);
        } else if self.alone >= ALONE {
            self.peers.iter_mut().for_each(|peer| (peer.met, peer.before) = (false, false));
        }
    }

    /// Whether a copy for that peer may begin now. `own`: this GPU.
    fn admits(&mut self, own: Uuid, name: Uuid, now: Instant) -> bool {
        if self.others(name) == 0 {
            self.give(name, true);
            return true;
        }
        let next = |from: Uuid, among: fn(&Peer) -> bool| {
            let among = self.peers.iter().filter(|peer| among(peer)).map(|peer| peer.name);
            among.min_by_key(|peer| distance(from, *peer)).unwrap_or(name)
        };
        let waits = |peer: &Peer| peer.waiting > 0;
        let first = next(own, waits);
        let begins = self.since.is_some_and(|since| now.saturating_duration_since(since) < ANSWERS);
        // What was so twice will be so again; where it is not, that costs a wait once.
        let knows = begins && self.together > 1;
        let over = |current| !self.peers.iter().any(|peer| peer.name == current && peer.has_more(begins));
        match self.current {
            None if knows && first != next(own, Peer::is_due) => return false,
            None => self.give(first, true),
            Some(current) if self.bytes >= TURN || over(current) => {
                let following = next(current, waits);
                if knows && following != next(current, Peer::is_due) {
                    return false;
                }
                self.give(following, false);
            }
            // Nobody expected it when the first turn began.
            Some(current) if self.fresh && distance(own, first) < distance(own, current) => self.give(first, true),
            Some(_) => {}
        }
        let (count, bytes) = self.peers.iter().fold((0, 0), |sum, peer| (sum.0 + peer.under_way, sum.1 + peer.bytes));
        self.current == Some(name) && (count < 2 || bytes < if begins { FIRST } else { AHEAD })
    }

    fn give(&mut self, name: Uuid, fresh: bool) {
        if self.current != Some(name) || self.bytes >= TURN {
            (self.current, self.bytes, self.fresh) = (Some(name), 0, fresh);
        }
    }

    /// Nobody's turn is remembered once nothing is left, only who had copies at the same time.
    fn settle(&mut self) {
        if self.peers.iter().any(Peer::is_active) {
            return;
        }
        (self.current, self.bytes, self.fresh, self.since) = (None, 0, false, None);
        self.together = if self.peers.iter().any(|peer| peer.met) { self.together.saturating_add(1) } else { 0 };
        for peer in &mut self.peers {
            (peer.usual, peer.begun) = (if peer.met { peer.begun } else { 0 }, 0);
            (peer.before, peer.met) = (peer.met, false);
        }
    }
}

/// In the circle of GPUs by name, how far it is from one to another, as something that can be compared; to itself furthest.
fn distance(from: Uuid, to: Uuid) -> (bool, Uuid) {
    (to <= from, to)
}

/// A long copy that waits for its turn.
pub(crate) struct Waiting {
    crowd: Arc<Crowd>,
    peer: Uuid,
}

impl Waiting {
    pub(crate) fn may_begin(&self, now: Instant) -> bool {
        locked(&self.crowd.turns).admits(self.crowd.own, self.peer, now)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let turns = &mut *locked(&self.crowd.turns);
        turns.peer(self.peer).waiting -= 1;
        turns.settle();
    }
}

/// A long copy that is under way.
pub(crate) struct UnderWay {
    crowd: Arc<Crowd>,
    peer: Uuid,
    len: u64,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let turns = &mut *locked(&self.crowd.turns);
        let peer = turns.peer(self.peer);
        (peer.under_way, peer.bytes) = (peer.under_way - 1, peer.bytes - self.len);
        turns.settle();
    }
}

impl Crowd {
    pub(crate) fn new(own: Uuid) -> Crowd {
        Crowd { own, turns: Mutex::default() }
    }

    /// A long copy to that GPU is to be made: what waits for its turn.
    pub(crate) fn wait(self: &Arc<Self>, peer: Uuid, now: Instant) -> Waiting {
        let turns = &mut *locked(&self.turns);
        turns.since.get_or_insert(now);
        turns.peer(peer).waiting += 1;
        turns.meet(0);
        Waiting { crowd: Arc::clone(self), peer }
    }

    /// Counts a copy of so many bytes between this GPU and that one of the peer's.
    pub(crate) fn begin(self: &Arc<Self>, peer: Uuid, len: u64) -> UnderWay {
        let turns = &mut *locked(&self.turns);
        let found = turns.peer(peer);
        (found.under_way, found.bytes, found.begun) = (found.under_way + 1, found.bytes + len, found.begun + len);
        if turns.current == Some(peer) {
            turns.bytes += len;
        }
        turns.meet(len);
        UnderWay { crowd: Arc::clone(self), peer, len }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    const PEERS: [Uuid; 3] = [[1; 16], [2; 16], [3; 16]];
    const LEN: u64 = 64 << 20;

    /// Of the GPU 0.
    fn crowd() -> Arc<Crowd> {
        Arc::new(Crowd::new([0; 16]))
    }

    #[test]
    fn who_had_copies_at_the_same_time_is_expected_in_the_next_burst() {
        let crowd = crowd();
        let others = || locked(&crowd.turns).others(PEERS[0]);
        let burst = |peers: &[Uuid]| drop(peers.iter().map(|peer| crowd.begin(*peer, LEN)).collect::<Vec<_>>());
        burst(&PEERS);
        assert_eq!(others(), 2);
        burst(&PEERS[..2]);
        assert_eq!(others(), 1);
        burst(&PEERS[..1]);
        assert_eq!(others(), 0, "it had the last burst to itself");
        burst(&PEERS[..2]);
        let alone: Vec<UnderWay> = (0..ALONE / LEN).map(|_| crowd.begin(PEERS[0], LEN)).collect();
        assert_eq!(others(), 0, "nor for ever while it has copies");
        let _second = crowd.begin(PEERS[1], LEN);
        assert_eq!(others(), 1);
        drop(alone);
    }

    /// Begins what may begin of `waiting`, as often as passes would; ends the oldest copy when nothing may. Returns the peers
    /// in the order in which their copies began.
    fn carried(crowd: &Arc<Crowd>, mut waiting: Vec<Waiting>, len: u64, before: Option<UnderWay>) -> Vec<u8> {
        let now = Instant::now();
        let (mut begun, mut under_way) = (Vec::new(), VecDeque::from_iter(before));
        while !waiting.is_empty() {
            match waiting.iter().position(|waiting| waiting.may_begin(now)) {
                Some(at) => {
                    let next = waiting.remove(at);
                    under_way.push_back(crowd.begin(next.peer, len));
                    begun.push(next.peer[0]);
                }
                None => drop(under_way.pop_front().expect("something may always begin, or is under way")),
            }
            let alone = waiting.windows(2).all(|two| two[0].peer == two[1].peer);
            assert!(
                alone || under_way.len() <= 2 || under_way.len() as u64 * len <= AHEAD + len,
                "{}",
                under_way.len()
            );
        }
        begun
    }

    fn waiting(crowd: &Arc<Crowd>, peers: &[u8]) -> Vec<Waiting> {
        let now = Instant::now();
        peers.iter().map(|peer| crowd.wait([*peer; 16], now)).collect()
    }

    #[test]
    fn one_peer_gets_all_its_copies_after_the_other_beginning_with_the_next() {
        let engine = crowd();
        let order = carried(&engine, waiting(&engine, &[3, 1, 2, 3, 1, 2, 1]), LEN, None);
        assert_eq!(order, [1, 1, 1, 2, 2, 3, 3]);
        assert_eq!(locked(&engine.turns).current, None, "all is over");
        let third = Arc::new(Crowd::new([2; 16]));
        assert_eq!(carried(&third, waiting(&third, &[0, 1, 3, 0, 3]), LEN, None), [3, 3, 0, 0, 1]);
        // One copy was begun before it was known what else there is.
        let engine = crowd();
        let mut early = waiting(&engine, &[2]);
        assert!(early[0].may_begin(Instant::now()));
        let begun = engine.begin(PEERS[1], LEN);
        early.clear();
        let rest = waiting(&engine, &[3, 2, 1, 1]);
        assert_eq!(carried(&engine, rest, LEN, Some(begun)), [1, 1, 2, 3]);
    }

    #[test]
    fn bursts_that_are_alike_begin_with_the_next_peer_whoever_answers_first() {
        let engine = crowd();
        let burst = || _ = carried(&engine, waiting(&engine, &[1, 1, 2, 3]), LEN, None);
        let now = Instant::now();
        let third = || engine.wait(PEERS[2], now);
        burst();
        assert!(third().may_begin(now), "once is not always");
        burst();
        burst();
        let (early, first) = (third(), engine.wait(PEERS[0], now));
        assert!(!early.may_begin(now) && first.may_begin(now));
        let begun = engine.begin(PEERS[0], LEN);
        drop((first, begun));
        assert!(!early.may_begin(now), "the first had two copies each time, and another is before this one");
        assert!(early.may_begin(now + ANSWERS), "nobody waits for long");
        drop(early);
        drop(third());
        assert!(third().may_begin(now), "nor twice where nobody else comes");
    }

    #[test]
    fn the_next_turn_begins_before_the_last_copies_of_one_are_over() {
        let engine = crowd();
        let start = Instant::now();
        let all = waiting(&engine, &[1, 1, 1, 1, 2]);
        let now = start + 2 * ANSWERS;
        let (mut under_way, mut left) = (Vec::new(), VecDeque::from(all));
        while let Some(next) = left.front().filter(|waiting| waiting.peer == PEERS[0]) {
            assert!(next.may_begin(now));
            under_way.push(engine.begin(PEERS[0], LEN));
            left.pop_front();
        }
        assert!(!left[0].may_begin(now), "all is under way, and enough of it");
        under_way.truncate((LAST / LEN) as usize);
        assert!(left[0].may_begin(now));
    }

    #[test]
    fn one_peer_alone_waits_for_nobody_and_none_waits_for_ever() {
        let engine = crowd();
        let now = Instant::now();
        let all = waiting(&engine, &[1; 40]);
        assert!(all.iter().all(|waiting| waiting.may_begin(now)));
        drop(all);
        let mut peers = [1; 40];
        peers[39] = 2;
        let order = carried(&engine, waiting(&engine, &peers), 256 << 20, None);
        assert_eq!(order.iter().position(|peer| *peer == 2), Some(8), "after as much as a turn has");
        let cancelled = waiting(&engine, &[1, 2]);
        assert!(cancelled[0].may_begin(now) && !cancelled[1].may_begin(now));
        drop(cancelled);
        let last = waiting(&engine, &[2]);
        assert!(last[0].may_begin(Instant::now() + ANSWERS), "what waited and is gone has no turn");
    }
}
