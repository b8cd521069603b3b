// Written from crates/kernels/src by `cargo run -p crossrail-kernels --example layout`. Do not edit.
#pragma once

#include "layout/types.cuh"

// Phase of a launch: announce rows to their destinations (rank layout).
constexpr u32 EP_ANNOUNCE = 1;

// Phase of a launch: send rows.
constexpr u32 EP_SEND = 2;

// Phase of a launch: deliver received rows.
constexpr u32 EP_RECEIVE = 4;

// Slots that a rank has for each source; operations alternate between them by epoch.
constexpr u32 EP_DEPTH = 2;

// Bytes of a line of control words. An inbox begins with one.
constexpr u64 EP_LINE = 128;

// Control word of a line, expert layout: epoch << 32 | flags << 24 | tokens of a dispatch. Double-buffered by
// epoch.
constexpr u32 EP_WORD_TABLE = 0;

// Control word: epoch of the dispatch whose announcement is complete. With slots: epoch << 32 |
// `EpDispatchArgs::host_word`. Double-buffered by epoch.
constexpr u32 EP_WORD_ANNOUNCE = 4;

// Control word: epoch of the dispatch whose rows are all there. Double-buffered by epoch.
constexpr u32 EP_WORD_SENT = 6;

// Control word: epoch of the last dispatch whose slots the writing rank has released.
constexpr u32 EP_WORD_DISPATCH_TAKEN = 8;

// Control word: epoch of the last combine whose slots the writing rank has released.
constexpr u32 EP_WORD_COMBINE_TAKEN = 9;

// Control word: reserved for the host.
constexpr u32 EP_WORD_HELLO = 10;

// Control word, rank layout: first row of the source's rows. Double-buffered by epoch; written before
// `EP_WORD_SENT`.
constexpr u32 EP_WORD_PLACE = 11;

// Control word, once per node: of the ranks of the reader's number on other nodes, as bits, those to which the writer returns
// nothing in a combine. Double-buffered by epoch.
constexpr u32 EP_WORD_DECLINED = 2;

// Control word, once per node: epoch of the dispatch in which the gateway has lost the source. That of a combine follows.
constexpr u32 EP_WORD_LOST = 13;

// Stage of a timeout: waiting for the table of a dispatch.
constexpr u32 EP_STAGE_TABLE = 1;

// Stage of a timeout: waiting for a row of a dispatch.
constexpr u32 EP_STAGE_ROW = 2;

// Stage of a timeout: waiting for the weights of a combine.
constexpr u32 EP_STAGE_WEIGHTS = 3;

// Stage of a timeout: waiting for a row of a combine.
constexpr u32 EP_STAGE_BACK_ROW = 4;

// Stage of a timeout: waiting for the announcement of a dispatch.
constexpr u32 EP_STAGE_ANNOUNCE = 5;

// Stage of a timeout: waiting for the word that all rows of a dispatch are there.
constexpr u32 EP_STAGE_SENT = 6;

// Stage of a timeout: waiting for the release of the slots of the dispatch before the last.
constexpr u32 EP_STAGE_DISPATCH_TAKEN = 7;

// Stage of a timeout: waiting for the release of the slots of the combine before the last.
constexpr u32 EP_STAGE_COMBINE_TAKEN = 8;

// Fault of a rank that was in time: its rows begin elsewhere than the announcements imply, because the ranks
// disagree on who timed out. `seen` is where they begin.
constexpr u32 EP_STAGE_PLACE = 9;

// Fault of this rank's own call: more rows were received than `max_rows`. `seen` is their number.
constexpr u32 EP_STAGE_ROOM = 10;

// Most blocks of a launch in the rank layout.
constexpr u32 EP_RANK_BLOCKS = 256;

// Entries of the ring of faults; with more than 64 ranks 16 times as many, since all of them can be lost at once.
constexpr u32 EP_FAULTS = 64;

// Flag of a table or of a handle's source: weights were sent with the dispatch.
constexpr u32 EP_WEIGHTED = 1;

// Flag of an announcement: the routing of an earlier dispatch is repeated.
constexpr u32 EP_CACHED = 2;

// In place of a rank's `host_word` if the rank timed out.
constexpr u32 EP_NO_REPORT = 4294967295;

// Number of times that a block can note in a launch, for measurements: nanoseconds of the GPU's clock; 0: not
// reached.
constexpr u32 EP_MARKS = 16;

// Time: the block started.
constexpr u32 EP_MARK_BEGUN = 0;

// Time: the block has counted its rows (rank layout), or knows the epoch (dispatch in the expert layout).
constexpr u32 EP_MARK_COUNTED = 1;

// Time: announcements to all ranks are written. One block only.
constexpr u32 EP_MARK_ANNOUNCED = 2;

// Time: announcements (expert layout: tables) of all ranks were received. One block only.
constexpr u32 EP_MARK_HEARD = 3;

// Time: the block knows the destinations of its rows.
constexpr u32 EP_MARK_PLANNED = 4;

// Time: the first row of the block's first sending warp is stored; in combine, has arrived.
constexpr u32 EP_MARK_FIRST = 5;

// Time: all rows of the block's first sending warp have arrived.
constexpr u32 EP_MARK_SENT = 6;

// Time: the row metadata of the first warp that sends metadata is stored.
constexpr u32 EP_MARK_DETAILS = 7;

// Time: first sum of the block's first adding warp (combine).
constexpr u32 EP_MARK_SUM = 8;

// Time: last sum of the block's first adding warp (combine).
constexpr u32 EP_MARK_SUMS = 9;

// Time: the block is done, except for what only the last block does.
constexpr u32 EP_MARK_DONE = 10;

// Time: rows of all ranks were received. One block only; expert layout: rows that the block's last warp delivers.
constexpr u32 EP_MARK_CAME = 11;

// Time: the launch is over. One block only.
constexpr u32 EP_MARK_OVER = 12;

// What a combine in the expert layout carries between ranks: bf16.
constexpr u32 EP_WIRE_BF16 = 0;

// The same: LogFMT-10, ten bits for each element and a scale for each 128.
constexpr u32 EP_WIRE_LOGFMT10 = 1;

// The same: e4m3, with a power of two for each 128 elements.
constexpr u32 EP_WIRE_FP8 = 2;

// Bits of a row's number in `EpHandle::sent_rows`.
constexpr u32 EP_SENT_BITS = 26;

// Entries of the ring of commands.
constexpr u32 EP_COMMANDS = 4096;

// Laps of the ring that are told apart: a command's are numbered from 1.
constexpr u64 EP_LAPS = 65535;

// Command: these bf16 rows of a dispatch are complete.
constexpr u32 EP_COMMAND_ROWS_BF16 = 1;

// As EP_COMMAND_ROWS_BF16: e4m3 with scales of four bytes.
constexpr u32 EP_COMMAND_ROWS_FP8 = 2;

// As EP_COMMAND_ROWS_BF16: e4m3 with scales of one byte.
constexpr u32 EP_COMMAND_ROWS_UE8M0 = 3;

// Command: these rows of a combine are complete.
constexpr u32 EP_COMMAND_BACK = 4;

// Command: these words of a dispatch are complete, except for their tags.
constexpr u32 EP_COMMAND_TABLE = 5;

// Command: these words of a combine are complete, except for their tags.
constexpr u32 EP_COMMAND_WEIGHTS = 6;

// Command without data: number of a control word << 32 | its new value, without its tag.
constexpr u32 EP_COMMAND_WORD = 7;

// Command without data: number of a control word whose new value is the epoch.
constexpr u32 EP_COMMAND_TAKEN = 8;

// As EP_COMMAND_BACK: these lack ranks of the node that returns them. Their flags get the top bit.
constexpr u32 EP_COMMAND_BACK_LESS = 9;

// In place of a row number: no row.
constexpr u32 EP_NOWHERE = 4294967295;

// Threads of the only block of `layout`.
constexpr u32 EP_LAYOUT_THREADS = 1024;

// Arguments of `layout`, which counts the tokens of a batch by where they go.
struct EpLayoutArgs {
    // Expert ids i64[tokens][topk]; those that are none of the experts count as none.
    u64 topk_idx;
    // Items from one token's ids to the next one's.
    u64 stride;
    // Becomes the tokens of each rank, i32[ranks].
    u64 out_ranks;
    // Becomes the selections of each expert, i32[experts].
    u64 out_experts;
    // Becomes 1 where a token goes to a rank, else 0, u8[tokens][ranks].
    u64 out_in_rank;
    // Number of tokens.
    u32 tokens;
    // Selections of a token.
    u32 topk;
    // Number of experts, a multiple of that of ranks.
    u32 experts;
    // Number of ranks, at most 64.
    u32 ranks;
};

static_assert(sizeof(EpLayoutArgs) == 56, "EpLayoutArgs");

// Offsets and strides of everything in a heap; the same on every rank. A heap has what only its own rank accesses,
// then an inbox for each source rank, which alone writes it, then results of the rank layout. What is
// double-buffered alternates by epoch.
struct EpHeap {
    // An `EpState`, accessed only by this rank.
    u64 state;
    // u32[R]: not 0 for a masked rank. Set by kernels at a timeout and by the host at any time; cleared by the
    // host only, between launches.
    u64 masks;
    // u64[R]: longest wait for each rank in the current operation, in nanoseconds.
    u64 waited;
    // u64[2][R]: of dispatch and of combine, up to which epoch this rank's slots at each rank were free when a kernel
    // last looked. Only of ranks whose words are in memory of the host: there the loads of all blocks take turns.
    u64 taken_seen;
    // u64[R]: current dispatch, epoch << 32 | flags << 24 | tokens of each source (0 for a masked one).
    u64 plan_tokens;
    // Expert layout: u64[R][M][K], current dispatch, epoch << 32 | row of each selection, or EP_NOWHERE. Slots:
    // u64[R][M], of each token.
    u64 plan_rows;
    // Rank layout: an `EpScan`.
    u64 scan;
    // u32[R]: current dispatch, region at each rank; EP_NOWHERE for a rank that timed out.
    u64 scan_regions;
    // u32[EP_RANK_BLOCKS][R]: current dispatch, rows of each block's tokens at each rank.
    u64 scan_counts;
    // u32[E]: selections of each expert; 0 between launches.
    u64 scan_experts;
    // Inboxes: [R], or fewer where some ranks write elsewhere; the table of inboxes has the address for each rank.
    u64 inboxes;
    // From one inbox to the next.
    u64 inbox_stride;
    // `inbox_stride` if there is an inbox for each rank, in order; else 0. Loads that do not wait for the table of
    // inboxes go by it.
    u64 guess_stride;
    // Within an inbox: control words, u64: a line of EP_LINE bytes.
    u64 words;
    // Within an inbox, expert layout and slots: [EP_DEPTH] tables: u64[M][K], epoch << 32 | local expert + 1 of each
    // selection (0: not on this rank); and, if weights were given, u64[M][K], epoch << 32 | bits of the f32 weight of
    // those on this rank.
    u64 tables;
    // From one table to the next.
    u64 table_stride;
    // Within a table: weights.
    u64 table_weights;
    // Within an inbox, expert layout and slots: [EP_DEPTH][M] rows. A row is its pieces of `piece_stride` bytes; a piece
    // is elements and then their scales.
    u64 rows;
    // From one row to the next.
    u64 row_stride;
    // From one piece of a row to the next.
    u64 piece_stride;
    // Within an inbox: u64[EP_DEPTH][M][pieces]: epoch of the dispatch whose piece is there, stored with release order
    // after it.
    u64 row_flags;
    // Within an inbox: [EP_DEPTH] slots of a combine's bf16 rows: one per token, or min(K, El) per token without
    // prereduction (expert layout only).
    u64 back;
    // From one slot to the next.
    u64 back_slot;
    // From one row to the next.
    u64 back_stride;
    // Within an inbox, for each slot: u64[rows of a slot][pieces]: epoch of the combine whose piece is there, stored
    // with release order after it.
    u64 back_flags;
    // From one slot's flags to the next's.
    u64 back_flags_slot;
    // From a flag of `row_flags` and `back_flags` to the next: 8, or a line where they may be in the host's memory.
    u64 flag_stride;
    // Within an inbox, expert layout: u64[EP_DEPTH][M][K], weights of a combine: epoch << 32 | bits of an f32. Slots:
    // those that are returned.
    u64 back_weights;
    // From those of one epoch to those of the next.
    u64 back_weights_stride;
    // Within an inbox, rank layout without slots: f32[EP_DEPTH][M][K], returned weights.
    u64 back_topk;
    // Within an inbox, rank layout without slots: [EP_DEPTH] announcements: an `EpAnnounceHeader`, rows u32[R] (to every
    // rank), counts u32[El].
    u64 announces;
    // From one announcement to the next.
    u64 announce_stride;
    // Within an announcement: rows.
    u64 announce_rows;
    // Within an announcement: selections of each expert of the receiver.
    u64 announce_counts;
    // Rank layout: regions: rows [R * M][row bytes].
    u64 regions;
    // From one region to the next.
    u64 region_stride;
    // Within a region: scales, [R * M][H / 128], contiguous.
    u64 region_scales;
    // Within a region: i64[R * M][K].
    u64 region_idx;
    // Within a region: f32[R * M][K].
    u64 region_weights;
    // Within a region: i32[R * M], each row's token at its source.
    u64 region_source;
    // Bytes of the heap.
    u64 bytes;
};

static_assert(sizeof(EpHeap) == 328, "EpHeap");

// State of a rank's kernels between launches: epochs of the last operations, and counters that are 0 between
// launches.
struct EpState {
    // Epoch of the last dispatch announced.
    u64 dispatch_begun;
    // Epoch of the last dispatch sent.
    u64 dispatch_sent;
    // Epoch of the last dispatch received.
    u64 dispatch_ended;
    // Epoch of the last combine begun.
    u64 combine_begun;
    // Epoch of the last combine sent.
    u64 combine_sent;
    // Epoch of the last combine received.
    u64 combine_ended;
    // Number of faults reported so far.
    u64 faults;
    // Blocks of a dispatch launch that have finished, one counter for each value of `EpCommon::phases`: a launch
    // that only sends may overlap one that only receives. Kernels count up; the last block of a launch resets its
    // counter to 0.
    u64 dispatch_blocks[8];
    // The same for combine.
    u64 combine_blocks[8];
};

static_assert(sizeof(EpState) == 184, "EpState");

// Progress of the blocks of a dispatch in the rank layout.
struct EpScan {
    // Blocks that have counted their rows; 0 between launches.
    u64 arrived;
    // Epoch of the last dispatch whose rows all blocks have counted.
    u64 scanned;
    // Epoch of the last dispatch whose row destinations are known.
    u64 planned;
    // Blocks that have numbered their tokens' rows; 0 between launches.
    u64 numbered;
    // Tokens claimed by warps of a dispatch, beyond each warp's first; 0 between launches.
    u64 dispatch_taken;
    // The same for the turns of a combine.
    u64 combine_taken;
};

static_assert(sizeof(EpScan) == 48, "EpScan");

// The head of an announcement.
struct EpAnnounceHeader {
    // Region of the announcing rank into which rows for it are to be written.
    u32 region;
    // Its tokens.
    u32 tokens;
    // EP_WEIGHTED, EP_CACHED.
    u32 flags;
    // `EpDispatchArgs::host_word` of the announcing rank.
    u32 host_word;
};

static_assert(sizeof(EpAnnounceHeader) == 16, "EpAnnounceHeader");

// An entry of the ring of faults, in pinned host memory.
struct EpFault {
    // Sequence number of the fault, from 1, stored last with release order. Its entry is (number - 1) % entries.
    u64 number;
    // Epoch of the dispatch or combine.
    u64 epoch;
    // Last value of the word that was waited for.
    u64 seen;
    // The rank that timed out.
    u32 rank;
    // EP_STAGE_.
    u32 stage;
};

static_assert(sizeof(EpFault) == 32, "EpFault");

// A ring of commands to the proxy, in device memory; the commands are in pinned memory. There is a power of two of
// rings, one after the other, each read by a thread; blocks share them out.
struct EpRing {
    // Bits of the ranks to which the proxy sends, of more than 64 ranks the address of their words, or 0; the same in
    // all rings.
    u64 far;
    // Number of the last ring; the same in all rings.
    u64 last;
    // Number of commands so far.
    u64 appended;
    // Number of commands that the proxy had read when a kernel last looked.
    u64 read_seen;
    // Address of the commands, [EP_COMMANDS] of 16 bytes.
    u64 commands;
    // Address of the number of commands that the proxy has read, u64.
    u64 read;
};

static_assert(sizeof(EpRing) == 48, "EpRing");

// Offsets of everything in a handle.
struct EpHandle {
    // An `EpHandleHeader`.
    u64 header;
    // u32[R]: tokens of each source, 0 for a masked one.
    u64 tokens;
    // u32[R]: flags of each source.
    u64 flags;
    // i32[M][K]: experts of this rank's own tokens; -1 for none.
    u64 sent;
    // f32[M][K]: their weights, if they were given.
    u64 sent_weights;
    // Expert layout: u32[R][M][K], the row of each selection, or EP_NOWHERE. Slots: u32[R][M], the row of each
    // token.
    u64 routes;
    // Expert layout: u8[R][M], number of a token's selections on this rank. Slots: 1 for a token with any.
    u64 present;
    // Expert layout: f32[R][M][K], received weights.
    u64 weights;
    // Rank layout without slots: u32[M][R], row of each own token at each rank, counted from this rank's first there,
    // and << EP_SENT_BITS the position of the token's last selection there; or EP_NOWHERE. Once per node: u64[N - 1][M],
    // bits of the ranks of this node that a token of a rank of the same number on another node selects, << 32 | of those
    // to which it was forwarded.
    u64 sent_rows;
    // Rank layout without slots: u32[R], this rank's first row at each rank.
    u64 places;
    // Rank layout: u32[R + 1], the first row of each source, and the end.
    u64 offsets;
    // Rank layout: u32[R * M], each row's token at its source.
    u64 source;
    // Bytes of a handle.
    u64 bytes;
};

static_assert(sizeof(EpHandle) == 104, "EpHandle");

// The head of a handle.
struct EpHandleHeader {
    // Epoch of the dispatch.
    u64 epoch;
    // This rank's tokens.
    u32 tokens;
    // EP_WEIGHTED: they had weights.
    u32 flags;
    // Rank layout without slots: total number of experts that they selected.
    u64 selections;
};

static_assert(sizeof(EpHandleHeader) == 24, "EpHandleHeader");

// Arguments of every launch. The caller of a buffer sets `tokens` (of a dispatch) and `waits`; the buffer sets the
// rest.
struct EpCommon {
    // Where everything is in a heap.
    EpHeap heap;
    // Where everything is in a handle.
    EpHandle parts;
    // Address of this rank's heap.
    u64 base;
    // u64[R] in device memory: address of each rank's heap as mapped here, this rank's own included. Once per node: of a
    // rank of the same number on another node, its inbox here, in pinned memory; `from` has inboxes in the heap for all.
    u64 peers;
    // u64[R] in device memory: address of this rank's inbox at each rank; of one that is not mapped, a copy of that
    // inbox in pinned memory.
    u64 to;
    // u64[R] in device memory: address of each rank's inbox here: in the heap, or in pinned memory.
    u64 from;
    // Address of the first `EpRing`.
    u64 rings;
    // Address of the handle, 128-byte aligned.
    u64 handle;
    // Address of the ring of faults.
    u64 faults;
    // i64[R], to which the longest wait for each rank is added, in nanoseconds; or 0.
    u64 waits;
    // Timeout of each wait for another rank, in nanoseconds.
    u64 limit_ns;
    // This rank.
    u32 rank;
    // Phases that this launch runs: bits EP_ANNOUNCE, EP_SEND, EP_RECEIVE.
    u32 phases;
    // Tokens of this rank.
    u32 tokens;
    // M.
    u32 max_tokens;
};

static_assert(sizeof(EpCommon) == 520, "EpCommon");

// Arguments of a dispatch. Strides count bytes; an address of 0 means that there is no such array. The caller of a
// buffer sets everything up to `host_word`, the buffer what follows.
struct EpDispatchArgs {
    // Arguments of every launch.
    EpCommon common;
    // [tokens][H], bf16, or e4m3 if `x_fp8` is set. Rows are 16-byte aligned.
    u64 x;
    // From one row to the next, a multiple of 16.
    u64 x_stride;
    // Scales of e4m3 rows: f32[tokens][H / 128], or u8 for EP_SCALE 2.
    u64 x_scales;
    // From one token's scales to the next's; from one block's scale to the next's (u8: from four blocks', which
    // are adjacent bytes, to the next four's).
    u64 x_scale_strides[2];
    // Expert ids, [tokens][K], contiguous; -1 for none. Not read if `cached` is set.
    u64 topk_idx;
    // f32[tokens][K], contiguous; or 0.
    u64 topk_weights;
    // Expert layout: [El][R * M][H], bf16 or e4m3, contiguous.
    u64 out_x;
    // Expert layout: scales of `out_x` if it is e4m3.
    u64 out_scales;
    // From one expert's scales to the next's; from one row's to the next's; from one block's to the next's (u8: as
    // in `x_scale_strides`).
    u64 out_scale_strides[3];
    // i32[El]: rows of each expert. Rank layout: rounded up to a multiple of `expert_alignment`.
    u64 out_counts;
    // Expert layout: i64[El][R], first row of each source << 32 | number of its rows.
    u64 out_ranges;
    // Expert layout: i32[El][R * M], each row's token at its source; or 0.
    u64 out_source;
    // Rank layout: i64[R + 1], the first row of each source, and the end.
    u64 out_offsets;
    // i32[El], to which each expert's rows are added, not rounded up; or 0. A cached dispatch adds nothing.
    u64 stats;
    // Rank layout: rows of the caller's result. Rows that were not received get -1 in topk_idx up to here, and
    // more rows than this are reported as a fault (EP_STAGE_ROOM). 0: no such limit.
    u64 max_rows;
    // Rank layout: counts are rounded up to a multiple of this; 0 is 1.
    u32 expert_alignment;
    // Not 0: `x` is e4m3 with `x_scales`.
    u32 x_fp8;
    // Bytes of an expert id: 4 or 8.
    u32 idx_bytes;
    // Rank layout: a number for the hosts of the other ranks, which get it where `host_words` is given. Not
    // EP_NO_REPORT.
    u32 host_word;
    // Rank layout: a pinned u64 that becomes epoch << 32 | rows; or 0.
    u64 count_word;
    // Rank layout: a pinned i32[El] that gets the counts before `count_word` is written; or 0.
    u64 count_host;
    // Rank layout: a pinned u32[R] that gets each rank's `host_word`, EP_NO_REPORT for a rank that timed out, before
    // `count_word` is written; or 0.
    u64 host_words;
    // u64[blocks][EP_MARKS] that gets the times of the launch; or 0. Only kernels compiled with marks read it.
    u64 marks;
    // Rank layout: index of the region that this rank's rows are written to.
    u32 region;
    // Rank layout: not 0: the routing in the handle is repeated.
    u32 cached;
    // Rank layout: KiB of rows that all blocks together keep in flight between load and store; 0 for the default.
    u32 queue;
    // Padding, 0.
    u32 reserved;
};

static_assert(sizeof(EpDispatchArgs) == 728, "EpDispatchArgs");

// Arguments of a combine. Strides count bytes; an address of 0 means that there is no such array. The caller of a
// buffer sets everything up to `out_weights`, and `wire`, the buffer the rest.
struct EpCombineArgs {
    // Arguments of every launch.
    EpCommon common;
    // The experts' outputs, bf16, 16-byte aligned: [El][R * M][H], or [rows][H] in the rank layout.
    u64 y;
    // From one row to the next, a multiple of 16.
    u64 y_stride;
    // Rank layout: rows of `y`, if more may have been received than the dispatch's `max_rows`: the missing ones
    // count as zeros. 0: as many as were received.
    u64 y_rows;
    // Rank layout: f32[rows][K] that are sent back with the rows; or 0.
    u64 y_weights;
    // Expert layout: f32[tokens][K], contiguous, unless weights were sent with the dispatch; or 0.
    u64 topk_weights;
    // bf16[tokens][H], contiguous, 16-byte aligned, that are added to the sums; or 0.
    u64 bias[2];
    // bf16[tokens][H], 16-byte aligned: the sums.
    u64 out;
    // From one row to the next, a multiple of 16.
    u64 out_stride;
    // Rank layout: f32[tokens][K], contiguous, the sums of `y_weights`; or 0.
    u64 out_weights;
    // u64[blocks][EP_MARKS] that gets the times of the launch; or 0. Only kernels compiled with marks read it.
    u64 marks;
    // Rank layout: blocks that send in a launch that sends and receives; 0: every block does both.
    u32 senders;
    // Rank layout: KiB of rows that all blocks together keep in flight between load and store; 0 for the default.
    u32 queue;
    // EP_WIRE_, the same on all ranks: which kernel is launched. EP_WIRE_BF16 in the rank layout.
    u32 wire;
    // Padding, 0.
    u32 reserved;
};

static_assert(sizeof(EpCombineArgs) == 624, "EpCombineArgs");
