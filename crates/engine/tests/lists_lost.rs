//! Moves of lists whose rail is lost, or whose peer is killed, in the middle. A test program of its own: sockets of its
//! process are cut.
#![allow(unsafe_code)] // pools are registered by their addresses

use std::net::Ipv4Addr;
use std::os::fd::{BorrowedFd, RawFd};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossrail::{
    Addresses, ConnectOptions, Context, Description, Endpoint, ErrorKind, Layout, Memory, Move, MoveKind, MoveOptions,
    Place, Region, Request, Settings, StartOptions, Worker, WorkerOptions,
};
use nix::sys::socket::{Shutdown, SockaddrIn, SockaddrStorage, getsockname, getsockopt, shutdown, sockopt};

const LIMIT: Option<Duration> = Some(Duration::from_secs(30));
const RAILS: [Ipv4Addr; 3] = [Ipv4Addr::new(127, 0, 0, 31), Ipv4Addr::new(127, 0, 0, 32), Ipv4Addr::new(127, 0, 0, 33)];
/// Bytes of a row, and rows of a move.
const ROW: u64 = 4096;
const ROWS: u64 = 8192;
/// Where the parent listens, in hexadecimal; its transports; whether the child's memory can be mapped.
const PARENT: &str = "CROSSRAIL_TEST_LISTS_PARENT";
/// Moves that are tried until one was in flight when the rail or the peer was lost: a busy machine may finish some
/// before.
const TRIES: u64 = 40;

/// One test at a time: a descriptor that [`cut`] has found is not to become another test's.
static TURN: Mutex<()> = Mutex::new(());

struct End {
    context: Context,
    worker: Worker,
}

fn end(name: &str, settings: &[(&str, &str)]) -> End {
    let context = Context::new(Settings::from_pairs(settings.iter().copied()).unwrap()).unwrap();
    let options = WorkerOptions { name: Some(name.to_owned()), ..WorkerOptions::default() };
    let worker = Worker::new(&context, options).unwrap();
    End { context, worker }
}

/// Registered memory, which starts with numbers that follow from `seed`.
struct Pool {
    _own: Vec<u8>,
    _shared: Option<Memory>,
    region: Region,
}

impl Pool {
    fn of(end: &End, can_be_mapped: bool, seed: u64) -> Pool {
        let mut own: Vec<u8> = (0..ROW * ROWS).map(|at| byte(at, seed)).collect();
        let shared = can_be_mapped.then(|| end.context.alloc(own.len()).unwrap());
        let at = match &shared {
            Some(memory) => {
                memory.fill_from(0, &own).unwrap();
                memory.ptr() as u64
            }
            None => own.as_mut_ptr() as u64,
        };
        // SAFETY: the pool has both, and goes with its region.
        let region = unsafe { end.worker.register_range(at, ROW * ROWS, Place::Host).unwrap() };
        Pool { _own: own, _shared: shared, region }
    }

    fn contents(&self) -> Vec<u8> {
        let mut bytes = vec![0; (ROW * ROWS) as usize];
        // SAFETY: registered memory; whoever still writes there is what the test looks for.
        unsafe { std::ptr::copy_nonoverlapping(self.region.base() as *const u8, bytes.as_mut_ptr(), bytes.len()) };
        bytes
    }
}

fn byte(at: u64, seed: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed.wrapping_mul(77)) >> 29) as u8
}

fn words(base: u64) -> Vec<u64> {
    (0..ROWS).flat_map(|row| [base + row * ROW, ROW, 0]).collect()
}

/// Rows of our pool in reverse, so that none of them merge, and those of the peer in order.
fn prepare(to: &Endpoint, here: &End, pool: &Pool, described: &[u8], kind: MoveKind) -> Move {
    let base = pool.region.base();
    let regions = std::slice::from_ref(&pool.region);
    let mine: Layout = here.worker.layout_at(regions, Addresses::new(&words(base), 3).unwrap()).unwrap();
    let description = Description::parse(described).unwrap();
    let base = description.regions()[0].base;
    let yours = to.layout_at(&description, Addresses::new(&words(base), 3).unwrap()).unwrap();
    let reversed: Vec<u32> = (0..ROWS as u32).rev().collect();
    let options = MoveOptions { local_index: Some(&reversed), notice: b"done", ..MoveOptions::default() };
    to.prepare(kind, &mine, &yours, options).unwrap()
}

/// Waits until lanes of that name, or any, have carried so much more than `before`, or the request is over.
fn until_carried(endpoint: &Endpoint, name: &str, before: u64, bytes: u64, request: &Request) {
    let begun = Instant::now();
    while carried(endpoint, name) < before + bytes && !request.is_done() {
        assert!(Some(begun.elapsed()) < LIMIT, "{name}: nothing moves");
        std::thread::yield_now();
    }
}

fn carried(endpoint: &Endpoint, name: &str) -> u64 {
    let lanes = endpoint.lanes();
    lanes.iter().filter(|lane| lane.name.contains(name)).map(|lane| lane.tx_bytes + lane.rx_bytes).sum()
}

/// Ends every connection of this process over a rail.
fn cut(rail: Ipv4Addr) {
    let is_connection = |fd: &RawFd| {
        let Ok(own) = getsockname::<SockaddrStorage>(*fd) else { return false };
        // SAFETY: used for this call only.
        let fd = unsafe { BorrowedFd::borrow_raw(*fd) };
        own.as_sockaddr_in().is_some_and(|own: &SockaddrIn| own.ip() == rail)
            && getsockopt(&fd, sockopt::AcceptConn) == Ok(false)
    };
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    let fds = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<RawFd>().ok());
    for fd in fds.filter(is_connection) {
        // The other end may have ended it already.
        let _ = shutdown(fd, Shutdown::Both);
    }
}

#[test]
fn a_move_goes_on_over_the_rails_that_are_left() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let rails = RAILS.map(|rail| rail.to_string()).join(",");
    let settings = [("CROSSRAIL_TLS", "tcp"), ("CROSSRAIL_NET_DEVICES", &*rails), ("CROSSRAIL_CHUNK", "64K")];
    for kind in [MoveKind::Write, MoveKind::Read] {
        let mut were_lost = 0;
        for (try_, rail) in (0..TRIES).zip(RAILS.iter().cycle()) {
            let (a, b) = (end("a", &settings), end("b", &settings));
            let ab = a.worker.connect(&b.worker.address(), &ConnectOptions::default()).unwrap();
            let _ba = b.worker.accept(LIMIT).unwrap();
            let (here, there) = (Pool::of(&a, false, try_), Pool::of(&b, false, try_ + 1000));
            let described = b.worker.describe(std::slice::from_ref(&there.region)).unwrap();
            let prepared = prepare(&ab, &a, &here, &described, kind);
            let lane = format!("tcp/{rail}");
            let before = carried(&ab, &lane);
            let request = prepared.start(StartOptions::default()).unwrap();
            until_carried(&ab, &lane, before, 256 << 10, &request);
            let was_in_flight = !request.is_done() && carried(&ab, &lane) > before;
            cut(*rail);
            let receipt = request.wait(LIMIT).unwrap_or_else(|error| panic!("{kind:?}, try {try_}: {error}"));
            assert_eq!(receipt.bytes, ROW * ROWS);
            let (to, seed) = if kind == MoveKind::Write { (&there, try_) } else { (&here, try_ + 1000) };
            let (contents, rows) = (to.contents(), ROWS * ROW);
            let expected = |at: u64| byte(rows - ROW - at / ROW * ROW + at % ROW, seed);
            let wrong = (0..rows).position(|at| contents[at as usize] != expected(at));
            assert_eq!(wrong, None, "{kind:?}, try {try_}");
            // One notice, behind the last byte of all rails.
            b.worker.wait_notice(LIMIT.unwrap());
            let raised: Vec<_> = b.worker.notices(9).into_iter().map(|notice| notice.bytes).collect();
            assert_eq!(raised, [b"done"], "{kind:?}, try {try_}");
            were_lost += u32::from(was_in_flight);
            if were_lost == 2 {
                break;
            }
        }
        println!("{kind:?}: {were_lost} rails were lost in mid-move");
        assert!(were_lost > 0, "{kind:?}: no move was in flight when its rail was lost");
    }
}

#[test]
#[ignore = "the child of the test below"]
fn role_lends_its_memory_until_it_is_killed() {
    let Ok(told) = std::env::var(PARENT) else { return };
    let [address, tls, can_be_mapped] = told.split(' ').collect::<Vec<_>>().try_into().expect("three words");
    let address: Vec<u8> =
        (0..address.len()).step_by(2).map(|at| u8::from_str_radix(&address[at..at + 2], 16).unwrap()).collect();
    let me = end("doomed", &[("CROSSRAIL_TLS", tls)]);
    let pool = Pool::of(&me, can_be_mapped == "true", 7);
    let parent = me.worker.connect(&address, &ConnectOptions::default()).unwrap();
    let described = me.worker.describe(std::slice::from_ref(&pool.region)).unwrap();
    parent.send(described, 1).unwrap().wait(LIMIT).unwrap();
    // Until it is killed, or its parent is gone.
    let mut line = String::new();
    let _ = std::io::stdin().read_line(&mut line);
}

struct Doomed(Child);

impl Doomed {
    fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Doomed {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A child that lends its memory, connected to `to`, and its description.
fn doomed(to: &End, tls: &str, can_be_mapped: bool) -> (Doomed, Endpoint, Vec<u8>) {
    let address: String = to.worker.address().iter().map(|byte| format!("{byte:02x}")).collect();
    let child = Command::new(std::env::current_exe().expect("this test"))
        .args(["role_lends_its_memory_until_it_is_killed", "--exact", "--ignored", "--nocapture"])
        .env(PARENT, format!("{address} {tls} {can_be_mapped}"))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("spawn");
    let child = Doomed(child);
    let endpoint = to.worker.accept(LIMIT).unwrap();
    let received = to.worker.recv(vec![0; 1 << 16], 1, u64::MAX, Some(&endpoint)).unwrap();
    let len = received.wait(LIMIT).unwrap().bytes as usize;
    let described = received.into_vec().unwrap()[..len].to_vec();
    (child, endpoint, described)
}

/// That the error says that the peer is dead, and names it.
fn expect_dead(error: &crossrail::Error, what: &str) {
    assert!(matches!(error.kind, ErrorKind::PeerDead | ErrorKind::Closed), "{what}: {error}");
    assert!(error.to_string().contains("doomed"), "{what}: {error}");
}

#[test]
fn a_move_with_a_peer_that_is_killed_fails_and_nothing_is_written_afterwards() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    for (tls, can_be_mapped) in [("shm", false), ("shm", true), ("tcp", false)] {
        for kind in [MoveKind::Write, MoveKind::Read] {
            let what = format!("{tls}, mapped {can_be_mapped}, {kind:?}");
            let mut failed = 0;
            for try_ in 0..TRIES {
                let here = end("survivor", &[("CROSSRAIL_TLS", tls)]);
                let (mut child, endpoint, described) = doomed(&here, tls, can_be_mapped);
                let pool = Pool::of(&here, can_be_mapped, try_);
                let prepared = prepare(&endpoint, &here, &pool, &described, kind);
                let before = carried(&endpoint, "");
                let request = prepared.start(StartOptions::default()).unwrap();
                until_carried(&endpoint, "", before, 1, &request);
                child.kill();
                let outcome = request.wait(LIMIT);
                let seen = pool.contents();
                if let Err(error) = &outcome {
                    expect_dead(error, &what);
                    failed += 1;
                }
                let error = match prepared.start(StartOptions::default()) {
                    Ok(request) => request.wait(LIMIT).expect_err("nobody is there"),
                    Err(error) => error,
                };
                expect_dead(&error, &what);
                let error = match endpoint.notify(b"anybody") {
                    Ok(request) => request.wait(LIMIT).expect_err("nobody is there"),
                    Err(error) => error,
                };
                expect_dead(&error, &what);
                assert!(pool.contents() == seen, "{what}: bytes came after the end");
                if failed == 2 {
                    break;
                }
            }
            println!("{what}: {failed} moves failed");
            assert!(failed > 0, "{what}: no move was in flight when its peer was killed");
        }
    }
}
