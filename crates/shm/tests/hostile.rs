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
    mine.write_all(&hello(RING, 1)).expect("write");
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
        let (attaching, mine) = victim(&hello(RING, 1));
        pass(&mine, &message(2, |_| ()), &[&fd]);
        let error = outcome(attaching);
        assert_eq!(error.kind, ErrorKind::Protocol);
        assert!(error.to_string().contains(why), "{error}");
    }
    let (attaching, mut mine) = victim(&hello(RING, 1));
    mine.write_all(&message(2, |_| ())).expect("write");
    assert!(outcome(attaching).to_string().contains("did not come"));
    let (attaching, mine) = victim(&hello(RING, 1));
    let fd = memfd(size, sealed);
    pass(&mine, &message(2, |_| ()), &[&fd, &fd, &fd]);
    assert!(outcome(attaching).to_string().contains("several descriptors"));
}

#[test]
fn another_version_and_absurd_rings_are_refused() {
    let (attaching, _mine) = victim(&hello(RING, 9));
    assert_eq!(outcome(attaching).kind, ErrorKind::Mismatch);
    for ring in [0, 4096, RING + 1, 1 << 40, u64::MAX] {
        let (attaching, _mine) = victim(&hello(ring, 1));
        let error = outcome(attaching);
        assert!(error.kind == ErrorKind::Protocol && error.to_string().contains(&ring.to_string()), "{error}");
    }
}

/// A lane whose peer is us, by hand.
fn lane_and_its_peer() -> (ShmLane, UnixStream) {
    let fd = memfd(honest_size(), SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW);
    let (attaching, mut mine) = victim(&hello(RING, 1));
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
