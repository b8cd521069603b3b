//! Peers that belong together, and those that do not.

use std::collections::HashSet;
use std::error::Error as _;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossrail_handshake::wire::decode_hello;
use crossrail_handshake::{
    Arrival, Hello, LaneName, LanePurpose, ListenConfig, Rail, Secret, Session, Stream, Target, Ticket, connect,
    dial_lane, upgrade,
};
use crossrail_types::{Checksum, ErrorKind, Reason};

use crate::support::{Descriptors, Worker, binding, config, identity, in_secs, loopback, secret, skip};

fn pass_byte(mut from: impl Write, mut to: impl Read, byte: &mut [u8; 1]) {
    from.write_all(b"x").unwrap();
    to.read_exact(byte).unwrap();
}

/// Both ends hold the same session, and a byte each way arrives.
fn check(ours: &mut Session, theirs: &mut Session) {
    assert_eq!(ours.ticket, theirs.ticket);
    assert!(ours.initiator && !theirs.initiator);
    for (from, to) in [(&ours.stream, &theirs.stream), (&theirs.stream, &ours.stream)] {
        let mut byte = [0];
        match (from, to) {
            (Stream::Tcp(from), Stream::Tcp(to)) => pass_byte(from, to, &mut byte),
            (Stream::Unix(from), Stream::Unix(to)) => pass_byte(from, to, &mut byte),
            other => panic!("two kinds: {other:?}"),
        }
        assert_eq!(&byte, b"x");
    }
}

#[test]
fn over_unix_tcp_and_by_port() {
    let _fds = Descriptors::watch();
    for shared in [Secret::None, secret("a secret of enough bytes")] {
        let worker = Worker::start(config(), identity("listening", shared.clone())).unwrap();
        let me = identity("connecting", shared);
        for (target, prefer_unix, unix) in
            [(worker.by_address(), true, true), (worker.by_address(), false, false), (worker.by_port(), true, false)]
        {
            let mut ours = connect(&target, &me, None, prefer_unix, in_secs(30.0)).unwrap();
            let mut theirs = worker.session();
            assert_eq!(ours.stream.is_unix(), unix);
            assert_eq!(ours.peer, worker.listener.identity().hello);
            assert_eq!(theirs.peer, me.hello);
            assert_eq!(ours.peer.address(), worker.listener.address());
            check(&mut ours, &mut theirs);
        }
        worker.nobody_else();
    }
}

/// Many ranks connect one after the other: a new thread for each would cost as much as its handshake.
#[test]
fn a_thread_serves_several_peers() {
    const PEERS: usize = 20;
    let _fds = Descriptors::watch();
    let threads = Arc::new(Mutex::new(HashSet::new()));
    let seen = Arc::clone(&threads);
    let note = move |_: &Arrival| {
        seen.lock().unwrap().insert(std::thread::current().id());
    };
    let worker = Worker::start_with(config(), identity("listening", Secret::None), note).unwrap();
    let me = identity("connecting", Secret::None);
    for _ in 0..PEERS {
        let mut ours = connect(&worker.by_address(), &me, None, true, in_secs(30.0)).unwrap();
        check(&mut ours, &mut worker.session());
    }
    let threads = threads.lock().unwrap().len();
    assert!(threads < PEERS, "{threads} threads for {PEERS} peers");
}

#[test]
fn over_ipv6() {
    let _fds = Descriptors::watch();
    if std::net::TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_err() {
        return skip("this machine has no IPv6 loopback");
    }
    let rail = Rail { name: "::1".to_owned(), binding: binding(Ipv6Addr::LOCALHOST), speed_mbps: None };
    let config = ListenConfig { control: vec![binding(Ipv6Addr::LOCALHOST)], rails: vec![rail], ..config() };
    let worker = Worker::start(config, identity("listening", Secret::None)).unwrap();
    let me = identity("connecting", Secret::None);
    let mut ours = connect(&worker.by_address(), &me, None, false, in_secs(30.0)).unwrap();
    check(&mut ours, &mut worker.session());
    let device = &ours.peer.devices[0];
    let to = SocketAddr::new(device.address, device.port);
    let lane = LaneName { rail: 0, channel: 0, purpose: LanePurpose::Bulk };
    dial_lane(&ours.ticket, &binding(Ipv6Addr::LOCALHOST), to, lane, in_secs(30.0)).unwrap();
    assert!(matches!(worker.arrival(), Arrival::Lane { .. }));
}

#[test]
fn a_tcp_session_moves_to_unix() {
    let _fds = Descriptors::watch();
    let worker = Worker::start(config(), identity("listening", Secret::None)).unwrap();
    let me = identity("connecting", Secret::None);
    let first = connect(&worker.by_port(), &me, None, true, in_secs(30.0)).unwrap();
    let first_theirs = worker.session();
    assert_eq!(first_theirs.peer.replaces, None);
    let mut second = upgrade(&first, &me, in_secs(30.0)).unwrap().expect("both are on this machine");
    let mut theirs = worker.session();
    assert!(second.stream.is_unix());
    assert_eq!(theirs.peer.replaces, Some(first.ticket.session));
    assert_ne!(second.ticket, first.ticket);
    check(&mut second, &mut theirs);
    assert!(upgrade(&second, &me, in_secs(30.0)).unwrap().is_none());
    // Another machine, as far as anyone can tell.
    let mut elsewhere = me.clone();
    elsewhere.hello.boot_id = "another".to_owned();
    assert!(upgrade(&first, &elsewhere, in_secs(30.0)).unwrap().is_none());
    // The socket is gone, or in another network namespace.
    drop(worker);
    assert!(upgrade(&first, &me, in_secs(30.0)).unwrap().is_none());
}

#[test]
fn unix_falls_back_to_tcp() {
    let _fds = Descriptors::watch();
    let worker = Worker::start(config(), identity("listening", Secret::None)).unwrap();
    let mut address = worker.listener.address();
    address.unix = Some("crossrail.nobody-listens-here".to_owned());
    // And the first TCP address is dead too.
    let dead = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
    address.control.insert(0, dead);
    let me = identity("connecting", Secret::None);
    let mut ours = connect(&Target::Worker(address), &me, None, true, in_secs(30.0)).unwrap();
    assert!(!ours.stream.is_unix());
    check(&mut ours, &mut worker.session());
}

#[test]
fn a_wrong_secret_is_refused_at_both_ends() {
    let _fds = Descriptors::watch();
    let worker = Worker::start(config(), identity("listening", secret("the right secret, long"))).unwrap();
    let me = identity("connecting", secret("the wrong secret, long"));
    for target in [worker.by_address(), worker.by_port()] {
        for prefer_unix in [true, false] {
            let error = connect(&target, &me, None, prefer_unix, in_secs(30.0)).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Refused, "{error}");
            assert!(error.detail.starts_with("proof: ") && error.detail.contains("wrong secret"), "{error}");
            let there = worker.rejected();
            assert_eq!(there.kind, ErrorKind::Refused, "{there}");
            assert!(there.detail.contains("wrong secret"), "{there}");
            assert_eq!([error.reason, there.reason], [Some(Reason::SecretWrong); 2]);
        }
    }
    worker.nobody_else();
}

#[test]
fn a_secret_at_one_end_only_is_refused_at_both() {
    let _fds = Descriptors::watch();
    let cases = [
        (secret("a secret of enough bytes"), Secret::None, "the listening end has a secret"),
        (Secret::None, secret("a secret of enough bytes"), "the connecting end has a secret"),
    ];
    for (listening, connecting, text) in cases {
        let worker = Worker::start(config(), identity("listening", listening)).unwrap();
        let error =
            connect(&worker.by_port(), &identity("connecting", connecting), None, true, in_secs(30.0)).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Refused, "{error}");
        assert!(error.detail.contains(text), "{error}");
        assert!(error.hint.as_deref().unwrap_or("").contains("CROSSRAIL_SECRET"), "{error}");
        assert_eq!(error.reason, Some(Reason::SecretMissing), "{error}");
        let there = worker.rejected();
        assert_eq!(there.kind, ErrorKind::Refused, "{there}");
        assert!(there.detail.contains(text), "{there}");
    }
}

#[test]
fn only_holders_of_the_address_where_that_is_required() {
    let _fds = Descriptors::watch();
    let config = ListenConfig { require_token: true, ..config() };
    let worker = Worker::start(config, identity("listening", Secret::None)).unwrap();
    let me = identity("connecting", Secret::None);
    let error = connect(&worker.by_port(), &me, None, true, in_secs(30.0)).unwrap_err();
    assert_eq!((error.kind, error.reason), (ErrorKind::Refused, Some(Reason::TokenMissing)), "{error}");
    assert_eq!(worker.rejected().kind, ErrorKind::Refused);
    let mut address = worker.listener.address();
    address.token[3] ^= 1;
    let error = connect(&Target::Worker(address), &me, None, true, in_secs(30.0)).unwrap_err();
    assert_eq!(error.reason, Some(Reason::TokenWrong), "{error}");
    assert_eq!(error.kind, ErrorKind::Refused, "{error}");
    assert!(error.detail.contains("token"), "{error}");
    assert_eq!(worker.rejected().kind, ErrorKind::Refused);
    let mut ours = connect(&worker.by_address(), &me, None, true, in_secs(30.0)).unwrap();
    check(&mut ours, &mut worker.session());
}

#[test]
fn another_worker_at_that_address_is_not_the_one_sought() {
    let _fds = Descriptors::watch();
    let worker = Worker::start(config(), identity("new", Secret::None)).unwrap();
    let mut address = worker.listener.address();
    address.worker[0] ^= 1;
    let me = identity("connecting", Secret::None);
    let error = connect(&Target::Worker(address), &me, None, true, in_secs(30.0)).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unreachable, "{error}");
    assert!(error.detail.contains("another worker"), "{error}");
}

#[test]
fn nothing_listens_beyond_loopback_without_a_secret() {
    let _fds = Descriptors::watch();
    let everywhere = binding(Ipv4Addr::UNSPECIFIED);
    let rail = Rail { name: "eth1".to_owned(), binding: binding(Ipv4Addr::new(192, 0, 2, 1)), speed_mbps: None };
    let open = ListenConfig { control: vec![everywhere.clone()], ..config() };
    let open_rail = ListenConfig { rails: vec![rail], ..config() };
    for config in [open.clone(), open_rail] {
        let error = Worker::start(config, identity("listening", Secret::None)).err().expect("refused");
        assert_eq!(error.kind, ErrorKind::Config, "{error}");
        assert!(error.hint.as_deref().unwrap_or("").contains("CROSSRAIL_SECRET_FILE"), "{error}");
    }
    let wildcard_rail = Rail { name: "any".to_owned(), binding: everywhere, speed_mbps: None };
    let shared = secret("a secret of enough bytes");
    let error = Worker::start(ListenConfig { rails: vec![wildcard_rail], ..config() }, identity("l", shared.clone()));
    assert_eq!(error.err().expect("refused").kind, ErrorKind::Config);
    // With a secret it listens everywhere, and says where that is.
    let worker = Worker::start(open, identity("listening", shared.clone())).unwrap();
    let control = worker.listener.address().control;
    assert!(!control.is_empty() && control.iter().all(|address| !address.ip().is_unspecified()), "{control:?}");
    assert!(control.iter().any(|address| address.ip().is_loopback()), "{control:?}");
    let mut ours = connect(&worker.by_address(), &identity("c", shared), None, false, in_secs(30.0)).unwrap();
    check(&mut ours, &mut worker.session());
}

#[test]
fn a_port_in_use_is_an_error() {
    let _fds = Descriptors::watch();
    let taken = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let config = ListenConfig { port: taken.local_addr().unwrap().port(), ..config() };
    assert!(Worker::start(config, identity("listening", Secret::None)).is_err());
}

#[test]
fn differing_parameters_are_named_at_both_ends() {
    let _fds = Descriptors::watch();
    let worker = Worker::start(config(), identity("alpha", Secret::None)).unwrap();
    type Change = fn(&mut Hello);
    let changes: [(&str, Change, [&str; 2]); 3] = [
        ("chunk", |hello| hello.chunk = 65536, ["chunk 2097152", "chunk 65536"]),
        ("window", |hello| hello.window = 12, ["window 16", "window 12"]),
        ("channels", |hello| hello.channels = 4, ["channels 1", "channels 4"]),
    ];
    for (name, change, values) in changes {
        let mut me = identity("beta", Secret::None);
        change(&mut me.hello);
        let error = connect(&worker.by_port(), &me, None, true, in_secs(30.0)).unwrap_err();
        let there = worker.rejected();
        for error in [error, there] {
            assert_eq!(error.kind, ErrorKind::Mismatch, "{error}");
            for text in ["alpha", "beta", values[0], values[1]] {
                assert!(error.detail.contains(text), "{name}: {text}: {error}");
            }
        }
    }
    worker.nobody_else();
}

#[test]
fn two_ends_serve_as_many_connections_as_the_one_that_serves_fewer() {
    let hello = |channels, channels_max| Hello { channels, channels_max, ..identity("alpha", Secret::None).hello };
    for (mine, theirs, both) in [
        (hello(1, 8), hello(1, 3), 3),
        (hello(4, 4), hello(4, 4), 4),
        // Less than it says that it has.
        (hello(4, 0), hello(4, 8), 4),
    ] {
        assert_eq!((mine.channels_with(&theirs), theirs.channels_with(&mine)), (both, both));
    }
    let sent = hello(1, 8).encode().unwrap();
    assert_eq!(decode_hello(&sent).unwrap().channels_max, 8);
    // The network namespace and the length of a node's name are last: earlier releases' hellos end before them.
    assert_eq!(decode_hello(&sent[..sent.len() - 1]).unwrap().node, None);
    let earlier = &sent[..sent.len() - 9];
    assert_eq!(decode_hello(earlier).unwrap().network, 0);
    assert!(decode_hello(&earlier[..earlier.len() - 1]).is_err(), "without the byte of the checksum");
}

#[test]
fn two_ends_use_the_stricter_checksum() {
    let _fds = Descriptors::watch();
    for (mine, theirs, agreed) in [
        (Checksum::Off, Checksum::Off, Checksum::Off),
        (Checksum::Crc, Checksum::Off, Checksum::Crc),
        (Checksum::Off, Checksum::Crc, Checksum::Crc),
    ] {
        let (mut alpha, mut beta) = (identity("alpha", Secret::None), identity("beta", Secret::None));
        (alpha.hello.checksum, beta.hello.checksum) = (theirs, mine);
        let worker = Worker::start(config(), alpha).unwrap();
        let connected = connect(&worker.by_port(), &beta, None, true, in_secs(30.0));
        assert_eq!(connected.unwrap().ticket.checksum, agreed, "{mine:?} and {theirs:?}");
        assert_eq!(worker.session().ticket.checksum, agreed, "{mine:?} and {theirs:?}");
    }
}

fn rail(worker: &Worker, index: usize) -> SocketAddr {
    let device = &worker.listener.devices()[index];
    SocketAddr::new(device.address, device.port)
}

#[test]
fn lanes_join_their_session_and_only_with_its_key() {
    let _fds = Descriptors::watch();
    let worker = Worker::start(config(), identity("listening", Secret::None)).unwrap();
    let me = identity("connecting", Secret::None);
    let ours = connect(&worker.by_address(), &me, None, true, in_secs(30.0)).unwrap();
    let theirs = worker.session();
    assert_eq!(worker.listener.devices().len(), 2);
    for (index, purpose) in [(0, LanePurpose::Message), (1, LanePurpose::Bulk), (1, LanePurpose::Placing)] {
        let lane = LaneName { rail: index, channel: 3, purpose };
        let to = rail(&worker, index.into());
        let mut stream = dial_lane(&ours.ticket, &loopback(), to, lane, in_secs(30.0)).unwrap();
        let Arrival::Lane { session, lane: got, stream: mut end, local, remote } = worker.arrival() else {
            panic!("not a lane");
        };
        assert_eq!((session, got), (theirs.ticket.session, lane));
        assert_eq!((local, remote), (to, stream.local_addr().unwrap()));
        stream.write_all(b"over").unwrap();
        let mut bytes = [0; 4];
        end.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"over");
        assert!(stream.nodelay().unwrap() && end.nodelay().unwrap());
    }
    let lane = LaneName { rail: 2, channel: 0, purpose: LanePurpose::Bulk };
    let mut wrong_key = ours.ticket;
    wrong_key.key[31] ^= 1;
    let mut wrong_session = ours.ticket;
    wrong_session.session[0] ^= 1;
    for (ticket, text) in [(wrong_key, "wrong key"), (wrong_session, "no such session")] {
        let error = dial_lane(&ticket, &loopback(), rail(&worker, 0), lane, in_secs(30.0)).unwrap_err();
        let there = worker.rejected();
        for error in [error, there] {
            assert_eq!((error.kind, error.reason), (ErrorKind::Refused, Some(Reason::SessionUnknown)), "{error}");
            assert!(error.detail.contains("lane 2 channel 0") && error.detail.contains(text), "{error}");
        }
    }
    worker.nobody_else();
}

#[test]
fn a_lane_that_nobody_takes_is_named() {
    let _fds = Descriptors::watch();
    let nobody = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
    let ticket = Ticket { session: [1; 16], key: [2; 32], checksum: Checksum::Off };
    let lane = LaneName { rail: 2, channel: 1, purpose: LanePurpose::Bulk };
    let error = dial_lane(&ticket, &loopback(), nobody, lane, in_secs(30.0)).unwrap_err();
    assert_eq!((error.kind, error.reason), (ErrorKind::Unreachable, Some(Reason::NotListening)), "{error}");
    assert!(error.detail.starts_with("lane 2 channel 1: "), "{error}");
    let source = error.source().and_then(|source| source.downcast_ref::<std::io::Error>());
    assert_eq!(source.map(|source| source.kind()), Some(std::io::ErrorKind::ConnectionRefused));
}

#[test]
fn the_control_device_chooses_the_addresses_of_its_family() {
    let _fds = Descriptors::watch();
    let worker = Worker::start(config(), identity("listening", Secret::None)).unwrap();
    let mut address = worker.listener.address();
    address.control.insert(0, "[::1]:9".parse().unwrap());
    let me = identity("connecting", Secret::None);
    let mut ours = connect(&Target::Worker(address.clone()), &me, Some(&loopback()), false, in_secs(30.0)).unwrap();
    check(&mut ours, &mut worker.session());
    address.control.truncate(1);
    let error = connect(&Target::Worker(address), &me, Some(&loopback()), false, in_secs(30.0)).unwrap_err();
    assert!(error.detail.contains("IPv6"), "{error}");
}

/// Lets this thread, and no other, act as another user.
#[allow(unsafe_code)]
fn become_user(user: libc::uid_t) {
    // SAFETY: the raw system call takes three integers and touches no memory; unlike the C library's setresuid it
    // changes the calling thread only.
    let rc = unsafe { libc::syscall(libc::SYS_setresuid, user, user, user) };
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn another_user_is_refused_without_a_secret() {
    let _fds = Descriptors::watch();
    if !nix::unistd::Uid::effective().is_root() {
        return skip("only root can act as another user");
    }
    let attempt = |worker: &Worker, shared: Secret| {
        let target = worker.by_address();
        let stranger = std::thread::spawn(move || {
            become_user(65534);
            connect(&target, &identity("stranger", shared), None, true, in_secs(30.0))
        });
        stranger.join().unwrap()
    };
    let worker = Worker::start(config(), identity("listening", Secret::None)).unwrap();
    let error = attempt(&worker, Secret::None).unwrap_err();
    let there = worker.rejected();
    for error in [error, there] {
        assert_eq!(error.kind, ErrorKind::Refused, "{error}");
        assert!(error.detail.contains("another user"), "{error}");
    }
    // Who knows the secret may come as whoever they are.
    let shared = secret("a secret of enough bytes");
    let worker = Worker::start(config(), identity("listening", shared.clone())).unwrap();
    assert!(attempt(&worker, shared).unwrap().stream.is_unix());
}

#[test]
fn a_lane_never_overtakes_its_session() {
    let _fds = Descriptors::watch();
    // The worker is slow to take a session in; the peer dials its lane at once.
    let (go, gate) = std::sync::mpsc::channel::<()>();
    let gate = std::sync::Mutex::new(gate);
    let wait = move |arrival: &Arrival| {
        if matches!(arrival, Arrival::Session(_)) {
            // The time is for a test that has failed.
            let _ = gate.lock().unwrap().recv_timeout(Duration::from_secs(20));
        }
    };
    let worker = Worker::start_with(config(), identity("listening", Secret::None), wait).unwrap();
    let me = identity("connecting", Secret::None);
    let ours = connect(&worker.by_address(), &me, None, true, in_secs(30.0)).unwrap();
    let lane = LaneName { rail: 0, channel: 0, purpose: LanePurpose::Bulk };
    let (ticket, to) = (ours.ticket, rail(&worker, 0));
    let dialing = std::thread::spawn(move || dial_lane(&ticket, &loopback(), to, lane, in_secs(30.0)));
    // Only once the lane's connection is there may the session be taken in.
    let seen = Instant::now();
    while !std::fs::read_to_string("/proc/net/tcp").unwrap().contains(&format!(":{:04X} 01", to.port())) {
        assert!(seen.elapsed() < Duration::from_secs(20), "the lane did not come up");
        std::thread::yield_now();
    }
    worker.nobody_for(Duration::from_millis(200));
    assert!(!dialing.is_finished());
    go.send(()).unwrap();
    worker.session();
    assert!(matches!(worker.arrival(), Arrival::Lane { .. }));
    dialing.join().unwrap().unwrap();
}

#[test]
fn a_session_is_no_lane_and_a_lane_no_session() {
    let _fds = Descriptors::watch();
    let worker = Worker::start(config(), identity("listening", Secret::None)).unwrap();
    let me = identity("connecting", Secret::None);
    let error = connect(&Target::Control(vec![rail(&worker, 0)]), &me, None, false, in_secs(30.0)).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Protocol, "{error}");
    assert_eq!(worker.rejected().kind, ErrorKind::Protocol);
    let ticket = Ticket { session: [1; 16], key: [2; 32], checksum: Checksum::Off };
    let lane = LaneName { rail: 0, channel: 0, purpose: LanePurpose::Message };
    let error = dial_lane(&ticket, &loopback(), worker.control(), lane, in_secs(30.0)).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Protocol, "{error}");
    assert_eq!(worker.rejected().kind, ErrorKind::Protocol);
}

#[test]
fn one_port_takes_sessions_and_the_lanes_of_every_rail() {
    let _fds = Descriptors::watch();
    let shared = secret("a secret of enough bytes");
    for everywhere in [binding(Ipv4Addr::UNSPECIFIED), binding(Ipv6Addr::UNSPECIFIED)] {
        let open = ListenConfig { control: vec![everywhere], ..config() };
        let Ok(worker) = Worker::start(open, identity("listening", shared.clone())) else {
            skip("this machine has no IPv6");
            continue;
        };
        let me = identity("connecting", shared.clone());
        let port = worker.control().port();
        assert!(worker.listener.devices().iter().all(|device| device.port == port));
        let target = Target::Control(vec![SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port)]);
        let ours = connect(&target, &me, None, false, in_secs(30.0)).unwrap();
        worker.session();
        let lane = LaneName { rail: 1, channel: 0, purpose: LanePurpose::Bulk };
        let to = rail(&worker, 1);
        let stream = dial_lane(&ours.ticket, &loopback(), to, lane, in_secs(30.0)).unwrap();
        let Arrival::Lane { lane: got, local, .. } = worker.arrival() else { panic!("not a lane") };
        assert_eq!((got, local.ip().to_canonical(), local.port()), (lane, to.ip(), port));
        drop(stream);
        // An address that is no rail's takes sessions only.
        let elsewhere = SocketAddr::new(Ipv4Addr::new(127, 0, 0, 9).into(), port);
        let error = dial_lane(&ours.ticket, &loopback(), elsewhere, lane, in_secs(30.0)).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Protocol, "{error}");
        assert_eq!(worker.rejected().kind, ErrorKind::Protocol);
        // A full worker refuses sessions, and takes lanes.
        worker.listener.refuse("it serves one peer");
        let error = connect(&target, &me, None, false, in_secs(30.0)).unwrap_err();
        assert!(error.reason == Some(Reason::Full) && error.detail.contains("it serves one peer"), "{error}");
        assert_eq!(worker.rejected().reason, Some(Reason::Full));
        dial_lane(&ours.ticket, &loopback(), to, lane, in_secs(30.0)).unwrap();
        assert!(matches!(worker.arrival(), Arrival::Lane { .. }));
    }
}

#[test]
fn rails_listen_on_the_port_of_their_worker_where_it_is_free() {
    let _fds = Descriptors::watch();
    let worker = Worker::start(config(), identity("listening", Secret::None)).unwrap();
    let port = worker.control().port();
    let taken = rail(&worker, 0);
    assert_eq!((taken.port(), rail(&worker, 1).port()), (port, port));
    drop(worker);
    let _other = std::net::TcpListener::bind(taken).unwrap();
    let config = ListenConfig { port, ..config() };
    let worker = Worker::start(config, identity("listening", Secret::None)).unwrap();
    assert!(rail(&worker, 0).port() != port && rail(&worker, 1).port() == port);
}
