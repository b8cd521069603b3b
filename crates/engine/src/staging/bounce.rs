//! The bounce memory of one GPU, and its slots.
#![allow(unsafe_code)]

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

use crossrail_shm::{Arena, Segment};
use crossrail_types::{Error, ErrorKind, Result, Settings, format_size};
use parking_lot::Mutex;

use super::Way;
use super::bell::Bell;
use super::nvtx::Range;

const PAGE: usize = 4096;
/// The fewest slots each way: one that a lane fills or empties, one that the GPU does.
const FEWEST: usize = 2;

/// Pinned memory of one GPU, cut into slots, half of them for each way.
pub(super) struct Bounce {
    /// What pins it; goes before the memory does.
    _pinned: Box<dyn Any + Send + Sync>,
    segment: Segment,
    slot_len: usize,
    bell: Arc<Bell>,
    pool: Mutex<Pool>,
}

#[derive(Default)]
struct Pool {
    free: [Vec<u32>; 2],
    /// By way: since when somebody has been without a slot, and for how long before that.
    without: [Option<Instant>; 2],
    without_ns: [u64; 2],
    /// By way: clients that wait for a slot; and those that are to be told.
    waiting: [Vec<u32>; 2],
    woken: Vec<u32>,
}

/// How bounce memory is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) slot_len: usize,
    /// Each way.
    pub(super) slots: usize,
}

impl Cut {
    /// As the settings say.
    ///
    /// # Errors
    /// `Config` when the chunks are too long for the bounce memory.
    pub(super) fn of(settings: &Settings) -> Result<Cut> {
        let slot_len = settings.chunk.next_multiple_of(PAGE);
        let slots = settings.bounce / 2 / slot_len;
        if slots < FEWEST {
            let (bounce, chunk) = (format_size(settings.bounce as u64), format_size(settings.chunk as u64));
            let detail = format!("{bounce} are fewer than {FEWEST} chunks of {chunk} each way");
            let enough = format_size((2 * FEWEST * slot_len) as u64);
            return Err(Error::new(ErrorKind::Config, "CROSSRAIL_BOUNCE", detail)
                .with_hint(format!("make it {enough} or more, or CROSSRAIL_CHUNK smaller")));
        }
        Ok(Cut { slot_len, slots })
    }

    fn bytes(self) -> usize {
        2 * self.slots * self.slot_len
    }
}

impl Bounce {
    /// Takes the memory; `pin` makes the GPU reach it for as long as what it gives is kept, and puts it on the right NUMA
    /// node: nothing has touched it yet.
    pub(super) fn new(
        arena: &Arc<Arena>,
        cut: Cut,
        bell: Arc<Bell>,
        pin: impl FnOnce(&Segment, usize) -> Result<Box<dyn Any + Send + Sync>>,
    ) -> Result<Arc<Bounce>> {
        let too_much = |error: Error| {
            let own = error.hint.as_ref().map_or_else(String::new, |hint| format!("{hint}; "));
            error.with_hint(format!("{own}CROSSRAIL_BOUNCE says how much bounce memory there is"))
        };
        let segment = arena.alloc(cut.bytes()).map_err(too_much)?;
        let pinned = pin(&segment, cut.bytes()).map_err(too_much)?;
        let (slots, all) = (cut.slots as u32, 2 * cut.slots as u32);
        // The lowest goes out first, so that an idle machine stays within a few slots.
        let free = [(0..slots).rev().collect(), (slots..all).rev().collect()];
        let pool = Mutex::new(Pool { free, ..Pool::default() });
        Ok(Arc::new(Bounce { _pinned: pinned, segment, slot_len: cut.slot_len, bell, pool }))
    }

    /// A free slot; `None`: no slot of that way is free now.
    pub(super) fn take(self: &Arc<Bounce>, way: Way) -> Option<Slot> {
        let mut pool = self.pool.lock();
        let Some(index) = pool.free[way as usize].pop() else {
            pool.without[way as usize].get_or_insert_with(Instant::now);
            return None;
        };
        drop(pool);
        let range = Range::start(|| format!("crossrail chunk {}", if way == Way::Out { "out" } else { "in" }));
        Some(Slot { bounce: self.clone(), way, index, _range: range })
    }

    /// `client` is to be told once when a slot of that way is free.
    pub(super) fn await_free(&self, client: u32, way: Way) {
        let mut pool = self.pool.lock();
        if !pool.free[way as usize].is_empty() {
            pool.wake(client);
            drop(pool);
            self.bell.ring();
        } else if !pool.waiting[way as usize].contains(&client) {
            pool.waiting[way as usize].push(client);
        }
    }

    /// The clients that are to be told now.
    pub(super) fn take_woken(&self) -> Vec<u32> {
        std::mem::take(&mut self.pool.lock().woken)
    }

    pub(super) fn forget(&self, client: u32) {
        let mut pool = self.pool.lock();
        pool.waiting.iter_mut().for_each(|waiting| waiting.retain(|waiting| *waiting != client));
        pool.woken.retain(|woken| *woken != client);
    }

    pub(super) fn slot_len(&self) -> usize {
        self.slot_len
    }

    pub(super) fn bytes(&self) -> u64 {
        self.segment.len() as u64
    }

    /// By way: how long somebody was without a slot.
    pub(super) fn without_ns(&self) -> [u64; 2] {
        let pool = self.pool.lock();
        let so_far = |way: usize| pool.without[way].map_or(0, |since| since.elapsed().as_nanos() as u64);
        [pool.without_ns[0] + so_far(0), pool.without_ns[1] + so_far(1)]
    }

    fn give_back(&self, way: Way, index: u32) {
        let mut pool = self.pool.lock();
        let pool = &mut *pool;
        pool.free[way as usize].push(index);
        if let Some(since) = pool.without[way as usize].take() {
            pool.without_ns[way as usize] += since.elapsed().as_nanos() as u64;
        }
        if !pool.waiting[way as usize].is_empty() {
            for client in std::mem::take(&mut pool.waiting[way as usize]) {
                pool.wake(client);
            }
            self.bell.ring();
        }
    }
}

impl Pool {
    fn wake(&mut self, client: u32) {
        if !self.woken.contains(&client) {
            self.woken.push(client);
        }
    }
}

/// Bounce memory for one chunk: part of an arena segment, pinned. Goes back to its pool when dropped, from any thread.
pub(crate) struct Slot {
    bounce: Arc<Bounce>,
    way: Way,
    index: u32,
    /// For profilers: how long the chunk is on its way.
    _range: Range,
}

impl Slot {
    /// Its first byte.
    pub(crate) fn ptr(&self) -> *mut u8 {
        let offset = self.index as usize * self.bounce.slot_len;
        // SAFETY: the segment has a slot of this number.
        unsafe { self.bounce.segment.ptr().add(offset) }
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.bounce.slot_len
    }

    pub(super) fn way(&self) -> Way {
        self.way
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.bounce.give_back(self.way, self.index);
    }
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Slot({:?} {})", self.way, self.index)
    }
}
