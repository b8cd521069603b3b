//! Arguments of operations of an expert buffer on a GPU: the kernels' own structs, whose fields Python sets by name.

use crossrail_ep_cuda::{EpCombineArgs, EpDispatchArgs};
use pyo3::prelude::*;

/// A class around a kernel's struct: a property for each field that callers set.
macro_rules! arguments {
    ($(#[doc = $doc:literal])+ $name:ident($args:ident) { $( $field:ident, $set_field:ident: $type:ty = $($path:ident).+; )+ }) => {
        $(#[doc = $doc])+
        #[pyclass(module = "crossrail._native")]
        pub(super) struct $name(pub(super) $args);

        #[pymethods]
        impl $name {
            #[new]
            fn new() -> Self {
                $name($args::ZERO)
            }

            $(
                #[getter]
                fn $field(&self) -> $type {
                    self.0.$($path).+
                }

                #[setter]
                fn $set_field(&mut self, value: $type) {
                    self.0.$($path).+ = value;
                }
            )+
        }
    };
}

arguments! {
    /// Arguments of a dispatch, all 0 at first: addresses (0: no such array) and strides in bytes, as
    /// `crossrail_kernels::ep::EpDispatchArgs` documents them.
    DispatchArgs(EpDispatchArgs) {
        tokens, set_tokens: u32 = common.tokens;
        waits, set_waits: u64 = common.waits;
        x, set_x: u64 = x;
        x_stride, set_x_stride: u64 = x_stride;
        x_fp8, set_x_fp8: u32 = x_fp8;
        x_scales, set_x_scales: u64 = x_scales;
        x_scale_strides, set_x_scale_strides: [u64; 2] = x_scale_strides;
        topk_idx, set_topk_idx: u64 = topk_idx;
        idx_bytes, set_idx_bytes: u32 = idx_bytes;
        topk_weights, set_topk_weights: u64 = topk_weights;
        out_x, set_out_x: u64 = out_x;
        out_scales, set_out_scales: u64 = out_scales;
        out_scale_strides, set_out_scale_strides: [u64; 3] = out_scale_strides;
        out_counts, set_out_counts: u64 = out_counts;
        out_ranges, set_out_ranges: u64 = out_ranges;
        out_source, set_out_source: u64 = out_source;
        out_offsets, set_out_offsets: u64 = out_offsets;
        stats, set_stats: u64 = stats;
        max_rows, set_max_rows: u64 = max_rows;
        expert_alignment, set_expert_alignment: u32 = expert_alignment;
        host_word, set_host_word: u32 = host_word;
    }
}

arguments! {
    /// Arguments of a combine, all 0 at first: addresses (0: no such array) and strides in bytes, as
    /// `crossrail_kernels::ep::EpCombineArgs` documents them.
    CombineArgs(EpCombineArgs) {
        waits, set_waits: u64 = common.waits;
        y, set_y: u64 = y;
        y_stride, set_y_stride: u64 = y_stride;
        y_weights, set_y_weights: u64 = y_weights;
        topk_weights, set_topk_weights: u64 = topk_weights;
        bias, set_bias: [u64; 2] = bias;
        out, set_out: u64 = out;
        out_stride, set_out_stride: u64 = out_stride;
        out_weights, set_out_weights: u64 = out_weights;
        wire, set_wire: u32 = wire;
    }
}
