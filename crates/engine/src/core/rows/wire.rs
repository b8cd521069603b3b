//! Wire format of descriptions of lists, and of notices.
//!
//! Descriptions travel in *mails*: puts, for which the receiver allocates memory. A mail is carried like any write, in
//! the order of the message stream, in one frame or in chunks, and no receive can match it. A key of 24 bytes that
//! starts with [`LISTS`], as no region's key does, identifies the kind of write; for a put in one frame, bytes 4..12
//! alone, its name:
//!
//! | bytes | mail | write or read of a view | short rows with a notice |
//! |---|---|---|---|
//! | 0..4 | [`LISTS`] | [`LISTS`] | [`LISTS`] |
//! | 4 | [`Sort`] | [`VIEW_ACCESS`] | [`PUT`] |
//! | 5..8 | 0 | 1: the immediate is the caller's | bytes of the notice |
//! | 8..12 | id | id of the view | the same |
//! | 12..16 | 0 | the notice behind it, or [`NOTHING`] | 0 |
//!
//! Rows with a notice are [`PUT_AHEAD`] bytes (where in the view, the caller's immediate, whether there is one), the
//! notice, and the rows.
//!
//! The writer assigns ids, so they can be used without waiting for a reply.

use std::sync::Arc;

use crossrail_proto as proto;
use crossrail_transport::{Descriptor, Index, Stride};

use crate::memory::RegionStride;

/// First word of a key that names no region.
pub(crate) const LISTS: u32 = u32::MAX;
/// No id.
pub(crate) const NOTHING: u32 = u32::MAX;
const VIEW_ACCESS: u8 = 255;
const PUT: u8 = 254;

/// Longest mail: rows of a million strides, with room to spare.
pub(crate) const MAIL_MAX: u64 = 64 << 20;
/// Bytes of mails that one peer may have on their way here.
pub(crate) const MAILS_MAX: u64 = 128 << 20;
/// Bytes that one peer's lists may take here.
pub(crate) const LISTS_MAX: u64 = 256 << 20;
/// Lists and views of one peer.
pub(crate) const ENTRIES_MAX: usize = 64 << 10;
/// Bytes of one peer's notices that nobody has taken, each counted with [`NOTICE_EXTRA`] more.
pub(crate) const NOTICES_MAX: u64 = 16 << 20;
/// Longest notice, in bytes.
pub(crate) const NOTICE_MAX: usize = 4 << 20;
/// What a notice costs beside its bytes.
pub(crate) const NOTICE_EXTRA: u64 = 64;

/// Bytes of the lists of all peers.
pub(crate) const ALL_LISTS_MAX: u64 = 8 * LISTS_MAX;
/// Bytes of the mails of all peers in flight to this end.
pub(crate) const ALL_MAILS_MAX: u64 = 8 * MAILS_MAX;
/// The notices of how many peers a worker holds at most, those that have ended included: as bytes, [`NOTICES_MAX`] each.
pub(crate) const NOTICES_PEERS: u64 = 16;

const KEY_LEN: usize = 24;
/// Bytes ahead of rows with a notice.
pub(crate) const PUT_AHEAD: usize = 16;
const STRIDE_LEN: usize = 36;
const THEIRS_LEN: usize = 32;

/// What a mail brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sort {
    /// Rows of the reader's regions.
    Rows = 1,
    /// Rows of the writer's memory, for single copies.
    Theirs = 2,
    /// Which of both are paired: a view.
    View = 3,
    /// A notice.
    Notice = 4,
    /// A notice that waits for the write which names it.
    Behind = 5,
    /// How much of the reader's notices was taken.
    Credit = 6,
    /// What is not needed any more.
    Drop = 7,
}

/// What a key of this module names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Named {
    /// A mail.
    Mail {
        /// What it brings.
        sort: Sort,
        /// Of what.
        id: u32,
    },
    /// Access to a view.
    View {
        /// Which.
        id: u32,
        /// The notice that is raised once all bytes are there.
        behind: Option<u32>,
        /// The immediate is the caller's.
        counts: bool,
    },
    /// A notice and bytes for a view, which come together: the reader makes memory for both.
    Put {
        /// The view.
        id: u32,
        /// Bytes of the notice, below 2^24.
        notice: u32,
    },
}

impl Sort {
    fn of(byte: u8) -> Option<Sort> {
        let all = [Sort::Rows, Sort::Theirs, Sort::View, Sort::Notice, Sort::Behind, Sort::Credit, Sort::Drop];
        all.into_iter().find(|sort| *sort as u8 == byte)
    }
}

impl Named {
    /// The key.
    pub(crate) fn key(self) -> proto::RegionKey {
        let (sort, flag, id, behind) = match self {
            Named::Mail { sort, id } => (sort as u8, 0, id, 0),
            Named::View { id, behind, counts } => (VIEW_ACCESS, u32::from(counts), id, behind.unwrap_or(NOTHING)),
            Named::Put { id, notice } => (PUT, notice, id, 0),
        };
        let mut key = [0; KEY_LEN];
        key[..4].copy_from_slice(&LISTS.to_le_bytes());
        key[4..8].copy_from_slice(&(flag << 8 | u32::from(sort)).to_le_bytes());
        key[8..12].copy_from_slice(&id.to_le_bytes());
        key[12..16].copy_from_slice(&behind.to_le_bytes());
        key
    }

    /// The operation that brings its bytes to the reader, who makes memory for them.
    pub(crate) fn put(self) -> proto::Operation {
        let key = self.key();
        let name = u64::from_le_bytes([key[4], key[5], key[6], key[7], key[8], key[9], key[10], key[11]]);
        proto::Operation::Put { name, key }
    }

    /// What a name names, for which the reader makes memory; `None`: nothing of that kind.
    pub(crate) fn of_name(name: u64) -> Option<Named> {
        let mut key = [0; KEY_LEN];
        key[..4].copy_from_slice(&LISTS.to_le_bytes());
        key[4..12].copy_from_slice(&name.to_le_bytes());
        Named::of(&key).filter(|named| !matches!(named, Named::View { .. }))
    }

    /// What `key` names; `None`: nothing of this module.
    pub(crate) fn of(key: &proto::RegionKey) -> Option<Named> {
        let word = |at: usize| u32::from_le_bytes([key[at], key[at + 1], key[at + 2], key[at + 3]]);
        if word(0) != LISTS {
            return None;
        }
        let id = word(8);
        if key[4] == VIEW_ACCESS {
            let behind = Some(word(12)).filter(|behind| *behind != NOTHING);
            return Some(Named::View { id, behind, counts: key[5] != 0 });
        }
        if key[4] == PUT {
            return Some(Named::Put { id, notice: word(4) >> 8 });
        }
        Sort::of(key[4]).map(|sort| Named::Mail { sort, id })
    }
}

/// Memory of the writer, as the reader can reach it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reachable {
    /// For the lane's [`Domain`](crossrail_transport::Domain).
    pub(crate) descriptor: Descriptor,
    /// Bytes.
    pub(crate) len: u64,
}

/// Rows of the writer's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TheirRows {
    pub(crate) memory: Vec<Reachable>,
    pub(crate) strides: Vec<RegionStride>,
}

/// A pair of lists.
#[derive(Clone, Debug)]
pub(crate) struct ViewOf {
    pub(crate) rows: u32,
    pub(crate) index: Index,
    /// The writer's side, where it can be copied from or to.
    pub(crate) theirs: Option<(u32, Index)>,
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*first)
    }

    fn word(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn long(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// So many items of `each` bytes, all of which are there.
    fn count(&mut self, each: usize) -> Option<usize> {
        let count = usize::try_from(self.long()?).ok()?;
        count.checked_mul(each).filter(|len| *len <= self.0.len()).map(|_| count)
    }

    fn strides(&mut self, regions: usize) -> Option<Vec<RegionStride>> {
        let count = self.count(STRIDE_LEN)?;
        let mut strides = Vec::with_capacity(count);
        for _ in 0..count {
            let region = self.word().filter(|region| (*region as usize) < regions)?;
            let [at, len, stride, count] = [self.long()?, self.long()?, self.long()?, self.long()?];
            strides.push(RegionStride { region, stride: Stride { at, len, stride, count } });
        }
        Some(strides)
    }

    fn index(&mut self) -> Option<Index> {
        let [kind] = self.array::<1>()?;
        if kind == 0 {
            return Some(Index::All);
        }
        let (step, repeats) = (self.long()?, self.long()?);
        let count = self.count(4)?;
        let (words, rest) = self.0.split_at(count * 4);
        self.0 = rest;
        let block: Arc<[u32]> = words.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        match kind {
            1 => Some(Index::Some(block)),
            2 if step > 0 => Some(Index::Repeated { block, step, repeats }),
            _ => None,
        }
    }

    fn end<T>(&self, value: T) -> Option<T> {
        self.0.is_empty().then_some(value)
    }
}

fn put_strides(out: &mut Vec<u8>, strides: &[RegionStride]) {
    out.extend((strides.len() as u64).to_le_bytes());
    for RegionStride { region, stride: Stride { at, len, stride, count } } in strides {
        out.extend(region.to_le_bytes());
        [at, len, stride, count].into_iter().for_each(|long| out.extend(long.to_le_bytes()));
    }
}

fn put_index(out: &mut Vec<u8>, index: &Index) {
    let (kind, block, step, repeats) = match index {
        Index::All => return out.push(0),
        Index::Some(index) => (1, index, 1, 1),
        Index::Repeated { block, step, repeats } => (2, block, *step, *repeats),
    };
    out.push(kind);
    [step, repeats, block.len() as u64].into_iter().for_each(|long| out.extend(long.to_le_bytes()));
    // Into bytes that are there already, which compiles to one copy: an index has up to millions of rows.
    let at = out.len();
    out.resize(at + block.len() * 4, 0);
    out[at..].chunks_exact_mut(4).zip(block.iter()).for_each(|(to, row)| to.copy_from_slice(&row.to_le_bytes()));
}

/// [`Sort::Rows`]: regions' keys, and rows in them.
pub(crate) fn put_rows(keys: &[proto::RegionKey], strides: &[RegionStride]) -> Vec<u8> {
    let mut out = Vec::with_capacity(16 + keys.len() * KEY_LEN + strides.len() * STRIDE_LEN);
    out.extend((keys.len() as u64).to_le_bytes());
    keys.iter().for_each(|key| out.extend(key));
    put_strides(&mut out, strides);
    out
}

/// Reads it; `None`: it is not one.
pub(crate) fn read_rows(bytes: &[u8]) -> Option<(Vec<proto::RegionKey>, Vec<RegionStride>)> {
    let mut reader = Reader(bytes);
    let count = reader.count(KEY_LEN)?;
    let keys = (0..count).map(|_| reader.array()).collect::<Option<Vec<_>>>()?;
    let strides = reader.strides(keys.len())?;
    reader.end((keys, strides))
}

/// [`Sort::Theirs`].
pub(crate) fn put_theirs(rows: &TheirRows) -> Vec<u8> {
    let mut out = (rows.memory.len() as u64).to_le_bytes().to_vec();
    for Reachable { descriptor, len } in &rows.memory {
        out.extend(descriptor);
        out.extend(len.to_le_bytes());
    }
    put_strides(&mut out, &rows.strides);
    out
}

/// Reads it; `None`: it is not one, or rows are outside their memory.
pub(crate) fn read_theirs(bytes: &[u8]) -> Option<TheirRows> {
    let mut reader = Reader(bytes);
    let count = reader.count(THEIRS_LEN)?;
    let mut memory = Vec::with_capacity(count);
    for _ in 0..count {
        memory.push(Reachable { descriptor: reader.array()?, len: reader.long()? });
    }
    let strides = reader.strides(memory.len())?;
    let inside = |s: &RegionStride| is_inside(&s.stride, memory[s.region as usize].len);
    if !strides.iter().all(inside) {
        return None;
    }
    reader.end(TheirRows { memory, strides })
}

/// [`Sort::View`].
pub(crate) fn put_view(view: &ViewOf) -> Vec<u8> {
    let rows = |index: &Index| match index {
        Index::All => 0,
        Index::Some(block) | Index::Repeated { block, .. } => block.len(),
    };
    let both = rows(&view.index) + view.theirs.as_ref().map_or(0, |(_, index)| rows(index));
    let mut out = Vec::with_capacity(64 + both * 4);
    out.extend(view.rows.to_le_bytes());
    out.extend(view.theirs.as_ref().map_or(NOTHING, |(id, _)| *id).to_le_bytes());
    put_index(&mut out, &view.index);
    if let Some((_, index)) = &view.theirs {
        put_index(&mut out, index);
    }
    out
}

/// Reads it; `None`: it is not one.
pub(crate) fn read_view(bytes: &[u8]) -> Option<ViewOf> {
    let mut reader = Reader(bytes);
    let (rows, theirs) = (reader.word()?, reader.word()?);
    let index = reader.index()?;
    let theirs = if theirs == NOTHING { None } else { Some((theirs, reader.index()?)) };
    reader.end(ViewOf { rows, index, theirs })
}

/// What a put begins with: where in the view the rows go, and the caller's immediate.
pub(crate) fn put_ahead(from: u64, imm: Option<u32>) -> [u8; PUT_AHEAD] {
    let mut ahead = [0; PUT_AHEAD];
    ahead[..8].copy_from_slice(&from.to_le_bytes());
    ahead[8..12].copy_from_slice(&imm.unwrap_or(0).to_le_bytes());
    ahead[12] = u8::from(imm.is_some());
    ahead
}

/// Reads it, and the rest; `None`: it is not there.
pub(crate) fn read_ahead(bytes: &[u8]) -> Option<(u64, Option<u32>, &[u8])> {
    let mut reader = Reader(bytes);
    let (from, imm, [counts, ..]) = (reader.long()?, reader.word()?, reader.array::<4>()?);
    Some((from, (counts != 0).then_some(imm), reader.0))
}

/// [`Sort::Drop`]: what the writer does not need any more.
pub(crate) fn put_drop(dropped: &[(Sort, u32)]) -> Vec<u8> {
    dropped.iter().flat_map(|(sort, id)| [&[*sort as u8][..], &id.to_le_bytes()].concat()).collect()
}

/// Reads it; `None`: it is not one.
pub(crate) fn read_drop(bytes: &[u8]) -> Option<Vec<(Sort, u32)>> {
    let entries = bytes.chunks(5).map(|entry| match *entry {
        [sort, a, b, c, d] => Some((Sort::of(sort)?, u32::from_le_bytes([a, b, c, d]))),
        _ => None,
    });
    entries.collect()
}

/// Whether all rows of a stride are inside a memory of `len` bytes.
pub(crate) fn is_inside(stride: &Stride, len: u64) -> bool {
    stride.extent().is_some_and(|(_, end)| end <= len)
}

impl TheirRows {
    /// The length of every row, if they are equally long.
    pub(crate) fn even(&self) -> Option<u64> {
        let first = self.strides.first()?.stride.len;
        self.strides.iter().all(|of| of.stride.len == first).then_some(first)
    }
}

/// Bytes that the rows of a mail take in memory.
pub(crate) fn rows_weight(mail: &[u8]) -> u64 {
    2 * mail.len() as u64 + 256
}

/// Bytes that a list of rows takes in memory, beside the rows. `even`: they are equally long.
pub(crate) fn weight(even: Option<u64>, index: &Index) -> u64 {
    let words = match index {
        Index::All => 0,
        Index::Some(block) | Index::Repeated { block, .. } => block.len() as u64 * 4,
    };
    let starts = match (index, even) {
        (Index::All, _) | (_, Some(_)) => 0,
        (Index::Some(index), None) => index.len() as u64 * 8,
        (Index::Repeated { repeats, .. }, None) => repeats.saturating_mul(8),
    };
    words.saturating_add(starts).saturating_add(256)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_as_they_are_written_and_name_no_region() {
        for named in [
            Named::Mail { sort: Sort::View, id: 7 },
            Named::View { id: 3, behind: None, counts: true },
            Named::View { id: 0, behind: Some(9), counts: false },
            Named::Put { id: 5, notice: 1 << 20 | 7 },
        ] {
            assert_eq!(Named::of(&named.key()), Some(named));
            let proto::Operation::Put { name, key } = named.put() else { panic!("a put") };
            // Access to a view needs no memory.
            let made = !matches!(named, Named::View { .. });
            assert_eq!((Named::of_name(name), key), (made.then_some(named), named.key()));
        }
        assert_eq!(Named::of_name(0), None);
        for imm in [None, Some(0), Some(u32::MAX)] {
            let bytes = [&put_ahead(1 << 40 | 3, imm)[..], b"rest"].concat();
            assert_eq!(read_ahead(&bytes), Some((1 << 40 | 3, imm, &b"rest"[..])));
            assert!((0..PUT_AHEAD).all(|len| read_ahead(&bytes[..len]).is_none()));
        }
        assert_eq!(Named::of(&[0; KEY_LEN]), None);
        let mut key = Named::Mail { sort: Sort::Drop, id: 7 }.key();
        key[4] = 99;
        assert_eq!(Named::of(&key), None);
    }

    #[test]
    fn mails_are_read_as_they_are_written_and_cut_ones_are_none() {
        let stride = |region| RegionStride { region, stride: Stride { at: 8, len: 4, stride: 16, count: 3 } };
        let keys = [[1; KEY_LEN], [2; KEY_LEN]];
        let rows = put_rows(&keys, &[stride(1), stride(0)]);
        assert_eq!(read_rows(&rows), Some((keys.to_vec(), vec![stride(1), stride(0)])));
        assert!((0..rows.len()).all(|len| read_rows(&rows[..len]).is_none()));
        assert_eq!(read_rows(&put_rows(&keys, &[stride(2)])), None, "a region that is not there");

        let memory = vec![Reachable { descriptor: [5; 24], len: 44 }];
        let theirs = TheirRows { memory, strides: vec![stride(0)] };
        assert_eq!(read_theirs(&put_theirs(&theirs)), Some(theirs.clone()));
        let shorter = vec![Reachable { len: 43, ..theirs.memory[0] }];
        assert_eq!(read_theirs(&put_theirs(&TheirRows { memory: shorter, ..theirs })), None);

        let index = Index::Some([3, 1, 2].into());
        let repeated = Index::Repeated { block: [1, 0].into(), step: 10, repeats: 4 };
        let view = ViewOf { rows: 1, index: index.clone(), theirs: Some((2, repeated)) };
        let bytes = put_view(&view);
        let read = read_view(&bytes).expect("a view");
        assert_eq!(format!("{read:?}"), format!("{view:?}"));
        assert!((0..bytes.len()).all(|len| read_view(&bytes[..len]).is_none()));
        let endless = Index::Repeated { block: [1, 0].into(), step: 0, repeats: 4 };
        assert!(read_view(&put_view(&ViewOf { rows: 1, index: endless, theirs: None })).is_none());

        let dropped = vec![(Sort::View, 3), (Sort::Behind, 4)];
        assert_eq!(read_drop(&put_drop(&dropped)), Some(dropped));
        assert_eq!(read_drop(&[1, 0, 0]), None);
    }
}
