//! Servers and clients that end, and what the others see.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use crossrail_control::{Event, Expected, StoreServer, open};
use crossrail_types::{ErrorKind, Settings};

use super::help::{Fixture, PATIENCE, soon};

#[test]
fn a_server_that_ends_in_the_middle_of_a_wait() {
    let fixture = Fixture::start();
    let (waiting, watching) = (fixture.client(), fixture.client());
    let (_, now) = watching.list("", soon()).unwrap();
    let mut watch = watching.watch("", now, soon()).unwrap();
    // The same connection as the watch's, so that somebody else reads for the wait.
    let also = vec!["never/2".to_owned()];
    let ended = thread::scope(|scope| {
        let waits = [
            scope.spawn(|| waiting.wait(&["never".to_owned()], soon()).map(drop)),
            scope.spawn(|| watch.next(soon()).map(drop)),
            scope.spawn(|| watching.wait(&also, soon()).map(drop)),
        ];
        // As a rule the waits are at the server by then; one that is late finds it gone all the same.
        waiting.get("a", soon()).unwrap();
        watching.get("a", soon()).unwrap();
        let begun = Instant::now();
        fixture.server.stop();
        for wait in waits {
            let error = wait.join().unwrap().expect_err("the server is gone");
            assert_eq!(error.kind, ErrorKind::Unreachable, "{error}");
            assert!(error.to_string().contains(&fixture.server.address()), "{error}");
        }
        begun.elapsed()
    });
    assert!(ended < PATIENCE, "{ended:?}");
    let error = waiting.get("a", soon()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unreachable, "{error}");
}

#[test]
fn clients_come_back_to_a_server_started_anew() {
    let fixture = Fixture::start();
    let store = fixture.client();
    let lease = store.grant(Duration::from_secs(1), soon()).unwrap();
    let old = store.put("a", b"x", Some(lease.id()), soon()).unwrap();
    let address = fixture.server.address();
    fixture.server.stop();
    let again = StoreServer::start(&address, &fixture.settings).unwrap();
    assert_eq!(store.get("a", soon()).unwrap(), None, "the next call reaches the new one");
    let error = store.put("a", b"x", Some(lease.id()), soon()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Closed, "{error}");
    let new = store.put("a", b"y", None, soon()).unwrap();
    assert!(new > old, "revisions of the old store fit nothing");
    assert_eq!(store.compare_and_set("a", Expected::At(old), b"z", None, soon()).unwrap(), None);
    let error = store.watch("", old, soon()).map(|_| ()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Closed, "{error}");
    // The renewal hears that there is no such lease.
    let begun = Instant::now();
    while lease.is_alive() {
        assert!(begun.elapsed() < PATIENCE, "the lease is gone");
        thread::yield_now();
    }
    drop(again);
}

#[test]
fn opening_waits_for_the_server() {
    let fixture = Fixture::start();
    let address = fixture.server.address();
    fixture.server.stop();
    let settings = Settings::default();
    thread::scope(|scope| {
        let opening = scope.spawn(|| open(&address, &settings, soon()).map(drop));
        let _server = StoreServer::start(&address, &settings).unwrap();
        opening.join().unwrap().unwrap();
    });
}

#[test]
fn a_lease_is_lost_with_its_server() {
    let fixture = Fixture::start();
    let store = fixture.client();
    let lease = store.grant(Duration::from_millis(300), soon()).unwrap();
    fixture.server.stop();
    let begun = Instant::now();
    while lease.is_alive() {
        assert!(begun.elapsed() < PATIENCE, "it was not renewed for {:?}", begun.elapsed());
        thread::yield_now();
    }
    assert!(begun.elapsed() >= Duration::from_millis(100), "it lives for its time: {:?}", begun.elapsed());
    let begun = Instant::now();
    drop(lease);
    assert!(begun.elapsed() < PATIENCE, "dropping it waits for nobody");
}

/// Many threads share one client; each round of compare-and-set has one winner.
#[test]
fn threads_share_a_connection() {
    const THREADS: usize = 8;
    const ROUNDS: usize = 50;
    let fixture = Fixture::start();
    let store = fixture.client();
    let wins: usize = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let store = &store;
                scope.spawn(move || {
                    let won = |round| {
                        let key = format!("round/{round}");
                        let own = format!("own/{round}/{thread}");
                        store.put(&own, b"here", None, soon()).unwrap();
                        let all: Vec<_> = (0..THREADS).map(|other| format!("own/{round}/{other}")).collect();
                        assert_eq!(store.wait(&all, soon()).unwrap().len(), THREADS);
                        store.compare_and_set(&key, Expected::Absent, own.as_bytes(), None, soon()).unwrap().is_some()
                    };
                    (0..ROUNDS).filter(|round| won(*round)).count()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(wins, ROUNDS);
}

/// Of two calls that wait over one connection either may be the one that reads; when it has its answer the other reads.
#[test]
fn whoever_leaves_lets_another_read() {
    let fixture = Fixture::start();
    let (shared, other) = (fixture.client(), fixture.client());
    let begun = Instant::now();
    for round in 0..20 {
        let keys = [format!("{round}/first"), format!("{round}/second")];
        let (said, heard) = std::sync::mpsc::channel();
        thread::scope(|scope| {
            for key in &keys {
                let (shared, said) = (&shared, said.clone());
                scope.spawn(move || {
                    shared.wait(std::slice::from_ref(key), soon()).unwrap();
                    said.send(key).unwrap();
                });
            }
            for key in if round % 2 == 0 { [&keys[0], &keys[1]] } else { [&keys[1], &keys[0]] } {
                other.put(key, b"x", None, soon()).unwrap();
                assert_eq!(heard.recv().unwrap(), key);
            }
        });
    }
    assert!(begun.elapsed() < PATIENCE, "nobody slept until its deadline: {:?}", begun.elapsed());
}

const CLIENTS: usize = 50;
/// Long enough that a busy machine lets every client renew its lease meanwhile.
const TTL: Duration = Duration::from_secs(2);

/// Ends its child, whatever becomes of the test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A process with many clients and leases is killed while as many other clients are connected: its keys vanish when
/// their time is over, and only they.
#[test]
fn leases_of_a_killed_process_expire() {
    let fixture = Fixture::start();
    let others: Vec<_> = (0..CLIENTS).map(|_| fixture.client()).collect();
    let leases: Vec<_> = others.iter().map(|store| store.grant(TTL, soon()).unwrap()).collect();
    for (number, (store, lease)) in others.iter().zip(&leases).enumerate() {
        store.put(&format!("alive/{number}"), b"x", Some(lease.id()), soon()).unwrap();
    }
    let (_, now) = others[0].list("", soon()).unwrap();
    let mut watch = others[0].watch("killed/", now, soon()).unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "ends::child", "--ignored", "--nocapture"])
        .env("CROSSRAIL_TEST_STORE", fixture.server.address())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let mut child = Killed(child.unwrap());
    let mut put = 0;
    while put < CLIENTS {
        put += watch.next(soon()).unwrap().len();
    }
    // For longer than their time they live.
    assert_eq!(watch.next(Instant::now() + 2 * TTL).unwrap_err().kind, ErrorKind::Timeout);
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("all are there")));
    let killed = Instant::now();
    child.0.kill().unwrap();
    let mut gone = 0;
    let mut first = None;
    while gone < CLIENTS {
        for event in watch.next(soon()).unwrap() {
            assert!(matches!(event, Event::Gone { .. }), "{event:?}");
            gone += 1;
        }
        first.get_or_insert(killed.elapsed());
    }
    let (first, last) = (first.unwrap(), killed.elapsed());
    assert!(first >= TTL / 2, "renewed at most a quarter of its time ago, gone after {first:?}");
    assert!(last <= TTL + PATIENCE, "the last one is gone after {last:?}");
    assert!(leases.iter().all(|lease| lease.is_alive()));
    assert_eq!(others[0].list("alive/", soon()).unwrap().0.len(), CLIENTS);
}

/// Not a test: the process that is killed above.
#[test]
#[ignore = "started by leases_of_a_killed_process_expire"]
fn child() {
    let Ok(address) = std::env::var("CROSSRAIL_TEST_STORE") else { return };
    let settings = Settings::default();
    let stores: Vec<_> = (0..CLIENTS).map(|_| open(&address, &settings, soon()).unwrap()).collect();
    let leases: Vec<_> = stores.iter().map(|store| store.grant(TTL, soon()).unwrap()).collect();
    for (number, (store, lease)) in stores.iter().zip(&leases).enumerate() {
        store.put(&format!("killed/{number}"), b"x", Some(lease.id()), soon()).unwrap();
    }
    println!("all are there");
    // Until killed; the end of stdin means that whoever started this is gone.
    let _ = std::io::stdin().lines().next();
}

/// Passes on what a client sends to `server`, and its answers only while `open`.
fn relay(server: String, open: &'static Mutex<()>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        let (client, _) = listener.accept().unwrap();
        let server = TcpStream::connect(server.trim_start_matches("tcp://")).unwrap();
        let (mut answers, mut requests) = (server.try_clone().unwrap(), client.try_clone().unwrap());
        thread::spawn(move || std::io::copy(&mut requests, &mut &server));
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = answers.read(&mut bytes) {
            drop(open.lock().unwrap());
            if (&client).write_all(&bytes[..count]).is_err() {
                break;
            }
        }
    });
    address
}

/// A store that answers late, but reads the renewals in time, keeps a lease; so does its client.
#[test]
fn a_lease_outlives_late_answers() {
    static OPEN: Mutex<()> = Mutex::new(());
    let fixture = Fixture::start();
    let direct = fixture.client();
    let late = open(&relay(fixture.server.address(), &OPEN), &fixture.settings, soon()).unwrap();
    let ttl = Duration::from_millis(500);
    let lease = late.grant(ttl, soon()).unwrap();
    direct.put("a", b"x", Some(lease.id()), soon()).unwrap();
    let (_, now) = direct.list("", soon()).unwrap();
    let mut watch = direct.watch("", now, soon()).unwrap();
    let closed = OPEN.lock().unwrap();
    let error = watch.next(Instant::now() + ttl * 3).expect_err("the store has the renewals");
    assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
    drop(closed);
    let error = watch.next(Instant::now() + ttl * 3).expect_err("it is renewed on");
    assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
    assert!(lease.is_alive());
    direct.put("a", b"y", Some(lease.id()), soon()).unwrap();
}
