// Computes the destination row of every token, before any row is sent.
//
//     every block     counts the rows that its tokens make at each rank, and the selections of each expert
//     the last one    adds up, and tells every rank; waits for what the others tell; the first row of this rank's at
//     to have counted each rank is what the ranks before it send there
//     every block     numbers its tokens' rows: what the blocks before it counted, and its own tokens before
//
// One block decides for all blocks which ranks timed out.
#pragma once

#include "kernels/ep_rank.cuh"

// Experts whose selections a block counts in shared memory: all, or none where there are many.
constexpr u32 HISTOGRAM = EP_HISTOGRAM;

// Bit of a rank's flags: its announcement was received.
constexpr u32 CAME = 1u << 31;

// What the threads of a block share.
struct ScanShared {
    // Rows at each rank: of this block, then of the blocks before it; of all blocks in the one that announces.
    u32 counts[EP_R];
    // Of each warp's tokens: rows at each rank.
    u32 tile[WARPS][EP_R];
    u32 experts[atleast(HISTOGRAM, 1)];
    u32 rows[EP_R];
    u32 flags[EP_R];
    u32 last;
};

// What does not change in a launch.
struct Dispatch {
    const EpDispatchArgs &args;
    const EpCommon &common;
    u64 epoch;
    u32 parity;
    // This block's tokens.
    u32 first;
    u32 end;

    __device__ __forceinline__ explicit Dispatch(const EpDispatchArgs &args) : args(args), common(args.common) {
        const EpState &state = state_of(common);
        u64 done = common.phases & EP_ANNOUNCE ? state.dispatch_begun
                   : common.phases & EP_SEND   ? state.dispatch_sent
                                               : state.dispatch_ended;
        epoch = done + 1;
        parity = epoch % EP_DEPTH;
        first = u32(u64(common.tokens) * blockIdx.x / gridDim.x);
        end = u32(u64(common.tokens) * (blockIdx.x + 1) / gridDim.x);
    }

    __device__ __forceinline__ EpScan &scan() const { return at<EpScan>(common.base + common.heap.scan); }
    __device__ __forceinline__ u64 regions() const { return common.base + common.heap.scan_regions; }
    __device__ __forceinline__ u64 block_counts() const { return common.base + common.heap.scan_counts; }
    __device__ __forceinline__ u64 expert_counts() const { return common.base + common.heap.scan_experts; }
    __device__ __forceinline__ u64 sent_rows(u32 token) const {
        return common.handle + common.parts.sent_rows + 4 * u64(token) * EP_R;
    }
    __device__ __forceinline__ u64 places() const { return common.handle + common.parts.places; }
    __device__ __forceinline__ u64 offsets() const { return common.handle + common.parts.offsets; }
    // What `rank` announced here.
    __device__ __forceinline__ u64 announced(u32 rank) const { return announcement(common.base, rank); }
    __device__ __forceinline__ u64 announcement(u64 base, u32 from) const {
        return inbox_in(common, base, from) + common.heap.announces + common.heap.announce_stride * parity;
    }

    __device__ __forceinline__ u32 expert(u32 token, u32 k) const {
        u64 index = u64(token) * EP_K + k;
        u64 expert = args.idx_bytes == 8 ? at<const u64>(args.topk_idx + 8 * index) : at<const u32>(args.topk_idx + 4 * index);
        return expert < EP_E ? u32(expert) : EP_NOWHERE;
    }

    // The last of a token's selections at one of its ranks.
    __device__ __forceinline__ u32 last_of(u32 token, u32 rank) const {
        u32 last = EP_K - 1;
        while (last > 0 && expert(token, last) / LOCAL != rank) --last;
        return last;
    }

    // The ranks that a token goes to, as bits.
    __device__ __forceinline__ u64 ranks_of(u32 token) const {
        u64 ranks = 0;
#pragma unroll 8
        for (u32 k = 0; k < EP_K; ++k) {
            u32 chosen = expert(token, k);
            if (chosen != EP_NOWHERE) ranks |= 1ull << (chosen / LOCAL);
        }
        return ranks;
    }
};

// Counts this block's rows and selections. True for the last block of all to have done so.
__device__ __forceinline__ bool count(const Dispatch &dispatch, ScanShared &shared) {
    for (u32 i = threadIdx.x; HISTOGRAM != 0 && i < HISTOGRAM; i += EP_THREADS) shared.experts[i] = 0;
    for (u32 rank = threadIdx.x; rank < EP_R; rank += EP_THREADS) shared.counts[rank] = 0;
    __syncthreads();
    for (u32 tile = dispatch.first; tile < dispatch.end; tile += EP_THREADS) {
        u32 token = tile + threadIdx.x;
        u64 ranks = 0;
        u32 chosen[EP_K];
#pragma unroll
        for (u32 k = 0; k < EP_K; ++k) chosen[k] = token < dispatch.end ? dispatch.expert(token, k) : EP_NOWHERE;
#pragma unroll
        for (u32 k = 0; k < EP_K; ++k) {
            if (chosen[k] == EP_NOWHERE) continue;
            ranks |= 1ull << (chosen[k] / LOCAL);
            atomicAdd(HISTOGRAM ? &shared.experts[chosen[k]] : &at<u32>(dispatch.expert_counts() + 4 * u64(chosen[k])), 1u);
        }
        for (u32 rank = 0; rank < EP_R; ++rank) {
            u32 votes = __ballot_sync(WHOLE_WARP, ranks >> rank & 1);
            if (lane_of() == 0 && votes != 0) atomicAdd(&shared.counts[rank], u32(__popc(votes)));
        }
    }
    __syncthreads();
    for (u32 rank = threadIdx.x; rank < EP_R; rank += EP_THREADS) {
        at<u32>(dispatch.block_counts() + 4 * (u64(blockIdx.x) * EP_R + rank)) = shared.counts[rank];
    }
    for (u32 i = threadIdx.x; HISTOGRAM != 0 && i < HISTOGRAM; i += EP_THREADS) {
        if (shared.experts[i] != 0) atomicAdd(&at<u32>(dispatch.expert_counts() + 4 * u64(i)), shared.experts[i]);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        EpScan &scan = dispatch.scan();
        shared.last = atom_add_acq_rel_gpu_u64(address_of(scan.arrived), 1) == gridDim.x - 1;
        if (shared.last) st_relaxed_gpu_u64(address_of(scan.arrived), 0);
    }
    __syncthreads();
    // By the last warp, while the first ones announce.
    if (shared.last && threadIdx.x == EP_THREADS - 1) st_release_gpu_u64(address_of(dispatch.scan().scanned), dispatch.epoch);
    return shared.last;
}

// Adds up what the first `blocks` blocks counted, into `shared.counts`.
__device__ __forceinline__ void add_up(const Dispatch &dispatch, ScanShared &shared, u32 blocks) {
    for (u32 rank = warp_of(); rank < EP_R; rank += WARPS) {
        u32 sum = 0;
        for (u32 block = lane_of(); block < blocks; block += LANES) {
            sum += at<const u32>(dispatch.block_counts() + 4 * (u64(block) * EP_R + rank));
        }
        sum = warp_sum(sum);
        if (lane_of() == 0) shared.counts[rank] = sum;
    }
    __syncthreads();
}

// Announces to one rank its row count and those of all ranks. One warp.
__device__ __forceinline__ void announce_to(const Dispatch &dispatch, const ScanShared &shared, u32 rank) {
    const EpCommon &common = dispatch.common;
    bool free = false;
    if (lane_of() == 0 && !is_masked(common, rank)) {
        // The slot was last used two dispatches ago.
        u64 taken = dispatch.epoch < EP_DEPTH ? 0 : dispatch.epoch - EP_DEPTH;
        free = await(common, word_at(common, common.base, rank, EP_WORD_DISPATCH_TAKEN), taken, rank, EP_STAGE_DISPATCH_TAKEN,
                     dispatch.epoch);
    }
    if (!__shfl_sync(WHOLE_WARP, free, 0)) return;
    u64 base = heap_of(common, rank), to = dispatch.announcement(base, common.rank);
    if (lane_of() == 0) {
        EpAnnounceHeader &header = at<EpAnnounceHeader>(to);
        header.region = dispatch.args.region;
        header.tokens = common.tokens;
        header.flags = dispatch.args.cached ? EP_CACHED : 0;
        header.host_word = dispatch.args.host_word;
    }
    if (!dispatch.args.cached) {
        for (u32 i = lane_of(); i < EP_R; i += LANES) at<u32>(to + common.heap.announce_rows + 4 * i) = shared.counts[i];
        u64 counts = dispatch.expert_counts() + 4 * u64(rank) * LOCAL;
        for (u32 i = lane_of(); i < LOCAL; i += LANES) {
            at<u32>(to + common.heap.announce_counts + 4 * i) = at<const u32>(counts + 4 * i);
        }
    }
    __syncwarp();
    if (lane_of() == 0) {
        st_release_sys_u64(word_at(common, base, common.rank, EP_WORD_ANNOUNCE + dispatch.parity), dispatch.epoch);
    }
}

// Announces the rows to all ranks. One block; `shared.counts` are the rows for each rank.
__device__ __forceinline__ void announce(const Dispatch &dispatch, const ScanShared &shared) {
    for (u32 rank = warp_of(); rank < EP_R; rank += WARPS) announce_to(dispatch, shared, rank);
    if (dispatch.args.cached) return;
    if (threadIdx.x == 0) {
        EpHandleHeader &header = at<EpHandleHeader>(dispatch.common.handle + dispatch.common.parts.header);
        header.epoch = dispatch.epoch;
        header.tokens = dispatch.common.tokens;
        header.flags = dispatch.args.topk_weights != 0 ? EP_WEIGHTED : 0;
        header.selections = 0;
    }
    __syncthreads();
    u64 selections = 0;
    for (u32 i = threadIdx.x; i < EP_E; i += EP_THREADS) {
        u32 &count = at<u32>(dispatch.expert_counts() + 4 * u64(i));
        selections += count;
        count = 0;
    }
    EpHandleHeader &header = at<EpHandleHeader>(dispatch.common.handle + dispatch.common.parts.header);
    if (selections != 0) atomicAdd(&header.selections, selections);
}

// Numbers the rows of this block's tokens at each rank, from the first of this rank's.
__device__ __forceinline__ void number_rows(const Dispatch &dispatch, ScanShared &shared) {
    if (threadIdx.x == 0) await_block(address_of(dispatch.scan().scanned), dispatch.epoch);
    __syncthreads();
    add_up(dispatch, shared, blockIdx.x);
    u32 before = (1u << lane_of()) - 1;
    for (u32 tile = dispatch.first; tile < dispatch.end; tile += EP_THREADS) {
        u32 token = tile + threadIdx.x;
        bool here = token < dispatch.end;
        u64 ranks = here ? dispatch.ranks_of(token) : 0;
        u32 (&mine)[EP_R] = shared.tile[warp_of()];
        for (u32 rank = 0; rank < EP_R; ++rank) {
            u32 votes = __ballot_sync(WHOLE_WARP, ranks >> rank & 1);
            if (lane_of() == 0) mine[rank] = __popc(votes);
        }
        __syncthreads();
        if (threadIdx.x < EP_R) {
            u32 next = shared.counts[threadIdx.x];
            for (u32 warp = 0; warp < WARPS; ++warp) {
                u32 rows = shared.tile[warp][threadIdx.x];
                shared.tile[warp][threadIdx.x] = next;
                next += rows;
            }
            shared.counts[threadIdx.x] = next;
        }
        __syncthreads();
        for (u32 rank = 0; rank < EP_R; ++rank) {
            u32 votes = __ballot_sync(WHOLE_WARP, ranks >> rank & 1);
            u32 row = EP_NOWHERE;
            if (ranks >> rank & 1) row = (mine[rank] + __popc(votes & before)) | dispatch.last_of(token, rank) << EP_SENT_BITS;
            if (here) at<u32>(dispatch.sent_rows(token) + 4 * rank) = row;
        }
        // The next tokens' counts come in place of these.
        __syncwarp();
    }
    __syncthreads();
    if (threadIdx.x == 0) atom_add_acq_rel_gpu_u64(address_of(dispatch.scan().numbered), 1);
}

// The rows that `source` sends to `rank`, of what it announced here.
__device__ __forceinline__ u32 rows_between(const Dispatch &dispatch, u32 source, u32 rank) {
    u32 rows = at<const u32>(dispatch.announced(source) + dispatch.common.heap.announce_rows + 4 * rank);
    return rows < dispatch.common.max_tokens ? rows : dispatch.common.max_tokens;
}

// Waits for the other ranks' announcements, assigns rows, and publishes the plan to the other blocks. One block.
__device__ __forceinline__ void plan(const Dispatch &dispatch, ScanShared &shared) {
    const EpCommon &common = dispatch.common;
    u32 me = threadIdx.x;
    if (me < EP_R) {
        bool came = !is_masked(common, me) &&
                    await(common, word_at(common, common.base, me, EP_WORD_ANNOUNCE + dispatch.parity), dispatch.epoch, me,
                               EP_STAGE_ANNOUNCE, dispatch.epoch);
        const EpAnnounceHeader &header = at<const EpAnnounceHeader>(dispatch.announced(me));
        shared.flags[me] = came ? header.flags | CAME : 0;
        shared.rows[me] = shared.flags[me] == CAME ? rows_between(dispatch, me, common.rank) : 0;
        at<u32>(dispatch.regions() + 4 * me) = came ? header.region : EP_NOWHERE;
    }
    u32 place = 0;
    if (me < EP_R && dispatch.args.cached) place = at<const u32>(dispatch.places() + 4 * me);
    __syncthreads();
    if (me < EP_R && !dispatch.args.cached) {
        u32 offset = 0;
#pragma unroll 4
        for (u32 source = 0; source < EP_R; ++source) {
            // A source that repeats an earlier routing announces no counts.
            u32 rows = shared.flags[source] == CAME ? rows_between(dispatch, source, me) : 0;
            place += source < common.rank ? rows : 0;
            offset += source < me ? shared.rows[source] : 0;
        }
        at<u32>(dispatch.places() + 4 * me) = place;
        at<u32>(dispatch.offsets() + 4 * me) = offset;
        if (me == EP_R - 1) at<u32>(dispatch.offsets() + 4 * EP_R) = offset + shared.rows[me];
    }
    __syncthreads();
    if (threadIdx.x == 0) st_release_gpu_u64(address_of(dispatch.scan().planned), dispatch.epoch);
    // For the receiver to compare with its own result: detects ranks that disagree on who timed out.
    if (me < EP_R && shared.flags[me] != 0) {
        at<u64>(word_at(common, heap_of(common, me), common.rank, EP_WORD_PLACE + dispatch.parity)) = place;
    }
}

// Publishes row counts and each rank's host word. One warp of the planning block.
__device__ __forceinline__ void publish_counts(const Dispatch &dispatch, const ScanShared &shared) {
    const EpCommon &common = dispatch.common;
    const EpDispatchArgs &args = dispatch.args;
    u32 alignment = args.expert_alignment == 0 ? 1 : args.expert_alignment;
    for (u32 expert = lane_of(); !args.cached && expert < LOCAL; expert += LANES) {
        u32 sum = 0;
        for (u32 source = 0; source < EP_R; ++source) {
            if (shared.flags[source] != CAME) continue;
            sum += at<const u32>(dispatch.announced(source) + common.heap.announce_counts + 4 * expert);
        }
        if (args.stats != 0) at<u32>(args.stats + 4 * expert) += sum;
        sum = (sum + alignment - 1) / alignment * alignment;
        if (args.out_counts != 0) at<u32>(args.out_counts + 4 * expert) = sum;
        if (args.count_host != 0) at<u32>(args.count_host + 4 * expert) = sum;
    }
    for (u32 rank = lane_of(); args.out_offsets != 0 && rank <= EP_R; rank += LANES) {
        at<u64>(args.out_offsets + 8 * rank) = at<const u32>(dispatch.offsets() + 4 * rank);
    }
    for (u32 rank = lane_of(); args.host_words != 0 && rank < EP_R; rank += LANES) {
        bool came = (shared.flags[rank] & CAME) != 0;
        u32 said = came ? at<const EpAnnounceHeader>(dispatch.announced(rank)).host_word : EP_NO_REPORT;
        at<u32>(args.host_words + 4 * rank) = said;
    }
    __syncwarp();
    if (lane_of() == 0 && args.count_word != 0) {
        u64 rows = at<const u32>(dispatch.offsets() + 4 * EP_R);
        st_release_sys_u64(args.count_word, tagged(dispatch.epoch, rows));
    }
}
