//! How well one long transfer fills rails of different rates, in a model of links with buffers and latency:
//! the protocol's own share of the loss, without any machine's noise.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use crossrail_proto::{
    Access, Body, Config, Event, Host, LaneSpec, Matcher, Operation, Peer, Placing, Receipt, RegionFault, RegionKey,
    RegionRef, Regions, Time, frame,
};
use crossrail_types::{EndpointId, Head, LaneId, OpId};

const TOTAL: u64 = 64 << 20;
const LATENCY: u64 = 100_000;
/// What the sender's kernel takes before the wire does.
const BUFFER: u64 = 1 << 20;

struct NoRegions;

impl Regions for NoRegions {
    fn resolve(&mut self, _: &RegionKey, _: u64, _: u64, _: Access) -> Result<RegionRef, RegionFault> {
        Err(RegionFault::Gone)
    }

    fn alive(&self, _: RegionRef) -> bool {
        false
    }
}

struct Rail {
    /// Bytes per second.
    rate: u64,
    /// Bytes that the sender's kernel and the queue before the wire take.
    buffer: u64,
    /// When the last byte accepted so far, each way, has left.
    free: [u64; 2],
    /// What is in flight, each way, in order.
    flying: [VecDeque<(Head, Vec<u8>)>; 2],
    dead: bool,
}

struct Net {
    now: u64,
    peers: [Peer; 2],
    matchers: [Matcher; 2],
    rails: Vec<Rail>,
    /// When, which rail, from which end.
    arrivals: BinaryHeap<Reverse<(u64, usize, usize)>>,
    receipts: [Option<(u64, Receipt)>; 2],
    /// Operations that have ended at each end.
    ended: [usize; 2],
    /// How often the ends look at a rail, in nanoseconds: everything that arrived meanwhile is found at once.
    looks: Vec<u64>,
    /// What a rail spends on each chunk, however short, in nanoseconds.
    per_chunk: u64,
}

impl Net {
    fn new(rates: &[u64]) -> Net {
        Net::with(rates, |peer, spec| peer.lane_up(Time(0), spec))
    }

    /// Connections of one rail, of which two carry chunks at first.
    fn of_one_rail(rates: &[u64]) -> Net {
        Net::with(rates, |peer, spec| {
            let place = (0, spec.id.0 as u16);
            peer.lane_up_among(Time(0), spec, place, 2);
        })
    }

    fn with(rates: &[u64], lane_up: impl Fn(&mut Peer, LaneSpec)) -> Net {
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
            ended: [0, 0],
            looks: vec![1; rates.len()],
            per_chunk: 0,
        }
    }

    /// Every rail with room takes what it is given; when one of them will next have room.
    fn pump(&mut self) -> Option<u64> {
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

    fn arrive(&mut self, at: usize, from: usize) {
        let Some((head, control)) = self.rails[at].flying[from].pop_front().filter(|_| !self.rails[at].dead) else {
            return;
        };
        let to = 1 - from;
        let (now, lane) = (Time(self.now), LaneId(at as u32));
        let mut host = Host { matcher: &mut self.matchers[to], regions: &mut NoRegions };
        match self.peers[to].place(now, lane, &head, &mut host) {
            Placing::Discard => {}
            Placing::Refuse(why) => panic!("refused: {why}"),
            _ => self.peers[to].placed(now, lane, &control, &mut host).expect("placed"),
        }
    }

    /// One message of `TOTAL` bytes; a rail may die on the way. Nanoseconds until its sender knows it arrived.
    fn transfer(&mut self, death: Option<(u64, usize)>) -> u64 {
        self.transfer_of(TOTAL, death)
    }

    fn transfer_of(&mut self, total: u64, death: Option<(u64, usize)>) -> u64 {
        self.window(1, total, death)
    }

    /// Sends `messages` of `len` bytes at once; a rail may fail in between. Nanoseconds until the sender has every
    /// confirmation.
    fn window(&mut self, messages: usize, len: u64, mut death: Option<(u64, usize)>) -> u64 {
        let began = self.now;
        self.receipts = [None, None];
        self.ended = [0, 0];
        for index in 0..messages as u32 {
            let op = OpId { index, generation: 0 };
            assert!(self.matchers[1].post(op, 1, u64::MAX, None, len, true).is_none());
            self.peers[0].start(Time(self.now), op, Operation::Send { tag: 1 }, len, None, true);
        }
        while self.ended != [messages; 2] {
            let room = self.pump();
            for end in 0..2 {
                if self.peers[end].timeout().is_some_and(|at| at <= Time(self.now)) {
                    self.peers[end].on_timeout(Time(self.now));
                }
                while let Some(event) = self.peers[end].event() {
                    match event {
                        Event::Done { result, .. } => {
                            self.receipts[end] = Some((self.now, result.expect("the transfer succeeds")));
                            self.ended[end] += 1;
                        }
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
        self.now - began
    }

    fn shares(&self) -> Vec<f64> {
        let (_, receipt) = self.receipts[1].as_ref().expect("received");
        let bytes = |lane| receipt.lanes.iter().find(|l| l.lane == LaneId(lane as u32)).map_or(0, |l| l.bytes);
        (0..self.rails.len()).map(|lane| bytes(lane) as f64 / TOTAL as f64 * 100.0).collect()
    }
}

/// Of the rails' rates together, how much transfers reach once two have shown what the rails can do.
fn efficiency(rates: &[u64]) -> (f64, Vec<f64>) {
    efficiency_with(rates, |_| {})
}

fn efficiency_with(rates: &[u64], change: impl FnOnce(&mut Net)) -> (f64, Vec<f64>) {
    let mut net = Net::new(rates);
    change(&mut net);
    net.transfer(None);
    net.transfer(None);
    let times: Vec<u64> = (0..5).map(|_| net.transfer(None)).collect();
    let sum: u64 = rates.iter().sum();
    let ideal = TOTAL as f64 / sum as f64 * 1e9;
    let worst = times.iter().max().copied().unwrap_or(0) as f64;
    println!("{rates:?}: {:.3} of the sum, shares {:.1?}", ideal / worst, net.shares());
    (ideal / worst, net.shares())
}

const GBIT: u64 = 125_000_000;

#[test]
fn equal_rails_share_evenly() {
    let (reached, shares) = efficiency(&[2 * GBIT; 4]);
    assert!(reached > 0.97, "{reached:.3} of the sum");
    assert!(shares.iter().all(|s| (s - 25.0).abs() < 2.0), "shares {shares:.1?}");
}

#[test]
fn uneven_rails_fill_in_proportion() {
    let (reached, _) = efficiency(&[2 * GBIT, 2 * GBIT, GBIT, GBIT / 2]);
    assert!(reached > 0.97, "{reached:.3} of the sum");
    let (reached, _) = efficiency(&[100 * GBIT, GBIT]);
    assert!(reached > 0.80, "{reached:.3} of the sum");
}

#[test]
fn five_and_eight_rails_of_any_rates_fill() {
    for eighths in [&[8, 4, 3, 2, 1][..], &[16, 12, 8, 6, 4, 3, 2, 1], &[16; 8], &[20, 1, 1, 1, 1, 1, 1, 1]] {
        let rates: Vec<u64> = eighths.iter().map(|part| part * GBIT / 8).collect();
        let (reached, shares) = efficiency(&rates);
        assert!(reached > 0.95, "{reached:.3} of the sum of {rates:?}, shares {shares:.1?}");
    }
}

/// Windows of 64 eager messages, with the message stream on the slowest rail. Fraction of the sum of the rails' rates
/// that they reach.
fn messages_of(len: u64, rates: &[u64]) -> f64 {
    messages_with(len, rates, |_| {})
}

fn messages_with(len: u64, rates: &[u64], change: impl Fn(&mut Peer)) -> f64 {
    let mut net = Net::with(&[&rates[..1], rates].concat(), |peer, spec| {
        let bulk = spec.id.0 > 0;
        let cost_ns = if bulk { 1000 } else { 0 };
        peer.lane_up(Time(0), LaneSpec { bulk, cost_ns, eager_max: 64 << 10, ..spec });
        change(peer);
    });
    net.rails.iter_mut().for_each(|rail| rail.buffer = 256 << 10);
    for _ in 0..20 {
        net.window(64, len, None);
    }
    let took: u64 = (0..20).map(|_| net.window(64, len, None)).sum();
    let reached = (20 * 64 * len) as f64 / (took as f64 / 1e9) / rates.iter().sum::<u64>() as f64;
    println!("{len} bytes over {rates:?}: {reached:.3} of the sum");
    reached
}

#[test]
fn short_messages_fill_all_rails() {
    for (len, reach) in [(64 << 10, 0.9), (32 << 10, 0.85), (16 << 10, 0.8)] {
        for rates in [[2 * GBIT / 5, 4 * GBIT / 5, 8 * GBIT / 5, 16 * GBIT / 5], [GBIT; 4]] {
            let reached = messages_of(len, &rates);
            assert!(reached > reach, "{len} bytes: {reached:.3} of the sum of {rates:?}");
        }
    }
}

#[test]
fn messages_that_are_kept_whole_use_the_rail_of_their_connection_alone() {
    let reached = messages_with(64 << 10, &[GBIT; 4], Peer::keep_messages_whole);
    assert!((0.2..=0.25).contains(&reached), "{reached:.3} of the sum of four rails");
}

/// One message alone takes no rail that is slow, once that is known, and costs no round trip more.
#[test]
fn a_message_alone_takes_a_fast_rail() {
    let rates = [GBIT / 10, GBIT / 10, 2 * GBIT];
    let mut net = Net::with(&rates, |peer, spec| {
        let bulk = spec.id.0 > 0;
        let cost_ns = if bulk { 1000 } else { 0 };
        peer.lane_up(Time(0), LaneSpec { bulk, cost_ns, eager_max: 64 << 10, ..spec });
    });
    net.transfer_of(8 << 20, None);
    let alone = |net: &mut Net| net.window(1, 64 << 10, None) - 2 * LATENCY;
    let took: Vec<u64> = (0..8).map(|_| alone(&mut net)).collect();
    let fast = (64 << 10) * 1_000_000_000 / rates[2];
    println!("a message alone: {took:?} ns beyond the latency; {fast} ns on the fast rail");
    assert!(took.iter().all(|took| *took < 2 * fast), "{took:?} ns, where the fast rail takes {fast} ns");
}

/// Messages and their order survive rails that die, whichever of them carried them.
#[test]
fn short_messages_survive_a_rail_that_dies() {
    for rail in 0..4 {
        let mut net = Net::with(&[GBIT; 4], |peer, spec| {
            peer.lane_up(Time(0), LaneSpec { bulk: spec.id.0 > 0, eager_max: 64 << 10, ..spec });
        });
        net.window(64, 64 << 10, None);
        let whole = net.window(64, 64 << 10, None);
        let took = net.window(64, 64 << 10, Some((whole / 2, rail)));
        assert!(took < 2 * whole, "{took} ns when rail {rail} dies, {whole} ns with all");
    }
}

/// Connections within one machine, or at 25 Gbit/s each: a chunk costs a rail wake-ups and system calls, however short.
#[test]
fn fast_rails_do_not_end_in_short_chunks() {
    for (rails, reach) in [(4, 0.80), (8, 0.69), (16, 0.57)] {
        let change = |net: &mut Net| {
            net.per_chunk = 50_000;
            net.rails.iter_mut().for_each(|rail| rail.buffer = 256 << 10);
        };
        let (reached, _) = efficiency_with(&vec![24 * GBIT; rails], change);
        assert!(reached > reach, "{reached:.3} of the sum of {rails} rails");
    }
}

/// What a rail has accepted, it alone can bring: behind a long queue that is as much more as the queue holds.
#[test]
fn a_rail_behind_a_long_queue_holds_nothing_up() {
    for (milliseconds, reach) in [(20, 0.97), (80, 0.93)] {
        for bloated in 0..4 {
            let change = |net: &mut Net| net.rails[bloated].buffer = 2 * GBIT * milliseconds / 1000;
            let (reached, shares) = efficiency_with(&[2 * GBIT; 4], change);
            assert!(reached > reach, "{milliseconds} ms before rail {bloated}: {reached:.3} of the sum, {shares:.1?}");
        }
    }
}

/// Acknowledgements that come in clumps, as on a busy machine, make no rail look faster than it is.
#[test]
fn rails_that_are_looked_at_seldom_keep_their_shares() {
    for looks in [[1, 1, 1, 4_000_000], [1_000_000, 2_000_000, 3_000_000, 7_000_000], [5_000_000; 4]] {
        let (reached, shares) = efficiency_with(&[GBIT / 4; 4], |net| net.looks = looks.to_vec());
        assert!(reached > 0.95, "{reached:.3} of the sum, looked at every {looks:?} ns");
        assert!(shares.iter().all(|s| (s - 25.0).abs() < 1.0), "shares {shares:.1?}, looked at every {looks:?} ns");
    }
}

#[test]
fn a_rail_that_dies_costs_little() {
    let rates = [2 * GBIT; 4];
    let mut net = Net::new(&rates);
    net.transfer(None);
    let three = TOTAL as f64 / (6 * GBIT) as f64 * 1e9;
    let took = net.transfer(Some((30_000_000, 2))) as f64;
    println!("one of four dies after 30 ms: {:.1} ms, three alone need {:.1} ms", took / 1e6, three / 1e6);
    assert!(took < three * 1.05);
}

/// Seconds of some transfers over two rails and one of a hundredth of their rate, and what two alone would take.
fn beside_a_slow_rail(total: u64) -> (Vec<f64>, f64) {
    let rate = 300_000_000 / 8;
    let mut net = Net::new(&[rate, rate / 100, rate]);
    let took = (0..8).map(|_| net.transfer_of(total, None) as f64 / 1e9).collect();
    (took, total as f64 / (2 * rate) as f64)
}

#[test]
fn a_rail_that_would_finish_last_holds_nothing_up() {
    for total in [TOTAL, 1 << 20] {
        let (took, two) = beside_a_slow_rail(total);
        println!("{total} bytes: {took:.3?} s, two rails alone need {two:.3} s");
        // What it still carries costs the others once, and noticing that it does a while.
        assert!(took.iter().all(|took| *took < two * 1.15 + 0.1), "{took:.3?} s instead of {two:.3} s");
    }
}

/// One end has lost its lane to a link that is down; the other has not heard of it yet and goes on talking there.
#[test]
fn an_end_that_does_not_know_that_a_rail_is_dead_confirms_over_the_others() {
    let mut net = Net::new(&[GBIT; 2]);
    net.rails[0].dead = true;
    net.peers[0].lane_down(Time(0), LaneId(0));
    let op = |index| OpId { index, generation: 0 };
    net.peers[0].start(Time(0), op(0), Operation::Send { tag: 1 }, 100, None, true);
    let mut answered = false;
    for _ in 0..100 {
        net.now += LATENCY;
        for peer in &mut net.peers {
            peer.flush();
        }
        net.pump();
        // What it has to say itself goes where nobody hears it, and with it that it has the message.
        if !answered && net.arrivals.peek().is_some() {
            answered = true;
            net.peers[1].start(Time(net.now), op(1), Operation::Send { tag: 2 }, 100, None, true);
        }
        while net.peers[1].next(Time(net.now), LaneId(0)).is_some() {}
        while net.arrivals.peek().is_some_and(|Reverse((when, ..))| *when <= net.now) {
            if let Some(Reverse((_, at, from))) = net.arrivals.pop() {
                net.arrive(at, from);
            }
        }
    }
    assert_eq!(net.peers[0].timeout(), None, "the first end still waits to hear that its message came");
    assert!(net.peers[1].timeout().is_some(), "the second waits, for what it said on the dead rail");
}

impl Net {
    /// Something that is no frame of an honest peer comes to `end` on that lane, which the engine drops then; whether
    /// the connection is broken off.
    fn violate(&mut self, end: usize, lane: LaneId, head: &Head) -> bool {
        let mut host = Host { matcher: &mut self.matchers[end], regions: &mut NoRegions };
        let placing = self.peers[end].place(Time(self.now), lane, head, &mut host);
        assert!(matches!(placing, Placing::Refuse(_)), "{placing:?}");
        let broken = self.peers[end].failed().is_some();
        for peer in &mut self.peers {
            peer.lane_down(Time(self.now), lane);
        }
        self.rails[lane.0 as usize].dead = true;
        broken
    }

    /// What came to the second end on that lane had been changed, and the engine drops the lane; whether the connection
    /// is broken off.
    fn corrupt(&mut self, lane: LaneId) -> bool {
        self.peers[1].corrupted("a checksum differs");
        let broken = self.peers[1].failed().is_some();
        for peer in &mut self.peers {
            peer.lane_down(Time(self.now), lane);
        }
        self.rails[lane.0 as usize].dead = true;
        broken
    }

    /// A lane more, at both ends.
    fn revive(&mut self) -> LaneId {
        let id = LaneId(self.rails.len() as u32);
        for peer in &mut self.peers {
            let spec = LaneSpec {
                id,
                reliable: false,
                messages: true,
                bulk: true,
                max_payload: 8 << 20,
                eager_max: 8 << 10,
                whole_max: 0,
                counts: false,
                cost_ns: u64::from(id.0),
            };
            peer.lane_up(Time(self.now), spec);
        }
        self.looks.push(1);
        self.rails.push(Rail { rate: GBIT, buffer: BUFFER, free: [0; 2], flying: Default::default(), dead: false });
        id
    }
}

/// Where a frame is expected, the first bytes of a handshake: it has no such kind.
fn handshake() -> Head {
    let mut head = Head([0; 32]);
    head.0[..6].copy_from_slice(b"\xc5XRAIL");
    head
}

/// A message that is far ahead, from a stream that has changed lanes any number of times.
fn ahead() -> Head {
    let mut head = frame::encode_head(&frame::Frame::Nothing, 0);
    frame::Stamp { seq: 1 << 20, ack: 0, epoch: 1 << 14 }.put(&mut head, 0);
    head
}

#[test]
fn a_lane_that_brings_nonsense_fails_alone() {
    for nonsense in [handshake(), ahead()] {
        let mut net = Net::new(&[GBIT; 3]);
        net.transfer(None);
        for (end, lane) in [(1, LaneId(2)), (0, LaneId(0))] {
            assert!(!net.violate(end, lane, &nonsense), "one lane of several takes the peer with it");
            net.transfer(None);
        }
        assert!(net.violate(1, LaneId(1), &nonsense), "it was the last lane");
    }
}

#[test]
fn a_peer_that_makes_no_sense_on_any_lane_is_given_up() {
    let mut net = Net::new(&[GBIT; 2]);
    net.transfer(None);
    let broken = (0..20).position(|_| {
        let lane = net.revive();
        net.violate(1, lane, &handshake())
    });
    assert!(matches!(broken, Some(1..20)), "{broken:?}");
    // Whereas what makes sense in between counts.
    let mut net = Net::new(&[GBIT; 2]);
    for _ in 0..20 {
        let lane = net.revive();
        assert!(!net.violate(1, lane, &handshake()));
        net.transfer(None);
    }
}

#[test]
fn a_peer_is_given_up_when_every_lane_is_corrupt() {
    let mut net = Net::new(&[GBIT; 2]);
    net.transfer(None);
    let broken = (0..20).position(|_| {
        let lane = net.revive();
        net.corrupt(lane)
    });
    assert!(matches!(broken, Some(1..20)), "{broken:?}");
    // The last lane may go down: it is dialled again. And what makes sense in between counts.
    let mut net = Net::new(&[GBIT]);
    for lane in 0..20 {
        assert!(!net.corrupt(LaneId(lane)));
        net.revive();
        net.transfer(None);
    }
}

/// Transfers until the number of connections is found: the shares of the last one, and the number.
fn connections(net: &mut Net, total: u64) -> (Vec<f64>, Option<u16>) {
    (0..24).for_each(|_| assert!(net.transfer_of(total, None) > 0));
    let (_, receipt) = net.receipts[1].as_ref().expect("received");
    let bytes = |lane| receipt.lanes.iter().find(|l| l.lane == LaneId(lane as u32)).map_or(0, |l| l.bytes);
    let shares = (0..net.rails.len()).map(|lane| bytes(lane) as f64 / total as f64 * 100.0).collect();
    (shares, net.peers[0].connections())
}

#[test]
fn a_rail_uses_as_many_connections_as_gain_something() {
    let (shares, found) = connections(&mut Net::of_one_rail(&[10 * GBIT; 4]), TOTAL);
    assert_eq!(found, Some(4), "{shares:.1?}");
    assert!(shares.iter().all(|share| (share - 25.0).abs() < 3.0), "shares {shares:.1?}");
    // All but the first are so slow that they hardly gain anything.
    let (shares, found) = connections(&mut Net::of_one_rail(&[10 * GBIT, GBIT / 10, GBIT / 10, GBIT / 10]), TOTAL);
    assert_eq!((found, &shares[1..]), (Some(1), &[0.0; 3][..]), "{shares:.1?}");
}

#[test]
fn connections_of_a_rail_end_a_transfer_together_as_rails_do() {
    let time = |mut net: Net| {
        connections(&mut net, TOTAL);
        net.transfer_of(TOTAL, None)
    };
    let rates = [10 * GBIT, 8 * GBIT, 6 * GBIT, 4 * GBIT];
    let (connections, rails) = (time(Net::of_one_rail(&rates)), time(Net::new(&rates)));
    assert_eq!(connections, rails, "nanoseconds");
}

#[test]
fn a_short_transfer_uses_the_first_connection_alone() {
    let (shares, _) = connections(&mut Net::of_one_rail(&[10 * GBIT; 4]), 1 << 20);
    assert_eq!(shares, [100.0, 0.0, 0.0, 0.0]);
}

#[test]
fn connections_that_die_in_the_search_cost_nothing_but_their_chunks() {
    for dead in 0..4 {
        let mut net = Net::of_one_rail(&[10 * GBIT; 4]);
        net.transfer(Some((4_000_000, dead)));
        let (shares, found) = connections(&mut net, TOTAL);
        assert_eq!(shares[dead], 0.0, "connection {dead} is dead");
        let (alone, _) = connections(&mut net, 1 << 20);
        assert_eq!(alone[usize::from(dead == 0)], 100.0, "short transfers go over the first that lives: {alone:.1?}");
        assert!(found.is_some() && shares.iter().filter(|share| **share > 0.0).count() >= 2, "{shares:.1?}");
    }
}

#[test]
fn more_connections_are_wanted_once_and_only_for_many_bytes() {
    let mut net = Net::of_one_rail(&[10 * GBIT]);
    (0..8).for_each(|_| assert!(net.transfer_of(1 << 20, None) > 0));
    assert!(net.peers[0].outgrows() && !net.peers[0].outgrows() && !net.peers[1].outgrows());
    assert_eq!(net.peers[0].connections(), None, "there is one");
}
