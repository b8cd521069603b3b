//! Four ranks as two nodes of two: rows to the other node go through memory of the hosts.

use crossrail_ep_cuda::{Layout, LinkKind, Payload};

use crate::alone;
use crate::rank::{Case, F32, Rank, on_ranks};
use crate::rounds::all_ways;
use crate::steady;

fn two_nodes(layout: Layout, payload: Payload) -> Case {
    let prereduce = payload == Payload::Bf16;
    Case { nodes: 2, prereduce, ..Case::new(layout, payload) }
}

fn kinds(rank: &Rank) {
    for link in rank.buffer.links() {
        let expected = match link.rank {
            other if other == rank.me => LinkKind::Myself,
            other if !rank.case.direct || other / 2 == rank.me / 2 => LinkKind::Heap,
            _ => LinkKind::Network,
        };
        assert_eq!(link.kind, expected, "rank {} to {}", rank.me, link.rank);
    }
}

fn rounds(rank: &Rank) {
    kinds(rank);
    all_ways(rank, 0..6, &[]);
    assert!(rank.buffer.network_bytes() > 0);
}

alone!(two_nodes_in_the_expert_layout, |gpus| on_ranks(&two_nodes(Layout::Expert, Payload::Bf16), gpus, rounds));
alone!(two_nodes_without_prereduction, |gpus| {
    on_ranks(&two_nodes(Layout::Expert, F32), gpus, rounds);
});
alone!(two_nodes_in_the_rank_layout, |gpus| on_ranks(&two_nodes(Layout::Rank, Payload::Bf16), gpus, rounds));

alone!(graphs_between_nodes, |gpus| {
    on_ranks(&two_nodes(Layout::Expert, Payload::Bf16), gpus, steady::expert_graph);
});
alone!(graphs_of_the_rank_layout_between_nodes, |gpus| {
    on_ranks(&two_nodes(Layout::Rank, Payload::Bf16), gpus, steady::rank_graph);
});

// Ranks of one node, whose GPUs must not reach each other's memory.
alone!(gpus_that_do_not_reach_each_other, |gpus| {
    let case = Case { direct: false, ..Case::new(Layout::Rank, F32) };
    on_ranks(&case, gpus, |rank| {
        kinds(rank);
        all_ways(rank, 0..3, &[]);
        // Through memory of the host that both map.
        assert_eq!(rank.buffer.network_bytes(), 0);
    });
});
