//! Confirmation of short messages by counting, on a lane that loses nothing.
//!
//! Such a lane delivers frames in order, so one number can confirm many messages: "the first N are in their receivers'
//! memory". It rides in the `ack` field of whatever goes back, and in an [`Ack`](crate::frame::Frame::Ack) frame of its
//! own when nothing does, or as a word beside the frames where the lane has one. A ping-pong therefore confirms for
//! free, and the receiver keeps no state per message.
//!
//! A message that is not delivered as it arrives (no receive was posted, the buffer is too short, its memory is a
//! GPU's) holds the count back at its own number until it is answered by name, with `done` or `fail`; messages behind
//! it are answered by name too. A number is released only *after* the frame with the answer was stamped: the reader
//! applies a frame's `ack` before its content, and must not confirm by count what the same frame declares failed.

use std::collections::VecDeque;

use crossrail_types::OpId;

use crate::{Failure, Time};

/// A counted message of ours.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counted {
    pub(super) op: OpId,
    pub(super) len: u64,
    pub(super) started: Time,
    pub(super) stage: CountedStage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CountedStage {
    /// The count will confirm it, or an answer by name end it.
    Sent,
    /// The same, and the peer was asked to drop it.
    Aborting,
    /// An answer by name has ended it; the count has yet to pass it.
    Answered,
}

/// Our counted messages that the count has not passed, oldest first.
///
/// They need no entry in the table of outgoing operations: they end in the order in which they began. The place of each
/// in a cycle of as many places as may be in flight is its name on the wire, for answers by name.
#[derive(Debug)]
pub(super) struct Unconfirmed {
    /// By place: those from the oldest on, and behind the last place of the cycle from the first one on. The others are
    /// over. Only places that were ever used are there.
    waiting: Vec<Counted>,
    /// How many the count has passed, modulo 2^32.
    confirmed: u32,
    /// Places in the cycle, that of the oldest message, and how many messages there are.
    places: u32,
    first: u32,
    len: u32,
    /// Why messages are being aborted, where our memory was at fault.
    faults: Vec<(OpId, Failure)>,
}

/// The id on the wire of the counted message at `place`, where a peer has `credit`: behind those of the operations in
/// its table of outgoing ones, its own and the reads that it serves.
#[inline]
pub(super) fn counted_id(credit: u32, place: u32) -> u32 {
    2 * credit + 1 + place
}

/// The place of the counted message with that id; `None`: the id is not one of a counted message.
#[inline]
pub(super) fn counted_place(credit: u32, id: u32) -> Option<u32> {
    id.checked_sub(counted_id(credit, 0))
}

impl Unconfirmed {
    pub(super) fn new(places: u32) -> Unconfirmed {
        Unconfirmed { waiting: Vec::new(), confirmed: 0, places, first: 0, len: 0, faults: Vec::new() }
    }

    /// The id on the wire of the message at `place`.
    #[inline]
    pub(super) fn id(&self, place: u32) -> u32 {
        counted_id(self.places, place)
    }

    /// The place that `id` names; `None`: it is not one of a counted message.
    #[inline]
    pub(super) fn place_of(&self, id: u32) -> Option<u32> {
        counted_place(self.places, id)
    }

    /// Whether there is no place for another one.
    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.len >= self.places
    }

    /// Adds a message; its place.
    #[inline(always)]
    pub(super) fn push(&mut self, op: OpId, len: u64, started: Time) -> u32 {
        let place = self.place(self.len);
        let counted = Counted { op, len, started, stage: CountedStage::Sent };
        match self.waiting.get_mut(place as usize) {
            Some(free) => *free = counted,
            // Places are used in their order, so this is the next one.
            None => self.push_first(counted),
        }
        self.len += 1;
        place
    }

    /// A message whose place was never used before.
    #[cold]
    #[inline(never)]
    fn push_first(&mut self, counted: Counted) {
        self.waiting.push(counted);
    }

    /// The place of the message that `ahead` others are older than.
    #[inline]
    fn place(&self, ahead: u32) -> u32 {
        let place = self.first + ahead;
        if place < self.places { place } else { place - self.places }
    }

    #[inline]
    pub(super) fn waits(&self) -> bool {
        self.len > 0
    }

    /// Whether `count` is newer than the last one.
    #[inline]
    pub(super) fn is_ahead(&self, count: u32) -> bool {
        count.wrapping_sub(self.confirmed) as i32 > 0
    }

    /// How many messages `count` confirms that were not confirmed before. `None`: more than were sent.
    #[inline]
    pub(super) fn newly_confirmed(&self, count: u32) -> Option<u32> {
        let news = count.wrapping_sub(self.confirmed);
        (news <= self.len).then_some(news)
    }

    /// What is wrong with a count that confirms more than were sent.
    #[cold]
    pub(super) fn too_many(&self, count: u32) -> String {
        let news = count.wrapping_sub(self.confirmed);
        format!("{news} messages confirmed of {} that were sent", self.len)
    }

    /// The oldest one, which the count has passed now.
    pub(super) fn pop(&mut self) -> Option<Counted> {
        if self.len == 0 {
            self.confirmed = self.confirmed.wrapping_add(1);
            return None;
        }
        let counted = self.waiting.get(self.first as usize).copied();
        self.pass();
        counted
    }

    /// [`Unconfirmed::pop`] of a message that is [`CountedStage::Sent`]. `None`: it is another, or there is none, and
    /// nothing has changed.
    #[inline(always)]
    pub(super) fn pop_sent(&mut self) -> Option<&Counted> {
        let first = self.first as usize;
        // A place that is not there was never used.
        if self.len == 0 || self.waiting.get(first)?.stage != CountedStage::Sent {
            return None;
        }
        self.pass();
        self.waiting.get(first)
    }

    /// The count passes the oldest one.
    #[inline(always)]
    fn pass(&mut self) {
        self.confirmed = self.confirmed.wrapping_add(1);
        self.len -= 1;
        // Low places keep the peer's table of them short.
        let over = self.len == 0 || self.first + 1 == self.places;
        self.first = if over { 0 } else { self.first + 1 };
    }

    /// The message at a place, if one is there that has not been answered.
    pub(super) fn at(&mut self, place: u32) -> Option<&mut Counted> {
        if place >= self.places {
            return None;
        }
        let ahead = if place >= self.first { place - self.first } else { place + self.places - self.first };
        let counted = self.waiting.get_mut(place as usize).filter(|_| ahead < self.len);
        counted.filter(|counted| counted.stage != CountedStage::Answered)
    }

    /// The messages that have not been answered, with their places, oldest first.
    pub(super) fn iter(&mut self) -> impl Iterator<Item = (u32, &mut Counted)> {
        let len = self.len as usize;
        let (behind, from) = self.waiting.split_at_mut(self.first as usize);
        let places = (self.first..).zip(from).chain((0..).zip(behind));
        places.take(len).filter(|(_, counted)| counted.stage != CountedStage::Answered)
    }

    /// The message of that operation, if it has not been answered.
    pub(super) fn find(&self, op: OpId) -> Option<&Counted> {
        let mut all = (0..self.len).filter_map(|ahead| self.waiting.get(self.place(ahead) as usize));
        all.find(|counted| counted.op == op && counted.stage != CountedStage::Answered)
    }

    /// Records our memory's failure as the reason why `op` is being aborted.
    pub(super) fn blame(&mut self, op: OpId, why: Failure) {
        self.faults.push((op, why));
    }

    /// Takes that reason.
    pub(super) fn take_fault(&mut self, op: OpId) -> Option<Failure> {
        let at = self.faults.iter().position(|(of, _)| *of == op)?;
        Some(self.faults.swap_remove(at).1)
    }

    pub(super) fn clear(&mut self) {
        self.confirmed = self.confirmed.wrapping_add(self.len);
        self.waiting.clear();
        self.faults.clear();
        (self.first, self.len) = (0, 0);
    }
}

/// The peer's counted messages, as this end confirms them.
#[derive(Debug, Default)]
pub(super) struct Delivered {
    /// How many have arrived, modulo 2^32.
    arrived: u32,
    /// The count that was last sent or published to the peer.
    published: u32,
    /// Sequence numbers of messages still to be answered by name, ascending, each with the sender's id of it.
    withheld: VecDeque<(u32, u32)>,
}

impl Delivered {
    /// A message arrived and was delivered. False: messages before it hold the count back, so it was withheld and
    /// needs an answer by name.
    #[inline]
    pub(super) fn deliver(&mut self, their: u32) -> bool {
        if self.withheld.is_empty() {
            self.arrived = self.arrived.wrapping_add(1);
            return true;
        }
        self.withhold(their);
        false
    }

    /// A message arrived and was delivered, and none before it holds the count back.
    #[inline]
    pub(super) fn deliver_next(&mut self) {
        debug_assert!(self.withheld.is_empty());
        self.arrived = self.arrived.wrapping_add(1);
    }

    /// A message arrived whose fate is open.
    pub(super) fn withhold(&mut self, their: u32) {
        self.withheld.push_back((self.arrived, their));
        self.arrived = self.arrived.wrapping_add(1);
    }

    /// A withheld message was delivered after all. True: it was the oldest withheld one, so the count tells of it.
    pub(super) fn deliver_late(&mut self, their: u32) -> bool {
        let oldest = self.withheld.front().is_some_and(|(_, known)| *known == their);
        if oldest {
            self.withheld.pop_front();
        }
        oldest
    }

    /// The frame that answers for a message was stamped and goes out.
    #[inline]
    pub(super) fn answered(&mut self, their: u32) {
        if !self.withheld.is_empty() {
            self.release(their);
        }
    }

    #[cold]
    fn release(&mut self, their: u32) {
        if let Some(at) = self.withheld.iter().position(|(_, known)| *known == their) {
            self.withheld.remove(at);
        }
    }

    /// Whether any message holds the count back.
    pub(super) fn withholds(&self) -> bool {
        !self.withheld.is_empty()
    }

    /// How many messages the count confirms.
    #[inline]
    pub(super) fn count(&self) -> u32 {
        self.withheld.front().map_or(self.arrived, |(number, _)| *number)
    }

    /// Whether the count has advanced since it was last sent or published.
    #[inline]
    pub(super) fn owed(&self) -> bool {
        self.count() != self.published
    }

    /// Number of messages that the count confirms and that were not sent or published yet.
    #[inline]
    pub(super) fn unpublished_count(&self) -> u32 {
        self.count().wrapping_sub(self.published)
    }

    /// Nobody listens any more.
    pub(super) fn clear(&mut self) {
        self.withheld.clear();
        self.published = self.arrived;
    }

    /// The count, if it has not been sent or published, when no message holds it back.
    #[inline(always)]
    pub(super) fn unpublished(&self) -> Option<u32> {
        debug_assert!(self.withheld.is_empty());
        (self.arrived != self.published).then_some(self.arrived)
    }

    /// How many messages have arrived, when no message holds the count back.
    #[inline(always)]
    pub(super) fn arrived(&self) -> u32 {
        debug_assert!(self.withheld.is_empty());
        self.arrived
    }

    /// Records that `count` was published.
    #[inline(always)]
    pub(super) fn count_published(&mut self, count: u32) {
        self.published = count;
    }

    /// The count, to be sent now, when no message holds it back.
    #[inline]
    pub(super) fn take_arrived(&mut self) -> u32 {
        debug_assert!(self.withheld.is_empty());
        self.published = self.arrived;
        self.published
    }

    /// The count, to be sent now.
    #[inline]
    pub(super) fn take_count(&mut self) -> u32 {
        self.published = self.count();
        self.published
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_delivered_holds_the_count_back_until_it_is_answered() {
        let mut d = Delivered::default();
        assert!(d.deliver(1));
        assert_eq!((d.owed(), d.take_count(), d.owed()), (true, 1, false));
        d.withhold(7);
        assert!(!d.deliver(8), "behind one that is withheld");
        assert!(!d.owed());
        d.answered(8);
        assert_eq!(d.take_count(), 1, "the older one still holds the count back");
        d.answered(7);
        assert_eq!((d.unpublished_count(), d.take_count()), (2, 3));
    }

    #[test]
    fn the_oldest_withheld_message_is_confirmed_by_the_count() {
        let mut d = Delivered::default();
        d.withhold(4);
        d.withhold(5);
        assert!(!d.deliver_late(5));
        assert!(d.deliver_late(4));
        assert_eq!(d.take_count(), 1);
        d.answered(5);
        assert_eq!(d.take_count(), 2);
        assert!(!d.deliver_late(5), "it is no longer known");
    }

    #[test]
    fn a_count_beyond_what_was_sent_is_a_violation() {
        let (mut u, op) = (Unconfirmed::new(4), OpId { index: 0, generation: 1 });
        u.confirmed = u32::MAX;
        u.push(op, 8, Time(0));
        u.push(op, 9, Time(0));
        assert_eq!(u.newly_confirmed(u32::MAX), Some(0));
        assert_eq!(u.newly_confirmed(1), Some(2));
        assert!(u.newly_confirmed(2).is_none());
        assert!(u.newly_confirmed(u32::MAX - 1).is_none(), "a count never goes back");
        assert_eq!(u.pop().map(|counted| counted.len), Some(8));
        assert_eq!(u.newly_confirmed(1), Some(1));
        u.clear();
        assert_eq!(u.newly_confirmed(1), Some(0));
    }

    #[test]
    fn places_name_the_messages_that_are_under_way() {
        let (mut u, op) = (Unconfirmed::new(3), |index| OpId { index, generation: 0 });
        let found = |u: &mut Unconfirmed, place| u.at(place).map(|counted| counted.op.index);
        for index in 0..3 {
            assert_eq!(u.push(op(index), 8, Time(0)), index);
        }
        assert!(u.is_full());
        u.pop();
        assert_eq!(u.push(op(3), 8, Time(0)), 0, "the place of the first is free");
        assert_eq!((0..4).map(|place| found(&mut u, place)).collect::<Vec<_>>(), [Some(3), Some(1), Some(2), None]);
        u.at(1).expect("in flight").stage = CountedStage::Answered;
        assert_eq!(found(&mut u, 1), None, "it was answered");
        assert_eq!(u.iter().map(|(place, counted)| (place, counted.op.index)).collect::<Vec<_>>(), [(2, 2), (0, 3)]);
        u.pop();
        u.pop();
        assert_eq!((found(&mut u, 0), found(&mut u, 2)), (Some(3), None));
        u.pop();
        assert_eq!(u.push(op(4), 8, Time(0)), 0, "none is in flight: the cycle starts over");
    }
}
