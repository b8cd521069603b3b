// A gateway's part of a dispatch: words and rows of its column, copied to the ranks of its node.
//
//     word:  pinned, of the node's experts  ->  at each rank of the node, of its experts or 0
//     row:   pinned  ->  shared memory  ->  the source's slot at each rank of the node that has the token, once  ->  flags
#pragma once

#include "kernels/ep_cast.cuh"
#include "kernels/ep_node.cuh"
#include "kernels/ep_plan.cuh"

// Bytes of an element, and a warp's shared memory, for one stage.
constexpr u32 ELEMENT = EP_FP8 ? 1 : 2;
constexpr u32 DISPATCH_STAGE = (EP_PIECE * ELEMENT + EP_PIECE / BLOCK * SCALE + 15) / 16 * 16;
// The warps of a block that forward rows; the others deliver rows meanwhile.
constexpr u32 FORWARDERS = NODE == 0 ? 0 : WARPS > 1 ? WARPS / 2 : 1;
constexpr u32 RECEIVES_FROM = WARPS == 1 || EP_RECEIVE_FROM > FORWARDERS ? EP_RECEIVE_FROM : FORWARDERS;

#if EP_NODE

// True if this rank may forward to a rank of its node. A launch that only receives follows one that has waited for slots.
__device__ __forceinline__ bool forwards_to(const EpCommon &c, const Start &start, u32 near) {
    return start.open >> near & 1 && (!(c.phases & EP_SEND) || (start.free >> near & 1));
}

// Tokens and flags of the column, one rank for each lane.
struct Column {
    u32 tokens = 0;
    u32 flags = 0;
    // Bits of the ranks whose control words are not there yet. The same in all lanes.
    u32 missing;
    u64 started;

    __device__ __forceinline__ Column(const EpCommon &c, const Start &start, u32 lane) : started(clock_ns()) {
        missing = __ballot_sync(WHOLE_WARP, lane < COLUMN && (start.open >> column_rank(c, lane) & 1));
    }

    // Waits until the control word of any missing rank is there, or that rank is masked. Those of which it is, as bits; 0 if no
    // rank is missing. A rank that is lost delays nothing of the others. All lanes.
    __device__ __forceinline__ u32 next(const EpDispatchArgs &args, const Start &start, u32 lane) {
        const EpCommon &c = args.common;
        u64 epoch = start.received;
        u32 source = column_rank(c, lane % COLUMN), ended = 0;
        u64 word = word_in(c, start.via[source], EP_WORD_TABLE + parity_of(epoch));
#pragma unroll 1
        while (missing && !ended) {
            bool over = false;
            if (missing >> lane & 1) {
                u64 seen = ld_relaxed_sys_u64(word);
                over = is_tagged(seen, epoch);
                u32 said = over ? static_cast<u32>(seen) : 0, count = said & SOURCE_TOKENS;
                flags = said >> SOURCE_FLAGS;
                tokens = tokens_of(args, source, count < c.max_tokens ? count : c.max_tokens, flags);
                u64 waited = clock_ns() - started;
                if (!over && waited >= c.limit_ns) mask_for(c, source, EP_STAGE_TABLE, epoch, seen >> 32);
                over = over || is_masked(c, source);
                if (over) note_wait(c, source, started);
            }
            ended = __ballot_sync(WHOLE_WARP, over);
            if (!ended) pause_ns(EP_PINNED_NS);
        }
        missing &= ~ended;
        return ended;
    }
};

// The ranks of this node that a word of the column may name. The number of an expert within the node; EP_NOWHERE for none.
// Untrusted input of another rank: bounds-checked.
__device__ __forceinline__ u32 expert_in(u64 word, u64 epoch) {
    u32 expert = is_tagged(word, epoch) ? static_cast<u32>(word) - 1 : EP_NOWHERE;
    return expert < NODE_RANKS * LOCAL ? expert : EP_NOWHERE;
}

// Copies a control word of a source to this node's ranks. All lanes.
__device__ __forceinline__ void forward_word(const EpCommon &c, const Start &start, u32 source, u32 word, u64 value, u32 lane) {
    if (lane < NODE_RANKS && forwards_to(c, start, near_rank(c, lane))) {
        st_relaxed_sys_u64(word_in(c, forwarded_inbox(c, start, near_rank(c, lane), source), word), value);
    }
    __syncwarp();
}

// Forwards a warp's share of the words of one source; false once the source is lost. All lanes.
__device__ __forceinline__ bool forward_source(const EpDispatchArgs &args, const Start &start, u32 source, u32 tokens,
                                               bool weighted, u32 worker, u32 workers, u32 lane) {
    const EpCommon &c = args.common;
    u64 epoch = start.received, offset = c.heap.tables + parity_of(epoch) * c.heap.table_stride;
    u64 table = start.via[source] + offset;
    u32 count = tokens * EP_K;
    bool lost = false;
#pragma unroll 1
    for (u32 i = worker * LANES + lane; i < count && !lost; i += workers * LANES) {
        u64 seen = await_tagged(c, table + 8ull * i, source, EP_STAGE_TABLE, epoch);
        lost = !is_tagged(seen, epoch);
        if (lost) break;
        u32 expert = expert_in(seen, epoch), weight = 0;
        if (weighted && expert != EP_NOWHERE) {
            seen = await_tagged(c, table + c.heap.table_weights + 8ull * i, source, EP_STAGE_TABLE, epoch);
            lost = !is_tagged(seen, epoch);
            if (lost) break;
            weight = static_cast<u32>(seen);
        }
#pragma unroll 1
        for (u32 number = 0; number < NODE_RANKS; ++number) {
            u32 near = near_rank(c, number);
            if (!forwards_to(c, start, near)) continue;
            bool there = expert != EP_NOWHERE && expert / LOCAL == number;
            u64 word = forwarded_inbox(c, start, near, source) + offset + 8ull * i;
            if (there && weighted) st_relaxed_sys_u64(word + c.heap.table_weights, tagged(epoch, weight));
            st_relaxed_sys_u64(word, tagged(epoch, there ? expert % LOCAL + 1 : 0));
        }
    }
    return !__any_sync(WHOLE_WARP, lost);
}

// Rank layout: forwards the word for the hosts of this node's ranks; false if the source is lost. All lanes.
__device__ __forceinline__ bool forward_announcement(const EpCommon &c, const Start &start, u32 source, u32 lane) {
    u64 epoch = start.received, seen = 0;
    u32 word = EP_WORD_ANNOUNCE + parity_of(epoch);
    if (lane == 0) seen = await_tagged(c, word_in(c, start.via[source], word), source, EP_STAGE_ANNOUNCE, epoch);
    seen = __shfl_sync(WHOLE_WARP, seen, 0);
    if (is_tagged(seen, epoch)) forward_word(c, start, source, word, seen, lane);
    return is_tagged(seen, epoch);
}

// Forwards a warp's share of all words. All lanes.
__device__ __forceinline__ void forward_words(const EpDispatchArgs &args, const Start &start, u32 worker, u32 workers,
                                              u32 lane) {
    const EpCommon &c = args.common;
    u64 epoch = start.received;
    Column column(c, start, lane);
    auto forward = [&](u32 number) {
        u32 source = column_rank(c, number);
        u32 tokens = __shfl_sync(WHOLE_WARP, column.tokens, number), flags = __shfl_sync(WHOLE_WARP, column.flags, number);
        u32 masked = lane == 0 && is_masked(c, source);
        bool there = start.open >> source & 1 && !__shfl_sync(WHOLE_WARP, masked, 0);
        if (there && worker == 0) {
            forward_word(c, start, source, EP_WORD_TABLE + parity_of(epoch), tagged(epoch, flags << SOURCE_FLAGS | tokens), lane);
        }
        // A repeated routing has no words.
        if (there && !(SLOTS && args.cached)) {
            there = forward_source(args, start, source, tokens, flags & EP_WEIGHTED, worker, workers, lane);
        }
        if (SLOTS && there && worker == 0) there = forward_announcement(c, start, source, lane);
        if (!there) tell_lost(c, start, source, EP_STAGE_TABLE, epoch, lane);
    };
    // Those that are masked from the start.
    u32 closed = ~column.missing & static_cast<u32>((1ull << COLUMN) - 1);
#pragma unroll 1
    for (u32 ended = closed ? closed : column.next(args, start, lane); ended; ended = column.next(args, start, lane)) {
#pragma unroll 1
        for (; ended; ended &= ended - 1) forward(__ffs(ended) - 1);
    }
}

// A piece of a token of the column.
struct Forward {
    u32 number;
    u32 token;
    u32 piece;

    __device__ __forceinline__ explicit Forward(u32 unit)
        : number(unit / PIECES % COLUMN), token(unit / PIECES / COLUMN), piece(unit % PIECES) {}

    // Which ranks of this node have it: one lane reads the words of its token, and waits for them.
    __device__ __forceinline__ u32 selected(const EpCommon &c, const Start &start) const {
        u64 epoch = start.received, table = start.via[column_rank(c, number)] + c.heap.tables;
        table += parity_of(epoch) * c.heap.table_stride + u64(token) * EP_K * 8;
        u32 ranks = 0;
        constexpr u32 AT_ONCE = EP_K < 2 ? EP_K : 2;
#pragma unroll 1
        for (u32 first = 0; first < EP_K; first += AT_ONCE) {
            u64 seen[AT_ONCE];
#pragma unroll
            for (u32 k = 0; k < AT_ONCE; ++k) {
                seen[k] = first + k < EP_K ? ld_relaxed_sys_u64(table + 8 * (first + k)) : tagged(epoch, 0);
            }
#pragma unroll
            for (u32 k = 0; k < AT_ONCE; ++k) {
                if (!is_tagged(seen[k], epoch)) {
                    seen[k] = await_tagged(c, table + 8 * (first + k), column_rank(c, number), EP_STAGE_TABLE, epoch);
                }
                // Nothing is forwarded of a token whose words are not there.
                if (!is_tagged(seen[k], epoch)) return 0;
                u32 expert = expert_in(seen[k], epoch);
                if (expert != EP_NOWHERE) ranks |= 1u << expert / LOCAL;
            }
        }
        return ranks;
    }

    // Offset of the piece in an inbox, and of its flag.
    __device__ __forceinline__ u64 place(const EpCommon &c, u64 epoch) const {
        u64 row = parity_of(epoch) * c.max_tokens + token;
        return c.heap.rows + row * c.heap.row_stride + piece * c.heap.piece_stride;
    }
    __device__ __forceinline__ u64 flag(const EpCommon &c, u64 epoch) const {
        u64 row = parity_of(epoch) * c.max_tokens + token;
        return c.heap.row_flags + (row * PIECES + piece) * 8;
    }

    // Copies the piece, which has arrived, to `stage`, and starts to store it to these ranks of the node. All lanes.
    __device__ __forceinline__ void send(const EpCommon &c, Start &start, u32 ranks, u8 *stage, Pending &pending, u32 lane) const {
        u64 epoch = start.received;
        u32 source = column_rank(c, number), elements = piece_elements(piece);
        u32 bytes = (elements * ELEMENT + elements / BLOCK * SCALE + 15) / 16 * 16;
        u64 from = start.via[source] + place(c, epoch);
        if constexpr (EP_STAGES == 1) await_pending(c, pending, start, lane);
        constexpr u32 MOST = 2;
        for (u32 first = lane * 16; first - lane * 16 < bytes; first += MOST * LANES * 16) {
            Vec16 v[MOST] = {};
#pragma unroll
            for (u32 i = 0; i < MOST; ++i) {
                u32 byte = first + i * LANES * 16;
                if (byte < bytes) v[i] = ld_once_v16(from + byte);
            }
#pragma unroll
            for (u32 i = 0; i < MOST; ++i) {
                u32 byte = first + i * LANES * 16;
                if (byte < bytes) *reinterpret_cast<Vec16 *>(stage + byte) = v[i];
            }
        }
        if constexpr (EP_STAGES > 1) await_pending(c, pending, start, lane);
        // The lanes below the number of ranks have one each.
        u32 near = c.rank, which = 0;
        for (u32 left = ranks; left; left &= left - 1, ++which) {
            if (which == lane) near = near_rank(c, __ffs(left) - 1);
        }
        u64 inbox = forwarded_inbox(c, start, near, source);
        start_sending(pending, stage, bytes, lane < which, inbox + place(c, epoch), inbox + flag(c, epoch), lane);
    }
};

// Forwards a warp's share of the rows of some ranks of the column, those that are there first; `stages`: of this warp. All
// lanes.
__device__ __forceinline__ void forward_rows(const EpDispatchArgs &args, Start &start, const Column &column, u32 columns,
                                             u8 *stages, u32 &stage, Pending &pending, u32 worker, u32 workers, u32 lane) {
    const EpCommon &c = args.common;
    u64 epoch = start.received;
    u32 most = __reduce_max_sync(WHOLE_WARP, column.tokens), units = most * COLUMN * PIECES;
    u32 near = __ballot_sync(WHOLE_WARP, lane < NODE_RANKS && forwards_to(c, start, near_rank(c, lane % NODE_RANKS)));
#pragma unroll 1
    for (u32 first = worker; first < units; first += LANES * workers) {
        u32 unit = first + lane * workers;
        Forward mine(unit < units ? unit : first);
        u32 tokens = __shfl_sync(WHOLE_WARP, column.tokens, mine.number), ranks = 0;
        if (unit < units && mine.token < tokens && (columns >> mine.number & 1)) {
            u64 &kept = forwards_of(c, mine.number, mine.token);
            bool repeats = SLOTS && args.cached;
            u32 selected = repeats ? static_cast<u32>(kept >> 32) : mine.selected(c, start);
            ranks = selected & near;
            // For the combine, and for dispatches that repeat the routing.
            if (mine.piece == 0 && !repeats) kept = u64(selected) << 32 | ranks;
        }
        u32 left = __ballot_sync(WHOLE_WARP, ranks != 0);
        u32 source = column_rank(c, mine.number);
        u64 flag = start.via[source] + mine.flag(c, epoch);
#pragma unroll 1
        while (left) {
            // All that are there; if none is, the first is waited for.
            bool came = (left >> lane & 1) && has_reached(ld_acquire_sys_u64(flag), epoch);
            u32 there = __ballot_sync(WHOLE_WARP, came), now = there;
            if (there == 0) {
                now = left & -left;
                came = now >> lane & 1 && await(c, flag, epoch, source, EP_STAGE_ROW, epoch);
                there = __ballot_sync(WHOLE_WARP, came);
            }
            left &= ~now;
            // What one lane has waited for is there for all.
            __syncwarp();
#pragma unroll 1
            for (; now; now &= now - 1) {
                u32 whose = __ffs(now) - 1, its = __shfl_sync(WHOLE_WARP, ranks, whose);
                Forward next(first + whose * workers);
                if (!(there >> whose & 1)) {
                    tell_lost(c, start, column_rank(c, next.number), EP_STAGE_ROW, epoch, lane);
                    continue;
                }
                next.send(c, start, its, stages + stage * DISPATCH_STAGE, pending, lane);
                if (++stage == EP_STAGES) stage = 0;
            }
        }
    }
}

// This rank's share of forwarding: words by the first block, before it plans; rows by the first warps of the others. All warps
// of a launch that receives; `stages`: of this warp.
__device__ __forceinline__ void forward(const EpDispatchArgs &args, Start &start, u8 *stages, Pending &pending, u32 warp,
                                        u32 lane) {
    u32 first = gridDim.x > 1;
    if (blockIdx.x == 0) forward_words(args, start, warp, WARPS, lane);
    if (blockIdx.x < first || warp >= FORWARDERS) return;
    u32 blocks = gridDim.x - first;
    u32 worker = warp * blocks + blockIdx.x - first, stage = 0;
    Column column(args.common, start, lane);
#pragma unroll 1
    while (u32 columns = column.next(args, start, lane)) {
        forward_rows(args, start, column, columns, stages, stage, pending, worker, FORWARDERS * blocks, lane);
    }
    await_pending(args.common, pending, start, lane);
}

#endif
