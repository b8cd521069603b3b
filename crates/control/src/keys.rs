use crossrail_types::{Error, ErrorKind, Result};

use crate::bootstrap::hash;
use crate::membership::rank_key;

const NAME_MAX: usize = 64;
const KEY_MAX: usize = 200;
/// Rounds of a barrier whose keys are deleted together.
pub(crate) const EPOCH: u64 = 16;

/// The keys of a group in the store.
#[derive(Clone, Debug)]
pub(crate) struct Keys {
    prefix: String,
}

impl Keys {
    /// The keys of the group `name` in `job`; jobs with an empty name share their groups.
    pub(crate) fn new(name: &str, job: &str) -> Result<Keys> {
        let fits = (1..=NAME_MAX).contains(&name.len());
        if !fits || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte)) {
            return Err(Error::new(ErrorKind::Usage, "join", format!("{name:?} is not a group's name"))
                .with_hint(format!("letters, digits, '.', '_' and '-'; at most {NAME_MAX}")));
        }
        let job = if job.is_empty() { String::new() } else { format!("@{:016x}", hash(job.as_bytes())) };
        Ok(Keys { prefix: format!("crossrail/{name}{job}/") })
    }

    /// The keys of the group that one of whose members has this key, and its name; `None`: it is no member's.
    pub(crate) fn of_member(key: &str) -> Option<(Keys, String)> {
        let (prefix, _) = key.split_once("/member/")?;
        let name = prefix.strip_prefix("crossrail/")?;
        let name = name.split_once('@').map_or(name, |(name, _)| name).to_owned();
        Some((Keys { prefix: format!("{prefix}/") }, name))
    }

    /// Prefix of the members: one key per rank.
    pub(crate) fn members(&self) -> String {
        format!("{}member/", self.prefix)
    }

    /// Written to request that members publish their processes' pages.
    pub(crate) fn asked(&self) -> String {
        format!("{}member-asked", self.prefix)
    }

    /// Prefix of all that the members watch: each other, and [`Keys::asked`].
    pub(crate) fn watched(&self) -> String {
        format!("{}member", self.prefix)
    }

    /// Prefix of the members' answers.
    pub(crate) fn answers(&self) -> String {
        format!("{}sight/", self.prefix)
    }

    /// Prefix of the local ranks of a node.
    pub(crate) fn locals(&self, node: &str) -> String {
        format!("{}local/{:016x}/", self.prefix, hash(node.as_bytes()))
    }

    /// The value that `rank` publishes under `key`.
    pub(crate) fn published(&self, key: &str, rank: u32) -> String {
        rank_key(&format!("{}told/{key}/", self.prefix), rank)
    }

    /// The arrival of `rank` at round `count` of a barrier.
    pub(crate) fn arrival(&self, barrier: u64, rank: u32, count: u64) -> String {
        format!("{}{:02}", self.arrivals_in_epoch(barrier, rank, count / EPOCH), count % EPOCH)
    }

    /// Prefix of the arrivals in the rounds of one epoch.
    pub(crate) fn arrivals_in_epoch(&self, barrier: u64, rank: u32, epoch: u64) -> String {
        format!("{}{epoch}/", self.arrivals_at(barrier, rank))
    }

    /// Prefix of the arrivals at one barrier.
    pub(crate) fn arrivals_at(&self, barrier: u64, rank: u32) -> String {
        format!("{}came/{barrier:016x}/{rank}/", self.prefix)
    }
}

/// Checks a key or a barrier's name given by the caller.
pub(crate) fn check_key(operation: &str, key: &str, may_be_empty: bool) -> Result<()> {
    let fits = key.len() <= KEY_MAX && (may_be_empty || !key.is_empty());
    if fits && !key.chars().any(char::is_control) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Usage, operation, format!("{key:?} is not a key"))
        .with_hint(format!("text of 1 to {KEY_MAX} bytes without control characters")))
}
