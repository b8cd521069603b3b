//! Listeners for metadata, and requests to them: for the packages that exchange descriptions by address and port.

use std::sync::Mutex;
use std::time::Instant;

use crossrail_control::metadata;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::context::Context;
use crate::borrow::loan::Call;
use crate::runtime::errors::OrRaise;
use crate::runtime::lifecycle::Detached;
use crate::runtime::{gate, wait};

/// Listens for requests of processes that know this one's secret or, without one, of this user on loopback.
///
/// Parameters
/// ----------
/// context : Context
///     Settings. With CROSSRAIL_SECRET it listens at all addresses, otherwise on loopback.
/// port : int
///     0 means a free one.
///
/// Raises
/// ------
/// UsageError
///     The port is in use.
/// ConfigError, IoError, ExhaustedError
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct MetadataListener(Detached<metadata::MetadataListener>);

#[pymethods]
impl MetadataListener {
    #[new]
    fn new(context: &Bound<'_, Context>, port: u16) -> PyResult<MetadataListener> {
        let py = context.py();
        let _call = Call::enter(py);
        let settings = context.get().native().settings();
        let listener = gate::detached(py, || metadata::MetadataListener::start(settings, port)).or_raise(py)?;
        Ok(MetadataListener(Detached::new(listener)))
    }

    /// The addresses at which it listens, with their ports.
    #[getter]
    fn addresses(&self) -> Vec<String> {
        self.0.addresses().iter().map(ToString::to_string).collect()
    }

    /// The port at which it listens.
    #[getter]
    fn port(&self) -> u16 {
        self.0.addresses().first().map_or(0, std::net::SocketAddr::port)
    }

    /// Wait for the next request. Raises ClosedError once it is closed.
    fn next(&self, py: Python<'_>) -> PyResult<MetadataInquiry> {
        let _call = Call::enter(py);
        let inquiry = wait::bounded(py, wait::FOREVER, |left| self.0.next(left.unwrap_or(wait::FOREVER)))?;
        Ok(MetadataInquiry { operation: inquiry.operation, inquiry: Mutex::new(Some(inquiry)) })
    }

    /// Stop listening. A second call does nothing.
    fn close(&self, py: Python<'_>) {
        let _call = Call::enter(py);
        gate::detached(py, || self.0.close());
    }

    fn __repr__(&self) -> String {
        format!("<crossrail.MetadataListener at {}>", self.addresses().join(", "))
    }
}

/// A request, to be answered or refused once. Its client waits for at most five seconds.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct MetadataInquiry {
    #[pyo3(get)]
    operation: u8,
    inquiry: Mutex<Option<metadata::Inquiry>>,
}

impl MetadataInquiry {
    fn take(&self) -> Option<metadata::Inquiry> {
        self.inquiry.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take()
    }
}

#[pymethods]
impl MetadataInquiry {
    /// The bytes of the request; empty once it was answered.
    fn body<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let inquiry = self.inquiry.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        PyBytes::new(py, inquiry.as_ref().map_or(&[], |inquiry| &inquiry.body))
    }

    /// Answer with bytes.
    fn answer(&self, body: Vec<u8>) {
        if let Some(inquiry) = self.take() {
            inquiry.answer(Ok(body));
        }
    }

    /// Answer with the reason for which the request is refused.
    fn refuse(&self, why: String) {
        if let Some(inquiry) = self.take() {
            inquiry.answer(Err(why));
        }
    }
}

/// Send a request to a `MetadataListener`, and return the answer.
///
/// Parameters
/// ----------
/// context : Context
///     Settings, of which the secret counts.
/// host : str
///     A name or an address; one of this machine's own is reached over loopback.
/// port, operation : int
/// body : bytes
/// timeout : float
///     Maximum seconds to wait.
///
/// Raises
/// ------
/// UnreachableError, TimeoutError
///     No process listens there, or it does not answer in time.
/// RefusedError
///     The secrets or users differ, or the request is refused.
/// MismatchError, ProtocolError
///     Another version, or another kind of listener.
#[pyfunction]
pub(super) fn ask_metadata<'py>(
    context: &Bound<'py, Context>,
    host: String,
    port: u16,
    operation: u8,
    body: Vec<u8>,
    timeout: f64,
) -> PyResult<Bound<'py, PyBytes>> {
    let py = context.py();
    let _call = Call::enter(py);
    let limit = wait::seconds(py, "metadata", Some(timeout))?.unwrap_or_default();
    let settings = context.get().native().settings().clone();
    let answer = wait::on_own_thread(py, move || {
        metadata::ask(&settings, &host, port, operation, &body, Instant::now() + limit)
    });
    answer.map(|answer| PyBytes::new(py, &answer))
}
