//! Every target on its corpus and on seeded mutations of it, the same ones every time, on a stable compiler.
//!
//! `make fuzz` looks further: `FUZZ_SECONDS` for each target from `FUZZ_SEED` on, or `FUZZ_RUNS` mutations. A failing input
//! is left in `artifacts/TARGET/`, named in the message, and tried again when it is moved into `corpus/TARGET/`.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crossrail_fuzz::{Rng, TARGETS, Target};

const SEED: u64 = 1;

fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text:?} is no number")),
        Err(_) => default,
    }
}

fn folder(kind: &str, target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(kind).join(target)
}

fn corpus(target: &str) -> Vec<Vec<u8>> {
    let folder = folder("corpus", target);
    let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(!paths.is_empty(), "{} is empty: cargo run -p crossrail-fuzz --bin seed", folder.display());
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

fn run((name, entry): Target, input: &[u8], what: &str) {
    if catch_unwind(AssertUnwindSafe(|| entry(input))).is_err() {
        let folder = folder("artifacts", name);
        let path = folder.join(format!("{what}.bin").replace(' ', "-"));
        fs::create_dir_all(&folder).unwrap();
        fs::write(&path, input).unwrap();
        panic!("target {name} fails on {what}: {} bytes in {}", input.len(), path.display());
    }
}

fn replay(name: &str, runs: u64) {
    let target = *TARGETS.iter().find(|(known, _)| *known == name).unwrap();
    let corpus = corpus(name);
    for (place, input) in corpus.iter().enumerate() {
        run(target, input, &format!("corpus file {place}"));
    }
    let (seed, seconds) = (number("FUZZ_SEED", SEED), number("FUZZ_SECONDS", 0));
    let runs = number("FUZZ_RUNS", if seconds > 0 { u64::MAX } else { runs });
    let end = (seconds > 0).then(|| Instant::now() + Duration::from_secs(seconds));
    let mut rng = Rng::new(seed);
    let mut turns = 0;
    for turn in 0..runs {
        if turn % 64 == 0 && end.is_some_and(|end| Instant::now() >= end) {
            break;
        }
        turns = turn + 1;
        let (base, other) = (rng.below(corpus.len()), rng.below(corpus.len()));
        let input = rng.mutate(&corpus[base], &corpus[other]);
        run(target, &input, &format!("seed {seed} turn {turn}"));
    }
    let frames = if ["protocol", "ends"].contains(&name) {
        format!(", {} frames", crossrail_fuzz::frames())
    } else {
        String::new()
    };
    println!("{name}: seed {seed}: {turns} mutations{frames}");
}

#[test]
fn protocol() {
    replay("protocol", 1_000_000);
}

#[test]
fn handshake() {
    replay("handshake", 200_000);
}

#[test]
fn address() {
    replay("address", 200_000);
}

#[test]
fn settings() {
    replay("settings", 50_000);
}

#[test]
fn gpu() {
    replay("gpu", 200_000);
}

#[test]
fn lists() {
    replay("lists", 200_000);
}

#[test]
fn store() {
    replay("store", 200_000);
}

#[test]
fn ends() {
    replay("ends", 50_000);
}

#[test]
fn admission() {
    replay("admission", 300);
}

#[test]
fn plugin() {
    replay("plugin", 30_000);
}

#[test]
fn placing() {
    replay("placing", 3000);
}

#[test]
fn the_corpora_hold_the_seeds() {
    for (target, name, bytes) in crossrail_fuzz::seeds() {
        let path = folder("corpus", target).join(&name);
        assert!(fs::read(&path).is_ok_and(|file| file == bytes), "{} is stale: cargo run --bin seed", path.display());
    }
}

#[test]
fn fabric() {
    replay("fabric", 200_000);
}
