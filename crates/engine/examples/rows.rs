//! Measures moves of rows between two processes: microseconds a row, a notice, and what preparing costs.
//!
//!     rows TLS shared|plain ROWS BYTES [MOVES]
//!     rows driven ROWS BYTES MOVES                both ends in this process, driven by this thread, for callgrind to count
#![allow(unsafe_code)] // pools are registered by their addresses

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crossrail::{
    Addresses, ConnectOptions, Context, Description, Endpoint, Layout, Memory, Move, MoveKind, MoveOptions, Place,
    Region, Request, Settings, StartOptions, Worker, WorkerOptions,
};

const LIMIT: Option<Duration> = Some(Duration::from_secs(60));

fn worker(tls: &str, name: &str) -> (Context, Worker) {
    let rails = std::env::var("ROWS_RAILS").unwrap_or_else(|_| "127.0.0.1".to_owned());
    let pairs = [("CROSSRAIL_TLS", tls), ("CROSSRAIL_NET_DEVICES", &*rails)];
    let context = Context::new(Settings::from_pairs(pairs).expect("settings")).expect("a context");
    let options = WorkerOptions { name: Some(name.to_owned()), admit: true, ..WorkerOptions::default() };
    let worker = Worker::new(&context, options).expect("a worker");
    (context, worker)
}

fn pool(context: &Context, worker: &Worker, shared: bool, len: usize) -> (Region, Vec<u8>, Option<Memory>) {
    let memory = shared.then(|| context.alloc(len).expect("memory"));
    let mut bytes = vec![1u8; if shared { 0 } else { len }];
    let at = memory.as_ref().map_or(bytes.as_mut_ptr() as u64, |memory| {
        memory.fill_from(0, &vec![1; len]).expect("fill");
        memory.ptr() as u64
    });
    // SAFETY: the caller keeps what holds the memory.
    let region = unsafe { worker.register_range(at, len as u64, Place::Host) }.expect("a region");
    (region, bytes, memory)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).expect("hex")).collect()
}

fn shuffled(count: u32) -> Vec<u32> {
    let mut all: Vec<u32> = (0..count).collect();
    let mut seed = 7u64;
    for at in (1..all.len()).rev() {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        all.swap(at, (seed >> 33) as usize % (at + 1));
    }
    all
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Holds memory for the other process until that is gone.
fn serve(tls: &str, shared: bool, len: usize) {
    let (context, worker) = worker(tls, "server");
    let (region, _bytes, _memory) = pool(&context, &worker, shared, len);
    println!("{}", hex(&worker.describe(std::slice::from_ref(&region)).expect("a description")));
    std::io::stdout().flush().expect("stdout");
    let echo = std::env::var("ROWS_ECHO").is_ok();
    while worker.peer("client").is_none() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let client = worker.peer("client").expect("a peer");
    while client.is_alive() {
        if worker.wait_notice(Duration::from_millis(50)) {
            for notice in worker.notices(1000) {
                if echo {
                    let _ = client.notify(&notice.bytes);
                }
            }
        }
    }
}

/// Round trips of a row with a notice behind it and of a notice alone, each with a notice back.
fn echoes(worker: &Worker, to: &Endpoint, local: &Layout, remote: &Layout) {
    let (one, other) = (local.slice(0, 1).expect("a row"), remote.slice(0, 1).expect("a row"));
    let prepared = to.prepare(MoveKind::Write, &one, &other, MoveOptions::default()).expect("a move");
    let behind =
        |of: &[u8]| prepared.start(StartOptions { notice: Some(of), ..StartOptions::default() }).expect("a start");
    let alone = |of: &[u8]| to.notify(of).expect("a notice");
    for (what, begin) in [("a row with a notice", &behind as &dyn Fn(&[u8]) -> Request), ("a notice", &alone)] {
        let mut samples = Vec::new();
        for number in 0..5000u64 {
            let of = number.to_le_bytes();
            let begun = Instant::now();
            let request = begin(&of);
            while !worker.notices(100).iter().any(|back| back.bytes == of) {
                worker.wait_notice(Duration::from_secs(1));
            }
            samples.push(begun.elapsed().as_secs_f64() * 1e6);
            request.wait(LIMIT).expect("its end");
        }
        println!("{what}, and a notice back: {:.2} us", median(samples));
    }
}

type Ends<'a> = (&'a Worker, &'a Region, &'a Endpoint, &'a Description);

/// Lists of rows of both ends, by their addresses. Counted by callgrind, as [`prepared`] and [`moved`] are.
#[inline(never)]
fn listed((worker, region, to, description): Ends<'_>, mine: &[u64], theirs: &[u64]) -> (Layout, Layout) {
    let region = std::slice::from_ref(region);
    let local = worker.layout_at(region, Addresses::new(mine, 3).expect("rows")).expect("a layout");
    let remote = to.layout_at(description, Addresses::new(theirs, 3).expect("rows")).expect("a layout");
    (local, remote)
}

#[inline(never)]
fn prepared(to: &Endpoint, kind: MoveKind, (local, remote): (&Layout, &Layout), options: MoveOptions<'_>) -> Move {
    to.prepare(kind, local, remote, options).expect("a move")
}

/// Starts a move, and drives both ends until it is over: no thread spins meanwhile.
#[inline(never)]
fn moved(prepared: &Move, [here, there]: [&Worker; 2]) {
    let request = prepared.start(StartOptions::default()).expect("a start");
    while request.test().is_none() {
        here.progress();
        there.progress();
    }
    request.test().expect("an outcome").expect("its end");
}

fn drive(rows: u64, bytes: u64, moves: usize) {
    let settings = Settings::from_pairs([("CROSSRAIL_TLS", "shm")]).expect("settings");
    let context = Context::new(settings).expect("a context");
    let [here, there] = ["client", "server"].map(|name| {
        let (name, background) = (Some(name.to_owned()), false);
        Worker::new(&context, WorkerOptions { name, background, ..WorkerOptions::default() }).expect("a worker")
    });
    let (to, _from) = std::thread::scope(|scope| {
        let dialling = scope.spawn(|| here.connect(&there.address(), &ConnectOptions::default()));
        let accepted = there.accept(LIMIT).expect("a peer");
        (dialling.join().expect("a thread").expect("an endpoint"), accepted)
    });
    let len = (rows * bytes) as usize;
    let (mine, theirs) = (pool(&context, &here, false, len), pool(&context, &there, false, len));
    let description = there.describe(std::slice::from_ref(&theirs.0)).expect("a description");
    let description = Description::parse(&description).expect("a description");
    let words = |base: u64| (0..rows).flat_map(|row| [base + row * bytes, bytes, 0]).collect::<Vec<u64>>();
    let bases = [mine.0.base(), description.regions()[0].base].map(words);
    let (local, remote) = listed((&here, &mine.0, &to, &description), &bases[0], &bases[1]);
    let index = shuffled(rows as u32);
    let (local_index, remote_index) = (Some(&*index), Some(&*index));
    for kind in [MoveKind::Write, MoveKind::Read] {
        let options = MoveOptions { local_index, remote_index, notice: b"n", ..Default::default() };
        let prepared = prepared(&to, kind, (&local, &remote), options);
        for _ in 0..moves {
            moved(&prepared, [&here, &there]);
        }
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args[0] == "serve" {
        return serve(&args[1], args[2] == "shared", args[3].parse().expect("bytes"));
    }
    if args[0] == "driven" {
        let [rows, bytes, moves] = [1, 2, 3].map(|at| args[at].parse::<u64>().expect("a number"));
        return drive(rows, bytes, moves as usize);
    }
    let (tls, shared) = (args[0].as_str(), args[1] == "shared");
    let (rows, bytes): (u64, u64) = (args[2].parse().expect("rows"), args[3].parse().expect("bytes"));
    let moves: usize = args.get(4).map_or(20, |text| text.parse().expect("moves"));
    let len = (rows * bytes) as usize;
    let mut server = Command::new(std::env::current_exe().expect("this program"));
    server.args(["serve", tls, &args[1], &len.to_string()]).stdout(Stdio::piped());
    let mut server = server.spawn().expect("a server");
    let mut line = String::new();
    BufReader::new(server.stdout.take().expect("stdout")).read_line(&mut line).expect("its description");
    let description = Description::parse(&unhex(line.trim())).expect("a description");
    let (context, worker) = worker(tls, "client");
    let (region, _bytes, _memory) = pool(&context, &worker, shared, len);
    let to = worker.connect(description.address(), &ConnectOptions::default()).expect("an endpoint");
    let words = |base: u64| (0..rows).flat_map(|row| [base + row * bytes, bytes, 0]).collect::<Vec<u64>>();
    let (mine, theirs) = (words(region.base()), words(description.regions()[0].base));
    let begun = Instant::now();
    let (local, remote) = listed((&worker, &region, &to, &description), &mine, &theirs);
    let listed = begun.elapsed();
    let index = shuffled(rows as u32);
    let (local_index, remote_index) = (Some(&*index), Some(&*index));
    let options = MoveOptions { local_index, remote_index, notice: b"n", ..Default::default() };
    for kind in [MoveKind::Write, MoveKind::Read] {
        let begun = Instant::now();
        let prepared = prepared(&to, kind, (&local, &remote), options);
        let took = begun.elapsed();
        let mut samples = Vec::new();
        for _ in 0..=moves {
            let begun = Instant::now();
            prepared.start(StartOptions::default()).expect("a start").wait(LIMIT).expect("its end");
            samples.push(begun.elapsed().as_secs_f64() * 1e6);
        }
        println!("first {:.1} us, prepare {took:.1?}, both lists {listed:.1?}", samples.remove(0));
        let least = samples.iter().copied().fold(f64::MAX, f64::min);
        let (us, all) = (median(samples), (rows * bytes) as f64);
        let (each, rate) = (us / rows as f64, all / us / 1e3);
        let best = least / rows as f64;
        println!("{tls} {} {kind:?} {rows} x {bytes}: {each:.3} us a row (best {best:.3}), {rate:.2} GB/s", args[1]);
    }
    if std::env::var("ROWS_ECHO").is_ok() {
        echoes(&worker, &to, &local, &remote);
    }
    drop((local, remote, to));
    worker.close().unwrap();
    let _ = server.wait();
}
