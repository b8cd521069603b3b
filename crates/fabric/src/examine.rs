//! Tests of what a device really does, between two endpoints of it within this process. Their results are facts.
//!
//! Providers differ in what documents leave open. Each test ends by itself within [`LIMIT`], but a provider may end the
//! process, so that tools run each in a process of its own.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crossrail_transport::placing::Extent;
use crossrail_types::{Error, ErrorKind, Result};

use crate::offer::Offer;
use crate::port::{Completion, Port, Registered, Write};
use crate::slab::Slab;
use crate::wire::Remote;

/// Longest time of a step of a test.
pub const LIMIT: Duration = Duration::from_secs(10);
/// Operations in flight, and entries of a completion queue.
const CONTEXTS: usize = 64;
const QUEUE: usize = 4 * CONTEXTS;
/// Bytes of each endpoint's memory in most tests.
const HEAP: usize = 16 << 20;
const CHUNK: usize = 1 << 20;
const ROUNDS: usize = 200;
/// Lengths of rows that are compared, and the bytes of them all.
const ROWS: [usize; 7] = [64, 256, 1024, 2304, 4096, 8192, 16384];
const ROW_BYTES: usize = 4 << 20;
/// Time for which memory is watched after access to it has ended.
const WATCHED: Duration = Duration::from_millis(300);

/// Facts by name; their units are in the name's end.
pub type Facts = BTreeMap<&'static str, f64>;

/// A test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Test {
    /// Writes arrive, whole, with all bits of their immediates: `latency_us` of 8 bytes one way, `gb_per_s` of 1 MiB.
    Write,
    /// A closed registration: `began` (1: the write was arriving then), `after_bytes` written later, `fenced`.
    Fence,
    /// A wrong key: `written` bytes, `refused` (1: the writer got an error), `error_ms`, `survives` (1: others work on).
    Key,
    /// Rows written one by one against rows packed into one write: single writes are faster from
    /// `packed_below_bytes` on.
    Rows,
    /// Registration of host memory: `first_ms_per_gib`, and `later_ms_per_gib` with that registered.
    Register,
}

impl Test {
    /// All tests, by name.
    pub const ALL: [(&'static str, Test); 5] = [
        ("write", Test::Write),
        ("fence", Test::Fence),
        ("key", Test::Key),
        ("rows", Test::Rows),
        ("register", Test::Register),
    ];

    /// Runs it over a device.
    ///
    /// # Errors
    /// What failed: the call and libfabric's text, or what did not happen in time.
    pub fn run(self, offer: &Offer) -> Result<Facts> {
        match self {
            Test::Write => write(&mut Pair::open(offer, HEAP)?),
            Test::Fence => fence(&mut Pair::open(offer, 4 * HEAP)?),
            Test::Key => key(&mut Pair::open(offer, CHUNK)?),
            Test::Rows => rows(&mut Pair::open(offer, HEAP)?),
            Test::Register => register(offer),
        }
    }
}

/// Writes a pattern into the caller's memory, as that of a GPU, and returns once its last immediate has arrived: the
/// bytes must be visible then. Facts: `register_ms`, `bytes`.
///
/// # Errors
/// As [`Test::run`].
///
/// # Safety
/// `memory` must be writable until this returns.
pub unsafe fn write_into(offer: &Offer, memory: &Extent, pattern: u8) -> Result<Facts> {
    let mut pair = Pair::open(offer, CHUNK)?;
    let began = Instant::now();
    // SAFETY: as the caller guarantees; the pair is dropped before this returns.
    let (registered, target) = unsafe { pair.b.register(memory, true) }?;
    let took = began.elapsed();
    pair.source.write(0, &vec![pattern; CHUNK]);
    let mut at = 0;
    while at < memory.len {
        let len = CHUNK.min(memory.len - at).min(pair.most);
        pair.post(0, len, target, at as u64, 1)?;
        pair.drive("a write into that memory", |pair| pair.arrived > 0)?;
        pair.arrived = 0;
        at += len;
    }
    pair.b.unregister(registered)?;
    Ok(Facts::from([("register_ms", took.as_secs_f64() * 1e3), ("bytes", memory.len as f64)]))
}

/// Two endpoints, the first of which writes into the memory of the second.
struct Pair {
    // The endpoints first: nothing is written or read any more when memory is unmapped.
    a: Port,
    b: Port,
    source: Slab,
    heap: Slab,
    read_from: Registered,
    written: Registered,
    target: Remote,
    most: usize,
    free: Vec<usize>,
    arrived: usize,
    data: u32,
    failed: Vec<String>,
    completions: Vec<Completion>,
}

impl Pair {
    fn open(offer: &Offer, len: usize) -> Result<Pair> {
        let contexts = CONTEXTS.min(offer.attributes.tx_size / 2).max(1);
        let (mut a, mut b) = (Port::open(offer, contexts, QUEUE)?, Port::open(offer, contexts, QUEUE)?);
        let (source, heap) = (Slab::new(len)?, Slab::new(len)?);
        a.insert(&b.name()?)?;
        b.insert(&a.name()?)?;
        // SAFETY: the pair drops its ports before its memory.
        let ((read_from, _), (written, target)) =
            unsafe { (a.register(&whole(&source), false)?, b.register(&whole(&heap), true)?) };
        let most = offer.attributes.max_msg_size.min(len);
        let free = (0..contexts).collect();
        let (failed, completions) = (Vec::new(), Vec::new());
        Ok(Pair {
            a,
            b,
            source,
            heap,
            read_from,
            written,
            target,
            most,
            free,
            arrived: 0,
            data: 0,
            failed,
            completions,
        })
    }

    /// Reads what has completed at both ends.
    fn poll(&mut self) -> Result<()> {
        for side in 0..2 {
            let port = if side == 0 { &mut self.a } else { &mut self.b };
            port.poll(QUEUE, &mut self.completions).map_err(|why| failed(&why))?;
            for completion in self.completions.drain(..) {
                match completion {
                    Completion::Sent(at) => self.free.push(at),
                    Completion::Arrived(data) => {
                        self.arrived += 1;
                        self.data = data;
                    }
                    Completion::Failed(at, why) => {
                        self.failed.push(why);
                        self.free.extend(at.filter(|_| side == 0));
                    }
                }
            }
        }
        Ok(())
    }

    /// Polls until `done`; an operation that fails ends it.
    fn drive(&mut self, what: &str, mut done: impl FnMut(&mut Pair) -> bool) -> Result<()> {
        let start = Instant::now();
        loop {
            self.poll()?;
            if let Some(why) = self.failed.first() {
                return Err(failed(&format!("{what}: {why}")));
            }
            if done(self) {
                return Ok(());
            }
            if start.elapsed() > LIMIT {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    "fabric",
                    format!("{what} did not arrive within {LIMIT:?}"),
                ));
            }
        }
    }

    /// Posts a write as soon as the provider takes it.
    fn post(&mut self, from: usize, len: usize, to: Remote, at: u64, data: u32) -> Result<()> {
        let start = Instant::now();
        loop {
            if let Some(context) = self.free.last().copied() {
                let extent = Extent { at: self.source.address() + from as u64, len, gpu: None };
                let write = Write { from: &[(extent, Some(self.read_from))], to, at, data, context };
                // SAFETY: inside the source, which the pair keeps; the context is free.
                if unsafe { self.a.write(&write) }.map_err(|why| failed(&why))? {
                    self.free.pop();
                    return Ok(());
                }
            }
            self.poll()?;
            if start.elapsed() > LIMIT {
                return Err(Error::new(ErrorKind::Timeout, "fabric", format!("no write was taken within {LIMIT:?}")));
            }
        }
    }

    /// Bytes of the target that are not zero, looked at in steps.
    fn count(&self, step: usize) -> usize {
        let mut byte = [0];
        let mut count = 0;
        for at in (0..self.heap.len()).step_by(step) {
            self.heap.read(at, &mut byte);
            count += usize::from(byte[0] != 0);
        }
        count * step
    }
}

fn write(pair: &mut Pair) -> Result<Facts> {
    let pattern: Vec<u8> = (0..CHUNK).map(|at| (at + (at >> 8)) as u8 | 1).collect();
    pair.source.write(0, &pattern);
    // All bits of an immediate: some providers cut them.
    for data in [0, u32::MAX, 0xAAAA_5555, 0x5555_AAAA] {
        let before = pair.arrived;
        pair.post(0, 8, pair.target, 0, data)?;
        pair.drive("a write of 8 bytes", |pair| pair.arrived > before)?;
        if pair.data != data {
            return Err(failed(&format!("immediate {data:#x} arrived as {:#x}", pair.data)));
        }
    }
    let mut samples: Vec<Duration> = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let (before, start) = (pair.arrived, Instant::now());
        pair.post(0, 8, pair.target, 0, 1)?;
        pair.drive("a write of 8 bytes", |pair| pair.arrived > before)?;
        samples.push(start.elapsed());
    }
    samples.sort_unstable();
    let chunk = CHUNK.min(pair.most);
    let (count, start) = (ROUNDS, Instant::now());
    let before = pair.arrived;
    for turn in 0..count {
        pair.post(0, chunk, pair.target, (turn % (HEAP / CHUNK) * CHUNK) as u64, 1)?;
        pair.poll()?;
    }
    pair.drive("writes of 1 MiB", |pair| pair.arrived >= before + count)?;
    let rate = (count * chunk) as f64 / start.elapsed().as_secs_f64() / 1e9;
    let mut found = vec![0; chunk];
    for at in 0..HEAP / CHUNK {
        pair.heap.read(at * CHUNK, &mut found);
        if found != pattern[..chunk] {
            return Err(failed("the data that arrived differs"));
        }
    }
    Ok(Facts::from([("latency_us", samples[ROUNDS / 2].as_secs_f64() * 1e6), ("gb_per_s", rate)]))
}

fn fence(pair: &mut Pair) -> Result<Facts> {
    let len = pair.heap.len();
    pair.source.write(0, &vec![1; len]);
    let piece = (len / 8).min(pair.most);
    let mut at = 0;
    while at < len && !pair.free.is_empty() {
        pair.post(at, piece.min(len - at), pair.target, at as u64, 1)?;
        at += piece;
    }
    let start = Instant::now();
    while pair.count(1 << 16) == 0 && start.elapsed() < LIMIT {
        pair.poll()?;
    }
    let registered = pair.written;
    pair.b.unregister(registered)?;
    let before = pair.count(64);
    let closed = Instant::now();
    while closed.elapsed() < WATCHED {
        pair.poll()?;
    }
    let after = pair.count(64) - before;
    let began = before < at;
    let facts = [
        ("began", f64::from(u8::from(began))),
        ("after_bytes", after as f64),
        ("fenced", f64::from(u8::from(began && after == 0))),
    ];
    Ok(Facts::from(facts))
}

fn key(pair: &mut Pair) -> Result<Facts> {
    pair.source.write(0, &vec![1; CHUNK]);
    let wrong = Remote { key: pair.target.key ^ 1 << 7, ..pair.target };
    let len = CHUNK.min(pair.most);
    let mut refused = None;
    let start = Instant::now();
    pair.post(0, len, wrong, 0, 1)?;
    while refused.is_none() && start.elapsed() < WATCHED * 5 {
        pair.poll()?;
        refused = pair.failed.first().map(|_| start.elapsed());
    }
    let written = pair.count(1);
    pair.failed.clear();
    pair.arrived = 0;
    // The connection may be lost with that write; the provider then reports it, or is silent.
    let survives =
        pair.post(0, 8, pair.target, 0, 2).is_ok() && pair.drive("the next write", |pair| pair.data == 2).is_ok();
    let facts = [
        ("written", written as f64),
        ("refused", f64::from(u8::from(refused.is_some()))),
        ("error_ms", refused.unwrap_or_default().as_secs_f64() * 1e3),
        ("survives", f64::from(u8::from(survives))),
    ];
    Ok(Facts::from(facts))
}

fn rows(pair: &mut Pair) -> Result<Facts> {
    let mut facts = Facts::new();
    let mut below = ROWS[0];
    let mut found = false;
    for len in ROWS {
        let count = ROW_BYTES / len;
        let single = timed(pair, count, |pair, row| {
            pair.post(row * 2 * len % (HEAP / 2), len, pair.target, (row * 2 * len % (HEAP / 2)) as u64, 1)
        })?;
        // Packed: copied to one place, written as one, and copied from there.
        let packed_at = HEAP / 2;
        let each = CHUNK.min(pair.most) / len;
        let start = Instant::now();
        let mut bytes = vec![0; len];
        let pieces = count.div_ceil(each);
        let begun = pair.arrived;
        for piece in 0..pieces {
            for row in 0..each {
                pair.source.read(row * 2 * len % (HEAP / 2), &mut bytes);
                pair.source.write(packed_at + row * len, &bytes);
            }
            pair.post(packed_at, each * len, pair.target, packed_at as u64, 1)?;
            pair.drive("packed rows", |pair| pair.arrived > begun + piece)?;
            for row in 0..each {
                pair.heap.read(packed_at + row * len, &mut bytes);
                pair.heap.write(row * 2 * len % (HEAP / 2), &bytes);
            }
        }
        let packed = start.elapsed();
        if !found && single <= packed {
            (found, below) = (true, len);
        }
        if !found {
            below = len * 2;
        }
    }
    facts.insert("packed_below_bytes", below as f64);
    Ok(facts)
}

fn timed(pair: &mut Pair, count: usize, mut post: impl FnMut(&mut Pair, usize) -> Result<()>) -> Result<Duration> {
    let (before, start) = (pair.arrived, Instant::now());
    for row in 0..count {
        post(pair, row)?;
        pair.poll()?;
    }
    pair.drive("rows", |pair| pair.arrived >= before + count)?;
    Ok(start.elapsed())
}

fn register(offer: &Offer) -> Result<Facts> {
    const LEN: usize = 256 << 20;
    // Unmapped after the port was dropped.
    let memory = [Slab::new(LEN)?, Slab::new(LEN)?];
    let mut port = Port::open(offer, 1, QUEUE)?;
    let mut facts = Facts::new();
    for (name, slab) in ["first_ms_per_gib", "later_ms_per_gib"].into_iter().zip(&memory) {
        for at in (0..LEN).step_by(4096) {
            slab.write(at, &[1]);
        }
        let start = Instant::now();
        // SAFETY: the port is dropped before the memory.
        let _ = unsafe { port.register(&whole(slab), true) }?;
        facts.insert(name, start.elapsed().as_secs_f64() * 1e3 * ((1u64 << 30) as f64 / LEN as f64));
    }
    Ok(facts)
}

fn whole(slab: &Slab) -> Extent {
    Extent { at: slab.address(), len: slab.len(), gpu: None }
}

fn failed(why: &str) -> Error {
    Error::new(ErrorKind::Io, "fabric", why)
}

/// The files of libfabric that this process has mapped, each once: more than one means that two libraries of this process
/// brought their own, and providers of one do not know the other's.
pub fn loaded_files() -> Vec<String> {
    files_in(&std::fs::read_to_string("/proc/self/maps").unwrap_or_default())
}

fn files_in(maps: &str) -> Vec<String> {
    let paths = maps.lines().filter_map(|line| line.split_once('/').map(|(_, path)| format!("/{path}")));
    let is_fabric = |path: &String| {
        let name = path.rsplit('/').next().unwrap_or_default();
        name.starts_with("libfabric.so") || name.starts_with("libfabric-")
    };
    paths.filter(is_fabric).collect::<std::collections::BTreeSet<_>>().into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_libraries_are_counted_once_each() {
        let maps = "7f00-7f10 r-xp 00000000 08:01 1  /usr/lib/x86_64-linux-gnu/libfabric.so.1.20.0\n\
                    7f10-7f20 rw-p 00000000 08:01 1  /usr/lib/x86_64-linux-gnu/libfabric.so.1.20.0\n\
                    7f20-7f30 r-xp 00000000 08:01 2  /venv/nixl.libs/libfabric-1a2b.so.1\n\
                    7f30-7f40 r-xp 00000000 08:01 3  /usr/lib/libefa.so.1\n7f40-7f50 rw-p 0 0:0 0\n";
        let found = files_in(maps);
        assert_eq!(found, ["/usr/lib/x86_64-linux-gnu/libfabric.so.1.20.0", "/venv/nixl.libs/libfabric-1a2b.so.1"]);
    }

    #[test]
    fn tests_have_names_of_their_own() {
        let mut names: Vec<_> = Test::ALL.iter().map(|(name, _)| name).collect();
        names.dedup();
        assert_eq!(names.len(), Test::ALL.len());
    }
}
