// Combine in the expert layout, by pieces; a warp takes one at a time.
//
//     weights:  this rank's, to the ranks of its experts, unless they went with the dispatch (with prereduction)
//     send:     the rows of a token's experts here -> weighted and summed -> one row, back to the token's rank, a flag
//               (without prereduction: each row as it is)
//     receive:  flags -> the rows of a token's ranks -> summed (without prereduction: weighted, too), bias -> the result
//
// Sums are in the order of selections on the experts' rank, and in that of ranks where the token came from. What a rank
// sends itself goes no way in a launch that both sends and receives: it is summed where it is needed.
#pragma once

#include "kernels/ep_dispatch.cuh"

constexpr u32 BACK_ROWS = EP_PREREDUCE ? 1 : MOST_LOCAL;
constexpr u32 BACK_BYTES = EP_H * 2;
constexpr u32 COMBINE_STAGE = EP_PIECE * 2;
// Elements of a token that a warp receives at a time.
constexpr u32 PART = 512;
constexpr u32 PARTS = (EP_H + PART - 1) / PART;
static_assert(EP_PIECE % PART == 0, "a part is of one piece");

__device__ __forceinline__ bool is_direct(const EpCommon &c) { return c.phases == (EP_SEND | EP_RECEIVE); }

// N * 256 elements, 8 to 8 of each lane.
template <u32 N>
struct Sum {
    float value[N][8] = {};

    // Adds a row's elements, times the weight if there is one.
    __device__ __forceinline__ void add(const Vec16 (&v)[N], bool weighted, float weight) {
#pragma unroll
        for (u32 i = 0; i < N; ++i) {
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

// A lane's part of N * 256 elements of a row, of which there are `elements` from `from` on.
template <u32 N>
__device__ __forceinline__ void load_step(Vec16 (&v)[N], u64 row, u32 from, u32 elements, u32 lane) {
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
        u32 element = from + (i * LANES + lane) * 8;
        v[i] = element < elements ? ld_once_v16(row + element * 2) : Vec16{};
    }
}

// A lane's weight of a token's selection.
struct Weight {
    bool has;
    float value;
};

// Rows that are added: each lane may have one.
struct Terms {
    bool valid;
    u32 order;
    u32 count;

    // In the order of lanes.
    __device__ __forceinline__ Terms(bool valid, u32 lane) : valid(valid) {
        u32 all = __ballot_sync(WHOLE_WARP, valid);
        order = __popc(all & ((1u << lane) - 1));
        count = __popc(all);
    }

    __device__ __forceinline__ u32 lane_of(u32 i) const {
        return __ffs(__ballot_sync(WHOLE_WARP, valid && order == i)) - 1;
    }
};

// Adds up rows, of which DEPTH are under way at once: `load` brings that of a lane; `weigh` gives weights, and is asked when
// the first loads are under way. All lanes.
template <u32 DEPTH, u32 N, typename Load, typename Weigh>
__device__ __forceinline__ void sum_terms(Sum<N> &sum, const Terms &terms, Load load, Weigh weigh) {
    Vec16 v[DEPTH][N];
    u32 source[DEPTH];
#pragma unroll
    for (u32 d = 0; d < DEPTH; ++d) {
        if (d >= terms.count) continue;
        source[d] = terms.lane_of(d);
        load(v[d], source[d]);
    }
    Weight weight = weigh();
    for (u32 i = 0; i < terms.count; i += DEPTH) {
#pragma unroll
        for (u32 d = 0; d < DEPTH; ++d) {
            if (i + d >= terms.count) continue;
            float by = __shfl_sync(WHOLE_WARP, weight.value, source[d]);
            bool has = __shfl_sync(WHOLE_WARP, u32(weight.has), source[d]);
            sum.add(v[d], has, by);
            if (i + d + DEPTH >= terms.count) continue;
            source[d] = terms.lane_of(i + d + DEPTH);
            load(v[d], source[d]);
        }
    }
}

// What each thread sends first of this rank's weights; read before it is known whether it has to be sent.
struct OwnWeight {
    int expert = -1;
    float weight = 1.0f;

    __device__ __forceinline__ OwnWeight() {}

    __device__ __forceinline__ OwnWeight(const EpCombineArgs &args, bool sends) {
        u64 i = u64(blockIdx.x) * EP_THREADS + threadIdx.x;
        if (EP_PREREDUCE && sends && i < u64(args.common.tokens) * EP_K) read(args, i);
    }

    __device__ __forceinline__ void read(const EpCombineArgs &args, u64 i) {
        expert = at<int>(args.common.handle + args.common.parts.sent, i);
        if (args.topk_weights) weight = at<float>(args.topk_weights, i);
    }
};

// Brings this rank's weights to the ranks of its experts, unless they went with the dispatch: each with the number of this
// operation, so that nobody waits for more than the one it needs. 1 where none are given. All blocks.
__device__ __forceinline__ void send_weights(const EpCombineArgs &args, const Start &start, OwnWeight own) {
    const EpCommon &c = args.common;
    if (!EP_PREREDUCE || start.weighted) return;
    u64 count = u64(c.tokens) * EP_K, step = u64(gridDim.x) * EP_THREADS;
    u64 slot = slot_of(start.sent, c.rank) * c.heap.back_weights_stride;
    u64 first = u64(blockIdx.x) * EP_THREADS + threadIdx.x;
    for (u64 i = first; i < count; i += step) {
        if (i != first) own.read(args, i);
        u32 rank = own.expert >= 0 ? own.expert / LOCAL : c.rank;
        bool goes = own.expert >= 0 && (start.open >> rank & 1) && !(is_direct(c) && rank == c.rank);
        if (!goes || !slots_free(c, start, rank, EP_WORD_COMBINE_TAKEN, EP_STAGE_COMBINE_TAKEN)) continue;
        u64 to = start.base[rank] + c.heap.back_weights + slot + i * 8;
        st_relaxed_sys_u64(to, tagged(start.sent, __float_as_uint(own.weight)));
    }
}

// A token's weights, of each lane's selection if it is `here`; they may have to come first. All lanes.
__device__ __forceinline__ Weight weight_of(const EpCombineArgs &args, const Start &start, u32 source, u32 token,
                                            bool here, u32 lane) {
    const EpCommon &c = args.common;
    u64 i = u64(token) * EP_K + lane;
    Weight weight = {false, 0.0f};
    if (!here) return weight;
    if (start.flags[source] & EP_WEIGHTED) {
        return {true, at<float>(c.handle + c.parts.weights, u64(source) * c.max_tokens * EP_K + i)};
    }
    u64 word = c.base + c.heap.back_weights + slot_of(start.sent, source) * c.heap.back_weights_stride + i * 8;
    u64 seen = ld_relaxed_sys_u64(word);
    if (!is_tagged(seen, start.sent)) seen = await_tagged(c, word, source, EP_STAGE_WEIGHTS, start.sent);
    if (is_tagged(seen, start.sent)) weight = {true, __uint_as_float(static_cast<u32>(seen))};
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

// Reads and sums what goes back, into `stage`. `row`: of each lane's selection, or EP_NOWHERE. All lanes.
__device__ __forceinline__ void stage_back(const EpCombineArgs &args, const Start &start, const Return &r, u32 row,
                                           u8 *stage, u32 lane) {
    constexpr u32 DEPTH = 2;
    bool here = row != EP_NOWHERE;
    Terms terms(here, lane);
    if (!EP_PREREDUCE) terms = Terms(here && terms.order == r.which, lane);
    u64 address = args.y + row * args.y_stride + r.piece * EP_PIECE * 2ull;
    u32 elements = piece_elements(r.piece);
    for (u32 i = DEPTH; i < terms.count; ++i) {
        u64 later = __shfl_sync(WHOLE_WARP, address, terms.lane_of(i));
        for (u32 byte = lane * 128; byte < elements * 2; byte += LANES * 128) prefetch_l2(later + byte);
    }
    Weight weight = {false, 0.0f};
    for (u32 from = 0; from < elements; from += STEP) {
        Sum<LOADS> sum;
        auto load = [&](Vec16(&v)[LOADS], u32 source) {
            load_step(v, __shfl_sync(WHOLE_WARP, address, source), from, elements, lane);
        };
        sum_terms<DEPTH>(sum, terms, load, [&] {
            if (EP_PREREDUCE && from == 0) weight = weight_of(args, start, r.source, r.token, here, lane);
            __syncwarp();
            return weight;
        });
#pragma unroll
        for (u32 i = 0; i < LOADS; ++i) {
            u32 element = from + (i * LANES + lane) * 8;
            if (element < elements) *reinterpret_cast<Vec16 *>(stage + element * 2) = sum.narrowed(i);
        }
    }
}

// A warp's share of what goes back: rows of other ranks first, by turns, then this rank's own if they have to be sent. Each
// lane looks at one of the next 32 pieces that may be this warp's.
struct Returns {
    u32 worker;
    u32 workers;
    u64 others;
    u64 units;
    // Of the first 32 pieces: how many selections are here. Of the first one: each lane's row.
    u32 present = 0;
    u32 row = EP_NOWHERE;

    __device__ __forceinline__ Returns(const EpCombineArgs &args, u32 warp, u32 lane) {
        const EpCommon &c = args.common;
        bool sends = (c.phases & EP_SEND) && warp < EP_SENDERS;
        u64 rows = u64(c.max_tokens) * BACK_ROWS * PIECES;
        worker = warp * gridDim.x + blockIdx.x;
        workers = EP_SENDERS * gridDim.x;
        others = rows * (EP_R - 1);
        units = !sends ? 0 : is_direct(c) ? others : rows * EP_R;
        if (worker >= units) return;
        u64 unit = worker + u64(lane) * workers;
        if (unit < units) present = present_of(c, unit_of(c, unit));
        if (lane < EP_K) row = row_of(c, unit_of(c, worker), lane);
    }

    __device__ __forceinline__ Return unit_of(const EpCommon &c, u64 unit) const {
        constexpr u32 OTHERS = EP_R > 1 ? EP_R - 1 : 1;
        u32 piece = static_cast<u32>(unit % PIECES), which = static_cast<u32>(unit / PIECES % BACK_ROWS);
        u32 pair = static_cast<u32>(unit / (PIECES * BACK_ROWS));
        if (unit >= others) return Return{c.rank, pair - c.max_tokens * (EP_R - 1), which, piece};
        return Return{(c.rank + 1 + pair % OTHERS) % EP_R, pair / OTHERS, which, piece};
    }

    static __device__ __forceinline__ u32 present_of(const EpCommon &c, const Return &r) {
        return at<u8>(c.handle + c.parts.present, u64(r.source) * c.max_tokens + r.token);
    }

    static __device__ __forceinline__ u32 row_of(const EpCommon &c, const Return &r, u32 lane) {
        return at<u32>(c.handle + c.parts.routes, (u64(r.source) * c.max_tokens + r.token) * EP_K + lane);
    }

    // Sends all; the last piece is still on its way.
    __device__ __forceinline__ Pending send(const EpCombineArgs &args, Start &start, const Peers &peers, u8 *stages,
                                            u32 lane) {
        const EpCommon &c = args.common;
        Pending pending;
        u32 stage = 0;
        for (u64 first = worker; first < units; first += u64(LANES) * workers) {
            u64 unit = first + u64(lane) * workers;
            Return mine = unit_of(c, unit < units ? unit : first);
            bool has = unit < units && mine.token < start.tokens[mine.source] && peers.is_open(mine.source);
            if (has && first != worker) present = present_of(c, mine);
            has = has && present > mine.which;
            for (u32 left = __ballot_sync(WHOLE_WARP, has); left; left &= left - 1) {
                u64 next = first + u64(__ffs(left) - 1) * workers;
                Return r = unit_of(c, next);
                if (next != worker) row = lane < EP_K ? row_of(c, r, lane) : EP_NOWHERE;
                u8 *place = stages + stage * COMBINE_STAGE;
                if (EP_STAGES == 1) settle(pending, start, lane);
                stage_back(args, start, r, row, place, lane);
                settle(pending, start, lane);
                send_one(c, start, peers, r, place, pending, lane);
                if (next == worker) mark_of(0, args.marks, EP_MARK_FIRST);
                if (++stage == EP_STAGES) stage = 0;
            }
        }
        return pending;
    }

    static __device__ __forceinline__ void send_one(const EpCommon &c, const Start &start, const Peers &peers,
                                                    const Return &r, const u8 *stage, Pending &pending, u32 lane) {
        bool sender = lane == 0 && slots_free(c, start, r.source, EP_WORD_COMBINE_TAKEN, EP_STAGE_COMBINE_TAKEN);
        u64 base = peers.base.of(r.source), slot = slot_of(start.sent, c.rank), i = u64(r.token) * BACK_ROWS + r.which;
        u64 to = base + c.heap.back + slot * c.heap.back_slot + i * c.heap.back_stride + r.piece * EP_PIECE * 2ull;
        u64 flag = base + c.heap.back_flags + slot * c.heap.back_flags_slot + (i * PIECES + r.piece) * 8;
        start_sending(pending, stage, piece_elements(r.piece) * 2, sender, to, flag, lane);
    }
};

// One part of a token that comes back, summed.
struct Gather {
    // Each lane's row: whether there is one, of which rank, where, and its weight.
    bool valid;
    bool own;
    u32 rank;
    u64 row;
    u64 flag;
    Weight weight;
    // With prereduction, what this rank itself adds.
    Vec16 mine[2];

    // All that needs no other rank. All lanes.
    __device__ __forceinline__ void begin(const EpCombineArgs &args, const Start &start, const Peers &peers, u32 unit,
                                          u32 lane) {
        const EpCommon &c = args.common;
        u32 token = unit / PARTS, at_element = unit % PARTS * PART;
        u64 selection = u64(token) * EP_K + lane;
        int expert = lane < EP_K ? at<int>(c.handle + c.parts.sent, selection) : -1;
        rank = expert >= 0 ? expert / LOCAL : 0;
        valid = expert >= 0;
        weight = {false, 0.0f};
        if (!EP_PREREDUCE || is_direct(c)) read_weight(args, start, selection);
        own = is_direct(c) && valid && rank == c.rank;
        valid = valid && peers.is_open(rank) && (!own || token < start.tokens[c.rank]);
        u64 here = 0;
        if (own && valid) here = address_here(args, token, at_element, lane);
        u32 which = 0;
        if constexpr (EP_PREREDUCE) {
            if (is_direct(c)) sum_here(here, at_element, lane);
            weight = {false, 0.0f};
            valid = is_first_of_rank(rank, valid, lane);
        } else {
            u32 alike = __match_any_sync(WHOLE_WARP, expert >= 0 ? rank : EP_R + lane);
            which = __popc(alike & ((1u << lane) - 1));
        }
        u64 slot = slot_of(start.received, rank), i = u64(token) * BACK_ROWS + which;
        row = c.base + c.heap.back + slot * c.heap.back_slot + i * c.heap.back_stride + at_element * 2;
        if (!EP_PREREDUCE && own) row = here;
        flag = c.base + c.heap.back_flags + slot * c.heap.back_flags_slot + (i * PIECES + at_element / EP_PIECE) * 8;
    }

    __device__ __forceinline__ void read_weight(const EpCombineArgs &args, const Start &start, u64 selection) {
        const EpCommon &c = args.common;
        u64 given = start.weighted ? c.handle + c.parts.sent_weights : args.topk_weights;
        if (valid && given) weight = {true, at<float>(given, selection)};
    }

    // Where a lane's row is, on this rank; 0 for none.
    static __device__ __forceinline__ u64 address_here(const EpCombineArgs &args, u32 token, u32 at_element, u32 lane) {
        const EpCommon &c = args.common;
        u32 number = Returns::row_of(c, Return{c.rank, token, 0, 0}, lane);
        return number == EP_NOWHERE ? 0 : args.y + number * args.y_stride + at_element * 2ull;
    }

    // The sum of the rows that are here, as it would go over the wire.
    __device__ __forceinline__ void sum_here(u64 here, u32 at_element, u32 lane) {
        Sum<2> sum;
        u32 elements = elements_of(at_element);
        auto load = [&](Vec16(&v)[2], u32 source) {
            load_step(v, __shfl_sync(WHOLE_WARP, here, source), 0, elements, lane);
        };
        sum_terms<3>(sum, Terms(here != 0, lane), load, [&] { return weight; });
#pragma unroll
        for (u32 i = 0; i < 2; ++i) mine[i] = sum.narrowed(i);
    }

    static __device__ __forceinline__ u32 elements_of(u32 at_element) {
        u32 left = EP_H - at_element;
        return left < PART ? left : PART;
    }

    // Waits for what comes from others, and writes the sum. All lanes.
    __device__ __forceinline__ void end(const EpCombineArgs &args, const Start &start, u32 unit, u32 lane) {
        const EpCommon &c = args.common;
        u32 token = unit / PARTS, at_element = unit % PARTS * PART, elements = elements_of(at_element);
        if (valid && !own) valid = await(c, flag, start.received, rank, EP_STAGE_BACK_ROW, start.received);
        // What one lane has waited for is there for all.
        __syncwarp();
        Terms terms(valid, lane);
        if constexpr (EP_PREREDUCE) {
            // By rank.
            terms.order = 0;
            for (u32 k = 0; k < EP_K; ++k) {
                bool other = __shfl_sync(WHOLE_WARP, u32(valid), k);
                u32 its = __shfl_sync(WHOLE_WARP, rank, k);
                terms.order += other && its < rank;
            }
        }
        u32 mine_of = __ffs(__ballot_sync(WHOLE_WARP, EP_PREREDUCE && own && valid)) - 1;
        Sum<2> sum;
        auto load = [&](Vec16(&v)[2], u32 source) {
            if (EP_PREREDUCE && source == mine_of) {
                v[0] = mine[0];
                v[1] = mine[1];
            } else {
                load_step(v, __shfl_sync(WHOLE_WARP, row, source), 0, elements, lane);
            }
        };
        sum_terms<4>(sum, terms, load, [&] { return weight; });
        for (u32 k = 0; k < 2; ++k) {
            u64 bias = k == 0 ? args.bias0 : args.bias1;
            if (!bias) continue;
            Vec16 v[2];
            load_step(v, bias + u64(token) * BACK_BYTES + at_element * 2, 0, elements, lane);
            sum.add(v, false, 0.0f);
        }
        u64 out = args.out + token * args.out_stride + at_element * 2;
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            u32 element = (i * LANES + lane) * 8;
            if (element < elements) st_v16(out + element * 2, sum.narrowed(i));
        }
    }
};

// Ends a combine: the last block says so to this rank's next launches.
__device__ __forceinline__ void end_combine(const EpCombineArgs &args, u64 sent, u64 received) {
    const EpCommon &c = args.common;
    EpState &state = state_of(c);
    bool last = is_last_to_end(c, address_of(state.combine_blocks) + 8 * c.phases);
    mark_of(0, args.marks, EP_MARK_DONE);
    if (!last) return;
    if (c.phases & EP_RECEIVE) count_waits(c);
    if (threadIdx.x != 0) return;
    if (c.phases & EP_SEND) {
        st_relaxed_gpu_u64(address_of(state.combine_begun), sent);
        st_relaxed_gpu_u64(address_of(state.combine_sent), sent);
    }
    if (c.phases & EP_RECEIVE) st_relaxed_gpu_u64(address_of(state.combine_ended), received);
}
