//! Lanes that come up, go down, fall silent; and which one carries the messages.

use crossrail_types::LaneId;

use super::{Peer, Phase};
use crate::lane::{Lane, Placement};
use crate::{Event, LaneLoad, LaneSpec, Time};

impl Peer {
    /// A lane is there. One that comes back comes back under a new id.
    pub fn lane_up(&mut self, now: Time, spec: LaneSpec) {
        self.stir();
        if matches!(self.phase, Phase::Dead(_)) || self.lane_at(spec.id).is_some() {
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
        let Some(at) = self.lane_at(id) else { return };
        self.lanes[at].place = Some((rail, place));
        if !self.ramp.is_on() {
            self.ramp.begin_with(begin_with);
        }
        // A rail that comes back has lost its other connections, too.
        if place == 0 {
            self.ramp.may_grow();
        }
        self.choose_connections();
    }

    /// Whether so many bytes have gone out that more connections to the peer are worth opening: true once after
    /// [`Peer::lane_up_among`] for the first of a rail.
    #[inline]
    pub fn outgrows(&mut self) -> bool {
        self.ramp.outgrows()
    }

    /// Whether no chunk has been acknowledged on it by either end.
    pub fn is_unused(&self, lane: LaneId) -> bool {
        self.lane_at(lane).is_none_or(|at| self.lanes[at].is_unused())
    }

    /// How many connections of each rail carry chunks at present, where that is found by measuring.
    pub fn connections(&self) -> Option<u16> {
        self.ramp.is_on().then(|| self.ramp.level())
    }

    /// Has the first of each rail's connections carry the chunks, as many as the ramp says.
    pub(super) fn choose_connections(&mut self) {
        let before = |lanes: &[Lane], at: usize| {
            let Some((rail, place)) = lanes[at].place else { return 0 };
            let earlier = |l: &&Lane| l.spec.bulk && l.place.is_some_and(|(of, other)| of == rail && other < place);
            lanes.iter().filter(earlier).count() as u16
        };
        for at in 0..self.lanes.len() {
            self.lanes[at].rank = before(&self.lanes, at);
        }
        self.ramp.has(self.lanes.iter().map(|lane| lane.rank + 1).max().unwrap_or(1));
        for lane in &mut self.lanes {
            lane.spare = lane.rank >= self.ramp.level();
        }
    }

    /// The lane is gone, or given up: the engine has let go of it, no byte moves on it any more.
    pub fn lane_down(&mut self, now: Time, lane: LaneId) {
        self.stir();
        let Some(at) = self.lane_at(lane) else { return };
        let mut dead = self.lanes.remove(at);
        if dead.place.is_some() {
            self.choose_connections();
        }
        self.violations.gone = self.violations.gone.wrapping_add(dead.consumed());
        let (mut chunks, mut bytes) = (0, 0);
        while let Some(sent) = dead.sent.pop_back() {
            // Those that were handed out again before have gone over the others, too.
            if self.requeue(lane, &sent) || sent.doubled {
                chunks += 1;
                bytes += sent.piece.len;
            }
        }
        self.stream.unheard(lane);
        self.events.push(Event::LaneLost { lane, requeued_chunks: chunks, requeued_bytes: bytes });
        if self.stream.lane == Some(lane) {
            if self.stream.fragile() && self.live() {
                self.break_off(format!("{lane}, which loses nothing while the peer lives, went down"));
            }
            self.stream.move_to(None, false);
            self.choose_lane(now);
        }
    }

    /// Answer to [`Event::Suspect`]: bytes do move on it; wait on.
    pub fn lane_alive(&mut self, now: Time, lane: LaneId) {
        self.stir();
        if let Some(at) = self.lane_at(lane) {
            self.lanes[at].progress = now;
            self.lanes[at].suspected = false;
        }
    }

    /// Has the lane carry a frame that says nothing new: now there is something that the other end's kernel
    /// acknowledges if the link lives. For a suspect of which nothing is under way.
    pub fn probe(&mut self, lane: LaneId) {
        self.stir();
        if let Some(at) = self.lane_at(lane) {
            self.lanes[at].tell_again();
        }
    }

    /// When [`Peer::on_timeout`] is wanted; ask before sleeping. A time in the past: now, and `next` after it.
    pub fn timeout(&self) -> Option<Time> {
        if self.owes() && !self.urgent && !self.lanes.is_empty() {
            return Some(Time(0));
        }
        let mut earliest: Option<Time> = None;
        let mut wanted = |at: Time| earliest = Some(earliest.map_or(at, |known| known.min(at)));
        for lane in &self.lanes {
            if !lane.suspected && self.waits_on(lane) {
                wanted(Time(lane.silent_since().0.saturating_add(self.config.lane_deadline)));
            }
            if let Some(at) = lane.next_beat(self.beat_every()) {
                wanted(at);
            }
        }
        earliest
    }

    /// How often a lane says that it lives while it holds what cannot be taken yet.
    fn beat_every(&self) -> u64 {
        self.config.lane_deadline / 4
    }

    /// Looks for silent lanes, and sees to it that what is owed goes out before the caller sleeps.
    pub fn on_timeout(&mut self, now: Time) {
        self.stir();
        self.flush();
        self.double_late(now);
        for at in 0..self.lanes.len() {
            let every = self.beat_every();
            self.lanes[at].beat(now, every);
            let lane = &self.lanes[at];
            if !lane.suspected && self.waits_on(lane) && now.since(lane.silent_since()) >= self.config.lane_deadline {
                self.lanes[at].suspected = true;
                self.events.push(Event::Suspect { lane: self.lanes[at].spec.id });
            }
        }
    }

    /// What a lane carries at present, for reports; `None`: there is no such lane.
    pub fn load(&self, lane: LaneId) -> Option<LaneLoad> {
        let lane = &self.lanes[self.lane_at(lane)?];
        Some(LaneLoad { chunks: lane.sent.len(), bytes: lane.sent_bytes, rate: lane.rate, waits: lane.waits() })
    }

    /// Frames of messages sent and received so far, each modulo 2^32.
    pub fn frames(&self) -> (u32, u32) {
        self.stream.frames()
    }

    /// Whether the peer owes us something on it, and we listen.
    fn waits_on(&self, lane: &Lane) -> bool {
        let owed = !lane.sent.is_empty() || (self.stream.lane == Some(lane.spec.id) && self.stream.waiting());
        owed && !lane.waits()
    }

    /// Gives the messages to the cheapest lane that may carry them, if they are free to move.
    pub(super) fn choose_lane(&mut self, now: Time) {
        let fit = self.lanes.iter().filter(|l| l.spec.messages).map(|l| &l.spec);
        let best = fit.min_by_key(|s| (s.cost_ns, s.id)).map(|s| (s.id, s.reliable));
        if self.stream.pinned() {
            return;
        }
        match (self.stream.lane, best) {
            (Some(present), Some((lane, _))) if present == lane => self.stream.draining = false,
            (Some(_), Some(_)) if !self.stream.movable() => self.stream.draining = true,
            (_, Some((lane, reliable))) => {
                self.stream.move_to(Some(lane), reliable);
                if let Some(at) = self.lane_at(lane) {
                    self.lanes[at].progress = now;
                    self.lanes[at].suspected = false;
                }
            }
            (_, None) => self.stream.move_to(None, false),
        }
    }

    /// The peer has consumed messages of ours.
    pub(super) fn stream_progress(&mut self, now: Time) {
        if let Some(at) = self.stream.lane.and_then(|l| self.lane_at(l)) {
            self.lanes[at].progress = now;
            self.lanes[at].suspected = false;
        }
        if self.stream.draining && self.stream.settled() {
            self.choose_lane(now);
        }
    }

    /// No placement on any lane counts as that of the stream's open frame any more; true if one other than on
    /// `except` was under way.
    pub(super) fn void_stream_placements(&mut self, except: Option<LaneId>) -> bool {
        let mut found = false;
        for lane in &mut self.lanes {
            if lane.placing == Placement::Stream && Some(lane.spec.id) != except {
                lane.placing = Placement::None;
                found = true;
            }
        }
        found
    }

    /// No placement on any lane counts for that transfer any more; true if one was under way. Its chunks count as
    /// consumed: whether the lane brings them to an end or not is nobody's business now.
    pub(super) fn void_chunk_placements(&mut self, transfer: u32, of: u32) -> bool {
        let mut found = false;
        for lane in &mut self.lanes {
            if matches!(lane.placing, Placement::Chunk { index, serial, .. } if (index, serial) == (transfer, of)) {
                lane.placing = Placement::None;
                lane.consume();
                found = true;
            }
        }
        found
    }
}
