#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crossrail::Place;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::errors::{self, OrRaise};
use crate::lent::Call;
use crate::lifecycle;
use crate::receipt::Receipt;
use crate::worker::Worker;
use crate::{place, stream, wait};

/// An operation under way. Any thread may use it; asyncio code may `await` it for its receipt.
///
/// To drop it does not cancel the operation: its buffer stays in use until it is finished.
#[pyclass(module = "crossrail._native", frozen, weakref)]
pub(crate) struct Request {
    native: crossrail::Request,
    worker: Py<Worker>,
    has_callback: AtomicBool,
    /// The GPU whose memory it is about.
    gpu: Option<u32>,
}

impl Request {
    #[inline]
    pub(crate) fn new(native: crossrail::Request, worker: Py<Worker>, place: Place) -> Request {
        let gpu = match place {
            Place::Host => None,
            Place::Gpu(ordinal) => Some(ordinal),
        };
        Request { native, worker, has_callback: AtomicBool::new(false), gpu }
    }
}

#[pymethods]
impl Request {
    /// Makes progress once and returns the receipt, or None while it is under way. Never blocks.
    ///
    /// Raises what the operation failed with.
    fn test(&self, py: Python<'_>) -> PyResult<Option<Receipt>> {
        let _call = Call::enter(py);
        let outcome = if self.native.is_done() { self.native.test() } else { py.detach(|| self.native.test()) };
        outcome.transpose().or_raise(py).map(|receipt| receipt.map(Receipt::from))
    }

    /// Waits until it is finished, at most `timeout` seconds.
    ///
    /// Raises what the operation failed with, and TimeoutError, which says how far it got; the operation goes on then:
    /// wait again or cancel it.
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

    /// Lets a stream wait for it: what is put into the stream from now on runs once the request is finished, well or not
    /// (`test` tells which). Nothing waits here. Something must make progress meanwhile: the worker's background thread does.
    /// CUDA loads a kernel when it is first launched, and may wait for the whole GPU then: launch once, before this, what
    /// is to run behind it (or set CUDA_MODULE_LOADING=EAGER).
    ///
    /// `stream`: a raw handle, or an object with `cuda_stream` or `__cuda_stream__`. `device` is its GPU, where neither the
    /// stream nor the request's buffer says so.
    ///
    /// Raises UsageError: the stream is another GPU's, or is being captured (capture `Mapped.put` instead).
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
            return Err(errors::usage(py, "wait_on", "nothing says whose stream it is", "pass device=\"cuda:0\""));
        };
        // SAFETY: that the stream is alive is the documented rule for callers.
        py.detach(|| unsafe { self.native.wait_on(stream.handle, ordinal) }).or_raise(py)
    }

    /// Asks both ends to stop. The request then finishes with CancelledError, unless it was finished already; until
    /// it has, its buffer stays in use.
    fn cancel(&self, py: Python<'_>) {
        let _call = Call::enter(py);
        py.detach(|| self.native.cancel());
    }

    /// Whether it is finished. Makes no progress.
    fn is_done(&self) -> bool {
        self.native.is_done()
    }

    /// Calls `callback(request)` once the request is finished, at once if it is, on whichever thread sees it finish;
    /// `request.test()` then gives the receipt or raises. What the callback raises goes to `sys.unraisablehook`. It may
    /// start operations; it must not wait for any. One callback per request: a second is a UsageError.
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
        py.detach(|| {
            request.native.on_complete(move |_outcome| {
                if lifecycle::running() {
                    Python::try_attach(|py| run(py, &callback, itself));
                }
            });
        });
        Ok(())
    }

    /// Finished when the request is; its result is the receipt. Bounded by the context's CROSSRAIL_TIMEOUT. When the
    /// awaiting task is cancelled, so is the request.
    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("crossrail._async")?.call_method1("finish", (slf,))?.call_method0("__await__")
    }

    /// The end of a wait that was done elsewhere and took `waited` seconds.
    fn _conclude(&self, py: Python<'_>, waited: f64) -> PyResult<Receipt> {
        let _call = Call::enter(py);
        let waited = wait::seconds(py, "wait", Some(waited))?.unwrap_or_default();
        wait::concluded(py, waited, |left| self.native.wait(left)).map(Receipt::from)
    }

    /// The worker it belongs to.
    #[getter]
    fn worker(&self, py: Python<'_>) -> Py<Worker> {
        self.worker.clone_ref(py)
    }

    fn __repr__(&self) -> &'static str {
        if self.native.is_done() { "<crossrail.Request, finished>" } else { "<crossrail.Request under way>" }
    }
}

fn run(py: Python<'_>, callback: &Py<PyAny>, request: Py<Request>) {
    let callback = callback.bind(py);
    if let Err(error) = callback.call1((request,)) {
        error.write_unraisable(py, Some(callback));
    }
}

/// Waits until all are finished, at most `timeout` seconds in all, and returns their receipts in order.
///
/// Raises what the first failed one (in order) failed with, and TimeoutError; the others go on then.
#[pyfunction]
#[pyo3(signature = (requests, timeout = None))]
pub(crate) fn wait_all<'py>(
    py: Python<'py>,
    requests: &Bound<'py, PyAny>,
    timeout: Option<f64>,
) -> PyResult<Bound<'py, PyList>> {
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
