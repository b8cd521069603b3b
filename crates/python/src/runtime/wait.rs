//! Waits that let other Python threads run, and that signals end at once.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossrail_types::{Error, ErrorKind, Result, interrupt};
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

/// Runs `work`, which does not support [`interrupt`], on its own thread, so that a signal can end the wait. The work
/// then continues in the background, and its result is dropped.
pub(crate) fn on_own_thread<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> PyResult<T> {
    let oneshot = Arc::new(Oneshot { result: Mutex::new(None), ready: Condvar::new() });
    let sender = OneshotSender(Arc::clone(&oneshot));
    let spawned = std::thread::Builder::new().name("crossrail-call".to_owned()).spawn(move || {
        sender.0.put(work());
    });
    spawned.map_err(|error| Error::io("thread", "pthread_create", &error)).or_raise(py)?;
    bounded(py, FOREVER, |left| oneshot.wait(left.unwrap_or(FOREVER)))?.or_raise(py)
}

/// One-shot channel for the result of a thread.
struct Oneshot<T> {
    result: Mutex<Option<Result<T>>>,
    ready: Condvar,
}

/// Sender of an [`Oneshot`]; dropped by a panicking thread it sends an error.
struct OneshotSender<T: Send + 'static>(Arc<Oneshot<T>>);

impl<T: Send + 'static> Drop for OneshotSender<T> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.put(Err(Error::new(ErrorKind::Io, "thread", "the thread of this call panicked")));
        }
    }
}

impl<T: Send + 'static> Oneshot<T> {
    fn lock(&self) -> MutexGuard<'_, Option<Result<T>>> {
        self.result.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, result: Result<T>) {
        *self.lock() = Some(result);
        self.ready.notify_all();
    }

    /// The result, whatever it is; `Timeout` after `limit`, or when the wait is interrupted.
    fn wait(self: &Arc<Self>, limit: Duration) -> Result<Result<T>> {
        let deadline = Instant::now() + limit;
        let _sleeping = interrupt::sleeping(|| {
            let oneshot = Arc::clone(self);
            move || oneshot.ready.notify_all()
        });
        let mut result = self.lock();
        loop {
            if let Some(result) = result.take() {
                return Ok(result);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || interrupt::raised() {
                return Err(Error::new(ErrorKind::Timeout, "thread", "the call has not returned"));
            }
            result = self.ready.wait_timeout(result, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
