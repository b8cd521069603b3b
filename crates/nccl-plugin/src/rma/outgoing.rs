//! The sending half of a link to a peer: operations become batches, which are written into slots of the peer's inbox.
//!
//! ```text
//! pending ─ pack: bytes are copied into a slot of the outbox ─ post: one write ─ answered by the peer ─ settled
//! ```
//!
//! Batches are numbered, and the peer applies them in that order, whichever rail brings them first. So a signal is
//! visible after everything that was enqueued before it. A batch is answered once it is applied; its slot is used again
//! once it is also no longer read.

use std::collections::VecDeque;
use std::sync::Arc;

use crossrail::placing::{Counter, Event, Extent, Imm, Key, LaneError, Loan, Placing, Post, WriteError};
use crossrail_types::{Error, ErrorKind, Result};
use slab::Slab;

use super::batch::{self, ALIGN, ANSWER, Answer, Kind, LINE, PAYLOAD, RECORDS, RECORDS_LEN, Record, Refusal, SLOT};
use super::gpu::{Copier, Work};
use super::memory::{Area, copy_words};
use super::shared::{Op, Shared, Source, Ticket};

/// With so little pending, a batch is not begun while one is being packed or many are in flight: it will be longer.
const SMALL_OPS: usize = 64;
const SMALL_BYTES: u64 = 64 << 10;
/// Long operations are cut at multiples of this offset of the destination.
const CUT: u64 = 64;
/// Number of recent pieces of the payload that are compared with the next source.
const COMPARED: usize = 16;

/// A peer's memory for batches, and their counter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Inbox {
    pub(crate) key: Key,
    pub(crate) data: Counter,
}

/// Memory for answers, and their counters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answers {
    pub(crate) key: Key,
    pub(crate) accepted: Counter,
    pub(crate) refused: Counter,
}

/// See the module. Driven by one thread.
pub(crate) struct Outgoing {
    shared: Arc<Shared>,
    rank: u32,
    /// `None`: the peer is lost.
    wire: Option<Box<dyn Placing>>,
    outbox: Arc<Area>,
    answers: Arc<Area>,
    mine: Answers,
    theirs: Inbox,
    slots: usize,
    pending: VecDeque<Pending>,
    pending_bytes: u64,
    live: Slab<Live>,
    /// Batches whose slots are in use, in order.
    batches: VecDeque<Batch>,
    /// Number of the next batch.
    next: u64,
    work: Work,
}

/// An operation of which something is to be packed.
struct Pending {
    op: Op,
    packed: u64,
    /// Its entry among the live ones, once something of it was packed.
    live: Option<usize>,
}

/// An operation of which something was packed.
struct Live {
    kind: Kind,
    tag: u64,
    ticket: Option<Ticket>,
    failed: Option<Error>,
}

struct Batch {
    /// By record: the operation, and whether it is the last of it.
    records: Vec<(usize, bool)>,
    payload: usize,
    /// Packed once this point is reached.
    packed: u64,
    posted: bool,
    /// Its write has ended.
    ended: bool,
    answer: Option<Option<Answer>>,
    settled: bool,
}

/// A batch that is being packed.
#[derive(Default)]
struct Packing {
    records: Vec<(usize, bool)>,
    payload: usize,
    staged: Vec<Staged>,
}

/// A piece of memory that is in the payload.
struct Staged {
    registration: u32,
    offset: u64,
    len: u64,
    at: usize,
    /// Its copy, if it is a GPU's.
    copy: Option<usize>,
}

/// Outcome of packing an operation.
enum Packed {
    All,
    /// The batch has no room.
    Part,
}

/// An [`Outgoing`] before the peer's half is known: its memory is exposed, its counters are open.
pub(crate) struct OutgoingOffer {
    wire: Box<dyn Placing>,
    answers: Arc<Area>,
    pub(crate) mine: Answers,
}

impl OutgoingOffer {
    /// # Errors
    /// Why the memory cannot be exposed.
    #[allow(unsafe_code)]
    pub(crate) fn new(mut wire: Box<dyn Placing>, slots: usize) -> Result<OutgoingOffer> {
        let wrong = |why: String| Error::new(ErrorKind::Unsupported, "connect", why);
        let answers = Arc::new(Area::new(slots * ANSWER)?);
        let extent = Extent::host(answers.at(0, answers.len()), answers.len());
        // SAFETY: the area is kept with the rails, and dropped after them.
        let key = unsafe { wire.expose(&extent, &Arc::new(Loan::default())) }.map_err(wrong)?;
        let mut counter = || wire.count(slots as u16).ok_or_else(|| wrong("no counter is left".to_owned()));
        let mine = Answers { key, accepted: counter()?, refused: counter()? };
        Ok(OutgoingOffer { wire, answers, mine })
    }

    /// Completes it with the peer's half. `outbox`: `slots` slots.
    pub(crate) fn accept(self, shared: &Arc<Shared>, rank: u32, theirs: Inbox, outbox: Arc<Area>) -> Outgoing {
        let OutgoingOffer { wire, answers, mine } = self;
        let slots = answers.len() / ANSWER;
        Outgoing {
            shared: Arc::clone(shared),
            rank,
            wire: Some(wire),
            outbox,
            answers,
            mine,
            theirs,
            slots,
            pending: VecDeque::new(),
            pending_bytes: 0,
            live: Slab::new(),
            batches: VecDeque::new(),
            next: 0,
            work: Work::default(),
        }
    }
}

impl Outgoing {
    /// Enqueues an operation.
    pub(crate) fn push(&mut self, op: Op) {
        if self.wire.is_none() {
            let error = self.shared.lost(self.rank).cloned();
            if op.ticket.is_some() {
                self.shared.fail();
            }
            finish(&self.shared, op.ticket, Err(error.unwrap_or_else(closed)));
            return;
        }
        self.pending_bytes += op.len;
        self.pending.push_back(Pending { op, packed: 0, live: None });
    }

    pub(crate) fn wire(&self) -> Option<&dyn Placing> {
        self.wire.as_deref()
    }

    pub(crate) fn arm(&mut self) -> bool {
        self.wire.as_mut().is_none_or(|wire| wire.arm())
    }

    /// Something can be posted now, without an event.
    pub(crate) fn is_busy(&self) -> bool {
        self.wire.is_some() && self.batches.iter().any(|batch| !batch.posted)
    }

    /// Moves what can move.
    ///
    /// # Errors
    /// Why the peer is lost.
    pub(crate) fn advance(&mut self, copier: &mut Copier) -> Result<bool> {
        if self.wire.is_none() {
            return Ok(false);
        }
        if let Some(error) = self.shared.lost(self.rank) {
            return Err(error.clone());
        }
        let mut moved = self.pack(copier)?;
        moved |= self.post(copier)?;
        moved |= self.poll()?;
        self.settle();
        Ok(moved)
    }

    /// The peer is lost: all requests fail. The memory stays, as copies may be in flight.
    pub(crate) fn fail(&mut self, error: &Error) {
        self.wire = None;
        if self.pending.iter().any(|pending| pending.op.ticket.is_some())
            || self.live.iter().any(|(_, live)| live.ticket.is_some())
        {
            self.shared.fail();
        }
        for pending in self.pending.drain(..) {
            finish(&self.shared, pending.op.ticket, Err(error.clone()));
        }
        for live in self.live.drain() {
            finish(&self.shared, live.ticket, Err(error.clone()));
        }
        (self.pending_bytes, self.batches) = (0, VecDeque::new());
    }

    // ---- packing

    fn pack(&mut self, copier: &mut Copier) -> Result<bool> {
        let mut moved = false;
        while !self.pending.is_empty() && self.batches.len() < self.slots && !self.waits_for_more() {
            self.pack_batch(copier)?;
            moved = true;
        }
        Ok(moved)
    }

    fn waits_for_more(&self) -> bool {
        let is_small = self.pending.len() < SMALL_OPS && self.pending_bytes < SMALL_BYTES;
        let many = (self.slots / 4).max(1);
        is_small && (self.batches.len() > many || self.batches.back().is_some_and(|batch| !batch.posted))
    }

    fn pack_batch(&mut self, copier: &mut Copier) -> Result<()> {
        let base = (self.next % self.slots as u64) as usize * SLOT;
        let mut packing = Packing::default();
        while let Some(mut pending) = self.pending.pop_front() {
            match self.pack_op(&mut pending, &mut packing, base) {
                Packed::All => {}
                Packed::Part => {
                    self.pending.push_front(pending);
                    break;
                }
            }
        }
        if packing.records.is_empty() {
            return Ok(());
        }
        let head =
            batch::Head { records: packing.records.len() as u32, payload: packing.payload as u32, number: self.next };
        self.outbox.write(base, &head.encode());
        let packed = copier.submit(&mut self.work)?;
        self.next += 1;
        let Packing { records, payload, .. } = packing;
        self.batches.push_back(Batch {
            records,
            payload,
            packed,
            posted: false,
            ended: false,
            answer: None,
            settled: false,
        });
        Ok(())
    }

    fn pack_op(&mut self, pending: &mut Pending, packing: &mut Packing, base: usize) -> Packed {
        loop {
            if pending.op.ticket.as_ref().is_some_and(Ticket::is_over) && !self.cut(pending, None) {
                return Packed::All;
            }
            if packing.records.len() == RECORDS {
                return Packed::Part;
            }
            let op = &pending.op;
            let left = op.len - pending.packed;
            let (at, len) = match op.kind {
                Kind::Get => (0, left),
                _ => match self.stage(pending, packing, base) {
                    Ok(Some(piece)) => piece,
                    Ok(None) => return Packed::Part,
                    Err(why) => {
                        let text = format!("the source: {}", Refusal::text(why as u8));
                        let error = Error::new(ErrorKind::Region, "iput", text);
                        if self.cut(pending, Some(error)) {
                            continue;
                        }
                        return Packed::All;
                    }
                },
            };
            let op = &mut pending.op;
            let is_last = len == left;
            let record = Record {
                kind: op.kind,
                registration: op.registration,
                offset: op.offset + pending.packed,
                len,
                at: at as u32,
                signal: op.signal.filter(|_| is_last),
                tag: op.tag,
            };
            self.outbox.write(base + LINE * (packing.records.len() + 1), &record.encode());
            let entry = *pending.live.get_or_insert_with(|| {
                self.live.insert(Live { kind: op.kind, tag: op.tag, ticket: op.ticket.take(), failed: None })
            });
            packing.records.push((entry, is_last));
            pending.packed += len;
            self.pending_bytes -= len.min(self.pending_bytes);
            if is_last {
                return Packed::All;
            }
        }
    }

    /// Ends an operation early. True: part of it was sent, and a last record without bytes must follow.
    fn cut(&mut self, pending: &mut Pending, error: Option<Error>) -> bool {
        self.pending_bytes -= (pending.op.len - pending.packed).min(self.pending_bytes);
        let error = error.unwrap_or_else(closed);
        let Some(live) = pending.live.and_then(|entry| self.live.get_mut(entry)) else {
            finish(&self.shared, pending.op.ticket.take(), Err(error));
            return false;
        };
        live.failed = Some(error);
        (pending.op.len, pending.op.signal, pending.op.source) = (pending.packed, None, Source::None);
        true
    }

    /// Has the next bytes of an operation copied into the payload: where they are, and how many; `None`: no room.
    fn stage(
        &mut self,
        pending: &Pending,
        packing: &mut Packing,
        base: usize,
    ) -> std::result::Result<Option<(usize, u64)>, Refusal> {
        let op = &pending.op;
        let (left, to) = (op.len - pending.packed, op.offset + pending.packed);
        if left == 0 {
            return Ok(Some((0, 0)));
        }
        let phase = (to % ALIGN as u64) as usize;
        let begin = packing.payload + (phase + ALIGN - packing.payload % ALIGN) % ALIGN;
        let room = PAYLOAD.saturating_sub(begin) as u64;
        let payload = base + RECORDS_LEN;
        match &op.source {
            Source::None => Ok(Some((0, left))),
            Source::Inline(bytes) => {
                if room < left {
                    return Ok(None);
                }
                let from = pending.packed as usize;
                self.outbox.write(payload + begin, &bytes[from..from + left as usize]);
                packing.payload = begin + left as usize;
                Ok(Some((begin, left)))
            }
            Source::Memory(region, offset) => {
                let offset = offset + pending.packed;
                let from = region.range(offset, left)?;
                if let Some(at) = packing.find(region.number, offset, left, phase) {
                    return Ok(Some((at, left)));
                }
                if room < left && (packing.payload > 0 && left <= PAYLOAD as u64) {
                    return Ok(None);
                }
                let len = if room < left { room - (to + room) % CUT } else { left };
                if len == 0 || len > room {
                    return Ok(None);
                }
                let copied = len as usize;
                let at = self.outbox.at(payload + begin, copied);
                let mut copy = None;
                if region.gpu.is_none() {
                    copy_host(at, from, copied);
                } else if let Some(before) = packing.extends(region.number, offset, begin) {
                    self.work.copies[before].2 += copied;
                    copy = Some(before);
                } else {
                    copy = Some(self.work.copies.len());
                    self.work.copies.push((at as u64, from, copied));
                }
                packing.staged.push(Staged { registration: region.number, offset, len, at: begin, copy });
                packing.payload = begin + copied;
                Ok(Some((begin, len)))
            }
        }
    }

    // ---- rails

    fn post(&mut self, copier: &Copier) -> Result<bool> {
        let Some(wire) = self.wire.as_mut() else { return Ok(false) };
        let first = self.next - self.batches.len() as u64;
        let mut moved = false;
        for (number, batch) in (first..).zip(&mut self.batches).filter(|(_, batch)| !batch.posted) {
            if !copier.has_reached(batch.packed) {
                break;
            }
            let slot = (number % self.slots as u64) as usize;
            let (at, records) = (slot * SLOT, LINE * (batch.records.len() + 1));
            let from = [
                Extent::host(self.outbox.at(at, records), records),
                Extent::host(self.outbox.at(at + RECORDS_LEN, batch.payload), batch.payload),
            ];
            let from = if batch.payload == 0 { &from[..1] } else { &from[..] };
            let imm = Imm { counter: self.theirs.data, piece: slot as u16 };
            match write(wire.as_mut(), from, (&self.theirs.key, at as u64), imm, number) {
                Ok(Post::Full) => break,
                Ok(_) => (batch.posted, moved) = (true, true),
                Err(error) => return Err(lost(wire.as_ref(), &error)),
            }
        }
        Ok(moved)
    }

    fn poll(&mut self) -> Result<bool> {
        let Some(wire) = self.wire.as_mut() else { return Ok(false) };
        let first = self.next - self.batches.len() as u64;
        let (batches, mine, slots) = (&mut self.batches, &self.mine, self.slots as u64);
        let mut wrong = None;
        let polled = wire.poll(&mut |event| match event {
            Event::Ended { token, result: Ok(()) } => {
                let batch = token.checked_sub(first).and_then(|at| batches.get_mut(at as usize));
                if let Some(batch) = batch {
                    batch.ended = true;
                }
            }
            Event::Ended { result: Err(WriteError::Revoked), .. } => {
                wrong = Some("it has ended the access to its inbox".to_owned());
            }
            // `poll` returns the end of the rails as an error.
            Event::Ended { result: Err(WriteError::Lost), .. } => {}
            Event::Arrived(Imm { counter, piece }) => {
                let number = first + (u64::from(piece) + slots - first % slots) % slots;
                let batch = batches.get_mut((number - first) as usize);
                match batch.filter(|batch| batch.posted && batch.answer.is_none()) {
                    Some(batch) if counter == mine.accepted => batch.answer = Some(None),
                    Some(batch) => {
                        let bytes = self.answers.read(usize::from(piece) * ANSWER);
                        batch.answer = Some(Some(Answer::decode(&bytes)));
                    }
                    None => wrong = Some(format!("it answers batch {number}, which is not in flight")),
                }
            }
        });
        let moved = polled.map_err(|error| lost(wire.as_ref(), &error))?;
        match wrong {
            Some(why) => Err(Error::new(ErrorKind::Protocol, "iput", why).with_peer(wire.peer())),
            None => Ok(moved),
        }
    }

    /// Ends operations whose last records were answered, in order, and frees slots.
    fn settle(&mut self) {
        for at in 0..self.batches.len() {
            let batch = &mut self.batches[at];
            if batch.settled {
                continue;
            }
            let Some(answer) = batch.answer else { break };
            batch.settled = true;
            for (index, (entry, is_last)) in std::mem::take(&mut batch.records).into_iter().enumerate() {
                let refused = answer.filter(|answer| answer.refuses(index)).map(|answer| answer.why);
                self.settle_record(entry, is_last, refused);
            }
        }
        while self.batches.front().is_some_and(|batch| batch.settled && batch.ended) {
            self.batches.pop_front();
        }
    }

    fn settle_record(&mut self, entry: usize, is_last: bool, refused: Option<u8>) {
        let Some(live) = self.live.get_mut(entry) else { return };
        if let Some(why) = refused
            && live.failed.is_none()
        {
            let operation = if live.kind == Kind::Get { "iget" } else { "iput" };
            let detail = format!("rank {} refused it: {}", self.rank, Refusal::text(why));
            live.failed = Some(Error::new(ErrorKind::Region, operation, detail));
        }
        if !is_last {
            return;
        }
        let Live { kind, tag, ticket, failed } = self.live.remove(entry);
        match (kind, failed) {
            (Kind::Get, None) => {}
            (Kind::Get, Some(error)) => self.shared.fail_get(tag, error),
            (_, failed) => finish(&self.shared, ticket, failed.map_or(Ok(()), Err)),
        }
    }
}

impl Packing {
    /// Offset in the payload of a range that is already there, with its first byte at that phase.
    fn find(&self, registration: u32, offset: u64, len: u64, phase: usize) -> Option<usize> {
        let staged = self.staged.iter().rev().take(COMPARED).find(|staged| {
            let from = offset.wrapping_sub(staged.offset);
            staged.registration == registration
                && from < staged.len
                && len <= staged.len - from
                && (staged.at + from as usize) % ALIGN == phase
        })?;
        Some(staged.at + (offset - staged.offset) as usize)
    }

    /// The copy that ends where this range begins, in memory and in the payload.
    fn extends(&self, registration: u32, offset: u64, at: usize) -> Option<usize> {
        let last = self.staged.last().filter(|last| {
            last.registration == registration && last.offset + last.len == offset && last.at + last.len as usize == at
        })?;
        last.copy
    }
}

fn finish(shared: &Shared, ticket: Option<Ticket>, outcome: Result<()>) {
    if let Some(ticket) = ticket {
        ticket.finish(&shared.requests, outcome);
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "iput", "its context has ended")
}

/// The error of a wire that has ended.
pub(crate) fn lost(wire: &dyn Placing, error: &LaneError) -> Error {
    let kind = if matches!(error, LaneError::Protocol(_)) { ErrorKind::Protocol } else { ErrorKind::PeerDead };
    Error::new(kind, "RMA", error.to_string()).with_peer(wire.peer())
}

/// [`Placing::write`], of areas.
#[allow(unsafe_code)]
pub(crate) fn write(
    wire: &mut dyn Placing,
    from: &[Extent],
    (to, at): (&Key, u64),
    imm: Imm,
    token: u64,
) -> std::result::Result<Post, LaneError> {
    // SAFETY: areas outlive the rails, and a slot is not written before its write has ended.
    unsafe { wire.write(from, to, at, imm, token) }
}

#[allow(unsafe_code)]
fn copy_host(to: *mut u8, from: u64, len: usize) {
    // SAFETY: the area was checked, and the region is registered: it is retired only after this thread's answer.
    unsafe { copy_words(to, from as usize as *const u8, len) };
}
