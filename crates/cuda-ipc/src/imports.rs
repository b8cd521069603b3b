//! What one peer has named, and what of it is open here: the importer's side.
//!
//! A piece is opened when it is first needed, for the GPU that needs it, and stays open for the next transfer. The
//! pieces unused longest are closed when there are too many; one whose file is gone by then is asked for again.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::note::{Entry, LegacyHandle, Note, Piece, Place, Seal, Uuid};

/// The most pieces that a peer may name at a time; an honest one names fewer.
pub(crate) const MOST_NAMED: usize = 65_536;

/// How much is kept open.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Pieces that are open, however many GPUs they are open for.
    pub(crate) open: usize,
    /// Files of pieces that nobody has needed yet.
    pub(crate) files: usize,
}

/// What a peer handed over.
#[derive(Debug)]
pub(crate) enum Pass<'a> {
    File { file: OwnedFd, seal: &'a Seal },
    Handle { handle: &'a LegacyHandle, identity: u64, seal: &'a Seal },
}

/// The driver, as an importer needs it.
pub(crate) trait Opener {
    /// Memory that was taken over from its handle, without addresses.
    type Held;
    /// That memory at addresses of this process, for one GPU.
    type Open;
    /// Whether memory of that piece's GPU can be reached from `device` at all.
    fn reach(&self, piece: &Piece, device: u32) -> Result<(), String>;
    /// Takes a piece over.
    fn take(&self, piece: &Piece, pass: Pass<'_>, device: u32) -> Result<Self::Held, String>;
    /// Gives it addresses for `device`, having checked that all of it is there.
    fn open(&self, piece: &Piece, held: &Self::Held, device: u32) -> Result<Self::Open, String>;
}

/// How far a piece has come.
#[derive(Debug)]
enum Stage<H> {
    /// Its file is here.
    Filed {
        file: OwnedFd,
        seal: Seal,
    },
    /// Its handle is here, which is good for any number of times.
    Handled {
        handle: LegacyHandle,
        identity: u64,
        seal: Seal,
    },
    Held(H),
    /// It was closed to make room, or its file was; `asked`: it was asked for again.
    Closed {
        asked: bool,
    },
    /// It can't be opened.
    Failed(String),
}

#[derive(Debug)]
struct Import<H, O> {
    piece: Piece,
    stage: Stage<H>,
    /// Kept apart from the stage, since legacy handles are opened for each GPU.
    held: HashMap<u32, H>,
    open: Vec<(u32, Arc<O>)>,
    used: u64,
}

impl<H, O> Import<H, O> {
    fn is_open(&self) -> bool {
        !self.open.is_empty() || !self.held.is_empty() || matches!(self.stage, Stage::Held(_))
    }
}

/// A part of a transfer's bytes: `len` of them at `offset` of an open piece.
#[derive(Debug)]
pub(crate) struct Span<O> {
    pub(crate) open: Arc<O>,
    pub(crate) offset: u64,
    pub(crate) len: usize,
}

/// What became of a look for a transfer's bytes.
#[derive(Debug)]
pub(crate) enum Sought {
    /// All spans are there.
    All,
    /// More have been opened than should be in one go; ask again.
    More,
    /// A note has yet to arrive; ask again when one has.
    Missing,
    /// This piece was closed to make room: ask the peer for it, then here again.
    Again(u32),
}

/// A look for `len` bytes of the peer's, which may take several goes.
#[derive(Debug)]
pub(crate) struct Search<O> {
    place: Place,
    len: usize,
    done: usize,
    pub(crate) spans: Vec<Span<O>>,
}

impl<O> Search<O> {
    pub(crate) fn new(place: Place, len: usize) -> Result<Search<O>, String> {
        match place.address.checked_add(len as u64) {
            Some(_) if len > 0 => Ok(Search { place, len, done: 0, spans: Vec::new() }),
            _ => Err(format!("{len} bytes at {:#x} are no memory", place.address)),
        }
    }
}

/// The pieces of one peer.
#[derive(Debug)]
pub(crate) struct Imports<H, O> {
    by_address: BTreeMap<u64, Import<H, O>>,
    addresses: HashMap<u32, u64>,
    limits: Limits,
    /// The last entry that was read.
    upto: u64,
    uses: u64,
    /// How many are `Filed`, how many are open.
    files: usize,
    open: usize,
}

impl<H, O> Imports<H, O> {
    pub(crate) fn new(limits: Limits) -> Imports<H, O> {
        Imports { by_address: BTreeMap::new(), addresses: HashMap::new(), limits, upto: 0, uses: 0, files: 0, open: 0 }
    }

    /// Pieces that are open; files that are kept.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.open, self.files)
    }

    /// Reads a note; returns the pieces that the peer needs again. `Err`: the peer does not follow the protocol.
    pub(crate) fn read(&mut self, bytes: &[u8], files: Vec<OwnedFd>) -> Result<Vec<u32>, String> {
        let note = Note::decode(bytes, files.len())?;
        if self.upto.checked_add(note.entries.len() as u64) != Some(note.upto) {
            return Err(format!("a note about entry {} that follows entry {}", note.upto, self.upto));
        }
        let (mut files, mut again) = (files.into_iter(), Vec::new());
        for entry in note.entries {
            match entry {
                Entry::ByFile { piece, seal } => {
                    // Without its file, which this process had no descriptor for, it is as good as closed.
                    let stage = files.next();
                    let stage = stage.map_or(Stage::Closed { asked: false }, |file| Stage::Filed { file, seal });
                    self.name(piece, stage)?;
                }
                Entry::ByHandle { piece, handle, identity, seal } => {
                    self.name(piece, Stage::Handled { handle, identity, seal })?;
                }
                Entry::Gone(id) => {
                    if let Some(address) = self.addresses.get(&id).copied() {
                        self.remove(address);
                    }
                }
                Entry::Again(id) => again.push(id),
            }
        }
        self.upto = note.upto;
        self.close_files();
        Ok(again)
    }

    fn name(&mut self, piece: Piece, stage: Stage<H>) -> Result<(), String> {
        // The same piece once more, because it was asked for.
        let known = self.by_address.get_mut(&piece.address).filter(|known| known.piece == piece);
        if let Some(known) = known {
            if matches!(known.stage, Stage::Closed { .. }) {
                self.files += usize::from(matches!(stage, Stage::Filed { .. }));
                known.stage = stage;
            }
            return Ok(());
        }
        if self.addresses.contains_key(&piece.id) {
            return Err(format!("two pieces of GPU memory with the number {}", piece.id));
        }
        let before = self.by_address.range(..piece.address).next_back();
        let before = before.filter(|(_, import)| import.piece.end() > piece.address).map(|(at, _)| *at);
        let inside: Vec<u64> =
            self.by_address.range(piece.address..piece.end()).map(|(at, _)| *at).chain(before).collect();
        inside.into_iter().for_each(|at| self.remove(at));
        if self.by_address.len() >= MOST_NAMED {
            return Err(format!("more than {MOST_NAMED} pieces of GPU memory"));
        }
        self.files += usize::from(matches!(stage, Stage::Filed { .. }));
        self.uses += 1;
        self.addresses.insert(piece.id, piece.address);
        let import = Import { piece, stage, held: HashMap::new(), open: Vec::new(), used: self.uses };
        self.by_address.insert(piece.address, import);
        Ok(())
    }

    fn remove(&mut self, address: u64) {
        if let Some(import) = self.by_address.remove(&address) {
            self.addresses.remove(&import.piece.id);
            self.files -= usize::from(matches!(import.stage, Stage::Filed { .. }));
            self.open -= usize::from(import.is_open());
        }
    }

    /// Goes on with a search, opening at most `budget` pieces for `device`. `Err`: the bytes can't be had.
    pub(crate) fn seek(
        &mut self,
        opener: &impl Opener<Held = H, Open = O>,
        search: &mut Search<O>,
        device: u32,
        budget: usize,
    ) -> Result<Sought, String> {
        if !self.has_heard(search.place) {
            return Ok(Sought::Missing);
        }
        let sought = self.seek_all(opener, search, device, budget);
        self.close_unused();
        sought
    }

    fn seek_all(
        &mut self,
        opener: &impl Opener<Held = H, Open = O>,
        search: &mut Search<O>,
        device: u32,
        budget: usize,
    ) -> Result<Sought, String> {
        let mut opened = 0;
        while search.done < search.len {
            let at = search.place.address + search.done as u64;
            let import = self.by_address.range_mut(..=at).next_back().map(|(_, import)| import);
            let import = import.filter(|import| at < import.piece.end());
            let freed = || format!("the peer has freed {} bytes at {:#x}", search.len, search.place.address);
            let import = import.ok_or_else(freed)?;
            if search.done == 0 && import.piece.id != search.place.piece {
                return Err(freed());
            }
            self.uses += 1;
            import.used = self.uses;
            let before = (import.is_open(), matches!(import.stage, Stage::Filed { .. }));
            if import.open.iter().all(|(known, _)| *known != device) {
                if opened == budget {
                    return Ok(Sought::More);
                }
                opened += 1;
            }
            let open = open_for(opener, import, device);
            self.open += usize::from(import.is_open());
            self.open -= usize::from(before.0);
            self.files -= usize::from(before.1 && !matches!(import.stage, Stage::Filed { .. }));
            let open = match open? {
                Some(open) => open,
                None => return Ok(if ask(import) { Sought::Again(import.piece.id) } else { Sought::Missing }),
            };
            let left = search.len - search.done;
            let len = usize::try_from(import.piece.end() - at).map_or(left, |here| here.min(left));
            search.spans.push(Span { open, offset: at - import.piece.address, len });
            search.done += len;
        }
        Ok(Sought::All)
    }

    /// Whether everything was read that a descriptor refers to.
    pub(crate) fn has_heard(&self, place: Place) -> bool {
        place.after <= self.upto
    }

    /// The GPU of the piece that a transfer begins in, if it is known here.
    pub(crate) fn owner(&self, place: Place) -> Option<Uuid> {
        let address = self.addresses.get(&place.piece)?;
        self.by_address.get(address).map(|import| import.piece.device)
    }

    /// What was taken over of each piece that a finished search lies in, whole and in order, with the offset of the
    /// search's first byte: to be put together at one address.
    pub(crate) fn whole(&self, place: Place, len: usize, device: u32) -> Option<(Vec<&H>, u64)> {
        let (mut held, mut at, end) = (Vec::new(), place.address, place.address.checked_add(len as u64)?);
        let mut offset = None;
        while at < end {
            let (_, import) = self.by_address.range(..=at).next_back().filter(|(_, import)| at < import.piece.end())?;
            offset.get_or_insert(at - import.piece.address);
            held.push(match &import.stage {
                Stage::Held(held) => held,
                _ => import.held.get(&device)?,
            });
            at = import.piece.end();
        }
        Some((held, offset?))
    }

    /// Closes the pieces unused longest; copies under way keep theirs.
    fn close_unused(&mut self) {
        let excess = self.open.saturating_sub(self.limits.open);
        if excess == 0 {
            return;
        }
        let open = self.by_address.iter().filter(|(_, import)| import.is_open());
        let mut by_use: Vec<(u64, u64)> = open.map(|(address, import)| (import.used, *address)).collect();
        by_use.sort_unstable();
        for (_, address) in by_use.into_iter().take(excess) {
            let Some(import) = self.by_address.get_mut(&address) else { continue };
            import.open.clear();
            import.held.clear();
            if matches!(import.stage, Stage::Held(_)) {
                import.stage = Stage::Closed { asked: false };
            }
            self.open -= 1;
        }
    }

    /// Closes the files that have waited longest.
    fn close_files(&mut self) {
        let excess = self.files.saturating_sub(self.limits.files);
        if excess == 0 {
            return;
        }
        let filed = self.by_address.iter().filter(|(_, import)| matches!(import.stage, Stage::Filed { .. }));
        let mut by_use: Vec<(u64, u64)> = filed.map(|(address, import)| (import.used, *address)).collect();
        by_use.sort_unstable();
        for (_, address) in by_use.into_iter().take(excess) {
            let Some(import) = self.by_address.get_mut(&address) else { continue };
            import.stage = Stage::Closed { asked: false };
            self.files -= 1;
        }
    }
}

/// Marks a closed piece as asked for; false when it was before.
fn ask<H, O>(import: &mut Import<H, O>) -> bool {
    match &mut import.stage {
        Stage::Closed { asked } => !std::mem::replace(asked, true),
        _ => false,
    }
}

/// The piece open for `device`; `None`: its handle is not here any more.
fn open_for<H, O>(
    opener: &impl Opener<Held = H, Open = O>,
    import: &mut Import<H, O>,
    device: u32,
) -> Result<Option<Arc<O>>, String> {
    if let Some((_, open)) = import.open.iter().find(|(known, _)| *known == device) {
        return Ok(Some(Arc::clone(open)));
    }
    let piece = import.piece;
    opener.reach(&piece, device)?;
    let opened = match std::mem::replace(&mut import.stage, Stage::Closed { asked: false }) {
        Stage::Filed { file, seal } => match opener.take(&piece, Pass::File { file, seal: &seal }, device) {
            Ok(held) => {
                let opened = opener.open(&piece, &held, device);
                import.stage = Stage::Held(held);
                opened
            }
            Err(why) => {
                import.stage = Stage::Failed(why.clone());
                Err(why)
            }
        },
        Stage::Held(held) => {
            let opened = opener.open(&piece, &held, device);
            import.stage = Stage::Held(held);
            opened
        }
        Stage::Handled { handle, identity, seal } => {
            let pass = Pass::Handle { handle: &handle, identity, seal: &seal };
            let opened = opener.take(&piece, pass, device).and_then(|held| {
                let opened = opener.open(&piece, &held, device)?;
                import.held.insert(device, held);
                Ok(opened)
            });
            import.stage = Stage::Handled { handle, identity, seal };
            opened
        }
        Stage::Closed { asked } => {
            import.stage = Stage::Closed { asked };
            return Ok(None);
        }
        Stage::Failed(why) => {
            import.stage = Stage::Failed(why.clone());
            Err(why)
        }
    };
    let open = Arc::new(opened?);
    import.open.push((device, Arc::clone(&open)));
    Ok(Some(open))
}
