//! The worker's table of operations in flight, and of finished ones whose request is still held.

mod entry;

pub(crate) use self::entry::Op;
use self::entry::{Attached, NO_ENTRY, State};

use std::collections::HashSet;

use crossrail_proto as proto;
use crossrail_transport::Place;
use crossrail_types::{EndpointId, Error, LaneId, OpId};

use super::names::Names;
use super::outcome::{Finish, OpKind, Outcome};
use super::receipt::{Callback, Collected};
use super::returns::{Owner, Returns};
use super::rows::part::FollowUp;
use crate::memory::{Buffer, Keep};

/// State of an operation, as [`Operations::collect`] reports it.
pub(crate) enum OpStatus {
    /// What it does, and with which peer, as far as that is known.
    InFlight(OpKind, Option<EndpointId>),
    /// Finished; the request keeps the end, and the entry is free.
    Collected,
    /// Finished; the entry stays until the request is dropped ([`Operations::outcome`]). Or there is no such operation.
    Kept,
}

/// The usual lane of a peer, as the ends of short messages refer to it.
pub(crate) struct UsualLane {
    pub(crate) endpoint: EndpointId,
    pub(crate) lane: LaneId,
    pub(crate) names: Names,
}

/// A receive that is waited for: its end goes to its request at once, without a stay in the table.
#[derive(Clone, Copy)]
pub(crate) struct Wanted<'a> {
    pub(crate) id: OpId,
    pub(crate) collected: &'a Collected,
}

/// Outcome of receiving a short message.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Received {
    /// None was received.
    Nothing,
    /// The [`Wanted`] receive ended, and left the table.
    Wanted,
    /// A receive ended.
    Ended,
    /// Its receive must end on the slow path.
    Attached,
}

/// Operations by index; an index is reused under a new generation, so an id of a freed entry refers to nothing.
///
/// Protected by the worker's lock. An operation is inserted, finishes exactly once ([`Operations::finish`] or
/// [`Operations::finish_short`]; later calls are ignored), and leaves the table when its request has been dropped or
/// its outcome collected. From the finish on no lane touches its memory.
pub(crate) struct Operations {
    slots: Vec<Op>,
    /// The first free entry, or [`NO_ENTRY`].
    free: u32,
    /// Callbacks of finished operations, to be run without the lock.
    callbacks: Vec<(Callback, Outcome)>,
    /// What follows the ends of operations.
    follow_ups: Vec<(EndpointId, FollowUp, bool)>,
    /// Short messages that have ended and need more than [`Operations::finish_short`].
    delivered: Vec<(EndpointId, proto::Short)>,
    /// What has happened since [`Operations::take_news`]: [`FINISHED`], [`CALLBACKS`], [`FOLLOW_UPS`].
    news: u8,
    /// Count of the times that [`FINISHED`] was set.
    reports: u64,
    live: usize,
    /// Operations that were ever inserted.
    begun: u64,
    /// Loans that lanes have yet to return, of operations and others.
    pub(super) returns: Returns,
}

/// An operation has finished, or waiting threads are to check what they wait for.
pub(crate) const FINISHED: u8 = 1;
/// There are callbacks to run.
pub(crate) const CALLBACKS: u8 = 2;

/// Something follows the end of an operation ([`Core::follow_up`](super::Core::follow_up)).
pub(crate) const FOLLOW_UPS: u8 = 4;

/// Token of a message that is placed whole, together with the index of its receive.
pub(super) const MESSAGE: u64 = 1 << 62;
/// Token of a word that goes into a region.
pub(super) const WORD: u64 = 1 << 61;
/// Token of bytes for a list that the lane's own memory receives.
pub(super) const ROWS: u64 = 1 << 60;

impl Default for Operations {
    fn default() -> Operations {
        Operations {
            slots: Vec::new(),
            free: NO_ENTRY,
            callbacks: Vec::new(),
            follow_ups: Vec::new(),
            delivered: Vec::new(),
            news: 0,
            reports: 0,
            live: 0,
            begun: 0,
            returns: Returns::default(),
        }
    }
}

// SAFETY: the pointers in it are descriptions; they are dereferenced by lanes under the rules of `Payload` and
// `Place`, whatever thread drives them.
#[allow(unsafe_code)]
unsafe impl Send for Operations {}

impl Operations {
    /// The id of the operation that is inserted next.
    #[inline(always)]
    pub(super) fn upcoming(&mut self) -> OpId {
        if self.free == NO_ENTRY {
            self.grow();
        }
        OpId { index: self.free, generation: self.slots[self.free as usize].generation }
    }

    pub(crate) fn insert(&mut self, kind: OpKind, endpoint: Option<EndpointId>, tag: u64, mut buffer: Buffer) -> OpId {
        let (id, gpu) = (self.upcoming(), buffer.gpu.take());
        self.insert_plain(id, kind, (endpoint, tag), &mut buffer);
        if let Some(op) = self.op_mut(id).filter(|_| gpu.is_some()) {
            op.complicate();
            op.gpu = gpu;
        }
        id
    }

    /// [`Operations::insert`] of an operation whose memory is the host's, which it takes over, with the id that is
    /// [upcoming](Operations::upcoming).
    #[inline(always)]
    pub(super) fn insert_plain(
        &mut self,
        id: OpId,
        kind: OpKind,
        (endpoint, tag): (Option<EndpointId>, u64),
        buffer: &mut Buffer,
    ) {
        let slot = &mut self.slots[id.index as usize];
        debug_assert!(self.free == id.index && slot.state == State::Free && slot.gpu.is_none());
        self.free = slot.next_free;
        self.live += 1;
        self.begun += 1;
        slot.state = State::Plain;
        slot.kind = kind;
        slot.detached = false;
        slot.endpoint = endpoint;
        slot.ptr = buffer.ptr;
        slot.len = buffer.len;
        slot.tag = tag;
        buffer.keep.move_to(&mut slot.keep);
    }

    #[cold]
    fn grow(&mut self) {
        self.free = self.slots.len() as u32;
        self.slots.push(Op::vacant());
    }

    #[inline]
    pub(crate) fn op(&self, id: OpId) -> Option<&Op> {
        // The generation is that of the next use as soon as the entry is free. Not by `filter`, which makes the
        // compiler test the reference a second time.
        match self.slots.get(id.index as usize) {
            Some(op) if op.generation == id.generation => Some(op),
            _ => None,
        }
    }

    #[inline]
    pub(crate) fn op_mut(&mut self, id: OpId) -> Option<&mut Op> {
        match self.slots.get_mut(id.index as usize) {
            Some(op) if op.generation == id.generation => Some(op),
            _ => None,
        }
    }

    /// What has happened since the last call: [`FINISHED`], [`CALLBACKS`].
    #[inline]
    pub(crate) fn take_news(&mut self) -> u8 {
        std::mem::take(&mut self.news)
    }

    /// Makes waiting threads recheck their conditions, although no operation has finished.
    pub(crate) fn report(&mut self) {
        self.news |= FINISHED;
        self.reports += 1;
    }

    /// Count of finished operations and of calls of [`Operations::report`].
    pub(crate) fn reports(&self) -> u64 {
        self.reports
    }

    /// What follows the ends of operations, with their peers, and whether they were good.
    pub(crate) fn take_follow_ups(&mut self) -> Vec<(EndpointId, FollowUp, bool)> {
        std::mem::take(&mut self.follow_ups)
    }

    /// Callbacks to run without the lock.
    pub(crate) fn take_callbacks(&mut self) -> Vec<(Callback, Outcome)> {
        std::mem::take(&mut self.callbacks)
    }

    /// Has `callback` run with an outcome that has left the table already.
    pub(crate) fn call_back(&mut self, callback: Callback, outcome: Outcome) {
        self.callbacks.push((callback, outcome));
        self.news |= CALLBACKS;
    }

    /// Operations whose request is still held or that are still in flight.
    pub(crate) fn live(&self) -> usize {
        self.live
    }

    #[inline]
    pub(crate) fn is_done(&self, id: OpId) -> bool {
        self.op(id).is_none_or(Op::is_over)
    }

    /// Recalls an operation's memory from all lanes, as far as they can stop.
    pub(crate) fn recall(&mut self, id: OpId) {
        if let Some(loan) = self.op_mut(id).and_then(Op::recall) {
            self.returns.await_loan(Owner::Operation(id), loan);
        }
    }

    /// Ends an operation, at once or as soon as no lane keeps its memory: none touches it from then on.
    pub(crate) fn finish(&mut self, id: OpId, mut outcome: Outcome) {
        self.recall(id);
        let is_kept = !self.returns.is_empty() && self.returns.has_operation(id);
        let Some(op) = self.op_mut(id) else { return };
        if op.is_over() {
            return;
        }
        if is_kept {
            op.attached().ending.get_or_insert(outcome);
            return;
        }
        let Attached { direct, callback, parent, ending, follow_up, .. } =
            op.attached.take().map(|attached| *attached).unwrap_or_default();
        let follow_up = op.endpoint.zip(follow_up);
        if let Some(first) = ending {
            outcome = first;
        }
        if let Ok(Finish { more: Some(more), .. }) = &mut outcome {
            more.direct = direct;
            more.times = op.gpu.as_ref().map(|gpu| Box::new(gpu.times));
        }
        let detached = op.detached;
        let part = parent.map(|parent| (parent, outcome.clone()));
        if !matches!(op.keep, Keep::Vec(_)) {
            op.keep = Keep::Nothing;
        }
        if let Some(callback) = callback {
            self.call_back(callback, outcome.clone());
        }
        if let Some((endpoint, follow_up)) = follow_up {
            self.follow_ups.push((endpoint, follow_up, outcome.is_ok()));
            self.news |= FOLLOW_UPS;
        }
        if let Some(op) = self.op_mut(id) {
            op.outcome = Some(outcome);
            op.state = State::Finished;
        }
        self.report();
        if detached {
            self.free(id);
        }
        if let Some((parent, outcome)) = part {
            self.child_finished(parent, Some(outcome));
        }
    }

    /// Ends what has waited for loans that are returned now.
    #[cold]
    pub(crate) fn settle_returns(&mut self) {
        for owner in self.returns.take_returned() {
            match owner {
                Owner::Operation(id) => {
                    let ending = self.op_mut(id).and_then(|op| op.attached.as_mut()).and_then(|op| op.ending.take());
                    if let Some(outcome) = ending {
                        self.finish(id, outcome);
                    }
                }
                Owner::Access(_) => self.report(),
                Owner::Memory(_) => {}
            }
        }
    }

    /// Never frees an operation's memory, which a peer may still be accessing. It ends as if nothing kept it.
    pub(super) fn leak(&mut self, id: OpId) {
        let Some(op) = self.op_mut(id) else { return };
        std::mem::forget(std::mem::replace(&mut op.keep, Keep::Nothing));
        if let Some(outcome) = op.attached.as_mut().and_then(|attached| attached.ending.take()) {
            self.finish(id, outcome);
        }
    }

    /// [`Operations::finish`] for a short message with nothing attached to it, over the usual lane of the peer that
    /// `from` describes. False: go the long way.
    #[inline(always)]
    pub(crate) fn finish_short(&mut self, from: &UsualLane, short: &proto::Short) -> bool {
        let Some(op) = self.op_mut(short.op) else { return true };
        if op.state != State::Plain || short.lane != Some(from.lane) {
            return false;
        }
        if op.kind == OpKind::Receive {
            op.endpoint = Some(from.endpoint);
            op.tag = short.tag;
        }
        op.bytes = short.bytes;
        op.conclude(from.names, short.wire_ns);
        self.report();
        true
    }

    /// Has `take` put a short message into the memory of its receive (null: there is none any more), which ends and, if
    /// it is `wanted`, leaves the table.
    #[inline(always)]
    pub(super) fn receive_short(
        &mut self,
        from: &UsualLane,
        short: &proto::Short,
        wanted: Option<Wanted<'_>>,
        take: impl FnOnce(*mut u8),
    ) -> Received {
        let Operations { slots, free, live, news, reports, .. } = self;
        let op = match slots.get_mut(short.op.index as usize) {
            Some(op) if op.generation == short.op.generation => op,
            _ => {
                take(std::ptr::null_mut());
                return Received::Ended;
            }
        };
        take(op.ptr);
        if op.state != State::Plain {
            return Received::Attached;
        }
        *news |= FINISHED;
        *reports += 1;
        if let Some(Wanted { id, collected }) = wanted
            && id == short.op
            && op.let_go()
        {
            collected.store(from.names.word(), short.tag, short.bytes, short.wire_ns);
            op.vacate(id, free, live);
            return Received::Wanted;
        }
        op.endpoint = Some(from.endpoint);
        op.tag = short.tag;
        op.bytes = short.bytes;
        op.conclude(from.names, short.wire_ns);
        Received::Ended
    }

    /// Leaves a short message's end to [`Transfers::settle`](super::Transfers::settle), because it has more to it than
    /// most. Callers give a copy: with a reference to their own, it would have to lie in memory in the usual case, too.
    #[cold]
    pub(super) fn deliver_later(&mut self, endpoint: EndpointId, short: &proto::Short) {
        self.delivered.push((endpoint, *short));
    }

    #[inline]
    pub(super) fn has_delivered(&self) -> bool {
        !self.delivered.is_empty()
    }

    /// What [`Operations::deliver_later`] was given.
    pub(super) fn take_delivered(&mut self) -> Vec<(EndpointId, proto::Short)> {
        std::mem::take(&mut self.delivered)
    }

    /// Where a short message goes that is placed whole, and how its receive ends: with [`Operations::placed_short`].
    /// `names`: those of the peer, if it came over the peer's usual lane.
    #[inline]
    pub(super) fn place_short(&mut self, endpoint: EndpointId, names: Option<Names>, short: &proto::Short) -> Place {
        let Some(op) = self.op_mut(short.op) else { return Place::Discard };
        op.endpoint = Some(endpoint);
        op.names = names.map_or(0, Names::word);
        op.tag = short.tag;
        op.bytes = short.bytes;
        op.wire_ns = short.wire_ns;
        op.lane = short.lane;
        let token = MESSAGE | u64::from(short.op.index);
        Place::Into { dst: op.ptr, len: short.bytes as usize, grant: None, token }
    }

    /// The message of [`Operations::place_short`] is in its place: nothing else has happened since, for as long as the
    /// worker's lock is held. `Some`: go the long way.
    #[inline]
    pub(super) fn placed_short(&mut self, token: u64) -> Option<proto::Short> {
        let index = token as u32;
        let op = self.slots.get_mut(index as usize)?;
        if op.state == State::Plain
            && let Some(names) = Names::of_word(op.names)
        {
            op.conclude(names, op.wire_ns);
            self.report();
            return None;
        }
        let id = OpId { index, generation: op.generation };
        Some(proto::Short { op: id, tag: op.tag, bytes: op.bytes, wire_ns: op.wire_ns, lane: op.lane })
    }

    /// How an operation stands. The good end of a short message leaves the table with this call, for `collected` of its
    /// request, which is not looked up again.
    #[inline]
    pub(crate) fn collect(&mut self, id: OpId, collected: &Collected) -> OpStatus {
        let Operations { slots, free, live, .. } = self;
        let op = match slots.get_mut(id.index as usize) {
            Some(op) if op.generation == id.generation => op,
            _ => return OpStatus::Kept,
        };
        match op.state {
            State::Short if matches!(op.keep, Keep::Nothing) => {
                collected.store(op.names, op.tag, op.bytes, op.wire_ns);
                op.vacate(id, free, live);
                OpStatus::Collected
            }
            State::Plain | State::InFlight => OpStatus::InFlight(op.kind, op.endpoint),
            _ => OpStatus::Kept,
        }
    }

    /// How a finished operation ended; `None`: it is in flight, or there is none.
    pub(crate) fn outcome(&self, id: OpId) -> Option<Outcome> {
        self.op(id).and_then(Op::outcome)
    }

    /// Keeps a batch from finishing while its parts are still being submitted.
    pub(crate) fn hold(&mut self, parent: OpId) {
        if let Some(op) = self.op_mut(parent) {
            op.attached().children += 1;
        }
    }

    /// Undoes [`Operations::hold`]: all parts are submitted; `failure`: that of one which could not be.
    pub(crate) fn release(&mut self, parent: OpId, failure: Option<Box<Error>>) {
        self.child_finished(parent, failure.map(Err));
    }

    /// The running parts of a batch.
    pub(crate) fn children(&self, parent: OpId) -> Vec<OpId> {
        let mut running = self.running();
        running.retain(|id| {
            self.op(*id).is_some_and(|op| op.attached.as_ref().and_then(|attached| attached.parent) == Some(parent))
        });
        running
    }

    fn child_finished(&mut self, parent: OpId, outcome: Option<Outcome>) {
        let Some(op) = self.op_mut(parent) else { return };
        let (endpoint, tag) = (op.endpoint, op.tag);
        let batch = op.attached();
        batch.children -= 1;
        match outcome {
            Some(Ok(finish)) => {
                batch.bytes += finish.bytes;
                finish.add_to(&mut batch.carried);
            }
            // The batch fails with its first failure, but only once all its parts are finished.
            Some(Err(error)) => _ = batch.failure.get_or_insert(error),
            None => {}
        }
        if batch.children == 0 {
            let (bytes, carried) = (batch.bytes, std::mem::take(&mut batch.carried));
            let outcome = match batch.failure.take() {
                Some(error) => Err(error),
                None => Ok(Finish::of_batch(endpoint, tag, bytes, carried)),
            };
            self.finish(parent, outcome);
        }
    }

    /// Makes `child` part of `parent`'s batch.
    pub(crate) fn adopt(&mut self, parent: OpId, child: OpId) {
        self.hold(parent);
        let mut already = false;
        if let Some(op) = self.op_mut(child) {
            op.attached().parent = Some(parent);
            op.complicate();
            op.detached = true;
            already = op.is_over();
        }
        if already {
            let outcome = self.outcome(child);
            self.free(child);
            if outcome.is_some() {
                self.child_finished(parent, outcome);
            }
        }
    }

    /// Runs `callback` when the operation is finished (at once if it is).
    pub(crate) fn on_complete(&mut self, id: OpId, callback: Callback) {
        let Some(op) = self.op_mut(id) else { return };
        match op.outcome() {
            Some(outcome) => self.call_back(callback, outcome),
            None => {
                let attached = op.attached();
                attached.callback = Some(match attached.callback.take() {
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
        if op.is_over() {
            self.free(id);
        } else {
            op.complicate();
            op.detached = true;
        }
    }

    /// Takes an owned buffer back out of a finished operation.
    pub(crate) fn take_vec(&mut self, id: OpId) -> Option<Vec<u8>> {
        let op = self.op_mut(id).filter(|op| op.is_over())?;
        match std::mem::replace(&mut op.keep, Keep::Nothing) {
            Keep::Vec(bytes) => Some(bytes),
            other => {
                op.keep = other;
                None
            }
        }
    }

    /// How many were ever inserted.
    pub(super) fn begun(&self) -> u64 {
        self.begun
    }

    /// The operations in flight among the first `most` entries.
    pub(super) fn in_flight(&self, most: usize) -> impl Iterator<Item = (OpId, &Op)> {
        let entries = self.slots.iter().take(most).enumerate().filter(|(_, op)| op.is_in_flight());
        entries.map(|(index, op)| (OpId { index: index as u32, generation: op.generation }, op))
    }

    /// The peers that operations in the table run or ran with.
    pub(super) fn endpoints(&self) -> HashSet<EndpointId> {
        self.slots.iter().filter(|op| op.state != State::Free).filter_map(|op| op.endpoint).collect()
    }

    /// The operations in flight whose memory belongs to that region.
    pub(super) fn over_region(&self, region: proto::RegionRef) -> Vec<OpId> {
        self.in_flight(usize::MAX).filter(|(_, op)| op.is_over_region(region)).map(|(id, _)| id).collect()
    }

    /// All operations in flight.
    pub(crate) fn running(&self) -> Vec<OpId> {
        let running = |(index, op): (usize, &Op)| {
            op.is_in_flight().then_some(OpId { index: index as u32, generation: op.generation })
        };
        self.slots.iter().enumerate().filter_map(running).collect()
    }

    /// Frees the entry of a finished operation unless its request may still ask for its bytes.
    pub(crate) fn free_if_bare(&mut self, id: OpId) -> bool {
        let bare = self.op(id).is_some_and(|op| op.is_over() && matches!(op.keep, Keep::Nothing));
        if bare {
            self.free(id);
        }
        bare
    }

    fn free(&mut self, id: OpId) {
        let Some(slot) = self.slots.get_mut(id.index as usize).filter(|slot| slot.generation == id.generation) else {
            return;
        };
        slot.state = State::Free;
        slot.generation = slot.generation.wrapping_add(1);
        slot.keep = Keep::Nothing;
        slot.gpu = None;
        slot.outcome = None;
        slot.attached = None;
        slot.next_free = self.free;
        self.free = id.index;
        self.live -= 1;
    }
}
