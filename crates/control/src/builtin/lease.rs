//! Leases, and the thread that renews those of one client.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossrail_locks::{Condvar, Mutex};
use crossrail_types::{Error, ErrorKind, Result};

use super::channel::Channel;
use super::frames::{Answer, Request, micros};
use crate::store::{Lease, LeaseId};

/// Renewals per lifetime of a lease; a failed renewal is retried after half that interval.
const RENEWALS: u32 = 4;
/// How long dropping a lease waits for the store's answer.
const DROP_TIME: Duration = Duration::from_millis(200);

/// Requests a lease and starts its renewal.
pub(super) fn grant(
    channel: &Arc<Channel>,
    renewer: &Arc<Renewer>,
    ttl: Duration,
    deadline: Instant,
) -> Result<Box<dyn Lease>> {
    // Measured from before the call: the store starts counting later.
    let begun = Instant::now();
    let request = Request::Grant(micros(ttl));
    let (id, ttl_us) = channel.call("store lease", &request, deadline, |answer| match answer {
        Answer::Granted(id, ttl_us) => Some((id, ttl_us)),
        _ => None,
    })?;
    let ttl = Duration::from_micros(ttl_us);
    let held = Arc::new(Held { id, ttl, lost: AtomicBool::new(false), renewed: Mutex::new(begun) });
    let lease = Granted { channel: Arc::clone(channel), renewer: Arc::clone(renewer), held };
    renewer.add(Arc::clone(&lease.held), channel)?;
    Ok(Box::new(lease))
}

/// A lease, shared with its renewer.
#[derive(Debug)]
struct Held {
    id: i64,
    ttl: Duration,
    lost: AtomicBool,
    /// When the last successful renewal was sent.
    renewed: Mutex<Instant>,
}

impl Held {
    fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }
}

#[derive(Debug)]
struct Granted {
    channel: Arc<Channel>,
    renewer: Arc<Renewer>,
    held: Arc<Held>,
}

impl Lease for Granted {
    fn id(&self) -> LeaseId {
        LeaseId(self.held.id)
    }

    fn ttl(&self) -> Duration {
        self.held.ttl
    }

    fn is_alive(&self) -> bool {
        !self.held.is_lost()
    }

    fn revoke(&self, deadline: Instant) -> Result<()> {
        self.renewer.remove(self.held.id);
        self.held.lost.store(true, Ordering::Release);
        let request = Request::Revoke(self.held.id);
        self.channel.call("store revoke", &request, deadline, |answer| matches!(answer, Answer::Done).then_some(()))
    }
}

impl Drop for Granted {
    fn drop(&mut self) {
        // A lease that ended needs nothing; any other expires if this fails.
        if self.held.is_lost() {
            self.renewer.remove(self.held.id);
        } else {
            let _ = self.revoke(Instant::now() + DROP_TIME);
        }
    }
}

/// Renews the leases of one client, on a thread that runs while there are any.
#[derive(Debug, Default)]
pub(super) struct Renewer {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    /// The leases, with the time of their next renewal.
    leases: Vec<(Instant, Arc<Held>)>,
    running: bool,
}

impl Renewer {
    fn add(self: &Arc<Self>, held: Arc<Held>, channel: &Arc<Channel>) -> Result<()> {
        let mut queue = self.queue.lock();
        let due = *held.renewed.lock() + held.ttl / RENEWALS;
        queue.leases.push((due, held));
        if queue.running {
            self.changed.notify_one();
            return Ok(());
        }
        let (renewer, channel) = (Arc::clone(self), Arc::downgrade(channel));
        let thread = std::thread::Builder::new().name("crossrail-lease".to_owned());
        crossrail_locks::signals_blocked(|| thread.spawn(move || renewer.run(&channel))).map_err(|e| {
            Error::new(ErrorKind::Exhausted, "store lease", format!("spawn a thread: {e}"))
                .with_hint("raise the limit of processes (ulimit -u)")
        })?;
        queue.running = true;
        Ok(())
    }

    fn remove(&self, id: i64) {
        self.queue.lock().leases.retain(|(_, held)| held.id != id);
        self.changed.notify_one();
    }

    fn run(&self, channel: &Weak<Channel>) {
        let mut queue = self.queue.lock();
        while let Some((due, held)) = queue.leases.iter().min_by_key(|(due, _)| *due).cloned() {
            if due > Instant::now() {
                self.changed.wait_until(&mut queue, due);
                continue;
            }
            drop(queue);
            // Held only for the call, so that the connection is closed with its last user.
            let next = channel.upgrade().and_then(|channel| renew(&channel, &held));
            queue = self.queue.lock();
            match next {
                Some(next) => {
                    if let Some((due, _)) = queue.leases.iter_mut().find(|(_, known)| known.id == held.id) {
                        *due = next;
                    }
                }
                None => queue.leases.retain(|(_, known)| known.id != held.id),
            }
        }
        queue.running = false;
    }
}

/// Renews a lease; returns when to do so next, or `None` once it has ended.
///
/// A renewal without an answer is repeated, beyond the lease's lifetime too: the store counts those that have arrived,
/// however late it reads them.
fn renew(channel: &Channel, held: &Held) -> Option<Instant> {
    let begun = Instant::now();
    let done = |answer: Answer<'_>| matches!(answer, Answer::Done).then_some(());
    let interval = held.ttl / RENEWALS;
    let renewed = channel.call("store lease", &Request::Renew(held.id), begun + interval, done);
    if held.is_lost() {
        return None;
    }
    let Err(error) = renewed else {
        *held.renewed.lock() = begun;
        return Some(begun + interval);
    };
    let ended = match error.kind {
        ErrorKind::Timeout => return Some(begun + interval),
        ErrorKind::Closed => true,
        _ => held.renewed.lock().elapsed() >= held.ttl,
    };
    held.lost.fetch_or(ended, Ordering::AcqRel);
    (!ended).then(|| Instant::now() + interval / 2)
}
