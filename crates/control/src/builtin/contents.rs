//! The store's contents as a state machine. No I/O and no clock: time and requests are inputs, answers go to an
//! [`Outbox`].

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::frames::{Answer, Change, FailureKind, Item, PART, Request, Value, micros};
use super::history::{Changed, History};
use super::outbox::Failed;
pub use super::outbox::Outbox;
use super::waits::Waits;
use crate::limits::{KEY_MAX, VALUE_MAX};

/// Capacity of the store in bytes (each key costs [`KEY_COST`] in addition to its own) and keys.
pub(super) const BYTES_MAX: usize = 64 << 20;
pub(super) const KEYS_MAX: usize = 1_000_000;
pub(super) const LEASES_MAX: usize = 100_000;
const KEY_COST: usize = 64;
/// Watches of one client.
const WATCHES_MAX: usize = 1024;
/// Backlog of a client, in bytes, beyond which its watches are ended.
pub(super) const WATCH_BACKLOG: usize = 8 << 20;
/// Shorter leases would expire because of ordinary scheduling delays.
const TTL_MIN: Duration = Duration::from_millis(50);
const TTL_MAX: Duration = Duration::from_secs(86_400);
/// Longest single wait.
const WAIT_MAX: Duration = Duration::from_secs(86_400);

#[derive(Debug)]
struct Record {
    value: Arc<[u8]>,
    revision: u64,
    /// 0: none.
    lease: i64,
}

#[derive(Debug)]
struct LeaseState {
    ttl: Duration,
    expires: Instant,
    keys: BTreeSet<Arc<str>>,
}

/// Keys, leases, waits and watches of one store.
#[derive(Debug)]
pub struct Contents {
    records: BTreeMap<Arc<str>, Record>,
    bytes: usize,
    revision: u64,
    leases: HashMap<i64, LeaseState>,
    expiries: BTreeSet<(Instant, i64)>,
    waits: Waits,
    /// The prefix by client and call.
    watches: BTreeMap<(u64, u64), Arc<str>>,
    history: History,
}

/// The immediate answer; `None` if it was sent, or will be.
type Outcome = Result<Option<Answer<'static>>, Failed>;

impl Contents {
    /// An empty store whose changes are numbered from `revision`. A later store at the same address must start from a
    /// greater one, so that revisions remembered by clients are recognized as stale.
    pub fn new(revision: u64) -> Contents {
        Contents {
            records: BTreeMap::new(),
            bytes: 0,
            revision,
            leases: HashMap::new(),
            expiries: BTreeSet::new(),
            waits: Waits::default(),
            watches: BTreeMap::new(),
            history: History::new(revision),
        }
    }

    /// Executes a client's request.
    pub fn apply(&mut self, now: Instant, client: u64, call: u64, request: &Request<'_>, out: &mut dyn Outbox) {
        match self.answer(now, client, call, request, out) {
            Ok(Some(answer)) => out.send(client, call, &answer),
            Ok(None) => {}
            Err(failed) => failed.send(out, client, call),
        }
        self.settle(out);
    }

    /// Expires leases and waits that are due.
    pub fn expire(&mut self, now: Instant, out: &mut dyn Outbox) {
        while let Some(&(expires, lease)) = self.expiries.first() {
            if expires > now {
                break;
            }
            self.end_lease(lease);
        }
        self.settle(out);
        self.waits.expire(now, out, |key| self.records.contains_key(key));
    }

    /// Extends every lease by the time that the store was stalled: no client could renew in that time.
    pub fn postpone(&mut self, stood: Duration) {
        let later = |(expires, lease): (Instant, i64)| (expires + stood, lease);
        self.expiries = std::mem::take(&mut self.expiries).into_iter().map(later).collect();
        for state in self.leases.values_mut() {
            state.expires += stood;
        }
    }

    /// When [`Contents::expire`] is due next.
    pub fn next_expiry(&self) -> Option<Instant> {
        let lease = self.expiries.first().map(|&(expires, _)| expires);
        [lease, self.waits.next_expiry()].into_iter().flatten().min()
    }

    /// Drops a disconnected client's waits and watches. Its leases expire on their own, since it may reconnect.
    pub fn forget(&mut self, client: u64) {
        self.waits.forget(client);
        let calls: Vec<_> = self.watches.range((client, 0)..=(client, u64::MAX)).map(|(key, _)| *key).collect();
        for call in calls {
            self.watches.remove(&call);
        }
    }

    /// Whether nothing is held: no key, lease, wait or watch.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn is_idle(&self) -> bool {
        self.records.is_empty()
            && self.bytes == 0
            && self.leases.is_empty()
            && self.expiries.is_empty()
            && self.watches.is_empty()
            && self.waits.is_idle()
    }

    fn answer(&mut self, now: Instant, client: u64, call: u64, request: &Request<'_>, out: &mut dyn Outbox) -> Outcome {
        match *request {
            Request::Put { key, value, lease } => self.put(key, value.0, lease).map(|at| Some(Answer::Written(at))),
            Request::Get(key) => {
                let found = self.records.get_key_value(key).map(|(key, record)| item(key, record));
                let Some(found) = found else { return Ok(Some(Answer::Not)) };
                let answer = Answer::Entries { items: vec![found], revision: self.revision, more: false };
                out.send(client, call, &answer);
                Ok(None)
            }
            Request::List(prefix) => {
                send_entries(below(&self.records, prefix), self.revision, client, call, out);
                Ok(None)
            }
            Request::Delete(key) => Ok(Some(Answer::Deleted(u64::from(self.remove(key))))),
            Request::DeletePrefix(prefix) => {
                let keys: Vec<Arc<str>> = below(&self.records, prefix).map(|(key, _)| Arc::clone(key)).collect();
                keys.iter().for_each(|key| {
                    self.remove(key);
                });
                Ok(Some(Answer::Deleted(keys.len() as u64)))
            }
            Request::CompareAndSet { key, expected, value, lease } => {
                if self.records.get(key).map_or(0, |record| record.revision) != expected {
                    return Ok(Some(Answer::Not));
                }
                self.put(key, value.0, lease).map(|at| Some(Answer::Written(at)))
            }
            Request::Wait { ref keys, timeout_us } => {
                let deadline = now + Duration::from_micros(timeout_us).min(WAIT_MAX);
                if let Some(key) = keys.iter().find(|key| key.len() > KEY_MAX) {
                    return Err(too_long("a key", key.len(), KEY_MAX));
                }
                let absent = |key: &str| !self.records.contains_key(key);
                self.waits.add((client, call), keys, deadline, absent)?;
                Ok(None)
            }
            Request::Grant(ttl_us) => self.grant(now, Duration::from_micros(ttl_us)).map(Some),
            Request::Renew(lease) => self.renew(now, lease).map(|()| Some(Answer::Done)),
            Request::Revoke(lease) => {
                self.end_lease(lease);
                Ok(Some(Answer::Done))
            }
            Request::Watch { prefix, after } => self.watch(client, call, prefix, after, out).map(|()| None),
            Request::Unwatch(watch) => {
                self.watches.remove(&(client, watch));
                Ok(Some(Answer::Done))
            }
        }
    }

    fn put(&mut self, key: &str, value: &[u8], lease: i64) -> Result<u64, Failed> {
        match (key.len(), value.len()) {
            (0, _) => return Err(Failed::new(FailureKind::Usage, "the key is empty")),
            (len, _) if len > KEY_MAX => return Err(too_long("a key", len, KEY_MAX)),
            (_, len) if len > VALUE_MAX => return Err(too_long("a value", len, VALUE_MAX)),
            _ => {}
        }
        if lease != 0 && !self.leases.contains_key(&lease) {
            return Err(no_lease());
        }
        let before = self.records.get_key_value(key);
        let freed = before.map_or(0, |(_, record)| cost(key, &record.value));
        let bytes = self.bytes - freed + cost(key, value);
        let keys = self.records.len() + usize::from(before.is_none());
        if bytes > BYTES_MAX || keys > KEYS_MAX {
            let detail = format!(
                "the store is full: it holds {} keys in {} bytes, and takes {KEYS_MAX} keys in {BYTES_MAX} bytes",
                self.records.len(),
                self.bytes
            );
            return Err(Failed::new(FailureKind::Exhausted, detail).hint("delete keys, or write them under leases"));
        }
        let old_lease = before.map(|(_, record)| record.lease);
        let key: Arc<str> = before.map_or_else(|| Arc::from(key), |(key, _)| Arc::clone(key));
        if let Some(old) = old_lease.filter(|old| *old != lease)
            && let Some(old) = self.leases.get_mut(&old)
        {
            old.keys.remove(&key);
        }
        if let Some(lease) = self.leases.get_mut(&lease) {
            lease.keys.insert(Arc::clone(&key));
        }
        self.bytes = bytes;
        self.revision += 1;
        let value: Arc<[u8]> = Arc::from(value);
        let change = Changed { revision: self.revision, key: Arc::clone(&key), value: Some(Arc::clone(&value)) };
        self.history.push(change);
        if old_lease.is_none() {
            self.waits.appeared(&key);
        }
        self.records.insert(key, Record { value, revision: self.revision, lease });
        Ok(self.revision)
    }

    fn remove(&mut self, key: &str) -> bool {
        let Some((key, record)) = self.records.remove_entry(key) else { return false };
        if let Some(lease) = self.leases.get_mut(&record.lease) {
            lease.keys.remove(&key);
        }
        self.bytes -= cost(&key, &record.value);
        self.revision += 1;
        self.waits.vanished(&key);
        self.history.push(Changed { revision: self.revision, key, value: None });
        true
    }

    fn grant(&mut self, now: Instant, ttl: Duration) -> Result<Answer<'static>, Failed> {
        if ttl > TTL_MAX {
            let detail = format!("a lease of {} s; the store takes at most {} s", ttl.as_secs(), TTL_MAX.as_secs());
            return Err(Failed::new(FailureKind::Usage, detail));
        }
        if self.leases.len() >= LEASES_MAX {
            let detail = format!("the store holds {LEASES_MAX} leases and takes no more");
            return Err(Failed::new(FailureKind::Exhausted, detail));
        }
        let ttl = ttl.max(TTL_MIN);
        // Lease ids share the revision counter, so no later store at this address grants the same id again.
        self.revision += 1;
        let lease = self.revision as i64;
        self.leases.insert(lease, LeaseState { ttl, expires: now + ttl, keys: BTreeSet::new() });
        self.expiries.insert((now + ttl, lease));
        Ok(Answer::Granted(lease, micros(ttl)))
    }

    fn renew(&mut self, now: Instant, lease: i64) -> Result<(), Failed> {
        let Some(state) = self.leases.get_mut(&lease) else { return Err(no_lease()) };
        self.expiries.remove(&(state.expires, lease));
        state.expires = now + state.ttl;
        self.expiries.insert((state.expires, lease));
        Ok(())
    }

    fn end_lease(&mut self, lease: i64) {
        let Some(state) = self.leases.remove(&lease) else { return };
        self.expiries.remove(&(state.expires, lease));
        for key in &state.keys {
            self.remove(key);
        }
    }

    fn watch(&mut self, client: u64, call: u64, prefix: &str, after: u64, out: &mut dyn Outbox) -> Result<(), Failed> {
        const AGAIN: &str = "list again, and watch from the revision that it gives";
        if after > self.revision {
            let detail = format!("revision {after} is not of this store, which has been restarted");
            return Err(Failed::new(FailureKind::Closed, detail).hint(AGAIN));
        }
        let Some(missed) = self.history.after(after) else {
            let detail = format!("the changes after revision {after} are no longer kept");
            return Err(Failed::new(FailureKind::Closed, detail).hint(AGAIN));
        };
        if self.watches.range((client, 0)..=(client, u64::MAX)).count() >= WATCHES_MAX {
            return Err(Failed::new(FailureKind::Exhausted, format!("this client has {WATCHES_MAX} watches already")));
        }
        if prefix.len() > KEY_MAX {
            return Err(too_long("a prefix", prefix.len(), KEY_MAX));
        }
        out.send(client, call, &Answer::Done);
        send_changes(missed, prefix, (client, call), out);
        self.watches.insert((client, call), Arc::from(prefix));
        Ok(())
    }

    /// Reports the changes of the last request to watches and waits.
    fn settle(&mut self, out: &mut dyn Outbox) {
        if self.history.has_fresh() {
            let history = &self.history;
            self.watches.retain(|&(client, call), prefix| {
                let concerned = history.fresh().any(|change| change.key.starts_with(&**prefix));
                if concerned && out.backlog(client) > WATCH_BACKLOG {
                    let detail = format!("this watch was ended: {WATCH_BACKLOG} bytes of its changes are unread");
                    let hint = "read it more often; list again, and watch from the revision that it gives";
                    Failed::new(FailureKind::Closed, detail).hint(hint).send(out, client, call);
                    return false;
                }
                if concerned {
                    send_changes(history.fresh(), prefix, (client, call), out);
                }
                true
            });
            self.history.told();
        }
        for wait in self.waits.take_ready() {
            let entries = wait.keys.iter().filter_map(|key| self.records.get_key_value(key));
            send_entries(entries, self.revision, wait.client, wait.call, out);
        }
    }
}

fn cost(key: &str, value: &[u8]) -> usize {
    key.len() + value.len() + KEY_COST
}

fn no_lease() -> Failed {
    Failed::new(FailureKind::Closed, "the lease has ended")
        .hint("it was revoked, or not renewed in time: ask for a new one and write its keys again")
}

fn too_long(what: &str, len: usize, most: usize) -> Failed {
    Failed::new(FailureKind::Usage, format!("{what} of {len} bytes; the store takes at most {most}"))
}

fn below<'a>(
    records: &'a BTreeMap<Arc<str>, Record>,
    prefix: &str,
) -> impl Iterator<Item = (&'a Arc<str>, &'a Record)> {
    let from = records.range::<str, _>((Bound::Included(prefix), Bound::Unbounded));
    from.take_while(move |(key, _)| key.starts_with(prefix))
}

fn item<'a>(key: &'a str, record: &'a Record) -> Item<'a> {
    Item { key, value: Value(&record.value), revision: record.revision }
}

fn send_entries<'a>(
    entries: impl Iterator<Item = (&'a Arc<str>, &'a Record)>,
    revision: u64,
    client: u64,
    call: u64,
    out: &mut dyn Outbox,
) {
    let (mut items, mut bytes) = (Vec::new(), 0);
    for (key, record) in entries {
        items.push(item(key, record));
        bytes += cost(key, &record.value);
        if bytes > PART {
            out.send(client, call, &Answer::Entries { items: std::mem::take(&mut items), revision, more: true });
            bytes = 0;
        }
    }
    out.send(client, call, &Answer::Entries { items, revision, more: false });
}

fn send_changes<'a>(
    changes: impl Iterator<Item = &'a Changed>,
    prefix: &str,
    (client, call): (u64, u64),
    out: &mut dyn Outbox,
) {
    let (mut part, mut bytes) = (Vec::new(), 0);
    for change in changes.filter(|change| change.key.starts_with(prefix)) {
        part.push(match &change.value {
            Some(value) => Change::Put(Item { key: &change.key, value: Value(value), revision: change.revision }),
            None => Change::Gone { key: &change.key, revision: change.revision },
        });
        bytes += change.cost();
        if bytes > PART {
            out.send(client, call, &Answer::Changes(std::mem::take(&mut part)));
            bytes = 0;
        }
    }
    if !part.is_empty() {
        out.send(client, call, &Answer::Changes(part));
    }
}

#[cfg(test)]
#[path = "contents_tests.rs"]
mod tests;
