//! Tokens that select an expert more than once: each selection counts, as on the host. Where the host refuses them for want
//! of room, kernels, whose hosts do not see the ids, do what is written in the guide, and write nothing where it does not
//! belong.

use crossrail_kernels::ep::{EP_ANNOUNCE, EP_RECEIVE, EP_SEND, EP_STAGE_BACK_ROW, Payload, Shape};

use crossrail_emulator::job::{ByExpert, Job, Weights, same};
use crossrail_emulator::job_rank::ByRank;
use crossrail_emulator::reference::{Choice, Routing};
use crossrail_emulator::shapes::{BY_EXPERT, by_rank, by_slot, rank_kernels};
use crossrail_emulator::{Build, GpuMemory as _, Gpus as _, Numbers};

const ALL: u32 = EP_ANNOUNCE | EP_SEND | EP_RECEIVE;
const BOTH: u32 = EP_SEND | EP_RECEIVE;

/// Every other token selects one expert twice.
fn doubled(numbers: &mut Numbers, shape: &Shape) -> Routing {
    let mut routing = Routing::of(numbers, shape, &vec![shape.max_tokens as usize; shape.ranks as usize], Choice::Even);
    for token in routing.idx.iter_mut().flat_map(|idx| idx.chunks_exact_mut(shape.topk as usize)).step_by(2) {
        token[2] = token[0];
    }
    routing
}

/// Two rows, whose outputs are both added, each with the weight of its selection.
#[test]
fn in_the_expert_layout_each_selection_has_a_row_and_its_weight() {
    for shape in [BY_EXPERT, Shape { prereduce: false, topk: 3, payload: Payload::Bf16, ..BY_EXPERT }] {
        let Some(mut job) = Job::new(&["kernels/ep_expert.cu"], shape, shape.expert_shared()) else { return };
        for (seed, weights) in (700..).zip([Weights::None, Weights::Dispatch, Weights::Combine]) {
            let mut numbers = Numbers(seed);
            let routing = doubled(&mut numbers, &shape);
            let operation = ByExpert::new(&mut job, &mut numbers, routing, weights);
            operation.dispatch(&mut job, 2, BOTH);
            operation.combine(&mut job, 2, BOTH);
            job.gpus.run(seed).unwrap();
            operation.check_dispatch(&job).unwrap();
            operation.check_combine(&job).unwrap_or_else(|what| panic!("seed {seed}: {what}"));
        }
    }
}

/// A rank returns two outputs of a token, as it has two experts; where the token selects three or four there, the first two
/// are in its sum.
#[test]
fn without_prereduction_outputs_beyond_those_returned_are_left_out() {
    let shape = Shape { prereduce: false, experts: 8, max_tokens: 5, payload: Payload::Bf16, ..BY_EXPERT };
    let Some(mut job) = Job::new(&["kernels/ep_expert.cu"], shape, shape.expert_shared()) else { return };
    for seed in 730..733 {
        let mut numbers = Numbers(seed);
        let mut routing = doubled(&mut numbers, &shape);
        for token in routing.idx.iter_mut().flat_map(|idx| idx.chunks_exact_mut(4)).step_by(3) {
            token[1] = token[0];
        }
        let operation = ByExpert::new(&mut job, &mut numbers, routing, Weights::Dispatch);
        operation.dispatch(&mut job, 2, BOTH);
        operation.combine(&mut job, 2, BOTH);
        job.gpus.run(seed).unwrap();
        operation.check_dispatch(&job).unwrap();
        operation.check_combine(&job).unwrap_or_else(|what| panic!("seed {seed}: {what}"));
        assert!((0..4).all(|rank| job.faults(rank).is_empty()), "{}", job.fault_text());
    }
}

/// A row, whose list of experts has the expert twice; both selections are counted.
#[test]
fn in_the_rank_layout_the_list_of_a_row_has_the_expert_twice() {
    for shape in [by_slot(BY_EXPERT, 20), by_rank(BY_EXPERT, 20)] {
        let (source, defines, threads, shared) = rank_kernels(&shape, true);
        let Some(mut job) = Job::made(&Build::new(&[source]).defines(&defines), shape, threads, shared) else { return };
        for seed in 710..713 {
            let mut numbers = Numbers(seed);
            let routing = doubled(&mut numbers, &shape);
            let operation = ByRank::new(&mut job, &mut numbers, routing, 0);
            operation.dispatch(&mut job, 2, ALL);
            operation.combine(&mut job, 2, BOTH, 0);
            job.gpus.run(seed).unwrap();
            operation.check_dispatch(&job).unwrap_or_else(|what| panic!("{source}, seed {seed}: {what}"));
            operation.check_combine(&job).unwrap_or_else(|what| panic!("{source}, seed {seed}: {what}"));
        }
    }
}

/// An expert has a row for each token of all ranks. What is selected beyond that is counted, and has no row: memory behind
/// the results, which are those of the last expert, is as it was, and the operations end.
#[test]
fn selections_beyond_the_rows_of_an_expert_are_left_out() {
    let shape = Shape { experts: 4, ranks: 2, max_tokens: 6, payload: Payload::Bf16, ..BY_EXPERT };
    let Some(mut job) = Job::new(&["kernels/ep_expert.cu"], shape, shape.expert_shared()) else { return };
    let (most, topk, hidden) = ((shape.ranks * shape.max_tokens) as usize, shape.topk as usize, shape.hidden as usize);
    let mut numbers = Numbers(720);
    let mut routing = Routing::of(&mut numbers, &shape, &[6, 6], Choice::Even);
    routing.idx.iter_mut().flatten().for_each(|expert| *expert = 1);
    let mut operation = ByExpert::new(&mut job, &mut numbers, routing, Weights::None);
    let canary: Vec<u8> = (0..4096).map(|at| at as u8).collect();
    for one in &mut operation.ranks {
        for (memory, address) in
            [(&mut one.out_x, &mut one.dispatch.out_x), (&mut one.out_source, &mut one.dispatch.out_source)]
        {
            let len = memory.len();
            *memory = job.gpus.memory("a result and what lies behind it", len + canary.len());
            memory.write(len, &canary);
            *address = memory.address();
        }
    }
    operation.dispatch(&mut job, 2, BOTH);
    operation.combine(&mut job, 2, BOTH);
    job.gpus.run(720).unwrap();
    let one = &operation.ranks[0];
    assert_eq!(one.out_counts.read::<i32>(0, 2), [0, (most * topk) as i32]);
    for memory in operation.ranks.iter().flat_map(|one| [&one.out_x, &one.out_source]) {
        same("behind a result", &memory.read::<u8>(memory.len() - canary.len(), canary.len()), &canary).unwrap();
    }
    // Rows are numbered by source, token and selection: all are of rank 0's first three tokens, four times each.
    let sources: Vec<i32> = (0..most).map(|row| (row / topk) as i32).collect();
    same("sources", &one.out_source.read::<i32>(most * 4, most), &sources).unwrap();
    for (row, source) in sources.iter().enumerate() {
        let sent = &operation.x[0][*source as usize * hidden..][..hidden];
        same(&format!("row {row}"), &one.out_x.read::<u16>((most + row) * hidden * 2, hidden), sent).unwrap();
    }
    // Rank 1 waits for sums of tokens that have no row, and goes on without them.
    assert_eq!((job.faults(0), job.faults(1)), (vec![], vec![(0, EP_STAGE_BACK_ROW)]), "{}", job.fault_text());
}
