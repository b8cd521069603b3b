// How a launch in the expert layout begins: one warp of each block finds out what all warps need, from words that every
// block of the launch reads, and leaves it in shared memory. Thousands of warps that read the same word by themselves
// wait for each other.
#pragma once

#include "kernels/ep_common.cuh"

// Of a block, in shared memory.
struct Start {
    // The numbers of the operation that is sent and of the one that is received.
    u64 sent;
    u64 received;
    // Bits of ranks: those that are not masked; those whose slots for what is sent are free.
    u64 open;
    u64 free;
    // Where the ranks' heaps are.
    u64 base[EP_R];
    // Tokens and flags of each source: in combine, as the handle has them; in the block that plans a dispatch, as they
    // said; in the others tokens are both, as the plan has them. Combine: whether this rank's own weights went with the
    // dispatch.
    u32 tokens[EP_R];
    u32 flags[EP_R];
    u32 weighted;
    // Dispatch: a warp of the block has begun to wait for the plan; it is there.
    u32 asked;
    u32 planned;
    // The block that plans a dispatch: bits of sources that did not come in time.
    u64 lost;
    // What warps tell each other between barriers of the block, by atomics alone.
    // Warps whose pieces are there, but whose flags are not set yet; and TELLING while one of them sets flags. How often those
    // of each warp were set.
    u64 ready;
    u32 told[WARPS];
    u64 untold[WARPS][EP_K];
};
static_assert(sizeof(Start) <= EP_START, "what the host reckons with");
constexpr u64 TELLING = 1ull << 63;

// What a block's warps find in its shared memory from there on.
__device__ __forceinline__ u8 *behind_start(u8 *shared) { return shared + EP_START; }

// Which numbers and words a kernel goes by.
struct Numbered {
    const u64 &sent;
    const u64 &received;
    u32 taken;
};

// Fills in what `start` says, but for what it says of a handle. One whole warp; the block waits for it.
__device__ __forceinline__ void begin(const EpCommon &c, const Numbered &by, Start &start, u32 lane) {
    // All loads are under way before the first is looked at.
    u64 sent = ld_relaxed_gpu_u64(address_of(by.sent)) + 1;
    u64 received = ld_relaxed_gpu_u64(address_of(by.received)) + 1;
    u64 base[EACH] = {}, taken[EACH] = {};
    u32 masked[EACH] = {};
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
        u32 rank = lane + i * LANES;
        if (rank >= EP_R) continue;
        base[i] = at<u64>(c.peers, rank);
        masked[i] = ld_relaxed_sys_u32(c.base + c.heap.masks + 4 * rank);
        taken[i] = ld_acquire_sys_u64(word_at(c, c.base, rank, by.taken));
    }
    u64 open = 0, free = 0;
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
        u32 rank = lane + i * LANES;
        bool known = rank < EP_R;
        if (known) start.base[rank] = base[i];
        bool is_free = known && (sent <= EP_DEPTH || taken[i] >= sent - EP_DEPTH);
        open |= u64(__ballot_sync(WHOLE_WARP, known && masked[i] == 0)) << (i * LANES);
        free |= u64(__ballot_sync(WHOLE_WARP, is_free)) << (i * LANES);
    }
    if (lane == 0) {
        start.sent = sent;
        start.received = received;
        start.open = open;
        start.free = free;
        start.asked = 0;
        start.planned = 0;
        start.lost = 0;
        start.ready = 0;
    }
    if (lane < WARPS) start.told[lane] = 0;
}

// What a handle says of sources. One whole warp, another one if there is another.
__device__ __forceinline__ void begin_combine(const EpCommon &c, Start &start, u32 lane) {
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
        u32 rank = lane + i * LANES;
        if (rank >= EP_R) continue;
        start.tokens[rank] = at<u32>(c.handle + c.parts.tokens, rank);
        start.flags[rank] = at<u32>(c.handle + c.parts.flags, rank);
    }
    if (lane == 0) start.weighted = at<EpHandleHeader>(c.handle + c.parts.header).flags & EP_WEIGHTED;
}

// Tells every rank which operation this one has done with: the last that an earlier launch received. One whole warp of the
// launch.
__device__ __forceinline__ void tell_taken(const EpCommon &c, const Start &start, u32 word, u32 lane) {
    fence_acq_rel_sys();
#pragma unroll 1
    for (u32 rank = lane; rank < EP_R; rank += LANES) {
        if (start.open >> rank & 1) st_relaxed_sys_u64(word_at(c, start.base[rank], c.rank, word), start.received - 1);
    }
}

// Whether the slots at a rank that were used EP_DEPTH operations ago are free again; it may have to be waited for.
__device__ __forceinline__ bool slots_free(const EpCommon &c, const Start &start, u32 rank, u32 word, u32 stage) {
    if (start.free >> rank & 1) return true;
    return await(c, word_at(c, c.base, rank, word), start.sent - EP_DEPTH, rank, stage, start.sent);
}

// Before a block sends: waits for slots that are not free yet; those that do not become free in time stay so. One whole warp,
// after `begin`.
__device__ __forceinline__ void free_slots(const EpCommon &c, Start &start, u32 word, u32 stage, u32 lane) {
    __syncwarp();
    u64 missing = start.open & ~start.free, came = 0;
    if (missing == 0) return;
    // They may wait for the same of this rank.
    tell_taken(c, start, word, lane);
#pragma unroll 1
    for (u32 i = 0; i < EACH; ++i) {
        u32 rank = lane + i * LANES;
        bool waits = rank < EP_R && (missing >> rank & 1);
        bool is_free = waits && await(c, word_at(c, c.base, rank, word), start.sent - EP_DEPTH, rank, stage, start.sent);
        came |= u64(__ballot_sync(WHOLE_WARP, is_free)) << (i * LANES);
    }
    __syncwarp();
    if (lane == 0) start.free |= came;
}

// A warp's piece under way from shared memory to other ranks: each lane has one rank's flag, 0 for none.
struct Pending {
    u64 flag = 0;
    // Pieces so far whose flags were given to be set.
    u32 given = 0;
};

// Starts to store what is in `stage` to `to` for each lane that is a `sender`. All lanes; `settle` comes before the next.
__device__ __forceinline__ void start_sending(Pending &pending, const u8 *stage, u32 bytes, bool sender, u64 to, u64 flag,
                                              u32 lane) {
#if EP_BULK
    fence_proxy_async_shared();
    __syncwarp();
    if (sender) bulk_store_shared(to, shared_address(stage), bytes);
#else
    __syncwarp();
    for (u32 left = __ballot_sync(WHOLE_WARP, sender); left; left &= left - 1) {
        u64 target = __shfl_sync(WHOLE_WARP, to, __ffs(left) - 1);
        for (u32 byte = lane * 16; byte < bytes; byte += LANES * 16) {
            st_v16(target + byte, *reinterpret_cast<const Vec16 *>(stage + byte));
        }
    }
    __syncwarp();
#endif
    pending.flag = sender ? flag : 0;
}

// Sets the flags of all warps of the block that are ready, until none is. A fence for all that other ranks are to see is
// dear: all warps of a GPU wait for each other's. So there is one for all that is ready when it begins. All lanes.
__device__ __forceinline__ void tell_ready(Start &start, u32 lane) {
    while (true) {
        u64 ready = lane == 0 ? atom_and_acq_rel_shared_u64(start.ready, TELLING) & ~TELLING : 0;
        ready = __shfl_sync(WHOLE_WARP, ready, 0);
        // What one lane has seen is there for all.
        __syncwarp();
        if (ready == 0) {
            u32 over = lane == 0 && atom_cas_acq_rel_shared_u64(start.ready, TELLING, 0) == TELLING;
            if (__shfl_sync(WHOLE_WARP, over, 0)) return;
            continue;
        }
        fence_acq_rel_sys();
#pragma unroll 2
        for (u32 i = lane; i < WARPS * EP_K; i += LANES) {
            u64 flag = ready >> (i / EP_K) & 1 ? atomicExch(&start.untold[i / EP_K][i % EP_K], 0ull) : 0;
            if (flag) st_relaxed_sys_u64(flag, start.sent);
        }
        __syncwarp();
        if (ready >> lane & 1) atom_add_acq_rel_shared_u32(start.told[lane], 1);
        __syncwarp();
    }
}

// Waits until what is pending is there, and has its flags set, by this warp or another. All lanes.
__device__ __forceinline__ void settle(Pending &pending, Start &start, u32 lane) {
    if (__ballot_sync(WHOLE_WARP, pending.flag != 0) == 0) return;
    u32 warp = threadIdx.x / LANES;
#if EP_BULK
    if (pending.flag) bulk_wait_all();
#endif
    if (lane == 0) {
        // The last ones have been read.
        while (atom_add_acq_rel_shared_u32(start.told[warp], 0) != pending.given) pause_ns(20);
    }
    __syncwarp();
    if (lane < EP_K) atomicExch(&start.untold[warp][lane], pending.flag);
    __syncwarp();
    u32 others = lane == 0 && (atom_or_acq_rel_shared_u64(start.ready, TELLING | 1ull << warp) & TELLING);
    pending.flag = 0;
    ++pending.given;
    if (!__shfl_sync(WHOLE_WARP, others, 0)) tell_ready(start, lane);
    __syncwarp();
}

// The end of a launch: whether this is the last of its blocks; the first warp is told. Only who counts waits must have seen
// what other blocks did.
__device__ __forceinline__ bool is_last_to_end(const EpCommon &c, u64 blocks) {
    if (c.waits) return is_last_block(blocks);
    __syncthreads();
    if (threadIdx.x >= LANES) return false;
    u32 last = 1;
    if (gridDim.x > 1) {
        if (threadIdx.x == 0) {
            last = atom_add_relaxed_gpu_u64(blocks, 1) == gridDim.x - 1;
            if (last) st_relaxed_gpu_u64(blocks, 0);
        }
        last = __shfl_sync(WHOLE_WARP, last, 0);
    }
    return last;
}
