//! Collects the pages of all processes of a job through their store.

use std::time::{Duration, Instant};

use crossrail_types::{Result, Settings};

use crate::keys::Keys;
use crate::membership::{Row, key_rank};
use crate::{Entry, Revision, Store};

/// How often to check for answers.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// One group of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobGroup {
    /// Its name.
    pub name: String,
    /// How many ranks it is meant to have.
    pub size: u32,
    /// The present members in order of ranks.
    pub ranks: Vec<JobRank>,
}

/// One member of such a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobRank {
    /// Its rank.
    pub rank: u32,
    /// Its process, as `host:pid`.
    pub process: String,
    /// What its page shows, for `crossrail_sight::parse`; empty: it keeps none. `None`: it did not answer in time.
    pub page: Option<Vec<u8>>,
}

/// Asks the members of the groups called `name` (`None`: of all groups) in the store at `address` for their pages, and
/// waits for `patience` at most until all have answered.
///
/// # Errors
/// As [`crate::open`] and every call of a store.
pub fn job(address: &str, settings: &Settings, name: Option<&str>, patience: Duration) -> Result<Vec<JobGroup>> {
    let deadline = Instant::now() + settings.timeout;
    let store = crate::open(address, settings, deadline)?;
    let (entries, _) = store.list("crossrail/", deadline)?;
    let mut groups: Vec<(Keys, JobGroup)> = Vec::new();
    for entry in &entries {
        let Some((keys, of)) = Keys::of_member(&entry.key) else { continue };
        let Some(rank) = key_rank(&entry.key).filter(|_| name.is_none_or(|name| name == of)) else { continue };
        let Ok(row) = Row::decode(rank, &entry.value) else { continue };
        if row.left.is_some() {
            continue;
        }
        let member = JobRank { rank, process: row.process.name(), page: None };
        // Entries come in the order of their keys, so those of a group are adjacent.
        match groups.last_mut().filter(|(known, _)| known.members() == keys.members()) {
            Some((_, group)) => group.ranks.push(member),
            None => groups.push((keys, JobGroup { name: of, size: row.size, ranks: vec![member] })),
        }
    }
    let asked: Vec<Revision> =
        groups.iter().map(|(keys, _)| store.put(&keys.asked(), &[], None, deadline)).collect::<Result<_>>()?;
    let until = Instant::now() + patience;
    for ((keys, group), asked) in groups.iter_mut().zip(asked) {
        collect(&*store, keys, group, asked, until, deadline)?;
    }
    for (keys, _) in &groups {
        store.delete(&keys.asked(), deadline)?;
    }
    Ok(groups.into_iter().map(|(_, group)| group).collect())
}

/// Collects the answers that were written after `asked`.
fn collect(
    store: &dyn Store,
    keys: &Keys,
    group: &mut JobGroup,
    asked: Revision,
    until: Instant,
    deadline: Instant,
) -> Result<()> {
    loop {
        let (answers, _) = store.list(&keys.answers(), deadline)?;
        let fresh = |answer: &&Entry| answer.revision > asked;
        for answer in answers.iter().filter(fresh) {
            let rank = group.ranks.iter_mut().find(|rank| key_rank(&answer.key) == Some(rank.rank));
            rank.into_iter().for_each(|rank| rank.page = Some(answer.value.clone()));
        }
        if group.ranks.iter().all(|rank| rank.page.is_some()) || Instant::now() >= until {
            return Ok(());
        }
        // No event reports that all answers are there.
        std::thread::sleep(POLL_INTERVAL);
    }
}
