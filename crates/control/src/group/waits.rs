use std::time::{Duration, Instant};

use crossrail_types::{Error, ErrorKind, Reason, Result, interrupt};

use super::state::{BarrierProgress, GroupState, STEP_TIMEOUT};
use crate::RankState;
use crate::bootstrap::hash;
use crate::keys::{EPOCH, check_key};
use crate::membership::{Roster, Search};
use crate::{Entry, MissingKeys};

/// How often a wait for keys checks whether a rank has died, or has left after completing the round: first and longest
/// interval.
const CHECK_INTERVALS: (Duration, Duration) = (Duration::from_millis(4), Duration::from_millis(50));
/// The longest interval for each of the keys, if that is more: every check sends all of them.
const CHECK_INTERVAL_PER_KEY: Duration = Duration::from_micros(500);
/// Interval between two updates of the missing ranks on the process's page.
const SHOWN_EVERY: Duration = Duration::from_millis(10);
/// Most missing ranks listed in an error.
const NAMED_MAX: usize = 8;

/// What a wait is for, for its errors.
struct Purpose<'a> {
    operation: &'a str,
    name: &'a str,
    began: Instant,
}

/// One key per rank, with the ranks' incarnations.
struct Wanted<'a> {
    keys: &'a [String],
    ranks: &'a [u32],
    incarnations: &'a [u64],
}

impl GroupState {
    pub(super) fn collect(&self, key: &str, ranks: &[u32], timeout: Option<Duration>) -> Result<Vec<Vec<u8>>> {
        check_key("collect", key, false)?;
        self.check_ranks("collect", ranks)?;
        let purpose = Purpose { operation: "collect", name: key, began: Instant::now() };
        let keys: Vec<String> = ranks.iter().map(|rank| self.keys.published(key, *rank)).collect();
        let deadline = self.deadline(timeout);
        loop {
            let here = |roster: &Roster| check_not_lost(&purpose, roster, ranks);
            let incarnations = self.wait_present(&purpose, ranks, deadline, here, Roster::incarnation)?;
            let wanted = Wanted { keys: &keys, ranks, incarnations: &incarnations };
            if let Some(entries) = self.wait_keys(&purpose, &wanted, deadline, |_, _| false)? {
                return Ok(entries.into_iter().map(|entry| entry.value).collect());
            }
        }
    }

    pub(super) fn barrier(&self, name: &str, ranks: &[u32], timeout: Option<Duration>) -> Result<()> {
        check_key("barrier", name, true)?;
        self.check_ranks("barrier", ranks)?;
        let mut ranks = ranks.to_vec();
        ranks.sort_unstable();
        ranks.dedup();
        if !ranks.contains(&self.rank) {
            let detail = format!("{name:?} is of ranks {ranks:?}, and this is rank {}", self.rank);
            return Err(Error::new(ErrorKind::Usage, "barrier", detail));
        }
        let deadline = self.deadline(timeout);
        let purpose = Purpose { operation: "barrier", name, began: Instant::now() };
        loop {
            // Ranks that have left may have completed this round first.
            let incarnations = self.wait_present(
                &purpose,
                &ranks,
                deadline,
                |roster| check_alive(&purpose, roster, &ranks),
                Roster::last,
            )?;
            if ranks.len() == 1 {
                return Ok(());
            }
            let progress = self.arrive(name, &ranks, &incarnations, deadline.max(Instant::now() + STEP_TIMEOUT))?;
            let keys: Vec<String> =
                ranks.iter().map(|rank| self.keys.arrival(progress.barrier, *rank, progress.count)).collect();
            let wanted = Wanted { keys: &keys, ranks: &ranks, incarnations: &incarnations };
            let gone_on = |roster: &Roster, rank| roster.left_after(rank, progress.barrier, progress.count);
            if self.wait_keys(&purpose, &wanted, deadline, gone_on)?.is_some() {
                self.completed(name, ranks, progress);
                return Ok(());
            }
        }
    }

    pub(super) fn wait_members(&self, ranks: &[u32], timeout: Option<Duration>) -> Result<()> {
        self.check_ranks("wait_members", ranks)?;
        let purpose = Purpose { operation: "wait_members", name: &self.name, began: Instant::now() };
        self.wait_present(&purpose, ranks, self.deadline(timeout), |_| Ok(()), Roster::incarnation).map(drop)
    }

    /// The incarnations of all `ranks`, once `known` has them; fails when `check` does.
    fn wait_present(
        &self,
        purpose: &Purpose<'_>,
        ranks: &[u32],
        deadline: Instant,
        check: impl Fn(&Roster) -> Result<()>,
        known: impl Fn(&Roster, u32) -> Option<u64>,
    ) -> Result<Vec<u64>> {
        let _sleeping = interrupt::sleeping(|| self.waker());
        let mut waiting = self.page_row.waiting(purpose.operation, purpose.began);
        let mut search = Search::new(ranks);
        let mut shown: Option<Instant> = None;
        let mut roster = self.roster.lock();
        let missing = |roster: &Roster| -> Vec<u32> {
            ranks.iter().copied().filter(|rank| known(roster, *rank).is_none()).collect()
        };
        loop {
            self.store(purpose.operation)?;
            check(&roster)?;
            if let Some(there) = search.all(|rank| known(&roster, rank)) {
                return Ok(there);
            }
            // Not at each of many changes: it looks at all ranks.
            let due = shown.map_or_else(Instant::now, |at| at + SHOWN_EVERY);
            let is_due = Instant::now() >= due;
            if is_due {
                waiting.show(&missing(&roster));
                shown = Some(Instant::now());
            }
            let until = if is_due { deadline } else { deadline.min(due) };
            let over = self.changed.wait_until(&mut roster, until).timed_out() && Instant::now() >= deadline;
            if interrupt::raised() || over {
                return Err(timed_out(purpose, &roster, &missing(&roster)));
            }
        }
    }

    /// Publishes this process's arrival at the next round, unless it is published.
    fn arrive(&self, name: &str, ranks: &[u32], incarnations: &[u64], deadline: Instant) -> Result<BarrierProgress> {
        let barrier = barrier_id(name, ranks, incarnations);
        let place = (name.to_owned(), ranks.to_vec());
        let known = self.own.lock().barriers.get(&place).copied();
        let mut progress = match known {
            Some(progress) if progress.barrier == barrier => progress,
            _ => BarrierProgress { barrier, count: 0, arrived: false },
        };
        let old =
            known.filter(|known| known.barrier != barrier).map(|known| self.keys.arrivals_at(known.barrier, self.rank));
        // A rank that arrives at this round has seen all others in the previous one, so all have left the rounds before
        // it.
        let before = (progress.count % EPOCH == 1 && progress.count > EPOCH && !progress.arrived)
            .then(|| self.keys.arrivals_in_epoch(barrier, self.rank, progress.count / EPOCH - 1));
        if !progress.arrived {
            self.put("barrier", &self.keys.arrival(barrier, self.rank, progress.count), &[], deadline)?;
            progress.arrived = true;
        }
        self.own.lock().barriers.insert(place, progress);
        for prefix in old.into_iter().chain(before) {
            self.note_store_errors(self.store("barrier")?.delete_prefix(&prefix, deadline))?;
        }
        Ok(progress)
    }

    fn completed(&self, name: &str, ranks: Vec<u32>, progress: BarrierProgress) {
        self.page_row.count_barrier();
        let next = BarrierProgress { count: progress.count + 1, arrived: false, ..progress };
        if let Some(known) = self.own.lock().barriers.get_mut(&(name.to_owned(), ranks))
            && *known == progress
        {
            *known = next;
        }
    }

    /// Waits until all wanted keys are in the store, except those of `excused` ranks; `None` if a rank has
    /// re-registered meanwhile.
    fn wait_keys(
        &self,
        purpose: &Purpose<'_>,
        wanted: &Wanted<'_>,
        deadline: Instant,
        excused: impl Fn(&Roster, u32) -> bool,
    ) -> Result<Option<Vec<Entry>>> {
        let mut look = CHECK_INTERVALS.0;
        let mut waiting = self.page_row.waiting(purpose.operation, purpose.began);
        loop {
            let store = self.store(purpose.operation)?;
            let mut keys = Vec::with_capacity(wanted.keys.len());
            let mut ranks = Vec::with_capacity(wanted.keys.len());
            {
                let roster = self.roster.lock();
                for ((key, rank), known) in wanted.keys.iter().zip(wanted.ranks).zip(wanted.incarnations) {
                    if excused(&roster, *rank) {
                        continue;
                    }
                    check_not_lost(purpose, &roster, &[*rank])?;
                    if roster.incarnation(*rank) != Some(*known) {
                        return Ok(None);
                    }
                    keys.push(key.clone());
                    ranks.push(*rank);
                }
            }
            match store.wait(&keys, deadline.min(Instant::now() + look)) {
                Ok(entries) => return Ok(Some(entries)),
                Err(error) if error.kind == ErrorKind::Timeout => {
                    let missing = missing_of(&keys, &ranks, &error);
                    waiting.show(&missing);
                    if Instant::now() >= deadline || interrupt::raised() {
                        return Err(timed_out(purpose, &self.roster.lock(), &missing));
                    }
                    let longest = CHECK_INTERVALS.1.max(CHECK_INTERVAL_PER_KEY * keys.len() as u32);
                    look = longest.min(look * 2);
                }
                Err(error) => return self.note_store_errors(Err(error)),
            }
        }
    }

    fn check_ranks(&self, operation: &str, ranks: &[u32]) -> Result<()> {
        match ranks.iter().find(|rank| **rank >= self.size) {
            Some(rank) => {
                Err(Error::new(ErrorKind::Usage, operation, format!("rank {rank} of a group of {}", self.size))
                    .with_hint(format!("ranks go from 0 to {}", self.size - 1)))
            }
            None => Ok(()),
        }
    }
}

/// Identifies a barrier: equal at all ranks that wait for each other.
fn barrier_id(name: &str, ranks: &[u32], incarnations: &[u64]) -> u64 {
    let mut bytes = name.as_bytes().to_vec();
    bytes.push(0);
    for (rank, incarnation) in ranks.iter().zip(incarnations) {
        bytes.extend_from_slice(&rank.to_le_bytes());
        bytes.extend_from_slice(&incarnation.to_le_bytes());
    }
    hash(&bytes)
}

/// The ranks whose keys a store's `Timeout` lists; all, if it lists none.
fn missing_of(keys: &[String], ranks: &[u32], timeout: &Error) -> Vec<u32> {
    let listed = MissingKeys::of(timeout);
    let missing: Vec<u32> =
        keys.iter().zip(ranks).filter(|(key, _)| listed.contains(key)).map(|(_, rank)| *rank).collect();
    if missing.is_empty() { ranks.to_vec() } else { missing }
}

fn check_alive(purpose: &Purpose<'_>, roster: &Roster, ranks: &[u32]) -> Result<()> {
    match ranks.iter().find(|rank| matches!(roster.state(**rank), RankState::Dead(_))) {
        Some(rank) => check_not_lost(purpose, roster, &[*rank]),
        None => Ok(()),
    }
}

fn check_not_lost(purpose: &Purpose<'_>, roster: &Roster, ranks: &[u32]) -> Result<()> {
    match roster.lost_of(ranks) {
        Some((rank, name, what)) => {
            let detail = format!("{:?}: {name} {what}", purpose.name);
            let reason = match roster.state(rank) {
                RankState::Left => Reason::Closed,
                _ => Reason::ProcessEnded,
            };
            Err(Error::new(ErrorKind::PeerDead, purpose.operation, detail)
                .with_reason(reason)
                .with_peer(name)
                .with_hint("continue without it, or wait for its successor"))
        }
        None => Ok(()),
    }
}

fn timed_out(purpose: &Purpose<'_>, roster: &Roster, missing: &[u32]) -> Error {
    let name = |rank: &u32| match roster.state(*rank) {
        RankState::Absent => format!("rank {rank} (never joined)"),
        RankState::Alive => roster.name(*rank),
        RankState::Dead(_) => format!("{} (died)", roster.name(*rank)),
        RankState::Left => format!("{} (left)", roster.name(*rank)),
    };
    let mut names: Vec<String> = missing.iter().take(NAMED_MAX).map(name).collect();
    if missing.len() > NAMED_MAX {
        names.push(format!("{} more", missing.len() - NAMED_MAX));
    }
    let detail = format!("{:?}: {} did not arrive in time", purpose.name, names.join(", "));
    let error = Error::new(ErrorKind::Timeout, purpose.operation, detail).with_waited(purpose.began.elapsed());
    match missing {
        [one] => error.with_peer(roster.name(*one)),
        _ => error,
    }
}
