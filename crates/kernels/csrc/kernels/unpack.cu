// Gathers a list of pieces: for each entry, `len` bytes from `src` to `dst`. One warp takes one entry at a time, so
// entries should be alike in length; the host cuts long ones. Sources may be device memory or mapped host memory.
#include "kernels/copy_warp.cuh"
#include "layout/args.cuh"

extern "C" __global__ void __launch_bounds__(COPY_THREADS) crossrail_unpack(const __grid_constant__ UnpackArgs args) {
    u32 lane = threadIdx.x % WARP;
    u32 warp = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    u32 warps = gridDim.x * blockDim.x / WARP;
    const Piece *pieces = reinterpret_cast<const Piece *>(args.pieces);
    u64 i = warp;
    if (i >= args.count) return;
    Piece piece = pieces[i];
    while (true) {
        // Prefetch the next entry while this one is copied: the list may be in host memory.
        u64 next = i + warps;
        Piece ahead = piece;
        if (next < args.count) ahead = pieces[next];
        copy_warp(piece.dst, piece.src, piece.len, lane);
        if (next >= args.count) return;
        piece = ahead;
        i = next;
    }
}
