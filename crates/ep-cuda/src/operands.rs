//! What calls take.
//!
//! An address is of memory that the buffer's GPU reaches, a stride counts bytes. Rows begin at multiples of 16 bytes.

use crate::handles::DeviceHandle;
use crate::regions::RegionLease;

/// Whether an operation is put in whole. On the GPU, operations of one buffer, halves too, run one after the other: whoever
/// puts them into several streams has each wait for what was put in before ([`crate::Done::wait`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Split {
    /// All of it.
    #[default]
    Whole,
    /// Only what it sends: [`crate::Pending::finish`] puts in the rest, and other work comes between.
    Send,
}

/// Scales of rows that are fp8 already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InScales {
    /// f32, or u8 where the buffer's scales are `Ue8m0`.
    pub address: u64,
    /// From one token's to the next's.
    pub row: u64,
    /// From one block's to the next's; of u8, from four blocks', which lie together, to the next four's.
    pub block: u64,
}

/// What a rank dispatches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tokens {
    /// How many.
    pub tokens: u32,
    /// `[tokens, hidden]`: bf16, or e4m3 where there are `scales`.
    pub x: u64,
    /// From one row to the next, a multiple of 16.
    pub x_stride: u64,
    /// Of e4m3 rows, in a buffer whose payload is fp8.
    pub scales: Option<InScales>,
    /// `[tokens, topk]`, contiguous: experts' numbers, -1 for none. No expert twice in one token.
    pub topk_idx: u64,
    /// Bytes of a number: 4 or 8.
    pub idx_bytes: u32,
    /// `f32[tokens, topk]`, contiguous; 0 for none.
    pub topk_weights: u64,
}

/// Where what comes goes, in the expert layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertOut {
    /// `[local experts, ranks * max_tokens, hidden]`, bf16 or e4m3, contiguous.
    pub x: u64,
    /// Scales of e4m3 rows; 0 in bf16.
    pub scales: u64,
    /// From one expert's scales to the next's.
    pub scale_expert: u64,
    /// From one row's to the next's.
    pub scale_row: u64,
    /// From one block's to the next's (f32), or from those of four blocks to the next four (`Ue8m0`, packed).
    pub scale_block: u64,
    /// `i32[local experts]`: rows of each.
    pub counts: u64,
    /// `i64[local experts, ranks]`: where a source's rows begin << 32 | how many there are.
    pub ranges: u64,
    /// `i32[local experts, ranks * max_tokens]`: each row's token at its source; 0: not wanted.
    pub source: u64,
}

/// A dispatch in the expert layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertDispatch {
    /// What is sent.
    pub input: Tokens,
    /// Where what comes goes.
    pub out: ExpertOut,
    /// `i32[local experts]`, to which the rows that came are added; 0: not wanted.
    pub stats: u64,
    /// `i64[ranks]`, to which the longest wait for each is added, in nanoseconds; 0: not wanted.
    pub waits: u64,
}

/// A combine in the expert layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertCombine {
    /// The experts' outputs: bf16 `[local experts, ranks * max_tokens, hidden]`.
    pub y: u64,
    /// From one row to the next, a multiple of 16.
    pub y_stride: u64,
    /// `f32[tokens, topk]`, unless weights went with the dispatch; 0 for none: rows are summed as they are.
    pub topk_weights: u64,
    /// bf16 `[tokens, hidden]`, contiguous, that are added; 0 for none.
    pub bias: [u64; 2],
    /// bf16 `[tokens, hidden]`.
    pub out: u64,
    /// From one row to the next, a multiple of 16.
    pub out_stride: u64,
    /// As [`ExpertDispatch::waits`].
    pub waits: u64,
}

/// A dispatch in the rank layout. What comes goes into the region.
#[derive(Clone, Copy, Debug)]
pub struct RankDispatch<'a> {
    /// What is sent. With `cached`, `topk_idx` and `topk_weights` are not looked at.
    pub input: Tokens,
    /// Repeats the routing of an earlier dispatch, on every rank.
    pub cached: Option<&'a DeviceHandle>,
    /// The memory of the result.
    pub region: &'a RegionLease,
    /// Counts are rounded up to a multiple of this.
    pub alignment: u32,
    /// `i32[local experts]`: rows of each.
    pub counts: u64,
    /// `i64[ranks + 1]`: the first row of each source, and the end.
    pub offsets: u64,
    /// topk_idx is -1 in rows from the last that came up to this one. If more come, a warning says so. 0: nothing of it.
    pub worst_rows: u64,
    /// Whether the host wants to know the counts ([`crate::Enqueued::count`]).
    pub count: bool,
    /// What this rank's host says to those of the others, for [`crate::Count::said`]; not [`crate::UNHEARD`].
    pub say: u32,
    /// As [`ExpertDispatch::stats`]: rows are not rounded up, and those of a `cached` dispatch are not added.
    pub stats: u64,
    /// As [`ExpertDispatch::waits`].
    pub waits: u64,
}

/// A combine in the rank layout: an unweighted sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankCombine {
    /// The experts' outputs: bf16 `[rows, hidden]`, in the rows' order.
    pub y: u64,
    /// From one row to the next, a multiple of 16.
    pub y_stride: u64,
    /// Rows of `y`, if more may have come than its dispatch's `worst_rows`: those count as zeros. 0: as many as came.
    pub y_rows: u64,
    /// `f32[rows, topk]` that go back with the rows; 0 for none.
    pub y_weights: u64,
    /// `f32[tokens, topk]`, the sum of what comes back; 0 without `y_weights`.
    pub out_weights: u64,
    /// As [`ExpertCombine::bias`].
    pub bias: [u64; 2],
    /// bf16 `[tokens, hidden]`.
    pub out: u64,
    /// From one row to the next, a multiple of 16.
    pub out_stride: u64,
    /// As [`ExpertDispatch::waits`].
    pub waits: u64,
}
