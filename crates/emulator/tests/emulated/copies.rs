//! Kernels on emulated GPUs: the copies against memcpy, at odd sizes and in many orders; and kernels that are wrong on
//! purpose, which must be caught.

use crossrail_cuda::Grid;
use crossrail_kernels::{
    COPY_THREADS, FLAG_REACHED, FLAG_TIMED_OUT, FlagAwaitArgs, FlagWriteArgs, Piece, PutArgs, ROWS_THREADS, RowCount,
    RowList, RowStride, UnpackArgs, table_words, write_table,
};

use crossrail_emulator::{Build, Emulator, GpuMemory as _, Gpus as _, Memory, Numbers};

const SEEDS: u64 = 6;
/// Bytes that a warp copies at a time.
const PART: u64 = 16384;

fn copying(blocks: u32) -> Grid {
    Grid { blocks, threads: COPY_THREADS, shared: 0 }
}

/// A put without a signal.
fn plain(dst: u64, src: u64, len: u64) -> PutArgs {
    PutArgs { dst, src, len, part: PART, ..PutArgs::ZERO }
}

fn assert_copied(source: &[u8], target: &Memory, start: usize, end: usize, len: usize, before: &[u8], what: &str) {
    let mut expected = before.to_vec();
    expected[end..end + len].copy_from_slice(&source[start..start + len]);
    let got = target.bytes();
    let wrong = got.iter().zip(&expected).position(|(got, expected)| got != expected);
    assert!(wrong.is_none(), "{what}: byte {wrong:?} is wrong");
}

#[test]
fn copies_take_any_length_and_alignment() {
    let Some(mut emulator) = Emulator::build("kernels/put.cu", &[]) else { return };
    let source = emulator.memory("source", 64 << 10);
    let target = emulator.memory("target", 64 << 10);
    let mut numbers = Numbers(1);
    for seed in 0..40 {
        let len = [0, 1, 63, 64, 65, 500, 4097, 40_000][seed as usize % 8];
        let (start, end) = (numbers.below(4000) as usize, numbers.below(4000) as usize);
        let before = target.bytes();
        let args = plain(target.address() + end as u64, source.address() + start as u64, len as u64);
        emulator.launch("crossrail_put", &args, copying(1 + numbers.below(3) as u32));
        emulator.run(seed).unwrap();
        assert_copied(&source.bytes(), &target, start, end, len, &before, &format!("{len} bytes, {start} to {end}"));
    }
}

#[test]
fn lists_are_unpacked() {
    let Some(mut emulator) = Emulator::build("kernels/unpack.cu", &[]) else { return };
    let source = emulator.memory("source", 100_000);
    let target = emulator.memory("target", 100_000);
    for seed in 0..SEEDS {
        let mut numbers = Numbers(seed);
        let (mut expected, mut pieces, mut at) = (target.bytes(), Vec::new(), 0);
        let bytes = source.bytes();
        while at < 60_000 {
            let len = numbers.below(3000) as usize;
            let start = numbers.below(90_000) as usize;
            expected[at..at + len].copy_from_slice(&bytes[start..start + len]);
            pieces.extend([source.address() + start as u64, target.address() + at as u64, len as u64]);
            at += len + numbers.below(9) as usize;
        }
        assert_eq!(size_of::<Piece>(), 24);
        let list = emulator.memory_of("pieces", &pieces);
        let args = UnpackArgs { pieces: list.address(), count: pieces.len() as u64 / 3 };
        emulator.launch("crossrail_unpack", &args, copying(2));
        emulator.run(seed).unwrap();
        assert!(target.bytes() == expected, "seed {seed}");
    }
}

/// Strides of `count` rows each of these lengths, which lie in a memory of `room` bytes with gaps of `gap`, from `start`
/// on.
fn strides(base: u64, (start, gap): (u64, u64), lengths: &[u64], count: u64) -> (Vec<RowStride>, u64) {
    let (mut at, mut strides) = (base + start, Vec::new());
    for len in lengths {
        let stride = len + gap;
        strides.push(RowStride { base: at, stride, len: *len, first: strides.len() as u64 * count });
        at += stride * count;
    }
    (strides, at - base)
}

/// A random order of the numbers below `count`.
fn shuffled(count: u32, numbers: &mut Numbers) -> Vec<u32> {
    let mut order: Vec<u32> = (0..count).collect();
    for last in (1..order.len()).rev() {
        order.swap(last, numbers.below(last as u64 + 1) as usize);
    }
    order
}

/// Where the row in place `place` is, and its length: the kernel's formula again.
fn row(list: &RowList<'_>, place: u64) -> (u64, u64) {
    let period = list.index.len() as u64;
    let row = match period {
        0 => place,
        _ => place / period * list.step + u64::from(list.index[(place % period) as usize]),
    };
    let stride = list.strides.iter().rfind(|stride| stride.first <= row).unwrap();
    (stride.base + (row - stride.first) * stride.stride, stride.len)
}

const COUNT: u32 = 23;
const ROOM: usize = 512 << 10;

/// Rows of several lengths, from one random order to another, with both formulas of indices; the error, or what came out
/// wrong. Gaps and starts that are not multiples of 16 misalign all ends.
fn move_rows(emulator: &mut Emulator, seed: u64) -> Result<(), String> {
    let mut numbers = Numbers(seed);
    let odd = seed % 3;
    let lengths: Vec<u64> = match seed % 4 {
        0 => vec![528, 2304, 16, 9216],
        1 => vec![1, 15, 700, 8195, 0, 64],
        2 => vec![576; 5],
        _ => vec![20_000, 32],
    };
    let (source, target) = (emulator.memory("source", ROOM), emulator.memory("target", ROOM));
    let (from, used) = strides(source.address(), (odd * 5, odd * 24), &lengths, u64::from(COUNT));
    let (to, _) = strides(target.address(), (odd * 3, 16 + odd), &lengths, u64::from(COUNT));
    assert!(used < ROOM as u64);
    let rows = COUNT * lengths.len() as u32;
    let block = (shuffled(COUNT, &mut numbers), shuffled(COUNT, &mut numbers));
    // In every stride again; or each row where it likes, as long as the lengths are the same.
    let all: Vec<u32> =
        (0..lengths.len() as u32).flat_map(|at| block.1.iter().map(move |row| at * COUNT + row)).collect();
    let even = seed.is_multiple_of(2).then_some(COUNT);
    let src = RowList { strides: &from, even, index: &block.0, step: u64::from(COUNT) };
    let dst = match seed % 5 {
        0 => RowList { strides: &to, even: None, index: &[], step: 0 },
        _ => RowList { strides: &to, even: None, index: &all, step: 0 },
    };
    let count = RowCount {
        first: numbers.below(4),
        rows: u64::from(rows) - 4,
        bytes: used,
        longest: *lengths.iter().max().unwrap(),
    };
    let mut words = vec![0; table_words(&src, &dst)];
    let table = emulator.zeroed("table", 8 * words.len());
    let blocks = 1 + numbers.below(3) as u32;
    let args = write_table(&src, &dst, (&mut words, table.address()), count, blocks);
    table.write(0, &words);
    let (bytes, mut expected) = (source.bytes(), target.bytes());
    for place in count.first..count.first + count.rows {
        let ((from, len), (to, _)) = (row(&src, place), row(&dst, place));
        let (from, to) = ((from - source.address()) as usize, (to - target.address()) as usize);
        expected[to..to + len as usize].copy_from_slice(&bytes[from..from + len as usize]);
    }
    emulator.launch("crossrail_rows", &args, Grid { blocks, threads: ROWS_THREADS, shared: 0 });
    emulator.run(seed)?;
    let wrong = target.bytes().iter().zip(&expected).position(|(got, expected)| got != expected);
    wrong.map_or(Ok(()), |byte| Err(format!("seed {seed}: byte {byte} of the target is wrong")))
}

#[test]
fn rows_are_moved_between_lists() {
    let Some(mut emulator) = Emulator::build("kernels/rows.cu", &[]) else { return };
    for seed in 0..30 {
        move_rows(&mut emulator, seed).unwrap();
    }
}

#[test]
fn a_move_of_rows_whose_lanes_do_not_wait_is_caught() {
    for (from, to) in [
        (
            "units[lane] = RowUnit{src - before, dst - before, end};\n        __syncwarp();",
            "units[lane] = RowUnit{src - before, dst - before, end};",
        ),
        ("__syncwarp();\n        units[lane]", "units[lane]"),
    ] {
        let Some(mut emulator) = Build::new(&["kernels/rows.cu"]).broken("kernels/rows.cu", from, to).emulator() else {
            return;
        };
        let errors = caught(30, |seed| move_rows(&mut emulator, seed));
        assert!(errors.contains("unordered accesses"), "{from}: {errors}");
    }
}

/// A put of random length, with its signal by one block or behind several, while another GPU awaits its signal and copies on what came.
fn put_and_forward(emulator: &mut Emulator, seed: u64) -> Result<(), String> {
    let mut numbers = Numbers(seed);
    let len = 1 + numbers.below(9000);
    let source = emulator.memory("source", 9000);
    let target = emulator.memory("target", 9000);
    let words = emulator.zeroed("words", 16);
    let (flag, value) = (words.address(), 5);
    let several = PutArgs { part: 512, ..plain(target.address(), source.address(), len) };
    let wait = FlagAwaitArgs { flag, value, limit_ns: 1 << 30, outcome: words.address() + 8 };
    let copied = emulator.memory("copied", 9000);
    let copy = plain(copied.address(), target.address(), len);
    let warp = Grid { blocks: 1, threads: 32, shared: 0 };
    if seed.is_multiple_of(2) {
        emulator.launch_on(0, "crossrail_put", &PutArgs { signal: flag, value, ..several }, copying(1));
    } else {
        emulator.launch_on(0, "crossrail_put", &several, copying(3));
        emulator.launch_on(0, "crossrail_flag_write", &FlagWriteArgs { flag, value }, warp);
    }
    emulator.launch_on(1, "crossrail_flag_await", &wait, warp);
    emulator.launch_on(1, "crossrail_put", &copy, copying(2));
    emulator.run(seed)?;
    if words.read::<u64>(0, 2) != [value, FLAG_REACHED] {
        return Err(format!("seed {seed}: the words are {:?}", words.read::<u64>(0, 2)));
    }
    let len = len as usize;
    if source.bytes()[..len] != copied.bytes()[..len] {
        return Err(format!("seed {seed}: {len} bytes came out wrong"));
    }
    Ok(())
}

const PUT: [&str; 2] = ["kernels/put.cu", "kernels/flag.cu"];

#[test]
fn whoever_sees_the_signal_sees_the_bytes() {
    let Some(mut emulator) = Build::new(&PUT).emulator() else { return };
    for seed in 0..30 {
        put_and_forward(&mut emulator, seed).unwrap();
    }
}

#[test]
fn a_wait_that_nobody_ends_is_over_after_its_limit() {
    let Some(mut emulator) = Emulator::build("kernels/flag.cu", &[]) else { return };
    let words = emulator.zeroed("words", 24);
    // A quarter of an hour, of the virtual clock.
    let wait =
        FlagAwaitArgs { flag: words.address(), value: 2, limit_ns: 900_000_000_000, outcome: words.address() + 8 };
    let grid = Grid { blocks: 1, threads: 32, shared: 0 };
    emulator.launch("crossrail_flag_await", &wait, grid);
    emulator.launch("crossrail_flag_write", &FlagWriteArgs { flag: words.address(), value: 1 }, grid);
    emulator.run(3).unwrap();
    assert_eq!(words.read::<u64>(0, 2), [1, FLAG_TIMED_OUT]);
}

#[test]
fn memory_beside_what_was_named_is_not_touched() {
    let Some(mut emulator) = Emulator::build("kernels/put.cu", &[]) else { return };
    let source = emulator.memory("source", 4096);
    let target = emulator.memory("target", 4096);
    let args = plain(target.address() + 100, source.address(), 4000);
    emulator.launch("crossrail_put", &args, copying(1));
    let error = emulator.run(0).unwrap_err();
    assert!(error.contains("target + ") && error.contains("a store of"), "{error}");
}

/// At least one of so many seeds catches what is broken; the errors' words are given back.
fn caught(seeds: u64, mut run: impl FnMut(u64) -> Result<(), String>) -> String {
    let errors: Vec<String> = (0..seeds).filter_map(|seed| run(seed).err()).collect();
    assert!(!errors.is_empty(), "{seeds} seeds, and none caught it");
    println!("{} of {seeds} seeds: {}", errors.len(), errors[0]);
    errors.join("\n")
}

#[test]
fn a_put_whose_signal_does_not_order_its_bytes_is_caught() {
    const RACE: &str = "unordered accesses";
    for (from, to, words) in [
        ("__syncthreads();", "", RACE),
        ("st_release_sys_u64(args.signal, args.value);", ";", RACE),
        ("st_release_sys_u64(args.signal, args.value);", "st_relaxed_gpu_u64(args.signal, args.value);", RACE),
        ("st_release_sys_u64(args.signal, args.value);", "st_release_gpu_u64(args.signal, args.value);", RACE),
    ] {
        let Some(mut emulator) = Build::new(&PUT).broken("kernels/put.cu", from, to).emulator() else { return };
        let errors = caught(10, |seed| put_and_forward(&mut emulator, seed));
        assert!(errors.contains(words), "{from}: {errors}");
    }
}

#[test]
fn a_lane_that_does_not_come_is_named() {
    let (from, to) = ("(lane + 1) % WARP);", "(lane + 1) % WARP); if (k == 3 && lane == 7) return;");
    let Some(mut emulator) = Build::new(&["kernels/put.cu"]).broken("kernels/copy_warp.cuh", from, to).emulator()
    else {
        return;
    };
    let memory = emulator.memory("memory", 16384);
    let args = plain(memory.address() + 8192, memory.address() + 1, 8000);
    emulator.launch("crossrail_put", &args, copying(1));
    let error = emulator.run(0).unwrap_err();
    let named = error.contains("waits for it at a shuffle") || error.contains("lanes that have ended");
    assert!(named && error.contains("copy_warp.cuh:"), "{error}");
}
