//! Ranks on other nodes, on emulated GPUs: kernels write into pinned memory and append commands, and proxies carry what
//! these name over rails that keep no order, as threads that the same checks watch.

use std::cell::Cell;

use crossrail_cuda::{Grid, KernelArgs};
use crossrail_kernels::ep::{
    Announce, Command, EP_RECEIVE, EP_SEND, EP_STAGE_TABLE, EpRing, Inbox, Layout, LinkRows, Payload, RankRows, Rows,
    Scale, Sequence, Shape, Tuning, Way,
};

use crossrail_emulator::coding::Coding;
use crossrail_emulator::job::{ByExpert, Job, Weights};
use crossrail_emulator::job_rank::ByRank;
use crossrail_emulator::reference::{Choice, Routing};
use crossrail_emulator::shapes::{BY_EXPERT, by_rank, by_slot, rank_kernels};
use crossrail_emulator::{Build, GpuMemory as _, Gpus as _, Memory, Numbers};

use crate::by_rank::ALL;

/// As buffers between nodes are: flags have a line each.
const SHAPE: Shape = Shape { tuning: Tuning { slots: true, ..BY_EXPERT.tuning }, ..BY_EXPERT };
const SLOTS: Shape = by_slot(SHAPE, 40);
const BOTH: u32 = EP_SEND | EP_RECEIVE;

/// With heaps that have inboxes for the two ranks of a node only.
const fn of_node(shape: Shape) -> Shape {
    Shape { tuning: Tuning { inboxes: 2, ..shape.tuning }, ..shape }
}

/// Streams of the ranks' proxies.
const PROXIES: u32 = 300;
pub(crate) const PROXY: &str = "kernels/proxy.cu";

#[repr(C)]
#[derive(Clone, Copy)]
struct ProxyArgs {
    rings: u64,
    inboxes: u64,
    from: u64,
    told: u64,
    progress: u64,
    claims: u64,
    own: u64,
    ended: u64,
    expected: u64,
    decode: u64,
    context: u64,
    rank: u32,
    delay: u32,
    slow: u32,
    cut: u32,
}
// SAFETY: the struct that the kernel takes.
unsafe impl KernelArgs for ProxyArgs {}

#[repr(C)]
#[derive(Clone, Copy)]
struct EndArgs {
    ended: u64,
}
// SAFETY: as above.
unsafe impl KernelArgs for EndArgs {}

/// Decodes the commands of one rank.
struct Decoder {
    inbox: Inbox,
    last: [Cell<u64>; 2],
    /// Bytes of rows that its proxy has carried, by sequence.
    rows: [Cell<u64>; 2],
}

/// Decodes a command that has arrived: kind, offset, count, value and distance of what it announces.
unsafe extern "C" fn decode(context: *const Decoder, what: u64, number: u64, out: *mut u64) {
    // SAFETY: the job's decoder, which outlives the run.
    let decoder = unsafe { &*context };
    let command = Command::of_note([what, number]);
    let last = &decoder.last[usize::from(command.sequence() == Sequence::Combine)];
    let epoch = command.epoch(last.get());
    last.set(last.get().max(epoch));
    if command.is_rows() {
        let rows = &decoder.rows[usize::from(command.sequence() == Sequence::Combine)];
        rows.set(rows.get() + command.len());
    }
    let words = match decoder.inbox.announce(&command, epoch) {
        Ok(Announce::Flags { at, count, apart, value }) => [0, at, count, value, apart],
        Ok(Announce::Tags { at, count, tag }) => [1, at, count, u64::from(tag), 8],
        Ok(Announce::Taken { at, epoch, .. }) => [2, at, 1, epoch, 8],
        // At the line's start, where the test looks.
        Err(_) => [0, 8 * 15, 1, u64::MAX, 8],
    };
    // SAFETY: five words that the caller owns.
    unsafe { std::ptr::copy_nonoverlapping(words.as_ptr(), out, 5) };
}

/// Ranks on several nodes, with a proxy each.
pub(crate) struct Far {
    pub(crate) job: Job,
    decoders: Vec<Decoder>,
    /// By rank and far rank: what it sends from, and what it receives in.
    areas: Vec<Vec<Option<[Memory; 2]>>>,
    told: Memory,
    progress: Vec<Memory>,
    own: Vec<Memory>,
    /// By rank: those that it sends to through its proxy, as bits.
    _sets: Vec<Memory>,
    /// Ranks whose proxies do nothing.
    pub(crate) stuck: Vec<usize>,
    /// The rank whose proxy ends after `cut` commands of each ring.
    pub(crate) killed: Option<usize>,
    pub(crate) cut: u32,
    rails: u32,
    delay: u32,
    pub(crate) slow: u32,
}

impl Far {
    /// Rows go once to each rank: nodes are of two.
    fn new(job: Job) -> Far {
        Far::of(job, |rank, other| rank / 2 != other / 2)
    }

    /// Rows go once to each node, to the rank of the sender's number there.
    pub(crate) fn once_per_node(job: Job) -> Far {
        let node = job.shape.tuning().node as usize;
        Far::of(job, |rank, other| rank != other && rank % node == other % node)
    }

    /// With links between the ranks that `is_linked` names.
    fn of(mut job: Job, is_linked: impl Fn(usize, usize) -> bool) -> Far {
        let once = job.shape.tuning().node > 0;
        let ranks = job.shape.ranks as usize;
        let inbox = Inbox::of(&job.shape);
        let mut sets = Vec::new();
        let mut areas = vec![vec![const { None }; ranks]; ranks];
        for (rank, areas) in areas.iter_mut().enumerate() {
            let mut far = vec![0u64; ranks.div_ceil(64)];
            for (other, area) in areas.iter_mut().enumerate().filter(|(other, _)| is_linked(rank, *other)) {
                let pair = ["for", "of"].map(|way| {
                    job.gpus.zeroed(&format!("area {way} {other} at host of {rank}"), inbox.area_bytes() as usize)
                });
                job.ranks[rank].to.write(8 * other, &[pair[0].address()]);
                let table = if once { &job.ranks[rank].peers } else { &job.ranks[rank].from };
                table.write(8 * other, &[pair[1].address()]);
                *area = Some(pair);
                far[other / 64] |= 1 << (other % 64);
            }
            let words = job.gpus.memory_of(&format!("far ranks of {rank}"), &far);
            let far = if far.len() > 1 { words.address() } else { far[0] };
            (0..2).for_each(|ring| job.ranks[rank].rings.write(ring * size_of::<EpRing>(), &[far]));
            sets.push(words);
        }
        let rails = 4;
        let told = job.gpus.zeroed("told", ranks * ranks * 16);
        let progress = (0..ranks).map(|rank| job.gpus.zeroed(&format!("progress {rank}"), rails * 8)).collect();
        let own = (0..ranks).map(|rank| job.gpus.zeroed(&format!("own {rank}"), 2 * ranks * 16)).collect();
        let decoder = |_| Decoder { inbox, last: [const { Cell::new(0) }; 2], rows: [const { Cell::new(0) }; 2] };
        let decoders = (0..ranks).map(decoder).collect();
        let (stuck, killed, rails) = (Vec::new(), None, rails as u32);
        Far {
            job,
            decoders,
            areas,
            told,
            progress,
            own,
            _sets: sets,
            stuck,
            killed,
            cut: 0,
            rails,
            delay: 3000,
            slow: 0,
        }
    }

    /// Runs the queued launches and the proxies.
    pub(crate) fn run(&mut self, seed: u64) -> Result<(), String> {
        let ranks = self.job.shape.ranks as usize;
        let ended = self.job.gpus.zeroed("ended", 8);
        let mut kept = vec![ended.clone()];
        let one = Grid { blocks: 1, threads: 32, shared: 0 };
        for rank in 0..ranks {
            self.job.gpus.launch_on(rank as u32, "crossrail_test_end", &EndArgs { ended: ended.address() }, one);
        }
        for rank in (0..ranks).filter(|rank| !self.stuck.contains(rank)) {
            let area = |of: usize, from: usize, way: usize| {
                self.areas[of][from].as_ref().map_or(0, |pair: &[Memory; 2]| pair[way].address())
            };
            let carried = |other: &usize| !self.stuck.contains(other);
            let inboxes = (0..ranks)
                .flat_map(|other| [area(rank, other, 0), if carried(&other) { area(other, rank, 1) } else { 0 }]);
            let inboxes: Vec<u64> = inboxes.collect();
            let from: Vec<u64> = (0..ranks).map(|other| area(rank, other, 1)).collect();
            let inboxes = self.job.gpus.memory_of("inboxes", &inboxes);
            let from = self.job.gpus.memory_of("from", &from);
            let one = &self.job.ranks[rank];
            let rings: Vec<u64> = one.rings.read(0, 2 * size_of::<EpRing>() / 8);
            let first = [rings[2], rings[size_of::<EpRing>() / 8 + 2]];
            self.progress[rank].write(0, &first.repeat(self.rails as usize / 2));
            let claims = self.job.gpus.memory_of("claims", &first);
            let args = ProxyArgs {
                rings: one.rings.address(),
                inboxes: inboxes.address(),
                from: from.address(),
                told: self.told.address(),
                progress: self.progress[rank].address(),
                claims: claims.address(),
                own: self.own[rank].address(),
                ended: ended.address(),
                expected: ranks as u64,
                decode: decode as *const () as u64,
                context: (&raw const self.decoders[rank]) as u64,
                rank: rank as u32,
                delay: self.delay,
                slow: self.slow,
                cut: if self.killed == Some(rank) { self.cut } else { 0 },
            };
            kept.extend([inboxes, from, claims]);
            let grid = Grid { blocks: 1, threads: 32 * self.rails, shared: 0 };
            self.job.gpus.launch_on(PROXIES + rank as u32, "crossrail_test_proxy", &args, grid);
        }
        self.job.gpus.run(seed)
    }

    /// Bytes of rows that proxies have carried so far, of dispatches and of combines.
    pub(crate) fn carried(&self) -> [u64; 2] {
        [0, 1].map(|sequence| self.decoders.iter().map(|one| one.rows[sequence].get()).sum())
    }

    pub(crate) fn no_faults(&self) {
        for rank in 0..self.job.shape.ranks as usize {
            assert_eq!(self.job.faults(rank), [], "rank {rank}");
            for [_, from] in self.areas[rank].iter().flatten() {
                assert_eq!(from.read::<u64>(8 * 15, 1), [0], "an unknown command");
            }
        }
    }
}

/// Rows of each link by a routing: of `ranks` ranks in nodes of `node`.
pub(crate) fn link_rows(shape: &Shape, routing: &Routing, node: u32, once: bool) -> LinkRows {
    let mut rows = LinkRows::new(shape.ranks, node, once);
    for (source, tokens) in (0u32..).zip(&routing.tokens) {
        for token in 0..*tokens {
            let experts = (0..shape.topk as usize).filter_map(|k| routing.expert(shape, source as usize, token, k));
            rows.add(source, experts.map(|expert| expert as u32 / shape.local_experts()));
        }
    }
    rows
}

/// Each rank counts the rows of its links from its handle, and they are those of the routing.
pub(crate) fn check_handles(job: &Job, layout: Layout, handles: &[&Memory], node: u32, expected: &LinkRows) {
    for (me, handle) in (0u32..).zip(handles) {
        let way = |rank: u32| match rank / node == me / node {
            _ if rank == me => Way::None,
            true => Way::Near,
            false => Way::Network,
        };
        let read = |part: u64, len: usize| Ok(handle.read(part as usize, len));
        let rows = RankRows::of(&job.shape, layout, me, &read, way).unwrap();
        let sent = Rows { near: rows.own.near + rows.forwarded, ..rows.own };
        assert_eq!((sent, rows.received), (expected.sent[me as usize], expected.received[me as usize]), "rank {me}");
    }
}

/// Rows that go once to each rank, in both layouts.
#[test]
fn handles_have_the_rows_of_each_link() {
    // Rows of whole pieces, which are not padded.
    let shape = Shape { hidden: 2048, ..SHAPE };
    let Some(mut far) = expert_job(shape, &EXPERT) else { return };
    let mut numbers = Numbers(90);
    let routing = Routing::of(&mut numbers, &shape, &[6, 0, 5, 7], Choice::Even);
    let expected = link_rows(&shape, &routing, 2, false);
    let operation = ByExpert::new(&mut far.job, &mut numbers, routing.clone(), Weights::None);
    operation.dispatch(&mut far.job, 2, BOTH);
    far.run(90).unwrap();
    let handles: Vec<&Memory> = operation.ranks.iter().map(|one| &one.kept[0]).collect();
    check_handles(&far.job, Layout::Expert, &handles, 2, &expected);
    let row = u64::from(shape.row_bytes() + shape.scale_bytes());
    assert_eq!(far.carried()[0], expected.total().network * row);
    for granted in [false, true] {
        let shape = if granted { by_rank(BY_EXPERT, 40) } else { SLOTS };
        let (source, defines, threads, shared) = rank_kernels(&shape, true);
        let build = Build::new(&[source, PROXY]).with(PROXY, include_str!("proxy.cu")).defines(&defines);
        let Some(job) = Job::made(&build, shape, threads, shared) else { return };
        // Granted places are for ranks of one node.
        let (mut far, node) = if granted { (Far::of(job, |_, _| false), 4) } else { (Far::new(job), 2) };
        let operation = ByRank::new(&mut far.job, &mut Numbers(91), routing.clone(), 0);
        operation.dispatch(&mut far.job, 2, ALL);
        far.run(91).unwrap();
        let handles: Vec<&Memory> = operation.ranks.iter().map(|one| &one.handle).collect();
        check_handles(&far.job, Layout::Rank, &handles, node, &link_rows(&shape, &routing, node, false));
    }
}

fn expert_job(shape: Shape, sources: &[&str]) -> Option<Far> {
    expert_job_of(&Build::new(sources), shape)
}

fn expert_job_of(build: &Build, shape: Shape) -> Option<Far> {
    Some(Far::new(Job::of(&build.clone().with(PROXY, include_str!("proxy.cu")), shape, shape.expert_shared())?))
}

fn rank_job(shape: Shape) -> Option<Far> {
    Some(Far::new(rank_job_of(&Build::new(&RANK), shape)?))
}

/// With the slots of the rank layout.
pub(crate) fn rank_job_of(build: &Build, shape: Shape) -> Option<Job> {
    let (source, defines, threads, shared) = rank_kernels(&shape, true);
    assert_eq!(source, RANK[0]);
    Job::made(&build.clone().with(PROXY, include_str!("proxy.cu")).defines(&defines), shape, threads, shared)
}

pub(crate) const RANK: [&str; 2] = ["kernels/ep_slots.cu", PROXY];
pub(crate) const EXPERT: [&str; 2] = ["kernels/ep_expert.cu", PROXY];
const CODED: [&str; 3] = ["kernels/ep_expert.cu", "kernels/ep_coded.cu", PROXY];

/// Several operations that follow each other as fast as slots let them; and with their halves apart.
pub(crate) fn expert_rounds(far: &mut Far, seeds: std::ops::Range<u64>, coding: Coding) {
    let shape = far.job.shape;
    for seed in seeds {
        let mut numbers = Numbers(seed);
        let operations: Vec<ByExpert> = (0..4)
            .map(|number| {
                let routing = Routing::random(&mut numbers, &shape);
                let weights = [Weights::None, Weights::Dispatch, Weights::Combine][(seed + number) as usize % 3];
                ByExpert { coding, ..ByExpert::new(&mut far.job, &mut numbers, routing, weights) }
            })
            .collect();
        let steps: &[u32] = if numbers.once_in(2) { &[BOTH] } else { &[EP_SEND, EP_RECEIVE] };
        for operation in &operations {
            let blocks = 1 + numbers.below(3) as u32;
            steps.iter().for_each(|phases| operation.dispatch(&mut far.job, blocks, *phases));
            steps.iter().for_each(|phases| operation.combine(&mut far.job, blocks, *phases));
        }
        far.run(seed).unwrap_or_else(|what| panic!("{what}; {}", far.job.fault_text()));
        for operation in &operations {
            let found = operation.check_dispatch(&far.job).and_then(|()| operation.check_combine(&far.job));
            found.unwrap_or_else(|what| panic!("seed {seed}: {what}; {}", far.job.fault_text()));
        }
        far.no_faults();
    }
}

#[test]
fn rows_of_the_expert_layout_reach_other_nodes() {
    let Some(mut far) = expert_job(SHAPE, &EXPERT) else { return };
    expert_rounds(&mut far, 0..8, Coding::Bf16);
}

#[test]
fn so_do_coded_rows_and_rows_of_any_length() {
    let Some(mut far) = expert_job(SHAPE, &CODED) else { return };
    expert_rounds(&mut far, 10..13, Coding::LogFmt10);
    expert_rounds(&mut far, 13..16, Coding::Fp8);
    let shape = Shape { prereduce: false, payload: Payload::Bf16, hidden: 1032, ..SHAPE };
    let Some(mut far) = expert_job(shape, &EXPERT) else { return };
    expert_rounds(&mut far, 16..19, Coding::Bf16);
    let Some(mut far) = expert_job(Shape { payload: Payload::Fp8(Scale::Ue8m0), ..SHAPE }, &EXPERT) else { return };
    expert_rounds(&mut far, 19..21, Coding::Bf16);
}

#[test]
fn rows_of_the_rank_layout_reach_other_nodes() {
    let Some(mut far) = rank_job(SLOTS) else { return };
    rank_rounds(&mut far, 20..28);
}

/// Heaps take no memory for ranks whose rows arrive in pinned memory, and kernels never read beyond their ends.
#[test]
fn heaps_have_inboxes_for_the_ranks_of_their_node() {
    let heaps = [SHAPE, of_node(SHAPE)].map(|shape| shape.heap_bytes());
    assert_eq!(heaps[0] - heaps[1], 2 * SHAPE.heap().inbox_stride);
    let Some(mut far) = expert_job(of_node(SHAPE), &EXPERT) else { return };
    expert_rounds(&mut far, 60..64, Coding::Bf16);
    let Some(mut far) = rank_job(of_node(SLOTS)) else { return };
    rank_rounds(&mut far, 64..68);
}

/// An operation, and now and then another of the same routing.
pub(crate) fn rank_rounds(far: &mut Far, seeds: std::ops::Range<u64>) {
    for seed in seeds {
        let mut numbers = Numbers(seed);
        let routing = Routing::random(&mut numbers, &far.job.shape);
        let first = ByRank::new(&mut far.job, &mut numbers, routing, seed as u32 % 2);
        let mut operations = vec![first];
        if seed % 3 == 0 {
            let again = operations[0].again(&mut far.job, &mut numbers, (seed as u32 + 1) % 2);
            operations.push(again);
        }
        for operation in &operations {
            operation.dispatch(&mut far.job, 2, ALL);
            operation.combine(&mut far.job, 2, BOTH, 0);
        }
        far.run(seed).unwrap_or_else(|what| panic!("{what}; {}", far.job.fault_text()));
        for operation in &operations {
            let found = operation.check_dispatch(&far.job).and_then(|()| operation.check_combine(&far.job));
            found.unwrap_or_else(|what| panic!("seed {seed}: {what}; {}", far.job.fault_text()));
        }
    }
    far.no_faults();
}

/// A ring of eight entries: kernels wait for the proxy.
#[test]
fn a_full_ring_holds_kernels_up() {
    let build = Build::new(&EXPERT).with(PROXY, include_str!("proxy.cu"));
    let build = build.broken("layout/ep.cuh", "constexpr u32 EP_COMMANDS = 4096;", "constexpr u32 EP_COMMANDS = 8;");
    let Some(mut far) = expert_job_of(&build, SHAPE) else { return };
    expert_rounds(&mut far, 30..34, Coding::Bf16);
}

/// The proxy of one rank stands still, as does that rank for those on the other node, which name it and continue.
#[test]
fn a_proxy_that_stands_still_is_a_rank_that_is_lost() {
    let Some(mut far) = expert_job(SHAPE, &EXPERT) else { return };
    let mut numbers = Numbers(40);
    far.stuck = vec![3];
    let routing = Routing::random(&mut numbers, &SHAPE);
    let operation = ByExpert::new(&mut far.job, &mut numbers, routing, Weights::None);
    operation.dispatch(&mut far.job, 2, BOTH);
    far.run(40).unwrap();
    for rank in [0, 1] {
        assert_eq!(far.job.masked(rank), [3], "rank {rank}");
    }
    assert_eq!((far.job.masked(2), far.job.masked(3)), (vec![], vec![0, 1]));
}

/// A rank of the other node that takes no part costs the others the limit once; what they send each other is there, and
/// their sums lack only its part.
#[test]
fn a_far_rank_that_never_comes_is_masked_and_left_out_of_sums() {
    for seed in 70..73 {
        let Some(mut far) = expert_job(SHAPE, &EXPERT) else { return };
        let mut numbers = Numbers(seed);
        let routing = Routing::of(&mut numbers, &SHAPE, &[6, 4, 5, 7], Choice::Even);
        let operation = ByExpert::new(&mut far.job, &mut numbers, routing.without(&[3]), Weights::Combine);
        operation.dispatch(&mut far.job, 2, BOTH);
        far.run(seed).unwrap();
        operation.check_dispatch(&far.job).unwrap();
        for rank in 0..3 {
            assert_eq!((far.job.masked(rank), far.job.faults(rank)), (vec![3], vec![(3, EP_STAGE_TABLE)]));
        }
        operation.combine(&mut far.job, 2, BOTH);
        far.run(seed + 10).unwrap();
        operation.check_combine(&far.job).unwrap();
        assert_eq!([0, 1, 2].map(|rank| far.job.faults(rank).len()), [1; 3]);
    }
}

/// The proxy of a rank is killed in the middle of an operation, wherever that is: the other node's ranks continue within
/// the limit, name that rank and no other, and no sum is wrong.
#[test]
fn a_proxy_that_is_killed_leaves_no_wrong_sum() {
    let (mut lacking, mut whole) = (0, 0);
    for cut in (1..60).step_by(4) {
        let Some(mut far) = expert_job(SHAPE, &EXPERT) else { return };
        (far.killed, far.cut, far.job.limit_ns) = (Some(3), cut, 1_000_000_000);
        let mut numbers = Numbers(cut.into());
        let routing = Routing::of(&mut numbers, &SHAPE, &[6, 4, 5, 7], Choice::Even);
        let operation = ByExpert::new(&mut far.job, &mut numbers, routing, Weights::None);
        // One after the other, as hosts that compute in between: ranks that lose time begin the combine no later than others.
        operation.dispatch(&mut far.job, 2, BOTH);
        far.run(cut.into()).unwrap();
        operation.combine(&mut far.job, 2, BOTH);
        far.run(u64::from(cut) + 100).unwrap();
        for rank in [0, 1] {
            let named: Vec<u32> = far.job.faults(rank).iter().map(|(whom, _)| *whom).collect();
            assert!(named.iter().all(|whom| *whom == 3), "cut {cut}, rank {rank}: {named:?}");
            let found = operation.check_combine_without(&far.job, rank, 3);
            let found = found.unwrap_or_else(|what| panic!("cut {cut}: {what}; {}", far.job.fault_text()));
            assert!(found == 0 || far.job.masked(rank) == [3], "cut {cut}, rank {rank}");
            lacking += usize::from(found > 0);
            whole += usize::from(found == 0);
        }
        assert_eq!(operation.check_combine_without(&far.job, 2, 3), Ok(0), "its own node has all of it");
    }
    assert!(lacking > 0 && whole > 0, "{lacking} and {whole}");
}

/// Longer than two operations: words that no kernel waits for arrive when their slots could be in use again.
const SLOW: u32 = 400_000;

#[test]
fn slots_are_not_used_again_before_all_has_arrived() {
    let Some(mut far) = expert_job(Shape { max_tokens: 3, hidden: 128, ..SHAPE }, &EXPERT) else { return };
    far.slow = SLOW;
    expert_rounds(&mut far, 50..54, Coding::Bf16);
}

/// The last block begins only when another has ended, as where ranks share a GPU: the others do not wait for it to see which
/// slots are free. Nothing else is left for that block here.
#[test]
fn slots_are_watched_by_a_block_that_runs() {
    let shape = Shape { max_tokens: 1, hidden: 128, ..SHAPE };
    let Some(mut far) = expert_job(shape, &EXPERT) else { return };
    far.job.gpus.late_blocks = 1;
    for seed in 80..90 {
        let mut numbers = Numbers(seed);
        let mut operation = || {
            let routing = Routing::of(&mut numbers, &shape, &[1; 4], Choice::Even);
            let operation = ByExpert::new(&mut far.job, &mut numbers, routing, Weights::Dispatch);
            operation.dispatch(&mut far.job, 6, BOTH);
            operation.combine(&mut far.job, 6, BOTH);
            operation
        };
        let operations: Vec<ByExpert> = (0..4).map(|_| operation()).collect();
        far.run(seed).unwrap_or_else(|what| panic!("{what}; {}", far.job.fault_text()));
        for operation in &operations {
            let found = operation.check_dispatch(&far.job).and_then(|()| operation.check_combine(&far.job));
            found.unwrap_or_else(|what| panic!("seed {seed}: {what}; {}", far.job.fault_text()));
        }
        far.no_faults();
    }
}

/// Each of these faults is caught, by a check of memory or by a wrong result.
#[test]
fn kernels_and_proxies_that_are_wrong_are_caught() {
    let faults = [
        // Words are announced before they are there.
        (
            "kernels/ep_plan.cuh",
            "    fence_acq_rel_sys();\n    const EpCommon &c = args.common;\n    u64 step",
            "    const EpCommon &c = args.common;\n    u64 step",
        ),
        // Slots are used again while writes that no kernel waits for are in flight.
        (PROXY, "own != 0 && done_by_all(args, ring, rails) > (own & 0xffffffff)", "own != 0"),
        // Flags before rows.
        (
            "kernels/ep_commands.cuh",
            "u64 lap = (place / EP_COMMANDS % EP_LAPS + 1) << 48;",
            "u64 lap = (place / EP_COMMANDS % EP_LAPS + 2) << 48;",
        ),
    ];
    for (path, from, to) in faults {
        let build = Build::new(&EXPERT).with(PROXY, include_str!("proxy.cu")).broken(path, from, to);
        let shape = Shape { max_tokens: 3, hidden: 128, ..SHAPE };
        let Some(job) = Job::of(&build, shape, shape.expert_shared()) else { return };
        let mut far = Far::new(job);
        far.job.limit_ns = 1_000_000_000;
        far.slow = SLOW;
        let caught = (0..120).any(|seed| {
            let wrong = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                expert_rounds(&mut far, seed..seed + 1, Coding::Bf16);
            }));
            wrong.is_err()
        });
        assert!(caught, "{path}: {to:?} does no harm");
    }
}
