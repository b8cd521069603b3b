//! Acknowledgements of chunks: over the lane that carried them, and sooner over another one.
//!
//! A lane's acknowledgement shares a queue with this end's own chunks on that lane. While both ends send, the peer would
//! thus learn late what a lane has delivered: it would measure a lower rate than the lane has, and leave idle lanes without
//! chunks. So the lane with the shortest queue carries the same count, too, under the peer's number of the other lane. The
//! lane's own acknowledgement is always sent: if a lane is lost, only duplicates are lost with it.

use super::Lanes;
use crate::frame::Frame;
use crate::lane::Lane;

/// Minimum time in nanoseconds by which another lane must deliver an acknowledgement sooner. A copy costs a frame and a
/// thread wake-up at each end.
const SOONER: u64 = 250_000;

impl Lanes {
    /// The place of the lane that this end numbers so; 0: the lane at `at`. `None`: that lane has ended, or never was.
    pub(in crate::peer) fn numbered(&self, number: u32, at: usize) -> Option<usize> {
        if number == 0 { Some(at) } else { self.all.iter().position(|lane| lane.number == number) }
    }

    /// A cheap test: false if no lane's consumed chunks could be acknowledged sooner over another lane.
    #[inline]
    pub(in crate::peer) fn may_ack_sooner(&self) -> bool {
        self.all.len() > 1 && self.all.iter().any(Lane::may_ack_sooner)
    }

    /// True if [`Lanes::take_ack`] has an acknowledgement for the lane at `at`.
    #[inline]
    pub(in crate::peer) fn owes_ack(&self, at: usize) -> bool {
        self.all[at].owes() || self.sooner_of(at).is_some()
    }

    /// The next acknowledgement that the lane at `at` should carry: its own, or another lane's.
    #[inline]
    pub(in crate::peer) fn take_ack(&mut self, at: usize) -> Option<Frame> {
        if !self.all[at].owes() {
            let of = self.sooner_of(at)?;
            let lane = &mut self.all[of];
            let count = lane.consumed();
            lane.acked_in_time(count);
            return Some(Frame::ChunkAck { count, lane: lane.theirs });
        }
        let queue = self.all[at].queue_ns();
        let is_late = self.shortest_queue().is_some_and(|shortest| is_sooner(shortest, queue));
        let lane = &mut self.all[at];
        let count = lane.take_ack();
        if !is_late {
            lane.acked_in_time(count);
        }
        Some(Frame::ChunkAck { count, lane: 0 })
    }

    /// The place of a lane whose count the lane at `at` would be the first to deliver.
    fn sooner_of(&self, at: usize) -> Option<usize> {
        if !self.may_ack_sooner() || !self.carries_acks(at) {
            return None;
        }
        let own = self.all[at].queue_ns();
        let of = self.all.iter().position(|lane| lane.may_ack_sooner() && is_sooner(own, lane.queue_ns()))?;
        (self.shortest_queue() == Some(own)).then_some(of)
    }

    /// Minimum over the lanes of the nanoseconds for which their queues keep them busy.
    fn shortest_queue(&self) -> Option<u64> {
        (0..self.all.len()).filter(|at| self.carries_acks(*at)).map(|at| self.all[at].queue_ns()).min()
    }

    /// Only lanes that carry chunks have a known queue: others may share their link.
    fn carries_acks(&self, at: usize) -> bool {
        !self.all[at].suspected && self.carries_chunks(at)
    }
}

/// Compares the durations of two queues: `one` is shorter by more than [`SOONER`].
fn is_sooner(one: u64, other: u64) -> bool {
    one.saturating_add(SOONER) < other
}
