//! What wakes a stager's thread.

use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Rung by whoever has something for the thread; one ring is remembered.
#[derive(Debug, Default)]
pub(super) struct Bell {
    rung: Mutex<bool>,
    wake: Condvar,
}

impl Bell {
    pub(super) fn ring(&self) {
        let mut rung = self.rung.lock();
        if !std::mem::replace(&mut *rung, true) {
            self.wake.notify_one();
        }
    }

    /// Waits for a ring, at most `limit`.
    pub(super) fn wait(&self, limit: Option<Duration>) {
        let mut rung = self.rung.lock();
        if !*rung {
            match limit {
                Some(limit) => drop(self.wake.wait_for(&mut rung, limit)),
                None => self.wake.wait(&mut rung),
            }
        }
        *rung = false;
    }
}
