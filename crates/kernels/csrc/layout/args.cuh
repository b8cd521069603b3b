// Written from crates/kernels/src by `cargo run -p crossrail-kernels --example layout`. Do not edit.
#pragma once

#include "layout/types.cuh"

// Threads of a block of the copying kernels: 8 warps.
constexpr u32 COPY_THREADS = 256;

// Threads of a block of `crossrail_rows`: 12 warps, which have 48 KiB of loads in flight.
constexpr u32 ROWS_THREADS = 384;

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

// Rows of a list, equally far apart.
struct RowStride {
    // Address of the first one.
    u64 base;
    // Distance between them in bytes.
    u64 stride;
    // Length of each in bytes.
    u64 len;
    // Rows of the list before these.
    u64 first;
};

static_assert(sizeof(RowStride) == 32, "RowStride");

// A list of rows: strides, and which of their rows. In place `i` is row `i` without indices, else row
// `i / period * step + index[i % period]`.
struct RowsEnd {
    // Address of the strides.
    u64 strides;
    // Number of strides.
    u32 count;
    // Rows of each stride, if all have as many; else 0.
    u32 even;
    // Address of the indices, each a u32; 0 for none.
    u64 index;
    // Number of indices.
    u64 period;
    // What is added each time that the indices begin again.
    u64 step;
};

static_assert(sizeof(RowsEnd) == 40, "RowsEnd");

// Arguments of `crossrail_rows`.
struct RowsArgs {
    // Where rows come from.
    RowsEnd src;
    // Where they go to. Rows in the same place are of the same length.
    RowsEnd dst;
    // The first place to copy.
    u64 first;
    // Number of units: `parts` of each row.
    u64 units;
    // Parts of the longest row, at least 1.
    u64 parts;
    // Bytes of a part: a multiple of 16, and less than 2^31.
    u64 part;
    // Units that a warp takes at a time: 1 to 32.
    u64 batch;
};

static_assert(sizeof(RowsArgs) == 120, "RowsArgs");

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
    // Address of the signal, 8-byte aligned, which one block sets; 0 for none.
    u64 signal;
    // Value of the signal once all bytes have arrived.
    u64 value;
};

static_assert(sizeof(PutArgs) == 48, "PutArgs");

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
