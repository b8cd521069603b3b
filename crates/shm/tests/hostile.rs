//! A peer that speaks the handshake by hand and then passes memory that it could take away again.
#![allow(unsafe_code)]

mod common;

use std::io::{IoSlice, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;

use crossrail_shm::{Arena, Options, ShmLane, Side, attach};
use crossrail_transport::{Lane, LaneError};
use crossrail_types::{Error, ErrorKind, LaneId, Result};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

const RING: u64 = 1 << 20;

fn memfd(len: i64, seals: SealFlag) -> OwnedFd {
    let fd = memfd_create("hostile", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).expect("memfd");
    nix::unistd::ftruncate(&fd, len).expect("ftruncate");
    fcntl(&fd, FcntlArg::F_ADD_SEALS(seals)).expect("seals");
    fd
}

fn message(kind: u8, body: impl FnOnce(&mut [u8])) -> [u8; 64] {
    let mut message = [0; 64];
    message[0] = kind;
    body(&mut message[1..]);
    message
}

fn hello(ring: u64, version: u8) -> [u8; 64] {
    message(1, |body| {
        body[0] = version;
        body[7..15].copy_from_slice(b"xrailshm");
        body[15..23].copy_from_slice(&ring.to_le_bytes());
    })
}

fn pass(stream: &UnixStream, bytes: &[u8], fds: &[&OwnedFd]) {
    let raw: Vec<_> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let part = [IoSlice::new(bytes)];
    sendmsg::<()>(stream.as_raw_fd(), &part, &rights, MsgFlags::empty(), None).expect("sendmsg");
}

/// An honest acceptor and the other end of its socket, where the hello has been said.
fn victim(hello: &[u8; 64]) -> (JoinHandle<Result<ShmLane>>, UnixStream) {
    let (theirs, mut mine) = UnixStream::pair().expect("socketpair");
    let attach = move || attach(theirs, Side::Acceptor, LaneId(0), Arena::new(), Options::default(), common::soon());
    let attaching = std::thread::spawn(attach);
    mine.write_all(hello).expect("write");
    mine.read_exact(&mut [0; 64]).expect("their hello");
    (attaching, mine)
}

fn outcome(attaching: JoinHandle<Result<ShmLane>>) -> Error {
    attaching.join().expect("attach does not panic").err().expect("attach refuses")
}

/// Bytes of a control segment for rings of `RING` bytes, as an honest connector makes it.
fn honest_size() -> i64 {
    let (theirs, mut mine) = UnixStream::pair().expect("socketpair");
    let attaching = std::thread::spawn(move || {
        attach(theirs, Side::Connector, LaneId(0), Arena::new(), Options::default(), common::soon())
    });
    mine.write_all(&hello(RING, 2)).expect("write");
    mine.read_exact(&mut [0; 64]).expect("their hello");
    let mut space = nix::cmsg_space!([i32; 1]);
    let mut bytes = [0; 64];
    let mut parts = [std::io::IoSliceMut::new(&mut bytes)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let got = nix::sys::socket::recvmsg::<()>(mine.as_raw_fd(), &mut parts, Some(&mut space), flags).expect("recvmsg");
    let fds: Vec<OwnedFd> = got
        .cmsgs()
        .expect("whole")
        .flat_map(|message| match message {
            nix::sys::socket::ControlMessageOwned::ScmRights(fds) => fds,
            _ => Vec::new(),
        })
        // SAFETY: the descriptor came just now and belongs to nobody else.
        .map(|fd| unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) })
        .collect();
    drop(mine);
    assert_eq!(outcome(attaching).kind, ErrorKind::PeerDead);
    nix::sys::stat::fstat(&fds[0]).expect("fstat").st_size
}

#[test]
fn a_control_segment_that_could_shrink_or_is_too_small_is_refused() {
    let size = honest_size();
    let sealed = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW;
    for (fd, why) in [
        (memfd(size, SealFlag::F_SEAL_GROW), "F_SEAL_SHRINK"),
        (memfd(size - 4096, sealed), "were agreed"),
        (memfd(0, sealed), "were agreed"),
    ] {
        let (attaching, mine) = victim(&hello(RING, 2));
        pass(&mine, &message(2, |_| ()), &[&fd]);
        let error = outcome(attaching);
        assert_eq!(error.kind, ErrorKind::Protocol);
        assert!(error.to_string().contains(why), "{error}");
    }
    let (attaching, mut mine) = victim(&hello(RING, 2));
    mine.write_all(&message(2, |_| ())).expect("write");
    assert!(outcome(attaching).to_string().contains("did not come"));
    let (attaching, mine) = victim(&hello(RING, 2));
    let fd = memfd(size, sealed);
    pass(&mine, &message(2, |_| ()), &[&fd, &fd, &fd]);
    assert!(outcome(attaching).to_string().contains("several descriptors"));
}

#[test]
fn another_version_and_absurd_rings_are_refused() {
    let (attaching, _mine) = victim(&hello(RING, 9));
    assert_eq!(outcome(attaching).kind, ErrorKind::Mismatch);
    for ring in [0, 4096, RING + 1, 1 << 40, u64::MAX] {
        let (attaching, _mine) = victim(&hello(ring, 2));
        let error = outcome(attaching);
        assert!(error.kind == ErrorKind::Protocol && error.to_string().contains(&ring.to_string()), "{error}");
    }
}

/// A lane whose peer is us, by hand.
fn lane_and_its_peer() -> (ShmLane, UnixStream) {
    let fd = memfd(honest_size(), SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW);
    let (attaching, mut mine) = victim(&hello(RING, 2));
    pass(&mine, &message(2, |_| ()), &[&fd]);
    mine.write_all(&message(3, |_| ())).expect("write");
    mine.write_all(&message(4, |_| ())).expect("write");
    mine.read_exact(&mut [0; 128]).expect("the results");
    (attaching.join().expect("attach does not panic").expect("attach"), mine)
}

fn poll(lane: &mut ShmLane) -> std::result::Result<bool, LaneError> {
    lane.ready(true, false);
    lane.poll(&mut common::Keeper::default(), 1 << 20, true)
}

fn segment_note(id: u8) -> [u8; 16] {
    let mut note = [0; 16];
    note[0] = 2;
    note[4] = id;
    note
}

#[test]
fn a_segment_that_could_shrink_is_never_touched() {
    let (mut lane, mine) = lane_and_its_peer();
    pass(&mine, &segment_note(1), &[&memfd(1 << 20, SealFlag::F_SEAL_GROW)]);
    pass(&mine, &segment_note(2), &[&memfd(1 << 20, SealFlag::F_SEAL_SHRINK)]);
    assert_eq!(poll(&mut lane), Ok(true), "who waits for a segment is to look");
    assert_eq!(poll(&mut lane), Ok(false));
    let describe = |id: u8| {
        let mut descriptor = [0; 24];
        (descriptor[0], descriptor[4]) = (1, id);
        descriptor
    };
    let direct = common::direct(&mut lane);
    let error = direct.map(&describe(1), 1).expect_err("it could shrink");
    assert!(error.kind == ErrorKind::Protocol && error.to_string().contains("F_SEAL_SHRINK"), "{error}");
    assert!(direct.map(&describe(2), 1).is_err_and(|error| error.kind == ErrorKind::Region), "not the one meant");
    assert!(direct.map(&describe(3), 1).is_ok_and(|window| window.is_none()), "may still come");
    assert!(direct.reach(&describe(1), 1).is_err_and(|why| why.contains("F_SEAL_SHRINK")));
    assert!(direct.reach(&describe(2), 1 << 20).is_ok());
    assert!(direct.reach(&describe(2), (1 << 20) + 1).is_err());
}

#[test]
fn garbage_on_the_socket_ends_the_lane() {
    let (mut lane, mut mine) = lane_and_its_peer();
    mine.write_all(&[1; 7]).expect("write");
    assert_eq!(poll(&mut lane), Ok(false), "half a note");
    mine.write_all(&[99; 25]).expect("write");
    assert!(matches!(poll(&mut lane), Err(LaneError::Protocol(_))));

    let (mut lane, mine) = lane_and_its_peer();
    let fd = memfd(4096, SealFlag::F_SEAL_SHRINK);
    pass(&mine, &segment_note(1), &[&fd]);
    pass(&mine, &segment_note(1), &[&fd]);
    assert!(matches!(poll(&mut lane), Err(LaneError::Protocol(_))), "the same id twice");

    let (mut lane, mine) = lane_and_its_peer();
    pass(&mine, &segment_note(1), &[&fd, &fd]);
    assert!(matches!(poll(&mut lane), Err(LaneError::Protocol(_))), "two descriptors");
}

fn note(files: u8, len: u16) -> Vec<u8> {
    let mut bytes = vec![0; 16];
    (bytes[0], bytes[1]) = (4, files);
    bytes[2..4].copy_from_slice(&len.to_le_bytes());
    bytes
}

fn with_body(files: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = note(files, body.len() as u16);
    bytes.extend(body);
    bytes
}

fn refuses(lane: &mut ShmLane, what: &str) {
    assert!(matches!(poll(lane), Err(LaneError::Protocol(_))), "{what}");
    assert!(matches!(poll(lane), Err(LaneError::Protocol(_))), "{what}: it is final");
    assert!(lane.passed().is_none(), "{what}");
}

#[test]
fn notes_that_are_not_what_they_say_end_the_lane() {
    let fd = memfd(4096, SealFlag::F_SEAL_SHRINK);
    for (bytes, have, what) in [
        (note(0, 513), 0, "longer than any note"),
        (note(17, 0), 0, "more descriptors than any note"),
        (with_body(2, b"xy"), 1, "fewer descriptors than it says"),
        (with_body(0, b"xy"), 1, "more descriptors than it says"),
        (with_body(16, b"xy"), 17, "more descriptors than it says"),
        (vec![1; 16], 16, "a bell with descriptors"),
        (vec![6; 16], 0, "a record of no known kind"),
    ] {
        let (mut lane, mine) = lane_and_its_peer();
        pass(&mine, &bytes, &vec![&fd; have]);
        refuses(&mut lane, what);
    }
    // Taken notes that were never passed.
    for (notes, files) in [(1u32, 0u32), (0, 1), (u32::MAX, 0)] {
        let (mut lane, mut mine) = lane_and_its_peer();
        let mut record = [0; 16];
        record[0] = 5;
        record[4..8].copy_from_slice(&notes.to_le_bytes());
        record[8..12].copy_from_slice(&files.to_le_bytes());
        mine.write_all(&record).expect("write");
        refuses(&mut lane, "notes taken that were never passed");
    }
    // Found by somebody who asks for a note, told by the next poll.
    let (mut lane, mut mine) = lane_and_its_peer();
    mine.write_all(&[99; 16]).expect("write");
    assert!(lane.passed().is_none());
    assert!(matches!(poll(&mut lane), Err(LaneError::Protocol(_))));
}

#[test]
fn a_note_in_pieces_is_one_note_and_half_a_note_is_none() {
    let (mut lane, mut mine) = lane_and_its_peer();
    let (mut reader, writer) = std::io::pipe().expect("a pipe");
    let bytes = with_body(1, b"in pieces");
    let writer = OwnedFd::from(writer);
    for (at, byte) in bytes.iter().enumerate() {
        assert!(lane.passed().is_none());
        match at {
            5 => pass(&mine, &[*byte], &[&writer]),
            _ => mine.write_all(&[*byte]).expect("write"),
        }
    }
    drop(writer);
    let passed = lane.passed().expect("a note");
    assert_eq!((passed.note.as_slice(), passed.files.len(), passed.lost), (&b"in pieces"[..], 1, 0));
    drop(passed);
    assert_eq!(reader.read(&mut [0]).expect("read"), 0, "closed with the note");

    let (reader_of_half, writer) = std::io::pipe().expect("a pipe");
    let writer = OwnedFd::from(writer);
    pass(&mine, &bytes[..20], &[&writer]);
    drop((mine, writer));
    assert!(matches!(poll(&mut lane), Err(LaneError::Closed(_))));
    assert!(lane.passed().is_none());
    drop(lane);
    assert_eq!({ reader_of_half }.read(&mut [0]).expect("read"), 0, "closed with the lane");
}

#[test]
fn more_notes_than_the_credit_end_the_lane_and_are_closed() {
    let (mut lane, mine) = lane_and_its_peer();
    let (mut reader, writer) = std::io::pipe().expect("a pipe");
    let writer = OwnedFd::from(writer);
    mine.set_nonblocking(true).expect("nonblocking");
    for at in 0..64 {
        pass(&mine, &with_body(1, &[at]), &[&writer]);
        assert_eq!(poll(&mut lane), Ok(true));
    }
    assert_eq!(lane.passed().map(|passed| passed.note), Some(vec![0]));
    pass(&mine, &with_body(0, &[64]), &[]);
    assert_eq!(poll(&mut lane), Ok(true), "one was taken, one more is in order");
    pass(&mine, &with_body(1, &[65]), &[&writer]);
    assert!(matches!(poll(&mut lane), Err(LaneError::Protocol(why)) if why.contains("64 notes")));
    drop((lane, writer));
    assert_eq!(reader.read(&mut [0]).expect("read"), 0, "all descriptors are closed");

    let (mut lane, mine) = lane_and_its_peer();
    let fd = memfd(4096, SealFlag::F_SEAL_SHRINK);
    for _ in 0..8 {
        pass(&mine, &note(16, 0), &[&fd; 16]);
        assert_eq!(poll(&mut lane), Ok(true));
    }
    pass(&mine, &note(1, 0), &[&fd]);
    assert!(matches!(poll(&mut lane), Err(LaneError::Protocol(why)) if why.contains("descriptors")));
}

#[test]
fn a_hang_up_leaves_the_notes_that_came() {
    let (mut lane, mine) = lane_and_its_peer();
    pass(&mine, &with_body(0, b"last words"), &[]);
    drop(mine);
    assert!(matches!(poll(&mut lane), Err(LaneError::Closed(_))));
    assert_eq!(lane.passed().map(|passed| passed.note), Some(b"last words".to_vec()));
    assert_eq!(lane.pass(b"into the void", &[]), Ok(false));
}
