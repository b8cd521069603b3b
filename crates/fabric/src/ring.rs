//! Frames of control in order, over writes that have none: a ring of slots in each end's memory, which the other writes.
//!
//! Frame `n` is one write to slot `n % SLOTS`, whose immediate is `n`. Its slot is written again once its receiver has
//! returned the credit, in frames' own immediates.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::wire::{ACKS, Frame, PEER_WRITES, SLOTS, credit_number, frame_number};

/// Frames in a ring that were taken before the credit goes back.
const RETURN_AT: u32 = SLOTS as u32 / 2;

/// Frames that wait for a peer which asks for more.
const WAITING_MAX: usize = 4 * PEER_WRITES;

/// Time for which received writes wait for others, to be acknowledged with them, also where this end has answered them by
/// writes of its own, which the acknowledgement would delay; and the number that does not wait.
const OWED_FOR: Duration = Duration::from_micros(50);
const ANSWERED_FOR: Duration = Duration::from_micros(200);
const OWED_MAX: usize = 128;
/// Writes that were alone at the end of that time are followed by as many that do not wait: their sender awaits each.
const ALONE: u32 = 16;

/// Words of writes that were counted and not acknowledged yet.
#[derive(Debug, Default)]
pub(crate) struct Owed {
    words: Vec<u32>,
    since: Option<Instant>,
    /// This end has posted writes since it acknowledged last.
    answers: bool,
    /// Number of all writes that were counted, and the words of the last: the peer may miss the acknowledgement of these.
    counted: u64,
    last: VecDeque<u32>,
    /// Acknowledgements of one write each since the last one of several.
    alone: u32,
}

impl Owed {
    /// A write was counted.
    pub(crate) fn owe(&mut self, word: u32) {
        self.words.push(word);
        self.counted += 1;
        if self.last.len() == PEER_WRITES {
            self.last.pop_front();
        }
        self.last.push_back(word);
        self.since.get_or_insert_with(Instant::now);
    }

    /// The number of writes that were counted, and the words of the last.
    pub(crate) fn counted(&self) -> (u64, Vec<u32>) {
        (self.counted, self.last.iter().copied().collect())
    }

    /// This end has posted a write.
    pub(crate) fn answered(&mut self) {
        self.answers = true;
    }

    /// It is time to acknowledge them. `look`: whether to read the clock.
    pub(crate) fn is_due(&self, look: bool) -> bool {
        let is_due = |since: Instant| since.elapsed() >= self.limit();
        self.words.len() >= OWED_MAX || look && self.since.is_some_and(is_due)
    }

    fn limit(&self) -> Duration {
        match self.answers {
            true => ANSWERED_FOR,
            false if self.alone.is_multiple_of(ALONE) => OWED_FOR,
            false => Duration::ZERO,
        }
    }

    /// Queues the acknowledgements.
    ///
    /// # Errors
    /// The peer writes on and takes none of them.
    pub(crate) fn acknowledge(&mut self, outbox: &mut Outbox) -> Result<(), String> {
        if !self.words.is_empty() {
            outbox.room(0)?;
            self.alone = if self.words.len() == 1 { self.alone.wrapping_add(1) } else { 0 };
        }
        (self.since, self.answers) = (None, false);
        while !self.words.is_empty() {
            let count = self.words.len().min(ACKS);
            outbox.push(Frame::Acks(self.words.drain(..count).collect()));
        }
        Ok(())
    }
}

/// The sender's half.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    queue: VecDeque<Frame>,
    /// Number of frames posted, and of those that the peer has taken.
    posted: u32,
    taken: u32,
    /// Slots whose write the provider has not completed yet.
    busy: [bool; SLOTS],
}

impl Outbox {
    /// Queues a frame.
    pub(crate) fn push(&mut self, frame: Frame) {
        self.queue.push_back(frame);
    }

    /// Checks that there is room for an answer. `beside`: other frames that are to be queued. Each question of a peer is
    /// about a key of a write of its own that waits for the answer, and each acknowledgement is of such a write, so few can
    /// be unanswered.
    ///
    /// # Errors
    /// The peer asks on and takes none of the answers.
    pub(crate) fn room(&self, beside: usize) -> Result<(), String> {
        if self.queue.len() + beside < WAITING_MAX {
            return Ok(());
        }
        Err(format!("it takes none of {WAITING_MAX} frames, and asks for more"))
    }

    /// Frames that can be posted are waiting.
    pub(crate) fn is_ready(&self) -> bool {
        !self.queue.is_empty() && self.has_slot()
    }

    /// Frames are queued, whether they can be posted or not.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.queue.is_empty()
    }

    fn has_slot(&self) -> bool {
        self.posted.wrapping_sub(self.taken) < SLOTS as u32 && !self.busy[self.posted as usize % SLOTS]
    }

    /// The next frame and its number, if it has a slot.
    pub(crate) fn front(&self) -> Option<(&Frame, u32)> {
        self.queue.front().filter(|_| self.has_slot()).map(|frame| (frame, self.posted))
    }

    /// That frame was posted. Its slot.
    pub(crate) fn posted(&mut self) -> usize {
        let slot = self.posted as usize % SLOTS;
        self.queue.pop_front();
        self.busy[slot] = true;
        self.posted = self.posted.wrapping_add(1);
        slot
    }

    /// The provider does not read that slot any more.
    pub(crate) fn completed(&mut self, slot: usize) {
        if let Some(busy) = self.busy.get_mut(slot) {
            *busy = false;
        }
    }

    /// The number of frames that the peer has taken, by its low bits. Older statements change nothing.
    ///
    /// # Errors
    /// It has taken more than were posted.
    pub(crate) fn credit(&mut self, low: u32) -> Result<(), String> {
        let taken = credit_number(low, self.taken);
        let advance = taken.wrapping_sub(self.taken);
        if advance > u32::MAX / 2 {
            return Ok(());
        }
        if advance > self.posted.wrapping_sub(self.taken) {
            return Err(format!("it took {} frames more than there were", taken.wrapping_sub(self.posted)));
        }
        self.taken = taken;
        Ok(())
    }
}

/// The receiver's half.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    /// Number of the frame that is delivered next.
    next: u32,
    /// Those of the following ones that have arrived.
    arrived: [bool; SLOTS],
    /// The number of frames taken that was reported to the peer.
    returned: u32,
}

impl Inbox {
    /// The write of a frame is in place, by the low bits of its number. A second arrival changes nothing.
    ///
    /// # Errors
    /// The peer has no credit for it.
    pub(crate) fn arrived(&mut self, low: u32) -> Result<(), String> {
        let number = frame_number(low, self.next);
        let ahead = number.wrapping_sub(self.next);
        if ahead > u32::MAX / 2 {
            return Ok(());
        }
        if ahead >= SLOTS as u32 {
            return Err(format!("frame {number} arrived, and {} is awaited", self.next));
        }
        self.arrived[number as usize % SLOTS] = true;
        Ok(())
    }

    /// The slot of the next frame, if it is there.
    pub(crate) fn front(&self) -> Option<usize> {
        let slot = self.next as usize % SLOTS;
        self.arrived[slot].then_some(slot)
    }

    /// That frame was read.
    pub(crate) fn taken(&mut self) {
        self.arrived[self.next as usize % SLOTS] = false;
        self.next = self.next.wrapping_add(1);
    }

    /// The number of frames taken, once it is due to be reported.
    pub(crate) fn due(&self) -> Option<u32> {
        (self.next.wrapping_sub(self.returned) >= RETURN_AT).then_some(self.next)
    }

    /// That number was reported.
    pub(crate) fn told(&mut self, taken: u32) {
        self.returned = taken;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_delivered_in_order_and_once() {
        let mut inbox = Inbox::default();
        for low in [2, 0, 0, 2] {
            inbox.arrived(low).expect("within the ring");
        }
        assert_eq!(inbox.front(), Some(0));
        inbox.taken();
        assert_eq!(inbox.front(), None, "frame 1 is missing");
        inbox.arrived(0).expect("a duplicate");
        inbox.arrived(1).expect("within the ring");
        for slot in [1, 2] {
            assert_eq!(inbox.front(), Some(slot));
            inbox.taken();
        }
        assert_eq!(inbox.front(), None);
        assert!(inbox.arrived(3 + SLOTS as u32).is_err(), "no credit for it");
    }

    #[test]
    fn a_peer_that_takes_no_answers_gets_no_more() {
        let mut outbox = Outbox::default();
        for number in 0..WAITING_MAX as u64 {
            outbox.room(0).expect("room");
            outbox.push(Frame::Checked { id: number, remote: None });
        }
        assert!(outbox.room(0).is_err_and(|why| why.contains("takes none of")));
        assert!(Outbox::default().room(WAITING_MAX).is_err(), "with those that are not queued yet");
    }

    #[test]
    fn a_peer_that_writes_and_takes_no_acknowledgement_is_refused() {
        let (mut owed, mut outbox) = (Owed::default(), Outbox::default());
        assert!(!owed.is_due(true));
        let refused = (0..).find(|word| {
            owed.owe(*word);
            owed.acknowledge(&mut outbox).is_err()
        });
        assert_eq!(refused, Some(WAITING_MAX as u32), "one frame each");
        (0..OWED_MAX as u32).for_each(|word| owed.owe(word));
        assert!(owed.is_due(false));
    }

    #[test]
    fn writes_wait_for_others_unless_their_sender_awaits_each() {
        let (mut owed, mut outbox) = (Owed::default(), Outbox::default());
        for round in 0..2 {
            owed.owe(0);
            assert_eq!(owed.limit(), OWED_FOR, "round {round}: others may follow");
            owed.acknowledge(&mut outbox).expect("room");
            for word in 1..ALONE {
                owed.owe(word);
                assert_eq!(owed.limit(), Duration::ZERO, "round {round}, {word}: none has followed");
                owed.acknowledge(&mut outbox).expect("room");
            }
        }
        [0, 1].iter().for_each(|word| owed.owe(*word));
        owed.acknowledge(&mut outbox).expect("room");
        assert_eq!(owed.limit(), OWED_FOR, "several were acknowledged together");
    }

    #[test]
    fn a_slot_is_used_again_once_it_was_taken_and_completed() {
        let mut outbox = Outbox::default();
        let mut inbox = Inbox::default();
        for round in 0..5 * SLOTS as u32 {
            outbox.push(Frame::Stop(round.into()));
            let (frame, number) = outbox.front().expect("room");
            assert_eq!((frame, number), (&Frame::Stop(round.into()), round));
            let slot = outbox.posted();
            inbox.arrived(number).expect("in order");
            inbox.taken();
            if let Some(taken) = inbox.due() {
                inbox.told(taken);
                outbox.credit(taken).expect("true");
            }
            outbox.completed(slot);
        }
        for round in 0..2 * SLOTS as u32 {
            outbox.push(Frame::Stop(round.into()));
            if outbox.front().is_some() {
                let slot = outbox.posted();
                outbox.completed(slot);
            }
        }
        assert!(!outbox.is_ready(), "without credit");
        outbox.credit(5 * SLOTS as u32 + 1).expect("one was taken");
        assert!(outbox.is_ready());
        outbox.posted();
        outbox.credit(3).expect("an old statement");
        assert!(!outbox.is_ready());
        outbox.credit(6 * SLOTS as u32 + 1).expect("all were taken");
        // Frame 6 * SLOTS + 1 is in the slot after that which is not completed.
        assert!(outbox.is_ready());
        assert!(outbox.credit(9 * SLOTS as u32).is_err(), "more than there were");
    }
}
