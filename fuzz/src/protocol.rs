use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crossrail_proto::{
    Access, Body, Config, DirectId, Event, Failure, Host, Landed, LaneSpec, Matcher, Memory, Offer, Operation, Out,
    Peer, Placing, RegionFault, RegionKey, RegionRef, Regions, Time,
};
use crossrail_types::{EndpointId, Head, LaneId, OpId};

use crate::input::Input;

const PEER: EndpointId = EndpointId(1);
pub(crate) const LANES: usize = 2;
/// Largest payload that a lane's frames may have here.
const MAX_PAYLOAD: u32 = 16 * 1024;
const REGION_LEN: u64 = 64 * 1024;
const EAGER_CREDIT: u64 = 64 * 1024;
const MOST_OPS: u32 = 64;
/// The windows of all lanes that there may have been since the oldest chunk came.
const MOST_LANDED: usize = 4096;

/// The key of region `index` here: one may be read and written, one only read.
pub(crate) fn region_key(index: u8) -> RegionKey {
    [index + 1; 24]
}

thread_local! {
    static FRAMES: Cell<u64> = const { Cell::new(0) };
}

/// Frames that this thread has fed to peers.
pub fn frames() -> u64 {
    FRAMES.get()
}

/// Untrusted frames, interleaved with local operations. Checks for every input: no panic, no access outside an
/// operation's memory or a region, none after its operation has ended, and that every operation ends once.
pub fn protocol(input: &[u8]) {
    let mut input = Input::new(input);
    let mut end = End::new(input.byte());
    while !input.is_empty() && !end.over {
        end.step(&mut input);
    }
    end.finish();
}

/// Two regions; either may be deregistered.
struct Table([bool; 2]);

impl Regions for Table {
    fn resolve(&mut self, key: &RegionKey, offset: u64, len: u64, access: Access) -> Result<RegionRef, RegionFault> {
        let index = (0..2u8).find(|index| *key == region_key(*index)).ok_or(RegionFault::Gone)?;
        if !self.0[usize::from(index)] {
            return Err(RegionFault::Gone);
        }
        if index == 1 && access == Access::Write {
            return Err(RegionFault::Access);
        }
        match offset.checked_add(len) {
            Some(end) if end <= REGION_LEN => Ok(RegionRef { index: index.into(), generation: 0 }),
            _ => Err(RegionFault::Bounds),
        }
    }

    fn lend(&mut self, name: u64, len: u64) -> Result<RegionRef, RegionFault> {
        let index = u8::try_from(name).ok().filter(|index| *index < 2).ok_or(RegionFault::Gone)?;
        self.resolve(&region_key(index), 0, len, Access::Write)
    }

    fn alive(&self, region: RegionRef) -> bool {
        self.0[region.index as usize]
    }

    fn eager(&self, region: RegionRef) -> bool {
        region.index == 0
    }
}

/// One end of a connection: the protocol, and an engine that checks all it is asked to do.
pub(crate) struct End {
    peer: Peer,
    matcher: Matcher,
    table: Table,
    now: Time,
    reliable: bool,
    pub(crate) lanes: [LaneId; LANES],
    next_lane: u32,
    /// Where the payload of the last frame went: the memory, the offset, and how much of it.
    pub(crate) placed: Option<(Memory, u64, u32)>,
    /// Why a frame of the peer's was found wrong, if one was.
    pub(crate) refused: Option<String>,
    /// Operations in flight, with the bytes of their memory.
    ops: BTreeMap<(u32, u32), u64>,
    /// The receives from any source among them.
    open_receives: BTreeSet<(u32, u32)>,
    next_op: u32,
    kept: BTreeMap<u32, u32>,
    jobs: VecDeque<DirectId>,
    /// Whether chunks are received into slots; then `landed` holds them and their destinations.
    staged: bool,
    landed: Vec<(Landed, Memory)>,
    pub(crate) over: bool,
}

impl End {
    /// `kind`: bit 0: the lanes are reliable; bit 1: small chunks; bit 2: acknowledgements at once.
    pub(crate) fn new(kind: u8) -> End {
        let config = Config {
            chunk: if kind & 2 == 0 { 4096 } else { 512 },
            window: 4,
            eager_credit: EAGER_CREDIT,
            message_credit: 16,
            lane_deadline: 50_000_000,
            lazy_passes: u32::from(kind & 4 == 0),
            spread_min: 16,
            spread_above: 64,
            spread_gain: 0,
        };
        let mut end = End {
            peer: Peer::new(PEER, config),
            matcher: Matcher::new(),
            table: Table([true; 2]),
            now: Time(1),
            reliable: kind & 1 != 0,
            lanes: [LaneId(0); LANES],
            next_lane: 1,
            placed: None,
            refused: None,
            ops: BTreeMap::new(),
            open_receives: BTreeSet::new(),
            next_op: 1,
            kept: BTreeMap::new(),
            jobs: VecDeque::new(),
            staged: false,
            landed: Vec::new(),
            over: false,
        };
        for place in 0..LANES {
            end.lane_up(place);
        }
        end
    }

    fn lane_up(&mut self, place: usize) {
        let id = LaneId(self.next_lane);
        self.next_lane += 1;
        self.lanes[place] = id;
        let spec = LaneSpec {
            id,
            reliable: self.reliable,
            messages: true,
            bulk: true,
            max_payload: MAX_PAYLOAD,
            eager_max: 1024,
            whole_max: if self.reliable { 512 } else { 0 },
            counts: false,
            cost_ns: 1000 * (place as u64 + 1),
        };
        self.peer.lane_up(self.now, spec);
    }

    /// The lane ends, and another takes its place.
    pub(crate) fn replace_lane(&mut self, place: usize) {
        self.peer.lane_down(self.now, self.lanes[place]);
        self.drain();
        if !self.over {
            self.lane_up(place);
        }
    }

    /// One action, as the input has it (`seeds.rs` writes them), and the frames that it made this end send.
    pub(crate) fn step(&mut self, input: &mut Input<'_>) -> Vec<Out> {
        self.now.0 += 1_000_000;
        let action = input.byte();
        let place = usize::from(action >> 3) % LANES;
        let mut frames = Vec::new();
        match action & 7 {
            0..=3 => self.frame(place, input),
            4 => self.start(input),
            5 => self.receive(input),
            6 => self.other(place, input),
            _ => frames = self.carry(place, usize::from(action >> 4) + 1),
        }
        self.drain();
        frames
    }

    /// Whether a direct copy is wanted.
    pub(crate) fn has_job(&self) -> bool {
        !self.jobs.is_empty()
    }

    /// A frame comes in.
    fn frame(&mut self, place: usize, input: &mut Input<'_>) {
        self.placed = None;
        FRAMES.set(FRAMES.get() + 1);
        let head = Head(input.array());
        let lane = self.lanes[place];
        let payload = head.payload_len();
        let mut host = Host { matcher: &mut self.matcher, regions: &mut self.table };
        let placing = self.peer.place(self.now, lane, &head, &mut host);
        let control = match placing {
            Placing::Memory { memory, offset, len, chunk } => {
                assert!(len <= payload, "{len} bytes are placed out of {payload}");
                self.check_memory(memory, offset, len.into());
                self.placed = Some((memory, offset, len));
                if chunk && self.staged {
                    return self.land(place, memory);
                }
                Vec::new()
            }
            Placing::Message(short) => {
                assert_eq!(short.bytes, u64::from(payload));
                assert!(self.reliable && payload <= 512, "{payload} bytes in one step");
                self.check_memory(Memory::Op(short.op), 0, short.bytes);
                self.end_op(short.op);
                return;
            }
            Placing::Unexpected { arrival, len } => {
                assert!(len <= payload, "a buffer of {len} bytes for a payload of {payload}");
                self.kept.insert(arrival, len);
                let kept: u64 = self.kept.values().map(|len| u64::from(*len)).sum();
                assert!(kept <= EAGER_CREDIT, "{kept} bytes kept for a stranger");
                Vec::new()
            }
            Placing::Control { len } => {
                assert!(len <= 4096 && len <= payload, "{len} bytes of control in {payload}");
                input.bytes(len as usize)
            }
            Placing::Discard => return,
            Placing::Refuse(why) => return self.refuse(place, why),
        };
        self.drain();
        if self.over {
            return;
        }
        let mut host = Host { matcher: &mut self.matcher, regions: &mut self.table };
        if let Err(why) = self.peer.placed(self.now, lane, &control, &mut host) {
            self.refuse(place, why);
        }
    }

    /// A frame was wrong: its lane ends.
    fn refuse(&mut self, place: usize, why: impl Into<String>) {
        let why = why.into();
        assert!(!why.is_empty());
        self.refused.get_or_insert(why);
        self.replace_lane(place);
    }

    /// A chunk is in its slot.
    fn land(&mut self, place: usize, memory: Memory) {
        match self.peer.landed(self.now, self.lanes[place]) {
            Ok(Some(landed)) => {
                assert!(self.landed.len() < MOST_LANDED, "more chunks in slots than the windows hold");
                self.landed.push((landed, memory));
            }
            Ok(None) => {}
            Err(why) => self.refuse(place, why),
        }
    }

    /// Takes a chunk out of its slot, unless the device fails.
    fn unpack(&mut self, which: usize, fails: bool) {
        if which < self.landed.len() {
            let (landed, memory) = self.landed.swap_remove(which);
            if let Memory::Op(_) = memory {
                self.check_memory(memory, landed.offset, landed.len.into());
            }
            match fails {
                true => self.peer.unpack_failed(self.now, landed, "no copy".to_owned()),
                false => self.peer.unpacked(self.now, landed),
            }
        }
    }

    fn start(&mut self, input: &mut Input<'_>) {
        let (what, tag) = (input.byte(), input.byte());
        let len = u64::from(u16::from_le_bytes(input.array()));
        let Some(op) = self.op(len) else { return };
        let offset = u64::from(tag) * 256;
        let operation = match what & 3 {
            0 if what & 128 != 0 => Operation::Put { name: tag.into(), key: region_key(tag & 1) },
            0 => Operation::Write { key: region_key(what >> 3 & 1), offset, imm: (what & 4 != 0).then_some(7) },
            1 => Operation::Read { key: region_key(what >> 3 & 1), offset },
            _ => Operation::Send { tag: tag.into() },
        };
        let slot = (what & 32 != 0).then_some(3);
        let offer = (what & 16 != 0).then_some(Offer { descriptor: [9; 24], slot });
        self.peer.start(self.now, op, operation, len, offer, what & 64 == 0);
    }

    fn receive(&mut self, input: &mut Input<'_>) {
        let (what, tag) = (input.byte(), input.byte());
        let capacity = u64::from(u16::from_le_bytes(input.array()));
        let Some(op) = self.op(capacity) else { return };
        let from = (what & 1 != 0).then_some(PEER);
        if from.is_none() {
            self.open_receives.insert((op.index, op.generation));
        }
        let mask = if what & 2 != 0 { 0 } else { u64::MAX };
        if let Some((peer, arrival)) = self.matcher.post(op, tag.into(), mask, from, capacity, what & 4 == 0) {
            assert_eq!(peer, PEER);
            self.peer.accept(self.now, arrival, op, capacity);
        }
    }

    fn op(&mut self, len: u64) -> Option<OpId> {
        (self.next_op <= MOST_OPS).then(|| self.new_op(len))
    }

    fn new_op(&mut self, len: u64) -> OpId {
        let op = OpId { index: self.next_op, generation: self.next_op };
        self.next_op += 1;
        self.ops.insert((op.index, op.generation), len);
        op
    }

    fn other(&mut self, place: usize, input: &mut Input<'_>) {
        let what = input.byte();
        match what & 15 {
            0 => self.peer.flush(),
            1 | 2 => self.cancel(u32::from(what >> 4)),
            3 => self.replace_lane(place),
            4 => {
                self.now.0 += 60_000_000;
                self.peer.on_timeout(self.now);
            }
            5 => self.peer.lane_alive(self.now, self.lanes[place]),
            6 => self.peer.close(self.now),
            7 | 8 => {
                if let Some(job) = self.jobs.pop_front() {
                    self.peer.direct_done(self.now, job, u64::from(input.byte()), 10);
                }
            }
            9 => {
                if let Some(job) = self.jobs.pop_front() {
                    self.peer.direct_failed(self.now, job);
                }
            }
            10 => {
                if let Some(job) = self.jobs.front() {
                    self.peer.direct_invite(self.now, *job, [5; 24]);
                    if self.peer.direct_lend(self.now, *job, [5; 24]) {
                        self.jobs.pop_front();
                    }
                }
            }
            11 => {
                let index = what >> 4 & 1;
                if std::mem::take(&mut self.table.0[usize::from(index)]) {
                    self.peer.region_gone(self.now, RegionRef { index: index.into(), generation: 0 });
                }
            }
            12 if what >> 4 == 0 => self.staged = !self.staged,
            12 => self.peer.unplace(self.now, self.lanes[place]),
            13 => self.unpack(usize::from(what >> 4), false),
            14 if what >> 7 == 0 => self.unpack(usize::from(what >> 4), true),
            14 => {
                if let Some((_, memory)) = self.landed.get(usize::from(what >> 4 & 7)) {
                    self.peer.fail(self.now, *memory, "an error of the device".to_owned());
                }
            }
            _ => {
                let _ = (self.peer.idle(), self.peer.timeout(), self.peer.wants(self.lanes[place]));
            }
        }
    }

    fn cancel(&mut self, which: u32) {
        let Some((&(index, generation), _)) = self.ops.iter().nth(which as usize) else { return };
        let op = OpId { index, generation };
        if self.matcher.cancel(op) {
            self.end_op(op); // as the engine does: a receive that had matched nothing
        } else {
            let _ = self.peer.cancel(self.now, op, &Failure::Cancelled);
        }
    }

    /// What the lane carries next, at most `most` frames of it.
    fn carry(&mut self, place: usize, most: usize) -> Vec<Out> {
        let mut frames = Vec::new();
        while frames.len() < most && !self.over {
            let Some(out) = self.peer.next(self.now, self.lanes[place]) else { break };
            let len = match out.body {
                Body::None => 0,
                Body::Inline { len, .. } => {
                    assert!(len <= 64);
                    u32::from(len)
                }
                Body::Memory { memory, offset, len } => {
                    self.check_memory(memory, offset, len.into());
                    len
                }
            };
            assert_eq!(out.head.payload_len(), len);
            assert!(len <= MAX_PAYLOAD, "a frame with a payload of {len} bytes");
            frames.push(out);
            self.drain();
        }
        frames
    }

    fn check_memory(&self, memory: Memory, offset: u64, len: u64) {
        let (base, room) = match memory {
            Memory::Op(op) => match self.ops.get(&(op.index, op.generation)) {
                Some(room) => (0, *room),
                None => panic!("memory of {op}, which is over"),
            },
            Memory::Region { region, base, .. } => {
                assert!(self.table.alive(region), "memory of a region that is gone");
                (base, REGION_LEN)
            }
        };
        let end = base.checked_add(offset).and_then(|start| start.checked_add(len));
        assert!(end.is_some_and(|end| end <= room), "{base} + {offset} + {len} bytes in {room}");
    }

    fn drain(&mut self) {
        while let Some(event) = self.peer.event() {
            match event {
                Event::Done { op, result, .. } => {
                    if let Ok(receipt) = result {
                        let shares: u64 = receipt.lanes.iter().map(|share| share.bytes).sum();
                        // A stranger may claim to have what never went out, but no lane carried more than there was.
                        assert!(shares <= receipt.bytes, "{receipt:?}");
                    }
                    self.end_op(op);
                }
                Event::Deliver { arrival, op, len } => {
                    let kept = self.kept.remove(&arrival);
                    assert!(kept.is_some_and(|kept| len <= kept), "{len} bytes of arrival {arrival}: {kept:?}");
                    self.check_memory(Memory::Op(op), 0, len.into());
                }
                Event::DropArrival { arrival } => drop(self.kept.remove(&arrival)),
                Event::Direct { job, memory, len, .. } => {
                    assert!(!self.jobs.contains(&job), "two jobs {job:?}");
                    self.check_memory(memory, 0, len);
                    self.jobs.push_back(job);
                }
                Event::StopDirect { job } => {
                    if let Some(at) = self.jobs.iter().position(|known| *known == job) {
                        self.jobs.remove(at);
                        self.peer.direct_failed(self.now, job);
                    }
                }
                Event::Suspect { lane } => {
                    if lane.0 % 2 == 0 {
                        self.peer.lane_alive(self.now, lane);
                        self.peer.probe(lane);
                    } else if let Some(place) = self.lanes.iter().position(|known| *known == lane) {
                        self.peer.lane_down(self.now, lane);
                        self.lane_up(place);
                    }
                }
                Event::Broken { why } => {
                    assert!(!why.is_empty());
                    self.refused.get_or_insert(why);
                    self.die();
                }
                Event::Released { passive, .. } => {
                    let of = |memory: &Memory| matches!(memory, Memory::Region { passive: p, .. } if *p == passive);
                    let unpacks = self.landed.iter().any(|(_, memory)| of(memory));
                    assert!(!unpacks, "access {passive} is over and still unpacked into");
                }
                Event::Imm { .. }
                | Event::Revoke { .. }
                | Event::Acked { .. }
                | Event::LaneLost { .. }
                | Event::Bye => {}
            }
        }
    }

    fn end_op(&mut self, op: OpId) {
        let unpacks = self.landed.iter().any(|(_, memory)| *memory == Memory::Op(op));
        assert!(!unpacks, "{op} is over and still unpacked into");
        let key = (op.index, op.generation);
        self.open_receives.remove(&key);
        assert!(self.ops.remove(&key).is_some(), "{op} ends twice");
    }

    fn die(&mut self) {
        if !std::mem::replace(&mut self.over, true) {
            let late = std::mem::take(&mut self.landed);
            self.peer.dead(self.now, Failure::PeerDead("gone".to_owned()), &mut self.matcher);
            for (landed, _) in late {
                self.peer.unpacked(self.now, landed);
            }
        }
    }

    /// The peer dies, and with it all that was in flight.
    pub(crate) fn finish(mut self) {
        self.die();
        self.drain();
        while let Some(job) = self.jobs.pop_front() {
            self.peer.direct_failed(self.now, job);
            self.drain();
        }
        let waiting: Vec<_> = self.ops.keys().filter(|op| !self.open_receives.contains(op)).collect();
        assert!(waiting.is_empty(), "never ended: {waiting:?}");
        for (index, generation) in std::mem::take(&mut self.open_receives) {
            assert!(self.matcher.cancel(OpId { index, generation }), "op {index} neither waits nor ended");
            self.ops.remove(&(index, generation));
        }
        assert_eq!(self.matcher.posted(), 0);
        // What had come whole before the peer died is received all the same.
        while self.matcher.unexpected() > 0 {
            let before = self.matcher.unexpected();
            let op = self.new_op(EAGER_CREDIT);
            let found = self.matcher.post(op, 0, 0, None, EAGER_CREDIT, true);
            let (_, arrival) = found.unwrap_or_else(|| panic!("a message that waits fits no receive"));
            self.peer.accept(self.now, arrival, op, EAGER_CREDIT);
            self.drain();
            assert!(self.ops.is_empty(), "a message that had come is not delivered");
            assert!(self.matcher.unexpected() < before);
        }
        assert!(self.kept.is_empty(), "buffers never given back: {:?}", self.kept);
    }
}
