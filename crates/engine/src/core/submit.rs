//! Operations: how they start, are cancelled and abandoned.
#![allow(unsafe_code)]

use crossrail_proto as proto;
use crossrail_shm::Arena;
use crossrail_transport::{DirectKind, Lane, LaneError, Payload, Post, Tx};
use crossrail_types::{EndpointId, Error, ErrorKind, Head, LaneId, OpId, Result};
use proto::{Offer, Operation};

use super::gpu::Released;
use super::outcome::Submission;
use super::outcome::{OpKind, gone};
use super::peer_memory::create_domain;
use super::returns::Owner;
use super::tables::Tables;
use super::{Core, LaneRecord, Transfers};
use crate::memory::{Buffer, Space};

/// Minimum length from which both ends of a direct copy copy at once; for kernel copies (CMA), any length.
const HELP_MIN: u64 = 128 << 10;

impl Core {
    /// Submits an operation of host memory that can start at once, as most can. `Ok`: whether nothing has changed that
    /// other threads must hear of, too; the buffer keeps nothing any more. `None`: nothing was done;
    /// [`Core::submit_at_length`] does it.
    #[inline(always)]
    pub(crate) fn submit_now(
        &mut self,
        endpoint: Option<EndpointId>,
        submission: Submission,
        buffer: &mut Buffer,
    ) -> Option<(OpId, bool)> {
        if self.closed || buffer.gpu.is_some() || self.transfers.gpu.holds_back() {
            return None;
        }
        match (submission, endpoint) {
            (Submission::Receive { tag, mask }, _) => {
                let (operations, len) = (&mut self.transfers.tables.operations, buffer.len as u64);
                let op = operations.upcoming();
                operations.insert_plain(op, OpKind::Receive, (endpoint, tag), buffer);
                Some((op, self.post_receive(op, (len, true), tag, mask, endpoint)))
            }
            (Submission::Operation(Operation::Send { tag }), Some(to)) => self.send_now(to, tag, buffer),
            _ => None,
        }
    }

    /// Submits an operation, whatever its memory. `endpoint` may be `None` for a receive from any peer.
    ///
    /// GPU memory must have been admitted ([`admit`](crate::progress::admit)).
    ///
    /// # Errors
    /// `PeerDead`, and `Closed` when the worker is closed. Later failures are the operation's outcome.
    pub(crate) fn submit(
        &mut self,
        endpoint: Option<EndpointId>,
        submission: Submission,
        mut buffer: Buffer,
    ) -> Result<OpId> {
        match self.submit_now(endpoint, submission, &mut buffer) {
            Some((op, _)) => Ok(op),
            None => self.submit_at_length(endpoint, submission, buffer),
        }
    }

    /// [`Core::submit`] of anything that cannot start at once, with its errors.
    pub(crate) fn submit_at_length(
        &mut self,
        endpoint: Option<EndpointId>,
        submission: Submission,
        buffer: Buffer,
    ) -> Result<OpId> {
        let kind = submission.kind();
        if self.closed || (kind != OpKind::Receive && !self.is_alive(endpoint)) {
            return Err(self.refusal(endpoint, kind));
        }
        let len = buffer.len;
        if buffer.gpu.is_some() || self.transfers.gpu.must_wait(&submission, endpoint) {
            return Ok(self.submit_in_order(endpoint, submission, buffer));
        }
        let op = self.transfers.tables.operations.insert(kind, endpoint, submission.tag(), buffer);
        self.start(op, endpoint, submission, (len, true));
        Ok(op)
    }

    #[inline]
    fn is_alive(&self, endpoint: Option<EndpointId>) -> bool {
        let peers = &self.transfers.tables.peers;
        endpoint.and_then(|endpoint| peers.get(endpoint)).is_some_and(|peer| peer.is_alive())
    }

    /// # Errors
    /// `PeerDead`, and `Closed` when the worker is closed.
    pub(super) fn check_alive(&self, endpoint: EndpointId, what: &str) -> Result<()> {
        if !self.closed && self.is_alive(Some(endpoint)) {
            return Ok(());
        }
        let peer = self.transfers.tables.peers.get(endpoint).filter(|_| !self.closed);
        Err(peer.map_or_else(|| gone(what), |peer| peer.dead(what)))
    }

    /// Why no such operation can be submitted.
    #[cold]
    fn refusal(&self, endpoint: Option<EndpointId>, kind: OpKind) -> Error {
        let peer = endpoint.and_then(|endpoint| self.transfers.tables.peers.get(endpoint));
        match peer.filter(|_| !self.closed) {
            Some(peer) => peer.dead(kind.name()),
            None => gone(kind.name()),
        }
    }

    /// [`Core::submit`] for GPU memory, or behind an operation that waits for a stream.
    #[cold]
    fn submit_in_order(&mut self, endpoint: Option<EndpointId>, submission: Submission, mut buffer: Buffer) -> OpId {
        let after = buffer.gpu.as_mut().and_then(|gpu| Some((gpu.ordinal, gpu.after.take()?)));
        let memory = (buffer.len, buffer.gpu.is_none());
        let waits = after.is_some() || self.transfers.gpu.must_wait(&submission, endpoint);
        let op = self.transfers.tables.operations.insert(submission.kind(), endpoint, submission.tag(), buffer);
        if waits {
            let released = self.transfers.gpu.hold(op, submission, endpoint, after);
            self.start_released(released);
        } else {
            self.start(op, endpoint, submission, memory);
        }
        op
    }

    /// Starts or fails operations that waited for a stream.
    #[inline(never)]
    pub(super) fn start_released(&mut self, released: Vec<Released>) {
        for Released { op, submission, failed } in released {
            let Some(entry) = self.transfers.tables.operations.op(op) else { continue };
            let (what, endpoint) = (entry.kind().name(), entry.endpoint());
            let memory = (entry.len(), entry.ordinal().is_none());
            match failed {
                Some(error) => {
                    let error = Error { operation: what.to_owned(), ..*error };
                    self.transfers.tables.operations.finish(op, Err(Box::new(error)));
                }
                None => self.start(op, endpoint, submission, memory),
            }
        }
    }

    /// Starts an operation that is in the table. Its memory: the length, and whether it is host memory.
    fn start(&mut self, op: OpId, endpoint: Option<EndpointId>, submission: Submission, (len, host): (usize, bool)) {
        match (submission, endpoint) {
            (Submission::Receive { tag, mask }, _) => {
                self.post_receive(op, (len as u64, host), tag, mask, endpoint);
            }
            (Submission::Operation(operation), Some(endpoint)) => self.start_transfer(endpoint, op, operation),
            (Submission::Operation(_), None) => {}
        }
    }

    /// [`Core::submit_now`] of a short message with nothing queued before it. `None`: use the slow path.
    // The message is on its lane before the operation is in the table: only what the peer waits for comes first.
    #[inline(always)]
    fn send_now(&mut self, endpoint: EndpointId, tag: u64, buffer: &mut Buffer) -> Option<(OpId, bool)> {
        let (ptr, len) = (buffer.ptr, buffer.len);
        let Tables { clock, arena, operations, peers, lanes, .. } = &mut self.transfers.tables;
        let peer = peers.get_mut(endpoint)?;
        let (true, Some(id)) = (peer.is_alive(), peer.message_lane()) else { return None };
        let record = lanes.get(id)?;
        if record.has_pending() || !record.carries(len) && goes_long(record, arena, ptr, len) {
            return None;
        }
        let lane = self.transfers.polled.get_mut(id)?;
        let (op, mut head) = (operations.upcoming(), Head::new(0, 0));
        if !peer.protocol.send_now(clock.now(), op, tag, len as u64, id, &mut head) {
            return None;
        }
        // SAFETY: a buffer's memory is readable until its operation is finished, which has not begun for anybody else.
        let put = unsafe { lane.put(&head, ptr, len) };
        operations.insert_plain(op, OpKind::Send, (Some(endpoint), tag), buffer);
        if !put {
            let grant = if record.is_reliable() { None } else { operations.op_mut(op).map(|op| op.loan()) };
            let tx = Tx { head, payload: Payload { ptr, len, grant, ..Payload::EMPTY }, token: 0 };
            if let Some(posted) = post(lane, &tx) {
                self.not_posted(endpoint, op, id, tx, posted);
                return Some((op, false));
            }
        }
        Some((op, true))
    }

    /// A frame found no room on its lane, or the lane has failed.
    #[cold]
    fn not_posted(
        &mut self,
        endpoint: EndpointId,
        op: OpId,
        id: LaneId,
        mut tx: Tx,
        posted: std::result::Result<Post, LaneError>,
    ) {
        let tables = &mut self.transfers.tables;
        match posted {
            Ok(_) => {
                tx.payload.grant = tables.operations.op_mut(op).map(|op| op.loan());
                if let Some(record) = tables.lanes.get_mut(id) {
                    record.set_pending(tx);
                }
            }
            Err(error) => self.transfers.drop_polled_lane(endpoint, id, &error),
        }
    }

    /// Hands an operation to the protocol.
    #[inline(never)]
    fn start_transfer(&mut self, endpoint: EndpointId, op: OpId, operation: Operation) {
        let Some(entry) = self.transfers.tables.operations.op(op) else { return };
        let (ptr, len, gpu) = (entry.ptr(), entry.len(), entry.ordinal());
        let offer = self.transfers.offer(endpoint, op, Space::of(gpu), (ptr, len));
        let gives = !matches!(operation, Operation::Read { .. });
        let eager = gpu.is_none_or(|ordinal| gives && offer.is_none() && self.copy_out_short(endpoint, op, ordinal));
        // The last pass may have been long ago: receipts and traces tell when it began.
        let now = self.transfers.tables.clock.read();
        if let Some(peer) = self.transfers.tables.peers.get_mut(endpoint) {
            peer.protocol.start(now, op, operation, len as u64, offer, eager);
        }
        self.transfers.settle(endpoint);
    }

    /// Copies the bytes of a short operation out of GPU memory, so that they go with its first frame, as those of host
    /// memory do. A chunk would wait for the peer's consent, and for the stagers of both ends. False: it is too long,
    /// or the copy failed, and then packing it fails with the reason.
    fn copy_out_short(&mut self, endpoint: EndpointId, op: OpId, ordinal: u32) -> bool {
        let Transfers { tables, gpu, .. } = &mut self.transfers;
        let lane = tables.peers.get(endpoint).and_then(|peer| peer.message_lane());
        let most = lane.and_then(|lane| tables.lanes.get(lane)).map_or(0, LaneRecord::eager_max);
        let Some(entry) = tables.operations.op_mut(op).filter(|entry| entry.len() <= most) else { return false };
        let Some(token) = gpu.begin_copy() else { return false };
        let Some(bytes) = gpu.copy_out(ordinal, entry.ptr() as u64, entry.len()) else { return false };
        entry.replace_memory(bytes, token);
        true
    }

    /// Posts a receive of `len` bytes. A message may have arrived before it. `host`: it is host memory, so that a
    /// message can be placed at once. Whether it waits now.
    #[inline(always)]
    fn post_receive(
        &mut self,
        op: OpId,
        (len, host): (u64, bool),
        tag: u64,
        mask: u64,
        from: Option<EndpointId>,
    ) -> bool {
        let tables = &mut self.transfers.tables;
        if let Some((endpoint, arrival)) = tables.matcher.post(op, tag, mask, from, len, host) {
            self.accept_arrival(op, len, endpoint, arrival);
            return false;
        }
        let ended = from.is_some_and(|from| tables.peers.get(from).is_some_and(|peer| !peer.is_alive()));
        if ended {
            self.fail_posted(op, from);
        }
        !ended
    }

    /// A receive was posted from a peer that has ended.
    #[cold]
    fn fail_posted(&mut self, op: OpId, from: Option<EndpointId>) {
        let tables = &mut self.transfers.tables;
        let peer = from.and_then(|from| tables.peers.get(from));
        let why = peer.map_or_else(String::new, |peer| peer.why_ended().to_owned());
        tables.matcher.cancel(op);
        tables.fail(op, ErrorKind::PeerDead, &why, from);
    }

    /// A receive matched a message that had arrived before it.
    #[inline(never)]
    fn accept_arrival(&mut self, op: OpId, len: u64, endpoint: EndpointId, arrival: u32) {
        let tables = &mut self.transfers.tables;
        let now = tables.clock.now();
        if let Some(entry) = tables.operations.op_mut(op) {
            entry.set_endpoint(endpoint);
        }
        if let Some(peer) = tables.peers.get_mut(endpoint) {
            peer.protocol.accept(now, arrival, op, len);
        }
        if self.transfers.polled.is_armed() {
            self.transfers.settle_aside(endpoint);
        } else {
            self.transfers.settle(endpoint);
        }
    }

    /// Starts a request of several operations: it finishes when all operations that [`Operations::adopt`] adds to it
    /// have, and [`Operations::release`] was called.
    ///
    /// # Errors
    /// `Closed` when the worker is closed.
    ///
    /// [`Operations::adopt`]: super::operations::Operations::adopt
    /// [`Operations::release`]: super::operations::Operations::release
    pub(crate) fn start_batch(&mut self, endpoint: EndpointId) -> Result<OpId> {
        if self.closed {
            return Err(gone("batch"));
        }
        // SAFETY: no bytes.
        let nothing = unsafe { Buffer::raw(std::ptr::null_mut(), 0, None) };
        let operations = &mut self.transfers.tables.operations;
        let parent = operations.insert(OpKind::Batch, Some(endpoint), 0, nothing);
        operations.hold(parent);
        Ok(parent)
    }

    /// Ends an operation early, in whatever state.
    pub(crate) fn cancel(&mut self, op: OpId, why: Early) {
        let tables = &mut self.transfers.tables;
        let now = tables.clock.read();
        let Some(entry) = tables.operations.op(op).filter(|op| !op.is_over()) else { return };
        let (kind, known) = (entry.kind(), entry.endpoint());
        if kind == OpKind::Batch {
            for child in tables.operations.children(op) {
                self.cancel(child, why);
            }
            return;
        }
        if tables.matcher.cancel(op) {
            tables.fail(op, why.kind(), &why.text("a message matched it"), None);
            return;
        }
        if let Some(endpoint) = known
            && self.leave_outbox(op, endpoint)
        {
            self.transfers.tables.fail(op, why.kind(), &why.text("it had begun"), known);
            return;
        }
        if kind == OpKind::Notice {
            // On its way, and counted: it arrives.
            return;
        }
        if let Some(released) = self.transfers.gpu.leave(op, known) {
            self.start_released(released);
            self.transfers.tables.fail(op, why.kind(), &why.text("its memory was ready"), None);
            return;
        }
        let peers: Vec<_> = match known {
            Some(endpoint) => vec![endpoint],
            None => self.transfers.tables.peers.ids().collect(),
        };
        if let Some(endpoint) = known
            && self.transfers.tables.withdraw_packed(endpoint, op, &why.failure())
        {
            self.transfers.begin_waiting(endpoint);
            return self.transfers.settle(endpoint);
        }
        for endpoint in peers {
            let peer = self.transfers.tables.peers.get_mut(endpoint);
            if peer.is_some_and(|peer| peer.protocol.cancel(now, op, &why.failure())) {
                self.transfers.settle(endpoint);
                return;
            }
        }
    }

    /// Fails everything that is still in flight, when the worker closes. Memory that a peer may still be accessing is
    /// never freed.
    pub(crate) fn abandon(&mut self) {
        for owner in self.transfers.tables.operations.returns.take_all() {
            match owner {
                Owner::Operation(op) => self.transfers.tables.operations.leak(op),
                Owner::Access(region) => self.transfers.tables.regions.leak(region),
                Owner::Memory(memory) => std::mem::forget(memory),
            }
        }
        let operations = &mut self.transfers.tables.operations;
        for op in operations.running() {
            let what = operations.op(op).map_or("request", |op| op.kind().name());
            operations.finish(op, Err(Box::new(gone(what))));
        }
    }

    /// How far an operation has come, for the error of a wait that timed out: its kind, the peer and its lanes, bytes
    /// done and bytes in all.
    pub(crate) fn progress_of(&self, op: OpId) -> Option<OpProgress> {
        let tables = &self.transfers.tables;
        let entry = tables.operations.op(op)?;
        let (kind, len) = (entry.kind(), entry.len() as u64);
        let Some(endpoint) = entry.endpoint() else {
            let unmatched = tables.matcher.unexpected();
            return Some(OpProgress { kind, peer: None, lanes: None, done: 0, total: len, unmatched, crowd: None });
        };
        let peer = tables.peers.get(endpoint)?;
        let (done, total) = peer.protocol.progress(op).unwrap_or((0, len));
        let (done, total) = (entry.moved(done), entry.moved(total));
        let lanes: Vec<_> = peer.lanes().iter().map(|lane: &LaneId| tables.lanes.name(*lane).to_string()).collect();
        let lanes = (!lanes.is_empty()).then(|| lanes.join(" "));
        let credit = proto::Config::default().message_credit;
        let with = tables.operations.in_flight(usize::MAX).filter(|(_, op)| op.endpoint() == Some(endpoint));
        let crowd = Some(with.count()).filter(|count| *count > credit as usize && done == 0);
        let crowd = crowd.map(|count| (count, credit));
        Some(OpProgress { kind, peer: Some(peer.name().to_owned()), lanes, done, total, unmatched: 0, crowd })
    }
}

impl Transfers {
    /// How the peer could copy memory of an operation directly; `None`: the bytes are carried.
    pub(super) fn offer(
        &mut self,
        endpoint: EndpointId,
        op: OpId,
        space: Space,
        (ptr, len): (*mut u8, usize),
    ) -> Option<Offer> {
        let Transfers { tables, gpu, polled, .. } = self;
        let lane = tables.peers.get(endpoint)?.message_lane()?;
        let copies = match space {
            Space::Host => tables.copies_directly(lane, ptr, len),
            Space::Gpu => len > 0,
        };
        if !copies {
            return None;
        }
        let domain = create_domain(tables, (gpu, polled), (endpoint, Some(lane)), space).ok()?;
        let (descriptor, kind) = match domain.describe(ptr, len) {
            Ok(described) => described,
            Err(why) => {
                if space == Space::Gpu {
                    gpu.warn(tables, endpoint, &why);
                }
                return None;
            }
        };
        let both = len as u64 >= HELP_MIN || kind == DirectKind::Cma;
        let slot = if both { domain.open(len) } else { None };
        if let Some(op) = tables.operations.op_mut(op) {
            op.set_cursor(slot);
            op.set_direct(kind);
        }
        if space == Space::Gpu {
            self.pass_notes(endpoint);
        }
        Some(Offer { descriptor, slot })
    }
}

/// Reason to end an operation early.
#[derive(Clone, Copy)]
pub(crate) enum Early {
    /// Cancelled by its caller.
    Cancelled,
    /// Its memory was deregistered.
    Withdrawn,
}

impl Early {
    fn failure(self) -> proto::Failure {
        match self {
            Early::Cancelled => proto::Failure::Cancelled,
            Early::Withdrawn => proto::Failure::Withdrawn,
        }
    }

    fn kind(self) -> ErrorKind {
        match self {
            Early::Cancelled => ErrorKind::Cancelled,
            Early::Withdrawn => ErrorKind::Region,
        }
    }

    /// The error's text, for an operation that ends before `event`.
    fn text(self, event: &str) -> String {
        match self {
            Early::Cancelled => format!("cancelled before {event}"),
            Early::Withdrawn => format!("its local memory was deregistered before {event}"),
        }
    }
}

/// Posts a frame. `Some`: it could not, for this reason.
#[inline(never)]
fn post(lane: &mut dyn Lane, tx: &Tx) -> Option<std::result::Result<Post, LaneError>> {
    match lane.post(tx) {
        Ok(Post::Taken | Post::Held) => None,
        posted => Some(posted),
    }
}

/// Whether a message is too long for its first frame, or is rather copied directly.
#[inline(never)]
fn goes_long(record: &LaneRecord, arena: &Arena, ptr: *const u8, len: usize) -> bool {
    len > record.eager_max() || record.copies_directly(len, || arena.find(ptr, len).is_some())
}

/// See [`Core::progress_of`].
pub(crate) struct OpProgress {
    pub(crate) kind: OpKind,
    /// `None`: no message has matched the receive.
    pub(crate) peer: Option<String>,
    pub(crate) lanes: Option<String>,
    pub(crate) done: u64,
    pub(crate) total: u64,
    /// Messages that wait for a receive, for a receive that waits for a message.
    pub(crate) unmatched: usize,
    /// Operations in flight with the peer, and how many it takes, if those are more.
    pub(crate) crowd: Option<(usize, u32)>,
}
