//! The pieces that one peer has announced, and those of them that are open here: the importer's side.
//!
//! A piece is opened when it is first needed, for the GPU that needs it, and stays open for later transfers. The least
//! recently used pieces are closed beyond a limit. If the file descriptor of a closed piece has been used up, the peer
//! is asked to announce the piece again.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::note::{Entry, LegacyHandle, Note, Piece, RemoteRange, Seal, Uuid};

/// Maximum number of pieces that a peer may announce at a time; a correct one announces fewer.
pub(crate) const MAX_NAMED: usize = 65_536;

/// Limits on what is kept open.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Maximum number of open pieces, regardless of the number of GPUs they are open for.
    pub(crate) open: usize,
    /// Maximum number of file descriptors of pieces that have not been needed yet.
    pub(crate) files: usize,
}

/// The handle of a piece, received from a peer.
#[derive(Debug)]
pub(crate) enum ReceivedHandle<'a> {
    File { file: OwnedFd, seal: &'a Seal },
    Handle { handle: &'a LegacyHandle, identity: u64, seal: &'a Seal },
}

/// The driver functions that an importer needs.
pub(crate) trait ImportDriver {
    /// Memory imported from its handle, without an address.
    type Imported;
    /// That memory mapped into this process, for one GPU.
    type Opened;
    /// Checks that `device` can access memory of the piece's GPU at all.
    fn reach(&self, piece: &Piece, device: u32) -> Result<(), String>;
    /// Imports a piece.
    fn import(&self, piece: &Piece, received: ReceivedHandle<'_>, device: u32) -> Result<Self::Imported, String>;
    /// Maps an imported piece for `device`, after checking that it is complete.
    fn open(&self, piece: &Piece, held: &Self::Imported, device: u32) -> Result<Self::Opened, String>;
}

/// The state of a piece.
#[derive(Debug)]
enum ImportState<H> {
    /// Its file descriptor has been received.
    FileReceived { file: OwnedFd, seal: Seal },
    /// Its IPC handle has been received, which can be opened any number of times.
    HandleReceived { handle: LegacyHandle, identity: u64, seal: Seal },
    /// Imported from its file descriptor, which is used up.
    Imported(H),
    /// It was closed to stay within the limits. `asked`: the peer has been asked to announce it again.
    Closed { asked: bool },
    /// It cannot be opened, with the reason.
    Failed(String),
}

#[derive(Debug)]
struct Import<H, O> {
    piece: Piece,
    state: ImportState<H>,
    /// Imports from an IPC handle, one per GPU: unlike a file descriptor, such a handle is opened for each GPU.
    held: HashMap<u32, H>,
    open: Vec<(u32, Arc<O>)>,
    used: u64,
}

impl<H, O> Import<H, O> {
    fn is_open(&self) -> bool {
        !self.open.is_empty() || !self.held.is_empty() || matches!(self.state, ImportState::Imported(_))
    }
}

/// A part of a transfer: `len` bytes at `offset` of an open piece.
#[derive(Debug)]
pub(crate) struct Span<O> {
    pub(crate) open: Arc<O>,
    pub(crate) offset: u64,
    pub(crate) len: usize,
}

/// The outcome of a step of a search.
#[derive(Debug)]
pub(crate) enum SearchOutcome {
    /// All spans have been found.
    Complete,
    /// The budget of pieces to open in one step is spent; call again.
    BudgetSpent,
    /// A note has not arrived yet; call again after it has.
    NoteMissing,
    /// This piece was closed: ask the peer to announce it again, then call again.
    ResendNeeded(u32),
}

/// A search for the open pieces of a transfer, which may take several steps.
#[derive(Debug)]
pub(crate) struct Search<O> {
    range: RemoteRange,
    len: usize,
    done: usize,
    pub(crate) spans: Vec<Span<O>>,
}

impl<O> Search<O> {
    pub(crate) fn new(range: RemoteRange, len: usize) -> Result<Search<O>, String> {
        match range.address.checked_add(len as u64) {
            Some(_) if len > 0 => Ok(Search { range, len, done: 0, spans: Vec::new() }),
            _ => Err(format!("{len} bytes at {:#x} are not a valid range", range.address)),
        }
    }
}

/// The pieces announced by one peer.
#[derive(Debug)]
pub(crate) struct Imports<H, O> {
    by_address: BTreeMap<u64, Import<H, O>>,
    addresses: HashMap<u32, u64>,
    limits: Limits,
    /// The number of the last entry read.
    upto: u64,
    clock: u64,
    /// The number of pieces in the state `FileReceived`, and of open pieces.
    files: usize,
    open: usize,
}

impl<H, O> Imports<H, O> {
    pub(crate) fn new(limits: Limits) -> Imports<H, O> {
        Imports { by_address: BTreeMap::new(), addresses: HashMap::new(), limits, upto: 0, clock: 0, files: 0, open: 0 }
    }

    /// The number of open pieces, and of file descriptors kept.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.open, self.files)
    }

    /// Reads a note; returns the ids of the pieces that the peer asks to be announced again. `Err`: the peer violates
    /// the protocol.
    pub(crate) fn read(&mut self, bytes: &[u8], files: Vec<OwnedFd>) -> Result<Vec<u32>, String> {
        let note = Note::decode(bytes, files.len())?;
        if self.upto.checked_add(note.entries.len() as u64) != Some(note.upto) {
            return Err(format!("a note up to entry {} follows entry {}", note.upto, self.upto));
        }
        let (mut files, mut resend) = (files.into_iter(), Vec::new());
        for entry in note.entries {
            match entry {
                Entry::ByFile { piece, seal } => {
                    // Without its file descriptor, because this process had none left, the piece counts as closed.
                    let state = files.next();
                    let state = state
                        .map_or(ImportState::Closed { asked: false }, |file| ImportState::FileReceived { file, seal });
                    self.announced(piece, state)?;
                }
                Entry::ByHandle { piece, handle, identity, seal } => {
                    self.announced(piece, ImportState::HandleReceived { handle, identity, seal })?;
                }
                Entry::Withdrawn(id) => {
                    if let Some(address) = self.addresses.get(&id).copied() {
                        self.remove(address);
                    }
                }
                Entry::Resend(id) => resend.push(id),
            }
        }
        self.upto = note.upto;
        self.close_files();
        Ok(resend)
    }

    fn announced(&mut self, piece: Piece, state: ImportState<H>) -> Result<(), String> {
        // A known piece, announced again on request.
        let known = self.by_address.get_mut(&piece.address).filter(|known| known.piece == piece);
        if let Some(known) = known {
            if matches!(known.state, ImportState::Closed { .. }) {
                self.files += usize::from(matches!(state, ImportState::FileReceived { .. }));
                known.state = state;
            }
            return Ok(());
        }
        if self.addresses.contains_key(&piece.id) {
            return Err(format!("two pieces of GPU memory with the id {}", piece.id));
        }
        let before = self.by_address.range(..piece.address).next_back();
        let before = before.filter(|(_, import)| import.piece.end() > piece.address).map(|(at, _)| *at);
        let inside: Vec<u64> =
            self.by_address.range(piece.address..piece.end()).map(|(at, _)| *at).chain(before).collect();
        inside.into_iter().for_each(|at| self.remove(at));
        if self.by_address.len() >= MAX_NAMED {
            return Err(format!("more than {MAX_NAMED} pieces of GPU memory"));
        }
        self.files += usize::from(matches!(state, ImportState::FileReceived { .. }));
        self.clock += 1;
        self.addresses.insert(piece.id, piece.address);
        let import = Import { piece, state, held: HashMap::new(), open: Vec::new(), used: self.clock };
        self.by_address.insert(piece.address, import);
        Ok(())
    }

    fn remove(&mut self, address: u64) {
        if let Some(import) = self.by_address.remove(&address) {
            self.addresses.remove(&import.piece.id);
            self.files -= usize::from(matches!(import.state, ImportState::FileReceived { .. }));
            self.open -= usize::from(import.is_open());
        }
    }

    /// Continues a search, opening at most `budget` pieces for `device`. `Err`: the memory cannot be accessed.
    pub(crate) fn seek(
        &mut self,
        driver: &impl ImportDriver<Imported = H, Opened = O>,
        search: &mut Search<O>,
        device: u32,
        budget: usize,
    ) -> Result<SearchOutcome, String> {
        if !self.has_read(search.range) {
            return Ok(SearchOutcome::NoteMissing);
        }
        let sought = self.seek_all(driver, search, device, budget);
        self.close_unused();
        sought
    }

    fn seek_all(
        &mut self,
        driver: &impl ImportDriver<Imported = H, Opened = O>,
        search: &mut Search<O>,
        device: u32,
        budget: usize,
    ) -> Result<SearchOutcome, String> {
        let mut opened = 0;
        while search.done < search.len {
            let at = search.range.address + search.done as u64;
            let import = self.by_address.range_mut(..=at).next_back().map(|(_, import)| import);
            let import = import.filter(|import| at < import.piece.end());
            let freed = || format!("the peer has freed {} bytes at {:#x}", search.len, search.range.address);
            let import = import.ok_or_else(freed)?;
            if search.done == 0 && import.piece.id != search.range.piece {
                return Err(freed());
            }
            self.clock += 1;
            import.used = self.clock;
            let before = (import.is_open(), matches!(import.state, ImportState::FileReceived { .. }));
            if import.open.iter().all(|(known, _)| *known != device) {
                if opened == budget {
                    return Ok(SearchOutcome::BudgetSpent);
                }
                opened += 1;
            }
            let open = open_piece(driver, import, device);
            self.open += usize::from(import.is_open());
            self.open -= usize::from(before.0);
            self.files -= usize::from(before.1 && !matches!(import.state, ImportState::FileReceived { .. }));
            let open = match open? {
                Some(open) => open,
                None => {
                    return Ok(if mark_requested(import) {
                        SearchOutcome::ResendNeeded(import.piece.id)
                    } else {
                        SearchOutcome::NoteMissing
                    });
                }
            };
            let left = search.len - search.done;
            let len = usize::try_from(import.piece.end() - at).map_or(left, |here| here.min(left));
            search.spans.push(Span { open, offset: at - import.piece.address, len });
            search.done += len;
        }
        Ok(SearchOutcome::Complete)
    }

    /// Whether all note entries that a descriptor depends on have been read.
    pub(crate) fn has_read(&self, range: RemoteRange) -> bool {
        range.after <= self.upto
    }

    /// The GPU of the first piece of a transfer, if it has been announced.
    pub(crate) fn owner(&self, range: RemoteRange) -> Option<Uuid> {
        let address = self.addresses.get(&range.piece)?;
        self.by_address.get(address).map(|import| import.piece.device)
    }

    /// The imported pieces of a complete search, in order, and the offset of the first byte in the first piece: to be
    /// mapped contiguously.
    pub(crate) fn imported(&self, range: RemoteRange, len: usize, device: u32) -> Option<(Vec<&H>, u64)> {
        let (mut held, mut at, end) = (Vec::new(), range.address, range.address.checked_add(len as u64)?);
        let mut offset = None;
        while at < end {
            let (_, import) = self.by_address.range(..=at).next_back().filter(|(_, import)| at < import.piece.end())?;
            offset.get_or_insert(at - import.piece.address);
            held.push(match &import.state {
                ImportState::Imported(held) => held,
                _ => import.held.get(&device)?,
            });
            at = import.piece.end();
        }
        Some((held, offset?))
    }

    /// Closes the least recently used pieces beyond the limit; copies in flight keep theirs.
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
            if matches!(import.state, ImportState::Imported(_)) {
                import.state = ImportState::Closed { asked: false };
            }
            self.open -= 1;
        }
    }

    /// Closes the oldest file descriptors beyond the limit.
    fn close_files(&mut self) {
        let excess = self.files.saturating_sub(self.limits.files);
        if excess == 0 {
            return;
        }
        let filed =
            self.by_address.iter().filter(|(_, import)| matches!(import.state, ImportState::FileReceived { .. }));
        let mut by_use: Vec<(u64, u64)> = filed.map(|(address, import)| (import.used, *address)).collect();
        by_use.sort_unstable();
        for (_, address) in by_use.into_iter().take(excess) {
            let Some(import) = self.by_address.get_mut(&address) else { continue };
            import.state = ImportState::Closed { asked: false };
            self.files -= 1;
        }
    }
}

/// Marks a closed piece as requested; returns false if it already was.
fn mark_requested<H, O>(import: &mut Import<H, O>) -> bool {
    match &mut import.state {
        ImportState::Closed { asked } => !std::mem::replace(asked, true),
        _ => false,
    }
}

/// Opens a piece for `device`; `None` if its handle is used up.
fn open_piece<H, O>(
    driver: &impl ImportDriver<Imported = H, Opened = O>,
    import: &mut Import<H, O>,
    device: u32,
) -> Result<Option<Arc<O>>, String> {
    if let Some((_, open)) = import.open.iter().find(|(known, _)| *known == device) {
        return Ok(Some(Arc::clone(open)));
    }
    let piece = import.piece;
    driver.reach(&piece, device)?;
    let opened = match std::mem::replace(&mut import.state, ImportState::Closed { asked: false }) {
        ImportState::FileReceived { file, seal } => {
            match driver.import(&piece, ReceivedHandle::File { file, seal: &seal }, device) {
                Ok(held) => {
                    let opened = driver.open(&piece, &held, device);
                    import.state = ImportState::Imported(held);
                    opened
                }
                Err(why) => {
                    import.state = ImportState::Failed(why.clone());
                    Err(why)
                }
            }
        }
        ImportState::Imported(held) => {
            let opened = driver.open(&piece, &held, device);
            import.state = ImportState::Imported(held);
            opened
        }
        ImportState::HandleReceived { handle, identity, seal } => {
            let received = ReceivedHandle::Handle { handle: &handle, identity, seal: &seal };
            let opened = driver.import(&piece, received, device).and_then(|held| {
                let opened = driver.open(&piece, &held, device)?;
                import.held.insert(device, held);
                Ok(opened)
            });
            import.state = ImportState::HandleReceived { handle, identity, seal };
            opened
        }
        ImportState::Closed { asked } => {
            import.state = ImportState::Closed { asked };
            return Ok(None);
        }
        ImportState::Failed(why) => {
            import.state = ImportState::Failed(why.clone());
            Err(why)
        }
    };
    let open = Arc::new(opened?);
    import.open.push((device, Arc::clone(&open)));
    Ok(Some(open))
}
