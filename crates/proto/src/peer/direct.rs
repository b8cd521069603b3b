//! Direct copies: the receiving end pulls, or invites the sending end to push; a read's owner pushes alone.
//!
//! With a cursor that both share (the offer has a slot) an invited sender pushes while the receiver pulls. Without one
//! it pushes alone, and the receiver pulls only if that fails.
//!
//! Every end of a copy waits for the other's hands to be off the memory before it lets go of it: the receiver
//! answers the sender only when its own job has ended, and waits for the end of help that it asked for.

use super::Peer;
use crate::frame::{Bytes, Frame, Target};
use crate::peer::incoming::{InKind, InStage};
use crate::peer::outgoing::{After, Kind, Serve, Stage};
use crate::{Body, DirectId, Event, Memory, Offer, Protocol, Role, Time};

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
        incoming.offer = Some(offer);
        incoming.job = Some(job);
        let (memory, len) = (incoming.memory(), incoming.len);
        self.events.push(Event::Direct { job, memory, role: Role::Pull, offer, len });
    }

    /// Copies a region's bytes to where the peer reads them to.
    pub(super) fn start_push(&mut self, index: u32, memory: Memory, descriptor: [u8; 24], len: u64) {
        let job = DirectId(self.jobs.insert(JobOf::Out(index)) as u32);
        self.outs[index as usize].more().job = Some(job);
        let offer = Offer { descriptor, slot: None };
        self.events.push(Event::Direct { job, memory, role: Role::Help, offer, len });
    }

    /// Every byte of the job has been copied, `moved` of them by this end, in `copy_ns`.
    pub fn direct_done(&mut self, now: Time, job: DirectId, _moved: u64, copy_ns: u64) {
        self.stir();
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
                    let more = outgoing.more();
                    more.copy_ns = copy_ns;
                    more.pushed = more.slot.is_none();
                }
                self.help_over(now, index, false);
            }
            None => {}
        }
    }

    /// The job cannot be done, or was stopped: this end copies nothing of it any more.
    pub fn direct_failed(&mut self, now: Time, job: DirectId) {
        self.stir();
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
        self.stir();
        let Some(&JobOf::In(index)) = self.jobs.get(job.0 as usize) else { return };
        let live = self.answers.live();
        let Some(incoming) = self.ins.get_mut(index as usize) else { return };
        if incoming.helped || incoming.stopping || incoming.offer.is_none_or(|o| o.slot.is_none()) || !live {
            return;
        }
        incoming.helped = true;
        let op = incoming.their;
        self.answers.tell(Frame::Invite { op }, Body::from(Bytes::EMPTY.push(&descriptor)), &mut self.events);
    }

    /// Leaves a job of [`Role::Pull`], whose offer has no slot, to the peer, which pushes into what `descriptor` says.
    /// True: the job is over here, as after [`Peer::direct_done`]; that memory is written until the transfer is over. If
    /// the peer can't, [`Event::Direct`] asks this end once more. False, as then: this end has to copy.
    pub fn direct_lend(&mut self, now: Time, job: DirectId, descriptor: [u8; 24]) -> bool {
        self.stir();
        let Some(&JobOf::In(index)) = self.jobs.get(job.0 as usize) else { return false };
        let live = self.answers.live();
        let Some(incoming) = self.ins.get_mut(index as usize) else { return false };
        if incoming.lent.is_some() || incoming.stopping || incoming.offer.is_none_or(|o| o.slot.is_some()) || !live {
            return false;
        }
        incoming.helped = true;
        incoming.lent = Some(now);
        incoming.job = None;
        self.jobs.remove(job.0 as usize);
        let op = incoming.their;
        self.answers.tell(Frame::Invite { op }, Body::from(Bytes::EMPTY.push(&descriptor)), &mut self.events);
        true
    }

    /// Since when the peer may copy into memory of this end, of the transfers that were left to it and the reads that it
    /// serves: of the last of them.
    pub fn lending(&self) -> Option<Time> {
        let lent = self.ins.iter().filter(|(_, incoming)| incoming.helped).filter_map(|(_, incoming)| incoming.lent);
        let reads = self.outs.iter().filter(|(_, o)| matches!(o.kind, Kind::Read { .. }) && o.rest().offered);
        lent.chain(reads.map(|(_, o)| o.rest().announced)).max()
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
                _ => self.answers.tell(Frame::Pushed { serve: index + 1, target }, Body::None, &mut self.events),
            }
            return;
        }
        self.answers.tell(Frame::HelpEnded { op: index + 1, failed }, Body::None, &mut self.events);
        match after {
            After::Finish(result) => self.close_out(now, index, result),
            After::Feed(target) => self.start_feed(index, target),
            After::Running | After::Nothing | After::ServeFailed(_) => {}
        }
    }

    /// The peer asks us to help with our operation `id`, or to copy it alone.
    pub(super) fn invited(&mut self, id: u32, descriptor: [u8; 24]) {
        let index = id.wrapping_sub(1);
        let Some(outgoing) = self.outs.get_mut(index as usize) else { return };
        let fit = matches!(outgoing.kind, Kind::Send | Kind::Write)
            && outgoing.stage == Stage::Announced
            && outgoing.rest().job.is_none();
        if !fit || !outgoing.rest().offered {
            self.answers.tell(Frame::HelpEnded { op: id, failed: true }, Body::None, &mut self.events);
            return;
        }
        let slot = outgoing.rest().slot;
        let job = DirectId(self.jobs.insert(JobOf::Out(index)) as u32);
        outgoing.more().job = Some(job);
        let (memory, len) = (Memory::Op(outgoing.op), outgoing.len);
        let offer = Offer { descriptor, slot };
        self.events.push(Event::Direct { job, memory, role: Role::Help, offer, len });
    }

    /// The peer has taken its hands off the memory of a transfer towards us.
    pub(super) fn help_ended(&mut self, now: Time, op: u32, failed: bool) {
        let crate::peer::theirs::Their::In(index) = self.theirs.at(op) else { return };
        let Some(incoming) = self.ins.get_mut(index as usize) else { return };
        if !std::mem::take(&mut incoming.helped) {
            return;
        }
        match (incoming.job, incoming.ending.is_some()) {
            (_, true) => self.step_ending(index),
            (Some(job), false) if failed && !incoming.stopping => {
                // Pieces that it claimed are not copied: start over, in chunks.
                incoming.stopping = true;
                self.events.stop(job);
            }
            (Some(_), false) => {}
            (None, false) => self.loan_over(now, index, failed),
        }
    }

    /// What the peer was left to do is done, or this end has to do it.
    fn loan_over(&mut self, now: Time, index: u32, failed: bool) {
        let incoming = &mut self.ins[index as usize];
        let (Some(since), Some(offer), InStage::Direct) = (incoming.lent, incoming.offer, incoming.stage) else {
            return;
        };
        if failed {
            self.start_pull(index, offer);
        } else {
            incoming.copy_ns = now.since(since);
            incoming.pushed = true;
            self.complete_in(now, index, Protocol::Direct, None);
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
