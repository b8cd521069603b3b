//! Measures a single TCP lane over loopback between two processes, without the engine.
//!
//! `cargo run --release -p crossrail-tcp --example raw_lane -- [copy|reference|checked] [spin|sleep] [CHUNK_KIB]`
//! prints the one-way latency of 8 bytes, the rate of 64 MiB in frames of CHUNK_KIB (2048), and the CPU time per GB at
//! each end.

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crossrail_tcp::{Binding, CheckedLane, Options, TcpLane, describe, dial, listen};
use crossrail_transport::{Lane, LaneError, Payload, Place, Post, Sink, Tx};
use crossrail_types::{Head, LaneId};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;

const TOTAL: usize = 64 << 20;
const PINGS: usize = 50_000;
const BULKS: usize = 40;

/// A sink that sends queued frames and places frame `seq` in the chunk with that index of `memory`.
struct Buffers {
    queue: VecDeque<Tx>,
    memory: Vec<u8>,
    chunk: usize,
    placed: usize,
}

impl Sink for Buffers {
    fn next(&mut self, _: LaneId) -> Option<Tx> {
        self.queue.pop_front()
    }

    fn sent(&mut self, _: LaneId, _: u64) {}

    fn place(&mut self, _: LaneId, head: &Head) -> Place {
        let seq = u32::from_le_bytes([head.0[8], head.0[9], head.0[10], head.0[11]]) as usize;
        let len = head.payload_len() as usize;
        match self.memory.get_mut(seq * self.chunk..seq * self.chunk + len) {
            Some(dst) => Place::Into { dst: dst.as_mut_ptr(), len, grant: None, token: 0 },
            None => Place::Refuse("outside the buffer".into()),
        }
    }

    fn placed(&mut self, _: LaneId, _: u64) {
        self.placed += 1;
    }
}

struct End {
    lane: Box<dyn Lane>,
    /// The lane's connection.
    stream: TcpStream,
    buffers: Buffers,
    spin: bool,
    epoll: Epoll,
}

impl End {
    fn new(stream: TcpStream, mode: &str, buffers: Buffers, spin: bool) -> Result<End, Box<dyn std::error::Error>> {
        let options = Options { zero_copy: mode == "reference", ..Options::default() };
        let (own, name) = (stream.try_clone()?, "tcp".to_owned());
        let lane: Box<dyn Lane> = match mode {
            "checked" => Box::new(CheckedLane::checked(stream, LaneId(1), name, &options)?),
            _ => Box::new(TcpLane::new(stream, LaneId(1), name, &options)?),
        };
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT | EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLET;
        epoll.add(own.as_fd(), EpollEvent::new(flags, 0))?;
        Ok(End { lane, stream: own, buffers, spin, epoll })
    }

    fn frame(&self, seq: usize, len: usize) -> Tx {
        let mut head = Head::new(1, len as u32);
        head.0[8..12].copy_from_slice(&(seq as u32).to_le_bytes());
        let ptr = self.buffers.memory[seq * self.buffers.chunk..].as_ptr();
        Tx { head, payload: Payload { ptr, len, ..Payload::EMPTY }, token: 0 }
    }

    fn post(&mut self, len: usize) -> Result<(), LaneError> {
        let tx = self.frame(0, len);
        if self.lane.post(&tx)? == Post::Full {
            self.buffers.queue.push_back(tx);
        }
        Ok(())
    }

    fn queue_bulk(&mut self) {
        for seq in 0..TOTAL / self.buffers.chunk {
            let tx = self.frame(seq, self.buffers.chunk);
            self.buffers.queue.push_back(tx);
        }
    }

    fn until_placed(&mut self, count: usize) -> Result<(), LaneError> {
        while self.buffers.placed < count {
            let moved = self.lane.poll(&mut self.buffers, 1 << 20, self.spin)?;
            if !moved && !self.spin && self.lane.arm() {
                let mut events = [EpollEvent::empty()];
                if self.epoll.wait(&mut events, 10_000u16).is_ok() {
                    let seen = events[0].events();
                    self.lane.ready(!(seen & !EpollFlags::EPOLLOUT).is_empty(), seen.contains(EpollFlags::EPOLLOUT));
                }
            }
        }
        Ok(())
    }
}

fn cpu() -> Duration {
    let Ok(usage) = getrusage(UsageWho::RUSAGE_SELF) else { return Duration::ZERO };
    let micros = usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

fn play(mut end: End, opens: bool, label: &str) -> Result<(), LaneError> {
    let spin = std::mem::replace(&mut end.spin, true);
    let start = Instant::now();
    for count in 1..=PINGS {
        if opens {
            end.post(8)?;
        }
        end.until_placed(count)?;
        if !opens {
            end.post(8)?;
        }
    }
    if opens {
        println!("{label}: 8 B one way {:.2} us", start.elapsed().as_secs_f64() * 1e6 / (2 * PINGS) as f64);
    }
    end.spin = spin;
    let (start, before, mut best) = (Instant::now(), cpu(), f64::MAX);
    let frames = TOTAL / end.buffers.chunk;
    for count in 1..=BULKS {
        let start = Instant::now();
        if opens {
            end.queue_bulk();
            end.until_placed(PINGS + count)?;
        } else {
            end.until_placed(PINGS + count * frames)?;
            end.post(8)?;
        }
        best = best.min(start.elapsed().as_secs_f64());
    }
    let gigabytes = (BULKS * TOTAL) as f64 / 1e9;
    let side = if opens { "sender" } else { "receiver" };
    let per_gb = (cpu() - before).as_secs_f64() * 1e3 / gigabytes;
    if opens {
        let average = gigabytes / start.elapsed().as_secs_f64();
        println!("{label}: 64 MiB {average:.2} GB/s, best {:.2} GB/s", TOTAL as f64 / 1e9 / best);
    }
    println!("{label}: {side} {per_gb:.0} ms of CPU per GB, {:?}", describe(&end.stream));
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let address = arguments.iter().position(|word| word.starts_with("peer=")).map(|at| arguments.remove(at));
    let word = |at: usize, fallback: &str| arguments.get(at).cloned().unwrap_or(fallback.into());
    let (mode, waiting, chunk) = (word(0, "reference"), word(1, "spin"), word(2, "2048").parse::<usize>()? << 10);
    let label = format!("{mode} {waiting} {} KiB", chunk >> 10);
    let buffers = Buffers { queue: VecDeque::new(), memory: vec![1; TOTAL], chunk, placed: 0 };
    let binding = Binding { device: None, address: [127, 0, 0, 1].into() };
    let deadline = Instant::now() + Duration::from_secs(5);
    if let Some(address) = address {
        let to: SocketAddr = address.trim_start_matches("peer=").parse()?;
        let stream = dial(Some(&binding), to, deadline)?;
        play(End::new(stream, &mode, buffers, waiting == "spin")?, true, &label)?;
        return Ok(());
    }
    let listener = listen(&binding, 0)?;
    let mut child = Command::new(std::env::current_exe()?)
        .args(&arguments)
        .arg(format!("peer={}", listener.local_addr()?))
        .stdin(Stdio::null())
        .spawn()?;
    let (stream, _) = listener.accept()?;
    play(End::new(stream, &mode, buffers, waiting == "spin")?, false, &label)?;
    child.wait()?;
    Ok(())
}
