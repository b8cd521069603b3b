//! The conformance suite of stores, which every backend's tests run.
//!
//! ```ignore
//! crossrail_control::conformance::run("built in", "suite-1/", &|| open(&address, &settings, deadline).unwrap());
//! ```
//!
//! A failure panics with the backend's and the check's name.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crossrail_types::{Error, ErrorKind, Result};

use crate::limits::{KEY_MAX, VALUE_MAX};
use crate::{Entry, Event, Expected, LeaseId, MissingKeys, Revision, Store, Watch};

/// Timeout for what must happen.
const LONG: Duration = Duration::from_secs(20);
/// How long to wait for what must not happen.
const SHORT: Duration = Duration::from_millis(60);

/// Makes one more client of the store.
pub type Clients<'a> = &'a (dyn Fn() -> Arc<dyn Store> + Sync);

/// One check's prefix in the store, and its clients.
struct Place<'a> {
    prefix: String,
    clients: Clients<'a>,
    store: Arc<dyn Store>,
}

type Check = fn(&Place<'_>);

fn soon() -> Instant {
    Instant::now() + LONG
}

/// Runs every check below `prefix`, which must be unused. `clients` returns another client of the same store.
///
/// # Panics
/// When a check fails.
pub fn run(name: &str, prefix: &str, clients: Clients<'_>) {
    let checks: [(&str, Check); 14] = [
        ("put and get", put_and_get),
        ("list is by key and below the prefix", list),
        ("delete", delete),
        ("compare and set", compare_and_set),
        ("one winner of each round", races),
        ("wait for keys that come", wait),
        ("wait names what is missing", wait_missing),
        ("a lease keeps its keys while it lives", lease_lives),
        ("revoking and dropping a lease", lease_ends),
        ("keys and their leases", lease_and_keys),
        ("a watch sees all in order", watch),
        ("a watch begins in the past", watch_from_the_past),
        ("a watch sees leases end", watch_leases),
        ("bad keys and values", limits),
    ];
    for (place, (check, body)) in checks.into_iter().enumerate() {
        eprintln!("{name}: {check}");
        let place = Place { prefix: format!("{prefix}{place:02}/"), clients, store: clients() };
        body(&place);
        place.store.delete_prefix(&place.prefix, soon()).expect("clean up");
    }
}

impl Place<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn put(&self, name: &str, value: &str, lease: Option<LeaseId>) -> Revision {
        self.store.put(&self.key(name), value.as_bytes(), lease, soon()).expect("put")
    }

    fn get(&self, name: &str) -> Option<Entry> {
        self.store.get(&self.key(name), soon()).expect("get")
    }

    fn text(&self, name: &str) -> Option<String> {
        self.get(name).map(|entry| String::from_utf8(entry.value).expect("UTF-8"))
    }

    /// The name of a key below this prefix.
    fn name<'a>(&self, key: &'a str) -> &'a str {
        key.strip_prefix(&self.prefix).unwrap_or_else(|| panic!("{key} is not below {}", self.prefix))
    }

    /// Opens a watch from the current revision.
    fn watch(&self) -> Box<dyn Watch> {
        let (_, now) = self.store.list(&self.prefix, soon()).expect("list");
        self.store.watch(&self.prefix, now, soon()).expect("watch")
    }

    /// `name=value` or `name gone`, and checks that revisions go up.
    fn events_of(&self, watch: &mut dyn Watch, count: usize) -> Vec<String> {
        let mut events = Vec::new();
        let mut last = Revision(0);
        while events.len() < count {
            for event in watch.next(soon()).expect("the watch's next changes") {
                let (text, revision) = match &event {
                    Event::Put(entry) => {
                        let value = String::from_utf8_lossy(&entry.value);
                        (format!("{}={value}", self.name(&entry.key)), entry.revision)
                    }
                    Event::Gone { key, revision } => (format!("{} gone", self.name(key)), *revision),
                };
                assert!(revision >= last, "{text} at {revision:?} after {last:?}");
                last = revision;
                events.push(text);
            }
        }
        events
    }
}

fn kind<T: std::fmt::Debug>(result: Result<T>) -> ErrorKind {
    result.expect_err("an error").kind
}

fn put_and_get(place: &Place<'_>) {
    assert_eq!(place.get("a"), None);
    let first = place.put("a", "one", None);
    let entry = Entry { key: place.key("a"), value: b"one".to_vec(), revision: first };
    assert_eq!(place.get("a"), Some(entry));
    let second = place.put("a", "two", None);
    assert!(second > first);
    assert_eq!(place.get("a").expect("a").revision, second);
    let other = (place.clients)();
    assert_eq!(other.get(&place.key("a"), soon()).expect("get").expect("a").value, b"two");
    place.put("empty", "", None);
    assert_eq!(place.text("empty"), Some(String::new()));
    let (key, value) = (place.key("ключ 鍵"), (0..=255).cycle().take(VALUE_MAX).collect::<Vec<u8>>());
    other.put(&key, &value, None, soon()).expect("the longest value");
    assert!(place.store.get(&key, soon()).expect("get").is_some_and(|entry| entry.value == value));
    assert!(place.store.address().contains("://"));
}

fn list(place: &Place<'_>) {
    let (none, before) = place.store.list(&place.prefix, soon()).expect("list");
    assert!(none.is_empty());
    for name in ["b", "a/2", "a/1", "a", "c"] {
        place.put(name, name, None);
    }
    let (all, after) = place.store.list(&place.prefix, soon()).expect("list");
    assert!(after > before);
    let names: Vec<_> = all.iter().map(|entry| place.name(&entry.key)).collect();
    assert_eq!(names, ["a", "a/1", "a/2", "b", "c"]);
    assert!(all.iter().all(|entry| entry.revision <= after && entry.revision > before));
    let (some, _) = place.store.list(&place.key("a/"), soon()).expect("list");
    let names: Vec<_> = some.iter().map(|entry| place.name(&entry.key)).collect();
    assert_eq!(names, ["a/1", "a/2"]);
}

fn delete(place: &Place<'_>) {
    assert!(!place.store.delete(&place.key("a"), soon()).expect("delete"));
    for name in ["a", "d/1", "d/2", "e"] {
        place.put(name, "x", None);
    }
    assert!(place.store.delete(&place.key("a"), soon()).expect("delete"));
    assert_eq!(place.get("a"), None);
    assert_eq!(place.store.delete_prefix(&place.key("d/"), soon()).expect("delete"), 2);
    assert_eq!(place.store.delete_prefix(&place.key("d/"), soon()).expect("delete"), 0);
    assert_eq!(place.text("e").as_deref(), Some("x"));
}

fn compare_and_set(place: &Place<'_>) {
    let set = |expected, value: &[u8]| {
        place.store.compare_and_set(&place.key("a"), expected, value, None, soon()).expect("compare-and-set")
    };
    assert_eq!(set(Expected::At(Revision(1)), b"no"), None);
    let first = set(Expected::Absent, b"one").expect("it was absent");
    assert_eq!(set(Expected::Absent, b"no"), None);
    assert_eq!(set(Expected::At(Revision(first.0 - 1)), b"no"), None);
    assert_eq!(place.text("a").as_deref(), Some("one"));
    let second = set(Expected::At(first), b"two").expect("it was as expected");
    assert!(second > first);
    assert_eq!(set(Expected::At(first), b"no"), None);
    assert_eq!(place.text("a").as_deref(), Some("two"));
    place.store.delete(&place.key("a"), soon()).expect("delete");
    assert_eq!(set(Expected::At(second), b"no"), None);
    assert!(set(Expected::Absent, b"three").is_some());
}

/// Threads with their own clients increment one counter; no increment is lost.
fn races(place: &Place<'_>) {
    const THREADS: usize = 4;
    const STEPS: usize = 25;
    let key = place.key("count");
    thread::scope(|scope| {
        for _ in 0..THREADS {
            let store = (place.clients)();
            let key = &key;
            scope.spawn(move || {
                for _ in 0..STEPS {
                    while !step(&*store, key) {}
                }
            });
        }
    });
    assert_eq!(place.text("count"), Some((THREADS * STEPS).to_string()));
}

fn step(store: &dyn Store, key: &str) -> bool {
    let (expected, count) = match store.get(key, soon()).expect("get") {
        None => (Expected::Absent, 0),
        Some(entry) => {
            let count: usize = String::from_utf8_lossy(&entry.value).parse().expect("a number");
            (Expected::At(entry.revision), count)
        }
    };
    let next = (count + 1).to_string();
    store.compare_and_set(key, expected, next.as_bytes(), None, soon()).expect("compare-and-set").is_some()
}

fn wait(place: &Place<'_>) {
    let keys: Vec<String> = ["b", "a", "b", "c"].iter().map(|name| place.key(name)).collect();
    place.put("b", "B", None);
    let waiting = (place.clients)();
    let found = thread::scope(|scope| {
        let found = scope.spawn(|| waiting.wait(&keys, soon()));
        place.put("c", "C", None);
        place.put("a", "A", None);
        found.join().expect("no panic").expect("wait")
    });
    let found: Vec<_> = found.iter().map(|entry| (place.name(&entry.key), &entry.value[..])).collect();
    assert_eq!(found, [("b", &b"B"[..]), ("a", b"A"), ("b", b"B"), ("c", b"C")]);
    assert_eq!(waiting.wait(&[], soon()).expect("nothing to wait for"), []);
    assert_eq!(waiting.wait(&keys[..1], soon()).expect("it is there").len(), 1);
}

fn wait_missing(place: &Place<'_>) {
    place.put("b", "B", None);
    let keys: Vec<String> = ["c", "b", "a"].iter().map(|name| place.key(name)).collect();
    assert_eq!(missing(place, &keys), [place.key("c"), place.key("a")]);
    // A deleted key counts as missing.
    place.store.delete(&place.key("b"), soon()).expect("delete");
    assert_eq!(missing(place, &keys[1..2]), [place.key("b")]);
}

/// What a wait for these keys names as missing. On a busy machine the store may be too late to say so in a short wait.
fn missing(place: &Place<'_>, keys: &[String]) -> Vec<String> {
    let mut time = SHORT;
    loop {
        let begun = Instant::now();
        let error = place.store.wait(keys, begun + time).expect_err("they never come");
        assert!(begun.elapsed() >= time && begun.elapsed() < time + LONG, "{:?}", begun.elapsed());
        assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
        let named = MissingKeys::of(&error).to_vec();
        if !named.is_empty() || time > LONG {
            return named;
        }
        time *= 4;
    }
}

fn lease_lives(place: &Place<'_>) {
    let lease = place.store.grant(Duration::from_secs(1), soon()).expect("grant");
    assert!(lease.ttl() >= Duration::from_secs(1));
    place.put("a", "x", Some(lease.id()));
    let mut watch = place.watch();
    let error = watch.next(Instant::now() + lease.ttl() * 3 / 2).expect_err("nothing changes");
    assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
    assert!(lease.is_alive());
    assert_eq!(place.text("a").as_deref(), Some("x"));
}

fn lease_ends(place: &Place<'_>) {
    let mut watch = place.watch();
    let ttl = Duration::from_secs(60);
    let (one, two) = (place.store.grant(ttl, soon()).expect("grant"), place.store.grant(ttl, soon()).expect("grant"));
    assert_ne!(one.id(), two.id());
    place.put("a", "x", Some(one.id()));
    place.put("b", "x", Some(two.id()));
    one.revoke(soon()).expect("revoke");
    assert!(!one.is_alive() && two.is_alive());
    assert_eq!((place.get("a"), place.text("b").as_deref()), (None, Some("x")));
    let late = place.store.put(&place.key("a"), b"late", Some(one.id()), soon());
    assert_eq!(kind(late), ErrorKind::Closed);
    drop(two);
    assert_eq!(place.events_of(&mut *watch, 4), ["a=x", "b=x", "a gone", "b gone"]);
    assert_eq!(place.get("b"), None);
}

/// A key belongs to the lease it was last written under.
fn lease_and_keys(place: &Place<'_>) {
    let ttl = Duration::from_secs(60);
    let (one, two) = (place.store.grant(ttl, soon()).expect("grant"), place.store.grant(ttl, soon()).expect("grant"));
    place.put("freed", "x", Some(one.id()));
    place.put("freed", "y", None);
    place.put("moved", "x", Some(one.id()));
    place.put("moved", "y", Some(two.id()));
    let key = place.key("set");
    let set = place.store.compare_and_set(&key, Expected::Absent, b"x", Some(one.id()), soon());
    assert!(set.expect("compare-and-set").is_some());
    one.revoke(soon()).expect("revoke");
    assert_eq!(place.get("set"), None);
    assert_eq!((place.text("freed").as_deref(), place.text("moved").as_deref()), (Some("y"), Some("y")));
    two.revoke(soon()).expect("revoke");
    assert_eq!((place.text("freed").as_deref(), place.get("moved")), (Some("y"), None));
}

fn watch(place: &Place<'_>) {
    const ROUNDS: usize = 200;
    let mut first = place.watch();
    let mut below = {
        let (_, now) = place.store.list(&place.prefix, soon()).expect("list");
        place.store.watch(&place.key("k/"), now, soon()).expect("watch")
    };
    let other = (place.clients)();
    let mut expected = Vec::new();
    for round in 0..ROUNDS {
        let name = format!("k/{}", round % 7);
        if round % 5 == 4 && other.delete(&place.key(&name), soon()).expect("delete") {
            expected.push(format!("{name} gone"));
        } else {
            other.put(&place.key(&name), round.to_string().as_bytes(), None, soon()).expect("put");
            expected.push(format!("{name}={round}"));
        }
    }
    place.put("l", "elsewhere", None);
    assert_eq!(place.events_of(&mut *below, expected.len()), expected);
    assert_eq!(kind(below.next(Instant::now() + SHORT)), ErrorKind::Timeout);
    expected.push("l=elsewhere".to_owned());
    assert_eq!(place.events_of(&mut *first, expected.len()), expected);
}

fn watch_from_the_past(place: &Place<'_>) {
    place.put("before", "x", None);
    let (_, then) = place.store.list(&place.prefix, soon()).expect("list");
    place.put("a", "1", None);
    place.put("b", "2", None);
    place.store.delete(&place.key("a"), soon()).expect("delete");
    let mut watch = place.store.watch(&place.prefix, then, soon()).expect("watch");
    place.put("c", "3", None);
    assert_eq!(place.events_of(&mut *watch, 4), ["a=1", "b=2", "a gone", "c=3"]);
}

/// Of leases whose client is gone, whatever it wrote vanishes.
fn watch_leases(place: &Place<'_>) {
    let mut watch = place.watch();
    let other = (place.clients)();
    let lease = other.grant(Duration::from_secs(60), soon()).expect("grant");
    for name in ["a", "b", "c"] {
        other.put(&place.key(name), b"x", Some(lease.id()), soon()).expect("put");
    }
    drop(lease);
    drop(other);
    let mut events = place.events_of(&mut *watch, 6);
    events[3..].sort();
    assert_eq!(events, ["a=x", "b=x", "c=x", "a gone", "b gone", "c gone"]);
}

fn limits(place: &Place<'_>) {
    let store = &place.store;
    let usage = |result: Result<()>, what: &str| {
        let error: Error = result.expect_err(what);
        assert_eq!(error.kind, ErrorKind::Usage, "{what}: {error}");
    };
    let long_key = place.key(&"k".repeat(KEY_MAX));
    let long_value = vec![0; VALUE_MAX + 1];
    usage(store.put("", b"x", None, soon()).map(drop), "an empty key");
    usage(store.put(&long_key, b"x", None, soon()).map(drop), "a long key");
    usage(store.get(&long_key, soon()).map(drop), "a long key");
    usage(store.wait(std::slice::from_ref(&long_key), soon()).map(drop), "a long key");
    usage(store.put(&place.key("a"), &long_value, None, soon()).map(drop), "a long value");
    let set = store.compare_and_set(&place.key("a"), Expected::Absent, &long_value, None, soon());
    usage(set.map(drop), "a long value");
    let key = long_key[..KEY_MAX].to_owned();
    store.put(&key, b"x", None, soon()).expect("the longest key");
    assert!(store.get(&key, soon()).expect("get").is_some());
}
