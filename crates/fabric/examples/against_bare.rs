//! One-sided writes over libfabric compared with a bare loop of the library's own calls on the same provider, taking turns.
//!
//!     cargo run --release -p crossrail-fabric --features bare --example against_bare -- PROVIDER [ROUNDS]
//!
//! Two threads of one process, on loopback. `8 B`: half a round trip of writes with an immediate, medians of 2,000. The
//! others: GB/s of one write after the other, each confirmed by an answer of 8 bytes in the bare loop, and by its
//! acknowledgement in ours. Each line is one round; compare columns within it.
#![allow(unsafe_code)] // the example's own memory, which outlives the objects

use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossrail_fabric::bare::Bare;
use crossrail_fabric::{FabricPlacing, Library, Offer, VARIABLE, Wanted, attach};
use crossrail_transport::Loan;
use crossrail_transport::placing::{Event, Extent, Imm, Key, Placing};

const LIMIT: Duration = Duration::from_secs(20);
const LARGEST: usize = 64 << 20;
const SHORT: usize = 2000;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let provider = arguments.next().unwrap_or_else(|| "tcp".to_owned());
    let rounds: usize = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(5);
    let place = std::env::var_os(VARIABLE).map(std::path::PathBuf::from);
    let library = Library::load(place.as_deref()).unwrap_or_else(|absent| panic!("{}", absent.why));
    let address = (provider != "shm").then_some(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let wanted = Wanted { provider: Some(&provider), address, ..Wanted::default() };
    let offer = &library.offers(&wanted).unwrap_or_else(|error| panic!("{error}"))[0];
    println!("libfabric {} {offer}", library.version());
    println!(
        "{:>6} {:>12} {:>12} {:>8} {:>12} {:>12} {:>8}",
        "", "ours 8 B us", "bare", "ours/bare", "size", "ours GB/s", "bare"
    );
    for round in 0..rounds {
        let (ours, bare) = (latency(offer), bare_latency(offer));
        let (ours, bare) = (ours.as_secs_f64() * 1e6, bare.as_secs_f64() * 1e6);
        println!("{round:>6} {ours:>12.2} {bare:>12.2} {:>8.2}", ours / bare);
        for (size, count) in [(1 << 20, 200), (LARGEST, 8)] {
            let (ours, bare) = (rate(offer, size, count), bare_rate(offer, size, count));
            println!("{:>41} {:>12} {ours:>12.2} {bare:>8.2} {:>8.2}", "", size, ours / bare);
        }
    }
}

fn streams() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
    let dialled = TcpStream::connect(listener.local_addr().expect("bound")).expect("dial");
    (dialled, listener.accept().expect("accept").0)
}

/// One end, and the memory that the other writes into.
struct End {
    placing: FabricPlacing,
    key: Key,
    imm: Imm,
    _heap: Vec<u8>,
}

fn end(stream: TcpStream, offer: &Offer, len: usize) -> End {
    let mut placing = attach(stream, offer, "the other", "fabric", Instant::now() + LIMIT).expect("joined");
    let mut heap = vec![1; len];
    // SAFETY: the object is dropped before the memory.
    let key = unsafe { placing.expose(&Extent::host(heap.as_mut_ptr(), len), &Arc::new(Loan::default())) };
    let imm = Imm { counter: placing.count(1).expect("a counter"), piece: 0 };
    End { placing, key: key.expect("a key"), imm, _heap: heap }
}

fn pair(offer: &Offer, len: usize) -> (End, End) {
    let (here, there) = streams();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| end(there, offer, len));
        (end(here, offer, len), other.join().expect("no panic"))
    })
}

/// Half of the median round trip of 8 bytes.
fn latency(offer: &Offer) -> Duration {
    let (mut a, mut b) = pair(offer, 4096);
    let (to_a, to_b) = ((a.key, a.imm), (b.key, b.imm));
    let play = |end: &mut End, (key, imm): (Key, Imm), opens: bool| {
        let bytes = [7u8; 8];
        let mut times = Vec::with_capacity(SHORT);
        let mut arrived = usize::from(opens);
        for _ in 0..SHORT + 100 {
            let start = Instant::now();
            while arrived == 0 {
                end.placing.poll(&mut |event| arrived += usize::from(matches!(event, Event::Arrived(_)))).expect("up");
            }
            arrived -= 1;
            // SAFETY: the bytes outlive the object's use of them: it is polled until the end.
            unsafe { end.placing.write(&[Extent::host(bytes.as_ptr(), 8)], &key, 0, imm, 0) }.expect("room");
            end.placing.poll(&mut |event| arrived += usize::from(matches!(event, Event::Arrived(_)))).expect("up");
            times.push(start.elapsed());
        }
        // What is owed.
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(20) {
            end.placing.poll(&mut |_| {}).expect("up");
        }
        median(times)
    };
    std::thread::scope(|scope| {
        scope.spawn(|| play(&mut b, to_a, false));
        play(&mut a, to_b, true)
    }) / 2
}

/// Bytes per nanosecond of writes one after the other, of which four are in flight.
fn rate(offer: &Offer, size: usize, count: usize) -> f64 {
    let (mut a, mut b) = pair(offer, LARGEST);
    let (key, imm) = (b.key, b.imm);
    let bytes = vec![5; size];
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                b.placing.poll(&mut |_| {}).expect("up");
            }
        });
        let mut start = Instant::now();
        for turn in 0..count + 4 {
            if turn == 4 {
                start = Instant::now();
            }
            // SAFETY: the bytes are kept until the write has ended.
            unsafe { a.placing.write(&[Extent::host(bytes.as_ptr(), size)], &key, 0, imm, 0) }.expect("room");
            let mut ended = false;
            while !ended {
                a.placing.poll(&mut |event| ended |= matches!(event, Event::Ended { .. })).expect("up");
            }
        }
        let took = start.elapsed();
        done.store(true, Ordering::Relaxed);
        (size * count) as f64 / took.as_nanos() as f64
    })
}

fn bare_latency(offer: &Offer) -> Duration {
    let (mut a, mut b) = bare(offer, 4096);
    let play = |end: &mut Bare, opens: bool| {
        let mut times = Vec::with_capacity(SHORT);
        let mut has = opens;
        for _ in 0..SHORT + 100 {
            let start = Instant::now();
            if !has {
                end.await_arrival();
            }
            has = false;
            end.write(8);
            times.push(start.elapsed());
        }
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(20) {
            end.progress();
        }
        median(times)
    };
    std::thread::scope(|scope| {
        scope.spawn(|| play(&mut b, false));
        play(&mut a, true)
    }) / 2
}

fn bare_rate(offer: &Offer, size: usize, count: usize) -> f64 {
    let (mut a, mut b) = bare(offer, LARGEST);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..count + 4 {
                b.await_arrival();
                b.write(8);
            }
            let start = Instant::now();
            while start.elapsed() < Duration::from_millis(50) {
                b.progress();
            }
        });
        let mut start = Instant::now();
        for turn in 0..count + 4 {
            if turn == 4 {
                start = Instant::now();
            }
            a.write(size);
            a.await_arrival();
        }
        (size * count) as f64 / start.elapsed().as_nanos() as f64
    })
}

fn bare(offer: &Offer, len: usize) -> (Bare, Bare) {
    let mut ends = (Bare::new(offer, len).expect("opened"), Bare::new(offer, len).expect("opened"));
    Bare::join(&mut ends.0, &mut ends.1).expect("inserted");
    ends
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.drain(..100);
    times.sort_unstable();
    times[times.len() / 2]
}
