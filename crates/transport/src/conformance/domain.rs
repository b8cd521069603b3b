//! [`Domain`]: single copies of memory that both ends describe to each other.
#![allow(unsafe_code)] // `Domain::step` is unsafe; the memory is the suite's own

use std::time::{Duration, Instant};

use crate::{Copy, Descriptor, DirectKind, Domain, Job, Step};

/// How long a copy of the suite may take.
const LIMIT: Duration = Duration::from_secs(30);
/// Bytes of one step.
const BUDGET: usize = 256 << 10;
/// Bytes around every target that no copy may touch.
const EDGE: usize = 64;
const UNTOUCHED: u8 = 0xee;
const LENGTHS: [usize; 11] = [1, 7, 64, 4095, 4096, 4097, 65_537, 1 << 20, (1 << 20) + 13, (2 << 20) - 1, 5_000_001];

/// One end of a link with single copies, as the suite uses it.
pub trait DomainEnd {
    /// The end itself.
    fn domain(&mut self) -> &mut dyn Domain;

    /// Memory of this end that the peer can reach.
    fn alloc(&mut self, len: usize) -> Box<dyn DomainMemory>;

    /// Exchanges whatever the two ends tell each other beside the copies.
    fn progress(&mut self) {}
}

/// Memory of one end. It is valid as long as the value lives.
pub trait DomainMemory {
    /// Its first byte, as the end describes it.
    fn ptr(&self) -> *mut u8;

    /// Copies `bytes` to `offset`.
    fn write(&mut self, offset: usize, bytes: &[u8]);

    /// The `len` bytes at `offset`.
    fn read(&self, offset: usize, len: usize) -> Vec<u8>;
}

type Pair = (Box<dyn DomainEnd>, Box<dyn DomainEnd>);
type Check = fn(&str, &mut Pair);

/// Runs every check on fresh pairs of ends.
///
/// # Panics
/// When a check fails, with the backend's name and the check's.
pub fn run_domain(name: &str, make_pair: &mut dyn FnMut() -> Pair) {
    let checks: [(&str, Check); 7] = [
        ("pull", |label, pair| every_length(label, pair, Copy::Pull)),
        ("push", |label, pair| every_length(label, pair, Copy::Push)),
        ("both ends help", both_help),
        ("cursors are given back", cursors),
        ("a stopped copy is claimed no more", stopped),
        ("descriptors are not believed", hostile),
        ("nothing to copy", empty),
    ];
    for (check, body) in checks {
        body(&format!("{name}: {check}"), &mut make_pair());
    }
}

fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| ((at + seed).wrapping_mul(31) >> 3) as u8).collect()
}

/// Describes memory of `owner` and has the other end reach it, which must agree on the kind.
fn describe(
    label: &str,
    owner: &mut dyn DomainEnd,
    other: &mut dyn DomainEnd,
    memory: &dyn DomainMemory,
    (offset, len): (usize, usize),
) -> (Descriptor, DirectKind) {
    let ptr = memory.ptr().wrapping_add(offset);
    let described = owner.domain().describe(ptr, len);
    let (descriptor, kind) = described.unwrap_or_else(|why| panic!("{label}: {len} bytes at {offset}: {why}"));
    owner.progress();
    other.progress();
    match other.domain().reach(&descriptor, len) {
        Ok(reached) => assert_eq!(reached, kind, "{label}: the two ends differ"),
        Err(why) => panic!("{label}: {len} bytes are described but out of reach: {why}"),
    }
    (descriptor, kind)
}

/// Steps one job of each end until both are done; bytes that each copied.
fn copy(label: &str, pair: &mut Pair, jobs: [Option<Job>; 2]) -> [usize; 2] {
    let deadline = Instant::now() + LIMIT;
    let mut left = jobs;
    let mut moved = [0; 2];
    while left.iter().any(Option::is_some) {
        assert!(Instant::now() < deadline, "{label}: no end after {LIMIT:?}, {moved:?} bytes copied");
        for at in 0..2 {
            let end = if at == 0 { &mut pair.0 } else { &mut pair.1 };
            end.progress();
            let Some(job) = &mut left[at] else { continue };
            // SAFETY: the suite's memory, which outlives the call.
            match unsafe { end.domain().step(job, BUDGET) } {
                Step::Moved(bytes) => assert!(bytes <= job.len, "{label}: {bytes} of {} bytes in a step", job.len),
                Step::Waiting => {}
                Step::Done => {
                    moved[at] = job.moved;
                    left[at] = None;
                }
                Step::Failed(why) | Step::Unmapped(why) => panic!("{label}: {why}"),
            }
        }
    }
    moved
}

fn job(slot: Option<u32>, local: *mut u8, remote: Descriptor, len: usize, copy: Copy) -> Job {
    Job { slot, local, remote, len, copy, moved: 0, state: 0, helps: true }
}

/// Every byte arrives once, at any alignment, and nothing around them is touched.
fn every_length(label: &str, pair: &mut Pair, way: Copy) {
    for (index, len) in LENGTHS.into_iter().enumerate() {
        let (from_at, to_at) = (index * 3 % 17, EDGE + index * 5 % 13);
        let (from, to) = match way {
            Copy::Pull => (&mut pair.0, &mut pair.1),
            Copy::Push => (&mut pair.1, &mut pair.0),
        };
        let (mut source, mut target) = (from.alloc(len + 32), to.alloc(len + 4 * EDGE));
        source.write(from_at, &pattern(index, len));
        target.write(0, &vec![UNTOUCHED; len + 4 * EDGE]);
        // The second end copies: it pulls from the first end's memory, or pushes into it.
        let (remote, local, offset) = match way {
            Copy::Pull => (&*source, target.ptr().wrapping_add(to_at), from_at),
            Copy::Push => (&*target, source.ptr().wrapping_add(from_at), to_at),
        };
        let (descriptor, _) = describe(label, &mut *pair.0, &mut *pair.1, remote, (offset, len));
        let moved = copy(label, pair, [None, Some(job(None, local, descriptor, len, way))]);
        assert_eq!(moved[1], len, "{label}: {len} bytes");
        expect(label, &*target, to_at, &pattern(index, len), len + 4 * EDGE);
    }
}

fn expect(label: &str, target: &dyn DomainMemory, at: usize, bytes: &[u8], whole: usize) {
    let len = bytes.len();
    let wrong = target.read(at, len).iter().zip(bytes).position(|(got, want)| got != want);
    assert_eq!(wrong, None, "{label}: of {len} bytes, this one is wrong");
    let (before, after) = (target.read(0, at), target.read(at + len, whole - at - len));
    let touched = before.iter().chain(&after).any(|byte| *byte != UNTOUCHED);
    assert!(!touched, "{label}: a copy of {len} bytes wrote beyond them");
}

/// Two jobs on one cursor copy every byte once.
fn both_help(label: &str, pair: &mut Pair) {
    let len = 5_000_001;
    let (mut source, mut target) = (pair.0.alloc(len), pair.1.alloc(len + 2 * EDGE));
    source.write(0, &pattern(9, len));
    target.write(0, &vec![UNTOUCHED; len + 2 * EDGE]);
    let Some(cursor) = pair.0.domain().open(len) else {
        eprintln!("{label}: skipped: the link has no shared cursors");
        return;
    };
    let (theirs, _) = describe(label, &mut *pair.0, &mut *pair.1, &*source, (0, len));
    let (ours, _) = describe(label, &mut *pair.1, &mut *pair.0, &*target, (EDGE, len));
    let push = job(Some(cursor), source.ptr(), ours, len, Copy::Push);
    let pull = job(Some(cursor), target.ptr().wrapping_add(EDGE), theirs, len, Copy::Pull);
    let moved = copy(label, pair, [Some(push), Some(pull)]);
    pair.0.domain().close(cursor);
    assert_eq!(moved[0] + moved[1], len, "{label}: each byte once, not {moved:?}");
    assert!(moved.iter().all(|bytes| *bytes > 0), "{label}: one end copied nothing: {moved:?}");
    expect(label, &*target, EDGE, &pattern(9, len), len + 2 * EDGE);
}

/// A cursor that was closed can be opened again, and running out of them is no error.
fn cursors(label: &str, pair: &mut Pair) {
    const MOST: usize = 1 << 16;
    let open =
        |pair: &mut Pair| -> Vec<u32> { std::iter::from_fn(|| pair.0.domain().open(1 << 20)).take(MOST).collect() };
    let first = open(pair);
    if first.is_empty() {
        eprintln!("{label}: skipped: the link has no shared cursors");
        return;
    }
    assert!(first.len() < MOST, "{label}: the cursors never run out");
    for cursor in &first {
        assert!(pair.0.domain().stop(*cursor), "{label}: nothing copies through cursor {cursor}");
        pair.0.domain().close(*cursor);
    }
    let again = open(pair);
    assert_eq!(again.len(), first.len(), "{label}: a cursor was lost");
    for cursor in again {
        assert!(pair.0.domain().stop(cursor), "{label}: nothing copies through cursor {cursor}");
        pair.0.domain().close(cursor);
    }
}

/// After `stop` has returned true, no step of either end moves another byte.
fn stopped(label: &str, pair: &mut Pair) {
    let len = 4 << 20;
    let (mut source, mut target) = (pair.0.alloc(len), pair.1.alloc(len));
    source.write(0, &pattern(3, len));
    target.write(0, &vec![UNTOUCHED; len]);
    let Some(cursor) = pair.0.domain().open(len) else {
        eprintln!("{label}: skipped: the link has no shared cursors");
        return;
    };
    let (theirs, _) = describe(label, &mut *pair.0, &mut *pair.1, &*source, (0, len));
    let mut pull = job(Some(cursor), target.ptr(), theirs, len, Copy::Pull);
    // SAFETY: the suite's memory, which outlives the call.
    let first = unsafe { pair.1.domain().step(&mut pull, BUDGET) };
    assert!(matches!(first, Step::Moved(bytes) if bytes < len), "{label}: {first:?}");
    assert!(pair.0.domain().stop(cursor), "{label}: no piece is being copied");
    let before = target.read(0, len);
    for _ in 0..4 {
        // SAFETY: as above.
        let step = unsafe { pair.1.domain().step(&mut pull, BUDGET) };
        assert!(!matches!(step, Step::Moved(bytes) if bytes > 0), "{label}: {step:?} after stop");
    }
    assert!(target.read(0, len) == before, "{label}: bytes were written after stop");
    pair.0.domain().close(cursor);
}

/// Descriptors come from the peer: whatever they say, nothing but described memory is accessed.
fn hostile(label: &str, pair: &mut Pair) {
    let len = 4096;
    let (source, mut target) = (pair.0.alloc(len), pair.1.alloc(len));
    target.write(0, &vec![UNTOUCHED; len]);
    let (good, _) = describe(label, &mut *pair.0, &mut *pair.1, &*source, (0, len));
    let mut number = 0x9e37_79b9_7f4a_7c15_u64;
    for round in 0..200 {
        let mut bad = good;
        for _ in 0..=round % 4 {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let at = (number >> 33) as usize % bad.len();
            bad[at] = (number >> 57) as u8;
        }
        // Some still describe memory of the peer: then a copy of it is in order, and made elsewhere in the suite.
        if bad == good || pair.1.domain().reach(&bad, len).is_ok() {
            continue;
        }
        let mut pull = job(None, target.ptr(), bad, len, Copy::Pull);
        // SAFETY: the suite's memory, which outlives the call.
        let step = unsafe { pair.1.domain().step(&mut pull, BUDGET) };
        assert!(matches!(step, Step::Failed(_)), "{label}: out of reach, but a copy gave {step:?}");
        assert_eq!(target.read(0, len), vec![UNTOUCHED; len], "{label}: a failed copy wrote");
    }
    // What is left is as good as before.
    let (good, _) = describe(label, &mut *pair.0, &mut *pair.1, &*source, (0, len));
    copy(label, pair, [None, Some(job(None, target.ptr(), good, len, Copy::Pull))]);
    assert_eq!(target.read(0, len), source.read(0, len), "{label}: a copy after hostile descriptors");
}

/// A copy of no bytes is done at once.
fn empty(label: &str, pair: &mut Pair) {
    let (source, mut target) = (pair.0.alloc(64), pair.1.alloc(64));
    target.write(0, &[UNTOUCHED; 64]);
    let (descriptor, _) = describe(label, &mut *pair.0, &mut *pair.1, &*source, (0, 64));
    let moved = copy(label, pair, [None, Some(job(None, target.ptr(), descriptor, 0, Copy::Pull))]);
    assert_eq!(moved[1], 0, "{label}");
    assert_eq!(target.read(0, 64), [UNTOUCHED; 64], "{label}");
}
