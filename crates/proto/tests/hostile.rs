//! A peer that sends anything at all: mutated, reordered and invented frames must never panic, never place a byte
//! outside what was announced, and never make this end hold more than its credits allow.
//!
//! A failing seed is printed; `HOSTILE_SEED=<n> cargo test -p crossrail-proto --test hostile` replays it.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crossrail_proto::{
    Access, Body, Config, DirectId, Event, Failure, Host, Landed, LaneSpec, Matcher, Memory, Offer, Operation, Peer,
    Placing, RegionFault, RegionKey, RegionRef, Regions, Time, frame,
};
use crossrail_types::{EndpointId, Head, LaneId, OpId};

const REGION: u64 = 1000;
const CAPACITY: u64 = 500;

struct Rng(u64);

impl Rng {
    fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.word() % n.max(1)
    }
}

struct OneRegion {
    alive: bool,
}

impl Regions for OneRegion {
    fn resolve(&mut self, key: &RegionKey, offset: u64, len: u64, _: Access) -> Result<RegionRef, RegionFault> {
        if key[0] != 1 || !self.alive {
            return Err(RegionFault::Gone);
        }
        match offset.checked_add(len) {
            Some(end) if end <= REGION => Ok(RegionRef { index: 0, generation: 0 }),
            _ => Err(RegionFault::Bounds),
        }
    }

    fn alive(&self, _: RegionRef) -> bool {
        self.alive
    }
}

fn config() -> Config {
    Config {
        chunk: 64,
        window: 3,
        eager_credit: 600,
        message_credit: 8,
        lane_deadline: 1000,
        lazy_passes: 0,
        spread_min: 1,
        spread_above: 0,
        spread_gain: 0,
    }
}

/// One end, with all that it was asked to do.
struct End {
    peer: Peer,
    matcher: Matcher,
    regions: OneRegion,
    ops: u32,
    open: Vec<OpId>,
    jobs: Vec<DirectId>,
    unexpected: Vec<(u32, u64)>,
    /// Chunks in slots, and the memory they are for.
    landed: Vec<(Landed, Memory)>,
    dice: Rng,
    now: Time,
}

impl End {
    fn new(id: u32) -> End {
        let mut peer = Peer::new(EndpointId(id), config());
        for lane in 0..3 {
            let spec = LaneSpec {
                id: LaneId(lane),
                // A peer may send anything on either.
                reliable: lane == 1,
                messages: true,
                bulk: true,
                max_payload: 4096,
                eager_max: 100,
                whole_max: 50 * u32::from(lane == 1),
                counts: false,
                cost_ns: u64::from(lane),
            };
            peer.lane_up(Time(0), spec);
        }
        End {
            peer,
            matcher: Matcher::new(),
            regions: OneRegion { alive: true },
            ops: 0,
            open: Vec::new(),
            jobs: Vec::new(),
            unexpected: Vec::new(),
            landed: Vec::new(),
            dice: Rng(u64::from(id)),
            now: Time(1),
        }
    }

    fn op(&mut self) -> OpId {
        self.ops += 1;
        let op = OpId { index: self.ops, generation: 0 };
        self.open.push(op);
        op
    }

    fn ask(&mut self, rng: &mut Rng) {
        let len = rng.below(CAPACITY);
        let slot = (rng.below(2) == 0).then_some(1);
        let offer = (rng.below(3) == 0).then_some(Offer { descriptor: [5; 24], slot });
        let mut key = [0; 24];
        key[0] = 1;
        match rng.below(7) {
            0 | 1 => {
                let op = self.op();
                let (tag, mask) = (rng.below(3), if rng.below(2) == 0 { 0 } else { 3 });
                if let Some((_, arrival)) =
                    self.matcher.post(op, tag, mask, None, CAPACITY, !self.ops.is_multiple_of(3))
                {
                    self.peer.accept(self.now, arrival, op, CAPACITY);
                }
            }
            2 | 3 => {
                let op = self.op();
                self.peer.start(self.now, op, Operation::Send { tag: rng.below(3) }, len, offer, rng.below(2) == 0);
            }
            4 => {
                let op = self.op();
                self.peer.start(
                    self.now,
                    op,
                    Operation::Write { key, offset: 0, imm: Some(3) },
                    len,
                    offer,
                    rng.below(2) == 0,
                );
            }
            5 => {
                let op = self.op();
                self.peer.start(self.now, op, Operation::Read { key, offset: 0 }, len, offer, rng.below(2) == 0);
            }
            _ => {
                if let Some(&op) = self.open.get(rng.below(self.open.len() as u64) as usize) {
                    if !self.matcher.cancel(op) {
                        self.peer.cancel(self.now, op, &Failure::Cancelled);
                    } else {
                        self.open.retain(|o| *o != op);
                    }
                }
            }
        }
    }

    fn finished(&mut self, op: OpId) {
        let before = self.open.len();
        self.open.retain(|o| *o != op);
        assert_eq!(self.open.len() + 1, before, "{op} finished twice");
        let unpacks = |(_, memory): &(Landed, Memory)| *memory == Memory::Op(op);
        assert!(!self.landed.iter().any(unpacks), "{op} is over and still unpacked into");
    }

    fn drain(&mut self) {
        while let Some(event) = self.peer.event() {
            match event {
                Event::Done { op, .. } => self.finished(op),
                Event::Deliver { arrival, len, .. } => {
                    assert!(u64::from(len) <= CAPACITY);
                    self.unexpected.retain(|(a, _)| *a != arrival);
                }
                Event::DropArrival { arrival } => self.unexpected.retain(|(a, _)| *a != arrival),
                Event::Direct { job, .. } => self.jobs.push(job),
                Event::Released { passive, .. } => {
                    let of = |memory: &Memory| matches!(memory, Memory::Region { passive: p, .. } if *p == passive);
                    assert!(!self.landed.iter().any(|(_, memory)| of(memory)), "an access is over and still unpacked");
                }
                _ => {}
            }
        }
    }

    fn receive(&mut self, lane: LaneId, head: &Head, payload: &[u8]) -> bool {
        let mut ended = Vec::new();
        let short = self.peer.place_short(self.now, lane, head, &mut self.matcher, &mut |short| ended.push(short));
        ended.iter().for_each(|short| self.finished(short.op));
        let placing = match short {
            Some(short) => Placing::Message(short),
            None => {
                let mut host = Host { matcher: &mut self.matcher, regions: &mut self.regions };
                self.peer.place(self.now, lane, head, &mut host)
            }
        };
        let len = head.payload_len();
        let control = match placing {
            Placing::Refuse(_) => return false,
            Placing::Discard => return true,
            Placing::Memory { chunk: true, .. } if self.dice.below(8) == 0 => {
                self.peer.unplace(self.now, lane);
                return self.receive(lane, head, payload);
            }
            Placing::Memory { memory, offset, len: placed, chunk } => {
                assert_eq!(placed, len);
                let end = offset.checked_add(u64::from(len)).expect("no overflow");
                match memory {
                    Memory::Op(_) => assert!(end <= CAPACITY, "placed up to {end}"),
                    Memory::Region { base, .. } => {
                        assert!(base.checked_add(end).expect("no overflow") <= REGION, "placed up to {base} + {end}");
                    }
                }
                if chunk && self.dice.below(2) == 0 {
                    let landed = self.peer.landed(self.now, lane);
                    self.landed.extend(landed.iter().flatten().map(|landed| (*landed, memory)));
                    return landed.is_ok();
                }
                &[][..]
            }
            Placing::Message(short) => {
                assert!(short.bytes == u64::from(len) && len <= 50, "{len} bytes in one step");
                self.finished(short.op);
                return true;
            }
            Placing::Unexpected { arrival, len: placed, .. } => {
                assert_eq!(placed, len);
                self.unexpected.retain(|(a, _)| *a != arrival);
                self.unexpected.push((arrival, u64::from(len)));
                let kept: u64 = self.unexpected.iter().map(|(_, len)| len).sum();
                assert!(kept <= config().eager_credit, "{kept} unexpected bytes");
                &[][..]
            }
            Placing::Control { len: placed, .. } => {
                assert!(placed == len && len <= frame::CONTROL_MAX);
                payload
            }
        };
        let mut host = Host { matcher: &mut self.matcher, regions: &mut self.regions };
        self.peer.placed(self.now, lane, control, &mut host).is_ok()
    }
}

impl End {
    /// The device goes on with something, or fails.
    fn stage(&mut self) {
        if self.landed.is_empty() {
            return;
        }
        let at = self.dice.below(self.landed.len() as u64) as usize;
        match self.dice.below(8) {
            0 => self.peer.fail(self.now, self.landed[at].1, "out of order".to_owned()),
            1 => {
                let (landed, _) = self.landed.swap_remove(at);
                self.peer.unpack_failed(self.now, landed, "out of order".to_owned());
            }
            _ => {
                let (landed, _) = self.landed.swap_remove(at);
                self.peer.unpacked(self.now, landed);
            }
        }
    }

    fn dies(&mut self, why: &str) {
        self.drain();
        // The engine has quiesced its unpacks; words about some of them come late.
        let late = std::mem::take(&mut self.landed);
        self.peer.dead(self.now, Failure::PeerDead(why.to_owned()), &mut self.matcher);
        for (landed, _) in late {
            self.peer.unpacked(self.now, landed);
        }
        self.drain();
    }
}

/// What `end` sends, as bytes.
fn frames(end: &mut End, lane: LaneId, to: &mut VecDeque<(LaneId, Head, Vec<u8>)>) {
    while let Some(out) = end.peer.next(end.now, lane) {
        let payload = match out.body {
            Body::None => Vec::new(),
            Body::Inline { bytes, len } => bytes[..usize::from(len)].to_vec(),
            Body::Memory { len, .. } => vec![1; len as usize],
        };
        to.push_back((lane, out.head, payload));
    }
}

fn spoil(rng: &mut Rng, head: &mut Head, payload: &mut Vec<u8>) {
    match rng.below(6) {
        0 => head.0[rng.below(32) as usize] = rng.word() as u8,
        1 => {
            let at = 8 + 4 * rng.below(6) as usize;
            let value = [0, 1, 2, 7, u32::MAX, 0x8000_0000][rng.below(6) as usize];
            head.0[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        2 if !payload.is_empty() => {
            let at = rng.below(payload.len() as u64) as usize;
            payload[at] = rng.word() as u8;
        }
        3 => head.0[0] = rng.below(36) as u8,
        4 => {
            for byte in &mut head.0[rng.below(32) as usize..] {
                *byte = rng.word() as u8;
            }
        }
        _ => {
            let len = [0, 8, 16, 24, 36, 40, 64, 100, 4096][rng.below(9) as usize];
            head.0[4..8].copy_from_slice(&u32::to_le_bytes(len));
        }
    }
    payload.resize(head.payload_len() as usize % (1 << 16), 3);
}

/// `good` talks to `bad`, whose words are spoiled on the way once in a while.
fn schedule(seed: u64) {
    let mut rng = Rng(seed);
    let (mut good, mut bad) = (End::new(1), End::new(2));
    let spoiled_after = rng.below(60);
    for step in 0..120 {
        good.now.0 += 10;
        bad.now.0 += 10;
        for end in [&mut good, &mut bad] {
            if rng.below(2) == 0 {
                end.ask(&mut rng);
            }
            if rng.below(2) == 0 {
                end.stage();
            }
            if rng.below(20) == 0 {
                end.now.0 += 300;
                end.peer.on_timeout(end.now);
            }
            if let (Some(job), true) = (end.jobs.first().copied(), rng.below(3) == 0) {
                match rng.below(4) {
                    0 => end.peer.direct_invite(end.now, job, [6; 24]),
                    1 => {
                        if end.peer.direct_lend(end.now, job, [6; 24]) {
                            end.jobs.remove(0);
                        }
                    }
                    2 => {
                        end.jobs.remove(0);
                        end.peer.direct_done(end.now, job, 1, 1);
                    }
                    _ => {
                        end.jobs.remove(0);
                        end.peer.direct_failed(end.now, job);
                    }
                }
            }
        }
        let mut sent = VecDeque::new();
        for lane in [LaneId(0), LaneId(1)] {
            frames(&mut good, lane, &mut sent);
        }
        for (lane, head, payload) in sent.drain(..) {
            bad.receive(lane, &head, &payload);
        }
        for lane in [LaneId(0), LaneId(1)] {
            frames(&mut bad, lane, &mut sent);
        }
        if step > spoiled_after && rng.below(3) == 0 {
            let mut invented = Head([0; 32]);
            spoil(&mut rng, &mut invented, &mut Vec::new());
            invented.0[0] = rng.below(36) as u8;
            let len = (invented.payload_len() % (1 << 16)) as usize;
            invented.0[4..8].copy_from_slice(&(len as u32).to_le_bytes());
            sent.push_back((LaneId(0), invented, vec![9; len]));
        }
        for (lane, mut head, mut payload) in sent.drain(..) {
            if step > spoiled_after && rng.below(8) == 0 {
                spoil(&mut rng, &mut head, &mut payload);
            }
            if !good.receive(lane, &head, &payload) {
                // The engine's answer to a violation.
                good.dies("refused");
            }
        }
        good.drain();
        bad.drain();
    }
    good.dies("the end");
    for op in std::mem::take(&mut good.open) {
        // What is left waits in the matcher, or can be served by what came in whole.
        assert!(good.matcher.cancel(op), "{op} is lost");
    }
    assert!(good.peer.idle());
}

#[test]
fn no_frame_does_harm() {
    let only = std::env::var("HOSTILE_SEED").ok().and_then(|s| s.parse().ok());
    let seeds = only.map_or(0..20_000, |seed: u64| seed..seed + 1);
    for seed in seeds {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| schedule(seed))) {
            eprintln!("replay with: HOSTILE_SEED={seed} cargo test -p crossrail-proto --test hostile");
            resume_unwind(panic);
        }
    }
}

#[test]
fn decoders_take_any_bytes() {
    let mut rng = Rng(5);
    for _ in 0..200_000 {
        let mut head = Head([0; 32]);
        head.0.iter_mut().for_each(|b| *b = rng.word() as u8);
        head.0[0] %= 40;
        let bytes: Vec<u8> = (0..rng.below(70)).map(|_| rng.word() as u8).collect();
        head.0[4..8].copy_from_slice(&(bytes.len() as u32).to_le_bytes());
        if let Ok(decoded) = frame::decode_head(&head) {
            let again = frame::encode_head(&decoded, head.payload_len());
            assert_eq!(frame::decode_head(&again), Ok(decoded), "what is read can be written");
        }
        let flag = rng.below(2) == 0;
        let _ = frame::decode_announce(&bytes, flag, bytes.len() % 2 == 1);
        let _ = frame::decode_write(&bytes, flag);
        let _ = frame::decode_read(&bytes, flag);
        let _ = frame::decode_invite(&bytes);
        let _ = frame::decode_failure(rng.word() as u8, &bytes);
        let _ = frame::decode_abort(rng.word() as u8, &bytes);
        assert_eq!(frame::decode_done(&bytes).count(), bytes.len() / 4);
    }
}

/// An announcement takes no credit, the bytes of its message do: more than there is are refused, and were never counted.
#[test]
fn unasked_bytes_beyond_the_credit_are_refused_and_not_counted() {
    let len = config().eager_credit as u32 + 1;
    let mut end = End::new(1);
    let mut send = |lane, decoded: &frame::Frame, payload: &[u8]| {
        let mut head = frame::encode_head(decoded, payload.len() as u32);
        frame::seal(&mut head, 0, 0, 0);
        frame::set_epoch(&mut head, 1);
        end.receive(LaneId(lane), &head, payload)
    };
    let announce = frame::Frame::Announce { op: 1, tag: 1, offer: false, unasked: true };
    let payload = [&u64::from(len).to_le_bytes()[..], &0u32.to_le_bytes()].concat();
    assert!(send(0, &announce, &payload));
    let target = frame::Target { index: 0, serial: 0 };
    let chunk = frame::Frame::Chunk { target, offset: 0, from: 0, again: false, void: false, unasked: true, lane: 7 };
    assert!(!send(2, &chunk, &vec![1; len as usize]));
    end.dies("a lane brought more than its credit");
}

/// A peer that asks and asks and never listens is cut off before its answers fill the memory.
#[test]
fn a_deaf_peer_is_cut_off() {
    for asks in ["reads", "writes of nothing", "puts of nobody knows what"] {
        let mut end = End::new(1);
        let mut cut_off = None;
        let mut seq = 0;
        for round in 0..10_000 {
            let mut send = |end: &mut End, decoded: &frame::Frame, payload: &[u8]| {
                let mut head = frame::encode_head(decoded, payload.len() as u32);
                frame::seal(&mut head, seq, 0, 0);
                frame::set_epoch(&mut head, 1);
                seq += 1;
                end.receive(LaneId(0), &head, payload)
            };
            let mut payload = [0; 40];
            let alive = match asks {
                "writes of nothing" => {
                    payload[0] = 1;
                    let write = frame::Frame::Write { op: 1, len: 0, imm: false, data: true, offer: false };
                    send(&mut end, &write, &payload[..36]) && send(&mut end, &frame::Frame::WriteData { op: 1 }, &[])
                }
                "reads" => {
                    let target = frame::Target { index: 0, serial: 0 };
                    send(&mut end, &frame::Frame::Read { op: 1, target, offer: false, chunks: false }, &payload)
                }
                _ => send(&mut end, &frame::Frame::Put { op: 1, name: 9 }, &payload),
            };
            end.drain();
            if !alive {
                cut_off = Some(round);
                break;
            }
        }
        assert!(cut_off.is_some_and(|round| round < 1000), "cut off after {cut_off:?} {asks}");
    }
}
