// Written from crates/kernels/src by `cargo run -p crossrail-kernels --example layout`. Do not edit.
#pragma once

#include "layout/types.cuh"

// Threads of a block of the copying kernels: 8 warps.
constexpr u32 COPY_THREADS = 256;

// Bytes that a warp of `crossrail_copy` copies at a time.
constexpr u64 COPY_PART = 16384;

// Bytes of one stage of `crossrail_copy_bulk`, in shared memory.
constexpr u32 BULK_STAGE = 16384;

// Stages of a block of `crossrail_copy_bulk`.
constexpr u32 BULK_STAGES = 12;

// Outcome of a wait: the flag has reached the value.
constexpr u64 FLAG_REACHED = 1;

// Outcome of a wait: timeout.
constexpr u64 FLAG_TIMED_OUT = 2;

// An entry of a list to unpack: one copy, of any alignment.
struct Piece {
    // Source address: device memory, or host memory mapped for the GPU.
    u64 src;
    // Destination address.
    u64 dst;
    // Length in bytes.
    u64 len;
};

static_assert(sizeof(Piece) == 24, "Piece");

// Arguments of `crossrail_unpack`.
struct UnpackArgs {
    // Address of the list, 8-byte aligned, in device memory or mapped host memory.
    u64 pieces;
    // Number of its entries.
    u64 count;
};

static_assert(sizeof(UnpackArgs) == 16, "UnpackArgs");

// Arguments of `crossrail_copy` and `crossrail_copy_bulk`.
struct CopyArgs {
    // Destination address.
    u64 dst;
    // Source address.
    u64 src;
    // Length in bytes.
    u64 len;
};

static_assert(sizeof(CopyArgs) == 24, "CopyArgs");

// Arguments of `crossrail_put`.
struct PutArgs {
    // Destination address: memory of any GPU with peer access, or mapped host memory.
    u64 dst;
    // Source address.
    u64 src;
    // Length in bytes; 0 for the signal alone.
    u64 len;
    // Bytes that a warp copies at a time, a multiple of 16; 0 for a default that depends on the length.
    u64 part;
    // Address of the signal, 8-byte aligned; 0 for none.
    u64 signal;
    // Value of the signal once all bytes have arrived.
    u64 value;
    // Address of a 64-bit counter in this GPU's memory with which several blocks find the last one: 0 before and
    // after the launch, and used by no other launch while this one runs. 0 for none.
    u64 counter;
};

static_assert(sizeof(PutArgs) == 56, "PutArgs");

// Arguments of `crossrail_flag_write`.
struct FlagWriteArgs {
    // Address of the flag, 8-byte aligned.
    u64 flag;
    // Its new value.
    u64 value;
};

static_assert(sizeof(FlagWriteArgs) == 16, "FlagWriteArgs");

// Arguments of `crossrail_flag_await`.
struct FlagAwaitArgs {
    // Address of the flag, 8-byte aligned.
    u64 flag;
    // The value that it must reach.
    u64 value;
    // Timeout in nanoseconds.
    u64 limit_ns;
    // Address of a 64-bit word that becomes FLAG_REACHED or FLAG_TIMED_OUT.
    u64 outcome;
};

static_assert(sizeof(FlagAwaitArgs) == 32, "FlagAwaitArgs");
