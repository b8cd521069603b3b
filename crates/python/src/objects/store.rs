//! The built-in store, alone in a process.

use crossrail_control as control;
use pyo3::prelude::*;

use super::context::Context;
use crate::borrow::loan::Call;
use crate::runtime::errors::OrRaise;
use crate::runtime::gate;
use crate::runtime::lifecycle::Detached;

/// The built-in store, served by threads of its own until it is closed.
///
/// As a context manager, it is closed at the end of the block.
///
/// Parameters
/// ----------
/// context : Context
///     Settings. Beyond loopback CROSSRAIL_SECRET is required.
/// listen : str
///     `host:port`; port 0 means a free one.
///
/// Raises
/// ------
/// ConfigError
///     It listens beyond loopback without a secret.
/// UsageError
///     The address does not parse, or its port is in use.
/// IoError
///     The system refuses a socket.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct StoreServer(Detached<control::StoreServer>);

#[pymethods]
impl StoreServer {
    #[new]
    fn new(context: &Bound<'_, Context>, listen: &str) -> PyResult<StoreServer> {
        let py = context.py();
        let _call = Call::enter(py);
        let settings = context.get().native().settings();
        let server = gate::detached(py, || control::StoreServer::start(listen, settings)).or_raise(py)?;
        Ok(StoreServer(Detached::new(server)))
    }

    /// Its address for CROSSRAIL_STORE: `tcp://host:port`.
    #[getter]
    fn address(&self) -> String {
        self.0.address()
    }

    /// Stop the store: its clients find it unreachable. A second call does nothing.
    fn close(&self, py: Python<'_>) {
        let _call = Call::enter(py);
        gate::detached(py, || self.0.stop());
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
