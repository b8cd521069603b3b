//! Dispatch and combine: two ranks on one GPU or two, blocks of few warps. Each phase is a launch of its own, and all ranks
//! have launched one before any launches the next, so that nothing has to run at the same time as anything else: under a
//! checker, launches may follow each other.

use std::time::Duration;

use crossrail_kernels::ep::{EP_ANNOUNCE, EP_RECEIVE, EP_SEND, Payload, Scale, Shape, Tuning};

use crossrail_emulator::coding::Coding;
use crossrail_emulator::job::{ByExpert, Job, Weights};
use crossrail_emulator::job_rank::ByRank;
use crossrail_emulator::reference::{Choice, Routing};
use crossrail_emulator::shapes::rank_kernels;
use crossrail_emulator::{Gpus as _, Numbers};

use crate::device::{Build, DeviceGpus};
use crate::{LIMIT, Outcome};

const BLOCKS: u32 = 2;
const SHAPE: Shape = Shape {
    hidden: 1280,
    topk: 3,
    experts: 6,
    ranks: 2,
    max_tokens: 9,
    payload: Payload::Fp8(Scale::F32),
    prereduce: true,
    expert_layout: true,
    rank_layout: false,
    regions: 1,
    tuning: Tuning { threads: 128, rank_threads: 128, rank_movers: 2, ..Tuning::USUAL },
};

/// All kernels of both layouts; how many launches there were.
pub(crate) fn all() -> Outcome<usize> {
    let bf16 = Shape { payload: Payload::Bf16, hidden: 1032, ..SHAPE };
    let packed = Shape { payload: Payload::Fp8(Scale::Ue8m0), hidden: 1024, prereduce: false, ..SHAPE };
    let mut launches = 0;
    for shape in [SHAPE, bf16, packed] {
        launches += expert(shape)?;
        for granted in [true, false] {
            let tuning = Tuning { granted, ..shape.tuning };
            launches += rank(Shape { expert_layout: false, rank_layout: true, max_tokens: 40, tuning, ..shape })?;
        }
    }
    Ok(launches)
}

fn job(
    sources: &[&str],
    defines: &[String],
    shape: Shape,
    threads: [u32; 2],
    shared: [u32; 2],
) -> Outcome<Job<DeviceGpus>> {
    let gpus = Build::new(sources).defines(defines).gpus().ok_or("there is no GPU with bulk copies")?;
    let mut job = Job::on(gpus, shape, threads, shared);
    job.gpus.limit = LIMIT;
    job.limit_ns = Duration::as_nanos(&LIMIT) as u64;
    Ok(job)
}

/// As many as there can be at `shape`'s ranks.
fn routing(numbers: &mut Numbers, shape: &Shape) -> Routing {
    let most = shape.max_tokens as usize;
    Routing::of(numbers, shape, &vec![most; shape.ranks as usize], Choice::Dropped)
}

fn expert(shape: Shape) -> Outcome<usize> {
    let (defines, shared) = (shape.defines(true), shape.expert_shared());
    let sources = ["kernels/ep_expert.cu", "kernels/ep_coded.cu"];
    let sources = if shape.has_coded() { &sources[..] } else { &sources[..1] };
    let mut job = job(sources, &defines, shape, shape.expert_threads(), shared)?;
    let mut launches = 0;
    let coding = if shape.has_coded() { Coding::Fp8 } else { Coding::Bf16 };
    for (weights, coding) in [(Weights::Dispatch, Coding::Bf16), (Weights::None, coding)] {
        let mut numbers = Numbers(launches as u64);
        let routing = routing(&mut numbers, &shape);
        let operation = ByExpert { coding, ..ByExpert::new(&mut job, &mut numbers, routing, weights) };
        for phases in [EP_SEND, EP_RECEIVE] {
            operation.dispatch(&mut job, BLOCKS, phases);
            job.gpus.run(0)?;
        }
        for phases in [EP_SEND, EP_RECEIVE] {
            operation.combine(&mut job, BLOCKS, phases);
            job.gpus.run(0)?;
        }
        let found = operation.check_dispatch(&job).and_then(|()| operation.check_combine(&job));
        found.map_err(|what| format!("{shape:?}: {what}; {}", job.fault_text()))?;
        launches += 4 * shape.ranks as usize;
    }
    Ok(launches)
}

fn rank(shape: Shape) -> Outcome<usize> {
    let (source, defines, threads, shared) = rank_kernels(&shape, true);
    let mut job = job(&[source], &defines, shape, threads, shared)?;
    let mut numbers = Numbers(1);
    let routing = routing(&mut numbers, &shape);
    let mut operation = ByRank::new(&mut job, &mut numbers, routing, 0);
    let mut launches = 0;
    for _ in 0..2 {
        for phases in [EP_ANNOUNCE, EP_SEND, EP_RECEIVE] {
            operation.dispatch(&mut job, BLOCKS, phases);
            job.gpus.run(0)?;
        }
        for phases in [EP_SEND, EP_RECEIVE] {
            operation.combine(&mut job, BLOCKS, phases, 0);
            job.gpus.run(0)?;
        }
        let found = operation.check_dispatch(&job).and_then(|()| operation.check_combine(&job));
        found.map_err(|what| format!("{shape:?}: {what}; {}", job.fault_text()))?;
        launches += 5 * shape.ranks as usize;
        operation = operation.again(&mut job, &mut numbers, 0);
    }
    Ok(launches)
}
