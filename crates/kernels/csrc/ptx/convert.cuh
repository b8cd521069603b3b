// Number format conversions, bit-identical to the host's row kernels (crates/ep-host/src/rows): round to nearest, ties
// to even; every product and sum is rounded to fp32, without fused operations.
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

// The two e4m3 in the low half of a word, widened; what is not a number is NaN.
__device__ __forceinline__ void widen_e4m3x2(u32 pair, float &low, float &high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(pair)));
    asm("{\n"
        ".reg .b16 l, h;\n"
        "mov.b32 {l, h}, %2;\n"
        "cvt.f32.f16 %0, l;\n"
        "cvt.f32.f16 %1, h;\n"
        "}"
        : "=f"(low), "=f"(high)
        : "r"(halves));
#else
    auto widen = [](u32 code) {
        // The code's bits where an fp32 has its own, whose exponents are larger by 120.
        u32 magnitude = code & 0x7f;
        float value = __uint_as_float(magnitude << 20) * __uint_as_float(247u << 23);
        u32 bits = magnitude == 0x7f ? 0x7fc00000 : __float_as_uint(value);
        return __uint_as_float(bits | (code & 0x80) << 24);
    };
    low = widen(pair & 0xff);
    high = widen(pair >> 8 & 0xff);
#endif
}

// Maximum, and negation modulo 2^16, of the two unsigned 16-bit halves of a word.
__device__ __forceinline__ u32 max_u16x2(u32 a, u32 b) {
#ifdef __CUDA_ARCH__
    return __vmaxu2(a, b);
#else
    u32 low = max(a & 0xffff, b & 0xffff), high = max(a >> 16, b >> 16);
    return high << 16 | low;
#endif
}
__device__ __forceinline__ u32 negate_u16x2(u32 a) {
#ifdef __CUDA_ARCH__
    return __vsub2(0, a);
#else
    return (0 - (a & 0xffff0000)) | ((0 - a) & 0xffff);
#endif
}

__device__ __forceinline__ float reciprocal_approx_f32(float value) {
#ifdef __CUDA_ARCH__
    float inverse;
    asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(value));
    return inverse;
#else
    return 1.0f / value;
#endif
}

// Logarithm and power to base 2, to some 22 bits: the hardware's, which differ in their last bits from the host's.
__device__ __forceinline__ float log2_approx_f32(float value) {
#ifdef __CUDA_ARCH__
    float log;
    asm("lg2.approx.f32 %0, %1;" : "=f"(log) : "f"(value));
    return log;
#else
    return log2f(value);
#endif
}

__device__ __forceinline__ float exp2_approx_f32(float log) {
#ifdef __CUDA_ARCH__
    float value;
    asm("ex2.approx.f32 %0, %1;" : "=f"(value) : "f"(log));
    return value;
#else
    return exp2f(log);
#endif
}
