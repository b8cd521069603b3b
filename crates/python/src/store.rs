//! The built-in store, alone in a process.

use crossrail_control as control;
use pyo3::prelude::*;

use crate::context::Context;
use crate::errors::OrRaise;
use crate::lifecycle::Detached;

/// The built-in store, serving from threads of its own until it is closed: StoreServer(context, "127.0.0.1:0").
///
/// Beyond loopback a secret is required (CROSSRAIL_SECRET). As a context manager it is closed at the end.
///
/// Raises ConfigError (beyond loopback without a secret), UsageError (no address, or a port in use), IoError.
#[pyclass(module = "crossrail._native", frozen)]
pub(crate) struct StoreServer(Detached<control::StoreServer>);

#[pymethods]
impl StoreServer {
    #[new]
    fn new(context: &Bound<'_, Context>, listen: &str) -> PyResult<StoreServer> {
        let py = context.py();
        let settings = context.get().native().settings();
        let server = py.detach(|| control::StoreServer::start(listen, settings)).or_raise(py)?;
        Ok(StoreServer(Detached::new(server)))
    }

    /// Where it listens, as CROSSRAIL_STORE has it: `tcp://host:port`.
    #[getter]
    fn address(&self) -> String {
        self.0.address()
    }

    /// Ends it; its clients see that it is unreachable. A second call does nothing.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.stop());
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (kind, value, traceback, /))]
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: Option<&Bound<'_, PyAny>>,
        value: Option<&Bound<'_, PyAny>>,
        traceback: Option<&Bound<'_, PyAny>>,
    ) {
        let _ = (kind, value, traceback);
        self.close(py);
    }

    fn __repr__(&self) -> String {
        format!("<crossrail.StoreServer {}>", self.address())
    }
}
