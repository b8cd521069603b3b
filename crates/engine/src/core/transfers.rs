//! Operations, peers and lanes in motion: what the protocol decides is carried out here.
#![allow(unsafe_code)]

mod short;

use std::sync::Arc;

use crossrail_proto as proto;
use crossrail_transport::{Lane, LaneError, Place, Post, Sink, Tx};
use crossrail_types::{EndpointId, Head, LaneId, OpId, Reason};
use proto::{Event, Memory};

use self::short::publish_count;
use super::bulk_lane::BulkLane;
use super::data_path::{DataPath, wants};
use super::direct::{self, DirectCopies, Started};
use super::gpu::{GpuMemory, Reach};
use super::lanes::{LaneRecord, Lanes};
use super::left::LeftMessages;
use super::operations::{Op, UsualLane};
use super::peers::Peer;
use super::polled_lanes::{PolledLane, PolledLanes};
use super::returns::Owner;
use super::rows::hosted::Hosted;
use super::tables::Tables;
use super::wake_ups::WakeUps;
use crate::memory::Regions;

/// Bytes that a lane may move in each direction before the others get their turn.
const LANE_BUDGET: usize = 1 << 20;
/// Peers or lanes in the tables before any that has ended is freed.
const FREE_FROM: usize = 16;

/// Everything in motion: the tables, the lanes, direct copies, and what they want done without the lock.
///
/// After every call into the protocol ([`Peer`]) the endpoint must be settled ([`Transfers::settle`]): the protocol's
/// decisions are queued until then.
pub(crate) struct Transfers {
    pub(super) tables: Tables,
    pub(super) gpu: GpuMemory,
    pub(super) polled: PolledLanes,
    pub(super) direct: DirectCopies,
    pub(super) wake_ups: WakeUps,
    pub(super) deferred: Deferred,
    /// Peers or lanes in the tables from which on those that have ended are freed.
    free_at: usize,
    pub(super) left: LeftMessages,
    /// The log warns of peers that end with operations in flight.
    pub(crate) warns_of_ends: bool,
}

/// A lost rail, for the thread that redials it.
#[derive(Clone, Debug)]
pub(crate) struct LostRail {
    pub(crate) endpoint: EndpointId,
    pub(crate) rail: u16,
    pub(crate) channel: u16,
    /// Its loss was logged as a warning.
    pub(crate) reported: bool,
    /// How many times in a row it was lost soon after it had come up, this time included.
    pub(crate) short_lived: u32,
}

/// A connection for messages over a rail that is faster than that of the present one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Move {
    pub(crate) endpoint: EndpointId,
    pub(crate) rail: u16,
    /// Channel of both lanes, the present one and the new one.
    pub(crate) channel: u16,
}

/// Work that is done without the lock.
#[derive(Default)]
pub(crate) struct Deferred {
    /// Lanes that owe something and are silent.
    pub(crate) suspects: Vec<(EndpointId, LaneId)>,
    pub(crate) lost: Vec<LostRail>,
    /// Endpoints that have ended, whose control connections are to be closed.
    pub(crate) ended: Vec<EndpointId>,
    /// Endpoints with enough traffic to justify more connections.
    pub(crate) outgrown: Vec<EndpointId>,
    /// Connections for messages over faster rails.
    pub(crate) moves: Vec<Move>,
}

/// What [`Transfers::poll_lane`] did.
pub(super) enum PollResult {
    Moved,
    Idle,
    Ended,
}

struct PolledSink<'a> {
    data: DataPath<'a>,
    endpoint: EndpointId,
    /// Whether there is anything to send; most polls find nothing and should cost nothing.
    wants: bool,
    fault: Option<String>,
}

impl Sink for PolledSink<'_> {
    #[inline]
    fn wants(&self) -> bool {
        self.wants
    }

    #[inline]
    fn next(&mut self, lane: LaneId) -> Option<Tx> {
        if self.wants { self.data.next(self.endpoint, lane) } else { None }
    }

    #[inline]
    fn sent(&mut self, lane: LaneId, token: u64) {
        self.data.sent(lane, token);
    }

    #[inline]
    fn place(&mut self, lane: LaneId, head: &Head) -> Place {
        self.data.place(self.endpoint, lane, head)
    }

    #[inline]
    fn placed(&mut self, lane: LaneId, token: u64) {
        if let Err(why) = self.data.placed(self.endpoint, lane, token) {
            self.fail(why);
        }
    }

    fn returned(&mut self) {
        self.data.tables.operations.settle_returns();
    }
}

impl PolledSink<'_> {
    #[cold]
    fn fail(&mut self, why: String) {
        self.fault.get_or_insert(why);
    }
}

impl Transfers {
    pub(super) fn new(tables: Tables, gpu: GpuMemory) -> Transfers {
        Transfers {
            tables,
            gpu,
            polled: PolledLanes::new(),
            direct: DirectCopies::default(),
            wake_ups: WakeUps::default(),
            deferred: Deferred::default(),
            free_at: FREE_FROM,
            left: LeftMessages::default(),
            warns_of_ends: true,
        }
    }

    /// What lanes ask for while they are polled.
    #[inline]
    pub(crate) fn data(&mut self) -> DataPath<'_> {
        DataPath { tables: &mut self.tables, gpu: &mut self.gpu }
    }

    pub(crate) fn lanes(&mut self) -> &mut Lanes {
        &mut self.tables.lanes
    }

    pub(crate) fn polled(&mut self) -> &mut PolledLanes {
        &mut self.polled
    }

    pub(crate) fn regions(&mut self) -> &mut Regions {
        &mut self.tables.regions
    }

    pub(crate) fn gpu(&mut self) -> &mut GpuMemory {
        &mut self.gpu
    }

    /// Polls the lane at that position; whether anything moved, or `None` if there is no such lane. `sockets`: poll
    /// sockets too; `collect`: read the peer's count of delivered messages if nothing moved. An error ends the lane,
    /// and the next one takes its position.
    #[inline]
    pub(super) fn poll_lane(&mut self, at: usize, sockets: bool, collect: bool) -> Option<PollResult> {
        let polled = self.polled.at(at)?;
        let (endpoint, id) = (polled.endpoint, polled.id);
        let probe = sockets || !polled.socket;
        let wants = wants(&self.tables, endpoint, id);
        let data = DataPath { tables: &mut self.tables, gpu: &mut self.gpu };
        let mut sink = PolledSink { data, endpoint, wants, fault: None };
        let result = polled.lane.poll(&mut sink, LANE_BUDGET, probe);
        let moved = match (&result, &sink.fault) {
            (Ok(moved), None) => *moved,
            _ => {
                let error = sink.fault.map(LaneError::Protocol).or(result.err());
                return Some(error.map_or(PollResult::Idle, |error| self.end_polled(at, &error)));
            }
        };
        if moved {
            polled.used = true;
            self.settle(endpoint);
            return Some(PollResult::Moved);
        }
        if wants {
            self.flush(endpoint);
        }
        let collected = collect && self.collect_count(endpoint);
        Some(if collected { PollResult::Moved } else { PollResult::Idle })
    }

    /// The lane at that position has failed.
    #[cold]
    fn end_polled(&mut self, at: usize, error: &LaneError) -> PollResult {
        let lane = self.polled.remove(at);
        let (endpoint, id) = (lane.endpoint, lane.id);
        self.settle(endpoint);
        self.direct.close_lane(&mut self.tables, &mut self.gpu, lane);
        self.lane_lost(endpoint, id, error);
        PollResult::Ended
    }

    /// Has every peer send a wake-up with its next frame, because no thread will poll. False: there is work already.
    pub(crate) fn arm(&mut self) -> bool {
        for at in 0..self.polled.len() {
            if let Some(endpoint) = self.polled.at(at).map(|polled| polled.endpoint) {
                self.collect_count(endpoint);
            }
        }
        self.polled.arm()
    }

    /// Acts on everything that the protocol has decided for one peer, and sends what it wants sent.
    #[inline]
    pub(crate) fn settle(&mut self, endpoint: EndpointId) {
        if self.wake_ups.is_observed() {
            self.tables.operations.report();
        }
        let Tables { operations, peers, lanes, .. } = &mut self.tables;
        let Some(peer) = peers.get_mut(endpoint) else { return };
        let Some(id) = peer.message_lane() else { return self.settle_all(endpoint) };
        let usual = UsualLane { endpoint, lane: id, names: peer.names() };
        while let Some(short) = peer.protocol.short() {
            if !operations.finish_short(&usual, &short) {
                operations.deliver_later(endpoint, &{ short });
                return self.settle_all(endpoint);
            }
        }
        let more = operations.has_delivered() | peer.protocol.has_events() | !peer.bulk().is_empty();
        if more || peer.protocol.has_urgent(id) {
            return self.settle_all(endpoint);
        }
        publish_count(peer, lanes, &mut self.polled, id);
    }

    /// [`Transfers::settle`], which looks at everything.
    #[inline(never)]
    fn settle_all(&mut self, endpoint: EndpointId) {
        for (endpoint, short) in self.tables.operations.take_delivered() {
            self.apply(endpoint, short.into());
        }
        self.apply_events(endpoint);
        for endpoint in self.tables.hosted.take_refused() {
            self.return_credit(endpoint);
        }
        self.settle_lanes(endpoint);
    }

    /// Sends what the protocol wants sent to one peer.
    fn settle_lanes(&mut self, endpoint: EndpointId) {
        let Some(peer) = self.tables.peers.get(endpoint) else { return };
        let has_connections = !peer.bulk().is_empty();
        if let Some(id) = peer.message_lane() {
            if peer.protocol.has_urgent(id) {
                self.flush(endpoint);
                self.wake_ups.after_flush();
            }
            let Tables { peers, lanes, .. } = &mut self.tables;
            if let Some(peer) = peers.get_mut(endpoint) {
                publish_count(peer, lanes, &mut self.polled, id);
            }
        }
        if has_connections {
            self.notify_connections(endpoint);
        }
    }

    /// [`Transfers::settle`] after something arrived while, perhaps, no caller makes progress: then no later message
    /// would soon carry the acknowledgements that may ride along with one. The background thread may sleep by timers
    /// that it read before they were owed, or, on a busy machine, run long after the thread that it has just woken.
    pub(crate) fn settle_aside(&mut self, endpoint: EndpointId) {
        self.settle(endpoint);
        if (self.polled.is_armed() || !self.wake_ups.is_polling())
            && let Some(peer) = self.tables.peers.get_mut(endpoint)
        {
            peer.protocol.flush();
            self.settle(endpoint);
        }
    }

    /// Hands the peer's messages to its message lane, as far as that has room.
    #[inline]
    fn flush(&mut self, endpoint: EndpointId) {
        let tables = &mut self.tables;
        let Some(id) = tables.peers.get(endpoint).and_then(|peer| peer.message_lane()) else { return };
        let Some(at) = self.polled.position(id) else { return };
        if tables.lanes.get(id).is_some_and(|lane| lane.chunks.is_staging()) {
            // Chunks of GPU memory are sent in turns: the lane asks for the next frame when it is polled.
            self.wake_ups.queue_chunk();
            return;
        }
        let Some(lane) = self.polled.get_mut(id) else { return };
        let data = DataPath { tables: &mut self.tables, gpu: &mut self.gpu };
        let mut sink = PolledSink { data, endpoint, wants: true, fault: None };
        if lane.push(&mut sink, LANE_BUDGET) {
            return;
        }
        let Transfers { tables, gpu, .. } = self;
        let mut failed = None;
        while tables.lanes.get(id).is_some_and(|lane| !lane.has_pending()) {
            let now = tables.clock.now();
            let Some(peer) = tables.peers.get_mut(endpoint).filter(|peer| peer.protocol.wants(id)) else { break };
            let Some(out) = peer.protocol.next(now, id) else { break };
            if out.chunk {
                tables.trace_sent(endpoint, id, &out);
            }
            if out.chunk && gpu.stage(tables, endpoint, id, &out) {
                self.wake_ups.queue_chunk();
                break;
            }
            let Some(mut tx) = tables.frame(endpoint, id, &out) else { continue };
            match lane.post(&tx) {
                Ok(Post::Held) => {}
                Ok(Post::Taken) => {
                    if tx.token != 0
                        && let Some(lane) = tables.lanes.get_mut(id)
                    {
                        lane.release(tx.token);
                    }
                }
                Ok(Post::Full) => {
                    tables.keep(endpoint, id, &out.body, &mut tx);
                    if let Some(lane) = tables.lanes.get_mut(id) {
                        lane.set_pending(tx);
                    }
                }
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        if let Some(error) = failed {
            let lane = self.polled.remove(at);
            self.direct.close_lane(&mut self.tables, &mut self.gpu, lane);
            self.lane_lost(endpoint, id, &error);
        }
    }

    /// Notifies the connections outside the lock that there is something for them.
    #[inline]
    fn notify_connections(&mut self, endpoint: EndpointId) {
        let Some(peer) = self.tables.peers.get(endpoint) else { return };
        for lane in peer.bulk() {
            // One that has as many chunks ahead as it may asks for more when those have been sent.
            let full = self.tables.lanes.get(lane.id).is_some_and(|record| record.chunks.is_full());
            let protocol = &peer.protocol;
            let wanted = if full { protocol.wants_but_chunks(lane.id) } else { protocol.wants(lane.id) };
            if wanted {
                lane.want();
                self.wake_ups.want_connections();
            }
        }
    }

    pub(super) fn apply_events(&mut self, endpoint: EndpointId) {
        while let Some(event) = self.tables.peers.get_mut(endpoint).and_then(|peer| peer.protocol.event()) {
            self.apply(endpoint, event);
        }
        // Mails have arrived, or credit for notices has.
        if self.tables.peers.get(endpoint).is_some_and(|peer| peer.outbox.waits()) {
            self.begin_waiting(endpoint);
        }
    }

    fn apply(&mut self, endpoint: EndpointId, event: Event) {
        let Transfers { tables, gpu, .. } = self;
        match event {
            Event::Done { op, result, progress, tag } => {
                if let Some(cursor) = tables.operations.op_mut(op).and_then(|op| op.take_cursor())
                    && let Some(lane) = tables.peers.get(endpoint).and_then(|peer| peer.message_lane())
                {
                    self.direct.close_cursor(lane, cursor);
                }
                if tables.operations.op(op).is_some_and(Op::is_on_gpu) {
                    gpu.release(tables, endpoint, |memory| *memory == Memory::Op(op));
                }
                tables.finish(endpoint, op, result, progress, tag);
                self.mail_ended(endpoint, op);
            }
            Event::Deliver { arrival, op, len } => self.deliver(endpoint, arrival, op, len),
            Event::DropArrival { arrival } => {
                if let Some(peer) = tables.peers.get_mut(endpoint) {
                    peer.drop_arrival(arrival, &mut tables.operations.returns);
                }
            }
            Event::Direct { job: id, memory, role, offer, len } => {
                self.begin_direct(direct::Request { endpoint, id, memory, role, offer, len });
            }
            Event::StopDirect { job } => self.direct.stop(endpoint, job),
            Event::Imm { region, imm } => tables.arrived(endpoint, region, imm),
            Event::Revoke { memory: Memory::Op(op) } => {
                tables.operations.recall(op);
            }
            Event::Revoke { memory: Memory::Region { passive, .. } } => {
                if let Some(peer) = tables.peers.get_mut(endpoint) {
                    peer.recall_access(passive);
                }
            }
            Event::Released { passive, region } => {
                let of = |memory: &Memory| matches!(memory, Memory::Region { passive: of, .. } if *of == passive);
                gpu.release(tables, endpoint, of);
                let returns = &mut tables.operations.returns;
                let kept = tables.peers.get_mut(endpoint).and_then(|peer| peer.end_access(passive, returns));
                if Hosted::is_lent(region) {
                    let memory = tables.hosted.released(region);
                    if let Some((memory, loan)) = memory.zip(kept) {
                        returns.await_loan(Owner::Memory(memory), loan);
                    }
                    self.return_credit(endpoint);
                }
            }
            Event::Acked { lane, chunks } => {
                tables.trace_acknowledged(lane, chunks);
                gpu.acked(tables, lane, chunks);
                if tables.peers.get_mut(endpoint).is_some_and(|peer| peer.protocol.outgrows()) {
                    self.deferred.outgrown.push(endpoint);
                    self.wake_ups.want_connections();
                }
                if tables.peers.get_mut(endpoint).is_some_and(|peer| peer.message_rail.counts()) {
                    self.look_at_rates(endpoint);
                }
            }
            Event::Suspect { lane } => {
                tables.lanes.get_mut(lane).into_iter().for_each(|lane| lane.stalls += 1);
                self.deferred.suspects.push((endpoint, lane));
                self.wake_ups.want_connections();
            }
            Event::LaneLost { lane, requeued_chunks, requeued_bytes } => {
                note_lost_lane(tables, endpoint, lane, (requeued_chunks, requeued_bytes));
            }
            Event::Broken { why } => self.kill(endpoint, &why, None),
            Event::Bye => {
                if let Some(peer) = tables.peers.get_mut(endpoint) {
                    peer.end("the peer closed the connection", Some(Reason::Closed));
                }
                tables.operations.report();
            }
        }
    }

    /// An unexpected message is copied into its receive.
    fn deliver(&mut self, endpoint: EndpointId, arrival: u32, id: OpId, len: u32) {
        let Transfers { tables, gpu, .. } = self;
        let returns = &mut tables.operations.returns;
        let Some(bytes) = tables.peers.get_mut(endpoint).and_then(|peer| peer.take_arrival(arrival, returns)) else {
            return;
        };
        let Some(op) = tables.operations.op(id) else { return };
        let bytes = &bytes[..bytes.len().min(op.len()).min(len as usize)];
        let Some(ordinal) = op.ordinal() else {
            // SAFETY: `op.ptr()` is valid for `op.len()` bytes until the operation is finished.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), op.ptr(), bytes.len()) };
            return;
        };
        if let Err(why) = gpu.copy_in(ordinal, op.ptr() as u64, bytes) {
            tables.fail_memory(endpoint, Memory::Op(id), why);
        }
    }

    fn begin_direct(&mut self, request: direct::Request) {
        let endpoint = request.endpoint;
        let mut context = direct::Context { tables: &mut self.tables, gpu: &mut self.gpu, polled: &mut self.polled };
        match self.direct.begin(&mut context, request) {
            Started::Done => {}
            Started::Copying => {
                if self.polled.is_armed() {
                    self.wake_ups.want_driver();
                }
            }
            Started::Lent(passed) => {
                if let Err(failed) = passed {
                    self.drop_noted(&failed);
                }
                // At once: dozens of copies may be queued behind this one, each of which asks the driver, and the
                // peer's links are idle until it knows of this one.
                self.flush(endpoint);
            }
        }
    }

    pub(super) fn step_direct(&mut self) -> bool {
        let mut context = direct::Context { tables: &mut self.tables, gpu: &mut self.gpu, polled: &mut self.polled };
        let (moved, ended) = self.direct.step(&mut context, self.wake_ups.is_crowded());
        for endpoint in ended {
            self.settle(endpoint);
        }
        moved
    }

    pub(super) fn pass_notes(&mut self, endpoint: EndpointId) {
        if let Err(failed) = self.gpu.pass_notes(&self.tables, &mut self.polled, endpoint) {
            self.drop_noted(&failed);
        }
    }

    /// Exchanges notes about GPU memory with all peers; whether there were any. `pass`: whether anything moved in it,
    /// and its number.
    pub(crate) fn exchange_notes(&mut self, pass: (bool, u32)) -> bool {
        match self.gpu.exchange_notes(&self.tables, &mut self.polled, pass) {
            Ok(any) => any,
            Err(failed) => {
                self.drop_noted(&failed);
                true
            }
        }
    }

    /// Asks for a connection for messages over a faster rail, if one is known to be.
    #[cold]
    pub(super) fn look_at_rates(&mut self, endpoint: EndpointId) {
        let tables = &mut self.tables;
        let now = tables.clock.now();
        let Some(peer) = tables.peers.get_mut(endpoint).filter(|peer| peer.bulk().len() > 1) else { return };
        let rail_of = |id| tables.lanes.get(id).and_then(|lane| lane.rail());
        let Some((present, channel)) = peer.message_lane().and_then(rail_of) else { return };
        let mut rates: Vec<(u16, u64)> = Vec::new();
        for lane in peer.bulk() {
            let Some((rail, _)) = rail_of(lane.id) else { continue };
            let rate = peer.protocol.load(lane.id).map_or(0, |load| load.rate);
            match rates.iter_mut().find(|(known, _)| *known == rail) {
                Some((_, sum)) => *sum += rate,
                None => rates.push((rail, rate)),
            }
        }
        if let Some(rail) = peer.message_rail.choose(now, present, &rates) {
            self.deferred.moves.push(Move { endpoint, rail, channel });
            self.wake_ups.want_connections();
        }
    }

    /// Adds a peer. `reach`: how its GPU memory can be reached.
    pub(crate) fn add_peer(&mut self, config: proto::Config, name: &str, generation: u64, reach: Reach) -> EndpointId {
        self.free_ended();
        let id = self.tables.peers.reserve();
        self.tables.hosted.begin(id, name, generation);
        self.tables.peers.add(Peer::new(proto::Peer::new(id, config), name, generation));
        self.gpu.set_reach(id, reach);
        id
    }

    /// Frees the peers that have ended and that nothing refers to, and the records of lanes that have. Each pass over
    /// the tables is paid for by as many peers or lanes that were added since the last.
    fn free_ended(&mut self) {
        let Tables { peers, lanes, operations, .. } = &mut self.tables;
        if peers.len().max(lanes.len()) < self.free_at {
            return;
        }
        let named = operations.endpoints();
        for id in peers.ids() {
            if !named.contains(&id) && peers.get(id).is_some_and(Peer::is_over) && !self.direct.is_with(id) {
                peers.remove(id);
                self.gpu.forget_peer(id);
            }
        }
        // Receipts of a peer's operations name the lanes that it had then.
        let rests = |peer: &Peer| !peer.has_operations() && !named.contains(&peer.protocol.id());
        lanes.free_ended(|owner| peers.get(owner).is_none_or(rests));
        self.free_at = 2 * peers.len().max(lanes.len()) + FREE_FROM;
    }

    /// Adds a lane that is polled under the lock, with a reserved id. `socket`: polling it costs a system call. False:
    /// the peer has ended.
    pub(crate) fn add_polled_lane(
        &mut self,
        endpoint: EndpointId,
        lane: Box<dyn Lane>,
        record: LaneRecord,
        spec: proto::LaneSpec,
        socket: bool,
    ) -> bool {
        let (id, name) = (lane.id(), record.name().clone());
        let rests = record.rests();
        self.free_ended();
        let tables = &mut self.tables;
        let now = tables.clock.read();
        let Some(peer) = tables.peers.get_mut(endpoint).filter(|peer| peer.is_alive()) else {
            tables.lanes.abandon(id);
            return false;
        };
        tables.lanes.insert(now, id, endpoint, record);
        peer.add_lane(now, spec, None);
        peer.set_message_lane(id, &name);
        self.polled.add(PolledLane { id, endpoint, lane, socket, rests, used: true });
        self.settle(endpoint);
        if !self.polled.arm_added(id) {
            self.wake_ups.want_driver();
        }
        true
    }

    /// Adds a lane that is polled outside the lock, with a reserved id. False: the peer has ended.
    pub(crate) fn add_bulk_lane(&mut self, bulk: &Arc<BulkLane>, record: LaneRecord, spec: proto::LaneSpec) -> bool {
        self.free_ended();
        let tables = &mut self.tables;
        let now = tables.clock.read();
        let peer = tables.peers.get_mut(bulk.endpoint).filter(|peer| peer.is_alive());
        let Some(peer) = peer else {
            tables.lanes.abandon(bulk.id);
            return false;
        };
        tables.lanes.insert(now, bulk.id, bulk.endpoint, record);
        peer.add_lane(now, spec, Some(bulk.clone()));
        self.settle(bulk.endpoint);
        true
    }
}

/// Records the chunks of a lost lane that go over the others.
fn note_lost_lane(tables: &mut Tables, endpoint: EndpointId, lane: LaneId, (chunks, bytes): (u32, u64)) {
    tables.trace_acknowledged(lane, u32::MAX);
    tables.lanes.get_mut(lane).into_iter().for_each(|lane| lane.resent_chunks += u64::from(chunks));
    let (name, now) = (tables.lanes.name(lane), tables.clock.now());
    if let Some(peer) = tables.peers.get_mut(endpoint).filter(|_| chunks > 0) {
        peer.note(now, format!("lane {name} lost; {chunks} chunks ({bytes} bytes) went over the others"));
    }
}
