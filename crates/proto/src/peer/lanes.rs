//! The lanes of a connection, and which chunk is for which: lanes take chunks in proportion to what they carry and come
//! to the end of a transfer together.

mod acks;

use std::ops::{Index, IndexMut};

use crossrail_types::LaneId;

use crate::feed::{Piece, guided};
use crate::lane::{Lane, OLD, Placement, Sent, takes};
use crate::meter::Meter;
use crate::ramp::Ramp;
use crate::{Config, LaneLoad, LaneSpec, Time};

/// The lanes that are up, and how many of each rail's connections carry chunks at present.
///
/// Owns windows, rates and what the payload that comes in on a lane is. It knows transfers only by the index and serial
/// that chunks carry, and the message stream only by the id of a lane. [`Peer`](super::Peer) tells it of lanes that go
/// up and down; the tables of transfers take chunks from it and hand them back. A lane is named by its place while no
/// lane goes up or down, and by its id beyond that.
#[derive(Debug)]
pub(super) struct Lanes {
    all: Vec<Lane>,
    /// Bytes of acknowledged chunks.
    brought: u64,
    ramp: Ramp,
    /// Largest chunk, in bytes.
    chunk: u64,
    /// Chunks that a lane may have outstanding.
    window: usize,
    /// Nanoseconds of silence after which a lane is suspected.
    deadline: u64,
    spread: Spread,
    /// Number of the last lane that came up. Numbers begin with 1 and are not used again while acknowledgements of an
    /// earlier lane may be in flight.
    last_number: u32,
}

/// Limits within which short messages are spread over several rails.
#[derive(Debug)]
struct Spread {
    /// [`Config::spread_min`].
    min: u64,
    /// Longest message that one chunk of every rail can carry; 0: fewer than two rails.
    max: u64,
    /// [`Config::spread_above`].
    above: u64,
    /// [`Config::spread_gain`].
    gain: u64,
    /// Messages go whole over their own connection.
    never: bool,
}

/// Bytes that are still unsent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Left {
    /// Of the transfer whose turn it is.
    pub(super) of_one: u64,
    /// Of the transfers that have chunks to hand out.
    pub(super) of_all: u64,
    /// Total bytes of these transfers, sent ones included.
    pub(super) waiting: u64,
}

/// Nanoseconds that short operations take less, by the measured rates.
#[derive(Clone, Copy, Debug)]
struct Gain {
    /// Each of many, spread over the rails instead of all in the stream.
    spread: u64,
    /// One on the fastest rail instead of the slowest.
    fastest: u64,
    /// One on the fastest rail instead of in the stream; 0 unless that was loaded lately.
    off_stream: u64,
}

/// The lanes that share what is left.
#[derive(Clone, Copy, Debug)]
struct Beside {
    lanes: u64,
    /// The sum of their paces; 0: not all are measured.
    rates: u64,
    outstanding: u64,
}

impl Index<usize> for Lanes {
    type Output = Lane;

    #[inline]
    fn index(&self, at: usize) -> &Lane {
        &self.all[at]
    }
}

impl IndexMut<usize> for Lanes {
    #[inline]
    fn index_mut(&mut self, at: usize) -> &mut Lane {
        &mut self.all[at]
    }
}

impl Lanes {
    pub(super) fn new(config: &Config) -> Lanes {
        Lanes {
            all: Vec::new(),
            brought: 0,
            ramp: Ramp::new(),
            chunk: config.chunk.clamp(1, u64::from(u32::MAX)),
            window: config.window as usize,
            deadline: config.lane_deadline,
            spread: Spread {
                min: config.spread_min,
                max: 0,
                above: config.spread_above,
                gain: config.spread_gain,
                never: false,
            },
            last_number: 0,
        }
    }

    /// The place of a lane.
    #[inline]
    pub(super) fn find(&self, lane: LaneId) -> Option<usize> {
        // Mostly there is one, or it is the first.
        match self.all.first() {
            Some(first) if first.spec.id == lane => Some(0),
            _ => self.all.iter().position(|l| l.spec.id == lane),
        }
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(super) fn push(&mut self, mut lane: Lane) {
        self.last_number = self.last_number.checked_add(1).unwrap_or(1);
        lane.number = self.last_number;
        self.all.push(lane);
        self.find_spread();
    }

    /// Adds what [`crate::Peer::lane_up_among`] says of the lane at `at`.
    pub(super) fn join_rail(&mut self, at: usize, (rail, place): (u16, u16), begin_with: u16) {
        self.all[at].place = Some((rail, place));
        if !self.ramp.is_on() {
            self.ramp.begin_with(begin_with);
        }
        // A rail that comes back has lost its other connections, too.
        if place == 0 {
            self.ramp.may_grow();
        }
        self.choose_connections();
    }

    pub(super) fn remove(&mut self, at: usize) -> Lane {
        let dead = self.all.remove(at);
        if dead.place.is_some() {
            self.choose_connections();
        }
        self.find_spread();
        dead
    }

    pub(super) fn clear(&mut self) {
        self.all.clear();
        self.find_spread();
    }

    /// The cheapest lane that may carry messages.
    pub(super) fn cheapest(&self) -> Option<&LaneSpec> {
        self.all.iter().map(|l| &l.spec).filter(|s| s.messages).min_by_key(|s| (s.cost_ns, s.id))
    }

    /// See [`crate::Peer::outgrows`].
    #[inline]
    pub(super) fn outgrow(&mut self) -> bool {
        self.ramp.outgrows()
    }

    /// How many connections of each rail carry chunks, where that is found by measuring.
    pub(super) fn connections(&self) -> Option<u16> {
        self.ramp.is_on().then(|| self.ramp.level())
    }

    /// Has the first of each rail's connections carry the chunks, as many as the ramp says.
    fn choose_connections(&mut self) {
        let before = |lanes: &[Lane], at: usize| {
            let Some((rail, place)) = lanes[at].place else { return 0 };
            let earlier = |l: &&Lane| l.spec.bulk && l.place.is_some_and(|(of, other)| of == rail && other < place);
            lanes.iter().filter(earlier).count() as u16
        };
        for at in 0..self.all.len() {
            self.all[at].rank = before(&self.all, at);
        }
        self.ramp.has(self.all.iter().map(|lane| lane.rank + 1).max().unwrap_or(1));
        for lane in &mut self.all {
            lane.spare = lane.rank >= self.ramp.level();
        }
        self.find_spread();
    }

    /// What a lane carries at present.
    pub(super) fn load(&self, at: usize) -> LaneLoad {
        let lane = &self.all[at];
        LaneLoad { chunks: lane.sent.len(), bytes: lane.sent_bytes, rate: lane.rate(), waits: lane.waits() }
    }

    /// Whether no lane has chunks in flight, or consumed ones to tell of.
    pub(super) fn are_settled(&self) -> bool {
        self.all.iter().all(|l| l.sent.is_empty() && !l.owes())
    }

    /// Chunks of the peer's consumed, modulo 2^32, and `more`.
    pub(super) fn consumed(&self, more: u32) -> u32 {
        self.all.iter().fold(more, |sum, lane| sum.wrapping_add(lane.consumed()))
    }

    /// Whether the peer owes us something on it, and we listen. `messages`: the lane on which messages of ours wait for
    /// the peer.
    fn waits_on(lane: &Lane, messages: Option<LaneId>) -> bool {
        (!lane.sent.is_empty() || messages == Some(lane.spec.id)) && !lane.waits()
    }

    /// How often a lane says that it lives while it holds what cannot be taken yet.
    fn heartbeat_interval(&self) -> u64 {
        self.deadline / 4
    }

    /// When a lane is to be looked after: it will have been silent for too long, or has to say that this end lives.
    pub(super) fn timeout(&self, messages: Option<LaneId>) -> Option<Time> {
        let silent = |lane: &Lane| {
            let waits = !lane.suspected && Self::waits_on(lane, messages);
            waits.then(|| Time(lane.silent_since().0.saturating_add(self.deadline)))
        };
        self.all.iter().flat_map(|lane| [silent(lane), lane.next_heartbeat(self.heartbeat_interval())]).flatten().min()
    }

    /// Schedules a heartbeat on the lane at `at` if one is due. Returns whether the peer has newly been silent on it
    /// for too long.
    pub(super) fn heartbeat_if_due(&mut self, now: Time, at: usize, messages: Option<LaneId>) -> bool {
        let (every, deadline) = (self.heartbeat_interval(), self.deadline);
        let lane = &mut self.all[at];
        lane.heartbeat_if_due(now, every);
        let silent = !lane.suspected && Self::waits_on(lane, messages) && now.since(lane.silent_since()) >= deadline;
        lane.suspected |= silent;
        silent
    }

    /// No placement on any lane counts as that of the stream's open frame any more; true if one other than on
    /// `except` was in progress.
    pub(super) fn void_stream_placements(&mut self, except: Option<LaneId>) -> bool {
        let mut found = false;
        for lane in &mut self.all {
            if lane.placing == Placement::Stream && Some(lane.spec.id) != except {
                lane.placing = Placement::None;
                found = true;
            }
        }
        found
    }

    /// No placement on any lane counts for that transfer any more; true if one was in progress. Its chunks count as
    /// consumed: whether the lane brings them to an end or not matters to nobody now.
    pub(super) fn void_chunk_placements(&mut self, transfer: u32, of: u32) -> bool {
        let mut found = false;
        for lane in &mut self.all {
            if matches!(lane.placing, Placement::Chunk { index, serial, .. } if (index, serial) == (transfer, of)) {
                lane.placing = Placement::None;
                lane.consume();
                found = true;
            }
        }
        found
    }

    /// No lane places a message that was kept any more, but `except`: those of which one began to count the chunk as
    /// consumed.
    pub(super) fn void_kept_placements(&mut self, arrival: u32, except: Option<LaneId>) {
        for lane in &mut self.all {
            if lane.placing == (Placement::Kept { arrival }) && Some(lane.spec.id) != except {
                lane.placing = Placement::None;
                lane.consume();
            }
        }
    }

    /// Gives up all chunks, in both directions.
    pub(super) fn silence(&mut self) {
        for lane in &mut self.all {
            if std::mem::replace(&mut lane.placing, Placement::None).is_of_chunk() {
                lane.consume();
            }
            lane.sent.clear();
            lane.sent_bytes = 0;
        }
    }

    /// A chunk that came in on the lane at `at` lies in a slot. `Err`: the window does not cover it.
    pub(super) fn land(&mut self, now: Time, at: usize) -> Result<(), String> {
        if self.all[at].land(now) as usize <= self.window {
            return Ok(());
        }
        self.all[at].take_off();
        Err(format!("more chunks than the window of {} holds", self.window))
    }

    /// Bulk lanes carry chunks, but for spare ones; where there is no bulk lane, every lane does.
    #[inline]
    pub(super) fn carries_chunks(&self, at: usize) -> bool {
        let lane = &self.all[at];
        (lane.spec.bulk && !lane.spare) || !self.all.iter().any(|l| l.spec.bulk)
    }

    #[inline]
    pub(super) fn has_window(&self, at: usize) -> bool {
        self.all[at].sent.len() < self.window
    }

    /// Whether a lane that carries chunks is to carry some of `waiting` bytes.
    fn shares(lane: &Lane, waiting: u64) -> bool {
        !lane.spare && lane.is_worth_it(waiting)
    }

    /// Size of the next chunk for the lane at `at`. `None`: its window is full, or the other lanes would finish all the
    /// rest before this one would finish one more chunk.
    pub(super) fn chunk_size(&self, now: Time, at: usize, left: Left) -> Option<u64> {
        let lane = &self.all[at];
        if !self.has_window(at) {
            return None;
        }
        let others = self.beside(now, at, left);
        let max_payload = u64::from(lane.spec.max_payload);
        let size = guided(left.of_one, lane.pace(now), others.rates, others.lanes, self.chunk, max_payload);
        self.finishes_with(now, at, size, (left, others)).then_some(size)
    }

    /// The lane at `at` should carry all of a message in one chunk.
    pub(super) fn takes_whole(&self, now: Time, at: usize, left: Left) -> bool {
        let fits = left.of_one <= u64::from(self.all[at].spec.max_payload) && self.has_window(at);
        fits && self.finishes_with(now, at, left.of_one, (left, self.beside(now, at, left)))
    }

    /// The lanes among which the lane at `at` takes its part.
    fn beside(&self, now: Time, at: usize, left: Left) -> Beside {
        let mut found = Beside { lanes: 0, rates: 0, outstanding: 0 };
        let mut measured = true;
        for lane in self.sharing(at, left) {
            let rate = lane.pace(now);
            found.lanes += 1;
            found.rates += rate;
            found.outstanding += lane.sent_bytes;
            measured &= rate > 0;
        }
        found.rates = if measured { found.rates } else { 0 };
        found
    }

    fn sharing(&self, at: usize, left: Left) -> impl Iterator<Item = &Lane> {
        let bulk = self.all[at].spec.bulk;
        self.all.iter().filter(move |l| l.spec.bulk == bulk && !l.suspected && Self::shares(l, left.waiting))
    }

    /// The lane at `at` would finish `size` more bytes before all lanes together finish all the rest, or before any
    /// other would finish those bytes.
    fn finishes_with(&self, now: Time, at: usize, size: u64, (left, beside): (Left, Beside)) -> bool {
        let (lane, Beside { lanes, rates, outstanding }) = (&self.all[at], beside);
        // Too slow a lane gets a chunk all the same when its rate is doubtful.
        if lanes <= 1 || lane.suspected || lane.is_doubtful(now, self.brought) {
            return true;
        }
        if rates == 0 {
            // Short transfers measure all lanes first, instead of going over the first that has room for ever.
            let untried = |lane: &Lane| lane.sent_bytes == 0 && lane.pace(now) == 0;
            return untried(lane) || !self.sharing(at, left).any(untried);
        }
        let alone = takes(lane.sent_bytes + size, lane.pace(now));
        let together = takes(left.of_all + outstanding, rates);
        // One lane always takes what is left.
        alone <= together
            || self.sharing(at, left).all(|other| alone <= takes(other.sent_bytes + size, other.pace(now)))
    }

    /// The bytes of an eager message of `len` bytes should be sent apart from its announcement, as a chunk on any rail
    /// with room. `in_flight`: outstanding bytes of such messages. `stream`: whether its lane is reliable, and its rate
    /// under load.
    #[inline]
    pub(super) fn sends_apart(&self, now: Time, len: u64, in_flight: u64, stream: (bool, &Meter)) -> bool {
        self.may_spread(len, stream) && self.gains_apart(now, len, in_flight, stream)
    }

    #[inline(never)]
    fn gains_apart(&self, now: Time, len: u64, in_flight: u64, stream: (bool, &Meter)) -> bool {
        let many = in_flight + len > self.spread.above;
        match self.gains(now, len, stream) {
            // The first ones measure the rails.
            None => many,
            // A message alone may be on the slowest: it must gain what a thread that wakes up costs.
            Some(gain) => many && gain.spread >= self.spread.gain || gain.fastest >= 8 * self.spread.gain,
        }
    }

    /// The bytes of a short write should be sent apart: once the peer has consented, as a chunk. That takes a round
    /// trip, which only pays off if many are in flight or the stream is on a slow rail. Arguments as those of
    /// [`Lanes::sends_apart`].
    #[inline]
    pub(super) fn spreads(&self, now: Time, len: u64, in_flight: u64, stream: (bool, &Meter)) -> bool {
        self.may_spread(len, stream) && self.gains_asked(now, len, in_flight, stream)
    }

    #[inline(never)]
    fn gains_asked(&self, now: Time, len: u64, in_flight: u64, stream: (bool, &Meter)) -> bool {
        let many = in_flight + len > self.spread.above;
        match self.gains(now, len, stream) {
            None => many,
            Some(gain) => many && gain.spread >= self.spread.gain || gain.off_stream >= 16 * self.spread.gain,
        }
    }

    #[inline]
    fn may_spread(&self, len: u64, (reliable, _): (bool, &Meter)) -> bool {
        self.spread.min <= len && len <= self.spread.max && !reliable
    }

    /// Bytes of short operations in flight above which they are spread.
    pub(super) fn spread_above(&self) -> u64 {
        self.spread.above
    }

    /// Gain of `len` bytes on other rails. `None`: not all were measured lately.
    ///
    /// If the stream was loaded lately, the rate that it reached counts: what a few chunks show of idle rails is more
    /// than they carry in the long run where a shaper lets bursts pass.
    fn gains(&self, now: Time, len: u64, stream: (bool, &Meter)) -> Option<Gain> {
        let (mut least, mut most, mut sum) = (u64::MAX, 0, 0);
        for lane in self.all.iter().filter(|lane| lane.is_first()) {
            let pace = lane.pace(now);
            if pace == 0 || (lane.sent.is_empty() && now.since(lane.measured) >= OLD) {
                return None;
            }
            (least, most, sum) = (least.min(pace), most.max(pace), sum + pace);
        }
        let (loaded, measured) = (stream.1.rate(), stream.1.measured());
        let whole = if loaded > 0 && now.since(measured) < OLD { loaded.min(most) } else { most };
        let [whole, slow, fast, all] = [whole, least, most, sum].map(|pace| takes(len, pace) as u64);
        Some(Gain { spread: whole.saturating_sub(all), fastest: slow - fast, off_stream: whole - fast })
    }

    /// See [`crate::Peer::keep_messages_whole`].
    pub(super) fn keep_messages_whole(&mut self) {
        self.spread.never = true;
        self.find_spread();
    }

    /// Updates what can be spread after the lanes have changed.
    fn find_spread(&mut self) {
        let first = self.all.iter().filter(|lane| lane.is_first());
        let (rails, max) = first
            .fold((0, self.chunk / 2), |(rails, max), lane| (rails + 1, max.min(u64::from(lane.spec.max_payload))));
        self.spread.max = if rails > 1 && !self.spread.never { max } else { 0 };
    }

    /// A chunk of a transfer goes out on the lane at `at`.
    pub(super) fn send(&mut self, now: Time, at: usize, op: u32, serial: u32, piece: Piece) {
        let doubtful = self.all[at].is_doubtful(now, self.brought);
        self.all[at].judge(doubtful);
        self.all[at].send(now, op, serial, piece);
        self.ramp.sends(now);
    }

    /// The peer has consumed `count` chunks in all on the lane at `at`. Those of which that is news are handed to
    /// `each`; returns how many they are, and their bytes. `Err`: the peer broke the protocol.
    pub(super) fn acknowledge(
        &mut self,
        now: Time,
        at: usize,
        count: u32,
        mut each: impl FnMut(LaneId, Sent),
    ) -> Result<(u32, u64), String> {
        let lane = &mut self.all[at];
        let (news, id) = (lane.acknowledge(count)?, lane.spec.id);
        let mut bytes = 0;
        lane.release(now, news, |sent| {
            bytes += sent.piece.len;
            each(id, sent);
        });
        self.brought += bytes;
        if news > 0 {
            lane.measured_at(self.brought);
        }
        Ok((news, bytes))
    }

    /// Counts acknowledged bytes for the choice of connections. `done`: no transfer has a chunk left to send.
    #[inline]
    pub(super) fn measure(&mut self, now: Time, bytes: u64, done: bool) {
        if self.ramp.counts() {
            self.measure_connections(now, bytes, done);
        }
    }

    #[cold]
    fn measure_connections(&mut self, now: Time, bytes: u64, done: bool) {
        let idle = done && self.all.iter().all(|lane| lane.sent.is_empty());
        if self.ramp.acknowledged(now, bytes, idle) {
            self.choose_connections();
        }
    }

    /// Hands chunks that lanes would bring far later than others could to `duplicate`, which answers whether they are
    /// to go out again: where no transfer has a chunk left to hand out.
    pub(super) fn duplicate_late(&mut self, now: Time, mut duplicate: impl FnMut(LaneId, &mut Sent) -> bool) {
        if self.all.len() < 2 {
            return;
        }
        // Less than that is noise, and no reason to send anything twice.
        let margin = u128::from(self.deadline / 16);
        for at in 0..self.all.len() {
            let lane = &self.all[at];
            let (id, pace, mut ahead) = (lane.spec.id, lane.pace(now), lane.sent_bytes);
            if pace == 0 {
                continue;
            }
            let free = |l: &&Lane| {
                let carries = l.spec.bulk == lane.spec.bulk && !l.suspected && l.sent.len() < self.window;
                carries && Self::shares(l, 0) && l.spec.id != id
            };
            let others = self.all.iter().filter(free).map(|l| (l.sent_bytes, l.pace(now)));
            let others: Vec<(u64, u64)> = others.filter(|(_, pace)| *pace > 0).collect();
            let mut given = 0;
            for sent in self.all[at].sent.iter_mut().rev() {
                let len = sent.piece.len;
                let soonest = others.iter().map(|(busy, pace)| takes(busy + given + len, *pace)).min();
                if soonest.is_none_or(|soonest| takes(ahead, pace) <= 2 * soonest + margin) {
                    break;
                }
                ahead -= len;
                if !sent.duplicated && duplicate(id, sent) {
                    given += len;
                }
            }
        }
    }
}
