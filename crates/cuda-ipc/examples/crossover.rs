//! Compares copy engines with a kernel, and pulling with pushing, for copies between GPUs of every size. Its results
//! are the reason why links use copy engines only.
//!
//!     cargo run --release -p crossrail-cuda-ipc --example crossover -- [--gpus 0,1] [--max 64M] [--json FILE]
//!
//! One process, two GPUs. A copy is timed by the host's clock from the call that enqueues it until the host sees the
//! word behind it, as in the engine; rates are those of many consecutive copies. `link` is a complete transfer without
//! the shared-memory lane: describe, open, copy, confirm. Data is verified first. The table goes to stdout, raw samples
//! to FILE (`-`: stdout).
#![allow(unsafe_code)]

#[path = "../../kernels/examples/ep_rate/environment.rs"]
mod environment;

use std::error::Error;
use std::os::fd::OwnedFd;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossrail_cuda::nvrtc::{Compiler, Library, SearchPath};
use crossrail_cuda::{Allocation, Context, Cuda, Mapping, PinnedMemory, Stream};
use crossrail_cuda_ipc::{Gpus, Link};
use crossrail_kernels::{Kernels, PutArgs};
use crossrail_transport::{Copy, Descriptor, Domain, Job, Step};
use crossrail_types::{Settings, format_size, parse_size};
use serde_json::{Value, json};

type Outcome<T> = Result<T, Box<dyn Error>>;

const LIMIT: Duration = Duration::from_secs(30);
const LEAST: usize = 256;
/// Total bytes, and maximum number of copies, in a rate measurement.
const STREAMED: usize = 1 << 30;
const MOST_STREAMED: usize = 256;

/// What makes a copy.
#[derive(Clone, Copy, Debug, PartialEq)]
enum By {
    Engine,
    /// A kernel, with the best number of blocks or at most this many.
    Kernel(Option<u32>),
}

impl By {
    fn name(self) -> String {
        match self {
            By::Engine => "engine".into(),
            By::Kernel(None) => "kernel".into(),
            By::Kernel(Some(blocks)) => format!("kernel{blocks}"),
        }
    }
}

/// A GPU with a stream, a word, and memory that both GPUs can access.
struct Side {
    context: Context,
    stream: Stream,
    kernels: Arc<Kernels>,
    word: PinnedMemory,
    memory: Mapping,
    written: AtomicU64,
}

impl Side {
    fn new(context: &Context, other: &Context, len: usize, settings: &Settings) -> Outcome<Side> {
        let word = PinnedMemory::new(context, 4096)?;
        let stream = Stream::urgent(context)?;
        // SAFETY: it is new, and unused.
        unsafe { std::ptr::write_bytes(word.as_ptr(), 0, word.len()) };
        let both = [context, other];
        let one = context.device().ordinal() == other.device().ordinal();
        let memory = Allocation::new(context, len)?.map(if one { &both[..1] } else { &both })?;
        let kernels = crossrail_kernels::shared(context, settings, LIMIT)?;
        Ok(Side { context: context.clone(), stream, kernels, word, memory, written: AtomicU64::new(0) })
    }

    /// Enqueues a copy and a word behind it; returns the value of the word.
    fn put(&self, by: By, dst: u64, src: u64, len: usize) -> Outcome<u64> {
        let value = self.written.fetch_add(1, Ordering::Relaxed) + 1;
        let signal = self.word.address();
        // SAFETY: both ranges are mapped for this GPU and long enough, and nothing else accesses them until the word is
        // seen.
        unsafe {
            match by {
                By::Kernel(blocks) => {
                    let args = PutArgs { dst, src, len: len as u64, part: 0, signal, value };
                    self.kernels.put(&self.stream, &args, blocks)?;
                    return Ok(value);
                }
                By::Engine => self.stream.copy(dst, src, len)?,
            }
            self.stream.write_value64(signal, value)?;
        }
        Ok(value)
    }

    fn see(&self, value: u64) -> Outcome<()> {
        // SAFETY: the page is mapped and aligned; the GPU writes the word with a single store.
        let word = unsafe { &*self.word.as_ptr().cast::<AtomicU64>() };
        let started = Instant::now();
        let mut turns = 0_u32;
        while word.load(Ordering::Acquire) < value {
            turns = turns.wrapping_add(1);
            if turns.is_multiple_of(1 << 20) && started.elapsed() > LIMIT {
                self.stream.wait(Duration::from_millis(1))?;
                return Err("a copy without end".into());
            }
            std::hint::spin_loop();
        }
        Ok(())
    }
}

struct Rig {
    near: Side,
    far: Side,
}

impl Rig {
    /// A copy by the local GPU.
    fn put(&self, copy: Copy, by: By, len: usize) -> Outcome<u64> {
        Rig::between(&self.near, &self.far, copy, by, len)
    }

    /// A copy by the remote GPU in the other direction, in the other halves, so that the two do not overlap.
    fn put_back(&self, copy: Copy, by: By, len: usize) -> Outcome<u64> {
        Rig::between(&self.far, &self.near, copy, by, len)
    }

    fn between(own: &Side, other: &Side, copy: Copy, by: By, len: usize) -> Outcome<u64> {
        let half = own.memory.len() as u64 / 2;
        // The local first half and the remote second half; the other direction uses the other two halves.
        let (ours, theirs) = (own.memory.address(), other.memory.address() + half);
        match copy {
            Copy::Pull => own.put(by, ours, theirs, len),
            Copy::Push => own.put(by, theirs, ours, len),
        }
    }

    fn verify(&self, copy: Copy, by: By, len: usize) -> Outcome<()> {
        let half = self.far.memory.len() as u64 / 2;
        let (near, far) = (self.near.memory.address(), self.far.memory.address() + half);
        let (from, to) = if copy == Copy::Pull { (far, near) } else { (near, far) };
        let room = PinnedMemory::new(&self.near.context, len)?;
        let bytes: Vec<u8> =
            (0..len).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 13) as u8 ^ by.name().len() as u8).collect();
        let stream = &self.near.stream;
        // SAFETY: memory of the rig and of this call, until the waits have returned.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), room.as_ptr(), len);
            stream.copy(from, room.address(), len)?;
            stream.fill(to, 0x5a, len)?;
            stream.wait(LIMIT)?;
            self.near.see(self.put(copy, by, len)?)?;
            stream.copy(room.address(), to, len)?;
            stream.wait(LIMIT)?;
            if std::slice::from_raw_parts(room.as_ptr(), len) != bytes {
                return Err(format!("{copy:?} of {len} bytes by {}: wrong bytes", by.name()).into());
            }
        }
        Ok(())
    }

    /// Times of single copies in microseconds.
    fn latency(&self, copy: Copy, by: By, len: usize) -> Outcome<Vec<f64>> {
        let (warmup, count) = turns(len);
        let mut samples = Vec::new();
        for turn in 0..warmup + count {
            let started = Instant::now();
            let value = self.put(copy, by, len)?;
            self.near.see(value)?;
            if turn >= warmup {
                samples.push(micros(started.elapsed()));
            }
        }
        Ok(samples)
    }

    /// The rate of consecutive copies in bytes per second, in one direction or of each in both at once.
    fn rate(&self, copy: Copy, by: By, len: usize, both: bool) -> Outcome<f64> {
        let count = (STREAMED / len).clamp(2, MOST_STREAMED);
        let mut best = f64::MAX;
        for _ in 0..3 {
            let started = Instant::now();
            let (mut own, mut other) = (0, 0);
            for _ in 0..count {
                own = self.put(copy, by, len)?;
                if both {
                    other = self.put_back(copy, by, len)?;
                }
            }
            self.near.see(own)?;
            self.far.see(other)?;
            best = best.min(started.elapsed().as_secs_f64());
        }
        Ok((count * len) as f64 / best)
    }
}

fn turns(len: usize) -> (usize, usize) {
    if len <= 1 << 20 { (50, 500) } else { (5, 50) }
}

fn micros(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

/// Both ends of a link.
struct Links {
    near: Link,
    far: Link,
}

impl Links {
    fn pass(from: &mut Link, to: &mut Link) -> Outcome<()> {
        while let Some((note, files)) = from.outgoing() {
            let note = note.to_vec();
            let files: std::io::Result<Vec<OwnedFd>> =
                files.into_iter().map(|file| file.try_clone_to_owned()).collect();
            to.incoming(&note, files?)?;
            from.sent();
        }
        Ok(())
    }

    /// A transfer, from its description to its completion.
    fn transfer(&mut self, copy: Copy, local: u64, remote: u64, len: usize) -> Outcome<()> {
        let (descriptor, _): (Descriptor, _) = self.far.describe(remote as usize as *const u8, len)?;
        Links::pass(&mut self.far, &mut self.near)?;
        let local = local as usize as *mut u8;
        let mut job = Job { slot: None, local, remote: descriptor, len, copy, moved: 0, state: 0, helps: true };
        loop {
            // SAFETY: memory of the rig, which outlives the copy.
            match unsafe { self.near.step(&mut job, usize::MAX) } {
                Step::Done => return Ok(()),
                Step::Failed(why) | Step::Unmapped(why) => return Err(why.into()),
                Step::Waiting | Step::Moved(_) => std::hint::spin_loop(),
            }
        }
    }

    fn latency(&mut self, rig: &Rig, copy: Copy, len: usize) -> Outcome<Vec<f64>> {
        let (warmup, count) = turns(len);
        let remote = rig.far.memory.address() + rig.far.memory.len() as u64 / 2;
        let mut samples = Vec::new();
        for turn in 0..warmup + count {
            let started = Instant::now();
            self.transfer(copy, rig.near.memory.address(), remote, len)?;
            if turn >= warmup {
                samples.push(micros(started.elapsed()));
            }
        }
        Ok(samples)
    }
}

fn percentile(samples: &[f64], part: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(((sorted.len().max(1) - 1) as f64 * part).round() as usize).copied().unwrap_or_default()
}

struct Options {
    gpus: (u32, u32),
    max: usize,
    json: Option<String>,
}

fn options() -> Outcome<Options> {
    let mut options = Options { gpus: (0, 1), max: 64 << 20, json: None };
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{name} needs a value"))?;
        match name.as_str() {
            "--gpus" => {
                let (near, far) = value.split_once(',').ok_or("--gpus takes two numbers, such as 0,1")?;
                options.gpus = (near.parse()?, far.parse()?);
            }
            "--max" => options.max = usize::try_from(parse_size(&value)?)?.max(LEAST),
            "--json" => options.json = Some(value),
            _ => return Err(format!("unknown option {name}; there are --gpus, --max, --json").into()),
        }
    }
    Ok(options)
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("crossover: {error}");
            ExitCode::FAILURE
        }
    }
}

const WAYS: [Copy; 2] = [Copy::Pull, Copy::Push];
const MEANS: [By; 3] = [By::Engine, By::Kernel(None), By::Kernel(Some(32))];

fn run() -> Outcome<()> {
    let options = options()?;
    let settings = Settings::from_env()?;
    let cuda = Cuda::load()?;
    let (near, far) =
        (Context::primary(&cuda.device(options.gpus.0)?)?, Context::primary(&cuda.device(options.gpus.1)?)?);
    if options.gpus.0 != options.gpus.1 {
        near.enable_peer(&far)?;
        far.enable_peer(&near)?;
    }
    let rig = Rig {
        near: Side::new(&near, &far, 2 * options.max, &settings)?,
        far: Side::new(&far, &near, 2 * options.max, &settings)?,
    };
    let gpus = Gpus::new(&cuda, &settings)?;
    let mut links = Links { near: Link::new(Arc::clone(&gpus), LIMIT), far: Link::new(gpus, LIMIT) };
    let sizes = std::iter::successors(Some(LEAST), |size| Some(size * 2)).take_while(|size| *size <= options.max);
    let sizes: Vec<usize> = sizes.collect();
    let mut rows = latencies(&rig, &mut links, &sizes)?;
    rows.extend(rates(&rig, &sizes)?);
    let compiler = Compiler::new(Library::find(&SearchPath::standard())?, None);
    let report = json!({
        "schema": "crossrail-bench/1",
        "environment": environment::capture(&near, &compiler, &settings)?,
        "command": std::env::args().collect::<Vec<_>>(),
        "rows": rows,
    });
    match options.json.as_deref() {
        Some("-") => println!("{report}"),
        Some(file) => std::fs::write(file, format!("{report:#}\n"))?,
        None => {}
    }
    Ok(())
}

fn latencies(rig: &Rig, links: &mut Links, sizes: &[usize]) -> Outcome<Vec<Value>> {
    let (near, far) = (rig.near.context.device().ordinal(), rig.far.context.device().ordinal());
    println!("one copy until the host sees its word, p50 us, by cuda:{near} from and to cuda:{far}");
    print!("{:>8}", "size");
    for way in WAYS {
        MEANS.iter().for_each(|by| print!(" {:>14}", format!("{} {}", word(way), by.name())));
        print!(" {:>14}", format!("{} link", word(way)));
    }
    println!();
    let (mut rows, mut last) = (Vec::new(), [0; 2]);
    for &len in sizes {
        print!("{:>8}", format_size(len as u64));
        for (at, way) in WAYS.into_iter().enumerate() {
            let mut medians = Vec::new();
            for by in MEANS {
                rig.verify(way, by, len)?;
                let samples = rig.latency(way, by, len)?;
                medians.push(percentile(&samples, 0.5));
                print!(" {:>14.2}", percentile(&samples, 0.5));
                rows.push(row("copy", way, &by.name(), len, &samples));
            }
            if medians[1] <= medians[0] {
                last[at] = len;
            }
            let samples = links.latency(rig, way, len)?;
            print!(" {:>14.2}", percentile(&samples, 0.5));
            rows.push(row("link", way, "link", len, &samples));
        }
        println!();
    }
    for (way, size) in WAYS.into_iter().zip(last) {
        match size {
            0 => println!("{}: the engine is faster at every size", word(way)),
            size => println!("{}: the kernel is at least as fast at {}", word(way), format_size(size as u64)),
        }
    }
    Ok(rows)
}

fn rates(rig: &Rig, sizes: &[usize]) -> Outcome<Vec<Value>> {
    println!("\nmany copies one behind the other, GB/s; both: each direction while the other one runs too");
    print!("{:>8}", "size");
    for way in WAYS {
        for by in MEANS {
            print!(" {:>17}", format!("{} {}", word(way), by.name()));
        }
        print!(" {:>17}", format!("both {}", By::Engine.name()));
    }
    println!();
    let mut rows = Vec::new();
    for &len in sizes.iter().filter(|len| **len >= 64 << 10) {
        print!("{:>8}", format_size(len as u64));
        for way in WAYS {
            let alone = MEANS.map(|by| (by, false));
            for (by, both) in alone.into_iter().chain([(By::Engine, true)]) {
                let rate = rig.rate(way, by, len, both)? / 1e9;
                print!(" {rate:>17.1}");
                rows.push(json!({
                    "what": "rate", "transport": "cuda_ipc", "way": word(way), "by": by.name(), "size": len,
                    "both": both, "gb_per_s": rate, "bytes_logical": len,
                }));
            }
        }
        println!();
    }
    Ok(rows)
}

fn word(way: Copy) -> &'static str {
    if way == Copy::Pull { "pull" } else { "push" }
}

fn row(what: &str, way: Copy, by: &str, len: usize, samples: &[f64]) -> Value {
    let sum: f64 = samples.iter().sum();
    let p50 = percentile(samples, 0.5);
    json!({
        "what": what, "transport": "cuda_ipc", "way": word(way), "by": by, "size": len, "bytes_logical": len,
        "verified": true, "samples_us": samples, "p50_us": p50, "p99_us": percentile(samples, 0.99),
        "avg_us": sum / samples.len().max(1) as f64, "min_us": percentile(samples, 0.0),
        "max_us": percentile(samples, 1.0), "gb_per_s": len as f64 / p50.max(f64::MIN_POSITIVE) / 1e3,
    })
}
