//! The rank layout.

use crossrail_kernels::ep::{
    EP_ANNOUNCE, EP_RECEIVE, EP_SEND, EP_STAGE_ANNOUNCE, EP_STAGE_BACK_ROW, EP_STAGE_TABLE, Payload, Scale, Shape,
    Tuning,
};

use crossrail_emulator::job::Job;
use crossrail_emulator::job_rank::{ByRank, rounds_of};
use crossrail_emulator::reference::{Choice, Routing};
use crossrail_emulator::shapes::rank_kernels;
use crossrail_emulator::{Gpus as _, Numbers};

use crate::device::{Build, DeviceGpus, Memory};
use crate::{BOTH, LARGE, LIMIT_NS, SMALL};

const ALL: u32 = EP_ANNOUNCE | EP_SEND | EP_RECEIVE;
const SLOTS: Shape = Shape { expert_layout: false, rank_layout: true, max_tokens: 60, ..SMALL };
const RANK: Shape = Shape { tuning: Tuning { granted: true, ..Tuning::USUAL }, ..SLOTS };

fn job(shape: Shape) -> Option<Job<DeviceGpus>> {
    let (source, defines, threads, shared) = rank_kernels(&shape, true);
    let mut job = Job::on(Build::new(&[source]).defines(&defines).gpus()?, shape, threads, shared);
    job.limit_ns = LIMIT_NS;
    Some(job)
}

fn rounds(shape: Shape, seeds: std::ops::Range<u64>) {
    if let Some(mut job) = job(shape) {
        rounds_of(&mut job, seeds);
    }
}

#[test]
fn rank_layout_fp8() {
    rounds(RANK, 100..130);
    rounds(SLOTS, 100..130);
}

#[test]
fn rank_layout_bf16() {
    rounds(Shape { payload: Payload::Bf16, hidden: 1032, ..RANK }, 130..150);
    rounds(Shape { payload: Payload::Bf16, hidden: 1032, ..SLOTS }, 130..150);
}

#[test]
fn rank_layout_exponents() {
    rounds(Shape { payload: Payload::Fp8(Scale::Ue8m0), hidden: 1152, ..RANK }, 150..170);
    rounds(Shape { payload: Payload::Fp8(Scale::Ue8m0), hidden: 1152, ..SLOTS }, 150..170);
}

#[test]
fn rank_layout_small_blocks_many_rows() {
    let tuning = Tuning { rank_threads: 128, rank_movers: 2, ..RANK.tuning };
    rounds(Shape { hidden: 128, max_tokens: 2000, tuning, ..RANK }, 170..180);
}

#[test]
fn rank_layout_of_the_size_of_models() {
    let shape = Shape { expert_layout: false, rank_layout: true, experts: 256, max_tokens: 200, ..LARGE };
    for tuning in [RANK.tuning, SLOTS.tuning] {
        rounds(Shape { tuning, ..shape }, 180..184);
        rounds(Shape { payload: Payload::Bf16, tuning, ..shape }, 184..187);
    }
}

/// Ranks run ahead of each other as far as slots let them; regions take turns. The last two results are looked at.
#[test]
fn rank_layout_operations_follow_each_other() {
    [RANK, SLOTS].into_iter().for_each(follow_each_other);
}

fn follow_each_other(shape: Shape) {
    let Some(mut job) = job(shape) else { return };
    for seed in 200..210 {
        let mut numbers = Numbers(seed);
        let operations: Vec<ByRank<Memory>> = (0..12)
            .map(|number| {
                let routing = Routing::random(&mut numbers, &shape);
                ByRank::new(&mut job, &mut numbers, routing, number % 2)
            })
            .collect();
        for (number, operation) in operations.iter().enumerate() {
            let apart: &[u32] = if number % 3 == 0 { &[EP_ANNOUNCE, EP_SEND, EP_RECEIVE] } else { &[ALL] };
            apart.iter().for_each(|phases| operation.dispatch(&mut job, 1 + number as u32 % 4, *phases));
            operation.combine(&mut job, 2, BOTH, number as u32 % 2);
        }
        job.gpus.run(seed).unwrap();
        for (number, operation) in operations.iter().enumerate() {
            let rows = if number >= 10 { operation.check_dispatch(&job) } else { Ok(()) };
            let found = rows.and_then(|()| operation.check_combine(&job));
            found.unwrap_or_else(|what| panic!("seed {seed}, operation {number}: {what}; {}", job.fault_text()));
        }
    }
}

/// A rank that never comes costs the others the limit once; what they sent each other is there.
#[test]
fn rank_layout_a_rank_never_comes() {
    never_comes(RANK, EP_STAGE_ANNOUNCE);
    never_comes(SLOTS, EP_STAGE_TABLE);
}

fn never_comes(shape: Shape, stage: u32) {
    let Some(mut job) = job(shape) else { return };
    job.limit_ns = 50_000_000;
    let mut numbers = Numbers(210);
    let routing = Routing::of(&mut numbers, &RANK, &[36, 4, 25], Choice::Even);
    let operation = ByRank::new(&mut job, &mut numbers, routing.without(&[2]), 0);
    operation.dispatch(&mut job, 2, ALL);
    job.gpus.run(210).unwrap();
    operation.check_dispatch(&job).unwrap();
    operation.combine(&mut job, 2, BOTH, 0);
    job.gpus.run(211).unwrap();
    operation.check_combine(&job).unwrap();
    for rank in 0..2 {
        assert_eq!(job.faults(rank), [(2, stage)], "{}", job.fault_text());
        assert_eq!(job.masked(rank), [2]);
    }
}

/// A rank dies between dispatch and combine.
#[test]
fn rank_layout_a_rank_sends_nothing_back() {
    [RANK, SLOTS].into_iter().for_each(sends_nothing_back);
}

fn sends_nothing_back(shape: Shape) {
    let Some(mut job) = job(shape) else { return };
    job.limit_ns = 50_000_000;
    let mut numbers = Numbers(220);
    let routing = Routing::of(&mut numbers, &RANK, &[60, 60, 60], Choice::Even);
    let mut operation = ByRank::new(&mut job, &mut numbers, routing, 0);
    operation.dispatch(&mut job, 2, ALL);
    job.gpus.run(220).unwrap();
    operation.check_dispatch(&job).unwrap();
    operation.routing.active[2] = false;
    operation.combine(&mut job, 2, BOTH, 0);
    job.gpus.run(221).unwrap();
    for rank in 0..2 {
        assert_eq!(job.faults(rank), [(2, EP_STAGE_BACK_ROW)], "{}", job.fault_text());
    }
}
