//! GPU memory in operations: staged through host memory, or copied directly over CUDA IPC, after the caller's stream.
//!
//! The rest of the core knows GPU memory only through [`GpuMemory`].

mod inbox;
mod ipc;
mod staged_chunks;
mod staging_work;
mod stream_gates;

use std::sync::Arc;

use crossrail_cuda_ipc::{Gpus, Link};
use crossrail_gpu::{Scratch, StreamPoint};
use crossrail_proto as proto;
use crossrail_transport::{Place, Tx};
use crossrail_types::{EndpointId, LaneId, OpId};
use proto::{Memory, Out};

use super::outcome::Submission;
use super::polled_lanes::PolledLanes;
use super::tables::Tables;
pub(crate) use inbox::Inbox;
use ipc::IpcLinks;
pub(super) use ipc::NoteFailed;
pub(crate) use ipc::Reach;
pub(crate) use staged_chunks::{CONTROL, Incoming, UsedGpu, device_range};
use staged_chunks::{Completed, StagedChunks};
pub(super) use stream_gates::Released;
use stream_gates::StreamGates;

/// Everything about GPU memory that the worker's lock protects.
///
/// - *Admission.* Before an operation names GPU memory, [`GpuMemory::uses`] must hold for its GPU:
///   [`admit`](crate::progress::admit) makes it so, without the lock.
/// - *Start.* An operation that [`GpuMemory::must_wait`] is given to [`GpuMemory::hold`], and started when it comes
///   back.
/// - *Chunks.* Lanes take frames of staged memory with [`GpuMemory::next`] and place received ones with
///   [`GpuMemory::place`] and [`GpuMemory::placed`].
/// - *Completions.* Stagers leave them in the inbox; [`GpuMemory::complete`] acts on them.
/// - *End.* `release` and its kind return only when nothing touches the memory any more.
pub(crate) struct GpuMemory {
    staged: StagedChunks,
    gates: StreamGates,
    links: IpcLinks,
    inbox: Inbox,
}

/// What completions have changed.
#[derive(Default)]
pub(super) struct Changes {
    /// Endpoints to settle.
    pub(super) endpoints: Vec<EndpointId>,
    /// Operations to start or fail.
    pub(super) released: Vec<Released>,
    /// Points in streams that are reached, by ticket, or why not: of moves of rows.
    pub(super) reached: Vec<(u64, crossrail_types::Result<()>)>,
    /// Lanes under the lock must be polled.
    pub(super) polled_lane_ready: bool,
}

impl GpuMemory {
    pub(super) fn new(inbox: Inbox) -> GpuMemory {
        GpuMemory { staged: StagedChunks::default(), gates: StreamGates::default(), links: IpcLinks::default(), inbox }
    }

    // ---- admission

    /// Whether operations may name memory of that GPU.
    pub(crate) fn uses(&self, ordinal: u32) -> bool {
        self.staged.gpu(ordinal).is_some()
    }

    /// Lets operations name memory of that GPU. One that is returned is not needed, and must be dropped without the
    /// worker's lock.
    pub(crate) fn add(&mut self, gpu: UsedGpu) -> Option<UsedGpu> {
        self.staged.add_gpu(gpu)
    }

    /// Sets the means of copying between processes. The first call decides.
    pub(crate) fn set_gpus(&mut self, gpus: Result<Arc<Gpus>, String>) {
        self.links.set_gpus(gpus);
    }

    /// Takes all GPUs out, to be dropped without the worker's lock.
    pub(crate) fn take_gpus(&mut self) -> Vec<Option<UsedGpu>> {
        self.staged.take_gpus()
    }

    // ---- waiting for callers' streams

    /// Whether any operation waits.
    #[inline]
    pub(super) fn holds_back(&self) -> bool {
        self.gates.waiting()
    }

    /// Whether that operation must wait because others before it do.
    #[inline]
    pub(super) fn must_wait(&self, submission: &Submission, endpoint: Option<EndpointId>) -> bool {
        self.gates.is_closed(submission, endpoint)
    }

    /// Holds an operation back until `after` is reached and those before it have started. Those that may start at once.
    pub(super) fn hold(
        &mut self,
        op: OpId,
        submission: Submission,
        endpoint: Option<EndpointId>,
        after: Option<(u32, StreamPoint)>,
    ) -> Vec<Released> {
        let ticket = after.and_then(|(ordinal, point)| self.staged.wait_for(ordinal, point));
        self.gates.hold(op, submission, endpoint, ticket)
    }

    /// Takes an operation out that was held back; `None`: it was not. Those that may start now.
    pub(super) fn leave(&mut self, op: OpId, endpoint: Option<EndpointId>) -> Option<Vec<Released>> {
        self.gates.leave(op, endpoint)
    }

    /// Starts to wait for a point in a stream of that GPU; the ticket for [`GpuMemory::is_waiting`].
    pub(crate) fn wait_for(&mut self, ordinal: u32, point: StreamPoint) -> Option<u64> {
        self.staged.wait_for(ordinal, point)
    }

    pub(crate) fn is_waiting(&self, ticket: u64) -> bool {
        self.staged.is_pending(ticket)
    }

    /// Nobody waits for that ticket any more.
    pub(crate) fn forget(&mut self, ticket: u64) {
        self.staged.forget(ticket);
    }

    // ---- chunks

    /// The next frame of a lane that stages chunks.
    #[cold]
    pub(super) fn next(&mut self, tables: &mut Tables, endpoint: EndpointId, lane: LaneId) -> Option<Tx> {
        self.staged.next(tables, endpoint, lane)
    }

    /// Counts a chunk that the protocol has given to that lane. True: it waits in the lane's queue.
    pub(super) fn stage(&mut self, tables: &mut Tables, endpoint: EndpointId, lane: LaneId, out: &Out) -> bool {
        self.staged.stage(tables, endpoint, lane, out)
    }

    /// The lane no longer reads a packed chunk.
    pub(super) fn sent(&mut self, tables: &mut Tables, lane: LaneId, number: u64) {
        self.staged.sent(tables, lane, number);
    }

    /// The peer has consumed chunks of that lane.
    pub(super) fn acked(&mut self, tables: &mut Tables, lane: LaneId, chunks: u32) {
        self.staged.acked(tables, lane, chunks);
    }

    /// Where the payload for GPU memory goes at first.
    #[cold]
    pub(super) fn place(
        &mut self,
        tables: &mut Tables,
        endpoint: EndpointId,
        lane: LaneId,
        incoming: Incoming,
    ) -> Place {
        self.staged.place(tables, endpoint, lane, incoming)
    }

    /// That payload has arrived. True: the protocol must be told that it was placed. `Err` kills the lane.
    #[cold]
    pub(super) fn placed(&mut self, tables: &mut Tables, endpoint: EndpointId, lane: LaneId) -> Result<bool, String> {
        self.staged.placed(tables, endpoint, lane)
    }

    /// Copies a few bytes to GPU memory, synchronously.
    pub(super) fn copy_in(&self, gpu: u32, dst: u64, bytes: &[u8]) -> Result<(), String> {
        self.staged.copy_in(gpu, dst, bytes)
    }

    /// See [`StagedChunks::begin_copy`].
    pub(super) fn begin_copy(&self) -> Option<Arc<()>> {
        self.staged.begin_copy()
    }

    /// Copies a few bytes from GPU memory, synchronously.
    pub(super) fn copy_out(&self, gpu: u32, src: u64, len: usize) -> Option<Scratch> {
        self.staged.copy_out(gpu, src, len)
    }

    /// Whether stagers have left completions. Costs one load.
    #[inline]
    pub(super) fn has_completions(&self) -> bool {
        self.inbox.is_up()
    }

    /// Acts on completions and free slots; `None`: there were none.
    pub(super) fn complete(&mut self, tables: &mut Tables) -> Option<Changes> {
        let completions = self.inbox.take()?;
        let mut changes = Changes::default();
        for completion in completions {
            match self.staged.complete(tables, completion) {
                Completed::Transfer(endpoint) => changes.endpoints.push(endpoint),
                Completed::Wait(ticket, result) => match self.gates.completed(ticket, result) {
                    Ok(released) => changes.released.extend(released),
                    Err(result) => changes.reached.push((ticket, result)),
                },
                Completed::Nothing => {}
            }
        }
        self.staged.supply_all(tables);
        self.staged.retry_waiting(tables);
        changes.endpoints.dedup();
        changes.polled_lane_ready = self.staged.take_polled_lane_ready();
        Some(changes)
    }

    // ---- links

    /// Sets how a new peer's GPU memory can be reached.
    pub(super) fn set_reach(&mut self, endpoint: EndpointId, reach: Reach) {
        self.links.set_reach(endpoint, reach);
    }

    /// Whether there is any link to GPU memory of a peer.
    #[inline]
    pub(super) fn has_links(&self) -> bool {
        self.links.is_any_open()
    }

    pub(super) fn is_linked(&self, endpoint: EndpointId) -> bool {
        self.links.is_open(endpoint)
    }

    /// The link to that peer's GPU memory, if it was created.
    pub(super) fn existing_link(&mut self, endpoint: EndpointId) -> Option<&mut Link> {
        self.links.get(endpoint)
    }

    /// The link to that peer's GPU memory, created on first use. `Err`: why there is none.
    pub(super) fn link(&mut self, tables: &Tables, endpoint: EndpointId) -> Result<&mut Link, String> {
        self.links.link(tables, endpoint)
    }

    /// Logs once per peer that GPU memory is staged through host memory.
    pub(super) fn warn(&mut self, tables: &Tables, endpoint: EndpointId, why: &str) {
        self.links.warn(tables, endpoint, why);
    }

    /// Passes the link's notes to the peer; whether there were any.
    pub(super) fn pass_notes(
        &mut self,
        tables: &Tables,
        polled: &mut PolledLanes,
        endpoint: EndpointId,
    ) -> Result<bool, NoteFailed> {
        self.links.pass_notes(tables, polled, endpoint)
    }

    /// Exchanges notes with all peers; whether there were any. `pass`: whether anything moved in it, and its number.
    pub(super) fn exchange_notes(
        &mut self,
        tables: &Tables,
        polled: &mut PolledLanes,
        pass: (bool, u32),
    ) -> Result<bool, NoteFailed> {
        self.links.exchange_notes(tables, polled, pass)
    }

    /// Unmaps memory that its owners have freed; the peers to which notes must be passed.
    pub(super) fn tidy(&mut self) -> Vec<EndpointId> {
        self.links.tidy()
    }

    // ---- ends

    /// The protocol no longer uses that memory. Waits until nothing touches it any more.
    pub(super) fn release(
        &mut self,
        tables: &mut Tables,
        endpoint: EndpointId,
        which: impl Fn(&Memory) -> bool + Copy,
    ) {
        self.staged.release(tables, endpoint, which);
    }

    /// A region is the caller's again. Waits until nothing touches it any more.
    pub(crate) fn release_region(&mut self, tables: &mut Tables, region: proto::RegionRef) {
        let of = |memory: &Memory| matches!(memory, Memory::Region { region: of, .. } if *of == region);
        for endpoint in tables.peers.ids() {
            self.staged.release(tables, endpoint, of);
        }
    }

    /// The lane is about to end. Before its record is closed, which forgets what it waits for.
    pub(super) fn end_waits(&mut self, tables: &mut Tables, lane: LaneId) {
        self.staged.end_waits(tables, lane);
    }

    /// The lane has ended.
    pub(super) fn release_lane(&mut self, tables: &mut Tables, lane: LaneId) {
        self.staged.release_lane(tables, lane);
    }

    /// The peer has ended, and its direct copies. Waits until no staging touches its memory any more.
    pub(super) fn release_endpoint(&mut self, tables: &mut Tables, endpoint: EndpointId) {
        self.links.end(endpoint);
        self.staged.release_endpoint(tables, endpoint);
    }

    /// Nothing refers to that peer any more.
    pub(super) fn forget_peer(&mut self, endpoint: EndpointId) {
        self.links.forget(endpoint);
        self.gates.end(endpoint);
    }

    /// Operations with a peer that has ended which were held back: they fail.
    pub(super) fn take_held(&mut self, endpoint: EndpointId) -> Vec<OpId> {
        self.gates.end(endpoint)
    }
}
