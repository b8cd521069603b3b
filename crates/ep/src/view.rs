//! Membership view of one rank, and its agreement with the views of the others. No I/O.
//!
//! A rank that loses another removes it from its own view at once and sends a [`Notice`] to all ranks that it still
//! reaches, the lost one included. The lowest rank of a view is its leader. A rank adopts the removals of its leader;
//! the leader adopts those that any member reports. A rank that learns of its own removal stops: it is
//! [evicted](View::evicted). So when two ranks lose each other, the leader decides which of them stays, and notifies
//! the rest.
//!
//! Views may differ temporarily; results then name the ranks that are missing. They converge once all notices have
//! arrived, since a view only shrinks between [`View::restart`]s and all members follow one leader. If the leader is
//! lost, each rank detects that itself before it follows the next.

use std::collections::{BTreeMap, BTreeSet};

use crossrail_types::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::config::MOST_RANKS;
use crate::hello::{MAX_MESSAGE, decode, encode};

/// Longest reason in a notice, in characters.
const WHY: usize = 200;

/// Prefix of the reason for a rank that another rank has lost: `rank 3 has lost it: ...`.
const LOST_BY: &str = "rank ";
const LOST_IT: &str = " has lost it: ";

/// At most [`WHY`] characters of a reason, whole words.
fn cut(why: &str) -> String {
    if why.chars().count() <= WHY {
        return why.to_owned();
    }
    let head: String = why.chars().take(WHY - 4).collect();
    let words = head.rsplit_once(' ').map_or(head.as_str(), |(words, _)| words);
    format!("{words} ...")
}

/// Announces a changed view to the other ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notice {
    /// Sequence number of the sender's last operation.
    stamp: u64,
    /// Number of the sender's view.
    number: u64,
    /// Ranks removed from it.
    out: Vec<u32>,
    /// Why the last of them was removed.
    why: String,
}

impl Notice {
    /// Most bytes of an encoded notice.
    pub const MAX: usize = MAX_MESSAGE;

    /// # Errors
    /// `Protocol`.
    pub fn encode(&self) -> Result<Vec<u8>> {
        encode(self)
    }

    /// # Errors
    /// `Protocol`: these bytes are no notice.
    pub fn decode(bytes: &[u8]) -> Result<Notice> {
        let notice: Notice = decode(bytes, "a notice of lost ranks")?;
        match notice.out.len() <= MOST_RANKS {
            true => Ok(notice),
            false => Err(Error::new(ErrorKind::Protocol, "view", "a notice names more ranks than there are")),
        }
    }
}

/// The ranks that take part, as one rank sees it. See the module.
#[derive(Clone, Debug)]
pub struct View {
    me: u32,
    number: u64,
    /// This rank included.
    members: BTreeSet<u32>,
    out: BTreeSet<u32>,
    /// Why the last one was removed.
    why: String,
    /// The last notice of each member that this rank does not follow yet.
    pending: BTreeMap<u32, Notice>,
    /// Lowest stamp of valid notices: earlier ones refer to a view before the last restart.
    since: u64,
    evicted: Option<String>,
}

impl View {
    /// The view of rank `me` alone.
    pub fn new(me: u32) -> View {
        View {
            me,
            number: 1,
            members: BTreeSet::from([me]),
            out: BTreeSet::new(),
            why: String::new(),
            pending: BTreeMap::new(),
            since: 0,
            evicted: None,
        }
    }

    /// The caller has set who takes part, after operation `stamp`. `number`: the greatest number of the new members' views.
    pub fn restart(&mut self, members: impl IntoIterator<Item = u32>, stamp: u64, number: u64) {
        self.members = members.into_iter().chain([self.me]).collect();
        self.out.clear();
        self.pending.clear();
        self.since = stamp + 1;
        // The number comes from a peer and may be any.
        self.number = self.number.max(number).saturating_add(1);
    }

    /// Incremented with every removed rank and every [`View::restart`].
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Ranks removed since the last restart.
    pub fn out(&self) -> &BTreeSet<u32> {
        &self.out
    }

    /// Why the last of them was removed.
    pub fn why(&self) -> &str {
        &self.why
    }

    /// Why the others removed this rank from their view, once it knows.
    pub fn evicted(&self) -> Option<&str> {
        self.evicted.as_deref()
    }

    /// Removes `rank`, which this rank has lost. Returns the ranks that are removed as a result of pending notices.
    pub fn lose(&mut self, rank: u32, why: &str) -> Vec<u32> {
        self.take_out(rank, why);
        self.settle()
    }

    /// Notice to send to the others after a change; `stamp`: the last operation.
    pub fn notice(&self, stamp: u64) -> Notice {
        let why = cut(&self.why);
        // A change between the restart and the first operation after it is one of the new view.
        let stamp = stamp.max(self.since);
        Notice { stamp, number: self.number, out: self.out.iter().copied().collect(), why }
    }

    /// Handles a notice of rank `from`. Returns the ranks that are removed as a result.
    pub fn handle_notice(&mut self, from: u32, notice: Notice) -> Vec<u32> {
        let known = self.members.contains(&from) || self.out.contains(&from);
        if notice.stamp < self.since || self.evicted.is_some() || !known {
            return Vec::new();
        }
        if notice.out.contains(&self.me) {
            // Two ranks that have lost each other leave it to the leader, which may be the sender.
            let leads = self.members.first().is_none_or(|leader| from < *leader);
            if !self.out.contains(&from) || leads {
                let Notice { number, why, .. } = notice;
                self.evicted = Some(format!("rank {} is out of view {number} of rank {from}: {why}", self.me));
            }
            return Vec::new();
        }
        if self.members.contains(&from) {
            self.pending.insert(from, notice);
        }
        self.settle()
    }

    fn take_out(&mut self, rank: u32, why: &str) -> bool {
        let changed = rank != self.me && self.members.remove(&rank);
        if changed {
            self.out.insert(rank);
            self.number = self.number.saturating_add(1);
            why.clone_into(&mut self.why);
        }
        changed
    }

    /// Adopts the pending notices that count.
    fn settle(&mut self) -> Vec<u32> {
        let mut newly = Vec::new();
        loop {
            self.pending.retain(|from, _| self.members.contains(from));
            let leader = self.members.first().copied();
            let counts = |from: &u32| leader == Some(*from) || leader == Some(self.me);
            let Some(from) = self.pending.keys().copied().find(counts) else { return newly };
            let Some(notice) = self.pending.remove(&from) else { return newly };
            // Who lost it first counts, not who passed that on.
            let why = match notice.why.starts_with(LOST_BY) && notice.why.contains(LOST_IT) {
                true => notice.why,
                false => format!("{LOST_BY}{from}{LOST_IT}{}", notice.why),
            };
            newly.extend(notice.out.into_iter().filter(|rank| self.take_out(*rank, &why)));
        }
    }
}
