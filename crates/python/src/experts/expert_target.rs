//! Where prepared operations go: to the native half of an expert buffer, without a way through Python, or to an object
//! with the same methods.

use crossrail_ep::Layout;
use crossrail_ep_cuda::{EpCombineArgs, EpDispatchArgs};
use pyo3::call::PyCallArgs;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::device::{DeviceBuffer, DeviceHandle, DeviceOperation, Streams};
use super::device_args::{CombineArgs, DispatchArgs};
use crate::borrow::number::Flag;

/// A `DeviceBuffer`, or what has its methods.
pub(super) struct Target(Py<PyAny>);

impl<'py> FromPyObject<'py> for Target {
    fn extract_bound(object: &Bound<'py, PyAny>) -> PyResult<Target> {
        Ok(Target(object.clone().unbind()))
    }
}

/// `deep_ep.events.Streams`; None: the caller orders operations that are in several streams.
#[derive(FromPyObject)]
pub(super) struct StreamOrder(Option<Py<PyAny>>);

impl StreamOrder {
    /// Whether the buffer's last operation was in another stream than this one, which is yet to come after it.
    pub(super) fn is_another(&self, py: Python<'_>, stream: u64) -> PyResult<bool> {
        let Some(streams) = &self.0 else { return Ok(false) };
        Ok(streams.getattr(py, intern!(py, "last_handle"))?.extract::<u64>(py).ok() != Some(stream))
    }

    /// What one of their methods gives; None where there are none.
    pub(super) fn call<'py, A: PyCallArgs<'py>>(&self, name: &Bound<'py, PyString>, args: A) -> PyResult<Py<PyAny>> {
        let py = name.py();
        self.0.as_ref().map_or_else(|| Ok(py.None()), |streams| streams.call_method1(py, name, args))
    }

    /// Makes `stream` wait for the buffer's last operation, if that was in another one.
    pub(super) fn follow(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        if self.is_another(py, stream)? { self.call(intern!(py, "follow"), (stream,)).map(drop) } else { Ok(()) }
    }
}

/// An operation that was enqueued in a stream.
#[expect(clippy::large_enum_variant, reason = "it lives for a call only, which need not allocate for it")]
pub(super) enum Started<'py> {
    Native(DeviceOperation),
    Object(Bound<'py, PyAny>),
}

impl<'py> Started<'py> {
    /// Converts it to a Python object.
    pub(super) fn object(self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self {
            Started::Native(operation) => Ok(Bound::new(py, operation)?.into_any()),
            Started::Object(operation) => Ok(operation),
        }
    }

    /// Event after everything enqueued so far.
    pub(super) fn event(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self {
            Started::Native(operation) => Ok(Bound::new(py, operation.event())?.into_any()),
            Started::Object(operation) => operation.call_method0(intern!(py, "event")),
        }
    }
}

impl Target {
    fn native<'a, 'py>(&'a self, py: Python<'py>) -> Option<&'a Bound<'py, DeviceBuffer>> {
        self.0.bind(py).cast().ok()
    }

    /// Whether `stream` is being captured in a graph.
    pub(super) fn is_capturing(&self, py: Python<'_>, stream: u64) -> PyResult<bool> {
        match self.native(py) {
            Some(native) => native.get().is_capturing(py, stream),
            None => self.0.bind(py).call_method1(intern!(py, "is_capturing"), (stream,))?.is_truthy(),
        }
    }

    /// Makes later work in stream `after` wait for the work enqueued so far in stream `before`.
    pub(super) fn order(&self, py: Python<'_>, before: u64, after: u64) -> PyResult<()> {
        self.0.bind(py).call_method1(intern!(py, "order"), (before, after)).map(drop)
    }

    /// A dispatch in the expert layout.
    pub(super) fn dispatch<'py>(
        &self,
        py: Python<'py>,
        args: EpDispatchArgs,
        streams: Streams,
        send_only: Flag,
    ) -> PyResult<Started<'py>> {
        if let Some(native) = self.native(py) {
            return native.get().begin_dispatch(py, args, streams, send_only).map(Started::Native);
        }
        let call = (DispatchArgs(args), self.stream(py, streams)?, send_only.0);
        self.0.bind(py).call_method1(intern!(py, "dispatch_expert"), call).map(Started::Object)
    }

    /// A combine in the expert layout.
    pub(super) fn combine<'py>(
        &self,
        py: Python<'py>,
        args: EpCombineArgs,
        handle: &Bound<'py, PyAny>,
        streams: Streams,
        send_only: Flag,
    ) -> PyResult<Started<'py>> {
        if let (Some(native), Ok(handle)) = (self.native(py), handle.cast::<DeviceHandle>()) {
            let begun = native.get().begin_combine(py, (Layout::Expert, args), handle.get(), streams, send_only);
            return begun.map(Started::Native);
        }
        let call = (CombineArgs(args), handle, self.stream(py, streams)?, send_only.0);
        self.0.bind(py).call_method1(intern!(py, "combine"), call).map(Started::Object)
    }

    /// The stream, which comes after the other one from now on.
    fn stream(&self, py: Python<'_>, (stream, after): Streams) -> PyResult<u64> {
        after.map_or(Ok(()), |after| self.order(py, after, stream)).map(|()| stream)
    }
}

/// Enqueues the receiving half of an operation in `stream`.
pub(super) fn finish(operation: &Bound<'_, PyAny>, stream: u64) -> PyResult<()> {
    match operation.cast::<DeviceOperation>() {
        Ok(native) => native.get().finish(operation.py(), stream),
        Err(_) => operation.call_method1(intern!(operation.py(), "finish"), (stream,)).map(drop),
    }
}
