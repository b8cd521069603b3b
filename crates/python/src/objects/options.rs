//! Sizes and the settings reference, as the engine reads them.

use crossrail_types::{self as types, Settings};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::runtime::dicts::{rows, set_fields};
use crate::runtime::errors::OrRaise;

/// Return every setting: environment variable, keyword, accepted form, default and description, in order.
#[pyfunction]
pub(super) fn settings_reference(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
    rows(py, Settings::reference(), |row: &Bound<'_, PyDict>, setting| {
        set_fields!(row, setting; name, field, accepts, default, doc);
        Ok(())
    })
}

/// Parse `text`, a size such as ``4096``, ``64K``, ``2M`` or ``1G`` (powers of two), into bytes.
///
/// Raises UsageError that names the accepted form.
#[pyfunction]
pub(super) fn parse_size(py: Python<'_>, text: &str) -> PyResult<u64> {
    types::parse_size(text).or_raise(py)
}

/// Parse several sizes into bytes.
///
/// `text`: ``1:4M`` doubles from one to the other, ``1,2,64K`` is a list.
///
/// Raises UsageError that names the accepted forms.
#[pyfunction]
pub(super) fn parse_sizes(py: Python<'_>, text: &str) -> PyResult<Vec<u64>> {
    types::parse_sizes(text).or_raise(py)
}

/// Format a size of `nbytes` bytes as text in powers of two: 65536 is ``64K``. Raises nothing.
#[pyfunction]
pub(super) fn format_size(nbytes: u64) -> String {
    types::format_size(nbytes)
}
