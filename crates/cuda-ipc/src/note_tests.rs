use super::*;
use crate::testing::Rng;

fn some_piece(id: u32) -> Piece {
    Piece { id, address: 0x7f00_0000_0000 + u64::from(id) * 4096, len: 4096, device: [id as u8; 16] }
}

fn some_entries() -> Vec<Entry> {
    vec![
        Entry::ByFile { piece: some_piece(7), seal: [6; 16] },
        Entry::Withdrawn(3),
        Entry::ByHandle { piece: some_piece(8), handle: [9; 64], identity: 77, seal: [5; 16] },
        Entry::Resend(u32::MAX),
        Entry::ByFile { piece: some_piece(9), seal: [0; 16] },
    ]
}

fn written(entries: &[Entry], upto: u64) -> Vec<u8> {
    let mut writer = Writer::new();
    for entry in entries {
        assert!(writer.fits(entry));
        writer.push(entry);
    }
    writer.finish(upto)
}

#[test]
fn what_is_written_is_read() {
    let bytes = written(&some_entries(), 41);
    assert_eq!(Note::decode(&bytes, 2), Ok(Note { upto: 41, entries: some_entries() }));
    let place = RemoteRange { piece: 5, address: 0x7fff_1234_5678, after: 99 };
    assert_eq!(RemoteRange::decode(&place.encode()), Ok(place));
}

#[test]
fn a_note_is_never_longer_than_a_lane_passes() {
    for entry in some_entries() {
        let mut writer = Writer::new();
        let mut count = 0;
        while writer.fits(&entry) {
            writer.push(&entry);
            count += 1;
        }
        let files = if matches!(entry, Entry::ByFile { .. }) { count } else { 0 };
        assert!(files <= MAX_FILES && count > 0);
        let bytes = writer.finish(1);
        assert!(bytes.len() <= MAX_NOTE_LEN);
        assert_eq!(Note::decode(&bytes, files).map(|note| note.entries.len()), Ok(count));
    }
}

#[test]
fn what_does_not_follow_the_form_is_refused() {
    let good = written(&some_entries(), 41);
    for files in [1, 3, 16, usize::MAX] {
        Note::decode(&good, files).expect_err("files that nobody named");
    }
    for len in 0..good.len() {
        Note::decode(&good[..len], 2).expect_err("a cut note");
    }
    Note::decode(&[good.clone(), vec![0]].concat(), 2).expect_err("a byte too many");
    Note::decode(&written(&[], 1), 0).expect_err("nothing");
    Note::decode(&vec![KIND; MAX_NOTE_LEN + 1], 0).expect_err("too long");
    let bad = |change: fn(&mut Piece)| {
        let mut piece = some_piece(1);
        change(&mut piece);
        Note::decode(&written(&[Entry::ByFile { piece, seal: [0; 16] }], 1), 1).expect_err("a piece that can't be")
    };
    bad(|piece| piece.len = 0);
    bad(|piece| piece.id = 0);
    bad(|piece| piece.address = 0);
    bad(|piece| piece.len = u64::MAX - 4096);
    for kind in [0, 1, 2, 15, 17, 255] {
        let mut place = RemoteRange { piece: 1, address: 1, after: 1 }.encode();
        place[0] = kind;
        assert!(RemoteRange::decode(&place).is_err_and(|why| why.contains(&format!("kind {kind}"))));
    }
}

#[test]
fn any_bytes_are_read_or_refused() {
    let mut numbers = Rng::new(0x5eed);
    let good = written(&some_entries(), 41);
    let mut read = 0;
    for _ in 0..200_000 {
        let mut bytes = good.clone();
        for _ in 0..=numbers.below(4) {
            let at = numbers.below(bytes.len() as u64) as usize;
            bytes[at] = numbers.below(256) as u8;
        }
        bytes.truncate(good.len() - numbers.below(3).saturating_sub(1) as usize);
        if let Ok(note) = Note::decode(&bytes, 2) {
            read += 1;
            assert_eq!(written(&note.entries, note.upto), bytes, "what was read is what was there");
        }
        let noise: Vec<u8> = (0..numbers.below(600)).map(|_| numbers.below(256) as u8).collect();
        let _ = Note::decode(&noise, numbers.below(3) as usize);
    }
    assert!(read > 1000, "only {read} of the changed notes could be read: the test tests little");
}
