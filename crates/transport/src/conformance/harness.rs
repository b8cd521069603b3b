//! One end of a pair under test, with a sink that records everything and memory with guards around it.

use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_types::{Head, LaneId};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use crate::{Lane, LaneError, Loan, Payload, Place, Sink, Tx};

/// Kinds of test frames: what the receiving sink does with them.
pub(super) const PLAIN: u8 = 1;
pub(super) const SHORT: u8 = 2;
pub(super) const DISCARD: u8 = 3;
pub(super) const REFUSE: u8 = 4;
pub(super) const LENT: u8 = 5;
pub(super) const HELD: u8 = 6;

pub(super) const REFUSAL: &str = "not on a day like this";

const GUARD: usize = 64;
const GUARD_BYTE: u8 = 0xA5;
const FRESH_BYTE: u8 = 0x11;
const POISON_BYTE: u8 = 0xEE;
/// Longest time without any progress before a check fails.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// The bytes of frame `seq`.
pub(super) fn pattern(seq: u32, len: usize) -> Vec<u8> {
    let start = seq.wrapping_mul(0x9E37_79B9);
    (0..len).map(|i| (start.wrapping_add(i as u32).wrapping_mul(0x85EB_CA6B) >> 24) as u8).collect()
}

/// A frame of `kind` and number `seq` that sends `payload`.
pub(super) fn frame(kind: u8, seq: u32, payload: &[u8]) -> Tx {
    let mut head = Head::new(kind, payload.len() as u32);
    head.0[8..12].copy_from_slice(&seq.to_le_bytes());
    let payload = Payload { ptr: payload.as_ptr(), len: payload.len(), ..Payload::EMPTY };
    Tx { head, payload, token: u64::from(seq) }
}

fn seq_of(head: &Head) -> u32 {
    u32::from_le_bytes([head.0[8], head.0[9], head.0[10], head.0[11]])
}

struct Arrival {
    kind: u8,
    seq: u32,
    payload_len: usize,
    /// Guard, the destination, guard.
    memory: Vec<u8>,
    placed: u32,
}

impl Arrival {
    fn dst(&self) -> &[u8] {
        &self.memory[GUARD..self.memory.len() - GUARD]
    }

    fn expects_placed(&self) -> bool {
        matches!(self.kind, PLAIN | SHORT | HELD)
    }
}

/// Records what a lane does with its frames.
#[derive(Default)]
pub(super) struct Recorder {
    label: String,
    pub(super) loan: Option<Arc<Loan>>,
    /// How often a loan was reported as returned.
    pub(super) returned: usize,
    /// There is no place for frames of kind HELD.
    pub(super) hold: bool,
    /// How often that was said.
    pub(super) asked: usize,
    /// Of which frame last, until it was taken.
    held: Option<Head>,
    queue: VecDeque<Tx>,
    queued: usize,
    payloads: Vec<Vec<u8>>,
    sent: HashMap<u64, u32>,
    arrivals: Vec<Arrival>,
    bytes: usize,
}

impl Sink for Recorder {
    fn next(&mut self, _lane: LaneId) -> Option<Tx> {
        let tx = self.queue.pop_front()?;
        self.bytes += tx.payload.len;
        Some(tx)
    }

    fn sent(&mut self, _lane: LaneId, token: u64) {
        let times = self.sent.entry(token).or_default();
        *times += 1;
        assert_eq!(*times, 1, "{}: token {token} sent {times} times", self.label);
    }

    fn place(&mut self, _lane: LaneId, head: &Head) -> Place {
        let payload_len = head.payload_len() as usize;
        if let Some(last) = self.arrivals.last() {
            let complete = !last.expects_placed() || last.placed == 1;
            assert!(complete, "{}: a head came before the payload of frame {} was placed", self.label, last.seq);
        }
        let kind = head.kind();
        if let Some(held) = self.held.take() {
            assert_eq!(held, *head, "{}: another head came while one waits", self.label);
        }
        if self.hold && kind == HELD {
            self.held = Some(*head);
            self.asked += 1;
            return Place::Wait;
        }
        self.bytes += payload_len;
        let len = match kind {
            SHORT => payload_len / 2,
            DISCARD | REFUSE => 0,
            _ => payload_len,
        };
        let mut memory = vec![FRESH_BYTE; len + 2 * GUARD];
        memory[..GUARD].fill(GUARD_BYTE);
        memory[GUARD + len..].fill(GUARD_BYTE);
        let dst = memory[GUARD..].as_mut_ptr();
        let token = self.arrivals.len() as u64;
        self.arrivals.push(Arrival { kind, seq: seq_of(head), payload_len, memory, placed: 0 });
        match kind {
            DISCARD => Place::Discard,
            REFUSE => Place::Refuse(REFUSAL.into()),
            LENT => Place::Into { dst, len, grant: self.loan.clone(), token },
            PLAIN | SHORT | HELD => Place::Into { dst, len, grant: None, token },
            other => panic!("{}: a head of kind {other} that nobody sent", self.label),
        }
    }

    fn placed(&mut self, _lane: LaneId, token: u64) {
        let last = self.arrivals.len().checked_sub(1);
        assert_eq!(last, Some(token as usize), "{}: placed({token}) is not the frame that came last", self.label);
        let arrival = &mut self.arrivals[token as usize];
        arrival.placed += 1;
        assert_eq!(arrival.placed, 1, "{}: frame {} placed twice", self.label, arrival.seq);
    }

    fn returned(&mut self) {
        self.returned += 1;
    }
}

impl Recorder {
    /// Takes all memory back, and fills it.
    pub(super) fn poison_all(&mut self) {
        self.payloads.iter_mut().for_each(|memory| memory.fill(POISON_BYTE));
        self.arrivals.iter_mut().for_each(|arrival| arrival.memory.fill(POISON_BYTE));
    }

    pub(super) fn expect_all_poisoned(&self) {
        let of_arrivals = self.arrivals.iter().map(|arrival| &arrival.memory);
        for memory in self.payloads.iter().chain(of_arrivals) {
            let touched = memory.iter().position(|byte| *byte != POISON_BYTE);
            assert_eq!(touched, None, "{}: written after it was returned", self.label);
        }
    }
}

/// One lane, its sink and, for the checks that sleep, its epoll set.
pub(super) struct End {
    // The lane goes first: nothing may point into the recorder's memory when that goes.
    pub(super) lane: Box<dyn Lane>,
    pub(super) sink: Recorder,
    pub(super) label: String,
    /// Most payload bytes that one poll took or delivered.
    pub(super) most_in_one_poll: usize,
    epoll: Option<Epoll>,
}

impl End {
    pub(super) fn new(lane: Box<dyn Lane>, label: String) -> End {
        let sink = Recorder { label: label.clone(), ..Recorder::default() };
        End { lane, sink, label, most_in_one_poll: 0, epoll: None }
    }

    /// Has `next` hand out a frame.
    pub(super) fn queue(&mut self, kind: u8, seq: u32, len: usize) {
        let payload = pattern(seq, len);
        let mut tx = frame(kind, seq, &payload);
        tx.token = self.sink.queued as u64;
        self.sink.queue.push_back(tx);
        self.sink.queued += 1;
        self.sink.payloads.push(payload);
    }

    pub(super) fn queue_lent(&mut self, seq: u32, len: usize, loan: &Arc<Loan>) {
        self.queue(PLAIN, seq, len);
        if let Some(tx) = self.sink.queue.back_mut() {
            tx.payload.grant = Some(Arc::clone(loan));
        }
    }

    /// Overwrites a queued payload, as the owner may once it is returned.
    pub(super) fn poison_queued(&mut self, index: usize) {
        self.sink.payloads[index].fill(POISON_BYTE);
    }

    pub(super) fn try_step(&mut self, budget: usize, probe: bool) -> Result<bool, LaneError> {
        let before = self.sink.bytes;
        let moved = self.lane.poll(&mut self.sink, budget, probe);
        self.most_in_one_poll = self.most_in_one_poll.max((self.sink.bytes - before) / 2);
        moved
    }

    pub(super) fn push(&mut self, budget: usize) -> bool {
        self.lane.push(&mut self.sink, budget)
    }

    pub(super) fn step(&mut self, budget: usize) -> bool {
        self.try_step(budget, true).unwrap_or_else(|error| panic!("{}: {error}", self.label))
    }

    /// Takes the next frame without a poll, if the lane offers that now.
    pub(super) fn take(&mut self) -> bool {
        let mut head = Head::new(0, 0);
        if !self.lane.peek(&mut head) {
            return false;
        }
        let id = self.lane.id();
        let Place::Into { dst, len, token, .. } = self.sink.place(id, &head) else {
            panic!("{}: a frame to be taken has no place", self.label)
        };
        #[allow(unsafe_code)]
        // SAFETY: the recorder's memory stays where it is, and has `len` bytes there.
        unsafe {
            self.lane.take(dst, len, None);
        }
        self.sink.placed(id, token);
        true
    }

    pub(super) fn all_sent(&self) -> bool {
        self.sink.sent.len() == self.sink.queued
    }

    pub(super) fn tokens_sent(&self) -> usize {
        self.sink.sent.len()
    }

    pub(super) fn heads(&self) -> usize {
        self.sink.arrivals.len()
    }

    pub(super) fn is_placed(&self, index: usize) -> bool {
        self.sink.arrivals[index].placed == 1
    }

    pub(super) fn all_placed(&self) -> bool {
        self.sink.arrivals.iter().all(|arrival| arrival.placed == u32::from(arrival.expects_placed()))
    }

    /// Whether `count` frames have arrived and been placed.
    pub(super) fn is_through(&self, count: usize) -> bool {
        self.heads() >= count && self.sink.arrivals.iter().all(|arrival| arrival.placed == 1)
    }

    /// Frames numbered from `first` arrived in order, whole, and nothing else.
    pub(super) fn expect_intact(&self, first: u32, sizes: &[usize]) {
        let placed = self.sink.arrivals.iter().filter(|arrival| arrival.placed == 1).count();
        assert_eq!(placed, sizes.len(), "{}: frames", self.label);
        for (index, len) in sizes.iter().enumerate() {
            self.expect_prefix(index, first + index as u32, *len);
        }
    }

    /// Arrival `index` is frame `seq` of `len` bytes, and its destination holds the first of them.
    pub(super) fn expect_prefix(&self, index: usize, seq: u32, len: usize) {
        let arrival = &self.sink.arrivals[index];
        assert_eq!((arrival.seq, arrival.payload_len), (seq, len), "{}: frame {index}", self.label);
        assert_eq!(arrival.placed, 1, "{}: frame {index} was not placed", self.label);
        let dst = arrival.dst();
        let wrong = dst.iter().zip(pattern(seq, len)).position(|(got, want)| *got != want);
        assert_eq!(wrong, None, "{}: frame {seq} of {len} bytes differs there", self.label);
        self.expect_guards(arrival);
    }

    pub(super) fn expect_untouched(&self, index: usize) {
        let arrival = &self.sink.arrivals[index];
        assert_eq!(arrival.placed, 0, "{}: a discarded frame was placed", self.label);
        self.expect_guards(arrival);
    }

    fn expect_guards(&self, arrival: &Arrival) {
        let (before, after) = (&arrival.memory[..GUARD], &arrival.memory[arrival.memory.len() - GUARD..]);
        let whole = before.iter().chain(after).all(|byte| *byte == GUARD_BYTE);
        assert!(whole, "{}: frame {} was written beyond its destination", self.label, arrival.seq);
    }

    /// Takes the destination of arrival `index` back and fills it.
    pub(super) fn poison(&mut self, index: usize) {
        let memory = &mut self.sink.arrivals[index].memory;
        memory.fill(POISON_BYTE);
    }

    pub(super) fn expect_poisoned(&self, index: usize) {
        let touched = self.sink.arrivals[index].memory.iter().position(|byte| *byte != POISON_BYTE);
        assert_eq!(touched, None, "{}: written after it was returned", self.label);
    }

    /// Polls both until this end fails; its error.
    pub(super) fn poll_against(&mut self, other: &mut End) -> LaneError {
        let start = Instant::now();
        loop {
            other.step(1 << 20);
            match self.try_step(1 << 20, true) {
                Ok(_) => assert!(start.elapsed() < PATIENCE, "{}: no error", self.label),
                Err(error) => return error,
            }
        }
    }

    /// Polls until the lane fails; its error.
    pub(super) fn poll_to_the_end(&mut self) -> LaneError {
        let start = Instant::now();
        loop {
            match self.try_step(1 << 20, true) {
                Ok(_) => assert!(start.elapsed() < PATIENCE, "{}: the peer is gone, yet no error", self.label),
                Err(error) => return error,
            }
        }
    }

    /// Registers the lane's descriptor with an epoll set of its own, edge-triggered.
    pub(super) fn watch(&mut self) {
        let Some(fd) = self.lane.fd() else { return };
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).expect("epoll_create1");
        let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT | EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLET;
        #[allow(unsafe_code)]
        // SAFETY: the lane keeps its descriptor open as long as it lives, which is past this call.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        epoll.add(fd, EpollEvent::new(flags, 0)).expect("epoll_ctl");
        self.epoll = Some(epoll);
    }

    /// A poll without probing, as before a sleep.
    pub(super) fn sleepy_step(&mut self) -> bool {
        self.try_step(1 << 20, false).unwrap_or_else(|error| panic!("{}: {error}", self.label))
    }

    /// Polls without probing and sleeps when nothing moves, until `done`.
    pub(super) fn sleep_until(&mut self, mut done: impl FnMut(&mut End) -> bool) {
        let start = Instant::now();
        let mut idle_since = start;
        loop {
            let moved = self.sleepy_step();
            let queued = self.sink.queued;
            // A lane may have something left to move that waits for the other end.
            if done(self) {
                return;
            }
            if moved {
                idle_since = Instant::now();
                assert!(start.elapsed() < 6 * PATIENCE, "{}: it moves without an end", self.label);
            } else if self.sink.queued == queued {
                self.sleep();
            }
            assert!(idle_since.elapsed() < PATIENCE, "{}: awake, but nothing moves", self.label);
        }
    }

    /// Polls until `done`, which the other end brings about: what that sends last may need this end.
    pub(super) fn poll_while_other(&mut self, done: impl Fn() -> bool) {
        let start = Instant::now();
        while !done() {
            self.step(1 << 20);
            assert!(start.elapsed() < 6 * PATIENCE, "{}: the other end does not finish", self.label);
            std::thread::yield_now();
        }
    }

    /// Sleeps and polls until the lane fails.
    pub(super) fn sleep_until_error(&mut self) -> LaneError {
        let start = Instant::now();
        loop {
            match self.try_step(1 << 20, false) {
                Ok(true) => {}
                Ok(false) => self.sleep(),
                Err(error) => return error,
            }
            assert!(start.elapsed() < PATIENCE, "{}: the peer is gone, yet no error", self.label);
        }
    }

    fn sleep(&mut self) {
        let Some(epoll) = &self.epoll else { return };
        if self.lane.arm() {
            let mut events = [EpollEvent::empty(); 4];
            let timeout = EpollTimeout::try_from(PATIENCE).expect("fits");
            let count = epoll.wait(&mut events, timeout).expect("epoll_wait");
            assert_ne!(count, 0, "{}: slept {PATIENCE:?} and was not woken", self.label);
            let over = EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR;
            for event in &events[..count] {
                let flags = event.events();
                let readable = flags.intersects(EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP | over);
                self.lane.ready(readable, flags.intersects(EpollFlags::EPOLLOUT | over));
            }
        }
        self.lane.disarm();
    }
}

/// Polls both ends in turn until `done`.
pub(super) fn drive(a: &mut End, b: &mut End, budget: usize, mut done: impl FnMut(&mut End, &mut End) -> bool) {
    let mut idle_since = Instant::now();
    loop {
        let moved = a.step(budget) | b.step(budget);
        if done(a, b) {
            return;
        }
        if moved {
            idle_since = Instant::now();
        } else {
            std::thread::yield_now();
            let state = |end: &End| (end.tokens_sent(), end.sink.queued, end.heads());
            let (of_a, of_b) = (state(a), state(b));
            let stuck = idle_since.elapsed() > PATIENCE;
            assert!(!stuck, "{}: stuck; (sent, queued, heads) a {of_a:?} b {of_b:?}", a.label);
        }
    }
}
