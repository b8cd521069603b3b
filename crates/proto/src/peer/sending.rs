//! What a lane carries next.

use crossrail_types::{Head, LaneId, OpId};

use super::Peer;
use super::control_queue::Phase;
use super::fast_path::FastPath;
use super::outgoing::Queued;
use crate::frame::{self, Announce, Frame, Read, Stamp, Write};
use crate::lane::Lane;
use crate::{Body, Memory, Operation, Out, Short, Time};

/// Consumed messages after which the peer is told at once.
const ACK_EVERY: u32 = 64;

/// A message with its first frame.
fn eager_out(head: Head, op: OpId, len: u64) -> Out {
    Out { head, body: Body::Memory { memory: Memory::Op(op), offset: 0, len: len as u32 }, chunk: false }
}

fn body_len(body: &Body) -> u32 {
    match *body {
        Body::None => 0,
        Body::Inline { len, .. } => u32::from(len),
        Body::Memory { len, .. } => len,
    }
}

impl Peer {
    /// What this lane carries next; the engine asks as long as the lane has room. `None`: nothing now.
    ///
    /// Whatever it answers must be carried, in that order, or the lane be given up.
    #[inline]
    pub fn next(&mut self, now: Time, lane: LaneId) -> Option<Out> {
        self.next_within(now, lane, u64::MAX)
    }

    /// [`Peer::next`], with chunks of at most `most` bytes: the first of a lane that waits for the bytes of each.
    #[inline]
    pub fn next_within(&mut self, now: Time, lane: LaneId, most: u64) -> Option<Out> {
        self.fast_path.invalidate();
        let at = self.lanes.find(lane)?;
        if matches!(self.control.phase(), Phase::Live | Phase::Closed)
            && let Some(ack) = self.lanes.take_ack(at)
        {
            return Some(Out { head: frame::encode_head(&ack, 0), body: Body::None, chunk: false });
        }
        if self.stream.is_on(lane)
            && let Some(out) = self.next_message(now, at)
        {
            return Some(out);
        }
        if self.stream.is_heard_on(lane)
            && self.stream.owed() > 0
            && (self.stream.owed() >= ACK_EVERY || self.control.due())
        {
            let ack = self.stream.take_ack();
            return Some(self.next_ack(ack));
        }
        if self.owes_count(at) && (self.delivered.unpublished_count() >= ACK_EVERY || self.control.due()) {
            let count = self.delivered.take_count();
            return Some(self.next_ack(count));
        }
        if !self.control.live() || !self.outgoing.has_chunks_for(&self.lanes, at) {
            return None;
        }
        self.outgoing.next_chunk(now, &mut self.lanes, at, most)
    }

    /// [`Peer::next`] for a lane that is to take no chunk at present: it waits for the bytes of others.
    #[cold]
    pub fn next_but_chunks(&mut self, now: Time, lane: LaneId) -> Option<Out> {
        let held = self.outgoing.hold_chunks();
        let out = self.next(now, lane);
        self.outgoing.resume_chunks(held);
        out
    }

    /// Whether [`Peer::next`] might have something for this lane. Cheap.
    #[inline(always)]
    pub fn wants(&self, lane: LaneId) -> bool {
        !self.fast_path.is_on(lane) && self.has_work(lane)
    }

    /// [`Peer::wants`], which looks at everything.
    fn has_work(&self, lane: LaneId) -> bool {
        self.lanes
            .find(lane)
            .is_some_and(|at| !self.is_quiet(at) && (self.has_control_frames(at) || self.may_chunk(at)))
    }

    /// Whether the lane at `at` certainly has nothing to send: one cheap test for the common case. False is
    /// inconclusive.
    #[inline]
    pub(super) fn is_quiet(&self, at: usize) -> bool {
        let Lane { spec, .. } = &self.lanes[at];
        let waiting = self.outgoing.waiting() | self.control.waiting();
        let flags = self.control.closing()
            | self.lanes[at].owes()
            | self.lanes.may_ack_sooner()
            | self.outgoing.must_follow()
            | (self.delivered.owed() & !spec.counts);
        waiting | self.stream.unsettled() | usize::from(flags) == 0
    }

    /// [`Peer::wants`] for a lane that is to take no chunk at present.
    #[inline]
    pub fn wants_but_chunks(&self, lane: LaneId) -> bool {
        self.lanes.find(lane).is_some_and(|at| self.has_control_frames(at))
    }

    #[inline]
    fn has_control_frames(&self, at: usize) -> bool {
        let lane = self.lanes[at].spec.id;
        let messages = self.stream.is_on(lane)
            && (self.outgoing.has_control_frames()
                || !self.control.is_empty()
                || self.stream.resends()
                || self.control.owes_bye());
        messages
            || self.owes_count(at)
            || self.lanes.owes_ack(at)
            || (self.stream.is_heard_on(lane) && self.stream.owed() > 0)
    }

    /// Whether the peer is to be told by a frame on the lane at `at` of more counted messages.
    #[inline]
    fn owes_count(&self, at: usize) -> bool {
        let spec = &self.lanes[at].spec;
        self.delivered.owed() && self.stream.reliable() && self.stream.is_on(spec.id) && !spec.counts
    }

    /// The count of delivered messages, if the peer does not know it yet: for `lane`, which [counts]. Publish it there
    /// only while every frame that [`Peer::next`] and [`Peer::send_now`] returned is on the lane, since the count may
    /// pass messages that such a frame declares failed. Then call [`Peer::count_published`].
    ///
    /// [counts]: crate::LaneSpec::counts
    #[inline(always)]
    pub fn unpublished_count(&self, lane: LaneId) -> Option<u32> {
        if self.fast_path.is_on(lane) {
            // Nothing is withheld then: the count is what has arrived.
            return self.delivered.unpublished();
        }
        let counts = self.stream.reliable() && self.stream.is_on(lane);
        (counts && self.delivered.owed()).then(|| self.delivered.count())
    }

    /// [`Peer::unpublished_count`] right after [`Peer::place_short`], when it is never `None`.
    #[inline(always)]
    pub fn placed_count(&self) -> u32 {
        self.delivered.arrived()
    }

    /// `count`, from [`Peer::unpublished_count`], was published.
    #[inline(always)]
    pub fn count_published(&mut self, count: u32) {
        debug_assert_eq!(count, self.delivered.count());
        self.delivered.count_published(count);
    }

    /// Whether [`Peer::event`] has something.
    #[inline]
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Whether messages of ours wait to be confirmed by the peer's count.
    #[inline]
    pub fn awaits_count(&self) -> bool {
        self.credit.awaits_count()
    }

    /// The peer has published `count`, and every frame that it sent before it was placed; a frame may have told more
    /// since. `ended` is handed what [`Peer::short`] would be. `Err`: the peer broke the protocol, this is how: the
    /// lane must fail.
    #[inline]
    pub fn published(&mut self, now: Time, count: u32, ended: &mut impl FnMut(Short)) -> Result<(), String> {
        if !self.credit.is_ahead(count) || !self.control.live() || self.confirm(now, count, ended) {
            return Ok(());
        }
        self.fast_path.invalidate();
        let why = self.credit.too_many(count);
        self.control.break_off(why.clone(), &mut self.events);
        Err(why)
    }

    /// Whether [`Peer::next`] has something for this lane that must go out now. [`Peer::wants`] also covers the few
    /// acknowledgements that may wait to ride along with a message.
    #[inline(always)]
    pub fn has_urgent(&self, lane: LaneId) -> bool {
        !self.fast_path.is_on(lane) && self.has_urgent_work(lane)
    }

    /// [`Peer::has_urgent`], which looks at everything.
    fn has_urgent_work(&self, lane: LaneId) -> bool {
        let Some(at) = self.lanes.find(lane) else { return false };
        if self.is_quiet(at) {
            return false;
        }
        let messages = self.stream.is_on(lane)
            && (self.outgoing.has_control_frames() || self.control.has_urgent() || self.stream.resends());
        let acks = self.stream.owed();
        let owed = self.stream.is_heard_on(lane) && acks > 0 && (acks >= ACK_EVERY || self.control.is_urgent());
        let counts =
            self.owes_count(at) && (self.delivered.unpublished_count() >= ACK_EVERY || self.control.is_urgent());
        messages || owed || counts || self.lanes.owes_ack(at) || self.may_chunk(at)
    }

    /// [`Peer::start`] and the [`Peer::next`] after it in one step, for a message of `len` bytes that can go out on
    /// this lane now, with all its bytes. True: `head` is its head, to be carried at once. False: it cannot, nothing
    /// was done.
    // Where the head is to be written is given: an option of one would be moved twice.
    #[inline(always)]
    pub fn send_now(&mut self, now: Time, op: OpId, tag: u64, len: u64, lane: LaneId, head: &mut Head) -> bool {
        if self.fast_path.is_on(lane)
            && self.credit.permits(len, self.fast_path.send_max())
            && !self.credit.is_count_full()
        {
            *head = self.count_out_fast(op, tag, len, now);
            return true;
        }
        let clear = self.send_if_clear(now, op, tag, len, lane);
        clear.is_some_and(|clear| {
            *head = clear;
            true
        })
    }

    /// [`Peer::send_now`], which looks at all that might be in the way.
    #[inline(never)]
    fn send_if_clear(&mut self, now: Time, op: OpId, tag: u64, len: u64, lane: LaneId) -> Option<Head> {
        let at = self.lanes.find(lane)?;
        let spec = &self.lanes[at].spec;
        if !self.is_clear(at)
            || self.lanes.sends_apart(now, len, self.credit.bytes(), self.stream.load())
            || !self.credit.permits(len, u64::from(spec.eager_max.min(spec.max_payload)))
        {
            return None;
        }
        let head = self.eager(now, at, op, tag, len, now);
        self.enter_fast_path(at);
        Some(head)
    }

    /// Whether a new message could go out on the lane at `at` before anything else.
    fn is_clear(&self, at: usize) -> bool {
        self.stream.is_on(self.lanes[at].spec.id)
            && self.control.is_clear()
            && !self.outgoing.has_control_frames()
            && !self.stream.resends()
            && self.stream.open()
            && !self.lanes[at].owes()
    }

    /// A message that goes with its first frame; credit was checked.
    fn eager(&mut self, now: Time, at: usize, op: OpId, tag: u64, len: u64, started: Time) -> Head {
        let lane = &mut self.lanes[at];
        let (id_of_lane, lossy) = (lane.spec.id, !lane.spec.reliable);
        if !lossy && !self.credit.is_count_full() {
            return self.count_out(op, tag, len, started);
        }
        if lossy && !self.stream.waiting() {
            lane.restart_silence_timer(now);
        }
        let done = self.control.take_done();
        let stamp = self.stamp();
        self.credit.take(len);
        let id = self.outgoing.begin_eager(op, len, started, id_of_lane, stamp.seq);
        let head = frame::eager(id, tag, len as u32, stamp, done, false);
        if lossy {
            self.stream.retain(&eager_out(head, op, len));
        }
        self.delivered.answered(done);
        self.clear_urgency();
        head
    }

    /// [`Peer::eager`] on a lane that loses nothing: the peer confirms the message by its count.
    #[inline(always)]
    fn count_out(&mut self, op: OpId, tag: u64, len: u64, started: Time) -> Head {
        let done = if self.control.no_dones() { 0 } else { self.control.take_done() };
        let stamp = self.stamp();
        let id = self.credit.count_out(op, len, started);
        self.delivered.answered(done);
        if !self.control.none_deferred() {
            self.clear_urgency();
        }
        frame::eager(id, tag, len as u32, stamp, done, true)
    }

    /// [`Peer::count_out`] while the fast path is on: the head has nothing to carry but the count.
    #[inline(always)]
    fn count_out_fast(&mut self, op: OpId, tag: u64, len: u64, started: Time) -> Head {
        debug_assert!(self.control.no_dones() && self.control.none_deferred() && self.stream.reliable());
        let stamp = Stamp { ack: self.delivered.take_arrived(), ..self.stream.stamp() };
        let id = self.credit.count_out(op, len, started);
        frame::eager(id, tag, len as u32, stamp, 0, true)
    }

    /// Numbers a frame of the stream and has it confirm what was delivered.
    #[inline]
    fn stamp(&mut self) -> Stamp {
        let mut stamp = self.stream.stamp();
        if self.stream.reliable() {
            stamp.ack = self.delivered.take_count();
        }
        stamp
    }

    /// Whether there are chunks for this lane, as far as its window goes.
    #[inline]
    fn may_chunk(&self, at: usize) -> bool {
        self.lanes.has_window(at) && self.outgoing.has_chunks_for(&self.lanes, at)
    }

    /// Owed acknowledgements go out with the next [`Peer::next`], alone if need be. For before a sleep or a long
    /// absence; [`Peer::on_timeout`] does it, too.
    pub fn flush(&mut self) {
        self.fast_path.invalidate();
        let owes = self.owes();
        self.control.urge(owes);
    }

    #[inline]
    pub(super) fn owes(&self) -> bool {
        !self.control.no_dones() || self.stream.owed() > 0 || (self.delivered.owed() && self.stream.reliable())
    }

    fn next_message(&mut self, now: Time, at: usize) -> Option<Out> {
        if !self.control.live() {
            return None;
        }
        if self.stream.resends() {
            let mut out = self.stream.resend()?;
            if self.stream.reliable() {
                frame::set_ack(&mut out.head, self.delivered.take_count());
            }
            return Some(out);
        }
        if !self.stream.open() {
            return None;
        }
        if let Some((index, body)) = self.outgoing.take_follow() {
            // The bytes of the write that just went out.
            let (out, seq) = self.seal(now, at, Frame::WriteData { op: index + 1 }, body, 0);
            self.outgoing.went_with(index, seq);
            return Some(out);
        }
        if let Some((frame, body)) = self.control.take_frame() {
            // Not together with a done, which would be read first: they may be about the same operation.
            let (out, seq) = self.seal(now, at, frame, body, 0);
            if let Frame::ReadData { serve, .. } = frame {
                self.outgoing.went_with(serve.wrapping_sub(1), seq);
            }
            return Some(out);
        }
        if self.control.dones_first() {
            return Some(self.next_dones(now, at));
        }
        if self.credit.permits_one()
            && let Some(queued) = self.outgoing.take_queued()
        {
            return Some(self.issue(now, at, &queued));
        }
        if !self.control.no_dones() && self.control.due() {
            return Some(self.next_dones(now, at));
        }
        self.next_bye(now, at)
    }

    /// A frame that carries nothing but `ack`: an acknowledgement or the count of delivered messages.
    fn next_ack(&mut self, ack: u32) -> Out {
        let mut head = frame::encode_head(&Frame::Ack, 0);
        frame::set_ack(&mut head, ack);
        self.clear_urgency();
        Out { head, body: Body::None, chunk: false }
    }

    #[inline]
    fn clear_urgency(&mut self) {
        if !self.owes() {
            self.control.settle();
        }
    }

    fn next_dones(&mut self, now: Time, at: usize) -> Out {
        let first = self.control.take_done();
        let bytes = self.control.take_dones();
        let out = self.seal(now, at, Frame::Done, Body::from(bytes), first).0;
        frame::decode_done(&bytes.bytes[..usize::from(bytes.len)]).for_each(|id| self.delivered.answered(id));
        out
    }

    fn next_bye(&mut self, now: Time, at: usize) -> Option<Out> {
        let finished = self.control.owes_bye()
            && self.outgoing.is_idle()
            && self.credit.is_unused()
            && self.incoming.is_empty()
            && self.control.no_dones()
            && !self.stream.is_receiving();
        if !finished {
            return None;
        }
        self.control.say_bye();
        let (_, _, unexpected, mut cx) = self.parts(now);
        unexpected.drop_all_early(&mut cx);
        Some(self.seal(now, at, Frame::Bye, Body::None, 0).0)
    }

    #[inline]
    fn seal(&mut self, now: Time, at: usize, frame: Frame, body: Body, done: u32) -> (Out, u32) {
        let mut out = Out { head: frame::encode_head(&frame, body_len(&body)), body, chunk: false };
        if !self.lanes[at].spec.reliable && !self.stream.waiting() {
            self.lanes[at].restart_silence_timer(now);
        }
        let stamp = self.stamp();
        stamp.put(&mut out.head, done);
        if !self.lanes[at].spec.reliable {
            self.stream.retain(&out);
        }
        self.delivered.answered(done);
        if let Frame::Fail { op, .. } = frame {
            self.delivered.answered(op);
        }
        self.clear_urgency();
        (out, stamp.seq)
    }

    /// An operation goes out for the first time.
    #[inline]
    fn issue(&mut self, now: Time, at: usize, queued: &Queued) -> Out {
        let Queued { op, what, len, offer, eager, at: started } = *queued;
        let spec = &self.lanes[at].spec;
        // An offer is made where a direct copy costs less, however short the message.
        let offer = offer.filter(|_| len > 0);
        let eager = eager || len == 0;
        let short = eager && offer.is_none() && len <= u64::from(spec.eager_max.min(spec.max_payload));
        let lane = spec.id;
        if let Operation::Send { tag } = what
            && short
            && self.credit.permits_bytes(len)
        {
            if self.lanes.sends_apart(now, len, self.credit.bytes(), self.stream.load()) {
                return self.send_apart(now, at, queued, tag);
            }
            return eager_out(self.eager(now, at, op, tag, len, started), op, len);
        }
        // A put stays in the stream: the next frame may name what it brings.
        let whole = !matches!(what, Operation::Write { .. })
            || !self.lanes.spreads(now, len, self.outgoing.short_bytes(), self.stream.load());
        let short = short && whole;
        let done = self.control.take_done();
        self.credit.take(0);
        let what = match what {
            Operation::Put { key, .. } if !short => Operation::Write { key, offset: 0, imm: Some(0) },
            what => what,
        };
        match what {
            Operation::Put { name, .. } => {
                let op = self.outgoing.begin_write(now, queued, lane, None, true);
                let body = self.outgoing.take_follow().map_or(Body::None, |(_, body)| body);
                let (out, seq) = self.seal(now, at, Frame::Put { op, name }, body, done);
                self.outgoing.went_with(op - 1, seq);
                out
            }
            Operation::Send { tag } => {
                let id = self.outgoing.begin_send(now, queued, lane, offer);
                let frame = Frame::Announce { op: id, tag, offer: offer.is_some(), unasked: false };
                let body = Body::from(frame::encode_announce(&Announce { len, offer, number: None }));
                self.seal(now, at, frame, body, done).0
            }
            Operation::Write { key, offset, imm } => {
                let offer = if short { None } else { offer };
                let id = self.outgoing.begin_write(now, queued, lane, offer, short);
                let (has_imm, has_offer) = (imm.is_some(), offer.is_some());
                let frame = Frame::Write { op: id, len, imm: has_imm, data: short, offer: has_offer };
                let body = Body::from(frame::encode_write(&Write { key, offset, imm: imm.unwrap_or(0), offer }));
                self.seal(now, at, frame, body, done).0
            }
            Operation::Read { key, offset } => {
                let offer = if short { None } else { offer };
                let (incoming, accesses) = (&mut self.incoming, &mut self.accesses);
                let into = |out| incoming.begin_read(now, op, out, len, accesses);
                let (id, target) = self.outgoing.begin_read(now, queued, lane, offer, into);
                let descriptor = offer.map(|o| o.descriptor);
                let frame = Frame::Read { op: id, target, offer: descriptor.is_some(), chunks: !eager };
                let body = Body::from(frame::encode_read(&Read { key, offset, len, descriptor }));
                self.seal(now, at, frame, body, done).0
            }
        }
    }

    /// Announces a message whose bytes are sent apart; credit was checked.
    fn send_apart(&mut self, now: Time, at: usize, queued: &Queued, tag: u64) -> Out {
        let done = self.control.take_done();
        self.credit.take(queued.len);
        let (op, number) = self.outgoing.begin_unasked(now, queued, self.lanes[at].spec.id);
        let frame = Frame::Announce { op, tag, offer: false, unasked: true };
        let announce = Announce { len: queued.len, offer: None, number: Some(number) };
        self.seal(now, at, frame, Body::from(frame::encode_announce(&announce)), done).0
    }

    /// Turns the fast path on if its preconditions hold; see [`FastPath`].
    pub(super) fn enter_fast_path(&mut self, at: usize) {
        let lane = &self.lanes[at];
        if !lane.spec.counts {
            return;
        }
        let quiet = self.is_quiet(at) && lane.is_unoccupied() && !self.stream.is_receiving() && self.peer_ops.is_idle();
        let settled = self.control.none_deferred() && !self.delivered.withholds() && self.stream.is_empty();
        let open = self.control.talks() && self.stream.open() && self.stream.reliable();
        let counts = lane.spec.reliable && self.stream.is_on(lane.spec.id);
        if quiet && settled && open && counts {
            let send_max = u64::from(lane.spec.eager_max.min(lane.spec.max_payload));
            self.fast_path = FastPath::on(lane.spec.id, send_max, lane.spec.whole_max);
        }
    }

    /// The peer has delivered `count` of our counted messages, whose ends are handed to `ended` where no event is to be
    /// taken before them. False: it cannot have.
    #[inline(always)]
    pub(super) fn confirm(&mut self, now: Time, count: u32, ended: &mut impl FnMut(Short)) -> bool {
        let Some(news) = self.credit.newly_confirmed(count) else { return false };
        for _ in 0..news {
            if self.has_events() {
                self.pass_behind_events(now);
                continue;
            }
            let short = match self.credit.pass_sent() {
                Some((op, len, started)) => {
                    Short { op, tag: 0, bytes: len, wire_ns: now.since(started), lane: self.stream.lane() }
                }
                None => match self.pass_oldest(now) {
                    Some(short) => short,
                    None => continue,
                },
            };
            ended(short);
        }
        true
    }

    /// The count has passed the oldest message, whose end is told after the events before it.
    #[cold]
    fn pass_behind_events(&mut self, now: Time) {
        if let Some(short) = self.pass_oldest(now) {
            self.events.end_short(short);
        }
    }

    /// The count has passed the oldest message. `None`: it was answered before.
    // All of `self`: the lane is then read where it is needed, and not kept in memory across the loop.
    #[inline(never)]
    fn pass_oldest(&mut self, now: Time) -> Option<Short> {
        self.credit.pass_oldest(now, self.stream.lane())
    }

    /// The same, with events for their ends.
    #[inline]
    pub(super) fn confirmed(&mut self, now: Time, count: u32) -> Result<(), String> {
        self.credit.confirmed(now, count, self.stream.lane(), &mut self.events)
    }
}
