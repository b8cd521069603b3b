//! Ranks that come, leave, come back, and are masked and taken back; those that stay go on.

use crossrail::CudaState;
use crossrail_ep_cuda::{Layout, LinkKind, Payload};

use crate::alone;
use crate::rank::{Case, LIMIT, Rank, on_ranks, on_ranks_apart};
use crate::rounds::all_ways;
use crate::steady::Recorded;

alone!(ranks_come_and_go_in_the_expert_layout, |gpus| {
    on_ranks_apart(&Case::new(Layout::Expert, Payload::Bf16), gpus, come_and_go);
});
alone!(ranks_come_and_go_in_the_rank_layout, |gpus| {
    on_ranks_apart(&Case::new(Layout::Rank, Payload::Bf16), gpus, come_and_go);
});

#[allow(clippy::needless_pass_by_value)]
fn come_and_go(rank: Rank) {
    let (all, me) = (rank.case.everybody(), rank.me);
    let stays = me != 3;
    if me < 2 {
        rank.timed_connect("2 connect", &[0, 1]);
        all_ways(&rank, 0..3, &[2, 3]);
    }
    rank.meet("two", &all);
    rank.timed_connect("2 more connect", &all);
    all_ways(&rank, 10..13, &[]);

    rank.meet("four", &all);
    let others: &[u32] = if stays { &[3] } else { &[0, 1, 2] };
    rank.timed("1 is disconnected", || rank.buffer.disconnect(others).expect("disconnect"));
    assert_eq!(rank.buffer.connected().len(), if stays { 3 } else { 1 });
    // They do not do the same number of operations apart.
    all_ways(&rank, if stays { 20..23 } else { 20..21 }, if stays { &[3] } else { &[0, 1, 2] });

    rank.meet("three", &all);
    rank.timed_connect("1 connects again", &all);
    all_ways(&rank, 30..33, &[]);

    rank.meet("four again", &all);
    rank.buffer.mask(others).expect("mask");
    assert_eq!(rank.buffer.masked(), others);
    all_ways(&rank, 40..42, if stays { &[3] } else { &[0, 1, 2] });
    rank.meet("masked", &all);
    rank.buffer.unmask(others).expect("unmask");
    assert!(rank.buffer.masked().is_empty());
    rank.meet("unmasked", &all);
    all_ways(&rank, 50..53, &[]);

    assert_eq!(rank.buffer.faults(), [], "rank {me}");
    rank.buffer.sync(Some(LIMIT)).expect("sync");
    // Kernels write straight into heaps: no memory of the host was pinned for it.
    if rank.buffer.links().iter().all(|link| link.kind != LinkKind::Network) {
        let CudaState::Present(cuda) = rank.context.info().expect("info").cuda else { panic!("there is a GPU") };
        assert_eq!(cuda.devices[rank.gpu.ordinal as usize].bounce_bytes, 0, "rank {me}");
    }
    rank.leave();
}

alone!(graphs_go_on_when_ranks_come_and_go, |gpus| {
    on_ranks(&Case::new(Layout::Expert, Payload::Bf16), gpus, graphs_go_on);
});

/// What a graph knows of heaps, masks and numbers lies in memory that stays.
fn graphs_go_on(rank: &Rank) {
    let (all, others) = (rank.case.everybody(), if rank.me == 3 { &[0, 1, 2][..] } else { &[3] });
    let absent: Vec<usize> = others.iter().map(|rank| *rank as usize).collect();
    let recorded = Recorded::new(rank);
    (0..2).for_each(|round| recorded.replay(rank, 300 + round, &[]));
    rank.meet("replayed", &all);
    rank.buffer.disconnect(others).expect("disconnect");
    // One that is alone goes on as well, and does not replay it as often.
    (0..if rank.me == 3 { 1 } else { 3 }).for_each(|round| recorded.replay(rank, 310 + round, &absent));
    rank.meet("replayed apart", &all);
    rank.connect(&all);
    (0..3).for_each(|round| recorded.replay(rank, 320 + round, &[]));
    rank.meet("replayed together", &all);
    rank.buffer.mask(others).expect("mask");
    recorded.replay(rank, 330, &absent);
    rank.meet("masked", &all);
    rank.buffer.unmask(others).expect("unmask");
    rank.meet("unmasked", &all);
    (0..2).for_each(|round| recorded.replay(rank, 340 + round, &[]));
    assert_eq!(rank.buffer.faults(), [], "rank {}", rank.me);
}
