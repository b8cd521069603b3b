//! One entry of the table: an operation, what it needs, and how far it is.

use std::sync::Arc;

use crossrail_gpu::Scratch;
use crossrail_proto::RegionRef;
use crossrail_transport::Loan;
use crossrail_types::{EndpointId, Error, LaneId, OpId};

use crate::core::names::Names;
use crate::core::outcome::{Carried, OpKind, Outcome, ShortEnd};
use crate::core::receipt::Callback;
use crate::core::rows::part::{FollowUp, Part};
use crate::memory::{GpuTimes, Keep, OnGpu};

/// The index of no entry.
pub(super) const NO_ENTRY: u32 = u32::MAX;

/// State of an entry's operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// No operation: no buffer, attachment or outcome.
    Free,
    /// In flight, and only its request is interested in its end: not detached, nothing attached, host memory. One
    /// comparison replaces all checks that a short message would need.
    Plain,
    InFlight,
    /// Finished successfully as a short message, the common case: the result is in the entry's fields, and there is no
    /// outcome.
    Short,
    /// Finished; the outcome is there.
    Finished,
}

/// One operation.
// Whole cache lines: an entry is touched at its ends only by its own operation, and is found by shifts.
#[repr(align(64))]
pub(crate) struct Op {
    pub(super) generation: u32,
    /// Of a free entry: the next free one.
    pub(super) next_free: u32,
    pub(super) state: State,
    pub(super) kind: OpKind,
    /// The peer it runs with; for a receive from any peer, known once it is matched.
    pub(super) endpoint: Option<EndpointId>,
    pub(super) ptr: *mut u8,
    pub(super) len: usize,
    /// `None`: host memory.
    pub(super) gpu: Option<Box<OnGpu>>,
    pub(super) tag: u64,
    /// Once it is [`State::Short`]: bytes moved, the protocol's account of it, and the [peer's names](Names::word).
    pub(super) bytes: u64,
    pub(super) wire_ns: u64,
    pub(super) names: u64,
    /// The lane of a message that is being placed.
    pub(super) lane: Option<LaneId>,
    pub(super) keep: Keep,
    pub(super) outcome: Option<Outcome>,
    /// The request was dropped: the entry is free as soon as the operation is finished.
    pub(super) detached: bool,
    /// State that only long or attached operations need. `None` in a free entry.
    pub(super) attached: Option<Box<Attached>>,
}

/// What some operations need beside their memory.
#[derive(Default)]
pub(super) struct Attached {
    pub(super) loan: Option<Arc<Loan>>,
    /// How it ends once the lanes that keep its memory have given it back.
    pub(super) ending: Option<Outcome>,
    /// The shared cursor offered for a direct copy.
    pub(super) cursor: Option<u32>,
    /// The kind of the direct copy that was offered or made.
    pub(super) direct: Option<crossrail_transport::DirectKind>,
    pub(super) callback: Option<Callback>,
    /// The rows that are its memory.
    pub(super) part: Option<Part>,
    /// The regions that its memory belongs to, whose end is its own.
    pub(super) over: Option<Arc<[RegionRef]>>,
    /// Bytes of its memory that are none of those which it moves: the first.
    pub(super) ahead: usize,
    /// What follows its end.
    pub(super) follow_up: Option<FollowUp>,
    /// The batch that it is part of.
    pub(super) parent: Option<OpId>,
    /// Of a batch: its parts in flight, the bytes of the others and what carried them, and the first failure.
    pub(super) children: u32,
    pub(super) bytes: u64,
    pub(super) carried: Carried,
    pub(super) failure: Option<Box<Error>>,
}

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
            names: 0,
            lane: None,
            keep: Keep::Nothing,
            outcome: None,
            detached: false,
            attached: None,
        }
    }

    /// Whether it has not finished.
    #[inline]
    pub(super) fn is_in_flight(&self) -> bool {
        matches!(self.state, State::Plain | State::InFlight)
    }

    /// Leaves the fast path: another party besides its request is interested in its end.
    #[inline]
    pub(super) fn complicate(&mut self) {
        if self.state == State::Plain {
            self.state = State::InFlight;
        }
    }

    /// A plain one has ended in good order, and the entry's fields say how.
    #[inline(always)]
    pub(super) fn conclude(&mut self, names: Names, wire_ns: u64) {
        self.names = names.word();
        self.wire_ns = wire_ns;
        self.state = State::Short;
        self.let_go();
    }

    /// Drops the buffer, which no lane or copy accesses any more, unless the request may still ask for its bytes.
    /// Returns whether it was dropped.
    #[inline(always)]
    pub(super) fn let_go(&mut self) -> bool {
        // Spelt out, so that the drop of the commonest kind is a count and no call, and nothing else is moved.
        match self.keep {
            Keep::Nothing => true,
            Keep::Segment(_) => {
                self.keep.drop_segment();
                true
            }
            _ => self.keep_bytes(),
        }
    }

    /// Frees the entry, which keeps nothing, and to which nothing is attached. `free`: the first free one.
    #[inline(always)]
    pub(super) fn vacate(&mut self, id: OpId, free: &mut u32, live: &mut usize) {
        self.state = State::Free;
        self.generation = id.generation.wrapping_add(1);
        self.next_free = *free;
        *free = id.index;
        *live -= 1;
    }

    /// Bytes of which the request may still ask stay.
    #[inline(never)]
    fn keep_bytes(&mut self) -> bool {
        if matches!(self.keep, Keep::Vec(_)) {
            return false;
        }
        self.keep = Keep::Nothing;
        true
    }

    pub(super) fn attached(&mut self) -> &mut Attached {
        self.complicate();
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
            State::Short => self.short_end().map(|end| Ok(end.into())),
            _ => self.outcome.clone(),
        }
    }

    /// That of an operation that is [`State::Short`].
    #[inline]
    pub(super) fn short_end(&self) -> Option<ShortEnd> {
        let (tag, bytes, wire_ns) = (self.tag, self.bytes, self.wire_ns);
        Names::of_word(self.names).map(|names| ShortEnd { names, tag, bytes, wire_ns })
    }

    /// Its bytes were copied out of GPU memory: from now on that copy is its memory. The original stays allocated.
    pub(crate) fn replace_memory(&mut self, mut bytes: Scratch, token: Arc<()>) {
        self.ptr = bytes.as_mut_ptr();
        self.gpu = None;
        let original = std::mem::replace(&mut self.keep, Keep::Nothing);
        self.keep = Keep::Copy(Box::new((bytes, original, token)));
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

    /// Whether its memory, or its rows, are a GPU's.
    pub(crate) fn is_on_gpu(&self) -> bool {
        self.gpu.is_some() || self.part().is_some_and(|part| part.gpu.is_some())
    }

    /// The loan by which lanes outside the lock touch this operation's memory.
    pub(crate) fn loan(&mut self) -> Arc<Loan> {
        self.attached().loan.get_or_insert_with(Arc::default).clone()
    }

    /// Recalls the memory from every lane; the loan, if a lane keeps it.
    pub(super) fn recall(&mut self) -> Option<Arc<Loan>> {
        let loan = self.attached.as_mut()?.loan.take()?;
        if loan.recall() { None } else { Some(loan) }
    }

    /// The rows that are its memory; `None`: it is one piece.
    pub(crate) fn part(&self) -> Option<&Part> {
        self.attached.as_ref()?.part.as_ref()
    }

    /// Its memory are those rows, and that follows its end.
    pub(crate) fn set_part(&mut self, part: Part, follow_up: Option<FollowUp>) {
        let attached = self.attached();
        (attached.part, attached.follow_up) = (Some(part), follow_up);
    }

    /// Its rows are read: their bytes are its memory from now on, behind the first `ahead`. Nothing follows its end.
    pub(crate) fn pack(&mut self, mut bytes: Vec<u8>, ahead: usize) {
        (self.ptr, self.len) = (bytes.as_mut_ptr(), bytes.len());
        let rows = std::mem::replace(&mut self.keep, Keep::Nothing);
        self.keep = Keep::Packed(Box::new((bytes, rows)));
        let attached = self.attached();
        (attached.ahead, attached.follow_up, attached.over) = (ahead, None, None);
    }

    /// Its memory belongs to those regions: it fails when one of them is deregistered.
    pub(crate) fn set_over(&mut self, regions: Arc<[RegionRef]>) {
        if self.is_in_flight() {
            self.attached().over = Some(regions);
        }
    }

    /// The regions that its memory belongs to.
    pub(crate) fn over(&self) -> &[RegionRef] {
        self.attached.as_ref().and_then(|attached| attached.over.as_deref()).unwrap_or_default()
    }

    /// True if its memory belongs to that region.
    pub(super) fn is_over_region(&self, region: RegionRef) -> bool {
        self.attached.as_ref().and_then(|attached| attached.over.as_ref()).is_some_and(|over| over.contains(&region))
    }

    /// Bytes of its memory ahead of those that it moves: of a notice in one put with them.
    pub(crate) fn ahead(&self) -> usize {
        self.attached.as_ref().map_or(0, |attached| attached.ahead)
    }

    /// How many of the first so many bytes of its memory are those that it moves: a notice may stand ahead of them.
    pub(crate) fn moved(&self, bytes: u64) -> u64 {
        bytes.saturating_sub(self.ahead() as u64)
    }

    /// That follows its end.
    pub(crate) fn set_follow_up(&mut self, follow_up: FollowUp) {
        self.attached().follow_up = Some(follow_up);
    }
}
