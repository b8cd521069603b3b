//! The direct copy of a transfer towards us: who copies, and who has been told to stop.

use super::{InKind, InStage, IncomingTransfers};
use crate::frame::{Bytes, Frame, Target};
use crate::peer::Context;
use crate::peer::accesses::{Accesses, JobOf};
use crate::peer::events::Events;
use crate::{Body, DirectId, Event, Memory, Offer, Role, Time};

/// This end pulls, or invites the peer to push, or both.
#[derive(Debug, Default)]
pub(super) struct DirectCopy {
    offer: Option<Offer>,
    /// This end's job.
    job: Option<DirectId>,
    /// The job was told to stop.
    is_stopping: bool,
    /// The peer was invited and may be copying.
    is_helped: bool,
    /// Since when the peer was to copy alone.
    lent: Option<Time>,
    /// It did.
    pushed: bool,
    copy_ns: u64,
}

/// What follows when the peer no longer copies.
pub(super) enum HelpEnded {
    /// This end's job goes on, or was told to stop.
    Waits,
    /// The peer has copied everything.
    Complete,
    /// This end has to copy by this offer.
    Pull(Offer),
}

impl DirectCopy {
    /// This end begins to pull.
    pub(super) fn pull(&mut self, offer: Offer, job: DirectId) {
        (self.offer, self.job) = (Some(offer), Some(job));
    }

    /// Tells this end's job to stop, if it runs and was not told before.
    pub(super) fn stop(&mut self, events: &mut Events) {
        if let (Some(job), false) = (self.job, self.is_stopping) {
            self.is_stopping = true;
            events.stop(job);
        }
    }

    /// This end's job is over: done in so many nanoseconds, or not. Whether all bytes are there.
    pub(super) fn pulled(&mut self, done: Option<u64>) -> bool {
        self.job = None;
        let stopped = std::mem::take(&mut self.is_stopping);
        done.inspect(|copy_ns| self.copy_ns = *copy_ns).is_some() && !stopped
    }

    /// Counts on the peer's pushing beside this end's job; false: the job stops, or the peer has no cursor.
    pub(super) fn invite(&mut self) -> bool {
        let accepted = !self.is_helped && !self.is_stopping && self.offer.is_some_and(|offer| offer.slot.is_some());
        self.is_helped |= accepted;
        accepted
    }

    /// Leaves the copy to the peer; false: it was left to it before, the job stops, or both share a cursor.
    pub(super) fn lend(&mut self, now: Time) -> bool {
        let accepted = self.lent.is_none() && !self.is_stopping && self.offer.is_some_and(|offer| offer.slot.is_none());
        if accepted {
            (self.is_helped, self.lent, self.job) = (true, Some(now), None);
        }
        accepted
    }

    /// Since when the peer may copy into memory that was left to it.
    pub(super) fn lent(&self) -> Option<Time> {
        self.lent.filter(|_| self.is_helped)
    }

    pub(super) fn is_running(&self) -> bool {
        self.job.is_some()
    }

    pub(super) fn is_helped(&self) -> bool {
        self.is_helped
    }

    /// The peer no longer copies; whether it did.
    pub(super) fn end_help(&mut self) -> bool {
        std::mem::take(&mut self.is_helped)
    }

    /// What follows that, in a transfer that goes on.
    pub(super) fn after_help(&mut self, now: Time, failed: bool, events: &mut Events) -> HelpEnded {
        if self.job.is_some() {
            if failed {
                // Pieces that it claimed are not copied: start over, in chunks.
                self.stop(events);
            }
            return HelpEnded::Waits;
        }
        match (self.lent, self.offer) {
            (Some(_), Some(offer)) if failed => HelpEnded::Pull(offer),
            (Some(since), Some(_)) => {
                (self.copy_ns, self.pushed) = (now.since(since), true);
                HelpEnded::Complete
            }
            _ => HelpEnded::Waits,
        }
    }

    /// How long the copy took, in nanoseconds, and whether the peer did it.
    pub(super) fn cost(&self) -> (u64, bool) {
        (self.copy_ns, self.pushed)
    }
}

/// Direct copies into our memory: this end pulls, or invites the peer to push; of a read, its owner pushes alone.
///
/// With a cursor that both share (the offer has a slot) an invited sender pushes while the receiver pulls. Without one
/// it pushes alone, and the receiver pulls only if that fails.
impl IncomingTransfers {
    /// Copies the peer's bytes into a transfer.
    pub(super) fn start_pull(&mut self, index: u32, offer: Offer, accesses: &mut Accesses, events: &mut Events) {
        let job = accesses.begin_job(JobOf::In(index));
        let incoming = &mut self.table[index as usize];
        incoming.stage = InStage::Direct;
        incoming.copy.pull(offer, job);
        let (memory, len) = (incoming.memory(), incoming.len);
        events.push(Event::Direct { job, memory, role: Role::Pull, offer, len });
    }

    /// Our pulling is over: done in so many nanoseconds, or not. True: all bytes are there, it is to
    /// [`IncomingTransfers::complete`].
    pub(in crate::peer) fn end_pull(&mut self, index: u32, done: Option<u64>, cx: &mut Context<'_>) -> bool {
        let Some(incoming) = self.table.get_mut(index as usize) else { return false };
        if incoming.copy.pulled(done) {
            return true;
        }
        if incoming.ending.is_some() {
            self.step_ending(index, cx);
        } else {
            // The peer stops its help before it sends the first chunk.
            self.consent(index, cx.control, cx.events);
        }
        false
    }

    /// Asks the peer to push into what `descriptor` says, while this end pulls.
    pub(in crate::peer) fn invite(&mut self, index: u32, descriptor: [u8; 24], cx: &mut Context<'_>) {
        let Some(incoming) = self.table.get_mut(index as usize) else { return };
        if !cx.control.live() || !incoming.copy.invite() {
            return;
        }
        let body = Body::from(Bytes::EMPTY.push(&descriptor));
        cx.control.push(Frame::Invite { op: incoming.their }, body, cx.events);
    }

    /// Leaves the copy to the peer, which pushes into what `descriptor` says. True: this end's job is over.
    pub(in crate::peer) fn lend(&mut self, index: u32, descriptor: [u8; 24], cx: &mut Context<'_>) -> bool {
        let Some(incoming) = self.table.get_mut(index as usize) else { return false };
        if !cx.control.live() || !incoming.copy.lend(cx.now) {
            return false;
        }
        let body = Body::from(Bytes::EMPTY.push(&descriptor));
        cx.control.push(Frame::Invite { op: incoming.their }, body, cx.events);
        true
    }

    /// Since when the peer may copy into memory that was left to it, of the last transfer of which that is so.
    pub(in crate::peer) fn lending(&self) -> Option<Time> {
        self.table.iter().filter_map(|(_, incoming)| incoming.copy.lent()).max()
    }

    /// Memory that the peer was invited to push into.
    pub(in crate::peer) fn exposed(&self) -> impl Iterator<Item = Memory> {
        self.table.iter().filter(|(_, incoming)| incoming.copy.is_helped()).map(|(_, incoming)| incoming.memory())
    }

    /// The peer no longer accesses the memory of a transfer. True: it has copied all, it is to
    /// [`IncomingTransfers::complete`].
    pub(in crate::peer) fn help_ended(&mut self, index: u32, failed: bool, cx: &mut Context<'_>) -> bool {
        let Some(incoming) = self.table.get_mut(index as usize) else { return false };
        if !incoming.copy.end_help() {
            return false;
        }
        if incoming.ending.is_some() {
            self.step_ending(index, cx);
            return false;
        }
        match incoming.copy.after_help(cx.now, failed, cx.events) {
            HelpEnded::Waits => false,
            HelpEnded::Complete => true,
            HelpEnded::Pull(offer) => {
                self.start_pull(index, offer, cx.accesses, cx.events);
                false
            }
        }
    }

    /// The owner has copied all of a read of ours, which it serves under the id `serve`, to its place. `Ok(false)`: it
    /// was over.
    pub(in crate::peer) fn pushed(&mut self, serve: u32, target: Target) -> Result<bool, String> {
        let Some(incoming) = self.find_mut(target) else { return Ok(false) };
        if serve == 0 || !matches!(incoming.kind, InKind::Read { .. }) {
            return Err("pushed what was not read".to_owned());
        }
        incoming.their = serve;
        Ok(true)
    }
}
