// Dispatch and combine in the expert layout. Warps work independently: each sends its pieces of rows, sets their flags, and
// waits for the flags of the pieces that it delivers; blocks synchronize only at the beginning and at the end.
#include "kernels/ep_combine.cuh"
#include "kernels/ep_dispatch.cuh"

namespace crossrail::ep::expert {

__global__ void __launch_bounds__(EP_THREADS, 1) dispatch(const __grid_constant__ EpDispatchArgs args) {
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
    // Loads that need nothing that the block finds out are under way while it does.
    OwnSelection own(args, sends);
    // The last warp has the least to send.
    if (warp == WARPS - 1) {
        const EpState &state = state_of(c);
        begin(c, {state.dispatch_sent, state.dispatch_ended, EP_WORD_DISPATCH_TAKEN}, start, lane);
        if (sends) free_slots(c, start, EP_WORD_DISPATCH_TAKEN, EP_STAGE_DISPATCH_TAKEN, lane);
    }
    send_rows(args, start, stages, share, lane, [&] {
        __syncthreads();
        mark_of(0, args.marks, EP_MARK_COUNTED);
        // Before rows: they fill the links.
        if (sends) send_selections(args, start, own);
        if (blockIdx.x == 0) mark_of(0, args.marks, EP_MARK_ANNOUNCED);
        if (blockIdx.x == gridDim.x - 1 && warp == WARPS - 1) tell_taken(c, start, EP_WORD_DISPATCH_TAKEN, lane);
    });
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

__global__ void __launch_bounds__(EP_BACK_THREADS, 1) combine(const __grid_constant__ EpCombineArgs args) {
    extern __shared__ __align__(128) u8 shared[];
    run_combine<Plain>(args, shared);
}

}  // namespace crossrail::ep::expert
