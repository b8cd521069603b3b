// Counts the tokens of a batch by destination. A single block, so that no counters in global memory need to be cleared
// or summed.
#include "layout/ep.cuh"

namespace crossrail::ep {

// Ids that a thread has in flight at once.
constexpr u32 LAYOUT_IDS = 8;

// Counts one token's experts; returns its ranks as a bit mask.
__device__ __forceinline__ u64 layout_token(const EpLayoutArgs &args, u32 token, u32 *of_experts) {
    const u64 *ids = reinterpret_cast<const u64 *>(args.topk_idx) + u64(token) * args.stride;
    u32 local = args.experts / args.ranks;
    u64 ranks = 0;
    for (u32 first = 0; first < args.topk; first += LAYOUT_IDS) {
        u64 chosen[LAYOUT_IDS];
#pragma unroll
        for (u32 i = 0; i < LAYOUT_IDS; ++i) chosen[i] = first + i < args.topk ? ids[first + i] : args.experts;
#pragma unroll
        for (u32 i = 0; i < LAYOUT_IDS; ++i) {
            if (chosen[i] >= args.experts) continue;  // negative ones are large
            atomicAdd(&of_experts[u32(chosen[i])], 1u);
            ranks |= u64(1) << (u32(chosen[i]) / local);
        }
    }
    return ranks;
}

__global__ void __launch_bounds__(EP_LAYOUT_THREADS, 1) layout(const __grid_constant__ EpLayoutArgs args) {
    extern __shared__ __align__(128) u8 shared[];
    u32 *of_experts = reinterpret_cast<u32 *>(shared), *of_ranks = of_experts + args.experts;
    for (u32 i = threadIdx.x; i < args.experts + args.ranks; i += blockDim.x) of_experts[i] = 0;
    __syncthreads();
    for (u32 token = threadIdx.x; token < args.tokens; token += blockDim.x) {
        u64 ranks = layout_token(args, token, of_experts);
        u8 *in_rank = reinterpret_cast<u8 *>(args.out_in_rank) + u64(token) * args.ranks;
        for (u32 rank = 0; rank < args.ranks; ++rank) {
            bool goes = ranks >> rank & 1;
            in_rank[rank] = goes;
            if (goes) atomicAdd(&of_ranks[rank], 1u);
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < args.experts; i += blockDim.x) {
        reinterpret_cast<u32 *>(args.out_experts)[i] = of_experts[i];
    }
    for (u32 i = threadIdx.x; i < args.ranks; i += blockDim.x) {
        reinterpret_cast<u32 *>(args.out_ranks)[i] = of_ranks[i];
    }
}

}  // namespace crossrail::ep
