//! All-to-all exchanges in a model of copy engines and links, with the real schedule. Its results for earlier schedules
//! match measurements on four H200s: 230 of 395 GB/s without turns, 260 to 270 with turns that started with the peer
//! that answered first, and 310 to 340 (327 measured) with turns that kept to the order for 0.2 ms only.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::schedule::{ActiveCopy, CopySchedule, QueuedCopy};

/// The bandwidth of a GPU in each direction, in bytes per microsecond.
const LINK: u64 = 395_000;
/// The time step in microseconds, the unit of all times here.
const STEP: u64 = 5;
/// The time from the end of a copy until the host has noticed.
const NOTICED: u64 = 10;
const LEN: u64 = 64 << 20;

/// Deterministic pseudo-random numbers.
struct Rng(u64);

impl Rng {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit.max(1)
    }
}

/// One GPU: when each peer answers, the copies that wait for their turn, and those submitted to the engine, in order.
struct Sender {
    schedule: Arc<CopySchedule>,
    answers: VecDeque<(u64, u8)>,
    waiting: Vec<(u8, QueuedCopy)>,
    engine: VecDeque<(u8, u64, ActiveCopy)>,
    completed: VecDeque<(u64, ActiveCopy)>,
    took: u64,
}

impl Sender {
    fn is_idle(&self) -> bool {
        self.answers.is_empty() && self.waiting.is_empty() && self.engine.is_empty() && self.completed.is_empty()
    }

    /// One pass of its host.
    fn pass(&mut self, now: u64, at: Instant) {
        while self.completed.front().is_some_and(|(at, _)| at + NOTICED <= now) {
            self.completed.pop_front();
        }
        while let Some((_, peer)) = self.answers.front().copied().filter(|(answered, _)| *answered <= now) {
            self.answers.pop_front();
            let waiting = self.schedule.queue([peer; 16], at);
            self.waiting.push((peer, waiting));
            self.start_copy(self.waiting.len() - 1, at);
        }
        // If the first copy of a peer may not start, none of its copies may.
        let mut refused = 0_u64;
        let mut index = 0;
        while let Some((peer, _)) = self.waiting.get(index) {
            let bit = 1 << peer;
            if refused & bit != 0 || !self.start_copy(index, at) {
                (refused, index) = (refused | bit, index + 1);
            }
        }
    }

    /// Starts a copy if it may start.
    fn start_copy(&mut self, index: usize, at: Instant) -> bool {
        let may = self.waiting[index].1.may_start(at);
        if may {
            let (peer, _waiting) = self.waiting.remove(index);
            self.engine.push_back((peer, LEN, self.schedule.start([peer; 16], LEN)));
        }
        may
    }
}

struct Model {
    senders: Vec<Sender>,
    rng: Rng,
    now: u64,
    start: Instant,
}

impl Model {
    fn new(gpus: u8, seed: u64) -> Model {
        let sender = |gpu| Sender {
            schedule: Arc::new(CopySchedule::new([gpu; 16])),
            answers: VecDeque::new(),
            waiting: Vec::new(),
            engine: VecDeque::new(),
            completed: VecDeque::new(),
            took: 0,
        };
        Model { senders: (0..gpus).map(sender).collect(), rng: Rng(seed), now: 0, start: Instant::now() }
    }

    /// Every GPU sends `window` messages to every other. GPUs start up to `apart` after each other, and answers take up
    /// to `answers`, in two batches per peer.
    fn exchange(&mut self, window: u64, apart: u64, answers: u64) {
        let (began, gpus) = (self.now, self.senders.len() as u8);
        for own in 0..gpus {
            let begin = began + self.rng.below(apart);
            let mut all = Vec::new();
            for peer in (0..gpus).filter(|peer| *peer != own) {
                let first = begin + self.rng.below(answers / 4);
                let (second, bunch) = (first + self.rng.below(answers), self.rng.below(window));
                all.extend((0..window).map(|at| (if at <= bunch { first } else { second }, peer)));
            }
            all.sort_by_key(|(at, _)| *at);
            self.senders[usize::from(own)].answers = all.into();
        }
        let mut left: Vec<usize> = (0..self.senders.len()).collect();
        while !left.is_empty() {
            self.step();
            let took = self.now - began;
            left.retain(|at| {
                !self.senders[*at].is_idle() || {
                    self.senders[*at].took += took;
                    false
                }
            });
        }
    }

    fn step(&mut self) {
        self.now += STEP;
        let at = self.start + Duration::from_micros(self.now);
        let mut into = vec![0; self.senders.len()];
        for sender in &mut self.senders {
            sender.pass(self.now, at);
            if let Some((peer, ..)) = sender.engine.front() {
                into[usize::from(*peer)] += 1;
            }
        }
        for sender in &mut self.senders {
            let Some((peer, left, _)) = sender.engine.front_mut() else { continue };
            *left = left.saturating_sub(STEP * LINK / into[usize::from(*peer)]);
            if *left == 0 {
                let completed = sender.engine.pop_front().map(|(.., under_way)| (self.now, under_way));
                sender.completed.extend(completed);
            }
        }
    }
}

/// The rate of the slowest GPU relative to the bandwidth of a link, over several exchanges after a first one.
fn share(gpus: u8, window: u64, apart: u64, answers: u64, seed: u64) -> f64 {
    const EXCHANGES: u64 = 4;
    let mut model = Model::new(gpus, seed);
    (0..2).for_each(|_| model.exchange(window, apart, answers));
    model.senders.iter_mut().for_each(|sender| sender.took = 0);
    (0..EXCHANGES).for_each(|_| model.exchange(window, apart, answers));
    let took = model.senders.iter().map(|sender| sender.took).max().expect("there are some");
    (EXCHANGES * window * u64::from(gpus - 1) * LEN) as f64 / (took * LINK) as f64
}

#[test]
fn engines_stay_in_step_whichever_peer_answers_first() {
    for seed in 0..2 {
        // The skew of GPUs and the time of answers in microseconds; 160 and 500 were measured. 0.835 is 330 GB/s.
        for (window, apart, answers, least) in
            [(16, 50, 60, 0.97), (16, 100, 300, 0.95), (16, 300, 500, 0.91), (4, 100, 300, 0.87), (1, 50, 60, 0.82)]
        {
            let share = share(4, window, apart, answers, seed);
            assert!(share > least, "{window} messages each, {apart} us apart, {answers} us to answer: {share:.3}");
        }
        let share = share(8, 16, 50, 100, seed);
        assert!(share > 0.9, "8 GPUs: {share:.3}");
    }
}
