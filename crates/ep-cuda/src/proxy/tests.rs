//! Lanes of two ranks, over rails that reorder, delay and are lost; kernels are played by the test.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crossrail::placing::{
    Counter, Event, Extent, Imm, Key, LaneError, Limits, Loan, Placing, Post, RailReport, Revoked,
};
use crossrail::{ConnectOptions, Context, Endpoint, Settings, Worker, WorkerOptions};

use crossrail_kernels::ep::{
    Command, EP_COMMAND_BACK, EP_COMMAND_ROWS_FP8, EP_COMMAND_TABLE, EP_COMMAND_TAKEN, EP_COMMAND_WEIGHTS,
    EP_COMMAND_WORD, EP_COMMANDS, EP_WORD_COMBINE_TAKEN, EP_WORD_DISPATCH_TAKEN, EP_WORD_TABLE, Inbox, Payload, Scale,
    Sequence, Shape, Tuning,
};
use crossrail_sight::{Kind, RowSnapshot, Value, parse, summary};
use crossrail_transport::placing::dry;

use super::area::Area;
use super::link::{Link, Offer};
use super::ring::Ring;
use super::shared::FarRank;
use super::turns::Turns;
use super::{Proxy, Window};

const SHAPE: Shape = Shape {
    hidden: 1152,
    topk: 4,
    experts: 12,
    ranks: 2,
    max_tokens: 9,
    payload: Payload::Fp8(Scale::F32),
    prereduce: true,
    expert_layout: true,
    rank_layout: false,
    regions: 0,
    tuning: Tuning::USUAL,
};

fn range_number(at: u64, len: u64) -> u64 {
    ((at / 8) << 19) | (len / 8)
}

/// A rank: its ring, as kernels write to it.
struct End {
    ring: Area,
    appended: u64,
    far: Arc<FarRank>,
}

impl End {
    fn append(&mut self, kind: u32, epoch: u64, number: u64) {
        let at = self.appended % u64::from(EP_COMMANDS) * 16;
        let lap = (self.appended / u64::from(EP_COMMANDS) % 0xffff + 1) << 48;
        let rank = u64::from(self.far.rank);
        self.ring.word(at + 8).store(lap | number, Ordering::Release);
        self.ring
            .word(at)
            .store(lap | (u64::from(kind) << 44) | (rank << 32) | (epoch & 0xffff_ffff), Ordering::Release);
        self.appended += 1;
    }

    fn range(&mut self, kind: u32, epoch: u64, at: u64, len: u64) {
        self.append(kind, epoch, range_number(at, len));
    }
}

struct Two {
    ends: [End; 2],
    turns: Turns,
    saw: dry::Saw,
}

impl Two {
    fn new(seed: u64) -> Two {
        let (a, b, saw) = dry::pair(3, seed);
        let inbox = Inbox::of(&SHAPE);
        let offer = |placing: Box<dyn Placing>, rank: u32| {
            let area = || Area::plain(inbox.area_bytes() as usize);
            let far = Arc::new(FarRank::new(1 - rank, area(), area(), inbox, 1));
            (Offer::new(placing, &far, 0).unwrap(), far)
        };
        let (first, second) = (offer(Box::new(a), 0), offer(Box::new(b), 1));
        let told = [first.0.targets(), second.0.targets()];
        let mut turns = Turns::new();
        let mut end = |lane: usize, (offer, far): (Offer, Arc<FarRank>)| {
            let ring = Area::plain(Ring::BYTES);
            turns.add(ring.clone(), 2);
            turns.connect(lane, offer.accept(&told[1 - lane]).unwrap());
            End { ring, appended: 0, far }
        };
        Two { ends: [end(0, first), end(1, second)], turns, saw }
    }

    fn step(&mut self) -> bool {
        self.turns.turn()
    }

    fn settle(&mut self) {
        let mut quiet = 0;
        while quiet < 200 {
            quiet = if self.step() { 0 } else { quiet + 1 };
        }
    }

    /// A word of the other rank's inbox, as this rank's kernels read it.
    fn sees(&self, rank: usize, at: u64) -> u64 {
        self.ends[rank].far.receive.word(at).load(Ordering::Acquire)
    }
}

fn fill(area: &Area, at: u64, len: u64, with: u64) {
    (0..len / 8).for_each(|word| area.word(at + 8 * word).store(with + word, Ordering::Relaxed));
}

/// Many operations, whose ranges are written in any order: a flag is never there before its row.
#[test]
fn rows_are_there_when_their_flags_are() {
    let heap = SHAPE.heap();
    for seed in 0..20 {
        let mut two = Two::new(seed);
        for epoch in 1..=6u64 {
            let slot = epoch % 2;
            let rows = heap.rows + slot * 9 * heap.row_stride;
            let flags = heap.row_flags + slot * 9 * 2 * 8;
            let order = (0..18u64).map(|piece| (piece * 7 + seed + epoch) % 18);
            for piece in order {
                let at = rows + piece / 2 * heap.row_stride + piece % 2 * heap.piece_stride;
                let len = if piece % 2 == 0 { heap.piece_stride } else { 144 };
                let send = two.ends[0].far.send.clone();
                fill(&send, at, len, epoch << 40 | piece << 20);
                two.ends[0].range(EP_COMMAND_ROWS_FP8, epoch, at, len);
                if piece % 5 == 0 {
                    two.step();
                }
            }
            if seed % 4 == 0 && epoch == 3 {
                two.saw.lose(seed as usize % 3);
            }
            let mut left: Vec<u64> = (0..18).collect();
            for _ in 0..200_000 {
                two.step();
                left.retain(|piece| {
                    let at = rows + piece / 2 * heap.row_stride + piece % 2 * heap.piece_stride;
                    let len = if piece % 2 == 0 { heap.piece_stride } else { 144 };
                    let seen = two.sees(1, flags + piece * 8);
                    assert!(seen == epoch || seen + 2 == epoch || seen == 0, "flag {seen} in {epoch}");
                    if seen != epoch {
                        return true;
                    }
                    for word in 0..len / 8 {
                        assert_eq!(two.sees(1, at + 8 * word), (epoch << 40 | piece << 20) + word, "piece {piece}");
                    }
                    false
                });
                if left.is_empty() {
                    break;
                }
            }
            assert_eq!(left, [0; 0], "seed {seed}, epoch {epoch}");
        }
        assert_eq!(two.ends[0].far.sent_bytes(), 6 * 9 * (heap.piece_stride + 144));
        assert!(two.turns.lost().is_empty());
    }
}

/// Words get their tags here, wherever they were sent; control words, too.
#[test]
fn words_get_their_tags_when_they_have_arrived() {
    let heap = SHAPE.heap();
    let mut two = Two::new(7);
    let table = heap.tables + heap.table_stride;
    let send = two.ends[0].far.send.clone();
    fill(&send, table, 4 * 8, 5);
    two.ends[0].range(EP_COMMAND_TABLE, (1 << 32) + 1, table, 32);
    two.ends[0].append(EP_COMMAND_WORD, (1 << 32) + 1, u64::from(EP_WORD_TABLE + 1) << 32 | 77);
    two.settle();
    // Epochs are told apart by their low halves.
    assert_eq!([0, 1, 2, 3].map(|word| two.sees(1, table + 8 * word)), [5, 6, 7, 8].map(|word| 1 << 32 | word));
    assert_eq!(two.sees(1, table + 32), 0);
    assert_eq!(two.sees(1, heap.words + 8 * u64::from(EP_WORD_TABLE + 1)), 1 << 32 | 77);
}

/// A slot is released only once no write to it is in flight, although its reader has released it earlier.
#[test]
fn slots_are_released_when_nothing_is_under_way() {
    let heap = SHAPE.heap();
    let word = |word: u32| heap.words + 8 * u64::from(word);
    let taken = word(EP_WORD_COMBINE_TAKEN);
    for seed in 0..10 {
        let mut two = Two::new(seed);
        // This rank's combine 1 sends words that no kernel waits for; the other has received all it needs.
        two.ends[0].range(EP_COMMAND_WEIGHTS, 1, heap.back_weights + heap.back_weights_stride, 16);
        two.ends[1].append(EP_COMMAND_TAKEN, 1, u64::from(EP_WORD_COMBINE_TAKEN));
        two.settle();
        // Not before this rank's kernels have ended.
        assert_eq!(two.sees(0, taken), 0);
        two.ends[0].append(EP_COMMAND_TAKEN, 1, u64::from(EP_WORD_COMBINE_TAKEN));
        // What comes after that is of the next operation.
        let send = two.ends[0].far.send.clone();
        fill(&send, heap.back, 2304, 9);
        two.ends[0].range(EP_COMMAND_BACK, 2, heap.back, 2304);
        two.settle();
        assert_eq!((two.sees(0, taken), two.sees(0, word(EP_WORD_DISPATCH_TAKEN))), (1, 0));
        assert_eq!([0, 1].map(|flag| two.sees(1, heap.back_flags + 8 * flag)), [2, 2]);
        // Nor while a write of it is in flight.
        two.ends[0].range(EP_COMMAND_WEIGHTS, 2, heap.back_weights, 16);
        [0, 1].iter().for_each(|end| two.ends[*end].append(EP_COMMAND_TAKEN, 2, u64::from(EP_WORD_COMBINE_TAKEN)));
        let mut early = false;
        let mut released = false;
        while !released {
            let there = two.sees(1, heap.back_weights) >> 32 == 2;
            released = two.sees(0, taken) == 2;
            early |= released && !there;
            two.step();
        }
        assert!(!early, "seed {seed}");
    }
}

/// Lanes other than the first send nothing when slots are released: the last of them publishes that they are free.
#[test]
fn the_last_lane_publishes_that_slots_are_free() {
    let (placing, _other, _) = dry::pair(3, 1);
    let inbox = Inbox::of(&SHAPE);
    let area = || Area::plain(inbox.area_bytes() as usize);
    let far = Arc::new(FarRank::new(1, area(), area(), inbox, 2));
    let offer = Offer::new(Box::new(placing), &far, 1).unwrap();
    let theirs = offer.targets();
    let mut link: Link = offer.accept(&theirs).unwrap();
    far.released(Sequence::Dispatch, 1);
    far.placed(0, Sequence::Dispatch, 1);
    let words =
        [1 << 48 | u64::from(EP_COMMAND_TAKEN) << 44 | 1 << 32 | 1, 1 << 48 | u64::from(EP_WORD_DISPATCH_TAKEN)];
    link.push(Command::of_entry(words, 0).expect("a whole entry").expect("of this lap"));
    let heap = SHAPE.heap();
    let at = heap.words + 8 * u64::from(EP_WORD_DISPATCH_TAKEN);
    assert_eq!(far.receive.word(at).load(Ordering::Acquire), 1);
}

/// A command that no kernel sends ends the link, with a reason that names it.
#[test]
fn a_rank_that_names_what_is_not_there_is_lost() {
    let heap = SHAPE.heap();
    let wrong: [(u32, u64); 6] = [
        // Rows among the flags.
        (EP_COMMAND_ROWS_FP8, range_number(heap.row_flags, 128)),
        // Rows of both slots.
        (EP_COMMAND_BACK, range_number(heap.back + heap.back_slot - 2304, 4608)),
        (EP_COMMAND_TABLE, range_number(heap.words, 128)),
        (EP_COMMAND_WORD, u64::from(EP_WORD_DISPATCH_TAKEN) << 32 | 7),
        (EP_COMMAND_TAKEN, 3),
        (15, 0),
    ];
    for (kind, number) in wrong {
        let mut two = Two::new(3);
        two.ends[0].append(kind, 1, number);
        two.settle();
        let lost = two.turns.lost();
        assert!(lost.iter().any(|(rank, why)| *rank == 0 && why.contains("does not fit this buffer")), "{lost:?}");
    }
}

/// Commands for a lost rank are read and dropped.
#[test]
fn a_lost_rank_holds_nobody_up() {
    let heap = SHAPE.heap();
    let mut two = Two::new(5);
    (0..3).for_each(|rail| two.saw.lose(rail));
    two.settle();
    assert_eq!(two.turns.lost().iter().map(|(rank, _)| *rank).collect::<Vec<_>>(), [1, 0]);
    for epoch in 1..=u64::from(EP_COMMANDS) * 3 {
        two.ends[0].range(EP_COMMAND_ROWS_FP8, epoch, heap.rows, 144);
        two.step();
    }
    // The ring was emptied each time.
    assert_eq!(two.ends[0].ring.word(16 * u64::from(EP_COMMANDS)).load(Ordering::Acquire), two.ends[0].appended);
}

/// A thread that did not read for a whole lap has lost commands, and ends its links.
#[test]
fn an_overrun_ends_the_links() {
    let heap = SHAPE.heap();
    let mut two = Two::new(6);
    for epoch in 1..=u64::from(EP_COMMANDS) + 1 {
        two.ends[0].range(EP_COMMAND_ROWS_FP8, epoch, heap.rows, 144);
    }
    two.settle();
    let lost = two.turns.lost();
    assert!(lost[0].0 == 1 && lost[0].1.contains("stopped for longer than the timeout"), "{lost:?}");
}

const LIMIT: Duration = Duration::from_secs(60);

/// A rank with threads of its own, over the engine's rails.
struct Threaded {
    rings: Vec<Area>,
    appended: Vec<u64>,
    far: Arc<FarRank>,
    proxy: Proxy,
    lost: Receiver<(u32, String)>,
    endpoint: Endpoint,
    _worker: Worker,
}

impl Threaded {
    fn append(&mut self, lane: usize, kind: u32, epoch: u64, number: u64) {
        let (rank, place) = (u64::from(self.far.rank), self.appended[lane]);
        let lap = (place / u64::from(EP_COMMANDS) + 1) << 48;
        let at = place % u64::from(EP_COMMANDS) * 16;
        self.rings[lane].word(at + 8).store(lap | number, Ordering::Release);
        self.rings[lane].word(at).store(lap | (u64::from(kind) << 44) | (rank << 32) | epoch, Ordering::Release);
        self.appended[lane] += 1;
    }

    fn rows(&mut self, lane: usize, epoch: u64, row: u64) {
        let heap = SHAPE.heap();
        let at = heap.rows + (epoch % 2 * 9 + row) * heap.row_stride;
        let send = self.far.send.clone();
        fill(&send, at, heap.piece_stride, epoch << 32 | row << 16);
        self.append(lane, EP_COMMAND_ROWS_FP8, epoch, range_number(at, heap.piece_stride));
    }

    /// Waits for a row of the other rank.
    fn sees(&self, epoch: u64, row: u64) {
        let heap = SHAPE.heap();
        let place = epoch % 2 * 9 + row;
        let word = |at: u64| self.far.receive.word(at).load(Ordering::Acquire);
        until(|| word(heap.row_flags + place * 16) == epoch, "row");
        let at = heap.rows + place * heap.row_stride;
        let end = heap.piece_stride - 8;
        assert_eq!([0, end].map(|byte| word(at + byte)), [0, end / 8].map(|word| (epoch << 32 | row << 16) + word));
    }

    fn read(&self, lane: usize) -> u64 {
        self.rings[lane].word(16 * u64::from(EP_COMMANDS)).load(Ordering::Acquire)
    }
}

fn until(done: impl Fn() -> bool, what: &str) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < LIMIT, "no {what}");
        std::thread::yield_now();
    }
}

fn threaded() -> [Threaded; 2] {
    seen_threaded(&Window::default())
}

fn seen_threaded(window: &Window) -> [Threaded; 2] {
    wrapped(window, "tcp", &|placing, _, _| placing)
}

/// Replaces the rails to a rank in a lane.
type Wrap<'a> = &'a dyn Fn(Box<dyn Placing>, u32, usize) -> Box<dyn Placing>;

fn wrapped(window: &Window, tls: &str, wrap: Wrap<'_>) -> [Threaded; 2] {
    let lanes = super::lanes(2);
    pair_of(&SHAPE, "127.0.0.1,127.0.0.2", (lanes, super::threads(lanes)), window, tls, wrap)
}

fn pair_of(
    shape: &Shape,
    rails: &str,
    (lanes, threads): (usize, usize),
    window: &Window,
    tls: &str,
    wrap: Wrap<'_>,
) -> [Threaded; 2] {
    let worker = |name: &str| {
        let settings = [("CROSSRAIL_TLS", tls), ("CROSSRAIL_NET_DEVICES", rails)];
        let context = Context::new(Settings::from_pairs(settings).unwrap()).unwrap();
        Worker::new(&context, WorkerOptions { name: Some(name.to_owned()), ..WorkerOptions::default() }).unwrap()
    };
    let workers = [worker("rank 0"), worker("rank 1")];
    let dialled = workers[1].connect(&workers[0].address(), &ConnectOptions::default()).unwrap();
    let accepted = workers[0].accept(Some(LIMIT)).unwrap();
    let inbox = Inbox::of(shape);
    let area = || Area::plain(inbox.area_bytes() as usize);
    let fars = [1, 0].map(|rank| Arc::new(FarRank::new(rank, area(), area(), inbox, lanes)));
    let open = |endpoint: &Endpoint| -> Vec<Box<dyn Placing>> {
        (0..lanes).map(|lane| crossrail::placing::open(endpoint, lane as u16, LIMIT).unwrap()).collect()
    };
    // Over libfabric either end waits for the other.
    let (first, second) = std::thread::scope(|scope| {
        let second = scope.spawn(|| open(&dialled));
        (open(&accepted), second.join().unwrap())
    });
    let offers = |opened: Vec<Box<dyn Placing>>, far: &Arc<FarRank>| -> Vec<Offer> {
        let wrapped = opened.into_iter().enumerate().map(|(lane, placing)| (lane, wrap(placing, far.rank, lane)));
        wrapped.map(|(lane, placing)| Offer::new(placing, far, lane).unwrap()).collect()
    };
    let (second, first) = (offers(second, &fars[1]), offers(first, &fars[0]));
    let targets = |offers: &[Offer]| offers.iter().map(Offer::targets).collect::<Vec<_>>();
    let told = [targets(&first), targets(&second)];
    let parts = [(first, accepted, 1), (second, dialled, 0)];
    let mut made = parts.into_iter().zip(workers).zip(fars).map(|(((offers, endpoint, other), worker), far)| {
        let rings: Vec<Area> = (0..lanes).map(|_| Area::plain(Ring::BYTES)).collect();
        let (tell, lost) = channel();
        let proxy = Proxy::start(
            &rings,
            threads,
            2,
            window.clone(),
            Box::new(move |rank, _, why| drop(tell.send((rank, why.to_owned())))),
        )
        .unwrap();
        let theirs: &Vec<Vec<u8>> = &told[other];
        proxy
            .connect(offers.into_iter().zip(theirs).map(|(offer, theirs)| offer.accept(theirs).unwrap()).collect(), 1)
            .unwrap();
        Threaded { appended: vec![0; lanes], rings, far, proxy, lost, endpoint, _worker: worker }
    });
    [made.next().unwrap(), made.next().unwrap()]
}

#[test]
fn threads_carry_both_ways_and_wake_up() {
    carry_both_ways("tcp");
}

/// Not over the provider shm, which serves no two ends of one process.
#[test]
fn threads_carry_both_ways_over_libfabric() {
    let context = Context::new(Settings::from_pairs([("CROSSRAIL_TLS", "fabric:tcp")]).unwrap()).unwrap();
    let fabric = context.info().unwrap().transports.into_iter().find(|row| row.name == "fabric").unwrap();
    if fabric.usable {
        carry_both_ways("tcp,fabric:tcp");
    } else {
        crossrail_transport::conformance::skip(&fabric.reason.unwrap_or_default());
    }
}

fn carry_both_ways(tls: &str) {
    let [mut a, mut b] = wrapped(&Window::default(), tls, &|placing, _, _| placing);
    let lanes = a.rings.len();
    for epoch in 1..=20 {
        for row in 0..9 {
            a.rows(row as usize % lanes, epoch, row);
            b.rows((row as usize + 1) % lanes, epoch, row);
        }
        (0..9).for_each(|row| {
            a.sees(epoch, row);
            b.sees(epoch, row);
        });
        // Kernels release the slots before they use them again.
        for end in [&mut a, &mut b] {
            (0..lanes).for_each(|lane| end.append(lane, EP_COMMAND_TAKEN, epoch, u64::from(EP_WORD_DISPATCH_TAKEN)));
            end.proxy.wake(epoch == 10);
        }
        let word = SHAPE.heap().words + 8 * u64::from(EP_WORD_DISPATCH_TAKEN);
        for end in [&a, &b] {
            until(|| end.far.receive.word(word).load(Ordering::Acquire) == epoch, "release of slots");
        }
    }
    assert_eq!(a.far.sent_bytes(), 20 * 9 * SHAPE.heap().piece_stride);
    let report = a.far.to_string();
    // A row each, and from each lane the release of the slots.
    let (commands, placed) = (20 * (9 + lanes), vec![20; lanes]);
    let expected =
        format!("{commands} commands read, 190080 bytes sent; dispatch: placed up to {placed:?}, released 20, free 20");
    assert!(report.contains(&expected), "{report}");
    assert!(a.lost.try_recv().is_err() && b.lost.try_recv().is_err());
}

#[test]
fn a_rank_that_is_let_go_is_written_no_more() {
    let [mut a, b] = threaded();
    a.rows(0, 1, 0);
    b.sees(1, 0);
    a.proxy.disconnect(1).unwrap();
    let sent = a.far.sent_bytes();
    (0..4).for_each(|lane| a.rows(lane, 2, lane as u64));
    (0..4).for_each(|lane| until(|| a.read(lane) == a.appended[lane], "end of the ring"));
    assert_eq!(a.far.sent_bytes(), sent);
    // The other end has lost its rails, and reports each lane's.
    let (rank, why) = b.lost.recv_timeout(LIMIT).unwrap();
    assert!(rank == 0 && !why.is_empty(), "{why}");
}

/// States of rails that a test breaks.
const FINE: u8 = 0;
const BROKEN: u8 = 1;
const BLOCK: u8 = 2;
const BLOCKED: u8 = 3;

/// Rails that fail, or block the thread, once a test sets their state.
struct Failing {
    inner: Box<dyn Placing>,
    state: Arc<AtomicU8>,
}

impl Placing for Failing {
    fn peer(&self) -> &str {
        self.inner.peer()
    }

    fn limits(&self) -> &Limits {
        self.inner.limits()
    }

    unsafe fn expose(&mut self, memory: &Extent, loan: &Arc<Loan>) -> Result<Key, String> {
        // SAFETY: as the caller promises.
        unsafe { self.inner.expose(memory, loan) }
    }

    fn revoke(&mut self, key: &Key) -> Revoked {
        self.inner.revoke(key)
    }

    fn count(&mut self, pieces: u16) -> Option<Counter> {
        self.inner.count(pieces)
    }

    unsafe fn write(&mut self, from: &[Extent], to: &Key, at: u64, imm: Imm, token: u64) -> Result<Post, LaneError> {
        // SAFETY: as the caller promises.
        unsafe { self.inner.write(from, to, at, imm, token) }
    }

    fn poll(&mut self, events: &mut dyn FnMut(Event)) -> Result<bool, LaneError> {
        if self.state.compare_exchange(BLOCK, BLOCKED, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            while self.state.load(Ordering::Acquire) == BLOCKED {
                std::thread::yield_now();
            }
        }
        assert_eq!(self.state.load(Ordering::Acquire), FINE, "the rails broke");
        self.inner.poll(events)
    }

    fn rails(&self) -> Vec<RailReport> {
        self.inner.rails()
    }
}

/// Two ranks, of which the first has such rails in its second lane.
fn failing() -> ([Threaded; 2], Arc<AtomicU8>) {
    let state = Arc::new(AtomicU8::new(FINE));
    let of_rails = state.clone();
    let wrap = move |inner: Box<dyn Placing>, rank: u32, lane: usize| -> Box<dyn Placing> {
        if (rank, lane) == (1, 1) { Box::new(Failing { inner, state: of_rails.clone() }) } else { inner }
    };
    (wrapped(&Window::default(), "tcp", &wrap), state)
}

/// A thread that stands still is named instead of waited for.
#[test]
fn a_thread_that_stands_still_is_named() {
    let ([mut a, b], state) = failing();
    a.rows(0, 1, 0);
    b.sees(1, 0);
    state.store(BLOCK, Ordering::Release);
    a.proxy.wake(false);
    until(|| state.load(Ordering::Acquire) == BLOCKED, "poll that blocks");
    let began = Instant::now();
    let error = a.proxy.disconnect(1).unwrap_err();
    state.store(FINE, Ordering::Release);
    assert!(began.elapsed() < 2 * super::ANSWER, "{:?}", began.elapsed());
    assert_eq!(error.kind, crossrail_types::ErrorKind::Timeout);
    assert!(error.to_string().contains("has not answered for rank 1"), "{error}");
}

/// A thread that panics names itself and the reason at this end, and the rank is lost at both.
#[test]
fn a_thread_that_fails_loses_its_ranks_by_name() {
    let ([mut a, b], state) = failing();
    a.rows(0, 1, 0);
    b.sees(1, 0);
    state.store(BROKEN, Ordering::Release);
    a.proxy.wake(false);
    let (rank, why) = a.lost.recv_timeout(LIMIT).unwrap();
    assert!(rank == 1 && why.contains("crossrail-ep-") && why.contains("the rails broke"), "{why}");
    let (rank, why) = b.lost.recv_timeout(LIMIT).unwrap();
    assert!(rank == 0 && !why.is_empty(), "{why}");
}

#[test]
fn the_end_of_a_connection_is_reported_with_its_reason() {
    let [a, b] = threaded();
    b.endpoint.close(Some(LIMIT)).unwrap();
    let (rank, why) = a.lost.recv_timeout(LIMIT).unwrap();
    assert!(rank == 1 && why.contains("rank 1"), "{why}");
}

/// The page shows what the threads do for a rank, and over which rails; the trace has their bursts.
#[test]
fn the_page_and_the_trace_show_what_the_proxy_does() {
    let folder = std::env::temp_dir().join(format!("crossrail-proxy-{}", std::process::id()));
    let pages = folder.join("pages");
    std::fs::create_dir_all(&pages).unwrap();
    let page = crossrail_sight::open(&pages, crossrail_types::Log(crossrail_types::LogLevel::Off));
    let owner = page.as_ref().map_or(0, |page| page.owner());
    let name = "a proxy that is seen".to_owned();
    let window = Window { name, rank: 5, page, owner, traces: Some(folder.clone()), ..Window::default() };
    let [mut a, b] = seen_threaded(&window);
    for row in 0..9 {
        a.rows(0, 1, row);
    }
    (0..9).for_each(|row| b.sees(1, row));
    let rows = || parse(&summary()).unwrap().rows.into_iter().filter(|row| row.owner == owner).collect::<Vec<_>>();
    let number = |row: &RowSnapshot, name: &str| {
        let at = row.kind.fields().iter().position(|field| field.name == name).unwrap();
        match &row.values[at] {
            Value::Number(number) => *number,
            Value::Numbers(numbers) => numbers[..numbers.len() - 1].iter().sum(),
        }
    };
    let bytes = 9 * SHAPE.heap().piece_stride;
    // Once nothing moves any more, threads show what they did.
    until(
        || {
            let rows = rows();
            let of_rank = rows.iter().find(|row| row.kind == Kind::Proxy && row.peer == "rank 1");
            of_rank.is_some_and(|row| number(row, "sent_bytes") == bytes && number(row, "in_flight") == 0)
        },
        "row",
    );
    let seen = rows();
    let row = seen.iter().find(|row| row.kind == Kind::Proxy && row.peer == "rank 1").unwrap();
    assert_eq!((row.name.as_str(), number(row, "rank"), number(row, "commands")), ("a proxy that is seen", 1, 9));
    assert!((1..=9).contains(&number(row, "burst_seconds")), "{row:?}");
    assert_eq!((number(row, "pending"), number(row, "rails"), number(row, "lost_rails")), (0, 2, 0));
    let rails: Vec<_> =
        seen.iter().filter(|row| row.kind == Kind::Link && row.peer == "a proxy that is seen, rank 1").collect();
    let mut names: Vec<&str> = rails.iter().map(|row| row.name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["tcp/127.0.0.1", "tcp/127.0.0.2"], "those of all lanes together");
    assert!(rails.iter().map(|row| number(row, "sent_bytes")).sum::<u64>() > bytes);
    let threads = seen.iter().filter(|row| row.kind == Kind::ProxyThread && row.name.starts_with("crossrail-ep-"));
    assert!(threads.map(|row| number(row, "wake_ups")).min() >= Some(1));
    let (report, _) = a.far.reported();
    assert_eq!((report.commands, report.sent_bytes, report.bursts), (9, bytes, number(row, "burst_seconds")));
    assert!(report.burst_ns > 0 && report.rails.iter().all(|rail| rail.lost.is_none()), "{report:?}");
    drop((a, b));
    assert!(rows().is_empty());
    let traces =
        std::fs::read_dir(&folder).unwrap().filter_map(|entry| std::fs::read_to_string(entry.ok()?.path()).ok());
    let bursts = traces.filter(|text| text.contains("a proxy that is seen of rank 5, proxy lane 0"));
    let found: Vec<String> = bursts.filter(|text| text.contains("\"name\":\"burst\"")).collect();
    assert!(found.len() == 1 && found[0].contains("to rank 1"), "{found:?}");
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Measures exchanges without kernels: both ranks append the commands of an operation at once, as kernels do, and wait for
/// the other's flags. `PACE_RAILS`: addresses; `PACE_ITERS`; `PACE_LANES`; `PACE_THREADS`; `PACE_TOKENS`.
#[test]
#[ignore = "measures"]
fn pace() {
    let text = |name: &str, usual: &str| std::env::var(name).unwrap_or_else(|_| usual.to_owned());
    let number = |name: &str, usual: usize| text(name, &usual.to_string()).parse::<usize>().unwrap();
    let rails = text("PACE_RAILS", "127.0.0.1,127.0.0.2,127.0.0.3,127.0.0.4");
    let iters = number("PACE_ITERS", 200) as u64;
    let lanes = number("PACE_LANES", super::lanes(2));
    let threads = number("PACE_THREADS", super::threads(lanes));
    for tokens in text("PACE_TOKENS", "8,128,4096").split(',').map(|tokens| tokens.parse::<u64>().unwrap()) {
        let max_tokens = tokens.max(128) as u32;
        let shape = Shape { hidden: 7168, topk: 8, experts: 288, max_tokens, ..SHAPE };
        let iters = if tokens >= 4096 { iters.div_ceil(10) } else { iters };
        let began = Instant::now();
        let ends = pair_of(&shape, &rails, (lanes, threads), &Window::default(), "tcp", &|placing, _, _| placing);
        let opened = began.elapsed();
        let meet = std::sync::Barrier::new(2);
        let mut spent = std::thread::scope(|scope| {
            let ranks = ends.map(|mut end| {
                let (meet, shape) = (&meet, &shape);
                let turns = 1..iters + 11;
                scope.spawn(move || {
                    let spent: Vec<_> = turns.map(|turn| end.exchange(shape, meet, turn, tokens)).collect();
                    (spent, end)
                })
            });
            // Neither end is dropped before both are done.
            ranks.map(|rank| rank.join().unwrap())[0].0.split_off(10)
        });
        for operation in 0..2 {
            spent.sort_unstable_by_key(|times| times[operation]);
            let at =
                |part: usize| spent[(spent.len() * part / 100).min(spent.len() - 1)][operation].as_secs_f64() * 1e6;
            let name = ["dispatch", "combine"][operation];
            println!(
                "{lanes} lanes, {threads} threads, {tokens} tokens, {name}: min {:.0}, p50 {:.0}, p90 {:.0}, p99 {:.0} us; \
                 opened in {opened:.1?}",
                at(0),
                at(50),
                at(90),
                at(99)
            );
        }
    }
}

impl Threaded {
    /// A dispatch and a combine of that number of rows each; their durations.
    fn exchange(&mut self, shape: &Shape, meet: &std::sync::Barrier, epoch: u64, tokens: u64) -> [Duration; 2] {
        let heap = shape.heap();
        let (lanes, most, pieces) = (self.rings.len(), u64::from(shape.max_tokens), u64::from(shape.pieces()));
        let slot = epoch % 2;
        let rows = heap.rows + slot * most * heap.row_stride;
        let flags = heap.row_flags + slot * most * pieces * heap.flag_stride;
        let back = heap.back + slot * heap.back_slot;
        let back_flags = heap.back_flags + slot * heap.back_flags_slot;
        let word = |end: &Threaded, at: u64| end.far.receive.word(at).load(Ordering::Acquire);
        let operations = [
            (EP_COMMAND_ROWS_FP8, rows, heap.row_stride, flags, u64::from(EP_WORD_DISPATCH_TAKEN)),
            (EP_COMMAND_BACK, back, heap.back_stride, back_flags, u64::from(EP_WORD_COMBINE_TAKEN)),
        ];
        operations.map(|(kind, first, stride, flags, taken)| {
            self.proxy.wake(false);
            meet.wait();
            let began = Instant::now();
            // As append_range in ep_commands.cuh.
            let stripe = if tokens * stride < 256 << 10 { 13 } else { 16 };
            for row in 0..tokens {
                let at = first + row * stride;
                self.append((at >> stripe) as usize % lanes, kind, epoch, range_number(at, stride));
            }
            for row in 0..tokens {
                let flag = flags + (row * pieces + pieces - 1) * heap.flag_stride;
                while word(self, flag) != epoch {
                    assert!(began.elapsed() < LIMIT / 6, "no row {row} of {epoch}: {}", self.far);
                    std::hint::spin_loop();
                }
            }
            let spent = began.elapsed();
            (0..lanes).for_each(|lane| self.append(lane, EP_COMMAND_TAKEN, epoch, taken));
            let free = heap.words + 8 * taken;
            while word(self, free) < epoch {
                let report = || format!("{}; {:?}", self.far, self.far.reported().0);
                assert!(began.elapsed() < LIMIT / 6, "no release of the slots of {epoch}: {}", report());
                std::thread::yield_now();
            }
            spent
        })
    }
}
