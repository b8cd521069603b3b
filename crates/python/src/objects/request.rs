#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crossrail::Place;
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::receipt::Receipt;
use super::worker::Worker;
use crate::borrow::loan::Call;
use crate::borrow::{place, stream};
use crate::runtime::errors::{self, OrRaise};
use crate::runtime::gate::{self, CallbackPass};
use crate::runtime::lifecycle::Held;
use crate::runtime::wait;

/// An operation in flight. asyncio code may `await` it for its receipt.
///
/// Dropping a request does not cancel the operation: its buffer stays borrowed until the
/// operation is finished.
///
/// Notes
/// -----
/// Thread safety: any thread may use the request.
#[pyclass(module = "crossrail._native", frozen, weakref)]
pub(super) struct Request {
    native: Held<crossrail::Request>,
    worker: Py<Worker>,
    has_callback: AtomicBool,
    /// The GPU whose memory it is about.
    gpu: Option<u32>,
}

impl Request {
    #[inline]
    pub(super) fn new(native: crossrail::Request, worker: Py<Worker>, place: Place) -> Request {
        let gpu = match place {
            Place::Host => None,
            Place::Gpu(ordinal) => Some(ordinal),
        };
        Request { native: Held::new(native), worker, has_callback: AtomicBool::new(false), gpu }
    }
}

#[pymethods]
impl Request {
    /// Make progress once, and return the receipt, or None while the operation is in flight.
    ///
    /// Never blocks. Raises the error of the operation if it failed.
    fn test(&self, py: Python<'_>) -> PyResult<Option<Receipt>> {
        let _call = Call::enter(py);
        let outcome =
            if self.native.is_done() { self.native.test() } else { gate::detached(py, || self.native.test()) };
        outcome.transpose().or_raise(py).map(|receipt| receipt.map(Receipt::from))
    }

    /// Wait until the operation is finished.
    ///
    /// Parameters
    /// ----------
    /// timeout : float, optional
    ///     Maximum seconds to wait; CROSSRAIL_TIMEOUT by default.
    ///
    /// Returns
    /// -------
    /// Receipt
    ///
    /// Raises
    /// ------
    /// TimeoutError
    ///     The operation is still in flight; the text says how far it is. Wait again, or cancel it.
    /// CrossrailError
    ///     The error of the operation.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Receipt> {
        let _call = Call::enter(py);
        if self.native.is_done()
            && let Some(outcome) = self.native.test()
        {
            return outcome.map(Receipt::from).or_raise(py);
        }
        let limit = match wait::seconds(py, "wait", timeout)? {
            Some(limit) => limit,
            None => self.worker.get().native_timeout(),
        };
        wait::bounded(py, limit, |left| self.native.wait(left)).map(Receipt::from)
    }

    /// Make a stream wait for the operation, without blocking the host.
    ///
    /// Work that is enqueued in the stream from now on runs once the request is finished,
    /// successfully or not; `test` tells which.
    ///
    /// Parameters
    /// ----------
    /// stream
    ///     A raw handle, or an object with ``cuda_stream`` or ``__cuda_stream__``.
    /// device : optional
    ///     The GPU of the stream, if neither the stream nor the buffer of the request has it.
    ///
    /// Raises
    /// ------
    /// UsageError
    ///     The stream belongs to another GPU, or is being captured (capture `Mapped.put` instead).
    ///
    /// Notes
    /// -----
    /// Something must make progress meanwhile, such as the worker's background thread. CUDA loads
    /// a kernel at its first launch and may then wait for the whole GPU: launch kernels that are
    /// to run behind the wait once before it, or set CUDA_MODULE_LOADING=EAGER.
    #[pyo3(signature = (stream, *, device = None))]
    fn wait_on(&self, stream: &Bound<'_, PyAny>, device: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let py = stream.py();
        let _call = Call::enter(py);
        let given = match place::parse(device)? {
            Place::Gpu(ordinal) => Some(ordinal),
            Place::Host => None,
        };
        let Some(stream) = stream::parse(Some(stream), "wait_on")? else {
            return Err(errors::usage(py, "wait_on", "no stream", "pass a raw handle or a stream object"));
        };
        let Some(ordinal) = given.or(stream.ordinal).or(self.gpu) else {
            return Err(errors::usage(py, "wait_on", "the GPU of the stream is unknown", "pass device=\"cuda:0\""));
        };
        // SAFETY: that the stream is alive is the documented rule for callers.
        gate::detached(py, || unsafe { self.native.wait_on(stream.handle, ordinal) }).or_raise(py)
    }

    /// Cancel the operation at both ends.
    ///
    /// The request finishes with CancelledError unless it is finished already. Until then its
    /// buffer stays borrowed.
    fn cancel(&self, py: Python<'_>) {
        let _call = Call::enter(py);
        gate::detached(py, || self.native.cancel());
    }

    /// Return whether the operation is finished, without making progress.
    fn is_done(&self, py: Python<'_>) -> bool {
        let _call = Call::enter(py);
        self.native.is_done()
    }

    /// Call ``callback(request)`` once the operation is finished, at once if it already is.
    ///
    /// Parameters
    /// ----------
    /// callback : callable
    ///     Runs on the thread that completes the operation. `test` then returns the receipt or
    ///     raises. The callback may start operations but must not wait for any. Exceptions that
    ///     it raises go to ``sys.unraisablehook``.
    ///
    /// Raises
    /// ------
    /// UsageError
    ///     The request already has a callback.
    fn on_complete(slf: &Bound<'_, Self>, callback: Py<PyAny>) -> PyResult<()> {
        let py = slf.py();
        if !callback.bind(py).is_callable() {
            return Err(errors::usage(py, "on_complete", "the callback is not callable", "pass a function"));
        }
        let request = slf.get();
        if request.has_callback.swap(true, Ordering::Relaxed) {
            return Err(errors::usage(py, "on_complete", "the request has a callback", "one callback per request"));
        }
        let _call = Call::enter(py);
        let itself = slf.clone().unbind();
        gate::detached(py, || {
            request.native.on_complete(move |_outcome| {
                if let Some(_pass) = CallbackPass::offered() {
                    Python::try_attach(|py| run(py, &callback, itself));
                }
            });
        });
        Ok(())
    }

    /// Wait for the receipt in asyncio, at most CROSSRAIL_TIMEOUT of the context.
    ///
    /// Cancelling the task that awaits cancels the request.
    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let _call = Call::enter(slf.py());
        slf.py().import("crossrail._async")?.call_method1("finish", (slf,))?.call_method0("__await__")
    }

    /// Concludes a wait in asyncio that took `waited` seconds.
    fn _conclude(&self, py: Python<'_>, waited: f64) -> PyResult<Receipt> {
        let _call = Call::enter(py);
        let waited = wait::seconds(py, "wait", Some(waited))?.unwrap_or_default();
        wait::poll_finished(py, waited, |left| self.native.wait(left)).map(Receipt::from)
    }

    /// The worker of the request.
    #[getter]
    fn worker(&self, py: Python<'_>) -> Py<Worker> {
        self.worker.clone_ref(py)
    }

    fn __repr__(&self, py: Python<'_>) -> &'static str {
        let _call = Call::enter(py);
        if self.native.is_done() { "<crossrail.Request, finished>" } else { "<crossrail.Request, in flight>" }
    }
}

fn run(py: Python<'_>, callback: &Py<PyAny>, request: Py<Request>) {
    let callback = callback.bind(py);
    if let Err(error) = callback.call1((request,)) {
        error.write_unraisable(py, Some(callback));
    }
}

/// Wait until all requests are finished.
///
/// Parameters
/// ----------
/// requests : iterable of Request
/// timeout : float, optional
///     Maximum seconds to wait for all of them together.
///
/// Returns
/// -------
/// list of Receipt
///     In the order of `requests`.
///
/// Raises
/// ------
/// TimeoutError
///     Some are still in flight.
/// CrossrailError
///     The error of the first failed request, in order; the others continue.
#[pyfunction]
#[pyo3(signature = (requests, timeout = None))]
pub(super) fn wait_all<'py>(
    py: Python<'py>,
    requests: &Bound<'py, PyAny>,
    timeout: Option<f64>,
) -> PyResult<Bound<'py, PyList>> {
    let _call = Call::enter(py);
    let began = Instant::now();
    let receipts = PyList::empty(py);
    for request in requests.try_iter()? {
        let request = request?;
        let left = timeout.map(|seconds| (seconds - began.elapsed().as_secs_f64()).max(0.0));
        let left = if timeout.is_some_and(|seconds| seconds < 0.0) { timeout } else { left };
        receipts.append(request.cast::<Request>()?.get().wait(py, left)?)?;
    }
    Ok(receipts)
}
