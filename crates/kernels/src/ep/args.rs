//! Arguments of the expert-parallel kernels, and the layout of what they read and write in heaps: the single
//! definition, from which `csrc/layout/ep.cuh` is generated.
//!
//! Offsets are bytes from the start of a heap (`EpHeap`) or of a handle (`EpHandle`), addresses are of device memory,
//! strides are bytes. R ranks, H elements of a row, K experts of a token, E experts and El = E / R local experts are
//! fixed when a kernel is compiled; M, `max_tokens`, is not. An epoch is the sequence number of a dispatch or a
//! combine, from 1.
#![allow(unsafe_code)]

use std::fmt::Write as _;
use std::mem::size_of;

use crossrail_cuda::KernelArgs;

constants! {
    /// Phase of a launch: announce rows to their destinations (rank layout).
    EP_ANNOUNCE: u32 = 1;
    /// Phase of a launch: send rows.
    EP_SEND: u32 = 2;
    /// Phase of a launch: deliver received rows.
    EP_RECEIVE: u32 = 4;
    /// Slots that a rank has for each source; operations alternate between them by epoch.
    EP_DEPTH: u32 = 2;
    /// Bytes of a line of control words. An inbox begins with one.
    EP_LINE: u64 = 128;
    /// Control word of a line, expert layout: epoch << 32 | flags << 24 | tokens of a dispatch. Double-buffered by
    /// epoch.
    EP_WORD_TABLE: u32 = 0;
    /// Control word: epoch of the dispatch whose announcement is complete. With slots: epoch << 32 |
    /// `EpDispatchArgs::host_word`. Double-buffered by epoch.
    EP_WORD_ANNOUNCE: u32 = 4;
    /// Control word: epoch of the dispatch whose rows are all there. Double-buffered by epoch.
    EP_WORD_SENT: u32 = 6;
    /// Control word: epoch of the last dispatch whose slots the writing rank has released.
    EP_WORD_DISPATCH_TAKEN: u32 = 8;
    /// Control word: epoch of the last combine whose slots the writing rank has released.
    EP_WORD_COMBINE_TAKEN: u32 = 9;
    /// Control word: reserved for the host.
    EP_WORD_HELLO: u32 = 10;
    /// Control word, rank layout: first row of the source's rows. Double-buffered by epoch; written before
    /// `EP_WORD_SENT`.
    EP_WORD_PLACE: u32 = 11;
    /// Control word, once per node: of the ranks of the reader's number on other nodes, as bits, those to which the writer returns
    /// nothing in a combine. Double-buffered by epoch.
    EP_WORD_DECLINED: u32 = 2;
    /// Control word, once per node: epoch of the dispatch in which the gateway has lost the source. That of a combine follows.
    EP_WORD_LOST: u32 = 13;
    /// Stage of a timeout: waiting for the table of a dispatch.
    EP_STAGE_TABLE: u32 = 1;
    /// Stage of a timeout: waiting for a row of a dispatch.
    EP_STAGE_ROW: u32 = 2;
    /// Stage of a timeout: waiting for the weights of a combine.
    EP_STAGE_WEIGHTS: u32 = 3;
    /// Stage of a timeout: waiting for a row of a combine.
    EP_STAGE_BACK_ROW: u32 = 4;
    /// Stage of a timeout: waiting for the announcement of a dispatch.
    EP_STAGE_ANNOUNCE: u32 = 5;
    /// Stage of a timeout: waiting for the word that all rows of a dispatch are there.
    EP_STAGE_SENT: u32 = 6;
    /// Stage of a timeout: waiting for the release of the slots of the dispatch before the last.
    EP_STAGE_DISPATCH_TAKEN: u32 = 7;
    /// Stage of a timeout: waiting for the release of the slots of the combine before the last.
    EP_STAGE_COMBINE_TAKEN: u32 = 8;
    /// Fault of a rank that was in time: its rows begin elsewhere than the announcements imply, because the ranks
    /// disagree on who timed out. `seen` is where they begin.
    EP_STAGE_PLACE: u32 = 9;
    /// Fault of this rank's own call: more rows were received than `max_rows`. `seen` is their number.
    EP_STAGE_ROOM: u32 = 10;
    /// Most blocks of a launch in the rank layout.
    EP_RANK_BLOCKS: u32 = 256;
    /// Entries of the ring of faults; with more than 64 ranks 16 times as many, since all of them can be lost at once.
    EP_FAULTS: u32 = 64;
    /// Flag of a table or of a handle's source: weights were sent with the dispatch.
    EP_WEIGHTED: u32 = 1;
    /// Flag of an announcement: the routing of an earlier dispatch is repeated.
    EP_CACHED: u32 = 2;
    /// In place of a rank's `host_word` if the rank timed out.
    EP_NO_REPORT: u32 = 0xffffffff;
    /// Number of times that a block can note in a launch, for measurements: nanoseconds of the GPU's clock; 0: not
    /// reached.
    EP_MARKS: u32 = 16;
    /// Time: the block started.
    EP_MARK_BEGUN: u32 = 0;
    /// Time: the block has counted its rows (rank layout), or knows the epoch (dispatch in the expert layout).
    EP_MARK_COUNTED: u32 = 1;
    /// Time: announcements to all ranks are written. One block only.
    EP_MARK_ANNOUNCED: u32 = 2;
    /// Time: announcements (expert layout: tables) of all ranks were received. One block only.
    EP_MARK_HEARD: u32 = 3;
    /// Time: the block knows the destinations of its rows.
    EP_MARK_PLANNED: u32 = 4;
    /// Time: the first row of the block's first sending warp is stored; in combine, has arrived.
    EP_MARK_FIRST: u32 = 5;
    /// Time: all rows of the block's first sending warp have arrived.
    EP_MARK_SENT: u32 = 6;
    /// Time: the row metadata of the first warp that sends metadata is stored.
    EP_MARK_DETAILS: u32 = 7;
    /// Time: first sum of the block's first adding warp (combine).
    EP_MARK_SUM: u32 = 8;
    /// Time: last sum of the block's first adding warp (combine).
    EP_MARK_SUMS: u32 = 9;
    /// Time: the block is done, except for what only the last block does.
    EP_MARK_DONE: u32 = 10;
    /// Time: rows of all ranks were received. One block only; expert layout: rows that the block's last warp delivers.
    EP_MARK_CAME: u32 = 11;
    /// Time: the launch is over. One block only.
    EP_MARK_OVER: u32 = 12;
    /// What a combine in the expert layout carries between ranks: bf16.
    EP_WIRE_BF16: u32 = 0;
    /// The same: LogFMT-10, ten bits for each element and a scale for each 128.
    EP_WIRE_LOGFMT10: u32 = 1;
    /// The same: e4m3, with a power of two for each 128 elements.
    EP_WIRE_FP8: u32 = 2;
    /// Bits of a row's number in `EpHandle::sent_rows`.
    EP_SENT_BITS: u32 = 26;
    /// Entries of the ring of commands.
    EP_COMMANDS: u32 = 4096;
    /// Laps of the ring that are told apart: a command's are numbered from 1.
    EP_LAPS: u64 = 0xffff;
    /// Command: these bf16 rows of a dispatch are complete.
    EP_COMMAND_ROWS_BF16: u32 = 1;
    /// As EP_COMMAND_ROWS_BF16: e4m3 with scales of four bytes.
    EP_COMMAND_ROWS_FP8: u32 = 2;
    /// As EP_COMMAND_ROWS_BF16: e4m3 with scales of one byte.
    EP_COMMAND_ROWS_UE8M0: u32 = 3;
    /// Command: these rows of a combine are complete.
    EP_COMMAND_BACK: u32 = 4;
    /// Command: these words of a dispatch are complete, except for their tags.
    EP_COMMAND_TABLE: u32 = 5;
    /// Command: these words of a combine are complete, except for their tags.
    EP_COMMAND_WEIGHTS: u32 = 6;
    /// Command without data: number of a control word << 32 | its new value, without its tag.
    EP_COMMAND_WORD: u32 = 7;
    /// Command without data: number of a control word whose new value is the epoch.
    EP_COMMAND_TAKEN: u32 = 8;
    /// As EP_COMMAND_BACK: these lack ranks of the node that returns them. Their flags get the top bit.
    EP_COMMAND_BACK_LESS: u32 = 9;
    /// In place of a row number: no row.
    EP_NOWHERE: u32 = 0xffff_ffff;
    /// Threads of the only block of `layout`.
    EP_LAYOUT_THREADS: u32 = 1024;
}

layouts! {
    layout_ep, "csrc/layout/ep.cuh";
    /// Arguments of `layout`, which counts the tokens of a batch by where they go.
    EpLayoutArgs {
        /// Expert ids i64[tokens][topk]; those that are none of the experts count as none.
        topk_idx: u64,
        /// Items from one token's ids to the next one's.
        stride: u64,
        /// Becomes the tokens of each rank, i32[ranks].
        out_ranks: u64,
        /// Becomes the selections of each expert, i32[experts].
        out_experts: u64,
        /// Becomes 1 where a token goes to a rank, else 0, u8[tokens][ranks].
        out_in_rank: u64,
        /// Number of tokens.
        tokens: u32,
        /// Selections of a token.
        topk: u32,
        /// Number of experts, a multiple of that of ranks.
        experts: u32,
        /// Number of ranks, at most 64.
        ranks: u32,
    }
    /// Offsets and strides of everything in a heap; the same on every rank. A heap has what only its own rank accesses,
    /// then an inbox for each source rank, which alone writes it, then results of the rank layout. What is
    /// double-buffered alternates by epoch.
    EpHeap {
        /// An `EpState`, accessed only by this rank.
        state: u64,
        /// u32[R]: not 0 for a masked rank. Set by kernels at a timeout and by the host at any time; cleared by the
        /// host only, between launches.
        masks: u64,
        /// u64[R]: longest wait for each rank in the current operation, in nanoseconds.
        waited: u64,
        /// u64[2][R]: of dispatch and of combine, up to which epoch this rank's slots at each rank were free when a kernel
        /// last looked. Only of ranks whose words are in memory of the host: there the loads of all blocks take turns.
        taken_seen: u64,
        /// u64[R]: current dispatch, epoch << 32 | flags << 24 | tokens of each source (0 for a masked one).
        plan_tokens: u64,
        /// Expert layout: u64[R][M][K], current dispatch, epoch << 32 | row of each selection, or EP_NOWHERE. Slots:
        /// u64[R][M], of each token.
        plan_rows: u64,
        /// Rank layout: an `EpScan`.
        scan: u64,
        /// u32[R]: current dispatch, region at each rank; EP_NOWHERE for a rank that timed out.
        scan_regions: u64,
        /// u32[EP_RANK_BLOCKS][R]: current dispatch, rows of each block's tokens at each rank.
        scan_counts: u64,
        /// u32[E]: selections of each expert; 0 between launches.
        scan_experts: u64,
        /// Inboxes: [R], or fewer where some ranks write elsewhere; the table of inboxes has the address for each rank.
        inboxes: u64,
        /// From one inbox to the next.
        inbox_stride: u64,
        /// `inbox_stride` if there is an inbox for each rank, in order; else 0. Loads that do not wait for the table of
        /// inboxes go by it.
        guess_stride: u64,
        /// Within an inbox: control words, u64: a line of EP_LINE bytes.
        words: u64,
        /// Within an inbox, expert layout and slots: [EP_DEPTH] tables: u64[M][K], epoch << 32 | local expert + 1 of each
        /// selection (0: not on this rank); and, if weights were given, u64[M][K], epoch << 32 | bits of the f32 weight of
        /// those on this rank.
        tables: u64,
        /// From one table to the next.
        table_stride: u64,
        /// Within a table: weights.
        table_weights: u64,
        /// Within an inbox, expert layout and slots: [EP_DEPTH][M] rows. A row is its pieces of `piece_stride` bytes; a piece
        /// is elements and then their scales.
        rows: u64,
        /// From one row to the next.
        row_stride: u64,
        /// From one piece of a row to the next.
        piece_stride: u64,
        /// Within an inbox: u64[EP_DEPTH][M][pieces]: epoch of the dispatch whose piece is there, stored with release order
        /// after it.
        row_flags: u64,
        /// Within an inbox: [EP_DEPTH] slots of a combine's bf16 rows: one per token, or min(K, El) per token without
        /// prereduction (expert layout only).
        back: u64,
        /// From one slot to the next.
        back_slot: u64,
        /// From one row to the next.
        back_stride: u64,
        /// Within an inbox, for each slot: u64[rows of a slot][pieces]: epoch of the combine whose piece is there, stored
        /// with release order after it.
        back_flags: u64,
        /// From one slot's flags to the next's.
        back_flags_slot: u64,
        /// From a flag of `row_flags` and `back_flags` to the next: 8, or a line where they may be in the host's memory.
        flag_stride: u64,
        /// Within an inbox, expert layout: u64[EP_DEPTH][M][K], weights of a combine: epoch << 32 | bits of an f32. Slots:
        /// those that are returned.
        back_weights: u64,
        /// From those of one epoch to those of the next.
        back_weights_stride: u64,
        /// Within an inbox, rank layout without slots: f32[EP_DEPTH][M][K], returned weights.
        back_topk: u64,
        /// Within an inbox, rank layout without slots: [EP_DEPTH] announcements: an `EpAnnounceHeader`, rows u32[R] (to every
        /// rank), counts u32[El].
        announces: u64,
        /// From one announcement to the next.
        announce_stride: u64,
        /// Within an announcement: rows.
        announce_rows: u64,
        /// Within an announcement: selections of each expert of the receiver.
        announce_counts: u64,
        /// Rank layout: regions: rows [R * M][row bytes].
        regions: u64,
        /// From one region to the next.
        region_stride: u64,
        /// Within a region: scales, [R * M][H / 128], contiguous.
        region_scales: u64,
        /// Within a region: i64[R * M][K].
        region_idx: u64,
        /// Within a region: f32[R * M][K].
        region_weights: u64,
        /// Within a region: i32[R * M], each row's token at its source.
        region_source: u64,
        /// Bytes of the heap.
        bytes: u64,
    }
    /// State of a rank's kernels between launches: epochs of the last operations, and counters that are 0 between
    /// launches.
    EpState {
        /// Epoch of the last dispatch announced.
        dispatch_begun: u64,
        /// Epoch of the last dispatch sent.
        dispatch_sent: u64,
        /// Epoch of the last dispatch received.
        dispatch_ended: u64,
        /// Epoch of the last combine begun.
        combine_begun: u64,
        /// Epoch of the last combine sent.
        combine_sent: u64,
        /// Epoch of the last combine received.
        combine_ended: u64,
        /// Number of faults reported so far.
        faults: u64,
        /// Blocks of a dispatch launch that have finished, one counter for each value of `EpCommon::phases`: a launch
        /// that only sends may overlap one that only receives. Kernels count up; the last block of a launch resets its
        /// counter to 0.
        dispatch_blocks: [u64; 8],
        /// The same for combine.
        combine_blocks: [u64; 8],
    }
    /// Progress of the blocks of a dispatch in the rank layout.
    EpScan {
        /// Blocks that have counted their rows; 0 between launches.
        arrived: u64,
        /// Epoch of the last dispatch whose rows all blocks have counted.
        scanned: u64,
        /// Epoch of the last dispatch whose row destinations are known.
        planned: u64,
        /// Blocks that have numbered their tokens' rows; 0 between launches.
        numbered: u64,
        /// Tokens claimed by warps of a dispatch, beyond each warp's first; 0 between launches.
        dispatch_taken: u64,
        /// The same for the turns of a combine.
        combine_taken: u64,
    }
    /// The head of an announcement.
    EpAnnounceHeader {
        /// Region of the announcing rank into which rows for it are to be written.
        region: u32,
        /// Its tokens.
        tokens: u32,
        /// EP_WEIGHTED, EP_CACHED.
        flags: u32,
        /// `EpDispatchArgs::host_word` of the announcing rank.
        host_word: u32,
    }
    /// An entry of the ring of faults, in pinned host memory.
    EpFault {
        /// Sequence number of the fault, from 1, stored last with release order. Its entry is (number - 1) % entries.
        number: u64,
        /// Epoch of the dispatch or combine.
        epoch: u64,
        /// Last value of the word that was waited for.
        seen: u64,
        /// The rank that timed out.
        rank: u32,
        /// EP_STAGE_.
        stage: u32,
    }
    /// A ring of commands to the proxy, in device memory; the commands are in pinned memory. There is a power of two of
    /// rings, one after the other, each read by a thread; blocks share them out.
    EpRing {
        /// Bits of the ranks to which the proxy sends, of more than 64 ranks the address of their words, or 0; the same in
        /// all rings.
        far: u64,
        /// Number of the last ring; the same in all rings.
        last: u64,
        /// Number of commands so far.
        appended: u64,
        /// Number of commands that the proxy had read when a kernel last looked.
        read_seen: u64,
        /// Address of the commands, [EP_COMMANDS] of 16 bytes.
        commands: u64,
        /// Address of the number of commands that the proxy has read, u64.
        read: u64,
    }
    /// Offsets of everything in a handle.
    EpHandle {
        /// An `EpHandleHeader`.
        header: u64,
        /// u32[R]: tokens of each source, 0 for a masked one.
        tokens: u64,
        /// u32[R]: flags of each source.
        flags: u64,
        /// i32[M][K]: experts of this rank's own tokens; -1 for none.
        sent: u64,
        /// f32[M][K]: their weights, if they were given.
        sent_weights: u64,
        /// Expert layout: u32[R][M][K], the row of each selection, or EP_NOWHERE. Slots: u32[R][M], the row of each
        /// token.
        routes: u64,
        /// Expert layout: u8[R][M], number of a token's selections on this rank. Slots: 1 for a token with any.
        present: u64,
        /// Expert layout: f32[R][M][K], received weights.
        weights: u64,
        /// Rank layout without slots: u32[M][R], row of each own token at each rank, counted from this rank's first there,
        /// and << EP_SENT_BITS the position of the token's last selection there; or EP_NOWHERE. Once per node: u64[N - 1][M],
        /// bits of the ranks of this node that a token of a rank of the same number on another node selects, << 32 | of those
        /// to which it was forwarded.
        sent_rows: u64,
        /// Rank layout without slots: u32[R], this rank's first row at each rank.
        places: u64,
        /// Rank layout: u32[R + 1], the first row of each source, and the end.
        offsets: u64,
        /// Rank layout: u32[R * M], each row's token at its source.
        source: u64,
        /// Bytes of a handle.
        bytes: u64,
    }
    /// The head of a handle.
    EpHandleHeader {
        /// Epoch of the dispatch.
        epoch: u64,
        /// This rank's tokens.
        tokens: u32,
        /// EP_WEIGHTED: they had weights.
        flags: u32,
        /// Rank layout without slots: total number of experts that they selected.
        selections: u64,
    }
    /// Arguments of every launch. The caller of a buffer sets `tokens` (of a dispatch) and `waits`; the buffer sets the
    /// rest.
    EpCommon {
        /// Where everything is in a heap.
        heap: EpHeap,
        /// Where everything is in a handle.
        parts: EpHandle,
        /// Address of this rank's heap.
        base: u64,
        /// u64[R] in device memory: address of each rank's heap as mapped here, this rank's own included. Once per node: of a
        /// rank of the same number on another node, its inbox here, in pinned memory; `from` has inboxes in the heap for all.
        peers: u64,
        /// u64[R] in device memory: address of this rank's inbox at each rank; of one that is not mapped, a copy of that
        /// inbox in pinned memory.
        to: u64,
        /// u64[R] in device memory: address of each rank's inbox here: in the heap, or in pinned memory.
        from: u64,
        /// Address of the first `EpRing`.
        rings: u64,
        /// Address of the handle, 128-byte aligned.
        handle: u64,
        /// Address of the ring of faults.
        faults: u64,
        /// i64[R], to which the longest wait for each rank is added, in nanoseconds; or 0.
        waits: u64,
        /// Timeout of each wait for another rank, in nanoseconds.
        limit_ns: u64,
        /// This rank.
        rank: u32,
        /// Phases that this launch runs: bits EP_ANNOUNCE, EP_SEND, EP_RECEIVE.
        phases: u32,
        /// Tokens of this rank.
        tokens: u32,
        /// M.
        max_tokens: u32,
    }
    /// Arguments of a dispatch. Strides count bytes; an address of 0 means that there is no such array. The caller of a
    /// buffer sets everything up to `host_word`, the buffer what follows.
    EpDispatchArgs {
        /// Arguments of every launch.
        common: EpCommon,
        /// [tokens][H], bf16, or e4m3 if `x_fp8` is set. Rows are 16-byte aligned.
        x: u64,
        /// From one row to the next, a multiple of 16.
        x_stride: u64,
        /// Scales of e4m3 rows: f32[tokens][H / 128], or u8 for EP_SCALE 2.
        x_scales: u64,
        /// From one token's scales to the next's; from one block's scale to the next's (u8: from four blocks', which
        /// are adjacent bytes, to the next four's).
        x_scale_strides: [u64; 2],
        /// Expert ids, [tokens][K], contiguous; -1 for none. Not read if `cached` is set.
        topk_idx: u64,
        /// f32[tokens][K], contiguous; or 0.
        topk_weights: u64,
        /// Expert layout: [El][R * M][H], bf16 or e4m3, contiguous.
        out_x: u64,
        /// Expert layout: scales of `out_x` if it is e4m3.
        out_scales: u64,
        /// From one expert's scales to the next's; from one row's to the next's; from one block's to the next's (u8: as
        /// in `x_scale_strides`).
        out_scale_strides: [u64; 3],
        /// i32[El]: rows of each expert. Rank layout: rounded up to a multiple of `expert_alignment`.
        out_counts: u64,
        /// Expert layout: i64[El][R], first row of each source << 32 | number of its rows.
        out_ranges: u64,
        /// Expert layout: i32[El][R * M], each row's token at its source; or 0.
        out_source: u64,
        /// Rank layout: i64[R + 1], the first row of each source, and the end.
        out_offsets: u64,
        /// i32[El], to which each expert's rows are added, not rounded up; or 0. A cached dispatch adds nothing.
        stats: u64,
        /// Rank layout: rows of the caller's result. Rows that were not received get -1 in topk_idx up to here, and
        /// more rows than this are reported as a fault (EP_STAGE_ROOM). 0: no such limit.
        max_rows: u64,
        /// Rank layout: counts are rounded up to a multiple of this; 0 is 1.
        expert_alignment: u32,
        /// Not 0: `x` is e4m3 with `x_scales`.
        x_fp8: u32,
        /// Bytes of an expert id: 4 or 8.
        idx_bytes: u32,
        /// Rank layout: a number for the hosts of the other ranks, which get it where `host_words` is given. Not
        /// EP_NO_REPORT.
        host_word: u32,
        /// Rank layout: a pinned u64 that becomes epoch << 32 | rows; or 0.
        count_word: u64,
        /// Rank layout: a pinned i32[El] that gets the counts before `count_word` is written; or 0.
        count_host: u64,
        /// Rank layout: a pinned u32[R] that gets each rank's `host_word`, EP_NO_REPORT for a rank that timed out, before
        /// `count_word` is written; or 0.
        host_words: u64,
        /// u64[blocks][EP_MARKS] that gets the times of the launch; or 0. Only kernels compiled with marks read it.
        marks: u64,
        /// Rank layout: index of the region that this rank's rows are written to.
        region: u32,
        /// Rank layout: not 0: the routing in the handle is repeated.
        cached: u32,
        /// Rank layout: KiB of rows that all blocks together keep in flight between load and store; 0 for the default.
        queue: u32,
        /// Padding, 0.
        reserved: u32,
    }
    /// Arguments of a combine. Strides count bytes; an address of 0 means that there is no such array. The caller of a
    /// buffer sets everything up to `out_weights`, and `wire`, the buffer the rest.
    EpCombineArgs {
        /// Arguments of every launch.
        common: EpCommon,
        /// The experts' outputs, bf16, 16-byte aligned: [El][R * M][H], or [rows][H] in the rank layout.
        y: u64,
        /// From one row to the next, a multiple of 16.
        y_stride: u64,
        /// Rank layout: rows of `y`, if more may have been received than the dispatch's `max_rows`: the missing ones
        /// count as zeros. 0: as many as were received.
        y_rows: u64,
        /// Rank layout: f32[rows][K] that are sent back with the rows; or 0.
        y_weights: u64,
        /// Expert layout: f32[tokens][K], contiguous, unless weights were sent with the dispatch; or 0.
        topk_weights: u64,
        /// bf16[tokens][H], contiguous, 16-byte aligned, that are added to the sums; or 0.
        bias: [u64; 2],
        /// bf16[tokens][H], 16-byte aligned: the sums.
        out: u64,
        /// From one row to the next, a multiple of 16.
        out_stride: u64,
        /// Rank layout: f32[tokens][K], contiguous, the sums of `y_weights`; or 0.
        out_weights: u64,
        /// u64[blocks][EP_MARKS] that gets the times of the launch; or 0. Only kernels compiled with marks read it.
        marks: u64,
        /// Rank layout: blocks that send in a launch that sends and receives; 0: every block does both.
        senders: u32,
        /// Rank layout: KiB of rows that all blocks together keep in flight between load and store; 0 for the default.
        queue: u32,
        /// EP_WIRE_, the same on all ranks: which kernel is launched. EP_WIRE_BF16 in the rank layout.
        wire: u32,
        /// Padding, 0.
        reserved: u32,
    }
}
