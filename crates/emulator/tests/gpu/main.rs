//! Dispatch and combine on real GPUs, against the plain reference, to the bit; as the emulator runs them in `tests/emulated`.
//! Skipped with a message without a GPU.
#![allow(unsafe_code)]

mod device;
mod expert;
mod rank;
#[path = "../../../cuda/tests/support/mod.rs"]
#[allow(dead_code)]
mod support;

use crossrail_kernels::ep::{EP_RECEIVE, EP_SEND, Payload, Scale, Shape, Tuning};

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
    tuning: Tuning::USUAL,
};
/// Of the size of models.
const LARGE: Shape = Shape { hidden: 7168, topk: 8, experts: 64, ranks: 4, max_tokens: 16, ..SMALL };
