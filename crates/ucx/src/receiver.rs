//! The receiving half of a lane.
#![allow(unsafe_code)]

use crossrail_transport::{Kept, LaneError, Loan, Place, Sink};
use crossrail_types::{HEAD_LEN, LaneId};

use crate::link::{Link, Request};
use crate::memory::Memory;
use crate::wire::{INLINE_MAX, PIECE_MAX, PIECES, STAGED_PIECE_MAX};

/// Largest payload of a frame. Nothing is allocated for one; this bounds what a peer may announce.
pub(crate) const PAYLOAD_MAX: usize = 1 << 30;

/// How pieces come to their places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReceiveMode {
    /// UCX moves them there, while the payload's memory is kept.
    Fetched,
    /// UCX copies them there within one call.
    Copied,
    /// UCX moves them to slots, from where they are copied.
    Staged,
}

/// A piece that is being fetched, or was.
struct Fetch {
    request: Option<Request>,
    len: usize,
    to: Destination,
}

/// Where a piece is fetched to.
enum Destination {
    /// Its slot.
    Slot,
    /// Its place, under the loan of that, if it has one.
    Place(Option<Kept>),
}

/// A payload whose pieces are arriving.
struct Body {
    place: Place,
    /// Bytes that have arrived, and that are being fetched or have been.
    done: usize,
    begun: usize,
    len: usize,
}

impl Body {
    /// That the next piece has as many bytes as the sender must give it, after `at` of the payload.
    fn expect(&self, len: usize, at: usize, most: usize) -> Result<(), LaneError> {
        let left = self.len - at;
        if len == left.min(most) {
            return Ok(());
        }
        Err(LaneError::Protocol(format!("a piece of {len} bytes came where {left} bytes of a payload are left")))
    }

    /// Where the next piece goes that is fetched, of `len` bytes, if that is where the payload goes; kept for that
    /// lane.
    fn next_place(&self, len: usize, lane: LaneId) -> Option<(*mut u8, Option<Kept>)> {
        let Place::Into { dst, len: room, grant, .. } = &self.place else { return None };
        if self.begun + len > *room {
            return None;
        }
        let kept = match grant {
            Some(loan) => Some(loan.keep(lane)?),
            None => None,
        };
        Some((dst.wrapping_add(self.begun), kept))
    }
}

/// See the module. Dropped after the link.
pub(crate) struct Receiver {
    lane: LaneId,
    mode: ReceiveMode,
    slots: Memory,
    /// By number modulo [`PIECES`].
    fetches: Vec<Option<Fetch>>,
    /// Number of the next piece to consume, and of the next one to fetch.
    next: u32,
    begun: u32,
    body: Option<Body>,
    /// The sink has no place for the next frame.
    pub(crate) waits: bool,
    /// Bytes of heads and payloads.
    pub(crate) bytes: u64,
}

impl Receiver {
    pub(crate) fn new(lane: LaneId, mode: ReceiveMode) -> Receiver {
        Receiver {
            lane,
            mode,
            slots: Memory::new(PIECES as usize * PIECE_MAX),
            fetches: (0..PIECES).map(|_| None).collect(),
            next: 0,
            begun: 0,
            body: None,
            waits: false,
            bytes: 0,
        }
    }

    /// Pieces consumed.
    pub(crate) fn pieces_taken(&self) -> u32 {
        self.next
    }

    /// Whether something has arrived, or has failed, that the next poll delivers or reports.
    pub(crate) fn has_work(&self, link: &Link) -> bool {
        if self.waits {
            return false;
        }
        match (&self.body, &self.fetches[(self.next % PIECES) as usize]) {
            (None, _) => link.inbox().has_frame(),
            (Some(_), _) if self.mode == ReceiveMode::Copied => link.inbox().has_offer(),
            (Some(_), Some(fetch)) => !link.is_under_way(&fetch.request),
            (Some(_), None) => false,
        }
    }

    /// Begins to fetch the pieces that the peer offers, as far as there are slots. Those that go to their places at
    /// once wait until their payload has one.
    pub(crate) fn fetch(&mut self, link: &Link) -> Result<(), LaneError> {
        while self.mode != ReceiveMode::Copied && self.begun.wrapping_sub(self.next) < PIECES {
            let is_begun = self.body.as_ref().is_none_or(|body| body.begun == body.len);
            if self.mode == ReceiveMode::Fetched && is_begun {
                break;
            }
            let Some((number, offer)) = link.inbox().next_offer() else { break };
            let at = (number % PIECES) as usize;
            let mut to = (self.slots.at(at * PIECE_MAX, offer.len), Destination::Slot);
            if let (ReceiveMode::Fetched, Some(body)) = (self.mode, &mut self.body) {
                if let Err(error) = body.expect(offer.len, body.begun, PIECE_MAX) {
                    link.release(offer);
                    return Err(error);
                }
                if let Some((place, kept)) = body.next_place(offer.len, self.lane) {
                    to = (place, Destination::Place(kept));
                }
                body.begun += offer.len;
            }
            // SAFETY: the slot is free, because fewer than PIECES numbers are begun and not consumed, and outlives the
            // link; a place has room for the piece, and is kept until the request has ended, or may be written until
            // `placed`.
            let request = unsafe { link.fetch(offer, to.0)? };
            self.fetches[at] = Some(Fetch { request, len: offer.len, to: to.1 });
            self.begun = number.wrapping_add(1);
        }
        Ok(())
    }

    fn is_fetched(&mut self, link: &Link) -> Result<bool, LaneError> {
        match &mut self.fetches[(self.next % PIECES) as usize] {
            Some(fetch) => link.has_ended(&mut fetch.request),
            None => Ok(false),
        }
    }

    /// Delivers what has arrived, about `budget` bytes. Whether anything moved.
    pub(crate) fn poll(
        &mut self,
        link: &Link,
        lane: LaneId,
        sink: &mut dyn Sink,
        budget: usize,
    ) -> Result<bool, LaneError> {
        let before = self.bytes;
        let until = self.bytes.saturating_add(budget as u64);
        loop {
            if self.body.is_some() {
                if !self.consume(link, sink, until)? {
                    break;
                }
                if let Some(Body { place: Place::Into { grant, token, .. }, .. }) = self.body.take()
                    && !grant.is_some_and(|grant| grant.is_recalled())
                {
                    sink.placed(lane, token);
                }
            }
            if self.bytes >= until || !link.inbox().has_frame() {
                break;
            }
            self.head(link, lane, sink)?;
            if self.waits {
                break;
            }
        }
        Ok(self.bytes > before)
    }

    /// Asks the sink about the next frame, and places its payload if that came with it.
    fn head(&mut self, link: &Link, lane: LaneId, sink: &mut dyn Sink) -> Result<(), LaneError> {
        let mut outcome = Ok(None);
        link.inbox().next_frame(|head, inline| {
            let len = head.payload_len() as usize;
            if len > PAYLOAD_MAX {
                outcome =
                    Err(LaneError::Protocol(format!("a payload of {len} bytes exceeds the maximum of {PAYLOAD_MAX}")));
                return false;
            }
            let place = sink.place(lane, &head);
            self.waits = matches!(place, Place::Wait);
            if self.waits {
                return false;
            }
            if let Place::Refuse(why) = place {
                outcome = Err(LaneError::Protocol(why));
                return true;
            }
            self.bytes += HEAD_LEN as u64;
            if len <= INLINE_MAX {
                copy_to_place(&place, 0, inline.as_ptr(), len);
                self.bytes += len as u64;
                outcome = Ok(Some(Body { place, done: len, begun: len, len }));
            } else {
                outcome = Ok(Some(Body { place, done: 0, begun: 0, len }));
            }
            true
        });
        self.body = outcome?;
        self.fetch(link)
    }

    /// Consumes pieces of the payload being received; whether it is complete.
    fn consume(&mut self, link: &Link, sink: &mut dyn Sink, until: u64) -> Result<bool, LaneError> {
        loop {
            let Some(body) = &self.body else { return Ok(false) };
            if body.done == body.len {
                return Ok(true);
            }
            if self.bytes >= until {
                return Ok(false);
            }
            let consumed =
                if self.mode == ReceiveMode::Copied { self.copy_piece(link)? } else { self.take_piece(link, sink)? };
            let (Some(len), Some(body)) = (consumed, &mut self.body) else { return Ok(false) };
            body.done += len;
            self.bytes += len as u64;
            self.next = self.next.wrapping_add(1);
            self.fetch(link)?;
        }
    }

    /// Takes the next piece, if it has been fetched, and copies it from its slot to its place if it is not there; its
    /// bytes.
    fn take_piece(&mut self, link: &Link, sink: &mut dyn Sink) -> Result<Option<usize>, LaneError> {
        if !self.is_fetched(link)? {
            return Ok(None);
        }
        let at = (self.next % PIECES) as usize;
        let (Some(Fetch { len, to, .. }), Some(body)) = (self.fetches[at].take(), &self.body) else { return Ok(None) };
        match to {
            Destination::Place(kept) => {
                if kept.is_some_and(Kept::give_back) {
                    sink.returned();
                }
            }
            Destination::Slot => {
                if self.mode == ReceiveMode::Staged {
                    body.expect(len, body.done, STAGED_PIECE_MAX)?;
                }
                let from = self.slots.at(at * PIECE_MAX, len).cast_const();
                copy_to_place(&body.place, body.done, from, len);
            }
        }
        Ok(Some(len))
    }

    /// Copies the next piece from the peer's memory, if it was offered: to its place, where that has room for all of it
    /// and may be written to. Its bytes.
    fn copy_piece(&mut self, link: &Link) -> Result<Option<usize>, LaneError> {
        let Some(body) = &self.body else { return Ok(None) };
        let Some((number, offer)) = link.inbox().next_offer() else { return Ok(None) };
        self.begun = number.wrapping_add(1);
        if let Err(error) = body.expect(offer.len, body.done, STAGED_PIECE_MAX) {
            link.release(offer);
            return Err(error);
        }
        let slot = self.slots.at(0, offer.len);
        if let Place::Into { dst, len: room, grant, .. } = &body.place
            && body.done + offer.len <= *room
        {
            let usage = grant.as_deref().map(Loan::enter);
            if !matches!(usage, Some(None)) {
                // SAFETY: done + len <= room, which may be written until `placed` or until `recall` has returned, which
                // waits for `usage`; UCX does not touch it after the call.
                unsafe { link.copy(offer, dst.add(body.done))? };
                return Ok(Some(offer.len));
            }
        }
        // SAFETY: a slot of this lane's, which nothing else uses.
        unsafe { link.copy(offer, slot)? };
        copy_to_place(&body.place, body.done, slot.cast_const(), offer.len);
        Ok(Some(offer.len))
    }

    /// Whether every piece that was begun to be fetched has arrived, or has failed.
    pub(crate) fn has_fetched_all(&self, link: &Link) -> bool {
        self.fetches.iter().flatten().all(|fetch| !link.is_under_way(&fetch.request))
    }

    /// Gives requests back that have not ended: the lane ends.
    pub(crate) fn forget(&mut self, link: &Link) {
        for fetch in &mut self.fetches {
            link.forget(fetch.take().and_then(|fetch| fetch.request));
        }
    }
}

/// Writes `len` bytes at `from`, which are the payload's from `offset` on, to where the sink wants them, if anywhere.
fn copy_to_place(place: &Place, offset: usize, from: *const u8, len: usize) {
    let Place::Into { dst, len: room, grant, .. } = place else { return };
    let len = len.min(room.saturating_sub(offset));
    let usage = grant.as_deref().map(Loan::enter);
    if len == 0 || matches!(usage, Some(None)) {
        return;
    }
    // SAFETY: offset + len <= room, which the sink said may be written until `placed` or until `recall` has returned,
    // which waits for `usage`; the caller gives `len` readable bytes at `from`.
    unsafe { std::ptr::copy_nonoverlapping(from, dst.add(offset), len) }
}
