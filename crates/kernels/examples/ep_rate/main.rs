//! How long dispatch and combine take on GPUs of one machine that reach each other: one rank for each, all in this
//! process.
//!
//!     cargo run --release -p crossrail-kernels --example ep_rate -- [--layout expert|rank] [--gpus N] [--tokens LIST]
//!         [--hidden N] [--topk N] [--experts N] [--payload LIST] [--blocks LIST] [--threads LIST] [--iters N] [--link GB/S]
//!         [--early] [--apart] [--marks] [--json FILE]
//!     expert layout: [--no-prereduce] [--weights dispatch|combine] [--scales column|row] [--piece LIST]
//!         [--senders LIST] [--receive-from LIST] [--back-threads LIST] [--back-stages LIST] [--wire bf16|logfmt10|fp8]
//!         [--floor]
//!     rank layout: [--movers LIST] [--split LIST] [--queue LIST] [--counted] [--granted]
//!
//! Lists (`128,64`) are tried in all combinations; 0 is what suits. Results are verified, then timed: `cold` after the
//! second cache was overwritten and all ranks have met, each step alone; `pair` back to back. The slowest rank counts.
//! Payloads are fp8, bf16, and, in the rank layout, cast: fp8 of bf16 rows, where fp8 rows are given as such otherwise.
//! `--floor`: what events and the shortest of launches take. `--early`: kernels are launched before those before them have ended. `--apart`: phases are launches of their own. `--marks`: what
//! the blocks of one iteration note on their way, with kernels compiled to note it. `--link`: the most that leaves a GPU, for the time that a step's bytes take
//! at least. `--split`: blocks that send in a combine while the others add. `--queue`: KiB of rows under way at most.
//! `--wire`: what a combine carries. `--counted`: the host is told how much came. `--granted`: places are granted, few tokens or not. The table goes to stdout, raw samples to FILE.
#![allow(unsafe_code)]

mod environment;
mod expert;
mod marks;
mod place;
mod rank;
mod routing;
mod timing;

use std::error::Error;
use std::process::ExitCode;

use crossrail_cuda::nvrtc::{Cache, Compiler, Library, SearchPath};
use crossrail_cuda::{Context, Cuda, Device};
use crossrail_kernels::ep::{EP_WIRE_BF16, Layout, Payload, Scale, Shape, Tuning};
use crossrail_kernels::sources;
use crossrail_types::Settings;
use serde_json::{Value, json};

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    let outcome = run();
    // The driver must not go while memory is still given back to it.
    crossrail_cuda::wait_for_releases(place::LIMIT);
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ep_rate: {error}");
            ExitCode::FAILURE
        }
    }
}

/// How long a step took, by iteration.
struct Step {
    name: &'static str,
    samples: Vec<f64>,
    /// Bytes that leave a rank, on average, where they are the same each time.
    wire_bytes: Option<u64>,
}

impl Step {
    fn new(name: &'static str, samples: Vec<f64>) -> Step {
        Step { name, samples, wire_bytes: None }
    }

    fn gb_per_s(&self) -> Option<f64> {
        self.wire_bytes.map(|bytes| bytes as f64 / median(&self.samples) / 1e3)
    }
}

/// The ranks of a job, in one layout.
trait Trial {
    fn context(&self) -> &Context;
    fn most_blocks(&self) -> u32;
    /// Verifies and times, with that many blocks.
    fn measure(&self, tokens: u32, blocks: u32, iters: usize) -> Outcome<Vec<Step>>;
    /// After a trial that failed and ended: as new.
    fn recover(&self) -> Outcome<()>;
}

/// Ranks, and what is set of a launch.
struct Variant {
    split: u32,
    queue: u32,
    trial: Box<dyn Trial>,
}

/// What was asked for.
struct Asked {
    layout: Layout,
    gpus: usize,
    tokens: Vec<u32>,
    hidden: u32,
    topk: u32,
    experts: Option<u32>,
    payload: Vec<Carried>,
    prereduce: bool,
    blocks: Vec<u32>,
    threads: Vec<u32>,
    piece: Vec<u32>,
    senders: Vec<u32>,
    receive_from: Vec<u32>,
    back_threads: Vec<u32>,
    back_stages: Vec<u32>,
    movers: Vec<u32>,
    split: Vec<u32>,
    queue: Vec<u32>,
    granted: bool,
    early: bool,
    expert: expert::Options,
    rank: rank::Options,
    iters: usize,
    link: Option<f64>,
    json: Option<String>,
}

impl Default for Asked {
    fn default() -> Asked {
        Asked {
            layout: Layout::Expert,
            gpus: 4,
            tokens: Vec::new(),
            hidden: 7168,
            topk: 8,
            experts: None,
            payload: vec![Carried::Fp8],
            prereduce: true,
            blocks: vec![0],
            threads: vec![0],
            piece: vec![0],
            senders: vec![0],
            receive_from: vec![0],
            back_threads: vec![0],
            back_stages: vec![0],
            movers: vec![0],
            split: vec![0],
            queue: vec![0],
            granted: false,
            early: false,
            expert: expert::Options {
                late_weights: true,
                column_scales: true,
                apart: false,
                marks: false,
                floor: false,
                wire: EP_WIRE_BF16,
            },
            rank: rank::Options { fp8_input: true, counted: false, split: 0, queue: 0, apart: false, marks: false },
            iters: 30,
            link: None,
            json: None,
        }
    }
}

impl Asked {
    fn read() -> Outcome<Asked> {
        let mut asked = Asked::default();
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| format!("{word} wants a value"));
            match word.as_str() {
                "--layout" => asked.layout = [Layout::Expert, Layout::Rank][one_of(&value()?, ["expert", "rank"])?],
                "--gpus" => asked.gpus = value()?.parse()?,
                "--tokens" => asked.tokens = list(&value()?)?,
                "--hidden" => asked.hidden = value()?.parse()?,
                "--topk" => asked.topk = value()?.parse()?,
                "--experts" => asked.experts = Some(value()?.parse()?),
                "--payload" => asked.payload = value()?.split(',').map(payload).collect::<Outcome<_>>()?,
                "--no-prereduce" => asked.prereduce = false,
                "--weights" => asked.expert.late_weights = one_of(&value()?, ["combine", "dispatch"])? == 0,
                "--scales" => asked.expert.column_scales = one_of(&value()?, ["column", "row"])? == 0,
                "--blocks" => asked.blocks = list(&value()?)?,
                "--threads" => asked.threads = list(&value()?)?,
                "--piece" => asked.piece = list(&value()?)?,
                "--wire" => asked.expert.wire = one_of(&value()?, ["bf16", "logfmt10", "fp8"])? as u32,
                "--senders" => asked.senders = list(&value()?)?,
                "--receive-from" => asked.receive_from = list(&value()?)?,
                "--back-threads" => asked.back_threads = list(&value()?)?,
                "--back-stages" => asked.back_stages = list(&value()?)?,
                "--apart" => (asked.expert.apart, asked.rank.apart) = (true, true),
                "--marks" => (asked.expert.marks, asked.rank.marks) = (true, true),
                "--floor" => asked.expert.floor = true,
                "--link" => asked.link = Some(value()?.parse()?),
                "--movers" => asked.movers = list(&value()?)?,
                "--split" => asked.split = list(&value()?)?,
                "--queue" => asked.queue = list(&value()?)?,
                "--early" => asked.early = true,
                "--granted" => asked.granted = true,
                "--counted" => asked.rank.counted = true,
                "--iters" => asked.iters = value()?.parse()?,
                "--json" => asked.json = Some(value()?),
                _ => return Err(format!("{word} is not known").into()),
            }
        }
        if asked.tokens.is_empty() {
            asked.tokens = vec![if asked.layout == Layout::Expert { 128 } else { 4096 }];
        }
        Ok(asked)
    }

    /// Every tuning to try.
    fn tunings(&self) -> Vec<Tuning> {
        let mut all =
            vec![Tuning { marks: self.expert.marks, granted: self.granted, early: self.early, ..Tuning::default() }];
        let mut each = |values: &[u32], set: fn(&mut Tuning, u32)| {
            let with = |tuning: &Tuning, value: u32| {
                let mut tuning = *tuning;
                set(&mut tuning, value);
                tuning
            };
            all = values
                .iter()
                .flat_map(|value| all.iter().map(|tuning| with(tuning, *value)).collect::<Vec<_>>())
                .collect();
        };
        if self.layout == Layout::Rank {
            each(&self.threads, |tuning, value| tuning.rank_threads = value);
            each(&self.movers, |tuning, value| tuning.rank_movers = value);
        } else {
            each(&self.back_threads, |tuning, value| tuning.back_threads = value);
            each(&self.back_stages, |tuning, value| tuning.back_stages = value);
            each(&self.receive_from, |tuning, value| tuning.receive_from = value);
            each(&self.senders, |tuning, value| tuning.senders = value);
            each(&self.threads, |tuning, value| tuning.threads = value);
            each(&self.piece, |tuning, value| tuning.piece = value);
        }
        all
    }

    /// Every trial of a tuning: its ranks, how many blocks send in a combine, and what may be under way.
    fn trials(&self, devices: &[Device], compiler: &Compiler, shape: Shape, carried: Carried) -> Outcome<Vec<Variant>> {
        if self.layout == Layout::Expert {
            let rig = expert::Rig::new(devices, compiler, shape, self.expert)?;
            return Ok(vec![Variant { split: 0, queue: 0, trial: Box::new(rig) }]);
        }
        let options = rank::Options { fp8_input: carried == Carried::Fp8, ..self.rank };
        let rig = rank::Rig::new(devices, compiler, shape, options)?;
        let pairs = self.split.iter().flat_map(|split| self.queue.iter().map(|queue| (*split, *queue)));
        let variant = |(split, queue)| Variant {
            split,
            queue,
            trial: Box::new(rig.with(rank::Options { split, queue, ..options })),
        };
        Ok(pairs.map(variant).collect())
    }

    /// Compiles the kernels of all trials at once, for those that then look for them in the cache. What is wrong is said
    /// by the trial.
    fn compile(&self, cuda: &Cuda, compiler: &Compiler, tunings: &[Tuning]) -> Outcome<()> {
        let devices = cuda.devices()?;
        let arch = devices.first().ok_or("there is no GPU")?.arch()?;
        let ranks = devices.len().min(self.gpus) as u32;
        let most = self.tokens.iter().copied().max().unwrap_or(1);
        let shapes = self.payload.iter().flat_map(|carried| tunings.iter().map(|one| (*carried, *one)));
        let shapes = shapes.map(|(carried, tuning)| self.shape(ranks, most, carried, tuning));
        std::thread::scope(|scope| {
            for shape in shapes.filter(|shape| shape.check().is_ok()) {
                scope.spawn(move || {
                    let (source, defines) = match self.layout {
                        Layout::Expert => (sources::EP_EXPERT, shape.defines(sources::has_bulk(arch))),
                        Layout::Rank if shape.slotted() => {
                            (sources::EP_SLOTS, shape.slot_defines(sources::has_bulk(arch)))
                        }
                        Layout::Rank => (sources::EP_RANK, shape.rank_defines(sources::has_bulk(arch))),
                    };
                    let options: Vec<&str> = defines.iter().map(String::as_str).collect();
                    let _ = compiler.compile(&source, arch, &options, place::LIMIT);
                });
            }
        });
        Ok(())
    }

    fn shape(&self, ranks: u32, max_tokens: u32, carried: Carried, tuning: Tuning) -> Shape {
        Shape {
            hidden: self.hidden,
            topk: self.topk,
            experts: self.experts.unwrap_or(if self.layout == Layout::Expert { 288 } else { 256 }),
            ranks,
            max_tokens,
            payload: if carried == Carried::Bf16 { Payload::Bf16 } else { Payload::Fp8(Scale::F32) },
            prereduce: self.prereduce,
            expert_layout: self.layout == Layout::Expert,
            rank_layout: self.layout == Layout::Rank,
            regions: 1,
            tuning,
        }
    }
}

fn list(text: &str) -> Outcome<Vec<u32>> {
    text.split(',').map(|word| Ok(word.parse()?)).collect()
}

/// What dispatch carries.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Carried {
    Fp8,
    /// bf16 rows as fp8. The expert layout has no other fp8.
    Cast,
    Bf16,
}

impl Carried {
    const ALL: [Carried; 3] = [Carried::Fp8, Carried::Cast, Carried::Bf16];

    fn name(self) -> &'static str {
        match self {
            Carried::Fp8 => "fp8",
            Carried::Cast => "cast",
            Carried::Bf16 => "bf16",
        }
    }
}

fn payload(text: &str) -> Outcome<Carried> {
    let found = Carried::ALL.into_iter().find(|carried| carried.name() == text);
    found.ok_or_else(|| format!("{text}: fp8, cast, or bf16").into())
}

/// Which of the two it is.
fn one_of<const N: usize>(text: &str, words: [&str; N]) -> Outcome<usize> {
    match words.iter().position(|word| *word == text) {
        Some(index) => Ok(index),
        None => Err(format!("{text}: {}", words.join(" or ")).into()),
    }
}

fn run() -> Outcome<()> {
    let asked = Asked::read()?;
    let settings = Settings::from_env()?;
    let cuda = Cuda::load()?;
    let mut places = SearchPath::standard();
    places.add_environment(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv"));
    let compiler = Compiler::new(Library::find(&places)?, Cache::of(&settings).ok());
    let (mut rows, mut failures) = (Vec::new(), 0);
    let mut environment = Value::Null;
    println!("tokens  blocks | what of the tuning is set | p50 us of each step (GB/s over the links) ...");
    let tunings = asked.tunings();
    asked.compile(&cuda, &compiler, &tunings)?;
    for (carried, tuning) in asked.payload.iter().flat_map(|carried| tunings.iter().map(move |one| (*carried, *one))) {
        let most = asked.tokens.iter().copied().max().unwrap_or(1);
        let devices = cuda.devices()?.into_iter().take(asked.gpus).collect::<Vec<_>>();
        let shape = asked.shape(devices.len() as u32, most, carried, tuning);
        let trials = match asked.trials(&devices, &compiler, shape, carried) {
            Ok(trials) => trials,
            Err(error) => {
                failures += 1;
                println!("{:?}: {error}", shape.tuning());
                continue;
            }
        };
        for Variant { split, queue, trial } in trials {
            if environment.is_null() {
                environment = environment::capture(trial.context(), &compiler, &settings)?;
            }
            let most = |blocks: &u32| if *blocks == 0 { trial.most_blocks() } else { *blocks };
            let blocks: Vec<u32> = asked.blocks.iter().map(most).collect();
            for &tokens in &asked.tokens {
                for &blocks in &blocks {
                    let facts = Facts { asked: &asked, shape: &shape, carried, tokens, blocks, split, queue };
                    match trial.measure(tokens, blocks, asked.iters) {
                        Ok(steps) => {
                            facts.print(&steps);
                            rows.extend(steps.iter().map(|step| facts.row(step)));
                        }
                        Err(error) => {
                            failures += 1;
                            facts.print_failure(&*error);
                            if error.is::<place::Stuck>() {
                                write(&asked, &environment, &rows)?;
                                // Nothing can be given back while kernels run.
                                std::process::exit(1);
                            }
                            trial.recover()?;
                        }
                    }
                }
            }
        }
    }
    write(&asked, &environment, &rows)?;
    if failures > 0 { Err(format!("{failures} trials failed").into()) } else { Ok(()) }
}

/// The report, to where it is asked for.
fn write(asked: &Asked, environment: &Value, rows: &[Value]) -> Outcome<()> {
    let report = json!({
        "schema": "crossrail-bench/1",
        "environment": environment,
        "command": std::env::args().collect::<Vec<_>>(),
        "rows": rows,
    });
    match asked.json.as_deref() {
        Some("-") => println!("{report}"),
        Some(file) => std::fs::write(file, format!("{report:#}\n"))?,
        None => {}
    }
    Ok(())
}

/// What identifies a row.
struct Facts<'a> {
    asked: &'a Asked,
    shape: &'a Shape,
    carried: Carried,
    tokens: u32,
    blocks: u32,
    split: u32,
    queue: u32,
}

impl Facts<'_> {
    fn print(&self, steps: &[Step]) {
        let tuning = self.shape.tuning();
        let Tuning {
            piece, threads, senders, receive_from, back_threads, back_stages, rank_threads, rank_movers, ..
        } = tuning;
        let set = match self.asked.layout {
            Layout::Expert => {
                format!(
                    "threads {threads} piece {piece} senders {senders} from {receive_from} back {back_threads} x {back_stages}"
                )
            }
            Layout::Rank => {
                format!("threads {rank_threads} movers {rank_movers} split {} queue {}", self.split, self.queue)
            }
        };
        let one = |step: &Step| {
            let rate = step.gb_per_s().map(|rate| match self.floor(step) {
                Some(floor) => format!(" ({rate:.0}, floor {floor:.0})"),
                None => format!(" ({rate:.0})"),
            });
            format!("{} {:.1}{}", step.name, median(&step.samples), rate.unwrap_or_default())
        };
        let steps: Vec<String> = steps.iter().map(one).collect();
        println!("{:>6} {:>7} | {} {set} | {}", self.tokens, self.blocks, self.carried.name(), steps.join("  "));
    }

    /// Microseconds that the links take for a step's bytes.
    fn floor(&self, step: &Step) -> Option<f64> {
        Some(step.wire_bytes? as f64 / self.asked.link? / 1e3)
    }

    fn print_failure(&self, error: &dyn Error) {
        println!("{:>6} {:>7} | {:?} failed: {error}", self.tokens, self.blocks, self.shape.tuning());
    }

    fn row(&self, step: &Step) -> Value {
        let (tuning, options) = (self.shape.tuning(), self.asked.rank);
        let samples = &step.samples;
        let sum: f64 = samples.iter().sum();
        let sorted = sorted(samples);
        let by_rank = self.asked.layout == Layout::Rank;
        let mut row = json!({
            "what": step.name,
            "device": "cuda",
            "layout": if by_rank { "rank" } else { "expert" },
            "dtype": if self.shape.payload == Payload::Bf16 { "bf16" } else { "fp8" },
            "ranks": self.shape.ranks,
            "tokens": self.tokens,
            "hidden": self.shape.hidden,
            "topk": self.shape.topk,
            "experts": self.shape.experts,
            "sms": self.blocks,
            "bytes_wire": step.wire_bytes,
            "gb_per_s": step.gb_per_s(),
            "floor_us": self.floor(step),
            "samples_us": samples,
            "p50_us": median(samples),
            "avg_us": sum / samples.len().max(1) as f64,
            "min_us": sorted.first(),
            "max_us": sorted.last(),
        });
        row["tuning"] = match by_rank {
            true => json!({
                "threads": tuning.rank_threads,
                "movers": tuning.rank_movers,
                "split": self.split,
                "queue_kib": self.queue,
                "input": if self.carried == Carried::Fp8 { "fp8" } else { "bf16" },
                "counted": options.counted,
            }),
            false => json!({
                "prereduce": self.shape.prereduce,
                "weights": if self.asked.expert.late_weights { "combine" } else { "dispatch" },
                "threads": tuning.threads,
                "piece": tuning.piece,
                "senders": tuning.senders,
                "receive_from": tuning.receive_from,
                "back_threads": tuning.back_threads,
                "back_stages": tuning.back_stages,
            }),
        };
        row
    }
}

fn sorted(samples: &[f64]) -> Vec<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

fn median(samples: &[f64]) -> f64 {
    sorted(samples).get(samples.len() / 2).copied().unwrap_or(f64::NAN)
}
