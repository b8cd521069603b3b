//! Nodes of ranks where rows go once to each node: docs/design/once-per-node.md.

use crossrail_types::{Error, ErrorKind, Result};

use super::{EP_DEPTH, EpHeap};

/// Lanes of a warp, each of which has a rank of a node, or a node.
const LANES: u32 = 32;

/// Nodes of equally many ranks with adjacent numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nodes {
    ranks: u32,
    /// Ranks of each; 0: rows go once to each rank.
    node: u32,
}

impl Nodes {
    /// Of `ranks` ranks in nodes of `node`; 0: rows go once to each rank.
    pub(super) fn new(ranks: u32, node: u32) -> Nodes {
        Nodes { ranks, node }
    }

    /// Checks that kernels can send rows once to each node, if they are to. `sums`: what returns from a rank is a sum;
    /// `inboxes`: of a heap.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] naming the limit.
    pub(super) fn check(self, sums: bool, inboxes: u32) -> Result<()> {
        let Nodes { ranks, node } = self;
        let wrong = |text: String| Err(Error::new(ErrorKind::Usage, "ExpertBuffer", text));
        if node == 0 {
            return Ok(());
        }
        if node > LANES || !ranks.is_multiple_of(node) || !(2..=LANES + 1).contains(&(ranks / node)) {
            let limit = format!("nodes of up to {LANES} ranks, from 2 to {} of them", LANES + 1);
            return wrong(format!("{ranks} ranks in nodes of {node}: rows go once to {limit}"));
        }
        if !sums {
            return wrong("rows that go once to each node need prereduction in the expert layout".into());
        }
        if inboxes != ranks {
            return wrong("rows that go once to each node need an inbox for each rank".into());
        }
        Ok(())
    }

    /// Ranks of other nodes that have a rank's number there; 0 if rows go once to each rank.
    pub fn column(self) -> u32 {
        self.ranks.checked_div(self.node).map_or(0, |nodes| nodes - 1)
    }

    /// The gateways between `me` and `rank`: the rank on the node of `rank`, and that on the node of `me`. `None` for ranks of
    /// one node, and if rows go once to each rank.
    pub fn gateways(self, me: u32, rank: u32) -> Option<[u32; 2]> {
        let node = self.node;
        let (mine, theirs) = (me.checked_div(node)?, rank.checked_div(node)?);
        (mine != theirs).then(|| [theirs * node + me % node, mine * node + rank % node])
    }

    /// Ranks whose inboxes here lie in pinned memory; `inboxes`: of a heap.
    pub fn far(self, inboxes: u32) -> u32 {
        if self.node > 0 { self.column() } else { self.ranks - inboxes }
    }

    /// Bytes of the area after the inboxes, with sums of the ranks of a node for others: rows, flags, and, if they are
    /// `weighted`, weights, each by writer, parity, and node of the token's rank.
    pub(super) fn area(self, heap: &EpHeap, weighted: bool) -> u64 {
        let weights = if weighted { heap.back_weights_stride } else { 0 };
        u64::from(self.node) * self.slots() * (heap.back_slot + heap.back_flags_slot + weights)
    }

    /// Offsets and lengths of words in that area, of rank `writer` of the node, that would be read as new once it connects
    /// again.
    pub(super) fn stale(self, heap: &EpHeap, writer: u32, weighted: bool) -> Vec<[u64; 2]> {
        let (slots, writer) = (self.slots(), u64::from(writer));
        let flags = heap.inbox(self.ranks) + u64::from(self.node) * slots * heap.back_slot;
        let weights = flags + u64::from(self.node) * slots * heap.back_flags_slot;
        let part = |at: u64, stride: u64| [at + writer * slots * stride, slots * stride];
        let weights = weighted.then(|| part(weights, heap.back_weights_stride));
        [part(flags, heap.back_flags_slot)].into_iter().chain(weights).collect()
    }

    /// Slots of each writer in that area.
    fn slots(self) -> u64 {
        u64::from(EP_DEPTH) * u64::from(self.column())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Payload, Shape, Tuning, nodes_of};
    use super::*;

    #[test]
    fn rows_that_go_once_to_each_node_pass_the_ranks_of_equal_number() {
        let tuning = Tuning { node: 4, ..Tuning::USUAL };
        let shape = Shape {
            hidden: 7168,
            topk: 8,
            experts: 288,
            ranks: 12,
            max_tokens: 128,
            payload: Payload::Bf16,
            prereduce: true,
            expert_layout: true,
            rank_layout: false,
            regions: 0,
            tuning,
        };
        shape.check().unwrap();
        let nodes = nodes_of(&shape);
        assert_eq!((nodes.column(), nodes.far(12)), (2, 2));
        assert_eq!(nodes.gateways(1, 3), None);
        assert_eq!(nodes.gateways(1, 6), Some([5, 2]));
        assert_eq!(nodes.gateways(1, 9), Some([9, 1]));
        assert_eq!(nodes_of(&Shape { tuning: Tuning::USUAL, ..shape }).gateways(1, 9), None);
        let sum: u64 = shape.kinds().iter().map(|(_, bytes)| bytes).sum();
        assert_eq!(sum, shape.heap_bytes());
        // Of the rank layout, weights return with rows.
        let rank = Shape { rank_layout: true, regions: 1, ..shape };
        rank.check().unwrap();
        assert!(rank.slotted());
        let area = |shape: &Shape| shape.kinds().iter().find(|kind| kind.0 == "sums for other nodes").unwrap().1;
        assert_eq!(area(&rank) - area(&shape), 4 * 2 * 2 * rank.heap().back_weights_stride);
        for (shape, words) in [(shape, 1), (rank, 2)] {
            let heap = shape.heap();
            let (first, last) = (heap.inbox(12), heap.inbox(12) + area(&shape));
            let mut spans: Vec<_> =
                (0..4).flat_map(|rank| shape.stale_ranges(rank)).filter(|span| span.at >= first).collect();
            spans.sort_unstable_by_key(|span| span.at);
            assert!(spans.len() == 4 * words && spans.windows(2).all(|pair| pair[0].at + pair[0].len == pair[1].at));
            assert_eq!(spans.last().map(|span| span.at + span.len), Some(last));
        }
        for (wrong, text) in [
            (Shape { ranks: 10, experts: 280, ..shape }, "10 ranks in nodes of 4"),
            (Shape { ranks: 4, ..shape }, "4 ranks in nodes of 4"),
            (Shape { prereduce: false, ..shape }, "prereduction in the expert layout"),
            (Shape { tuning: Tuning { inboxes: 4, ..tuning }, ..shape }, "an inbox for each rank"),
        ] {
            let error = wrong.check().unwrap_err();
            assert!(error.kind == ErrorKind::Usage && error.detail.contains(text), "{error}");
        }
    }
}
