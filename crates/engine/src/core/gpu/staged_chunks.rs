//! Chunks of GPU memory: packed into bounce slots before a lane takes them, unpacked from bounce slots after it brought
//! them. Under the worker's lock; what takes time is done by the GPUs' stagers.
//!
//! ```text
//! out: protocol ─ chunk ─> queue of the lane: waits for a slot, is packed, waits for its turn ─> lane ─> acknowledged
//! in:  lane ─ head ─> slot (or the lane waits) ─ payload ─> landed ─ unpacked ─> protocol: the bytes are there
//! ```
//!
//! The chunks of a lane keep their order, by which the peer counts them. Everything else overtakes them: an
//! acknowledgement that waited for a slot would be what the peer needs to give one back.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::Arc;

use crossrail_proto as proto;
use crossrail_transport::{Grant, Payload, Place, Tx};
use crossrail_types::{EndpointId, LaneId};
use proto::{Body, Memory, Out, Time};

use super::staging_work::Work;
use crate::core::tables::{LaneState, State};
use crate::memory::GpuTimes;
use crossrail_gpu::{Completion, Direction, Slot};

/// Chunks that a lane has packed, or being packed, ahead of what it sends. More would keep slots from other lanes, and
/// a slow rail would take more than its part.
const LOOKAHEAD: usize = 4;
/// Nor does it take another when it has so many bytes ahead, which a GPU packs in a fraction of the time in which a
/// connection carries them: what lanes have taken is divided among them and can't be divided again when one gets slower.
const AHEAD: u64 = 3 << 20;
/// The first chunk of a lane that has none ahead is so long, the next twice that, and so on; and it has two ahead, then
/// more. Until its first is packed a lane idles, and the GPU packs in the order in which it is asked.
const FIRST: u64 = 256 << 10;

/// Tokens of payloads that the engine itself has to do with; 0 is that of all others, small ones are the lane's own
/// held payloads.
pub(crate) const CONTROL: u64 = 1;
pub(crate) const LANDED: u64 = 2;
pub(crate) const BESIDE: u64 = 3;
/// Of a message that is placed whole.
pub(crate) const MESSAGE: u64 = 4;
/// Of packed chunks on their way out, with their number.
pub(crate) const PACKED: u64 = 1 << 63;

/// The chunks of one lane that go by way of slots.
#[derive(Default)]
pub(crate) struct Staged {
    queue: VecDeque<Queued>,
    /// With the lane, or with the peer.
    flying: VecDeque<Flying>,
    landing: Option<Landing>,
    /// How many chunks it has taken since it last had none ahead.
    run: usize,
    /// The lane's pending frame is one of these chunks.
    turn: bool,
}

struct Queued {
    number: u64,
    out: Out,
    stage: Stage,
}

enum Stage {
    Slotless,
    Packing,
    Packed(Slot, Option<(RawFd, u64)>),
    /// A chunk of host memory, which needs nothing but its turn.
    Plain(Tx),
    /// Its transfer is over, or its bytes cannot be had: it is only counted.
    Void,
}

struct Flying {
    number: u64,
    _slot: Slot,
    sent: bool,
}

/// The payload that is coming in.
enum Landing {
    Chunk {
        slot: Slot,
        gpu: u32,
        memory: Memory,
        dst: u64,
        len: usize,
    },
    /// A short message of a host sender's, for a GPU's memory.
    Beside {
        bytes: Box<[u8]>,
        grant: Arc<Grant>,
        gpu: u32,
        memory: Memory,
        dst: u64,
    },
}

impl LaneState {
    fn staged(&mut self) -> &mut Staged {
        self.staged.get_or_insert_default()
    }

    /// Whether it has as many chunks ahead as it may.
    pub(crate) fn is_full(&self) -> bool {
        self.staged.as_ref().is_some_and(|staged| {
            let bytes: u64 = staged.queue.iter().map(|queued| u64::from(queued.out.head.payload_len())).sum();
            staged.queue.len() >= staged.run.clamp(2, LOOKAHEAD)
                || bytes >= AHEAD
                || staged.queue.iter().any(|queued| matches!(queued.stage, Stage::Slotless))
        })
    }

    /// Whether chunks wait for their turn.
    pub(crate) fn is_packing(&self) -> bool {
        self.staged.as_ref().is_some_and(|staged| staged.turn || !staged.queue.is_empty())
    }

    /// Whether its next frame waits for a GPU here: then the peer's silence says nothing.
    pub(crate) fn is_held_up(&self) -> bool {
        let next = self.staged.as_ref().and_then(|staged| staged.queue.front());
        self.pending.is_none() && next.is_some_and(|queued| matches!(queued.stage, Stage::Slotless | Stage::Packing))
    }

    /// Makes the chunk whose turn it is the next frame of the lane. Whether there was one, and it had none.
    fn advance(&mut self) -> bool {
        if self.pending.is_some() {
            return false;
        }
        let Some(staged) = &mut self.staged else { return false };
        let ready = |queued: &Queued| !matches!(queued.stage, Stage::Slotless | Stage::Packing);
        if !staged.queue.front().is_some_and(ready) {
            return false;
        }
        let Some(Queued { number, out, stage }) = staged.queue.pop_front() else { return false };
        let tx = match stage {
            Stage::Packed(slot, file) => {
                let len = out.head.payload_len() as usize;
                let payload = Payload { ptr: slot.ptr().cast_const(), len, file, grant: None };
                staged.flying.push_back(Flying { number, _slot: slot, sent: false });
                Tx { head: out.head, payload, token: PACKED | number }
            }
            Stage::Plain(tx) => tx,
            _ => Tx { head: proto::frame::void(&out.head), payload: Payload::EMPTY, token: 0 },
        };
        staged.run += 1;
        staged.turn = true;
        self.pending = Some(tx);
        true
    }

    /// The lane has let go of a packed chunk.
    pub(crate) fn sent_packed(&mut self, number: u64) {
        let acked = self.acked;
        if let Some(staged) = &mut self.staged {
            if let Some(flying) = staged.flying.iter_mut().find(|flying| flying.number == number) {
                flying.sent = true;
            }
            staged.land_flying(acked);
        }
    }

    /// The peer has consumed so many more of its chunks.
    fn consumed(&mut self, chunks: u32) {
        self.acked += u64::from(chunks);
        let acked = self.acked;
        if let Some(staged) = &mut self.staged {
            staged.land_flying(acked);
        }
    }
}

impl Staged {
    /// How long its next chunk may be.
    fn most(&self) -> u64 {
        FIRST << (self.run + self.queue.len()).min(32)
    }

    fn land_flying(&mut self, acked: u64) {
        self.flying.retain(|flying| flying.number >= acked || !flying.sent);
    }
}

impl State {
    /// [`State::next`] for a lane with chunks of GPU memory.
    #[cold]
    pub(crate) fn next_staged(&mut self, endpoint: EndpointId, lane: LaneId) -> Option<Tx> {
        let now = self.now;
        loop {
            let state = self.lane(lane)?;
            let staged = state.staged();
            if !staged.turn
                && let Some(tx) = state.pending.take()
            {
                state.advance();
                return Some(tx);
            }
            // What comes after the chunk whose turn it is must be on its way to be packed before that one goes.
            let (full, most) = (state.is_full(), state.staged().most());
            let peer = &mut self.peer(endpoint)?.peer;
            let out = if full { peer.next_but_chunks(now, lane) } else { peer.next_within(now, lane, most) };
            let Some(out) = out else { return self.take_turn(lane) };
            if out.chunk && self.stage(endpoint, lane, &out) {
                continue;
            }
            if let Some(mut tx) = self.tx(endpoint, lane, &out) {
                self.keep(endpoint, lane, &out.body, &mut tx);
                return Some(tx);
            }
            self.log.error(format_args!("a frame for memory that is gone was dropped"));
        }
    }

    /// The chunk whose turn it is.
    fn take_turn(&mut self, lane: LaneId) -> Option<Tx> {
        let state = self.lane(lane)?;
        let chunk = state.pending.take();
        let staged = state.staged();
        staged.turn = false;
        if chunk.is_none() && staged.queue.is_empty() {
            staged.run = 0;
        }
        state.advance();
        chunk
    }

    /// Counts a chunk that the protocol has given to that lane. True: it waits in the lane's queue, to be packed.
    pub(crate) fn stage(&mut self, endpoint: EndpointId, lane: LaneId, out: &Out) -> bool {
        let Some(state) = self.lane(lane) else { return false };
        let number = state.given;
        state.given += 1;
        let behind = state.is_packing();
        let Body::Memory { memory, .. } = out.body else { return false };
        let stage = match self.span(memory) {
            Some((_, _, Some(_))) => Stage::Slotless,
            _ if !behind => return false,
            _ => match self.tx(endpoint, lane, out) {
                Some(mut tx) => {
                    self.keep(endpoint, lane, &out.body, &mut tx);
                    Stage::Plain(tx)
                }
                None => Stage::Void,
            },
        };
        if let Memory::Region { .. } = memory {
            // So that it is known to be in use until the protocol releases it.
            self.grant(endpoint, memory);
        }
        let slotless = matches!(stage, Stage::Slotless);
        if let Some(state) = self.lane(lane) {
            state.staged().queue.push_back(Queued { number, out: *out, stage });
        }
        if slotless {
            self.supply(endpoint, lane, true);
        }
        true
    }

    /// Gives slots to chunks of the lane that have none, in their order. `new`: the last of them just came.
    fn supply(&mut self, endpoint: EndpointId, lane: LaneId, new: bool) {
        loop {
            let Some(Some(state)) = self.lanes.get_mut(lane.0 as usize) else { return };
            let Some(staged) = &mut state.staged else { return };
            let Some(at) = staged.queue.iter().position(|queued| matches!(queued.stage, Stage::Slotless)) else {
                return;
            };
            let (number, body) = (staged.queue[at].number, staged.queue[at].out.body);
            let Body::Memory { memory, offset, len } = body else { return };
            let stage = match self.reach(memory, offset, len) {
                Some((src, ordinal)) => {
                    match self.pack(Work::Pack { endpoint, lane, number, memory }, ordinal, src, len) {
                        Some(()) => Stage::Packing,
                        None => {
                            if new {
                                self.spend(memory, |times, now| times.slot.begin(now));
                            }
                            if !self.staging.slotless.contains(&(endpoint, lane)) {
                                self.staging.slotless.push((endpoint, lane));
                            }
                            return;
                        }
                    }
                }
                None => Stage::Void,
            };
            if !new {
                self.spend(memory, |times, now| times.slot.end(now));
            }
            if matches!(stage, Stage::Packing) {
                self.spend(memory, |times, now| times.pack.begin(now));
            }
            if let Some(queued) = self.queued(lane, number) {
                queued.stage = stage;
            }
            if let Some(state) = self.lane(lane) {
                state.advance();
            }
        }
    }

    fn queued(&mut self, lane: LaneId, number: u64) -> Option<&mut Queued> {
        self.lane(lane)?.staged.as_mut()?.queue.iter_mut().find(|queued| queued.number == number)
    }

    /// Where that piece of a GPU's memory is; `None`: it is not there.
    fn reach(&mut self, memory: Memory, offset: u64, len: u32) -> Option<(u64, u32)> {
        let (ptr, have, gpu) = self.span(memory)?;
        let fits = offset.checked_add(u64::from(len)).is_some_and(|end| end <= have);
        Some((ptr as u64 + offset, gpu.filter(|_| fits)?))
    }

    fn pack(&mut self, work: Work, ordinal: u32, src: u64, len: u32) -> Option<()> {
        let client = &self.staging.gpu(ordinal)?.client;
        // Another worker may be the one that gives a slot back.
        let slot = client.slot(Direction::Out).or_else(|| {
            client.notify_when_free(Direction::Out);
            client.slot(Direction::Out)
        })?;
        let ticket = self.staging.ticket(work);
        self.staging.gpu(ordinal)?.client.pack(ticket, src, slot, len as usize);
        Some(())
    }

    /// Slots may be free: gives them to whoever waits for one.
    pub(crate) fn supply_all(&mut self) {
        for (endpoint, lane) in std::mem::take(&mut self.staging.slotless) {
            self.supply(endpoint, lane, false);
        }
    }

    /// [`proto::Event::Acked`].
    pub(crate) fn acked(&mut self, lane: LaneId, chunks: u32) {
        if let Some(state) = self.lane(lane) {
            state.consumed(chunks);
        }
        if !self.staging.slotless.is_empty() {
            self.supply_all();
        }
    }

    fn advance(&mut self, lane: LaneId) -> bool {
        self.lane(lane).is_some_and(LaneState::advance)
    }

    /// Notes where an operation's time goes.
    fn spend(&mut self, memory: Memory, how: impl FnOnce(&mut GpuTimes, Time)) {
        let now = self.tick();
        if let Memory::Op(op) = memory
            && let Some(gpu) = self.ops.op_mut(op).and_then(|op| op.gpu.as_mut())
        {
            how(&mut gpu.times, now);
        }
    }

    // ---- in

    /// Where the payload of a GPU's memory goes at first.
    pub(crate) fn place_beside(&mut self, endpoint: EndpointId, lane: LaneId, to: Beside) -> Place {
        let Beside { memory, dst, gpu, len, chunk } = to;
        if len == 0 {
            return Place::Into { dst: std::ptr::dangling_mut(), len: 0, grant: None, token: 0 };
        }
        if let Memory::Region { .. } = memory {
            self.grant(endpoint, memory);
        }
        if !chunk {
            let Some(grant) = self.grant(endpoint, memory) else { return Place::Discard };
            let mut bytes: Box<[u8]> = vec![0; len].into();
            let into = bytes.as_mut_ptr();
            let landing = Landing::Beside { bytes, grant: grant.clone(), gpu, memory, dst };
            let Some(state) = self.lane(lane) else { return Place::Discard };
            state.staged().landing = Some(landing);
            return Place::Into { dst: into, len, grant: Some(grant), token: BESIDE };
        }
        let Some(client) = self.staging.gpu(gpu).map(|gpu| &gpu.client) else { return Place::Discard };
        if len > client.slot_len() {
            return Place::Refuse(format!("a chunk of {len} bytes, longer than was agreed"));
        }
        let slot = client.slot(Direction::In).or_else(|| {
            client.notify_when_free(Direction::In);
            client.slot(Direction::In)
        });
        let held = self.staging.waiting.iter().position(|waiting| *waiting == (endpoint, lane));
        let Some(slot) = slot else {
            if held.is_none() {
                self.staging.waiting.push((endpoint, lane));
                self.spend(memory, |times, now| times.slot.begin(now));
            }
            let now = self.now;
            if let Some(peer) = self.peer(endpoint) {
                peer.peer.unplace(now, lane);
            }
            return Place::Wait;
        };
        if let Some(at) = held {
            self.staging.waiting.swap_remove(at);
            self.spend(memory, |times, now| times.slot.end(now));
        }
        let into = slot.ptr();
        let Some(state) = self.lane(lane) else { return Place::Discard };
        state.staged().landing = Some(Landing::Chunk { slot, gpu, memory, dst, len });
        Place::Into { dst: into, len, grant: None, token: LANDED }
    }

    /// The payload of a GPU's memory is in its slot, or in host memory. True: the protocol is to be told that it was
    /// placed. `Err` kills the lane.
    pub(crate) fn placed_beside(&mut self, endpoint: EndpointId, lane: LaneId) -> Result<bool, String> {
        let now = self.now;
        let landing = self.lane(lane).and_then(|lane| lane.staged.as_mut()?.landing.take());
        match landing {
            Some(Landing::Chunk { slot, gpu, memory, dst, len }) => {
                let Some(peer) = self.peer(endpoint) else { return Ok(false) };
                let Some(landed) = peer.peer.landed(now, lane)? else { return Ok(false) };
                self.spend(memory, |times, now| times.unpack.begin(now));
                let ticket = self.staging.ticket(Work::Unpack { endpoint, memory, landed });
                if let Some(gpu) = self.staging.gpu(gpu) {
                    gpu.client.unpack(ticket, slot, dst, len);
                }
                Ok(false)
            }
            Some(Landing::Beside { bytes, grant, gpu, memory, dst }) => {
                if !grant.is_revoked()
                    && let Err(why) = self.copy_in(gpu, dst, &bytes)
                    && let Some(peer) = self.peer(endpoint)
                {
                    peer.peer.fail(now, memory, why);
                }
                Ok(true)
            }
            None => Ok(true),
        }
    }

    /// Copies a few bytes to a GPU's memory, at once.
    pub(crate) fn copy_in(&self, gpu: u32, dst: u64, bytes: &[u8]) -> Result<(), String> {
        let gpu = self.staging.gpu(gpu).ok_or_else(|| format!("cuda:{gpu} is not in use"))?;
        gpu.device.copy_in(dst, bytes).map_err(|error| error.to_string())
    }

    // ---- what the stagers have done

    /// One piece of work is finished; whose it was.
    pub(crate) fn stage_done(&mut self, work: Work, done: Completion) -> Option<EndpointId> {
        let now = self.tick();
        let failed = done.result.err().map(|error| error.to_string());
        match work {
            Work::Pack { endpoint, lane, number, memory } => {
                self.spend(memory, |times, now| times.pack.end(now));
                let stage = match (done.slot, &failed) {
                    (Some(slot), None) => {
                        let file = self.file(slot.ptr(), slot.len());
                        Stage::Packed(slot, file)
                    }
                    _ => Stage::Void,
                };
                if let Some(queued) = self.queued(lane, number) {
                    queued.stage = stage;
                }
                if let (Some(why), Some(peer)) = (failed, self.peer(endpoint)) {
                    peer.peer.fail(now, memory, why);
                }
                // A lane that has its next frame comes for more by itself.
                if self.advance(lane) {
                    self.tell_bulk(endpoint, lane);
                }
                Some(endpoint)
            }
            Work::Unpack { endpoint, memory, landed } => {
                self.spend(memory, |times, now| times.unpack.end(now));
                let peer = self.peer(endpoint)?;
                match failed {
                    None => peer.peer.unpacked(now, landed),
                    Some(why) => peer.peer.unpack_failed(now, landed, why),
                }
                Some(endpoint)
            }
            Work::Gate => None,
        }
    }

    /// Has the lanes that wait for a slot look again.
    pub(crate) fn retry_waiting(&mut self) {
        for (endpoint, lane) in self.staging.waiting.clone() {
            self.tell_bulk(endpoint, lane);
        }
    }

    fn tell_bulk(&mut self, endpoint: EndpointId, lane: LaneId) {
        match self.peer(endpoint).and_then(|peer| peer.bulk.iter().find(|bulk| bulk.id == lane)) {
            Some(bulk) => bulk.wanted.raise(),
            None => self.staging.inside = true,
        }
    }

    // ---- what ends

    /// That memory is no longer the protocol's: nothing may touch it, and its chunks go out as void.
    pub(crate) fn let_go(&mut self, endpoint: EndpointId, which: impl Fn(&Memory) -> bool + Copy) {
        if self.staging.gpus.is_empty() {
            return;
        }
        if let Some(why) = self.staging.quiesce(|work| work.touches(endpoint, which)) {
            self.log.error(format_args!("memory of a GPU is still in use: {why}"));
        }
        let lanes = self.peer(endpoint).map(|peer| peer.lanes.clone()).unwrap_or_default();
        for lane in lanes {
            let Some(staged) = self.lane(lane).and_then(|lane| lane.staged.as_mut()) else { continue };
            for queued in &mut staged.queue {
                let of = matches!(&queued.out.body, Body::Memory { memory, .. } if which(memory));
                if of && matches!(queued.stage, Stage::Slotless | Stage::Packing) {
                    queued.stage = Stage::Void;
                }
            }
            self.advance(lane);
            self.tell_bulk(endpoint, lane);
        }
    }

    /// The peer is gone: nothing is packed for it or unpacked from it any more.
    pub(crate) fn let_go_of_all(&mut self, endpoint: EndpointId) {
        if let Some(why) = self.staging.quiesce(|work| work.of(endpoint)) {
            self.log.error(format_args!("memory of a GPU is still in use: {why}"));
        }
        self.staging.slotless.retain(|(of, _)| *of != endpoint);
        self.staging.waiting.retain(|(of, _)| *of != endpoint);
    }

    /// The region is the caller's again.
    pub(crate) fn let_go_of_region(&mut self, region: proto::RegionRef) {
        let of = |memory: &Memory| matches!(memory, Memory::Region { region: of, .. } if *of == region);
        for at in 0..self.peers.len() as u32 {
            self.let_go(EndpointId(at), of);
        }
    }

    /// The lane is gone.
    pub(crate) fn forget_lane(&mut self, lane: LaneId) {
        self.staging.slotless.retain(|(_, of)| *of != lane);
        self.staging.waiting.retain(|(_, of)| *of != lane);
        self.supply_all();
    }
}

/// A payload for a GPU's memory.
pub(crate) struct Beside {
    pub(crate) memory: Memory,
    pub(crate) dst: u64,
    pub(crate) gpu: u32,
    pub(crate) len: usize,
    pub(crate) chunk: bool,
}
