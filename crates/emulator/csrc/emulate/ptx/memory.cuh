// csrc/ptx/memory.cuh on the host.
#pragma once

#include "layout/types.cuh"

struct alignas(16) Vec16 {
    u32 word[4];
};

__device__ __forceinline__ Vec16 ld_once_v16(u64 address) {
    return *reinterpret_cast<const Vec16 *>(address);
}

__device__ __forceinline__ void await_earlier_grids() {}

__device__ __forceinline__ u64 ld_once_u64(u64 address) {
    return *reinterpret_cast<const u64 *>(address);
}

__device__ __forceinline__ void st_v16(u64 address, Vec16 v) {
    *reinterpret_cast<Vec16 *>(address) = v;
}

__device__ __forceinline__ u64 ld_acquire_sys_u64(u64 address) {
    return emulate::load<u64>(address, emulate::Order::Acquire, emulate::Scope::System);
}

__device__ __forceinline__ void st_release_sys_u64(u64 address, u64 value) {
    emulate::store<u64>(address, value, emulate::Order::Release, emulate::Scope::System);
}

__device__ __forceinline__ void fence_acq_rel_sys() {
    emulate::fence(emulate::Order::Both, emulate::Scope::System);
}

__device__ __forceinline__ u64 atom_add_acq_rel_gpu_u64(u64 address, u64 value) {
    return emulate::exchange<u64>(address, emulate::Order::Both, emulate::Scope::Gpu, [=](u64 old) { return old + value; });
}

__device__ __forceinline__ void st_relaxed_gpu_u64(u64 address, u64 value) {
    emulate::store<u64>(address, value, emulate::Order::Relaxed, emulate::Scope::Gpu);
}

__device__ __forceinline__ u64 ld_acquire_gpu_u64(u64 address) {
    return emulate::load<u64>(address, emulate::Order::Acquire, emulate::Scope::Gpu);
}

__device__ __forceinline__ void st_release_gpu_u64(u64 address, u64 value) {
    emulate::store<u64>(address, value, emulate::Order::Release, emulate::Scope::Gpu);
}

__device__ __forceinline__ u64 ld_relaxed_gpu_u64(u64 address) {
    return emulate::load<u64>(address, emulate::Order::Relaxed, emulate::Scope::Gpu);
}

// In one order or the other.
__device__ __forceinline__ void st_relaxed_sys_v2_u64(u64 address, u64 first, u64 second) {
    bool ahead = emulate::random_bits() >> 63;
    for (u32 i = 0; i < 2; ++i) {
        bool is_first = ahead == (i == 0);
        emulate::store<u64>(address + (is_first ? 0 : 8), is_first ? first : second, emulate::Order::Relaxed, emulate::Scope::System);
    }
}

__device__ __forceinline__ u32 ld_relaxed_sys_u32(u64 address) {
    return emulate::load<u32>(address, emulate::Order::Relaxed, emulate::Scope::System);
}

__device__ __forceinline__ u64 ld_relaxed_sys_u64(u64 address) {
    return emulate::load<u64>(address, emulate::Order::Relaxed, emulate::Scope::System);
}

__device__ __forceinline__ void st_relaxed_sys_u64(u64 address, u64 value) {
    emulate::store<u64>(address, value, emulate::Order::Relaxed, emulate::Scope::System);
}

__device__ __forceinline__ u64 atom_add_relaxed_gpu_u64(u64 address, u64 value) {
    return emulate::exchange<u64>(address, emulate::Order::Relaxed, emulate::Scope::Gpu, [=](u64 old) { return old + value; });
}

__device__ __forceinline__ u32 atom_add_acq_rel_shared_u32(u32 &word, u32 value) {
    // A question, which changes nothing: time may pass while all do no more than that.
    if (value == 0) return emulate::load<u32>(reinterpret_cast<u64>(&word), emulate::Order::Acquire, emulate::Scope::Block);
    return emulate::exchange<u32>(reinterpret_cast<u64>(&word), emulate::Order::Both, emulate::Scope::Block,
                                  [=](u32 old) { return old + value; });
}

__device__ __forceinline__ u64 atom_or_acq_rel_shared_u64(u64 &word, u64 bits) {
    return emulate::exchange<u64>(reinterpret_cast<u64>(&word), emulate::Order::Both, emulate::Scope::Block,
                                  [=](u64 old) { return old | bits; });
}

__device__ __forceinline__ u64 atom_and_acq_rel_shared_u64(u64 &word, u64 bits) {
    return emulate::exchange<u64>(reinterpret_cast<u64>(&word), emulate::Order::Both, emulate::Scope::Block,
                                  [=](u64 old) { return old & bits; });
}

__device__ __forceinline__ u64 atom_cas_acq_rel_shared_u64(u64 &word, u64 expected, u64 value) {
    return emulate::exchange<u64>(reinterpret_cast<u64>(&word), emulate::Order::Both, emulate::Scope::Block,
                                  [=](u64 old) { return old == expected ? value : old; });
}

__device__ __forceinline__ void prefetch_l2(u64) {}

__device__ __forceinline__ u64 clock_ns() {
    return emulate::clock_ns();
}

__device__ __forceinline__ void pause_ns(u32 ns) {
    emulate::pause(ns);
}
