//! Two nodes, their wires, and a scheduler that picks what happens next.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use crossrail_proto::{Body, Failure, Host, Placing, Time, frame};
use crossrail_types::{HEAD_LEN, Head};

use crate::checks;
use crate::memory::Span;
use crate::node::{Node, Op};
use crate::plan::{Fault, Plan};
use crate::rng::Rng;
use crate::staging::{Pack, Slot};
use crate::wire::{Arriving, Frame, Sink, Source, Wire, lane_id, wire_of};

/// Far more than the longest schedule takes.
const STEPS_MAX: u64 = 300_000;

/// Both ends' view of a direct copy.
#[derive(Default)]
pub(crate) struct Cursor {
    pub(crate) next: usize,
    pub(crate) copied: usize,
    pub(crate) stopped: bool,
}

pub(crate) struct World {
    pub(crate) rng: Rng,
    pub(crate) plan: Plan,
    pub(crate) now: Time,
    pub(crate) steps: u64,
    pub(crate) nodes: [Node; 2],
    pub(crate) wires: Vec<Wire>,
    /// What descriptors mean.
    pub(crate) spans: Vec<Span>,
    pub(crate) cursors: BTreeMap<u32, Cursor>,
    pub(crate) next_action: [usize; 2],
    /// Operations by the node's `Start`s.
    pub(crate) started: [Vec<usize>; 2],
    /// Numbers of messages, by sender and operation.
    pub(crate) messages: Vec<(usize, usize)>,
    pub(crate) revivals: Vec<u64>,
    pub(crate) trace: bool,
}

impl World {
    pub(crate) fn new(seed: u64, plan: Plan) -> World {
        let mut rng = Rng::new(seed ^ 0xdead_beef);
        let wires: Vec<Wire> = plan.wires.iter().map(|s| Wire::new(s.clone(), &mut rng)).collect();
        let nodes = [0, 1].map(|at| Node::new(at, plan.config.clone(), plan.devices[at]));
        World {
            rng,
            now: Time(1),
            steps: 0,
            nodes,
            wires,
            spans: Vec::new(),
            cursors: BTreeMap::new(),
            next_action: [0; 2],
            started: [Vec::new(), Vec::new()],
            // Number 0 is nobody's: a tag of 0 goes with receives that nothing matched.
            messages: vec![(2, 0)],
            revivals: Vec::new(),
            trace: std::env::var_os("SIM_TRACE").is_some(),
            plan,
        }
    }

    pub(crate) fn log(&self, text: impl FnOnce() -> String) {
        if self.trace {
            eprintln!("{:6} {:8} {}", self.steps, self.now.0, text());
        }
    }

    /// Runs to the end and checks it; answers how many steps it took.
    pub(crate) fn run(&mut self) -> u64 {
        while !self.over() {
            self.steps += 1;
            assert!(self.steps < STEPS_MAX, "no end: {}", self.describe());
            self.faults();
            self.step();
        }
        checks::end(self);
        self.steps
    }

    pub(crate) fn describe(&self) -> String {
        let mut text = String::new();
        for node in &self.nodes {
            let open: Vec<_> = node.ops.iter().filter(|o| o.done.is_none()).map(|o| &o.span.name).collect();
            text += &format!(
                "\nnode {}: open {open:?} dead {} idle {}\n{:?}\n",
                node.index,
                node.down(),
                node.peer.idle(),
                node.peer
            );
        }
        text
    }

    pub(crate) fn step(&mut self) {
        self.now.0 += 1 + self.rng.below(20);
        let node = self.rng.index(2);
        match self.rng.below(100) {
            0..=34 => self.pump(node),
            35..=74 => self.carry(node),
            75..=84 => self.work(node),
            85..=92 if self.plan.slots > 0 && self.rng.one_in(2) => self.stage(node),
            85..=92 => self.copy(node),
            93..=96 => self.timers(node),
            _ => self.chances(node),
        }
    }

    pub(crate) fn over(&self) -> bool {
        let rest = |n: &Node| {
            let copied = n.jobs.is_empty() && n.packs.is_empty() && n.unpacks.is_empty();
            let quiet = n.finished() && n.matcher.unexpected() == 0 && copied;
            n.crashed || (quiet && (n.dead || (n.peer.idle() && self.plan_done(n.index))))
        };
        self.nodes.iter().all(rest)
    }

    pub(crate) fn plan_done(&self, node: usize) -> bool {
        self.next_action[node] >= self.plan.actions[node].len()
    }

    // ---- lanes

    pub(crate) fn any_wire(&mut self) -> Option<usize> {
        let total: u64 = self.wires.iter().filter(|w| !w.over()).map(|w| w.weight).sum();
        let mut at = self.rng.below(total);
        for (index, wire) in self.wires.iter().enumerate().filter(|(_, w)| !w.over()) {
            if at < wire.weight {
                return Some(index);
            }
            at -= wire.weight;
        }
        None
    }

    /// A lane with room asks what is next.
    pub(crate) fn pump(&mut self, node: usize) {
        let Some(wire) = self.any_wire() else { return };
        let n = &mut self.nodes[node];
        let w = &mut self.wires[wire];
        if !w.usable(node) || n.down() || w.out[node].len() >= w.room() {
            return;
        }
        let id = lane_id(wire, node);
        let (wants, urgent) = (n.peer.wants(id), n.peer.has_urgent(id));
        assert!(wants || !urgent, "urgent output is wanted");
        let Some(out) = n.peer.next(self.now, id) else { return };
        assert!(wants, "next has something that wants did not promise");
        let len = out.head.payload_len() as usize;
        let source = match out.body {
            Body::None => Source::Bytes(Vec::new()),
            Body::Inline { bytes, len } => Source::Bytes(bytes[..usize::from(len)].to_vec()),
            Body::Memory { memory, offset, .. } => {
                let span = n.span(memory);
                if span.device && len > 0 {
                    assert!(out.chunk, "{} goes out with a first frame", span.name);
                    let (slot, memory) = (Slot::default(), memory);
                    n.packs.push(Pack { memory, span, offset, len, slot: slot.clone(), wire, dropped: false });
                    Source::Slot(slot)
                } else {
                    Source::Span { span, offset }
                }
            }
        };
        let frame = frame::decode_head(&out.head).expect("a frame that we can read");
        assert_eq!(out.chunk, matches!(frame, frame::Frame::Chunk { .. }));
        if let frame::Frame::Chunk { lane, .. } = frame {
            w.numbers[node] = lane;
            let slot = if let Source::Slot(slot) = &source { Some(slot.clone()) } else { None };
            n.given.entry(id).or_default().push_back(slot);
            w.outstanding[node] += 1;
            assert!(w.outstanding[node] <= self.plan.config.window, "more chunks outstanding than the window holds");
            assert!(len <= w.spec.max_payload as usize && len as u64 <= self.plan.config.chunk);
        } else {
            assert!(w.spec.messages || matches!(frame, frame::Frame::ChunkAck { .. }));
        }
        self.wires[wire].out[node].push_back(Frame { head: out.head, source, len, cut: None });
        self.log(|| format!("node {node} wire {wire} sends {frame:?} {len}"));
        self.settle(node);
    }

    /// Some bytes arrive at `node`.
    pub(crate) fn carry(&mut self, node: usize) {
        let Some(wire) = self.any_wire() else { return };
        let w = &self.wires[wire];
        if self.nodes[node].down() || !w.usable(node) || (w.silent && !w.waits[node]) {
            return;
        }
        if self.nodes[node].broken.is_some() {
            return self.dead(node);
        }
        if self.wires[wire].spec.counts {
            self.count(wire, node);
            self.settle(node);
        }
        if self.wires[wire].arriving[node].is_none() {
            let out = &mut self.wires[wire].out[1 - node];
            let Some(frame) = out.front().is_some_and(Frame::ready).then(|| out.pop_front()).flatten() else { return };
            self.head(wire, node, frame);
        }
        if self.wires[wire].arriving[node].is_some() && !self.wires[wire].silent {
            self.payload(wire, node);
        }
        self.settle(node);
    }

    /// `node` publishes its count, or looks at the other's where all frames before it have come in.
    fn count(&mut self, wire: usize, node: usize) {
        let (w, n) = (&mut self.wires[wire], &mut self.nodes[node]);
        if let Some(count) = n.peer.unpublished_count(lane_id(wire, node)).filter(|_| self.rng.one_in(2)) {
            w.counts[node] = count;
            n.peer.count_published(count);
        }
        if w.out[1 - node].is_empty() && w.arriving[node].is_none() && self.rng.one_in(2) {
            let ended = &mut |short| n.copied.push(short);
            n.peer.published(self.now, w.counts[1 - node], ended).expect("an honest peer's count was refused");
        }
    }

    pub(crate) fn head(&mut self, wire: usize, node: usize, frame: Frame) {
        if self.wires[wire].spec.whole_max as usize >= frame.len && frame.cut.is_some_and(|cut| cut < frame.len) {
            return; // A lane that delivers whole frames never shows part of one.
        }
        if let Ok(frame::Frame::ChunkAck { count, lane }) = frame::decode_head(&frame.head) {
            let of = match lane {
                0 => Some(wire),
                number => self.wires.iter().position(|wire| wire.numbers[node] == number),
            };
            if let Some(w) = of.map(|of| &mut self.wires[of]) {
                let news = count.wrapping_sub(w.told[node]);
                // A later count may have overtaken it on another wire.
                if news < 1 << 31 {
                    w.told[node] = count;
                    w.outstanding[node] = w.outstanding[node].checked_sub(news).expect("chunks acknowledged twice");
                }
            }
        }
        let n = &mut self.nodes[node];
        let (now, lane) = (self.now, lane_id(wire, node));
        let placing =
            match n.peer.place_short(now, lane, &frame.head, &mut n.matcher, &mut |short| n.copied.push(short)) {
                Some(short) => Placing::Message(short),
                None => {
                    let mut host = Host { matcher: &mut n.matcher, regions: &mut n.regions };
                    n.peer.place(now, lane, &frame.head, &mut host)
                }
            };
        if self.trace {
            let text = format!("node {node} wire {wire} gets {:?} {placing:?}", frame::decode_head(&frame.head));
            self.log(|| text);
        }
        let n = &mut self.nodes[node];
        let (sink, len) = match placing {
            Placing::Memory { memory, offset, len, chunk } => {
                let (span, bytes) = (n.span(memory), vec![0; len as usize]);
                let sink = match span.device && len > 0 {
                    true if chunk && self.slots_full(node) => {
                        self.nodes[node].peer.unplace(self.now, lane_id(wire, node));
                        self.wires[wire].out[1 - node].push_front(frame);
                        self.wires[wire].waits[node] = true;
                        return;
                    }
                    true if chunk => Sink::Slot { memory, span, bytes },
                    true => Sink::Bounce { memory, span, bytes },
                    false => Sink::Span { span, offset },
                };
                (sink, len as usize)
            }
            Placing::Message(short) => {
                let bytes = frame.read(0, frame.len);
                assert_eq!(short.bytes, frame.len as u64);
                n.span(crossrail_proto::Memory::Op(short.op)).lane_write(0, &bytes);
                n.copied.push(short);
                self.wires[wire].waits[node] = false;
                return;
            }
            Placing::Unexpected { arrival, len } => {
                let buffer = Rc::new(RefCell::new(vec![0; len as usize]));
                n.arrivals.insert(arrival, buffer.clone());
                let kept: usize = n.arrivals.values().map(|a| a.borrow().len()).sum();
                assert!(kept as u64 <= self.plan.config.eager_credit, "{kept} unexpected bytes kept");
                (Sink::Buffer(buffer), len as usize)
            }
            Placing::Control { len } => (Sink::Control(vec![0; len as usize]), len as usize),
            Placing::Discard => (Sink::Discard, frame.len),
            Placing::Refuse(why) => panic!("an honest peer was refused: {why}"),
        };
        assert_eq!(len, frame.len);
        self.wires[wire].waits[node] = false;
        self.wires[wire].arriving[node] = Some(Arriving { frame, at: 0, sink });
    }

    pub(crate) fn payload(&mut self, wire: usize, node: usize) {
        let Some(mut arriving) = self.wires[wire].arriving[node].take() else { return };
        let end = arriving.frame.cut.unwrap_or(arriving.frame.len);
        let left = end - arriving.at;
        let some = if self.rng.one_in(2) { left } else { self.rng.index(left + 1) };
        let bytes = arriving.frame.read(arriving.at, some);
        match &mut arriving.sink {
            Sink::Discard => {}
            Sink::Span { span, offset } => span.lane_write(*offset + arriving.at as u64, &bytes),
            Sink::Buffer(buffer) => buffer.borrow_mut()[arriving.at..arriving.at + some].copy_from_slice(&bytes),
            Sink::Control(buffer) | Sink::Slot { bytes: buffer, .. } | Sink::Bounce { bytes: buffer, .. } => {
                buffer[arriving.at..arriving.at + some].copy_from_slice(&bytes);
            }
        }
        arriving.at += some;
        if arriving.at < arriving.frame.len {
            self.wires[wire].arriving[node] = Some(arriving);
            return;
        }
        let control = match arriving.sink {
            Sink::Discard => return,
            // A lane that was told to leave the memory alone may or may not say that it came to the end.
            Sink::Span { span, .. } if span.pass.revoked.get() && self.rng.one_in(2) => return,
            Sink::Control(bytes) => bytes,
            Sink::Slot { .. } => return self.land(wire, node, arriving.sink),
            Sink::Bounce { .. } => return self.bounce(wire, node, arriving.sink),
            _ => Vec::new(),
        };
        self.nodes[node].placed(self.now, lane_id(wire, node), &control);
    }

    /// What goes on by itself: lanes come up, their deaths are noticed.
    pub(crate) fn chances(&mut self, node: usize) {
        if self.nodes[node].down() {
            return;
        }
        for wire in 0..self.wires.len() {
            let w = &mut self.wires[wire];
            if !w.up[node] && !w.down[node] && self.rng.one_in(2) {
                w.up[node] = true;
                let mut spec = w.spec.clone();
                spec.id = lane_id(wire, node);
                self.nodes[node].peer.lane_up(self.now, spec);
                self.log(|| format!("node {node} wire {wire} up"));
            } else if w.down[1 - node] && !w.down[node] && self.rng.one_in(3) {
                self.lane_down(wire, node);
            }
        }
        self.settle(node);
        let hopeless = self.wires.iter().all(|w| w.down[node] || !w.spec.messages) && self.revivals.is_empty();
        if hopeless || self.nodes[node].broken.is_some() {
            self.dead(node);
        }
    }

    pub(crate) fn lane_down(&mut self, wire: usize, node: usize) {
        let w = &mut self.wires[wire];
        if w.down[node] {
            return;
        }
        let was_up = w.up[node];
        w.drop_end(node, &mut self.rng);
        let first = !self.wires[wire].down[1 - node];
        self.nodes[node].packs.retain(|p| p.wire != wire);
        if was_up && !self.nodes[node].down() {
            self.nodes[node].peer.lane_down(self.now, lane_id(wire, node));
        }
        self.log(|| format!("node {node} wire {wire} down"));
        if first && self.plan.revive && self.wires.len() < 12 {
            self.revivals.push(self.steps + 50 + self.rng.below(500));
        }
        self.settle(node);
    }

    pub(crate) fn dead(&mut self, node: usize) {
        if self.nodes[node].down() {
            return;
        }
        self.log(|| format!("node {node} is told that its peer is dead"));
        for wire in 0..self.wires.len() {
            if !self.wires[wire].down[node] {
                let w = &mut self.wires[wire];
                w.drop_end(node, &mut self.rng);
            }
        }
        let n = &mut self.nodes[node];
        n.jobs.clear();
        n.packs.clear();
        let unpacks = std::mem::take(&mut n.unpacks);
        n.dead = true;
        n.peer.dead(self.now, Failure::PeerDead("by the plan".into()), &mut n.matcher);
        for unpack in unpacks {
            // The stager's word may come late.
            if self.rng.one_in(2) {
                n.peer.unpacked(self.now, unpack.landed);
            }
        }
        self.settle(node);
    }

    pub(crate) fn faults(&mut self) {
        let due: Vec<Fault> = {
            let steps = self.steps;
            let (due, later) = self.plan.faults.drain(..).partition(|(at, _)| *at <= steps);
            self.plan.faults = later;
            let due: Vec<(u64, Fault)> = due;
            due.into_iter().map(|(_, fault)| fault).collect()
        };
        for fault in due {
            self.log(|| format!("fault {fault:?}"));
            match fault {
                Fault::Kill { wire, by } => self.lane_down(wire, by),
                Fault::Silence { wire } => self.wires[wire].silent = !self.wires[wire].spec.reliable,
                Fault::Garbage { wire, node } => self.garbage(wire, node),
                Fault::SilenceAll => self.wires.iter_mut().for_each(|w| w.silent = !w.spec.reliable),
                Fault::Crash { node } => {
                    for wire in 0..self.wires.len() {
                        if !self.wires[wire].down[node] {
                            self.wires[wire].drop_end(node, &mut self.rng);
                        }
                    }
                    self.nodes[node].crashed = true;
                    self.plan.revive = false;
                    self.revivals.clear();
                }
                Fault::Cancel { node } => {
                    let open = |(_, o): &(usize, &Op)| o.done.is_none() && !o.cancelled;
                    let all: Vec<usize> =
                        self.nodes[node].ops.iter().enumerate().filter(open).map(|(i, _)| i).collect();
                    if !all.is_empty() && !self.nodes[node].down() {
                        let op = self.rng.pick(&all);
                        self.cancel(node, op);
                        self.settle(node);
                    }
                }
                Fault::Deregister { node, region } => {
                    self.deregister(node, region);
                    self.settle(node);
                }
                Fault::Close { node } => self.close(node),
                Fault::Partition => {
                    self.dead(0);
                    self.dead(1);
                }
            }
        }
        let steps = self.steps;
        let before = self.revivals.len();
        self.revivals.retain(|at| *at > steps);
        for _ in self.revivals.len()..before {
            let spec = self.plan.wires[self.rng.index(self.plan.wires.len())].clone();
            let mut wire = Wire::new(spec, &mut self.rng);
            wire.spec.messages = true;
            wire.spec.bulk = true;
            wire.spec.reliable = false;
            // Nobody answers for a process that is gone.
            wire.down = [self.nodes[0].down(), self.nodes[1].down()];
            // The dialling end takes it for a lane, and the other one has given the handshake up: what the first sends
            // goes nowhere, until it notices.
            wire.down[1] |= self.rng.one_in(4);
            self.wires.push(wire);
        }
    }

    /// What is no frame comes in, in place of the next head: that lane fails, and the connection with it only if no
    /// other is there.
    fn garbage(&mut self, wire: usize, node: usize) {
        let w = &self.wires[wire];
        let others = (0..self.wires.len()).any(|at| at != wire && self.wires[at].usable(node));
        if w.spec.reliable || !w.usable(node) || w.arriving[node].is_some() || !others || self.nodes[node].down() {
            return;
        }
        let mut head = Head([0; HEAD_LEN]);
        match self.rng.below(3) {
            // A handshake.
            0 => head.0[..6].copy_from_slice(b"\xc5XRAIL"),
            // A message far ahead, of whatever epoch.
            1 => {
                head = frame::encode_head(&frame::Frame::Nothing, 0);
                let stamp = frame::Stamp { seq: 1 << 24, ack: 0, epoch: self.rng.below(1 << 15) as u16 };
                stamp.put(&mut head, 0);
            }
            // An acknowledgement of chunks that nobody sent.
            _ => head = frame::encode_head(&frame::Frame::ChunkAck { count: 1 << 24, lane: 0 }, 0),
        }
        let n = &mut self.nodes[node];
        let mut host = Host { matcher: &mut n.matcher, regions: &mut n.regions };
        let live = n.peer.failed().is_none();
        match n.peer.place(self.now, lane_id(wire, node), &head, &mut host) {
            Placing::Refuse(_) => {}
            // Late, or nobody listens any more.
            Placing::Discard => return,
            other => panic!("garbage was placed: {other:?}"),
        }
        assert!(!live || n.peer.failed().is_none(), "one lane's garbage broke the connection off");
        self.lane_down(wire, node);
    }

    pub(crate) fn timers(&mut self, node: usize) {
        if self.nodes[node].down() {
            return;
        }
        if self.rng.one_in(4) {
            self.now.0 += 2000;
        }
        let n = &mut self.nodes[node];
        if n.peer.timeout().is_some_and(|at| at <= self.now) {
            n.peer.on_timeout(self.now);
        }
        self.settle(node);
        for lane in std::mem::take(&mut self.nodes[node].suspects) {
            let wire = wire_of(lane);
            let w = &self.wires[wire];
            let gone = w.silent || w.down[1 - node] || (self.plan.nervous && self.rng.one_in(8));
            self.log(|| format!("node {node} suspects wire {wire}: {gone}"));
            if gone {
                self.lane_down(wire, node);
            } else {
                self.nodes[node].peer.lane_alive(self.now, lane);
                if self.rng.one_in(2) {
                    self.nodes[node].peer.probe(lane);
                }
            }
        }
    }

    // ---- events

    pub(crate) fn settle(&mut self, node: usize) {
        let undelivered = self.breaks(10);
        let World { nodes, messages, now, .. } = self;
        let [a, b] = nodes;
        let (n, other) = if node == 0 { (a, b) } else { (b, a) };
        (n.now, n.undelivered) = (*now, undelivered);
        n.drain(&mut |n, op| checks::done(n, other, messages, op));
        checks::immediates(n, other);
    }
}
