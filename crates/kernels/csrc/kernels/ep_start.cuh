// Start of a launch in the expert layout: one warp of each block loads the state that all warps need into shared
// memory, because thousands of warps that load the same words serialize.
#pragma once

#include "kernels/ep_commands.cuh"

// Of a block, in shared memory.
struct Start {
    // Epochs of the operation being sent and of the one being received.
    u64 sent;
    u64 received;
    // Bit masks of ranks: unmasked ones; those at which this rank's slots are free.
    Ranks open;
    Ranks free;
    // Those that the proxy sends to; those whose inboxes here are in the host's memory, these included. Loads of one line of
    // that memory are serialized, a microsecond each: no word of it may be read by all blocks.
    Ranks far;
    Ranks hosted;
    // Where this rank's inboxes at the ranks are (far ones: copies of them here), and the ranks' inboxes here.
    u64 to[EP_R];
    u64 from[EP_R];
    // Tokens and flags of each source. Combine: from the handle. Dispatch: as received, in the planning block; in the
    // other blocks `tokens` holds both, from the plan. `weighted` (combine): this rank's weights were sent with the
    // dispatch.
    u32 tokens[EP_R];
    u32 flags[EP_R];
    u32 weighted;
    // Dispatch: a warp of the block waits for the plan; the plan is available.
    u32 asked;
    u32 planned;
    // Planning block of a dispatch: bit mask of sources that timed out.
    Ranks lost;
    // Shared between warps by atomics, without block barriers. `ready`: warps whose pieces arrived but whose flags are
    // not set yet, and FLUSHING while a warp sets flags. `flushed`: per warp, how many times its flags were set.
    // `queued`: addresses of the flags to set.
    u64 ready;
    u32 flushed[WARPS];
    u64 queued[WARPS][EP_K];
#if EP_NODE
    // Heaps of the ranks of this node; inboxes of the ranks of this rank's number on other nodes, as their proxies write them.
    u64 via[EP_R];
#endif
};
static_assert(sizeof(Start) <= EP_START, "shared memory that the host reserves");
constexpr u64 FLUSHING = 1ull << 63;

// Shared memory after `Start`.
__device__ __forceinline__ u8 *after_start(u8 *shared) { return shared + EP_START; }

// Epoch counters and control word of a kernel.
struct EpochRefs {
    const u64 &sent;
    const u64 &received;
    u32 taken;
};

// The inbox of `rank` here if all ranks have theirs in the heap; else another one.
__device__ __forceinline__ u64 guessed_inbox(const EpCommon &c, u32 rank) {
    return c.base + c.heap.inboxes + rank * c.heap.guess_stride;
}

// The inbox here that a rank itself, or its proxy, writes.
__device__ __forceinline__ u64 inbox_of(const EpCommon &c, const Start &start, u32 rank) {
#if EP_NODE
    if (is_elsewhere(c, rank)) return start.via[rank];
#endif
    return start.from[rank];
}

// True if rows of `rank` are received here, and this rank's sums return there: both pass the same gateway.
__device__ __forceinline__ bool hears(const EpCommon &c, const Start &start, u32 rank) {
    return start.open >> rank & (NODE ? start.open >> gateway_from(c, rank) & 1 : 1);
}

// True if this rank writes to `rank`, and not only to ranks that forward its rows.
__device__ __forceinline__ bool has_link(const EpCommon &c, u32 rank) { return gateway_to(c, rank) == rank; }

// Up to which epoch this rank's slots at `rank` were free when a kernel last looked. `word`: that of the sequence.
__device__ __forceinline__ u64 taken_seen(const EpCommon &c, u32 rank, u32 word) {
    return c.base + c.heap.taken_seen + ((word - EP_WORD_DISPATCH_TAKEN) * EP_R + rank) * 8;
}

// Fills `start`, except what comes from a handle. One whole warp; a block barrier must follow.
__device__ __forceinline__ void begin(const EpCommon &c, const EpochRefs &epochs, Start &start, u32 lane) {
    // Issue all loads before using the first.
    u64 sent = ld_relaxed_gpu_u64(address_of(epochs.sent)) + 1;
    u64 received = ld_relaxed_gpu_u64(address_of(epochs.received)) + 1;
    Ranks far = far_ranks(c);
    u64 to[EACH] = {}, from[EACH] = {}, taken[EACH] = {}, seen[EACH] = {};
#if EP_NODE
    u64 via[EACH] = {};
#endif
    u32 masked[EACH] = {};
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
        u32 rank = lane + i * LANES;
        if (rank >= EP_R) continue;
        to[i] = at<u64>(c.to, rank);
        from[i] = at<u64>(c.from, rank);
#if EP_NODE
        via[i] = at<u64>(c.peers, rank);
#endif
        masked[i] = ld_relaxed_sys_u32(c.base + c.heap.masks + 4 * rank);
        taken[i] = ld_acquire_sys_u64(word_in(c, guessed_inbox(c, rank), epochs.taken));
        seen[i] = ld_acquire_gpu_u64(taken_seen(c, rank, epochs.taken));
    }
    Ranks open = 0, free = 0, hosted = 0;
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
        u32 rank = lane + i * LANES;
        bool known = rank < EP_R;
        bool is_hosted = known && (far >> rank & 1 || is_pinned(c, from[i]));
        if (known) start.to[rank] = to[i];
        if (known) start.from[rank] = from[i];
#if EP_NODE
        if (known) start.via[rank] = via[i];
        // Their gateways' slots are what counts.
        if (!has_link(c, rank)) taken[i] = sent;
#endif
        // Loaded from the heap before it was known whether the inbox is there.
        if (is_hosted) {
            taken[i] = seen[i];
        } else if (known && from[i] != guessed_inbox(c, rank)) {
            taken[i] = ld_acquire_sys_u64(word_in(c, from[i], epochs.taken));
        }
        bool is_free = known && (sent <= EP_DEPTH || taken[i] >= sent - EP_DEPTH);
        open |= RankSets::part(i, __ballot_sync(WHOLE_WARP, known && masked[i] == 0));
        free |= RankSets::part(i, __ballot_sync(WHOLE_WARP, is_free));
        hosted |= RankSets::part(i, __ballot_sync(WHOLE_WARP, is_hosted));
    }
    if (lane == 0) {
        start.sent = sent;
        start.received = received;
        start.open = open;
        start.free = free;
        start.far = far;
        start.hosted = hosted;
        start.asked = 0;
        start.planned = 0;
        start.lost = 0;
        start.ready = 0;
    }
    if (lane < WARPS) start.flushed[lane] = 0;
}

// Fills in the sources' tokens and flags from the handle. One whole warp, if possible not the one of `begin`.
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

// Releases this rank's slots: publishes to every rank the epoch of the last operation that an earlier launch received.
// One whole warp of the launch.
__device__ __forceinline__ void release_slots(const EpCommon &c, const Start &start, u32 word, u32 lane) {
    fence_acq_rel_sys();
#pragma unroll 1
    for (u32 rank = lane; rank < EP_R; rank += LANES) {
        if (!(start.open >> rank & 1) || !has_link(c, rank)) continue;
        if (start.far >> rank & 1) {
            tell_taken(c, rank, word, start.received - 1);
        } else {
            st_relaxed_sys_u64(word_in(c, start.to[rank], word), start.received - 1);
        }
    }
}

// Looks which slots at hosted ranks are free, for the next launches. One whole warp, once this rank has received: the other
// ranks have released slots before they sent.
__device__ __noinline__ void look_at_slots(const EpCommon &c, const Start &start, u32 word, u32 lane) {
#pragma unroll 1
    for (u32 rank = lane; rank < EP_R; rank += LANES) {
        if (!((start.hosted & start.open) >> rank & 1)) continue;
        u64 inbox = inbox_of(c, start, rank);
        atomicMax(&at<u64>(taken_seen(c, rank, word)), ld_acquire_sys_u64(word_in(c, inbox, word)));
    }
    __syncwarp();
}

// Waits in place of all blocks for the slots at hosted ranks that are not known to be free, if this is the first
// warp of the launch that needs them: the others poll this rank's own memory. Not a certain block's, which may start
// only when others have ended. One whole warp; `released`: it has released slots.
__device__ __noinline__ void watch_slots(const EpCommon &c, const Start &start, u32 word, u32 stage, bool released, u32 lane) {
    u64 epoch = start.sent - EP_DEPTH;
    // A rank is never far from itself: its own entry is the newest launch that watches.
    u32 first = lane == 0 && atomicMax(&at<u64>(taken_seen(c, c.rank, word)), start.sent) < start.sent;
    if (!__shfl_sync(WHOLE_WARP, first, 0)) return;
    if (!released) release_slots(c, start, word, lane);
#pragma unroll 1
    for (u32 rank = lane; rank < EP_R; rank += LANES) {
        if (!((start.hosted & start.open & ~start.free) >> rank & 1)) continue;
        u64 seen = taken_seen(c, rank, word);
        bool free = await(c, word_in(c, inbox_of(c, start, rank), word), epoch, rank, stage, start.sent);
        if (free) atomicMax(&at<u64>(seen), epoch);
    }
    __syncwarp();
}

// The slow part of `slots_free`.
__device__ __noinline__ bool await_slots(const EpCommon &c, const Start &start, u32 rank, u32 word, u32 stage) {
    bool hosted = start.hosted >> rank & 1;
    u64 place = hosted ? taken_seen(c, rank, word) : word_in(c, start.from[rank], word);
    return await(c, place, start.sent - EP_DEPTH, rank, stage, start.sent);
}

// Waits until the slots used EP_DEPTH operations ago at a rank are free; false if the rank is masked first.
__device__ __forceinline__ bool slots_free(const EpCommon &c, const Start &start, u32 rank, u32 word, u32 stage) {
    return start.free >> rank & 1 || await_slots(c, start, rank, word, stage);
}

// Before a block sends: waits for slots that are not free yet. Those of a rank that times out stay marked as not free.
// One whole warp, after `begin`.
__device__ __forceinline__ void free_slots(const EpCommon &c, Start &start, u32 word, u32 stage, u32 lane) {
    __syncwarp();
    Ranks missing = start.open & ~start.free, came = 0;
    if (missing == 0) return;
    // Avoids deadlock: those ranks may in turn wait for this rank's release.
    bool releases = static_cast<bool>(missing & ~start.hosted);
    if (releases) release_slots(c, start, word, lane);
    if (missing & start.hosted) watch_slots(c, start, word, stage, releases, lane);
#pragma unroll 1
    for (u32 i = 0; i < EACH; ++i) {
        u32 rank = lane + i * LANES;
        bool waits = rank < EP_R && (missing >> rank & 1);
        bool is_free = waits && await_slots(c, start, rank, word, stage);
        came |= RankSets::part(i, __ballot_sync(WHOLE_WARP, is_free));
    }
    __syncwarp();
    if (lane == 0) start.free |= came;
}

// A warp's piece in flight from shared memory to other ranks: each lane holds one rank's flag address, 0 for none.
struct Pending {
    u64 flag = 0;
    // Number of pieces whose flags were queued so far.
    u32 given = 0;
};

// Starts to store `stage` to `to` for each lane that is a `sender`. All lanes; call `await_pending` before the next.
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

// The epoch of flags: a launch that only receives forwards what it receives.
__device__ __forceinline__ u64 flag_epoch(const EpCommon &c, const Start &start) {
    return NODE && !(c.phases & EP_SEND) ? start.received : start.sent;
}

// Sets the flags of all ready warps of the block, until none is left. A system fence is expensive, because fences of
// all warps of a GPU serialize, so one fence covers everything ready when it starts. All lanes.
__device__ __forceinline__ void flush_flags(const EpCommon &c, Start &start, u32 lane) {
    while (true) {
        u64 ready = lane == 0 ? atom_and_acq_rel_shared_u64(start.ready, FLUSHING) & ~FLUSHING : 0;
        ready = __shfl_sync(WHOLE_WARP, ready, 0);
        // Makes what the first lane acquired visible to all lanes.
        __syncwarp();
        if (ready == 0) {
            u32 over = lane == 0 && atom_cas_acq_rel_shared_u64(start.ready, FLUSHING, 0) == FLUSHING;
            if (__shfl_sync(WHOLE_WARP, over, 0)) return;
            continue;
        }
        fence_acq_rel_sys();
#pragma unroll 2
        for (u32 i = lane; i < WARPS * EP_K; i += LANES) {
            u64 flag = ready >> (i / EP_K) & 1 ? atomicExch(&start.queued[i / EP_K][i % EP_K], 0ull) : 0;
            if (flag) set_flag(c, flag, flag_epoch(c, start));
        }
        __syncwarp();
        if (ready >> lane & 1) atom_add_acq_rel_shared_u32(start.flushed[lane], 1);
        __syncwarp();
    }
}

// Waits until the pending piece has arrived, and queues its flags, which this warp or another sets. All lanes.
__device__ __forceinline__ void await_pending(const EpCommon &c, Pending &pending, Start &start, u32 lane) {
    if (__ballot_sync(WHOLE_WARP, pending.flag != 0) == 0) return;
    u32 warp = threadIdx.x / LANES;
#if EP_BULK
    if (pending.flag) bulk_wait_all();
#endif
    if (lane == 0) {
        // Wait until the previous piece's flags are set, so that `queued` may be overwritten.
        while (atom_add_acq_rel_shared_u32(start.flushed[warp], 0) != pending.given) pause_ns(20);
    }
    __syncwarp();
    if (lane < EP_K) atomicExch(&start.queued[warp][lane], pending.flag);
    __syncwarp();
    u32 others = lane == 0 && (atom_or_acq_rel_shared_u64(start.ready, FLUSHING | 1ull << warp) & FLUSHING);
    pending.flag = 0;
    ++pending.given;
    if (!__shfl_sync(WHOLE_WARP, others, 0)) flush_flags(c, start, lane);
    __syncwarp();
}

// Whether this is the last block of the launch to end; the result is valid in the first warp. Orders other blocks'
// writes only if waits are counted.
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
