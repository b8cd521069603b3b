// The plan of a dispatch in the expert layout, by the first block: which of this rank's rows is which of its expert, and
// where the rows of each source begin.
//
//     selections:  | warp 0's        | warp 1's        | ...        each warp counts its own, by expert
//     counts:      [warp][expert]  ->  how many before it           and numbers them, in the order of tokens
//
// Duplicates of an expert in one token are not allowed, so a place is less than M.
#pragma once

#include "kernels/ep_start.cuh"

using u16 = unsigned short;

// Where an entry has its expert.
constexpr u32 ENTRY_EXPERT = 20;

// The shared memory of the block.
struct PlanShared {
    u64 *base;
    u16 *counts;

    __device__ __forceinline__ explicit PlanShared(u8 *shared)
        : base(reinterpret_cast<u64 *>(shared)), counts(reinterpret_cast<u16 *>(shared + EP_PLAN_BASES)) {}
};

// Ranks that may be written to, in shared memory: 0 for the others.
__device__ __forceinline__ void open_tables(const EpCommon &c, const Start &start, PlanShared shared) {
    for (u32 rank = threadIdx.x; rank < EP_R; rank += EP_THREADS) {
        bool open = start.open >> rank & 1;
        open = open && slots_free(c, start, rank, EP_WORD_DISPATCH_TAKEN, EP_STAGE_DISPATCH_TAKEN);
        shared.base[rank] = open ? start.base[rank] : 0;
    }
}

// One walk of a warp over its selections, in order. `visit` gets the selection, its expert (-1: none), and the number of
// the expert's selections before it, of those that the warp's counts say.
template <typename Visit>
__device__ __forceinline__ void walk(const EpDispatchArgs &args, PlanShared shared, u32 warp, u32 lane, Visit visit) {
    u64 all = u64(args.common.tokens) * EP_K;
    u64 part = (all + EP_PLAN_WARPS * LANES - 1) / (EP_PLAN_WARPS * LANES) * LANES;
    u64 end = part * (warp + 1) < all ? part * (warp + 1) : all;
    u16 *counts = shared.counts + warp * EP_E;
    auto load = [&](u64 i) { return i < end ? expert_at(args, i) : -1; };
    int ahead = load(part * warp + lane);
    for (u64 first = part * warp; first < end; first += LANES) {
        u64 i = first + lane;
        int expert = ahead;
        ahead = load(i + LANES);
        if (expert >= 0 && shared.base[expert / LOCAL] == 0) expert = -1;
        u32 alike = __match_any_sync(WHOLE_WARP, expert);
        u32 before = alike & ((1u << lane) - 1);
        u32 count = expert >= 0 ? counts[expert] : 0;
        if (i < end) visit(i, expert, count + __popc(before));
        __syncwarp();
        if (expert >= 0 && before == 0) counts[expert] = static_cast<u16>(count + __popc(alike));
        __syncwarp();
    }
}

// Writes one selection into every rank's table, and into the handle.
__device__ __forceinline__ void write_entry(const EpDispatchArgs &args, PlanShared shared, u64 slot, u64 i, int expert,
                                            u32 place) {
    const EpCommon &c = args.common;
    u32 home = expert >= 0 ? expert / LOCAL : EP_R;
    at<int>(c.handle + c.parts.sent, i) = expert;
    float weight = args.topk_weights ? at<float>(args.topk_weights, i) : 0.0f;
    if (args.topk_weights) at<float>(c.handle + c.parts.sent_weights, i) = weight;
    for (u32 rank = 0; rank < EP_R; ++rank) {
        u64 base = shared.base[rank];
        if (base == 0) continue;
        u64 table = base + c.heap.tables + slot * c.heap.table_stride;
        u32 entry = home == rank ? (expert % LOCAL + 1) << ENTRY_EXPERT | place : 0;
        at<u32>(table + c.heap.table_entries, i) = entry;
        if (entry && args.topk_weights) at<float>(table + c.heap.table_weights, i) = weight;
    }
}

// Numbers this rank's selections, and tells every rank. The whole first block.
__device__ __forceinline__ void announce_tables(const EpDispatchArgs &args, const Start &start, u8 *memory) {
    const EpCommon &c = args.common;
    PlanShared shared(memory);
    u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    u64 epoch = start.sent, slot = slot_of(epoch, c.rank);
    open_tables(c, start, shared);
    for (u32 i = threadIdx.x; i < EP_PLAN_WARPS * EP_E; i += EP_THREADS) shared.counts[i] = 0;
    __syncthreads();
    if (warp < EP_PLAN_WARPS) {
        walk(args, shared, warp, lane, [&](u64 i, int, u32) {
            if (args.topk_weights && lane == 0) prefetch_l2(args.topk_weights + 4 * i);
        });
    }
    __syncthreads();
    for (u32 expert = threadIdx.x; expert < EP_E; expert += EP_THREADS) {
        u32 sum = 0;
#pragma unroll 8
        for (u32 i = 0; i < EP_PLAN_WARPS; ++i) {
            u16 &count = shared.counts[i * EP_E + expert];
            u32 own = count;
            count = static_cast<u16>(sum);
            sum += own;
        }
        u64 base = shared.base[expert / LOCAL];
        u64 counts = base + c.heap.tables + slot * c.heap.table_stride + sizeof(EpTableHeader);
        if (base) at<u32>(counts, expert % LOCAL) = sum;
    }
    __syncthreads();
    u32 flags = args.topk_weights ? EP_WEIGHTED : 0;
    if (warp < EP_PLAN_WARPS) {
        walk(args, shared, warp, lane,
             [&](u64 i, int expert, u32 place) { write_entry(args, shared, slot, i, expert, place); });
    }
    if (threadIdx.x == 0) at<EpHandleHeader>(c.handle + c.parts.header) = EpHandleHeader{epoch, c.tokens, flags};
    __syncthreads();
    for (u32 rank = threadIdx.x; rank < EP_R; rank += EP_THREADS) {
        u64 base = shared.base[rank];
        if (base == 0) continue;
        at<EpTableHeader>(base + c.heap.tables + slot * c.heap.table_stride) = EpTableHeader{c.tokens, flags, epoch};
        st_release_sys_u64(word_at(c, base, c.rank, EP_WORD_TABLE + epoch % EP_DEPTH), epoch);
    }
}

// Waits for the tables of all ranks, and says where their rows go. The whole first block. It alone decides who came in
// time, as all blocks must agree.
__device__ __forceinline__ void plan_rows(const EpDispatchArgs &args, u8 *memory, u64 epoch) {
    const EpCommon &c = args.common;
    PlanShared shared(memory);
    __syncthreads();
    for (u32 rank = threadIdx.x; rank < EP_R; rank += EP_THREADS) {
        u64 word = word_at(c, c.base, rank, EP_WORD_TABLE + epoch % EP_DEPTH);
        bool came = !is_masked(c, rank) && await(c, word, epoch, rank, EP_STAGE_TABLE, epoch);
        u64 table = c.base + c.heap.tables + slot_of(epoch, rank) * c.heap.table_stride;
        u32 tokens = came ? at<EpTableHeader>(table).tokens : 0;
        if (tokens > c.max_tokens) tokens = c.max_tokens;
        at<u32>(c.handle + c.parts.tokens, rank) = tokens;
        at<u32>(c.handle + c.parts.flags, rank) = came ? at<EpTableHeader>(table).flags : 0;
        shared.base[rank] = came ? table : 0;
        st_release_gpu_u64(c.base + c.heap.plan_tokens + 8 * rank, tagged(epoch, tokens));
    }
    __syncthreads();
    for (u32 expert = threadIdx.x; expert < LOCAL; expert += EP_THREADS) {
        u32 sum = 0;
#pragma unroll 4
        for (u32 source = 0; source < EP_R; ++source) {
            u64 table = shared.base[source];
            u32 count = table ? at<u32>(table + sizeof(EpTableHeader), expert) : 0;
            u64 entry = expert * EP_R + source;
            st_relaxed_gpu_u64(c.base + c.heap.plan_offsets + 8 * entry, tagged(epoch, sum));
            at<u64>(args.out_ranges, entry) = u64(sum) << 32 | count;
            sum += count;
        }
        at<u32>(args.out_counts, expert) = sum;
        if (args.stats) at<u32>(args.stats, expert) += sum;
    }
}
