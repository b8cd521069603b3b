//! The send queue, served by any link with room: writes in slots, their parts, and the object's own frames.

use std::collections::VecDeque;

use crossrail_transport::placing::{Event, Extent, Imm, Key, WriteError};

use super::wire::{HEAD, Head, Kind, SLOTS};

/// Most extents of a write.
pub(crate) const GATHER: usize = 4;
/// Answers that the peer has not acknowledged, over all connections. The parts that it has in flight are fewer.
const ANSWERS_MAX: usize = 1 << 16;

/// A write that has not ended.
#[derive(Clone, Copy, Debug)]
struct Write {
    token: u64,
    from: [Extent; GATHER],
    key: u64,
    at: u64,
    imm: u32,
    len: u32,
    /// Bytes that parts have been made of.
    parted: u32,
    /// Bytes of parts that the peer has acknowledged.
    acked: u32,
    /// All of its parts have been made; at first false for an empty write, too.
    is_parted: bool,
    discarded: bool,
    /// Number of writes that the slot has had, modulo 2^16.
    turn: u16,
}

/// A frame that the peer has not acknowledged, or that was not sent yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    /// A part of the write in that slot.
    Part {
        slot: u32,
        /// Its offset in the write.
        from: u32,
        len: u32,
    },
    /// A head without payload.
    Bare(Head),
}

impl Frame {
    /// Bytes on the wire.
    pub(crate) fn len(&self) -> usize {
        match self {
            Frame::Part { len, .. } => HEAD + *len as usize,
            Frame::Bare(_) => HEAD,
        }
    }

    /// True if it states that a part was discarded.
    pub(crate) fn is_discard(&self) -> bool {
        matches!(self, Frame::Bare(Head { kind: Kind::Discarded, .. }))
    }

    /// True if the peer counts it.
    pub(crate) fn is_counted(&self) -> bool {
        !matches!(self, Frame::Bare(head) if !head.kind.is_counted())
    }
}

/// Writes in their slots, and what of them waits for a link.
#[derive(Debug)]
pub(crate) struct Outgoing {
    writes: Vec<Option<Write>>,
    free: Vec<u32>,
    /// The turn of the last write of each slot.
    turns: Vec<u16>,
    /// Slots of writes of which parts are still to be made, in the order of the calls.
    queue: VecDeque<u32>,
    /// Parts of lost links, and the bytes of all that waits.
    again: VecDeque<Frame>,
    waiting: u64,
    /// Frames of the object's own, in order, all over one link.
    bare: VecDeque<Head>,
    /// Frames of kind [`Kind::Discarded`] that the peer has not acknowledged: here, and in links.
    answers: usize,
    /// Ends of writes that the next poll reports.
    ended: VecDeque<(u64, Result<(), WriteError>)>,
}

impl Outgoing {
    pub(crate) fn new() -> Outgoing {
        Outgoing {
            writes: vec![None; SLOTS],
            free: (0..SLOTS as u32).rev().collect(),
            turns: vec![0; SLOTS],
            queue: VecDeque::with_capacity(SLOTS),
            again: VecDeque::new(),
            waiting: 0,
            bare: VecDeque::new(),
            answers: 0,
            ended: VecDeque::with_capacity(SLOTS),
        }
    }

    /// Queues a write that was checked; false: no slot is free.
    pub(crate) fn queue(&mut self, from: &[Extent], (len, to, at): (usize, &Key, u64), imm: Imm, token: u64) -> bool {
        let Some(slot) = self.free.pop() else { return false };
        let mut extents = [Extent { at: 0, len: 0, gpu: None }; GATHER];
        extents[..from.len()].copy_from_slice(from);
        let (key, len) = (to.id(), len as u32);
        let turn = self.turns[slot as usize].wrapping_add(1);
        self.turns[slot as usize] = turn;
        let fresh = Write {
            token,
            from: extents,
            key,
            at,
            imm: imm.word(0),
            len,
            parted: 0,
            acked: 0,
            is_parted: false,
            discarded: false,
            turn,
        };
        self.writes[slot as usize] = Some(fresh);
        self.queue.push_back(slot);
        self.waiting += u64::from(len) + HEAD as u64;
        true
    }

    /// Queues a frame of the object's own.
    pub(crate) fn queue_bare(&mut self, head: Head) {
        self.bare.push_back(head);
    }

    /// An answer is about to be sent: that a part was discarded.
    ///
    /// # Errors
    /// The peer causes answers and acknowledges none.
    pub(crate) fn answer(&mut self) -> Result<(), String> {
        if self.answers >= ANSWERS_MAX {
            return Err(format!("it acknowledges none of {ANSWERS_MAX} answers"));
        }
        self.answers += 1;
        Ok(())
    }

    /// Bytes that wait for a link, heads of writes included.
    pub(crate) fn waiting(&self) -> u64 {
        self.waiting
    }

    /// True if anything waits for a link.
    pub(crate) fn has_work(&self) -> bool {
        self.waiting > 0 || !self.bare.is_empty()
    }

    /// The next frame of the object's own.
    pub(crate) fn take_bare(&mut self) -> Option<Frame> {
        self.bare.pop_front().map(Frame::Bare)
    }

    /// The next part, of at most `room` bytes; the last one of a write may be half as long again, instead of two.
    pub(crate) fn take_part(&mut self, room: usize) -> Option<Frame> {
        if let Some(part) = self.again.pop_front() {
            self.waiting = self.waiting.saturating_sub(part.len() as u64);
            return Some(part);
        }
        let slot = *self.queue.front()?;
        let write = self.writes.get_mut(slot as usize)?.as_mut()?;
        let (from, left) = (write.parted, write.len - write.parted);
        let room = u32::try_from(room).unwrap_or(u32::MAX).max(1);
        let len = if left <= room.saturating_add(room / 2) { left } else { room };
        write.parted += len;
        self.waiting -= u64::from(len);
        if write.parted == write.len {
            write.is_parted = true;
            self.queue.pop_front();
            self.waiting -= HEAD as u64;
        }
        Some(Frame::Part { slot, from, len })
    }

    /// Requeues parts that a lost link did not deliver, before all that was queued later. The number of parts.
    pub(crate) fn requeue(&mut self, frames: impl DoubleEndedIterator<Item = Frame>) -> u64 {
        let mut parts = 0;
        for frame in frames.rev().filter(|frame| matches!(frame, Frame::Part { .. })) {
            self.waiting += frame.len() as u64;
            self.again.push_front(frame);
            parts += 1;
        }
        parts
    }

    /// The bytes of a frame's head, with that acknowledgement.
    pub(crate) fn head(&self, frame: &Frame, ack: u32) -> [u8; HEAD] {
        match frame {
            Frame::Bare(head) => Head { ack, ..*head }.encode(),
            Frame::Part { slot, from, len } => {
                let mut head = Head { len: *len, slot: *slot, ack, ..Head::new(Kind::Part) };
                if let Some(Some(write)) = self.writes.get(*slot as usize) {
                    (head.key, head.at) = (write.key, write.at + u64::from(*from));
                    (head.imm, head.whole, head.link) = (write.imm, write.len, write.turn);
                }
                head.encode()
            }
        }
    }

    /// The memory of a part, from its byte `done` on.
    pub(crate) fn memory(&self, frame: &Frame, done: usize, mut add: impl FnMut(Extent) -> bool) {
        let Frame::Part { slot, from, len } = frame else { return };
        let Some(Some(write)) = self.writes.get(*slot as usize) else { return };
        let (mut skip, mut left) = (*from as usize + done, (*len as usize).saturating_sub(done));
        for extent in &write.from {
            let part = extent.part(skip, left);
            skip = skip.saturating_sub(extent.len);
            left -= part.len;
            if part.len > 0 && !add(part) || left == 0 {
                return;
            }
        }
    }

    /// The peer has acknowledged a frame.
    pub(crate) fn acknowledged(&mut self, frame: &Frame) {
        self.answers -= usize::from(frame.is_discard()).min(self.answers);
        let Frame::Part { slot, len, .. } = frame else { return };
        let Some(entry) = self.writes.get_mut(*slot as usize) else { return };
        let Some(write) = entry else { return };
        write.acked += len;
        if write.is_parted && write.acked == write.len {
            let result = if write.discarded { Err(WriteError::Revoked) } else { Ok(()) };
            self.ended.push_back((write.token, result));
            *entry = None;
            self.free.push(*slot);
        }
    }

    /// The peer has discarded a part of the write of that turn in that slot. It may state that twice, over two links, and
    /// the write may have ended since.
    pub(crate) fn discarded(&mut self, slot: u32, turn: u16) {
        if let Some(Some(write)) = self.writes.get_mut(slot as usize)
            && write.turn == turn
        {
            write.discarded = true;
        }
    }

    /// Ends all writes: the peer is lost.
    pub(crate) fn lose(&mut self) {
        for write in self.writes.iter_mut().filter_map(Option::take) {
            self.ended.push_back((write.token, Err(WriteError::Lost)));
        }
        self.queue.clear();
        self.again.clear();
        self.bare.clear();
        (self.waiting, self.answers) = (0, 0);
    }

    /// True if [`Outgoing::report`] has something.
    pub(crate) fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Reports what has ended. Whether anything has.
    pub(crate) fn report(&mut self, events: &mut dyn FnMut(Event)) -> bool {
        let any = !self.ended.is_empty();
        while let Some((token, result)) = self.ended.pop_front() {
            events(Event::Ended { token, result });
        }
        any
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossrail_transport::placing::Counter;

    fn queue(out: &mut Outgoing, lens: &[usize], token: u64) {
        let from: Vec<Extent> = lens.iter().map(|len| Extent { at: 1 << 20, len: *len, gpu: None }).collect();
        let imm = Imm { counter: Counter(1), piece: 2 };
        assert!(out.queue(&from, (lens.iter().sum(), &Key::new(3, 1 << 30), 64), imm, token));
    }

    fn parts(out: &mut Outgoing, room: usize) -> Vec<Frame> {
        std::iter::from_fn(|| out.take_part(room)).collect()
    }

    fn ended(out: &mut Outgoing) -> Vec<u64> {
        let mut tokens = Vec::new();
        out.report(&mut |event| match event {
            Event::Ended { token, result: Ok(()) } => tokens.push(token),
            other => panic!("{other:?}"),
        });
        tokens
    }

    #[test]
    fn a_write_ends_once_all_of_its_parts_are_acknowledged() {
        let mut out = Outgoing::new();
        queue(&mut out, &[100, 30, 0, 7], 5);
        queue(&mut out, &[], 6);
        assert_eq!(out.waiting(), 137 + 2 * HEAD as u64);
        let parts = parts(&mut out, 50);
        let lens: Vec<usize> = parts.iter().map(|part| part.len() - HEAD).collect();
        assert_eq!((lens, out.has_work()), (vec![50, 50, 37, 0], false), "37 and not 24 more");
        let mut pieces = Vec::new();
        out.memory(&parts[1], 10, |extent| {
            pieces.push((extent.at - (1 << 20), extent.len));
            true
        });
        assert_eq!(pieces, [(60, 40)]);
        pieces.clear();
        out.memory(&parts[2], 1, |extent| {
            pieces.push((extent.at - (1 << 20), extent.len));
            true
        });
        assert_eq!(pieces, [(1, 29), (0, 7)]);
        let head = Head::decode(out.head(&parts[1], 9).first_chunk().unwrap()).expect("valid");
        assert_eq!((head.at, head.whole, head.len, head.ack, head.key), (114, 137, 50, 9, 3));
        for (at, done) in [(2, vec![]), (3, vec![6]), (0, vec![]), (1, vec![5])] {
            out.acknowledged(&parts[at]);
            assert_eq!(ended(&mut out), done, "part {at}");
        }
        assert_eq!(out.free.len(), SLOTS);
    }

    #[test]
    fn what_a_lost_link_leaves_goes_out_first_and_in_order() {
        let mut out = Outgoing::new();
        queue(&mut out, &[100], 1);
        queue(&mut out, &[100], 2);
        let (first, second) = (out.take_part(50).expect("a part"), out.take_part(60).expect("a part"));
        out.queue_bare(Head::new(Kind::Ready));
        let left = [first, Frame::Bare(Head::new(Kind::Ack)), second];
        assert_eq!(out.requeue(left.into_iter()), 2);
        assert_eq!(out.take_part(1), Some(first));
        assert_eq!(out.take_part(1), Some(second));
        assert_eq!(out.take_bare(), Some(Frame::Bare(Head::new(Kind::Ready))));
        assert_eq!(parts(&mut out, 1 << 20).len(), 1);
        assert_eq!(out.waiting(), 0);
    }

    #[test]
    fn slots_are_finite_and_come_back() {
        let mut out = Outgoing::new();
        (0..SLOTS as u64).for_each(|token| queue(&mut out, &[1], token));
        let imm = Imm { counter: Counter(0), piece: 0 };
        assert!(!out.queue(&[], (0, &Key::new(0, 0), 0), imm, 9));
        let part = out.take_part(9).expect("a part");
        out.acknowledged(&part);
        assert!(out.queue(&[], (0, &Key::new(0, 0), 0), imm, 9));
        out.lose();
        let mut lost = 0;
        out.report(&mut |event| {
            lost += usize::from(matches!(event, Event::Ended { result: Err(WriteError::Lost), .. }))
        });
        assert_eq!(lost, SLOTS);
    }
}
