// One copy by as many blocks as the launch has: for links that copy engines don't fill, or where they are busy.
#include "kernels/copy_warp.cuh"
#include "layout/args.cuh"

extern "C" __global__ void __launch_bounds__(COPY_THREADS) crossrail_copy(const __grid_constant__ CopyArgs args) {
    u32 lane = threadIdx.x % WARP;
    u64 warp = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    u64 warps = gridDim.x * blockDim.x / WARP;
    for (u64 at = warp * COPY_PART; at < args.len; at += warps * COPY_PART) {
        u64 left = args.len - at;
        copy_warp(args.dst + at, args.src + at, left < COPY_PART ? left : COPY_PART, lane);
    }
}
