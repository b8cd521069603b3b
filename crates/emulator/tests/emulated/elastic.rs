//! Ranks that come, leave and come back, on emulated GPUs: what the host writes into heaps between operations is enough for
//! whoever comes to meet those that are there.

use std::ops::Range;

use crossrail_kernels::ep::{EP_ANNOUNCE, EP_RECEIVE, EP_SEND, Epochs, Shape};

use crossrail_emulator::job::{ByExpert, Job, Weights};
use crossrail_emulator::job_rank::ByRank;
use crossrail_emulator::reference::Routing;
use crossrail_emulator::shapes::{BY_EXPERT, by_rank, by_slot, rank_kernels};
use crossrail_emulator::{Build, GpuMemory as _, Gpus as _, Numbers};

const BOTH: u32 = EP_SEND | EP_RECEIVE;
const SHAPE: Shape = Shape { hidden: 384, max_tokens: 7, ..BY_EXPERT };
const RANKS: Shape = by_rank(SHAPE, 30);
const SLOTS: Shape = by_slot(SHAPE, 30);

/// Ranks as their hosts see each other.
struct Hosts {
    job: Job,
    connected: Vec<Vec<bool>>,
    /// Was connected before.
    stale: Vec<Vec<bool>>,
}

impl Hosts {
    fn new(job: Job) -> Hosts {
        let ranks = job.shape.ranks as usize;
        for rank in 0..ranks {
            (0..ranks).filter(|other| *other != rank).for_each(|other| job.mask(rank, other));
        }
        let mut connected = vec![vec![false; ranks]; ranks];
        connected.iter_mut().enumerate().for_each(|(rank, row)| row[rank] = true);
        Hosts { job, connected, stale: vec![vec![false; ranks]; ranks] }
    }

    fn epochs(&self, rank: usize) -> Epochs {
        let bytes: Vec<u8> = self.job.ranks[rank].heap.read(self.job.shape.heap().state as usize, Epochs::BYTES);
        Epochs::of(&bytes.try_into().unwrap())[0]
    }

    fn write(&self, rank: usize, at: u64, bytes: &[u8]) {
        self.job.ranks[rank].heap.write(at as usize, bytes);
    }

    /// All of these connect to those of them that they are not connected to.
    fn connect(&mut self, ranks: &[usize]) {
        let (shape, heap) = (self.job.shape, self.job.shape.heap());
        let said: Vec<Epochs> = (0..shape.ranks as usize).map(|rank| self.epochs(rank)).collect();
        for &rank in ranks {
            let new: Vec<usize> = ranks.iter().copied().filter(|other| !self.connected[rank][*other]).collect();
            if new.is_empty() {
                continue;
            }
            for &other in &new {
                if std::mem::replace(&mut self.stale[rank][other], true) {
                    for span in shape.stale_ranges(other as u32) {
                        self.write(rank, span.at, &vec![0; span.len as usize]);
                    }
                }
            }
            let epochs = new.iter().fold(said[rank], |most, other| most.max(said[*other]));
            let known = (0..shape.ranks as usize).filter(|other| self.connected[rank][*other]);
            let late = if epochs == said[rank] { Vec::new() } else { known.collect() };
            self.write(rank, heap.state, &epochs.bytes());
            for other in late.into_iter().chain(new.iter().copied()) {
                self.write(rank, heap.taken(other as u32), &epochs.words());
            }
            for other in new {
                self.connected[rank][other] = true;
                self.write(rank, heap.masks + 4 * other as u64, &[0; 4]);
            }
        }
    }

    /// One leaves the others.
    fn disconnect(&mut self, leaves: usize) {
        for other in (0..self.connected.len()).filter(|other| *other != leaves) {
            for (rank, gone) in [(leaves, other), (other, leaves)] {
                self.connected[rank][gone] = false;
                self.job.mask(rank, gone);
            }
        }
    }

    /// A dispatch and its combine of these ranks.
    fn operate(&mut self, ranks: &[usize], seed: u64) {
        let (shape, mut numbers) = (self.job.shape, Numbers(seed));
        let absent: Vec<usize> = (0..shape.ranks as usize).filter(|rank| !ranks.contains(rank)).collect();
        let routing = Routing::random(&mut numbers, &shape).without(&absent);
        let (job, blocks) = (&mut self.job, 1 + (seed % 2) as u32);
        let run = |job: &mut Job| job.gpus.run(seed).unwrap_or_else(|what| panic!("ranks {ranks:?}: {what}"));
        let checked = if shape.expert_layout {
            let weights = [Weights::None, Weights::Dispatch, Weights::Combine][seed as usize % 3];
            let operation = ByExpert::new(job, &mut numbers, routing, weights);
            operation.dispatch(job, blocks, BOTH);
            operation.combine(job, blocks, BOTH);
            run(job);
            operation.check_dispatch(job).and_then(|()| operation.check_combine(job))
        } else {
            let operation = ByRank::new(job, &mut numbers, routing, seed as u32 % 2);
            operation.dispatch(job, blocks, EP_ANNOUNCE | BOTH);
            operation.combine(job, blocks, BOTH, 0);
            run(job);
            operation.check_dispatch(job).and_then(|()| operation.check_combine(job))
        };
        checked.unwrap_or_else(|what| panic!("ranks {ranks:?}, seed {seed}: {what}"));
        for rank in ranks {
            assert_eq!(self.job.faults(*rank), [], "rank {rank} of {ranks:?}, seed {seed}");
        }
    }
}

fn come_and_go(job: Option<Job>, seeds: Range<u64>) {
    let Some(job) = job else { return };
    let mut hosts = Hosts::new(job);
    let mut together: Vec<usize> = vec![0];
    for seed in seeds {
        let mut numbers = Numbers(seed);
        let all = 0..hosts.job.shape.ranks as usize;
        let next: Vec<usize> = all.clone().filter(|_| !numbers.once_in(3)).collect();
        together.iter().filter(|rank| !next.contains(rank)).for_each(|rank| hosts.disconnect(*rank));
        hosts.connect(&next);
        let operations = numbers.below(4);
        for number in 0..operations {
            if !next.is_empty() {
                hosts.operate(&next, 100 * seed + number);
            }
        }
        // Those that are alone go on too, some further than the others.
        for rank in all.filter(|rank| !next.contains(rank)) {
            (0..numbers.below(4))
                .for_each(|number| hosts.operate(&[rank], 100 * seed + 10 * (1 + rank as u64) + number));
        }
        together = next;
    }
}

#[test]
fn ranks_come_and_go_in_the_expert_layout() {
    come_and_go(Job::new(&["kernels/ep_expert.cu"], SHAPE, SHAPE.expert_shared()), 0..14);
}

#[test]
fn ranks_come_and_go_in_the_rank_layout() {
    for shape in [RANKS, SLOTS] {
        let (source, defines, threads, shared) = rank_kernels(&shape, true);
        come_and_go(Job::made(&Build::new(&[source]).defines(&defines), shape, threads, shared), 20..34);
    }
}

/// Words carry the low half of an epoch, which comes back to 0: that of words which nobody has written.
fn numbers_wrap(job: Option<Job>) {
    let Some(job) = job else { return };
    let mut hosts = Hosts::new(job);
    let (heap, ranks) = (hosts.job.shape.heap(), hosts.job.shape.ranks as usize);
    let last = u64::from(u32::MAX) - 1;
    let epochs = Epochs { dispatch: last, combine: last };
    for rank in 0..ranks {
        hosts.write(rank, heap.state, &epochs.bytes());
        hosts.write(rank, heap.taken(rank as u32), &epochs.words());
    }
    let some: Vec<usize> = (0..ranks - 1).collect();
    hosts.connect(&some);
    (0..4).for_each(|seed| hosts.operate(&some, seed));
}

#[test]
fn numbers_wrap_in_the_expert_layout() {
    numbers_wrap(Job::new(&["kernels/ep_expert.cu"], SHAPE, SHAPE.expert_shared()));
}

#[test]
fn numbers_wrap_in_the_rank_layout() {
    for shape in [RANKS, SLOTS] {
        let (source, defines, threads, shared) = rank_kernels(&shape, true);
        numbers_wrap(Job::made(&Build::new(&[source]).defines(&defines), shape, threads, shared));
    }
}
