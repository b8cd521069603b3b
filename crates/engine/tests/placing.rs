//! One-sided writes between workers: rails, their loss and return, and the end of endpoints.
#![allow(unsafe_code)] // exposes and writes memory of the tests, which outlives the objects

use std::net::Ipv4Addr;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail::placing::{self, Counter, Event, Extent, Imm, Key, LaneError, Loan, Placing, Post, WriteError};
use crossrail::{ConnectOptions, Context, Endpoint, ErrorKind, Settings, Worker, WorkerOptions};
use nix::sys::socket::{Shutdown, SockaddrIn, SockaddrStorage, getpeername, getsockname, shutdown};

const LIMIT: Duration = Duration::from_secs(60);

fn worker(rails: &str, name: &str) -> Worker {
    let settings = [("CROSSRAIL_TLS", "tcp"), ("CROSSRAIL_NET_DEVICES", rails)];
    let context = Context::new(Settings::from_pairs(settings).unwrap()).unwrap();
    Worker::new(&context, WorkerOptions { name: Some(name.to_owned()), ..WorkerOptions::default() }).unwrap()
}

fn pair(rails: &str) -> ((Worker, Endpoint), (Worker, Endpoint)) {
    let (a, b) = (worker(rails, "alpha"), worker(rails, "beta"));
    let ab = a.connect(&b.address(), &ConnectOptions::default()).unwrap();
    let ba = b.accept(Some(LIMIT)).unwrap();
    ((a, ab), (b, ba))
}

/// One end, with memory that the other writes into.
struct End {
    placing: Box<dyn Placing>,
    heap: Vec<u8>,
    key: Key,
    counter: Counter,
    arrived: Vec<u16>,
    ended: Vec<(u64, Result<(), WriteError>)>,
}

impl End {
    fn new(endpoint: &Endpoint, index: u16, len: usize) -> End {
        let mut placing = placing::open(endpoint, index, LIMIT).unwrap();
        let mut heap = vec![0; len];
        // SAFETY: the object is dropped before the memory.
        let key = unsafe { placing.expose(&Extent::host(heap.as_mut_ptr(), len), &Arc::new(Loan::default())) }.unwrap();
        let counter = placing.count(4096).unwrap();
        End { placing, heap, key, counter, arrived: Vec::new(), ended: Vec::new() }
    }

    fn write(&mut self, to: &End, from: &[u8], piece: u16) {
        let imm = Imm { counter: to.counter, piece };
        // SAFETY: the tests keep `from` until the write has ended.
        let posted =
            unsafe { self.placing.write(&[Extent::host(from.as_ptr(), from.len())], &to.key, 0, imm, piece.into()) };
        assert_eq!(posted, Ok(Post::Held));
    }

    fn poll(&mut self) -> Result<bool, LaneError> {
        let (arrived, ended) = (&mut self.arrived, &mut self.ended);
        self.placing.poll(&mut |event| match event {
            Event::Arrived(imm) => arrived.push(imm.piece),
            Event::Ended { token, result } => ended.push((token, result)),
        })
    }
}

fn drive(a: &mut End, b: &mut End, what: &str, done: impl Fn(&End, &End) -> bool) {
    let began = Instant::now();
    while !done(a, b) {
        a.poll().unwrap();
        b.poll().unwrap();
        assert!(began.elapsed() < LIMIT, "{what}: {:?} {:?}", a.placing.rails(), b.placing.rails());
    }
}

fn until_error(end: &mut End) -> LaneError {
    let began = Instant::now();
    loop {
        match end.poll() {
            Ok(_) => assert!(began.elapsed() < LIMIT, "no error"),
            Err(error) => return error,
        }
    }
}

#[test]
fn every_rail_carries_its_part_both_ways_and_objects_are_independent() {
    let rails = "127.0.0.31,127.0.0.32,127.0.0.33,127.0.0.34";
    let ((_a, ab), (_b, ba)) = pair(rails);
    let bytes: Vec<u8> = (0..32 << 20).map(|at: u32| ((at * 7) >> 3) as u8).collect();
    for index in [0, 3] {
        let (mut one, mut two) = (End::new(&ab, index, bytes.len()), End::new(&ba, index, bytes.len()));
        assert_eq!((one.placing.peer(), two.placing.peer()), ("beta", "alpha"));
        one.write(&two, &bytes, 7);
        two.write(&one, &bytes, 9);
        drive(&mut one, &mut two, "both arrive", |one, two| one.ended.len() == 1 && two.ended.len() == 1);
        assert!(one.heap == bytes && two.heap == bytes);
        assert_eq!((one.arrived, two.arrived), (vec![9], vec![7]));
        let reports = one.placing.rails();
        assert_eq!(reports.len(), 4, "{reports:?}");
        for report in reports {
            assert!(report.name.starts_with("tcp/127.0.0.3") && report.lost.is_none(), "{report:?}");
            assert!(report.tx_bytes > 1 << 20 && report.rx_bytes > 1 << 20, "{report:?}");
        }
    }
}

#[test]
fn asked_for_again_it_is_a_new_one() {
    let ((_a, ab), (_b, ba)) = pair("127.0.0.35,127.0.0.36");
    let bytes = vec![5; 100_000];
    for round in 0..3 {
        // Either end may drop its old one, and ask for the next, first.
        let (mut two, mut one);
        if round == 1 {
            let asked = ba.clone();
            let waits = std::thread::spawn(move || End::new(&asked, 0, 100_000));
            one = End::new(&ab, 0, 100_000);
            two = waits.join().unwrap();
        } else {
            one = End::new(&ab, 0, 100_000);
            two = End::new(&ba, 0, 100_000);
        }
        one.write(&two, &bytes, 1);
        drive(&mut one, &mut two, "it arrives", |_, two| two.arrived == [1]);
        assert_eq!(two.heap, bytes);
        drop(two);
        let error = until_error(&mut one);
        assert!(error.to_string().contains("beta"), "{error}");
        assert!(ab.is_alive() && ba.is_alive(), "only the object has ended");
    }
}

#[test]
fn the_end_of_an_endpoint_ends_its_objects_by_its_reason() {
    let ((_a, ab), (b, ba)) = pair("127.0.0.37");
    let (mut one, mut two) = (End::new(&ab, 0, 1000), End::new(&ba, 0, 1000));
    let bytes = [3; 1000];
    one.write(&two, &bytes, 1);
    drive(&mut one, &mut two, "it arrives", |_, two| two.arrived == [1]);
    two.write(&one, &bytes, 2);
    two.poll().unwrap();
    b.close().unwrap();
    let (here, there) = (until_error(&mut two), until_error(&mut one));
    assert!(matches!(here, LaneError::Closed(_)), "{here:?}");
    assert!(here.to_string().contains("alpha"), "its own end: {here}");
    assert!(there.to_string().contains("beta"), "the peer's: {there}");
    assert_eq!(one.arrived, [2], "what had arrived is reported before the end");
    // The object learns it from its own connection, the endpoint from another.
    let start = Instant::now();
    while ab.is_alive() {
        assert!(start.elapsed() < LIMIT, "the endpoint has not ended");
        std::thread::sleep(Duration::from_millis(1));
    }
    let error = placing::open(&ab, 1, LIMIT).err().expect("the endpoint has ended");
    assert!(matches!(error.kind, ErrorKind::Closed | ErrorKind::PeerDead), "{error}");
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let ((_a, ab), (_b, ba)) = pair("127.0.0.38");
    assert_eq!(placing::open(&ab, 16, LIMIT).err().expect("16 of 0 to 15").kind, ErrorKind::Usage);
    let error = placing::open(&ba, 0, Duration::from_millis(50)).err().expect("the other end does not ask");
    assert_eq!(error.kind, ErrorKind::Timeout);
    assert!(error.to_string().contains("alpha") && error.to_string().contains("none"), "{error}");
    let lone = worker("127.0.0.38", "lone");
    let own = Context::new(Settings::from_pairs([("CROSSRAIL_TLS", "self")]).unwrap()).unwrap();
    let own = Worker::new(&own, WorkerOptions::default()).unwrap();
    let own = own.connect(&own.address(), &ConnectOptions::default()).unwrap();
    assert_eq!(placing::open(&own, 0, LIMIT).err().expect("no rails").kind, ErrorKind::Unsupported);
    drop(lone);
}

/// The connections of this process between two of its own sockets at that address, apart from listeners.
fn sockets_at(rail: Ipv4Addr) -> Vec<RawFd> {
    let is_at = |address: nix::Result<SockaddrStorage>| {
        address.is_ok_and(|address| address.as_sockaddr_in().map(SockaddrIn::ip) == Some(rail))
    };
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    let fds = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    fds.filter(|fd: &RawFd| is_at(getsockname(*fd)) && is_at(getpeername(*fd))).collect()
}

#[test]
fn a_lost_rail_loses_nothing_and_comes_back() {
    let (kept, broken) = (Ipv4Addr::new(127, 0, 0, 41), Ipv4Addr::new(127, 0, 0, 42));
    let ((_a, ab), (_b, ba)) = pair(&format!("{kept},{broken}"));
    let before = sockets_at(broken);
    let bytes = vec![6; 4 << 20];
    let (mut one, mut two) = (End::new(&ab, 0, bytes.len()), End::new(&ba, 0, bytes.len()));
    let ours: Vec<RawFd> = sockets_at(broken).into_iter().filter(|fd| !before.contains(fd)).collect();
    assert_eq!(ours.len(), 2, "one connection over that rail");
    for piece in 0..20 {
        one.write(&two, &bytes, piece);
        if piece == 10 {
            // SAFETY: the objects keep it open; used for this call only.
            let fd = unsafe { BorrowedFd::borrow_raw(ours[0]) };
            shutdown(std::os::fd::AsRawFd::as_raw_fd(&fd), Shutdown::Both).unwrap();
        }
        drive(&mut one, &mut two, "it arrives", |_, two| two.arrived.contains(&piece));
    }
    assert_eq!(two.arrived.len(), 20, "{:?}", two.arrived);
    let name = format!("tcp/{broken}:placing");
    let is_up = |end: &End| end.placing.rails().iter().any(|rail| rail.name == name && rail.lost.is_none());
    drive(&mut one, &mut two, "the rail is back", |one, two| is_up(one) && is_up(two));
    let sent = |end: &End| end.placing.rails().iter().find(|rail| rail.name == name).unwrap().tx_bytes;
    let until_now = sent(&one);
    for piece in 20..30 {
        one.write(&two, &bytes, piece);
    }
    drive(&mut one, &mut two, "all arrive", |one, _| one.ended.len() == 30);
    assert!(sent(&one) > until_now, "the rail that is back carries nothing");
    assert!(one.ended.iter().all(|(_, result)| result.is_ok()) && two.heap == bytes);
}
