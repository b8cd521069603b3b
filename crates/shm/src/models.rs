//! What goes through shared memory, in every order that the memory model allows (loom): `make models` runs them.
//!
//! The code is the lane's own; only its atomics are the model checker's, and the ring has two slots. Of the two
//! barriers of wake-ups the plain fences are modelled; membarrier is a system call, and `wake.rs` tests it by running.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crossrail_transport::Payload;
use crossrail_types::Head;
use loom::thread;

use crate::control::{Control, SLOTS};
use crate::count::Count;
use crate::cursor::{Claim, Cursors, Start};
use crate::ring::{Consumer, Producer, RING_RANGE};
use crate::wake::{DATA, Flags};

fn control() -> Arc<Control> {
    Arc::new(Control::create(*RING_RANGE.start()).expect("a control segment").0)
}

/// Puts the frame of that number into the ring, with its number as payload. False: no room.
fn push(producer: &mut Producer, number: u64) -> bool {
    let bytes = number.to_ne_bytes();
    let payload = Payload { ptr: bytes.as_ptr(), len: bytes.len(), ..Payload::EMPTY };
    producer.push(&Head::new(number as u8, bytes.len() as u32), &payload).expect("the consumer is honest")
}

/// Takes the next frame, which must be that of `number`, whole. False: it is not there.
fn take(consumer: &mut Consumer, number: u64) -> bool {
    if !consumer.is_ready().expect("the producer is honest") {
        return false;
    }
    let frame = consumer.frame().expect("the producer is honest");
    let mut bytes = [0; 8];
    // SAFETY: 8 bytes of the payload of a frame that is not released yet.
    unsafe { frame.copy_to(bytes.as_mut_ptr(), 0, frame.len) };
    assert_eq!((frame.head.kind(), u64::from_ne_bytes(bytes)), (number as u8, number));
    consumer.release(&frame);
    consumer.publish();
    true
}

#[test]
fn frames_arrive_whole_and_in_order_when_slots_are_used_again() {
    const FRAMES: u64 = SLOTS as u64 + 1;
    loom::model(|| {
        let control = control();
        let mut producer = Producer::new(&control, 0).expect("mapped");
        let mut consumer = Consumer::new(&control, 0).expect("mapped");
        let sender = thread::spawn(move || {
            for number in 1..=FRAMES {
                while !push(&mut producer, number) {
                    thread::yield_now();
                }
            }
        });
        for number in 1..=FRAMES {
            while !take(&mut consumer, number) {
                thread::yield_now();
            }
        }
        sender.join().expect("the sender is fine");
    });
}

#[test]
fn whoever_reads_a_count_finds_the_frames_before_it() {
    loom::model(|| {
        let control = control();
        let mut producer = Producer::new(&control, 0).expect("mapped");
        let mut consumer = Consumer::new(&control, 0).expect("mapped");
        let (shown, mut seen) = (Count::new(&control, 0), Count::new(&control, 1));
        let sender = thread::spawn(move || {
            for number in 1..=2 {
                assert!(push(&mut producer, number), "there is room for both");
                shown.publish(number as u32);
            }
        });
        let count = seen.read();
        for number in 1..=u64::from(count) {
            assert!(take(&mut consumer, number), "frame {number} of {count}");
        }
        sender.join().expect("the sender is fine");
    });
}

#[test]
fn a_sleeper_is_woken_or_sees_the_frame() {
    loom::model(|| {
        let control = control();
        let mut producer = Producer::new(&control, 0).expect("mapped");
        let consumer = Consumer::new(&control, 0).expect("mapped");
        let (writer, sleeper) = (Flags::new(&control, 0, false), Flags::new(&control, 1, false));
        let sender = thread::spawn(move || {
            assert!(push(&mut producer, 1));
            writer.rings(DATA)
        });
        assert!(sleeper.announce(DATA).is_none(), "plain fences need no barrier");
        let sees = consumer.is_ready().expect("the producer is honest");
        let rung = sender.join().expect("the sender is fine");
        assert!(sees || rung, "asleep beside a frame");
    });
}

#[test]
fn each_piece_of_a_copy_is_claimed_once_and_all_are_settled_when_it_is_done() {
    const PIECES: usize = 3;
    loom::model(|| {
        let control = control();
        let mut own = Cursors::new(&control, 0);
        let handle = own.open().expect("a free cursor");
        let other = Cursors::new(&control, 1);
        let copied: Arc<[loom::sync::atomic::AtomicU64; PIECES]> =
            Arc::new(std::array::from_fn(|_| loom::sync::atomic::AtomicU64::new(0)));
        let ends = move |cursors: &Cursors, from, copied: &[loom::sync::atomic::AtomicU64; PIECES]| loop {
            match cursors.claim(handle, PIECES, from, true) {
                Claim::Piece(at) => {
                    copied[at].fetch_add(1, Ordering::Relaxed);
                    cursors.settle(handle, true);
                }
                Claim::Waiting => thread::yield_now(),
                Claim::Done => {
                    // Settling releases, and finding it settled acquires: the bytes of the other end are here.
                    assert!(copied.iter().all(|times| times.load(Ordering::Relaxed) == 1));
                    return;
                }
                Claim::Over(why) => panic!("{why}"),
            }
        };
        let theirs = Arc::clone(&copied);
        let peer = thread::spawn(move || ends(&other, Start::Front, &theirs));
        ends(&own, Start::Back, &copied);
        peer.join().expect("the peer is fine");
    });
}

#[test]
fn once_a_copy_is_stopped_and_settled_no_piece_of_it_is_copied() {
    loom::model(|| {
        let control = control();
        let mut own = Cursors::new(&control, 0);
        let handle = own.open().expect("a free cursor");
        let other = Cursors::new(&control, 1);
        let touched = Arc::new(loom::cell::UnsafeCell::new(0));
        let theirs = Arc::clone(&touched);
        let peer = thread::spawn(move || {
            while let Claim::Piece(_) = other.claim(handle, 2, Start::Front, true) {
                // SAFETY: the claimed piece keeps the owner from touching it: what is checked here.
                theirs.with_mut(|bytes| unsafe { *bytes += 1 });
                other.settle(handle, true);
            }
        });
        while !own.stop(handle) {
            thread::yield_now();
        }
        // SAFETY: as above; the model checker fails on an access of both at once.
        touched.with_mut(|bytes| unsafe { *bytes = 0 });
        own.close(handle);
        peer.join().expect("the peer is fine");
    });
}
