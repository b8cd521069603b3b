//! `Memory`: shared memory with the buffer protocol.
//!
//! PyO3 offers `__getbuffer__` only from the 3.11 stable ABI on. Interpreters have taken the slots in type specs
//! since 3.9, so the class that Python sees is a small heap type with these two slots, derived from the PyO3 class
//! that has everything else.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::Duration;

use crossrail::Place;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};

use crate::context::Context;
use crate::errors::{self, OrRaise};
use crate::export::Lending;
use crate::lent::{self, View, export};
use crate::mapped::Awaited;
use crate::{place, stream, wait};

/// Memory that peers on this machine map, so that it moves with one plain copy and no system call. Zeroed at first;
/// lives as long as anything that uses it.
///
/// It has the buffer protocol (`memoryview(memory)`, `numpy.frombuffer(memory, ...)`), writable, as plain bytes;
/// slices of a memoryview of it are as good as all of it. A peer may write it while it is received into or
/// registered.
///
/// On a GPU (`device="cuda:0"`) it has DLPack and `__cuda_array_interface__` instead: torch.from_dlpack(memory) and
/// cupy.asarray(memory) are the same bytes.
///
/// Memory(context, nbytes, device=None) is Context.alloc(nbytes, device). Raises ExhaustedError, naming the bytes asked
/// for.
#[pyclass(module = "crossrail._native", name = "_MemoryBase", subclass, frozen)]
pub(crate) struct MemoryBase {
    native: crossrail::Memory,
    len: usize,
    timeout: Duration,
}

impl MemoryBase {
    pub(crate) fn native(&self) -> &crossrail::Memory {
        &self.native
    }
}

impl MemoryBase {
    fn lending(&self) -> Lending {
        Lending::bytes(self.native.ptr(), self.len, self.native.place(), Arc::new(self.native.clone()))
    }
}

#[pymethods]
impl MemoryBase {
    #[new]
    #[pyo3(signature = (context, nbytes, device = None))]
    fn new(context: &Bound<'_, Context>, nbytes: usize, device: Option<&Bound<'_, PyAny>>) -> PyResult<MemoryBase> {
        let py = context.py();
        let (place, context) = (place::parse(device)?, context.get().native());
        let native = match place {
            Place::Host => context.alloc(nbytes),
            Place::Gpu(_) => py.detach(|| context.alloc_on(nbytes, place)),
        };
        let native = native.or_raise(py)?;
        Ok(MemoryBase { len: native.len(), native, timeout: context.settings().timeout })
    }

    /// Where it is: `cpu`, or `cuda:1`.
    #[getter]
    fn device(&self) -> String {
        self.native.place().to_string()
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
        self.lending().capsule(py, max_version, dl_device, copy)
    }

    fn __repr__(&self) -> String {
        match self.native.place() {
            Place::Host => format!("<crossrail.Memory of {} bytes>", self.len),
            gpu => format!("<crossrail.Memory of {} bytes on {gpu}>", self.len),
        }
    }

    /// Copies the bytes of `data`, host memory, to `offset` of it; they are there when this returns. On a GPU, nothing
    /// that it does is waited for.
    ///
    /// Raises UsageError when they do not fit.
    #[pyo3(signature = (data, offset = 0))]
    fn fill_from(&self, data: &Bound<'_, PyAny>, offset: usize) -> PyResult<()> {
        lent::copy_from(data, "fill_from", |bytes| self.native.fill_from(offset, bytes))
    }

    /// Copies what is at `offset` of it into `target`, writable host memory, which it fills. On a GPU, nothing that it
    /// does is waited for.
    ///
    /// Raises UsageError when there is not as much.
    #[pyo3(signature = (target, offset = 0))]
    fn copy_to(&self, target: &Bound<'_, PyAny>, offset: usize) -> PyResult<()> {
        lent::copy_into(target, "copy_to", |bytes| self.native.copy_to(offset, bytes))
    }

    /// Puts into a stream: a wait until the 64-bit word at `offset` of this GPU memory is `value` or more, or `timeout`
    /// seconds are over: the stream goes on in either case, and the result's `outcome` tells which. Nothing waits here; a
    /// graph that captures this waits at every replay. While a stream waits, do not free GPU memory or load kernels: the
    /// driver may let those wait too.
    ///
    /// `stream`: a raw handle, or an object with `cuda_stream` or `__cuda_stream__`; None is the default stream. Keep the
    /// memory until the stream has come past it, or as long as the graph is used.
    ///
    /// Raises UsageError: memory of the host, outside it, not 8-byte aligned, a stream of another GPU.
    #[pyo3(signature = (offset, value, *, stream = None, timeout = None))]
    fn await_signal(
        &self,
        py: Python<'_>,
        offset: usize,
        value: u64,
        stream: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<Awaited> {
        let handle = stream::parse(stream, "await_signal")?.map_or(0, |stream| stream.handle);
        let limit = wait::seconds(py, "await_signal", timeout)?.unwrap_or(self.timeout);
        // SAFETY: that the stream is alive, and the memory kept, are the documented rules for callers.
        unsafe { self.native.await_signal(offset, value, handle, limit) }.or_raise(py).map(Awaited::from)
    }

    /// GPU memory as others take it, without a copy (version 3); host memory has none.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.lending().interface(py)
    }

    /// Host memory as a NumPy array of `dtype`, without a copy. Needs NumPy; raises UsageError when the length is no
    /// multiple of the item's size, and for GPU memory.
    #[pyo3(signature = (dtype = None))]
    fn numpy<'py>(slf: &Bound<'py, Self>, dtype: Option<&Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        if slf.get().native.place() != Place::Host {
            let detail = format!("the memory is on {}", slf.get().native.place());
            return Err(errors::usage(py, "numpy", detail, "copy_to copies it to the host"));
        }
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
        if memory.native.place() != Place::Host {
            (*view).forget();
            let hint = "torch.from_dlpack and cupy.asarray take it as it is, copy_to copies it to the host";
            PyBufferError::new_err(format!("the memory is on {}: {hint}", memory.native.place())).restore(py);
            return -1;
        }
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

On a GPU (device=\"cuda:0\") it has DLPack and __cuda_array_interface__ instead: torch.from_dlpack(memory) and
cupy.asarray(memory) are the same bytes.

Memory(context, nbytes, device=None) is Context.alloc(nbytes, device). Raises ExhaustedError, naming the bytes asked for.";
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
