//! Memory that its owner unmaps while it is registered or in use: where the kernel copies all of it, the operation fails by
//! name and everything else continues. That is single copies on one machine, and what TCP sends; of what TCP receives, this
//! process copies the beginning of each chunk.
#![allow(unsafe_code)] // memory is mapped and unmapped here

use std::ptr::null_mut;
use std::time::Duration;

use crossrail::{
    Buffer, ConnectOptions, Context, Endpoint, Error, ErrorKind, Place, Request, Settings, Worker, WorkerOptions,
};

const LIMIT: Option<Duration> = Some(Duration::from_secs(20));
const LEN: usize = 4 << 20;

/// Pages of their own, of which those in the middle go.
struct Pages(*mut u8);

impl Pages {
    fn new(fill: u8) -> Pages {
        // SAFETY: new pages.
        let at = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            libc::mmap(null_mut(), LEN, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        assert_ne!(at, libc::MAP_FAILED);
        // SAFETY: all of them.
        unsafe { std::ptr::write_bytes(at.cast::<u8>(), fill, LEN) };
        Pages(at.cast())
    }

    fn unmap(&self) {
        // SAFETY: nothing but the operations under test uses them.
        assert_eq!(unsafe { libc::munmap(self.0.add(LEN / 4).cast(), LEN / 2) }, 0);
    }

    fn buffer(&self) -> Buffer {
        // SAFETY: what is unmapped meanwhile is what is tested.
        unsafe { Buffer::raw(self.0, LEN, None) }
    }
}

struct Pair {
    a: Worker,
    b: Worker,
    ab: Endpoint,
    ba: Endpoint,
}

fn pair_of(pairs: &[(&str, &str)]) -> Pair {
    let context = || Context::new(Settings::from_pairs(pairs.iter().copied()).unwrap()).unwrap();
    let worker = |name: &str| {
        let options = WorkerOptions { name: Some(name.to_owned()), ..WorkerOptions::default() };
        Worker::new(&context(), options).unwrap()
    };
    let (a, b) = (worker("a"), worker("b"));
    let ab = a.connect(&b.address(), &ConnectOptions::default()).unwrap();
    let ba = b.accept(LIMIT).unwrap();
    Pair { a, b, ab, ba }
}

fn each(mut body: impl FnMut(&str, &Pair)) {
    let rails = ("CROSSRAIL_NET_DEVICES", "127.0.0.1,127.0.0.2");
    body("shm", &pair_of(&[("CROSSRAIL_TLS", "shm")]));
    body("tcp", &pair_of(&[("CROSSRAIL_TLS", "tcp")]));
    body("tcp x 2", &pair_of(&[("CROSSRAIL_TLS", "tcp"), rails, ("CROSSRAIL_CHUNK", "256K")]));
    body("tcp, io threads", &pair_of(&[("CROSSRAIL_TLS", "tcp"), rails, ("CROSSRAIL_IO_THREADS", "2")]));
}

fn failed(case: &str, request: &Request) -> Error {
    request.wait(LIMIT).map(|_| panic!("{case}: it succeeded")).unwrap_err()
}

fn assert_named(case: &str, request: &Request) {
    let error = failed(case, request);
    assert_eq!(error.kind, ErrorKind::Io, "{case}: {error}");
    assert!(error.to_string().contains("not mapped"), "{case}: {error}");
}

/// The connection still carries long and short operations, both ways.
fn assert_goes_on(case: &str, pair: &Pair) {
    for (from, to, worker) in [(&pair.ab, &pair.ba, &pair.b), (&pair.ba, &pair.ab, &pair.a)] {
        for len in [8, LEN] {
            let sent = from.send(vec![7; len], 9).unwrap();
            let received = worker.recv(vec![0; len], 9, !0, Some(to)).unwrap();
            sent.wait(LIMIT).unwrap_or_else(|error| panic!("{case}, {len} bytes: {error}"));
            received.wait(LIMIT).unwrap_or_else(|error| panic!("{case}, {len} bytes: {error}"));
        }
    }
}

#[test]
fn a_region_that_is_unmapped_fails_its_accesses_at_both_ends() {
    each(|transport, pair| {
        let pages = Pages::new(1);
        // SAFETY: mapped now.
        let region = unsafe { pair.b.register_range(pages.0 as u64, LEN as u64, Place::Host).unwrap() };
        pages.unmap();
        for _ in 0..2 {
            if transport == "shm" {
                assert_named("write", &pair.ab.write(vec![2; LEN], &region.key(), 0, None).unwrap());
            }
            assert_named(&format!("{transport}, read"), &pair.ab.read(vec![0; LEN], &region.key(), 0).unwrap());
        }
        assert_goes_on(transport, pair);
        // What is left of it can be used.
        pair.ab.write(vec![3; LEN / 8], &region.key(), 0, None).unwrap().wait(LIMIT).unwrap();
        region.deregister().unwrap();
    });
}

#[test]
fn local_memory_that_is_unmapped_fails_its_operation() {
    each(|transport, pair| {
        let region = pair.b.register(vec![0; LEN]).unwrap();
        let all: &[&str] = if transport == "shm" { &["send", "write", "receive", "read"] } else { &["send", "write"] };
        for what in all {
            let (case, pages) = (format!("{transport}, {what}"), Pages::new(1));
            pages.unmap();
            let (own, other) = match *what {
                "send" => {
                    let received = pair.b.recv(vec![0; LEN], 5, !0, Some(&pair.ba)).unwrap();
                    (pair.ab.send(pages.buffer(), 5).unwrap(), Some(received))
                }
                "receive" => {
                    let sent = pair.ba.send(vec![4; LEN], 6).unwrap();
                    (pair.a.recv(pages.buffer(), 6, !0, Some(&pair.ab)).unwrap(), Some(sent))
                }
                "write" => (pair.ab.write(pages.buffer(), &region.key(), 0, None).unwrap(), None),
                _ => (pair.ab.read(pages.buffer(), &region.key(), 0).unwrap(), None),
            };
            assert_named(&case, &own);
            if let Some(other) = other {
                failed(&case, &other);
            }
        }
        assert_goes_on(transport, pair);
    });
}

/// A message that goes with its first frame has begun to go, and cannot be taken back.
#[test]
fn a_short_message_whose_memory_is_unmapped_ends_its_connection_by_name() {
    let pair = pair_of(&[("CROSSRAIL_TLS", "tcp")]);
    let pages = Pages::new(1);
    pages.unmap();
    // SAFETY: as in `Pages::buffer`.
    let gone = unsafe { Buffer::raw(pages.0.add(LEN / 2), 16 << 10, None) };
    let received = pair.b.recv(vec![0; 16 << 10], 5, !0, Some(&pair.ba)).unwrap();
    let error = match pair.ab.send(gone, 5) {
        Ok(sent) => failed("send", &sent),
        Err(error) => error,
    };
    assert!(error.to_string().contains("memory of a message in flight cannot be accessed"), "{error}");
    failed("receive", &received);
}
