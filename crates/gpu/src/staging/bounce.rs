//! The bounce memory of one GPU, and its slots.
#![allow(unsafe_code)]

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

use crossrail_shm::{Arena, Segment};
use crossrail_types::{Error, ErrorKind, Result, Settings, format_size};
use parking_lot::Mutex;

use super::wake_up::WakeUp;
use crate::direction::Direction;
use crate::nvtx::Range;

const PAGE: usize = 4096;
/// Fewest slots per direction: one for a lane, one for the GPU.
const FEWEST: usize = 2;

/// Pinned memory of one GPU, divided into slots, half of them for each direction.
pub(super) struct Bounce {
    /// The registration that pins it. Declared first: dropped before the memory.
    _pinned: Box<dyn Any + Send + Sync>,
    segment: Segment,
    slot_len: usize,
    wake_up: Arc<WakeUp>,
    pool: Mutex<Pool>,
}

#[derive(Default)]
struct Pool {
    free: [Vec<u32>; 2],
    /// By direction: since when a request for a slot has failed, and the time that this lasted before.
    exhausted: [Option<Instant>; 2],
    exhausted_ns: [u64; 2],
    /// By direction: queues that wait for a slot; and those that must be notified.
    waiting: [Vec<u32>; 2],
    notify: Vec<u32>,
}

/// How bounce memory is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotLayout {
    pub(super) slot_len: usize,
    /// Slots per direction.
    pub(super) slots: usize,
}

impl SlotLayout {
    /// The layout that the settings ask for.
    ///
    /// # Errors
    /// `Config` when the chunks are too long for the bounce memory.
    pub(super) fn of(settings: &Settings) -> Result<SlotLayout> {
        let slot_len = settings.chunk.next_multiple_of(PAGE);
        let slots = settings.bounce / 2 / slot_len;
        if slots < FEWEST {
            let (bounce, chunk) = (format_size(settings.bounce as u64), format_size(settings.chunk as u64));
            let detail = format!("{bounce} are fewer than {FEWEST} chunks of {chunk} each way");
            let enough = format_size((2 * FEWEST * slot_len) as u64);
            return Err(Error::new(ErrorKind::Config, "CROSSRAIL_BOUNCE", detail)
                .with_hint(format!("make it {enough} or more, or CROSSRAIL_CHUNK smaller")));
        }
        Ok(SlotLayout { slot_len, slots })
    }

    fn bytes(self) -> usize {
        2 * self.slots * self.slot_len
    }
}

impl Bounce {
    /// Allocates the memory. `pin` registers it with the GPU for as long as its result lives, and may choose its NUMA
    /// node, because no page has been touched yet.
    pub(super) fn new(
        arena: &Arc<Arena>,
        cut: SlotLayout,
        wake_up: Arc<WakeUp>,
        pin: impl FnOnce(&Segment, usize) -> Result<Box<dyn Any + Send + Sync>>,
    ) -> Result<Arc<Bounce>> {
        let too_much = |error: Error| {
            let own = error.hint.as_ref().map_or_else(String::new, |hint| format!("{hint}; "));
            error.with_hint(format!("{own}CROSSRAIL_BOUNCE says how much bounce memory there is"))
        };
        let segment = arena.alloc(cut.bytes()).map_err(too_much)?;
        let pinned = pin(&segment, cut.bytes()).map_err(too_much)?;
        let (slots, all) = (cut.slots as u32, 2 * cut.slots as u32);
        // The lowest slot is used first, so that light traffic stays within a few slots.
        let free = [(0..slots).rev().collect(), (slots..all).rev().collect()];
        let pool = Mutex::new(Pool { free, ..Pool::default() });
        Ok(Arc::new(Bounce { _pinned: pinned, segment, slot_len: cut.slot_len, wake_up, pool }))
    }

    /// A free slot; `None`: no slot of that direction is free.
    pub(super) fn take(self: &Arc<Bounce>, direction: Direction) -> Option<Slot> {
        let mut pool = self.pool.lock();
        let Some(index) = pool.free[direction as usize].pop() else {
            pool.exhausted[direction as usize].get_or_insert_with(Instant::now);
            return None;
        };
        drop(pool);
        let range =
            Range::start(|| format!("crossrail chunk {}", if direction == Direction::Out { "out" } else { "in" }));
        Some(Slot { bounce: self.clone(), direction, index, _range: range })
    }

    /// Has `queue` notified once when a slot of that direction is free.
    pub(super) fn await_free(&self, queue: u32, direction: Direction) {
        let mut pool = self.pool.lock();
        if !pool.free[direction as usize].is_empty() {
            pool.notify(queue);
            drop(pool);
            self.wake_up.signal();
        } else if !pool.waiting[direction as usize].contains(&queue) {
            pool.waiting[direction as usize].push(queue);
        }
    }

    /// The queues that must be notified now.
    pub(super) fn take_notify(&self) -> Vec<u32> {
        std::mem::take(&mut self.pool.lock().notify)
    }

    pub(super) fn forget(&self, queue: u32) {
        let mut pool = self.pool.lock();
        pool.waiting.iter_mut().for_each(|waiting| waiting.retain(|waiting| *waiting != queue));
        pool.notify.retain(|notify| *notify != queue);
    }

    pub(super) fn slot_len(&self) -> usize {
        self.slot_len
    }

    pub(super) fn bytes(&self) -> u64 {
        self.segment.len() as u64
    }

    /// By direction: how long requests for a slot failed, in nanoseconds.
    pub(super) fn exhausted_ns(&self) -> [u64; 2] {
        let pool = self.pool.lock();
        let so_far = |at: usize| pool.exhausted[at].map_or(0, |since| since.elapsed().as_nanos() as u64);
        [pool.exhausted_ns[0] + so_far(0), pool.exhausted_ns[1] + so_far(1)]
    }

    fn give_back(&self, direction: Direction, index: u32) {
        let mut pool = self.pool.lock();
        let pool = &mut *pool;
        pool.free[direction as usize].push(index);
        if let Some(since) = pool.exhausted[direction as usize].take() {
            pool.exhausted_ns[direction as usize] += since.elapsed().as_nanos() as u64;
        }
        if !pool.waiting[direction as usize].is_empty() {
            for queue in std::mem::take(&mut pool.waiting[direction as usize]) {
                pool.notify(queue);
            }
            self.wake_up.signal();
        }
    }
}

impl Pool {
    fn notify(&mut self, queue: u32) {
        if !self.notify.contains(&queue) {
            self.notify.push(queue);
        }
    }
}

/// Bounce memory for one chunk: part of a pinned arena segment. Returns to its pool when dropped, on any thread.
pub struct Slot {
    bounce: Arc<Bounce>,
    direction: Direction,
    index: u32,
    /// The chunk's time in the slot, for profilers.
    _range: Range,
}

impl Slot {
    /// Its first byte.
    pub fn ptr(&self) -> *mut u8 {
        let offset = self.index as usize * self.bounce.slot_len;
        // SAFETY: the segment has a slot of this number.
        unsafe { self.bounce.segment.ptr().add(offset) }
    }

    /// Its capacity in bytes; never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.bounce.slot_len
    }

    pub(super) fn direction(&self) -> Direction {
        self.direction
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.bounce.give_back(self.direction, self.index);
    }
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Slot({:?} {})", self.direction, self.index)
    }
}
