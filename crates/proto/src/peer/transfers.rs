//! What becomes of operations: ends that concern both tables of transfers, direct copies, chunks by way of slots,
//! memory that fails.
//!
//! Before an end releases the memory of a copy, it waits until the peer no longer accesses that memory. A chunk in a
//! slot counts as consumed once it is unpacked; its transfer ends, successfully or not, only when nothing is being
//! unpacked into its memory.

use crossrail_types::{LaneId, OpId};

use super::Peer;
use super::accesses::JobOf;
use super::incoming::{ChunkOf, Completed, Settled};
use super::open::What;
use super::outgoing::Aborted;
use super::peer_ops::PeerOp;
use crate::frame::Target;
use crate::lane::Placement;
use crate::{DirectId, Failure, Landed, Matcher, Memory, Protocol, Time};

impl Peer {
    /// Cancels an operation that has not begun, so that the peer is never notified of it; false if there is none.
    pub fn withdraw(&mut self, op: OpId, why: &Failure) -> bool {
        self.fast_path.invalidate();
        let found = self.outgoing.withdraw(op);
        if found {
            self.events.fail(op, why.clone(), 0, 0);
        }
        found
    }

    /// Ends an operation in flight before its time; false: there is none.
    pub(super) fn end_operation(&mut self, now: Time, op: OpId, why: &Failure) -> bool {
        let (outgoing, incoming, unexpected, mut cx) = self.parts(now);
        if cx.credit.abort(op, why, cx.control, cx.events) {
            return true;
        }
        match outgoing.abort(op, why, &mut cx) {
            Aborted::Read(target) => incoming.drop_read(target, &mut cx),
            Aborted::Asked => {}
            Aborted::Unknown => {
                return cx.end_arriving(op, why)
                    || unexpected.end_receive(op, why, &mut cx)
                    || incoming.end_receive(op, why, &mut cx);
            }
        }
        true
    }

    /// The peer wants its operation `op` to end.
    pub(super) fn aborted(&mut self, now: Time, op: u32, why: Failure, matcher: &mut Matcher) {
        let id = self.id;
        let (outgoing, incoming, unexpected, mut cx) = self.parts(now);
        match cx.peer_ops.at(op) {
            PeerOp::Free | PeerOp::Open => {}
            PeerOp::Arrival(arrival) => unexpected.cancelled(id, arrival, &why, matcher, &mut cx),
            PeerOp::In(index) => incoming.end(index, why, &mut cx),
            PeerOp::Serve(index) => outgoing.fail_serve(index, why, &mut cx),
        }
    }

    /// The owner could not serve a read of ours. `serve`: its id there.
    pub(super) fn read_failed(&mut self, now: Time, serve: u32, target: Target, why: Failure) {
        // None: it had all bytes by then, and the owner has been told so.
        let Some(index) = self.outgoing.find_read(target) else { return };
        let (outgoing, incoming, _, mut cx) = self.parts(now);
        if serve != 0 {
            cx.control.owe_read_done(serve, cx.events);
        }
        incoming.drop_read(target, &mut cx);
        let why = outgoing.prefer_own_failure(index, why);
        outgoing.finish(index, Err(why), |target| incoming.unpacks(target), &mut cx);
    }

    /// All bytes of a transfer towards us are there.
    pub(super) fn complete_in(&mut self, now: Time, index: u32, protocol: Protocol, lane: Option<LaneId>) {
        let (outgoing, incoming, _, mut cx) = self.parts(now);
        let prompt = match incoming.complete(index, protocol, lane, &mut cx) {
            Completed::Waits => return,
            Completed::Over { prompt } => prompt,
            Completed::Read { out, lanes, prompt } => {
                outgoing.close_read(out, protocol, lanes, &mut cx);
                prompt
            }
        };
        if prompt {
            self.flush();
        }
    }

    pub(super) fn count_chunk(&mut self, now: Time, lane: LaneId, chunk: ChunkOf) -> Result<(), String> {
        if self.incoming.count_chunk(lane, chunk)? {
            self.complete_in(now, chunk.target.index, Protocol::Chunks, None);
        }
        Ok(())
    }

    /// Every byte of the job has been copied, `moved` of them by this end, in `copy_ns`.
    pub fn direct_done(&mut self, now: Time, job: DirectId, _moved: u64, copy_ns: u64) {
        self.end_job(now, job, Some(copy_ns));
    }

    /// The job cannot be done, or was stopped: this end copies nothing of it any more.
    pub fn direct_failed(&mut self, now: Time, job: DirectId) {
        self.end_job(now, job, None);
    }

    fn end_job(&mut self, now: Time, job: DirectId, done: Option<u64>) {
        self.fast_path.invalidate();
        let (outgoing, incoming, _, mut cx) = self.parts(now);
        match cx.accesses.end_job(job) {
            Some(JobOf::In(index)) => {
                let complete = incoming.end_pull(index, done, &mut cx);
                if complete {
                    self.complete_in(now, index, Protocol::Direct, None);
                }
            }
            Some(JobOf::Out(index)) => outgoing.end_push(index, done, &mut cx),
            None => {}
        }
    }

    /// Asks the peer to push into what `descriptor` says while this end pulls; only for a job whose offer has a slot.
    pub fn direct_invite(&mut self, now: Time, job: DirectId, descriptor: [u8; 24]) {
        self.fast_path.invalidate();
        let (_, incoming, _, mut cx) = self.parts(now);
        if let Some(JobOf::In(index)) = cx.accesses.job(job) {
            incoming.invite(index, descriptor, &mut cx);
        }
    }

    /// Leaves a job of [`Role::Pull`](crate::Role::Pull), whose offer has no slot, to the peer, which pushes into what
    /// `descriptor` says. True: the job is over here, as after [`Peer::direct_done`]; that memory is written until the
    /// transfer is over. If the peer can't, [`Event::Direct`](crate::Event::Direct) asks this end once more. False, as
    /// then: this end has to copy.
    pub fn direct_lend(&mut self, now: Time, job: DirectId, descriptor: [u8; 24]) -> bool {
        self.fast_path.invalidate();
        let (_, incoming, _, mut cx) = self.parts(now);
        let Some(JobOf::In(index)) = cx.accesses.job(job) else { return false };
        let lent = incoming.lend(index, descriptor, &mut cx);
        if lent {
            cx.accesses.end_job(job);
        }
        lent
    }

    /// Since when the peer may copy into memory of this end, of the transfers that were left to it and the reads that
    /// it serves: of the last of them.
    pub fn lending(&self) -> Option<Time> {
        self.incoming.lending().max(self.outgoing.lending())
    }

    /// Memory of this end that the peer may be copying from or to without a lane, by what it was offered or invited to.
    pub fn exposed(&self) -> Vec<Memory> {
        self.incoming.exposed().chain(self.outgoing.exposed()).collect()
    }

    /// The peer no longer accesses the memory of a transfer towards us.
    pub(super) fn help_ended(&mut self, now: Time, op: u32, failed: bool) {
        let (_, incoming, _, mut cx) = self.parts(now);
        let PeerOp::In(index) = cx.peer_ops.at(op) else { return };
        if incoming.help_ended(index, failed, &mut cx) {
            self.complete_in(now, index, Protocol::Direct, None);
        }
    }

    /// No slot is free for the chunk of the lane's last [`Peer::place`]: the lane keeps its head and calls `place`
    /// again with it. Until then this end sends heartbeats ([`Peer::on_timeout`]), and the peer's silence on that lane
    /// does not count.
    pub fn unplace(&mut self, now: Time, lane: LaneId) {
        self.fast_path.invalidate();
        let Some(at) = self.lanes.find(lane) else { return };
        if let Placement::Chunk { .. } = self.lanes[at].placing {
            self.lanes[at].placing = Placement::None;
        }
        self.lanes[at].wait(now);
    }

    /// In place of [`Peer::placed`], where a chunk's payload is complete in a slot. `None`: the transfer has no more
    /// use for it, the slot is free. `Err`: the peer broke the protocol, this is how: the lane must fail.
    pub fn landed(&mut self, now: Time, lane: LaneId) -> Result<Option<Landed>, String> {
        self.fast_path.invalidate();
        let Some(at) = self.lanes.find(lane) else { return Ok(None) };
        let Placement::Chunk { index, serial, offset, len, again } = self.lanes[at].placing else { return Ok(None) };
        self.lanes[at].placing = Placement::None;
        let target = Target { index, serial };
        if !self.incoming.land(target, offset, len) {
            self.lanes[at].consume();
            return Ok(None);
        }
        if let Err(why) = self.lanes.land(now, at) {
            self.incoming.take_off(target);
            self.control.break_off(why.clone(), &mut self.events);
            return Err(why);
        }
        Ok(Some(Landed { lane, offset, len, target, again }))
    }

    /// The chunk's bytes are in the transfer's memory, its slot is free. May come in any order, and when the transfer
    /// or the lane is long gone.
    pub fn unpacked(&mut self, now: Time, landed: Landed) {
        self.fast_path.invalidate();
        let Some(ends) = self.take_off(&landed) else { return };
        let Landed { lane, offset, len, target, again } = landed;
        if !ends {
            let chunk = ChunkOf { target, offset, len, from: 0, again };
            if let Err(why) = self.count_chunk(now, lane, chunk) {
                self.control.break_off(why, &mut self.events);
            }
        }
        self.settle_unpacks(now, target);
    }

    /// The chunk's bytes cannot be unpacked, and nothing is copied out of its slot any more: the transfer fails at both
    /// ends.
    pub fn unpack_failed(&mut self, now: Time, landed: Landed, why: String) {
        self.fast_path.invalidate();
        let Some(ends) = self.take_off(&landed) else { return };
        if let (false, Some(memory)) = (ends, self.incoming.memory(landed.target.index)) {
            self.fail(now, memory, why);
        }
        self.settle_unpacks(now, landed.target);
    }

    /// A chunk is out of its slot; whether its transfer is ending. `None`: the transfer is over.
    fn take_off(&mut self, landed: &Landed) -> Option<bool> {
        if let Some(at) = self.lanes.find(landed.lane) {
            self.lanes[at].take_off();
        }
        self.incoming.take_off(landed.target)
    }

    /// Goes on with what waited for the last unpack.
    fn settle_unpacks(&mut self, now: Time, target: Target) {
        let (outgoing, incoming, _, mut cx) = self.parts(now);
        match incoming.settle(target, &mut cx) {
            Settled::Nothing => {}
            Settled::Read { out } => outgoing.end_unpacks(out, target, &mut cx),
            Settled::Complete { protocol, lane } => self.complete_in(now, target.index, protocol, lane),
        }
    }

    /// The memory of an operation of ours, or of an access of the peer's, cannot be read or written: what is in flight
    /// there fails with [`Failure::Device`], at both ends. Chunks of it that `next` has given out go as
    /// [`crate::frame::void`] says. Nothing happens where it is over.
    pub fn fail(&mut self, now: Time, memory: Memory, why: String) {
        self.fast_path.invalidate();
        let why = Failure::Device(why);
        match memory {
            Memory::Op(op) => {
                if !self.withdraw(op, &why) && !self.undeliver(op, &why) {
                    self.end_operation(now, op, &why);
                }
            }
            Memory::Region { .. } => {
                let (outgoing, incoming, _, mut cx) = self.parts(now);
                if let Some(index) = incoming.find_memory(memory) {
                    incoming.end(index, why, &mut cx);
                } else if let Some(index) = outgoing.find_memory(memory) {
                    outgoing.fail_serve(index, why, &mut cx);
                }
            }
        }
    }

    /// [`Peer::fail`] for memory that a lane could not access while it carried a frame. Bytes that go with their frame
    /// cannot be taken back: the connection breaks.
    pub fn fault(&mut self, now: Time, memory: Memory, why: String) {
        match memory {
            Memory::Op(op) if self.outgoing.is_eager(op) => {
                self.fast_path.invalidate();
                let why = format!("the memory of a message in flight cannot be accessed: {why}");
                self.control.break_off(why, &mut self.events);
            }
            _ => self.fail(now, memory, why),
        }
    }

    /// The memory of a peer's access.
    pub fn accessed(&self, access: u32) -> Option<Memory> {
        let of = |memory: &Memory| matches!(memory, Memory::Region { passive, .. } if *passive == access);
        self.incoming.memories().chain(self.outgoing.memories()).find(of)
    }

    /// The unexpected message that the engine was just told to copy out does not fit where it goes after all.
    fn undeliver(&mut self, op: OpId, why: &Failure) -> bool {
        let Some(their) = self.unexpected.copied_for(op).filter(|_| self.events.fail_next(op, why)) else {
            return false;
        };
        if self.control.withdraw_done(their) {
            self.control.push_failed(their, why, &mut self.events);
        }
        true
    }

    /// Ends everything in flight without another word to the peer. Only direct copies and unpacks are waited for.
    pub(super) fn fail_all(&mut self, now: Time, why: &Failure, matcher: &mut Matcher) {
        let id = self.id;
        self.delivered.clear();
        let (outgoing, incoming, unexpected, mut cx) = self.parts(now);
        cx.control.clear();
        outgoing.silence();
        cx.stream.silence();
        cx.lanes.silence();
        if let Some(open) = cx.stream.take_received()
            && let What::Receive { op, tag, .. } = open.what
        {
            cx.events.revoke(Memory::Op(op));
            cx.events.fail(op, why.clone(), 0, tag);
        }
        incoming.fail_all(why, &mut cx);
        cx.credit.fail_all(why, cx.events);
        outgoing.fail_all(why, |target| incoming.unpacks(target), &mut cx);
        unexpected.fail_all(id, why, matcher, &mut cx);
        for op in matcher.peer_dead(id) {
            cx.events.fail(op, why.clone(), 0, 0);
        }
        cx.control.clear();
    }
}
