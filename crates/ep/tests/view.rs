//! All ranks of a group in one simulation, with time as an input: they exchange in rounds while ranks stop and die,
//! connections break, and the control plane does whatever it likes, which nobody asks.
//!
//! A failing seed is printed; `SIM_SEED=<n>` runs it alone, `SIM_RUNS=<n>` sets how many are run.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crossrail_ep::view::{Notice, View};

/// Milliseconds.
const LIMIT: u64 = 10_000;
const STEP: u64 = 50;
/// A rank that finds itself paused for longer does not count that time against others.
const STALL: u64 = 500;
/// A connection that breaks is noticed at both ends within this time.
const NOTICED: u64 = 300;
const FAULTS_UNTIL: u64 = 60_000;
const END: u64 = FAULTS_UNTIL + 40_000 + 6 * LIMIT;

/// One message names all ranks of the largest buffer but its sender.
#[test]
fn a_notice_names_as_many_ranks_as_a_buffer_has() {
    let mut view = View::new(0);
    view.restart(0..1024, 0, 0);
    let why = "nothing arrived ".repeat(20);
    (1..1024).for_each(|rank| drop(view.lose(rank, &why)));
    let notice = view.notice(1);
    let bytes = notice.encode().unwrap();
    assert!(bytes.len() <= Notice::MAX, "{} bytes", bytes.len());
    assert_eq!(Notice::decode(&bytes).unwrap(), notice);
}

struct Random(u64);

impl Random {
    fn next(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }
}

#[derive(Clone)]
enum Message {
    Part(u64),
    Notice(Notice),
}

struct Rank {
    view: View,
    dead: bool,
    stopped_until: u64,
    /// The round that it is in, when that may wait no longer, and when it last ran.
    round: u64,
    deadline: u64,
    ran: u64,
    /// The last round of which each rank's part has arrived.
    parts: BTreeMap<u32, u64>,
    /// Ranks whose connection has ended.
    broken: BTreeSet<u32>,
    finished: u64,
}

struct World {
    seed: u64,
    random: Random,
    now: u64,
    ranks: Vec<Rank>,
    /// What is on its way between two ranks, with the time of its arrival.
    wires: BTreeMap<(u32, u32), VecDeque<(u64, Message)>>,
    /// Broken connections, and when each end notices.
    cuts: BTreeMap<(u32, u32), u64>,
    stops_beyond_limit: bool,
}

impl World {
    fn new(seed: u64) -> World {
        let mut random = Random(seed * 7919 + 1);
        let count = 2 + random.next(7) as u32;
        let ranks = (0..count).map(|me| {
            let mut view = View::new(me);
            view.restart(0..count, 0, 1);
            Rank {
                view,
                dead: false,
                stopped_until: 0,
                round: 0,
                deadline: 0,
                ran: 0,
                parts: BTreeMap::new(),
                broken: BTreeSet::new(),
                finished: 0,
            }
        });
        World {
            seed,
            random,
            now: 0,
            ranks: ranks.collect(),
            wires: BTreeMap::new(),
            cuts: BTreeMap::new(),
            stops_beyond_limit: seed % 2 == 1,
        }
    }

    fn count(&self) -> u32 {
        self.ranks.len() as u32
    }

    fn is_cut(&self, a: u32, b: u32) -> bool {
        self.cuts.contains_key(&(a, b))
    }

    fn send(&mut self, from: u32, to: u32, message: Message) {
        if self.ranks[to as usize].dead || self.is_cut(from, to) {
            return;
        }
        let wire = self.wires.entry((from, to)).or_default();
        let arrives = wire.back().map_or(0, |(at, _)| *at).max(self.now + self.random.next(3 * STEP));
        wire.push_back((arrives, message));
    }

    fn cut(&mut self, a: u32, b: u32) {
        if a == b || self.is_cut(a, b) {
            return;
        }
        for pair in [(a, b), (b, a)] {
            let noticed = self.now + self.random.next(NOTICED);
            self.cuts.insert(pair, noticed);
            self.wires.remove(&pair);
        }
    }

    fn fault(&mut self) {
        let rank = self.random.next(self.ranks.len() as u64) as u32;
        match self.random.next(10) {
            0 => {
                self.ranks[rank as usize].dead = true;
                (0..self.count()).for_each(|other| self.cut(rank, other));
            }
            1..=2 => {
                let other = self.random.next(self.ranks.len() as u64) as u32;
                self.cut(rank, other);
            }
            _ => {
                let most = if self.stops_beyond_limit { 40_000 } else { LIMIT - 1000 };
                let length = 500 + self.random.next(most - 500);
                let until = self.now + length;
                if self.stops_beyond_limit || self.ranks.iter().all(|rank| rank.stopped_until < self.now) {
                    self.ranks[rank as usize].stopped_until = until;
                }
            }
        }
    }

    /// Begins the next round of a rank.
    fn begin(&mut self, me: u32) {
        let rank = &mut self.ranks[me as usize];
        rank.round += 1;
        rank.deadline = self.now + LIMIT;
        let round = rank.round;
        let others: Vec<u32> = (0..self.count()).filter(|other| *other != me).collect();
        for other in others {
            if !self.ranks[me as usize].view.out().contains(&other) {
                self.send(me, other, Message::Part(round));
            }
        }
    }

    fn publish(&mut self, me: u32) {
        let rank = &self.ranks[me as usize];
        let notice = rank.view.notice(rank.round);
        (0..self.count()).filter(|other| *other != me).for_each(|other| {
            self.send(me, other, Message::Notice(notice.clone()));
        });
    }

    /// One pass of a rank that runs: its inbox, then the ranks that it waits for.
    fn run(&mut self, me: u32) {
        let now = self.now;
        let paused = now - self.ranks[me as usize].ran;
        self.ranks[me as usize].ran = now;
        if paused > STALL {
            self.ranks[me as usize].deadline += paused;
        }
        let before = self.ranks[me as usize].view.number();
        for from in 0..self.count() {
            let arrived = self.wires.get_mut(&(from, me)).map(|wire| {
                let due = wire.iter().take_while(|(at, _)| *at <= now).count();
                wire.drain(..due).collect::<Vec<_>>()
            });
            for (_, message) in arrived.unwrap_or_default() {
                let rank = &mut self.ranks[me as usize];
                match message {
                    Message::Part(round) => drop(rank.parts.insert(from, round)),
                    Message::Notice(notice) => drop(rank.view.handle_notice(from, notice)),
                }
            }
            if self.cuts.get(&(me, from)).is_some_and(|noticed| *noticed <= now) {
                self.ranks[me as usize].broken.insert(from);
            }
        }
        if self.ranks[me as usize].view.evicted().is_some() {
            return;
        }
        let count = self.count();
        let rank = &mut self.ranks[me as usize];
        let open = (0..count).filter(|other| *other != me && !rank.view.out().contains(other)).collect::<Vec<_>>();
        let mut waits = false;
        for other in open {
            let arrived = rank.parts.get(&other).is_some_and(|round| *round >= rank.round);
            if !arrived && (rank.broken.contains(&other) || now >= rank.deadline) {
                rank.view.lose(other, "lost");
            } else if !arrived {
                waits = true;
            }
        }
        let changed = rank.view.number() != before;
        if changed {
            rank.deadline = now + LIMIT;
            self.publish(me);
        }
        if !waits && !changed {
            self.ranks[me as usize].finished = now;
            self.begin(me);
        }
    }

    fn survivors(&self) -> Vec<u32> {
        let lives = |rank: &u32| {
            let rank = &self.ranks[*rank as usize];
            !rank.dead && rank.view.evicted().is_none()
        };
        (0..self.count()).filter(lives).collect()
    }

    fn simulate(mut self) {
        (0..self.count()).for_each(|rank| self.begin(rank));
        let faults = self.random.next(8);
        let mut due: Vec<u64> = (0..faults).map(|_| self.random.next(FAULTS_UNTIL)).collect();
        due.sort_unstable();
        let mut due: VecDeque<u64> = due.into();
        while self.now < END {
            self.now += STEP;
            while due.front().is_some_and(|at| *at <= self.now) {
                due.pop_front();
                self.fault();
            }
            for rank in 0..self.count() {
                let one = &self.ranks[rank as usize];
                if !one.dead && one.view.evicted().is_none() && one.stopped_until <= self.now {
                    self.run(rank);
                }
            }
        }
        self.judge();
    }

    fn judge(&self) {
        let seed = self.seed;
        let survivors = self.survivors();
        let dead: Vec<u32> = (0..self.count()).filter(|rank| self.ranks[*rank as usize].dead).collect();
        assert!(!survivors.is_empty() || !dead.is_empty(), "seed {seed}: everybody was evicted");
        for a in &survivors {
            let rank = &self.ranks[*a as usize];
            assert!(rank.finished + 3 * LIMIT > END, "seed {seed}: rank {a} waits since {} ms", rank.finished);
            for b in survivors.iter().filter(|b| *b != a) {
                let other = &self.ranks[*b as usize];
                let apart = rank.view.out().contains(b);
                assert_eq!(apart, other.view.out().contains(a), "seed {seed}: {a} and {b} differ about each other");
                assert!(!apart || self.is_cut(*a, *b), "seed {seed}: {a} and {b} reach each other, and go on apart");
                if !apart {
                    assert_eq!(rank.view.out(), other.view.out(), "seed {seed}: the views of {a} and {b} differ");
                    assert_eq!(rank.view.number(), other.view.number(), "seed {seed}: numbers of {a} and {b}");
                }
            }
        }
        if self.cuts.is_empty() && !self.stops_beyond_limit {
            assert_eq!(survivors.len() as u32, self.count(), "seed {seed}: a rank was lost that was only stopped");
            assert!(self.ranks.iter().all(|rank| rank.view.out().is_empty()), "seed {seed}: somebody was masked");
        }
    }
}

#[test]
fn survivors_agree_and_the_others_are_told() {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let (first, runs) = number("SIM_SEED").map_or((0, number("SIM_RUNS").unwrap_or(40)), |seed| (seed, 1));
    (first..first + runs).for_each(|seed| World::new(seed).simulate());
}

/// The leader decides between two ranks that have lost each other, whatever it hears first.
#[test]
fn of_two_ranks_that_lose_each_other_one_stays() {
    let mut views: Vec<View> = (0..4).map(View::new).collect();
    views.iter_mut().for_each(|view| view.restart(0..4, 0, 1));
    views[2].lose(3, "a broken cable");
    views[3].lose(2, "a broken cable");
    let (two, three) = (views[2].notice(5), views[3].notice(5));
    assert_eq!(views[1].handle_notice(3, three.clone()), [0; 0], "rank 1 leads nobody");
    assert_eq!(views[0].handle_notice(3, three), [2]);
    assert_eq!(views[0].handle_notice(2, two.clone()), [0; 0], "it is out");
    assert_eq!(views[1].handle_notice(2, two), [0; 0]);
    let leader = views[0].notice(5);
    assert_eq!(views[1].handle_notice(0, leader.clone()), [2]);
    views[2].handle_notice(0, leader.clone());
    assert!(views[2].evicted().is_some_and(|why| why.contains("out of view 3") && why.contains("broken cable")));
    views[3].handle_notice(0, leader);
    assert_eq!(views[3].evicted(), None);
    let survivors = [0, 1, 3].map(|rank: usize| (views[rank].number(), views[rank].out().clone()));
    assert!(survivors.iter().all(|view| *view == survivors[0]), "{survivors:?}");
}

#[test]
fn notices_from_before_a_restart_do_not_count() {
    let mut view = View::new(0);
    view.restart([1, 2], 0, 1);
    let mut other = View::new(1);
    other.restart([0, 2], 0, 1);
    other.lose(2, "late");
    let (old, new) = (other.notice(7), other.notice(8));
    view.restart([1, 2], 7, 1);
    assert_eq!(view.handle_notice(1, old), [0; 0]);
    assert_eq!(view.handle_notice(1, new), [2]);
}

/// A reason that went through several ranks names the first, and ends with a whole word.
#[test]
fn a_reason_that_is_passed_on_is_not_nested() {
    let mut views: Vec<View> = (0..4).map(View::new).collect();
    views.iter_mut().for_each(|view| view.restart(0..4, 0, 1));
    let why = "its connection ended ".repeat(30);
    views[2].lose(3, &why);
    let first = views[2].notice(5);
    assert_eq!(views[0].handle_notice(2, first), [3]);
    let leader = views[0].notice(5);
    assert_eq!(views[1].handle_notice(0, leader), [3]);
    let told = views[1].why();
    assert!(told.starts_with("rank 2 has lost it: its connection ended its"), "{told}");
    assert_eq!(told.matches("has lost it").count(), 1, "{told}");
    let words = told.strip_suffix(" ...").expect("it was cut");
    assert!(["its", "connection", "ended"].contains(&words.rsplit(' ').next().unwrap_or_default()), "{told}");
}
