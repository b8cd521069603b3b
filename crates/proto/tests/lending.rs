//! Direct copies that the receiving end leaves to the sending one, step by step: what each end hears, and when.

use crossrail_proto::{
    Access, Body, Config, DirectId, Event, Failure, Host, LaneSpec, Matcher, Memory, Offer, Operation, Peer, Placing,
    Protocol, Receipt, RegionFault, RegionKey, RegionRef, Regions, Role, Time, frame,
};
use crossrail_types::{EndpointId, LaneId, OpId};

const LANE: LaneId = LaneId(0);
const OP: OpId = OpId { index: 1, generation: 1 };
const LEN: u64 = 5000;
const REGION: RegionRef = RegionRef { index: 0, generation: 0 };
/// What each end's descriptor says.
const OURS: [u8; 24] = [1; 24];
const THEIRS: [u8; 24] = [2; 24];

/// One region, there or gone.
struct Table(bool);

impl Regions for Table {
    fn resolve(&mut self, _: &RegionKey, _: u64, _: u64, _: Access) -> Result<RegionRef, RegionFault> {
        Ok(REGION)
    }

    fn alive(&self, _: RegionRef) -> bool {
        self.0
    }
}

struct End {
    peer: Peer,
    matcher: Matcher,
    regions: Table,
    events: Vec<Event>,
}

impl End {
    fn new(id: u32) -> End {
        let config = Config { lane_deadline: 1000, lazy_passes: 0, ..Config::default() };
        let mut peer = Peer::new(EndpointId(id), config);
        let spec = LaneSpec {
            id: LANE,
            reliable: true,
            messages: true,
            bulk: true,
            max_payload: 4096,
            eager_max: 512,
            whole_max: 0,
            counts: false,
            cost_ns: 1,
        };
        peer.lane_up(Time(0), spec);
        End { peer, matcher: Matcher::new(), regions: Table(true), events: Vec::new() }
    }

    fn drain(&mut self) {
        while let Some(event) = self.peer.event() {
            self.events.push(event);
        }
    }

    /// The job that it was asked for last.
    fn job(&self) -> Option<(DirectId, Role, Offer)> {
        self.events.iter().rev().find_map(|event| match event {
            Event::Direct { job, role, offer, .. } => Some((*job, *role, *offer)),
            _ => None,
        })
    }

    fn jobs(&self) -> usize {
        self.events.iter().filter(|event| matches!(event, Event::Direct { .. })).count()
    }

    fn is_stopped(&self) -> bool {
        self.events.iter().any(|event| matches!(event, Event::StopDirect { .. }))
    }

    fn done(&self) -> Option<&Result<Receipt, Failure>> {
        self.events.iter().find_map(|event| match event {
            Event::Done { result, .. } => Some(result),
            _ => None,
        })
    }

    fn released(&self) -> bool {
        self.events.iter().any(|event| matches!(event, Event::Released { .. }))
    }
}

/// A sender, and a receiver that has left the copy to it: the invitation is on its way.
struct Pair {
    ends: [End; 2],
    now: Time,
}

impl Pair {
    fn announced(what: Operation) -> Pair {
        let mut ends = [End::new(0), End::new(1)];
        if let Operation::Send { tag } = what {
            assert!(ends[1].matcher.post(OP, tag, u64::MAX, None, LEN, false).is_none());
        }
        let offer = Offer { descriptor: OURS, slot: None };
        ends[0].peer.start(Time(1), OP, what, LEN, Some(offer), false);
        let mut pair = Pair { ends, now: Time(1) };
        pair.settle();
        let (_, role, offer) = pair.ends[1].job().expect("a job");
        assert_eq!((role, offer), (Role::Pull, Offer { descriptor: OURS, slot: None }));
        pair
    }

    fn new(what: Operation) -> Pair {
        let mut pair = Pair::announced(what);
        let (job, ..) = pair.ends[1].job().expect("a job");
        assert!(pair.ends[1].peer.direct_lend(pair.now, job, THEIRS));
        assert_eq!(pair.ends[1].peer.lending(), Some(pair.now));
        pair
    }

    fn sent() -> Pair {
        Pair::new(Operation::Send { tag: 7 })
    }

    /// The sender has begun.
    fn pushing() -> (Pair, DirectId) {
        Pair::sent().begun()
    }

    fn begun(mut self) -> (Pair, DirectId) {
        self.settle();
        let (job, role, offer) = self.ends[0].job().expect("it is asked to push");
        assert_eq!((role, offer), (Role::Help, Offer { descriptor: THEIRS, slot: None }));
        (self, job)
    }

    /// One frame from that end to the other.
    fn carry(&mut self, from: usize) -> bool {
        self.now.0 += 1;
        let Some(out) = self.ends[from].peer.next(self.now, LANE) else { return false };
        let control = match out.body {
            Body::Inline { bytes, len } => bytes[..usize::from(len)].to_vec(),
            Body::Memory { .. } | Body::None => Vec::new(),
        };
        let End { peer, matcher, regions, .. } = &mut self.ends[1 - from];
        let mut host = Host { matcher, regions };
        match peer.place(self.now, LANE, &out.head, &mut host) {
            Placing::Discard => {}
            Placing::Refuse(why) => panic!("{why}"),
            _ => peer.placed(self.now, LANE, &control, &mut host).expect("an honest peer"),
        }
        self.ends.iter_mut().for_each(End::drain);
        true
    }

    fn settle(&mut self) {
        self.ends.iter_mut().for_each(End::drain);
        while self.carry(0) || self.carry(1) {}
    }

    /// The sender's copy has come to its end.
    fn copied(&mut self, job: DirectId) {
        self.now.0 += 100;
        self.ends[0].peer.direct_done(self.now, job, LEN, 80);
        self.settle();
    }

    fn stopped(&mut self, job: DirectId) {
        self.ends[0].peer.direct_failed(self.now, job);
        self.settle();
    }

    fn both_failed(&self, why: &Failure) {
        for end in &self.ends {
            assert_eq!(end.done().expect("it is over"), &Err(why.clone()));
            assert!(end.peer.idle() && end.peer.lending().is_none());
        }
    }
}

#[test]
fn both_ends_are_done_when_the_sender_has_copied() {
    let (mut pair, job) = Pair::pushing();
    assert!(pair.ends.iter().all(|end| end.done().is_none() && !end.peer.idle()));
    pair.copied(job);
    for end in &pair.ends {
        let receipt = end.done().expect("it is over").as_ref().expect("it went well");
        assert_eq!((receipt.bytes, receipt.protocol, receipt.pushed), (LEN, Protocol::Direct, true));
        assert!(end.peer.idle() && end.peer.lending().is_none());
    }
    let copies = pair.ends.iter().map(|end| end.done().and_then(|done| done.as_ref().ok()).map_or(0, |r| r.copy_ns));
    let copies: Vec<u64> = copies.collect();
    assert!(copies[0] == 80 && (100..200).contains(&copies[1]), "{copies:?}");
    assert_eq!((pair.ends[0].jobs(), pair.ends[1].jobs()), (1, 1));
}

#[test]
fn a_write_is_released_and_told_when_it_is_copied() {
    let (mut pair, job) = Pair::new(Operation::Write { key: [0; 24], offset: 0, imm: Some(3) }).begun();
    assert!(!pair.ends[1].released());
    pair.copied(job);
    assert!(pair.ends[1].released() && pair.ends[1].events.contains(&Event::Imm { region: REGION, imm: 3 }));
    assert!(pair.ends[0].done().is_some_and(|done| done.as_ref().is_ok_and(|receipt| receipt.pushed)));
}

#[test]
fn the_receiver_copies_when_the_sender_can_not_and_asks_no_more() {
    let (mut pair, job) = Pair::pushing();
    pair.stopped(job);
    assert_eq!((pair.ends[1].jobs(), pair.ends[1].peer.lending()), (2, None));
    let (again, role, offer) = pair.ends[1].job().expect("a job");
    assert_eq!((role, offer.descriptor), (Role::Pull, OURS));
    assert!(!pair.ends[1].peer.direct_lend(pair.now, again, THEIRS), "the peer was asked before");
    pair.ends[1].peer.direct_done(pair.now, again, LEN, 50);
    pair.settle();
    for end in &pair.ends {
        let receipt = end.done().expect("it is over").as_ref().expect("it went well");
        assert_eq!((receipt.protocol, receipt.pushed), (Protocol::Direct, false));
    }
}

#[test]
fn chunks_carry_what_neither_end_can_copy() {
    let (mut pair, job) = Pair::pushing();
    pair.stopped(job);
    let (again, ..) = pair.ends[1].job().expect("a job");
    pair.ends[1].peer.direct_failed(pair.now, again);
    pair.settle();
    for end in &pair.ends {
        let receipt = end.done().expect("it is over").as_ref().expect("it went well");
        assert_eq!((receipt.protocol, receipt.pushed), (Protocol::Chunks, false));
    }
}

#[test]
fn a_cancelled_receive_is_over_when_the_sender_has_stopped() {
    for late in [false, true] {
        let (mut pair, job) = Pair::pushing();
        assert!(pair.ends[1].peer.cancel(pair.now, OP, &Failure::Cancelled));
        pair.settle();
        assert!(pair.ends[0].is_stopped());
        assert!(pair.ends.iter().all(|end| end.done().is_none()), "the sender's GPU still writes there");
        if late {
            // It was all copied by then: the receiver has given up on it nevertheless.
            pair.copied(job);
        } else {
            pair.stopped(job);
        }
        pair.both_failed(&Failure::Cancelled);
    }
}

#[test]
fn a_receive_cancelled_before_the_invitation_arrives_is_not_written() {
    let mut pair = Pair::sent();
    assert!(pair.ends[1].peer.cancel(pair.now, OP, &Failure::Cancelled));
    pair.settle();
    let (job, role, _) = pair.ends[0].job().expect("the invitation came first");
    assert_eq!(role, Role::Help);
    assert!(pair.ends[0].is_stopped() && pair.ends[1].done().is_none());
    pair.stopped(job);
    pair.both_failed(&Failure::Cancelled);
}

#[test]
fn a_cancelled_send_stops_and_frees_the_receive() {
    let (mut pair, job) = Pair::pushing();
    assert!(pair.ends[0].peer.cancel(pair.now, OP, &Failure::Cancelled));
    pair.settle();
    assert!(pair.ends[0].is_stopped());
    assert!(pair.ends.iter().all(|end| end.done().is_none()));
    pair.stopped(job);
    pair.both_failed(&Failure::Cancelled);
}

#[test]
fn a_send_cancelled_before_the_invitation_does_not_begin() {
    let mut pair = Pair::sent();
    assert!(pair.ends[0].peer.cancel(pair.now, OP, &Failure::Cancelled));
    pair.settle();
    assert_eq!(pair.ends[0].jobs(), 0);
    pair.both_failed(&Failure::Cancelled);
}

#[test]
fn a_region_that_goes_is_released_when_the_writer_has_stopped() {
    let (mut pair, job) = Pair::new(Operation::Write { key: [0; 24], offset: 0, imm: Some(3) }).begun();
    pair.ends[1].regions.0 = false;
    pair.ends[1].peer.region_gone(pair.now, REGION);
    pair.settle();
    assert!(pair.ends[0].is_stopped() && !pair.ends[1].released());
    pair.stopped(job);
    assert!(pair.ends[1].released());
    assert_eq!(pair.ends[0].done(), Some(&Err(Failure::Region(RegionFault::Gone))));
    assert!(!pair.ends[1].events.iter().any(|event| matches!(event, Event::Imm { .. })));
    assert!(pair.ends.iter().all(|end| end.peer.idle()));
}

#[test]
fn the_death_of_either_end_ends_what_was_left_to_it() {
    let gone = Failure::PeerDead("gone".to_owned());
    for dead in [0, 1] {
        let (mut pair, _) = Pair::pushing();
        let End { peer, matcher, .. } = &mut pair.ends[1 - dead];
        peer.dead(pair.now, gone.clone(), matcher);
        pair.ends[1 - dead].drain();
        assert_eq!(pair.ends[1 - dead].done(), Some(&Err(gone.clone())));
        assert!(pair.ends[1 - dead].peer.idle() && pair.ends[1 - dead].peer.lending().is_none());
    }
}

/// What a hostile end says at any time: nothing of it may do more than end its own operation.
#[test]
fn words_that_nobody_waits_for_change_nothing() {
    let say = |pair: &mut Pair, to: usize, seq: u32, said: &frame::Frame, payload: &[u8]| {
        let mut head = frame::encode_head(said, payload.len() as u32);
        frame::seal(&mut head, seq, 0, 0);
        frame::set_epoch(&mut head, 1);
        let End { peer, matcher, regions, .. } = &mut pair.ends[to];
        let mut host = Host { matcher, regions };
        match peer.place(pair.now, LANE, &head, &mut host) {
            Placing::Refuse(_) => panic!("refused: {said:?}"),
            Placing::Discard => {}
            _ => peer.placed(pair.now, LANE, payload, &mut host).expect("harmless"),
        }
        pair.ends[to].drain();
    };
    // A copy that nobody was asked for is not taken for done.
    let mut pair = Pair::announced(Operation::Send { tag: 7 });
    for seq in 1..4 {
        say(&mut pair, 1, seq, &frame::Frame::HelpEnded { op: 1, failed: seq == 2 }, &[]);
        assert!(pair.ends[1].done().is_none() && pair.ends[1].jobs() == 1);
    }
    let (job, ..) = pair.ends[1].job().expect("a job");
    assert!(pair.ends[1].peer.direct_lend(pair.now, job, THEIRS));
    say(&mut pair, 1, 4, &frame::Frame::HelpEnded { op: 1, failed: true }, &[]);
    say(&mut pair, 1, 5, &frame::Frame::HelpEnded { op: 1, failed: false }, &[]);
    assert!(pair.ends[1].done().is_none() && pair.ends[1].jobs() == 2, "it copies now");

    // Invitations to operations that are not there, or offered nothing, or are being copied, begin nothing.
    let mut sender = Pair { ends: [End::new(0), End::new(1)], now: Time(1) };
    sender.ends[0].peer.start(Time(1), OP, Operation::Send { tag: 7 }, LEN, None, false);
    assert!(sender.carry(0));
    for (seq, op) in [1, 1, 9, u32::MAX, 0].into_iter().enumerate() {
        say(&mut sender, 0, seq as u32, &frame::Frame::Invite { op }, &THEIRS);
    }
    assert_eq!(sender.ends[0].jobs(), 0);
    let offer = Offer { descriptor: OURS, slot: None };
    let second = OpId { index: 2, generation: 1 };
    sender.ends[0].peer.start(Time(1), second, Operation::Send { tag: 8 }, LEN, Some(offer), false);
    while sender.ends[0].peer.next(sender.now, LANE).is_some() {}
    for seq in 5..8 {
        say(&mut sender, 0, seq, &frame::Frame::Invite { op: 2 }, &THEIRS);
        assert_eq!(sender.ends[0].jobs(), 1);
    }
    let Event::Direct { memory, len, .. } = sender.ends[0].events.last().expect("a job") else { panic!("a job") };
    assert_eq!((*memory, *len), (Memory::Op(second), LEN));
}
