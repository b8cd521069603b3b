//! The life of what we announce: operations of ours, and reads that we serve.

use crossrail_types::{LaneId, OpId};

use super::Peer;
use super::theirs::Their;
use crate::feed::Feed;
use crate::frame::{self, Frame, Target};
use crate::lane::Sent;
use crate::{Body, DirectId, Event, Failure, LaneShare, Memory, Offer, Protocol, Receipt, RegionRef, Short, Time};

/// Something of ours under way: what a short message needs, and the rest apart.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) op: OpId,
    pub(super) len: u64,
    pub(super) started: Time,
    pub(super) serial: u32,
    /// Number of the frame with its bytes, where they go with the messages.
    pub(super) seq: Option<u32>,
    pub(super) lane: LaneId,
    pub(super) kind: Kind,
    pub(super) stage: Stage,
    more: Option<Box<More>>,
}

/// What only longer operations need.
#[derive(Debug)]
pub(super) struct More {
    pub(super) announced: Time,
    pub(super) consented: Time,
    /// The peer was told how to copy directly, and the shared cursor.
    pub(super) offered: bool,
    pub(super) slot: Option<u32>,
    pub(super) job: Option<DirectId>,
    pub(super) after: After,
    pub(super) copy_ns: u64,
    /// All of it was copied from here, without the peer.
    pub(super) pushed: bool,
    pub(super) feed: Option<Feed>,
    pub(super) serve: Option<Serve>,
    /// Why it was aborted, if our memory failed.
    fault: Option<Failure>,
}

static NOTHING_MORE: More = More {
    announced: Time(0),
    consented: Time(0),
    offered: false,
    slot: None,
    job: None,
    after: After::Running,
    copy_ns: 0,
    pushed: false,
    feed: None,
    serve: None,
    fault: None,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Send,
    Write,
    Read {
        target: Target,
    },
    /// A read of the peer's.
    Serve,
}

/// A read of the peer's, from where and to where.
#[derive(Clone, Copy, Debug)]
pub(super) struct Serve {
    region: RegionRef,
    base: u64,
    their: u32,
    pub(super) target: Target,
    passive: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The bytes went along.
    Eager,
    /// Waiting for the peer.
    Announced,
    /// Chunks go out.
    Feeding,
    /// Cancelled here, or a serve that failed: waiting for the peer to agree.
    Aborting,
}

/// What a direct copy that was told to stop makes room for, or the unpacks of a read that is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum After {
    /// It was not told to.
    Running,
    /// Nothing: the peer has the next word.
    Nothing,
    Feed(Target),
    Finish(Result<(), Failure>),
    ServeFailed(Failure),
}

impl More {
    pub(super) fn announce(&mut self, now: Time, offer: Option<Offer>) {
        self.announced = now;
        self.offered = offer.is_some();
        self.slot = offer.and_then(|o| o.slot);
    }
}

impl Outgoing {
    #[inline]
    pub(super) fn new(op: OpId, kind: Kind, len: u64, serial: u32, started: Time, lane: LaneId) -> Outgoing {
        Outgoing { op, len, started, serial, seq: None, lane, kind, stage: Stage::Announced, more: None }
    }

    /// What only longer operations need, to read.
    pub(super) fn rest(&self) -> &More {
        self.more.as_deref().unwrap_or(&NOTHING_MORE)
    }

    /// The same, to write.
    pub(super) fn more(&mut self) -> &mut More {
        let started = self.started;
        self.more.get_or_insert_with(|| {
            Box::new(More {
                announced: started,
                consented: started,
                offered: false,
                slot: None,
                job: None,
                after: After::Running,
                copy_ns: 0,
                pushed: false,
                feed: None,
                serve: None,
                fault: None,
            })
        })
    }

    pub(super) fn feed(&mut self) -> Option<&mut Feed> {
        self.more.as_deref_mut()?.feed.as_mut()
    }

    fn touched(&self) -> bool {
        self.rest().feed.as_ref().is_some_and(Feed::touched)
    }

    /// Whether it has chunks for lanes to take.
    pub(super) fn feeds(&self) -> bool {
        self.stage == Stage::Feeding && self.rest().feed.as_ref().is_some_and(|f| f.left() > 0)
    }

    /// Whether its bytes go in chunks, and it is not being ended.
    pub(super) fn is_feeding(&self) -> bool {
        self.stage == Stage::Feeding
    }

    pub(super) fn memory(&self) -> Memory {
        match self.rest().serve {
            Some(Serve { region, base, passive, .. }) => Memory::Region { region, base, passive },
            None => Memory::Op(self.op),
        }
    }
}

impl Peer {
    /// The peer says that it has all of our operation `id` (or that it has all of the read which we serve).
    #[inline]
    pub(super) fn finished(&mut self, now: Time, id: u32) -> Result<(), String> {
        if self.unconfirmed.place_of(id).is_some() {
            return self.counted_finished(now, id);
        }
        let index = id.wrapping_sub(1);
        let Some(outgoing) = self.outs.get(index as usize) else {
            return Err(format!("operation {id} finished that is not under way"));
        };
        match outgoing.kind {
            Kind::Send if outgoing.stage == Stage::Eager => self.close_eager(now, index),
            Kind::Read { .. } => return Err(format!("read {id} finished by its owner")),
            _ => self.finish_out(now, index, Ok(())),
        }
        Ok(())
    }

    /// An outgoing operation is over as soon as no direct copy of ours and no unpack touches its memory.
    #[inline]
    pub(super) fn finish_out(&mut self, now: Time, index: u32, result: Result<(), Failure>) {
        let Some(outgoing) = self.outs.get_mut(index as usize) else { return };
        if let Some(job) = outgoing.rest().job {
            let after = std::mem::replace(&mut outgoing.more().after, After::Finish(result));
            if after == After::Running {
                self.events.stop(job);
            }
        } else if outgoing.kind == Kind::Serve {
            self.close_serve(index);
        } else if let Kind::Read { target } = outgoing.kind
            && self.unpacks(target)
        {
            self.outs[index as usize].more().after = After::Finish(result);
        } else {
            self.close_out(now, index, result);
        }
    }

    /// Whether that operation is a message which went with its first frame and only waits to hear that it arrived.
    #[inline]
    pub(super) fn finishes_eager(&self, index: u32) -> bool {
        self.outs.get(index as usize).is_some_and(|o| o.stage == Stage::Eager && o.kind == Kind::Send)
    }

    /// A message that went with its first frame has arrived; [`Peer::close_out`] in few steps.
    #[inline]
    pub(super) fn close_eager(&mut self, now: Time, index: u32) {
        let Some(outgoing) = self.outs.try_remove(index as usize) else { return };
        let Outgoing { op, seq, len, started, lane, .. } = outgoing;
        self.own_active -= 1;
        self.eager_bytes -= len;
        if seq.is_some_and(|seq| self.stream.leave(seq)) {
            self.events.revoke(Memory::Op(op));
        }
        self.events.end_short(Short { op, tag: 0, bytes: len, wire_ns: now.since(started), lane: Some(lane) });
    }

    #[inline]
    pub(super) fn close_out(&mut self, now: Time, index: u32, result: Result<(), Failure>) {
        let mut outgoing = self.outs.remove(index as usize);
        self.own_active -= 1;
        let op = outgoing.op;
        if (outgoing.stage == Stage::Eager || outgoing.seq.is_some()) && outgoing.kind == Kind::Send {
            self.eager_bytes -= outgoing.len;
        }
        let left = outgoing.seq.is_some_and(|seq| self.stream.leave(seq));
        if left || outgoing.touched() || result.is_err() {
            self.events.revoke(Memory::Op(op));
        }
        match result {
            Ok(()) => {
                let (progress, receipt) = (outgoing.len, outgoing.receipt(now));
                self.events.push(Event::Done { op, result: Ok(receipt), progress, tag: 0 });
            }
            Err(why) => self.events.fail(op, why, outgoing.feed().map_or(0, |f| f.sent()), 0),
        }
    }

    /// A read of ours is over: its bytes are all here, over `lanes`.
    pub(super) fn close_read(&mut self, now: Time, index: u32, protocol: Protocol, lanes: Vec<LaneShare>) {
        let outgoing = self.outs.remove(index as usize);
        self.own_active -= 1;
        let lane = (protocol == Protocol::Eager).then_some(outgoing.lane);
        let wire_ns = now.since(outgoing.rest().announced);
        let bytes = outgoing.len;
        let pushed = protocol == Protocol::Direct;
        let receipt = Receipt { bytes, protocol, lane, lanes, match_ns: 0, window_ns: 0, wire_ns, copy_ns: 0, pushed };
        self.events.push(Event::Done { op: outgoing.op, result: Ok(receipt), progress: bytes, tag: 0 });
    }

    /// The peer's receipt of a failure of our operation `id`.
    pub(super) fn out_failed(&mut self, now: Time, id: u32, why: Failure) -> Result<(), String> {
        if self.unconfirmed.place_of(id).is_some() {
            return self.counted_failed(id, why);
        }
        let index = id.wrapping_sub(1);
        match self.outs.get(index as usize).map(|o| o.kind) {
            Some(Kind::Send | Kind::Write) => {
                let why = self.own_word(index, why);
                self.finish_out(now, index, Err(why));
                Ok(())
            }
            _ => Err(format!("operation {id} failed that is not under way")),
        }
    }

    /// The owner could not serve a read of ours. `serve`: its id there.
    pub(super) fn read_failed(&mut self, now: Time, serve: u32, target: Target, why: Failure) {
        let found = self.outs.iter().find(|(_, o)| o.kind == Kind::Read { target }).map(|(i, _)| i as u32);
        // None: it had all bytes by then, and the owner has been told so.
        let Some(index) = found else { return };
        if serve != 0 {
            self.answers.owe_read_done(serve, &mut self.events);
        }
        self.drop_read(target);
        let why = self.own_word(index, why);
        self.finish_out(now, index, Err(why));
    }

    /// The reason for a failure: our own, if our memory was at fault, in full; otherwise the peer's.
    fn own_word(&mut self, index: u32, theirs: Failure) -> Failure {
        let own = self.outs.get_mut(index as usize).and_then(|o| o.more.as_deref_mut()?.fault.take());
        match (own, theirs) {
            (Some(own), Failure::Device(_) | Failure::Cancelled) => own,
            (_, theirs) => theirs,
        }
    }

    /// The peer wants chunks of our operation `id`.
    pub(super) fn consented(&mut self, now: Time, id: u32, target: Target) -> Result<(), String> {
        let index = id.wrapping_sub(1);
        let Some(outgoing) = self.outs.get_mut(index as usize) else {
            return Err(format!("consent to operation {id}, which is not under way"));
        };
        match (outgoing.kind, outgoing.stage) {
            (Kind::Send | Kind::Write, Stage::Announced) => {}
            (Kind::Send | Kind::Write, Stage::Aborting) => return Ok(()),
            _ => return Err(format!("consent to operation {id}, which was not announced")),
        }
        let more = outgoing.more();
        more.consented = now;
        match (more.job, &more.after) {
            (Some(job), After::Running) => {
                more.after = After::Feed(target);
                self.events.stop(job);
            }
            (Some(_), _) => return Err(format!("operation {id} consented to twice")),
            (None, _) => self.start_feed(index, target),
        }
        Ok(())
    }

    pub(super) fn start_feed(&mut self, index: u32, target: Target) {
        let Some(outgoing) = self.outs.get_mut(index as usize) else { return };
        outgoing.stage = Stage::Feeding;
        outgoing.more().feed = Some(Feed::new(target, outgoing.len));
        self.active.push_back((index, outgoing.serial));
    }

    /// A chunk that its dead lane had not delivered; true if it has to go out again.
    pub(super) fn requeue(&mut self, lane: LaneId, sent: &Sent) -> bool {
        let Some(outgoing) = self.outs.get_mut(sent.op as usize).filter(|o| o.serial == sent.serial) else {
            return false;
        };
        let feeding = outgoing.stage == Stage::Feeding;
        let Some(feed) = outgoing.feed() else { return false };
        if sent.doubled {
            feed.acked();
            return false;
        }
        let listed = feed.left() > 0;
        feed.requeue(lane, sent.piece);
        if feeding && !listed {
            self.active.push_back((sent.op, sent.serial));
        }
        feeding
    }

    /// The peer has consumed chunks on the lane at `at`.
    pub(super) fn chunks_acked(&mut self, now: Time, at: usize, count: u32) -> Result<(), String> {
        let outs = &mut self.outs;
        let (chunks, bytes) = self.lanes.acknowledge(now, at, count, |lane, sent| {
            let of = outs.get_mut(sent.op as usize).filter(|o| o.serial == sent.serial);
            if let Some(feed) = of.and_then(Outgoing::feed) {
                feed.acked();
                if sent.doubled {
                    feed.halve(lane, sent.piece);
                }
            }
        })?;
        if chunks > 0 {
            self.events.push(Event::Acked { lane: self.lanes[at].spec.id, chunks });
            self.double_late(now);
            self.lanes.measure(now, bytes, self.active.is_empty());
        }
        Ok(())
    }

    /// Starts to end an operation of ours before its time.
    pub(super) fn abort_outgoing(&mut self, op: OpId, why: &Failure) -> bool {
        if self.abort_counted(op, why) {
            return true;
        }
        let Some(index) = self.outs.iter().find(|(_, o)| o.op == op && o.kind != Kind::Serve).map(|(i, _)| i) else {
            return false;
        };
        let outgoing = &mut self.outs[index];
        if outgoing.stage == Stage::Aborting || matches!(outgoing.rest().after, After::Finish(_)) {
            return true;
        }
        outgoing.stage = Stage::Aborting;
        if matches!(why, Failure::Device(_)) {
            outgoing.more().fault = Some(why.clone());
        }
        if let Some(job) = outgoing.rest().job
            && std::mem::replace(&mut outgoing.more().after, After::Nothing) == After::Running
        {
            self.events.stop(job);
        }
        if let Kind::Read { target } = outgoing.kind {
            self.events.revoke(Memory::Op(op));
            self.drop_read(target);
        }
        self.answers.tell_abort(index as u32 + 1, why, &mut self.events);
        true
    }

    /// A read of the peer's, permitted.
    pub(super) fn begin_serve(&mut self, now: Time, read: ServeOf, eager_max: u64) -> u32 {
        let ServeOf { their, target, region, base, len, descriptor, lane } = read;
        let serial = self.next_serial();
        let passive = self.passives.insert(()) as u32;
        let kind = Kind::Serve;
        let op = OpId { index: u32::MAX, generation: u32::MAX };
        let mut outgoing = Outgoing::new(op, kind, len, serial, now, lane);
        outgoing.more().serve = Some(Serve { region, base, their, target, passive });
        let index = self.outs.insert(outgoing) as u32;
        let memory = self.outs[index as usize].memory();
        if let Some(descriptor) = descriptor {
            self.start_push(index, memory, descriptor, len);
        } else if len <= eager_max {
            self.outs[index as usize].stage = Stage::Eager;
            let body = Body::Memory { memory, offset: 0, len: len as u32 };
            self.answers.tell(Frame::ReadData { serve: index + 1, target }, body, &mut self.events);
        } else {
            self.start_feed(index, target);
        }
        index
    }

    /// A read that we serve cannot go on. Its id stays taken until the peer has agreed.
    pub(super) fn serve_failed(&mut self, index: u32, why: Failure) {
        let Some(outgoing) = self.outs.get_mut(index as usize) else { return };
        let Some(Serve { target, .. }) = outgoing.rest().serve else { return };
        if outgoing.stage == Stage::Aborting {
            return;
        }
        if let Some(job) = outgoing.rest().job {
            match outgoing.rest().after {
                After::Running => self.events.stop(job),
                After::Nothing | After::Feed(_) => {}
                After::Finish(_) | After::ServeFailed(_) => return,
            }
            outgoing.more().after = After::ServeFailed(why);
            return;
        }
        outgoing.stage = Stage::Aborting;
        if let Some(seq) = outgoing.seq {
            self.stream.leave(seq);
        }
        // What lanes carry of it stays readable: the peer believes the bytes until it hears of this.
        self.answers.withdraw_data(index + 1);
        let (code, bytes) = frame::encode_failure(&why);
        self.answers.tell(Frame::ReadFailed { serve: index + 1, target, code }, Body::from(bytes), &mut self.events);
    }

    pub(super) fn close_serve(&mut self, index: u32) {
        let outgoing = self.outs.remove(index as usize);
        let Some(Serve { region, their, passive, .. }) = outgoing.rest().serve else { return };
        let memory = outgoing.memory();
        let left = outgoing.seq.is_some_and(|seq| self.stream.leave(seq));
        if outgoing.stage == Stage::Eager && outgoing.seq.is_none() {
            self.answers.withdraw_data(index + 1);
        }
        // One that failed was acknowledged by its reader without being read to the end.
        let failed = outgoing.stage == Stage::Aborting;
        if left || failed || outgoing.touched() {
            self.events.revoke(memory);
        }
        self.events.push(Event::Released { passive, region });
        self.theirs.free(their);
    }

    pub(super) fn region_gone_serves(&mut self, gone: RegionRef) {
        let of = |o: &Outgoing| o.rest().serve.is_some_and(|s| s.region == gone);
        let found: Vec<u32> = self.outs.iter().filter(|(_, o)| of(o)).map(|(i, _)| i as u32).collect();
        for index in found {
            self.serve_failed(index, Failure::Region(crate::RegionFault::Gone));
        }
    }

    pub(super) fn progress_outgoing(&self, op: OpId) -> Option<(u64, u64)> {
        let Some((_, outgoing)) = self.outs.iter().find(|(_, o)| o.op == op && o.kind != Kind::Serve) else {
            return self.progress_counted(op);
        };
        let moved = match outgoing.kind {
            Kind::Read { target } => self.received(target),
            _ => outgoing.rest().feed.as_ref().map_or(0, Feed::sent),
        };
        Some((moved, outgoing.len))
    }

    /// The peer wants its operation `op` to end.
    pub(super) fn aborted(&mut self, now: Time, op: u32, why: Failure, matcher: &mut crate::Matcher) {
        match self.theirs.at(op) {
            Their::Free | Their::Open => {}
            Their::Arrival(arrival) => self.drop_kept(arrival, &why, matcher),
            Their::In(index) => self.end_in(now, index, why),
            Their::Serve(index) => self.serve_failed(index, why),
        }
    }
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

impl Outgoing {
    #[inline]
    fn receipt(&mut self, now: Time) -> Receipt {
        let total = now.since(self.started);
        let mut receipt = Receipt {
            bytes: self.len,
            protocol: Protocol::Eager,
            lane: None,
            lanes: Vec::new(),
            match_ns: 0,
            window_ns: 0,
            wire_ns: total,
            copy_ns: self.rest().copy_ns,
            pushed: self.rest().pushed,
        };
        if let Some(feed) = self.more.as_mut().and_then(|m| m.feed.take()) {
            receipt.protocol = Protocol::Chunks;
            (receipt.lanes, receipt.window_ns) = feed.summary();
            receipt.match_ns = self.rest().consented.since(self.rest().announced);
        } else if self.seq.is_some() || self.stage == Stage::Eager {
            receipt.lane = Some(self.lane);
        } else {
            receipt.protocol = Protocol::Direct;
        }
        receipt.wire_ns = total.saturating_sub(receipt.match_ns + receipt.window_ns + receipt.copy_ns);
        receipt
    }
}
