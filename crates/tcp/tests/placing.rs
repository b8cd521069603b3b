//! One-sided writes over connections: the conformance suite, rails that fail, and peers that lie.
#![allow(unsafe_code)] // exposes and writes memory of the tests

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::BorrowedFd;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_tcp::placing::{Connection, Door, Head, Kind, LINKS_MAX, TcpPlacing};
use crossrail_transport::placing::conformance::{self, Pair};
use crossrail_transport::placing::{Counter, Event, Extent, Imm, Key, Placing};
use crossrail_transport::{LaneError, Post};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use common::{PATIENCE, streams};

fn door() -> Arc<Door> {
    Arc::new(Door::new(LINKS_MAX).expect("a descriptor"))
}

fn connection(id: u16, stream: TcpStream) -> Connection {
    Connection {
        id,
        name: format!("tcp/127.0.0.{}", id + 1),
        cost: id.into(),
        interface: Some(format!("eth{id}")),
        stream,
    }
}

/// Two ends over `rails` loopback addresses, and a handle on each connection.
fn ends(rails: usize) -> (TcpPlacing, TcpPlacing, Vec<TcpStream>) {
    let (mut dialled, mut accepted, mut handles) = (Vec::new(), Vec::new(), Vec::new());
    for id in 0..rails as u16 {
        let address = format!("127.0.0.{}", id + 1);
        let (a, b) = streams(&address, &address);
        handles.push(a.try_clone().expect("a descriptor"));
        dialled.push(connection(id, a));
        accepted.push(connection(id, b));
    }
    let a = TcpPlacing::new("the acceptor", true, dialled, door()).expect("options");
    let b = TcpPlacing::new("the connector", false, accepted, door()).expect("options");
    (a, b, handles)
}

fn pair(rails: usize) -> Pair {
    let (a, b, handles) = ends(rails);
    let lose = move |rail: usize| {
        let _ = handles[rail].shutdown(Shutdown::Both);
    };
    Pair { a: Box::new(a), b: Box::new(b), rails, lose: Box::new(lose) }
}

#[test]
fn one_rail_conforms() {
    conformance::run("tcp, one rail", &mut || pair(1));
}

#[test]
fn four_rails_conform() {
    conformance::run("tcp, four rails", &mut || pair(4));
}

#[test]
fn lost_rails_lose_and_repeat_nothing() {
    conformance::run_losses("tcp", 0..30, &mut || pair(4));
}

#[test]
fn a_rail_is_lost_with_its_interface() {
    let (mut dialled, mut accepted) = (Vec::new(), Vec::new());
    for id in 0..2 {
        let (a, b) = streams("127.0.0.1", "127.0.0.1");
        dialled.push(connection(id, a));
        accepted.push(connection(id, b));
    }
    let at = door();
    let mut a = TcpPlacing::new("the acceptor", true, dialled, Arc::clone(&at)).expect("options");
    let mut b = TcpPlacing::new("the connector", false, accepted, door()).expect("options");
    let mut lost = |wanted: usize| {
        let start = Instant::now();
        loop {
            a.poll(&mut |_| {}).expect("one rail is left");
            b.poll(&mut |_| {}).expect("one rail is left");
            let why: Vec<_> = [&a, &b].map(|end| end.rails()[1].lost.clone()).into_iter().flatten().collect();
            if why.len() == wanted {
                return why;
            }
            assert!(start.elapsed() < PATIENCE, "{why:?}");
        }
    };
    at.interface_down("eth7");
    assert_eq!(lost(0), Vec::<String>::new());
    at.interface_down("eth1");
    assert_eq!(lost(2), ["eth1 is down", "the peer dropped it"]);
}

/// Arrivals are delivered before a long write is sent, and not only once nothing is left to be sent.
#[test]
fn a_long_write_does_not_delay_what_has_arrived() {
    let (mut a, mut b, _handles) = ends(1);
    let mut heaps = [vec![0u8; 256 << 10], vec![0u8; 256 << 10]];
    let mut expose = |end: &mut TcpPlacing, at: usize| {
        let extent = Extent::host(heaps[at].as_mut_ptr(), heaps[at].len());
        // SAFETY: both ends are dropped before the heaps.
        let key = unsafe { end.expose(&extent, &Arc::default()) }.expect("a key");
        (key, end.count(1).expect("a counter"))
    };
    let (of_a, of_b) = (expose(&mut a, 0), expose(&mut b, 1));
    let start = Instant::now();
    // Until each end knows that its socket is empty.
    while !(a.arm() && b.arm()) {
        a.poll(&mut |_| {}).expect("up");
        b.poll(&mut |_| {}).expect("up");
        assert!(start.elapsed() < PATIENCE);
    }
    let from = vec![7u8; 256 << 10];
    let write = |end: &mut TcpPlacing, len: usize, (key, counter): &(Key, Counter)| {
        let imm = Imm { counter: *counter, piece: 0 };
        // SAFETY: `from` outlives both ends.
        unsafe { end.write(&[Extent::host(from.as_ptr(), len)], key, 0, imm, 0) }.expect("up")
    };
    write(&mut b, 8, &of_a);
    b.poll(&mut |_| {}).expect("up");
    // SAFETY: the descriptor is open as long as `a`.
    let readable = unsafe { BorrowedFd::borrow_raw(a.fd().expect("a descriptor")) };
    let ready = poll(&mut [PollFd::new(readable, PollFlags::POLLIN)], PollTimeout::from(10_000u16)).expect("poll");
    assert_eq!(ready, 1, "the short write arrives");
    write(&mut a, from.len(), &of_b);
    let mut arrived = 0;
    a.poll(&mut |event| arrived += usize::from(matches!(event, Event::Arrived(_)))).expect("up");
    assert_eq!(arrived, 1, "with the poll that sends");
    drop((a, b));
}

/// An object with one exposure of 4 KiB and one counter of 4 pieces, and the plain sockets of its peer.
struct Victim {
    placing: TcpPlacing,
    heap: Vec<u8>,
    key: Key,
    peer: Vec<TcpStream>,
}

fn victim() -> Victim {
    victim_of(2)
}

fn victim_of(rails: u16) -> Victim {
    victim_at(rails, &door())
}

fn victim_at(rails: u16, at: &Arc<Door>) -> Victim {
    let (mut accepted, mut peer) = (Vec::new(), Vec::new());
    for id in 0..rails {
        let (a, b) = streams("127.0.0.1", "127.0.0.1");
        peer.push(a);
        accepted.push(connection(id, b));
    }
    let mut placing = TcpPlacing::new("mallory", false, accepted, Arc::clone(at)).expect("options");
    let mut heap = vec![0x11; 4096];
    // SAFETY: the object goes first.
    let key = unsafe { placing.expose(&Extent::host(heap.as_mut_ptr(), 4096), &Arc::default()) }.expect("a key");
    assert_eq!(placing.count(4), Some(Counter(0)));
    Victim { placing, heap, key, peer }
}

/// Sends `bytes` over the first rail and polls until the object fails.
fn provoke(mut victim: Victim, bytes: &[u8]) -> (String, Vec<Imm>, Vec<u8>) {
    (&victim.peer[0]).write_all(bytes).expect("a socket that takes it");
    let (start, mut arrived) = (Instant::now(), Vec::new());
    loop {
        let result = victim.placing.poll(&mut |event| {
            if let Event::Arrived(imm) = event {
                arrived.push(imm);
            }
        });
        match result {
            Ok(_) => assert!(start.elapsed() < PATIENCE, "it was not refused"),
            Err(LaneError::Protocol(why)) => return (why, arrived, victim.heap),
            Err(other) => panic!("{other:?}"),
        }
    }
}

fn part(key: &Key, at: u64, len: u32, piece: u16) -> Head {
    let imm = Imm { counter: Counter(0), piece }.word(0);
    Head { key: key.id(), at, len, whole: len, imm, ..Head::new(Kind::Part) }
}

#[test]
fn what_no_peer_sends_ends_it_by_name() {
    let key = victim().key;
    let with = |head: Head| head.encode().to_vec();
    let paid = |head: Head| [with(head), vec![7; head.len as usize]].concat();
    let good = part(&key, 0, 16, 1);
    let dropped = |link, whole| with(Head { link, whole, ..Head::new(Kind::Dropped) });
    let ready = |link| with(Head { link, ..Head::new(Kind::Ready) });
    let of = |bytes: Vec<u8>, why: &'static str| (bytes, why);
    let cases = [
        of(vec![0; 40], "kind 0"),
        of(vec![0xff; 40], "kind 255"),
        of(with(Head { ack: 1, ..Head::new(Kind::Ack) }), "acknowledges 1 frames"),
        of(with(Head { ack: 1 << 30, ..Head::new(Kind::Ack) }), "acknowledges"),
        of(with(Head { link: 1, whole: 1, ..Head::new(Kind::AckOf) }), "acknowledges 1 frames"),
        of([ready(2), ready(2), ready(3)].concat(), "connects again"),
        of(dropped(1, 1), "more than it was sent"),
        of((0..1025).rev().flat_map(|link| dropped(link, 0)).collect(), "connection 1024 of 1024"),
        of(paid(Head { key: key.id() ^ 1 << 20, ..good }), "not issued"),
        of(paid(Head { at: 4090, ..good }), "beyond the 4096 bytes"),
        of(paid(Head { at: u64::MAX - 3, ..good }), "beyond the 4096 bytes"),
        of(
            paid(Head { imm: Imm { counter: Counter(0), piece: 4 }.word(0), ..good }),
            "piece 4 of counter 0, which has 4",
        ),
        of(paid(Head { imm: Imm { counter: Counter(1), piece: 0 }.word(0), ..good }), "of which there are 1"),
        of([paid(Head { whole: 40, ..good }), paid(Head { whole: 41, ..good })].concat(), "of a write of 40 or 41"),
        of([paid(Head { whole: 20, ..good }), paid(Head { whole: 20, ..good })].concat(), "16 more bytes"),
    ];
    for (bytes, expected) in cases {
        // Each object has keys of its own: rewrite those of the good ones.
        let victim = victim();
        let mut bytes = bytes;
        let mut at = 0;
        while at + 40 <= bytes.len() {
            if bytes[at] == 1 && bytes[at + 8..at + 16] == key.id().to_le_bytes() {
                bytes[at + 8..at + 16].copy_from_slice(&victim.key.id().to_le_bytes());
            }
            at += 40
                + if bytes[at] == 1 {
                    u32::from_le_bytes(bytes[at + 4..at + 8].try_into().unwrap()) as usize
                } else {
                    0
                };
        }
        let (why, arrived, heap) = provoke(victim, &bytes);
        assert!(why.contains(expected), "{why}, and not {expected}");
        assert!(why.contains("mallory") && why.contains("tcp/127.0.0.1"), "{why}");
        assert!(arrived.is_empty(), "{expected}: {arrived:?}");
        assert!(heap[16..].iter().all(|byte| *byte == 0x11), "{expected}: it has written elsewhere");
    }
}

#[test]
fn a_peer_that_only_causes_answers_is_ended() {
    let mut victim = victim();
    victim.placing.revoke(&victim.key.clone());
    victim.peer[0].set_nonblocking(true).expect("fcntl");
    let frame = [part(&victim.key, 0, 16, 1).encode().to_vec(), vec![7; 16]].concat();
    let many = frame.repeat(500);
    let (start, mut sent) = (Instant::now(), 0);
    let error = loop {
        // Whole frames only.
        while sent < many.len()
            && let Ok(n) = (&victim.peer[0]).write(&many[sent..])
        {
            sent += n;
        }
        sent %= many.len();
        match victim.placing.poll(&mut |event| panic!("{event:?}")) {
            Ok(_) => assert!(start.elapsed() < 4 * PATIENCE, "answers are kept for ever"),
            Err(error) => break error,
        }
    };
    assert!(matches!(&error, LaneError::Protocol(why) if why.contains("takes none")), "{error:?}");
    assert!(victim.heap.iter().all(|byte| *byte == 0x11));
}

/// Answers of an object that may be unacknowledged.
const ANSWERS: usize = 1 << 16;

/// Writes by a key that was revoked, over that rail, and takes the answers, but acknowledges none of them. `most`: of
/// them; how many were taken when the object ended, if it has.
fn takes_answers(victim: &mut Victim, rail: usize, most: usize) -> Option<(usize, LaneError)> {
    let frame = [part(&victim.key, 0, 16, 1).encode().to_vec(), vec![7; 16]].concat();
    let mut buffer = vec![0; 1 << 16];
    let (start, mut taken) = (Instant::now(), 0);
    victim.peer[rail].set_nonblocking(true).expect("fcntl");
    for _ in 0..most.div_ceil(100) {
        (&victim.peer[rail]).write_all(&frame.repeat(100)).expect("room: the object reads all");
        let wanted = taken + 100 * 40;
        while taken < wanted {
            if let Err(error) = victim.placing.poll(&mut |event| panic!("{event:?}")) {
                return Some((taken / 40, error));
            }
            taken += (&victim.peer[rail]).read(&mut buffer).unwrap_or(0);
            assert!(start.elapsed() < 4 * PATIENCE, "{taken} of {wanted} bytes");
        }
    }
    None
}

#[test]
fn a_peer_that_acknowledges_no_answers_is_ended() {
    let mut victim = victim();
    victim.placing.revoke(&victim.key.clone());
    let (taken, error) = takes_answers(&mut victim, 0, 2 * ANSWERS).expect("answers are kept for ever");
    assert!(matches!(&error, LaneError::Protocol(why) if why.contains("acknowledges none of 65536")), "{error:?}");
    assert!((ANSWERS - 200..=ANSWERS).contains(&taken), "{taken}");
}

#[test]
fn a_peer_that_connects_again_and_again_causes_no_more_answers() {
    let at = door();
    let mut victim = victim_at(2, &at);
    victim.placing.revoke(&victim.key.clone());
    for id in 2..100 {
        if let Some((_, error)) = takes_answers(&mut victim, 0, 4000) {
            assert!(
                matches!(&error, LaneError::Protocol(why) if why.contains("acknowledges none of 65536")),
                "{error:?}"
            );
            return assert!(id > 10, "{id}");
        }
        // Those that it has not acknowledged wait for the next connection.
        let (a, b) = streams("127.0.0.1", "127.0.0.1");
        at.add(connection(id, b));
        victim.peer[0].shutdown(Shutdown::Both).expect("connected");
        victim.peer[0] = std::mem::replace(&mut victim.peer[1], a);
    }
    panic!("answers are kept for ever");
}

impl Victim {
    /// Polls for at least as long as acknowledgements are delayed, and until the peer has the frame `wanted` over that
    /// rail. All frames that the peer has received over it by then.
    fn answers(&mut self, rail: usize, wanted: impl Fn(&Head) -> bool) -> Vec<Head> {
        let (start, mut bytes) = (Instant::now(), Vec::new());
        self.peer[rail].set_nonblocking(true).expect("fcntl");
        loop {
            self.placing.poll(&mut |_| {}).expect("up");
            let mut buffer = [0; 4096];
            if let Ok(n) = (&self.peer[rail]).read(&mut buffer) {
                bytes.extend_from_slice(&buffer[..n]);
            }
            let heads = bytes.chunks_exact(40).map(|head| Head::decode(head.try_into().unwrap()).expect("a frame"));
            let heads: Vec<Head> = heads.collect();
            if start.elapsed() > Duration::from_millis(5) && heads.iter().any(&wanted) {
                return heads;
            }
            assert!(start.elapsed() < PATIENCE, "{heads:?}");
        }
    }
}

#[test]
fn an_acknowledgement_that_was_lost_with_another_rail_is_repeated() {
    let mut victim = victim_of(3);
    let sent = [part(&victim.key, 0, 16, 1).encode().to_vec(), vec![7; 16]].concat();
    (&victim.peer[2]).write_all(&sent).expect("room");
    let is_ack = |head: &Head| head.kind == Kind::AckOf && (head.link, head.whole) == (2, 1);
    victim.answers(0, is_ack);
    // As if that had not been delivered.
    victim.peer[0].shutdown(Shutdown::Both).expect("connected");
    let heads = victim.answers(1, is_ack);
    assert_eq!((heads[0].kind, heads[0].link), (Kind::Dropped, 0), "{heads:?}");
}

#[test]
fn no_acknowledgement_overtakes_that_a_part_was_discarded() {
    let mut victim = victim();
    let mut more = vec![0; 4096];
    let gone = victim.key;
    victim.placing.revoke(&gone);
    // SAFETY: the object goes first.
    let key = unsafe { victim.placing.expose(&Extent::host(more.as_mut_ptr(), 4096), &Arc::default()) }.expect("a key");
    let frames = [gone, key].map(|key| [part(&key, 0, 16, 1).encode().to_vec(), vec![7; 16]].concat()).concat();
    (&victim.peer[1]).write_all(&frames).expect("room");
    let heads = victim.answers(1, |head| head.ack == 2);
    assert_eq!((heads[0].kind, heads[0].ack), (Kind::Discarded, 1), "{heads:?}");
    let mut over_other = [0; 40];
    let read = victim.peer[0].set_nonblocking(true).and_then(|()| (&victim.peer[0]).read(&mut over_other));
    assert_eq!(read.expect_err("nothing over the other").kind(), std::io::ErrorKind::WouldBlock);
    drop(victim);
}

/// Runs this test binary once more, as a peer that writes 1 MiB again and again.
fn peer_process(listener: &std::net::TcpListener) -> (Child, TcpPlacing) {
    let child = Command::new(std::env::current_exe().expect("a path"))
        .args(["--exact", "peer", "--nocapture"])
        .env("PLACING_PEER", listener.local_addr().expect("bound").to_string())
        .stdout(Stdio::null())
        .spawn()
        .expect("spawn");
    let accepted = (0..3).map(|id| connection(id, listener.accept().expect("accept").0)).collect();
    (child, TcpPlacing::new("the child", false, accepted, door()).expect("options"))
}

const BLOCK: usize = 1 << 20;

/// Not a test by itself: the other process of those below.
#[test]
fn peer() {
    let Ok(address) = std::env::var("PLACING_PEER") else { return };
    let address: std::net::SocketAddr = address.parse().expect("an address");
    let dialled = (0..3).map(|id| connection(id, TcpStream::connect(address).expect("connect"))).collect();
    let mut placing = TcpPlacing::new("the parent", true, dialled, door()).expect("options");
    let mut key = Key([0; 32]);
    // The parent's first write brings the key of its memory.
    // SAFETY: the object ends before this function does.
    let mine = unsafe { placing.expose(&Extent::host(key.0.as_mut_ptr(), 32), &Arc::default()) }.expect("a key");
    placing.count(1).expect("a counter");
    let mut first = TcpStream::connect(address).expect("connect");
    first.write_all(&mine.0).expect("the parent reads");
    let bytes = vec![9u8; BLOCK];
    let (mut has_key, mut piece) = (false, 0u16);
    loop {
        if placing.poll(&mut |event| has_key |= matches!(event, Event::Arrived(_))).is_err() {
            return;
        }
        let imm = Imm { counter: Counter(0), piece: piece % 4096 };
        // SAFETY: `bytes` and `key` outlive the object's use of them, which ends with the process.
        let mut posted = || unsafe { placing.write(&[Extent::host(bytes.as_ptr(), BLOCK)], &key, 0, imm, 0) };
        if has_key && piece < 4000 && matches!(posted(), Ok(Post::Held)) {
            piece += 1;
        }
    }
}

struct Parent {
    child: Child,
    placing: TcpPlacing,
    heap: Vec<u8>,
    arrived: usize,
}

impl Parent {
    fn new() -> Parent {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
        let (child, mut placing) = peer_process(&listener);
        let mut theirs = Key([0; 32]);
        listener.accept().expect("accept").0.read_exact(&mut theirs.0).expect("its key");
        let mut heap = vec![0; BLOCK];
        // SAFETY: the object goes before its memory.
        let key = unsafe { placing.expose(&Extent::host(heap.as_mut_ptr(), BLOCK), &Arc::default()) }.expect("a key");
        placing.count(4096).expect("a counter");
        let imm = Imm { counter: Counter(0), piece: 0 };
        let from = Extent::host(Box::leak(Box::new(key.0)).as_ptr(), 32);
        // SAFETY: leaked.
        let posted = unsafe { placing.write(&[from], &theirs, 0, imm, 0) };
        assert_eq!(posted, Ok(Post::Held));
        Parent { child, placing, heap, arrived: 0 }
    }

    fn poll(&mut self) -> Result<bool, LaneError> {
        self.placing.poll(&mut |event| self.arrived += usize::from(matches!(event, Event::Arrived(_))))
    }

    fn until_arrived(&mut self, count: usize) {
        let start = Instant::now();
        while self.arrived < count {
            self.poll().expect("up");
            assert!(start.elapsed() < 4 * PATIENCE, "{} of {count} arrived", self.arrived);
        }
    }
}

impl Drop for Parent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_killed_peer_is_named_and_its_memory_quiet() {
    let mut parent = Parent::new();
    parent.until_arrived(20);
    parent.child.kill().expect("killed");
    let start = Instant::now();
    let error = loop {
        match parent.poll() {
            Ok(_) => assert!(start.elapsed() < PATIENCE, "its end was not noticed"),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, LaneError::Closed(_)), "{error:?}");
    assert!(error.to_string().contains("the child: all rails are lost"), "{error}");
    parent.heap.fill(0x5A);
    assert_eq!(parent.poll(), Err(error));
    assert!(parent.heap.iter().all(|byte| *byte == 0x5A));
}

#[test]
fn a_stopped_peer_goes_on_where_it_was() {
    let mut parent = Parent::new();
    parent.until_arrived(20);
    let pid = nix::unistd::Pid::from_raw(parent.child.id() as i32);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGSTOP).expect("stopped");
    let start = Instant::now();
    // Longer than the limit for a silent rail while another one works.
    while start.elapsed() < Duration::from_millis(1500) {
        parent.poll().expect("a stopped peer is not lost");
    }
    let before = parent.arrived;
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGCONT).expect("continued");
    parent.until_arrived(before + 50);
    assert!(parent.placing.rails().iter().all(|rail| rail.lost.is_none()), "{:?}", parent.placing.rails());
}
