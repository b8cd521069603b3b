//! What two ends tell each other: descriptors, and notes that name allocations. Everything that is read here is a
//! peer's word, and nothing of it is used before it has been checked.

use crossrail_transport::Descriptor;

/// The first byte of our descriptors; those of shared memory begin with others.
pub(crate) const KIND: u8 = 16;

/// The most bytes of a note, and the most files that go with it: what a lane passes.
pub(crate) const LONGEST_NOTE: usize = 512;
/// As above.
pub(crate) const MOST_FILES: usize = 16;

const HEADER: usize = 16;
const BY_FILE: u8 = 1;
const BY_HANDLE: u8 = 2;
const GONE: u8 = 3;
const AGAIN: u8 = 4;

/// The driver's handle for memory of `cudaMalloc`.
pub(crate) type LegacyHandle = [u8; 64];
/// What shows that a piece was named by this very process: see `seal`.
pub(crate) type Seal = [u8; 16];
/// What names a GPU on every machine.
pub(crate) type Uuid = [u8; 16];

/// Where the bytes of one transfer are: in which pieces, at which of the owner's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The piece that the first byte lies in.
    pub(crate) piece: u32,
    /// The owner's address of the first byte.
    pub(crate) address: u64,
    /// The last entry that must have been read before this means anything.
    pub(crate) after: u64,
}

impl Place {
    pub(crate) fn encode(&self) -> Descriptor {
        let mut bytes = [0; 24];
        bytes[0] = KIND;
        bytes[4..8].copy_from_slice(&self.piece.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.address.to_le_bytes());
        bytes[16..].copy_from_slice(&self.after.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &Descriptor) -> Result<Place, String> {
        let mut reader = Reader(bytes);
        let (Some(kind), Some(zeros)) = (reader.u8(), reader.array::<3>()) else { return Err(short()) };
        if kind != KIND || zeros != [0; 3] {
            return Err(format!("a memory descriptor of kind {kind}, which is not GPU memory"));
        }
        match (reader.u32(), reader.u64(), reader.u64()) {
            (Some(piece), Some(address), Some(after)) => Ok(Place { piece, address, after }),
            _ => Err(short()),
        }
    }
}

/// One allocation, or one part of a range that was put together from several: what has one handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Its number, given by the owner, never used again.
    pub(crate) id: u32,
    /// Where it lies in the owner's process.
    pub(crate) address: u64,
    /// Bytes, never 0.
    pub(crate) len: u64,
    /// The owner's GPU.
    pub(crate) device: Uuid,
}

impl Piece {
    /// The address behind it. Decoded pieces have one.
    pub(crate) fn end(&self) -> u64 {
        self.address.saturating_add(self.len)
    }
}

/// One thing that a note says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// A piece whose handle is the next of the files that came with the note.
    ByFile { piece: Piece, seal: Seal },
    /// A piece with the driver's legacy handle.
    ByHandle {
        piece: Piece,
        handle: LegacyHandle,
        /// The number of the allocation in the owner's process.
        identity: u64,
        seal: Seal,
    },
    /// The owner has freed it, or passes it no longer.
    Gone(u32),
    /// The peer has let it go and needs it once more.
    Again(u32),
}

impl Entry {
    fn len(&self) -> usize {
        match self {
            Entry::ByFile { .. } => 37 + 16,
            Entry::ByHandle { .. } => 37 + 64 + 8 + 16,
            Entry::Gone(_) | Entry::Again(_) => 5,
        }
    }
}

/// A note as it is made: entries are added while they fit.
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

    /// Whether any such entry still fits.
    pub(crate) fn fits(&self, entry: &Entry) -> bool {
        let files = usize::from(matches!(entry, Entry::ByFile { .. }));
        self.bytes.len() + entry.len() <= LONGEST_NOTE && self.files + files <= MOST_FILES
    }

    /// Adds an entry that fits.
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
            Entry::Gone(id) | Entry::Again(id) => {
                self.bytes.push(if matches!(entry, Entry::Gone(_)) { GONE } else { AGAIN });
                self.bytes.extend_from_slice(&id.to_le_bytes());
            }
        }
        self.count += 1;
    }

    /// The note; `upto`: the number of its last entry, counted from 1 over all notes of this end.
    pub(crate) fn finish(mut self, upto: u64) -> Vec<u8> {
        self.bytes[0] = KIND;
        self.bytes[2..4].copy_from_slice(&self.count.to_le_bytes());
        self.bytes[8..16].copy_from_slice(&upto.to_le_bytes());
        self.bytes
    }
}

/// A note as it was read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Note {
    /// The number of its last entry.
    pub(crate) upto: u64,
    /// What it says.
    pub(crate) entries: Vec<Entry>,
}

impl Note {
    /// Reads a note with which `files` files came: as many as it names, or none when they could not be received. `Err`:
    /// the peer does not follow the protocol.
    pub(crate) fn decode(bytes: &[u8], files: usize) -> Result<Note, String> {
        if bytes.len() > LONGEST_NOTE {
            return Err(format!("a note of {} bytes; {LONGEST_NOTE} are the most", bytes.len()));
        }
        let mut reader = Reader(bytes);
        let (kind, zero) = (reader.u8().ok_or_else(short)?, reader.u8().ok_or_else(short)?);
        let count = reader.u16().ok_or_else(short)?;
        let (zeros, upto) = (reader.u32().ok_or_else(short)?, reader.u64().ok_or_else(short)?);
        if kind != KIND || zero != 0 || zeros != 0 {
            return Err(format!("a note of kind {kind}, which is not about GPU memory"));
        }
        if count == 0 {
            return Err("a note that says nothing".into());
        }
        let mut entries = Vec::new();
        for _ in 0..count {
            entries.push(entry(&mut reader)?);
        }
        if !reader.0.is_empty() {
            return Err(format!("a note with {} bytes too many", reader.0.len()));
        }
        let named = entries.iter().filter(|entry| matches!(entry, Entry::ByFile { .. })).count();
        if named != files && files != 0 {
            return Err(format!("a note that names {named} files and has {files}"));
        }
        Ok(Note { upto, entries })
    }
}

fn short() -> String {
    "a note about GPU memory that ends too early".into()
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
        GONE => Ok(Entry::Gone(reader.u32().ok_or_else(short)?)),
        AGAIN => Ok(Entry::Again(reader.u32().ok_or_else(short)?)),
        kind => Err(format!("a note about GPU memory with an entry of kind {kind}")),
    }
}

fn piece(reader: &mut Reader<'_>) -> Result<Piece, String> {
    let id = reader.u32().ok_or_else(short)?;
    let (address, len) = (reader.u64().ok_or_else(short)?, reader.u64().ok_or_else(short)?);
    let device = reader.array().ok_or_else(short)?;
    let whole = address.checked_add(len).is_some() && usize::try_from(len).is_ok();
    if id == 0 || address == 0 || len == 0 || !whole {
        return Err(format!("a piece of GPU memory of {len} bytes at {address:#x} with the number {id}"));
    }
    Ok(Piece { id, address, len, device })
}

/// Takes numbers off the front.
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
