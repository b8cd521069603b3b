//! Staging on a simulated GPU: a thread of its own copies, late if the test says so.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use crossrail_shm::Arena;
use crossrail_types::{Error, ErrorKind, Result, Settings};
use parking_lot::Mutex;

use super::bounce::Bounce;
use super::stager::Stager;
use super::{Gpu, Mark, Part, Way};
use crate::device::simulated::Simulated;

impl Stager {
    /// Staging on a simulated GPU.
    pub(crate) fn simulated(gpu: &Simulated, settings: &Settings, arena: &Arc<Arena>) -> Result<Stager> {
        let gpu = gpu.clone();
        let name = format!("cuda:{}", gpu.ordinal());
        Stager::start(&name, settings, arena, move |start| {
            let made = Bounce::new(&start.arena, start.cut, start.bell.clone(), |_, _| Ok(Box::new(())))
                .and_then(|bounce| Ok((Box::new(Copier::start(gpu)?) as Box<dyn Gpu>, bounce)));
            start.run(made);
        })
    }
}

/// The copying thread's other end; dropping it ends the thread.
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
    /// By way.
    queues: [VecDeque<Command>; 2],
    complete: BTreeMap<u64, Result<()>>,
}

struct Command {
    mark: u64,
    parts: Vec<Part>,
    put_in: Instant,
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

    fn put_in(&mut self, way: Way, parts: Vec<Part>) -> Mark {
        self.marks += 1;
        let (_plan, changed) = self.gpu.plan();
        let command = Command { mark: self.marks, parts, put_in: Instant::now() };
        self.shared.work.lock().queues[way as usize].push_back(command);
        changed.notify_all();
        Mark(self.marks)
    }
}

impl Gpu for Copier {
    fn check(&mut self, part: &Part) -> Result<()> {
        self.gpu.check(part.memory, part.len)
    }

    fn pack(&mut self, part: &Part) -> Result<Mark> {
        Ok(self.put_in(Way::Out, vec![*part]))
    }

    fn unpack(&mut self, parts: &[Part]) -> Result<Mark> {
        Ok(self.put_in(Way::In, parts.to_vec()))
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
    /// Carries commands out, each way's in order. `plan`'s lock is not held while bytes move.
    fn run(&self, gpu: &Simulated) {
        let (mut plan, changed) = gpu.plan();
        while !self.stop.load(Ordering::Acquire) {
            let now = Instant::now();
            let mut next: Option<Instant> = None;
            let mut found = None;
            for way in [Way::Out, Way::In] {
                let mut work = self.work.lock();
                let queue = &mut work.queues[way as usize];
                let Some(due) = queue.front().map(|first| first.put_in + plan.delay) else { continue };
                if plan.held[way as usize] {
                    continue;
                }
                if due > now {
                    next = Some(next.map_or(due, |other| other.min(due)));
                } else if let Some(first) = queue.pop_front() {
                    found = Some((way, first));
                    break;
                }
            }
            let Some((way, command)) = found else {
                match next {
                    Some(due) => drop(changed.wait_until(&mut plan, due)),
                    None => changed.wait(&mut plan),
                }
                continue;
            };
            let failing = &mut plan.failing[way as usize];
            let result = if failing.0 > 0 {
                failing.0 -= 1;
                Err(Error::new(ErrorKind::Io, format!("copy on cuda:{}", gpu.ordinal()), failing.1.clone()))
            } else {
                drop(plan);
                let result = carry_out(gpu, way, &command.parts);
                plan = gpu.plan().0;
                result
            };
            self.work.lock().complete.insert(command.mark, result);
        }
    }
}

fn carry_out(gpu: &Simulated, way: Way, parts: &[Part]) -> Result<()> {
    for part in parts {
        match way {
            // SAFETY: the slot is the command's until it is complete.
            Way::Out => unsafe { gpu.copy_to(part.memory, part.host, part.len)? },
            // SAFETY: as above.
            Way::In => unsafe { gpu.copy_from(part.memory, part.host, part.len)? },
        }
    }
    Ok(())
}
