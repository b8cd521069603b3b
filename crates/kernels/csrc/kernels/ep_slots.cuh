// Dispatch in the rank layout for few tokens, like the expert layout: rows are sent at once to the slot that each
// source has at every rank, with a flag for each piece, in parallel with the selections. They are then copied to their
// place in the result. That saves a round trip, since senders need not wait for destinations.
//
//     a source:   ids  ->  at each rank a word for each selection: the number of its expert there + 1, or 0
//     here:       words  ->  a bit for each token that has one  ->  how many before it  ->  rows, by source and token
//
// One block decides for all blocks which ranks timed out. A dispatch that repeats a routing takes the rows from its
// handle.
#pragma once

#include "kernels/ep_dispatch.cuh"

// Shared memory of the planning block. For each 32 tokens of a source: a mask of those with a row here, and the first
// row; then selections of each expert, and the end of all rows.
struct SlotPlan {
    u32 *votes;
    u32 *bases;
    u32 *experts;
    u32 tiles;
    u32 units;

    __device__ __forceinline__ SlotPlan(const EpCommon &c, u8 *memory) {
        tiles = (c.max_tokens + LANES - 1) / LANES;
        units = tiles * EP_R;
        votes = reinterpret_cast<u32 *>(memory);
        bases = votes + units;
        experts = bases + units + 1;
    }
};

// Reads each source's token count from its table word.
__device__ __forceinline__ void read_sources(const EpDispatchArgs &args, Start &start) {
    const EpCommon &c = args.common;
    u64 epoch = start.received;
#pragma unroll 1
    for (u32 rank = threadIdx.x; rank < EP_R; rank += EP_THREADS) {
        u64 word = word_in(c, start.from[rank], EP_WORD_TABLE + epoch % EP_DEPTH);
        u64 seen = is_masked(c, rank) ? 0 : await_tagged(c, word, rank, EP_STAGE_TABLE, epoch);
        u32 said = is_tagged(seen, epoch) ? static_cast<u32>(seen) : 0, tokens = said & SOURCE_TOKENS;
        if (!is_tagged(seen, epoch)) share_rank(start.lost, rank);
        start.flags[rank] = said >> SOURCE_FLAGS;
        if (tokens > c.max_tokens) tokens = c.max_tokens;
        start.tokens[rank] = tokens_of(args, rank, tokens, start.flags[rank]);
        said = start.flags[rank] << SOURCE_FLAGS | start.tokens[rank];
        st_relaxed_gpu_u64(c.base + c.heap.plan_tokens + 8 * rank, tagged(epoch, said));
    }
}

// Notes which tokens have rows here, and counts selections; those of `lost` sources are none. All warps, one tile at a time.
__device__ __forceinline__ void vote(const EpDispatchArgs &args, Start &start, const SlotPlan &plan, Ranks lost, u32 lane) {
    const EpCommon &c = args.common;
    u64 epoch = start.received;
#pragma unroll 1
    for (u32 unit = threadIdx.x / LANES; unit < plan.units; unit += WARPS) {
        u32 source = unit / plan.tiles, token = unit % plan.tiles * LANES + lane;
        bool here = token < start.tokens[source] && !(lost >> source & 1), any = false;
        u64 words = start.from[source] + c.heap.tables + parity_of(epoch) * c.heap.table_stride + u64(token) * EP_K * 8;
        constexpr u32 AT_ONCE = EP_K < 8 ? EP_K : 8;
#pragma unroll 1
        for (u32 first = 0; here && first < EP_K; first += AT_ONCE) {
            u64 seen[AT_ONCE];
#pragma unroll
            for (u32 k = 0; k < AT_ONCE; ++k) {
                seen[k] = first + k < EP_K ? ld_relaxed_sys_u64(words + 8 * (first + k)) : tagged(epoch, 0);
            }
#pragma unroll
            for (u32 k = 0; k < AT_ONCE; ++k) {
                if (!is_tagged(seen[k], epoch)) {
                    seen[k] = await_tagged(c, words + 8 * (first + k), source, EP_STAGE_TABLE, epoch);
                    // All or nothing: if one selection of a source is missing, the source is lost.
                    if (!is_tagged(seen[k], epoch)) share_rank(start.lost, source);
                }
                u32 expert = is_tagged(seen[k], epoch) ? static_cast<u32>(seen[k]) - 1 : EP_NOWHERE;
                // Untrusted input of another rank: bounds-check it.
                if (expert >= LOCAL) continue;
                any = true;
                atomicAdd(&plan.experts[expert], 1u);
            }
        }
        u32 votes = __ballot_sync(WHOLE_WARP, any);
        if (lane == 0) plan.votes[unit] = votes;
    }
}

// The first row of each tile, and the end. One warp.
__device__ __forceinline__ void number_tiles(const SlotPlan &plan, u32 lane) {
    u32 before = 0;
    for (u32 first = 0; first < plan.units; first += LANES) {
        u32 unit = first + lane, own = unit < plan.units ? __popc(plan.votes[unit]) : 0, sum = own;
#pragma unroll
        for (u32 step = 1; step < LANES; step *= 2) {
            u32 other = __shfl_up_sync(WHOLE_WARP, sum, step);
            if (lane >= step) sum += other;
        }
        if (unit < plan.units) plan.bases[unit] = before + sum - own;
        before += __shfl_sync(WHOLE_WARP, sum, LANES - 1);
    }
    if (lane == 0) plan.bases[plan.units] = before;
}

// Publishes each token's row to the delivering warps, and records it in the handle for the combine.
__device__ __forceinline__ void publish_rows(const EpDispatchArgs &args, const Start &start, const SlotPlan &plan, u32 lane) {
    const EpCommon &c = args.common;
#pragma unroll 1
    for (u32 unit = threadIdx.x / LANES; unit < plan.units; unit += WARPS) {
        u32 source = unit / plan.tiles, token = unit % plan.tiles * LANES + lane, votes = plan.votes[unit];
        u32 row = votes >> lane & 1 ? plan.bases[unit] + __popc(votes & ((1u << lane) - 1)) : EP_NOWHERE;
        if (token >= start.tokens[source]) continue;
        u64 place = u64(source) * c.max_tokens + token;
        st_relaxed_gpu_u64(c.base + c.heap.plan_rows + 8 * place, tagged(start.received, row));
        at<u32>(c.handle + c.parts.routes, place) = row;
        // For the host's handle.
        if (row != EP_NOWHERE) at<u32>(c.handle + c.parts.source, row) = token;
    }
    for (u32 rank = threadIdx.x; rank <= EP_R; rank += EP_THREADS) {
        at<u32>(c.handle + c.parts.offsets, rank) = plan.bases[rank * plan.tiles];
        if (rank == EP_R) break;
        bool came = !(start.lost >> rank & 1);
        at<u32>(c.handle + c.parts.tokens, rank) = came ? start.tokens[rank] : 0;
        at<u32>(c.handle + c.parts.flags, rank) = came ? start.flags[rank] : 0;
    }
}

// Writes the row counts for the caller and for its host.
__device__ __forceinline__ void report_counts(const EpDispatchArgs &args, const Start &start, const SlotPlan &plan) {
    const EpCommon &c = args.common;
    u64 epoch = start.received;
    u32 alignment = args.expert_alignment == 0 ? 1 : args.expert_alignment;
    for (u32 expert = threadIdx.x; !args.cached && expert < LOCAL; expert += EP_THREADS) {
        u32 sum = plan.experts[expert];
        if (args.stats != 0) at<u32>(args.stats, expert) += sum;
        sum = (sum + alignment - 1) / alignment * alignment;
        if (args.out_counts != 0) at<u32>(args.out_counts, expert) = sum;
        if (args.count_host != 0) at<u32>(args.count_host, expert) = sum;
    }
    for (u32 rank = threadIdx.x; args.out_offsets != 0 && rank <= EP_R; rank += EP_THREADS) {
        at<u64>(args.out_offsets, rank) = at<u32>(c.handle + c.parts.offsets, rank);
    }
    for (u32 rank = threadIdx.x; args.host_words != 0 && rank < EP_R; rank += EP_THREADS) {
        u64 word = word_in(c, start.from[rank], EP_WORD_ANNOUNCE + epoch % EP_DEPTH);
        bool came = !(start.lost >> rank & 1);
        u64 seen = came ? await_tagged(c, word, rank, EP_STAGE_ANNOUNCE, epoch) : 0;
        at<u32>(args.host_words, rank) = is_tagged(seen, epoch) ? static_cast<u32>(seen) : EP_NO_REPORT;
    }
    __syncthreads();
    u32 rows = at<u32>(c.handle + c.parts.offsets, EP_R);
    if (threadIdx.x == 0 && args.count_word != 0) st_release_sys_u64(args.count_word, tagged(epoch, rows));
    if (threadIdx.x == 0 && args.max_rows != 0 && rows > args.max_rows) {
        report_fault(c, c.rank, EP_STAGE_ROOM, epoch, rows);
    }
    if (args.cached) return;
    // Rows behind the last that came have no experts.
    u64 most = u64(EP_R) * c.max_tokens, end = (args.max_rows < most ? args.max_rows : most) * EP_K;
    u64 idx = own_region(args) + c.heap.region_idx;
    for (u64 i = u64(rows) * EP_K + threadIdx.x; i < end; i += EP_THREADS) at<u64>(idx, i) = ~0ull;
}

// Waits for all ranks' selections, and publishes rows and counts. The whole first block.
__device__ __forceinline__ void plan_slots(const EpDispatchArgs &args, Start &start, u8 *memory) {
    u32 lane = threadIdx.x % LANES;
    SlotPlan plan(args.common, memory);
    // Shared memory is reused: no warp sends from it any more.
    __syncthreads();
    read_sources(args, start);
    __syncthreads();
    if (!args.cached) {
        Ranks lost = start.lost;
        while (true) {
            for (u32 i = threadIdx.x; i < LOCAL; i += EP_THREADS) plan.experts[i] = 0;
            __syncthreads();
            vote(args, start, plan, lost, lane);
            __syncthreads();
            if (start.lost == lost) break;
            // Start over without the sources that timed out.
            lost = start.lost;
            __syncthreads();
        }
        if (threadIdx.x < LANES) number_tiles(plan, lane);
        __syncthreads();
        mark_of(0, args.marks, EP_MARK_HEARD);
        publish_rows(args, start, plan, lane);
    }
    __syncthreads();
    report_counts(args, start, plan);
    __syncthreads();
}
