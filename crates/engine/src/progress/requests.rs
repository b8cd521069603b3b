//! Requests: waiting for them, testing, cancelling; deregistration of memory.

use std::time::Duration;

use crossrail_proto as proto;
use crossrail_types::{Error, ErrorKind, OpId, Result};

use super::Progress;
use crate::core::{Callback, Collected, Receipt, outcome};

impl Progress {
    pub(crate) fn wait(&self, id: OpId, collected: &Collected, timeout: Option<Duration>) -> Result<Receipt> {
        let timeout = timeout.unwrap_or(self.environment.settings().timeout);
        let found = self.wait_for(timeout, |core| core.st.ops.awaits_peer(id), |core| outcome(core, id, collected));
        found.unwrap_or_else(|| Err(self.timed_out(id, timeout)))
    }

    pub(crate) fn test(&self, id: OpId, collected: &Collected) -> Option<Result<Receipt>> {
        let mut core = self.core.lock();
        if !core.st.ops.is_done(id) {
            let ask = core.st.ops.awaits_peer(id);
            core.pass(true, ask);
            let sockets = self.groups[0].has_lanes();
            if sockets && !core.st.ops.is_done(id) {
                self.after(core);
                self.poll_sockets(Some(Duration::ZERO));
                core = self.core.lock();
            }
            core.activity += 1;
        }
        let found = outcome(&mut core, id, collected);
        self.after(core);
        found
    }

    pub(crate) fn cancel(&self, id: OpId) {
        let mut core = self.core.lock();
        core.cancel(id);
        self.after(core);
    }

    pub(crate) fn on_complete(&self, id: OpId, collected: &Collected, callback: Callback) {
        let mut core = self.core.lock();
        match collected.load() {
            Some(finish) => core.st.ops.callbacks.push((callback, Ok(finish))),
            None => core.st.ops.on_complete(id, callback),
        }
        self.after(core);
    }

    fn timed_out(&self, id: OpId, timeout: Duration) -> Error {
        let mut core = self.core.lock();
        let what = core.st.ops.op(id).map_or("wait", |op| op.what);
        let progress = core.progress(id);
        let lane = match &progress {
            Some((Some(_), ..)) => core.lanes_of(id),
            _ => None,
        };
        drop(core);
        let mut error = Error::new(ErrorKind::Timeout, what, "not finished").with_waited(timeout);
        error.lane = lane;
        match progress {
            Some((Some(peer), done, total)) => {
                error = error.with_peer(peer).with_progress(done, total);
            }
            Some((None, done, total)) => {
                error = error.with_progress(done, total);
                error.detail.push_str(": no message has matched it");
            }
            None => {}
        }
        error.with_hint("the request goes on: wait again or cancel it; CROSSRAIL_TIMEOUT sets the default")
    }

    /// Ends all access to a region and waits until no peer touches its memory; false if it had ended already.
    pub(crate) fn deregister(&self, region: proto::RegionRef) -> bool {
        let mut core = self.core.lock();
        let ended = core.region_gone(region);
        core.st.ops.finished = true;
        self.after(core);
        if !ended {
            return false;
        }
        // A peer that reads is told first: what a lane sends instead of revoked memory would pass for the region's.
        let timeout = self.environment.settings().timeout;
        if self.observe_until(timeout, |core| (!core.region_in_use(region)).then_some(())).is_none() {
            self.log.warn(format_args!("deregister: a peer had not let go in {:.3} s", timeout.as_secs_f64()));
        }
        let mut core = self.core.lock();
        for peer in core.st.peers.iter().flatten() {
            peer.passives_of(region).for_each(|grant| grant.revoke());
        }
        core.st.let_go_of_region(region);
        core.st.regions.remove(region);
        self.after(core);
        true
    }
}
