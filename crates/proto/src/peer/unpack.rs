//! Memory that lanes do not touch themselves: chunks land in slots and are unpacked from there, at their own pace and in
//! any order; and memory that fails.
//!
//! A chunk counts as consumed when it is unpacked, so that the window covers the slots. Its transfer is over, in
//! whatever way, when nothing is unpacked into its memory any more.

use crossrail_types::LaneId;

use super::Peer;
use crate::frame::Target;
use crate::lane::Placement;
use crate::peer::incoming::{ChunkOf, Ending, InKind};
use crate::peer::outgoing::{After, Kind};
use crate::{Failure, Landed, Memory, Time};

impl Peer {
    /// There is no slot for the chunk that the lane's last [`Peer::place`] answered to: the lane keeps its head, and
    /// `place` is called again with the same one. Meanwhile the peer is told now and then that this end lives
    /// ([`Peer::on_timeout`]), and its silence on that lane means nothing.
    pub fn unplace(&mut self, now: Time, lane: LaneId) {
        self.stir();
        let Some(at) = self.lanes.find(lane) else { return };
        if let Placement::Chunk { .. } = self.lanes[at].placing {
            self.lanes[at].placing = Placement::None;
        }
        self.lanes[at].wait(now);
    }

    /// In place of [`Peer::placed`], where a chunk's payload is complete in a slot. `None`: the transfer has no more
    /// use for it, the slot is free. `Err`: the peer broke the protocol, this is how: the lane must fail.
    pub fn landed(&mut self, now: Time, lane: LaneId) -> Result<Option<Landed>, String> {
        self.stir();
        let Some(at) = self.lanes.find(lane) else { return Ok(None) };
        let Placement::Chunk { index, serial, offset, len, again } = self.lanes[at].placing else { return Ok(None) };
        self.lanes[at].placing = Placement::None;
        let found = self.ins.get_mut(index as usize).filter(|i| i.serial == serial && i.ending.is_none());
        let Some(incoming) = found.filter(|i| !i.received.covers(offset, offset + u64::from(len))) else {
            self.lanes[at].consume();
            return Ok(None);
        };
        incoming.landed += 1;
        if !self.lanes.land(now, at) {
            let why = format!("more chunks than the window of {} holds", self.config.window);
            self.ins[index as usize].landed -= 1;
            self.answers.break_off(why.clone(), &mut self.events);
            return Err(why);
        }
        Ok(Some(Landed { lane, offset, len, target: Peer::target(index, serial), again }))
    }

    /// The chunk's bytes are in the transfer's memory, its slot is free. May come in any order, and when the transfer
    /// or the lane is long gone.
    pub fn unpacked(&mut self, now: Time, landed: Landed) {
        self.stir();
        let Some(ends) = self.take_off(&landed) else { return };
        let Landed { lane, offset, len, target, again } = landed;
        if !ends {
            let chunk = ChunkOf { target, offset, len, from: 0, again };
            if let Err(why) = self.count_chunk(now, lane, chunk) {
                self.answers.break_off(why, &mut self.events);
            }
        }
        self.settle_unpacks(now, target);
    }

    /// The chunk's bytes cannot be unpacked, and nothing is copied out of its slot any more: the transfer fails at both
    /// ends.
    pub fn unpack_failed(&mut self, now: Time, landed: Landed, why: String) {
        self.stir();
        let Some(ends) = self.take_off(&landed) else { return };
        if !ends {
            let memory = self.ins[landed.target.index as usize].memory();
            self.fail(now, memory, why);
        }
        self.settle_unpacks(now, landed.target);
    }

    /// The memory of an operation of ours, or of an access of the peer's, cannot be read or written: what is under way
    /// there fails with [`Failure::Device`], at both ends. Chunks of it that `next` has given out go as
    /// [`crate::frame::void`] says. Nothing happens where it is over.
    pub fn fail(&mut self, now: Time, memory: Memory, why: String) {
        self.stir();
        let why = Failure::Device(why);
        match memory {
            Memory::Op(op) => {
                if let Some(at) = self.queue.iter().position(|q| q.op == op) {
                    self.queue.remove(at);
                    self.events.fail(op, why, 0, 0);
                } else if !self.undeliver(memory, &why)
                    && !self.abort_outgoing(op, &why)
                    && !self.end_arriving(op, &why)
                {
                    self.end_receive(now, op, why);
                }
            }
            Memory::Region { .. } => {
                let write = self.ins.iter().find(|(_, i)| i.memory() == memory).map(|(at, _)| at as u32);
                let serve = self.outs.iter().find(|(_, o)| o.memory() == memory).map(|(at, _)| at as u32);
                match (write, serve) {
                    (Some(index), _) => self.end_in(now, index, why),
                    (None, Some(index)) => self.serve_failed(index, why),
                    (None, None) => {}
                }
            }
        }
    }

    /// The unexpected message that the engine was just told to copy out does not fit where it goes after all.
    fn undeliver(&mut self, memory: Memory, why: &Failure) -> bool {
        let Some((op, their)) = self.copied_out.filter(|(op, _)| memory == Memory::Op(*op)) else { return false };
        if !self.events.spoil_next(op, why) {
            return false;
        }
        if self.answers.withdraw_done(their) {
            self.answers.tell_failed(their, why, &mut self.events);
        }
        true
    }

    /// A chunk is out of its slot; whether its transfer is ending. `None`: the transfer is over.
    fn take_off(&mut self, landed: &Landed) -> Option<bool> {
        if let Some(at) = self.lanes.find(landed.lane) {
            self.lanes[at].take_off();
        }
        let Target { index, serial } = landed.target;
        let incoming = self.ins.get_mut(index as usize).filter(|i| i.serial == serial && i.landed > 0)?;
        incoming.landed -= 1;
        Some(incoming.ending.is_some())
    }

    /// Goes on with what waited for the last unpack.
    fn settle_unpacks(&mut self, now: Time, target: Target) {
        let index = target.index;
        let found = self.ins.get(index as usize).filter(|i| i.serial == target.serial && i.landed == 0);
        let Some(incoming) = found else { return };
        match (incoming.kind, incoming.ending.is_some(), incoming.complete) {
            (InKind::Read { out, .. }, true, _) => {
                self.ins.remove(index as usize);
                let after = |o: &super::Outgoing| match &o.rest().after {
                    After::Finish(result) => Some(result.clone()),
                    _ => None,
                };
                let over = self.outs.get(out as usize).filter(|o| o.kind == Kind::Read { target }).and_then(after);
                if let Some(result) = over {
                    self.close_out(now, out, result);
                }
            }
            (_, true, _) => self.step_ending(index),
            (_, false, Some((protocol, lane))) => self.complete_in(now, index, protocol, lane),
            (_, false, None) => {}
        }
    }

    /// Whether something is still being unpacked for that read of ours.
    pub(super) fn unpacks(&self, target: Target) -> bool {
        let found = self.ins.get(target.index as usize);
        found.is_some_and(|i| i.serial == target.serial && i.landed > 0)
    }

    /// A read of ours is over or given up while something is being unpacked for it.
    pub(super) fn leave_read(&mut self, index: u32) {
        let incoming = &mut self.ins[index as usize];
        if incoming.ending.is_none() {
            incoming.ending = Some(Ending { why: Failure::Cancelled, told: true });
            let memory = incoming.memory();
            self.events.revoke(memory);
        }
    }
}
