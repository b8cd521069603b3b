//! Ends of objects over a real libfabric, and all that they leave.
#![allow(unsafe_code)] // exposes and writes the test's own memory, which outlives the objects

mod common;

use std::io::{Read, Write};
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::{LIMIT, objects, offer, streams};
use crossrail_fabric::attach;
use crossrail_transport::placing::{Event, Extent, Imm, Placing};
use crossrail_transport::{LaneError, Loan, Post};
use crossrail_types::ErrorKind;

/// A note that asks for nothing: the peer knows our endpoint.
const NOTE: [u8; 9] = [1, 0, 0, 0, 0, 0, 0, 0, 0];

/// Memory and descriptors are the process's: one test at a time.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Resident memory of this process in MiB, without what it has freed.
fn resident() -> u64 {
    // SAFETY: returns freed memory to the system.
    unsafe { libc::malloc_trim(0) };
    let pages = std::fs::read_to_string("/proc/self/statm").expect("/proc");
    (pages.split_whitespace().nth(1).expect("a number").parse::<u64>().expect("a number") * 4096) >> 20
}

/// Descriptors, mappings and threads of this process.
fn held() -> (usize, usize, usize) {
    let count = |folder: &str| std::fs::read_dir(folder).expect("/proc").count();
    let maps = std::fs::read_to_string("/proc/self/maps").expect("/proc").lines().count();
    (count("/proc/self/fd"), maps, count("/proc/self/task"))
}

/// A peer that writes notes as fast as it can neither keeps a poll nor takes memory.
#[test]
fn a_flood_of_notes_is_read_in_turns() {
    const BYTES: usize = 32 << 20;
    let _turn = turn();
    let Some(offer) = offer("tcp") else { return };
    // What is written to `beside` is the first one's.
    let (one, mut victim, beside) = objects(&offer);
    beside.set_nonblocking(false).expect("fcntl");
    let (before, over) = (resident(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let notes = NOTE.repeat(4096);
            (0..BYTES / notes.len()).for_each(|_| (&beside).write_all(&notes).expect("it is read"));
            over.store(true, Ordering::Release);
        });
        while !over.load(Ordering::Acquire) {
            let start = Instant::now();
            victim.poll(&mut |_| {}).expect("notes are allowed");
            assert!(start.elapsed() < Duration::from_millis(500), "a poll took {:?}", start.elapsed());
        }
    });
    let after = resident();
    assert!(after <= before + 8, "{before} -> {after} MiB");
    drop((one, victim));
}

/// A peer that introduces itself and then writes notes without end is named at the deadline.
#[test]
fn joining_ends_at_its_deadline_whatever_is_written() {
    let _turn = turn();
    let Some(offer) = offer("tcp") else { return };
    let (here, mut there) = streams();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The victim's own introduction: a valid one.
            let mut introduction = [0; 4096];
            let len = there.read(&mut introduction).expect("an introduction, in one piece");
            there.write_all(&introduction[..len]).expect("room");
            let notes = NOTE.repeat(64);
            let start = Instant::now();
            while !over.load(Ordering::Acquire) && start.elapsed() < LIMIT && there.write_all(&notes).is_ok() {
                std::thread::yield_now();
            }
        });
        let start = Instant::now();
        let error = attach(here, &offer, "mallory", "fabric/tcp", start + Duration::from_millis(300)).err();
        let took = start.elapsed();
        over.store(true, Ordering::Release);
        let error = error.expect("it never joins");
        assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
        assert!(took < Duration::from_secs(3) && error.to_string().contains("mallory"), "{took:?}: {error}");
    });
}

/// An object that has failed, and that its owner has not dropped, has closed its connection: the peer fails by that.
#[test]
fn an_object_that_has_failed_ends_its_peer() {
    let _turn = turn();
    let Some(offer) = offer("tcp") else { return };
    let (mut one, mut other, beside) = objects(&offer);
    // The first one's connection, which can still send.
    beside.shutdown(Shutdown::Read).expect("it is open");
    let until_error = |object: &mut dyn Placing| {
        let start = Instant::now();
        loop {
            match object.poll(&mut |_| {}) {
                Ok(_) => assert!(start.elapsed() < LIMIT, "no error"),
                Err(error) => return error,
            }
        }
    };
    let error = until_error(&mut one);
    assert!(matches!(&error, LaneError::Closed(_)), "{error}");
    assert!(error.to_string().contains("open the object anew at both ends"), "{error}");
    let (here, _) = (until_error(&mut other), &one);
    assert!(matches!(here, LaneError::Closed(_)), "{here}");
    drop((one, other));
}

/// Two objects, a write each way, and their end, in one of several ways.
fn life(offer: &crossrail_fabric::Offer, number: usize) {
    const LEN: usize = 8192;
    let (mut one, mut other, beside) = objects(offer);
    let (mut heaps, bytes) = ([vec![0u8; LEN], vec![0u8; LEN]], vec![7u8; LEN]);
    let mut keys = Vec::new();
    let loans = [Arc::<Loan>::default(), Arc::default()];
    for ((object, heap), loan) in [&mut one, &mut other].into_iter().zip(&mut heaps).zip(&loans) {
        let memory = Extent::host(heap.as_mut_ptr(), LEN);
        // SAFETY: the objects are dropped before the memory.
        let key = unsafe { object.expose(&memory, loan) }.expect("a key");
        keys.push((key, object.count(1).expect("a counter")));
    }
    for (from, (key, counter)) in [(&mut one, keys[1]), (&mut other, keys[0])] {
        // SAFETY: as above.
        let posted = unsafe { from.write(&[Extent::host(bytes.as_ptr(), LEN)], &key, 0, Imm { counter, piece: 0 }, 0) };
        assert_eq!(posted, Ok(Post::Held));
    }
    let (mut left, start) = (4, Instant::now());
    // Some end with writes in flight.
    while left > number % 4 {
        for object in [&mut one, &mut other] {
            object
                .poll(&mut |event| left -= usize::from(!matches!(event, Event::Ended { result: Err(_), .. })))
                .expect("up");
        }
        assert!(start.elapsed() < LIMIT, "{left} of 4");
    }
    match number % 3 {
        0 => {
            let _ = beside.shutdown(Shutdown::Both);
        }
        1 => drop(one.revoke(&keys[0].0)),
        _ => drop(loans[1].recall()),
    }
    let _ = one.poll(&mut |_| {});
    let _ = other.poll(&mut |_| {});
}

/// Descriptors, mappings, threads and memory after a thousand objects are those after the first ones.
#[test]
fn nothing_is_left_of_a_thousand_objects() {
    let _turn = turn();
    for provider in ["tcp", "net"] {
        let Some(offer) = offer(provider) else { continue };
        // What the library allocates once stays.
        (0..30).for_each(|number| life(&offer, number));
        let (before, memory) = (held(), resident());
        (0..500).for_each(|number| life(&offer, number));
        let (after, now) = (held(), resident());
        eprintln!("{offer}: {before:?} -> {after:?}, {memory} -> {now} MiB");
        assert_eq!((after.0, after.2), (before.0, before.2), "{offer}: descriptors and threads");
        assert!(after.1 <= before.1 + 8, "{offer}: mappings: {before:?} -> {after:?}");
        assert!(now <= memory + 16, "{offer}: {memory} -> {now} MiB");
    }
}
