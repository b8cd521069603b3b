//! Memory of a peer, mapped here.
#![allow(unsafe_code)]

use std::sync::Arc;

use crossrail::{Mapped as NativeMapped, Place, Signal};
use pyo3::prelude::*;

use super::operand::OperandSpec;
use super::worker::Worker;
use crate::borrow::export::{Export, Exporter};
use crate::borrow::lent::{self, Use};
use crate::borrow::loan::Call;
use crate::borrow::stream;
use crate::runtime::errors::{self, OrRaise};

/// Memory of a peer on this machine that is mapped into this process. Created by `Endpoint.map`.
///
/// Both processes access the same bytes, and must synchronize by themselves, for example by
/// `put` with a signal and `Memory.await_signal`. The memory stays mapped as long as this
/// object, or anything created from it, even if the peer has freed it or died.
///
/// It supports DLPack (``numpy.from_dlpack`` or ``torch.from_dlpack``, without a copy); GPU
/// memory also ``__cuda_array_interface__``.
#[pyclass(module = "crossrail._native", extends = Exporter, frozen)]
pub(super) struct Mapped {
    native: NativeMapped,
    worker: Py<Worker>,
}

impl Mapped {
    pub(super) fn new(native: NativeMapped, worker: Py<Worker>) -> PyClassInitializer<Mapped> {
        let export = Export::bytes(native.ptr(), native.len(), native.place(), Arc::new(native.clone()));
        Exporter::with(export, Mapped { native, worker })
    }
}

#[pymethods]
impl Mapped {
    /// The device: ``cpu``, or the GPU of this process that maps it, such as ``cuda:0``.
    #[getter]
    fn device(&self) -> String {
        self.native.place().to_string()
    }

    /// Size in bytes.
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

    /// Enqueue a copy into this memory in a stream, followed by a signal.
    ///
    /// Whoever observes the value of the signal, on any GPU or the host, also observes the bytes.
    /// Does not block the host, which is not involved afterwards. A captured graph repeats the
    /// copy at every replay.
    ///
    /// Parameters
    /// ----------
    /// src
    ///     Contiguous GPU memory.
    /// offset : int
    ///     Offset in this memory, in bytes.
    /// signal : tuple of int, optional
    ///     ``(offset, value)``: the 64-bit word at that offset, a multiple of 8, becomes `value`.
    /// stream : optional
    ///     A raw handle, or an object with ``cuda_stream`` or ``__cuda_stream__``; required
    ///     during a capture. None is the default stream, ordered behind the array's own stream.
    ///
    /// Raises
    /// ------
    /// UsageError
    ///     The range is out of bounds, the signal is unaligned, this is host memory, or the
    ///     stream or array belongs to another GPU than `device`.
    ///
    /// Notes
    /// -----
    /// Keep `src` and this object until the stream has passed the copy, or as long as the graph
    /// is used.
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
        let wanted = OperandSpec { context: self.worker.get().context(), used: Use::Read, stream, operation: "put" };
        let source = wanted.on(src, handle)?;
        if source.place == Place::Host && source.piece.len > 0 {
            return Err(errors::usage(py, "put", "the source is host memory", "pass GPU memory, or use fill_from"));
        }
        let signal = signal.map(|(offset, value)| Signal { offset, value });
        // SAFETY: the source is borrowed for the call, and the caller keeps it and the stream alive until the stream
        // has passed the copy, as documented.
        unsafe { self.native.put(offset, source.piece.ptr, source.piece.len, handle, signal) }.or_raise(py)
    }

    /// Copy `data`, contiguous host memory, into this memory at `offset`, in bytes. Returns when it is there.
    ///
    /// Raises UsageError if it does not fit.
    #[pyo3(signature = (data, offset = 0))]
    fn fill_from(&self, data: &Bound<'_, PyAny>, offset: usize) -> PyResult<()> {
        lent::copy_from(data, "fill_from", |bytes| self.native.fill_from(offset, bytes))
    }

    /// Copy bytes of this memory at `offset`, in bytes, into `target`, writable host memory that is filled completely.
    ///
    /// Raises UsageError if there are not that many bytes.
    #[pyo3(signature = (target, offset = 0))]
    fn copy_to(&self, target: &Bound<'_, PyAny>, offset: usize) -> PyResult<()> {
        lent::copy_into(target, "copy_to", |bytes| self.native.copy_to(offset, bytes))
    }
}
