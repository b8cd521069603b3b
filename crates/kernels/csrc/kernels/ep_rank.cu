// Dispatch and combine in the rank layout.
#include "kernels/ep_rank_combine.cuh"
#include "kernels/ep_rank_dispatch.cuh"

namespace crossrail::ep::rank {

__global__ void __launch_bounds__(EP_THREADS, 1) dispatch(const __grid_constant__ EpDispatchArgs args) {
    extern __shared__ __align__(128) u8 stages[];
    begin_launch();
    DispatchShared &shared = *reinterpret_cast<DispatchShared *>(stages + DISPATCH_STAGE * DISPATCH_STAGES);
    Dispatch dispatch(args);
    mark_by(0, args.marks, EP_MARK_BEGUN);
    bool sends = args.common.phases & EP_SEND, casts = EP_FP8 && !args.x_fp8;
#if EP_BULK
    Mover mover;
    Pace pace(args);
    bool moves = sends && !casts && warp_of() < pace.movers;
    if (moves) mover.begin(dispatch, pace, stages, shared.full);
#endif
    bool plans = blockIdx.x == 0;
    if (args.common.phases & EP_ANNOUNCE) {
        if (!args.cached) {
            plans = count(dispatch, shared.scan);
            mark_by(0, args.marks, EP_MARK_COUNTED);
            if (plans) add_up(dispatch, shared.scan, gridDim.x);
        }
        if (plans) announce(dispatch, shared.scan);
        if (plans) mark_by(0, args.marks, EP_MARK_ANNOUNCED);
        // Overlaps with the announcements in flight.
        if (!args.cached) number_rows(dispatch, shared.scan);
    }
    if (sends && plans) {
        plan(dispatch, shared.scan);
        mark_by(0, args.marks, EP_MARK_HEARD);
    }
    if (sends) {
        __syncthreads();
        read_plan(dispatch, shared);
        mark_by(0, args.marks, EP_MARK_PLANNED);
        Targets targets(shared);
#if EP_BULK
        u32 senders = casts ? casters() : pace.movers;
        if (warp_of() >= senders) {
            if (plans && warp_of() == senders) publish_counts(dispatch, shared.scan);
            send_details(dispatch, shared, senders);
        } else if (casts) {
            send_cast(dispatch, targets, stages);
        } else {
            mover.send(dispatch, targets);
        }
#else
        u32 senders = casts ? casters() : COPIERS;
        if (warp_of() >= senders) {
            if (plans && warp_of() == senders) publish_counts(dispatch, shared.scan);
            send_details(dispatch, shared, senders);
        } else if (casts) {
            send_cast(dispatch, targets, stages);
        } else {
            send_copies(dispatch, targets);
        }
#endif
    }
    u64 counter = address_of(state_of(args.common).dispatch_blocks[args.common.phases]);
    bool last = is_last_of_launch(counter, shared.scan.last);
    mark_by(0, args.marks, EP_MARK_DONE);
    if (!last) return;
    end_dispatch(dispatch, shared);
    mark_by(0, args.marks, EP_MARK_OVER);
}

__global__ void __launch_bounds__(EP_THREADS, 1) combine(const __grid_constant__ EpCombineArgs args) {
    extern __shared__ __align__(128) u8 stages[];
    begin_launch();
    CombineShared &shared = *reinterpret_cast<CombineShared *>(stages + COMBINE_STAGE * COMBINE_STAGES);
    Combine combine(args);
    mark_by(0, args.marks, EP_MARK_BEGUN);
    begin_combine(combine, shared);
    mark_by(0, args.marks, EP_MARK_PLANNED);
    bool sends = args.common.phases & EP_SEND, adds = args.common.phases & EP_RECEIVE;
    // With a number of senders, those blocks send and the others add up; else every block does both.
    u32 split = sends && adds && args.senders < gridDim.x ? args.senders : 0;
    u32 sending = split == 0 ? gridDim.x : split;
    bool sending_block = sends && EP_R > 1 && blockIdx.x < sending;
    if (warp_of() < SENDERS) {
        if (sending_block) {
#if EP_BULK
            u32 senders = sending * SENDERS;
            u32 rows = rows_under_way(args.queue, SENDER_QUEUE, sending, WIDE_ROW);
            bool many = shared.offsets[EP_R] > senders * MANY_ROWS;
            Sender(combine, shared, stages, senders).run(atmost((rows - 1) / SENDERS + 1, SENDER_BEHIND), many);
#else
            send_plain(combine, shared, sending * SENDERS);
#endif
        }
    } else if (warp_of() < ADDERS) {
#if EP_BULK
        if (sending_block) Flagger{shared, combine.epoch}.run();
#endif
    } else if (adds && blockIdx.x >= split) {
        u32 warps = WARPS - ADDERS;
        add_tokens(combine, shared, (blockIdx.x - split) * warps + warp_of() - ADDERS, (gridDim.x - split) * warps);
    }
    u64 counter = address_of(state_of(args.common).combine_blocks[args.common.phases]);
    bool last = is_last_of_launch(counter, shared.last);
    mark_by(0, args.marks, EP_MARK_DONE);
    if (!last) return;
    end_combine(combine);
    mark_by(0, args.marks, EP_MARK_OVER);
}

}  // namespace crossrail::ep::rank
