//! Exports Crossrail memory through DLPack and `__cuda_array_interface__`: contiguous, in C order.
#![allow(unsafe_code)]

use std::any::Any;
use std::ffi::{CStr, c_void};
use std::sync::Arc;

use crossrail::Place;
use pyo3::exceptions::{PyAttributeError, PyBufferError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use pyo3::{PyClass, ffi};

use super::dlpack::{CUDA, Device, DlTensor, Dtype, HOST, Managed, PLAIN, VERSIONED, Versioned};
use super::loan::Call;

/// Description of memory to export: address, shape, dtype, place, and owner.
#[derive(Clone)]
pub(crate) struct Export {
    /// Stored as an integer so that the struct is `Send` and `Sync`.
    address: usize,
    shape: Vec<i64>,
    dtype: Dtype,
    /// As `__cuda_array_interface__` names it.
    typestr: &'static str,
    place: Place,
    keep: Arc<dyn Any + Send + Sync>,
}

/// Base class of objects that export their memory to other libraries without a copy.
#[pyclass(module = "crossrail._native", name = "_Exporter", subclass, frozen)]
pub(crate) struct Exporter(Export);

impl Exporter {
    /// An object of a class that is derived from this one.
    pub(crate) fn with<T: PyClass<BaseType = Exporter>>(export: Export, derived: T) -> PyClassInitializer<T> {
        PyClassInitializer::from(Exporter(export)).add_subclass(derived)
    }
}

#[pymethods]
impl Exporter {
    /// The device in DLPack's numbering.
    fn __dlpack_device__(&self) -> (i32, i32) {
        self.0.device()
    }

    /// Export the memory as a DLPack capsule for NumPy, PyTorch, CuPy and others, without a copy.
    ///
    /// The memory stays allocated as long as the capsule's consumer. `stream` has no effect: this
    /// library leaves no work queued on memory, and the caller orders that of other streams.
    /// Raises BufferError if another device or a copy is requested.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let _call = Call::enter(py);
        let _ = stream;
        self.0.clone().capsule(py, max_version, dl_device, copy)
    }

    /// Description of GPU memory for other libraries, without a copy (version 3); not available for host memory.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let _call = Call::enter(py);
        self.0.interface(py)
    }
}

/// A tensor as it lies behind a capsule, with what its pointers point to.
struct Holder<T> {
    managed: T,
    shape: Vec<i64>,
    strides: Vec<i64>,
    _keep: Arc<dyn Any + Send + Sync>,
}

/// The two forms of a managed tensor.
trait Form: Sized + 'static {
    const NAME: &'static CStr;

    fn of(tensor: DlTensor) -> Self;
    fn tensor(&mut self) -> &mut DlTensor;
    fn point_to(&mut self, holder: *mut Holder<Self>);

    /// # Safety
    /// `managed` is the tensor of a holder that [`made`] has made, and is used no more.
    unsafe fn holder(managed: *mut Self) -> *mut Holder<Self>;
}

impl Form for Managed {
    const NAME: &'static CStr = PLAIN;

    fn of(tensor: DlTensor) -> Managed {
        Managed { tensor, context: std::ptr::null_mut(), deleter: Some(delete) }
    }

    fn tensor(&mut self) -> &mut DlTensor {
        &mut self.tensor
    }

    fn point_to(&mut self, holder: *mut Holder<Managed>) {
        self.context = holder.cast();
    }

    unsafe fn holder(managed: *mut Managed) -> *mut Holder<Managed> {
        // SAFETY: the caller's promise.
        unsafe { (*managed).context.cast() }
    }
}

impl Form for Versioned {
    const NAME: &'static CStr = VERSIONED;

    fn of(tensor: DlTensor) -> Versioned {
        Versioned { major: 1, minor: 0, context: std::ptr::null_mut(), deleter: Some(delete), flags: 0, tensor }
    }

    fn tensor(&mut self) -> &mut DlTensor {
        &mut self.tensor
    }

    fn point_to(&mut self, holder: *mut Holder<Versioned>) {
        self.context = holder.cast();
    }

    unsafe fn holder(managed: *mut Versioned) -> *mut Holder<Versioned> {
        // SAFETY: the caller's promise.
        unsafe { (*managed).context.cast() }
    }
}

impl Export {
    /// Plain bytes.
    pub(crate) fn bytes(ptr: *mut u8, len: usize, place: Place, keep: Arc<dyn Any + Send + Sync>) -> Export {
        Export {
            address: ptr as usize,
            shape: vec![len as i64],
            dtype: Dtype { code: 1, bits: 8, lanes: 1 },
            typestr: "|u1",
            place,
            keep,
        }
    }

    /// The same memory as items.
    pub(crate) fn of(self, dtype: Dtype, typestr: &'static str, shape: Vec<i64>) -> Export {
        Export { shape, dtype, typestr, ..self }
    }

    fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// What `__dlpack_device__` returns.
    pub(crate) fn device(&self) -> (i32, i32) {
        let Device { kind, id } = device(self.place);
        (kind, id)
    }

    /// The capsule that `__dlpack__` returns. Raises BufferError if the consumer requests another device or a copy.
    pub(crate) fn capsule(
        self,
        py: Python<'_>,
        max_version: Option<(u32, u32)>,
        device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'_, PyAny>> {
        let here = self.device();
        if device.is_some_and(|wanted| wanted != here) || copy == Some(true) {
            return Err(PyBufferError::new_err("memory is exported in place, without a copy or a change of device"));
        }
        match max_version {
            Some((1.., _)) => made::<Versioned>(py, self),
            _ => made::<Managed>(py, self),
        }
    }

    /// What `__cuda_array_interface__` is. Raises AttributeError for memory of the host, which has none.
    pub(crate) fn interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if self.place == Place::Host {
            return Err(PyAttributeError::new_err("__cuda_array_interface__"));
        }
        let described = PyDict::new(py);
        described.set_item("version", 3)?;
        described.set_item("typestr", self.typestr)?;
        described.set_item("shape", PyTuple::new(py, &self.shape)?)?;
        described.set_item("strides", py.None())?;
        let ptr = if self.is_empty() { 0 } else { self.address };
        described.set_item("data", (ptr, false))?;
        // No ordering needed: Crossrail has no pending work on it once its requests are finished.
        described.set_item("stream", py.None())?;
        Ok(described)
    }
}

fn device(place: Place) -> Device {
    match place {
        Place::Host => Device { kind: HOST, id: 0 },
        Place::Gpu(ordinal) => Device { kind: CUDA, id: i32::try_from(ordinal).unwrap_or(i32::MAX) },
    }
}

fn made<T: Form>(py: Python<'_>, export: Export) -> PyResult<Bound<'_, PyAny>> {
    let tensor = DlTensor {
        data: if export.is_empty() { std::ptr::null_mut() } else { export.address as *mut c_void },
        device: device(export.place),
        ndim: i32::try_from(export.shape.len()).unwrap_or(i32::MAX),
        dtype: export.dtype,
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    let strides = strides(&export.shape);
    let holder = Holder { managed: T::of(tensor), shape: export.shape, strides, _keep: export.keep };
    let holder = Box::into_raw(Box::new(holder));
    // SAFETY: the holder was leaked just above and nobody else has it yet; its own fields stay where they are until
    // its deleter frees it. The capsule's destructor is given for capsules of this name.
    unsafe {
        let Holder { managed, shape, strides, .. } = &mut *holder;
        let tensor = managed.tensor();
        (tensor.shape, tensor.strides) = (shape.as_mut_ptr(), strides.as_mut_ptr());
        managed.point_to(holder);
        let managed = &raw mut (*holder).managed;
        let capsule = ffi::PyCapsule_New(managed.cast(), T::NAME.as_ptr(), Some(unused::<T>));
        Bound::from_owned_ptr_or_err(py, capsule).inspect_err(|_| drop(Box::from_raw(holder)))
    }
}

/// Items from one to the next along each axis, in C order.
fn strides(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis].max(1);
    }
    strides
}

/// The deleter of a tensor: any thread, with or without the GIL.
unsafe extern "C" fn delete<T: Form>(managed: *mut T) {
    // SAFETY: DLPack's consumers call it once, with the tensor that `made` has made.
    unsafe { drop(Box::from_raw(T::holder(managed))) }
}

/// Capsule destructor: frees the tensor unless a consumer took ownership, which renames the capsule.
unsafe extern "C" fn unused<T: Form>(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter calls it with the capsule that `made` has made; of this name, it still owns its tensor.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, T::NAME.as_ptr()) != 0 {
            delete(ffi::PyCapsule_GetPointer(capsule, T::NAME.as_ptr()).cast::<T>());
        }
    }
}
