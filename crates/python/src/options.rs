//! Sizes and the settings reference, as the engine reads them.

use crossrail_types::{self as types, Settings};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::context::rows;
use crate::errors::OrRaise;

/// Every setting: its environment variable, keyword, accepted form, default and meaning, in the order of declaration.
#[pyfunction]
pub(crate) fn settings_reference(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
    rows(py, Settings::reference(), |row: &Bound<'_, PyDict>, setting| {
        row.set_item("name", setting.name)?;
        row.set_item("field", setting.field)?;
        row.set_item("accepts", setting.accepts)?;
        row.set_item("default", setting.default)?;
        row.set_item("doc", setting.doc)
    })
}

/// Bytes from `4096`, `64K`, `2M`, `1G` (powers of two). Raises UsageError naming the accepted form.
#[pyfunction]
pub(crate) fn parse_size(py: Python<'_>, text: &str) -> PyResult<u64> {
    types::parse_size(text).or_raise(py)
}

/// Several sizes: `1:4M` doubles from one to the other, `1,2,64K` lists. Raises UsageError naming the accepted forms.
#[pyfunction]
pub(crate) fn parse_sizes(py: Python<'_>, text: &str) -> PyResult<Vec<u64>> {
    types::parse_sizes(text).or_raise(py)
}

/// Bytes as people write them: 65536 is `64K`.
#[pyfunction]
pub(crate) fn format_size(nbytes: u64) -> String {
    types::format_size(nbytes)
}
