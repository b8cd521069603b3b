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

/// The same job in the rank layout.
pub const fn by_rank(shape: Shape, max_tokens: u32) -> Shape {
    Shape { expert_layout: false, rank_layout: true, regions: 2, max_tokens, ..shape }
}
