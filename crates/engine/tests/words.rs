//! A word that another thread polls while the engine writes it: it is seen whole, and never goes back.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crossrail::{ConnectOptions, Context, Op, Settings, Worker, WorkerOptions};

const LIMIT: Option<Duration> = Some(Duration::from_secs(20));
const WORDS: u64 = 8_000;

/// Both halves are the same number: a torn word has two.
fn word(number: u64) -> u64 {
    number << 32 | number
}

#[test]
fn a_polled_word_is_whole_and_never_goes_back() {
    let rails = "127.0.0.1,127.0.0.2,127.0.0.3,127.0.0.4";
    for pairs in [
        &[("CROSSRAIL_TLS", "shm")][..],
        &[("CROSSRAIL_TLS", "tcp")],
        &[("CROSSRAIL_TLS", "tcp"), ("CROSSRAIL_NET_DEVICES", rails), ("CROSSRAIL_IO_THREADS", "2")],
    ] {
        let settings = || Settings::from_pairs(pairs.iter().copied()).unwrap();
        let (one, other) = (Context::new(settings()).unwrap(), Context::new(settings()).unwrap());
        let a = Worker::new(&one, WorkerOptions::default()).unwrap();
        let b = Worker::new(&other, WorkerOptions::default()).unwrap();
        let ab = a.connect(&b.address(), &ConnectOptions::default()).unwrap();
        let _ba = b.accept(LIMIT).unwrap();
        let memory = other.alloc(4096).unwrap();
        let region = b.register(&memory).unwrap();
        let key = region.key();
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let polling = scope.spawn(|| {
                // SAFETY: aligned, inside the memory, which outlives the thread; all accesses are atomic.
                let polled = unsafe { AtomicU64::from_ptr(memory.ptr().cast()) };
                let mut last = 0;
                while !done.load(Ordering::Relaxed) {
                    let seen = polled.load(Ordering::Acquire);
                    assert_eq!(seen >> 32, seen & 0xffff_ffff, "{pairs:?}: a torn word, after {last}");
                    assert!(seen >> 32 >= last, "{pairs:?}: {} after {last}", seen >> 32);
                    last = seen >> 32;
                }
            });
            for first in (1..WORDS).step_by(1000) {
                let write = |number| Op::Write {
                    local: word(number).to_le_bytes().to_vec().into(),
                    remote: key.clone(),
                    offset: 0,
                    imm: None,
                };
                ab.batch((first..first + 1000).map(write).collect()).unwrap().wait(LIMIT).unwrap();
                if polling.is_finished() {
                    break;
                }
            }
            done.store(true, Ordering::Relaxed);
        });
    }
}
