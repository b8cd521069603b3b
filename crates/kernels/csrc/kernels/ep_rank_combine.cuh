// Combine in the rank layout: each row is sent back to its token's rank, which sums a token's rows.
//
// The first warps of a block send and the others add, so that stores to peers and sums overlap. Rows are taken from all
// sources in turn, in the order of their tokens, and each has its own flag: sums begin with the first rows. This rank's own
// rows are added in place.
//
// Flags need a system fence before them, which is slow while much is in flight. One warp between the senders and the adders
// does nothing else, once for all rows that have arrived by then.
#pragma once

#include "kernels/ep_rank.cuh"

constexpr u32 COMBINE_STAGE = (WIDE_ROW + 127) / 128 * 128;
constexpr u32 COMBINE_STAGES = EP_COMBINE_STAGES;
// Warps that send, and the stages of each; without bulk copies they carry rows in registers.
constexpr u32 SENDERS = EP_BULK ? EP_COMBINE_MOVERS : WARPS / 4;
constexpr u32 SENDER_STAGES = EP_BULK ? COMBINE_STAGES / SENDERS : 1;
constexpr u32 SENDER_AHEAD = ahead_of(atleast(SENDER_STAGES, 2), WIDE_ROW);
constexpr u32 SENDER_BEHIND = atleast(SENDER_STAGES, 2) - SENDER_AHEAD;
// Default KiB of rows in flight, for all blocks together.
constexpr u32 SENDER_QUEUE = 8192;
// Batch size: rows that a warp reports as arrived together, and rows that may stay in flight meanwhile. MANY_: the same
// for a warp with many rows, so that it seldom waits.
constexpr u32 FLAGS_AT_ONCE = 2;
constexpr u32 FLAGS_BEHIND = 2;
constexpr u32 MANY_ROWS = 128;
constexpr u32 MANY_AT_ONCE = 4;
constexpr u32 MANY_BEHIND = 8;
// Each row in flight of a warp is tracked by one lane.
static_assert(SENDER_AHEAD + MANY_AT_ONCE + MANY_BEHIND + 1 <= LANES, "rows in flight that a warp can track");
// Per sending warp: number of reported batches whose flags are not written yet, and rows per batch.
constexpr u32 BATCHES = EP_BATCHES;
constexpr u32 BATCH_ROWS = EP_BATCH_ROWS;
static_assert(MANY_AT_ONCE + MANY_BEHIND <= BATCH_ROWS && BATCH_ROWS <= LANES, "rows per batch");
// Bit of a batch's row count: this is the warp's last batch.
constexpr u32 LAST_ROWS = 1u << 31;
constexpr u32 BATCH_WARPS = EP_BULK ? SENDERS : 1;
// The warp that writes flags, and the first that adds.
constexpr u32 FLAGGER = SENDERS;
constexpr u32 ADDERS = EP_BULK ? SENDERS + 1 : SENDERS;
static_assert(EP_R <= 64, "two ranks of each lane");
static_assert(ADDERS < WARPS, "a warp is left to add");

struct CombineShared {
    alignas(8) u64 full[SENDERS * SENDER_STAGES];
    // Batches of arrived rows: addresses of their flags, row count, and barriers for "reported" and "flags written".
    u64 flags[BATCH_WARPS][BATCHES][BATCH_ROWS];
    u64 reported[BATCH_WARPS][BATCHES];
    u64 flagged[BATCH_WARPS][BATCHES];
    u32 rows[BATCH_WARPS][BATCHES];
    // Address of each source's heap; 0 if nothing is sent there.
    u64 heaps[EP_R];
    // The first row of each source, and the end.
    u32 offsets[EP_R + 1];
    u32 last;
};

static_assert(sizeof(CombineShared) <= EP_COMBINE_COMMON, "shared memory that the launcher reserves");

struct Combine {
    const EpCombineArgs &args;
    const EpCommon &common;
    u64 epoch;
    u32 parity;

    __device__ __forceinline__ explicit Combine(const EpCombineArgs &args) : args(args), common(args.common) {
        const EpState &state = state_of(common);
        epoch = (common.phases & EP_SEND ? state.combine_sent : state.combine_ended) + 1;
        parity = epoch % EP_DEPTH;
    }

    // Within a heap: the row that `from` sends of its receiver's `token`, its flag, and the weights that go with it.
    __device__ __forceinline__ u64 row(u32 from, u32 token) const {
        return inbox_in(common, 0, from) + common.heap.back + common.heap.back_slot * parity + common.heap.back_stride * token;
    }
    __device__ __forceinline__ u64 flag(u32 from, u32 token) const {
        return inbox_in(common, 0, from) + common.heap.back_flags + common.heap.back_flags_slot * parity + 8 * u64(token);
    }
    __device__ __forceinline__ u64 weights(u32 from, u32 token) const {
        u64 slot = u64(parity) * common.max_tokens + token;
        return inbox_in(common, 0, from) + common.heap.back_topk + 4 * (slot * EP_K);
    }
    // Rows beyond `y_rows` count as zeros: they are read from this rank's own slots, which stay zero.
    __device__ __forceinline__ bool is_beyond(u32 row) const { return args.y_rows != 0 && row >= args.y_rows; }
    __device__ __forceinline__ u64 output(u32 output) const {
        return is_beyond(output) ? common.base + row(common.rank, 0) : args.y + u64(output) * args.y_stride;
    }
    __device__ __forceinline__ u64 output_weights(u32 output) const {
        return is_beyond(output) ? common.base + weights(common.rank, 0) : args.y_weights + 4 * u64(output) * EP_K;
    }
};

// Rows of one sending warp. A turn is one row of each source, so rows are returned in token order. Warps claim turns
// dynamically; each starts at a different rank, to avoid incast.
struct Turns {
    WorkCounter work;
    u32 turn;
    u32 end = 0;
    u32 nth = 0;

    __device__ __forceinline__ Turns(const Combine &combine, const CombineShared &shared, u32 sender, u32 senders)
        : turn(sender) {
        work.begin(at<EpScan>(combine.common.base + combine.common.heap.scan).combine_taken, senders);
        for (u32 i = lane_of(); i < EP_R; i += LANES) {
            if (i != combine.common.rank && shared.heaps[i] != 0) end = max(end, shared.offsets[i + 1] - shared.offsets[i]);
        }
#pragma unroll
        for (u32 by = LANES / 2; by > 0; by /= 2) end = max(end, __shfl_xor_sync(WHOLE_WARP, end, by));
    }

    // The next row and its source. False when there is none left.
    __device__ __forceinline__ bool next(const Combine &combine, const CombineShared &shared, u32 &source, u32 &row) {
        constexpr u32 OTHERS = atleast(EP_R, 2) - 1;
        while (turn < end) {
            while (nth < OTHERS) {
                source = (combine.common.rank + 1 + (nth++ + turn) % OTHERS) % EP_R;
                row = shared.offsets[source] + turn;
                if (row < shared.offsets[source + 1] && shared.heaps[source] != 0) return true;
            }
            nth = 0;
            turn = work.take();
        }
        return false;
    }
};

// The weights that go back with a row.
__device__ __forceinline__ void send_weights(const Combine &combine, u64 heap, u32 row, u32 token) {
    if (combine.args.y_weights == 0) return;
    if (lane_of() >= EP_K) return;
    at<u32>(heap + combine.weights(combine.common.rank, token) + 4 * lane_of()) =
        at<const u32>(combine.output_weights(row) + 4 * lane_of());
}

__device__ __forceinline__ u32 token_of(const Combine &combine, u32 row) {
    u32 token = at<const u32>(combine.common.handle + combine.common.parts.source + 4 * u64(row));
    return token < combine.common.max_tokens ? token : 0;
}

#if EP_BULK
// A sending warp. The state of a row in flight is kept by lane `index % 32`.
struct Sender {
    const Combine &combine;
    CombineShared &shared;
    Turns turns;
    Ring<COMBINE_STAGE, SENDER_STAGES> ring;
    u32 loads = 0;
    u32 stores = 0;
    u32 flags = 0;
    u32 reports = 0;
    u64 heap = 0;
    u32 row = 0;
    u32 token = 0;

    __device__ __forceinline__ Sender(const Combine &combine, CombineShared &shared, u8 *stages, u32 senders)
        : combine(combine), shared(shared), turns(combine, shared, blockIdx.x * SENDERS + warp_of(), senders) {
        ring.begin(stages + COMBINE_STAGE * SENDER_STAGES * warp_of(), shared.full + SENDER_STAGES * warp_of());
    }

    __device__ __forceinline__ void load() {
        u32 source, next;
        if (!turns.next(combine, shared, source, next)) return;
        ring.load(combine.output(next), WIDE_ROW);
        if (lane_of() == loads % LANES) {
            heap = shared.heaps[source];
            row = next;
            token = token_of(combine, next);
        }
        ++loads;
    }

    __device__ __forceinline__ void store() {
        u32 stage = ring.loaded();
        u64 to = __shfl_sync(WHOLE_WARP, heap, stores % LANES);
        u32 its = __shfl_sync(WHOLE_WARP, token, stores % LANES);
        if (lane_of() == 0) bulk_store_open(to + combine.row(combine.common.rank, its), stage, WIDE_ROW);
        send_weights(combine, to, __shfl_sync(WHOLE_WARP, row, stores % LANES), its);
        ring.stored();
        ++stores;
    }

    // Reports the rows below index `upto` to the flagging warp as arrived.
    __device__ __forceinline__ void report(u32 upto, u32 last) {
        u32 warp = warp_of(), at = reports % BATCHES, round = reports / BATCHES;
        if (round > 0) mbarrier_wait_shared(shared_address(&shared.flagged[warp][at]), (round - 1) & 1);
        u32 nth = (lane_of() - flags) % LANES;
        if (nth < upto - flags) shared.flags[warp][at][nth] = heap + combine.flag(combine.common.rank, token);
        if (lane_of() == 0) shared.rows[warp][at] = (upto - flags) | last;
        // Orders the lanes' writes, and the first lane's wait for the stores, before the barrier arrival.
        __syncwarp();
        if (lane_of() == 0) mbarrier_arrive_shared(shared_address(&shared.reported[warp][at]));
        __syncwarp();
        flags = upto;
        ++reports;
    }

    // Reports a batch when there is one; `BEHIND` later rows may still be in flight.
    template <u32 AT_ONCE, u32 BEHIND>
    __device__ __forceinline__ void report_some() {
        if (stores - flags < AT_ONCE + BEHIND) return;
        if (lane_of() == 0) bulk_wait_done<BEHIND>();
        if (flags == 0) mark_by(0, combine.args.marks, EP_MARK_FIRST);
        report(stores - BEHIND, 0);
    }

    __device__ __forceinline__ void run(u32 behind, bool many) {
        for (u32 i = 0; i < SENDER_AHEAD; ++i) load();
        while (stores < loads) {
            store();
            if (lane_of() == 0) wait_read<SENDER_BEHIND>(behind);
            __syncwarp();
            load();
            if (many) {
                report_some<MANY_AT_ONCE, MANY_BEHIND>();
            } else {
                report_some<FLAGS_AT_ONCE, FLAGS_BEHIND>();
            }
        }
        if (lane_of() == 0) bulk_wait_all();
        report(stores, LAST_ROWS);
        mark_by(0, combine.args.marks, EP_MARK_SENT);
    }
};

// The warp that writes the flags of the rows that the block sends.
struct Flagger {
    CombineShared &shared;
    u64 epoch;
    // Per sending warp: batches whose flags are written, and batches reported since.
    u32 done[BATCH_WARPS] = {};
    u32 more[BATCH_WARPS] = {};

    __device__ __forceinline__ bool is_reported(u32 sender, u32 number) const {
        u32 barrier = shared_address(&shared.reported[sender][number % BATCHES]), parity = number / BATCHES & 1;
        u32 reported = 0;
        if (lane_of() == 0) reported = mbarrier_test_shared(barrier, parity);
        if (!__shfl_sync(WHOLE_WARP, reported, 0)) return false;
        // For the other lanes.
        mbarrier_wait_shared(barrier, parity);
        return true;
    }

    // Writes the flags of one warp's reported batches. Returns whether the last one was among them.
    __device__ __forceinline__ bool write(u32 sender) {
        bool last = false;
        for (u32 i = 0; i < more[sender]; ++i) {
            u32 at = (done[sender] + i) % BATCHES, rows = shared.rows[sender][at];
            if (lane_of() < (rows & ~LAST_ROWS)) st_relaxed_sys_u64(shared.flags[sender][at][lane_of()], epoch);
            last = rows & LAST_ROWS;
            __syncwarp();
            if (lane_of() == 0) mbarrier_arrive_shared(shared_address(&shared.flagged[sender][at]));
        }
        done[sender] += more[sender];
        return last;
    }

    __device__ __forceinline__ void run() {
        u32 senders = SENDERS;
        while (senders > 0) {
            u32 any = 0;
#pragma unroll
            for (u32 sender = 0; sender < SENDERS; ++sender) {
                more[sender] = 0;
                while (more[sender] < BATCHES && is_reported(sender, done[sender] + more[sender])) ++more[sender];
                any |= more[sender];
            }
            if (any == 0) {
                pause_ns(100);
                continue;
            }
            __syncwarp();
            fence_acq_rel_sys();
#pragma unroll
            for (u32 sender = 0; sender < SENDERS; ++sender) senders -= write(sender);
        }
    }
};
#endif

// A warp that sends where there are no bulk copies.
__device__ __forceinline__ void send_plain(const Combine &combine, const CombineShared &shared, u32 senders) {
    constexpr u32 DEPTH = 8;
    Turns turns(combine, shared, blockIdx.x * SENDERS + warp_of(), senders);
    u32 source, row;
    while (turns.next(combine, shared, source, row)) {
        u32 token = token_of(combine, row);
        u64 heap = shared.heaps[source];
        u64 from = combine.output(row), to = heap + combine.row(combine.common.rank, token);
        for (u32 base = lane_of(); base < VECTORS; base += LANES * DEPTH) {
            Vec16 v[DEPTH];
#pragma unroll
            for (u32 k = 0; k < DEPTH; ++k) {
                if (base + k * LANES < VECTORS) v[k] = ld_once_v16(from + 16 * (base + k * LANES));
            }
#pragma unroll
            for (u32 k = 0; k < DEPTH; ++k) {
                if (base + k * LANES < VECTORS) st_v16(to + 16 * (base + k * LANES), v[k]);
            }
        }
        send_weights(combine, heap, row, token);
        __syncwarp();
        if (lane_of() == 0) st_release_sys_u64(heap + combine.flag(combine.common.rank, token), combine.epoch);
    }
}

// A token whose rows are added up: where they are, by lane; 0 for none.
struct Token {
    u64 row[EACH];
    u64 weights[EACH];
    u32 number[EACH];

    // The number of the token's row at each rank, which is needed somewhat later.
    __device__ __forceinline__ void load(const Combine &combine, u32 token) {
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {
            u32 rank = lane_of() + LANES * i;
            u64 rows = combine.common.handle + combine.common.parts.sent_rows + 4 * (u64(token) * EP_R + rank);
            number[i] = token < combine.common.tokens && rank < EP_R ? at<const u32>(rows) : EP_NOWHERE;
        }
    }

    // Waits for the rows, leaving out ranks that time out, and compacts them into the first lanes in summation order:
    // that of the token's last selections at their ranks.
    __device__ __forceinline__ void wait(const Combine &combine, const CombineShared &shared, u32 token) {
        const EpCommon &common = combine.common;
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {
            u32 rank = lane_of() + LANES * i;
            row[i] = weights[i] = 0;
            if (number[i] == EP_NOWHERE) continue;
            if (rank == common.rank) {
                u32 own = shared.offsets[rank] + row_number(number[i]);
                row[i] = combine.output(own);
                weights[i] = combine.output_weights(own);
            } else if (!is_masked(common, rank) && await(common, common.base + combine.flag(rank, token), combine.epoch,
                                                              rank, EP_STAGE_BACK_ROW, combine.epoch)) {
                row[i] = common.base + combine.row(rank, token);
                weights[i] = common.base + combine.weights(rank, token);
            }
        }
        __syncwarp();
        sort();
    }

    __device__ __forceinline__ void sort() {
        u32 mine = 0;
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) mine |= row[i] != 0 ? 1u << row_position(number[i]) : 0;
        u64 sorted_row = 0, sorted_weights = 0;
        u32 nth = 0;
#pragma unroll 1
        for (u32 left = __reduce_or_sync(WHOLE_WARP, mine); left != 0; left &= left - 1, ++nth) {
#pragma unroll
            for (u32 i = 0; i < EACH; ++i) {
                u32 which = __ballot_sync(WHOLE_WARP, row[i] != 0 && row_position(number[i]) == u32(__ffs(left) - 1));
                if (which == 0) continue;
                u64 its = __shfl_sync(WHOLE_WARP, row[i], __ffs(which) - 1);
                u64 weights_of = __shfl_sync(WHOLE_WARP, weights[i], __ffs(which) - 1);
                sorted_row = lane_of() == nth ? its : sorted_row;
                sorted_weights = lane_of() == nth ? weights_of : sorted_weights;
            }
        }
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) row[i] = weights[i] = 0;
        row[0] = sorted_row;
        weights[0] = sorted_weights;
    }

    // Calls `add(address)` for each row (or its weights), in their order. All lanes at once.
    template <class Add>
    __device__ __forceinline__ static void each(const u64 (&places)[EACH], Add add) {
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {
            u32 todo = __ballot_sync(WHOLE_WARP, places[i] != 0);
            while (todo != 0) {
                u32 lane = __ffs(todo) - 1;
                todo &= todo - 1;
                add(__shfl_sync(WHOLE_WARP, places[i], lane));
            }
        }
    }
};

// Vectors of a row that each lane adds up at a time, and rows that are loaded at once.
constexpr u32 SUM_DEPTH = 4;
constexpr u32 HELD = atmost(EP_R, 4);

struct Sum {
    float value[SUM_DEPTH][8];

    __device__ __forceinline__ void add(const Vec16 (&v)[SUM_DEPTH]) {
#pragma unroll
        for (u32 k = 0; k < SUM_DEPTH; ++k) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                value[k][2 * i] = add_rn_f32(value[k][2 * i], widen_low_bf16(v[k].word[i]));
                value[k][2 * i + 1] = add_rn_f32(value[k][2 * i + 1], widen_high_bf16(v[k].word[i]));
            }
        }
    }
};

__device__ __forceinline__ void load_part(Vec16 (&v)[SUM_DEPTH], u64 row, u32 base) {
#pragma unroll
    for (u32 k = 0; k < SUM_DEPTH; ++k) {
        u32 i = base + k * LANES + lane_of();
        v[k] = i < VECTORS ? ld_once_v16(row + 16 * i) : Vec16{};
    }
}

// Adds up to `HELD` rows of those that `places` has, from the lanes in `todo`: all are loaded before the first is added.
__device__ __forceinline__ void add_some(Sum &sum, u64 place, u32 &todo, u32 base) {
    u64 rows[HELD];
    Vec16 held[HELD][SUM_DEPTH];
#pragma unroll
    for (u32 j = 0; j < HELD; ++j) {
        rows[j] = 0;
        if (todo != 0) rows[j] = __shfl_sync(WHOLE_WARP, place, __ffs(todo) - 1);
        todo &= todo - 1;
    }
#pragma unroll
    for (u32 j = 0; j < HELD; ++j) {
        if (rows[j] != 0) load_part(held[j], rows[j], base);
    }
#pragma unroll
    for (u32 j = 0; j < HELD; ++j) {
        if (rows[j] != 0) sum.add(held[j]);
    }
}

// The sum of the biases and a token's rows, in their order. The biases come first, as in DeepEP: sums are equal to the last
// bit.
__device__ __forceinline__ void add_rows(const Combine &combine, const Token &token, u32 number) {
    const EpCombineArgs &args = combine.args;
    for (u32 base = 0; base < VECTORS; base += LANES * SUM_DEPTH) {
        Sum sum = {};
        const u64 biases[] = {args.bias[0], args.bias[1]};
        for (u64 bias : biases) {
            if (bias == 0) continue;
            Vec16 added[SUM_DEPTH];
            load_part(added, bias + u64(number) * WIDE_ROW, base);
            sum.add(added);
        }
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {
            u32 todo = __ballot_sync(WHOLE_WARP, token.row[i] != 0);
            while (todo != 0) add_some(sum, token.row[i], todo, base);
        }
#pragma unroll
        for (u32 k = 0; k < SUM_DEPTH; ++k) {
            u32 i = base + k * LANES + lane_of();
            Vec16 out;
#pragma unroll
            for (u32 w = 0; w < 4; ++w) out.word[w] = narrow_bf16x2(sum.value[k][2 * w], sum.value[k][2 * w + 1]);
            if (i < VECTORS) st_v16(args.out + u64(number) * args.out_stride + 16 * i, out);
        }
    }
}

// The sum of the weights that came back with a token's rows.
__device__ __forceinline__ void add_weights(const Combine &combine, const Token &token, u32 number) {
    if (combine.args.out_weights == 0) return;
    float sum = 0;
    Token::each(token.weights, [&](u64 weights) {
        if (lane_of() < EP_K) sum = add_rn_f32(sum, at<const float>(weights + 4 * lane_of()));
    });
    if (lane_of() < EP_K) at<float>(combine.args.out_weights + 4 * (u64(number) * EP_K + lane_of())) = sum;
}

// A warp that adds up: every `step`-th token.
__device__ __forceinline__ void add_tokens(const Combine &combine, const CombineShared &shared, u32 first, u32 step) {
    const EpCommon &common = combine.common;
    Token token, ahead;
    token.load(combine, first);
    for (u32 number = first; number < common.tokens; number += step) {
        ahead.load(combine, number + step);
        token.wait(combine, shared, number);
        add_rows(combine, token, number);
        add_weights(combine, token, number);
        token = ahead;
        if (number == first) mark_by(ADDERS, combine.args.marks, EP_MARK_SUM);
    }
    mark_by(ADDERS, combine.args.marks, EP_MARK_SUMS);
}

// Initializes barriers, waits for free slots at the sources, and loads the first row of each source.
__device__ __forceinline__ void begin_combine(const Combine &combine, CombineShared &shared) {
    const EpCommon &common = combine.common;
    u32 rank = threadIdx.x;
#if EP_BULK
    if (rank == 0) {
        for (u32 i = 0; i < BATCH_WARPS * BATCHES; ++i) {
            mbarrier_init_shared(shared_address(&shared.reported[i / BATCHES][i % BATCHES]), 1);
            mbarrier_init_shared(shared_address(&shared.flagged[i / BATCHES][i % BATCHES]), 1);
        }
        fence_mbarrier_init();
    }
#endif
    if (rank <= EP_R) shared.offsets[rank] = at<const u32>(common.handle + common.parts.offsets + 4 * rank);
    if (rank < EP_R) {
        u64 taken = combine.epoch < EP_DEPTH ? 0 : combine.epoch - EP_DEPTH;
        bool free = rank == common.rank || !(common.phases & EP_SEND);
        free = free || (!is_masked(common, rank) && await(common, word_at(common, common.base, rank, EP_WORD_COMBINE_TAKEN), taken, rank,
                                                               EP_STAGE_COMBINE_TAKEN, combine.epoch));
        shared.heaps[rank] = free ? heap_of(common, rank) : 0;
    }
    __syncthreads();
}

// Advances the combine epochs. Called by the last block of a launch.
__device__ __forceinline__ void end_combine(const Combine &combine) {
    const EpCommon &common = combine.common;
    EpState &state = state_of(common);
    u32 rank = threadIdx.x;
    if (common.phases & EP_RECEIVE && rank < EP_R && !is_masked(common, rank)) {
        st_release_sys_u64(word_at(common, heap_of(common, rank), common.rank, EP_WORD_COMBINE_TAKEN), combine.epoch);
    }
    if (common.phases & EP_RECEIVE && warp_of() == 0) count_waits(common);
    if (threadIdx.x == 0) {
        if (common.phases & EP_SEND) at<EpScan>(common.base + common.heap.scan).combine_taken = 0;
        if (common.phases & EP_SEND) state.combine_begun = state.combine_sent = combine.epoch;
        if (common.phases & EP_RECEIVE) state.combine_ended = combine.epoch;
    }
}
