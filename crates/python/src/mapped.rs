//! Memory of a peer, mapped here, and waits for signals in it.
#![allow(unsafe_code)]

use std::sync::Arc;

use crossrail::{Awaited as NativeAwaited, Mapped as NativeMapped, Outcome, Place, Signal};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{self, OrRaise};
use crate::export::Lending;
use crate::lent::{self, Call, Use};
use crate::operand::Wanted;
use crate::stream;
use crate::worker::Worker;

/// Memory of a peer on this machine, mapped into this process: both see the same bytes. Made by `Endpoint.map`.
///
/// It stays mapped as long as this object, or anything made of it, lives: also when the peer has freed it or died. The
/// peer may write it at any time; what order the two ends keep is theirs to agree on, `put` with a signal and
/// `Memory.await_signal` being one way.
///
/// It has DLPack (numpy.from_dlpack or torch.from_dlpack, no copy); memory of a GPU `__cuda_array_interface__` too.
#[pyclass(module = "crossrail._native", frozen)]
pub(crate) struct Mapped {
    native: NativeMapped,
    worker: Py<Worker>,
}

impl Mapped {
    pub(crate) fn new(native: NativeMapped, worker: Py<Worker>) -> Mapped {
        Mapped { native, worker }
    }

    fn lending(&self) -> Lending {
        let keep = Arc::new(self.native.clone());
        Lending::bytes(self.native.ptr(), self.native.len(), self.native.place(), keep)
    }
}

#[pymethods]
impl Mapped {
    /// Where it is: `cpu`, or the GPU of this process that reaches it, as `cuda:0`.
    #[getter]
    fn device(&self) -> String {
        self.native.place().to_string()
    }

    /// Length in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.native.len()
    }

    fn __len__(&self) -> usize {
        self.native.len()
    }

    fn __repr__(&self) -> String {
        format!("<crossrail.Mapped of {} bytes on {}>", self.native.len(), self.native.place())
    }

    /// Puts into a stream: a copy of `src`, GPU memory, to `offset` of this memory, and then `signal`, (offset, value): the
    /// 64-bit word at that offset becomes the value. Whoever sees the value there, on any GPU or the host, also sees the
    /// bytes. Nothing waits here, the host is not involved afterwards, and a graph that captures this does it at every
    /// replay.
    ///
    /// `stream`: a raw handle, or an object with `cuda_stream` or `__cuda_stream__`; name it in a capture. None is the
    /// default stream, and then the array's own stream comes first. Keep `src` and this object until the stream has
    /// come past it, or as long as the graph is used.
    ///
    /// Raises UsageError: outside the memory, a signal that is not 8-byte aligned, memory of the host, a stream or an array
    /// of another GPU than `device`.
    #[pyo3(signature = (src, offset = 0, *, stream = None, signal = None))]
    fn put(
        &self,
        src: &Bound<'_, PyAny>,
        offset: usize,
        stream: Option<&Bound<'_, PyAny>>,
        signal: Option<(usize, u64)>,
    ) -> PyResult<()> {
        let py = src.py();
        let _call = Call::enter(py);
        let stream = stream::parse(stream, "put")?;
        let handle = stream.map_or(0, |stream| stream.handle);
        let wanted = Wanted { context: self.worker.get().context(), used: Use::Read, stream, operation: "put" };
        let source = wanted.on(src, handle)?;
        if source.place == Place::Host && source.piece.len > 0 {
            return Err(errors::usage(py, "put", "the source is memory of the host", "a stream copies GPU memory"));
        }
        let signal = signal.map(|(offset, value)| Signal { offset, value });
        // SAFETY: the source is lent for the call, and kept by the caller until the stream has come past it; so is the
        // stream. These are the documented rules.
        unsafe { self.native.put(offset, source.piece.ptr, source.piece.len, handle, signal) }.or_raise(py)
    }

    /// Copies the bytes of `data`, host memory, to `offset` of it; they are there when this returns.
    ///
    /// Raises UsageError when they do not fit.
    #[pyo3(signature = (data, offset = 0))]
    fn fill_from(&self, data: &Bound<'_, PyAny>, offset: usize) -> PyResult<()> {
        lent::copy_from(data, "fill_from", |bytes| self.native.fill_from(offset, bytes))
    }

    /// Copies what is at `offset` of it into `target`, writable host memory, which it fills.
    ///
    /// Raises UsageError when there is not as much.
    #[pyo3(signature = (target, offset = 0))]
    fn copy_to(&self, target: &Bound<'_, PyAny>, offset: usize) -> PyResult<()> {
        lent::copy_into(target, "copy_to", |bytes| self.native.copy_to(offset, bytes))
    }

    /// Where it is, as DLPack numbers devices.
    fn __dlpack_device__(&self) -> (i32, i32) {
        self.lending().device()
    }

    /// As `Memory.__dlpack__`.
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

    /// GPU memory as others take it, without a copy (version 3); host memory has none.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.lending().interface(py)
    }
}

/// A wait for a signal that was put into a stream. Made by `Memory.await_signal`.
#[pyclass(module = "crossrail._native", frozen)]
pub(crate) struct Awaited(NativeAwaited);

impl From<NativeAwaited> for Awaited {
    fn from(native: NativeAwaited) -> Awaited {
        Awaited(native)
    }
}

#[pymethods]
impl Awaited {
    /// `pending`: the stream has not come to its end; `reached`; `timed_out`: the time was over first, and the stream went
    /// on all the same. Of a wait in a captured graph: the latest replay's.
    #[getter]
    fn outcome(&self) -> &'static str {
        match self.0.outcome() {
            Outcome::Pending => "pending",
            Outcome::Reached => "reached",
            Outcome::TimedOut => "timed_out",
        }
    }

    fn __repr__(&self) -> String {
        format!("<crossrail.Awaited, {}>", self.outcome())
    }
}
