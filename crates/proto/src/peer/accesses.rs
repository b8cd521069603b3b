//! Ids that the engine holds: of the peer's accesses to regions, and of direct copies.

use slab::Slab;

use crate::DirectId;

/// Whose job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JobOf {
    In(u32),
    Out(u32),
}

/// Ids that events hand to the engine, not reused before the engine is done with them.
///
/// An access begins with a transfer, and its id is free once the engine has taken the event that ends it; a job ends
/// when the engine reports its result. The transfer tables begin both, [`Peer`](super::Peer) ends them.
#[derive(Debug, Default)]
pub(super) struct Accesses {
    passives: Slab<()>,
    jobs: Slab<JobOf>,
}

impl Accesses {
    /// An access of the peer's to a region begins.
    pub(super) fn begin(&mut self) -> u32 {
        self.passives.insert(()) as u32
    }

    /// The engine has heard of its end.
    pub(super) fn end(&mut self, passive: u32) {
        self.passives.try_remove(passive as usize);
    }

    pub(super) fn begin_job(&mut self, of: JobOf) -> DirectId {
        DirectId(self.jobs.insert(of) as u32)
    }

    pub(super) fn job(&self, job: DirectId) -> Option<JobOf> {
        self.jobs.get(job.0 as usize).copied()
    }

    pub(super) fn end_job(&mut self, job: DirectId) -> Option<JobOf> {
        self.jobs.try_remove(job.0 as usize)
    }

    pub(super) fn has_jobs(&self) -> bool {
        !self.jobs.is_empty()
    }

    /// The engine has given up all direct copies.
    pub(super) fn forget_jobs(&mut self) {
        self.jobs.clear();
    }
}
