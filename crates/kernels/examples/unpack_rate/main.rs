//! How fast the unpack kernel is, beside the contiguous copy that is its ceiling: fragments that lie one after the
//! other, in device memory or in pinned host memory, go to places in shuffled order.
//!
//!     cargo run --release -p crossrail-kernels --example unpack_rate -- [FILE]
//!
//! Verified first, then timed by events, the two alternating; a fill of 128 MiB before each sample empties the GPU's
//! cache and keeps the GPU busy until the sample is queued. The table goes to stdout, raw samples to FILE (`-`: stdout).
#![allow(unsafe_code)]

mod environment;

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use crossrail_cuda::nvrtc::{Cache, Compiler, Library, SearchPath};
use crossrail_cuda::{Context, Cuda, DeviceMemory, Event, PinnedMemory, Stream};
use crossrail_kernels::{CopyArgs, Kernels, Piece, ScatterList, UnpackArgs};
use crossrail_types::{Settings, format_size};
use serde_json::{Value, json};

const SIZE: usize = 64 << 20;
const FLUSH: usize = 128 << 20;
const WARMUP: usize = 10;
const ITERATIONS: usize = 200;
const LIMIT: Duration = Duration::from_secs(20);

type Outcome<T> = Result<T, Box<dyn Error>>;

struct Bench {
    stream: Stream,
    kernels: Kernels,
    start: Event,
    end: Event,
    flush: DeviceMemory,
    /// Sources, one of each kind, and the target.
    device: DeviceMemory,
    pinned: PinnedMemory,
    target: DeviceMemory,
    /// Room for lists, and for what comes back to be verified.
    list: PinnedMemory,
    device_list: DeviceMemory,
    back: PinnedMemory,
}

/// One thing to measure beside its ceiling.
#[derive(Clone, Copy)]
struct Case {
    what: &'static str,
    source: &'static str,
    list: &'static str,
    fragment: usize,
    /// By how many bytes sources are moved against their targets' alignment.
    shift: usize,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("unpack_rate: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Outcome<()> {
    let file = std::env::args().nth(1);
    let settings = Settings::from_env()?;
    let cuda = Cuda::load()?;
    let mut places = SearchPath::standard();
    places.add_environment(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv"));
    let compiler = Compiler::new(Library::find(&places)?, Cache::of(&settings).ok());
    let context = Context::primary(&cuda.device(0)?)?;
    let bench = Bench::new(&context, &compiler)?;
    let mut rows = Vec::new();
    println!(
        "{:<8} {:<7} {:<7} {:>8} {:>5} {:>10} {:>10} {:>10} {:>6}",
        "what", "source", "list", "fragment", "shift", "p50 us", "GB/s", "copy GB/s", "ratio"
    );
    for case in cases() {
        let row = bench.row(case)?;
        println!(
            "{:<8} {:<7} {:<7} {:>8} {:>5} {:>10.1} {:>10.1} {:>10.1} {:>6.3}",
            case.what,
            case.source,
            case.list,
            format_size(case.fragment as u64),
            case.shift,
            row["p50_us"].as_f64().unwrap_or_default(),
            row["gb_per_s"].as_f64().unwrap_or_default(),
            row["peers"]["contiguous"]["gb_per_s"].as_f64().unwrap_or_default(),
            row["ratio"]["contiguous"].as_f64().unwrap_or_default(),
        );
        rows.push(row);
    }
    let report = json!({
        "schema": "crossrail-bench/1",
        "environment": environment::capture(&context, &compiler, &settings)?,
        "command": std::env::args().collect::<Vec<_>>(),
        "rows": rows,
    });
    match file.as_deref() {
        Some("-") => println!("{report}"),
        Some(file) => std::fs::write(file, format!("{report:#}\n"))?,
        None => {}
    }
    Ok(())
}

fn cases() -> Vec<Case> {
    let unpack = |source, list, fragment, shift| Case { what: "unpack", source, list, fragment, shift };
    let mut cases = Vec::new();
    for source in ["device", "pinned"] {
        cases.push(Case { what: "copy", source, list: "-", fragment: SIZE, shift: 0 });
        for fragment in [4 << 10, 16 << 10, 64 << 10] {
            cases.push(unpack(source, "device", fragment, 0));
            cases.push(unpack(source, "pinned", fragment, 0));
        }
        cases.push(unpack(source, "pinned", 4 << 10, 1));
    }
    cases
}

impl Bench {
    fn new(context: &Context, compiler: &Compiler) -> Outcome<Bench> {
        let device = |len| DeviceMemory::new(context, len);
        let pinned = |len| PinnedMemory::new(context, len);
        let list = SIZE / 4096 * size_of::<Piece>();
        let bench = Bench {
            stream: Stream::new(context)?,
            kernels: Kernels::load(context, compiler, LIMIT)?,
            start: Event::timed(context)?,
            end: Event::timed(context)?,
            flush: device(FLUSH)?,
            device: device(SIZE + 16)?,
            pinned: pinned(SIZE + 16)?,
            target: device(SIZE)?,
            list: pinned(list)?,
            device_list: device(list)?,
            back: pinned(SIZE)?,
        };
        let mut number = 0x9e37_79b9_7f4a_7c15_u64;
        for at in (0..SIZE + 16).step_by(8) {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // SAFETY: inside the pinned memory, which is aligned and nobody else's.
            unsafe { bench.pinned.as_ptr().add(at).cast::<u64>().write(number ^ (number >> 29)) };
        }
        // SAFETY: both areas are valid until the wait is over.
        unsafe { bench.stream.copy(bench.device.address(), bench.pinned.address(), SIZE + 16)? };
        bench.stream.wait(LIMIT)?;
        Ok(bench)
    }

    fn row(&self, case: Case) -> Outcome<Value> {
        let source = if case.source == "device" { self.device.address() } else { self.pinned.address() };
        let order = shuffled(SIZE / case.fragment);
        let pieces = self.put_list(source, &order, case)?;
        self.verify(source, pieces, &order, case)?;
        let (mut own, mut ceiling) = (Vec::new(), Vec::new());
        for i in 0..WARMUP + ITERATIONS {
            let ours = self.time(|| self.run(source, pieces, case))?;
            // SAFETY: both areas are valid until the wait in `time` is over.
            let copy = self.time(|| unsafe { self.stream.copy(self.target.address(), source, SIZE) })?;
            if i >= WARMUP {
                own.push(ours);
                ceiling.push(copy);
            }
        }
        let mut row = figures(&own);
        let mut peer = figures(&ceiling);
        peer["what"] = json!("cuMemcpyAsync of the whole source");
        let ratio = percentile(&ceiling, 0.5) / percentile(&own, 0.5);
        let facts = json!({
            "what": case.what, "transport": "cuda", "device": "cuda:0", "memory": case.source, "list": case.list,
            "size": SIZE, "fragment": case.fragment, "shift": case.shift, "entries": pieces, "bytes_logical": SIZE,
            "verified": true, "peers": {"contiguous": peer}, "ratio": {"contiguous": ratio},
        });
        if let (Some(row), Value::Object(facts)) = (row.as_object_mut(), facts) {
            row.extend(facts);
        }
        Ok(row)
    }

    /// Writes the case's list to both places, and gives back how long it is.
    fn put_list(&self, source: u64, order: &[usize], case: Case) -> Outcome<u64> {
        let mut list = ScatterList::default();
        for (i, place) in order.iter().enumerate() {
            let from = source + (i * case.fragment + case.shift) as u64;
            list.push(from, self.target.address() + (place * case.fragment) as u64, case.fragment as u64);
        }
        let pieces = list.pieces();
        assert!(size_of_val(pieces) <= self.list.len());
        // SAFETY: the memory is long enough, aligned to a page, and no launch is under way; so for the copy.
        unsafe {
            std::ptr::copy_nonoverlapping(pieces.as_ptr(), self.list.as_ptr().cast(), pieces.len());
            self.stream.copy(self.device_list.address(), self.list.address(), size_of_val(pieces))?;
        }
        self.stream.wait(LIMIT)?;
        Ok(pieces.len() as u64)
    }

    /// Puts the case's work in.
    fn run(&self, source: u64, pieces: u64, case: Case) -> crossrail_types::Result<()> {
        let address = if case.list == "device" { self.device_list.address() } else { self.list.address() };
        // SAFETY: all areas are valid until the caller's wait is over.
        unsafe {
            if case.what == "copy" {
                let args = CopyArgs { dst: self.target.address(), src: source, len: SIZE as u64 };
                self.kernels.copy(&self.stream, &args, None)
            } else {
                self.kernels.unpack(&self.stream, &UnpackArgs { pieces: address, count: pieces }, None)
            }
        }
    }

    fn verify(&self, source: u64, pieces: u64, order: &[usize], case: Case) -> Outcome<()> {
        // SAFETY: the memory is valid until the wait is over.
        unsafe { self.stream.fill(self.target.address(), 0, SIZE)? };
        self.run(source, pieces, case)?;
        // SAFETY: as above; the bytes are read after the wait.
        let (found, sent) = unsafe {
            self.stream.copy(self.back.address(), self.target.address(), SIZE)?;
            self.stream.wait(LIMIT)?;
            let bytes = |memory: &PinnedMemory, len| std::slice::from_raw_parts(memory.as_ptr(), len);
            (bytes(&self.back, SIZE), bytes(&self.pinned, SIZE + 16))
        };
        for (i, place) in order.iter().enumerate() {
            let (from, to) = (i * case.fragment + case.shift, place * case.fragment);
            if found[to..to + case.fragment] != sent[from..from + case.fragment] {
                return Err(format!("{} of {} bytes: fragment {i} is wrong", case.what, case.fragment).into());
            }
        }
        Ok(())
    }

    /// Microseconds that `work` takes on the GPU.
    fn time(&self, work: impl Fn() -> crossrail_types::Result<()>) -> Outcome<f64> {
        // SAFETY: the memory is valid until the wait is over.
        unsafe { self.stream.fill(self.flush.address(), 1, FLUSH)? };
        self.start.record(&self.stream)?;
        work()?;
        self.end.record(&self.stream)?;
        self.end.wait(LIMIT)?;
        Ok(self.end.since(&self.start)?.as_nanos() as f64 / 1e3)
    }
}

/// The numbers below `count` in an order without pattern, the same every time.
fn shuffled(count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    let mut number = 1_u64;
    for i in (1..count).rev() {
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        order.swap(i, (number >> 33) as usize % (i + 1));
    }
    order
}

/// Samples and what they say, in the fields of `crossrail-bench/1`.
fn figures(samples: &[f64]) -> Value {
    let sum: f64 = samples.iter().sum();
    json!({
        "samples_us": samples,
        "p50_us": percentile(samples, 0.5),
        "p99_us": percentile(samples, 0.99),
        "avg_us": sum / samples.len() as f64,
        "min_us": percentile(samples, 0.0),
        "max_us": percentile(samples, 1.0),
        "gb_per_s": SIZE as f64 * samples.len() as f64 / sum / 1e3,
    })
}

/// Interpolated linearly between the two nearest samples.
fn percentile(samples: &[f64], part: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let place = (sorted.len() - 1) as f64 * part;
    let (below, above) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
    below + (above - below) * place.fract()
}
