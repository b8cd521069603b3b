//! The bounce memory of one GPU, and its slots.
#![allow(unsafe_code)]

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

use crossrail_locks::Mutex;
use crossrail_shm::{Arena, Segment};
use crossrail_types::{Error, ErrorKind, Result, Settings, format_size};

use super::wake_up::WakeUp;
use crate::direction::Direction;
use crate::nvtx::Range;

const PAGE: usize = 4096;
/// Fewest areas per direction: one for a lane, one for the GPU.
const FEWEST: usize = 2;
/// Blocks of an area, at most: bits of a word.
const BLOCKS: usize = u32::BITS as usize;

/// Pinned memory of one GPU, divided into areas of one longest chunk each, half of them for each direction.
///
/// A chunk gets as many blocks of an area as it needs, and shorter ones share an area. Most chunks are far shorter than
/// the longest, and with an area for each, many lanes would wait for memory that is mostly empty. No slot lies in two
/// areas, so however short the outstanding chunks are, they never occupy more areas than there are chunks.
pub(super) struct Bounce {
    /// The registration that pins it. Declared first: dropped before the memory.
    _pinned: Box<dyn Any + Send + Sync>,
    segment: Segment,
    slot_len: usize,
    block_len: usize,
    wake_up: Arc<WakeUp>,
    pool: Mutex<Pool>,
}

#[derive(Default)]
struct Pool {
    /// By direction.
    areas: [Areas; 2],
    /// By direction: since when a request for a slot has failed, and the time that this lasted before.
    exhausted: [Option<Instant>; 2],
    exhausted_ns: [u64; 2],
    /// By direction: queues that wait for a slot; and those that must be notified.
    waiting: [Vec<u32>; 2],
    notify: Vec<u32>,
}

/// The areas of one direction.
#[derive(Default)]
struct Areas {
    /// By area: a bit for each block that is in use.
    used: Vec<u32>,
    /// Blocks of an area.
    blocks: u32,
    /// All areas before this one are full.
    first: usize,
}

/// Blocks of one area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Blocks {
    area: usize,
    mask: u32,
}

/// How bounce memory is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotLayout {
    pub(super) slot_len: usize,
    /// Areas per direction.
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
        let block_len = cut.slot_len.div_ceil(BLOCKS).next_multiple_of(PAGE);
        let areas = || Areas::new(cut.slots, cut.slot_len.div_ceil(block_len) as u32);
        let pool = Mutex::new(Pool { areas: [areas(), areas()], ..Pool::default() });
        Ok(Arc::new(Bounce { _pinned: pinned, segment, slot_len: cut.slot_len, block_len, wake_up, pool }))
    }

    /// A free slot of at least `len` bytes; `None`: there is none of that direction, or `len` exceeds an area.
    pub(super) fn take(self: &Arc<Bounce>, direction: Direction, len: usize) -> Option<Slot> {
        let mut pool = self.pool.lock();
        let Some(blocks) = pool.areas[direction as usize].take(self.blocks(len)) else {
            pool.exhausted[direction as usize].get_or_insert_with(Instant::now);
            return None;
        };
        let areas = pool.areas[direction as usize].used.len();
        drop(pool);
        let before = if direction == Direction::Out { 0 } else { areas };
        let at = blocks.mask.trailing_zeros() as usize * self.block_len;
        let offset = (before + blocks.area) * self.slot_len + at;
        let len = (blocks.mask.count_ones() as usize * self.block_len).min(self.slot_len - at);
        let range =
            Range::start(|| format!("crossrail chunk {}", if direction == Direction::Out { "out" } else { "in" }));
        Some(Slot { bounce: self.clone(), direction, blocks, offset, len, _range: range })
    }

    /// How many blocks hold so many bytes.
    fn blocks(&self, len: usize) -> u32 {
        len.div_ceil(self.block_len).max(1) as u32
    }

    /// Has `queue` notified once when blocks of that direction were released, or at once if a slot of `len` bytes is free.
    pub(super) fn await_free(&self, queue: u32, direction: Direction, len: usize) {
        let mut pool = self.pool.lock();
        if pool.areas[direction as usize].find(self.blocks(len)).is_some() {
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

    fn give_back(&self, direction: Direction, blocks: Blocks) {
        let mut pool = self.pool.lock();
        let pool = &mut *pool;
        pool.areas[direction as usize].give_back(blocks);
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

impl Areas {
    fn new(areas: usize, blocks: u32) -> Areas {
        Areas { used: vec![0; areas], blocks, first: 0 }
    }

    /// The lowest free blocks, so many in a row: light traffic stays within a few areas, whose memory is in the caches.
    fn find(&self, blocks: u32) -> Option<Blocks> {
        let places = self.blocks.checked_sub(blocks)? + 1;
        let ones = u32::MAX >> (u32::BITS - blocks);
        let in_area = |used: u32| (0..places).map(|at| ones << at).find(|mask| used & mask == 0);
        let free = self.used.iter().enumerate().skip(self.first);
        free.filter_map(|(area, used)| in_area(*used).map(|mask| Blocks { area, mask })).next()
    }

    fn take(&mut self, blocks: u32) -> Option<Blocks> {
        let found = self.find(blocks)?;
        self.used[found.area] |= found.mask;
        let full = u32::MAX >> (u32::BITS - self.blocks);
        while self.used.get(self.first) == Some(&full) {
            self.first += 1;
        }
        Some(found)
    }

    fn give_back(&mut self, blocks: Blocks) {
        self.used[blocks.area] &= !blocks.mask;
        self.first = self.first.min(blocks.area);
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
    blocks: Blocks,
    /// In the segment.
    offset: usize,
    len: usize,
    /// The chunk's time in the slot, for profilers.
    _range: Range,
}

impl Slot {
    /// Its first byte.
    pub fn ptr(&self) -> *mut u8 {
        // SAFETY: the slot lies within the segment.
        unsafe { self.bounce.segment.ptr().add(self.offset) }
    }

    /// Its capacity in bytes; never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    pub(super) fn direction(&self) -> Direction {
        self.direction
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.bounce.give_back(self.direction, self.blocks);
    }
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Slot({:?}, {} bytes at {})", self.direction, self.len, self.offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_slots_share_areas_and_leave_whole_ones_to_long_ones() {
        let mut areas = Areas::new(3, 32);
        let short: Vec<Blocks> = (0..4).map(|_| areas.take(8).unwrap()).collect();
        assert!(short.iter().all(|blocks| blocks.area == 0));
        let (second, third) = (areas.take(5).unwrap(), areas.take(32).unwrap());
        assert_eq!((second.area, third.area), (1, 2));
        assert_eq!(areas.take(32), None);
        // Free blocks of two areas are no slot: 8 of the first, and 27 of the second.
        areas.give_back(short[1]);
        assert_eq!(areas.take(28), None);
        assert_eq!(areas.take(8), Some(short[1]));
        assert_eq!(areas.take(27).unwrap().area, 1);
        assert_eq!(areas.take(1), None);
        areas.give_back(third);
        assert_eq!(areas.take(32), Some(third));
    }

    #[test]
    fn so_many_short_slots_never_occupy_more_areas() {
        // One block of every other slot is given back: what is left must not spread over more areas than there are slots.
        let mut areas = Areas::new(8, 32);
        let all: Vec<Blocks> = (0..256).map(|_| areas.take(1).unwrap()).collect();
        assert_eq!(areas.take(1), None);
        let (kept, given): (Vec<&Blocks>, Vec<&Blocks>) =
            all.iter().partition(|blocks| blocks.area < 7 && blocks.mask == 1);
        given.into_iter().for_each(|blocks| areas.give_back(*blocks));
        assert_eq!(kept.len(), 7);
        assert_eq!(areas.take(32).unwrap().area, 7);
        assert_eq!(areas.take(32), None);
        assert_eq!(areas.take(31).unwrap(), Blocks { area: 0, mask: !1 });
    }

    #[test]
    fn an_area_of_few_pages_has_as_many_blocks() {
        let mut areas = Areas::new(2, 1);
        assert_eq!(areas.take(1).map(|blocks| blocks.area), Some(0));
        assert_eq!(areas.take(2), None);
        assert_eq!(areas.take(33), None);
        assert_eq!(areas.take(1).map(|blocks| blocks.area), Some(1));
        assert_eq!(areas.take(1), None);
    }
}
