//! Failures: freed memory, dead or malicious peers, lost contexts.

use std::time::{Duration, Instant};

use crossrail_transport::{Copy, Domain, Step};
use serde_json::json;

use crate::end::{LIMIT, Memory, job, pattern};
use crate::{KINDS, TwoProcesses};

#[test]
fn a_new_allocation_is_never_mistaken_for_an_old_one_at_its_address() {
    let Some(mut two) = TwoProcesses::new() else { return };
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
            two.own.ask(&json!({"do": "free", "index": index, "announced": round % 3 == 0}));
        }
        println!("{kind}: 20 allocations lay at {} addresses", addresses.len());
    }
}

#[test]
fn freed_memory_fails_only_its_transfer() {
    let Some(mut two) = TwoProcesses::new() else { return };
    let own = Memory::new(&two.own.context, "vmm", 1 << 20);
    for kind in KINDS {
        // The remaining pieces are checked by the other end at once.
        let index = two.alloc(kind, 4 << 20, 5);
        let remote = two.describe(index, 0, 1 << 20);
        two.own.ask(&json!({"do": "free", "index": index, "announced": true}));
        for copy in [Copy::Pull, Copy::Push] {
            let why = two.own.copy(copy, own.address(), remote, 1 << 20).expect_err("it was freed");
            assert!(why.contains("freed"), "{kind}: {why}");
        }
        let index = two.alloc(kind, 4 << 20, 6);
        let remote = two.describe(index, 0, 1 << 20);
        two.own.copy(Copy::Pull, own.address(), remote, 1 << 20).expect("a pull");
        assert!(two.own.take(own.address(), 1 << 20) == pattern(6, 1 << 20), "{kind}");
        assert!(two.own.link.open_pieces() > 0);
        // This one is freed without an announcement. It is detected, and both ends close it.
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
fn freed_local_memory_fails_only_the_copy() {
    let Some(mut two) = TwoProcesses::new() else { return };
    let index = two.alloc("vmm", 4 << 20, 5);
    for kind in KINDS {
        for (copy, len) in [(Copy::Pull, 4096), (Copy::Pull, 4 << 20), (Copy::Push, 4 << 20)] {
            let own = Memory::new(&two.own.context, kind, 4 << 20);
            let (address, remote) = (own.address(), two.describe(index, 0, len));
            two.own.copy(Copy::Pull, address, remote, len).expect("a pull");
            drop(own);
            assert!(crossrail_cuda::wait_for_releases(LIMIT));
            let why = two.own.copy(copy, address, remote, len).expect_err("its own memory is gone");
            assert!(why.contains("freed") || why.contains("not GPU memory"), "{kind}: {why}");
        }
    }
    let own = Memory::new(&two.own.context, "vmm", 4 << 20);
    let remote = two.describe(index, 0, 4 << 20);
    two.own.copy(Copy::Pull, own.address(), remote, 4 << 20).expect("the GPU is as good as before");
    assert!(two.own.take(own.address(), 4 << 20) == pattern(5, 4 << 20));
}

#[test]
fn memory_that_cannot_be_exported_is_reported_with_the_reason() {
    let Some(mut two) = TwoProcesses::new() else { return };
    let host = [0_u8; 64];
    let refused = two.own.link.describe(host.as_ptr(), host.len());
    assert!(refused.as_ref().is_err_and(|why| why.contains("not GPU memory")), "{refused:?}");
    let own = Memory::new(&two.own.context, "legacy", 4096);
    let address = own.address() as usize as *const u8;
    assert!(two.own.link.describe(address, usize::MAX).is_err(), "more than there is");
    assert!(two.own.link.describe(address, 0).is_err());
    assert!(two.own.link.describe(address, 4096).is_ok());
    let error = two.own.link.share(host.as_ptr(), host.len()).expect_err("host memory");
    assert_eq!(error.kind, crossrail_types::ErrorKind::Unsupported);
}

#[test]
fn forged_descriptors_and_notes_fail_only_the_transfer() {
    let Some(mut two) = TwoProcesses::new() else { return };
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
    // A note in which each piece is longer than it really is: 16 bytes of header, kind, id, address, length.
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
fn a_missing_note_fails_the_copy_after_the_limit() {
    let Some(mut two) = TwoProcesses::new() else { return };
    let own = Memory::new(&two.own.context, "vmm", 4096);
    let limit = Duration::from_millis(200);
    two.own.link = crossrail_cuda_ipc::Link::new(two.own.gpus.clone(), limit);
    let index = two.alloc("vmm", 4096, 1);
    let mut remote = two.describe(index, 0, 4096);
    // It depends on a note that is never written.
    remote[20] = 1;
    let started = Instant::now();
    let why = two.own.copy(Copy::Pull, own.address(), remote, 4096).expect_err("it never comes");
    assert!(why.contains("did not announce") && started.elapsed() >= limit, "{why}");
}

#[test]
fn a_dropped_job_no_longer_accesses_the_memory() {
    let Some(mut two) = TwoProcesses::new() else { return };
    let len = 512 << 20;
    let own = Memory::new(&two.own.context, "vmm", len);
    let index = two.alloc("vmm", len, 1);
    let remote = two.describe(index, 0, len);
    let tail = len - 4096;
    for round in 0..12_u64 {
        two.own.pump();
        let copy = if round < 6 { Copy::Pull } else { Copy::Push };
        let mut job = job(copy, own.address(), remote, len);
        // SAFETY: memory of this test, which is kept until `ended` has returned.
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
                // The destination of the push can be reused now.
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
fn a_dying_peer_affects_only_its_own_transfers() {
    let Some(mut two) = TwoProcesses::new() else { return };
    let len = 384 << 20;
    let own = Memory::new(&two.own.context, "vmm", len);
    // A new peer each time, which takes a while to start.
    for (kind, copy) in KINDS.into_iter().zip([Copy::Push, Copy::Pull, Copy::Push]) {
        let index = two.alloc(kind, len, 1);
        let remote = two.describe(index, 0, len);
        let warm = two.own.copy(Copy::Pull, own.address(), remote, 4096);
        warm.expect("the peer lives");
        two.own.send_message(&json!({"do": "abort"}));
        let mut job = job(copy, own.address(), remote, len);
        let started = Instant::now();
        // Completes, because the memory still exists, or fails with the driver's error; never hangs.
        let outcome = two.own.finish(&mut job);
        println!("{kind}, {copy:?}: the peer died: {outcome:?} after {:?}", started.elapsed());
        assert!(two.own.receive().is_none());
        drop(two);
        // This process, its context and the GPU still work, for the next peer.
        two = TwoProcesses::new().expect("a GPU");
        let index = two.alloc(kind, 1 << 20, 9);
        let remote = two.describe(index, 0, 1 << 20);
        two.own.copy(Copy::Pull, own.address(), remote, 1 << 20).expect("a pull");
        assert!(two.own.take(own.address(), 1 << 20) == pattern(9, 1 << 20), "{kind}");
    }
}

#[test]
fn a_lost_context_fails_every_step_with_the_drivers_error() {
    let Some(mut two) = TwoProcesses::new() else { return };
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
    assert!(two.child.0.try_wait().expect("wait").is_none(), "the process goes on");
}
