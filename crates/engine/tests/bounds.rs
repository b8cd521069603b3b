//! Bounds of what peers can make a worker hold, of docs/design/trust.md: however often they leave and connect again, and however many
//! they are. Descriptors are tried elsewhere (crates/shm/tests/many_lanes.rs, tests/python/test_worker_bounds.py), lists and
//! notices in the tests of the tables that count them.

#![allow(unsafe_code)] // memory that many operations share

use std::time::Duration;

use crossrail::{
    Buffer, ConnectOptions, Context, Endpoint, ErrorKind, Region, RegionKey, Settings, Worker, WorkerOptions, hold_lock,
};

const LIMIT: Option<Duration> = Some(Duration::from_secs(20));
const PEERS: usize = 100;
static LONG: [u8; 256 << 10] = [1; 256 << 10];
/// Immediates that are counted of a region.
const IMMEDIATES: u32 = 65_536;

/// One row of the table.
struct Row {
    what: &'static str,
    /// The actions of one connection.
    attack: fn(&Worker, &Endpoint, &RegionKey, u32),
    /// Growth of the process at most, in MiB.
    most: u64,
    /// Number of connections, one after the other.
    times: usize,
}

const ROWS: [Row; 3] = [
    // 0.8 MiB each time: within the credit.
    Row { what: "unexpected messages", attack: leave_messages, most: 64 + 40, times: 160 },
    Row { what: "operations in flight", attack: leave_operations, most: 40, times: PEERS },
    Row { what: "immediates", attack: count_immediates, most: 40, times: PEERS },
];

fn leave_messages(_: &Worker, to: &Endpoint, key: &RegionKey, number: u32) {
    for _ in 0..100 {
        drop(to.send(vec![1; 8 << 10], u64::from(number)).unwrap());
    }
    // The stream keeps its order: they have arrived when this has.
    to.write(vec![0; 8], key, 0, None).unwrap().wait(LIMIT).unwrap();
}

/// Long messages without a receive, as many as may be in flight.
fn leave_operations(_: &Worker, to: &Endpoint, key: &RegionKey, number: u32) {
    for _ in 0..1000 {
        // SAFETY: it is only read, and stays.
        let long = unsafe { Buffer::raw(LONG.as_ptr().cast_mut(), LONG.len(), None) };
        drop(to.send(long, u64::from(number)).unwrap());
    }
    to.write(vec![0; 8], key, 0, None).unwrap().wait(LIMIT).unwrap();
}

fn count_immediates(_: &Worker, to: &Endpoint, key: &RegionKey, number: u32) {
    for imm in 0..999 {
        drop(to.write(vec![0; 8], key, 0, Some(number * 1000 + imm)).unwrap());
    }
    to.write(vec![0; 8], key, 0, Some(number * 1000 + 999)).unwrap().wait(LIMIT).unwrap();
}

fn worker(name: &str, tls: &str, admit: bool) -> Worker {
    let pairs = [("CROSSRAIL_TLS", tls), ("CROSSRAIL_LOG", "error")];
    let context = Context::new(Settings::from_pairs(pairs).unwrap()).unwrap();
    Worker::new(&context, WorkerOptions { name: Some(name.to_owned()), admit, ..WorkerOptions::default() }).unwrap()
}

/// Resident memory of this process in MiB, without what it has freed.
fn resident() -> u64 {
    // SAFETY: returns freed memory to the system.
    unsafe { libc::malloc_trim(0) };
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    (pages.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 4096) >> 20
}

/// The peer has no more than its entry at the victim.
fn has_gone(victim: &Worker) {
    let until = std::time::Instant::now() + Duration::from_secs(20);
    while victim.endpoints().iter().any(Endpoint::is_alive) {
        assert!(std::time::Instant::now() < until, "the peer has not ended");
        hold_lock(victim, Duration::ZERO);
        std::thread::yield_now();
    }
}

fn connected(tls: &str, victim: &Worker) -> (Worker, Endpoint) {
    let peer = worker("peer", tls, false);
    let to = peer.connect(&victim.address(), &ConnectOptions::default()).unwrap();
    (peer, to)
}

fn tried(tls: &str, row: &Row) -> (Worker, Region) {
    let victim = worker("victim", tls, true);
    let region = victim.register(vec![0; 64]).unwrap();
    let key = region.key();
    for number in 0..5 {
        // What the first ones allocate stays.
        let (peer, to) = connected(tls, &victim);
        (row.attack)(&peer, &to, &key, number);
        drop((to, peer));
        has_gone(&victim);
    }
    let before = resident();
    for number in 5..row.times {
        let (peer, to) = connected(tls, &victim);
        (row.attack)(&peer, &to, &key, number as u32);
        drop((to, peer));
        has_gone(&victim);
    }
    let after = resident();
    assert!(after <= before + row.most, "{}, {tls}, one by one: {before} -> {after} MiB", row.what);
    let all: Vec<_> = (0..PEERS)
        .map(|number| {
            let (peer, to) = connected(tls, &victim);
            (row.attack)(&peer, &to, &key, number as u32);
            (peer, to)
        })
        .collect();
    drop(all);
    has_gone(&victim);
    let after = resident();
    assert!(after <= before + row.most, "{}, {tls}, together: {before} -> {after} MiB", row.what);
    (victim, region)
}

#[test]
fn peers_that_leave_and_connect_again_hold_no_more() {
    for tls in ["shm", "tcp"] {
        for row in &ROWS {
            let (victim, region) = tried(tls, row);
            if row.what == "immediates" {
                let error = region.wait_imm(u32::MAX, 1, Some(Duration::ZERO)).unwrap_err();
                assert_eq!(error.kind, ErrorKind::Exhausted, "{tls}: more than {IMMEDIATES} are counted: {error}");
            }
            drop((region, victim));
        }
    }
}
