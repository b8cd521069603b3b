//! Operations of an expert buffer in the expert layout on PyTorch tensors, prepared.
//!
//! What does not change between calls is made once: argument blocks, shapes and dtypes to compare with, output tensors.
//! A call compares the tensors' attributes, takes their addresses and goes to the device layer at once.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crossrail_ep_cuda::{EpCombineArgs, EpDispatchArgs};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::expert_sets::{Claim, Ring};
use crate::expert_target::{Target, finish};
use crate::flag::Flag;
use crate::tensor_kinds::{Given, TensorKinds, has_shape, is_aligned, some};

/// Operations beside the caller's stream whose tensors are kept before one looks which are over.
const KEPT: usize = 8;

type Tensors = Vec<Py<PyAny>>;
/// Completion of operations, and the tensors that they use.
type Kept = VecDeque<(Py<PyAny>, Tensors)>;

/// What the calls of a buffer have in common, read once.
#[derive(FromPyObject)]
struct Frame {
    /// A `DeviceBuffer`, or what has its methods.
    buffer: Target,
    /// `deep_ep.events.Streams`.
    streams: Py<PyAny>,
    /// `(_cdata) -> count`: references of a storage; None where PyTorch does not tell.
    uses: Option<Py<PyAny>>,
    /// `(base, rows, in_use) -> (_cdata, base, tensors)`: rows, scales or None, counts, ranges, source; and the sums of
    /// so many tokens, a part of the base.
    outputs: Py<PyAny>,
    sums: Py<PyAny>,
    /// `(tensors, operation, tokens, calls) -> answer`: what the caller of a dispatch gets.
    answer: Py<PyAny>,
    /// `(operation, tensors) -> completion`, for the caller; tensors are None for one in the caller's stream.
    overlap: Py<PyAny>,
    max_tokens: u32,
    hidden: u32,
    topk: u32,
    local: u32,
    ranks: u32,
    /// Strides of the scales of outputs, in bytes.
    scale_strides: [u64; 3],
}

/// Dispatch and combine of one buffer. Usable from any thread, like the buffer.
///
/// Methods give None when an argument is not as prepared, before anything is enqueued: the caller finds out which one.
#[pyclass(module = "crossrail._native", frozen)]
pub(crate) struct ExpertCalls {
    frame: Frame,
    kinds: TensorKinds,
    dispatch: EpDispatchArgs,
    combine: EpCombineArgs,
    outputs: Ring,
    sums: Ring,
    /// Of operations in other streams than the caller's.
    kept: Mutex<Kept>,
    /// The stream for operations beside the caller's.
    own_stream: OnceLock<u64>,
}

/// Where an operation goes.
struct Route {
    stream: u64,
    /// The caller's current stream, if it is another one that the operation is yet to come after.
    after: Option<u64>,
    /// Not the caller's current stream.
    beside: bool,
    captured: bool,
}

#[pymethods]
impl ExpertCalls {
    #[new]
    fn new(frame: &Bound<'_, PyAny>) -> PyResult<ExpertCalls> {
        let (frame, kinds): (Frame, TensorKinds) = (frame.extract()?, frame.extract()?);
        let row = 2 * u64::from(frame.hidden);
        let dispatch = EpDispatchArgs { x_stride: row, out_scale_strides: frame.scale_strides, ..EpDispatchArgs::ZERO };
        let combine = EpCombineArgs { y_stride: row, out_stride: row, ..EpCombineArgs::ZERO };
        let (outputs, sums, kept, own_stream) = Default::default();
        Ok(ExpertCalls { frame, kinds, dispatch, combine, outputs, sums, kept, own_stream })
    }

    /// A dispatch. Gives the frame's answer and completion, and the hook with `send_only`. `beside`: in the buffer's own
    /// stream, for which the caller's does not wait.
    #[expect(clippy::too_many_arguments, reason = "the tensors of a dispatch")]
    fn dispatch<'py>(
        slf: &Bound<'py, Self>,
        x: &Bound<'py, PyAny>,
        topk_idx: &Bound<'py, PyAny>,
        topk_weights: Given<'_, 'py>,
        stats: Given<'_, 'py>,
        waits: Given<'_, 'py>,
        beside: Flag,
        send_only: Flag,
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let (py, calls) = (slf.py(), slf.get());
        let (frame, kinds) = (&calls.frame, &calls.kinds);
        let Some(tokens) = calls.tokens(x)? else { return Ok(None) };
        let selected = [tokens, frame.topk];
        let idx_bytes = if kinds.is_dtype(topk_idx, &kinds.i64)? { 8 } else { 4 };
        let ids = if idx_bytes == 8 { &kinds.i64 } else { &kinds.i32 };
        let addresses = (|| {
            Ok::<_, PyErr>(Some([
                some!(kinds.place(x, &kinds.bf16)?.filter(is_aligned)),
                some!(kinds.small(topk_idx, ids, &selected)?),
                some!(kinds.optional(topk_weights, &kinds.f32, &selected)?),
                some!(kinds.optional(stats, &kinds.i32, &[frame.local])?),
                some!(kinds.optional(waits, &kinds.i64, &[frame.ranks])?),
            ]))
        })()?;
        let Some([x_at, idx_at, weights_at, stats_at, waits_at]) = addresses else { return Ok(None) };
        let route = calls.route(py, beside.0)?;
        let set = calls.outputs.take(py, 0, (&frame.outputs, frame.uses.as_ref()), route.captured)?;
        let mut args = calls.dispatch;
        (args.common.tokens, args.common.waits) = (tokens, waits_at);
        (args.x, args.topk_idx, args.idx_bytes, args.topk_weights) = (x_at, idx_at, idx_bytes, weights_at);
        args.stats = stats_at;
        [args.out_x, args.out_scales, args.out_counts, args.out_ranges, args.out_source] =
            set.set.addresses.as_slice().try_into().unwrap_or_default();
        let operation = frame.buffer.dispatch(py, args, (route.stream, route.after), send_only)?;
        let tensors = PyList::new(py, set.set.tensors.iter().map(|one| one.as_ref().map(|one| one.bind(py))))?;
        let answer = frame.answer.bind(py).call1((tensors, &operation, tokens, slf))?;
        let used = [Some(x), Some(topk_idx), topk_weights, stats, waits];
        calls.submitted(slf, &operation, answer, (&used, Some(&set)), &route, send_only).map(Some)
    }

    /// A combine of the dispatch that gave `handle`, which sent `tokens`. `topk_idx`: only its shape is compared. `wire`:
    /// what rows travel as, one of `EP_WIRE_`. Gives the sums, the completion, and the hook with `send_only`.
    #[expect(clippy::too_many_arguments, reason = "the tensors of a combine")]
    fn combine<'py>(
        slf: &Bound<'py, Self>,
        y: &Bound<'py, PyAny>,
        topk_idx: Given<'_, 'py>,
        topk_weights: Given<'_, 'py>,
        handle: &Bound<'py, PyAny>,
        tokens: u32,
        out: Given<'_, 'py>,
        waits: Given<'_, 'py>,
        wire: u32,
        beside: Flag,
        send_only: Flag,
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let (py, calls) = (slf.py(), slf.get());
        let (frame, kinds) = (&calls.frame, &calls.kinds);
        let (rows, selected) = ([frame.local, frame.ranks * frame.max_tokens, frame.hidden], [tokens, frame.topk]);
        let addresses = (|| {
            if topk_idx.is_some_and(|idx| !matches!(has_shape(idx, &selected), Ok(true))) {
                return Ok(None);
            }
            Ok::<_, PyErr>(Some([
                some!(kinds.rows(y, &rows)?),
                some!(kinds.optional(topk_weights, &kinds.f32, &selected)?),
                some!(out.map_or(Ok(Some(0)), |out| kinds.rows(out, &[tokens, frame.hidden]))?),
                some!(kinds.optional(waits, &kinds.i64, &[frame.ranks])?),
            ]))
        })()?;
        let Some([y_at, weights_at, out_at, waits_at]) = addresses else { return Ok(None) };
        let route = calls.route(py, beside.0)?;
        let made = match out {
            Some(_) => None,
            None => Some(calls.sums.take(py, tokens, (&frame.sums, frame.uses.as_ref()), route.captured)?),
        };
        let mut args = calls.combine;
        (args.y, args.topk_weights, args.common.waits, args.wire) = (y_at, weights_at, waits_at, wire);
        args.out = made.as_ref().map_or(out_at, |made| made.set.addresses[0]);
        let operation = frame.buffer.combine(py, args, handle, (route.stream, route.after), send_only)?;
        let sums = made.as_ref().map(|made| made.set.part(py, 0));
        let Some(answer) = sums.as_ref().or(out).cloned() else { return Ok(None) };
        let used = [Some(y), topk_weights, out, waits];
        calls.submitted(slf, &operation, answer, (&used, made.as_ref()), &route, send_only).map(Some)
    }
}

impl ExpertCalls {
    /// Rows of `x`, if it is a tensor of rows of the hidden size, and no more of them than the buffer takes.
    fn tokens(&self, x: &Bound<'_, PyAny>) -> PyResult<Option<u32>> {
        if !self.kinds.is_tensor(x)? {
            return Ok(None);
        }
        let shape = x.getattr(intern!(x.py(), "shape"))?;
        let Ok((rows, hidden)) = shape.extract::<(u32, u32)>() else { return Ok(None) };
        Ok(Some(rows).filter(|rows| *rows <= self.frame.max_tokens && hidden == self.frame.hidden))
    }

    /// The stream of the next operation, which comes behind the buffer's last one.
    fn route(&self, py: Python<'_>, beside: bool) -> PyResult<Route> {
        let frame = &self.frame;
        let current = self.kinds.current(py)?;
        let stream = if beside { self.own_stream(py)? } else { current };
        let mut after = (stream != current).then_some(current);
        if frame.last(py)? != Some(stream) {
            // A capture that the current stream is in takes the other one in before that is made to wait for more.
            after.take().map_or(Ok(()), |after| frame.buffer.order(py, after, stream))?;
            frame.follow(py, stream)?;
        }
        let captured = frame.buffer.is_capturing(py, after.unwrap_or(stream))?;
        Ok(Route { stream, after, beside: stream != current, captured })
    }

    /// The stream for operations beside the caller's: always the same.
    fn own_stream(&self, py: Python<'_>) -> PyResult<u64> {
        if let Some(stream) = self.own_stream.get() {
            return Ok(*stream);
        }
        let stream = self.frame.streams.bind(py).call_method0(intern!(py, "beside"))?.extract()?;
        Ok(*self.own_stream.get_or_init(|| stream))
    }

    /// What the caller gets of an operation that was submitted.
    fn submitted<'py>(
        &self,
        slf: &Bound<'py, Self>,
        operation: &Bound<'py, PyAny>,
        answer: Bound<'py, PyAny>,
        (inputs, set): (&[Given<'_, 'py>], Option<&Claim>),
        route: &Route,
        Flag(send_only): Flag,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let py = slf.py();
        let nothing = py.None().into_bound(py);
        let overlap = |used: &Bound<'py, PyAny>| self.frame.overlap.bind(py).call1((operation, used));
        if !send_only && !route.beside {
            return PyTuple::new(py, [answer, overlap(&nothing)?, nothing]);
        }
        let mut used: Tensors = inputs.iter().flatten().map(|&tensor| tensor.clone().unbind()).collect();
        let inputs = used.len();
        // A set of the ring's may be handed out again as soon as the caller lets it go: the operation that gets it comes
        // after this one, and after what the caller's stream does until then.
        used.extend(set.into_iter().flat_map(Claim::unowned).map(|tensor| tensor.clone_ref(py)));
        let outputs = set.into_iter().flat_map(|claim| claim.set.tensors.iter().flatten());
        if send_only {
            let outputs = outputs.map(|tensor| tensor.clone_ref(py)).collect();
            let (operation, stream, used) = (operation.clone().unbind(), route.stream, Mutex::new((used, outputs)));
            let hook = Bound::new(py, Receive { operation, used, calls: slf.clone().unbind(), stream })?;
            return PyTuple::new(py, [answer, overlap(&nothing)?, hook.into_any()]);
        }
        let event = operation.call_method0(intern!(py, "event"))?;
        let shown: Vec<&Py<PyAny>> = used[..inputs].iter().chain(outputs).collect();
        let overlap = overlap(&PyTuple::new(py, shown)?.into_any())?;
        self.keep(py, &event, used)?;
        PyTuple::new(py, [answer, overlap, nothing])
    }

    /// Keeps tensors that PyTorch's allocator believes to be used in another stream until the operation is over.
    fn keep(&self, py: Python<'_>, event: &Bound<'_, PyAny>, used: Tensors) -> PyResult<()> {
        if event.getattr(intern!(py, "is_captured"))?.is_truthy()? {
            // A graph runs again after its tensors are gone: their memory is the graph's.
            self.frame.streams.bind(py).call_method1(intern!(py, "record"), (PyList::new(py, used)?,))?;
            return Ok(());
        }
        let mut kept = self.locked();
        kept.push_back((event.clone().unbind(), used));
        // Operations end in order: one that is over stands for those before it, as a question takes time.
        let middle = kept.len() / 2;
        let asked = (kept.len() > KEPT).then(|| kept[middle].0.clone_ref(py));
        // The lock is not held while objects are asked or dropped: that may run Python code.
        drop(kept);
        let Some(asked) = asked else { return Ok(()) };
        if asked.bind(py).call_method0(intern!(py, "is_done"))?.is_truthy()? {
            let mut kept = self.locked();
            let end = kept.iter().position(|(event, _)| event.is(&asked)).map_or(0, |at| at + 1);
            let over: Vec<_> = kept.drain(..end).collect();
            drop(kept);
            drop(over);
        }
        Ok(())
    }

    fn locked(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Frame {
    /// The stream of the buffer's last operation.
    fn last(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        Ok(self.streams.bind(py).getattr(intern!(py, "last_handle"))?.extract().ok())
    }

    /// Makes `stream` wait for the buffer's last operation, which was in another one.
    fn follow(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        self.streams.bind(py).call_method1(intern!(py, "follow"), (stream,)).map(drop)
    }
}

/// The receiving half of an operation that was only sent. If it is dropped instead, it is put into the stream of the
/// sending half.
#[pyclass(module = "crossrail._native", frozen)]
pub(crate) struct Receive {
    // Dropped first: finishing needs the memory of the tensors.
    operation: Py<PyAny>,
    /// Tensors that are to be kept until the operation is over, and results, which nobody else may get until then.
    used: Mutex<(Tensors, Tensors)>,
    calls: Py<ExpertCalls>,
    stream: u64,
}

#[pymethods]
impl Receive {
    /// Puts the receiving half into the current stream. Raises UsageError when it was there already.
    fn __call__(&self, py: Python<'_>) -> PyResult<()> {
        let calls = self.calls.get();
        let stream = calls.kinds.current(py)?;
        if calls.frame.last(py)? != Some(stream) {
            calls.frame.follow(py, stream)?;
        }
        let operation = self.operation.bind(py);
        finish(operation, stream)?;
        let (used, _outputs) = std::mem::take(&mut *self.used.lock().unwrap_or_else(PoisonError::into_inner));
        if stream != self.stream {
            calls.keep(py, &operation.call_method0(intern!(py, "event"))?, used)?;
        }
        Ok(())
    }
}
