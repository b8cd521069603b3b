//! A lane of two ends: frames in flight, payloads half delivered, deaths that the other end notices late.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use crossrail_proto::{LaneSpec, Memory};
use crossrail_types::{Head, LaneId};

use crate::memory::Span;
use crate::rng::Rng;
use crate::staging::Slot;

pub(crate) enum Source {
    Bytes(Vec<u8>),
    /// Read when the bytes move, as a lane without copies does.
    Span {
        span: Span,
        offset: u64,
    },
    /// Packed there, now or later.
    Slot(Slot),
}

pub(crate) struct Frame {
    pub(crate) head: Head,
    pub(crate) source: Source,
    pub(crate) len: usize,
    /// The sender was gone before more than so many bytes had left it.
    pub(crate) cut: Option<usize>,
}

impl Frame {
    pub(crate) fn read(&self, at: usize, len: usize) -> Vec<u8> {
        match &self.source {
            Source::Bytes(bytes) => bytes[at..at + len].to_vec(),
            Source::Span { span, offset } => span.lane_read(offset + at as u64, len),
            Source::Slot(slot) => match &slot.borrow().bytes {
                Some(bytes) if !slot.borrow().freed => bytes[at..at + len].to_vec(),
                // The peer said that it has no use for it.
                Some(_) => vec![0xdd; len],
                None => panic!("a frame goes out before it is packed"),
            },
        }
    }

    /// Whether it is there to be carried.
    pub(crate) fn ready(&self) -> bool {
        !matches!(&self.source, Source::Slot(slot) if slot.borrow().bytes.is_none())
    }
}

pub(crate) enum Sink {
    Discard,
    Span {
        span: Span,
        offset: u64,
    },
    Buffer(Rc<RefCell<Vec<u8>>>),
    /// A chunk for a device.
    Slot {
        memory: Memory,
        span: Span,
        bytes: Vec<u8>,
    },
    /// The bytes of a first frame for a device.
    Bounce {
        memory: Memory,
        span: Span,
        bytes: Vec<u8>,
    },
    Control(Vec<u8>),
}

impl Sink {
    pub(crate) fn is_slot(&self) -> bool {
        matches!(self, Sink::Slot { .. })
    }
}

/// A payload on its way in.
pub(crate) struct Arriving {
    pub(crate) frame: Frame,
    pub(crate) at: usize,
    pub(crate) sink: Sink,
}

pub(crate) struct Wire {
    pub(crate) spec: LaneSpec,
    pub(crate) up: [bool; 2],
    pub(crate) down: [bool; 2],
    pub(crate) silent: bool,
    /// How readily it is chosen: its rate.
    pub(crate) weight: u64,
    pub(crate) depth: usize,
    /// In flight from that node.
    pub(crate) out: [VecDeque<Frame>; 2],
    /// Coming in at that node.
    pub(crate) arriving: [Option<Arriving>; 2],
    /// What that node has published.
    pub(crate) counts: [u32; 2],
    /// That node holds the next head, for whose payload there is no slot.
    pub(crate) waits: [bool; 2],
    /// Chunks of that node's that are not acknowledged to it.
    pub(crate) outstanding: [u32; 2],
    pub(crate) told: [u32; 2],
    /// That node's number of it, once chunks of its have named it.
    pub(crate) numbers: [u32; 2],
}

impl Wire {
    pub(crate) fn new(spec: LaneSpec, rng: &mut Rng) -> Wire {
        Wire {
            spec,
            up: [false; 2],
            down: [false; 2],
            silent: false,
            weight: rng.range(1, 6),
            depth: rng.range(1, 5) as usize,
            out: Default::default(),
            arriving: [None, None],
            counts: [0; 2],
            waits: [false; 2],
            outstanding: [0; 2],
            told: [0; 2],
            numbers: [0; 2],
        }
    }

    pub(crate) fn usable(&self, node: usize) -> bool {
        self.up[node] && !self.down[node]
    }

    /// Frames that a node may have in flight. What falls silent still has buffers to fill.
    pub(crate) fn room(&self) -> usize {
        self.depth + if self.silent { 100 } else { 0 }
    }

    pub(crate) fn over(&self) -> bool {
        self.down[0] && self.down[1]
    }

    /// `node` lets go of the lane. Some of what it has sent is on the way for good, the rest is lost.
    pub(crate) fn drop_end(&mut self, node: usize, rng: &mut Rng) {
        self.down[node] = true;
        self.arriving[node] = None;
        let other = 1 - node;
        let mut left = if let Some(a) = self.arriving[other].as_mut() { std::slice::from_mut(a) } else { &mut [] }
            .iter_mut()
            .map(|a| (&mut a.frame, a.at))
            .collect::<Vec<_>>();
        let mut kept = 0;
        for (frame, at) in left.drain(..) {
            freeze(frame, at, rng);
        }
        // What is not packed yet goes nowhere, nor does what waits for it.
        let ready = self.out[node].iter().position(|f| !f.ready()).unwrap_or(self.out[node].len());
        self.out[node].truncate(ready);
        let keep = rng.index(self.out[node].len() + 1);
        for frame in &mut self.out[node] {
            if kept < keep {
                let whole = frame.len;
                freeze_to(frame, 0, whole);
            } else if kept == keep {
                freeze(frame, 0, rng);
            }
            kept += 1;
        }
        self.out[node].truncate(keep + 1);
        if self.arriving[other].as_ref().is_some_and(|a| a.frame.cut.is_some_and(|c| c < a.frame.len)) {
            self.out[node].clear();
        }
        self.out[other].clear();
    }
}

fn freeze(frame: &mut Frame, at: usize, rng: &mut Rng) {
    let to = at + rng.index(frame.len - at + 1);
    freeze_to(frame, at, to);
}

/// The first `to` bytes are on the way; from now on the sender's memory is out of it.
fn freeze_to(frame: &mut Frame, at: usize, to: usize) {
    let mut bytes = vec![0; frame.len];
    bytes[at..to].copy_from_slice(&frame.read(at, to - at));
    frame.source = Source::Bytes(bytes);
    frame.cut = Some(to);
}

/// Both ends have their own ids for a lane.
pub(crate) fn lane_id(wire: usize, node: usize) -> LaneId {
    LaneId((wire * 2 + node) as u32)
}

pub(crate) fn wire_of(lane: LaneId) -> usize {
    lane.0 as usize / 2
}
