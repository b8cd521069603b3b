//! Rows of registered memory, as layouts have them: found in arrays of addresses, placed in regions, cut and sliced.

use std::sync::Arc;

use crossrail_transport::{Rows, Stride};
use crossrail_types::{Error, ErrorKind, Result};

use super::buffer::Place;

/// Rows by their absolute addresses, in an array: three words each (address, length, device), or five (address, length,
/// device, stride, count), which stand for `count` rows; or four as C has them ([`Addresses::of_c`]).
#[derive(Clone, Copy, Debug)]
pub struct Addresses<'a> {
    words: &'a [u64],
    width: usize,
}

/// Rows in a region, as a layout is made of them: `count` rows of `len` bytes, the first at `offset` of the region,
/// each `stride` bytes (modulo 2^64) behind the one before.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a, R> {
    /// The region, or its key.
    pub region: &'a R,
    /// Where the first begins.
    pub offset: u64,
    /// Bytes of each.
    pub len: u64,
    /// From one to the next.
    pub stride: u64,
    /// How many.
    pub count: u64,
}

/// A stride of a region, by its number in whatever list goes with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RegionStride {
    /// Which region.
    pub(crate) region: u32,
    /// The rows, `at` counted from its first byte.
    pub(crate) stride: Stride,
}

/// A region that rows can be in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) base: u64,
    pub(crate) len: u64,
    pub(crate) place: Place,
}

/// Rows of several regions, all in one space of addresses: the process's own, or, of a peer's memory, one in which no
/// two regions adjoin.
#[derive(Clone, Debug)]
pub(crate) struct Placed {
    pub(crate) rows: Arc<Rows>,
    /// Of each stride: its region.
    pub(crate) regions: Vec<u32>,
}

fn usage(what: &str, detail: impl Into<String>) -> Error {
    Error::new(ErrorKind::Usage, what, detail)
}

impl<'a> Addresses<'a> {
    /// The rows of an array in C order with `width` columns.
    ///
    /// # Errors
    /// `Usage`: another width than 3 or 5, or a part of a row.
    pub fn new(words: &'a [u64], width: usize) -> Result<Addresses<'a>> {
        if !matches!(width, 3 | 5) || !words.len().is_multiple_of(width) {
            return Err(usage("layout", format!("{} words are no rows of {width}: 3 or 5 each", words.len())));
        }
        Ok(Addresses { words, width })
    }

    /// Rows of four words: address, length, stride, and count, of which 0 is 1.
    pub fn of_c(rows: &'a [[u64; 4]]) -> Addresses<'a> {
        Addresses { words: rows.as_flattened(), width: 4 }
    }

    /// How many rows they are.
    pub fn rows(&self) -> u64 {
        match self.width {
            3 => (self.words.len() / 3) as u64,
            4 => self.words.chunks_exact(4).fold(0, |sum, row| sum.saturating_add(row[3].max(1))),
            _ => self.words.chunks_exact(5).fold(0, |sum, row| sum.saturating_add(row[4])),
        }
    }

    /// Ranges of memory (address, length, device) that hold all rows: rows that adjoin or overlap are in one. In the
    /// order of their addresses.
    pub fn merged(&self) -> Vec<(u64, u64, u64)> {
        let mut all: Vec<(u64, u64, u64)> = Vec::new();
        for row in self.words.chunks_exact(self.width) {
            let (device_of, stride, count) = match row {
                [_, _, stride, count] => (0, *stride, (*count).max(1)),
                [_, _, device, stride, count] => (*device, *stride, *count),
                _ => (row[2], 0, 1),
            };
            for k in 0..count {
                let (at, len) = (row[0].wrapping_add(k.wrapping_mul(stride)), row[1]);
                match all.last_mut() {
                    Some((base, have, device)) if *device == device_of && base.checked_add(*have) == Some(at) => {
                        *have += len
                    }
                    _ => all.push((at, len, device_of)),
                }
            }
        }
        all.sort_unstable_by_key(|(at, _, device)| (*device, *at));
        let mut merged: Vec<(u64, u64, u64)> = Vec::with_capacity(all.len());
        for (at, len, device) in all {
            match merged.last_mut() {
                Some((base, have, of)) if *of == device && at <= base.saturating_add(*have) => {
                    *have = (*have).max(at.saturating_add(len) - *base);
                }
                _ => merged.push((at, len, device)),
            }
        }
        merged.sort_unstable();
        merged
    }

    /// The fewest strides that one pass finds.
    fn strides(&self) -> Vec<Stride> {
        // A loop for each width: ten thousand rows are usual.
        match self.width {
            3 => joined(self.words.as_chunks().0.iter().map(|[at, len, _]| single(*at, *len))),
            4 => joined(self.words.as_chunks().0.iter().map(|[at, len, stride, count]| match count {
                0 | 1 => single(*at, *len),
                _ => Stride { at: *at, len: *len, stride: *stride, count: *count },
            })),
            _ => joined(self.words.as_chunks().0.iter().map(|[at, len, _, stride, count]| Stride {
                at: *at,
                len: *len,
                stride: *stride,
                count: *count,
            })),
        }
    }

    /// The rows, each in one of `extents`.
    pub(crate) fn placed(&self, extents: &[Extent]) -> Result<Placed> {
        let mut order: Vec<u32> = (0..extents.len() as u32).collect();
        order.sort_unstable_by_key(|at| extents[*at as usize].base);
        let within = |at: u64, len: u64| {
            let found = order.partition_point(|region| extents[*region as usize].base <= at).checked_sub(1)?;
            let extent = &extents[order[found] as usize];
            let end = at.checked_add(len)?;
            (end <= extent.base + extent.len).then_some(order[found])
        };
        let (mut placed, mut regions) = (Vec::new(), Vec::new());
        // Rows of no bytes may be anywhere. They go with a row that has bytes.
        let mut beside = None;
        let strides = self.strides();
        let mut with_bytes = strides.iter().filter(|stride| stride.len > 0);
        let first = with_bytes.next().and_then(|stride| within(stride.at, stride.len)).unwrap_or(0);
        for mut stride in strides {
            if stride.len == 0
                && let Some(extent) = extents.get(beside.unwrap_or(first) as usize)
            {
                placed.push(Stride { at: extent.base, stride: 0, ..stride });
                regions.push(beside.unwrap_or(first));
                continue;
            }
            while stride.count > 0 {
                let Some(region) = within(stride.at, stride.len) else {
                    let detail =
                        format!("{} bytes at {:#x} are not inside one registered region", stride.len, stride.at);
                    return Err(Error::new(ErrorKind::Region, "layout", detail).with_hint("register that memory first"));
                };
                let Extent { base, len, .. } = extents[region as usize];
                let count = inside(&stride, base, base + len);
                placed.push(Stride { count, ..stride });
                regions.push(region);
                beside = Some(region);
                stride = Stride { at: stride.row(count), count: stride.count - count, ..stride };
            }
        }
        Placed::new(placed, regions)
    }
}

fn single(at: u64, len: u64) -> Stride {
    Stride { at, len, stride: 0, count: 1 }
}

/// Rows of one length and distance joined into strides, in their order.
fn joined(mut rows: impl Iterator<Item = Stride>) -> Vec<Stride> {
    let mut strides: Vec<Stride> = Vec::new();
    let Some(mut open) = rows.next() else { return strides };
    let mut next = open.row(open.count);
    for row in rows {
        let Stride { at, len, count, .. } = row;
        if len == open.len && count == 1 {
            if at == next && open.count > 1 {
                open.count += 1;
                next = next.wrapping_add(open.stride);
                continue;
            }
            if open.count == 1 {
                open.stride = at.wrapping_sub(open.at);
                open.count = 2;
                next = at.wrapping_add(open.stride);
                continue;
            }
        }
        strides.push(open);
        open = row;
        next = open.row(open.count);
    }
    strides.push(open);
    strides
}

/// How many rows of a stride, of which the first is inside, are inside `low..high` one after the other.
fn inside(stride: &Stride, low: u64, high: u64) -> u64 {
    let step = stride.stride.cast_signed();
    let room = match step {
        0 => return stride.count,
        1.. => (high - stride.len).saturating_sub(stride.at) / step.unsigned_abs(),
        _ => (stride.at - low) / step.unsigned_abs(),
    };
    room.saturating_add(1).min(stride.count)
}

impl Placed {
    pub(crate) fn new(strides: Vec<Stride>, regions: Vec<u32>) -> Result<Placed> {
        let rows =
            Rows::new(strides).ok_or_else(|| usage("layout", "no rows, more than 2^32, or more bytes than 2^63"))?;
        Ok(Placed { rows: Arc::new(rows), regions })
    }

    /// Each row cut into `parts`: part `index` of each.
    pub(crate) fn split(&self, parts: u64, index: u64) -> Result<Placed> {
        if parts == 0 || index >= parts {
            return Err(usage("split", format!("part {index} of {parts}")));
        }
        let cut = |stride: &Stride| {
            let len = stride.len / parts;
            let whole = stride.len.is_multiple_of(parts);
            whole.then(|| Stride { at: stride.at.wrapping_add(len * index), len, ..*stride })
        };
        let strides: Option<Vec<_>> = self.rows.strides().iter().map(cut).collect();
        let strides =
            strides.ok_or_else(|| usage("split", format!("the length of a row is not a multiple of {parts}")))?;
        Placed::new(strides, self.regions.clone())
    }

    /// Rows `first..last`.
    pub(crate) fn slice(&self, first: u64, last: u64) -> Result<Placed> {
        if first >= last || last > self.rows.count() {
            return Err(usage("slice", format!("rows {first}..{last} of {}", self.rows.count())));
        }
        let (mut strides, mut regions, mut before) = (Vec::new(), Vec::new(), 0);
        for (stride, region) in self.rows.strides().iter().zip(&self.regions) {
            let (from, to) = (first.max(before), last.min(before + stride.count));
            if from < to {
                strides.push(Stride { at: stride.row(from - before), count: to - from, ..*stride });
                regions.push(*region);
            }
            before += stride.count;
        }
        Placed::new(strides, regions)
    }

    /// The strides, counted from their regions' first bytes.
    pub(crate) fn relative(&self, extents: &[Extent]) -> Vec<RegionStride> {
        let of = |(stride, region): (&Stride, &u32)| {
            let at = stride.at.wrapping_sub(extents[*region as usize].base);
            RegionStride { region: *region, stride: Stride { at, ..*stride } }
        };
        self.rows.strides().iter().zip(&self.regions).map(of).collect()
    }

    /// Rows given by region and offset. `extents` says where the regions are.
    pub(crate) fn of<'a, R: 'a>(
        rows: &[Row<'a, R>],
        extents: &[Extent],
        region_of: impl Fn(&'a R) -> u32,
    ) -> Result<Placed> {
        let (mut strides, mut regions) = (Vec::with_capacity(rows.len()), Vec::with_capacity(rows.len()));
        for Row { region, offset, len, stride, count } in rows {
            let number = region_of(region);
            let extent = &extents[number as usize];
            let row = match len {
                0 => Stride { at: 0, len: 0, stride: 0, count: *count }, // wherever they are
                _ => Stride { at: *offset, len: *len, stride: *stride, count: *count },
            };
            if row.extent().is_none_or(|(_, end)| end > extent.len) {
                let detail = format!("{count} rows of {len} bytes at {offset} of a region of {} bytes", extent.len);
                return Err(usage("layout", detail));
            }
            strides.push(Stride { at: extent.base.wrapping_add(row.at), ..row });
            regions.push(number);
        }
        Placed::new(strides, regions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(base: u64, len: u64) -> Extent {
        Extent { base, len, place: Place::Host }
    }

    #[test]
    fn strides_are_found_in_addresses_and_cut_where_regions_end() {
        let rows: Vec<u64> = (0..10u64).flat_map(|row| [1000 + 32 * row, 16, 0]).chain([5000, 8, 0]).collect();
        let addresses = Addresses::new(&rows, 3).unwrap();
        assert_eq!((addresses.rows(), addresses.strides().len()), (11, 2));
        let placed = addresses.placed(&[host(5000, 8), host(1000, 96), host(1096, 1000)]).unwrap();
        let counts: Vec<_> = placed.rows.strides().iter().map(|s| (s.at, s.count)).collect();
        assert_eq!((counts, placed.regions.clone()), (vec![(1000, 3), (1096, 7), (5000, 1)], vec![1, 2, 0]));
        let error = addresses.placed(&[host(1000, 96)]).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Region, "{error}");
        let back: Vec<u64> = (0..4u64).flat_map(|row| [1096 - 32 * row, 16, 0]).collect();
        let placed = Addresses::new(&back, 3).unwrap().placed(&[host(900, 116), host(1016, 200)]).unwrap();
        assert_eq!(placed.rows.strides().iter().map(|s| s.count).collect::<Vec<_>>(), [3, 1]);
        let five = [1000, 16, 0, 32, 3];
        let placed = Addresses::new(&five, 5).unwrap().placed(&[host(1000, 96)]).unwrap();
        assert_eq!((placed.rows.count(), placed.rows.bytes()), (3, 48));
        let single: Vec<u64> = (0..10u64).flat_map(|row| [1000 + 32 * row, 16, 0, 0, 1]).chain(five).collect();
        let strides = Addresses::new(&single, 5).unwrap().strides();
        assert_eq!(strides.iter().map(|s| (s.at, s.count)).collect::<Vec<_>>(), [(1000, 10), (1000, 3)]);
        assert!(Addresses::new(&five, 4).is_err() && Addresses::new(&five, 3).is_err());
        let of_c = [[1000, 8, 0, 0], [1016, 8, 7, 1], [1032, 8, 16, 4]];
        let as_five = [1000, 8, 0, 0, 1, 1016, 8, 0, 0, 1, 1032, 8, 0, 16, 4];
        let (of_c, as_five) = (Addresses::of_c(&of_c), Addresses::new(&as_five, 5).unwrap());
        assert_eq!(of_c.strides(), as_five.strides());
        assert_eq!((of_c.rows(), of_c.merged()), (as_five.rows(), as_five.merged()));
        assert!(Addresses::new(&[u64::MAX, 2, 0], 3).unwrap().placed(&[host(0, 9)]).is_err());
    }

    #[test]
    fn rows_of_no_bytes_may_be_anywhere_and_keep_their_numbers() {
        let extents = [host(5000, 8), host(1000, 96)];
        let rows = [0, 0, 0, 1000, 16, 0, 7, 0, 0, 900_000, 0, 0, 5000, 8, 0];
        let placed = Addresses::new(&rows, 3).unwrap().placed(&extents).unwrap();
        assert_eq!((placed.rows.count(), placed.rows.bytes()), (5, 24));
        // With those that have bytes, so that a list of one GPU's rows stays one.
        assert_eq!(placed.regions, [1, 1, 1, 0]);
        let relative = placed.relative(&extents);
        assert!(relative.iter().all(|of| of.stride.extent().is_some_and(|(_, end)| end <= 96)), "{relative:?}");
        assert_eq!(placed.split(2, 1).unwrap().rows.bytes(), 12);
        let row = |offset, len| Row { region: &0u32, offset, len, stride: 7, count: 2 };
        let placed = Placed::of(&[row(1 << 60, 0), row(8, 4)], &extents[1..], |region| *region).unwrap();
        assert_eq!((placed.rows.count(), placed.rows.bytes()), (4, 8));
        assert!(Addresses::new(&[0, 0, 0], 3).unwrap().placed(&[]).is_err(), "no region to be in");
    }

    #[test]
    fn rows_are_split_and_sliced() {
        let rows = [1000, 16, 0, 32, 4, 5000, 8, 0, 8, 2];
        let placed = Addresses::new(&rows, 5).unwrap().placed(&[host(1000, 200), host(5000, 100)]).unwrap();
        let half = placed.split(2, 1).unwrap();
        assert_eq!(half.rows.strides()[0], Stride { at: 1008, len: 8, stride: 32, count: 4 });
        assert!(placed.split(16, 0).is_err() && placed.split(2, 2).is_err() && placed.split(0, 0).is_err());
        let some = placed.slice(3, 5).unwrap();
        assert_eq!(some.rows.strides().iter().map(|s| (s.at, s.count)).collect::<Vec<_>>(), [(1096, 1), (5000, 1)]);
        assert_eq!(some.regions, [0, 1]);
        assert!(placed.slice(3, 7).is_err() && placed.slice(3, 3).is_err());
    }

    #[test]
    fn adjoining_rows_are_registered_as_one() {
        let rows = [96, 32, 0, 0, 32, 0, 32, 64, 0, 500, 8, 0, 500, 8, 1];
        let merged = Addresses::new(&rows, 3).unwrap().merged();
        assert_eq!(merged, [(0, 128, 0), (500, 8, 0), (500, 8, 1)]);
    }
}
