//! Epochs as the host writes them into heaps between operations, when ranks connect, leave, and reconnect.
//!
//! When a rank connects, it raises its epochs to the highest of all ranks ([`Epochs::bytes`], at `EpHeap::state`),
//! clears what an earlier connection of the peer left ([`Shape::stale_ranges`]), and marks all earlier operations as
//! released ([`EpHeap::taken`], [`Epochs::words`]). A rank whose epochs were behind does the last for every connected
//! rank, itself included. Masks and the table of heaps follow.

use std::mem::offset_of;

use super::{EP_DEPTH, EP_LINE, EP_WORD_COMBINE_TAKEN, EP_WORD_DISPATCH_TAKEN, EpHeap, EpState, Shape, nodes_of};

/// A range of a heap, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// From the start of the heap.
    pub at: u64,
    /// Its length.
    pub len: u64,
}

/// Epochs of the last dispatch and the last combine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Epochs {
    /// The last dispatch.
    pub dispatch: u64,
    /// The last combine.
    pub combine: u64,
}

/// Numbers at the start of an `EpState`: begun, sent, ended, of dispatch and of combine.
const NUMBERS: usize = 6;
const _: () = assert!(
    offset_of!(EpState, dispatch_begun) == 0
        && offset_of!(EpState, dispatch_sent) == 8
        && offset_of!(EpState, dispatch_ended) == 16
        && offset_of!(EpState, combine_begun) == 24
        && offset_of!(EpState, combine_sent) == 32
        && offset_of!(EpState, combine_ended) == 40
        && EP_WORD_COMBINE_TAKEN == EP_WORD_DISPATCH_TAKEN + 1
);

impl Epochs {
    /// Bytes of what the host reads and writes of an `EpState`.
    pub const BYTES: usize = 8 * NUMBERS;

    /// Of the first bytes of an `EpState`: the last operations that were begun, and the last that were sent.
    pub fn of(bytes: &[u8; Epochs::BYTES]) -> [Epochs; 2] {
        let words = bytes.as_chunks::<8>().0;
        let number = |at: usize| words.get(at).map_or(0, |word| u64::from_le_bytes(*word));
        [0, 1].map(|at| Epochs { dispatch: number(at), combine: number(at + NUMBERS / 2) })
    }

    /// The later of each.
    #[must_use]
    pub fn max(self, other: Epochs) -> Epochs {
        Epochs { dispatch: self.dispatch.max(other.dispatch), combine: self.combine.max(other.combine) }
    }

    /// The first bytes of an `EpState` whose operations so far are these.
    pub fn bytes(self) -> Vec<u8> {
        [[self.dispatch; 3], [self.combine; 3]].concat().iter().flat_map(|number| number.to_le_bytes()).collect()
    }

    /// Control words that mark these operations as released; stored at [`EpHeap::taken`].
    pub fn words(self) -> [u8; 16] {
        let mut words = [0; 16];
        words[..8].copy_from_slice(&self.dispatch.to_le_bytes());
        words[8..].copy_from_slice(&self.combine.to_le_bytes());
        words
    }
}

impl EpHeap {
    /// The line of words of inbox `number`.
    pub fn line(&self, number: u32) -> Span {
        Span { at: self.inbox(number) + self.words, len: EP_LINE }
    }

    /// Offset of inbox `number`.
    pub fn inbox(&self, number: u32) -> u64 {
        self.inboxes + u64::from(number) * self.inbox_stride
    }

    /// Offset of the control words with which the source of inbox `number` releases slots.
    pub fn taken(&self, number: u32) -> u64 {
        self.line(number).at + 8 * u64::from(EP_WORD_DISPATCH_TAKEN)
    }
}

impl Shape {
    /// Ranges in which stale data of the source of inbox `number` would be read as new: its control words, routing tables,
    /// row flags and weights. Zeroed when it connects.
    pub fn stale_ranges(&self, number: u32) -> Vec<Span> {
        let heap = self.heap();
        let flags = u64::from(self.max_tokens) * u64::from(self.pieces()) * heap.flag_stride;
        let mut spans = vec![heap.line(number)];
        for parity in 0..u64::from(EP_DEPTH) {
            let part = |at: u64, len: u64| Span { at: heap.inbox(number) + at + parity * len, len };
            if self.has_slots() {
                spans.push(part(heap.tables, heap.table_stride));
                spans.push(part(heap.row_flags, flags));
                spans.push(part(heap.back_weights, heap.back_weights_stride));
            }
            spans.push(part(heap.back_flags, heap.back_flags_slot));
        }
        if let Some(writer) = number.checked_rem(self.tuning.node) {
            // Of the sums that it leaves for others, if it is of this node.
            let stale = nodes_of(self).stale(&heap, writer, self.slotted());
            spans.extend(stale.into_iter().map(|[at, len]| Span { at, len }));
        }
        spans
    }
}
