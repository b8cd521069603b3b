//! Words that announce rows, over two lanes that deliver in any order between them and die on the way. A word that is
//! placed when its own bytes arrive announces rows that are still in flight: its reader sums what was there before.
//! What expert buffers go by, counts of whole writes and the number of writes in a header, never does.

use std::collections::{BTreeMap, VecDeque};

use crossrail_proto::{
    Access, Body, Config, Event, Host, LaneSpec, Matcher, Memory, Operation, Out, Peer, Placing, RegionFault,
    RegionKey, RegionRef, Regions, Time,
};
use crossrail_types::{EndpointId, LaneId, OpId};

#[path = "sim/rng.rs"]
#[allow(dead_code)]
mod rng;

use rng::Rng;

const SEEDS: u64 = 150;
const TURNS: u64 = 6;
const ROWS: usize = 4;
/// Some chunks long: where rows go in chunks, each goes over both lanes.
const ROW: usize = 3000;
/// Where the header lies, behind the rows: operation, and row writes since the connection.
const HEADER: usize = ROWS * ROW;
/// Where the word lies.
const WORD: usize = HEADER + 16;
const HEAP: usize = WORD + 8;
/// Immediate values of the writes.
const IMM_ROWS: u32 = 1;
const IMM_HEADER: u32 = 2;

/// What makes the reader believe that a turn's rows are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// A word written after the rows, copied into the heap when its frame arrives. Broken on purpose.
    BareWord,
    /// The header's write is whole, whatever became of the rows. Broken on purpose.
    HeaderAlone,
    /// The header's write is whole, and as many row writes are as it says: the rule of expert buffers.
    CountsOfWholeWrites,
}

/// A frame, and its payload.
type Flying = (Out, Vec<u8>);

struct OneRegion;

impl Regions for OneRegion {
    fn resolve(&mut self, _: &RegionKey, offset: u64, len: u64, _: Access) -> Result<RegionRef, RegionFault> {
        match offset.checked_add(len) {
            Some(end) if end <= HEAP as u64 => Ok(RegionRef { index: 0, generation: 0 }),
            _ => Err(RegionFault::Bounds),
        }
    }

    fn alive(&self, _: RegionRef) -> bool {
        true
    }
}

/// What a row of a turn consists of.
fn value(turn: u64, row: usize) -> u8 {
    (turn as u8) * 16 + row as u8 + 1
}

fn sum(heap: &[u8]) -> u64 {
    heap[..HEADER].iter().map(|byte| u64::from(*byte)).sum()
}

/// Two ends: 0 writes, 1 has the heap.
struct World {
    rng: Rng,
    now: Time,
    peers: [Peer; 2],
    matchers: [Matcher; 2],
    lanes: [LaneId; 2],
    next_lane: u32,
    /// Whether rows go in one frame of the message stream, or in chunks that the other end asks for.
    eager_max: u32,
    /// In flight: lane, from which end.
    flying: [[VecDeque<Flying>; 2]; 2],
    /// The bytes of writes, by operation.
    sources: BTreeMap<u32, Vec<u8>>,
    open: usize,
    heap: Vec<u8>,
    /// Whole writes, by immediate.
    counts: [u64; 3],
}

impl World {
    fn new(seed: u64) -> World {
        let config = Config { chunk: 512, window: 4, lane_deadline: u64::MAX / 4, ..Config::default() };
        let mut world = World {
            rng: Rng::new(seed),
            now: Time(1),
            peers: [Peer::new(EndpointId(1), config.clone()), Peer::new(EndpointId(0), config)],
            matchers: [Matcher::new(), Matcher::new()],
            lanes: [LaneId(0); 2],
            next_lane: 0,
            eager_max: if seed.is_multiple_of(2) { 64 } else { 4096 },
            flying: Default::default(),
            sources: BTreeMap::new(),
            open: 0,
            heap: vec![0; HEAP],
            counts: [0; 3],
        };
        (0..2).for_each(|place| world.lane_up(place));
        world
    }

    fn lane_up(&mut self, place: usize) {
        self.lanes[place] = LaneId(self.next_lane);
        self.next_lane += 1;
        let spec = LaneSpec {
            id: self.lanes[place],
            reliable: false,
            messages: true,
            bulk: true,
            max_payload: 4096,
            eager_max: self.eager_max,
            whole_max: 0,
            counts: false,
            cost_ns: 1000,
        };
        self.peers.iter_mut().for_each(|peer| peer.lane_up(self.now, spec.clone()));
    }

    fn write(&mut self, bytes: Vec<u8>, offset: usize, imm: Option<u32>) {
        let index = self.sources.len() as u32;
        let (op, len) = (OpId { index, generation: 0 }, bytes.len() as u64);
        self.sources.insert(index, bytes);
        self.open += 1;
        let operation = Operation::Write { key: [0; 24], offset: offset as u64, imm };
        self.peers[0].start(self.now, op, operation, len, None, true);
    }

    /// Something happens: a lane takes a frame, delivers one, or dies.
    fn step(&mut self) {
        self.now.0 += 1000;
        let (place, end) = (self.rng.index(2), self.rng.index(2));
        if self.rng.one_in(400) {
            self.peers.iter_mut().for_each(|peer| peer.lane_down(self.now, self.lanes[place]));
            self.flying[place] = Default::default();
            self.lane_up(place);
        } else if self.rng.one_in(2) {
            self.carry(place, end);
        } else {
            self.deliver(place, end);
        }
        for end in 0..2 {
            if self.peers[end].timeout().is_some_and(|at| at <= self.now) {
                self.peers[end].on_timeout(self.now);
            }
            while let Some(event) = self.peers[end].event() {
                match event {
                    Event::Done { result, .. } => {
                        result.expect("the write succeeds");
                        self.open -= 1;
                    }
                    Event::Imm { imm, .. } => self.counts[imm as usize] += 1,
                    Event::Suspect { lane } => self.peers[end].lane_alive(self.now, lane),
                    Event::Broken { why } => panic!("broken: {why}"),
                    _ => {}
                }
            }
        }
    }

    fn carry(&mut self, place: usize, end: usize) {
        let Some(out) = self.peers[end].next(self.now, self.lanes[place]) else { return };
        let bytes = match out.body {
            Body::None => Vec::new(),
            Body::Inline { bytes, len } => bytes[..usize::from(len)].to_vec(),
            Body::Memory { memory: Memory::Op(op), offset, len } => {
                self.sources[&op.index][offset as usize..][..len as usize].to_vec()
            }
            Body::Memory { .. } => panic!("nothing is read"),
        };
        self.flying[place][end].push_back((out, bytes));
    }

    /// The next frame arrives at the other end, and is placed by a plain copy.
    fn deliver(&mut self, place: usize, from: usize) {
        let Some((out, bytes)) = self.flying[place][from].pop_front() else { return };
        let (to, lane) = (1 - from, self.lanes[place]);
        let mut host = Host { matcher: &mut self.matchers[to], regions: &mut OneRegion };
        let control = match self.peers[to].place(self.now, lane, &out.head, &mut host) {
            Placing::Memory { memory: Memory::Region { base, .. }, offset, .. } => {
                self.heap[(base + offset) as usize..][..bytes.len()].copy_from_slice(&bytes);
                Vec::new()
            }
            Placing::Control { .. } => bytes,
            Placing::Discard => return,
            other => panic!("placed elsewhere: {other:?}"),
        };
        self.peers[to].placed(self.now, lane, &control, &mut host).expect("an honest peer");
    }

    fn number(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.heap[at..at + 8].try_into().expect("eight bytes"))
    }

    fn believes(&self, rule: Rule, turn: u64) -> bool {
        let header = self.counts[IMM_HEADER as usize] == turn && self.number(HEADER) == turn;
        match rule {
            Rule::BareWord => self.number(WORD) == turn,
            Rule::HeaderAlone => header,
            Rule::CountsOfWholeWrites => header && self.counts[IMM_ROWS as usize] >= self.number(HEADER + 8),
        }
    }

    /// Rows, header and word of every turn. Turns of which the reader took a wrong sum.
    fn wrong_sums(&mut self, rule: Rule) -> u64 {
        let mut wrong = 0;
        for turn in 1..=TURNS {
            for row in 0..ROWS {
                self.write(vec![value(turn, row); ROW], row * ROW, Some(IMM_ROWS));
            }
            let header = [turn, turn * ROWS as u64].map(u64::to_le_bytes).concat();
            self.write(header, HEADER, Some(IMM_HEADER));
            self.write(turn.to_le_bytes().to_vec(), WORD, None);
            let right = (0..ROWS).map(|row| u64::from(value(turn, row)) * ROW as u64).sum::<u64>();
            let mut taken = None;
            for _ in 0..200_000 {
                if taken.is_some() && self.open == 0 {
                    break;
                }
                self.step();
                if taken.is_none() && self.believes(rule, turn) {
                    taken = Some(sum(&self.heap));
                }
            }
            assert_eq!(self.open, 0, "turn {turn}: writes are outstanding");
            wrong += u64::from(taken.expect("every turn is announced") != right);
        }
        wrong
    }
}

/// Turns with a wrong sum, of all that there were.
fn judge(rule: Rule) -> u64 {
    let wrong = (0..SEEDS).map(|seed| World::new(seed).wrong_sums(rule)).sum();
    println!("{rule:?}: {wrong} of {} sums are wrong", SEEDS * TURNS);
    wrong
}

#[test]
fn a_word_or_a_header_that_overtakes_its_rows_shows_wrong_sums() {
    assert!(judge(Rule::BareWord) > 0);
    assert!(judge(Rule::HeaderAlone) > 0);
}

#[test]
fn counts_of_whole_writes_never_show_a_wrong_sum() {
    assert_eq!(judge(Rule::CountsOfWholeWrites), 0);
}
