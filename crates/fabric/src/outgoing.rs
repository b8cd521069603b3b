//! The writes of one end, from their queueing to their end.
//!
//! A write waits until its key was checked by the peer, is posted in one part or several, and ends once the provider is
//! done with its memory and the peer has counted it. No writes are posted by a key that the peer has stopped.

use std::collections::{HashMap, VecDeque};

use crossrail_transport::placing::{Extent, Imm, Key, Toggles, WriteError};

use crate::port::GATHER;
use crate::wire::{Frame, PARTS_MAX, PEER_WRITES, Remote, Word};

/// Limits of one part of a write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    /// Most extents.
    pub(crate) gather: usize,
    /// Most bytes.
    pub(crate) piece: usize,
}

/// A part of a write, to be posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Number of its write.
    pub(crate) write: u16,
    pub(crate) extents: [Extent; GATHER],
    pub(crate) count: usize,
    pub(crate) len: usize,
    pub(crate) to: Remote,
    pub(crate) at: u64,
    /// Its immediate, if it is one part of several; a whole write's word is determined as it is posted.
    word: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeyState {
    /// Not announced to the peer yet.
    New,
    /// The peer was asked.
    Asked,
    Valid,
    /// The peer has ended the access. Stopped(true): and this end has confirmed it.
    Stopped(bool),
}

#[derive(Debug)]
struct KnownKey {
    key: Key,
    state: KeyState,
    /// The peer's registration, once it has answered.
    remote: Remote,
    /// Writes with parts posted that have not ended.
    active: usize,
    waiting: Vec<u16>,
}

#[derive(Debug)]
struct OutWrite {
    token: u64,
    imm: Imm,
    /// `None`: to memory that needs no check.
    key: Option<usize>,
    to: Remote,
    at: u64,
    len: usize,
    from: [Extent; GATHER],
    extents: usize,
    /// It goes in one part.
    whole: bool,
    turn: u8,
    /// Bytes and parts posted, parts that the provider has completed.
    sent: usize,
    posted: u16,
    completed: u16,
    /// All that is to be posted was.
    over: bool,
    acked: bool,
    revoked: bool,
    /// Its end was reported.
    reported: bool,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Outgoing {
    writes: Box<[Option<OutWrite>]>,
    free: Vec<u16>,
    turns: Box<[u8]>,
    /// Writes to post, in order.
    queue: VecDeque<u16>,
    /// Whole writes that were posted and not acknowledged, in order.
    direct: VecDeque<(u32, u16)>,
    keys: Vec<KnownKey>,
    numbers: HashMap<[u8; 32], usize>,
    /// The key of the last write: most have the same.
    last: Option<([u8; 32], usize)>,
    asked: VecDeque<usize>,
    toggles: Toggles,
    ended: VecDeque<(u64, Result<(), WriteError>)>,
    /// Parts posted of writes that were not acknowledged, and how many there may be.
    unacknowledged: usize,
    grant: usize,
    /// Number of writes that the peer has acknowledged.
    acks: u64,
}

const NOWHERE: Remote = Remote { key: 0, base: 0 };
const NONE: Extent = Extent { at: 0, len: 0, gpu: None };

impl Outgoing {
    pub(crate) fn new(grant: usize) -> Outgoing {
        Outgoing {
            writes: (0..PEER_WRITES).map(|_| None).collect(),
            free: (0..PEER_WRITES as u16).rev().collect(),
            turns: vec![0; PEER_WRITES].into(),
            queue: VecDeque::new(),
            direct: VecDeque::new(),
            keys: Vec::new(),
            numbers: HashMap::new(),
            last: None,
            asked: VecDeque::new(),
            toggles: Toggles::default(),
            ended: VecDeque::new(),
            unacknowledged: 0,
            grant: grant.min(PEER_WRITES),
            acks: 0,
        }
    }

    /// Queues a write that was checked; false: there are too many. `frames`: frames for the peer are added.
    pub(crate) fn queue(
        &mut self,
        from: &[Extent],
        (len, to, at): (usize, &Key, u64),
        imm: Imm,
        token: u64,
        (cut, frames): (Cut, &mut Vec<Frame>),
    ) -> bool {
        if self.free.is_empty() {
            return false;
        }
        let key = match self.last {
            Some((bytes, key)) if bytes == to.0 => key,
            _ => *self.numbers.entry(to.0).or_insert_with(|| {
                let (state, remote) = (KeyState::New, NOWHERE);
                self.keys.push(KnownKey { key: *to, state, remote, active: 0, waiting: Vec::new() });
                self.keys.len() - 1
            }),
        };
        self.last = Some((to.0, key));
        let Some(number) = self.enter(from, (len, Some(key), NOWHERE, at), imm, token, cut) else { return false };
        let known = &mut self.keys[key];
        match known.state {
            KeyState::Valid => self.queue.push_back(number),
            KeyState::Asked => known.waiting.push(number),
            KeyState::New => {
                known.state = KeyState::Asked;
                known.waiting.push(number);
                self.asked.push_back(key);
                frames.push(Frame::Check(to.0));
            }
            KeyState::Stopped(_) => self.end(number, Err(WriteError::Revoked)),
        }
        true
    }

    /// Queues a write to memory that the peer has named itself; false: there are too many. Its end is reported as soon as
    /// the provider is done with its memory, whether the peer has counted it or not.
    pub(crate) fn queue_to(&mut self, from: &Extent, (to, at): (Remote, u64), imm: Imm, token: u64, cut: Cut) -> bool {
        let number = self.enter(std::slice::from_ref(from), (from.len, None, to, at), imm, token, cut);
        self.queue.extend(number);
        number.is_some()
    }

    fn enter(
        &mut self,
        from: &[Extent],
        (len, key, to, at): (usize, Option<usize>, Remote, u64),
        imm: Imm,
        token: u64,
        cut: Cut,
    ) -> Option<u16> {
        let number = self.free.pop()?;
        let (mut extents, mut count) = ([NONE; GATHER], 0);
        for extent in from.iter().filter(|extent| extent.len > 0).take(GATHER) {
            extents[count] = *extent;
            count += 1;
        }
        self.writes[usize::from(number)] = Some(OutWrite {
            token,
            imm,
            key,
            to,
            at,
            len,
            from: extents,
            extents: count,
            whole: count <= cut.gather && len <= cut.piece,
            turn: 0,
            sent: 0,
            posted: 0,
            completed: 0,
            over: false,
            acked: false,
            revoked: false,
            reported: false,
        });
        Some(number)
    }

    /// The peer's answer to the oldest question about a key.
    ///
    /// # Errors
    /// There was none about that key.
    pub(crate) fn checked(&mut self, id: u64, remote: Option<Remote>) -> Result<(), String> {
        let asked = self.asked.pop_front().filter(|at| self.keys[*at].key.id() == id);
        let Some(at) = asked else { return Err("it answered what was not asked".to_owned()) };
        let waiting = std::mem::take(&mut self.keys[at].waiting);
        if let Some(remote) = remote {
            (self.keys[at].state, self.keys[at].remote) = (KeyState::Valid, remote);
            self.queue.extend(waiting);
        } else {
            self.keys[at].state = KeyState::Stopped(true);
            waiting.into_iter().for_each(|number| self.end(number, Err(WriteError::Revoked)));
        }
        Ok(())
    }

    /// The peer ends the access by the key of that id.
    ///
    /// # Errors
    /// It is not one that was checked.
    pub(crate) fn stop(&mut self, id: u64, frames: &mut Vec<Frame>) -> Result<(), String> {
        let is_it = |known: &KnownKey| known.key.id() == id && known.state == KeyState::Valid;
        let Some(at) = self.keys.iter().position(is_it) else {
            return Err("it stopped a key that was not in use".to_owned());
        };
        self.keys[at].state = KeyState::Stopped(false);
        for number in 0..self.writes.len() as u16 {
            let Some(write) =
                self.writes[usize::from(number)].as_mut().filter(|write| write.key == Some(at) && !write.over)
            else {
                continue;
            };
            if write.posted == 0 {
                self.end(number, Err(WriteError::Revoked));
            } else {
                (write.over, write.revoked) = (true, true);
                frames.push(Frame::Split {
                    slot: number,
                    turn: write.turn,
                    parts: write.posted,
                    dropped: true,
                    imm: 0,
                });
            }
        }
        let writes = &self.writes;
        self.queue.retain(|number| writes[usize::from(*number)].as_ref().is_some_and(|write| !write.over));
        self.quiet(at, frames);
        Ok(())
    }

    /// Confirms that a key has stopped, once that is so.
    fn quiet(&mut self, key: usize, frames: &mut Vec<Frame>) {
        let known = &mut self.keys[key];
        if known.state == KeyState::Stopped(false) && known.active == 0 {
            known.state = KeyState::Stopped(true);
            frames.push(Frame::Stopped(known.key.id()));
        }
    }

    /// The next part to post, unless the peer has no room for it.
    pub(crate) fn next(&self, cut: Cut) -> Option<Part> {
        if self.unacknowledged >= self.grant {
            return None;
        }
        let number = *self.queue.front()?;
        let write = self.writes[usize::from(number)].as_ref()?;
        let (mut extents, mut count, mut len, mut skip) = ([NONE; GATHER], 0, 0, write.sent);
        for extent in &write.from[..write.extents] {
            let part = extent.part(skip, cut.piece - len);
            skip = skip.saturating_sub(extent.len);
            if part.len > 0 {
                extents[count] = part;
                (count, len) = (count + 1, len + part.len);
            }
            if len == cut.piece || count == cut.gather.min(GATHER) {
                break;
            }
        }
        let turn = if write.posted == 0 { self.turns[usize::from(number)].wrapping_add(1) } else { write.turn };
        let word = (!write.whole).then(|| Word::Part { slot: number, turn, part: write.posted }.encode());
        let to = write.key.map_or(write.to, |key| self.keys[key].remote);
        let at = write.at + write.sent as u64;
        Some(Part { write: number, extents, count, len, to, at, word })
    }

    /// The word that a part goes with. For a whole write: call it once, at its post.
    pub(crate) fn word(&mut self, part: &Part) -> u32 {
        part.word.unwrap_or_else(|| {
            let imm = self.writes[usize::from(part.write)].as_ref().map(|write| write.imm);
            imm.map_or(0, |imm| Word::Write { imm, mark: self.toggles.next(imm) }.encode())
        })
    }

    /// Takes back the word of a part that was not posted.
    pub(crate) fn unpost(&mut self, part: &Part) {
        if part.word.is_none()
            && let Some(write) = &self.writes[usize::from(part.write)]
        {
            self.toggles.next(write.imm);
        }
    }

    /// That part was posted, with that word.
    pub(crate) fn posted(&mut self, part: &Part, word: u32, frames: &mut Vec<Frame>) {
        let number = usize::from(part.write);
        let Some(write) = self.writes[number].as_mut() else { return };
        self.unacknowledged += 1;
        if write.posted == 0
            && let Some(key) = write.key
        {
            self.keys[key].active += 1;
        }
        if write.whole {
            self.direct.push_back((word, part.write));
        } else if write.posted == 0 {
            self.turns[number] = self.turns[number].wrapping_add(1);
            write.turn = self.turns[number];
        }
        write.posted += 1;
        write.sent += part.len;
        if write.sent >= write.len {
            write.over = true;
            self.queue.pop_front();
            if !write.whole {
                frames.push(Frame::Split {
                    slot: part.write,
                    turn: write.turn,
                    parts: write.posted,
                    dropped: false,
                    imm: Word::Write { imm: write.imm, mark: 0 }.encode(),
                });
            }
        }
    }

    /// The provider is done with a part of that write.
    pub(crate) fn completed(&mut self, number: u16, frames: &mut Vec<Frame>) {
        if let Some(write) = self.writes.get_mut(usize::from(number)).and_then(Option::as_mut) {
            write.completed += 1;
            if write.key.is_none() && write.over && write.completed == write.posted && !write.reported {
                write.reported = true;
                self.ended.push_back((write.token, Ok(())));
            }
            self.finish(number, frames);
        }
    }

    /// The peer has counted the write of that word.
    ///
    /// # Errors
    /// There is no such write.
    pub(crate) fn acknowledged(&mut self, word: u32, frames: &mut Vec<Frame>) -> Result<(), String> {
        let number = match Word::decode(word) {
            Word::Write { .. } => {
                let at = self.direct.iter().position(|(known, _)| *known == word);
                at.and_then(|at| self.direct.remove(at)).map(|(_, number)| number)
            }
            Word::Part { slot, turn, part: 0 } => {
                let write = self.writes.get(usize::from(slot)).and_then(Option::as_ref);
                write.filter(|write| !write.whole && write.over && write.turn == turn && !write.acked).map(|_| slot)
            }
            _ => None,
        };
        let write = number.and_then(|number| self.writes[usize::from(number)].as_mut());
        let (Some(number), Some(write)) = (number, write) else {
            return Err("it counted a write that was not posted".to_owned());
        };
        write.acked = true;
        self.acks += 1;
        self.unacknowledged -= usize::from(write.posted).min(self.unacknowledged);
        self.finish(number, frames);
        Ok(())
    }

    fn finish(&mut self, number: u16, frames: &mut Vec<Frame>) {
        let Some(write) = &self.writes[usize::from(number)] else { return };
        if write.over && write.acked && write.completed == write.posted {
            let (key, revoked) = (write.key, write.revoked);
            self.end(number, if revoked { Err(WriteError::Revoked) } else { Ok(()) });
            if let Some(key) = key {
                self.keys[key].active -= 1;
                self.quiet(key, frames);
            }
        }
    }

    fn end(&mut self, number: u16, result: Result<(), WriteError>) {
        if let Some(write) = self.writes[usize::from(number)].take() {
            self.free.push(number);
            if !write.reported {
                self.ended.push_back((write.token, result));
            }
        }
    }

    /// The peer has counted that number of writes, the last by these words, and counts no more: those whose acknowledgement
    /// was lost have arrived.
    ///
    /// # Errors
    /// There are no such writes.
    pub(crate) fn settle(&mut self, counted: u64, words: &[u32]) -> Result<(), String> {
        let missed = counted.checked_sub(self.acks).and_then(|missed| usize::try_from(missed).ok());
        let Some(missed) = missed.and_then(|missed| words.len().checked_sub(missed)) else {
            return Err(format!("it counted {counted} writes, of which {} were acknowledged", self.acks));
        };
        words[missed..].iter().try_for_each(|word| self.acknowledged(*word, &mut Vec::new()))
    }

    /// Ends all writes: the peer is lost. Those that it has counted have arrived, whether the provider is done or not.
    pub(crate) fn lose(&mut self) {
        for number in 0..self.writes.len() as u16 {
            let Some(write) = &self.writes[usize::from(number)] else { continue };
            let result = match (write.acked, write.revoked) {
                (false, _) => Err(WriteError::Lost),
                (true, true) => Err(WriteError::Revoked),
                (true, false) => Ok(()),
            };
            self.end(number, result);
        }
        self.queue.clear();
        self.direct.clear();
    }

    /// The next write that has ended.
    pub(crate) fn take_ended(&mut self) -> Option<(u64, Result<(), WriteError>)> {
        self.ended.pop_front()
    }

    /// Writes were posted that have not ended.
    pub(crate) fn is_waiting(&self) -> bool {
        self.unacknowledged > 0
    }

    /// No part is left to be posted.
    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// The write of that number has the next part.
    pub(crate) fn is_next(&self, write: u16) -> bool {
        self.queue.front() == Some(&write)
    }

    /// A part could be posted.
    pub(crate) fn is_ready(&self) -> bool {
        !self.queue.is_empty() && self.unacknowledged < self.grant
    }
}

/// The longest write that `cut` allows.
pub(crate) fn longest(cut: Cut) -> usize {
    // An extent's end may cut a part short.
    cut.piece.saturating_mul(usize::from(PARTS_MAX) - GATHER).min(1 << 30)
}

#[cfg(test)]
mod tests {
    use crossrail_transport::placing::Counter;

    use super::*;

    const CUT: Cut = Cut { gather: 2, piece: 100 };

    fn key(id: u64) -> Key {
        Key::new(id, 1 << 20)
    }

    fn valid_at(id: u64) -> Option<Remote> {
        Some(Remote { key: id * 10, base: 0 })
    }

    fn imm(piece: u16) -> Imm {
        Imm { counter: Counter(1), piece }
    }

    fn queue(out: &mut Outgoing, id: u64, lens: &[usize], token: u64, frames: &mut Vec<Frame>) {
        let from: Vec<Extent> = lens.iter().map(|len| Extent { at: 4096, len: *len, gpu: None }).collect();
        let len = lens.iter().sum();
        assert!(out.queue(&from, (len, &key(id), 8), imm(token as u16), token, (CUT, frames)));
    }

    fn valid(id: u64) -> (Outgoing, Vec<Frame>) {
        let (mut out, mut frames) = (Outgoing::new(PEER_WRITES), Vec::new());
        queue(&mut out, id, &[], 99, &mut frames);
        assert_eq!(frames, [Frame::Check(key(id).0)]);
        assert_eq!(out.next(CUT), None, "not before the peer's answer");
        out.checked(id, valid_at(id)).expect("asked");
        let words = post(&mut out, &mut frames);
        out.completed(0, &mut frames);
        out.acknowledged(words[0], &mut frames).expect("posted");
        assert_eq!(out.take_ended(), Some((99, Ok(()))));
        frames.clear();
        (out, frames)
    }

    fn post(out: &mut Outgoing, frames: &mut Vec<Frame>) -> Vec<u32> {
        let mut words = Vec::new();
        while let Some(part) = out.next(CUT) {
            words.push(out.word(&part));
            out.posted(&part, words[words.len() - 1], frames);
        }
        words
    }

    #[test]
    fn a_write_is_cut_at_extents_and_pieces() {
        let (mut out, mut frames) = valid(1);
        queue(&mut out, 1, &[60, 0, 50, 130, 1], 7, &mut frames);
        let mut cuts = Vec::new();
        while let Some(part) = out.next(CUT) {
            let word = out.word(&part);
            out.posted(&part, word, &mut frames);
            cuts.push((part.at, part.len, part.count));
            assert_eq!(
                (part.to, Word::decode(word)),
                (Remote { key: 10, base: 0 }, Word::Part { slot: 0, turn: 1, part: cuts.len() as u16 - 1 },)
            );
        }
        assert_eq!(cuts, [(8, 100, 2), (108, 100, 2), (208, 41, 2)]);
        let imm = Word::Write { imm: imm(7), mark: 0 }.encode();
        assert_eq!(frames, [Frame::Split { slot: 0, turn: 1, parts: 3, dropped: false, imm }]);
        (0..3).for_each(|_| out.completed(0, &mut frames));
        assert_eq!(out.take_ended(), None, "not counted yet");
        out.acknowledged(Word::Part { slot: 0, turn: 1, part: 0 }.encode(), &mut frames).expect("posted");
        assert_eq!(out.take_ended(), Some((7, Ok(()))));
        assert!(!out.is_waiting());
    }

    #[test]
    fn uses_of_a_piece_alternate_and_end_in_order() {
        let (mut out, mut frames) = valid(1);
        for token in [5, 5, 5] {
            queue(&mut out, 1, &[10], token, &mut frames);
        }
        let part = out.next(CUT).expect("room");
        let first = out.word(&part);
        out.unpost(&part);
        let words = post(&mut out, &mut frames);
        assert_eq!((words[0], words[2]), (first, first));
        assert_ne!(words[0], words[1]);
        for (word, write) in [(words[0], 0), (words[1], 1), (words[2], 2)] {
            out.acknowledged(word, &mut frames).expect("posted");
            out.completed(write, &mut frames);
            assert_eq!(out.take_ended(), Some((5, Ok(()))));
        }
        assert!(out.acknowledged(words[0], &mut frames).is_err(), "again");
        assert!(out.acknowledged(Word::Frame(1).encode(), &mut frames).is_err());
    }

    #[test]
    fn a_stopped_key_is_confirmed_once_its_writes_were_counted() {
        let (mut out, mut frames) = valid(4);
        for (token, len) in [(1, 10), (2, 250), (3, 10)] {
            queue(&mut out, 4, &[len], token, &mut frames);
        }
        let mut words = Vec::new();
        for _ in 0..2 {
            let part = out.next(CUT).expect("room");
            words.push(out.word(&part));
            out.posted(&part, words[words.len() - 1], &mut frames);
        }
        out.stop(4, &mut frames).expect("in use");
        assert_eq!(out.next(CUT), None);
        let turn = 1;
        let Word::Part { slot, .. } = Word::decode(words[1]) else { panic!("a part") };
        assert_eq!(frames, [Frame::Split { slot, turn, parts: 1, dropped: true, imm: 0 }]);
        assert_eq!(out.take_ended(), Some((3, Err(WriteError::Revoked))));
        frames.clear();
        out.acknowledged(words[0], &mut frames).expect("posted");
        out.acknowledged(words[1], &mut frames).expect("posted");
        out.completed(0, &mut frames);
        assert_eq!((out.take_ended(), frames.len()), (Some((1, Ok(()))), 0));
        out.completed(slot, &mut frames);
        assert_eq!(out.take_ended(), Some((2, Err(WriteError::Revoked))));
        assert_eq!(frames, [Frame::Stopped(4)]);
        queue(&mut out, 4, &[1], 9, &mut frames);
        assert_eq!(out.take_ended(), Some((9, Err(WriteError::Revoked))));
        assert!(out.stop(4, &mut frames).is_err(), "again");
    }

    #[test]
    fn what_the_peer_refuses_ends_and_what_it_has_no_room_for_waits() {
        let (mut out, mut frames) = valid(1);
        queue(&mut out, 2, &[10], 3, &mut frames);
        queue(&mut out, 2, &[10], 4, &mut frames);
        assert!(out.checked(1, valid_at(1)).is_err(), "asked about another");
        queue(&mut out, 3, &[10], 5, &mut frames);
        out.checked(3, None).expect("asked");
        assert_eq!(out.take_ended(), Some((5, Err(WriteError::Revoked))));
        out.grant = 2;
        for token in 10..14 {
            queue(&mut out, 1, &[10], token, &mut frames);
        }
        let words = post(&mut out, &mut frames);
        assert_eq!(words.len(), 2);
        out.acknowledged(words[0], &mut frames).expect("posted");
        assert_eq!(post(&mut out, &mut frames).len(), 1);
        out.lose();
        let lost = std::iter::from_fn(|| out.take_ended()).filter(|(_, result)| *result == Err(WriteError::Lost));
        assert_eq!(lost.count(), 5, "the write that was counted has arrived");
    }

    #[test]
    fn writes_whose_acknowledgement_was_lost_have_arrived() {
        let (mut out, mut frames) = valid(1);
        let Word::Write { imm: first, .. } = Word::decode(words_of(&mut out, &mut frames)) else { panic!("a write") };
        assert_eq!(first.piece, 10);
        for token in 11..14 {
            queue(&mut out, 1, &[10], token, &mut frames);
        }
        queue(&mut out, 1, &[250], 14, &mut frames);
        let words = post(&mut out, &mut frames);
        // The first of all was the key's; that of token 11 is acknowledged, those of 10, 12 and 14 were counted as well.
        out.acknowledged(words[0], &mut frames).expect("posted");
        let Word::Part { slot, turn, .. } = Word::decode(words[3]) else { panic!("a part") };
        let whole = Word::Part { slot, turn, part: 0 }.encode();
        let counted = [words[0], Word::Write { imm: first, mark: 1 }.encode(), words[1], whole];
        assert!(out.settle(1, &counted).is_err(), "fewer than were acknowledged");
        assert!(out.settle(9, &counted).is_err(), "more than it names");
        out.settle(5, &counted).expect("posted");
        out.lose();
        let mut ended: Vec<_> = std::iter::from_fn(|| out.take_ended()).collect();
        ended.sort_by_key(|(token, _)| *token);
        let lost = Err(WriteError::Lost);
        assert_eq!(ended, [(10, Ok(())), (11, Ok(())), (12, Ok(())), (13, lost), (14, Ok(()))]);
    }

    /// One write of token 10, posted; its word.
    fn words_of(out: &mut Outgoing, frames: &mut Vec<Frame>) -> u32 {
        queue(out, 1, &[10], 10, frames);
        post(out, frames)[0]
    }
}
