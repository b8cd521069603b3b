//! What operations of an expert buffer on a GPU are given, as dicts of addresses and strides.

use crossrail_ep_cuda as ep;
use pyo3::prelude::*;

/// What a rank dispatches, as a dict: see `ep::Tokens`. An address of 0: there is none.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Tokens {
    tokens: u32,
    x: u64,
    x_stride: u64,
    in_scales: u64,
    in_scale_row: u64,
    in_scale_block: u64,
    topk_idx: u64,
    idx_bytes: u32,
    topk_weights: u64,
    waits: u64,
}

impl Tokens {
    fn native(&self) -> ep::Tokens {
        let Tokens { in_scales: address, in_scale_row: row, in_scale_block: block, .. } = *self;
        ep::Tokens {
            tokens: self.tokens,
            x: self.x,
            x_stride: self.x_stride,
            scales: (address != 0).then_some(ep::InScales { address, row, block }),
            topk_idx: self.topk_idx,
            idx_bytes: self.idx_bytes,
            topk_weights: self.topk_weights,
        }
    }
}

/// Where what comes goes, as a dict: see `ep::ExpertOut`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct ExpertOut {
    x: u64,
    scales: u64,
    scale_expert: u64,
    scale_row: u64,
    scale_block: u64,
    counts: u64,
    ranges: u64,
    source: u64,
    stats: u64,
}

/// The same in the rank layout: see `ep::RankDispatch`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct RankOut {
    counts: u64,
    offsets: u64,
    alignment: u32,
    worst_rows: u64,
    count: bool,
    say: u32,
    stats: u64,
}

/// What a combine takes, as a dict: see `ep::ExpertCombine` and `ep::RankCombine`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Combine {
    y: u64,
    y_stride: u64,
    y_rows: u64,
    topk_weights: u64,
    out_weights: u64,
    bias: [u64; 2],
    out: u64,
    out_stride: u64,
    waits: u64,
}

impl ExpertOut {
    pub(crate) fn dispatch(&self, input: &Tokens) -> ep::ExpertDispatch {
        let ExpertOut { x, scales, scale_expert, scale_row, scale_block, counts, ranges, source, stats } = *self;
        ep::ExpertDispatch {
            input: input.native(),
            out: ep::ExpertOut { x, scales, scale_expert, scale_row, scale_block, counts, ranges, source },
            stats,
            waits: input.waits,
        }
    }
}

impl RankOut {
    pub(crate) fn dispatch<'a>(
        &self,
        input: &Tokens,
        cached: Option<&'a ep::DeviceHandle>,
        region: &'a ep::RegionLease,
    ) -> ep::RankDispatch<'a> {
        let RankOut { counts, offsets, alignment, worst_rows, count, say, stats } = *self;
        let (input, waits) = (input.native(), input.waits);
        ep::RankDispatch { input, cached, region, alignment, counts, offsets, worst_rows, count, say, stats, waits }
    }
}

impl Combine {
    pub(crate) fn by_expert(&self) -> ep::ExpertCombine {
        let Combine { y, y_stride, y_rows: _, topk_weights, out_weights: _, bias, out, out_stride, waits } = *self;
        ep::ExpertCombine { y, y_stride, topk_weights, bias, out, out_stride, waits }
    }

    pub(crate) fn by_rank(&self) -> ep::RankCombine {
        let Combine { y, y_stride, y_rows, topk_weights: y_weights, out_weights, bias, out, out_stride, waits } = *self;
        ep::RankCombine { y, y_stride, y_rows, y_weights, out_weights, bias, out, out_stride, waits }
    }
}
