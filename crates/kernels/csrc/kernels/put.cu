// Bytes to where somebody else waits for them, and then a signal: who sees the signal sees all the bytes. Only a launch of
// one block sets it; behind several a second kernel does, as a counter of finished blocks would be needed for each stream
// and each graph.
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
    if (threadIdx.x == 0) st_release_sys_u64(args.signal, args.value);
}
