//! [`Lane::send_note`](crate::Lane::send_note): bytes and descriptors beside the frames.

use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsFd;

use crate::{LaneError, NOTE_FILES, NOTE_MAX, ReceivedNote};

use super::harness::{End, PLAIN, drive, pattern};

/// Whether the lane passes notes at all; an empty one is on its way then.
fn passes(end: &mut End) -> bool {
    match end.lane.send_note(&[], &[]) {
        Ok(true) => true,
        Err(LaneError::Protocol(_)) => {
            assert!(end.lane.recv_note().is_none(), "{}: notes where none are passed", end.label);
            eprintln!("{}: skipped: the lane passes no notes", end.label);
            false
        }
        other => panic!("{}: an empty note on a fresh lane gave {other:?}", end.label),
    }
}

fn pass(end: &mut End, note: &[u8], pipes: &[PipeWriter]) -> bool {
    let files: Vec<_> = pipes.iter().map(AsFd::as_fd).collect();
    end.lane.send_note(note, &files).unwrap_or_else(|error| panic!("{}: {error}", end.label))
}

fn take(end: &mut End, other: &mut End) -> ReceivedNote {
    let mut found = None;
    drive(other, end, 1 << 20, |_, end| {
        found = end.lane.recv_note();
        found.is_some()
    });
    found.unwrap_or_else(|| unreachable!())
}

/// The peer's descriptors are the other ends of our pipes.
fn check_pipes(passed: ReceivedNote, mut readers: Vec<PipeReader>, label: &str) {
    assert_eq!((passed.files.len(), passed.lost), (readers.len(), 0), "{label}: descriptors");
    for (at, file) in passed.files.into_iter().enumerate() {
        PipeWriter::from(file).write_all(&[at as u8]).expect("the other end of our pipe");
    }
    for (at, reader) in readers.iter_mut().enumerate() {
        let mut got = Vec::new();
        reader.read_to_end(&mut got).expect("our end of the pipe");
        assert_eq!(got, [at as u8], "{label}: descriptor {at} is another one, or was kept open");
    }
}

pub(super) fn both_ways(mut a: End, mut b: End) {
    if !passes(&mut a) {
        return;
    }
    assert_eq!(take(&mut b, &mut a).note, []);
    let longest = pattern(1, NOTE_MAX);
    for (here, there) in [(true, 0), (false, 1), (true, NOTE_FILES)] {
        let (from, to) = if here { (&mut a, &mut b) } else { (&mut b, &mut a) };
        for seq in 0..50 {
            from.queue(PLAIN, seq, 5000);
        }
        let pipes: Vec<_> = (0..there).map(|_| std::io::pipe().expect("a pipe")).collect();
        let (readers, writers): (Vec<_>, Vec<_>) = pipes.into_iter().unzip();
        assert!(pass(from, &longest, &writers), "{}: no room for one note", from.label);
        assert!(pass(from, b"second", &[]), "{}: no room for two notes", from.label);
        drop(writers);
        let passed = take(to, from);
        assert_eq!(passed.note, longest, "{}", to.label);
        check_pipes(passed, readers, &to.label);
        assert_eq!(take(to, from).note, b"second", "{}", to.label);
        drive(from, to, 1 << 20, |from, to| from.all_sent() && to.all_placed());
    }
    let error = a.lane.send_note(&[0; NOTE_MAX + 1], &[]);
    assert!(matches!(error, Err(LaneError::Protocol(_))), "{}: too long: {error:?}", a.label);
    let (_reader, writer) = std::io::pipe().expect("a pipe");
    let error = a.lane.send_note(&[], &[writer.as_fd(); NOTE_FILES + 1]);
    assert!(matches!(error, Err(LaneError::Protocol(_))), "{}: too many descriptors: {error:?}", a.label);
    assert!(pass(&mut a, b"goes on", &[]));
    assert_eq!(take(&mut b, &mut a).note, b"goes on");
    if b.lane.fd().is_some() {
        b.watch();
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(pass(&mut a, b"wake up", &[])));
            b.sleep_until(|end| end.lane.recv_note().is_some());
        });
    }
}

pub(super) fn untaken(mut a: End, mut b: End) {
    if !passes(&mut a) {
        return;
    }
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let writers = [writer];
    let mut sent = 1u32;
    while pass(&mut a, &sent.to_le_bytes(), if sent.is_multiple_of(3) { &writers } else { &[] }) {
        sent += 1;
        assert!(sent < 10_000, "{}: never full", a.label);
        b.step(1 << 20);
    }
    // Frames go on all the same.
    a.queue(PLAIN, 0, 5000);
    b.queue(PLAIN, 0, 5000);
    drive(&mut a, &mut b, 1 << 20, |a, b| a.is_through(1) && b.is_through(1));
    assert!(!pass(&mut a, b"one more", &[]), "{}: room without any note taken", a.label);
    for seq in 0..sent {
        let passed = take(&mut b, &mut a);
        let expected: &[u8] = if seq == 0 { &[] } else { &seq.to_le_bytes() };
        assert_eq!(passed.note, expected, "{}: in order", b.label);
        assert_eq!(
            (passed.files.len(), passed.lost),
            (usize::from(seq > 0 && seq.is_multiple_of(3)), 0),
            "{}: {seq}",
            b.label
        );
    }
    assert!(b.lane.recv_note().is_none(), "{}: a note too many", b.label);
    drive(&mut a, &mut b, 1 << 20, |a, _| pass(a, b"again", &[]));
    assert_eq!(take(&mut b, &mut a).note, b"again", "{}", b.label);
    // What is still on the way when the lanes go is closed with them.
    assert!(pass(&mut a, b"lost", &writers));
    b.step(1 << 20);
    drop((a, b, writers));
    let mut rest = Vec::new();
    { reader }.read_to_end(&mut rest).expect("nobody holds the other end any more");
}
