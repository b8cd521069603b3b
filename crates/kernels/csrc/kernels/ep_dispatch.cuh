// Rows of a dispatch in the expert layout, in pieces; a warp handles one piece at a time.
//
//     send:     a token's piece -> cast, in shared memory -> the token's slot at each of its ranks, once -> a flag there
//     receive:  a flag -> the slot's piece -> the rows of its experts, as planned
#pragma once

#include "kernels/ep_forward.cuh"
#include "kernels/ep_plan.cuh"

constexpr u32 ROW_BYTES = EP_H * ELEMENT;
// Elements that a warp loads at once.
constexpr u32 STEP = 1024;
// 16 bytes of bf16 that a lane loads at once.
constexpr u32 LOADS = STEP / 8 / LANES;
static_assert(LOADS <= 16 && 16 % LOADS == 0, "lanes of a block have one of its divisions each");

// Casts 1024 elements, 8 to 8 of each lane, of which `elements` are there; 16 lanes have a block. All lanes.
__device__ __forceinline__ void cast_step(const Vec16 (&v)[LOADS], u8 *stage, u8 *scales, u32 from, u32 elements,
                                          u32 lane) {
    float amax[LOADS] = {};
#pragma unroll
    for (u32 i = 0; i < LOADS; ++i) {
#pragma unroll
        for (u32 w = 0; w < 4; ++w) amax[i] = largest(amax[i], v[i].word[w]);
    }
#pragma unroll
    for (u32 step = 8; step > 0; step /= 2) {
#pragma unroll
        for (u32 i = 0; i < LOADS; ++i) amax[i] = fmaxf(amax[i], __shfl_xor_sync(WHOLE_WARP, amax[i], step));
    }
    // One division of each lane: that of one of its blocks.
    u32 own = lane % LOADS;
    float most = amax[0];
#pragma unroll
    for (u32 i = 1; i < LOADS; ++i) most = own == i ? amax[i] : most;
    Scaled by = scaled(most);
#pragma unroll
    for (u32 i = 0; i < LOADS; ++i) {
        float factor = __shfl_sync(WHOLE_WARP, by.factor, (lane & 16) + i);
        u32 element = from + (i * LANES + lane) * 8;
        if (element >= elements) continue;
        u32 *to = reinterpret_cast<u32 *>(stage + element);
        to[0] = cast_four(v[i].word[0], v[i].word[1], factor);
        to[1] = cast_four(v[i].word[2], v[i].word[3], factor);
        if (lane % 16 == i) store_scale(scales, element / BLOCK, by.scale);
    }
}

// Loads a piece of a token into `stage` in wire format; returns its size in bytes. All lanes.
__device__ __forceinline__ u32 stage_piece(const EpDispatchArgs &args, u32 token, u32 piece, u8 *stage, u32 lane) {
    u32 elements = piece_elements(piece);
    u64 row = args.x + u64(token) * args.x_stride;
    u32 data = elements * ELEMENT;
    if (EP_FP8 && args.x_fp8) {
        for (u32 byte = lane * 16; byte < data; byte += LANES * 16) {
            *reinterpret_cast<Vec16 *>(stage + byte) = ld_once_v16(row + piece * EP_PIECE + byte);
        }
        u64 scales = args.x_scales + token * args.x_scale_strides[0];
        for (u32 i = lane; i < elements / BLOCK; i += LANES) {
            u32 block = piece * (EP_PIECE / BLOCK) + i;
            if (EP_SCALE == 2) {
                stage[data + i] = at<u8>(scales + block / 4 * args.x_scale_strides[1], block % 4);
            } else {
                reinterpret_cast<u32 *>(stage + data)[i] = at<u32>(scales + block * args.x_scale_strides[1]);
            }
        }
    } else {
        u64 from = row + u64(piece) * EP_PIECE * 2;
        for (u32 step = 0; step < elements; step += STEP) {
            Vec16 v[LOADS] = {};
#pragma unroll
            for (u32 i = 0; i < LOADS; ++i) {
                u32 element = step + (i * LANES + lane) * 8;
                if (element < elements) v[i] = ld_once_v16(from + element * 2);
            }
            if constexpr (EP_FP8) {
                cast_step(v, stage, stage + data, step, elements, lane);
            } else {
#pragma unroll
                for (u32 i = 0; i < LOADS; ++i) {
                    u32 element = step + (i * LANES + lane) * 8;
                    if (element < elements) *reinterpret_cast<Vec16 *>(stage + element * 2) = v[i];
                }
            }
        }
    }
    return (data + elements / BLOCK * SCALE + 15) / 16 * 16;
}

// The command of rows that are cast and scaled as these.
constexpr u32 ROWS_COMMAND = !EP_FP8 ? EP_COMMAND_ROWS_BF16 : EP_SCALE == 2 ? EP_COMMAND_ROWS_UE8M0 : EP_COMMAND_ROWS_FP8;

// The expert of a selection of this rank's.
__device__ __forceinline__ int chosen_at(const EpDispatchArgs &args, u64 selection) {
    if (SLOTS && args.cached) return at<int>(args.common.handle + args.common.parts.sent, selection);
    return expert_at(args, selection);
}

// Rank layout: where this rank's result is.
__device__ __forceinline__ u64 own_region(const EpDispatchArgs &args) {
    const EpCommon &c = args.common;
    return c.base + c.heap.regions + args.region * c.heap.region_stride;
}

// A piece of a token that is to be sent: each lane's expert, and the bytes in the stage.
struct Outgoing {
    int expert = -1;
    u32 bytes = 0;

    __device__ __forceinline__ void read(const EpDispatchArgs &args, u32 unit, u8 *stage, u32 lane) {
        u32 token = unit / PIECES;
        expert = lane < EP_K ? chosen_at(args, u64(token) * EP_K + lane) : -1;
        bytes = stage_piece(args, token, unit % PIECES, stage, lane);
    }

    // Starts to send it.
    __device__ __forceinline__ void send(const EpCommon &c, const Start &start, u32 unit, const u8 *stage, Pending &pending,
                                         u32 lane) const {
        u32 token = unit / PIECES, piece = unit % PIECES;
        u32 rank = expert >= 0 ? expert / LOCAL : 0;
        bool goes = expert >= 0;
#if EP_NODE
        goes = goes && (start.open >> rank & 1);
        rank = gateway_to(c, rank);
#endif
        bool sender = is_first_of_rank(rank, goes, lane) && takes_rows(start, rank);
        u64 inbox = start.to[rank], row = parity_of(start.sent) * c.max_tokens + token;
        u64 place = c.heap.rows + row * c.heap.row_stride + piece * c.heap.piece_stride, to = inbox + place;
        u64 flag = inbox + c.heap.row_flags + (row * PIECES + piece) * c.heap.flag_stride;
        u64 all = c.tokens * c.heap.row_stride;
        if (start.far >> rank & 1) flag = range_command(ROWS_COMMAND, rank, place, bytes, all);
        start_sending(pending, stage, bytes, sender, to, flag, lane);
    }
};

// A warp's share of what is sent: every `step`-th piece of a token from `unit` on.
struct Share {
    u32 unit;
    u32 step;
    u32 end;
};

// Sends this warp's share, double-buffered: the next piece is loaded while one is in flight, and the first while the
// block determines its destination, in `meet`, which every warp calls once. The loop body is not duplicated, since the
// instruction cache is cold at the start of a launch.
template <typename Meet>
__device__ __forceinline__ void send_rows(const EpDispatchArgs &args, Start &start, u8 *stages, Share share, u32 lane,
                                          Pending &pending, Meet meet) {
    u32 stage = 0;
    bool met = false;
#pragma unroll 1
    while (true) {
        bool has = share.unit < share.end;
        u8 *place = stages + stage * DISPATCH_STAGE;
        Outgoing row;
        if constexpr (EP_STAGES == 1) await_pending(args.common, pending, start, lane);
        if (has) row.read(args, share.unit, place, lane);
        if (!met) meet();
        if constexpr (EP_STAGES > 1) await_pending(args.common, pending, start, lane);
        if (!has) break;
        row.send(args.common, start, share.unit, place, pending, lane);
        if (!met) mark_of(0, args.marks, EP_MARK_FIRST);
        met = true;
        share.unit += share.step;
        if (++stage == EP_STAGES) stage = 0;
    }
    mark_of(0, args.marks, EP_MARK_SENT);
}

// Waits for a value of the plan, and returns it.
__device__ __forceinline__ u32 await_planned(u64 address, u64 seen, u64 epoch) {
    while (!is_tagged(seen, epoch)) {
        pause_ns(20);
        seen = ld_relaxed_gpu_u64(address);
    }
    return static_cast<u32>(seen);
}

// Waits for the planning block, and returns each source's token count and flags. The first warp of a block to ask
// waits; it then publishes the values to the other warps. All lanes.
__device__ __forceinline__ PerRank<u32> await_tokens(const EpCommon &c, Start &start, u64 epoch, u32 lane) {
    u32 asked = 0;
    if (lane == 0) asked = atomicExch(&start.asked, 1u);
    PerRank<u32> tokens;
    if (__shfl_sync(WHOLE_WARP, asked, 0) == 0) {
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {
            u32 rank = lane + i * LANES;
            tokens.value[i] = 0;
            if (rank >= EP_R) continue;
            u64 word = c.base + c.heap.plan_tokens + 8 * rank;
            tokens.value[i] = await_planned(word, ld_relaxed_gpu_u64(word), epoch);
            atomicExch(&start.tokens[rank], tokens.value[i]);
        }
        // Makes what any lane acquired visible to all lanes.
        __syncwarp();
        if (lane == 0) atom_add_acq_rel_shared_u32(start.planned, 1);
        return tokens;
    }
    if (lane == 0) {
        while (atom_add_acq_rel_shared_u32(start.planned, 0) == 0) pause_ns(20);
    }
    __syncwarp();
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
        u32 rank = lane + i * LANES;
        tokens.value[i] = rank < EP_R ? atomicAdd(&start.tokens[rank], 0u) : 0;
    }
    return tokens;
}

// A received piece of a token, and its destination.
struct Arrival {
    u32 source;
    u32 token;
    u32 piece;
    // The row of each lane's selection, or EP_NOWHERE.
    u32 row;
};

// Copies a piece from its slot to the rows of its experts; zeros if it was not received. All lanes.
__device__ __forceinline__ void fan_out(const EpDispatchArgs &args, const Start &start, const Arrival &a, bool came, u32 lane) {
    const EpCommon &c = args.common;
    u64 slot = parity_of(start.received) * c.max_tokens + a.token;
    u64 from = start.from[a.source] + c.heap.rows + slot * c.heap.row_stride + a.piece * c.heap.piece_stride;
    constexpr u32 MOST = 4;
    u32 elements = piece_elements(a.piece), data = elements * ELEMENT;
    u32 here = __ballot_sync(WHOLE_WARP, a.row != EP_NOWHERE);
    u64 rows = (SLOTS ? own_region(args) : args.out_x) + u64(a.piece) * EP_PIECE * ELEMENT;
    u32 blocks = elements / BLOCK, most = EP_R * c.max_tokens;
    u64 scales = 0;
    if (EP_FP8 && SLOTS && a.row != EP_NOWHERE) {
        scales = own_region(args) + c.heap.region_scales + u64(a.row) * (EP_H / BLOCK * SCALE);
    } else if (EP_FP8 && a.row != EP_NOWHERE) {
        scales = args.out_scales + a.row / most * args.out_scale_strides[0] + a.row % most * args.out_scale_strides[1];
    }
    auto load_scale = [&](u32 i) -> u32 {
        if (!came || i >= blocks) return 0;
        return SCALE == 1 ? at<u8>(from + data, i) : at<u32>(from + data, i);
    };
    // Issued together with the first elements.
    u32 scale = EP_FP8 ? load_scale(lane) : 0;
    for (u32 first = lane * 16; first - lane * 16 < data; first += MOST * LANES * 16) {
        Vec16 v[MOST] = {};
#pragma unroll
        for (u32 i = 0; i < MOST; ++i) {
            u32 byte = first + i * LANES * 16;
            if (came && byte < data) v[i] = ld_once_v16(from + byte);
        }
        for (u32 left = here; left; left &= left - 1) {
            u64 to = rows + u64(__shfl_sync(WHOLE_WARP, a.row, __ffs(left) - 1)) * ROW_BYTES;
#pragma unroll
            for (u32 i = 0; i < MOST; ++i) {
                u32 byte = first + i * LANES * 16;
                if (byte < data) st_v16(to + byte, v[i]);
            }
        }
    }
    for (u32 first = 0; EP_FP8 && first < blocks; first += LANES) {
        u32 i = first + lane, block = a.piece * (EP_PIECE / BLOCK) + i;
        if (first > 0) scale = load_scale(i);
        for (u32 left = here; left; left &= left - 1) {
            u64 to = __shfl_sync(WHOLE_WARP, scales, __ffs(left) - 1);
            if (i >= blocks) continue;
            if (SLOTS && SCALE == 1) {
                at<u8>(to, block) = static_cast<u8>(scale);
            } else if (SLOTS) {
                at<u32>(to, block) = scale;
            } else if (SCALE == 1) {
                at<u8>(to + block / 4 * args.out_scale_strides[2], block % 4) = static_cast<u8>(scale);
            } else {
                at<u32>(to + block * args.out_scale_strides[2]) = scale;
            }
        }
    }
}

// Writes the metadata of a token's rows; waits for its weights if necessary. All lanes.
__device__ __forceinline__ void note_rows(const EpDispatchArgs &args, const Start &start, const Arrival &a, bool weighted,
                                          u32 lane) {
    const EpCommon &c = args.common;
    u64 epoch = start.received;
    if (a.row != EP_NOWHERE) {
        if (args.out_source) at<u32>(args.out_source, a.row) = a.token;
        u64 i = u64(a.token) * EP_K + lane;
        if (weighted) {
            u64 table = start.from[a.source] + c.heap.tables + parity_of(epoch) * c.heap.table_stride;
            u64 word = table + c.heap.table_weights + 8 * i, seen = ld_relaxed_sys_u64(word);
            if (!is_tagged(seen, epoch)) seen = await_tagged(c, word, a.source, EP_STAGE_TABLE, epoch);
            float weight = is_tagged(seen, epoch) ? __uint_as_float(static_cast<u32>(seen)) : 0.0f;
            at<float>(c.handle + c.parts.weights, u64(a.source) * c.max_tokens * EP_K + i) = weight;
        }
    }
    __syncwarp();
}

// As `note_rows` in the rank layout, where a token has one row; if it was not received it gets no experts. All lanes.
__device__ __forceinline__ void note_token(const EpDispatchArgs &args, const Start &start, const Arrival &a, bool weighted,
                                           bool came, u32 lane) {
    const EpCommon &c = args.common;
    u64 epoch = start.received;
    u64 region = own_region(args), row = __shfl_sync(WHOLE_WARP, a.row, 0), i = u64(a.token) * EP_K + lane;
    if (lane == 0) at<u32>(region + c.heap.region_source, row) = came ? a.token : 0;
    if (lane < EP_K && !args.cached) {
        u64 word = start.from[a.source] + c.heap.tables + parity_of(epoch) * c.heap.table_stride + 8 * i;
        // The plan has seen it.
        u32 expert = static_cast<u32>(ld_relaxed_sys_u64(word)) - 1;
        bool here = came && expert < LOCAL;
        at<u64>(region + c.heap.region_idx, row * EP_K + lane) = here ? u64(expert) : ~0ull;
        if (weighted) {
            u64 seen = tagged(epoch, 0);
            if (here) seen = await_tagged(c, word + c.heap.table_weights, a.source, EP_STAGE_TABLE, epoch);
            at<u32>(region + c.heap.region_weights, row * EP_K + lane) = is_tagged(seen, epoch) ? static_cast<u32>(seen) : 0;
        }
    }
    __syncwarp();
}

__device__ __forceinline__ u64 flag_of(const EpCommon &c, const Start &start, const Arrival &a) {
    u64 row = parity_of(start.received) * c.max_tokens + a.token;
    return start.from[a.source] + c.heap.row_flags + (row * PIECES + a.piece) * c.heap.flag_stride;
}

// Whether a lane has room for all rows of a token.
constexpr bool KEEPS_ROWS = ROUTED <= 8;

// Where the plan has the rows of a token.
__device__ __forceinline__ u64 planned_of(const EpCommon &c, const Arrival &a) {
    return c.base + c.heap.plan_rows + (u64(a.source) * c.max_tokens + a.token) * ROUTED * 8;
}

// The rows of a token, as a lane looks at them.
struct Rows {
    u32 kept[KEEPS_ROWS ? ROUTED : 1] = {};
    u32 count = 0;

    __device__ __forceinline__ void look(const EpDispatchArgs &args, const Arrival &a, u64 epoch) {
        const EpCommon &c = args.common;
        if (SLOTS && args.cached) {
            kept[0] = at<u32>(c.handle + c.parts.routes, u64(a.source) * c.max_tokens + a.token);
            count = kept[0] != EP_NOWHERE;
            return;
        }
        constexpr u32 AT_ONCE = ROUTED < 8 ? ROUTED : 8;
        for (u32 first = 0; first < ROUTED; first += AT_ONCE) {
            u64 at = planned_of(c, a) + 8 * first, seen[AT_ONCE];
#pragma unroll
            for (u32 k = 0; k < AT_ONCE; ++k) {
                seen[k] = first + k < ROUTED ? ld_relaxed_gpu_u64(at + 8 * k) : tagged(epoch, EP_NOWHERE);
            }
#pragma unroll
            for (u32 k = 0; k < AT_ONCE; ++k) {
                u32 row = await_planned(at + 8 * k, seen[k], epoch);
                if (KEEPS_ROWS) kept[KEEPS_ROWS ? k : 0] = row;
                count += row != EP_NOWHERE;
            }
        }
    }

    // To each lane below K its row of the token that lane `whose` has looked at.
    __device__ __forceinline__ u32 spread(const EpCommon &c, const Arrival &a, u32 whose, u64 epoch, u32 lane) const {
        u32 row = EP_NOWHERE;
        if constexpr (KEEPS_ROWS) {
#pragma unroll
            for (u32 k = 0; k < ROUTED; ++k) {
                u32 other = __shfl_sync(WHOLE_WARP, kept[k], whose);
                if (lane == k) row = other;
            }
        } else if (lane < ROUTED) {
            u64 at = planned_of(c, a) + 8 * lane;
            row = await_planned(at, ld_relaxed_gpu_u64(at), epoch);
        }
        return row;
    }
};

// Delivers this warp's share of the received pieces. Each lane examines one of the next 32 candidates, since with many
// ranks most tokens send nothing here.
__device__ __forceinline__ void receive_rows(const EpDispatchArgs &args, Start &start, u32 worker, u32 workers, u32 lane) {
    const EpCommon &c = args.common;
    u64 epoch = start.received;
    PerRank<u32> tokens = await_tokens(c, start, epoch, lane);
    u32 most = 0;
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) most = max(most, tokens.value[i] & SOURCE_TOKENS);
#pragma unroll
    for (u32 step = LANES / 2; step > 0; step /= 2) {
        u32 other = __shfl_xor_sync(WHOLE_WARP, most, step);
        most = other > most ? other : most;
    }
    u32 units = most * EP_R * PIECES;
    auto arrival = [&](u32 unit) {
        u32 pair = unit / PIECES;
        return Arrival{(c.rank + pair % EP_R) % EP_R, pair / EP_R, unit % PIECES, EP_NOWHERE};
    };
#pragma unroll 1
    for (u32 first = worker; first < units; first += LANES * workers) {
        u32 unit = first + lane * workers;
        Arrival mine = arrival(unit);
        u32 said = tokens.of(mine.source);
        Rows rows;
        if (unit < units && mine.token < (said & SOURCE_TOKENS)) {
            rows.look(args, mine, epoch);
            // For the combine.
            u64 present = c.handle + c.parts.present + u64(mine.source) * c.max_tokens;
            if (mine.piece == 0) at<u8>(present, mine.token) = static_cast<u8>(rows.count);
        }
        u32 left = __ballot_sync(WHOLE_WARP, rows.count != 0);
        if (first == worker) mark_of(EP_THREADS - LANES, args.marks, EP_MARK_PLANNED);
#pragma unroll 1
        while (left) {
            // All that are there; if none is, the first is waited for.
            u64 flag = flag_of(c, start, mine);
            bool came = (left >> lane & 1) && ld_acquire_sys_u64(flag) >= epoch;
            u32 there = __ballot_sync(WHOLE_WARP, came), now = there;
            if (there == 0) {
                now = left & -left;
                came = now >> lane & 1 && await(c, flag, epoch, mine.source, EP_STAGE_ROW, epoch);
                there = __ballot_sync(WHOLE_WARP, came);
            }
            left &= ~now;
            // What one lane has waited for is there for all.
            __syncwarp();
#pragma unroll 1
            for (; now; now &= now - 1) {
                u32 whose = __ffs(now) - 1;
                Arrival next = arrival(first + whose * workers);
                next.row = rows.spread(c, next, whose, epoch, lane);
                bool weighted = __shfl_sync(WHOLE_WARP, said, whose) >> SOURCE_FLAGS & EP_WEIGHTED;
                bool is_there = there >> whose & 1;
                if (next.piece == 0 && SLOTS) note_token(args, start, next, weighted, is_there, lane);
                if (next.piece == 0 && !SLOTS) note_rows(args, start, next, weighted, lane);
                fan_out(args, start, next, is_there, lane);
            }
        }
    }
}

// Ends a dispatch: the last block advances the epochs for this rank's next launches.
__device__ __forceinline__ void end_dispatch(const EpDispatchArgs &args, const Start &start) {
    const EpCommon &c = args.common;
    EpState &state = state_of(c);
    bool last = is_last_to_end(c, address_of(state.dispatch_blocks[c.phases]));
    mark_of(0, args.marks, EP_MARK_DONE);
    if (!last) return;
    if (start.hosted) look_at_slots(c, start, EP_WORD_DISPATCH_TAKEN, threadIdx.x);
    if (c.phases & EP_RECEIVE) count_waits(c);
    if (threadIdx.x != 0) return;
    if (c.phases & EP_SEND) {
        st_relaxed_gpu_u64(address_of(state.dispatch_begun), start.sent);
        st_relaxed_gpu_u64(address_of(state.dispatch_sent), start.sent);
    }
    if (c.phases & EP_RECEIVE) st_relaxed_gpu_u64(address_of(state.dispatch_ended), start.received);
}

// A dispatch of a block whose shared memory is `shared`. The first block waits for what all ranks select, in `plan`. All
// threads.
template <typename Plan>
__device__ __forceinline__ void run_dispatch(const EpDispatchArgs &args, u8 *shared, Plan plan) {
    begin_launch();
    const EpCommon &c = args.common;
    Start &start = *reinterpret_cast<Start *>(shared);
    u8 *memory = after_start(shared);
    u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    mark_of(0, args.marks, EP_MARK_BEGUN);
    bool sends = c.phases & EP_SEND, receives = c.phases & EP_RECEIVE;
    // The first block plans while the others send.
    u32 first = receives && gridDim.x > 1, senders = gridDim.x - first;
    u32 units = sends && blockIdx.x >= first && warp < EP_SENDERS ? c.tokens * PIECES : 0;
    Share share = {warp * senders + blockIdx.x - first, EP_SENDERS * senders, units};
    u8 *stages = memory + warp * EP_STAGES * DISPATCH_STAGE;
    // Issue loads that do not depend on the block's shared state before it is read.
    OwnSelection own(args, sends);
    // The last warp has the least to send.
    if (warp == WARPS - 1) {
        const EpState &state = state_of(c);
        begin(c, {state.dispatch_sent, state.dispatch_ended, EP_WORD_DISPATCH_TAKEN}, start, lane);
        if (sends) free_slots(c, start, EP_WORD_DISPATCH_TAKEN, EP_STAGE_DISPATCH_TAKEN, lane);
    }
    Pending pending;
    send_rows(args, start, stages, share, lane, pending, [&] {
        __syncthreads();
        mark_of(0, args.marks, EP_MARK_COUNTED);
        // Before rows: they fill the links.
        if (sends) send_selections(args, start, own);
        if (blockIdx.x == 0) mark_of(0, args.marks, EP_MARK_ANNOUNCED);
        if (blockIdx.x == gridDim.x - 1 && warp == WARPS - 1) release_slots(c, start, EP_WORD_DISPATCH_TAKEN, lane);
    });
    if (receives) {
#if EP_NODE
        forward(args, start, stages, pending, warp, lane);
#endif
        if (blockIdx.x == 0) plan(args, start, memory);
        u32 from = RECEIVES_FROM;
        if (warp >= from) {
            // The last warps, which have the least to send, have the most to deliver.
            u32 worker = (WARPS - 1 - warp) * gridDim.x + blockIdx.x;
            receive_rows(args, start, worker, (WARPS - from) * gridDim.x, lane);
            mark_of(EP_THREADS - LANES, args.marks, EP_MARK_CAME);
        }
    }
    end_dispatch(args, start);
}
