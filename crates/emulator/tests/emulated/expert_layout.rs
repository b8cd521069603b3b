//! Dispatch and combine in the expert layout, on emulated GPUs, against the plain reference.

use crossrail_kernels::ep::{
    EP_DEPTH, EP_RECEIVE, EP_SEND, EP_STAGE_BACK_ROW, EP_STAGE_TABLE, EP_WORD_TABLE, Payload, Scale, Shape, Tuning,
};

use crossrail_emulator::coding::Coding;
use crossrail_emulator::job::{ByExpert, Job, Weights};
use crossrail_emulator::reference::{Choice, Outputs, Routing, combine_expert, narrow, widen};
use crossrail_emulator::shapes::BY_EXPERT;
use crossrail_emulator::{Build, GpuMemory as _, Gpus as _, Numbers};

const SOURCES: [&str; 1] = ["kernels/ep_expert.cu"];
const CODED: [&str; 2] = ["kernels/ep_expert.cu", "kernels/ep_coded.cu"];
const BOTH: u32 = EP_SEND | EP_RECEIVE;

const TUNING: Tuning = Tuning { threads: 128, ..Tuning::USUAL };

/// Two pieces to a row, the second one short; blocks of four warps.
const SHAPE: Shape = Shape { topk: 3, ranks: 3, max_tokens: 6, tuning: TUNING, ..BY_EXPERT };

fn job(shape: Shape) -> Option<Job> {
    Job::new(&SOURCES, shape, shape.expert_shared())
}

fn weights(numbers: &mut Numbers) -> Weights {
    [Weights::None, Weights::Dispatch, Weights::Combine][numbers.below(3) as usize]
}

/// A dispatch and its combine, several times over, each with a routing of its own.
fn rounds(shape: Shape, seeds: std::ops::Range<u64>) {
    let Some(mut job) = job(shape) else { return };
    for seed in seeds {
        let mut numbers = Numbers(seed);
        let routing = Routing::random(&mut numbers, &shape);
        let weights = weights(&mut numbers);
        let operation = ByExpert::new(&mut job, &mut numbers, routing, weights);
        let blocks = 1 + numbers.below(3) as u32;
        operation.dispatch(&mut job, blocks, BOTH);
        operation.combine(&mut job, blocks, BOTH);
        job.gpus.run(seed).unwrap();
        operation
            .check_dispatch(&job)
            .and_then(|()| operation.check_combine(&job))
            .unwrap_or_else(|what| panic!("seed {seed}: {what}"));
    }
}

#[test]
fn fp8_rows_arrive_and_come_back_summed() {
    rounds(SHAPE, 0..10);
}

#[test]
fn bf16_rows_of_any_length_arrive() {
    rounds(Shape { payload: Payload::Bf16, hidden: 1032, ..SHAPE }, 10..16);
    rounds(Shape { payload: Payload::Bf16, hidden: 8, topk: 5, ranks: 2, ..SHAPE }, 16..20);
}

#[test]
fn without_prereduction_each_selection_comes_back() {
    rounds(Shape { prereduce: false, topk: 6, ..SHAPE }, 20..26);
}

/// Whole, and with the halves apart, in which a rank's own rows take the way through its heap.
fn coded(shape: Shape, coding: Coding, seeds: std::ops::Range<u64>) {
    let Some(mut job) = Job::new(&CODED, shape, shape.expert_shared()) else { return };
    for seed in seeds {
        let mut numbers = Numbers(seed);
        let routing = Routing::random(&mut numbers, &shape);
        let weights = weights(&mut numbers);
        let mut operation = ByExpert::new(&mut job, &mut numbers, routing, weights);
        operation.coding = coding;
        let blocks = 1 + numbers.below(3) as u32;
        operation.dispatch(&mut job, blocks, BOTH);
        for phases in if seed % 2 == 0 { &[BOTH][..] } else { &[EP_SEND, EP_RECEIVE] } {
            operation.combine(&mut job, blocks, *phases);
        }
        job.gpus.run(seed).unwrap();
        operation.check_combine(&job).unwrap_or_else(|what| panic!("seed {seed}, {coding:?}: {what}"));
    }
}

#[test]
fn rows_come_back_in_logfmt10() {
    coded(SHAPE, Coding::LogFmt10, 400..408);
    coded(Shape { prereduce: false, topk: 6, ..SHAPE }, Coding::LogFmt10, 408..411);
    let tuning = Tuning { piece: 2048, ..TUNING };
    coded(Shape { hidden: 2176, payload: Payload::Bf16, tuning, ..SHAPE }, Coding::LogFmt10, 411..414);
}

#[test]
fn rows_come_back_in_fp8() {
    coded(SHAPE, Coding::Fp8, 420..428);
    coded(Shape { prereduce: false, topk: 6, ..SHAPE }, Coding::Fp8, 428..431);
    let tuning = Tuning { piece: 2048, ..TUNING };
    coded(Shape { hidden: 2176, payload: Payload::Bf16, tuning, ..SHAPE }, Coding::Fp8, 431..434);
}

/// One buffer's combines may differ: slots and flags are the same.
#[test]
fn codings_may_change_from_one_combine_to_the_next() {
    let Some(mut job) = Job::new(&CODED, SHAPE, SHAPE.expert_shared()) else { return };
    let mut numbers = Numbers(440);
    let codings = [Coding::Fp8, Coding::Bf16, Coding::LogFmt10, Coding::LogFmt10, Coding::Bf16, Coding::Fp8];
    let operations: Vec<ByExpert> = codings
        .into_iter()
        .map(|coding| {
            let routing = Routing::random(&mut numbers, &SHAPE);
            let weights = weights(&mut numbers);
            ByExpert { coding, ..ByExpert::new(&mut job, &mut numbers, routing, weights) }
        })
        .collect();
    for operation in &operations {
        operation.dispatch(&mut job, 2, BOTH);
        operation.combine(&mut job, 2, BOTH);
    }
    job.gpus.run(440).unwrap();
    operations.iter().for_each(|operation| operation.check_combine(&job).unwrap());
}

#[test]
fn scales_are_powers_of_two_or_their_exponents() {
    rounds(Shape { payload: Payload::Fp8(Scale::PowerOfTwo), hidden: 256, ..SHAPE }, 30..33);
    rounds(Shape { payload: Payload::Fp8(Scale::Ue8m0), ..SHAPE }, 33..37);
}

#[test]
fn a_rank_alone_and_one_with_an_expert_each() {
    rounds(Shape { ranks: 1, ..SHAPE }, 40..43);
    rounds(Shape { ranks: 5, experts: 5, topk: 5, hidden: 128, max_tokens: 3, ..SHAPE }, 43..47);
}

#[test]
fn larger_pieces_and_warps_of_one_task_each() {
    let tuning = Tuning { piece: 2048, threads: 160, senders: 3, receive_from: 3, ..TUNING };
    rounds(Shape { hidden: 3200, tuning, ..SHAPE }, 50..54);
}

/// As far as the limits go: all of a token's experts on one rank, too.
#[test]
fn the_longest_rows_and_the_most_experts_of_a_token() {
    let fp8 = Shape { hidden: 16384, topk: 32, experts: 64, ranks: 2, max_tokens: 1, ..SHAPE };
    let bf16 = Shape { payload: Payload::Bf16, prereduce: false, ..fp8 };
    for (shape, choice) in [(fp8, Choice::OneRank), (bf16, Choice::Even)] {
        let Some(mut job) = job(shape) else { return };
        let mut numbers = Numbers(90);
        let routing = Routing::of(&mut numbers, &shape, &[1, 1], choice);
        let operation = ByExpert::new(&mut job, &mut numbers, routing, Weights::Dispatch);
        operation.dispatch(&mut job, 2, BOTH);
        operation.combine(&mut job, 2, BOTH);
        job.gpus.run(90).unwrap();
        operation.check_dispatch(&job).and_then(|()| operation.check_combine(&job)).unwrap();
    }
}

#[test]
fn more_ranks_than_lanes() {
    let tuning = Tuning { threads: 64, ..SHAPE.tuning };
    rounds(Shape { ranks: 34, experts: 68, hidden: 128, max_tokens: 2, topk: 4, tuning, ..SHAPE }, 60..61);
}

#[test]
fn without_bulk_copies_too() {
    let shape = SHAPE;
    let without = "constexpr u32 LANES = 32;\n#undef EP_BULK\n#define EP_BULK 0";
    let build = Build::new(&SOURCES);
    let build = build.broken("kernels/ep_common.cuh", "constexpr u32 LANES = 32;", without);
    let Some(mut job) = Job::of(&build, shape, shape.expert_shared()) else { return };
    let mut numbers = Numbers(5);
    let routing = Routing::random(&mut numbers, &shape);
    let operation = ByExpert::new(&mut job, &mut numbers, routing, Weights::Combine);
    operation.dispatch(&mut job, 2, BOTH);
    operation.combine(&mut job, 2, BOTH);
    job.gpus.run(5).unwrap();
    operation.check_dispatch(&job).unwrap();
    operation.check_combine(&job).unwrap();
}

#[test]
fn counts_of_two_bytes_do_too() {
    let across = "constexpr bool ACROSS = EP_PLAN_COUNT == 4;\nusing Count = Number<EP_PLAN_COUNT>::Type;";
    let short = "constexpr bool ACROSS = false;\nusing Count = Number<2>::Type;";
    let build = Build::new(&SOURCES).broken("kernels/ep_plan.cuh", across, short);
    let Some(mut job) = Job::of(&build, SHAPE, SHAPE.expert_shared()) else { return };
    let mut numbers = Numbers(7);
    let routing = Routing::of(&mut numbers, &SHAPE, &[6, 5, 6], Choice::Even);
    let operation = ByExpert::new(&mut job, &mut numbers, routing, Weights::Dispatch);
    operation.dispatch(&mut job, 2, BOTH);
    operation.combine(&mut job, 2, BOTH);
    job.gpus.run(7).unwrap();
    operation.check_dispatch(&job).unwrap();
    operation.check_combine(&job).unwrap();
}

/// What summing on the experts' ranks costs: one rounding more for each rank (docs/design/ep-kernels.md).
#[test]
fn prereduction_adds_a_rounding_of_each_ranks_part() {
    let shape = Shape { topk: 6, max_tokens: 4, ..SHAPE };
    let hidden = shape.hidden as usize;
    let most = (shape.experts * shape.max_tokens) as usize;
    for seed in 120..130 {
        let mut numbers = Numbers(seed);
        let routing = Routing::random(&mut numbers, &shape);
        let mut bf16 = || narrow((numbers.below(2000) as f32 - 1000.0) / 300.0);
        let outputs: Vec<Outputs> =
            (0..3).map(|_| Outputs { hidden, values: (0..most * hidden).map(|_| bf16()).collect() }).collect();
        let sums = |prereduce| combine_expert(&Shape { prereduce, ..shape }, &routing, &outputs, true, &[]);
        let sizes: Vec<Outputs> = outputs
            .iter()
            .map(|one| Outputs { hidden, values: one.values.iter().map(|bits| bits & 0x7fff).collect() })
            .collect();
        let mut positive = routing.clone();
        positive.weights.iter_mut().flatten().for_each(|weight| *weight = weight.abs());
        let sizes = combine_expert(&Shape { prereduce: false, ..shape }, &positive, &sizes, true, &[]);
        let (with, without) = (sums(true), sums(false));
        for (rank, sizes) in sizes.iter().enumerate() {
            for (at, size) in sizes.iter().enumerate() {
                let (with, without) = (widen(with[rank][at]), widen(without[rank][at]));
                // The roundings of both results, of the parts, and of the size itself.
                let most = (with.abs() + without.abs() + widen(*size) * 1.01) / 256.0;
                assert!((with - without).abs() <= most, "seed {seed}, rank {rank}, element {at}: {with} and {without}");
            }
        }
    }
}

/// What the emulator finds wrong with broken kernels: a dispatch and a combine. `None`: they cannot be compiled here.
fn noticed(build: &Build, seed: u64, blocks: u32) -> Option<String> {
    let mut job = Job::of(build, SHAPE, SHAPE.expert_shared())?;
    let mut numbers = Numbers(seed);
    let routing = Routing::of(&mut numbers, &SHAPE, &[6, 6, 6], Choice::Even);
    let operation = ByExpert::new(&mut job, &mut numbers, routing, Weights::Dispatch);
    operation.dispatch(&mut job, blocks, BOTH);
    operation.combine(&mut job, blocks, BOTH);
    Some(job.gpus.run(seed).expect_err("nothing is wrong"))
}

/// One fence stands for many pieces; without it, ranks would look at what need not be there yet.
#[test]
fn flags_without_their_fence_are_noticed() {
    let dispatch =
        ("kernels/ep_start.cuh", "#pragma unroll 2\n        for (u32 i = lane; i < WARPS", "ep_dispatch.cuh");
    let combine = ("kernels/ep_flags.cuh", "        for (u32 i = 0; i < more; ++i) {", "ep_combine.cuh");
    for (file, behind, reader) in [dispatch, combine] {
        let build = Build::new(&SOURCES);
        let build = build.broken(file, &format!("        fence_acq_rel_sys();\n{behind}"), behind);
        let Some(wrong) = noticed(&build, 6, 2) else { return };
        assert!(wrong.contains(reader), "{wrong}");
    }
}

/// A flag that is given before the piece is there, as when a warp counts its stores wrongly.
#[test]
fn flags_of_pieces_under_way_are_noticed() {
    let build = Build::new(&SOURCES);
    let wait = "bulk_wait_done<BACK_STAGES - 1>();";
    let build = build.broken("kernels/ep_flags.cuh", wait, "bulk_wait_done<BACK_STAGES>();");
    let Some(wrong) = noticed(&build, 7, 1) else { return };
    assert!(wrong.contains("ep_combine.cuh") || wrong.contains("ep_flags.cuh"), "{wrong}");
}

#[test]
fn any_number_of_pieces_of_a_warp_is_under_way() {
    for back_stages in 1..=4 {
        let tuning = Tuning { threads: 64, back_stages, ..TUNING };
        let shape = Shape { max_tokens: 12, ranks: 2, experts: 4, topk: 2, tuning, ..SHAPE };
        rounds(shape, u64::from(200 + 2 * back_stages)..u64::from(202 + 2 * back_stages));
    }
}

/// All operations are queued at once: ranks run ahead of each other as far as slots let them.
#[test]
fn operations_follow_each_other_without_waiting_for_the_host() {
    let Some(mut job) = job(SHAPE) else { return };
    for seed in 70..73 {
        let mut numbers = Numbers(seed);
        let operations: Vec<ByExpert> = (0..7)
            .map(|_| {
                let routing = Routing::random(&mut numbers, &SHAPE);
                let weights = weights(&mut numbers);
                ByExpert::new(&mut job, &mut numbers, routing, weights)
            })
            .collect();
        for operation in &operations {
            operation.dispatch(&mut job, 2, BOTH);
            operation.combine(&mut job, 2, BOTH);
        }
        job.gpus.run(seed).unwrap();
        for operation in &operations {
            operation.check_dispatch(&job).unwrap();
            operation.check_combine(&job).unwrap();
        }
    }
}

/// Two operations are sent before the first is received.
#[test]
fn two_may_be_under_way() {
    let Some(mut job) = job(SHAPE) else { return };
    for seed in 80..84 {
        let mut numbers = Numbers(seed);
        let [first, second] = [0, 1].map(|_| {
            let routing = Routing::random(&mut numbers, &SHAPE);
            let weights = weights(&mut numbers);
            ByExpert::new(&mut job, &mut numbers, routing, weights)
        });
        for phases in [EP_SEND, EP_RECEIVE] {
            first.dispatch(&mut job, 2, phases);
            second.dispatch(&mut job, 2, phases);
        }
        for phases in [EP_SEND, EP_RECEIVE] {
            first.combine(&mut job, 3, phases);
            second.combine(&mut job, 3, phases);
        }
        job.gpus.run(seed).unwrap();
        for operation in [first, second] {
            operation.check_dispatch(&job).unwrap();
            operation.check_combine(&job).unwrap();
        }
    }
}

#[test]
fn masked_ranks_are_left_out_and_come_back() {
    let Some(mut job) = job(SHAPE) else { return };
    let mut numbers = Numbers(90);
    for round in 0..4 {
        let routing = Routing::of(&mut numbers, &SHAPE, &[6, 4, 5], Choice::Even).without(&[1]);
        [0, 2].into_iter().for_each(|rank| job.mask(rank, 1));
        let weights = weights(&mut numbers);
        let operation = ByExpert::new(&mut job, &mut numbers, routing, weights);
        operation.dispatch(&mut job, 2, BOTH);
        operation.combine(&mut job, 2, BOTH);
        job.gpus.run(round).unwrap();
        operation.check_dispatch(&job).unwrap();
        operation.check_combine(&job).unwrap();
        assert!(job.faults(0).is_empty() && job.faults(2).is_empty());
    }
}

/// A rank that dies costs the others the limit once; what the others sent each other is there.
#[test]
fn a_rank_that_never_comes_is_masked_and_told_of() {
    let Some(mut job) = job(SHAPE) else { return };
    let mut numbers = Numbers(100);
    let routing = Routing::of(&mut numbers, &SHAPE, &[6, 4, 5], Choice::Even);
    let operation = ByExpert::new(&mut job, &mut numbers, routing.clone().without(&[2]), Weights::Combine);
    // The others do not know, and send to it; what goes there is left out of what is expected.
    operation.dispatch(&mut job, 2, BOTH);
    job.gpus.run(0).unwrap();
    operation.check_dispatch(&job).unwrap();
    for rank in 0..2 {
        assert_eq!(job.faults(rank), [(2, EP_STAGE_TABLE)]);
        assert_eq!(job.masked(rank), [2]);
        // Who was waited for, and how long.
        let waited = job.ranks[rank].waits.read::<i64>(0, 3);
        assert!(waited[2] >= job.limit_ns as i64 && waited[..2].iter().all(|ns| *ns < waited[2]), "{waited:?}");
    }
    operation.combine(&mut job, 2, BOTH);
    job.gpus.run(1).unwrap();
    operation.check_combine(&job).unwrap();
    assert_eq!((job.faults(0).len(), job.faults(1).len()), (1, 1));
}

/// One that dies before it has said all that its tokens select is there with nothing.
#[test]
fn a_rank_that_says_half_is_masked_too() {
    let Some(mut job) = job(SHAPE) else { return };
    let mut numbers = Numbers(105);
    let routing = Routing::of(&mut numbers, &SHAPE, &[6, 4, 5], Choice::Even);
    let operation = ByExpert::new(&mut job, &mut numbers, routing.clone().without(&[2]), Weights::Combine);
    let (heap, epoch) = (SHAPE.heap(), 1u64);
    let line = heap.line(2).at + 8 * (u64::from(EP_WORD_TABLE) + epoch % u64::from(EP_DEPTH));
    let table = heap.inbox(2) + heap.tables + epoch % u64::from(EP_DEPTH) * heap.table_stride;
    for rank in &job.ranks[..2] {
        rank.heap.write(line as usize, &[epoch << 32 | 5]);
        // Of 15 selections two: each rank's first expert, twice.
        rank.heap.write(table as usize, &[epoch << 32 | 1, epoch << 32, epoch << 32, epoch << 32 | 1]);
    }
    operation.dispatch(&mut job, 2, BOTH);
    job.gpus.run(0).unwrap();
    operation.check_dispatch(&job).unwrap();
    for rank in 0..2 {
        assert_eq!(job.faults(rank), [(2, EP_STAGE_TABLE)]);
        assert_eq!(job.masked(rank), [2]);
    }
}

/// A rank that dies between sending and receiving: others wait for what it would have sent back.
#[test]
fn a_rank_that_dies_before_the_combine_is_left_out_of_the_sums() {
    let Some(mut job) = job(SHAPE) else { return };
    let mut numbers = Numbers(110);
    let routing = Routing::of(&mut numbers, &SHAPE, &[6, 6, 6], Choice::Even);
    let mut operation = ByExpert::new(&mut job, &mut numbers, routing, Weights::Dispatch);
    operation.dispatch(&mut job, 2, BOTH);
    job.gpus.run(0).unwrap();
    operation.check_dispatch(&job).unwrap();
    operation.routing.active[2] = false;
    operation.combine(&mut job, 2, BOTH);
    job.gpus.run(1).unwrap();
    for rank in 0..2 {
        assert_eq!(job.faults(rank), [(2, EP_STAGE_BACK_ROW)]);
        assert_eq!(job.masked(rank), [2]);
    }
    // Ranks are looked at in their order; the sums of those that are alive are right.
    let wrong = operation.check_combine(&job).unwrap_err();
    assert!(wrong.starts_with("combine at rank 2"), "{wrong}");
}
