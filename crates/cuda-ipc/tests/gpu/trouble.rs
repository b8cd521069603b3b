//! What goes wrong: memory that is freed, peers that die or lie, contexts that are lost.

use std::time::{Duration, Instant};

use crossrail_transport::{Copy, Direct, Step};
use serde_json::json;

use crate::end::{LIMIT, Memory, job, pattern};
use crate::{KINDS, Two};

#[test]
fn what_lies_at_an_address_later_is_never_taken_for_what_lay_there() {
    let Some(mut two) = Two::new() else { return };
    let own = Memory::new(&two.own.context, "vmm", 1 << 20);
    for kind in KINDS {
        let mut addresses = std::collections::HashSet::new();
        for round in 0..20_u64 {
            let answer = two.own.ask(&json!({"do": "alloc", "kind": kind, "len": 4 << 20, "seed": round}));
            addresses.insert(answer["address"].as_u64());
            let index = crate::number(&answer, "index");
            let remote = two.describe(index, 0, 1 << 20);
            two.own.copy(Copy::Pull, own.address(), remote, 1 << 20).expect("a pull");
            assert!(two.own.take(own.address(), 1 << 20) == pattern(round, 1 << 20), "{kind}: round {round}");
            two.own.put(own.address(), &pattern(round + 50, 1 << 20));
            two.own.copy(Copy::Push, own.address(), remote, 1 << 20).expect("a push");
            assert!(two.check(index, 0, 1 << 20, round + 50), "{kind}: round {round}");
            two.own.ask(&json!({"do": "free", "index": index, "said": round % 3 == 0}));
        }
        println!("{kind}: 20 allocations lay at {} addresses", addresses.len());
    }
}

#[test]
fn memory_that_is_freed_first_fails_that_transfer_only() {
    let Some(mut two) = Two::new() else { return };
    let own = Memory::new(&two.own.context, "vmm", 1 << 20);
    for kind in KINDS {
        // The whole link of the other end is asked about the rest at once.
        let index = two.alloc(kind, 4 << 20, 5);
        let remote = two.describe(index, 0, 1 << 20);
        two.own.ask(&json!({"do": "free", "index": index, "said": true}));
        for copy in [Copy::Pull, Copy::Push] {
            let why = two.own.copy(copy, own.address(), remote, 1 << 20).expect_err("it was freed");
            assert!(why.contains("freed"), "{kind}: {why}");
        }
        let index = two.alloc(kind, 4 << 20, 6);
        let remote = two.describe(index, 0, 1 << 20);
        two.own.copy(Copy::Pull, own.address(), remote, 1 << 20).expect("a pull");
        assert!(two.own.take(own.address(), 1 << 20) == pattern(6, 1 << 20), "{kind}");
        assert!(two.own.link.open_pieces() > 0);
        // Nobody says that this one is freed; it is noticed, and both ends let go of it.
        two.own.ask(&json!({"do": "free", "index": index}));
        let started = Instant::now();
        while two.own.link.open_pieces() > 0 {
            two.own.ask(&json!({"do": "tidy"}));
            two.own.pump();
            assert!(started.elapsed() < LIMIT, "{kind}: the peer's freed memory stays open here");
        }
    }
}

#[test]
fn own_memory_that_is_freed_fails_the_copy_and_nothing_else() {
    let Some(mut two) = Two::new() else { return };
    let index = two.alloc("vmm", 4 << 20, 5);
    for kind in KINDS {
        for (copy, len) in [(Copy::Pull, 4096), (Copy::Pull, 4 << 20), (Copy::Push, 4 << 20)] {
            let own = Memory::new(&two.own.context, kind, 4 << 20);
            let (address, remote) = (own.address(), two.describe(index, 0, len));
            two.own.copy(Copy::Pull, address, remote, len).expect("a pull");
            drop(own);
            assert!(crossrail_cuda::wait_for_releases(LIMIT));
            let why = two.own.copy(copy, address, remote, len).expect_err("its own memory is gone");
            assert!(why.contains("freed") || why.contains("no memory of a GPU"), "{kind}: {why}");
        }
    }
    let own = Memory::new(&two.own.context, "vmm", 4 << 20);
    let remote = two.describe(index, 0, 4 << 20);
    two.own.copy(Copy::Pull, own.address(), remote, 4 << 20).expect("the GPU is as good as before");
    assert!(two.own.take(own.address(), 4 << 20) == pattern(5, 4 << 20));
}

#[test]
fn memory_that_can_not_be_passed_on_says_why() {
    let Some(mut two) = Two::new() else { return };
    let host = [0_u8; 64];
    assert!(two.own.link.describe(host.as_ptr(), host.len()).is_none());
    assert!(two.own.link.why_not().is_some_and(|why| why.contains("no memory of a GPU")), "{:?}", two.own.link);
    let own = Memory::new(&two.own.context, "legacy", 4096);
    let address = own.address() as usize as *const u8;
    assert!(two.own.link.describe(address, usize::MAX).is_none(), "more than there is");
    assert!(two.own.link.describe(address, 0).is_none());
    assert!(two.own.link.describe(address, 4096).is_some());
    let error = two.own.link.share(host.as_ptr(), host.len()).expect_err("host memory");
    assert_eq!(error.kind, crossrail_types::ErrorKind::Unsupported);
}

#[test]
fn descriptors_and_notes_that_lie_fail_the_transfer_and_nothing_else() {
    let Some(mut two) = Two::new() else { return };
    let own = Memory::new(&two.own.context, "vmm", 4 << 20);
    let len = 1 << 20;
    for kind in ["legacy", "vmm"] {
        let index = two.alloc(kind, 2 << 20, 5);
        let good = two.describe(index, 0, len);
        let beyond = (2 << 20) + 1;
        let why = two.own.copy(Copy::Pull, own.address(), good, beyond).expect_err("more than there is");
        assert!(why.contains("freed"), "{kind}: {why}");
        for (at, what) in [(0, "kind"), (4, "piece"), (12, "address")] {
            let mut bad = good;
            bad[at] ^= 0x11;
            two.own.copy(Copy::Pull, own.address(), bad, len).expect_err(what);
        }
        two.own.copy(Copy::Pull, own.address(), good, len).expect("the good one");
    }
    // A note that says of each piece that it is longer than it is: 16 bytes of head, kind, number, address, length.
    two.own.tamper = Some(|note| {
        if matches!(note[16], 1 | 2) {
            note[16 + 1 + 4 + 8 + 3] = 0x40;
        }
    });
    for kind in ["legacy", "vmm"] {
        let index = two.alloc(kind, 2 << 20, 6);
        let remote = two.describe(index, 0, len);
        let why = two.own.copy(Copy::Pull, own.address(), remote, len).expect_err("a piece that is not so long");
        println!("{kind}: {why}");
    }
    two.own.tamper = None;
    let index = two.alloc("legacy", 2 << 20, 7);
    let remote = two.describe(index, 0, len);
    two.own.copy(Copy::Pull, own.address(), remote, len).expect("the GPU is as good as before");
    assert!(two.own.take(own.address(), len) == pattern(7, len));
}

#[test]
fn memory_that_never_comes_fails_in_time() {
    let Some(mut two) = Two::new() else { return };
    let own = Memory::new(&two.own.context, "vmm", 4096);
    let limit = Duration::from_millis(200);
    two.own.link = crossrail_cuda_ipc::Link::new(two.own.domain.clone(), limit);
    let index = two.alloc("vmm", 4096, 1);
    let mut remote = two.describe(index, 0, 4096);
    // It refers to a note that nobody will write.
    remote[20] = 1;
    let started = Instant::now();
    let why = two.own.copy(Copy::Pull, own.address(), remote, 4096).expect_err("it never comes");
    assert!(why.contains("not passed") && started.elapsed() >= limit, "{why}");
}

#[test]
fn a_job_that_is_dropped_no_longer_touches_the_memory() {
    let Some(mut two) = Two::new() else { return };
    let len = 512 << 20;
    let own = Memory::new(&two.own.context, "vmm", len);
    let index = two.alloc("vmm", len, 1);
    let remote = two.describe(index, 0, len);
    let tail = len - 4096;
    for round in 0..12_u64 {
        two.own.pump();
        let copy = if round < 6 { Copy::Pull } else { Copy::Push };
        let mut job = job(copy, own.address(), remote, len);
        // SAFETY: the test's own memory, which stays until `ended` has returned.
        #[allow(unsafe_code)]
        let step = unsafe { two.own.link.step(&mut job, 1) };
        assert!(step == Step::Waiting || step == Step::Done, "{step:?}");
        if round % 2 == 0 {
            two.own.link.ended(job.state);
        } else {
            let started = Instant::now();
            while !two.own.link.stopped(job.state) {
                assert!(started.elapsed() < LIMIT, "it never stops");
            }
        }
        match copy {
            Copy::Pull => {
                two.own.put(own.address() + tail as u64, &[0x77; 4096]);
                assert_eq!(two.own.take(own.address() + tail as u64, 4096), [0x77; 4096]);
            }
            Copy::Push => {
                // The other end's memory, which the push was to write last, is its own again.
                two.own.ask(&json!({"do": "fill", "index": index, "offset": tail, "len": 4096, "seed": round}));
                assert!(two.check(index, tail, 4096, round));
            }
        }
        two.own.link.ended(job.state);
        // SAFETY: as above.
        #[allow(unsafe_code)]
        let step = unsafe { two.own.link.step(&mut job, 1) };
        assert!(matches!(step, Step::Failed(_)), "a copy that was given up goes on: {step:?}");
    }
}

#[test]
fn a_peer_that_dies_in_the_middle_harms_nobody() {
    let Some(mut two) = Two::new() else { return };
    let len = 384 << 20;
    let own = Memory::new(&two.own.context, "vmm", len);
    // A peer for each, which takes a while to start.
    for (kind, copy) in KINDS.into_iter().zip([Copy::Push, Copy::Pull, Copy::Push]) {
        let index = two.alloc(kind, len, 1);
        let remote = two.describe(index, 0, len);
        let warm = two.own.copy(Copy::Pull, own.address(), remote, 4096);
        warm.expect("the peer lives");
        two.own.say(&json!({"do": "abort"}));
        let mut job = job(copy, own.address(), remote, len);
        let started = Instant::now();
        // Done, as the memory is still there, or failed with the driver's reason; not for ever.
        let outcome = two.own.finish(&mut job);
        println!("{kind}, {copy:?}: the peer died: {outcome:?} after {:?}", started.elapsed());
        assert!(two.own.hear().is_none());
        drop(two);
        // This process, its context and the GPU are as good as before, for the next peer.
        two = Two::new().expect("a GPU");
        let index = two.alloc(kind, 1 << 20, 9);
        let remote = two.describe(index, 0, 1 << 20);
        two.own.copy(Copy::Pull, own.address(), remote, 1 << 20).expect("a pull");
        assert!(two.own.take(own.address(), 1 << 20) == pattern(9, 1 << 20), "{kind}");
    }
}

#[test]
fn a_lost_context_fails_every_step_with_the_drivers_words() {
    let Some(mut two) = Two::new() else { return };
    if two.own.ask(&json!({"do": "load kernels"}))["loaded"] != true {
        return;
    }
    let own = Memory::new(&two.own.context, "vmm", 1 << 20);
    let (remote, _) = two.own.link.describe(own.address() as usize as *const u8, 1 << 20).expect("memory");
    let index = two.alloc("vmm", 1 << 20, 1);
    let pull = |len: usize| json!({"do": "pull", "index": index, "len": len, "descriptor": remote});
    assert_eq!(two.own.ask(&pull(4096))["why"], json!(null));
    let why = two.own.ask(&json!({"do": "lose the context", "index": index}))["why"].clone();
    assert!(why.as_str().is_some_and(|why| why.contains("CUDA_ERROR_")), "{why}");
    for len in [4096, 4096, 1 << 20] {
        let why = two.own.ask(&pull(len))["why"].clone();
        assert!(why.as_str().is_some_and(|why| why.contains("CUDA_ERROR_")), "{why}");
    }
    assert!(two.keeper.0.try_wait().expect("wait").is_none(), "the process goes on");
}
