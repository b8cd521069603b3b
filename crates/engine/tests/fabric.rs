//! Workers over libfabric: endpoints, one-sided writes, and their ends.
#![allow(unsafe_code)] // exposes and writes memory of the tests, which outlives the objects

use std::net::Ipv4Addr;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossrail::placing::{self, Event, Extent, Imm, LaneError, Loan, Placing, Post};
use crossrail::{ConnectOptions, Context, Endpoint, ErrorKind, Settings, Worker, WorkerOptions};
use nix::sys::socket::{Shutdown, SockaddrIn, SockaddrStorage, getpeername, getsockname, shutdown};

const LIMIT: Duration = Duration::from_secs(20);

fn context(tls: &str) -> Context {
    Context::new(Settings::from_pairs([("CROSSRAIL_TLS", tls)]).unwrap()).unwrap()
}

fn worker(tls: &str, name: &str) -> Worker {
    Worker::new(&context(tls), WorkerOptions { name: Some(name.to_owned()), ..WorkerOptions::default() }).unwrap()
}

/// One test at a time: providers poll while they connect, and others would be late.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Two workers over that, joined; `None` where libfabric has no such provider, which is reported.
fn pair(tls: &str) -> Option<((Worker, Endpoint), (Worker, Endpoint))> {
    pair_over(tls, "")
}

fn pair_over(tls: &str, rails: &str) -> Option<((Worker, Endpoint), (Worker, Endpoint))> {
    let row = context(tls).info().unwrap().transports.into_iter().find(|row| row.name == "fabric").expect("a row");
    if !row.usable {
        crossrail_transport::conformance::skip(&row.reason.unwrap_or_default());
        return None;
    }
    let worker = |name: &str| {
        let settings = [("CROSSRAIL_TLS", tls), ("CROSSRAIL_NET_DEVICES", rails)];
        let settings = settings.into_iter().filter(|(_, value)| !value.is_empty());
        let context = Context::new(Settings::from_pairs(settings).unwrap()).unwrap();
        Worker::new(&context, WorkerOptions { name: Some(name.to_owned()), ..WorkerOptions::default() }).unwrap()
    };
    let (a, b) = (worker("alpha"), worker("beta"));
    let ab = a.connect(&b.address(), &ConnectOptions::default()).unwrap();
    let ba = b.accept(Some(LIMIT)).unwrap();
    Some(((a, ab), (b, ba)))
}

/// Both ends open it at the same time, as they must.
fn objects(ab: &Endpoint, ba: &Endpoint, index: u16) -> (Box<dyn Placing>, Box<dyn Placing>) {
    std::thread::scope(|scope| {
        let other = scope.spawn(|| placing::open(ba, index, LIMIT));
        let one = placing::open(ab, index, LIMIT).unwrap();
        (one, other.join().expect("no panic").unwrap())
    })
}

#[test]
fn messages_go_over_the_lane_that_explain_names() {
    let _turn = turn();
    let Some(((_a, ab), (b, _ba))) = pair("fabric:tcp") else { return };
    let explain = ab.explain();
    assert!(explain.small.starts_with("fabric/lo"), "{explain}");
    for (tag, len) in [(1, 8), (2, 100_000), (3, 5 << 20)] {
        let bytes: Vec<u8> = (0..len as u32).map(|at| ((at * 13) >> 2) as u8).collect();
        let receive = b.recv(vec![0; len], tag, u64::MAX, None).unwrap();
        let send = ab.send(bytes.clone(), tag).unwrap();
        receive.wait(Some(LIMIT)).unwrap();
        let done = send.wait(Some(LIMIT)).unwrap();
        assert!(done.lanes().iter().all(|lane| lane.name.starts_with("fabric/lo")), "{:?}", done.lanes());
        assert!(receive.into_vec().unwrap() == bytes, "tag {tag}");
    }
}

#[test]
fn one_sided_writes_go_over_libfabric_where_it_is_named() {
    let _turn = turn();
    let Some(((_a, ab), (_b, ba))) = pair("tcp,fabric:tcp") else { return };
    for index in [0, 5] {
        let (mut one, mut two) = objects(&ab, &ba, index);
        assert_eq!((one.peer(), two.peer()), ("beta", "alpha"));
        assert!(one.rails()[0].name.starts_with("fabric/tcp"), "{:?}", one.rails());
        let bytes: Vec<u8> = (0..20 << 20).map(|at: u32| ((at * 7) >> 3) as u8).collect();
        let mut heap = vec![0u8; bytes.len()];
        let memory = Extent::host(heap.as_mut_ptr(), heap.len());
        // SAFETY: the objects are dropped before the memory.
        let key = unsafe { two.expose(&memory, &Arc::new(Loan::default())) }.unwrap();
        let imm = Imm { counter: two.count(1).unwrap(), piece: 0 };
        // SAFETY: as above.
        let posted = unsafe { one.write(&[Extent::host(bytes.as_ptr(), bytes.len())], &key, 0, imm, 3) };
        assert_eq!(posted, Ok(Post::Held));
        let (mut arrived, mut ended) = (0, 0);
        let start = Instant::now();
        while (arrived, ended) != (1, 1) {
            one.poll(&mut |event| ended += u32::from(event == Event::Ended { token: 3, result: Ok(()) })).unwrap();
            two.poll(&mut |event| arrived += u32::from(event == Event::Arrived(imm))).unwrap();
            assert!(start.elapsed() < LIMIT, "{arrived} {ended}");
        }
        drop((one, two));
        assert!(heap == bytes, "index {index}");
    }
}

#[test]
fn the_end_of_an_endpoint_ends_its_objects_at_both_ends() {
    let _turn = turn();
    let Some(((_a, ab), (_b, ba))) = pair("tcp,fabric:tcp") else { return };
    let (mut one, mut two) = objects(&ab, &ba, 0);
    ab.close(Some(LIMIT)).unwrap();
    let until_error = |object: &mut Box<dyn Placing>| {
        let start = Instant::now();
        loop {
            match object.poll(&mut |_| {}) {
                Ok(_) => assert!(start.elapsed() < LIMIT, "no error"),
                Err(error) => return error,
            }
        }
    };
    let error = until_error(&mut one);
    assert!(matches!(&error, LaneError::Closed(why) if why.contains("beta") && why.contains("closed")), "{error}");
    let error = until_error(&mut two);
    assert!(matches!(&error, LaneError::Closed(why) if why.contains("alpha")), "{error}");
}

/// The descriptors of this process, and those of them that are TCP connections between two of its own sockets at that address.
fn sockets_at(rail: Ipv4Addr) -> Vec<RawFd> {
    let is_at = |address: nix::Result<SockaddrStorage>| {
        address.is_ok_and(|address| address.as_sockaddr_in().map(SockaddrIn::ip) == Some(rail))
    };
    let fds = descriptors();
    fds.into_iter().filter(|fd| is_at(getsockname(*fd)) && is_at(getpeername(*fd))).collect()
}

fn descriptors() -> Vec<RawFd> {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
}

fn cut(fd: RawFd) {
    // SAFETY: a lane or an object keeps it open; used for this call only.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    // The other end of one that was cut is closed already.
    let _ = shutdown(std::os::fd::AsRawFd::as_raw_fd(&fd), Shutdown::Both);
}

/// One write, which arrives.
fn write_once(one: &mut Box<dyn Placing>, two: &mut Box<dyn Placing>) {
    let (bytes, mut heap) = (vec![7u8; 100_000], vec![0u8; 100_000]);
    let loan = Arc::new(Loan::default());
    // SAFETY: its loan is returned before the memory is dropped.
    let key = unsafe { two.expose(&Extent::host(heap.as_mut_ptr(), heap.len()), &loan) }.unwrap();
    let imm = Imm { counter: two.count(1).unwrap(), piece: 0 };
    // SAFETY: it has ended before the bytes are dropped.
    let posted = unsafe { one.write(&[Extent::host(bytes.as_ptr(), bytes.len())], &key, 0, imm, 3) };
    assert_eq!(posted, Ok(Post::Held));
    let (mut ended, start) = (false, Instant::now());
    while !ended || !loan.is_returned() {
        one.poll(&mut |event| ended |= event == Event::Ended { token: 3, result: Ok(()) }).unwrap();
        two.poll(&mut |_| {}).unwrap();
        if ended {
            loan.recall();
        }
        assert!(start.elapsed() < LIMIT, "{ended}");
    }
    assert!(heap == bytes);
}

#[test]
fn an_object_whose_connection_is_lost_says_what_to_do_and_that_works() {
    let _turn = turn();
    let rail = Ipv4Addr::new(127, 0, 0, 71);
    let Some(((_a, ab), (_b, ba))) = pair_over("tcp,fabric:tcp", &rail.to_string()) else { return };
    let before = sockets_at(rail);
    let (mut one, mut two) = objects(&ab, &ba, 2);
    write_once(&mut one, &mut two);
    let ours: Vec<RawFd> = sockets_at(rail).into_iter().filter(|fd| !before.contains(fd)).collect();
    assert!(!ours.is_empty(), "the companion connection");
    cut(ours[0]);
    let until_error = |object: &mut Box<dyn Placing>| {
        let start = Instant::now();
        loop {
            match object.poll(&mut |_| {}) {
                Ok(_) => assert!(start.elapsed() < LIMIT, "no error"),
                Err(error) => return error.to_string(),
            }
        }
    };
    let errors = [until_error(&mut one), until_error(&mut two)];
    assert!(errors.iter().all(|error| error.contains("open the object anew at both ends")), "{errors:?}");
    assert!(ab.is_alive() && ba.is_alive(), "only the object has ended");
    // The failed ones are still there.
    let (mut next, mut other) = objects(&ab, &ba, 2);
    write_once(&mut next, &mut other);
    drop((one, two));
}

/// Objects one after the other leave nothing at their endpoints.
#[test]
fn objects_one_after_the_other_leave_no_descriptors() {
    let _turn = turn();
    let Some(((_a, ab), (_b, ba))) = pair_over("tcp,fabric:tcp", "127.0.0.72") else { return };
    let life = |number: u16| {
        let (mut one, mut two) = objects(&ab, &ba, number % 16);
        write_once(&mut one, &mut two);
    };
    (0..16).for_each(life);
    let before = descriptors().len();
    (0..64).for_each(life);
    let after = descriptors().len();
    assert!(after <= before + 4, "{before} -> {after} descriptors after 64 objects");
}

#[test]
fn four_rails_carry_a_transfer_and_a_lost_one_comes_back() {
    let _turn = turn();
    let rails: Vec<Ipv4Addr> = (73..77).map(|last| Ipv4Addr::new(127, 0, 0, last)).collect();
    let names: Vec<String> = rails.iter().map(ToString::to_string).collect();
    let Some(((_a, ab), (b, _ba))) = pair_over("fabric:tcp", &names.join(",")) else { return };
    let bytes: Vec<u8> = (0..64 << 20).map(|at: u32| ((at * 13) >> 3) as u8).collect();
    let carried = |tag: u64| -> Vec<(String, u64)> {
        let receive = b.recv(vec![0; bytes.len()], tag, u64::MAX, None).unwrap();
        let send = ab.send(bytes.clone(), tag).unwrap();
        receive.wait(Some(LIMIT)).unwrap();
        let done = send.wait(Some(LIMIT)).unwrap();
        assert!(receive.into_vec().unwrap() == bytes, "tag {tag}");
        done.lanes().iter().filter(|lane| lane.bytes > 0).map(|lane| (lane.name.to_string(), lane.bytes)).collect()
    };
    let start = Instant::now();
    // A rail that is late joins later.
    let mut tag = 1;
    loop {
        let all = carried(tag);
        if names.iter().all(|name| all.iter().any(|(lane, bytes)| lane.contains(name) && *bytes > 1 << 20)) {
            break;
        }
        assert!(start.elapsed() < LIMIT, "{all:?}");
        tag += 1;
    }
    // Every connection over the last rail.
    sockets_at(rails[3]).into_iter().for_each(cut);
    let (start, first) = (Instant::now(), tag + 1);
    for tag in first.. {
        let now = carried(tag);
        if tag > first && now.iter().any(|(lane, bytes)| lane.contains(&names[3]) && *bytes > 1 << 20) {
            break;
        }
        assert!(start.elapsed() < 2 * LIMIT, "the rail is not used again: {now:?}");
    }
    assert!(ab.is_alive());
}

/// Rails of an object, by name, with the bytes that they have carried.
fn carried(object: &dyn Placing) -> Vec<(String, u64)> {
    object.rails().into_iter().filter(|rail| rail.lost.is_none()).map(|rail| (rail.name, rail.tx_bytes)).collect()
}

#[test]
fn an_object_goes_on_without_a_rail_until_that_is_back() {
    let _turn = turn();
    let rails: Vec<Ipv4Addr> = (78..82).map(|last| Ipv4Addr::new(127, 0, 0, last)).collect();
    let names: Vec<String> = rails.iter().map(ToString::to_string).collect();
    let Some(((_a, ab), (_b, ba))) = pair_over("tcp,fabric:tcp", &names.join(",")) else { return };
    let before = sockets_at(rails[2]);
    let (mut one, mut two) = objects(&ab, &ba, 1);
    let bytes: Vec<u8> = (0..16 << 20).map(|at: u32| ((at * 11) >> 3) as u8).collect();
    let mut heap = vec![0u8; bytes.len()];
    // SAFETY: the objects are dropped before the memory.
    let key = unsafe { two.expose(&Extent::host(heap.as_mut_ptr(), heap.len()), &Arc::new(Loan::default())) }.unwrap();
    let counter = two.count(64).unwrap();
    let start = Instant::now();
    let write = |one: &mut Box<dyn Placing>, two: &mut Box<dyn Placing>, piece: u16| {
        let imm = Imm { counter, piece };
        // SAFETY: as above.
        let posted = unsafe { one.write(&[Extent::host(bytes.as_ptr(), bytes.len())], &key, 0, imm, piece.into()) };
        assert_eq!(posted, Ok(Post::Held));
        let token = u64::from(piece);
        let (mut arrived, mut ended) = (false, false);
        while !(arrived && ended) {
            one.poll(&mut |event| ended |= event == Event::Ended { token, result: Ok(()) }).unwrap();
            two.poll(&mut |event| arrived |= event == Event::Arrived(imm)).unwrap();
            assert!(start.elapsed() < 3 * LIMIT, "{piece}: {arrived} {ended} {:?} {:?}", one.rails(), two.rails());
        }
    };
    let poll_until = |one: &mut Box<dyn Placing>, two: &mut Box<dyn Placing>, done: fn(&dyn Placing) -> bool| {
        let start = Instant::now();
        while !(done(&**one) && done(&**two)) {
            for object in [&mut *one, &mut *two] {
                object.poll(&mut |event| panic!("{event:?}")).unwrap();
            }
            assert!(start.elapsed() < LIMIT, "{:?} {:?}", one.rails(), two.rails());
        }
    };
    let have_joined = |object: &dyn Placing| carried(object).len() == 4;
    poll_until(&mut one, &mut two, have_joined);
    for piece in 0..64 {
        write(&mut one, &mut two, piece);
        let now = carried(&*one);
        let is_used = now.len() == 4 && now.iter().all(|(_, bytes)| *bytes > 1 << 20);
        if piece < 32 && is_used {
            // Every connection of the object over that rail. Not within a write: the provider of 1.17 ends the process then.
            sockets_at(rails[2]).into_iter().filter(|fd| !before.contains(fd)).for_each(cut);
            poll_until(&mut one, &mut two, |object| object.rails().iter().any(|rail| rail.lost.is_some()));
            write(&mut one, &mut two, 32);
            break;
        }
        assert!(piece < 32, "not all rails are used: {now:?}");
    }
    poll_until(&mut one, &mut two, have_joined);
    for piece in 33.. {
        write(&mut one, &mut two, piece);
        let now = carried(&*one);
        if now.len() == 4 && now.iter().any(|(name, bytes)| name.contains(&names[2]) && *bytes > 1 << 20) {
            break;
        }
        assert!(piece < 63, "the rail is not used again: {:?}", one.rails());
    }
    let all = carried(&*one);
    assert!(names.iter().all(|name| all.iter().any(|(rail, sent)| rail.contains(name) && *sent > 0)), "{all:?}");
    drop((one, two));
    assert!(heap == bytes);
}

#[test]
fn an_unknown_provider_is_named() {
    let _turn = turn();
    let (a, b) = (worker("fabric:nonesuch", "alpha"), worker("fabric:nonesuch", "beta"));
    let error = a.connect(&b.address(), &ConnectOptions::default()).map(drop).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unsupported, "{error}");
    let text = error.to_string();
    assert!(text.contains("nonesuch") || text.contains("not installed"), "{text}");
}
