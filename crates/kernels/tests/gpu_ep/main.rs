//! Dispatch and combine on real GPUs, against the plain reference, to the bit; what the emulator runs in `ep_expert` and
//! `ep_rank`. Skipped, visibly, without a GPU.
#![allow(unsafe_code)]

mod emulate;
mod rank;
#[path = "../../../cuda/tests/support/mod.rs"]
#[allow(dead_code)]
mod support;

use crossrail_kernels::ep::{EP_RECEIVE, EP_SEND, Payload, Scale, Shape, Tuning};

use crate::emulate::job::{ByExpert, Job, Weights};
use crate::emulate::reference::Routing;
use crate::emulate::{Build, Numbers};

const BOTH: u32 = EP_SEND | EP_RECEIVE;
/// The longest wait in a kernel.
const LIMIT_NS: u64 = 1_000_000_000;

const SMALL: Shape = Shape {
    hidden: 640,
    topk: 3,
    experts: 12,
    ranks: 3,
    max_tokens: 12,
    payload: Payload::Fp8(Scale::F32),
    prereduce: true,
    expert_layout: true,
    rank_layout: false,
    regions: 2,
    tuning: Tuning { piece: 0, threads: 0, senders: 0, receive_from: 0, rank_threads: 0, rank_movers: 0 },
};
/// Of the size of models.
const LARGE: Shape = Shape { hidden: 7168, topk: 8, experts: 64, ranks: 4, max_tokens: 16, ..SMALL };

fn rounds(shape: Shape, seeds: std::ops::Range<u64>) {
    let build = Build::new(&["kernels/ep_expert.cu"]).defines(&shape.defines(true));
    let Some(mut job) = Job::made(&build, shape, shape.tuning().threads, shape.expert_shared()) else { return };
    job.limit_ns = LIMIT_NS;
    for seed in seeds {
        let mut numbers = Numbers(seed);
        let routing = Routing::random(&mut numbers, &shape);
        let weights = [Weights::None, Weights::Dispatch, Weights::Combine][numbers.below(3) as usize];
        let operation = ByExpert::new(&mut job, &mut numbers, routing, weights);
        let blocks = 1 + numbers.below(3) as u32;
        operation.dispatch(&mut job, blocks, BOTH);
        operation.combine(&mut job, blocks, BOTH);
        let run = job.emulator.run(seed);
        let found = run.and(operation.check_dispatch(&job)).and_then(|()| operation.check_combine(&job));
        found.unwrap_or_else(|what| panic!("seed {seed}: {what}; {}", job.told()));
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
