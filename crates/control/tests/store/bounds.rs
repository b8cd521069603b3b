//! What is not a client, not a store, or too much.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossrail_control::builtin::frames;
use crossrail_control::{Revision, StoreServer, open};
use crossrail_handshake::wire::{Challenge, FLAG_USER, Kind, Reject, Reply, STORE};
use crossrail_handshake::{Secret, store};
use crossrail_types::{Error, ErrorKind, Reason, Settings};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, getsockname, socket};

use socket2::{Domain, Socket, Type};

use super::help::{Fixture, PATIENCE, soon};

fn dial(fixture: &Fixture) -> TcpStream {
    let address = fixture.server.address();
    let stream = TcpStream::connect(address.strip_prefix("tcp://").unwrap()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

/// All that the server says before it closes; fails when it does not close.
fn rest(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => bytes,
        Err(e) => panic!("the server keeps the connection: {e}"),
    }
}

#[test]
fn strangers_are_told_and_closed() {
    let fixture = Fixture::start();
    let mut stranger = dial(&fixture);
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let said = rest(&mut stranger);
    let (challenge, reject) = said.split_at(STORE.length(Kind::Challenge));
    assert!(Challenge::decode(&STORE, challenge).is_ok());
    let reject = Reject::decode(&STORE, reject).unwrap();
    assert!(reject.text.contains("it sent \"GET / \""), "{}", reject.text);

    let mut stranger = dial(&fixture);
    let reply = Reply { version: 1, flags: FLAG_USER, nonce: [1; 32], mac: [2; 32] };
    stranger.write_all(&reply.encode(&STORE)).unwrap();
    let reject = Reject::decode(&STORE, &rest(&mut stranger)[STORE.length(Kind::Challenge)..]).unwrap();
    assert_eq!(reject.code.kind(), ErrorKind::Refused);
    let store = fixture.client();
    store.put("a", b"still serving", None, soon()).unwrap();
}

/// A thread of a local user has hundreds of connections from all of loopback, and renews those that are ended.
#[test]
fn a_flood_of_unproven_connections_keeps_no_client_out() {
    let fixture = Fixture::start();
    let address = fixture.server.address();
    let to: SocketAddr = address.strip_prefix("tcp://").unwrap().parse().unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut held = VecDeque::new();
            for turn in 0u32.. {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                let from = SocketAddr::from((Ipv4Addr::from(0x7f00_0002 + turn % 0xff_0000), 0));
                let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
                if socket.bind(&from.into()).and_then(|()| socket.connect(&to.into())).is_ok() {
                    // It may have been turned away already.
                    let _ = socket.send(&[0xc5]);
                    held.push_back(socket);
                }
                if held.len() > 600 {
                    held.pop_front();
                }
            }
        });
        let outcomes: Vec<_> = (0..82)
            .map(|number| {
                let store = open(&address, &Settings::default(), Instant::now() + PATIENCE)?;
                store.put(&format!("rank/{number}"), b"here", None, Instant::now() + PATIENCE)
            })
            .collect();
        stop.store(true, Ordering::Relaxed);
        let turned_away: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
        assert!(turned_away.is_empty(), "{} of 82: {:?}", turned_away.len(), turned_away.first());
    });
}

/// Connects as a client does, to say something that none says.
fn proven(fixture: &Fixture) -> TcpStream {
    let stream = dial(fixture);
    let (secret, _) = Secret::load(None, None).unwrap();
    store::connect(stream.as_fd(), &secret, "test", "the store", soon()).unwrap();
    stream
}

#[test]
fn a_client_that_breaks_the_protocol_is_closed_and_no_other() {
    let fixture = Fixture::start();
    let store = fixture.client();
    let oversized = (frames::FRAME_MAX as u32 + 1).to_le_bytes().to_vec();
    let garbage = [7, 0, 0, 0, 1, 200, 3, 4, 5, 6, 7].to_vec();
    let mut trailing = Vec::new();
    frames::encode(&mut trailing, 1, frames::Request::Get("a")).unwrap();
    trailing.push(0);
    trailing[0] += 1;
    for bytes in [oversized, garbage, trailing] {
        let mut stream = proven(&fixture);
        stream.write_all(&bytes).unwrap();
        assert_eq!(rest(&mut stream), b"", "nothing but the end");
        store.put("a", b"x", None, soon()).unwrap();
    }
    // A part of a frame is waited for; the rest completes it.
    let mut stream = proven(&fixture);
    let mut request = Vec::new();
    frames::encode(&mut request, 9, frames::Request::Get("a")).unwrap();
    let (first, second) = request.split_at(5);
    stream.write_all(first).unwrap();
    store.get("a", soon()).unwrap();
    stream.write_all(second).unwrap();
    let mut answer = [0; 64];
    let read = stream.read(&mut answer).unwrap();
    let (body, _) = frames::split(&answer[..read]).unwrap().unwrap();
    assert_eq!(frames::decode_answer(body).unwrap().call, 9);
}

fn refused(fixture: &Fixture, settings: &Settings) -> Error {
    open(&fixture.server.address(), settings, soon()).expect_err("the secrets differ")
}

#[test]
fn secrets_must_be_the_same() {
    let with = |secret: &str| {
        let mut settings = Settings::default();
        settings.set("secret", secret).unwrap();
        settings
    };
    let fixture = Fixture::with_secret("correct horse battery");
    let begun = Instant::now();
    let error = refused(&fixture, &with("correct horse batterx"));
    assert_eq!(error.kind, ErrorKind::Refused, "{error}");
    assert!(error.detail.contains("wrong secret"), "{error}");
    assert!(error.peer.as_deref() == Some(&fixture.server.address()), "{error}");
    assert!(error.to_string().contains("CROSSRAIL_SECRET"), "{error}");
    let error = refused(&fixture, &Settings::default());
    assert_eq!(error.kind, ErrorKind::Refused, "{error}");
    assert!(error.detail.contains("the listening end has a secret, the connecting end has none"), "{error}");
    let error = refused(&Fixture::start(), &with("any"));
    assert_eq!(error.kind, ErrorKind::Refused, "{error}");
    assert!(error.detail.contains("the connecting end has a secret, the listening end has none"), "{error}");
    assert!(begun.elapsed() < PATIENCE, "a refusal is not tried again");
}

#[test]
fn where_it_may_listen() {
    let fail = |listen: &str| StoreServer::start(listen, &Settings::default()).expect_err(listen);
    let open = fail("0.0.0.0:0");
    assert_eq!(open.kind, ErrorKind::Config);
    assert!(open.to_string().contains("there is no secret"), "{open}");
    for text in ["", "7400", "127.0.0.1", "127.0.0.1:port", ":1", "127.0.0.1:70000", "203.0.113.1"] {
        assert_eq!(fail(text).kind, ErrorKind::Usage, "{text}");
    }
    let fixture = Fixture::start();
    let taken = fail(&fixture.server.address());
    assert_eq!(taken.kind, ErrorKind::Usage);
    assert!(taken.detail.contains("another process listens at"), "{taken}");
    let mut settings = Settings::default();
    settings.set("secret", "some secret of a test").unwrap();
    let everywhere = StoreServer::start("0.0.0.0:0", &settings).unwrap();
    assert!(!everywhere.address().contains("0.0.0.0"), "{}", everywhere.address());
    open_at(&everywhere.address(), &settings);
    // To which Debian resolves a host's own name.
    let by_name = StoreServer::start("127.0.1.1:0", &Settings::default()).unwrap();
    assert!(by_name.address().starts_with("tcp://127.0.1.1:"), "{}", by_name.address());
    open_at(&by_name.address(), &Settings::default());
}

fn open_at(address: &str, settings: &Settings) {
    let store = open(address, settings, soon()).unwrap();
    store.put("a", b"x", None, soon()).unwrap();
}

#[test]
fn addresses_that_are_no_stores() {
    let soon = || Instant::now() + Duration::from_secs(2);
    let fail = |address: &str| open(address, &Settings::default(), soon()).map(|_| ()).expect_err(address);
    for text in ["", "127.0.0.1:1", "http://127.0.0.1:1", "tcp://", "tcp://host", "tcp://h:0", "tcp://::1:7400"] {
        let error = fail(text);
        assert_eq!(error.kind, ErrorKind::Config, "{text}: {error}");
        assert!(error.hint.is_some(), "{error}");
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", listener.local_addr().unwrap());
    // It takes connections and says nothing.
    let begun = Instant::now();
    let silent = fail(&address);
    assert_eq!(silent.kind, ErrorKind::Timeout, "{silent}");
    assert!(silent.detail.contains("challenge: nothing received"), "{silent}");
    assert!(silent.hint.as_deref().is_some_and(|hint| hint.contains("CROSSRAIL_STORE")), "{silent}");
    assert!(begun.elapsed() < PATIENCE);
    // Somebody else's protocol.
    let chatty = std::thread::spawn(move || {
        // The silent try is in the queue before this one.
        for stream in listener.incoming().take(2) {
            let _ = stream.unwrap().write_all(b"220 mail.example.org ESMTP ready\r\n");
        }
    });
    let error = fail(&address);
    assert_eq!((error.kind, error.reason), (ErrorKind::Protocol, Some(Reason::Foreign)), "{error}");
    assert!(error.detail.contains("220 ma"), "{error}");
    chatty.join().unwrap();
    // Bound, so that nobody else gets the port, and nobody listens: refused, and tried until the deadline.
    let held = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
    bind(held.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, 0)).unwrap();
    let address = format!("tcp://{}", getsockname::<SockaddrIn>(held.as_raw_fd()).unwrap());
    let gone = fail(&address);
    assert_eq!((gone.kind, gone.reason), (ErrorKind::Unreachable, Some(Reason::NotListening)), "{gone}");
    assert!(gone.peer.as_deref() == Some(&*address), "{gone}");
}

#[test]
fn thousands_of_keys() {
    const KEYS: usize = 5_000;
    let fixture = Fixture::start();
    let (store, other) = (fixture.client(), fixture.client());
    let keys: Vec<String> = (0..KEYS).map(|key| format!("many/{key:05}")).collect();
    let value = vec![7; 1_000];
    let found = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| other.wait(&keys, soon()));
        for key in &keys {
            store.put(key, &value, None, soon()).unwrap();
        }
        waiting.join().unwrap().unwrap()
    });
    assert!(found.iter().map(|entry| &entry.key).eq(&keys), "in the order asked for");
    // More than a frame holds.
    let (all, _) = store.list("many/", soon()).unwrap();
    assert!(all.iter().map(|entry| &entry.key).eq(&keys) && all.iter().all(|entry| entry.value == value));
    assert_eq!(store.delete_prefix("many/", soon()).unwrap(), KEYS as u64);

    let endless: Vec<String> = (0..20_000).map(|key| format!("{key:0500}")).collect();
    let error = store.wait(&endless, soon()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Usage, "{error}");
    store.put("a", b"still serving", None, soon()).unwrap();
}

#[test]
fn a_full_store_says_what_it_holds() {
    let fixture = Fixture::start();
    let store = fixture.client();
    let value = vec![1; 64 << 10];
    let (stored, error) = (0..)
        .find_map(|key| store.put(&format!("full/{key}"), &value, None, soon()).err().map(|error| (key, error)))
        .unwrap();
    assert_eq!(error.kind, ErrorKind::Exhausted, "{error}");
    assert!(error.detail.contains(&format!("it holds {stored} keys in ")), "{error}");
    assert!((1_000..1_024).contains(&stored), "64 MiB hold {stored} values of 64 KiB");
    // A shorter value in place of a longer one, reading and deleting go on.
    store.put("full/0", b"short", None, soon()).unwrap();
    store.put("full/more", &value[..32 << 10], None, soon()).unwrap();
    assert_eq!(store.delete_prefix("full/", soon()).unwrap(), stored + 1);
    store.put("full/again", &value, None, soon()).unwrap();
}

#[test]
fn a_slow_watch_is_ended_and_holds_up_nobody() {
    let fixture = Fixture::start();
    let (store, slow) = (fixture.client(), fixture.client());
    let (_, now) = store.list("", soon()).unwrap();
    let mut watch = slow.watch("slow/", now, soon()).unwrap();
    let mut quick = store.watch("slow/", now, soon()).unwrap();
    let value = vec![1; 64 << 10];
    for round in 0..600 {
        store.put("slow/a", &value, None, soon()).unwrap();
        assert_eq!(quick.next(soon()).unwrap().len(), 1, "round {round}");
    }
    let mut seen = 0;
    let error = loop {
        match watch.next(soon()) {
            Ok(events) => seen += events.len(),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind, ErrorKind::Closed, "{error}");
    assert!(error.hint.as_deref().is_some_and(|hint| hint.contains("list again")), "{error}");
    assert!(seen < 600, "it was ended before");
    assert_eq!(watch.next(soon()).unwrap_err(), error, "it stays ended");
    let (_, now) = slow.list("slow/", soon()).unwrap();
    let mut watch = slow.watch("slow/", now, soon()).unwrap();
    store.put("slow/a", b"x", None, soon()).unwrap();
    assert_eq!(watch.next(soon()).unwrap().len(), 1);
}

#[test]
fn changes_that_are_no_longer_kept() {
    let fixture = Fixture::start();
    let store = fixture.client();
    let (_, then) = store.list("", soon()).unwrap();
    let value = vec![1; 64 << 10];
    for _ in 0..200 {
        store.put("a", &value, None, soon()).unwrap();
    }
    let (_, now) = store.list("", soon()).unwrap();
    for after in [then, Revision(now.0 + 1)] {
        let error = store.watch("", after, soon()).map(|_| ()).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Closed, "{error}");
        assert!(error.hint.as_deref().is_some_and(|hint| hint.contains("list again")), "{error}");
    }
    store.watch("", now, soon()).unwrap();
}

/// A stranger who opens connections and says nothing does not lock clients out: the oldest makes room.
#[test]
fn clients_that_say_nothing_lock_nobody_out() {
    let fixture = Fixture::start();
    let mut silent: Vec<TcpStream> = (0..512).map(|_| dial(&fixture)).collect();
    for stream in &mut silent {
        stream.read_exact(&mut vec![0; STORE.length(Kind::Challenge)]).unwrap();
    }
    // Until one has had its time for a handshake.
    let begun = Instant::now();
    let client = || open(&fixture.server.address(), &Settings::default(), soon());
    let store = std::iter::repeat_with(client).find_map(|tried| match tried {
        Err(_) if begun.elapsed() < Duration::from_secs(8) => None,
        tried => Some(tried.unwrap()),
    });
    store.unwrap().put("a", b"served", None, soon()).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(8), "before any of them has timed out");
    let said = silent.iter_mut().find_map(|stream| {
        stream.set_nonblocking(true).unwrap();
        let mut said = Vec::new();
        stream.read_to_end(&mut said).ok().map(|_| said)
    });
    let reject = Reject::decode(&STORE, &said.expect("one of them was closed")).unwrap();
    assert!(reject.text.contains("made room"), "{}", reject.text);
}

/// Resident memory of this process, in bytes.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().trim().parse::<usize>().unwrap() << 10
}

#[test]
fn clients_that_take_no_answers_do_not_use_up_the_memory() {
    let fixture = Fixture::start();
    let store = fixture.client();
    // 48 MiB in all.
    for number in 0..768 {
        store.put(&format!("key/{number}"), &[7; 64 << 10], None, soon()).unwrap();
    }
    let before = resident();
    let hogs: Vec<_> = (0..16)
        .map(|_| {
            let mut stream = proven(&fixture);
            let mut request = Vec::new();
            frames::encode(&mut request, 1, frames::Request::List("key/")).unwrap();
            stream.write_all(&request).unwrap();
            stream
        })
        .collect();
    // Answered after theirs, since one thread serves all; each in turn.
    for _ in 0..hogs.len() {
        assert!(store.get("key/1", soon()).unwrap().is_some());
    }
    let growth = resident().saturating_sub(before) >> 20;
    assert!(growth < 450, "{growth} MiB for answers that nobody takes");
}
