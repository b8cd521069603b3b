//! Dispatch and combine in GPU memory, timed at one rank; every rank of the buffer makes the same calls.
//!
//! Before each iteration the GPU's cache is flushed, and the GPUs synchronise by a dispatch without tokens: ranks begin
//! within a few microseconds of each other, and no host is involved.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use crossrail::Context;
use crossrail::unpack::cuda::{Context as Gpu, Cuda, DeviceMemory, Event, Stream};
use crossrail_control::Group;
use crossrail_ep::{Bytes, Config, Layout, Payload};
use crossrail_ep_cuda::{
    Counts, DeviceBuffer, DeviceHandle, DeviceOptions, Enqueued, EpCombineArgs, EpDispatchArgs, RankDispatch,
    RegionLease, Split, Traffic,
};
use crossrail_types::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::ep::{BytesOf, EpMode};
use crate::ep_memory::{DeviceEpWork, Tensors, most_rows, scale_columns, usage};
use crate::session::Observer;

/// Interval of progress reports.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);
/// Value of every byte of the outputs before a verified operation.
const POISON: u8 = 0xA5;

/// The clock of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Clock {
    /// The GPU's: events around the operation, which the host enqueues before the GPU reaches it.
    Gpu,
    /// The host's: from the call until the operation is complete and the number of rows received is known.
    Host,
}

/// What to measure; equal on every rank.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceEpPlan {
    /// What one sample times.
    pub mode: EpMode,
    /// The clock of a measurement.
    pub clock: Clock,
    /// Rank layout: whether dispatches reuse the routing of the first.
    pub cached: bool,
    /// Timed iterations.
    pub iters: usize,
    /// Untimed iterations before those.
    pub warmup: usize,
}

/// This rank's raw samples.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DeviceEpSamples {
    /// Microseconds of each timed iteration.
    #[serde(rename = "samples_us")]
    pub us: Vec<f64>,
    /// Bytes moved by one iteration.
    #[serde(with = "BytesOf")]
    pub bytes: Bytes,
}

/// The tensors that a dispatch delivered, by name, copied to host memory.
pub type Parts = Vec<(&'static str, Vec<u8>)>;

/// A connected buffer with the tensors of its operations, on this rank's GPU.
pub struct DeviceEp {
    buffer: DeviceBuffer,
    layout: Layout,
    limit: Duration,
    gpu: Gpu,
    stream: Stream,
    began: Event,
    ended: Event,
    input: EpDispatchArgs,
    memory: Tensors,
    /// Rank layout: the regions of results, and of the dispatch that synchronises the ranks.
    regions: Option<[RegionLease; 2]>,
    handle: Option<DeviceHandle>,
}

impl Drop for DeviceEp {
    fn drop(&mut self) {
        // The memory is freed with this, so no kernel may be using it. In a lost context none is.
        let _ = self.stream.wait(self.limit);
        let _ = self.buffer.destroy();
    }
}

impl DeviceEp {
    /// Creates and connects a buffer of this name between all ranks of `config`, which make the same call.
    ///
    /// # Errors
    /// Errors of [`DeviceBuffer`]; `Usage` for tensors that do not fit `config`; `Exhausted` without enough GPU memory.
    pub fn new(
        (group, context): (&Group, &Context),
        name: &str,
        config: Config,
        options: DeviceOptions,
        work: &DeviceEpWork<'_>,
    ) -> Result<DeviceEp> {
        let cuda = Cuda::load().map_err(|absent| usage(ErrorKind::Unsupported, absent.to_string()))?;
        let gpu = Gpu::primary(&cuda.device(options.ordinal)?)?;
        let limit = config.timeout.saturating_mul(2) + context.settings().timeout;
        let stream = Stream::new(&gpu)?;
        let (input, memory) = Tensors::new(&stream, limit, &config, work)?;
        let ranks: Vec<u32> = (0..config.ranks).collect();
        let buffer = DeviceBuffer::new(group, context, name, config, options)?;
        buffer.connect(&ranks, true, None)?;
        let regions = match work.layout {
            Layout::Expert => None,
            Layout::Rank => Some([buffer.take_region()?, buffer.take_region()?]),
        };
        let (began, ended) = (Event::timed(&gpu)?, Event::timed(&gpu)?);
        let layout = work.layout;
        Ok(DeviceEp { buffer, layout, limit, gpu, stream, began, ended, input, memory, regions, handle: None })
    }

    /// The buffer.
    pub fn buffer(&self) -> &DeviceBuffer {
        &self.buffer
    }

    /// Runs one dispatch into poisoned memory, and returns what it delivered. Expert layout: `counts`, `ranges`, `source`, `x` (the
    /// received rows, expert by expert, without gaps) and `scales` (all, in memory order); rank layout: `counts`,
    /// `offsets`, `x`, `scales`, `topk_idx`, `topk_weights`, of the received rows. bf16 has no `scales`.
    ///
    /// # Errors
    /// Errors of dispatch; `PeerDead` when a rank was lost.
    pub fn dispatch(&mut self) -> Result<Parts> {
        let memory = &self.memory;
        for part in [&memory.rows, &memory.scales, &memory.counts, &memory.ranges, &memory.source] {
            self.poison(part.address(), part.len())?;
        }
        if let Some([region, _]) = &self.regions {
            let view = region.view();
            let rows = usize::try_from(view.most_rows).unwrap_or(usize::MAX);
            self.poison(view.rows, rows * self.config().payload.row_bytes(self.config().hidden))?;
            self.poison(view.topk_idx, rows * self.config().topk * 8)?;
        }
        let enqueued = self.enqueue_measured_dispatch(false)?;
        self.stream.wait(self.limit)?;
        self.handle = Some(enqueued.handle);
        self.refuse_faults()?;
        match self.layout {
            Layout::Expert => self.expert_parts(),
            Layout::Rank => self.rank_parts(),
        }
    }

    /// Runs one combine with the last dispatch's handle into poisoned memory, and returns the sums, bf16
    /// `[tokens, hidden]`.
    ///
    /// # Errors
    /// Errors of combine; `Usage` before the first dispatch; `PeerDead` when a rank was lost.
    pub fn combine(&mut self) -> Result<Vec<u8>> {
        self.poison(self.memory.sums.address(), self.memory.sums.len())?;
        self.enqueue_combine(self.last()?)?;
        self.stream.wait(self.limit)?;
        self.refuse_faults()?;
        self.read(self.memory.sums.address(), self.input.common.tokens as usize * 2 * self.config().hidden)
    }

    /// The bytes that the last dispatch and its combine move for this rank.
    ///
    /// # Errors
    /// `Usage` before the first dispatch; errors of [`DeviceBuffer::traffic`].
    pub fn traffic(&self) -> Result<Traffic> {
        self.buffer.traffic(self.last()?)
    }

    /// Measures, after a dispatch; every rank calls it with the same plan.
    ///
    /// # Errors
    /// Errors of dispatch, combine and the observer; `PeerDead` when a rank was lost, since the others then had less to
    /// do.
    pub fn measure(&mut self, plan: DeviceEpPlan, observer: &mut dyn Observer) -> Result<DeviceEpSamples> {
        let traffic = self.traffic()?;
        let (sent, returned) = (traffic.dispatch.bytes, traffic.combine.bytes);
        let bytes = match plan.mode {
            EpMode::Dispatch => sent,
            EpMode::Combine => returned,
            EpMode::EndToEnd => Bytes {
                logical: sent.logical + returned.logical,
                wire: sent.wire + returned.wire,
                network: sent.network + returned.network,
            },
        };
        let total = plan.warmup + plan.iters;
        let mut samples = DeviceEpSamples { us: Vec::with_capacity(plan.iters), bytes };
        let mut reported = Instant::now();
        for done in 0..total {
            if reported.elapsed() >= REPORT_INTERVAL {
                reported = Instant::now();
                observer.tick(done as u64, total as u64)?;
            }
            let elapsed = self.sample(&plan)?;
            if done >= plan.warmup {
                samples.us.push(elapsed.as_secs_f64() * 1e6);
            }
            self.refuse_faults()?;
        }
        Ok(samples)
    }

    fn sample(&mut self, plan: &DeviceEpPlan) -> Result<Duration> {
        let flush = &self.memory.flush;
        // SAFETY: the memory is ours and stays until the stream was waited for (`Drop`).
        unsafe { self.stream.fill(flush.address(), POISON, flush.len())? };
        self.enqueue_barrier()?;
        match plan.clock {
            Clock::Gpu => {
                self.began.record(&self.stream)?;
                let count = self.enqueue(plan, false)?;
                self.ended.record(&self.stream)?;
                self.stream.wait(self.limit)?;
                if let Some(count) = count {
                    count.wait(self.limit)?;
                }
                self.ended.since(&self.began)
            }
            Clock::Host => {
                self.stream.wait(self.limit)?;
                let began = Instant::now();
                self.enqueue(plan, true)?;
                self.stream.wait(self.limit)?;
                Ok(began.elapsed())
            }
        }
    }

    /// Enqueues an iteration. With `wait_for_count`, the host waits for the number of received rows before it continues, as
    /// a program does that allocates memory for them.
    fn enqueue(&mut self, plan: &DeviceEpPlan, wait_for_count: bool) -> Result<Option<Counts>> {
        if plan.mode == EpMode::Combine {
            self.enqueue_combine(self.last()?)?;
            return Ok(None);
        }
        let sent = self.enqueue_measured_dispatch(plan.cached)?;
        if let Some(count) = sent.count.as_ref().filter(|_| wait_for_count) {
            count.wait(self.limit)?;
        }
        if plan.mode == EpMode::EndToEnd {
            self.enqueue_combine(&sent.handle)?;
        }
        self.handle = Some(sent.handle);
        Ok(sent.count)
    }

    fn enqueue_measured_dispatch(&self, cached: bool) -> Result<Enqueued> {
        let memory = &self.memory;
        let cached = if cached { Some(self.last()?) } else { None };
        let args = self.dispatch_args(&memory.counts, &memory.ranges, memory.source.address());
        self.enqueue_dispatch(&args, 0, cached)
    }

    /// Enqueues a dispatch without tokens, at which all GPUs wait for each other.
    fn enqueue_barrier(&self) -> Result<()> {
        let [counts, ranges] = &self.memory.meeting;
        let mut args = self.dispatch_args(counts, ranges, 0);
        args.common.tokens = 0;
        self.enqueue_dispatch(&args, 1, None).map(drop)
    }

    /// Enqueues a dispatch, in the rank layout into the region with this index.
    fn enqueue_dispatch(
        &self,
        args: &EpDispatchArgs,
        region: usize,
        cached: Option<&DeviceHandle>,
    ) -> Result<Enqueued> {
        let stream = self.stream.handle();
        let Some(regions) = &self.regions else {
            // SAFETY: all tensors are ours, laid out for this shape, and stay until the stream is idle (`Drop`).
            return unsafe { self.buffer.dispatch_expert(args, stream, Split::Whole) };
        };
        let count = cached.is_none() && args.common.tokens > 0;
        let of = RankDispatch { region: &regions[region], cached, count };
        // SAFETY: as above; nothing reads the region meanwhile.
        unsafe { self.buffer.dispatch_rank(args, of, stream, Split::Whole) }
    }

    fn enqueue_combine(&self, handle: &DeviceHandle) -> Result<()> {
        let row = 2 * self.config().hidden as u64;
        let args = EpCombineArgs {
            y: self.memory.y.address(),
            y_stride: row,
            out: self.memory.sums.address(),
            out_stride: row,
            ..EpCombineArgs::ZERO
        };
        let stream = self.stream.handle();
        // SAFETY: as above.
        unsafe {
            match self.layout {
                Layout::Expert => self.buffer.combine_expert(&args, handle, stream, Split::Whole)?,
                Layout::Rank => self.buffer.combine_rank(&args, handle, stream, Split::Whole)?,
            };
        }
        Ok(())
    }

    /// Arguments of a dispatch. Scales have the layout that matrix kernels take: column by column for each expert.
    fn dispatch_args(&self, counts: &DeviceMemory, ranges: &DeviceMemory, source: u64) -> EpDispatchArgs {
        let args = EpDispatchArgs { out_counts: counts.address(), ..self.input };
        if self.layout == Layout::Rank {
            return EpDispatchArgs { out_offsets: ranges.address(), ..args };
        }
        let most = self.most_rows() as u64;
        let columns = self.scale_columns() as u64;
        EpDispatchArgs {
            out_x: self.memory.rows.address(),
            out_scales: if columns == 0 { 0 } else { self.memory.scales.address() },
            out_scale_strides: [columns * most * 4, 4, most * 4],
            out_ranges: ranges.address(),
            out_source: source,
            ..args
        }
    }

    fn expert_parts(&self) -> Result<Parts> {
        let (memory, config) = (&self.memory, self.config());
        let [counts, ranges, source, scales] = [&memory.counts, &memory.ranges, &memory.source, &memory.scales]
            .map(|part| self.read(part.address(), part.len()));
        let counts = counts?;
        let row = config.payload.row_bytes(config.hidden);
        let expert = self.most_rows() * row;
        let mut rows = Vec::new();
        for (number, count) in counts.as_chunks::<4>().0.iter().enumerate() {
            // A wrong count must not lead out of the memory; the caller compares it.
            let count = usize::try_from(i32::from_le_bytes(*count)).unwrap_or(0).min(self.most_rows());
            rows.extend(self.read(memory.rows.address() + (number * expert) as u64, count * row)?);
        }
        let mut parts = vec![("counts", counts), ("ranges", ranges?), ("source", source?), ("x", rows)];
        if self.scale_columns() > 0 {
            parts.push(("scales", scales?));
        }
        Ok(parts)
    }

    fn rank_parts(&self) -> Result<Parts> {
        let (memory, config) = (&self.memory, self.config());
        let view = self.regions.as_ref().map(|[region, _]| region.view());
        let view = view.ok_or_else(|| usage(ErrorKind::Usage, "no region".to_owned()))?;
        let counts = self.read(memory.counts.address(), memory.counts.len())?;
        let offsets = self.read(memory.ranges.address(), memory.ranges.len())?;
        let end = offsets.as_chunks::<8>().0.last().map_or(0, |end| i64::from_le_bytes(*end));
        let rows = usize::try_from(end).unwrap_or(0).min(self.most_rows());
        let part = |address, row: usize| self.read(address, rows * row);
        let mut parts = vec![
            ("counts", counts),
            ("offsets", offsets),
            ("x", part(view.rows, config.payload.row_bytes(config.hidden))?),
            ("topk_idx", part(view.topk_idx, 8 * config.topk)?),
            ("topk_weights", part(view.topk_weights, 4 * config.topk)?),
        ];
        if config.payload != Payload::Bf16 {
            parts.push(("scales", part(view.scales, config.payload.scale_bytes(config.hidden))?));
        }
        Ok(parts)
    }

    fn config(&self) -> &Config {
        self.buffer.config()
    }

    /// The most rows of an expert, or of a result in the rank layout.
    fn most_rows(&self) -> usize {
        most_rows(self.config())
    }

    fn scale_columns(&self) -> usize {
        scale_columns(self.config())
    }

    fn last(&self) -> Result<&DeviceHandle> {
        self.handle.as_ref().ok_or_else(|| usage(ErrorKind::Usage, "nothing was dispatched yet".to_owned()))
    }

    fn poison(&self, address: u64, len: usize) -> Result<()> {
        // SAFETY: memory of ours that only operations in this stream write.
        if len == 0 { Ok(()) } else { unsafe { self.stream.fill(address, POISON, len) } }
    }

    fn read(&self, address: u64, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        if len > 0 {
            // SAFETY: `bytes` is as long and is not touched until the stream was waited for.
            unsafe { self.stream.copy_out(bytes.as_mut_ptr(), address, len)? };
            if let Err(error) = self.stream.wait(self.limit) {
                // The copy may still be under way.
                std::mem::forget(bytes);
                return Err(error);
            }
        }
        Ok(bytes)
    }

    fn refuse_faults(&self) -> Result<()> {
        match self.buffer.faults().first() {
            None => Ok(()),
            Some(fault) => {
                let text = format!("{fault}; the samples would not be comparable");
                Err(Error::new(ErrorKind::PeerDead, "bench ep", text).with_peer(format!("rank {}", fault.rank)))
            }
        }
    }
}

impl std::fmt::Debug for DeviceEp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DeviceEp({:?} on {:?})", self.buffer, self.gpu)
    }
}
