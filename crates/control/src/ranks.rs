//! Rank assignment: a rank is a key that its process claims by compare-and-set under its lease, so that the rank is
//! free again once the process leaves or dies.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crossrail_types::{Error, ErrorKind, Result};

use crate::keys::Keys;
use crate::membership::{Row, key_rank, rank_key, rank_name};
use crate::{Entry, Event, Expected, LeaseId, Revision, Store};

/// How long after its expiry a lease may still exist, because of the store's own delays.
const MARGIN: Duration = Duration::from_millis(500);

/// Claims ranks for one process.
pub(crate) struct Claims<'a> {
    pub(crate) store: &'a dyn Store,
    pub(crate) keys: &'a Keys,
    pub(crate) lease: LeaseId,
    pub(crate) deadline: Instant,
}

impl Claims<'_> {
    /// Claims this rank. Waits for the lease of a previous holder that may be dead.
    ///
    /// # Errors
    /// `Mismatch` naming the process that holds it.
    pub(crate) fn exactly(&self, rank: u32, row: &Row) -> Result<()> {
        let key = rank_key(&self.keys.members(), rank);
        loop {
            if self.take(&key, &row.encode()?)? {
                return Ok(());
            }
            let Some(entry) = self.store.get(&key, self.deadline)? else { continue };
            let holder = Row::decode(rank, &entry.value)?;
            let alive = holder.left.is_none() && holder.process.runs() == Some(true);
            if alive || !self.vanishes(&key, entry.revision, holder.ttl() + MARGIN)? {
                let whose = if holder.process == row.process { "this process itself" } else { "another process" };
                return Err(Error::new(ErrorKind::Mismatch, "join", format!("rank {rank} is taken by {whose}"))
                    .with_peer(rank_name(rank, &holder))
                    .with_hint("each rank joins a group once; two jobs on one store need groups of different names"));
            }
        }
    }

    /// Claims the lowest free rank below `size`. If all are taken, waits for one whose process may be dead.
    ///
    /// # Errors
    /// `Exhausted`: all ranks are taken.
    pub(crate) fn lowest(&self, size: u32, row: &Row) -> Result<u32> {
        let members = self.keys.members();
        let value = row.encode()?;
        loop {
            let (entries, revision) = self.store.list(&members, self.deadline)?;
            let taken: BTreeSet<u32> = entries.iter().filter_map(|entry| key_rank(&entry.key)).collect();
            for rank in (0..size).filter(|rank| !taken.contains(rank)) {
                if self.take(&rank_key(&members, rank), &value)? {
                    return Ok(rank);
                }
            }
            let longest = rows(&entries).map(|row| row.ttl()).max().unwrap_or_default();
            if !self.vanishes(&members, revision, longest + MARGIN)? {
                return Err(Error::new(ErrorKind::Exhausted, "join", format!("all {size} ranks are taken"))
                    .with_hint("a rank is free again when its process leaves, or one lease after it died"));
            }
        }
    }

    /// Claims the lowest free local rank of `node`; `entries` are the current members'.
    pub(crate) fn local(&self, node: &str, entries: &[Entry]) -> Result<u32> {
        let taken: BTreeSet<u32> = rows(entries).filter(|row| row.node == node).map(|row| row.local_rank).collect();
        let prefix = self.keys.locals(node);
        for local in (0..u32::MAX).filter(|local| !taken.contains(local)) {
            if self.take(&rank_key(&prefix, local), &[])? {
                return Ok(local);
            }
        }
        Err(Error::new(ErrorKind::Exhausted, "join", "no local rank is free"))
    }

    fn take(&self, key: &str, value: &[u8]) -> Result<bool> {
        let written = self.store.compare_and_set(key, Expected::Absent, value, Some(self.lease), self.deadline)?;
        Ok(written.is_some())
    }

    /// Whether a key below `prefix` vanishes within `limit`.
    pub(crate) fn vanishes(&self, prefix: &str, after: Revision, limit: Duration) -> Result<bool> {
        let until = self.deadline.min(Instant::now() + limit);
        let mut watch = self.store.watch(prefix, after, self.deadline)?;
        loop {
            match watch.next(until) {
                Ok(events) if events.iter().any(|event| matches!(event, Event::Gone { .. })) => return Ok(true),
                Ok(_) => {}
                Err(error) if error.kind == ErrorKind::Timeout => return Ok(false),
                Err(error) => return Err(error),
            }
        }
    }
}

/// The members' rows, without those that cannot be read.
fn rows(entries: &[Entry]) -> impl Iterator<Item = Row> {
    entries.iter().filter_map(|entry| Row::decode(key_rank(&entry.key)?, &entry.value).ok())
}
