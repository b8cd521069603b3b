// Moves rows: the row in place `i` of one list goes to the row in place `i` of another. Lists are strides, of which u32
// indices may select rows, so that the host writes nothing per row but its index.
//
// A warp takes `batch` units at a time, a unit being a row or a part of a long one. Each lane looks up one of them. Those
// whose ends and length are multiples of 16 bytes are then copied as one sequence of 16-byte vectors, so that short rows
// keep as many loads in flight as long ones; the others follow one by one.
#include "kernels/copy_warp.cuh"
#include "layout/args.cuh"

// A unit to copy. `end`: vectors of this one and those before it in the batch. Addresses are those that vector 0 of the
// batch would have.
struct RowUnit {
    u64 src;
    u64 dst;
    u32 end;
};

// The stride that has row `row`: the last whose `first` is at most that.
__device__ __forceinline__ const RowStride *stride_of(const RowsEnd &end, u64 row) {
    const RowStride *strides = reinterpret_cast<const RowStride *>(end.strides);
    if (end.even) return strides + row / end.even;
    u32 low = 0, high = end.count;
    while (high - low > 1) {
        u32 middle = low + (high - low) / 2;
        if (strides[middle].first <= row) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return strides + low;
}

// Address and length of the row in place `place`.
__device__ __forceinline__ void find_row(const RowsEnd &end, u64 place, u64 &address, u64 &len) {
    u64 row = place;
    if (end.index) {
        u64 turn = place / end.period;
        row = turn * end.step + reinterpret_cast<const u32 *>(end.index)[place - turn * end.period];
    }
    const RowStride *stride = stride_of(end, row);
    address = stride->base + (row - stride->first) * stride->stride;
    len = stride->len;
}

// Unit `unit` of the launch: nothing where a row has fewer parts than others.
__device__ __forceinline__ void find_unit(const RowsArgs &args, u64 unit, u64 &dst, u64 &src, u64 &len) {
    u64 row = unit / args.parts;
    u64 skip = (unit - row * args.parts) * args.part;
    u64 to;
    find_row(args.src, args.first + row, src, len);
    find_row(args.dst, args.first + row, dst, to);
    if (to < len) len = to;
    src += skip;
    dst += skip;
    len = len <= skip ? 0 : len - skip;
    if (len > args.part) len = args.part;
}

__device__ __forceinline__ u32 sum_of_lanes_up_to(u32 value, u32 lane) {
#pragma unroll
    for (u32 by = 1; by < WARP; by *= 2) {
        u32 before = __shfl_up_sync(ALL_LANES, value, by);
        if (lane >= by) value += before;
    }
    return value;
}

// `total` vectors of the batch's units. Eight loads of a lane are in flight at once.
__device__ __forceinline__ void copy_vectors(const RowUnit *units, u32 total, u32 lane) {
    constexpr u32 DEPTH = 8;
    u32 at = 0;
    RowUnit unit = units[0];
    for (u32 start = lane; start < total; start += WARP * DEPTH) {
        Vec16 v[DEPTH];
        u64 dst[DEPTH];
#pragma unroll
        for (u32 k = 0; k < DEPTH; ++k) {
            u32 vector = start + k * WARP;
            if (vector < total) {
                while (vector >= unit.end) unit = units[++at];
                dst[k] = unit.dst + 16 * static_cast<u64>(vector);
                v[k] = ld_once_v16(unit.src + 16 * static_cast<u64>(vector));
            }
        }
#pragma unroll
        for (u32 k = 0; k < DEPTH; ++k) {
            if (start + k * WARP < total) st_v16(dst[k], v[k]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(ROWS_THREADS) crossrail_rows(const __grid_constant__ RowsArgs args) {
    __shared__ RowUnit batches[ROWS_THREADS];
    u32 lane = threadIdx.x % WARP;
    RowUnit *units = batches + (threadIdx.x - lane);
    u64 warp = (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x) / WARP;
    u64 warps = static_cast<u64>(gridDim.x) * blockDim.x / WARP;
    for (u64 first = warp * args.batch; first < args.units; first += warps * args.batch) {
        u64 src = 0, dst = 0, len = 0;
        if (lane < args.batch && first + lane < args.units) find_unit(args, first + lane, dst, src, len);
        bool even = ((src | dst | len) & 15) == 0;
        u32 vectors = even ? static_cast<u32>(len / 16) : 0;
        u32 end = sum_of_lanes_up_to(vectors, lane);
        u64 before = 16 * static_cast<u64>(end - vectors);
        // The last batch's units have been read.
        __syncwarp();
        units[lane] = RowUnit{src - before, dst - before, end};
        __syncwarp();
        copy_vectors(units, __shfl_sync(ALL_LANES, end, WARP - 1), lane);
        u32 others = __ballot_sync(ALL_LANES, !even);
        while (others) {
            u32 at = __ffs(others) - 1;
            others &= others - 1;
            u64 to = __shfl_sync(ALL_LANES, dst, at), from = __shfl_sync(ALL_LANES, src, at);
            copy_warp(to, from, __shfl_sync(ALL_LANES, len, at), lane);
        }
    }
}
