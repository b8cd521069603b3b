//! The wake-up of a stager's thread.

use std::time::Duration;

use crossrail_locks::{Condvar, Mutex};

/// Signalled by whoever has work for the thread; one signal is remembered.
#[derive(Debug, Default)]
pub(super) struct WakeUp {
    signalled: Mutex<bool>,
    changed: Condvar,
}

impl WakeUp {
    pub(super) fn signal(&self) {
        let mut signalled = self.signalled.lock();
        if !std::mem::replace(&mut *signalled, true) {
            self.changed.notify_one();
        }
    }

    /// Waits for a signal, at most `limit`.
    pub(super) fn wait(&self, limit: Option<Duration>) {
        let mut signalled = self.signalled.lock();
        if !*signalled {
            match limit {
                Some(limit) => drop(self.changed.wait_for(&mut signalled, limit)),
                None => self.changed.wait(&mut signalled),
            }
        }
        *signalled = false;
    }
}
