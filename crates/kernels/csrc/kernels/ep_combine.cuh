// Combine in the expert layout, by pieces; a warp takes one piece at a time.
//
//     weights:  this rank's, to every rank, unless they went with the dispatch (with prereduction)
//     send:     the rows of a token's experts here -> weighted and summed -> one row, back to the token's rank, a flag
//               (without prereduction: each row as it is)
//     receive:  flags -> the rows of a token's ranks -> summed (without prereduction: weighted, too), bias -> the result
//
// Sums are in the order of selections on the experts' rank, and in that of ranks where the token came from.
#pragma once

#include "kernels/ep_dispatch.cuh"

constexpr u32 BACK_ROWS = EP_PREREDUCE ? 1 : MOST_LOCAL;
constexpr u32 BACK_BYTES = EP_H * 2;
constexpr u32 COMBINE_STAGE = EP_PIECE * 2;

// 1024 elements of fp32, 8 to 8 of each lane.
struct Sum {
    float value[LOADS][8];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (u32 i = 0; i < LOADS; ++i) {
#pragma unroll
            for (u32 j = 0; j < 8; ++j) value[i][j] = 0;
        }
    }

    // Adds a row's elements, times the weight if there is one.
    __device__ __forceinline__ void add(const Vec16 (&v)[LOADS], bool weighted, float weight) {
#pragma unroll
        for (u32 i = 0; i < LOADS; ++i) {
#pragma unroll
            for (u32 w = 0; w < 4; ++w) {
                float low = widen_low_bf16(v[i].word[w]), high = widen_high_bf16(v[i].word[w]);
                if (weighted) {
                    low = mul_rn_f32(low, weight);
                    high = mul_rn_f32(high, weight);
                }
                value[i][2 * w] = add_rn_f32(value[i][2 * w], low);
                value[i][2 * w + 1] = add_rn_f32(value[i][2 * w + 1], high);
            }
        }
    }

    __device__ __forceinline__ Vec16 narrowed(u32 i) const {
        Vec16 v;
#pragma unroll
        for (u32 w = 0; w < 4; ++w) v.word[w] = narrow_bf16x2(value[i][2 * w], value[i][2 * w + 1]);
        return v;
    }
};

// A lane's part of 1024 elements of a row, of which there are `elements` from `from` on.
__device__ __forceinline__ void load_step(Vec16 (&v)[LOADS], u64 row, u32 from, u32 elements, u32 lane) {
#pragma unroll
    for (u32 i = 0; i < LOADS; ++i) {
        u32 element = from + (i * LANES + lane) * 8;
        v[i] = element < elements ? ld_once_v16(row + element * 2) : Vec16{};
    }
}

// Adds up 1024 elements of rows whose address each lane of `left` has, in the order that `next` gives. All lanes.
template <typename Next>
__device__ __forceinline__ void sum_rows(Sum &sum, u64 row, u32 count, u32 from, u32 elements, bool weighted,
                                         float weight, u32 lane, Next next) {
    sum.clear();
    if (count == 0) return;
    Vec16 ahead[LOADS];
    u32 source = next(0);
    load_step(ahead, __shfl_sync(WHOLE_WARP, row, source), from, elements, lane);
    for (u32 i = 0; i < count; ++i) {
        Vec16 v[LOADS];
#pragma unroll
        for (u32 k = 0; k < LOADS; ++k) v[k] = ahead[k];
        float by = __shfl_sync(WHOLE_WARP, weight, source);
        bool has = __shfl_sync(WHOLE_WARP, u32(weighted), source);
        if (i + 1 < count) {
            source = next(i + 1);
            load_step(ahead, __shfl_sync(WHOLE_WARP, row, source), from, elements, lane);
        }
        sum.add(v, has, by);
    }
}

// Brings this rank's weights to every rank, unless they went with the dispatch. The whole first block.
__device__ __forceinline__ void send_weights(const EpCombineArgs &args, const Peers &peers, u64 epoch) {
    const EpCommon &c = args.common;
    if (!EP_PREREDUCE || at<EpHandleHeader>(c.handle + c.parts.header).flags & EP_WEIGHTED) return;
    u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    u32 flags = args.topk_weights ? EP_WEIGHTED : 0;
    u64 count = args.topk_weights ? u64(c.tokens) * EP_K : 0;
    // A warp has a rank to itself: no warp waits for another rank's sake.
    for (u32 rank = warp; rank < EP_R; rank += WARPS) {
        u64 base = __shfl_sync(WHOLE_WARP, at<u64>(c.peers, rank), 0);
        u32 open = 0;
        if (lane == 0 && peers.is_open(rank)) {
            open = slots_free(c, rank, EP_WORD_COMBINE_TAKEN, EP_STAGE_COMBINE_TAKEN, epoch);
        }
        if (!__shfl_sync(WHOLE_WARP, open, 0)) continue;
        __syncwarp();
        u64 to = base + c.heap.back_weights + slot_of(epoch, c.rank) * c.heap.back_weights_stride;
        for (u64 i = lane; i < count; i += LANES) at<u32>(to + sizeof(EpTableHeader), i) = at<u32>(args.topk_weights, i);
        if (lane == 0) at<EpTableHeader>(to) = EpTableHeader{c.tokens, flags, epoch};
        __syncwarp();
        if (lane == 0) st_release_sys_u64(word_at(c, base, c.rank, EP_WORD_WEIGHTS + epoch % EP_DEPTH), epoch);
    }
}

// A lane's weight of a token's selection.
struct Weight {
    bool has;
    float value;
};

// A token's weights, of each lane's selection; they may have to come first. All lanes.
__device__ __forceinline__ Weight weight_of(const EpCombineArgs &args, u32 source, u32 token, u64 epoch, u32 lane) {
    const EpCommon &c = args.common;
    u64 i = u64(token) * EP_K + lane;
    Weight weight = {false, 0.0f};
    if (at<u32>(c.handle + c.parts.flags, source) & EP_WEIGHTED) {
        if (lane < EP_K) weight = {true, at<float>(c.handle + c.parts.weights, u64(source) * c.max_tokens * EP_K + i)};
        return weight;
    }
    u64 from = c.base + c.heap.back_weights + slot_of(epoch, source) * c.heap.back_weights_stride;
    u64 word = word_at(c, c.base, source, EP_WORD_WEIGHTS + epoch % EP_DEPTH);
    bool came = await(c, word, epoch, source, EP_STAGE_WEIGHTS, epoch);
    if (came && lane < EP_K && at<EpTableHeader>(from).flags & EP_WEIGHTED) {
        weight = {true, at<float>(from + sizeof(EpTableHeader), i)};
    }
    __syncwarp();
    return weight;
}

// What goes back to a token's rank.
struct Return {
    u32 source;
    u32 token;
    // Which of the token's selections here; 0 with prereduction.
    u32 which;
    u32 piece;
};

// Sends one piece back. All lanes.
__device__ __forceinline__ void send_back(const EpCombineArgs &args, const Peers &peers, const Return &r, u8 *stage,
                                          u64 epoch, u32 lane) {
    const EpCommon &c = args.common;
    u64 token = u64(r.source) * c.max_tokens + r.token;
    u32 row = lane < EP_K ? at<u32>(c.handle + c.parts.routes, token * EP_K + lane) : EP_NOWHERE;
    u32 here = __ballot_sync(WHOLE_WARP, row != EP_NOWHERE);
    if constexpr (!EP_PREREDUCE) {
        for (u32 i = 0; i < r.which; ++i) here &= here - 1;
        here &= -here;
    }
    u64 address = args.y + row * args.y_stride + r.piece * EP_PIECE * 2ull;
    Weight weight = {false, 0.0f};
    if constexpr (EP_PREREDUCE) weight = weight_of(args, r.source, r.token, epoch, lane);
    u32 elements = piece_elements(r.piece);
    for (u32 from = 0; from < elements; from += STEP) {
        Sum sum;
        u32 left = here;
        sum_rows(sum, address, __popc(here), from, elements, weight.has, weight.value, lane, [&](u32) {
            u32 next = __ffs(left) - 1;
            left &= left - 1;
            return next;
        });
#pragma unroll
        for (u32 i = 0; i < LOADS; ++i) {
            u32 element = from + (i * LANES + lane) * 8;
            if (element < elements) *reinterpret_cast<Vec16 *>(stage + element * 2) = sum.narrowed(i);
        }
    }
    bool sender = lane == 0 && slots_free(c, r.source, EP_WORD_COMBINE_TAKEN, EP_STAGE_COMBINE_TAKEN, epoch);
    u64 base = peers.base.of(r.source), slot = slot_of(epoch, c.rank), i = u64(r.token) * BACK_ROWS + r.which;
    u64 to = base + c.heap.back + slot * c.heap.back_slot + i * c.heap.back_stride + r.piece * EP_PIECE * 2ull;
    u64 flag = base + c.heap.back_flags + slot * c.heap.back_flags_slot + (i * PIECES + r.piece) * 8;
    send_stage(stage, elements * 2, sender, to, flag, epoch, lane);
}

// Sends this warp's share: rows of other ranks first, by turns, then this rank's own. Each lane looks at one of the next
// 32 pieces that may be this warp's.
__device__ __forceinline__ void send_back_all(const EpCombineArgs &args, const Peers &peers, u8 *stage, u64 epoch,
                                              u32 worker, u32 workers, u32 lane) {
    const EpCommon &c = args.common;
    constexpr u32 OTHERS = EP_R > 1 ? EP_R - 1 : 1;
    PerRank<u32> tokens;
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
        u32 rank = lane + i * LANES;
        tokens.value[i] = rank < EP_R && peers.is_open(rank) ? at<u32>(c.handle + c.parts.tokens, rank) : 0;
    }
    u64 rows = u64(c.max_tokens) * BACK_ROWS * PIECES;
    u64 others = rows * (EP_R - 1), units = rows * EP_R;
    auto back = [&](u64 unit) {
        u32 piece = static_cast<u32>(unit % PIECES), which = static_cast<u32>(unit / PIECES % BACK_ROWS);
        u32 pair = static_cast<u32>(unit / (PIECES * BACK_ROWS));
        if (unit >= others) return Return{c.rank, pair - static_cast<u32>(c.max_tokens) * (EP_R - 1), which, piece};
        return Return{(c.rank + 1 + pair % OTHERS) % EP_R, pair / OTHERS, which, piece};
    };
    for (u64 first = worker; first < units; first += u64(LANES) * workers) {
        u64 unit = first + u64(lane) * workers;
        Return mine = back(unit < units ? unit : first);
        bool has = mine.token < tokens.of(mine.source) && unit < units;
        has = has && at<u8>(c.handle + c.parts.present, u64(mine.source) * c.max_tokens + mine.token) > mine.which;
        for (u32 left = __ballot_sync(WHOLE_WARP, has); left; left &= left - 1) {
            send_back(args, peers, back(first + u64(__ffs(left) - 1) * workers), stage, epoch, lane);
        }
    }
}

// Sums one piece of a token. All lanes.
__device__ __forceinline__ void sum_token(const EpCombineArgs &args, const Peers &peers, u32 token, u32 piece, u64 epoch,
                                          u32 lane) {
    const EpCommon &c = args.common;
    u64 selection = u64(token) * EP_K + lane;
    int expert = lane < EP_K ? at<int>(c.handle + c.parts.sent, selection) : -1;
    u32 rank = expert >= 0 ? expert / LOCAL : 0;
    bool valid = expert >= 0;
    u32 which = 0, order = 0;
    Weight weight = {false, 0.0f};
    if constexpr (EP_PREREDUCE) {
        valid = is_first_of_rank(rank, valid, lane);
    } else {
        u32 alike = __match_any_sync(WHOLE_WARP, valid ? rank : EP_R + lane);
        which = __popc(alike & ((1u << lane) - 1));
        order = lane;
        u64 late = at<EpHandleHeader>(c.handle + c.parts.header).flags & EP_WEIGHTED ? c.handle + c.parts.sent_weights
                                                                                     : args.topk_weights;
        if (valid && late) weight = {true, at<float>(late, selection)};
    }
    u64 slot = slot_of(epoch, rank), i = u64(token) * BACK_ROWS + which;
    valid = valid && peers.is_open(rank);
    if (valid) {
        u64 flag = c.base + c.heap.back_flags + slot * c.heap.back_flags_slot + (i * PIECES + piece) * 8;
        valid = await(c, flag, epoch, rank, EP_STAGE_BACK_ROW, epoch);
    }
    __syncwarp();
    if constexpr (EP_PREREDUCE) {
        // Its place among the ranks that have something.
        for (u32 k = 0; k < EP_K; ++k) {
            bool other = __shfl_sync(WHOLE_WARP, u32(valid), k);
            u32 its = __shfl_sync(WHOLE_WARP, rank, k);
            order += other && its < rank;
        }
    } else {
        order = __popc(__ballot_sync(WHOLE_WARP, valid) & ((1u << lane) - 1));
    }
    u32 count = __popc(__ballot_sync(WHOLE_WARP, valid));
    u64 row = c.base + c.heap.back + slot * c.heap.back_slot + i * c.heap.back_stride + piece * EP_PIECE * 2ull;
    u32 elements = piece_elements(piece);
    u64 begin = piece * EP_PIECE * 2ull, out = args.out + token * args.out_stride + begin;
    for (u32 from = 0; from < elements; from += STEP) {
        Sum sum;
        sum_rows(sum, row, count, from, elements, weight.has, weight.value, lane, [&](u32 next) {
            return static_cast<u32>(__ffs(__ballot_sync(WHOLE_WARP, valid && order == next)) - 1);
        });
        for (u32 k = 0; k < 2; ++k) {
            u64 bias = k == 0 ? args.bias0 : args.bias1;
            if (!bias) continue;
            Vec16 v[LOADS];
            load_step(v, bias + u64(token) * BACK_BYTES + begin, from, elements, lane);
            sum.add(v, false, 0.0f);
        }
#pragma unroll
        for (u32 k = 0; k < LOADS; ++k) {
            u32 element = from + (k * LANES + lane) * 8;
            if (element < elements) st_v16(out + element * 2, sum.narrowed(k));
        }
    }
}

// Ends a combine: the last block says so to this rank's next launches, and to others that their slots are free.
__device__ __forceinline__ void end_combine(const EpCombineArgs &args, const Peers &peers, u64 sent, u64 received) {
    const EpCommon &c = args.common;
    EpState &state = state_of(c);
    if (!is_last_block(address_of(state.combine_blocks) + 8 * c.phases)) return;
    if (c.phases & EP_RECEIVE) {
        tell_all(c, peers, EP_WORD_COMBINE_TAKEN, received);
        count_waits(c);
    }
    if (threadIdx.x != 0) return;
    if (c.phases & EP_SEND) {
        state.combine_begun = sent;
        state.combine_sent = sent;
    }
    if (c.phases & EP_RECEIVE) state.combine_ended = received;
}
