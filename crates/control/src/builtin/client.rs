//! The calling end.

use std::fmt;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_handshake::Secret;
use crossrail_types::{Error, ErrorKind, Result, Settings};
use parking_lot::Mutex;

use super::calls::{Call, Connection};
use super::dial::{Place, dial};
use super::frames::{Answer, Change, Item, Request, Value, decode_answer, micros};
use super::lease::{self, Keeper};
use crate::limits::{check_key, check_prefix, check_value};
use crate::store::{Entry, Event, Expected, Lease, LeaseId, MissingKeys, Revision, Store, Watch};

/// Pauses between attempts to reach a store that does not run yet: nothing tells when it does.
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(20);
/// The store's answer that a wait ran out comes after its deadline by as much as it takes to arrive.
const GRACE: Duration = Duration::from_millis(50);

/// A client of the store at `place` (`host:port`); waits until the store is there.
///
/// # Errors
/// `Config`: no such place, or the secret. `Unreachable`: the last attempt's, at the deadline. `Refused`, `Mismatch`,
/// `Protocol`, `Exhausted`: at once.
pub(crate) fn connect(place: &str, settings: &Settings, deadline: Instant) -> Result<Arc<dyn Store>> {
    let place = Place::parse(place)?;
    // The workers of this process warn about a weak secret.
    let (secret, _warnings) =
        Secret::load(settings.secret.as_ref().map(|text| text.expose()), settings.secret_file.as_deref())?;
    let mut pause = PAUSE_MIN;
    let stream = loop {
        match dial(&place, &secret, "store", deadline) {
            Ok(stream) => break stream,
            Err(error) if error.kind != ErrorKind::Unreachable || Instant::now() + pause >= deadline => {
                return Err(error);
            }
            Err(_) => std::thread::sleep(pause),
        }
        pause = (pause * 2).min(PAUSE_MAX);
    };
    let shared = Shared { place, secret, connection: Mutex::new(None), keeper: Arc::new(Keeper::default()) };
    *shared.connection.lock() = Some(shared.adopt(stream)?);
    Ok(Arc::new(Client(Arc::new(shared))))
}

/// What a client, its leases and its watches share.
pub(super) struct Shared {
    place: Place,
    secret: Secret,
    connection: Mutex<Option<Arc<Connection>>>,
    pub(super) keeper: Arc<Keeper>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.place.address())
    }
}

impl Shared {
    fn adopt(&self, stream: TcpStream) -> Result<Arc<Connection>> {
        Connection::new(stream, self.place.address()).map(Arc::new)
    }

    /// The connection, made anew if it has ended.
    fn connection(&self, operation: &str, deadline: Instant) -> Result<Arc<Connection>> {
        let Some(mut connection) = self.connection.try_lock_until(deadline) else {
            let detail = "the store was not reached in time";
            return Err(Error::new(ErrorKind::Timeout, operation, detail).with_peer(self.place.address()));
        };
        if let Some(known) = connection.as_ref().filter(|known| known.is_alive()) {
            return Ok(Arc::clone(known));
        }
        *connection = None;
        let stream = dial(&self.place, &self.secret, operation, deadline)?;
        let new = self.adopt(stream)?;
        *connection = Some(Arc::clone(&new));
        Ok(new)
    }

    fn begin(&self, operation: &'static str, request: &Request<'_>, deadline: Instant) -> Result<Call> {
        self.connection(operation, deadline)?.begin(operation, request, deadline)
    }

    /// A call with one answer.
    pub(super) fn call<T>(
        &self,
        operation: &'static str,
        request: &Request<'_>,
        deadline: Instant,
        read: impl FnOnce(Answer<'_>) -> Option<T>,
    ) -> Result<T> {
        let call = self.begin(operation, request, deadline)?;
        answer(&call, operation, deadline, read)
    }

    /// A call that is answered with entries, in as many frames as it takes.
    fn entries(
        &self,
        operation: &'static str,
        request: &Request<'_>,
        deadline: Instant,
    ) -> Result<Option<(Vec<Entry>, Revision)>> {
        let call = self.begin(operation, request, deadline)?;
        let mut found = Vec::new();
        loop {
            let last = answer(&call, operation, deadline, |answer| match answer {
                Answer::Entries { items, revision, more } => {
                    found.extend(items.iter().map(entry));
                    Some((!more).then_some(Some(Revision(revision))))
                }
                Answer::Not => Some(Some(None)),
                _ => None,
            })?;
            if let Some(revision) = last {
                return Ok(revision.map(|revision| (found, revision)));
            }
        }
    }
}

/// The next answer of a call, as `read` understands it.
fn answer<T>(
    call: &Call,
    operation: &'static str,
    deadline: Instant,
    read: impl FnOnce(Answer<'_>) -> Option<T>,
) -> Result<T> {
    let body = call.next(deadline)?;
    let answer = decode_answer(&body).map_err(|why| call.connection.protocol(operation, &why))?.body;
    if let Answer::Failed(failure) = &answer {
        return Err(failure.error(operation));
    }
    read(answer).ok_or_else(|| call.connection.protocol(operation, "the store sent another answer than asked for"))
}

fn entry(item: &Item<'_>) -> Entry {
    Entry { key: item.key.to_owned(), value: item.value.0.to_vec(), revision: Revision(item.revision) }
}

fn number(lease: Option<LeaseId>) -> i64 {
    lease.map_or(0, |lease| lease.0)
}

/// The store as [`crate::open`] gives it.
#[derive(Debug)]
struct Client(Arc<Shared>);

impl Store for Client {
    fn address(&self) -> String {
        self.0.place.address()
    }

    fn put(&self, key: &str, value: &[u8], lease: Option<LeaseId>, deadline: Instant) -> Result<Revision> {
        const OPERATION: &str = "store put";
        check_key(OPERATION, key)?;
        check_value(OPERATION, value)?;
        let request = Request::Put { key, value: Value(value), lease: number(lease) };
        self.0.call(OPERATION, &request, deadline, |answer| match answer {
            Answer::Written(revision) => Some(Revision(revision)),
            _ => None,
        })
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Option<Entry>> {
        const OPERATION: &str = "store get";
        check_key(OPERATION, key)?;
        self.0.call(OPERATION, &Request::Get(key), deadline, |answer| match answer {
            Answer::Entries { items, .. } => items.first().map(|item| Some(entry(item))),
            Answer::Not => Some(None),
            _ => None,
        })
    }

    fn list(&self, prefix: &str, deadline: Instant) -> Result<(Vec<Entry>, Revision)> {
        const OPERATION: &str = "store list";
        check_prefix(OPERATION, prefix)?;
        let found = self.0.entries(OPERATION, &Request::List(prefix), deadline)?;
        found.ok_or_else(|| Error::new(ErrorKind::Protocol, OPERATION, "the store did not answer with a list"))
    }

    fn delete(&self, key: &str, deadline: Instant) -> Result<bool> {
        check_key("store delete", key)?;
        self.0.call("store delete", &Request::Delete(key), deadline, deleted).map(|count| count > 0)
    }

    fn delete_prefix(&self, prefix: &str, deadline: Instant) -> Result<u64> {
        check_prefix("store delete", prefix)?;
        self.0.call("store delete", &Request::DeletePrefix(prefix), deadline, deleted)
    }

    fn compare_and_set(
        &self,
        key: &str,
        expected: Expected,
        value: &[u8],
        lease: Option<LeaseId>,
        deadline: Instant,
    ) -> Result<Option<Revision>> {
        const OPERATION: &str = "store compare-and-set";
        check_key(OPERATION, key)?;
        check_value(OPERATION, value)?;
        let expected = match expected {
            Expected::Absent => 0,
            // No change has the number 0: nothing was last written by it.
            Expected::At(Revision(0)) => return Ok(None),
            Expected::At(Revision(revision)) => revision,
        };
        let request = Request::CompareAndSet { key, expected, value: Value(value), lease: number(lease) };
        self.0.call(OPERATION, &request, deadline, |answer| match answer {
            Answer::Written(revision) => Some(Some(Revision(revision))),
            Answer::Not => Some(None),
            _ => None,
        })
    }

    fn wait(&self, keys: &[String], deadline: Instant) -> Result<Vec<Entry>> {
        const OPERATION: &str = "store wait";
        for key in keys {
            check_key(OPERATION, key)?;
        }
        let timeout_us = micros(deadline.saturating_duration_since(Instant::now()));
        let request = Request::Wait { keys: keys.iter().map(String::as_str).collect(), timeout_us };
        let call = self.0.begin(OPERATION, &request, deadline)?;
        let mut found = Vec::with_capacity(keys.len());
        loop {
            let more = answer(&call, OPERATION, deadline + GRACE, |answer| match answer {
                Answer::Entries { items, more, .. } => {
                    found.extend(items.iter().map(entry));
                    Some(Ok(more))
                }
                Answer::Missing(missing, count) => Some(Err(missing_error(OPERATION, &missing, count))),
                _ => None,
            })?;
            if !more? {
                return Ok(found);
            }
        }
    }

    fn grant(&self, ttl: Duration, deadline: Instant) -> Result<Box<dyn Lease>> {
        lease::grant(&self.0, ttl, deadline)
    }

    fn watch(&self, prefix: &str, after: Revision, deadline: Instant) -> Result<Box<dyn Watch>> {
        const OPERATION: &str = "store watch";
        check_prefix(OPERATION, prefix)?;
        let call = self.0.begin(OPERATION, &Request::Watch { prefix, after: after.0 }, deadline)?;
        answer(&call, OPERATION, deadline, |answer| matches!(answer, Answer::Done).then_some(()))?;
        Ok(Box::new(Watching { call, ended: None }))
    }
}

fn deleted(answer: Answer<'_>) -> Option<u64> {
    match answer {
        Answer::Deleted(count) => Some(count),
        _ => None,
    }
}

/// The error of a wait that ran out. The store may list fewer keys than are missing; the hint then says so.
fn missing_error(operation: &str, missing: &[&str], count: u64) -> Error {
    let unlisted = count.saturating_sub(missing.len() as u64);
    let error = MissingKeys(missing.iter().map(|key| (*key).to_owned()).collect()).timeout(operation);
    let hint = "these keys were not written in time";
    error.with_hint(if unlisted == 0 { hint.to_owned() } else { format!("{hint}, and {unlisted} more") })
}

/// Changes that the store pushes.
struct Watching {
    call: Call,
    ended: Option<Error>,
}

impl Watch for Watching {
    fn next(&mut self, deadline: Instant) -> Result<Vec<Event>> {
        if let Some(error) = &self.ended {
            return Err(error.clone());
        }
        let events = answer(&self.call, "store watch", deadline, |answer| match answer {
            Answer::Changes(changes) => Some(changes.iter().map(event).collect()),
            _ => None,
        });
        events.inspect_err(|error| {
            if error.kind != ErrorKind::Timeout {
                self.ended = Some(error.clone());
            }
        })
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        if self.ended.is_none() {
            self.call.unwatch();
        }
    }
}

fn event(change: &Change<'_>) -> Event {
    match change {
        Change::Put(item) => Event::Put(entry(item)),
        Change::Gone { key, revision } => Event::Gone { key: (*key).to_owned(), revision: Revision(*revision) },
    }
}
