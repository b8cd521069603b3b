// Combine in the expert layout, in pieces; a warp handles one at a time.
//
//     weights:  this rank's, to the ranks of its experts, unless they went with the dispatch (with prereduction)
//     send:     the rows of a token's experts here -> weighted and summed -> one row, back to the token's rank, a flag
//               (without prereduction: each row as it is)
//     receive:  flags -> the rows of a token's ranks -> summed (without prereduction: weighted, too), bias -> the result
//
// Sums are in the order of selections on the experts' rank, and in the order of ranks on the token's rank, so that results
// do not depend on timing. A launch that both sends and receives does not send a rank's own rows: they are summed in place.
//
// The last warp of a block sends no rows: it reads the shared state, sends weights, and sets flags (ep_flags.cuh). At
// the start of a launch all caches are cold, including the instruction cache, so loops are preferred to unrolled code.
#pragma once

#include "kernels/ep_flags.cuh"
#include "kernels/ep_relay.cuh"
#include "kernels/ep_sums.cuh"

constexpr u32 BACK_ROWS = EP_PREREDUCE ? 1 : MOST_LOCAL;
constexpr u32 BACK_BYTES = EP_H * 2;
// The warp that sets flags, and the number of sending warps.
constexpr u32 FLAGGER = BACK_WARPS - 1;
constexpr u32 BACK_SENDERS = EP_SENDERS < FLAGGER ? EP_SENDERS : FLAGGER;
// The first warp that receives.
constexpr u32 GATHERS_FROM = EP_RECEIVE_FROM < FLAGGER ? EP_RECEIVE_FROM : FLAGGER;
static_assert(FLAGGER > 0, "a warp is left to send");
// Elements of a token that a warp receives at a time.
constexpr u32 PART = 512;
constexpr u32 PARTS = (EP_H + PART - 1) / PART;
static_assert(EP_PIECE % PART == 0, "a part is of one piece");

__device__ __forceinline__ bool is_direct(const EpCommon &c) { return c.phases == (EP_SEND | EP_RECEIVE); }

// Prefetches `bytes` bytes of each lane's row into L2, for lanes that have one.
__device__ __forceinline__ void prefetch_rows(bool has, u64 row, u32 bytes, u32 lane) {
    for (u32 left = __ballot_sync(WHOLE_WARP, has); left; left &= left - 1) {
        u64 from = __shfl_sync(WHOLE_WARP, row, __ffs(left) - 1);
        if (lane * 128 < bytes) prefetch_l2(from + lane * 128);
    }
}

// The weights of this rank that a block sends.
struct WeightShare {
    u32 first;
    u32 end;

    __device__ __forceinline__ explicit WeightShare(const EpCommon &c) {
        u32 count = c.tokens * EP_K, each = (count + gridDim.x - 1) / gridDim.x;
        first = min(blockIdx.x * each, count);
        end = min(first + each, count);
    }
};

// Announces the weights that this warp has written for far ranks. All lanes.
__device__ __noinline__ void send_far_weights(const EpCommon &c, const Start &start, WeightShare share, u64 weights, u32 lane) {
    fence_acq_rel_sys();
#pragma unroll 1
    for (u32 rank = lane; rank < EP_R; rank += LANES) {
        bool goes = (start.far & start.open) >> rank & 1;
        if (!goes || !slots_free(c, start, rank, EP_WORD_COMBINE_TAKEN, EP_STAGE_COMBINE_TAKEN)) continue;
        u64 range = range_number(weights + u64(share.first) * 8, (share.end - share.first) * 8);
        append_range(c, EP_COMMAND_WEIGHTS, rank, start.sent, range);
    }
    __syncwarp();
}

// First weight of this rank that a lane of the flagging warp sends; loaded before it is known whether it must be sent.
struct OwnWeight {
    int expert = -1;
    float weight = 1.0f;

    __device__ __forceinline__ OwnWeight() {}

    __device__ __forceinline__ OwnWeight(const EpCombineArgs &args, u32 lane) {
        if (!EP_PREREDUCE || !(args.common.phases & EP_SEND)) return;
        WeightShare share(args.common);
        if (share.first + lane < share.end) read(args, share.first + lane);
    }

    __device__ __forceinline__ void read(const EpCombineArgs &args, u64 i) {
        expert = at<int>(args.common.handle + args.common.parts.sent, i);
        if (args.topk_weights) weight = at<float>(args.topk_weights, i);
    }
};

// Sends this rank's weights to the ranks of its experts, unless the dispatch carried them. Each is tagged with the
// epoch, so that a reader waits only for the weight it needs. The weight is 1 if none are given. One warp of each
// block.
__device__ __forceinline__ void send_weights(const EpCombineArgs &args, const Start &start, OwnWeight own, u32 lane) {
    const EpCommon &c = args.common;
    if (SLOTS || !EP_PREREDUCE || start.weighted) return;
    WeightShare share(c);
    u64 weights = c.heap.back_weights + parity_of(start.sent) * c.heap.back_weights_stride;
#pragma unroll 1
    for (u32 i = share.first + lane; i < share.end; i += LANES) {
        if (i != share.first + lane) own.read(args, i);
        u32 home = own.expert >= 0 ? own.expert / LOCAL : c.rank, rank = gateway_to(c, home);
        bool goes = own.expert >= 0 && (start.open >> home & 1) && !(is_direct(c) && rank == c.rank);
        if (NODE) goes = goes && (start.open >> rank & 1);
        if (!goes || !slots_free(c, start, rank, EP_WORD_COMBINE_TAKEN, EP_STAGE_COMBINE_TAKEN)) continue;
        u64 to = start.to[rank] + weights + u64(i) * 8;
        u64 tag = start.far >> rank & 1 ? 0 : tagged(start.sent, 0);
        st_relaxed_sys_u64(to, tag | __float_as_uint(own.weight));
    }
    __syncwarp();
    if ((start.far & start.open) && share.first != share.end) send_far_weights(c, start, share, weights, lane);
}

// Weight of each lane's selection of a token, if the selection is `here`; waits for it if necessary. 1 for a rank that
// timed out: its sum is not sent.
__device__ __forceinline__ float weight_of(const EpCombineArgs &args, const Start &start, u32 source, u32 token, bool here,
                                           u32 lane) {
    const EpCommon &c = args.common;
    u64 i = u64(token) * EP_K + lane;
    float weight = 1.0f;
    if (SLOTS) return weight;
    if (here && (start.flags[source] & EP_WEIGHTED)) {
        weight = at<float>(c.handle + c.parts.weights, u64(source) * c.max_tokens * EP_K + i);
    } else if (here) {
        u64 weights = c.heap.back_weights + parity_of(start.sent) * c.heap.back_weights_stride;
        u64 word = start.from[source] + weights + i * 8;
        u64 seen = ld_relaxed_sys_u64(word);
        if (!is_tagged(seen, start.sent)) seen = await_tagged(c, word, source, EP_STAGE_WEIGHTS, start.sent);
        if (is_tagged(seen, start.sent)) weight = __uint_as_float(static_cast<u32>(seen));
    }
    __syncwarp();
    return weight;
}

// A piece that goes back to a token's rank.
struct Return {
    u32 source;
    u32 token;
    // Which of the token's selections here; 0 with prereduction.
    u32 which;
    u32 piece;

    // That of lane `whose`.
    __device__ __forceinline__ Return of(u32 whose) const {
        return {__shfl_sync(WHOLE_WARP, source, whose), __shfl_sync(WHOLE_WARP, token, whose),
                BACK_ROWS > 1 ? __shfl_sync(WHOLE_WARP, which, whose) : 0, __shfl_sync(WHOLE_WARP, piece, whose)};
    }
};

// Row number of each lane's selection of a token of `source`, or EP_NOWHERE.
__device__ __forceinline__ u32 route_of(const EpCombineArgs &args, u32 source, u32 token, u32 lane) {
    const EpCommon &c = args.common;
    if (lane >= ROUTED) return EP_NOWHERE;
    u32 row = at<u32>(c.handle + c.parts.routes, (u64(source) * c.max_tokens + token) * ROUTED + lane);
    // Rank layout: rows for which the caller has no room count as zeros.
    return SLOTS && args.y_rows != 0 && row >= args.y_rows ? EP_NOWHERE : row;
}

// Rank layout: the weight that goes back with a row, for each lane below K.
__device__ __forceinline__ u32 weight_back(const EpCombineArgs &args, u32 row, u32 lane) {
    return row != EP_NOWHERE && lane < EP_K ? at<u32>(args.y_weights, u64(row) * EP_K + lane) : 0;
}

// Whether rows to and from `rank` are coded.
template <typename Wire>
__device__ __forceinline__ bool is_coded(const EpCommon &c, u32 rank) {
    return Wire::CODED && rank != c.rank;
}

// Reads and reduces the rows of `r` into `stage`. `row`: row of each lane's selection, or EP_NOWHERE. All lanes.
template <typename Wire>
__device__ __forceinline__ void stage_back(const EpCombineArgs &args, const Start &start, const Return &r, u32 row,
                                           u8 *stage, u32 lane) {
    constexpr u32 DEPTH = 2, N = CODED_AT_ONCE, STEP_BACK = N * LANES * 8;
    bool here = row != EP_NOWHERE;
    Terms terms(here, lane);
    if (!EP_PREREDUCE) terms = Terms(here && terms.order == r.which, lane);
    u64 address = args.y + row * args.y_stride + r.piece * EP_PIECE * 2ull;
    u32 elements = piece_elements(r.piece);
    prefetch_rows(terms.valid && terms.order >= DEPTH, address, elements * 2, lane);
    float weight = 1.0f;
#pragma unroll 1
    for (u32 from = 0; from < elements; from += STEP_BACK) {
        Sum<N> sum;
        auto load = [&](Vec16(&v)[N], u32 source) {
            load_step(v, __shfl_sync(WHOLE_WARP, address, source) + from * 2, elements - from, lane);
        };
        sum_terms<DEPTH, EP_PREREDUCE, Plain>(sum, terms, false, load, [&] {
            if (from == 0) weight = weight_of(args, start, r.source, r.token, here, lane);
            return weight;
        });
        Vec16 v[N];
#pragma unroll
        for (u32 i = 0; i < N; ++i) v[i] = sum.narrowed(i);
        if (is_coded<Wire>(args.common, r.source)) {
            Wire::encode(v, stage, from, elements, lane);
            continue;
        }
#pragma unroll
        for (u32 i = 0; i < N; ++i) {
            u32 element = from + (i * LANES + lane) * 8;
            if (element < elements) *reinterpret_cast<Vec16 *>(stage + element * 2) = v[i];
        }
    }
}

// A warp's share of the returned rows: other ranks' first, round-robin, then this rank's own if they must be sent. Each
// lane examines one of the warp's next 32 candidate pieces.
struct Returns {
    u32 worker;
    u32 workers;
    u32 others;
    u32 units;
    // Each lane's piece, and how many selections of its token are here. Of the first piece: each lane's row, and how many
    // tokens its source sent.
    Return mine;
    u32 present = 0;
    u32 row = EP_NOWHERE;
    u32 tokens = 0;

    __device__ __forceinline__ Returns(const EpCombineArgs &args, u32 warp, u32 lane) {
        const EpCommon &c = args.common;
        // At most 65535 * 32 * 16 * 64.
        u32 rows = c.max_tokens * BACK_ROWS * PIECES;
        worker = warp * gridDim.x + blockIdx.x;
        workers = BACK_SENDERS * gridDim.x;
        others = rows * (EP_R - 1);
        units = !(c.phases & EP_SEND) || warp >= BACK_SENDERS ? 0 : is_direct(c) ? others : rows * EP_R;
        if (worker >= units) return;
        look(c, worker, lane);
        Return first = mine.of(0);
        row = route_of(args, first.source, first.token, lane);
        tokens = at<u32>(c.handle + c.parts.tokens, first.source);
    }

    // Prefetches the rows of the first piece. All lanes.
    __device__ __forceinline__ void prefetch(const EpCombineArgs &args, u32 lane) const {
        if (worker >= units) return;
        // The handle's entries of tokens that were not sent are stale, from an earlier operation. Prefetching their
        // rows too would cost more bandwidth than the rows that are sent.
        bool has = __shfl_sync(WHOLE_WARP, mine.token, 0) < tokens && row < (SLOTS ? 1 : LOCAL) * EP_R * args.common.max_tokens;
        u32 piece = worker % PIECES;
        prefetch_rows(has, args.y + row * args.y_stride + piece * EP_PIECE * 2ull, piece_elements(piece) * 2, lane);
    }

    // Loads each lane's candidate among the 32 pieces starting at `first`.
    __device__ __forceinline__ void look(const EpCommon &c, u32 first, u32 lane) {
        u32 unit = first + lane * workers;
        mine = split(c, unit < units ? unit : first);
        present = unit < units ? at<u8>(c.handle + c.parts.present, u64(mine.source) * c.max_tokens + mine.token) : 0;
    }

    __device__ __forceinline__ Return split(const EpCommon &c, u32 unit) const {
        constexpr u32 OTHERS = EP_R > 1 ? EP_R - 1 : 1;
        u32 row = unit / PIECES, pair = row / BACK_ROWS;
        Return r = {c.rank, pair - c.max_tokens * (EP_R - 1), row % BACK_ROWS, unit % PIECES};
        if (unit < others) {
            r.source = (c.rank + 1 + pair % OTHERS) % EP_R;
            r.token = pair / OTHERS;
        }
        return r;
    }

    // Sends this warp's share and queues the flags. The last pieces may still be in flight.
    template <typename Wire>
    __device__ __forceinline__ void send(const EpCombineArgs &args, const Start &start, Outbox &outbox, u8 *stages, u32 lane) {
        const EpCommon &c = args.common;
        bool is_ahead = true;
        for (u32 first = worker; first < units;) {
            bool has = mine.token < start.tokens[mine.source] && hears(c, start, mine.source) && present > mine.which;
            u32 left = __ballot_sync(WHOLE_WARP, has);
            // The rows of the next piece are looked up before those of the last one are read.
            if (left && !(is_ahead && (left & 1))) row = row_of(args, left, lane);
            is_ahead = false;
            while (left) {
                Return r = mine.of(__ffs(left) - 1);
                u32 its = row;
                left &= left - 1;
                if (left) row = row_of(args, left, lane);
                if (!is_free(c, start, gateway_from(c, r.source), lane)) continue;
                u8 *stage = outbox.stage(stages, COMBINE_STAGE);
                stage_back<Wire>(args, start, r, its, stage, lane);
                u64 inbox = start.to[r.source], slot = parity_of(start.sent), i = u64(r.token) * BACK_ROWS + r.which;
                u64 place = c.heap.back + slot * c.heap.back_slot + i * c.heap.back_stride + r.piece * EP_PIECE * 2ull;
                u64 flag = inbox + c.heap.back_flags + slot * c.heap.back_flags_slot + (i * PIECES + r.piece) * c.heap.flag_stride;
                u32 elements = piece_elements(r.piece);
                u32 bytes = is_coded<Wire>(c, r.source) ? Wire::bytes(elements) : elements * 2;
                bool far = !NODE && (start.far >> r.source & 1);
                u64 all = start.tokens[r.source] * c.heap.back_stride;
                if (far) flag = range_command(EP_COMMAND_BACK, r.source, place, bytes, all);
                u64 to = inbox + place;
#if EP_NODE
                if (is_elsewhere(c, r.source)) {
                    NodeArea area = area_for(c, start, r.source);
                    to = area.row(c, r.token, r.piece), flag = area.flag(r.token, r.piece);
                }
#endif
                outbox.send(stage, bytes, to, flag, lane);
                if (SLOTS && args.y_weights && r.piece == 0) {
                    u32 weight = weight_back(args, __shfl_sync(WHOLE_WARP, its, 0), lane);
                    u64 at = weights_back_at(c, start.sent, r.token), words = inbox + at;
#if EP_NODE
                    if (is_elsewhere(c, r.source)) words = area_for(c, start, r.source).weights_of(r.token);
#endif
                    if (lane < EP_K) st_relaxed_sys_u64(words + 8 * lane, (far ? 0 : tagged(start.sent, 0)) | weight);
                    if (far) outbox.announce(range_command(EP_COMMAND_WEIGHTS, r.source, at, EP_K * 8), lane);
                }
                if (outbox.sent == 1) mark_of(0, args.marks, EP_MARK_FIRST);
            }
            first += LANES * workers;
            if (first < units) look(c, first, lane);
        }
    }

    // Of the first of some pieces.
    __device__ __forceinline__ u32 row_of(const EpCombineArgs &args, u32 left, u32 lane) const {
        Return r = mine.of(__ffs(left) - 1);
        return route_of(args, r.source, r.token, lane);
    }

    // Waits until this rank's slot at `rank` is free; false if the rank is masked first.
    static __device__ __forceinline__ bool is_free(const EpCommon &c, const Start &start, u32 rank, u32 lane) {
        if (start.free >> rank & 1) return true;
        u32 free = lane == 0 && slots_free(c, start, rank, EP_WORD_COMBINE_TAKEN, EP_STAGE_COMBINE_TAKEN);
        return __shfl_sync(WHOLE_WARP, free, 0);
    }
};

// One part of a token that comes back, summed.
struct Gather {
    // Each lane's selection: its expert, and its row if it is here.
    int expert;
    u32 number;

    // Loads what does not depend on other blocks or ranks. All lanes.
    __device__ __forceinline__ void look(const EpCombineArgs &args, u32 unit, u32 lane) {
        const EpCommon &c = args.common;
        u32 token = unit / PARTS;
        expert = lane < EP_K ? at<int>(c.handle + c.parts.sent, u64(token) * EP_K + lane) : -1;
        // In the rank layout all selections of a token have one row.
        number = is_direct(c) ? route_of(args, c.rank, token, SLOTS ? 0 : lane) : EP_NOWHERE;
    }

    // Where a lane's row is if it is here; 0 for none.
    __device__ __forceinline__ u64 address_here(const EpCombineArgs &args, const Start &start, u32 unit) const {
        const EpCommon &c = args.common;
        bool here = is_own(c) && unit / PARTS < start.tokens[c.rank] && (start.open >> c.rank & 1);
        if (SLOTS) {
            // The first of a token's selections here stands for its row.
            u32 before = __ballot_sync(WHOLE_WARP, here) & ((1u << threadIdx.x % LANES) - 1);
            here = here && before == 0;
        }
        if (!here || number == EP_NOWHERE) return 0;
        return args.y + number * args.y_stride + unit % PARTS * PART * 2;
    }

    __device__ __forceinline__ bool is_own(const EpCommon &c) const {
        return is_direct(c) && expert >= 0 && expert / LOCAL == c.rank;
    }

    // Prefetches the local rows. All lanes.
    __device__ __forceinline__ void prefetch(const EpCombineArgs &args, const Start &start, u32 unit, u32 lane) const {
        u64 here = address_here(args, start, unit);
        prefetch_rows(here != 0, here, elements_of(unit) * 2, lane);
    }

    // Rank layout: sums of the weights that other ranks returned with a token's rows, by rank; once per node, by gateway, where
    // the term of lane `mine_of` is `mine`. All lanes.
    __device__ __forceinline__ float sum_weights(const EpCombineArgs &args, const Start &start, u32 token, const Terms &terms,
                                                 u32 rank, u32 lane, u32 mine_of, float mine) const {
        const EpCommon &c = args.common;
        float sum = 0.0f;
#pragma unroll 1
        for (u32 i = 0; i < terms.count; ++i) {
            u32 term = terms.lane_of(i), from = __shfl_sync(WHOLE_WARP, rank, term), bits = 0;
            if (NODE && term == mine_of) {
                bits = __float_as_uint(mine);
            } else if (from == c.rank && is_direct(c)) {
                bits = weight_back(args, number, lane);
            } else if (lane < EP_K) {
                u64 word = inbox_of(c, start, from) + weights_back_at(c, start.received, token) + 8 * lane;
                u64 seen = await_tagged(c, word, from, EP_STAGE_WEIGHTS, start.received);
                bits = is_tagged(seen, start.received) ? static_cast<u32>(seen) : 0;
            }
            __syncwarp();
            sum = add_rn_f32(sum, __uint_as_float(bits));
        }
        return sum;
    }

    static __device__ __forceinline__ u32 elements_of(u32 unit) {
        if (EP_H % PART == 0) return PART;
        u32 left = EP_H - unit % PARTS * PART;
        return left < PART ? left : PART;
    }

    // Waits for the other ranks' rows, and writes the sum. Calls `meanwhile` before it waits. All lanes.
    template <typename Wire, typename Meanwhile>
    __device__ __forceinline__ void sum(const EpCombineArgs &args, const Start &start, u32 unit, u32 lane,
                                        Meanwhile meanwhile) const {
        const EpCommon &c = args.common;
        u32 token = unit / PARTS, at_element = unit % PARTS * PART, elements = elements_of(unit);
        bool own = is_own(c), valid = expert >= 0;
        u32 rank = valid ? expert / LOCAL : 0;
        u64 here = address_here(args, start, unit);
        float weight = 1.0f;
        if (!SLOTS && (!EP_PREREDUCE || is_direct(c))) {
            u64 given = start.weighted ? c.handle + c.parts.sent_weights : args.topk_weights;
            if (valid && given) weight = at<float>(given, u64(token) * EP_K + lane);
        }
        valid = valid && (start.open >> rank & 1) && (!own || token < start.tokens[c.rank]);
        // Rank layout: the last of the token's selections at this lane's rank.
        u32 last = 0;
        if constexpr (SLOTS && !NODE) last = LANES - 1 - __clz(__match_any_sync(WHOLE_WARP, expert >= 0 ? rank : EP_R + lane));
        // This rank's own contribution, rounded as if it had been sent.
        Vec16 mine[2] = {};
        u32 which = 0;
        if constexpr (EP_PREREDUCE) {
            Sum<2> sum;
            auto load = [&](Vec16(&v)[2], u32 source) {
                load_step(v, __shfl_sync(WHOLE_WARP, here, source), elements, lane);
            };
            sum_terms<4, true, Plain>(sum, Terms(here != 0, lane), false, load, [&] { return weight; });
#pragma unroll
            for (u32 i = 0; i < 2; ++i) mine[i] = sum.narrowed(i);
            valid = is_first_of_rank(rank, valid, lane);
        } else {
            u32 alike = __match_any_sync(WHOLE_WARP, expert >= 0 ? rank : EP_R + lane);
            which = __popc(alike & ((1u << lane) - 1));
            // Beyond what a rank returns there are only repeated experts.
            if (BACK_ROWS < EP_K) valid = valid && which < BACK_ROWS;
        }
        u64 inbox = start.from[rank], slot = parity_of(start.received), i = u64(token) * BACK_ROWS + which;
        u64 row = inbox + c.heap.back + slot * c.heap.back_slot + i * c.heap.back_stride + at_element * 2;
        bool coded = is_coded<Wire>(c, rank);
        u64 flag = inbox + c.heap.back_flags + slot * c.heap.back_flags_slot + (i * PIECES + at_element / EP_PIECE) * c.heap.flag_stride;
        if (!EP_PREREDUCE && own) {
            row = here;
            valid = valid && here != 0;
        }
        meanwhile();
#if EP_NODE
        bool elsewhere = is_elsewhere(c, rank);
        // A row of another node is a term whatever ranks it lacks.
        FromNodes nodes(c, start, token, at_element, rank, expert >= 0 && (start.open >> gateway_to(c, rank) & 1), lane);
        valid = valid && !elsewhere;
#endif
        if (valid && !own) valid = await(c, flag, start.received, rank, EP_STAGE_BACK_ROW, start.received);
        // Makes what any lane acquired visible to all lanes.
        __syncwarp();
        mark_of(FLAGGER * LANES - LANES, args.marks, EP_MARK_CAME);
        Terms terms(valid, lane);
        if constexpr (SLOTS && !NODE) {
            // By the token's last selections at the ranks.
            u32 all = __reduce_or_sync(WHOLE_WARP, valid ? 1u << last : 0);
            terms.order = __popc(all & ((1u << last) - 1));
        } else if constexpr (EP_PREREDUCE) {
            // By rank.
            terms.order = 0;
#pragma unroll
            for (u32 k = 0; k < EP_K; ++k) {
                u32 its = __shfl_sync(WHOLE_WARP, valid ? rank : EP_R, k);
                terms.order += its < rank;
            }
        }
        u32 mine_of = __ffs(__ballot_sync(WHOLE_WARP, EP_PREREDUCE && own && valid)) - 1;
        float mine_weight = 0.0f;
#if EP_NODE
        if (SLOTS && args.out_weights && at_element == 0) mine_weight = sum_weights(args, start, token, terms, rank, lane, LANES, 0.0f);
        // This node's part is summed and rounded as those of the others, and takes its place among them.
        Sum<2> here_sum;
        auto load_near = [&](Vec16(&v)[2], u32 source) {
            if (source == mine_of) {
                v[0] = mine[0];
                v[1] = mine[1];
            } else {
                load_step(v, __shfl_sync(WHOLE_WARP, row, source), elements, lane);
            }
        };
        sum_terms<2, false, Plain>(here_sum, terms, false, load_near, [] { return 1.0f; });
#pragma unroll
        for (u32 i = 0; i < 2; ++i) mine[i] = here_sum.narrowed(i);
        mine_of = __ffs(__ballot_sync(WHOLE_WARP, valid)) - 1;
        valid = nodes.valid || lane == mine_of;
        if (elsewhere) row = nodes.row, rank = gateway_to(c, rank);
        terms = Terms(valid, lane);
        terms.order = 0;
#pragma unroll
        for (u32 k = 0; k < EP_K; ++k) terms.order += __shfl_sync(WHOLE_WARP, valid ? nodes.node : NODES, k) < nodes.node;
#endif
        Sum<2> sum;
        auto add_biases = [&] {
#pragma unroll 1
            for (u32 k = 0; k < 2; ++k) {
                u64 bias = k == 0 ? args.bias[0] : args.bias[1];
                if (!bias) continue;
                Vec16 v[2];
                load_step(v, bias + u64(token) * BACK_BYTES + at_element * 2, elements, lane);
                sum.add<false>(v, 1.0f);
            }
        };
        if (SLOTS) add_biases();
        auto load = [&](Vec16(&v)[2], u32 source) {
            if (EP_PREREDUCE && source == mine_of) {
                v[0] = mine[0];
                v[1] = mine[1];
            } else {
                u64 from = __shfl_sync(WHOLE_WARP, row, source);
                if (Wire::CODED && __shfl_sync(WHOLE_WARP, coded, source)) {
                    load_coded<Wire>(v, from, at_element, elements, lane);
                } else {
                    load_step(v, from, elements, lane);
                }
            }
        };
        sum_terms<4, !EP_PREREDUCE, Wire>(sum, terms, coded, load, [&] { return weight; });
        if (!SLOTS) add_biases();
        if (SLOTS && args.out_weights && at_element == 0) {
            float sum = sum_weights(args, start, token, terms, rank, lane, mine_of, mine_weight);
            if (lane < EP_K) at<float>(args.out_weights, u64(token) * EP_K + lane) = sum;
        }
        u64 out = args.out + token * args.out_stride + at_element * 2;
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            u32 element = (i * LANES + lane) * 8;
            if (element < elements) st_v16(out + element * 2, sum.narrowed(i));
        }
    }
};

// A warp's share of the received parts: every `step`-th part of a token from `unit` on. Warps that send least receive
// most; the flagging warp comes last.
struct Parts {
    u32 unit;
    u32 step;
    u32 end;
    // Of the first part, and of the next one later on.
    Gather next;

    __device__ __forceinline__ Parts(const EpCombineArgs &args, u32 warp, u32 lane) {
        u32 turn = warp == FLAGGER ? FLAGGER - GATHERS_FROM : FLAGGER - 1 - warp;
        unit = turn * gridDim.x + blockIdx.x;
        step = (BACK_WARPS - GATHERS_FROM) * gridDim.x;
        end = (args.common.phases & EP_RECEIVE) && warp + 1 > GATHERS_FROM ? args.common.tokens * PARTS : 0;
        if (unit < end) next.look(args, unit, lane);
    }

    __device__ __forceinline__ void prefetch(const EpCombineArgs &args, const Start &start, u32 lane) const {
        if (unit < end) next.prefetch(args, start, unit, lane);
    }

    // Receives all.
    template <typename Wire>
    __device__ __forceinline__ void receive(const EpCombineArgs &args, const Start &start, u32 lane) {
        constexpr u32 NOTES = (FLAGGER - 1) * LANES;
        bool any = unit < end;
        while (unit < end) {
            Gather gather = next;
            u32 now = unit;
            unit += step;
            if (unit < end) next.look(args, unit, lane);
            gather.sum<Wire>(args, start, now, lane, [&] { prefetch(args, start, lane); });
            if (now < step) mark_of(NOTES, args.marks, EP_MARK_SUM);
        }
        if (any) mark_of(NOTES, args.marks, EP_MARK_SUMS);
    }
};

// Whether this is the last block of the launch to have read the epoch. Called by one thread of each block.
__device__ __forceinline__ bool is_last_to_begin(u64 blocks) {
    if (atom_add_acq_rel_gpu_u64(blocks, 1) != gridDim.x - 1) return false;
    st_relaxed_gpu_u64(blocks, 0);
    return true;
}

// Advances the epochs for this rank's next launches, which start after this one. All blocks must have read the epoch.
// One thread of the launch.
__device__ __forceinline__ void advance_epochs(const EpCommon &c, const Start &start) {
    EpState &state = state_of(c);
    if (c.phases & EP_SEND) {
        st_relaxed_gpu_u64(address_of(state.combine_begun), start.sent);
        st_relaxed_gpu_u64(address_of(state.combine_sent), start.sent);
    }
    if (c.phases & EP_RECEIVE) st_relaxed_gpu_u64(address_of(state.combine_ended), start.received);
}

// A combine of a block whose shared memory is `shared`. All threads.
template <typename Wire>
__device__ __forceinline__ void run_combine(const EpCombineArgs &args, u8 *shared) {
    begin_launch();
    const EpCommon &c = args.common;
    Start &start = *reinterpret_cast<Start *>(shared);
    u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    mark_of(0, args.marks, EP_MARK_BEGUN);
    bool sends = c.phases & EP_SEND;
    Flags &flags = *reinterpret_cast<Flags *>(after_start(shared));
    u8 *stages = after_start(shared) + EP_FLAGS;
    u64 blocks = address_of(state_of(c).combine_blocks[c.phases]);
    // Issue loads that do not depend on the block's shared state before it is read.
    Returns returns(args, warp, lane);
    Parts parts(args, warp, lane);
    OwnWeight own;
    if (warp == FLAGGER) {
        own = OwnWeight(args, lane);
        const EpState &state = state_of(c);
        begin(c, {state.combine_sent, state.combine_ended, EP_WORD_COMBINE_TAKEN}, start, lane);
        begin_flags(flags, lane);
    }
    if (warp == FLAGGER - 1) begin_combine(c, start, lane);
    returns.prefetch(args, lane);
    __syncthreads();
    mark_of(0, args.marks, EP_MARK_PLANNED);
    // Before any wait for other ranks, which may wait for this.
    if (warp == FLAGGER - 1) {
        bool releases = blockIdx.x == gridDim.x - 1;
        if (releases) release_slots(c, start, EP_WORD_COMBINE_TAKEN, lane);
        if (sends && (start.hosted & start.open & ~start.free)) {
            watch_slots(c, start, EP_WORD_COMBINE_TAKEN, EP_STAGE_COMBINE_TAKEN, releases, lane);
        }
    }
#if EP_NODE
    if (sends && warp == FLAGGER - 1) {
        decline(c, start, lane);
        // Before any wait of this node's ranks for weights. The flagging warp has this rank's own to send.
        forward_weights(c, start, lane);
    }
#endif
    if (warp == FLAGGER) {
        if (sends) send_weights(args, start, own, lane);
        if (!c.waits && lane == 0 && is_last_to_begin(blocks)) advance_epochs(c, start);
        if (sends) set_flags(c, flags, start.sent, BACK_SENDERS, lane);
        mark_of(FLAGGER * LANES, args.marks, EP_MARK_DETAILS);
    } else if (sends && warp < BACK_SENDERS) {
        Outbox outbox = {flags, warp};
        returns.send<Wire>(args, start, outbox, stages, lane);
#if EP_NODE
        // Relays wait for what this rank and others have sent.
        outbox.settle(lane);
        Relays{returns.worker, returns.workers, SLOTS && args.y_weights != 0}.send(c, start, outbox, stages, lane);
#endif
        parts.prefetch(args, start, lane);
        outbox.end(lane);
        mark_of(0, args.marks, EP_MARK_SENT);
    }
    parts.receive<Wire>(args, start, lane);
    if (start.hosted && warp == 0 && blockIdx.x == 0) look_at_slots(c, start, EP_WORD_COMBINE_TAKEN, lane);
#if EP_MARKED
    if (args.marks) __syncthreads();
#endif
    mark_of(0, args.marks, EP_MARK_DONE);
    // Wait statistics need the results of all blocks.
    if (!c.waits || !is_last_block(blocks)) return;
    if (c.phases & EP_RECEIVE) count_waits(c);
    if (threadIdx.x == 0) advance_epochs(c, start);
}
