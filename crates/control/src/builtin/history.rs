//! The last changes, for watches that begin in the past.

use std::collections::VecDeque;
use std::sync::Arc;

/// What is kept: changes, and bytes in them.
const CHANGES_MAX: usize = 65_536;
const BYTES_MAX: usize = 8 << 20;
/// What a change costs beyond its key and value.
const CHANGE_COST: usize = 64;

/// One change: `value` is `None` when the key is gone.
#[derive(Debug)]
pub(super) struct Changed {
    pub(super) revision: u64,
    pub(super) key: Arc<str>,
    pub(super) value: Option<Arc<[u8]>>,
}

impl Changed {
    pub(super) fn cost(&self) -> usize {
        self.key.len() + self.value.as_ref().map_or(0, |value| value.len()) + CHANGE_COST
    }
}

/// Changes in their order, bounded; the newest ones may not have been told to the watches yet.
#[derive(Debug)]
pub(super) struct History {
    changes: VecDeque<Changed>,
    bytes: usize,
    /// The last change that is no longer kept.
    dropped: u64,
    fresh: usize,
}

impl History {
    /// Empty; changes up to `revision` are not kept.
    pub(super) fn new(revision: u64) -> History {
        History { changes: VecDeque::new(), bytes: 0, dropped: revision, fresh: 0 }
    }

    pub(super) fn push(&mut self, change: Changed) {
        self.bytes += change.cost();
        self.changes.push_back(change);
        self.fresh += 1;
    }

    /// All changes after `revision`; `None`: some are no longer kept.
    pub(super) fn after(&self, revision: u64) -> Option<impl Iterator<Item = &Changed>> {
        if revision < self.dropped {
            return None;
        }
        let start = self.changes.partition_point(|change| change.revision <= revision);
        Some(self.changes.range(start..))
    }

    pub(super) fn has_fresh(&self) -> bool {
        self.fresh > 0
    }

    /// Changes not yet reported to the watches.
    pub(super) fn fresh(&self) -> impl Iterator<Item = &Changed> {
        self.changes.range(self.changes.len() - self.fresh..)
    }

    /// Marks them as reported; drops entries beyond the limits.
    pub(super) fn told(&mut self) {
        self.fresh = 0;
        while self.changes.len() > CHANGES_MAX || self.bytes > BYTES_MAX {
            let Some(oldest) = self.changes.pop_front() else { break };
            self.bytes -= oldest.cost();
            self.dropped = oldest.revision;
        }
    }
}
