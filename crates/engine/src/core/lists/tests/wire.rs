//! Wires between two cores: frames in both directions that wait, are cut, and read their memory only on arrival.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;

use crossrail_locks::Mutex;
use crossrail_transport::{Lane, LaneCaps, LaneError, LaneStats, List, Loan, Payload, Place, Post, Sink, Tx};
use crossrail_types::{HEAD_LEN, Head, LaneId};

/// Frames that a wire holds in one direction.
const ROOM: usize = 6;

/// Where a frame's payload is.
enum Source {
    Copied(Vec<u8>),
    /// In memory of the sender's, until it is told that it was sent.
    Lent(Payload, u64),
}

struct Frame {
    head: Head,
    source: Source,
}

impl Frame {
    /// Bytes of its payload; zeros in place of memory that was recalled.
    fn read(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        match &self.source {
            Source::Copied(payload) => bytes.copy_from_slice(&payload[at..at + len]),
            Source::Lent(payload, _) => {
                let usage = payload.grant.as_deref().map(Loan::enter);
                if len > 0 && !matches!(usage, Some(None)) {
                    // SAFETY: valid until `sent`, or as the loan permits; a lane that ends takes such frames back.
                    unsafe { payload.read(at, len, bytes.as_mut_ptr()) };
                }
            }
        }
        bytes
    }
}

/// Where the payload that arrives goes.
enum Into {
    Memory(*mut u8, usize),
    Rows(Arc<List>, u64, usize),
    Nowhere,
}

struct Arriving {
    frame: Frame,
    into: Into,
    grant: Option<Arc<Loan>>,
    token: Option<u64>,
    at: usize,
}

// SAFETY: one thread runs the simulation; what is pointed to is only accessed as its loan permits.
unsafe impl Send for Arriving {}

impl Arriving {
    fn new(frame: Frame, place: Place) -> std::result::Result<Arriving, String> {
        let (into, grant, token) = match place {
            Place::Into { dst, len, grant, token } => (Into::Memory(dst, len), grant, Some(token)),
            Place::Rows { list, from, len, grant, token } => (Into::Rows(list, from, len), grant, Some(token)),
            Place::Discard => (Into::Nowhere, None, None),
            Place::Wait => return Err("host memory waits for no slot".to_owned()),
            Place::Refuse(why) => return Err(why),
        };
        Ok(Arriving { frame, into, grant, token, at: 0 })
    }

    fn left(&self) -> usize {
        self.frame.head.payload_len() as usize - self.at
    }

    fn write(&mut self, bytes: &[u8]) {
        let usage = self.grant.as_deref().map(Loan::enter);
        if matches!(usage, Some(None)) {
            self.token = None;
        } else {
            let room = |len: usize| bytes.len().min(len.saturating_sub(self.at));
            match &self.into {
                // SAFETY: the sink gave `len` bytes there, and `usage` makes a recall wait.
                Into::Memory(dst, len) if room(*len) > 0 => unsafe {
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), dst.add(self.at), room(*len));
                },
                // SAFETY: the same.
                Into::Rows(list, from, len) if room(*len) > 0 => unsafe {
                    list.copy_in(from + self.at as u64, bytes.as_ptr(), room(*len) as u64);
                },
                _ => {}
            }
        }
        self.at += bytes.len();
    }
}

/// Both directions of a wire, each towards one of the two ends.
#[derive(Default)]
pub(super) struct Wire {
    towards: [VecDeque<Frame>; 2],
    arriving: [Option<Arriving>; 2],
    /// Tokens of frames whose bytes have been read, by the end that sent them.
    sent: [Vec<u64>; 2],
    /// Frames that the next poll of an end sends, and bytes that it receives.
    pub(super) may: [(usize, usize); 2],
    pub(super) dead: bool,
}

impl Wire {
    /// Cuts it: of what is on its way, so many frames in each direction still arrive.
    pub(super) fn cut(&mut self, arrive: usize) {
        self.dead = true;
        self.towards.iter_mut().for_each(|frames| frames.truncate(arrive));
    }

    fn receive(&mut self, end: usize, lane: LaneId, sink: &mut dyn Sink) -> std::result::Result<bool, LaneError> {
        let (mut budget, mut moved) = (self.may[end].1, false);
        while budget > 0 {
            if self.arriving[end].is_none() {
                let Some(frame) = self.towards[end].pop_front() else { break };
                budget = budget.saturating_sub(HEAD_LEN);
                let place = sink.place(lane, &frame.head);
                self.arriving[end] = Some(Arriving::new(frame, place).map_err(LaneError::Protocol)?);
                moved = true;
            }
            let Some(arriving) = &mut self.arriving[end] else { break };
            let part = budget.min(arriving.left());
            let bytes = arriving.frame.read(arriving.at, part);
            arriving.write(&bytes);
            budget -= part;
            moved |= part > 0;
            if arriving.left() > 0 {
                continue;
            }
            let Some(Arriving { frame, grant, token, .. }) = self.arriving[end].take() else { break };
            if let Some(token) = token.filter(|_| !grant.is_some_and(|grant| grant.is_recalled())) {
                sink.placed(lane, token);
            }
            if let Source::Lent(_, token) = frame.source {
                self.sent[1 - end].push(token);
            }
        }
        Ok(moved)
    }
}

/// One end of a wire.
pub(super) struct SimLane {
    pub(super) id: LaneId,
    pub(super) end: usize,
    pub(super) wire: Arc<Mutex<Wire>>,
    pub(super) caps: LaneCaps,
}

impl Lane for SimLane {
    fn id(&self) -> LaneId {
        self.id
    }

    fn name(&self) -> &str {
        "simulated"
    }

    fn caps(&self) -> &LaneCaps {
        &self.caps
    }

    fn post(&mut self, tx: &Tx) -> std::result::Result<Post, LaneError> {
        let mut wire = self.wire.lock();
        if wire.dead || wire.towards[1 - self.end].len() >= ROOM {
            return Ok(Post::Full);
        }
        let payload = Frame { head: tx.head, source: Source::Lent(tx.payload.clone(), 0) }.read(0, tx.payload.len);
        wire.towards[1 - self.end].push_back(Frame { head: tx.head, source: Source::Copied(payload) });
        Ok(Post::Taken)
    }

    fn poll(&mut self, sink: &mut dyn Sink, _: usize, _: bool) -> std::result::Result<bool, LaneError> {
        let mut wire = self.wire.lock();
        let mut moved = wire.receive(self.end, self.id, sink)?;
        if wire.dead {
            return if moved { Ok(true) } else { Err(LaneError::Closed("it was cut".to_owned())) };
        }
        for token in std::mem::take(&mut wire.sent[self.end]) {
            sink.sent(self.id, token);
            moved = true;
        }
        for _ in 0..wire.may[self.end].0 {
            if wire.towards[1 - self.end].len() >= ROOM {
                break;
            }
            let Some(tx) = sink.next(self.id) else { break };
            let source = Source::Lent(tx.payload, tx.token);
            wire.towards[1 - self.end].push_back(Frame { head: tx.head, source });
            moved = true;
        }
        Ok(moved)
    }

    fn stats(&self) -> LaneStats {
        LaneStats::default()
    }
}

impl Drop for SimLane {
    /// What it would have read later does not arrive: its memory may be gone.
    fn drop(&mut self) {
        let (mut wire, other) = (self.wire.lock(), 1 - self.end);
        wire.dead = true;
        wire.arriving[self.end] = None;
        let is_lent = |frame: &Frame| matches!(frame.source, Source::Lent(..));
        if let Some(at) = wire.towards[other].iter().position(is_lent) {
            wire.towards[other].truncate(at);
        }
        if wire.arriving[other].as_ref().is_some_and(|arriving| is_lent(&arriving.frame)) {
            wire.arriving[other] = None;
            wire.towards[other].clear();
        }
    }
}
