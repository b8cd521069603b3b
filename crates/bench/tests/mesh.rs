//! Ranks of one process with each other, and the raw sockets beside them.

use std::sync::Mutex;
use std::time::Duration;

use crossrail::{ConnectOptions, Context, Endpoint, ErrorKind, Settings, Worker, WorkerOptions};
use crossrail_bench::{
    AllSamples, MemoryKind, MeshPlan, MeshRank, PairSamples, RawTcpPlan, Role, Session, Unobserved, mesh_all,
    mesh_pair, raw_tcp,
};
use crossrail_types::Result;

const PLAN: MeshPlan =
    MeshPlan { size: 100_001, iters: 3, warmup: 1, window: 4, small: 8, trips: 20, patience: Duration::from_secs(20) };

fn context(transport: &str, devices: Option<&str>) -> Context {
    let mut settings = Settings::default();
    settings.set("tls", transport).unwrap();
    if let Some(devices) = devices {
        settings.set("net_devices", devices).unwrap();
    }
    settings.timeout = Duration::from_secs(20);
    Context::new(settings).unwrap()
}

/// A worker for each rank, and its endpoints by rank.
fn ranks(context: &Context, count: usize) -> Vec<(Worker, Vec<Option<Endpoint>>)> {
    let worker = || Worker::new(context, WorkerOptions::default()).unwrap();
    let mut all: Vec<_> = (0..count).map(|_| (worker(), vec![None; count])).collect();
    for from in 0..count {
        for to in 0..from {
            let dialled = all[from].0.connect(&all[to].0.address(), &ConnectOptions::default()).unwrap();
            let accepted = all[to].0.accept(None).unwrap();
            all[from].1[to] = Some(dialled);
            all[to].1[from] = Some(accepted);
        }
    }
    all
}

fn run(
    context: &Context,
    ranks: &[(Worker, Vec<Option<Endpoint>>)],
    plan: impl Fn(usize) -> MeshPlan + Sync,
) -> Vec<Result<(Vec<PairSamples>, AllSamples)>> {
    let plan = &plan;
    std::thread::scope(|scope| {
        let started: Vec<_> = ranks
            .iter()
            .enumerate()
            .map(|(rank, (worker, peers))| {
                scope.spawn(move || {
                    let memory = if rank == 0 { MemoryKind::Shared } else { MemoryKind::Ordinary };
                    let mine = &mut MeshRank { context, worker, rank, peers, memory, observer: &mut Unobserved };
                    let mut pairs = Vec::new();
                    for pair in (0..peers.len()).flat_map(|from| (0..peers.len()).map(move |to| (from, to))) {
                        if pair.0 != pair.1 {
                            pairs.extend(mesh_pair(mine, pair, plan(rank))?);
                        }
                    }
                    Ok((pairs, mesh_all(mine, plan(rank))?))
                })
            })
            .collect();
        started.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn every_ordered_pair_and_all_at_once() {
    for (transport, count) in [("shm", 3), ("tcp", 3), ("shm", 2)] {
        let context = context(transport, None);
        let ranks = ranks(&context, count);
        for (rank, samples) in run(&context, &ranks, |_| PLAN).into_iter().enumerate() {
            let (pairs, samples) = samples.unwrap();
            let targets: Vec<_> = pairs.iter().map(|pair| pair.target).collect();
            assert_eq!(targets, (0..count).filter(|other| *other != rank).collect::<Vec<_>>());
            for pair in &pairs {
                assert_eq!((pair.rate.samples_us.len(), pair.rate.bytes_per_sample), (3, 4 * 100_001));
                assert!(!pair.latency.samples_us.is_empty());
                assert_eq!(pair.transfer.bytes, 100_001);
                assert!(pair.transfer.lanes.iter().all(|lane| lane.name.starts_with(transport)), "{:?}", pair.transfer);
            }
            assert_eq!(samples.all_us.len(), 3);
            assert!(samples.all_us.iter().all(|us| *us > 0.0));
            assert_eq!(samples.all_bytes, (4 * 100_001 * (count - 1)) as u64);
        }
    }
}

#[test]
fn one_rank_alone_has_nothing_to_measure() {
    let context = context("shm", None);
    let samples = run(&context, &ranks(&context, 1), |_| PLAN).pop().unwrap().unwrap();
    assert_eq!(samples, (Vec::new(), AllSamples::default()));
}

#[test]
fn plans_that_differ_are_a_mismatch_and_ends_that_are_missing_are_usage() {
    let context = context("shm", None);
    let both = ranks(&context, 2);
    for outcome in run(&context, &both, |rank| MeshPlan { size: 1000 + rank, ..PLAN }) {
        assert_eq!(outcome.unwrap_err().kind, ErrorKind::Mismatch);
    }
    let lonely = vec![(both[0].0.clone(), vec![None, None])];
    let outcome = run(&context, &lonely, |_| PLAN).pop().unwrap();
    assert_eq!(outcome.unwrap_err().kind, ErrorKind::Usage);
    let (worker, peers) = &both[0];
    for pair in [(0, 0), (0, 2), (2, 0)] {
        let (context, memory, observer) = (&context, MemoryKind::Ordinary, &mut Unobserved);
        let mine = &mut MeshRank { context, worker, rank: 0, peers, memory, observer };
        assert_eq!(mesh_pair(mine, pair, PLAN).unwrap_err().kind, ErrorKind::Usage);
    }
}

/// The outcome at each end; the driver names `devices`.
fn raw(context: &Context, size: usize, devices: &[&str]) -> Vec<Result<crossrail_bench::RawTcpSamples>> {
    let ranks = ranks(context, 2);
    let plan = |devices: &[&str]| RawTcpPlan {
        size,
        iters: 3,
        devices: devices.iter().map(|name| (*name).to_owned()).collect(),
        channels: 2,
    };
    let ends = Mutex::new(vec![(Role::Echo, plan(&[])), (Role::Driver, plan(devices))]);
    std::thread::scope(|scope| {
        let started: Vec<_> = ranks
            .iter()
            .map(|(worker, peers)| {
                let (role, plan) = ends.lock().unwrap().pop().unwrap();
                scope.spawn(move || {
                    let endpoint = peers.iter().flatten().next().unwrap();
                    let (memory, observer) = (MemoryKind::Ordinary, &mut Unobserved);
                    raw_tcp(&mut Session { context, worker, endpoint, role, memory, observer }, &plan)
                })
            })
            .collect();
        started.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn raw_sockets_use_the_rails() {
    let context = context("tcp", Some("127.0.0.1,127.0.0.2"));
    for size in [0, 1, 5 << 20] {
        let mut ends = raw(&context, size, &["127.0.0.2", "127.0.0.1"]);
        let (echo, driver) = (ends.pop().unwrap().unwrap(), ends.pop().unwrap().unwrap());
        assert_eq!(driver.ways, ["127.0.0.2 -> 127.0.0.2", "127.0.0.1 -> 127.0.0.1"]);
        assert_eq!((driver.samples_us.len(), driver.bytes_per_sample), (3, size as u64));
        assert!(driver.samples_us.iter().all(|us| *us > 0.0));
        assert!(echo.samples_us.is_empty());
    }
}

#[test]
fn a_device_that_is_not_there_fails_both_ends_at_once() {
    let context = context("tcp", Some("127.0.0.1"));
    let began = std::time::Instant::now();
    for outcome in raw(&context, 1, &["nic9"]) {
        assert!(outcome.unwrap_err().to_string().contains("nic9"));
    }
    assert!(began.elapsed() < Duration::from_secs(20));
}
