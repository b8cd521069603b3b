//! Long-lived programs make and drop things all day: thousands of each kind leave nothing behind, counted in bytes and
//! allocations of this process.
//!
//! `CROSSRAIL_TEST_SOAK=SECONDS` runs the same for that long and prints every figure.
#![allow(missing_docs, unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{BufRead, BufReader, Lines};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossrail::{ConnectOptions, Context, Settings, Worker, WorkerOptions};
use crossrail_control::{Group, GroupOptions, StoreServer};
use crossrail_ep_host::{Config, ExpertBuffer, Layout as RowLayout, OnLoss, Payload};

struct Counting;

static BYTES: AtomicI64 = AtomicI64::new(0);
static BLOCKS: AtomicI64 = AtomicI64::new(0);

// SAFETY: the system's allocator does the work; only the counts are added.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size() as i64, Relaxed);
        BLOCKS.fetch_add(1, Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size() as i64, Relaxed);
        BLOCKS.fetch_sub(1, Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One kind at a time: the counts are the process's.
static ALONE: Mutex<()> = Mutex::new(());

const LIMIT: Option<Duration> = Some(Duration::from_secs(20));
/// Bytes that a cycle may leave on average: less than the smallest thing that a table could keep of it.
const LEFT_MAX: f64 = 8.0;
/// What caches and tables may take once, however long it goes on.
const ONCE: i64 = 128 << 10;

/// Runs `cycle` a fifth of `cycles` times to fill caches and tables, and then `cycles` times, which may leave nothing.
fn flat(kind: &str, cycles: usize, mut cycle: impl FnMut(usize)) {
    let soak = std::env::var("CROSSRAIL_TEST_SOAK").ok().map(|seconds| seconds.parse().expect("seconds"));
    let mut number = 0;
    let mut run = |count: usize| {
        for _ in 0..count {
            cycle(number);
            number += 1;
        }
    };
    run(cycles / 5);
    let (bytes, blocks) = (BYTES.load(Relaxed), BLOCKS.load(Relaxed));
    let began = Instant::now();
    let mut done = 0;
    loop {
        run(cycles);
        done += cycles;
        if soak.is_none_or(|seconds| began.elapsed() >= Duration::from_secs(seconds)) {
            break;
        }
    }
    // Threads of the engine drop some things a little later.
    let allowed = ONCE + (LEFT_MAX * done as f64) as i64;
    let deadline = Instant::now() + Duration::from_secs(5);
    let left = loop {
        let left = BYTES.load(Relaxed) - bytes;
        if left <= allowed || Instant::now() > deadline {
            break left;
        }
        std::thread::yield_now();
    };
    let (blocks, took) = (BLOCKS.load(Relaxed) - blocks, began.elapsed());
    println!("{kind}: {done} cycles in {took:.1?}: {left} bytes and {blocks} blocks more than before");
    assert!(left <= allowed, "{kind}: {done} cycles have left {left} bytes in {blocks} blocks");
}

fn worker(pairs: &[(&str, &str)]) -> Worker {
    let context = Context::new(Settings::from_pairs(pairs.iter().copied()).unwrap()).unwrap();
    Worker::new(&context, WorkerOptions::default()).unwrap()
}

/// A connection, one message each way, and its end from either side in turn.
fn endpoints(kind: &str, cycles: usize, pairs: &[(&str, &str)]) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (a, b) = (worker(pairs), worker(pairs));
    flat(kind, cycles, |number| {
        let ab = a.connect(&b.address(), &ConnectOptions::default()).unwrap();
        let ba = b.accept(LIMIT).unwrap();
        for (from, to, back) in [(&ab, &b, &ba), (&ba, &a, &ab)] {
            let received = to.recv(vec![0; 8], 7, u64::MAX, Some(back)).unwrap();
            from.send(vec![1; 8], 7).unwrap().wait(LIMIT).unwrap();
            assert_eq!(received.wait(LIMIT).unwrap().bytes, 8);
        }
        let (first, second) = if number % 2 == 0 { (ab, ba) } else { (ba, ab) };
        first.close(LIMIT).unwrap();
        second.close(LIMIT).unwrap();
    });
}

#[test]
fn endpoints_over_shared_memory_leave_nothing() {
    endpoints("endpoint over shm", 500, &[("CROSSRAIL_TLS", "shm")]);
}

#[test]
fn endpoints_over_tcp_leave_nothing() {
    let rails = "127.0.0.1,127.0.0.2";
    endpoints("endpoint over tcp", 300, &[("CROSSRAIL_TLS", "tcp"), ("CROSSRAIL_NET_DEVICES", rails)]);
}

#[test]
fn workers_leave_nothing() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let pairs = [("CROSSRAIL_TLS", "shm")];
    let server = worker(&pairs);
    let context = Context::new(Settings::from_pairs(pairs).unwrap()).unwrap();
    flat("worker", 1200, |number| {
        // Every worker has a name of its own, as those of other processes have.
        let options = WorkerOptions { name: Some(format!("worker {number}")), ..WorkerOptions::default() };
        let worker = Worker::new(&context, options).unwrap();
        let endpoint = worker.connect(&server.address(), &ConnectOptions::default()).unwrap();
        let accepted = server.accept(LIMIT).unwrap();
        drop(endpoint);
        worker.close().unwrap();
        let gone = Instant::now() + Duration::from_secs(20);
        while accepted.is_alive() {
            assert!(Instant::now() < gone, "the peer's end was not noticed");
            server.progress();
        }
    });
}

#[test]
fn regions_and_requests_leave_nothing() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let pairs = [("CROSSRAIL_TLS", "shm")];
    let (a, b) = (worker(&pairs), worker(&pairs));
    let ab = a.connect(&b.address(), &ConnectOptions::default()).unwrap();
    let ba = b.accept(LIMIT).unwrap();
    flat("region", 2000, |_| {
        let region = b.register(vec![0u8; 64]).unwrap();
        ab.write(vec![1; 64], &region.key(), 0, Some(1)).unwrap().wait(LIMIT).unwrap();
        region.wait_imm(1, 1, LIMIT).unwrap();
        region.deregister().unwrap();
    });
    flat("request", 5000, |number| {
        let received = b.recv(vec![0; 8], 7, u64::MAX, Some(&ba)).unwrap();
        ab.send(vec![1; 8], 7).unwrap().wait(LIMIT).unwrap();
        if number % 2 == 0 {
            received.wait(LIMIT).unwrap();
        }
        b.recv(vec![0; 8], 8, u64::MAX, None).unwrap().cancel();
    });
}

/// A store in a process of its own, because it keeps the last changes, up to 8 MiB of them.
struct Store {
    child: Child,
    /// Kept open: it prints once more when it ends.
    _output: Lines<BufReader<ChildStdout>>,
    address: String,
}

impl Store {
    fn start() -> Store {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "serves_the_store", "--ignored", "--nocapture"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut lines = output.by_ref().map_while(Result::ok);
        let address = lines.find_map(|line| Some(line.split_once("store at ")?.1.to_owned()));
        Store { address: address.expect("the store's address"), _output: output, child }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "run by groups_and_expert_buffers_leave_nothing"]
fn serves_the_store() {
    let server = StoreServer::start("127.0.0.1:0", &Settings::default()).unwrap();
    println!("store at {}", server.address());
    let _ = std::io::stdin().read_line(&mut String::new());
}

#[test]
fn groups_and_expert_buffers_leave_nothing() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let settings = Settings::default();
    let context = Context::new(settings.clone()).unwrap();
    let store = Store::start();
    let options = |number: usize| GroupOptions {
        name: format!("group-{number}"),
        rank: Some(0),
        size: Some(1),
        store: Some(store.address.clone()),
        ..GroupOptions::default()
    };
    flat("group", 400, |number| Group::join(options(number), &settings).unwrap().leave().unwrap());
    let group = Group::join(options(0), &settings).unwrap();
    let config = Config {
        ranks: 1,
        max_tokens: 4,
        hidden: 128,
        experts: 2,
        topk: 1,
        payload: Payload::Bf16,
        layouts: vec![RowLayout::Expert],
        prereduce: false,
        share_node: true,
        timeout: Duration::from_secs(20),
        on_loss: OnLoss::default(),
    };
    flat("expert buffer", 200, |number| {
        let config = config.clone();
        let buffer = ExpertBuffer::new(&group, &context, &format!("buffer {number}"), config).unwrap();
        buffer.connect(&[0], true, None).unwrap();
        buffer.destroy().unwrap();
    });
}
