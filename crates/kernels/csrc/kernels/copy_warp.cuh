// A copy by one warp: any length, any alignment of either end.
//
//     dst:  | head (bytes) | 16 | 16 | ... | 16 | tail (bytes) |
//
// Stores of the middle part are aligned. If source and destination have the same misalignment, so are its loads; else a
// store is assembled from two adjacent aligned loads, and each 16 bytes are still loaded once: a lane gets the second
// load from its right neighbour by shuffle. Nothing outside [src, src + len) is read.
//
// Sources must not change while the kernel runs: loads may hit stale lines of the L1 cache, which is not coherent.
#pragma once

#include "ptx/memory.cuh"

constexpr u32 WARP = 32;
constexpr u32 ALL_LANES = 0xffffffff;
constexpr u32 SHORT = 64;

__device__ __forceinline__ void copy_bytes(u64 dst, u64 src, u64 len, u32 lane) {
    for (u64 i = lane; i < len; i += WARP) {
        reinterpret_cast<u8 *>(dst)[i] = reinterpret_cast<const u8 *>(src)[i];
    }
}

// Copies `count` 16-byte vectors between aligned addresses, with eight loads in flight per lane.
__device__ __forceinline__ void copy_aligned(u64 dst, u64 src, u64 count, u32 lane) {
    constexpr u32 DEPTH = 8;
    for (u64 first = lane; first < count; first += WARP * DEPTH) {
        Vec16 v[DEPTH];
#pragma unroll
        for (u32 k = 0; k < DEPTH; ++k) {
            if (first + k * WARP < count) v[k] = ld_once_v16(src + 16 * (first + k * WARP));
        }
#pragma unroll
        for (u32 k = 0; k < DEPTH; ++k) {
            if (first + k * WARP < count) st_v16(dst + 16 * (first + k * WARP), v[k]);
        }
    }
}

// The 16 bytes that begin `4 * WORDS + bits / 8` bytes into `low` and go on into `high`.
template <u32 WORDS>
__device__ __forceinline__ Vec16 joined(const Vec16 &low, const Vec16 &high, u32 bits) {
    u32 word[8];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        word[i] = low.word[i];
        word[4 + i] = high.word[i];
    }
    Vec16 out;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) out.word[i] = __funnelshift_r(word[i + WORDS], word[i + WORDS + 1], bits);
    return out;
}

// `count` vectors, from `src + 4 * WORDS + bits / 8` where `src` is aligned; count + 1 vectors of `src` are read.
template <u32 WORDS>
__device__ __forceinline__ void copy_shifted(u64 dst, u64 src, u64 count, u32 bits, u32 lane) {
    constexpr u32 DEPTH = 8;
    // A warp's loads start at a cache line boundary, so that each line is fetched once, which matters for host memory.
    // Lanes before `src` have a negative i, which as an unsigned number is larger than any count.
    u32 skew = static_cast<u32>(src / 16) % 8;
    for (u64 start = 0; start < count + skew; start += WARP * DEPTH) {
        // v[DEPTH] is needed by the last lane only, and loaded by the first, which hands it over.
        Vec16 v[DEPTH + 1] = {};
#pragma unroll
        for (u32 k = 0; k <= DEPTH; ++k) {
            u64 i = start + k * WARP + lane - skew;
            if (i <= count && (k < DEPTH || lane == 0)) v[k] = *reinterpret_cast<const Vec16 *>(src + 16 * i);
        }
#pragma unroll
        for (u32 k = 0; k < DEPTH; ++k) {
            Vec16 next;
#pragma unroll
            for (u32 w = 0; w < 4; ++w) {
                u32 offered = lane == 0 ? v[k + 1].word[w] : v[k].word[w];
                next.word[w] = __shfl_sync(ALL_LANES, offered, (lane + 1) % WARP);
            }
            u64 i = start + k * WARP + lane - skew;
            if (i < count) st_v16(dst + 16 * i, joined<WORDS>(v[k], next, bits));
        }
    }
}

// Copies `len` bytes; all 32 lanes of a warp call it with the same addresses. The areas must not overlap.
__device__ __forceinline__ void copy_warp(u64 dst, u64 src, u64 len, u32 lane) {
    if (len < SHORT) {
        copy_bytes(dst, src, len, lane);
        return;
    }
    u32 head = static_cast<u32>(-dst) & 15;
    u32 shift = static_cast<u32>(src + head) & 15;
    // The first aligned load begins `shift` bytes before the first store's source: not before `src`.
    if (shift > head) head += 16;
    u64 count = (len - head - (shift ? 16 - shift : 0)) / 16;
    u64 done = head + 16 * count;
    u64 to = dst + head, from = src + head - shift;
    u32 bits = shift % 4 * 8;
    if (shift == 0) {
        copy_aligned(to, from, count, lane);
    } else {
        switch (shift / 4) {
            case 0: copy_shifted<0>(to, from, count, bits, lane); break;
            case 1: copy_shifted<1>(to, from, count, bits, lane); break;
            case 2: copy_shifted<2>(to, from, count, bits, lane); break;
            default: copy_shifted<3>(to, from, count, bits, lane); break;
        }
    }
    copy_bytes(dst, src, head, lane);
    copy_bytes(dst + done, src + done, len - done, lane);
}
