//! What one entry of the table knows and does.

use std::sync::Arc;

use crossrail_proto as proto;
use crossrail_transport::Grant;
use crossrail_types::EndpointId;

use super::{Attached, NO_ENTRY, Op, State};
use crate::core::outcome::{OpKind, Outcome, ShortEnd};
use crate::memory::{GpuTimes, Keep};

impl Op {
    pub(super) fn vacant() -> Op {
        Op {
            generation: 0,
            next_free: NO_ENTRY,
            state: State::Free,
            kind: OpKind::Batch,
            endpoint: None,
            ptr: std::ptr::null_mut(),
            len: 0,
            gpu: None,
            tag: 0,
            bytes: 0,
            wire_ns: 0,
            lane: None,
            keep: Keep::Nothing,
            outcome: None,
            detached: false,
            attached: None,
        }
    }

    /// Whether it is in flight and its end is of concern to nobody but its request.
    #[inline]
    pub(super) fn is_plain(&self) -> bool {
        self.state == State::InFlight && !self.detached && self.attached.is_none() && self.gpu.is_none()
    }

    /// A plain one has ended in good order, as `short` says.
    #[inline(always)]
    pub(super) fn end_short(&mut self, endpoint: EndpointId, short: proto::Short) {
        self.endpoint = Some(endpoint);
        self.tag = short.tag;
        self.bytes = short.bytes;
        self.wire_ns = short.wire_ns;
        self.lane = short.lane;
        self.conclude();
    }

    /// A plain one has ended in good order, and the entry's fields say how.
    #[inline(always)]
    pub(super) fn conclude(&mut self) {
        self.state = State::Short;
        // Spelt out, so that the drop of the commonest kind is a count and no call, and nothing else is moved.
        match self.keep {
            Keep::Nothing => {}
            Keep::Segment(_) => {
                if let Keep::Segment(segment) = std::mem::replace(&mut self.keep, Keep::Nothing) {
                    drop(segment);
                }
            }
            _ => self.keep_bytes(),
        }
    }

    /// Bytes of which the request may still ask stay.
    #[inline(never)]
    fn keep_bytes(&mut self) {
        if !matches!(self.keep, Keep::Vec(_)) {
            self.keep = Keep::Nothing;
        }
    }

    pub(super) fn attached(&mut self) -> &mut Attached {
        self.attached.get_or_insert_default()
    }

    #[inline]
    pub(crate) fn kind(&self) -> OpKind {
        self.kind
    }

    /// The peer it runs with; `None`: a receive from any peer that is not matched.
    #[inline]
    pub(crate) fn endpoint(&self) -> Option<EndpointId> {
        self.endpoint
    }

    pub(crate) fn set_endpoint(&mut self, endpoint: EndpointId) {
        self.endpoint = Some(endpoint);
    }

    /// First byte of its memory.
    #[inline]
    pub(crate) fn ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// Bytes of its memory.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub(crate) fn tag(&self) -> u64 {
        self.tag
    }

    /// Whether it has finished.
    #[inline]
    pub(crate) fn is_over(&self) -> bool {
        matches!(self.state, State::Short | State::Finished)
    }

    pub(super) fn outcome(&self) -> Option<Outcome> {
        match self.state {
            State::Short => Some(Ok(self.short_end().into())),
            _ => self.outcome.clone(),
        }
    }

    #[inline]
    pub(super) fn short_end(&self) -> ShortEnd {
        let (endpoint, tag, bytes, wire_ns, lane) = (self.endpoint, self.tag, self.bytes, self.wire_ns, self.lane);
        ShortEnd { endpoint, tag, bytes, wire_ns, lane }
    }

    /// Where its staging times are counted; `None`: host memory.
    pub(crate) fn gpu_times(&mut self) -> Option<&mut GpuTimes> {
        self.gpu.as_mut().map(|gpu| &mut gpu.times)
    }

    /// Records that a direct copy was offered or made.
    pub(crate) fn set_direct(&mut self, kind: crossrail_transport::DirectKind) {
        self.attached().direct = Some(kind);
    }

    /// Records the shared cursor that was offered for a direct copy.
    pub(crate) fn set_cursor(&mut self, cursor: Option<u32>) {
        self.attached().cursor = cursor;
    }

    /// Takes that cursor away, to be closed.
    pub(crate) fn take_cursor(&mut self) -> Option<u32> {
        self.attached.as_mut()?.cursor.take()
    }

    /// The ordinal of the GPU that owns its memory; `None`: host memory.
    #[inline]
    pub(crate) fn ordinal(&self) -> Option<u32> {
        self.gpu.as_ref().map(|gpu| gpu.ordinal)
    }

    /// The grant under which lanes outside the lock touch this operation's memory.
    pub(crate) fn grant(&mut self) -> Arc<Grant> {
        self.attached().grant.get_or_insert_with(Arc::default).clone()
    }

    /// Takes the memory away from every lane.
    pub(crate) fn revoke(&mut self) {
        if let Some(grant) = self.attached.as_mut().and_then(|attached| attached.grant.take()) {
            grant.revoke();
        }
    }
}
