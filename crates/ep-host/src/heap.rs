//! The layout of a rank's heap. Every rank of the node maps it; ranks of other nodes write it through the engine.
//!
//! ```text
//! doorbell                  peers ring it after a write
//! control words[ranks]      messages of each peer: one writer each
//! dispatch[2][ranks]        a peer's slot: header, metadata, rows, scales; by the parity of the dispatch
//! combine[2][ranks]         a peer's slot: header of the rows that it returns, header and weights to apply to its own
//!                           rows, returned rows; by the parity of the combine
//! rank rows[2]              rank layout: rows and scales, in the places that this rank granted
//! ```
//!
//! A slot has one writer, so a late rank can corrupt nothing but its own slot. Nothing is zeroed between operations:
//! control words hold sequence numbers, which only grow, and slots are double-buffered.
#![allow(unsafe_code)]

use std::ptr::NonNull;

use crossrail_ep::{Config, Layout};
use crossrail_transport::{Doorbell, Word};
use crossrail_types::{Error, ErrorKind};

/// Bytes of a header's text: all that the other fields leave.
const TEXT: usize = 216;
const PAGE: usize = 4096;

/// The messages of one peer: the sequence number of the last of each [`Message`](crate::peer::Message), by the parity of
/// its operation, since two may be in flight. All zeros when the two connect.
#[repr(C, align(128))]
pub(crate) struct ControlWords(pub(crate) [[Word; 2]; MESSAGES]);

/// Kinds of messages.
pub(crate) const MESSAGES: usize = 8;

/// The head of a slot.
#[repr(C, align(64))]
pub(crate) struct Header {
    /// Sequence number of the operation.
    pub(crate) operation: u64,
    /// Rows in the slot, or to follow.
    pub(crate) rows: u32,
    /// Bits of [`flags`].
    pub(crate) flags: u32,
    /// Number of row writes since the connection, these rows included; 0 within a node.
    pub(crate) writes: u64,
    /// Between nodes: tag of the operation and number of the write, see `stamp`.
    pub(crate) stamp: u64,
    /// Bytes of the text.
    pub(crate) text_len: u32,
    pub(crate) unused: u32,
    /// Why the operation failed at its sender.
    pub(crate) text: [u8; TEXT],
}

/// Bits of a header.
pub(crate) mod flags {
    /// The call failed at its sender: the text is the reason; there are no rows.
    pub(crate) const FAILED: u32 = 1;
    /// The metadata has weights.
    pub(crate) const WEIGHTS: u32 = 2;
    /// The dispatch uses the rank layout.
    pub(crate) const RANK_LAYOUT: u32 = 4;
    /// The dispatch repeats the routing of an earlier one; there is no metadata.
    pub(crate) const CACHED: u32 = 8;
    /// With [`FAILED`]: a rank was lost.
    pub(crate) const LOST: u32 = 16;
}

impl Header {
    /// A header without text.
    pub(crate) fn new(operation: u64, rows: usize, flags: u32) -> Header {
        Header { operation, rows: rows as u32, flags, writes: 0, stamp: 0, text_len: 0, unused: 0, text: [0; TEXT] }
    }

    /// A header with the reason why there are no rows.
    pub(crate) fn failed(operation: u64, error: &Error) -> Header {
        let lost = if matches!(error.kind, ErrorKind::PeerDead | ErrorKind::Timeout) { flags::LOST } else { 0 };
        let mut header = Header::new(operation, 0, flags::FAILED | lost);
        let why = error.detail.as_str();
        let mut len = why.len().min(TEXT);
        while !why.is_char_boundary(len) {
            len -= 1;
        }
        header.text[..len].copy_from_slice(&why.as_bytes()[..len]);
        header.text_len = len as u32;
        header
    }

    /// Why `operation` failed at its sender, rank `from`, if it did.
    pub(crate) fn failure(&self, from: usize, operation: &'static str) -> Option<Error> {
        if self.flags & flags::FAILED == 0 {
            return None;
        }
        let why = String::from_utf8_lossy(&self.text[..(self.text_len as usize).min(TEXT)]);
        Some(match self.flags & flags::LOST != 0 {
            true => Error::new(ErrorKind::PeerDead, operation, format!("rank {from} cannot take part: {why}")),
            false => Error::new(ErrorKind::Usage, operation, format!("the call of rank {from} failed: {why}"))
                .with_hint("nothing was delivered; the next operation works"),
        })
    }
}

/// A header's bytes. The text ends with them: bytes of padding would be sent as they are on the stack.
pub(crate) const HEADER: usize = std::mem::offset_of!(Header, text) + TEXT;
const _: () = assert!(HEADER == 256 && size_of::<ControlWords>() == 128 && size_of::<Doorbell>() == 128);

/// Offsets in a heap, in bytes; equal on every rank.
#[derive(Clone, Debug)]
pub(crate) struct Areas {
    ranks: usize,
    /// Bytes of one row's metadata: token, selections, experts, weights.
    pub(crate) meta_stride: usize,
    /// Bytes of one row's elements.
    pub(crate) row: usize,
    /// Bytes of one row's scales.
    pub(crate) scale: usize,
    /// Bytes of one bf16 row.
    pub(crate) wide: usize,
    slot_rows: usize,
    slot_scales: usize,
    slot: usize,
    back_rows: usize,
    back: usize,
    dispatch: usize,
    combine: usize,
    rank: usize,
    rank_scales: usize,
    rank_area: usize,
    /// Bytes of a heap.
    pub(crate) heap: usize,
    expert: u64,
    staging: u64,
}

impl Areas {
    pub(crate) fn new(config: &Config) -> Areas {
        let (ranks, tokens) = (config.ranks as usize, config.max_tokens);
        let row = config.payload.row_bytes(config.hidden);
        let scale = config.payload.scale_bytes(config.hidden);
        let wide = 2 * config.hidden;
        let meta_stride = (8 + config.topk * (2 + 4)).next_multiple_of(8);
        let slot_rows = line(HEADER + tokens * meta_stride);
        let slot_scales = line(slot_rows + tokens * row);
        let slot = page(slot_scales + tokens * scale);
        let back_rows = line(2 * HEADER + tokens * config.topk * 4);
        let rows_back = if config.prereduce { 1 } else { config.most_local() };
        let back = page(back_rows + tokens * rows_back * wide);
        let dispatch = page(size_of::<Doorbell>() + ranks * size_of::<ControlWords>());
        let combine = dispatch + 2 * ranks * slot;
        let rank = combine + 2 * ranks * back;
        let most = if config.has(Layout::Rank) { ranks * tokens } else { 0 };
        let rank_scales = page(most * row);
        let rank_area = rank_scales + page(most * scale);
        let expert = if config.has(Layout::Expert) { 2 * expert_area(config, row, scale) } else { 0 };
        let staging = 2 * (slot + back) as u64;
        Areas {
            ranks,
            meta_stride,
            row,
            scale,
            wide,
            slot_rows,
            slot_scales,
            slot,
            back_rows,
            back,
            dispatch,
            combine,
            rank,
            rank_scales,
            rank_area,
            heap: rank + 2 * rank_area,
            expert,
            staging,
        }
    }

    pub(crate) fn words(&self, peer: usize) -> usize {
        size_of::<Doorbell>() + peer * size_of::<ControlWords>()
    }

    /// The slot that `source` dispatches into.
    pub(crate) fn slot(&self, parity: usize, source: usize) -> usize {
        self.dispatch + (parity * self.ranks + source) * self.slot
    }

    /// Rows within a dispatch slot.
    pub(crate) fn slot_rows(&self) -> usize {
        self.slot_rows
    }

    /// Scales within a dispatch slot.
    pub(crate) fn slot_scales(&self) -> usize {
        self.slot_scales
    }

    /// Bytes of a dispatch slot.
    pub(crate) fn slot_bytes(&self) -> usize {
        self.slot
    }

    /// The slot that `peer` returns rows into, and writes the weights of its own rows into.
    pub(crate) fn back(&self, parity: usize, peer: usize) -> usize {
        self.combine + (parity * self.ranks + peer) * self.back
    }

    /// The header of the weights within a combine slot; the weights follow it.
    pub(crate) fn back_weights(&self) -> usize {
        HEADER
    }

    /// Rows within a combine slot.
    pub(crate) fn back_rows(&self) -> usize {
        self.back_rows
    }

    /// Bytes of a combine slot.
    pub(crate) fn back_bytes(&self) -> usize {
        self.back
    }

    /// Rows of the rank layout.
    pub(crate) fn rank_rows(&self, parity: usize) -> usize {
        self.rank + parity * self.rank_area
    }

    /// Scales of the rank layout.
    pub(crate) fn rank_scales(&self, parity: usize) -> usize {
        self.rank + parity * self.rank_area + self.rank_scales
    }

    pub(crate) fn control_bytes(&self) -> u64 {
        self.dispatch as u64
    }

    pub(crate) fn dispatch_bytes(&self) -> u64 {
        (self.combine - self.dispatch) as u64
    }

    pub(crate) fn combine_bytes(&self) -> u64 {
        (self.rank - self.combine) as u64
    }

    pub(crate) fn rank_bytes(&self) -> u64 {
        (self.heap - self.rank) as u64
    }

    pub(crate) fn expert_bytes(&self) -> u64 {
        self.expert
    }

    /// Per rank of another node.
    pub(crate) fn staging_bytes(&self) -> u64 {
        self.staging
    }
}

/// Bytes of the expert layout's rows and scales, one parity.
pub(crate) fn expert_area(config: &Config, row: usize, scale: usize) -> u64 {
    let rows = (config.local_experts() * config.ranks as usize * config.max_tokens) as u64;
    (rows * row as u64).next_multiple_of(PAGE as u64) + (rows * scale as u64).next_multiple_of(PAGE as u64)
}

fn line(bytes: usize) -> usize {
    bytes.next_multiple_of(128)
}

fn page(bytes: usize) -> usize {
    bytes.next_multiple_of(PAGE)
}

/// A heap as this process sees it: its own, or a peer's that it has mapped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heap(NonNull<u8>);

// SAFETY: an address; its owner keeps the memory mapped. Control words are atomics, slots have one writer at a time.
unsafe impl Send for Heap {}
// SAFETY: as above.
unsafe impl Sync for Heap {}

impl Heap {
    /// # Safety
    /// `ptr` is the page-aligned start of a heap of `areas.heap` bytes, readable and writable as long as the result
    /// is used.
    pub(crate) unsafe fn new(ptr: *mut u8) -> Option<Heap> {
        NonNull::new(ptr).map(Heap)
    }

    /// The address of byte `at`.
    pub(crate) fn at(self, at: usize) -> *mut u8 {
        self.0.as_ptr().wrapping_add(at)
    }

    pub(crate) fn doorbell(&self) -> &Doorbell {
        // SAFETY: a heap begins with a Doorbell, which consists of atomics.
        unsafe { self.0.cast::<Doorbell>().as_ref() }
    }

    pub(crate) fn words(&self, areas: &Areas, peer: usize) -> &ControlWords {
        debug_assert!(peer < areas.ranks);
        // SAFETY: inside the heap and aligned (areas); ControlWords consists of words.
        unsafe { &*self.at(areas.words(peer)).cast::<ControlWords>() }
    }
}
