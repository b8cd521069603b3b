//! Moves of rows: from two lists to what `crossrail_rows` takes. Nothing is computed per row; indices are copied.
#![allow(unsafe_code)]

use crate::args::{ROWS_THREADS, RowStride, RowsArgs, RowsEnd};

/// Bytes of a row that a warp copies as one unit; longer rows are cut, so that they are spread over the GPU.
const PART: u64 = 8192;
/// Bytes that a warp takes at a time, if it can: enough that looking up rows is little beside copying them.
const BATCH: u64 = 16384;
/// Units that a warp can take at a time: one of each lane.
const MOST: u64 = 32;
pub(crate) const ROWS_WARPS: u64 = ROWS_THREADS as u64 / 32;
const STRIDE: usize = size_of::<RowStride>();

/// The most parts of a row: each costs every shorter row the time to find that it has none.
const MOST_PARTS: u64 = 64;

/// A list of rows.
#[derive(Clone, Copy, Debug)]
pub struct RowList<'a> {
    /// At least one; the `first` of each is the number of rows before it.
    pub strides: &'a [RowStride],
    /// Rows of each stride, if all have as many.
    pub even: Option<u32>,
    /// Which rows: all if it is empty, else these, again and again, each time `step` further.
    pub index: &'a [u32],
    /// See `index`.
    pub step: u64,
}

/// What a move copies.
#[derive(Clone, Copy, Debug)]
pub struct RowCount {
    /// The place of the first row.
    pub first: u64,
    /// How many rows.
    pub rows: u64,
    /// Bytes of these rows, at least about: by them, rows are shared out among warps.
    pub bytes: u64,
    /// Length of the longest row in both lists.
    pub longest: u64,
}

/// Words of the table of a move: strides and indices of both lists.
pub fn table_words(src: &RowList<'_>, dst: &RowList<'_>) -> usize {
    let words = |list: &RowList<'_>| list.strides.len() * (STRIDE / 8) + list.index.len().div_ceil(2);
    words(src) + words(dst)
}

/// Writes the table of a move into memory that the GPU has at `address`, and says how `blocks` blocks copy it.
///
/// # Panics
/// A table that is shorter than [`table_words`].
pub fn write_table(
    src: &RowList<'_>,
    dst: &RowList<'_>,
    (table, address): (&mut [u64], u64),
    count: RowCount,
    blocks: u32,
) -> RowsArgs {
    let mut writer = Writer { table, address };
    let mut end = |list: &RowList<'_>| RowsEnd {
        strides: writer.strides(list.strides),
        count: list.strides.len() as u32,
        even: list.even.unwrap_or(0),
        index: writer.index(list.index),
        period: list.index.len().max(1) as u64,
        step: list.step,
    };
    let (src, dst) = (end(src), end(dst));
    let parts = count.longest.div_ceil(PART).clamp(1, MOST_PARTS);
    let part = count.longest.div_ceil(parts).next_multiple_of(16).max(PART);
    let units = count.rows * parts;
    let per_unit = (count.bytes / units.max(1)).max(1);
    // Fewer where there is not enough for all warps.
    let share = units.div_ceil(u64::from(blocks.max(1)) * ROWS_WARPS);
    let batch = (BATCH / per_unit).min(share).clamp(1, MOST);
    RowsArgs { src, dst, first: count.first, units, parts, part, batch }
}

struct Writer<'a> {
    table: &'a mut [u64],
    address: u64,
}

impl Writer<'_> {
    /// The next words, and their address.
    fn take(&mut self, words: usize) -> (&mut [u64], u64) {
        let (taken, rest) = std::mem::take(&mut self.table).split_at_mut(words);
        self.table = rest;
        let address = self.address;
        self.address += 8 * words as u64;
        (taken, address)
    }

    fn strides(&mut self, strides: &[RowStride]) -> u64 {
        let (words, address) = self.take(strides.len() * (STRIDE / 8));
        for (words, stride) in words.chunks_exact_mut(STRIDE / 8).zip(strides) {
            words.copy_from_slice(&[stride.base, stride.stride, stride.len, stride.first]);
        }
        address
    }

    fn index(&mut self, index: &[u32]) -> u64 {
        if index.is_empty() {
            return 0;
        }
        let (words, address) = self.take(index.len().div_ceil(2));
        // SAFETY: numbers, and of the same alignment or less.
        let (_, places, _) = unsafe { words.align_to_mut::<u32>() };
        places[..index.len()].copy_from_slice(index);
        address
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list<'a>(strides: &'a [RowStride], index: &'a [u32]) -> RowList<'a> {
        RowList { strides, even: None, index, step: 7 }
    }

    #[test]
    fn a_table_has_strides_and_indices() {
        let strides = [1, 2].map(|n| RowStride { base: n, stride: 10 * n, len: 100 * n, first: 1000 * n });
        let (src, dst) = (list(&strides, &[5, 6, 7]), list(&strides[..1], &[]));
        let mut table = vec![0; table_words(&src, &dst)];
        assert_eq!(table.len(), 14);
        let count = RowCount { first: 2, rows: 6, bytes: 6 * 100, longest: 200 };
        let args = write_table(&src, &dst, (&mut table, 4096), count, 1);
        assert_eq!(args.src, RowsEnd { strides: 4096, count: 2, even: 0, index: 4160, period: 3, step: 7 });
        assert_eq!(args.dst, RowsEnd { strides: 4176, count: 1, even: 0, index: 0, period: 1, step: 7 });
        assert_eq!((args.first, args.units, args.parts, args.part), (2, 6, 1, PART));
        assert_eq!(table[..8], [1, 10, 100, 1000, 2, 20, 200, 2000]);
        assert_eq!(table[8..10], [6 << 32 | 5, 7].map(u64::from_le));
        assert_eq!(table[10..], [1, 10, 100, 1000]);
    }

    #[test]
    fn every_warp_has_something_to_do() {
        let strides = [RowStride { base: 0, stride: 0, len: 0, first: 0 }];
        let shape = |rows, len, longest| {
            let (src, mut table) = (list(&strides, &[]), [0; 8]);
            let count = RowCount { first: 0, rows, bytes: rows * len, longest };
            let args = write_table(&src, &src, (&mut table, 0), count, 16);
            assert!(args.part * args.parts >= longest);
            (args.batch, args.parts)
        };
        assert_eq!(shape(100, 2304, 2304), (1, 1));
        assert_eq!(shape(131_304, 2304, 2304), (7, 1));
        assert_eq!(shape(131_304, 16, 16), (32, 1));
        assert_eq!(shape(131_304, 9216, 9216), (3, 2));
        assert_eq!(shape(131_304, 1000, 1 << 30), (32, 64));
    }
}
