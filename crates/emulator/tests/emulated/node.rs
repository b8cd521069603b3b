//! Rows that go once to each node, on emulated GPUs: a gateway forwards them there, and returns one row of sums.

use crossrail_kernels::ep::{EP_RECEIVE, EP_SEND, Layout, Payload, Scale, Shape, Tuning};

use crossrail_emulator::coding::Coding;
use crossrail_emulator::job::{ByExpert, Job, Weights};
use crossrail_emulator::job_rank::ByRank;
use crossrail_emulator::reference::{Choice, Routing};
use crossrail_emulator::shapes::{BY_EXPERT, by_slot};
use crossrail_emulator::{Build, Memory, Numbers};

use crate::by_rank::ALL;
use crate::far::{EXPERT, Far, PROXY, RANK, check_handles, expert_rounds, link_rows, rank_job_of, rank_rounds};

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

/// `nodes` nodes of `node` ranks in the rank layout.
const fn slots(nodes: u32, node: u32) -> Shape {
    by_slot(self::nodes(nodes, node), 5)
}

fn rank_far_of(build: &Build, shape: Shape) -> Option<Far> {
    Some(Far::once_per_node(rank_job_of(build, shape)?))
}

fn rank_far(shape: Shape) -> Option<Far> {
    rank_far_of(&Build::new(&RANK), shape)
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
fn rows_of_the_rank_layout_are_forwarded_and_summed() {
    let Some(mut two) = rank_far(slots(2, 2)) else { return };
    rank_rounds(&mut two, 700..709);
    let shape = Shape { payload: Payload::Bf16, hidden: 1032, topk: 6, max_tokens: 37, ..slots(2, 2) };
    let Some(mut bf16) = rank_far(shape) else { return };
    rank_rounds(&mut bf16, 709..712);
    let Some(mut packed) = rank_far(Shape { payload: Payload::Fp8(Scale::Ue8m0), ..slots(2, 2) }) else { return };
    rank_rounds(&mut packed, 712..715);
    let Some(mut three) = rank_far(Shape { hidden: 256, ..slots(3, 2) }) else { return };
    rank_rounds(&mut three, 715..721);
    let Some(mut alone) = rank_far(Shape { hidden: 256, ..slots(3, 1) }) else { return };
    rank_rounds(&mut alone, 721..724);
}

/// Blocks of one warp; words that no kernel waits for arrive late; the halves of operations apart; and both layouts in one heap.
#[test]
fn the_rank_layout_with_few_warps_slow_words_and_halves_apart() {
    let tuning = Tuning { threads: 32, back_threads: 64, ..nodes(2, 2).tuning };
    let Some(mut narrow) = rank_far(Shape { hidden: 256, tuning, ..slots(2, 2) }) else { return };
    rank_rounds(&mut narrow, 730..733);
    let both = Shape { expert_layout: true, hidden: 256, ..slots(3, 2) };
    let Some(mut slow) = rank_far(both) else { return };
    slow.slow = 400_000;
    rank_rounds(&mut slow, 733..736);
    let Some(mut far) = rank_far(Shape { hidden: 256, ..slots(3, 2) }) else { return };
    for seed in 736..739 {
        let mut numbers = Numbers(seed);
        let shape = far.job.shape;
        let two = [0, 1].map(|region| {
            let routing = Routing::random(&mut numbers, &shape);
            ByRank::new(&mut far.job, &mut numbers, routing, region)
        });
        for phases in [EP_SEND, EP_RECEIVE] {
            two.iter().for_each(|operation| operation.dispatch(&mut far.job, 2, phases));
        }
        for phases in [EP_SEND, EP_RECEIVE] {
            two.iter().for_each(|operation| operation.combine(&mut far.job, 3, phases, 0));
        }
        far.run(seed).unwrap();
        for operation in &two {
            let found = operation.check_dispatch(&far.job).and_then(|()| operation.check_combine(&far.job));
            found.unwrap_or_else(|what| panic!("seed {seed}: {what}; {}", far.job.fault_text()));
        }
        far.no_faults();
    }
}

#[test]
fn four_nodes_of_eight_ranks_in_the_rank_layout() {
    let tuning = Tuning { threads: 64, ..nodes(4, 8).tuning };
    let shape = Shape { hidden: 128, topk: 8, max_tokens: 3, tuning, ..slots(4, 8) };
    let Some(mut far) = rank_far(shape) else { return };
    rank_rounds(&mut far, 741..743);
}

/// More ranks than a word has bits, in both layouts; the columns have ranks in each of the words. Takes minutes.
#[test]
#[ignore = "takes minutes"]
fn sixteen_nodes_of_eight_ranks() {
    let tuning = Tuning { threads: 32, back_threads: 64, ..nodes(16, 8).tuning };
    let few = |shape: Shape| Shape { experts: 128, hidden: 128, topk: 2, max_tokens: 1, tuning, ..shape };
    let Some(mut far) = far(few(nodes(16, 8))) else { return };
    far.job.gpus.limit_ms = 600_000;
    let shape = far.job.shape;
    let routing = Routing::of(&mut Numbers(590), &shape, &[1; 128], Choice::Even);
    let expected = link_rows(&shape, &routing, 8, true);
    let operation = pair(&mut far, routing, Weights::Combine, 590);
    operation.check_dispatch(&far.job).and_then(|()| operation.check_combine(&far.job)).unwrap();
    far.no_faults();
    let handles: Vec<&Memory> = operation.ranks.iter().map(|one| &one.kept[0]).collect();
    check_handles(&far.job, Layout::Expert, &handles, 8, &expected);
    let Some(mut far) = rank_far(few(slots(16, 8))) else { return };
    far.job.gpus.limit_ms = 600_000;
    rank_rounds(&mut far, 592..593);
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

/// Ranks that give no weights, with tokens (whose weights are 1) and without, among ranks that do.
fn mixed_weights(build: &Build) -> Result<(), String> {
    let shape = Shape { hidden: 256, max_tokens: 3, ..nodes(2, 2) };
    let Some(mut far) = far_of(build, shape) else { return Err("no compiler".into()) };
    far.job.limit_ns = 1_000_000_000;
    for (seed, without) in (700..).zip([&[0][..], &[3], &[0, 2], &[0, 1], &[1, 2, 3]]) {
        for (mode, few) in [Weights::Dispatch, Weights::Combine].into_iter().flat_map(|mode| [(mode, 0), (mode, 2)]) {
            let mut numbers = Numbers(seed);
            let tokens: Vec<usize> = (0..4).map(|rank| if without.contains(&rank) { few } else { 3 }).collect();
            let mut routing = Routing::of(&mut numbers, &shape, &tokens, Choice::Even);
            without.iter().for_each(|rank| routing.weights[*rank].fill(1.0));
            let mut operation = ByExpert::new(&mut far.job, &mut numbers, routing, mode);
            for rank in without {
                operation.ranks[*rank].dispatch.topk_weights = 0;
                operation.ranks[*rank].combine.topk_weights = 0;
            }
            let steps: &[u32] = if numbers.once_in(2) { &[BOTH] } else { &[EP_SEND, EP_RECEIVE] };
            steps.iter().for_each(|phases| operation.dispatch(&mut far.job, 2, *phases));
            steps.iter().for_each(|phases| operation.combine(&mut far.job, 2, *phases));
            far.run(seed)?;
            let found = operation.check_dispatch(&far.job).and_then(|()| operation.check_combine(&far.job));
            found.map_err(|what| {
                format!("{mode:?} but for {without:?}, {few} tokens: {what}; {}", far.job.fault_text())
            })?;
            far.no_faults();
        }
    }
    Ok(())
}

/// A gateway forwards by the flags of its column, and ignores whether its own call has weights.
#[test]
fn weights_are_forwarded_by_gateways_that_give_none() {
    mixed_weights(&Build::new(&EXPERT)).unwrap();
    for (path, from, to) in [
        ("kernels/ep_forward.cuh", "flags & EP_WEIGHTED, worker", "args.topk_weights != 0, worker"),
        ("kernels/ep_relay.cuh", "if (start.flags[source] & EP_WEIGHTED) continue;", "if (start.weighted) continue;"),
    ] {
        let build = Build::new(&EXPERT).broken(path, from, to);
        assert!(mixed_weights(&build).is_err(), "{path}: {to:?} does no harm");
    }
}

/// With one warp to a block that dispatches, and two that combine; with a ring of eight commands; and where words that no kernel
/// waits for arrive when their slots could be in use again.
#[test]
fn few_warps_short_rings_and_slow_words() {
    let tuning = Tuning { threads: 32, back_threads: 64, ..nodes(2, 2).tuning };
    let Some(mut narrow) = far(Shape { hidden: 256, tuning, ..nodes(2, 2) }) else { return };
    expert_rounds(&mut narrow, 570..573, Coding::Bf16);
    let build = Build::new(&EXPERT);
    let build = build.broken("layout/ep.cuh", "constexpr u32 EP_COMMANDS = 4096;", "constexpr u32 EP_COMMANDS = 8;");
    let Some(mut short) = far_of(&build, Shape { hidden: 256, ..nodes(2, 2) }) else { return };
    expert_rounds(&mut short, 573..575, Coding::Bf16);
    let Some(mut slow) = far(Shape { hidden: 128, max_tokens: 3, ..nodes(3, 2) }) else { return };
    slow.slow = 400_000;
    expert_rounds(&mut slow, 575..577, Coding::Bf16);
}

/// A rank that masks a far one, which its gateway does not mask, returns nothing for it and declines: its gateway does not wait
/// for it, returns sums without it, and the far rank names it.
fn declines(build: &Build) -> Result<(), String> {
    let shape = Shape { hidden: 256, ..nodes(3, 2) };
    let Some(mut far) = far_of(build, shape) else { return Err("no compiler".into()) };
    far.job.limit_ns = 1_000_000_000;
    let (gateway, near, source) = (2, 3, 0);
    let mut numbers = Numbers(580);
    let routing = Routing::of(&mut numbers, &shape, &[5, 4, 5, 3, 5, 4], Choice::Even);
    let operation = ByExpert::new(&mut far.job, &mut numbers, routing, Weights::Dispatch);
    operation.dispatch(&mut far.job, 2, BOTH);
    far.run(580)?;
    far.job.mask(near, source);
    operation.combine(&mut far.job, 2, BOTH);
    far.run(581)?;
    let masked = [gateway, source].map(|rank| far.job.masked(rank));
    let lacking = operation.check_combine_without(&far.job, source, near)?;
    let mut others = 0;
    for rank in [1, 2, 4, 5] {
        others += operation.check_combine_without(&far.job, rank, near)?;
    }
    if masked == [vec![], vec![near]] && lacking > 0 && others == 0 {
        return Ok(());
    }
    Err(format!("{masked:?} masked, {lacking} and {others} lacking: {}", far.job.fault_text()))
}

#[test]
fn a_rank_that_declines_is_not_waited_for() {
    declines(&Build::new(&EXPERT)).unwrap();
}

/// Bytes of proxies, and rows of gateways, equal those counted from the routing, in both layouts.
#[test]
fn bytes_of_each_link_are_those_of_the_routing() {
    let payloads = [Payload::Bf16, Payload::Fp8(Scale::F32)];
    for (layout, payload) in [nodes(2, 4), slots(2, 4)].into_iter().flat_map(|layout| payloads.map(|one| (layout, one)))
    {
        let shape = Shape { hidden: 2048, payload, topk: 6, ..layout };
        let made = if shape.rank_layout { rank_far(shape) } else { far(shape) };
        let Some(mut far) = made else { return };
        let routing = Routing::of(&mut Numbers(540), &shape, &[5, 3, 0, 4, 5, 2, 5, 1], Choice::Even);
        let [once, each] = [true, false].map(|once| link_rows(&shape, &routing, 4, once));
        if shape.rank_layout {
            let operation = ByRank::new(&mut far.job, &mut Numbers(540), routing, 0);
            operation.dispatch(&mut far.job, 2, ALL);
            operation.combine(&mut far.job, 2, BOTH, 0);
            far.run(540).unwrap();
            operation.check_combine(&far.job).unwrap();
            let handles: Vec<&Memory> = operation.ranks.iter().map(|one| &one.handle).collect();
            check_handles(&far.job, Layout::Rank, &handles, 4, &once);
        } else {
            let operation = pair(&mut far, routing, Weights::None, 540);
            operation.check_combine(&far.job).unwrap();
            let handles: Vec<&Memory> = operation.ranks.iter().map(|one| &one.kept[0]).collect();
            check_handles(&far.job, Layout::Expert, &handles, 4, &once);
        }
        let network = once.total().network;
        assert!(2 * network < each.total().network, "{network} of {}", each.total().network);
        let row = u64::from(shape.row_bytes() + shape.scale_bytes());
        assert_eq!(far.carried(), [network * row, network * 2 * u64::from(shape.hidden)], "{payload:?}");
        let received: Vec<u64> =
            (0..8).map(|rank| far.job.pieces_from_others(rank) / u64::from(shape.pieces())).collect();
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

/// A rank that is lost between a dispatch and its combine. Gateways of its node return sums without it and report which rank
/// they lack; where it was the gateway itself, the sums of its node are missing. No other rank is named.
fn lost_before_combine(build: &Build, gone: usize, seed: u64) -> Result<(), String> {
    let shape = Shape { hidden: 256, ..nodes(3, 2) };
    let Some(mut far) = far_of(build, shape) else { return Err("no compiler".into()) };
    far.job.limit_ns = 1_000_000_000;
    let mut numbers = Numbers(seed);
    let routing = Routing::of(&mut numbers, &shape, &[5, 4, 5, 3, 5, 4], Choice::Even);
    let mut operation = ByExpert::new(&mut far.job, &mut numbers, routing, Weights::Dispatch);
    operation.dispatch(&mut far.job, 2, BOTH);
    far.run(seed)?;
    operation.check_dispatch(&far.job)?;
    operation.routing.active[gone] = false;
    operation.combine(&mut far.job, 2, BOTH);
    far.run(seed + 1000)?;
    operation.routing.active[gone] = true;
    for (rank, named) in named(&far).into_iter().enumerate().filter(|(rank, _)| *rank != gone) {
        if named != (vec![gone], vec![gone as u32]) {
            return Err(format!("rank {rank} names {named:?}: {}", far.job.fault_text()));
        }
        let is_gateway = rank % 2 == gone % 2;
        let node = [gone / 2 * 2, gone / 2 * 2 + 1];
        let lacking = if is_gateway { &node[..] } else { &[gone] };
        if operation.check_combine_lacking(&far.job, rank, lacking)? == 0 {
            return Err(format!("the sums of rank {rank} are whole without rank {gone}"));
        }
    }
    Ok(())
}

#[test]
fn sums_that_lack_a_rank_name_it() {
    for (seed, gone) in [(560, 3), (561, 0)] {
        lost_before_combine(&Build::new(&EXPERT), gone, seed).unwrap();
    }
    for (seed, gone) in [(762, 3), (763, 0)] {
        rank_lost(&Build::new(&RANK), gone, seed, false).unwrap();
    }
}

/// A rank is lost in the rank layout, before the dispatch or between it and its combine: as in the expert layout.
fn rank_lost(build: &Build, gone: usize, seed: u64, at_dispatch: bool) -> Result<(), String> {
    let shape = Shape { hidden: 256, ..slots(3, 2) };
    let Some(mut far) = rank_far_of(build, shape) else { return Err("no compiler".into()) };
    far.job.limit_ns = 1_000_000_000;
    let mut numbers = Numbers(seed);
    let routing = Routing::of(&mut numbers, &shape, &[5, 4, 5, 3, 5, 4], Choice::Even);
    let routing = if at_dispatch { routing.without(&[gone]) } else { routing };
    let mut operation = ByRank::new(&mut far.job, &mut numbers, routing, 0);
    operation.dispatch(&mut far.job, 2, ALL);
    far.run(seed)?;
    let node = [gone / 2 * 2, gone / 2 * 2 + 1];
    let is_column = |rank: &usize| rank % 2 == gone % 2 && rank / 2 != gone / 2;
    if at_dispatch {
        // Its column's tokens have not reached its node; all else is whole.
        for source in (0..6).filter(is_column) {
            let here = |expert: &i32| *expert >= 0 && node.contains(&(*expert as usize / 2));
            operation.routing.idx[source].iter_mut().filter(|expert| here(expert)).for_each(|expert| *expert = -1);
            operation.apart.extend(node.map(|rank| [rank, source]));
        }
        operation.check_dispatch(&far.job)?;
    } else {
        operation.check_dispatch(&far.job)?;
        operation.routing.active[gone] = false;
    }
    operation.combine(&mut far.job, 2, BOTH, 0);
    far.run(seed + 1000)?;
    operation.routing.active[gone] = !at_dispatch;
    for (rank, named) in named(&far).into_iter().enumerate().filter(|(rank, _)| *rank != gone) {
        if named != (vec![gone], vec![gone as u32]) {
            return Err(format!("rank {rank} names {named:?}: {}", far.job.fault_text()));
        }
        let lacking = if is_column(&rank) { &node[..] } else { &[gone] };
        let found = operation.check_combine_lacking(&far.job, rank, lacking)?;
        if !at_dispatch && found == 0 {
            return Err(format!("the sums of rank {rank} are whole without rank {gone}"));
        }
    }
    Ok(())
}

#[test]
fn a_rank_of_the_rank_layout_that_never_comes_is_named_by_all_and_no_other_is() {
    for (seed, gone) in [(770, 0), (771, 3), (772, 5)] {
        rank_lost(&Build::new(&RANK), gone, seed, true).unwrap();
    }
}

/// The proxy of a rank is killed in the middle of an operation, wherever that is. The other node's ranks name that rank and no
/// other; what returns through another gateway is whole, what it was to return is whole or missing.
#[test]
fn a_gateway_whose_proxy_is_killed_leaves_no_wrong_sum() {
    let shape = Shape { hidden: 256, ..nodes(2, 2) };
    let (mut lacking, mut whole) = (0, 0);
    for cut in (1..40).step_by(4) {
        let Some(mut far) = far(shape) else { return };
        (far.killed, far.cut, far.job.limit_ns) = (Some(3), cut, 1_000_000_000);
        let mut numbers = Numbers(cut.into());
        let routing = Routing::of(&mut numbers, &shape, &[5, 4, 5, 3], Choice::Even);
        let operation = ByExpert::new(&mut far.job, &mut numbers, routing, Weights::Dispatch);
        operation.dispatch(&mut far.job, 2, BOTH);
        far.run(cut.into()).unwrap();
        operation.combine(&mut far.job, 2, BOTH);
        far.run(u64::from(cut) + 100).unwrap();
        for rank in [0, 1] {
            let named: Vec<u32> = far.job.faults(rank).iter().map(|(whom, _)| *whom).collect();
            assert!(named.iter().all(|whom| *whom == 3), "cut {cut}, rank {rank}: {named:?}; {}", far.job.fault_text());
        }
        assert_eq!(
            operation.check_combine(&far.job).map_err(|_| ()).is_ok(),
            far.job.masked(1).is_empty(),
            "cut {cut}"
        );
        let found = operation.check_combine_lacking(&far.job, 1, &[2, 3]);
        let found = found.unwrap_or_else(|what| panic!("cut {cut}: {what}; {}", far.job.fault_text()));
        assert!(found == 0 || far.job.masked(1) == [3], "cut {cut}");
        lacking += usize::from(found > 0);
        whole += usize::from(found == 0);
        assert_eq!([0, 2].map(|rank| operation.check_combine_without(&far.job, rank, 3)), [Ok(0), Ok(0)], "cut {cut}");
    }
    assert!(lacking > 0 && whole > 0, "{lacking} and {whole}");
}

/// A gateway of the rank layout, with the weights that return.
#[test]
fn a_gateway_of_the_rank_layout_whose_proxy_is_killed_leaves_no_wrong_sum() {
    let shape = Shape { hidden: 256, ..slots(2, 2) };
    let (mut lacking, mut whole) = (0, 0);
    for cut in (1..40).step_by(6) {
        let Some(mut far) = rank_far(shape) else { return };
        (far.killed, far.cut, far.job.limit_ns) = (Some(3), cut, 1_000_000_000);
        let mut numbers = Numbers(cut.into());
        let routing = Routing::of(&mut numbers, &shape, &[5, 4, 5, 3], Choice::Even);
        let operation = ByRank::new(&mut far.job, &mut numbers, routing, 0);
        operation.dispatch(&mut far.job, 2, ALL);
        far.run(cut.into()).unwrap();
        operation.combine(&mut far.job, 2, BOTH, 0);
        far.run(u64::from(cut) + 100).unwrap();
        for rank in [0, 1] {
            let named: Vec<u32> = far.job.faults(rank).iter().map(|(whom, _)| *whom).collect();
            assert!(named.iter().all(|whom| *whom == 3), "cut {cut}, rank {rank}: {named:?}; {}", far.job.fault_text());
        }
        let found = operation.check_combine_lacking(&far.job, 1, &[2, 3]);
        let found = found.unwrap_or_else(|what| panic!("cut {cut}: {what}; {}", far.job.fault_text()));
        assert!(found == 0 || far.job.masked(1) == [3], "cut {cut}");
        lacking += usize::from(found > 0);
        whole += usize::from(found == 0);
    }
    assert!(lacking > 0 && whole > 0, "{lacking} and {whole}");
}

/// Faults of the rank layout alone.
#[test]
fn gateways_of_the_rank_layout_that_are_wrong_are_caught() {
    let faults = [
        // Weights of ranks of the node are not waited for.
        (
            "kernels/ep_relay.cuh",
            "seen = await_tagged(c, word, near_rank(c, writer), EP_STAGE_WEIGHTS, start.sent)",
            "seen = tagged(start.sent, ld_relaxed_sys_u64(word))",
        ),
        // Weights go to the inbox, as on one node.
        ("kernels/ep_combine.cuh", "words = area_for(c, start, r.source).weights_of(r.token);", "words = inbox + at;"),
        // What was forwarded is noted by each piece's warp while others read it.
        ("kernels/ep_forward.cuh", "if (mine.piece == 0 && !repeats)", "if (mine.piece == 0)"),
        // A repeated routing is read from words that are not sent.
        ("kernels/ep_forward.cuh", "bool repeats = SLOTS && args.cached;", "bool repeats = false;"),
        // The hosts' words end at the gateway.
        ("kernels/ep_forward.cuh", "if (is_tagged(seen, epoch)) forward_word(c, start, source, word, seen, lane);", ""),
    ];
    for (path, from, to) in faults {
        let build = Build::new(&RANK).broken(path, from, to);
        // With one stage, flags of rows may be set before the weights are there.
        let tuning = Tuning { back_stages: 1, ..slots(2, 2).tuning };
        let Some(mut far) = rank_far_of(&build, Shape { max_tokens: 3, tuning, ..slots(2, 2) }) else { return };
        far.job.limit_ns = 1_000_000_000;
        let caught = (780..820).any(|seed| {
            let wrong = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                rank_rounds(&mut far, seed..seed + 1);
            }));
            wrong.is_err()
        });
        assert!(caught, "{path}: {to:?} does no harm");
    }
}

/// Each of these faults is caught, by a check of memory, by a wrong result, or by a wrong name.
#[test]
fn gateways_that_are_wrong_are_caught() {
    let rounds = [
        // Rows are forwarded before they have arrived.
        ("kernels/ep_forward.cuh", "has_reached(ld_acquire_sys_u64(flag), epoch)", "true"),
        // Sums without waiting for what is added.
        ("kernels/ep_relay.cuh", "came = came && await(c, area.flag", "came = came || await(c, area.flag"),
        // The last pieces of a warp are announced after it has waited for others.
        ("kernels/ep_combine.cuh", "outbox.settle(lane);", ""),
        // The expert's number within the node, not at its rank.
        ("kernels/ep_forward.cuh", "there ? expert % LOCAL + 1 : 0", "there ? expert + 1 : 0"),
        // Of a launch that only receives, the epoch of the next one.
        (
            "kernels/ep_start.cuh",
            "return NODE && !(c.phases & EP_SEND) ? start.received : start.sent;",
            "return start.sent + !(c.phases & EP_SEND);",
        ),
    ];
    for (path, from, to) in rounds {
        let build = Build::new(&EXPERT).broken(path, from, to);
        let Some(mut far) = far_of(&build, Shape { max_tokens: 3, hidden: 256, ..nodes(2, 2) }) else { return };
        far.job.limit_ns = 1_000_000_000;
        let caught = (600..640).any(|seed| {
            let wrong = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                expert_rounds(&mut far, seed..seed + 1, Coding::Bf16);
            }));
            wrong.is_err()
        });
        assert!(caught, "{path}: {to:?} does no harm");
    }
    let losses = [
        // Sums that lack a rank are returned as whole ones.
        (
            "kernels/ep_relay.cuh",
            "u32 kind = missing ? EP_COMMAND_BACK_LESS : EP_COMMAND_BACK;",
            "u32 kind = EP_COMMAND_BACK;",
        ),
        // Who is missing is not read.
        ("kernels/ep_relay.cuh", "if (valid && (ld_relaxed_sys_u64(flag) & LESS))", "if (false)"),
    ];
    for (path, from, to) in losses {
        let build = Build::new(&EXPERT).broken(path, from, to);
        assert!(lost_before_combine(&build, 3, 560).is_err(), "{path}: {to:?} does no harm");
    }
    // A rank that returns nothing does not announce it.
    let build = Build::new(&EXPERT).broken("kernels/ep_combine.cuh", "        decline(c, start, lane);\n", "");
    assert!(declines(&build).is_err(), "no gateway waits for a rank that returns nothing");
}
