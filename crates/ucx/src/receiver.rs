//! The receiving half of a lane.
#![allow(unsafe_code)]

use crossrail_transport::{LaneError, Loan, Place, Sink};
use crossrail_types::{HEAD_LEN, LaneId};

use crate::link::{Link, Request};
use crate::memory::Memory;
use crate::pieces::Target;
use crate::wire::{INLINE_MAX, PIECE_MAX, PIECES};

/// Largest payload of a frame. Nothing is allocated for one; this bounds what a peer may announce.
pub(crate) const PAYLOAD_MAX: usize = 1 << 30;

/// A piece that is being fetched, or was.
struct Fetch {
    request: Option<Request>,
    len: usize,
}

/// A payload whose pieces are arriving.
struct Body {
    place: Place,
    done: usize,
    len: usize,
}

impl Body {
    /// That the next piece has as many bytes as the sender must give it.
    fn expect(&self, len: usize) -> Result<(), LaneError> {
        let left = self.len - self.done;
        if len == left.min(PIECE_MAX) {
            return Ok(());
        }
        Err(LaneError::Protocol(format!("a piece of {len} bytes came where {left} bytes of a payload are left")))
    }
}

/// See the module. Dropped after the link.
pub(crate) struct Receiver {
    /// UCX copies pieces within one call: they go to their places, not into slots.
    in_place: bool,
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
    pub(crate) fn new(in_place: bool) -> Receiver {
        Receiver {
            in_place,
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
        if link.inbox().has_placed() {
            return true;
        }
        match (&self.body, &self.fetches[(self.next % PIECES) as usize]) {
            (None, _) => link.inbox().has_frame(),
            (Some(_), _) if self.in_place => link.inbox().has_offer(),
            (Some(_), Some(fetch)) => !link.is_under_way(&fetch.request),
            (Some(_), None) => false,
        }
    }

    /// Begins to fetch the pieces that the peer offers, as far as there are slots. Whether it began any.
    pub(crate) fn fetch(&mut self, link: &Link) -> Result<bool, LaneError> {
        let mut any = false;
        while !self.in_place && self.begun.wrapping_sub(self.next) < PIECES {
            let Some((number, offer)) = link.inbox().next_offer() else { break };
            let at = (number % PIECES) as usize;
            // SAFETY: the slot is free, because fewer than PIECES numbers are begun and not consumed; it outlives the link.
            let request = unsafe { link.fetch(offer, self.slots.at(at * PIECE_MAX, offer.len))? };
            self.fetches[at] = Some(Fetch { request, len: offer.len });
            self.begun = number.wrapping_add(1);
            any = true;
        }
        Ok(any)
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
                if !self.consume(link, until)? {
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
                outcome = Ok(Some(Body { place, done: len, len }));
            } else {
                outcome = Ok(Some(Body { place, done: 0, len }));
            }
            true
        });
        self.body = outcome?;
        let expected = self.body.as_ref().filter(|body| body.done < body.len);
        link.inbox().aim(expected.map(|body| Target::new(&body.place, body.len)));
        Ok(())
    }

    /// Consumes pieces of the payload being received; whether it is complete.
    fn consume(&mut self, link: &Link, until: u64) -> Result<bool, LaneError> {
        loop {
            let Some(body) = &self.body else { return Ok(false) };
            if body.done == body.len {
                return Ok(true);
            }
            if self.bytes >= until {
                return Ok(false);
            }
            let (pieces, bytes) = link.inbox().placed().map_err(LaneError::Protocol)?;
            if let (1.., Some(body)) = (pieces, &mut self.body) {
                body.done += bytes;
                self.bytes += bytes as u64;
                self.next = self.next.wrapping_add(pieces);
                continue;
            }
            let consumed = if self.in_place { self.copy_piece(link)? } else { self.unstage_piece(link)? };
            let (Some(len), Some(body)) = (consumed, &mut self.body) else { return Ok(false) };
            body.done += len;
            self.bytes += len as u64;
            self.next = self.next.wrapping_add(1);
            self.fetch(link)?;
        }
    }

    /// Copies the next piece from its slot to its place, if it has been fetched; its bytes.
    fn unstage_piece(&mut self, link: &Link) -> Result<Option<usize>, LaneError> {
        if !self.is_fetched(link)? {
            return Ok(None);
        }
        let at = (self.next % PIECES) as usize;
        let (Some(Fetch { len, .. }), Some(body)) = (self.fetches[at].take(), &self.body) else { return Ok(None) };
        body.expect(len)?;
        let from = self.slots.at(at * PIECE_MAX, len).cast_const();
        copy_to_place(&body.place, body.done, from, len);
        Ok(Some(len))
    }

    /// Copies the next piece from the peer's memory, if it was offered: to its place, where that has room for all of it
    /// and may be written to. Its bytes.
    fn copy_piece(&mut self, link: &Link) -> Result<Option<usize>, LaneError> {
        let Some(body) = &self.body else { return Ok(None) };
        let Some((number, offer)) = link.inbox().next_offer() else { return Ok(None) };
        self.begun = number.wrapping_add(1);
        if let Err(error) = body.expect(offer.len) {
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
