//! The expert layout.

use crossrail_kernels::ep::{EP_RECEIVE, EP_SEND, EP_STAGE_BACK_ROW, EP_STAGE_TABLE, Payload, Scale, Shape, Tuning};

use crossrail_emulator::coding::Coding;
use crossrail_emulator::job::{ByExpert, Job, Weights};
use crossrail_emulator::reference::{Choice, Routing};
use crossrail_emulator::{Gpus as _, Numbers};

use crate::device::{Build, DeviceGpus, Memory};
use crate::{BOTH, LARGE, LIMIT_NS, SMALL};

fn job(shape: Shape) -> Option<Job<DeviceGpus>> {
    let build = Build::new(&["kernels/ep_expert.cu", "kernels/ep_coded.cu"]).defines(&shape.defines(true));
    let mut job = Job::on(build.gpus()?, shape, shape.expert_threads(), shape.expert_shared());
    job.limit_ns = LIMIT_NS;
    Some(job)
}

fn operation(job: &mut Job<DeviceGpus>, numbers: &mut Numbers, routing: Routing) -> ByExpert<Memory> {
    let weights = [Weights::None, Weights::Dispatch, Weights::Combine][numbers.below(3) as usize];
    ByExpert::new(job, numbers, routing, weights)
}

fn check(job: &Job<DeviceGpus>, operation: &ByExpert<Memory>, what: &str) {
    let found = operation.check_dispatch(job).and_then(|()| operation.check_combine(job));
    found.unwrap_or_else(|wrong| panic!("{what}: {wrong}; {}", job.fault_text()));
}

fn rounds(shape: Shape, seeds: std::ops::Range<u64>) {
    let Some(mut job) = job(shape) else { return };
    for seed in seeds {
        let mut numbers = Numbers(seed);
        let routing = Routing::random(&mut numbers, &shape);
        let operation = operation(&mut job, &mut numbers, routing);
        let blocks = 1 + numbers.below(3) as u32;
        operation.dispatch(&mut job, blocks, BOTH);
        operation.combine(&mut job, blocks, BOTH);
        let run = job.gpus.run(seed);
        let found = run.and(operation.check_dispatch(&job)).and_then(|()| operation.check_combine(&job));
        found.unwrap_or_else(|what| panic!("seed {seed}: {what}; {}", job.fault_text()));
    }
}

#[test]
fn expert_layout_rows_come_back_in_fp8() {
    for shape in [SMALL, Shape { prereduce: false, ..SMALL }, LARGE] {
        let Some(mut job) = job(shape) else { return };
        for seed in 90..96 {
            let mut numbers = Numbers(seed);
            let routing = Routing::random(&mut numbers, &shape);
            let operation = ByExpert { coding: Coding::Fp8, ..operation(&mut job, &mut numbers, routing) };
            operation.dispatch(&mut job, 3, BOTH);
            for phases in if seed % 2 == 0 { &[BOTH][..] } else { &[EP_SEND, EP_RECEIVE] } {
                operation.combine(&mut job, 3, *phases);
            }
            job.gpus.run(seed).unwrap();
            check(&job, &operation, &format!("seed {seed}"));
        }
    }
}

#[test]
fn expert_layout_fp8() {
    rounds(SMALL, 0..20);
}

#[test]
fn expert_layout_bf16() {
    rounds(Shape { payload: Payload::Bf16, hidden: 1032, ..SMALL }, 20..40);
}

#[test]
fn expert_layout_exponents_without_prereduction() {
    rounds(Shape { payload: Payload::Fp8(Scale::Ue8m0), hidden: 1024, prereduce: false, ..SMALL }, 40..60);
}

#[test]
fn expert_layout_of_the_size_of_models() {
    rounds(LARGE, 60..66);
}

#[test]
fn expert_layout_larger_pieces_and_warps_of_one_task_each() {
    let tuning = Tuning { piece: 2048, threads: 256, senders: 5, receive_from: 5, ..Tuning::default() };
    rounds(Shape { hidden: 3200, max_tokens: 40, tuning, ..SMALL }, 70..80);
    let tuning = Tuning { threads: 1024, ..Tuning::default() };
    rounds(Shape { ranks: 1, tuning, ..SMALL }, 80..84);
}

/// Ranks run ahead of each other as far as slots let them; phases apart now and then, two under way.
#[test]
fn expert_layout_operations_follow_each_other() {
    let Some(mut job) = job(SMALL) else { return };
    for seed in 300..310 {
        let mut numbers = Numbers(seed);
        let operations: Vec<ByExpert<Memory>> = (0..12)
            .map(|_| {
                let routing = Routing::random(&mut numbers, &SMALL);
                operation(&mut job, &mut numbers, routing)
            })
            .collect();
        for (number, pair) in operations.chunks(2).enumerate() {
            let apart: &[u32] = if number % 2 == 0 { &[EP_SEND, EP_RECEIVE] } else { &[BOTH] };
            for phases in apart {
                pair.iter().for_each(|operation| operation.dispatch(&mut job, 1 + number as u32 % 4, *phases));
            }
            for phases in apart {
                pair.iter().for_each(|operation| operation.combine(&mut job, 2, *phases));
            }
        }
        job.gpus.run(seed).unwrap();
        for (number, operation) in operations.iter().enumerate() {
            check(&job, operation, &format!("seed {seed}, operation {number}"));
        }
    }
}

/// One rank has tokens, of which there is one: most blocks and warps have nothing to do.
#[test]
fn expert_layout_hardly_any_tokens() {
    let Some(mut job) = job(LARGE) else { return };
    for seed in 320..326 {
        let mut numbers = Numbers(seed);
        let mut tokens = [0; 4];
        tokens[seed as usize % 4] = 1;
        let routing = Routing::of(&mut numbers, &LARGE, &tokens, Choice::Even);
        let operation = operation(&mut job, &mut numbers, routing);
        operation.dispatch(&mut job, 24, BOTH);
        operation.combine(&mut job, 24, BOTH);
        job.gpus.run(seed).unwrap();
        check(&job, &operation, &format!("seed {seed}"));
    }
}

#[test]
fn expert_layout_masked_ranks_are_left_out() {
    let Some(mut job) = job(SMALL) else { return };
    let mut numbers = Numbers(330);
    for seed in 330..334 {
        let routing = Routing::of(&mut numbers, &SMALL, &[6, 4, 12], Choice::Even).without(&[1]);
        [0, 2].into_iter().for_each(|rank| job.mask(rank, 1));
        let operation = operation(&mut job, &mut numbers, routing);
        operation.dispatch(&mut job, 2, BOTH);
        operation.combine(&mut job, 2, BOTH);
        job.gpus.run(seed).unwrap();
        check(&job, &operation, &format!("seed {seed}"));
        assert!(job.faults(0).is_empty() && job.faults(2).is_empty(), "{}", job.fault_text());
    }
}

/// A rank that never comes costs the others the limit once; what they sent each other is there.
#[test]
fn expert_layout_a_rank_never_comes() {
    let Some(mut job) = job(SMALL) else { return };
    job.limit_ns = 50_000_000;
    let mut numbers = Numbers(340);
    let routing = Routing::of(&mut numbers, &SMALL, &[6, 4, 5], Choice::Even);
    let operation = ByExpert::new(&mut job, &mut numbers, routing.without(&[2]), Weights::Combine);
    operation.dispatch(&mut job, 2, BOTH);
    job.gpus.run(340).unwrap();
    operation.combine(&mut job, 2, BOTH);
    job.gpus.run(341).unwrap();
    check(&job, &operation, "without rank 2");
    for rank in 0..2 {
        assert_eq!(job.faults(rank), [(2, EP_STAGE_TABLE)]);
        assert_eq!(job.masked(rank), [2]);
    }
}

/// A rank that dies between sending and receiving: others wait for what it would have sent back.
#[test]
fn expert_layout_a_rank_dies_before_the_combine() {
    let Some(mut job) = job(SMALL) else { return };
    job.limit_ns = 50_000_000;
    let mut numbers = Numbers(350);
    let routing = Routing::of(&mut numbers, &SMALL, &[6, 6, 6], Choice::Even);
    let mut operation = ByExpert::new(&mut job, &mut numbers, routing, Weights::Dispatch);
    operation.dispatch(&mut job, 2, BOTH);
    job.gpus.run(350).unwrap();
    operation.check_dispatch(&job).unwrap_or_else(|wrong| panic!("{wrong}; {}", job.fault_text()));
    operation.routing.active[2] = false;
    operation.combine(&mut job, 2, BOTH);
    job.gpus.run(351).unwrap();
    for rank in 0..2 {
        assert_eq!(job.faults(rank), [(2, EP_STAGE_BACK_ROW)]);
        assert_eq!(job.masked(rank), [2]);
    }
}
