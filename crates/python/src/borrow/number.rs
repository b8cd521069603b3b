//! Numbers of fixed width and truth values, as arguments.

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use pyo3::types::PyInt;

use crate::runtime::errors;
use crate::runtime::gate::Pass;

/// An int of 64 bits: a tag, a mask or an offset. Raises UsageError beyond them.
#[derive(Clone, Copy)]
pub(crate) struct U64(pub(crate) u64);

/// An int of 32 bits: an immediate. Raises UsageError beyond them.
#[derive(Clone, Copy)]
pub(crate) struct U32(pub(crate) u32);

impl<'py> FromPyObject<'py> for U64 {
    fn extract_bound(object: &Bound<'py, PyAny>) -> PyResult<U64> {
        number(object).map(U64).map_err(|error| fits(object, 64, error))
    }
}

impl<'py> FromPyObject<'py> for U32 {
    fn extract_bound(object: &Bound<'py, PyAny>) -> PyResult<U32> {
        number(object).map(U32).map_err(|error| fits(object, 32, error))
    }
}

fn number<'py, T: FromPyObject<'py>>(object: &Bound<'py, PyAny>) -> PyResult<T> {
    // Anything but an int may have an `__index__` in Python, and arguments are converted before a call is entered.
    let _pass = (!object.is_exact_instance_of::<PyInt>()).then(|| Pass::enter(object.py()));
    object.extract()
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

/// A bool argument that accepts any object by its truth value, since programs also pass ints.
#[derive(Clone, Copy)]
pub(crate) struct Flag(pub(crate) bool);

impl<'py> FromPyObject<'py> for Flag {
    fn extract_bound(object: &Bound<'py, PyAny>) -> PyResult<Flag> {
        Ok(Flag(object.is_truthy()?))
    }
}
