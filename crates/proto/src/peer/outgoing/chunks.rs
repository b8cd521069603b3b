//! Chunks of the transfers that have some to hand out, in turn.

use std::collections::VecDeque;

use crossrail_types::LaneId;

use super::OutgoingOps;
use super::entry::{Outgoing, Stage};
use crate::feed::Feed;
use crate::frame::{self, Frame, Target};
use crate::lane::{Lane, Sent};
use crate::peer::lanes::{Lanes, Left};
use crate::{Body, Out, Time};

/// Transfers whose bytes are counted to tell how many connections are worth it.
const COUNTED: usize = 32;

impl OutgoingOps {
    pub(super) fn start_feed(&mut self, index: u32, target: Target) {
        let Some(outgoing) = self.table.get_mut(index as usize) else { return };
        outgoing.stage = Stage::Feeding;
        outgoing.long_mut().feed = Some(Feed::new(target, outgoing.len));
        self.active.push_back((index, outgoing.serial));
    }

    #[inline]
    pub(in crate::peer) fn has_chunks(&self) -> bool {
        !self.active.is_empty()
    }

    /// A chunk is unsent that the lane at `at` may carry. Ignores its window.
    #[inline]
    pub(in crate::peer) fn has_chunks_for(&self, lanes: &Lanes, at: usize) -> bool {
        self.has_chunks() && lanes.carries_chunks(at) && self.are_enough_for(&lanes[at])
    }

    /// The next chunk, of at most `most` bytes, for the lane at `at`.
    pub(in crate::peer) fn next_chunk(&mut self, now: Time, lanes: &mut Lanes, at: usize, most: u64) -> Option<Out> {
        // Before a transfer is taken from those that have chunks.
        let (of_all, waiting) = if lanes.len() > 1 { self.waiting_bytes() } else { (0, 0) };
        while let Some((index, serial)) = self.active.pop_front() {
            let found = self.table.get_mut(index as usize).filter(|o| o.serial == serial && o.feeds());
            let Some(outgoing) = found else { continue };
            let memory = outgoing.memory();
            let Some(feed) = outgoing.feed() else { continue };
            let left = Left { of_one: feed.left(), of_all: of_all.max(feed.left()), waiting };
            let size = match feed.unasked {
                true => lanes.takes_whole(now, at, left).then_some(left.of_one),
                false => lanes.chunk_size(now, at, left).map(|size| size.min(most.max(1))),
            };
            let lane = &lanes[at];
            let of = |sent: &Sent| sent.duplicated && (sent.op, sent.serial) == (index, serial);
            if feed.is_duplicated(lane.spec.id) && lane.sent.iter().any(of) {
                self.active.push_front((index, serial));
                return None;
            }
            let Some(size) = size else {
                feed.block(now);
                self.active.push_front((index, serial));
                return None;
            };
            let Some(piece) = feed.take(now, lane.spec.id, size) else { continue };
            let (target, unasked, number) = (feed.target, feed.unasked, lane.number);
            if feed.left() > 0 {
                self.active.push_back((index, serial));
            }
            lanes.send(now, at, index, serial, piece);
            let (offset, again) = (piece.offset, piece.again);
            let frame = Frame::Chunk { target, offset, from: index + 1, again, void: false, unasked, lane: number };
            let body = Body::Memory { memory, offset: piece.offset, len: piece.len as u32 };
            return Some(Out { head: frame::encode_head(&frame, piece.len as u32), body, chunk: true });
        }
        None
    }

    /// Hands out no chunk until what this returns is given to [`OutgoingOps::resume_chunks`].
    pub(in crate::peer) fn hold_chunks(&mut self) -> VecDeque<(u32, u32)> {
        std::mem::take(&mut self.active)
    }

    pub(in crate::peer) fn resume_chunks(&mut self, held: VecDeque<(u32, u32)>) {
        let begun = std::mem::replace(&mut self.active, held);
        self.active.extend(begun);
    }

    /// Whether enough bytes wait for one more connection of a rail to finish its part before the first alone would
    /// finish everything: it costs a thread wake-up at both ends.
    #[inline]
    fn are_enough_for(&self, lane: &Lane) -> bool {
        lane.rank == 0 || lane.is_worth_it(self.waiting_bytes().1)
    }

    /// Unsent bytes and total bytes of the first [`COUNTED`] transfers with chunks to send.
    fn waiting_bytes(&self) -> (u64, u64) {
        let transfer = |(index, serial): &(u32, u32)| {
            let found = self.table.get(*index as usize).filter(|transfer| transfer.serial == *serial);
            found.map_or((0, 0), |transfer| (transfer.long().feed.as_ref().map_or(0, Feed::left), transfer.len))
        };
        let each = self.active.iter().take(COUNTED).map(transfer);
        each.fold((0, 0), |(left, all), (of_left, of_all)| (left + of_left, all + of_all))
    }

    /// A chunk that its dead lane had not delivered; true if it has to go out again.
    pub(in crate::peer) fn requeue(&mut self, lane: LaneId, sent: &Sent) -> bool {
        let Some(outgoing) = self.table.get_mut(sent.op as usize).filter(|o| o.serial == sent.serial) else {
            return false;
        };
        let feeding = outgoing.stage == Stage::Feeding;
        let Some(feed) = outgoing.feed() else { return false };
        if sent.duplicated {
            feed.acked();
            return false;
        }
        let listed = feed.left() > 0;
        feed.requeue(lane, sent.piece);
        if feeding && !listed {
            self.active.push_back((sent.op, sent.serial));
        }
        feeding
    }

    /// The peer has consumed a chunk.
    pub(in crate::peer) fn acked(&mut self, lane: LaneId, sent: &Sent) {
        let of = self.table.get_mut(sent.op as usize).filter(|o| o.serial == sent.serial);
        if let Some(feed) = of.and_then(Outgoing::feed) {
            feed.acked();
            if sent.duplicated {
                feed.cancel_duplicate(lane, sent.piece);
            }
        }
    }

    /// Duplicates chunks in flight that other lanes could deliver far sooner, once no transfer has a chunk left to hand
    /// out. The receiver discards the second copy.
    pub(in crate::peer) fn duplicate_late(&mut self, now: Time, lanes: &mut Lanes) {
        if !self.active.is_empty() {
            return;
        }
        lanes.duplicate_late(now, |lane, sent| {
            let found = self.table.get_mut(sent.op as usize).filter(|o| o.serial == sent.serial);
            let Some(feed) = found.filter(|o| o.stage == Stage::Feeding).and_then(Outgoing::feed) else { return false };
            sent.duplicated = true;
            let listed = feed.left() > 0;
            feed.duplicate(lane, sent.piece);
            if !listed {
                self.active.push_back((sent.op, sent.serial));
            }
            true
        });
    }
}
