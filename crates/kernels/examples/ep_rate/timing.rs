//! Timing of steps that all ranks run together.

use std::sync::atomic::{AtomicU32, Ordering};

use crossrail_cuda::{Context, Event, PinnedMemory, Stream};

use crate::place::settle;
use crate::{Outcome, Step};

/// Iterations that are enqueued at a time: a stream holds about a thousand operations, and a launch into a full stream
/// blocks, for ever while the gate is closed.
const AT_ONCE: usize = 30;

/// What is timed: steps that every rank puts into its stream.
pub(crate) trait Work {
    fn streams(&self) -> Vec<&Stream>;
    /// Synchronizes; fails if a kernel timed out.
    fn finish(&self) -> Outcome<()>;
    fn steps(&self) -> Vec<&'static str>;
    /// Enqueues an overwrite of the L2 cache.
    fn make_cold(&self, rank: usize) -> Outcome<()>;
    /// Enqueues a barrier of all ranks.
    fn meet(&self, rank: usize) -> Outcome<()>;
    /// Enqueues a step.
    fn step(&self, rank: usize, step: usize) -> Outcome<()>;
}

/// Holds all streams until everything is enqueued.
pub(crate) struct Gate(PinnedMemory);

impl Gate {
    pub(crate) fn new(context: &Context) -> Outcome<Gate> {
        Ok(Gate(PinnedMemory::new(context, 4096)?))
    }

    /// Lets all streams wait until the result is dropped.
    fn close(&self, streams: &[&Stream]) -> Outcome<Opened<'_>> {
        // SAFETY: an aligned word of our own memory, that the host touches by atomics alone.
        let gate = unsafe { AtomicU32::from_ptr(self.0.as_ptr().cast()) };
        gate.store(0, Ordering::Release);
        let opened = Opened(gate);
        for stream in streams {
            // SAFETY: the gate's word lives as long as the rig.
            unsafe { stream.wait_value32(self.0.address(), 1)? };
        }
        Ok(opened)
    }
}

/// Opens the gate on drop, so that an error does not leave streams waiting for ever.
struct Opened<'a>(&'a AtomicU32);

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        self.0.store(1, Ordering::Release);
    }
}

fn mark(stream: &Stream) -> Outcome<Event> {
    let event = Event::timed(stream.context())?;
    event.record(stream)?;
    Ok(event)
}

/// Microseconds of each step, by iteration: alone, with a cold cache, all ranks having met before. The slowest rank's.
pub(crate) fn cold(work: &dyn Work, gate: &Gate, iters: usize) -> Outcome<Vec<Step>> {
    let mut rows: Vec<Step> = work.steps().iter().map(|name| Step::new(name, Vec::new())).collect();
    for first in (0..iters).step_by(AT_ONCE) {
        some_cold(work, gate, AT_ONCE.min(iters - first), &mut rows)?;
    }
    Ok(rows)
}

fn some_cold(work: &dyn Work, gate: &Gate, iters: usize, rows: &mut [Step]) -> Outcome<()> {
    let streams = work.streams();
    let mut events = Vec::new();
    settle()?;
    let opened = gate.close(&streams)?;
    for _ in 0..iters {
        for (rank, stream) in streams.iter().enumerate() {
            work.make_cold(rank)?;
            work.meet(rank)?;
            events.push(mark(stream)?);
            for step in 0..rows.len() {
                work.step(rank, step)?;
                events.push(mark(stream)?);
            }
        }
    }
    drop(opened);
    work.finish()?;
    for iteration in events.chunks_exact((rows.len() + 1) * streams.len()) {
        for (step, row) in rows.iter_mut().enumerate() {
            let mut longest = 0f64;
            for marks in iteration.chunks_exact(iteration.len() / streams.len()) {
                longest = longest.max(marks[step + 1].since(&marks[step])?.as_nanos() as f64 / 1e3);
            }
            row.samples.push(longest);
        }
    }
    Ok(())
}

/// Microseconds of all steps, one after the other, many times. The slowest rank's.
pub(crate) fn back_to_back(work: &dyn Work, gate: &Gate, iters: usize) -> Outcome<f64> {
    let (streams, steps) = (work.streams(), work.steps().len());
    let mut events = Vec::new();
    settle()?;
    let opened = gate.close(&streams)?;
    for (rank, stream) in streams.iter().enumerate() {
        work.meet(rank)?;
        events.push(mark(stream)?);
    }
    let iters = iters.min(4 * AT_ONCE);
    for _ in 0..iters {
        for rank in 0..streams.len() {
            (0..steps).try_for_each(|step| work.step(rank, step))?;
        }
    }
    for stream in &streams {
        events.push(mark(stream)?);
    }
    drop(opened);
    work.finish()?;
    let mut longest = 0f64;
    for rank in 0..streams.len() {
        longest = longest.max(events[streams.len() + rank].since(&events[rank])?.as_nanos() as f64);
    }
    Ok(longest / 1e3 / iters as f64)
}
