//! Dispatch and combine on real GPUs, ranks as threads of one process (and as processes, where one is killed): what comes
//! out is what the plain reference gives, to the bit.
//!
//! Four ranks share as many of the first four GPUs as there are. Most of a short test's time is the start of CUDA, so
//! one process runs them one after the other. It ends with the first that fails, or when it takes too long; those that
//! did not come to their turn there, and the long ones, have a process each: neither a hang nor a GPU in a bad state is the next
//! test's. Skipped, visibly, without a GPU or NVRTC.

mod agreed;
mod elastic;
mod far;
mod killed;
mod operations;
mod rank;
mod rounds;
mod steady;
#[path = "../../../cuda/tests/support/mod.rs"]
#[allow(dead_code)]
mod support;
mod wrong;

use std::fs::File;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::channel;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crossrail_emulator::Numbers;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Says which test a process is for, or that it is for all those that share one.
const ALONE: &str = "EP_GPU_TEST";
const SHARED: &str = "those that share a process";
/// How long one test may take.
const TEST_LIMIT: Duration = Duration::from_secs(25);
/// How long those that share a process may take.
const SHARED_LIMIT: Duration = Duration::from_secs(40);
/// How long memory of a test may take to be given back.
const LEFT_LIMIT: Duration = Duration::from_secs(2);
/// How long all kernels together may take to compile.
const COMPILE_LIMIT: Duration = Duration::from_secs(80);
const COMPILES: &str = "operations::all_kernels_compile";
/// Those with a process of their own: names begin so.
const OWN: [&str; 3] = [COMPILES, "killed::", "steady::ten_thousand_back_to_back"];

/// One test at a time: all blocks of all ranks' launches must fit on the GPUs at once.
static TURN: Mutex<()> = Mutex::new(());
/// What became of the kernels, which are compiled before the first test.
static COMPILED: OnceLock<Result<(), String>> = OnceLock::new();
/// What the process said that many tests share.
static TOGETHER: OnceLock<String> = OnceLock::new();

/// A test that is run in another process; it gets the number of GPUs that it may use.
macro_rules! alone {
    ($name:ident, $body:expr) => {
        #[test]
        fn $name() {
            crate::run_alone(concat!(module_path!(), "::", stringify!($name)), $body);
        }
    };
}
pub(crate) use alone;

pub(crate) fn run_alone(path: &str, body: impl FnOnce(u32)) {
    let name = path.split_once("::").map_or(path, |(_, name)| name);
    let Some((cuda, _)) = support::cuda().and_then(|cuda| Some((cuda, support::nvrtc()?))) else { return };
    let gpus = || cuda.devices().expect("devices").len().min(4) as u32;
    match std::env::var(ALONE) {
        // What it says begins with a line of its own.
        Ok(wanted) if wanted == name => {
            println!();
            return body(gpus());
        }
        Ok(wanted) if wanted == SHARED => return run_among_others(name, gpus(), body),
        _ => {}
    }
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let compiled = COMPILED.get_or_init(|| process(&[COMPILES, "--exact"], COMPILES, COMPILE_LIMIT));
    if name == COMPILES {
        compiled.as_ref().unwrap_or_else(|why| panic!("{why}"));
        return;
    }
    assert!(compiled.is_ok(), "not run, as {COMPILES} failed");
    if is_without_filter() && !OWN.iter().any(|own| name.starts_with(own)) {
        let skipped: Vec<&str> = OWN.iter().flat_map(|own| ["--skip", own]).collect();
        let said = TOGETHER.get_or_init(|| said_by(&skipped, SHARED, SHARED_LIMIT).said);
        if let Some(became) = among_others(name, said) {
            return became.map_or_else(|said| panic!("{name}: failed. It said:\n{said}"), |notes| tell(&notes));
        }
        tell(&format!("{name}: the process that tests share had ended; alone now\n"));
    }
    process(&[name, "--exact"], name, TEST_LIMIT).unwrap_or_else(|why| panic!("{why}"));
}

/// Whether this program was asked for all tests.
fn is_without_filter() -> bool {
    let arguments: Vec<String> = std::env::args().collect();
    let is_value = |option: &str| matches!(option, "--skip" | "--test-threads");
    arguments.windows(2).all(|pair| pair[1].starts_with("--") || is_value(&pair[0]))
}

/// Runs a test in the process that many share.
fn run_among_others(name: &str, gpus: u32, body: impl FnOnce(u32)) {
    // Contexts that are kept need not be made again by the next test.
    static KEPT: OnceLock<Vec<crossrail_cuda::Context>> = OnceLock::new();
    KEPT.get_or_init(|| (0..gpus).map(rank::primary).collect());
    let began = Instant::now();
    println!("\nbegun: {name}");
    if catch_unwind(AssertUnwindSafe(|| body(gpus))).is_err() {
        println!("\nfailed: {name}");
        // What it has left is not the next one's.
        std::process::exit(1);
    }
    // The next one begins with everything given back.
    crossrail_cuda::wait_for_releases(LEFT_LIMIT);
    println!("\npassed: {name}: {:.1} s", began.elapsed().as_secs_f64());
}

/// What became of a test in the process that many share: what is to be told, or what it said when it failed. None: it was
/// not begun there.
fn among_others(name: &str, said: &str) -> Option<Result<String, String>> {
    let (_, said) = said.split_once(&format!("begun: {name}\n"))?;
    let Some((said, took)) = said.split_once(&format!("passed: {name}: ")) else { return Some(Err(said.to_owned())) };
    let took = took.lines().next().unwrap_or_default();
    Some(Ok(format!("{name}: {took}\n{}", notes(said))))
}

fn notes(said: &str) -> String {
    let notes = said.lines().filter(|line| line.starts_with("note: ") || line.starts_with("skipped: "));
    notes.map(|line| format!("{line}\n")).collect()
}

/// Past the harness's capture.
fn tell(text: &str) {
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// How a process ended.
struct Ended {
    said: String,
    took: f64,
    /// None: it took too long.
    status: Option<std::io::Result<ExitStatus>>,
}

/// Runs one test in a process; what it said, when it failed.
fn process(arguments: &[&str], name: &str, limit: Duration) -> Result<(), String> {
    let Ended { said, took, status } = said_by(arguments, name, limit);
    let what = match status {
        Some(Ok(status)) if status.success() && said.contains("1 passed") => {
            tell(&format!("{name}: {took:.1} s\n{}", notes(&said)));
            return Ok(());
        }
        Some(Ok(status)) => status.to_string(),
        Some(Err(error)) => error.to_string(),
        None => format!("ended, as it took more than {} s", limit.as_secs()),
    };
    Err(format!("{name}: {what} ({took:.1} s). It said:\n{said}"))
}

fn said_by(arguments: &[&str], wanted: &str, limit: Duration) -> Ended {
    let folder = support::Folder::new();
    let path = folder.0.join("said");
    let said = File::create(&path).expect("a file");
    let began = Instant::now();
    let mut child = Command::new(std::env::current_exe().expect("this test"))
        .args(arguments)
        .args(["--nocapture", "--test-threads", "1"])
        .env(ALONE, wanted)
        // Streams of one process share 8 queues of a GPU, and a kernel that waits for another rank's would hold that up
        // behind it. Ranks that are processes have queues of their own.
        .env("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        .stdin(Stdio::null())
        .stdout(said.try_clone().expect("a descriptor"))
        .stderr(said)
        .spawn()
        .expect("a process");
    let pid = Pid::from_raw(child.id() as i32);
    let (tell, told) = channel();
    let waiting = thread::spawn(move || tell.send(child.wait()));
    let ended = told.recv_timeout(limit);
    if ended.is_err() {
        let _ = kill(pid, Signal::SIGKILL);
    }
    let _ = waiting.join();
    let said = String::from_utf8_lossy(&std::fs::read(&path).unwrap_or_default()).into_owned();
    Ended { said, took: began.elapsed().as_secs_f64(), status: ended.ok() }
}
