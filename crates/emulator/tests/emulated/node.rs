//! Rows that go once to each node, on emulated GPUs: a gateway forwards them there, and returns one row of sums.

use crossrail_kernels::ep::{EP_RECEIVE, EP_SEND, LinkRows, Payload, Scale, Shape, Tuning};

use crossrail_emulator::coding::Coding;
use crossrail_emulator::job::{ByExpert, Job, Weights};
use crossrail_emulator::reference::{Choice, Routing};
use crossrail_emulator::shapes::BY_EXPERT;
use crossrail_emulator::{Build, Numbers};

use crate::far::{EXPERT, Far, PROXY, expert_rounds};

const BOTH: u32 = EP_SEND | EP_RECEIVE;

/// `nodes` nodes of `node` ranks.
const fn nodes(nodes: u32, node: u32) -> Shape {
    let ranks = nodes * node;
    Shape { ranks, experts: 2 * ranks, max_tokens: 5, tuning: Tuning { node, ..BY_EXPERT.tuning }, ..BY_EXPERT }
}

fn far_of(build: &Build, shape: Shape) -> Option<Far> {
    let build = build.clone().with(PROXY, include_str!("proxy.cu"));
    Some(Far::once_per_node(Job::of(&build, shape, shape.expert_shared())?))
}

fn far(shape: Shape) -> Option<Far> {
    far_of(&Build::new(&EXPERT), shape)
}

/// A dispatch and its combine of a routing, run one after the other, and the job.
fn pair(far: &mut Far, routing: Routing, weights: Weights, seed: u64) -> ByExpert {
    let operation = ByExpert::new(&mut far.job, &mut Numbers(seed), routing, weights);
    operation.dispatch(&mut far.job, 2, BOTH);
    far.run(seed).unwrap();
    operation.combine(&mut far.job, 2, BOTH);
    far.run(seed + 1000).unwrap();
    operation
}

#[test]
fn rows_of_two_nodes_are_forwarded_and_summed() {
    let Some(mut far) = far(nodes(2, 2)) else { return };
    expert_rounds(&mut far, 500..508, Coding::Bf16);
}

#[test]
fn payloads_and_rows_of_any_length_are_forwarded() {
    let shape = Shape { payload: Payload::Bf16, hidden: 1032, topk: 6, ..nodes(2, 2) };
    let Some(mut bf16) = far(shape) else { return };
    expert_rounds(&mut bf16, 510..514, Coding::Bf16);
    let Some(mut packed) = far(Shape { payload: Payload::Fp8(Scale::Ue8m0), ..nodes(2, 2) }) else { return };
    expert_rounds(&mut packed, 514..516, Coding::Bf16);
    let tuning = Tuning { piece: 2048, threads: 96, ..nodes(2, 2).tuning };
    let Some(mut large) = far(Shape { hidden: 2176, tuning, ..nodes(2, 2) }) else { return };
    expert_rounds(&mut large, 516..519, Coding::Bf16);
}

#[test]
fn more_nodes_with_more_ranks() {
    let Some(mut three) = far(Shape { hidden: 256, ..nodes(3, 2) }) else { return };
    expert_rounds(&mut three, 520..523, Coding::Bf16);
    let Some(mut eight) = far(Shape { hidden: 256, max_tokens: 3, ..nodes(2, 4) }) else { return };
    expert_rounds(&mut eight, 523..525, Coding::Bf16);
    // A node of one rank forwards to itself.
    let Some(mut alone) = far(Shape { hidden: 256, ..nodes(3, 1) }) else { return };
    expert_rounds(&mut alone, 525..528, Coding::Bf16);
}

#[test]
fn four_nodes_of_eight_ranks() {
    let tuning = Tuning { threads: 64, ..nodes(4, 8).tuning };
    let Some(mut far) = far(Shape { hidden: 128, topk: 8, max_tokens: 3, tuning, ..nodes(4, 8) }) else { return };
    let shape = far.job.shape;
    let mut numbers = Numbers(530);
    let routing = Routing::random(&mut numbers, &shape);
    let operation = pair(&mut far, routing, Weights::Combine, 530);
    operation.check_dispatch(&far.job).and_then(|()| operation.check_combine(&far.job)).unwrap();
    far.no_faults();
}

/// What proxies carry, and the rows that gateways forward, are to the byte what is counted from the routing, once per node
/// and once per rank.
#[test]
fn bytes_of_each_link_are_those_of_the_routing() {
    for payload in [Payload::Bf16, Payload::Fp8(Scale::F32)] {
        let shape = Shape { hidden: 2048, payload, topk: 6, ..nodes(2, 4) };
        let Some(mut far) = far(shape) else { return };
        let routing = Routing::of(&mut Numbers(540), &shape, &[5, 3, 0, 4, 5, 2, 5, 1], Choice::Even);
        let mut rows = [true, false].map(|once| LinkRows::new(8, 4, once));
        for source in 0..8 {
            for token in 0..routing.tokens[source] {
                let experts = (0..6).filter_map(|k| routing.expert(&shape, source, token, k));
                let homes: Vec<u32> = experts.map(|expert| expert as u32 / shape.local_experts()).collect();
                rows.iter_mut().for_each(|rows| rows.add(source as u32, homes.iter().copied()));
            }
        }
        let operation = pair(&mut far, routing, Weights::None, 540);
        operation.check_combine(&far.job).unwrap();
        let [once, each] = rows;
        let network = once.total().network;
        assert!(2 * network < each.total().network, "{network} of {}", each.total().network);
        let row = u64::from(shape.row_bytes() + shape.scale_bytes());
        assert_eq!(far.carried(), [network * row, network * 2 * u64::from(shape.hidden)], "{payload:?}");
        let received: Vec<u64> = (0..8).map(|rank| far.job.pieces_from_others(rank) / u64::from(shape.pieces())).collect();
        assert_eq!(received, once.received.iter().map(|rows| rows.near).collect::<Vec<u64>>());
    }
}

/// Ranks that each rank has masked, and those that its kernels named.
fn named(far: &Far) -> Vec<(Vec<usize>, Vec<u32>)> {
    let ranks = 0..far.job.shape.ranks as usize;
    let faults = |rank| {
        let mut whom: Vec<u32> = far.job.faults(rank).iter().map(|(whom, _)| *whom).collect();
        whom.sort_unstable();
        whom
    };
    ranks.map(|rank| (far.job.masked(rank), faults(rank))).collect()
}

/// A rank that takes no part is named by every other rank, and no other rank is: by its column, whose gateways announce the
/// loss to their nodes, and by its own node, which misses its rows and what it would have forwarded.
#[test]
fn a_rank_that_never_comes_is_named_by_all_and_no_other_is() {
    for (seed, gone) in [(550, 0), (551, 3), (552, 5)] {
        let Some(mut far) = far(Shape { hidden: 256, ..nodes(3, 2) }) else { return };
        let shape = far.job.shape;
        far.job.limit_ns = 1_000_000_000;
        let mut numbers = Numbers(seed);
        let routing = Routing::of(&mut numbers, &shape, &[5, 4, 5, 3, 5, 4], Choice::Even);
        let mut operation = ByExpert::new(&mut far.job, &mut numbers, routing.without(&[gone]), Weights::Combine);
        operation.dispatch(&mut far.job, 2, BOTH);
        far.run(seed).unwrap();
        let others = |far: &Far| {
            let named = named(far);
            let others = named.into_iter().enumerate().filter(|(rank, _)| *rank != gone);
            others.for_each(|(rank, named)| {
                let text = far.job.fault_text();
                assert_eq!(named, (vec![gone], vec![gone as u32]), "rank {rank} of {gone}: {text}");
            });
        };
        others(&far);
        operation.combine(&mut far.job, 2, BOTH);
        far.run(seed + 1000).unwrap();
        others(&far);
        // Its column's tokens have not reached its node; all else is whole.
        for source in (0..6).filter(|source| source % 2 == gone % 2 && source / 2 != gone / 2) {
            let here = |expert: &i32| *expert >= 0 && *expert as usize / 4 == gone / 2;
            operation.routing.idx[source].iter_mut().filter(|expert| here(expert)).for_each(|expert| *expert = -1);
        }
        operation.check_dispatch(&far.job).and_then(|()| operation.check_combine(&far.job)).unwrap();
    }
}
