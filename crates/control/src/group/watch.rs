//! The thread that keeps what is known of the members, and this process registered.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crossrail_types::{ErrorKind, Result};
use parking_lot::{Condvar, Mutex};

use super::shared::{STEP, Shared};
use crate::{Revision, Store, Watch};

/// The longest between two looks at this process's own lease.
const LOOK: Duration = Duration::from_millis(250);
/// Between two tries to reach a store that is away.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));

/// Ends the thread.
#[derive(Default)]
pub(super) struct Stop {
    asked: Mutex<bool>,
    bell: Condvar,
}

impl Stop {
    pub(super) fn ask(&self) {
        *self.asked.lock() = true;
        self.bell.notify_all();
    }

    fn is_asked(&self) -> bool {
        *self.asked.lock()
    }

    fn pause(&self, time: Duration) {
        let mut asked = self.asked.lock();
        if !*asked {
            self.bell.wait_for(&mut asked, time);
        }
    }
}

/// Runs until asked to stop; `joined`: the revision at which the roster is that of the store.
pub(super) fn run(shared: &Arc<Shared>, stop: &Stop, joined: Revision) {
    let mut watch: Option<Box<dyn Watch>> = None;
    let mut known = Some(joined);
    let mut pause = Duration::ZERO;
    while !stop.is_asked() {
        let Ok(store) = shared.store("watch") else { return };
        let step = match watch.take() {
            None => open(shared, &*store, known.take()),
            Some(mut open) => keep_registered(shared, &*store).and_then(|()| see(shared, &mut *open)).map(|()| open),
        };
        match step {
            Ok(open) => {
                watch = Some(open);
                pause = Duration::ZERO;
            }
            Err(_) if stop.is_asked() => return,
            // A watch may end by itself; what counts is whether another can be had.
            Err(_) if pause.is_zero() => pause = PAUSES.0,
            Err(error) => {
                shared.lost(&error);
                stop.pause(pause);
                pause = PAUSES.1.min(pause * 2);
            }
        }
        expire(shared);
    }
}

fn open(shared: &Shared, store: &dyn Store, known: Option<Revision>) -> Result<Box<dyn Watch>> {
    let members = shared.keys.members();
    let deadline = Instant::now() + STEP;
    if let Some(revision) = known {
        return store.watch(&members, revision, deadline);
    }
    let (entries, revision) = store.list(&members, deadline)?;
    let watch = store.watch(&members, revision, deadline)?;
    let mine = shared.key();
    let registered = entries.iter().any(|entry| entry.key == mine);
    shared.roster.lock().resync(&entries, Instant::now(), shared.lease * 2);
    shared.changed.notify_all();
    if !registered {
        shared.register_again(store)?;
    }
    shared.found();
    Ok(watch)
}

fn keep_registered(shared: &Shared, store: &dyn Store) -> Result<()> {
    let ended = shared.own.lock().lease.as_ref().is_some_and(|lease| !lease.is_alive());
    if ended { shared.register_again(store) } else { Ok(()) }
}

fn see(shared: &Shared, watch: &mut dyn Watch) -> Result<()> {
    match watch.next(Instant::now() + LOOK) {
        Ok(events) => {
            let (now, clock) = (Instant::now(), SystemTime::now());
            let mut roster = shared.roster.lock();
            for event in &events {
                roster.event(event, now, clock);
            }
            drop(roster);
            shared.changed.notify_all();
            Ok(())
        }
        Err(error) if error.kind == ErrorKind::Timeout => Ok(()),
        Err(error) => Err(error),
    }
}

fn expire(shared: &Shared) {
    let mut roster = shared.roster.lock();
    let before = roster.changes();
    roster.expire(Instant::now(), SystemTime::now());
    if roster.changes() != before {
        drop(roster);
        shared.changed.notify_all();
    }
}
