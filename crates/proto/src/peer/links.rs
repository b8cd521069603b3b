//! Lanes that come up, go down, fall silent, break the protocol; which one carries the messages; and the peer's
//! goodbye.

use crossrail_types::LaneId;

use super::Peer;
use super::control_queue::Phase;
use crate::lane::Lane;
use crate::{Event, Failure, LaneLoad, LaneSpec, Matcher, Time};

/// Maximum number of consecutive lanes that may fail by protocol violations, with no valid frame in between.
const VIOLATIONS_MAX: u32 = 8;

/// Lanes that have failed by violations since the last valid frame of the peer.
#[derive(Debug, Default)]
pub(super) struct Violations {
    count: u32,
    /// Frames of the stream and chunks consumed until the last one.
    mark: (u32, u32),
    /// Chunks consumed on lanes that are gone.
    gone: u32,
}

impl Peer {
    /// A lane is there. One that comes back comes back under a new id.
    pub fn lane_up(&mut self, now: Time, spec: LaneSpec) {
        self.fast_path.invalidate();
        if matches!(self.control.phase(), Phase::Dead(_)) || self.lanes.find(spec.id).is_some() {
            return;
        }
        self.lanes.push(Lane::new(spec, now));
        self.choose_lane(now);
    }

    /// [`Peer::lane_up`] for one of several connections of a rail: its place among them. How many of a rail's carry
    /// chunks is found by measuring, beginning with `begin_with`.
    pub fn lane_up_among(&mut self, now: Time, spec: LaneSpec, (rail, place): (u16, u16), begin_with: u16) {
        let id = spec.id;
        self.lane_up(now, spec);
        let Some(at) = self.lanes.find(id) else { return };
        self.lanes.join_rail(at, (rail, place), begin_with);
    }

    /// From now on short messages go over the connection for messages alone: several connections to the same process
    /// take turns with them, which loads the rails evenly.
    pub fn keep_messages_whole(&mut self) {
        self.lanes.keep_messages_whole();
    }

    /// Whether so many bytes have gone out that more connections to the peer are worth opening: true once after
    /// [`Peer::lane_up_among`] for the first of a rail.
    #[inline]
    pub fn outgrows(&mut self) -> bool {
        self.lanes.outgrow()
    }

    /// Whether no chunk has been acknowledged on it by either end.
    pub fn is_unused(&self, lane: LaneId) -> bool {
        self.lanes.find(lane).is_none_or(|at| self.lanes[at].is_unused())
    }

    /// How many connections of each rail carry chunks at present, where that is found by measuring.
    pub fn connections(&self) -> Option<u16> {
        self.lanes.connections()
    }

    /// The lane is gone, or given up: the engine has let go of it, no byte moves on it any more.
    pub fn lane_down(&mut self, now: Time, lane: LaneId) {
        self.fast_path.invalidate();
        let Some(at) = self.lanes.find(lane) else { return };
        let mut dead = self.lanes.remove(at);
        self.violations.gone = self.violations.gone.wrapping_add(dead.consumed());
        let (mut chunks, mut bytes) = (0, 0);
        while let Some(sent) = dead.sent.pop_back() {
            // Those that were handed out again before have gone over the others, too.
            if self.outgoing.requeue(lane, &sent) || sent.duplicated {
                chunks += 1;
                bytes += sent.piece.len;
            }
        }
        self.stream.unheard(lane);
        self.events.push(Event::LaneLost { lane, requeued_chunks: chunks, requeued_bytes: bytes });
        if self.stream.is_on(lane) {
            if self.stream.fragile() && self.control.live() {
                self.control.break_off(format!("reliable lane {lane} went down"), &mut self.events);
            }
            self.stream.move_to(None, false);
            self.choose_lane(now);
        }
    }

    /// Answer to [`Event::Suspect`]: bytes do move on it; wait on.
    pub fn lane_alive(&mut self, now: Time, lane: LaneId) {
        self.fast_path.invalidate();
        if let Some(at) = self.lanes.find(lane) {
            self.lanes[at].restart_silence_timer(now);
        }
    }

    /// Schedules a repeated acknowledgement on the lane, so that the peer's kernel has something to acknowledge if the
    /// link lives. For a suspect with nothing in flight.
    pub fn probe(&mut self, lane: LaneId) {
        self.fast_path.invalidate();
        if let Some(at) = self.lanes.find(lane) {
            self.lanes[at].force_ack();
        }
    }

    /// When [`Peer::on_timeout`] is wanted; ask before sleeping. A time in the past: now, and `next` after it.
    pub fn timeout(&self) -> Option<Time> {
        if self.owes() && !self.control.is_urgent() && !self.lanes.is_empty() {
            return Some(Time(0));
        }
        self.lanes.timeout(self.stream.waits_on())
    }

    /// Looks for silent lanes, and sees to it that what is owed goes out before the caller sleeps.
    pub fn on_timeout(&mut self, now: Time) {
        self.fast_path.invalidate();
        self.flush();
        self.duplicate_late(now);
        for at in 0..self.lanes.len() {
            if self.lanes.heartbeat_if_due(now, at, self.stream.waits_on()) {
                self.events.push(Event::Suspect { lane: self.lanes[at].spec.id });
            }
        }
    }

    /// What a lane carries at present, for reports; `None`: there is no such lane.
    pub fn load(&self, lane: LaneId) -> Option<LaneLoad> {
        self.lanes.find(lane).map(|at| self.lanes.load(at))
    }

    /// Frames of messages sent and received so far, each modulo 2^32.
    pub fn frames(&self) -> (u32, u32) {
        self.stream.frames()
    }

    /// Gives the messages to the cheapest lane that may carry them, if they are free to move.
    pub(super) fn choose_lane(&mut self, now: Time) {
        let best = self.lanes.cheapest().map(|s| (s.id, s.reliable));
        if let Some(at) = self.stream.choose(best).and_then(|lane| self.lanes.find(lane)) {
            self.lanes[at].restart_silence_timer(now);
        }
    }

    /// The peer has consumed messages of ours.
    pub(super) fn stream_progress(&mut self, now: Time) {
        if let Some(at) = self.stream.lane().and_then(|l| self.lanes.find(l)) {
            self.lanes[at].restart_silence_timer(now);
        }
        if self.stream.has_drained() {
            self.choose_lane(now);
        }
    }

    /// The peer has consumed `count` chunks in all on the lane at `at`; returns of how many that is news.
    pub(super) fn chunks_acked(&mut self, now: Time, at: usize, count: u32) -> Result<u32, String> {
        let outgoing = &mut self.outgoing;
        let (chunks, bytes) = self.lanes.acknowledge(now, at, count, |lane, sent| outgoing.acked(lane, &sent))?;
        if chunks > 0 {
            self.events.push(Event::Acked { lane: self.lanes[at].spec.id, chunks });
            self.duplicate_late(now);
            self.lanes.measure(now, bytes, !self.outgoing.has_chunks());
        }
        Ok(chunks)
    }

    /// Hands late chunks out again.
    fn duplicate_late(&mut self, now: Time) {
        if self.control.live() {
            self.outgoing.duplicate_late(now, &mut self.lanes);
        }
    }

    /// The peer broke the protocol on `lane`, and what it sent there has changed nothing: that lane is to fail alone,
    /// unless it is the only one, or loses nothing by contract, or lanes have failed this way time after time with
    /// nothing in between that made sense.
    pub(super) fn violated(&mut self, lane: LaneId, why: &str) {
        let count = self.count_violation(0);
        let alone = self.lanes.find(lane).is_some_and(|at| !self.lanes[at].spec.reliable) && self.lanes.len() > 1;
        if !alone || count > VIOLATIONS_MAX {
            self.control.break_off(why.to_owned(), &mut self.events);
        }
    }

    /// What a lane brought had been changed on the way, and it is about to go down: alone, unless lanes have failed
    /// this way time after time with nothing in between that made sense.
    pub fn corrupted(&mut self, why: &str) {
        self.fast_path.invalidate();
        if self.count_violation(self.violations.gone) > VIOLATIONS_MAX {
            self.control.break_off(why.to_owned(), &mut self.events);
        }
    }

    /// How many lanes have failed since the peer last made sense, the present one included. `before`: chunks consumed
    /// on lanes that count and are gone.
    fn count_violation(&mut self, before: u32) -> u32 {
        let gone = self.violations.gone;
        let chunks = self.lanes.consumed(before);
        let mark = (self.stream.consumed_in_all(), chunks);
        let count = if self.violations.mark == mark { self.violations.count + 1 } else { 1 };
        self.violations = Violations { count, mark, gone };
        count
    }

    /// The peer has finished and says so: what we still want of it fails.
    pub(super) fn bye(&mut self, now: Time, matcher: &mut Matcher) {
        if self.control.hear_bye() {
            self.fail_all(now, &Failure::Closed, matcher);
            self.events.push(Event::Bye);
        }
    }
}
