use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_locks::{Condvar, Mutex};
use crossrail_types::{Error, ErrorKind, Log, Result, interrupt};

use super::page_row::PageRow;
use crate::keys::{Keys, check_key};
use crate::membership::{Roster, Row, rank_key, rank_name};
use crate::{Expected, Lease, LeaseId, RankState, Store};

/// Timeout of one store access while re-registering or leaving.
pub(super) const STEP_TIMEOUT: Duration = Duration::from_secs(2);

/// Keeps deadlines from overflowing.
const LONGEST: Duration = Duration::from_secs(365 * 86_400);
/// Most barriers listed in a departure note.
const NOTE_MAX: usize = 2000;

/// A group's state, shared by its handles and its watching thread.
///
/// Lock order: own, roster, control. The store is never called with `roster` held.
pub(super) struct GroupState {
    pub(super) name: String,
    pub(super) keys: Keys,
    pub(super) rank: u32,
    pub(super) size: u32,
    pub(super) local_rank: u32,
    pub(super) node: String,
    pub(super) summary: String,
    pub(super) address: String,
    pub(super) serves_store: bool,
    pub(super) timeout: Duration,
    pub(super) lease: Duration,
    pub(super) log: Log,
    /// `None` after leaving.
    pub(super) store: Mutex<Option<Arc<dyn Store>>>,
    pub(super) own: Mutex<Own>,
    pub(super) roster: Mutex<Roster>,
    /// Notified when the roster changes and when the group is left.
    pub(super) changed: Arc<Condvar>,
    pub(super) control: Mutex<Option<Error>>,
    /// What the process's page shows of this membership.
    pub(super) page_row: PageRow,
}

/// The keys of this process in the store.
pub(super) struct Own {
    /// `None` after leaving.
    pub(super) lease: Option<Box<dyn Lease>>,
    pub(super) row: Row,
    pub(super) published: BTreeMap<String, Vec<u8>>,
    pub(super) barriers: HashMap<(String, Vec<u32>), BarrierProgress>,
}

/// This process's progress through the rounds of one barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BarrierProgress {
    /// Hash of name, ranks and their incarnations: a rank that re-registers starts over, together with all others.
    pub(super) barrier: u64,
    /// The current or next round, counted from 0.
    pub(super) count: u64,
    /// Whether this process's arrival has been published.
    pub(super) arrived: bool,
}

impl Own {
    /// Barriers with the number of rounds that this process has completed, up to the limit of a note.
    pub(super) fn completed_barriers(&self) -> Vec<(u64, u64)> {
        let met = self.barriers.values().filter(|progress| progress.count > 0);
        met.map(|progress| (progress.barrier, progress.count)).take(NOTE_MAX).collect()
    }
}

impl GroupState {
    /// Publishes the process's page in answer to a request. A failure affects only the requester.
    pub(super) fn answer(&self) {
        let (key, deadline) = (rank_key(&self.keys.answers(), self.rank), Instant::now() + STEP_TIMEOUT);
        if let Err(error) = self.put("top", &key, &crossrail_sight::summary(), deadline) {
            self.log.info(format_args!("group {:?}: cannot publish the page for `crossrail top`: {error}", self.name));
        }
    }

    pub(super) fn deadline(&self, timeout: Option<Duration>) -> Instant {
        deadline_in(timeout.unwrap_or(self.timeout))
    }

    pub(super) fn store(&self, operation: &str) -> Result<Arc<dyn Store>> {
        self.store.lock().clone().ok_or_else(|| {
            Error::new(ErrorKind::Closed, operation, format!("this process has left the group {:?}", self.name))
        })
    }

    fn lease_id(&self, operation: &str) -> Result<LeaseId> {
        let own = self.own.lock();
        own.lease.as_ref().map(|lease| lease.id()).ok_or_else(|| {
            Error::new(ErrorKind::Closed, operation, format!("this process has left the group {:?}", self.name))
        })
    }

    pub(super) fn publish(&self, key: &str, value: &[u8]) -> Result<()> {
        check_key("publish", key, false)?;
        // Recorded first, since re-registering publishes the recorded values.
        self.own.lock().published.insert(key.to_owned(), value.to_vec());
        let put = self.put("publish", &self.keys.published(key, self.rank), value, self.deadline(None));
        if put.is_err() {
            self.own.lock().published.remove(key);
        }
        put
    }

    pub(super) fn withdraw(&self, key: &str, only: Option<&[u8]>) -> Result<()> {
        check_key("withdraw", key, false)?;
        let store = self.store("withdraw")?;
        let mut own = self.own.lock();
        if only.is_some_and(|only| own.published.get(key).is_none_or(|told| told[..] != *only)) {
            return Ok(());
        }
        own.published.remove(key);
        drop(own);
        self.note_store_errors(store.delete(&self.keys.published(key, self.rank), self.deadline(None))).map(drop)
    }

    /// Writes a key under this process's lease; takes a new lease if it has expired.
    pub(super) fn put(&self, operation: &str, key: &str, value: &[u8], deadline: Instant) -> Result<()> {
        let store = self.store(operation)?;
        match store.put(key, value, Some(self.lease_id(operation)?), deadline) {
            Err(error) if error.kind == ErrorKind::Closed => {
                self.register_again(&*store)?;
                self.note_store_errors(store.put(key, value, Some(self.lease_id(operation)?), deadline)).map(drop)
            }
            result => self.note_store_errors(result).map(drop),
        }
    }

    /// Takes a new lease and rewrites all keys after the lease expired although this process is alive: it was stopped
    /// or cut off, or the store lost its contents.
    pub(super) fn register_again(&self, store: &dyn Store) -> Result<()> {
        let mut own = self.own.lock();
        let Some(old) = &own.lease else { return Ok(()) };
        if old.is_alive() {
            let entry = store.get(&self.key(), Instant::now() + STEP_TIMEOUT)?;
            let row = entry.and_then(|entry| Row::decode(self.rank, &entry.value).ok());
            if row.is_some_and(|row| row.process == own.row.process) {
                return Ok(()); // another thread has done it
            }
        }
        let deadline = Instant::now() + STEP_TIMEOUT;
        let lease = store.grant(self.lease, deadline)?;
        let row = Row { incarnation: random_id()?, ..own.row.clone() };
        if store.compare_and_set(&self.key(), Expected::Absent, &row.encode()?, Some(lease.id()), deadline)?.is_none() {
            let holder = store.get(&self.key(), deadline)?;
            let holder = holder.and_then(|entry| Row::decode(self.rank, &entry.value).ok());
            if let Some(holder) = holder.filter(|holder| holder.process != row.process) {
                let detail = format!("rank {} was given away while this process was cut off", self.rank);
                return Err(Error::new(ErrorKind::Mismatch, "join", detail)
                    .with_peer(rank_name(self.rank, &holder))
                    .with_hint("leave the group; join it again for another rank"));
            }
            store.put(&self.key(), &row.encode()?, Some(lease.id()), deadline)?;
        }
        for (key, value) in &own.published {
            store.put(&self.keys.published(key, self.rank), value, Some(lease.id()), deadline)?;
        }
        own.lease = Some(lease);
        own.row = row.clone();
        self.roster.lock().set_own(row);
        self.changed.notify_all();
        Ok(())
    }

    /// The key of this process's row.
    pub(super) fn key(&self) -> String {
        rank_key(&self.keys.members(), self.rank)
    }

    pub(super) fn state(&self, rank: u32) -> RankState {
        if rank == self.rank {
            let left = self.store.lock().is_none();
            return if left { RankState::Left } else { RankState::Alive };
        }
        self.roster.lock().state(rank)
    }

    /// Wakes every caller that waits for a change, so that an interrupted one ends its wait.
    pub(super) fn waker(&self) -> impl Fn() + Send + Sync + 'static {
        let changed = Arc::clone(&self.changed);
        move || {
            changed.notify_all();
        }
    }

    pub(super) fn wait_change(&self, after: u64, deadline: Instant) -> u64 {
        let _sleeping = interrupt::sleeping(|| self.waker());
        let mut roster = self.roster.lock();
        while roster.changes() <= after && self.store.lock().is_some() {
            if interrupt::raised() || self.changed.wait_until(&mut roster, deadline).timed_out() {
                break;
            }
        }
        roster.changes()
    }

    /// Records a failure to reach the store.
    pub(super) fn note_store_errors<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result {
            self.store_failed(error);
        }
        result
    }

    /// Records that the store is unreachable, and logs it once.
    pub(super) fn store_failed(&self, error: &Error) {
        if matches!(error.kind, ErrorKind::Timeout | ErrorKind::Usage | ErrorKind::Closed)
            || self.store.lock().is_none()
        {
            return;
        }
        let server_left = self.roster.lock().server_is_there() == Some(false);
        let mut control = self.control.lock();
        if control.is_none() {
            let (name, goes_on) =
                (&self.name, "transfers continue; joins, barriers and death notices wait for the store");
            if server_left {
                self.log.info(format_args!("group {name:?}: the store ended with the rank that served it: {error}"));
            } else {
                self.log.warn(format_args!("group {name:?}: {error}; {goes_on}"));
            }
        }
        *control = Some(error.clone());
    }

    /// Records that the store is reachable again.
    pub(super) fn store_recovered(&self) {
        if self.control.lock().take().is_some() {
            self.log.warn(format_args!("group {:?}: the store {} is back", self.name, self.address));
        }
    }
}

/// The deadline `time` from now, capped so that it does not overflow.
pub(super) fn deadline_in(time: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(time).unwrap_or(now + LONGEST)
}

/// A random id.
pub(super) fn random_id() -> Result<u64> {
    getrandom::u64().map_err(|error| Error::new(ErrorKind::Io, "join", format!("getrandom: {error}")))
}
