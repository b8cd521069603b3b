//! For the fuzz target: the state of one end against a peer that sends anything, without a provider.

use std::collections::HashMap;

use crossrail_transport::placing::{Counter, Counters, Extent, Imm, Key, Seen};

use crate::count::Parts;
use crate::outgoing::{Cut, Outgoing};
use crate::ring::{Inbox, Outbox};
use crate::wire::{Frame, GREETING, INTRODUCTION, Introduction, PEER_WRITES, Remote, SLOT, Word};

const CUT: Cut = Cut { gather: 2, piece: 100 };

/// Bytes taken from the front; zeros once they have run out.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn fill(&mut self, into: &mut [u8]) {
        let len = into.len().min(self.0.len());
        let (taken, rest) = self.0.split_at(len);
        into[..len].copy_from_slice(taken);
        self.0 = rest;
    }

    fn byte(&mut self) -> u8 {
        let mut byte = [0];
        self.fill(&mut byte);
        byte[0]
    }
}

/// An introduction; then a peer's immediates and frames, interleaved with local writes, posts and completions. Panics
/// when a write ends twice or never, an immediate is reported that was not permitted, or what is queued for the peer grows
/// without bounds.
pub fn peer(input: &[u8]) {
    let mut input = Input(input);
    introduction(&mut input);
    let mut end = End {
        out: Outgoing::new(64),
        outbox: Outbox::default(),
        inbox: Inbox::default(),
        parts: Parts::default(),
        counters: Counters::default(),
        seen: Seen::default(),
        posted: Vec::new(),
        ended: HashMap::new(),
        queued: 0,
    };
    let _ = end.counters.open(9);
    let mut frames = Vec::new();
    while !input.0.is_empty() {
        let result = end.step(&mut input, &mut frames);
        // The peer's frame is answered by a few: at most one for each write, and one for each key.
        assert!(frames.len() <= PEER_WRITES + 2, "{} frames at once", frames.len());
        frames.drain(..).for_each(|frame| end.outbox.push(frame));
        while end.outbox.front().is_some() {
            let slot = end.outbox.posted();
            end.outbox.completed(slot);
        }
        end.report();
        if result.is_err() {
            break;
        }
    }
    end.out.lose();
    end.report();
    assert_eq!(end.ended.len() as u64, end.queued, "a write that has not ended");
}

fn introduction(input: &mut Input<'_>) {
    let mut bytes = [0; INTRODUCTION];
    input.fill(&mut bytes);
    if let Ok(known) = Introduction::decode(&bytes) {
        assert!(known.grant as usize <= PEER_WRITES && !known.name.is_empty());
        // A name that is not UTF-8 is replaced, and may then be longer.
        if known.provider.is_ascii() {
            assert_eq!(Introduction::decode(&known.encode()), Ok(known));
        }
    }
}

struct End {
    out: Outgoing,
    outbox: Outbox,
    inbox: Inbox,
    parts: Parts,
    counters: Counters,
    seen: Seen,
    /// Writes with parts that the provider has not completed.
    posted: Vec<u16>,
    ended: HashMap<u64, bool>,
    queued: u64,
}

impl End {
    fn step(&mut self, input: &mut Input<'_>, frames: &mut Vec<Frame>) -> Result<(), String> {
        match input.byte() {
            kind @ 0..=63 => {
                let mut slot = [0; SLOT];
                let len = usize::from(input.byte()) + usize::from(kind & 1) * 256;
                input.fill(&mut slot[..len]);
                let frame = Frame::decode(&slot)?;
                let mut bytes = Vec::new();
                frame.encode(&mut bytes);
                bytes.resize(SLOT, 0);
                assert_eq!(Frame::decode(&bytes).as_ref(), Ok(&frame));
                self.frame(frame, frames)
            }
            64..=127 => {
                let mut word = [0; 4];
                input.fill(&mut word);
                self.word(u32::from_le_bytes(word))
            }
            kind @ 128..=191 => {
                let (key, len) = (Key::new(u64::from(kind & 3), 1 << 20), usize::from(input.byte()) * 3);
                let from = [Extent { at: 4096, len, gpu: None }, Extent { at: 1 << 20, len: len / 2, gpu: None }];
                let imm = Imm { counter: Counter(u32::from(kind >> 2 & 3)), piece: (self.queued % 4096) as u16 };
                let size = (len + len / 2, &key, u64::from(input.byte()));
                if self.out.queue(&from, size, imm, self.queued, (CUT, frames)) {
                    self.queued += 1;
                }
                Ok(())
            }
            192..=223 => {
                if let Some(part) = self.out.next(CUT) {
                    assert!(part.len <= CUT.piece && part.count <= CUT.gather);
                    let word = self.out.word(&part);
                    self.out.posted(&part, word, frames);
                    self.posted.push(part.write);
                }
                Ok(())
            }
            _ => {
                if !self.posted.is_empty() {
                    let at = usize::from(input.byte()) % self.posted.len();
                    let write = self.posted.swap_remove(at);
                    self.out.completed(write, frames);
                }
                Ok(())
            }
        }
    }

    fn word(&mut self, word: u32) -> Result<(), String> {
        match Word::decode(word) {
            Word::Write { imm, mark } => {
                self.counters.check(imm)?;
                assert!(imm.counter.0 == 0 && imm.piece < 9, "{imm} was not permitted");
                let is_new = self.seen.is_new(imm, mark);
                assert!(!(is_new && self.seen.is_new(imm, mark)), "{imm} counts twice");
                Ok(())
            }
            Word::Frame(low) => {
                self.inbox.arrived(low)?;
                while self.inbox.front().is_some() {
                    self.inbox.taken();
                }
                Ok(())
            }
            Word::Credit(low) => self.outbox.credit(low),
            Word::Part { slot, turn, part } => self.parts.arrived(slot, turn, part).map(|_| ()),
        }
    }

    fn frame(&mut self, frame: Frame, frames: &mut Vec<Frame>) -> Result<(), String> {
        match frame {
            Frame::Acks(words) => words.into_iter().try_for_each(|word| self.out.acknowledged(word, frames)),
            Frame::Split { slot, turn, parts, dropped, imm } => {
                let whole = self.parts.expect((slot, turn), parts, (!dropped).then_some(imm))?;
                assert!(whole.is_none_or(|whole| whole.imm.is_none() == dropped));
                Ok(())
            }
            Frame::Checked { id, remote } => self.out.checked(id, remote),
            Frame::Stop(id) => self.out.stop(id, frames),
            // Those need the registrations of a provider.
            Frame::Check(_) | Frame::Stopped(_) => Ok(()),
        }
    }

    fn report(&mut self) {
        while let Some((token, result)) = self.out.take_ended() {
            assert!(token < self.queued, "a write that was not queued has ended");
            assert!(self.ended.insert(token, result.is_ok()).is_none(), "write {token} has ended twice");
        }
    }
}

/// Inputs to begin with, by name: what two ends send each other in the usual course.
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let introduction = Introduction {
        provider: "efa".to_owned(),
        name: vec![7; 32],
        ring: Remote { key: 77, base: 4096 },
        grant: PEER_WRITES as u32,
        process: 9,
        greeting: [5; GREETING],
    };
    let begin = introduction.encode().to_vec();
    let frame = |frame: Frame| {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        [vec![0, bytes.len() as u8], bytes].concat()
    };
    let word = |word: Word| [vec![64], word.encode().to_le_bytes().to_vec()].concat();
    let (asked, queue, post, complete) =
        (Frame::Checked { id: 0, remote: Some(Remote { key: 0, base: 0 }) }, [128, 10, 0], [192], [224, 0]);
    let imm = Imm { counter: Counter(0), piece: 0 };
    let ack = |mark| frame(Frame::Acks(vec![Word::Write { imm, mark }.encode()]));
    let written = [&queue[..], &frame(asked.clone()), &post, &complete, &ack(1)].concat();
    let split = [128, 100, 0];
    let part = |part| word(Word::Part { slot: 0, turn: 1, part });
    let split_ack = frame(Frame::Acks(vec![Word::Part { slot: 0, turn: 1, part: 0 }.encode()]));
    let announced = frame(Frame::Split { slot: 0, turn: 1, parts: 2, dropped: false, imm: 3 });
    let all: [(&'static str, Vec<u8>); 7] = [
        ("introduction", Vec::new()),
        ("written", written),
        ("split", [&split[..], &frame(asked.clone()), &post.repeat(5), &complete.repeat(5), &split_ack].concat()),
        ("stopped", [&split[..], &frame(asked.clone()), &post, &frame(Frame::Stop(0)), &complete, &split_ack].concat()),
        ("refused", [&queue[..], &frame(Frame::Checked { id: 0, remote: None })].concat()),
        ("parts", [part(1), announced, part(0), part(0)].concat()),
        ("arrived", [word(Word::Write { imm, mark: 1 }), word(Word::Frame(0)), word(Word::Credit(1))].concat()),
    ];
    all.into_iter().map(|(name, rest)| (name, [&begin[..], &rest].concat())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_course_is_no_error() {
        for (name, seed) in seeds() {
            eprintln!("{name}");
            peer(&seed);
        }
    }

    #[test]
    fn writes_of_the_usual_course_end_well() {
        let seed = &seeds()[1].1;
        let mut input = Input(&seed[INTRODUCTION..]);
        let mut out = Outgoing::new(64);
        let (mut frames, key) = (Vec::new(), Key::new(0, 1 << 20));
        let imm = Imm { counter: Counter(0), piece: 0 };
        assert_eq!(input.byte(), 128);
        assert!(out.queue(&[], (0, &key, 0), imm, 5, (CUT, &mut frames)));
        out.checked(0, Some(Remote { key: 0, base: 0 })).expect("asked");
        let part = out.next(CUT).expect("a part");
        let word = out.word(&part);
        out.posted(&part, word, &mut frames);
        out.completed(part.write, &mut frames);
        out.acknowledged(word, &mut frames).expect("posted");
        assert_eq!(out.take_ended(), Some((5, Ok(()))));
    }
}
