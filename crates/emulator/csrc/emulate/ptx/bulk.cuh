// csrc/ptx/bulk.cuh on the host.
#pragma once

#include "layout/types.cuh"

__device__ __forceinline__ u32 shared_address(const void *place) {
    return static_cast<u32>(__cvta_generic_to_shared(place));
}

__device__ __forceinline__ void mbarrier_init_shared(u32 barrier, u32 arrivals) {
    emulate::mbarrier_init(barrier, arrivals);
}

__device__ __forceinline__ void fence_mbarrier_init() {
    emulate::fence_async();
}

__device__ __forceinline__ void mbarrier_arrive_expect_shared(u32 barrier, u32 bytes) {
    emulate::mbarrier_arrive(barrier, 1, bytes);
}

__device__ __forceinline__ void mbarrier_arrive_shared(u32 barrier) {
    emulate::mbarrier_arrive(barrier, 1, 0);
}

__device__ __forceinline__ bool mbarrier_test_shared(u32 barrier, u32 parity) {
    return emulate::mbarrier_test(barrier, parity);
}

__device__ __forceinline__ void mbarrier_wait_shared(u32 barrier, u32 parity) {
    while (!emulate::mbarrier_test(barrier, parity)) {
    }
}

__device__ __forceinline__ void bulk_load_shared(u32 dst, u64 src, u32 bytes, u32 barrier) {
    emulate::bulk_load(dst, src, bytes, barrier);
}

__device__ __forceinline__ void fence_proxy_async_shared() {
    emulate::fence_async();
}

__device__ __forceinline__ void bulk_store_open(u64 dst, u32 src, u32 bytes) {
    emulate::bulk_store(dst, src, bytes);
}

__device__ __forceinline__ void bulk_commit() {
    emulate::bulk_commit();
}

__device__ __forceinline__ void bulk_store_shared(u64 dst, u32 src, u32 bytes) {
    bulk_store_open(dst, src, bytes);
    bulk_commit();
}

template <u32 PENDING>
__device__ __forceinline__ void bulk_wait_read() {
    emulate::bulk_wait(PENDING, true);
}

template <u32 PENDING>
__device__ __forceinline__ void bulk_wait_done() {
    emulate::bulk_wait(PENDING, false);
}

__device__ __forceinline__ void bulk_wait_all() {
    emulate::bulk_wait(0, false);
}
