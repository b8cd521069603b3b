//! How long dispatch and combine take on GPUs of one machine that reach each other: one rank for each, all in this
//! process.
//!
//!     cargo run --release -p crossrail-kernels --example ep_rate -- [--gpus N] [--tokens LIST] [--hidden N] [--topk N]
//!         [--experts N] [--payload fp8|bf16] [--no-prereduce] [--weights dispatch|combine] [--scales column|row]
//!         [--blocks LIST] [--threads LIST] [--piece LIST] [--senders LIST] [--receive-from LIST] [--apart]
//!         [--iters N] [--json FILE]
//!
//! Lists (`128,64`) are tried in all combinations; 0 is what suits. Results are verified, then timed: `cold` after the
//! second cache was overwritten and all ranks have met, each step alone; `pair` back to back. The slowest rank counts.
//! `--apart`: sending and receiving are launches of their own. The table goes to stdout, raw samples to FILE.
#![allow(unsafe_code)]

#[path = "../unpack_rate/environment.rs"]
mod environment;
mod rig;
mod routing;

use std::error::Error;
use std::process::ExitCode;

use crossrail_cuda::Cuda;
use crossrail_cuda::nvrtc::{Cache, Compiler, Library, Places};
use crossrail_kernels::ep::{Payload, Scale, Shape, Tuning};
use crossrail_types::Settings;
use serde_json::{Value, json};

use rig::{Options, Rig};

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ep_rate: {error}");
            ExitCode::FAILURE
        }
    }
}

/// What was asked for.
struct Asked {
    gpus: usize,
    tokens: Vec<u32>,
    hidden: u32,
    topk: u32,
    experts: u32,
    payload: Payload,
    prereduce: bool,
    blocks: Vec<u32>,
    threads: Vec<u32>,
    piece: Vec<u32>,
    senders: Vec<u32>,
    receive_from: Vec<u32>,
    options: Options,
    iters: usize,
    json: Option<String>,
}

impl Default for Asked {
    fn default() -> Asked {
        Asked {
            gpus: 4,
            tokens: vec![128],
            hidden: 7168,
            topk: 8,
            experts: 288,
            payload: Payload::Fp8(Scale::F32),
            prereduce: true,
            blocks: vec![0],
            threads: vec![0],
            piece: vec![0],
            senders: vec![0],
            receive_from: vec![0],
            options: Options { late_weights: true, column_scales: true, apart: false },
            iters: 30,
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
                "--gpus" => asked.gpus = value()?.parse()?,
                "--tokens" => asked.tokens = list(&value()?)?,
                "--hidden" => asked.hidden = value()?.parse()?,
                "--topk" => asked.topk = value()?.parse()?,
                "--experts" => asked.experts = value()?.parse()?,
                "--payload" => asked.payload = payload(&value()?)?,
                "--no-prereduce" => asked.prereduce = false,
                "--weights" => asked.options.late_weights = one_of(&value()?, ["combine", "dispatch"])?,
                "--scales" => asked.options.column_scales = one_of(&value()?, ["column", "row"])?,
                "--blocks" => asked.blocks = list(&value()?)?,
                "--threads" => asked.threads = list(&value()?)?,
                "--piece" => asked.piece = list(&value()?)?,
                "--senders" => asked.senders = list(&value()?)?,
                "--receive-from" => asked.receive_from = list(&value()?)?,
                "--apart" => asked.options.apart = true,
                "--iters" => asked.iters = value()?.parse()?,
                "--json" => asked.json = Some(value()?),
                _ => return Err(format!("{word} is not known").into()),
            }
        }
        Ok(asked)
    }

    /// Every tuning to try.
    fn tunings(&self) -> Vec<Tuning> {
        let mut all = Vec::new();
        for &piece in &self.piece {
            for &threads in &self.threads {
                for &senders in &self.senders {
                    for &receive_from in &self.receive_from {
                        all.push(Tuning { piece, threads, senders, receive_from, ..Tuning::default() });
                    }
                }
            }
        }
        all
    }

    fn shape(&self, ranks: u32, max_tokens: u32, tuning: Tuning) -> Shape {
        Shape {
            hidden: self.hidden,
            topk: self.topk,
            experts: self.experts,
            ranks,
            max_tokens,
            payload: self.payload,
            prereduce: self.prereduce,
            expert_layout: true,
            rank_layout: false,
            regions: 0,
            tuning,
        }
    }
}

fn list(text: &str) -> Outcome<Vec<u32>> {
    text.split(',').map(|word| Ok(word.parse()?)).collect()
}

fn payload(text: &str) -> Outcome<Payload> {
    match text {
        "fp8" => Ok(Payload::Fp8(Scale::F32)),
        "bf16" => Ok(Payload::Bf16),
        _ => Err(format!("{text}: fp8 or bf16").into()),
    }
}

/// Whether it is the first of the two.
fn one_of(text: &str, words: [&str; 2]) -> Outcome<bool> {
    match words.iter().position(|word| *word == text) {
        Some(index) => Ok(index == 0),
        None => Err(format!("{text}: {} or {}", words[0], words[1]).into()),
    }
}

fn run() -> Outcome<()> {
    let asked = Asked::read()?;
    let settings = Settings::from_env()?;
    let cuda = Cuda::load()?;
    let mut places = Places::standard();
    places.add_environment(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv"));
    let compiler = Compiler::new(Library::find(&places)?, Cache::of(&settings).ok());
    let mut rows = Vec::new();
    let mut environment = Value::Null;
    println!("tokens  blocks threads piece senders from |     p50 us of each step ... | pair, back to back");
    for tuning in asked.tunings() {
        let most = asked.tokens.iter().copied().max().unwrap_or(1);
        let devices = cuda.devices()?.into_iter().take(asked.gpus).collect::<Vec<_>>();
        let shape = asked.shape(devices.len() as u32, most, tuning);
        let rig = Rig::new(&devices, &compiler, shape, asked.options)?;
        if environment.is_null() {
            environment = environment::capture(rig.context(), &compiler, &settings)?;
        }
        for &tokens in &asked.tokens {
            let batch = rig.batch(tokens)?;
            for &blocks in &asked.blocks {
                let blocks = if blocks == 0 { rig.most_blocks() } else { blocks };
                rig.verify(&batch, blocks)?;
                let steps = rig.cold(&batch, blocks, asked.iters)?;
                let pair = rig.back_to_back(&batch, blocks, asked.iters)?;
                let t = shape.tuning();
                let text: Vec<String> =
                    steps.iter().map(|(name, samples)| format!("{name} {:.1}", median(samples))).collect();
                println!(
                    "{tokens:>6} {blocks:>7} {:>7} {:>5} {:>7} {:>4} | {} | {pair:.1}",
                    t.threads,
                    t.piece,
                    t.senders,
                    t.receive_from,
                    text.join("  "),
                );
                let facts = Facts { shape: &shape, tokens, blocks, options: asked.options };
                rows.extend(steps.iter().map(|(name, samples)| facts.row(name, samples)));
                rows.push(facts.row("pair", &[pair]));
            }
        }
    }
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
    shape: &'a Shape,
    tokens: u32,
    blocks: u32,
    options: Options,
}

impl Facts<'_> {
    fn row(&self, what: &str, samples: &[f64]) -> Value {
        let tuning = self.shape.tuning();
        let sum: f64 = samples.iter().sum();
        let sorted = sorted(samples);
        json!({
            "what": what,
            "device": "cuda",
            "layout": "expert",
            "dtype": if self.shape.payload == Payload::Bf16 { "bf16" } else { "fp8" },
            "ranks": self.shape.ranks,
            "tokens": self.tokens,
            "hidden": self.shape.hidden,
            "topk": self.shape.topk,
            "experts": self.shape.experts,
            "prereduce": self.shape.prereduce,
            "weights": if self.options.late_weights { "combine" } else { "dispatch" },
            "sms": self.blocks,
            "threads": tuning.threads,
            "piece": tuning.piece,
            "senders": tuning.senders,
            "receive_from": tuning.receive_from,
            "samples_us": samples,
            "p50_us": median(samples),
            "avg_us": sum / samples.len().max(1) as f64,
            "min_us": sorted.first(),
            "max_us": sorted.last(),
        })
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
