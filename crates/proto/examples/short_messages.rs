//! What the protocol costs per 8-byte message: start, next, place, placed, event, and the word back that it is done.
//!
//! `cargo run --release -p crossrail-proto --example short_messages`: nanoseconds per message, best and median of many rounds.

use std::hint::black_box;
use std::time::Instant;

use crossrail_proto::{
    Access, Body, Config, Event, Host, LaneSpec, Matcher, Operation, Peer, Placing, RegionFault, RegionKey, RegionRef,
    Regions, Time,
};
use crossrail_types::{EndpointId, Head, LaneId, OpId};

const LANE: LaneId = LaneId(0);
const ROUNDS: usize = 200;
const MESSAGES: u32 = 20_000;

/// How messages are handed over.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    /// `start`, then `next`; `event`.
    Queued,
    /// `send_now`; `short`.
    Now,
}

struct NoRegions;

impl Regions for NoRegions {
    fn resolve(&mut self, _: &RegionKey, _: u64, _: u64, _: Access) -> Result<RegionRef, RegionFault> {
        Err(RegionFault::Gone)
    }

    fn alive(&self, _: RegionRef) -> bool {
        false
    }
}

struct End {
    peer: Peer,
    matcher: Matcher,
}

impl End {
    fn new(other: u32, reliable: bool) -> End {
        let mut peer = Peer::new(EndpointId(other), Config::default());
        let spec = LaneSpec {
            id: LANE,
            reliable,
            messages: true,
            bulk: true,
            max_payload: 1 << 20,
            eager_max: 8 << 10,
            whole_max: if reliable { 8 << 10 } else { 0 },
            counts: false,
            cost_ns: 1,
        };
        peer.lane_up(Time(0), spec);
        End { peer, matcher: Matcher::new() }
    }

    /// Everything this end has to say goes to the other.
    fn talk(&mut self, other: &mut End) {
        while let Some(out) = self.peer.next(Time(0), LANE) {
            let mut host = Host { matcher: &mut other.matcher, regions: &mut NoRegions };
            match black_box(other.peer.place(Time(0), LANE, &black_box(out).head, &mut host)) {
                Placing::Memory { .. } => other.peer.placed(Time(0), LANE, &[], &mut host).expect("placed"),
                Placing::Control { .. } => {
                    let Body::Inline { bytes, len } = out.body else { panic!("control bytes") };
                    let bytes = &bytes[..usize::from(len)];
                    other.peer.placed(Time(0), LANE, bytes, &mut host).expect("placed");
                }
                Placing::Discard => {}
                placing => panic!("unexpected {placing:?}"),
            }
        }
    }

    fn done(&mut self, way: Way) -> bool {
        match way {
            Way::Queued => matches!(black_box(self.peer.event()), Some(Event::Done { result: Ok(_), .. })),
            Way::Now => black_box(self.peer.short()).is_some(),
        }
    }

    fn receive(&mut self, head: &Head) {
        let mut host = Host { matcher: &mut self.matcher, regions: &mut NoRegions };
        match black_box(self.peer.place(Time(0), LANE, head, &mut host)) {
            Placing::Memory { .. } => self.peer.placed(Time(0), LANE, &[], &mut host).expect("placed"),
            placing => panic!("unexpected {placing:?}"),
        }
    }
}

fn send(way: Way, from: &mut End, to: &mut End, index: u32) {
    let op = OpId { index, generation: 0 };
    let posted = to.matcher.post(op, 7, u64::MAX, None, 8, true);
    assert!(posted.is_none());
    match way {
        Way::Queued => {
            from.peer.start(Time(0), op, Operation::Send { tag: 7 }, 8, None, true);
            from.talk(to);
        }
        Way::Now => {
            let mut head = Head::new(0, 0);
            assert!(from.peer.send_now(Time(0), op, 7, 8, LANE, &mut head), "nothing is in the way");
            to.receive(&black_box(head));
        }
    }
    assert!(to.done(way), "the receive is over");
}

/// A ball goes to and fro; each throw brings the word that the one before was caught.
fn ping_pong(way: Way, a: &mut End, b: &mut End) {
    for at in 0..MESSAGES / 2 {
        send(way, a, b, at);
        if at > 0 {
            assert!(b.done(way), "the send before is over");
        }
        send(way, b, a, at);
        assert!(a.done(way), "the send is over");
    }
    b.peer.flush();
    a.peer.flush();
    a.talk(b);
    b.talk(a);
    assert!(b.done(way));
    b.peer.flush();
    b.talk(a);
}

/// Sixty-four one way, then the word back.
fn stream(way: Way, a: &mut End, b: &mut End) {
    for _ in 0..MESSAGES / 64 {
        for at in 0..64 {
            send(way, a, b, at);
        }
        b.peer.flush();
        b.talk(a);
        for _ in 0..64 {
            assert!(a.done(way), "the send is over");
        }
        a.peer.flush();
        a.talk(b);
    }
}

fn measure(name: &str, way: Way, reliable: bool, body: fn(Way, &mut End, &mut End)) {
    let (mut a, mut b) = (End::new(1, reliable), End::new(0, reliable));
    body(way, &mut a, &mut b);
    let mut samples: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let started = Instant::now();
            body(way, &mut a, &mut b);
            started.elapsed().as_nanos() as f64 / f64::from(MESSAGES)
        })
        .collect();
    samples.sort_by(f64::total_cmp);
    let lane = if reliable { "reliable" } else { "lossy" };
    let way = if way == Way::Now { "at once" } else { "queued" };
    println!("{name:10} {way:8} {lane:9} best {:6.1} median {:6.1} ns/message", samples[0], samples[ROUNDS / 2]);
}

fn main() {
    for way in [Way::Now, Way::Queued] {
        for reliable in [true, false] {
            measure("ping-pong", way, reliable, ping_pong);
            measure("stream", way, reliable, stream);
        }
    }
}
