// Dispatch and combine in the expert layout. Warps work by themselves: each takes its pieces of rows, sends them, sets
// their flags, and waits for the flags of those that it delivers; blocks meet at the end only.
#include "kernels/ep_combine.cuh"

// The warps that receive, of all blocks; and the number of this one, or NONE.
constexpr u32 RECEIVERS = WARPS - EP_RECEIVE_FROM;
constexpr u32 NONE = 0xffffffff;

__device__ __forceinline__ u32 receiver(u32 warp) {
    u32 from = EP_RECEIVE_FROM;
    return warp < from ? NONE : (warp - from) * gridDim.x + blockIdx.x;
}

// The number of an operation: one more than the last.
__device__ __forceinline__ u64 next_epoch(const u64 &last) { return ld_relaxed_gpu_u64(address_of(last)) + 1; }

extern "C" __global__ void __launch_bounds__(EP_THREADS, 1)
    crossrail_ep_dispatch_expert(const __grid_constant__ EpDispatchArgs args) {
    extern __shared__ __align__(128) u8 shared[];
    const EpCommon &c = args.common;
    u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    u64 sent = next_epoch(state_of(c).dispatch_sent), received = next_epoch(state_of(c).dispatch_ended);
    Peers peers(c, lane);
    // The first block plans while the others send.
    bool plans = blockIdx.x == 0;
    if (c.phases & EP_SEND) {
        if (plans) announce_tables(args, shared, sent);
        if (plans) __syncthreads();
        u32 first = gridDim.x > 1, senders = gridDim.x - first;
        if (blockIdx.x >= first && warp < EP_SENDERS) {
            u8 *stage = shared + EP_PLAN_BASES + warp * DISPATCH_STAGE;
            send_rows(args, peers, stage, sent, warp * senders + blockIdx.x - first, EP_SENDERS * senders, lane);
        }
    }
    if (c.phases & EP_RECEIVE) {
        if (plans) plan_rows(args, shared, received);
        u32 worker = receiver(warp);
        if (worker != NONE) receive_rows(args, received, worker, RECEIVERS * gridDim.x, lane);
    }
    end_dispatch(args, peers, sent, received);
}

extern "C" __global__ void __launch_bounds__(EP_THREADS, 1)
    crossrail_ep_combine_expert(const __grid_constant__ EpCombineArgs args) {
    extern __shared__ __align__(128) u8 shared[];
    const EpCommon &c = args.common;
    u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    u64 sent = next_epoch(state_of(c).combine_sent), received = next_epoch(state_of(c).combine_ended);
    Peers peers(c, lane);
    if (c.phases & EP_SEND) {
        if (blockIdx.x == 0) send_weights(args, peers, sent);
        if (warp < EP_SENDERS) {
            u32 worker = warp * gridDim.x + blockIdx.x;
            send_back_all(args, peers, shared + warp * COMBINE_STAGE, sent, worker, EP_SENDERS * gridDim.x, lane);
        }
    }
    if (c.phases & EP_RECEIVE) {
        for (u64 unit = receiver(warp); unit < u64(c.tokens) * PIECES; unit += RECEIVERS * gridDim.x) {
            sum_token(args, peers, static_cast<u32>(unit / PIECES), unit % PIECES, received, lane);
        }
    }
    end_combine(args, peers, sent, received);
}
