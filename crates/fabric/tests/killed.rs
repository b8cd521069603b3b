//! Two processes, one of which is killed or stopped while it writes or is written to.
#![allow(unsafe_code)] // exposes and writes the test's own memory, which outlives the objects

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{LIMIT, offer};
use crossrail_fabric::{FabricPlacing, attach};
use crossrail_transport::placing::{Counter, Event, Extent, Imm, Key, PIECES_MAX, Placing, Revoked};
use crossrail_transport::{LaneError, Loan, Post};

/// Where the parent listens, and what the child does: `ADDRESS PROVIDER WAY`.
const PARENT: &str = "CROSSRAIL_TEST_FABRIC_PARENT";
const LEN: usize = 1 << 20;
/// Time within which a killed peer is named.
const NAMED_WITHIN: Duration = Duration::from_millis(500);

/// One end: writes without a pause if it is to, into the peer's memory.
struct End {
    // First: nothing refers to the memory below when it is dropped.
    placing: FabricPlacing,
    heap: Vec<u8>,
    bytes: Vec<u8>,
    key: Key,
    /// Of our heap.
    own: Key,
    loan: Arc<Loan>,
    counter: Counter,
    ours: usize,
    posted: u16,
    arrived: u64,
}

impl End {
    fn new(mut stream: TcpStream, provider: &str) -> Option<End> {
        let offer = offer(provider)?;
        let beside = stream.try_clone().expect("a descriptor");
        let mut placing =
            attach(beside, &offer, "the other process", &format!("fabric/{offer}"), Instant::now() + LIMIT)
                .expect("up");
        let (mut heap, bytes) = (vec![0; LEN], vec![7; LEN]);
        let loan = Arc::new(Loan::default());
        // SAFETY: the heap outlives the object.
        let key = unsafe { placing.expose(&Extent::host(heap.as_mut_ptr(), LEN), &loan) };
        let (key, counter) = (key.expect("a key"), placing.count(PIECES_MAX).expect("a counter"));
        let _ = &mut stream;
        Some(End { placing, heap, bytes, key, own: key, loan, counter, ours: 0, posted: 0, arrived: 0 })
    }

    /// Exchanges keys over a second connection.
    fn meet(mut self, mut stream: TcpStream) -> End {
        stream.write_all(&self.key.0).expect("room");
        let mut key = [0; 32];
        stream.read_exact(&mut key).expect("the peer's key");
        self.key = Key(key);
        self
    }

    fn turn(&mut self, writes: bool) -> Result<bool, LaneError> {
        let (ours, arrived) = (&mut self.ours, &mut self.arrived);
        let moved = self.placing.poll(&mut |event| match event {
            Event::Ended { .. } => *ours -= 1,
            Event::Arrived(_) => *arrived += 1,
        })?;
        while writes && self.ours < 4 {
            let from = [Extent::host(self.bytes.as_ptr(), LEN)];
            let imm = Imm { counter: self.counter, piece: self.posted % PIECES_MAX };
            // SAFETY: the bytes outlive the object.
            if unsafe { self.placing.write(&from, &self.key, 0, imm, 0) }? != Post::Held {
                break;
            }
            (self.ours, self.posted) = (self.ours + 1, self.posted.wrapping_add(1));
        }
        Ok(moved)
    }
}

fn connect(provider: &str, address: &str) -> Option<End> {
    let first = TcpStream::connect(address).expect("connect");
    let second = TcpStream::connect(address).expect("connect");
    Some(End::new(first, provider)?.meet(second))
}

#[test]
#[ignore = "the child of the tests below"]
fn role_carries_until_it_is_killed() {
    let Ok(told) = std::env::var(PARENT) else { return };
    let [address, provider, way] = told.split(' ').collect::<Vec<_>>().try_into().expect("three words");
    let mut end = connect(provider, address).expect("a provider");
    let mut carries = false;
    let mut turns = 0u64;
    // Until it is killed, or its parent is no more.
    while end.turn(way != "in").is_ok() {
        turns += 1;
        if !carries && (end.arrived > 3 || way == "out" && turns > 1000) {
            println!("\ncarries");
            carries = true;
        }
    }
}

struct Doomed(Child);

impl Drop for Doomed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Doomed {
    /// Stops it, and returns once no thread of it runs: until then it may answer.
    fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let start = Instant::now();
        let tasks = format!("/proc/{}/task", self.0.id());
        let runs = || {
            let mut tasks = std::fs::read_dir(&tasks).expect("it lives").flatten();
            // pid (name) state ...
            tasks.any(|task| {
                let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
                stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('T'))
            })
        };
        while runs() {
            assert!(start.elapsed() < LIMIT, "it does not stop");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn signal(&self, signal: libc::c_int) {
        // SAFETY: the child was not waited for.
        assert_eq!(unsafe { libc::kill(self.0.id() as libc::pid_t, signal) }, 0);
    }
}

fn spawn(provider: &str, way: &str) -> Option<(Doomed, End)> {
    offer(provider)?;
    let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
    let address = listener.local_addr().expect("bound");
    let child = Command::new(std::env::current_exe().expect("this test"))
        .args(["role_carries_until_it_is_killed", "--exact", "--ignored", "--nocapture"])
        .env(PARENT, format!("{address} {provider} {way}"))
        .stdout(Stdio::piped())
        .spawn()
        .expect("spawn");
    let child = Doomed(child);
    let first = listener.accept().expect("accept").0;
    let second = listener.accept().expect("accept").0;
    Some((child, End::new(first, provider)?.meet(second)))
}

/// Kills a peer that writes to us (`out`), that we write to (`in`), or both: it must be named in time, and our memory is
/// quiet afterwards.
fn killed(provider: &str, way: &str) {
    let Some((mut child, mut end)) = spawn(provider, way) else { return };
    let mut lines = BufReader::new(child.0.stdout.take().expect("piped")).lines();
    let killer = std::thread::spawn(move || {
        assert!(lines.any(|line| line.is_ok_and(|line| line == "carries")), "the child has ended early");
        child.0.kill().expect("kill");
        child.0.wait().expect("wait");
        Instant::now()
    });
    let start = Instant::now();
    let error = loop {
        if let Err(error) = end.turn(way != "out") {
            break error;
        }
        assert!(start.elapsed() < LIMIT, "{provider}, {way}: no error");
    };
    let named = Instant::now();
    let died = killer.join().expect("the child carried until it was killed");
    let took = named.saturating_duration_since(died);
    eprintln!("{provider}, {way}: named after {took:?}: {error}");
    assert!(matches!(error, LaneError::Closed(_)), "{provider}, {way}: {error}");
    assert!(error.to_string().contains("the other process"), "{error}");
    assert!(took < NAMED_WITHIN, "{provider}, {way}: after {took:?}");
    end.heap.fill(9);
    std::thread::sleep(Duration::from_millis(50));
    assert!(end.heap.iter().all(|byte| *byte == 9), "{provider}, {way}: written after the end");
}

/// Stops a peer that writes to us. That alone is not an error, and the peer continues where it was; but memory that it may be
/// writing stays lent until it has confirmed, or was named because it does not, and is quiet from then on, also once it
/// continues.
fn stopped(provider: &str) {
    let Some((mut child, mut end)) = spawn(provider, "out") else { return };
    let mut lines = BufReader::new(child.0.stdout.take().expect("piped")).lines();
    let until = |end: &mut End, arrived: u64| {
        let start = Instant::now();
        while end.arrived < arrived {
            end.turn(false).expect("the peer is alive");
            assert!(start.elapsed() < LIMIT, "{provider}: {} of {arrived} writes", end.arrived);
        }
    };
    until(&mut end, 5);
    assert!(lines.any(|line| line.is_ok_and(|line| line == "carries")), "the child has ended early");
    child.stop();
    // All that is in flight arrives.
    let (mut moved, start) = (Instant::now(), Instant::now());
    while moved.elapsed() < Duration::from_millis(200) {
        if end.turn(false).expect("a stopped peer is not lost") {
            moved = Instant::now();
        }
        assert!(start.elapsed() < LIMIT, "{provider}: it is not stopped");
    }
    child.signal(libc::SIGCONT);
    let more = end.arrived + 5;
    until(&mut end, more);

    child.stop();
    let own = end.own;
    assert_eq!(end.placing.revoke(&own), Revoked::OnceReturned, "{provider}: the peer writes by it");
    end.loan.recall();
    let start = Instant::now();
    let error = loop {
        assert!(!end.loan.is_returned(), "{provider}: returned while the peer may be writing");
        if let Err(error) = end.turn(false) {
            break error;
        }
        assert!(start.elapsed() < LIMIT, "{provider}: no error");
    };
    let took = start.elapsed();
    eprintln!("{provider}: named after {took:?}: {error}");
    assert!(took > Duration::from_secs(2) && took < Duration::from_secs(5), "{provider}: after {took:?}");
    let text = error.to_string();
    assert!(text.contains("the other process") && text.contains("did not confirm"), "{text}");
    assert!(end.loan.is_returned(), "{provider}: with the endpoint ends the access");
    end.heap.fill(9);
    child.signal(libc::SIGCONT);
    // It learns of the end, and exits; until then it writes.
    child.0.wait().expect("the child ends");
    assert!(end.heap.iter().all(|byte| *byte == 9), "{provider}: written after the end");
}

#[test]
fn a_stopped_peer_is_named_once_memory_is_wanted_back() {
    ["tcp", "net"].iter().for_each(|provider| stopped(provider));
}

#[test]
fn a_killed_peer_is_named_over_tcp() {
    ["in", "out", "both"].iter().for_each(|way| killed("tcp", way));
}

#[test]
fn a_killed_peer_is_named_over_net() {
    ["in", "out", "both"].iter().for_each(|way| killed("net", way));
}

// Not over shm: a process that is killed within a call of that provider leaves a spin lock in shared memory taken, on which
// the other end's next call spins for ever, as a run with 1.17 did. It is used only if it is named.
