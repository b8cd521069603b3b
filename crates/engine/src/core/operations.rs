//! The worker's table of operations under way.

use std::sync::Arc;

use crossrail_proto as proto;
use crossrail_transport::Grant;
use crossrail_types::{EndpointId, Error, ErrorKind, LaneId, OpId, Result};

use proto::Short;

use super::Receipt;
use crate::memory::{Buffer, GpuTimes, Keep, OnGpu};

pub(crate) type Callback = Box<dyn FnOnce(Result<Receipt>) + Send>;

/// What a finished operation leaves behind until its request is dropped.
pub(crate) type Outcome = std::result::Result<Finish, Box<Error>>;

/// The protocol's receipt and what the engine adds to it.
#[derive(Clone, Debug)]
pub(crate) struct Finish {
    pub(crate) endpoint: Option<EndpointId>,
    pub(crate) tag: u64,
    pub(crate) bytes: u64,
    pub(crate) wire_ns: u64,
    pub(crate) lane: Option<LaneId>,
    /// All but a message that went with its first frame.
    pub(crate) more: Option<Box<More>>,
}

/// What there is to tell of a longer operation.
#[derive(Clone, Debug)]
pub(crate) struct More {
    pub(crate) receipt: proto::Receipt,
    pub(crate) direct: Option<crossrail_transport::DirectKind>,
    /// What GPU memory cost.
    pub(crate) times: Option<Box<GpuTimes>>,
    /// What happened to the peer's lanes meanwhile.
    pub(crate) notes: Vec<String>,
    /// Several operations in one request.
    pub(crate) batch: bool,
}

pub(crate) struct Op {
    generation: u32,
    live: bool,
    pub(crate) what: &'static str,
    /// The peer it runs with; for a receive from anybody, known once it is matched.
    pub(crate) endpoint: Option<EndpointId>,
    pub(crate) ptr: *mut u8,
    pub(crate) len: usize,
    /// The GPU whose memory it is; `None`: host memory.
    pub(crate) gpu: Option<Box<OnGpu>>,
    pub(crate) tag: u64,
    keep: Keep,
    grant: Option<Arc<Grant>>,
    /// The shared cursor offered for a direct copy, and whether one was done.
    pub(crate) slot: Option<u32>,
    pub(crate) direct: Option<crossrail_transport::DirectKind>,
    pub(crate) outcome: Option<Outcome>,
    /// Nobody holds the request any more: the slot is free as soon as the operation is finished.
    detached: bool,
    callback: Option<Callback>,
    parent: Option<OpId>,
    children: u32,
    bytes: u64,
    failure: Option<Box<Error>>,
}

/// Operations by index; an index is reused under a new generation.
#[derive(Default)]
pub(crate) struct Ops {
    slots: Vec<Op>,
    free: Vec<u32>,
    /// Finished operations with a callback, to be run once the lock is released.
    pub(crate) callbacks: Vec<(Callback, Outcome)>,
    /// Something finished since this was last cleared.
    pub(crate) finished: bool,
    live: usize,
}

// SAFETY: the pointers in it are descriptions; they are dereferenced by lanes under the rules of `Payload` and
// `Place`, whatever thread drives them.
#[allow(unsafe_code)]
unsafe impl Send for Ops {}

impl Ops {
    pub(crate) fn insert(
        &mut self,
        what: &'static str,
        endpoint: Option<EndpointId>,
        tag: u64,
        buffer: Buffer,
    ) -> OpId {
        self.live += 1;
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                self.slots.push(Op::vacant());
                (self.slots.len() - 1) as u32
            }
        };
        let slot = &mut self.slots[index as usize];
        slot.live = true;
        slot.what = what;
        slot.endpoint = endpoint;
        slot.ptr = buffer.ptr;
        slot.len = buffer.len;
        slot.gpu = buffer.gpu;
        slot.tag = tag;
        // Nothing is kept of what was there before.
        std::mem::forget(std::mem::replace(&mut slot.keep, buffer.keep));
        slot.grant = None;
        slot.slot = None;
        slot.direct = None;
        slot.detached = false;
        slot.callback = None;
        slot.parent = None;
        slot.children = 0;
        slot.bytes = 0;
        slot.failure = None;
        OpId { index, generation: slot.generation }
    }

    pub(crate) fn op(&self, id: OpId) -> Option<&Op> {
        self.slots.get(id.index as usize).filter(|op| op.live && op.generation == id.generation)
    }

    pub(crate) fn op_mut(&mut self, id: OpId) -> Option<&mut Op> {
        self.slots.get_mut(id.index as usize).filter(|op| op.live && op.generation == id.generation)
    }

    /// Whether the peer has the last word on it: all but a receive.
    pub(crate) fn awaits_peer(&self, id: OpId) -> bool {
        self.op(id).is_some_and(|op| op.what != "recv")
    }

    /// Operations whose request is still held or that are still running.
    pub(crate) fn live(&self) -> usize {
        self.live
    }

    pub(crate) fn is_done(&self, id: OpId) -> bool {
        self.op(id).is_none_or(|op| op.outcome.is_some())
    }

    /// Ends an operation: no lane touches its memory from here on.
    pub(crate) fn finish(&mut self, id: OpId, mut outcome: Outcome) {
        let Some(op) = self.op_mut(id) else { return };
        if op.outcome.is_some() {
            return;
        }
        if let Some(grant) = op.grant.take() {
            grant.revoke();
        }
        if let Ok(Finish { more: Some(more), .. }) = &mut outcome {
            more.direct = op.direct;
            more.times = op.gpu.as_ref().map(|gpu| Box::new(gpu.times));
        }
        let callback = op.callback.take();
        let (parent, detached) = (op.parent.take(), op.detached);
        let failure = outcome.as_ref().err().cloned();
        let bytes = outcome.as_ref().map_or(0, |finish| finish.bytes);
        if !matches!(op.keep, Keep::Vec(_)) {
            op.keep = Keep::Nothing;
        }
        if let Some(callback) = callback {
            self.callbacks.push((callback, outcome.clone()));
        }
        if let Some(op) = self.op_mut(id) {
            op.outcome = Some(outcome);
        }
        self.finished = true;
        if detached {
            self.free(id);
        }
        if let Some(parent) = parent {
            self.child_finished(parent, bytes, failure);
        }
    }

    /// [`Ops::finish`] for a short message with nothing attached to it. False: go the long way.
    #[inline]
    pub(crate) fn finish_short(&mut self, endpoint: EndpointId, short: proto::Short) -> bool {
        let Some(op) = self.op_mut(short.op) else { return true };
        let plain = op.grant.is_none()
            && op.slot.is_none()
            && op.callback.is_none()
            && op.parent.is_none()
            && op.outcome.is_none()
            && !op.detached;
        if !plain {
            return false;
        }
        op.endpoint = Some(endpoint);
        let tag = if op.what == "recv" { short.tag } else { op.tag };
        if !matches!(op.keep, Keep::Vec(_) | Keep::Nothing) {
            op.keep = Keep::Nothing;
        }
        let Short { bytes, wire_ns, lane, .. } = short;
        op.outcome = Some(Ok(Finish { endpoint: Some(endpoint), tag, bytes, wire_ns, lane, more: None }));
        self.finished = true;
        true
    }

    /// Takes the good end of a short message out of the table; its request is not asked for here any more.
    #[inline]
    pub(crate) fn collect(&mut self, id: OpId) -> Option<Finish> {
        let op = self.op_mut(id)?;
        if !matches!(op.outcome, Some(Ok(Finish { more: None, .. }))) || !matches!(op.keep, Keep::Nothing) {
            return None;
        }
        let outcome = op.outcome.take();
        self.free(id);
        outcome?.ok()
    }

    /// Keeps a batch from finishing while its parts are still being submitted.
    pub(crate) fn hold(&mut self, parent: OpId) {
        if let Some(op) = self.op_mut(parent) {
            op.children += 1;
        }
    }

    /// Undoes [`Ops::hold`]: all parts are submitted; `failure`: that of one which could not be.
    pub(crate) fn release(&mut self, parent: OpId, failure: Option<Box<Error>>) {
        self.child_finished(parent, 0, failure);
    }

    /// The running parts of a batch.
    pub(crate) fn children(&self, parent: OpId) -> Vec<OpId> {
        let mut running = self.running();
        running.retain(|id| self.op(*id).is_some_and(|op| op.parent == Some(parent)));
        running
    }

    fn child_finished(&mut self, parent: OpId, bytes: u64, failure: Option<Box<Error>>) {
        let Some(op) = self.op_mut(parent) else { return };
        op.children -= 1;
        let last = op.children == 0;
        op.bytes += bytes;
        let (endpoint, tag, bytes) = (op.endpoint, op.tag, op.bytes);
        if let Some(error) = failure {
            // The batch fails with its first failure, but only once all its parts are finished.
            op.failure.get_or_insert(error);
        }
        if last {
            let outcome = match self.op_mut(parent).and_then(|op| op.failure.take()) {
                Some(error) => Err(error),
                None => {
                    let more = More {
                        receipt: batch_receipt(bytes),
                        direct: None,
                        times: None,
                        notes: Vec::new(),
                        batch: true,
                    };
                    Ok(Finish { endpoint, tag, bytes, wire_ns: 0, lane: None, more: Some(Box::new(more)) })
                }
            };
            self.finish(parent, outcome);
        }
    }

    /// Makes `child` part of `parent`'s batch.
    pub(crate) fn adopt(&mut self, parent: OpId, child: OpId) {
        if let Some(op) = self.op_mut(parent) {
            op.children += 1;
        }
        let mut already = false;
        if let Some(op) = self.op_mut(child) {
            op.parent = Some(parent);
            op.detached = true;
            already = op.outcome.is_some();
        }
        if already {
            let outcome = self.op_mut(child).and_then(|op| op.outcome.take());
            self.free(child);
            match outcome {
                Some(Err(error)) => self.child_finished(parent, 0, Some(error)),
                Some(Ok(finish)) => self.child_finished(parent, finish.bytes, None),
                None => {}
            }
        }
    }

    /// Runs `callback` when the operation is finished (at once if it is).
    pub(crate) fn on_complete(&mut self, id: OpId, callback: Callback) {
        let Some(op) = self.op_mut(id) else { return };
        match &op.outcome {
            Some(outcome) => {
                let outcome = outcome.clone();
                self.callbacks.push((callback, outcome));
            }
            None => {
                op.callback = Some(match op.callback.take() {
                    Some(first) => Box::new(|result| {
                        first(result.clone());
                        callback(result);
                    }),
                    None => callback,
                });
            }
        }
    }

    /// The request was dropped.
    pub(crate) fn detach(&mut self, id: OpId) {
        let Some(op) = self.op_mut(id) else { return };
        if op.outcome.is_some() {
            self.free(id);
        } else {
            op.detached = true;
        }
    }

    /// Takes an owned buffer back out of a finished operation.
    pub(crate) fn take_vec(&mut self, id: OpId) -> Option<Vec<u8>> {
        let op = self.op_mut(id)?;
        op.outcome.as_ref()?;
        match std::mem::replace(&mut op.keep, Keep::Nothing) {
            Keep::Vec(bytes) => Some(bytes),
            other => {
                op.keep = other;
                None
            }
        }
    }

    /// Fails everything that is still running with `peer`, for the engine's own reasons.
    pub(crate) fn running(&self) -> Vec<OpId> {
        let running = |(index, op): (usize, &Op)| {
            (op.live && op.outcome.is_none()).then_some(OpId { index: index as u32, generation: op.generation })
        };
        self.slots.iter().enumerate().filter_map(running).collect()
    }

    fn free(&mut self, id: OpId) {
        let slot = &mut self.slots[id.index as usize];
        slot.generation = slot.generation.wrapping_add(1);
        slot.live = false;
        if !matches!(slot.keep, Keep::Nothing) {
            slot.keep = Keep::Nothing;
        }
        slot.outcome = None;
        self.free.push(id.index);
        self.live -= 1;
    }
}

impl Op {
    fn vacant() -> Op {
        Op {
            generation: 0,
            live: false,
            what: "",
            endpoint: None,
            ptr: std::ptr::null_mut(),
            len: 0,
            gpu: None,
            tag: 0,
            keep: Keep::Nothing,
            grant: None,
            slot: None,
            direct: None,
            outcome: None,
            detached: false,
            callback: None,
            parent: None,
            children: 0,
            bytes: 0,
            failure: None,
        }
    }

    /// The GPU that its memory is of, by number.
    #[inline]
    pub(crate) fn ordinal(&self) -> Option<u32> {
        self.gpu.as_ref().map(|gpu| gpu.ordinal)
    }

    /// The grant under which lanes outside the lock touch this operation's memory.
    pub(crate) fn grant(&mut self) -> Arc<Grant> {
        self.grant.get_or_insert_with(Arc::default).clone()
    }

    /// Takes the memory away from every lane.
    pub(crate) fn revoke(&mut self) {
        if let Some(grant) = self.grant.take() {
            grant.revoke();
        }
    }
}

fn batch_receipt(bytes: u64) -> proto::Receipt {
    proto::Receipt {
        bytes,
        protocol: proto::Protocol::Eager,
        lane: None,
        lanes: Vec::new(),
        match_ns: 0,
        window_ns: 0,
        wire_ns: 0,
        copy_ns: 0,
        pushed: false,
    }
}

pub(crate) fn gone(what: &str) -> Error {
    Error::new(ErrorKind::Closed, what, "the worker is closed")
}
