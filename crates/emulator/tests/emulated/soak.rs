//! Random shapes, routings and orders on emulated GPUs, for as long as one likes:
//!
//!     SOAK_SECONDS=600 SOAK_SEED=1 cargo test -p crossrail-kernels --test soak -- --ignored --nocapture
//!
//! A failure names the shape and the seed, which give the same again.

use std::time::{Duration, Instant};

use crossrail_kernels::ep::{EP_ANNOUNCE, EP_RECEIVE, EP_SEND, Payload, Scale, Shape, Tuning};

use crossrail_emulator::job::{ByExpert, Job, Weights};
use crossrail_emulator::job_rank::ByRank;
use crossrail_emulator::reference::Routing;
use crossrail_emulator::shapes::rank_kernels;
use crossrail_emulator::{Build, Gpus as _, Numbers};

const BOTH: u32 = EP_SEND | EP_RECEIVE;
/// Runs of each shape, which takes seconds to compile.
const RUNS: u64 = 8;

fn one_of<T: Copy>(numbers: &mut Numbers, choices: &[T]) -> T {
    choices[numbers.below(choices.len() as u64) as usize]
}

/// Any small shape that kernels take.
fn shape(numbers: &mut Numbers, expert_layout: bool) -> Shape {
    let scales = [Scale::F32, Scale::PowerOfTwo, Scale::Ue8m0];
    let payload = if numbers.once_in(3) { Payload::Bf16 } else { Payload::Fp8(one_of(numbers, &scales)) };
    let unit = if payload == Payload::Bf16 { 8 } else { 128 };
    let hidden = unit * (1 + numbers.below(2500 / u64::from(unit)) as u32);
    let ranks = one_of(numbers, &[1, 2, 3, 4, 5, 8]);
    let experts = ranks * (1 + numbers.below(6) as u32);
    let threads = 32 * (1 + numbers.below(5) as u32);
    let senders = 1 + numbers.below(u64::from(threads) / 32) as u32;
    let receive_from = numbers.below(u64::from(senders.min(threads / 32 - 1)) + 1) as u32;
    let piece = one_of(numbers, &[1024, 2048]);
    let back_threads = 32 * (2 + numbers.below(4) as u32);
    let back_stages = numbers.below(4) as u32;
    let rank_threads = one_of(numbers, &[128, 256]);
    let rank_movers = 1 + numbers.below(u64::from(rank_threads / 32 - 1).min(4)) as u32;
    let marks = numbers.once_in(3);
    let granted = numbers.once_in(2);
    Shape {
        hidden,
        topk: 1 + numbers.below(u64::from(experts.min(8))) as u32,
        experts,
        ranks,
        max_tokens: 1 + numbers.below(if expert_layout { 12 } else { 60 }) as u32,
        payload,
        prereduce: numbers.once_in(2),
        expert_layout,
        rank_layout: !expert_layout,
        regions: 3,
        tuning: Tuning {
            piece,
            threads,
            senders,
            receive_from,
            back_threads,
            back_stages,
            rank_threads,
            rank_movers,
            granted,
            slots: false,
            inboxes: 0,
            node: 0,
            early: false,
            marks,
        },
    }
}

fn job(shape: Shape, bulk: bool) -> Option<Job> {
    if shape.expert_layout {
        let build = Build::new(&["kernels/ep_expert.cu"]).defines(&shape.defines(bulk));
        return Job::made(&build, shape, shape.expert_threads(), shape.expert_shared());
    }
    let (source, defines, threads, shared) = rank_kernels(&shape, bulk);
    Job::made(&Build::new(&[source]).defines(&defines), shape, threads, shared)
}

/// All phases at once, or one launch for each.
fn steps(numbers: &mut Numbers, phases: &[u32]) -> Vec<u32> {
    if numbers.once_in(2) { vec![phases.iter().sum()] } else { phases.to_vec() }
}

/// Some operations in the expert layout, queued at once; now and then without a rank.
fn expert(job: &mut Job, numbers: &mut Numbers, seed: u64, without: &[usize]) -> Result<(), String> {
    let mut operations = Vec::new();
    for _ in 0..1 + numbers.below(4) {
        let shape = job.shape;
        let routing = Routing::random(numbers, &shape).without(without);
        let weights = one_of(numbers, &[Weights::None, Weights::Dispatch, Weights::Combine]);
        let operation = ByExpert::new(job, numbers, routing, weights);
        let blocks = 1 + numbers.below(3) as u32;
        steps(numbers, &[EP_SEND, EP_RECEIVE]).into_iter().for_each(|phases| operation.dispatch(job, blocks, phases));
        steps(numbers, &[EP_SEND, EP_RECEIVE]).into_iter().for_each(|phases| operation.combine(job, blocks, phases));
        operations.push(operation);
    }
    job.gpus.run(seed)?;
    operations
        .iter()
        .try_for_each(|operation| operation.check_dispatch(job).and_then(|()| operation.check_combine(job)))
}

/// The same in the rank layout: each has a region of its own.
fn rank(job: &mut Job, numbers: &mut Numbers, seed: u64, without: &[usize]) -> Result<(), String> {
    let mut operations: Vec<ByRank> = Vec::new();
    for region in 0..1 + numbers.below(3) as u32 {
        let shape = job.shape;
        let again = numbers.once_in(3);
        let operation = match operations.last() {
            Some(last) if again => last.again(job, numbers, region),
            _ => {
                let routing = Routing::random(numbers, &shape).without(without);
                ByRank::new(job, numbers, routing, region)
            }
        };
        let (blocks, senders) = (1 + numbers.below(3) as u32, numbers.below(3) as u32);
        let phases = steps(numbers, &[EP_ANNOUNCE, EP_SEND, EP_RECEIVE]);
        phases.into_iter().for_each(|phases| operation.dispatch(job, blocks, phases));
        steps(numbers, &[EP_SEND, EP_RECEIVE])
            .into_iter()
            .for_each(|phases| operation.combine(job, blocks, phases, if phases == BOTH { senders } else { 0 }));
        operations.push(operation);
    }
    job.gpus.run(seed)?;
    operations
        .iter()
        .try_for_each(|operation| operation.check_dispatch(job).and_then(|()| operation.check_combine(job)))
}

/// One shape and some runs of it; the last of them without one of the ranks, which the others know.
fn one_shape(seed: u64, expert_layout: bool) -> Option<()> {
    let mut numbers = Numbers(seed);
    let shape = shape(&mut numbers, expert_layout);
    let bulk = !numbers.once_in(4);
    println!("seed {seed}, bulk copies {bulk}: {shape:?}");
    let mut job = job(shape, bulk)?;
    for run in 0..RUNS {
        let lost = numbers.below(shape.ranks.into()) as usize;
        let masks = run + 2 >= RUNS && shape.ranks > 1 && (run + 2 == RUNS || !job.masked(0).is_empty());
        let without = if masks && job.masked(0).is_empty() && lost != 0 { vec![lost] } else { job.masked(0) };
        (0..shape.ranks as usize).for_each(|rank| without.iter().for_each(|lost| job.mask(rank, *lost)));
        let result = if expert_layout {
            expert(&mut job, &mut numbers, seed + run, &without)
        } else {
            rank(&mut job, &mut numbers, seed + run, &without)
        };
        result.unwrap_or_else(|error| panic!("seed {seed}, run {run}: {error}"));
        let faults: Vec<_> = (0..shape.ranks as usize).map(|rank| job.faults(rank)).collect();
        assert!(faults.iter().all(Vec::is_empty), "seed {seed}, run {run}: {faults:?}");
    }
    Some(())
}

fn number(name: &str, usual: u64) -> u64 {
    std::env::var(name).map_or(usual, |value| value.parse().unwrap_or_else(|_| panic!("{name} is no number: {value}")))
}

fn soak(expert_layout: bool) {
    let limit = Duration::from_secs(number("SOAK_SECONDS", 60));
    let (began, first) = (Instant::now(), number("SOAK_SEED", 1));
    for shape in 0.. {
        if began.elapsed() >= limit || one_shape((first + shape) << 8, expert_layout).is_none() {
            return;
        }
    }
}

#[test]
#[ignore = "takes as long as SOAK_SECONDS says"]
fn expert_layout() {
    soak(true);
}

#[test]
#[ignore = "takes as long as SOAK_SECONDS says"]
fn rank_layout() {
    soak(false);
}
