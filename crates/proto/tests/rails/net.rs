//! The model: two ends, and rails with a rate, a buffer and a latency.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use crossrail_proto::{
    Access, Body, Config, Event, Host, LaneSpec, Matcher, Operation, Peer, Placing, Receipt, RegionFault, RegionKey,
    RegionRef, Regions, Time,
};
use crossrail_types::{EndpointId, Head, LaneId, OpId};

pub(crate) const TOTAL: u64 = 64 << 20;
pub(crate) const GBIT: u64 = 125_000_000;
pub(crate) const LATENCY: u64 = 100_000;
/// What the sender's kernel takes before the wire does.
pub(crate) const BUFFER: u64 = 1 << 20;

/// One region, which every key names.
pub(crate) struct OneRegion;

impl Regions for OneRegion {
    fn resolve(&mut self, _: &RegionKey, _: u64, _: u64, _: Access) -> Result<RegionRef, RegionFault> {
        Ok(RegionRef { index: 0, generation: 0 })
    }

    fn lend(&mut self, name: u64, _: u64) -> Result<RegionRef, RegionFault> {
        Ok(RegionRef { index: name as u32, generation: 1 })
    }

    fn alive(&self, _: RegionRef) -> bool {
        true
    }
}

/// An operation of the first end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The second end receives it.
    Send,
    Write,
    Read,
    /// A put, which keeps the order of the stream.
    Put,
}

impl Kind {
    fn operation(self, index: u32) -> Operation {
        let key = [7; 24];
        match self {
            Kind::Send => Operation::Send { tag: 1 },
            Kind::Write => Operation::Write { key, offset: 0, imm: Some(index) },
            Kind::Read => Operation::Read { key, offset: 0 },
            Kind::Put => Operation::Put { name: u64::from(index), key },
        }
    }
}

pub(crate) struct Rail {
    /// Bytes per second.
    pub(crate) rate: u64,
    /// Bytes that the sender's kernel and the queue before the wire take.
    pub(crate) buffer: u64,
    /// When the last byte accepted so far, each way, has left.
    pub(crate) free: [u64; 2],
    /// What is in flight, each way, in order.
    pub(crate) flying: [VecDeque<(Head, Vec<u8>)>; 2],
    pub(crate) dead: bool,
}

pub(crate) struct Net {
    pub(crate) now: u64,
    pub(crate) peers: [Peer; 2],
    pub(crate) matchers: [Matcher; 2],
    pub(crate) rails: Vec<Rail>,
    /// When, which rail, from which end.
    pub(crate) arrivals: BinaryHeap<Reverse<(u64, usize, usize)>>,
    pub(crate) receipts: [Option<(u64, Receipt)>; 2],
    /// Bytes that chunks of finished operations brought, by lane.
    pub(crate) carried: Vec<u64>,
    /// Writes and puts whose bytes are in place, by index, in that order.
    pub(crate) arrived: Vec<u32>,
    /// Operations that have ended at each end.
    pub(crate) ended: [usize; 2],
    /// How often the ends look at a rail, in nanoseconds: everything that arrived meanwhile is found at once.
    pub(crate) looks: Vec<u64>,
    /// What a rail spends on each chunk, however short, in nanoseconds.
    pub(crate) per_chunk: u64,
}

impl Net {
    pub(crate) fn new(rates: &[u64]) -> Net {
        Net::with(rates, |peer, spec| peer.lane_up(Time(0), spec))
    }

    /// Connections of one rail, of which two carry chunks at first.
    pub(crate) fn of_one_rail(rates: &[u64]) -> Net {
        Net::with(rates, |peer, spec| {
            let place = (0, spec.id.0 as u16);
            peer.lane_up_among(Time(0), spec, place, 2);
        })
    }

    pub(crate) fn with(rates: &[u64], lane_up: impl Fn(&mut Peer, LaneSpec)) -> Net {
        let mut peers = [Peer::new(EndpointId(1), Config::default()), Peer::new(EndpointId(0), Config::default())];
        for peer in &mut peers {
            for lane in 0..rates.len() {
                let spec = LaneSpec {
                    id: LaneId(lane as u32),
                    reliable: false,
                    messages: true,
                    bulk: true,
                    max_payload: 8 << 20,
                    eager_max: 8 << 10,
                    whole_max: 0,
                    counts: false,
                    cost_ns: lane as u64,
                };
                lane_up(peer, spec);
            }
        }
        let rail =
            |rate: &u64| Rail { rate: *rate, buffer: BUFFER, free: [0; 2], flying: Default::default(), dead: false };
        Net {
            now: 0,
            peers,
            matchers: [Matcher::new(), Matcher::new()],
            rails: rates.iter().map(rail).collect(),
            arrivals: BinaryHeap::new(),
            receipts: [None, None],
            carried: vec![0; rates.len()],
            arrived: Vec::new(),
            ended: [0, 0],
            looks: vec![1; rates.len()],
            per_chunk: 0,
        }
    }

    /// Every rail with room takes what it is given; when one of them will next have room.
    pub(crate) fn pump(&mut self) -> Option<u64> {
        let mut next = None;
        for (at, rail) in self.rails.iter_mut().enumerate().filter(|(_, r)| !r.dead) {
            for end in 0..2 {
                loop {
                    let queued =
                        rail.free[end].saturating_sub(self.now) as u128 * u128::from(rail.rate) / 1_000_000_000;
                    if queued >= u128::from(rail.buffer) {
                        let room = self.now
                            + ((queued - u128::from(rail.buffer) + 1) * 1_000_000_000 / u128::from(rail.rate)) as u64
                            + 1;
                        next = Some(next.map_or(room, |n: u64| n.min(room)));
                        break;
                    }
                    let Some(out) = self.peers[end].next(Time(self.now), LaneId(at as u32)) else { break };
                    let control = match out.body {
                        Body::Inline { bytes, len } => bytes[..usize::from(len)].to_vec(),
                        _ => Vec::new(),
                    };
                    let bytes = 32 + u64::from(out.head.payload_len());
                    let spent = if out.chunk { self.per_chunk } else { 0 };
                    let leaves = rail.free[end].max(self.now) + spent + bytes * 1_000_000_000 / rail.rate;
                    rail.free[end] = leaves;
                    rail.flying[end].push_back((out.head, control));
                    let found = (leaves + LATENCY).next_multiple_of(self.looks[at]);
                    self.arrivals.push(Reverse((found, at, end)));
                }
            }
        }
        next
    }

    pub(crate) fn arrive(&mut self, at: usize, from: usize) {
        let Some((head, control)) = self.rails[at].flying[from].pop_front().filter(|_| !self.rails[at].dead) else {
            return;
        };
        let to = 1 - from;
        let (now, lane) = (Time(self.now), LaneId(at as u32));
        let mut host = Host { matcher: &mut self.matchers[to], regions: &mut OneRegion };
        match self.peers[to].place(now, lane, &head, &mut host) {
            Placing::Discard => {}
            Placing::Refuse(why) => panic!("refused: {why}"),
            _ => self.peers[to].placed(now, lane, &control, &mut host).expect("placed"),
        }
    }

    /// One message of `TOTAL` bytes; a rail may die on the way. Nanoseconds until its sender knows it arrived.
    pub(crate) fn transfer(&mut self, death: Option<(u64, usize)>) -> u64 {
        self.transfer_of(TOTAL, death)
    }

    pub(crate) fn transfer_of(&mut self, total: u64, death: Option<(u64, usize)>) -> u64 {
        self.window(1, total, death)
    }

    /// Sends `messages` of `len` bytes at once; a rail may fail in between. Nanoseconds until the sender has every
    /// confirmation.
    pub(crate) fn window(&mut self, messages: usize, len: u64, death: Option<(u64, usize)>) -> u64 {
        self.window_of(Kind::Send, (messages, len), death)
    }

    /// [`Net::window`] of any operations, of which at most 64 are in flight.
    pub(crate) fn window_of(
        &mut self,
        kind: Kind,
        (operations, len): (usize, u64),
        mut death: Option<(u64, usize)>,
    ) -> u64 {
        let began = self.now;
        self.receipts = [None, None];
        self.ended = [0, 0];
        self.carried = vec![0; self.rails.len()];
        self.arrived.clear();
        let mut started = 0;
        let received = if kind == Kind::Send { operations } else { 0 };
        while self.ended != [operations, received] {
            while started < operations.min(self.ended[0] + 64) {
                let op = OpId { index: started as u32, generation: 0 };
                if kind == Kind::Send {
                    assert!(self.matchers[1].post(op, 1, u64::MAX, None, len, true).is_none());
                }
                self.peers[0].start(Time(self.now), op, kind.operation(started as u32), len, None, true);
                started += 1;
            }
            self.step(began, &mut death);
        }
        self.now - began
    }

    /// One message of `total` bytes each way at the same time. Nanoseconds until both ends know that theirs arrived.
    pub(crate) fn exchange(&mut self, total: u64) -> u64 {
        let began = self.now;
        self.ended = [0, 0];
        for end in 0..2 {
            let [send, receive] = [0, 1].map(|index| OpId { index, generation: 0 });
            assert!(self.matchers[1 - end].post(receive, 1, u64::MAX, None, total, true).is_none());
            self.peers[end].start(Time(began), send, Operation::Send { tag: 1 }, total, None, true);
        }
        while self.ended != [2, 2] {
            self.step(began, &mut None);
        }
        self.now - began
    }

    /// Advances to the next event.
    fn step(&mut self, began: u64, death: &mut Option<(u64, usize)>) {
        let room = self.pump();
        for end in 0..2 {
            if self.peers[end].timeout().is_some_and(|at| at <= Time(self.now)) {
                self.peers[end].on_timeout(Time(self.now));
            }
            while let Some(event) = self.peers[end].event() {
                match event {
                    Event::Done { result, .. } => {
                        let receipt = result.expect("the transfer succeeds");
                        for share in receipt.lanes.iter().filter(|_| end == 0) {
                            self.carried[share.lane.0 as usize] += share.bytes;
                        }
                        self.receipts[end] = Some((self.now, receipt));
                        self.ended[end] += 1;
                    }
                    Event::Imm { region, imm } => self.arrived.push(region.index + imm),
                    // Its bytes do move.
                    Event::Suspect { lane } => self.peers[end].lane_alive(Time(self.now), lane),
                    _ => {}
                }
            }
        }
        let arrival = self.arrivals.peek().map(|Reverse((when, ..))| *when);
        // The engine looks again before long, whatever happens.
        let then = [room, arrival, death.map(|d| began + d.0), Some(self.now + 50_000)];
        self.now = then.into_iter().flatten().min().unwrap_or(self.now).max(self.now + 1);
        if let Some((_, rail)) = death.take_if(|d| began + d.0 <= self.now) {
            self.rails[rail].dead = true;
            for peer in &mut self.peers {
                peer.lane_down(Time(self.now), LaneId(rail as u32));
            }
        }
        while let Some(Reverse((when, at, from))) = self.arrivals.peek().copied() {
            if when > self.now {
                break;
            }
            self.arrivals.pop();
            self.arrive(at, from);
        }
    }

    pub(crate) fn shares(&self) -> Vec<f64> {
        let (_, receipt) = self.receipts[1].as_ref().expect("received");
        let bytes = |lane| receipt.lanes.iter().find(|l| l.lane == LaneId(lane as u32)).map_or(0, |l| l.bytes);
        (0..self.rails.len()).map(|lane| bytes(lane) as f64 / TOTAL as f64 * 100.0).collect()
    }
}
