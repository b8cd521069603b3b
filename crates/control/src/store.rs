//! What a store must offer. Keys are UTF-8 text of at most 512 bytes, values at most 64 KiB.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use crossrail_types::{Error, ErrorKind, Result};

/// Numbers the changes of a store: each change has a greater one than those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(pub u64);

/// Names a lease within its store.
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

/// What a key must be like for a compare-and-set to take place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// It does not exist.
    Absent,
    /// It was last written by this change.
    At(Revision),
}

/// One change that a watch saw.
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

/// A lease that is renewed in the background while this object lives; keys written under it vanish when it ends.
/// Dropping it revokes it, as well as can be without waiting for an answer for long.
pub trait Lease: Send + Sync + Debug {
    /// To write keys under it.
    fn id(&self) -> LeaseId;

    /// How long it outlives its last renewal.
    fn ttl(&self) -> Duration;

    /// Whether it was renewed in time so far, as far as is known. Once false it stays false: its keys may be gone.
    fn is_alive(&self) -> bool;

    /// Ends it now; its keys vanish.
    ///
    /// # Errors
    /// As every call of a store; the lease then ends by itself after its time.
    fn revoke(&self, deadline: Instant) -> Result<()>;
}

/// Changes below a prefix, in order and without a gap.
pub trait Watch: Send {
    /// The next changes; waits for the first one until `deadline`.
    ///
    /// # Errors
    /// `Timeout` when nothing changed. `Unreachable` when the store is gone: open a new watch after a new `list`.
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

/// A key-value store that the processes of a job share. Any thread; each call ends by its deadline.
///
/// # Errors
/// Every call: `Unreachable` when the store cannot be reached (the text names its address; the next call tries to
/// reach it again), `Timeout` past the deadline, `Usage` for keys and values that are too long, `Exhausted` when the
/// store is full, `Refused` for a wrong secret.
pub trait Store: Send + Sync + Debug {
    /// As `CROSSRAIL_STORE` has it: `tcp://10.0.0.1:7400`, `etcd://10.0.0.1:2379`.
    fn address(&self) -> String;

    /// Writes a key, under a lease if one is given. Also `Closed` when there is no such lease any more.
    fn put(&self, key: &str, value: &[u8], lease: Option<LeaseId>, deadline: Instant) -> Result<Revision>;

    /// Reads a key.
    fn get(&self, key: &str, deadline: Instant) -> Result<Option<Entry>>;

    /// All keys that begin with `prefix`, by key, and the store's revision at that moment (to watch from).
    fn list(&self, prefix: &str, deadline: Instant) -> Result<(Vec<Entry>, Revision)>;

    /// Deletes a key; whether it was there.
    fn delete(&self, key: &str, deadline: Instant) -> Result<bool>;

    /// Deletes all keys that begin with `prefix`; how many there were.
    fn delete_prefix(&self, prefix: &str, deadline: Instant) -> Result<u64>;

    /// Writes the key if it is as expected; `None`: it is not.
    fn compare_and_set(
        &self,
        key: &str,
        expected: Expected,
        value: &[u8],
        lease: Option<LeaseId>,
        deadline: Instant,
    ) -> Result<Option<Revision>>;

    /// Waits until all of `keys` exist; their entries in the order asked for. The source of its `Timeout` is
    /// [`MissingKeys`].
    fn wait(&self, keys: &[String], deadline: Instant) -> Result<Vec<Entry>>;

    /// A new lease. The store may lengthen `ttl` ([`Lease::ttl`] tells).
    fn grant(&self, ttl: Duration, deadline: Instant) -> Result<Box<dyn Lease>>;

    /// Changes below `prefix` after the revision `after`.
    fn watch(&self, prefix: &str, after: Revision, deadline: Instant) -> Result<Box<dyn Watch>>;
}
