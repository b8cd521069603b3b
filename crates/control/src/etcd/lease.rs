//! A lease and the thread that renews it.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossrail_types::{Error, ErrorKind, Result};

use super::client::{Client, Effect, lock};
use super::messages::{Done, LeaseGrant, LeaseName, LeaseState, Line, Number};
use crate::store::{Lease, LeaseId};

/// Timeout of one renewal, which is then retried.
const LONGEST_RENEWAL: Duration = Duration::from_secs(1);
/// How long dropping a lease may block on the store.
const FAREWELL: Duration = Duration::from_millis(500);

#[derive(Debug)]
struct State {
    /// When the last successful renewal was sent.
    renewed: Instant,
    lost: bool,
    stop: bool,
    /// Whether the last renewal succeeded.
    answers: bool,
}

#[derive(Debug)]
struct Shared {
    client: Arc<Client>,
    id: LeaseId,
    ttl: Duration,
    state: Mutex<State>,
    stopped: Condvar,
}

/// See [`Lease`].
#[derive(Debug)]
pub(super) struct EtcdLease {
    shared: Arc<Shared>,
    keeper: Mutex<Option<JoinHandle<()>>>,
}

impl EtcdLease {
    /// Grants a lease of at least `ttl` and starts to renew it.
    pub(super) fn grant(client: &Arc<Client>, ttl: Duration, deadline: Instant) -> Result<EtcdLease> {
        let operation = "store grant";
        // etcd counts whole seconds, and refuses what does not fit 64 bits of nanoseconds.
        let seconds = ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0);
        let request = LeaseGrant { ttl: Number::from(seconds.max(1)) };
        let renewed = Instant::now();
        let granted: LeaseState = client.call(operation, "/v3/lease/grant", &request, Effect::Changes, deadline)?;
        let ttl = Duration::from_secs(granted.ttl.unsigned());
        if granted.id.0 == 0 || ttl.is_zero() {
            return Err(client.foreign(operation, "a lease without a number or a time"));
        }
        let shared = Arc::new(Shared {
            client: Arc::clone(client),
            id: LeaseId(granted.id.0),
            ttl,
            state: Mutex::new(State { renewed, lost: false, stop: false, answers: true }),
            stopped: Condvar::new(),
        });
        let lease = EtcdLease { shared: Arc::clone(&shared), keeper: Mutex::new(None) };
        let thread = std::thread::Builder::new().name("crossrail-lease".to_owned());
        let keeper = crossrail_locks::signals_blocked(|| thread.spawn(move || shared.keep()))
            .map_err(|e| Error::io(operation, "spawn a thread", &e))?;
        *lock(&lease.keeper) = Some(keeper);
        Ok(lease)
    }

    /// Stops the thread; returns whether it was running, and so whether the lease still existed.
    fn stop(&self) -> bool {
        lock(&self.shared.state).stop = true;
        self.shared.stopped.notify_all();
        let keeper = lock(&self.keeper).take();
        // A thread that panicked renews nothing either.
        keeper.map(JoinHandle::join).is_some()
    }
}

impl Lease for EtcdLease {
    fn id(&self) -> LeaseId {
        self.shared.id
    }

    fn ttl(&self) -> Duration {
        self.shared.ttl
    }

    fn is_alive(&self) -> bool {
        !lock(&self.shared.state).lost
    }

    fn revoke(&self, deadline: Instant) -> Result<()> {
        let had_keeper = self.stop();
        let was_lost = std::mem::replace(&mut lock(&self.shared.state).lost, true);
        if was_lost && !had_keeper {
            return Ok(());
        }
        self.shared.revoke(deadline)
    }
}

impl Drop for EtcdLease {
    fn drop(&mut self) {
        let had_keeper = self.stop();
        let answers = {
            let state = lock(&self.shared.state);
            !state.lost && state.answers
        };
        if had_keeper && answers {
            // Without renewal, it expires.
            let _ = self.shared.revoke(Instant::now() + FAREWELL);
        }
    }
}

impl Shared {
    /// Renews three times per lifetime, more often after failures, until it is stopped or has ended.
    fn keep(&self) {
        let mut pause = self.ttl / 3;
        loop {
            let state = lock(&self.state);
            let stops = |state: &mut State| !state.stop;
            let (state, _) =
                self.stopped.wait_timeout_while(state, pause, stops).unwrap_or_else(PoisonError::into_inner);
            if state.stop || state.lost {
                return;
            }
            drop(state);
            let begun = Instant::now();
            let renewed = self.renew(begun + LONGEST_RENEWAL.min(self.ttl / 3));
            let mut state = lock(&self.state);
            state.answers = renewed.is_ok();
            match renewed {
                Ok(Some(_)) => state.renewed = begun,
                Ok(None) => state.lost = true,
                // Only etcd knows whether a renewal that it answers late was in time.
                Err(error) if error.kind == ErrorKind::Timeout => {}
                Err(_) => state.lost |= state.renewed.elapsed() >= self.ttl,
            }
            pause = if state.answers { self.ttl / 3 } else { self.ttl / 20 };
        }
    }

    /// Its remaining lifetime; `None` if it has expired.
    fn renew(&self, deadline: Instant) -> Result<Option<Duration>> {
        let operation = "store renew";
        let request = LeaseName { id: Number(self.id.0) };
        let answer = self.client.call(operation, "/v3/lease/keepalive", &request, Effect::Reads, deadline)?;
        match answer {
            Line::<LeaseState>::Result(state) => {
                Ok(Some(Duration::from_secs(state.ttl.unsigned())).filter(|ttl| !ttl.is_zero()))
            }
            Line::Error(fault) => Err(self.client.refused(operation, &fault)),
        }
    }

    fn revoke(&self, deadline: Instant) -> Result<()> {
        let request = LeaseName { id: Number(self.id.0) };
        let path = "/v3/lease/revoke";
        match self.client.call::<Done>("store revoke", path, &request, Effect::Changes, deadline) {
            Err(error) if error.kind == ErrorKind::Closed => Ok(()),
            other => other.map(|_| ()),
        }
    }
}
