// Flags: 64-bit numbers that only grow, written by one side and awaited by the other, across GPUs and the host.
#include "layout/args.cuh"
#include "ptx/memory.cuh"

// Polls of the flag between two reads of the clock.
constexpr u32 POLLS_PER_CLOCK = 16;
// Rounds of `POLLS_PER_CLOCK` polls before the wait backs off with pauses.
constexpr u32 EAGER_ROUNDS = 64;

// Release store of the flag: an observer of the value also sees the effects of all earlier work in the stream.
extern "C" __global__ void __launch_bounds__(32) crossrail_flag_write(const __grid_constant__ FlagWriteArgs args) {
    if (threadIdx.x == 0) st_release_sys_u64(args.flag, args.value);
}

// Waits until the flag reaches the value or the timeout expires; writes which to `outcome`.
extern "C" __global__ void __launch_bounds__(32) crossrail_flag_await(const __grid_constant__ FlagAwaitArgs args) {
    if (threadIdx.x != 0) return;
    u64 started = clock_ns();
    u64 outcome = FLAG_TIMED_OUT;
    for (u32 round = 0; outcome == FLAG_TIMED_OUT; ++round) {
        for (u32 poll = 0; poll < POLLS_PER_CLOCK && outcome == FLAG_TIMED_OUT; ++poll) {
            if (ld_acquire_sys_u64(args.flag) >= args.value) outcome = FLAG_REACHED;
        }
        if (clock_ns() - started >= args.limit_ns) break;
        if (round >= EAGER_ROUNDS) pause_ns(64);
    }
    st_release_sys_u64(args.outcome, outcome);
}
