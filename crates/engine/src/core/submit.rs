//! Operations as they begin, are cancelled, and are abandoned; under the worker's lock.
#![allow(unsafe_code)]

use crossrail_proto as proto;
use crossrail_transport::{Payload, Post, Tx};
use crossrail_types::{EndpointId, Error, ErrorKind, LaneId, OpId};
use proto::{Offer, Operation};

use super::Core;
use super::gpu::What;
use crate::memory::Buffer;

/// From here on both ends copy at once.
const HELP_MIN: u64 = 512 << 10;

impl Core {
    /// The lanes of the operation's peer, for messages.
    pub(crate) fn lanes_of(&mut self, op: OpId) -> Option<String> {
        let endpoint = self.st.ops.op(op)?.endpoint?;
        let lanes = self.st.peer(endpoint)?.lanes.clone();
        let names: Vec<_> =
            lanes.into_iter().filter_map(|id| self.st.lane(id).map(|lane| lane.name.to_string())).collect();
        (!names.is_empty()).then(|| names.join(" "))
    }

    /// Starts an operation with a peer. `Err`: the peer is not there any more.
    pub(crate) fn start(
        &mut self,
        endpoint: EndpointId,
        what: &'static str,
        operation: Operation,
        buffer: Buffer,
    ) -> Result<OpId, Error> {
        let (ptr, len) = (buffer.ptr, buffer.len);
        if self.closed {
            return Err(crate::core::gone(what));
        }
        let Some(peer) = self.st.peer(endpoint) else { return Err(crate::core::gone(what)) };
        if !peer.alive {
            return Err(Error::new(ErrorKind::PeerDead, what, peer.why_dead.clone()).with_peer(peer.name()));
        }
        let (inside, gated) = (peer.inside, peer.gate.is_closed());
        if buffer.gpu.is_some() || gated {
            return Ok(self.start_gpu(endpoint, what, operation, buffer));
        }
        let tag = if let Operation::Send { tag } = operation { tag } else { 0 };
        let op = self.st.ops.insert(what, Some(endpoint), tag, buffer);
        if matches!(operation, Operation::Send { .. })
            && let Some(lane) = inside
            && self.send_now(endpoint, lane, op, tag, (ptr, len))
        {
            return Ok(op);
        }
        self.begin_operation(op, operation);
        Ok(op)
    }

    /// [`Core::start`] for memory of a GPU, or behind an operation that waits for one.
    #[cold]
    fn start_gpu(
        &mut self,
        endpoint: EndpointId,
        what: &'static str,
        operation: Operation,
        mut buffer: Buffer,
    ) -> OpId {
        let tag = if let Operation::Send { tag } = operation { tag } else { 0 };
        let (ordinal, after) = buffer.gpu.as_mut().map_or((None, None), |gpu| (Some(gpu.ordinal), gpu.after.take()));
        let op = self.st.ops.insert(what, Some(endpoint), tag, buffer);
        let gated = self.st.peer(endpoint).is_some_and(|peer| peer.gate.is_closed());
        if after.is_some() || gated {
            self.wait_at_gate(op, What::Start(operation), ordinal, after);
        } else {
            self.begin_operation(op, operation);
        }
        op
    }

    /// Hands an operation to the protocol.
    pub(crate) fn begin_operation(&mut self, op: OpId, operation: Operation) {
        let Some(entry) = self.st.ops.op(op) else { return };
        let (Some(endpoint), ptr, len, gpu) = (entry.endpoint, entry.ptr, entry.len, entry.ordinal()) else { return };
        let inside = self.st.peer(endpoint).and_then(|peer| peer.inside);
        let offer = match gpu {
            None => inside.and_then(|lane| self.offer(lane, op, ptr, len)),
            Some(_) => self.offer_gpu(endpoint, op, ptr, len),
        };
        let now = self.st.now;
        if let Some(peer) = self.st.peer(endpoint) {
            peer.peer.start(now, op, operation, len as u64, offer, gpu.is_none());
        }
        self.settle(endpoint);
    }

    /// Sends a short message with nothing queued before it; false: it has to go the long way.
    #[inline]
    fn send_now(&mut self, endpoint: EndpointId, id: LaneId, op: OpId, tag: u64, (ptr, len): (*mut u8, usize)) -> bool {
        let now = self.st.now;
        let Some(state) = self.st.lane(id) else { return false };
        let (short, free) = (len <= state.eager_max, state.pending.is_none());
        if !short || !free || self.st.copies_directly(id, ptr, len) {
            return false;
        }
        let Some(at) = self.inside.iter().position(|lane| lane.id == id) else { return false };
        let Some(peer) = self.st.peer(endpoint) else { return false };
        let Some(head) = peer.peer.send_now(now, op, tag, len as u64, id) else { return false };
        let mut tx = Tx { head, payload: Payload { ptr, len, file: None, grant: None }, token: 0 };
        if !self.inside[at].lane.caps().reliable {
            tx.payload.grant = self.st.ops.op_mut(op).map(|op| op.grant());
        }
        match self.inside[at].lane.post(&tx) {
            Ok(Post::Taken | Post::Held) => {}
            Ok(Post::Full) => {
                tx.payload.grant = self.st.ops.op_mut(op).map(|op| op.grant());
                if let Some(state) = self.st.lane(id) {
                    state.pending = Some(tx);
                }
            }
            Err(error) => self.drop_inside(endpoint, id, &error),
        }
        true
    }

    #[inline]
    fn offer(&mut self, lane: LaneId, op: OpId, ptr: *mut u8, len: usize) -> Option<Offer> {
        if !self.st.copies_directly(lane, ptr, len) {
            return None;
        }
        let direct = self.inside.iter_mut().find(|inside| inside.id == lane)?.lane.direct()?;
        let (descriptor, kind) = direct.describe(ptr, len)?;
        let slot = if len as u64 >= HELP_MIN { direct.open(len) } else { None };
        if let Some(op) = self.st.ops.op_mut(op) {
            op.slot = slot;
            op.direct = Some(kind);
        }
        Some(Offer { descriptor, slot })
    }

    /// Posts a receive.
    pub(crate) fn receive(
        &mut self,
        buffer: Buffer,
        tag: u64,
        mask: u64,
        from: Option<EndpointId>,
    ) -> Result<OpId, Error> {
        if self.closed {
            return Err(crate::core::gone("recv"));
        }
        if buffer.gpu.is_some() || self.receives.is_closed() {
            return Ok(self.receive_gpu(buffer, tag, mask, from));
        }
        let len = buffer.len as u64;
        let op = self.st.ops.insert("recv", from, tag, buffer);
        self.post(op, (len, true), tag, mask, from);
        Ok(op)
    }

    /// [`Core::receive`] into memory of a GPU, or behind a receive that waits for one.
    #[cold]
    fn receive_gpu(&mut self, mut buffer: Buffer, tag: u64, mask: u64, from: Option<EndpointId>) -> OpId {
        let (gpu, after) = buffer.gpu.as_mut().map_or((None, None), |gpu| (Some(gpu.ordinal), gpu.after.take()));
        let gated = self.receives.is_closed();
        let op = self.st.ops.insert("recv", from, tag, buffer);
        if gated || after.is_some() {
            self.wait_at_gate(op, What::Receive { tag, mask, from }, gpu, after);
        } else {
            self.post_late(op, tag, mask, from);
        }
        op
    }

    /// A receive takes its place among the others.
    #[cold]
    pub(crate) fn post_late(&mut self, op: OpId, tag: u64, mask: u64, from: Option<EndpointId>) {
        let Some((len, at_once)) = self.st.ops.op(op).map(|op| (op.len as u64, op.gpu.is_none())) else { return };
        self.post(op, (len, at_once), tag, mask, from);
    }

    #[inline(always)]
    fn post(&mut self, op: OpId, (len, at_once): (u64, bool), tag: u64, mask: u64, from: Option<EndpointId>) {
        if let Some((endpoint, arrival)) = self.st.matcher.post(op, tag, mask, from, len, at_once) {
            let now = self.st.now;
            if let Some(entry) = self.st.ops.op_mut(op) {
                entry.endpoint = Some(endpoint);
            }
            if let Some(peer) = self.st.peer(endpoint) {
                peer.peer.accept(now, arrival, op, len);
            }
            if self.armed {
                self.settle_aside(endpoint);
            } else {
                self.settle(endpoint);
            }
        } else if let Some(from) = from
            && let Some(peer) = self.st.peer(from)
            && !peer.alive
        {
            let error = Error::new(ErrorKind::PeerDead, "recv", peer.why_dead.clone()).with_peer(peer.name());
            self.st.matcher.cancel(op);
            self.st.ops.finish(op, Err(Box::new(error)));
        }
    }

    /// Cancels an operation wherever it is.
    pub(crate) fn cancel(&mut self, op: OpId) {
        let now = self.st.tick();
        let Some(entry) = self.st.ops.op(op) else { return };
        if entry.outcome.is_some() {
            return;
        }
        let (what, known) = (entry.what, entry.endpoint);
        if what == "batch" {
            for child in self.st.ops.children(op) {
                self.cancel(child);
            }
            return;
        }
        if self.st.matcher.cancel(op) {
            let error = Error::new(ErrorKind::Cancelled, what, "cancelled before a message matched it");
            self.st.ops.finish(op, Err(Box::new(error)));
            return;
        }
        if self.leave_gate(op) {
            let error = Error::new(ErrorKind::Cancelled, what, "cancelled before its memory was ready");
            self.st.ops.finish(op, Err(Box::new(error)));
            return;
        }
        let peers = match known {
            Some(endpoint) => vec![endpoint],
            None => (0..self.st.peers.len() as u32).map(EndpointId).collect(),
        };
        for endpoint in peers {
            if self.st.peer(endpoint).is_some_and(|peer| peer.peer.cancel(now, op)) {
                self.settle(endpoint);
                return;
            }
        }
    }

    /// Ends everything that is still running, when the worker closes.
    pub(crate) fn abandon(&mut self) {
        for op in self.st.ops.running() {
            let what = self.st.ops.op(op).map_or("request", |op| op.what);
            self.st.ops.finish(op, Err(Box::new(crate::core::gone(what))));
        }
    }

    /// How far an operation got: the peer it runs with, bytes done, bytes in all.
    pub(crate) fn progress(&mut self, op: OpId) -> Option<(Option<String>, u64, u64)> {
        let entry = self.st.ops.op(op)?;
        let total = entry.len as u64;
        let Some(endpoint) = entry.endpoint else { return Some((None, 0, total)) };
        let peer = self.st.peer(endpoint)?;
        let (done, total) = peer.peer.progress(op).unwrap_or((0, total));
        Some((Some(peer.name().to_owned()), done, total))
    }

    /// An operation that finishes once all those [`Ops::adopt`](super::operations::Ops::adopt)ed by it have, and
    /// `release` was called.
    pub(crate) fn batch(&mut self, endpoint: EndpointId) -> OpId {
        // SAFETY: no bytes.
        let nothing = unsafe { Buffer::raw(std::ptr::null_mut(), 0, None) };
        let parent = self.st.ops.insert("batch", Some(endpoint), 0, nothing);
        self.st.ops.hold(parent);
        parent
    }
}
