//! How long the built-in store takes, over loopback: `cargo run --release --example store_latency [ROUNDS]`.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use crossrail_control::{Expected, StoreServer, open};
use crossrail_types::{Result, Settings};

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Prints what one round of `step` takes, over `rounds` of them.
fn measure(name: &str, rounds: usize, mut step: impl FnMut(usize) -> Result<()>) -> Result<()> {
    let mut samples = Vec::with_capacity(rounds);
    for round in 0..rounds {
        let begun = Instant::now();
        step(round)?;
        samples.push(begun.elapsed());
    }
    report(name, samples);
    Ok(())
}

fn report(name: &str, mut samples: Vec<Duration>) {
    samples.sort();
    let at = |part: usize| samples[(samples.len() - 1) * part / 100].as_secs_f64() * 1e6;
    println!("{name:<40} p50 {:>8.1} us   p99 {:>8.1} us   max {:>8.1} us", at(50), at(99), at(100));
}

fn main() -> Result<()> {
    let rounds = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(5_000).max(1);
    let settings = Settings::default();
    let server = StoreServer::start("127.0.0.1:0", &settings)?;
    let store = open(&server.address(), &settings, soon())?;
    let lease = store.grant(Duration::from_secs(1), soon())?;
    let value = [7; 64];
    measure("put, 64 bytes", rounds, |_| store.put("a", &value, None, soon()).map(drop))?;
    measure("put, 64 bytes, under a lease", rounds, |_| store.put("l", &value, Some(lease.id()), soon()).map(drop))?;
    measure("put, 64 KiB", rounds, |_| store.put("b", &[7; 64 << 10], None, soon()).map(drop))?;
    measure("get, 64 bytes", rounds, |_| store.get("a", soon()).map(drop))?;
    let there = vec!["a".to_owned()];
    measure("wait, key is there", rounds, |_| store.wait(&there, soon()).map(drop))?;
    let mut last = store.compare_and_set("c", Expected::Absent, b"", None, soon())?;
    measure("compare-and-set", rounds, |_| {
        last = store.compare_and_set("c", last.map_or(Expected::Absent, Expected::At), b"", None, soon())?;
        Ok(())
    })?;
    measure("open and close", rounds.min(1_000), |_| open(&server.address(), &settings, soon()).map(drop))?;
    let (_, now) = store.list("", soon())?;
    let mut watch = store.watch("w/", now, soon())?;
    measure("put until the watch has it", rounds, |_| {
        store.put("w/a", &value, None, soon())?;
        watch.next(soon()).map(drop)
    })?;
    for ranks in [2, 8, 32] {
        barriers(&server.address(), &settings, ranks, rounds.min(1_000))?;
    }
    Ok(())
}

/// Each of `ranks` threads, with a client of its own, puts one key and waits for those of all.
fn barriers(address: &str, settings: &Settings, ranks: usize, rounds: usize) -> Result<()> {
    let begin = Barrier::new(ranks);
    let samples = thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                let begin = &begin;
                scope.spawn(move || {
                    let store = open(address, settings, soon())?;
                    begin.wait();
                    let mut samples = Vec::with_capacity(rounds);
                    for round in 0..rounds {
                        let begun = Instant::now();
                        store.put(&format!("barrier/{ranks}/{round}/{rank}"), b"", None, soon())?;
                        let all: Vec<_> = (0..ranks).map(|rank| format!("barrier/{ranks}/{round}/{rank}")).collect();
                        store.wait(&all, soon())?;
                        samples.push(begun.elapsed());
                    }
                    Ok(samples)
                })
            })
            .collect();
        threads.into_iter().filter_map(|thread| thread.join().ok()).collect::<Result<Vec<_>>>()
    })?;
    report(&format!("barrier of {ranks}: put and wait"), samples.concat());
    Ok(())
}
