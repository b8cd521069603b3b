// The words of CUDA C++ that kernels use, for a C++ compiler of the host. Included before everything else.
#pragma once

#include "emulate/machine.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))

#define threadIdx (emulate::thread())
#define blockIdx (emulate::block())
#define blockDim (emulate::threads())
#define gridDim (emulate::blocks())
constexpr int warpSize = 32;

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// Blocks.

inline void __syncthreads() { emulate::barrier(0, 0, true, emulate::Vote::None, 0); }
inline int __syncthreads_or(int value) { return emulate::barrier(0, 0, true, emulate::Vote::Or, value != 0); }
inline int __syncthreads_and(int value) { return emulate::barrier(0, 0, true, emulate::Vote::And, value != 0); }
inline int __syncthreads_count(int value) { return emulate::barrier(0, 0, true, emulate::Vote::Count, value != 0); }

// Warps.

inline void __syncwarp(unsigned mask = 0xffffffff) { emulate::together(emulate::Together::Sync, mask, 0, 0); }

namespace emulate {

inline uint32_t lane() { return thread().x % 32; }

template <class T>
T heard(uint32_t mask, T value, uint32_t from) {
    return from_bits<T>(together(Together::Shuffle, mask, to_bits(value), from));
}

}  // namespace emulate

template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
    return emulate::heard(mask, value, (emulate::lane() & ~(width - 1)) | (from & (width - 1)));
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    unsigned lane = emulate::lane(), within = lane & (width - 1);
    return emulate::heard(mask, value, within >= delta ? lane - delta : lane);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    unsigned lane = emulate::lane(), within = lane & (width - 1);
    return emulate::heard(mask, value, within + delta < unsigned(width) ? lane + delta : lane);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flips, int width = 32) {
    unsigned lane = emulate::lane(), other = lane ^ flips;
    return emulate::heard(mask, value, other / width <= lane / width ? other : lane);
}
inline unsigned __ballot_sync(unsigned mask, int value) {
    return unsigned(emulate::together(emulate::Together::Ballot, mask, value != 0, 0));
}
inline int __any_sync(unsigned mask, int value) { return __ballot_sync(mask, value) != 0; }
inline int __all_sync(unsigned mask, int value) { return __ballot_sync(mask, value) == mask; }
template <class T>
unsigned __match_any_sync(unsigned mask, T value) {
    return unsigned(emulate::together(emulate::Together::Match, mask, emulate::to_bits(value), 0));
}
#define EMULATE_REDUCE(name, what)                                                                 \
    inline unsigned name(unsigned mask, unsigned value) {                                          \
        return unsigned(emulate::together(emulate::Together::what, mask, value, 0));               \
    }
EMULATE_REDUCE(__reduce_add_sync, Add)
EMULATE_REDUCE(__reduce_min_sync, Min)
EMULATE_REDUCE(__reduce_max_sync, Max)
EMULATE_REDUCE(__reduce_and_sync, And)
EMULATE_REDUCE(__reduce_or_sync, Or)
EMULATE_REDUCE(__reduce_xor_sync, Xor)

// Bits and numbers.

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline int __clz(int value) { return value ? __builtin_clz(value) : 32; }
inline int __clzll(long long value) { return value ? __builtin_clzll(value) : 64; }
inline unsigned __brev(unsigned value) {
    unsigned out = 0;
    for (int i = 0; i < 32; ++i) out |= (value >> i & 1) << (31 - i);
    return out;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
    return unsigned((uint64_t(high) << 32 | low) >> (bits & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned bits) {
    return unsigned((uint64_t(high) << 32 | low) << (bits & 31) >> 32);
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    uint64_t bytes = uint64_t(high) << 32 | low;
    unsigned out = 0;
    for (int i = 0; i < 4; ++i) {
        unsigned pick = selector >> 4 * i & 15;
        unsigned byte = unsigned(bytes >> 8 * (pick & 7)) & 0xff;
        if (pick & 8) byte = byte & 0x80 ? 0xff : 0;
        out |= byte << 8 * i;
    }
    return out;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline unsigned __float_as_uint(float value) { return emulate::from_bits<unsigned>(emulate::to_bits(value)); }
inline int __float_as_int(float value) { return emulate::from_bits<int>(emulate::to_bits(value)); }
inline float __uint_as_float(unsigned bits) { return emulate::from_bits<float>(bits); }
inline float __int_as_float(int bits) { return emulate::from_bits<float>(unsigned(bits)); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a < b ? b : a; }
inline unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
inline unsigned long long max(unsigned long long a, unsigned long long b) { return a < b ? b : a; }

// Memory. What these order is nothing, as on the GPU.

template <class T>
T __ldg(const T *address) {
    return *address;
}
template <class T>
T __ldcg(const T *address) {
    return *address;
}
template <class T>
T __ldcs(const T *address) {
    return *address;
}
inline size_t __cvta_generic_to_shared(const void *address) { return emulate::shared_number(address); }
inline void __threadfence_block() { emulate::fence(emulate::Order::Both, emulate::Scope::Block); }
inline void __threadfence() { emulate::fence(emulate::Order::Both, emulate::Scope::Gpu); }
inline void __threadfence_system() { emulate::fence(emulate::Order::Both, emulate::Scope::System); }
inline void __nanosleep(unsigned ns) { emulate::pause(ns); }

#define EMULATE_ATOMIC(name, expression)                                                                            \
    template <class T>                                                                                              \
    T name(T *address, std::common_type_t<T> value) {                                                               \
        return emulate::exchange<T>(reinterpret_cast<uint64_t>(address), emulate::Order::Relaxed,                   \
                                    emulate::Scope::Gpu, [=](T old) { return T(expression); });                     \
    }
EMULATE_ATOMIC(atomicAdd, old + value)
EMULATE_ATOMIC(atomicSub, old - value)
EMULATE_ATOMIC(atomicMax, old < value ? value : old)
EMULATE_ATOMIC(atomicMin, value < old ? value : old)
EMULATE_ATOMIC(atomicOr, old | value)
EMULATE_ATOMIC(atomicAnd, old &value)
EMULATE_ATOMIC(atomicXor, old ^ value)
EMULATE_ATOMIC(atomicExch, value)
template <class T>
T atomicCAS(T *address, std::common_type_t<T> expected, std::common_type_t<T> value) {
    return emulate::exchange<T>(reinterpret_cast<uint64_t>(address), emulate::Order::Relaxed, emulate::Scope::Gpu,
                                [=](T old) { return old == expected ? value : old; });
}
