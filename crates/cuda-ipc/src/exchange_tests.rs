//! One end announces pieces and the other opens them, both with a fake driver and delayed notes.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;

use crate::exports::{CHECK_EVERY, Exports, MAX_EXPORTS};
use crate::imports::{Imports, Limits, MAX_NAMED, Search, SearchOutcome};
use crate::note::{Entry, MAX_FILES, Piece, RemoteRange, Writer};
use crate::testing::{FakeAllocation, FakeDriver, FakeImport, Rng, UNREACHABLE_GPU};

const LIMITS: Limits = Limits { open: 4, files: 5 };
const MIB: u64 = 1 << 20;

/// Both ends, and the notes in flight between them.
struct Pair {
    driver: FakeDriver,
    exports: Exports<u64>,
    imports: Imports<FakeImport, (u64, u32)>,
    /// The importer's requests to the owner.
    requests: Exports<u64>,
    wire: VecDeque<(Vec<u8>, Vec<OwnedFd>)>,
    notes: usize,
}

impl Pair {
    fn new() -> Pair {
        Pair {
            driver: FakeDriver::default(),
            exports: Exports::new(),
            imports: Imports::new(LIMITS),
            requests: Exports::new(),
            wire: VecDeque::new(),
            notes: 0,
        }
    }

    fn block(&self, address: u64, len: u64, identity: u64) {
        self.driver.allocate(address, FakeAllocation { len, identity, by_file: !identity.is_multiple_of(3) });
    }

    fn describe(&mut self, address: u64, len: usize) -> Result<RemoteRange, String> {
        self.exports.describe(&self.driver, address, len)
    }

    /// Sends the owner's next note; false if there is none.
    fn send(&mut self) -> bool {
        self.exports.prepare_note(&self.driver);
        let Some((bytes, files)) = self.exports.pending_note() else { return false };
        assert!(files.len() <= MAX_FILES);
        let files = files.into_iter().map(|file| file.try_clone_to_owned().expect("dup")).collect();
        self.wire.push_back((bytes.to_vec(), files));
        self.exports.note_sent();
        self.notes += 1;
        true
    }

    /// The importer reads the next note; false if none is in flight.
    fn receive(&mut self) -> bool {
        let Some((bytes, files)) = self.wire.pop_front() else { return false };
        assert_eq!(self.imports.read(&bytes, files), Ok(vec![]));
        true
    }

    /// Delivers the importer's requests to the owner.
    fn answer(&mut self) {
        self.requests.prepare_note(&self.driver);
        let Some((bytes, _)) = self.requests.pending_note() else { return };
        let mut reader = Imports::<FakeImport, (u64, u32)>::new(LIMITS);
        // Each request is sent as the first note of a new exporter.
        let again = reader.read(bytes, vec![]).expect("a note");
        self.requests = Exports::new();
        again.into_iter().for_each(|id| self.exports.resend(id));
    }

    fn all_notes(&mut self) {
        while self.send() {}
        while self.receive() {}
    }

    fn seek(&mut self, search: &mut Search<(u64, u32)>, device: u32) -> Result<SearchOutcome, String> {
        let sought = self.imports.seek(&self.driver, search, device, 2);
        if let Ok(SearchOutcome::ResendNeeded(id)) = sought {
            self.requests.request_resend(id);
            self.answer();
        }
        sought
    }

    /// Searches, with all notes delivered, until all bytes are found.
    fn identities(&mut self, range: RemoteRange, len: usize) -> Result<Vec<u64>, String> {
        let mut search = Search::new(range, len)?;
        for _ in 0..100 {
            self.all_notes();
            if matches!(self.seek(&mut search, 0)?, SearchOutcome::Complete) {
                assert_eq!(search.spans.iter().map(|span| span.len).sum::<usize>(), len);
                return Ok(search.spans.iter().map(|span| span.open.0).collect());
            }
        }
        Err("never there".into())
    }
}

#[test]
fn a_range_of_several_pieces_is_found_and_announced_once() {
    let mut pair = Pair::new();
    for at in 0..6 {
        pair.block(64 * MIB + at * 2 * MIB, 2 * MIB, at + 1);
    }
    let (address, len) = (64 * MIB + 5, 10 * MIB as usize);
    let range = pair.describe(address, len).expect("memory");
    assert_eq!(pair.identities(range, len), Ok(vec![1, 2, 3, 4, 5, 6]));
    let (notes, imports, finds) = (pair.notes, pair.driver.imports.get(), pair.driver.finds.get());
    for _ in 0..10 {
        let range = pair.describe(address + 2 * MIB, 4096).expect("memory");
        assert_eq!(pair.identities(range, 4096), Ok(vec![2]));
    }
    // More pieces than the limit were open: the first were closed, and one of them was announced again, once.
    assert!(pair.notes <= notes + 1 && pair.driver.imports.get() <= imports + 1);
    assert_eq!(pair.driver.finds.get(), finds);
}

#[test]
fn a_new_allocation_at_the_same_address_is_a_new_piece() {
    let mut pair = Pair::new();
    pair.block(MIB, MIB, 1);
    let first = pair.describe(MIB, 100).expect("memory");
    assert_eq!(pair.identities(first, 100), Ok(vec![1]));
    pair.driver.free(MIB);
    pair.block(MIB, MIB, 2);
    let second = pair.describe(MIB, 100).expect("memory");
    assert_ne!(first.piece, second.piece);
    // Before its note arrives nothing is found, in particular not the old piece.
    let mut search = Search::new(second, 100).expect("a range");
    assert!(matches!(pair.seek(&mut search, 0), Ok(SearchOutcome::NoteMissing)));
    assert_eq!(pair.identities(second, 100), Ok(vec![2]));
    let why = pair.identities(first, 100).expect_err("the memory was freed");
    assert!(why.contains("freed"), "{why}");
    pair.driver.free(MIB);
    pair.describe(MIB, 100).expect_err("no memory");
    pair.all_notes();
    assert_eq!(pair.driver.held.get(), 0, "the importer closes freed pieces");
}

#[test]
fn a_piece_freed_before_its_note_is_written_is_withdrawn() {
    let mut pair = Pair::new();
    pair.block(MIB, MIB, 1);
    pair.block(2 * MIB, MIB, 2);
    let gone = pair.describe(MIB, 100).expect("memory");
    let there = pair.describe(2 * MIB, 100).expect("memory");
    pair.driver.free(MIB);
    pair.identities(gone, 100).expect_err("freed");
    assert_eq!(pair.identities(there, 100), Ok(vec![2]));
    assert_eq!(pair.exports.len(), 1);
}

#[test]
fn freed_memory_can_be_announced() {
    let mut pair = Pair::new();
    for at in 1..5 {
        pair.block(at * MIB, MIB, at);
        let range = pair.describe(at * MIB, 100).expect("memory");
        pair.identities(range, 100).expect("memory");
    }
    pair.exports.withdraw(2 * MIB + 5, MIB);
    pair.all_notes();
    assert_eq!((pair.exports.len(), pair.driver.held.get()), (2, 2));
}

#[test]
fn freed_pieces_are_detected_over_time() {
    let mut pair = Pair::new();
    for at in 1..=20 {
        pair.block(at * MIB, MIB, at);
        let range = pair.describe(at * MIB, 100).expect("memory");
        pair.identities(range, 100).expect("memory");
    }
    (2..=20).for_each(|at| assert!(pair.driver.free(at * MIB).is_some()));
    for _ in 0..20 * CHECK_EVERY {
        pair.describe(MIB, 100).expect("memory");
    }
    pair.all_notes();
    assert_eq!((pair.exports.len(), pair.imports.counts()), (1, (0, 0)));
}

#[test]
fn memory_announced_as_freed_is_checked() {
    let mut pair = Pair::new();
    for at in 1..=3 {
        pair.block(at * MIB, MIB, at);
        let range = pair.describe(at * MIB, 100).expect("memory");
        pair.identities(range, 100).expect("memory");
    }
    assert!(pair.driver.free(2 * MIB).is_some() && pair.driver.free(3 * MIB).is_some());
    pair.block(3 * MIB, MIB, 4);
    let range = pair.describe(3 * MIB, 100).expect("memory");
    pair.exports.check_range(&pair.driver, MIB, 3 * MIB);
    pair.all_notes();
    assert_eq!(pair.exports.len(), 2, "only freed pieces are withdrawn");
    assert_eq!(pair.identities(range, 100), Ok(vec![4]));
}

#[test]
fn freed_memory_is_detected_without_new_descriptions() {
    let mut pair = Pair::new();
    for at in 1..=3 {
        pair.block(at * MIB, MIB, at);
        let range = pair.describe(at * MIB, 100).expect("memory");
        pair.identities(range, 100).expect("memory");
    }
    (2..=3).for_each(|at| assert!(pair.driver.free(at * MIB).is_some()));
    pair.exports.tidy(&pair.driver, 8);
    pair.all_notes();
    assert_eq!((pair.exports.len(), pair.driver.held.get()), (1, 1), "the piece described last is withdrawn too");
}

#[test]
fn unused_files_are_closed_and_announced_again() {
    let mut pair = Pair::new();
    let mut ranges = Vec::new();
    for at in 1..=50 {
        pair.driver.allocate(at * MIB, FakeAllocation { len: MIB, identity: at, by_file: true });
        ranges.push(pair.describe(at * MIB, 100).expect("memory"));
    }
    pair.all_notes();
    assert_eq!(pair.imports.counts(), (0, LIMITS.files));
    for (range, identity) in ranges.into_iter().zip(1..) {
        assert_eq!(pair.identities(range, 100), Ok(vec![identity]));
        let (open, files) = pair.imports.counts();
        assert!(open <= LIMITS.open && files <= LIMITS.files && pair.driver.held.get() == open);
    }
}

#[test]
fn files_that_could_not_be_received_are_announced_again() {
    let mut pair = Pair::new();
    pair.driver.allocate(MIB, FakeAllocation { len: MIB, identity: 1, by_file: true });
    let range = pair.describe(MIB, 100).expect("memory");
    assert!(pair.send());
    let (bytes, files) = pair.wire.pop_front().expect("a note");
    assert_eq!(files.len(), 1);
    assert_eq!(pair.imports.read(&bytes, vec![]), Ok(vec![]));
    assert_eq!(pair.identities(range, 100), Ok(vec![1]));
}

#[test]
fn the_oldest_pieces_beyond_the_limit_are_withdrawn() {
    let mut pair = Pair::new();
    for at in 1..=MAX_EXPORTS as u64 + 100 {
        pair.block(at * MIB, MIB, at);
        pair.describe(at * MIB, 100).expect("memory");
        assert!(pair.exports.len() <= MAX_EXPORTS);
    }
    let range = pair.describe(MIB, 100).expect("the oldest is exported again");
    assert_eq!(pair.identities(range, 100), Ok(vec![1]));
}

#[test]
fn a_failing_driver_fails_every_transfer() {
    let mut pair = Pair::new();
    pair.block(MIB, MIB, 1);
    pair.block(3 * MIB, MIB, 3);
    pair.driver.broken.set(true);
    for at in [MIB, 3 * MIB] {
        let range = pair.describe(at, 100).expect("memory");
        for _ in 0..3 {
            assert_eq!(pair.identities(range, 100), Err("the driver is lost".into()));
        }
    }
    assert_eq!(pair.imports.counts(), (0, 0));
}

#[test]
fn each_gpu_opens_its_own_mapping() {
    let mut pair = Pair::new();
    pair.block(MIB, MIB, 1);
    let range = pair.describe(MIB, 100).expect("memory");
    pair.all_notes();
    for device in [0, 1, 0, 1] {
        let mut search = Search::new(range, 100).expect("a range");
        assert!(matches!(pair.seek(&mut search, device), Ok(SearchOutcome::Complete)));
        assert_eq!(*search.spans[0].open, (1, device));
    }
    let mut search = Search::new(range, 100).expect("a range");
    assert_eq!(pair.seek(&mut search, UNREACHABLE_GPU).expect_err("no peer access"), "no peer access");
    assert_eq!(pair.imports.counts().0, 1);
    assert_eq!(
        (pair.imports.owner(range), pair.imports.owner(RemoteRange { piece: 99, ..range })),
        (Some([1; 16]), None)
    );
    let (held, offset) = pair.imports.imported(range, 100, 0).expect("open");
    assert_eq!((held.len(), offset), (1, 0));
}

#[test]
fn invalid_notes_are_rejected() {
    let piece = |id: u32, address: u64| Piece { id, address, len: MIB, device: [1; 16] };
    let handle = |piece| Entry::ByHandle { piece, handle: [0; 64], identity: 0, seal: [0; 16] };
    let note = |entries: &[Entry], upto| {
        let mut writer = Writer::new();
        entries.iter().for_each(|entry| writer.push(entry));
        writer.finish(upto)
    };
    let mut imports = Imports::<FakeImport, (u64, u32)>::new(LIMITS);
    for upto in [0, 2, u64::MAX] {
        imports.read(&note(&[handle(piece(1, MIB))], upto), vec![]).expect_err("out of order");
    }
    imports.read(&note(&[handle(piece(1, MIB))], 1), vec![]).expect("good");
    imports.read(&note(&[handle(piece(1, 9 * MIB))], 2), vec![]).expect_err("a duplicate id");
    let mut upto = 1;
    let mut refused = false;
    for id in 2..MAX_NAMED as u32 + 10 {
        upto += 1;
        refused |= imports.read(&note(&[handle(piece(id, u64::from(id) * MIB))], upto), vec![]).is_err();
        if refused {
            break;
        }
    }
    assert!(refused, "the number of announced pieces is not limited");
}

#[test]
fn under_any_interleaving_no_wrong_memory_is_accessed() {
    for seed in 1..100 {
        let mut numbers = Rng::new(seed);
        let mut pair = Pair::new();
        let (mut identity, mut searches) = (0, Vec::new());
        // The allocations of each range when it was described.
        let mut meant: HashMap<u64, (Vec<u64>, u64)> = HashMap::new();
        for round in 0..400_u64 {
            let slot = (1 + numbers.below(12)) * MIB;
            match numbers.below(7) {
                0 => {
                    identity += 1;
                    pair.driver.free(slot);
                    pair.block(slot, MIB, identity);
                }
                1 => drop(pair.driver.free(slot)),
                2 | 3 => {
                    let (address, len) = (slot + numbers.below(MIB), 1 + numbers.below(3 * MIB) as usize);
                    if let Ok(range) = pair.describe(address, len) {
                        let end = address + len as u64;
                        let starts = pair.driver.starts().into_iter().filter(|at| at + MIB > address && *at < end);
                        let parts = starts.filter_map(|at| pair.driver.at(at)).map(|(_, block)| block.identity);
                        meant.insert(round, (parts.collect(), numbers.below(2)));
                        searches.push((round, Search::new(range, len).expect("a range")));
                    }
                }
                4 => drop(pair.send()),
                5 => drop(pair.receive()),
                _ => {
                    let mut kept = Vec::new();
                    for (name, mut search) in std::mem::take(&mut searches) {
                        match pair.seek(&mut search, meant[&name].1 as u32) {
                            Ok(SearchOutcome::Complete) => {
                                let found: Vec<u64> = search.spans.iter().map(|span| span.open.0).collect();
                                let first = meant[&name].0[0];
                                assert_eq!(found[0], first, "seed {seed}, round {round}");
                                // Later pieces may have been replaced since, if the owner freed memory during a
                                // transfer.
                                assert!(found.iter().zip(&meant[&name].0).all(|(new, old)| new >= old));
                            }
                            Ok(_) => kept.push((name, search)),
                            Err(why) => assert!(why.contains("freed"), "seed {seed}: {why}"),
                        }
                    }
                    searches = kept;
                    let (open, files) = pair.imports.counts();
                    assert!(files <= LIMITS.files, "seed {seed}");
                    assert!(pair.driver.held.get() >= open.min(1) && open <= 12);
                }
            }
        }
    }
}
