//! Short operations over several rails.

use crossrail_proto::{LaneSpec, Peer, Time};

use crate::net::{GBIT, Kind, LATENCY, Net};

/// Of 0.4, 0.8, 1.6 and 3.2 Gbit/s.
const UNEVEN: [u64; 4] = [2 * GBIT / 5, 4 * GBIT / 5, 8 * GBIT / 5, 16 * GBIT / 5];

/// Windows of 64 short operations, with the message stream on the slowest rail. Fraction of the sum of the rails' rates
/// that they reach, and the rails' parts of the last window.
fn reached_by(kind: Kind, len: u64, rates: &[u64]) -> (f64, Vec<f64>) {
    reached_with(kind, len, rates, |_| {})
}

fn reached_with(kind: Kind, len: u64, rates: &[u64], change: impl Fn(&mut Peer)) -> (f64, Vec<f64>) {
    let mut net = Net::with(&[&rates[..1], rates].concat(), |peer, spec| {
        let bulk = spec.id.0 > 0;
        let cost_ns = if bulk { 1000 } else { 0 };
        peer.lane_up(Time(0), LaneSpec { bulk, cost_ns, eager_max: 64 << 10, ..spec });
        change(peer);
    });
    net.rails.iter_mut().for_each(|rail| rail.buffer = 256 << 10);
    // Messages in windows, as a benchmark sends them; what one end does alone is continuous.
    let (windows, each) = if kind == Kind::Send { (20, 64) } else { (1, 20 * 64) };
    for _ in 0..windows {
        net.window_of(kind, (each, len), None);
    }
    let took: u64 = (0..windows).map(|_| net.window_of(kind, (each, len), None)).sum();
    let reached = (20 * 64 * len) as f64 / (took as f64 / 1e9) / rates.iter().sum::<u64>() as f64;
    let parts: Vec<f64> = net.carried[1..].iter().map(|bytes| *bytes as f64 / (each as u64 * len) as f64).collect();
    println!("{kind:?} of {len} bytes over {rates:?}: {reached:.3} of the sum, parts {parts:.2?}");
    (reached, parts)
}

#[test]
fn short_messages_fill_all_rails() {
    for (len, reach) in [(64 << 10, 0.9), (32 << 10, 0.85), (16 << 10, 0.8)] {
        for rates in [UNEVEN, [GBIT; 4]] {
            let (reached, _) = reached_by(Kind::Send, len, &rates);
            assert!(reached > reach, "{len} bytes: {reached:.3} of the sum of {rates:?}");
        }
    }
}

#[test]
fn messages_that_are_kept_whole_use_the_rail_of_their_connection_alone() {
    let (reached, _) = reached_with(Kind::Send, 64 << 10, &[GBIT; 4], Peer::keep_messages_whole);
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

#[test]
fn short_writes_and_reads_fill_all_rails() {
    for (kind, len, reach) in [
        (Kind::Write, 64 << 10, 0.85),
        (Kind::Write, 16 << 10, 0.75),
        (Kind::Read, 64 << 10, 0.9),
        (Kind::Read, 16 << 10, 0.8),
    ] {
        for rates in [UNEVEN, [GBIT; 4]] {
            let (reached, parts) = reached_by(kind, len, &rates);
            assert!(reached > reach, "{kind:?} of {len} bytes: {reached:.3} of the sum of {rates:?}");
            for (part, rate) in parts.iter().zip(rates) {
                let own = rate as f64 / rates.iter().sum::<u64>() as f64;
                assert!((part - own).abs() < 0.1, "{kind:?} of {len} bytes over {rates:?}: parts {parts:.2?}");
            }
        }
    }
}

/// Every write announces its own end, and only that; puts keep their order, whatever goes over other rails.
#[test]
fn puts_stay_in_their_stream() {
    let mut net = Net::with(&UNEVEN, |peer, spec| {
        peer.lane_up(Time(0), LaneSpec { eager_max: 64 << 10, ..spec });
    });
    for _ in 0..4 {
        net.window_of(Kind::Write, (64, 32 << 10), None);
        let mut arrived = net.arrived.clone();
        arrived.sort_unstable();
        assert_eq!(arrived, (0..64).collect::<Vec<u32>>(), "each write announces its end once");
    }
    net.window_of(Kind::Put, (64, 32 << 10), None);
    assert_eq!(net.arrived, (0..64).collect::<Vec<u32>>());
    assert_eq!(net.carried, [0; 4], "no chunk");
}

/// A write alone, and few of them, need no consent: their bytes follow at once.
#[test]
fn few_short_writes_take_one_trip() {
    let mut net = Net::with(&UNEVEN, |peer, spec| {
        let cost_ns = 4 - u64::from(spec.id.0);
        peer.lane_up(Time(0), LaneSpec { eager_max: 64 << 10, cost_ns, ..spec });
    });
    net.transfer_of(8 << 20, None);
    for (writes, len) in [(1, 64 << 10), (4, 16 << 10), (64, 512)] {
        let took = net.window_of(Kind::Write, (writes, len), None);
        let on_the_wire = writes as u64 * (len + 100) * 1_000_000_000 / UNEVEN[3];
        assert!(took < 2 * LATENCY + 2 * on_the_wire, "{writes} of {len} bytes: {took} ns");
        assert_eq!(net.carried, [0; 4], "{writes} writes of {len} bytes go with their frames");
    }
}

#[test]
fn short_writes_and_reads_survive_a_rail_that_dies() {
    for (kind, rail) in [Kind::Write, Kind::Read].into_iter().flat_map(|kind| (0..4).map(move |rail| (kind, rail))) {
        let mut net = Net::with(&[GBIT; 4], |peer, spec| {
            peer.lane_up(Time(0), LaneSpec { bulk: spec.id.0 > 0, eager_max: 64 << 10, ..spec });
        });
        net.window_of(kind, (64, 64 << 10), None);
        let whole = net.window_of(kind, (64, 64 << 10), None);
        let took = net.window_of(kind, (64, 64 << 10), Some((whole / 2, rail)));
        assert!(took < 2 * whole, "{kind:?}: {took} ns when rail {rail} dies, {whole} ns with all");
    }
}

/// Transfers of some hundred kilobytes, as expert buffers make them, end when all rails end, not when the slowest does:
/// a chunk of 64 KiB takes that three times as long as all rails take for all.
#[test]
fn transfers_of_few_chunks_are_not_paced_by_the_slowest_rail() {
    for (len, most) in [(128 << 10, 2.0), (256 << 10, 1.4), (350 << 10, 1.3), (512 << 10, 1.3), (1 << 20, 1.15)] {
        let mut net = Net::new(&UNEVEN);
        net.rails.iter_mut().for_each(|rail| rail.buffer = 256 << 10);
        net.transfer(None);
        (0..20).for_each(|_| assert!(net.transfer_of(len, None) > 0));
        // Less the announcement, the consent, the last chunk's way and the confirmation.
        let took: u64 = (0..20).map(|_| net.transfer_of(len, None) - 4 * LATENCY).sum();
        let times = took as f64 / (20 * len * 1_000_000_000 / UNEVEN.iter().sum::<u64>()) as f64;
        let parts: Vec<f64> = net.carried.iter().map(|bytes| *bytes as f64 / len as f64).collect();
        println!("{len} bytes: {times:.2} times what all rails take, parts {parts:.2?}");
        assert!(times < most, "{len} bytes take {times:.2} times what all rails take, parts {parts:.2?}");
        assert!(parts[0] < 0.09, "{len} bytes: parts {parts:.2?}");
    }
}

/// Transfers that are too short to fill a rail measure all rails: none is left out because it was never tried.
#[test]
fn short_transfers_measure_all_rails() {
    for (len, most) in [(180 << 10, 1.7), (512 << 10, 1.3)] {
        let mut net = Net::new(&UNEVEN);
        net.rails.iter_mut().for_each(|rail| rail.buffer = 256 << 10);
        (0..4).for_each(|_| assert!(net.transfer_of(len, None) > 0));
        let times = times_all_rails(&mut net, len, 10);
        assert!(times < most, "{len} bytes take {times:.2} times what all rails take, parts {:?}", net.carried);
    }
    let mut net = Net::new(&UNEVEN);
    (0..4).for_each(|_| assert!(net.transfer_of(32 << 10, None) > 0));
    assert_eq!(net.carried[..2], [0; 2], "the fast rails carry what is two chunks");
}

/// The fastest rail was late, at first or after some transfers, as on a machine that gave its processor to others: it
/// carries its part again before long, although what it showed then makes it too slow for such transfers.
#[test]
fn a_rail_that_was_late_carries_its_part_again() {
    for (before, len, milliseconds) in
        [(0, 180 << 10, 15), (0, 512 << 10, 40), (20, 180 << 10, 100), (20, 512 << 10, 40)]
    {
        let mut net = Net::new(&UNEVEN);
        net.rails.iter_mut().for_each(|rail| rail.buffer = 256 << 10);
        (0..before).for_each(|_| assert!(net.transfer_of(len, None) > 0));
        net.looks[3] = milliseconds * 1_000_000;
        for _ in 0..2 {
            net.now = net.now.next_multiple_of(net.looks[3]) + 1;
            net.transfer_of(len, None);
        }
        net.looks[3] = 1;
        (0..300).for_each(|_| assert!(net.transfer_of(len, None) > 0));
        let times = times_all_rails(&mut net, len, 10);
        println!("{len} bytes, {milliseconds} ms late after {before}: {times:.2} times, parts {:?}", net.carried);
        assert!(times < 1.8, "{len} bytes take {times:.2} times what all rails take, parts {:?}", net.carried);
    }
}

/// Duration of transfers, as a multiple of what all rails of `UNEVEN` together need for their bytes.
fn times_all_rails(net: &mut Net, len: u64, transfers: u64) -> f64 {
    // Less the announcement, the consent, the last chunk's way and the confirmation.
    let took: u64 = (0..transfers).map(|_| net.transfer_of(len, None) - 4 * LATENCY).sum();
    took as f64 / (transfers * len * 1_000_000_000 / UNEVEN.iter().sum::<u64>()) as f64
}
