//! How fast GPUs of one machine send to each other, by each of the ways there are: ordinary stores (`copy`), the same
//! with a signal (`put`), bulk copies (`copy_bulk`), the copy engine (`engine`); pushed by the sender, or pulled by the
//! receiver. And how soon a put's signal is seen.
//!
//!     cargo run --release -p crossrail-kernels --example peer_rate -- [--gpus N] [--size SIZE] [--json FILE]
//!
//! Every case is verified byte by byte, then timed: the streams of all GPUs wait at one gate until everything is queued,
//! and the slowest GPU's time counts. The table goes to stdout, raw samples to FILE (`-`: stdout). With a size, it is the
//! only one, and puts' signals are left out: 64M takes seconds.
#![allow(unsafe_code)]

#[path = "../unpack_rate/environment.rs"]
mod environment;
mod latency;
mod rates;
mod rig;

use std::error::Error;
use std::process::ExitCode;

use crossrail_cuda::Cuda;
use crossrail_cuda::nvrtc::{Cache, Compiler, Library, SearchPath};
use crossrail_types::Settings;
use serde_json::{Value, json};

use rig::Rig;

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("peer_rate: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Outcome<()> {
    let Arguments { file, most, size } = arguments()?;
    let settings = Settings::from_env()?;
    let cuda = Cuda::load()?;
    let mut places = SearchPath::standard();
    places.add_environment(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv"));
    let compiler = Compiler::new(Library::find(&places)?, Cache::of(&settings).ok());
    let rig = Rig::new(&cuda, &compiler, most)?;
    let mut rows = rates::rows(&rig, size)?;
    if size.is_none() {
        rows.extend(latency::rows(&rig)?);
    }
    let report = json!({
        "schema": "crossrail-bench/1",
        "environment": environment::capture(&rig.gpus[0].context, &compiler, &settings)?,
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

struct Arguments {
    /// For samples.
    file: Option<String>,
    /// The most GPUs to use.
    most: usize,
    /// The only size to try.
    size: Option<usize>,
}

fn arguments() -> Outcome<Arguments> {
    let mut given = Arguments { file: None, most: usize::MAX, size: None };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word} wants a value"));
        match word.as_str() {
            "--json" => given.file = Some(value()?),
            "--gpus" => given.most = value()?.parse()?,
            "--size" => given.size = Some(rates::size(&value()?)?),
            _ => return Err(format!("{word}: only --gpus N, --size SIZE and --json FILE are known").into()),
        }
    }
    Ok(given)
}

/// Samples and what they say, in the fields of `crossrail-bench/1`.
fn figures(samples: &[f64]) -> Value {
    let sum: f64 = samples.iter().sum();
    json!({
        "samples_us": samples,
        "p50_us": percentile(samples, 0.5),
        "p99_us": percentile(samples, 0.99),
        "avg_us": sum / samples.len().max(1) as f64,
        "min_us": percentile(samples, 0.0),
        "max_us": percentile(samples, 1.0),
    })
}

/// The sample below which that part of all lie; `samples` are never empty.
fn percentile(samples: &[f64], part: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get((part * (sorted.len().max(1) - 1) as f64).round() as usize).copied().unwrap_or(f64::NAN)
}

/// `row` with more fields.
fn with(mut row: Value, facts: Value) -> Value {
    if let (Some(row), Value::Object(facts)) = (row.as_object_mut(), facts) {
        row.extend(facts);
    }
    row
}
