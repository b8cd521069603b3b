//! Direct copies, step by step, each end at its own pace.

use crossrail_proto::{DirectId, Role};

use crate::memory::Span;
use crate::rng::Rng;
use crate::world::World;

impl World {
    pub(crate) fn describe_span(&mut self, span: &Span) -> [u8; 24] {
        self.spans.push(span.clone());
        let mut d = [0; 24];
        d[..8].copy_from_slice(&(self.spans.len() as u64 - 1).to_le_bytes());
        d
    }

    pub(crate) fn copy(&mut self, node: usize) {
        let ids: Vec<u32> = self.nodes[node].jobs.keys().copied().collect();
        if ids.is_empty() || self.nodes[node].down() {
            return;
        }
        let id = self.rng.pick(&ids);
        let (invite, fail) = (self.rng.one_in(2), self.rng.one_in(12));
        let job = &self.nodes[node].jobs[&id];
        let slot = job.offer.slot;
        if job.role == Role::Pull && !job.invited && slot.is_some() && invite && !job.stopping {
            let local = job.local.clone();
            let descriptor = self.describe_span(&local);
            self.nodes[node].jobs.get_mut(&id).unwrap().invited = true;
            self.nodes[node].peer.direct_invite(self.now, DirectId(id), descriptor);
        } else if job.role == Role::Pull && slot.is_none() && job.is_untouched() && invite {
            self.lend(node, id);
        } else if self.nodes[1 - node].down() {
            // The other process is out of reach.
            self.abandon(node, id);
        } else {
            self.copy_piece(node, id, fail);
        }
        self.settle(node);
    }

    /// The other end is to copy in this one's place, if the protocol has not asked it before.
    pub(crate) fn lend(&mut self, node: usize, id: u32) {
        let local = self.nodes[node].jobs[&id].local.clone();
        let descriptor = self.describe_span(&local);
        let lent = self.nodes[node].peer.direct_lend(self.now, DirectId(id), descriptor);
        self.log(|| format!("node {node} job {id} is lent: {lent}"));
        if lent {
            self.nodes[node].jobs.remove(&id);
            self.nodes[node].lent += 1;
        } else {
            self.nodes[node].jobs.get_mut(&id).unwrap().invited = true;
        }
    }

    pub(crate) fn abandon(&mut self, node: usize, id: u32) {
        let job = self.nodes[node].jobs.get_mut(&id).unwrap();
        job.claim = None;
        if let Some(slot) = job.offer.slot {
            self.cursors.get_mut(&slot).unwrap().stopped = true;
        }
        self.log(|| format!("node {node} job {id} gives up"));
        self.nodes[node].end_job(self.now, id, false);
    }

    pub(crate) fn copy_piece(&mut self, node: usize, id: u32, fail: bool) {
        let job = self.nodes[node].jobs.get_mut(&id).unwrap();
        let remote = self.spans[u64::from_le_bytes(job.offer.descriptor[..8].try_into().unwrap()) as usize].clone();
        let piece = |rng: &mut Rng, left: usize| if rng.one_in(2) { left } else { 1 + rng.index(left) };
        if let Some((at, len)) = job.claim.take() {
            match job.role {
                Role::Pull => remote.copy_to(&job.local, at, len),
                Role::Help => job.local.copy_to(&remote, at, len),
            }
            job.moved += len;
            if let Some(slot) = job.offer.slot {
                self.cursors.get_mut(&slot).unwrap().copied += len;
            }
            return;
        }
        if job.stopping {
            if let Some(slot) = job.offer.slot {
                self.cursors.get_mut(&slot).unwrap().stopped = true;
            }
            return self.nodes[node].end_job(self.now, id, false);
        }
        if fail {
            return self.abandon(node, id);
        }
        let job = self.nodes[node].jobs.get_mut(&id).unwrap();
        match job.offer.slot {
            Some(slot) => {
                let cursor = self.cursors.get_mut(&slot).unwrap();
                if cursor.copied == job.len {
                    self.nodes[node].end_job(self.now, id, true);
                } else if cursor.stopped {
                    self.abandon(node, id);
                } else if cursor.next < job.len {
                    let len = piece(&mut self.rng, job.len - cursor.next);
                    job.claim = Some((cursor.next, len));
                    cursor.next += len;
                }
            }
            None if job.moved == job.len => self.nodes[node].end_job(self.now, id, true),
            None => job.claim = Some((job.moved, piece(&mut self.rng, job.len - job.moved))),
        }
    }
}
