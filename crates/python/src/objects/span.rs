//! Memory exposed to NumPy without a copy, and tensors borrowed through DLPack.
#![allow(unsafe_code)]

use std::any::Any;
use std::sync::Arc;

use crossrail_types::{Error, ErrorKind};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use super::operand;
use crate::borrow::dlpack;
use crate::borrow::layout::Owner;
use crate::borrow::lent::{self, Use};
use crate::borrow::loan::Call;
use crate::runtime::errors;

/// Bytes of another owner, kept alive by this object. `numpy.asarray(span)` is an array of them (uint8) without
/// a copy, which keeps the object alive.
#[pyclass(module = "crossrail._native", name = "_Span", frozen)]
pub(crate) struct Span {
    /// Stored as an integer, since it is never dereferenced here.
    address: usize,
    len: usize,
    _keep: Box<dyn Any + Send + Sync>,
}

impl Span {
    /// # Safety
    /// `ptr` is valid for reading and writing `len` bytes as long as `keep` lives.
    pub(crate) unsafe fn new(ptr: *const u8, len: usize, keep: impl Any + Send + Sync) -> Span {
        Span { address: ptr as usize, len, _keep: Box::new(keep) }
    }
}

impl<T: Copy + Send + Sync + 'static> From<Vec<T>> for Span {
    /// Numbers.
    fn from(numbers: Vec<T>) -> Span {
        let (ptr, len) = (numbers.as_ptr().cast(), size_of_val(&numbers[..]));
        // SAFETY: the vector's buffer stays where it is when the vector moves, and nobody else uses it.
        unsafe { Span::new(ptr, len, numbers) }
    }
}

#[pymethods]
impl Span {
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let described = PyDict::new(py);
        described.set_item("version", 3)?;
        described.set_item("typestr", "|u1")?;
        described.set_item("shape", (self.len,))?;
        described.set_item("data", (self.address, false))?;
        Ok(described)
    }

    fn __len__(&self) -> usize {
        self.len
    }
}

/// The memory of a tensor in DLPack's form: its bytes, the name of its dtype as NumPy has it, and its shape.
///
/// Raises UnsupportedError when it isn't on the host, UsageError when it isn't contiguous in C order or can't be written.
#[pyfunction]
pub(super) fn _borrow<'py>(
    object: &Bound<'py, PyAny>,
    operation: &str,
    writable: bool,
) -> PyResult<(Span, String, Bound<'py, PyTuple>)> {
    let py = object.py();
    let _call = Call::enter(py);
    let Some(said) = dlpack::device(object, operation)? else {
        return Err(errors::usage(py, operation, format!("{} has no DLPack", operand::one(object)), ""));
    };
    if let Owner::Gpu(ordinal) = operand::owner(object, said, operation)? {
        let detail = format!("the {} is on cuda:{ordinal}", operand::name(object));
        let error = Error::new(ErrorKind::Unsupported, operation, detail).with_hint("copy it to the host first");
        return Err(errors::raise(py, &error));
    }
    let tensor = operand::tensor(object, said, None, if writable { Use::Write } else { Use::Read }, operation)?;
    let shape = PyTuple::new(py, &tensor.shape)?;
    // SAFETY: valid until the keeper is dropped, says the exporter.
    let span = unsafe { Span::new(tensor.ptr as usize as *const u8, tensor.len, tensor.keep) };
    Ok((span, tensor.dtype.name(), shape))
}

/// GPU memory of a DLPack tensor, and the GPU's ordinal. The exporter makes `stream` wait for its pending work (-1: no
/// synchronization).
///
/// Raises UsageError when it is on the host, isn't contiguous in C order or can't be written.
pub(crate) fn lent_on_gpu(
    object: &Bound<'_, PyAny>,
    operation: &str,
    writable: bool,
    stream: i64,
) -> PyResult<(lent::BorrowedTensor, u32)> {
    let py = object.py();
    let Some(said) = dlpack::device(object, operation)? else {
        return Err(errors::usage(py, operation, format!("{} has no DLPack", operand::one(object)), ""));
    };
    let Owner::Gpu(ordinal) = operand::owner(object, said, operation)? else {
        let detail = format!("the {} is memory of the host", operand::name(object));
        return Err(errors::usage(py, operation, detail, "copy it to the GPU first"));
    };
    let used = if writable { Use::Write } else { Use::Read };
    Ok((operand::tensor(object, said, Some(stream), used, operation)?, ordinal))
}

/// A Python object that holds `keep`.
pub(crate) fn keeper(py: Python<'_>, keep: Arc<dyn Any + Send + Sync>) -> PyResult<Bound<'_, PyAny>> {
    // SAFETY: nobody reads its bytes through the span, which has none.
    Ok(Bound::new(py, unsafe { Span::new(std::ptr::null(), 0, keep) })?.into_any())
}
