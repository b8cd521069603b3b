//! Fuzzing of notes and descriptors from an untrusted peer, without a driver: the target of `fuzz/gpu`, and its seeds.

use std::os::fd::OwnedFd;

use crate::exports::{ExportDriver, ExportedHandle, Exports, FoundPiece, MAX_EXPORTS};
use crate::imports::{ImportDriver, Imports, Limits, ReceivedHandle, Search, SearchOutcome, Span};
use crate::note::{Entry, MAX_NOTE_LEN, Note, Piece, RemoteRange, Writer};

const LIMITS: Limits = Limits { open: 3, files: 2 };
/// Tags of the input's parts: a note with a correct entry count, and a descriptor with a length.
const NOTE: u8 = 1;
const DESCRIPTOR: u8 = 2;

/// A driver with an allocation at each multiple of 1 MiB.
struct FakeDriver;

impl ExportDriver for FakeDriver {
    type Identity = ();

    fn find(&self, address: u64) -> Result<FoundPiece<()>, String> {
        let start = address & !0xf_ffff;
        let end = start.checked_add(1 << 20).filter(|_| start > 0).ok_or("no memory")?;
        Ok(FoundPiece { address: start, len: end - start, device: [0; 16], identity: () })
    }

    fn is_current(&self, found: &FoundPiece<()>) -> bool {
        !found.address.is_multiple_of(3)
    }

    fn export(&self, found: &FoundPiece<()>) -> Result<ExportedHandle, String> {
        Ok(ExportedHandle::Handle { handle: [0; 64], identity: found.address, seal: [0; 16] })
    }
}

impl ImportDriver for FakeDriver {
    type Imported = u64;
    type Opened = u64;

    fn reach(&self, piece: &Piece, device: u32) -> Result<(), String> {
        if u32::from(piece.device[0]) == device { Ok(()) } else { Err("no peer access".into()) }
    }

    fn import(&self, piece: &Piece, _pass: ReceivedHandle<'_>, _device: u32) -> Result<u64, String> {
        if piece.len.is_multiple_of(5) { Err("refused".into()) } else { Ok(piece.len) }
    }

    fn open(&self, piece: &Piece, held: &u64, _device: u32) -> Result<u64, String> {
        assert_eq!(*held, piece.len, "a piece was opened with the handle of another");
        Ok(piece.len)
    }
}

/// Feeds the input to a link as notes and descriptors of a peer. Returns the number of transfers that found all their
/// bytes.
///
/// # Panics
/// If an invariant is violated.
pub fn run(input: &[u8]) -> usize {
    let mut found = 0;
    let (mut imports, mut exports) = (Imports::<u64, u64>::new(LIMITS), Exports::<()>::new());
    let (mut upto, mut rest) = (0_u64, input);
    while let Some((kind, after)) = rest.split_first() {
        let (part, after) = after.split_at(after.len().min(match kind % 3 {
            DESCRIPTOR => 28,
            _ => after.first_chunk::<2>().map_or(2, |len| 2 + usize::from(u16::from_le_bytes(*len))),
        }));
        rest = after;
        match kind % 3 {
            DESCRIPTOR => found += usize::from(seek(&mut imports, &mut exports, part)),
            kind => {
                let mut note = part.get(2..).unwrap_or_default().to_vec();
                if kind == NOTE && note.len() >= 16 {
                    // Numbers the entries as a correct peer does, so that the rest of the input is processed too.
                    let count = u64::from(u16::from_le_bytes([note[2], note[3]]));
                    note[8..16].copy_from_slice(&(upto + count).to_le_bytes());
                }
                let Ok(resend) = imports.read(&note, Vec::<OwnedFd>::new()) else { return found };
                upto = Note::decode(&note, 0).map_or(upto, |note| note.upto);
                resend.into_iter().for_each(|id| exports.resend(id));
            }
        }
        exports.prepare_note(&FakeDriver);
        if let Some((note, files)) = exports.pending_note() {
            assert!(note.len() <= MAX_NOTE_LEN && files.is_empty());
            assert!(Note::decode(note, 0).is_ok(), "a note cannot be decoded");
            exports.note_sent();
        }
        let (open, files) = imports.counts();
        assert!(files == 0 && open <= LIMITS.open && exports.len() <= MAX_EXPORTS);
    }
    found
}

/// Searches for the memory of a descriptor until the search ends.
fn seek(imports: &mut Imports<u64, u64>, exports: &mut Exports<()>, part: &[u8]) -> bool {
    let Some((descriptor, len)) = part.split_first_chunk::<24>() else { return false };
    let len = len.first_chunk::<4>().map_or(0, |len| u32::from_le_bytes(*len)) as usize;
    let Ok(range) = RemoteRange::decode(descriptor) else { return false };
    let _ = exports.describe(&FakeDriver, range.address, len % (4 << 20));
    let Ok(mut search) = Search::new(range, len) else { return false };
    loop {
        match imports.seek(&FakeDriver, &mut search, 0, 2) {
            Ok(SearchOutcome::BudgetSpent) => {}
            Ok(SearchOutcome::ResendNeeded(id)) => exports.request_resend(id),
            Ok(SearchOutcome::Complete) => {
                let found: usize = search.spans.iter().map(|span| span.len).sum();
                let inside = |span: &Span<u64>| span.offset + span.len as u64 <= *span.open;
                assert!(found == len && search.spans.iter().all(inside), "a span outside of the peer's pieces");
                return true;
            }
            Ok(SearchOutcome::NoteMissing) | Err(_) => return false,
        }
    }
}

/// Well-formed inputs: their names and bytes.
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let piece = |id: u32| Piece { id, address: u64::from(id) << 20, len: 1 << 20, device: [0; 16] };
    let handle = |id| Entry::ByHandle { piece: piece(id), handle: [7; 64], identity: 9, seal: [1; 16] };
    let file = |id| Entry::ByFile { piece: piece(id), seal: [1; 16] };
    let note = |entries: &[Entry], upto| {
        let mut writer = Writer::new();
        entries.iter().for_each(|entry| writer.push(entry));
        let bytes = writer.finish(upto);
        [&[NOTE][..], &(bytes.len() as u16).to_le_bytes(), &bytes].concat()
    };
    let place = |piece: u32, after, len: u32| {
        let place = RemoteRange { piece, address: (u64::from(piece) << 20) + 5, after };
        [&[DESCRIPTOR][..], &place.encode(), &len.to_le_bytes()].concat()
    };
    vec![
        ("handles", [note(&[handle(1), handle(2), handle(3)], 3), place(1, 3, 100), place(1, 3, 3 << 19)].concat()),
        ("files", [note(&[file(4), file(5)], 2), place(4, 2, 4096)].concat()),
        ("gone", [note(&[handle(1), Entry::Withdrawn(1), Entry::Resend(7)], 3), place(1, 3, 100)].concat()),
        ("late", [place(1, 1, 100), note(&[handle(1)], 1), place(1, 1, 100)].concat()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Rng;

    #[test]
    fn any_input_keeps_the_invariants() {
        let seeds: Vec<Vec<u8>> = seeds().into_iter().map(|(_, bytes)| bytes).collect();
        let mut numbers = Rng::new(99);
        for turn in 0..20_000 {
            let mut input = seeds[turn % seeds.len()].clone();
            if turn >= seeds.len() {
                input.extend_from_slice(&seeds[numbers.below(seeds.len() as u64) as usize]);
                for _ in 0..numbers.below(6) {
                    let at = numbers.below(input.len() as u64) as usize;
                    input[at] = numbers.below(256) as u8;
                }
            }
            let found = run(&input);
            assert!(turn >= seeds.len() || found == [2, 0, 0, 1][turn], "seed {turn}: {found}");
        }
    }
}
