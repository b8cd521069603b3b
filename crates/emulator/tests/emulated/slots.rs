//! Dispatch and combine in the rank layout for few tokens, on emulated GPUs, against the plain reference.

use crossrail_kernels::ep::{EP_STAGE_TABLE, Payload, Scale, Shape, Tuning};

use crossrail_emulator::job::Job;
use crossrail_emulator::job_rank::{ByRank, rounds_of};
use crossrail_emulator::reference::{Choice, Routing};
use crossrail_emulator::shapes::rank_kernels;
use crossrail_emulator::{Build, GpuMemory as _, Gpus as _, Numbers};

use crate::by_rank::{self, ALL, BOTH};

const SOURCE: &str = "kernels/ep_slots.cu";
const TUNING: Tuning = Tuning { threads: 128, ..Tuning::USUAL };

/// Two pieces to a row, the second one short; two tiles of 32 tokens; blocks of four warps.
const SHAPE: Shape = Shape {
    hidden: 1152,
    topk: 3,
    experts: 12,
    ranks: 3,
    max_tokens: 40,
    payload: Payload::Fp8(Scale::F32),
    prereduce: true,
    expert_layout: false,
    rank_layout: true,
    regions: 2,
    tuning: TUNING,
};

fn job_of(build: &Build, shape: Shape, bulk: bool) -> Option<Job> {
    let (source, defines, threads, shared) = rank_kernels(&shape, bulk);
    assert_eq!(source, SOURCE);
    Job::made(&build.clone().defines(&defines), shape, threads, shared)
}

fn job(shape: Shape) -> Option<Job> {
    job_of(&Build::new(&[SOURCE]), shape, true)
}

fn rounds(shape: Shape, seeds: std::ops::Range<u64>) {
    if let Some(mut job) = job(shape) {
        rounds_of(&mut job, seeds);
    }
}

#[test]
fn slots_are_for_few_tokens() {
    let few = |shape: Shape| shape.slotted();
    assert!(few(SHAPE) && few(Shape { max_tokens: 512, ranks: 8, ..SHAPE }));
    assert!(!few(Shape { max_tokens: 513, ..SHAPE }) && !few(Shape { max_tokens: 512, ranks: 9, ..SHAPE }));
    assert!(!few(Shape { tuning: Tuning { granted: true, ..TUNING }, ..SHAPE }));
    assert!(!few(Shape { rank_layout: false, expert_layout: true, ..SHAPE }));
}

#[test]
fn fp8_rows_arrive_and_come_back_summed() {
    rounds(SHAPE, 0..10);
}

#[test]
fn bf16_rows_arrive() {
    rounds(Shape { payload: Payload::Bf16, hidden: 1032, ..SHAPE }, 10..14);
    rounds(Shape { payload: Payload::Bf16, hidden: 8, topk: 5, ranks: 2, ..SHAPE }, 14..18);
}

#[test]
fn scales_are_exponents() {
    rounds(Shape { payload: Payload::Fp8(Scale::Ue8m0), hidden: 2048, ..SHAPE }, 30..33);
    rounds(Shape { payload: Payload::Fp8(Scale::Ue8m0), hidden: 384, ..SHAPE }, 33..36);
    rounds(Shape { payload: Payload::Fp8(Scale::PowerOfTwo), hidden: 384, ..SHAPE }, 36..38);
}

/// A combine's slots have room for a row of each selection.
#[test]
fn a_buffer_may_have_both_layouts() {
    rounds(Shape { expert_layout: true, prereduce: false, ..SHAPE }, 38..42);
}

#[test]
fn a_rank_alone_and_one_with_an_expert_each() {
    rounds(Shape { ranks: 1, ..SHAPE }, 40..43);
    rounds(Shape { ranks: 5, experts: 5, topk: 5, hidden: 128, max_tokens: 7, ..SHAPE }, 43..47);
}

#[test]
fn more_ranks_than_lanes_and_many_experts() {
    let tuning = Tuning { threads: 64, ..TUNING };
    rounds(Shape { ranks: 34, experts: 68, hidden: 128, max_tokens: 3, topk: 4, tuning, ..SHAPE }, 50..51);
    rounds(Shape { experts: 6 * 1000, ranks: 6, topk: 12, max_tokens: 9, ..SHAPE }, 51..53);
}

#[test]
fn the_longest_rows_and_the_most_experts_of_a_token() {
    rounds(Shape { hidden: 16384, topk: 32, experts: 64, ranks: 2, max_tokens: 3, ..SHAPE }, 90..92);
}

#[test]
fn without_bulk_copies_too() {
    for shape in [SHAPE, Shape { payload: Payload::Bf16, ..SHAPE }] {
        let without = "constexpr u32 LANES = 32;\n#undef EP_BULK\n#define EP_BULK 0";
        let build = Build::new(&[SOURCE]).broken("kernels/ep_common.cuh", "constexpr u32 LANES = 32;", without);
        if let Some(mut job) = job_of(&build, shape, true) {
            rounds_of(&mut job, 60..63);
        }
    }
}

by_rank::tests_of_both!(EP_STAGE_TABLE);

/// A routing is repeated after one of its ranks has gone: that rank's rows are blank, the others' are there.
#[test]
fn a_repeated_routing_goes_on_without_a_rank() {
    let Some(mut job) = job(SHAPE) else { return };
    let mut numbers = Numbers(105);
    let routing = Routing::of(&mut numbers, &SHAPE, &[36, 14, 25], Choice::Even);
    let first = ByRank::new(&mut job, &mut numbers, routing, 0);
    first.dispatch(&mut job, 2, ALL);
    job.gpus.run(0).unwrap();
    first.check_dispatch(&job).unwrap();
    let mut second = first.again(&mut job, &mut numbers, 1);
    second.routing.active[2] = false;
    second.dispatch(&mut job, 2, ALL);
    job.gpus.run(1).unwrap();
    let (heap, bytes) = (SHAPE.heap(), SHAPE.row_bytes() as usize);
    for rank in 0..2 {
        assert_eq!(job.masked(rank), [2]);
        let offsets = second.ranks[rank].out_offsets.read::<i64>(0, 4);
        assert!(offsets[3] > offsets[2] && offsets[2] > offsets[0]);
        let region = (heap.regions + heap.region_stride) as usize;
        let rows = |from: i64, to: i64| {
            job.ranks[rank].heap.read::<u8>(region + from as usize * bytes, (to - from) as usize * bytes)
        };
        assert!(rows(offsets[2], offsets[3]).iter().all(|byte| *byte == 0));
        assert!(rows(0, offsets[2]).chunks(bytes).all(|row| row.iter().any(|byte| *byte != 0)));
    }
}

/// What each of these leaves out must be missed, with some seed.
#[test]
fn broken_kernels_are_caught() {
    let broken = [
        // Tiles are numbered before all have voted.
        (
            "vote(args, start, plan, lost, lane);\n            __syncthreads();",
            "vote(args, start, plan, lost, lane);\n            __syncwarp();",
        ),
        // Rows are published before tiles are numbered.
        (
            "if (threadIdx.x < LANES) number_tiles(plan, lane);\n        __syncthreads();",
            "if (threadIdx.x < LANES) number_tiles(plan, lane);",
        ),
        // Nobody waits for selections.
        ("if (!is_tagged(seen[k], epoch)) {", "if (false) {"),
    ];
    for (from, to) in broken {
        let build = Build::new(&[SOURCE]).broken("kernels/ep_slots.cuh", from, to);
        let Some(mut job) = job_of(&build, SHAPE, true) else { return };
        let caught = (0..12).any(|seed| {
            let mut numbers = Numbers(seed);
            let routing = Routing::of(&mut numbers, &SHAPE, &[40, 33, 40], Choice::Even);
            let operation = ByRank::new(&mut job, &mut numbers, routing, 0);
            operation.dispatch(&mut job, 2, ALL);
            operation.combine(&mut job, 2, BOTH, 0);
            let run = job.gpus.run(seed);
            run.and_then(|()| operation.check_dispatch(&job)).and_then(|()| operation.check_combine(&job)).is_err()
        });
        assert!(caught, "nothing is wrong without {from:?}");
    }
}
