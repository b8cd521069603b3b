//! Dispatch and combine in GPU memory, timed at one rank; all ranks of the buffer run the same.
//!
//! Before each iteration the GPU's cache is filled with something else, and all ranks meet on the GPU, by a dispatch of no
//! tokens: so ranks begin within a few microseconds of each other, and no host stands between.
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

use crate::ep::EpMode;
use crate::ep_memory::{DeviceEpWork, Tensors, most_rows, scale_columns, usage};
use crate::session::Observer;

/// How often the observer is told.
const TELL: Duration = Duration::from_millis(100);
/// What outputs are filled with before they are verified.
const POISON: u8 = 0xA5;

/// Who tells the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// The GPU, by events around the operation, which the host has put in before its turn comes.
    Gpu,
    /// The host: from the call until it knows that all is done, and how many rows came.
    Host,
}

/// What is to be measured; the same on every rank.
#[derive(Clone, Copy, Debug)]
pub struct DeviceEpPlan {
    /// What a sample is the time of.
    pub mode: EpMode,
    /// Who tells the time.
    pub clock: Clock,
    /// Rank layout: whether dispatches repeat the routing of the first, which is then not worked out again.
    pub cached: bool,
    /// Timed iterations.
    pub iters: usize,
    /// Iterations before those.
    pub warmup: usize,
}

/// This rank's raw samples.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeviceEpSamples {
    /// Microseconds of each timed iteration.
    pub us: Vec<f64>,
    /// What one iteration moved.
    pub bytes: Bytes,
}

/// What a dispatch has delivered, by name, as bytes of host memory.
pub type Parts = Vec<(&'static str, Vec<u8>)>;

/// A connected buffer with all that its operations read and write, on this rank's GPU.
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
    /// The regions of results, and of meetings; rank layout only.
    regions: Option<[RegionLease; 2]>,
    handle: Option<DeviceHandle>,
}

impl Drop for DeviceEp {
    fn drop(&mut self) {
        // The memory goes with this; nothing may be at work in it. A context that is lost carries nothing out.
        let _ = self.stream.wait(self.limit);
        let _ = self.buffer.destroy();
    }
}

impl DeviceEp {
    /// A buffer of that name between all ranks of `config`, which call this alike, connected.
    ///
    /// # Errors
    /// Those of [`DeviceBuffer`]; `Usage` for work that does not fit `config`; `Exhausted` when GPU memory does not
    /// suffice.
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

    /// One dispatch into poisoned memory, and what it delivered. Expert layout: `counts`, `ranges`, `source`, `x` (the
    /// rows that came, expert after expert, without gaps) and `scales` (all of them, as they lie); rank layout: `counts`,
    /// `offsets`, `x`, `scales`, `topk_idx`, `topk_weights`, of the rows that came. bf16 has no `scales`.
    ///
    /// # Errors
    /// Those of dispatch; `PeerDead` when a rank was lost.
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
        let enqueued = self.put_dispatch(false)?;
        self.stream.wait(self.limit)?;
        self.handle = Some(enqueued.handle);
        self.refuse_faults()?;
        match self.layout {
            Layout::Expert => self.expert_parts(),
            Layout::Rank => self.rank_parts(),
        }
    }

    /// One combine, with the last dispatch's handle, into poisoned memory: the sums, bf16 `[tokens, hidden]`.
    ///
    /// # Errors
    /// Those of combine; `Usage` before the first dispatch; `PeerDead` when a rank was lost.
    pub fn combine(&mut self) -> Result<Vec<u8>> {
        self.poison(self.memory.sums.address(), self.memory.sums.len())?;
        self.put_combine(self.last()?)?;
        self.stream.wait(self.limit)?;
        self.refuse_faults()?;
        self.read(self.memory.sums.address(), self.input.common.tokens as usize * 2 * self.config().hidden)
    }

    /// What the last dispatch and its combine move for this rank.
    ///
    /// # Errors
    /// `Usage` before the first dispatch; those of [`DeviceBuffer::traffic`].
    pub fn traffic(&self) -> Result<Traffic> {
        self.buffer.traffic(self.last()?)
    }

    /// Measures; all ranks call it alike, after a dispatch.
    ///
    /// # Errors
    /// Those of dispatch and combine; `PeerDead` when a rank was lost, as the others went on with less to do; the
    /// observer's.
    pub fn measure(&mut self, plan: DeviceEpPlan, observer: &mut dyn Observer) -> Result<DeviceEpSamples> {
        let traffic = self.traffic()?;
        let (sent, returned) = (traffic.dispatch, traffic.combine);
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
        let mut told = Instant::now();
        for done in 0..total {
            if told.elapsed() >= TELL {
                told = Instant::now();
                observer.tick(done as u64, total as u64)?;
            }
            let took = self.sample(&plan)?;
            if done >= plan.warmup {
                samples.us.push(took.as_secs_f64() * 1e6);
            }
            self.refuse_faults()?;
        }
        Ok(samples)
    }

    fn sample(&mut self, plan: &DeviceEpPlan) -> Result<Duration> {
        let flush = &self.memory.flush;
        // SAFETY: the memory is ours and stays until the stream was waited for (`Drop`).
        unsafe { self.stream.fill(flush.address(), POISON, flush.len())? };
        self.put_meeting()?;
        match plan.clock {
            Clock::Gpu => {
                self.began.record(&self.stream)?;
                let count = self.put(plan, false)?;
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
                self.put(plan, true)?;
                self.stream.wait(self.limit)?;
                Ok(began.elapsed())
            }
        }
    }

    /// Puts an iteration in. With `learn`, the host learns how many rows came before it goes on, as a program must that
    /// allocates for them.
    fn put(&mut self, plan: &DeviceEpPlan, learn: bool) -> Result<Option<Counts>> {
        if plan.mode == EpMode::Combine {
            self.put_combine(self.last()?)?;
            return Ok(None);
        }
        let sent = self.put_dispatch(plan.cached)?;
        if let Some(count) = sent.count.as_ref().filter(|_| learn) {
            count.wait(self.limit)?;
        }
        if plan.mode == EpMode::EndToEnd {
            self.put_combine(&sent.handle)?;
        }
        self.handle = Some(sent.handle);
        Ok(sent.count)
    }

    fn put_dispatch(&self, cached: bool) -> Result<Enqueued> {
        let memory = &self.memory;
        let cached = if cached { Some(self.last()?) } else { None };
        let args = self.dispatch_args(&memory.counts, &memory.ranges, memory.source.address());
        self.enqueue_dispatch(&args, 0, cached)
    }

    /// Lets all ranks meet on the GPU.
    fn put_meeting(&self) -> Result<()> {
        let [counts, ranges] = &self.memory.meeting;
        let mut args = self.dispatch_args(counts, ranges, 0);
        args.common.tokens = 0;
        self.enqueue_dispatch(&args, 1, None).map(drop)
    }

    /// In the rank layout, into that one of the regions.
    fn enqueue_dispatch(
        &self,
        args: &EpDispatchArgs,
        region: usize,
        cached: Option<&DeviceHandle>,
    ) -> Result<Enqueued> {
        let stream = self.stream.handle();
        let Some(regions) = &self.regions else {
            // SAFETY: all of it is ours, laid out for this shape, and stays until the stream was waited for (`Drop`).
            return unsafe { self.buffer.dispatch_expert(args, stream, Split::Whole) };
        };
        let count = cached.is_none() && args.common.tokens > 0;
        let of = RankDispatch { region: &regions[region], cached, count };
        // SAFETY: as above; nobody reads the region meanwhile.
        unsafe { self.buffer.dispatch_rank(args, of, stream, Split::Whole) }
    }

    fn put_combine(&self, handle: &DeviceHandle) -> Result<()> {
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

    /// Scales lie as matrix kernels take them: those of one block of all rows of an expert beside each other.
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
            // A count that is wrong must not lead out of the memory; it is told as it is.
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
                let text = format!("{fault}; the figures would not compare");
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
