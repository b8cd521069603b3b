//! More ranks than a word has bits: the host's half of each (its heap, masks, sets, lanes and reports of faults)
//! together with the kernels, which are emulated.
#![allow(unsafe_code)]

use std::sync::Arc;

use crossrail::placing::Placing;
use crossrail::{ConnectOptions, Context, Endpoint, Settings, Worker, WorkerOptions};
use crossrail_cuda::{Grid, KernelArgs};
use crossrail_emulator::job::{ByExpert, Job, Rank, Weights};
use crossrail_emulator::job_rank::ByRank;
use crossrail_emulator::reference::{Choice, Routing};
use crossrail_emulator::shapes::{by_slot, rank_kernels};
use crossrail_emulator::{Build, Emulator, GpuMemory as _, Gpus as _, Memory, Numbers};
use crossrail_kernels::ep::{
    EP_ANNOUNCE, EP_COMMANDS, EP_RECEIVE, EP_SEND, Inbox, Payload, Scale, Shape, Tuning, nodes_of,
};
use crossrail_transport::placing::dry;

use crate::fault_ring::{self, stage};
use crate::heap::{self, Heap};
use crate::membership::State;
use crate::peer::{Path, Peer};
use crate::proxy::turns::Turns;
use crate::proxy::{self, Area, FarRank, Link, Offer, Ring};

const BOTH: u32 = EP_SEND | EP_RECEIVE;
const SOURCE: &str = "kernels/many.cu";
/// Stream of the host's thread.
const HOST: u32 = 300;

#[repr(C)]
#[derive(Clone, Copy)]
struct HostArgs {
    ended: u64,
    expected: u64,
    turn: u64,
    context: u64,
}
// SAFETY: the struct that the kernel takes.
unsafe impl KernelArgs for HostArgs {}

#[repr(C)]
#[derive(Clone, Copy)]
struct EndArgs {
    ended: u64,
}
// SAFETY: as above.
unsafe impl KernelArgs for EndArgs {}

/// Host of a rank.
struct Host {
    heap: Heap,
    state: State,
    ring: Area,
    faults: u64,
}

/// All lanes take a turn. Returns whether anything moved.
unsafe extern "C" fn turn(turns: *mut Turns) -> u32 {
    // SAFETY: the job's, which only this function accesses during a run.
    u32::from(unsafe { &mut *turns }.turn())
}

/// `nodes` nodes of `node` ranks, each with few tokens.
const fn few(nodes: u32, node: u32) -> Shape {
    let ranks = nodes * node;
    Shape {
        hidden: 128,
        topk: 2,
        experts: ranks,
        ranks,
        max_tokens: 1,
        payload: Payload::Fp8(Scale::F32),
        prereduce: true,
        expert_layout: true,
        rank_layout: false,
        regions: 0,
        tuning: Tuning { threads: 32, back_threads: 64, node, ..Tuning::USUAL },
    }
}

/// Ranks with their hosts. An endpoint stands for all connections.
struct Many {
    job: Job,
    states: Vec<State>,
    turns: Box<Turns>,
    _areas: Vec<Memory>,
    _heaps: Vec<Heap>,
    _ends: (Worker, Worker, Endpoint),
}

impl Many {
    fn new(shape: Shape) -> Option<Many> {
        let build = |kernels: &str| Build::new(&[kernels, SOURCE]).with(SOURCE, include_str!("many.cu"));
        let mut job = if shape.rank_layout {
            let (kernels, defines, threads, shared) = rank_kernels(&shape, true);
            Job::made(&build(kernels).defines(&defines), shape, threads, shared)?
        } else {
            Job::of(&build("kernels/ep_expert.cu"), shape, shape.expert_shared())?
        };
        job.gpus.limit_ms = 600_000;
        let context = Context::new(Settings::default()).unwrap();
        let worker = || Worker::new(&context, WorkerOptions::default()).unwrap();
        let (one, other) = (worker(), worker());
        let endpoint = one.connect(&other.address(), &ConnectOptions::default()).unwrap();
        let mut hosts: Vec<Host> = (0..shape.ranks).map(|me| Host::new(&context, &shape, me)).collect();
        let bases: Vec<u64> = hosts.iter().map(|host| host.heap.base()).collect();
        let (nodes, mut turns) = (nodes_of(&shape), Box::new(Turns::new()));
        hosts.iter().for_each(|host| turns.add(host.ring.clone(), shape.ranks));
        for me in 0..shape.ranks {
            for rank in (0..shape.ranks).filter(|rank| *rank != me) {
                let host = &mut hosts[me as usize];
                if nodes.gateways(me, rank).is_none() {
                    host.heap.set_near(rank, bases[rank as usize], me).unwrap();
                    host.heap.set_mask(rank, false).unwrap();
                } else if nodes.gateways(me, rank).is_some_and(|[theirs, _]| theirs != rank) {
                    host.connect(rank, Path::Through { endpoint: endpoint.clone() });
                } else if me < rank {
                    let [here, there] = link(&shape, [me, rank]);
                    for (me, (far, link)) in [(me, here), (rank, there)] {
                        turns.connect(me as usize, link);
                        hosts[me as usize].connect(far.rank, Path::Far { endpoint: endpoint.clone(), far });
                    }
                }
            }
        }
        let mut kept = Vec::new();
        for (rank, host) in hosts.iter().enumerate() {
            host.heap.set_far(&host.state.far_ranks()).unwrap();
            job.ranks[rank] = host.lend(&mut job.gpus, rank, &job.ranks[rank], &mut kept);
        }
        let (states, heaps) = hosts.into_iter().map(|host| (host.state, host.heap)).unzip();
        Some(Many { job, states, turns, _areas: kept, _heaps: heaps, _ends: (one, other, endpoint) })
    }

    /// Runs the queued launches and the host's thread.
    fn run(&mut self, seed: u64) {
        let ended = self.job.gpus.zeroed("ended", 8);
        let one = Grid { blocks: 1, threads: 32, shared: 0 };
        let expected = u64::from(self.job.shape.ranks);
        for rank in 0..self.job.shape.ranks {
            self.job.gpus.launch_on(rank, "crossrail_test_end", &EndArgs { ended: ended.address() }, one);
        }
        let context = (&raw mut *self.turns) as u64;
        let args = HostArgs { ended: ended.address(), expected, turn: turn as *const () as u64, context };
        self.job.gpus.launch_on(HOST, "crossrail_test_host", &args, one);
        self.job.gpus.run(seed).unwrap();
    }

    /// Losses that each rank's host reads: rank and stage.
    fn named(&mut self) -> Vec<Vec<(u32, &'static str)>> {
        let faults =
            |state: &mut State| state.reported_faults().iter().map(|told| (told.rank, stage(told.stage).1)).collect();
        self.states.iter_mut().map(faults).collect()
    }
}

/// Links of two ranks to each other.
fn link(shape: &Shape, ranks: [u32; 2]) -> [(Arc<FarRank>, Link); 2] {
    let (first, second, _) = dry::pair(2, u64::from(ranks[0]));
    let inbox = Inbox::of(shape);
    let area = || Area::plain(inbox.area_bytes() as usize);
    let offer = |placing: Box<dyn Placing>, rank: u32| {
        let far = Arc::new(FarRank::new(rank, area(), area(), inbox, 1));
        (Offer::new(placing, &far, 0).unwrap(), far)
    };
    let ends = [offer(Box::new(first), ranks[1]), offer(Box::new(second), ranks[0])];
    let [theirs, ours] = [0, 1].map(|end| ends[end].0.targets());
    let [one, other] = ends;
    [(one.1, one.0.accept(&ours).unwrap()), (other.1, other.0.accept(&theirs).unwrap())]
}

impl Host {
    fn new(context: &Context, shape: &Shape, me: u32) -> Host {
        let memory = context.alloc(usize::try_from(heap::bytes(shape)).unwrap()).unwrap();
        let heap = Heap::new(memory, shape, shape, me).unwrap();
        for rank in 0..shape.ranks {
            heap.clear_path(rank).unwrap();
            heap.set_mask(rank, rank != me).unwrap();
        }
        heap.set_path(&Peer::myself(me)).unwrap();
        assert_eq!(proxy::lanes(shape.ranks), 1);
        let ring = Area::plain(Ring::BYTES);
        heap.set_rings(&[Ring::addresses(&ring)]).unwrap();
        let faults = fault_ring::Ring::of(Area::plain(fault_ring::Ring::bytes(shape)));
        let address = faults.address();
        let state = State::alone(me, shape.ranks, faults);
        Host { heap, state, ring, faults: address }
    }

    fn connect(&mut self, rank: u32, path: Path) {
        let peer = Peer { rank, generation: 1, masked: false, lost: None, departure: None, path, life: None };
        self.heap.set_path(&peer).unwrap();
        self.heap.set_mask(rank, false).unwrap();
        self.state.replace(rank, Some(peer));
    }

    /// Its memory in place of `made`, which the job has made.
    fn lend(&self, gpus: &mut Emulator, rank: usize, made: &Rank, kept: &mut Vec<Memory>) -> Rank {
        let (heap, table) = (&self.heap, made.peers.len());
        // SAFETY: hosts outlive the job, and do nothing but by `turn`, between accesses of kernels.
        let mut lend = |name: &str, at: u64, bytes: usize| unsafe { gpus.lend(&format!("{name} {rank}"), at, bytes) };
        let end = heap.base() + heap.len();
        let commands = 16 * EP_COMMANDS as usize;
        let [list, read] = Ring::addresses(&self.ring);
        for area in self.state.peers().filter_map(Peer::far) {
            for (way, area) in [("for", &area.send), ("of", &area.receive)] {
                kept.push(lend(&format!("area {way} a rank at host of"), area.address(), area.len()));
            }
        }
        Rank {
            heap: lend("heap", heap.base(), (heap.peers() - heap.base()) as usize),
            peers: lend("peers of", heap.peers(), table),
            to: lend("inboxes of", heap.to(), table),
            from: lend("inboxes at", heap.from(), table),
            rings: lend("rings of", heap.rings(), (end - heap.rings()) as usize),
            commands: lend("commands of host of", list, commands),
            read: lend("commands read at host of", read, 8),
            faults: lend("faults of", self.faults, made.faults.len()),
            waits: made.waits.clone(),
        }
    }
}

/// A dispatch and its combine, then a dispatch that a rank does not take part in: the sums are right, and every other rank's
/// host names that one.
fn a_pair_and_a_loss(shape: Shape, gone: usize, seed: u64) {
    let Some(mut many) = Many::new(shape) else { return };
    let mut numbers = Numbers(seed);
    let tokens = vec![1; shape.ranks as usize];
    let routing = Routing::of(&mut numbers, &shape, &tokens, Choice::Even);
    let operation = ByExpert::new(&mut many.job, &mut numbers, routing.clone(), Weights::Combine);
    operation.dispatch(&mut many.job, 1, BOTH);
    many.run(seed);
    operation.combine(&mut many.job, 1, BOTH);
    many.run(seed + 1);
    operation.check_dispatch(&many.job).and_then(|()| operation.check_combine(&many.job)).unwrap();
    assert!(many.named().iter().all(Vec::is_empty));
    many.job.limit_ns = 1_000_000_000;
    let less = ByExpert::new(&mut many.job, &mut numbers, routing.without(&[gone]), Weights::None);
    less.dispatch(&mut many.job, 1, BOTH);
    many.run(seed + 2);
    let text = many.job.fault_text();
    for (rank, named) in many.named().into_iter().enumerate().filter(|(rank, _)| *rank != gone) {
        assert_eq!(named.iter().map(|(rank, _)| *rank as usize).collect::<Vec<_>>(), [gone], "rank {rank}: {text}");
    }
    assert_eq!(many.turns.lost(), [], "its proxy lives");
}

/// A pair in the rank layout, with slots.
fn a_pair_by_rank(shape: Shape, seed: u64) {
    let Some(mut many) = Many::new(by_slot(shape, 1)) else { return };
    let mut numbers = Numbers(seed);
    let tokens = vec![1; shape.ranks as usize];
    let routing = Routing::of(&mut numbers, &many.job.shape, &tokens, Choice::Even);
    let operation = ByRank::new(&mut many.job, &mut numbers, routing, 0);
    operation.dispatch(&mut many.job, 1, EP_ANNOUNCE | BOTH);
    operation.combine(&mut many.job, 1, BOTH, 0);
    many.run(seed);
    operation.check_dispatch(&many.job).and_then(|()| operation.check_combine(&many.job)).unwrap();
    assert!(many.named().iter().all(Vec::is_empty));
}

/// On one node, without proxies: two ranks name the 70 others that never call.
#[test]
fn more_ranks_than_a_word_has_bits_are_lost_at_once_and_named() {
    let shape = few(1, 72);
    let shape = Shape { tuning: Tuning { node: 0, ..shape.tuning }, ..shape };
    let Some(mut many) = Many::new(shape) else { return };
    many.job.limit_ns = 1_000_000_000;
    let gone: Vec<usize> = (1..71).collect();
    let mut numbers = Numbers(120);
    let routing = Routing::of(&mut numbers, &shape, &[1; 72], Choice::Even).without(&gone);
    let operation = ByExpert::new(&mut many.job, &mut numbers, routing, Weights::None);
    operation.dispatch(&mut many.job, 1, BOTH);
    many.run(120);
    let named = many.named();
    for rank in [0, 71] {
        let mut of_rank: Vec<usize> = named[rank].iter().map(|(rank, _)| *rank as usize).collect();
        of_rank.sort_unstable();
        assert_eq!(of_rank, gone, "rank {rank}");
    }
}

#[test]
fn seventy_two_ranks_with_their_hosts() {
    a_pair_and_a_loss(few(9, 8), 70, 100);
    a_pair_by_rank(few(9, 8), 105);
}

/// Takes minutes.
#[test]
#[ignore = "takes minutes"]
fn sixteen_nodes_of_eight_ranks_with_their_hosts() {
    a_pair_and_a_loss(few(16, 8), 127, 110);
    a_pair_by_rank(few(16, 8), 115);
}
