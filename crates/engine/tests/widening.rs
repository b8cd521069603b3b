//! More connections of a rail where much is to be carried, as many as both ends have threads for; and their loss.

use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossrail::{ConnectOptions, Context, Endpoint, ErrorKind, Settings, Worker, WorkerOptions};
use crossrail_types::Log;
use nix::sys::socket::{Shutdown, SockaddrStorage, getpeername, getsockname, shutdown};

const LIMIT: Option<Duration> = Some(Duration::from_secs(60));

struct Pair {
    _contexts: [Context; 2],
    a: Worker,
    b: Worker,
    ab: Endpoint,
    ba: Endpoint,
}

/// Two workers, each on a machine of that many cores and with those settings, over rails with those addresses.
fn pair_of(rails: &str, ends: [(usize, &str); 2]) -> Pair {
    let contexts = ends.map(|(cores, channels)| {
        let pairs = [
            ("CROSSRAIL_TLS", "tcp"),
            ("CROSSRAIL_CHUNK", "256K"),
            ("CROSSRAIL_LOG", "off"),
            ("CROSSRAIL_NET_DEVICES", rails),
            ("CROSSRAIL_CHANNELS", channels),
        ];
        Context::with_cores(Settings::from_pairs(pairs).unwrap(), cores).unwrap()
    });
    let [a, b] = [&contexts[0], &contexts[1]].map(|one| Worker::new(one, WorkerOptions::default()).unwrap());
    let ab = a.connect(&b.address(), &ConnectOptions::default()).unwrap();
    let ba = b.accept(LIMIT).unwrap();
    Pair { _contexts: contexts, a, b, ab, ba }
}

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let word = |at: usize| (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed).to_le_bytes();
    (0..len / 8).flat_map(word).collect()
}

/// Sends so many bytes from one end to the other, in whose midst `meanwhile` is called; the names of the lanes that
/// carried them.
fn send(from: &Endpoint, to: &Worker, len: usize, meanwhile: impl FnOnce()) -> Vec<String> {
    let sent = pattern(len, len as u64);
    let receive = to.recv(vec![0; sent.len()], 1, u64::MAX, None).unwrap();
    let send = from.send(sent.clone(), 1).unwrap();
    meanwhile();
    receive.wait(LIMIT).unwrap();
    let receipt = send.wait(LIMIT).unwrap();
    assert!(receive.into_vec().unwrap() == sent, "other bytes arrived");
    receipt.lanes().iter().map(|lane| lane.name.to_string()).collect()
}

fn transfer(pair: &Pair, meanwhile: impl FnOnce()) -> Vec<String> {
    send(&pair.ab, &pair.b, 12 << 20, meanwhile)
}

/// Connections that carry chunks.
fn connections(pair: &Pair) -> usize {
    pair.ab.lanes().iter().filter(|lane| lane.alive && !lane.name.ends_with(":messages")).count()
}

/// Transfers until there are that many connections.
fn widened(pair: &Pair, count: usize) {
    let begun = Instant::now();
    while connections(pair) != count {
        transfer(pair, || {});
        assert!(begun.elapsed() < LIMIT.unwrap(), "{} connections", connections(pair));
    }
}

#[test]
fn a_rail_has_as_many_connections_as_both_ends_have_threads_for() {
    let pair = pair_of("127.0.0.61", [(16, "auto"), (7, "auto")]);
    assert_eq!(connections(&pair), 1, "nothing was sent");
    widened(&pair, 3);
    let names: Vec<String> = pair.ab.lanes().into_iter().map(|lane| lane.name).collect();
    for name in ["tcp/127.0.0.61", "tcp/127.0.0.61#1", "tcp/127.0.0.61#2", "tcp/127.0.0.61:messages"] {
        assert!(names.iter().any(|known| known == name), "{name} is not among {names:?}");
    }
    let begun = Instant::now();
    while transfer(&pair, || {}).len() < 2 {
        assert!(begun.elapsed() < LIMIT.unwrap(), "one connection carries everything");
    }
    assert_eq!(send(&pair.ab, &pair.b, 1 << 20, || {}), ["tcp/127.0.0.61"], "a short transfer");
}

#[test]
fn the_end_that_accepted_has_connections_dialled_too() {
    let pair = pair_of("127.0.0.65", [(4, "auto"), (4, "auto")]);
    let begun = Instant::now();
    while connections(&pair) < 2 {
        send(&pair.ba, &pair.a, 12 << 20, || {});
        assert!(begun.elapsed() < LIMIT.unwrap());
    }
}

#[test]
fn a_number_that_was_set_stays_and_so_does_one_connection_on_few_cores() {
    let [many, few, one] = [(16, "auto"), (3, "auto"), (16, "1")];
    for ends in [[many, few], [few, many], [many, one], [one, many], [(1, "auto"), (2, "auto")]] {
        let pair = pair_of("127.0.0.62", ends);
        (0..3).for_each(|_| drop(transfer(&pair, || {})));
        assert_eq!(connections(&pair), 1, "{ends:?}");
    }
}

#[test]
fn more_rails_than_cores_have_one_connection_each() {
    let rails = (0..8).map(|at| format!("127.0.0.{}", 70 + at)).collect::<Vec<_>>().join(",");
    let pair = pair_of(&rails, [(6, "auto"); 2]);
    (0..3).for_each(|_| drop(transfer(&pair, || {})));
    assert_eq!(connections(&pair), 8);
}

#[test]
fn a_rail_that_dies_while_it_gets_more_connections_loses_nothing() {
    let pair = pair_of("127.0.0.63,127.0.0.64", [(8, "auto"); 2]);
    for _ in 0..4 {
        transfer(&pair, || {
            cut("127.0.0.64");
        });
    }
    widened(&pair, 4);
}

#[test]
fn a_worker_whose_threads_have_enough_connections_takes_no_more() {
    static REFUSED: AtomicUsize = AtomicUsize::new(0);
    Log::redirect(|_, line| {
        REFUSED.fetch_add(usize::from(line.to_string().starts_with("one more connection from")), Ordering::SeqCst);
    });
    let context = |log| {
        let pairs = [("CROSSRAIL_TLS", "tcp"), ("CROSSRAIL_LOG", log), ("CROSSRAIL_NET_DEVICES", "127.0.0.67")];
        Context::with_cores(Settings::from_pairs(pairs).unwrap(), 4).unwrap()
    };
    let contexts = ["debug", "off"].map(context);
    // Two threads, and who makes progress: eight for each.
    const MOST: usize = 24;
    let server = Worker::new(&contexts[0], WorkerOptions::default()).unwrap();
    let carrying = |ends: &[(Worker, Endpoint, Endpoint)]| -> usize {
        let of = |end: &Endpoint| end.lanes().iter().filter(|lane| lane.alive && lane.name.ends_with("#1")).count();
        ends.iter().map(|(_, _, end)| of(end)).sum()
    };
    let mut ends = Vec::new();
    for at in 0..MOST + 1 {
        let client = Worker::new(&contexts[1], WorkerOptions::default()).unwrap();
        let there = client.connect(&server.address(), &ConnectOptions::default()).unwrap();
        let here = server.accept(LIMIT).unwrap();
        send(&there, &server, 9 << 20, || {});
        ends.push((client, there, here));
        let begun = Instant::now();
        while at < MOST && carrying(&ends) <= at {
            send(&ends[at].1, &server, 1 << 10, || {});
            assert!(begun.elapsed() < LIMIT.unwrap(), "connection {at} does not come");
        }
    }
    let (_, last, _) = &ends[MOST];
    let (begun, mut refused) = (Instant::now(), None);
    // Longer than the pause before a lane that was lost is dialled again.
    while refused.is_none_or(|refused: Instant| refused.elapsed() < Duration::from_secs(1)) {
        send(last, &server, 4 << 20, || {});
        if REFUSED.load(Ordering::SeqCst) > 0 {
            refused.get_or_insert_with(Instant::now);
        }
        assert!(begun.elapsed() < LIMIT.unwrap(), "nothing was refused");
    }
    assert_eq!(REFUSED.load(Ordering::SeqCst), 1, "dialled again and again");
    assert_eq!(carrying(&ends), MOST);
}

/// Of a process that was killed the connections end one after the other. The last may be one over which nothing went
/// yet: then nobody asked whether the peer had left, and its requests waited without end.
#[test]
fn a_peer_has_left_whichever_connection_was_the_last() {
    const ADDRESS: &str = "127.0.0.68";
    let pair = pair_of(ADDRESS, [(16, "auto"), (7, "auto")]);
    let first = sockets(ADDRESS);
    let begun = Instant::now();
    while connections(&pair) < 3 {
        assert_eq!(send(&pair.ab, &pair.b, 1 << 20, || {}), [format!("tcp/{ADDRESS}")], "a short transfer");
        assert!(begun.elapsed() < LIMIT.unwrap(), "{} connections", connections(&pair));
    }
    let receive = pair.a.recv(vec![0; 8], 1, u64::MAX, Some(&pair.ab)).unwrap();
    let now = sockets(ADDRESS);
    now.listeners.iter().for_each(|fd| end(*fd));
    first.connected.values().for_each(|fd| end(*fd));
    let until = |count| {
        while connections(&pair) != count {
            assert!(begun.elapsed() < LIMIT.unwrap(), "{} connections", connections(&pair));
            std::thread::yield_now();
        }
    };
    until(2);
    for (ports, fd) in &now.connected {
        if !first.connected.contains_key(ports) {
            end(*fd);
        }
    }
    let failed = receive.wait(LIMIT).unwrap_err();
    assert_eq!(failed.kind, ErrorKind::PeerDead, "{failed}");
    assert!(!pair.ab.is_alive());
}

#[test]
fn a_worker_that_closes_while_connections_are_dialled_ends_at_once() {
    for _ in 0..4 {
        let pair = pair_of("127.0.0.66", [(16, "auto"); 2]);
        transfer(&pair, || {});
        drop(pair);
    }
}

/// Ends this process's connections from and to that address; how many there were.
fn cut(address: &str) -> usize {
    let open = sockets(address);
    open.connected.values().for_each(|fd| end(*fd));
    open.connected.len()
}

fn end(fd: RawFd) {
    let _ = shutdown(fd, Shutdown::Both);
}

/// This process's sockets at an address.
struct Sockets {
    listeners: Vec<RawFd>,
    /// By the ports here and there.
    connected: BTreeMap<(u16, u16), RawFd>,
}

fn sockets(address: &str) -> Sockets {
    let port = |name: nix::Result<SockaddrStorage>| {
        let name = *name.ok()?.as_sockaddr_in()?;
        (name.ip().to_string() == address).then(|| name.port())
    };
    let mut found = Sockets { listeners: Vec::new(), connected: BTreeMap::new() };
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let Some(fd) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        match (port(getsockname(fd)), port(getpeername(fd))) {
            (Some(here), Some(there)) => drop(found.connected.insert((here, there), fd)),
            (Some(_), None) => found.listeners.push(fd),
            _ => {}
        }
    }
    found
}
