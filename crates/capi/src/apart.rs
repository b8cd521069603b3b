//! Calls that cannot be interrupted, on threads of their own: the caller's wait can be.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crossrail_locks::{Condvar, Mutex, signals_blocked};
use crossrail_types::{Error, ErrorKind, Result, interrupt};

use crate::failure::{Failure, interrupted};
use crate::guard::panic_text;
use crate::shared::Shared;

/// The result of a call on its way to the caller.
struct Slot<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

enum State<T> {
    Runs,
    Ended(Result<T>),
    /// The caller was interrupted, and takes no result any more.
    Abandoned,
}

/// Runs `call` on a thread of its own and waits for it; `xrail_worker_interrupt` ends the wait. The call then continues to
/// its own limit, and `unwanted` gets what it results in.
pub(crate) fn call_apart<T: Send + 'static>(
    worker: &Arc<Shared>,
    operation: &'static str,
    call: impl FnOnce(&crossrail::Worker) -> Result<T> + Send + 'static,
    unwanted: impl FnOnce(T) + Send + 'static,
) -> std::result::Result<T, Box<Failure>> {
    let slot = Arc::new(Slot { state: Mutex::new(State::Runs), changed: Condvar::new() });
    let (theirs, native) = (Arc::clone(&slot), worker.native.clone());
    let thread = move || {
        let result = catch_unwind(AssertUnwindSafe(|| call(&native))).unwrap_or_else(|panic| {
            native.fail(panic_text(&*panic));
            Err(Error::new(ErrorKind::Closed, operation, "a bug in Crossrail"))
        });
        let mut state = theirs.state.lock();
        if !matches!(*state, State::Abandoned) {
            *state = State::Ended(result);
            return theirs.changed.notify_all();
        }
        drop(state);
        if let Ok(made) = result {
            unwanted(made);
        }
    };
    let builder = std::thread::Builder::new().name(format!("crossrail-{operation}"));
    signals_blocked(|| builder.spawn(thread)).map_err(|error| Error::io(operation, "pthread_create", &error))?;
    let (result, _) = worker.interruptible(|| Ok(await_end(&slot)));
    match result? {
        Some(result) => Ok(result?),
        None => Err(interrupted(Error::new(ErrorKind::Timeout, operation, "the call has not returned"))),
    }
}

/// The result; `None` when the wait was interrupted.
fn await_end<T: Send + 'static>(slot: &Arc<Slot<T>>) -> Option<Result<T>> {
    let _sleeping = interrupt::sleeping(|| {
        let slot = Arc::clone(slot);
        move || slot.changed.notify_all()
    });
    let mut state = slot.state.lock();
    loop {
        match std::mem::replace(&mut *state, State::Runs) {
            State::Ended(result) => return Some(result),
            _ if interrupt::raised() => {
                *state = State::Abandoned;
                return None;
            }
            _ => slot.changed.wait(&mut state),
        }
    }
}
