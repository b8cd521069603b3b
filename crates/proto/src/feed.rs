use std::collections::VecDeque;

use crossrail_types::LaneId;

use crate::frame::Target;
use crate::{LaneShare, Time};

/// Smallest chunk, unless less is left, or the lane carries less or has a smaller part of the rest; and then.
const CHUNK_MIN: u64 = 64 << 10;
const PART_MIN: u64 = 16 << 10;
/// Target duration of a chunk on its lane, in nanoseconds, where there are several lanes. Each chunk costs wake-ups and
/// system calls at both ends, and a pack and an unpack for GPU memory: with shorter chunks this overhead dominates on
/// fast lanes.
const CHUNK_TIME: u64 = 100_000;
/// Chunk size for a lane that carries a transfer alone, or a quarter of the largest chunk if that is more. The receiver
/// copies such chunks out of the sender's cache; larger ones would be evicted first.
const LONE: u64 = 512 << 10;

/// A contiguous part of a transfer, assigned to one lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// Another lane lost it.
    pub(crate) again: bool,
}

/// The part of one transfer that is still to be sent, for any lane to take.
#[derive(Debug)]
pub(crate) struct Feed {
    pub(crate) target: Target,
    /// It is a message that goes unasked: in one piece.
    pub(crate) unasked: bool,
    len: u64,
    fresh: u64,
    /// With the lane that lost it, or that is too slow with it.
    lost: VecDeque<(LaneId, Piece)>,
    lost_bytes: u64,
    /// Whether pieces may have been sent twice.
    twice: bool,
    /// Chunks on live lanes.
    pub(crate) outstanding: u32,
    shares: Vec<LaneShare>,
    blocked: Option<Time>,
    window_ns: u64,
}

impl Feed {
    pub(crate) fn new(target: Target, len: u64) -> Feed {
        Feed {
            target,
            unasked: false,
            len,
            fresh: 0,
            lost: VecDeque::new(),
            lost_bytes: 0,
            twice: false,
            outstanding: 0,
            shares: Vec::new(),
            blocked: None,
            window_ns: 0,
        }
    }

    /// Bytes that no lane has taken (or that were lost and not taken again).
    pub(crate) fn left(&self) -> u64 {
        self.len - self.fresh + self.lost_bytes
    }

    /// Takes a piece of up to `size` bytes for `lane`: what was lost goes first.
    pub(crate) fn take(&mut self, now: Time, lane: LaneId, size: u64) -> Option<Piece> {
        let piece = if let Some((_, front)) = self.lost.front_mut() {
            let piece = Piece { len: front.len.min(size), ..*front };
            front.offset += piece.len;
            front.len -= piece.len;
            if front.len == 0 {
                self.lost.pop_front();
            }
            self.lost_bytes -= piece.len;
            piece
        } else {
            let piece = Piece { offset: self.fresh, len: size.min(self.len - self.fresh), again: false };
            self.fresh += piece.len;
            piece
        };
        if piece.len == 0 {
            return None;
        }
        if let Some(since) = self.blocked.take() {
            self.window_ns += now.since(since);
        }
        self.outstanding += 1;
        let share = share(&mut self.shares, lane);
        share.bytes += piece.len;
        share.chunks += 1;
        share.resent += if piece.again { piece.len } else { 0 };
        Some(piece)
    }

    /// There was something to take and no window to take it in.
    pub(crate) fn block(&mut self, now: Time) {
        self.blocked.get_or_insert(now);
    }

    /// The peer has consumed a chunk.
    pub(crate) fn acked(&mut self) {
        self.outstanding = self.outstanding.saturating_sub(1);
    }

    /// Takes back `piece`, which `lane` had not delivered when it failed. Call it for the lane's pieces from last to
    /// first.
    pub(crate) fn requeue(&mut self, lane: LaneId, piece: Piece) {
        self.acked();
        let share = share(&mut self.shares, lane);
        share.bytes -= piece.len;
        share.chunks -= 1;
        share.resent -= if piece.again { piece.len } else { 0 };
        self.lost_bytes += piece.len;
        self.twice = true;
        self.lost.push_front((lane, Piece { again: true, ..piece }));
    }

    /// Queues `piece` for other lanes as well, because `lane` would deliver it too late.
    pub(crate) fn duplicate(&mut self, lane: LaneId, piece: Piece) {
        self.requeue(lane, piece);
        // Unlike a dead one, it still carries it.
        self.outstanding += 1;
    }

    /// `lane` has delivered a duplicated piece: drops the part of the duplicate that no other lane has taken yet.
    pub(crate) fn cancel_duplicate(&mut self, lane: LaneId, piece: Piece) {
        let same =
            |(of, again): &(LaneId, Piece)| *of == lane && (again.offset, again.len) == (piece.offset, piece.len);
        let Some(at) = self.lost.iter().position(same) else { return };
        self.lost.remove(at);
        self.lost_bytes -= piece.len;
        let share = share(&mut self.shares, lane);
        share.bytes += piece.len;
        share.chunks += 1;
        share.resent += if piece.again { piece.len } else { 0 };
    }

    /// Whether the next piece to be sent is already in flight on `lane`.
    pub(crate) fn is_duplicated(&self, lane: LaneId) -> bool {
        self.lost.front().is_some_and(|(of, _)| *of == lane)
    }

    /// Whether a lane may still read the memory of a completed transfer: it carries a duplicate, which the receiver
    /// acknowledges before it has read it to the end.
    pub(crate) fn touched(&self) -> bool {
        self.outstanding > 0 || self.twice
    }

    /// Bytes handed out and not lost.
    pub(crate) fn sent(&self) -> u64 {
        self.len - self.left()
    }

    /// The lanes' parts and the nanoseconds without window.
    pub(crate) fn summary(mut self) -> (Vec<LaneShare>, u64) {
        // The transfer is complete: duplicates that still wait to be sent had arrived, and only their acknowledgements
        // were lost.
        for (lane, piece) in self.lost {
            let share = share(&mut self.shares, lane);
            share.bytes += piece.len;
            share.chunks += 1;
        }
        (sorted(self.shares), self.window_ns)
    }
}

/// The entry of `lane`.
pub(crate) fn share(shares: &mut Vec<LaneShare>, lane: LaneId) -> &mut LaneShare {
    let at = shares.iter().position(|s| s.lane == lane).unwrap_or_else(|| {
        shares.push(LaneShare { lane, bytes: 0, chunks: 0, resent: 0 });
        shares.len() - 1
    });
    &mut shares[at]
}

/// By lane, without those that brought nothing.
pub(crate) fn sorted(mut shares: Vec<LaneShare>) -> Vec<LaneShare> {
    shares.retain(|s| s.chunks > 0);
    shares.sort_by_key(|s| s.lane);
    shares
}

/// Size of the next chunk for a lane with `rate` out of the total `rates` of all `lanes` (0: not all measured).
///
/// A quarter of the lane's share of the rest, so that all lanes finish together: large chunks first, small ones last. A
/// lone lane takes equal ones.
pub(crate) fn guided(left: u64, rate: u64, rates: u64, lanes: u64, chunk: u64, max_payload: u64) -> u64 {
    let part =
        if rates == 0 { left / lanes.max(1) } else { (u128::from(left) * u128::from(rate) / u128::from(rates)) as u64 };
    // A power of two, so that noise in the rate matters little.
    let worth = if lanes > 1 { (rate / (1_000_000_000 / CHUNK_TIME)).min(chunk).next_power_of_two() } else { 0 };
    // A slow lane's part of a short transfer may be less than a chunk otherwise is.
    let least = part.clamp(PART_MIN, CHUNK_MIN).max(worth).min(chunk);
    // A lone lane has nobody to finish together with. Whole pages, so that the memory's alignment is kept from chunk to
    // chunk.
    let size = (if lanes > 1 { part / 4 } else { part.min(LONE.max(chunk / 4)) }).clamp(least, chunk) & !4095;
    size.max(4096.min(chunk)).min(max_payload).min(left)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGET: Target = Target { index: 0, serial: 0 };

    #[test]
    fn lost_pieces_go_out_first_and_shares_add_up() {
        let mut feed = Feed::new(TARGET, 1000);
        let (a, b) = (LaneId(1), LaneId(2));
        let first = feed.take(Time(0), a, 300).unwrap();
        let second = feed.take(Time(0), a, 300).unwrap();
        assert_eq!(feed.take(Time(0), b, 100), Some(Piece { offset: 600, len: 100, again: false }));
        feed.requeue(a, second);
        feed.requeue(a, first);
        assert_eq!((feed.left(), feed.outstanding), (900, 1));
        assert_eq!(feed.take(Time(0), b, 200), Some(Piece { offset: 0, len: 200, again: true }));
        assert_eq!(feed.take(Time(0), b, 200), Some(Piece { offset: 200, len: 100, again: true }));
        assert_eq!(feed.take(Time(0), b, 900), Some(Piece { offset: 300, len: 300, again: true }));
        assert_eq!(feed.take(Time(0), b, 900), Some(Piece { offset: 700, len: 300, again: false }));
        assert_eq!(feed.take(Time(0), b, 900), None);
        let (shares, _) = feed.summary();
        assert_eq!(shares, [LaneShare { lane: b, bytes: 1000, chunks: 5, resent: 600 }]);
    }

    #[test]
    fn a_doubled_piece_goes_out_twice_unless_the_first_lane_was_sooner() {
        let mut feed = Feed::new(TARGET, 1000);
        let (slow, fast) = (LaneId(1), LaneId(2));
        let first = feed.take(Time(0), slow, 300).unwrap();
        let second = feed.take(Time(0), slow, 300).unwrap();
        feed.take(Time(0), fast, 400);
        feed.duplicate(slow, second);
        feed.duplicate(slow, first);
        assert!(feed.is_duplicated(slow) && !feed.is_duplicated(fast));
        assert_eq!((feed.left(), feed.outstanding), (600, 3));
        assert_eq!(feed.take(Time(0), fast, 400).map(|piece| piece.len), Some(300));
        feed.cancel_duplicate(slow, first);
        assert_eq!(feed.left(), 300, "it is on its way already");
        feed.cancel_duplicate(slow, second);
        assert_eq!(feed.left(), 0);
        let (shares, _) = feed.summary();
        let share = |lane, bytes, chunks, resent| LaneShare { lane, bytes, chunks, resent };
        assert_eq!(shares, [share(slow, 300, 1, 0), share(fast, 700, 2, 300)]);
    }

    #[test]
    fn chunks_shrink_towards_the_end() {
        let size = |left, rate| guided(left, rate, 100, 4, 2 << 20, 1 << 30);
        assert_eq!(size(1 << 30, 50), 2 << 20);
        assert!(size(8 << 20, 50) > size(8 << 20, 25));
        assert_eq!(size(1 << 30, 1), 2 << 20);
        assert_eq!(size(8 << 20, 1), 64 << 10);
        assert_eq!(size(4 << 20, 1), 40 << 10, "its part");
        assert_eq!(size(100 << 10, 1), 16 << 10, "more than its part");
        assert_eq!(guided(100 << 10, 0, 0, 4, 2 << 20, 1 << 30), 24 << 10, "rates are not known: each has a part");
        assert_eq!(size(1000, 1), 1000);
        assert_eq!(guided(8 << 20, 0, 0, 4, 2 << 20, 1 << 30), 512 << 10);
        assert_eq!(guided(8 << 20, 0, 0, 4, 2 << 20, 5000), 5000);
    }

    #[test]
    fn a_chunk_takes_a_fast_lane_a_tenth_of_a_millisecond() {
        let size = |left, rate, lanes| guided(left, rate, rate * lanes, lanes, 2 << 20, 1 << 30);
        assert_eq!(size(1 << 20, 2_600_000_000, 8), 256 << 10);
        assert_eq!(size(1 << 20, 2_700_000_000, 8), 512 << 10);
        assert_eq!(size(1 << 20, 100_000_000_000, 8), 1 << 20);
        assert_eq!(size(100 << 10, 3_000_000_000, 8), 100 << 10);
        assert_eq!(size(1 << 20, 100_000_000, 8), 64 << 10);
        assert_eq!(size(400 << 10, 3_000_000_000, 1), 400 << 10, "alone");
        assert_eq!(size(8 << 20, 3_000_000_000, 1), 512 << 10);
        assert_eq!(guided(8 << 20, 0, 0, 1, 8 << 20, 1 << 30), 2 << 20);
        assert_eq!(guided(8 << 20, 0, 0, 1, 256 << 10, 1 << 30), 256 << 10);
    }

    #[test]
    fn waiting_for_window_is_timed() {
        let mut feed = Feed::new(TARGET, 10);
        feed.block(Time(5));
        feed.block(Time(9));
        feed.take(Time(12), LaneId(0), 1);
        assert_eq!(feed.summary().1, 7);
    }
}
