//! What the peer permits this end to have in flight, and the life of a counted message: sent, confirmed by the count,
//! or answered by name.

use crossrail_types::{LaneId, OpId};

use super::control_queue::ControlQueue;
use super::events::Events;
use super::ledger::{Counted, CountedStage, Unconfirmed};
use crate::{Config, Failure, Memory, Short, Time};

/// The peer's credit for operations of ours, and the messages of which no more is kept than their credit and a place
/// in the ledger.
///
/// Whoever begins an operation takes credit for it and gives it back at its end: [`Peer`](super::Peer) and
/// [`OutgoingOps`](super::outgoing::OutgoingOps) for the operations that are in a table, this type itself for counted
/// messages. What the peer says of a counted message is checked here.
#[derive(Debug)]
pub(super) struct Credit {
    /// Operations of ours in flight, and their bytes that went with first frames.
    active: u32,
    eager_bytes: u64,
    most: u32,
    most_bytes: u64,
    unconfirmed: Unconfirmed,
}

impl Credit {
    pub(super) fn new(config: &Config) -> Credit {
        let (most, most_bytes) = (config.message_credit, config.eager_credit);
        Credit { active: 0, eager_bytes: 0, most, most_bytes, unconfirmed: Unconfirmed::new(most) }
    }

    /// Whether nothing of ours is in flight.
    pub(super) fn is_unused(&self) -> bool {
        self.active == 0
    }

    /// Whether one more operation may begin.
    #[inline]
    pub(super) fn permits_one(&self) -> bool {
        self.active < self.most
    }

    /// Whether so many more bytes may go with a first frame.
    #[inline]
    pub(super) fn permits_bytes(&self, len: u64) -> bool {
        self.eager_bytes + len <= self.most_bytes
    }

    /// The credit permits a message of `len` bytes with its first frame, which carries at most `most`.
    #[inline]
    pub(super) fn permits(&self, len: u64, most: u64) -> bool {
        self.permits_one() && len <= most && self.permits_bytes(len)
    }

    /// Outstanding bytes of eager messages and of messages sent without consent.
    #[inline]
    pub(super) fn bytes(&self) -> u64 {
        self.eager_bytes
    }

    /// An operation begins; `eager`: its bytes that go with its first frame.
    #[inline(always)]
    pub(super) fn take(&mut self, eager: u64) {
        self.active += 1;
        self.eager_bytes += eager;
    }

    /// It is over.
    #[inline(always)]
    pub(super) fn give_back(&mut self, eager: u64) {
        self.active -= 1;
        self.eager_bytes -= eager;
    }

    /// Whether an id on the wire is that of a counted message.
    #[inline]
    pub(super) fn counts(&self, id: u32) -> bool {
        self.unconfirmed.place_of(id).is_some()
    }

    /// Bytes moved and bytes in all, of a counted message.
    pub(super) fn progress(&self, op: OpId) -> Option<(u64, u64)> {
        self.unconfirmed.find(op).map(|counted| (0, counted.len))
    }

    /// Whether no more messages may be counted.
    #[inline]
    pub(super) fn is_count_full(&self) -> bool {
        self.unconfirmed.is_full()
    }

    /// Whether messages of ours wait to be confirmed by the peer's count.
    #[inline]
    pub(super) fn awaits_count(&self) -> bool {
        self.unconfirmed.waits()
    }

    /// Whether `count` was published after the last one.
    #[inline]
    pub(super) fn is_ahead(&self, count: u32) -> bool {
        self.unconfirmed.is_ahead(count)
    }

    /// What is wrong with a count that confirms more than were sent.
    #[cold]
    pub(super) fn too_many(&self, count: u32) -> String {
        self.unconfirmed.too_many(count)
    }

    /// A message goes out on a lane that loses nothing; credit was checked. Its id on the wire.
    #[inline(always)]
    pub(super) fn count_out(&mut self, op: OpId, len: u64, started: Time) -> u32 {
        self.take(len);
        let place = self.unconfirmed.push(op, len, started);
        self.unconfirmed.id(place)
    }

    /// The peer has delivered `count` of our counted messages. `lane`: the one that carries them. `Err`: the peer broke
    /// the protocol.
    #[inline]
    pub(super) fn confirmed(
        &mut self,
        now: Time,
        count: u32,
        lane: Option<LaneId>,
        events: &mut Events,
    ) -> Result<(), String> {
        let Some(new) = self.unconfirmed.newly_confirmed(count) else {
            return Err(self.unconfirmed.too_many(count));
        };
        for _ in 0..new {
            if let Some(short) = self.pass_oldest(now, lane) {
                events.end_short(short);
            }
        }
        Ok(())
    }

    /// How many messages `count` confirms that were not confirmed before. `None`: more than were sent.
    #[inline]
    pub(super) fn newly_confirmed(&self, count: u32) -> Option<u32> {
        self.unconfirmed.newly_confirmed(count)
    }

    /// The count has passed the oldest message: its operation, length and start. `None`: [`Credit::pass_oldest`] has to
    /// look.
    #[inline(always)]
    pub(super) fn pass_sent(&mut self) -> Option<(OpId, u64, Time)> {
        let Counted { op, len, started, .. } = *self.unconfirmed.pop_sent()?;
        self.give_back(len);
        Some((op, len, started))
    }

    /// The count has passed the oldest message. `None`: it was answered before.
    pub(super) fn pass_oldest(&mut self, now: Time, lane: Option<LaneId>) -> Option<Short> {
        let counted = self.unconfirmed.pop().filter(|counted| counted.stage != CountedStage::Answered)?;
        // One that was to be aborted is delivered all the same.
        Some(self.close_counted(now, &counted, lane))
    }

    fn close_counted(&mut self, now: Time, counted: &Counted, lane: Option<LaneId>) -> Short {
        let Counted { op, len, started, stage } = *counted;
        self.give_back(len);
        if stage == CountedStage::Aborting {
            self.unconfirmed.take_fault(op);
        }
        Short { op, tag: 0, bytes: len, wire_ns: now.since(started), lane }
    }

    /// The peer says by name that it has our counted message `id`.
    pub(super) fn finished(
        &mut self,
        now: Time,
        id: u32,
        lane: Option<LaneId>,
        events: &mut Events,
    ) -> Result<(), String> {
        let Some(counted) = self.answer(id) else {
            return Err(format!("operation {id} finished that is not in flight"));
        };
        events.end_short(self.close_counted(now, &counted, lane));
        Ok(())
    }

    /// The peer says that our counted message `id` has failed.
    pub(super) fn failed(&mut self, id: u32, theirs: Failure, events: &mut Events) -> Result<(), String> {
        let Some(counted) = self.answer(id) else {
            return Err(format!("operation {id} failed that is not in flight"));
        };
        let why = match (self.unconfirmed.take_fault(counted.op), theirs) {
            (Some(own), Failure::Device(_) | Failure::Cancelled) => own,
            (_, theirs) => theirs,
        };
        self.fail(&counted, why, events);
        Ok(())
    }

    /// The message with that id, which is answered with this.
    fn answer(&mut self, id: u32) -> Option<Counted> {
        let place = self.unconfirmed.place_of(id)?;
        let counted = self.unconfirmed.at(place)?;
        let known = *counted;
        counted.stage = CountedStage::Answered;
        Some(known)
    }

    fn fail(&mut self, counted: &Counted, why: Failure, events: &mut Events) {
        let Counted { op, len, .. } = *counted;
        self.give_back(len);
        events.revoke(Memory::Op(op));
        events.fail(op, why, 0, 0);
    }

    /// Starts to end a counted message before its time; false: `op` is none.
    pub(super) fn abort(&mut self, op: OpId, why: &Failure, control: &mut ControlQueue, events: &mut Events) -> bool {
        let Some((place, counted)) = self.unconfirmed.iter().find(|(_, counted)| counted.op == op) else {
            return false;
        };
        if std::mem::replace(&mut counted.stage, CountedStage::Aborting) == CountedStage::Aborting {
            return true;
        }
        if matches!(why, Failure::Device(_) | Failure::Withdrawn) {
            self.unconfirmed.blame(op, why.clone());
        }
        control.push_abort(self.unconfirmed.id(place), why, events);
        true
    }

    /// Fails all of them: nobody answers any more.
    pub(super) fn fail_all(&mut self, why: &Failure, events: &mut Events) {
        let all: Vec<Counted> = self.unconfirmed.iter().map(|(_, counted)| *counted).collect();
        self.unconfirmed.clear();
        for counted in all {
            self.fail(&counted, why.clone(), events);
        }
    }
}
