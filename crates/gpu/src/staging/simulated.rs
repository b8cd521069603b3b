//! Staging on a simulated GPU: a thread of its own copies, delayed if the test says so.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use crossrail_locks::Mutex;
use crossrail_shm::Arena;
use crossrail_types::{Error, ErrorKind, Result, Settings};

use super::bounce::Bounce;
use super::stager::Stager;
use super::{CopyEngine, Mark, SlotCopy};
use crate::direction::Direction;
use crate::simulated::Simulated;

impl Stager {
    /// Staging on a simulated GPU.
    pub(crate) fn simulated(gpu: &Simulated, settings: &Settings, arena: &Arc<Arena>) -> Result<Stager> {
        let gpu = gpu.clone();
        let name = format!("cuda:{}", gpu.ordinal());
        Stager::start(&name, settings, arena, move |setup| {
            let made = Bounce::new(&setup.arena, setup.layout, setup.wake_up.clone(), |_, _| Ok(Box::new(())))
                .and_then(|bounce| Ok((Box::new(Copier::start(gpu)?) as Box<dyn CopyEngine>, bounce)));
            setup.run(made);
        })
    }
}

/// The handle of the copying thread; dropping it ends the thread.
struct Copier {
    gpu: Simulated,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    marks: u64,
}

#[derive(Default)]
struct Shared {
    work: Mutex<Work>,
    stop: AtomicBool,
}

#[derive(Default)]
struct Work {
    /// By direction.
    queues: [VecDeque<Command>; 2],
    complete: BTreeMap<u64, Result<()>>,
}

struct Command {
    mark: u64,
    copies: Vec<SlotCopy>,
    submitted: Instant,
}

impl Copier {
    fn start(gpu: Simulated) -> Result<Copier> {
        let shared = Arc::new(Shared::default());
        let body = {
            let (gpu, shared) = (gpu.clone(), shared.clone());
            move || shared.run(&gpu)
        };
        let thread = std::thread::Builder::new()
            .name(format!("simulated cuda:{}", gpu.ordinal()))
            .spawn(body)
            .map_err(|error| Error::io("simulated GPU", "pthread_create", &error))?;
        Ok(Copier { gpu, shared, thread: Some(thread), marks: 0 })
    }

    fn submit(&mut self, direction: Direction, copies: Vec<SlotCopy>) -> Mark {
        self.marks += 1;
        let (_plan, changed) = self.gpu.plan();
        let command = Command { mark: self.marks, copies, submitted: Instant::now() };
        self.shared.work.lock().queues[direction as usize].push_back(command);
        changed.notify_all();
        Mark(self.marks)
    }
}

impl CopyEngine for Copier {
    fn check(&mut self, copy: &SlotCopy) -> Result<()> {
        copy.pieces().try_for_each(|(address, _, len)| self.gpu.check(address, len))
    }

    fn pack(&mut self, copy: &SlotCopy) -> Result<Mark> {
        Ok(self.submit(Direction::Out, vec![copy.clone()]))
    }

    fn unpack(&mut self, copies: &[SlotCopy]) -> Result<Mark> {
        Ok(self.submit(Direction::In, copies.to_vec()))
    }

    fn is_done(&mut self, mark: Mark) -> Result<bool> {
        match self.shared.work.lock().complete.remove(&mark.0) {
            Some(result) => result.map(|()| true),
            None => Ok(false),
        }
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        {
            let (_plan, changed) = self.gpu.plan();
            self.shared.stop.store(true, Ordering::Release);
            changed.notify_all();
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Executes commands, each direction's in order. The plan's lock is not held while bytes move.
    fn run(&self, gpu: &Simulated) {
        let (mut plan, changed) = gpu.plan();
        while !self.stop.load(Ordering::Acquire) {
            let now = Instant::now();
            let mut next: Option<Instant> = None;
            let mut found = None;
            for direction in [Direction::Out, Direction::In] {
                let mut work = self.work.lock();
                let queue = &mut work.queues[direction as usize];
                let Some(due) = queue.front().map(|first| first.submitted + plan.delay[direction as usize]) else {
                    continue;
                };
                if plan.held[direction as usize] {
                    continue;
                }
                if due > now {
                    next = Some(next.map_or(due, |other| other.min(due)));
                } else if let Some(first) = queue.pop_front() {
                    found = Some((direction, first));
                    break;
                }
            }
            let Some((direction, command)) = found else {
                match next {
                    Some(due) => drop(changed.wait_until(&mut plan, due)),
                    None => changed.wait(&mut plan),
                }
                continue;
            };
            let failing = &mut plan.failing[direction as usize];
            let result = if failing.0 > 0 {
                failing.0 -= 1;
                Err(Error::new(ErrorKind::Io, format!("copy on cuda:{}", gpu.ordinal()), failing.1.clone()))
            } else {
                drop(plan);
                let result = execute(gpu, direction, &command.copies);
                plan = gpu.plan().0;
                result
            };
            self.work.lock().complete.insert(command.mark, result);
        }
    }
}

fn execute(gpu: &Simulated, direction: Direction, copies: &[SlotCopy]) -> Result<()> {
    for (host, (address, at, len)) in copies.iter().flat_map(|copy| copy.pieces().map(|piece| (copy.host, piece))) {
        // SAFETY: the slot belongs to the command until it is complete, and is as long as all pieces.
        unsafe {
            match direction {
                Direction::Out => gpu.copy_to(address, host.add(at), len)?,
                Direction::In => gpu.copy_from(address, host.add(at), len)?,
            }
        }
    }
    Ok(())
}
