//! [`FabricLane`]: frames to one peer, over the writes of a [`FabricPlacing`].
//!
//! A frame with a short payload is one write into a slot of the peer's inbox. A longer payload is announced there; once
//! its frame's turn has come the receiver registers its place and answers where that is, and the payload goes there by
//! one write. Slots are taken in order, however they arrive; every half ring a write without bytes returns the credit.
//!
//! A registration that is being written cannot be recalled, so both ends keep the loan of a long payload until it has
//! arrived or the lane has ended.
#![allow(unsafe_code)]

mod slots;

use std::net::TcpStream;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_transport::placing::{Counter, Event, Extent, Imm, PIECES_MAX, Placing, WriteError};
use crossrail_transport::{Kept, Lane, LaneCaps, LaneError, LaneStats, Loan, Payload, Place, Post, Sink, Tx};
use crossrail_types::{Error, ErrorKind, HEAD_LEN, Head, LaneId, Result};

use self::slots::{Ring, Slots};
use crate::attach::attach_as;
use crate::offer::Offer;
use crate::placing::FabricPlacing;
use crate::port::Registered;
use crate::slab::Slab;
use crate::wire::{GREETING, Remote, u32_at, u64_at};

/// Frames in an inbox, and bytes of each.
const SLOTS: usize = 64;
const SLOT: usize = 8192;
/// Answers in an inbox, and bytes of each.
const ANSWERS: usize = 64;
const ANSWER: usize = 32;
const BEFORE: usize = 8 + HEAD_LEN;
/// Most bytes of a payload that goes with its frame.
const SHORT: usize = SLOT - BEFORE;
/// Most bytes of a payload.
const PAYLOAD_MAX: usize = 64 << 20;
/// Long payloads of one direction that were announced and have not arrived.
const LONG: usize = 16;
/// Time for what was sent to be handed over when a lane is dropped, at most, and as long as nothing of it moves; and for
/// what is in flight when the peer's was.
const FLUSH_MAX: Duration = Duration::from_secs(2);
const FLUSH_QUIET: Duration = Duration::from_millis(300);
const DRAIN: Duration = Duration::from_millis(500);

/// Counters, in the order in which both ends open them.
const FRAMES: Counter = Counter(0);
const ANSWERED: Counter = Counter(1);
const PAYLOADS: Counter = Counter(2);
const FRAME_CREDIT: Counter = Counter(3);
const ANSWER_CREDIT: Counter = Counter(4);
/// First byte of a lane's greeting.
const KIND: u8 = 1;

/// Kinds of tokens.
const OF_FRAME: u64 = 1 << 32;
const OF_ANSWER: u64 = 2 << 32;
const OF_PAYLOAD: u64 = 3 << 32;
const OF_CREDIT: u64 = 4 << 32;

/// A long payload to the peer.
enum Sending {
    Free,
    /// It waits for its place.
    Announced(Lent),
    Writing(Lent),
}

struct Lent {
    payload: Payload,
    token: u64,
    kept: Option<Kept>,
    /// Its owner recalled it before it was announced.
    void: bool,
}

/// A long payload from the peer, of which there is one at a time.
struct Receiving {
    transfer: u16,
    registered: Option<Registered>,
    kept: Option<Kept>,
    /// `None`: it is discarded.
    token: Option<u64>,
    len: usize,
}

/// A lane over libfabric. It is driven by one thread at a time, any thread, and never blocks.
///
/// Dropping it hands over what was sent, for up to 300 ms without any progress, 2 s in all.
pub struct FabricLane {
    id: LaneId,
    name: String,
    caps: LaneCaps,
    // The provider refers to the memory below until this is dropped.
    placing: Option<FabricPlacing>,
    inbox: Slab,
    staging: Slab,
    theirs: Remote,
    frames: Ring,
    answers: Ring,
    frame_slots: Slots,
    answer_slots: Slots,
    sending: Vec<Sending>,
    receiving: Option<Receiving>,
    /// Answers that have no slot yet.
    unanswered: Option<[u8; ANSWER]>,
    /// Payloads whose place was answered and that are not queued yet.
    placed: Vec<(u16, Remote, usize)>,
    events: Vec<Event>,
    waits: bool,
    broken: Option<LaneError>,
    stats: LaneStats,
}

/// Joins the two ends of an authenticated connection, as [`attach`](crate::attach), to a lane.
///
/// # Errors
/// As [`attach`](crate::attach).
pub fn attach_lane(
    stream: TcpStream,
    offer: &Offer,
    id: LaneId,
    (peer, label): (&str, &str),
    deadline: Instant,
) -> Result<FabricLane> {
    let name = match &offer.attributes.nic {
        Some(_) => format!("{label}({offer})"),
        None => format!("{label}({})", offer.provider),
    };
    let inbox = Slab::new(SLOTS * SLOT + ANSWERS * ANSWER)?;
    let staging = Slab::new(SLOTS * SLOT + ANSWERS * ANSWER)?;
    let of = |slab: &Slab| Extent { at: slab.address(), len: slab.len(), gpu: None };
    let (ours, own) = (of(&inbox), of(&staging));
    let greet = |placing: &mut FabricPlacing| {
        // SAFETY: the lane drops the object before the memory; so does this function when it fails.
        let (_, remote) = unsafe {
            placing.adopt(&own)?;
            placing.lend(&ours)?
        };
        for (counter, pieces) in [
            (FRAMES, SLOTS as u16),
            (ANSWERED, ANSWERS as u16),
            (PAYLOADS, LONG as u16),
            (FRAME_CREDIT, PIECES_MAX),
            (ANSWER_CREDIT, PIECES_MAX),
        ] {
            if placing.count(pieces) != Some(counter) {
                return Err(Error::new(ErrorKind::Exhausted, "connect", "no counters"));
            }
        }
        placing.drains = DRAIN;
        placing.is_lane = true;
        let mut greeting = [0; GREETING];
        greeting[0] = KIND;
        greeting[8..16].copy_from_slice(&remote.key.to_le_bytes());
        greeting[16..24].copy_from_slice(&remote.base.to_le_bytes());
        Ok(greeting)
    };
    let (placing, greeting) = attach_as(stream, offer, (peer, &name), deadline, greet)?;
    let max_payload = PAYLOAD_MAX.min(placing.limits().write);
    let caps = LaneCaps { max_payload, reliable: false, whole_max: SHORT, counts: false, direct: false, lists: false };
    Ok(FabricLane {
        id,
        name,
        caps,
        placing: Some(placing),
        inbox,
        staging,
        theirs: Remote { key: u64_at(&greeting, 8), base: u64_at(&greeting, 16) },
        frames: Ring::new(0, SLOTS, SLOT),
        answers: Ring::new(SLOTS * SLOT, ANSWERS, ANSWER),
        frame_slots: Slots::new(0, SLOTS, SLOT),
        answer_slots: Slots::new(SLOTS * SLOT, ANSWERS, ANSWER),
        sending: (0..LONG).map(|_| Sending::Free).collect(),
        receiving: None,
        unanswered: None,
        placed: Vec::new(),
        events: Vec::new(),
        waits: false,
        broken: None,
        stats: LaneStats::default(),
    })
}

impl FabricLane {
    /// Writes `len` bytes of a slot's staging to the same place of the peer's inbox.
    fn send(&mut self, at: usize, len: usize, imm: Imm, token: u64) -> bool {
        let from = Extent { at: self.staging.address() + at as u64, len, gpu: None };
        let Some(placing) = self.placing.as_mut() else { return false };
        // SAFETY: the staging of a slot is not written before its write has ended.
        unsafe { placing.write_to(&from, (self.theirs, at as u64), imm, token) }
    }

    /// Queues a frame with the payload, or its announcement. False: no room.
    fn frame(&mut self, head: &Head, payload: &Payload, long: Option<u16>) -> bool {
        let Some(slot) = self.frames.free() else { return false };
        let at = self.frames.at(slot);
        let mut before = [0; BEFORE];
        before[0] = u8::from(long.is_some());
        before[2..4].copy_from_slice(&long.unwrap_or(0).to_le_bytes());
        before[8..].copy_from_slice(&head.0);
        self.staging.write(at, &before);
        let mut len = BEFORE;
        if long.is_none() && payload.len > 0 {
            let usage = payload.grant.as_ref().map(|grant| grant.enter());
            if matches!(usage, Some(None)) {
                // Recalled: anything of that length.
                self.staging.write(at + BEFORE, &[0; SHORT][..payload.len.min(SHORT)]);
            } else {
                // SAFETY: readable now, as the caller of `post` or the sink guarantees, or while the loan is entered.
                unsafe { self.staging.fill(at + BEFORE, payload.ptr, payload.len) };
            }
            drop(usage);
            len += payload.len;
        }
        if !self.send(at, len, Imm { counter: FRAMES, piece: slot as u16 }, OF_FRAME | slot as u64) {
            return false;
        }
        self.frames.busy[slot] = true;
        self.frames.posted = self.frames.posted.wrapping_add(1);
        if let Some(placing) = self.placing.as_mut() {
            placing.lane_sent += 1;
        }
        self.stats.tx_bytes += (HEAD_LEN + payload.len) as u64;
        true
    }

    fn can_send(&self) -> bool {
        self.broken.is_none() && self.frames.free().is_some() && self.placing.as_ref().is_some_and(|p| !p.has_failed())
    }

    /// Takes frames from the sink. Whether there was any.
    fn take(&mut self, sink: &mut dyn Sink, budget: usize) -> bool {
        let mut left = budget;
        let mut moved = false;
        while left > 0 && self.can_send() {
            let Some(long) = self.sending.iter().position(|sending| matches!(sending, Sending::Free)) else { break };
            let Some(tx) = sink.next(self.id) else { break };
            moved = true;
            left = left.saturating_sub(HEAD_LEN + tx.payload.len);
            if tx.payload.len <= SHORT {
                if self.frame(&tx.head, &tx.payload, None) {
                    sink.sent(self.id, tx.token);
                } else {
                    self.fail("a write that was checked has no room");
                }
                continue;
            }
            let kept = tx.payload.grant.as_ref().map(|grant| grant.keep(self.id));
            let void = matches!(kept, Some(None));
            let lent = Lent { payload: tx.payload.clone(), token: tx.token, kept: kept.flatten(), void };
            if !self.frame(&tx.head, &tx.payload, Some(long as u16)) {
                self.fail("a write that was checked has no room");
            }
            self.sending[long] = Sending::Announced(lent);
        }
        moved
    }

    fn fail(&mut self, why: &str) {
        let error = LaneError::Down(format!("{}: {why}", self.name));
        self.broken.get_or_insert(error);
    }

    fn blame(&self, why: &str) -> LaneError {
        let peer = self.placing.as_ref().map_or("the peer", |placing| placing.peer());
        LaneError::Protocol(format!("{peer}: {why} ({})", self.name))
    }

    /// Moves the object beneath, and notes what has happened. Whether anything has.
    fn drive(&mut self, sink: &mut dyn Sink) -> std::result::Result<bool, LaneError> {
        let Some(placing) = self.placing.as_mut() else { return Ok(false) };
        let events = &mut self.events;
        let moved = match placing.poll(&mut |event| events.push(event)) {
            Ok(moved) => moved,
            Err(error) => {
                self.broken.get_or_insert(error);
                false
            }
        };
        let mut events = std::mem::take(&mut self.events);
        let mut result = Ok(());
        for event in events.drain(..) {
            if result.is_ok() {
                result = self.event(event, sink);
            }
        }
        self.events = events;
        result.map(|()| moved)
    }

    fn event(&mut self, event: Event, sink: &mut dyn Sink) -> std::result::Result<(), LaneError> {
        match event {
            Event::Arrived(Imm { counter: FRAMES, piece }) => {
                self.frame_slots.arrived[usize::from(piece)] = true;
                if let Some(placing) = self.placing.as_mut() {
                    placing.lane_arrived += 1;
                }
                Ok(())
            }
            Event::Arrived(Imm { counter: ANSWERED, piece }) => {
                self.answer_slots.arrived[usize::from(piece)] = true;
                while let Some(at) = self.answer_slots.front() {
                    let mut bytes = [0; ANSWER];
                    self.inbox.read(at, &mut bytes);
                    self.answer_slots.take();
                    self.answer(&bytes)?;
                }
                Ok(())
            }
            Event::Arrived(Imm { counter: PAYLOADS, piece }) => self.arrived(piece, sink),
            Event::Arrived(Imm { counter: FRAME_CREDIT, piece }) => {
                self.frames.credit(piece).map_err(|why| self.blame(&why))
            }
            Event::Arrived(Imm { counter: ANSWER_CREDIT, piece }) => {
                self.answers.credit(piece).map_err(|why| self.blame(&why))
            }
            Event::Arrived(imm) => Err(self.blame(&format!("{imm} is none of a lane's"))),
            Event::Ended { token, result } => {
                self.ended(token, result, sink);
                Ok(())
            }
        }
    }

    fn ended(&mut self, token: u64, result: std::result::Result<(), WriteError>, sink: &mut dyn Sink) {
        let at = (token & 0xffff_ffff) as usize;
        // What was lost is reported by the object's error.
        if result.is_err() {
            return;
        }
        match token & !0xffff_ffff {
            OF_FRAME => self.frames.busy[at] = false,
            OF_ANSWER => self.answers.busy[at] = false,
            OF_PAYLOAD => {
                if let Sending::Writing(lent) = std::mem::replace(&mut self.sending[at], Sending::Free) {
                    self.release(lent, sink);
                }
            }
            _ => {}
        }
    }

    fn release(&mut self, lent: Lent, sink: &mut dyn Sink) {
        if lent.kept.is_some_and(Kept::give_back) {
            sink.returned();
        }
        sink.sent(self.id, lent.token);
    }

    /// The peer has answered where our payload goes: transfer 0..2, length 8..16, key 16..24, base 24..32.
    fn answer(&mut self, bytes: &[u8; ANSWER]) -> std::result::Result<(), LaneError> {
        let transfer = u32_at(bytes, 0) as u16;
        let remote = Remote { key: u64_at(bytes, 16), base: u64_at(bytes, 24) };
        let len = u64_at(bytes, 8);
        let known = match self.sending.get(usize::from(transfer)) {
            Some(Sending::Announced(lent)) => len <= lent.payload.len as u64,
            _ => false,
        };
        if !known || self.placed.iter().any(|(placed, ..)| *placed == transfer) {
            return Err(self.blame(&format!("it gave {len} bytes for payload {transfer}")));
        }
        self.placed.push((transfer, remote, len as usize));
        Ok(())
    }

    /// Queues payloads whose place is known, answers and credits. Whether there was any.
    fn reply(&mut self, sink: &mut dyn Sink) -> bool {
        if self.broken.is_some() {
            return false;
        }
        let mut moved = false;
        while let Some((transfer, remote, len)) = self.placed.first().copied() {
            if !self.write_payload(transfer, remote, len, sink) {
                break;
            }
            self.placed.remove(0);
            moved = true;
        }
        if let (Some(bytes), Some(slot)) = (self.unanswered, self.answers.free()) {
            let at = self.answers.at(slot);
            self.staging.write(at, &bytes);
            if self.send(at, ANSWER, Imm { counter: ANSWERED, piece: slot as u16 }, OF_ANSWER | slot as u64) {
                self.answers.busy[slot] = true;
                self.answers.posted = self.answers.posted.wrapping_add(1);
                self.unanswered = None;
                moved = true;
            }
        }
        let dues = [(FRAME_CREDIT, self.frame_slots.due()), (ANSWER_CREDIT, self.answer_slots.due())];
        for (counter, due) in dues {
            let Some(step) = due else { continue };
            if self.send(0, 0, Imm { counter, piece: (step & 0xfff) as u16 }, OF_CREDIT) {
                let slots = if counter == FRAME_CREDIT { &mut self.frame_slots } else { &mut self.answer_slots };
                slots.returned = step;
                moved = true;
            }
        }
        moved
    }

    fn write_payload(&mut self, transfer: u16, remote: Remote, len: usize, sink: &mut dyn Sink) -> bool {
        let at = usize::from(transfer);
        let Some(Sending::Announced(lent)) = self.sending.get(at) else { return true };
        // A discarded payload, or one that was recalled before it was announced, goes as nothing but its immediate.
        let len = if lent.void { 0 } else { len };
        let from = Extent::host(lent.payload.ptr, len);
        let imm = Imm { counter: PAYLOADS, piece: transfer };
        let to = if len == 0 { (self.theirs, 0) } else { (remote, 0) };
        let Some(placing) = self.placing.as_mut() else { return false };
        // SAFETY: the payload is valid until `sent`, and its loan is kept until its write has ended.
        if !unsafe { placing.write_to(&from, to, imm, OF_PAYLOAD | u64::from(transfer)) } {
            return false;
        }
        let sending = std::mem::replace(&mut self.sending[at], Sending::Free);
        if let Sending::Announced(lent) = sending {
            self.sending[at] = Sending::Writing(lent);
        }
        let _ = sink;
        true
    }

    /// The long payload has arrived.
    fn arrived(&mut self, transfer: u16, sink: &mut dyn Sink) -> std::result::Result<(), LaneError> {
        let Some(receiving) = self.receiving.take_if(|receiving| receiving.transfer == transfer) else {
            return Err(self.blame(&format!("payload {transfer} arrived, which has no place")));
        };
        if let (Some(registered), Some(placing)) = (receiving.registered, self.placing.as_mut()) {
            placing.take_back(registered);
        }
        self.stats.rx_bytes += (HEAD_LEN + receiving.len) as u64;
        self.frame_slots.take();
        let was_recalled = receiving.kept.is_some_and(Kept::give_back);
        if was_recalled {
            sink.returned();
        } else if let Some(token) = receiving.token {
            sink.placed(self.id, token);
        }
        Ok(())
    }

    /// Delivers what is next, about `budget` bytes. Whether there was any.
    fn deliver(&mut self, sink: &mut dyn Sink, budget: usize) -> std::result::Result<bool, LaneError> {
        let mut left = budget;
        let mut moved = false;
        self.waits = false;
        while left > 0
            && self.receiving.is_none()
            && let Some(at) = self.frame_slots.front()
        {
            let mut before = [0; BEFORE];
            self.inbox.read(at, &mut before);
            let mut head = Head::new(0, 0);
            head.0.copy_from_slice(&before[8..]);
            let len = head.payload_len() as usize;
            let is_long = before[0] != 0;
            let fits = if is_long { len > SHORT && len <= self.caps.max_payload } else { len <= SHORT };
            let transfer = u32_at(&before, 0) >> 16;
            if !fits || before[0] > 1 || (is_long && transfer as usize >= LONG) {
                return Err(self.blame(&format!("a frame of {len} bytes as payload {transfer}")));
            }
            if is_long && self.unanswered.is_some() {
                break;
            }
            let (place, token) = match sink.place(self.id, &head) {
                Place::Wait => {
                    self.waits = true;
                    return Ok(moved);
                }
                Place::Refuse(why) => return Err(LaneError::Protocol(why)),
                Place::Discard => (None, None),
                Place::Into { dst, len: room, grant, token } => (Some((dst, room.min(len), grant)), Some(token)),
                Place::Rows { .. } => return Err(self.blame("the sink has rows for a lane that takes none")),
            };
            moved = true;
            left = left.saturating_sub(HEAD_LEN + len);
            if is_long {
                self.begin(transfer as u16, len, place, token)?;
                break;
            }
            let done = place.is_none_or(|(dst, room, grant)| self.copy(at + BEFORE, dst, room, grant.as_ref()));
            self.stats.rx_bytes += (HEAD_LEN + len) as u64;
            self.frame_slots.take();
            if let Some(token) = token.filter(|_| done) {
                sink.placed(self.id, token);
            }
        }
        Ok(moved)
    }

    /// Copies a short payload to its place; false: the place was recalled.
    fn copy(&self, at: usize, dst: *mut u8, len: usize, grant: Option<&Arc<Loan>>) -> bool {
        let usage = grant.map(|grant| grant.enter());
        if matches!(usage, Some(None)) {
            return false;
        }
        if len > 0 {
            // SAFETY: the sink's place is writable, while its loan is entered.
            let to = unsafe { std::slice::from_raw_parts_mut(dst, len) };
            self.inbox.read(at, to);
        }
        true
    }

    /// Gives a long payload its place.
    fn begin(
        &mut self,
        transfer: u16,
        len: usize,
        place: Option<(*mut u8, usize, Option<Arc<Loan>>)>,
        token: Option<u64>,
    ) -> std::result::Result<(), LaneError> {
        let mut receiving = Receiving { transfer, registered: None, kept: None, token, len };
        let (mut remote, mut room) = (Remote { key: 0, base: 0 }, 0);
        if let Some((dst, len, grant)) = place {
            let kept = grant.as_ref().map(|grant| grant.keep(self.id));
            let is_recalled = matches!(kept, Some(None));
            receiving.kept = kept.flatten();
            if is_recalled {
                receiving.token = None;
            } else if len > 0
                && let Some(placing) = self.placing.as_mut()
            {
                // SAFETY: writable until `placed`, and its loan is kept; the lane ends by closing the endpoint.
                let lent = unsafe { placing.lend(&Extent::host(dst, len)) };
                let (registered, found) =
                    lent.map_err(|error| LaneError::Down(format!("{}: {}", self.name, error.detail)))?;
                (receiving.registered, remote, room) = (Some(registered), found, len);
            }
        }
        let mut answer = [0; ANSWER];
        answer[..2].copy_from_slice(&transfer.to_le_bytes());
        answer[8..16].copy_from_slice(&(room as u64).to_le_bytes());
        answer[16..24].copy_from_slice(&remote.key.to_le_bytes());
        answer[24..].copy_from_slice(&remote.base.to_le_bytes());
        self.unanswered = Some(answer);
        self.receiving = Some(receiving);
        Ok(())
    }

    /// Ends the lane: the endpoint first, then what it referred to.
    fn end(&mut self, error: LaneError) -> LaneError {
        self.placing = None;
        self.receiving = None;
        self.sending.iter_mut().for_each(|sending| *sending = Sending::Free);
        self.broken.insert(error).clone()
    }
}

impl Lane for FabricLane {
    fn id(&self) -> LaneId {
        self.id
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn caps(&self) -> &LaneCaps {
        &self.caps
    }

    fn post(&mut self, tx: &Tx) -> std::result::Result<Post, LaneError> {
        if let Some(error) = self.broken.as_ref().filter(|_| self.placing.is_none()) {
            return Err(error.clone());
        }
        if tx.payload.len > SHORT || !self.can_send() || !self.frame(&tx.head, &tx.payload, None) {
            return Ok(Post::Full);
        }
        if let Some(placing) = self.placing.as_mut()
            && let Err(error) = placing.post()
        {
            self.broken.get_or_insert(error);
        }
        Ok(Post::Taken)
    }

    fn poll(&mut self, sink: &mut dyn Sink, budget: usize, probe: bool) -> std::result::Result<bool, LaneError> {
        if self.placing.is_none()
            && let Some(error) = &self.broken
        {
            return Err(error.clone());
        }
        let mut moved = self.drive(sink).map_err(|error| self.end(error))?;
        let before = self.receiving.is_some();
        moved |= self.deliver(sink, budget).map_err(|error| self.end(error))?;
        moved |= self.reply(sink);
        if sink.wants() {
            moved |= self.take(sink, budget);
        }
        if moved
            && self.broken.is_none()
            && let Some(placing) = self.placing.as_mut()
            && let Err(error) = placing.post()
        {
            self.broken.get_or_insert(error);
        }
        // What has arrived is delivered before the end, a payload that will not arrive is not awaited.
        if let Some(error) = self.broken.clone()
            && (before || self.receiving.is_some() || self.frame_slots.front().is_none())
        {
            return Err(self.end(error));
        }
        // A caller that does not probe sleeps on the descriptor next, if there is one, and need not have armed it.
        Ok(moved || (!probe && self.fd().is_some() && !self.arm()))
    }

    fn fd(&self) -> Option<RawFd> {
        self.placing.as_ref().and_then(|placing| placing.fd())
    }

    fn arm(&mut self) -> bool {
        if self.broken.is_some() {
            return self.waits;
        }
        let can_take = self.frame_slots.front().is_some() && !self.waits && self.receiving.is_none();
        !can_take && self.placing.as_mut().is_some_and(|placing| placing.arm())
    }

    fn stats(&self) -> LaneStats {
        LaneStats { acked_bytes: self.stats.tx_bytes, ..self.stats }
    }
}

impl Drop for FabricLane {
    fn drop(&mut self) {
        let began = Instant::now();
        let mut moved = began;
        // What is queued goes to the provider, which is done with it once it is in flight.
        while self.broken.is_none()
            && let Some(placing) = self.placing.as_mut()
            && !placing.has_handed_over()
            && began.elapsed() < FLUSH_MAX
            && moved.elapsed() < FLUSH_QUIET
        {
            match placing.poll(&mut |_| {}) {
                Ok(true) => moved = Instant::now(),
                Ok(false) => std::thread::yield_now(),
                Err(_) => break,
            }
        }
        self.placing = None;
    }
}
