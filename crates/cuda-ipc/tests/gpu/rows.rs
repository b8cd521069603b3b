//! Rows of GPU memory of two processes, in both directions.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_cuda_ipc::RowsCopy;
use crossrail_transport::{Copy, Domain, Index, List, Rows, Step, Stride, Window};
use crossrail_types::Settings;

use crate::end::{End, LIMIT, Memory, pattern};
use crate::{KINDS, TwoProcesses};

/// Strides one after the other from `base` on: (rows, length, distance).
fn rows(base: u64, parts: &[(u64, u64, u64)]) -> Arc<Rows> {
    let mut at = base;
    let stride = |(count, len, stride): &(u64, u64, u64)| {
        let of = Stride { at, len: *len, stride: *stride, count: *count };
        at += count * stride;
        of
    };
    Arc::new(Rows::new(parts.iter().map(stride).collect()).expect("rows"))
}

fn list(base: u64, parts: &[(u64, u64, u64)], index: Option<&[u32]>) -> Arc<List> {
    let index = index.map_or(Index::All, |index| Index::Some(index.into()));
    Arc::new(List::new(rows(base, parts), index).expect("a list"))
}

/// The first `count` numbers of a random order of those below `of`.
fn some(count: usize, of: u32, seed: u64) -> Vec<u32> {
    let mut order: Vec<u32> = (0..of).collect();
    let mut number = seed | 1;
    for last in (1..order.len()).rev() {
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        order.swap(last, (number >> 33) as usize % (last + 1));
    }
    order.truncate(count);
    order
}

/// The peer's memory, mapped here.
fn map(own: &mut End, remote: [u8; 24], len: usize) -> Window {
    let started = Instant::now();
    loop {
        own.pump();
        if let Some(window) = own.link.map(&remote, len, None).expect("a mapping") {
            return window;
        }
        assert!(started.elapsed() < LIMIT, "the memory was not announced");
    }
}

/// Copies, and says how long the call took, and until the end.
fn copy(own: &mut End, rows: RowsCopy) -> (Duration, Duration) {
    let started = Instant::now();
    // SAFETY: the tests' lists name memory that lives until the copy is over.
    let state = unsafe { own.link.start_rows(rows) }.expect("a copy");
    let host = started.elapsed();
    loop {
        // SAFETY: as above.
        match unsafe { own.link.step_rows(state) } {
            Step::Done => return (host, started.elapsed()),
            Step::Waiting => assert!(started.elapsed() < LIMIT, "it takes for ever"),
            other => panic!("{other:?}"),
        }
    }
}

/// What `from` has in the rows of `src`, in those of `dst` in `to`.
fn reference((dst, base): (&List, u64), to: &mut [u8], (src, first): (&List, u64), from: &[u8], range: (u64, u64)) {
    let (mut at, mut ends) = (range.0, (dst.cursor(range.0), src.cursor(range.0)));
    while at < range.1 {
        let place = dst.place(at).expect("a row");
        let len = dst.len_of(place);
        let (to_at, _) = ends.0.piece(len).expect("a row");
        let (from_at, _) = ends.1.piece(len).expect("a row");
        let (to_at, from_at) = ((to_at - base) as usize, (from_at - first) as usize);
        to[to_at..to_at + len as usize].copy_from_slice(&from[from_at..from_at + len as usize]);
        at += len;
    }
}

/// One copy in each direction between `own` and the peer's memory, and a look at every byte of both.
struct Exchange<'a> {
    two: &'a mut TwoProcesses,
    own: Memory,
    theirs: u64,
    len: usize,
    window: Window,
}

/// Of one end: first byte, bytes from one row to the next, rows.
type Parts<'a> = &'a [(u64, u64, u64)];
/// Numbers of the rows at both ends.
type Numbers<'a> = (&'a [u32], &'a [u32]);

impl Exchange<'_> {
    fn new<'a>(two: &'a mut TwoProcesses, kind: &str, len: usize) -> Exchange<'a> {
        let own = Memory::new(&two.own.context, kind, len);
        let theirs = two.alloc(kind, len, 3);
        let remote = two.describe(theirs, 0, len);
        let window = map(&mut two.own, remote, len);
        Exchange { two, own, theirs, len, window }
    }

    fn run(
        &mut self,
        direction: Copy,
        parts: (Parts<'_>, Parts<'_>),
        (odd, index): ((u64, u64), Option<Numbers<'_>>),
        skip: u64,
    ) -> Vec<(Duration, Duration)> {
        let own = &mut self.two.own;
        let mut bytes = [pattern(5, self.len), pattern(3, self.len)];
        own.put(self.own.address(), &bytes[0]);
        let bases = (self.own.address(), self.window.ptr as u64);
        let local = list(bases.0 + odd.0, parts.0, index.map(|index| index.0));
        let remote = list(bases.1 + odd.1, parts.1, index.map(|index| index.1));
        assert!(local.fits(&remote));
        let (from, end) = (local.position(skip), local.position(local.count() - skip));
        let copies: Vec<_> = (0..8)
            .map(|_| {
                let keep = self.window.keep.clone();
                let (local, remote) = (local.clone(), remote.clone());
                copy(own, RowsCopy { local, remote, from, len: end - from, copy: direction, keep })
            })
            .collect();
        let [ours, theirs] = &mut bytes;
        match direction {
            Copy::Pull => reference((&local, bases.0), ours, (&remote, bases.1), theirs, (from, end)),
            Copy::Push => reference((&remote, bases.1), theirs, (&local, bases.0), ours, (from, end)),
        }
        assert!(own.take(bases.0, self.len) == *ours, "{direction:?}: our bytes");
        // Theirs are read through a plain copy, and put right again.
        let scratch = Memory::new(&own.context, "legacy", self.len);
        let remote = self.two.describe(self.theirs, 0, self.len);
        let own = &mut self.two.own;
        own.copy(Copy::Pull, scratch.address(), remote, self.len).expect("a pull");
        assert!(own.take(scratch.address(), self.len) == *theirs, "{direction:?}: their bytes");
        own.put(scratch.address(), &pattern(3, self.len));
        own.copy(Copy::Push, scratch.address(), remote, self.len).expect("a push");
        copies
    }
}

fn two(settings: &Settings) -> Option<TwoProcesses> {
    let two = TwoProcesses::new()?;
    let why = two.own.gpus.load_kernels(two.own.context.device().ordinal(), settings);
    assert_eq!(why.is_some(), settings.gpu_sms == 0, "{why:?}");
    Some(two)
}

#[test]
fn rows_are_copied_in_both_directions_for_all_kinds_of_memory() {
    for sms in [3, 0] {
        let Some(mut two) = two(&Settings { gpu_sms: sms, ..Settings::default() }) else { return };
        for kind in KINDS {
            let lengths = [1, 15, 528, 576, 2304, 8193, 300_001];
            let near: Vec<_> = lengths.iter().map(|len| (11, *len, len + 5)).collect();
            let far: Vec<_> = lengths.iter().map(|len| (11, *len, len + 16)).collect();
            let orders = [some(11, 11, 1), some(11, 11, 2)];
            let index = |order: &Vec<u32>| -> Vec<u32> {
                (0..lengths.len() as u32).flat_map(|at| order.iter().map(move |row| at * 11 + row)).collect()
            };
            let indices = [index(&orders[0]), index(&orders[1])];
            let mut exchange = Exchange::new(&mut two, kind, 5 << 20);
            for direction in [Copy::Pull, Copy::Push] {
                for odd in [(0, 0), (3, 8), (1, 0)] {
                    exchange.run(direction, (&near, &far), (odd, Some((&indices[0], &indices[1]))), 0);
                    exchange.run(direction, (&far, &near), (odd, None), 2);
                }
                // One run: by copy engines.
                exchange.run(direction, (&[(1000, 4096, 4096)], &[(1000, 4096, 4096)]), ((7, 9), None), 1);
            }
        }
    }
}

/// 32,768 tokens in pages of 16, as vLLM lays out DeepSeek-V4: 131,304 rows of 528 to 9,216 bytes, from random pages to
/// others.
#[test]
fn the_pages_of_a_cache_are_copied_in_both_directions() {
    // Layers, pages that are moved, pages of the pool, bytes of a page.
    const GROUPS: [(u32, usize, u32, u64); 4] =
        [(30, 2048, 2500, 2304), (30, 2048, 2500, 528), (31, 256, 300, 576), (61, 8, 16, 9216)];
    let Some(mut two) = two(&Settings::default()) else { return };
    let layers = GROUPS.iter().flat_map(|(layers, _, pool, len)| (0..*layers).map(|_| (u64::from(*pool), *len, *len)));
    let parts: Vec<_> = layers.collect();
    let index = |seed: u64| -> Vec<u32> {
        let (mut first, mut index) = (0, Vec::new());
        for (group, (layers, pages, pool, _)) in GROUPS.iter().enumerate() {
            let order = some(*pages, *pool, seed + group as u64);
            for _ in 0..*layers {
                index.extend(order.iter().map(|page| page + first));
                first += pool;
            }
        }
        index
    };
    let indices = [index(100), index(200)];
    assert_eq!(indices[0].len(), 131_304);
    let room: u64 = parts.iter().map(|(count, len, _)| count * len).sum();
    let mut exchange = Exchange::new(&mut two, "legacy", room as usize);
    for direction in [Copy::Pull, Copy::Push] {
        let mut times = exchange.run(direction, (&parts, &parts), ((0, 0), Some((&indices[0], &indices[1]))), 0);
        times.remove(0);
        let median = |mut of: Vec<Duration>| {
            of.sort();
            of[of.len() / 2].as_secs_f64() * 1e6
        };
        let (host, all) = times.into_iter().unzip();
        let (host, all) = (median(host), median(all));
        println!("131,304 rows, 183 MB, {direction:?}: {all:.0} us, of which the call takes {host:.0} us");
    }
}
