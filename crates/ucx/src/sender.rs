//! The sending half of a lane.
#![allow(unsafe_code)]

use std::collections::VecDeque;

use crossrail_transport::{Kept, LaneError, Loan, Payload, Sink, Tx};
use crossrail_types::{HEAD_LEN, LaneId};

use crate::link::{Link, Request};
use crate::memory::Memory;
use crate::slots::Slots;
use crate::wire::{
    self, FRAMES, HELLO_PADDING, INLINE_MAX, Kind, MESSAGE_MAX, PIECE_HEADER, PIECE_MAX, PIECES, PREFIX_LEN,
    STAGED_PIECE_MAX,
};

/// Where a piece's slot has the piece: its prefix or its header ends the page before.
const PIECE_AT: usize = 4096;

/// A frame whose payload is sent in pieces.
struct Outgoing {
    tx: Tx,
    done: usize,
}

/// A frame that the sink gave, and how many frames and pieces UCX must have carried for it to be sent.
struct Unfinished {
    token: u64,
    frames: u32,
    pieces: u32,
}

impl Unfinished {
    /// Whether it is sent once so many frames and pieces are.
    fn is_sent(&self, frames: u32, pieces: u32) -> bool {
        let reaches = |count: u32, needed: u32| count.wrapping_sub(needed).cast_signed() >= 0;
        reaches(frames, self.frames) && reaches(pieces, self.pieces)
    }
}

/// See the module. Dropped after the link.
pub(crate) struct Sender {
    messages: Slots,
    pieces: Slots,
    next_piece: u32,
    /// Pieces are sent from the payload's memory, not from their slots.
    in_place: bool,
    /// By slot: the loan of the memory that the piece is sent from.
    kept: Vec<Option<Kept>>,
    credit: Memory,
    crediting: Option<Request>,
    /// What was consumed, as the peer was told.
    told: u32,
    outgoing: Option<Outgoing>,
    unfinished: VecDeque<Unfinished>,
    /// Bytes of heads and payloads.
    pub(crate) bytes: u64,
}

impl Sender {
    pub(crate) fn new() -> Sender {
        Sender {
            messages: Slots::new(FRAMES, MESSAGE_MAX),
            pieces: Slots::new(PIECES, PIECE_AT + STAGED_PIECE_MAX),
            next_piece: 0,
            in_place: false,
            kept: (0..PIECES).map(|_| None).collect(),
            credit: Memory::new(PREFIX_LEN + HELLO_PADDING),
            crediting: None,
            told: 0,
            outgoing: None,
            unfinished: VecDeque::new(),
            bytes: 0,
        }
    }

    /// Has pieces be sent from where the payload is. Before the first piece.
    pub(crate) fn send_in_place(&mut self) {
        self.in_place = true;
        // A slot has a piece's header, and stands in for memory that was recalled.
        self.pieces = Slots::new(PIECES, PIECE_AT + PIECE_MAX);
    }

    /// Pieces sent so far.
    pub(crate) fn pieces_sent(&self) -> u32 {
        self.next_piece
    }

    /// Whether a frame with a payload of `len` bytes can be sent in one message now.
    pub(crate) fn has_room(&mut self, link: &Link) -> Result<bool, LaneError> {
        if self.outgoing.is_some() || !link.inbox().may_send() {
            return Ok(false);
        }
        Ok(self.messages.free(link)?.is_some())
    }

    /// Whether the lane has pieces to send and a slot for one, a frame to report as sent, or owes the peer credit.
    pub(crate) fn has_work(&self, link: &Link) -> bool {
        let sends = self.outgoing.is_some() && self.pieces.has_free(link);
        let reports = self
            .unfinished
            .front()
            .is_some_and(|first| first.is_sent(self.messages.carried_by_now(link), self.pieces.carried_by_now(link)));
        let returns = (0..).zip(&self.kept).any(|(slot, kept)| kept.is_some() && self.pieces.is_over(link, slot));
        sends || reports || returns || (self.owes_credit(link) && !link.is_under_way(&self.crediting))
    }

    /// Sends a frame for which there is room. Payloads of up to [`INLINE_MAX`] go with it.
    pub(crate) fn frame(&mut self, link: &Link, tx: &Tx) -> Result<(), LaneError> {
        let Some(base) = self.messages.free(link)? else { return Ok(()) };
        let Some(number) = link.inbox().number_frame() else { return Ok(()) };
        self.told = link.inbox().taken();
        let memory = self.messages.memory();
        memory.write(base, &wire::prefix(Kind::Frame(number), self.told));
        memory.write(base + PREFIX_LEN, &tx.head.0);
        let mut len = PREFIX_LEN + HEAD_LEN;
        self.bytes += HEAD_LEN as u64;
        if tx.payload.len <= INLINE_MAX {
            let to = memory.at(base + len, tx.payload.len);
            copy_from_payload(&tx.payload, 0, to, tx.payload.len);
            len += tx.payload.len;
            self.bytes += tx.payload.len as u64;
        }
        // SAFETY: the slot is written again only once the request has ended (`has_room`), and outlives the link.
        let request = unsafe { link.send(memory.at(base, len), len)? };
        self.messages.begin(base, request);
        Ok(())
    }

    /// Sends what the sink has, about `budget` bytes. Whether anything moved.
    pub(crate) fn poll(
        &mut self,
        link: &Link,
        lane: LaneId,
        sink: &mut dyn Sink,
        budget: usize,
    ) -> Result<bool, LaneError> {
        let mut any = self.finish(link, lane, sink)?;
        let mut moved = 0;
        while moved < budget {
            if self.outgoing.is_none() {
                if !sink.wants() || !self.has_room(link)? {
                    break;
                }
                let Some(tx) = sink.next(lane) else { break };
                any = true;
                self.frame(link, &tx)?;
                moved += HEAD_LEN + tx.payload.len.min(INLINE_MAX);
                if tx.payload.len <= INLINE_MAX {
                    self.sent_all_of(link, tx.token);
                    continue;
                }
                self.outgoing = Some(Outgoing { tx, done: 0 });
            }
            let bytes = self.piece(link, lane)?;
            if bytes == 0 {
                break;
            }
            any = true;
            moved += bytes;
            if let Some(out) = self.outgoing.take_if(|out| out.done == out.tx.payload.len) {
                self.sent_all_of(link, out.tx.token);
            }
        }
        self.finish(link, lane, sink)?;
        Ok(any)
    }

    fn sent_all_of(&mut self, link: &Link, token: u64) {
        self.unfinished.push_back(Unfinished { token, frames: link.inbox().sent(), pieces: self.next_piece });
    }

    /// Gives memory back that no piece is sent from any more. Before the peer's confirmation of what it had is
    /// delivered: an operation that ends then need not wait for it.
    pub(crate) fn give_back(&mut self, link: &Link, sink: &mut dyn Sink) -> Result<(), LaneError> {
        self.pieces.carried(link)?;
        for (slot, kept) in (0..).zip(&mut self.kept) {
            if self.pieces.is_free(slot)
                && let Some(kept) = kept.take()
                && kept.give_back()
            {
                sink.returned();
            }
        }
        Ok(())
    }

    /// Reports the frames that UCX has carried, with pieces that the peer has fetched: from then on they arrive
    /// although nobody polls this end. Whether there were any.
    fn finish(&mut self, link: &Link, lane: LaneId, sink: &mut dyn Sink) -> Result<bool, LaneError> {
        if self.unfinished.is_empty() {
            return Ok(false);
        }
        let (frames, pieces) = (self.messages.carried(link)?, self.pieces.carried(link)?);
        let mut any = false;
        while let Some(first) = self.unfinished.front() {
            if !first.is_sent(frames, pieces) {
                break;
            }
            sink.sent(lane, first.token);
            self.unfinished.pop_front();
            any = true;
        }
        Ok(any)
    }

    /// Offers the next piece of the payload being sent, if there is a slot; its bytes.
    fn piece(&mut self, link: &Link, lane: LaneId) -> Result<usize, LaneError> {
        let Some(base) = self.pieces.free(link)? else { return Ok(0) };
        let Some(out) = &mut self.outgoing else { return Ok(0) };
        let Payload { ptr, len: all, grant, .. } = &out.tx.payload;
        let slot = self.pieces.slot_of(base);
        let max = if self.in_place { PIECE_MAX } else { STAGED_PIECE_MAX };
        let len = (all - out.done).min(max);
        let memory = self.pieces.memory();
        let kept = match grant {
            _ if !self.in_place => None,
            Some(loan) => loan.keep(lane).map(Some),
            // The memory outlives the lane, or `sent`.
            None => Some(None),
        };
        let bytes = match kept {
            // SAFETY: done + len <= the payload's length.
            Some(_) => unsafe { ptr.add(out.done) },
            None => {
                let to = memory.at(base + PIECE_AT, len);
                copy_from_payload(&out.tx.payload, out.done, to, len);
                to.cast_const()
            }
        };
        let from = base + PIECE_AT - PIECE_HEADER;
        memory.write(from, &self.next_piece.to_le_bytes());
        let header = (memory.at(from, PIECE_HEADER).cast_const(), PIECE_HEADER);
        // SAFETY: the slot is written again only once the request has ended, and outlives the link; so does the
        // payload's memory, which is kept until then, or valid until `sent`, which follows that.
        let request = unsafe { link.offer(header, (bytes, len))? };
        // What an earlier piece kept is given back with this.
        self.kept[slot] = kept.flatten();
        self.pieces.begin(base, request);
        out.done += len;
        self.next_piece = self.next_piece.wrapping_add(1);
        self.bytes += len as u64;
        Ok(len)
    }

    /// Whether the peer may soon run out of credit, and no message has told it of more.
    fn owes_credit(&self, link: &Link) -> bool {
        link.inbox().taken().wrapping_sub(self.told) >= FRAMES / 4
    }

    /// Tells the peer what was consumed, if that is due.
    pub(crate) fn credit(&mut self, link: &Link) -> Result<(), LaneError> {
        if !self.owes_credit(link) || !link.has_ended(&mut self.crediting)? {
            return Ok(());
        }
        self.told = link.inbox().taken();
        self.credit.write(0, &wire::prefix(Kind::Credit, self.told));
        // SAFETY: written again only once the request has ended; outlives the link.
        self.crediting = unsafe { link.send(self.credit.at(0, PREFIX_LEN), PREFIX_LEN)? };
        Ok(())
    }

    /// Sends the first message, which shows the peer that the connection works.
    pub(crate) fn hello(&mut self, link: &Link) -> Result<(), LaneError> {
        const LEN: usize = PREFIX_LEN + HELLO_PADDING;
        self.credit.write(0, &wire::prefix(Kind::Hello, 0));
        // SAFETY: as above.
        self.crediting = unsafe { link.send(self.credit.at(0, LEN), LEN)? };
        Ok(())
    }

    /// Whether UCX may still read memory for a piece.
    pub(crate) fn has_pieces_under_way(&self, link: &Link) -> bool {
        self.pieces.are_under_way(link)
    }

    /// Keeps the memory of pieces as it is, for as long as the process lives, if the peer has yet to fetch some.
    pub(crate) fn leave_offers(&mut self, link: &Link) {
        if self.pieces.are_under_way(link) {
            self.pieces.leave();
        }
    }

    /// Gives requests back that have not ended: the lane ends.
    pub(crate) fn forget(&mut self, link: &Link) {
        self.messages.forget(link);
        self.pieces.forget(link);
        link.forget(self.crediting.take());
    }
}

/// Copies `len` bytes of the payload from `offset` on to `to`; zeros if it was recalled, so that framing holds.
fn copy_from_payload(payload: &Payload, offset: usize, to: *mut u8, len: usize) {
    let usage = payload.grant.as_deref().map(Loan::enter);
    // SAFETY: the caller keeps offset + len <= payload.len and gives `len` writable bytes at `to`; the payload is valid
    // until `sent` or until `recall` has returned, which waits for `usage`.
    unsafe {
        match usage {
            Some(None) => to.write_bytes(0, len),
            _ if len == 0 => {}
            _ => std::ptr::copy_nonoverlapping(payload.ptr.add(offset), to, len),
        }
    }
}
