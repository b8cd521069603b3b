use crossrail::{Awaited as NativeAwaited, Outcome};
use pyo3::prelude::*;

/// A wait for a signal that was enqueued in a stream. Created by `Memory.await_signal`.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct Awaited(NativeAwaited);

impl From<NativeAwaited> for Awaited {
    fn from(native: NativeAwaited) -> Awaited {
        Awaited(native)
    }
}

#[pymethods]
impl Awaited {
    /// State of the wait: ``pending``; ``reached``; or ``timed_out``, if the timeout passed first and the stream continued.
    ///
    /// For a wait in a captured graph it is the state of the latest replay.
    #[getter]
    fn outcome(&self) -> &'static str {
        match self.0.outcome() {
            Outcome::Pending => "pending",
            Outcome::Reached => "reached",
            Outcome::TimedOut => "timed_out",
        }
    }

    fn __repr__(&self) -> String {
        format!("<crossrail.Awaited, {}>", self.outcome())
    }
}
