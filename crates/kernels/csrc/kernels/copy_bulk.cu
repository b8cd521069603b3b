// One copy by bulk copies through a ring of stages in shared memory: one thread of each block starts them, nobody's
// registers carry bytes, and 192 KiB of every multiprocessor are under way. For memory of peers above all.
//
//     chunk     k-4   k-3   k-2   k-1    k    k+1  ...  k+7
//               |---- being stored ----| |---- being loaded ----|
//
// Both ends are aligned alike (the same address modulo 16). Architecture 9.0 and later.
#include "kernels/copy_warp.cuh"
#include "layout/args.cuh"
#include "ptx/bulk.cuh"

// How many chunks are loaded ahead of the one that is stored; the other stages are read by stores.
constexpr u32 AHEAD = 8;
static_assert(AHEAD < BULK_STAGES, "a stage is loaded again only after its store has read it");

// A place in the ring: goes round it, and the parity changes each time.
struct Place {
    u32 stage = 0;
    u32 parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == BULK_STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// The chunks of this block: every gridDim.x-th of `len` bytes.
struct Chunks {
    u64 len;
    u64 step;

    __device__ __forceinline__ u32 bytes(u64 at) const {
        u64 left = len - at;
        return static_cast<u32>(left < BULK_STAGE ? left : BULK_STAGE);
    }
};

extern "C" __global__ void __launch_bounds__(WARP) crossrail_copy_bulk(const __grid_constant__ CopyArgs args) {
    extern __shared__ __align__(128) u8 ring[];
    __shared__ u64 barriers[BULK_STAGES];
    u64 head = -args.dst & 15;
    if (head > args.len) head = args.len;
    u64 dst = args.dst + head, src = args.src + head;
    Chunks chunks = {(args.len - head) & ~15ull, u64(gridDim.x) * BULK_STAGE};
    if (blockIdx.x == 0) {
        copy_bytes(args.dst, args.src, head, threadIdx.x);
        copy_bytes(dst + chunks.len, src + chunks.len, args.len - head - chunks.len, threadIdx.x);
    }
    if (threadIdx.x != 0) return;

    u32 stages = shared_address(ring), full = shared_address(barriers);
    for (u32 i = 0; i < BULK_STAGES; ++i) mbarrier_init_shared(full + 8 * i, 1);
    fence_mbarrier_init();
    u64 first = u64(blockIdx.x) * BULK_STAGE, next = first;
    Place load, store;
    auto start_load = [&] {
        u32 bytes = chunks.bytes(next);
        mbarrier_arrive_expect_shared(full + 8 * load.stage, bytes);
        bulk_load_shared(stages + BULK_STAGE * load.stage, src + next, bytes, full + 8 * load.stage);
        load.advance();
        next += chunks.step;
    };
    for (u32 i = 0; i < AHEAD && next < chunks.len; ++i) start_load();
    for (u64 at = first; at < chunks.len; at += chunks.step) {
        mbarrier_wait_shared(full + 8 * store.stage, store.parity);
        bulk_store_shared(dst + at, stages + BULK_STAGE * store.stage, chunks.bytes(at));
        store.advance();
        if (next < chunks.len) {
            // The stage was last read by the store of the chunk BULK_STAGES before: BULK_STAGES - AHEAD stores ago.
            bulk_wait_read<BULK_STAGES - AHEAD>();
            start_load();
        }
    }
    bulk_wait_all();
}
