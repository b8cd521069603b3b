use std::collections::{BTreeMap, VecDeque};

use crossrail_proto::{Body, Memory, Out};
use crossrail_types::{Head, LaneId};

use crate::input::Input;
use crate::protocol::{End, LANES};

/// Most frames that wait between the ends on one lane, one way.
const MOST_WAITING: usize = 256;

/// Two real ends connected by two lanes, and a man in the middle who, as the input directs, delivers, drops,
/// duplicates, reorders, truncates, changes or redirects frames. Checks the invariants of [`protocol`](crate::protocol)
/// at either end, and, until a frame is tampered with, that none is refused and that all bytes arrive at their place.
pub fn ends(input: &[u8]) {
    let mut input = Input::new(input);
    let kind = input.byte();
    let mut pair = Pair::new(kind);
    while !input.is_empty() && !pair.is_over() {
        pair.step(&mut input);
    }
    pair.finish();
}

/// A frame on its way.
#[derive(Clone)]
struct Frame {
    head: Head,
    bytes: Vec<u8>,
    /// Which bytes of its sender's it carries.
    from: Option<(Memory, u64)>,
}

impl Frame {
    fn new(out: &Out) -> Frame {
        let (bytes, from) = match out.body {
            Body::Inline { bytes, len } => (bytes[..usize::from(len)].to_vec(), None),
            Body::Memory { memory, offset, .. } => (Vec::new(), Some((memory, offset))),
            Body::None => (Vec::new(), None),
        };
        Frame { head: out.head, bytes, from }
    }
}

struct Pair {
    ends: [End; 2],
    /// Frames by sender and lane.
    waiting: [[VecDeque<Frame>; LANES]; 2],
    /// The lanes as both ends had them when they last agreed.
    lanes: [[LaneId; LANES]; 2],
    /// No frame was touched.
    honest: bool,
    /// Whose bytes each operation receives, by receiving end.
    sources: [BTreeMap<(u32, u32), Memory>; 2],
}

/// The bits of an instruction: what, which end, which lane, how often.
fn parts(instruction: u8) -> (u8, usize, usize, usize) {
    let bit = |at: u8| usize::from(instruction >> at & 1);
    (instruction & 7, bit(3), bit(4), usize::from(instruction >> 5) + 1)
}

impl Pair {
    fn new(kind: u8) -> Pair {
        let ends = [End::new(kind), End::new(kind)];
        let lanes = [ends[0].lanes, ends[1].lanes];
        Pair { ends, waiting: Default::default(), lanes, honest: true, sources: Default::default() }
    }

    fn is_over(&self) -> bool {
        self.ends.iter().all(|end| end.over)
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let (what, who, lane, times) = parts(input.byte());
        match what {
            0 => self.pass(),
            1 => self.carry(who, lane, times),
            2 => self.deliver(who, lane, times),
            3 => self.meddle(who, lane, input),
            _ => self.act(who, lane, if what == 7 { 6 } else { what }, input),
        }
    }

    /// What an end does of its own accord; `what` as in [`End::step`].
    fn act(&mut self, who: usize, lane: usize, what: u8, input: &mut Input<'_>) {
        if self.ends[who].over {
            return;
        }
        let rest = input.rest();
        let mut bytes = vec![what | (lane as u8) << 3];
        bytes.extend_from_slice(rest);
        let mut own = Input::new(&bytes);
        self.ends[who].step(&mut own);
        let used = bytes.len() - own.left();
        input.bytes(used.saturating_sub(1));
        self.settle();
    }

    /// What the lane of an end carries next joins the frames that wait.
    fn carry(&mut self, who: usize, lane: usize, most: usize) {
        if self.ends[who].over || self.waiting[who][lane].len() + most > MOST_WAITING {
            return;
        }
        let action = 7 | (lane as u8) << 3 | (most as u8 - 1) << 4;
        let frames = self.ends[who].step(&mut Input::new(&[action]));
        self.waiting[who][lane].extend(frames.iter().map(Frame::new));
        self.settle();
    }

    fn deliver(&mut self, who: usize, lane: usize, most: usize) {
        for _ in 0..most {
            let Some(frame) = self.waiting[who][lane].pop_front() else { return };
            let other = 1 - who;
            if self.ends[other].over {
                return;
            }
            let mut bytes = vec![(lane as u8) << 3];
            bytes.extend_from_slice(&frame.head.0);
            bytes.extend_from_slice(&frame.bytes);
            self.ends[other].step(&mut Input::new(&bytes));
            if self.honest {
                self.check(other, &frame);
            }
            self.settle();
        }
    }

    /// Checks that an untampered frame was accepted and its payload placed correctly.
    fn check(&mut self, at: usize, frame: &Frame) {
        let end = &self.ends[at];
        assert_eq!(end.refused, None, "an honest frame is refused: {:?}", frame.head);
        let (Some((source, from)), Some((memory, to, _))) = (frame.from, end.placed) else { return };
        assert_eq!(from, to, "bytes of {source:?} in another place of {memory:?}");
        if let Memory::Op(op) = memory {
            let known = *self.sources[at].entry((op.index, op.generation)).or_insert(source);
            assert_eq!(known, source, "bytes of two operations in {op}");
        }
    }

    /// A lane that has ended at one end ends at the other, and with it what it carried.
    fn settle(&mut self) {
        for lane in 0..LANES {
            let ended = [0, 1].map(|who| self.ends[who].lanes[lane] != self.lanes[who][lane]);
            if !ended[0] && !ended[1] {
                continue;
            }
            for (who, ended) in ended.into_iter().enumerate() {
                self.waiting[who][lane].clear();
                if !ended && !self.ends[who].over {
                    self.ends[who].replace_lane(lane);
                }
                self.lanes[who][lane] = self.ends[who].lanes[lane];
            }
        }
    }

    /// One round of sending and delivering everything in both directions.
    fn pass(&mut self) {
        for who in 0..2 {
            if self.ends[who].has_job() {
                self.act(who, 0, 6, &mut Input::new(&[7, 0]));
            }
            self.act(who, 0, 6, &mut Input::new(&[0]));
            for lane in 0..LANES {
                self.carry(who, lane, 4);
                self.deliver(who, lane, MOST_WAITING);
            }
        }
    }

    /// Tampers with the next frame.
    fn meddle(&mut self, who: usize, lane: usize, input: &mut Input<'_>) {
        let (how, place) = (input.byte(), usize::from(input.byte()));
        let waiting = &mut self.waiting[who];
        let Some(mut frame) = waiting[lane].pop_front() else { return };
        self.honest = false;
        match how & 7 {
            0 => return,
            1 => waiting[lane].push_front(frame.clone()),
            2 => {
                let at = (place + 1).min(waiting[lane].len());
                return waiting[lane].insert(at, frame);
            }
            3 => return waiting[1 - lane].push_front(frame),
            4 => {
                let len = frame.head.payload_len();
                let shorter = (u64::from(len) * place as u64 / 256) as u32;
                frame.head.0[4..8].copy_from_slice(&shorter.to_le_bytes());
                frame.bytes.truncate(shorter as usize);
            }
            5 if !frame.bytes.is_empty() => {
                let at = place % frame.bytes.len();
                frame.bytes[at] ^= 1 << (how >> 5);
            }
            6 => {
                // It comes once more, when other things have happened.
                waiting[lane].push_back(frame.clone());
            }
            _ => {
                let at = place % frame.head.0.len();
                frame.head.0[at] ^= 1 << (how >> 5);
            }
        }
        waiting[lane].push_front(frame);
    }

    fn finish(self) {
        let [one, other] = self.ends;
        one.finish();
        other.finish();
    }
}

/// The instructions that let two ends follow a script, each action with what follows from it.
pub(crate) fn script(kind: u8, script: &[(usize, &[u8])]) -> Vec<u8> {
    let mut bytes = vec![kind];
    for (who, action) in script {
        bytes.push(action[0] & 7 | (*who as u8) << 3 | (action[0] >> 3 & 1) << 4);
        bytes.extend_from_slice(&action[1..]);
        // Two passes whole; one with a frame at a time, so that mutations find something on its way.
        bytes.extend_from_slice(&[0, 0, 1, 2, 1 | 8, 2 | 8, 1 | 16, 2 | 16, 1 | 8 | 16, 2 | 8 | 16, 0, 0]);
    }
    bytes
}
