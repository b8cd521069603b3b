//! Dispatch and combine in the rank layout, on emulated GPUs, against the plain reference.

use crossrail_kernels::ep::{EP_ANNOUNCE, EP_STAGE_ANNOUNCE, EP_STAGE_SENT, Payload, Scale, Shape, Tuning};

use crossrail_emulator::job::Job;
use crossrail_emulator::job_rank::{ByRank, rounds_of};
use crossrail_emulator::reference::{Choice, Routing};
use crossrail_emulator::{Build, GpuMemory as _, Gpus as _, Numbers};

use crate::by_rank::{self, ALL, BOTH};

const SOURCE: &str = "kernels/ep_rank.cu";

/// Blocks of four warps.
const SHAPE: Shape = Shape {
    hidden: 640,
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
const TUNING: Tuning = Tuning { rank_threads: 128, rank_movers: 2, granted: true, ..Tuning::USUAL };

fn job_of(build: &Build, shape: Shape, bulk: bool) -> Option<Job> {
    let build = build.clone().defines(&shape.rank_defines(bulk));
    Job::made(&build, shape, [shape.rank_threads(); 2], shape.rank_shared(bulk))
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
fn fp8_rows_arrive_and_come_back_summed() {
    rounds(SHAPE, 0..10);
}

/// Launches are given memory for times now and then.
#[test]
fn kernels_that_note_times_do_the_same() {
    rounds(Shape { tuning: Tuning { marks: true, ..TUNING }, ..SHAPE }, 100..104);
}

#[test]
fn bf16_rows_arrive() {
    rounds(Shape { payload: Payload::Bf16, hidden: 1032, ..SHAPE }, 10..14);
    rounds(Shape { payload: Payload::Bf16, hidden: 8, topk: 5, ranks: 2, ..SHAPE }, 14..18);
}

#[test]
fn rows_of_many_stages_and_of_few() {
    rounds(Shape { max_tokens: 130, hidden: 128, topk: 2, ..SHAPE }, 20..22);
    rounds(Shape { max_tokens: 300, hidden: 128, ..SHAPE }, 26..29);
    rounds(Shape { payload: Payload::Bf16, hidden: 16384, max_tokens: 12, ..SHAPE }, 22..24);
    rounds(Shape { payload: Payload::Fp8(Scale::PowerOfTwo), hidden: 16384, max_tokens: 12, ..SHAPE }, 24..26);
}

/// As far as the limits go.
#[test]
fn the_longest_rows_and_the_most_experts_of_a_token() {
    let shape = Shape { hidden: 16384, topk: 32, experts: 64, ranks: 2, max_tokens: 5, ..SHAPE };
    rounds(shape, 90..92);
    rounds(Shape { payload: Payload::Bf16, ..shape }, 92..94);
}

#[test]
fn scales_are_exponents() {
    rounds(Shape { payload: Payload::Fp8(Scale::Ue8m0), hidden: 2048, ..SHAPE }, 30..33);
    rounds(Shape { payload: Payload::Fp8(Scale::Ue8m0), hidden: 384, ..SHAPE }, 33..37);
}

#[test]
fn a_rank_alone_and_one_with_an_expert_each() {
    rounds(Shape { ranks: 1, ..SHAPE }, 40..43);
    rounds(Shape { ranks: 5, experts: 5, topk: 5, hidden: 128, max_tokens: 7, ..SHAPE }, 43..47);
}

#[test]
fn more_ranks_than_lanes_and_more_experts_than_fit() {
    rounds(Shape { ranks: 34, experts: 68, hidden: 128, max_tokens: 3, topk: 4, ..SHAPE }, 50..51);
    rounds(Shape { experts: 6 * 1000, ranks: 6, ..SHAPE }, 51..53);
}

#[test]
fn without_bulk_copies_too() {
    for shape in [SHAPE, Shape { payload: Payload::Bf16, ..SHAPE }] {
        if let Some(mut job) = job_of(&Build::new(&[SOURCE]), shape, false) {
            rounds_of(&mut job, 60..63);
        }
    }
}

by_rank::tests_of_both!(EP_STAGE_ANNOUNCE);

/// A rank that dies when it has announced: its rows are there, with nothing in them.
#[test]
fn a_rank_that_announces_and_does_not_send_leaves_blank_rows() {
    let Some(mut job) = job(SHAPE) else { return };
    let mut numbers = Numbers(110);
    let routing = Routing::of(&mut numbers, &SHAPE, &[36, 14, 25], Choice::Even);
    let mut operation = ByRank::new(&mut job, &mut numbers, routing, 0);
    operation.dispatch(&mut job, 2, EP_ANNOUNCE);
    job.gpus.run(0).unwrap();
    operation.routing.active[2] = false;
    operation.dispatch(&mut job, 2, BOTH);
    job.gpus.run(1).unwrap();
    let (heap, topk) = (SHAPE.heap(), SHAPE.topk as usize);
    for rank in 0..2 {
        assert_eq!(job.faults(rank), [(2, EP_STAGE_SENT)]);
        assert_eq!(job.masked(rank), [2]);
        let offsets = operation.ranks[rank].out_offsets.read::<i64>(0, 4);
        let (first, count) = (offsets[2] as usize, (offsets[3] - offsets[2]) as usize);
        assert!(count > 0);
        let at = |part: u64, size: usize| (heap.regions + part) as usize + first * size;
        let memory = &job.ranks[rank].heap;
        let idx = memory.read::<i64>(at(heap.region_idx, 8 * topk), count * topk);
        assert!(idx.iter().all(|idx| *idx == -1));
        let hidden = SHAPE.hidden as usize;
        assert!(memory.read::<u8>(at(0, hidden), count * hidden).iter().all(|byte| *byte == 0));
    }
}

/// What each of these leaves out must be missed, with some seed.
#[test]
fn broken_kernels_are_caught() {
    let (dispatch, combine) = ("kernels/ep_rank_dispatch.cuh", "kernels/ep_rank_combine.cuh");
    let broken = [
        // The sent word no longer comes after the rows.
        (dispatch, "if (lane_of() == 0) bulk_wait_all();", ""),
        // A stage is loaded before its stores have read it.
        (dispatch, "if (lane_of() == 0) wait_read<MOVER_BEHIND>(behind);", ""),
        // Flags come before their rows.
        (combine, "if (lane_of() == 0) bulk_wait_done<BEHIND>();", ""),
        // Flags are not after what the warps that send know of.
        (combine, "fence_acq_rel_sys();\n#pragma", "#pragma"),
        // The first lane tells of what other lanes have not written yet.
        (
            combine,
            "        __syncwarp();\n        if (lane_of() == 0) mbarrier_arrive_shared(shared_address(&shared.reported",
            "        if (lane_of() == 0) mbarrier_arrive_shared(shared_address(&shared.reported",
        ),
        // Flags of rows that were told of are overwritten before they are set.
        (
            combine,
            "if (round > 0) mbarrier_wait_shared(shared_address(&shared.flagged[warp][at]), (round - 1) & 1);",
            "",
        ),
        // Nobody waits for the rows' flags.
        (combine, "combine.flag(rank, token), combine.epoch,", "combine.flag(rank, token), 0,"),
    ];
    let shape = Shape { payload: Payload::Bf16, hidden: 2048, max_tokens: 130, topk: 2, ..SHAPE };
    for (path, from, to) in broken {
        let Some(mut job) = job_of(&Build::new(&[SOURCE]).broken(path, from, to), shape, true) else { return };
        let caught = (0..12).any(|seed| {
            let mut numbers = Numbers(seed);
            let routing = Routing::of(&mut numbers, &shape, &[130, 100, 130], Choice::Even);
            let operation = ByRank::new(&mut job, &mut numbers, routing, 0);
            operation.dispatch(&mut job, 1, ALL);
            operation.combine(&mut job, 1, BOTH, 0);
            let run = job.gpus.run(seed);
            run.and_then(|()| operation.check_dispatch(&job)).and_then(|()| operation.check_combine(&job)).is_err()
        });
        assert!(caught, "nothing is wrong without {from:?}");
    }
}

/// Warps send tokens of other blocks, which must have numbered them. A rank alone has nothing else to wait for.
#[test]
fn rows_that_are_not_numbered_yet_are_caught() {
    let wait = "await_block(address_of(dispatch.scan().numbered), gridDim.x);";
    let shape = Shape { ranks: 1, hidden: 128, max_tokens: 200, ..SHAPE };
    let build = Build::new(&[SOURCE]).broken("kernels/ep_rank_dispatch.cuh", wait, ";");
    let Some(mut job) = job_of(&build, shape, true) else { return };
    let caught = (0..40).any(|seed| {
        let mut numbers = Numbers(seed);
        let routing = Routing::of(&mut numbers, &shape, &[200], Choice::Even);
        let operation = ByRank::new(&mut job, &mut numbers, routing, 0);
        operation.dispatch(&mut job, 4, ALL);
        let run = job.gpus.run(seed);
        run.and_then(|()| operation.check_dispatch(&job)).is_err()
    });
    assert!(caught, "nothing is wrong without {wait:?}");
}
