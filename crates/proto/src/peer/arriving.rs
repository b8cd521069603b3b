//! Heads and payloads that come in, and what they ask for.

use crossrail_types::{Head, LaneId};

use super::Peer;
use super::control_queue::Phase;
use super::incoming::{ChunkOf, InKind};
use super::open::{Open, What};
use super::outgoing::ServeOf;
use super::peer_ops::PeerOp;
use super::stream::Arrival;
use super::unexpected::Announced;
use crate::frame::{self, Frame, Target};
use crate::lane::Placement;
use crate::{Access, Body, Failure, Host, Matcher, Memory, Placing, Protocol, RegionFault, Regions, Short, Time};

impl Peer {
    /// A head has come in on `lane`: where does its payload go? One payload at a time per lane; lanes interleave.
    #[inline]
    pub fn place(&mut self, now: Time, lane: LaneId, head: &Head, host: &mut Host<'_>) -> Placing {
        if let Some(placing) = self.place_expected(now, lane, head, host.matcher) {
            return placing;
        }
        self.fast_path.invalidate();
        match self.arrive(now, lane, head, host) {
            Ok(placing) => placing,
            Err(why) => {
                self.violated(lane, &why);
                Placing::Refuse(why)
            }
        }
    }

    /// [`Peer::place`], for engines that would rather not move a whole [`Placing`], as far as it answers with
    /// [`Placing::Message`]. `None`: [`Peer::place`] decides. `ended` is handed what [`Peer::short`] would be: messages
    /// of ours that the head confirms.
    #[inline]
    pub fn place_short(
        &mut self,
        now: Time,
        lane: LaneId,
        head: &Head,
        matcher: &mut Matcher,
        ended: &mut impl FnMut(Short),
    ) -> Option<Short> {
        if !self.fast_path.is_on(lane) {
            return None;
        }
        let frame::EagerHead { tag, done, counted, .. } = frame::as_eager(head)?;
        let (stamp, len) = (frame::Stamp::of(head), head.payload_len());
        if !counted || done != 0 || len > self.fast_path.place_max() || !self.stream.plain(stamp) {
            return None;
        }
        // Confirming is the same whoever does it.
        if !self.confirm(now, stamp.ack, ended) {
            return None;
        }
        let op = matcher.arrive_within(self.id, tag, u64::from(len), true)?;
        self.stream.consumed(false);
        self.delivered.deliver_next();
        Some(Short { op, tag, bytes: u64::from(len), wire_ns: 0, lane: Some(lane) })
    }

    /// The commonest frames, which need none of what others do: the next message, for the receive that waits first, and
    /// on a lane that loses nothing the count of delivered messages. `None`: nothing was done, [`Peer::arrive`]
    /// decides.
    #[inline]
    fn place_expected(&mut self, now: Time, lane: LaneId, head: &Head, matcher: &mut Matcher) -> Option<Placing> {
        let at = self.lanes.find(lane)?;
        if !self.control.is_open() || self.stream.is_receiving() {
            return None;
        }
        let spec = &self.lanes[at].spec;
        let Some(frame::EagerHead { op: their, tag, done, counted }) = frame::as_eager(head) else {
            let count = frame::as_ack(head).filter(|_| spec.reliable)?;
            return self.confirmed(now, count).ok().map(|()| Placing::Discard);
        };
        let (stamp, len) = (frame::Stamp::of(head), head.payload_len());
        let plain = self.stream.plain(stamp)
            && counted == spec.reliable
            && !self.lanes[at].placing.is_of_chunk()
            && self.peer_ops.at(their) == PeerOp::Free;
        if !plain || (counted && len > spec.whole_max) {
            return None;
        }
        // Confirming is the same whoever does it; from the matcher on, nothing may fail.
        if counted {
            self.confirmed(now, stamp.ack).ok()?;
        } else {
            if !self.peer_ops.may_open(their) {
                return None;
            }
            if self.stream.acknowledge(now, stamp.ack).ok()? {
                self.stream_progress(now);
            }
        }
        if done != 0 && !self.outgoing.finishes_eager(done.wrapping_sub(1)) {
            return None;
        }
        let op = matcher.arrive_within(self.id, tag, u64::from(len), counted)?;
        if done != 0 {
            self.outgoing.close_eager(now, done.wrapping_sub(1), &mut self.credit, &mut self.stream, &mut self.events);
        }
        if counted {
            self.stream.consumed(false);
            if !self.delivered.deliver(their) {
                self.control.owe_done(their, &mut self.events);
            } else {
                self.enter_fast_path(at);
            }
            return Some(Placing::Message(Short { op, tag, bytes: u64::from(len), wire_ns: 0, lane: Some(lane) }));
        }
        self.fast_path.invalidate();
        self.peer_ops.open(their);
        self.lanes[at].placing = Placement::Stream;
        self.stream.hear(lane);
        self.stream.receive(Open { lane, head: *head, what: What::Receive { op, their, tag }, lossy: true });
        Some(Placing::Memory { memory: Memory::Op(op), offset: 0, len, chunk: false })
    }

    /// `Err` where nothing has changed yet: the lane alone is to fail. What the stream itself says wrongly, in its
    /// turn, it would say again on another lane: then the connection is broken off, too.
    fn arrive(&mut self, now: Time, lane: LaneId, head: &Head, host: &mut Host<'_>) -> Result<Placing, String> {
        match self.control.phase() {
            Phase::Live | Phase::Closed => {}
            Phase::Dead(_) => return Ok(Placing::Discard),
            Phase::Broken(why) => return Ok(Placing::Refuse(why.clone())),
        }
        let Some(at) = self.lanes.find(lane) else { return Ok(Placing::Discard) };
        let frame = frame::decode_head(head)?;
        let len = head.payload_len();
        // If it was placing a chunk, that one's payload was given up halfway.
        self.lanes[at].placing = Placement::None;
        self.lanes[at].go_on(now);
        match frame {
            Frame::ChunkAck { .. } if !self.control.live() => return Ok(Placing::Discard),
            Frame::Chunk { target, offset, from, again, void, unasked, lane: number } => {
                self.lanes[at].theirs = number;
                // What arrives unasked after our goodbye is not announced any more.
                if void || unasked && !self.control.talks() {
                    self.lanes[at].consume();
                    return Ok(Placing::Discard);
                }
                if unasked {
                    return self.place_unasked(now, at, (target.serial, len, again), host.regions);
                }
                let chunk = ChunkOf { target, offset, len, from, again };
                return self.place_chunk(now, at, chunk, host.regions);
            }
            Frame::ChunkAck { count, lane: number } => {
                // The peer may have sent it before it knew that the lane is lost.
                if let Some(of) = self.lanes.numbered(number, at)
                    && self.chunks_acked(now, of, count)? == 0
                    && of == at
                {
                    self.lanes[at].heard(now);
                }
                return Ok(Placing::Discard);
            }
            _ => {}
        }
        if self.lanes[at].spec.reliable {
            self.confirmed(now, frame::ack(head))?;
        } else if self.stream.acknowledge(now, frame::ack(head))? {
            self.stream_progress(now);
        }
        if matches!(frame, Frame::Ack) {
            return Ok(Placing::Discard);
        }
        let lossy = !self.lanes[at].spec.reliable;
        let arrival = self.stream.classify(frame::epoch(head), frame::seq(head));
        match arrival {
            Arrival::Stale => return Ok(Placing::Discard),
            Arrival::Gap => return Err("gap in the message sequence numbers".to_owned()),
            Arrival::New | Arrival::Old => {}
        }
        if lossy {
            self.stream.hear(lane);
        }
        if arrival == Arrival::Old {
            if lossy {
                self.stream.repeated();
            }
            return Ok(Placing::Discard);
        }
        if self.stream.is_receiving() {
            return self.reopen(at, head, &frame);
        }
        let done = frame::done(head);
        if done != 0 && self.control.live() {
            self.finished(now, done).inspect_err(|why| self.control.break_off(why.clone(), &mut self.events))?;
        }
        if !self.control.talks() {
            if frame == Frame::Bye {
                self.bye(now, host.matcher);
            }
            self.stream.consumed(lossy);
            return Ok(Placing::Discard);
        }
        self.open_frame(now, at, head, frame, host)
            .inspect_err(|why| self.control.break_off(why.clone(), &mut self.events))
    }

    /// A new frame of the stream.
    fn open_frame(
        &mut self,
        now: Time,
        at: usize,
        head: &Head,
        frame: Frame,
        host: &mut Host<'_>,
    ) -> Result<Placing, String> {
        let len = head.payload_len();
        let what = match frame {
            Frame::Eager { op, tag, counted } => {
                if counted {
                    if !self.lanes[at].spec.reliable {
                        return Err("a counted message on a lane that may lose it".to_owned());
                    }
                    self.delivered.withhold(op);
                }
                self.open_eager(now, op, tag, len, host.matcher)?
            }
            Frame::WriteData { op } => self.open_write_data(now, op, len, host)?,
            Frame::Put { op, name } => self.open_put(now, op, (name, len), host)?,
            Frame::ReadData { serve, target } => {
                let wanted = self.incoming.place_read(target, serve, len)?;
                wanted.then_some(What::Data { index: target.index })
            }
            _ if len > 0 => Some(What::Control),
            _ => {
                self.execute(now, at, frame, &[], host)?;
                None
            }
        };
        let lane = &mut self.lanes[at];
        let lossy = !lane.spec.reliable;
        let Some(what) = what else {
            self.stream.consumed(lossy);
            return Ok(Placing::Discard);
        };
        lane.placing = Placement::Stream;
        let lane = lane.spec.id;
        self.stream.receive(Open { lane, head: *head, what, lossy });
        Ok(self.placing(what, len))
    }

    fn placing(&self, what: What, len: u32) -> Placing {
        match what {
            What::Receive { op, .. } => Placing::Memory { memory: Memory::Op(op), offset: 0, len, chunk: false },
            What::Kept { arrival } => Placing::Unexpected { arrival, len },
            What::Control => Placing::Control { len },
            What::Data { index } => match self.incoming.memory(index) {
                Some(memory) => Placing::Memory { memory, offset: 0, len, chunk: false },
                None => Placing::Discard,
            },
        }
    }

    /// The open frame comes again, on another lane: from now on this one counts.
    fn reopen(&mut self, at: usize, head: &Head, frame: &Frame) -> Result<Placing, String> {
        if matches!(frame, Frame::Nothing) {
            self.stream.drop_open(&mut self.lanes);
            return Ok(Placing::Discard);
        }
        let lane = self.lanes[at].spec.id;
        let same = |o: &&mut Open| o.lane != lane && frame::same(&o.head, head);
        let Some(open) = self.stream.receiving_mut().filter(same) else {
            return Err("a retransmitted message differs from the first copy".to_owned());
        };
        open.lane = lane;
        let what = open.what;
        self.lanes[at].placing = Placement::Stream;
        Ok(self.placing(what, head.payload_len()))
    }

    fn open_eager(
        &mut self,
        now: Time,
        their: u32,
        tag: u64,
        len: u32,
        matcher: &mut Matcher,
    ) -> Result<Option<What>, String> {
        if self.control.closing() {
            self.control.push_failed(their, &Failure::Closed, &mut self.events);
            return Ok(None);
        }
        let Some((op, capacity)) = matcher.arrive(self.id, tag) else {
            let id = self.id;
            let (_, _, unexpected, mut cx) = self.parts(now);
            let arrival = unexpected.keep_eager(id, their, tag, len, matcher, &mut cx)?;
            return Ok(Some(What::Kept { arrival }));
        };
        if u64::from(len) > capacity {
            self.parts(now).3.truncated(op, tag, their, u64::from(len), capacity);
            return Ok(None);
        }
        let what = What::Receive { op, their, tag };
        if let Err(why) = self.peer_ops.claim(their, PeerOp::Open) {
            // The receive was taken from the matcher: it goes down with this peer.
            self.events.fail(op, Failure::PeerDead(why.clone()), 0, tag);
            return Err(why);
        }
        Ok(Some(what))
    }

    fn open_write_data(&mut self, now: Time, op: u32, len: u32, host: &mut Host<'_>) -> Result<Option<What>, String> {
        let PeerOp::In(index) = self.peer_ops.at(op) else { return Ok(None) };
        if self.incoming.place_data(index, len, host.regions)? {
            return Ok(Some(What::Data { index }));
        }
        self.end_gone(now, index);
        Ok(None)
    }

    fn open_put(
        &mut self,
        now: Time,
        op: u32,
        (name, len): (u64, u32),
        host: &mut Host<'_>,
    ) -> Result<Option<What>, String> {
        if self.control.closing() {
            self.control.push_failed(op, &Failure::Closed, &mut self.events);
            return Ok(None);
        }
        // Before there is memory that only the operation's end would give back.
        self.peer_ops.claim(op, PeerOp::Open)?;
        let region = match host.regions.lend(name, u64::from(len)) {
            Ok(region) => region,
            Err(fault) => {
                self.peer_ops.free(op);
                self.control.push_failed(op, &Failure::Region(fault), &mut self.events);
                return Ok(None);
            }
        };
        let (_, incoming, _, mut cx) = self.parts(now);
        let index = incoming.begin_data(op, InKind::Write { region, base: 0, imm: Some(0) }, u64::from(len), &mut cx);
        Ok(Some(What::Data { index }))
    }

    /// The region that a write goes to is gone.
    fn end_gone(&mut self, now: Time, index: u32) {
        let (_, incoming, _, mut cx) = self.parts(now);
        incoming.end(index, Failure::Region(RegionFault::Gone), &mut cx);
    }

    /// A chunk's head: where do its bytes go?
    fn place_chunk(&mut self, now: Time, at: usize, chunk: ChunkOf, regions: &dyn Regions) -> Result<Placing, String> {
        match self.incoming.place_chunk(&mut self.lanes[at], chunk, regions)? {
            Some(placing) => Ok(placing),
            None => {
                self.end_gone(now, chunk.target.index);
                Ok(Placing::Discard)
            }
        }
    }

    /// The head of a message that arrives unasked, in one chunk: it goes to the receive that has matched its announcement,
    /// or is kept.
    fn place_unasked(
        &mut self,
        now: Time,
        at: usize,
        (number, len, again): (u32, u32, bool),
        regions: &dyn Regions,
    ) -> Result<Placing, String> {
        if let Some(target) = self.incoming.unasked(number) {
            return self.place_chunk(now, at, ChunkOf { target, offset: 0, len, from: 0, again }, regions);
        }
        let of = (self.lanes[at].spec.id, self.peer_ops.credit());
        let (_, _, unexpected, mut cx) = self.parts(now);
        let arrival = unexpected.place_unasked(number, len, of, &mut cx)?;
        let lane = &mut self.lanes[at];
        let Some(arrival) = arrival else {
            lane.consume();
            return Ok(Placing::Discard);
        };
        lane.placing = Placement::Kept { arrival };
        Ok(Placing::Unexpected { arrival, len })
    }

    /// The payload of the lane's last `place` is complete; `control` holds it if that was [`Placing::Control`].
    /// `Err`: the peer broke the protocol, this is how: the lane must fail.
    #[inline]
    pub fn placed(&mut self, now: Time, lane: LaneId, control: &[u8], host: &mut Host<'_>) -> Result<(), String> {
        self.fast_path.invalidate();
        let Some(at) = self.lanes.find(lane) else { return Ok(()) };
        let result = match self.lanes[at].placing {
            Placement::None => return Ok(()),
            Placement::Stream => {
                self.lanes[at].placing = Placement::None;
                let Some(open) = self.stream.receiving().filter(|o| o.lane == lane) else { return Ok(()) };
                if let What::Receive { op, their, tag } = open.what {
                    let (bytes, lossy) = (u64::from(open.head.payload_len()), open.lossy);
                    self.stream.take_received();
                    self.complete_receive(Short { op, tag, bytes, wire_ns: 0, lane: Some(lane) }, their, lossy);
                    return Ok(());
                }
                self.complete_open(now, at, control, host)
            }
            Placement::Kept { arrival } => {
                self.lanes[at].placing = Placement::None;
                self.lanes[at].consume();
                let (_, _, unexpected, mut cx) = self.parts(now);
                unexpected.complete(arrival, &mut cx);
                Ok(())
            }
            Placement::Chunk { index, serial, offset, len, again } => {
                self.lanes[at].placing = Placement::None;
                self.lanes[at].consume();
                let target = Target { index, serial };
                self.count_chunk(now, lane, ChunkOf { target, offset, len, from: 0, again })
            }
        };
        if let Err(why) = &result {
            self.control.break_off(why.clone(), &mut self.events);
        }
        result
    }

    /// A message is in its receive's memory.
    #[inline]
    fn complete_receive(&mut self, short: Short, their: u32, lossy: bool) {
        self.stream.consumed(lossy);
        if self.lanes.len() > 1 && self.lanes.void_stream_placements(short.lane) {
            self.events.revoke(Memory::Op(short.op));
        }
        self.events.end_short(short);
        self.peer_ops.free(their);
        if !self.delivered.deliver_late(their) {
            self.control.owe_done(their, &mut self.events);
        }
    }

    fn complete_open(&mut self, now: Time, at: usize, control: &[u8], host: &mut Host<'_>) -> Result<(), String> {
        let Some(Open { lane, head, what, lossy }) = self.stream.take_received() else { return Ok(()) };
        self.stream.consumed(lossy);
        let elsewhere = self.lanes.void_stream_placements(Some(lane));
        match what {
            What::Kept { arrival } => {
                let (_, _, unexpected, mut cx) = self.parts(now);
                unexpected.complete(arrival, &mut cx);
            }
            What::Data { index } => {
                if let (true, Some(memory)) = (elsewhere, self.incoming.memory(index)) {
                    self.events.revoke(memory);
                }
                self.complete_in(now, index, Protocol::Eager, Some(lane));
            }
            What::Control => return self.execute(now, at, frame::decode_head(&head)?, control, host),
            What::Receive { .. } => {}
        }
        Ok(())
    }

    /// What a frame other than a message or data asks for.
    fn execute(&mut self, now: Time, at: usize, frame: Frame, bytes: &[u8], host: &mut Host<'_>) -> Result<(), String> {
        match frame {
            Frame::Announce { op, tag, offer, unasked } => {
                let announce = frame::decode_announce(bytes, offer, unasked)?;
                return self.announced(now, op, tag, announce, host.matcher);
            }
            Frame::Consent { op, target } => return self.outgoing.consented(now, op, target, &mut self.events),
            Frame::Done => {
                for id in frame::decode_done(bytes) {
                    self.finished(now, id)?;
                }
            }
            Frame::Fail { op, code } => {
                let why = frame::decode_failure(code, bytes)?;
                if self.credit.counts(op) {
                    return self.credit.failed(op, why, &mut self.events);
                }
                let (outgoing, _, _, mut cx) = self.parts(now);
                return outgoing.failed(op, why, &mut cx);
            }
            Frame::ReadFailed { serve, target, code } => {
                self.read_failed(now, serve, target, frame::decode_failure(code, bytes)?);
            }
            Frame::Abort { op, code } => self.aborted(now, op, frame::decode_abort(code, bytes)?, host.matcher),
            Frame::Write { op, len, imm, data, offer } => {
                let write = frame::decode_write(bytes, offer)?;
                return self.written(now, WriteOf { op, len, imm, data, write }, host);
            }
            Frame::Read { op, target, offer, chunks } => {
                let read = frame::decode_read(bytes, offer)?;
                let lane = self.lanes[at].spec.id;
                return self.read(now, ServeRequest { op, target, read, chunks, lane }, host);
            }
            Frame::Invite { op } => {
                let descriptor = frame::decode_invite(bytes)?;
                let (outgoing, _, _, mut cx) = self.parts(now);
                outgoing.invited(op, descriptor, &mut cx);
            }
            Frame::HelpEnded { op, failed } => self.help_ended(now, op, failed),
            Frame::Pushed { serve, target } => {
                if self.incoming.pushed(serve, target)? {
                    self.complete_in(now, target.index, Protocol::Direct, None);
                }
            }
            Frame::Bye => self.bye(now, host.matcher),
            Frame::Eager { .. }
            | Frame::WriteData { .. }
            | Frame::Put { .. }
            | Frame::ReadData { .. }
            | Frame::Nothing
            | Frame::Ack
            | Frame::Chunk { .. }
            | Frame::ChunkAck { .. } => {}
        }
        Ok(())
    }

    /// The peer says that it has all of our operation `id` (or that it has all of the read which we serve).
    #[inline]
    fn finished(&mut self, now: Time, id: u32) -> Result<(), String> {
        if self.credit.counts(id) {
            return self.credit.finished(now, id, self.stream.lane(), &mut self.events);
        }
        let (outgoing, _, _, mut cx) = self.parts(now);
        outgoing.finished(id, &mut cx)
    }

    fn announced(
        &mut self,
        now: Time,
        their: u32,
        tag: u64,
        announce: frame::Announce,
        matcher: &mut Matcher,
    ) -> Result<(), String> {
        let frame::Announce { len, offer, number } = announce;
        if len == 0 {
            return Err("announcement of an empty message".to_owned());
        }
        if let Some(number) = number {
            return self.announced_unasked(now, (their, tag), (len, number), matcher);
        }
        if self.control.closing() {
            self.control.push_failed(their, &Failure::Closed, &mut self.events);
            return Ok(());
        }
        if self.peer_ops.at(their) != PeerOp::Free {
            return Err(format!("operation {their} begun twice"));
        }
        let Some((op, capacity)) = matcher.arrive(self.id, tag) else {
            let id = self.id;
            let (_, _, unexpected, mut cx) = self.parts(now);
            let of = Announced { their, tag, len, offer, number: None };
            return unexpected.keep(id, of, false, matcher, &mut cx).map(drop);
        };
        if len > capacity {
            self.parts(now).3.truncated(op, tag, their, len, capacity);
            return Ok(());
        }
        if let Err(why) = self.peer_ops.claim(their, PeerOp::Open) {
            self.events.fail(op, Failure::PeerDead(why.clone()), 0, tag);
            return Err(why);
        }
        let (_, incoming, _, mut cx) = self.parts(now);
        incoming.begin_transfer(their, InKind::Receive { op, tag }, len, offer, &mut cx);
        Ok(())
    }

    /// A message is announced whose bytes arrive unasked, and perhaps arrived already.
    fn announced_unasked(
        &mut self,
        now: Time,
        (their, tag): (u32, u64),
        (len, number): (u64, u32),
        matcher: &mut Matcher,
    ) -> Result<(), String> {
        let (id, closing, taken) = (self.id, self.control.closing(), self.peer_ops.at(their) != PeerOp::Free);
        let (_, incoming, unexpected, mut cx) = self.parts(now);
        let early = unexpected.announce(number, len)?;
        if closing {
            unexpected.drop_early(early, &mut cx);
            cx.control.push_failed(their, &Failure::Closed, cx.events);
            return Ok(());
        }
        if taken {
            return Err(format!("operation {their} begun twice"));
        }
        let by = matcher.arrive(id, tag);
        if let Some((op, capacity)) = by.filter(|(_, capacity)| len > *capacity) {
            unexpected.drop_early(early, &mut cx);
            cx.truncated(op, tag, their, len, capacity);
            return Ok(());
        }
        let result = match (by, early) {
            (_, Some(arrival)) => unexpected.name(id, arrival, (their, tag), by, matcher, &mut cx),
            (None, None) => {
                let of = Announced { their, tag, len, offer: None, number: Some(number) };
                unexpected.keep(id, of, false, matcher, &mut cx).map(drop)
            }
            (Some((op, _)), None) => cx.peer_ops.claim(their, PeerOp::Open).map(|()| {
                incoming.begin_unasked(their, InKind::Receive { op, tag }, len, number, &mut cx);
            }),
        };
        if let (Err(why), Some((op, _))) = (&result, by) {
            // The receive was taken from the matcher: it goes down with this peer.
            cx.events.fail(op, Failure::PeerDead(why.clone()), 0, tag);
        }
        result
    }

    fn written(&mut self, now: Time, of: WriteOf, host: &mut Host<'_>) -> Result<(), String> {
        let WriteOf { op, len, imm, data, write } = of;
        if len == 0 && !data {
            return Err("zero-length write without data".to_owned());
        }
        if self.control.closing() {
            self.control.push_failed(op, &Failure::Closed, &mut self.events);
            return Ok(());
        }
        let region = match host.regions.resolve(&write.key, write.offset, len, Access::Write) {
            Ok(region) => region,
            Err(fault) => {
                self.control.push_failed(op, &Failure::Region(fault), &mut self.events);
                return Ok(());
            }
        };
        self.peer_ops.claim(op, PeerOp::Open)?;
        let kind = InKind::Write { region, base: write.offset, imm: imm.then_some(write.imm) };
        let (_, incoming, _, mut cx) = self.parts(now);
        if data {
            incoming.begin_data(op, kind, len, &mut cx);
        } else {
            incoming.begin_transfer(op, kind, len, write.offer, &mut cx);
        }
        Ok(())
    }

    fn read(&mut self, now: Time, of: ServeRequest, host: &mut Host<'_>) -> Result<(), String> {
        let ServeRequest { op, target, read, chunks, lane } = of;
        let resolved = if self.control.closing() {
            Err(Failure::Closed)
        } else {
            let found = host.regions.resolve(&read.key, read.offset, read.len, Access::Read);
            found.map_err(Failure::Region)
        };
        let region = match resolved {
            Ok(region) => region,
            Err(why) => {
                let (code, _) = frame::encode_failure(&why);
                self.control.push(Frame::ReadFailed { serve: 0, target, code }, Body::None, &mut self.events);
                return Ok(());
            }
        };
        self.peer_ops.claim(op, PeerOp::Open)?;
        let of_lane = self.stream.lane().and_then(|l| self.lanes.find(l)).map(|at| &self.lanes[at].spec);
        let apart = self.lanes.sends_apart(now, read.len, self.outgoing.short_bytes(), self.stream.load());
        let eager = !chunks && !apart && host.regions.eager(region);
        let eager_max = of_lane.filter(|_| eager).map_or(0, |s| u64::from(s.eager_max.min(s.max_payload)));
        let descriptor = read.descriptor.filter(|_| read.len > 0);
        let serve = ServeOf { their: op, target, region, base: read.offset, len: read.len, descriptor, lane };
        let (outgoing, _, _, mut cx) = self.parts(now);
        let index = outgoing.serve(serve, eager_max, &mut cx);
        cx.peer_ops.set(op, PeerOp::Serve(index));
        Ok(())
    }
}

pub(super) struct WriteOf {
    pub(super) op: u32,
    pub(super) len: u64,
    pub(super) imm: bool,
    pub(super) data: bool,
    pub(super) write: frame::Write,
}

pub(super) struct ServeRequest {
    pub(super) op: u32,
    pub(super) target: frame::Target,
    pub(super) read: frame::Read,
    /// Never in one frame.
    pub(super) chunks: bool,
    pub(super) lane: LaneId,
}
