// One copy by as many blocks as the launch has: for links that copy engines don't fill, or where they are busy.
#include "kernels/copy_warp.cuh"
#include "layout/args.cuh"

// What a warp takes at a time.
constexpr u64 PART = 16384;

extern "C" __global__ void __launch_bounds__(256) crossrail_copy(const __grid_constant__ CopyArgs args) {
    u32 lane = threadIdx.x % WARP;
    u64 warp = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    u64 warps = gridDim.x * blockDim.x / WARP;
    for (u64 at = warp * PART; at < args.len; at += warps * PART) {
        u64 left = args.len - at;
        copy_warp(args.dst + at, args.src + at, left < PART ? left : PART, lane);
    }
}
