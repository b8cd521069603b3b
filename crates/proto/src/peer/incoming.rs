//! The life of transfers towards us: receives of long messages, the peer's writes, our reads.

use crossrail_types::{LaneId, OpId};

use super::Peer;
use super::theirs::Their;
use crate::feed::{share, sorted};
use crate::frame::{Frame, Target};
use crate::peer::open::{Open, What};
use crate::ranges::Ranges;
use crate::{
    Body, DirectId, Event, Failure, LaneShare, Memory, Offer, Placing, Protocol, Receipt, RegionFault, RegionRef,
    Regions, Time,
};

/// Most holes that a transfer may have: far more than lanes and windows can make.
const PARTS_MAX: usize = 64 << 10;

/// From this length on, the end is told at once: a frame of its own costs nothing beside that many bytes, and whoever
/// received them may be busy with them for long, while the sender waits.
const PROMPT: u64 = 256 << 10;

/// A transfer towards us.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) serial: u32,
    /// The peer's id of it; for a read, of its serving (0: not known yet).
    pub(super) their: u32,
    pub(super) kind: InKind,
    pub(super) stage: InStage,
    pub(super) len: u64,
    pub(super) started: Time,
    pub(super) received: Ranges,
    shares: Vec<LaneShare>,
    /// Chunks of it that lie in slots.
    pub(super) landed: u32,
    /// All bytes are known to be there, or in slots: how they came.
    pub(super) complete: Option<(Protocol, Option<LaneId>)>,
    /// How to copy it directly.
    pub(super) offer: Option<Offer>,
    /// Since when the peer was to copy it alone.
    pub(super) lent: Option<Time>,
    /// It did.
    pub(super) pushed: bool,
    pub(super) job: Option<DirectId>,
    /// The job was told to stop.
    pub(super) stopping: bool,
    /// The peer was invited and may be copying.
    pub(super) helped: bool,
    pub(super) ending: Option<Ending>,
    pub(super) copy_ns: u64,
    passive: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InKind {
    Receive { op: OpId, tag: u64 },
    Write { region: RegionRef, base: u64, imm: Option<u32> },
    Read { op: OpId, out: u32 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InStage {
    /// All bytes come in one message.
    Data,
    /// We are to copy.
    Direct,
    Chunks,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ending {
    pub(super) why: Failure,
    pub(super) told: bool,
}

impl Incoming {
    pub(super) fn memory(&self) -> Memory {
        match self.kind {
            InKind::Receive { op, .. } | InKind::Read { op, .. } => Memory::Op(op),
            InKind::Write { region, base, .. } => Memory::Region { region, base, passive: self.passive },
        }
    }
}

impl Peer {
    pub(super) fn begin_in(&mut self, now: Time, their: u32, kind: InKind, len: u64) -> u32 {
        let serial = self.next_serial();
        let incoming = Incoming {
            serial,
            their,
            kind,
            stage: InStage::Chunks,
            len,
            started: now,
            received: Ranges::default(),
            shares: Vec::new(),
            landed: 0,
            complete: None,
            offer: None,
            lent: None,
            pushed: false,
            job: None,
            stopping: false,
            helped: false,
            ending: None,
            copy_ns: 0,
            passive: if matches!(kind, InKind::Write { .. }) { self.passives.insert(()) as u32 } else { 0 },
        };
        self.ins.insert(incoming) as u32
    }

    /// A transfer that needs our consent: copies directly if there is an offer.
    pub(super) fn begin_transfer(&mut self, now: Time, their: u32, kind: InKind, len: u64, offer: Option<Offer>) {
        let index = self.begin_in(now, their, kind, len);
        self.theirs.set(their, Their::In(index));
        match offer {
            Some(offer) => self.start_pull(index, offer),
            None => self.consent(index),
        }
    }

    /// Where a read of ours goes.
    pub(super) fn begin_read(&mut self, now: Time, op: OpId, out: u32, len: u64) -> Target {
        let index = self.begin_in(now, 0, InKind::Read { op, out }, len);
        Peer::target(index, self.ins[index as usize].serial)
    }

    /// Asks for chunks.
    pub(super) fn consent(&mut self, index: u32) {
        let Some(incoming) = self.ins.get_mut(index as usize) else { return };
        incoming.stage = InStage::Chunks;
        let (op, target) = (incoming.their, Peer::target(index, incoming.serial));
        self.answers.tell(Frame::Consent { op, target }, Body::None, &mut self.events);
    }

    /// The live transfer that a target names.
    pub(super) fn find_in(&self, target: Target) -> Option<&Incoming> {
        self.ins.get(target.index as usize).filter(|i| i.serial == target.serial && i.ending.is_none())
    }

    pub(super) fn received(&self, target: Target) -> u64 {
        self.find_in(target).map_or(0, |i| i.received.bytes())
    }

    /// A chunk's head: where do its bytes go?
    pub(super) fn place_chunk(
        &mut self,
        now: Time,
        at: usize,
        chunk: ChunkOf,
        regions: &dyn Regions,
    ) -> Result<Placing, String> {
        let ChunkOf { target, offset, len, from, again } = chunk;
        let index = target.index;
        let Some(incoming) = self.find_in(target) else {
            self.lanes[at].consume();
            return Ok(Placing::Discard);
        };
        if incoming.stage == InStage::Direct || (incoming.stage == InStage::Data) {
            return Err("chunk of a transfer without consent".to_owned());
        }
        let end = offset.checked_add(u64::from(len)).filter(|end| *end <= incoming.len);
        let Some(end) = end else {
            return Err(format!("chunk of {len} bytes at {offset} of a transfer of {} bytes", incoming.len));
        };
        if let InKind::Write { region, .. } = incoming.kind
            && !regions.alive(region)
        {
            self.end_in(now, index, Failure::Region(RegionFault::Gone));
            self.lanes[at].consume();
            return Ok(Placing::Discard);
        }
        if incoming.received.covers(offset, end) {
            self.lanes[at].consume();
            return Ok(Placing::Discard);
        }
        let Some(incoming) = self.ins.get_mut(index as usize) else { return Ok(Placing::Discard) };
        if matches!(incoming.kind, InKind::Read { .. }) {
            if from == 0 {
                return Err("chunk of a read without its owner's id".to_owned());
            }
            incoming.their = from;
        }
        let memory = incoming.memory();
        self.lanes[at].placing = crate::lane::Placement::Chunk { index, serial: target.serial, offset, len, again };
        Ok(Placing::Memory { memory, offset, len, chunk: true })
    }

    /// A chunk's bytes are there.
    pub(super) fn placed_chunk(&mut self, now: Time, at: usize, chunk: ChunkOf) -> Result<(), String> {
        self.lanes[at].consume();
        let lane = self.lanes[at].spec.id;
        self.count_chunk(now, lane, chunk)
    }

    /// A chunk's bytes are in the transfer's memory.
    pub(super) fn count_chunk(&mut self, now: Time, lane: LaneId, chunk: ChunkOf) -> Result<(), String> {
        let ChunkOf { target, offset, len, again, .. } = chunk;
        let found = self.ins.get_mut(target.index as usize);
        let Some(incoming) = found.filter(|i| i.serial == target.serial && i.ending.is_none()) else {
            return Ok(());
        };
        let new = incoming.received.insert(offset, offset + u64::from(len));
        if incoming.received.parts() > PARTS_MAX {
            return Err(format!("a transfer in more than {PARTS_MAX} parts"));
        }
        if new > 0 {
            let share = share(&mut incoming.shares, lane);
            share.bytes += new;
            share.chunks += 1;
            share.resent += if again { new } else { 0 };
        }
        if incoming.received.bytes() == incoming.len {
            self.complete_in(now, target.index, Protocol::Chunks, None);
        }
        Ok(())
    }

    /// All bytes are there. It is over once none is unpacked any more: a chunk may have come twice.
    pub(super) fn complete_in(&mut self, now: Time, index: u32, protocol: Protocol, lane: Option<LaneId>) {
        if self.ins[index as usize].landed > 0 {
            self.ins[index as usize].complete = Some((protocol, lane));
            return;
        }
        let incoming = self.ins.remove(index as usize);
        let memory = incoming.memory();
        if self.leave_in(index, incoming.serial) {
            self.events.revoke(memory);
        }
        let lanes = sorted(incoming.shares);
        if let InKind::Read { .. } = incoming.kind {
            self.answers.owe_read_done(incoming.their, &mut self.events);
        } else {
            self.answers.owe_done(incoming.their, &mut self.events);
        }
        if incoming.len >= PROMPT {
            self.flush();
        }
        match incoming.kind {
            InKind::Receive { op, tag } => {
                let (bytes, copy_ns) = (incoming.len, incoming.copy_ns);
                let wire_ns = now.since(incoming.started).saturating_sub(copy_ns);
                let pushed = incoming.pushed;
                let receipt =
                    Receipt { bytes, protocol, lane, lanes, match_ns: 0, window_ns: 0, wire_ns, copy_ns, pushed };
                self.events.push(Event::Done { op, result: Ok(receipt), progress: bytes, tag });
                self.theirs.free(incoming.their);
            }
            InKind::Write { region, imm, .. } => {
                self.events.push(Event::Released { passive: incoming.passive, region });
                if let Some(imm) = imm {
                    self.events.arrive(region, imm);
                }
                self.theirs.free(incoming.their);
            }
            InKind::Read { out, .. } => {
                self.close_read(now, out, protocol, lanes);
            }
        }
    }

    /// A receive or a write of the peer's ends before its time: its memory is left alone from now on, as far as the
    /// lanes go, and it is over once no direct copy and no unpack touches it.
    pub(super) fn end_in(&mut self, _now: Time, index: u32, why: Failure) {
        let Some(incoming) = self.ins.get_mut(index as usize) else { return };
        if incoming.ending.is_some() {
            return;
        }
        incoming.ending = Some(Ending { why, told: false });
        let (memory, serial) = (incoming.memory(), incoming.serial);
        if let (Some(job), false) = (incoming.job, incoming.stopping) {
            incoming.stopping = true;
            self.events.stop(job);
        }
        self.leave_in(index, serial);
        self.events.revoke(memory);
        self.step_ending(index);
    }

    /// No lane places anything for that transfer any more; true if one did.
    fn leave_in(&mut self, index: u32, serial: u32) -> bool {
        let chunks = self.lanes.void_chunk_placements(index, serial);
        let of = |o: &Open| matches!(o.what, What::Data { index: i } if i == index);
        let data = self.stream.receiving().is_some_and(of);
        if data {
            self.stream.drop_open(&mut self.lanes);
        }
        chunks || data
    }

    /// Goes on with an ending, as far as direct copies and unpacks let it.
    pub(super) fn step_ending(&mut self, index: u32) {
        let Some(incoming) = self.ins.get_mut(index as usize) else { return };
        let Some(ending) = incoming.ending.as_mut() else { return };
        if incoming.job.is_some() || incoming.landed > 0 {
            return;
        }
        if !ending.told {
            ending.told = true;
            let (their, why) = (incoming.their, ending.why.clone());
            self.answers.tell_failed(their, &why, &mut self.events);
        }
        if self.ins[index as usize].helped {
            return;
        }
        let incoming = self.ins.remove(index as usize);
        let why = incoming.ending.map_or(Failure::Cancelled, |e| e.why);
        match incoming.kind {
            InKind::Receive { op, tag } => {
                let progress = incoming.received.bytes();
                self.events.fail(op, why, progress, tag);
            }
            InKind::Write { region, .. } => {
                self.events.push(Event::Released { passive: incoming.passive, region });
            }
            InKind::Read { .. } => return,
        }
        self.theirs.free(incoming.their);
    }

    /// A read of ours is over or given up: what still comes for it is discarded.
    pub(super) fn drop_read(&mut self, target: Target) {
        let Target { index, serial } = target;
        if self.ins.get(index as usize).is_none_or(|i| i.serial != serial) {
            return;
        }
        self.leave_in(index, serial);
        if self.ins[index as usize].landed > 0 {
            self.leave_read(index);
        } else {
            self.ins.remove(index as usize);
        }
    }

    /// Ends a receive whose message comes in chunks, or is copied.
    pub(super) fn end_receive(&mut self, now: Time, op: OpId, why: Failure) -> bool {
        let of = |k| matches!(k, InKind::Receive { op: o, .. } if o == op);
        let found = self.ins.iter().find(|(_, i)| of(i.kind)).map(|(i, _)| i as u32);
        if let Some(index) = found {
            self.end_in(now, index, why);
        }
        found.is_some()
    }

    pub(super) fn region_gone_incoming(&mut self, now: Time, gone: RegionRef) {
        let of = |k| matches!(k, InKind::Write { region, .. } if region == gone);
        let found: Vec<u32> = self.ins.iter().filter(|(_, i)| of(i.kind)).map(|(i, _)| i as u32).collect();
        for index in found {
            self.end_in(now, index, Failure::Region(RegionFault::Gone));
        }
    }

    pub(super) fn progress_incoming(&self, op: OpId) -> Option<(u64, u64)> {
        let of = |k| matches!(k, InKind::Receive { op: o, .. } if o == op);
        self.ins.iter().find(|(_, i)| of(i.kind)).map(|(_, i)| (i.received.bytes(), i.len))
    }
}

/// A chunk's head.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChunkOf {
    pub(super) target: Target,
    pub(super) offset: u64,
    pub(super) len: u32,
    pub(super) from: u32,
    pub(super) again: bool,
}
