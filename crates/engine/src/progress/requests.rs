//! Requests: waiting for them, testing, cancelling; deregistration of memory.

use std::time::Duration;

use crossrail_locks::MutexGuard;
use crossrail_proto as proto;
use crossrail_types::{Error, ErrorKind, OpId, Result};

use super::Progress;
use super::waits::Awaited;
use crate::core::{
    Callback, Collected, Core, Early, OpStatus, RETURN_MAX, Receipt, Received, Wanted, outcome, users_of_region,
};

/// Outcome of a poll of one request.
pub(crate) enum Polled {
    /// A good end, which the request has.
    Collected,
    /// None yet, or any other.
    Other(Option<Box<Result<Receipt>>>),
}

impl Progress {
    pub(crate) fn wait(&self, id: OpId, collected: &Collected, timeout: Option<Duration>) -> Result<Receipt> {
        let timeout = timeout.unwrap_or(self.environment.settings().timeout);
        let awaited = |core: &mut Core| Awaited::of(core, id, collected);
        let found = self.wait_for(timeout, awaited, |core| outcome(core, id, collected));
        found.unwrap_or_else(|| Err(self.timed_out(id, timeout)))
    }

    #[inline]
    pub(crate) fn test(&self, id: OpId, collected: &Collected) -> Option<Result<Receipt>> {
        match self.poll(id, collected) {
            Polled::Collected => collected.receipt().map(Ok),
            Polled::Other(outcome) => outcome.map(|outcome| *outcome),
        }
    }

    /// [`Progress::test`] without a receipt for what `collected` has.
    #[inline(always)]
    pub(crate) fn poll(&self, id: OpId, collected: &Collected) -> Polled {
        let mut core = self.core.lock();
        let mut status = core.operations().collect(id, collected);
        if let OpStatus::InFlight(kind, endpoint) = status {
            let asks = kind.awaits_peer();
            if asks {
                if core.collect(endpoint) {
                    status = core.operations().collect(id, collected);
                }
            } else {
                let received = core.receive_short(endpoint, 0, Some(Wanted { id, collected }));
                core.wake_ups().count_pass();
                if received == Received::Wanted {
                    status = OpStatus::Collected;
                }
            }
        }
        match status {
            OpStatus::Collected => {
                self.after(core);
                Polled::Collected
            }
            status => Polled::Other(self.test_at_length(core, id, collected, status)),
        }
    }

    /// The rest of a test, if the operation is not a message that has ended well. Boxed: otherwise the receipt of such
    /// a message would be written to the same place, whether the caller wants it or not.
    #[inline(never)]
    fn test_at_length<'a>(
        &'a self,
        mut core: MutexGuard<'a, Core>,
        id: OpId,
        collected: &Collected,
        status: OpStatus,
    ) -> Option<Box<Result<Receipt>>> {
        if let OpStatus::InFlight(kind, _) = status {
            // It may have ended meanwhile, with bytes that its request may ask for.
            if !core.operations().is_done(id) {
                let asks = kind.awaits_peer();
                core = self.pass_for(core, asks, |core| core.operations().is_done(id));
                if asks {
                    core.wake_ups().count_pass();
                }
            }
        }
        let outcome = outcome(&mut core, id, collected);
        self.after(core);
        outcome.map(Box::new)
    }

    /// Makes a pass for a caller that polls until `done`. `asks`: the peer has to confirm something.
    pub(crate) fn pass_for<'a>(
        &'a self,
        mut core: MutexGuard<'a, Core>,
        asks: bool,
        done: impl Fn(&mut Core) -> bool,
    ) -> MutexGuard<'a, Core> {
        core.pass(true, asks);
        let more = self.connections.driven().has_lanes() && !done(&mut core);
        if core.wake_ups().take_events() || more {
            self.after(core);
            self.poll_sockets(Some(Duration::ZERO));
            core = self.core.lock();
        }
        core
    }

    pub(crate) fn cancel(&self, id: OpId) {
        let mut core = self.core.lock();
        core.cancel(id, Early::Cancelled);
        self.after(core);
    }

    pub(crate) fn on_complete(&self, id: OpId, collected: &Collected, callback: Callback) {
        let mut core = self.core.lock();
        match collected.load() {
            Some(end) => core.operations().call_back(callback, Ok(end.into())),
            None => core.operations().on_complete(id, callback),
        }
        self.after(core);
    }

    fn timed_out(&self, id: OpId, timeout: Duration) -> Error {
        let progress = self.core.lock().progress_of(id);
        let what = progress.as_ref().map_or("wait", |progress| progress.kind.name());
        let mut error = Error::new(ErrorKind::Timeout, what, "not finished").with_waited(timeout);
        if let Some(progress) = progress {
            error.lane = progress.lanes;
            error = error.with_progress(progress.done, progress.total);
            match progress.peer {
                Some(peer) => error = error.with_peer(peer),
                None => error.detail.push_str(": no message has matched it"),
            }
            if progress.unmatched > 0 {
                let waiting = progress.unmatched;
                error.detail.push_str(&format!("; {waiting} messages that do not match it wait to be received"));
            }
            if let Some((count, most)) = progress.crowd {
                error.detail.push_str(&format!(
                    ": {count} operations with the peer are in flight; it accepts {most} until it receives some"
                ));
            }
        }
        error.with_hint("the request goes on: wait again or cancel it; CROSSRAIL_TIMEOUT sets the default")
    }

    /// Ends all access to regions, of peers and of this end's own operations, and waits until nothing touches their memory.
    ///
    /// # Errors
    /// `Region` when all had ended already; `Timeout` when something still touches some, and then those are in use until a
    /// later call returns `Ok`.
    pub(crate) fn deregister(&self, regions: &[proto::RegionRef]) -> Result<()> {
        let mut core = self.core.lock();
        let known: Vec<_> = regions.iter().copied().filter(|region| core.end_region(*region)).collect();
        self.after(core);
        if known.is_empty() {
            return Err(Error::new(ErrorKind::Region, "deregister", "the region is already deregistered"));
        }
        // The protocol ends a peer's reads first: bytes that a lane sends in place of revoked memory must not be taken
        // for the region's.
        let timeout = self.environment.settings().timeout;
        let mut used = known.clone();
        self.observe_until(timeout, |core| {
            used.retain(|region| core.is_region_used(*region));
            used.is_empty().then_some(())
        });
        let ended: Vec<_> = known.into_iter().filter(|region| !used.contains(region)).collect();
        let mut core = self.core.lock();
        let is_kept = ended.iter().fold(false, |kept, region| core.recall_region(*region) | kept);
        self.after(core);
        // A lane that keeps it for too long is torn down, which returns it.
        if is_kept {
            let kept = |core: &mut Core| ended.iter().any(|region| core.is_region_kept(*region));
            self.observe_until(2 * RETURN_MAX, |core| (!kept(core)).then_some(()));
        }
        let mut core = self.core.lock();
        for region in ended {
            if core.is_region_kept(region) {
                used.push(region);
            } else {
                core.remove_region(region);
            }
        }
        let mut users: Vec<_> = used.iter().flat_map(|region| users_of_region(&core, *region)).collect();
        self.after(core);
        if used.is_empty() {
            return Ok(());
        }
        users.sort_unstable();
        users.dedup();
        let detail = match users.is_empty() {
            true => "a lane still holds the memory".to_owned(),
            false => format!("{} may still read or write the memory", users.join(", ")),
        };
        Err(Error::new(ErrorKind::Timeout, "deregister", detail).with_waited(timeout).with_hint(
            "do not reuse or free the memory before deregistering again has succeeded, or that process has ended",
        ))
    }
}
