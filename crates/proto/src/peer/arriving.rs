//! Heads and payloads that come in.

use crossrail_types::{Head, LaneId, OpId};

use super::Peer;
use super::answers::Phase;
use super::theirs::Their;
use crate::frame::{self, Frame};
use crate::lane::Placement;
use crate::peer::incoming::{ChunkOf, InKind, InStage};
use crate::peer::kept::Kept;
use crate::peer::open::{Open, What};
use crate::peer::requests::{ServeRequest, WriteOf};
use crate::peer::stream::Arrival;
use crate::{Failure, Host, Matcher, Memory, Placing, Protocol, RegionFault, Short, Time};

impl Peer {
    /// A head has come in on `lane`: where does its payload go? One payload at a time per lane; lanes interleave.
    #[inline]
    pub fn place(&mut self, now: Time, lane: LaneId, head: &Head, host: &mut Host<'_>) -> Placing {
        if let Some(placing) = self.place_expected(now, lane, head, host.matcher) {
            return placing;
        }
        self.stir();
        match self.arrive(now, lane, head, host) {
            Ok(placing) => placing,
            Err(why) => {
                self.violated(lane, &why);
                Placing::Refuse(why)
            }
        }
    }

    /// [`Peer::place`], for engines that would rather not move a whole [`Placing`], as far as it answers with
    /// [`Placing::Message`]. `None`: [`Peer::place`] decides. `ended` is handed what [`Peer::short`] would be: messages of
    /// ours that the head confirms.
    #[inline]
    pub fn place_short(
        &mut self,
        now: Time,
        lane: LaneId,
        head: &Head,
        matcher: &mut Matcher,
        ended: &mut impl FnMut(Short),
    ) -> Option<Short> {
        if !self.is_calm(lane) {
            return None;
        }
        let frame::EagerHead { tag, done, counted, .. } = frame::as_eager(head)?;
        let (stamp, len) = (frame::Stamp::of(head), head.payload_len());
        if !counted || done != 0 || len > self.calm.place_max || !self.stream.plain(stamp) {
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
    /// on a lane that loses nothing the count of delivered messages. `None`: nothing was done, [`Peer::arrive`] decides.
    #[inline]
    fn place_expected(&mut self, now: Time, lane: LaneId, head: &Head, matcher: &mut Matcher) -> Option<Placing> {
        let at = self.lanes.find(lane)?;
        if !self.answers.is_open() || self.stream.is_receiving() {
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
            && !matches!(self.lanes[at].placing, Placement::Chunk { .. })
            && self.theirs.at(their) == Their::Free;
        if !plain || (counted && len > spec.whole_max) {
            return None;
        }
        // Confirming is the same whoever does it; from the matcher on, nothing may fail.
        if counted {
            self.confirmed(now, stamp.ack).ok()?;
        } else {
            if !self.theirs.may_open(their) {
                return None;
            }
            if self.stream.acknowledge(stamp.ack).ok()? {
                self.stream_progress(now);
            }
        }
        if done != 0 && !self.finishes_eager(done.wrapping_sub(1)) {
            return None;
        }
        let op = matcher.arrive_within(self.id, tag, u64::from(len), counted)?;
        if done != 0 {
            self.close_eager(now, done.wrapping_sub(1));
        }
        if counted {
            self.stream.consumed(false);
            if !self.delivered.deliver(their) {
                self.answers.owe_done(their, &mut self.events);
            } else {
                self.calm_down(at);
            }
            return Some(Placing::Message(Short { op, tag, bytes: u64::from(len), wire_ns: 0, lane: Some(lane) }));
        }
        self.stir();
        self.theirs.open(their);
        self.lanes[at].placing = Placement::Stream;
        self.stream.hear(lane);
        self.stream.receive(Open { lane, head: *head, what: What::Receive { op, their, tag }, lossy: true });
        Some(Placing::Memory { memory: Memory::Op(op), offset: 0, len, chunk: false })
    }

    /// `Err` where nothing has changed yet: the lane alone is to fail. What the stream itself says wrongly, in its turn,
    /// it would say again on another lane: then the connection is broken off, too.
    fn arrive(&mut self, now: Time, lane: LaneId, head: &Head, host: &mut Host<'_>) -> Result<Placing, String> {
        match self.answers.phase() {
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
            Frame::ChunkAck { .. } if !self.answers.live() => return Ok(Placing::Discard),
            Frame::Chunk { target, offset, from, again, void } => {
                if void {
                    self.lanes[at].consume();
                    return Ok(Placing::Discard);
                }
                let chunk = ChunkOf { target, offset, len, from, again };
                return self.place_chunk(now, at, chunk, host.regions);
            }
            Frame::ChunkAck { count } => {
                self.chunks_acked(now, at, count)?;
                return Ok(Placing::Discard);
            }
            _ => {}
        }
        if self.lanes[at].spec.reliable {
            self.confirmed(now, frame::ack(head))?;
        } else if self.stream.acknowledge(frame::ack(head))? {
            self.stream_progress(now);
        }
        if matches!(frame, Frame::Ack) {
            return Ok(Placing::Discard);
        }
        let lossy = !self.lanes[at].spec.reliable;
        let arrival = self.stream.classify(frame::epoch(head), frame::seq(head));
        match arrival {
            Arrival::Stale => return Ok(Placing::Discard),
            Arrival::Gap => return Err("a message is missing".to_owned()),
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
        if done != 0 && self.answers.live() {
            self.finished(now, done).inspect_err(|why| self.answers.break_off(why.clone(), &mut self.events))?;
        }
        if !self.answers.talks() {
            if frame == Frame::Bye {
                self.bye(now, host.matcher);
            }
            self.stream.consumed(lossy);
            return Ok(Placing::Discard);
        }
        self.open_frame(now, at, head, frame, host)
            .inspect_err(|why| self.answers.break_off(why.clone(), &mut self.events))
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
                self.open_eager(op, tag, len, host.matcher)?
            }
            Frame::WriteData { op } => self.open_write_data(now, op, len, host)?,
            Frame::ReadData { serve, target } => {
                if serve == 0 {
                    return Err("data of a read without its owner's id".to_owned());
                }
                match self.find_in(target).map(|i| (i.kind, i.len)) {
                    Some((InKind::Read { .. }, expected)) if expected == u64::from(len) => {
                        self.ins[target.index as usize].their = serve;
                        Some(What::Data { index: target.index })
                    }
                    Some(_) => return Err(format!("data of a read, {len} bytes, that do not fit")),
                    None => None,
                }
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
            What::Data { index } => match self.ins.get(index as usize) {
                Some(incoming) => Placing::Memory { memory: incoming.memory(), offset: 0, len, chunk: false },
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
            return Err("a message came again and differs".to_owned());
        };
        open.lane = lane;
        let what = open.what;
        self.lanes[at].placing = Placement::Stream;
        Ok(self.placing(what, head.payload_len()))
    }

    fn open_eager(&mut self, their: u32, tag: u64, len: u32, matcher: &mut Matcher) -> Result<Option<What>, String> {
        if self.answers.closing() {
            self.answers.tell_failed(their, &Failure::Closed, &mut self.events);
            return Ok(None);
        }
        let Some((op, capacity)) = matcher.arrive(self.id, tag) else {
            return self.keep_eager(their, tag, len, matcher).map(Some);
        };
        if u64::from(len) > capacity {
            self.truncated(op, tag, their, u64::from(len), capacity);
            return Ok(None);
        }
        let what = What::Receive { op, their, tag };
        if let Err(why) = self.theirs.claim(their, Their::Open) {
            // The receive was taken from the matcher: it goes down with this peer.
            self.events.fail(op, Failure::PeerDead(why.clone()), 0, tag);
            return Err(why);
        }
        Ok(Some(what))
    }

    pub(super) fn truncated(&mut self, op: OpId, tag: u64, their: u32, message: u64, buffer: u64) {
        let why = Failure::Truncated { message, buffer };
        self.answers.tell_failed(their, &why, &mut self.events);
        self.events.fail(op, why, 0, tag);
    }

    fn open_write_data(&mut self, now: Time, op: u32, len: u32, host: &mut Host<'_>) -> Result<Option<What>, String> {
        let Their::In(index) = self.theirs.at(op) else { return Ok(None) };
        let Some(incoming) = self.ins.get(index as usize) else { return Ok(None) };
        if incoming.stage != InStage::Data || incoming.len != u64::from(len) {
            return Err(format!("data of a write, {len} bytes, that do not fit"));
        }
        match incoming.kind {
            InKind::Write { region, .. } if !host.regions.alive(region) => {
                self.end_in(now, index, Failure::Region(RegionFault::Gone));
                Ok(None)
            }
            _ => Ok(Some(What::Data { index })),
        }
    }

    /// The payload of the lane's last `place` is complete; `control` holds it if that was [`Placing::Control`].
    /// `Err`: the peer broke the protocol, this is how: the lane must fail.
    #[inline]
    pub fn placed(&mut self, now: Time, lane: LaneId, control: &[u8], host: &mut Host<'_>) -> Result<(), String> {
        self.stir();
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
            Placement::Chunk { index, serial, offset, len, again } => {
                self.lanes[at].placing = Placement::None;
                let target = Peer::target(index, serial);
                self.placed_chunk(now, at, ChunkOf { target, offset, len, from: 0, again })
            }
        };
        if let Err(why) = &result {
            self.answers.break_off(why.clone(), &mut self.events);
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
        self.theirs.free(their);
        if !self.delivered.deliver_late(their) {
            self.answers.owe_done(their, &mut self.events);
        }
    }

    fn complete_open(&mut self, now: Time, at: usize, control: &[u8], host: &mut Host<'_>) -> Result<(), String> {
        let Some(Open { lane, head, what, lossy }) = self.stream.take_received() else { return Ok(()) };
        self.stream.consumed(lossy);
        let elsewhere = self.lanes.void_stream_placements(Some(lane));
        match what {
            What::Kept { arrival } => self.kept(arrival),
            What::Data { index } => {
                if let (true, Some(incoming)) = (elsewhere, self.ins.get(index as usize)) {
                    self.events.revoke(incoming.memory());
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
            Frame::Announce { op, tag, offer } => {
                let announce = frame::decode_announce(bytes, offer)?;
                return self.announced(now, op, tag, announce, host.matcher);
            }
            Frame::Consent { op, target } => return self.consented(now, op, target),
            Frame::Done => {
                for id in frame::decode_done(bytes) {
                    self.finished(now, id)?;
                }
            }
            Frame::Fail { op, code } => return self.out_failed(now, op, frame::decode_failure(code, bytes)?),
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
            Frame::Invite { op } => self.invited(op, frame::decode_invite(bytes)?),
            Frame::HelpEnded { op, failed } => self.help_ended(now, op, failed),
            Frame::Pushed { serve, target } => return self.pushed(now, serve, target),
            Frame::Bye => self.bye(now, host.matcher),
            Frame::Eager { .. }
            | Frame::WriteData { .. }
            | Frame::ReadData { .. }
            | Frame::Nothing
            | Frame::Ack
            | Frame::Chunk { .. }
            | Frame::ChunkAck { .. } => {}
        }
        Ok(())
    }

    /// Ends a receive whose message is just coming in.
    pub(super) fn end_arriving(&mut self, op: OpId, why: &Failure) -> bool {
        if let Some(&Open { what: What::Receive { op: o, their, tag }, .. }) = self.stream.receiving()
            && o == op
        {
            self.stream.drop_open(&mut self.lanes);
            self.events.revoke(Memory::Op(op));
            self.events.fail(op, why.clone(), 0, tag);
            self.answers.tell_failed(their, why, &mut self.events);
            self.theirs.free(their);
            return true;
        }
        let of = |k: &Kept| !k.over && matches!(k.accepted, Some((o, _)) if o == op);
        let Some((_, kept)) = self.arrivals.iter_mut().find(|(_, k)| of(k)) else { return false };
        kept.accepted = None;
        kept.ended = Some(why.clone());
        let tag = kept.tag;
        self.events.fail(op, why.clone(), 0, tag);
        true
    }
}
