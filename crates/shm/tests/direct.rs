//! Direct copies, byte by byte.
#![allow(unsafe_code)]

mod common;

use std::sync::{Arc, Barrier};

use common::{Keeper, Piece, Random, byte, domain, pair_in, receive_direct, send_direct};
use crossrail_shm::{Arena, Options, ShmLane};
use crossrail_transport::conformance::skip;
use crossrail_transport::{Copy, Descriptor, DirectKind, HALVES_MAX, Job, Lane, Step};
use crossrail_types::ErrorKind;

/// Copies `len` bytes from `from` to `to`, both ends helping if `both`, and looks at every byte around it as well.
fn check(lanes: &mut (ShmLane, ShmLane), from: &mut [u8], to: &mut [u8], both: bool) -> [(DirectKind, usize); 2] {
    const EDGE: usize = 64;
    let len = from.len();
    from.iter_mut().enumerate().for_each(|(i, out)| *out = byte(i));
    to.fill(0xee);
    let source = (from.as_mut_ptr() as usize, len);
    let target = (to.as_mut_ptr() as usize + EDGE, to.len() - 2 * EDGE);
    assert_eq!(source.1, target.1);
    let (a, b) = (&mut lanes.0, &mut lanes.1);
    let did = std::thread::scope(|scope| {
        let sender =
            scope.spawn(move || send_direct(a, &mut Keeper::default(), &Piece { ptr: source.0 as *mut u8, len, both }));
        let received = receive_direct(b, &mut Keeper::default(), &Piece { ptr: target.0 as *mut u8, len, both });
        [sender.join().expect("the sender is fine"), received]
    });
    let (before, rest) = to.split_at(EDGE);
    let (inside, after) = rest.split_at(len);
    assert!(before.iter().chain(after).all(|got| *got == 0xee), "{len} bytes: written beyond");
    assert_eq!(inside.iter().enumerate().position(|(i, got)| *got != byte(i)), None, "{len} bytes");
    assert_eq!(if both { did[0].1 + did[1].1 } else { did[1].1 }, len, "each byte once");
    did
}

#[allow(clippy::mut_from_ref)] // shared memory is: see the SAFETY comment
fn slice(segment: &crossrail_shm::Segment, at: usize, len: usize) -> &mut [u8] {
    assert!(at + len <= segment.len());
    // SAFETY: inside the segment; the tests take each range once at a time.
    unsafe { std::slice::from_raw_parts_mut(segment.ptr().add(at), len) }
}

const LENGTHS: [usize; 12] =
    [0, 1, 7, 4_095, 4_097, 65_535, 65_536, 131_073, 1 << 20, (1 << 20) + 13, (4 << 20) - 1, (9 << 20) + 5];

#[test]
fn mapped_copies_move_every_byte_once() {
    let (here, there) = (Arena::new(), Arena::new());
    let mut lanes = pair_in(&Options { cma: false, ..Options::default() }, here.clone(), there.clone());
    let source = here.alloc(16 << 20).expect("alloc");
    let target = there.alloc(16 << 20).expect("alloc");
    let mut random = Random(5);
    for len in LENGTHS {
        for both in [false, true] {
            let (x, y) = (random.below(4_000), random.below(4_000));
            let did = check(&mut lanes, slice(&source, x, len), slice(&target, y, len + 128), both);
            assert_eq!(did.map(|(kind, _)| kind), [DirectKind::Mapped; 2]);
        }
    }
}

#[test]
fn cma_copies_move_every_byte_once() {
    let mut lanes = pair_in(&Options::default(), Arena::new(), Arena::new());
    if let Err(why) = &lanes.0.report().cma_pull {
        return skip(&format!("CMA with ourselves is denied: {why}"));
    }
    let mut source = vec![0; 10 << 20];
    let mut target = vec![0; 10 << 20];
    for len in LENGTHS {
        for both in [false, true] {
            let did = check(&mut lanes, &mut source[3..3 + len], &mut target[1..129 + len], both);
            assert_eq!(did.map(|(kind, _)| kind), [DirectKind::Cma; 2]);
        }
    }
}

#[test]
fn mixed_kinds_share_a_cursor() {
    let here = Arena::new();
    let mut lanes = pair_in(&Options::default(), here.clone(), Arena::new());
    if lanes.0.report().cma_push.is_err() {
        return skip("CMA with ourselves is denied");
    }
    let len = 3_000_001;
    let source = here.alloc(len).expect("alloc");
    let mut target = vec![0; len + 128];
    let did = check(&mut lanes, slice(&source, 0, len), &mut target, true);
    assert_eq!(did.map(|(kind, _)| kind), [DirectKind::Mapped; 2]);
}

#[test]
fn without_cma_plain_memory_is_out_of_reach_and_says_why() {
    let arena = Arena::new();
    let (mut a, mut b) = pair_in(&Options { cma: false, ..Options::default() }, arena.clone(), Arena::new());
    for lane in [&a, &b] {
        assert!(lane.report().cma_pull.as_ref().is_err_and(|why| why.contains("switched off")));
        assert!(lane.report().cma_push.is_err());
    }
    let plain = [0u8; 64];
    assert!(domain(&mut a).describe(plain.as_ptr(), 64).is_err());
    let mut address = [0; 24];
    address[0] = 2;
    assert!(domain(&mut b).reach(&address, 64).is_err());
}

#[test]
fn a_description_of_the_peer_is_not_believed() {
    let arena = Arena::new();
    let (mut a, mut b) = pair_in(&Options::default(), arena.clone(), Arena::new());
    let segment = arena.alloc(10_000).expect("alloc");
    let (good, _) = domain(&mut a).describe(segment.ptr(), 10_000).expect("ours");
    assert_eq!(domain(&mut b).reach(&good, 10_000), Ok(DirectKind::Mapped));
    let mut memory = vec![0u8; 1 << 20];
    let spoil = |at: usize, with: &[u8]| {
        let mut bad = good;
        bad[at..at + with.len()].copy_from_slice(with);
        bad
    };
    let beyond = [
        (spoil(0, &[77]), 1),
        (spoil(4, &[9]), 1),
        (spoil(8, &12_288u64.to_le_bytes()), 1),
        (spoil(8, &u64::MAX.to_le_bytes()), 1),
        (spoil(8, &(u64::MAX - 5).to_le_bytes()), 10),
        (good, 12_289),
    ];
    for (remote, len) in beyond {
        assert!(domain(&mut b).reach(&remote, len).is_err());
        let mut job = Job {
            slot: None,
            local: memory.as_mut_ptr(),
            remote,
            len,
            copy: Copy::Push,
            moved: 0,
            state: 0,
            helps: true,
        };
        // SAFETY: `memory` is longer than any of the lengths.
        assert!(matches!(unsafe { domain(&mut b).step(&mut job, 1 << 20) }, Step::Failed(_)));
    }
    for slot in [u32::MAX, 0xffff, 128, 200] {
        let local = memory.as_mut_ptr();
        let mut job =
            Job { slot: Some(slot), local, remote: good, len: 100, copy: Copy::Pull, moved: 0, state: 0, helps: true };
        // SAFETY: `memory` is longer than 100 bytes.
        assert!(matches!(unsafe { domain(&mut b).step(&mut job, 1 << 20) }, Step::Failed(_)), "cursor {slot}");
    }
}

#[test]
fn a_stopped_copy_is_claimed_no_more_and_the_cursor_outlives_late_jobs() {
    let arena = Arena::new();
    let (mut a, mut b) = pair_in(&Options::default(), arena.clone(), Arena::new());
    let len = 8 << 20;
    let segment = arena.alloc(len).expect("alloc");
    let (remote, _) = domain(&mut a).describe(segment.ptr(), len).expect("ours");
    let mut stopped = 0;
    for round in 0..50 {
        slice(&segment, 0, len).fill(0x11);
        let slot = domain(&mut a).open(len).expect("a free cursor");
        let mut memory = vec![0u8; len];
        let under_way = Barrier::new(2);
        let done = std::thread::scope(|scope| {
            let (b, memory, under_way) = (&mut b, &mut memory, &under_way);
            let copier = scope.spawn(move || {
                let local = memory.as_mut_ptr();
                let mut job =
                    Job { slot: Some(slot), local, remote, len, copy: Copy::Pull, moved: 0, state: 0, helps: true };
                loop {
                    // SAFETY: `memory` has `len` bytes and lives past this thread.
                    match unsafe { domain(b).step(&mut job, 1) } {
                        Step::Moved(n) if n == job.moved => drop(under_way.wait()),
                        Step::Moved(_) => {}
                        Step::Waiting => panic!("nobody else copies"),
                        Step::Done => return true,
                        Step::Failed(why) | Step::Unmapped(why) => {
                            assert!(why.contains("stopped"), "{why}");
                            return false;
                        }
                    }
                }
            });
            under_way.wait();
            for _ in 0..round * 20 {
                std::hint::spin_loop();
            }
            while !domain(&mut a).stop(slot) {}
            // From here on nobody reads it any more, so this must not show up at the other end.
            slice(&segment, 0, len).fill(0xbb);
            copier.join().expect("the copier is fine")
        });
        assert_eq!(memory.iter().position(|byte| *byte == 0xbb), None, "copied after stop was true");
        stopped += usize::from(!done && memory.contains(&0x11));
        domain(&mut a).close(slot);
        let next = domain(&mut a).open(len).expect("a free cursor");
        let local = memory.as_mut_ptr();
        let mut late = Job { slot: Some(slot), local, remote, len, copy: Copy::Pull, moved: 0, state: 0, helps: true };
        // SAFETY: `memory` has `len` bytes.
        assert!(matches!(unsafe { domain(&mut b).step(&mut late, 1) }, Step::Failed(_) | Step::Done));
        assert_ne!(next, slot);
        domain(&mut a).close(next);
    }
    assert!(stopped > 0, "no copy was stopped half-way");
}

#[test]
fn each_end_copies_its_half_until_it_helps() {
    let (here, there) = (Arena::new(), Arena::new());
    let (mut a, mut b) = pair_in(&Options { cma: false, ..Options::default() }, here.clone(), there.clone());
    for len in [64 << 10, (96 << 10) + 1, HALVES_MAX] {
        let (source, target) = (here.alloc(len).expect("alloc"), there.alloc(len).expect("alloc"));
        slice(&source, 0, len).fill(0x5a);
        let (mine, _) = domain(&mut a).describe(source.ptr(), len).expect("ours");
        let (theirs, _) = domain(&mut b).describe(target.ptr(), len).expect("ours");
        let slot = domain(&mut a).open(len);
        let job = |local, remote, copy| Job { slot, local, remote, len, copy, moved: 0, state: 0, helps: false };
        let (mut pull, mut push) = (job(target.ptr(), mine, Copy::Pull), job(source.ptr(), theirs, Copy::Push));
        // SAFETY: both segments have `len` bytes, and outlive the jobs.
        let step = |lane: &mut ShmLane, job: &mut Job| unsafe { domain(lane).step(job, len) };
        assert_eq!(step(&mut b, &mut pull), Step::Moved(pull.moved));
        assert_eq!(step(&mut b, &mut pull), Step::Waiting, "the rest is the sender's");
        let half = pull.moved;
        assert!((len / 2..=len / 2 + (32 << 10)).contains(&half), "{half} of {len} bytes");
        let copied = |from: usize, to: usize| slice(&target, from, to - from).iter().all(|byte| *byte == 0x5a);
        let untouched = |from: usize, to: usize| slice(&target, from, to - from).iter().all(|byte| *byte == 0);
        assert!(copied(0, half) && untouched(half, len), "{len} bytes: the receiver begins at the front");
        assert_eq!((step(&mut a, &mut push), push.moved), (Step::Done, len - half));
        assert!(copied(0, len) && step(&mut b, &mut pull) == Step::Done, "{len} bytes");
        domain(&mut a).close(slot.expect("a free cursor"));

        // Alone, an end that helps copies everything.
        let slot = domain(&mut a).open(len);
        slice(&target, 0, len).fill(0);
        let mut alone = Job { slot, moved: 0, helps: true, ..push };
        assert_eq!(step(&mut a, &mut alone), Step::Moved(len));
        assert!(copied(0, len) && step(&mut a, &mut alone) == Step::Done, "{len} bytes");
        domain(&mut a).close(slot.expect("a free cursor"));
    }
}

#[test]
fn a_row_of_jobs_is_copied_at_once_and_one_that_cannot_be_fails_alone() {
    let (mut a, mut b) = pair_in(&Options::default(), Arena::new(), Arena::new());
    if b.report().cma_pull.is_err() || a.report().cma_push.is_err() {
        return skip("CMA with ourselves is denied");
    }
    let lens = [64 << 10, 10, (96 << 10) + 1, (33 << 10) - 1, 256 << 10];
    let bytes = |seed: usize, len: usize| (0..len).map(|at| (at * 7 + at / 4096 + seed) as u8).collect::<Vec<_>>();
    for spoiled in [None, Some(2)] {
        let sources: Vec<Vec<u8>> = lens.iter().enumerate().map(|(seed, len)| bytes(seed, *len)).collect();
        let mut targets: Vec<Vec<u8>> = lens.iter().map(|len| vec![0; *len]).collect();
        let slots: Vec<u32> = lens.iter().map(|len| domain(&mut a).open(*len).expect("a free cursor")).collect();
        let job = |at: usize, local: *mut u8, mut remote: Descriptor, copy| {
            if spoiled == Some(at) {
                remote[8..16].copy_from_slice(&8u64.to_le_bytes());
            }
            Job { slot: Some(slots[at]), local, remote, len: lens[at], copy, moved: 0, state: 0, helps: false }
        };
        let described = |lane: &mut ShmLane, of: &[u8]| domain(lane).describe(of.as_ptr(), of.len()).expect("CMA").0;
        let mut pulls: Vec<Job> = (0..lens.len())
            .map(|at| job(at, targets[at].as_mut_ptr(), described(&mut a, &sources[at]), Copy::Pull))
            .collect();
        let mut pushes: Vec<Job> = (0..lens.len())
            .map(|at| job(at, sources[at].as_ptr().cast_mut(), described(&mut b, &targets[at]), Copy::Push))
            .collect();
        // SAFETY: the memory of all jobs outlives them, and is not touched meanwhile.
        let row = |lane: &mut ShmLane, jobs: &mut [Job]| unsafe {
            domain(lane).step_row(&mut jobs.iter_mut().collect::<Vec<_>>())
        };
        let (pulled, pushed) = (row(&mut b, &mut pulls), row(&mut a, &mut pushes));
        match spoiled {
            None => {
                // There was no room for a piece of the last, which are longer.
                let halves = [32 << 10, 10, 64 << 10, 32 << 10, 0];
                assert_eq!(pulls.iter().map(|job| job.moved).collect::<Vec<_>>(), halves);
                assert_eq!(pulled, Ok(halves.iter().sum()));
                let others = [32 << 10, 0, (32 << 10) + 1, 1023, 128 << 10];
                assert_eq!(pushes.iter().map(|job| job.moved).collect::<Vec<_>>(), others);
                assert_eq!(pushed, Ok(others.iter().sum()));
                assert_eq!(row(&mut b, &mut pulls), Ok(128 << 10), "what there was no room for");
            }
            Some(at) => {
                assert!(
                    matches!(&pulled, Err((of, Step::Unmapped(why))) if *of == at && why.contains("process_vm_readv")),
                    "{pulled:?}"
                );
                assert_eq!(pulls[at].moved, 0);
                row(&mut b, &mut pulls).expect("the others");
            }
        }
        if spoiled.is_none() {
            // An end that helps takes both halves, in the order of the row.
            let slot = domain(&mut a).open(lens[0]);
            targets[0].fill(0);
            let mut whole = [Job { slot, moved: 0, helps: true, ..pulls[0] }];
            assert_eq!(row(&mut b, &mut whole), Ok(lens[0]));
            assert_eq!((whole[0].moved, targets[0] == sources[0]), (lens[0], true));
            domain(&mut a).close(slot.expect("a free cursor"));
        }
        for (at, job) in pulls.iter_mut().enumerate() {
            // SAFETY: as above.
            let step = unsafe { domain(&mut b).step(job, 1) };
            if spoiled == Some(at) {
                assert!(matches!(step, Step::Failed(_)), "{step:?}");
            } else {
                assert_eq!((step, sources[at] == targets[at]), (Step::Done, true), "{} bytes", lens[at]);
            }
        }
        slots.iter().for_each(|slot| domain(&mut a).close(*slot));
    }
}

#[test]
fn cursors_run_out_and_come_back() {
    let (mut a, mut b) = pair_in(&Options::default(), Arena::new(), Arena::new());
    let mine: Vec<u32> = std::iter::from_fn(|| domain(&mut a).open(1)).collect();
    let theirs: Vec<u32> = std::iter::from_fn(|| domain(&mut b).open(1)).collect();
    assert!(mine.len() >= 32 && theirs.len() == mine.len());
    assert!(mine.iter().all(|slot| !theirs.contains(slot)));
    domain(&mut a).close(theirs[0]);
    assert_eq!(domain(&mut a).open(1), None, "closing the peer's cursor gives nothing");
    domain(&mut a).close(mine[3]);
    let again = domain(&mut a).open(1).expect("one is free");
    assert_ne!(again, mine[3], "a use of its own");
    assert_eq!(domain(&mut a).open(1), None);
}

#[test]
fn one_end_failing_fails_both() {
    let arena = Arena::new();
    let (mut a, mut b) = pair_in(&Options::default(), arena.clone(), Arena::new());
    if b.report().cma_pull.is_err() {
        return skip("CMA with ourselves is denied");
    }
    let len = 1 << 20;
    let slot = domain(&mut a).open(len).expect("a free cursor");
    let mut memory = vec![0u8; len];
    let mut nowhere = [0; 24];
    nowhere[0] = 2;
    nowhere[8..16].copy_from_slice(&8u64.to_le_bytes());
    let mut job = |copy| Job {
        slot: Some(slot),
        local: memory.as_mut_ptr(),
        remote: nowhere,
        len,
        copy,
        moved: 0,
        state: 0,
        helps: true,
    };
    let (mut pull, mut push) = (job(Copy::Pull), job(Copy::Push));
    // SAFETY: `memory` has `len` bytes.
    let failed = unsafe { domain(&mut b).step(&mut pull, 1) };
    assert!(matches!(&failed, Step::Unmapped(why) if why.contains("process_vm_readv")), "{failed:?}");
    // SAFETY: as above.
    assert!(matches!(unsafe { domain(&mut a).step(&mut push, 1) }, Step::Failed(_)));
    assert!(domain(&mut a).stop(slot), "nothing is being copied");
}

#[test]
fn dropped_segments_are_given_back_by_the_peer() {
    let arena = Arena::new();
    let (mut a, mut b) = pair_in(&Options::default(), arena.clone(), Arena::new());
    let segment = arena.alloc(3 << 20).expect("alloc");
    let inside = segment.ptr().wrapping_add(4096);
    assert_eq!(arena.find(inside, 10).map(|found| (found.id, found.offset)), Some((segment.id(), 4096)));
    assert_eq!(arena.find(inside, 3 << 20), None, "beyond its end");
    let (remote, _) = domain(&mut a).describe(inside, 10).expect("ours");
    assert!(domain(&mut b).reach(&remote, 10).is_ok());
    let other = segment.clone();
    drop(segment);
    assert!(domain(&mut b).reach(&remote, 10).is_ok(), "a clone is left");
    drop(other);
    assert_eq!(arena.find(inside, 10), None);
    b.ready(true, false);
    b.poll(&mut Keeper::default(), 1 << 20, true).expect("poll");
    assert!(domain(&mut b).reach(&remote, 10).is_err_and(|why| why.contains("gone")));
}

#[test]
fn memory_that_is_not_there_is_refused_by_name() {
    let arena = Arena::new();
    for len in [1usize << 45, usize::MAX / 2, usize::MAX] {
        let error = arena.alloc(len).expect_err("nobody has that much");
        assert_eq!(error.kind, ErrorKind::Exhausted);
        assert!(error.to_string().contains(&len.to_string()), "{error}");
    }
    let empty = arena.alloc(0).expect("nothing is always there");
    assert!(empty.is_empty());
    assert_eq!(arena.find(empty.ptr(), 1), None);
    let segment = arena.alloc(5).expect("alloc");
    assert_eq!(slice(&segment, 0, 5), [0; 5]);
    let shared: Arc<Arena> = arena;
    assert_eq!(shared.find(std::ptr::null(), 1), None);
}
