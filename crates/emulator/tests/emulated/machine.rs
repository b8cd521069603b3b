//! The machine that runs emulated kernels: each of these small kernels is wrong in one way, which it must name; and right
//! with what is missing.

use crossrail_cuda::Grid;
use crossrail_kernels::FlagWriteArgs;

use crossrail_emulator::{Build, GpuMemory as _, Gpus as _};

const SEEDS: u64 = 20;
const UNORDERED: &str = "unordered accesses";

/// What the machine says of a kernel in two launches, on two GPUs, of two warps each, with 64 bytes of memory that both
/// see, from `address` on, and are u64 `at`. `first`: whether this is the first launch; `lane`: of the warp; `shared`:
/// 1024 bytes of shared memory. `None` where there is no compiler.
fn said(body: &str, seeds: u64) -> Option<Result<(), String>> {
    let text = format!(
        r#"
#include "layout/args.cuh"
#include "ptx/bulk.cuh"
#include "ptx/memory.cuh"

extern "C" __global__ void crossrail_test(const __grid_constant__ FlagWriteArgs args) {{
    extern __shared__ __align__(128) u8 shared[];
    u64 address = args.flag;
    volatile u64 *at = reinterpret_cast<u64 *>(address);
    bool first = args.value == 1;
    u32 lane = threadIdx.x % 32;
    {body}
}}
"#
    );
    let mut emulator = Build::new(&["kernels/test.cu"]).with("kernels/test.cu", &text).emulator()?;
    for seed in 0..seeds {
        let memory = emulator.zeroed("memory", 64);
        for value in [1, 2] {
            let grid = Grid { blocks: 1, threads: 64, shared: 1024 };
            emulator.launch("crossrail_test", &FlagWriteArgs { flag: memory.address(), value }, grid);
        }
        if let Err(error) = emulator.run(seed) {
            return Some(Err(error));
        }
    }
    Some(Ok(()))
}

/// `body` with `right` in place of MISSING runs; with `wrong`, the error has these words.
fn check(body: &str, right: &str, wrong: &str, words: &str) {
    let Some(good) = said(&body.replace("MISSING", right), SEEDS) else { return };
    assert_eq!(good, Ok(()), "with {right:?}");
    let Some(bad) = said(&body.replace("MISSING", wrong), SEEDS) else { return };
    let error = bad.expect_err("it is wrong, and nobody says so");
    assert!(error.contains(words), "{error}");
}

#[test]
fn what_one_lane_has_seen_others_have_not() {
    let body = r"
        if (threadIdx.x >= 32) return;
        if (first) {
            if (lane != 0) return;
            at[1] = 7;
            st_release_sys_u64(address, 1);
            return;
        }
        if (lane == 0) {
            while (ld_acquire_sys_u64(address) == 0) {}
        }
        MISSING
        if (at[1] != 7) at[2] = 1;";
    check(body, "__syncwarp();", "__shfl_sync(0xffffffff, lane, 0);", UNORDERED);
}

#[test]
fn what_is_released_on_one_gpu_is_not_known_on_another() {
    let body = r"
        if (threadIdx.x != 0) return;
        if (first) {
            at[1] = 7;
            MISSING
        } else {
            while (ld_acquire_sys_u64(address) == 0) {}
            if (at[1] != 7) at[2] = 1;
        }";
    check(body, "st_release_sys_u64(address, 1);", "st_release_gpu_u64(address, 1);", UNORDERED);
}

#[test]
fn relaxed_accesses_order_nothing_without_fences() {
    let body = r"
        if (!first) return;
        if (threadIdx.x == 0) {
            at[1] = 7;
            MISSING
            st_relaxed_gpu_u64(address, 1);
        } else if (threadIdx.x == 40) {
            while (ld_relaxed_gpu_u64(address) == 0) {}
            __threadfence();
            if (at[1] != 7) at[2] = 1;
        }";
    check(body, "__threadfence();", "", UNORDERED);
}

#[test]
fn atomics_one_after_the_other_hand_on_what_was_released() {
    let body = r"
        if (!first || lane != 0) return;
        at[1 + threadIdx.x / 32] = 7;
        if (MISSING == 0) return;
        if (at[1] != 7 || at[2] != 7) at[3] = 1;";
    check(body, "atom_add_acq_rel_gpu_u64(address, 1)", "atomicAdd(reinterpret_cast<u64 *>(address), 1)", UNORDERED);
}

#[test]
fn threads_of_a_block_meet_at_its_barrier() {
    let body = r"
        u64 *word = reinterpret_cast<u64 *>(shared);
        if (threadIdx.x == 40) *word = 5;
        MISSING
        if (threadIdx.x == 3 && *word != 5 && first) at[3] = 1;";
    check(body, "__syncthreads();", "__syncwarp();", UNORDERED);
}

#[test]
fn bulk_copies_do_not_see_what_was_not_fenced() {
    let body = r"
        if (!first || threadIdx.x >= 32) return;
        if (lane < 2) reinterpret_cast<u64 *>(shared)[lane] = 5 + lane;
        MISSING
        __syncwarp();
        if (lane != 0) return;
        bulk_store_shared(address, shared_address(shared), 16);
        bulk_wait_all();";
    check(body, "fence_proxy_async_shared();", "", "without fence.proxy.async");
}

#[test]
fn a_bulk_store_that_has_read_is_not_there_yet() {
    let body = r"
        if (threadIdx.x != 0) return;
        if (first) {
            for (u32 i = 0; i < 16; ++i) shared[i] = 1;
            fence_proxy_async_shared();
            bulk_store_shared(address + 16, shared_address(shared), 16);
            MISSING
            st_release_sys_u64(address, 1);
            bulk_wait_all();
        } else {
            while (ld_acquire_sys_u64(address) == 0) {}
            if (at[2] != 0x0101010101010101) at[5] = 1;
        }";
    check(body, "bulk_wait_all();", "bulk_wait_read<0>();", UNORDERED);
}

#[test]
fn lanes_that_do_something_else_are_named() {
    check("if (threadIdx.x == 7) MISSING; __syncwarp();", "__nanosleep(9)", "__ballot_sync(~0u, 1)", "__syncwarp");
    check("if (threadIdx.x == 7) MISSING; __syncwarp();", "__nanosleep(9)", "return", " end");
    let body = "if (threadIdx.x < 32) MISSING; else __syncthreads_or(1);";
    check(body, "__syncthreads_or(0)", "__syncthreads_count(0)", "with another vote");
}

#[test]
fn who_waits_for_whom_is_told() {
    let body = r"
        if (!first) return;
        if (threadIdx.x < 32) __syncthreads();
        else while (ld_acquire_sys_u64(address) == 0) {}";
    let Some(result) = said(body, 1) else { return };
    let error = result.unwrap_err();
    assert!(error.contains("no progress"), "{error}");
    assert!(error.contains("32 threads from 0 on: a barrier of its block"), "{error}");
    let looks = "32 threads from 32 on: a load at memory + 0 (of 64) (test.cu:15";
    assert!(error.contains(looks), "{error}");
}
