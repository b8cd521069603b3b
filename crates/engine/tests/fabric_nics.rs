//! Machines with several NICs that have no network interface, as EFA's: every one of them is used. Over the hostile
//! libfabric, which lists them in any order.
#![allow(unsafe_code)]

#[path = "../../fabric/tests/stand_in/mod.rs"]
mod stand_in;

use std::collections::BTreeSet;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail::placing::{self, Event, Extent, Imm, Loan, Placing, Post};
use crossrail::{ConnectOptions, Context, Endpoint, Settings, Worker, WorkerOptions};
use nix::sys::socket::{AddressFamily, Shutdown, SockaddrLike, SockaddrStorage, getpeername, shutdown};
use stand_in::Hostile;

const LIMIT: Duration = Duration::from_secs(20);
/// Limits at which nothing is refused, without the library's own faults.
const MILD: &str = "nics=4,tx=256,msg=1048576,iov=4,data=8,mrs=4096";

fn worker(library: &str, name: &str) -> Worker {
    let settings = [("CROSSRAIL_TLS", "fabric:efa"), ("CROSSRAIL_FABRIC_LIBRARY", library)];
    let context = Context::new(Settings::from_pairs(settings).unwrap()).unwrap();
    Worker::new(&context, WorkerOptions { name: Some(name.to_owned()), ..WorkerOptions::default() }).unwrap()
}

/// The NIC in the name of a lane or rail.
fn nic(name: &str) -> String {
    let at = name.find("rdmap").unwrap_or_else(|| panic!("{name} names no NIC"));
    name[at..].split([')', ':']).next().unwrap().to_owned()
}

/// The connections of this process.
fn connections_here() -> Vec<RawFd> {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    let fds = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let is_tcp = |fd: &RawFd| {
        let peer = getpeername::<SockaddrStorage>(*fd).ok().and_then(|peer| peer.family());
        matches!(peer, Some(AddressFamily::Inet | AddressFamily::Inet6))
    };
    fds.filter(is_tcp).collect()
}

fn cut(fd: RawFd) {
    // SAFETY: an object keeps it open; used for this call only.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let _ = shutdown(std::os::fd::AsRawFd::as_raw_fd(&fd), Shutdown::Both);
}

fn objects(ab: &Endpoint, ba: &Endpoint, index: u16) -> (Box<dyn Placing>, Box<dyn Placing>) {
    std::thread::scope(|scope| {
        let other = scope.spawn(|| placing::open(ba, index, LIMIT));
        let one = placing::open(ab, index, LIMIT).unwrap();
        (one, other.join().expect("no panic").unwrap())
    })
}

#[test]
fn lanes_and_objects_are_spread_over_all_nics() {
    let (Some(path), Some(hostile)) = (stand_in::library(), Hostile::load()) else { return };
    hostile.begin(1, MILD);
    let path = path.to_str().expect("text");
    let (a, b) = (worker(path, "alpha"), worker(path, "beta"));
    let ab = a.connect(&b.address(), &ConnectOptions::default()).unwrap();
    let ba = b.accept(Some(LIMIT)).unwrap();
    let bytes: Vec<u8> = (0..64 << 20).map(|at: u32| ((at * 13) >> 2) as u8).collect();
    let receive = b.recv(vec![0; bytes.len()], 1, u64::MAX, None).unwrap();
    let send = ab.send(bytes.clone(), 1).unwrap();
    receive.wait(Some(LIMIT)).unwrap();
    let done = send.wait(Some(LIMIT)).unwrap();
    assert!(receive.into_vec().unwrap() == bytes);
    let used: BTreeSet<String> =
        done.lanes().iter().filter(|lane| !lane.name.contains(":messages")).map(|lane| nic(&lane.name)).collect();
    assert_eq!(used.len(), 4, "{:?}", done.lanes());

    let before = connections_here();
    let mut open = vec![objects(&ab, &ba, 0)];
    open.extend((1..4).map(|index| objects(&ab, &ba, index)));
    let names = |object: &mut Box<dyn Placing>| -> BTreeSet<String> {
        let start = Instant::now();
        while object.rails().len() < 2 {
            object.poll(&mut |event| panic!("{event:?}")).unwrap();
            assert!(start.elapsed() < LIMIT, "{:?}", object.rails());
        }
        object.rails().iter().map(|rail| nic(&rail.name)).collect()
    };
    let mut all = BTreeSet::new();
    for (one, two) in &mut open {
        let (ours, theirs) = (names(one), names(two));
        assert_eq!((ours.len(), &ours), (2, &theirs), "two NICs, the same at both ends");
        all.extend(ours);
    }
    assert_eq!(all.len(), 4, "{all:?}");
    // Only connections of the first object are left.
    open.truncate(1);
    goes_on_without_a_nic(&mut open[0], || connections_here().into_iter().find(|fd| !before.contains(fd)));
    drop(open);
    drop((ab, ba, a, b));
    assert_eq!(hostile.violations(false), "");
}

/// Bytes that each rail has carried, of those that work.
fn live(object: &dyn Placing) -> Vec<u64> {
    object.rails().iter().filter(|rail| rail.lost.is_none()).map(|rail| rail.tx_bytes).collect()
}

/// Cuts the connection of one of its rails within writes, until shares of some were given to the other rail. All writes
/// arrive, in the end over both rails again.
fn goes_on_without_a_nic((one, two): &mut (Box<dyn Placing>, Box<dyn Placing>), beside: impl Fn() -> Option<RawFd>) {
    const LEN: usize = 1 << 20;
    let bytes: Vec<u8> = (0..LEN).map(|at| ((at * 11) >> 3) as u8).collect();
    let mut heap = vec![0u8; 8 * LEN];
    let loan = Arc::new(Loan::default());
    // SAFETY: its loan is returned before the memory is dropped.
    let key = unsafe { two.expose(&Extent::host(heap.as_mut_ptr(), heap.len()), &loan) }.unwrap();
    let counter = two.count(8).unwrap();
    let start = Instant::now();
    let mut rounds = 0;
    loop {
        for piece in 0..8 {
            let (from, at) = ([Extent::host(bytes.as_ptr(), LEN)], u64::from(piece) * LEN as u64);
            // SAFETY: it has ended before the bytes are dropped.
            let posted = unsafe { one.write(&from, &key, at, Imm { counter, piece }, piece.into()) };
            assert_eq!(posted, Ok(Post::Held));
        }
        let (mut arrived, mut ended) = (BTreeSet::new(), BTreeSet::new());
        let mut cuts = rounds > 0 && live(&**one).len() == 2 && one.rails().iter().all(|rail| rail.reposted == 0);
        while arrived.len() < 8 || ended.len() < 8 {
            one.poll(&mut |event| match event {
                Event::Ended { token, result: Ok(()) } => assert!(ended.insert(token)),
                event => panic!("{event:?}"),
            })
            .unwrap();
            two.poll(&mut |event| match event {
                Event::Arrived(imm) => assert!(imm.counter == counter && arrived.insert(imm.piece)),
                event => panic!("{event:?}"),
            })
            .unwrap();
            if cuts && !arrived.is_empty() {
                cuts = false;
                cut(beside().expect("its connections"));
            }
            assert!(start.elapsed() < LIMIT, "{arrived:?} {ended:?} {:?} {:?}", one.rails(), two.rails());
        }
        assert!(heap.chunks(LEN).all(|place| place == bytes), "round {rounds}");
        heap.fill(0);
        rounds += 1;
        let is_over = one.rails().iter().any(|rail| rail.lost.is_some() && rail.reposted > 0);
        if is_over && live(&**one).len() == 2 && live(&**one).iter().all(|bytes| *bytes > 1 << 20) {
            break;
        }
        assert!(start.elapsed() < LIMIT, "the NIC is not used again: {:?}", one.rails());
    }
    loan.recall();
    while !loan.is_returned() {
        one.poll(&mut |_| {}).unwrap();
        two.poll(&mut |_| {}).unwrap();
        assert!(start.elapsed() < LIMIT, "the memory is not returned");
    }
}
