//! Which lane carries which chunk: lanes take chunks in proportion to what they carry, come to the end of a transfer
//! together, and what a slow one would bring last is given to faster ones again.

use super::Peer;
use crate::feed::guided;
use crate::frame::{self, Frame};
use crate::lane::{Lane, Sent};
use crate::peer::outgoing::Outgoing;
use crate::{Body, Out, Time};

/// A lane that is too slow for what is left of a transfer gets a chunk all the same when its rate was last measured so
/// many nanoseconds ago: it may have become faster.
const PROBE_EVERY: u64 = 1_000_000_000;

/// Transfers whose bytes are counted to tell how many connections are worth it.
const COUNTED: usize = 32;

/// Nanoseconds that so many bytes take at that pace.
fn takes(bytes: u64, pace: u64) -> u128 {
    u128::from(bytes) * 1_000_000_000 / u128::from(pace.max(1))
}

impl Peer {
    pub(super) fn next_chunk(&mut self, now: Time, at: usize, most: u64) -> Option<Out> {
        // Before a transfer is taken from those that have chunks.
        let waiting = if self.ramp.is_on() { self.waiting() } else { 0 };
        while let Some((index, serial)) = self.active.pop_front() {
            let alive = self.outs.get(index as usize).is_some_and(|o| o.serial == serial && o.feeds());
            if !alive {
                continue;
            }
            let size = self.chunk_size(now, at, index, waiting).map(|size| size.min(most.max(1)));
            let lane = &mut self.lanes[at];
            let outgoing = &mut self.outs[index as usize];
            let memory = outgoing.memory();
            let Some(feed) = outgoing.feed() else { continue };
            let of = |sent: &Sent| sent.doubled && (sent.op, sent.serial) == (index, serial);
            if feed.is_doubled(lane.spec.id) && lane.sent.iter().any(of) {
                self.active.push_front((index, serial));
                return None;
            }
            let Some(size) = size else {
                feed.block(now);
                self.active.push_front((index, serial));
                return None;
            };
            let Some(piece) = feed.take(now, lane.spec.id, size) else { continue };
            let target = feed.target;
            if feed.left() > 0 {
                self.active.push_back((index, serial));
            }
            lane.send(now, index, serial, piece);
            self.ramp.sends(now);
            let frame = Frame::Chunk { target, offset: piece.offset, from: index + 1, again: piece.again, void: false };
            let body = Body::Memory { memory, offset: piece.offset, len: piece.len as u32 };
            return Some(Out { head: frame::encode_head(&frame, piece.len as u32), body, chunk: true });
        }
        None
    }

    /// Whether a lane that carries chunks is to carry some of `waiting` bytes.
    fn shares(&self, lane: &Lane, waiting: u64) -> bool {
        !lane.spare && lane.is_worth_it(waiting)
    }

    /// Whether there are enough bytes to send that one more connection of a rail is sooner done with its part than the
    /// first alone would be with all: it costs a thread's wake-up at both ends.
    #[inline]
    pub(super) fn takes_part(&self, lane: &Lane) -> bool {
        lane.rank == 0 || lane.is_worth_it(self.waiting())
    }

    /// Bytes of the transfers that have chunks to hand out: of the first of them, which are enough to tell.
    fn waiting(&self) -> u64 {
        let transfer = |(index, serial): &(u32, u32)| {
            self.outs
                .get(*index as usize)
                .filter(|transfer| transfer.serial == *serial)
                .map_or(0, |transfer| transfer.len)
        };
        self.active.iter().take(COUNTED).map(transfer).sum()
    }

    /// How much of that transfer the lane should take; `None`: it has no window, or the other lanes will be done
    /// with all the rest before it would be with one more chunk. `waiting`: bytes of all transfers that have chunks.
    fn chunk_size(&self, now: Time, at: usize, index: u32, waiting: u64) -> Option<u64> {
        let lane = &self.lanes[at];
        if lane.sent.len() >= self.config.window as usize {
            return None;
        }
        let left = self.outs.get(index as usize)?.rest().feed.as_ref()?.left();
        let pace = lane.pace(now);
        let (mut lanes, mut rates, mut outstanding, mut measured, mut soonest) = (0, 0u64, 0u64, true, u128::MAX);
        for l in self.lanes.iter().filter(|l| l.spec.bulk == lane.spec.bulk && !l.suspected && self.shares(l, waiting))
        {
            let rate = l.pace(now);
            lanes += 1;
            rates += rate;
            outstanding += l.sent_bytes;
            measured &= rate > 0;
            soonest = soonest.min(takes(l.sent_bytes + left, rate));
        }
        let rates = if measured { rates } else { 0 };
        let chunk = self.config.chunk.clamp(1, u64::from(u32::MAX));
        let size = guided(left, pace, rates, lanes, chunk, u64::from(lane.spec.max_payload));
        if lanes > 1 && rates > 0 && lane.sent_bytes > 0 && !lane.suspected {
            let alone = u128::from(lane.sent_bytes + size) * u128::from(rates);
            let together = u128::from(left + outstanding) * u128::from(pace);
            // Leave room for error: a sixteenth more than an even finish.
            if alone > together + together / 16 {
                return None;
            }
        }
        // Nor does one that has nothing to do take what another alone would have carried before it is done.
        let idle = lanes > 1 && rates > 0 && lane.sent_bytes == 0 && now.since(lane.measured) < PROBE_EVERY;
        if idle && takes(size, pace) > soonest.saturating_mul(2) {
            return None;
        }
        Some(size)
    }

    /// Where no transfer has a chunk left to hand out: what lanes have on their way and would bring far later than others
    /// could is handed out again. The receiver discards what comes second.
    pub(super) fn double_late(&mut self, now: Time) {
        if self.lanes.len() < 2 || !self.active.is_empty() || !self.live() {
            return;
        }
        // Less than that is noise, and no reason to send anything twice.
        let margin = u128::from(self.config.lane_deadline / 16);
        let window = self.config.window as usize;
        for at in 0..self.lanes.len() {
            let (id, pace, mut ahead) = (self.lanes[at].spec.id, self.lanes[at].pace(now), self.lanes[at].sent_bytes);
            if pace == 0 {
                continue;
            }
            let free = |l: &&Lane| {
                let carries = l.spec.bulk == self.lanes[at].spec.bulk && !l.suspected && l.sent.len() < window;
                carries && self.shares(l, 0) && l.spec.id != id
            };
            let others: Vec<(u64, u64)> = self
                .lanes
                .iter()
                .filter(free)
                .map(|l| (l.sent_bytes, l.pace(now)))
                .filter(|(_, pace)| *pace > 0)
                .collect();
            let mut given = 0;
            for place in (0..self.lanes[at].sent.len()).rev() {
                let sent = self.lanes[at].sent[place];
                let len = sent.piece.len;
                let soonest = others.iter().map(|(busy, pace)| takes(busy + given + len, *pace)).min();
                if soonest.is_none_or(|soonest| takes(ahead, pace) <= 2 * soonest + margin) {
                    break;
                }
                ahead -= len;
                if !sent.doubled && self.double(at, place) {
                    given += len;
                }
            }
        }
    }

    /// Hands a chunk out again that is in flight on the lane at `at` as its `place`-th; false if its transfer is over.
    fn double(&mut self, at: usize, place: usize) -> bool {
        let lane = &mut self.lanes[at];
        let (id, sent) = (lane.spec.id, &mut lane.sent[place]);
        let found = self.outs.get_mut(sent.op as usize).filter(|o| o.serial == sent.serial && o.is_feeding());
        let Some(feed) = found.and_then(Outgoing::feed) else { return false };
        sent.doubled = true;
        let listed = feed.left() > 0;
        feed.double(id, sent.piece);
        if !listed {
            self.active.push_back((sent.op, sent.serial));
        }
        true
    }
}
