//! The loops between two workers of one process.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossrail::{ConnectOptions, Context, Endpoint, ErrorKind, Settings, Worker, WorkerOptions};
use crossrail_bench::{
    BandwidthPlan, LatencyPlan, MemoryKind, Observer, P2pPlan, Role, Session, Unobserved, Verify, bandwidth, latency,
    p2p, stop, write_latency,
};
use crossrail_types::{Error, Result};

struct Pair {
    context: Context,
    ends: [(Worker, Endpoint); 2],
}

fn pair(transport: &str) -> Pair {
    let mut settings = Settings::default();
    settings.set("tls", transport).unwrap();
    settings.timeout = Duration::from_secs(20);
    let context = Context::new(settings).unwrap();
    let worker = || Worker::new(&context, WorkerOptions::default()).unwrap();
    let (a, b) = (worker(), worker());
    let dialled = a.connect(&b.address(), &ConnectOptions::default()).unwrap();
    let accepted = b.accept(None).unwrap();
    Pair { context, ends: [(a, dialled), (b, accepted)] }
}

/// Runs one end each on two threads; the memory kinds differ on purpose.
fn both<T: Send>(pair: &Pair, run: impl Fn(&mut Session<'_>) -> Result<T> + Sync) -> [Result<T>; 2] {
    let roles = [(Role::Driver, MemoryKind::Ordinary), (Role::Echo, MemoryKind::Shared)];
    std::thread::scope(|scope| {
        let started: Vec<_> = pair
            .ends
            .iter()
            .zip(roles)
            .map(|((worker, endpoint), (role, memory))| {
                let (context, run) = (&pair.context, &run);
                scope.spawn(move || {
                    run(&mut Session { context, worker, endpoint, role, memory, observer: &mut Unobserved })
                })
            })
            .collect();
        let outcomes: Vec<_> = started.into_iter().map(|thread| thread.join().unwrap()).collect();
        outcomes.try_into().unwrap_or_else(|_| unreachable!())
    })
}

#[test]
fn latency_of_every_size() {
    for transport in ["shm", "tcp"] {
        let pair = pair(transport);
        for size in [0, 1, 8, 5000, 70_000] {
            let [driver, echo] = both(&pair, |session| latency(session, LatencyPlan { size, iters: 50, warmup: 5 }));
            let (driver, echo) = (driver.unwrap(), echo.unwrap());
            assert_eq!(driver.samples_us.len(), 50usize.div_ceil(driver.batch));
            assert!(driver.samples_us.iter().all(|us| *us > 0.0) && driver.clock_us > 0.0);
            assert_eq!(driver.bytes_per_sample, (size * driver.batch) as u64);
            assert!(echo.samples_us.is_empty());
        }
    }
}

#[test]
fn writes_seen_by_the_other_host_of_every_size() {
    for transport in ["shm", "tcp"] {
        let pair = pair(transport);
        for size in [0, 1, 8, 5000, 70_000] {
            let plan = LatencyPlan { size, iters: 50, warmup: 5 };
            let [driver, echo] = both(&pair, |session| write_latency(session, plan));
            let (driver, echo) = (driver.unwrap(), echo.unwrap());
            assert_eq!(driver.samples_us.len(), 50usize.div_ceil(driver.batch));
            assert!(driver.samples_us.iter().all(|us| *us > 0.0));
            assert_eq!(driver.bytes_per_sample, (size * driver.batch) as u64);
            assert!(echo.samples_us.is_empty());
        }
    }
}

#[test]
fn bandwidth_of_every_size() {
    for transport in ["shm", "tcp"] {
        let pair = pair(transport);
        for (size, window) in [(0, 1), (8, 64), (4096, 64), (100_000, 64), (1 << 20, 4)] {
            let plan = BandwidthPlan { size, iters: 4, warmup: 1, window };
            let [driver, echo] = both(&pair, |session| bandwidth(session, plan));
            let driver = driver.unwrap();
            assert_eq!(driver.samples_us.len(), 4);
            assert_eq!(driver.bytes_per_sample, (size * window) as u64);
            assert!(echo.unwrap().samples_us.is_empty());
        }
    }
}

#[test]
fn p2p_gives_both_ends_the_same_rows() {
    for transport in ["shm", "tcp"] {
        let pair = pair(transport);
        for size in [0, 10, 3_000_001] {
            let [driver, echo] =
                both(&pair, |session| p2p(session, P2pPlan { size, iters: 3, warmup: 1, verify: Verify::Full }));
            let rows = driver.unwrap();
            assert_eq!(rows, echo.unwrap());
            assert_eq!(rows.len(), 3);
            for row in rows {
                for end in [&row.sender, &row.receiver] {
                    assert!(end.us > 0.0 && end.receipt.bytes == size as u64, "{end:?}");
                }
                let carried: u64 = row.sender.receipt.lanes.iter().map(|lane| lane.bytes).sum();
                assert_eq!(carried, size as u64);
            }
        }
    }
}

#[test]
fn different_plans_and_equal_roles_are_a_mismatch_at_both_ends() {
    let pair = pair("shm");
    let sizes = AtomicU64::new(8);
    let outcomes = both(&pair, |session| {
        let size = sizes.fetch_add(1, Ordering::Relaxed) as usize;
        latency(session, LatencyPlan { size, iters: 1, warmup: 0 })
    });
    for outcome in outcomes {
        let error = outcome.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Mismatch);
        assert!(error.detail.contains("size=8") && error.detail.contains("size=9"), "{error}");
    }
    let outcomes = both(&pair, |session| {
        session.role = Role::Echo;
        p2p(session, P2pPlan { size: 1, iters: 1, warmup: 0, verify: Verify::Full })
    });
    for outcome in outcomes {
        assert_eq!(outcome.unwrap_err().kind, ErrorKind::Mismatch);
    }
}

#[test]
fn a_window_out_of_range_is_refused_before_anything_moves() {
    let pair = pair("shm");
    for window in [0, 4097] {
        let [driver, _] =
            both(&pair, |session| bandwidth(session, BandwidthPlan { size: 1, iters: 1, warmup: 0, window }));
        assert_eq!(driver.unwrap_err().kind, ErrorKind::Usage);
    }
}

struct Impatient;

impl Observer for Impatient {
    fn tick(&mut self, _done: u64, _total: u64) -> Result<()> {
        Err(Error::new(ErrorKind::Cancelled, "test", "enough"))
    }
}

#[test]
fn the_observer_ends_a_run_that_waits() {
    let pair = pair("shm");
    let (worker, endpoint) = &pair.ends[0];
    let mut session = Session {
        context: &pair.context,
        worker,
        endpoint,
        role: Role::Driver,
        memory: MemoryKind::Ordinary,
        observer: &mut Impatient,
    };
    let began = std::time::Instant::now();
    let error = latency(&mut session, LatencyPlan { size: 8, iters: 1, warmup: 0 }).unwrap_err();
    assert_eq!((error.kind, error.detail.as_str()), (ErrorKind::Cancelled, "enough"));
    assert!(began.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_peer_that_dies_ends_the_run() {
    let pair = pair("tcp");
    let (worker, endpoint) = pair.ends[0].clone();
    let context = pair.context.clone();
    let running = std::thread::spawn(move || {
        let (context, worker, endpoint) = (&context, &worker, &endpoint);
        let (role, memory) = (Role::Driver, MemoryKind::Ordinary);
        let mut session = Session { context, worker, endpoint, role, memory, observer: &mut Unobserved };
        latency(&mut session, LatencyPlan { size: 8, iters: 1, warmup: 0 })
    });
    pair.ends[1].0.close().unwrap();
    let error = running.join().unwrap().unwrap_err();
    assert!(matches!(error.kind, ErrorKind::PeerDead | ErrorKind::Closed), "{error}");
    assert_eq!(error.waited, None, "no wait reached its limit: {error}");
}

/// Stops the run at its first report.
struct Stops;

impl Observer for Stops {
    fn tick(&mut self, done: u64, _total: u64) -> Result<()> {
        if done > 0 { Err(stop()) } else { Ok(()) }
    }
}

#[test]
fn a_stopped_p2p_returns_what_it_has_measured() {
    let pair = pair("shm");
    let plan = P2pPlan { size: 8 << 20, iters: 1_000_000, warmup: 0, verify: Verify::None };
    let (worker, endpoint) = pair.ends[1].clone();
    let context = pair.context.clone();
    let echo = std::thread::spawn(move || {
        let (context, worker, endpoint) = (&context, &worker, &endpoint);
        let (role, memory) = (Role::Echo, MemoryKind::Ordinary);
        p2p(&mut Session { context, worker, endpoint, role, memory, observer: &mut Unobserved }, plan)
    });
    let (worker, endpoint) = &pair.ends[0];
    let (role, memory) = (Role::Driver, MemoryKind::Ordinary);
    let mut session = Session { context: &pair.context, worker, endpoint, role, memory, observer: &mut Stops };
    let rows = p2p(&mut session, plan).unwrap();
    assert!(!rows.is_empty() && rows.len() < plan.iters);
    assert!(rows.iter().all(|row| row.sender.us > 0.0 && row.sender.receipt.bytes == plan.size as u64));
    worker.close().unwrap();
    assert!(echo.join().unwrap().is_err(), "the other end is left in the middle of the run");
}

#[test]
fn quick_verification_covers_the_first_and_the_last_transfer() {
    let pair = pair("shm");
    for verify in [Verify::Quick, Verify::None] {
        let plan = P2pPlan { size: 100_000, iters: 3, warmup: 1, verify };
        let [driver, echo] = both(&pair, |session| p2p(session, plan));
        assert_eq!(driver.unwrap(), echo.unwrap());
    }
}

#[test]
fn different_verification_is_a_mismatch() {
    let pair = pair("shm");
    for outcome in both(&pair, |session| {
        let verify = if session.role == Role::Driver { Verify::Full } else { Verify::None };
        p2p(session, P2pPlan { size: 1, iters: 1, warmup: 0, verify })
    }) {
        assert_eq!(outcome.unwrap_err().kind, ErrorKind::Mismatch);
    }
}
