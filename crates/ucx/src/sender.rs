//! The sending half of a lane.
#![allow(unsafe_code)]

use std::collections::VecDeque;

use crossrail_transport::{Grant, LaneError, Payload, Sink, Tx};
use crossrail_types::{HEAD_LEN, LaneId};

use crate::link::{Link, Request};
use crate::memory::Memory;
use crate::wire::{
    self, FRAMES, HELLO_PADDING, INLINE_MAX, Kind, MESSAGE_MAX, PIECE_HEADER, PIECE_MAX, PIECES, PREFIX_LEN,
};

/// Bytes of a piece's slot: the piece, and its header in a cache line of its own.
const PIECE_SLOT: usize = PIECE_MAX + 4096;

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

/// See the module. Dropped after the link.
pub(crate) struct Sender {
    messages: Memory,
    sending: Vec<Option<Request>>,
    pieces: Memory,
    offered: Vec<Option<Request>>,
    next_piece: u32,
    credit: Memory,
    crediting: Option<Request>,
    /// Frames consumed, as the peer was told.
    told: u32,
    outgoing: Option<Outgoing>,
    /// Frames and pieces that UCX has carried, of those begun in order.
    carried: (u32, u32),
    unfinished: VecDeque<Unfinished>,
    /// Bytes of heads and payloads.
    pub(crate) bytes: u64,
}

impl Sender {
    pub(crate) fn new() -> Sender {
        Sender {
            messages: Memory::new(FRAMES as usize * MESSAGE_MAX),
            sending: (0..FRAMES).map(|_| None).collect(),
            pieces: Memory::new(PIECES as usize * PIECE_SLOT),
            offered: (0..PIECES).map(|_| None).collect(),
            next_piece: 0,
            credit: Memory::new(PREFIX_LEN + HELLO_PADDING),
            crediting: None,
            told: 0,
            outgoing: None,
            carried: (0, 0),
            unfinished: VecDeque::new(),
            bytes: 0,
        }
    }

    /// Pieces offered so far.
    pub(crate) fn pieces_sent(&self) -> u32 {
        self.next_piece
    }

    /// Whether a frame with a payload of `len` bytes can be sent in one message now.
    pub(crate) fn has_room(&mut self, link: &Link) -> Result<bool, LaneError> {
        if self.outgoing.is_some() || !link.inbox().may_send() {
            return Ok(false);
        }
        link.has_ended(&mut self.sending[(link.inbox().sent() % FRAMES) as usize])
    }

    /// Whether the lane has pieces to offer and a slot for one.
    pub(crate) fn has_work(&self, link: &Link) -> bool {
        self.outgoing.is_some() && !link.is_under_way(&self.offered[(self.next_piece % PIECES) as usize])
    }

    /// Sends a frame for which there is room. Payloads of up to [`INLINE_MAX`] go with it.
    pub(crate) fn frame(&mut self, link: &Link, tx: &Tx) -> Result<(), LaneError> {
        let Some(number) = link.inbox().number_frame() else { return Ok(()) };
        let base = (number % FRAMES) as usize * MESSAGE_MAX;
        let taken = link.inbox().taken();
        self.told = taken;
        self.messages.write(base, &wire::prefix(Kind::Frame(number), taken));
        self.messages.write(base + PREFIX_LEN, &tx.head.0);
        let mut len = PREFIX_LEN + HEAD_LEN;
        self.bytes += HEAD_LEN as u64;
        if tx.payload.len <= INLINE_MAX {
            let to = self.messages.at(base + len, tx.payload.len);
            copy_from_payload(&tx.payload, 0, to, tx.payload.len);
            len += tx.payload.len;
            self.bytes += tx.payload.len as u64;
        }
        // SAFETY: the slot is written again only once the request has ended (`has_room`), and outlives the link.
        self.sending[(number % FRAMES) as usize] = unsafe { link.send(self.messages.at(base, len), len)? };
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
            let bytes = self.piece(link)?;
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

    /// Reports the frames that UCX has carried: from then on they arrive although nobody polls this end. Whether there
    /// were any.
    fn finish(&mut self, link: &Link, lane: LaneId, sink: &mut dyn Sink) -> Result<bool, LaneError> {
        let (frames, pieces) = &mut self.carried;
        while *frames != link.inbox().sent() && link.has_ended(&mut self.sending[(*frames % FRAMES) as usize])? {
            *frames = frames.wrapping_add(1);
        }
        while *pieces != self.next_piece && link.has_ended(&mut self.offered[(*pieces % PIECES) as usize])? {
            *pieces = pieces.wrapping_add(1);
        }
        let before = |count: u32, carried: u32| carried.wrapping_sub(count).cast_signed() >= 0;
        let mut any = false;
        while let Some(first) = self.unfinished.front() {
            if !before(first.frames, *frames) || !before(first.pieces, *pieces) {
                break;
            }
            sink.sent(lane, first.token);
            self.unfinished.pop_front();
            any = true;
        }
        Ok(any)
    }

    /// Offers the next piece of the payload being sent, if there is a slot; its bytes.
    fn piece(&mut self, link: &Link) -> Result<usize, LaneError> {
        let at = (self.next_piece % PIECES) as usize;
        if !link.has_ended(&mut self.offered[at])? {
            return Ok(0);
        }
        let Some(out) = &mut self.outgoing else { return Ok(0) };
        let len = (out.tx.payload.len - out.done).min(PIECE_MAX);
        let base = at * PIECE_SLOT;
        copy_from_payload(&out.tx.payload, out.done, self.pieces.at(base, len), len);
        self.pieces.write(base + PIECE_MAX, &self.next_piece.to_le_bytes());
        let header = (self.pieces.at(base + PIECE_MAX, PIECE_HEADER).cast_const(), PIECE_HEADER);
        // SAFETY: the slot is written again only once the request has ended, and outlives the link.
        self.offered[at] = unsafe { link.offer(header, (self.pieces.at(base, len), len))? };
        out.done += len;
        self.next_piece = self.next_piece.wrapping_add(1);
        self.bytes += len as u64;
        Ok(len)
    }

    /// Tells the peer how many frames were consumed, if it may soon run out of credit and no frame has told it.
    pub(crate) fn credit(&mut self, link: &Link) -> Result<(), LaneError> {
        let taken = link.inbox().taken();
        if taken.wrapping_sub(self.told) < FRAMES / 4 || !link.has_ended(&mut self.crediting)? {
            return Ok(());
        }
        self.credit.write(0, &wire::prefix(Kind::Credit, taken));
        self.told = taken;
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

    /// Keeps the memory of pieces as it is, for as long as the process lives, if the peer has yet to fetch some.
    pub(crate) fn leave_offers(&mut self, link: &Link) {
        if self.offered.iter().any(|request| link.is_under_way(request)) {
            std::mem::forget(std::mem::replace(&mut self.pieces, Memory::new(1)));
        }
    }

    /// Gives requests back that have not ended: the lane ends.
    pub(crate) fn forget(&mut self, link: &Link) {
        let all = self.sending.iter_mut().chain(&mut self.offered).chain(std::iter::once(&mut self.crediting));
        all.for_each(|request| link.forget(request.take()));
    }
}

/// Copies `len` bytes of the payload from `offset` on to `to`; zeros if the grant was revoked, so that framing holds.
fn copy_from_payload(payload: &Payload, offset: usize, to: *mut u8, len: usize) {
    let usage = payload.grant.as_deref().map(Grant::enter);
    // SAFETY: the caller keeps offset + len <= payload.len and gives `len` writable bytes at `to`; the payload is valid
    // until `sent` or until `revoke` has returned, which waits for `usage`.
    unsafe {
        match usage {
            Some(None) => to.write_bytes(0, len),
            _ if len == 0 => {}
            _ => std::ptr::copy_nonoverlapping(payload.ptr.add(offset), to, len),
        }
    }
}
