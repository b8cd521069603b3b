//! Chunks of GPU memory over lanes that only reach host memory: packed into bounce slots before a lane sends them,
//! unpacked from bounce slots after it has received them. Under the worker's lock; copies are made by the stagers.
//!
//! ```text
//! out: protocol ─ chunk ─> queue of the lane: waits for a slot, is packed, waits for its turn ─> lane ─> acknowledged
//! in:  lane ─ head ─> slot (or the lane waits) ─ payload ─> landed ─ unpacked ─> protocol: the bytes are there
//! ```
//!
//! The chunks of a lane keep their order, by which the peer counts them. Everything else overtakes them: an
//! acknowledgement that waited for a slot would be what the peer needs to free one.

use std::sync::Arc;

use crossrail_gpu::{ChunkMemory, Completion, Device, Direction, Scratch, Span, StagingQueue, StreamPoint};
use crossrail_proto as proto;
use crossrail_transport::{Place, Tx};
use crossrail_types::{EndpointId, LaneId};
use proto::{Body, Memory, Out, Time};

use super::staging_work::{StagingWork, Work};
use crate::core::chunk_queue::{Landing, QueuedChunk, Stage};
use crate::core::tables::Staged;
use crate::core::tables::Tables;
use crate::memory::GpuTimes;

/// Tokens of payloads in which the engine itself is involved. 0 is that of all others; small numbers on the way out are
/// a lane's held payloads.
pub(crate) const CONTROL: u64 = 1;
const LANDED: u64 = 2;
const SHORT: u64 = 3;

/// Copies of GPU memory that operations in flight may send: enough for exchanges of single messages, few enough that a
/// program that sends many at once is not held up by them.
const COPIES: usize = 4;

/// A GPU that this worker's operations have named.
pub(crate) struct UsedGpu {
    pub(crate) device: Arc<Device>,
    pub(crate) queue: StagingQueue,
}

/// A received payload for GPU memory.
pub(crate) struct Incoming {
    pub(crate) memory: Memory,
    pub(crate) dst: ChunkMemory,
    /// The GPU's ordinal.
    pub(crate) gpu: u32,
    pub(crate) len: usize,
    pub(crate) chunk: bool,
}

/// What a completed ticket was for.
pub(super) enum Completed {
    /// Something changed for that endpoint.
    Transfer(EndpointId),
    /// A point in a caller's stream was reached, or its work failed.
    Wait(u64, crossrail_types::Result<()>),
    /// It was cancelled.
    Nothing,
}

/// See the module.
#[derive(Default)]
pub(super) struct StagedChunks {
    /// By ordinal.
    gpus: Vec<Option<UsedGpu>>,
    work: StagingWork,
    /// Lanes with chunks that wait for a slot.
    slotless: Vec<(EndpointId, LaneId)>,
    /// Lanes that hold a received head for whose payload there is no slot.
    waiting: Vec<(EndpointId, LaneId, Memory)>,
    /// A lane polled under the lock has to be polled again.
    polled_lane_ready: bool,
    /// Shared with every copy out of GPU memory that an operation in flight sends.
    copies: Arc<()>,
}

impl StagedChunks {
    pub(super) fn gpu(&self, ordinal: u32) -> Option<&UsedGpu> {
        self.gpus.get(ordinal as usize)?.as_ref()
    }

    /// Adds a GPU; one that is returned is not needed, and must be dropped without the worker's lock.
    pub(super) fn add_gpu(&mut self, gpu: UsedGpu) -> Option<UsedGpu> {
        let at = gpu.device.ordinal() as usize;
        if self.gpus.len() <= at {
            self.gpus.resize_with(at + 1, || None);
        }
        match &self.gpus[at] {
            Some(_) => Some(gpu),
            None => {
                self.gpus[at] = Some(gpu);
                None
            }
        }
    }

    pub(super) fn take_gpus(&mut self) -> Vec<Option<UsedGpu>> {
        std::mem::take(&mut self.gpus)
    }

    /// Waits for a point in a stream of that GPU; the ticket that will complete.
    pub(super) fn wait_for(&mut self, ordinal: u32, point: StreamPoint) -> Option<u64> {
        let ticket = self.work.add(Work::Wait { gpu: ordinal, stream: point.stream() });
        self.gpu(ordinal)?.queue.wait_for(ticket, point);
        Some(ticket)
    }

    pub(super) fn is_pending(&self, ticket: u64) -> bool {
        self.work.is_pending(ticket)
    }

    /// Forgets a ticket whose completion nobody waits for any more.
    pub(super) fn forget(&mut self, ticket: u64) {
        self.work.take(ticket);
    }

    /// Whether a lane polled under the lock has become ready since the last call.
    pub(super) fn take_polled_lane_ready(&mut self) -> bool {
        std::mem::take(&mut self.polled_lane_ready)
    }

    // ---- out

    /// The next frame of a lane with staged chunks.
    pub(super) fn next(&mut self, tables: &mut Tables, endpoint: EndpointId, lane: LaneId) -> Option<Tx> {
        let now = tables.clock.now();
        loop {
            let record = tables.lanes.get_mut(lane)?;
            if !record.chunks.is_turn()
                && let Some(tx) = record.take_pending()
            {
                record.advance_chunks();
                return Some(tx);
            }
            // The chunk after the one whose turn it is must be on its way to be packed before that one is sent.
            let (full, most) = (record.chunks.is_full(), record.chunks.most());
            let protocol = &mut tables.peers.get_mut(endpoint)?.protocol;
            let out = if full { protocol.next_but_chunks(now, lane) } else { protocol.next_within(now, lane, most) };
            let Some(out) = out else {
                let turn = take_turn(tables, lane);
                if turn.is_none()
                    && let Some(memory) = tables.lanes.get_mut(lane).and_then(|record| record.chunks.starve())
                {
                    spend(tables, memory, |times, _| times.starve());
                }
                return turn;
            };
            if out.chunk && self.stage(tables, endpoint, lane, &out) {
                continue;
            }
            if let Some(tx) = tables.kept_frame(endpoint, lane, &out) {
                return Some(tx);
            }
        }
    }

    /// Counts a chunk that the protocol has given to that lane. True: it waits in the lane's queue.
    pub(super) fn stage(&mut self, tables: &mut Tables, endpoint: EndpointId, lane: LaneId, out: &Out) -> bool {
        let Some(record) = tables.lanes.get_mut(lane) else { return false };
        let number = record.chunks.count();
        let behind = record.chunks.is_waiting();
        let Body::Memory { memory, .. } = out.body else { return false };
        let on_gpu = match tables.extent(memory) {
            Some((_, _, gpu)) => gpu.is_some(),
            None => tables.part(memory).is_some_and(|(part, _)| part.gpu.is_some()),
        };
        let stage = match on_gpu {
            true => Stage::Slotless,
            _ if !behind => return false,
            _ => match tables.frame(endpoint, lane, out) {
                Some(mut tx) => {
                    tables.keep(endpoint, lane, &out.body, &mut tx);
                    Stage::Plain(tx)
                }
                None => Stage::Void,
            },
        };
        tables.hold_region(endpoint, memory);
        let slotless = matches!(stage, Stage::Slotless);
        if let Some(record) = tables.lanes.get_mut(lane) {
            record.chunks.push(QueuedChunk { number, out: *out, stage });
        }
        if slotless {
            self.supply(tables, endpoint, lane, true);
        }
        true
    }

    /// Gives slots to chunks of the lane that have none, in their order. `new`: the last of them was just queued.
    fn supply(&mut self, tables: &mut Tables, endpoint: EndpointId, lane: LaneId, new: bool) {
        loop {
            let Some(chunk) = tables.lanes.get(lane).and_then(|record| record.chunks.first_slotless()) else { return };
            let (number, body) = (chunk.number, chunk.out.body);
            let Body::Memory { memory, offset, len } = body else { return };
            let stage = match device_range(tables, memory, offset, len) {
                Some((src, ordinal)) => {
                    match self.pack(Work::Pack { endpoint, lane, number, memory, gpu: ordinal }, ordinal, src, len) {
                        Some(()) => Stage::Packing,
                        None => {
                            if new {
                                spend(tables, memory, |times, now| times.slot.begin(now));
                            }
                            if !self.slotless.contains(&(endpoint, lane)) {
                                self.slotless.push((endpoint, lane));
                            }
                            return;
                        }
                    }
                }
                None => Stage::Void,
            };
            if !new {
                spend(tables, memory, |times, now| times.slot.end(now));
            }
            if matches!(stage, Stage::Packing) {
                spend(tables, memory, |times, now| times.pack.begin(now));
            }
            if let Some(record) = tables.lanes.get_mut(lane) {
                record.chunks.set_stage(number, stage);
            }
            advance(tables, lane);
        }
    }

    fn pack(&mut self, work: Work, ordinal: u32, src: ChunkMemory, len: u32) -> Option<()> {
        let slot = free_slot(&self.gpu(ordinal)?.queue, Direction::Out, len as usize)?;
        let ticket = self.work.add(work);
        self.gpu(ordinal)?.queue.pack(ticket, src, slot, len as usize);
        Some(())
    }

    /// Slots may be free: gives them to chunks that wait for one.
    pub(super) fn supply_all(&mut self, tables: &mut Tables) {
        for (endpoint, lane) in std::mem::take(&mut self.slotless) {
            self.supply(tables, endpoint, lane, false);
        }
    }

    /// The lane no longer reads a packed chunk.
    pub(super) fn sent(&mut self, tables: &mut Tables, lane: LaneId, number: u64) {
        if let Some(record) = tables.lanes.get_mut(lane) {
            record.chunks.sent(number);
        }
        self.supply_all(tables);
    }

    /// The peer has consumed chunks of that lane.
    pub(super) fn acked(&mut self, tables: &mut Tables, lane: LaneId, chunks: u32) {
        if let Some(record) = tables.lanes.get_mut(lane) {
            record.chunks.consumed(chunks);
        }
        if !self.slotless.is_empty() {
            self.supply_all(tables);
        }
    }

    // ---- in

    /// Where the payload for GPU memory goes at first.
    pub(super) fn place(
        &mut self,
        tables: &mut Tables,
        endpoint: EndpointId,
        lane: LaneId,
        incoming: Incoming,
    ) -> Place {
        let Incoming { memory, dst, gpu, len, chunk } = incoming;
        if len == 0 {
            return Place::Into { dst: std::ptr::dangling_mut(), len: 0, grant: None, token: 0 };
        }
        tables.hold_region(endpoint, memory);
        if !chunk {
            let ChunkMemory::At(dst) = dst else {
                return Place::Refuse(format!("{len} bytes for rows of GPU memory, which are no chunk"));
            };
            let Some(grant) = tables.loan(endpoint, memory) else { return Place::Discard };
            let Some(mut bytes) = self.gpu(gpu).map(|gpu| gpu.device.scratch(len)) else { return Place::Discard };
            let into = bytes.as_mut_ptr();
            let Some(record) = tables.lanes.get_mut(lane) else { return Place::Discard };
            record.chunks.set_landing(Landing::Short { bytes, grant: grant.clone(), gpu, memory, dst });
            return Place::Into { dst: into, len, grant: Some(grant), token: SHORT };
        }
        let Some(queue) = self.gpu(gpu).map(|gpu| &gpu.queue) else { return Place::Discard };
        if len > queue.slot_len() {
            return Place::Refuse(format!("a chunk of {len} bytes, longer than was agreed"));
        }
        let slot = free_slot(queue, Direction::In, len);
        let held = self.waiting.iter().position(|(_, waiting, _)| *waiting == lane);
        let Some(slot) = slot else {
            if held.is_none() {
                self.waiting.push((endpoint, lane, memory));
                spend(tables, memory, GpuTimes::lack_slot);
            }
            let now = tables.clock.now();
            if let Some(peer) = tables.peers.get_mut(endpoint) {
                peer.protocol.unplace(now, lane);
            }
            return Place::Wait;
        };
        if let Some(at) = held {
            self.waiting.swap_remove(at);
            spend(tables, memory, GpuTimes::have_slot);
        }
        let into = slot.ptr();
        let Some(record) = tables.lanes.get_mut(lane) else { return Place::Discard };
        record.chunks.set_landing(Landing::Chunk { slot, gpu, memory, dst, len });
        spend(tables, memory, |times, _| times.receive());
        Place::Into { dst: into, len, grant: None, token: LANDED }
    }

    /// The payload for GPU memory is in its slot, or in host memory. True: the protocol must be told that it was
    /// placed. `Err` kills the lane.
    pub(super) fn placed(&mut self, tables: &mut Tables, endpoint: EndpointId, lane: LaneId) -> Result<bool, String> {
        let now = tables.clock.now();
        match tables.lanes.get_mut(lane).and_then(|record| record.chunks.take_landing()) {
            Some(Landing::Chunk { slot, gpu, memory, dst, len }) => {
                spend(tables, memory, |times, _| times.received());
                let Some(peer) = tables.peers.get_mut(endpoint) else { return Ok(false) };
                let Some(landed) = peer.protocol.landed(now, lane)? else { return Ok(false) };
                spend(tables, memory, |times, now| times.unpack.begin(now));
                let ticket = self.work.add(Work::Unpack { endpoint, memory, landed, gpu });
                if let Some(gpu) = self.gpu(gpu) {
                    gpu.queue.unpack(ticket, slot, dst, len);
                }
                Ok(false)
            }
            Some(Landing::Short { bytes, grant, gpu, memory, dst }) => {
                if !grant.is_recalled()
                    && let Err(why) = self.copy_in(gpu, dst, &bytes)
                {
                    tables.fail_memory(endpoint, memory, why);
                }
                Ok(true)
            }
            None => Ok(true),
        }
    }

    /// Copies a few bytes to GPU memory, synchronously.
    pub(super) fn copy_in(&self, gpu: u32, dst: u64, bytes: &[u8]) -> Result<(), String> {
        let gpu = self.gpu(gpu).ok_or_else(|| format!("cuda:{gpu} is not in use"))?;
        gpu.device.copy_in(dst, bytes).map_err(|error| error.to_string())
    }

    /// A token of one more copy of GPU memory that an operation sends; `None` while several do: then the chunks of
    /// further ones overlap with them, and one copy after the other would not.
    pub(super) fn begin_copy(&self) -> Option<Arc<()>> {
        (Arc::strong_count(&self.copies) <= COPIES).then(|| self.copies.clone())
    }

    /// Copies a few bytes from GPU memory, synchronously. `None`: they cannot be.
    pub(super) fn copy_out(&self, gpu: u32, src: u64, len: usize) -> Option<Scratch> {
        let device = &self.gpu(gpu)?.device;
        let mut bytes = device.scratch(len);
        device.copy_out(src, &mut bytes).ok()?;
        Some(bytes)
    }

    // ---- completions

    /// Acts on one completed ticket.
    pub(super) fn complete(&mut self, tables: &mut Tables, completion: Completion) -> Completed {
        let Some(work) = self.work.take(completion.ticket) else { return Completed::Nothing };
        let now = tables.clock.read();
        let Completion { ticket, slot, result, span } = completion;
        if let Some(span) = span {
            trace(tables, &work, span);
        }
        match work {
            Work::Pack { endpoint, lane, number, memory, .. } => {
                spend(tables, memory, |times, now| times.pack.end(now));
                let failed = result.err().map(|error| error.to_string());
                let stage = match (slot, &failed) {
                    (Some(slot), None) => {
                        let file = tables.file(slot.ptr(), slot.len());
                        Stage::Packed(slot, file)
                    }
                    _ => Stage::Void,
                };
                if let Some(record) = tables.lanes.get_mut(lane) {
                    record.chunks.set_stage(number, stage);
                }
                if let (Some(why), Some(peer)) = (failed, tables.peers.get_mut(endpoint)) {
                    peer.protocol.fail(now, memory, why);
                }
                // A lane that has its next frame asks for more by itself.
                if advance(tables, lane) {
                    self.wake_lane(tables, endpoint, lane);
                }
                Completed::Transfer(endpoint)
            }
            Work::Unpack { endpoint, memory, landed, .. } => {
                spend(tables, memory, |times, now| times.unpack.end(now));
                let Some(peer) = tables.peers.get_mut(endpoint) else { return Completed::Nothing };
                match result {
                    Ok(()) => peer.protocol.unpacked(now, landed),
                    Err(error) => peer.protocol.unpack_failed(now, landed, error.to_string()),
                }
                Completed::Transfer(endpoint)
            }
            Work::Wait { .. } => Completed::Wait(ticket, result),
        }
    }

    /// Has the lanes that wait for a slot ask again.
    pub(super) fn retry_waiting(&mut self, tables: &Tables) {
        for (endpoint, lane, _) in self.waiting.clone() {
            self.wake_lane(tables, endpoint, lane);
        }
    }

    fn wake_lane(&mut self, tables: &Tables, endpoint: EndpointId, lane: LaneId) {
        match tables.peers.get(endpoint).and_then(|peer| peer.bulk_lane(lane)) {
            Some(bulk) => bulk.want(),
            None => self.polled_lane_ready = true,
        }
    }

    // ---- ends

    /// The protocol no longer uses that memory: nothing may touch it, and its chunks go out as void.
    pub(super) fn release(
        &mut self,
        tables: &mut Tables,
        endpoint: EndpointId,
        which: impl Fn(&Memory) -> bool + Copy,
    ) {
        if self.gpus.is_empty() {
            return;
        }
        self.quiesce(tables, |work| work.touches(endpoint, which));
        let lanes = tables.peers.get(endpoint).map(|peer| peer.lanes().to_vec()).unwrap_or_default();
        for lane in lanes {
            let Some(record) = tables.lanes.get_mut(lane).filter(|record| record.chunks.is_staging()) else { continue };
            record.chunks.void(which);
            advance(tables, lane);
            self.wake_lane(tables, endpoint, lane);
        }
    }

    /// The peer has ended: nothing is packed for it or unpacked from it any more.
    pub(super) fn release_endpoint(&mut self, tables: &mut Tables, endpoint: EndpointId) {
        self.quiesce(tables, |work| work.is_of(endpoint));
        self.slotless.retain(|(of, _)| *of != endpoint);
        self.waiting.retain(|(of, ..)| *of != endpoint);
    }

    /// The lane is about to end: it no longer waits for anything.
    pub(super) fn end_waits(&mut self, tables: &mut Tables, lane: LaneId) {
        let Some(record) = tables.lanes.get_mut(lane) else { return };
        let (starved, landing) = (record.chunks.feed(), record.chunks.landing_chunk());
        if let Some(memory) = starved {
            spend(tables, memory, |times, _| times.feed());
        }
        if let Some(memory) = landing {
            spend(tables, memory, |times, _| times.received());
        }
        if let Some(at) = self.waiting.iter().position(|(_, of, _)| *of == lane) {
            let (_, _, memory) = self.waiting.swap_remove(at);
            spend(tables, memory, GpuTimes::have_slot);
        }
    }

    /// The lane has ended.
    pub(super) fn release_lane(&mut self, tables: &mut Tables, lane: LaneId) {
        self.slotless.retain(|(_, of)| *of != lane);
        self.supply_all(tables);
    }

    /// Waits until nothing touches the memory of the selected work any more. May be called under the worker's lock: a
    /// stager never waits for that lock.
    fn quiesce(&mut self, tables: &Tables, which: impl Fn(&Work) -> bool) {
        let cancelled = self.work.cancel(which);
        if cancelled.is_empty() {
            return;
        }
        for gpu in self.gpus.iter().flatten() {
            if let Err(why) = gpu.queue.quiesce(|ticket| cancelled.contains(&ticket)) {
                tables.log.error(format_args!("GPU memory is still in use: {why}"));
            }
        }
    }
}

/// The chunk whose turn it is.
fn take_turn(tables: &mut Tables, lane: LaneId) -> Option<Tx> {
    let record = tables.lanes.get_mut(lane)?;
    let chunk = record.take_pending();
    record.chunks.end_turn(chunk.is_none());
    advance(tables, lane);
    chunk
}

/// Makes the lane's next chunk its pending frame, if that is possible; whether it did.
fn advance(tables: &mut Tables, lane: LaneId) -> bool {
    let Some(record) = tables.lanes.get_mut(lane) else { return false };
    if !record.advance_chunks() {
        return false;
    }
    if let Some(memory) = record.chunks.feed() {
        spend(tables, memory, |times, _| times.feed());
    }
    true
}

/// A free slot, or a request for a notification when there may be one.
fn free_slot(queue: &StagingQueue, direction: Direction, len: usize) -> Option<crossrail_gpu::Slot> {
    queue.slot(direction, len).or_else(|| {
        queue.notify_when_free(direction, len);
        // Another worker may have freed one between the two calls, and then nothing would notify this one.
        queue.slot(direction, len)
    })
}

/// The device memory of a range, and its GPU; `None`: it is not there.
pub(crate) fn device_range(tables: &Tables, memory: Memory, offset: u64, len: u32) -> Option<(ChunkMemory, u32)> {
    let fits = |have| offset.checked_add(u64::from(len)).is_some_and(|end| end <= have);
    match tables.extent(memory) {
        Some((ptr, have, gpu)) => Some((ChunkMemory::At(ptr as u64 + offset), gpu.filter(|_| fits(have))?)),
        None => tables.part(memory).filter(|(_, have)| fits(*have))?.0.on_gpu(offset, u64::from(len)),
    }
}

/// Records what a GPU did in the worker's trace.
fn trace(tables: &mut Tables, work: &Work, span: Span) {
    match *work {
        Work::Pack { gpu, .. } => tables.trace_staged(gpu, Staged::Packs, span),
        Work::Unpack { gpu, .. } => tables.trace_staged(gpu, Staged::Unpacks, span),
        Work::Wait { gpu, stream } => tables.trace_staged(gpu, Staged::Stream(stream), span),
    }
}

/// Records where an operation's time goes.
fn spend(tables: &mut Tables, memory: Memory, how: impl FnOnce(&mut GpuTimes, Time)) {
    let now = tables.clock.read();
    if let Memory::Op(op) = memory
        && let Some(times) = tables.operations.op_mut(op).and_then(|op| op.gpu_times())
    {
        times.change(now, how);
    }
}
