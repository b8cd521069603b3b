//! Expert parallelism on GPUs: dispatch and combine over mapped peer memory.
//!
//! Each rank has a heap in its GPU's memory, which every other rank maps ([`Shape::heap`] says what lies where); kernels
//! write straight into each other's. Nothing is zeroed between operations: words and flags hold the numbers of
//! operations (epochs, from 1), and slots alternate. A heap is all zeros when ranks connect.

mod args;
mod commands;
mod epochs;
mod launch;
mod layout_kernel;
mod links;
mod nodes;
mod rank;
mod report;
mod shape;

pub use args::{
    EP_ANNOUNCE, EP_CACHED, EP_COMMAND_BACK, EP_COMMAND_BACK_LESS, EP_COMMAND_ROWS_BF16, EP_COMMAND_ROWS_FP8,
    EP_COMMAND_ROWS_UE8M0, EP_COMMAND_TABLE, EP_COMMAND_TAKEN, EP_COMMAND_WEIGHTS, EP_COMMAND_WORD, EP_COMMANDS,
    EP_DEPTH, EP_FAULTS, EP_LAPS, EP_LAYOUT_THREADS, EP_LINE, EP_MARK_ANNOUNCED, EP_MARK_BEGUN, EP_MARK_CAME,
    EP_MARK_COUNTED, EP_MARK_DETAILS, EP_MARK_DONE, EP_MARK_FIRST, EP_MARK_HEARD, EP_MARK_OVER, EP_MARK_PLANNED,
    EP_MARK_SENT, EP_MARK_SUM, EP_MARK_SUMS, EP_MARKS, EP_NO_REPORT, EP_NOWHERE, EP_RANK_BLOCKS, EP_RECEIVE, EP_SEND,
    EP_SENT_BITS, EP_STAGE_ANNOUNCE, EP_STAGE_BACK_ROW, EP_STAGE_COMBINE_TAKEN, EP_STAGE_DISPATCH_TAKEN,
    EP_STAGE_PLACE, EP_STAGE_ROOM, EP_STAGE_ROW, EP_STAGE_SENT, EP_STAGE_TABLE, EP_STAGE_WEIGHTS, EP_WEIGHTED,
    EP_WIRE_BF16, EP_WIRE_FP8, EP_WIRE_LOGFMT10, EP_WORD_ANNOUNCE, EP_WORD_COMBINE_TAKEN, EP_WORD_DECLINED,
    EP_WORD_DISPATCH_TAKEN, EP_WORD_HELLO, EP_WORD_LOST, EP_WORD_PLACE, EP_WORD_SENT, EP_WORD_TABLE, EpAnnounceHeader,
    EpCombineArgs, EpCommon, EpDispatchArgs, EpFault, EpHandle, EpHandleHeader, EpHeap, EpLayoutArgs, EpRing, EpScan,
    EpState, layout_ep,
};
pub use commands::{Announce, Command, Inbox, Invalid, MOST_COMMAND_BYTES, MOST_INBOX, Overrun, Sequence, tag};
pub use epochs::{Epochs, Span};
pub use launch::{
    EXPERT_COMBINE, EXPERT_COMBINE_FP8, EXPERT_COMBINE_LOGFMT10, EXPERT_DISPATCH, EpKernels, RANK_COMBINE,
    RANK_DISPATCH,
};
pub use layout_kernel::{LAYOUT, LayoutKernel};
pub use links::{LinkRows, RankRows, Rows, Way};
pub use nodes::Nodes;
pub use report::stage_name;
pub use shape::{
    Layout, MOST_GRANTED_RANKS, MOST_HIDDEN, MOST_LOCAL_EXPERTS, MOST_RANKS, MOST_TOKENS, MOST_TOPK, Payload, Scale,
    Shape, Tuning, faults_of, nodes_of,
};
