//! `Memory`: shared memory with the buffer protocol.
//!
//! PyO3 offers `__getbuffer__` only from the 3.11 stable ABI on. Interpreters have taken the slots in type specs
//! since 3.9, so the class that Python sees is a small heap type with these two slots, derived from the PyO3 class
//! that has everything else.
#![allow(unsafe_code)]

use std::ffi::{CString, c_int, c_void};
use std::sync::Arc;
use std::time::Duration;

use crossrail::Place;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};

use super::awaited::Awaited;
use super::context::Context;
use crate::borrow::export::{Export, Exporter};
use crate::borrow::lent::{self, export};
use crate::borrow::loan::{Call, View};
use crate::borrow::{place, stream};
use crate::runtime::errors::{self, OrRaise};
use crate::runtime::{gate, wait};

/// Memory that peers on this machine can map, so that it is transferred with one copy and no system call.
///
/// It is zeroed, and stays allocated as long as anything uses it. Making one is `Context.alloc`.
///
/// Host memory has the writable buffer protocol, as plain bytes: ``memoryview(memory)`` or
/// ``numpy.frombuffer(memory, ...)``. Slices of a memoryview are transferred as efficiently
/// as the whole. GPU memory has DLPack and ``__cuda_array_interface__`` instead:
/// ``torch.from_dlpack(memory)`` and ``cupy.asarray(memory)`` share the same bytes.
///
/// Parameters
/// ----------
/// context : Context
/// nbytes : int
///     Size in bytes.
/// device : str or int, optional
///     As for `Context.alloc`: the host by default, or a GPU.
///
/// Raises
/// ------
/// ExhaustedError
///     There is not enough memory; the text has the bytes requested.
///
/// Notes
/// -----
/// A peer may write to the memory while it is received into, or registered.
#[pyclass(module = "crossrail._native", name = "_MemoryBase", extends = Exporter, subclass, frozen)]
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

#[pymethods]
impl MemoryBase {
    #[new]
    #[pyo3(signature = (context, nbytes, device = None))]
    fn new(
        context: &Bound<'_, Context>,
        nbytes: usize,
        device: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyClassInitializer<MemoryBase>> {
        let py = context.py();
        let _call = Call::enter(py);
        let (place, context) = (place::parse(device)?, context.get().native());
        let native = match place {
            Place::Host => context.alloc(nbytes),
            Place::Gpu(_) => gate::detached(py, || context.alloc_on(nbytes, place)),
        };
        let native = native.or_raise(py)?;
        let len = native.len();
        let export = Export::bytes(native.ptr(), len, native.place(), Arc::new(native.clone()));
        Ok(Exporter::with(export, MemoryBase { len, native, timeout: context.settings().timeout }))
    }

    /// The device of the memory: ``cpu`` or, for example, ``cuda:1``.
    #[getter]
    fn device(&self) -> String {
        self.native.place().to_string()
    }

    /// Size in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.len
    }

    fn __len__(&self) -> usize {
        self.len
    }

    fn __repr__(&self) -> String {
        match self.native.place() {
            Place::Host => format!("<crossrail.Memory of {} bytes>", self.len),
            gpu => format!("<crossrail.Memory of {} bytes on {gpu}>", self.len),
        }
    }

    /// Copy bytes of host memory into this memory.
    ///
    /// Returns when they are there. On a GPU this does not wait for other work of the GPU.
    ///
    /// Parameters
    /// ----------
    /// data
    ///     Contiguous host memory.
    /// offset : int
    ///     Offset in this memory, in bytes.
    ///
    /// Raises
    /// ------
    /// UsageError
    ///     The bytes do not fit.
    #[pyo3(signature = (data, offset = 0))]
    fn fill_from(&self, data: &Bound<'_, PyAny>, offset: usize) -> PyResult<()> {
        lent::copy_from(data, "fill_from", |bytes| self.native.fill_from(offset, bytes))
    }

    /// Copy bytes of this memory into `target`.
    ///
    /// On a GPU this does not wait for other work of the GPU.
    ///
    /// Parameters
    /// ----------
    /// target
    ///     Writable host memory, which is filled completely.
    /// offset : int
    ///     Offset in this memory, in bytes.
    ///
    /// Raises
    /// ------
    /// UsageError
    ///     There are not that many bytes.
    #[pyo3(signature = (target, offset = 0))]
    fn copy_to(&self, target: &Bound<'_, PyAny>, offset: usize) -> PyResult<()> {
        lent::copy_into(target, "copy_to", |bytes| self.native.copy_to(offset, bytes))
    }

    /// Enqueue a wait in a stream until a 64-bit word of this GPU memory reaches a value.
    ///
    /// Does not block the host. A captured graph waits at every replay.
    ///
    /// Parameters
    /// ----------
    /// offset : int
    ///     Offset of the word in bytes, a multiple of 8.
    /// value : int
    ///     The stream waits until the word is at least this.
    /// stream
    ///     A raw handle, or an object with ``cuda_stream`` or ``__cuda_stream__``; None is the
    ///     default stream.
    /// timeout : float, optional
    ///     Seconds after which the stream continues in any case.
    ///
    /// Returns
    /// -------
    /// Awaited
    ///     Its `outcome` tells whether the value was reached.
    ///
    /// Raises
    /// ------
    /// UsageError
    ///     Host memory, an offset that is out of bounds or unaligned, or a stream of another GPU.
    ///
    /// Notes
    /// -----
    /// While a stream waits, do not free GPU memory or load kernels: the driver may block on it.
    /// Keep the memory until the stream has passed the wait, or as long as the graph is used.
    #[pyo3(signature = (offset, value, *, stream = None, timeout = None))]
    fn await_signal(
        &self,
        py: Python<'_>,
        offset: usize,
        value: u64,
        stream: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<Awaited> {
        let _call = Call::enter(py);
        let handle = stream::parse(stream, "await_signal")?.map_or(0, |stream| stream.handle);
        let limit = wait::seconds(py, "await_signal", timeout)?.unwrap_or(self.timeout);
        // SAFETY: that the stream is alive, and the memory kept, are the documented rules for callers.
        unsafe { self.native.await_signal(offset, value, handle, limit) }.or_raise(py).map(Awaited::from)
    }

    /// Return host memory as a NumPy array of `dtype`, without a copy.
    ///
    /// Requires NumPy. Raises UsageError for GPU memory, or if the size is not a multiple of the
    /// item size.
    #[pyo3(signature = (dtype = None))]
    fn numpy<'py>(slf: &Bound<'py, Self>, dtype: Option<&Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let _call = Call::enter(py);
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
pub(super) fn memory_type(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    static TYPE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    TYPE.get_or_try_init(py, || make_type(py)).map(|class| class.bind(py))
}

fn make_type(py: Python<'_>) -> PyResult<Py<PyType>> {
    // Slot numbers of the stable ABI (typeslots.h).
    const BF_GETBUFFER: c_int = 1;
    const TP_DOC: c_int = 56;
    let base = py.get_type::<MemoryBase>();
    // The text of the base, under the signature by which `help` and `inspect` show a constructor.
    let text: String = base.getattr("__doc__")?.extract()?;
    let doc = CString::new(format!("Memory(context, nbytes, device=None)\n--\n\n{text}"))?;
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
