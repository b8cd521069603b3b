//! Notes: what the engine passes beside the frames, with descriptors, through the lane's socket.
//!
//! At most [`MOST_NOTES`] of them, with [`MOST_FILES`] descriptors in total, are in flight or wait to be taken; the
//! sender tracks how many were taken and stays within that credit, so an honest peer never exceeds the receiver's
//! limit.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use crossrail_transport::{LaneError, ReceivedNote};

use crate::descriptors::Room;

/// Notes that were passed and not taken.
const MOST_NOTES: u32 = 64;
/// Their descriptors.
const MOST_FILES: u32 = 128;

/// Notes and their descriptors since the lane began, modulo 2^32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) notes: u32,
    pub(crate) files: u32,
}

impl Count {
    fn since(self, earlier: Count) -> Count {
        Count { notes: self.notes.wrapping_sub(earlier.notes), files: self.files.wrapping_sub(earlier.files) }
    }

    fn add(&mut self, files: u32) {
        self.notes = self.notes.wrapping_add(1);
        self.files = self.files.wrapping_add(files);
    }

    fn fits(self) -> bool {
        self.notes <= MOST_NOTES && self.files <= MOST_FILES
    }
}

/// Both directions.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    sent: Count,
    /// Of those, what the peer has taken.
    taken_there: Count,
    waiting: VecDeque<(ReceivedNote, Option<Room>)>,
    arrived: Count,
    taken: Count,
    /// What the peer knows of that.
    told: Count,
}

impl Notes {
    /// Whether a note with so many descriptors may be sent.
    pub(crate) fn may_send(&self, files: u32) -> bool {
        let mut then = self.sent;
        then.add(files);
        then.since(self.taken_there).fits()
    }

    pub(crate) fn sent(&mut self, files: u32) {
        self.sent.add(files);
    }

    /// The peer says what it has taken in all.
    pub(crate) fn peer_took(&mut self, count: Count) -> Result<(), LaneError> {
        let (news, owed) = (count.since(self.taken_there), self.sent.since(self.taken_there));
        if news.notes > owed.notes || news.files > owed.files {
            return Err(LaneError::Protocol("the peer took more notes than it was passed".into()));
        }
        self.taken_there = count;
        Ok(())
    }

    /// A note of the peer's; `lost` descriptors of it could not be received.
    pub(crate) fn arrive(&mut self, note: Vec<u8>, files: Vec<OwnedFd>, lost: usize) -> Result<(), LaneError> {
        let room = Room::take(files.len());
        // Without room they count as descriptors that the process could not receive.
        let (files, lost) = if room.is_some() { (files, lost) } else { (Vec::new(), lost + files.len()) };
        self.arrived.add((files.len() + lost) as u32);
        if !self.arrived.since(self.taken).fits() {
            return Err(LaneError::Protocol(format!(
                "more than {MOST_NOTES} notes or {MOST_FILES} descriptors that were not taken yet"
            )));
        }
        self.waiting.push_back((ReceivedNote { note, files, lost }, room));
        Ok(())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(crate) fn take(&mut self) -> Option<ReceivedNote> {
        let (passed, _room) = self.waiting.pop_front()?;
        self.taken.add((passed.files.len() + passed.lost) as u32);
        Some(passed)
    }

    /// What the peer is to be told, if it does not know it.
    pub(crate) fn owed(&self) -> Option<Count> {
        (self.told != self.taken).then_some(self.taken)
    }

    pub(crate) fn told(&mut self, count: Count) {
        self.told = count;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sender_that_keeps_to_its_credit_is_never_refused() {
        let (mut here, mut there) = (Notes::default(), Notes::default());
        (here.sent, here.taken_there) =
            (Count { notes: u32::MAX - 3, files: 7 }, Count { notes: u32::MAX - 3, files: 7 });
        let mut sent = 0;
        for round in 0..1000u32 {
            let files = round % 4;
            if here.may_send(files) {
                here.sent(files);
                there.arrive(Vec::new(), Vec::new(), files as usize).expect("within the credit");
                sent += 1;
            } else {
                there.take().expect("that is what the credit waits for");
                let taken = there.owed().expect("news");
                there.told(taken);
                assert_eq!(there.owed(), None);
                let base = Count { notes: u32::MAX - 3, files: 7 };
                let count =
                    Count { notes: base.notes.wrapping_add(taken.notes), files: base.files.wrapping_add(taken.files) };
                here.peer_took(count).expect("no more than was sent");
            }
        }
        assert!(sent > 400, "{sent}");
    }

    #[test]
    fn neither_end_can_claim_more_than_there_is() {
        let mut notes = Notes::default();
        notes.sent(2);
        assert!(notes.peer_took(Count { notes: 2, files: 0 }).is_err());
        assert!(notes.peer_took(Count { notes: 1, files: 3 }).is_err());
        assert!(notes.peer_took(Count { notes: u32::MAX, files: 0 }).is_err());
        assert!(notes.peer_took(Count { notes: 1, files: 2 }).is_ok());
        for _ in 0..MOST_NOTES {
            notes.arrive(Vec::new(), Vec::new(), 0).expect("room");
        }
        assert!(notes.arrive(Vec::new(), Vec::new(), 0).is_err());
        let mut notes = Notes::default();
        for _ in 0..MOST_FILES / 16 {
            notes.arrive(Vec::new(), Vec::new(), 16).expect("room");
        }
        assert!(notes.arrive(Vec::new(), Vec::new(), 1).is_err());
    }
}
