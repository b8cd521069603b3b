// The host of all ranks, as one thread beside their kernels: it takes turns until these have ended and nothing moves any more.
#include "kernels/ep_common.cuh"

struct HostArgs {
    // Launches of kernels that have ended; how many there are.
    u64 ended;
    u64 expected;
    // u32(context): whether anything moved.
    u64 turn;
    u64 context;
};

struct EndArgs {
    u64 ended;
};

extern "C" __global__ void crossrail_test_host(const __grid_constant__ HostArgs args) {
    if (threadIdx.x != 0) return;
    auto turn = reinterpret_cast<u32 (*)(u64)>(args.turn);
    u32 quiet = 0;
    while (quiet < 100) {
        bool over = ld_acquire_sys_u64(args.ended) == args.expected;
        bool moved = turn(args.context) != 0;
        quiet = over && !moved ? quiet + 1 : 0;
        pause_ns(2000);
    }
}

extern "C" __global__ void crossrail_test_end(const __grid_constant__ EndArgs args) {
    if (threadIdx.x == 0) atom_add_acq_rel_gpu_u64(args.ended, 1);
}
