//! Bounds of what an end holds for objects of one-sided writes, of docs/design/trust.md: with a hundred peers, and those that
//! leave and connect again. Alone in its process: descriptors are the process's.
#![allow(unsafe_code)] // exposes memory of the tests, which outlives the objects

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail::placing::{self, Event, Extent, Imm, Loan, Placing, Post};
use crossrail::{ConnectOptions, Context, Endpoint, Settings, Worker, WorkerOptions};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

const LIMIT: Duration = Duration::from_secs(60);
/// Descriptors of this process, of which objects that only peers open may have a quarter.
const DESCRIPTORS: u64 = 4096;
const PEERS: usize = 100;
const RAIL: &str = "127.0.0.51";
/// Objects of an endpoint.
const OBJECTS: u16 = 16;

fn worker(name: &str, admit: bool) -> Worker {
    let settings = [
        ("CROSSRAIL_TLS", "tcp"),
        ("CROSSRAIL_NET_DEVICES", RAIL),
        ("CROSSRAIL_CHANNELS", "1"),
        ("CROSSRAIL_LOG", "error"),
    ];
    let context = Context::new(Settings::from_pairs(settings).unwrap()).unwrap();
    Worker::new(&context, WorkerOptions { name: Some(name.to_owned()), admit, ..WorkerOptions::default() }).unwrap()
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Number of descriptors once it has not changed for a while: connections arrive by themselves.
fn settled() -> usize {
    let (mut last, mut since, start) = (descriptors(), Instant::now(), Instant::now());
    while since.elapsed() < Duration::from_millis(300) {
        std::thread::sleep(Duration::from_millis(10));
        let now = descriptors();
        if now != last {
            (last, since) = (now, Instant::now());
        }
        assert!(start.elapsed() < LIMIT, "{now} descriptors, and not the last");
    }
    last
}

/// Resident memory of this process in MiB, without what it has freed.
fn resident() -> u64 {
    // SAFETY: returns freed memory to the system.
    unsafe { libc::malloc_trim(0) };
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    (pages.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 4096) >> 20
}

/// Opens all objects that an endpoint may have, at this end alone. They are dropped: the other end keeps the connections.
fn opens_all(endpoint: &Endpoint) {
    for index in 0..OBJECTS {
        // Beyond the limit its connections are closed.
        drop(placing::open(endpoint, index, LIMIT));
    }
}

fn end_of(victim: &Worker, peer: &str) -> Endpoint {
    let is_it = |endpoint: &Endpoint| endpoint.is_alive() && endpoint.peer() == peer;
    let (start, mut found) = (Instant::now(), None);
    while found.is_none() {
        found = victim.endpoints().into_iter().find(is_it);
        assert!(start.elapsed() < LIMIT, "{peer} is not there");
    }
    found.unwrap()
}

fn has_left(victim: &Worker, but: usize) {
    let start = Instant::now();
    while victim.endpoints().iter().filter(|endpoint| endpoint.is_alive()).count() > but {
        assert!(start.elapsed() < LIMIT, "peers have not ended");
        std::thread::yield_now();
    }
}

type Objects = (Box<dyn Placing>, Box<dyn Placing>);

/// An object at both ends. A peer that is first is refused while others have the whole share: then both ask again.
fn objects(victim: &Endpoint, peer: &Endpoint, index: u16) -> Objects {
    for _ in 0..50 {
        let (one, other) = std::thread::scope(|scope| {
            let other = scope.spawn(|| placing::open(victim, index, Duration::from_secs(1)));
            (placing::open(peer, index, LIMIT), other.join().unwrap())
        });
        match (one, other) {
            (Ok(one), Ok(other)) => return (one, other),
            (one, other) => eprintln!("again: {:?}", (one.err(), other.err())),
        }
    }
    panic!("object {index} is not connected");
}

/// An object at both ends, with writes by the peer, which is dropped with one in flight.
fn life(victim: &Endpoint, peer: &Endpoint, index: u16) {
    const LEN: usize = 100_000;
    let mut heap = vec![0u8; LEN];
    let bytes = vec![7u8; LEN];
    let (mut one, mut other) = objects(victim, peer, index);
    let memory = Extent::host(heap.as_mut_ptr(), LEN);
    // SAFETY: the objects are dropped before the memory.
    let key = unsafe { other.expose(&memory, &Arc::new(Loan::default())) }.unwrap();
    let counter = other.count(2).unwrap();
    for piece in 0..2 {
        // SAFETY: as above.
        let posted = unsafe { one.write(&[Extent::host(bytes.as_ptr(), LEN)], &key, 0, Imm { counter, piece }, 0) };
        assert_eq!(posted, Ok(Post::Held));
    }
    let (mut arrived, start) = (0, Instant::now());
    while arrived == 0 {
        one.poll(&mut |_| {}).unwrap();
        other.poll(&mut |event| arrived += usize::from(matches!(event, Event::Arrived(_)))).unwrap();
        assert!(start.elapsed() < LIMIT, "nothing arrives");
    }
}

#[test]
fn objects_of_peers_hold_a_bounded_share_however_often_they_connect() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let most = DESCRIPTORS.min(hard);
    setrlimit(Resource::RLIMIT_NOFILE, most, hard).unwrap();
    let share = most as usize / 4;
    let victim = worker("victim", true);
    let own = worker("many", false);
    let connect = || own.connect(&victim.address(), &ConnectOptions::default()).unwrap();

    // One peer has the objects of one endpoint, with a connection over the rail.
    let first = connect();
    let before = settled();
    opens_all(&first);
    let held = settled() - before;
    assert_eq!(held, usize::from(OBJECTS) * 2, "each object has a connection and a descriptor of its own");
    // Again: these are objects after those, which this end has not asked for either.
    opens_all(&first);
    assert_eq!(settled() - before, held, "the next object of an index, and no other");

    // A hundred of them ask for three times the share.
    let memory = resident();
    let many: Vec<Endpoint> = (0..PEERS).map(|_| connect()).collect();
    let before = settled() - held;
    many.iter().for_each(opens_all);
    let now = settled() - before;
    assert!((share / 2..=share).contains(&now), "{now} descriptors of {share}");
    // An object that both ask for is not concerned.
    let honest = worker("honest", false);
    let to = honest.connect(&victim.address(), &ConnectOptions::default()).unwrap();
    life(&end_of(&victim, "honest"), &to, 0);
    let after = resident();
    assert!(after <= memory + 60, "{memory} -> {after} MiB, of which a hundred endpoints have most");

    // Those that have left hold nothing.
    drop((first, many, to, honest, own));
    has_left(&victim, 0);
    let empty = settled();
    for _ in 0..30 {
        let again = worker("again", false);
        let to = again.connect(&victim.address(), &ConnectOptions::default()).unwrap();
        let ours = end_of(&victim, "again");
        (0..2).for_each(|index| life(&ours, &to, index));
        life(&ours, &to, 0);
        opens_all(&to);
        drop((to, again));
        has_left(&victim, 0);
    }
    let now = settled();
    assert!(now <= empty + 4, "{empty} -> {now} descriptors after 30 peers, one after the other");
    let last = resident();
    assert!(last <= after + 16, "{after} -> {last} MiB");
}
