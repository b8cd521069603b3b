//! Device memory: lanes do not touch it. What goes out is packed into a slot, what comes in lies in one until it is
//! unpacked, each at its own pace and in any order; and now and then the device fails.

use std::cell::RefCell;
use std::rc::Rc;

use crossrail_proto::{Landed, Memory, frame};

use crate::memory::Span;
use crate::node::Node;
use crate::wire::{Sink, Source, lane_id};
use crate::world::World;

/// A slot of a chunk on its way out.
#[derive(Debug, Default)]
pub(crate) struct Packed {
    /// `None`: not packed yet.
    pub(crate) bytes: Option<Vec<u8>>,
    /// Used for something else by now.
    pub(crate) freed: bool,
}

pub(crate) type Slot = Rc<RefCell<Packed>>;

/// A chunk that is being packed.
pub(crate) struct Pack {
    pub(crate) memory: Memory,
    pub(crate) span: Span,
    pub(crate) offset: u64,
    pub(crate) len: usize,
    pub(crate) slot: Slot,
    pub(crate) wire: usize,
    /// Its memory was revoked.
    pub(crate) dropped: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Waiting,
    /// Not to be stopped any more.
    Started,
    /// Its memory was revoked before it began.
    Dropped,
}

/// A chunk that is being unpacked.
pub(crate) struct Unpack {
    pub(crate) landed: Landed,
    pub(crate) memory: Memory,
    pub(crate) span: Span,
    pub(crate) bytes: Vec<u8>,
    pub(crate) state: State,
}

impl Node {
    /// What of the stager's work has not begun is not wanted any more.
    pub(crate) fn quiesce(&mut self, memory: Memory) {
        for pack in self.packs.iter_mut().filter(|p| p.memory == memory) {
            pack.dropped = true;
        }
        for unpack in self.unpacks.iter_mut().filter(|u| u.memory == memory && u.state == State::Waiting) {
            unpack.state = State::Dropped;
        }
    }

    /// The device's memory is at fault, whoever hears of it.
    pub(crate) fn blame(&mut self, memory: Memory) {
        match memory {
            Memory::Op(op) => self.ops[op.index as usize].faulty = true,
            Memory::Region { .. } => self.region_fault = true,
        }
    }
}

impl World {
    pub(crate) fn breaks(&mut self, one_in: u64) -> bool {
        self.plan.faulty && self.rng.one_in(one_in)
    }

    /// Whether there is no slot for a chunk that comes in at `node`.
    pub(crate) fn slots_full(&mut self, node: usize) -> bool {
        let filling = self.wires.iter().filter(|w| matches!(&w.arriving[node], Some(a) if a.sink.is_slot())).count();
        self.nodes[node].unpacks.len() + filling >= self.plan.slots || self.rng.one_in(8)
    }

    /// A chunk has come into its slot as a whole.
    pub(crate) fn land(&mut self, wire: usize, node: usize, sink: Sink) {
        let Sink::Slot { memory, span, bytes } = sink else { unreachable!() };
        let n = &mut self.nodes[node];
        let landed = n.peer.landed(self.now, lane_id(wire, node)).expect("an honest peer was refused");
        if let Some(landed) = landed {
            assert_eq!(landed.len as usize, bytes.len());
            n.unpacks.push(Unpack { landed, memory, span, bytes, state: State::Waiting });
        }
    }

    /// What came with a first frame is copied to the device at once.
    pub(crate) fn bounce(&mut self, wire: usize, node: usize, sink: Sink) {
        let Sink::Bounce { memory, span, bytes } = sink else { unreachable!() };
        if span.pass.revoked.get() {
            return;
        }
        let breaks = self.breaks(4);
        let n = &mut self.nodes[node];
        if breaks {
            n.blame(memory);
            n.peer.fail(self.now, memory, "no way to copy a first frame".to_owned());
            return;
        }
        span.device_write(0, &bytes);
        n.placed(self.now, lane_id(wire, node), &[]);
    }

    /// The device goes on with something.
    pub(crate) fn stage(&mut self, node: usize) {
        if self.nodes[node].crashed {
            return;
        }
        let (packs, unpacks) = (self.nodes[node].packs.len(), self.nodes[node].unpacks.len());
        if packs + unpacks == 0 {
            return;
        }
        match self.rng.index(packs + unpacks) {
            at if at < packs => self.pack(node, at),
            at => self.unpack(node, at - packs),
        }
        self.settle(node);
    }

    fn pack(&mut self, node: usize, at: usize) {
        let fails = self.breaks(15);
        let n = &mut self.nodes[node];
        let Pack { memory, span, offset, len, slot, wire, dropped } = n.packs.swap_remove(at);
        if dropped || fails {
            if !dropped {
                n.blame(memory);
                n.peer.fail(self.now, memory, "cannot be packed, for a reason that takes many words to tell".repeat(2));
            }
            let same = |source: &Source| matches!(source, Source::Slot(of) if Rc::ptr_eq(of, &slot));
            if let Some(frame) = self.wires[wire].out[node].iter_mut().find(|f| same(&f.source)) {
                frame.head = frame::void(&frame.head);
                frame.len = 0;
            }
            slot.borrow_mut().bytes = Some(Vec::new());
        } else {
            slot.borrow_mut().bytes = Some(span.device_read(offset, len));
        }
    }

    fn unpack(&mut self, node: usize, at: usize) {
        let (fails, waits, says) = (self.breaks(15), self.rng.one_in(2), self.rng.one_in(2));
        let n = &mut self.nodes[node];
        if n.unpacks[at].state == State::Waiting && waits {
            n.unpacks[at].state = State::Started;
            return;
        }
        let Unpack { landed, memory, span, bytes, state } = n.unpacks.swap_remove(at);
        if state == State::Dropped {
            match says {
                true => n.peer.unpacked(self.now, landed),
                false => n.peer.unpack_failed(self.now, landed, "nobody wants it".to_owned()),
            }
        } else if fails {
            n.blame(memory);
            n.peer.unpack_failed(self.now, landed, "cannot be unpacked".to_owned());
        } else {
            span.device_write(landed.offset, &bytes);
            n.peer.unpacked(self.now, landed);
        }
    }
}
