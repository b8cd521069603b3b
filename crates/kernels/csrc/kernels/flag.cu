// Flags: 64-bit numbers that only grow, written by one side and awaited by the other, across GPUs and the host.
#include "layout/args.cuh"
#include "ptx/memory.cuh"

// Whatever was put into the stream before is visible to whoever sees the value.
extern "C" __global__ void __launch_bounds__(32) crossrail_flag_write(const __grid_constant__ FlagWriteArgs args) {
    if (threadIdx.x == 0) st_release_sys_u64(args.flag, args.value);
}

// Ends when the flag has reached the value, or the time is over; says which at `outcome`.
extern "C" __global__ void __launch_bounds__(32) crossrail_flag_await(const __grid_constant__ FlagAwaitArgs args) {
    if (threadIdx.x != 0) return;
    u64 started = clock_ns();
    u64 outcome = FLAG_TIMED_OUT;
    while (true) {
        if (ld_acquire_sys_u64(args.flag) >= args.value) {
            outcome = FLAG_REACHED;
            break;
        }
        if (clock_ns() - started >= args.limit_ns) break;
        pause_ns(64);
    }
    st_release_sys_u64(args.outcome, outcome);
}
