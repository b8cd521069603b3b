//! Memory as rows: what an operation moves when it is not one piece.
//!
//! [`Rows`] are strides, found in one pass over any number of rows; a [`List`] is all of them, or those that an index
//! names, as one linear space of bytes. A transfer counts its bytes there: chunks are cut by bytes, not by rows, and
//! "where is byte x?" is the one question that a list answers ([`List::cursor`]).
#![allow(unsafe_code)] // copies from and to the rows' memory

use std::hash::{BuildHasher, DefaultHasher, Hash, Hasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Most rows of a list: an index names them by 32 bits.
const ROWS_MAX: u64 = 1 << 32;
/// Maximum repeats of an index of rows of unequal length: each takes memory that no word of the index pays for.
const REPEATS_MAX: u64 = 4096;

/// Secrets of [`Rows::shape`], which peers must not know; 0: not drawn yet.
static SECRETS: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// A hash of runs that depends on a secret.
fn hashed(secret: &AtomicU64, runs: &[(u64, u64)]) -> u64 {
    let drawn = RandomState::new().build_hasher().finish() | 1;
    let _ = secret.compare_exchange(0, drawn, Ordering::Relaxed, Ordering::Relaxed);
    let mut hasher = DefaultHasher::new();
    (secret.load(Ordering::Relaxed), runs).hash(&mut hasher);
    hasher.finish()
}

/// `count` rows of `len` bytes, the first at `at` and each `stride` (modulo 2^64) behind the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stride {
    /// Address of the first row, or its offset in whatever the rows are relative to.
    pub at: u64,
    /// Bytes of a row.
    pub len: u64,
    /// From one row to the next.
    pub stride: u64,
    /// Rows.
    pub count: u64,
}

impl Stride {
    /// Where row `k` begins.
    #[inline]
    pub fn row(&self, k: u64) -> u64 {
        self.at.wrapping_add(k.wrapping_mul(self.stride))
    }

    /// The first byte of all rows and the one behind the last, if no row wraps around.
    pub fn extent(&self) -> Option<(u64, u64)> {
        let reach = i128::from(self.stride.cast_signed()) * i128::from(self.count.checked_sub(1)?);
        let (first, last) = (i128::from(self.at), i128::from(self.at) + reach);
        let (low, high) = (first.min(last), first.max(last) + i128::from(self.len));
        Some((u64::try_from(low).ok()?, u64::try_from(high).ok()?))
    }
}

/// Rows in their order.
#[derive(Clone, Debug)]
pub struct Rows {
    strides: Vec<Stride>,
    /// Of each stride: the number of its first row, and where that begins in the linear space.
    firsts: Vec<(u64, u64)>,
    rows: u64,
    bytes: u64,
    /// The length of every row, if they are equally long.
    even: Option<u64>,
    /// The rows of every stride, if they are equally many.
    per_stride: Option<u64>,
    /// Runs of equally long rows, as length and count; empty if all rows are equally long.
    runs: Vec<(u64, u64)>,
    /// A keyed hash of `runs`, made when first needed.
    shape: OnceLock<[u64; 2]>,
}

impl Rows {
    /// The rows of `strides`, which may be of no bytes. `None`: no rows, more than 2^32, or more bytes than 2^63.
    pub fn new(strides: Vec<Stride>) -> Option<Rows> {
        let (mut rows, mut bytes) = (0u64, 0u64);
        let mut firsts = Vec::with_capacity(strides.len());
        let first = strides.first()?;
        let (mut even, mut per_stride) = (Some(first.len), Some(first.count));
        for stride in &strides {
            firsts.push((rows, bytes));
            rows = rows.checked_add(stride.count)?;
            bytes = stride.len.checked_mul(stride.count).and_then(|more| bytes.checked_add(more))?;
            if stride.count == 0 || bytes > 1 << 63 || rows > ROWS_MAX {
                return None;
            }
            even = even.filter(|len| *len == stride.len);
            per_stride = per_stride.filter(|count| *count == stride.count);
        }
        let mut runs: Vec<(u64, u64)> = Vec::new();
        if even.is_none() {
            runs.extend(merged(strides.iter().map(|stride| (stride.len, stride.count))));
            runs.shrink_to_fit();
        }
        Some(Rows { strides, firsts, rows, bytes, even, per_stride, runs, shape: OnceLock::new() })
    }

    /// True if there are rows of no bytes.
    pub fn has_empty(&self) -> bool {
        self.strides.iter().any(|stride| stride.len == 0)
    }

    /// Hash of the lengths of all rows, in their order.
    fn shape(&self) -> [u64; 2] {
        *self.shape.get_or_init(|| SECRETS.each_ref().map(|secret| hashed(secret, &self.runs)))
    }

    /// The strides.
    pub fn strides(&self) -> &[Stride] {
        &self.strides
    }

    /// How many rows.
    pub fn count(&self) -> u64 {
        self.rows
    }

    /// Bytes of all rows.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The length of every row, if they are equally long.
    pub fn even(&self) -> Option<u64> {
        self.even
    }

    /// The length of that row, which exists.
    pub fn len_of(&self, row: u64) -> u64 {
        match self.even {
            Some(len) => len,
            None => self.strides[self.stride_of(row)].len,
        }
    }

    /// The number of the stride that has that row.
    #[inline]
    pub fn stride_of(&self, row: u64) -> usize {
        match self.per_stride {
            // The hardware divides short numbers several times as fast.
            Some(count) => match (u32::try_from(row), u32::try_from(count)) {
                (Ok(row), Ok(count)) => (row / count) as usize,
                _ => (row / count) as usize,
            },
            None => self.firsts.partition_point(|(first, _)| *first <= row) - 1,
        }
    }

    /// Where that row begins in the linear space of all rows.
    fn position(&self, row: u64) -> u64 {
        match (self.even, row == self.rows) {
            (_, true) => self.bytes,
            (Some(len), _) => row * len,
            (None, false) => {
                let at = self.stride_of(row);
                let (first, start) = self.firsts[at];
                start + (row - first) * self.strides[at].len
            }
        }
    }

    /// The row with that byte of the linear space, and the byte's place in it.
    fn find(&self, position: u64) -> (u64, u64) {
        if let Some(len) = self.even {
            return (position / len, position % len);
        }
        let at = self.firsts.partition_point(|(_, start)| *start <= position).saturating_sub(1);
        let ((first, start), len) = (self.firsts[at], self.strides[at].len);
        (first + (position - start) / len, (position - start) % len)
    }
}

/// Which of the rows, in which order.
#[derive(Clone, Debug)]
pub enum Index {
    /// All of them.
    All,
    /// These.
    Some(Arc<[u32]>),
    /// These, `repeats` times, each time `step` further.
    Repeated {
        /// The first time.
        block: Arc<[u32]>,
        /// From one time to the next.
        step: u64,
        /// How many times.
        repeats: u64,
    },
}

impl Index {
    /// How many rows it names of `rows`; 2^64 - 1 where they are more than that.
    pub fn count(&self, rows: u64) -> u64 {
        match self {
            Index::All => rows,
            Index::Some(index) => index.len() as u64,
            Index::Repeated { block, repeats, .. } => (block.len() as u64).saturating_mul(*repeats),
        }
    }

    /// The row that it names in place `at`, which exists.
    pub fn get(&self, at: u64) -> u64 {
        match self {
            Index::All => at,
            Index::Some(index) => u64::from(index[at as usize]),
            Index::Repeated { block, step, .. } => {
                let len = block.len() as u64;
                u64::from(block[(at % len) as usize]) + at / len * step
            }
        }
    }

    /// The largest row that it names; `None`: none, or beyond 2^64.
    fn last(&self, rows: u64) -> Option<u64> {
        match self {
            Index::All => rows.checked_sub(1),
            Index::Some(index) => index.iter().max().map(|row| u64::from(*row)),
            Index::Repeated { block, step, repeats } => {
                let last = u64::from(*block.iter().max()?);
                repeats.checked_sub(1)?.checked_mul(*step)?.checked_add(last)
            }
        }
    }

    /// `index` in the fewest words: serving engines use one table of blocks for all layers, so that the same numbers
    /// come again, a constant further on. Every time lies in one stride of `rows`, by which they are recognised in one
    /// pass.
    pub fn compress(index: &[u32], rows: &Rows) -> Index {
        let all = || Index::Some(index.into());
        let Some(per) = rows.per_stride.filter(|_| rows.strides.len() > 1) else { return all() };
        let Some(first) = index.first() else { return all() };
        let low = u64::from(*first) / per * per;
        let inside = |row: &u32| u64::from(*row) >= low && u64::from(*row) - low < per;
        // A table rarely is longer than its part of the list, so that this ends soon.
        let block = index.iter().position(|row| !inside(row)).unwrap_or(index.len());
        if block == index.len() || !index.len().is_multiple_of(block) {
            return all();
        }
        let Some(step) = index[block].checked_sub(*first) else { return all() };
        let again = index.iter().zip(&index[block..]).all(|(one, next)| next.wrapping_sub(*one) == step);
        if !again {
            return all();
        }
        let repeats = (index.len() / block) as u64;
        if rows.even.is_none() && (repeats > REPEATS_MAX || !u64::from(step).is_multiple_of(per)) {
            return all();
        }
        Index::Repeated { block: index[..block].into(), step: u64::from(step), repeats }
    }
}

/// Runs of lengths; adjacent runs of the same length are joined.
fn merged(mut runs: impl Iterator<Item = (u64, u64)>) -> impl Iterator<Item = (u64, u64)> {
    let mut open = runs.next();
    std::iter::from_fn(move || {
        let (len, mut count) = open.take()?;
        for (other, more) in runs.by_ref() {
            if other != len {
                open = Some((other, more));
                break;
            }
            count += more;
        }
        Some((len, count))
    })
}

/// Start of each item of these lengths, followed by the end of the last; and that end. `None`: a length is missing, or
/// there are more than 2^63 bytes.
fn starts(lens: impl Iterator<Item = Option<u64>>) -> Option<(Vec<u64>, u64)> {
    let mut end = 0u64;
    let mut all = Vec::with_capacity(lens.size_hint().0 + 1);
    all.push(end);
    for len in lens {
        end = end.checked_add(len?).filter(|bytes| *bytes <= 1 << 63)?;
        all.push(end);
    }
    Some((all, end))
}

/// Starts of the rows of a list in its linear space.
#[derive(Clone, Debug)]
enum Starts {
    /// At multiples of their common length, or as the rows that it chooses from do.
    Rows,
    /// These, followed by the end of the last row: for indexed rows of unequal length.
    Each(Vec<u64>),
    /// Starts of the repeats of an index, followed by the end; rows of one repeat are equally long.
    Times(Vec<u64>),
}

/// Rows, or those that an index names, as one linear space of bytes.
#[derive(Clone, Debug)]
pub struct List {
    rows: Arc<Rows>,
    index: Index,
    starts: Starts,
    count: u64,
    bytes: u64,
}

/// Runs of rows of equal lengths: length and count.
type Runs<'a> = &'a mut dyn Iterator<Item = (u64, u64)>;

impl List {
    /// The rows that `index` names. `None`: it names none, more than 2^32, one that does not exist, or more bytes than
    /// 2^63; or it repeats more than 4096 times over rows of unequal length, or a repeat spans two strides.
    ///
    /// Takes one pass over the words of `index`, and no other loop: its numbers may be a peer's.
    pub fn new(rows: Arc<Rows>, index: Index) -> Option<List> {
        let count = index.count(rows.count());
        if index.last(rows.count())? >= rows.count() || count == 0 || count > ROWS_MAX {
            return None;
        }
        let (starts, bytes) = match (&index, rows.even()) {
            (Index::All, _) => (Starts::Rows, rows.bytes()),
            (_, Some(len)) => (Starts::Rows, len.checked_mul(count).filter(|bytes| *bytes <= 1 << 63)?),
            (Index::Some(index), None) => {
                let (starts, bytes) = starts(index.iter().map(|row| Some(rows.len_of(u64::from(*row)))))?;
                (Starts::Each(starts), bytes)
            }
            (Index::Repeated { block, step, repeats }, None) => {
                let (low, high) = (u64::from(*block.iter().min()?), u64::from(*block.iter().max()?));
                let time = |at: u64| {
                    let stride = rows.stride_of(low + at * step);
                    let within = rows.stride_of(high + at * step) == stride;
                    rows.strides[stride].len.checked_mul(block.len() as u64).filter(|_| within)
                };
                let times = Some(*repeats).filter(|repeats| *repeats <= REPEATS_MAX)?;
                let (starts, bytes) = starts((0..times).map(time))?;
                (Starts::Times(starts), bytes)
            }
        };
        Some(List { rows, index, starts, count, bytes })
    }

    /// The rows it chooses from.
    pub fn rows(&self) -> &Arc<Rows> {
        &self.rows
    }

    /// Which of them.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// How many rows.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// How many bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Start of a repeat, and the length of its rows.
    fn time(&self, starts: &[u64], number: usize) -> (u64, u64) {
        (starts[number], (starts[number + 1] - starts[number]) / self.block())
    }

    /// Number of rows of each repeat.
    fn block(&self) -> u64 {
        self.count / self.times()
    }

    fn times(&self) -> u64 {
        match &self.index {
            Index::Repeated { repeats, .. } => *repeats,
            _ => 1,
        }
    }

    /// The length of the row in place `at`, which exists.
    pub fn len_of(&self, at: u64) -> u64 {
        match &self.starts {
            Starts::Each(starts) => starts[at as usize + 1] - starts[at as usize],
            Starts::Times(starts) => self.time(starts, (at / self.block()) as usize).1,
            Starts::Rows => self.rows.even().unwrap_or_else(|| self.rows.len_of(self.index.get(at))),
        }
    }

    /// Whether both have rows of the same lengths, in this order.
    ///
    /// Takes as many steps as the shorter index has words or repeats; lists of all rows are compared by a hash.
    pub fn fits(&self, other: &List) -> bool {
        if self.count != other.count || self.bytes != other.bytes {
            return false;
        }
        match (self.rows.even(), other.rows.even()) {
            (Some(one), Some(two)) => one == two,
            (None, None) if self.is_whole() && other.is_whole() => self.rows.shape() == other.rows.shape(),
            _ => self.with_runs(&mut |one| other.with_runs(&mut |two| one.eq(two))),
        }
    }

    fn is_whole(&self) -> bool {
        matches!(self.index, Index::All)
    }

    /// Hands on its rows as runs of equal lengths: length and count.
    fn with_runs(&self, take: &mut dyn FnMut(Runs<'_>) -> bool) -> bool {
        match (&self.starts, self.rows.even()) {
            (_, Some(len)) => take(&mut std::iter::once((len, self.count))),
            (Starts::Rows, None) => take(&mut self.rows.runs.iter().copied()),
            (Starts::Each(starts), None) => take(&mut merged(starts.windows(2).map(|of| (of[1] - of[0], 1)))),
            (Starts::Times(starts), None) => {
                let of = |number| (self.time(starts, number).1, self.block());
                take(&mut merged((0..starts.len() - 1).map(of)))
            }
        }
    }

    /// Where the row in place `at` begins; for the number of rows: the end.
    pub fn position(&self, at: u64) -> u64 {
        match (&self.starts, self.rows.even()) {
            _ if at == self.count => self.bytes,
            (Starts::Each(starts), _) => starts[at as usize],
            (Starts::Times(starts), _) => {
                let (start, len) = self.time(starts, (at / self.block()) as usize);
                start + at % self.block() * len
            }
            (Starts::Rows, Some(len)) => at * len,
            (Starts::Rows, None) => self.rows.position(at),
        }
    }

    /// The row with that byte, by its place, and the byte's place in it. The byte exists.
    fn find(&self, position: u64) -> (u64, u64) {
        let last = |starts: &[u64]| starts.partition_point(|start| *start <= position) - 1;
        match &self.starts {
            Starts::Each(starts) => {
                let at = last(starts);
                (at as u64, position - starts[at])
            }
            Starts::Times(starts) => {
                let number = last(starts);
                let (start, len) = self.time(starts, number);
                (number as u64 * self.block() + (position - start) / len, (position - start) % len)
            }
            Starts::Rows => self.rows.find(position),
        }
    }

    /// The place of the row that begins with that byte; the number of rows for the end. `None`: none does.
    pub fn place(&self, position: u64) -> Option<u64> {
        let (at, within) = match position {
            _ if position > self.bytes => return None,
            _ if position == self.bytes => (self.count, 0),
            _ => self.find(position),
        };
        (within == 0).then_some(at)
    }

    /// The pieces from byte `position` on, neighbours joined.
    pub fn cursor(&self, position: u64) -> Cursor<'_> {
        let (at, within) = if position >= self.bytes { (self.count, 0) } else { self.find(position) };
        let (place, add) = match &self.index {
            Index::Repeated { block, step, .. } => (at % block.len() as u64, at / block.len() as u64 * step),
            _ => (at, 0),
        };
        let mut cursor =
            Cursor { list: self, left: self.count - at, place: place as usize, add, stride: 0, next: None };
        cursor.next = cursor.row().map(|(at, len)| (at.wrapping_add(within), len - within));
        cursor
    }

    /// How many pieces are left of both when neighbours on both sides are joined. Takes one pass over the rows.
    pub fn runs(&self, other: &List) -> u64 {
        let (mut one, mut two) = (self.cursor(0), other.cursor(0));
        let (mut runs, mut left) = (0, self.bytes.min(other.bytes));
        let (mut a, mut b) = (0, 0);
        while left > 0 {
            if a == 0 {
                a = one.piece(u64::MAX).map_or(left, |(_, len)| len);
            }
            if b == 0 {
                b = two.piece(u64::MAX).map_or(left, |(_, len)| len);
            }
            let len = a.min(b);
            (a, b, left, runs) = (a - len, b - len, left - len.min(left), runs + 1);
        }
        runs
    }

    /// Copies `len` bytes of the list, from `position` on, to `to`; what is beyond its end is left out.
    ///
    /// # Safety
    /// The rows must be addresses that are readable, and `to` writable for `len` bytes; they do not overlap. Others may
    /// write to the rows meanwhile: then those bytes are garbage.
    pub unsafe fn copy_out(&self, position: u64, mut to: *mut u8, len: u64) {
        let (mut cursor, mut left) = (self.cursor(position), len);
        while let Some((at, len)) = cursor.piece(left) {
            // SAFETY: by the contract; `len` is at most what is left.
            unsafe { std::ptr::copy_nonoverlapping(at as usize as *const u8, to, len as usize) };
            to = to.wrapping_add(len as usize);
            left -= len;
        }
    }

    /// Copies `len` bytes from `from` to the list, from `position` on; what is beyond its end is left out.
    ///
    /// # Safety
    /// The rows must be addresses that are writable, and `from` readable for `len` bytes; they do not overlap.
    pub unsafe fn copy_in(&self, position: u64, mut from: *const u8, len: u64) {
        let (mut cursor, mut left) = (self.cursor(position), len);
        while let Some((at, len)) = cursor.piece(left) {
            // SAFETY: by the contract; `len` is at most what is left.
            unsafe { std::ptr::copy_nonoverlapping(from, at as usize as *mut u8, len as usize) };
            from = from.wrapping_add(len as usize);
            left -= len;
        }
    }
}

/// Goes through the pieces of a list.
#[derive(Clone, Debug)]
pub struct Cursor<'a> {
    list: &'a List,
    /// Rows that [`Cursor::row`] has not taken yet.
    left: u64,
    /// The place of the next in the index, or in its block, and what is added there.
    place: usize,
    add: u64,
    /// The stride of the last row: that of the next one, as a rule.
    stride: usize,
    /// What was taken and not handed out.
    next: Option<(u64, u64)>,
}

impl Cursor<'_> {
    /// The next piece, at most `most` bytes: where it begins, and its length. `None`: the end, or `most` is 0.
    #[inline]
    pub fn piece(&mut self, most: u64) -> Option<(u64, u64)> {
        if most == 0 {
            return None;
        }
        let (at, mut len) = self.next.take().or_else(|| self.row())?;
        while len < most {
            match self.row() {
                Some((next, more)) if next == at.wrapping_add(len) => len += more,
                other => {
                    self.next = other;
                    break;
                }
            }
        }
        if len > most {
            // Only what was taken last reaches beyond, and nothing was taken after it.
            self.next = Some((at.wrapping_add(most), len - most));
            len = most;
        }
        Some((at, len))
    }

    /// The next row that has bytes.
    #[inline]
    fn row(&mut self) -> Option<(u64, u64)> {
        loop {
            let row = self.any_row()?;
            if row.1 > 0 {
                return Some(row);
            }
            self.pass_empty();
        }
    }

    /// Passes the rows of no bytes that follow one just taken. Not one by one, because a peer's may be 2^32.
    #[cold]
    fn pass_empty(&mut self) {
        let passed = match &self.list.index {
            Index::All => {
                let end = self.list.rows.firsts[self.stride].0 + self.list.rows.strides[self.stride].count;
                let passed = end - self.place as u64;
                self.place += passed as usize;
                passed
            }
            Index::Some(_) => 0,
            // Rows of unequal length: those of each time are in one stride.
            Index::Repeated { .. } if self.place == 0 => 0,
            Index::Repeated { block, step, .. } => {
                let passed = block.len() - self.place;
                (self.place, self.add) = (0, self.add + step);
                passed as u64
            }
        };
        self.left = self.left.saturating_sub(passed);
    }

    /// The next row.
    #[inline]
    fn any_row(&mut self) -> Option<(u64, u64)> {
        self.left = self.left.checked_sub(1)?;
        let row = match &self.list.index {
            Index::All => self.place as u64,
            Index::Some(index) => u64::from(index[self.place]),
            Index::Repeated { block, step, .. } => {
                let row = u64::from(block[self.place]) + self.add;
                if self.place + 1 == block.len() {
                    (self.place, self.add) = (usize::MAX, self.add + step);
                }
                row
            }
        };
        self.place = self.place.wrapping_add(1);
        let rows = &*self.list.rows;
        let mut first = rows.firsts[self.stride].0;
        if row < first || row - first >= rows.strides[self.stride].count {
            self.stride = rows.stride_of(row);
            first = rows.firsts[self.stride].0;
        }
        let stride = &rows.strides[self.stride];
        Some((stride.row(row - first), stride.len))
    }
}

/// Copies `len` bytes between two lists, each from its own position on.
///
/// # Safety
/// The rows of both must be addresses, those of `from` readable and those of `to` writable, which do not overlap.
/// Others may write to them meanwhile: then those bytes are garbage.
pub unsafe fn copy_between((to, to_at): (&List, u64), (from, from_at): (&List, u64), len: u64) {
    let (mut to, mut from) = (to.cursor(to_at), from.cursor(from_at));
    let (mut dst, mut src, mut room, mut have) = (0u64, 0u64, 0, 0);
    let mut left = len;
    while left > 0 {
        if room == 0 {
            let Some(piece) = to.piece(left) else { return };
            (dst, room) = piece;
        }
        if have == 0 {
            let Some(piece) = from.piece(left) else { return };
            (src, have) = piece;
        }
        let len = room.min(have);
        // SAFETY: by the contract; `len` bytes are inside both pieces.
        unsafe { std::ptr::copy_nonoverlapping(src as usize as *const u8, dst as usize as *mut u8, len as usize) };
        (dst, src) = (dst.wrapping_add(len), src.wrapping_add(len));
        (room, have, left) = (room - len, have - len, left - len);
    }
}

#[cfg(test)]
mod tests;
