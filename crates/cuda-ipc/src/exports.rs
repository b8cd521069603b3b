//! The pieces that this process exports to one peer: the owner's side.
//!
//! The library is not notified when somebody frees memory, and the driver reuses addresses. Each time memory is
//! described, the driver is therefore asked whether the allocation there is still the exported one. Some of the other
//! pieces are checked periodically too, so that the peer closes those that have been freed.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::note::{Entry, LegacyHandle, Piece, RemoteRange, Seal, Uuid, Writer};

/// Maximum number of pieces exported to a peer at a time.
pub(crate) const MAX_EXPORTS: usize = 4096;
/// At every `CHECK_EVERY`th description, `CHECKED_AT_ONCE` other pieces are checked.
pub(crate) const CHECK_EVERY: u64 = 16;
const CHECKED_AT_ONCE: usize = 2;
/// Maximum number of pieces in one transfer: 64 GiB in the 2 MiB parts of an expandable segment.
pub(crate) const MAX_PIECES: usize = 32_768;

/// A piece of memory, as the driver describes it to its owner.
#[derive(Debug)]
pub(crate) struct FoundPiece<K> {
    /// The start address.
    pub(crate) address: u64,
    /// The length in bytes.
    pub(crate) len: u64,
    /// The GPU.
    pub(crate) device: Uuid,
    /// Distinguishes it from all past and future pieces at this address.
    pub(crate) identity: K,
}

/// The handle by which another process imports a piece.
#[derive(Debug)]
pub(crate) enum ExportedHandle {
    File { file: OwnedFd, seal: Seal },
    Handle { handle: LegacyHandle, identity: u64, seal: Seal },
}

/// The driver functions that the owner of memory needs.
pub(crate) trait ExportDriver {
    /// Distinguishes allocations.
    type Identity;
    /// The piece that contains `address`; `Err` is the reason why it cannot be exported.
    fn find(&self, address: u64) -> Result<FoundPiece<Self::Identity>, String>;
    /// Whether the piece has not been freed or replaced.
    fn is_current(&self, found: &FoundPiece<Self::Identity>) -> bool;
    /// Creates the handle by which another process imports the piece.
    fn export(&self, found: &FoundPiece<Self::Identity>) -> Result<ExportedHandle, String>;
}

#[derive(Debug)]
struct Export<K> {
    id: u32,
    found: FoundPiece<K>,
    /// The clock at its last use.
    used: u64,
}

/// An entry to be sent to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Announcement {
    Piece(u32),
    Withdrawn(u32),
    Resend(u32),
}

/// A note that waits to be sent.
#[derive(Debug)]
struct PendingNote {
    bytes: Vec<u8>,
    files: Vec<OwnedFd>,
}

/// The pieces exported to one peer, and the notes that announce them.
#[derive(Debug)]
pub(crate) struct Exports<K> {
    by_address: BTreeMap<u64, Export<K>>,
    /// Addresses by id.
    addresses: HashMap<u32, u64>,
    last_id: u32,
    /// Entries to be sent, in order; and the same as a set, to detect duplicates.
    queue: VecDeque<Announcement>,
    queued: HashSet<Announcement>,
    /// The number of entries queued so far, and of entries written to notes so far.
    entries_queued: u64,
    entries_written: u64,
    pending: Option<PendingNote>,
    /// Advances at every description and every `tidy`.
    clock: u64,
    /// The address of the piece checked last.
    checked: u64,
}

impl<K> Exports<K> {
    pub(crate) fn new() -> Exports<K> {
        Exports {
            by_address: BTreeMap::new(),
            addresses: HashMap::new(),
            last_id: 0,
            queue: VecDeque::new(),
            queued: HashSet::new(),
            entries_queued: 0,
            entries_written: 0,
            pending: None,
            clock: 0,
            checked: 0,
        }
    }

    /// The number of exported pieces.
    pub(crate) fn len(&self) -> usize {
        self.by_address.len()
    }

    /// Describes `len` bytes at `address`, queueing announcements of the pieces that the peer does not know yet.
    pub(crate) fn describe(
        &mut self,
        driver: &impl ExportDriver<Identity = K>,
        address: u64,
        len: usize,
    ) -> Result<RemoteRange, String> {
        let end = address.checked_add(len as u64).filter(|_| len > 0 && address > 0);
        let end = end.ok_or_else(|| format!("{len} bytes at {address:#x} are not a valid range"))?;
        self.clock += 1;
        let (mut at, mut first, mut count) = (address, None, 0);
        while at < end {
            count += 1;
            if count > MAX_PIECES {
                return Err(format!("{len} bytes at {address:#x} span more than {MAX_PIECES} allocations"));
            }
            let export = self.piece_at(driver, at)?;
            first.get_or_insert(export.id);
            at = export.found.address.saturating_add(export.found.len);
        }
        if self.clock.is_multiple_of(CHECK_EVERY) {
            self.check_some(driver);
        }
        self.make_room();
        let piece = first.unwrap_or_default();
        Ok(RemoteRange { piece, address, after: self.entries_queued })
    }

    /// The piece that contains `address`, exported now if it was not.
    fn piece_at(&mut self, driver: &impl ExportDriver<Identity = K>, address: u64) -> Result<&mut Export<K>, String> {
        let known = self.by_address.range(..=address).next_back().map(|(_, export)| export);
        let known = known.filter(|export| address - export.found.address < export.found.len);
        let key = match known.map(|export| (export.found.address, driver.is_current(&export.found))) {
            Some((key, true)) => key,
            freed => {
                if let Some((key, _)) = freed {
                    self.forget(key);
                }
                let found = driver.find(address)?;
                let inside = address.checked_sub(found.address).is_some_and(|before| before < found.len);
                if !inside || found.address.checked_add(found.len).is_none() {
                    return Err(format!("the driver's allocation for {address:#x} does not contain that address"));
                }
                self.add(found)
            }
        };
        let now = self.clock;
        let export = self.by_address.get_mut(&key).ok_or("an unknown piece")?;
        export.used = now;
        Ok(export)
    }

    fn add(&mut self, found: FoundPiece<K>) -> u64 {
        let (address, end) = (found.address, found.address + found.len);
        // Overlapping pieces have been freed, otherwise the driver would not have found this one.
        let before = self.by_address.range(..address).next_back();
        let before = before.filter(|(at, export)| *at + export.found.len > address).map(|(at, _)| *at);
        let inside: Vec<u64> = self.by_address.range(address..end).map(|(at, _)| *at).chain(before).collect();
        inside.into_iter().for_each(|at| self.forget(at));
        self.last_id = self.last_id.wrapping_add(1).max(1);
        let id = self.last_id;
        self.addresses.insert(id, address);
        self.by_address.insert(address, Export { id, found, used: self.clock });
        self.announce(Announcement::Piece(id));
        address
    }

    fn forget(&mut self, address: u64) {
        if let Some(export) = self.by_address.remove(&address) {
            self.addresses.remove(&export.id);
            self.announce(Announcement::Withdrawn(export.id));
        }
    }

    /// Checks `count` pieces, including those described last.
    pub(crate) fn tidy(&mut self, driver: &impl ExportDriver<Identity = K>, count: usize) {
        self.clock += 1;
        for _ in 0..count.min(self.by_address.len()).div_ceil(CHECKED_AT_ONCE) {
            self.check_some(driver);
        }
    }

    /// Checks a few pieces, except those of the current transfer. Returns whether any had been freed.
    pub(crate) fn check_some(&mut self, driver: &impl ExportDriver<Identity = K>) -> bool {
        let mut freed = false;
        for _ in 0..CHECKED_AT_ONCE.min(self.by_address.len()) {
            let next = self.by_address.range(self.checked.saturating_add(1)..).next();
            let Some((address, export)) = next.or_else(|| self.by_address.iter().next()) else { break };
            let address = *address;
            self.checked = address;
            if export.used < self.clock && !driver.is_current(&export.found) {
                self.forget(address);
                freed = true;
            }
        }
        freed
    }

    /// Withdraws the pieces in `[address, address + len)`, which are about to be freed.
    pub(crate) fn withdraw(&mut self, address: u64, len: u64) {
        let end = address.saturating_add(len);
        let overlaps = |at: u64, export: &Export<K>| at < end && at.saturating_add(export.found.len) > address;
        let freed: Vec<u64> =
            self.by_address.iter().filter(|(at, export)| overlaps(**at, export)).map(|(at, _)| *at).collect();
        freed.into_iter().for_each(|at| self.forget(at));
    }

    /// Checks the pieces in `[address, address + len)`, which has been freed; it may have been reallocated since.
    pub(crate) fn check_range(&mut self, driver: &impl ExportDriver<Identity = K>, address: u64, len: u64) {
        let end = address.saturating_add(len);
        let overlaps = |at: u64, export: &Export<K>| at < end && at.saturating_add(export.found.len) > address;
        let there = self.by_address.iter().filter(|(at, export)| overlaps(**at, export));
        let freed: Vec<u64> =
            there.filter(|(_, export)| !driver.is_current(&export.found)).map(|(at, _)| *at).collect();
        freed.into_iter().for_each(|at| self.forget(at));
    }

    /// Withdraws the least recently used pieces beyond the limit, except those of the current transfer.
    fn make_room(&mut self) {
        let excess = self.by_address.len().saturating_sub(MAX_EXPORTS);
        if excess == 0 {
            return;
        }
        let mut by_use: Vec<(u64, u64)> =
            self.by_address.iter().map(|(address, export)| (export.used, *address)).collect();
        by_use.sort_unstable();
        for (used, address) in by_use.into_iter().take(excess) {
            if used < self.clock {
                self.forget(address);
            }
        }
    }

    fn announce(&mut self, entry: Announcement) {
        self.queue.push_back(entry);
        self.queued.insert(entry);
        self.entries_queued += 1;
    }

    /// Announces a piece again at the peer's request.
    pub(crate) fn resend(&mut self, id: u32) {
        let answer =
            if self.addresses.contains_key(&id) { Announcement::Piece(id) } else { Announcement::Withdrawn(id) };
        // An answer already queued serves further requests too, so a peer cannot make the queue grow by repeating them.
        if !self.queued.contains(&answer) {
            self.announce(answer);
        }
    }

    /// Asks the peer to announce one of its pieces again.
    pub(crate) fn request_resend(&mut self, id: u32) {
        if !self.queued.contains(&Announcement::Resend(id)) {
            self.announce(Announcement::Resend(id));
        }
    }

    /// Encodes the next note, if entries are queued. Handles are created only now, so that few are open at a time; a
    /// piece that was freed meanwhile is reported as withdrawn.
    pub(crate) fn prepare_note(&mut self, driver: &impl ExportDriver<Identity = K>) {
        if self.pending.is_some() || self.queue.is_empty() {
            return;
        }
        let mut writer = Writer::new();
        let mut files = Vec::new();
        while let Some(next) = self.queue.front().copied() {
            let (entry, file) = match next {
                Announcement::Piece(id) => self.entry_for(driver, id),
                Announcement::Withdrawn(id) => (Entry::Withdrawn(id), None),
                Announcement::Resend(id) => (Entry::Resend(id), None),
            };
            if !writer.fits(&entry) {
                break;
            }
            writer.push(&entry);
            files.extend(file);
            self.queue.pop_front();
            self.queued.remove(&next);
            self.entries_written += 1;
        }
        self.pending = Some(PendingNote { bytes: writer.finish(self.entries_written), files });
    }

    fn entry_for(&mut self, driver: &impl ExportDriver<Identity = K>, id: u32) -> (Entry, Option<OwnedFd>) {
        let export = self.addresses.get(&id).and_then(|address| self.by_address.get(address));
        let exported = export.map(|export| {
            let found = &export.found;
            let piece = Piece { id, address: found.address, len: found.len, device: found.device };
            (piece, if driver.is_current(found) { driver.export(found) } else { Err("freed".into()) })
        });
        match exported {
            Some((piece, Ok(ExportedHandle::File { file, seal }))) => (Entry::ByFile { piece, seal }, Some(file)),
            Some((piece, Ok(ExportedHandle::Handle { handle, identity, seal }))) => {
                (Entry::ByHandle { piece, handle, identity, seal }, None)
            }
            Some((piece, Err(_))) => {
                self.by_address.remove(&piece.address);
                self.addresses.remove(&id);
                (Entry::Withdrawn(id), None)
            }
            None => (Entry::Withdrawn(id), None),
        }
    }

    /// The note to be sent next.
    pub(crate) fn pending_note(&self) -> Option<(&[u8], Vec<BorrowedFd<'_>>)> {
        self.pending.as_ref().map(|note| (note.bytes.as_slice(), note.files.iter().map(AsFd::as_fd).collect()))
    }

    /// Removes the note, which was sent.
    pub(crate) fn note_sent(&mut self) {
        self.pending = None;
    }

    /// The number of queued entries. It grows if a peer sends requests faster than it reads the answers.
    pub(crate) fn queue_len(&self) -> usize {
        self.queue.len()
    }
}
