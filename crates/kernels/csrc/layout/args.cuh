// Written from crates/kernels/src by `cargo run -p crossrail-kernels --example layout`. Do not edit.
#pragma once

#include "layout/types.cuh"

// The threads of a block of the kernels that copy: 8 warps.
constexpr u32 COPY_THREADS = 256;

// The bytes that a warp of `crossrail_copy` takes at a time.
constexpr u64 COPY_PART = 16384;

// The bytes of one stage of `crossrail_copy_bulk`, in shared memory.
constexpr u32 BULK_STAGE = 16384;

// How many stages a block of it has.
constexpr u32 BULK_STAGES = 12;

// What a waiting kernel says: the flag has reached the value.
constexpr u64 FLAG_REACHED = 1;

// What a waiting kernel says: the time was over first.
constexpr u64 FLAG_TIMED_OUT = 2;

// One entry of a list to unpack: bytes that go from one place to another. Any alignment.
struct Piece {
    // Where they are: device memory, or host memory that the GPU reaches.
    u64 src;
    // Where they go.
    u64 dst;
    // How many bytes.
    u64 len;
};

static_assert(sizeof(Piece) == 24, "Piece");

// What `crossrail_unpack` takes.
struct UnpackArgs {
    // The address of the list, 8-byte aligned, in device memory or mapped host memory.
    u64 pieces;
    // How many entries it has.
    u64 count;
};

static_assert(sizeof(UnpackArgs) == 16, "UnpackArgs");

// What `crossrail_copy` and `crossrail_copy_bulk` take.
struct CopyArgs {
    // Where the bytes go.
    u64 dst;
    // Where they are.
    u64 src;
    // How many bytes.
    u64 len;
};

static_assert(sizeof(CopyArgs) == 24, "CopyArgs");

// What `crossrail_put` takes.
struct PutArgs {
    // Where the bytes go: memory of any GPU that is reached, or host memory.
    u64 dst;
    // Where they are.
    u64 src;
    // How many bytes; 0 for the signal alone.
    u64 len;
    // The bytes that a warp takes at a time, a multiple of 16; 0 for what suits the length.
    u64 part;
    // The address of the signal, 8-byte aligned; 0 for none.
    u64 signal;
    // What the signal becomes once all bytes are there.
    u64 value;
    // The address of a 64-bit number in this GPU's memory that is 0 and becomes 0 again, by which several blocks
    // count themselves: of this launch alone as long as it runs. 0 for none.
    u64 counter;
};

static_assert(sizeof(PutArgs) == 56, "PutArgs");

// What `crossrail_flag_write` takes.
struct FlagWriteArgs {
    // The address of the flag, 8-byte aligned.
    u64 flag;
    // What it becomes.
    u64 value;
};

static_assert(sizeof(FlagWriteArgs) == 16, "FlagWriteArgs");

// What `crossrail_flag_await` takes.
struct FlagAwaitArgs {
    // The address of the flag, 8-byte aligned.
    u64 flag;
    // What it must have reached.
    u64 value;
    // The longest wait, in nanoseconds.
    u64 limit_ns;
    // The address of a 64-bit number that becomes FLAG_REACHED or FLAG_TIMED_OUT.
    u64 outcome;
};

static_assert(sizeof(FlagAwaitArgs) == 32, "FlagAwaitArgs");
