//! Operations back to back without end, two buffers at once, and graphs that are replayed.

use std::thread;
use std::time::{Duration, Instant};

use crossrail_cuda::Graph;
use crossrail_ep_cuda::{DeviceHandle, EpCombineArgs, EpDispatchArgs, Layout, Payload, RankDispatch, Shape, Split};

use crate::rank::{Case, Gpu, Rank, make_buffer, on_ranks};
use crate::rounds::{
    RankOut, Way, World, all_ways, check_expert, check_rank, compare_rows, expert_args, expert_with,
    put_combine_expert, put_combine_rank, put_dispatch_expert, put_dispatch_rank,
};
use crate::{Numbers, alone};
use crossrail_emulator::reference::{self, Choice, Outputs, Routing};

/// Pairs of a dispatch and a combine: twice as many operations.
const PAIRS: u64 = 10_000;
/// Routings that they go through.
const WORLDS: u64 = 6;
/// Pairs between two checks, and that are in the stream at once.
const CHECKED: u64 = 1000;
const AHEAD: u64 = 50;

alone!(ten_thousand_back_to_back, |gpus| {
    on_ranks(&Case::new(Layout::Expert, Payload::Bf16), gpus, back_to_back);
});

/// One world on its rank's GPU, and what comes out when experts give back what they got.
struct Prepared {
    input: EpDispatchArgs,
    expected: Vec<u16>,
}

fn prepare(rank: &Rank, seed: u64) -> Prepared {
    let (me, way) = (rank.me as usize, Way { early: true, ..Way::default() });
    let world = World::new(rank.shape(), seed, &way);
    let (shape, hidden) = (&world.shape, world.shape.hidden as usize);
    let most = (shape.ranks * shape.max_tokens) as usize;
    let outputs: Vec<Outputs> = reference::by_expert(shape, &world.routing)
        .into_iter()
        .map(|one| {
            let mut values = vec![0; shape.local_experts() as usize * most * hidden];
            for (expert, rows) in one.rows.iter().enumerate() {
                for (at, (source, token)) in rows.iter().enumerate() {
                    let row = &world.rows[*source][token * hidden..][..hidden];
                    values[(expert * most + at) * hidden..][..hidden].copy_from_slice(row);
                }
            }
            Outputs { hidden, values }
        })
        .collect();
    let expected = reference::combine_expert(shape, &world.routing, &outputs, true, &[]).swap_remove(me);
    Prepared { input: world.input(&rank.gpu, me, &way), expected }
}

fn back_to_back(rank: &Rank) {
    let (gpu, shape) = (&rank.gpu, rank.shape());
    gpu.reset();
    let worlds: Vec<Prepared> = (0..WORLDS).map(|seed| prepare(rank, 1000 + seed)).collect();
    let stride = 2 * u64::from(shape.hidden);
    let outs = [0, 1].map(|_| {
        (expert_args(gpu, &shape, EpDispatchArgs::ZERO), gpu.room(shape.max_tokens as usize * stride as usize))
    });
    gpu.wait();
    let began = Instant::now();
    for pair in 0..PAIRS {
        let (world, (out, result)) = (&worlds[(pair % WORLDS) as usize], outs[(pair % 2) as usize]);
        let args = EpDispatchArgs {
            out_x: out.out_x,
            out_scales: out.out_scales,
            out_scale_strides: out.out_scale_strides,
            out_counts: out.out_counts,
            out_ranges: out.out_ranges,
            out_source: out.out_source,
            ..world.input
        };
        let sent = put_dispatch_expert(&rank.buffer, &gpu.stream, &args, Split::Whole).expect("dispatch");
        let args =
            EpCombineArgs { y: out.out_x, y_stride: stride, out: result, out_stride: stride, ..EpCombineArgs::ZERO };
        put_combine_expert(&rank.buffer, &gpu.stream, &args, &sent.handle, Split::Whole).expect("combine");
        if pair % AHEAD == AHEAD - 1 {
            gpu.wait();
        }
        if pair % CHECKED == CHECKED - 1 {
            for (pair, (_, result)) in [(pair - 1, outs[((pair - 1) % 2) as usize]), (pair, outs[(pair % 2) as usize])]
            {
                let world = &worlds[(pair % WORLDS) as usize];
                let found = gpu.read_all::<u16>(result, world.expected.len());
                compare_rows(&found, &world.expected, &shape, rank.me as usize, pair, &Way::default());
            }
            // One rank after the other is late.
            if pair / CHECKED % u64::from(shape.ranks) == u64::from(rank.me) {
                thread::sleep(Duration::from_millis(10));
            }
        }
    }
    gpu.wait();
    if rank.me == 0 {
        let each = 1e6 * began.elapsed().as_secs_f64() / PAIRS as f64;
        println!("note: {PAIRS} pairs of dispatch and combine, {each:.1} us each, checks included");
    }
    assert_eq!(rank.buffer.faults(), []);
}

alone!(two_buffers_at_once, |gpus| {
    on_ranks(&Case::new(Layout::Expert, Payload::Bf16), gpus, |rank| {
        let (me, ordinal) = (rank.me as usize, rank.gpu.ordinal);
        let other = make_buffer(&rank.case, &rank.group, &rank.context, "others", ordinal, rank.gpus);
        rank.connect_other(&other);
        let gpu = Gpu::new(ordinal);
        rank.meet("two buffers", &rank.case.everybody());
        thread::scope(|scope| {
            // Each at its own pace: nothing keeps the two in step.
            let second = scope.spawn(|| {
                for round in 0..12 {
                    expert_with(&other, &gpu, me, 500 + round, &Way::of(round));
                }
                gpu
            });
            all_ways(rank, 0..12, &[]);
            drop(second.join().expect("the second buffer's rounds"));
        });
        assert_eq!(other.faults(), []);
        rank.meet("two buffers are done", &rank.case.everybody());
        other.destroy().expect("destroy");
    });
});

/// Tokens of each rank in graphs.
const TOKENS: [usize; 4] = [14, 3, 0, 9];
const REPLAYS: u64 = 12;

pub(crate) fn world_of(shape: Shape, seed: u64) -> World {
    let mut numbers = Numbers(seed);
    let choice = Choice::random(&mut numbers);
    let routing = Routing::of(&mut numbers, &shape, &TOKENS, choice);
    World::of(shape, numbers, routing, false)
}

/// Other tokens in place of those of `input`.
fn replace(world: &World, gpu: &Gpu, me: usize, input: &EpDispatchArgs) {
    gpu.write_all(input.x, &world.rows[me]);
    let ids: Vec<i64> = world.routing.idx[me].iter().map(|id| i64::from(*id)).collect();
    gpu.write_all(input.topk_idx, &ids);
    gpu.write_all(input.topk_weights, &world.routing.weights[me]);
}

fn replay(graph: &Graph, gpu: &Gpu) {
    launch(graph, gpu);
    gpu.wait();
}

#[allow(unsafe_code)]
pub(crate) fn launch(graph: &Graph, gpu: &Gpu) {
    // SAFETY: all that was recorded is of the rank's own memory, its buffer, and a handle and a region that are kept.
    unsafe { graph.launch(&gpu.stream).expect("launch") };
}

alone!(graphs_of_the_expert_layout, |gpus| on_ranks(&Case::new(Layout::Expert, Payload::Bf16), gpus, expert_graph));
alone!(graphs_of_the_rank_layout, |gpus| on_ranks(&Case::new(Layout::Rank, Payload::Bf16), gpus, rank_graph));

/// A dispatch and its combine in the expert layout, in a graph.
pub(crate) struct Recorded {
    graph: Graph,
    _handle: DeviceHandle,
    args: EpDispatchArgs,
    y: u64,
    result: u64,
}

impl Recorded {
    /// Records them, in memory of the rank's that must not be used for anything else then.
    pub(crate) fn new(rank: &Rank) -> Recorded {
        let (gpu, me, shape, way) = (&rank.gpu, rank.me as usize, rank.shape(), Way { early: true, ..Way::default() });
        let (local, most) = (shape.local_experts() as usize, (shape.ranks * shape.max_tokens) as usize);
        let stride = 2 * u64::from(shape.hidden);
        gpu.reset();
        let args = expert_args(gpu, &shape, world_of(shape, 1).input(gpu, me, &way));
        let (y, result) = (gpu.room(local * most * stride as usize), gpu.room(TOKENS[me] * stride as usize));
        let combine = EpCombineArgs { y, y_stride: stride, out: result, out_stride: stride, ..EpCombineArgs::ZERO };
        gpu.wait();
        let mut kept: Option<DeviceHandle> = None;
        let graph = gpu.stream.record(|stream| {
            let sent = put_dispatch_expert(&rank.buffer, stream, &args, Split::Whole)?;
            assert!(sent.done.is_captured());
            kept = Some(put_combine_expert(&rank.buffer, stream, &combine, &sent.handle, Split::Whole)?.handle);
            Ok(())
        });
        let graph = graph.expect("a graph");
        rank.meet("recorded", &rank.case.everybody());
        Recorded { graph, _handle: kept.expect("a handle"), args, y, result }
    }

    /// Replays it with other tokens, without the `absent`, and compares what comes out.
    pub(crate) fn replay(&self, rank: &Rank, seed: u64, absent: &[usize]) {
        let (gpu, me, shape) = (&rank.gpu, rank.me as usize, rank.shape());
        let (local, most) = (shape.local_experts() as usize, (shape.ranks * shape.max_tokens) as usize);
        let mut world = world_of(shape, seed);
        world.routing = world.routing.without(absent);
        let outputs = world.outputs(&vec![local * most; shape.ranks as usize]);
        replace(&world, gpu, me, &self.args);
        gpu.write_all(self.y, &outputs[me].values);
        poison(gpu, &shape, &self.args);
        replay(&self.graph, gpu);
        check_expert(&world, gpu, me, &self.args);
        let expected = reference::combine_expert(&shape, &world.routing, &outputs, true, &[]);
        let found = gpu.read_all::<u16>(self.result, expected[me].len());
        compare_rows(&found, &expected[me], &shape, me, seed, &Way { early: true, ..Way::default() });
    }
}

pub(crate) fn expert_graph(rank: &Rank) {
    let recorded = Recorded::new(rank);
    (0..REPLAYS).for_each(|round| recorded.replay(rank, 100 + round, &[]));
    // Without a look at what came between them, and beside calls that are not recorded.
    (0..50).for_each(|_| launch(&recorded.graph, &rank.gpu));
    rank.gpu.wait();
    all_ways(rank, 0..2, &[]);
}

fn poison(gpu: &Gpu, shape: &Shape, out: &EpDispatchArgs) {
    let rows = (shape.local_experts() * shape.ranks * shape.max_tokens) as usize;
    gpu.poison(out.out_x, rows * shape.row_bytes() as usize);
    gpu.poison(out.out_source, 4 * rows);
}

pub(crate) fn rank_graph(rank: &Rank) {
    let (gpu, me, shape, way) = (&rank.gpu, rank.me as usize, rank.shape(), Way { early: true, ..Way::default() });
    let stride = 2 * u64::from(shape.hidden);
    gpu.reset();
    let input = world_of(shape, 1).input(gpu, me, &way);
    let region = rank.buffer.take_region().expect("a region");
    let (counts, offsets) = (gpu.room(4 * shape.local_experts() as usize), gpu.room(8 * (shape.ranks as usize + 1)));
    let out = RankOut { counts, offsets, region };
    let most = out.region.view().most_rows;
    let (y, result) = (gpu.room(most as usize * stride as usize), gpu.room(TOKENS[me] * stride as usize));
    let combine = EpCombineArgs { y, y_stride: stride, out: result, out_stride: stride, ..EpCombineArgs::ZERO };
    gpu.wait();
    let mut kept: Option<DeviceHandle> = None;
    let graph = gpu.stream.record(|stream| {
        let args = EpDispatchArgs { out_counts: counts, out_offsets: offsets, max_rows: most, ..input };
        let of = RankDispatch { region: &out.region, cached: None, count: false };
        let sent = put_dispatch_rank(&rank.buffer, stream, &args, of, Split::Whole)?;
        kept = Some(put_combine_rank(&rank.buffer, stream, &combine, &sent.handle, Split::Whole)?.handle);
        Ok(())
    });
    let graph = graph.expect("a graph");
    rank.meet("recorded", &rank.case.everybody());
    for round in 0..REPLAYS {
        let mut world = world_of(shape, 200 + round);
        let delivered = reference::by_rank(&shape, &world.routing, 1);
        let outputs = world.outputs(&delivered.iter().map(|one| one.rows.len()).collect::<Vec<_>>());
        replace(&world, gpu, me, &input);
        gpu.write_all(y, &outputs[me].values);
        replay(&graph, gpu);
        check_rank(&world, gpu, me, &out, 1, true);
        let (expected, _) = &reference::combine_rank(&shape, &world.routing, &outputs, &[], &[])[me];
        compare_rows(&gpu.read_all::<u16>(result, expected.len()), expected, &shape, me, round, &way);
    }
    (0..50).for_each(|_| launch(&graph, gpu));
    gpu.wait();
    drop((graph, kept, out));
    all_ways(rank, 0..2, &[]);
}
