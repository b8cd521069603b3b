//! Row counts that kernels report to the host through pinned memory.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossrail_cuda::{Context, PinnedMemory};
use crossrail_kernels::ep::Shape;
use crossrail_locks::Mutex;
use crossrail_types::{Error, ErrorKind, Result, interrupt};

use crate::completion::Completion;
use crate::sight::Sight;

/// Interval between checks whether the operation is over without having reported.
const LOOK: Duration = Duration::from_millis(2);
/// How long a wait spins before it yields the processor.
const SPIN: Duration = Duration::from_micros(200);

/// Pinned memory for the counts of operations in flight, in slots.
pub(crate) struct CountPool {
    page: Arc<PinnedMemory>,
    sight: Arc<Sight>,
    /// Bytes from one slot to the next: the word, a count for each local expert, each rank's `host_word`.
    stride: usize,
    experts: usize,
    ranks: usize,
    slots: Mutex<Slots<Completion>>,
}

/// In place of a rank's `host_word` if the rank timed out.
pub const NO_REPORT: u32 = crossrail_kernels::ep::EP_NO_REPORT;
/// Results in the rank layout whose counts may be outstanding at once.
const SLOTS: usize = 32;

impl CountPool {
    pub(crate) fn new(context: &Context, shape: &Shape, sight: &Arc<Sight>) -> Result<Arc<CountPool>> {
        let (experts, ranks) = (shape.local_experts() as usize, shape.ranks as usize);
        let stride = (16 + 4 * (experts + ranks)).next_multiple_of(128);
        let page = Arc::new(PinnedMemory::new(context, SLOTS * stride)?);
        // SAFETY: new, nobody else's, of that length.
        unsafe { page.as_ptr().write_bytes(0, SLOTS * stride) };
        let slots = Mutex::new(Slots::new(SLOTS));
        Ok(Arc::new(CountPool { page, sight: sight.clone(), stride, experts, ranks, slots }))
    }

    fn at(&self, slot: usize) -> *mut u8 {
        // SAFETY: inside the page.
        unsafe { self.page.as_ptr().add(slot * self.stride) }
    }

    /// The word that the GPU writes last, with release order: 0 until then, then epoch << 32 | rows. An acquire load
    /// that sees it makes the counts and `host_word`s before it visible.
    fn word(&self, slot: usize) -> &AtomicU64 {
        // SAFETY: inside the page and aligned; every access is atomic, here and on the GPU.
        unsafe { AtomicU64::from_ptr(self.at(slot).cast()) }
    }

    /// A slot for one operation, its word reset to 0.
    pub(crate) fn take(self: &Arc<Self>) -> Result<Counts> {
        let told = |slot| self.word(slot).load(Ordering::Acquire) != 0;
        let slot = self.slots.lock().take(|slot, done| told(slot) || done.is_done().unwrap_or(false));
        let slot = slot.ok_or_else(|| {
            let text = format!("the counts of {SLOTS} results are outstanding");
            Error::new(ErrorKind::Exhausted, "dispatch", text)
        })?;
        let count = Counts(Arc::new(Asked { counts: self.clone(), slot, done: Mutex::new(None) }));
        // SAFETY: inside the page, and nobody else's.
        unsafe { count.at().add(16).write_bytes(0, 4 * (self.experts + self.ranks)) };
        count.word().store(0, Ordering::Release);
        Ok(count)
    }
}

/// The counts of a result in the rank layout, as the GPU reports them. Usable from any thread.
#[derive(Clone)]
pub struct Counts(Arc<Asked>);

struct Asked {
    counts: Arc<CountPool>,
    slot: usize,
    done: Mutex<Option<Completion>>,
}

impl Drop for Asked {
    fn drop(&mut self) {
        match self.done.get_mut().take() {
            // Every replay of the graph writes the slot again, so it is never reused.
            Some(done) if done.is_captured() => {}
            Some(done) => self.counts.slots.lock().resting.push((self.slot, done)),
            None => self.counts.slots.lock().free.push(self.slot),
        }
    }
}

/// Slots without a user: free ones, and those that the GPU may still write.
struct Slots<D> {
    free: Vec<usize>,
    resting: Vec<(usize, D)>,
}

impl<D> Slots<D> {
    fn new(count: usize) -> Slots<D> {
        Slots { free: (0..count).rev().collect(), resting: Vec::new() }
    }

    /// A free slot, or one whose operation is over.
    fn take(&mut self, is_over: impl Fn(usize, &D) -> bool) -> Option<usize> {
        let Slots { free, resting } = self;
        resting.retain(|(slot, done)| {
            let over = is_over(*slot, done);
            free.extend(over.then_some(*slot));
            !over
        });
        free.pop()
    }
}

impl std::fmt::Debug for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Counts({:?})", self.rows())
    }
}

impl Counts {
    fn at(&self) -> *mut u8 {
        self.0.counts.at(self.0.slot)
    }

    fn word(&self) -> &AtomicU64 {
        self.0.counts.word(self.0.slot)
    }

    /// GPU addresses of the word, the counts, and the ranks' `host_word`s.
    pub(crate) fn addresses(&self) -> [u64; 3] {
        let at = self.0.counts.page.address() + (self.0.slot * self.0.counts.stride) as u64;
        [at, at + 16, at + 16 + 4 * self.0.counts.experts as u64]
    }

    pub(crate) fn set_completion(&self, done: &Completion) {
        *self.0.done.lock() = Some(done.clone());
    }

    /// The number of rows, if it is known by now.
    pub fn rows(&self) -> Option<u32> {
        let word = self.word().load(Ordering::Acquire);
        (word >> 32 != 0).then_some(word as u32)
    }

    /// Waits until the GPU has reported: the number of rows, and the rows of each local expert, rounded up to the
    /// alignment (zeros for a cached dispatch, whose counts are those of the first one).
    ///
    /// # Errors
    /// `Timeout`; what the driver reports about a lost GPU.
    pub fn wait(&self, limit: Duration) -> Result<(u32, Vec<i32>)> {
        let began = Instant::now();
        let mut looked = began;
        let mut waiting = None;
        loop {
            if let Some(rows) = self.rows() {
                return Ok((rows, self.of_experts()));
            }
            let now = Instant::now();
            if now.duration_since(looked) >= LOOK {
                looked = now;
                waiting.get_or_insert_with(|| self.0.counts.sight.waiting("counts", began, &[]));
                let done = self.0.done.lock().clone().filter(|done| !done.is_captured());
                if done.is_some_and(|done| done.is_done().is_ok_and(|over| over)) && self.rows().is_none() {
                    let text = "the operation is over, but has reported no counts";
                    return Err(Error::new(ErrorKind::Io, "counts", text));
                }
            }
            match now.duration_since(began) {
                waited if waited >= limit || interrupt::raised() => {
                    let text = "the GPU has not reported the received rows";
                    let error = Error::new(ErrorKind::Timeout, "counts", text).with_waited(waited);
                    return Err(error.with_hint("work enqueued in the stream before counts too"));
                }
                waited if waited < SPIN => std::hint::spin_loop(),
                _ => std::thread::yield_now(),
            }
        }
    }

    /// Each rank's [`crate::EpDispatchArgs::host_word`], [`NO_REPORT`] for a rank that timed out. Valid once the rows are
    /// known.
    pub fn host_words(&self) -> Vec<u32> {
        let first = self.0.counts.experts;
        (first..first + self.0.counts.ranks).map(|at| self.cell(at).load(Ordering::Relaxed)).collect()
    }

    fn of_experts(&self) -> Vec<i32> {
        (0..self.0.counts.experts).map(|at| self.cell(at).load(Ordering::Relaxed).cast_signed()).collect()
    }

    fn cell(&self, at: usize) -> &AtomicU32 {
        // SAFETY: inside the page and aligned; written before the word, and every access here is atomic.
        unsafe { AtomicU32::from_ptr(self.at().add(16 + 4 * at).cast()) }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::Slots;

    #[test]
    fn a_slot_is_free_again_when_the_gpu_has_told_its_counts() {
        let mut slots = Slots::new(2);
        let told = [Cell::new(false), Cell::new(false)];
        let is_over = |slot: usize, (): &()| told[slot].get();
        assert_eq!([slots.take(is_over), slots.take(is_over), slots.take(is_over)], [Some(0), Some(1), None]);
        slots.resting.extend([(0, ()), (1, ())]);
        assert_eq!(slots.take(is_over), None, "both may still be written");
        told[1].set(true);
        assert_eq!([slots.take(is_over), slots.take(is_over)], [Some(1), None]);
        told[0].set(true);
        assert_eq!([slots.take(is_over), slots.take(is_over)], [Some(0), None]);
    }
}
