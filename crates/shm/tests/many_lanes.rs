//! Descriptors that the peers of many lanes pass. Alone in its process: the limit is the process's.

mod common;

use std::os::fd::AsFd;

use common::{Keeper, pair};
use crossrail_shm::{Options, ShmLane};
use crossrail_transport::Lane;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

const LIMIT: u64 = 4096;

/// Fills the credit of notes over a lane. Its ends, and how many descriptors the receiver holds.
fn flooded(fd: &impl AsFd) -> ((ShmLane, ShmLane), usize) {
    let (mut a, mut b) = pair(&Options::default());
    while a.send_note(b"full", &[fd.as_fd(); 16]) == Ok(true) {}
    // Reads all of them and returns the first.
    assert_eq!(b.recv_note().map(|passed| passed.files.len() + passed.lost), Some(16));
    b.poll(&mut Keeper::default(), 1 << 20, true).expect("the lane continues");
    let held = held_of(fd);
    ((a, b), held)
}

/// Descriptors of this process that refer to that memory.
fn held_of(fd: &impl AsFd) -> usize {
    let id = |path: &std::path::Path| std::fs::metadata(path).map(|of| std::os::unix::fs::MetadataExt::ino(&of)).ok();
    let own = nix::sys::stat::fstat(fd).expect("fstat").st_ino;
    let all = std::fs::read_dir("/proc/self/fd").expect("/proc").flatten();
    all.filter(|one| id(&one.path()) == Some(own)).count()
}

#[test]
fn descriptors_that_peers_pass_stay_within_a_share_of_the_process() {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("getrlimit");
    setrlimit(Resource::RLIMIT_NOFILE, LIMIT.min(hard), hard).expect("setrlimit");
    let fd = memfd_create("test", MFdFlags::MFD_CLOEXEC).expect("memfd");
    let most = (LIMIT.min(hard) / 4) as usize + 1;
    // At the same time, and one after the other.
    let mut lanes = Vec::new();
    for _ in 0..40 {
        let (lane, held) = flooded(&fd);
        assert!(held <= most, "{held} of {most}");
        lanes.push(lane);
    }
    assert!(held_of(&fd) > most / 2);
    drop(lanes);
    for _ in 0..40 {
        let ((_, mut b), held) = flooded(&fd);
        assert!((100..=most).contains(&held), "{held}: those that ended make room");
        assert_eq!(b.recv_note().map(|passed| (passed.files.len(), passed.lost)), Some((16, 0)));
    }
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).expect("setrlimit");
}
