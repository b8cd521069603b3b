//! Conversion of results to Python dictionaries.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

/// Sets items of a dictionary to the fields of the same names.
macro_rules! set_fields {
    ($dict:expr, $from:expr; $($field:ident),+) => {
        $( $dict.set_item(stringify!($field), &$from.$field)?; )+
    };
}
pub(crate) use set_fields;

/// A list of dictionaries.
pub(crate) fn rows<'py, T>(
    py: Python<'py>,
    items: impl IntoIterator<Item = T>,
    fill: impl Fn(&Bound<'py, PyDict>, T) -> PyResult<()>,
) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for item in items {
        let row = PyDict::new(py);
        fill(&row, item)?;
        list.append(row)?;
    }
    Ok(list)
}

/// Number of copies between a GPU and memory of peers on this machine, by what made them: copy engines.
pub(crate) fn copied_dict<'py>(py: Python<'py>, copied: u64) -> PyResult<Bound<'py, PyDict>> {
    let all = PyDict::new(py);
    all.set_item("by_engine", copied)?;
    Ok(all)
}
