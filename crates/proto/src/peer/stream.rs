use std::collections::VecDeque;

use crossrail_types::LaneId;

use super::lanes::Lanes;
use super::open::Open;
use crate::frame::{self, Frame, Stamp};
use crate::meter::Meter;
use crate::{Body, Out, Time};

/// Messages sent and not acknowledged before new ones wait.
const RETAINED_MAX: usize = 16 << 10;

/// Bytes in flight with which the lane is busy, so that its rate shows.
const LOADED: u64 = 64 << 10;

/// Nanoseconds under load over which its rate is averaged.
const AVERAGED: u64 = 2_000_000;

/// The sequenced messages of both directions, which survive the lanes that carry them.
///
/// Outgoing: frames are numbered; on lanes that may lose them they are retained until acknowledged, and sent again
/// from the first unacknowledged one when their lane dies. Incoming: every lane carries consecutive numbers starting
/// at or before the one expected, so a frame is new, a repetition, or a violation; nothing is ever held back. What
/// comes late from a lane that the stream has left is told by its epoch, and ignored: it came or will come again.
#[derive(Debug)]
pub(super) struct Stream {
    /// The lane that carries our messages, if one is there.
    lane: Option<LaneId>,
    reliable: bool,
    /// The move to a cheaper lane waits until everything sent on this one is acknowledged.
    draining: bool,
    /// Number of the next frame.
    next: u32,
    /// Frames before this one have been consumed by the peer (or cannot get lost).
    acked: u32,
    retained: VecDeque<Out>,
    /// Bytes of their payloads.
    retained_bytes: u64,
    /// The lane's rate while it is loaded, and whether it has been since the last acknowledgement.
    meter: Meter,
    loaded: bool,
    /// Index in `retained` of the next frame to send again.
    resend: usize,
    /// Frames before this one may have been sent twice.
    twice: u32,
    /// Number of the frame that is expected next.
    expected: u32,
    /// How often we have moved, and the peer.
    epoch: u16,
    their_epoch: u16,
    /// Frames consumed since we last acknowledged.
    owed: u32,
    /// The lane on which the peer's messages arrive. Bare acknowledgements go back on it, so that one that is lost with
    /// the lane is requested again when the peer moves to another.
    heard: Option<LaneId>,
    /// The frame whose payload is coming in.
    open: Option<Open>,
}

impl Default for Stream {
    fn default() -> Stream {
        Stream {
            lane: None,
            reliable: false,
            draining: false,
            next: 0,
            acked: 0,
            retained: VecDeque::new(),
            retained_bytes: 0,
            meter: Meter::over(AVERAGED),
            loaded: false,
            resend: 0,
            twice: 0,
            expected: 0,
            epoch: 0,
            their_epoch: 0,
            owed: 0,
            heard: None,
            open: None,
        }
    }
}

/// What an incoming number means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    /// The next one.
    New,
    /// One that was consumed already.
    Old,
    /// From a lane that the stream has left.
    Stale,
    /// Not possible from a peer that keeps to the rules.
    Gap,
}

impl Stream {
    /// Whether our messages go over a lane that loses nothing.
    #[inline]
    pub(super) fn reliable(&self) -> bool {
        self.reliable
    }

    /// The lane that carries our messages.
    #[inline]
    pub(super) fn lane(&self) -> Option<LaneId> {
        self.lane
    }

    /// Whether that is the one.
    #[inline]
    pub(super) fn is_on(&self, lane: LaneId) -> bool {
        self.lane == Some(lane)
    }

    /// Whether that lane brings the peer's messages, which need acknowledgements.
    #[inline]
    pub(super) fn is_heard_on(&self, lane: LaneId) -> bool {
        self.heard == Some(lane)
    }

    /// That lane brings the peer's messages now.
    #[inline]
    pub(super) fn hear(&mut self, lane: LaneId) {
        self.heard = Some(lane);
    }

    /// The payload of a frame is coming in.
    #[inline]
    pub(super) fn receive(&mut self, open: Open) {
        self.open = Some(open);
    }

    #[inline]
    pub(super) fn is_receiving(&self) -> bool {
        self.open.is_some()
    }

    #[inline]
    pub(super) fn receiving(&self) -> Option<&Open> {
        self.open.as_ref()
    }

    pub(super) fn receiving_mut(&mut self) -> Option<&mut Open> {
        self.open.as_mut()
    }

    /// The payload is there, or will never be.
    #[inline]
    pub(super) fn take_received(&mut self) -> Option<Open> {
        self.open.take()
    }

    /// The open frame is given up; what still comes of it goes nowhere.
    pub(super) fn drop_open(&mut self, lanes: &mut Lanes) {
        if let Some(open) = self.open.take() {
            lanes.void_stream_placements(None);
            self.consumed(open.lossy);
        }
    }

    /// Moves to `best`, the cheapest lane and whether it loses nothing, as soon as the messages are free to move.
    /// Returns the lane that they have moved to.
    pub(super) fn choose(&mut self, best: Option<(LaneId, bool)>) -> Option<LaneId> {
        if self.pinned() {
            return None;
        }
        match (self.lane, best) {
            (Some(present), Some((lane, _))) if present == lane => self.draining = false,
            (Some(_), Some(_)) if !self.movable() => self.draining = true,
            (_, Some((lane, reliable))) => {
                self.move_to(Some(lane), reliable);
                return Some(lane);
            }
            (_, None) => self.move_to(None, false),
        }
        None
    }

    /// Whether a cheaper lane waited for what is acknowledged now.
    pub(super) fn has_drained(&self) -> bool {
        self.draining && self.settled()
    }

    /// Whether our messages may move to another lane without draining first.
    fn movable(&self) -> bool {
        self.retained.is_empty() && !(self.reliable && self.lane.is_some() && self.next != 0)
    }

    /// Whether unacknowledged messages would be lost for good with the present lane.
    pub(super) fn fragile(&self) -> bool {
        self.reliable && self.next != 0
    }

    /// Whether something of ours is unacknowledged, on the wire or about to go there again.
    pub(super) fn waiting(&self) -> bool {
        !self.retained.is_empty()
    }

    /// The lane on which something of ours is unacknowledged.
    pub(super) fn waits_on(&self) -> Option<LaneId> {
        self.lane.filter(|_| self.waiting())
    }

    /// Whether the stream is pinned to its lane for good (no lane can take over from a reliable one).
    fn pinned(&self) -> bool {
        self.fragile() && self.lane.is_some()
    }

    /// The lane's reliability, and its rate under load.
    #[inline]
    pub(super) fn load(&self) -> (bool, &Meter) {
        (self.reliable, &self.meter)
    }

    /// Moves to `lane`; everything unacknowledged is sent again there.
    pub(super) fn move_to(&mut self, lane: Option<LaneId>, reliable: bool) {
        self.lane = lane;
        self.reliable = reliable;
        self.draining = false;
        (self.meter, self.loaded) = (Meter::over(AVERAGED), false);
        self.epoch = self.epoch.wrapping_add(1);
        self.resend = 0;
        if !self.retained.is_empty() {
            self.twice = self.next;
        }
        // An acknowledgement may have been lost with the old lane.
        self.owed = self.owed.max(u32::from(self.heard.is_some()));
    }

    /// Whether a new frame may go out.
    pub(super) fn open(&self) -> bool {
        !self.draining && self.retained.len() < RETAINED_MAX
    }

    /// Whether there are frames to send again.
    #[inline]
    pub(super) fn resends(&self) -> bool {
        self.resend < self.retained.len()
    }

    /// Frames to send again, and whether acknowledgements are owed: not 0 if there is either.
    #[inline]
    pub(super) fn unsettled(&self) -> usize {
        (self.retained.len() - self.resend) | self.owed as usize
    }

    /// Whether no frame of ours is kept.
    pub(super) fn is_empty(&self) -> bool {
        self.retained.is_empty()
    }

    /// The next frame to send again.
    pub(super) fn resend(&mut self) -> Option<Out> {
        let (expected, epoch) = (self.expected, self.epoch);
        let out = self.retained.get_mut(self.resend)?;
        frame::set_epoch(&mut out.head, epoch);
        frame::set_ack(&mut out.head, expected);
        let out = *out;
        self.acknowledges();
        if self.reliable {
            self.retained.pop_front();
            self.retained_bytes -= u64::from(out.head.payload_len());
            self.acked = self.acked.wrapping_add(1);
        } else {
            self.resend += 1;
        }
        Some(out)
    }

    /// Numbers a new frame; what may get lost must be retained then.
    #[inline(always)]
    pub(super) fn stamp(&mut self) -> Stamp {
        let seq = self.next;
        self.next = seq.wrapping_add(1);
        self.acknowledges();
        if self.reliable {
            self.acked = self.next;
        }
        // On a lane that loses nothing the field has another use: the caller writes it.
        Stamp { seq, ack: self.expected, epoch: self.epoch }
    }

    /// A frame of ours goes out and acknowledges what we consumed: that settles what we owe, unless the peer's
    /// messages come over another lane. Then the peer has left ours, which may be dead without our knowing, and it
    /// must not wait for us to find out. Nor does a frame on a lane that loses nothing: its field counts messages.
    #[inline]
    fn acknowledges(&mut self) {
        if !self.reliable && self.heard.is_none_or(|heard| self.lane == Some(heard)) {
            self.owed = 0;
        }
    }

    /// Keeps the frame just numbered until it is acknowledged.
    #[inline]
    pub(super) fn retain(&mut self, out: &Out) {
        self.retained.push_back(*out);
        self.retained_bytes += u64::from(out.head.payload_len());
        self.resend = self.retained.len();
    }

    /// An acknowledgement: `Ok(true)` if it was news, `Err` if it is for frames never sent.
    #[inline]
    pub(super) fn acknowledge(&mut self, now: Time, ack: u32) -> Result<bool, String> {
        let news = ack.wrapping_sub(self.acked) as i32;
        if news <= 0 {
            return Ok(false);
        }
        let news = news as usize;
        if news > self.retained.len() {
            return Err("acknowledgement of messages that were not sent".to_owned());
        }
        let bytes = self.retained.drain(..news).map(|out| u64::from(out.head.payload_len())).sum();
        if self.loaded {
            self.meter.count(now, bytes);
        } else {
            self.meter.begin(now);
        }
        self.retained_bytes -= bytes;
        self.loaded = self.retained_bytes >= LOADED;
        self.resend = self.resend.saturating_sub(news);
        self.acked = ack;
        Ok(true)
    }

    /// Drops all references to the memory of frame `seq`: if the frame is retained, it becomes an empty one. True if a
    /// lane may still be reading that memory: the original lane, or the one that carried a retransmission.
    pub(super) fn leave(&mut self, seq: u32) -> bool {
        self.blank(seq) || (seq.wrapping_sub(self.twice) as i32) < 0
    }

    fn blank(&mut self, seq: u32) -> bool {
        let at = seq.wrapping_sub(self.acked) as usize;
        let Some(out) = self.retained.get_mut(at) else { return false };
        let (ack, done) = (frame::ack(&out.head), frame::done(&out.head));
        self.retained_bytes -= u64::from(out.head.payload_len());
        out.head = frame::encode_head(&Frame::Nothing, 0);
        out.body = Body::None;
        frame::seal(&mut out.head, seq, ack, done);
        true
    }

    /// Forgets what we sent: nobody listens any more.
    pub(super) fn silence(&mut self) {
        self.retained.clear();
        self.retained_bytes = 0;
        self.resend = 0;
        self.acked = self.next;
    }

    /// Whether a head is the next one, from the lane that brought the last.
    #[inline]
    pub(super) fn plain(&self, stamp: Stamp) -> bool {
        stamp.seq == self.expected && stamp.epoch == self.their_epoch
    }

    /// What an incoming number means.
    #[inline]
    pub(super) fn classify(&mut self, epoch: u16, seq: u32) -> Arrival {
        if (epoch.wrapping_sub(self.their_epoch) as i16) < 0 {
            return Arrival::Stale;
        }
        let ahead = seq.wrapping_sub(self.expected) as i32;
        if ahead > 0 {
            // Nor is its epoch believed: what other lanes bring would be stale.
            return Arrival::Gap;
        }
        self.their_epoch = epoch;
        if ahead == 0 { Arrival::New } else { Arrival::Old }
    }

    /// The expected frame is consumed. `lossy`: its sender waits to hear so.
    #[inline]
    pub(super) fn consumed(&mut self, lossy: bool) {
        self.expected = self.expected.wrapping_add(1);
        self.owed += u32::from(lossy && self.heard.is_some());
    }

    /// A repetition came: its sender has not heard that we have it.
    pub(super) fn repeated(&mut self) {
        self.owed += 1;
    }

    /// A lane went down. If the peer's messages arrived on it, the peer retransmits on another lane what we have not
    /// acknowledged.
    pub(super) fn unheard(&mut self, lane: LaneId) {
        if self.heard == Some(lane) {
            self.heard = None;
            self.owed = 0;
        }
    }

    /// Number of frames consumed.
    pub(super) fn consumed_in_all(&self) -> u32 {
        self.expected
    }

    /// Frames sent, repetitions apart, and consumed, each modulo 2^32.
    pub(super) fn frames(&self) -> (u32, u32) {
        (self.next, self.expected)
    }

    /// Number of consumed frames that are not acknowledged.
    #[inline]
    pub(super) fn owed(&self) -> u32 {
        self.owed
    }

    /// Marks all consumed frames as acknowledged; returns their number, to be sent now.
    pub(super) fn take_ack(&mut self) -> u32 {
        self.owed = 0;
        self.expected
    }

    /// Nothing retained.
    pub(super) fn settled(&self) -> bool {
        self.retained.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers a frame, and retains it where it can get lost.
    fn send(s: &mut Stream) -> u32 {
        let mut out = nothing();
        let stamp = s.stamp();
        stamp.put(&mut out.head, 0);
        if !s.reliable {
            s.retain(&out);
        }
        stamp.seq
    }

    fn nothing() -> Out {
        Out { head: frame::encode_head(&Frame::Nothing, 0), body: Body::None, chunk: false }
    }

    #[test]
    fn what_was_not_acknowledged_goes_out_again_in_order() {
        let mut s = Stream::default();
        s.move_to(Some(LaneId(1)), false);
        for expected in 0..4 {
            assert_eq!(send(&mut s), expected);
        }
        assert_eq!(s.acknowledge(Time(0), 2), Ok(true));
        assert_eq!(s.acknowledge(Time(0), 1), Ok(false));
        assert!(s.acknowledge(Time(0), 9).is_err());
        assert!(!s.resends());
        s.move_to(Some(LaneId(2)), false);
        let again: Vec<u32> = std::iter::from_fn(|| s.resend()).map(|out| frame::seq(&out.head)).collect();
        assert_eq!(again, [2, 3]);
        assert_eq!(s.acknowledge(Time(0), 4), Ok(true));
        assert!(s.settled());
    }

    #[test]
    fn what_rides_along_on_another_lane_does_not_settle_what_is_owed() {
        let mut s = Stream { heard: Some(LaneId(2)), ..Stream::default() };
        s.move_to(Some(LaneId(1)), false);
        s.take_ack();
        s.consumed(true);
        send(&mut s);
        assert_eq!(s.owed(), 1);
        s.move_to(Some(LaneId(2)), false);
        assert!(s.resend().is_some());
        assert_eq!(s.owed(), 0);
    }

    #[test]
    fn a_reliable_lane_retains_nothing() {
        let mut s = Stream::default();
        s.move_to(Some(LaneId(1)), true);
        assert!(s.movable());
        send(&mut s);
        assert!(s.settled() && s.fragile() && !s.movable());
    }

    #[test]
    fn numbers_wrap() {
        let mut s = Stream { next: u32::MAX, acked: u32::MAX, expected: u32::MAX, ..Stream::default() };
        s.move_to(Some(LaneId(1)), false);
        send(&mut s);
        send(&mut s);
        assert_eq!(s.acknowledge(Time(0), 1), Ok(true));
        assert!(s.settled());
        assert_eq!(s.classify(7, u32::MAX), Arrival::New);
        s.consumed(true);
        assert_eq!(s.classify(7, u32::MAX), Arrival::Old);
        assert_eq!(s.classify(6, 0), Arrival::Stale);
        assert_eq!(s.classify(7, 0), Arrival::New);
        assert_eq!(s.classify(8, 1), Arrival::Gap);
        assert_eq!(s.classify(7, 0), Arrival::New);
        assert_eq!(s.classify(8, 0), Arrival::New);
        assert_eq!(s.classify(7, 0), Arrival::Stale);
    }
}
