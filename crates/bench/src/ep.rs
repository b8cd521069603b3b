//! Dispatch and combine, timed at one rank; all ranks of the buffer run the same.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail::{Context, Memory};
use crossrail_ep_host::{
    Bytes, CombineOptions, DispatchOptions, ExpertBuffer, Handle, Input, Layout, Tensor, TensorMut, Timing,
};
use crossrail_types::{Error, ErrorKind, Result};

use crate::session::Observer;

/// How often the observer is told.
const TELL: Duration = Duration::from_millis(100);

/// What one sample is the time of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EpMode {
    /// A dispatch.
    Dispatch,
    /// A combine.
    Combine,
    /// A dispatch and the combine that answers it, one right after the other.
    EndToEnd,
}

/// What is to be measured; the same on every rank.
#[derive(Clone, Copy, Debug)]
pub struct EpPlan {
    /// What a sample is the time of.
    pub mode: EpMode,
    /// What dispatch delivers.
    pub layout: Layout,
    /// Whether dispatches repeat the routing of the first, which is then not exchanged again.
    pub cached: bool,
    /// Timed iterations.
    pub iters: usize,
    /// Iterations before those.
    pub warmup: usize,
}

/// What every iteration moves.
pub struct EpWork {
    /// This rank's tokens.
    pub input: Input,
    /// What its experts answer, laid out as dispatch delivers these tokens.
    pub y: Tensor,
}

/// Raw samples of this rank, one of each for every timed iteration, in microseconds. Nothing is subtracted.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EpSamples {
    /// From the call to the end.
    pub total_us: Vec<f64>,
    /// Of that: turning bf16 into fp8.
    pub cast_us: Vec<f64>,
    /// Of that: copying rows.
    pub copy_us: Vec<f64>,
    /// Of that: summing rows.
    pub sum_us: Vec<f64>,
    /// Of that: waiting for other ranks.
    pub wait_us: Vec<f64>,
    /// What all timed iterations moved together.
    pub bytes: Bytes,
}

/// Measures at this rank of `buffer`; all its ranks call it alike. `context` gives the memory of the sums.
///
/// A barrier of all ranks comes before each iteration, outside of its time. The memory that operations read and write
/// is the same in all iterations.
///
/// # Errors
/// Those of dispatch and combine; `PeerDead` when a rank was lost, as the others went on with less to do; the
/// observer's.
pub fn expert_parallel(
    buffer: &ExpertBuffer,
    context: &Context,
    work: &EpWork,
    plan: EpPlan,
    observer: &mut dyn Observer,
) -> Result<EpSamples> {
    let lost = buffer.faults().len();
    let hidden = buffer.config().hidden;
    let tokens = work.input.x.len() / (2 * hidden);
    let out = context.alloc((2 * tokens * hidden).max(1))?;
    let first = buffer.dispatch(work.input.clone(), options(plan.layout, None))?.finish()?;
    let bench = Bench { buffer, work, plan, out, bytes: 2 * tokens * hidden, handle: first.handle };
    let total = plan.warmup + plan.iters;
    let mut samples = EpSamples::with_capacity(plan.iters);
    let mut told = Instant::now();
    for done in 0..total {
        if told.elapsed() >= TELL {
            told = Instant::now();
            observer.tick(done as u64, total as u64)?;
        }
        buffer.sync()?.finish()?;
        let began = Instant::now();
        let (timing, bytes) = bench.once()?;
        let took = began.elapsed();
        if done >= plan.warmup {
            samples.add(took, timing, bytes);
        }
        if let Some(fault) = buffer.faults().get(lost) {
            let error = Error::new(ErrorKind::PeerDead, "bench ep", format!("{fault}; the figures would not compare"));
            return Err(error);
        }
    }
    Ok(samples)
}

struct Bench<'a> {
    buffer: &'a ExpertBuffer,
    work: &'a EpWork,
    plan: EpPlan,
    out: Memory,
    /// Bytes of the sums.
    bytes: usize,
    /// The routing of the first dispatch.
    handle: Handle,
}

impl Bench<'_> {
    fn once(&self) -> Result<(Timing, Bytes)> {
        match self.plan.mode {
            EpMode::Dispatch => self.dispatch().map(|(_, timing, bytes)| (timing, bytes)),
            EpMode::Combine => self.combine(&self.handle),
            EpMode::EndToEnd => {
                let (handle, there, sent) = self.dispatch()?;
                let (back, returned) = self.combine(&handle)?;
                Ok((both(there, back), sum(sent, returned)))
            }
        }
    }

    fn dispatch(&self) -> Result<(Handle, Timing, Bytes)> {
        let cached = self.plan.cached.then(|| self.handle.clone());
        let came = self.buffer.dispatch(self.work.input.clone(), options(self.plan.layout, cached))?.finish()?;
        Ok((came.handle, came.timing, came.bytes))
    }

    fn combine(&self, handle: &Handle) -> Result<(Timing, Bytes)> {
        // SAFETY: valid as long as the memory, which the keeper is; nobody else touches it while the combine runs.
        let out = unsafe { TensorMut::raw(self.out.ptr(), self.bytes, Some(Arc::new(self.out.clone()))) };
        let options = CombineOptions { out: Some(out), ..CombineOptions::default() };
        let combined = self.buffer.combine(self.work.y.clone(), handle, options)?.finish()?;
        Ok((combined.timing, combined.bytes))
    }
}

fn options(layout: Layout, handle: Option<Handle>) -> DispatchOptions {
    DispatchOptions { layout, handle, ..DispatchOptions::default() }
}

fn both(one: Timing, other: Timing) -> Timing {
    Timing {
        cast_us: one.cast_us + other.cast_us,
        copy_us: one.copy_us + other.copy_us,
        sum_us: one.sum_us + other.sum_us,
        wait_us: one.wait_us + other.wait_us,
        total_us: one.total_us + other.total_us,
    }
}

fn sum(one: Bytes, other: Bytes) -> Bytes {
    Bytes { logical: one.logical + other.logical, wire: one.wire + other.wire, network: one.network + other.network }
}

impl EpSamples {
    fn with_capacity(iters: usize) -> EpSamples {
        let room = || Vec::with_capacity(iters);
        EpSamples {
            total_us: room(),
            cast_us: room(),
            copy_us: room(),
            sum_us: room(),
            wait_us: room(),
            bytes: Bytes::default(),
        }
    }

    fn add(&mut self, took: Duration, timing: Timing, bytes: Bytes) {
        self.total_us.push(took.as_secs_f64() * 1e6);
        self.cast_us.push(timing.cast_us);
        self.copy_us.push(timing.copy_us);
        self.sum_us.push(timing.sum_us);
        self.wait_us.push(timing.wait_us);
        self.bytes = sum(self.bytes, bytes);
    }
}
