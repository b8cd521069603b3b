//! Unsigned numbers of fixed width, as arguments.

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;

use crate::errors;

/// An int of 64 bits: a tag, a mask or an offset. Raises UsageError beyond them.
#[derive(Clone, Copy)]
pub(crate) struct U64(pub(crate) u64);

/// An int of 32 bits: an immediate. Raises UsageError beyond them.
#[derive(Clone, Copy)]
pub(crate) struct U32(pub(crate) u32);

impl<'py> FromPyObject<'py> for U64 {
    fn extract_bound(object: &Bound<'py, PyAny>) -> PyResult<U64> {
        object.extract().map(U64).map_err(|error| fits(object, 64, error))
    }
}

impl<'py> FromPyObject<'py> for U32 {
    fn extract_bound(object: &Bound<'py, PyAny>) -> PyResult<U32> {
        object.extract().map(U32).map_err(|error| fits(object, 32, error))
    }
}

#[cold]
fn fits(object: &Bound<'_, PyAny>, bits: u32, error: PyErr) -> PyErr {
    let py = object.py();
    if !error.is_instance_of::<PyOverflowError>(py) {
        return error;
    }
    let value = object.str().map_or_else(|_| "the number".to_owned(), |text| text.to_string());
    let hint = format!("pass a number from 0 to 2**{bits} - 1");
    errors::usage(py, "argument", format!("{value} is not an unsigned number of {bits} bits"), &hint)
}
