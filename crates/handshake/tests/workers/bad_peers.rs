//! Peers that send garbage, half a message, far too much, or nothing: each costs its own slot and no more.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crossrail_handshake::wire::{
    Challenge, FLAG_SECRET, HELLO_MAX, HelloHead, Kind, LANE_HELLO_LEN, LaneHello, PROOF_LEN, Proof, REPLY_LEN, Reject,
    RejectCode, Reply, WORKER,
};
use crossrail_handshake::{
    Arrival, Hello, LaneName, LanePurpose, Limits, ListenConfig, Secret, Target, Ticket, connect, dial_lane,
};
use crossrail_types::{Checksum, ErrorKind, Reason};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::support::{Descriptors, Raw, Worker, accept_by_hand, binding, config, identity, in_secs, loopback, secret};

/// At most this for what takes no time at all, on a machine that does many other things.
const PATIENCE: Duration = Duration::from_secs(20);

fn open_worker(timeout: f64) -> Worker {
    let limits = Limits { timeout: Duration::from_secs_f64(timeout), ..Limits::default() };
    Worker::start(ListenConfig { limits, ..config() }, identity("listening", Secret::None)).unwrap()
}

/// The worker still takes in who belongs there.
fn still_works(worker: &Worker) {
    let ours = connect(&worker.by_address(), &identity("friend", Secret::None), None, true, in_secs(30.0)).unwrap();
    assert_eq!(worker.session().ticket, ours.ticket);
}

/// What the listener of a worker says first.
fn challenge_of(worker: [u8; 16]) -> Challenge {
    Challenge { version: WORKER.version, flags: 0, id: Some(worker), nonce: [2; 32] }
}

#[test]
fn the_handshake_made_by_hand_is_accepted() {
    let _fds = Descriptors::watch();
    let worker = open_worker(20.0);
    let mut raw = Raw::connect(worker.control());
    raw.prove();
    let mut body = identity("by hand", Secret::None).hello.encode().unwrap();
    // A later release may append fields.
    body.extend_from_slice(b"later");
    let hello = raw.hello(&body);
    raw.write(&hello);
    assert_eq!(worker.session().peer.name, "by hand");
}

#[test]
fn garbage_is_no_crossrail_peer() {
    let _fds = Descriptors::watch();
    let worker = open_worker(20.0);
    let mut noise = vec![0; 4096];
    let mut state = 0x9e37_79b9_u32;
    for byte in &mut noise {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *byte = (state >> 24) as u8;
    }
    let ports = [worker.control(), {
        let device = &worker.listener.devices()[0];
        SocketAddr::new(device.address, device.port)
    }];
    for port in ports {
        for garbage in [&noise[..], b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", &[0; 80], &[0xff; 8]] {
            let mut raw = Raw::connect(port);
            raw.write(garbage);
            raw.closed();
            let error = worker.rejected();
            assert_eq!(error.kind, ErrorKind::Protocol, "{error}");
            assert!(error.detail.contains("not a Crossrail peer"), "{error}");
        }
    }
    still_works(&worker);
}

#[test]
fn messages_out_of_order_are_refused() {
    let _fds = Descriptors::watch();
    let worker = open_worker(20.0);
    let mut hello_first = Raw::connect(worker.control());
    let hello = hello_first.hello(b"");
    hello_first.write(&hello);
    assert_eq!(hello_first.reject().code, RejectCode::Protocol);
    assert_eq!(worker.rejected().kind, ErrorKind::Protocol);
    // The worker's own challenge, sent back.
    let mut mirror = Raw::connect(worker.control());
    let challenge = mirror.challenge().encode(&WORKER);
    mirror.write(&challenge);
    assert_eq!(mirror.reject().code, RejectCode::Protocol);
    assert_eq!(worker.rejected().kind, ErrorKind::Protocol);
    still_works(&worker);
}

#[test]
fn half_a_message_is_reported_with_how_much_came() {
    let _fds = Descriptors::watch();
    let worker = open_worker(1.0);
    // Closed after half of it.
    let mut raw = Raw::connect(worker.control());
    let reply = raw.reply(WORKER.version, 0, &[]);
    raw.write(&reply[..40]);
    raw.stream.shutdown(Shutdown::Write).unwrap();
    let error = worker.rejected();
    assert_eq!(error.kind, ErrorKind::Protocol, "{error}");
    assert!(error.detail.contains("proof: ") && error.detail.contains("40 of 80 bytes"), "{error}");
    // Silent after half of it.
    let mut raw = Raw::connect(worker.control());
    let reply = raw.reply(WORKER.version, 0, &[]);
    raw.write(&reply[..40]);
    let error = worker.rejected();
    assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
    assert!(error.detail.contains("only 40 of 80 bytes"), "{error}");
    assert_eq!(raw.reject().code, RejectCode::Timeout);
    // A proven peer whose hello stops halfway.
    let mut raw = Raw::connect(worker.control());
    raw.prove();
    let hello = raw.hello(&[0; 100]);
    raw.write(&hello[..90]);
    let error = worker.rejected();
    assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
    assert!(error.detail.contains("hello: only 42 of 100 bytes"), "{error}");
    still_works(&worker);
}

#[test]
fn giant_lengths_allocate_nothing() {
    let _fds = Descriptors::watch();
    let worker = open_worker(20.0);
    for length in [u32::MAX, 1 << 31, (HELLO_MAX + 1) as u32] {
        let mut raw = Raw::connect(worker.control());
        raw.prove();
        let head = HelloHead { length, mac: [0; 32] }.encode();
        raw.write(&head);
        assert_eq!(raw.reject().code, RejectCode::Protocol);
        let error = worker.rejected();
        assert_eq!(error.kind, ErrorKind::Protocol, "{error}");
        assert!(error.detail.contains(&length.to_string()), "{error}");
    }
    // Lengths of 2^63 inside a hello whose mac holds: of the name, and of a field near its end, before the ten bytes of the
    // last fields.
    let valid = identity("by hand", Secret::None).hello.encode().unwrap();
    for at in [16, valid.len() - 10] {
        let mut body = valid[..at].to_vec();
        body.extend_from_slice(&[0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x01]);
        body.extend_from_slice(&valid[at..]);
        let mut raw = Raw::connect(worker.control());
        raw.prove();
        let hello = raw.hello(&body);
        raw.write(&hello);
        assert_eq!(raw.reject().code, RejectCode::Protocol);
        assert_eq!(worker.rejected().kind, ErrorKind::Protocol);
    }
    // A hello that was changed on its way.
    let mut raw = Raw::connect(worker.control());
    raw.prove();
    let mut hello = raw.hello(&valid);
    let last = hello.len() - 1;
    hello[last] ^= 1;
    raw.write(&hello);
    assert_eq!(raw.reject().code, RejectCode::Refused);
    assert_eq!(worker.rejected().kind, ErrorKind::Refused);
    still_works(&worker);
}

#[test]
fn a_silent_peer_costs_its_time_and_no_more() {
    let _fds = Descriptors::watch();
    let worker = open_worker(1.0);
    let started = Instant::now();
    let mut silent = Raw::connect(worker.control());
    still_works(&worker);
    let error = worker.rejected();
    assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
    assert!(error.detail.contains("proof: nothing received"), "{error}");
    silent.closed();
    let waited = started.elapsed();
    assert!(waited >= Duration::from_secs(1) && waited < PATIENCE, "{waited:?}");
}

#[test]
fn a_trickling_peer_gets_no_more_time() {
    let _fds = Descriptors::watch();
    let worker = open_worker(1.0);
    let mut raw = Raw::connect(worker.control());
    let reply = raw.reply(WORKER.version, 0, &[]);
    let started = Instant::now();
    for byte in &reply {
        if raw.stream.write_all(&[*byte]).is_err() || started.elapsed() > PATIENCE {
            break;
        }
        thread::sleep(Duration::from_millis(30));
    }
    assert_eq!(worker.rejected().kind, ErrorKind::Timeout);
    assert!(started.elapsed() < PATIENCE);
}

/// A stage at which newcomers are turned away because of half-open connections. These make room after half a second, so
/// on a busy machine it may be over before it is set: it is set again, a few times.
/// How long connections are held.
const HELD: Duration = Duration::from_secs(2);
/// Longer than any test.
const LONG: Duration = Duration::from_secs(60);

fn crowded<T>(mut set: impl FnMut() -> Option<T>) -> T {
    (0..20).find_map(|_| set()).expect("newcomers are let in while others have not had their time")
}

#[test]
fn too_many_half_open_connections_turn_the_newest_away() {
    let _fds = Descriptors::watch();
    let me = identity("friend", Secret::None);
    let (worker, held) = crowded(|| {
        let limits = Limits { half_open: 4, half_open_per_source: 3, timeout: HELD, grace: HELD };
        let worker = Worker::start(ListenConfig { limits, ..config() }, identity("l", Secret::None)).unwrap();
        let held: Vec<Raw> = (0..3).map(|_| Raw::connect(worker.control())).collect();
        let mut fourth = TcpStream::connect(worker.control()).unwrap();
        let mut said = Vec::new();
        fourth.read_to_end(&mut said).unwrap();
        let reject = Reject::decode(&WORKER, &said).ok()?;
        assert_eq!(reject.code, RejectCode::Busy);
        assert_eq!(worker.rejected().kind, ErrorKind::Refused);
        // A peer that is turned away tries again until its time is up, and says what it was told ...
        let started = Instant::now();
        let error = connect(&worker.by_port(), &me, None, false, in_secs(0.2)).err()?;
        assert!(started.elapsed() < PATIENCE);
        (error.kind == ErrorKind::Refused && error.detail.contains("3 handshakes")).then_some((worker, held))
    });
    // From elsewhere there is one more slot in all: the Unix socket's users have it.
    let ours = connect(&worker.by_address(), &me, None, true, in_secs(30.0)).unwrap();
    let admitted = || match worker.arrival() {
        Arrival::Session(session) => Some(session.ticket),
        // Those that were turned away.
        Arrival::Rejected { .. } => None,
        other => panic!("neither a session nor rejected: {other:?}"),
    };
    assert_eq!(std::iter::repeat_with(admitted).flatten().next(), Some(ours.ticket));
    // ... or gets in once the others have run into their limit.
    let ours = connect(&worker.by_port(), &me, None, false, in_secs(30.0)).unwrap();
    drop((held, ours));
}

#[test]
fn strangers_that_say_nothing_lock_nobody_out() {
    let _fds = Descriptors::watch();
    let limits = Limits { half_open: 6, half_open_per_source: 6, timeout: LONG, ..Limits::default() };
    let worker = Worker::start(ListenConfig { limits, ..config() }, identity("l", Secret::None)).unwrap();
    let (mut held, mut turned_away) = (Vec::new(), 0);
    // From the address of honest peers, which has no room then; and from others, until there is none at all.
    for address in [[127, 0, 0, 1], [127, 0, 0, 5], [127, 0, 0, 6]] {
        let from = binding(Ipv4Addr::from(address));
        for _ in 0..3 {
            let mut stream = crossrail_tcp::dial(Some(&from), worker.control(), in_secs(30.0)).unwrap();
            // It may have been turned away already.
            let _ = stream.write_all(&[0xc5]);
            held.push(stream);
        }
        let ours = connect(&worker.by_port(), &identity("friend", Secret::None), None, false, in_secs(20.0)).unwrap();
        let theirs = loop {
            match worker.arrival() {
                Arrival::Session(session) => break session,
                Arrival::Rejected { error, .. } => {
                    assert_eq!((error.kind, error.reason), (ErrorKind::Refused, Some(Reason::Busy)), "{error}");
                    turned_away += 1;
                }
                other => panic!("neither a session nor rejected: {other:?}"),
            }
        };
        assert_eq!(theirs.ticket, ours.ticket);
    }
    assert!(turned_away > 0, "there was room for all");
}

/// A thread of a local user has hundreds of connections from all of loopback, and renews those that are ended.
#[test]
fn a_flood_of_unproven_connections_keeps_no_peer_out() {
    let _fds = Descriptors::watch();
    let worker = open_worker(5.0);
    let (address, stop) = (worker.control(), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut held = VecDeque::new();
            for turn in 0u32.. {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                let from = binding(Ipv4Addr::from(0x7f00_0002 + turn % 0xff_0000));
                let stream = crossrail_tcp::dial(Some(&from), address, in_secs(1.0));
                held.extend(stream.ok().filter(|stream| (&*stream).write_all(&[0xc5]).is_ok()));
                if held.len() > 300 {
                    held.pop_front();
                }
            }
        });
        let peers: Vec<_> = (0..20)
            .map(|_| {
                let peer = connect(&worker.by_port(), &identity("peer", Secret::None), None, false, in_secs(30.0));
                peer.map(drop)
            })
            .collect();
        stop.store(true, Ordering::Relaxed);
        assert!(peers.iter().all(Result::is_ok), "{peers:?}");
    });
}

#[test]
fn many_peers_at_once_all_get_in() {
    let _fds = Descriptors::watch();
    let worker = open_worker(5.0);
    let target = worker.by_port();
    let peers: Vec<_> = (0..48)
        .map(|_| {
            let target = target.clone();
            thread::spawn(move || connect(&target, &identity("peer", Secret::None), None, false, in_secs(20.0)))
        })
        .collect();
    let sessions: Vec<_> = peers.into_iter().map(|peer| peer.join().unwrap().unwrap()).collect();
    assert_eq!(sessions.len(), 48);
}

#[test]
fn stopping_does_not_wait_for_half_open_connections() {
    let _fds = Descriptors::watch();
    let worker = open_worker(60.0);
    let mut held: Vec<Raw> = (0..8).map(|_| Raw::connect(worker.control())).collect();
    let started = Instant::now();
    drop(worker);
    assert!(started.elapsed() < PATIENCE, "{:?}", started.elapsed());
    held.iter_mut().for_each(Raw::closed);
}

#[test]
fn versions_that_differ_are_named_at_both_ends() {
    let _fds = Descriptors::watch();
    // A connector of another version.
    let worker = open_worker(20.0);
    let mut raw = Raw::connect(worker.control());
    let reply = raw.reply(9, 0, &[]);
    raw.write(&reply);
    let told = raw.reject();
    assert_eq!(told.code, RejectCode::Mismatch);
    let there = worker.rejected();
    assert_eq!(there.kind, ErrorKind::Mismatch, "{there}");
    for text in [told.text, there.detail] {
        assert!(text.contains("version 9 at") && text.contains("1 at the listening"), "{text}");
    }
    // An acceptor of another version.
    let (address, server) = serve(|mut stream| {
        let challenge = Challenge { version: 7, ..challenge_of([1; 16]) };
        stream.write_all(&challenge.encode(&WORKER)).unwrap();
        let mut said = Vec::new();
        stream.read_to_end(&mut said).unwrap();
        said
    });
    let me = identity("connecting", Secret::None);
    let error = connect(&Target::Control(vec![address]), &me, None, false, in_secs(30.0)).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Mismatch, "{error}");
    assert_eq!(error.reason, Some(Reason::Version));
    let told = Reject::decode(&WORKER, &server.join().unwrap()).unwrap();
    assert_eq!(told.code, RejectCode::Mismatch);
    for text in [told.text, error.detail] {
        assert!(text.contains("version 1 at") && text.contains("7 at the listening"), "{text}");
    }
}

/// Puts the limit on open descriptors back.
struct Limit(u64, u64);

impl Drop for Limit {
    fn drop(&mut self) {
        setrlimit(Resource::RLIMIT_NOFILE, self.0, self.1).unwrap();
    }
}

#[test]
fn out_of_descriptors_it_waits_instead_of_spinning() {
    let _fds = Descriptors::watch();
    let worker = open_worker(5.0);
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map(|(soft, hard)| Limit(soft, hard)).unwrap();
    // One descriptor is left: for the connecting end.
    let free = std::io::stdin().as_fd().try_clone_to_owned().unwrap().as_raw_fd() as u64;
    let waiting = {
        setrlimit(Resource::RLIMIT_NOFILE, free + 1, limit.1).unwrap();
        TcpStream::connect(worker.control()).unwrap()
    };
    let started = Instant::now();
    for _ in 0..3 {
        let error = worker.rejected();
        assert_eq!(error.kind, ErrorKind::Exhausted, "{error}");
    }
    assert!(started.elapsed() >= Duration::from_millis(150), "{:?}", started.elapsed());
    drop(limit);
    // The connection was kept meanwhile.
    let mut challenge = vec![0; WORKER.length(Kind::Challenge)];
    waiting.set_read_timeout(Some(PATIENCE)).unwrap();
    (&waiting).read_exact(&mut challenge).unwrap();
    Challenge::decode(&WORKER, &challenge).unwrap();
}

#[test]
fn out_of_descriptors_for_long_it_turns_peers_away_by_name() {
    let _fds = Descriptors::watch();
    let worker = open_worker(5.0);
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map(|(soft, hard)| Limit(soft, hard)).unwrap();
    let free = std::io::stdin().as_fd().try_clone_to_owned().unwrap().as_raw_fd() as u64;
    setrlimit(Resource::RLIMIT_NOFILE, free + 1, limit.1).unwrap();
    for _ in 0..2 {
        // It takes the only descriptor that is left.
        let connection = TcpStream::connect(worker.control()).unwrap();
        connection.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut told = Vec::new();
        (&connection).read_to_end(&mut told).unwrap();
        let reject = Reject::decode(&WORKER, &told).unwrap();
        assert_eq!(reject.code, RejectCode::Full);
        assert!(
            reject.text.contains(&format!("its limit of open files is {}: raise ulimit -n", free + 1)),
            "{}",
            reject.text
        );
    }
    drop(limit);
    // It has kept what it needs to listen on.
    let waiting = TcpStream::connect(worker.control()).unwrap();
    let mut challenge = vec![0; WORKER.length(Kind::Challenge)];
    waiting.set_read_timeout(Some(PATIENCE)).unwrap();
    (&waiting).read_exact(&mut challenge).unwrap();
    Challenge::decode(&WORKER, &challenge).unwrap();
}

/// A listener made by hand that serves one connection.
fn serve<T: Send + 'static>(talk: impl FnOnce(TcpStream) -> T + Send + 'static) -> (SocketAddr, thread::JoinHandle<T>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    (address, thread::spawn(move || talk(listener.accept().unwrap().0)))
}

fn connect_to(address: SocketAddr, secret: Secret, secs: f64) -> crossrail_types::Error {
    let started = Instant::now();
    let me = identity("connecting", secret);
    let error = connect(&Target::Control(vec![address]), &me, None, false, in_secs(secs)).unwrap_err();
    assert!(started.elapsed() < Duration::from_secs_f64(secs) + PATIENCE, "{:?}", started.elapsed());
    assert_eq!(error.peer.as_deref(), Some(address.to_string().as_str()));
    error
}

#[test]
fn a_connector_survives_what_listens_there() {
    let _fds = Descriptors::watch();
    let (address, ssh) = serve(|mut stream| stream.write_all(b"SSH-2.0-OpenSSH_9.9\r\n").unwrap());
    let error = connect_to(address, Secret::None, 5.0);
    assert_eq!(error.kind, ErrorKind::Protocol, "{error}");
    assert!(error.detail.contains("challenge: not a Crossrail peer (it sent \"SSH-2."), "{error}");
    assert_eq!(error.reason, Some(Reason::Foreign));
    ssh.join().unwrap();

    let (address, closing) = serve(drop);
    let error = connect_to(address, Secret::None, 5.0);
    assert_eq!(error.kind, ErrorKind::Unreachable, "{error}");
    closing.join().unwrap();

    let (done, wait) = std::sync::mpsc::channel::<()>();
    let (address, silent) = serve(move |stream| {
        let _ = wait.recv();
        drop(stream);
    });
    let error = connect_to(address, Secret::None, 0.3);
    assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
    assert!(error.detail.contains("challenge: nothing received"), "{error}");
    assert!(error.waited.is_some_and(|waited| waited >= Duration::from_millis(300)), "{error}");
    done.send(()).unwrap();
    silent.join().unwrap();

    let nobody = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
    let error = connect_to(nobody, Secret::None, 5.0);
    assert_eq!(error.kind, ErrorKind::Unreachable, "{error}");
}

#[test]
fn an_acceptor_that_does_not_know_the_secret_learns_nothing_and_is_refused() {
    let _fds = Descriptors::watch();
    let (address, thief) = serve(|mut stream| {
        let flags = FLAG_SECRET;
        let challenge = Challenge { flags, ..challenge_of([1; 16]) };
        stream.write_all(&challenge.encode(&WORKER)).unwrap();
        let mut reply = [0; REPLY_LEN];
        stream.read_exact(&mut reply).unwrap();
        // The connector's own proof, sent back as if it were ours.
        stream.write_all(&Proof { mac: Reply::decode(&WORKER, &reply).unwrap().mac }.encode(&WORKER)).unwrap();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).unwrap();
        rest
    });
    let error = connect_to(address, secret("a secret of enough bytes"), 5.0);
    assert_eq!(error.kind, ErrorKind::Refused, "{error}");
    let rest = thief.join().unwrap();
    // No hello: nothing but the reason.
    assert_eq!(WORKER.decode_prelude(&rest), Ok(Kind::Reject));
    assert_eq!(Reject::decode(&WORKER, &rest).unwrap().code, RejectCode::Refused);
}

#[test]
fn the_connector_checks_what_the_acceptor_says_too() {
    let _fds = Descriptors::watch();
    let me = identity("connecting", Secret::None);
    let peer = identity("by hand", Secret::None).hello;
    let challenge = challenge_of(peer.worker);
    let attempt = |challenge: Challenge, hello: Hello| {
        let (address, server) = serve(move |stream| accept_by_hand(stream, &challenge, &hello));
        let result = connect(&Target::Control(vec![address]), &me, None, false, in_secs(30.0));
        let outcome = result.map(|session| session.peer);
        server.join().unwrap();
        outcome
    };
    assert_eq!(attempt(challenge, peer.clone()).unwrap(), peer);
    let mut other_window = peer.clone();
    other_window.window = 12;
    let error = attempt(challenge, other_window).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Mismatch, "{error}");
    assert!(error.detail.contains("window 12") && error.detail.contains("window 16"), "{error}");
    assert_eq!(error.reason, Some(Reason::Parameters));
    let mut other_worker = peer.clone();
    other_worker.worker[0] ^= 1;
    assert_eq!(attempt(challenge, other_worker).unwrap_err().kind, ErrorKind::Protocol);
}

/// On a busy machine the peer's limit for a handshake may pass while this end waits for a processor.
#[test]
fn a_peer_that_gave_up_waiting_is_asked_again() {
    let _fds = Descriptors::watch();
    let me = identity("connecting", Secret::None);
    let peer = identity("listening", Secret::None).hello;
    let challenge = challenge_of(peer.worker);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let hello = peer.clone();
    let server = thread::spawn(move || {
        let mut first = listener.accept().unwrap().0;
        first.write_all(&challenge.encode(&WORKER)).unwrap();
        first.read_exact(&mut [0; REPLY_LEN]).unwrap();
        first.write_all(&Reject::new(RejectCode::Timeout, "hello: nothing received").encode(&WORKER)).unwrap();
        let _ = first.read_to_end(&mut Vec::new());
        accept_by_hand(listener.accept().unwrap().0, &challenge, &hello);
    });
    let session = connect(&Target::Control(vec![address]), &me, None, false, in_secs(30.0)).unwrap();
    assert_eq!(session.peer, peer);
    drop(session);
    server.join().unwrap();
}

#[test]
fn a_proof_without_the_secret_that_was_asked_for_is_refused() {
    let _fds = Descriptors::watch();
    let worker = Worker::start(config(), identity("l", secret("a secret of enough bytes"))).unwrap();
    let mut raw = Raw::connect(worker.control());
    assert_eq!(raw.challenge().flags, FLAG_SECRET);
    let reply = raw.reply(WORKER.version, 0, &[]);
    raw.write(&reply);
    assert_eq!(raw.reject().code, RejectCode::Protocol);
    assert_eq!(worker.rejected().kind, ErrorKind::Protocol);
    // The right kind with the right secret is let through.
    let mut raw = Raw::connect(worker.control());
    let reply = raw.reply(WORKER.version, FLAG_SECRET, b"a secret of enough bytes");
    raw.write(&reply);
    let mut proof = [0; PROOF_LEN];
    raw.stream.read_exact(&mut proof).unwrap();
    Proof::decode(&WORKER, &proof).unwrap();
}

#[test]
fn a_rail_that_does_not_know_the_session_gets_no_lane() {
    let _fds = Descriptors::watch();
    let (address, thief) = serve(|mut stream| {
        let challenge = challenge_of([1; 16]);
        stream.write_all(&challenge.encode(&WORKER)).unwrap();
        let mut hello = [0; LANE_HELLO_LEN];
        stream.read_exact(&mut hello).unwrap();
        // The connector's own proof, sent back as if it were ours.
        stream.write_all(&Proof { mac: LaneHello::decode(&hello).unwrap().mac }.encode(&WORKER)).unwrap();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).unwrap();
        rest
    });
    let ticket = Ticket { session: [1; 16], key: [2; 32], checksum: Checksum::Off };
    let lane = LaneName { rail: 0, channel: 0, purpose: LanePurpose::Bulk };
    let error = dial_lane(&ticket, &loopback(), address, lane, in_secs(30.0)).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Refused, "{error}");
    assert_eq!(Reject::decode(&WORKER, &thief.join().unwrap()).unwrap().code, RejectCode::Refused);
}

#[test]
fn half_open_connections_are_limited_in_all() {
    let _fds = Descriptors::watch();
    let me = identity("c", Secret::None);
    let (worker, mut held) = crowded(|| {
        let limits = Limits { half_open: 3, half_open_per_source: 16, timeout: LONG, grace: LONG };
        let worker = Worker::start(ListenConfig { limits, ..config() }, identity("l", Secret::None)).unwrap();
        let held: Vec<Raw> = (0..3).map(|_| Raw::connect(worker.control())).collect();
        let error = connect(&worker.by_port(), &me, None, false, in_secs(0.1)).err()?;
        error.detail.contains("3 handshakes are in progress").then_some((worker, held))
    });
    drop(held.pop());
    connect(&worker.by_port(), &me, None, false, in_secs(30.0)).unwrap();
}

#[test]
fn a_recorded_reply_does_not_work_again() {
    let _fds = Descriptors::watch();
    let worker = open_worker(20.0);
    let mut first = Raw::connect(worker.control());
    let reply = first.reply(WORKER.version, 0, &[]);
    let mut second = Raw::connect(worker.control());
    assert_ne!(first.challenge().nonce, second.challenge().nonce);
    second.write(&reply);
    assert_eq!(second.reject().code, RejectCode::Refused);
    assert_eq!(worker.rejected().kind, ErrorKind::Refused);
}
