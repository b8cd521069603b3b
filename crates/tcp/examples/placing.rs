//! Measures one-sided writes over loopback between two processes, both ways at once in lockstep, compared with the same bytes over
//! bare sockets driven by one thread.
//!
//! `cargo run --release -p crossrail-tcp --example placing -- [RAILS] [THREADS] [SIZE...]` prints the median time of a round for
//! 59, 115, 946 kB, 1.84 and 30 MB over four loopback addresses: each end writes SIZE bytes and waits for
//! as many; THREADS: the number of objects, each with connections of its own, that share the bytes.
//! `... -- small COUNT` sends COUNT writes of 64 bytes one way, 32 to a poll, for counting system calls and instructions.
#![allow(unsafe_code)] // writes from and exposes buffers that outlive the object

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::process::{Child, Command};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use crossrail_tcp::placing::{Connection, Door, LINKS_MAX, TcpPlacing};
use crossrail_tcp::{Binding, dial, listen};
use crossrail_transport::placing::{Counter, Event, Extent, Imm, Key, Placing};

const SIZES: [usize; 5] = [59_136, 114_688, 946_176, 1_835_008, 30_277_632];
/// Writes of a round: what a command stands for.
const CHUNK: usize = 64 * 1024;
const CHUNKS: usize = 64;

fn binding(rail: usize) -> Binding {
    Binding { device: None, address: [127, 0, 0, 1 + rail as u8].into() }
}

/// The connections of one end; the last one is for words between the two.
fn connect(
    rails: usize,
    threads: usize,
    to: Option<&[SocketAddr]>,
    args: &[String],
) -> (Vec<TcpStream>, Option<Child>) {
    let deadline = Instant::now() + Duration::from_secs(10);
    let rail_of = |at: usize| binding(at % (rails + 1) % rails);
    if let Some(to) = to {
        let dialled = to.iter().enumerate().map(|(at, to)| dial(Some(&rail_of(at)), *to, deadline).expect("dial"));
        return (dialled.collect(), None);
    }
    let listeners: Vec<_> = (0..threads * (rails + 1)).map(|at| listen(&rail_of(at), 0).expect("listen")).collect();
    let addresses: Vec<String> =
        listeners.iter().map(|listener| listener.local_addr().expect("bound").to_string()).collect();
    let me = std::env::current_exe().expect("a path");
    let child = Command::new(me).arg("child").arg(addresses.join(",")).args(args).spawn().expect("spawn");
    let accepted = listeners.iter().map(|listener| listener.accept().expect("accept").0).collect();
    (accepted, Some(child))
}

fn percentile(samples: &mut [f64], of: usize) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[(samples.len() * of / 100).min(samples.len() - 1)]
}

/// Rounds of `size` bytes; the microseconds of each.
fn rounds(size: usize, mut round: impl FnMut(u32)) -> Vec<f64> {
    let count: u32 = if size > 4_000_000 { 40 } else { 400 };
    let mut samples = Vec::new();
    for at in 0..count {
        let start = Instant::now();
        round(at);
        if at >= count / 4 {
            samples.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    samples
}

/// One thread, each chunk over the next socket, received in the same order.
fn bare(sockets: &[TcpStream], size: usize) -> Vec<f64> {
    let (from, mut to) = (vec![1u8; size], vec![0u8; size]);
    let chunk = CHUNK.max(size.div_ceil(CHUNKS));
    let share = |rail: usize, at: usize| (at * sockets.len() + rail) * chunk;
    for socket in sockets {
        socket.set_nonblocking(true).expect("fcntl");
        socket.set_nodelay(true).expect("setsockopt");
    }
    rounds(size, |_| {
        // The chunk and the position in it, of each socket and direction.
        let (mut sent, mut got) = (vec![(0, 0); sockets.len()], vec![(0, 0); sockets.len()]);
        let mut left = 2 * size;
        while left > 0 {
            for (rail, mut socket) in sockets.iter().enumerate() {
                for (out, (at, done)) in [(true, &mut sent[rail]), (false, &mut got[rail])] {
                    let first = share(rail, *at);
                    if first >= size {
                        continue;
                    }
                    let end = (first + chunk).min(size);
                    let moved = match out {
                        true => socket.write(&from[first + *done..end]),
                        false => socket.read(&mut to[first + *done..end]),
                    };
                    let n = moved.unwrap_or(0);
                    (*done, left) = (*done + n, left - n);
                    if *done == end - first {
                        (*at, *done) = (*at + 1, 0);
                    }
                }
            }
        }
    })
}

struct Ends {
    placing: TcpPlacing,
    words: TcpStream,
}

fn placing(mut sockets: Vec<TcpStream>, dials: bool) -> Ends {
    let words = sockets.pop().expect("one more than rails");
    let name = |at: usize| format!("tcp/{}", binding(at).address);
    let connections = sockets.into_iter().enumerate();
    let connections = connections
        .map(|(at, stream)| Connection { id: at as u16, name: name(at), cost: 0, interface: None, stream })
        .collect();
    let door = Arc::new(Door::new(LINKS_MAX).expect("a descriptor"));
    Ends { placing: TcpPlacing::new("the other end", dials, connections, door).expect("options"), words }
}

impl Ends {
    /// Exposes memory and gets the peer's.
    fn meet(&mut self, memory: &mut [u8]) -> (Key, Counter) {
        let extent = Extent::host(memory.as_mut_ptr(), memory.len());
        // SAFETY: callers drop the object first, or keep the memory until the process ends.
        let key = unsafe { self.placing.expose(&extent, &Arc::default()) }.expect("a key");
        let counter = self.placing.count(4096).expect("a counter");
        self.words.write_all(&key.0).expect("words");
        let mut theirs = Key([0; 32]);
        self.words.read_exact(&mut theirs.0).expect("words");
        (theirs, counter)
    }

    fn lockstep(&mut self, size: usize) -> Vec<f64> {
        let from = vec![1u8; size].leak();
        // Two halves, by turns: the peer may be one round ahead.
        let memory = vec![0u8; 2 * size].leak();
        let (key, counter) = self.meet(memory);
        let chunk = CHUNK.max(size.div_ceil(CHUNKS));
        let count = size.div_ceil(chunk);
        let (mut arrived, mut posted, mut ended) = (0usize, 0usize, 0usize);
        let samples = rounds(size, |round| {
            let half = (round as usize % 2) * size;
            for piece in 0..count {
                let at = piece * chunk;
                let extent = Extent::host(from[at..].as_ptr(), chunk.min(size - at));
                let imm = Imm { counter, piece: (piece + (round as usize % 2) * count) as u16 };
                // SAFETY: `from` was leaked.
                let result = unsafe { self.placing.write(&[extent], &key, (half + at) as u64, imm, 0) };
                result.expect("up");
                posted += 1;
            }
            while arrived < count * (round as usize + 1) {
                let counts = &mut |event| match event {
                    Event::Arrived(_) => arrived += 1,
                    Event::Ended { .. } => ended += 1,
                };
                self.placing.poll(counts).expect("up");
            }
        });
        // The peer waits for the rest, and for acknowledgements.
        while ended < posted {
            let counts = &mut |event| ended += usize::from(matches!(event, Event::Ended { .. }));
            self.placing.poll(counts).expect("up");
        }
        self.placing.arm();
        samples
    }

    /// One way, 32 writes to a poll.
    fn small(&mut self, count: usize, sends: bool) {
        let mut memory = vec![0u8; 4096];
        let from = [7u8; 64];
        let (key, counter) = self.meet(&mut memory);
        let (mut posted, mut done) = (0usize, 0);
        while done < count {
            while sends && posted < count && posted < done + 512 {
                let imm = Imm { counter, piece: (posted % 4096) as u16 };
                // SAFETY: `from` stays until all writes have ended.
                unsafe { self.placing.write(&[Extent::host(from.as_ptr(), 64)], &key, 0, imm, 0) }.expect("up");
                posted += 1;
                if posted.is_multiple_of(32) {
                    break;
                }
            }
            self.placing.poll(&mut |_| done += 1).expect("up");
        }
        self.placing.arm();
        let _ = self.words.shutdown(Shutdown::Write);
        let _ = self.words.read(&mut [0]);
    }
}

fn run(args: &[String], to: Option<&[SocketAddr]>) {
    let small = args.first().is_some_and(|arg| arg == "small");
    let number = |at: usize| args.get(at).and_then(|arg| arg.parse::<usize>().ok());
    if small {
        let (sockets, child) = connect(1, 1, to, args);
        placing(sockets, to.is_some()).small(number(1).unwrap_or(100_000), to.is_none());
        child.map(|mut child| child.wait());
        return;
    }
    let (rails, threads) = (number(0).unwrap_or(4), number(1).unwrap_or(1));
    let given: Vec<usize> = (2..args.len()).filter_map(number).collect();
    let sizes = if given.is_empty() { SIZES.to_vec() } else { given };
    let (mut sockets, child) = connect(rails, threads, to, args);
    let is_parent = to.is_none();
    let parts: Vec<Vec<TcpStream>> = (0..threads).map(|_| sockets.split_off(sockets.len() - rails - 1)).collect();
    let play = |part: Vec<TcpStream>, barrier: &Barrier| {
        let meet = |mut words: &TcpStream| {
            words.write_all(&[1]).expect("words");
            words.read_exact(&mut [0]).expect("words");
            barrier.wait();
        };
        let words = part[rails].try_clone().expect("a descriptor");
        let mut found = Vec::new();
        for size in &sizes {
            meet(&words);
            found.push((bare(&part[..rails], size / threads), Vec::new()));
        }
        meet(&words);
        let mut ends = placing(part, !is_parent);
        for (size, (_, samples)) in sizes.iter().zip(&mut found) {
            meet(&words);
            *samples = ends.lockstep(size / threads);
        }
        meet(&words);
        found
    };
    let barrier = Barrier::new(threads);
    let found: Vec<Vec<(Vec<f64>, Vec<f64>)>> = std::thread::scope(|scope| {
        let all: Vec<_> = parts.into_iter().map(|part| scope.spawn(|| play(part, &barrier))).collect();
        all.into_iter().map(|one| one.join().expect("no panic")).collect()
    });
    for (at, size) in sizes.iter().enumerate().filter(|_| is_parent) {
        let mut of_bare: Vec<f64> = found.iter().flat_map(|part| part[at].0.clone()).collect();
        let mut of_ours: Vec<f64> = found.iter().flat_map(|part| part[at].1.clone()).collect();
        let [bare, ours] = [&mut of_bare, &mut of_ours].map(|of| [10, 25, 50].map(|rank| percentile(of, rank)));
        println!(
            "{size:>9} B each way, {rails} rails x {threads}: bare p10 {:>8.1} p25 {:>8.1} p50 {:>8.1} us   placing p10 {:>8.1} p25 {:>8.1} p50 {:>8.1} us",
            bare[0], bare[1], bare[2], ours[0], ours[1], ours[2]
        );
    }
    child.map(|mut child| child.wait());
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.first().map(String::as_str) {
        Some("child") => {
            let to: Vec<SocketAddr> = args[1].split(',').map(|address| address.parse().expect("an address")).collect();
            run(&args[2..], Some(&to));
        }
        _ => run(&args, None),
    }
}
