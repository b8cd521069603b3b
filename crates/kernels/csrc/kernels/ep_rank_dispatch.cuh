// Dispatch into the rank layout.
//
//     announce   number of rows for each rank, to every rank, from which each derives where its rows begin at each rank
//     send       every token's row once to each rank of its experts, straight to its place in the result there
//     receive    all rows of all ranks are there
//
// The first warps of a block send rows: unchanged, through the ring of stages (an eighth of the block's threads, or fewer,
// saturate the link), or cast on the way. The other warps send the metadata of rows: scales, experts, weights, tokens. Rows
// of neighbouring tokens are adjacent at a rank, so that these are long stores.
#pragma once

#include "kernels/ep_rank.cuh"
#include "kernels/ep_rank_scan.cuh"

// A stage holds a row, and the scales of one that is cast here.
constexpr u32 DISPATCH_STAGE = (ROW + SCALE_BYTES + 127) / 128 * 128;
constexpr u32 DISPATCH_STAGES = EP_DISPATCH_STAGES;
// Warps that send rows as they are, at most, and the stages of each.
constexpr u32 MOVERS = EP_DISPATCH_MOVERS;
constexpr u32 MOVER_STAGES = DISPATCH_STAGES / MOVERS;
// The remaining stages are being read by stores.
constexpr u32 MOVER_AHEAD = ahead_of(MOVER_STAGES, ROW);
constexpr u32 MOVER_BEHIND = MOVER_STAGES - MOVER_AHEAD;
static_assert(MOVER_STAGES > MOVER_AHEAD, "a stage is loaded again only after its stores have read it");
// Default KiB of rows in flight, for all blocks together.
constexpr u32 MOVER_QUEUE = 3072;
// Warps that cast rows, at most, two stages each.
constexpr u32 CASTERS = atmost(DISPATCH_STAGES / 2, 3 * WARPS / 4);
// Where there are no bulk copies.
constexpr u32 COPIERS = 3 * WARPS / 4;

struct DispatchShared {
    alignas(8) u64 full[MOVERS * MOVER_STAGES];
    // The region at each rank, 0 where nothing is sent to; and the first row of this rank's there.
    u64 regions[EP_R];
    u32 places[EP_R];
    u32 lists[WARPS][LANES];
    ScanShared scan;
};

static_assert(sizeof(DispatchShared) <= EP_DISPATCH_COMMON, "shared memory that the launcher reserves");

// Where a lane's ranks are: their regions, and the first row there.
struct Targets {
    u64 region[EACH];
    u32 place[EACH];

    __device__ __forceinline__ explicit Targets(const DispatchShared &shared) {
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {
            u32 rank = lane_of() + LANES * i;
            region[i] = rank < EP_R ? shared.regions[rank] : 0;
            place[i] = rank < EP_R ? shared.places[rank] : 0;
        }
    }
};

// A token's rows at a lane's ranks: their numbers there, EP_NOWHERE for none.
struct Rows {
    u32 row[EACH] = {};

    __device__ __forceinline__ void load(const Dispatch &dispatch, u32 token) {
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {
            u32 rank = lane_of() + LANES * i;
            bool known = token < dispatch.common.tokens && rank < EP_R;
            row[i] = known ? row_number(at<const u32>(dispatch.sent_rows(token) + 4 * rank)) : EP_NOWHERE;
        }
    }

    // For each rank that it goes to: the region there, and the row. All lanes at once. Begins with the rank of `turn`, so
    // that not all send to one.
    template <class Send>
    __device__ __forceinline__ void each(const Targets &targets, u32 turn, Send send) const {
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {
            u32 all = __ballot_sync(WHOLE_WARP, row[i] != EP_NOWHERE && targets.region[i] != 0);
            u32 number = targets.place[i] + row[i];
            u32 before = all & ((1u << turn % atmost(EP_R, LANES)) - 1), todo = all ^ before;
            while ((todo | before) != 0) {
                if (todo == 0) {
                    todo = before;
                    before = 0;
                }
                u32 lane = __ffs(todo) - 1;
                todo &= todo - 1;
                send(__shfl_sync(WHOLE_WARP, targets.region[i], lane), __shfl_sync(WHOLE_WARP, number, lane));
            }
        }
    }
};

// A row to all its places, through registers. `from`: any memory.
__device__ __forceinline__ void spread(const Rows &rows, const Targets &targets, u32 turn, u64 from) {
    constexpr u32 DEPTH = 4;
    for (u32 base = 0; base < ROW / 16; base += LANES * DEPTH) {
        Vec16 v[DEPTH];
#pragma unroll
        for (u32 k = 0; k < DEPTH; ++k) {
            u32 i = base + k * LANES + lane_of();
            if (i < ROW / 16) v[k] = at<const Vec16>(from + 16 * i);
        }
        rows.each(targets, turn, [&](u64 region, u32 row) {
#pragma unroll
            for (u32 k = 0; k < DEPTH; ++k) {
                u32 i = base + k * LANES + lane_of();
                if (i < ROW / 16) st_v16(region + u64(row) * ROW + 16 * i, v[k]);
            }
        });
    }
}

#if EP_BULK
// Sending warps of a block, and rows of each whose stores may not have read the stage yet.
struct Pace {
    u32 movers;
    u32 behind;

    __device__ __forceinline__ explicit Pace(const EpDispatchArgs &args) {
        u32 rows = rows_under_way(args.queue, MOVER_QUEUE, gridDim.x, ROW);
        movers = atmost((rows - 1) / MOVER_BEHIND + 1, MOVERS);
        behind = atmost((rows - 1) / movers + 1, MOVER_BEHIND);
    }
};

// Rows as they are: one of the warps that send them. The token of a row under way is in the lane of its number.
struct Mover {
    Ring<DISPATCH_STAGE, MOVER_STAGES> ring;
    WorkCounter work;
    u32 behind = 0;
    u32 loads = 0;
    u32 tokens = 0;

    __device__ __forceinline__ void load(const Dispatch &dispatch, u32 token) {
        ring.load(dispatch.args.x + u64(token) * dispatch.args.x_stride, ROW);
        if (lane_of() == loads % LANES) tokens = token;
        ++loads;
    }
    __device__ __forceinline__ u32 token(u32 number) const { return __shfl_sync(WHOLE_WARP, tokens, number % LANES); }

    // Starts the first loads, which do not need the rows' destinations.
    __device__ __forceinline__ void begin(const Dispatch &dispatch, const Pace &pace, u8 *stages, u64 *full) {
        behind = pace.behind;
        ring.begin(stages + DISPATCH_STAGE * MOVER_STAGES * warp_of(), full + MOVER_STAGES * warp_of());
        u32 token = blockIdx.x * pace.movers + warp_of(), step = gridDim.x * pace.movers;
        for (u32 i = 0; i < MOVER_AHEAD && token < dispatch.common.tokens; ++i, token += step) load(dispatch, token);
        work.begin(dispatch.scan().dispatch_taken, MOVER_AHEAD * step);
    }

    __device__ __forceinline__ void send(const Dispatch &dispatch, const Targets &targets) {
        Rows rows, ahead;
        if (loads > 0) rows.load(dispatch, token(0));
        bool more = loads == MOVER_AHEAD;
        for (u32 stores = 0; stores < loads; ++stores) {
            bool known = stores + 1 < loads;
            if (known) ahead.load(dispatch, token(stores + 1));
            u32 turn = dispatch.common.rank + token(stores), stage = ring.loaded();
            rows.each(targets, turn, [&](u64 region, u32 row) {
                if (lane_of() == 0) bulk_store_open(region + u64(row) * ROW, stage, ROW);
            });
            ring.stored();
            if (lane_of() == 0) wait_read<MOVER_BEHIND>(behind);
            __syncwarp();
            if (more) {
                u32 next = work.take();
                more = next < dispatch.common.tokens;
                if (more) load(dispatch, next);
            }
            if (!known && stores + 1 < loads) ahead.load(dispatch, token(stores + 1));
            rows = ahead;
            if (stores == 0) mark_by(0, dispatch.args.marks, EP_MARK_FIRST);
        }
        if (lane_of() == 0) bulk_wait_all();
        mark_by(0, dispatch.args.marks, EP_MARK_SENT);
    }
};
#endif

// Vectors of a row that a lane casts at a time; as many more are loaded meanwhile.
constexpr u32 CAST_DEPTH = 4;

__device__ __forceinline__ void load_wide(Vec16 (&v)[CAST_DEPTH], u64 from, u32 base) {
#pragma unroll
    for (u32 k = 0; k < CAST_DEPTH; ++k) {
        u32 i = base + k * LANES + lane_of();
        v[k] = i < VECTORS ? ld_once_v16(from + 16 * i) : Vec16{};
    }
}

// Casts one row into shared memory, and its scales behind it. Sixteen lanes have a block, eight elements each.
__device__ __forceinline__ void cast_row(u64 from, u8 *stage) {
    Vec16 v[CAST_DEPTH], ahead[CAST_DEPTH];
    load_wide(v, from, 0);
    for (u32 base = 0; base < VECTORS; base += LANES * CAST_DEPTH) {
        load_wide(ahead, from, base + LANES * CAST_DEPTH);
#pragma unroll
        for (u32 k = 0; k < CAST_DEPTH; ++k) {
            u32 i = base + k * LANES + lane_of();
            float amax = 0;
#pragma unroll
            for (u32 w = 0; w < 4; ++w) amax = largest(amax, v[k].word[w]);
#pragma unroll
            for (u32 step = 8; step > 0; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(WHOLE_WARP, amax, step));
            Scaled by = scaled(amax);
            if (i >= VECTORS) continue;
            u32 *to = reinterpret_cast<u32 *>(stage + 8 * i);
            to[0] = cast_four(v[k].word[0], v[k].word[1], by.factor);
            to[1] = cast_four(v[k].word[2], v[k].word[3], by.factor);
            if (i % 16 == 0) store_scale(stage + ROW, i / 16, by.scale);
        }
#pragma unroll
        for (u32 k = 0; k < CAST_DEPTH; ++k) v[k] = ahead[k];
    }
}

// How many warps of a block cast: with many blocks, fewer.
__device__ __forceinline__ u32 casters() {
    return atmost(atleast(256 / gridDim.x, 4), CASTERS);
}

// bf16 rows as fp8: one of the warps that cast them.
__device__ __forceinline__ void send_cast(const Dispatch &dispatch, const Targets &targets, u8 *stages) {
    u8 *mine = stages + 2 * DISPATCH_STAGE * warp_of();
    Rows rows, ahead;
    WorkCounter work;
    u32 first = blockIdx.x * casters() + warp_of();
    work.begin(dispatch.scan().dispatch_taken, gridDim.x * casters());
    rows.load(dispatch, first);
    for (u32 token = first, next, turn = 0; token < dispatch.common.tokens; token = next, turn ^= 1) {
        next = work.take();
        ahead.load(dispatch, next);
        u8 *stage = mine + DISPATCH_STAGE * turn;
#if EP_BULK
        // The stage's last stores were those before the last.
        if (lane_of() == 0) bulk_wait_read<1>();
        __syncwarp();
        cast_row(dispatch.args.x + u64(token) * dispatch.args.x_stride, stage);
        fence_proxy_async_shared();
        __syncwarp();
        u32 from = shared_address(stage);
        rows.each(targets, dispatch.common.rank + token, [&](u64 region, u32 row) {
            u64 scales = region + dispatch.common.heap.region_scales + u64(row) * SCALE_BYTES;
            if (lane_of() == 0) {
                bulk_store_open(region + u64(row) * ROW, from, ROW);
                if (SCALE_BYTES % 16 == 0) bulk_store_open(scales, from + ROW, SCALE_BYTES);
            }
            for (u32 i = lane_of(); SCALE_BYTES % 16 != 0 && i < SCALE_BYTES; i += LANES) at<u8>(scales + i) = stage[ROW + i];
        });
        if (lane_of() == 0) bulk_commit();
#else
        __syncwarp();
        cast_row(dispatch.args.x + u64(token) * dispatch.args.x_stride, stage);
        __syncwarp();
        spread(rows, targets, dispatch.common.rank + token, reinterpret_cast<u64>(stage));
        rows.each(targets, dispatch.common.rank + token, [&](u64 region, u32 row) {
            u64 scales = region + dispatch.common.heap.region_scales + u64(row) * SCALE_BYTES;
            for (u32 i = lane_of(); SCALE_BYTES != 0 && i < SCALE_BYTES; i += LANES) at<u8>(scales + i) = stage[ROW + i];
        });
#endif
        rows = ahead;
        if (token == first) mark_by(0, dispatch.args.marks, EP_MARK_FIRST);
    }
#if EP_BULK
    if (lane_of() == 0) bulk_wait_all();
#endif
    mark_by(0, dispatch.args.marks, EP_MARK_SENT);
}

// Calls `store(i, load(i))` for the numbers below `count`, several loads at a time. One warp.
template <class Value, class Load, class Store>
__device__ __forceinline__ void copy_each(u32 count, Load load, Store store) {
    constexpr u32 DEPTH = 8;
    for (u32 base = lane_of(); base < count; base += LANES * DEPTH) {
        Value values[DEPTH];
#pragma unroll
        for (u32 k = 0; k < DEPTH; ++k) {
            if (base + k * LANES < count) values[k] = load(base + k * LANES);
        }
#pragma unroll
        for (u32 k = 0; k < DEPTH; ++k) {
            if (base + k * LANES < count) store(base + k * LANES, values[k]);
        }
    }
}

// The scales of `count` rows that came with the input, from the tokens in `list`.
__device__ __forceinline__ void send_scales(const Dispatch &dispatch, const u32 *list, u32 count, u64 to) {
    const EpDispatchArgs &args = dispatch.args;
    // Four scales of a byte are one word, wherever there are four.
    constexpr bool QUADS = EP_SCALE == 2 && BLOCKS % 4 == 0;
    if constexpr (EP_SCALE == 2 && !QUADS) {
        copy_each<u8>(
            count * BLOCKS,
            [&](u32 i) {
                u32 block = i % BLOCKS;
                return at<const u8>(args.x_scales + list[i / BLOCKS] * args.x_scale_strides[0] + block / 4 * args.x_scale_strides[1] +
                                    block % 4);
            },
            [&](u32 i, u8 scale) { at<u8>(to + i) = scale; });
    } else {
        constexpr u32 WORDS = atleast(QUADS ? BLOCKS / 4 : BLOCKS, 1);
        copy_each<u32>(
            count * WORDS,
            [&](u32 i) {
                return at<const u32>(args.x_scales + list[i / WORDS] * args.x_scale_strides[0] + i % WORDS * args.x_scale_strides[1]);
            },
            [&](u32 i, u32 scale) { at<u32>(to + 4 * i) = scale; });
    }
}

// Sends the metadata of the rows of up to 32 tokens at one rank. One warp.
__device__ __forceinline__ void send_details_of(const Dispatch &dispatch, DispatchShared &shared, u32 token, u32 rank) {
    const EpDispatchArgs &args = dispatch.args;
    const EpHeap &heap = dispatch.common.heap;
    u64 region = shared.regions[rank];
    if (region == 0) return;
    token += lane_of();
    u32 row = token < dispatch.end ? row_number(at<const u32>(dispatch.sent_rows(token) + 4 * rank)) : EP_NOWHERE;
    u32 votes = __ballot_sync(WHOLE_WARP, row != EP_NOWHERE);
    if (votes == 0) return;
    u32 *list = shared.lists[warp_of()];
    if (row != EP_NOWHERE) list[__popc(votes & ((1u << lane_of()) - 1))] = token;
    u32 count = __popc(votes);
    u64 first = shared.places[rank] + __shfl_sync(WHOLE_WARP, row, __ffs(votes) - 1);
    __syncwarp();
    if (lane_of() < count) at<u32>(region + heap.region_source + 4 * (first + lane_of())) = list[lane_of()];
    u32 low = rank * LOCAL;
    if (args.topk_idx != 0) {
        u64 to = region + heap.region_idx + 8 * first * EP_K;
        copy_each<u64>(
            count * EP_K,
            [&](u32 i) {
                u32 local = dispatch.expert(list[i / EP_K], i % EP_K) - low;
                return local < LOCAL ? u64(local) : ~0ull;
            },
            [&](u32 i, u64 local) { at<u64>(to + 8 * i) = local; });
    }
    if (args.topk_weights != 0 && args.topk_idx != 0) {
        u64 to = region + heap.region_weights + 4 * first * EP_K;
        copy_each<u32>(
            count * EP_K,
            [&](u32 i) {
                u32 token = list[i / EP_K], k = i % EP_K;
                bool here = dispatch.expert(token, k) - low < LOCAL;
                return here ? at<const u32>(args.topk_weights + 4 * (u64(token) * EP_K + k)) : 0;
            },
            [&](u32 i, u32 weight) { at<u32>(to + 4 * i) = weight; });
    }
    if (EP_FP8 && args.x_fp8) {
        send_scales(dispatch, list, count, region + heap.region_scales + first * SCALE_BYTES);
    }
    __syncwarp();
}

// The warps from `begin` on.
__device__ __forceinline__ void send_details(const Dispatch &dispatch, DispatchShared &shared, u32 begin) {
    u32 tiles = (dispatch.end - dispatch.first + LANES - 1) / LANES;
    for (u32 item = warp_of() - begin; item < tiles * EP_R; item += WARPS - begin) {
        send_details_of(dispatch, shared, dispatch.first + item / EP_R * LANES, item % EP_R);
    }
    mark_by(begin, dispatch.args.marks, EP_MARK_DETAILS);
    // Rows behind the last that came have no experts.
    const EpDispatchArgs &args = dispatch.args;
    u64 most = u64(EP_R) * dispatch.common.max_tokens, end = args.max_rows < most ? args.max_rows : most;
    u64 place = at<const u32>(dispatch.offsets() + 4 * EP_R) * u64(EP_K);
    u64 own = dispatch.common.base + dispatch.common.heap.regions + args.region * dispatch.common.heap.region_stride;
    u32 threads = (WARPS - begin) * LANES;
    place += u64(blockIdx.x) * threads + threadIdx.x - begin * LANES;
    for (; place < end * EP_K; place += u64(gridDim.x) * threads) at<u64>(own + dispatch.common.heap.region_idx + 8 * place) = ~0ull;
}

// Waits for the plan, and reads the rows' destinations from it. All blocks.
__device__ __forceinline__ void read_plan(const Dispatch &dispatch, DispatchShared &shared) {
    const EpCommon &common = dispatch.common;
    if (threadIdx.x == 0) await_block(address_of(dispatch.scan().planned), dispatch.epoch);
    if (threadIdx.x == LANES && common.phases & EP_ANNOUNCE && !dispatch.args.cached) {
        await_block(address_of(dispatch.scan().numbered), gridDim.x);
    }
    __syncthreads();
    for (u32 rank = threadIdx.x; rank < EP_R; rank += EP_THREADS) {
        u32 region = at<const u32>(dispatch.regions() + 4 * rank);
        u64 heap = heap_of(common, rank);
        shared.places[rank] = at<const u32>(dispatch.places() + 4 * rank);
        shared.regions[rank] = region == EP_NOWHERE ? 0 : heap + common.heap.regions + region * common.heap.region_stride;
    }
    __syncthreads();
}

// One warp's share of rows that go as they are, where there are no bulk copies.
__device__ __forceinline__ void send_copies(const Dispatch &dispatch, const Targets &targets) {
    Rows rows;
    WorkCounter work;
    work.begin(dispatch.scan().dispatch_taken, gridDim.x * COPIERS);
    for (u32 token = blockIdx.x * COPIERS + warp_of(); token < dispatch.common.tokens; token = work.take()) {
        rows.load(dispatch, token);
        spread(rows, targets, dispatch.common.rank + token, dispatch.args.x + u64(token) * dispatch.args.x_stride);
    }
}

// Discards all rows of a rank that did not send every row it announced.
__device__ __forceinline__ void discard_rows(const Dispatch &dispatch, u32 source) {
    const EpHeap &heap = dispatch.common.heap;
    u64 own = dispatch.common.base + heap.regions + dispatch.args.region * heap.region_stride;
    u64 first = at<const u32>(dispatch.offsets() + 4 * source);
    u64 count = at<const u32>(dispatch.offsets() + 4 * source + 4) - first;
    auto fill = [&](u64 part, u64 bytes, u8 with) {
        u64 begin = own + part + first * bytes;
        for (u64 i = threadIdx.x; i < count * bytes; i += EP_THREADS) at<u8>(begin + i) = with;
    };
    u64 start = own + first * ROW;
    for (u64 i = threadIdx.x; i < count * (ROW / 16); i += EP_THREADS) st_v16(start + 16 * i, Vec16{});
    fill(heap.region_scales, SCALE_BYTES, 0);
    fill(heap.region_idx, 8 * EP_K, 0xff);
    fill(heap.region_weights, 4 * EP_K, 0);
    fill(heap.region_source, 4, 0);
}

// Waits for all rows of all ranks. The last block of a launch.
__device__ __forceinline__ void receive_rows(const Dispatch &dispatch, DispatchShared &shared) {
    const EpCommon &common = dispatch.common;
    u32 *lost = shared.scan.flags;
    if (threadIdx.x < EP_R) {
        u32 source = threadIdx.x;
        u32 first = at<const u32>(dispatch.offsets() + 4 * source);
        bool came = !is_masked(common, source) &&
                    await(common, word_at(common, common.base, source, EP_WORD_SENT + dispatch.parity), dispatch.epoch, source,
                               EP_STAGE_SENT, dispatch.epoch);
        bool empty = first == at<const u32>(dispatch.offsets() + 4 * source + 4);
        lost[source] = !came && !empty;
        u64 place = ld_acquire_sys_u64(word_at(common, common.base, source, EP_WORD_PLACE + dispatch.parity));
        if (came && !empty && place != first) report_fault(common, source, EP_STAGE_PLACE, dispatch.epoch, place);
    }
    __syncthreads();
    for (u32 source = 0; source < EP_R; ++source) {
        if (lost[source]) discard_rows(dispatch, source);
    }
    __syncthreads();
    mark_by(0, dispatch.args.marks, EP_MARK_CAME);
}

// Copies the rows' source tokens to the handle, which may outlive the region.
__device__ __forceinline__ void save_sources(const Dispatch &dispatch) {
    constexpr u32 DEPTH = 8;
    const EpCommon &common = dispatch.common;
    u32 rows = at<const u32>(dispatch.offsets() + 4 * EP_R);
    u64 own = common.base + common.heap.regions + dispatch.args.region * common.heap.region_stride;
    u64 from = own + common.heap.region_source, to = common.handle + common.parts.source;
    for (u32 base = threadIdx.x; base < rows / 4; base += EP_THREADS * DEPTH) {
        Vec16 v[DEPTH];
#pragma unroll
        for (u32 k = 0; k < DEPTH; ++k) {
            if (base + k * EP_THREADS < rows / 4) v[k] = ld_once_v16(from + 16 * (base + k * EP_THREADS));
        }
#pragma unroll
        for (u32 k = 0; k < DEPTH; ++k) {
            if (base + k * EP_THREADS < rows / 4) st_v16(to + 16 * (base + k * EP_THREADS), v[k]);
        }
    }
    for (u32 i = rows / 4 * 4 + threadIdx.x; i < rows; i += EP_THREADS) at<u32>(to + 4 * i) = at<const u32>(from + 4 * i);
}

// Advances the dispatch epochs. Called by the last block of a launch.
__device__ __forceinline__ void end_dispatch(const Dispatch &dispatch, DispatchShared &shared) {
    const EpCommon &common = dispatch.common;
    EpState &state = state_of(common);
    u32 rank = threadIdx.x;
    if (common.phases & EP_SEND && rank < EP_R && shared.regions[rank] != 0) {
        st_release_sys_u64(word_at(common, heap_of(common, rank), common.rank, EP_WORD_SENT + dispatch.parity), dispatch.epoch);
    }
    if (common.phases & EP_RECEIVE) {
        receive_rows(dispatch, shared);
        if (rank < EP_R && !is_masked(common, rank)) {
            st_release_sys_u64(word_at(common, heap_of(common, rank), common.rank, EP_WORD_DISPATCH_TAKEN), dispatch.epoch);
        }
        if (!dispatch.args.cached) save_sources(dispatch);
        u32 rows = at<const u32>(dispatch.offsets() + 4 * EP_R);
        if (rank == 0 && dispatch.args.max_rows != 0 && rows > dispatch.args.max_rows) {
            report_fault(common, common.rank, EP_STAGE_ROOM, dispatch.epoch, rows);
        }
        if (warp_of() == 0) count_waits(common);
    }
    if (threadIdx.x == 0) {
        EpScan &scan = dispatch.scan();
        if (common.phases & EP_ANNOUNCE) scan.numbered = 0;
        if (common.phases & EP_SEND) scan.dispatch_taken = 0;
        if (common.phases & EP_ANNOUNCE) state.dispatch_begun = dispatch.epoch;
        if (common.phases & EP_SEND) state.dispatch_sent = dispatch.epoch;
        if (common.phases & EP_RECEIVE) state.dispatch_ended = dispatch.epoch;
    }
}
