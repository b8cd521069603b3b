// Loads and stores with memory order and scope, which are part of the name.
#pragma once

#include "layout/types.cuh"

struct alignas(16) Vec16 {
    u32 word[4];
};

// Streaming load of 16 bytes that are read once: does not allocate in L1.
__device__ __forceinline__ Vec16 ld_once_v16(u64 address) {
    Vec16 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(address)
                 : "memory");
    return v;
}

// The same of 8 bytes.
__device__ __forceinline__ u64 ld_once_u64(u64 address) {
    u64 value;
    asm volatile("ld.global.L1::no_allocate.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ void st_v16(u64 address, Vec16 v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(address), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
}

// Acquire load, system scope.
__device__ __forceinline__ u64 ld_acquire_sys_u64(u64 address) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

// Release store, system scope.
__device__ __forceinline__ void st_release_sys_u64(u64 address, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(address), "l"(value) : "memory");
}

// Acquire-release fence, system scope.
__device__ __forceinline__ void fence_acq_rel_sys() {
    asm volatile("fence.acq_rel.sys;" : : : "memory");
}

// Atomic add, acquire-release, GPU scope. Returns the old value.
__device__ __forceinline__ u64 atom_add_acq_rel_gpu_u64(u64 address, u64 value) {
    u64 before;
    asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], %2;" : "=l"(before) : "l"(address), "l"(value) : "memory");
    return before;
}

__device__ __forceinline__ void st_relaxed_gpu_u64(u64 address, u64 value) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" : : "l"(address), "l"(value) : "memory");
}

// Acquire load, GPU scope.
__device__ __forceinline__ u64 ld_acquire_gpu_u64(u64 address) {
    u64 value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

// Release store, GPU scope.
__device__ __forceinline__ void st_release_gpu_u64(u64 address, u64 value) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" : : "l"(address), "l"(value) : "memory");
}

// Relaxed load, GPU scope.
__device__ __forceinline__ u64 ld_relaxed_gpu_u64(u64 address) {
    u64 value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ u32 ld_relaxed_sys_u32(u64 address) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ u64 ld_relaxed_sys_u64(u64 address) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

// Relaxed 8-byte store, system scope: single-copy atomic.
__device__ __forceinline__ void st_relaxed_sys_u64(u64 address, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" : : "l"(address), "l"(value) : "memory");
}

// The same of two words, 16-byte aligned, in one access; each of them is atomic.
__device__ __forceinline__ void st_relaxed_sys_v2_u64(u64 address, u64 first, u64 second) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" : : "l"(address), "l"(first), "l"(second) : "memory");
}

// Relaxed atomic add, GPU scope. Returns the old value.
__device__ __forceinline__ u64 atom_add_relaxed_gpu_u64(u64 address, u64 value) {
    u64 before;
    asm volatile("atom.add.relaxed.gpu.global.u64 %0, [%1], %2;" : "=l"(before) : "l"(address), "l"(value) : "memory");
    return before;
}

// Atomic add to a word in shared memory, acquire-release, block scope. Returns the old value.
__device__ __forceinline__ u32 atom_add_acq_rel_shared_u32(u32 &word, u32 value) {
    u32 before;
    asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "r"(static_cast<u32>(__cvta_generic_to_shared(&word))), "r"(value)
                 : "memory");
    return before;
}

// The same: atomic OR.
__device__ __forceinline__ u64 atom_or_acq_rel_shared_u64(u64 &word, u64 bits) {
    u64 before;
    asm volatile("atom.acq_rel.cta.shared::cta.or.b64 %0, [%1], %2;"
                 : "=l"(before)
                 : "r"(static_cast<u32>(__cvta_generic_to_shared(&word))), "l"(bits)
                 : "memory");
    return before;
}

// The same: atomic AND.
__device__ __forceinline__ u64 atom_and_acq_rel_shared_u64(u64 &word, u64 bits) {
    u64 before;
    asm volatile("atom.acq_rel.cta.shared::cta.and.b64 %0, [%1], %2;"
                 : "=l"(before)
                 : "r"(static_cast<u32>(__cvta_generic_to_shared(&word))), "l"(bits)
                 : "memory");
    return before;
}

// The same: compare-and-swap of `expected` with `value`.
__device__ __forceinline__ u64 atom_cas_acq_rel_shared_u64(u64 &word, u64 expected, u64 value) {
    u64 before;
    asm volatile("atom.acq_rel.cta.shared::cta.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(before)
                 : "r"(static_cast<u32>(__cvta_generic_to_shared(&word))), "l"(expected), "l"(value)
                 : "memory");
    return before;
}

// Prefetches the line of this address into L2.
__device__ __forceinline__ void prefetch_l2(u64 address) {
    asm volatile("prefetch.global.L2 [%0];" : : "l"(address));
}

// Waits until the preceding kernels in the stream have completed and their writes are visible (programmatic dependent
// launch).
__device__ __forceinline__ void await_earlier_grids() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}

// The GPU-wide clock in nanoseconds. Its resolution is about a microsecond.
__device__ __forceinline__ u64 clock_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Suspends this thread for about `ns` nanoseconds.
__device__ __forceinline__ void pause_ns(u32 ns) {
    asm volatile("nanosleep.u32 %0;" : : "r"(ns));
}
