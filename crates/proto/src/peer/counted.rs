//! The life of a counted message of ours: sent, confirmed by the count, or answered by name.

use crossrail_types::{LaneId, OpId};

use super::Peer;
use crate::peer::ledger::{Counted, CountedStage};
use crate::{Failure, Memory, Short, Time};

/// The condition of a connection in which a short message needs nothing but its own words: one lane that loses nothing
/// and [counts](crate::LaneSpec::counts) carries the messages, and nothing is queued, owed, held back or ending.
///
/// It is found out once, after a message that went the long way ([`Peer::calm_down`]), and holds until any other method
/// of [`Peer`] may have changed it: each of those calls [`Peer::stir`] first.
#[derive(Debug)]
pub(super) struct Calm {
    /// The lane's id; [`NO_LANE`] while the connection is not calm. One word, so that it is found out by one comparison.
    lane: u64,
    /// Longest message that goes with its first frame.
    pub(super) send_max: u64,
    /// Longest message that is placed whole.
    pub(super) place_max: u32,
}

const NO_LANE: u64 = u64::MAX;

impl Default for Calm {
    fn default() -> Calm {
        Calm { lane: NO_LANE, send_max: 0, place_max: 0 }
    }
}

impl Peer {
    /// Whether short messages on that lane need no further look at the connection.
    #[inline]
    pub(super) fn is_calm(&self, lane: LaneId) -> bool {
        self.calm.lane == u64::from(lane.0)
    }

    /// Something may change that [`Calm`] promises.
    #[inline]
    pub(super) fn stir(&mut self) {
        self.calm.lane = NO_LANE;
    }

    /// Finds out whether the connection is [`Calm`].
    pub(super) fn calm_down(&mut self, at: usize) {
        let lane = &self.lanes[at];
        if !lane.spec.counts {
            return;
        }
        let quiet = self.is_quiet(at) && lane.is_unoccupied() && !self.stream.is_receiving() && self.theirs.is_idle();
        let settled = self.answers.is_calm() && !self.delivered.withholds() && self.stream.is_empty();
        let open = self.answers.talks() && self.stream.open() && self.stream.reliable();
        let counts = lane.spec.reliable && self.stream.is_on(lane.spec.id);
        if quiet && settled && open && counts {
            let send_max = u64::from(lane.spec.eager_max.min(lane.spec.max_payload));
            self.calm = Calm { lane: u64::from(lane.spec.id.0), send_max, place_max: lane.spec.whole_max };
        }
    }

    /// The peer has delivered `count` of our counted messages.
    #[inline]
    pub(super) fn confirmed(&mut self, now: Time, count: u32) -> Result<(), String> {
        let Some(news) = self.unconfirmed.news(count) else { return Err(self.unconfirmed.too_many(count)) };
        for _ in 0..news {
            if let Some(short) = self.pass_oldest(now) {
                self.events.end_short(short);
            }
        }
        Ok(())
    }

    /// [`Peer::confirmed`], which hands the ends of the messages to `ended` where no event is to be taken before them.
    /// False: the peer cannot have delivered so many.
    #[inline(always)]
    pub(super) fn confirm(&mut self, now: Time, count: u32, ended: &mut impl FnMut(Short)) -> bool {
        let Some(news) = self.unconfirmed.news(count) else { return false };
        for _ in 0..news {
            if self.has_events() {
                self.pass_behind_events(now);
                continue;
            }
            let short = match self.unconfirmed.pop_sent() {
                Some(counted) => {
                    let Counted { op, len, started, .. } = *counted;
                    self.own_active -= 1;
                    self.eager_bytes -= len;
                    Short { op, tag: 0, bytes: len, wire_ns: now.since(started), lane: self.stream.lane() }
                }
                None => match self.pass_oldest(now) {
                    Some(short) => short,
                    None => continue,
                },
            };
            ended(short);
        }
        true
    }

    /// The count has passed the oldest message, whose end is told after the events before it.
    #[cold]
    fn pass_behind_events(&mut self, now: Time) {
        if let Some(short) = self.pass_oldest(now) {
            self.events.end_short(short);
        }
    }

    /// The count has passed the oldest message. `None`: it was answered before.
    #[inline(never)]
    fn pass_oldest(&mut self, now: Time) -> Option<Short> {
        let counted = self.unconfirmed.pop().filter(|counted| counted.stage != CountedStage::Answered)?;
        // One that was to be aborted is delivered all the same.
        Some(self.close_counted(now, &counted))
    }

    fn close_counted(&mut self, now: Time, counted: &Counted) -> Short {
        let Counted { op, len, started, stage } = *counted;
        self.own_active -= 1;
        self.eager_bytes -= len;
        if stage == CountedStage::Aborting {
            self.unconfirmed.take_fault(op);
        }
        Short { op, tag: 0, bytes: len, wire_ns: now.since(started), lane: self.stream.lane() }
    }

    /// The peer says by name that it has our counted message `id`.
    pub(super) fn counted_finished(&mut self, now: Time, id: u32) -> Result<(), String> {
        let Some(counted) = self.answer(id) else {
            return Err(format!("operation {id} finished that is not under way"));
        };
        let short = self.close_counted(now, &counted);
        self.events.end_short(short);
        Ok(())
    }

    /// The peer says that our counted message `id` has failed.
    pub(super) fn counted_failed(&mut self, id: u32, theirs: Failure) -> Result<(), String> {
        let Some(counted) = self.answer(id) else {
            return Err(format!("operation {id} failed that is not under way"));
        };
        let why = match (self.unconfirmed.take_fault(counted.op), theirs) {
            (Some(own), Failure::Device(_) | Failure::Cancelled) => own,
            (_, theirs) => theirs,
        };
        self.fail_counted(&counted, why);
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

    fn fail_counted(&mut self, counted: &Counted, why: Failure) {
        let Counted { op, len, .. } = *counted;
        self.own_active -= 1;
        self.eager_bytes -= len;
        self.events.revoke(Memory::Op(op));
        self.events.fail(op, why, 0, 0);
    }

    /// Starts to end a counted message before its time; false: `op` is none.
    pub(super) fn abort_counted(&mut self, op: OpId, why: &Failure) -> bool {
        let Some((place, counted)) = self.unconfirmed.iter().find(|(_, counted)| counted.op == op) else {
            return false;
        };
        if std::mem::replace(&mut counted.stage, CountedStage::Aborting) == CountedStage::Aborting {
            return true;
        }
        if matches!(why, Failure::Device(_)) {
            self.unconfirmed.blame(op, why.clone());
        }
        let op = self.unconfirmed.id(place);
        self.answers.tell_abort(op, why, &mut self.events);
        true
    }

    /// Bytes moved and bytes in all, of a counted message.
    pub(super) fn progress_counted(&self, op: OpId) -> Option<(u64, u64)> {
        self.unconfirmed.find(op).map(|counted| (0, counted.len))
    }

    /// Fails all of them: nobody answers any more.
    pub(super) fn fail_all_counted(&mut self, why: &Failure) {
        let all: Vec<Counted> = self.unconfirmed.iter().map(|(_, counted)| *counted).collect();
        self.unconfirmed.clear();
        for counted in all {
            self.fail_counted(&counted, why.clone());
        }
    }
}
