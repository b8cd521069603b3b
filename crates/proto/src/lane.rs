use std::collections::VecDeque;

use crate::feed::Piece;
use crate::meter::Meter;
use crate::{LaneSpec, Time};

/// Minimum age of a chunk, in nanoseconds, before it counts as overdue, whatever it was expected to take.
const OVERDUE_MIN: u64 = 10_000_000;

/// Nanoseconds with chunks in flight over which the rate is averaged.
const AVERAGED: u64 = 10_000_000;

/// Minimum number of bytes to send per connection of a rail before the next connection is used.
const PART_MIN: u64 = 2 << 20;

/// Minimum and maximum number of bytes that other lanes carry, while a lane carries none, until its rate is measured
/// again: it may have been late for once, or have become faster. Twice as many after each time.
const DOUBTED_AFTER: (u64, u64) = (2 << 20, 1 << 30);

/// Age in nanoseconds at which a rate is measured again, too: it shows nothing any more.
pub(crate) const OLD: u64 = 1_000_000_000;

/// Duration of `bytes` at that pace, in nanoseconds.
pub(crate) fn takes(bytes: u64, pace: u64) -> u128 {
    u128::from(bytes) * 1_000_000_000 / u128::from(pace.max(1))
}

/// A chunk on its way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sent {
    /// Wire id and serial of the transfer.
    pub(crate) op: u32,
    pub(crate) serial: u32,
    pub(crate) piece: Piece,
    /// It was given to other lanes, too.
    pub(crate) duplicated: bool,
    at: Time,
}

/// Destination of the payload that a lane is receiving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// None is.
    None,
    /// That of the message stream's open frame.
    Stream,
    /// A chunk of that incoming transfer.
    Chunk { index: u32, serial: u32, offset: u64, len: u32, again: bool },
    /// A message that arrives unasked, and is kept until a receive matches it.
    Kept { arrival: u32 },
}

impl Placement {
    /// The frame is a chunk of a transfer or of a kept message.
    pub(crate) fn is_of_chunk(self) -> bool {
        matches!(self, Placement::Chunk { .. } | Placement::Kept { .. })
    }
}

/// One lane's windows and rate.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) spec: LaneSpec,
    pub(crate) placing: Placement,
    pub(crate) sent: VecDeque<Sent>,
    pub(crate) sent_bytes: u64,
    acked: u32,
    consumed: u32,
    last_ack: u32,
    /// This end's number of it, which its chunks carry, and the peer's, 0 until a chunk has arrived.
    pub(crate) number: u32,
    pub(crate) theirs: u32,
    /// Consumed chunks whose acknowledgement waits in no long queue.
    acked_in_time: u32,
    /// Chunks that it brought and that are still to be unpacked.
    landed: u32,
    /// The head of an incoming chunk waits for a slot.
    waits: bool,
    /// When the lane began to hold chunks that cannot be consumed yet, or the last heartbeat was scheduled.
    heartbeat_from: Time,
    /// When it last delivered something that we waited for.
    progress: Time,
    /// When the peer last reported on it that it holds chunks of ours which it cannot consume yet.
    alive: Time,
    pub(crate) suspected: bool,
    /// Its chunks, as they are acknowledged.
    meter: Meter,
    /// When chunks were last acknowledged, or the lane came up.
    pub(crate) measured: Time,
    /// Bytes that all lanes had brought then, and how many more until its rate is doubted.
    seen: u64,
    doubted_after: u64,
    /// Its rail, and its place among the rail's connections; `None`: it is its rail's only one.
    pub(crate) place: Option<(u16, u16)>,
    /// Connections of its rail before it.
    pub(crate) rank: u16,
    /// Only the connections before it in the rail carry chunks at present.
    pub(crate) spare: bool,
}

impl Lane {
    pub(crate) fn new(spec: LaneSpec, now: Time) -> Lane {
        Lane {
            spec,
            placing: Placement::None,
            sent: VecDeque::new(),
            sent_bytes: 0,
            acked: 0,
            consumed: 0,
            last_ack: 0,
            number: 0,
            theirs: 0,
            acked_in_time: 0,
            landed: 0,
            waits: false,
            heartbeat_from: now,
            progress: now,
            alive: now,
            suspected: false,
            meter: Meter::over(AVERAGED),
            measured: now,
            seen: 0,
            doubted_after: DOUBTED_AFTER.0,
            place: None,
            rank: 0,
            spare: false,
        }
    }

    /// Whether `bytes` justify using this connection and those of its rail before it.
    #[inline]
    pub(crate) fn is_worth_it(&self, bytes: u64) -> bool {
        self.rank == 0 || bytes >= (u64::from(self.rank) + 1) * PART_MIN
    }

    /// This lane is the first of its rail to carry chunks.
    pub(crate) fn is_first(&self) -> bool {
        self.spec.bulk && !self.spec.reliable && self.rank == 0
    }

    /// Whether no chunk has been acknowledged on it by either end.
    pub(crate) fn is_unused(&self) -> bool {
        self.acked == 0 && self.consumed == 0
    }

    /// Whether no payload is coming in on it.
    pub(crate) fn is_unoccupied(&self) -> bool {
        self.placing == Placement::None
    }

    /// A chunk goes out; the window was checked.
    pub(crate) fn send(&mut self, now: Time, op: u32, serial: u32, piece: Piece) {
        if self.sent.is_empty() {
            self.progress = now;
            self.meter.begin(now);
        }
        self.sent.push_back(Sent { op, serial, piece, duplicated: false, at: now });
        self.sent_bytes += piece.len;
    }

    /// Number of chunks that the cumulative acknowledgement `count` newly acknowledges, 0 if a newer one came before it.
    /// `Err`: more than were sent.
    pub(crate) fn acknowledge(&mut self, count: u32) -> Result<u32, String> {
        let news = count.wrapping_sub(self.acked);
        // A newer one has overtaken it on another lane.
        if news > u32::MAX / 2 {
            return Ok(0);
        }
        if news as usize > self.sent.len() {
            return Err("acknowledgement of chunks that were not sent".to_owned());
        }
        self.acked = count;
        Ok(news)
    }

    /// Takes `news` acknowledged chunks out of the window, each handed to `each`, and measures.
    pub(crate) fn release(&mut self, now: Time, news: u32, mut each: impl FnMut(Sent)) {
        let mut bytes = 0;
        for _ in 0..news {
            let Some(sent) = self.sent.pop_front() else { break };
            bytes += sent.piece.len;
            each(sent);
        }
        self.sent_bytes -= bytes;
        if news > 0 {
            self.meter.count(now, bytes);
            self.restart_silence_timer(now);
            self.measured = now;
        }
        if self.sent.is_empty() {
            // Acknowledgements that were sent before the last chunk have arrived as well.
            self.acked_in_time = self.last_ack;
        }
    }

    /// True if its rate is to be measured again. `brought`: bytes that all lanes have brought so far.
    pub(crate) fn is_doubtful(&self, now: Time, brought: u64) -> bool {
        self.sent_bytes == 0
            && (now.since(self.measured) >= OLD || brought.saturating_sub(self.seen) >= self.doubted_after)
    }

    /// A chunk is about to be sent; whether its rate is doubtful.
    pub(crate) fn judge(&mut self, doubtful: bool) {
        if doubtful {
            self.meter.doubt();
        }
        let after = if doubtful { self.doubted_after * 2 } else { self.doubted_after / 2 };
        self.doubted_after = after.clamp(DOUBTED_AFTER.0, DOUBTED_AFTER.1);
    }

    /// It was measured when all lanes had brought that many bytes.
    pub(crate) fn measured_at(&mut self, brought: u64) {
        self.seen = brought;
    }

    /// Measured bytes per second, 0 while unknown.
    pub(crate) fn rate(&self) -> u64 {
        self.meter.rate()
    }

    /// Estimated bytes per second at `now`, 0 while unknown. A chunk in flight for far longer than expected lowers the
    /// estimate: the lane has become slower, or was slow from the start.
    pub(crate) fn pace(&self, now: Time) -> u64 {
        let rate = self.meter.rate();
        let Some(first) = self.sent.front() else { return rate };
        let elapsed = now.since(self.measured.max(first.at));
        if elapsed < OVERDUE_MIN {
            return rate;
        }
        let bound = (u128::from(first.piece.len) * 1_000_000_000 / u128::from(elapsed)).clamp(1, 1 << 50) as u64;
        if rate == 0 || bound < rate / 2 { bound } else { rate }
    }

    /// Restarts the silence timer: the peer has delivered something, or only now owes something.
    pub(crate) fn restart_silence_timer(&mut self, now: Time) {
        self.progress = now;
        self.suspected = false;
    }

    /// The peer still holds what it has not taken yet.
    pub(crate) fn heard(&mut self, now: Time) {
        self.alive = now;
        self.suspected = false;
    }

    /// Since when nothing that we wait for has been received.
    pub(crate) fn silent_since(&self) -> Time {
        self.progress.max(self.alive)
    }

    /// Chunks of the peer's consumed in all.
    pub(crate) fn consumed(&self) -> u32 {
        self.consumed
    }

    /// A chunk of the peer's is consumed.
    pub(crate) fn consume(&mut self) {
        self.consumed = self.consumed.wrapping_add(1);
    }

    /// Whether consumed chunks are unacknowledged.
    #[inline]
    pub(crate) fn owes(&self) -> bool {
        self.last_ack != self.consumed
    }

    /// Marks all consumed chunks as acknowledged; returns the cumulative count to send.
    pub(crate) fn take_ack(&mut self) -> u32 {
        self.last_ack = self.consumed;
        self.last_ack
    }

    /// True if another lane might deliver the count of consumed chunks sooner.
    #[inline]
    pub(crate) fn may_ack_sooner(&self) -> bool {
        self.acked_in_time != self.consumed && self.theirs != 0
    }

    /// The peer learns soon that `count` chunks are consumed in all.
    pub(crate) fn acked_in_time(&mut self, count: u32) {
        self.acked_in_time = count;
    }

    /// Estimate of the nanoseconds for which this end's chunks in flight keep the lane busy; the maximum where its rate
    /// is unknown.
    pub(crate) fn queue_ns(&self) -> u64 {
        match (self.sent_bytes, self.rate()) {
            (0, _) => 0,
            (_, 0) => u64::MAX,
            (bytes, rate) => u64::try_from(takes(bytes, rate)).unwrap_or(u64::MAX),
        }
    }

    /// A chunk of the peer's is there and is yet to be unpacked.
    pub(crate) fn land(&mut self, now: Time) -> u32 {
        self.begin_heartbeats(now);
        self.landed += 1;
        self.landed
    }

    /// One of those chunks is unpacked, or never will be.
    pub(crate) fn take_off(&mut self) {
        self.landed = self.landed.saturating_sub(1);
        self.consume();
    }

    /// A chunk's head waits for a slot.
    pub(crate) fn wait(&mut self, now: Time) {
        self.begin_heartbeats(now);
        self.waits = true;
    }

    /// The head that waited has been placed. Restarts the silence timer, because what the peer sent meanwhile is read
    /// only now.
    pub(crate) fn go_on(&mut self, now: Time) {
        if std::mem::take(&mut self.waits) {
            self.alive = now;
        }
    }

    /// Whether this end is not reading from the lane.
    pub(crate) fn waits(&self) -> bool {
        self.waits
    }

    fn begin_heartbeats(&mut self, now: Time) {
        if !self.holds() {
            self.heartbeat_from = now;
        }
    }

    /// Whether it holds something of the peer's that cannot be taken yet.
    fn holds(&self) -> bool {
        self.landed > 0 || self.waits
    }

    /// When the next heartbeat to the peer is due.
    pub(crate) fn next_heartbeat(&self, every: u64) -> Option<Time> {
        self.holds().then(|| Time(self.heartbeat_from.0.saturating_add(every)))
    }

    /// Repeats the acknowledgement as a heartbeat if one is due: it shows the peer that this end is slow, not dead.
    pub(crate) fn heartbeat_if_due(&mut self, now: Time, every: u64) {
        if self.next_heartbeat(every).is_some_and(|at| at <= now) {
            self.heartbeat_from = now;
            self.force_ack();
        }
    }

    /// Schedules an acknowledgement even if the count has not changed.
    pub(crate) fn force_ack(&mut self) {
        if !self.owes() {
            self.last_ack = self.consumed.wrapping_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use crossrail_types::LaneId;

    use super::*;

    fn lane() -> Lane {
        let spec = LaneSpec {
            id: LaneId(0),
            reliable: false,
            messages: true,
            bulk: true,
            max_payload: 1 << 20,
            eager_max: 0,
            whole_max: 0,
            counts: false,
            cost_ns: 0,
        };
        Lane::new(spec, Time(0))
    }

    #[test]
    fn more_acknowledgements_than_chunks_are_a_violation() {
        let mut l = lane();
        l.send(Time(0), 1, 1, Piece { offset: 0, len: 10, again: false });
        assert!(l.acknowledge(2).is_err());
        assert!(l.acknowledge(u32::MAX / 2).is_err());
        assert_eq!(l.acknowledge(1), Ok(1));
        l.release(Time(5), 1, |_| {});
        assert_eq!((l.sent.len(), l.sent_bytes), (0, 0));
        assert!(l.acknowledge(2).is_err());
        for older in [0, u32::MAX] {
            assert_eq!(l.acknowledge(older), Ok(0));
        }
        assert_eq!(l.acknowledge(1), Ok(0), "an older count changes nothing");
    }

    #[test]
    fn what_cannot_be_taken_yet_is_told_again() {
        let mut l = lane();
        assert_eq!(l.next_heartbeat(10), None);
        l.land(Time(5));
        l.wait(Time(7));
        assert_eq!(l.next_heartbeat(10), Some(Time(15)));
        l.heartbeat_if_due(Time(14), 10);
        assert!(!l.owes());
        l.heartbeat_if_due(Time(15), 10);
        assert!(l.owes());
        assert_eq!((l.take_ack(), l.owes()), (0, false));
        assert_eq!(l.next_heartbeat(10), Some(Time(25)));
        l.take_off();
        assert!(l.waits());
        l.go_on(Time(40));
        assert_eq!((l.next_heartbeat(10), l.take_ack(), l.silent_since()), (None, 1, Time(40)));
    }

    #[test]
    fn a_chunk_that_is_overdue_slows_the_pace() {
        let mut l = lane();
        l.send(Time(0), 1, 1, Piece { offset: 0, len: 1_000_000, again: false });
        assert_eq!(l.pace(Time(1_000_000)), 0, "it may be fast");
        assert_eq!(l.pace(Time(1_000_000_000)), 1_000_000);
        l.acknowledge(1).unwrap();
        l.release(Time(1_000_000_000), 1, |_| {});
        assert_eq!((l.rate(), l.pace(Time(9_000_000_000))), (1_000_000, 1_000_000), "nothing is in flight");
        l.send(Time(9_000_000_000), 1, 1, Piece { offset: 0, len: 1_000_000, again: false });
        assert_eq!(l.pace(Time(10_500_000_000)), 1_000_000);
        assert_eq!(l.pace(Time(14_000_000_000)), 200_000);
    }

    #[test]
    fn the_rate_is_that_of_the_busy_time() {
        let mut l = lane();
        for at in [0, 1_000_000_000] {
            l.send(Time(at), 1, 1, Piece { offset: 0, len: 1000, again: false });
            l.acknowledge(if at == 0 { 1 } else { 2 }).unwrap();
            l.release(Time(at + 1000), 1, |_| {});
        }
        assert_eq!(l.rate(), 1_000_000_000);
    }
}
