//! `Memory`: shared memory with the buffer protocol.
//!
//! PyO3 offers `__getbuffer__` only from the 3.11 stable ABI on. Interpreters have taken the slots in type specs
//! since 3.9, so the class that Python sees is a small heap type with these two slots, derived from the PyO3 class
//! that has everything else.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};

use crate::context::Context;
use crate::errors::{self, OrRaise};
use crate::export::{Asked, Lending};
use crate::lent::{View, export};

/// Memory that peers on this machine map, so that it moves with one plain copy and no system call. Zeroed at first;
/// lives as long as anything that uses it.
///
/// It has the buffer protocol (`memoryview(memory)`, `numpy.frombuffer(memory, ...)`), writable, as plain bytes;
/// slices of a memoryview of it are as good as all of it. A peer may write it while it is received into or
/// registered.
///
/// Memory(context, nbytes) is Context.alloc(nbytes). Raises ExhaustedError, naming the bytes asked for.
#[pyclass(module = "crossrail._native", name = "_MemoryBase", subclass, frozen)]
pub(crate) struct MemoryBase {
    native: crossrail::Memory,
    len: usize,
}

impl MemoryBase {
    pub(crate) fn native(&self) -> &crossrail::Memory {
        &self.native
    }
}

impl MemoryBase {
    fn lending(&self) -> Lending {
        Lending { ptr: self.native.ptr(), len: self.len, gpu: None, keep: Arc::new(self.native.clone()) }
    }
}

#[pymethods]
impl MemoryBase {
    #[new]
    fn new(py: Python<'_>, context: &Bound<'_, Context>, nbytes: usize) -> PyResult<MemoryBase> {
        let native = context.get().native().alloc(nbytes).or_raise(py)?;
        Ok(MemoryBase { len: native.len(), native })
    }

    /// Length in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.len
    }

    fn __len__(&self) -> usize {
        self.len
    }

    /// Where it is, as DLPack numbers devices.
    fn __dlpack_device__(&self) -> (i32, i32) {
        self.lending().device()
    }

    /// A capsule for `from_dlpack` of NumPy, PyTorch, CuPy and others: the bytes (uint8) where they are, no copy. The
    /// memory lives as long as what is made of it. There is never work of ours queued on it, so `stream` changes nothing.
    ///
    /// Raises BufferError when it is wanted on another device, or as a copy.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let _ = stream;
        self.lending().capsule(py, &Asked { max_version, device: dl_device, copy })
    }

    fn __repr__(&self) -> String {
        format!("<crossrail.Memory of {} bytes>", self.len)
    }

    /// The memory as a NumPy array of `dtype`, without a copy. Needs NumPy; raises UsageError when the length is no
    /// multiple of the item's size.
    #[pyo3(signature = (dtype = None))]
    fn numpy<'py>(slf: &Bound<'py, Self>, dtype: Option<&Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let numpy = py.import("numpy")?;
        let dtype = match dtype {
            Some(dtype) => numpy.call_method1("dtype", (dtype,))?,
            None => numpy.call_method1("dtype", ("uint8",))?,
        };
        let item: usize = dtype.getattr("itemsize")?.extract()?;
        let len = slf.get().len;
        if item == 0 || !len.is_multiple_of(item) {
            return Err(errors::usage(
                py,
                "numpy",
                format!("{len} bytes are no whole number of {dtype} items"),
                "allocate a multiple of the item's size",
            ));
        }
        let options = PyDict::new(py);
        options.set_item("dtype", dtype)?;
        if len == 0 {
            return numpy.call_method("empty", (0,), Some(&options));
        }
        numpy.call_method("frombuffer", (slf,), Some(&options))
    }
}

/// The `bf_getbuffer` slot of `Memory`.
unsafe extern "C" fn get_buffer(object: *mut ffi::PyObject, view: *mut View, flags: c_int) -> c_int {
    // SAFETY: the interpreter calls slots with the GIL held and an object of the slot's type, which is a subclass
    // of MemoryBase; the engine's memory lives as long as that object does.
    unsafe {
        let py = Python::assume_attached();
        let memory = Bound::from_borrowed_ptr(py, object);
        let memory = memory.cast_unchecked::<MemoryBase>().get();
        export(view, object, memory.native.ptr(), memory.len, flags)
    }
}

/// The class `crossrail.Memory`.
pub(crate) fn memory_type(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    static TYPE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    TYPE.get_or_try_init(py, || make_type(py)).map(|class| class.bind(py))
}

fn make_type(py: Python<'_>) -> PyResult<Py<PyType>> {
    // Slot numbers of the stable ABI (typeslots.h).
    const BF_GETBUFFER: c_int = 1;
    const TP_DOC: c_int = 56;
    let base = py.get_type::<MemoryBase>();
    let doc = c"Memory that peers on this machine map, so that it moves with one plain copy and no system call.

Zeroed at first; lives as long as anything that uses it. It has the buffer protocol (memoryview(memory),
numpy.frombuffer(memory, ...)), writable, as plain bytes; slices of a memoryview of it are as good as all of it.
A peer may write it while it is received into or registered.

Memory(context, nbytes) is Context.alloc(nbytes). Raises ExhaustedError, naming the bytes asked for.";
    let mut slots = [
        ffi::PyType_Slot { slot: BF_GETBUFFER, pfunc: get_buffer as *mut c_void },
        ffi::PyType_Slot { slot: TP_DOC, pfunc: doc.as_ptr().cast_mut().cast() },
        ffi::PyType_Slot { slot: 0, pfunc: std::ptr::null_mut() },
    ];
    let mut spec = ffi::PyType_Spec {
        name: c"crossrail._native.Memory".as_ptr(),
        basicsize: 0,
        itemsize: 0,
        flags: ffi::Py_TPFLAGS_DEFAULT as std::ffi::c_uint,
        slots: slots.as_mut_ptr(),
    };
    // SAFETY: the spec and its slots are valid for the call, which copies what it keeps; names and texts are
    // static. Sizes are inherited from the base, and so are allocation and destruction.
    let class = unsafe {
        let class = ffi::PyType_FromSpecWithBases(&raw mut spec, base.as_ptr());
        Bound::from_owned_ptr_or_err(py, class)?
    };
    Ok(class.cast_into::<PyType>().map_err(PyErr::from)?.unbind())
}
