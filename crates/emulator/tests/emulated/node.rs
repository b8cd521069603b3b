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

/// Bytes of proxies, and rows of gateways, equal those counted from the routing.
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
