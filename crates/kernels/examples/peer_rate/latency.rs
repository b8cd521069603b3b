//! How soon a put is seen, between the first two GPUs:
//!
//! - `stream`: half a round trip of streams that wait for each other's puts; no host takes part;
//! - `kernel`: from the host's call until a kernel that waits on the other GPU has seen the signal (and said so);
//! - `host`: from the host's call until the host has seen the signal, which is in its own memory.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crossrail_cuda::PinnedMemory;
use crossrail_kernels::{FLAG_REACHED, FlagAwaitArgs, PutArgs};
use crossrail_types::format_size;
use serde_json::{Value, json};

use crate::rig::{LIMIT, Link, Rig, Way};
use crate::{Outcome, figures, percentile, with};

const SIZES: [usize; 7] = [0, 4 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10, 1 << 20];
const WARMUP: usize = 20;
const SAMPLES: usize = 200;
/// Round trips of one sample of `stream`.
const TRIPS: u64 = 50;
const STREAM_SAMPLES: usize = 20;

struct Bench<'a> {
    rig: &'a Rig,
    there: &'a Link,
    back: &'a Link,
    /// A word of the host's that kernels set.
    word: PinnedMemory,
    /// What the last signal was: they only grow.
    value: u64,
}

pub(crate) fn rows(rig: &Rig) -> Outcome<Vec<Value>> {
    let word = PinnedMemory::new(&rig.gpus[0].context, 4096)?;
    let mut bench = Bench { rig, there: rig.push(0, 1)?, back: rig.push(1, 0)?, word, value: 1 };
    println!("\n{:<7} {:<14} {:>7} {:>10} {:>10} {:>10}", "seen by", "how", "size", "p50 us", "min us", "p99 us");
    let mut rows = Vec::new();
    for size in SIZES {
        let ways: &[Way] = if size > 32 << 10 { &[Way::Put, Way::PutTwice] } else { &[Way::Put] };
        for way in ways {
            for seen in ["stream", "kernel", "host"] {
                let samples = match seen {
                    "stream" => bench.stream(*way, size)?,
                    _ => bench.called(*way, size, seen == "kernel")?,
                };
                rows.push(row(seen, *way, size, &samples));
            }
        }
    }
    Ok(rows)
}

fn row(seen: &str, way: Way, size: usize, samples: &[f64]) -> Value {
    println!(
        "{seen:<7} {:<14} {:>7} {:>10.2} {:>10.2} {:>10.2}",
        way.name(),
        format_size(size as u64),
        percentile(samples, 0.5),
        percentile(samples, 0.0),
        percentile(samples, 0.99),
    );
    let facts = json!({
        "what": "peer_latency", "transport": "cuda", "method": way.name(), "seen_by": seen, "size": size, "gpus": 2,
        "bytes_logical": size,
    });
    with(figures(samples), facts)
}

impl Bench<'_> {
    fn put(&self, link: &Link, way: Way, len: usize, signal: (u64, u64)) -> Outcome<()> {
        let gpu = &self.rig.gpus[link.from];
        let args = PutArgs {
            dst: self.rig.target(link)?,
            src: gpu.source.address(),
            len: len as u64,
            part: 0,
            signal: signal.0,
            value: signal.1,
            counter: if way == Way::Put { link.counter.address() } else { 0 },
        };
        // SAFETY: all areas live as long as the rig, and every sample is waited for before the next begins.
        unsafe { gpu.kernels.put(&link.stream, &args, None)? };
        Ok(())
    }

    /// Has `link`'s stream wait for the signal of the opposite link; what it says goes to `outcome`.
    fn wait(&self, link: &Link, opposite: &Link, value: u64, outcome: u64) -> Outcome<()> {
        let args = FlagAwaitArgs { flag: self.rig.signal(opposite), value, limit_ns: LIMIT.as_nanos() as u64, outcome };
        // SAFETY: as in `put`.
        unsafe { self.rig.gpus[link.from].kernels.flag_await(&link.stream, &args)? };
        Ok(())
    }

    fn word(&self) -> &AtomicU64 {
        // SAFETY: an aligned word of our own memory, that the host touches by atomics alone.
        unsafe { AtomicU64::from_ptr(self.word.as_ptr().cast()) }
    }

    /// Half round trips in microseconds. Each side's next put is queued behind its wait for the other's.
    fn stream(&mut self, way: Way, size: usize) -> Outcome<Vec<f64>> {
        // Two outcomes that nobody reads, each written by one GPU.
        let unread = [self.word.address() + 1024, self.word.address() + 2048];
        let mut samples = Vec::new();
        for i in 0..2 + STREAM_SAMPLES {
            let first = self.value + 1;
            self.value += TRIPS;
            let time = self.rig.timed(&[self.there, self.back], |link| {
                let (opposite, begins) = if link.from == 0 { (self.back, true) } else { (self.there, false) };
                for value in first..first + TRIPS {
                    if begins {
                        self.put(link, way, size, (self.rig.signal(link), value))?;
                    }
                    self.wait(link, opposite, value, unread[link.from])?;
                    if !begins {
                        self.put(link, way, size, (self.rig.signal(link), value))?;
                    }
                }
                Ok(())
            })?;
            if i >= 2 {
                samples.push(time / TRIPS as f64 / 2.0);
            }
        }
        Ok(samples)
    }

    /// Microseconds from the call until the host knows: by the signal itself, or by what a kernel on the other GPU,
    /// which waits for it, has said.
    fn called(&mut self, way: Way, size: usize, by_kernel: bool) -> Outcome<Vec<f64>> {
        let mut samples = Vec::new();
        for i in 0..WARMUP + SAMPLES {
            self.value += 1;
            self.word().store(0, Ordering::Release);
            let (signal, expected) = if by_kernel {
                self.wait(self.back, self.there, self.value, self.word.address())?;
                // The kernel waits already when this time is over.
                let queued = Instant::now();
                while queued.elapsed().as_micros() < 30 {
                    std::hint::spin_loop();
                }
                ((self.rig.signal(self.there), self.value), FLAG_REACHED)
            } else {
                ((self.word.address(), self.value), self.value)
            };
            let started = Instant::now();
            self.put(self.there, way, size, signal)?;
            while self.word().load(Ordering::Acquire) != expected {
                if started.elapsed() > LIMIT {
                    return Err(format!("a put of {size} bytes was never seen").into());
                }
                std::hint::spin_loop();
            }
            let time = started.elapsed();
            self.there.stream.wait(LIMIT)?;
            self.back.stream.wait(LIMIT)?;
            if i >= WARMUP {
                samples.push(time.as_nanos() as f64 / 1e3);
            }
        }
        Ok(samples)
    }
}
