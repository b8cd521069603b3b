//! The shared cursors by which both ends of a direct copy divide it.
//!
//! A cursor is one word, so that every look at it is consistent:
//!
//! ```text
//! bits 48..64  generation: which use of this cursor
//! bit  47      failed: a piece that was claimed will never be copied
//! bit  46      stopped: no piece may be claimed any more
//! bits 30..45  pieces claimed from the front
//! bits 15..30  pieces claimed from the back
//! bits  0..15  pieces settled: copied, or failed
//! ```
//!
//! Of copies up to [`HALVES_MAX`](crossrail_transport::HALVES_MAX) bytes the receiving end claims from the front and
//! the sending end from the back: each copies the same part of memory that is sent again and again, and finds it in its
//! own cache. Pieces that went to whichever end came first would change caches with every message.
//!
//! Claiming is a compare-and-swap, not an addition, because it must not touch a cursor that has gone on to another
//! generation. Settling is an addition: the unsettled piece itself keeps the owner from reusing the cursor.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::atomics::AtomicU64;
use crate::control::{CURSORS, Control};

const COUNT: u64 = (1 << 15) - 1;
const BACK: u32 = 15;
const FRONT: u32 = 30;
const STOPPED: u64 = 1 << 46;
const FAILED: u64 = 1 << 47;
const GENERATION: u32 = 48;

/// Bytes per piece of a copy of `len` bytes; both ends compute the same value.
pub(crate) fn piece_len(len: usize) -> usize {
    let most_pieces = usize::try_from(COUNT).unwrap_or(usize::MAX);
    let fair = match len {
        0..=0x1_ffff => 32 << 10,
        0x2_0000..=0x3_ffff => 64 << 10,
        0x4_0000..=0x3f_ffff => 128 << 10,
        _ => 256 << 10,
    };
    fair.max(len.div_ceil(most_pieces).next_multiple_of(4096))
}

/// Where an end claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    Front,
    Back,
}

/// Outcome of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    /// That piece is ours now.
    Piece(usize),
    /// All that this end may claim are claimed, and some of all are not settled.
    Waiting,
    /// All are copied.
    Done,
    /// Stopped, failed, or used for something else by now.
    Over(&'static str),
}

/// All cursors of a lane, and which of our own are in use.
pub(crate) struct Cursors {
    control: Arc<Control>,
    side: usize,
    /// Our own, oldest use first.
    free: std::collections::VecDeque<u16>,
}

impl Cursors {
    pub(crate) fn new(control: &Arc<Control>, side: usize) -> Cursors {
        Cursors { control: Arc::clone(control), side, free: (0..CURSORS as u16).collect() }
    }

    /// The word behind a handle; handles come from the peer.
    fn word(&self, handle: u32) -> Option<(&AtomicU64, u64)> {
        let index = (handle & 0xffff) as usize;
        let line = self.control.fixed().cursors.get(index / CURSORS)?.get(index % CURSORS)?;
        Some((&line.0, u64::from(handle >> 16)))
    }

    /// A fresh cursor of ours. It is the one that has been unused longest, so that a late look at a finished copy
    /// still finds it.
    pub(crate) fn open(&mut self) -> Option<u32> {
        let own = self.free.pop_front()?;
        let index = self.side * CURSORS + usize::from(own);
        let word = &self.control.fixed().cursors[self.side][usize::from(own)].0;
        let generation = (word.load(Ordering::Relaxed) >> GENERATION).wrapping_add(1) & 0xffff;
        word.store(generation << GENERATION, Ordering::Release);
        Some((generation as u32) << 16 | index as u32)
    }

    /// Gives one of ours back; a handle that isn't in use is ignored.
    pub(crate) fn close(&mut self, handle: u32) {
        let index = (handle & 0xffff) as usize;
        let Some(own) = index.checked_sub(self.side * CURSORS).filter(|own| *own < CURSORS) else { return };
        let own = own as u16;
        if !self.free.contains(&own) {
            self.free.push_back(own);
        }
    }

    /// Claims the next of `pieces` from end `from`: only within that end's half, unless the end `helps`.
    pub(crate) fn claim(&self, handle: u32, pieces: usize, from: Start, helps: bool) -> Claim {
        let Some((word, generation)) = self.word(handle) else { return Claim::Over("no such cursor") };
        let mut now = word.load(Ordering::Acquire);
        loop {
            let (front, back, settled) = (now >> FRONT & COUNT, now >> BACK & COUNT, now & COUNT);
            if now >> GENERATION != generation {
                return Claim::Over("the cursor has been reused for another transfer");
            }
            if now & FAILED != 0 {
                return Claim::Over("one end could not copy what it had claimed");
            }
            if front + back >= pieces as u64 {
                return if settled >= pieces as u64 { Claim::Done } else { Claim::Waiting };
            }
            if now & STOPPED != 0 {
                return Claim::Over("the copy was stopped");
            }
            let (claim, piece, own) = match from {
                Start::Front => (1 << FRONT, front as usize, front < pieces.div_ceil(2) as u64),
                Start::Back => (1 << BACK, pieces - 1 - back as usize, back < pieces as u64 / 2),
            };
            if !own && !helps {
                return Claim::Waiting;
            }
            match word.compare_exchange_weak(now, now + claim, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Claim::Piece(piece),
                Err(other) => now = other,
            }
        }
    }

    /// A claimed piece is copied, or (`ok` false) never will be.
    pub(crate) fn settle(&self, handle: u32, ok: bool) {
        if let Some((word, _)) = self.word(handle) {
            if !ok {
                word.fetch_or(FAILED | STOPPED, Ordering::AcqRel);
            }
            word.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// No further claims; true when no claimed piece is unsettled.
    pub(crate) fn stop(&self, handle: u32) -> bool {
        let Some((word, generation)) = self.word(handle) else { return true };
        let stopped = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
            (now >> GENERATION == generation).then_some(now | STOPPED)
        });
        stopped.map_or(true, |now| (now >> FRONT & COUNT) + (now >> BACK & COUNT) == now & COUNT)
    }
}
