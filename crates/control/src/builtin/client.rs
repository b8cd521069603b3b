//! The client of the built-in store.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_handshake::Secret;
use crossrail_types::{Error, ErrorKind, Result, Settings};

use super::calls::Call;
use super::channel::{Channel, answer, entry};
use super::dial::{StoreAddress, dial};
use super::frames::{Answer, Change, Request, Value, micros};
use super::lease::{self, Renewer};
use crate::limits::{check_key, check_prefix, check_value};
use crate::store::{Entry, Event, Expected, Lease, LeaseId, MissingKeys, Revision, Store, Watch};

/// First and longest pause between attempts to reach a store that has not started yet.
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(20);
/// Extra time for the store's answer that a wait has timed out, which arrives after the deadline.
const GRACE: Duration = Duration::from_millis(50);

/// Connects to the store at `store` (`host:port`); waits until the store is reachable.
///
/// # Errors
/// `Config`: a malformed address, or the secret. `Unreachable`: the last attempt's, at the deadline. `Refused`,
/// `Mismatch`, `Protocol`, `Exhausted`: at once.
pub(crate) fn connect(store: &str, settings: &Settings, deadline: Instant) -> Result<Arc<dyn Store>> {
    let store = StoreAddress::parse(store)?;
    // The workers of this process warn about a weak secret.
    let (secret, _warnings) =
        Secret::load(settings.secret.as_ref().map(|text| text.expose()), settings.secret_file.as_deref())?;
    let mut pause = PAUSE_MIN;
    let mut last: Option<Error> = None;
    let stream = loop {
        match dial(&store, &secret, "store", deadline) {
            Ok(stream) => break stream,
            // The deadline passed while retrying: the earlier error says more.
            Err(error) if error.kind == ErrorKind::Timeout && last.is_some() => return Err(last.unwrap_or(error)),
            Err(error) if error.kind != ErrorKind::Unreachable || Instant::now() + pause >= deadline => {
                return Err(error);
            }
            Err(error) => {
                std::thread::sleep(pause);
                last = Some(error);
            }
        }
        pause = (pause * 2).min(PAUSE_MAX);
    };
    let channel = Arc::new(Channel::new(store, secret, stream)?);
    Ok(Arc::new(Client { channel, renewer: Arc::new(Renewer::default()) }))
}

fn number(lease: Option<LeaseId>) -> i64 {
    lease.map_or(0, |lease| lease.0)
}

/// The built-in store as a [`Store`].
#[derive(Debug)]
struct Client {
    channel: Arc<Channel>,
    renewer: Arc<Renewer>,
}

impl Store for Client {
    fn address(&self) -> String {
        self.channel.address()
    }

    fn put(&self, key: &str, value: &[u8], lease: Option<LeaseId>, deadline: Instant) -> Result<Revision> {
        const OPERATION: &str = "store put";
        check_key(OPERATION, key)?;
        check_value(OPERATION, value)?;
        let request = Request::Put { key, value: Value(value), lease: number(lease) };
        self.channel.call(OPERATION, &request, deadline, |answer| match answer {
            Answer::Written(revision) => Some(Revision(revision)),
            _ => None,
        })
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Option<Entry>> {
        const OPERATION: &str = "store get";
        check_key(OPERATION, key)?;
        self.channel.call(OPERATION, &Request::Get(key), deadline, |answer| match answer {
            Answer::Entries { items, .. } => items.first().map(|item| Some(entry(item))),
            Answer::Not => Some(None),
            _ => None,
        })
    }

    fn list(&self, prefix: &str, deadline: Instant) -> Result<(Vec<Entry>, Revision)> {
        const OPERATION: &str = "store list";
        check_prefix(OPERATION, prefix)?;
        let found = self.channel.entries(OPERATION, &Request::List(prefix), deadline)?;
        found.ok_or_else(|| Error::new(ErrorKind::Protocol, OPERATION, "the store did not answer with a list"))
    }

    fn delete(&self, key: &str, deadline: Instant) -> Result<bool> {
        check_key("store delete", key)?;
        self.channel.call("store delete", &Request::Delete(key), deadline, deleted).map(|count| count > 0)
    }

    fn delete_prefix(&self, prefix: &str, deadline: Instant) -> Result<u64> {
        check_prefix("store delete", prefix)?;
        self.channel.call("store delete", &Request::DeletePrefix(prefix), deadline, deleted)
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
            // No change has the number 0, so no key was written by it.
            Expected::At(Revision(0)) => return Ok(None),
            Expected::At(Revision(revision)) => revision,
        };
        let request = Request::CompareAndSet { key, expected, value: Value(value), lease: number(lease) };
        self.channel.call(OPERATION, &request, deadline, |answer| match answer {
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
        let call = self.channel.begin(OPERATION, &request, deadline)?;
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
        lease::grant(&self.channel, &self.renewer, ttl, deadline)
    }

    fn watch(&self, prefix: &str, after: Revision, deadline: Instant) -> Result<Box<dyn Watch>> {
        const OPERATION: &str = "store watch";
        check_prefix(OPERATION, prefix)?;
        let call = self.channel.begin(OPERATION, &Request::Watch { prefix, after: after.0 }, deadline)?;
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

/// A watch whose changes the store pushes.
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
