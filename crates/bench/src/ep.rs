//! Dispatch and combine in host memory, timed at one rank; every rank of the buffer makes the same calls.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail::{Context, Memory};
use crossrail_ep_host::{
    Bytes, CombineOptions, DispatchOptions, ExpertBuffer, Handle, Input, Layout, LinkKind, Tensor, TensorMut, Timing,
};
use crossrail_types::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::form::LayoutName;
use crate::session::Observer;

/// Interval of progress reports.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// What one sample times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EpMode {
    /// A dispatch.
    Dispatch,
    /// A combine.
    Combine,
    /// A dispatch and its combine, without a pause in between.
    #[serde(rename = "e2e")]
    EndToEnd,
}

/// What to measure; equal on every rank.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EpPlan {
    /// What one sample times.
    pub mode: EpMode,
    /// The layout of the dispatch.
    #[serde(with = "LayoutName")]
    pub layout: Layout,
    /// Whether dispatches reuse the routing of the first, so that no metadata is exchanged.
    pub cached: bool,
    /// Timed iterations.
    pub iters: usize,
    /// Untimed iterations before those.
    pub warmup: usize,
}

/// The data of every iteration.
pub struct EpWork {
    /// This rank's tokens.
    pub input: Input,
    /// The outputs of its experts, in the layout of the dispatch.
    pub y: Tensor,
}

/// Raw samples of this rank in microseconds, one of each kind per timed iteration. Nothing is subtracted.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct EpSamples {
    /// From the call until the operation is finished.
    pub total_us: Vec<f64>,
    /// Part of it: casting bf16 to fp8.
    pub cast_us: Vec<f64>,
    /// Part of it: copying rows.
    pub copy_us: Vec<f64>,
    /// Part of it: summing rows.
    pub sum_us: Vec<f64>,
    /// Part of it: waiting for other ranks.
    pub wait_us: Vec<f64>,
    /// Bytes moved by all timed iterations together.
    #[serde(with = "BytesOf")]
    pub bytes: Bytes,
    /// Bytes sent meanwhile by each lane to ranks that are reached over the network, frame heads and barriers included.
    pub lanes: BTreeMap<String, u64>,
}

#[derive(Serialize)]
#[serde(remote = "Bytes")]
pub(crate) struct BytesOf {
    logical: u64,
    wire: u64,
    network: u64,
}

/// Measures at this rank of `buffer`; every rank calls it with the same plan. `context` allocates the memory of the sums.
///
/// A barrier of all ranks precedes each iteration, outside of its time. All iterations read and write the same memory.
///
/// # Errors
/// Errors of dispatch, combine and the observer; `PeerDead` when a rank was lost, since the others then had less to do.
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
    let mut before = BTreeMap::new();
    let mut reported = Instant::now();
    for done in 0..total {
        if reported.elapsed() >= REPORT_INTERVAL {
            reported = Instant::now();
            observer.tick(done as u64, total as u64)?;
        }
        buffer.sync()?.finish()?;
        if done == plan.warmup {
            before = sent_by_lane(buffer);
        }
        let began = Instant::now();
        let (timing, bytes) = bench.once()?;
        let elapsed = began.elapsed();
        if done >= plan.warmup {
            samples.add(elapsed, timing, bytes);
        }
        if let Some(fault) = buffer.faults().get(lost) {
            let error =
                Error::new(ErrorKind::PeerDead, "bench ep", format!("{fault}; the samples would not be comparable"));
            return Err(error);
        }
    }
    buffer.sync()?.finish()?;
    samples.lanes = sent_by_lane(buffer);
    for (lane, sent) in &mut samples.lanes {
        *sent = sent.saturating_sub(before.get(lane).copied().unwrap_or(0));
    }
    Ok(samples)
}

/// Bytes that each lane has sent so far to ranks that are reached over the network, by the lane's name.
fn sent_by_lane(buffer: &ExpertBuffer) -> BTreeMap<String, u64> {
    let mut sent = BTreeMap::new();
    for link in buffer.links().into_iter().filter(|link| link.kind == LinkKind::Network) {
        for lane in link.lanes {
            *sent.entry(lane.name).or_default() += lane.tx_bytes;
        }
    }
    sent
}

struct Bench<'a> {
    buffer: &'a ExpertBuffer,
    work: &'a EpWork,
    plan: EpPlan,
    out: Memory,
    /// Size of the sums in bytes.
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
        let dispatched = self.buffer.dispatch(self.work.input.clone(), options(self.plan.layout, cached))?.finish()?;
        Ok((dispatched.handle, dispatched.timing, dispatched.bytes))
    }

    fn combine(&self, handle: &Handle) -> Result<(Timing, Bytes)> {
        // SAFETY: valid as long as the memory, which goes along; nothing else accesses it while the combine runs.
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
            lanes: BTreeMap::new(),
        }
    }

    fn add(&mut self, elapsed: Duration, timing: Timing, bytes: Bytes) {
        self.total_us.push(elapsed.as_secs_f64() * 1e6);
        self.cast_us.push(timing.cast_us);
        self.copy_us.push(timing.copy_us);
        self.sum_us.push(timing.sum_us);
        self.wait_us.push(timing.wait_us);
        self.bytes = sum(self.bytes, bytes);
    }
}
