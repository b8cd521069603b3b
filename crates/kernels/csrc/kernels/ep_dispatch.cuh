// The rows of a dispatch in the expert layout, by pieces; a warp takes one piece at a time.
//
//     send:     a token's piece -> cast, in shared memory -> the token's slot at each of its ranks, once -> a flag there
//     receive:  a flag -> the slot's piece -> the rows of its experts, where the plan says
#pragma once

#include "kernels/ep_cast.cuh"
#include "kernels/ep_plan.cuh"

constexpr u32 ELEMENT = EP_FP8 ? 1 : 2;
constexpr u32 ROW_BYTES = EP_H * ELEMENT;
// A warp's shared memory.
constexpr u32 DISPATCH_STAGE = (EP_PIECE * ELEMENT + EP_PIECE / BLOCK * SCALE + 15) / 16 * 16;
// Elements that a warp loads at once.
constexpr u32 STEP = 1024;
// 16 bytes of bf16 that a lane loads at once.
constexpr u32 LOADS = STEP / 8 / LANES;

// Casts 1024 elements, 8 to 8 of each lane, of which `elements` are there; 16 lanes have a block. All lanes.
__device__ __forceinline__ void cast_step(const Vec16 (&v)[LOADS], u8 *stage, u8 *scales, u32 from, u32 elements,
                                          u32 lane) {
#pragma unroll
    for (u32 i = 0; i < LOADS; ++i) {
        float amax = 0;
#pragma unroll
        for (u32 w = 0; w < 4; ++w) amax = largest(amax, v[i].word[w]);
#pragma unroll
        for (u32 step = 8; step > 0; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(WHOLE_WARP, amax, step));
        Scaled by = scaled(amax);
        u32 element = from + (i * LANES + lane) * 8;
        if (element >= elements) continue;
        u32 *to = reinterpret_cast<u32 *>(stage + element);
        to[0] = cast_two(v[i].word[0], by.factor) | cast_two(v[i].word[1], by.factor) << 16;
        to[1] = cast_two(v[i].word[2], by.factor) | cast_two(v[i].word[3], by.factor) << 16;
        if (lane % 16 == 0) store_scale(scales, element / BLOCK, by.scale);
    }
}

// Brings a piece of a token, as it goes over the wire, to `stage`; gives its bytes. All lanes.
__device__ __forceinline__ u32 stage_piece(const EpDispatchArgs &args, u32 token, u32 piece, u8 *stage, u32 lane) {
    u32 elements = piece_elements(piece);
    u64 row = args.x + u64(token) * args.x_stride;
    u32 data = elements * ELEMENT;
    if (EP_FP8 && args.x_fp8) {
        for (u32 byte = lane * 16; byte < data; byte += LANES * 16) {
            *reinterpret_cast<Vec16 *>(stage + byte) = ld_once_v16(row + piece * EP_PIECE + byte);
        }
        u64 scales = args.in_scales + token * args.in_scale_row;
        for (u32 i = lane; i < elements / BLOCK; i += LANES) {
            u32 block = piece * (EP_PIECE / BLOCK) + i;
            if (EP_SCALE == 2) {
                stage[data + i] = at<u8>(scales + block / 4 * args.in_scale_block, block % 4);
            } else {
                reinterpret_cast<u32 *>(stage + data)[i] = at<u32>(scales + block * args.in_scale_block);
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

// Stores what is in `stage` to `to` for each lane that is a `sender`, and sets its `flag` when it is there. All lanes.
__device__ __forceinline__ void send_stage(const u8 *stage, u32 bytes, bool sender, u64 to, u64 flag, u64 epoch,
                                           u32 lane) {
#if EP_BULK
    fence_proxy_async_shared();
    __syncwarp();
    if (sender) {
        bulk_store_shared(to, shared_address(stage), bytes);
        bulk_wait_all();
        st_release_sys_u64(flag, epoch);
    }
#else
    __syncwarp();
    for (u32 left = __ballot_sync(WHOLE_WARP, sender); left; left &= left - 1) {
        u64 target = __shfl_sync(WHOLE_WARP, to, __ffs(left) - 1);
        for (u32 byte = lane * 16; byte < bytes; byte += LANES * 16) {
            st_v16(target + byte, *reinterpret_cast<const Vec16 *>(stage + byte));
        }
    }
    __syncwarp();
    if (sender) st_release_sys_u64(flag, epoch);
#endif
    __syncwarp();
}

// The slots of a rank that were used EP_DEPTH operations ago are free again.
__device__ __forceinline__ bool slots_free(const EpCommon &c, u32 rank, u32 word, u32 stage, u64 epoch) {
    if (epoch <= EP_DEPTH) return true;
    return await(c, word_at(c, c.base, rank, word), epoch - EP_DEPTH, rank, stage, epoch);
}

// Sends this warp's share of all tokens. `worker` of `workers` warps.
__device__ __forceinline__ void send_rows(const EpDispatchArgs &args, const Peers &peers, u8 *stage, u64 epoch,
                                          u32 worker, u32 workers, u32 lane) {
    const EpCommon &c = args.common;
    u32 units = c.tokens * PIECES;
    u64 slot = slot_of(epoch, c.rank) * c.max_tokens;
    for (u32 unit = worker; unit < units; unit += workers) {
        u32 token = unit / PIECES, piece = unit % PIECES;
        int expert = lane < EP_K ? expert_at(args, u64(token) * EP_K + lane) : -1;
        u32 bytes = stage_piece(args, token, piece, stage, lane);
        u32 rank = expert >= 0 ? expert / LOCAL : 0;
        bool sender = is_first_of_rank(rank, expert >= 0 && peers.is_open(rank), lane);
        u64 base = peers.base.of(rank);
        sender = sender && slots_free(c, rank, EP_WORD_DISPATCH_TAKEN, EP_STAGE_DISPATCH_TAKEN, epoch);
        u64 to = base + c.heap.rows + (slot + token) * c.heap.row_stride + piece * c.heap.piece_stride;
        u64 flag = base + c.heap.row_flags + ((slot + token) * PIECES + piece) * 8;
        send_stage(stage, bytes, sender, to, flag, epoch, lane);
    }
}

// Of a dispatch's plan: the number that belongs to this operation, once it is there.
__device__ __forceinline__ u32 await_planned(u64 address, u64 epoch) {
    u64 entry = ld_acquire_gpu_u64(address);
    while (static_cast<u32>(entry >> 32) != static_cast<u32>(epoch)) {
        pause_ns(20);
        entry = ld_acquire_gpu_u64(address);
    }
    return static_cast<u32>(entry);
}

// A token's piece that came, and where it goes.
struct Arrival {
    u32 source;
    u32 token;
    u32 piece;
    // The row of each lane's selection, or EP_NOWHERE.
    u32 row;
};

// Copies a piece from its slot to the rows of its experts; zeros if it did not come. All lanes.
__device__ __forceinline__ void fan_out(const EpDispatchArgs &args, const Arrival &a, u64 from, bool came, u32 lane) {
    const EpCommon &c = args.common;
    constexpr u32 MOST = 4;
    u32 elements = piece_elements(a.piece), data = elements * ELEMENT;
    u32 here = __ballot_sync(WHOLE_WARP, a.row != EP_NOWHERE);
    u64 rows = args.out_x + u64(a.piece) * EP_PIECE * ELEMENT;
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
    if (!EP_FP8) return;
    u32 blocks = elements / BLOCK, most = EP_R * c.max_tokens;
    for (u32 first = 0; first < blocks; first += LANES) {
        u32 i = first + lane, block = a.piece * (EP_PIECE / BLOCK) + i;
        u32 scale = 0;
        if (came && i < blocks) scale = SCALE == 1 ? at<u8>(from + data, i) : at<u32>(from + data, i);
        for (u32 left = here; left; left &= left - 1) {
            u32 row = __shfl_sync(WHOLE_WARP, a.row, __ffs(left) - 1);
            u64 to = args.out_scales + row / most * args.out_scale_expert + row % most * args.out_scale_row;
            if (i >= blocks) continue;
            if (SCALE == 1) {
                at<u8>(to + block / 4 * args.out_scale_block, block % 4) = static_cast<u8>(scale);
            } else {
                at<u32>(to + block * args.out_scale_block) = scale;
            }
        }
    }
}

// Notes for the combine where a token's rows are. All lanes.
__device__ __forceinline__ void note_routes(const EpDispatchArgs &args, const Arrival &a, u64 table, u32 lane) {
    const EpCommon &c = args.common;
    u64 token = u64(a.source) * c.max_tokens + a.token, i = token * EP_K + lane;
    u32 here = __ballot_sync(WHOLE_WARP, a.row != EP_NOWHERE);
    if (lane == 0) at<u8>(c.handle + c.parts.present, token) = static_cast<u8>(__popc(here));
    if (lane >= EP_K) return;
    at<u32>(c.handle + c.parts.routes, i) = a.row;
    if (a.row == EP_NOWHERE) return;
    if (at<EpTableHeader>(table).flags & EP_WEIGHTED) {
        at<float>(c.handle + c.parts.weights, i) = at<float>(table + c.heap.table_weights, u64(a.token) * EP_K + lane);
    }
    if (args.out_source) at<u32>(args.out_source, a.row) = a.token;
}

// Delivers one piece of a token of which something is here. All lanes.
__device__ __forceinline__ void receive_piece(const EpDispatchArgs &args, Arrival a, u64 table, u64 epoch, u32 lane) {
    const EpCommon &c = args.common;
    u32 entry = lane < EP_K ? at<u32>(table + c.heap.table_entries, u64(a.token) * EP_K + lane) : 0;
    u64 row = slot_of(epoch, a.source) * c.max_tokens + a.token;
    u32 came = 0;
    if (lane == 0) {
        u64 flag = c.base + c.heap.row_flags + (row * PIECES + a.piece) * 8;
        came = await(c, flag, epoch, a.source, EP_STAGE_ROW, epoch);
    }
    a.row = EP_NOWHERE;
    if (entry) {
        u32 expert = (entry >> ENTRY_EXPERT) - 1, place = entry & ((1u << ENTRY_EXPERT) - 1);
        u32 most = EP_R * c.max_tokens;
        if (expert < LOCAL) place += await_planned(c.base + c.heap.plan_offsets + 8 * (expert * EP_R + a.source), epoch);
        // What another rank says must not lead outside of the result.
        if (expert < LOCAL && place < most) a.row = expert * most + place;
    }
    came = __shfl_sync(WHOLE_WARP, came, 0);
    // What one lane has waited for is there for all.
    __syncwarp();
    u64 from = c.base + c.heap.rows + row * c.heap.row_stride + a.piece * c.heap.piece_stride;
    fan_out(args, a, from, came, lane);
    if (a.piece == 0) note_routes(args, a, table, lane);
}

// Delivers this warp's share of what comes. Each lane looks at one of the next 32 pieces that may be this warp's: most
// ranks have nothing of a token when there are many.
__device__ __forceinline__ void receive_rows(const EpDispatchArgs &args, u64 epoch, u32 worker, u32 workers, u32 lane) {
    const EpCommon &c = args.common;
    PerRank<u32> tokens;
    u32 most = 0;
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
        u32 rank = lane + i * LANES;
        tokens.value[i] = rank < EP_R ? await_planned(c.base + c.heap.plan_tokens + 8 * rank, epoch) : 0;
        most = tokens.value[i] > most ? tokens.value[i] : most;
    }
#pragma unroll
    for (u32 step = LANES / 2; step > 0; step /= 2) {
        u32 other = __shfl_xor_sync(WHOLE_WARP, most, step);
        most = other > most ? other : most;
    }
    // What one lane has waited for is there for all.
    __syncwarp();
    u64 tables = c.base + c.heap.tables;
    u64 units = u64(most) * EP_R * PIECES;
    auto arrival = [&](u64 unit) {
        u32 pair = static_cast<u32>(unit / PIECES);
        return Arrival{(c.rank + pair % EP_R) % EP_R, pair / EP_R, static_cast<u32>(unit % PIECES), EP_NOWHERE};
    };
    for (u64 first = worker; first < units; first += u64(LANES) * workers) {
        u64 unit = first + u64(lane) * workers;
        Arrival mine = arrival(unit);
        u32 sent = tokens.of(mine.source), any = 0;
        u64 table = tables + slot_of(epoch, mine.source) * c.heap.table_stride;
        if (unit < units && mine.token < sent) {
#pragma unroll 8
            for (u32 k = 0; k < EP_K; ++k) any |= at<u32>(table + c.heap.table_entries, u64(mine.token) * EP_K + k);
            if (!any && mine.piece == 0) {
                at<u8>(c.handle + c.parts.present, u64(mine.source) * c.max_tokens + mine.token) = 0;
            }
        }
        for (u32 left = __ballot_sync(WHOLE_WARP, any != 0); left; left &= left - 1) {
            Arrival next = arrival(first + u64(__ffs(left) - 1) * workers);
            receive_piece(args, next, tables + slot_of(epoch, next.source) * c.heap.table_stride, epoch, lane);
        }
    }
}

// Ends a dispatch: the last block says so to this rank's next launches, and to others that their slots are free.
__device__ __forceinline__ void end_dispatch(const EpDispatchArgs &args, const Peers &peers, u64 sent, u64 received) {
    const EpCommon &c = args.common;
    EpState &state = state_of(c);
    if (!is_last_block(address_of(state.dispatch_blocks) + 8 * c.phases)) return;
    if (c.phases & EP_RECEIVE) {
        tell_all(c, peers, EP_WORD_DISPATCH_TAKEN, received);
        count_waits(c);
    }
    if (threadIdx.x != 0) return;
    if (c.phases & EP_SEND) {
        state.dispatch_begun = sent;
        state.dispatch_sent = sent;
    }
    if (c.phases & EP_RECEIVE) state.dispatch_ended = received;
}
