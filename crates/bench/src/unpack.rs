//! Benchmark of the three unpack modes on one scatter list, against a contiguous copy of the same size.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use crossrail::unpack::cuda::{Context as Gpu, Cuda, DeviceMemory, Event, PinnedMemory, Stream};
use crossrail::unpack::{Piece, Source, Unpacker};
use crossrail::{Settings, Unpack};
use crossrail_types::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize, Serializer};

use crate::pattern;
use crate::session::Observer;

/// Time for which the GPU is kept busy so that a launch is queued before its turn.
const AHEAD_US: f64 = 1000.0;
const MOST_AHEAD: usize = 64;
const SEED: u64 = 0x756e_7061_636b;

/// Where the fragments are before they are unpacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UnpackFrom {
    /// In pinned host memory, as chunks from the network are.
    Pinned,
    /// In the GPU's own memory.
    Device,
}

/// What [`unpack`] does.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnpackPlan {
    /// The GPU, by number.
    #[serde(rename = "device", deserialize_with = "crate::form::gpu")]
    pub ordinal: u32,
    /// Bytes in all, at least 1.
    pub size: usize,
    /// Bytes of a fragment, at least 1; the last one may be shorter.
    pub fragment: usize,
    /// Where fragments come from.
    #[serde(rename = "source")]
    pub from: UnpackFrom,
    /// The ways to compare.
    #[serde(deserialize_with = "crate::form::modes")]
    pub modes: Vec<Unpack>,
    /// Timed iterations of each.
    pub iters: usize,
    /// Iterations before those.
    pub warmup: usize,
}

/// Raw samples of one way, in microseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct UnpackTimes {
    /// From the call until the last byte is in place, the host's part included, one at a time.
    pub samples_us: Vec<f64>,
    /// Part spent on the GPU, by GPU events, with the work enqueued in advance. Empty for modes that need the host in
    /// between.
    pub gpu_us: Vec<f64>,
}

/// What [`unpack`] measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct UnpackSamples {
    /// Entries of the list.
    pub pieces: usize,
    /// One contiguous copy of the same size between the same memories: the upper bound.
    pub contiguous: UnpackTimes,
    /// By way, in the order of the plan.
    #[serde(serialize_with = "by_name")]
    pub modes: Vec<(Unpack, UnpackTimes)>,
}

fn by_name<S: Serializer>(modes: &[(Unpack, UnpackTimes)], output: S) -> std::result::Result<S::Ok, S::Error> {
    output.collect_map(modes.iter().map(|(mode, times)| (mode.to_string(), times)))
}

/// Unpacks `size` bytes of fragments in shuffled slots, in order, into GPU memory, with every mode and the same list.
/// Verifies every byte of each mode's result before and after its timing.
///
/// # Errors
/// `Unsupported` with the reason where there is no CUDA; `Usage` for a GPU that is not there and for sizes of 0;
/// `Protocol` when bytes are not where they belong; `Exhausted`; what the driver says; the observer's.
pub fn unpack(settings: &Settings, plan: &UnpackPlan, observer: &mut dyn Observer) -> Result<UnpackSamples> {
    if plan.size == 0 || plan.fragment == 0 {
        return Err(Error::new(ErrorKind::Usage, "bench unpack", "a size or a fragment of 0 bytes"));
    }
    let gpu = gpu(plan.ordinal)?;
    let mut bench = Bench::new(&gpu, settings, plan)?;
    let total = (1 + plan.modes.len()) * (plan.warmup + plan.iters);
    let mut watch = Watch { observer, done: 0, total };
    let contiguous = bench.contiguous(&mut watch)?;
    let mut modes = Vec::with_capacity(plan.modes.len());
    for mode in &plan.modes {
        let mut unpacker = Unpacker::new(&gpu, *mode, settings)?;
        bench.verified(&mut unpacker)?;
        let times = bench.timed(&mut unpacker, &mut watch)?;
        bench.verified(&mut unpacker)?;
        modes.push((*mode, times));
    }
    Ok(UnpackSamples { pieces: bench.list.len(), contiguous, modes })
}

fn gpu(ordinal: u32) -> Result<Gpu> {
    let cuda = Cuda::load().map_err(|absent| {
        let said = absent.to_string();
        let (reason, fix) = said.rsplit_once("; ").unwrap_or((&said, ""));
        let error = Error::new(ErrorKind::Unsupported, format!("cuda:{ordinal}"), reason);
        if fix.is_empty() { error } else { error.with_hint(fix) }
    })?;
    Gpu::primary(&cuda.device(ordinal)?)
}

struct Watch<'a> {
    observer: &'a mut dyn Observer,
    done: usize,
    total: usize,
}

impl Watch<'_> {
    fn count(&mut self) -> Result<()> {
        self.done += 1;
        if self.done.is_multiple_of(16) { self.observer.tick(self.done as u64, self.total as u64) } else { Ok(()) }
    }
}

/// The memories, the list between them, and what times it.
struct Bench<'a> {
    plan: &'a UnpackPlan,
    limit: Duration,
    stream: Stream,
    began: Event,
    ended: Event,
    /// What the fragments are put together from, and compared with.
    staging: PinnedMemory,
    source: Slots,
    target: DeviceMemory,
    list: Vec<Piece>,
}

enum Slots {
    Pinned(PinnedMemory),
    Device(DeviceMemory),
}

impl Slots {
    fn address(&self) -> u64 {
        match self {
            Slots::Pinned(memory) => memory.address(),
            Slots::Device(memory) => memory.address(),
        }
    }

    fn source(&self) -> Source {
        match self {
            Slots::Pinned(memory) => Source::Pinned { host: memory.as_ptr().cast_const(), address: memory.address() },
            Slots::Device(memory) => Source::Device { address: memory.address(), len: memory.len() },
        }
    }
}

impl Drop for Bench<'_> {
    fn drop(&mut self) {
        // The memory is freed with this, so nothing may use it. A lost context runs nothing any more.
        let _ = self.stream.wait(self.limit);
    }
}

impl<'a> Bench<'a> {
    fn new(gpu: &Gpu, settings: &Settings, plan: &'a UnpackPlan) -> Result<Bench<'a>> {
        let order = shuffled(plan.size.div_ceil(plan.fragment));
        let too_much = || Error::new(ErrorKind::Usage, "bench unpack", "the size overflows");
        let slots = order.len().checked_mul(plan.fragment).ok_or_else(too_much)?;
        let staging = PinnedMemory::new(gpu, slots)?;
        let source = match plan.from {
            UnpackFrom::Pinned => Slots::Pinned(PinnedMemory::new(gpu, slots)?),
            UnpackFrom::Device => Slots::Device(DeviceMemory::new(gpu, slots)?),
        };
        let target = DeviceMemory::new(gpu, slots)?;
        let list = scatter_list(plan, &order, source.address(), target.address());
        let bench = Bench {
            plan,
            limit: settings.timeout,
            stream: Stream::new(gpu)?,
            began: Event::timed(gpu)?,
            ended: Event::timed(gpu)?,
            staging,
            source,
            target,
            list,
        };
        bench.fill()?;
        Ok(bench)
    }

    /// Puts the fragments into their slots: read in the order of the list they are one pattern.
    fn fill(&self) -> Result<()> {
        let mut bytes = vec![0; self.plan.fragment];
        for piece in &self.list {
            let (len, to) = (piece.len as usize, (piece.src - self.source.address()) as usize);
            pattern::fill(SEED, (piece.dst - self.target.address()) as usize, &mut bytes[..len]);
            // SAFETY: a slot lies within the staging memory, which is as long as the source; nothing else is at it.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.staging.as_ptr().add(to), len) };
        }
        // SAFETY: both are of one length and live until the stream is waited for.
        unsafe { self.stream.copy(self.source.address(), self.staging.address(), self.staging.len())? };
        self.stream.wait(self.limit)
    }

    /// One round into memory of zeros, checked byte by byte.
    fn verified(&mut self, unpacker: &mut Unpacker) -> Result<()> {
        // SAFETY: the target is ours alone and lives until the stream is waited for.
        unsafe { self.stream.fill(self.target.address(), 0, self.target.len())? };
        self.unpack(unpacker)?;
        // SAFETY: as above; the staging memory is no shorter, and not read until the stream was waited for.
        unsafe { self.stream.copy(self.staging.address(), self.target.address(), self.plan.size)? };
        self.stream.wait(self.limit)?;
        let mut bytes = vec![0; (1 << 20).min(self.plan.size)];
        for offset in (0..self.plan.size).step_by(bytes.len()) {
            let len = bytes.len().min(self.plan.size - offset);
            // SAFETY: in bounds; the GPU is done with it.
            unsafe { std::ptr::copy_nonoverlapping(self.staging.as_ptr().add(offset), bytes.as_mut_ptr(), len) };
            pattern::verify(SEED, offset, &bytes[..len]).map_err(|mut error| {
                error.detail = format!("unpacking by {}: {}", unpacker.mode(), error.detail);
                error
            })?;
        }
        Ok(())
    }

    fn unpack(&self, unpacker: &mut Unpacker) -> Result<()> {
        // SAFETY: the list lies between the source and the target, which nothing else is at, and which live until the
        // stream was waited for (`Drop`); no two entries overlap.
        unsafe { unpacker.unpack(&self.stream, &self.list, self.source.source()) }
    }

    fn copy(&self) -> Result<()> {
        // SAFETY: both are at least so long, and live until the stream was waited for (`Drop`).
        unsafe { self.stream.copy(self.target.address(), self.source.address(), self.plan.size) }
    }

    fn contiguous(&mut self, watch: &mut Watch<'_>) -> Result<UnpackTimes> {
        let mut times = UnpackTimes::default();
        for iteration in 0..self.plan.warmup + self.plan.iters {
            let us = self.alone(|bench| bench.copy())?;
            let ahead = self.ahead(us);
            let gpu_us = self.behind(ahead, |bench| bench.copy())?;
            if iteration >= self.plan.warmup {
                times.samples_us.push(us);
                times.gpu_us.push(gpu_us);
            }
            watch.count()?;
        }
        Ok(times)
    }

    fn timed(&mut self, unpacker: &mut Unpacker, watch: &mut Watch<'_>) -> Result<UnpackTimes> {
        let mut times = UnpackTimes::default();
        let copy_us = self.alone(|bench| bench.copy())?;
        for iteration in 0..self.plan.warmup + self.plan.iters {
            let us = self.alone(|bench| bench.unpack(unpacker))?;
            let mut gpu_us = None;
            if unpacker.mode() == Unpack::Kernel {
                let ahead = self.ahead(copy_us);
                gpu_us = Some(self.behind(ahead, |bench| bench.unpack(unpacker))?);
            }
            if iteration >= self.plan.warmup {
                times.samples_us.push(us);
                times.gpu_us.extend(gpu_us);
            }
            watch.count()?;
        }
        Ok(times)
    }

    /// Number of copies of `copy_us` each that keep the GPU busy long enough.
    fn ahead(&self, copy_us: f64) -> usize {
        let list_us = self.list.len() as f64 * 0.02;
        (((AHEAD_US + list_us) / copy_us.max(1.0)).ceil() as usize).clamp(1, MOST_AHEAD)
    }

    /// Microseconds of `work` on an idle GPU, by the host's clock.
    fn alone(&mut self, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<f64> {
        let began = Instant::now();
        work(self)?;
        self.stream.wait(self.limit)?;
        Ok(began.elapsed().as_secs_f64() * 1e6)
    }

    /// Microseconds of `work` by GPU events, queued after `copies` copies so that the host enqueues it in advance.
    fn behind(&mut self, copies: usize, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<f64> {
        for _ in 0..copies {
            self.copy()?;
        }
        self.began.record(&self.stream)?;
        work(self)?;
        self.ended.record(&self.stream)?;
        self.stream.wait(self.limit)?;
        Ok(self.ended.since(&self.began)?.as_secs_f64() * 1e6)
    }
}

fn scatter_list(plan: &UnpackPlan, order: &[usize], source: u64, target: u64) -> Vec<Piece> {
    let piece = |(at, slot): (usize, &usize)| {
        let offset = at * plan.fragment;
        let len = plan.fragment.min(plan.size - offset) as u64;
        Piece { src: source + (slot * plan.fragment) as u64, dst: target + offset as u64, len }
    };
    order.iter().enumerate().map(piece).collect()
}

/// A deterministic pseudo-random permutation of the numbers below `count`.
fn shuffled(count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    let mut word = [0; 8];
    for at in (1..count).rev() {
        pattern::fill(SEED, at * 8, &mut word);
        order.swap(at, (u64::from_le_bytes(word) % (at as u64 + 1)) as usize);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_takes_every_slot_once_and_fills_the_target_without_a_gap() {
        let plan = UnpackPlan {
            ordinal: 0,
            size: 100_001,
            fragment: 4096,
            from: UnpackFrom::Pinned,
            modes: Vec::new(),
            iters: 1,
            warmup: 0,
        };
        let order = shuffled(plan.size.div_ceil(plan.fragment));
        let list = scatter_list(&plan, &order, 1 << 40, 1 << 50);
        assert_eq!(list.len(), 25);
        assert_eq!(list.iter().map(|piece| piece.len).sum::<u64>(), 100_001);
        let mut next = 1 << 50;
        for piece in &list {
            assert_eq!(piece.dst, next);
            next += piece.len;
        }
        let mut slots: Vec<_> = list.iter().map(|piece| piece.src - (1 << 40)).collect();
        assert!(slots.windows(2).any(|two| two[0] > two[1]), "it is shuffled");
        slots.sort_unstable();
        assert!(slots.iter().enumerate().all(|(slot, at)| *at == slot as u64 * 4096));
    }
}
