//! Memory as rows: what an operation moves when it is not one piece.
//!
//! [`Rows`] are strides, found in one pass over any number of rows; a [`List`] is all of them, or those that an index
//! names, as one linear space of bytes. A transfer counts its bytes there: chunks are cut by bytes, not by rows, and
//! "where is byte x?" is the one question that a list answers ([`List::cursor`]).
#![allow(unsafe_code)] // copies from and to the rows' memory

use std::sync::Arc;

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
}

impl Rows {
    /// The rows of `strides`. `None`: no rows, a row of no bytes, or more bytes than 2^63.
    pub fn new(strides: Vec<Stride>) -> Option<Rows> {
        let (mut rows, mut bytes) = (0u64, 0u64);
        let mut firsts = Vec::with_capacity(strides.len());
        let first = strides.first()?;
        let (mut even, mut per_stride) = (Some(first.len), Some(first.count));
        for stride in &strides {
            firsts.push((rows, bytes));
            rows = rows.checked_add(stride.count)?;
            bytes = stride.len.checked_mul(stride.count).and_then(|more| bytes.checked_add(more))?;
            if stride.len == 0 || stride.count == 0 || bytes > 1 << 63 {
                return None;
            }
            even = even.filter(|len| *len == stride.len);
            per_stride = per_stride.filter(|count| *count == stride.count);
        }
        Some(Rows { strides, firsts, rows, bytes, even, per_stride })
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
        Index::Repeated { block: index[..block].into(), step: u64::from(step), repeats }
    }
}

/// Rows, or those that an index names, as one linear space of bytes.
#[derive(Clone, Debug)]
pub struct List {
    rows: Arc<Rows>,
    index: Index,
    /// Where each row begins, behind the last its end: for rows of unequal length that an index names.
    starts: Option<Vec<u64>>,
    count: u64,
    bytes: u64,
}

impl List {
    /// The rows that `index` names. `None`: it names none, one that does not exist, or more bytes than 2^63.
    pub fn new(rows: Arc<Rows>, index: Index) -> Option<List> {
        let count = index.count(rows.count());
        if index.last(rows.count())? >= rows.count() || count == 0 {
            return None;
        }
        let (starts, bytes) = match (&index, rows.even()) {
            (Index::All, _) => (None, rows.bytes()),
            (_, Some(len)) => (None, len.checked_mul(count).filter(|bytes| *bytes <= 1 << 63)?),
            (_, None) => {
                let mut starts = Vec::with_capacity(usize::try_from(count).ok()?.checked_add(1)?);
                let mut bytes = 0u64;
                for at in 0..count {
                    starts.push(bytes);
                    bytes = bytes.checked_add(rows.len_of(index.get(at))).filter(|bytes| *bytes <= 1 << 63)?;
                }
                starts.push(bytes);
                (Some(starts), bytes)
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

    /// The length of the row in place `at`, which exists.
    pub fn len_of(&self, at: u64) -> u64 {
        match &self.starts {
            Some(starts) => starts[at as usize + 1] - starts[at as usize],
            None => self.rows.even().unwrap_or_else(|| self.rows.len_of(self.index.get(at))),
        }
    }

    /// Whether both have rows of the same lengths, in this order.
    pub fn fits(&self, other: &List) -> bool {
        if self.count != other.count || self.bytes != other.bytes {
            return false;
        }
        match (self.rows.even(), other.rows.even()) {
            (Some(one), Some(two)) => one == two,
            _ => (0..self.count).all(|at| self.len_of(at) == other.len_of(at)),
        }
    }

    /// Where the row in place `at` begins; for the number of rows: the end.
    pub fn position(&self, at: u64) -> u64 {
        match (&self.starts, self.rows.even()) {
            (Some(starts), _) => starts[at as usize],
            (None, Some(len)) => at * len,
            (None, None) => self.rows.position(at),
        }
    }

    /// The place of the row that begins with that byte; the number of rows for the end. `None`: none does.
    pub fn place(&self, position: u64) -> Option<u64> {
        let (at, within) = match &self.starts {
            _ if position == self.bytes => (self.count, 0),
            _ if position > self.bytes => return None,
            Some(starts) => {
                let at = starts.partition_point(|start| *start <= position) - 1;
                (at as u64, position - starts[at])
            }
            None => self.rows.find(position),
        };
        (within == 0).then_some(at)
    }

    /// The pieces from byte `position` on, neighbours joined.
    pub fn cursor(&self, position: u64) -> Cursor<'_> {
        let (at, within) = match &self.starts {
            _ if position >= self.bytes => (self.count, 0),
            Some(starts) => {
                let at = starts.partition_point(|start| *start <= position) - 1;
                (at as u64, position - starts[at])
            }
            None => self.rows.find(position),
        };
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

    /// The next row.
    #[inline]
    fn row(&mut self) -> Option<(u64, u64)> {
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
