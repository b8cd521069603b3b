//! Links between two processes, on two GPUs if available, otherwise on one. Skipped with a message without a GPU.

mod child;
mod conformance;
mod end;
mod one_process;
mod rows;
#[path = "../../../cuda/tests/support/mod.rs"]
#[allow(dead_code)]
mod support;
mod trouble;

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use crossrail_cuda::{Context, Cuda};
use crossrail_transport::{Copy, Domain, Job, Step};
use serde_json::json;

use child::{ChildGuard, descriptor, number, pair};
use end::{End, LIMIT, Memory, job, pattern};

/// Serialises the tests: they count memory and file descriptors, and pass sockets to their children.
static TURN: Mutex<()> = Mutex::new(());

/// This process on the first GPU and another one on the second, or both on the only GPU.
struct TwoProcesses {
    own: End,
    child: ChildGuard,
    _turn: MutexGuard<'static, ()>,
}

impl TwoProcesses {
    fn new() -> Option<TwoProcesses> {
        let cuda = support::cuda()?;
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        // Created once for all tests, because it takes longer than most of them.
        static CONTEXT: OnceLock<Context> = OnceLock::new();
        CONTEXT.get_or_init(|| Context::primary(&cuda.device(0).expect("a GPU")).expect("a context"));
        let (own, child) = pair(&cuda, 0, second(&cuda).unwrap_or(0));
        Some(TwoProcesses { own, child, _turn: turn })
    }

    /// Allocates memory in the other process, filled with the pattern of `seed`; returns its index.
    fn alloc(&mut self, kind: &str, len: usize, seed: u64) -> u64 {
        number(&self.own.ask(&json!({"do": "alloc", "kind": kind, "len": len, "seed": seed})), "index")
    }

    fn describe(&mut self, index: u64, offset: usize, len: usize) -> [u8; 24] {
        descriptor(&self.own.ask(&json!({"do": "describe", "index": index, "offset": offset, "len": len})))
    }

    fn check(&mut self, index: u64, offset: usize, len: usize, seed: u64) -> bool {
        let word = json!({"do": "check", "index": index, "offset": offset, "len": len, "seed": seed});
        self.own.ask(&word)["good"] == true
    }
}

/// The second GPU, if there is one with peer access.
fn second(cuda: &Cuda) -> Option<u32> {
    match cuda.devices().expect("devices").as_slice() {
        [first, second, ..] if first.reaches(second).expect("an answer") => Some(1),
        _ => None,
    }
}

const KINDS: [&str; 3] = ["vmm", "legacy", "segment"];

#[test]
fn copies_work_in_both_directions_for_all_kinds_of_memory() {
    let Some(mut two) = TwoProcesses::new() else { return };
    let lens = [1, 7, 511, 4096, 65_537, 512 << 10, (512 << 10) + 1, (9 << 20) + 3];
    let own = Memory::new(&two.own.context, "vmm", 10 << 20);
    for kind in KINDS {
        let index = two.alloc(kind, 12 << 20, 1);
        let whole = pattern(1, 12 << 20);
        for len in lens {
            for (theirs, ours) in [(0, 0), (1, 0), (0, 3), (4099, 13), ((2 << 20) - 5, 64)] {
                two.own.put(own.address(), &vec![0x5a; len + 80]);
                let remote = two.describe(index, theirs, len);
                two.own.copy(Copy::Pull, own.address() + ours, remote, len).expect("a pull");
                let found = two.own.take(own.address(), len + 80);
                let ours = ours as usize;
                assert!(found[ours..ours + len] == whole[theirs..theirs + len], "{kind}: pull of {len} at {theirs}");
                let around = found[..ours].iter().chain(&found[ours + len..]);
                assert!(around.into_iter().all(|byte| *byte == 0x5a), "{kind}: pull of {len} writes beside it");
            }
        }
        for (at, len) in lens.into_iter().enumerate() {
            let (seed, theirs) = (100 + at as u64, (2 << 20) - 77);
            two.own.put(own.address() + 5, &pattern(seed, len));
            let remote = two.describe(index, theirs, len);
            two.own.copy(Copy::Push, own.address() + 5, remote, len).expect("a push");
            assert!(two.check(index, theirs, len, seed), "{kind}: push of {len}");
        }
        assert!(two.check(index, 0, 1 << 20, 1), "{kind}: a push wrote before its place");
    }
}

#[test]
fn the_other_end_can_pull_and_push() {
    let Some(mut two) = TwoProcesses::new() else { return };
    let len = (3 << 20) + 1;
    let index = two.alloc("legacy", len, 1);
    for kind in KINDS {
        let own = Memory::new(&two.own.context, kind, len);
        two.own.put(own.address(), &pattern(7, len));
        let (remote, _) = two.own.link.describe(own.address() as usize as *const u8, len).expect("memory");
        let order = |what| json!({"do": what, "index": index, "offset": 0, "len": len, "descriptor": remote});
        assert_eq!(two.own.ask(&order("pull"))["why"], json!(null), "{kind}");
        assert!(two.check(index, 0, len, 7), "{kind}");
        two.own.ask(&json!({"do": "fill", "index": index, "len": len, "seed": 8}));
        assert_eq!(two.own.ask(&order("push"))["why"], json!(null), "{kind}");
        assert!(two.own.take(own.address(), len) == pattern(8, len), "{kind}");
    }
}

#[test]
fn both_ends_push_at_once() {
    let Some(mut two) = TwoProcesses::new() else { return };
    let len = (12 << 20) + 5;
    let (ours, others) = (pattern(12, len), pattern(11, len));
    for kind in KINDS {
        // At each end: what it pushes, and the destination of the other's push.
        let (source, target) = (Memory::new(&two.own.context, kind, len), Memory::new(&two.own.context, kind, len));
        let (theirs, into) = (two.alloc(kind, len, 11), two.alloc(kind, len, 1));
        two.own.put(source.address(), &ours);
        let (remote, _) = two.own.link.describe(target.address() as usize as *const u8, len).expect("memory");
        let there = two.describe(into, 0, len);
        for _ in 0..3 {
            two.own.put(target.address(), &vec![0; len]);
            let push = json!({"do": "push", "index": theirs, "offset": 0, "len": len, "descriptor": remote});
            two.own.send_message(&push);
            two.own.copy(Copy::Push, source.address(), there, len).expect("a push");
            assert_eq!(two.own.receive().expect("the other end")["why"], json!(null), "{kind}");
            assert!(two.own.take(target.address(), len) == others, "{kind}");
            assert!(two.check(into, 0, len, 12), "{kind}");
            two.own.ask(&json!({"do": "fill", "index": into, "len": len, "seed": 1}));
        }
    }
}

#[test]
fn many_small_copies_are_in_flight_at_once() {
    let Some(mut two) = TwoProcesses::new() else { return };
    let own = Memory::new(&two.own.context, "vmm", 1 << 20);
    let indices: Vec<u64> = KINDS.iter().map(|kind| two.alloc(kind, 4 << 20, 3)).collect();
    let bytes = pattern(3, 4 << 20);
    // 64 destinations at once, each described by the other process in advance.
    let mut numbers = 1_u64;
    let mut next = |limit: usize| {
        numbers = numbers.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (numbers >> 33) as usize % limit
    };
    let places: Vec<(usize, usize, [u8; 24])> = (0..200)
        .map(|at| {
            let (len, from) = (1 + next(16_000), next((4 << 20) - 16_000));
            (from, len, two.describe(indices[at % indices.len()], from, len))
        })
        .collect();
    let started = Instant::now();
    let mut flying: Vec<(usize, usize, Job)> = Vec::new();
    let (mut begun, mut done) = (0, 0);
    while done < 2000 {
        while begun < 2000 && flying.len() < 64 {
            let slot = (0..64).find(|slot| flying.iter().all(|(taken, _, _)| taken != slot)).expect("a slot");
            let place = begun % places.len();
            let (_, len, remote) = places[place];
            flying.push((slot, place, job(Copy::Pull, own.address() + (slot * 16_384) as u64, remote, len)));
            begun += 1;
        }
        two.own.pump();
        let mut ended = Vec::new();
        for (at, (_, _, job)) in flying.iter_mut().enumerate() {
            // SAFETY: memory of this test, which outlives all copies.
            #[allow(unsafe_code)]
            match unsafe { two.own.link.step(job, 1 << 20) } {
                Step::Done => ended.push(at),
                Step::Failed(why) | Step::Unmapped(why) => panic!("{why}"),
                Step::Moved(_) | Step::Waiting => {}
            }
        }
        for at in ended.into_iter().rev() {
            let (slot, place, job) = flying.swap_remove(at);
            assert_eq!(job.moved, job.len);
            let (from, len, _) = places[place];
            if done % 16 == 0 {
                let found = two.own.take(own.address() + (slot * 16_384) as u64, len);
                assert!(found == bytes[from..from + len], "copy {done}");
            }
            done += 1;
        }
        assert!(started.elapsed() < LIMIT);
    }
    assert_eq!(two.own.link.open_pieces(), 4, "the segment's two parts, and one each of the others");
    println!("2000 small copies in {:?}", started.elapsed());
}

#[test]
fn a_piece_is_announced_once() {
    let Some(mut two) = TwoProcesses::new() else { return };
    let own = Memory::new(&two.own.context, "vmm", 1 << 20);
    for kind in KINDS {
        let index = two.alloc(kind, 4 << 20, 3);
        for round in 0..20 {
            let remote = two.describe(index, round * 1000, 5000);
            two.own.copy(Copy::Pull, own.address(), remote, 5000).expect("a pull");
        }
        let notes = two.own.notes;
        for round in 0..20 {
            let remote = two.describe(index, round * 1000, 5000);
            two.own.copy(Copy::Pull, own.address(), remote, 5000).expect("a pull");
        }
        assert_eq!(two.own.notes, notes, "{kind}: the owner takes its memory for another each time");
    }
}

#[test]
fn least_recently_used_pieces_are_closed_and_reopened() {
    let Some(mut two) = TwoProcesses::new() else { return };
    let own = Memory::new(&two.own.context, "vmm", 1 << 20);
    const COUNT: u64 = 2100;
    for at in 0..COUNT {
        let index = two.alloc("vmm", 4096, at);
        let remote = two.describe(index, 0, 4096);
        two.own.copy(Copy::Pull, own.address(), remote, 4096).expect("a pull");
    }
    assert_eq!(two.own.link.open_pieces(), 2048);
    for at in [0, 1, COUNT - 1, 2, 50] {
        let remote = two.describe(at, 0, 4096);
        two.own.copy(Copy::Pull, own.address(), remote, 4096).expect("a pull");
        assert!(two.own.take(own.address(), 4096) == pattern(at, 4096), "allocation {at}");
    }
    assert_eq!(two.own.link.open_pieces(), 2048);
}

#[test]
fn a_window_maps_the_peers_memory_and_outlives_link_and_owner() {
    let Some(mut two) = TwoProcesses::new() else { return };
    let own = Memory::new(&two.own.context, "vmm", 5 << 20);
    for kind in KINDS {
        let index = two.alloc(kind, 5 << 20, 1);
        let (offset, len) = (4096 + 7, (5 << 20) - 9000);
        let remote = two.describe(index, offset, len);
        let started = Instant::now();
        let window = loop {
            if let Some(window) = two.own.link.map(&remote, len, None).expect("a window") {
                break window;
            }
            two.own.pump();
            assert!(started.elapsed() < LIMIT, "the memory never comes");
        };
        assert_eq!((window.len, window.device), (len, Some(0)));
        let address = window.ptr as u64;
        assert!(two.own.take(address, len) == pattern(1, 5 << 20)[offset..offset + len], "{kind}");
        two.own.put(address, &pattern(2, len));
        assert!(two.check(index, offset, len, 2), "{kind}");
        two.own.ask(&json!({"do": "describe", "index": index, "offset": 0, "len": 1}));
        let refused = two.own.link.map(&remote, 6 << 20, None).expect_err("longer than the memory");
        assert_eq!(refused.kind, crossrail_types::ErrorKind::Region, "{refused}");
        if kind != "legacy" {
            // The owner must not free memory shared by a legacy handle while others have it open.
            two.own.ask(&json!({"do": "free", "index": index, "announced": true}));
            two.own.pump();
            assert!(two.own.take(address, len) == pattern(2, len), "{kind}");
        }
        drop(window);
    }
    drop(own);
}

#[test]
fn everything_is_given_back() {
    let Some(mut two) = TwoProcesses::new() else { return };
    let round = |two: &mut TwoProcesses, first: bool| {
        let own = Memory::new(&two.own.context, "vmm", 64 << 20);
        for (at, kind) in KINDS.iter().enumerate() {
            let index = two.alloc(kind, 64 << 20, at as u64);
            for len in [4096, 64 << 20] {
                let remote = two.describe(index, 0, len);
                two.own.copy(Copy::Pull, own.address(), remote, len).expect("a pull");
            }
            two.own.ask(&json!({"do": "free", "index": index}));
        }
        drop(own);
        assert!(two.own.link.open_pieces() > 30, "{first}");
        two.own.ask(&json!({"do": "new link"}));
        two.own.link = crossrail_cuda_ipc::Link::new(two.own.gpus.clone(), LIMIT);
    };
    // The first round creates streams and words, which are kept for the next link.
    round(&mut two, true);
    let memory = |two: &mut TwoProcesses| {
        assert!(crossrail_cuda::wait_for_releases(LIMIT));
        (two.own.free(), number(&two.own.ask(&json!({"do": "free bytes"})), "free"))
    };
    let (before, files_before) = (memory(&mut two), files());
    for _ in 0..3 {
        round(&mut two, false);
    }
    // A leak would be at least 64 MiB and dozens of files per round; the driver's own tables are smaller.
    const LITTLE: u64 = 8 << 20;
    let after = memory(&mut two);
    assert!(after.0 + LITTLE > before.0 && after.1 + LITTLE > before.1, "free here, there: {before:?}, now {after:?}");
    assert!(files() < files_before + 8, "{} files, now {}", files_before, files());
}

fn files() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("a list of files").count()
}
