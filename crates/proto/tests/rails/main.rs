//! How well one long transfer fills rails of different rates, in a model of links with buffers and latency:
//! the protocol's own share of the loss, without any machine's noise.

mod net;
mod short;

use std::cmp::Reverse;

use crossrail_proto::{Host, LaneSpec, Operation, Placing, Time, frame};
use crossrail_types::{Head, LaneId, OpId};

use net::{BUFFER, GBIT, LATENCY, Net, OneRegion, Rail, TOTAL};

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

/// While both ends send, a lane's acknowledgements share a queue with chunks, for as long as a slow rail takes to send its
/// buffer.
#[test]
fn acknowledgements_wait_for_no_chunks_of_the_other_direction() {
    for (rates, total, reach) in [
        ([8 * GBIT / 10, 4 * GBIT / 10, 2 * GBIT / 10, GBIT / 10], 4 << 20, 0.9),
        ([8 * GBIT / 10, 4 * GBIT / 10, 2 * GBIT / 10, GBIT / 10], TOTAL, 0.95),
        ([3 * GBIT / 8; 4], 4 << 20, 0.85),
    ] {
        let mut net = Net::new(&rates);
        net.rails.iter_mut().for_each(|rail| rail.buffer = 256 << 10);
        (0..5).for_each(|_| assert!(net.exchange(total) > 0));
        let took: u64 = (0..10).map(|_| net.exchange(total)).sum();
        let reached = 10.0 * total as f64 / rates.iter().sum::<u64>() as f64 * 1e9 / took as f64;
        println!("{total} bytes each way over {rates:?}: {reached:.3} of the sum");
        assert!(reached > reach, "{total} bytes each way: {reached:.3} of the sum of {rates:?}");
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
        let mut host = Host { matcher: &mut self.matchers[end], regions: &mut OneRegion };
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

/// Counts for another lane that are late, for a lane that has ended, or made up by the peer.
#[test]
fn counts_for_other_lanes_are_checked() {
    let mut net = Net::new(&[GBIT; 4]);
    net.transfer(None);
    // Lanes are numbered from 1 in the order in which they come up. No chunk is in flight.
    let count_for = |lane, count| frame::encode_head(&frame::Frame::ChunkAck { count, lane }, 0);
    for unheeded in [count_for(1, 0), count_for(1, u32::MAX), count_for(5, 1), count_for(u32::MAX, u32::MAX / 2)] {
        let mut host = Host { matcher: &mut net.matchers[0], regions: &mut OneRegion };
        let placing = net.peers[0].place(Time(net.now), LaneId(2), &unheeded, &mut host);
        assert!(matches!(placing, Placing::Discard), "{placing:?}");
    }
    net.transfer(None);
    assert!(!net.violate(0, LaneId(2), &count_for(1, 1 << 20)), "the lane that brought it fails alone");
    net.transfer(None);
    assert!(!net.violate(0, LaneId(0), &handshake()));
    let of_an_ended_lane = count_for(1, 1 << 20);
    let mut host = Host { matcher: &mut net.matchers[0], regions: &mut OneRegion };
    let placing = net.peers[0].place(Time(net.now), LaneId(1), &of_an_ended_lane, &mut host);
    assert!(matches!(placing, Placing::Discard), "{placing:?}");
    net.transfer(None);
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
