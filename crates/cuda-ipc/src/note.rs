//! The messages of two links: descriptors, and notes that announce allocations. All of it is untrusted input: decoding
//! checks every field before it is used.

use crossrail_transport::Descriptor;

/// The first byte of descriptors and notes about GPU memory; descriptors of shared memory start with others.
pub(crate) const KIND: u8 = 16;

/// Maximum length of a note in bytes, and maximum number of its file descriptors: limits of the lane.
pub(crate) const MAX_NOTE_LEN: usize = 512;
/// See [`MAX_NOTE_LEN`].
pub(crate) const MAX_FILES: usize = 16;

const HEADER: usize = 16;
const BY_FILE: u8 = 1;
const BY_HANDLE: u8 = 2;
const WITHDRAWN: u8 = 3;
const RESEND: u8 = 4;

/// The driver's IPC handle for memory of `cudaMalloc`.
pub(crate) type LegacyHandle = [u8; 64];
/// A MAC by which a process recognises its own pieces: see `driver::seal`.
pub(crate) type Seal = [u8; 16];
/// The globally unique id of a GPU.
pub(crate) type Uuid = [u8; 16];

/// The start of a transfer's bytes in the owner's memory: the decoded descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RemoteRange {
    /// The piece that contains the first byte.
    pub(crate) piece: u32,
    /// The owner's address of the first byte.
    pub(crate) address: u64,
    /// The number of the last note entry that must have been read before this is meaningful.
    pub(crate) after: u64,
}

impl RemoteRange {
    pub(crate) fn encode(&self) -> Descriptor {
        let mut bytes = [0; 24];
        bytes[0] = KIND;
        bytes[4..8].copy_from_slice(&self.piece.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.address.to_le_bytes());
        bytes[16..].copy_from_slice(&self.after.to_le_bytes());
        bytes
    }

    /// Whether [`RemoteRange::decode`] accepts it. Kept cheap: runs on each descriptor of host memory.
    pub(crate) fn is_kind_of(bytes: &Descriptor) -> bool {
        bytes[..4] == [KIND, 0, 0, 0]
    }

    pub(crate) fn decode(bytes: &Descriptor) -> Result<RemoteRange, String> {
        if !Self::is_kind_of(bytes) {
            return Err(format!("a descriptor of kind {} is not one of GPU memory", bytes[0]));
        }
        let mut reader = Reader(&bytes[4..]);
        match (reader.u32(), reader.u64(), reader.u64()) {
            (Some(piece), Some(address), Some(after)) => Ok(RemoteRange { piece, address, after }),
            _ => Err(short()),
        }
    }
}

/// A piece of GPU memory with one handle: an allocation, or one part of a range assembled from several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The id, assigned by the owner and never reused.
    pub(crate) id: u32,
    /// The address in the owner's process.
    pub(crate) address: u64,
    /// The length in bytes, never 0.
    pub(crate) len: u64,
    /// The owner's GPU.
    pub(crate) device: Uuid,
}

impl Piece {
    /// The end address. It does not overflow for decoded pieces.
    pub(crate) fn end(&self) -> u64 {
        self.address.saturating_add(self.len)
    }
}

/// An entry of a note.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// A piece whose handle is the next of the note's file descriptors.
    ByFile { piece: Piece, seal: Seal },
    /// A piece with a legacy IPC handle.
    ByHandle {
        piece: Piece,
        handle: LegacyHandle,
        /// The driver's buffer id in the owner's process.
        identity: u64,
        seal: Seal,
    },
    /// The owner has freed this piece, or no longer exports it.
    Withdrawn(u32),
    /// The sender has closed this piece of the receiver's and asks for its handle again.
    Resend(u32),
}

impl Entry {
    fn len(&self) -> usize {
        match self {
            Entry::ByFile { .. } => 37 + 16,
            Entry::ByHandle { .. } => 37 + 64 + 8 + 16,
            Entry::Withdrawn(_) | Entry::Resend(_) => 5,
        }
    }
}

/// Encodes a note: entries are added as long as they fit.
#[derive(Debug)]
pub(crate) struct Writer {
    bytes: Vec<u8>,
    count: u16,
    files: usize,
}

impl Writer {
    pub(crate) fn new() -> Writer {
        Writer { bytes: vec![0; HEADER], count: 0, files: 0 }
    }

    /// Whether the entry still fits.
    pub(crate) fn fits(&self, entry: &Entry) -> bool {
        let files = usize::from(matches!(entry, Entry::ByFile { .. }));
        self.bytes.len() + entry.len() <= MAX_NOTE_LEN && self.files + files <= MAX_FILES
    }

    /// Adds an entry, which must fit.
    pub(crate) fn push(&mut self, entry: &Entry) {
        let piece = |bytes: &mut Vec<u8>, kind: u8, piece: &Piece| {
            bytes.push(kind);
            bytes.extend_from_slice(&piece.id.to_le_bytes());
            bytes.extend_from_slice(&piece.address.to_le_bytes());
            bytes.extend_from_slice(&piece.len.to_le_bytes());
            bytes.extend_from_slice(&piece.device);
        };
        match entry {
            Entry::ByFile { piece: named, seal } => {
                piece(&mut self.bytes, BY_FILE, named);
                self.bytes.extend_from_slice(seal);
                self.files += 1;
            }
            Entry::ByHandle { piece: named, handle, identity, seal } => {
                piece(&mut self.bytes, BY_HANDLE, named);
                self.bytes.extend_from_slice(handle);
                self.bytes.extend_from_slice(&identity.to_le_bytes());
                self.bytes.extend_from_slice(seal);
            }
            Entry::Withdrawn(id) | Entry::Resend(id) => {
                self.bytes.push(if matches!(entry, Entry::Withdrawn(_)) { WITHDRAWN } else { RESEND });
                self.bytes.extend_from_slice(&id.to_le_bytes());
            }
        }
        self.count += 1;
    }

    /// The encoded note. `upto` is the number of its last entry, counted from 1 over all notes of this end.
    pub(crate) fn finish(mut self, upto: u64) -> Vec<u8> {
        self.bytes[0] = KIND;
        self.bytes[2..4].copy_from_slice(&self.count.to_le_bytes());
        self.bytes[8..16].copy_from_slice(&upto.to_le_bytes());
        self.bytes
    }
}

/// A decoded note.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Note {
    /// The number of its last entry.
    pub(crate) upto: u64,
    /// Its entries.
    pub(crate) entries: Vec<Entry>,
}

impl Note {
    /// Decodes a note that was received with `files` file descriptors: as many as it announces, or none if they could
    /// not be received. `Err`: the peer violates the protocol.
    pub(crate) fn decode(bytes: &[u8], files: usize) -> Result<Note, String> {
        if bytes.len() > MAX_NOTE_LEN {
            return Err(format!("a note of {} bytes exceeds the maximum of {MAX_NOTE_LEN}", bytes.len()));
        }
        let mut reader = Reader(bytes);
        let (kind, zero) = (reader.u8().ok_or_else(short)?, reader.u8().ok_or_else(short)?);
        let count = reader.u16().ok_or_else(short)?;
        let (zeros, upto) = (reader.u32().ok_or_else(short)?, reader.u64().ok_or_else(short)?);
        if kind != KIND || zero != 0 || zeros != 0 {
            return Err(format!("a note of kind {kind} is not about GPU memory"));
        }
        if count == 0 {
            return Err("a note without entries".into());
        }
        let mut entries = Vec::new();
        for _ in 0..count {
            entries.push(entry(&mut reader)?);
        }
        if !reader.0.is_empty() {
            return Err(format!("a note with {} trailing bytes", reader.0.len()));
        }
        let announced = entries.iter().filter(|entry| matches!(entry, Entry::ByFile { .. })).count();
        if announced != files && files != 0 {
            return Err(format!("a note that announces {announced} files came with {files}"));
        }
        Ok(Note { upto, entries })
    }
}

fn short() -> String {
    "a truncated note about GPU memory".into()
}

fn entry(reader: &mut Reader<'_>) -> Result<Entry, String> {
    match reader.u8().ok_or_else(short)? {
        BY_FILE => Ok(Entry::ByFile { piece: piece(reader)?, seal: reader.array().ok_or_else(short)? }),
        BY_HANDLE => {
            let piece = piece(reader)?;
            let handle = reader.array().ok_or_else(short)?;
            let identity = reader.u64().ok_or_else(short)?;
            Ok(Entry::ByHandle { piece, handle, identity, seal: reader.array().ok_or_else(short)? })
        }
        WITHDRAWN => Ok(Entry::Withdrawn(reader.u32().ok_or_else(short)?)),
        RESEND => Ok(Entry::Resend(reader.u32().ok_or_else(short)?)),
        kind => Err(format!("a note about GPU memory with an unknown entry of kind {kind}")),
    }
}

fn piece(reader: &mut Reader<'_>) -> Result<Piece, String> {
    let id = reader.u32().ok_or_else(short)?;
    let (address, len) = (reader.u64().ok_or_else(short)?, reader.u64().ok_or_else(short)?);
    let device = reader.array().ok_or_else(short)?;
    let whole = address.checked_add(len).is_some() && usize::try_from(len).is_ok();
    if id == 0 || address == 0 || len == 0 || !whole {
        return Err(format!("an invalid piece of GPU memory: {len} bytes at {address:#x} with the id {id}"));
    }
    Ok(Piece { id, address, len, device })
}

/// Reads little-endian numbers from the front of a slice.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*first)
    }

    fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
}

#[cfg(test)]
#[path = "note_tests.rs"]
mod tests;
