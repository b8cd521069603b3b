//! The ranks: a GPU each, their heaps, a dispatch's tensors, and a gate at which all of their streams wait.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crossrail_cuda::nvrtc::Compiler;
use crossrail_cuda::{Context, Device, DeviceMemory, Event, PinnedMemory, Stream};
use crossrail_kernels::ep::{
    EP_FAULTS, EP_RECEIVE, EP_SEND, EpCombineArgs, EpCommon, EpDispatchArgs, EpFault, EpKernels, Layout, Payload, Shape,
};

use crate::Outcome;
use crate::routing::{Routing, rows};

const LIMIT: Duration = Duration::from_secs(30);
/// The longest wait in a kernel.
const LIMIT_NS: u64 = 2_000_000_000;
/// More than the second cache of any GPU.
const FLUSH: usize = 256 << 20;
/// What all experts give back: this byte twice, as bf16.
const OUTPUT: u8 = 0x3f;

/// How the tensors are.
#[derive(Clone, Copy)]
pub(crate) struct Options {
    /// Weights are given to combine, not to dispatch.
    pub(crate) late_weights: bool,
    /// Scales lie by block and then row, as DeepEP has them.
    pub(crate) column_scales: bool,
    /// Sending and receiving are launches of their own.
    pub(crate) apart: bool,
}

/// One rank's GPU.
struct Rank {
    stream: Stream,
    kernels: EpKernels,
    heap: DeviceMemory,
    peers: DeviceMemory,
    faults: PinnedMemory,
    handles: [DeviceMemory; 2],
    flush: DeviceMemory,
    out_x: DeviceMemory,
    out_scales: DeviceMemory,
    counts: DeviceMemory,
    ranges: DeviceMemory,
    source: DeviceMemory,
    y: DeviceMemory,
}

pub(crate) struct Rig {
    shape: Shape,
    options: Options,
    ranks: Vec<Rank>,
    gate: PinnedMemory,
}

/// One rank's tokens on its GPU.
struct Tokens {
    routing: Routing,
    x: DeviceMemory,
    idx: DeviceMemory,
    weights: DeviceMemory,
    out: DeviceMemory,
}

/// All ranks' tokens.
pub(crate) struct Batch {
    tokens: u32,
    ranks: Vec<Tokens>,
}

impl Rig {
    pub(crate) fn new(devices: &[Device], compiler: &Compiler, shape: Shape, options: Options) -> Outcome<Rig> {
        let contexts: Vec<Context> = devices.iter().map(Context::primary).collect::<Result<_, _>>()?;
        for (i, one) in contexts.iter().enumerate() {
            for other in contexts.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, other)| other) {
                one.enable_peer(other)?;
            }
        }
        let gate = PinnedMemory::new(contexts.first().ok_or("there is no GPU")?, 4096)?;
        let ranks: Vec<Rank> =
            contexts.iter().map(|context| rank(context, compiler, &shape)).collect::<Outcome<_>>()?;
        let rig = Rig { shape, options, ranks, gate };
        let bases: Vec<u8> = rig.ranks.iter().flat_map(|rank| rank.heap.address().to_le_bytes()).collect();
        for rank in &rig.ranks {
            put(&rank.stream, &rank.peers, &bases)?;
            // SAFETY: the memory is the rig's and nobody uses it yet.
            unsafe {
                rank.stream.fill(rank.heap.address(), 0, rank.heap.len())?;
                rank.stream.fill(rank.y.address(), OUTPUT, rank.y.len())?;
            }
            rank.stream.wait(LIMIT)?;
        }
        Ok(rig)
    }

    pub(crate) fn context(&self) -> &Context {
        self.ranks[0].stream.context()
    }

    pub(crate) fn most_blocks(&self) -> u32 {
        self.ranks[0].kernels.most_blocks()
    }

    /// Random tokens for each rank.
    pub(crate) fn batch(&self, tokens: u32) -> Outcome<Batch> {
        let ranks = self.ranks.iter().zip(0..).map(|(rank, number)| {
            let routing = Routing::random(number, tokens, self.shape.topk, self.shape.experts);
            let idx: Vec<u8> = routing.idx.iter().flat_map(|id| id.to_le_bytes()).collect();
            let weights: Vec<u8> = routing.weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
            let x = rows(number, tokens, self.shape.hidden);
            let out = DeviceMemory::new(rank.stream.context(), x.len())?;
            let there = |bytes: &[u8]| -> Outcome<DeviceMemory> {
                let memory = DeviceMemory::new(rank.stream.context(), bytes.len())?;
                put(&rank.stream, &memory, bytes)?;
                Ok(memory)
            };
            Ok(Tokens { x: there(&x)?, idx: there(&idx)?, weights: there(&weights)?, out, routing })
        });
        Ok(Batch { tokens, ranks: ranks.collect::<Outcome<_>>()? })
    }

    fn common(&self, number: usize, handle: usize, tokens: u32, phases: u32) -> EpCommon {
        let rank = &self.ranks[number];
        EpCommon {
            heap: self.shape.heap(),
            parts: self.shape.handle(Layout::Expert),
            base: rank.heap.address(),
            peers: rank.peers.address(),
            handle: rank.handles[handle].address(),
            faults: rank.faults.address(),
            waits: 0,
            limit_ns: LIMIT_NS,
            rank: number as u32,
            phases,
            tokens,
            max_tokens: self.shape.max_tokens,
        }
    }

    /// `tokens`: the batch's, or 0, which only lets all ranks meet.
    fn dispatch(&self, batch: &Batch, number: usize, blocks: u32, tokens: u32, phases: u32) -> Outcome<()> {
        let (rank, own) = (&self.ranks[number], &batch.ranks[number]);
        let (most, blocks_of_row) = (u64::from(self.shape.ranks * self.shape.max_tokens), self.shape.hidden / 128);
        let expert = most * u64::from(blocks_of_row) * 4;
        let column = self.options.column_scales;
        let (row, block) = if column { (4, most * 4) } else { (u64::from(blocks_of_row) * 4, 4) };
        let args = EpDispatchArgs {
            common: self.common(number, usize::from(tokens == 0), tokens, phases),
            x: own.x.address(),
            x_stride: u64::from(self.shape.hidden) * 2,
            in_scales: 0,
            in_scale_row: 0,
            in_scale_block: 0,
            topk_idx: own.idx.address(),
            topk_weights: if self.options.late_weights { 0 } else { own.weights.address() },
            out_x: rank.out_x.address(),
            out_scales: rank.out_scales.address(),
            out_scale_expert: expert,
            out_scale_row: row,
            out_scale_block: block,
            out_counts: rank.counts.address(),
            out_ranges: rank.ranges.address(),
            out_source: rank.source.address(),
            stats: 0,
            out_offsets: 0,
            count_word: 0,
            count_host: 0,
            worst_rows: 0,
            region: 0,
            alignment: 1,
            cached: 0,
            x_fp8: 0,
            idx_bytes: 8,
            reserved: 0,
        };
        // SAFETY: all memory lives as long as the rig and the batch, which are waited for before they go.
        unsafe { rank.kernels.dispatch_expert(&rank.stream, &args, blocks)? };
        Ok(())
    }

    fn combine(&self, batch: &Batch, number: usize, blocks: u32, phases: u32) -> Outcome<()> {
        let (rank, own) = (&self.ranks[number], &batch.ranks[number]);
        let row = u64::from(self.shape.hidden) * 2;
        let args = EpCombineArgs {
            common: self.common(number, 0, batch.tokens, phases),
            y: rank.y.address(),
            y_stride: row,
            topk_weights: if self.options.late_weights { own.weights.address() } else { 0 },
            y_weights: 0,
            out_weights: 0,
            bias0: 0,
            bias1: 0,
            out: own.out.address(),
            out_stride: row,
            senders: 0,
            reserved: 0,
        };
        // SAFETY: as above.
        unsafe { rank.kernels.combine_expert(&rank.stream, &args, blocks)? };
        Ok(())
    }

    /// One dispatch and combine whose results are looked at: counts, sources, rows (bf16), sums.
    pub(crate) fn verify(&self, batch: &Batch, blocks: u32) -> Outcome<()> {
        let all = EP_SEND | EP_RECEIVE;
        for number in 0..self.ranks.len() {
            self.dispatch(batch, number, blocks, batch.tokens, all)?;
            self.combine(batch, number, blocks, all)?;
        }
        for (number, rank) in self.ranks.iter().enumerate() {
            rank.stream.wait(LIMIT).map_err(|error| format!("rank {number}: {error}"))?;
            // SAFETY: pinned memory of that size, and the kernels are done.
            let faults = unsafe { rank.faults.as_ptr().cast::<EpFault>().read_volatile() };
            if faults.number != 0 {
                return Err(format!("rank {number} did not hear of rank {}: {faults:?}", faults.rank).into());
            }
            self.verify_rows(batch, number)?;
            self.verify_sums(batch, number)?;
        }
        Ok(())
    }

    /// The rows that came to a rank, in their order.
    fn verify_rows(&self, batch: &Batch, number: usize) -> Outcome<()> {
        let rank = &self.ranks[number];
        let (local, most) = (self.shape.local_experts() as usize, (self.shape.ranks * self.shape.max_tokens) as usize);
        let (counts, source) = (words(&rank.stream, &rank.counts)?, words(&rank.stream, &rank.source)?);
        for expert in 0..local {
            let id = (number * local + expert) as i64;
            let mut expected = Vec::new();
            for (from, tokens) in batch.ranks.iter().enumerate() {
                let rows = tokens.routing.idx.chunks(self.shape.topk as usize).enumerate();
                expected.extend(rows.filter(|(_, ids)| ids.contains(&id)).map(|(token, _)| (from, token)));
            }
            let came = &source[expert * most..][..expected.len()];
            let same = came.iter().zip(&expected).all(|(token, (_, expected))| *token as usize == *expected);
            if counts[expert] as usize != expected.len() || !same {
                return Err(format!("rank {number}, expert {expert}: {} rows, {came:?}", counts[expert]).into());
            }
            if self.shape.payload != Payload::Bf16 {
                continue;
            }
            let bytes = self.shape.row_bytes() as usize;
            for (row, (from, token)) in expected.iter().enumerate() {
                let at = (expert * most + row) * bytes;
                let sent = &batch.ranks[*from].x;
                let sent = take(&self.ranks[*from].stream, sent.address() + (token * bytes) as u64, bytes)?;
                if take(&rank.stream, rank.out_x.address() + at as u64, bytes)? != sent {
                    return Err(format!("rank {number}, expert {expert}, row {row}: wrong bytes").into());
                }
            }
        }
        Ok(())
    }

    /// All experts give the same, so a token's sum is that times its weights.
    fn verify_sums(&self, batch: &Batch, number: usize) -> Outcome<()> {
        let (own, hidden) = (&batch.ranks[number], self.shape.hidden as usize);
        let out = take(&self.ranks[number].stream, own.out.address(), own.out.len())?;
        let value = f32::from_bits(u32::from_le_bytes([0, 0, OUTPUT, OUTPUT]));
        let weights = own.routing.weights.chunks(self.shape.topk as usize);
        for (token, (row, weights)) in out.chunks_exact(2 * hidden).zip(weights).enumerate() {
            let expected = weights.iter().sum::<f32>() * value;
            let wrong = row.chunks_exact(2).position(|bits| {
                let got = f32::from_bits(u32::from_le_bytes([0, 0, bits[0], bits[1]]));
                (got - expected).abs().partial_cmp(&(expected / 50.0)) != Some(std::cmp::Ordering::Less)
            });
            if let Some(at) = wrong {
                return Err(format!("rank {number}, token {token}: element {at} is not near {expected}").into());
            }
        }
        Ok(())
    }

    /// Microseconds of each step, by iteration: alone, with a cold cache, all ranks having met before.
    pub(crate) fn cold(&self, batch: &Batch, blocks: u32, iters: usize) -> Outcome<Vec<(&'static str, Vec<f64>)>> {
        let both = EP_SEND | EP_RECEIVE;
        let steps: &[(&'static str, bool, u32)] = if self.options.apart {
            &[
                ("dispatch send", true, EP_SEND),
                ("dispatch receive", true, EP_RECEIVE),
                ("combine send", false, EP_SEND),
                ("combine receive", false, EP_RECEIVE),
            ]
        } else {
            &[("dispatch", true, both), ("combine", false, both)]
        };
        let mut events = Vec::new();
        let opened = self.close()?;
        for _ in 0..iters {
            for (number, rank) in self.ranks.iter().enumerate() {
                // SAFETY: the area is the rig's, for this alone.
                unsafe { rank.stream.fill(rank.flush.address(), 0, rank.flush.len())? };
                self.dispatch(batch, number, blocks, 0, both)?;
                events.push(self.mark(number)?);
                for (_, dispatches, phases) in steps {
                    if *dispatches {
                        self.dispatch(batch, number, blocks, batch.tokens, *phases)?;
                    } else {
                        self.combine(batch, number, blocks, *phases)?;
                    }
                    events.push(self.mark(number)?);
                }
            }
        }
        drop(opened);
        self.wait()?;
        let mut rows: Vec<(&'static str, Vec<f64>)> = steps.iter().map(|(name, ..)| (*name, Vec::new())).collect();
        for iteration in events.chunks_exact((steps.len() + 1) * self.ranks.len()) {
            for (step, (_, samples)) in rows.iter_mut().enumerate() {
                let mut longest = 0f64;
                for marks in iteration.chunks_exact(steps.len() + 1) {
                    longest = longest.max(marks[step + 1].since(&marks[step])?.as_nanos() as f64 / 1e3);
                }
                samples.push(longest);
            }
        }
        Ok(rows)
    }

    /// Microseconds of a dispatch and its combine, one pair after the other.
    pub(crate) fn back_to_back(&self, batch: &Batch, blocks: u32, iters: usize) -> Outcome<f64> {
        let mut events = Vec::new();
        let opened = self.close()?;
        let all = EP_SEND | EP_RECEIVE;
        for number in 0..self.ranks.len() {
            self.dispatch(batch, number, blocks, 0, all)?;
            events.push(self.mark(number)?);
        }
        for _ in 0..iters {
            for number in 0..self.ranks.len() {
                self.dispatch(batch, number, blocks, batch.tokens, all)?;
                self.combine(batch, number, blocks, all)?;
            }
        }
        for number in 0..self.ranks.len() {
            events.push(self.mark(number)?);
        }
        drop(opened);
        self.wait()?;
        let mut longest = 0f64;
        for number in 0..self.ranks.len() {
            longest = longest.max(events[self.ranks.len() + number].since(&events[number])?.as_nanos() as f64);
        }
        Ok(longest / 1e3 / iters as f64)
    }

    fn mark(&self, number: usize) -> Outcome<Event> {
        let stream = &self.ranks[number].stream;
        let event = Event::timed(stream.context())?;
        event.record(stream)?;
        Ok(event)
    }

    fn wait(&self) -> Outcome<()> {
        for rank in &self.ranks {
            rank.stream.wait(LIMIT)?;
        }
        Ok(())
    }

    /// Lets all streams wait until the result is dropped.
    fn close(&self) -> Outcome<Opened<'_>> {
        // SAFETY: an aligned word of our own memory, that the host touches by atomics alone.
        let gate = unsafe { AtomicU32::from_ptr(self.gate.as_ptr().cast()) };
        gate.store(0, Ordering::Release);
        let opened = Opened(gate);
        for rank in &self.ranks {
            // SAFETY: the gate's word lives as long as the rig.
            unsafe { rank.stream.wait_value32(self.gate.address(), 1)? };
        }
        Ok(opened)
    }
}

/// Opens the gate whatever happens: streams that wait there would wait for ever.
struct Opened<'a>(&'a AtomicU32);

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        self.0.store(1, Ordering::Release);
    }
}

fn rank(context: &Context, compiler: &Compiler, shape: &Shape) -> Outcome<Rank> {
    let rows = shape.local_experts() as usize * (shape.ranks * shape.max_tokens) as usize;
    let new = |bytes: usize| DeviceMemory::new(context, bytes.max(16));
    let handle = shape.handle_bytes(Layout::Expert) as usize;
    let faults = PinnedMemory::new(context, size_of::<EpFault>() * EP_FAULTS as usize)?;
    // SAFETY: new memory of that size.
    unsafe { faults.as_ptr().write_bytes(0, faults.len()) };
    Ok(Rank {
        stream: Stream::new(context)?,
        kernels: EpKernels::load(context, compiler, shape, LIMIT)?,
        heap: new(shape.heap_bytes() as usize)?,
        peers: new(8 * shape.ranks as usize)?,
        faults,
        handles: [new(handle)?, new(handle)?],
        flush: new(FLUSH)?,
        out_x: new(rows * shape.row_bytes() as usize)?,
        out_scales: new(rows * shape.hidden as usize / 128 * 4)?,
        counts: new(4 * shape.local_experts() as usize)?,
        ranges: new(8 * shape.experts as usize)?,
        source: new(4 * rows)?,
        y: new(rows * shape.hidden as usize * 2)?,
    })
}

/// Writes bytes to the memory, and waits.
fn put(stream: &Stream, memory: &DeviceMemory, bytes: &[u8]) -> Outcome<()> {
    let pinned = PinnedMemory::new(stream.context(), bytes.len().max(1))?;
    // SAFETY: both areas are as long, and nobody else's until the wait is over.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), pinned.as_ptr(), bytes.len());
        stream.copy(memory.address(), pinned.address(), bytes.len())?;
    }
    Ok(stream.wait(LIMIT)?)
}

/// Reads bytes of GPU memory.
fn take(stream: &Stream, address: u64, len: usize) -> Outcome<Vec<u8>> {
    let pinned = PinnedMemory::new(stream.context(), len.max(1))?;
    // SAFETY: both areas are as long; the bytes are read after the copy is done.
    unsafe {
        stream.copy(pinned.address(), address, len)?;
        stream.wait(LIMIT)?;
        Ok(std::slice::from_raw_parts(pinned.as_ptr(), len).to_vec())
    }
}

fn words(stream: &Stream, memory: &DeviceMemory) -> Outcome<Vec<u32>> {
    let bytes = take(stream, memory.address(), memory.len())?;
    Ok(bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
}
