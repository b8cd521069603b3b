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

/// Our counted messages that the peer has not confirmed, oldest first.
#[derive(Debug, Default)]
pub(super) struct Unconfirmed {
    /// Index in the table of outgoing operations, and the serial that tells its reuses apart: a message that was
    /// answered by name has left the table before the count passes it.
    waiting: VecDeque<(u32, u32)>,
    /// How many have been confirmed, modulo 2^32.
    confirmed: u32,
}

impl Unconfirmed {
    #[inline]
    pub(super) fn push(&mut self, index: u32, serial: u32) {
        self.waiting.push_back((index, serial));
    }

    #[inline]
    pub(super) fn waits(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Whether `count` was told after the last one.
    #[inline]
    pub(super) fn is_ahead(&self, count: u32) -> bool {
        count.wrapping_sub(self.confirmed) as i32 > 0
    }

    /// How many messages `count` confirms that were not confirmed before. `Err`: more than were sent.
    #[inline]
    pub(super) fn news(&self, count: u32) -> Result<u32, String> {
        let news = count.wrapping_sub(self.confirmed);
        if news as usize > self.waiting.len() {
            return Err(format!("{news} messages confirmed of {} that were sent", self.waiting.len()));
        }
        Ok(news)
    }

    /// The oldest one, confirmed now.
    #[inline]
    pub(super) fn pop(&mut self) -> Option<(u32, u32)> {
        self.confirmed = self.confirmed.wrapping_add(1);
        self.waiting.pop_front()
    }

    pub(super) fn clear(&mut self) {
        self.confirmed = self.confirmed.wrapping_add(self.waiting.len() as u32);
        self.waiting.clear();
    }
}

/// The peer's counted messages, as this end confirms them.
#[derive(Debug, Default)]
pub(super) struct Delivered {
    /// How many have arrived, modulo 2^32.
    arrived: u32,
    /// The count that the peer was told last.
    told: u32,
    /// Numbers of messages that an answer by name is still to tell of, ascending, each with the sender's id of it.
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

    /// How many messages the count confirms.
    #[inline]
    pub(super) fn count(&self) -> u32 {
        self.withheld.front().map_or(self.arrived, |(number, _)| *number)
    }

    /// Whether the peer has not been told of all that the count confirms.
    #[inline]
    pub(super) fn owed(&self) -> bool {
        self.count() != self.told
    }

    /// How many messages the peer has not been told of.
    #[inline]
    pub(super) fn untold(&self) -> u32 {
        self.count().wrapping_sub(self.told)
    }

    /// Nobody listens any more.
    pub(super) fn clear(&mut self) {
        self.withheld.clear();
        self.told = self.arrived;
    }

    /// The count, to be told now.
    #[inline]
    pub(super) fn tell(&mut self) -> u32 {
        self.told = self.count();
        self.told
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_delivered_holds_the_count_back_until_it_is_answered() {
        let mut d = Delivered::default();
        assert!(d.deliver(1));
        assert_eq!((d.owed(), d.tell(), d.owed()), (true, 1, false));
        d.withhold(7);
        assert!(!d.deliver(8), "behind one that is withheld");
        assert!(!d.owed());
        d.answered(8);
        assert_eq!(d.tell(), 1, "the older one still holds the count back");
        d.answered(7);
        assert_eq!((d.untold(), d.tell()), (2, 3));
    }

    #[test]
    fn the_oldest_withheld_message_is_confirmed_by_the_count() {
        let mut d = Delivered::default();
        d.withhold(4);
        d.withhold(5);
        assert!(!d.deliver_late(5));
        assert!(d.deliver_late(4));
        assert_eq!(d.tell(), 1);
        d.answered(5);
        assert_eq!(d.tell(), 2);
        assert!(!d.deliver_late(5), "it is no longer known");
    }

    #[test]
    fn a_count_beyond_what_was_sent_is_a_violation() {
        let mut u = Unconfirmed { confirmed: u32::MAX, ..Unconfirmed::default() };
        u.push(0, 1);
        u.push(1, 2);
        assert_eq!(u.news(u32::MAX), Ok(0));
        assert_eq!(u.news(1), Ok(2));
        assert!(u.news(2).is_err());
        assert!(u.news(u32::MAX - 1).is_err(), "a count never goes back");
        assert_eq!(u.pop(), Some((0, 1)));
        assert_eq!(u.news(1), Ok(1));
        u.clear();
        assert_eq!(u.news(1), Ok(0));
    }
}
