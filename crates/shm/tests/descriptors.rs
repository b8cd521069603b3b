//! A process that has no descriptors left. Alone in its process: the limit is the process's.

mod common;

use std::os::fd::AsFd;

use common::{Keeper, pair};
use crossrail_shm::Options;
use crossrail_transport::Lane;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

#[test]
fn a_note_whose_descriptors_find_no_room_comes_without_them() {
    let (mut a, mut b) = pair(&Options::default());
    let memory = nix::sys::memfd::memfd_create("test", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).expect("memfd");
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("getrlimit");
    let open = || std::fs::read_dir("/proc/self/fd").expect("/proc").count() as u64;
    assert_eq!(a.send_note(b"three", &[memory.as_fd(); 3]), Ok(true));
    assert_eq!(a.send_note(b"none", &[]), Ok(true));
    assert_eq!(a.send_note(b"one", &[memory.as_fd()]), Ok(true));
    let before = open();
    // All but one of the free descriptors below the limit are in use.
    let mut taken = Vec::new();
    setrlimit(Resource::RLIMIT_NOFILE, before + 40, hard).expect("setrlimit");
    while let Ok(more) = memory.try_clone() {
        taken.push(more);
    }
    taken.pop();
    let first = b.recv_note();
    drop(taken);
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).expect("setrlimit");
    let first = first.expect("the note itself came");
    assert_eq!((first.note.as_slice(), first.files.len(), first.lost), (&b"three"[..], 0, 3));
    let second = b.recv_note().expect("a note");
    assert_eq!((second.note.as_slice(), second.files.len(), second.lost), (&b"none"[..], 0, 0));
    let third = b.recv_note().expect("a note");
    assert_eq!((third.note.as_slice(), third.files.len() + third.lost), (&b"one"[..], 1));
    drop((first, second, third));
    assert_eq!(open(), before, "none is left open");
    assert_eq!(b.poll(&mut Keeper::default(), 1 << 20, true), Ok(true), "the lane goes on");
    assert_eq!(a.send_note(b"more", &[memory.as_fd(); 16]), Ok(true));
    assert_eq!(b.recv_note().map(|passed| passed.files.len()), Some(16));
}
