// Rows once per node: what gateways of dispatch and combine share. docs/design/once-per-node.md has the protocol.
//
// A rank is the gateway of its node for the ranks of its own number on other nodes, its column. They are counted from its own
// node on: column rank 0 is on the next node.
#pragma once

#include "kernels/ep_start.cuh"

#if EP_NODE

static_assert(NODES * NODE_RANKS == EP_R && COLUMN >= 1 && COLUMN <= LANES && NODE_RANKS <= LANES && EP_PREREDUCE,
              "limits that the host checks");

// A rank of this rank's column.
__device__ __forceinline__ u32 column_rank(const EpCommon &c, u32 number) {
    return (c.rank + (number + 1) * NODE_RANKS) % EP_R;
}

// The number of a rank of another node in its gateway's column: the gateway is on this node.
__device__ __forceinline__ u32 column_of(const EpCommon &c, u32 rank) {
    return (rank / NODE_RANKS + NODES - c.rank / NODE_RANKS) % NODES - 1;
}

// A rank of this node by its number there.
__device__ __forceinline__ u32 near_rank(const EpCommon &c, u32 number) {
    return c.rank / NODE_RANKS * NODE_RANKS + number;
}

// The inbox of a rank of the column in the heap of a rank of this node.
__device__ __forceinline__ u64 forwarded_inbox(const EpCommon &c, const Start &start, u32 near, u32 source) {
    return inbox_in(c, start.via[near], source);
}

// In a handle: which ranks of this node a token of a column rank selects << 32 | and to which of them it was forwarded.
__device__ __forceinline__ u64 &forwards_of(const EpCommon &c, u32 number, u32 token) {
    return at<u64>(c.handle + c.parts.sent_rows, u64(number) * c.max_tokens + token);
}

// Announces to this node that this rank has lost a source in the operation of that stage. All lanes.
__device__ __forceinline__ void tell_lost(const EpCommon &c, const Start &start, u32 source, u32 stage, u64 epoch,
                                          u32 lane) {
    if (lane < NODE_RANKS && near_rank(c, lane) != c.rank && (start.open >> near_rank(c, lane) & 1)) {
        u64 inbox = forwarded_inbox(c, start, near_rank(c, lane), source);
        st_relaxed_sys_u64(word_in(c, inbox, lost_word(stage)), epoch);
    }
    __syncwarp();
}

// The node area of a heap, after its inboxes: partial sums of the ranks of its node, for tokens of its column. Rank layout:
// with the weights that return with them.
struct NodeArea {
    u64 rows;
    u64 flags;
    u64 weights;

    // Those of rank `writer` of the node, for a rank of the column, in the heap at `base`.
    __device__ __forceinline__ NodeArea(const EpCommon &c, u64 base, u32 writer, u32 number, u64 epoch) {
        u64 area = base + c.heap.inboxes + EP_R * c.heap.inbox_stride;
        u64 slot = (writer * EP_DEPTH + parity_of(epoch)) * COLUMN + number;
        rows = area + slot * c.heap.back_slot;
        constexpr u64 SLOTS_OF_ALL = u64(NODE_RANKS) * EP_DEPTH * COLUMN;
        area += SLOTS_OF_ALL * c.heap.back_slot;
        flags = area + slot * c.heap.back_flags_slot;
        weights = area + SLOTS_OF_ALL * c.heap.back_flags_slot + slot * c.heap.back_weights_stride;
    }

    __device__ __forceinline__ u64 row(const EpCommon &c, u32 token, u32 piece) const {
        return rows + token * c.heap.back_stride + piece * EP_PIECE * 2ull;
    }

    __device__ __forceinline__ u64 flag(u32 token, u32 piece) const { return flags + (u64(token) * PIECES + piece) * 8; }

    // The weights of a token, a word for each selection.
    __device__ __forceinline__ u64 weights_of(u32 token) const { return weights + u64(token) * EP_K * 8; }
};

// Offset in an inbox of the word of a returned piece that lacks ranks: their bits.
__device__ __forceinline__ u64 missing_at(const EpCommon &c, u64 epoch, u32 token, u32 piece) {
    u64 weights = c.heap.back_weights + parity_of(epoch) * c.heap.back_weights_stride;
    return weights + (u64(c.max_tokens) * EP_K + u64(token) * PIECES + piece) * 8;
}

#endif
