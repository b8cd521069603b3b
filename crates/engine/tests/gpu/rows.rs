//! Moves of rows of GPU memory between two processes.

use std::time::Instant;

use crossrail::{Memory, MoveKind, MoveOptions, Protocol, Region, RegionKey, Row, StartOptions};

use super::{DIRECT, Pair, Place, bytes_of, bytes_of_hex, done, pair, pattern};

/// A part of a pool: rows, of which so many move, and bytes of each.
type Part = (u64, usize, u64);

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

/// Strides of the pool, one after the other from `at` on, with `gap` bytes between rows.
fn rows<'a, R>(region: &'a R, parts: &[Part], mut at: u64, gap: u64) -> Vec<Row<'a, R>> {
    let row = |(count, _, len): &Part| {
        let row = Row { region, offset: at, len: *len, stride: len + gap, count: *count };
        at += count * (len + gap);
        row
    };
    parts.iter().map(row).collect()
}

/// Moves some rows of the pool in that direction, and looks at every byte of both ends.
struct Pool {
    own: Memory,
    region: Region,
    key: RegionKey,
}

impl Pool {
    fn new(pair: &Pair, size: usize) -> Pool {
        pair.tell(&format!("alloc gpu {size}"));
        pair.tell("fill 3");
        let key = RegionKey::from_bytes(&bytes_of_hex(&pair.tell("register"))).unwrap();
        let own = pair.filled(Place::Gpu(0), &pattern(size, 5));
        let region = pair.worker.register(&own).unwrap();
        Pool { own, region, key }
    }

    /// The times of `turns` moves in microseconds.
    fn run(
        &self,
        pair: &Pair,
        kind: MoveKind,
        parts: &[Part],
        odd: (u64, u64),
        expected: Protocol,
        turns: u32,
    ) -> Vec<f64> {
        let size = self.own.len();
        self.own.fill_from(0, &pattern(size, 5)).unwrap();
        pair.tell("fill 3");
        let (near, far) = (rows(&self.region, parts, odd.0, odd.1), rows(&self.key, parts, odd.1, odd.0));
        let index = |seed: u64| -> Vec<u32> {
            let mut first = 0;
            let part = |(at, (count, some_of, _)): (usize, &Part)| {
                first += *count as u32;
                let first = first - *count as u32;
                some(*some_of, *count as u32, seed + at as u64 / 16).into_iter().map(move |row| row + first)
            };
            parts.iter().enumerate().flat_map(part).collect()
        };
        let (ours, theirs) = (index(100), index(200));
        let (local, remote) = (pair.worker.layout(&near).unwrap(), pair.to.layout(&far).unwrap());
        let options = MoveOptions { local_index: Some(&ours), remote_index: Some(&theirs), ..MoveOptions::default() };
        let prepared = pair.to.prepare(kind, &local, &remote, options).unwrap();
        let what = format!("{kind:?}, {odd:?}: {:?}", prepared.explain());
        let mut times = Vec::new();
        for _ in 0..turns {
            let started = Instant::now();
            let receipt = done(&what, prepared.start(StartOptions::default()).unwrap());
            times.push(started.elapsed().as_secs_f64() * 1e6);
            assert_eq!(receipt.protocol, expected, "{what}");
            assert_eq!(receipt.bytes as u64, prepared.nbytes(), "{what}");
        }
        let mut bytes = [pattern(size, 5), pattern(size, 3)];
        let place = |rows: &[(u64, u64, u64)], index: u32| {
            let mut row = u64::from(index);
            for (offset, stride, count) in rows {
                if row < *count {
                    return (offset + row * stride) as usize;
                }
                row -= count;
            }
            panic!("no row {index}")
        };
        let near: Vec<_> = near.iter().map(|row| (row.offset, row.stride, row.count)).collect();
        let far: Vec<_> = far.iter().map(|row| (row.offset, row.stride, row.count)).collect();
        let lens = parts.iter().flat_map(|(_, some_of, len)| std::iter::repeat_n(*len as usize, *some_of));
        for ((ours, theirs), len) in ours.iter().zip(&theirs).zip(lens) {
            let (a, b) = (place(&near, *ours), place(&far, *theirs));
            let [own, other] = &mut bytes;
            match kind {
                MoveKind::Read => own[a..a + len].copy_from_slice(&other[b..b + len]),
                MoveKind::Write => other[b..b + len].copy_from_slice(&own[a..a + len]),
            }
        }
        assert!(bytes_of(&self.own) == bytes[0], "{what}: ours");
        let all = pair.context.alloc_on(size, Place::Gpu(0)).unwrap();
        done(&what, pair.to.read(&all, &self.key, 0).unwrap());
        assert!(bytes_of(&all) == bytes[1], "{what}: theirs");
        times
    }
}

#[test]
fn rows_move_between_processes_in_both_directions() {
    let parts = [(20, 11, 1), (20, 20, 17), (20, 7, 528), (20, 20, 2304), (20, 3, 9216), (3, 2, 300_001)];
    for (settings, expected) in
        [(DIRECT, Protocol::CudaIpc), ("CROSSRAIL_TLS=shm,cuda_ipc;CROSSRAIL_GPU_SMS=0", Protocol::CudaIpc)]
    {
        let Some(pair) = pair(settings) else { return };
        let pool = Pool::new(&pair, 2 << 20);
        for kind in [MoveKind::Read, MoveKind::Write] {
            for odd in [(0, 0), (3, 16), (8, 1)] {
                pool.run(&pair, kind, &parts, odd, expected, 2);
            }
        }
    }
}

/// 32,768 tokens in pages of 16, as vLLM lays out DeepSeek-V4: 131,304 rows of 528 to 9,216 bytes, from random pages to
/// others.
#[test]
fn the_pages_of_a_cache_move_in_both_directions() {
    let Some(pair) = pair(DIRECT) else { return };
    let layers = [(30, (2500, 2048, 2304)), (30, (2500, 2048, 528)), (31, (300, 256, 576)), (61, (16, 8, 9216))];
    let parts: Vec<Part> = layers.iter().flat_map(|(layers, part)| std::iter::repeat_n(*part, *layers)).collect();
    let size = parts.iter().map(|(count, _, len)| count * len).sum::<u64>();
    let pool = Pool::new(&pair, size as usize);
    for kind in [MoveKind::Read, MoveKind::Write] {
        let mut times = pool.run(&pair, kind, &parts, (0, 0), Protocol::CudaIpc, 20);
        let first = times.remove(0);
        times.sort_by(f64::total_cmp);
        println!("131,304 rows, 183 MB, {kind:?}: {:.0} us, the first time {first:.0} us", times[times.len() / 2]);
    }
}
