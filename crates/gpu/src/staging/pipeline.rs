//! Submitted work, and work in flight on the GPU.

use std::collections::VecDeque;
use std::time::Instant;

use crossrail_locks::Mutex;
use crossrail_types::Result;

use super::bounce::Slot;
use super::{ChunkMemory, Completion, CopyEngine, Mark, SlotCopy, Span};
use crate::direction::Direction;
use crate::nvtx::Range;
use crate::stream_point::StreamPoint;

/// Packs in flight at most: enough to keep the GPU busy, few enough that a quiesce is short.
const PACKS: usize = 8;
/// Batches of unpacks in flight at most. Unpacks that become ready meanwhile form the next batch.
const BATCHES: usize = 2;
/// Unpacks in one batch, at most.
const BATCH: usize = 32;

/// The queue and the ticket under which work was submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) queue: u32,
    pub(super) ticket: u64,
}

/// A pack or an unpack.
pub(super) struct SlotTransfer {
    pub(super) owner: Owner,
    pub(super) slot: Slot,
    pub(super) memory: ChunkMemory,
    pub(super) len: usize,
}

impl SlotTransfer {
    fn copy(&self) -> SlotCopy {
        SlotCopy { host: self.slot.ptr(), memory: self.memory.clone(), len: self.len }
    }
}

/// A wait for a point in a caller's stream.
pub(super) struct StreamWait {
    pub(super) owner: Owner,
    pub(super) point: StreamPoint,
    /// Since when, if anybody wants to know.
    pub(super) since: Option<Instant>,
}

/// Work that was not started. Its lock is held for moments only, because queues take it under their worker's lock.
#[derive(Default)]
pub(super) struct Submitted {
    /// By direction.
    pub(super) transfers: [VecDeque<SlotTransfer>; 2],
    pub(super) waits: Vec<StreamWait>,
}

/// Transfers in flight that complete with one mark.
struct Batch {
    mark: Mark,
    transfers: Vec<SlotTransfer>,
    /// When it was submitted to the GPU, if traces are recorded.
    submitted: Option<Instant>,
    /// For profilers.
    _range: Range,
}

/// Work in flight of one GPU. Its lock is held during driver calls.
pub(super) struct Pipeline {
    engine: Box<dyn CopyEngine>,
    /// By direction, in the order in which they were started.
    in_flight: [VecDeque<Batch>; 2],
    waits: Vec<StreamWait>,
    /// Tickets that were cancelled while in flight: their completion is not reported.
    cancelled: Vec<Owner>,
    /// Completions to report, by queue.
    outbox: Vec<(u32, Completion)>,
    counters: Counters,
    /// By direction: since when the GPU has had work.
    busy_since: [Option<Instant>; 2],
    /// Whether completions say when they happened.
    traced: bool,
    /// By direction: when the last batch was complete, if traces are recorded.
    ended: [Option<Instant>; 2],
}

/// Totals since the stager started.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counters {
    /// By direction.
    pub(super) bytes: [u64; 2],
    pub(super) busy_ns: [u64; 2],
    pub(super) batches: u64,
}

/// What a pass did, and what it left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PassResult {
    /// Whether anything moved.
    pub(super) moved: bool,
    /// Copies are in flight.
    pub(super) copies: bool,
    /// Points in callers' streams are waited for.
    pub(super) waits: bool,
}

impl Pipeline {
    pub(super) fn new(engine: Box<dyn CopyEngine>, traced: bool) -> Pipeline {
        Pipeline {
            engine,
            in_flight: Default::default(),
            waits: Vec::new(),
            cancelled: Vec::new(),
            outbox: Vec::new(),
            counters: Counters::default(),
            busy_since: [None; 2],
            traced,
            ended: [None; 2],
        }
    }

    /// Starts what can be started, and collects what is complete.
    pub(super) fn pass(&mut self, submitted: &Mutex<Submitted>) -> PassResult {
        let mut moved = self.start_packs(submitted);
        moved |= self.start_unpacks(submitted);
        moved |= self.collect_complete(Direction::Out);
        moved |= self.collect_complete(Direction::In);
        moved |= self.collect_waits(submitted);
        let copies = self.in_flight.iter().any(|batches| !batches.is_empty());
        PassResult { moved, copies, waits: !self.waits.is_empty() }
    }

    /// Completions to report since the last call, by queue.
    pub(super) fn take_completions(&mut self) -> Vec<(u32, Completion)> {
        std::mem::take(&mut self.outbox)
    }

    pub(super) fn counters(&self) -> Counters {
        self.counters
    }

    /// Cancels the work that `is` selects; whether some of it is still in flight.
    pub(super) fn cancel(&mut self, is: &mut dyn FnMut(Owner) -> bool) -> bool {
        self.waits.retain(|wait| !is(wait.owner));
        self.outbox.retain(|(queue, completion)| !is(Owner { queue: *queue, ticket: completion.ticket }));
        let mut found = false;
        for transfer in self.in_flight.iter().flatten().flat_map(|batch| &batch.transfers) {
            if is(transfer.owner) {
                found = true;
                if !self.cancelled.contains(&transfer.owner) {
                    self.cancelled.push(transfer.owner);
                }
            }
        }
        found
    }

    fn start_packs(&mut self, submitted: &Mutex<Submitted>) -> bool {
        let mut moved = false;
        while self.in_flight[Direction::Out as usize].len() < PACKS {
            let Some(transfer) = submitted.lock().transfers[Direction::Out as usize].pop_front() else { break };
            moved = true;
            let copy = transfer.copy();
            match self.engine.check(&copy).and_then(|()| self.engine.pack(&copy)) {
                Ok(mark) => self.started(Direction::Out, mark, vec![transfer]),
                Err(error) => self.finish(transfer, Err(error), None),
            }
        }
        moved
    }

    fn start_unpacks(&mut self, submitted: &Mutex<Submitted>) -> bool {
        let mut moved = false;
        while self.in_flight[Direction::In as usize].len() < BATCHES {
            let transfers: Vec<SlotTransfer> = {
                let mut submitted = submitted.lock();
                let ready = &mut submitted.transfers[Direction::In as usize];
                let count = ready.len().min(BATCH);
                ready.drain(..count).collect()
            };
            if transfers.is_empty() {
                break;
            }
            moved = true;
            // A transfer whose memory was freed must not fail the whole batch.
            let mut valid = Vec::with_capacity(transfers.len());
            for transfer in transfers {
                match self.engine.check(&transfer.copy()) {
                    Ok(()) => valid.push(transfer),
                    Err(error) => self.finish(transfer, Err(error), None),
                }
            }
            if valid.is_empty() {
                continue;
            }
            let copies: Vec<SlotCopy> = valid.iter().map(SlotTransfer::copy).collect();
            match self.engine.unpack(&copies) {
                Ok(mark) => {
                    self.counters.batches += 1;
                    self.started(Direction::In, mark, valid);
                }
                Err(error) => valid.into_iter().for_each(|transfer| self.finish(transfer, Err(error.clone()), None)),
            }
        }
        moved
    }

    fn started(&mut self, direction: Direction, mark: Mark, transfers: Vec<SlotTransfer>) {
        self.busy_since[direction as usize].get_or_insert_with(Instant::now);
        let range = Range::start(|| {
            let what = if direction == Direction::Out { "pack" } else { "unpack" };
            let bytes: usize = transfers.iter().map(|transfer| transfer.len).sum();
            format!("crossrail {what} {} x, {bytes} bytes", transfers.len())
        });
        let submitted = self.traced.then(Instant::now);
        self.in_flight[direction as usize].push_back(Batch { mark, transfers, submitted, _range: range });
    }

    /// Collects complete batches. Batches of one direction complete in order, so only the oldest is polled.
    fn collect_complete(&mut self, direction: Direction) -> bool {
        let mut moved = false;
        while let Some(oldest) = self.in_flight[direction as usize].front() {
            let result = match self.engine.is_done(oldest.mark) {
                Ok(false) => break,
                Ok(true) => Ok(()),
                Err(error) => Err(error),
            };
            moved = true;
            let Some(batch) = self.in_flight[direction as usize].pop_front() else { break };
            let span = batch.submitted.map(|submitted| self.span(direction, submitted));
            for transfer in batch.transfers {
                self.finish(transfer, result.clone(), span);
            }
        }
        if self.in_flight[direction as usize].is_empty()
            && let Some(since) = self.busy_since[direction as usize].take()
        {
            self.counters.busy_ns[direction as usize] += since.elapsed().as_nanos() as u64;
        }
        moved
    }

    /// From when a batch was submitted, or the one before it complete, until now.
    fn span(&mut self, direction: Direction, submitted: Instant) -> (Instant, Instant) {
        let ended = Instant::now();
        let before = self.ended[direction as usize].replace(ended);
        (before.map_or(submitted, |before| before.max(submitted)), ended)
    }

    fn collect_waits(&mut self, submitted: &Mutex<Submitted>) -> bool {
        self.waits.append(&mut submitted.lock().waits);
        let before = self.waits.len();
        let outbox = &mut self.outbox;
        self.waits.retain(|wait| {
            let result = match wait.point.is_reached() {
                Ok(false) => return true,
                Ok(true) => Ok(()),
                Err(error) => Err(error),
            };
            let span = wait.since.map(|began| Span { began, ended: Instant::now(), bytes: 0 });
            outbox.push((wait.owner.queue, completion(wait.owner, None, result, span)));
            false
        });
        self.waits.len() != before
    }

    fn finish(&mut self, transfer: SlotTransfer, result: Result<()>, span: Option<(Instant, Instant)>) {
        let SlotTransfer { owner, slot, len, .. } = transfer;
        if result.is_ok() {
            self.counters.bytes[slot.direction() as usize] += len as u64;
        }
        if let Some(at) = self.cancelled.iter().position(|cancelled| *cancelled == owner) {
            self.cancelled.swap_remove(at);
            return;
        }
        // An unpack's slot is free now: it is dropped here.
        let slot = (slot.direction() == Direction::Out).then_some(slot);
        let span = span.map(|(began, ended)| Span { began, ended, bytes: len as u64 });
        self.outbox.push((owner.queue, completion(owner, slot, result, span)));
    }
}

fn completion(owner: Owner, slot: Option<Slot>, result: Result<()>, span: Option<Span>) -> Completion {
    Completion { ticket: owner.ticket, slot, result, span }
}
