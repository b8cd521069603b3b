//! Waits that let other Python threads run, and that signals end at once.

use std::time::{Duration, Instant};

use crossrail_locks::Apart;
use crossrail_types::{Error, ErrorKind, Result};
use pyo3::prelude::*;

use super::errors::{self, OrRaise};
use super::gate::{self, Pass};
use super::signals::Watch;

/// Waits shorter than this do not watch for signals, which costs two Python calls.
const SHORT: Duration = Duration::from_millis(2);
/// Longer than any wait, in seconds; keeps deadlines from overflowing.
const LONGEST: f64 = 1e9;
/// The limit of waits that have none.
pub(crate) const FOREVER: Duration = Duration::from_secs(LONGEST as u64);

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

/// Waits for at most `limit`; see [`outcome`].
pub(crate) fn bounded<T: Send>(
    py: Python<'_>,
    limit: Duration,
    wait: impl Fn(Option<Duration>) -> Result<T> + Sync,
) -> PyResult<T> {
    let (result, _pass) = answer(py, limit, wait)?;
    result.or_raise(py)
}

/// Calls `wait` with the time that is left until it answers anything but `Timeout`, or `limit` has passed.
///
/// On the main thread a signal that Python has a handler for ends the wait, and the handler runs. What it raises is the
/// outer error. If it raises nothing, the wait goes on to its deadline. `wait` must take part in [`interrupt`], and may
/// be called again after a `Timeout`.
pub(crate) fn outcome<T: Send>(
    py: Python<'_>,
    limit: Duration,
    wait: impl Fn(Option<Duration>) -> Result<T> + Sync,
) -> PyResult<Result<T>> {
    Ok(answer(py, limit, wait)?.0)
}

/// As [`outcome`]; with the pass under which the caller may raise it.
fn answer<T: Send>(
    py: Python<'_>,
    limit: Duration,
    wait: impl Fn(Option<Duration>) -> Result<T> + Sync,
) -> PyResult<(Result<T>, Pass)> {
    let began = Instant::now();
    let done = |result: &Result<T>| {
        !matches!(result, Err(error) if error.kind == ErrorKind::Timeout) || began.elapsed() >= limit
    };
    let total = |result: Result<T>| {
        // One that is no timeout may have ended long before.
        let timed_out = |error: &Error| error.kind == ErrorKind::Timeout && error.waited.is_some();
        result.map_err(|error| if timed_out(&error) { error.with_waited(limit) } else { error })
    };
    let (result, pass) = gate::detached_until(py, || wait(Some(limit.min(SHORT))));
    if done(&result) {
        return Ok((total(result), pass));
    }
    let left = || Some(limit.saturating_sub(began.elapsed()));
    let signals = Watch::start(py)?;
    drop(pass);
    let Some(signals) = signals else {
        let (result, pass) = gate::detached_until(py, || wait(left()));
        return Ok((total(result), pass));
    };
    loop {
        let interrupt = signals.interrupt();
        interrupt.clear();
        // Handle signals that arrived before the watch started, or that ended the last wait.
        py.check_signals()?;
        let (result, pass) = gate::detached_until(py, || interrupt.run(|| wait(left())));
        if done(&result) || !interrupt.is_raised() {
            return Ok((total(result), pass));
        }
    }
}

/// Polls once, after the caller has waited elsewhere for `waited`; errors report that time.
pub(crate) fn poll_finished<T: Send>(
    py: Python<'_>,
    waited: Duration,
    wait: impl FnOnce(Option<Duration>) -> Result<T> + Send,
) -> PyResult<T> {
    let (outcome, _pass) = gate::detached_until(py, || wait(Some(Duration::ZERO)));
    outcome.map_err(|error| error.with_waited(waited)).or_raise(py)
}

/// Runs `work`, which does not support [`interrupt`](crossrail_types::interrupt), on its own thread, so that a signal can
/// end the wait. The work then continues in the background, and its result is dropped.
pub(crate) fn on_own_thread<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> PyResult<T> {
    let apart = Apart::start("call", work).or_raise(py)?;
    bounded(py, FOREVER, |left| apart.wait(left))?.or_raise(py)
}
