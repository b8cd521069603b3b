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

    /// Checks that kernels can send rows once to each node, if they are to. `fits`: for the expert layout alone, with
    /// prereduction; `inboxes`: of a heap.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] naming the limit.
    pub(super) fn check(self, fits: bool, inboxes: u32) -> Result<()> {
        let Nodes { ranks, node } = self;
        let wrong = |text: String| Err(Error::new(ErrorKind::Usage, "ExpertBuffer", text));
        if node == 0 {
            return Ok(());
        }
        if node > LANES || !ranks.is_multiple_of(node) || !(2..=LANES + 1).contains(&(ranks / node)) {
            let limit = format!("nodes of up to {LANES} ranks, from 2 to {} of them", LANES + 1);
            return wrong(format!("{ranks} ranks in nodes of {node}: rows go once to {limit}"));
        }
        if !fits {
            return wrong("rows go once to each node in the expert layout alone, with prereduction".into());
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

    /// Bytes of the area after the inboxes, with sums of the ranks of a node for others: rows and flags, by writer, parity,
    /// and node of the token's rank.
    pub(super) fn area(self, heap: &EpHeap) -> u64 {
        let slots = u64::from(self.node) * u64::from(EP_DEPTH) * u64::from(self.column());
        slots * (heap.back_slot + heap.back_flags_slot)
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
        for (wrong, text) in [
            (Shape { ranks: 10, experts: 280, ..shape }, "10 ranks in nodes of 4"),
            (Shape { ranks: 4, ..shape }, "4 ranks in nodes of 4"),
            (Shape { prereduce: false, ..shape }, "in the expert layout alone, with prereduction"),
            (Shape { rank_layout: true, regions: 1, ..shape }, "in the expert layout alone"),
            (Shape { tuning: Tuning { inboxes: 4, ..tuning }, ..shape }, "an inbox for each rank"),
        ] {
            let error = wrong.check().unwrap_err();
            assert!(error.kind == ErrorKind::Usage && error.detail.contains(text), "{error}");
        }
    }
}
