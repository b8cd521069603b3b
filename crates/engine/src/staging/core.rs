//! Work that was put in, and work that the GPU is at.

use std::collections::VecDeque;
use std::time::Instant;

use crossrail_types::Result;
use parking_lot::Mutex;

use super::bounce::Slot;
use super::nvtx::Range;
use super::{Done, Gpu, Mark, Part, Way};
use crate::device::Ready;

/// Packs that the GPU has at once: enough that it never waits for the next, few enough that a quiesce is short.
const PACKS: usize = 8;
/// Batches of unpacks that the GPU has at once. What becomes ready meanwhile goes together in the next.
const BATCHES: usize = 2;
/// Unpacks of one batch.
const BATCH: usize = 32;

/// Who put work in, and as what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) client: u32,
    pub(super) ticket: u64,
}

/// A pack or an unpack.
pub(super) struct Task {
    pub(super) owner: Owner,
    pub(super) slot: Slot,
    pub(super) memory: u64,
    pub(super) len: usize,
}

impl Task {
    fn part(&self) -> Part {
        Part { host: self.slot.ptr(), memory: self.memory, len: self.len }
    }
}

/// An event to wait for.
pub(super) struct After {
    pub(super) owner: Owner,
    pub(super) event: Ready,
}

/// Not begun. Its lock is held for moments only, also under a worker's.
#[derive(Default)]
pub(super) struct Queue {
    pub(super) tasks: [VecDeque<Task>; 2],
    pub(super) afters: Vec<After>,
}

/// Begun: one mark, and what is complete with it.
struct Batch {
    mark: Mark,
    tasks: Vec<Task>,
    /// For profilers.
    _range: Range,
}

/// What the thread has at hand; its lock is held while it calls the driver.
pub(super) struct Core {
    gpu: Box<dyn Gpu>,
    /// By way, in the order in which they were begun.
    begun: [VecDeque<Batch>; 2],
    afters: Vec<After>,
    /// Tickets that were given up while the GPU was at them: nobody is told of their end.
    orphans: Vec<Owner>,
    /// Finished, for whoever put it in.
    pub(super) outbox: Vec<(u32, Done)>,
    pub(super) figures: Figures,
    /// By way: since when the GPU has had work.
    busy_since: [Option<Instant>; 2],
}

/// What was done.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Figures {
    /// By way.
    pub(super) bytes: [u64; 2],
    pub(super) busy_ns: [u64; 2],
    pub(super) batches: u64,
}

/// What a pass has left to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Left {
    /// Whether anything moved.
    pub(super) moved: bool,
    /// The GPU is at something of ours.
    pub(super) work: bool,
    /// Events are waited for.
    pub(super) events: bool,
}

impl Core {
    pub(super) fn new(gpu: Box<dyn Gpu>) -> Core {
        Core {
            gpu,
            begun: Default::default(),
            afters: Vec::new(),
            orphans: Vec::new(),
            outbox: Vec::new(),
            figures: Figures::default(),
            busy_since: [None; 2],
        }
    }

    /// Begins what can be begun, and takes what is complete.
    pub(super) fn pass(&mut self, queue: &Mutex<Queue>) -> Left {
        let mut moved = self.begin_packs(queue);
        moved |= self.begin_unpacks(queue);
        moved |= self.take_complete(Way::Out);
        moved |= self.take_complete(Way::In);
        moved |= self.take_ready(queue);
        let work = self.begun.iter().any(|batches| !batches.is_empty());
        Left { moved, work, events: !self.afters.is_empty() }
    }

    /// Whether the GPU is at work that `is` names. From now on nobody is told of its end.
    pub(super) fn give_up(&mut self, is: &mut dyn FnMut(Owner) -> bool) -> bool {
        self.afters.retain(|after| !is(after.owner));
        self.outbox.retain(|(client, done)| !is(Owner { client: *client, ticket: done.ticket }));
        let mut found = false;
        for task in self.begun.iter().flatten().flat_map(|batch| &batch.tasks) {
            if is(task.owner) {
                found = true;
                if !self.orphans.contains(&task.owner) {
                    self.orphans.push(task.owner);
                }
            }
        }
        found
    }

    fn begin_packs(&mut self, queue: &Mutex<Queue>) -> bool {
        let mut moved = false;
        while self.begun[Way::Out as usize].len() < PACKS {
            let Some(task) = queue.lock().tasks[Way::Out as usize].pop_front() else { break };
            moved = true;
            let part = task.part();
            match self.gpu.check(&part).and_then(|()| self.gpu.pack(&part)) {
                Ok(mark) => self.start(Way::Out, mark, vec![task]),
                Err(error) => self.finish(task, Err(error)),
            }
        }
        moved
    }

    fn begin_unpacks(&mut self, queue: &Mutex<Queue>) -> bool {
        let mut moved = false;
        while self.begun[Way::In as usize].len() < BATCHES {
            let tasks: Vec<Task> = {
                let mut queue = queue.lock();
                let ready = &mut queue.tasks[Way::In as usize];
                let count = ready.len().min(BATCH);
                ready.drain(..count).collect()
            };
            if tasks.is_empty() {
                break;
            }
            moved = true;
            // One whose memory is gone must not take the others with it.
            let mut good = Vec::with_capacity(tasks.len());
            for task in tasks {
                match self.gpu.check(&task.part()) {
                    Ok(()) => good.push(task),
                    Err(error) => self.finish(task, Err(error)),
                }
            }
            if good.is_empty() {
                continue;
            }
            let parts: Vec<Part> = good.iter().map(Task::part).collect();
            match self.gpu.unpack(&parts) {
                Ok(mark) => {
                    self.figures.batches += 1;
                    self.start(Way::In, mark, good);
                }
                Err(error) => good.into_iter().for_each(|task| self.finish(task, Err(error.clone()))),
            }
        }
        moved
    }

    fn start(&mut self, way: Way, mark: Mark, tasks: Vec<Task>) {
        self.busy_since[way as usize].get_or_insert_with(Instant::now);
        let range = Range::start(|| {
            let what = if way == Way::Out { "pack" } else { "unpack" };
            let bytes: usize = tasks.iter().map(|task| task.len).sum();
            format!("crossrail {what} {} x, {bytes} bytes", tasks.len())
        });
        self.begun[way as usize].push_back(Batch { mark, tasks, _range: range });
    }

    /// Work of one way is complete in the order in which it was begun, so only the oldest is asked for.
    fn take_complete(&mut self, way: Way) -> bool {
        let mut moved = false;
        while let Some(oldest) = self.begun[way as usize].front() {
            let result = match self.gpu.is_done(oldest.mark) {
                Ok(false) => break,
                Ok(true) => Ok(()),
                Err(error) => Err(error),
            };
            moved = true;
            let batch = self.begun[way as usize].pop_front();
            for task in batch.into_iter().flat_map(|batch| batch.tasks) {
                self.finish(task, result.clone());
            }
        }
        if self.begun[way as usize].is_empty()
            && let Some(since) = self.busy_since[way as usize].take()
        {
            self.figures.busy_ns[way as usize] += since.elapsed().as_nanos() as u64;
        }
        moved
    }

    fn take_ready(&mut self, queue: &Mutex<Queue>) -> bool {
        self.afters.append(&mut queue.lock().afters);
        let before = self.afters.len();
        let outbox = &mut self.outbox;
        self.afters.retain(|after| {
            let result = match after.event.is_done() {
                Ok(false) => return true,
                Ok(true) => Ok(()),
                Err(error) => Err(error),
            };
            outbox.push((after.owner.client, done(after.owner, None, result)));
            false
        });
        self.afters.len() != before
    }

    fn finish(&mut self, task: Task, result: Result<()>) {
        let Task { owner, slot, len, .. } = task;
        if result.is_ok() {
            self.figures.bytes[slot.way() as usize] += len as u64;
        }
        if let Some(at) = self.orphans.iter().position(|orphan| *orphan == owner) {
            self.orphans.swap_remove(at);
            return;
        }
        // Of an unpack the slot is free now.
        let slot = (slot.way() == Way::Out).then_some(slot);
        self.outbox.push((owner.client, done(owner, slot, result)));
    }
}

fn done(owner: Owner, slot: Option<Slot>, result: Result<()>) -> Done {
    Done { ticket: owner.ticket, slot, result }
}
