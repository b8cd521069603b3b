//! What this process has passed on to one peer: the owner's side.
//!
//! Nothing tells us that somebody has freed memory, and an address that was given to one allocation is given to the
//! next. So every time memory is described, the driver is asked whether what lies there is still what was passed on;
//! and now and then, a few of the other pieces are looked at too, so that the peer lets go of those that are gone.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::note::{Entry, LegacyHandle, Piece, Place, Seal, Uuid, Writer};

/// The most pieces that a peer is told of at a time.
pub(crate) const MOST_EXPORTS: usize = 4096;
/// Every so many times that memory is described, so many other pieces are looked at.
pub(crate) const LOOK_EVERY: u64 = 16;
const LOOKED_AT: usize = 2;
/// The most pieces that one transfer lies in: 64 GiB of an expandable segment's 2 MiB parts.
pub(crate) const MOST_PIECES: usize = 32_768;

/// One piece of memory, as the driver shows it to its owner.
#[derive(Debug)]
pub(crate) struct Found<K> {
    /// Where it begins.
    pub(crate) address: u64,
    /// Bytes.
    pub(crate) len: u64,
    /// The GPU.
    pub(crate) device: Uuid,
    /// What tells it from every other that was or will be there.
    pub(crate) known: K,
}

/// How a piece is handed to another process.
#[derive(Debug)]
pub(crate) enum Handed {
    File { file: OwnedFd, seal: Seal },
    Handle { handle: LegacyHandle, identity: u64, seal: Seal },
}

/// The driver, as an owner of memory needs it.
pub(crate) trait Source {
    /// What tells one allocation from another.
    type Known;
    /// The piece that `address` lies in; `Err` says why it can't be passed on.
    fn find(&self, address: u64) -> Result<Found<Self::Known>, String>;
    /// Whether that piece still lies where it was found.
    fn still(&self, found: &Found<Self::Known>) -> bool;
    /// What another process needs to open it.
    fn hand(&self, found: &Found<Self::Known>) -> Result<Handed, String>;
}

#[derive(Debug)]
struct Export<K> {
    id: u32,
    found: Found<K>,
    used: u64,
}

/// What is still to be said, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Said {
    Piece(u32),
    Gone(u32),
    Again(u32),
}

/// A note that waits to be passed.
#[derive(Debug)]
struct Ready {
    bytes: Vec<u8>,
    files: Vec<OwnedFd>,
}

/// The pieces that one peer knows or will know, and the notes for it.
#[derive(Debug)]
pub(crate) struct Exports<K> {
    by_address: BTreeMap<u64, Export<K>>,
    addresses: HashMap<u32, u64>,
    last_id: u32,
    queue: VecDeque<Said>,
    queued: HashSet<Said>,
    /// Entries queued so far; entries in notes so far.
    said: u64,
    written: u64,
    ready: Option<Ready>,
    uses: u64,
    looked_at: u64,
}

impl<K> Exports<K> {
    pub(crate) fn new() -> Exports<K> {
        Exports {
            by_address: BTreeMap::new(),
            addresses: HashMap::new(),
            last_id: 0,
            queue: VecDeque::new(),
            queued: HashSet::new(),
            said: 0,
            written: 0,
            ready: None,
            uses: 0,
            looked_at: 0,
        }
    }

    /// How many pieces the peer is told of.
    pub(crate) fn len(&self) -> usize {
        self.by_address.len()
    }

    /// Says where `len` bytes at `address` are, and sees to it that the peer is told of the pieces they lie in.
    pub(crate) fn describe(
        &mut self,
        source: &impl Source<Known = K>,
        address: u64,
        len: usize,
    ) -> Result<Place, String> {
        let end = address.checked_add(len as u64).filter(|_| len > 0 && address > 0);
        let end = end.ok_or_else(|| format!("{len} bytes at {address:#x} are no memory"))?;
        self.uses += 1;
        let (mut at, mut first, mut count) = (address, None, 0);
        while at < end {
            count += 1;
            if count > MOST_PIECES {
                return Err(format!("{len} bytes at {address:#x} are more than {MOST_PIECES} allocations"));
            }
            let export = self.piece_at(source, at)?;
            first.get_or_insert(export.id);
            at = export.found.address.saturating_add(export.found.len);
        }
        if self.uses.is_multiple_of(LOOK_EVERY) {
            self.look_around(source);
        }
        self.make_room();
        let piece = first.unwrap_or_default();
        Ok(Place { piece, address, after: self.said })
    }

    /// The piece that holds `address`, told to the peer if it was not.
    fn piece_at(&mut self, source: &impl Source<Known = K>, address: u64) -> Result<&mut Export<K>, String> {
        let known = self.by_address.range(..=address).next_back().map(|(_, export)| export);
        let known = known.filter(|export| address - export.found.address < export.found.len);
        let key = match known.map(|export| (export.found.address, source.still(&export.found))) {
            Some((key, true)) => key,
            gone => {
                if let Some((key, _)) = gone {
                    self.forget(key);
                }
                let found = source.find(address)?;
                let inside = address.checked_sub(found.address).is_some_and(|before| before < found.len);
                if !inside || found.address.checked_add(found.len).is_none() {
                    return Err(format!("the driver's answer for {address:#x} does not contain it"));
                }
                self.add(found)
            }
        };
        let uses = self.uses;
        let export = self.by_address.get_mut(&key).ok_or("a piece that is not there")?;
        export.used = uses;
        Ok(export)
    }

    fn add(&mut self, found: Found<K>) -> u64 {
        let (address, end) = (found.address, found.address + found.len);
        // What was there before is gone, or the driver would not have found this.
        let before = self.by_address.range(..address).next_back();
        let before = before.filter(|(at, export)| *at + export.found.len > address).map(|(at, _)| *at);
        let inside: Vec<u64> = self.by_address.range(address..end).map(|(at, _)| *at).chain(before).collect();
        inside.into_iter().for_each(|at| self.forget(at));
        self.last_id = self.last_id.wrapping_add(1).max(1);
        let id = self.last_id;
        self.addresses.insert(id, address);
        self.by_address.insert(address, Export { id, found, used: self.uses });
        self.say(Said::Piece(id));
        address
    }

    fn forget(&mut self, address: u64) {
        if let Some(export) = self.by_address.remove(&address) {
            self.addresses.remove(&export.id);
            self.say(Said::Gone(export.id));
        }
    }

    /// Looks at `count` pieces, also at those that were described last.
    pub(crate) fn tidy(&mut self, source: &impl Source<Known = K>, count: usize) {
        self.uses += 1;
        for _ in 0..count.min(self.by_address.len()).div_ceil(LOOKED_AT) {
            self.look_around(source);
        }
    }

    /// Looks at a few pieces, but at none that the present transfer needs. Returns whether any was gone.
    pub(crate) fn look_around(&mut self, source: &impl Source<Known = K>) -> bool {
        let mut gone = false;
        for _ in 0..LOOKED_AT.min(self.by_address.len()) {
            let next = self.by_address.range(self.looked_at.saturating_add(1)..).next();
            let Some((address, export)) = next.or_else(|| self.by_address.iter().next()) else { break };
            let address = *address;
            self.looked_at = address;
            if export.used < self.uses && !source.still(&export.found) {
                self.forget(address);
                gone = true;
            }
        }
        gone
    }

    /// Forgets what lies in `[address, address + len)`: its owner is about to free it.
    pub(crate) fn freed(&mut self, address: u64, len: u64) {
        let end = address.saturating_add(len);
        let overlaps = |at: u64, export: &Export<K>| at < end && at.saturating_add(export.found.len) > address;
        let gone: Vec<u64> =
            self.by_address.iter().filter(|(at, export)| overlaps(**at, export)).map(|(at, _)| *at).collect();
        gone.into_iter().for_each(|at| self.forget(at));
    }

    /// Looks at what lies in `[address, address + len)`, which somebody has freed; other memory may lie there by now.
    pub(crate) fn look_at(&mut self, source: &impl Source<Known = K>, address: u64, len: u64) {
        let end = address.saturating_add(len);
        let overlaps = |at: u64, export: &Export<K>| at < end && at.saturating_add(export.found.len) > address;
        let there = self.by_address.iter().filter(|(at, export)| overlaps(**at, export));
        let gone: Vec<u64> = there.filter(|(_, export)| !source.still(&export.found)).map(|(at, _)| *at).collect();
        gone.into_iter().for_each(|at| self.forget(at));
    }

    /// Lets go of the pieces unused longest, but of none that the present transfer needs.
    fn make_room(&mut self) {
        let excess = self.by_address.len().saturating_sub(MOST_EXPORTS);
        if excess == 0 {
            return;
        }
        let mut by_use: Vec<(u64, u64)> =
            self.by_address.iter().map(|(address, export)| (export.used, *address)).collect();
        by_use.sort_unstable();
        for (used, address) in by_use.into_iter().take(excess) {
            if used < self.uses {
                self.forget(address);
            }
        }
    }

    fn say(&mut self, said: Said) {
        self.queue.push_back(said);
        self.queued.insert(said);
        self.said += 1;
    }

    /// The peer needs that piece once more.
    pub(crate) fn again(&mut self, id: u32) {
        let answer = if self.addresses.contains_key(&id) { Said::Piece(id) } else { Said::Gone(id) };
        // An answer that is on its way is one: so many questions, so few answers.
        if !self.queued.contains(&answer) {
            self.say(answer);
        }
    }

    /// Asks the peer for one of its pieces once more.
    pub(crate) fn ask_again(&mut self, id: u32) {
        if !self.queued.contains(&Said::Again(id)) {
            self.say(Said::Again(id));
        }
    }

    /// Makes the next note ready, if there is anything to say. Handles are made only now, so that few are open at
    /// a time; a piece that was freed meanwhile is said to be gone.
    pub(crate) fn prepare(&mut self, source: &impl Source<Known = K>) {
        if self.ready.is_some() || self.queue.is_empty() {
            return;
        }
        let mut writer = Writer::new();
        let mut files = Vec::new();
        while let Some(said) = self.queue.front().copied() {
            let (entry, file) = match said {
                Said::Piece(id) => self.hand(source, id),
                Said::Gone(id) => (Entry::Gone(id), None),
                Said::Again(id) => (Entry::Again(id), None),
            };
            if !writer.fits(&entry) {
                break;
            }
            writer.push(&entry);
            files.extend(file);
            self.queue.pop_front();
            self.queued.remove(&said);
            self.written += 1;
        }
        self.ready = Some(Ready { bytes: writer.finish(self.written), files });
    }

    fn hand(&mut self, source: &impl Source<Known = K>, id: u32) -> (Entry, Option<OwnedFd>) {
        let export = self.addresses.get(&id).and_then(|address| self.by_address.get(address));
        let handed = export.map(|export| {
            let found = &export.found;
            let piece = Piece { id, address: found.address, len: found.len, device: found.device };
            (piece, if source.still(found) { source.hand(found) } else { Err("freed".into()) })
        });
        match handed {
            Some((piece, Ok(Handed::File { file, seal }))) => (Entry::ByFile { piece, seal }, Some(file)),
            Some((piece, Ok(Handed::Handle { handle, identity, seal }))) => {
                (Entry::ByHandle { piece, handle, identity, seal }, None)
            }
            Some((piece, Err(_))) => {
                self.by_address.remove(&piece.address);
                self.addresses.remove(&id);
                (Entry::Gone(id), None)
            }
            None => (Entry::Gone(id), None),
        }
    }

    /// The note to be passed next.
    pub(crate) fn ready(&self) -> Option<(&[u8], Vec<BorrowedFd<'_>>)> {
        self.ready.as_ref().map(|ready| (ready.bytes.as_slice(), ready.files.iter().map(AsFd::as_fd).collect()))
    }

    /// It was passed.
    pub(crate) fn passed(&mut self) {
        self.ready = None;
    }

    /// Entries that have yet to go into a note: a peer that asks faster than it reads makes this grow.
    pub(crate) fn waiting(&self) -> usize {
        self.queue.len()
    }
}
