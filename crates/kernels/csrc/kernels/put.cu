// Bytes to where somebody else waits for them, and then a signal: who sees the signal sees all the bytes. The last block
// to finish sets it, so that no second kernel is needed; a small put is one block, which needs no counter either.
#include "kernels/copy_warp.cuh"
#include "layout/args.cuh"

extern "C" __global__ void __launch_bounds__(COPY_THREADS) crossrail_put(const __grid_constant__ PutArgs args) {
    u32 lane = threadIdx.x % WARP;
    u64 warp = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    u64 warps = gridDim.x * blockDim.x / WARP;
    for (u64 at = warp * args.part; at < args.len; at += warps * args.part) {
        u64 left = args.len - at;
        copy_warp(args.dst + at, args.src + at, left < args.part ? left : args.part, lane);
    }
    if (args.signal == 0) return;
    // What the block's threads wrote comes before what its first thread does now.
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (gridDim.x > 1) {
        fence_acq_rel_sys();
        if (atom_add_acq_rel_gpu_u64(args.counter, 1) != gridDim.x - 1) return;
        st_relaxed_gpu_u64(args.counter, 0);
    }
    st_release_sys_u64(args.signal, args.value);
}
