//! The end of a region while rows of it move: neither end touches its memory afterwards, and nothing of that succeeds.
#![allow(unsafe_code)] // regions are registered by their addresses

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossrail::{
    Addresses, ConnectOptions, Context, Description, Endpoint, Error, ErrorKind, Layout, Memory, Move, MoveKind,
    MoveOptions, Place, Region, Request, Settings, StartOptions, Worker, WorkerOptions,
};

const LIMIT: Option<Duration> = Some(Duration::from_secs(20));
const ROWS: u64 = 64;
const ROW: u64 = 32 << 10;
const LEN: usize = (ROWS * ROW) as usize;
const RAILS: &str = "127.0.0.1,127.0.0.2";

const DATA: u8 = 0x11;
const OLD: u8 = 0x44;
const POISON: u8 = 0x99;

/// Registered memory.
struct Lent {
    memory: Memory,
    region: Region,
}

impl Lent {
    /// `shared`: peers on this machine can map it.
    fn of(worker: &Worker, context: &Context, plain: Option<&mut Vec<u8>>, fill: u8) -> Lent {
        let memory = context.alloc(LEN).unwrap();
        memory.fill_from(0, &vec![fill; LEN]).unwrap();
        let at = match plain {
            Some(bytes) => {
                bytes.resize(LEN, fill);
                bytes.fill(fill);
                bytes.as_mut_ptr() as u64
            }
            None => memory.ptr() as u64,
        };
        // SAFETY: the memory outlives the region.
        let region = unsafe { worker.register_range(at, LEN as u64, Place::Host).unwrap() };
        Lent { memory, region }
    }

    fn base(&self) -> *mut u8 {
        self.region.base() as *mut u8
    }

    fn fill(&self, byte: u8) {
        // SAFETY: memory of the region, which nothing else touches.
        unsafe { std::ptr::write_bytes(self.base(), byte, LEN) };
    }

    /// Number of bytes equal to `byte`.
    fn count(&self, byte: u8) -> usize {
        let mut bytes = vec![0; LEN];
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(self.base(), bytes.as_mut_ptr(), LEN) };
        bytes.iter().filter(|of| **of == byte).count()
    }

    fn rows(&self) -> Vec<u64> {
        (0..ROWS).flat_map(|row| [self.region.base() + row * ROW, ROW, 0]).collect()
    }
}

struct Pair {
    a: Worker,
    b: Worker,
    ab: Endpoint,
    contexts: (Context, Context),
}

/// `b` makes no progress by itself.
fn pair_of(pairs: &[(&str, &str)]) -> Pair {
    let context = || Context::new(Settings::from_pairs(pairs.iter().copied()).unwrap()).unwrap();
    let contexts = (context(), context());
    let options =
        |name: &str, background| WorkerOptions { name: Some(name.to_owned()), background, ..WorkerOptions::default() };
    let a = Worker::new(&contexts.0, options("a", true)).unwrap();
    let b = Worker::new(&contexts.1, options("b", false)).unwrap();
    let ab = std::thread::scope(|scope| {
        let accepted = scope.spawn(|| b.accept(LIMIT).unwrap());
        let ab = a.connect(&b.address(), &ConnectOptions::default()).unwrap();
        accepted.join().unwrap();
        ab
    });
    Pair { a, b, ab, contexts }
}

fn each(mut body: impl FnMut(&str, Pair)) {
    body("shm", pair_of(&[("CROSSRAIL_TLS", "shm")]));
    body("tcp", pair_of(&[("CROSSRAIL_TLS", "tcp"), ("CROSSRAIL_CHUNK", "64K")]));
    body("tcp x 2", pair_of(&[("CROSSRAIL_TLS", "tcp"), ("CROSSRAIL_NET_DEVICES", RAILS), ("CROSSRAIL_CHUNK", "64K")]));
    body("tcp, io threads", pair_of(&[("CROSSRAIL_TLS", "tcp"), ("CROSSRAIL_IO_THREADS", "2")]));
    body("tcp, checksums", pair_of(&[("CROSSRAIL_TLS", "tcp"), ("CROSSRAIL_CHECKSUM", "crc")]));
}

fn prepared(pair: &Pair, kind: MoveKind, here: &Lent, there: &Lent) -> Move {
    let own = pair.a.layout_at(std::slice::from_ref(&here.region), Addresses::new(&here.rows(), 3).unwrap()).unwrap();
    let described = pair.b.describe(std::slice::from_ref(&there.region)).unwrap();
    let description = Description::parse(&described).unwrap();
    let theirs: Layout = pair.ab.layout_at(&description, Addresses::new(&there.rows(), 3).unwrap()).unwrap();
    let options = MoveOptions { notice: b"moved", ..MoveOptions::default() };
    pair.ab.prepare(kind, &own, &theirs, options).unwrap()
}

struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs `body` while another thread makes progress for `worker`, once `begins`.
fn driven<T>(worker: &Worker, begins: impl Fn() -> bool + Sync, body: impl FnOnce() -> T) -> T {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !begins() && !over.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
            while !over.load(Ordering::Relaxed) {
                worker.progress();
            }
        });
        // Also when `body` panics: the scope waits for the thread.
        let _ends = Ends(&over);
        body()
    })
}

/// `own`: the region of the moving process ends. True if the move failed.
fn end_in_flight(transport: &str, pair: &Pair, kind: MoveKind, (own, shared): (bool, bool), passes: usize) -> bool {
    let case = format!("{transport}, {kind:?}, own {own}, shared {shared}, after {passes} passes");
    let (mut plain_here, mut plain_there) = (Vec::new(), Vec::new());
    let (near, far) = if kind == MoveKind::Read { (OLD, DATA) } else { (DATA, OLD) };
    let here = Lent::of(&pair.a, &pair.contexts.0, (!shared).then_some(&mut plain_here), near);
    let there = Lent::of(&pair.b, &pair.contexts.1, (!shared).then_some(&mut plain_there), far);
    let (ended, other) = if own { (&here, &there) } else { (&there, &here) };
    let request = prepared(pair, kind, &here, &there).start(StartOptions::default()).unwrap();
    (0..passes).for_each(|_| _ = pair.b.progress());
    // The peer makes progress only once the region is refused.
    let has_begun = || pair.a.describe(std::slice::from_ref(&here.region)).is_err() || !own;
    if !own {
        there.region.deregister().unwrap_or_else(|error| panic!("{case}: {error}"));
        there.fill(POISON);
    }
    let outcome = driven(&pair.b, has_begun, || {
        if !own {
            return request.wait(LIMIT);
        }
        ended.region.deregister().unwrap_or_else(|error| panic!("{case}: {error}"));
        assert!(request.is_done(), "{case}: in flight although its memory was deregistered");
        ended.fill(POISON);
        request.wait(LIMIT)
    });
    // Whatever still wrote would be seen by now: both ends are idle.
    let settled = Instant::now() + Duration::from_millis(20);
    driven(&pair.b, || true, || while Instant::now() < settled {});
    assert_eq!(ended.count(POISON), LEN, "{case}: written after its end");
    assert_eq!(other.count(POISON), 0, "{case}: bytes of the next owner");
    let notices = pair.b.notices(usize::MAX).len();
    match outcome {
        Ok(_) => assert_eq!((notices, other.count(DATA)), (1, LEN), "{case}"),
        Err(ref error) => {
            assert_eq!(error.kind, ErrorKind::Region, "{case}: {error}");
            assert_eq!(notices, 0, "{case}: a notice of a failed move");
        }
    }
    drop((here.memory, there.memory));
    outcome.is_err()
}

#[test]
fn the_end_of_a_region_ends_moves_of_both_ends() {
    each(|transport, pair| {
        for kind in [MoveKind::Read, MoveKind::Write] {
            for of in [(true, false), (true, true), (false, false), (false, true)] {
                let failed = [0, 2, 9].map(|passes| end_in_flight(transport, &pair, kind, of, passes));
                // Nothing is there yet when the peer has not run at all.
                assert!(failed[0], "{transport}, {kind:?}, {of:?}: {failed:?}");
            }
        }
        pair.b.close().unwrap();
    });
}

/// A stopped peer may resume at any time: its side of a transfer must not be assumed to have ended.
#[test]
fn an_end_that_a_peer_holds_up_is_an_error_and_the_next_call_concludes_it() {
    let pair = pair_of(&[("CROSSRAIL_TLS", "shm"), ("CROSSRAIL_TIMEOUT", "0.3")]);
    for kind in [MoveKind::Read, MoveKind::Write] {
        let here = Lent::of(&pair.a, &pair.contexts.0, None, DATA);
        let there = Lent::of(&pair.b, &pair.contexts.1, None, OLD);
        let request = prepared(&pair, kind, &here, &there).start(StartOptions::default()).unwrap();
        for _ in 0..2 {
            let error = here.region.deregister().unwrap_err();
            assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
            assert!(error.to_string().contains("b may still read or write"), "{error}");
            assert!(!request.is_done());
        }
        let outcome = driven(
            &pair.b,
            || true,
            || {
                // A busy machine may keep the peer's thread from running for longer than one call waits.
                let deadline = Instant::now() + Duration::from_secs(20);
                while let Err(error) = here.region.deregister() {
                    assert!(error.kind == ErrorKind::Timeout && Instant::now() < deadline, "{error}");
                }
                request.wait(LIMIT)
            },
        );
        assert_eq!(outcome.unwrap_err().kind, ErrorKind::Region);
        assert_eq!(here.region.deregister().unwrap_err().kind, ErrorKind::Region, "it is over");
        drop((here.memory, there.memory));
    }
}

/// As above, of what ends at the same time as the connection: an endpoint, and a worker.
#[test]
fn a_close_that_a_peer_holds_up_is_an_error_and_its_memory_stays_lent() {
    for kind in [MoveKind::Read, MoveKind::Write] {
        let pair = pair_of(&[("CROSSRAIL_TLS", "shm"), ("CROSSRAIL_TIMEOUT", "0.3")]);
        let here = Lent::of(&pair.a, &pair.contexts.0, None, DATA);
        let there = Lent::of(&pair.b, &pair.contexts.1, None, OLD);
        let request = prepared(&pair, kind, &here, &there).start(StartOptions::default()).unwrap();
        let whole = held_up(&pair);
        for _ in 0..2 {
            let error = pair.ab.close(Some(Duration::from_millis(50))).unwrap_err();
            assert!(is_held_up(&error), "{kind:?}: {error}");
            assert!(!request.is_done() && !whole.is_done(), "{kind:?}: its memory is still in use");
            let error = here.region.deregister().unwrap_err();
            assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
            assert!(error.to_string().contains("b may still read or write"), "{error}");
        }
        driven(
            &pair.b,
            || true,
            || {
                request.wait(LIMIT).unwrap_err();
                whole.wait(LIMIT).unwrap_err();
                pair.ab.close(LIMIT).unwrap();
            },
        );
        let deadline = Instant::now() + Duration::from_secs(20);
        while let Err(error) = here.region.deregister() {
            assert!(error.kind == ErrorKind::Timeout && Instant::now() < deadline, "{error}");
        }
        drop((here.memory, there.memory));
    }
}

#[test]
fn a_worker_that_a_peer_holds_up_closes_with_an_error() {
    let pair = pair_of(&[("CROSSRAIL_TLS", "shm"), ("CROSSRAIL_TIMEOUT", "0.3")]);
    let whole = held_up(&pair);
    let error = pair.a.close().unwrap_err();
    assert!(is_held_up(&error), "{error}");
    assert!(whole.is_done());
    pair.a.close().unwrap();
    drop(pair.ab);
    // The other end was only late: it finds the lane closed, and copies nothing.
    driven(&pair.b, || true, || while pair.b.endpoints().iter().any(Endpoint::is_alive) {});
    pair.b.close().unwrap();
}

/// A write into a region of the peer, which copies it by itself once it makes progress.
fn held_up(pair: &Pair) -> Request {
    let target = pair.b.register(vec![0; LEN]).unwrap();
    let request = pair.ab.write(vec![DATA; LEN], &target.key(), 0, None).unwrap();
    std::mem::forget(target);
    request
}

fn is_held_up(error: &Error) -> bool {
    error.kind == ErrorKind::Timeout && error.to_string().contains("b may still read or write")
}
