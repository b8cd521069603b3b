// Flags: 64-bit numbers that only grow, written by one side and awaited by the other, across GPUs and the host.
#include "layout/args.cuh"
#include "ptx/memory.cuh"

// Questions to the flag between two looks at the clock.
constexpr u32 LOOKS = 16;
// Rounds of so many before the wait counts as long, and pauses.
constexpr u32 EAGER_ROUNDS = 64;

// Whatever was put into the stream before is visible to whoever sees the value.
extern "C" __global__ void __launch_bounds__(32) crossrail_flag_write(const __grid_constant__ FlagWriteArgs args) {
    if (threadIdx.x == 0) st_release_sys_u64(args.flag, args.value);
}

// Ends when the flag has reached the value, or the time is over; says which at `outcome`.
extern "C" __global__ void __launch_bounds__(32) crossrail_flag_await(const __grid_constant__ FlagAwaitArgs args) {
    if (threadIdx.x != 0) return;
    u64 started = clock_ns();
    u64 outcome = FLAG_TIMED_OUT;
    for (u32 round = 0; outcome == FLAG_TIMED_OUT; ++round) {
        for (u32 look = 0; look < LOOKS && outcome == FLAG_TIMED_OUT; ++look) {
            if (ld_acquire_sys_u64(args.flag) >= args.value) outcome = FLAG_REACHED;
        }
        if (clock_ns() - started >= args.limit_ns) break;
        if (round >= EAGER_ROUNDS) pause_ns(64);
    }
    st_release_sys_u64(args.outcome, outcome);
}
