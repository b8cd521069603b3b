//! Frames through the rings: between threads, with sleeping ends, and when the ends disagree.

#![allow(unsafe_code)]

mod common;

use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use common::{Keeper, Random, pair, sleep};
use crossrail_shm::{Arena, Options, ShmLane, Side, attach};
use crossrail_transport::{Lane, LaneError, Payload, Post, Tx};
use crossrail_types::{ErrorKind, Head, LaneId};
use nix::poll::{PollFd, PollFlags, poll};

/// Length and first byte of frame `i`: mostly small, some as large as they come.
fn shape(random: &mut Random) -> usize {
    match random.below(8) {
        0 => random.below(65_537),
        1 => 65_536,
        2 => random.below(4_000),
        _ => random.below(33),
    }
}

/// Sends `count` frames and receives as many; sleeps whenever nothing moves, if `sleeps`.
fn stream(mut lane: ShmLane, count: usize, seed: u64, sleeps: bool) -> ShmLane {
    let (mut mine, mut theirs) = (Random(seed), Random(seed ^ 0xffff));
    let mut sink = Keeper::default();
    let (mut queued, mut heard) = (0, 0);
    while heard < count || queued < count || !sink.outbox.is_empty() {
        while queued < count && sink.outbox.len() < 40 {
            sink.outbox.push_back((9, vec![queued as u8; shape(&mut mine)]));
            queued += 1;
        }
        let moved = lane.poll(&mut sink, 200_000, true).expect("poll");
        for (kind, payload) in sink.arrived.drain(..) {
            assert_eq!((kind, payload.len()), (9, shape(&mut theirs)), "frame {heard}");
            assert!(payload.iter().all(|byte| *byte == heard as u8), "frame {heard} of {} bytes", payload.len());
            heard += 1;
        }
        if !moved {
            if sleeps { sleep(&mut lane) } else { std::thread::yield_now() }
        }
    }
    lane
}

fn both_stream(options: &Options, count: usize, sleeps: [bool; 2]) {
    let (a, b) = pair(options);
    std::thread::scope(|scope| {
        let b = scope.spawn(move || stream(b, count, 0x1234 ^ 0xffff, sleeps[1]));
        let _a = stream(a, count, 0x1234, sleeps[0]);
        b.join().expect("the other end is fine")
    });
}

#[test]
fn a_lane_is_asleep_from_its_beginning() {
    for arms in [false, true] {
        let (mut a, mut b) = pair(&Options::default());
        assert!(!arms || b.arm());
        common::post(&mut a, &mut Keeper::default(), 9, &[1; 8]).expect("posted");
        assert!(is_woken(&b));
        assert!(!b.arm(), "there is a frame");
    }
    let (mut a, mut b) = pair(&Options::default());
    b.disarm();
    common::post(&mut a, &mut Keeper::default(), 9, &[1; 8]).expect("posted");
    assert!(!is_woken(&b), "it is polled");
}

#[test]
fn short_frames_are_offered_without_a_poll_and_longer_ones_are_not() {
    let (mut a, mut b) = pair(&Options::default());
    for len in [8_usize, 24, 25] {
        let bytes = vec![len as u8; len];
        let payload = Payload { ptr: bytes.as_ptr(), len, ..Payload::EMPTY };
        let taken = a.post(&Tx { head: Head::new(9, len as u32), payload, token: 0 });
        assert_eq!(taken, Ok(Post::Taken));
    }
    for len in [8_usize, 24] {
        let mut memory = [0_u8; 24];
        let mut head = Head::new(0, 0);
        assert!(b.peek(&mut head));
        assert_eq!(head, Head::new(9, len as u32));
        // SAFETY: the memory has as many bytes as the longest frame that is offered.
        unsafe { b.take(memory.as_mut_ptr(), len, None) };
        assert!(memory.iter().take(len).all(|byte| *byte == len as u8), "{memory:?}");
        assert!(memory.iter().skip(len).all(|byte| *byte == 0), "{memory:?}");
    }
    assert!(!b.peek(&mut Head::new(0, 0)), "a payload of 25 bytes does not lie in the slot");
    let mut sink = Keeper::default();
    assert_eq!(b.poll(&mut sink, 1 << 20, true), Ok(true));
    assert_eq!(Vec::from(sink.arrived), [(9, vec![25; 25])]);
}

#[test]
fn short_frames_are_put_into_their_slots_until_the_ring_is_full() {
    let (mut a, mut b) = pair(&Options::default());
    let bytes: Vec<u8> = (1..=25).collect();
    let (mut put, mut count) = (Vec::new(), 0_u32);
    while put.len() < 1 << 16 {
        let len = [8, 0, 24, 8, 5, 13][put.len() % 6];
        // SAFETY: as many bytes are there.
        if !unsafe { a.put(&Head::new(9, len as u32), bytes.as_ptr(), len) } {
            break;
        }
        put.push(len);
    }
    assert!(put.len() < 1 << 16, "a ring that nobody reads takes no more");
    for len in &put {
        let (mut memory, mut head) = ([0_u8; 24], Head::new(0, 0));
        assert!(b.peek(&mut head));
        assert_eq!(head, Head::new(9, *len as u32));
        count += 1;
        // SAFETY: the memory has as many bytes as the longest frame that is offered.
        let told = unsafe { b.take(memory.as_mut_ptr(), *len, Some(count)) };
        assert!(told, "nothing that was accepted waits");
        assert_eq!((&memory[..*len], &memory[*len..]), (&bytes[..*len], &[0; 24][*len..]));
        assert_eq!(a.published(), Ok(Some(count)));
    }
    assert!(!b.peek(&mut Head::new(0, 0)));
    // SAFETY: as many bytes are there.
    assert!(!unsafe { a.put(&Head::new(9, 25), bytes.as_ptr(), 25) }, "25 bytes do not fit into a slot");
    // The ring has room again, which `post` finds out.
    let payload = Payload { ptr: bytes.as_ptr(), len: 25, ..Payload::EMPTY };
    assert_eq!(a.post(&Tx { head: Head::new(9, 25), payload, token: 0 }), Ok(Post::Taken));
    let mut sink = Keeper::default();
    assert_eq!(b.poll(&mut sink, 1 << 20, true), Ok(true));
    assert_eq!(Vec::from(sink.arrived), [(9, bytes)]);
}

#[test]
fn frames_of_any_size_arrive_in_order() {
    both_stream(&Options::default(), 20_000, [false; 2]);
    both_stream(&Options { ring_bytes: 1, cma: false }, 20_000, [false; 2]);
}

#[test]
fn nobody_sleeps_for_good() {
    both_stream(&Options::default(), 20_000, [true; 2]);
    both_stream(&Options { ring_bytes: 1, cma: false }, 20_000, [true, false]);
    both_stream(&Options { ring_bytes: 1, cma: false }, 20_000, [true; 2]);
}

#[test]
fn a_sleeper_is_woken_for_each_of_many_single_frames() {
    let (mut a, mut b) = pair(&Options::default());
    const ROUNDS: usize = 20_000;
    let echo = |lane: &mut ShmLane, opens: bool| {
        let mut sink = Keeper::default();
        let mut random = Random(7 + u64::from(opens));
        if opens {
            common::post(lane, &mut sink, 1, &[1]).expect("post");
        }
        for round in 0..ROUNDS {
            while sink.arrived.pop_front().is_none() {
                // Sometimes straight to sleep, sometimes only after looking a few times.
                let looks = random.below(3) * random.below(40);
                if !(0..=looks).any(|_| lane.poll(&mut sink, 1 << 20, true).expect("poll")) {
                    sleep(lane);
                }
            }
            if !opens || round + 1 < ROUNDS {
                common::post(lane, &mut sink, 1, &[1]).expect("post");
            }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| echo(&mut b, false));
        echo(&mut a, true);
    });
}

/// Whether somebody woke this lane.
fn is_woken(lane: &ShmLane) -> bool {
    let fd = lane.fd().expect("shm lanes have a descriptor");
    // SAFETY: the lane keeps it open past this call.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], 0u16).expect("poll") == 1
}

#[test]
fn arming_sees_what_came_before_and_a_bell_tells_what_comes_after() {
    let (mut a, mut b) = pair(&Options { ring_bytes: 1, cma: false });
    b.disarm();
    let mut sink = Keeper::default();
    common::post(&mut a, &mut sink, 1, &[1]).expect("post");
    assert!(!b.arm(), "there is a frame");
    assert!(!is_woken(&b), "it was awake");
    assert_eq!(b.poll(&mut sink, 1 << 20, true), Ok(true));

    assert!(b.arm());
    assert!(!is_woken(&b));
    common::post(&mut a, &mut sink, 1, &[1]).expect("post");
    assert!(is_woken(&b));
    b.ready(true, false);
    b.disarm();
    assert_eq!(b.poll(&mut sink, 1 << 20, true), Ok(true));
    assert!(!is_woken(&b), "the bell was heard");
    common::post(&mut a, &mut sink, 1, &[1]).expect("post");
    assert!(!is_woken(&b), "awake again");
}

#[test]
fn a_sender_without_room_is_told_when_there_is_some() {
    let (mut a, mut b) = pair(&Options { ring_bytes: 1, cma: false });
    a.disarm();
    let (mut from, mut to) = (Keeper::default(), Keeper::default());
    from.outbox.extend((0..40).map(|i| (1, vec![i; 60_000])));
    while a.poll(&mut from, 1 << 20, true).expect("poll") {}
    assert!(!from.outbox.is_empty(), "it never was full");
    assert!(a.arm(), "no room yet");
    assert!(!is_woken(&a));
    assert_eq!(b.poll(&mut to, 1 << 20, true), Ok(true));
    assert!(is_woken(&a));
    a.ready(true, false);
    a.disarm();
    while a.poll(&mut from, 1 << 20, true).expect("poll") {}
    assert_eq!(b.poll(&mut to, 1 << 20, true), Ok(true));
    assert!(!a.arm(), "there is room");
    assert!(!is_woken(&a), "it was awake");
    while a.poll(&mut from, 1 << 20, true).expect("poll") | b.poll(&mut to, 1 << 20, true).expect("poll") {}
    assert!(from.outbox.is_empty() && to.arrived.len() == 40);
    // With nothing left to send, room is no reason to be woken.
    assert!(a.arm());
    assert!(!is_woken(&a));
}

#[test]
fn a_death_is_noticed_while_spinning_and_while_sleeping() {
    let (a, mut b) = pair(&Options::default());
    drop(a);
    let mut sink = Keeper::default();
    let limit = common::soon();
    let error = loop {
        match b.poll(&mut sink, 1 << 20, true) {
            Ok(_) => assert!(Instant::now() < limit, "not noticed"),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, LaneError::Closed(_)), "{error}");

    let (a, mut b) = pair(&Options::default());
    let killer = std::thread::spawn(move || drop(a));
    sleep(&mut b);
    killer.join().expect("drop does not panic");
    assert!(matches!(b.poll(&mut sink, 1 << 20, false), Err(LaneError::Closed(_))));
}

#[test]
fn a_peer_that_says_nothing_meets_the_deadline() {
    let (mine, _theirs) = UnixStream::pair().expect("socketpair");
    let deadline = Instant::now() + Duration::from_millis(50);
    let error = attach(mine, Side::Connector, LaneId(0), Arena::new(), Options::default(), deadline).err();
    assert_eq!(error.map(|e| e.kind), Some(ErrorKind::Timeout));
    assert!(deadline.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_peer_that_hangs_up_or_babbles_is_an_error() {
    let (mine, theirs) = UnixStream::pair().expect("socketpair");
    drop(theirs);
    let error = attach(mine, Side::Acceptor, LaneId(0), Arena::new(), Options::default(), common::soon()).err();
    assert_eq!(error.map(|e| e.kind), Some(ErrorKind::PeerDead));

    let (mine, mut theirs) = UnixStream::pair().expect("socketpair");
    std::io::Write::write_all(&mut theirs, &[0x55; 4096]).expect("write");
    let error = attach(mine, Side::Acceptor, LaneId(0), Arena::new(), Options::default(), common::soon()).err();
    assert_eq!(error.map(|e| e.kind), Some(ErrorKind::Protocol));
}
