//! Four ranks as two nodes of two: rows to the other node go through the engine.

use crossrail_ep_cuda::{Layout, LinkKind, Payload, Split};
use crossrail_types::ErrorKind;

use crate::alone;
use crate::rank::{Case, F32, Rank, on_ranks};
use crate::rounds::{Way, World, all_ways, expert_args, put_dispatch_expert};

fn two_nodes(layout: Layout, payload: Payload) -> Case {
    let prereduce = payload == Payload::Bf16;
    Case { nodes: 2, prereduce, ..Case::new(layout, payload) }
}

fn kinds(rank: &Rank) {
    for link in rank.buffer.links() {
        let expected = match link.rank {
            other if other == rank.me => LinkKind::Myself,
            other if rank.case.direct && other / 2 == rank.me / 2 => LinkKind::Heap,
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

// Ranks of one node, whose GPUs must not reach each other's memory.
alone!(gpus_that_do_not_reach_each_other, |gpus| {
    let case = Case { direct: false, ..Case::new(Layout::Rank, F32) };
    on_ranks(&case, gpus, |rank| {
        kinds(rank);
        all_ways(rank, 0..3, &[]);
        assert!(rank.buffer.network_bytes() > 0);
    });
});

alone!(ranks_of_other_nodes_are_not_captured, |gpus| {
    on_ranks(&two_nodes(Layout::Expert, Payload::Bf16), gpus, |rank| {
        let (gpu, way) = (&rank.gpu, Way { early: true, ..Way::default() });
        let world = World::new(rank.shape(), 5, &way);
        let args = expert_args(gpu, &rank.shape(), world.input(gpu, rank.me as usize, &way));
        gpu.wait();
        let mut refused = None;
        let captured = gpu.stream.record(|stream| {
            refused = put_dispatch_expert(&rank.buffer, stream, &args, Split::Whole).err();
            Ok(())
        });
        captured.expect("an empty graph");
        let refused = refused.expect("the host has to carry rows");
        assert!(refused.kind == ErrorKind::Usage && refused.detail.contains("cannot do so in a graph"), "{refused}");
        all_ways(rank, 0..1, &[]);
    });
});
