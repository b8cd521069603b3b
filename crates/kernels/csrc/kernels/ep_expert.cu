// Dispatch and combine in the expert layout. Warps work by themselves: each takes its pieces of rows, sends them, sets
// their flags, and waits for the flags of those that it delivers; blocks meet at the beginning and at the end only.
#include "kernels/ep_combine.cuh"

// What a block's warps find in its shared memory from there on.
__device__ __forceinline__ u8 *behind_start(u8 *shared) { return shared + EP_START; }

extern "C" __global__ void __launch_bounds__(EP_THREADS, 1)
    crossrail_ep_dispatch_expert(const __grid_constant__ EpDispatchArgs args) {
    extern __shared__ __align__(128) u8 shared[];
    const EpCommon &c = args.common;
    Start &start = *reinterpret_cast<Start *>(shared);
    u8 *memory = behind_start(shared);
    u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    mark_of(0, args.marks, EP_MARK_BEGUN);
    bool sends = c.phases & EP_SEND, receives = c.phases & EP_RECEIVE;
    // The first block plans while the others send.
    u32 first = receives && gridDim.x > 1, senders = gridDim.x - first;
    u32 units = sends && blockIdx.x >= first && warp < EP_SENDERS ? c.tokens * PIECES : 0;
    Share share = {warp * senders + blockIdx.x - first, EP_SENDERS * senders, units};
    u8 *stages = memory + warp * EP_STAGES * DISPATCH_STAGE;
    Outgoing row = {-1, 0, false};
    // Loads that need nothing that the block finds out are under way while it does.
    OwnSelection own(args, sends);
    // The last warp has the least to send.
    if (warp == WARPS - 1) {
        const EpState &state = state_of(c);
        begin(c, {state.dispatch_sent, state.dispatch_ended, EP_WORD_DISPATCH_TAKEN}, start, lane);
    }
    if (share.unit < share.end) row = stage_unit(args, share.unit, stages, lane);
    __syncthreads();
    Peers peers(start.open, start.base, lane);
    if (blockIdx.x == gridDim.x - 1 && warp == WARPS - 1) tell_taken(c, start, EP_WORD_DISPATCH_TAKEN, lane);
    if (sends) {
        // Before rows: they fill the links.
        send_selections(args, start, own);
        if (blockIdx.x == 0) mark_of(0, args.marks, EP_MARK_ANNOUNCED);
        send_rows(args, start, peers, stages, share, row, lane);
    }
    if (receives) {
        if (blockIdx.x == 0) plan_rows(args, start, memory);
        u32 from = EP_RECEIVE_FROM;
        if (warp >= from) {
            // The last warps, which have the least to send, have the most to deliver.
            u32 worker = (WARPS - 1 - warp) * gridDim.x + blockIdx.x;
            receive_rows(args, start, worker, (WARPS - from) * gridDim.x, lane);
            mark_of(EP_THREADS - LANES, args.marks, EP_MARK_CAME);
        }
    }
    end_dispatch(args, start.sent, start.received);
}

extern "C" __global__ void __launch_bounds__(EP_THREADS, 1)
    crossrail_ep_combine_expert(const __grid_constant__ EpCombineArgs args) {
    extern __shared__ __align__(128) u8 shared[];
    const EpCommon &c = args.common;
    Start &start = *reinterpret_cast<Start *>(shared);
    u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    mark_of(0, args.marks, EP_MARK_BEGUN);
    bool sends = c.phases & EP_SEND;
    u8 *stages = behind_start(shared) + warp * EP_STAGES * COMBINE_STAGE;
    // Loads that need nothing that the block finds out are under way while it does.
    Returns returns(args, warp, lane);
    OwnWeight own(args, sends);
    if (warp == WARPS - 1) {
        const EpState &state = state_of(c);
        begin(c, {state.combine_sent, state.combine_ended, EP_WORD_COMBINE_TAKEN}, start, lane);
    }
    if (warp == (WARPS > 1 ? WARPS - 2 : 0)) begin_combine(c, start, lane);
    __syncthreads();
    Peers peers(start.open, start.base, lane);
    if (blockIdx.x == gridDim.x - 1 && warp == WARPS - 1) tell_taken(c, start, EP_WORD_COMBINE_TAKEN, lane);
    if (sends) send_weights(args, start, own);
    Pending pending = returns.send(args, start, peers, stages, lane);
    if (c.phases & EP_RECEIVE) {
        u32 from = EP_RECEIVE_FROM, step = (WARPS - from) * gridDim.x;
        u32 units = warp >= from ? c.tokens * PARTS : 0;
        u32 unit = (warp - from) * gridDim.x + blockIdx.x;
        // What this rank itself adds to the first sum is read while this warp's last row is on its way.
        Gather gather;
        if (unit < units) gather.begin(args, start, peers, unit, lane);
        settle(pending, start, lane);
        mark_of(0, args.marks, EP_MARK_SENT);
        while (unit < units) {
            gather.end(args, start, unit, lane);
            if (unit < step) mark_of(0, args.marks, EP_MARK_SUM);
            unit += step;
            if (unit < units) gather.begin(args, start, peers, unit, lane);
        }
        mark_of(0, args.marks, EP_MARK_SUMS);
    }
    settle(pending, start, lane);
    end_combine(args, start.sent, start.received);
}
