//! What the programs at both ends do: operations started, cancelled, regions taken away.

use std::cell::RefCell;
use std::rc::Rc;

use crossrail_proto::{Failure, Memory, Offer, Operation, RegionRef, frame};
use crossrail_types::{Head, OpId};

use crate::memory::{Pass, Span, filled, key};
use crate::node::{Op, endpoint};
use crate::plan::{Action, Key, Work};
use crate::wire::{Frame, Source, lane_id};
use crate::world::{Cursor, World};

const GENERATION: u32 = 9;

impl World {
    pub(crate) fn work(&mut self, node: usize) {
        if self.nodes[node].crashed {
            return;
        }
        let at = self.next_action[node];
        if let Some(action) = self.plan.actions[node].get(at).cloned() {
            self.next_action[node] += 1;
            self.log(|| format!("node {node} {action:?}"));
            match action {
                Action::Start { work, len, device } => self.start(node, work, len, device),
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
    pub(crate) fn wind_up(&mut self, node: usize) {
        if let Some((_, _, len)) = self.nodes[node].matcher.probe(0, 0, None) {
            let device = self.plan.slots > 0 && self.rng.one_in(2);
            self.start(node, Work::Receive { tag: 0, mask: 0, from: false }, len as usize, device);
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

    pub(crate) fn cancel(&mut self, node: usize, op: usize) {
        let n = &mut self.nodes[node];
        if n.ops[op].done.is_some() {
            return;
        }
        n.ops[op].cancelled = true;
        let id = n.ops[op].id;
        if n.matcher.cancel(id) {
            n.finish(id, Err(Failure::Cancelled), u64::MAX);
        } else {
            assert!(n.peer.cancel(self.now, id, &Failure::Cancelled), "nobody knows {}", n.ops[op].span.name);
        }
    }

    pub(crate) fn close(&mut self, node: usize) {
        self.nodes[node].closed = true;
        self.nodes[node].peer.close(self.now);
    }

    pub(crate) fn deregister(&mut self, node: usize, region: usize) {
        let n = &mut self.nodes[node];
        n.regions.0[region].alive = false;
        n.peer.region_gone(self.now, RegionRef { index: region as u32, generation: 3 });
    }

    pub(crate) fn start(&mut self, node: usize, work: Work, len: usize, device: bool) {
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
        let kind = if device { "device" } else { "host" };
        let name = format!("op {index} of node {node} ({work:?}, {len} {kind} bytes, number {number})");
        let span = Span { bytes: Rc::new(RefCell::new(bytes)), base: 0, pass: Rc::new(Pass::default()), device, name };
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
        n.ops.push(Op { id, work: work.clone(), number, span, len, done: None, cancelled: false, faulty: false });
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
                match n.matcher.post(id, u64::from(tag), mask, from, len as u64, !device) {
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
            && !device
            && self.send_now(node, id, tag, len)
        {
            return;
        }
        self.nodes[node].peer.start(self.now, id, what, len as u64, offer, !device);
    }

    /// Puts a short message on a wire in the same call, where that can be.
    pub(crate) fn send_now(&mut self, node: usize, op: OpId, tag: u64, len: usize) -> bool {
        let wire = self.rng.index(self.wires.len());
        let w = &mut self.wires[wire];
        let n = &mut self.nodes[node];
        if n.down() || !w.usable(node) || w.out[node].len() >= w.room() {
            return false;
        }
        let mut head = Head::new(0, 0);
        if !n.peer.send_now(self.now, op, tag, len as u64, lane_id(wire, node), &mut head) {
            return false;
        }
        let source = Source::Span { span: n.span(Memory::Op(op)), offset: 0 };
        w.out[node].push_back(Frame { head, source, len, cut: None });
        self.log(|| format!("node {node} wire {wire} sends at once {:?} {len}", frame::decode_head(&head)));
        true
    }
}
