//! The kernels' sources, as they are given to the compiler.

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
    ("ptx/memory.cuh", text!("ptx/memory.cuh")),
    ("kernels/copy_warp.cuh", text!("kernels/copy_warp.cuh")),
];

/// The committed layout of what kernels take.
pub(crate) const LAYOUT: &str = text!("layout/args.cuh");

/// Gathers a list of pieces.
pub const UNPACK: Source<'static> =
    Source { name: "kernels/unpack.cu", text: text!("kernels/unpack.cu"), headers: HEADERS };
/// Copies with a given number of blocks.
pub const COPY: Source<'static> = Source { name: "kernels/copy.cu", text: text!("kernels/copy.cu"), headers: HEADERS };
/// Writes and awaits flags.
pub const FLAG: Source<'static> = Source { name: "kernels/flag.cu", text: text!("kernels/flag.cu"), headers: HEADERS };

/// Every source there is.
pub const ALL: [Source<'static>; 3] = [UNPACK, COPY, FLAG];
