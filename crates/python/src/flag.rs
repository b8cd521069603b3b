//! Arguments that are true or false.

use pyo3::prelude::*;

/// Any object, by its truth: programs pass ints where bools are meant.
#[derive(Clone, Copy)]
pub(crate) struct Flag(pub(crate) bool);

impl<'py> FromPyObject<'py> for Flag {
    fn extract_bound(object: &Bound<'py, PyAny>) -> PyResult<Flag> {
        Ok(Flag(object.is_truthy()?))
    }
}
