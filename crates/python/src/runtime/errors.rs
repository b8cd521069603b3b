//! Engine errors as the classes of `crossrail.errors`.

use crate::runtime::dicts::set_fields;
use crossrail_types::{Error, ErrorKind};
use pyo3::exceptions::{PyException, PyTypeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

use super::gate::Pass;

fn class_name(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Usage => "UsageError",
        ErrorKind::Config => "ConfigError",
        ErrorKind::Unreachable => "UnreachableError",
        ErrorKind::Refused => "RefusedError",
        ErrorKind::Mismatch => "MismatchError",
        ErrorKind::Timeout => "TimeoutError",
        ErrorKind::PeerDead => "PeerDeadError",
        ErrorKind::Truncated => "TruncatedError",
        ErrorKind::Cancelled => "CancelledError",
        ErrorKind::Region => "RegionError",
        ErrorKind::Exhausted => "ExhaustedError",
        ErrorKind::Unsupported => "UnsupportedError",
        ErrorKind::Io => "IoError",
        ErrorKind::Protocol => "ProtocolError",
        ErrorKind::Closed => "ClosedError",
        _ => "CrossrailError",
    }
}

/// Converts an engine error to the matching `crossrail.errors` exception.
#[cold]
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    // The class is Python code.
    let _pass = Pass::enter(py);
    build(py, error).unwrap_or_else(|problem| problem)
}

fn build(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = MODULE.get_or_try_init(py, || py.import("crossrail.errors").map(Bound::unbind))?.bind(py);
    let attributes = PyDict::new(py);
    attributes.set_item("reason", error.reason.map(|reason| reason.name()))?;
    set_fields!(attributes, error; operation, detail, peer, lane, progress);
    attributes.set_item("waited", error.waited.map(|waited| waited.as_secs_f64()))?;
    attributes.set_item("hint", &error.hint)?;
    let exception = module.getattr(class_name(error.kind))?.call((error.to_string(),), Some(&attributes))?;
    Ok(PyErr::from_value(exception))
}

/// Engine results as Python results.
pub(crate) trait OrRaise<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for crossrail_types::Result<T> {
    #[inline]
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| raise(py, &error))
    }
}

/// A UsageError.
pub(crate) fn usage(py: Python<'_>, operation: &str, detail: impl Into<String>, hint: &str) -> PyErr {
    raise(py, &Error::new(ErrorKind::Usage, operation, detail).with_hint(hint))
}

/// Whether an exception is a UsageError.
pub(crate) fn is_usage(py: Python<'_>, error: &PyErr) -> bool {
    error.get_type(py).name().is_ok_and(|name| name == class_name(ErrorKind::Usage))
}

/// An exception at converting an argument, with a text that names it, and its part, as `local_index[2]`. Other
/// exceptions than TypeError and UsageError are passed on unchanged.
#[cold]
pub(crate) fn in_argument(py: Python<'_>, operation: &str, place: &str, error: PyErr) -> PyErr {
    let better = if is_usage(py, &error) {
        let value = error.value(py);
        let text = |name: &str| value.getattr(name).and_then(|text| text.extract::<String>()).unwrap_or_default();
        usage(py, operation, format!("{place}: {}", text("detail")), &text("hint"))
    } else if error.is_instance_of::<PyTypeError>(py) {
        PyTypeError::new_err(format!("{operation}: {place}: {}", error.value(py)))
    } else {
        return error;
    };
    better.set_cause(py, Some(error));
    better
}

/// Converts an exporter's exception to a UsageError with its message. A `BaseException` is passed on unchanged.
pub(crate) fn refused(object: &Bound<'_, PyAny>, operation: &str, refusal: PyErr) -> PyErr {
    let py = object.py();
    if !refusal.is_instance_of::<PyException>(py) {
        return refusal;
    }
    let name = object.get_type().name().map_or_else(|_| "object".to_owned(), |name| name.to_string());
    let error = usage(py, operation, format!("the {name} does not export its memory: {refusal}"), "");
    error.set_cause(py, Some(refusal));
    error
}
