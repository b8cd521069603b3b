// Shared by dispatch and combine in the rank layout: a block's warps, its ring of stages, and the end of a launch.
//
// A stage holds one row: it is loaded into shared memory once and stored from there to each of its ranks. Without bulk
// copies, a warp holds the row in registers.
#pragma once

#include "kernels/ep_cast.cuh"
#include "kernels/ep_common.cuh"

constexpr u32 atleast(u32 a, u32 b) {
    return a < b ? b : a;
}
constexpr u32 atmost(u32 a, u32 b) {
    return a < b ? a : b;
}

// A bf16 row, and the 16-byte vectors of it.
constexpr u32 WIDE_ROW = 2 * EP_H;
constexpr u32 VECTORS = EP_H / 8;
// A row as dispatch carries it.
constexpr u32 ROW = EP_FP8 ? EP_H : 2 * EP_H;
// Blocks of a row that have a scale each; fp8 rows are whole blocks.
constexpr u32 BLOCKS = EP_FP8 ? EP_H / BLOCK : 1;
constexpr u32 SCALE_BYTES = BLOCKS * SCALE;

// Unpacks an `EpHandle::sent_rows` entry: the token's row at a rank, and the position of its last selection there.
__device__ __forceinline__ u32 row_number(u32 sent) { return sent == EP_NOWHERE ? sent : sent & ((1u << EP_SENT_BITS) - 1); }
__device__ __forceinline__ u32 row_position(u32 sent) { return sent >> EP_SENT_BITS; }

__device__ __forceinline__ u64 heap_of(const EpCommon &common, u32 rank) { return at<const u64>(common.peers, rank); }

__device__ __forceinline__ u32 lane_of() {
    return threadIdx.x % LANES;
}
__device__ __forceinline__ u32 warp_of() {
    return threadIdx.x / LANES;
}

// Notes the time, as the first lane of that warp sees it.
__device__ __forceinline__ void mark_by(u32 warp, u64 marks, u32 what) {
    if (threadIdx.x == warp * LANES) mark(marks, what);
}

// Rows that a block keeps in flight: enough to saturate the links, and no more, since faster blocks cannot take over
// rows in flight at the end. `asked`: KiB for all `blocks` blocks together; 0 for `usual`.
__device__ __forceinline__ u32 rows_under_way(u32 asked, u32 usual, u32 blocks, u32 row) {
    u64 bytes = u64(asked == 0 ? usual : asked) * 1024;
    return static_cast<u32>((bytes - 1) / (u64(blocks) * row)) + 1;
}

// Rows that a warp loads ahead of the one that it stores: long ones take longer to store than to load.
constexpr u32 ahead_of(u32 stages, u32 row) {
    return row < 4096 ? (stages + 1) / 2 : atmost(stages - 1, 2);
}

#if EP_BULK
// Waits until all but the last `pending` groups of this thread have read their source, at most `MOST`.
template <u32 MOST>
__device__ __forceinline__ void wait_read(u32 pending) {
    if constexpr (MOST > 1) {
        if (pending < MOST) return wait_read<MOST - 1>(pending);
    }
    bulk_wait_read<MOST>();
}

// A warp's part of the block's stages, and the barriers on which their loads end. All lanes hold the same; the first
// one starts copies.
template <u32 STAGE, u32 COUNT>
struct Ring {
    u32 stages = 0;
    u32 full = 0;
    u32 loading = 0;
    u32 storing = 0;
    u32 parity = 0;

    __device__ __forceinline__ void begin(u8 *memory, u64 *barriers) {
        stages = shared_address(memory);
        full = shared_address(barriers);
        if (lane_of() == 0) {
            for (u32 i = 0; i < COUNT; ++i) mbarrier_init_shared(full + 8 * i, 1);
            fence_mbarrier_init();
        }
        __syncwarp();
    }

    __device__ __forceinline__ void load(u64 from, u32 bytes) {
        if (lane_of() == 0) {
            mbarrier_arrive_expect_shared(full + 8 * loading, bytes);
            bulk_load_shared(stages + STAGE * loading, from, bytes, full + 8 * loading);
        }
        if (++loading == COUNT) loading = 0;
    }

    // Waits for the oldest load, and returns its stage.
    __device__ __forceinline__ u32 loaded() {
        mbarrier_wait_shared(full + 8 * storing, parity);
        return stages + STAGE * storing;
    }

    // The stores of that stage have been started: one group.
    __device__ __forceinline__ void stored() {
        if (lane_of() == 0) bulk_commit();
        if (++storing == COUNT) {
            storing = 0;
            parity ^= 1;
        }
    }
};
#endif

// Dynamic work distribution over all warps of a launch, by an atomic counter: faster warps take more. The next index is
// fetched ahead, to hide the atomic's latency.
struct WorkCounter {
    u64 counter;
    u32 base;
    u32 next;

    // `already`: number of indices assigned statically, which the counter does not include.
    __device__ __forceinline__ void begin(u64 &taken, u32 already) {
        counter = address_of(taken);
        base = already;
        next = 0;
        ask();
    }

    __device__ __forceinline__ u32 take() {
        u32 number = base + __shfl_sync(WHOLE_WARP, next, 0);
        ask();
        return number;
    }

    __device__ __forceinline__ void ask() {
        if (lane_of() == 0) next = static_cast<u32>(atomicAdd(&at<u64>(counter), 1ull));
    }
};

__device__ __forceinline__ u32 warp_sum(u32 value) {
#pragma unroll
    for (u32 step = LANES / 2; step > 0; step /= 2) value += __shfl_xor_sync(WHOLE_WARP, value, step);
    return value;
}

// Whether this is the last block of the launch to arrive; the result is valid in all its threads. All earlier writes of
// all blocks, also to other ranks, are ordered before its later ones. The counter is 0 before and after.
__device__ __forceinline__ bool is_last_of_launch(u64 counter, u32 &shared) {
    __syncthreads();
    if (threadIdx.x == 0) {
        // One fence for all threads of the block: a system fence is expensive.
        fence_acq_rel_sys();
        shared = gridDim.x == 1 || atom_add_acq_rel_gpu_u64(counter, 1) == gridDim.x - 1;
        if (shared && gridDim.x > 1) st_relaxed_gpu_u64(counter, 0);
    }
    __syncthreads();
    return shared;
}

// Waits for another block of this launch.
__device__ __forceinline__ void await_block(u64 word, u64 value) {
    while (ld_acquire_gpu_u64(word) < value) pause_ns(20);
}
