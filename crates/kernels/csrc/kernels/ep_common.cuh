// Shared by all expert-parallel kernels: addresses in heaps, waits for other ranks, the end of a launch.
//
// A wait for another rank ends when the word has reached the epoch, when the rank is masked, or at the timeout, which
// masks the rank and reports a fault to the host. Waits for other blocks of the same launch need no timeout: all blocks
// are resident, and every wait of those blocks ends.
#pragma once

#include "kernels/ep_ranks.cuh"
#include "layout/ep.cuh"
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
#if EP_BULK
#include "ptx/bulk.cuh"
#endif

constexpr u32 LANES = 32;
constexpr u32 WHOLE_WARP = 0xffffffff;
constexpr u32 WARPS = EP_THREADS / LANES;
constexpr u32 LOCAL = EP_E / EP_R;
// Ranks of each lane.
constexpr u32 EACH = (EP_R + LANES - 1) / LANES;
// The most experts of one rank that a token selects.
constexpr u32 MOST_LOCAL = EP_K < LOCAL ? EP_K : LOCAL;
// Whether these are the kernels of the rank layout for few tokens (ep_slots.cuh), and the words of a plan for each token: a
// row for each selection, or one.
constexpr bool SLOTS = EP_SLOTS;
constexpr u32 ROUTED = SLOTS ? 1 : EP_K;
constexpr u32 PIECES = (EP_H + EP_PIECE - 1) / EP_PIECE;
// Ranks of a node if rows go once to each node (ep_node.cuh), which are adjacent; 0: rows go once to each rank.
#ifndef EP_NODE
#define EP_NODE 0
#endif
constexpr u32 NODE = EP_NODE;
constexpr u32 NODE_RANKS = NODE ? NODE : EP_R;
constexpr u32 NODES = EP_R / NODE_RANKS;
// Ranks of this rank's number on other nodes.
constexpr u32 COLUMN = NODES - 1;
// Set in the flag of a returned row: it lacks ranks of its node.
constexpr u64 LESS = 1ull << 63;
// Polls of a word between two reads of the clock, which is slower to read.
constexpr u32 EP_POLLS_PER_CLOCK = 16;
static_assert(EP_R <= 1024 && EP_K <= LANES && EP_PIECE % 1024 == 0, "limits that the host checks");

// Begins a launch: nothing is read or written before.
__device__ __forceinline__ void begin_launch() {
#if EP_EARLY
    await_earlier_grids();
#endif
}

template <typename T>
__device__ __forceinline__ T &at(u64 address, u64 index = 0) {
    return reinterpret_cast<T *>(address)[index];
}

// Which half of a double-buffered part an operation uses.
__device__ __forceinline__ u64 parity_of(u64 epoch) { return epoch % EP_DEPTH; }

// The inbox of `source` in the heap at `base`, which has one for each rank.
__device__ __forceinline__ u64 inbox_in(const EpCommon &c, u64 base, u32 source) {
    return base + c.heap.inboxes + source * c.heap.inbox_stride;
}

// A word of an inbox's line.
__device__ __forceinline__ u64 word_in(const EpCommon &c, u64 inbox, u32 word) { return inbox + c.heap.words + word * 8; }

// A word of the line that `source` writes in the heap at `base`.
__device__ __forceinline__ u64 word_at(const EpCommon &c, u64 base, u32 source, u32 word) {
    return word_in(c, inbox_in(c, base, source), word);
}

__device__ __forceinline__ EpState &state_of(const EpCommon &c) { return at<EpState>(c.base + c.heap.state); }

__device__ __forceinline__ u64 address_of(const u64 &word) { return reinterpret_cast<u64>(&word); }

__device__ __forceinline__ bool is_masked(const EpCommon &c, u32 rank) {
    return ld_relaxed_sys_u32(c.base + c.heap.masks + 4 * rank) != 0;
}

// Notes the time in `marks` of the launch (0: nowhere). Compiled in for measurements only.
__device__ __forceinline__ void mark([[maybe_unused]] u64 marks, [[maybe_unused]] u32 what) {
#if EP_MARKED
    if (marks != 0) at<u64>(marks, u64(blockIdx.x) * EP_MARKS + what) = clock_ns();
#endif
}

// The same, of one of the block's threads.
__device__ __forceinline__ void mark_of(u32 thread, u64 marks, u32 what) {
    if (threadIdx.x == thread) mark(marks, what);
}

// Appends to the fault ring. The sequence number is stored last, with release order, so that a host that reads it also
// sees the entry.
__device__ __noinline__ void report_fault(const EpCommon &c, u32 rank, u32 stage, u64 epoch, u64 seen) {
    u64 number = atomicAdd(&state_of(c).faults, 1ull) + 1;
    EpFault &fault = at<EpFault>(c.faults, (number - 1) % (EP_R > 64 ? 16 * EP_FAULTS : EP_FAULTS));
    fault.epoch = epoch;
    fault.seen = seen;
    fault.rank = rank;
    fault.stage = stage;
    st_release_sys_u64(address_of(fault.number), number);
}

// Masks a rank. Of all threads that time out for it, only the one that set the mask reports the fault.
__device__ __forceinline__ void mask_for(const EpCommon &c, u32 rank, u32 stage, u64 epoch, u64 seen) {
    if (atomicOr(&at<u32>(c.base + c.heap.masks, rank), 1u) == 0) report_fault(c, rank, stage, epoch, seen);
}

// For statistics: this thread has waited for a rank since `started`, successfully or not.
__device__ __forceinline__ void note_wait(const EpCommon &c, u32 rank, u64 started) {
    if (c.waits) atomicMax(&at<u64>(c.base + c.heap.waited, rank), clock_ns() - started);
}

// True for a word in memory of the host, where the polls of many warps compete with the data that they wait for.
__device__ __forceinline__ bool is_pinned(const EpCommon &c, u64 word) { return word - c.base >= c.heap.bytes; }
// Pause between two polls of such a word.
constexpr u32 EP_PINNED_NS = 500;

// A number and the epoch it belongs to, in one word: readers need no fence, since the word itself says whether it is
// current.
//
// The tag is the low half of the epoch, which wraps. It is never 0: words that nobody has written are 0, as is what stands
// for the word of a masked rank.
__device__ __forceinline__ u32 tag_of(u64 epoch) {
    u32 low = static_cast<u32>(epoch);
    return low != 0 ? low : 0x80000000u;
}

__device__ __forceinline__ u64 tagged(u64 epoch, u32 number) { return u64(tag_of(epoch)) << 32 | number; }

__device__ __forceinline__ bool is_tagged(u64 word, u64 epoch) { return static_cast<u32>(word >> 32) == tag_of(epoch); }

// True for a rank on another node, if rows go once to that node.
__device__ __forceinline__ bool is_elsewhere(const EpCommon &c, u32 rank) {
    return NODE && rank / NODE_RANKS != c.rank / NODE_RANKS;
}

// The rank of `rank`'s node that receives what this rank sends there; `rank` itself on this node.
__device__ __forceinline__ u32 gateway_to(const EpCommon &c, u32 rank) {
    return is_elsewhere(c, rank) ? rank / NODE_RANKS * NODE_RANKS + c.rank % NODE_RANKS : rank;
}

// The rank of this node that forwards what `rank` sends; `rank` itself on this node.
__device__ __forceinline__ u32 gateway_from(const EpCommon &c, u32 rank) {
    return is_elsewhere(c, rank) ? c.rank / NODE_RANKS * NODE_RANKS + rank % NODE_RANKS : rank;
}

#if EP_NODE
// True for a word that a gateway of this node has forwarded for `rank`.
__device__ __forceinline__ bool is_forwarded(const EpCommon &c, u64 word, u32 rank) {
    return is_elsewhere(c, rank) && !is_pinned(c, word);
}

// The control word with which a gateway announces that it has lost a source in the operation of that stage.
__device__ __forceinline__ u32 lost_word(u32 stage) {
    return EP_WORD_LOST + (stage == EP_STAGE_WEIGHTS || stage == EP_STAGE_BACK_ROW);
}

// True for the flag of a sum in the node area if the rank of this node that was to write it has declined to.
__device__ __forceinline__ bool has_declined(const EpCommon &c, u64 flag, u32 rank, u64 epoch) {
    u64 slots = u64(NODE_RANKS) * EP_DEPTH * COLUMN, area = c.base + c.heap.inboxes + EP_R * c.heap.inbox_stride;
    u64 first = area + slots * c.heap.back_slot, slot = (flag - first) / c.heap.back_flags_slot;
    if (flag < first || slot >= slots) return false;
    u64 seen = ld_relaxed_sys_u64(word_at(c, c.base, rank, EP_WORD_DECLINED + parity_of(epoch)));
    return is_tagged(seen, epoch) && (seen >> slot % COLUMN & 1);
}

// True if a wait for a word of `rank` ends without it. A source that a gateway has lost is masked here, too.
__device__ __forceinline__ bool is_out(const EpCommon &c, u64 word, u32 rank, u32 stage, u64 epoch) {
    if (is_masked(c, rank)) return true;
    if (stage == EP_STAGE_BACK_ROW && !is_elsewhere(c, rank)) return has_declined(c, word, rank, epoch);
    if (!is_forwarded(c, word, rank)) return false;
    if (is_masked(c, gateway_from(c, rank))) return true;
    u64 lost = ld_relaxed_sys_u64(word_at(c, c.base, rank, lost_word(stage)));
    if (lost != epoch) return false;
    mask_for(c, rank, stage, epoch, lost);
    return true;
}

// The limit of a wait: longer for what passes another rank, which is to time out first and to report what it waits for.
__device__ __forceinline__ u64 limit_of(const EpCommon &c, u64 word, u32 rank, u32 stage) {
    bool passes = is_forwarded(c, word, rank) || (is_elsewhere(c, rank) && stage == EP_STAGE_BACK_ROW);
    return passes ? c.limit_ns + c.limit_ns / 4 : c.limit_ns;
}

// The rank that is masked at a timeout: the writer of the word.
__device__ __forceinline__ u32 writer_of(const EpCommon &c, u64 word, u32 rank) {
    u32 gateway = gateway_from(c, rank);
    return is_forwarded(c, word, rank) && gateway != c.rank ? gateway : rank;
}
#endif

// True for a word that has reached a value.
__device__ __forceinline__ bool has_reached(u64 seen, u64 value) { return (NODE ? seen & ~LESS : seen) >= value; }

// The slow part of `await`.
__device__ __noinline__ bool await_long(const EpCommon &c, u64 word, u64 value, u32 rank, u32 stage, u64 epoch) {
    u64 started = clock_ns();
    bool pinned = is_pinned(c, word);
    while (true) {
        u64 seen = 0;
#pragma unroll 1
        for (u32 poll = 0; poll < EP_POLLS_PER_CLOCK; ++poll) {
            seen = ld_acquire_sys_u64(word);
            if (has_reached(seen, value)) {
                note_wait(c, rank, started);
                return true;
            }
            if (pinned) pause_ns(EP_PINNED_NS);
        }
        // All waiting threads read the same line of masks, so do it rarely.
#if EP_NODE
        if (is_out(c, word, rank, stage, epoch)) {
#else
        if (is_masked(c, rank)) {
#endif
            note_wait(c, rank, started);
            return false;
        }
        u64 waited = clock_ns() - started;
#if EP_NODE
        if (waited >= limit_of(c, word, rank, stage)) mask_for(c, writer_of(c, word, rank), stage, epoch, seen);
#else
        if (waited >= c.limit_ns) mask_for(c, rank, stage, epoch, seen);
#endif
        if (waited > 1000000) pause_ns(500);
    }
}

// Waits until the word that `rank` writes has reached the value; false if the rank is masked first. The loads are
// acquires at system scope: everything the rank wrote before its release store of the word is visible to this thread
// afterwards.
__device__ __forceinline__ bool await(const EpCommon &c, u64 word, u64 value, u32 rank, u32 stage, u64 epoch) {
    return has_reached(ld_acquire_sys_u64(word), value) || await_long(c, word, value, rank, stage, epoch);
}

// Waits for a tagged number that `rank` writes; returns the word, with another tag if the rank is masked first.
// Relaxed: nothing but the word itself is visible afterwards.
__device__ __noinline__ u64 await_tagged(const EpCommon &c, u64 word, u32 rank, u32 stage, u64 epoch) {
    u64 started = clock_ns();
    bool pinned = is_pinned(c, word);
    while (true) {
        u64 seen = 0;
#pragma unroll 1
        for (u32 poll = 0; poll < EP_POLLS_PER_CLOCK; ++poll) {
            seen = ld_relaxed_sys_u64(word);
            if (is_tagged(seen, epoch)) {
                note_wait(c, rank, started);
                return seen;
            }
            if (pinned) pause_ns(EP_PINNED_NS);
        }
#if EP_NODE
        if (is_out(c, word, rank, stage, epoch)) {
#else
        if (is_masked(c, rank)) {
#endif
            note_wait(c, rank, started);
            return tagged(epoch + 1, 0);
        }
        u64 waited = clock_ns() - started;
#if EP_NODE
        if (waited >= limit_of(c, word, rank, stage)) mask_for(c, writer_of(c, word, rank), stage, epoch, seen >> 32);
#else
        if (waited >= c.limit_ns) mask_for(c, rank, stage, epoch, seen >> 32);
#endif
        if (waited > 1000000) pause_ns(500);
    }
}

// Rank layout: offset in an inbox of the weights that are returned for `token`.
__device__ __forceinline__ u64 weights_back_at(const EpCommon &c, u64 epoch, u32 token) {
    return c.heap.back_weights + parity_of(epoch) * c.heap.back_weights_stride + u64(token) * EP_K * 8;
}

// A value per rank, distributed over a warp: lane r holds those of ranks r, r + 32 and so on.
template <typename T>
struct PerRank {
    T value[EACH];

    // The value of a rank; each lane may choose another one.
    __device__ __forceinline__ T of(u32 rank) const {
        T found = __shfl_sync(WHOLE_WARP, value[0], rank % LANES);
        if constexpr (EACH > 2) {
#pragma unroll
            for (u32 i = 1; i < EACH; ++i) {
                T other = __shfl_sync(WHOLE_WARP, value[i], rank % LANES);
                found = rank / LANES == i ? other : found;
            }
        } else if constexpr (EACH > 1) {
            T other = __shfl_sync(WHOLE_WARP, value[1], rank % LANES);
            found = rank >= LANES ? other : found;
        }
        return found;
    }
};

// The expert id of a selection as the caller gave it.
__device__ __forceinline__ long long id_at(const EpDispatchArgs &args, u64 selection) {
    return args.idx_bytes == 8 ? at<long long>(args.topk_idx, selection) : at<int>(args.topk_idx, selection);
}

// The expert that it names; -1 for none.
__device__ __forceinline__ int expert_of(long long id) { return id >= 0 && id < EP_E ? static_cast<int>(id) : -1; }

__device__ __forceinline__ int expert_at(const EpDispatchArgs &args, u64 selection) {
    return expert_of(id_at(args, selection));
}

// For the lanes below K, which have a token's selections: whether this one is the first of its rank.
__device__ __forceinline__ bool is_first_of_rank(u32 rank, bool valid, u32 lane) {
    u32 alike = __match_any_sync(WHOLE_WARP, valid ? rank : EP_R + lane);
    return valid && (alike & ((1u << lane) - 1)) == 0;
}

// Elements of a piece.
__device__ __forceinline__ u32 piece_elements(u32 piece) {
    if (EP_H % EP_PIECE == 0) return EP_PIECE;
    u32 left = EP_H - piece * EP_PIECE;
    return left < EP_PIECE ? left : EP_PIECE;
}

// Whether this is the last block of the launch to arrive; the result is valid in the first warp. `blocks` counts
// arrivals with acquire-release order, so that all earlier writes of all blocks are visible to the last one, which
// resets it to 0.
__device__ __forceinline__ bool is_last_block(u64 blocks) {
    __syncthreads();
    if (threadIdx.x >= LANES) return false;
    u32 last = 1;
    if (gridDim.x > 1) {
        if (threadIdx.x == 0) {
            last = atom_add_acq_rel_gpu_u64(blocks, 1) == gridDim.x - 1;
            if (last) st_relaxed_gpu_u64(blocks, 0);
        }
        last = __shfl_sync(WHOLE_WARP, last, 0);
        __syncwarp();
    }
    return last;
}

// Adds this operation's longest waits to the caller's `waits`. First warp only.
__device__ __forceinline__ void count_waits(const EpCommon &c) {
    if (!c.waits) return;
    for (u32 rank = threadIdx.x; rank < EP_R; rank += LANES) {
        u64 &waited = at<u64>(c.base + c.heap.waited, rank);
        at<long long>(c.waits, rank) += static_cast<long long>(waited);
        waited = 0;
    }
}
