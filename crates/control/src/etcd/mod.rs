//! A store that is a cluster of etcd 3.4 or later, `etcd://host:port[,host:port]`, without TLS.
//!
//! The client uses etcd's JSON gateway, its documented HTTP interface, which is on by default. gRPC would add some
//! hundred crates, an asynchronous runtime and a protocol compiler to every build machine; for a store that is accessed
//! a few times per membership change, a handful of crates suffices.
//!
//! All keys are below `crossrail/` in etcd, so that a shared cluster stays tidy. etcd counts leases in whole seconds
//! and lengthens them to its election timeout times one and a half, 2 s by default: a death is noticed that much later
//! than with the built-in store ([`Lease::ttl`] tells).

mod client;
mod http;
mod lease;
mod messages;
mod watch;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_types::{ErrorKind, Result};

use self::client::{Client, Effect};
use self::http::remaining;
use self::lease::EtcdLease;
use self::messages::{Bytes, Compare, Done, KeyValue, Nothing, Number, Operation, Put, Range, Status, Txn};
use self::watch::EtcdWatch;
use crate::limits::{check_key, check_prefix, check_value};
use crate::store::{Entry, Event, Expected, Lease, LeaseId, MissingKeys, Revision, Store, Watch};

/// Prefix of our keys.
const ROOT: &str = "crossrail/";
/// First and longest pause between attempts to reach a cluster that has not started yet.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(200));
/// Operations per transaction; etcd's default limit is 128.
const MOST_READS: usize = 100;

/// A client of an etcd cluster. See [`Store`].
#[derive(Debug)]
pub struct EtcdStore {
    client: Arc<Client>,
}

impl EtcdStore {
    /// Opens `etcd://host[:port][,host[:port]]`; the port is 2379 unless given. Waits until one member answers.
    ///
    /// # Errors
    /// `Config` for a malformed address, `Unreachable` or `Timeout` when no member answers before `deadline`,
    /// `Protocol` at once when what answers is not etcd.
    pub fn open(address: &str, deadline: Instant) -> Result<EtcdStore> {
        let client = Client::parse(address)?;
        let mut pause = PAUSES.0;
        loop {
            let path = "/v3/maintenance/status";
            match client.call::<Status>("store open", path, &Nothing {}, Effect::Reads, deadline) {
                Ok(status) if status.version.is_empty() => {
                    return Err(client.foreign("store open", "a member without a version"));
                }
                Ok(_) => return Ok(EtcdStore { client: Arc::new(client) }),
                // There is no event to wait for: etcd is another process.
                Err(error)
                    if error.kind == ErrorKind::Unreachable && remaining(deadline).is_some_and(|left| left > pause) =>
                {
                    std::thread::sleep(pause);
                }
                Err(error) => return Err(error),
            }
            pause = PAUSES.1.min(pause * 2);
        }
    }

    fn kv(&self, operation: &str, call: &str, request: &impl serde::Serialize, deadline: Instant) -> Result<Done> {
        let effect = if call == "range" { Effect::Reads } else { Effect::Changes };
        self.client.call(operation, &format!("/v3/kv/{call}"), request, effect, deadline)
    }

    /// Reads `keys` in their order, in several requests if need be: later ones are of a later revision.
    fn read(&self, keys: &[&str], deadline: Instant) -> Result<Vec<Known>> {
        let mut found = Vec::with_capacity(keys.len());
        for part in keys.chunks(MOST_READS) {
            let success = part.iter().map(|key| Operation::Range(exactly(key))).collect();
            let request = Txn { compare: Vec::new(), success };
            let done: Done = self.client.call("store wait", "/v3/kv/txn", &request, Effect::Reads, deadline)?;
            if done.responses.len() != part.len() {
                return Err(self.client.foreign("store wait", "more or fewer keys than were asked for"));
            }
            let at = Revision(done.header.revision.unsigned());
            let entries = done.responses.into_iter().map(|one| one.response_range.kvs.into_iter().find_map(entry));
            found.extend(entries.map(|entry| Known { entry, at }));
        }
        Ok(found)
    }

    /// Reads `keys`, then watches until all of them exist or the watch ends. On an error, `missing` has the keys that
    /// did not exist.
    fn gather(&self, keys: &[&str], deadline: Instant, missing: &mut Vec<String>) -> Result<Vec<Entry>> {
        let read = self.read(keys, deadline)?;
        let mut known: HashMap<&str, Known> = keys.iter().copied().zip(read).collect();
        let mut watch = None;
        while known.values().any(|known| known.entry.is_none()) {
            let came = match &mut watch {
                Some(watch) => EtcdWatch::next(watch, deadline),
                None => {
                    let since = known.values().map(|known| known.at).min().unwrap_or_default();
                    let opened = EtcdWatch::open(&self.client, span(keys), since, deadline);
                    opened.map(|opened| {
                        watch = Some(opened);
                        Vec::new()
                    })
                }
            };
            let events = came.inspect_err(|_| *missing = absent(keys, &known))?;
            for event in events {
                let key = match &event {
                    Event::Put(entry) => entry.key.as_str(),
                    Event::Gone { key, .. } => key.as_str(),
                };
                if let Some(known) = known.get_mut(key) {
                    known.learn(event);
                }
            }
        }
        Ok(keys.iter().filter_map(|key| known.get(key)?.entry.clone()).collect())
    }
}

/// Those of `keys` that do not exist, each once.
fn absent(keys: &[&str], known: &HashMap<&str, Known>) -> Vec<String> {
    let mut named = HashSet::new();
    let absent = keys.iter().filter(|key| known.get(**key).is_none_or(|known| known.entry.is_none()));
    absent.filter(|key| named.insert(**key)).map(|key| (*key).to_owned()).collect()
}

/// The known state of a key that is waited for, and its revision.
#[derive(Debug, PartialEq, Eq)]
struct Known {
    entry: Option<Entry>,
    at: Revision,
}

impl Known {
    /// Applies a change to the key, unless it is older than the known state.
    fn learn(&mut self, event: Event) {
        let (at, entry) = match event {
            Event::Put(entry) => (entry.revision, Some(entry)),
            Event::Gone { revision, .. } => (revision, None),
        };
        if at > self.at {
            *self = Known { entry, at };
        }
    }
}

impl Store for EtcdStore {
    fn address(&self) -> String {
        self.client.address()
    }

    fn put(&self, key: &str, value: &[u8], lease: Option<LeaseId>, deadline: Instant) -> Result<Revision> {
        let request = put("store put", key, value, lease)?;
        let done = self.kv("store put", "put", &request, deadline)?;
        Ok(Revision(done.header.revision.unsigned()))
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Option<Entry>> {
        check_key("store get", key)?;
        let done = self.kv("store get", "range", &exactly(key), deadline)?;
        Ok(done.kvs.into_iter().find_map(entry))
    }

    fn list(&self, prefix: &str, deadline: Instant) -> Result<(Vec<Entry>, Revision)> {
        check_prefix("store list", prefix)?;
        let done = self.kv("store list", "range", &below(prefix), deadline)?;
        Ok((done.kvs.into_iter().filter_map(entry).collect(), Revision(done.header.revision.unsigned())))
    }

    fn delete(&self, key: &str, deadline: Instant) -> Result<bool> {
        check_key("store delete", key)?;
        let done = self.kv("store delete", "deleterange", &exactly(key), deadline)?;
        Ok(done.deleted.unsigned() > 0)
    }

    fn delete_prefix(&self, prefix: &str, deadline: Instant) -> Result<u64> {
        check_prefix("store delete", prefix)?;
        let done = self.kv("store delete", "deleterange", &below(prefix), deadline)?;
        Ok(done.deleted.unsigned())
    }

    fn compare_and_set(
        &self,
        key: &str,
        expected: Expected,
        value: &[u8],
        lease: Option<LeaseId>,
        deadline: Instant,
    ) -> Result<Option<Revision>> {
        let request = put("store compare-and-set", key, value, lease)?;
        // etcd reports revision 0 for keys that do not exist.
        let (possible, mod_revision) = match expected {
            Expected::Absent => (true, Number(0)),
            Expected::At(revision) => (revision != Revision(0), Number::from(revision.0)),
        };
        if !possible {
            return Ok(None);
        }
        let compare = Compare { key: request.key.clone(), target: "MOD", result: "EQUAL", mod_revision };
        let request = Txn { compare: vec![compare], success: vec![Operation::Put(request)] };
        let done = self.kv("store compare-and-set", "txn", &request, deadline)?;
        Ok(done.succeeded.then(|| Revision(done.header.revision.unsigned())))
    }

    fn wait(&self, keys: &[String], deadline: Instant) -> Result<Vec<Entry>> {
        for key in keys {
            check_key("store wait", key)?;
        }
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let mut missing = Vec::new();
        let mut broken = false;
        loop {
            match self.gather(&keys, deadline, &mut missing) {
                // The watch broke, or its start revision was compacted: read again.
                Err(error) if error.kind == ErrorKind::Unreachable && !missing.is_empty() && !broken => {
                    (broken, missing) = (true, Vec::new());
                }
                Err(error) if error.kind == ErrorKind::Timeout && !missing.is_empty() => {
                    let hint = format!("these keys were not written to {} in time", self.client.address());
                    return Err(MissingKeys(missing).timeout("store wait").with_hint(hint));
                }
                other => return other,
            }
        }
    }

    fn grant(&self, ttl: Duration, deadline: Instant) -> Result<Box<dyn Lease>> {
        Ok(Box::new(EtcdLease::grant(&self.client, ttl, deadline)?))
    }

    fn watch(&self, prefix: &str, after: Revision, deadline: Instant) -> Result<Box<dyn Watch>> {
        check_prefix("store watch", prefix)?;
        Ok(Box::new(EtcdWatch::open(&self.client, below(prefix), after, deadline)?))
    }
}

fn put(operation: &str, key: &str, value: &[u8], lease: Option<LeaseId>) -> Result<Put> {
    check_key(operation, key)?;
    check_value(operation, value)?;
    Ok(Put { key: path(key), value: Bytes(value.to_vec()), lease: Number(lease.map_or(0, |lease| lease.0)) })
}

/// A key with our prefix, for etcd.
fn path(key: &str) -> Bytes {
    Bytes(format!("{ROOT}{key}").into_bytes())
}

/// A key without our prefix; `None` if it does not have it.
fn name(path: Bytes) -> Option<String> {
    String::from_utf8(path.0).ok()?.strip_prefix(ROOT).map(str::to_owned)
}

fn entry(kv: KeyValue) -> Option<Entry> {
    Some(Entry { key: name(kv.key)?, value: kv.value.0, revision: Revision(kv.mod_revision.unsigned()) })
}

fn exactly(key: &str) -> Range {
    Range { key: path(key), range_end: None }
}

/// The range that spans `keys`.
fn span(keys: &[&str]) -> Range {
    let first = keys.iter().copied().min().unwrap_or_default();
    let last = keys.iter().copied().max().unwrap_or_default();
    Range { key: path(first), range_end: Some(path(&format!("{last}\0"))) }
}

/// The keys that begin with `prefix`.
fn below(prefix: &str) -> Range {
    let key = format!("{ROOT}{prefix}").into_bytes();
    // The first key after all those that begin with it: no byte of UTF-8 is 0xff, so the last one can be counted up.
    let mut end = key.clone();
    if let Some(last) = end.last_mut() {
        *last = last.saturating_add(1);
    }
    Range { key: Bytes(key), range_end: Some(Bytes(end)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_that_is_replayed_does_not_undo_what_is_known() {
        let entry = |revision| Entry { key: "k".to_owned(), value: Vec::new(), revision: Revision(revision) };
        let gone = |revision| Event::Gone { key: "k".to_owned(), revision: Revision(revision) };
        let mut known = Known { entry: None, at: Revision(5) };
        known.learn(Event::Put(entry(4)));
        assert_eq!(known, Known { entry: None, at: Revision(5) });
        known.learn(Event::Put(entry(6)));
        known.learn(gone(5));
        assert_eq!(known, Known { entry: Some(entry(6)), at: Revision(6) });
        known.learn(gone(7));
        assert_eq!(known, Known { entry: None, at: Revision(7) });
    }

    #[test]
    fn ranges_hold_what_they_should() {
        let holds = |range: &Range, key: &str| {
            let end = range.range_end.as_ref().unwrap();
            (&range.key.0..&end.0).contains(&&path(key).0)
        };
        for (prefix, inside, outside) in [("", "\0", None), ("g/", "g/\u{10ffff}", Some("g")), ("é", "éa", Some("f"))]
        {
            assert!(holds(&below(prefix), inside) && holds(&below(prefix), prefix), "{prefix:?}");
            assert!(outside.is_none_or(|key| !holds(&below(prefix), key)), "{prefix:?}");
        }
        let some = span(&["b", "a", "c"]);
        assert!(["a", "b", "c"].iter().all(|key| holds(&some, key)) && !holds(&some, "ca") && !holds(&some, "A"));
        assert_eq!(name(Bytes(b"elsewhere/k".to_vec())), None);
    }
}
