// A gateway's part of a combine: weights of its column, copied to the ranks of its node; and sums of their rows, returned.
//
//     rows of a token's ranks here, in the node area  ->  summed in the order of ranks  ->  one row, to the token's rank
#pragma once

#include "kernels/ep_flags.cuh"
#include "kernels/ep_node.cuh"
#include "kernels/ep_sums.cuh"

#if EP_NODE

// The ranks of this node to which a token of the column was forwarded and that are open now.
__device__ __forceinline__ u32 open_of(const EpCommon &c, const Start &start, u64 forwards) {
    u32 near = static_cast<u32>(start.open >> near_rank(c, 0)) & static_cast<u32>((1ull << NODE_RANKS) - 1);
    return static_cast<u32>(forwards) & near;
}

// Forwards this block's share of the weights that the column gives to this combine. One warp of each block.
__device__ __noinline__ void forward_weights(const EpCommon &c, const Start &start, u32 lane) {
    if (SLOTS) return;
    u64 epoch = start.sent, offset = c.heap.back_weights + parity_of(epoch) * c.heap.back_weights_stride;
#pragma unroll 1
    for (u32 number = 0; number < COLUMN; ++number) {
        u32 source = column_rank(c, number), count = start.tokens[source] * EP_K;
        if (start.flags[source] & EP_WEIGHTED) continue;
        bool lost = !(start.open >> source & 1);
#pragma unroll 1
        for (u32 i = blockIdx.x * LANES + lane; i < count && !lost; i += gridDim.x * LANES) {
            u32 ranks = open_of(c, start, forwards_of(c, number, i / EP_K));
            if (ranks == 0) continue;
            u64 seen = await_tagged(c, start.via[source] + offset + 8ull * i, source, EP_STAGE_WEIGHTS, epoch);
            lost = !is_tagged(seen, epoch);
            if (lost) break;
            for (u32 left = ranks; left; left &= left - 1) {
                u32 near = near_rank(c, __ffs(left) - 1);
                if (!slots_free(c, start, near, EP_WORD_COMBINE_TAKEN, EP_STAGE_COMBINE_TAKEN)) continue;
                st_relaxed_sys_u64(forwarded_inbox(c, start, near, source) + offset + 8ull * i, seen);
            }
        }
        if (__any_sync(WHOLE_WARP, lost)) tell_lost(c, start, source, EP_STAGE_WEIGHTS, epoch, lane);
    }
}

// Announces to the gateways of this node for which of their columns' ranks this rank returns nothing. One warp of each block.
__device__ __forceinline__ void decline(const EpCommon &c, const Start &start, u32 lane) {
    u32 gateway = near_rank(c, lane % NODE_RANKS), columns = 0;
#pragma unroll 1
    for (u32 number = 0; number < COLUMN; ++number) {
        u32 source = (gateway + (number + 1) * NODE_RANKS) % EP_R;
        columns |= u32(!hears(c, start, source) || start.tokens[source] == 0) << number;
    }
    if (lane < NODE_RANKS && columns && (start.open >> gateway & 1)) {
        u64 word = word_in(c, start.to[gateway], EP_WORD_DECLINED + parity_of(start.sent));
        st_relaxed_sys_u64(word, tagged(start.sent, columns));
    }
    __syncwarp();
}

// The node area that gets a rank's sum for a token of another node: its gateway's.
__device__ __forceinline__ NodeArea area_for(const EpCommon &c, const Start &start, u32 source) {
    return NodeArea(c, start.via[gateway_from(c, source)], c.rank % NODE_RANKS, column_of(c, source), start.sent);
}

// A warp's share of the rows that this rank returns for its node: of each token of the column, piece by piece.
struct Relays {
    u32 worker;
    u32 workers;
    // Rank layout: weights return with rows.
    bool weighted;

    // Rank layout: the sums of the weights that the ranks that `came` have left with their rows of a token, one for each lane
    // below K. A rank whose weights are missing counts as one whose row is missing. All lanes.
    __device__ __forceinline__ float sum_weights(const EpCommon &c, const Start &start, u32 number, u32 token, bool &came,
                                                 u32 lane) const {
        float sum = 0.0f;
#pragma unroll 1
        for (u32 left = __ballot_sync(WHOLE_WARP, came); left; left &= left - 1) {
            u32 writer = __ffs(left) - 1;
            u64 word = NodeArea(c, c.base, writer, number, start.sent).weights_of(token) + 8 * lane;
            u64 seen = tagged(start.sent, 0);
            if (lane < EP_K) seen = await_tagged(c, word, near_rank(c, writer), EP_STAGE_WEIGHTS, start.sent);
            __syncwarp();
            if (__all_sync(WHOLE_WARP, is_tagged(seen, start.sent))) {
                sum = add_rn_f32(sum, __uint_as_float(static_cast<u32>(seen)));
            } else if (lane == writer) {
                came = false;
            }
        }
        return sum;
    }

    // Waits for the rows of a piece in the node area, adds them up and starts to send the sum. All lanes.
    __device__ __forceinline__ void send_piece(const EpCommon &c, const Start &start, Outbox &outbox, u8 *stages, u32 unit,
                                               u64 forwards, u32 lane) const {
        constexpr u32 DEPTH = 2, N = 2, STEP_BACK = N * LANES * 8;
        u64 epoch = start.sent;
        u32 number = unit / PIECES % COLUMN, token = unit / PIECES / COLUMN, piece = unit % PIECES;
        u32 source = column_rank(c, number), selected = static_cast<u32>(forwards >> 32);
        NodeArea area(c, c.base, lane % NODE_RANKS, number, epoch);
        bool came = lane < NODE_RANKS && (open_of(c, start, forwards) >> lane & 1);
        came = came && await(c, area.flag(token, piece), epoch, near_rank(c, lane), EP_STAGE_BACK_ROW, epoch);
        // Makes what any lane acquired visible to all lanes.
        __syncwarp();
        bool weighs = SLOTS && weighted && piece == 0;
        float weight = 0.0f;
        if (weighs) weight = sum_weights(c, start, number, token, came, lane);
        u32 missing = selected & ~__ballot_sync(WHOLE_WARP, came), elements = piece_elements(piece);
        // In the order of ranks.
        Terms terms(came, lane);
        u64 row = area.row(c, token, piece);
        u8 *stage = outbox.stage(stages, COMBINE_STAGE);
#pragma unroll 1
        for (u32 from = 0; from < elements; from += STEP_BACK) {
            Sum<N> sum;
            auto load = [&](Vec16(&v)[N], u32 whose) {
                load_step(v, __shfl_sync(WHOLE_WARP, row, whose) + from * 2, elements - from, lane);
            };
            sum_terms<DEPTH, false, Plain>(sum, terms, false, load, [] { return 1.0f; });
#pragma unroll
            for (u32 i = 0; i < N; ++i) {
                u32 element = from + (i * LANES + lane) * 8;
                if (element < elements) *reinterpret_cast<Vec16 *>(stage + element * 2) = sum.narrowed(i);
            }
        }
        u64 place = c.heap.back + parity_of(epoch) * c.heap.back_slot + token * c.heap.back_stride + piece * EP_PIECE * 2ull;
        u32 kind = missing ? EP_COMMAND_BACK_LESS : EP_COMMAND_BACK;
        outbox.send(stage, elements * 2, start.to[source] + place, range_command(kind, source, place, elements * 2), lane);
        u64 at = weights_back_at(c, epoch, token);
        if (weighs && lane < EP_K) st_relaxed_sys_u64(start.to[source] + at + 8 * lane, __float_as_uint(weight));
        if (weighs) outbox.announce(range_command(EP_COMMAND_WEIGHTS, source, at, EP_K * 8), lane);
        if (missing == 0) return;
        at = missing_at(c, epoch, token, piece);
        if (lane == 0) st_relaxed_sys_u64(start.to[source] + at, missing);
        outbox.announce(range_command(EP_COMMAND_WEIGHTS, source, at, 8), lane);
    }

    // All lanes.
    __device__ __forceinline__ void send(const EpCommon &c, const Start &start, Outbox &outbox, u8 *stages, u32 lane) const {
        u32 most = lane < COLUMN && (start.open >> column_rank(c, lane) & 1) ? start.tokens[column_rank(c, lane)] : 0;
        u32 units = __reduce_max_sync(WHOLE_WARP, most) * COLUMN * PIECES;
#pragma unroll 1
        for (u32 first = worker; first < units; first += LANES * workers) {
            // Each lane examines one of the next 32 candidates.
            u32 unit = first + lane * workers, number = unit / PIECES % COLUMN, token = unit / PIECES / COLUMN;
            u32 source = column_rank(c, number);
            bool has = unit < units && token < start.tokens[source] && (start.open >> source & 1);
            u64 forwards = has ? forwards_of(c, number, token) : 0;
            for (u32 left = __ballot_sync(WHOLE_WARP, forwards >> 32 != 0); left; left &= left - 1) {
                u32 whose = __ffs(left) - 1;
                u32 to = __shfl_sync(WHOLE_WARP, source, whose);
                u32 free = lane == 0 && slots_free(c, start, to, EP_WORD_COMBINE_TAKEN, EP_STAGE_COMBINE_TAKEN);
                u64 its = __shfl_sync(WHOLE_WARP, forwards, whose);
                if (!__shfl_sync(WHOLE_WARP, free, 0)) continue;
                send_piece(c, start, outbox, stages, first + whose * workers, its, lane);
            }
        }
    }
};

// Rows that other nodes return for a token, one for each.
struct FromNodes {
    // Each lane's node and whether it has its term: the row of one of the token's nodes.
    u32 node;
    bool valid;
    u64 row;

    // Of lanes with a selection on `rank`, the first of each other node. `at_element`: the first of some elements.
    __device__ __forceinline__ FromNodes(const EpCommon &c, const Start &start, u32 token, u32 at_element, u32 rank, bool has,
                                         u32 lane) {
        u64 epoch = start.received;
        u32 gateway = gateway_to(c, rank), piece = at_element / EP_PIECE;
        node = rank / NODE_RANKS;
        valid = is_first_of_rank(gateway, has && is_elsewhere(c, rank), lane);
        u64 slot = parity_of(epoch);
        row = start.via[gateway] + c.heap.back + slot * c.heap.back_slot + token * c.heap.back_stride + at_element * 2;
        if (!valid) return;
        u64 flag = start.via[gateway] + c.heap.back_flags + slot * c.heap.back_flags_slot + (u64(token) * PIECES + piece) * 8;
        valid = await(c, flag, epoch, gateway, EP_STAGE_BACK_ROW, epoch);
        if (valid && (ld_relaxed_sys_u64(flag) & LESS)) note_missing(c, start, gateway, token, piece);
    }

    // Masks the ranks that a returned row lacks.
    static __device__ __noinline__ void note_missing(const EpCommon &c, const Start &start, u32 gateway, u32 token, u32 piece) {
        u64 epoch = start.received, word = start.via[gateway] + missing_at(c, epoch, token, piece);
        u64 seen = await_tagged(c, word, gateway, EP_STAGE_BACK_ROW, epoch);
        u32 missing = is_tagged(seen, epoch) ? static_cast<u32>(seen) & static_cast<u32>((1ull << NODE_RANKS) - 1) : 0;
        for (; missing; missing &= missing - 1) {
            mask_for(c, gateway / NODE_RANKS * NODE_RANKS + __ffs(missing) - 1, EP_STAGE_BACK_ROW, epoch, seen);
        }
    }
};

#endif
