//! Outgoing operations, and reads that we serve.

mod chunks;
mod entry;

use std::collections::VecDeque;

use crossrail_types::{LaneId, OpId};
use slab::Slab;

use super::Context;
use super::accesses::JobOf;
use super::credit::Credit;
use super::events::Events;
use super::stream::Stream;
use crate::feed::Feed;
use crate::frame::{self, Frame, Target};
use crate::{
    Body, Event, Failure, LaneShare, Memory, Offer, Operation, Protocol, Receipt, RegionRef, Role, Short, Time,
};

use entry::{AfterStop, Kind, Outgoing, Serve, Stage};

/// Longest write or read that counts as short: one frame carries it.
const SHORT_MAX: u64 = 64 << 10;

/// The length, if it is short.
#[inline]
fn if_short(len: u64) -> u64 {
    if len <= SHORT_MAX { len } else { 0 }
}

/// An operation that waits for credit or for the lane.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queued {
    pub(super) op: OpId,
    pub(super) what: Operation,
    pub(super) len: u64,
    pub(super) offer: Option<Offer>,
    pub(super) eager: bool,
    pub(super) at: Time,
}

/// A read of the peer's.
#[derive(Clone, Copy, Debug)]
pub(super) struct ServeOf {
    pub(super) their: u32,
    pub(super) target: Target,
    pub(super) region: RegionRef,
    pub(super) base: u64,
    pub(super) len: u64,
    pub(super) descriptor: Option<[u8; 24]>,
    pub(super) lane: LaneId,
}

/// Outcome of [`OutgoingOps::abort`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Aborted {
    /// There is no such operation.
    Unknown,
    /// The peer is asked to end it, or was.
    Asked,
    /// The same, and what still comes for this read is to be discarded.
    Read(Target),
}

/// All that this end has announced or is about to: operations of ours from [`Peer::start`](super::Peer::start) to
/// [`Event::Done`], and the peer's reads that we serve.
///
/// Owns the queue, the table (the id on the wire is the index plus one), and which transfers have chunks to hand out.
/// An entry stays until no direct copy of ours touches its memory and the peer has no more to say of it; a serial tells
/// the reuses of an index apart. What the peer says of an operation is checked here. Transfers towards us are known
/// only by the target that a read names: where a read ends, the caller ends its other half. Credit is the caller's,
/// too, until the operation ends.
#[derive(Debug, Default)]
pub(super) struct OutgoingOps {
    queue: VecDeque<Queued>,
    table: Slab<Outgoing>,
    serial: u32,
    /// Transfers with chunks to hand out, by index and serial, in turn.
    active: VecDeque<(u32, u32)>,
    /// The write whose bytes must follow at once.
    follow: Option<(u32, u32)>,
    /// Number of messages sent without consent so far.
    unasked: u32,
    /// Bytes of short writes and of short reads that we serve, while they are in the table.
    short_bytes: u64,
}

impl OutgoingOps {
    #[inline]
    pub(super) fn enqueue(&mut self, queued: Queued) {
        self.queue.push_back(queued);
    }

    /// Takes an operation out that has not begun; false: there is none.
    pub(super) fn withdraw(&mut self, op: OpId) -> bool {
        let found = self.queue.iter().position(|q| q.op == op);
        found.is_some_and(|at| self.queue.remove(at).is_some())
    }

    /// The next operation to begin; credit was checked.
    #[inline]
    pub(super) fn take_queued(&mut self) -> Option<Queued> {
        self.queue.pop_front()
    }

    /// Nothing is queued or in the table.
    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.table.is_empty()
    }

    /// Not 0 if an operation is queued or has chunks to hand out.
    #[inline]
    pub(super) fn waiting(&self) -> usize {
        self.queue.len() | self.active.len()
    }

    /// Whether an operation is queued, or a write's bytes must follow.
    #[inline]
    pub(super) fn has_control_frames(&self) -> bool {
        !self.queue.is_empty() || self.follow.is_some()
    }

    /// Whether a write's bytes must follow.
    #[inline]
    pub(super) fn must_follow(&self) -> bool {
        self.follow.is_some()
    }

    /// Outstanding bytes of short writes and of short reads that we serve.
    #[inline]
    pub(super) fn short_bytes(&self) -> u64 {
        self.short_bytes
    }

    /// [`OutgoingOps::short_bytes`] and those of operations that have not begun, up to `enough`.
    pub(super) fn short_bytes_to_come(&self, enough: u64) -> u64 {
        let mut sum = self.short_bytes;
        for queued in &self.queue {
            if sum >= enough {
                break;
            }
            sum += if_short(queued.len);
        }
        sum
    }

    fn next_serial(&mut self) -> u32 {
        self.serial = self.serial.wrapping_add(1);
        self.serial
    }

    /// A message goes out with its first frame, the `seq`-th, which may be lost. Its id on the wire.
    pub(super) fn begin_eager(&mut self, op: OpId, len: u64, started: Time, lane: LaneId, seq: u32) -> u32 {
        let mut outgoing = Outgoing::new(op, Kind::Send, len, self.next_serial(), started, lane);
        outgoing.stage = Stage::Eager;
        outgoing.seq = Some(seq);
        self.table.insert(outgoing) as u32 + 1
    }

    /// A message is announced. Its id on the wire.
    pub(super) fn begin_send(&mut self, now: Time, of: &Queued, lane: LaneId, offer: Option<Offer>) -> u32 {
        let mut outgoing = Outgoing::new(of.op, Kind::Send, of.len, self.next_serial(), of.at, lane);
        outgoing.long_mut().announce(now, offer);
        self.table.insert(outgoing) as u32 + 1
    }

    /// A message is announced, and its bytes go unasked on whichever lane has room. Its id on the wire, and its number
    /// among such messages.
    pub(super) fn begin_unasked(&mut self, now: Time, of: &Queued, lane: LaneId) -> (u32, u32) {
        let number = self.unasked;
        self.unasked = number.wrapping_add(1);
        let mut outgoing = Outgoing::new(of.op, Kind::Send, of.len, self.next_serial(), of.at, lane);
        outgoing.long_mut().announce(now, None);
        outgoing.long_mut().consented = now;
        outgoing.long_mut().took_bytes = true;
        let index = self.table.insert(outgoing) as u32;
        self.start_feed(index, Target { index: 0, serial: number });
        if let Some(feed) = self.table[index as usize].feed() {
            feed.unasked = true;
        }
        (index + 1, number)
    }

    /// A write begins; `short`: its bytes follow at once. Its id on the wire.
    pub(super) fn begin_write(
        &mut self,
        now: Time,
        of: &Queued,
        lane: LaneId,
        offer: Option<Offer>,
        short: bool,
    ) -> u32 {
        let serial = self.next_serial();
        self.short_bytes += if_short(of.len);
        let mut outgoing = Outgoing::new(of.op, Kind::Write, of.len, serial, of.at, lane);
        if short {
            outgoing.stage = Stage::Eager;
        } else {
            outgoing.long_mut().announce(now, offer);
        }
        let index = self.table.insert(outgoing) as u32;
        if short {
            self.follow = Some((index, serial));
        }
        index + 1
    }

    /// A read begins, for which `into` makes a target, given its index. Its id on the wire, and the target.
    pub(super) fn begin_read(
        &mut self,
        now: Time,
        of: &Queued,
        lane: LaneId,
        offer: Option<Offer>,
        into: impl FnOnce(u32) -> Target,
    ) -> (u32, Target) {
        let serial = self.next_serial();
        let entry = self.table.vacant_entry();
        let index = entry.key() as u32;
        let target = into(index);
        let mut outgoing = Outgoing::new(of.op, Kind::Read { target }, of.len, serial, of.at, lane);
        outgoing.long_mut().announce(now, offer);
        entry.insert(outgoing);
        (index + 1, target)
    }

    /// The write whose bytes must follow at once: its index and body.
    pub(super) fn take_follow(&mut self) -> Option<(u32, Body)> {
        let (index, serial) = self.follow.take()?;
        let outgoing = self.table.get(index as usize).filter(|o| o.serial == serial)?;
        Some((index, Body::Memory { memory: Memory::Op(outgoing.op), offset: 0, len: outgoing.len as u32 }))
    }

    /// The bytes of that operation went out with the `seq`-th frame.
    pub(super) fn went_with(&mut self, index: u32, seq: u32) {
        if let Some(outgoing) = self.table.get_mut(index as usize) {
            outgoing.seq = Some(seq);
        }
    }

    /// The peer says that it has all of our operation `id` (or that it has all of the read which we serve).
    #[inline]
    pub(super) fn finished(&mut self, id: u32, cx: &mut Context<'_>) -> Result<(), String> {
        let index = id.wrapping_sub(1);
        let Some(outgoing) = self.table.get(index as usize) else {
            return Err(format!("operation {id} finished that is not in flight"));
        };
        match outgoing.kind {
            Kind::Send if outgoing.stage == Stage::Eager => {
                self.close_eager(cx.now, index, cx.credit, cx.stream, cx.events)
            }
            Kind::Read { .. } => return Err(format!("read {id} finished by its owner")),
            _ => self.finish(index, Ok(()), |_| false, cx),
        }
        Ok(())
    }

    /// An operation is over as soon as no direct copy of ours and no unpack touches its memory. `unpacks`: whether one
    /// does for the read with that target.
    #[inline]
    pub(super) fn finish(
        &mut self,
        index: u32,
        result: Result<(), Failure>,
        unpacks: impl FnOnce(Target) -> bool,
        cx: &mut Context<'_>,
    ) {
        let Some(outgoing) = self.table.get_mut(index as usize) else { return };
        if let Some(job) = outgoing.long().job {
            let after = std::mem::replace(&mut outgoing.long_mut().after, AfterStop::Finish(result));
            if after == AfterStop::Running {
                cx.events.stop(job);
            }
        } else if outgoing.kind == Kind::Serve {
            self.close_serve(index, cx);
        } else if let Kind::Read { target } = outgoing.kind
            && unpacks(target)
        {
            outgoing.long_mut().after = AfterStop::Finish(result);
        } else {
            self.close(index, result, cx);
        }
    }

    /// Whether that operation is a message which went with its first frame and only waits to hear that it arrived.
    #[inline]
    pub(super) fn finishes_eager(&self, index: u32) -> bool {
        self.table.get(index as usize).is_some_and(|o| o.stage == Stage::Eager && o.kind == Kind::Send)
    }

    /// A message that went with its first frame has arrived; [`OutgoingOps::close`] in few steps.
    #[inline]
    pub(super) fn close_eager(
        &mut self,
        now: Time,
        index: u32,
        credit: &mut Credit,
        stream: &mut Stream,
        events: &mut Events,
    ) {
        let Some(outgoing) = self.table.try_remove(index as usize) else { return };
        let Outgoing { op, seq, len, started, lane, .. } = outgoing;
        credit.give_back(len);
        if seq.is_some_and(|seq| stream.leave(seq)) {
            events.revoke(Memory::Op(op));
        }
        events.end_short(Short { op, tag: 0, bytes: len, wire_ns: now.since(started), lane: Some(lane) });
    }

    #[inline]
    fn close(&mut self, index: u32, result: Result<(), Failure>, cx: &mut Context<'_>) {
        let mut outgoing = self.table.remove(index as usize);
        let op = outgoing.op;
        if outgoing.kind == Kind::Write {
            self.short_bytes -= if_short(outgoing.len);
        }
        let short = outgoing.stage == Stage::Eager || outgoing.seq.is_some() || outgoing.long().took_bytes;
        cx.credit.give_back(if short && outgoing.kind == Kind::Send { outgoing.len } else { 0 });
        let left = outgoing.seq.is_some_and(|seq| cx.stream.leave(seq));
        if left || outgoing.touched() || result.is_err() {
            cx.events.revoke(Memory::Op(op));
        }
        match result {
            Ok(()) => {
                let (progress, receipt) = (outgoing.len, outgoing.receipt(cx.now));
                cx.events.push(Event::Done { op, result: Ok(receipt), progress, tag: 0 });
            }
            Err(why) => cx.events.fail(op, why, outgoing.feed().map_or(0, |f| f.sent()), 0),
        }
    }

    /// A read of ours is over: its bytes are all here, over `lanes`.
    pub(super) fn close_read(&mut self, index: u32, protocol: Protocol, lanes: Vec<LaneShare>, cx: &mut Context<'_>) {
        let outgoing = self.table.remove(index as usize);
        cx.credit.give_back(0);
        let lane = (protocol == Protocol::Eager).then_some(outgoing.lane);
        let wire_ns = cx.now.since(outgoing.long().announced);
        let bytes = outgoing.len;
        let pushed = protocol == Protocol::Direct;
        let receipt = Receipt { bytes, protocol, lane, lanes, match_ns: 0, window_ns: 0, wire_ns, copy_ns: 0, pushed };
        cx.events.push(Event::Done { op: outgoing.op, result: Ok(receipt), progress: bytes, tag: 0 });
    }

    /// The last unpack of a read that is over, or given up, is done.
    pub(super) fn end_unpacks(&mut self, index: u32, of: Target, cx: &mut Context<'_>) {
        let found = self.table.get(index as usize).filter(|o| o.kind == Kind::Read { target: of });
        if let Some(AfterStop::Finish(result)) = found.map(|o| o.long().after.clone()) {
            self.close(index, result, cx);
        }
    }

    /// The peer's receipt of a failure of our operation `id`.
    pub(super) fn failed(&mut self, id: u32, why: Failure, cx: &mut Context<'_>) -> Result<(), String> {
        let index = id.wrapping_sub(1);
        match self.table.get(index as usize).map(|o| o.kind) {
            Some(Kind::Send | Kind::Write) => {
                let why = self.prefer_own_failure(index, why);
                self.finish(index, Err(why), |_| false, cx);
                Ok(())
            }
            _ => Err(format!("operation {id} failed that is not in flight")),
        }
    }

    /// Our read into that target.
    pub(super) fn find_read(&self, target: Target) -> Option<u32> {
        self.table.iter().find(|(_, o)| o.kind == Kind::Read { target }).map(|(i, _)| i as u32)
    }

    /// The failure to report: our own, with full details, if our memory failed; otherwise the peer's.
    pub(super) fn prefer_own_failure(&mut self, index: u32, theirs: Failure) -> Failure {
        let own = self.table.get_mut(index as usize).and_then(Outgoing::take_fault);
        match (own, theirs) {
            (Some(own), Failure::Device(_) | Failure::Cancelled) => own,
            (_, theirs) => theirs,
        }
    }

    /// The peer wants chunks of our operation `id`.
    pub(super) fn consented(&mut self, now: Time, id: u32, target: Target, events: &mut Events) -> Result<(), String> {
        let index = id.wrapping_sub(1);
        let Some(outgoing) = self.table.get_mut(index as usize) else {
            return Err(format!("consent to operation {id}, which is not in flight"));
        };
        match (outgoing.kind, outgoing.stage) {
            (Kind::Send | Kind::Write, Stage::Announced) => {}
            (Kind::Send | Kind::Write, Stage::Aborting) => return Ok(()),
            _ => return Err(format!("consent to operation {id}, which was not announced")),
        }
        let long = outgoing.long_mut();
        long.consented = now;
        match (long.job, &long.after) {
            (Some(job), AfterStop::Running) => {
                long.after = AfterStop::Feed(target);
                events.stop(job);
            }
            (Some(_), _) => return Err(format!("operation {id} consented to twice")),
            (None, _) => self.start_feed(index, target),
        }
        Ok(())
    }

    /// Starts to end an operation of ours before its time.
    pub(super) fn abort(&mut self, op: OpId, why: &Failure, cx: &mut Context<'_>) -> Aborted {
        let Some(index) = self.find(op) else { return Aborted::Unknown };
        let outgoing = &mut self.table[index];
        if outgoing.stage == Stage::Aborting || matches!(outgoing.long().after, AfterStop::Finish(_)) {
            return Aborted::Asked;
        }
        outgoing.stage = Stage::Aborting;
        if matches!(why, Failure::Device(_) | Failure::Withdrawn) {
            outgoing.long_mut().fault = Some(why.clone());
        }
        if let Some(job) = outgoing.long().job
            && std::mem::replace(&mut outgoing.long_mut().after, AfterStop::Nothing) == AfterStop::Running
        {
            cx.events.stop(job);
        }
        let kind = outgoing.kind;
        if let Kind::Read { .. } = kind {
            cx.events.revoke(Memory::Op(op));
        }
        cx.control.push_abort(index as u32 + 1, why, cx.events);
        if let Kind::Read { target } = kind { Aborted::Read(target) } else { Aborted::Asked }
    }

    /// The index of an operation of ours.
    fn find(&self, op: OpId) -> Option<usize> {
        self.table.iter().find(|(_, o)| o.op == op && o.kind != Kind::Serve).map(|(i, _)| i)
    }

    /// Bytes moved and bytes in all, of an operation of ours. `received`: how many came for a read's target.
    pub(super) fn progress(&self, op: OpId, received: impl FnOnce(Target) -> u64) -> Option<(u64, u64)> {
        if let Some(queued) = self.queue.iter().find(|q| q.op == op) {
            return Some((0, queued.len));
        }
        let outgoing = &self.table[self.find(op)?];
        let moved = match outgoing.kind {
            Kind::Read { target } => received(target),
            _ => outgoing.long().feed.as_ref().map_or(0, Feed::sent),
        };
        Some((moved, outgoing.len))
    }

    /// Fails all that is in flight, then all that is queued: of the peer nothing is expected any more. `unpacks`: as in
    /// [`OutgoingOps::finish`].
    pub(super) fn fail_all(&mut self, why: &Failure, unpacks: impl Fn(Target) -> bool, cx: &mut Context<'_>) {
        let all: Vec<u32> = self.table.iter().map(|(i, _)| i as u32).collect();
        for index in all {
            let outgoing = &self.table[index as usize];
            if outgoing.kind == Kind::Serve && outgoing.long().job.is_none() {
                cx.events.revoke(outgoing.memory());
            }
            // A result that the peer had already reported stands.
            let result = match &outgoing.long().after {
                AfterStop::Finish(result) => result.clone(),
                _ => Err(why.clone()),
            };
            self.finish(index, result, &unpacks, cx);
        }
        while let Some(queued) = self.queue.pop_front() {
            cx.events.fail(queued.op, why.clone(), 0, 0);
        }
    }

    /// Hands out no more chunks, and no bytes of a write.
    pub(super) fn silence(&mut self) {
        self.active.clear();
        self.follow = None;
    }
}

/// Reads of the peer's that we serve.
impl OutgoingOps {
    /// A read of the peer's, permitted; its index. `eager_max`: bytes that may go in one frame.
    pub(super) fn serve(&mut self, read: ServeOf, eager_max: u64, cx: &mut Context<'_>) -> u32 {
        let ServeOf { their, target, region, base, len, descriptor, lane } = read;
        let passive = cx.accesses.begin();
        self.short_bytes += if_short(len);
        let op = OpId { index: u32::MAX, generation: u32::MAX };
        let mut outgoing = Outgoing::new(op, Kind::Serve, len, self.next_serial(), cx.now, lane);
        outgoing.long_mut().serve = Some(Serve { region, base, their, target, passive });
        let memory = outgoing.memory();
        let entry = self.table.vacant_entry();
        let index = entry.key() as u32;
        if let Some(descriptor) = descriptor {
            // To where the peer reads them to.
            let job = cx.accesses.begin_job(JobOf::Out(index));
            outgoing.long_mut().job = Some(job);
            let offer = Offer { descriptor, slot: None };
            cx.events.push(Event::Direct { job, memory, role: Role::Help, offer, len });
        } else if len <= eager_max {
            outgoing.stage = Stage::Eager;
            let body = Body::Memory { memory, offset: 0, len: len as u32 };
            cx.control.push(Frame::ReadData { serve: index + 1, target }, body, cx.events);
        }
        let chunks = descriptor.is_none() && outgoing.stage != Stage::Eager;
        entry.insert(outgoing);
        if chunks {
            self.start_feed(index, target);
        }
        index
    }

    /// A read that we serve cannot go on. Its id stays taken until the peer has agreed.
    pub(super) fn fail_serve(&mut self, index: u32, why: Failure, cx: &mut Context<'_>) {
        let Some(outgoing) = self.table.get_mut(index as usize) else { return };
        let Some(Serve { target, .. }) = outgoing.long().serve else { return };
        if outgoing.stage == Stage::Aborting {
            return;
        }
        if let Some(job) = outgoing.long().job {
            match outgoing.long().after {
                AfterStop::Running => cx.events.stop(job),
                AfterStop::Nothing | AfterStop::Feed(_) => {}
                AfterStop::Finish(_) | AfterStop::ServeFailed(_) => return,
            }
            outgoing.long_mut().after = AfterStop::ServeFailed(why);
            return;
        }
        outgoing.stage = Stage::Aborting;
        if let Some(seq) = outgoing.seq {
            cx.stream.leave(seq);
        }
        // Lanes may still read what is in flight of it: the peer treats those bytes as valid until it learns of the
        // failure.
        cx.control.withdraw_data(index + 1);
        let (code, bytes) = frame::encode_failure(&why);
        cx.control.push(Frame::ReadFailed { serve: index + 1, target, code }, Body::from(bytes), cx.events);
    }

    fn close_serve(&mut self, index: u32, cx: &mut Context<'_>) {
        let outgoing = self.table.remove(index as usize);
        self.short_bytes -= if_short(outgoing.len);
        let Some(Serve { region, their, passive, .. }) = outgoing.long().serve else { return };
        let memory = outgoing.memory();
        let left = outgoing.seq.is_some_and(|seq| cx.stream.leave(seq));
        if outgoing.stage == Stage::Eager && outgoing.seq.is_none() {
            cx.control.withdraw_data(index + 1);
        }
        // One that failed was acknowledged by its reader without being read to the end.
        let failed = outgoing.stage == Stage::Aborting;
        if left || failed || outgoing.touched() {
            cx.events.revoke(memory);
        }
        cx.events.push(Event::Released { passive, region });
        cx.peer_ops.free(their);
    }

    /// What we serve out of that region.
    pub(super) fn serves_of(&self, region: RegionRef) -> Vec<u32> {
        let of = |o: &Outgoing| o.long().serve.is_some_and(|s| s.region == region);
        self.table.iter().filter(|(_, o)| of(o)).map(|(i, _)| i as u32).collect()
    }

    /// What reads or serves that memory.
    pub(super) fn find_memory(&self, memory: Memory) -> Option<u32> {
        self.table.iter().find(|(_, o)| o.memory() == memory).map(|(at, _)| at as u32)
    }

    /// The memory of each operation, and of each read that is served.
    pub(super) fn memories(&self) -> impl Iterator<Item = Memory> {
        self.table.iter().map(|(_, outgoing)| outgoing.memory())
    }

    /// True if the bytes of our operation go with its first frame, which may be in flight.
    pub(super) fn is_eager(&self, op: OpId) -> bool {
        self.table.iter().any(|(_, o)| o.op == op && o.long().serve.is_none() && o.stage == Stage::Eager)
    }
}

/// Direct copies from our memory.
impl OutgoingOps {
    /// The peer asks us to help with our operation `id`, or to copy it alone.
    pub(super) fn invited(&mut self, id: u32, descriptor: [u8; 24], cx: &mut Context<'_>) {
        let index = id.wrapping_sub(1);
        let Some(outgoing) = self.table.get_mut(index as usize) else { return };
        let fit = matches!(outgoing.kind, Kind::Send | Kind::Write)
            && outgoing.stage == Stage::Announced
            && outgoing.long().job.is_none();
        if !fit || !outgoing.long().offered {
            cx.control.push(Frame::HelpEnded { op: id, failed: true }, Body::None, cx.events);
            return;
        }
        let offer = Offer { descriptor, slot: outgoing.long().slot };
        let job = cx.accesses.begin_job(JobOf::Out(index));
        outgoing.long_mut().job = Some(job);
        let (memory, len) = (Memory::Op(outgoing.op), outgoing.len);
        cx.events.push(Event::Direct { job, memory, role: Role::Help, offer, len });
    }

    /// Our pushing is over: done in so many nanoseconds, or not.
    pub(super) fn end_push(&mut self, index: u32, done: Option<u64>, cx: &mut Context<'_>) {
        let Some(outgoing) = self.table.get_mut(index as usize) else { return };
        let long = outgoing.long_mut();
        if let Some(copy_ns) = done {
            long.copy_ns = copy_ns;
            long.pushed = long.slot.is_none();
        }
        long.job = None;
        let after = std::mem::replace(&mut long.after, AfterStop::Running);
        let failed = done.is_none() || after != AfterStop::Running;
        if let Some(Serve { target, .. }) = outgoing.long().serve {
            match after {
                AfterStop::ServeFailed(why) => self.fail_serve(index, why, cx),
                AfterStop::Finish(_) => self.close_serve(index, cx),
                _ if outgoing.stage == Stage::Aborting => {}
                _ if failed => self.start_feed(index, target),
                _ => cx.control.push(Frame::Pushed { serve: index + 1, target }, Body::None, cx.events),
            }
            return;
        }
        cx.control.push(Frame::HelpEnded { op: index + 1, failed }, Body::None, cx.events);
        match after {
            AfterStop::Finish(result) => self.close(index, result, cx),
            AfterStop::Feed(target) => self.start_feed(index, target),
            AfterStop::Running | AfterStop::Nothing | AfterStop::ServeFailed(_) => {}
        }
    }

    /// Since when the owner may copy into a read's memory, of the last of our reads.
    pub(super) fn lending(&self) -> Option<Time> {
        let reads = self.table.iter().filter(|(_, o)| matches!(o.kind, Kind::Read { .. }) && o.long().offered);
        reads.map(|(_, o)| o.long().announced).max()
    }

    /// Memory that was offered to the peer for a direct copy, which it may be making.
    pub(super) fn exposed(&self) -> impl Iterator<Item = Memory> {
        let is_exposed = |o: &Outgoing| o.long().offered && matches!(o.stage, Stage::Announced | Stage::Aborting);
        self.table.iter().filter(move |(_, o)| is_exposed(o)).map(|(_, o)| o.memory())
    }

    /// The engine has given up all direct copies.
    pub(super) fn forget_jobs(&mut self) {
        for (_, outgoing) in &mut self.table {
            if outgoing.long().job.is_some() {
                outgoing.long_mut().job = None;
            }
        }
    }
}
