//! `crossrail.Notice`: a tuple with two more attributes, as `os.stat_result` is one.
#![allow(unsafe_code)]

use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyString, PyType};

/// A notice from the engine as an object for Python.
pub(super) fn of<'py>(py: Python<'py>, notice: &crossrail::Notice) -> PyResult<Bound<'py, PyAny>> {
    let fields = [
        PyString::new(py, &notice.peer).into_any(),
        PyBytes::new(py, &notice.bytes).into_any(),
        notice.endpoint.into_pyobject(py)?.into_any(),
        notice.generation.into_pyobject(py)?.into_any(),
    ];
    // SAFETY: the type is a struct sequence of as many fields as are set, each once, by a reference that it takes over.
    unsafe {
        let item = ffi::PyStructSequence_New(notice_type(py)?.as_type_ptr());
        let item = Bound::from_owned_ptr_or_err(py, item)?;
        for (place, field) in (0..).zip(fields) {
            ffi::PyStructSequence_SetItem(item.as_ptr(), place, field.into_ptr());
        }
        Ok(item)
    }
}

/// The class `crossrail.Notice`.
pub(super) fn notice_type(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    static TYPE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    TYPE.get_or_try_init(py, || make_type(py)).map(|class| class.bind(py))
}

fn make_type(py: Python<'_>) -> PyResult<Py<PyType>> {
    let field = |name: &'static std::ffi::CStr, doc: &'static std::ffi::CStr| ffi::PyStructSequence_Field {
        name: name.as_ptr(),
        doc: doc.as_ptr(),
    };
    let mut fields = [
        field(c"peer", c"Name of the peer, which several may have."),
        field(c"data", c"The bytes."),
        field(c"endpoint", c"Number of the endpoint that received it, for `Worker.endpoint`."),
        field(
            c"generation",
            c"Number of the peer's worker, as `Description.generation`; 0 once its endpoint has ended.",
        ),
        ffi::PyStructSequence_Field { name: ptr::null(), doc: ptr::null() },
    ];
    let mut desc = ffi::PyStructSequence_Desc {
        name: c"crossrail._native.Notice".as_ptr(),
        doc: c"A notice of a peer: the tuple (peer, data), and the numbers of endpoint and worker.".as_ptr(),
        fields: fields.as_mut_ptr(),
        n_in_sequence: 2,
    };
    // SAFETY: the description and its fields are valid for the call, and end with an empty one; texts are static.
    let class = unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyStructSequence_NewType(&raw mut desc).cast())? };
    Ok(class.cast_into::<PyType>().map_err(PyErr::from)?.unbind())
}
