use crossrail_types::{Error, ErrorKind, Result};

use crate::bootstrap::hash;
use crate::membership::rank_key;

const NAME_MAX: usize = 64;
const KEY_MAX: usize = 200;
/// How many barriers' keys are deleted at once.
pub(crate) const EPOCH: u64 = 16;

/// Where a group keeps what in the store.
#[derive(Clone, Debug)]
pub(crate) struct Keys {
    prefix: String,
}

impl Keys {
    /// Of the group `name` of a job; an empty `job` is one for all.
    pub(crate) fn new(name: &str, job: &str) -> Result<Keys> {
        let fits = (1..=NAME_MAX).contains(&name.len());
        if !fits || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte)) {
            return Err(Error::new(ErrorKind::Usage, "join", format!("{name:?} is not a group's name"))
                .with_hint(format!("letters, digits, '.', '_' and '-'; at most {NAME_MAX}")));
        }
        let job = if job.is_empty() { String::new() } else { format!("@{:016x}", hash(job.as_bytes())) };
        Ok(Keys { prefix: format!("crossrail/{name}{job}/") })
    }

    /// Members: one key for each rank.
    pub(crate) fn members(&self) -> String {
        format!("{}member/", self.prefix)
    }

    /// Local ranks of a node.
    pub(crate) fn locals(&self, node: &str) -> String {
        format!("{}local/{:016x}/", self.prefix, hash(node.as_bytes()))
    }

    /// What `rank` tells under `key`.
    pub(crate) fn published(&self, key: &str, rank: u32) -> String {
        rank_key(&format!("{}told/{key}/", self.prefix), rank)
    }

    /// That `rank` came to the `count`-th meeting of a barrier.
    pub(crate) fn arrival(&self, barrier: u64, rank: u32, count: u64) -> String {
        format!("{}{:02}", self.arrivals_in_epoch(barrier, rank, count / EPOCH), count % EPOCH)
    }

    /// Those of the `epoch`-th `EPOCH` meetings.
    pub(crate) fn arrivals_in_epoch(&self, barrier: u64, rank: u32, epoch: u64) -> String {
        format!("{}{epoch}/", self.arrivals_at(barrier, rank))
    }

    /// All those of one barrier.
    pub(crate) fn arrivals_at(&self, barrier: u64, rank: u32) -> String {
        format!("{}came/{barrier:016x}/{rank}/", self.prefix)
    }
}

/// A key or a barrier's name as the caller gives it.
pub(crate) fn check_key(operation: &str, key: &str, may_be_empty: bool) -> Result<()> {
    let fits = key.len() <= KEY_MAX && (may_be_empty || !key.is_empty());
    if fits && !key.chars().any(char::is_control) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Usage, operation, format!("{key:?} is not a key"))
        .with_hint(format!("text of 1 to {KEY_MAX} bytes without control characters")))
}
