//! Waits that let other threads run and that Ctrl-C ends.

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use crossrail_types::{Error, ErrorKind, Result};
use pyo3::prelude::*;

use crate::errors::{self, OrRaise};

/// Signals are looked at this often.
pub(crate) const SLICE: Duration = Duration::from_millis(100);
/// More than anybody waits; keeps deadlines from overflowing.
const LONGEST: f64 = 1e9;

/// Seconds from Python; `None` stays `None`.
pub(crate) fn seconds(py: Python<'_>, operation: &str, timeout: Option<f64>) -> PyResult<Option<Duration>> {
    match timeout {
        None => Ok(None),
        Some(seconds) if seconds >= 0.0 => Ok(Some(Duration::from_secs_f64(seconds.min(LONGEST)))),
        Some(seconds) => {
            Err(errors::usage(py, operation, format!("a timeout of {seconds} seconds"), "0 or more, or None"))
        }
    }
}

/// Calls `wait` with slices of `limit` until it does not answer `Timeout`.
pub(crate) fn sliced<T: Send>(
    py: Python<'_>,
    limit: Duration,
    wait: impl Fn(Option<Duration>) -> Result<T> + Sync,
) -> PyResult<T> {
    let began = Instant::now();
    loop {
        let left = limit.saturating_sub(began.elapsed());
        match py.detach(|| wait(Some(left.min(SLICE)))) {
            Err(error) if error.kind == ErrorKind::Timeout => {
                py.check_signals()?;
                if left <= SLICE {
                    return Err(error.with_waited(limit)).or_raise(py);
                }
            }
            result => return result.or_raise(py),
        }
    }
}

/// One more look after `waited`, which a timeout then states.
pub(crate) fn concluded<T: Send>(
    py: Python<'_>,
    waited: Duration,
    wait: impl FnOnce(Option<Duration>) -> Result<T> + Send,
) -> PyResult<T> {
    let outcome = py.detach(|| wait(Some(Duration::ZERO)));
    outcome.map_err(|error| error.with_waited(waited)).or_raise(py)
}

/// Runs what cannot be sliced on a thread of its own, so that Ctrl-C can leave it; `undo` gets a result that
/// nobody waits for any more.
pub(crate) fn apart<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T> + Send + 'static,
    undo: impl FnOnce(T) + Send + 'static,
) -> PyResult<T> {
    let (answer, result) = sync_channel(0);
    let spawned = std::thread::Builder::new().name("crossrail-call".to_owned()).spawn(move || {
        if let Err(std::sync::mpsc::SendError(Ok(unwanted))) = answer.send(work()) {
            undo(unwanted);
        }
    });
    spawned.map_err(|error| Error::io("thread", "pthread_create", &error)).or_raise(py)?;
    let mut result = result;
    loop {
        let (next, back) = py.detach(move || (result.recv_timeout(SLICE), result));
        result = back;
        match next {
            Ok(result) => return result.or_raise(py),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Error::new(ErrorKind::Io, "thread", "the thread of this call ended without a result"))
                    .or_raise(py);
            }
        }
    }
}
