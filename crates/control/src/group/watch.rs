//! The thread that tracks the members and keeps this process registered.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crossrail_locks::{Condvar, Mutex};
use crossrail_types::{ErrorKind, Result};

use super::state::{GroupState, STEP_TIMEOUT};
use crate::{Event, Revision, Store, Watch};

/// Longest interval between checks of this process's own lease.
const LEASE_CHECK: Duration = Duration::from_millis(250);
/// Shortest and longest pause between attempts to reach an unreachable store.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));

/// Asks the thread to stop.
#[derive(Default)]
pub(super) struct Stop {
    asked: Mutex<bool>,
    wake: Condvar,
}

impl Stop {
    pub(super) fn ask(&self) {
        *self.asked.lock() = true;
        self.wake.notify_all();
    }

    fn is_asked(&self) -> bool {
        *self.asked.lock()
    }

    fn pause(&self, time: Duration) {
        let mut asked = self.asked.lock();
        if !*asked {
            self.wake.wait_for(&mut asked, time);
        }
    }
}

/// Runs until asked to stop. `joined` is the store's revision that the roster reflects.
pub(super) fn run(state: &Arc<GroupState>, stop: &Stop, joined: Revision) {
    let mut watch: Option<Box<dyn Watch>> = None;
    let mut known = Some(joined);
    let mut pause = Duration::ZERO;
    while !stop.is_asked() {
        let Ok(store) = state.store("watch") else { return };
        let step = match watch.take() {
            None => open(state, &*store, known.take()),
            Some(mut open) => {
                keep_registered(state, &*store).and_then(|()| receive_events(state, &*store, &mut *open)).map(|()| open)
            }
        };
        match step {
            Ok(open) => {
                watch = Some(open);
                pause = Duration::ZERO;
            }
            Err(_) if stop.is_asked() => return,
            // A watch may end; only the failure to open another one counts.
            Err(_) if pause.is_zero() => pause = PAUSES.0,
            Err(error) => {
                state.store_failed(&error);
                stop.pause(pause);
                pause = PAUSES.1.min(pause * 2);
            }
        }
        expire(state);
    }
}

fn open(state: &GroupState, store: &dyn Store, known: Option<Revision>) -> Result<Box<dyn Watch>> {
    let watched = state.keys.watched();
    let deadline = Instant::now() + STEP_TIMEOUT;
    if let Some(revision) = known {
        return store.watch(&watched, revision, deadline);
    }
    let (entries, revision) = store.list(&state.keys.members(), deadline)?;
    let watch = store.watch(&watched, revision, deadline)?;
    let mine = state.key();
    let registered = entries.iter().any(|entry| entry.key == mine);
    state.roster.lock().resync(&entries, Instant::now(), state.lease * 2);
    state.changed.notify_all();
    if !registered {
        state.register_again(store)?;
    }
    state.store_recovered();
    Ok(watch)
}

fn keep_registered(state: &GroupState, store: &dyn Store) -> Result<()> {
    let ended = state.own.lock().lease.as_ref().is_some_and(|lease| !lease.is_alive());
    if ended { state.register_again(store) } else { Ok(()) }
}

fn receive_events(state: &GroupState, store: &dyn Store, watch: &mut dyn Watch) -> Result<()> {
    match watch.next(Instant::now() + LEASE_CHECK) {
        Ok(events) => {
            let (now, clock) = (Instant::now(), SystemTime::now());
            let mut roster = state.roster.lock();
            for event in &events {
                roster.event(event, now, clock);
            }
            drop(roster);
            state.changed.notify_all();
            let asked = state.keys.asked();
            if events.iter().any(|event| matches!(event, Event::Put(entry) if entry.key == asked)) {
                state.answer();
            }
            let mine = state.key();
            match events.iter().any(|event| matches!(event, Event::Gone { key, .. } if *key == mine)) {
                // The others consider this process dead, although its lease may not have expired.
                true => state.register_again(store),
                false => Ok(()),
            }
        }
        Err(error) if error.kind == ErrorKind::Timeout => Ok(()),
        Err(error) => Err(error),
    }
}

fn expire(state: &GroupState) {
    let mut roster = state.roster.lock();
    let before = roster.changes();
    roster.expire(Instant::now(), SystemTime::now());
    if roster.changes() != before {
        drop(roster);
        state.changed.notify_all();
    }
}
