//! Chunks of the transfers that have some to hand out, in turn.

use super::Peer;
use crate::frame::{self, Frame};
use crate::lane::Sent;
use crate::peer::outgoing::Outgoing;
use crate::{Body, Out, Time};

/// Transfers whose bytes are counted to tell how many connections are worth it.
const COUNTED: usize = 32;

impl Peer {
    pub(super) fn next_chunk(&mut self, now: Time, at: usize, most: u64) -> Option<Out> {
        // Before a transfer is taken from those that have chunks.
        let waiting = if self.lanes.share_by_need() { self.waiting() } else { 0 };
        while let Some((index, serial)) = self.active.pop_front() {
            let Some(outgoing) = self.outs.get_mut(index as usize).filter(|o| o.serial == serial && o.feeds()) else {
                continue;
            };
            let memory = outgoing.memory();
            let Some(feed) = outgoing.feed() else { continue };
            let size = self.lanes.chunk_size(now, at, feed.left(), waiting).map(|size| size.min(most.max(1)));
            let lane = &self.lanes[at];
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
            self.lanes.send(now, at, index, serial, piece);
            let frame = Frame::Chunk { target, offset: piece.offset, from: index + 1, again: piece.again, void: false };
            let body = Body::Memory { memory, offset: piece.offset, len: piece.len as u32 };
            return Some(Out { head: frame::encode_head(&frame, piece.len as u32), body, chunk: true });
        }
        None
    }

    /// Whether there are enough bytes to send that one more connection of a rail is sooner done with its part than the
    /// first alone would be with all: it costs a thread's wake-up at both ends.
    #[inline]
    pub(super) fn takes_part(&self, at: usize) -> bool {
        let lane = &self.lanes[at];
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

    /// Hands out again what lanes have on their way and would bring far later than others could, where no transfer has a
    /// chunk left to hand out. The receiver discards what comes second.
    pub(super) fn double_late(&mut self, now: Time) {
        if !self.active.is_empty() || !self.answers.live() {
            return;
        }
        let (outs, active) = (&mut self.outs, &mut self.active);
        self.lanes.double_late(now, |lane, sent| {
            let found = outs.get_mut(sent.op as usize).filter(|o| o.serial == sent.serial && o.is_feeding());
            let Some(feed) = found.and_then(Outgoing::feed) else { return false };
            sent.doubled = true;
            let listed = feed.left() > 0;
            feed.double(lane, sent.piece);
            if !listed {
                active.push_back((sent.op, sent.serial));
            }
            true
        });
    }
}
