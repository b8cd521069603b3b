//! The etcd backend against a real etcd.

mod groups;
mod server;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_control::{EtcdStore, Event, Expected, LeaseId, Revision, Store};
use crossrail_types::ErrorKind;

use server::{Etcd, PATIENCE, free_ports, soon, within};

#[test]
fn etcd_does_what_every_store_does() {
    let Some(etcd) = Etcd::start(&[]) else { return };
    crossrail_control::conformance::run("etcd", "suite/", &|| Arc::new(etcd.open()));
}

fn keys(entries: &[crossrail_control::Entry]) -> Vec<&str> {
    entries.iter().map(|entry| entry.key.as_str()).collect()
}

#[test]
fn keys_are_written_read_listed_and_deleted() {
    let Some(etcd) = Etcd::start(&[]) else { return };
    let store = etcd.open();
    assert_eq!(store.address(), etcd.address());
    assert_eq!(store.get("g/a", soon()).unwrap(), None);
    let first = store.put("g/a", b"1", None, soon()).unwrap();
    let second = store.put("g/b", &[0, 255, 10], None, soon()).unwrap();
    store.put("h", b"", None, soon()).unwrap();
    assert!(first < second);
    let entry = store.get("g/b", soon()).unwrap().unwrap();
    assert_eq!((entry.value.as_slice(), entry.revision), (&[0, 255, 10][..], second));

    let (entries, now) = store.list("g/", soon()).unwrap();
    assert_eq!(keys(&entries), ["g/a", "g/b"]);
    assert!(now > second);
    assert_eq!(keys(&store.list("", soon()).unwrap().0), ["g/a", "g/b", "h"]);
    assert_eq!(keys(&store.list("g/b", soon()).unwrap().0), ["g/b"]);

    assert!(store.delete("g/a", soon()).unwrap());
    assert!(!store.delete("g/a", soon()).unwrap());
    assert_eq!(store.delete_prefix("g/", soon()).unwrap(), 1);
    assert_eq!(keys(&store.list("", soon()).unwrap().0), ["h"]);

    let big = vec![7; 64 << 10];
    let long = "k".repeat(512);
    store.put(&long, &big, None, soon()).unwrap();
    assert_eq!(store.get(&long, soon()).unwrap().unwrap().value, big);
    for error in [
        store.put("k", &vec![7; (64 << 10) + 1], None, soon()).unwrap_err(),
        store.put(&"k".repeat(513), b"", None, soon()).unwrap_err(),
        store.get("", soon()).unwrap_err(),
    ] {
        assert_eq!(error.kind, ErrorKind::Usage, "{error}");
    }
    let error = store.put("k", b"", Some(LeaseId(77)), soon()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Closed, "{error}");
    let error = store.get("k", Instant::now()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
}

#[test]
fn of_many_who_compare_and_set_one_at_a_time_succeeds() {
    let Some(etcd) = Etcd::start(&[]) else { return };
    let store = Arc::new(etcd.open());
    let created = store.compare_and_set("n", Expected::Absent, b"0", None, soon()).unwrap().unwrap();
    assert_eq!(store.compare_and_set("n", Expected::Absent, b"x", None, soon()).unwrap(), None);
    assert_eq!(store.compare_and_set("n", Expected::At(Revision(0)), b"x", None, soon()).unwrap(), None);
    assert_eq!(store.compare_and_set("m", Expected::At(Revision(0)), b"x", None, soon()).unwrap(), None);
    assert_eq!(store.compare_and_set("m", Expected::At(created), b"x", None, soon()).unwrap(), None);
    let threads = [0; 4].map(|_| {
        let store = Arc::clone(&store);
        std::thread::spawn(move || {
            for _ in 0..10 {
                loop {
                    let entry = store.get("n", soon()).unwrap().unwrap();
                    let next = std::str::from_utf8(&entry.value).unwrap().parse::<u32>().unwrap() + 1;
                    let expected = Expected::At(entry.revision);
                    if store
                        .compare_and_set("n", expected, next.to_string().as_bytes(), None, soon())
                        .unwrap()
                        .is_some()
                    {
                        break;
                    }
                }
            }
        })
    });
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(store.get("n", soon()).unwrap().unwrap().value, b"40");
}

#[test]
fn waiting_ends_with_the_last_key_and_names_those_that_did_not_come() {
    let Some(etcd) = Etcd::start(&[]) else { return };
    let store = Arc::new(etcd.open());
    // More than fit into one transaction, in an order of their own.
    let wanted: Vec<String> = (0..130).rev().map(|rank| format!("g/hello/{rank}")).collect();
    for key in &wanted[..129] {
        store.put(key, key.as_bytes(), None, soon()).unwrap();
    }
    let error = store.wait(&wanted, within(Duration::from_millis(200))).unwrap_err();
    assert_eq!((error.kind, error.detail.as_str()), (ErrorKind::Timeout, "g/hello/0"));
    store.delete("g/hello/7", soon()).unwrap();
    let error = store.wait(&wanted, within(Duration::from_millis(200))).unwrap_err();
    assert_eq!(error.detail, "g/hello/7, g/hello/0");
    let twice = ["n", "n"].map(str::to_owned);
    assert_eq!(store.wait(&twice, within(Duration::from_millis(50))).unwrap_err().detail, "n");

    let waiter = std::thread::spawn({
        let (store, wanted) = (Arc::clone(&store), wanted.clone());
        move || store.wait(&wanted, soon())
    });
    for key in ["g/hello/7", "g/hello/00", "g/other", "g/hello/0"] {
        store.put(key, key.as_bytes(), None, soon()).unwrap();
    }
    let entries = waiter.join().unwrap().unwrap();
    assert_eq!(keys(&entries), wanted);
    assert!(entries.iter().all(|entry| entry.value == entry.key.as_bytes()));
    assert_eq!(store.wait(&[], soon()).unwrap(), []);
}

#[test]
fn a_watch_sees_every_change_in_order_from_the_revision_asked_for() {
    let Some(etcd) = Etcd::start(&[]) else { return };
    let store = etcd.open();
    store.put("g/a", b"before", None, soon()).unwrap();
    let (_, start) = store.list("g/", soon()).unwrap();
    store.put("g/a", b"1", None, soon()).unwrap();
    store.put("h", b"elsewhere", None, soon()).unwrap();
    let mut watch = store.watch("g/", start, soon()).unwrap();
    store.delete("g/a", soon()).unwrap();
    store.put("g/b", &vec![1; 64 << 10], None, soon()).unwrap();
    let mut events = Vec::new();
    while events.len() < 3 {
        events.extend(watch.next(soon()).unwrap());
    }
    let seen: Vec<(String, Option<usize>)> = events
        .iter()
        .map(|event| match event {
            Event::Put(entry) => (entry.key.clone(), Some(entry.value.len())),
            Event::Gone { key, .. } => (key.clone(), None),
        })
        .collect();
    let wanted = [("g/a", Some(1)), ("g/a", None), ("g/b", Some(64 << 10))];
    assert_eq!(seen, wanted.map(|(key, size)| (key.to_owned(), size)));
    for moment in [Instant::now(), within(Duration::from_millis(50))] {
        assert_eq!(watch.next(moment).unwrap_err().kind, ErrorKind::Timeout);
    }
    store.put("g/c", b"", None, soon()).unwrap();
    assert_eq!(watch.next(soon()).unwrap().len(), 1, "a watch goes on after a timeout");

    let (_, now) = store.list("g/", soon()).unwrap();
    post(&etcd, "/v3/kv/compaction", &format!("{{\"revision\":\"{}\"}}", now.0));
    let error = store.watch("g/", start, soon()).map(|mut watch| watch.next(soon()).map(|_| ())).unwrap().unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unreachable, "{error}");
    assert!(error.to_string().contains("list again"), "{error}");
    // What does not need what was forgotten goes on.
    store.watch("g/", now, soon()).unwrap();
    assert_eq!(store.wait(&["g/c".to_owned()], soon()).unwrap().len(), 1);
}

#[test]
fn a_lease_lives_while_it_is_held() {
    let Some(etcd) = Etcd::start(&[]) else { return };
    let store = etcd.open();
    let lease = store.grant(Duration::from_millis(100), soon()).unwrap();
    assert!(lease.ttl() >= Duration::from_secs(1), "etcd counts whole seconds: {:?}", lease.ttl());
    store.put("l/a", b"", Some(lease.id()), soon()).unwrap();
    let long = store.grant(2 * PATIENCE, soon()).unwrap();
    store.put("l/c", b"", Some(long.id()), soon()).unwrap();
    let (_, start) = store.list("l/", soon()).unwrap();
    let mut watch = store.watch("l/", start, soon()).unwrap();
    let error = watch.next(within(lease.ttl() * 2)).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Timeout, "it was renewed, so nothing vanished: {error}");
    assert!(lease.is_alive());

    let dropped = Instant::now();
    drop(long);
    assert!(matches!(watch.next(soon()).unwrap().as_slice(), [Event::Gone { key, .. }] if key == "l/c"));
    assert!(dropped.elapsed() < PATIENCE, "revoked, not expired: {:?}", dropped.elapsed());

    let lease = store.grant(Duration::from_secs(30), soon()).unwrap();
    assert_eq!(lease.ttl(), Duration::from_secs(30));
    assert!(store.compare_and_set("l/b", Expected::Absent, b"", Some(lease.id()), soon()).unwrap().is_some());
    lease.revoke(soon()).unwrap();
    lease.revoke(soon()).unwrap();
    assert!(!lease.is_alive());
    assert_eq!(store.get("l/b", soon()).unwrap(), None);
    let error = store.compare_and_set("l/b", Expected::Absent, b"", Some(lease.id()), soon()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Closed, "{error}");
}

/// Where the child of the next test finds its store.
const CHILD_STORE: &str = "TEST_ETCD_STORE";

#[test]
#[ignore = "the child of the next test"]
fn child_that_holds_a_lease() {
    let Ok(address) = std::env::var(CHILD_STORE) else { return };
    let store = EtcdStore::open(&address, soon()).unwrap();
    let lease = store.grant(Duration::from_secs(1), soon()).unwrap();
    store.put("child", b"", Some(lease.id()), soon()).unwrap();
    // Until it is killed, or its parent is gone.
    let mut watch = store.watch("end", Revision(1), soon()).unwrap();
    let _ = watch.next(within(Duration::from_secs(60)));
}

#[test]
fn the_keys_of_a_killed_process_vanish() {
    // So that etcd gives leases of a second.
    let Some(etcd) = Etcd::start(&["--heartbeat-interval", "50", "--election-timeout", "500"]) else { return };
    let store = etcd.open();
    assert_eq!(store.grant(Duration::from_millis(100), soon()).unwrap().ttl(), Duration::from_secs(1));
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_that_holds_a_lease", "--ignored"])
        .env(CHILD_STORE, etcd.address())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let there = store.wait(&["child".to_owned()], soon());
    let mut watch = store.watch("child", Revision(1), soon()).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    there.unwrap();
    let killed = Instant::now();
    let mut events = Vec::new();
    while !matches!(events.last(), Some(Event::Gone { .. })) {
        events.extend(watch.next(soon()).unwrap());
    }
    assert!(killed.elapsed() < PATIENCE, "{:?}", killed.elapsed());
}

#[test]
fn a_store_that_is_gone_is_named_and_used_again_when_it_is_back() {
    let Some(mut etcd) = Etcd::start(&[]) else { return };
    let store = etcd.open();
    let lease = store.grant(Duration::from_secs(2), soon()).unwrap();
    store.put("kept", b"1", None, soon()).unwrap();
    let mut watch = store.watch("", Revision(1), soon()).unwrap();
    watch.next(soon()).unwrap();

    etcd.freeze(true);
    let begun = Instant::now();
    let error = store.get("kept", within(Duration::from_millis(300))).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
    assert!(error.to_string().contains(&etcd.address()), "{error}");
    assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
    etcd.freeze(false);
    assert!(store.get("kept", soon()).unwrap().is_some());

    etcd.stop();
    let begun = Instant::now();
    for error in [
        store.put("k", b"", None, soon()).unwrap_err(),
        store.get("k", soon()).unwrap_err(),
        store.wait(&["k".to_owned()], soon()).unwrap_err(),
        store.watch("k", Revision(1), soon()).map(|_| ()).unwrap_err(),
        store.grant(Duration::from_secs(1), soon()).unwrap_err(),
        watch.next(soon()).unwrap_err(),
        watch.next(soon()).unwrap_err(),
        EtcdStore::open(&etcd.address(), within(Duration::from_millis(100))).unwrap_err(),
    ] {
        assert_eq!(error.kind, ErrorKind::Unreachable, "{error}");
        assert!(error.to_string().contains(&etcd.address()), "{error}");
    }
    assert!(begun.elapsed() < PATIENCE, "nobody waited for a deadline: {:?}", begun.elapsed());
    while lease.is_alive() {
        assert!(begun.elapsed() < PATIENCE, "a lease that cannot be renewed ends");
        std::thread::yield_now();
    }

    let opened = std::thread::spawn({
        let address = etcd.address();
        move || EtcdStore::open(&address, soon())
    });
    etcd.restart();
    opened.join().unwrap().unwrap();
    assert_eq!(store.get("kept", soon()).unwrap().unwrap().value, b"1");
    store.put("k", b"2", None, soon()).unwrap();
    assert!(!lease.is_alive(), "once lost, lost");
}

#[test]
fn a_waiter_outlives_a_restart_of_its_store() {
    let Some(mut etcd) = Etcd::start(&[]) else { return };
    let store = Arc::new(etcd.open());
    let mut watch = store.watch("k", Revision(1), soon()).unwrap();
    let lease = store.grant(Duration::from_secs(30), soon()).unwrap();
    store.put("k/lease", b"", Some(lease.id()), soon()).unwrap();
    watch.next(soon()).unwrap();
    etcd.restart();
    assert_eq!(watch.next(soon()).unwrap_err().kind, ErrorKind::Unreachable);
    assert!(lease.is_alive(), "a short absence does not end a lease");
    assert_eq!(store.wait(&["k/lease".to_owned()], soon()).unwrap().len(), 1);
}

#[test]
fn a_full_store_says_so_and_can_still_be_read_and_emptied() {
    let Some(etcd) = Etcd::start(&["--quota-backend-bytes", "1048576"]) else { return };
    let store = etcd.open();
    let value = vec![1; 64 << 10];
    let error = (0..64).find_map(|n| store.put(&format!("full/{n:02}"), &value, None, soon()).err()).unwrap();
    assert_eq!(error.kind, ErrorKind::Exhausted, "{error}");
    assert!(error.to_string().contains(&etcd.address()), "{error}");
    assert!(store.get("full/00", soon()).unwrap().is_some());
    assert!(store.delete_prefix("full/", soon()).unwrap() > 0);
}

#[test]
fn the_next_member_is_asked_when_one_does_not_answer() {
    let Some(etcd) = Etcd::start(&[]) else { return };
    let (dead, _) = free_ports();
    let address = format!("etcd://127.0.0.1:{dead},{}", etcd.address().strip_prefix("etcd://").unwrap());
    let store = EtcdStore::open(&address, soon()).unwrap();
    assert_eq!(store.address(), address);
    store.put("k", b"1", None, soon()).unwrap();
    store.watch("k", Revision(1), soon()).unwrap().next(soon()).unwrap();

    // One that takes connections and says nothing gets its share of the time and no more.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    let address = format!("etcd://127.0.0.1:{port},{}", etcd.address().strip_prefix("etcd://").unwrap());
    let store = EtcdStore::open(&address, within(Duration::from_secs(1))).unwrap();
    store.put("k", b"2", None, soon()).unwrap();
}

#[test]
fn what_is_not_etcd_is_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("etcd://{}", listener.local_addr().unwrap());
    let answers: [&[u8]; 4] = [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\nnot found",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551615\r\n\r\n",
    ];
    let server = serve(listener, answers.iter().map(|answer| answer.to_vec()).collect());
    for _ in 0..3 {
        let error = EtcdStore::open(&address, soon()).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Protocol, "{error}");
        assert!(error.to_string().contains(&address) && error.to_string().contains("etcd 3.4"), "{error}");
    }
    let error = EtcdStore::open(&address, within(Duration::from_secs(1))).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unreachable, "it promised more than it sent: {error}");
    server.join().unwrap();
}

#[test]
fn an_etcd_with_users_refuses() {
    let Some(etcd) = Etcd::start(&[]) else { return };
    let store = etcd.open();
    for (path, body) in [
        ("user/add", r#"{"name":"root","password":"a password"}"#),
        ("role/add", r#"{"name":"root"}"#),
        ("user/grant", r#"{"user":"root","role":"root"}"#),
        ("enable", "{}"),
    ] {
        post(&etcd, &format!("/v3/auth/{path}"), body);
    }
    for error in [
        store.get("k", soon()).unwrap_err(),
        store.put("k", b"", None, soon()).unwrap_err(),
        store.watch("k", Revision(1), soon()).map(|_| ()).unwrap_err(),
    ] {
        assert_eq!(error.kind, ErrorKind::Refused, "{error}");
        assert!(error.to_string().contains("users and roles"), "{error}");
    }
}

#[test]
fn requests_wait_for_an_election_and_changes_are_never_made_twice() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("etcd://{}", listener.local_addr().unwrap());
    let fault =
        |what: &str| answer("503 Service Unavailable", &format!(r#"{{"message":"etcdserver: {what}","code":14}}"#));
    let (good, done) = (r#"{"version":"3.5.0"}"#, r#"{"header":{"revision":"9"}}"#);
    let answers = vec![
        fault("leader changed"),
        answer("200 OK", good),
        fault("no leader"),
        fault("no leader"),
        answer("200 OK", done),
        fault("request timed out"),
        fault("leader changed"),
        answer("200 OK", done),
        fault("no leader"),
    ];
    let server = serve(listener, answers);
    let store = EtcdStore::open(&address, soon()).unwrap();
    assert_eq!(store.put("k", b"1", None, soon()).unwrap(), Revision(9));
    let error = store.put("k", b"2", None, soon()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unreachable, "{error}");
    assert!(error.to_string().contains("may or may not have been made"), "{error}");
    assert_eq!(store.get("k", soon()).unwrap(), None);
    let error = store.get("k", within(Duration::from_millis(20))).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unreachable, "{error}");
    assert!(error.to_string().contains("no leader"), "{error}");
    server.join().unwrap();
}

#[test]
fn a_wait_begins_again_when_its_watch_breaks() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("etcd://{}", listener.local_addr().unwrap());
    let read = |kvs: &str| {
        let body = format!(r#"{{"header":{{"revision":"9"}},"responses":[{{"response_range":{{{kvs}}}}}]}}"#);
        answer("200 OK", &body)
    };
    let created = "{\"result\":{\"created\":true}}\n";
    let watch = format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n{created}\r\n", created.len());
    // "crossrail/k" in base64.
    let there = read(r#""kvs":[{"key":"Y3Jvc3NyYWlsL2s=","mod_revision":"3"}]"#);
    let answers = vec![answer("200 OK", r#"{"version":"3.5.0"}"#), read(""), watch.into_bytes(), there];
    let server = serve(listener, answers);
    let store = EtcdStore::open(&address, soon()).unwrap();
    assert_eq!(keys(&store.wait(&["k".to_owned()], soon()).unwrap()), ["k"]);
    server.join().unwrap();
}

#[test]
fn a_lease_is_dropped_even_when_its_store_stands_still() {
    let Some(etcd) = Etcd::start(&[]) else { return };
    let store = etcd.open();
    let leases = [1, 60].map(|ttl| store.grant(Duration::from_secs(ttl), soon()).unwrap());
    etcd.freeze(true);
    for lease in leases {
        let begun = Instant::now();
        drop(lease);
        assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
    }
    etcd.freeze(false);
}

fn answer(status: &str, body: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

/// Gives each connection the next of `answers`, whatever it asks.
fn serve(listener: TcpListener, answers: Vec<Vec<u8>>) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        for answer in answers {
            let (mut peer, _) = listener.accept().unwrap();
            let _ = peer.read(&mut [0; 4096]).unwrap();
            peer.write_all(&answer).unwrap();
        }
    })
}

/// A request that the store has no call for.
fn post(etcd: &Etcd, path: &str, body: &str) {
    let host = etcd.address().strip_prefix("etcd://").unwrap().to_owned();
    let mut stream = TcpStream::connect(&host).unwrap();
    let length = body.len();
    write!(
        stream,
        "POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}
