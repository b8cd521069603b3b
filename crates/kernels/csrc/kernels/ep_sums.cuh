// Sums of rows in an expert-layout combine, with several loads per warp in flight.
#pragma once

#include "kernels/ep_coded.cuh"
#include "kernels/ep_common.cuh"

// N * 256 elements, 8 to 8 of each lane.
template <u32 N>
struct Sum {
    float value[N][8] = {};

    // Adds a row's elements, times the weight if WEIGHTED.
    template <bool WEIGHTED, typename Wire = Plain>
    __device__ __forceinline__ void add(const Vec16 (&v)[N], float weight, bool coded = false) {
#pragma unroll
        for (u32 i = 0; i < N; ++i) {
            float added[8];
            if (Wire::CODED && coded) {
                Wire::decode(v[i], added);
            } else {
#pragma unroll
                for (u32 w = 0; w < 4; ++w) {
                    added[2 * w] = widen_low_bf16(v[i].word[w]);
                    added[2 * w + 1] = widen_high_bf16(v[i].word[w]);
                }
            }
#pragma unroll
            for (u32 k = 0; k < 8; ++k) {
                if (WEIGHTED) added[k] = mul_rn_f32(added[k], weight);
                value[i][k] = add_rn_f32(value[i][k], added[k]);
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

// Loads a lane's part of N * 256 elements of a row that has `elements`; lanes past the end load the row's start
// instead.
template <u32 N>
__device__ __forceinline__ void load_step(Vec16 (&v)[N], u64 row, u32 elements, u32 lane) {
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
        u32 element = (i * LANES + lane) * 8;
        v[i] = ld_once_v16(row + (element < elements ? element : 0) * 2);
    }
}

// The same of `elements` from `at_element` on of a row that was coded; `place`: where they were if the row were plain.
template <typename Wire, u32 N>
__device__ __forceinline__ void load_coded(Vec16 (&v)[N], u64 place, u32 at_element, u32 elements, u32 lane) {
    u32 within = at_element % EP_PIECE;
    u64 piece = place - within * 2;
    u32 whole = piece_elements(at_element / EP_PIECE);
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
        u32 element = (i * LANES + lane) * 8;
        v[i] = Wire::load(piece, whole, within + (element < elements ? element : 0));
    }
}

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

// Adds up rows, DEPTH at a time: `load` brings that of a lane. `weigh` gives each lane's weight; it is asked once, when the
// first loads are under way. `coded`: each lane's row is as Wire codes it. All lanes.
template <u32 DEPTH, bool WEIGHTED, typename Wire, u32 N, typename Load, typename Weigh>
__device__ __forceinline__ void sum_terms(Sum<N> &sum, const Terms &terms, bool coded, Load load, Weigh weigh) {
    float weight = 1.0f;
    if constexpr (Wire::CODED) {
        // One row at a time with the next one in flight: less code in the instruction cache.
        Vec16 ahead[N] = {};
        if (terms.count > 0) load(ahead, terms.lane_of(0));
        if (WEIGHTED) weight = weigh();
#pragma unroll 1
        for (u32 i = 0; i < terms.count; ++i) {
            Vec16 v[N];
#pragma unroll
            for (u32 n = 0; n < N; ++n) v[n] = ahead[n];
            u32 lane = terms.lane_of(i);
            if (i + 1 < terms.count) load(ahead, terms.lane_of(i + 1));
            float by = WEIGHTED ? __shfl_sync(WHOLE_WARP, weight, lane) : 1.0f;
            sum.template add<WEIGHTED, Wire>(v, by, __shfl_sync(WHOLE_WARP, coded, lane));
        }
    } else {
#pragma unroll 1
        for (u32 i = 0; i < terms.count; i += DEPTH) {
            Vec16 v[DEPTH][N];
#pragma unroll
            for (u32 d = 0; d < DEPTH; ++d) {
                if (i + d < terms.count) load(v[d], terms.lane_of(i + d));
            }
            if (WEIGHTED && i == 0) weight = weigh();
#pragma unroll
            for (u32 d = 0; d < DEPTH; ++d) {
                if (i + d >= terms.count) continue;
                u32 lane = terms.lane_of(i + d);
                float by = WEIGHTED ? __shfl_sync(WHOLE_WARP, weight, lane) : 1.0f;
                sum.template add<WEIGHTED>(v[d], by);
            }
        }
    }
}
