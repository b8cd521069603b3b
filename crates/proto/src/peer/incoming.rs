//! Transfers towards us: receives of long messages, the peer's writes, our reads.

mod copy;

use std::collections::HashMap;

use crossrail_types::{LaneId, OpId};
use slab::Slab;

use super::Context;
use super::accesses::Accesses;
use super::control_queue::ControlQueue;
use super::events::Events;
use super::lanes::Lanes;
use super::open::{Open, What};
use super::peer_ops::PeerOp;
use super::stream::Stream;
use crate::feed::{share, sorted};
use crate::frame::{Frame, Target};
use crate::lane::{Lane, Placement};
use crate::ranges::Ranges;
use crate::{Body, Event, Failure, LaneShare, Memory, Offer, Placing, Protocol, Receipt, RegionRef, Regions, Time};
use copy::DirectCopy;

/// Most holes that a transfer may have: far more than lanes and windows can make.
const PARTS_MAX: usize = 64 << 10;

/// From this length on, completion is reported at once: its own frame is cheap compared with the transfer, and the
/// receiver may process the data for long before it sends anything that could carry the report.
const PROMPT: u64 = 256 << 10;

/// A transfer towards us.
#[derive(Debug)]
struct Incoming {
    serial: u32,
    /// The peer's id of it; for a read, of its serving (0: not known yet).
    their: u32,
    kind: InKind,
    stage: InStage,
    len: u64,
    started: Time,
    received: Ranges,
    shares: Vec<LaneShare>,
    /// Chunks of it that lie in slots.
    landed: u32,
    /// All bytes are known to be there, or in slots: how they came.
    complete: Option<(Protocol, Option<LaneId>)>,
    copy: DirectCopy,
    ending: Option<Ending>,
    passive: u32,
    /// The number of its announcement, if its bytes arrive unasked.
    number: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InKind {
    Receive { op: OpId, tag: u64 },
    Write { region: RegionRef, base: u64, imm: Option<u32> },
    Read { op: OpId, out: u32 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InStage {
    /// All bytes come in one message.
    Data,
    /// We are to copy.
    Direct,
    Chunks,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Ending {
    why: Failure,
    told: bool,
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

/// Outcome of [`IncomingTransfers::complete`].
pub(super) enum Completed {
    /// Bytes are still being unpacked.
    Waits,
    /// It is over. `prompt`: the peer should hear of it at once.
    Over { prompt: bool },
    /// The same of a read: that operation of ours is over, too.
    Read { out: u32, lanes: Vec<LaneShare>, prompt: bool },
}

/// What waited for the last unpack of a transfer.
pub(super) enum Settled {
    Nothing,
    /// That read of ours, which was over, or given up.
    Read {
        out: u32,
    },
    /// All bytes are there: [`IncomingTransfers::complete`].
    Complete {
        protocol: Protocol,
        lane: Option<LaneId>,
    },
}

impl Incoming {
    fn memory(&self) -> Memory {
        match self.kind {
            InKind::Receive { op, .. } | InKind::Read { op, .. } => Memory::Op(op),
            InKind::Write { region, base, .. } => Memory::Region { region, base, passive: self.passive },
        }
    }

    fn covers(&self, offset: u64, len: u32) -> bool {
        self.received.covers(offset, offset + u64::from(len))
    }
}

/// The table of transfers towards us, from the frame that begins one to the event that ends it.
///
/// An entry stays until no lane, no direct copy of either end and no unpack touches its memory: the peer gets its reply
/// only when this end's own job has ended, and a push that it was invited to is waited for. Ends are final: what
/// arrives for a transfer that is ending or over is discarded, by its serial. Chunks are validated here, before a byte
/// of them is placed. [`Peer`](super::Peer) asks where bytes go and reports when they are placed; where a read
/// completes or is abandoned, it ends the matching operation of ours ([`OutgoingOps`](super::outgoing::OutgoingOps)).
#[derive(Debug, Default)]
pub(super) struct IncomingTransfers {
    table: Slab<Incoming>,
    serial: u32,
    /// Messages that arrive unasked: their transfers, by the number of the announcement.
    unasked: HashMap<u32, u32>,
}

impl IncomingTransfers {
    pub(super) fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// A transfer begins; its index.
    fn begin(&mut self, now: Time, their: u32, kind: InKind, len: u64, accesses: &mut Accesses) -> u32 {
        self.serial = self.serial.wrapping_add(1);
        let incoming = Incoming {
            serial: self.serial,
            their,
            kind,
            stage: InStage::Chunks,
            len,
            started: now,
            received: Ranges::default(),
            shares: Vec::new(),
            landed: 0,
            complete: None,
            copy: DirectCopy::default(),
            ending: None,
            passive: if matches!(kind, InKind::Write { .. }) { accesses.begin() } else { 0 },
            number: None,
        };
        self.table.insert(incoming) as u32
    }

    /// A transfer that needs our consent: copies directly if there is an offer.
    pub(super) fn begin_transfer(
        &mut self,
        their: u32,
        kind: InKind,
        len: u64,
        offer: Option<Offer>,
        cx: &mut Context<'_>,
    ) {
        let index = self.begin(cx.now, their, kind, len, cx.accesses);
        cx.peer_ops.set(their, PeerOp::In(index));
        match offer {
            Some(offer) => self.start_pull(index, offer, cx.accesses, cx.events),
            None => self.consent(index, cx.control, cx.events),
        }
    }

    /// A receive whose message arrives unasked, under that number.
    pub(super) fn begin_unasked(&mut self, their: u32, kind: InKind, len: u64, number: u32, cx: &mut Context<'_>) {
        let index = self.begin(cx.now, their, kind, len, cx.accesses);
        self.table[index as usize].number = Some(number);
        self.unasked.insert(number, index);
        cx.peer_ops.set(their, PeerOp::In(index));
    }

    /// Target of the unasked message `number`, if a receive has matched its announcement.
    pub(super) fn unasked(&self, number: u32) -> Option<Target> {
        let index = *self.unasked.get(&number)?;
        self.table.get(index as usize).map(|incoming| Target { index, serial: incoming.serial })
    }

    fn remove(&mut self, index: u32) -> Incoming {
        let incoming = self.table.remove(index as usize);
        if let Some(number) = incoming.number {
            self.unasked.remove(&number);
        }
        incoming
    }

    /// A write whose bytes come in the next frame, or in the one that begins it. Its index.
    pub(super) fn begin_data(&mut self, their: u32, kind: InKind, len: u64, cx: &mut Context<'_>) -> u32 {
        let index = self.begin(cx.now, their, kind, len, cx.accesses);
        self.table[index as usize].stage = InStage::Data;
        cx.peer_ops.set(their, PeerOp::In(index));
        index
    }

    /// Where a read of ours goes. `out`: its index among our operations.
    pub(super) fn begin_read(&mut self, now: Time, op: OpId, out: u32, len: u64, accesses: &mut Accesses) -> Target {
        let index = self.begin(now, 0, InKind::Read { op, out }, len, accesses);
        Target { index, serial: self.serial }
    }

    /// Asks for chunks.
    fn consent(&mut self, index: u32, control: &mut ControlQueue, events: &mut Events) {
        let Some(incoming) = self.table.get_mut(index as usize) else { return };
        incoming.stage = InStage::Chunks;
        let (op, target) = (incoming.their, Target { index, serial: incoming.serial });
        control.push(Frame::Consent { op, target }, Body::None, events);
    }

    /// The transfer that a target names, if it is not ending.
    fn find(&self, target: Target) -> Option<&Incoming> {
        self.table.get(target.index as usize).filter(|i| i.serial == target.serial && i.ending.is_none())
    }

    fn find_mut(&mut self, target: Target) -> Option<&mut Incoming> {
        self.table.get_mut(target.index as usize).filter(|i| i.serial == target.serial && i.ending.is_none())
    }

    pub(super) fn memory(&self, index: u32) -> Option<Memory> {
        self.table.get(index as usize).map(Incoming::memory)
    }

    /// Bytes received so far.
    pub(super) fn received(&self, target: Target) -> u64 {
        self.find(target).map_or(0, |i| i.received.bytes())
    }

    /// The `len` bytes of the write at `index` come in. `Ok(false)`: its region is gone, it must
    /// [`IncomingTransfers::end`].
    pub(super) fn place_data(&self, index: u32, len: u32, regions: &dyn Regions) -> Result<bool, String> {
        let Some(incoming) = self.table.get(index as usize) else { return Ok(false) };
        if incoming.stage != InStage::Data || incoming.len != u64::from(len) {
            return Err(format!("write data of {len} bytes does not fit"));
        }
        Ok(!matches!(incoming.kind, InKind::Write { region, .. } if !regions.alive(region)))
    }

    /// All bytes of a read of ours come in, which the peer serves under the id `serve`. `Ok(false)`: it is over.
    pub(super) fn place_read(&mut self, target: Target, serve: u32, len: u32) -> Result<bool, String> {
        if serve == 0 {
            return Err("data of a read without its owner's id".to_owned());
        }
        let Some(incoming) = self.find_mut(target) else { return Ok(false) };
        if !matches!(incoming.kind, InKind::Read { .. }) || incoming.len != u64::from(len) {
            return Err(format!("read data of {len} bytes does not fit"));
        }
        incoming.their = serve;
        Ok(true)
    }

    /// A chunk's head has come in on `lane`: where do its bytes go? `Ok(None)`: nowhere, and the transfer must
    /// [`IncomingTransfers::end`]: its region is gone.
    pub(super) fn place_chunk(
        &mut self,
        lane: &mut Lane,
        chunk: ChunkOf,
        regions: &dyn Regions,
    ) -> Result<Option<Placing>, String> {
        let ChunkOf { target, offset, len, from, again } = chunk;
        let Some(incoming) = self.find_mut(target) else {
            lane.consume();
            return Ok(Some(Placing::Discard));
        };
        if incoming.stage == InStage::Direct || (incoming.stage == InStage::Data) {
            return Err("chunk of a transfer without consent".to_owned());
        }
        let end = offset.checked_add(u64::from(len)).filter(|end| *end <= incoming.len);
        let Some(end) = end else {
            return Err(format!("chunk of {len} bytes at {offset} of a transfer of {} bytes", incoming.len));
        };
        if matches!(incoming.kind, InKind::Write { region, .. } if !regions.alive(region)) {
            lane.consume();
            return Ok(None);
        }
        if incoming.received.covers(offset, end) {
            lane.consume();
            return Ok(Some(Placing::Discard));
        }
        if matches!(incoming.kind, InKind::Read { .. }) {
            if from == 0 {
                return Err("chunk of a read without its owner's id".to_owned());
            }
            incoming.their = from;
        }
        lane.placing = Placement::Chunk { index: target.index, serial: target.serial, offset, len, again };
        Ok(Some(Placing::Memory { memory: incoming.memory(), offset, len, chunk: true }))
    }

    /// A chunk's bytes are in the transfer's memory. `Ok(true)`: all are, it is to [`IncomingTransfers::complete`].
    pub(super) fn count_chunk(&mut self, lane: LaneId, chunk: ChunkOf) -> Result<bool, String> {
        let ChunkOf { target, offset, len, again, .. } = chunk;
        let Some(incoming) = self.find_mut(target) else { return Ok(false) };
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
        Ok(incoming.received.bytes() == incoming.len)
    }

    /// All bytes are there. It is over once none is unpacked any more: a chunk may have come twice.
    pub(super) fn complete(
        &mut self,
        index: u32,
        protocol: Protocol,
        lane: Option<LaneId>,
        cx: &mut Context<'_>,
    ) -> Completed {
        if self.table[index as usize].landed > 0 {
            self.table[index as usize].complete = Some((protocol, lane));
            return Completed::Waits;
        }
        let incoming = self.remove(index);
        let memory = incoming.memory();
        if leave(index, incoming.serial, cx.lanes, cx.stream) {
            cx.events.revoke(memory);
        }
        let lanes = sorted(incoming.shares);
        let prompt = incoming.len >= PROMPT;
        match incoming.kind {
            InKind::Receive { op, tag } => {
                let (bytes, (copy_ns, pushed)) = (incoming.len, incoming.copy.cost());
                let wire_ns = cx.now.since(incoming.started).saturating_sub(copy_ns);
                let receipt =
                    Receipt { bytes, protocol, lane, lanes, match_ns: 0, window_ns: 0, wire_ns, copy_ns, pushed };
                cx.control.owe_done(incoming.their, cx.events);
                cx.events.push(Event::Done { op, result: Ok(receipt), progress: bytes, tag });
            }
            InKind::Write { region, imm, .. } => {
                cx.control.owe_done(incoming.their, cx.events);
                cx.events.push(Event::Released { passive: incoming.passive, region });
                if let Some(imm) = imm {
                    cx.events.arrive(region, imm);
                }
            }
            InKind::Read { out, .. } => {
                cx.control.owe_read_done(incoming.their, cx.events);
                return Completed::Read { out, lanes, prompt };
            }
        }
        cx.peer_ops.free(incoming.their);
        Completed::Over { prompt }
    }

    /// A receive or a write of the peer's ends before its time: its memory is left alone from now on, as far as the
    /// lanes go, and it is over once no direct copy and no unpack touches it.
    pub(super) fn end(&mut self, index: u32, why: Failure, cx: &mut Context<'_>) {
        let Some(incoming) = self.table.get_mut(index as usize) else { return };
        if incoming.ending.is_some() {
            return;
        }
        incoming.ending = Some(Ending { why, told: false });
        let (memory, serial) = (incoming.memory(), incoming.serial);
        incoming.copy.stop(cx.events);
        leave(index, serial, cx.lanes, cx.stream);
        cx.events.revoke(memory);
        self.step_ending(index, cx);
    }

    /// Goes on with an ending, as far as direct copies and unpacks let it.
    fn step_ending(&mut self, index: u32, cx: &mut Context<'_>) {
        let Some(incoming) = self.table.get_mut(index as usize) else { return };
        let Some(ending) = incoming.ending.as_mut() else { return };
        if incoming.copy.is_running() || incoming.landed > 0 {
            return;
        }
        if !ending.told {
            ending.told = true;
            cx.control.push_failed(incoming.their, &ending.why, cx.events);
        }
        if incoming.copy.is_helped() {
            return;
        }
        let incoming = self.remove(index);
        let why = incoming.ending.map_or(Failure::Cancelled, |e| e.why);
        match incoming.kind {
            InKind::Receive { op, tag } => cx.events.fail(op, why, incoming.received.bytes(), tag),
            InKind::Write { region, .. } => cx.events.push(Event::Released { passive: incoming.passive, region }),
            InKind::Read { .. } => return,
        }
        cx.peer_ops.free(incoming.their);
    }

    /// A read of ours is over or given up: what still comes for it is discarded.
    pub(super) fn drop_read(&mut self, target: Target, cx: &mut Context<'_>) {
        let Target { index, serial } = target;
        if self.table.get(index as usize).is_none_or(|i| i.serial != serial) {
            return;
        }
        leave(index, serial, cx.lanes, cx.stream);
        self.remove_read(index, cx.events);
    }

    /// Forgets a read of ours, once nothing is unpacked for it any more.
    fn remove_read(&mut self, index: u32, events: &mut Events) {
        let incoming = &mut self.table[index as usize];
        if incoming.landed == 0 {
            self.table.remove(index as usize);
        } else if incoming.ending.is_none() {
            incoming.ending = Some(Ending { why: Failure::Cancelled, told: true });
            events.revoke(incoming.memory());
        }
    }

    fn find_receive(&self, op: OpId) -> Option<(usize, &Incoming)> {
        self.table.iter().find(|(_, i)| matches!(i.kind, InKind::Receive { op: o, .. } if o == op))
    }

    /// Ends a receive whose message comes in chunks, or is copied; false: there is none.
    pub(super) fn end_receive(&mut self, op: OpId, why: &Failure, cx: &mut Context<'_>) -> bool {
        let found = self.find_receive(op).map(|(index, _)| index as u32);
        if let Some(index) = found {
            self.end(index, why.clone(), cx);
        }
        found.is_some()
    }

    /// Ends the peer's writes into that region.
    pub(super) fn end_writes(&mut self, gone: RegionRef, why: &Failure, cx: &mut Context<'_>) {
        let of = |k| matches!(k, InKind::Write { region, .. } if region == gone);
        let found: Vec<u32> = self.table.iter().filter(|(_, i)| of(i.kind)).map(|(i, _)| i as u32).collect();
        for index in found {
            self.end(index, why.clone(), cx);
        }
    }

    /// What goes into that memory.
    pub(super) fn find_memory(&self, memory: Memory) -> Option<u32> {
        self.table.iter().find(|(_, i)| i.memory() == memory).map(|(at, _)| at as u32)
    }

    /// The memory of each transfer.
    pub(super) fn memories(&self) -> impl Iterator<Item = Memory> {
        self.table.iter().map(|(_, incoming)| incoming.memory())
    }

    /// Bytes moved and bytes in all, of a receive.
    pub(super) fn progress(&self, op: OpId) -> Option<(u64, u64)> {
        self.find_receive(op).map(|(_, i)| (i.received.bytes(), i.len))
    }

    /// Ends all transfers without notifying the peer. Still waits for direct copies and unpacks.
    pub(super) fn fail_all(&mut self, why: &Failure, cx: &mut Context<'_>) {
        let all: Vec<u32> = self.table.iter().map(|(i, _)| i as u32).collect();
        for index in all {
            let incoming = &mut self.table[index as usize];
            if matches!(incoming.kind, InKind::Read { .. }) {
                self.remove_read(index, cx.events);
                continue;
            }
            incoming.copy.end_help();
            match incoming.ending.as_mut() {
                Some(ending) => ending.told = true,
                None => {
                    incoming.ending = Some(Ending { why: why.clone(), told: true });
                    cx.events.revoke(incoming.memory());
                }
            }
            incoming.copy.stop(cx.events);
            self.step_ending(index, cx);
        }
    }
}

/// No lane places anything for that transfer any more; true if one did.
fn leave(index: u32, serial: u32, lanes: &mut Lanes, stream: &mut Stream) -> bool {
    let chunks = lanes.void_chunk_placements(index, serial);
    let of = |o: &Open| matches!(o.what, What::Data { index: i } if i == index);
    let data = stream.receiving().is_some_and(of);
    if data {
        stream.drop_open(lanes);
    }
    chunks || data
}

/// Chunks that land in slots and are unpacked from there, at their own pace and in any order. A chunk counts as
/// consumed when it is unpacked, so that the window covers the slots.
impl IncomingTransfers {
    /// A chunk lies in a slot; false: there is no more use for it.
    pub(super) fn land(&mut self, target: Target, offset: u64, len: u32) -> bool {
        let found = self.find_mut(target).filter(|i| !i.covers(offset, len));
        found.map(|incoming| incoming.landed += 1).is_some()
    }

    /// A chunk is out of its slot; whether its transfer is ending. `None`: the transfer is over.
    pub(super) fn take_off(&mut self, target: Target) -> Option<bool> {
        let found = self.table.get_mut(target.index as usize);
        let incoming = found.filter(|i| i.serial == target.serial && i.landed > 0)?;
        incoming.landed -= 1;
        Some(incoming.ending.is_some())
    }

    /// Goes on with what waited for the last unpack.
    pub(super) fn settle(&mut self, target: Target, cx: &mut Context<'_>) -> Settled {
        let index = target.index;
        let found = self.table.get(index as usize).filter(|i| i.serial == target.serial && i.landed == 0);
        let Some(incoming) = found else { return Settled::Nothing };
        match (incoming.kind, incoming.ending.is_some(), incoming.complete) {
            (InKind::Read { out, .. }, true, _) => {
                self.table.remove(index as usize);
                Settled::Read { out }
            }
            (_, true, _) => {
                self.step_ending(index, cx);
                Settled::Nothing
            }
            (_, false, Some((protocol, lane))) => Settled::Complete { protocol, lane },
            (_, false, None) => Settled::Nothing,
        }
    }

    /// Whether something is still being unpacked for that read of ours.
    pub(super) fn unpacks(&self, target: Target) -> bool {
        let found = self.table.get(target.index as usize);
        found.is_some_and(|i| i.serial == target.serial && i.landed > 0)
    }

    /// The engine has given up all direct copies and unpacks.
    pub(super) fn forget_jobs(&mut self) {
        for (_, incoming) in &mut self.table {
            incoming.copy.pulled(None);
            incoming.landed = 0;
        }
    }
}
