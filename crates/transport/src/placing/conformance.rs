//! Conformance suite of [`Placing`], run by the tests of each implementation: over rails that reorder, delay, repeat and are lost, with
//! memory that is revoked, and with a peer that sends what it must not.
#![allow(unsafe_code)] // exposes and writes the suite's own memory, which outlives both ends

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::{Counter, Event, Extent, Imm, Key, PIECES_MAX, Placing, WriteError};
use crate::{LaneError, Loan, Post};

/// Longest time without any progress before a check fails.
const PATIENCE: Duration = Duration::from_secs(20);
/// Places of [`traffic`], and the bytes of each.
const PLACES: usize = 24;
const ROOM: usize = 300_000;
const FRESH: u8 = 0x11;
const POISON: u8 = 0xEE;

/// Two connected ends, and what a test does to their rails.
pub struct Pair {
    /// One end.
    pub a: Box<dyn Placing>,
    /// The other.
    pub b: Box<dyn Placing>,
    /// Number of rails.
    pub rails: usize,
    /// Breaks a rail, at whatever it is carrying.
    pub lose: Box<dyn FnMut(usize)>,
}

/// Makes a fresh pair.
pub type MakePair<'a> = &'a mut dyn FnMut() -> Pair;

type Check = fn(&str, Pair);

/// Runs every check.
pub fn run(name: &str, make: MakePair<'_>) {
    let checks: [(&str, Check); 12] = [
        ("writes of any size arrive once and whole", any_size),
        ("a gathered write arrives as one", gathered),
        ("more writes than fit wait", in_flight),
        ("counters are the receiver's", counters),
        ("misuse is refused and harms nothing", misuse),
        ("revoked memory is written no more", revoked),
        ("a loan that is recalled returns", recalled),
        ("a dropped peer ends every write", dropped),
        ("a lost rail loses and repeats nothing", lost_rail),
        ("rails are lost one after the other", lost_rails),
        ("without rails the peer is lost", no_rails),
        ("drivers sleep and wake", sleeping),
    ];
    for (what, check) in checks {
        eprintln!("{name}: {what}");
        let start = Instant::now();
        check(name, make());
        eprintln!("  {:.2?}", start.elapsed());
    }
    for kind in 0..HOSTILE {
        eprintln!("{name}: hostile {kind}");
        hostile(name, make(), kind);
    }
}

/// Writes of any size both ways while rails are lost, all but one, at times that follow from each of `seeds`. Every write
/// must arrive once and whole, and nothing may be written after that.
pub fn run_losses(name: &str, seeds: std::ops::Range<u64>, make: MakePair<'_>) {
    for seed in seeds {
        let name = format!("{name}: seed {seed}");
        eprintln!("{name}");
        let pair = make();
        let mut left: Vec<usize> = (0..pair.rails).collect();
        let (mut a, mut b, mut lose) = ends(&name, pair, PLACES * ROOM);
        let mut dice = Dice(seed);
        traffic(&name, &mut a, &mut b, seed, |_| {
            if left.len() > 1 && dice.roll(100) == 0 {
                lose(left.swap_remove(dice.roll(left.len() as u64) as usize));
            }
        });
    }
}

/// Numbers that follow from a seed (SplitMix64).
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (word ^ (word >> 31)) % sides
    }
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let start = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut bytes = vec![0; len];
    for (i, word) in (0u64..).zip(bytes.chunks_mut(8)) {
        let mixed = start.wrapping_add(i).wrapping_mul(0x85EB_CA6B_27D4_EB2F).to_be_bytes();
        word.copy_from_slice(&mixed[..word.len()]);
    }
    bytes
}

/// A write that was posted or is to be.
struct Sent {
    bytes: Vec<u8>,
    at: usize,
}

/// One end, its heap that the other writes into, and what has happened.
struct End {
    // Goes first: nothing may point into the memory below when that goes.
    placing: Option<Box<dyn Placing>>,
    label: String,
    heap: Vec<u8>,
    loan: Arc<Loan>,
    key: Key,
    counter: Counter,
    /// Posted writes, by token.
    sent: Vec<Arc<Sent>>,
    ended: HashMap<u64, Result<(), WriteError>>,
    /// Writes that are to arrive.
    expected: HashMap<Imm, Arc<Sent>>,
    arrived: HashMap<Imm, u32>,
    /// Overwrites what has arrived, as its owner may.
    poisons: bool,
}

impl End {
    fn new(name: &str, mut placing: Box<dyn Placing>, len: usize) -> End {
        let mut heap = vec![FRESH; len];
        let loan = Arc::new(Loan::default());
        // SAFETY: the heap outlives the object.
        let key = unsafe { placing.expose(&Extent::host(heap.as_mut_ptr(), len), &loan) }.expect("a key");
        let counter = placing.count(PIECES_MAX).expect("a counter");
        End {
            placing: Some(placing),
            label: name.to_owned(),
            heap,
            loan,
            key,
            counter,
            sent: Vec::new(),
            ended: HashMap::new(),
            expected: HashMap::new(),
            arrived: HashMap::new(),
            poisons: true,
        }
    }

    fn rails(&self) -> Vec<super::RailReport> {
        self.placing.as_ref().map(|placing| placing.rails()).unwrap_or_default()
    }

    fn placing(&mut self) -> &mut dyn Placing {
        self.placing.as_deref_mut().expect("not dropped")
    }

    /// Posts a write of `len` bytes to `at`; false: it is full.
    fn write(&mut self, to: &mut End, len: usize, at: usize, piece: u16, cuts: usize) -> bool {
        let token = self.sent.len() as u64;
        let imm = Imm { counter: to.counter, piece };
        let sent = Arc::new(Sent { bytes: pattern(token ^ at as u64, len), at });
        let whole = Extent::host(sent.bytes.as_ptr(), len);
        let piece_len = len.div_ceil(cuts);
        let from: Vec<Extent> = (0..cuts).map(|cut| whole.part(cut * piece_len, piece_len)).collect();
        // SAFETY: `sent` keeps the bytes.
        match unsafe { self.placing().write(&from, &to.key, at as u64, imm, token) } {
            Ok(Post::Held) => {}
            Ok(Post::Full) => return false,
            other => panic!("{}: a write gave {other:?}", self.label),
        }
        self.sent.push(Arc::clone(&sent));
        to.expected.insert(imm, sent);
        true
    }

    fn try_poll(&mut self) -> Result<bool, LaneError> {
        let mut seen = Vec::new();
        let result = self.placing.as_deref_mut().expect("not dropped").poll(&mut |event| seen.push(event));
        for event in seen {
            match event {
                Event::Ended { token, result } => {
                    let before = self.ended.insert(token, result);
                    assert_eq!(before, None, "{}: write {token} ended twice", self.label);
                }
                Event::Arrived(imm) => self.arrival(imm),
            }
        }
        result
    }

    fn arrival(&mut self, imm: Imm) {
        *self.arrived.entry(imm).or_default() += 1;
        let sent = self.expected.remove(&imm);
        let sent = sent.unwrap_or_else(|| panic!("{}: {imm} arrived {:?} times", self.label, self.arrived[&imm]));
        let place = &mut self.heap[sent.at..sent.at + sent.bytes.len()];
        let wrong = place.iter().zip(&sent.bytes).position(|(have, want)| have != want);
        assert_eq!(wrong, None, "{}: {imm}, {} bytes at {}", self.label, sent.bytes.len(), sent.at);
        if self.poisons {
            place.fill(POISON);
        }
    }

    fn poll(&mut self) -> bool {
        self.try_poll().unwrap_or_else(|error| panic!("{}: {error}", self.label))
    }

    fn all_ended(&self) -> bool {
        self.ended.len() == self.sent.len()
    }

    fn expect_ok(&self) {
        assert!(self.ended.values().all(Result::is_ok), "{}: {:?}", self.label, self.ended);
    }

    /// Every byte is as it was at first, or as its owner left it.
    fn expect_quiet(&self) {
        let wrong = self.heap.iter().position(|byte| ![FRESH, POISON].contains(byte));
        assert_eq!(wrong, None, "{}: written after it had arrived, or beyond", self.label);
    }
}

fn ends(name: &str, pair: Pair, len: usize) -> (End, End, Box<dyn FnMut(usize)>) {
    let Pair { a, b, lose, .. } = pair;
    (End::new(&format!("{name}, a"), a, len), End::new(&format!("{name}, b"), b, len), lose)
}

/// Polls both until `done`.
fn drive(a: &mut End, b: &mut End, mut done: impl FnMut(&mut End, &mut End) -> bool) {
    let mut since = Instant::now();
    while !done(a, b) {
        if a.poll() | b.poll() {
            since = Instant::now();
        }
        assert!(since.elapsed() < PATIENCE, "{}: nothing moves: {:?}", a.label, a.rails());
    }
}

fn settle(a: &mut End, b: &mut End) {
    drive(a, b, |a, b| a.all_ended() && b.all_ended() && a.expected.is_empty() && b.expected.is_empty());
    // Late frames would arrive now.
    (0..64).for_each(|_| {
        a.poll();
        b.poll();
    });
    for end in [a, b] {
        end.expect_ok();
        end.expect_quiet();
    }
}

const SIZES: [usize; 14] = [0, 1, 16, 40, 41, 1000, 4096, 7168, 65_536, 65_537, 262_144, 1_000_003, 3 << 20, 9_000_000];

fn any_size(name: &str, pair: Pair) {
    let total: usize = SIZES.iter().map(|len| len + 13).sum();
    let (mut a, mut b, _lose) = ends(name, pair, total);
    for round in 0..3 {
        let mut at = 0;
        for (piece, len) in SIZES.iter().enumerate() {
            at += 13;
            assert!(a.write(&mut b, *len, at, piece as u16, 1));
            assert!(b.write(&mut a, *len, at, piece as u16, 1));
            at += len;
        }
        settle(&mut a, &mut b);
        assert_eq!(a.ended.len(), SIZES.len() * (round + 1));
    }
}

fn gathered(name: &str, pair: Pair) {
    let (mut a, mut b, _lose) = ends(name, pair, 1 << 20);
    let most = a.placing().limits().gather;
    for cuts in 1..=most {
        assert!(a.write(&mut b, 200_001, 4000 * cuts, cuts as u16, cuts));
        drive(&mut a, &mut b, |_, b| b.expected.is_empty());
    }
    settle(&mut a, &mut b);
}

fn in_flight(name: &str, pair: Pair) {
    let (mut a, mut b, _lose) = ends(name, pair, 4096 * 256);
    let most = a.placing().limits().in_flight;
    let (mut posted, mut full) = (0, 0);
    while posted < 4096 {
        if a.write(&mut b, 8 + posted % 200, posted * 256, posted as u16, 1) {
            posted += 1;
            assert!(posted - a.ended.len() <= most, "{name}: more in flight than announced");
        } else {
            full += 1;
            drive(&mut a, &mut b, |a, _| posted - a.ended.len() < most);
        }
    }
    assert!(full > 0 || most >= 4096, "{name}: never full");
    settle(&mut a, &mut b);
}

fn counters(name: &str, pair: Pair) {
    let (mut a, mut b, _lose) = ends(name, pair, 4096);
    assert!(b.placing().count(0).is_none() && b.placing().count(PIECES_MAX + 1).is_none());
    let (one, two) = (b.placing().count(1).expect("a counter"), b.placing().count(2).expect("a counter"));
    assert!(one != two && one != b.counter && two != b.counter);
    // The same piece again and again, each time after it has arrived; a bare immediate.
    let mut dice = Dice(7);
    for round in 0..50 {
        let piece = round % 2;
        b.counter = if piece == 0 { one } else { two };
        assert!(a.write(&mut b, (round % 3) * 100, 4096 - 200, piece as u16, 1));
        drive(&mut a, &mut b, |_, b| b.expected.is_empty());
        for _ in 0..dice.roll(4) {
            a.poll();
        }
    }
    settle(&mut a, &mut b);
}

fn misuse(name: &str, pair: Pair) {
    let (mut a, mut b, _lose) = ends(name, pair, 4096);
    let (key, imm) = (b.key, Imm { counter: b.counter, piece: 0 });
    let bytes = vec![7; 5000];
    let of = |len| Extent::host(bytes.as_ptr(), len);
    let most = a.placing().limits().gather;
    let many = vec![of(1); most + 1];
    let wrong: [(&[Extent], u64, Imm); 4] = [
        (&[of(4097)], 0, imm),
        (&[of(1)], u64::MAX, imm),
        (&many, 0, imm),
        (&[of(1)], 0, Imm { counter: Counter(1 << 18), ..imm }),
    ];
    for (from, at, imm) in wrong {
        // SAFETY: refused, or `bytes` outlives it.
        let result = unsafe { a.placing().write(from, &key, at, imm, 1 << 40) };
        assert!(matches!(&result, Err(LaneError::Protocol(_))), "{name}: {result:?}");
    }
    assert!(a.write(&mut b, 4096, 0, 1, 1));
    settle(&mut a, &mut b);
}

/// Kinds of [`hostile`].
const HOSTILE: u32 = 6;

/// The writer forges what it was given. Its receiver ends it, names the reason, and no byte changes.
fn hostile(name: &str, pair: Pair, kind: u32) {
    let (mut a, mut b, _lose) = ends(name, pair, 8192);
    let narrow = b.placing().count(3).expect("a counter");
    let (mut key, mut imm, mut at) = (b.key, Imm { counter: narrow, piece: 0 }, 0);
    match kind {
        0 => key = Key::new(key.id() ^ 1 << 33, key.len()),
        1 => key = Key::new(key.id() ^ 1, key.len()),
        2 => (key, at) = (Key::new(key.id(), u64::MAX), 8000),
        3 => (key, at) = (Key::new(key.id(), u64::MAX), u64::MAX - 500),
        4 => imm.piece = 3,
        _ => imm.counter = Counter(narrow.0 + 1),
    }
    let bytes = vec![7; 400];
    // SAFETY: `bytes` outlives both ends.
    let posted = unsafe { a.placing().write(&[Extent::host(bytes.as_ptr(), 400)], &key, at, imm, 0) };
    assert_eq!(posted, Ok(Post::Held), "{name}");
    a.sent.push(Arc::new(Sent { bytes: Vec::new(), at: 0 }));
    let start = Instant::now();
    let error = loop {
        let _ = a.try_poll();
        match b.try_poll() {
            Ok(_) => assert!(start.elapsed() < PATIENCE, "{name}: hostile {kind} is not noticed"),
            Err(error) => break error,
        }
    };
    assert!(matches!(&error, LaneError::Protocol(_)), "{name}: hostile {kind}: {error:?}");
    assert!(error.to_string().contains(b.placing().peer()), "{name}: {error}");
    assert_eq!(b.try_poll(), Err(error), "{name}: final");
    // A NIC places what a key permits before it looks at the immediate.
    assert!(kind >= 4 || b.heap.iter().all(|byte| *byte == FRESH), "{name}: hostile {kind} has written");
    // The peer that was turned away learns of it.
    b.placing = None;
    while a.try_poll().is_ok() {
        assert!(start.elapsed() < PATIENCE, "{name}: it continues");
    }
    // A NIC may have placed, and confirmed, what only its immediate condemns.
    assert!(a.ended.get(&0).is_some_and(|result| *result == Err(WriteError::Lost) || kind >= 4), "{name}: {kind}");
    drop(a);
    drop(bytes);
}

fn revoked(name: &str, pair: Pair) {
    const LEN: usize = 24 << 20;
    let (mut a, mut b, _lose) = ends(name, pair, LEN);
    let mut more = vec![FRESH; 4096];
    // SAFETY: `more` outlives both ends.
    let other = unsafe { b.placing().expose(&Extent::host(more.as_mut_ptr(), 4096), &Arc::default()) }.expect("a key");
    for piece in 0..6 {
        assert!(a.write(&mut b, LEN / 6, LEN / 6 * usize::from(piece), piece, 1));
    }
    drive(&mut a, &mut b, |_, b| b.heap.iter().step_by(4096).any(|byte| *byte != FRESH));
    let key = b.key;
    let when = b.placing().revoke(&key);
    b.loan.recall();
    drive(&mut a, &mut b, |_, b| b.loan.is_returned());
    // Returned: ours alone.
    b.heap.fill(POISON);
    b.expected.clear();
    let first = a.sent.len();
    assert!(a.write(&mut b, 100, 0, 9, 1), "a write to revoked memory");
    b.expected.clear();
    drive(&mut a, &mut b, |a, _| a.all_ended());
    assert!(b.heap.iter().all(|byte| *byte == POISON), "{name}: written after it was returned ({when:?})");
    assert_eq!(a.ended[&(first as u64)], Err(WriteError::Revoked), "{name}");
    // Other memory is not concerned.
    let bytes = pattern(3, 4096);
    let imm = Imm { counter: b.counter, piece: 77 };
    let sent = Arc::new(Sent { bytes: Vec::new(), at: 0 });
    let token = a.sent.len() as u64;
    // SAFETY: `bytes` outlives both ends.
    unsafe { a.placing().write(&[Extent::host(bytes.as_ptr(), 4096)], &other, 0, imm, token) }.expect("up");
    a.sent.push(Arc::clone(&sent));
    b.expected.insert(imm, sent);
    drive(&mut a, &mut b, |a, b| a.all_ended() && b.expected.is_empty());
    assert_eq!(more, bytes, "{name}");
    drop((a, b));
}

/// The recall of the loan ends access by itself, from any thread and at any time.
fn recalled(name: &str, pair: Pair) {
    const LEN: usize = 8 << 20;
    let (mut a, mut b, _lose) = ends(name, pair, LEN);
    assert!(a.write(&mut b, LEN, 0, 0, 1));
    let loan = Arc::clone(&b.loan);
    let owner = std::thread::spawn(move || loan.recall());
    drive(&mut a, &mut b, |_, _| owner.is_finished());
    owner.join().expect("no panic");
    drive(&mut a, &mut b, |_, b| b.loan.is_returned());
    b.heap.fill(POISON);
    let arrived = b.arrived.len();
    b.expected.clear();
    drive(&mut a, &mut b, |a, _| a.all_ended());
    let expected = if arrived == 1 { Ok(()) } else { Err(WriteError::Revoked) };
    assert_eq!(a.ended[&0], expected, "{name}");
    assert!(b.heap.iter().all(|byte| *byte == POISON), "{name}: written after it was returned");
}

fn dropped(name: &str, pair: Pair) {
    let (mut a, mut b, _lose) = ends(name, pair, 1 << 20);
    for piece in 0..40 {
        assert!(a.write(&mut b, 50_000, 1000, piece, 1));
        assert!(b.write(&mut a, 50_000, 1000, piece, 1));
        // They overwrite each other: only their number counts.
        (a.poisons, b.poisons) = (false, false);
        a.expected.values_mut().chain(b.expected.values_mut()).for_each(|sent| {
            *sent = Arc::new(Sent { bytes: Vec::new(), ..**sent });
        });
        a.poll();
    }
    b.placing = None;
    b.heap.fill(POISON);
    let start = Instant::now();
    let error = loop {
        match a.try_poll() {
            Ok(_) => assert!(start.elapsed() < PATIENCE, "{name}: the peer was dropped, yet no error"),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, LaneError::Closed(_) | LaneError::Down(_)), "{name}: {error:?}");
    assert!(a.all_ended(), "{name}: {} of {} writes ended", a.ended.len(), a.sent.len());
    assert!(b.heap.iter().all(|byte| *byte == POISON), "{name}: written after the end");
    let imm = Imm { counter: b.counter, piece: 0 };
    // SAFETY: no bytes.
    let late = unsafe { a.placing().write(&[], &b.key, 0, imm, 1 << 40) };
    assert_eq!(late, Err(error), "{name}: a write after the end");
}

/// Writes both ways while `act` happens, of any size; polls at random.
fn traffic(name: &str, a: &mut End, b: &mut End, seed: u64, mut act: impl FnMut(u64)) {
    const COUNT: u64 = 300;
    let mut dice = Dice(seed);
    let mut since = Instant::now();
    let mut posted = [0u64; 2];
    while posted != [COUNT; 2] {
        for side in [0, 1] {
            let (from, to) = if side == 0 { (&mut *a, &mut *b) } else { (&mut *b, &mut *a) };
            // A place is free once what was written there has arrived.
            let place = posted[side] as usize % PLACES;
            let is_free = to.expected.values().all(|sent| sent.at / ROOM != place);
            if posted[side] < COUNT && is_free && dice.roll(2) == 0 {
                let most = [200, 5000, 100_000, ROOM as u64 - 5000][dice.roll(4) as usize];
                let len = dice.roll(most) as usize;
                let at = place * ROOM + dice.roll(5000) as usize;
                if from.write(to, len, at, posted[side] as u16, 1 + dice.roll(3) as usize) {
                    posted[side] += 1;
                    since = Instant::now();
                    act(posted[0] + posted[1]);
                }
            }
            if dice.roll(3) != 0 {
                from.poll();
            }
        }
        assert!(since.elapsed() < PATIENCE, "{name}: nothing moves: {:?} {:?}", a.rails(), b.rails());
    }
    settle(a, b);
}

fn lost_rail(name: &str, pair: Pair) {
    let rails = pair.rails;
    let (mut a, mut b, mut lose) = ends(name, pair, PLACES * ROOM);
    if rails < 2 {
        return;
    }
    traffic(name, &mut a, &mut b, 1, |posted| {
        if posted == 200 {
            lose(0);
        }
    });
    let lost = |end: &mut End| end.placing().rails().iter().filter(|rail| rail.lost.is_some()).count();
    assert_eq!((lost(&mut a), lost(&mut b)), (1, 1), "{name}");
}

fn lost_rails(name: &str, pair: Pair) {
    let rails = pair.rails;
    let (mut a, mut b, mut lose) = ends(name, pair, PLACES * ROOM);
    traffic(name, &mut a, &mut b, 2, |posted| {
        if posted % 50 == 49 && (posted as usize / 50) < rails - 1 {
            lose(posted as usize / 50);
        }
    });
}

fn no_rails(name: &str, pair: Pair) {
    let rails = pair.rails;
    let (mut a, mut b, mut lose) = ends(name, pair, 20 << 20);
    assert!(a.write(&mut b, 20 << 20, 0, 0, 1));
    for _ in 0..3 {
        a.poll();
    }
    (0..rails).for_each(&mut lose);
    let start = Instant::now();
    let error = loop {
        match a.try_poll() {
            Ok(_) => assert!(start.elapsed() < PATIENCE, "{name}: no rail is left, yet no error"),
            Err(error) => break error,
        }
    };
    let names: Vec<String> = a.placing().rails().into_iter().map(|rail| rail.name).collect();
    assert!(names.iter().all(|rail| error.to_string().contains(rail)), "{name}: {error} names not all of {names:?}");
    assert!(error.to_string().contains(a.placing().peer()), "{name}: {error}");
    assert_eq!(a.ended.get(&0), Some(&Err(WriteError::Lost)), "{name}");
}

fn sleeping(name: &str, pair: Pair) {
    let (mut a, mut b, _lose) = ends(name, pair, 4 << 20);
    if a.placing().fd().is_none() || b.placing().fd().is_none() {
        eprintln!("{name}: skipped: no descriptor to sleep on");
        return;
    }
    // Either answers each arrival with its next write; long ones at the end.
    let counters = [a.counter, b.counter];
    let keys = [a.key, b.key];
    let play = |end: &mut End, me: usize| {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).expect("epoll_create1");
        let fd = end.placing().fd().expect("checked");
        // SAFETY: the object keeps it open, and outlives the set.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, 0)).expect("epoll_ctl");
        end.poisons = false;
        let bytes = vec![3; 4 << 20];
        let imm = |piece| Imm { counter: counters[1 - me], piece };
        let (mut rounds, mut turn) = (0u16, me == 0);
        let is_through = |end: &End| end.arrived.len() == 300 && end.sent.len() == 300 && end.all_ended();
        while !is_through(end) {
            if turn && rounds < 300 {
                let len = if rounds < 280 { 64 } else { 4 << 20 };
                let token = end.sent.len() as u64;
                let from = [Extent::host(bytes.as_ptr(), len)];
                // SAFETY: `bytes` outlives the write, which has ended when this returns.
                let posted = unsafe { end.placing().write(&from, &keys[1 - me], 0, imm(rounds), token) };
                assert_eq!(posted, Ok(Post::Held));
                end.sent.push(Arc::new(Sent { bytes: Vec::new(), at: 0 }));
                (rounds, turn) = (rounds + 1, false);
            }
            let expect = Imm { counter: counters[me], piece: rounds - u16::from(me == 0 && rounds > 0) };
            end.expected.entry(expect).or_insert_with(|| Arc::new(Sent { bytes: Vec::new(), at: 0 }));
            let before = end.arrived.len();
            while end.poll() {}
            turn |= end.arrived.len() > before;
            if !turn && !is_through(end) && end.placing().arm() {
                let mut events = [EpollEvent::empty(); 1];
                let count =
                    epoll.wait(&mut events, EpollTimeout::try_from(PATIENCE).expect("fits")).expect("epoll_wait");
                assert_eq!(count, 1, "{}: slept {PATIENCE:?} in round {rounds} and was not woken", end.label);
            }
        }
        // A driver that stops polling acknowledges what has arrived: once there is nothing left to poll for.
        let start = Instant::now();
        while !end.placing().arm() && start.elapsed() < PATIENCE {
            end.poll();
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| play(&mut b, 1));
        play(&mut a, 0);
    });
}
