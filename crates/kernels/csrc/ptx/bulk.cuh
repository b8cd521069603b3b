// Asynchronous bulk copies between global and shared memory (architecture 9.0 and later). Completion of loads is
// signalled through an mbarrier, of stores through bulk groups. Global addresses and sizes are multiples of 16;
// shared-memory addresses are 32-bit, in the shared state space.
#pragma once

#include "layout/types.cuh"

__device__ __forceinline__ u32 shared_address(const void *place) {
    return static_cast<u32>(__cvta_generic_to_shared(place));
}

__device__ __forceinline__ void mbarrier_init_shared(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(barrier), "r"(arrivals) : "memory");
}

// Makes this thread's mbarrier initializations visible to bulk copies that it starts later.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

// Proxy fence: makes this thread's writes to shared memory visible to bulk copies started later.
__device__ __forceinline__ void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

// Arrives at the barrier and adds `bytes` to the phase's expected transaction count.
__device__ __forceinline__ void mbarrier_arrive_expect_shared(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(barrier), "r"(bytes) : "memory");
}

// Arrives at the barrier with release order: earlier writes are visible to waiters of this phase.
__device__ __forceinline__ void mbarrier_arrive_shared(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(barrier) : "memory");
}

// Whether the phase of this parity is complete.
__device__ __forceinline__ bool mbarrier_test_shared(u32 barrier, u32 parity) {
    u32 done;
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done != 0;
}

// Waits until the phase of this parity is complete; the data of its loads is then visible.
__device__ __forceinline__ void mbarrier_wait_shared(u32 barrier, u32 parity) {
    u32 done = 0;
    while (!done) {
        asm volatile("{\n"
                     ".reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n"
                     "}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    }
}

__device__ __forceinline__ void bulk_load_shared(u32 dst, u64 src, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :
                 : "r"(dst), "l"(src), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Starts a store, in the group that `bulk_commit` ends.
__device__ __forceinline__ void bulk_store_open(u64 dst, u32 src, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :
                 : "l"(dst), "r"(src), "r"(bytes)
                 : "memory");
}

// Commits the stores started since the last commit as one group, which may be empty.
__device__ __forceinline__ void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" : : : "memory");
}

// Starts a store; one group of its own.
__device__ __forceinline__ void bulk_store_shared(u64 dst, u32 src, u32 bytes) {
    bulk_store_open(dst, src, bytes);
    bulk_commit();
}

// Waits until all but the last `PENDING` groups of this thread have read their source.
template <u32 PENDING>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(PENDING) : "memory");
}

// Waits until all but the last `PENDING` groups of this thread are complete at their destination.
template <u32 PENDING>
__device__ __forceinline__ void bulk_wait_done() {
    asm volatile("cp.async.bulk.wait_group %0;" : : "n"(PENDING) : "memory");
}

// Waits until all stores of this thread are complete at their destination.
__device__ __forceinline__ void bulk_wait_all() {
    asm volatile("cp.async.bulk.wait_group 0;" : : : "memory");
}
