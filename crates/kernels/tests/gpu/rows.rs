//! Moves of rows: of any alignment, and the blocks of a cache of keys and values.

use std::time::Instant;

use crossrail_cuda::{DeviceMemory, Event};
use crossrail_kernels::{RowCount, RowList, RowStride, RowsArgs, table_words, write_table};

use crate::{Gpu, LIMIT, Numbers, assert_same};

/// Strides one after the other from `base` on: (rows, length, distance).
fn strides(base: u64, parts: &[(u64, u64, u64)]) -> (Vec<RowStride>, u64) {
    let (mut at, mut first, mut strides) = (base, 0, Vec::new());
    for (count, len, stride) in parts {
        strides.push(RowStride { base: at, stride: *stride, len: *len, first });
        (at, first) = (at + count * stride, first + count);
    }
    (strides, at - base)
}

fn shuffled(numbers: &mut Numbers, range: std::ops::Range<u32>) -> Vec<u32> {
    let mut order: Vec<u32> = range.collect();
    for last in (1..order.len()).rev() {
        order.swap(last, numbers.below(last as u64 + 1) as usize);
    }
    order
}

/// What a move means.
fn reference(src: &RowList<'_>, dst: &RowList<'_>, rows: u64, source: (u64, &[u8]), target: (u64, &mut [u8])) {
    let find = |list: &RowList<'_>, place: u64| {
        let row = list.index.get(place as usize).map_or(place, |row| u64::from(*row));
        let stride = list.strides[list.strides.partition_point(|stride| stride.first <= row) - 1];
        (stride.base + (row - stride.first) * stride.stride, stride.len)
    };
    for place in 0..rows {
        let ((from, len), (to, _)) = (find(src, place), find(dst, place));
        let (from, to, len) = ((from - source.0) as usize, (to - target.0) as usize, len as usize);
        target.1[to..to + len].copy_from_slice(&source.1[from..from + len]);
    }
}

/// A table in device memory.
fn table(gpu: &Gpu, lists: (&RowList<'_>, &RowList<'_>), count: RowCount, blocks: u32) -> (DeviceMemory, RowsArgs) {
    let mut words = vec![0; table_words(lists.0, lists.1)];
    let memory = DeviceMemory::new(&gpu.context, 8 * words.len()).unwrap();
    let args = write_table(lists.0, lists.1, (&mut words, memory.address()), count, blocks);
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let pinned = gpu.pinned(&bytes);
    // SAFETY: both areas are as long as the table, and nobody else's until the wait is over.
    unsafe { gpu.stream.copy(memory.address(), pinned.address(), bytes.len()).unwrap() };
    gpu.stream.wait(LIMIT).unwrap();
    (memory, args)
}

#[test]
fn rows_of_any_alignment_and_length_are_moved() {
    let Some(gpu) = Gpu::new() else { return };
    for (round, blocks) in [None, Some(1), Some(7), None].into_iter().enumerate() {
        let (odd, mut numbers) = (round as u64, Numbers(0x70e5 + round as u64));
        let lengths = [1, 15, 16, 17, 64, 65, 528, 576, 2304, 4097, 8192, 8193, 9216, 70_000];
        let parts: Vec<(u64, u64, u64)> = lengths.iter().map(|len| (31, *len, len + odd * 5)).collect();
        let gaps: Vec<(u64, u64, u64)> = lengths.iter().map(|len| (31, *len, len + odd * 3 + 16)).collect();
        let room = 6 << 20;
        let bytes = numbers.bytes(room);
        let (source, target) = (gpu.device(&bytes), gpu.device(&vec![0x55; room]));
        let (from, used) = strides(source.address() + odd, &parts);
        let (to, also) = strides(target.address() + 3 * odd, &gaps);
        assert!(used.max(also) + 16 < room as u64);
        let order: Vec<u32> =
            (0..lengths.len() as u32).flat_map(|at| shuffled(&mut numbers, 31 * at..31 * (at + 1))).collect();
        let rows = order.len() as u64;
        let src = RowList { strides: &from, even: Some(31), index: &order, step: 0 };
        let dst = RowList { strides: &to, even: None, index: &[], step: 0 };
        let count = RowCount { first: 0, rows, bytes: used, longest: 70_000 };
        let (_table, args) = table(&gpu, (&src, &dst), count, blocks.unwrap_or(132));
        // SAFETY: rows and tables live until the wait is over, and don't overlap.
        unsafe { gpu.kernels.rows(&gpu.stream, &args, blocks).unwrap() };
        gpu.stream.wait(LIMIT).unwrap();
        let mut expected = vec![0x55; room];
        let (base, first) = (source.address(), target.address());
        reference(&src, &dst, rows, (base, &bytes), (first, &mut expected));
        assert_same(&gpu.bytes(&target), &expected, &format!("round {round}"));
    }
}

/// 32,768 tokens in pages of 16, as vLLM lays out DeepSeek-V4: 131,304 rows of 528 to 9,216 bytes, from a random page to
/// another.
#[test]
fn the_pages_of_a_cache_are_moved() {
    let Some(gpu) = Gpu::new() else { return };
    // Layers, pages that are moved, pages of the pool, bytes of a page.
    const GROUPS: [(u32, usize, u32, u64); 4] =
        [(30, 2048, 2500, 2304), (30, 2048, 2500, 528), (31, 256, 300, 576), (61, 8, 16, 9216)];
    let layers = GROUPS.iter().flat_map(|(layers, _, pool, len)| (0..*layers).map(|_| (u64::from(*pool), *len, *len)));
    let parts: Vec<(u64, u64, u64)> = layers.collect();
    let (mut numbers, mut first, mut index) = (Numbers(0xd5), 0, [Vec::new(), Vec::new()]);
    for (layers, pages, pool, _) in GROUPS {
        let order = [shuffled(&mut numbers, 0..pool), shuffled(&mut numbers, 0..pool)];
        for _ in 0..layers {
            for (index, order) in index.iter_mut().zip(&order) {
                index.extend(order[..pages].iter().map(|page| page + first));
            }
            first += pool;
        }
    }
    let room = strides(0, &parts).1;
    let bytes = numbers.bytes(1 << 20).repeat(room.div_ceil(1 << 20) as usize)[..room as usize].to_vec();
    let (source, target) = (gpu.device(&bytes), gpu.device(&vec![0; bytes.len()]));
    let (from, to) = (strides(source.address(), &parts).0, strides(target.address(), &parts).0);
    let src = RowList { strides: &from, even: None, index: &index[0], step: 0 };
    let dst = RowList { strides: &to, even: None, index: &index[1], step: 0 };
    let rows = index[0].len() as u64;
    assert_eq!(rows, 131_304);
    let moved: u64 = 2048 * 30 * (2304 + 528) + 31 * 256 * 576 + 61 * 8 * 9216;
    let count = RowCount { first: 0, rows, bytes: moved, longest: 9216 };
    let mut words = vec![0; table_words(&src, &dst)];
    for blocks in [4, 8, 16, 24, 32, 48, 64, 132] {
        let (on_device, args) = table(&gpu, (&src, &dst), count, blocks);
        let at = gpu.pinned(&vec![0; 8 * words.len()]);
        let mut times = Vec::new();
        for args in [args, write_table(&src, &dst, (&mut words, at.address()), count, blocks)] {
            // SAFETY: as long as the table, which no launch reads yet.
            unsafe { std::ptr::copy_nonoverlapping(words.as_ptr(), at.as_ptr().cast(), words.len()) };
            let (begun, ended) = (Event::timed(&gpu.context).unwrap(), Event::timed(&gpu.context).unwrap());
            let mut micros = Vec::new();
            for _ in 0..12 {
                begun.record(&gpu.stream).unwrap();
                // SAFETY: as above.
                unsafe { gpu.kernels.rows(&gpu.stream, &args, Some(blocks)).unwrap() };
                ended.record(&gpu.stream).unwrap();
                gpu.stream.wait(LIMIT).unwrap();
                micros.push(ended.since(&begun).unwrap().as_secs_f64() * 1e6);
            }
            micros.sort_by(f64::total_cmp);
            times.push(micros[micros.len() / 2]);
        }
        drop(on_device);
        let rate = moved as f64 / times[0] / 1e3;
        println!(
            "{blocks:>4} blocks: {:.0} us with the table on the GPU ({rate:.0} GB/s), {:.0} us pinned",
            times[0], times[1]
        );
    }
    let started = Instant::now();
    for _ in 0..20 {
        write_table(&src, &dst, (&mut words, 8), count, 24);
    }
    println!("table of {} bytes: {:.0} us", 8 * words.len(), started.elapsed().as_secs_f64() * 5e4);
    let mut expected = vec![0; bytes.len()];
    reference(&src, &dst, rows, (source.address(), &bytes), (target.address(), &mut expected));
    assert_same(&gpu.bytes(&target), &expected, "pages");
}
