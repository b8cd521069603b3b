// Casts bf16 to e4m3 in blocks of 128 elements with one scale each. Bit-identical to the host's row kernels
// (crates/ep-host/src/rows).
#pragma once

#include "layout/types.cuh"
#include "ptx/convert.cuh"

constexpr u32 BLOCK = 128;
// Bytes of a scale.
constexpr u32 SCALE = !EP_FP8 ? 0 : EP_SCALE == 2 ? 1 : 4;

// What a block's elements are multiplied with, and their scale.
struct Scaled {
    float factor;
    float scale;
};

// Kinds of scales, as EP_SCALE has them, of which the second and the third differ in how they are stored.
constexpr u32 EXACT_SCALE = 0, POWER_OF_TWO = 1;

template <u32 KIND>
__device__ __forceinline__ Scaled scaled_as(float amax) {
    // At most the largest finite bf16, at least 1e-4.
    amax = fmaxf(fminf(amax, __uint_as_float(0x7f7f0000)), 1e-4f);
    float scale = mul_rn_f32(amax, 1.0f / 448.0f);
    if (KIND == EXACT_SCALE) return {448.0f / amax, scale};
    u32 exponent = (__float_as_uint(scale) + 0x7fffff) >> 23;
    return {__uint_as_float((254 - exponent) << 23), __uint_as_float(exponent << 23)};
}

__device__ __forceinline__ Scaled scaled(float amax) { return scaled_as<EP_SCALE>(amax); }

__device__ __forceinline__ float largest(float amax, u32 pair) {
    // fmaxf ignores a NaN operand.
    return fmaxf(amax, fmaxf(fabsf(widen_low_bf16(pair)), fabsf(widen_high_bf16(pair))));
}

__device__ __forceinline__ u32 cast_two(u32 pair, float factor) {
    float low = mul_rn_f32(widen_low_bf16(pair), factor), high = mul_rn_f32(widen_high_bf16(pair), factor);
    return narrow_e4m3x2(low, high);
}

// Four elements of a block. Factors are positive: signs stay what they are, a NaN's, too.
__device__ __forceinline__ u32 cast_four(u32 first, u32 second, float factor) {
    u32 signs = __byte_perm(first, second, 0x7531) & 0x80808080;
    return cast_two(first, factor) | cast_two(second, factor) << 16 | signs;
}

__device__ __forceinline__ void store_scale(u8 *scales, u32 index, float scale) {
    if (EP_SCALE == 2) {
        scales[index] = static_cast<u8>(__float_as_uint(scale) >> 23);
    } else {
        reinterpret_cast<float *>(scales)[index] = scale;
    }
}
