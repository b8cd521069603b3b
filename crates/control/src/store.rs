//! The interface of a store. Keys are UTF-8 text of at most 512 bytes, values have at most 64 KiB.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use crossrail_types::{Error, ErrorKind, Result};

/// Sequence number of a change in a store, strictly increasing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(pub u64);

/// Id of a lease within its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LeaseId(pub i64);

/// One key with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// Its value.
    pub value: Vec<u8>,
    /// The change that wrote it.
    pub revision: Revision,
}

/// The precondition of a compare-and-set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// It does not exist.
    Absent,
    /// It was last written by this change.
    At(Revision),
}

/// One change reported by a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Written.
    Put(Entry),
    /// Deleted, or its lease ended.
    Gone {
        /// The key.
        key: String,
        /// The change that removed it.
        revision: Revision,
    },
}

/// A lease that is renewed in the background while this object lives; keys written under it vanish when it expires.
/// Dropping it revokes it, with a short bound on the wait for the store's answer.
pub trait Lease: Send + Sync + Debug {
    /// Its id, for writing keys under it.
    fn id(&self) -> LeaseId;

    /// How long it lives after its last renewal.
    fn ttl(&self) -> Duration;

    /// False once it was revoked, the store has answered that it ended, or the store could not be reached for its
    /// lifetime; it stays false. Answers that are late do not end it: the store decides which renewals were in time.
    fn is_alive(&self) -> bool;

    /// Revokes it now; its keys vanish.
    ///
    /// # Errors
    /// As every call of a store; the lease then expires.
    fn revoke(&self, deadline: Instant) -> Result<()>;
}

/// The changes below a prefix, in order and without gaps.
pub trait Watch: Send {
    /// The next changes; waits for the first one until `deadline`.
    ///
    /// # Errors
    /// `Timeout` if nothing changed. `Unreachable` if the store is lost: `list` again and open a new watch from there.
    fn next(&mut self, deadline: Instant) -> Result<Vec<Event>>;
}

/// The keys that a [`Store::wait`] still missed at its deadline: the source of its `Timeout`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingKeys(pub Vec<String>);

impl std::fmt::Display for MissingKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "missing: {}", self.0.join(", "))
    }
}

impl std::error::Error for MissingKeys {}

impl MissingKeys {
    /// The missing keys of a failed wait; none, if it failed otherwise.
    pub fn of(error: &Error) -> &[String] {
        let source = std::error::Error::source(error).and_then(|source| source.downcast_ref::<MissingKeys>());
        source.map_or(&[], |missing| &missing.0)
    }

    /// The `Timeout` of a wait that missed these keys.
    pub(crate) fn timeout(self, operation: &str) -> Error {
        Error::new(ErrorKind::Timeout, operation, self.0.join(", ")).with_source(self)
    }
}

/// A key-value store shared by the processes of a job. Usable from any thread; every call ends by its deadline.
///
/// # Errors
/// Every call: `Unreachable` if the store cannot be reached (the next call tries again), `Timeout` past the deadline,
/// `Usage` for keys and values that are too long, `Exhausted` if the store is full, `Refused` for a wrong secret.
pub trait Store: Send + Sync + Debug {
    /// Its address, in the form of `CROSSRAIL_STORE`: `tcp://10.0.0.1:7400`, `etcd://10.0.0.1:2379`.
    fn address(&self) -> String;

    /// Writes a key, under a lease if given. Also fails with `Closed` if the lease no longer exists.
    fn put(&self, key: &str, value: &[u8], lease: Option<LeaseId>, deadline: Instant) -> Result<Revision>;

    /// Reads a key.
    fn get(&self, key: &str, deadline: Instant) -> Result<Option<Entry>>;

    /// All entries whose keys begin with `prefix`, ordered by key, and the store's revision, to watch from.
    fn list(&self, prefix: &str, deadline: Instant) -> Result<(Vec<Entry>, Revision)>;

    /// Deletes a key; returns whether it existed.
    fn delete(&self, key: &str, deadline: Instant) -> Result<bool>;

    /// Deletes all keys that begin with `prefix`; returns their number.
    fn delete_prefix(&self, prefix: &str, deadline: Instant) -> Result<u64>;

    /// Writes the key if the precondition holds; `None` if it does not.
    fn compare_and_set(
        &self,
        key: &str,
        expected: Expected,
        value: &[u8],
        lease: Option<LeaseId>,
        deadline: Instant,
    ) -> Result<Option<Revision>>;

    /// Waits until all of `keys` exist; returns their entries in the order of `keys`. The source of its `Timeout` is
    /// [`MissingKeys`].
    fn wait(&self, keys: &[String], deadline: Instant) -> Result<Vec<Entry>>;

    /// Grants a lease. The store may lengthen `ttl`; see [`Lease::ttl`].
    fn grant(&self, ttl: Duration, deadline: Instant) -> Result<Box<dyn Lease>>;

    /// Watches the changes below `prefix` after the revision `after`.
    fn watch(&self, prefix: &str, after: Revision, deadline: Instant) -> Result<Box<dyn Watch>>;
}
