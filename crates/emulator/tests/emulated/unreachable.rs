//! Ranks out of each other's reach, on emulated GPUs: kernels write into mirrors of their heaps, and what of those must be
//! written on, is.

use crossrail_kernels::ep::{EP_ANNOUNCE, EP_RECEIVE, EP_SEND, Layout, Load, Look, Payload, Shape, There};
use crossrail_types::Result;

use crossrail_emulator::job::{ByExpert, Job, Weights};
use crossrail_emulator::job_rank::ByRank;
use crossrail_emulator::reference::Routing;
use crossrail_emulator::shapes::{BY_EXPERT, by_rank, by_slot, rank_kernels};
use crossrail_emulator::{Build, GpuMemory as _, Gpus as _, Memory, Numbers};

const SHAPE: Shape = BY_EXPERT;
const RANKS: Shape = by_rank(SHAPE, 40);
const SLOTS: Shape = by_slot(SHAPE, 40);

/// Memory is this process's own.
struct Here;

impl Look for Here {
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<()> {
        // SAFETY: an address of the emulator's memory, as many bytes of which are asked for as kernels have there.
        unsafe { std::ptr::copy_nonoverlapping(address as usize as *const u8, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }
}

/// Ranks on nodes of two.
struct Far {
    job: Job,
    /// By rank and far rank.
    mirrors: Vec<Vec<Option<Memory>>>,
    masked: Vec<usize>,
}

impl Far {
    fn new(mut job: Job) -> Far {
        let (ranks, bytes) = (job.shape.ranks as usize, job.shape.heap_bytes() as usize);
        let mut mirrors = vec![vec![None; ranks]; ranks];
        for (rank, mirrors) in mirrors.iter_mut().enumerate() {
            for (other, mirror) in mirrors.iter_mut().enumerate().filter(|(other, _)| other / 2 != rank / 2) {
                let memory = job.gpus.zeroed(&format!("mirror of {other} at {rank}"), bytes);
                job.ranks[rank].peers.write(8 * other, &[memory.address()]);
                *mirror = Some(memory);
            }
        }
        Far { job, mirrors, masked: Vec::new() }
    }

    /// Writes on what each rank has for others.
    fn carry(&self, load: impl Fn(usize, There) -> Load) {
        for (rank, mirrors) in self.mirrors.iter().enumerate().filter(|(rank, _)| !self.masked.contains(rank)) {
            for (other, mirror) in mirrors.iter().enumerate().filter(|(other, _)| !self.masked.contains(other)) {
                let Some(mirror) = mirror else { continue };
                let load = load(rank, There { rank: other as u32, mirror: mirror.address() });
                for span in load.rows.iter().chain(&load.told).chain([&load.line]) {
                    let bytes: Vec<u8> = mirror.read(span.at as usize, span.len as usize);
                    self.job.ranks[other].heap.write(span.at as usize, &bytes);
                }
            }
        }
    }

    fn run(&mut self, seed: u64) {
        self.job.gpus.run(seed).unwrap_or_else(|what| panic!("{what}"));
    }

    fn expert(&mut self, operation: &ByExpert, seed: u64) {
        let (shape, blocks) = (self.job.shape, 1 + (seed % 3) as u32);
        for phase in [EP_SEND, EP_RECEIVE] {
            operation.dispatch(&mut self.job, blocks, phase);
            self.run(seed);
            self.carry(|rank, to| {
                let mut args = operation.ranks[rank].dispatch;
                args.common.phases = phase;
                shape.dispatched(Layout::Expert, &args, to, &Here).unwrap()
            });
        }
        operation.check_dispatch(&self.job).unwrap_or_else(|what| panic!("seed {seed}: {what}"));
        for (rank, mirrors) in self.mirrors.iter().enumerate().filter(|(rank, _)| !self.masked.contains(rank)) {
            let Some((span, words)) = shape.weights(&operation.ranks[rank].combine, &Here).unwrap() else { continue };
            for (other, mirror) in mirrors.iter().enumerate() {
                if let Some(mirror) = mirror {
                    mirror.write(span.at as usize, &words);
                    self.job.ranks[other].heap.write(span.at as usize, &words);
                }
            }
        }
        for phase in [EP_SEND, EP_RECEIVE] {
            operation.combine(&mut self.job, blocks, phase);
            self.run(seed);
            self.carry(|rank, to| {
                let mut args = operation.ranks[rank].combine;
                args.common.phases = phase;
                shape.combined(Layout::Expert, &args, to, &Here).unwrap()
            });
        }
        operation.check_combine(&self.job).unwrap_or_else(|what| panic!("seed {seed}: {what}"));
    }

    fn rank(&mut self, operation: &ByRank, seed: u64) {
        let (shape, blocks) = (self.job.shape, 1 + (seed % 3) as u32);
        for phase in [EP_ANNOUNCE, EP_SEND, EP_RECEIVE] {
            operation.dispatch(&mut self.job, blocks, phase);
            self.run(seed);
            self.carry(|rank, to| {
                let mut args = operation.ranks[rank].dispatch;
                args.common.phases = phase;
                shape.dispatched(Layout::Rank, &args, to, &Here).unwrap()
            });
        }
        operation.check_dispatch(&self.job).unwrap_or_else(|what| panic!("seed {seed}: {what}"));
        for phase in [EP_SEND, EP_RECEIVE] {
            operation.combine(&mut self.job, blocks, phase, 0);
            self.run(seed);
            self.carry(|rank, to| {
                let mut args = operation.ranks[rank].combine;
                args.common.phases = phase;
                shape.combined(Layout::Rank, &args, to, &Here).unwrap()
            });
        }
        operation.check_combine(&self.job).unwrap_or_else(|what| panic!("seed {seed}: {what}"));
    }

    fn no_faults(&self) {
        for rank in 0..self.job.shape.ranks as usize {
            assert_eq!(self.job.faults(rank), [], "rank {rank}");
        }
    }
}

fn expert_rounds(shape: Shape, seeds: std::ops::Range<u64>) {
    let Some(job) = Job::new(&["kernels/ep_expert.cu"], shape, shape.expert_shared()) else { return };
    let mut far = Far::new(job);
    for seed in seeds {
        let mut numbers = Numbers(seed);
        let routing = Routing::random(&mut numbers, &shape);
        let weights = [Weights::None, Weights::Dispatch, Weights::Combine][seed as usize % 3];
        let operation = ByExpert::new(&mut far.job, &mut numbers, routing, weights);
        far.expert(&operation, seed);
    }
    far.no_faults();
}

fn rank_job(shape: Shape) -> Option<Far> {
    let (source, defines, threads, shared) = rank_kernels(&shape, true);
    Some(Far::new(Job::made(&Build::new(&[source]).defines(&defines), shape, threads, shared)?))
}

#[test]
fn rows_of_the_expert_layout_reach_ranks_out_of_reach() {
    expert_rounds(SHAPE, 0..8);
}

#[test]
fn without_prereduction_too() {
    expert_rounds(Shape { prereduce: false, payload: Payload::Bf16, hidden: 1032, ..SHAPE }, 10..16);
}

#[test]
fn rows_of_the_rank_layout_reach_ranks_out_of_reach() {
    [RANKS, SLOTS].into_iter().for_each(rank_rounds);
}

fn rank_rounds(shape: Shape) {
    let Some(mut far) = rank_job(shape) else { return };
    for seed in 20..28 {
        let mut numbers = Numbers(seed);
        let routing = Routing::random(&mut numbers, &shape);
        let operation = ByRank::new(&mut far.job, &mut numbers, routing, seed as u32 % 2);
        far.rank(&operation, seed);
        if seed % 3 == 0 {
            let again = operation.again(&mut far.job, &mut numbers, (seed as u32 + 1) % 2);
            far.rank(&again, seed + 1000);
        }
    }
    far.no_faults();
}

#[test]
fn a_masked_rank_out_of_reach_is_left_out() {
    [RANKS, SLOTS].into_iter().for_each(masked_rounds);
}

fn masked_rounds(shape: Shape) {
    let Some(mut far) = rank_job(shape) else { return };
    far.masked = vec![2];
    [0, 1, 3].into_iter().for_each(|rank| far.job.mask(rank, 2));
    for seed in 40..44 {
        let mut numbers = Numbers(seed);
        let routing = Routing::random(&mut numbers, &shape).without(&[2]);
        let operation = ByRank::new(&mut far.job, &mut numbers, routing, seed as u32 % 2);
        far.rank(&operation, seed);
    }
    far.no_faults();
}
