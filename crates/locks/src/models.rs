//! The mutex in every order that the memory model allows (loom): `make models` runs them. A lost wake-up is a deadlock
//! there.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Instant;

use loom::cell::UnsafeCell;
use loom::thread;

use crate::word::Word;

/// A counter protected by the lock: the model checker fails on unsynchronised accesses.
struct Counted {
    word: Word,
    count: UnsafeCell<u32>,
}

// SAFETY: the models check the synchronisation of its accesses.
unsafe impl Sync for Counted {}

impl Counted {
    fn add(&self) {
        // SAFETY: the caller has the lock: checked by the model checker.
        self.count.with_mut(|count| unsafe { *count += 1 });
    }
}

/// What a thread does, once with the lock.
type Turn = fn(&Counted) -> u32;

fn unlocks(counted: &Counted) -> u32 {
    counted.word.lock();
    counted.add();
    counted.word.unlock();
    1
}

fn hands_on(counted: &Counted) -> u32 {
    counted.word.lock();
    counted.add();
    counted.word.unlock_fair();
    1
}

fn bumps(counted: &Counted) -> u32 {
    counted.word.lock();
    counted.add();
    counted.word.bump();
    counted.add();
    counted.word.unlock();
    2
}

fn gives_up(counted: &Counted) -> u32 {
    // A deadline has always passed when a thread would sleep for the first time.
    if !counted.word.lock_until(Instant::now()) {
        return 0;
    }
    counted.add();
    counted.word.unlock();
    1
}

/// Runs the turns in a thread each.
fn model(turns: &'static [Turn]) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let counted = Arc::new(Counted { word: Word::new(), count: UnsafeCell::new(0) });
        let (first, others) = turns.split_first().expect("somebody runs");
        let run = |turn: &'static Turn| {
            let counted = Arc::clone(&counted);
            thread::spawn(move || turn(&counted))
        };
        let running: Vec<_> = others.iter().map(run).collect();
        let mut right = first(&counted);
        right += running.into_iter().map(|thread| thread.join().expect("it is fine")).sum::<u32>();
        counted.word.lock();
        // SAFETY: with the lock.
        counted.count.with(|count| assert_eq!(unsafe { *count }, right, "not one at a time"));
        counted.word.unlock();
    });
}

#[test]
fn three_threads_unlock() {
    model(&[unlocks, unlocks, unlocks]);
}

#[test]
fn one_hands_it_on_while_two_wait() {
    model(&[hands_on, unlocks, unlocks]);
}

#[test]
fn two_hand_it_on_to_each_other() {
    model(&[hands_on, hands_on]);
}

#[test]
fn one_bumps_while_two_wait() {
    model(&[bumps, unlocks, unlocks]);
}

#[test]
fn two_bump_each_other() {
    model(&[bumps, bumps]);
}

#[test]
fn one_bumps_and_one_hands_it_on() {
    model(&[bumps, hands_on]);
}

#[test]
fn one_gives_up() {
    model(&[unlocks, gives_up, unlocks]);
}
