//! Chunks by way of slots, step by step: what each end hears, and when.

use crossrail_proto::{
    Access, Config, Event, Failure, Host, Landed, LaneSpec, Matcher, Memory, Operation, Out, Peer, Placing,
    RegionFault, RegionKey, RegionRef, Regions, Time, frame,
};
use crossrail_types::{EndpointId, Head, LaneId, OpId};

const LANE: LaneId = LaneId(0);
const OP: OpId = OpId { index: 1, generation: 1 };
const DEADLINE: u64 = 1000;

/// Regions; whether their bytes may go out with a frame of the message stream.
struct Eager(bool);

impl Regions for Eager {
    fn resolve(&mut self, _: &RegionKey, _: u64, _: u64, _: Access) -> Result<RegionRef, RegionFault> {
        Ok(RegionRef { index: 0, generation: 0 })
    }

    fn alive(&self, _: RegionRef) -> bool {
        true
    }

    fn eager(&self, _: RegionRef) -> bool {
        self.0
    }
}

struct End {
    peer: Peer,
    matcher: Matcher,
    regions: Eager,
    events: Vec<Event>,
}

impl End {
    fn new(id: u32) -> End {
        let config = Config {
            chunk: 100,
            window: 2,
            eager_credit: 1000,
            message_credit: 8,
            lane_deadline: DEADLINE,
            lazy_passes: 0,
            ..Config::default()
        };
        let mut peer = Peer::new(EndpointId(id), config);
        let spec = LaneSpec {
            id: LANE,
            reliable: false,
            messages: true,
            bulk: true,
            max_payload: 4096,
            eager_max: 512,
            whole_max: 0,
            counts: false,
            cost_ns: 1,
        };
        peer.lane_up(Time(0), spec);
        End { peer, matcher: Matcher::new(), regions: Eager(true), events: Vec::new() }
    }

    fn place(&mut self, now: Time, head: &Head) -> Placing {
        let mut host = Host { matcher: &mut self.matcher, regions: &mut self.regions };
        self.peer.place(now, LANE, head, &mut host)
    }

    fn placed(&mut self, now: Time, control: &[u8]) {
        let mut host = Host { matcher: &mut self.matcher, regions: &mut self.regions };
        self.peer.placed(now, LANE, control, &mut host).expect("an honest peer");
    }

    fn drain(&mut self) {
        while let Some(event) = self.peer.event() {
            self.events.push(event);
        }
    }

    fn done(&self) -> Option<&Result<crossrail_proto::Receipt, Failure>> {
        self.events.iter().find_map(|event| match event {
            Event::Done { result, .. } => Some(result),
            _ => None,
        })
    }

    fn failure(&self) -> Failure {
        self.done().expect("it is over").as_ref().expect_err("it failed").clone()
    }

    fn acked(&self) -> u32 {
        let chunks = |event: &Event| if let Event::Acked { chunks, .. } = event { *chunks } else { 0 };
        self.events.iter().map(chunks).sum()
    }

    fn next(&mut self, now: Time) -> Option<Out> {
        self.peer.next(now, LANE)
    }
}

/// A send and its receive, both of device memory.
struct Pair {
    ends: [End; 2],
    now: Time,
    landed: Vec<Landed>,
}

impl Pair {
    fn new(len: u64) -> Pair {
        let mut ends = [End::new(0), End::new(1)];
        assert!(ends[1].matcher.post(OP, 7, u64::MAX, None, len, false).is_none());
        ends[0].peer.start(Time(1), OP, Operation::Send { tag: 7 }, len, None, false);
        let mut pair = Pair { ends, now: Time(1), landed: Vec::new() };
        assert!(matches!(pair.carry(0), Some(frame::Frame::Announce { .. })), "never with its first frame");
        assert!(matches!(pair.carry(1), Some(frame::Frame::Consent { .. })));
        pair
    }

    fn drain(&mut self) {
        self.ends.iter_mut().for_each(End::drain);
    }

    /// One frame from that end to the other; chunks land in slots.
    fn carry(&mut self, from: usize) -> Option<frame::Frame> {
        self.now.0 += 1;
        let out = self.ends[from].next(self.now)?;
        let control = match out.body {
            crossrail_proto::Body::Inline { bytes, len } => bytes[..usize::from(len)].to_vec(),
            _ => Vec::new(),
        };
        self.deliver(1 - from, &out.head, &control);
        Some(frame::decode_head(&out.head).expect("readable"))
    }

    fn deliver(&mut self, to: usize, head: &Head, control: &[u8]) {
        let now = self.now;
        match self.ends[to].place(now, head) {
            Placing::Memory { chunk: true, .. } => {
                self.landed.extend(self.ends[to].peer.landed(now, LANE).expect("an honest peer"));
            }
            Placing::Discard => {}
            Placing::Refuse(why) => panic!("{why}"),
            _ => self.ends[to].placed(now, control),
        }
        self.drain();
    }

    /// The sender's next chunk, not yet on its way; what goes before it is.
    fn chunk(&mut self) -> Out {
        loop {
            let out = self.ends[0].next(self.now).expect("a chunk");
            if out.chunk {
                return out;
            }
            self.deliver(1, &out.head, &[]);
        }
    }

    fn settle(&mut self) {
        self.drain();
        while self.carry(0).is_some() || self.carry(1).is_some() {}
    }

    fn unpack(&mut self, at: usize) {
        let landed = self.landed.remove(at);
        self.ends[1].peer.unpacked(self.now, landed);
        self.drain();
    }
}

#[test]
fn slots_are_acknowledged_as_they_are_unpacked() {
    let mut pair = Pair::new(350);
    pair.settle();
    assert_eq!((pair.landed.len(), pair.ends[0].acked()), (2, 0), "the window holds the slots");
    pair.unpack(1);
    pair.settle();
    assert_eq!((pair.landed.len(), pair.ends[0].acked()), (2, 1));
    pair.unpack(0);
    pair.unpack(0);
    pair.settle();
    assert_eq!((pair.landed.len(), pair.ends[0].acked()), (1, 3));
    assert!(pair.ends[0].done().is_none() && pair.ends[1].done().is_none(), "one is not unpacked");
    pair.unpack(0);
    pair.settle();
    assert_eq!(pair.ends[0].acked(), 4);
    for end in &pair.ends {
        let receipt = end.done().expect("it is over").as_ref().expect("it went well");
        assert_eq!((receipt.bytes, receipt.lanes[0].chunks), (350, 4));
        assert!(end.peer.idle());
    }
}

#[test]
fn one_byte_of_device_memory_goes_in_a_chunk() {
    let mut pair = Pair::new(1);
    pair.settle();
    assert_eq!(pair.landed.len(), 1);
    let write = Operation::Write { key: [0; 24], offset: 0, imm: None };
    let read = Operation::Read { key: [0; 24], offset: 0 };
    // Who may send eagerly: the one that starts, the owner of the region.
    for (operation, here, there, chunks) in [
        (write, true, true, 0),
        (write, true, false, 0),
        (write, false, true, 1),
        (read, true, true, 0),
        (read, false, true, 1),
        (read, true, false, 1),
    ] {
        let mut pair = Pair { ends: [End::new(0), End::new(1)], now: Time(1), landed: Vec::new() };
        pair.ends[1].regions = Eager(there);
        pair.ends[0].peer.start(Time(1), OP, operation, 1, None, here);
        pair.settle();
        assert_eq!(pair.landed.len(), chunks, "{operation:?} {here} {there}");
    }
}

/// Drives both ends' timers over several deadlines; whether the sender suspected its lane.
fn waits(pair: &mut Pair, receiver_lives: bool) -> bool {
    for _ in 0..100 {
        pair.now.0 += DEADLINE / 20;
        for end in 0..2 {
            let due = pair.ends[end].peer.timeout().is_some_and(|at| at <= pair.now);
            if due && (end == 0 || receiver_lives) {
                pair.ends[end].peer.on_timeout(pair.now);
            }
        }
        pair.drain();
        while pair.carry(1).is_some() {}
    }
    pair.ends[0].events.iter().any(|event| matches!(event, Event::Suspect { .. }))
}

#[test]
fn a_receiver_that_unpacks_slowly_is_not_taken_for_dead() {
    for (receiver_lives, suspected) in [(true, false), (false, true)] {
        let mut pair = Pair::new(350);
        pair.settle();
        assert_eq!(pair.landed.len(), 2);
        assert_eq!(waits(&mut pair, receiver_lives), suspected);
        assert_eq!(pair.ends[0].acked(), 0, "what is said again is no news");
        while !pair.landed.is_empty() {
            pair.unpack(0);
            pair.settle();
        }
        assert!(pair.ends[0].done().is_some_and(Result::is_ok));
        assert!(pair.ends[1].peer.timeout().is_none_or(|at| at <= pair.now), "nothing is left to be said");
    }
}

#[test]
fn a_receiver_without_slots_is_not_taken_for_dead() {
    for (receiver_lives, suspected) in [(true, false), (false, true)] {
        let mut pair = Pair::new(150);
        let chunk = pair.chunk();
        for _ in 0..3 {
            let now = pair.now;
            assert!(matches!(pair.ends[1].place(now, &chunk.head), Placing::Memory { chunk: true, .. }));
            pair.ends[1].peer.unplace(now, LANE);
        }
        assert_eq!(waits(&mut pair, receiver_lives), suspected);
        assert_eq!(pair.ends[0].acked(), 0);
        pair.deliver(1, &chunk.head, &[]);
        pair.settle();
        while !pair.landed.is_empty() {
            pair.unpack(0);
            pair.settle();
        }
        assert_eq!(pair.ends[0].acked(), 2, "each chunk counts once, however often it was asked for");
        assert!(pair.ends[0].done().is_some_and(Result::is_ok) && pair.ends[1].done().is_some_and(Result::is_ok));
    }
}

#[test]
fn an_end_that_does_not_listen_takes_nobody_for_dead() {
    let mut pair = Pair::new(150);
    let chunk = pair.chunk();
    let op = OpId { index: 2, generation: 1 };
    // What the receiver says itself is answered behind the head that waits.
    pair.ends[1].peer.start(pair.now, op, Operation::Send { tag: 9 }, 8, None, true);
    assert!(pair.ends[1].next(pair.now).is_some());
    let now = pair.now;
    assert!(matches!(pair.ends[1].place(now, &chunk.head), Placing::Memory { .. }));
    pair.ends[1].peer.unplace(now, LANE);
    let suspects = |end: &End| end.events.iter().any(|event| matches!(event, Event::Suspect { .. }));
    for waits in [true, false] {
        if !waits {
            let now = pair.now;
            assert!(matches!(pair.ends[1].place(now, &chunk.head), Placing::Memory { .. }));
        }
        for step in 1..=40 {
            pair.now.0 += DEADLINE / 20;
            pair.ends[1].peer.on_timeout(pair.now);
            pair.drain();
            assert_eq!(suspects(&pair.ends[1]), !waits && step >= 20, "{step}");
            while pair.ends[1].next(pair.now).is_some() {}
        }
    }
}

#[test]
fn a_head_that_waited_for_what_is_over_by_then_counts_once() {
    let mut pair = Pair::new(150);
    let chunk = pair.chunk();
    let now = pair.now;
    assert!(matches!(pair.ends[1].place(now, &chunk.head), Placing::Memory { .. }));
    pair.ends[1].peer.unplace(now, LANE);
    assert!(pair.ends[1].peer.cancel(now, OP, &Failure::Cancelled));
    assert_eq!(pair.ends[1].place(now, &chunk.head), Placing::Discard);
    pair.settle();
    assert_eq!((pair.ends[0].acked(), pair.ends[0].failure()), (2, Failure::Cancelled), "this one, and the last");
    assert!(pair.ends.iter().all(|end| end.peer.idle()));
}

#[test]
fn a_cancelled_receive_waits_for_its_unpacks_and_then_tells() {
    let mut pair = Pair::new(350);
    pair.settle();
    assert!(pair.ends[1].peer.cancel(pair.now, OP, &Failure::Cancelled));
    pair.settle();
    assert!(pair.ends[1].events.iter().any(|e| matches!(e, Event::Revoke { .. })), "what has not begun can be dropped");
    assert!(pair.ends.iter().all(|end| end.done().is_none()));
    pair.unpack(1);
    assert!(pair.ends[1].done().is_none());
    pair.unpack(0);
    pair.settle();
    assert!(pair.ends.iter().all(|end| end.failure() == Failure::Cancelled && end.peer.idle()));
    assert_eq!(pair.ends[0].acked(), 4, "those too that came when it was over");
}

#[test]
fn what_cannot_be_unpacked_fails_at_both_ends_and_says_why() {
    let mut pair = Pair::new(350);
    pair.settle();
    let landed = pair.landed.remove(1);
    pair.ends[1].peer.unpack_failed(pair.now, landed, "cuMemcpyHtoDAsync: an illegal address".to_owned());
    pair.drain();
    assert!(pair.ends[1].done().is_none(), "the other one is still being unpacked");
    pair.unpack(0);
    pair.settle();
    let why = "cuMemcpyHtoDAsync: an illegal address";
    assert_eq!(pair.ends[1].failure(), Failure::Device(why.to_owned()));
    assert_eq!(pair.ends[0].failure(), Failure::Device(format!("at the peer: {why}")));
    assert_eq!(pair.ends[0].acked(), 4, "those too that came when it was over");
    assert!(pair.ends.iter().all(|end| end.peer.idle()));
}

#[test]
fn what_cannot_be_packed_fails_at_both_ends_and_no_garbage_is_taken_for_it() {
    for payload in [0, 100] {
        let mut pair = Pair::new(150);
        let chunk = pair.chunk();
        let why = "cuMemcpyDtoHAsync: ".to_owned() + &"x".repeat(100);
        pair.ends[0].peer.fail(pair.now, Memory::Op(OP), why.clone());
        let mut void = frame::void(&chunk.head);
        assert_eq!(void.payload_len(), 0);
        // Also with bytes, which a lane may already have begun to send.
        void.0[4] = payload;
        pair.deliver(1, &void, &[]);
        pair.settle();
        assert!(pair.landed.is_empty(), "a void chunk is not for a slot");
        assert_eq!(pair.ends[0].failure(), Failure::Device(why.clone()), "in full where it happened");
        assert_eq!(pair.ends[1].failure(), Failure::Device(format!("at the peer: {}", &why[..64])));
        assert_eq!(pair.ends[0].acked(), 1);
        assert!(pair.ends.iter().all(|end| end.peer.idle()));
    }
}

#[test]
fn a_sender_that_ignores_the_window_is_refused() {
    let mut pair = Pair::new(1000);
    let first = pair.chunk();
    let frame::Frame::Chunk { target, .. } = frame::decode_head(&first.head).expect("readable") else { panic!() };
    pair.deliver(1, &first.head, &[]);
    for at in 1..4u64 {
        let chunk = frame::Frame::Chunk {
            target,
            offset: at * 100,
            from: 1,
            again: false,
            void: false,
            unasked: false,
            lane: 7,
        };
        let head = frame::encode_head(&chunk, 100);
        assert!(matches!(pair.ends[1].place(pair.now, &head), Placing::Memory { .. }));
        match pair.ends[1].peer.landed(pair.now, LANE) {
            Ok(Some(landed)) => pair.landed.push(landed),
            Ok(None) => panic!("it is wanted"),
            Err(why) => {
                assert!(why.contains("window") && pair.landed.len() == 2, "{why}");
                pair.ends[1].drain();
                assert!(pair.ends[1].events.iter().any(|event| matches!(event, Event::Broken { .. })));
                return;
            }
        }
    }
    panic!("it went on and on");
}

#[test]
fn a_read_that_fails_waits_for_its_unpacks() {
    let mut pair = Pair { ends: [End::new(0), End::new(1)], now: Time(1), landed: Vec::new() };
    // The reader is end 1, so that chunks come to it.
    pair.ends[1].peer.start(Time(1), OP, Operation::Read { key: [0; 24], offset: 0 }, 350, None, false);
    pair.settle();
    assert_eq!(pair.landed.len(), 2);
    let region = RegionRef { index: 0, generation: 0 };
    pair.ends[0].peer.region_gone(pair.now, region);
    pair.ends[0].peer.close(pair.now);
    pair.settle();
    assert!(pair.ends[0].events.iter().any(|event| matches!(event, Event::Released { .. })), "the owner is free");
    assert!(pair.ends[1].events.contains(&Event::Bye), "and gone");
    let revoked = Event::Revoke { memory: Memory::Op(OP) };
    assert!(pair.ends[1].events.contains(&revoked), "what has not begun can be dropped");
    assert!(pair.ends[1].done().is_none(), "something is still written to its memory");
    pair.unpack(0);
    assert!(pair.ends[1].done().is_none());
    pair.unpack(0);
    assert_eq!(pair.ends[1].failure(), Failure::Region(RegionFault::Gone), "the owner's word stands");
    pair.settle();
    assert!(pair.ends[1].peer.idle());
}

#[test]
fn an_unpack_of_a_dead_peer_or_lane_comes_too_late_for_nobody() {
    let mut pair = Pair::new(350);
    pair.settle();
    let (first, second) = (pair.landed[0], pair.landed[1]);
    let end = &mut pair.ends[1];
    end.peer.lane_down(pair.now, LANE);
    end.peer.unpacked(pair.now, first);
    assert_eq!(end.peer.progress(OP), Some((100, 350)), "its bytes are there all the same");
    end.peer.dead(pair.now, Failure::PeerDead("gone".to_owned()), &mut end.matcher);
    end.drain();
    assert_eq!(end.failure(), Failure::PeerDead("gone".to_owned()));
    end.peer.unpacked(pair.now, second);
    end.peer.unpack_failed(pair.now, first, "again".to_owned());
    end.peer.fail(pair.now, Memory::Op(OP), "late".to_owned());
    let before = end.events.len();
    end.drain();
    assert_eq!(end.events.len(), before);
    assert!(end.peer.idle());
}

#[test]
fn an_unexpected_message_that_cannot_be_delivered_fails_at_both_ends() {
    let mut pair = Pair { ends: [End::new(0), End::new(1)], now: Time(1), landed: Vec::new() };
    pair.ends[0].peer.start(Time(1), OP, Operation::Send { tag: 7 }, 20, None, true);
    pair.settle();
    assert!(pair.ends[0].done().is_none());
    let end = &mut pair.ends[1];
    let (_, arrival) = end.matcher.post(OP, 7, u64::MAX, None, 20, false).expect("it is there");
    end.peer.accept(pair.now, arrival, OP, 20);
    assert!(matches!(end.peer.event(), Some(Event::Deliver { .. })));
    end.peer.fail(pair.now, Memory::Op(OP), "no copy".to_owned());
    pair.settle();
    assert_eq!(pair.ends[1].failure(), Failure::Device("no copy".to_owned()));
    assert_eq!(pair.ends[0].failure(), Failure::Device("at the peer: no copy".to_owned()));
    assert!(pair.ends.iter().all(|end| end.peer.idle()));
}
