//! The RMA tables, called as NCCL's proxy calls them: in host memory, and in that of a GPU's double.
#![allow(unsafe_code)]

pub(crate) mod double;
mod faults;
mod order;

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossrail_nccl_abi::rma::{
    DEVICE_GIN_PROXY, MR_FORCE_SO, MR_SIGNAL_NEVER_RESET, PTR_DMABUF, SIGNAL_ADD, SIGNAL_INC,
};
use crossrail_nccl_abi::{PTR_CUDA, PTR_HOST};
use crossrail_nccl_driver::{At, Rma, RmaObject, RmaPlugin, Route, SignalOp};

use self::double::{Double, Plan};
use super::connecting;
use super::objects::{self, Object};
use super::{RMA_V13, RMA_V14, RMA_V15, RMA_V16};
use crate::net::Process;

const LIMIT: Duration = Duration::from_secs(60);
/// Signals in GPU memory that only the plugin writes.
const SIGNALS: u64 = MR_FORCE_SO | MR_SIGNAL_NEVER_RESET;

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !done() {
        assert!(Instant::now() < deadline, "{what} takes too long");
        std::thread::yield_now();
    }
}

fn plugin(version: u32) -> &'static RmaPlugin {
    let table: *const c_void = match version {
        13 => ptr::from_ref(&RMA_V13.0).cast(),
        14 => ptr::from_ref(&RMA_V14.0).cast(),
        15 => ptr::from_ref(&RMA_V15.0).cast(),
        _ => ptr::from_ref(&RMA_V16.0).cast(),
    };
    // SAFETY: the table of that version.
    Box::leak(Box::new(unsafe { RmaPlugin::of_table(version, table) }.expect("a plugin")))
}

/// Memory of a rank: of the host, or of a double of a GPU.
enum Memory {
    Host(Box<[AtomicU64]>),
    Gpu(Double),
}

impl Memory {
    fn host(len: usize) -> Memory {
        Memory::Host((0..len.div_ceil(8)).map(|_| AtomicU64::new(0)).collect())
    }

    fn gpu(len: usize, plan: &Arc<Plan>) -> Memory {
        Memory::Gpu(Double::new(len, 0, plan))
    }

    fn at(&self) -> *mut u8 {
        match self {
            Memory::Host(words) => words.as_ptr().cast_mut().cast(),
            Memory::Gpu(double) => double.at(),
        }
    }

    fn kind(&self) -> i32 {
        if matches!(self, Memory::Host(_)) { PTR_HOST } else { PTR_CUDA }
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        match self {
            Memory::Host(words) => &words[at / 8],
            Memory::Gpu(double) => double.word(at),
        }
    }

    fn load(&self, at: usize) -> u64 {
        self.word(at).load(Ordering::Acquire)
    }

    /// Its contents, while no other thread writes.
    #[expect(clippy::mut_from_ref, reason = "memory that the plugin writes, too")]
    fn bytes(&self) -> &mut [u8] {
        match self {
            // SAFETY: all of it, which has no other user at that time.
            Memory::Host(words) => unsafe { std::slice::from_raw_parts_mut(self.at(), 8 * words.len()) },
            Memory::Gpu(double) => double.bytes(),
        }
    }
}

/// One rank's view of a group.
struct Rank {
    rma: Rma<'static>,
    group: RmaObject,
    contexts: RmaObject,
}

/// Some ranks, in this process.
struct World(Vec<Rank>);

/// A registration of each rank, of the same number.
struct Registered {
    memory: Vec<Memory>,
    handles: Vec<RmaObject>,
}

impl World {
    fn new(version: u32, ranks: usize) -> World {
        World::over(Process::get().expect("settings"), version, ranks)
    }

    fn over(process: &'static Process, version: u32, ranks: usize) -> World {
        let plugin = plugin(version);
        let listen = |_| {
            let (listener, handle) = connecting::listen(process).expect("a listener");
            (plugin.init().expect("init"), RmaObject(objects::add(Object::Listener(Arc::new(listener)))), handle)
        };
        let listening: Vec<(Rma<'static>, RmaObject, [u8; 128])> = (0..ranks).map(listen).collect();
        let handles: Vec<[u8; 128]> = listening.iter().map(|(_, _, handle)| *handle).collect();
        let ranks = std::thread::scope(|scope| {
            let join = |(rank, (rma, listener, _))| {
                let handles = &handles;
                scope.spawn(move || {
                    let rma: Rma<'static> = rma;
                    // NCCL passes another plugin's context.
                    let group =
                        rma.connect(RmaObject(4096 as *mut _), handles, rank as i32, listener).expect("connect");
                    rma.close_listener(listener).expect("close");
                    let contexts = rma.contexts(group, 4, 1).expect("contexts");
                    Rank { rma, group, contexts }
                })
            };
            let joined: Vec<_> = listening.into_iter().enumerate().map(join).collect();
            joined.into_iter().map(|rank| rank.join().expect("a rank")).collect()
        });
        World(ranks)
    }

    /// Two ranks over these wires.
    fn of_wires(wires: [[Box<dyn crossrail::placing::Placing>; 2]; 2]) -> World {
        let rma = || plugin(14).init().expect("init");
        let groups =
            connecting::pair(wires).expect("groups").map(|group| RmaObject(objects::add(Object::Group(group))));
        World(
            groups
                .map(|group| (group, rma()))
                .map(|(group, rma)| {
                    let contexts = rma.contexts(group, 4, 1).expect("contexts");
                    Rank { rma, group, contexts }
                })
                .into(),
        )
    }

    fn register(&self, flags: u64, memory: impl Fn() -> Memory) -> Registered {
        let memory: Vec<Memory> = self.0.iter().map(|_| memory()).collect();
        let handles = self.0.iter().zip(&memory).map(|(rank, memory)| rank.register(memory, flags)).collect();
        Registered { memory, handles }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for rank in &self.0 {
            // A test may have closed it.
            let _ = rank.rma.close_group(rank.group);
            let _ = rank.rma.finalize(rank.rma.context());
        }
    }
}

impl Registered {
    fn len(&self, rank: usize) -> usize {
        self.memory[rank].bytes().len()
    }
}

impl Rank {
    fn register(&self, memory: &Memory, flags: u64) -> RmaObject {
        let range = (memory.at(), memory.bytes().len());
        // SAFETY: the tests keep it until the group is closed.
        unsafe { self.rma.register(self.group, range, (memory.kind(), flags), flags & 1 != 0) }.expect("a registration")
    }

    fn to(&self, context: i32, rank: u32) -> Route {
        Route { contexts: self.contexts, context, rank }
    }

    fn finish(&self, request: RmaObject) {
        until("a request", || {
            self.rma.progress(self.contexts).expect("progress");
            self.rma.test(self.group, request).expect("no error")
        });
    }

    /// The error with which a request ends.
    fn error(&self, request: RmaObject) -> String {
        let mut error = None;
        until("an error", || match self.rma.test(self.group, request) {
            Ok(done) => {
                assert!(!done, "the request has succeeded");
                false
            }
            Err(found) => {
                error = Some(found);
                true
            }
        });
        error.expect("an error").detail
    }
}

fn signal(at: At, operation: u32, value: u64) -> SignalOp {
    SignalOp { at, operation, value }
}

fn pattern(at: usize, seed: usize) -> u8 {
    (at.wrapping_mul(31).wrapping_add(seed.wrapping_mul(17)) >> 2) as u8
}

#[test]
fn every_table_puts_gets_and_signals() {
    for version in 13..=16 {
        let world = World::new(version, 2);
        let [one, other] = &world.0[..] else { unreachable!("two ranks") };
        assert_eq!((plugin(version).name(), one.rma.devices().expect("devices")), ("Crossrail_RMA", 1));
        let device = one.rma.device(0).expect("a device");
        let net = Process::get().expect("settings").device.name.to_string_lossy().into_owned();
        assert!(device.name.starts_with("crossrail-rma:") && device.name != net, "{} and {net}", device.name);
        assert_eq!((device.kind, device.ptr_support), (DEVICE_GIN_PROXY, PTR_HOST | PTR_CUDA | PTR_DMABUF));
        assert_eq!(32 * device.max_recvs, 256, "the length of NCCL's queues, a power of two");
        assert!(one.rma.device(1).is_err());
        assert_eq!(one.rma.flushes_all_puts(one.group), Ok((version == 16).then_some(true)));
        // A second initialization, as of NCCL's proxy, ends without the first.
        let again = plugin(version).init().expect("init");
        again.finalize(again.context()).expect("finalize");

        let window = world.register(MR_FORCE_SO, || Memory::host(8192));
        window.memory[0].bytes()[..4096].iter_mut().enumerate().for_each(|(at, byte)| *byte = pattern(at, 1));
        let (mine, theirs) = (window.handles[0], window.handles[0]);
        let put =
            one.rma.put_signal(one.to(3, 1), (0, mine), 4096, (100, theirs), signal((8184, theirs), SIGNAL_INC, 9));
        one.finish(put.expect("a put"));
        assert!(window.memory[1].bytes()[100..4196] == window.memory[0].bytes()[..4096]);
        assert_eq!(window.memory[1].load(8184), 1, "an increment ignores the value");
        let get = other.rma.get(other.to(0, 0), (10, window.handles[1]), 1000, (5000, window.handles[1]));
        other.finish(get.expect("a get"));
        assert_eq!(other.rma.flush(other.to(0, 0)), Ok(None), "a get that is done is visible");
        assert!(window.memory[1].bytes()[5000..6000] == window.memory[0].bytes()[10..1010]);
        // A signal alone has no memory.
        let none = (0, RmaObject::NULL);
        let alone = one.rma.put_signal(one.to(0, 1), none, 0, none, signal((8184, theirs), SIGNAL_ADD, u64::MAX));
        one.finish(alone.expect("a signal"));
        assert_eq!(window.memory[1].load(8184), 0, "sums wrap");
        assert_eq!(one.rma.has_error(one.contexts), Ok(false));
        one.rma.destroy_contexts(one.contexts).expect("destroy");
        one.rma.deregister(one.group, mine).expect("deregister");
    }
}

#[test]
fn sizes_and_alignments_of_all_kinds_arrive() {
    const ROOM: usize = 3 << 20;
    let world = World::new(14, 2);
    let plan = Arc::new(Plan::default());
    let window = world.register(0, || Memory::gpu(ROOM, &plan));
    let host = world.register(0, || Memory::host(ROOM));
    let signals = world.register(SIGNALS, || Memory::gpu(4096, &plan));
    let [one, _] = &world.0[..] else { unreachable!("two ranks") };
    let cases = [
        (0, 0, 0),
        (1, 3, 5),
        (7, 0, 1),
        (8, 0, 0),
        (8, 8, 4),
        (8, 3, 16),
        (63, 1, 1),
        (64, 0, 8),
        (65, 9, 7),
        (4096, 0, 0),
        (100_000, 1, 2),
        (256 << 10, 0, 0),
        ((256 << 10) + 1, 16, 48),
        ((2 << 20) + 123, 77, 13),
    ];
    let mut expected = 0;
    for (seed, (len, from, to)) in cases.into_iter().enumerate() {
        for (source, target) in [(&window, &window), (&host, &window), (&window, &host), (&host, &host)] {
            let bytes = source.memory[0].bytes();
            bytes[from..from + len].iter_mut().enumerate().for_each(|(at, byte)| *byte = pattern(at, seed));
            target.memory[1].bytes().fill(0xee);
            expected += 3;
            let (from_at, to_at) = ((from as u64, source.handles[0]), (to as u64, target.handles[0]));
            let done = signal((16, signals.handles[0]), SIGNAL_ADD, 3);
            let put = one.rma.put_signal(one.to(0, 1), from_at, len, to_at, done).expect("a put");
            until("the signal", || signals.memory[1].load(16) == expected);
            // Visible with the signal, not only once the request is done.
            let (got, sent) = (target.memory[1].bytes(), source.memory[0].bytes());
            assert!(got[to..to + len] == sent[from..from + len], "{len} bytes, {from} to {to}");
            assert!(got[..to].iter().chain(&got[to + len..]).all(|byte| *byte == 0xee), "{len} bytes, {from} to {to}");
            one.finish(put);
            // And back again.
            source.memory[0].bytes().fill(0);
            let get = one.rma.get(one.to(1, 1), to_at, len, from_at).expect("a get");
            one.finish(get);
            let (got, sent) = (source.memory[0].bytes(), target.memory[1].bytes());
            assert!(got[from..from + len] == sent[to..to + len], "{len} bytes, {to} to {from}, back");
        }
    }
    assert_eq!(signals.len(0), 4096);
}

#[test]
fn a_rank_is_a_peer_of_its_own() {
    let world = World::new(14, 1);
    let plan = Arc::new(Plan::default());
    let window = world.register(SIGNALS, || Memory::gpu(1 << 20, &plan));
    let rank = &world.0[0];
    window.memory[0].bytes()[16..300_000].iter_mut().enumerate().for_each(|(at, byte)| *byte = pattern(at, 3));
    let (mine, at) = (window.handles[0], 600_000);
    let done = signal((8, mine), SIGNAL_INC, 0);
    let put = rank.rma.put_signal(rank.to(0, 0), (16, mine), 299_984, (at, mine), done).expect("a put");
    rank.finish(put);
    let bytes = window.memory[0].bytes();
    assert!(bytes[16..300_000] == bytes[at as usize..][..299_984]);
    assert_eq!(window.memory[0].load(8), 1);
    let get = rank.rma.get(rank.to(0, 0), (at, mine), 1000, (900_000, mine)).expect("a get");
    rank.finish(get);
    assert!(bytes[900_000..901_000] == bytes[at as usize..][..1000]);
}

#[test]
fn three_ranks_signal_each_other() {
    const ROUNDS: u64 = 50;
    let world = World::new(16, 3);
    let plan = Arc::new(Plan::default());
    let window = world.register(0, || Memory::gpu(1 << 16, &plan));
    let signals = world.register(SIGNALS, || Memory::gpu(4096, &plan));
    for (number, rank) in world.0.iter().enumerate() {
        window.memory[number].bytes()[..64].fill(number as u8 + 1);
        let (mine, signals) = (window.handles[number], signals.handles[number]);
        for round in 0..ROUNDS {
            for peer in 0..3 {
                let to = (4096 + 64 * (3 * round + number as u64), mine);
                let done = signal((8 * number as u64, signals), SIGNAL_ADD, round + 1);
                // Requests are tested later, as NCCL's are, or never.
                rank.rma.put_signal(rank.to((round % 4) as i32, peer), (0, mine), 64, to, done).expect("a put");
            }
        }
    }
    let sum = ROUNDS * (ROUNDS + 1) / 2;
    for (number, _) in world.0.iter().enumerate() {
        until("all signals", || (0..3).all(|from| signals.memory[number].load(8 * from) == sum));
        let bytes = &window.memory[number].bytes()[4096..];
        for (at, chunk) in bytes.chunks(64).take(3 * ROUNDS as usize).enumerate() {
            assert!(chunk.iter().all(|byte| *byte == (at % 3) as u8 + 1), "chunk {at} of rank {number}");
        }
    }
}

#[test]
fn words_that_kernels_reset_are_read_before_each_sum() {
    let world = World::new(14, 2);
    let plan = Arc::new(Plan::default());
    let window = world.register(MR_FORCE_SO, || Memory::gpu(4096, &plan));
    let kept = world.register(SIGNALS, || Memory::gpu(4096, &plan));
    let rank = &world.0[0];
    let none = (0, RmaObject::NULL);
    let add = |at: u64, handle: RmaObject, value: u64| {
        let request = rank.rma.put_signal(rank.to(0, 1), none, 0, none, signal((at, handle), SIGNAL_ADD, value));
        rank.finish(request.expect("a signal"));
    };
    // What was there before the first signal counts, in either kind.
    window.memory[1].word(24).store(100, Ordering::Release);
    kept.memory[1].word(24).store(100, Ordering::Release);
    for handle in [window.handles[0], kept.handles[0]] {
        add(24, handle, 5);
        add(24, handle, 6);
    }
    assert_eq!((window.memory[1].load(24), kept.memory[1].load(24)), (111, 111));
    window.memory[1].word(24).store(0, Ordering::Release);
    add(24, window.handles[0], 7);
    assert_eq!(window.memory[1].load(24), 7, "a reset counts");
    kept.memory[1].word(24).store(0, Ordering::Release);
    add(24, kept.handles[0], 7);
    assert_eq!(kept.memory[1].load(24), 118, "only signals write these: they are not read again");
    // Several words in one batch, some of them twice.
    let requests: Vec<RmaObject> = (0..64)
        .map(|at| {
            let word = signal((8 * (at % 20), window.handles[0]), SIGNAL_INC, 0);
            rank.rma.put_signal(rank.to(1, 1), none, 0, none, word).expect("a signal")
        })
        .collect();
    requests.into_iter().for_each(|request| rank.finish(request));
    let sums: Vec<u64> = (0..20).map(|at| window.memory[1].load(8 * at)).collect();
    let expected: Vec<u64> = (0..20).map(|at| 3 + u64::from(at < 4) + if at == 3 { 7 } else { 0 }).collect();
    assert_eq!(sums, expected);
}

#[test]
fn a_put_waits_for_memory_that_its_target_has_not_registered_yet() {
    let world = World::new(14, 2);
    let plan = Arc::new(Plan::default());
    let [one, other] = &world.0[..] else { unreachable!("two ranks") };
    let memory = [Memory::gpu(4096, &plan), Memory::gpu(4096, &plan)];
    memory[0].bytes()[..8].fill(9);
    let mine = one.register(&memory[0], SIGNALS);
    let done = signal((16, mine), SIGNAL_INC, 0);
    let put = one.rma.put_signal(one.to(0, 1), (0, mine), 8, (8, mine), done).expect("a put");
    assert_eq!(one.rma.test(one.group, put), Ok(false));
    other.register(&memory[1], SIGNALS);
    one.finish(put);
    assert_eq!((memory[1].load(8), memory[1].load(16)), (0x0909_0909_0909_0909, 1));
}

#[test]
fn sources_are_copied_once_for_several_targets() {
    // As the tokens of a dispatch: one source, several experts' slots; and neighbours, which become one copy.
    let world = World::new(14, 2);
    let plan = Arc::new(Plan::default());
    plan.polls.store(50, Ordering::Relaxed);
    let window = world.register(SIGNALS, || Memory::gpu(4 << 20, &plan));
    let rank = &world.0[0];
    let mine = window.handles[0];
    window.memory[0].bytes().iter_mut().enumerate().for_each(|(at, byte)| *byte = pattern(at, at >> 12));
    let mut requests = Vec::new();
    for token in 0..64_u64 {
        for expert in 0..3_u64 {
            let to = (1 << 20) + (expert * 64 + token) * 7168 + expert * 16;
            requests.push(rank.rma.put(rank.to(0, 1), (token * 7168, mine), 7168, (to, mine)).expect("a put"));
        }
    }
    requests.into_iter().for_each(|request| rank.finish(request));
    let (sent, got) = (window.memory[0].bytes(), window.memory[1].bytes());
    for token in 0..64 {
        for expert in 0..3 {
            let to = (1 << 20) + (expert * 64 + token) * 7168 + expert * 16;
            assert!(got[to..to + 7168] == sent[token * 7168..][..7168], "token {token} of expert {expert}");
        }
    }
}
