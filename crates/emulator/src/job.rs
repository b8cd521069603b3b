//! Ranks of an expert-parallel job on emulated GPUs: their heaps, one operation's tensors on each, and whether what came
//! out is what the reference says.

use crossrail_cuda::Grid;
use crossrail_kernels::ep::{
    EP_COMMANDS, EXPERT_COMBINE, EXPERT_COMBINE_FP8, EXPERT_COMBINE_LOGFMT10, EXPERT_DISPATCH, EpCombineArgs, EpCommon,
    EpDispatchArgs, EpFault, EpHandle, Layout, Payload, Scale, Shape, faults_of, stage_name,
};

use crate::coding::Coding;
use crate::reference::{self, Outputs, Routing, Wire};
use crate::{Build, Emulator, GpuMemory, Gpus, Memory, Numbers};

/// All ranks of a job, in one emulator.
pub struct Job<G: Gpus = Emulator> {
    /// What the kernels are compiled for.
    pub shape: Shape,
    /// Where the kernels run.
    pub gpus: G,
    /// By rank.
    pub ranks: Vec<Rank<G::Memory>>,
    /// The longest wait in a kernel, of the virtual clock.
    pub limit_ns: u64,
    /// Threads of a block.
    pub threads: [u32; 2],
    /// Bytes of shared memory of a block that dispatches, and of one that combines.
    pub shared: [u32; 2],
}

/// What a rank has as long as its buffer lives.
pub struct Rank<M = Memory> {
    /// The heap that other ranks write into.
    pub heap: M,
    /// The addresses of all ranks' heaps.
    pub peers: M,
    /// The addresses of this rank's inboxes at all ranks, and of all ranks' inboxes here.
    pub to: M,
    /// See `to`.
    pub from: M,
    /// Two rings of commands, the commands' memory, and how many of each the proxy has read.
    pub rings: M,
    /// See `rings`.
    pub commands: M,
    /// See `rings`.
    pub read: M,
    /// The faults that kernels report.
    pub faults: M,
    /// How long each rank was waited for, in nanoseconds.
    pub waits: M,
}

impl Job<Emulator> {
    /// With the kernels of these sources, compiled for the shape; blocks that dispatch or combine have `shared` bytes of
    /// shared memory. `None` as [`Emulator::build`].
    pub fn new(sources: &[&str], shape: Shape, shared: [u32; 2]) -> Option<Job> {
        Job::of(&Build::new(sources), shape, shared)
    }

    /// The same of sources that are broken, perhaps.
    pub fn of(build: &Build, shape: Shape, shared: [u32; 2]) -> Option<Job> {
        Job::made(&build.clone().defines(&shape.defines(true)), shape, shape.expert_threads(), shared)
    }

    /// With what `build` makes, all of whose definitions it has; blocks that dispatch and that combine have so many threads.
    pub fn made(build: &Build, shape: Shape, threads: [u32; 2], shared: [u32; 2]) -> Option<Job> {
        Some(Job::on(build.emulator()?, shape, threads, shared))
    }
}

impl<G: Gpus> Job<G> {
    /// On these GPUs, whose kernels are compiled for the shape; blocks that dispatch and that combine have so many threads.
    pub fn on(mut gpus: G, shape: Shape, threads: [u32; 2], shared: [u32; 2]) -> Job<G> {
        shape.check().unwrap();
        let heaps: Vec<G::Memory> =
            (0..shape.ranks).map(|rank| gpus.zeroed(&format!("heap {rank}"), shape.heap_bytes() as usize)).collect();
        let addresses: Vec<u64> = heaps.iter().map(GpuMemory::address).collect();
        let mut ranks = Vec::new();
        let parts = shape.heap();
        for (rank, heap) in heaps.into_iter().enumerate() {
            // With fewer inboxes than ranks, those of the ranks on one node.
            let number = |source: u32| source % shape.tuning().inboxes;
            let to: Vec<u64> = addresses.iter().map(|heap| heap + parts.inbox(number(rank as u32))).collect();
            let from: Vec<u64> = (0..shape.ranks).map(|source| addresses[rank] + parts.inbox(number(source))).collect();
            let commands = gpus.zeroed(&format!("commands of host of {rank}"), 2 * 16 * EP_COMMANDS as usize);
            let read = gpus.zeroed(&format!("commands read at host of {rank}"), 2 * 8);
            let half = commands.address() + 16 * u64::from(EP_COMMANDS);
            let rings = [commands.address(), half].into_iter().zip([read.address(), read.address() + 8]);
            let rings: Vec<u64> = rings.flat_map(|(commands, read)| [0, 1, 0, 0, commands, read]).collect();
            ranks.push(Rank {
                heap,
                to: gpus.memory_of(&format!("inboxes of {rank}"), &to),
                from: gpus.memory_of(&format!("inboxes at {rank}"), &from),
                rings: gpus.memory_of(&format!("rings of {rank}"), &rings),
                commands,
                read,
                peers: gpus.memory_of(&format!("peers of {rank}"), &addresses),
                faults: gpus.zeroed(&format!("faults of {rank}"), size_of::<EpFault>() * faults_of(&shape) as usize),
                waits: gpus.zeroed(&format!("waits of {rank}"), 8 * shape.ranks as usize),
            });
        }
        Job { shape, gpus, ranks, limit_ns: 20_000_000_000, threads, shared }
    }

    /// The area of a handle, full of noise.
    pub fn handle(&mut self, rank: usize, layout: Layout) -> G::Memory {
        self.gpus.memory(&format!("handle of {rank}"), self.shape.handle_bytes(layout) as usize)
    }

    /// Common part of every operation's arguments.
    pub fn common(&self, rank: usize, layout: Layout, handle: &G::Memory, tokens: usize, phases: u32) -> EpCommon {
        let parts: EpHandle = self.shape.handle(layout);
        EpCommon {
            heap: self.shape.heap(),
            parts,
            base: self.ranks[rank].heap.address(),
            peers: self.ranks[rank].peers.address(),
            to: self.ranks[rank].to.address(),
            from: self.ranks[rank].from.address(),
            rings: self.ranks[rank].rings.address(),
            handle: handle.address(),
            faults: self.ranks[rank].faults.address(),
            waits: self.ranks[rank].waits.address(),
            limit_ns: self.limit_ns,
            rank: rank as u32,
            phases,
            tokens: tokens as u32,
            max_tokens: self.shape.max_tokens,
        }
    }

    /// The rank that writes each inbox of `rank`.
    fn sources(&self, rank: usize) -> Vec<Option<u32>> {
        let inboxes = self.shape.tuning().inboxes;
        let first = rank as u32 / inboxes * inboxes;
        (first..first + inboxes).map(Some).collect()
    }

    /// Masks `whom` at `rank`, as the host does between launches.
    pub fn mask(&self, rank: usize, whom: usize) {
        self.ranks[rank].heap.write(self.shape.heap().masks as usize + 4 * whom, &[1u32]);
    }

    /// The ranks that are masked at `rank`.
    pub fn masked(&self, rank: usize) -> Vec<usize> {
        let masks: Vec<u32> = self.ranks[rank].heap.read(self.shape.heap().masks as usize, self.shape.ranks as usize);
        masks.iter().enumerate().filter(|(_, mask)| **mask != 0).map(|(rank, _)| rank).collect()
    }

    /// Pieces of rows that other ranks of its node have stored in the heap of `rank` in its first dispatch, for themselves or
    /// for ranks whose rows they forward.
    pub fn pieces_from_others(&self, rank: usize) -> u64 {
        let (heap, node) = (self.shape.heap(), self.shape.tuning().node.max(1) as usize);
        let flags = u64::from(self.shape.max_tokens * self.shape.pieces());
        let by_others = (0..self.shape.ranks as usize).filter(|source| source % node != rank % node);
        let pieces = by_others.map(|source| {
            let at = heap.inbox(source as u32) + heap.row_flags + flags * heap.flag_stride;
            let flags: Vec<u64> = self.ranks[rank].heap.read(at as usize, flags as usize);
            flags.iter().filter(|flag| **flag == 1).count() as u64
        });
        pieces.sum()
    }

    /// All faults that kernels reported, as text with the heaps' reports.
    pub fn fault_text(&self) -> String {
        let of = |rank| self.faults(rank).into_iter().map(move |(whom, stage)| (rank, whom, stage));
        let all = (0..self.ranks.len()).flat_map(of);
        let all: Vec<String> = all
            .map(|(rank, whom, stage)| format!("rank {rank} did not see {} of rank {whom}", stage_name(stage)))
            .collect();
        if all.is_empty() {
            return "no faults".into();
        }
        let heaps = self.ranks.iter().enumerate();
        let heaps = heaps.map(|(rank, one)| {
            format!("rank {rank}: {}", self.shape.report(&one.heap.read(0, one.heap.len()), &self.sources(rank)))
        });
        format!("{}\n{}", all.join(", "), heaps.collect::<Vec<_>>().join("\n"))
    }

    /// Faults that kernels of `rank` reported: the rank that timed out, and the stage.
    pub fn faults(&self, rank: usize) -> Vec<(u32, u32)> {
        let words: Vec<u32> =
            self.ranks[rank].faults.read(0, size_of::<EpFault>() / 4 * faults_of(&self.shape) as usize);
        let faults = words.chunks_exact(size_of::<EpFault>() / 4).filter(|fault| fault[0] != 0);
        faults.map(|fault| (fault[6], fault[7])).collect()
    }
}

/// One dispatch and its combine in the expert layout, on all ranks.
pub struct ByExpert<M = Memory> {
    /// Where each token goes.
    pub routing: Routing,
    /// By rank: bf16 rows.
    pub x: Vec<Vec<u16>>,
    /// Where weights are given.
    pub weights: Weights,
    /// By rank: rows that combine adds.
    pub biases: Vec<Vec<Vec<u16>>>,
    /// What the combine carries; bf16 unless a test says otherwise.
    pub coding: Coding,
    /// By rank.
    pub ranks: Vec<ExpertRank<M>>,
}

/// Where the weights of an operation in the expert layout are given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// None: outputs are summed as they are.
    None,
    /// With the dispatch.
    Dispatch,
    /// With the combine.
    Combine,
}

/// What one rank has of it.
pub struct ExpertRank<M = Memory> {
    /// Arguments of its dispatch.
    pub dispatch: EpDispatchArgs,
    /// Arguments of its combine.
    pub combine: EpCombineArgs,
    /// Dispatched rows, `[local experts, ranks * max_tokens, hidden]`.
    pub out_x: M,
    /// Their scales.
    pub out_scales: M,
    /// Rows of each local expert.
    pub out_counts: M,
    /// First row << 32 | rows, `[local experts, ranks]`.
    pub out_ranges: M,
    /// The token at its source, for each row.
    pub out_source: M,
    /// The experts' outputs, bf16.
    pub y: M,
    /// The combined rows, bf16.
    pub out: M,
    /// Rows of each local expert, added to what is there.
    pub stats: M,
    /// What must live as long: inputs, the handle.
    pub kept: Vec<M>,
}

impl<M: GpuMemory> ByExpert<M> {
    /// With random rows and weights; some inputs are laid out otherwise now and then (ids of 4 bytes, strides, rows
    /// that are fp8 already, transposed scales). Both argument structs have all phases.
    pub fn new<G: Gpus<Memory = M>>(
        job: &mut Job<G>,
        numbers: &mut Numbers,
        routing: Routing,
        weights: Weights,
    ) -> ByExpert<M> {
        let shape = job.shape;
        let hidden = shape.hidden as usize;
        let x: Vec<Vec<u16>> =
            routing.tokens.iter().map(|count| reference::random_rows(numbers, *count, hidden)).collect();
        let count = numbers.below(3) as usize;
        let biases: Vec<Vec<Vec<u16>>> = routing
            .tokens
            .iter()
            .map(|tokens| (0..count).map(|_| reference::random_rows(numbers, *tokens, hidden)).collect())
            .collect();
        let mut operation = ByExpert { routing, x, weights, biases, coding: Coding::Bf16, ranks: Vec::new() };
        for rank in 0..shape.ranks as usize {
            let one = operation.rank(job, numbers, rank);
            operation.ranks.push(one);
        }
        operation
    }

    fn rank<G: Gpus<Memory = M>>(&self, job: &mut Job<G>, numbers: &mut Numbers, rank: usize) -> ExpertRank<M> {
        let shape = job.shape;
        let (local, most) = (shape.local_experts() as usize, (shape.ranks * shape.max_tokens) as usize);
        let tokens = self.routing.tokens[rank];
        let handle = job.handle(rank, Layout::Expert);
        let common = job.common(rank, Layout::Expert, &handle, tokens, 6);
        let mut kept = vec![handle];
        let input = Input::new(&mut job.gpus, numbers, &shape, &self.x[rank], &mut kept);
        let (idx_bytes, topk_idx) = ids(&mut job.gpus, numbers, &self.routing.idx[rank], &mut kept);
        let given = job.gpus.memory_of("weights", &self.routing.weights[rank]);
        let weights = |at: Weights| if self.weights == at { given.address() } else { 0 };
        let (in_dispatch, in_combine) = (weights(Weights::Dispatch), weights(Weights::Combine));
        kept.push(given);
        let (scale_bytes, out_scale_strides) = scale_layout(numbers, &shape, local, most);
        let gpus = &mut job.gpus;
        let out_x = gpus.memory("out_x", local * most * shape.row_bytes() as usize);
        let out_scales = gpus.memory("out_scales", scale_bytes);
        let out_counts = gpus.memory("out_counts", local * 4);
        let out_ranges = gpus.memory("out_ranges", local * shape.ranks as usize * 8);
        let out_source = gpus.memory("out_source", local * most * 4);
        let stats = gpus.zeroed("stats", local * 4);
        let y = gpus.memory("y", local * most * shape.hidden as usize * 2);
        y.write(0, &reference::random_rows(numbers, local * most, shape.hidden as usize));
        let out_stride = shape.hidden as usize * 2 + 16 * numbers.below(2) as usize;
        let out = gpus.memory("out", tokens * out_stride);
        let mut bias = [0; 2];
        for (address, rows) in bias.iter_mut().zip(&self.biases[rank]) {
            let memory = gpus.memory_of("bias", rows);
            *address = memory.address();
            kept.push(memory);
        }
        let dispatch = EpDispatchArgs {
            common,
            topk_idx,
            idx_bytes,
            topk_weights: in_dispatch,
            out_x: out_x.address(),
            out_scales: out_scales.address(),
            out_scale_strides,
            out_counts: out_counts.address(),
            out_ranges: out_ranges.address(),
            out_source: out_source.address(),
            stats: stats.address(),
            ..input.args(&common)
        };
        let combine = EpCombineArgs {
            y: y.address(),
            y_stride: shape.hidden as u64 * 2,
            topk_weights: in_combine,
            bias,
            out: out.address(),
            out_stride: out_stride as u64,
            ..combine_args(&common)
        };
        ExpertRank { dispatch, combine, out_x, out_scales, out_counts, out_ranges, out_source, y, out, stats, kept }
    }

    /// Queues the dispatch's phases on the streams of all ranks that take part.
    pub fn dispatch<G: Gpus<Memory = M>>(&self, job: &mut Job<G>, blocks: u32, phases: u32) {
        let grid = Grid { blocks, threads: job.threads[0], shared: job.shared[0] };
        for (rank, one) in self.ranks.iter().enumerate().filter(|(rank, _)| self.routing.active[*rank]) {
            let mut args = one.dispatch;
            args.common.phases = phases;
            job.gpus.launch_on(rank as u32, EXPERT_DISPATCH, &args, grid);
        }
    }

    /// Queues the combine's phases on the streams of all ranks that take part.
    pub fn combine<G: Gpus<Memory = M>>(&self, job: &mut Job<G>, blocks: u32, phases: u32) {
        let grid = Grid { blocks, threads: job.threads[1], shared: job.shared[1] };
        for (rank, one) in self.ranks.iter().enumerate().filter(|(rank, _)| self.routing.active[*rank]) {
            let mut args = one.combine;
            args.common.phases = phases;
            args.wire = self.coding.wire();
            let kernel = match self.coding {
                Coding::Bf16 => EXPERT_COMBINE,
                Coding::LogFmt10 => EXPERT_COMBINE_LOGFMT10,
                Coding::Fp8 => EXPERT_COMBINE_FP8,
            };
            job.gpus.launch_on(rank as u32, kernel, &args, grid);
        }
    }

    /// What dispatch delivered is what it must be, on all ranks that take part.
    pub fn check_dispatch<G: Gpus<Memory = M>>(&self, job: &Job<G>) -> Result<(), String> {
        let expected = reference::by_expert(&job.shape, &self.routing);
        let wire: Vec<Vec<Wire>> = self
            .x
            .iter()
            .map(|rows| {
                rows.chunks_exact(job.shape.hidden as usize).map(|row| Wire::of(job.shape.payload, row)).collect()
            })
            .collect();
        for (rank, (expected, one)) in expected.iter().zip(&self.ranks).enumerate() {
            if self.routing.active[rank] {
                one.check(&job.shape, expected, &wire).map_err(|what| format!("dispatch at rank {rank}: {what}"))?;
            }
        }
        Ok(())
    }

    /// What combine gave is what it must be, on all ranks that take part.
    pub fn check_combine<G: Gpus<Memory = M>>(&self, job: &Job<G>) -> Result<(), String> {
        let hidden = job.shape.hidden as usize;
        let outputs: Vec<Outputs> =
            self.ranks.iter().map(|one| Outputs { hidden, values: one.y.read(0, one.y.len() / 2) }).collect();
        let weighted = self.weights != Weights::None;
        let (shape, routing, biases) = (&job.shape, &self.routing, &self.biases);
        let expected = reference::combine_expert_coded(shape, routing, &outputs, weighted, biases, self.coding);
        check_sums(&self.routing, hidden, &expected, |rank| {
            (self.ranks[rank].out.clone(), self.ranks[rank].combine.out_stride as usize)
        })
    }

    /// At `rank`, each piece of a token's sum is whole, or lacks exactly what rank `gone` would have returned for it. Returns
    /// how many differ from the whole one.
    pub fn check_combine_without<G: Gpus<Memory = M>>(
        &self,
        job: &Job<G>,
        rank: usize,
        gone: usize,
    ) -> Result<usize, String> {
        self.check_combine_lacking(job, rank, &[gone])
    }

    /// As `check_combine_without` for several ranks, whose parts are there or lacking together.
    pub fn check_combine_lacking<G: Gpus<Memory = M>>(
        &self,
        job: &Job<G>,
        rank: usize,
        gone: &[usize],
    ) -> Result<usize, String> {
        let (hidden, piece) = (job.shape.hidden as usize, job.shape.tuning().piece as usize);
        let outputs: Vec<Outputs> =
            self.ranks.iter().map(|one| Outputs { hidden, values: one.y.read(0, one.y.len() / 2) }).collect();
        let weighted = self.weights != Weights::None;
        let expected = |routing: &Routing| {
            let (shape, biases) = (&job.shape, &self.biases);
            let all = reference::combine_expert_coded(shape, routing, &outputs, weighted, biases, self.coding);
            all.into_iter().nth(rank).unwrap_or_default()
        };
        let mut fewer = self.routing.clone();
        gone.iter().for_each(|gone| fewer.active[*gone] = false);
        let (whole, less) = (expected(&self.routing), expected(&fewer));
        let one = &self.ranks[rank];
        let lacks = lacking(&one.out, one.combine.out_stride as usize, [&whole, &less], hidden, piece);
        let lacks =
            lacks.map_err(|what| format!("{what} at rank {rank} is neither whole nor without ranks {gone:?}"))?;
        Ok(lacks.iter().filter(|lacks| **lacks).count())
    }
}

/// Pieces of a combine's rows: true for a piece that equals the second of two expected values and not the first.
///
/// # Errors
/// Naming a piece that is neither.
pub fn lacking<M: GpuMemory>(
    out: &M,
    stride: usize,
    expected: [&[u16]; 2],
    hidden: usize,
    piece: usize,
) -> Result<Vec<bool>, String> {
    let mut lacking = Vec::new();
    let [whole, less] = expected.map(|rows| rows.chunks_exact(hidden));
    for (token, (whole, less)) in whole.zip(less).enumerate() {
        let got: Vec<u16> = out.read(token * stride, hidden);
        for (number, got) in got.chunks(piece).enumerate() {
            let of = |row: &[u16]| row[number * piece..][..got.len()] == *got;
            if !of(whole) && !of(less) {
                return Err(format!("the sum of token {token}, piece {number},"));
            }
            lacking.push(!of(whole));
        }
    }
    Ok(lacking)
}

/// Compares combine's rows with those expected, by rank.
pub fn check_sums<M: GpuMemory>(
    routing: &Routing,
    hidden: usize,
    expected: &[Vec<u16>],
    out: impl Fn(usize) -> (M, usize),
) -> Result<(), String> {
    for (rank, expected) in expected.iter().enumerate() {
        let (memory, stride) = out(rank);
        for (token, expected) in expected.chunks_exact(hidden).enumerate() {
            let got: Vec<u16> = memory.read(token * stride, hidden);
            if let Some(at) = (0..hidden).find(|at| got[*at] != expected[*at]) {
                let (got, expected) = (got[at], expected[at]);
                let tokens = routing.tokens[rank];
                return Err(format!(
                    "combine at rank {rank}: token {token} of {tokens}, element {at} is {got:#06x}, not {expected:#06x}"
                ));
            }
        }
    }
    Ok(())
}

impl<M: GpuMemory> ExpertRank<M> {
    fn check(&self, shape: &Shape, expected: &reference::ByExpert, wire: &[Vec<Wire>]) -> Result<(), String> {
        let most = (shape.ranks * shape.max_tokens) as usize;
        let counts: Vec<i32> = expected.rows.iter().map(|rows| rows.len() as i32).collect();
        same("counts", &self.out_counts.read::<i32>(0, counts.len()), &counts)?;
        same("stats", &self.stats.read::<i32>(0, counts.len()), &counts)?;
        same("ranges", &self.out_ranges.read::<i64>(0, expected.ranges.len()), &expected.ranges)?;
        for (expert, rows) in expected.rows.iter().enumerate() {
            for (row, (source, token)) in rows.iter().enumerate() {
                let at = expert * most + row;
                let what = format!("expert {expert}, row {row} (token {token} of rank {source})");
                same(&format!("{what}: source"), &self.out_source.read::<i32>(at * 4, 1), &[*token as i32])?;
                let wire = &wire[*source][*token];
                let bytes = shape.row_bytes() as usize;
                same(&what, &self.out_x.read::<u8>(at * bytes, bytes), &wire.elements)?;
                same(&format!("{what}: scales"), &self.scales(shape, expert, row), &wire.scales)?;
            }
        }
        Ok(())
    }

    /// The scales of one row, as they travel.
    fn scales(&self, shape: &Shape, expert: usize, row: usize) -> Vec<u8> {
        let Payload::Fp8(kind) = shape.payload else { return Vec::new() };
        let args = &self.dispatch;
        let [of_expert, of_row, block] = args.out_scale_strides.map(|stride| stride as usize);
        let at = of_expert * expert + of_row * row;
        let one = |index: usize| match kind {
            Scale::Ue8m0 => self.out_scales.read::<u8>(at + index / 4 * block + index % 4, 1),
            Scale::F32 | Scale::PowerOfTwo => self.out_scales.read::<u8>(at + index * block, 4),
        };
        (0..shape.hidden as usize / reference::BLOCK).flat_map(one).collect()
    }
}

/// Compares what lies one after the other.
pub fn same<T: PartialEq + std::fmt::Debug>(what: &str, got: &[T], expected: &[T]) -> Result<(), String> {
    if got == expected {
        return Ok(());
    }
    match got.iter().zip(expected).position(|(got, expected)| got != expected) {
        None => Err(format!("{what}: {} values, not {}", got.len(), expected.len())),
        Some(at) => Err(format!("{what}: value {at} of {} is {:?}, not {:?}", got.len(), got[at], expected[at])),
    }
}

/// The rows that a dispatch is given: bf16, or cast already.
pub struct Input {
    x: u64,
    stride: u64,
    fp8: u32,
    scales: u64,
    scale_strides: [u64; 2],
}

impl Input {
    /// Writes rows in one of the formats that kernels take; `kept` holds the memory.
    pub fn new<G: Gpus>(
        gpus: &mut G,
        numbers: &mut Numbers,
        shape: &Shape,
        rows: &[u16],
        kept: &mut Vec<G::Memory>,
    ) -> Input {
        let hidden = shape.hidden as usize;
        let fp8 = shape.payload != Payload::Bf16 && numbers.once_in(3);
        let rows: Vec<&[u16]> = rows.chunks_exact(hidden).collect();
        let bytes = if fp8 { hidden } else { 2 * hidden };
        let stride = bytes + 16 * numbers.below(3) as usize;
        let x = gpus.memory("x", rows.len() * stride);
        let blocks = hidden / reference::BLOCK;
        let size = if shape.payload == Payload::Fp8(Scale::Ue8m0) { 1 } else { 4 };
        // Scales of a byte go by four.
        let packed = if size == 1 { 4 } else { 1 };
        let units = blocks.div_ceil(packed);
        let unit = 4;
        let (scale_row, scale_block) =
            if numbers.once_in(2) { (units * unit, unit) } else { (unit, rows.len() * unit) };
        let scales = gpus.memory("scales", rows.len() * units * unit);
        for (token, row) in rows.iter().enumerate() {
            if !fp8 {
                x.write(token * stride, row);
                continue;
            }
            let wire = Wire::of(shape.payload, row);
            x.write(token * stride, &wire.elements);
            for (block, scale) in wire.scales.chunks_exact(size).enumerate() {
                scales.write(token * scale_row + block / packed * scale_block + block % packed, scale);
            }
        }
        let input = Input {
            x: x.address(),
            stride: stride as u64,
            fp8: fp8.into(),
            scales: if fp8 { scales.address() } else { 0 },
            scale_strides: [scale_row as u64, scale_block as u64],
        };
        kept.extend([x, scales]);
        input
    }

    /// Arguments of a dispatch that have this and `common`, and nothing else.
    pub fn args(&self, common: &EpCommon) -> EpDispatchArgs {
        EpDispatchArgs {
            common: *common,
            x: self.x,
            x_stride: self.stride,
            x_scales: self.scales,
            x_scale_strides: self.scale_strides,
            x_fp8: self.fp8,
            expert_alignment: 1,
            idx_bytes: 4,
            ..EpDispatchArgs::ZERO
        }
    }
}

/// Arguments of a combine that have `common` and nothing else.
pub fn combine_args(common: &EpCommon) -> EpCombineArgs {
    EpCombineArgs { common: *common, ..EpCombineArgs::ZERO }
}

/// Expert ids, of 4 or 8 bytes: how many, and where.
pub fn ids<G: Gpus>(gpus: &mut G, numbers: &mut Numbers, idx: &[i32], kept: &mut Vec<G::Memory>) -> (u32, u64) {
    let wide = numbers.once_in(2);
    let memory = if wide {
        let idx: Vec<i64> = idx.iter().map(|id| i64::from(*id)).collect();
        gpus.memory_of("topk_idx", &idx)
    } else {
        gpus.memory_of("topk_idx", idx)
    };
    let address = memory.address();
    kept.push(memory);
    (if wide { 8 } else { 4 }, address)
}

/// Bytes of the scales of the expert layout, and from one expert's, row's and block's to the next's: in rows, or with
/// the rows' own side by side.
fn scale_layout(numbers: &mut Numbers, shape: &Shape, experts: usize, most: usize) -> (usize, [u64; 3]) {
    let blocks = shape.hidden as usize / reference::BLOCK;
    let units = match shape.payload {
        Payload::Bf16 => 0,
        Payload::Fp8(Scale::Ue8m0) => blocks.div_ceil(4),
        Payload::Fp8(_) => blocks,
    };
    let expert = most * units * 4;
    let [row, block] = if numbers.once_in(2) { [units * 4, 4] } else { [4, most * 4] };
    (experts * expert, [expert, row, block].map(|stride| stride as u64))
}
