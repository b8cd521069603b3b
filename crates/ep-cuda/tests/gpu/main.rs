//! Dispatch and combine on real GPUs, ranks as threads of one process (and as processes, where one is killed): what comes
//! out is what the plain reference gives, to the bit.
//!
//! Four ranks share as many of the first four GPUs as there are. Each test is a process of its own, which is ended when
//! it takes too long: neither a hang nor a GPU in a bad state is the next test's. Skipped, visibly, without a GPU or NVRTC.

mod elastic;
mod far;
mod killed;
#[path = "../../../kernels/tests/emulate/numbers.rs"]
#[allow(dead_code, missing_docs, unreachable_pub)]
mod numbers;
mod operations;
mod rank;
#[path = "../../../kernels/tests/emulate/reference.rs"]
#[allow(dead_code, missing_docs, unreachable_pub)]
mod reference;
mod rounds;
mod steady;
#[path = "../../../cuda/tests/support/mod.rs"]
#[allow(dead_code)]
mod support;
mod wrong;

use std::fs::File;
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use numbers::Numbers;

/// Says which test a process is for.
const ALONE: &str = "EP_GPU_TEST";
/// How long one test may take.
const TEST_LIMIT: Duration = Duration::from_secs(25);
/// How long all kernels together may take to compile.
const COMPILE_LIMIT: Duration = Duration::from_secs(80);
const COMPILES: &str = "operations::all_kernels_compile";

/// One test at a time: all blocks of all ranks' launches must fit on the GPUs at once.
static TURN: Mutex<()> = Mutex::new(());
/// What became of the kernels, which are compiled before the first test.
static COMPILED: OnceLock<Result<(), String>> = OnceLock::new();

/// A test that has a process of its own; it gets the number of GPUs that it may use.
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
    if std::env::var(ALONE).is_ok_and(|wanted| wanted == name) {
        return body(cuda.devices().expect("devices").len().min(4) as u32);
    }
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let compiled = COMPILED.get_or_init(|| process(COMPILES, COMPILE_LIMIT));
    if name == COMPILES {
        compiled.as_ref().unwrap_or_else(|why| panic!("{why}"));
        return;
    }
    assert!(compiled.is_ok(), "not run, as {COMPILES} failed");
    process(name, TEST_LIMIT).unwrap_or_else(|why| panic!("{why}"));
}

/// Runs one test in a process; what it said, when it failed.
fn process(name: &str, limit: Duration) -> Result<(), String> {
    let folder = support::Folder::new();
    let path = folder.0.join("said");
    let said = File::create(&path).expect("a file");
    let began = Instant::now();
    let mut child = Command::new(std::env::current_exe().expect("this test"))
        .args([name, "--exact", "--nocapture", "--test-threads", "1"])
        .env(ALONE, name)
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
    let took = began.elapsed().as_secs_f64();
    let what = match ended {
        Ok(Ok(status)) if status.success() && said.contains("1 passed") => {
            let notes = said.lines().filter(|line| line.starts_with("note: ") || line.starts_with("skipped: "));
            let notes: String = notes.map(|line| format!("{line}\n")).collect();
            // Past the harness's capture.
            let _ = std::io::stderr().write_all(format!("{name}: {took:.1} s\n{notes}").as_bytes());
            return Ok(());
        }
        Ok(Ok(status)) => status.to_string(),
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("ended, as it took more than {} s", limit.as_secs()),
    };
    Err(format!("{name}: {what} ({took:.1} s). It said:\n{said}"))
}
