//! What a stranger's notes and descriptors go through, without a driver: the target of `fuzz/`, and what it starts from.

use std::os::fd::OwnedFd;

use crate::exports::{Exports, Found, Handed, MOST_EXPORTS, Source};
use crate::imports::{Imports, Limits, Opener, Pass, Search, Sought};
use crate::note::{Entry, LONGEST_NOTE, Note, Piece, Place, Writer};

const LIMITS: Limits = Limits { open: 3, files: 2 };
const WHOLE_NOTE: u8 = 1;
const PLACE: u8 = 2;

/// A driver that has one allocation at each multiple of 1 MiB, and takes everything over.
struct Willing;

impl Source for Willing {
    type Known = ();

    fn find(&self, address: u64) -> Result<Found<()>, String> {
        let start = address & !0xf_ffff;
        let end = start.checked_add(1 << 20).filter(|_| start > 0).ok_or("nothing lies there")?;
        Ok(Found { address: start, len: end - start, device: [0; 16], known: () })
    }

    fn still(&self, found: &Found<()>) -> bool {
        !found.address.is_multiple_of(3)
    }

    fn hand(&self, found: &Found<()>) -> Result<Handed, String> {
        Ok(Handed::Handle { handle: [0; 64], identity: found.address, seal: [0; 16] })
    }
}

impl Opener for Willing {
    type Held = u64;
    type Open = u64;

    fn reach(&self, piece: &Piece, device: u32) -> Result<(), String> {
        if u32::from(piece.device[0]) == device { Ok(()) } else { Err("no peer access".into()) }
    }

    fn take(&self, piece: &Piece, _pass: Pass<'_>, _device: u32) -> Result<u64, String> {
        if piece.len.is_multiple_of(5) { Err("refused".into()) } else { Ok(piece.len) }
    }

    fn open(&self, piece: &Piece, held: &u64, _device: u32) -> Result<u64, String> {
        assert_eq!(*held, piece.len, "a piece is opened from another's handle");
        Ok(piece.len)
    }
}

/// Reads the input as notes and descriptors of a peer, and panics when something is wrong here. How many transfers found
/// all their bytes.
pub fn stranger(input: &[u8]) -> usize {
    let mut found = 0;
    let (mut imports, mut exports) = (Imports::<u64, u64>::new(LIMITS), Exports::<()>::new());
    let (mut upto, mut rest) = (0_u64, input);
    while let Some((kind, after)) = rest.split_first() {
        let (part, after) = after.split_at(after.len().min(match kind % 3 {
            PLACE => 28,
            _ => after.first_chunk::<2>().map_or(2, |len| 2 + usize::from(u16::from_le_bytes(*len))),
        }));
        rest = after;
        match kind % 3 {
            PLACE => found += usize::from(seek(&mut imports, &mut exports, part)),
            kind => {
                let mut note = part.get(2..).unwrap_or_default().to_vec();
                if kind == WHOLE_NOTE && note.len() >= 16 {
                    // As an honest peer counts, so that what comes after it is read too.
                    let count = u64::from(u16::from_le_bytes([note[2], note[3]]));
                    note[8..16].copy_from_slice(&(upto + count).to_le_bytes());
                }
                let Ok(again) = imports.read(&note, Vec::<OwnedFd>::new()) else { return found };
                upto = Note::decode(&note, 0).map_or(upto, |note| note.upto);
                again.into_iter().for_each(|id| exports.again(id));
            }
        }
        exports.prepare(&Willing);
        if let Some((note, files)) = exports.ready() {
            assert!(note.len() <= LONGEST_NOTE && files.is_empty());
            assert!(Note::decode(note, 0).is_ok(), "what we say can't be read");
            exports.passed();
        }
        let (open, files) = imports.counts();
        assert!(files == 0 && open <= LIMITS.open && exports.len() <= MOST_EXPORTS);
    }
    found
}

/// Looks for what a descriptor names, to its end.
fn seek(imports: &mut Imports<u64, u64>, exports: &mut Exports<()>, part: &[u8]) -> bool {
    let Some((descriptor, len)) = part.split_first_chunk::<24>() else { return false };
    let len = len.first_chunk::<4>().map_or(0, |len| u32::from_le_bytes(*len)) as usize;
    let Ok(place) = Place::decode(descriptor) else { return false };
    let _ = exports.describe(&Willing, place.address, len % (4 << 20));
    let Ok(mut search) = Search::new(place, len) else { return false };
    loop {
        match imports.seek(&Willing, &mut search, 0, 2) {
            Ok(Sought::More) => {}
            Ok(Sought::Again(id)) => exports.ask_again(id),
            Ok(Sought::All) => {
                let found: usize = search.spans.iter().map(|span| span.len).sum();
                let inside = |span: &crate::imports::Span<u64>| span.offset + span.len as u64 <= *span.open;
                assert!(found == len && search.spans.iter().all(inside), "bytes outside of the peer's pieces");
                return true;
            }
            Ok(Sought::Missing) | Err(_) => return false,
        }
    }
}

/// Well-formed inputs: their names and bytes.
pub fn stranger_seeds() -> Vec<(&'static str, Vec<u8>)> {
    let piece = |id: u32| Piece { id, address: u64::from(id) << 20, len: 1 << 20, device: [0; 16] };
    let handle = |id| Entry::ByHandle { piece: piece(id), handle: [7; 64], identity: 9, seal: [1; 16] };
    let file = |id| Entry::ByFile { piece: piece(id), seal: [1; 16] };
    let note = |entries: &[Entry], upto| {
        let mut writer = Writer::new();
        entries.iter().for_each(|entry| writer.push(entry));
        let bytes = writer.finish(upto);
        [&[WHOLE_NOTE][..], &(bytes.len() as u16).to_le_bytes(), &bytes].concat()
    };
    let place = |piece: u32, after, len: u32| {
        let place = Place { piece, address: (u64::from(piece) << 20) + 5, after };
        [&[PLACE][..], &place.encode(), &len.to_le_bytes()].concat()
    };
    vec![
        ("handles", [note(&[handle(1), handle(2), handle(3)], 3), place(1, 3, 100), place(1, 3, 3 << 19)].concat()),
        ("files", [note(&[file(4), file(5)], 2), place(4, 2, 4096)].concat()),
        ("gone", [note(&[handle(1), Entry::Gone(1), Entry::Again(7)], 3), place(1, 3, 100)].concat()),
        ("late", [place(1, 1, 100), note(&[handle(1)], 1), place(1, 1, 100)].concat()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Numbers;

    #[test]
    fn whatever_a_stranger_says_this_end_stays_whole() {
        let seeds: Vec<Vec<u8>> = stranger_seeds().into_iter().map(|(_, bytes)| bytes).collect();
        let mut numbers = Numbers::new(99);
        for turn in 0..20_000 {
            let mut input = seeds[turn % seeds.len()].clone();
            if turn >= seeds.len() {
                input.extend_from_slice(&seeds[numbers.below(seeds.len() as u64) as usize]);
                for _ in 0..numbers.below(6) {
                    let at = numbers.below(input.len() as u64) as usize;
                    input[at] = numbers.below(256) as u8;
                }
            }
            let found = stranger(&input);
            assert!(turn >= seeds.len() || found == [2, 0, 0, 1][turn], "seed {turn}: {found}");
        }
    }
}
