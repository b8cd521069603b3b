//! What the tests' jobs are like.

use crossrail_kernels::ep::{Payload, Scale, Shape, Tuning};

/// Four ranks in the expert layout, blocks of four warps; two pieces to a row, the second one short.
pub const BY_EXPERT: Shape = Shape {
    hidden: 1152,
    topk: 4,
    experts: 12,
    ranks: 4,
    max_tokens: 9,
    payload: Payload::Fp8(Scale::F32),
    prereduce: true,
    expert_layout: true,
    rank_layout: false,
    regions: 0,
    tuning: Tuning { threads: 128, rank_threads: 128, rank_movers: 2, ..Tuning::USUAL },
};

/// The same job in the rank layout, with places that are granted.
pub const fn by_rank(shape: Shape, max_tokens: u32) -> Shape {
    let tuning = Tuning { granted: true, ..shape.tuning };
    Shape { expert_layout: false, rank_layout: true, regions: 2, max_tokens, tuning, ..shape }
}

/// The same job in the rank layout, with slots.
pub const fn by_slot(shape: Shape, max_tokens: u32) -> Shape {
    let tuning = Tuning { granted: false, ..shape.tuning };
    Shape { tuning, ..by_rank(shape, max_tokens) }
}

/// The source of a shape's kernels in the rank layout, the options to compile it with, and the threads and bytes of shared
/// memory of a block that dispatches and of one that combines.
pub fn rank_kernels(shape: &Shape, bulk: bool) -> (&'static str, Vec<String>, [u32; 2], [u32; 2]) {
    if shape.slotted() {
        return ("kernels/ep_slots.cu", shape.slot_defines(bulk), shape.expert_threads(), shape.slot_shared());
    }
    ("kernels/ep_rank.cu", shape.rank_defines(bulk), [shape.rank_threads(); 2], shape.rank_shared(bulk))
}
