//! Both ends in one process, on two GPUs and on one.

use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use crossrail_cuda::{Context, Cuda};
use crossrail_cuda_ipc::{Gpus, Link};
use crossrail_transport::{Copy, Domain, Step};
use crossrail_types::Settings;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

use crate::end::{End, LIMIT, Memory, job, pattern};
use crate::{KINDS, TURN, second, support};

/// Exchanges notes between two links of one process.
fn pass(from: &mut Link, to: &mut Link) {
    while let Some((note, files)) = from.outgoing() {
        let note = note.to_vec();
        let files: Vec<OwnedFd> =
            files.into_iter().map(|file| file.try_clone_to_owned().expect("a descriptor")).collect();
        to.incoming(&note, files).expect("a note");
        from.sent();
    }
}

struct Both {
    first: End,
    second: End,
}

impl Both {
    fn new(cuda: &Cuda, ordinals: (u32, u32)) -> Both {
        let (one, other) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
            .expect("a pair of sockets");
        let (mut first, mut second) = (End::new(cuda, ordinals.0, one), End::new(cuda, ordinals.1, other));
        // A process usually has one of them, which both links may share.
        let gpus = Gpus::new(cuda, &Settings::default()).expect("the GPUs");
        for end in [&mut first, &mut second] {
            end.gpus = Arc::clone(&gpus);
            end.link = Link::new(Arc::clone(&gpus), LIMIT);
        }
        Both { first, second }
    }

    fn pull(&mut self, local: u64, remote: u64, len: usize) -> Result<(), String> {
        let (descriptor, _) = self.second.link.describe(remote as usize as *const u8, len)?;
        let mut job = job(Copy::Pull, local, descriptor, len);
        let started = Instant::now();
        loop {
            pass(&mut self.second.link, &mut self.first.link);
            pass(&mut self.first.link, &mut self.second.link);
            // SAFETY: memory of this test, which outlives the copy.
            #[allow(unsafe_code)]
            match unsafe { self.first.link.step(&mut job, 1 << 20) } {
                Step::Done => return Ok(()),
                Step::Failed(why) | Step::Unmapped(why) => return Err(why),
                Step::Moved(_) | Step::Waiting => assert!(started.elapsed() < LIMIT, "a copy without end"),
            }
        }
    }
}

fn run(cuda: &Cuda, ordinals: (u32, u32)) {
    let mut both = Both::new(cuda, ordinals);
    let own = Memory::new(&both.first.context, "legacy", 5 << 20);
    for kind in KINDS {
        let context: Context = both.second.context.clone();
        let theirs = Memory::new(&context, kind, 5 << 20);
        both.second.put(theirs.address(), &pattern(4, 5 << 20));
        for (offset, len) in [(0, 4096), (3, 65_537), (1, (512 << 10) + 1), (0, 5 << 20)] {
            both.first.put(own.address(), &vec![0; len]);
            let pulled = both.pull(own.address(), theirs.address() + offset as u64, len);
            assert_eq!(pulled, Ok(()), "{ordinals:?} {kind}: {len} at {offset}");
            let found = both.first.take(own.address(), len);
            assert!(found == pattern(4, 5 << 20)[offset..offset + len], "{ordinals:?} {kind}: {len} at {offset}");
        }
        // Freed memory of this process itself is not accessed.
        let (address, len) = (theirs.address(), 4096);
        let (descriptor, _) = both.second.link.describe(address as usize as *const u8, len).expect("memory");
        drop(theirs);
        assert!(crossrail_cuda::wait_for_releases(LIMIT));
        if kind == "legacy" {
            let mut late = job(Copy::Pull, own.address(), descriptor, len);
            // SAFETY: as in `pull`.
            #[allow(unsafe_code)]
            let step = unsafe { both.first.link.step(&mut late, 1) };
            assert!(matches!(&step, Step::Failed(why) if why.contains("freed")), "{step:?}");
        }
        both.pull(own.address(), address, len).expect_err("no memory");
        let next = Memory::new(&context, kind, 5 << 20);
        both.second.put(next.address(), &pattern(5, 4096));
        both.pull(own.address(), next.address(), len).expect("a pull");
        assert!(both.first.take(own.address(), len) == pattern(5, len), "{ordinals:?} {kind}");
    }
}

#[test]
fn two_links_of_one_process_on_one_gpu() {
    let Some(cuda) = support::cuda() else { return };
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    run(&cuda, (0, 0));
}

#[test]
fn two_links_of_one_process_on_two_gpus() {
    let Some(cuda) = support::cuda() else { return };
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(second) = second(&cuda) else { return support::skip("needs two GPUs that reach each other") };
    run(&cuda, (0, second));
    run(&cuda, (second, 0));
}
