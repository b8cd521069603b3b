//! Direct copies: the receiving end pulls, the sending end may help by pushing, and a read's owner pushes alone.
//!
//! Every end of a copy waits for the other's hands to be off the memory before it lets go of it: the receiver
//! answers the sender only when its own job has ended, and waits for the end of help that it asked for.

use super::Peer;
use crate::frame::{Bytes, Frame, Target};
use crate::peer::incoming::{InKind, InStage};
use crate::peer::outgoing::{After, Kind, Serve, Stage};
use crate::peer::sending::inline;
use crate::{DirectId, Event, Memory, Offer, Protocol, Role, Time};

/// Whose job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JobOf {
    In(u32),
    Out(u32),
}

impl Peer {
    /// Copies the peer's bytes into an incoming transfer.
    pub(super) fn start_pull(&mut self, index: u32, offer: Offer) {
        let job = DirectId(self.jobs.insert(JobOf::In(index)) as u32);
        let incoming = &mut self.ins[index as usize];
        incoming.stage = InStage::Direct;
        incoming.slot = offer.slot;
        incoming.job = Some(job);
        let (memory, len) = (incoming.memory(), incoming.len);
        self.events.push_back(Event::Direct { job, memory, role: Role::Pull, offer, len });
    }

    /// Copies a region's bytes to where the peer reads them to.
    pub(super) fn start_push(&mut self, index: u32, memory: Memory, descriptor: [u8; 24], len: u64) {
        let job = DirectId(self.jobs.insert(JobOf::Out(index)) as u32);
        self.outs[index as usize].more().job = Some(job);
        let offer = Offer { descriptor, slot: None };
        self.events.push_back(Event::Direct { job, memory, role: Role::Help, offer, len });
    }

    /// Every byte of the job has been copied, `moved` of them by this end, in `copy_ns`.
    pub fn direct_done(&mut self, now: Time, job: DirectId, _moved: u64, copy_ns: u64) {
        match self.jobs.try_remove(job.0 as usize) {
            Some(JobOf::In(index)) => {
                let Some(incoming) = self.ins.get_mut(index as usize) else { return };
                incoming.job = None;
                incoming.copy_ns = copy_ns;
                if incoming.stopping {
                    self.pull_over(index);
                } else {
                    self.complete_in(now, index, Protocol::Direct, None);
                }
            }
            Some(JobOf::Out(index)) => {
                if let Some(outgoing) = self.outs.get_mut(index as usize) {
                    outgoing.more().copy_ns = copy_ns;
                }
                self.help_over(now, index, false);
            }
            None => {}
        }
    }

    /// The job cannot be done, or was stopped: this end copies nothing of it any more.
    pub fn direct_failed(&mut self, now: Time, job: DirectId) {
        match self.jobs.try_remove(job.0 as usize) {
            Some(JobOf::In(index)) => {
                if let Some(incoming) = self.ins.get_mut(index as usize) {
                    incoming.job = None;
                    self.pull_over(index);
                }
            }
            Some(JobOf::Out(index)) => self.help_over(now, index, true),
            None => {}
        }
    }

    /// Asks the peer to push into what `descriptor` says while this end pulls; only for a job whose offer has a slot.
    pub fn direct_invite(&mut self, _now: Time, job: DirectId, descriptor: [u8; 24]) {
        let Some(&JobOf::In(index)) = self.jobs.get(job.0 as usize) else { return };
        let live = self.live();
        let Some(incoming) = self.ins.get_mut(index as usize) else { return };
        if incoming.helped || incoming.stopping || incoming.slot.is_none() || !live {
            return;
        }
        incoming.helped = true;
        let op = incoming.their;
        self.tell_with(Frame::Invite { op }, inline(Bytes::EMPTY.push(&descriptor)));
    }

    /// Our pulling is over without success.
    fn pull_over(&mut self, index: u32) {
        if self.ins[index as usize].ending.is_some() {
            self.step_ending(index);
        } else {
            // The peer stops its help before it sends the first chunk.
            self.ins[index as usize].stopping = false;
            self.consent(index);
        }
    }

    /// Our pushing is over.
    fn help_over(&mut self, now: Time, index: u32, failed: bool) {
        let Some(outgoing) = self.outs.get_mut(index as usize) else { return };
        outgoing.more().job = None;
        let after = std::mem::replace(&mut outgoing.more().after, After::Running);
        let failed = failed || after != After::Running;
        if let Some(Serve { target, .. }) = outgoing.rest().serve {
            match after {
                After::ServeFailed(why) => self.serve_failed(index, why),
                After::Finish(_) => self.close_serve(index),
                _ if outgoing.stage == Stage::Aborting => {}
                _ if failed => self.start_feed(index, target),
                _ => self.tell(Frame::Pushed { serve: index + 1, target }),
            }
            return;
        }
        self.tell(Frame::HelpEnded { op: index + 1, failed });
        match after {
            After::Finish(result) => self.close_out(now, index, result),
            After::Feed(target) => self.start_feed(index, target),
            After::Running | After::Nothing | After::ServeFailed(_) => {}
        }
    }

    /// The peer asks us to help with our operation `id`.
    pub(super) fn invited(&mut self, id: u32, descriptor: [u8; 24]) {
        let index = id.wrapping_sub(1);
        let Some(outgoing) = self.outs.get_mut(index as usize) else { return };
        let fit = matches!(outgoing.kind, Kind::Send | Kind::Write)
            && outgoing.stage == Stage::Announced
            && outgoing.rest().job.is_none();
        let Some(slot) = outgoing.rest().slot.filter(|_| fit) else {
            self.tell(Frame::HelpEnded { op: id, failed: true });
            return;
        };
        let job = DirectId(self.jobs.insert(JobOf::Out(index)) as u32);
        outgoing.more().job = Some(job);
        let (memory, len) = (Memory::Op(outgoing.op), outgoing.len);
        let offer = Offer { descriptor, slot: Some(slot) };
        self.events.push_back(Event::Direct { job, memory, role: Role::Help, offer, len });
    }

    /// The peer has taken its hands off the memory of a transfer towards us.
    pub(super) fn help_ended(&mut self, op: u32, failed: bool) {
        let super::Their::In(index) = self.their(op) else { return };
        let Some(incoming) = self.ins.get_mut(index as usize) else { return };
        if !std::mem::take(&mut incoming.helped) {
            return;
        }
        match (incoming.job, incoming.ending.is_some()) {
            (_, true) => self.step_ending(index),
            (Some(job), false) if failed && !incoming.stopping => {
                // Pieces that it claimed are not copied: start over, in chunks.
                incoming.stopping = true;
                self.events.push_back(Event::StopDirect { job });
            }
            _ => {}
        }
    }

    /// The owner has copied all of a read of ours to its place.
    pub(super) fn pushed(&mut self, now: Time, serve: u32, target: Target) -> Result<(), String> {
        let Some(kind) = self.find_in(target).map(|i| i.kind) else { return Ok(()) };
        if serve == 0 || !matches!(kind, InKind::Read { .. }) {
            return Err("pushed what was not read".to_owned());
        }
        self.ins[target.index as usize].their = serve;
        self.complete_in(now, target.index, Protocol::Direct, None);
        Ok(())
    }
}
