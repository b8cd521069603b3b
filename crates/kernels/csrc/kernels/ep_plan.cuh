// The plan of a dispatch in the expert layout: the row of each selection.
//
//     a source:   ids  ->  at each rank a word for each selection: the number of its expert there + 1, or 0
//     here:       words:   | part | part | ...  a source's parts, one source after the other
//                 counts:  [part][expert]  ->  how many rows before it  ->  rows, in the order of sources and tokens
//
// Each word carries the epoch, so that its reader needs neither a fence nor a flag: words are sent before the first rows,
// behind which they would otherwise queue. The first block of each rank numbers the rows it receives; row numbers are such
// words, too, for the warps that deliver rows.
#pragma once

#include "kernels/ep_start.cuh"

// Unsigned integer type of `BYTES` bytes.
template <u32 BYTES>
struct Number {
    using Type = u32;
};
template <>
struct Number<2> {
    using Type = unsigned short;
};

// Bit position of the flags in a source's table word; the token count is below it.
constexpr u32 SOURCE_FLAGS = 24;
constexpr u32 SOURCE_TOKENS = (1u << SOURCE_FLAGS) - 1;
// Parts of all sources' selections.
constexpr u32 PARTS_PLANNED = EP_R * EP_PLAN_PARTS;
// Whether prefix sums run across all sources (4-byte counts) or restart for each source. With more experts, whose
// 4-byte counts do not fit, 2 bytes suffice: a source has at most as many rows of an expert as tokens.
constexpr bool ACROSS = EP_PLAN_COUNT == 4;
using Count = Number<EP_PLAN_COUNT>::Type;
// Loads in flight per lane.
constexpr u32 WORDS = 8;

// The tokens of a source that announces `tokens`. Slots: of a source that repeats a routing, while this rank does not, none; if
// this rank does, those of the handle.
__device__ __forceinline__ u32 tokens_of(const EpDispatchArgs &args, u32 source, u32 tokens, u32 flags) {
    if (SLOTS && (flags & EP_CACHED)) tokens = 0;
    if (SLOTS && args.cached) tokens = at<u32>(args.common.handle + args.common.parts.tokens, source);
    return tokens;
}

// A thread's first selection of this rank's tokens, loaded before its destination is known and not used until then.
struct OwnSelection {
    long long id = -1;
    float weight = 0.0f;

    __device__ __forceinline__ OwnSelection(const EpDispatchArgs &args, bool sends) {
        u64 i = u64(blockIdx.x) * EP_THREADS + threadIdx.x;
        if (sends && i < u64(args.common.tokens) * EP_K && !(SLOTS && args.cached)) read(args, i);
    }

    __device__ __forceinline__ void read(const EpDispatchArgs &args, u64 i) {
        id = id_at(args, i);
        if (args.topk_weights) weight = at<float>(args.topk_weights, i);
    }
};

// Whether a rank may be written to.
__device__ __forceinline__ bool takes_rows(const Start &start, u32 rank) { return (start.open & start.free) >> rank & 1; }

// The number of an expert in words to its home, or to the rank that forwards them.
__device__ __forceinline__ u32 number_of(const EpCommon &c, int expert) {
    if (is_elsewhere(c, expert / LOCAL)) return expert % (LOCAL * NODE_RANKS) + 1;
    return expert % LOCAL + 1;
}

// Announces the words that this block has written for far ranks: of every `gridDim.x * EP_THREADS` selections EP_THREADS.
// All threads.
__device__ __noinline__ void send_far_selections(const EpDispatchArgs &args, const Start &start, u64 count, u64 table) {
    __syncthreads();
    if (threadIdx.x >= LANES) return;
    fence_acq_rel_sys();
    const EpCommon &c = args.common;
    u64 step = u64(gridDim.x) * EP_THREADS;
#pragma unroll 1
    for (u64 first = u64(blockIdx.x) * EP_THREADS; first < count; first += step) {
        u32 bytes = static_cast<u32>(count - first < EP_THREADS ? count - first : EP_THREADS) * 8;
#pragma unroll 1
        for (u32 rank = threadIdx.x; rank < EP_R; rank += LANES) {
            if (!(start.far >> rank & 1) || !takes_rows(start, rank)) continue;
            u64 at = table + 8 * first;
            append_range(c, EP_COMMAND_TABLE, rank, start.sent, range_number(at, bytes));
            if (!args.topk_weights) continue;
            append_range(c, EP_COMMAND_TABLE, rank, start.sent, range_number(at + c.heap.table_weights, bytes));
        }
    }
    __syncwarp();
}

// Sends every rank the selections of its experts by this rank's tokens. All blocks.
__device__ __forceinline__ void send_selections(const EpDispatchArgs &args, const Start &start, OwnSelection own) {
    const EpCommon &c = args.common;
    u64 epoch = start.sent, table = c.heap.tables + parity_of(epoch) * c.heap.table_stride;
    u64 count = u64(c.tokens) * EP_K, step = u64(gridDim.x) * EP_THREADS;
    u64 first = u64(blockIdx.x) * EP_THREADS + threadIdx.x;
#pragma unroll 1
    for (u64 i = first; i < count && !(SLOTS && args.cached); i += step) {
        if (i != first) own.read(args, i);
        int expert = expert_of(own.id);
        u32 home = expert >= 0 ? expert / LOCAL : EP_R;
        bool goes = false;
        // Start at a different rank on each sender, to spread the load.
#pragma unroll 1
        for (u32 turn = 1; turn <= EP_R; ++turn) {
            u32 rank = (c.rank + turn) % EP_R;
            if (!takes_rows(start, rank) || !has_link(c, rank)) continue;
            u64 word = start.to[rank] + table + 8 * i;
#if EP_NODE
            bool there = expert >= 0 && gateway_to(c, home) == rank && (start.open >> home & 1);
#else
            bool there = home == rank;
#endif
            // The proxy of a far rank sets the tags.
            u64 tag = start.far >> rank & 1 ? 0 : tagged(epoch, 0);
            st_relaxed_sys_u64(word, tag | (there ? number_of(c, expert) : 0));
            if (!there) continue;
            goes = true;
            u32 weight = __float_as_uint(own.weight);
            if (args.topk_weights) st_relaxed_sys_u64(word + c.heap.table_weights, tag | weight);
        }
        at<int>(c.handle + c.parts.sent, i) = goes ? expert : -1;
        if (args.topk_weights) at<float>(c.handle + c.parts.sent_weights, i) = own.weight;
    }
    if ((start.far & start.open & start.free) && !(SLOTS && args.cached)) send_far_selections(args, start, count, table);
    if (blockIdx.x != 0) return;
    u32 flags = args.topk_weights ? EP_WEIGHTED : 0;
    if (SLOTS && args.cached) flags = EP_CACHED;
#pragma unroll 1
    for (u32 rank = threadIdx.x; rank < EP_R; rank += EP_THREADS) {
        if (!takes_rows(start, rank) || !has_link(c, rank)) continue;
        if (start.far >> rank & 1) {
            if (SLOTS) tell_word(c, rank, EP_WORD_ANNOUNCE + parity_of(epoch), epoch, args.host_word);
            tell_word(c, rank, EP_WORD_TABLE + parity_of(epoch), epoch, flags << SOURCE_FLAGS | c.tokens);
            continue;
        }
        if (SLOTS) {
            u64 word = word_in(c, start.to[rank], EP_WORD_ANNOUNCE + epoch % EP_DEPTH);
            st_relaxed_sys_u64(word, tagged(epoch, args.host_word));
        }
        u64 word = word_in(c, start.to[rank], EP_WORD_TABLE + epoch % EP_DEPTH);
        st_relaxed_sys_u64(word, tagged(epoch, flags << SOURCE_FLAGS | c.tokens));
    }
    if (SLOTS && args.cached) return;
    if (threadIdx.x == 0) at<EpHandleHeader>(c.handle + c.parts.header) = EpHandleHeader{epoch, c.tokens, flags};
}

// Traverses a part in order with one warp: waits for its words, and counts selections; a `lost` source counts as having
// none. `visit` gets the source, the selection's index within the source, its local expert (EP_NOWHERE: none), and the
// expert's count before this selection.
template <typename Visit>
__device__ __forceinline__ void walk(const EpCommon &c, Start &start, Count *counts, u32 part, bool lost, u32 lane,
                                     Visit visit) {
    u64 epoch = start.received;
    u32 source = part / EP_PLAN_PARTS;
    u32 all = start.tokens[source] * EP_K;
    u32 length = (all + EP_PLAN_PARTS * LANES - 1) / (EP_PLAN_PARTS * LANES) * LANES;
    u32 begin = length * (part % EP_PLAN_PARTS), end = begin + length < all ? begin + length : all;
    u64 table = start.from[source] + c.heap.tables + parity_of(epoch) * c.heap.table_stride;
    counts += part * LOCAL;
    for (u32 batch = begin; batch < end; batch += WORDS * LANES) {
        u64 word[WORDS];
#pragma unroll
        for (u32 w = 0; w < WORDS; ++w) {
            u32 i = batch + w * LANES + lane;
            word[w] = i < end ? ld_relaxed_sys_u64(table + 8ull * i) : tagged(epoch, 0);
        }
#pragma unroll 1
        for (u32 from = batch; from < end && from < batch + WORDS * LANES; from += LANES) {
            u32 i = from + lane;
            u64 seen = word[0];
#pragma unroll
            for (u32 w = 1; w < WORDS; ++w) word[w - 1] = word[w];
            if (!lost && !is_tagged(seen, epoch)) {
                seen = await_tagged(c, table + 8ull * i, source, EP_STAGE_TABLE, epoch);
                // All or nothing: if one selection of a source is missing, the source is lost.
                if (!is_tagged(seen, epoch)) share_rank(start.lost, source);
            }
            __syncwarp();
            // Untrusted input of another rank: bounds-check it.
            u32 expert = !lost && is_tagged(seen, epoch) ? static_cast<u32>(seen) - 1 : EP_NOWHERE;
            if (expert >= LOCAL) expert = EP_NOWHERE;
            u32 alike = __match_any_sync(WHOLE_WARP, expert);
            u32 before = alike & ((1u << lane) - 1);
            u32 count = expert != EP_NOWHERE ? counts[expert] : 0;
            if (i < end) visit(source, i, expert, count + __popc(before));
            __syncwarp();
            if (expert != EP_NOWHERE && before == 0) counts[expert] = static_cast<Count>(count + __popc(alike));
            __syncwarp();
        }
    }
}

// Drops lost sources, turns the parts' counts into exclusive prefix sums, and writes ranges and counts. The whole
// block.
__device__ __forceinline__ void add_up(const EpDispatchArgs &args, const Start &start, Count *counts) {
    const EpCommon &c = args.common;
#pragma unroll 1
    for (u32 rank = threadIdx.x; rank < EP_R; rank += EP_THREADS) {
        bool came = !(start.lost >> rank & 1);
        at<u32>(c.handle + c.parts.tokens, rank) = came ? start.tokens[rank] : 0;
        at<u32>(c.handle + c.parts.flags, rank) = came ? start.flags[rank] : 0;
    }
#pragma unroll 1
    for (u32 expert = threadIdx.x; expert < LOCAL; expert += EP_THREADS) {
        u32 sum = 0;
#pragma unroll 1
        for (u32 source = 0; source < EP_R; ++source) {
            u32 first = sum;
            bool came = !(start.lost >> source & 1);
#pragma unroll
            for (u32 part = 0; part < EP_PLAN_PARTS; ++part) {
                Count &count = counts[(source * EP_PLAN_PARTS + part) * LOCAL + expert];
                u32 own = came ? count : 0;
                count = static_cast<Count>(ACROSS ? sum : sum - first);
                sum += own;
            }
            at<u64>(args.out_ranges, u64(expert) * EP_R + source) = u64(first) << 32 | (sum - first);
        }
        at<u32>(args.out_counts, expert) = sum;
        if (args.stats) at<u32>(args.stats, expert) += sum;
    }
}

// Waits for all ranks' selections, and publishes their rows. The whole first block, which alone decides which ranks
// timed out, so that all blocks agree.
__device__ __forceinline__ void plan_rows(const EpDispatchArgs &args, Start &start, u8 *memory) {
    const EpCommon &c = args.common;
    Count *counts = reinterpret_cast<Count *>(memory);
    u64 epoch = start.received;
    u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    // Shared memory is reused: no warp sends from it any more.
    __syncthreads();
#pragma unroll 1
    for (u32 rank = threadIdx.x; rank < EP_R; rank += EP_THREADS) {
        u64 word = word_in(c, start.from[rank], EP_WORD_TABLE + epoch % EP_DEPTH);
        u64 seen = is_masked(c, rank) ? 0 : await_tagged(c, word, rank, EP_STAGE_TABLE, epoch);
        u32 said = is_tagged(seen, epoch) ? static_cast<u32>(seen) : 0, tokens = said & SOURCE_TOKENS;
        start.tokens[rank] = tokens < c.max_tokens ? tokens : c.max_tokens;
        start.flags[rank] = said >> SOURCE_FLAGS;
        said = start.flags[rank] << SOURCE_FLAGS | start.tokens[rank];
        st_relaxed_gpu_u64(c.base + c.heap.plan_tokens + 8 * rank, tagged(epoch, said));
    }
#pragma unroll 1
    for (u32 i = threadIdx.x; i < PARTS_PLANNED * LOCAL; i += EP_THREADS) counts[i] = 0;
    __syncthreads();
    u32 most = EP_R * c.max_tokens;
    // First they are counted, then numbered.
#pragma unroll 1
    for (u32 pass = 0; pass < 2; ++pass) {
#pragma unroll 1
        for (u32 part = warp; part < PARTS_PLANNED; part += WARPS) {
            bool lost = pass > 0 && (start.lost >> (part / EP_PLAN_PARTS) & 1);
            walk(c, start, counts, part, lost, lane, [&](u32 source, u32 i, u32 expert, u32 place) {
                if (pass == 0) return;
                if (!ACROSS && expert != EP_NOWHERE) place += at<u64>(args.out_ranges, u64(expert) * EP_R + source) >> 32;
                u32 row = expert != EP_NOWHERE && place < most ? expert * most + place : EP_NOWHERE;
                u64 selection = u64(source) * c.max_tokens * EP_K + i;
                st_relaxed_gpu_u64(c.base + c.heap.plan_rows + 8 * selection, tagged(epoch, row));
                // For the combine.
                at<u32>(c.handle + c.parts.routes, selection) = row;
            });
        }
        __syncthreads();
        if (pass > 0) break;
        mark_of(0, args.marks, EP_MARK_HEARD);
        add_up(args, start, counts);
        __syncthreads();
    }
}
