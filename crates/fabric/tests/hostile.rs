//! One-sided writes over a libfabric that does its worst, decided by a seed: no byte is wrong, lost, doubled or late,
//! nothing hangs, every error has a name, and every promise of the interface is kept.
//!
//! `FABRIC_SEEDS=10000 FABRIC_SEED=1 cargo test --package crossrail-fabric --test hostile` runs as many, from that one on.
#![allow(unsafe_code)] // exposes and writes the test's own memory, which outlives the objects

mod stand_in;

use std::collections::{HashMap, HashSet};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crossrail_fabric::examine::{Test, write_into};
use crossrail_fabric::{FabricPlacing, FabricRails, Joined, Offer, Wanted, attach, attach_lane, attach_rail};
use crossrail_transport::conformance as lanes;
use crossrail_transport::placing::conformance::{self, Pair};
use crossrail_transport::placing::{Counter, Event, Extent, Imm, Key, PIECES_MAX, Placing, WriteError};
use crossrail_transport::{LaneError, Loan, Post};
use crossrail_types::LaneId;
use stand_in::Hostile;

/// Longest time of a run, and of joining.
const LIMIT: Duration = Duration::from_secs(30);
/// Without `shm`, over which one process has no peer in itself.
const PROVIDERS: [&str; 6] = ["hostile", "tcp", "efa", "efa-direct", "cxi", "verbs;ofi_rxm"];
/// Places that are written, and the bytes of each.
const PLACES: usize = 8;
const ROOM: usize = 300_000;
/// Least limits that the crate works with; below, it refuses the provider.
const LEAST: (u64, u64) = (8, 1 << 16);

/// The library serves one run at a time.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// splitmix64
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) % sides
    }
}

/// Disturbance of a run, in addition to those of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Nothing,
    /// One end revokes its memory.
    Revoke,
    /// The owner recalls it.
    Recall,
    /// One end is dropped.
    Drop,
    /// An operation fails.
    Fail,
    /// A registration fails.
    NoMemory,
    /// A rail is lost, of several.
    Lose,
    /// A rail is lost, and another is added.
    Replace,
}

const ACTS: [Act; 8] =
    [Act::Nothing, Act::Nothing, Act::Nothing, Act::Revoke, Act::Recall, Act::Drop, Act::Fail, Act::NoMemory];
/// With several rails.
const RAIL_ACTS: [Act; 10] = [
    Act::Nothing,
    Act::Lose,
    Act::Lose,
    Act::Lose,
    Act::Replace,
    Act::Revoke,
    Act::Recall,
    Act::Drop,
    Act::Fail,
    Act::NoMemory,
];

/// A write in flight.
struct Sent {
    bytes: Vec<u8>,
    place: usize,
    at: usize,
    len: usize,
}

struct End {
    // First: nothing refers to the memory below when it is dropped.
    placing: Option<Box<dyn Placing>>,
    name: &'static str,
    heap: Vec<u8>,
    key: Key,
    counter: Counter,
    loan: Arc<Loan>,
    /// By the place that is written here: the peer's write, until it has arrived.
    awaited: HashMap<u16, u64>,
    arrived: HashSet<u64>,
    /// Our writes, and how they have ended.
    sent: HashMap<u64, Arc<Sent>>,
    ended: HashMap<u64, Result<(), WriteError>>,
    error: Option<LaneError>,
    /// By its owner, before it was lost.
    dropped: bool,
    /// Its memory is its owner's alone again: no byte of it may change.
    closed: bool,
}

impl End {
    fn new(placing: Box<dyn Placing>, name: &'static str) -> Result<End, String> {
        let mut end = End {
            placing: Some(placing),
            name,
            heap: vec![0; PLACES * ROOM],
            key: Key([0; 32]),
            counter: Counter(0),
            loan: Arc::default(),
            awaited: HashMap::new(),
            arrived: HashSet::new(),
            sent: HashMap::new(),
            ended: HashMap::new(),
            error: None,
            dropped: false,
            closed: false,
        };
        let memory = Extent::host(end.heap.as_mut_ptr(), end.heap.len());
        let placing = end.placing.as_mut().expect("just made");
        // SAFETY: the heap outlives the object.
        end.key = unsafe { placing.expose(&memory, &end.loan) }?;
        end.counter = placing.count(PIECES_MAX).expect("a counter");
        Ok(end)
    }

    fn is_up(&self) -> bool {
        self.placing.is_some() && self.error.is_none()
    }

    /// Queues a write into a place of `to` that is free, if there is one.
    fn write(&mut self, to: &mut End, number: u64, dice: &mut Dice) -> bool {
        let place = dice.roll(PLACES as u64) as u16;
        if to.awaited.contains_key(&place) || !self.is_up() {
            return false;
        }
        let most = [300, 5000, ROOM as u64][dice.roll(5).saturating_sub(2) as usize];
        let len = dice.roll(most) as usize;
        let at = dice.roll((ROOM - len) as u64) as usize;
        let first = dice.roll(256) as usize;
        let bytes = (0..len).map(|i| (first + 7 * i + (i >> 8) + 1) as u8).collect();
        let sent = Sent { bytes, place: usize::from(place), at, len };
        let placing = self.placing.as_mut().expect("up");
        let pieces = 1 + dice.roll(placing.limits().gather as u64) as usize;
        let mut from = Vec::new();
        let mut used = 0;
        for piece in 1..=pieces {
            let part = if piece == pieces { len - used } else { dice.roll((len - used) as u64 + 1) as usize };
            from.push(Extent::host(sent.bytes.as_ptr().wrapping_add(used), part));
            used += part;
        }
        let imm = Imm { counter: to.counter, piece: place };
        let target = (usize::from(place) * ROOM + at) as u64;
        // SAFETY: `sent` is kept until the object is dropped.
        match unsafe { placing.write(&from, &to.key, target, imm, number) } {
            Ok(Post::Full) => false,
            Ok(_) => {
                self.sent.insert(number, Arc::new(sent));
                to.awaited.insert(place, number);
                true
            }
            Err(error) => panic!("{}: a write is refused: {error}", self.name),
        }
    }

    fn poll(&mut self, peer: &mut End) {
        let Some(placing) = self.placing.as_mut().filter(|_| self.error.is_none()) else { return };
        let mut events = Vec::new();
        if let Err(error) = placing.poll(&mut |event| events.push(event)) {
            self.error = Some(error);
            // The peer learns of it by that.
            self.placing = None;
        }
        for event in events {
            match event {
                Event::Arrived(imm) => {
                    let number = self.awaited.remove(&imm.piece);
                    let number = number.unwrap_or_else(|| panic!("{}: {imm} arrived, and was not sent", self.name));
                    assert!(self.arrived.insert(number));
                    if !self.closed {
                        self.check(&peer.sent[&number]);
                    }
                }
                Event::Ended { token, result } => {
                    let before = self.ended.insert(token, result);
                    assert!(before.is_none(), "{}: write {token} has ended twice", self.name);
                    assert!(self.sent.contains_key(&token), "{}: write {token} was not sent", self.name);
                }
            }
        }
    }

    /// All of its place is as that write leaves it, and then fresh again.
    fn check(&mut self, sent: &Sent) {
        let place = &mut self.heap[sent.place * ROOM..][..ROOM];
        let (before, rest) = place.split_at(sent.at);
        let (written, after) = rest.split_at(sent.len);
        assert!(written == &sent.bytes[..], "{}: a wrong byte of {}", self.name, sent.len);
        assert!(before.iter().chain(after).all(|byte| *byte == 0), "{}: a byte outside its write", self.name);
        place[sent.at..][..sent.len].fill(0);
    }

    /// Its memory may not be written from now on.
    fn close(&mut self) {
        self.closed = true;
        self.heap.fill(0xee);
    }
}

fn offers(hostile: &Hostile, provider: &str) -> Result<Vec<Offer>, String> {
    let wanted = Wanted { provider: Some(provider), ..Wanted::default() };
    let mut offers = hostile.fabric.offers(&wanted).map_err(|error| error.to_string())?;
    assert!(offers.iter().all(|offer| offer.provider == provider), "{offers:?}");
    offers.sort_by(|a, b| a.domain.cmp(&b.domain));
    Ok(offers)
}

type Joining<T> = Result<T, crossrail_types::Error>;

/// Both ends of a connection, and a further descriptor of the first.
fn streams() -> (TcpStream, TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
    let here = TcpStream::connect(listener.local_addr().expect("bound")).expect("dial");
    let there = listener.accept().expect("accept").0;
    let beside = here.try_clone().expect("a descriptor");
    (here, there, beside)
}

/// Both ends, and a descriptor of their connection, which does not end while that is open.
fn join(offer: &Offer) -> (Joining<FabricPlacing>, Joining<FabricPlacing>, TcpStream) {
    let (here, there, beside) = streams();
    let deadline = Instant::now() + LIMIT;
    std::thread::scope(|scope| {
        let other = scope.spawn(|| attach(there, offer, "a", "fabric/test", deadline));
        let one = attach(here, offer, "b", "fabric/test", deadline);
        (one, other.join().expect("no panic"), beside)
    })
}

/// Both ends of one rail.
fn join_rail(offer: &Offer, number: u16) -> (Joining<Joined>, Joining<Joined>, TcpStream) {
    let (here, there, beside) = streams();
    let deadline = Instant::now() + LIMIT;
    let name = format!("fabric/test{number}");
    let joined = |rail| Joined { rail, interface: None };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| attach_rail(there, offer, ("a", &name), None, deadline).map(joined));
        let one = attach_rail(here, offer, ("b", &name), Some(number), deadline).map(joined);
        (one, other.join().expect("no panic"), beside)
    })
}

type Boxed = Joining<Box<dyn Placing>>;

/// Rails between the ends, and how more are added.
struct Rails<'a> {
    offers: &'a [Offer],
    count: u16,
    /// Descriptors of their connections.
    beside: Vec<TcpStream>,
    doors: Vec<Arc<crossrail_fabric::Door>>,
}

impl Rails<'_> {
    fn offer(&self, number: u16) -> &Offer {
        &self.offers[usize::from(number) % self.offers.len()]
    }

    /// Both ends over `count` rails; one is an object of its own.
    fn join(&mut self) -> (Boxed, Boxed) {
        if self.count == 1 {
            let (a, b, _) = join(self.offer(0));
            let boxed = |end: Joining<FabricPlacing>| end.map(|placing| Box::new(placing) as Box<dyn Placing>);
            return (boxed(a), boxed(b));
        }
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for number in 0..self.count {
            let (a, b, beside) = join_rail(self.offer(number), number);
            ours.push(a);
            theirs.push(b);
            self.beside.push(beside);
        }
        let mut object = |peer: &str, rails: Vec<Joining<Joined>>| {
            let rails = rails.into_iter().collect::<Joining<Vec<Joined>>>()?;
            let object = FabricRails::new(peer, rails)?;
            self.doors.push(Arc::clone(object.door()));
            Ok(Box::new(object) as Box<dyn Placing>)
        };
        (object("b", ours), object("a", theirs))
    }

    fn lose(&self, dice: &mut Dice) {
        let beside = &self.beside[dice.roll(self.beside.len() as u64) as usize];
        let _ = beside.shutdown(std::net::Shutdown::Both);
    }

    fn add(&mut self) {
        let (a, b, _) = join_rail(self.offer(self.count), self.count);
        self.doors[0].add(a.expect("a rail"));
        self.doors[1].add(b.expect("a rail"));
        self.count += 1;
    }
}

/// Counts of what all runs have shown.
#[derive(Debug, Default)]
struct Shown {
    runs: u64,
    refused_offers: u64,
    failed_joins: u64,
    failed_exposures: u64,
    lost: u64,
    /// Lost rails of objects that continued, and shares of writes that other rails took over.
    rails: u64,
    reposted: u64,
    counts: HashMap<&'static str, u64>,
}

const COUNTS: [&str; 7] = ["posts", "refused", "repeated", "early", "out_of_order", "failed", "null_errors"];

fn run(hostile: &Hostile, seed: u64, shown: &mut Shown) {
    let mut dice = Dice(seed);
    let rails = [1, 1, 2, 3][dice.roll(4) as usize];
    let acts = if rails == 1 { &ACTS[..] } else { &RAIL_ACTS[..] };
    let act = acts[dice.roll(acts.len() as u64) as usize];
    let provider = PROVIDERS[dice.roll(PROVIDERS.len() as u64) as usize];
    let mut options = String::new();
    if act == Act::Fail {
        options = format!("fail_at={}", 1 + dice.roll(150));
    } else if act == Act::NoMemory {
        options = format!("mr_fail={}", 1 + dice.roll(6));
    }
    // Smaller limits than these are refused, always in the same way: a few are enough.
    if dice.roll(8) != 0 {
        options += &format!(
            "{}tx={},msg={}",
            if options.is_empty() { "" } else { "," },
            8 << dice.roll(5),
            1 << 16 << dice.roll(5)
        );
    }
    hostile.begin(seed, &options);
    shown.runs += 1;
    let offers = match offers(hostile, provider) {
        Ok(offers) => offers,
        Err(error) => {
            let too_small = hostile.option("tx") < LEAST.0 || hostile.option("msg") < LEAST.1;
            assert!(too_small && error.contains(provider), "{provider} is refused: {error}");
            assert!(error.contains("writes of") || error.contains("bytes per write"), "{error}");
            shown.refused_offers += 1;
            return assert_eq!(hostile.violations(true), "");
        }
    };
    let mut rails = Rails { offers: &offers, count: rails, beside: Vec::new(), doors: Vec::new() };
    match rails.join() {
        (Ok(a), Ok(b)) => match (End::new(a, "a"), End::new(b, "b")) {
            (Ok(mut a), Ok(mut b)) => {
                traffic(hostile, (&mut a, &mut b), (act, &mut rails), &mut dice);
                shown.lost += u64::from(a.error.is_some() || b.error.is_some());
                for rail in [&a, &b].into_iter().filter(|end| end.is_up()).flat_map(|end| end.placing.as_ref()) {
                    let rails = rail.rails();
                    shown.rails += rails.iter().filter(|rail| rail.lost.is_some()).count() as u64;
                    shown.reposted += rails.iter().map(|rail| rail.reposted).sum::<u64>();
                }
                drop((a, b));
            }
            (a, b) => {
                let why = [a.err(), b.err()].into_iter().flatten().collect::<Vec<_>>().join("; ");
                assert!(
                    act == Act::NoMemory && why.contains(&format!("fi_mr_regattr of {} bytes: ", PLACES * ROOM)),
                    "{why}"
                );
                shown.failed_exposures += 1;
            }
        },
        (a, b) => {
            let why: Vec<String> =
                [a, b].into_iter().filter_map(|end| end.err().map(|error| error.to_string())).collect();
            let named = why.iter().any(|why| match act {
                Act::NoMemory => why.contains("fi_mr_regattr"),
                Act::Fail => why.contains("4111"),
                _ => false,
            });
            assert!(named, "{provider}, {act:?}: the ends do not join: {why:?}");
            shown.failed_joins += 1;
        }
    }
    drop(rails);
    drop(offers);
    assert_eq!(hostile.handlers(), 0, "signal handlers of the library are installed");
    for name in COUNTS {
        *shown.counts.entry(name).or_default() += hostile.count(name);
    }
    assert_eq!(hostile.count("forged"), 0, "{provider}, {act:?}: a write that no registration allows");
    assert_eq!(hostile.violations(true), "");
}

/// Writes both ways while `act` happens; then all of it has ended.
fn traffic(hostile: &Hostile, (a, b): (&mut End, &mut End), (act, rails): (Act, &mut Rails<'_>), dice: &mut Dice) {
    const WRITES: u64 = 60;
    let when = dice.roll(WRITES);
    let start = Instant::now();
    let (mut posted, mut acted) = (0, false);
    let mut ends = [a, b];
    if dice.roll(2) == 0 {
        ends.reverse();
    }
    let [a, b] = ends;
    loop {
        for _ in 0..4 {
            let (from, to) = if dice.roll(2) == 0 { (&mut *a, &mut *b) } else { (&mut *b, &mut *a) };
            if posted < WRITES && !to.closed && from.write(to, posted, dice) {
                posted += 1;
            }
        }
        if dice.roll(3) != 0 {
            a.poll(b);
        } else if let Some(placing) = a.placing.as_mut() {
            // As a driver that means to sleep does, which polls where there is nothing to sleep on.
            let sleeps = placing.arm();
            assert!(!sleeps || placing.fd().is_some(), "nothing to sleep on");
        }
        if dice.roll(3) != 0 {
            b.poll(a);
        }
        if !acted && posted >= when {
            acted = true;
            begin(act, b, rails, dice);
        }
        if acted && matches!(act, Act::Revoke | Act::Recall) && !b.closed && b.loan.is_returned() {
            b.close();
        }
        for end in [&mut *a, &mut *b] {
            if end.error.is_some() && !end.closed {
                end.close();
            }
        }
        // Late writes need some more turns to show.
        let all_ended = |end: &End| end.dropped || end.ended.len() == end.sent.len();
        let all_arrived = |end: &End| end.awaited.is_empty() || end.closed;
        let is_over = posted == WRITES || !a.is_up() || !b.is_up() || b.closed;
        let both_know = (a.is_up() && b.is_up()) || (!a.is_up() && !b.is_up());
        if (acted || !a.is_up())
            && is_over
            && both_know
            && all_ended(a)
            && all_ended(b)
            && all_arrived(a)
            && all_arrived(b)
        {
            break;
        }
        let left = (a.sent.len() - a.ended.len(), b.sent.len() - b.ended.len());
        assert!(start.elapsed() < LIMIT, "{act:?}: it hangs: {left:?} of {posted} writes, {:?} {:?}", a.error, b.error);
        assert_eq!(hostile.violations(false), "");
    }
    for _ in 0..200 {
        a.poll(b);
        b.poll(a);
    }
    if a.is_up() && b.is_up() {
        // Those of both rings, of both stagings, and of both heaps, over each rail: none of a write that has ended.
        let most = 6 * u64::from(rails.count);
        assert!(hostile.count("registrations") <= most, "registrations of writes that have ended are open");
    }
    verdict(a, b, act);
}

/// Begins a disturbance.
fn begin(act: Act, b: &mut End, rails: &mut Rails<'_>, dice: &mut Dice) {
    let key = b.key;
    match act {
        Act::Revoke => {
            if let Some(placing) = b.placing.as_mut() {
                placing.revoke(&key);
            }
        }
        Act::Drop => {
            (b.placing, b.dropped) = (None, true);
            b.close();
        }
        Act::Lose => rails.lose(dice),
        Act::Replace => {
            rails.lose(dice);
            rails.add();
        }
        Act::Recall | Act::Nothing | Act::Fail | Act::NoMemory => {}
    }
    if matches!(act, Act::Revoke | Act::Recall) {
        b.loan.recall();
    }
}

fn verdict(a: &End, b: &End, act: Act) {
    for (from, to) in [(a, b), (b, a)] {
        for (number, result) in &from.ended {
            match result {
                Ok(()) => assert!(to.dropped || to.arrived.contains(number), "write {number} did not arrive"),
                Err(WriteError::Revoked) => assert!(matches!(act, Act::Revoke | Act::Recall) && to.name == b.name),
                Err(WriteError::Lost) => assert!(from.error.is_some(), "write {number} is lost, and there is no error"),
            }
        }
        if to.closed {
            assert!(to.heap.iter().all(|byte| *byte == 0xee), "{}: written after it was returned: {act:?}", to.name);
        } else {
            assert!(to.heap.iter().all(|byte| *byte == 0), "{}: a late byte", to.name);
        }
        let Some(error) = &from.error else { continue };
        assert!(matches!(act, Act::Fail | Act::Drop | Act::NoMemory), "{act:?}: {}: {error}", from.name);
        let text = error.to_string();
        assert!(text.contains("fabric/test") && text.contains(to.name), "{text}");
        let names_it = match act {
            // One end learns of it from the provider, the other by the end of their connection.
            Act::Fail => text.contains("4111") || text.contains("fi_") || matches!(error, LaneError::Closed(_)),
            Act::NoMemory => text.contains("fi_mr_regattr") || matches!(error, LaneError::Closed(_)),
            _ => matches!(error, LaneError::Closed(_) | LaneError::Down(_)),
        };
        assert!(names_it, "{act:?}: {text}");
    }
}

#[test]
fn every_seed_keeps_every_promise() {
    let _turn = turn();
    let Some(hostile) = Hostile::load() else { return };
    let number =
        |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<f64>().ok()).map(|number| number as u64);
    let (first, count) = (number("FABRIC_SEED").unwrap_or(1), number("FABRIC_SEEDS").unwrap_or(300));
    let mut shown = Shown::default();
    for seed in first..first + count {
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(&hostile, seed, &mut shown)));
        if let Err(panic) = result {
            eprintln!("FABRIC_SEEDS=1 FABRIC_SEED={seed} repeats it");
            std::panic::resume_unwind(panic);
        }
    }
    eprintln!("{shown:?}");
    // A library that does nothing of that would show nothing.
    if count >= 300 {
        for name in COUNTS {
            assert!(shown.counts[name] > 0, "no seed has shown {name}");
        }
        assert!(shown.failed_joins > 0 && shown.failed_exposures > 0 && shown.lost > 0 && shown.refused_offers > 0);
        assert!(shown.rails > 10 && shown.reposted > 10, "{shown:?}");
    }
}

/// A few seeds of each provider, with larger writes, sleeping drivers, and forged keys.
#[test]
fn the_conformance_suite_passes() {
    let _turn = turn();
    let Some(hostile) = Hostile::load() else { return };
    for (seed, provider) in (1..).zip(PROVIDERS) {
        hostile.begin(seed, "tx=64,msg=1048576,move=200,eagain=8,burst=5");
        let offer = offers(&hostile, provider).expect("usable").swap_remove(0);
        conformance::run(provider, &mut || {
            let (a, b, beside) = join(&offer);
            let lose = Box::new(move |_rail| drop(beside.shutdown(std::net::Shutdown::Both)));
            Pair { a: Box::new(a.expect("joined")), b: Box::new(b.expect("joined")), rails: 1, lose }
        });
        drop(offer);
        assert_eq!(hostile.violations(true), "", "{provider}");
    }
}

/// Frames of lanes over the same library. `linger`: a lane that is closed has handed its frames to the provider, and
/// relies on it to deliver them.
#[test]
fn the_conformance_suite_of_lanes_passes() {
    let _turn = turn();
    let Some(hostile) = Hostile::load() else { return };
    for (seed, provider) in (21..).zip(PROVIDERS) {
        hostile.begin(seed, "tx=64,msg=1048576,move=200,eagain=8,burst=5,linger=1");
        let offer = offers(&hostile, provider).expect("usable").swap_remove(0);
        lanes::run(provider, &mut || {
            let (here, there, _) = streams();
            let deadline = Instant::now() + LIMIT;
            let (one, other) = std::thread::scope(|scope| {
                let other = scope.spawn(|| attach_lane(there, &offer, LaneId(2), ("a", "fabric/test"), deadline));
                let one = attach_lane(here, &offer, LaneId(1), ("b", "fabric/test"), deadline).expect("a lane");
                (one, other.join().expect("no panic").expect("the other lane"))
            });
            (Box::new(one), Box::new(other))
        });
        drop(offer);
        assert_eq!(hostile.violations(true), "", "{provider}");
    }
}

/// Memory of GPUs is registered where the provider offers it; elsewhere the reason is named. The library's GPU is the
/// memory of this process.
#[test]
fn memory_of_gpus_is_registered_where_the_provider_has_hmem() {
    let _turn = turn();
    let Some(hostile) = Hostile::load() else { return };
    for (provider, hmem, able) in [("efa", 1, true), ("hostile", 1, true), ("efa", 0, false), ("tcp", 1, false)] {
        let what = format!("{provider}, hmem={hmem}");
        hostile.begin(5, &format!("hmem={hmem},nics=1,tx=64,msg=1048576,move=200,fail_at=0,mr_fail=0"));
        let wanted = Wanted { provider: Some(provider), ..Wanted::default() };
        let offer = hostile.fabric.offers_for_gpus(&wanted).expect("usable").remove(0);
        assert_eq!(offer.attributes.hmem, able, "{what}");
        let (one, other, beside) = join(&offer);
        let (mut one, mut other) = (one.expect("joined"), other.expect("joined"));
        assert_eq!(one.limits().gpu, able, "{what}");
        let (bytes, mut heap) = (vec![7u8; ROOM], vec![0u8; ROOM]);
        let source = Extent { gpu: Some(3), ..Extent::host(bytes.as_ptr(), ROOM) };
        let target = Extent { gpu: Some(3), ..Extent::host(heap.as_mut_ptr(), ROOM) };
        // SAFETY: the objects are dropped before the memory.
        let exposed = unsafe { (one.expose(&source, &Arc::default()), other.expose(&target, &Arc::default())) };
        let registered = hostile.count("registered");
        if able {
            let (Ok(_), Ok(key)) = exposed else { panic!("{what}: {exposed:?}") };
            let imm = Imm { counter: other.count(1).expect("a counter"), piece: 0 };
            for turn in 0..3 {
                // SAFETY: as above.
                assert_eq!(unsafe { one.write(&[source], &key, 0, imm, turn) }, Ok(Post::Held), "{what}");
                let (mut ended, mut arrived, start) = (0, 0, Instant::now());
                while (ended, arrived) != (1, 1) {
                    one.poll(&mut |event| ended += u32::from(matches!(event, Event::Ended { .. }))).expect("up");
                    other.poll(&mut |event| arrived += u32::from(event == Event::Arrived(imm))).expect("up");
                    assert!(start.elapsed() < LIMIT, "{what}: {ended} {arrived}");
                }
            }
            assert_eq!(hostile.count("registered"), registered, "{what}: exposed memory is registered once");
        } else {
            let (_, Err(why)) = exposed else { panic!("{what}: {exposed:?}") };
            assert!(why.contains("the provider has no HMEM"), "{what}: {why}");
        }
        drop((one, other, beside, offer));
        assert!(!able || heap == bytes, "{what}");
        assert_eq!(hostile.violations(true), "", "{what}");
    }
}

/// A link that is lost, in each way that providers have: the peer is named, whatever is completed.
#[test]
fn a_lost_link_is_named() {
    let _turn = turn();
    let Some(hostile) = Hostile::load() else { return };
    hostile.begin(5, "nics=3,tx=64,msg=1048576,move=255,eagain=0,null=255");
    let wanted = Wanted { provider: Some("hostile"), ..Wanted::default() };
    let offers = hostile.fabric.offers(&wanted).expect("three devices");
    assert_eq!(offers.len(), 3);
    let mut pairs: Vec<(End, End)> = Vec::new();
    for offer in &offers {
        let (a, b, beside) = join(offer);
        drop(beside);
        let of = |end: Joining<FabricPlacing>, name| End::new(Box::new(end.expect("joined")), name).expect("exposed");
        pairs.push((of(a, "a"), of(b, "b")));
    }
    let mut dice = Dice(1);
    for (kind, (offer, (a, b))) in (0..).zip(offers.iter().zip(&mut pairs)) {
        while !a.write(b, 0, &mut dice) {}
        while a.ended.is_empty() || b.arrived.is_empty() {
            a.poll(b);
            b.poll(a);
        }
        assert_eq!(hostile.lose(&offer.domain, kind), 2);
        while !a.write(b, 1, &mut dice) {}
    }
    let start = Instant::now();
    while pairs.iter().any(|(a, b)| a.is_up() || b.is_up()) {
        for (a, b) in &mut pairs {
            a.poll(b);
            b.poll(a);
        }
        assert!(start.elapsed() < LIMIT, "a lost link is not noticed");
    }
    for (offer, (a, b)) in offers.iter().zip(&mut pairs) {
        let errors = [&a.error, &b.error].map(|error| error.as_ref().expect("lost").to_string());
        eprintln!("{offer}: {errors:?}");
        assert_eq!(a.ended[&1], Err(WriteError::Lost), "{offer}");
        assert!(errors.iter().any(|error| error.contains("lost a write") || error.contains("4111")), "{errors:?}");
    }
    drop((pairs, offers));
    assert_eq!(hostile.violations(true), "");
}

/// Facts of `crossrail doctor --fabric` agree with what the device does.
#[test]
fn tests_of_a_device_find_what_it_does() {
    let _turn = turn();
    let Some(hostile) = Hostile::load() else { return };
    // Slow enough for a registration to be closed while a write arrives.
    let steady = "tx=64,msg=4194304,cuts=8,early=0,eagain=0,withhold=0,null=0,repeat=0";
    for (fence, speed) in [(0, 40), (1, 40)] {
        hostile.begin(11, &format!("{steady},move={speed},fence={fence}"));
        let offer = offers(&hostile, "hostile").expect("usable").swap_remove(0);
        let facts = Test::Fence.run(&offer).expect("it runs");
        assert_eq!((facts["began"], facts["fenced"]), (1.0, f64::from(fence)), "{facts:?}");
        assert_eq!(facts["after_bytes"] > 0.0, fence == 0, "{facts:?}");
        let facts = Test::Key.run(&offer).expect("it runs");
        assert_eq!((facts["written"], facts["refused"], facts["survives"]), (0.0, 1.0, 1.0), "{facts:?}");
        drop(offer);
        assert_eq!(hostile.violations(true), "");
    }
    hostile.begin(12, &format!("{steady},move=256,data=4"));
    let offer = offers(&hostile, "efa").expect("usable").swap_remove(0);
    let facts = Test::Write.run(&offer).expect("it runs");
    assert!(facts["latency_us"] > 0.0 && facts["gb_per_s"] > 0.0, "{facts:?}");
    let facts = Test::Register.run(&offer).expect("it runs");
    assert!(facts["first_ms_per_gib"] > 0.0 && facts["later_ms_per_gib"] > 0.0, "{facts:?}");
    let mut memory = vec![0u8; 3 << 20];
    let extent = Extent::host(memory.as_mut_ptr(), memory.len());
    // SAFETY: the memory outlives the call.
    let facts = unsafe { write_into(&offer, &extent, 0xa7) }.expect("it runs");
    assert_eq!(facts["bytes"], memory.len() as f64);
    assert!(memory.iter().all(|byte| *byte == 0xa7));
    drop(offer);
    assert_eq!(hostile.violations(true), "");
    // A provider that fails is named.
    hostile.begin(13, &format!("{steady},move=255,fail_at=3"));
    let offer = offers(&hostile, "hostile").expect("usable").swap_remove(0);
    let error = Test::Write.run(&offer).expect_err("an operation fails").to_string();
    assert!(error.contains("4111") && error.contains("a write of 8 bytes"), "{error}");
    drop(offer);
    assert_eq!(hostile.violations(true), "");
}
