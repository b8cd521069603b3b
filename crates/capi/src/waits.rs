//! Waits that another thread can end by a function of the interface.

use std::sync::Arc;

use crossrail_locks::Mutex;
use crossrail_types::{ErrorKind, Interrupt, Result};

use crate::failure::{Failure, interrupted};

thread_local! {
    static OWN: Arc<Interrupt> = Interrupt::new();
}

/// The threads that wait for one object, to be interrupted.
#[derive(Default)]
pub(crate) struct Waits(Mutex<Vec<Arc<Interrupt>>>);

/// While one exists, its thread can be interrupted.
struct Waiting<'a>(&'a Waits, Arc<Interrupt>);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut waits = self.0.0.lock();
        if let Some(at) = waits.iter().position(|wait| Arc::ptr_eq(wait, &self.1)) {
            waits.swap_remove(at);
        }
    }
}

impl Waits {
    /// Runs a wait that [`Waits::interrupt`] ends; whether it has.
    pub(crate) fn interruptible<T>(&self, wait: impl FnOnce() -> Result<T>) -> (Result<T>, bool) {
        // A thread that is ending has lost its own, and may still finish a request in a destructor of the program.
        let own = OWN.try_with(Arc::clone).unwrap_or_else(|_| Interrupt::new());
        own.clear();
        self.0.lock().push(Arc::clone(&own));
        let waiting = Waiting(self, own);
        let result = waiting.1.run(wait);
        (result, waiting.1.is_raised())
    }

    /// [`Waits::interruptible`] of what fails with `Timeout` only where its time has passed.
    pub(crate) fn wait<T>(&self, wait: impl FnOnce() -> Result<T>) -> std::result::Result<T, Box<Failure>> {
        match self.interruptible(wait) {
            (Err(error), true) if error.kind == ErrorKind::Timeout => Err(interrupted(error)),
            (result, _) => Ok(result?),
        }
    }

    /// [`Waits::wait`] of what continues when its time has passed: `None` then.
    pub(crate) fn within<T>(&self, wait: impl FnOnce() -> Result<T>) -> std::result::Result<Option<T>, Box<Failure>> {
        match self.interruptible(wait) {
            (Ok(all), _) => Ok(Some(all)),
            (Err(error), raised) if error.kind == ErrorKind::Timeout => {
                if raised {
                    Err(interrupted(error))
                } else {
                    Ok(None)
                }
            }
            (Err(error), _) => Err(error.into()),
        }
    }

    /// Ends the waits in progress.
    pub(crate) fn interrupt(&self) {
        // Not under the lock, which a wait takes that ends.
        let waits = self.0.lock().clone();
        waits.iter().for_each(|wait| wait.raise());
    }
}
