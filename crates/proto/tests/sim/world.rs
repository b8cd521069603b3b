//! Two nodes, their wires, and a scheduler that picks what happens next.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use crossrail_proto::{Body, Failure, Host, Memory, Offer, Operation, Placing, Role, Time, frame};
use crossrail_types::OpId;

use crate::checks;
use crate::memory::{Pass, Span, filled, key};
use crate::node::{Node, Op, endpoint};
use crate::plan::{Action, Fault, Key, Plan, Work};
use crate::rng::Rng;
use crate::wire::{Arriving, Frame, Sink, Source, Wire, lane_id, wire_of};

const GENERATION: u32 = 9;
/// Far more than the longest schedule takes.
const STEPS_MAX: u64 = 300_000;

/// Both ends' view of a direct copy.
#[derive(Default)]
pub(crate) struct Cursor {
    next: usize,
    copied: usize,
    stopped: bool,
}

pub(crate) struct World {
    pub(crate) rng: Rng,
    pub(crate) plan: Plan,
    pub(crate) now: Time,
    pub(crate) steps: u64,
    pub(crate) nodes: [Node; 2],
    pub(crate) wires: Vec<Wire>,
    /// What descriptors mean.
    spans: Vec<Span>,
    cursors: BTreeMap<u32, Cursor>,
    next_action: [usize; 2],
    /// Operations by the node's `Start`s.
    started: [Vec<usize>; 2],
    /// Numbers of messages, by sender and operation.
    pub(crate) messages: Vec<(usize, usize)>,
    revivals: Vec<u64>,
    trace: bool,
}

impl World {
    pub(crate) fn new(seed: u64, plan: Plan) -> World {
        let mut rng = Rng::new(seed ^ 0xdead_beef);
        let wires: Vec<Wire> = plan.wires.iter().map(|s| Wire::new(s.clone(), &mut rng)).collect();
        let nodes = [Node::new(0, plan.config.clone()), Node::new(1, plan.config.clone())];
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

    fn log(&self, text: impl FnOnce() -> String) {
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

    fn step(&mut self) {
        self.now.0 += 1 + self.rng.below(20);
        let node = self.rng.index(2);
        match self.rng.below(100) {
            0..=34 => self.pump(node),
            35..=74 => self.carry(node),
            75..=84 => self.work(node),
            85..=92 => self.copy(node),
            93..=96 => self.timers(node),
            _ => self.chances(node),
        }
    }

    fn over(&self) -> bool {
        let rest = |n: &Node| {
            let quiet = n.finished() && n.matcher.unexpected() == 0 && n.jobs.is_empty();
            n.crashed || (quiet && (n.dead || (n.peer.idle() && self.plan_done(n.index))))
        };
        self.nodes.iter().all(rest)
    }

    fn plan_done(&self, node: usize) -> bool {
        self.next_action[node] >= self.plan.actions[node].len()
    }

    // ---- lanes

    fn any_wire(&mut self) -> Option<usize> {
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
    fn pump(&mut self, node: usize) {
        let Some(wire) = self.any_wire() else { return };
        let n = &mut self.nodes[node];
        let w = &mut self.wires[wire];
        if !w.usable(node) || n.down() || w.out[node].len() >= w.room() {
            return;
        }
        let id = lane_id(wire, node);
        let (wants, presses) = (n.peer.wants(id), n.peer.presses(id));
        assert!(wants || !presses, "what presses is wanted");
        let Some(out) = n.peer.next(self.now, id) else { return };
        assert!(wants, "next has something that wants did not promise");
        let len = out.head.payload_len() as usize;
        let source = match out.body {
            Body::None => Source::Bytes(Vec::new()),
            Body::Inline { bytes, len } => Source::Bytes(bytes[..usize::from(len)].to_vec()),
            Body::Memory { memory, offset, .. } => Source::Span { span: n.span(memory), offset },
        };
        let frame = frame::decode_head(&out.head).expect("a frame that we can read");
        if matches!(frame, frame::Frame::Chunk { .. }) {
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
    fn carry(&mut self, node: usize) {
        let Some(wire) = self.any_wire() else { return };
        if self.nodes[node].down() || !self.wires[wire].usable(node) || self.wires[wire].silent {
            return;
        }
        if self.nodes[node].broken.is_some() {
            return self.dead(node);
        }
        if self.wires[wire].arriving[node].is_none() {
            let Some(frame) = self.wires[wire].out[1 - node].pop_front() else { return };
            self.head(wire, node, frame);
        }
        if self.wires[wire].arriving[node].is_some() {
            self.payload(wire, node);
        }
        self.settle(node);
    }

    fn head(&mut self, wire: usize, node: usize, frame: Frame) {
        let n = &mut self.nodes[node];
        if let Ok(frame::Frame::ChunkAck { count }) = frame::decode_head(&frame.head) {
            let w = &mut self.wires[wire];
            let news = count.wrapping_sub(w.told[node]);
            w.told[node] = count;
            w.outstanding[node] = w.outstanding[node].checked_sub(news).expect("chunks acknowledged twice");
        }
        let mut host = Host { matcher: &mut n.matcher, regions: &mut n.regions };
        let placing = n.peer.place(self.now, lane_id(wire, node), &frame.head, &mut host);
        if self.trace {
            let text = format!("node {node} wire {wire} gets {:?} {placing:?}", frame::decode_head(&frame.head));
            self.log(|| text);
        }
        let n = &mut self.nodes[node];
        let (sink, len) = match placing {
            Placing::Memory { memory, offset, len } => (Sink::Span { span: n.span(memory), offset }, len as usize),
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
        self.wires[wire].arriving[node] = Some(Arriving { frame, at: 0, sink });
    }

    fn payload(&mut self, wire: usize, node: usize) {
        let Some(mut arriving) = self.wires[wire].arriving[node].take() else { return };
        let end = arriving.frame.cut.unwrap_or(arriving.frame.len);
        let left = end - arriving.at;
        let some = if self.rng.one_in(2) { left } else { self.rng.index(left + 1) };
        let bytes = arriving.frame.read(arriving.at, some);
        match &mut arriving.sink {
            Sink::Discard => {}
            Sink::Span { span, offset } => span.lane_write(*offset + arriving.at as u64, &bytes),
            Sink::Buffer(buffer) => buffer.borrow_mut()[arriving.at..arriving.at + some].copy_from_slice(&bytes),
            Sink::Control(buffer) => buffer[arriving.at..arriving.at + some].copy_from_slice(&bytes),
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
            _ => Vec::new(),
        };
        let n = &mut self.nodes[node];
        let mut host = Host { matcher: &mut n.matcher, regions: &mut n.regions };
        n.peer.placed(self.now, lane_id(wire, node), &control, &mut host).expect("an honest peer was refused");
    }

    /// What goes on by itself: lanes come up, their deaths are noticed.
    fn chances(&mut self, node: usize) {
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
        n.dead = true;
        n.peer.dead(self.now, Failure::PeerDead("by the plan".into()), &mut n.matcher);
        self.settle(node);
    }

    fn faults(&mut self) {
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
            self.wires.push(wire);
        }
    }

    fn timers(&mut self, node: usize) {
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
            }
        }
    }

    // ---- what the user does

    fn work(&mut self, node: usize) {
        if self.nodes[node].crashed {
            return;
        }
        let at = self.next_action[node];
        if let Some(action) = self.plan.actions[node].get(at).cloned() {
            self.next_action[node] += 1;
            self.log(|| format!("node {node} {action:?}"));
            match action {
                Action::Start { work, len } => self.start(node, work, len),
                Action::Cancel(of) => {
                    if let Some(&op) = self.started[node].get(of) {
                        self.cancel(node, op);
                    }
                }
                Action::Deregister(region) => self.deregister(node, region),
                Action::Close => self.close(node),
            }
        } else {
            self.wind_up(node);
        }
        self.settle(node);
    }

    /// After the plan: unexpected messages find receives, and receives that nobody sends to are taken back.
    fn wind_up(&mut self, node: usize) {
        if let Some((_, _, len)) = self.nodes[node].matcher.probe(0, 0, None) {
            self.start(node, Work::Receive { tag: 0, mask: 0, from: false }, len as usize);
            return;
        }
        let other = &self.nodes[1 - node];
        let sends_open = other.ops.iter().any(|o| o.done.is_none() && matches!(o.work, Work::Send { .. }));
        let more = !self.plan_done(1 - node) || sends_open;
        if !self.plan_done(node) || (more && !self.nodes[node].down() && !other.down() && !self.nodes[node].bye) {
            return;
        }
        let waiting =
            self.nodes[node].ops.iter().position(|o| o.done.is_none() && matches!(o.work, Work::Receive { .. }));
        if let Some(op) = waiting {
            let n = &mut self.nodes[node];
            if n.matcher.cancel(n.ops[op].id) {
                let id = n.ops[op].id;
                n.ops[op].cancelled = true;
                n.finish(id, Err(Failure::Cancelled), u64::MAX);
            }
        }
    }

    fn cancel(&mut self, node: usize, op: usize) {
        let n = &mut self.nodes[node];
        if n.ops[op].done.is_some() {
            return;
        }
        n.ops[op].cancelled = true;
        let id = n.ops[op].id;
        if n.matcher.cancel(id) {
            n.finish(id, Err(Failure::Cancelled), u64::MAX);
        } else {
            assert!(n.peer.cancel(self.now, id), "nobody knows {}", n.ops[op].span.name);
        }
    }

    fn close(&mut self, node: usize) {
        self.nodes[node].closed = true;
        self.nodes[node].peer.close(self.now);
    }

    fn deregister(&mut self, node: usize, region: usize) {
        let n = &mut self.nodes[node];
        n.regions.0[region].alive = false;
        n.peer.region_gone(self.now, crossrail_proto::RegionRef { index: region as u32, generation: 3 });
    }

    fn start(&mut self, node: usize, work: Work, len: usize) {
        let index = self.nodes[node].ops.len();
        let id = OpId { index: index as u32, generation: GENERATION };
        let number = match work {
            Work::Send { .. } => {
                self.messages.push((node, index));
                self.messages.len() as u64 - 1
            }
            _ => (1 + node as u64) * 10_000 + index as u64,
        };
        let bytes = match work {
            Work::Send { .. } | Work::Write { .. } => filled(number, len),
            Work::Receive { .. } | Work::Read { .. } => vec![0; len],
        };
        let name = format!("op {index} of node {node} ({work:?}, {len} bytes, number {number})");
        let span = Span { bytes: Rc::new(RefCell::new(bytes)), base: 0, pass: Rc::new(Pass::default()), name };
        let (offer, slot) = match work {
            Work::Send { offer, slot, .. } | Work::Write { offer, slot, .. } => (offer, slot),
            Work::Read { offer, .. } => (offer, false),
            Work::Receive { .. } => (false, false),
        };
        let offer = offer.then(|| Offer { descriptor: self.describe_span(&span), slot: slot.then_some(number as u32) });
        if let Some(slot) = offer.and_then(|o| o.slot) {
            self.cursors.insert(slot, Cursor::default());
        }
        let n = &mut self.nodes[node];
        n.ops.push(Op { id, work: work.clone(), number, span, len, done: None, cancelled: false });
        self.started[node].push(index);
        let region_key = |region, kind| {
            let mut k = key(1 - node, region);
            if kind == Key::Wrong {
                k[2] = 0;
            }
            k
        };
        let place = |offset, kind| if kind == Key::OutOfBounds { u64::MAX - 2 } else { offset };
        let what = match work {
            Work::Receive { tag, mask, from } => {
                n.posts.push(index);
                let from = from.then(|| endpoint(1 - node));
                match n.matcher.post(id, u64::from(tag), mask, from, len as u64) {
                    Some((_, arrival)) => n.peer.accept(self.now, arrival, id, len as u64),
                    None if n.peer.failed().is_some() => {
                        n.matcher.cancel(id);
                        n.finish(id, Err(n.peer.failed().unwrap()), u64::MAX);
                    }
                    None => {}
                }
                return;
            }
            Work::Send { tag, .. } => Operation::Send { tag: number << 8 | u64::from(tag) },
            Work::Write { region, offset, imm, key, .. } => Operation::Write {
                key: region_key(region, key),
                offset: place(offset, key),
                imm: imm.then_some(number as u32),
            },
            Work::Read { region, offset, key, .. } => {
                Operation::Read { key: region_key(region, key), offset: place(offset, key) }
            }
        };
        if let (Operation::Send { tag }, None) = (what, offer)
            && self.send_now(node, id, tag, len)
        {
            return;
        }
        self.nodes[node].peer.start(self.now, id, what, len as u64, offer);
    }

    /// Puts a short message on a wire in the same call, where that can be.
    fn send_now(&mut self, node: usize, op: OpId, tag: u64, len: usize) -> bool {
        let wire = self.rng.index(self.wires.len());
        let w = &mut self.wires[wire];
        let n = &mut self.nodes[node];
        if n.down() || !w.usable(node) || w.out[node].len() >= w.room() {
            return false;
        }
        let Some(head) = n.peer.send_now(self.now, op, tag, len as u64, lane_id(wire, node)) else { return false };
        let source = Source::Span { span: n.span(Memory::Op(op)), offset: 0 };
        w.out[node].push_back(Frame { head, source, len, cut: None });
        self.log(|| format!("node {node} wire {wire} sends at once {:?} {len}", frame::decode_head(&head)));
        true
    }

    // ---- direct copies

    fn describe_span(&mut self, span: &Span) -> [u8; 24] {
        self.spans.push(span.clone());
        let mut d = [0; 24];
        d[..8].copy_from_slice(&(self.spans.len() as u64 - 1).to_le_bytes());
        d
    }

    fn copy(&mut self, node: usize) {
        let ids: Vec<u32> = self.nodes[node].jobs.keys().copied().collect();
        if ids.is_empty() || self.nodes[node].down() {
            return;
        }
        let id = self.rng.pick(&ids);
        let (invite, fail) = (self.rng.one_in(2), self.rng.one_in(12));
        let job = &self.nodes[node].jobs[&id];
        let slot = job.offer.slot;
        if job.role == Role::Pull && !job.invited && slot.is_some() && invite && !job.stopping {
            let local = job.local.clone();
            let descriptor = self.describe_span(&local);
            self.nodes[node].jobs.get_mut(&id).unwrap().invited = true;
            self.nodes[node].peer.direct_invite(self.now, crossrail_proto::DirectId(id), descriptor);
        } else if self.nodes[1 - node].down() {
            // The other process is out of reach.
            self.abandon(node, id);
        } else {
            self.copy_piece(node, id, fail);
        }
        self.settle(node);
    }

    fn abandon(&mut self, node: usize, id: u32) {
        let job = self.nodes[node].jobs.get_mut(&id).unwrap();
        job.claim = None;
        if let Some(slot) = job.offer.slot {
            self.cursors.get_mut(&slot).unwrap().stopped = true;
        }
        self.log(|| format!("node {node} job {id} gives up"));
        self.nodes[node].end_job(self.now, id, false);
    }

    fn copy_piece(&mut self, node: usize, id: u32, fail: bool) {
        let job = self.nodes[node].jobs.get_mut(&id).unwrap();
        let remote = self.spans[u64::from_le_bytes(job.offer.descriptor[..8].try_into().unwrap()) as usize].clone();
        let piece = |rng: &mut Rng, left: usize| if rng.one_in(2) { left } else { 1 + rng.index(left) };
        if let Some((at, len)) = job.claim.take() {
            match job.role {
                Role::Pull => remote.copy_to(&job.local, at, len),
                Role::Help => job.local.copy_to(&remote, at, len),
            }
            job.moved += len;
            if let Some(slot) = job.offer.slot {
                self.cursors.get_mut(&slot).unwrap().copied += len;
            }
            return;
        }
        if job.stopping {
            if let Some(slot) = job.offer.slot {
                self.cursors.get_mut(&slot).unwrap().stopped = true;
            }
            return self.nodes[node].end_job(self.now, id, false);
        }
        if fail {
            return self.abandon(node, id);
        }
        let job = self.nodes[node].jobs.get_mut(&id).unwrap();
        match job.offer.slot {
            Some(slot) => {
                let cursor = self.cursors.get_mut(&slot).unwrap();
                if cursor.copied == job.len {
                    self.nodes[node].end_job(self.now, id, true);
                } else if cursor.stopped {
                    self.abandon(node, id);
                } else if cursor.next < job.len {
                    let len = piece(&mut self.rng, job.len - cursor.next);
                    job.claim = Some((cursor.next, len));
                    cursor.next += len;
                }
            }
            None if job.moved == job.len => self.nodes[node].end_job(self.now, id, true),
            None => job.claim = Some((job.moved, piece(&mut self.rng, job.len - job.moved))),
        }
    }

    // ---- events

    fn settle(&mut self, node: usize) {
        let World { nodes, messages, .. } = self;
        let [a, b] = nodes;
        let (n, other) = if node == 0 { (a, b) } else { (b, a) };
        n.drain(&mut |n, op| checks::done(n, other, messages, op));
        checks::immediates(n, other);
    }
}
