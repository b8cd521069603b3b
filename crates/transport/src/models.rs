//! Words that announce rows, and the doorbell of whoever waits for them, in every order that the memory model allows
//! (loom): `make models` runs them. Each model also runs with one thing weakened at a time, and must then fail: it
//! would otherwise show nothing.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::Mutex;
use loom::sync::atomic::AtomicU64;
use loom::thread;

use crate::doorbell::Doorbell;
use crate::word::Word;

/// What stands in a row once it is written.
const ROW: u64 = 7;

/// Rows in memory that is not atomic, as rows are. The model checker fails if one is read while it may be written.
struct Rows([UnsafeCell<u64>; 2]);

// SAFETY: the cells are what the models are about: the model checker fails on accesses that nothing orders.
unsafe impl Sync for Rows {}

impl Rows {
    fn new() -> Rows {
        Rows([UnsafeCell::new(0), UnsafeCell::new(0)])
    }

    fn write(&self, at: usize) {
        // SAFETY: nobody else accesses the row now: checked by the model checker.
        self.0[at].with_mut(|row| unsafe { *row = ROW });
    }

    fn assert_whole(&self) {
        for row in &self.0 {
            // SAFETY: as above.
            assert_eq!(row.with(|row| unsafe { *row }), ROW, "a row is missing");
        }
    }
}

/// A rank that maps the reader's heap: rows, then the word.
fn mapped(word_first: bool, announce: fn(&Word), observe: fn(&Word) -> u64) {
    loom::model(move || {
        let shared = Arc::new((Rows::new(), Word::new(0)));
        let writer = Arc::clone(&shared);
        let writer = thread::spawn(move || {
            let (rows, word) = &*writer;
            if word_first {
                announce(word);
            }
            rows.write(0);
            rows.write(1);
            announce(word);
        });
        let (rows, word) = &*shared;
        if observe(word) == 1 {
            rows.assert_whole();
        }
        writer.join().expect("the writer is fine");
    });
}

#[test]
fn whoever_observes_a_word_finds_its_rows() {
    mapped(false, |word| word.announce(1), Word::observe);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_word_stored_without_release_announces_nothing() {
    mapped(false, |word| word.atomic().store(1, Relaxed), Word::observe);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_word_loaded_without_acquire_announces_nothing() {
    mapped(false, |word| word.announce(1), |word| word.atomic().load(Relaxed));
}

#[test]
#[should_panic]
fn a_word_stored_before_its_rows_is_seen_without_them() {
    mapped(true, |word| word.announce(1), Word::observe);
}

/// How two lanes' threads agree that both have placed their rows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Counting {
    /// Under the worker's lock, as the engine does.
    Locked,
    /// By an atomic that orders nothing.
    Relaxed,
    /// Not at all: each lane announces when its own row is there.
    None,
}

/// A rank of another node: each lane's thread places a row; whoever counts the last one announces both. The reader
/// either polls the word, or asks for the count under the lock, as expert buffers do.
fn over_two_lanes(counting: Counting, polls: bool) {
    struct Shared {
        rows: Rows,
        counted: Mutex<u64>,
        loose: AtomicU64,
        word: Word,
    }
    loom::model(move || {
        let shared = Arc::new(Shared {
            rows: Rows::new(),
            counted: Mutex::new(0),
            loose: AtomicU64::new(0),
            word: Word::new(0),
        });
        let lane = |at: usize| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                shared.rows.write(at);
                let last = match counting {
                    Counting::Locked => {
                        let mut counted = shared.counted.lock().expect("no thread panics");
                        *counted += 1;
                        *counted == 2
                    }
                    Counting::Relaxed => shared.loose.fetch_add(1, Relaxed) == 1,
                    Counting::None => true,
                };
                if last {
                    shared.word.announce(1);
                }
            })
        };
        let lanes = [lane(0), lane(1)];
        let whole = match polls {
            true => shared.word.observe() == 1,
            false => *shared.counted.lock().expect("no thread panics") == 2,
        };
        if whole {
            shared.rows.assert_whole();
        }
        for lane in lanes {
            lane.join().expect("the lane is fine");
        }
    });
}

#[test]
fn rows_over_two_lanes_are_there_once_both_are_counted() {
    over_two_lanes(Counting::Locked, true);
    over_two_lanes(Counting::Locked, false);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn counting_lanes_without_order_announces_nothing() {
    over_two_lanes(Counting::Relaxed, true);
}

#[test]
#[should_panic]
fn a_word_on_one_lane_overtakes_the_row_on_the_other() {
    over_two_lanes(Counting::None, true);
}

/// A rank that sleeps until a word is announced to it. A wake-up that is lost leaves it asleep for ever.
fn asleep(ring: fn(&Doorbell), sleep: fn(&Doorbell, &dyn Fn() -> bool)) {
    loom::model(move || {
        let shared = Arc::new((Word::new(0), Doorbell::new()));
        let writer = Arc::clone(&shared);
        let writer = thread::spawn(move || {
            let (word, doorbell) = &*writer;
            word.announce(1);
            ring(doorbell);
        });
        let (word, doorbell) = &*shared;
        while word.observe() != 1 {
            sleep(doorbell, &|| word.observe() == 1);
        }
        writer.join().expect("the writer is fine");
    });
}

/// For the model, in which no time passes.
const LIMIT: Duration = Duration::ZERO;

#[test]
fn whoever_sleeps_is_woken_or_finds_the_word() {
    asleep(Doorbell::ring, |doorbell, ready| doorbell.sleep(LIMIT, ready));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_ring_that_releases_nothing_is_slept_through() {
    let ring = |doorbell: &Doorbell| {
        doorbell.rings.fetch_add(1, Relaxed);
        if doorbell.sleeping.load(SeqCst) != 0 {
            doorbell.wake();
        }
    };
    asleep(ring, |doorbell, ready| doorbell.sleep(LIMIT, ready));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_ring_that_looks_for_the_sleeper_before_it_counts_is_slept_through() {
    let ring = |doorbell: &Doorbell| {
        let sleeping = doorbell.sleeping.load(SeqCst) != 0;
        doorbell.rings.fetch_add(1, SeqCst);
        if sleeping {
            doorbell.wake();
        }
    };
    asleep(ring, |doorbell, ready| doorbell.sleep(LIMIT, ready));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_sleeper_that_counts_rings_without_acquiring_sleeps_through_one() {
    asleep(Doorbell::ring, |doorbell, ready| {
        doorbell.sleeping.store(1, SeqCst);
        let seen = doorbell.rings.load(Relaxed);
        if !ready() {
            doorbell.wait(seen, LIMIT);
        }
        doorbell.sleeping.store(0, SeqCst);
    });
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_sleeper_that_looks_before_it_counts_rings_sleeps_through_one() {
    asleep(Doorbell::ring, |doorbell, ready| {
        doorbell.sleeping.store(1, SeqCst);
        if !ready() {
            doorbell.wait(doorbell.rings.load(SeqCst), LIMIT);
        }
        doorbell.sleeping.store(0, SeqCst);
    });
}
