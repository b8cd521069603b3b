//! The order of long copies between one GPU and several others.
//!
//! The copy engines of a GPU execute copies to different peers one after the other, whatever streams they are in. With
//! one peer that is the fastest way, and it leaves the multiprocessors to the user. When all GPUs send to all, two of
//! them soon write to the same third, each at half its rate, while the links of another are idle: four H200s reached
//! 230 to 250 of 395 GB/s. A model of four queues with head-of-line blocking shows the same; smaller pieces in turns
//! are no better.
//!
//! Therefore all copies pending for one peer are submitted before those for the next. Each GPU starts with the peer
//! that follows it in the order of UUIDs. If all GPUs do so, each writes to a different one, and the skew between them
//! is small compared with the length of a turn, as long as all keep to the order whichever peer answers first: hosts
//! that start an exchange answer up to 0.5 ms apart. All-to-all exchanges come in bursts, so the schedule remembers
//! from burst to burst which peers had copies at the same time, and how many bytes. `schedule_model.rs` models the
//! gain.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::lock::locked;
use crate::note::Uuid;

/// Maximum bytes submitted ahead, so that engines do not wait for the host: in general, and at the start of a burst,
/// when copies that belong first may still be requested. And the bytes left of a turn when the next one starts.
const MAX_AHEAD: u64 = 256 << 20;
const MAX_AHEAD_AT_START: u64 = 64 << 20;
const HANDOVER: u64 = 128 << 20;
/// Maximum bytes of a turn while other peers wait.
const MAX_TURN: u64 = 2 << 30;
/// The start phase of a burst, during which the first turn is reserved for the peer expected first.
const BURST_START: Duration = Duration::from_micros(600);
/// After this many bytes to a single peer, no other peer is expected any more, even if the burst never ends.
const SOLO_LIMIT: u64 = 64 << 30;

/// The schedule of the long copies between one GPU of this process and its peers, shared by all links. May be used from
/// any thread; the lock is held for microseconds.
pub(crate) struct CopySchedule {
    /// This GPU.
    own: Uuid,
    turns: Mutex<Turns>,
}

/// The peers, and whose turn it is.
#[derive(Default)]
struct Turns {
    peers: Vec<PeerCopies>,
    /// The peer whose turn it is.
    current: Option<Uuid>,
    /// Bytes started in this turn, and whether it is the first turn of the burst.
    turn_bytes: u64,
    first_turn: bool,
    /// When the first copy of this burst was queued. A burst lasts until no copy is queued or active.
    burst_start: Option<Instant>,
    /// Bytes started since two peers last had copies at the same time.
    solo_bytes: u64,
    /// The number of consecutive bursts in which several peers had copies at the same time.
    concurrent_bursts: u32,
}

/// The copies between this GPU and a peer: those queued, those active, and the bytes of the latter.
#[derive(Default)]
struct PeerCopies {
    gpu: Uuid,
    queued: u32,
    active: u32,
    active_bytes: u64,
    /// Whether it had copies at the same time as another peer, in this burst and in the previous one.
    concurrent: bool,
    concurrent_before: bool,
    /// Bytes started in this burst; and in the previous one, if it was concurrent there.
    started: u64,
    expected: u64,
}

impl PeerCopies {
    fn is_active(&self) -> bool {
        self.queued + self.active > 0
    }

    /// Whether it has copies or is likely to get some: all-to-all exchanges come in bursts, and peers answer at any
    /// time.
    fn is_expected(&self) -> bool {
        self.is_active() || self.concurrent || self.concurrent_before
    }

    /// Whether it has queued copies, or has started fewer bytes than in the previous burst.
    fn is_due(&self) -> bool {
        self.queued > 0 || self.started < self.expected
    }

    /// Whether its turn continues. `starting`: the burst is starting, so not all copies have been queued yet.
    fn has_more(&self, starting: bool) -> bool {
        let rest =
            if self.started < self.expected { starting || self.active > 0 } else { self.active_bytes > HANDOVER };
        self.queued > 0 || rest
    }
}

impl Turns {
    fn peer(&mut self, gpu: Uuid) -> &mut PeerCopies {
        let at = self.peers.iter().position(|peer| peer.gpu == gpu).unwrap_or_else(|| {
            self.peers.push(PeerCopies { gpu, ..PeerCopies::default() });
            self.peers.len() - 1
        });
        &mut self.peers[at]
    }

    /// The number of other peers that have copies or are expected to.
    fn others(&self, gpu: Uuid) -> usize {
        self.peers.iter().filter(|peer| peer.gpu != gpu && peer.is_expected()).count()
    }

    /// Records which peers have copies at the same time, after `len` more bytes have been started.
    fn note_concurrency(&mut self, len: u64) {
        self.solo_bytes = self.solo_bytes.saturating_add(len);
        if self.peers.iter().filter(|peer| peer.is_active()).count() > 1 {
            self.solo_bytes = 0;
            self.peers.iter_mut().filter(|peer| peer.is_active()).for_each(|peer| peer.concurrent = true);
        } else if self.solo_bytes >= SOLO_LIMIT {
            self.peers.iter_mut().for_each(|peer| (peer.concurrent, peer.concurrent_before) = (false, false));
        }
    }

    /// Whether a copy for the peer `gpu` may start now. `own`: this GPU.
    fn may_start(&mut self, own: Uuid, gpu: Uuid, now: Instant) -> bool {
        if self.others(gpu) == 0 {
            self.assign(gpu, true);
            return true;
        }
        let next = |from: Uuid, among: fn(&PeerCopies) -> bool| {
            let among = self.peers.iter().filter(|peer| among(peer)).map(|peer| peer.gpu);
            among.min_by_key(|peer| ring_distance(from, *peer)).unwrap_or(gpu)
        };
        let waits = |peer: &PeerCopies| peer.queued > 0;
        let first = next(own, waits);
        let starting = self.burst_start.is_some_and(|since| now.saturating_duration_since(since) < BURST_START);
        // Two concurrent bursts in a row predict a third. If the prediction is wrong, it costs one wait.
        let predicts = starting && self.concurrent_bursts > 1;
        let over = |current| !self.peers.iter().any(|peer| peer.gpu == current && peer.has_more(starting));
        match self.current {
            None if predicts && first != next(own, PeerCopies::is_due) => return false,
            None => self.assign(first, true),
            Some(current) if self.turn_bytes >= MAX_TURN || over(current) => {
                let following = next(current, waits);
                if predicts && following != next(current, PeerCopies::is_due) {
                    return false;
                }
                self.assign(following, false);
            }
            // A peer that belongs before the current one, but was not expected when the first turn was assigned.
            Some(current) if self.first_turn && ring_distance(own, first) < ring_distance(own, current) => {
                self.assign(first, true)
            }
            Some(_) => {}
        }
        let (count, bytes) =
            self.peers.iter().fold((0, 0), |sum, peer| (sum.0 + peer.active, sum.1 + peer.active_bytes));
        self.current == Some(gpu) && (count < 2 || bytes < if starting { MAX_AHEAD_AT_START } else { MAX_AHEAD })
    }

    fn assign(&mut self, gpu: Uuid, first: bool) {
        if self.current != Some(gpu) || self.turn_bytes >= MAX_TURN {
            (self.current, self.turn_bytes, self.first_turn) = (Some(gpu), 0, first);
        }
    }

    /// Ends the burst if no copy is left. Only the concurrency and the bytes of its peers are remembered.
    fn end_burst_if_idle(&mut self) {
        if self.peers.iter().any(PeerCopies::is_active) {
            return;
        }
        (self.current, self.turn_bytes, self.first_turn, self.burst_start) = (None, 0, false, None);
        self.concurrent_bursts =
            if self.peers.iter().any(|peer| peer.concurrent) { self.concurrent_bursts.saturating_add(1) } else { 0 };
        for peer in &mut self.peers {
            (peer.expected, peer.started) = (if peer.concurrent { peer.started } else { 0 }, 0);
            (peer.concurrent_before, peer.concurrent) = (peer.concurrent, false);
        }
    }
}

/// A sort key for the distance from one GPU to another on the ring of UUIDs; a GPU is farthest from itself.
fn ring_distance(from: Uuid, to: Uuid) -> (bool, Uuid) {
    (to <= from, to)
}

/// A long copy that waits for its turn. Dropping it removes it from the queue.
pub(crate) struct QueuedCopy {
    schedule: Arc<CopySchedule>,
    peer: Uuid,
}

impl QueuedCopy {
    /// Whether the copy may start now.
    pub(crate) fn may_start(&self, now: Instant) -> bool {
        locked(&self.schedule.turns).may_start(self.schedule.own, self.peer, now)
    }
}

impl Drop for QueuedCopy {
    fn drop(&mut self) {
        let turns = &mut *locked(&self.schedule.turns);
        turns.peer(self.peer).queued -= 1;
        turns.end_burst_if_idle();
    }
}

/// A long copy in flight. Dropping it reports its completion.
pub(crate) struct ActiveCopy {
    schedule: Arc<CopySchedule>,
    peer: Uuid,
    len: u64,
}

impl Drop for ActiveCopy {
    fn drop(&mut self) {
        let turns = &mut *locked(&self.schedule.turns);
        let peer = turns.peer(self.peer);
        (peer.active, peer.active_bytes) = (peer.active - 1, peer.active_bytes - self.len);
        turns.end_burst_if_idle();
    }
}

impl CopySchedule {
    pub(crate) fn new(own: Uuid) -> CopySchedule {
        CopySchedule { own, turns: Mutex::default() }
    }

    /// Queues a long copy between this GPU and `peer`.
    pub(crate) fn queue(self: &Arc<Self>, peer: Uuid, now: Instant) -> QueuedCopy {
        let turns = &mut *locked(&self.turns);
        turns.burst_start.get_or_insert(now);
        turns.peer(peer).queued += 1;
        turns.note_concurrency(0);
        QueuedCopy { schedule: Arc::clone(self), peer }
    }

    /// Starts a copy of `len` bytes between this GPU and `peer`.
    pub(crate) fn start(self: &Arc<Self>, peer: Uuid, len: u64) -> ActiveCopy {
        let turns = &mut *locked(&self.turns);
        let found = turns.peer(peer);
        (found.active, found.active_bytes, found.started) =
            (found.active + 1, found.active_bytes + len, found.started + len);
        if turns.current == Some(peer) {
            turns.turn_bytes += len;
        }
        turns.note_concurrency(len);
        ActiveCopy { schedule: Arc::clone(self), peer, len }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    const PEERS: [Uuid; 3] = [[1; 16], [2; 16], [3; 16]];
    const LEN: u64 = 64 << 20;

    /// The schedule of GPU 0.
    fn schedule() -> Arc<CopySchedule> {
        Arc::new(CopySchedule::new([0; 16]))
    }

    #[test]
    fn peers_with_concurrent_copies_are_expected_in_the_next_burst() {
        let schedule = schedule();
        let others = || locked(&schedule.turns).others(PEERS[0]);
        let burst = |peers: &[Uuid]| drop(peers.iter().map(|peer| schedule.start(*peer, LEN)).collect::<Vec<_>>());
        burst(&PEERS);
        assert_eq!(others(), 2);
        burst(&PEERS[..2]);
        assert_eq!(others(), 1);
        burst(&PEERS[..1]);
        assert_eq!(others(), 0, "it was alone in the last burst");
        burst(&PEERS[..2]);
        let alone: Vec<ActiveCopy> = (0..SOLO_LIMIT / LEN).map(|_| schedule.start(PEERS[0], LEN)).collect();
        assert_eq!(others(), 0, "no other peer is expected for ever");
        let _second = schedule.start(PEERS[1], LEN);
        assert_eq!(others(), 1);
        drop(alone);
    }

    /// Starts queued copies as soon as they may start, and completes the oldest active copy when none may. Returns the
    /// peers in the order in which their copies started.
    fn execute(
        schedule: &Arc<CopySchedule>,
        mut queued: Vec<QueuedCopy>,
        len: u64,
        already: Option<ActiveCopy>,
    ) -> Vec<u8> {
        let now = Instant::now();
        let (mut started, mut active) = (Vec::new(), VecDeque::from_iter(already));
        while !queued.is_empty() {
            match queued.iter().position(|copy| copy.may_start(now)) {
                Some(at) => {
                    let next = queued.remove(at);
                    active.push_back(schedule.start(next.peer, len));
                    started.push(next.peer[0]);
                }
                None => drop(active.pop_front().expect("a copy may start, or one is active")),
            }
            let alone = queued.windows(2).all(|two| two[0].peer == two[1].peer);
            assert!(alone || active.len() <= 2 || active.len() as u64 * len <= MAX_AHEAD + len, "{}", active.len());
        }
        started
    }

    fn queue_all(schedule: &Arc<CopySchedule>, peers: &[u8]) -> Vec<QueuedCopy> {
        let now = Instant::now();
        peers.iter().map(|peer| schedule.queue([*peer; 16], now)).collect()
    }

    #[test]
    fn peers_are_served_one_after_the_other_starting_with_the_next_one() {
        let engine = schedule();
        let order = execute(&engine, queue_all(&engine, &[3, 1, 2, 3, 1, 2, 1]), LEN, None);
        assert_eq!(order, [1, 1, 1, 2, 2, 3, 3]);
        assert_eq!(locked(&engine.turns).current, None, "the burst has ended");
        let third = Arc::new(CopySchedule::new([2; 16]));
        assert_eq!(execute(&third, queue_all(&third, &[0, 1, 3, 0, 3]), LEN, None), [3, 3, 0, 0, 1]);
        // One copy was started before the others were queued.
        let engine = schedule();
        let mut early = queue_all(&engine, &[2]);
        assert!(early[0].may_start(Instant::now()));
        let started = engine.start(PEERS[1], LEN);
        early.clear();
        let rest = queue_all(&engine, &[3, 2, 1, 1]);
        assert_eq!(execute(&engine, rest, LEN, Some(started)), [1, 1, 2, 3]);
    }

    #[test]
    fn repeated_bursts_start_with_the_next_peer_whichever_answers_first() {
        let engine = schedule();
        let burst = || _ = execute(&engine, queue_all(&engine, &[1, 1, 2, 3]), LEN, None);
        let now = Instant::now();
        let third = || engine.queue(PEERS[2], now);
        burst();
        assert!(third().may_start(now), "one burst predicts nothing");
        burst();
        burst();
        let (early, first) = (third(), engine.queue(PEERS[0], now));
        assert!(!early.may_start(now) && first.may_start(now));
        let started = engine.start(PEERS[0], LEN);
        drop((first, started));
        assert!(!early.may_start(now), "the first peer had two copies each time, and the second precedes the third");
        assert!(early.may_start(now + BURST_START), "the wait is bounded");
        drop(early);
        drop(third());
        assert!(third().may_start(now), "a wrong prediction costs one wait only");
    }

    #[test]
    fn the_next_turn_starts_before_the_last_copies_of_a_turn_complete() {
        let engine = schedule();
        let start = Instant::now();
        let all = queue_all(&engine, &[1, 1, 1, 1, 2]);
        let now = start + 2 * BURST_START;
        let (mut active, mut left) = (Vec::new(), VecDeque::from(all));
        while let Some(next) = left.front().filter(|copy| copy.peer == PEERS[0]) {
            assert!(next.may_start(now));
            active.push(engine.start(PEERS[0], LEN));
            left.pop_front();
        }
        assert!(!left[0].may_start(now), "enough bytes are active");
        active.truncate((HANDOVER / LEN) as usize);
        assert!(left[0].may_start(now));
    }

    #[test]
    fn a_single_peer_never_waits_and_no_peer_starves() {
        let engine = schedule();
        let now = Instant::now();
        let all = queue_all(&engine, &[1; 40]);
        assert!(all.iter().all(|copy| copy.may_start(now)));
        drop(all);
        let mut peers = [1; 40];
        peers[39] = 2;
        let order = execute(&engine, queue_all(&engine, &peers), 256 << 20, None);
        assert_eq!(order.iter().position(|peer| *peer == 2), Some(8), "after a full turn");
        let cancelled = queue_all(&engine, &[1, 2]);
        assert!(cancelled[0].may_start(now) && !cancelled[1].may_start(now));
        drop(cancelled);
        let last = queue_all(&engine, &[2]);
        assert!(last[0].may_start(Instant::now() + BURST_START), "a cancelled copy has no turn");
    }
}
