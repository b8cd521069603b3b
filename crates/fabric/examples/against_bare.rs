//! One-sided writes over libfabric compared with a bare loop of the library's own calls on the same provider, taking turns.
//!
//!     cargo run --release -p crossrail-fabric --features bare --example against_bare -- [--json] PROVIDER [ROUNDS [TIMES]]
//!
//! Two threads of one process, each on a processor of its own, on loopback. Microseconds: `8 B`: half a round trip of
//! writes with an immediate; of longer ones: a write and its confirmation, an answer of 8 bytes in the bare loop, and its
//! acknowledgement in ours. TIMES: of the shortest; longer ones are fewer. Medians of each round, or with `--json` every
//! sample, one object per line: compare within it.
#![allow(unsafe_code)] // the example's own memory, which outlives the objects

use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crossrail_fabric::bare::Bare;
use crossrail_fabric::{FabricPlacing, Library, Offer, VARIABLE, Wanted, attach};
use crossrail_locks::PerProcess;
use crossrail_transport::placing::{Event, Extent, Imm, Key, Placing};
use crossrail_transport::{Loan, Post};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

const LIMIT: Duration = Duration::from_secs(20);
const PAGE: usize = 4096;
const LARGEST: usize = 64 << 20;
/// Lengths of writes, and by what their number is divided.
const WRITES: [(usize, usize); 2] = [(1 << 20, 10), (LARGEST, 200)];
/// Bytes of a row; how many are in flight at once, the last of which is confirmed; and by what the number of samples is
/// divided.
const ROW: usize = 2304;
const ROWS: usize = 10_000;
const ROWS_DIVIDED: usize = 200;
/// Pieces of a counter, more than writes may be in flight.
const PIECES: u16 = 1 << 12;
/// Untimed round trips before the timed ones, and writes.
const WARMUP: usize = 100;
const WARM_WRITES: usize = 4;

fn main() {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let json = arguments.first().is_some_and(|first| first == "--json");
    arguments.drain(..usize::from(json));
    let number = |at: usize, or: usize| arguments.get(at).map_or(or, |text| text.parse().expect("a number"));
    let (rounds, times) = (number(1, 5), number(2, 2000));
    let provider = arguments.first().map_or("tcp", String::as_str);
    let place = std::env::var_os(VARIABLE).map(std::path::PathBuf::from);
    let library = Library::load(place.as_deref()).unwrap_or_else(|absent| panic!("{}", absent.why));
    let address = (provider != "shm").then_some(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let wanted = Wanted { provider: Some(provider), address, ..Wanted::default() };
    let offer = &library.offers(&wanted).unwrap_or_else(|error| panic!("{error}"))[0];
    let name = format!("libfabric {} {offer}", library.version());
    if !json {
        println!("{name}\n{:>10} {:>10} {:>10} {:>10}", "bytes", "ours us", "bare us", "ours/bare");
    }
    on_processor(0);
    for _ in 0..rounds {
        show(json, &name, 8, &latency(offer, times), &bare_latency(offer, times));
        for (size, divided) in WRITES {
            let count = (times / divided).max(2);
            show(json, &name, size, &writes(offer, (size, 1), count), &bare_writes(offer, (size, 1), count));
        }
        let count = (times / ROWS_DIVIDED).max(2);
        show(json, &name, ROW, &writes(offer, (ROW, ROWS), count), &bare_writes(offer, (ROW, ROWS), count));
    }
}

fn show(json: bool, name: &str, size: usize, ours: &[f64], bare: &[f64]) {
    if json {
        println!("{{\"library\": {name:?}, \"size\": {size}, \"ours_us\": {ours:?}, \"bare_us\": {bare:?}}}");
        return;
    }
    let (ours, bare) = (median(ours), median(bare));
    println!("{size:>10} {ours:>10.2} {bare:>10.2} {:>10.2}", ours / bare);
}

/// Keeps this thread on one of the processors that the process may use: the bare loop and ours must not differ in that.
fn on_processor(position: usize) {
    static ALLOWED: PerProcess<OnceLock<Vec<usize>>> = PerProcess::new();
    let all = ALLOWED.get_or_init(|| {
        let allowed = sched_getaffinity(Pid::from_raw(0)).expect("processors");
        (0..CpuSet::count()).filter(|cpu| allowed.is_set(*cpu).unwrap_or(false)).collect()
    });
    let mut own = CpuSet::new();
    if own.set(all[position % all.len()]).is_ok() {
        sched_setaffinity(Pid::from_raw(0), &own).expect("a processor");
    }
}

fn streams() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
    let dialled = TcpStream::connect(listener.local_addr().expect("bound")).expect("dial");
    (dialled, listener.accept().expect("accept").0)
}

/// Whole pages, as the bare loop has: how a copy is aligned decides its rate.
struct Pages(Vec<[u64; 512]>);

impl Pages {
    fn new(len: usize) -> Pages {
        let mut pages = Vec::with_capacity(len.div_ceil(PAGE) + 1);
        pages.resize_with(len.div_ceil(PAGE) + 1, || [5; 512]);
        Pages(pages)
    }

    fn start(&mut self) -> *mut u8 {
        let start = self.0.as_mut_ptr().cast::<u8>();
        start.wrapping_add(start.align_offset(PAGE))
    }
}

/// One end, and the memory that the other writes into.
struct End {
    placing: FabricPlacing,
    key: Key,
    imm: Imm,
    _heap: Pages,
}

fn end(stream: TcpStream, offer: &Offer, len: usize) -> End {
    let mut placing = attach(stream, offer, "the other", "fabric", Instant::now() + LIMIT).expect("joined");
    let mut heap = Pages::new(len);
    // SAFETY: the object is dropped before the memory.
    let key = unsafe { placing.expose(&Extent::host(heap.start(), len), &Arc::new(Loan::default())) };
    let imm = Imm { counter: placing.count(PIECES).expect("a counter"), piece: 0 };
    End { placing, key: key.expect("a key"), imm, _heap: heap }
}

fn pair(offer: &Offer, len: usize) -> (End, End) {
    let (here, there) = streams();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| end(there, offer, len));
        (end(here, offer, len), other.join().expect("no panic"))
    })
}

/// Halves of round trips of 8 bytes.
fn latency(offer: &Offer, times: usize) -> Vec<f64> {
    let (mut a, mut b) = pair(offer, 4096);
    let (to_a, to_b) = ((a.key, a.imm), (b.key, b.imm));
    let done = AtomicBool::new(false);
    let play = |end: &mut End, (key, imm): (Key, Imm), opens: bool| {
        let bytes = [7u8; 8];
        let mut samples = Vec::with_capacity(WARMUP + times);
        let mut arrived = usize::from(opens);
        for _ in 0..WARMUP + times {
            let start = Instant::now();
            while arrived == 0 {
                end.placing.poll(&mut |event| arrived += usize::from(matches!(event, Event::Arrived(_)))).expect("up");
            }
            arrived -= 1;
            // SAFETY: the bytes outlive the object's use of them: it is polled until the end.
            unsafe { end.placing.write(&[Extent::host(bytes.as_ptr(), 8)], &key, 0, imm, 0) }.expect("room");
            end.placing.poll(&mut |event| arrived += usize::from(matches!(event, Event::Arrived(_)))).expect("up");
            samples.push(micros(start) / 2.0);
        }
        // What is owed to the other end.
        finish(&done, opens, arrived, |count| {
            end.placing.poll(&mut |event| *count += usize::from(matches!(event, Event::Arrived(_)))).expect("up");
        });
        samples.split_off(WARMUP)
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            on_processor(1);
            play(&mut b, to_a, false);
        });
        play(&mut a, to_b, true)
    })
}

/// Polls until neither end waits for the other: the opening end receives the last answer and then sets `done`.
fn finish(done: &AtomicBool, opens: bool, arrived: usize, mut poll: impl FnMut(&mut usize)) {
    let mut arrived = arrived;
    let start = Instant::now();
    while if opens { arrived == 0 } else { !done.load(Ordering::Acquire) } {
        poll(&mut arrived);
        assert!(start.elapsed() < LIMIT, "the last answer does not arrive");
    }
    done.store(true, Ordering::Release);
}

/// Bursts of `rows` writes, until all of a burst are acknowledged.
fn writes(offer: &Offer, (size, rows): (usize, usize), count: usize) -> Vec<f64> {
    let (mut a, mut b) = pair(offer, size);
    let (key, imm) = (b.key, b.imm);
    let mut bytes = Pages::new(size);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            on_processor(1);
            while !done.load(Ordering::Relaxed) {
                b.placing.poll(&mut |_| {}).expect("up");
            }
        });
        let mut samples = Vec::with_capacity(WARM_WRITES + count);
        for _ in 0..WARM_WRITES + count {
            let start = Instant::now();
            let (mut posted, mut ended) = (0, 0);
            while ended < rows {
                while posted < rows {
                    let imm = Imm { piece: (posted % usize::from(PIECES)) as u16, ..imm };
                    // SAFETY: the bytes are kept until the writes have ended.
                    let taken = unsafe { a.placing.write(&[Extent::host(bytes.start(), size)], &key, 0, imm, 0) };
                    if taken.expect("up") == Post::Full {
                        break;
                    }
                    posted += 1;
                }
                a.placing.poll(&mut |event| ended += usize::from(matches!(event, Event::Ended { .. }))).expect("up");
            }
            samples.push(micros(start));
        }
        done.store(true, Ordering::Relaxed);
        samples.split_off(WARM_WRITES)
    })
}

fn bare_latency(offer: &Offer, times: usize) -> Vec<f64> {
    let (mut a, mut b) = bare(offer, 4096);
    let done = AtomicBool::new(false);
    let play = |end: &mut Bare, opens: bool| {
        let mut samples = Vec::with_capacity(WARMUP + times);
        for turn in 0..WARMUP + times {
            let start = Instant::now();
            if !opens || turn > 0 {
                end.await_arrival();
            }
            end.write(8);
            samples.push(micros(start) / 2.0);
        }
        finish(&done, opens, 0, |count| {
            end.progress();
            *count += usize::from(end.take_arrival());
        });
        samples.split_off(WARMUP)
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            on_processor(1);
            play(&mut b, false);
        });
        play(&mut a, true)
    })
}

fn bare_writes(offer: &Offer, (size, rows): (usize, usize), count: usize) -> Vec<f64> {
    let (mut a, mut b) = bare(offer, size);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            on_processor(1);
            for _ in 0..WARM_WRITES + count {
                (0..rows).for_each(|_| b.await_arrival());
                b.write(8);
            }
            while !done.load(Ordering::Relaxed) {
                b.progress();
            }
        });
        let mut samples = Vec::with_capacity(WARM_WRITES + count);
        for _ in 0..WARM_WRITES + count {
            let start = Instant::now();
            (0..rows).for_each(|_| a.write(size));
            a.await_arrival();
            samples.push(micros(start));
        }
        done.store(true, Ordering::Relaxed);
        samples.split_off(WARM_WRITES)
    })
}

fn bare(offer: &Offer, len: usize) -> (Bare, Bare) {
    let mut ends = (Bare::new(offer, len).expect("opened"), Bare::new(offer, len).expect("opened"));
    Bare::join(&mut ends.0, &mut ends.1).expect("inserted");
    ends
}

fn micros(since: Instant) -> f64 {
    since.elapsed().as_nanos() as f64 / 1e3
}

fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}
