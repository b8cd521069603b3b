//! One round: a dispatch and its combine with random tokens, both compared with the reference.
#![allow(unsafe_code)]

use crossrail_cuda::Stream;
use crossrail_ep_cuda::{
    DeviceBuffer, DeviceHandle, Enqueued, EpCombineArgs, EpCommon, EpDispatchArgs, Layout, NO_REPORT, RankDispatch,
    RegionLease, Shape, Split,
};
use crossrail_kernels::ep as kernels;
use crossrail_types::Result;

use crate::Numbers;
use crate::rank::{Gpu, LIMIT, POISON, Rank};
use crossrail_emulator::reference::{self, Outputs, RankRow, Routing, Wire, random_rows};

/// How a round is done; the same on every rank.
#[derive(Clone, Debug, Default)]
pub(crate) struct Way {
    /// Ranks that take no part.
    pub(crate) absent: Vec<usize>,
    /// Halves apart.
    pub(crate) split: bool,
    /// Weights go with the dispatch.
    pub(crate) early: bool,
    /// Experts' numbers of 4 bytes.
    pub(crate) short_ids: bool,
    pub(crate) biases: bool,
    /// Rows are fp8 already, where the buffer carries fp8.
    pub(crate) ready: bool,
}

impl Way {
    pub(crate) fn of(round: u64) -> Way {
        let bit = |at: u64| round >> at & 1 == 1;
        let (split, early) = (bit(1), !bit(0));
        Way { split, early, short_ids: bit(2), biases: bit(1) != bit(2), ready: bit(0) != bit(2), absent: Vec::new() }
    }
}

/// What all ranks have in one round; each makes all of it.
pub(crate) struct World {
    pub(crate) shape: Shape,
    pub(crate) routing: Routing,
    /// By rank: bf16 [tokens][H].
    pub(crate) rows: Vec<Vec<u16>>,
    pub(crate) biases: Vec<Vec<Vec<u16>>>,
    numbers: Numbers,
}

impl World {
    pub(crate) fn new(shape: Shape, seed: u64, way: &Way) -> World {
        let mut numbers = Numbers(seed);
        let routing = Routing::random(&mut numbers, &shape).without(&way.absent);
        World::of(shape, numbers, routing, way.biases)
    }

    pub(crate) fn of(shape: Shape, mut numbers: Numbers, routing: Routing, biases: bool) -> World {
        let hidden = shape.hidden as usize;
        let mut rows_of = |count: &usize| random_rows(&mut numbers, *count, hidden);
        let rows = routing.tokens.iter().map(&mut rows_of).collect();
        let biases = if biases {
            routing.tokens.iter().map(|count| vec![rows_of(count), rows_of(count)]).collect()
        } else {
            Vec::new()
        };
        World { shape, routing, rows, biases, numbers }
    }

    pub(crate) fn outputs(&mut self, counts: &[usize]) -> Vec<Outputs> {
        let hidden = self.shape.hidden as usize;
        counts.iter().map(|count| Outputs { hidden, values: random_rows(&mut self.numbers, *count, hidden) }).collect()
    }

    /// Arguments of a dispatch that have a rank's input, on its GPU, and no outputs.
    pub(crate) fn input(&self, gpu: &Gpu, me: usize, way: &Way) -> EpDispatchArgs {
        let (idx, hidden) = (&self.routing.idx[me], self.shape.hidden as usize);
        let (x, x_stride, x_scales) = if way.ready && self.shape.payload != kernels::Payload::Bf16 {
            let wires = self.rows[me].chunks(hidden).map(|row| Wire::of(self.shape.payload, row));
            let (mut elements, mut scales) = (Vec::new(), Vec::new());
            for wire in wires {
                elements.extend(wire.elements);
                scales.extend(wire.scales);
                scales.resize(scales.len().next_multiple_of(4), 0);
            }
            (gpu.put(&elements), hidden as u64, Some(gpu.put(&scales)))
        } else {
            (gpu.put_all(&self.rows[me]), 2 * hidden as u64, None)
        };
        EpDispatchArgs {
            common: EpCommon { tokens: self.routing.tokens[me] as u32, ..EpCommon::ZERO },
            x,
            x_stride,
            x_fp8: x_scales.is_some().into(),
            x_scales: x_scales.unwrap_or(0),
            x_scale_strides: [scale_row(&self.shape) as u64, 4],
            topk_idx: if way.short_ids {
                gpu.put_all(idx)
            } else {
                gpu.put_all(&idx.iter().map(|id| i64::from(*id)).collect::<Vec<_>>())
            },
            idx_bytes: if way.short_ids { 4 } else { 8 },
            topk_weights: if way.early { gpu.put_all(&self.routing.weights[me]) } else { 0 },
            expert_alignment: 1,
            ..EpDispatchArgs::ZERO
        }
    }

    pub(crate) fn biases(&self, gpu: &Gpu, me: usize) -> [u64; 2] {
        self.biases.get(me).map_or([0; 2], |both| [gpu.put_all(&both[0]), gpu.put_all(&both[1])])
    }
}

/// `input` with memory for the outputs of a dispatch in the expert layout.
pub(crate) fn expert_args(gpu: &Gpu, shape: &Shape, input: EpDispatchArgs) -> EpDispatchArgs {
    let (local, most) = (shape.local_experts() as usize, (shape.ranks * shape.max_tokens) as usize);
    let scale_row = scale_row(shape);
    EpDispatchArgs {
        out_x: gpu.room(local * most * shape.row_bytes() as usize),
        out_scales: gpu.room(local * most * scale_row),
        out_scale_strides: [most * scale_row, scale_row, 4].map(|stride| stride as u64),
        out_counts: gpu.room(4 * local),
        out_ranges: gpu.room(8 * local * shape.ranks as usize),
        out_source: gpu.room(4 * local * most),
        ..input
    }
}

/// Bytes from one row's scales to the next's, as these tests place them.
fn scale_row(shape: &Shape) -> usize {
    match shape.payload {
        kernels::Payload::Fp8(kernels::Scale::Ue8m0) => (shape.scale_bytes() as usize).next_multiple_of(4),
        _ => shape.scale_bytes() as usize,
    }
}

// Below, the stream is the rank's own and alive, and all addresses are of its own memory, as long as the fields say; that
// is not given to others before the stream is done.

pub(crate) fn put_dispatch_expert(
    buffer: &DeviceBuffer,
    stream: &Stream,
    args: &EpDispatchArgs,
    split: Split,
) -> Result<Enqueued> {
    // SAFETY: as said above.
    unsafe { buffer.dispatch_expert(args, stream.handle(), split) }
}

pub(crate) fn put_combine_expert(
    buffer: &DeviceBuffer,
    stream: &Stream,
    args: &EpCombineArgs,
    handle: &DeviceHandle,
    split: Split,
) -> Result<Enqueued> {
    // SAFETY: as said above.
    unsafe { buffer.combine_expert(args, handle, stream.handle(), split) }
}

pub(crate) fn put_dispatch_rank(
    buffer: &DeviceBuffer,
    stream: &Stream,
    args: &EpDispatchArgs,
    of: RankDispatch<'_>,
    split: Split,
) -> Result<Enqueued> {
    // SAFETY: as said above.
    unsafe { buffer.dispatch_rank(args, of, stream.handle(), split) }
}

pub(crate) fn put_combine_rank(
    buffer: &DeviceBuffer,
    stream: &Stream,
    args: &EpCombineArgs,
    handle: &DeviceHandle,
    split: Split,
) -> Result<Enqueued> {
    // SAFETY: as said above.
    unsafe { buffer.combine_rank(args, handle, stream.handle(), split) }
}

/// Finishes what was split.
pub(crate) fn finish(enqueued: Enqueued, gpu: &Gpu) -> DeviceHandle {
    let Enqueued { handle, pending, .. } = enqueued;
    if let Some(pending) = pending {
        // SAFETY: the stream is alive, and is that of the first half; memory is kept to the end of the test.
        unsafe { pending.finish(gpu.stream.handle()).expect("finish") };
    }
    handle
}

pub(crate) fn split(way: &Way) -> Split {
    if way.split { Split::Send } else { Split::Whole }
}

/// A round in the expert layout.
pub(crate) fn expert(rank: &Rank, seed: u64, way: &Way) {
    expert_with(&rank.buffer, &rank.gpu, rank.me as usize, seed, way);
}

pub(crate) fn expert_with(buffer: &DeviceBuffer, gpu: &Gpu, me: usize, seed: u64, way: &Way) {
    let mut world = World::new(*buffer.shape(), seed, way);
    gpu.reset();
    let shape = world.shape;
    let local = shape.local_experts() as usize;
    let (stats, waits) = (gpu.put_all(&vec![0i32; local]), gpu.put_all(&vec![0i64; shape.ranks as usize]));
    let mut args = EpDispatchArgs { stats, ..expert_args(gpu, &shape, world.input(gpu, me, way)) };
    args.common.waits = waits;
    let handle = finish(put_dispatch_expert(buffer, &gpu.stream, &args, split(way)).expect("dispatch"), gpu);
    check_expert(&world, gpu, me, &args);
    assert_eq!(gpu.read_all::<i32>(stats, local), gpu.read_all::<i32>(args.out_counts, local), "rank {me}: statistics");
    let waited = gpu.read_all::<i64>(waits, shape.ranks as usize);
    assert!(waited.iter().all(|waited| (0..LIMIT.as_nanos() as i64).contains(waited)), "rank {me}: waits {waited:?}");

    let most = (shape.ranks * shape.max_tokens) as usize;
    let outputs = world.outputs(&vec![local * most; shape.ranks as usize]);
    let tokens = args.common.tokens as usize;
    let late = if way.early { 0 } else { gpu.put_all(&world.routing.weights[me]) };
    let stride = 2 * u64::from(shape.hidden);
    let result = gpu.room(tokens * stride as usize);
    let args = EpCombineArgs {
        y: gpu.put_all(&outputs[me].values),
        y_stride: stride,
        topk_weights: late,
        bias: world.biases(gpu, me),
        out: result,
        out_stride: stride,
        ..EpCombineArgs::ZERO
    };
    drop(finish(put_combine_expert(buffer, &gpu.stream, &args, &handle, split(way)).expect("combine"), gpu));
    let expected = reference::combine_expert(&shape, &world.routing, &outputs, true, &world.biases);
    compare_rows(&gpu.read_all::<u16>(result, tokens * shape.hidden as usize), &expected[me], &shape, me, seed, way);
}

pub(crate) fn compare_rows(found: &[u16], expected: &[u16], shape: &Shape, me: usize, seed: u64, way: &Way) {
    assert_eq!(found.len(), expected.len());
    if let Some(at) = (0..found.len()).find(|at| found[*at] != expected[*at]) {
        let (token, element) = (at / shape.hidden as usize, at % shape.hidden as usize);
        panic!(
            "rank {me}, seed {seed}, {way:?}: token {token}, element {element} is {} for {}",
            reference::widen(found[at]),
            reference::widen(expected[at])
        );
    }
}

/// What came is what was sent, at its place; nothing else was written.
pub(crate) fn check_expert(world: &World, gpu: &Gpu, me: usize, out: &EpDispatchArgs) {
    let shape = &world.shape;
    let (local, most) = (shape.local_experts() as usize, (shape.ranks * shape.max_tokens) as usize);
    let expected = &reference::by_expert(shape, &world.routing)[me];
    let counts: Vec<i32> = expected.rows.iter().map(|rows| rows.len() as i32).collect();
    assert_eq!(gpu.read_all::<i32>(out.out_counts, local), counts, "rank {me}: counts");
    assert_eq!(gpu.read_all::<i64>(out.out_ranges, local * shape.ranks as usize), expected.ranges, "rank {me}: ranges");
    let sources = gpu.read_all::<i32>(out.out_source, local * most);
    let row_bytes = shape.row_bytes() as usize;
    let (rows, scales) =
        (gpu.read(out.out_x, local * most * row_bytes), gpu.read(out.out_scales, local * most * scale_row(shape)));
    for (expert, expected) in expected.rows.iter().enumerate() {
        for at in 0..most {
            let row = expert * most + at;
            let found = &rows[row * row_bytes..][..row_bytes];
            let Some((source, token)) = expected.get(at) else {
                assert!(found.iter().all(|byte| *byte == POISON), "rank {me}: row {at} of expert {expert} is none's");
                continue;
            };
            let hidden = shape.hidden as usize;
            let wire = Wire::of(shape.payload, &world.rows[*source][token * hidden..][..hidden]);
            let what = format!("rank {me}: row {at} of expert {expert}, token {token} of rank {source}");
            assert!(found == wire.elements, "{what}");
            let found = &scales[row * scale_row(shape)..][..wire.scales.len()];
            assert!(found == wire.scales, "{what}: scales");
            assert_eq!(sources[row] as usize, *token, "{what}: its token");
        }
    }
}

/// What a dispatch in the rank layout left on the GPU.
pub(crate) struct RankOut {
    pub(crate) counts: u64,
    pub(crate) offsets: u64,
    pub(crate) region: RegionLease,
}

/// A round in the rank layout. `cached`: the routing is then repeated with other rows.
pub(crate) fn rank(rank: &Rank, seed: u64, way: &Way, cached: bool) {
    let (buffer, gpu, me) = (&rank.buffer, &rank.gpu, rank.me as usize);
    let mut world = World::new(rank.shape(), seed, way);
    gpu.reset();
    let shape = world.shape;
    let input = world.input(gpu, me, way);
    let handle = {
        let (out, handle) = dispatch_rank(buffer, gpu, input, None, way);
        let alignment = if way.split { 8 } else { 1 };
        check_rank(&world, gpu, me, &out, alignment, way.early);
        handle
    };
    if cached {
        let fresh = World::of(shape, Numbers(seed + 77), world.routing.clone(), false);
        let input = EpDispatchArgs { topk_idx: 0, topk_weights: 0, ..fresh.input(gpu, me, way) };
        let (out, _) = dispatch_rank(buffer, gpu, input, Some(&handle), way);
        check_rank_rows(&fresh, gpu, me, &out.region);
    }
    let delivered = reference::by_rank(&shape, &world.routing, 1);
    let counts: Vec<usize> = delivered.iter().map(|one| one.rows.len()).collect();
    let outputs = world.outputs(&counts);
    let (tokens, topk) = (input.common.tokens as usize, shape.topk as usize);
    let weights: Vec<Vec<f32>> = if way.early {
        counts.iter().map(|count| (0..count * topk).map(|at| at as f32 / 16.0 - 1.0).collect()).collect()
    } else {
        Vec::new()
    };
    let stride = 2 * u64::from(shape.hidden);
    let (out, out_weights) = (gpu.room(tokens * stride as usize), gpu.room(4 * tokens * topk));
    let args = EpCombineArgs {
        y: gpu.put_all(&outputs[me].values),
        y_stride: stride,
        y_weights: weights.get(me).map_or(0, |weights| gpu.put_all(weights)),
        out_weights: if way.early { out_weights } else { 0 },
        bias: world.biases(gpu, me),
        out,
        out_stride: stride,
        ..EpCombineArgs::ZERO
    };
    drop(finish(put_combine_rank(buffer, &gpu.stream, &args, &handle, split(way)).expect("combine"), gpu));
    let (rows, sums) = &reference::combine_rank(&shape, &world.routing, &outputs, &weights, &world.biases)[me];
    compare_rows(&gpu.read_all::<u16>(out, tokens * shape.hidden as usize), rows, &shape, me, seed, way);
    if way.early {
        assert_eq!(gpu.read_all::<f32>(out_weights, tokens * topk), *sums, "rank {me}, seed {seed}: weights");
    }
}

fn dispatch_rank(
    buffer: &DeviceBuffer,
    gpu: &Gpu,
    input: EpDispatchArgs,
    cached: Option<&DeviceHandle>,
    way: &Way,
) -> (RankOut, DeviceHandle) {
    let shape = *buffer.shape();
    let region = buffer.take_region().expect("a region");
    let (local, ranks) = (shape.local_experts() as usize, shape.ranks as usize);
    let (counts, offsets) = (gpu.room(4 * local), gpu.room(8 * (ranks + 1)));
    let (stats, waits) = (gpu.put_all(&vec![0i32; local]), gpu.put_all(&vec![0i64; ranks]));
    let alignment = if way.split { 8 } else { 1 };
    let mut args = EpDispatchArgs {
        expert_alignment: alignment,
        out_counts: counts,
        out_offsets: offsets,
        max_rows: region.view().most_rows,
        host_word: buffer.rank(),
        stats,
        ..input
    };
    args.common.waits = waits;
    let of = RankDispatch { region: &region, cached, count: true };
    let sent = put_dispatch_rank(buffer, &gpu.stream, &args, of, split(way)).expect("dispatch");
    let count = sent.count.clone().expect("it was asked for");
    let handle = finish(sent, gpu);
    let (rows, by_expert) = count.wait(LIMIT).expect("counts");
    for (rank, said) in (0..).zip(count.host_words()) {
        let expected =
            if buffer.masked().contains(&rank) || !buffer.connected().contains(&rank) { NO_REPORT } else { rank };
        assert_eq!(said, expected, "what rank {rank} said");
    }
    let ends = gpu.read_all::<i64>(offsets, ranks + 1);
    assert_eq!(i64::from(rows), ends[ranks]);
    if cached.is_none() {
        assert_eq!(by_expert, gpu.read_all::<i32>(counts, local));
        let whole: Vec<i32> = gpu.read_all::<i32>(stats, local);
        let rounded: Vec<i32> =
            whole.iter().map(|rows| rows.cast_unsigned().next_multiple_of(alignment) as i32).collect();
        assert_eq!(rounded, by_expert, "statistics");
    }
    let waited = gpu.read_all::<i64>(waits, ranks);
    assert!(waited.iter().all(|waited| (0..LIMIT.as_nanos() as i64).contains(waited)), "waits {waited:?}");
    (RankOut { counts, offsets, region }, handle)
}

pub(crate) fn check_rank(world: &World, gpu: &Gpu, me: usize, out: &RankOut, alignment: i32, weighted: bool) {
    let shape = &world.shape;
    let expected = &reference::by_rank(shape, &world.routing, alignment)[me];
    assert_eq!(gpu.read_all::<i32>(out.counts, shape.local_experts() as usize), expected.counts, "rank {me}: counts");
    assert_eq!(gpu.read_all::<i64>(out.offsets, shape.ranks as usize + 1), expected.offsets, "rank {me}: offsets");
    check_rank_rows(world, gpu, me, &out.region);
    let (view, topk, count) = (out.region.view(), shape.topk as usize, expected.rows.len());
    let most = view.most_rows as usize;
    let idx = gpu.read_all::<i64>(view.topk_idx, most * topk);
    assert!(idx[count * topk..].iter().all(|id| *id == -1), "rank {me}: experts of rows that are none");
    let weights = gpu.read_all::<f32>(view.topk_weights, count * topk);
    for (at, RankRow { source, token, idx: ids, weights: expected }) in expected.rows.iter().enumerate() {
        let what = format!("rank {me}: row {at}, token {token} of rank {source}");
        assert_eq!(&idx[at * topk..][..topk], ids, "{what}");
        assert!(!weighted || weights[at * topk..][..topk] == *expected, "{what}: weights");
    }
}

fn check_rank_rows(world: &World, gpu: &Gpu, me: usize, region: &RegionLease) {
    let (shape, view) = (&world.shape, region.view());
    let expected = &reference::by_rank(shape, &world.routing, 1)[me].rows;
    let (row_bytes, scale_bytes) = (shape.row_bytes() as usize, shape.scale_bytes() as usize);
    let scale_bytes = if shape.payload == kernels::Payload::Bf16 { 0 } else { scale_bytes };
    let rows = gpu.read(view.rows, expected.len() * row_bytes);
    let scales = gpu.read(view.scales, expected.len() * scale_bytes);
    let sources = gpu.read_all::<i32>(view.source, expected.len());
    for (at, row) in expected.iter().enumerate() {
        let hidden = shape.hidden as usize;
        let wire = Wire::of(shape.payload, &world.rows[row.source][row.token * hidden..][..hidden]);
        let what = format!("rank {me}: row {at}, token {} of rank {}", row.token, row.source);
        assert!(rows[at * row_bytes..][..row_bytes] == wire.elements, "{what}");
        assert!(scales[at * scale_bytes..][..scale_bytes] == wire.scales, "{what}: scales");
        assert_eq!(sources[at] as usize, row.token, "{what}: its token");
    }
}

/// Rounds of the case's layout, every way.
pub(crate) fn all_ways(rank_: &Rank, rounds: std::ops::Range<u64>, absent: &[usize]) {
    let known = rank_.buffer.faults().len();
    for round in rounds {
        let way = Way { absent: absent.to_vec(), ..Way::of(round) };
        match rank_.case.layouts[0] {
            Layout::Expert => expert(rank_, round, &way),
            Layout::Rank => rank(rank_, round, &way, round % 3 == 2),
        }
    }
    let faults = rank_.buffer.faults();
    assert!(faults.len() == known || !absent.is_empty(), "{:?}", &faults[known..]);
}

/// A dispatch and its combine, in the stream at once, whatever comes out.
pub(crate) fn unchecked(rank: &Rank, seed: u64) {
    let (buffer, gpu, way) = (&rank.buffer, &rank.gpu, Way { early: true, ..Way::default() });
    let world = World::new(rank.shape(), seed, &way);
    gpu.reset();
    let (input, stride) = (world.input(gpu, rank.me as usize, &way), 2 * u64::from(world.shape.hidden));
    let out = gpu.room(world.shape.max_tokens as usize * stride as usize);
    if rank.case.layouts[0] == Layout::Expert {
        let args = expert_args(gpu, &world.shape, input);
        let sent = put_dispatch_expert(buffer, &gpu.stream, &args, Split::Whole).expect("dispatch");
        let args = EpCombineArgs { y: args.out_x, y_stride: stride, out, out_stride: stride, ..EpCombineArgs::ZERO };
        put_combine_expert(buffer, &gpu.stream, &args, &sent.handle, Split::Whole).expect("combine");
        return;
    }
    let region = buffer.take_region().expect("a region");
    let args = EpDispatchArgs {
        out_counts: gpu.room(4 * world.shape.local_experts() as usize),
        out_offsets: gpu.room(8 * (world.shape.ranks as usize + 1)),
        ..input
    };
    let of = RankDispatch { region: &region, cached: None, count: false };
    let sent = put_dispatch_rank(buffer, &gpu.stream, &args, of, Split::Whole).expect("dispatch");
    let args =
        EpCombineArgs { y: region.view().rows, y_stride: stride, out, out_stride: stride, ..EpCombineArgs::ZERO };
    put_combine_rank(buffer, &gpu.stream, &args, &sent.handle, Split::Whole).expect("combine");
    // SAFETY: the stream is the rank's own.
    unsafe { region.free_after(gpu.stream.handle()).expect("free_after") };
}
