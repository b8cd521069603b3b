// What a combine carries from rank to rank: bf16 as it is, e4m3, or LogFMT-10. A rank's own rows never leave it and stay
// bf16. A coded piece has the same size whatever its values are:
//
//     | 8 bits of each element | LogFMT: of each 8 elements, their 9th bits and their signs, 2 bytes | scales |
//
// Sixteen lanes have a block of 128 elements, eight each, so that what a lane codes or decodes are 8 bytes of the first
// part, 2 of the second, and one scale.
#pragma once

#include "kernels/ep_cast.cuh"
#include "ptx/memory.cuh"

// Vectors of eight bf16 elements that a lane encodes at a time. A loop, not unrolled, to limit instruction-cache
// misses.
constexpr u32 CODED_AT_ONCE = 4;

// The next of some vectors becomes the first.
template <typename T>
__device__ __forceinline__ void rotate(T (&v)[CODED_AT_ONCE]) {
#pragma unroll
    for (u32 i = 1; i < CODED_AT_ONCE; ++i) v[i - 1] = v[i];
}

// bf16 as it is.
struct Plain {
    static constexpr bool CODED = false;

    static __device__ __forceinline__ u32 bytes(u32 elements) { return elements * 2; }
    static __device__ __forceinline__ void encode(Vec16 (&)[CODED_AT_ONCE], u8 *, u32, u32, u32) {}
    static __device__ __forceinline__ Vec16 load(u64, u32, u32) { return {}; }
    static __device__ __forceinline__ void decode(const Vec16 &, float (&)[8]) {}
};

// e4m3, with a power of two for each block, as dispatch casts it. Scales are exponents, a byte each.
struct Fp8 {
    static constexpr bool CODED = true;

    static __device__ __forceinline__ u32 bytes(u32 elements) { return (elements + elements / BLOCK + 15) / 16 * 16; }

    // Codes 1024 elements of a piece, of which there are `elements`, from `from` on. All lanes.
    static __device__ __forceinline__ void encode(Vec16 (&v)[CODED_AT_ONCE], u8 *stage, u32 from, u32 elements, u32 lane) {
        float amax[CODED_AT_ONCE] = {};
#pragma unroll
        for (u32 i = 0; i < CODED_AT_ONCE; ++i) {
#pragma unroll
            for (u32 w = 0; w < 4; ++w) amax[i] = largest(amax[i], v[i].word[w]);
        }
#pragma unroll
        for (u32 step = 8; step > 0; step /= 2) {
#pragma unroll
            for (u32 i = 0; i < CODED_AT_ONCE; ++i) amax[i] = fmaxf(amax[i], __shfl_xor_sync(0xffffffff, amax[i], step));
        }
#pragma unroll 1
        for (u32 element = from + lane * 8; element < elements && element < from + CODED_AT_ONCE * 256; element += 256) {
            Scaled by = scaled_as<POWER_OF_TWO>(amax[0]);
            u32 *to = reinterpret_cast<u32 *>(stage + element);
            to[0] = cast_four(v[0].word[0], v[0].word[1], by.factor);
            to[1] = cast_four(v[0].word[2], v[0].word[3], by.factor);
            if (lane % 16 == 0) stage[elements + element / BLOCK] = static_cast<u8>(__float_as_uint(by.scale) >> 23);
            rotate(v);
            rotate(amax);
        }
    }

    // Loads a lane's eight coded elements, from `element` on, of the piece at `from`.
    static __device__ __forceinline__ Vec16 load(u64 from, u32 elements, u32 element) {
        u64 codes = ld_once_u64(from + element);
        u32 exponent = *reinterpret_cast<const u8 *>(from + elements + element / BLOCK);
        return {static_cast<u32>(codes), static_cast<u32>(codes >> 32), 0, exponent << 23};
    }

    static __device__ __forceinline__ void decode(const Vec16 &coded, float (&value)[8]) {
        float scale = __uint_as_float(coded.word[3]);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            u32 pair = coded.word[i / 2] >> (i % 2 * 16);
            widen_e4m3x2(pair, value[2 * i], value[2 * i + 1]);
            value[2 * i] = mul_rn_f32(value[2 * i], scale);
            value[2 * i + 1] = mul_rn_f32(value[2 * i + 1], scale);
        }
    }
};

// LogFMT-10, as DeepEP V1 has it: a sign and nine bits. Code 0 is zero; 1 to 511 are evenly spaced logarithms between
// those of a block's smallest and largest magnitudes, at most 32 octaves apart; smaller ones become zero. A block's scale
// is both magnitudes. Zeros do not count as the smallest. A block with an infinity or a NaN becomes NaN as a whole.
struct LogFmt10 {
    static constexpr bool CODED = true;
    static constexpr u32 NAN_BF16 = 0x7fc0;

    static __device__ __forceinline__ u32 bytes(u32 elements) { return (elements + elements / 4 + elements / 32 + 15) / 16 * 16; }

    // What a block's scale means.
    struct Range {
        float low;
        float step;

        __device__ __forceinline__ explicit Range(u32 scale) {
            float top = log2_approx_f32(__uint_as_float(scale & 0xffff0000));
            low = log2_approx_f32(__uint_as_float(scale << 16));
            // Not fmaxf, which would hide a NaN.
            if (low < add_rn_f32(top, -32.0f)) low = add_rn_f32(top, -32.0f);
            step = mul_rn_f32(add_rn_f32(top, -low), 1.0f / 510.0f);
        }
    };

    static __device__ __forceinline__ void encode(Vec16 (&v)[CODED_AT_ONCE], u8 *stage, u32 from, u32 elements, u32 lane) {
        // Per block: the largest magnitude, and the largest of the magnitudes negated modulo 2^16, which gives the
        // smallest nonzero magnitude.
        u32 ends[CODED_AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < CODED_AT_ONCE; ++i) {
            u32 most = 0, least = 0;
#pragma unroll
            for (u32 w = 0; w < 4; ++w) {
                u32 pair = v[i].word[w] & 0x7fff7fff;
                most = max_u16x2(most, pair);
                least = max_u16x2(least, negate_u16x2(pair));
            }
            ends[i] = max_u16x2(__byte_perm(most, least, 0x5410), __byte_perm(most, least, 0x7632));
        }
#pragma unroll
        for (u32 step = 8; step > 0; step /= 2) {
#pragma unroll
            for (u32 i = 0; i < CODED_AT_ONCE; ++i) {
                ends[i] = max_u16x2(ends[i], __shfl_xor_sync(0xffffffff, ends[i], step));
            }
        }
#pragma unroll 1
        for (u32 element = from + lane * 8; element < elements && element < from + CODED_AT_ONCE * 256; element += 256) {
            u32 most = ends[0] & 0xffff, least = negate_u16x2(ends[0]) >> 16;
            bool finite = most < 0x7f80;
            u32 scale = finite ? most << 16 | least : NAN_BF16 << 16 | NAN_BF16;
            encode_eight(v[0], finite, scale, stage + element, stage + elements + element / 4);
            u32 *scales = reinterpret_cast<u32 *>(stage + elements + elements / 4);
            if (lane % 16 == 0) scales[element / BLOCK] = scale;
            rotate(v);
            rotate(ends);
        }
    }

    static __device__ __forceinline__ u32 magnitude_of(const Vec16 &v, u32 k) {
        return v.word[k / 2] >> (k % 2 * 16) & 0x7fff;
    }

    static __device__ __forceinline__ void encode_eight(const Vec16 &v, bool finite, u32 scale, u8 *low, u8 *high) {
        Range range(scale);
        bool spread = range.step > 0.0f;
        float inverse = spread ? reciprocal_approx_f32(range.step) : 0.0f;
        // A value between two codes becomes the nearer one, not the one of the nearer logarithm.
        float half = mul_rn_f32(add_rn_f32(1.0f, exp2_approx_f32(range.step)), 0.5f);
        float rounding = spread ? 2.0f - mul_rn_f32(log2_approx_f32(half), inverse) : 1.0f;
        u32 words[2] = {}, ninths = 0, signs = 0;
#pragma unroll
        for (u32 k = 0; k < 8; ++k) {
            u32 magnitude = magnitude_of(v, k);
            float log = log2_approx_f32(__uint_as_float(magnitude << 16));
            float place = add_rn_f32(mul_rn_f32(add_rn_f32(log, -range.low), inverse), rounding);
            u32 code = magnitude == 0 || !(place >= 1.0f) ? 0 : static_cast<u32>(place < 511.0f ? place : 511.0f);
            if (!finite) code = 1;
            words[k / 4] |= (code & 0xff) << (k % 4 * 8);
            ninths |= code >> 8 << k;
            signs |= (v.word[k / 2] >> (k % 2 * 16 + 15) & 1) << k;
        }
        reinterpret_cast<u32 *>(low)[0] = words[0];
        reinterpret_cast<u32 *>(low)[1] = words[1];
        *reinterpret_cast<unsigned short *>(high) = static_cast<unsigned short>(signs << 8 | ninths);
    }

    static __device__ __forceinline__ Vec16 load(u64 from, u32 elements, u32 element) {
        u64 codes = ld_once_u64(from + element);
        u32 high = *reinterpret_cast<const unsigned short *>(from + elements + element / 4);
        u32 scale = *reinterpret_cast<const u32 *>(from + elements + elements / 4 + element / BLOCK * 4);
        return {static_cast<u32>(codes), static_cast<u32>(codes >> 32), high, scale};
    }

    static __device__ __forceinline__ void decode(const Vec16 &coded, float (&value)[8]) {
        Range range(coded.word[3]);
        u32 high = coded.word[2];
#pragma unroll
        for (u32 k = 0; k < 8; ++k) {
            u32 code = (coded.word[k / 4] >> (k % 4 * 8) & 0xff) | (high >> k & 1) << 8;
            float log = add_rn_f32(range.low, mul_rn_f32(range.step, static_cast<float>(code) - 1.0f));
            u32 bits = code == 0 ? 0 : __float_as_uint(exp2_approx_f32(log));
            value[k] = __uint_as_float(bits | (high >> (k + 8) & 1) << 31);
        }
    }
};
