// Copies bytes to peer memory and then sets a signal: an observer of the signal sees all the bytes. Only a launch of
// one block sets the signal; with more blocks a second kernel does, since counting finished blocks would need a counter
// for every stream and every graph.
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
    // Orders the block's writes before the first thread's release store.
    __syncthreads();
    if (threadIdx.x == 0) st_release_sys_u64(args.signal, args.value);
}
