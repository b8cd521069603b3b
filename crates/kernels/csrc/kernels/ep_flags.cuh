// Flags of sent pieces, and the warp that sets them.
//
// A fence at system scope is expensive: the GPU completes fences one after the other, and a warp that waits at one sends
// nothing. Sending warps therefore never fence. Each keeps several pieces in flight from its stages, and appends the flags
// of pieces that have arrived to a ring. One warp of the block collects all rings, fences once, and sets the flags.
#pragma once

#include "kernels/ep_start.cuh"

constexpr u32 BACK_WARPS = EP_BACK_THREADS / LANES;
// Bytes of a stage, and stages of a warp.
constexpr u32 COMBINE_STAGE = EP_PIECE * 2;
constexpr u32 BACK_STAGES = EP_BACK_STAGES;
// Flags of a warp that may be pending.
constexpr u32 RING = EP_RING;
static_assert(RING >= 2 * BACK_STAGES, "a warp must not wait for flags of pieces that are not there");
// Set in a count of pieces: the warp has sent its last one.
constexpr u32 ALL_THERE = 1u << 31;

// Of a block, in shared memory; accessed by atomics only.
struct Flags {
    u64 ring[BACK_WARPS][RING];
    // Per warp: number of pieces that have arrived, and of pieces whose flags are set.
    u32 there[BACK_WARPS];
    u32 set[BACK_WARPS];
};
static_assert(sizeof(Flags) <= EP_FLAGS, "shared memory that the host reserves");

// Before the block's first barrier. One whole warp.
__device__ __forceinline__ void begin_flags(Flags &flags, u32 lane) {
    if (lane >= BACK_WARPS) return;
    flags.there[lane] = 0;
    flags.set[lane] = 0;
}

// The pieces that a warp sends.
struct Outbox {
    Flags &flags;
    u32 warp;
    u32 sent = 0;
#if EP_NODE
    // Pieces before the last `settle`, all of which have arrived.
    u32 settled = 0;
#else
    static constexpr u32 settled = 0;
#endif

    // Stage for the next piece; its previous contents have been sent.
    __device__ __forceinline__ u8 *stage(u8 *stages, u32 bytes) const {
        return stages + (warp * BACK_STAGES + sent % BACK_STAGES) * bytes;
    }

    // Starts to store a piece. All lanes.
    __device__ __forceinline__ void send(const u8 *stage, u32 bytes, u64 to, u64 flag, u32 lane) {
#if EP_BULK
        fence_proxy_async_shared();
        __syncwarp();
        if (lane == 0) {
            bulk_store_shared(to, shared_address(stage), bytes);
            note(flag);
            // Pieces are there in their order.
            bulk_wait_done<BACK_STAGES - 1>();
            if (sent - settled + 1 >= BACK_STAGES) atom_add_acq_rel_shared_u32(flags.there[warp], 1);
        }
        __syncwarp();
#else
        __syncwarp();
        for (u32 byte = lane * 16; byte < bytes; byte += LANES * 16) {
            st_v16(to + byte, *reinterpret_cast<const Vec16 *>(stage + byte));
        }
        __syncwarp();
        if (lane == 0) {
            note(flag);
            atom_add_acq_rel_shared_u32(flags.there[warp], 1);
        }
        __syncwarp();
#endif
        ++sent;
    }

    // As a piece without bytes: what all lanes have stored so far is announced by `flag`. All lanes.
    __device__ __forceinline__ void announce(u64 flag, u32 lane) {
        __syncwarp();
        if (lane == 0) {
#if EP_BULK
            bulk_commit();
            note(flag);
            bulk_wait_done<BACK_STAGES - 1>();
            if (sent - settled + 1 >= BACK_STAGES) atom_add_acq_rel_shared_u32(flags.there[warp], 1);
#else
            note(flag);
            atom_add_acq_rel_shared_u32(flags.there[warp], 1);
#endif
        }
        __syncwarp();
        ++sent;
    }

    // The flag of the piece after `sent`. One lane.
    __device__ __forceinline__ void note(u64 flag) {
        while (sent >= RING && atom_add_acq_rel_shared_u32(flags.set[warp], 0) + RING <= sent) pause_ns(20);
        atomicExch(&flags.ring[warp][sent % RING], flag);
    }

    // Waits until all pieces have arrived, and marks this warp as done. All lanes.
    __device__ __forceinline__ void end(u32 lane) { settle(lane, ALL_THERE); }

    // Waits until all pieces have arrived, so that others may wait for them. All lanes.
    __device__ __forceinline__ void settle(u32 lane, u32 done = 0) {
        if (lane == 0) {
#if EP_BULK
            bulk_wait_all();
            u32 left = min(sent - settled, BACK_STAGES - 1);
#else
            u32 left = 0;
#endif
            atom_add_acq_rel_shared_u32(flags.there[warp], left | done);
        }
        __syncwarp();
#if EP_NODE
        settled = sent;
#endif
    }
};

// Sets the flags of all pieces that the block's first `senders` warps send. One whole warp.
__device__ __forceinline__ void set_flags(const EpCommon &c, Flags &flags, u64 epoch, u32 senders, u32 lane) {
    u32 done = 0;
    while (true) {
        u32 there = lane < senders ? atom_add_acq_rel_shared_u32(flags.there[lane], 0) : ALL_THERE;
        u32 more = (there & ~ALL_THERE) - done;
        if (!__any_sync(WHOLE_WARP, more)) {
            if (__all_sync(WHOLE_WARP, there & ALL_THERE)) return;
            pause_ns(50);
            continue;
        }
        fence_acq_rel_sys();
        for (u32 i = 0; i < more; ++i) {
            u64 flag = atomicExch(&flags.ring[lane][(done + i) % RING], 0ull);
            set_flag(c, flag, epoch);
        }
        if (more) atom_add_acq_rel_shared_u32(flags.set[lane], more);
        done += more;
        __syncwarp();
    }
}
