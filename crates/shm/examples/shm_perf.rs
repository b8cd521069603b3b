//! What one lane between two pinned processes reaches by raw lane calls: `cargo run --release --example shm_perf`
//! (with `LATENCY_ONLY=1`: nothing but the first figure).
//!
//! Prints one-way latency of 8 bytes (half the round trip), and GB/s (1e9 bytes) through the ring and by direct
//! copies: pulled by the receiver, pushed by the sender, and copied by both; in mapped memory and by CMA.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::error::Error;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::Command;
use std::time::{Duration, Instant};

use crossrail_shm::{Arena, Options, Segment, ShmLane, Side, attach};
use crossrail_transport::{Copy, Descriptor, Job, Lane, Payload, Place, Post, Sink, Step, Tx};
use crossrail_types::{Head, LaneId};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

type Outcome<T> = Result<T, Box<dyn Error>>;

const BIG: usize = 64 << 20;
const BUDGET: usize = 1 << 20;
const WINDOW: usize = 16;

const PING: u8 = 1;
const GO: u8 = 2;
const DONE: u8 = 3;
const BULK: u8 = 4;
const HERE: u8 = 5;

/// Everything one end of the measurement keeps.
struct End {
    memory: *mut u8,
    /// Frames of PING, GO and DONE that have arrived, oldest first: kind and tag.
    arrived: VecDeque<(u8, u64)>,
    word: [u8; 24],
    bulk_in: usize,
    bulk_at: usize,
    bulk_out: usize,
    bulk_len: usize,
}

impl Sink for End {
    fn next(&mut self, _: LaneId) -> Option<Tx> {
        self.bulk_out = self.bulk_out.checked_sub(self.bulk_len).filter(|_| self.bulk_len > 0)?;
        let ptr = self.memory.wrapping_add(self.bulk_out % BIG);
        let payload = Payload { ptr, len: self.bulk_len, ..Payload::EMPTY };
        Some(Tx { head: Head::new(BULK, self.bulk_len as u32), payload, token: 0 })
    }

    fn sent(&mut self, _: LaneId, _: u64) {}

    fn place(&mut self, _: LaneId, head: &Head) -> Place {
        let len = head.payload_len() as usize;
        if head.kind() == BULK {
            let at = if self.bulk_at + len > BIG { 0 } else { self.bulk_at };
            self.bulk_at = at + len;
            self.bulk_in += len;
            return Place::Into { dst: self.memory.wrapping_add(at), len, grant: None, token: 0 };
        }
        let tag = u64::from_le_bytes(head.0[24..].try_into().unwrap_or_default());
        self.arrived.push_back((head.kind(), tag));
        Place::Into { dst: self.word.as_mut_ptr(), len: len.min(24), grant: None, token: 0 }
    }

    fn placed(&mut self, _: LaneId, _: u64) {}
}

struct Measure {
    lane: ShmLane,
    end: End,
    local: *mut u8,
    remote: Descriptor,
    _segment: Option<Segment>,
    _plain: Vec<u8>,
}

impl Measure {
    fn post(&mut self, kind: u8, tag: u64, payload: &[u8]) -> Outcome<()> {
        let mut head = Head::new(kind, payload.len() as u32);
        head.0[24..].copy_from_slice(&tag.to_le_bytes());
        let payload = Payload { ptr: payload.as_ptr(), len: payload.len(), ..Payload::EMPTY };
        let tx = Tx { head, payload, token: 0 };
        while self.lane.post(&tx)? == Post::Full {
            self.lane.poll(&mut self.end, BUDGET, true)?;
        }
        Ok(())
    }

    fn hear(&mut self) -> Outcome<(u8, u64)> {
        loop {
            if let Some(frame) = self.end.arrived.pop_front() {
                return Ok(frame);
            }
            self.lane.poll(&mut self.end, BUDGET, true)?;
        }
    }

    /// Both ends learn where the other's memory is.
    fn introduce(&mut self) -> Outcome<()> {
        let local = self.local;
        let direct = self.lane.direct().ok_or("no direct copies")?;
        let (mine, _) = direct.describe(local, BIG).ok_or("this memory can't be reached by the peer")?;
        self.post(HERE, 0, &mine)?;
        self.hear()?;
        self.remote = self.end.word;
        let remote = self.remote;
        let kind = self.lane.direct().ok_or("no direct copies")?.reach(&remote, BIG)?;
        eprintln!("direct copies here: {kind:?}");
        Ok(())
    }

    fn ping(&mut self, n: u32, first: bool) -> Outcome<f64> {
        let word = 7u64.to_le_bytes();
        let start = Instant::now();
        for _ in 0..n {
            if first {
                self.post(PING, 0, &word)?;
                self.hear()?;
            } else {
                self.hear()?;
                self.post(PING, 0, &word)?;
            }
        }
        Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(n) / 2.0)
    }

    fn bulk(&mut self, len: usize, total: usize, sender: bool) -> Outcome<f64> {
        let start = Instant::now();
        if sender {
            (self.end.bulk_len, self.end.bulk_out) = (len, total);
            self.hear()?;
            self.end.bulk_len = 0;
        } else {
            while self.end.bulk_in < total {
                self.lane.poll(&mut self.end, BUDGET, true)?;
            }
            self.end.bulk_in = 0;
            self.post(DONE, 0, &[])?;
        }
        Ok(total as f64 / start.elapsed().as_secs_f64() / 1e9)
    }

    fn step(&mut self, slot: u32, at: usize, len: usize, copy: Copy, moved: &mut usize) -> Outcome<Step> {
        let mut remote = self.remote;
        let base = u64::from_le_bytes(remote[8..16].try_into()?);
        remote[8..16].copy_from_slice(&(base + at as u64).to_le_bytes());
        let local = self.local.wrapping_add(at);
        let mut job = Job { slot: Some(slot), local, remote, len, copy, moved: *moved, state: 0 };
        // SAFETY: at + len <= BIG, the size of the memory behind `local`.
        let step = unsafe { self.lane.direct().ok_or("no direct copies")?.step(&mut job, BUDGET) };
        *moved = job.moved;
        if let Step::Failed(why) = step { Err(why.into()) } else { Ok(step) }
    }

    /// `n` transfers of `len` bytes, up to a window of them under way.
    fn send_direct(&mut self, len: usize, n: usize, span: usize, help: bool) -> Outcome<f64> {
        let start = Instant::now();
        let mut open: VecDeque<(u32, usize, usize, bool)> = VecDeque::new();
        let (mut sent, mut done) = (0, 0);
        while done < n {
            if sent < n && open.len() < WINDOW {
                let slot = self.lane.direct().ok_or("no direct copies")?.open(len).ok_or("no cursor")?;
                self.post(GO, u64::from(slot), &[])?;
                open.push_back((slot, sent * len % span, 0, false));
                sent += 1;
            }
            if help
                && (sent == n || open.len() == WINDOW)
                && let Some(i) = open.iter().position(|job| !job.3)
            {
                let (slot, at, mut moved, _) = open[i];
                let step = self.step(slot, at, len, Copy::Push, &mut moved)?;
                open[i].2 = moved;
                open[i].3 = step == Step::Done || step == Step::Waiting;
            }
            self.lane.poll(&mut self.end, BUDGET, true)?;
            // Not past the last: what the receiver says after that is for somebody else.
            while done < n && self.end.arrived.pop_front().is_some() {
                let (slot, ..) = open.pop_front().ok_or("one answer too many")?;
                self.lane.direct().ok_or("no direct copies")?.close(slot);
                done += 1;
            }
        }
        Ok((n * len) as f64 / start.elapsed().as_secs_f64() / 1e9)
    }

    fn receive_direct(&mut self, len: usize, n: usize, span: usize) -> Outcome<()> {
        for i in 0..n {
            let (_, slot) = self.hear()?;
            let mut moved = 0;
            while self.step(slot as u32, i * len % span, len, Copy::Pull, &mut moved)? != Step::Done {}
            self.post(DONE, slot, &[])?;
        }
        Ok(())
    }
}

const RING: [usize; 2] = [8 << 10, 64 << 10];
const SIZES: [usize; 5] = [16 << 10, 64 << 10, 1 << 20, 4 << 20, BIG];

fn run(stream: UnixStream, side: Side, cpu: usize) -> Outcome<()> {
    let mut set = CpuSet::new();
    set.set(cpu)?;
    sched_setaffinity(Pid::from_raw(0), &set)?;
    let first = side == Side::Connector;
    let arena = Arena::new();
    let deadline = Instant::now() + Duration::from_secs(10);
    let lane = attach(stream, side, LaneId(0), arena.clone(), Options::default(), deadline)?;
    let segment = arena.alloc(BIG)?;
    let mut plain = vec![0u8; BIG];
    plain.fill(3);
    let memory = segment.ptr();
    // SAFETY: BIG bytes of the segment.
    unsafe { memory.write_bytes(5, BIG) };
    let end = End { memory, arrived: VecDeque::new(), word: [0; 24], bulk_in: 0, bulk_at: 0, bulk_out: 0, bulk_len: 0 };
    let mut measure = Measure { lane, end, local: memory, remote: [0; 24], _segment: Some(segment), _plain: plain };
    for _ in 0..3 {
        let us = measure.ping(200_000, first)?;
        if first {
            println!("8 B one way        {us:.3} us");
        }
    }
    if std::env::var_os("LATENCY_ONLY").is_some() {
        return Ok(());
    }
    for len in RING {
        measure.bulk(len, 1 << 30, first)?;
        let rate = measure.bulk(len, 8 << 30, first)?;
        if first {
            println!("ring {:>5} KiB      {rate:.1} GB/s", len >> 10);
        }
    }
    for kind in ["mapped", "cma"] {
        if kind == "cma" {
            if measure.lane.report().cma_pull.is_err() {
                println!("{kind}: {:?}", measure.lane.report().cma_pull);
                break;
            }
            measure.local = measure._plain.as_mut_ptr();
        }
        measure.introduce()?;
        for len in SIZES {
            // One buffer again and again as most benchmarks do, then ever different memory.
            let ways = [(false, len), (true, len), (false, BIG), (true, BIG)];
            for (both, span) in ways.into_iter().take(if len == BIG { 2 } else { 4 }) {
                let n = (4usize << 30) / len.max(256 << 10);
                for round in 0..2 {
                    if !first {
                        measure.receive_direct(len, n, span)?;
                        continue;
                    }
                    let rate = measure.send_direct(len, n, span, both)?;
                    if round == 1 {
                        let who = if both { "both" } else { "pull" };
                        let span = span >> 10;
                        println!("{kind:<6} {who} {:>6} KiB in {span:>6} KiB {rate:>6.1} GB/s", len >> 10);
                    }
                }
            }
        }
    }
    Ok(())
}

fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().collect();
    if let Some(name) = args.get(1) {
        let address = SocketAddr::from_abstract_name(name)?;
        return run(UnixStream::connect_addr(&address)?, Side::Connector, 1);
    }
    let name = format!("crossrail-shm-perf-{}", std::process::id());
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
    let mut child = Command::new(std::env::current_exe()?).arg(&name).spawn()?;
    let (stream, _) = listener.accept()?;
    run(stream, Side::Acceptor, 0)?;
    child.wait()?;
    Ok(())
}
