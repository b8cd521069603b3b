//! Operations, peers, lanes and regions: the tables that the protocol's ids refer to.
#![allow(unsafe_code)]

mod tracing;

use std::os::fd::RawFd;
use std::sync::Arc;

use crossrail_proto as proto;
use crossrail_shm::Arena;
use crossrail_sight::trace::EventKind;
use crossrail_transport::{Loan, Payload, Tx};
use crossrail_types::{EndpointId, Error, ErrorKind, LaneId, Log, OpId, Reason};
use proto::{Body, Memory, RegionRef, Time};

pub(in crate::core) use self::tracing::Staged;
use self::tracing::Tracing;
use super::clock::Clock;
use super::lanes::Lanes;
use super::operations::{Op, Operations};
use super::outcome::{Finish, More, OpKind};
use super::peers::Peers;
use super::rows::hosted::Hosted;
use super::totals::Totals;
use crate::memory::{Regions, check_mapped};

/// Payloads from here on are looked up in the arena, so that a lane may use sendfile.
const FILE_MIN: usize = 16 << 10;

/// See the module. Protected by the worker's lock.
pub(crate) struct Tables {
    pub(super) clock: Clock,
    pub(super) log: Log,
    pub(super) arena: Arc<Arena>,
    pub(super) operations: Operations,
    pub(super) matcher: proto::Matcher,
    pub(super) regions: Regions,
    /// What peers have told of lists.
    pub(super) hosted: Hosted,
    pub(super) peers: Peers,
    pub(super) lanes: Lanes,
    pub(super) totals: Totals,
    tracing: Option<Tracing>,
}

/// Where memory is: its first byte, the bytes it has, and the ordinal of the GPU that owns it (`None`: host memory).
pub(super) type Extent = (*mut u8, u64, Option<u32>);

impl Tables {
    pub(super) fn new(log: Log, arena: Arc<Arena>) -> Tables {
        Tables {
            clock: Clock::new(),
            log,
            arena,
            operations: Operations::default(),
            matcher: proto::Matcher::new(),
            regions: Regions::default(),
            hosted: Hosted::default(),
            peers: Peers::default(),
            lanes: Lanes::default(),
            totals: Totals::default(),
            tracing: None,
        }
    }

    /// The memory that the protocol names; `None`: it does not exist any more, or is [a list](Tables::part).
    #[inline]
    pub(super) fn extent(&self, memory: Memory) -> Option<Extent> {
        match memory {
            Memory::Op(op) => {
                let op = self.operations.op(op)?;
                // Rows have no address of their own.
                let is_rows = op.ptr().is_null() && op.part().is_some();
                (!is_rows).then(|| (op.ptr(), op.len() as u64, op.ordinal()))
            }
            Memory::Region { region, base, .. } if Hosted::is_lent(region) => self.lent(region, base),
            Memory::Region { region, base, .. } => {
                let (ptr, len, gpu) = self.regions.memory(region)?;
                (base <= len).then(|| (ptr.wrapping_add(base as usize), len - base, gpu))
            }
        }
    }

    /// The loan by which lanes outside the lock touch that memory.
    pub(super) fn loan(&mut self, endpoint: EndpointId, memory: Memory) -> Option<Arc<Loan>> {
        match memory {
            Memory::Op(op) => self.operations.op_mut(op).map(|op| op.loan()),
            Memory::Region { region, passive, .. } => Some(self.peers.get_mut(endpoint)?.access_loan(passive, region)),
        }
    }

    /// Keeps a region marked as in use until the protocol ends the access. Nothing to do for an operation's memory.
    pub(super) fn hold_region(&mut self, endpoint: EndpointId, memory: Memory) {
        if let Memory::Region { .. } = memory {
            self.loan(endpoint, memory);
        }
    }

    /// Whether a single copy costs less than carrying the bytes: it does for long messages, and from smaller sizes on
    /// where the peer maps the memory.
    #[inline]
    pub(super) fn copies_directly(&self, lane: LaneId, ptr: *const u8, len: usize) -> bool {
        let mapped = || self.arena.find(ptr, len).is_some();
        self.lanes.get(lane).is_some_and(|lane| lane.copies_directly(len, mapped))
    }

    /// Those bytes as a range of a memfd, if they are one and long enough.
    pub(super) fn file(&self, ptr: *const u8, len: usize) -> Option<(RawFd, u64)> {
        let segment = if len >= FILE_MIN { self.arena.find(ptr, len) } else { None };
        segment.map(|segment| (segment.fd, segment.offset))
    }

    /// A frame of the protocol as a lane carries it. Inline bytes are referenced where they are in `out`.
    #[inline]
    pub(super) fn frame(&mut self, endpoint: EndpointId, lane: LaneId, out: &proto::Out) -> Option<Tx> {
        let payload = match &out.body {
            Body::None => Payload::EMPTY,
            Body::Inline { bytes, len } => Payload { ptr: bytes.as_ptr(), len: usize::from(*len), ..Payload::EMPTY },
            Body::Memory { memory, offset, len } => {
                let Some((ptr, have, gpu)) = self.extent(*memory) else {
                    return self.frame_of_rows(endpoint, lane, out);
                };
                let end = offset.checked_add(u64::from(*len))?;
                if end > have || (gpu.is_some() && *len > 0) {
                    return None;
                }
                // SAFETY: inside the memory by the check above.
                let ptr = unsafe { ptr.add(*offset as usize) }.cast_const();
                let len = *len as usize;
                let mut payload = Payload { ptr, len, ..Payload::EMPTY };
                if !self.lanes.get(lane)?.is_reliable() {
                    payload.grant = self.loan(endpoint, *memory);
                    payload.file = self.file(ptr, len);
                }
                payload
            }
        };
        Some(Tx { head: out.head, payload, token: 0 })
    }

    /// Makes `tx` outlive the call that created it: inline bytes are copied, the user's memory is lent.
    pub(super) fn keep(&mut self, endpoint: EndpointId, lane: LaneId, body: &Body, tx: &mut Tx) {
        match body {
            Body::Inline { bytes, len } => {
                if let Some(lane) = self.lanes.get_mut(lane) {
                    (tx.payload, tx.token) = lane.hold(&bytes[..usize::from(*len)]);
                }
            }
            Body::Memory { memory, .. } if tx.payload.grant.is_none() => {
                tx.payload.grant = self.loan(endpoint, *memory);
            }
            _ => {}
        }
    }

    /// A frame that outlives the call; `None` if its memory does not exist any more. That cannot happen while
    /// operations end only through the protocol; the frame is dropped then, and the operation's own end reports it.
    pub(super) fn kept_frame(&mut self, endpoint: EndpointId, lane: LaneId, out: &proto::Out) -> Option<Tx> {
        let Some(mut tx) = self.frame(endpoint, lane, out) else {
            self.log.error(format_args!("dropped a frame whose memory is no longer registered"));
            return None;
        };
        self.keep(endpoint, lane, &out.body, &mut tx);
        Some(tx)
    }

    /// Fails whatever the protocol does with that memory.
    pub(super) fn fail_memory(&mut self, endpoint: EndpointId, memory: Memory, why: String) {
        let now = self.clock.now();
        if let Some(peer) = self.peers.get_mut(endpoint) {
            peer.protocol.fail(now, memory, why);
        }
    }

    /// Memory in use with that peer of which a part is not mapped any more: that of our operations, and of the peer's
    /// accesses.
    pub(super) fn unmapped(&self, endpoint: EndpointId) -> Vec<Memory> {
        let is_gone = |at: *mut u8, len: u64| check_mapped("access", at as usize, len as usize).is_err();
        let is_region_gone = |region: &RegionRef| {
            self.regions.memory(*region).is_some_and(|(at, len, gpu)| gpu.is_none() && is_gone(at, len))
        };
        let gone = |(id, op): (OpId, &Op)| {
            if op.is_on_gpu() || op.endpoint().is_some_and(|of| of != endpoint) {
                return None;
            }
            let own = !op.ptr().is_null() && is_gone(op.ptr(), op.len() as u64);
            (own || op.over().iter().any(is_region_gone)).then_some(Memory::Op(id))
        };
        let mut found: Vec<Memory> = self.operations.in_flight(usize::MAX).filter_map(gone).collect();
        if let Some(peer) = self.peers.get(endpoint) {
            found.extend(peer.accesses().filter_map(|(access, region)| {
                let view = self.hosted.view(region).map(|view| view.regions());
                let regions = view.unwrap_or(std::slice::from_ref(&region));
                regions.iter().any(is_region_gone).then(|| peer.protocol.accessed(access))?
            }));
        }
        found
    }

    // ---- the ends of operations

    /// Ends an operation as the protocol says.
    pub(super) fn finish(
        &mut self,
        endpoint: EndpointId,
        id: OpId,
        result: Result<proto::Receipt, proto::Failure>,
        progress: u64,
        tag: u64,
    ) {
        let outcome = match result {
            Ok(mut receipt) => {
                let Some(op) = self.operations.op(id) else { return };
                receipt.bytes = op.moved(receipt.bytes);
                let tag = if op.kind() == OpKind::Receive { tag } else { op.tag() };
                let (kind, bytes, wire_ns, lane) = (op.kind(), receipt.bytes, receipt.wire_ns, receipt.lane);
                let more = (receipt.protocol != proto::Protocol::Eager).then(|| {
                    self.totals.add(&receipt);
                    let took = receipt.window_ns + receipt.wire_ns;
                    self.trace_ended(endpoint, EventKind::Operation(kind.name()), took, bytes);
                    let notes = self.notes_during(endpoint, &receipt);
                    Box::new(More { receipt, direct: None, times: None, notes, batch: None })
                });
                Ok(Finish { endpoint: Some(endpoint), names: None, tag, bytes, wire_ns, lane, more })
            }
            Err(failure) => Err(Box::new(self.failure(endpoint, id, &failure, progress))),
        };
        if let Some(op) = self.operations.op_mut(id) {
            op.set_endpoint(endpoint);
        }
        self.operations.finish(id, outcome);
    }

    /// What happened to the peer's lanes during a transfer.
    fn notes_during(&mut self, endpoint: EndpointId, receipt: &proto::Receipt) -> Vec<String> {
        if receipt.lanes.is_empty() {
            return Vec::new();
        }
        let took = receipt.match_ns + receipt.window_ns + receipt.wire_ns;
        let since = Time(self.clock.read().0.saturating_sub(took));
        self.peers.get(endpoint).map(|peer| peer.notes_since(since)).unwrap_or_default()
    }

    /// The reason of an error of that kind, as far as it is the peer's end.
    fn end_reason(&self, kind: ErrorKind, endpoint: EndpointId) -> Option<Reason> {
        self.peers.get(endpoint).filter(|_| kind == ErrorKind::PeerDead)?.end_reason()
    }

    #[cold]
    fn failure(&self, endpoint: EndpointId, id: OpId, failure: &proto::Failure, progress: u64) -> Error {
        let op = self.operations.op(id);
        let (what, total) = op.map_or(("request", 0), |op| (op.kind().name(), op.moved(op.len() as u64)));
        let progress = op.map_or(progress, |op| op.moved(progress));
        let (kind, hint) = match failure {
            proto::Failure::Truncated { message, .. } => {
                (ErrorKind::Truncated, Some(format!("receive it into a buffer of at least {message} bytes")))
            }
            proto::Failure::Cancelled => (ErrorKind::Cancelled, None),
            proto::Failure::Region(proto::RegionFault::Full) => {
                let hint = "have its program read notices, and drop layouts that are not used any more, then try again";
                (ErrorKind::Exhausted, Some(hint.to_owned()))
            }
            proto::Failure::Region(_) | proto::Failure::Withdrawn => (ErrorKind::Region, None),
            proto::Failure::Device(_) => {
                (ErrorKind::Io, Some("the endpoint and its other operations go on".to_owned()))
            }
            proto::Failure::PeerDead(_) => (ErrorKind::PeerDead, Some("operations with other peers go on".to_owned())),
            proto::Failure::Closed => (ErrorKind::Closed, None),
        };
        crossrail_sight::count_error(kind);
        let mut error = Error::new(kind, what, failure.to_string()).with_peer(self.peers.name(endpoint));
        error.reason = self.end_reason(kind, endpoint);
        if total > 0 && !matches!(failure, proto::Failure::Truncated { .. }) {
            error = error.with_progress(progress, total);
        }
        match hint {
            Some(hint) => error.with_hint(hint),
            None => error,
        }
    }

    /// Fails an operation that the protocol does not know, or does not know yet.
    pub(super) fn fail(&mut self, op: OpId, kind: ErrorKind, why: &str, endpoint: Option<EndpointId>) {
        let what = self.operations.op(op).map_or("request", |op| op.kind().name());
        crossrail_sight::count_error(kind);
        let mut error = Error::new(kind, what, why);
        if let Some(endpoint) = endpoint {
            error = error.with_peer(self.peers.name(endpoint));
            error.reason = self.end_reason(kind, endpoint);
        }
        self.operations.finish(op, Err(Box::new(error)));
    }
}
