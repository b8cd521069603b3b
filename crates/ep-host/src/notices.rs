//! Exchange of views, so that all ranks mask the same lost ranks, and an evicted rank learns of it.

use std::time::Instant;

use crossrail::{Endpoint, Request};
use crossrail_ep::view::View;
use crossrail_ep::{Fault, OnLoss, notices};

use crate::local_rank::{GroupView, LocalRank};
use crate::operation::{Common, LIVENESS_INTERVAL};

impl GroupView {
    /// The caller has changed who takes part, on all ranks at the same point between operations.
    pub(crate) fn restart(&mut self, number: u64) {
        let active: Vec<u32> = self.active().iter().map(|rank| *rank as u32).collect();
        self.agreed.restart(active, self.operations, number);
    }
}

impl LocalRank {
    /// Receives the next notice of a rank; `None` where nobody masks.
    pub(crate) fn notices_from(&self, endpoint: &Endpoint) -> Option<Request> {
        let masks = self.config.on_loss == OnLoss::Mask;
        // A failure means that the connection has ended, which is noticed elsewhere.
        masks.then(|| notices::receive(&self.worker, endpoint).ok()).flatten()
    }

    /// Handles arrived notices, at most once per [`LIVENESS_INTERVAL`]. Returns whether the view has changed.
    pub(crate) fn poll_notices(&self, common: &mut Common, view: &mut GroupView, now: Instant) -> bool {
        if self.config.on_loss != OnLoss::Mask || now.duration_since(view.notices_polled) < LIVENESS_INTERVAL {
            return false;
        }
        view.notices_polled = now;
        let mut out = Vec::new();
        for at in 0..view.peers.len() {
            let Some(peer) = &mut view.peers[at] else { continue };
            while let Some(receipt) = peer.inbox.as_ref().and_then(Request::test) {
                let request = peer.inbox.take();
                let (Some(request), Ok(receipt), Some(endpoint)) = (request, receipt, peer.endpoint()) else { break };
                peer.inbox = self.notices_from(endpoint);
                match notices::received(request, &receipt) {
                    Ok(notice) => out.extend(view.agreed.handle_notice(at as u32, notice)),
                    Err(error) => self.warn(&format!("rank {at}: {error}")),
                }
            }
        }
        if let Some(why) = view.agreed.evicted() {
            let error = notices::evicted(common.name, why);
            view.broken.get_or_insert_with(|| error.clone());
            common.give_up_all(view.peers.len(), error);
            return true;
        }
        let changed = !out.is_empty();
        self.follow(common, view, &out);
        if changed {
            self.notify_others(view);
        }
        changed
    }

    /// Removes a rank that this one has lost from the view, and notifies the others.
    pub(crate) fn remove_from_view(&self, common: &Common, view: &mut GroupView, rank: usize, why: &str) {
        let out = view.agreed.lose(rank as u32, why);
        self.follow(common, view, &out);
        self.notify_others(view);
    }

    /// Masks ranks that other ranks have lost.
    fn follow(&self, common: &Common, view: &mut GroupView, out: &[u32]) {
        for rank in out {
            let Some(peer) = view.peers[*rank as usize].as_mut().filter(|peer| !peer.masked) else { continue };
            (peer.masked, peer.lost) = (true, true);
            let left = view.active().len() as u32;
            let why = view.agreed.why().to_owned();
            let (operation, number) = (common.name, common.number);
            let fault = Fault { rank: *rank, operation, number, stage: "it", why, left, masked: true };
            self.warn(&fault);
            view.faults.push(fault);
        }
    }

    /// Sends this rank's view to all reachable ranks, including those removed from it.
    fn notify_others(&self, view: &GroupView) {
        notices::send(&view.agreed, view.operations, view.peers.iter().flatten().filter_map(|peer| peer.endpoint()));
    }

    /// The view of a rank without connections.
    pub(crate) fn alone(&self) -> View {
        View::new(self.own.me as u32)
    }
}
