// Numbers between formats, to the bit as the host's row kernels have them (crates/ep-host/src/rows): to nearest, ties to
// even; every product and sum is rounded to fp32, nothing is fused.
#pragma once

#include "layout/types.cuh"

// The two bf16 of a word, widened.
__device__ __forceinline__ float widen_low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float widen_high_bf16(u32 pair) { return __uint_as_float(pair & 0xffff0000); }

__device__ __forceinline__ float mul_rn_f32(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

__device__ __forceinline__ float add_rn_f32(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
}

// The bf16 nearest to a value; NaN is 0x7fc0.
__device__ __forceinline__ u32 narrow_bf16(float value) {
    u32 bits = __float_as_uint(value);
    return value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Two of them in one word.
__device__ __forceinline__ u32 narrow_bf16x2(float low, float high) {
#ifdef __CUDA_ARCH__
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    // The instruction has another NaN.
    if (low != low) pair = (pair & 0xffff0000) | 0x7fc0;
    if (high != high) pair = (pair & 0xffff) | 0x7fc00000;
    return pair;
#else
    return narrow_bf16(low) | narrow_bf16(high) << 16;
#endif
}

// The e4m3 nearest to a value, at most 448 either way; NaN is 0x7f with its sign. Added to a power of two 2^20 times as
// large as its own, the value is rounded to the three bits after its first; below 2^-6 steps stay 2^-9.
__device__ __forceinline__ u32 narrow_e4m3(float value) {
    u32 sign = __float_as_uint(value) >> 24 & 0x80;
    float magnitude = fabsf(value) < 448.0f ? fabsf(value) : 448.0f;
    u32 bits = __float_as_uint(magnitude);
    u32 power = (bits > 121u << 23 ? bits : 121u << 23) & 0x7f800000;
    u32 steps = __float_as_uint(add_rn_f32(magnitude, __uint_as_float(power + (20u << 23)))) & 0xff;
    u32 code = ((power >> 20) - (121u << 3) + steps) & 0xff;
    return sign | (value != value ? 0x7f : code);
}

// Two of them in the low half of a word; a NaN may have lost its sign.
__device__ __forceinline__ u32 narrow_e4m3x2(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return narrow_e4m3(low) | narrow_e4m3(high) << 8;
#endif
}
