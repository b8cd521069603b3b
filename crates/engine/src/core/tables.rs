//! What the worker's lock protects, but for the lanes polled under it: operations, peers, matching, regions, and
//! how the protocol's answers become pointers.
#![allow(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Instant;

use crossrail_proto as proto;
use crossrail_transport::{Grant, LaneCaps, Payload, Place, Tx};
use crossrail_types::{EndpointId, Error, ErrorKind, Head, LaneId, OpId};
use proto::{Body, Host, Memory, Placing, Time};
use slab::Slab;

use super::bulk_lane::BulkLane;
use super::gpu::{self, Beside, Gate, Reach, Staged, Staging};
use super::operations::{Finish, More, Ops};
use crate::memory::Regions;
use crossrail_types::Log;

/// Longest control payload the protocol asks room for.
const CONTROL_MAX: usize = 4096;
/// Events that receipts can still tell of.
const NOTES_MAX: usize = 64;
/// Payloads from here on are looked up in the arena, so that a lane may use sendfile.
const FILE_MIN: usize = 16 << 10;

/// What the engine keeps for one lane beside the lane itself. Dropped only after the lane.
pub(crate) struct LaneState {
    pub(crate) name: Arc<str>,
    pub(crate) transport: &'static str,
    pub(crate) rail: Option<(u16, u16)>,
    /// The interface it runs over, for link events.
    pub(crate) interface: Option<String>,
    pub(crate) caps: LaneCaps,
    /// Messages up to here go with their first frame.
    pub(crate) eager_max: usize,
    /// Those of memory that the peer can map are copied directly from here on.
    pub(crate) mapped_min: usize,
    pub(crate) alive: bool,
    /// A frame that a post found no room for, or a chunk that is packed; goes first when the lane asks.
    pub(crate) pending: Option<Tx>,
    /// Chunks that the protocol gave it, and those of them that the peer has consumed.
    pub(crate) given: u64,
    pub(crate) acked: u64,
    /// Chunks of GPU memory.
    pub(crate) staged: Option<Box<Staged>>,
    /// Payloads made here that the lane still reads, by token - 1.
    held: Slab<Box<[u8]>>,
    control: Box<[u8]>,
    control_len: usize,
    /// Bytes acknowledged when it was last suspected of being dead, if others were under way then.
    pub(crate) seen_acked: Option<u64>,
}

/// What receipts call a peer and the lane of its small messages: one count to keep on the hot path.
#[derive(Debug)]
pub(crate) struct Names {
    pub(crate) peer: String,
    pub(crate) inside: Arc<str>,
}

/// What the engine keeps for one peer.
pub(crate) struct PeerState {
    pub(crate) peer: proto::Peer,
    /// What receipts call it and the lane of its small messages.
    pub(crate) names: Arc<Names>,
    pub(crate) alive: bool,
    /// Why it is not, in the words of its errors.
    pub(crate) why_dead: String,
    /// The lane polled under the lock: shared memory, or the TCP connection for messages.
    pub(crate) inside: Option<LaneId>,
    pub(crate) bulk: Vec<Arc<BulkLane>>,
    pub(crate) lanes: Vec<LaneId>,
    /// Since when no lane is left, and how the last one ended: its process is there, and a rail may come back.
    pub(crate) stranded: Option<(Time, String)>,
    /// Lanes lost and other things a receipt should tell.
    notes: VecDeque<(Time, String)>,
    /// Warned that a direct copy was not possible.
    pub(crate) warned_direct: bool,
    /// The same of GPU memory.
    pub(crate) warned_gpu: bool,
    /// How its GPU memory is reached.
    pub(crate) reach: Reach,
    /// Operations that wait for memory of a GPU.
    pub(crate) gate: Gate,
    arrivals: HashMap<u32, Arrival>,
    passives: HashMap<u32, (proto::RegionRef, Arc<Grant>)>,
}

struct Arrival {
    bytes: Box<[u8]>,
    grant: Arc<Grant>,
}

/// See the module.
pub(crate) struct State {
    epoch: Instant,
    arena: Arc<crossrail_shm::Arena>,
    pub(crate) now: Time,
    pub(crate) log: Log,
    pub(crate) ops: Ops,
    pub(crate) matcher: proto::Matcher,
    pub(crate) regions: Regions,
    pub(crate) peers: Vec<Option<Box<PeerState>>>,
    pub(crate) lanes: Vec<Option<Box<LaneState>>>,
    /// GPU memory under way.
    pub(crate) staging: Staging,
    /// The message that a lane is placing whole.
    arriving: Option<proto::Short>,
    /// Receives whose messages are there and that have more to their end than most ([`Ops::finish_short`]).
    pub(crate) arrived: Vec<(EndpointId, proto::Short)>,
}

impl PeerState {
    pub(crate) fn new(peer: proto::Peer, name: &str) -> PeerState {
        PeerState {
            peer,
            names: Arc::new(Names { peer: name.to_owned(), inside: "".into() }),
            alive: true,
            why_dead: String::new(),
            inside: None,
            bulk: Vec::new(),
            lanes: Vec::new(),
            stranded: None,
            notes: VecDeque::new(),
            warned_direct: false,
            warned_gpu: false,
            reach: Reach::Not("only endpoints over shm can".to_owned()),
            gate: Gate::default(),
            arrivals: HashMap::new(),
            passives: HashMap::new(),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.names.peer
    }

    /// Makes `id` the lane polled under the lock.
    pub(crate) fn set_inside(&mut self, id: LaneId, name: Arc<str>) {
        self.inside = Some(id);
        self.names = Arc::new(Names { peer: self.names.peer.clone(), inside: name });
    }

    /// The grants of the peer's accesses to that region.
    pub(crate) fn passives_of(&self, region: proto::RegionRef) -> impl Iterator<Item = &Arc<Grant>> {
        self.passives.values().filter(move |(owner, _)| *owner == region).map(|(_, grant)| grant)
    }

    /// No lane may touch the memory of that access any more.
    pub(crate) fn revoke(&mut self, passive: u32) {
        if let Some((_, grant)) = self.passives.get(&passive) {
            grant.revoke();
        }
    }

    /// The access is over.
    pub(crate) fn release(&mut self, passive: u32) {
        if let Some((_, grant)) = self.passives.remove(&passive) {
            grant.revoke();
        }
    }

    /// Remembers what a receipt should tell.
    pub(crate) fn note(&mut self, now: Time, what: String) {
        if self.notes.len() == NOTES_MAX {
            self.notes.pop_front();
        }
        self.notes.push_back((now, what));
    }

    /// What happened since.
    pub(crate) fn notes_since(&self, since: Time) -> Vec<String> {
        self.notes.iter().filter(|(at, _)| *at >= since).map(|(_, what)| what.clone()).collect()
    }

    pub(crate) fn take_arrival(&mut self, arrival: u32) -> Option<Box<[u8]>> {
        let kept = self.arrivals.remove(&arrival)?;
        kept.grant.revoke();
        Some(kept.bytes)
    }

    fn passive_grant(&mut self, passive: u32, region: proto::RegionRef) -> Arc<Grant> {
        self.passives.entry(passive).or_insert_with(|| (region, Arc::default())).1.clone()
    }
}

impl LaneState {
    pub(crate) fn new(
        name: &str,
        transport: &'static str,
        rail: Option<(u16, u16)>,
        caps: LaneCaps,
        eager_max: usize,
    ) -> LaneState {
        LaneState {
            name: name.into(),
            transport,
            rail,
            interface: None,
            caps,
            eager_max,
            mapped_min: eager_max,
            alive: true,
            pending: None,
            given: 0,
            acked: 0,
            staged: None,
            held: Slab::new(),
            control: vec![0; CONTROL_MAX].into(),
            control_len: 0,
            seen_acked: None,
        }
    }

    /// The lane is no more, its object already dropped: receipts still ask for its name, nobody for its buffers.
    pub(crate) fn bury(&mut self) {
        self.alive = false;
        self.pending = None;
        self.staged = None;
        self.control = Box::default();
        self.control_len = 0;
    }

    fn sent(&mut self, token: u64) {
        if token & gpu::PACKED != 0 {
            self.sent_packed(token & !gpu::PACKED);
        } else if token > 0 {
            self.held.try_remove(token as usize - 1);
        }
    }

    /// Keeps `bytes` until the lane has sent them.
    pub(crate) fn hold(&mut self, bytes: &[u8]) -> (Payload, u64) {
        let key = self.held.insert(bytes.into());
        let held = &self.held[key];
        (Payload { ptr: held.as_ptr(), len: held.len(), file: None, grant: None }, key as u64 + 1)
    }
}

impl State {
    pub(crate) fn new(log: Log, arena: Arc<crossrail_shm::Arena>) -> State {
        State {
            epoch: Instant::now(),
            arena,
            now: Time(1),
            log,
            ops: Ops::default(),
            matcher: proto::Matcher::new(),
            regions: Regions::default(),
            peers: Vec::new(),
            lanes: Vec::new(),
            staging: Staging::default(),
            arriving: None,
            arrived: Vec::new(),
        }
    }

    /// Reads the clock.
    pub(crate) fn tick(&mut self) -> Time {
        self.now = Time(1 + self.epoch.elapsed().as_nanos() as u64);
        self.now
    }

    pub(crate) fn instant(&self, at: Time) -> Instant {
        self.epoch + std::time::Duration::from_nanos(at.0.saturating_sub(1))
    }

    #[inline]
    pub(crate) fn peer(&mut self, id: EndpointId) -> Option<&mut PeerState> {
        self.peers.get_mut(id.0 as usize)?.as_deref_mut()
    }

    #[inline]
    pub(crate) fn lane(&mut self, id: LaneId) -> Option<&mut LaneState> {
        self.lanes.get_mut(id.0 as usize)?.as_deref_mut()
    }

    /// The memory named by the protocol, from its first byte, with the bytes it has, and the GPU that it is of; `None`
    /// if it is gone.
    #[inline]
    pub(crate) fn span(&mut self, memory: Memory) -> Option<(*mut u8, u64, Option<u32>)> {
        match memory {
            Memory::Op(op) => self.ops.op(op).map(|op| (op.ptr, op.len as u64, op.ordinal())),
            Memory::Region { region, base, .. } => {
                let (ptr, len, gpu) = self.regions.memory(region)?;
                (base <= len).then(|| (ptr.wrapping_add(base as usize), len - base, gpu))
            }
        }
    }

    pub(crate) fn grant(&mut self, endpoint: EndpointId, memory: Memory) -> Option<Arc<Grant>> {
        match memory {
            Memory::Op(op) => self.ops.op_mut(op).map(|op| op.grant()),
            Memory::Region { region, passive, .. } => Some(self.peer(endpoint)?.passive_grant(passive, region)),
        }
    }

    /// Whether a single copy costs less than carrying the bytes: it does for long messages, and from smaller sizes on
    /// where the peer maps the memory.
    #[inline]
    pub(crate) fn copies_directly(&self, lane: LaneId, ptr: *const u8, len: usize) -> bool {
        let Some(Some(state)) = self.lanes.get(lane.0 as usize) else { return false };
        state.caps.direct && (len > state.eager_max || (len > state.mapped_min && self.arena.find(ptr, len).is_some()))
    }

    /// Those bytes as a range of a memfd, if they are one and enough.
    pub(crate) fn file(&self, ptr: *const u8, len: usize) -> Option<(RawFd, u64)> {
        let segment = if len >= FILE_MIN { self.arena.find(ptr, len) } else { None };
        segment.map(|segment| (segment.fd, segment.offset))
    }

    /// A frame of the protocol as a lane carries it. Inline bytes are referenced where they are in `out`.
    #[inline]
    pub(crate) fn tx(&mut self, endpoint: EndpointId, lane: LaneId, out: &proto::Out) -> Option<Tx> {
        let payload = match &out.body {
            Body::None => Payload::EMPTY,
            Body::Inline { bytes, len } => {
                Payload { ptr: bytes.as_ptr(), len: usize::from(*len), file: None, grant: None }
            }
            Body::Memory { memory, offset, len } => {
                let (ptr, have, gpu) = self.span(*memory)?;
                let end = offset.checked_add(u64::from(*len))?;
                if end > have || (gpu.is_some() && *len > 0) {
                    return None;
                }
                // SAFETY: inside the memory by the check above.
                let ptr = unsafe { ptr.add(*offset as usize) }.cast_const();
                let len = *len as usize;
                let mut payload = Payload { ptr, len, file: None, grant: None };
                if !self.lane(lane)?.caps.reliable {
                    payload.grant = self.grant(endpoint, *memory);
                    payload.file = self.file(ptr, len);
                }
                payload
            }
        };
        Some(Tx { head: out.head, payload, token: 0 })
    }

    /// Makes `tx` outlive the call that made it: inline bytes are kept, the user's get a grant.
    pub(crate) fn keep(&mut self, endpoint: EndpointId, lane: LaneId, body: &Body, tx: &mut Tx) {
        match body {
            Body::Inline { bytes, len } => {
                if let Some(lane) = self.lane(lane) {
                    (tx.payload, tx.token) = lane.hold(&bytes[..usize::from(*len)]);
                }
            }
            Body::Memory { memory, .. } if tx.payload.grant.is_none() => {
                tx.payload.grant = self.grant(endpoint, *memory);
            }
            _ => {}
        }
    }

    /// Whether that lane has anything to carry.
    #[inline]
    pub(crate) fn wants(&self, endpoint: EndpointId, lane: LaneId) -> bool {
        let pending = self.lanes.get(lane.0 as usize).and_then(Option::as_ref).is_some_and(|l| l.pending.is_some());
        let peer = self.peers.get(endpoint.0 as usize).and_then(Option::as_ref);
        pending || peer.is_some_and(|peer| peer.peer.wants(lane))
    }

    /// Whether messages to that peer wait for its count.
    #[inline]
    pub(crate) fn awaits_count(&self, endpoint: EndpointId) -> bool {
        let peer = self.peers.get(endpoint.0 as usize).and_then(Option::as_ref);
        peer.is_some_and(|peer| peer.peer.awaits_count())
    }

    /// `Sink::next` for any lane of `endpoint`.
    pub(crate) fn next(&mut self, endpoint: EndpointId, lane: LaneId) -> Option<Tx> {
        let state = self.lane(lane)?;
        if state.staged.is_some() {
            return self.next_staged(endpoint, lane);
        }
        if let Some(tx) = state.pending.take() {
            return Some(tx);
        }
        let now = self.now;
        loop {
            let out = self.peer(endpoint)?.peer.next(now, lane)?;
            if out.chunk && self.stage(endpoint, lane, &out) {
                return self.next_staged(endpoint, lane);
            }
            if let Some(mut tx) = self.tx(endpoint, lane, &out) {
                self.keep(endpoint, lane, &out.body, &mut tx);
                return Some(tx);
            }
            // The memory went away between the protocol's decision and now: cannot happen while operations end only
            // through the protocol; the frame is dropped and the operation's own end reports it.
            self.log.error(format_args!("a frame for memory that is gone was dropped"));
        }
    }

    /// `Sink::sent` for any lane.
    #[inline]
    pub(crate) fn sent(&mut self, lane: LaneId, token: u64) {
        if token != 0 {
            self.sent_held(lane, token);
        }
    }

    /// Of a frame whose bytes were kept for the lane.
    fn sent_held(&mut self, lane: LaneId, token: u64) {
        if let Some(state) = self.lane(lane) {
            state.sent(token);
        }
        if token & gpu::PACKED != 0 {
            self.supply_all();
        }
    }

    /// `Sink::place` for any lane of `endpoint`.
    #[inline]
    pub(crate) fn place(&mut self, endpoint: EndpointId, lane: LaneId, head: &Head) -> Place {
        let now = self.now;
        let Some(Some(peer)) = self.peers.get_mut(endpoint.0 as usize) else {
            return Place::Discard;
        };
        let mut host = Host { matcher: &mut self.matcher, regions: &mut self.regions };
        match peer.peer.place(now, lane, head, &mut host) {
            Placing::Message(short) => {
                let Some(op) = self.ops.op(short.op) else { return Place::Discard };
                let (dst, len) = (op.ptr, short.bytes as usize);
                self.arriving = Some(short);
                Place::Into { dst, len, grant: None, token: gpu::MESSAGE }
            }
            Placing::Memory { memory, offset, len, chunk } => {
                let Some((ptr, have, gpu)) = self.span(memory) else { return Place::Discard };
                if offset.checked_add(u64::from(len)).is_none_or(|end| end > have) {
                    return Place::Refuse(format!("{len} bytes at {offset} of a memory of {have} bytes"));
                }
                if let Some(gpu) = gpu {
                    let (dst, len) = (ptr as u64 + offset, len as usize);
                    return self.place_beside(endpoint, lane, Beside { memory, dst, gpu, len, chunk });
                }
                // What is placed whole is there before anybody else has the lock.
                let whole = self.lane(lane).is_some_and(|lane| len as usize <= lane.caps.whole_max);
                let grant = if whole { None } else { self.grant(endpoint, memory) };
                // SAFETY: inside the memory by the check above.
                let dst = unsafe { ptr.add(offset as usize) };
                Place::Into { dst, len: len as usize, grant, token: 0 }
            }
            Placing::Unexpected { arrival, len } => {
                let mut bytes: Box<[u8]> = vec![0; len as usize].into();
                let dst = bytes.as_mut_ptr();
                let grant = Arc::new(Grant::default());
                let kept = Arrival { bytes, grant: grant.clone() };
                if let Some(peer) = self.peer(endpoint)
                    && let Some(old) = peer.arrivals.insert(arrival, kept)
                {
                    old.grant.revoke();
                }
                Place::Into { dst, len: len as usize, grant: Some(grant), token: 0 }
            }
            Placing::Control { len } => match self.lane(lane) {
                Some(lane) if len as usize <= lane.control.len() => {
                    lane.control_len = len as usize;
                    Place::Into { dst: lane.control.as_mut_ptr(), len: len as usize, grant: None, token: gpu::CONTROL }
                }
                _ => Place::Refuse(format!("control frame of {len} bytes")),
            },
            Placing::Discard => Place::Discard,
            Placing::Refuse(why) => Place::Refuse(why),
        }
    }

    /// `Sink::placed` for any lane of `endpoint`; `Err` kills the lane.
    #[inline(always)]
    pub(crate) fn placed(&mut self, endpoint: EndpointId, lane: LaneId, token: u64) -> Result<(), String> {
        if token == gpu::MESSAGE {
            if let Some(short) = self.arriving.take()
                && !self.ops.finish_short(endpoint, short)
            {
                self.arrived.push((endpoint, short));
            }
            return Ok(());
        }
        if token > gpu::CONTROL && !self.placed_beside(endpoint, lane)? {
            return Ok(());
        }
        let now = self.now;
        let Some(Some(peer)) = self.peers.get_mut(endpoint.0 as usize) else { return Ok(()) };
        let mut host = Host { matcher: &mut self.matcher, regions: &mut self.regions };
        if token != gpu::CONTROL {
            return peer.peer.placed(now, lane, &[], &mut host);
        }
        let Some(Some(state)) = self.lanes.get(lane.0 as usize) else { return Ok(()) };
        peer.peer.placed(now, lane, &state.control[..state.control_len], &mut host)
    }

    /// What happened to the peer's lanes while the transfer was under way.
    fn notes_of(&mut self, endpoint: EndpointId, receipt: &proto::Receipt) -> Vec<String> {
        if receipt.lanes.is_empty() {
            return Vec::new();
        }
        let took = receipt.match_ns + receipt.window_ns + receipt.wire_ns;
        let since = Time(self.tick().0.saturating_sub(took));
        self.peer(endpoint).map(|peer| peer.notes_since(since)).unwrap_or_default()
    }

    /// Ends `op` as the protocol says.
    pub(crate) fn finish(
        &mut self,
        endpoint: EndpointId,
        id: OpId,
        result: Result<proto::Receipt, proto::Failure>,
        progress: u64,
        tag: u64,
    ) {
        let outcome = match result {
            Ok(receipt) => {
                let Some(op) = self.ops.op(id) else { return };
                let tag = if op.what == "recv" { tag } else { op.tag };
                let (bytes, wire_ns, lane) = (receipt.bytes, receipt.wire_ns, receipt.lane);
                let more = (receipt.protocol != proto::Protocol::Eager).then(|| {
                    let notes = self.notes_of(endpoint, &receipt);
                    Box::new(More { receipt, direct: None, times: None, notes, batch: false })
                });
                Ok(Finish { endpoint: Some(endpoint), tag, bytes, wire_ns, lane, more })
            }
            Err(failure) => Err(Box::new(self.failure(endpoint, id, &failure, progress))),
        };
        if let Some(op) = self.ops.op_mut(id) {
            op.endpoint = Some(endpoint);
        }
        self.ops.finish(id, outcome);
    }

    fn failure(&mut self, endpoint: EndpointId, id: OpId, failure: &proto::Failure, progress: u64) -> Error {
        let (what, total) = self.ops.op(id).map_or(("request", 0), |op| (op.what, op.len as u64));
        let (kind, hint) = match failure {
            proto::Failure::Truncated { message, .. } => {
                (ErrorKind::Truncated, Some(format!("receive it into a buffer of at least {message} bytes")))
            }
            proto::Failure::Cancelled => (ErrorKind::Cancelled, None),
            proto::Failure::Region(_) => (ErrorKind::Region, None),
            proto::Failure::Device(_) => {
                (ErrorKind::Io, Some("the endpoint and its other operations go on".to_owned()))
            }
            proto::Failure::PeerDead(_) => (ErrorKind::PeerDead, Some("operations with other peers go on".to_owned())),
            proto::Failure::Closed => (ErrorKind::Closed, None),
        };
        let peer = self.peer(endpoint).map_or_else(|| "?".to_owned(), |peer| peer.name().to_owned());
        let mut error = Error::new(kind, what, failure.to_string()).with_peer(peer);
        if total > 0 && !matches!(failure, proto::Failure::Truncated { .. }) {
            error = error.with_progress(progress, total);
        }
        match hint {
            Some(hint) => error.with_hint(hint),
            None => error,
        }
    }
}
