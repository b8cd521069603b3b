//! Descriptions that this end has sent to one peer, and operations that wait for them or for credit.

use std::collections::{HashSet, VecDeque};

use crossrail_proto as proto;
use crossrail_types::OpId;

use super::wire::{ENTRIES_MAX, LISTS_MAX, NOTHING, NOTICE_EXTRA, NOTICES_MAX, Sort};

/// A description that was sent: its id, and the bytes that it is charged at the peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SentDescription {
    pub(crate) sort: Sort,
    pub(crate) id: u32,
    pub(in crate::core) weight: u64,
    /// The mail that brought it, if that waits or goes in chunks: later frames of the message stream may overtake it.
    pub(in crate::core) mail: Option<OpId>,
}

/// An operation that is in the table but not yet submitted to the protocol.
pub(in crate::core) struct Waiting {
    pub(in crate::core) op: OpId,
    pub(in crate::core) operation: proto::Operation,
    /// The mails that must have arrived before.
    pub(in crate::core) mails: Vec<OpId>,
    /// The ticket of the point in a caller's stream that must be reached before.
    pub(in crate::core) after: Option<u64>,
    /// The notice to go ahead of it.
    pub(in crate::core) notice: Option<(u32, Vec<u8>)>,
    /// Credit for notices that it takes.
    pub(in crate::core) cost: u64,
    /// It is a notice, which must not overtake another.
    pub(in crate::core) ordered: bool,
    /// The view pairs rows of ours with the peer's, so the peer can copy between them by itself.
    pub(in crate::core) paired: bool,
}

/// See the module. Part of a peer's entry.
pub(in crate::core) struct Outbox {
    next: u32,
    entries: usize,
    bytes: u64,
    /// Mails in chunks on their way, those that wait for one, and the last of them that is a notice.
    pub(in crate::core) long: HashSet<OpId>,
    pub(in crate::core) notice: Option<OpId>,
    waiting: VecDeque<Waiting>,
    /// Of notices sent, and of those that the peer has taken: their bytes, with the [extra](NOTICE_EXTRA).
    noticed: u64,
    credited: u64,
    /// Maximum of `noticed` minus `credited`: the peer's credit for notices, in bytes.
    pub(in crate::core) notices_max: u64,
}

impl Default for Outbox {
    fn default() -> Outbox {
        Outbox {
            next: 0,
            entries: 0,
            bytes: 0,
            long: HashSet::new(),
            notice: None,
            waiting: VecDeque::new(),
            noticed: 0,
            credited: 0,
            notices_max: NOTICES_MAX,
        }
    }
}

/// What a notice of so many bytes costs.
pub(in crate::core) fn cost(len: usize) -> u64 {
    len as u64 + NOTICE_EXTRA
}

impl Outbox {
    /// A new id.
    pub(in crate::core) fn id(&mut self) -> u32 {
        self.next = self.next.wrapping_add(1);
        if self.next == NOTHING {
            self.next = 0;
        }
        self.next
    }

    /// Counts a list of that weight at the peer; false if the peer would not take it.
    pub(in crate::core) fn charge(&mut self, weight: u64) -> bool {
        let fits = self.entries < ENTRIES_MAX && self.bytes.saturating_add(weight) <= LISTS_MAX;
        if fits {
            self.entries += 1;
            self.bytes += weight;
        }
        fits
    }

    /// Returns the charge of a list that the peer is told to drop.
    pub(in crate::core) fn discharge(&mut self, sent: &SentDescription) {
        self.entries = self.entries.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(sent.weight);
    }

    /// Which of `mails` are still on their way.
    pub(in crate::core) fn outstanding(&self, mails: impl IntoIterator<Item = OpId>) -> Vec<OpId> {
        mails.into_iter().filter(|op| self.long.contains(op)).collect()
    }

    /// Whether `mails` have arrived and there is credit: then the operation begins, and its credit is taken.
    pub(in crate::core) fn may_begin(&mut self, waiting: &Waiting) -> bool {
        // Notices keep their order, but for those of moves that wait for a stream.
        let queued = waiting.cost > 0 && self.waiting.iter().any(|other| other.cost > 0 && other.after.is_none());
        !queued && self.is_ready(waiting) && self.take_credit(waiting.cost)
    }

    fn is_ready(&self, waiting: &Waiting) -> bool {
        let before = self.notice.filter(|_| waiting.ordered);
        waiting.after.is_none() && waiting.mails.iter().chain(&before).all(|op| !self.long.contains(op))
    }

    fn take_credit(&mut self, cost: u64) -> bool {
        let fits = cost == 0 || self.noticed + cost <= self.credited + self.notices_max;
        if fits {
            self.noticed += cost;
        }
        fits
    }

    /// A notice will not be sent after all: its credit returns.
    pub(in crate::core) fn return_credit(&mut self, cost: u64) {
        self.noticed -= cost;
    }

    /// Whether anything waits.
    pub(in crate::core) fn waits(&self) -> bool {
        !self.waiting.is_empty()
    }

    pub(in crate::core) fn wait(&mut self, waiting: Waiting) {
        self.waiting.push_back(waiting);
    }

    /// The next that may begin.
    pub(in crate::core) fn ready(&mut self) -> Option<Waiting> {
        let mut blocked = false;
        for at in 0..self.waiting.len() {
            let waiting = &self.waiting[at];
            let (cost, ready) = (waiting.cost, self.is_ready(waiting));
            let blocks = cost > 0 && waiting.after.is_none();
            if ready && !(blocked && cost > 0) && self.take_credit(cost) {
                return self.waiting.remove(at);
            }
            blocked |= blocks;
        }
        None
    }

    /// The point in a stream with that ticket is reached; the operation that waits for it, if that is here.
    pub(in crate::core) fn reached(&mut self, ticket: u64) -> Option<OpId> {
        let waiting = self.waiting.iter_mut().find(|waiting| waiting.after == Some(ticket))?;
        waiting.after = None;
        Some(waiting.op)
    }

    /// Takes an operation out that has not begun.
    pub(in crate::core) fn leave(&mut self, op: OpId) -> bool {
        let at = self.waiting.iter().position(|waiting| waiting.op == op);
        at.is_some_and(|at| self.waiting.remove(at).is_some())
    }

    /// Everything that waits, because the peer has ended.
    pub(in crate::core) fn give_up(&mut self) -> Vec<OpId> {
        self.long.clear();
        self.waiting.drain(..).map(|waiting| waiting.op).collect()
    }

    /// The peer has taken so many bytes of notices in all.
    pub(in crate::core) fn credit(&mut self, taken: u64) {
        self.credited = self.credited.max(taken.min(self.noticed));
    }
}
