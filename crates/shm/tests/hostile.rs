//! A peer that speaks the handshake by hand and then passes memory that it could take away again.
#![allow(unsafe_code)]

mod common;

use std::io::{IoSlice, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
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
    mine.write_all(&hello(RING, 3)).expect("write");
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
        let (attaching, mine) = victim(&hello(RING, 3));
        pass(&mine, &message(2, |_| ()), &[&fd]);
        let error = outcome(attaching);
        assert_eq!(error.kind, ErrorKind::Protocol);
        assert!(error.to_string().contains(why), "{error}");
    }
    let (attaching, mut mine) = victim(&hello(RING, 3));
    mine.write_all(&message(2, |_| ())).expect("write");
    assert!(outcome(attaching).to_string().contains("was not received"));
    let (attaching, mine) = victim(&hello(RING, 3));
    let fd = memfd(size, sealed);
    pass(&mine, &message(2, |_| ()), &[&fd, &fd, &fd]);
    assert!(outcome(attaching).to_string().contains("several descriptors"));
}

#[test]
fn another_version_and_absurd_rings_are_refused() {
    let (attaching, _mine) = victim(&hello(RING, 9));
    assert_eq!(outcome(attaching).kind, ErrorKind::Mismatch);
    for ring in [0, 4096, RING + 1, 1 << 40, u64::MAX] {
        let (attaching, _mine) = victim(&hello(ring, 3));
        let error = outcome(attaching);
        assert!(error.kind == ErrorKind::Protocol && error.to_string().contains(&ring.to_string()), "{error}");
    }
}

/// A lane whose peer is us, by hand.
fn lane_and_its_peer() -> (ShmLane, UnixStream) {
    lane_of(&memfd(honest_size(), SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW))
}

/// The same with a control segment of ours.
fn lane_of(fd: &OwnedFd) -> (ShmLane, UnixStream) {
    let (attaching, mut mine) = victim(&hello(RING, 3));
    pass(&mine, &message(2, |_| ()), &[fd]);
    mine.write_all(&message(3, |_| ())).expect("write");
    mine.write_all(&message(4, |_| ())).expect("write");
    mine.read_exact(&mut [0; 128]).expect("the results");
    (attaching.join().expect("attach does not panic").expect("attach"), mine)
}

fn poll(lane: &mut ShmLane) -> std::result::Result<bool, LaneError> {
    lane.ready(true, false);
    lane.poll(&mut common::Keeper::default(), 1 << 20, true)
}

fn segment_note(id: u32) -> [u8; 16] {
    let mut note = [0; 16];
    note[0] = 2;
    note[4..8].copy_from_slice(&id.to_le_bytes());
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
    let domain = common::domain(&mut lane);
    let error = domain.map(&describe(1), 1, None).expect_err("it could shrink");
    assert!(error.kind == ErrorKind::Protocol && error.to_string().contains("F_SEAL_SHRINK"), "{error}");
    assert!(domain.map(&describe(2), 1, None).is_err_and(|error| error.kind == ErrorKind::Region), "not the one meant");
    assert!(domain.map(&describe(3), 1, None).is_ok_and(|window| window.is_none()), "may still come");
    assert!(domain.reach(&describe(1), 1).is_err_and(|why| why.contains("F_SEAL_SHRINK")));
    assert!(domain.reach(&describe(2), 1 << 20).is_ok());
    assert!(domain.reach(&describe(2), (1 << 20) + 1).is_err());
}

#[test]
fn segments_that_are_never_mapped_take_a_bounded_number_of_descriptors() {
    let (mut lane, mine) = lane_and_its_peer();
    let fd = memfd(4096, SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW);
    let name = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).expect("its name");
    let held = || {
        let all = std::fs::read_dir("/proc/self/fd").expect("descriptors").flatten();
        all.filter(|one| std::fs::read_link(one.path()).is_ok_and(|link| link == name)).count()
    };
    // 512 and no more, however many are passed.
    for id in 0..1000 {
        pass(&mine, &segment_note(id), &[&fd]);
        poll(&mut lane).expect("no reason to end the lane");
    }
    let share = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).expect("getrlimit").0 / 4;
    let most = usize::try_from(share).map_or(512, |share| share.min(512));
    assert!((most..most + 38).contains(&held()), "{} descriptors", held());
    let describe = |id: u32| {
        let mut descriptor = [0; 24];
        descriptor[0] = 1;
        descriptor[4..8].copy_from_slice(&id.to_le_bytes());
        descriptor
    };
    let domain = common::domain(&mut lane);
    assert!(domain.reach(&describe(0), 4096).is_ok());
    let why = domain.reach(&describe(999), 4096).expect_err("it was one too many");
    assert!(why.contains(if most == 512 { "512 segments" } else { "as many descriptors" }), "{why}");
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
    assert!(lane.recv_note().is_none(), "{what}");
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
    assert!(lane.recv_note().is_none());
    assert!(matches!(poll(&mut lane), Err(LaneError::Protocol(_))));
}

#[test]
fn a_note_in_pieces_is_one_note_and_half_a_note_is_none() {
    let (mut lane, mut mine) = lane_and_its_peer();
    let (mut reader, writer) = std::io::pipe().expect("a pipe");
    let bytes = with_body(1, b"in pieces");
    let writer = OwnedFd::from(writer);
    for (at, byte) in bytes.iter().enumerate() {
        assert!(lane.recv_note().is_none());
        match at {
            5 => pass(&mine, &[*byte], &[&writer]),
            _ => mine.write_all(&[*byte]).expect("write"),
        }
    }
    drop(writer);
    let passed = lane.recv_note().expect("a note");
    assert_eq!((passed.note.as_slice(), passed.files.len(), passed.lost), (&b"in pieces"[..], 1, 0));
    drop(passed);
    assert_eq!(reader.read(&mut [0]).expect("read"), 0, "closed with the note");

    let (reader_of_half, writer) = std::io::pipe().expect("a pipe");
    let writer = OwnedFd::from(writer);
    pass(&mine, &bytes[..20], &[&writer]);
    drop((mine, writer));
    assert!(matches!(poll(&mut lane), Err(LaneError::Closed(_))));
    assert!(lane.recv_note().is_none());
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
    assert_eq!(lane.recv_note().map(|passed| passed.note), Some(vec![0]));
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
    assert_eq!(lane.recv_note().map(|passed| passed.note), Some(b"last words".to_vec()));
    assert_eq!(lane.send_note(b"into the void", &[]), Ok(false));
}

/// The control segment of a lane as its peer has it: every word of it, at any time.
struct Words {
    map: std::ptr::NonNull<u8>,
    len: usize,
}

// SAFETY: the address of memory that stays mapped, of which only atomic words are touched.
unsafe impl Sync for Words {}

impl Words {
    fn new(fd: &OwnedFd, len: usize) -> Words {
        use nix::sys::mman::{MapFlags, ProtFlags, mmap};
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let size = std::num::NonZeroUsize::new(len).expect("not empty");
        // SAFETY: a new mapping at an address of the kernel's choice.
        let map = unsafe { mmap(None, size, access, MapFlags::MAP_SHARED, fd, 0) }.expect("mmap");
        Words { map: map.cast(), len }
    }

    /// The word at byte `at`, rounded down to a word.
    fn at(&self, at: usize) -> &AtomicU64 {
        assert!(at < self.len);
        // SAFETY: inside the mapping and aligned.
        unsafe { self.map.add(at & !7).cast().as_ref() }
    }

    /// Writes one word that some check may hang on: mostly heads, sequences, counts and cursors.
    fn spoil(&self, random: &mut common::Random) {
        // Counts, flags and cursors of both sides; the first slots of both directions; anything.
        let at = match random.below(4) {
            0 => 128 * random.below(6 + 128),
            1 => 17_152 + 64 * random.below(8) + 8 * random.below(8),
            2 => 17_152 + 65_536 + 64 * random.below(8) + 8 * random.below(8),
            _ => random.below(self.len),
        };
        let word = self.at(at);
        let now = word.load(Ordering::Relaxed);
        let value = match random.below(8) {
            0 => u64::MAX,
            1 => 0,
            2 => 1 << random.below(64),
            3 => now.wrapping_sub(1),
            4 => random.below(1 << 20) as u64,
            5 => now ^ 1 << random.below(64),
            6 => (random.below(usize::MAX) as u64) << 1,
            _ => now.wrapping_add(1),
        };
        word.store(value, Ordering::Release);
    }
}

/// Ends the writing thread, also when its partner panics.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: exactly the range that `new` mapped.
        unsafe { nix::sys::mman::munmap(self.map.cast(), self.len) }.expect("munmap");
    }
}

const GUARD: usize = 4096;
const LOCAL: usize = 1 << 20;

/// One step of an honest end. False: the lane has ended.
fn honest_step(lane: &mut ShmLane, sink: &mut common::Keeper, local: &mut [u8], random: &mut common::Random) -> bool {
    use crossrail_transport::{Copy, Job, Step};
    match random.below(6) {
        0 => sink.outbox.push_back((9, vec![7; random.below(70_000).min(65_536)])),
        1 => {
            lane.arm();
            lane.disarm();
            lane.publish(random.below(1 << 20) as u32);
        }
        2 => {
            if let Some(own) = common::domain(lane).open(LOCAL) {
                common::domain(lane).stop(own);
                common::domain(lane).close(own);
            }
            if lane.published().is_err() {
                return false;
            }
        }
        3 => {
            // What a peer's offer may say: any handle, and any place in the segment that it passed.
            let len = 1 + random.below(LOCAL);
            let mut remote = [0; 24];
            (remote[0], remote[4]) = (1, 1 + u8::from(random.below(16) == 0));
            remote[8..16].copy_from_slice(&(random.below(LOCAL) as u64).to_le_bytes());
            let slot = (random.below(3) != 0).then(|| random.below(1 << 18) as u32);
            let copy = if random.below(2) == 0 { Copy::Pull } else { Copy::Push };
            let local = local[GUARD..].as_mut_ptr();
            let mut job = Job { slot, local, remote, len, copy, moved: 0, state: 0, helps: true };
            for _ in 0..8 {
                // SAFETY: `len` bytes between the guards, which nobody else touches.
                match unsafe { common::domain(lane).step(&mut job, 300_000) } {
                    Step::Done | Step::Failed(_) | Step::Unmapped(_) => break,
                    Step::Moved(_) | Step::Waiting => {}
                }
            }
            slot.inspect(|slot| common::domain(lane).close(*slot));
        }
        _ => {}
    }
    lane.ready(true, true);
    let end = lane.poll(sink, 1 << 20, true);
    sink.arrived.clear();
    if let Err(error) = &end {
        assert!(matches!(error, LaneError::Protocol(_)), "{error}");
        assert!(lane.poll(sink, 1 << 20, true).is_err(), "an error is final: {error}");
    }
    end.is_ok()
}

/// Any word of the shared memory may have any value at any time, between two looks at it as well: frames of garbage
/// arrive, or the lane ends; nothing is read or written elsewhere, nothing panics, nothing waits.
#[test]
fn whatever_a_peer_writes_into_shared_memory_ends_its_own_lane_at_most() {
    let size = honest_size();
    let sealed = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW;
    let mut ended = 0;
    for seed in 1..=400 {
        let fd = memfd(size, sealed);
        let words = Words::new(&fd, size as usize);
        let (mut lane, mine) = lane_of(&fd);
        pass(&mine, &segment_note(1), &[&memfd(LOCAL as i64, sealed)]);
        let mut random = common::Random(0x9e37_79b9_7f4a_7c15 ^ seed);
        let mut sink = common::Keeper::default();
        let mut local = vec![0xa5; LOCAL + 2 * GUARD];
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _stop = Stop(&stop);
            // Every other run the peer writes while this end looks, too.
            if seed % 2 == 0 {
                let mut random = common::Random(seed);
                let (words, stop) = (&words, &stop);
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        words.spoil(&mut random);
                    }
                });
            }
            for _ in 0..200 {
                if seed % 2 == 1 {
                    (0..random.below(4)).for_each(|_| words.spoil(&mut random));
                }
                if !honest_step(&mut lane, &mut sink, &mut local, &mut random) {
                    ended += seed % 2;
                    break;
                }
            }
        });
        let (before, after) = (&local[..GUARD], &local[GUARD + LOCAL..]);
        assert!(before.iter().chain(after).all(|byte| *byte == 0xa5), "seed {seed}: written beside the transfer");
    }
    // In the runs that are the same every time.
    assert!(ended > 100, "{ended} lanes of 200 ended: the words that were written are looked at");
}

/// The peer writes what was there before once this end has seen something wrong: that does not bring the lane back.
#[test]
fn an_error_is_final_although_the_memory_is_right_again() {
    let size = honest_size();
    let fd = memfd(size, SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW);
    let words = Words::new(&fd, size as usize);
    let mut errors = 0;
    // Counts, flags and cursors of both sides, and the first slots of both directions.
    let places =
        [0..17_152, 17_152..17_664, 17_152 + 65_536..17_664 + 65_536].into_iter().flat_map(|part| part.step_by(8));
    for wrong in places {
        let (mut lane, _mine) = lane_of(&fd);
        let mut sink = common::Keeper::default();
        assert!(lane.poll(&mut sink, 1 << 20, true).is_ok(), "as it was made");
        let before = words.at(wrong).swap(u64::MAX, Ordering::AcqRel);
        let seen = lane.poll(&mut sink, 1 << 20, true);
        words.at(wrong).store(before, Ordering::Release);
        if let Err(error) = seen {
            assert_eq!(lane.poll(&mut sink, 1 << 20, true), Err(error), "byte {wrong}");
            errors += 1;
        }
    }
    assert!(errors > 0, "nothing that was wrong was seen");
}
