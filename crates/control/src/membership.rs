//! Membership of a group: the row that each member writes, and the states that the others derive from the rows. No I/O;
//! time is an input.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant, SystemTime};

use crossrail_types::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::{Entry, Event};

/// Version of the encoding of [`Row`].
const VERSION: u8 = 1;

/// One member of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its rank.
    pub rank: u32,
    /// Its index on its node.
    pub local_rank: u32,
    /// Its node's name; members with equal names share memory.
    pub node: String,
    /// Its process, as `host:pid`.
    pub process: String,
}

/// The state of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RankState {
    /// It has not joined yet.
    Absent,
    /// It is a member.
    Alive,
    /// It ended without leaving: why, and when that was detected.
    Dead(String),
    /// It left.
    Left,
}

/// A member's row, written under its lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Row {
    /// Random, new at each registration.
    pub(crate) incarnation: u64,
    pub(crate) size: u32,
    pub(crate) local_rank: u32,
    pub(crate) node: String,
    pub(crate) process: Process,
    pub(crate) ttl_ms: u64,
    /// Whether the store runs in this process.
    pub(crate) serves_store: bool,
    /// Set when it is about to leave.
    pub(crate) left: Option<Leaving>,
}

/// A member's departure note.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Leaving {
    /// Why it leaves, unless it leaves normally.
    pub(crate) why: String,
    /// Barriers with the number of rounds it has completed: others may still be in the last one.
    pub(crate) met: Vec<(u64, u64)>,
}

/// Identifies a process, so that others on the same machine can check whether it is alive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Process {
    pub(crate) host: String,
    pub(crate) pid: u32,
    /// Its start time in kernel ticks, since process ids are reused.
    pub(crate) began: u64,
    /// The machine's boot id and the process-id namespace of `pid`.
    pub(crate) space: String,
}

impl Process {
    /// This process.
    pub(crate) fn this() -> Process {
        let pid = std::process::id();
        Process { host: text("/proc/sys/kernel/hostname"), pid, began: began(pid).unwrap_or(0), space: space() }
    }

    /// `host:pid`.
    pub(crate) fn name(&self) -> String {
        format!("{}:{}", self.host, self.pid)
    }

    /// Whether it is alive; `None` if this process cannot see it.
    pub(crate) fn runs(&self) -> Option<bool> {
        (!self.space.is_empty() && self.space == space()).then(|| began(self.pid) == Some(self.began))
    }
}

/// The machine and network namespace of this process: processes with equal names reach each other's Unix sockets and
/// share memory.
pub(crate) fn this_node() -> String {
    format!("{}-{}", boot(), namespace("net"))
}

fn space() -> String {
    format!("{}-{}", boot(), namespace("pid"))
}

fn boot() -> String {
    text("/proc/sys/kernel/random/boot_id")
}

fn text(path: &str) -> String {
    std::fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default()
}

/// The number in `net:[4026531840]`.
fn namespace(kind: &str) -> String {
    let link = std::fs::read_link(format!("/proc/self/ns/{kind}")).unwrap_or_default();
    link.to_string_lossy().chars().filter(char::is_ascii_digit).collect()
}

/// The process's start time; `None` if it does not exist, or is a zombie.
fn began(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    // State is field 3, the start is field 22.
    if matches!(state, "Z" | "X") { None } else { fields.nth(18)?.parse().ok() }
}

impl Row {
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        postcard::to_stdvec(&(VERSION, self))
            .map_err(|error| Error::new(ErrorKind::Protocol, "join", format!("a member's entry: {error}")))
    }

    pub(crate) fn decode(rank: u32, bytes: &[u8]) -> Result<Row> {
        let foreign = || {
            Error::new(ErrorKind::Protocol, "join", format!("the entry of rank {rank} in the store cannot be read"))
                .with_hint("do all ranks run the same version of Crossrail?")
        };
        let version = bytes.first().ok_or_else(foreign)?;
        if *version != VERSION {
            return Err(foreign());
        }
        postcard::from_bytes(&bytes[1..]).map_err(|_| foreign())
    }

    pub(crate) fn member(&self, rank: u32) -> Member {
        Member { rank, local_rank: self.local_rank, node: self.node.clone(), process: self.process.name() }
    }

    pub(crate) fn ttl(&self) -> Duration {
        Duration::from_millis(self.ttl_ms)
    }
}

/// `rank 3 (host:77)`.
pub(crate) fn rank_name(rank: u32, row: &Row) -> String {
    format!("rank {rank} ({})", row.process.name())
}

/// The key of a rank below `prefix`; keys sort in rank order.
pub(crate) fn rank_key(prefix: &str, rank: u32) -> String {
    format!("{prefix}{rank:07}")
}

/// The rank at the end of a key.
pub(crate) fn key_rank(key: &str) -> Option<u32> {
    key.rsplit('/').next()?.parse().ok()
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Life {
    Alive,
    /// The store came back without it; it may re-register until then.
    Missing(Instant),
    Dead(String),
    Left,
}

#[derive(Clone, Debug)]
struct Seen {
    row: Row,
    life: Life,
    /// Joined before this process, on another machine: until then the entry may be stale, from a dead job.
    unsure_until: Option<Instant>,
}

/// The ranks of a group as one member sees them.
#[derive(Debug)]
pub(crate) struct Roster {
    own: u32,
    seen: BTreeMap<u32, Seen>,
    changes: u64,
}

impl Roster {
    /// The roster of the members in the store. Members whose processes are known to be dead are left out: their leases
    /// are about to expire.
    pub(crate) fn new(own: u32, entries: &[Entry], now: Instant) -> Roster {
        let mut roster = Roster { own, seen: BTreeMap::new(), changes: 0 };
        for entry in entries {
            roster.put(entry);
        }
        roster.seen.retain(|_, seen| {
            let runs = seen.row.process.runs();
            seen.unsure_until = runs.is_none().then(|| now + seen.row.ttl());
            runs != Some(false)
        });
        roster.changes = 0;
        roster
    }

    /// Applies one change.
    pub(crate) fn event(&mut self, event: &Event, now: Instant, clock: SystemTime) {
        match event {
            Event::Put(entry) => self.put(entry),
            Event::Gone { key, .. } => {
                let Some(rank) = key_rank(key) else { return };
                if self.seen.get(&rank).and_then(|seen| seen.unsure_until).is_some_and(|until| now < until) {
                    self.seen.remove(&rank);
                    self.changes += 1;
                } else {
                    self.gone(rank, "its lease ended", clock);
                }
            }
        }
    }

    /// Applies the store's contents after it was unreachable. Missing members have `grace` to re-register.
    pub(crate) fn resync(&mut self, entries: &[Entry], now: Instant, grace: Duration) {
        let present: BTreeSet<u32> = entries.iter().filter_map(|entry| key_rank(&entry.key)).collect();
        for entry in entries {
            self.put(entry);
        }
        for (rank, seen) in &mut self.seen {
            if *rank != self.own && !present.contains(rank) && seen.life == Life::Alive {
                seen.life = Life::Missing(now + grace);
            }
        }
    }

    /// Declares members dead whose grace period is over.
    pub(crate) fn expire(&mut self, now: Instant, clock: SystemTime) {
        let over = |seen: &Seen| matches!(seen.life, Life::Missing(until) if until <= now);
        let over: Vec<u32> = self.seen.iter().filter(|(_, seen)| over(seen)).map(|(rank, _)| *rank).collect();
        for rank in over {
            self.gone(rank, "it did not come back when the store did", clock);
        }
    }

    fn put(&mut self, entry: &Entry) {
        let Some(rank) = key_rank(&entry.key) else { return };
        let Ok(row) = Row::decode(rank, &entry.value) else { return };
        let life = if row.left.is_some() { Life::Left } else { Life::Alive };
        let same = self.seen.get(&rank).is_some_and(|seen| {
            seen.row.incarnation == row.incarnation && (seen.life == life || matches!(seen.life, Life::Missing(_)))
        });
        if !same && rank != self.own {
            self.changes += 1;
        }
        self.seen.insert(rank, Seen { row, life, unsure_until: None });
    }

    fn gone(&mut self, rank: u32, why: &str, now: SystemTime) {
        if rank == self.own {
            return; // this process is alive, and re-registers
        }
        let Some(seen) = self.seen.get_mut(&rank) else { return };
        if matches!(seen.life, Life::Alive | Life::Missing(_)) {
            seen.life = Life::Dead(format!("{why} (noticed at {})", time_of_day(now)));
            self.changes += 1;
        }
    }

    /// Sets this process's own row.
    pub(crate) fn set_own(&mut self, row: Row) {
        self.seen.insert(self.own, Seen { row, life: Life::Alive, unsure_until: None });
    }

    /// Number of changes of other members.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    pub(crate) fn members(&self) -> Vec<Member> {
        self.present().map(|(rank, row)| row.member(rank)).collect()
    }

    /// The current members by rank.
    pub(crate) fn present(&self) -> impl Iterator<Item = (u32, &Row)> {
        let there = |seen: &&Seen| matches!(seen.life, Life::Alive | Life::Missing(_));
        self.seen.iter().filter_map(move |(rank, seen)| Some(seen).filter(there).map(|seen| (*rank, &seen.row)))
    }

    pub(crate) fn state(&self, rank: u32) -> RankState {
        match self.seen.get(&rank).map(|seen| &seen.life) {
            None => RankState::Absent,
            Some(Life::Alive | Life::Missing(_)) => RankState::Alive,
            Some(Life::Dead(why)) => RankState::Dead(why.clone()),
            Some(Life::Left) => RankState::Left,
        }
    }

    /// The incarnation of a current member.
    pub(crate) fn incarnation(&self, rank: u32) -> Option<u64> {
        let seen = self.seen.get(&rank)?;
        matches!(seen.life, Life::Alive | Life::Missing(_)).then_some(seen.row.incarnation)
    }

    /// The last known incarnation of a rank.
    pub(crate) fn last(&self, rank: u32) -> Option<u64> {
        self.seen.get(&rank).map(|seen| seen.row.incarnation)
    }

    /// Whether a rank left after completing round `count` of a barrier, counted from 0.
    pub(crate) fn left_after(&self, rank: u32, barrier: u64, count: u64) -> bool {
        let left = self.seen.get(&rank).filter(|seen| seen.life == Life::Left).and_then(|seen| seen.row.left.as_ref());
        left.is_some_and(|left| left.met.iter().any(|(known, met)| *known == barrier && *met > count))
    }

    /// Whether the member that serves the store is still in the group; `None` if no member serves it.
    pub(crate) fn server_is_there(&self) -> Option<bool> {
        let seen = self.seen.values().find(|seen| seen.row.serves_store)?;
        Some(matches!(seen.life, Life::Alive | Life::Missing(_)))
    }

    /// `rank 3 (host:77)`, or `rank 3` if it has never joined.
    pub(crate) fn name(&self, rank: u32) -> String {
        self.seen.get(&rank).map_or_else(|| format!("rank {rank}"), |seen| rank_name(rank, &seen.row))
    }

    /// The first of `ranks` that has died or left, with its name and what happened to it.
    pub(crate) fn lost_of(&self, ranks: &[u32]) -> Option<(u32, String, String)> {
        ranks.iter().find_map(|rank| {
            let seen = self.seen.get(rank)?;
            let why = seen.row.left.as_ref().map_or("", |left| left.why.as_str());
            let what = match &seen.life {
                Life::Dead(why) => format!("died: {why}"),
                Life::Left if why.is_empty() => "left the group".to_owned(),
                Life::Left => format!("left the group: {why}"),
                _ => return None,
            };
            Some((*rank, self.name(*rank), what))
        })
    }

    /// Another member whose size differs, with its row.
    pub(crate) fn other_size(&self, size: u32) -> Option<(u32, &Row)> {
        self.present().find(|(rank, row)| *rank != self.own && row.size != size)
    }
}

/// `06:31:07.250 UTC`.
fn time_of_day(now: SystemTime) -> String {
    let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let seconds = since.as_secs() % 86_400;
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    format!("{hours:02}:{minutes:02}:{:02}.{:03} UTC", seconds % 60, since.subsec_millis())
}

/// A search for all of some ranks, repeated while they arrive. Each time it continues at the first one that was missing, so
/// that all of it takes time in proportion to the ranks; those before are checked again once no other is missing.
pub(crate) struct Search<'a> {
    ranks: &'a [u32],
    found: usize,
}

impl<'a> Search<'a> {
    pub(crate) fn new(ranks: &'a [u32]) -> Search<'a> {
        Search { ranks, found: 0 }
    }

    /// The values of `known` for all of them, in their order; `None` if one is missing.
    pub(crate) fn all(&mut self, known: impl Fn(u32) -> Option<u64>) -> Option<Vec<u64>> {
        self.found += self.ranks[self.found..].iter().take_while(|rank| known(**rank).is_some()).count();
        if self.found < self.ranks.len() {
            return None;
        }
        let all: Option<Vec<u64>> = self.ranks.iter().map(|rank| known(*rank)).collect();
        if all.is_none() {
            self.found = 0;
        }
        all
    }
}

#[cfg(test)]
#[path = "membership_tests.rs"]
mod tests;
