//! The kernels' sources, as they are given to the compiler.

use crossrail_cuda::Arch;
use crossrail_cuda::nvrtc::Source;

macro_rules! text {
    ($path:literal) => {
        include_str!(concat!("../csrc/", $path))
    };
}

/// What a source may include.
const HEADERS: &[(&str, &str)] = &[
    ("layout/types.cuh", text!("layout/types.cuh")),
    ("layout/args.cuh", LAYOUT),
    ("layout/ep.cuh", LAYOUT_EP),
    ("ptx/memory.cuh", text!("ptx/memory.cuh")),
    ("ptx/bulk.cuh", text!("ptx/bulk.cuh")),
    ("ptx/convert.cuh", text!("ptx/convert.cuh")),
    ("kernels/copy_warp.cuh", text!("kernels/copy_warp.cuh")),
    ("kernels/ep_ranks.cuh", text!("kernels/ep_ranks.cuh")),
    ("kernels/ep_common.cuh", text!("kernels/ep_common.cuh")),
    ("kernels/ep_commands.cuh", text!("kernels/ep_commands.cuh")),
    ("kernels/ep_start.cuh", text!("kernels/ep_start.cuh")),
    ("kernels/ep_flags.cuh", text!("kernels/ep_flags.cuh")),
    ("kernels/ep_node.cuh", text!("kernels/ep_node.cuh")),
    ("kernels/ep_forward.cuh", text!("kernels/ep_forward.cuh")),
    ("kernels/ep_relay.cuh", text!("kernels/ep_relay.cuh")),
    ("kernels/ep_plan.cuh", text!("kernels/ep_plan.cuh")),
    ("kernels/ep_dispatch.cuh", text!("kernels/ep_dispatch.cuh")),
    ("kernels/ep_combine.cuh", text!("kernels/ep_combine.cuh")),
    ("kernels/ep_coded.cuh", text!("kernels/ep_coded.cuh")),
    ("kernels/ep_sums.cuh", text!("kernels/ep_sums.cuh")),
    ("kernels/ep_slots.cuh", text!("kernels/ep_slots.cuh")),
    ("kernels/ep_cast.cuh", text!("kernels/ep_cast.cuh")),
    ("kernels/ep_rank.cuh", text!("kernels/ep_rank.cuh")),
    ("kernels/ep_rank_scan.cuh", text!("kernels/ep_rank_scan.cuh")),
    ("kernels/ep_rank_dispatch.cuh", text!("kernels/ep_rank_dispatch.cuh")),
    ("kernels/ep_rank_combine.cuh", text!("kernels/ep_rank_combine.cuh")),
];

/// The committed layout of what kernels take.
pub(crate) const LAYOUT: &str = text!("layout/args.cuh");

/// The committed layout of what the kernels of expert parallelism take.
pub(crate) const LAYOUT_EP: &str = text!("layout/ep.cuh");

/// Gathers a list of pieces.
pub const UNPACK: Source<'static> =
    Source { name: "kernels/unpack.cu", text: text!("kernels/unpack.cu"), headers: HEADERS };
/// Moves the rows of a list to those of another.
pub const ROWS: Source<'static> = Source { name: "kernels/rows.cu", text: text!("kernels/rows.cu"), headers: HEADERS };
/// Copies, and then sets a signal.
pub const PUT: Source<'static> = Source { name: "kernels/put.cu", text: text!("kernels/put.cu"), headers: HEADERS };
/// Writes and awaits flags.
pub const FLAG: Source<'static> = Source { name: "kernels/flag.cu", text: text!("kernels/flag.cu"), headers: HEADERS };
/// Dispatch and combine in the expert layout. It is compiled for a shape: [`crate::ep::Shape::defines`].
pub const EP_EXPERT: Source<'static> =
    Source { name: "kernels/ep_expert.cu", text: text!("kernels/ep_expert.cu"), headers: HEADERS };
/// Combine in the expert layout with coded rows, compiled for a shape as [`EP_EXPERT`] is.
pub const EP_CODED: Source<'static> =
    Source { name: "kernels/ep_coded.cu", text: text!("kernels/ep_coded.cu"), headers: HEADERS };
/// Dispatch and combine in the rank layout for few tokens, compiled for a shape.
pub const EP_SLOTS: Source<'static> =
    Source { name: "kernels/ep_slots.cu", text: text!("kernels/ep_slots.cu"), headers: HEADERS };
/// Dispatch and combine in the rank layout. It is compiled for a shape, too.
pub const EP_RANK: Source<'static> =
    Source { name: "kernels/ep_rank.cu", text: text!("kernels/ep_rank.cu"), headers: HEADERS };

/// Counts a batch's tokens by where they go.
pub const EP_LAYOUT: Source<'static> =
    Source { name: "kernels/ep_layout.cu", text: text!("kernels/ep_layout.cu"), headers: HEADERS };

/// Whether an architecture has bulk copies.
pub fn has_bulk(arch: Arch) -> bool {
    arch.major >= 9
}

/// Every source that there is for an architecture, but those that are compiled for a shape.
pub fn all() -> Vec<Source<'static>> {
    vec![UNPACK, ROWS, PUT, FLAG, EP_LAYOUT]
}
