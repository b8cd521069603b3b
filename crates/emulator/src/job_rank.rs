//! One dispatch and its combine in the rank layout, on all ranks of a job on emulated GPUs.

use crossrail_cuda::Grid;
use crossrail_kernels::ep::{
    EP_ANNOUNCE, EP_MARKS, EP_NO_REPORT, EP_RECEIVE, EP_SEND, EpCombineArgs, EpDispatchArgs, Layout, RANK_COMBINE,
    RANK_DISPATCH, Shape,
};

use crate::job::{Input, Job, check_sums, combine_args, ids, lacking, same};
use crate::reference::{self, Outputs, Routing, Wire};
use crate::{GpuMemory, Gpus, Memory, Numbers};

/// The most blocks of a launch in tests.
const MOST_BLOCKS: usize = 4;
/// What statistics begin with.
const STATS: i32 = 1000;

/// One dispatch and its combine in the rank layout, on all ranks.
pub struct ByRank<M = Memory> {
    /// Where each token goes.
    pub routing: Routing,
    /// What counts are rounded up to.
    pub alignment: u32,
    /// Whether the dispatch has weights; and the combine brings back some.
    pub weighted: bool,
    /// By rank: bf16 rows.
    pub x: Vec<Vec<u16>>,
    /// By rank: rows that combine adds.
    pub biases: Vec<Vec<Vec<u16>>>,
    /// By rank.
    pub ranks: Vec<RankRank<M>>,
    /// It repeats the routing of an earlier one.
    pub cached: bool,
    /// Ranks, and others of which nothing reaches them.
    pub apart: Vec<[usize; 2]>,
}

/// What one rank has of it.
pub struct RankRank<M = Memory> {
    /// Arguments of its dispatch.
    pub dispatch: EpDispatchArgs,
    /// Arguments of its combine.
    pub combine: EpCombineArgs,
    /// The handle, which a cached dispatch and the combine read.
    pub handle: M,
    /// Rows of each local expert.
    pub out_counts: M,
    /// The same, added to what is there.
    pub stats: M,
    /// First row of each source rank, and the end.
    pub out_offsets: M,
    /// The word that reports the number of rows to the host.
    pub count_word: M,
    /// The host's copy of the counts.
    pub count_host: M,
    /// What each rank's host announced.
    pub host_words: M,
    /// The experts' outputs, bf16.
    pub y: M,
    /// The weights that combine returns.
    pub y_weights: M,
    /// The combined rows, bf16.
    pub out: M,
    /// The returned weights, summed.
    pub out_weights: M,
    /// What must live as long: inputs.
    pub kept: Vec<M>,
}

impl<M: GpuMemory> ByRank<M> {
    /// With random rows and weights, into that region of each rank; some inputs are laid out otherwise now and then.
    /// Both argument structs have all phases.
    pub fn new<G: Gpus<Memory = M>>(
        job: &mut Job<G>,
        numbers: &mut Numbers,
        routing: Routing,
        region: u32,
    ) -> ByRank<M> {
        let handles = (0..routing.tokens.len()).map(|rank| job.handle(rank, Layout::Rank)).collect();
        let mut operation = ByRank::begin(&job.shape, numbers, routing);
        operation.fill(job, numbers, region, handles);
        operation
    }

    /// A dispatch of other rows with the same routing.
    pub fn again<G: Gpus<Memory = M>>(&self, job: &mut Job<G>, numbers: &mut Numbers, region: u32) -> ByRank<M> {
        let handles = self.ranks.iter().map(|one| one.handle.clone()).collect();
        let mut operation = ByRank::begin(&job.shape, numbers, self.routing.clone());
        operation.cached = true;
        operation.fill(job, numbers, region, handles);
        operation
    }

    fn begin(shape: &Shape, numbers: &mut Numbers, routing: Routing) -> ByRank<M> {
        let hidden = shape.hidden as usize;
        let tokens = routing.tokens.clone();
        let count = numbers.below(3) as usize;
        let x = tokens.iter().map(|tokens| reference::random_rows(numbers, *tokens, hidden)).collect();
        let biases =
            tokens.iter().map(|tokens| (0..count).map(|_| reference::random_rows(numbers, *tokens, hidden)).collect());
        let biases = biases.collect();
        let (alignment, weighted) = ([1, 1, 4, 128][numbers.below(4) as usize], numbers.once_in(2));
        ByRank { routing, alignment, weighted, x, biases, ranks: Vec::new(), cached: false, apart: Vec::new() }
    }

    fn fill<G: Gpus<Memory = M>>(&mut self, job: &mut Job<G>, numbers: &mut Numbers, region: u32, handles: Vec<M>) {
        let came = reference::by_rank(&job.shape, &self.routing, 1);
        for (rank, handle) in handles.into_iter().enumerate() {
            let one = self.rank(job, numbers, rank, (region, came[rank].rows.len(), handle));
            self.ranks.push(one);
        }
    }

    fn rank<G: Gpus<Memory = M>>(
        &self,
        job: &mut Job<G>,
        numbers: &mut Numbers,
        rank: usize,
        of: (u32, usize, M),
    ) -> RankRank<M> {
        let (region, rows, handle) = of;
        let shape = job.shape;
        let (local, hidden, topk) = (shape.local_experts() as usize, shape.hidden as usize, shape.topk as usize);
        let tokens = self.routing.tokens[rank];
        let common = job.common(rank, Layout::Rank, &handle, tokens, 7);
        let mut kept = Vec::new();
        let input = Input::new(&mut job.gpus, numbers, &shape, &self.x[rank], &mut kept);
        let (idx_bytes, topk_idx) = ids(&mut job.gpus, numbers, &self.routing.idx[rank], &mut kept);
        let gpus = &mut job.gpus;
        let given = gpus.memory_of("weights", &self.routing.weights[rank]);
        let out_counts = gpus.memory("out_counts", local * 4);
        let stats = gpus.memory_of("stats", &vec![STATS; local]);
        let out_offsets = gpus.memory("out_offsets", (shape.ranks as usize + 1) * 8);
        let count_word = gpus.zeroed("count_word", 8);
        let count_host = gpus.memory("count_host", local * 4);
        let host_words = gpus.memory("host_words", shape.ranks as usize * 4);
        let y = gpus.memory("y", rows * hidden * 2);
        y.write(0, &reference::random_rows(numbers, rows, hidden));
        let back: Vec<f32> = (0..rows * topk).map(|_| numbers.below(1000) as f32 / 8.0).collect();
        let y_weights = gpus.memory_of("y_weights", &back);
        let out_stride = hidden * 2 + 16 * numbers.below(2) as usize;
        let out = gpus.memory("out", tokens * out_stride);
        let out_weights = gpus.memory("out_weights", tokens * topk * 4);
        let bias = biases_of(gpus, &self.biases[rank], &mut kept);
        // Noting times changes nothing.
        let marks = gpus.memory("marks", MOST_BLOCKS * EP_MARKS as usize * 8);
        let marks_address = if numbers.once_in(3) { marks.address() } else { 0 };
        kept.push(marks);
        let queue = [0, 0, 1, 8, 100][numbers.below(5) as usize];
        let if_weighted = |memory: &M| if self.weighted { memory.address() } else { 0 };
        let dispatch = EpDispatchArgs {
            topk_idx,
            idx_bytes,
            topk_weights: if_weighted(&given),
            out_counts: out_counts.address(),
            stats: stats.address(),
            out_offsets: out_offsets.address(),
            count_word: count_word.address(),
            count_host: count_host.address(),
            host_words: host_words.address(),
            host_word: says(rank),
            max_rows: if numbers.once_in(2) { u64::from(shape.ranks * shape.max_tokens) } else { 0 },
            marks: marks_address,
            queue,
            region,
            expert_alignment: self.alignment,
            cached: self.cached.into(),
            ..input.args(&common)
        };
        let combine = EpCombineArgs {
            y: y.address(),
            y_stride: hidden as u64 * 2,
            y_weights: if_weighted(&y_weights),
            out_weights: if_weighted(&out_weights),
            bias,
            out: out.address(),
            out_stride: out_stride as u64,
            marks: marks_address,
            queue,
            ..combine_args(&common)
        };
        kept.push(given);
        RankRank {
            dispatch,
            combine,
            handle,
            out_counts,
            stats,
            out_offsets,
            count_word,
            count_host,
            host_words,
            y,
            y_weights,
            out,
            out_weights,
            kept,
        }
    }

    /// Queues the dispatch's phases on the streams of all ranks that take part.
    pub fn dispatch<G: Gpus<Memory = M>>(&self, job: &mut Job<G>, blocks: u32, phases: u32) {
        let grid = Grid { blocks, threads: job.threads[0], shared: job.shared[0] };
        for (rank, one) in self.ranks.iter().enumerate().filter(|(rank, _)| self.routing.active[*rank]) {
            let mut args = one.dispatch;
            args.common.phases = phases;
            job.gpus.launch_on(rank as u32, RANK_DISPATCH, &args, grid);
        }
    }

    /// Queues the combine's phases on the streams of all ranks that take part; `senders` as the kernel has it.
    pub fn combine<G: Gpus<Memory = M>>(&self, job: &mut Job<G>, blocks: u32, phases: u32, senders: u32) {
        let grid = Grid { blocks, threads: job.threads[1], shared: job.shared[1] };
        for (rank, one) in self.ranks.iter().enumerate().filter(|(rank, _)| self.routing.active[*rank]) {
            let mut args = one.combine;
            args.common.phases = phases;
            args.senders = senders;
            job.gpus.launch_on(rank as u32, RANK_COMBINE, &args, grid);
        }
    }

    /// What dispatch delivered is what it must be, on all ranks that take part. Before the region is used again.
    pub fn check_dispatch<G: Gpus<Memory = M>>(&self, job: &Job<G>) -> Result<(), String> {
        let expected = reference::by_rank(&job.shape, &self.routing, self.alignment as i32);
        let cast = |row: &[u16]| Wire::of(job.shape.payload, row);
        let wire: Vec<Vec<Wire>> =
            self.x.iter().map(|rows| rows.chunks_exact(job.shape.hidden as usize).map(cast).collect()).collect();
        for (rank, expected) in expected.iter().enumerate().filter(|(rank, _)| self.routing.active[*rank]) {
            self.check_rank(job, rank, expected, &wire).map_err(|what| format!("dispatch at rank {rank}: {what}"))?;
        }
        Ok(())
    }

    fn check_rank<G: Gpus<Memory = M>>(
        &self,
        job: &Job<G>,
        rank: usize,
        expected: &reference::ByRank,
        wire: &[Vec<Wire>],
    ) -> Result<(), String> {
        let (shape, one, heap) = (&job.shape, &self.ranks[rank], &job.ranks[rank].heap);
        let (parts, topk, count) = (shape.heap(), shape.topk as usize, expected.rows.len());
        same("offsets", &one.out_offsets.read::<i64>(0, expected.offsets.len()), &expected.offsets)?;
        same("the word's rows", &[one.count_word.read::<u32>(0, 1)[0]], &[count as u32])?;
        let active = self.routing.active.iter().enumerate();
        let is_heard = |source: usize, there: bool| there && !self.apart.contains(&[rank, source]);
        let said = active.map(|(source, there)| if is_heard(source, *there) { says(source) } else { EP_NO_REPORT });
        let said: Vec<u32> = said.collect();
        same("what the hosts say", &one.host_words.read::<u32>(0, said.len()), &said)?;
        if !self.cached {
            let header = one.handle.read::<u64>(shape.handle(Layout::Rank).header as usize, 3);
            let chosen = self.routing.idx[rank].iter().filter(|id| **id >= 0).count();
            if !shape.slotted() {
                same("selections", &header[2..], &[chosen as u64])?;
            }
            same("counts", &one.out_counts.read::<i32>(0, expected.counts.len()), &expected.counts)?;
            same("the host's counts", &one.count_host.read::<i32>(0, expected.counts.len()), &expected.counts)?;
            let whole = reference::by_rank(shape, &self.routing, 1)[rank].counts.clone();
            let added: Vec<i32> = whole.iter().map(|count| STATS + count).collect();
            same("statistics", &one.stats.read::<i32>(0, added.len()), &added)?;
        }
        let region = (parts.regions + u64::from(one.dispatch.region) * parts.region_stride) as usize;
        let (bytes, scale_bytes) = (shape.row_bytes() as usize, shape.scale_bytes() as usize);
        let at = |part: u64, size: usize, row: usize| region + part as usize + row * size;
        for (row, expected) in expected.rows.iter().enumerate() {
            let what = format!("row {row} (token {} of rank {})", expected.token, expected.source);
            let wire = &wire[expected.source][expected.token];
            same(&what, &heap.read::<u8>(at(0, bytes, row), bytes), &wire.elements)?;
            let scales = heap.read::<u8>(at(parts.region_scales, scale_bytes, row), scale_bytes);
            same(&format!("{what}: scales"), &scales, &wire.scales)?;
            if self.cached {
                continue;
            }
            let idx = heap.read::<i64>(at(parts.region_idx, 8 * topk, row), topk);
            same(&format!("{what}: topk_idx"), &idx, &expected.idx)?;
            let source = heap.read::<i32>(at(parts.region_source, 4, row), 1);
            same(&format!("{what}: source"), &source, &[expected.token as i32])?;
            let kept = one.handle.read::<i32>(shape.handle(Layout::Rank).source as usize + 4 * row, 1);
            same(&format!("{what}: source in the handle"), &kept, &[expected.token as i32])?;
            if self.weighted {
                let weights = heap.read::<f32>(at(parts.region_weights, 4 * topk, row), topk);
                same(&format!("{what}: weights"), &weights, &expected.weights)?;
            }
        }
        let beyond = if self.cached { 0 } else { (one.dispatch.max_rows as usize).saturating_sub(count) * topk };
        let idx = heap.read::<i64>(at(parts.region_idx, 8 * topk, count), beyond);
        same("topk_idx beyond the rows", &idx, &vec![-1; beyond])
    }

    /// What combine gave is what it must be, on all ranks that take part.
    pub fn check_combine<G: Gpus<Memory = M>>(&self, job: &Job<G>) -> Result<(), String> {
        let (hidden, topk) = (job.shape.hidden as usize, job.shape.topk as usize);
        let (rows, sums) = self.expected(job, &[]);
        check_sums(&self.routing, hidden, &rows, |rank| {
            (self.ranks[rank].out.clone(), self.ranks[rank].combine.out_stride as usize)
        })?;
        for (rank, sums) in sums.iter().enumerate().filter(|_| self.weighted) {
            let got = self.ranks[rank].out_weights.read::<f32>(0, self.routing.tokens[rank] * topk);
            same(&format!("combine at rank {rank}: weights"), &got, sums)?;
        }
        Ok(())
    }

    /// Rows and weights that a combine gives without what ranks `gone` return.
    fn expected<G: Gpus<Memory = M>>(&self, job: &Job<G>, gone: &[usize]) -> (Vec<Vec<u16>>, Vec<Vec<f32>>) {
        let hidden = job.shape.hidden as usize;
        let outputs: Vec<Outputs> =
            self.ranks.iter().map(|one| Outputs { hidden, values: one.y.read(0, one.y.len() / 2) }).collect();
        let weights: Vec<Vec<f32>> =
            self.ranks.iter().map(|one| one.y_weights.read(0, one.y_weights.len() / 4)).collect();
        let mut routing = self.routing.clone();
        gone.iter().for_each(|gone| routing.active[*gone] = false);
        reference::combine_rank(&job.shape, &routing, &outputs, &weights, &self.biases).into_iter().unzip()
    }

    /// At `rank`, each piece of a token's sum is whole, or lacks exactly what ranks `gone` would have returned for it; its
    /// weights as its first piece. Returns how many pieces lack some.
    pub fn check_combine_lacking<G: Gpus<Memory = M>>(
        &self,
        job: &Job<G>,
        rank: usize,
        gone: &[usize],
    ) -> Result<usize, String> {
        let (shape, one) = (&job.shape, &self.ranks[rank]);
        let (hidden, topk) = (shape.hidden as usize, shape.topk as usize);
        let ([rows, less_rows], [sums, less_sums]) = {
            let (whole, less) = (self.expected(job, &[]), self.expected(job, gone));
            ([whole.0, less.0], [whole.1, less.1])
        };
        let (stride, piece) = (one.combine.out_stride as usize, shape.tuning().piece as usize);
        let lacks = lacking(&one.out, stride, [&rows[rank], &less_rows[rank]], hidden, piece);
        let lacks =
            lacks.map_err(|what| format!("{what} at rank {rank} is neither whole nor without ranks {gone:?}"))?;
        for (token, lacks) in lacks.iter().step_by(shape.pieces() as usize).enumerate().filter(|_| self.weighted) {
            let got = one.out_weights.read::<f32>(4 * token * topk, topk);
            let of = |sums: &[f32]| sums[token * topk..][..topk] == got;
            if !(of(&less_sums[rank]) || !lacks && of(&sums[rank])) {
                return Err(format!("weights of token {token} at rank {rank} are {got:?}, with lacking rows: {lacks}"));
            }
        }
        Ok(lacks.iter().filter(|lacks| **lacks).count())
    }
}

/// Addresses of up to two biases, 0 for none; their memory is kept.
fn biases_of<G: Gpus>(gpus: &mut G, biases: &[Vec<u16>], kept: &mut Vec<G::Memory>) -> [u64; 2] {
    let mut addresses = [0; 2];
    for (address, bias) in addresses.iter_mut().zip(biases) {
        let memory = gpus.memory_of("bias", bias);
        *address = memory.address();
        kept.push(memory);
    }
    addresses
}

/// Host word that `rank` sends to the others.
fn says(rank: usize) -> u32 {
    1000 + rank as u32
}

/// A dispatch and its combine, now and then another along the same ways, each time with a routing of its own.
pub fn rounds_of<G: Gpus>(job: &mut Job<G>, seeds: std::ops::Range<u64>) {
    for seed in seeds {
        let mut numbers = Numbers(seed);
        let shape = job.shape;
        let routing = Routing::random(&mut numbers, &shape);
        let first = ByRank::new(job, &mut numbers, routing, (seed % 2) as u32);
        let mut operations = vec![first];
        if numbers.once_in(2) {
            let second = operations[0].again(job, &mut numbers, 1 - (seed % 2) as u32);
            operations.push(second);
        }
        for operation in &operations {
            let blocks = 1 + numbers.below(3) as u32;
            operation.dispatch(job, blocks, EP_ANNOUNCE | EP_SEND | EP_RECEIVE);
            operation.combine(job, blocks, EP_SEND | EP_RECEIVE, numbers.below(3) as u32);
        }
        let run = job.gpus.run(seed);
        for operation in &operations {
            let found = operation.check_dispatch(job).and_then(|()| operation.check_combine(job));
            let found = run.clone().and(found);
            found.unwrap_or_else(|what| panic!("seed {seed}: {what}; {}", job.fault_text()));
        }
    }
}
