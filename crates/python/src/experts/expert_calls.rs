//! Operations of an expert buffer in the expert layout on PyTorch tensors, prepared.
//!
//! What does not change between calls is made once: argument blocks, shapes and dtypes to compare with, output tensors.
//! A call compares the tensors' attributes, takes their addresses and goes to the device layer at once.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crossrail_ep_cuda::{EpCombineArgs, EpDispatchArgs};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use super::device::DeviceEvent;
use super::expert_sets::{Claim, Fresh, Ring};
use super::expert_target::{Started, Target, finish};
use super::tensor_kinds::{Tensor, TensorKinds, is_aligned, some};
use crate::borrow::lent::Call;
use crate::borrow::number::Flag;

/// Operations beside the caller's stream whose tensors are kept before one looks which are over.
const KEPT: usize = 8;

type Tensors = Vec<Py<PyAny>>;

/// Tensors that an operation in another stream than the caller's uses, until it is over: PyTorch's allocator does not
/// know of that stream.
#[derive(Clone)]
struct Used {
    /// Behind the operation.
    event: Arc<Py<PyAny>>,
    /// None left once the caller's stream has come after the operation: what the allocator does with them comes then.
    tensors: Arc<Mutex<Tensors>>,
}
type Kept = VecDeque<Used>;

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
    /// Every result is new: the rows, scales or None, counts, ranges and source of a dispatch, and the options of the
    /// sums. Such callers get the operation of a combine, too.
    fresh: Option<(Vec<Option<Fresh>>, Py<PyDict>)>,
    /// `torch.empty`.
    empty_tensor: Py<PyAny>,
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
pub(super) struct ExpertCalls {
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

/// The event behind an operation in another stream than the caller's, and the tensors that it uses.
type Beside<'py> = (Bound<'py, PyAny>, Bound<'py, PyTuple>);
/// A dispatch: rows, scales or None, counts, ranges, source; the operation, its tokens, where it is in another stream, and
/// the hook.
type Dispatched<'py> = (Bound<'py, PyTuple>, Bound<'py, PyAny>, u32, Option<Beside<'py>>, Option<Bound<'py, Receive>>);
/// A combine: the sums; the operation if the frame is for it or it was only sent; and the same.
type Combined<'py> = (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>, Option<Beside<'py>>, Option<Bound<'py, Receive>>);

/// Where an operation goes.
struct Route {
    stream: u64,
    /// The caller's current stream, if it is another one that the operation is yet to come after.
    after: Option<u64>,
    /// The caller's current stream.
    current: u64,
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

    /// A dispatch. Gives rows, scales or None, counts, ranges and source; the operation, and its tokens; `(event, tensors)`
    /// of one `beside` the caller's stream, in the buffer's own, for which the caller's does not wait; and the hook with
    /// `send_only`.
    #[expect(clippy::too_many_arguments, reason = "the tensors of a dispatch")]
    fn dispatch<'py>(
        slf: &Bound<'py, Self>,
        x: &Bound<'py, PyAny>,
        topk_idx: &Bound<'py, PyAny>,
        topk_weights: Tensor<'_, 'py>,
        stats: Tensor<'_, 'py>,
        waits: Tensor<'_, 'py>,
        beside: Flag,
        send_only: Flag,
    ) -> PyResult<Option<Dispatched<'py>>> {
        let (py, calls) = (slf.py(), slf.get());
        let _call = Call::enter(py);
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
        let set = match &frame.fresh {
            Some((parts, _)) => Claim::fresh(py, &frame.empty_tensor, parts)?,
            None => calls.outputs.take(py, 0, (&frame.outputs, frame.uses.as_ref()), route.captured)?,
        };
        let mut args = calls.dispatch;
        (args.common.tokens, args.common.waits) = (tokens, waits_at);
        (args.x, args.topk_idx, args.idx_bytes, args.topk_weights) = (x_at, idx_at, idx_bytes, weights_at);
        args.stats = stats_at;
        [args.out_x, args.out_scales, args.out_counts, args.out_ranges, args.out_source] =
            set.set.addresses.as_slice().try_into().unwrap_or_default();
        let operation = frame.buffer.dispatch(py, args, (route.stream, route.after), send_only)?.object(py)?;
        let tensors = PyTuple::new(py, set.set.tensors.iter().map(|one| one.as_ref().map(|one| one.bind(py))))?;
        let used = [Some(x), Some(topk_idx), topk_weights, stats, waits];
        let begun = Started::Object(operation.clone());
        let (_, beside, hook) = calls.submitted(slf, begun, (&used, Some(&set)), &route, send_only)?;
        Ok(Some((tensors, operation, tokens, beside, hook)))
    }

    /// A combine of the dispatch that gave `handle`, which sent `tokens`. `topk_idx`: only its shape is compared. `wire`:
    /// what rows travel as, one of `EP_WIRE_`. Gives the sums; the operation where every result is new, or None; and what
    /// a dispatch gives last.
    #[expect(clippy::too_many_arguments, reason = "the tensors of a combine")]
    fn combine<'py>(
        slf: &Bound<'py, Self>,
        y: &Bound<'py, PyAny>,
        topk_idx: Tensor<'_, 'py>,
        topk_weights: Tensor<'_, 'py>,
        handle: &Bound<'py, PyAny>,
        tokens: u32,
        out: Tensor<'_, 'py>,
        waits: Tensor<'_, 'py>,
        wire: u32,
        beside: Flag,
        send_only: Flag,
    ) -> PyResult<Option<Combined<'py>>> {
        let (py, calls) = (slf.py(), slf.get());
        let _call = Call::enter(py);
        let (frame, kinds) = (&calls.frame, &calls.kinds);
        let (rows, selected) = ([frame.local, frame.ranks * frame.max_tokens, frame.hidden], [tokens, frame.topk]);
        let addresses = (|| {
            if topk_idx.is_some_and(|idx| !kinds.has_shape(idx, &selected)) {
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
        let made = match (out, &frame.fresh) {
            (Some(_), _) => None,
            (None, Some((_, options))) => {
                let shape = PyTuple::new(py, [tokens, frame.hidden])?.unbind();
                Some(Claim::fresh(py, &frame.empty_tensor, &[Some((shape, options.clone_ref(py)))])?)
            }
            (None, None) => Some(calls.sums.take(py, tokens, (&frame.sums, frame.uses.as_ref()), route.captured)?),
        };
        let mut args = calls.combine;
        (args.y, args.topk_weights, args.common.waits, args.wire) = (y_at, weights_at, waits_at, wire);
        args.out = made.as_ref().map_or(out_at, |made| made.set.addresses[0]);
        let operation = frame.buffer.combine(py, args, handle, (route.stream, route.after), send_only)?;
        let sums = made.as_ref().map(|made| made.set.part(py, 0));
        let Some(answer) = sums.as_ref().or(out).cloned() else { return Ok(None) };
        let used = [Some(y), topk_weights, out, waits];
        let (operation, beside, hook) = calls.submitted(slf, operation, (&used, made.as_ref()), &route, send_only)?;
        Ok(Some((answer, operation, beside, hook)))
    }
}

impl ExpertCalls {
    /// Rows of `x`, if it is a tensor of rows of the hidden size, and no more of them than the buffer takes.
    fn tokens(&self, x: &Bound<'_, PyAny>) -> PyResult<Option<u32>> {
        let (rows, hidden) = some!(self.kinds.extents(x)?);
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
        Ok(Route { stream, after, current, captured })
    }

    /// The stream for operations beside the caller's: always the same.
    fn own_stream(&self, py: Python<'_>) -> PyResult<u64> {
        if let Some(stream) = self.own_stream.get() {
            return Ok(*stream);
        }
        let stream = self.frame.streams.bind(py).call_method0(intern!(py, "beside"))?.extract()?;
        Ok(*self.own_stream.get_or_init(|| stream))
    }

    /// What the caller gets of an operation that was submitted: itself, where it is in another stream, and the hook.
    #[expect(clippy::type_complexity, reason = "the ends of `Dispatched` and `Combined`")]
    fn submitted<'py>(
        &self,
        slf: &Bound<'py, Self>,
        operation: Started<'py>,
        (inputs, set): (&[Tensor<'_, 'py>], Option<&Claim>),
        route: &Route,
        Flag(send_only): Flag,
    ) -> PyResult<(Option<Bound<'py, PyAny>>, Option<Beside<'py>>, Option<Bound<'py, Receive>>)> {
        let py = slf.py();
        let beside = route.stream != route.current;
        if !send_only && !beside {
            // Whoever has no use for the object does not pay for it.
            let operation = self.frame.fresh.is_some().then(|| operation.object(py)).transpose()?;
            return Ok((operation, None, None));
        }
        let mut used: Tensors = inputs.iter().flatten().map(|&tensor| tensor.clone().unbind()).collect();
        let inputs = used.len();
        // A set of the ring's may be handed out again as soon as the caller lets it go: the operation that gets it comes
        // after this one, and after what the caller's stream does until then.
        used.extend(set.into_iter().flat_map(Claim::unowned).map(|tensor| tensor.clone_ref(py)));
        let outputs = set.into_iter().flat_map(|claim| claim.set.tensors.iter().flatten());
        if send_only {
            let outputs = outputs.map(|tensor| tensor.clone_ref(py)).collect();
            let operation = operation.object(py)?;
            let (kept, used) = (operation.clone().unbind(), Mutex::new((used, outputs)));
            let calls = slf.clone().unbind();
            let hook = Bound::new(py, Receive { operation: kept, used, calls, stream: route.stream })?;
            return Ok((Some(operation), None, Some(hook)));
        }
        let event = operation.event(py)?;
        let shown: Vec<&Py<PyAny>> = used[..inputs].iter().chain(outputs).collect();
        let shown = PyTuple::new(py, shown)?;
        let event = match self.keep(py, event, used)? {
            Ok(used) => Bound::new(py, BesideEvent { used, caller: route.current })?.into_any(),
            Err(captured) => captured,
        };
        Ok((None, Some((event, shown)), None))
    }

    /// Keeps tensors that PyTorch's allocator believes to be used in another stream until the operation before `event` is
    /// over; gives the event back if it was captured.
    fn keep<'py>(
        &self,
        py: Python<'py>,
        event: Bound<'py, PyAny>,
        tensors: Tensors,
    ) -> PyResult<Result<Used, Bound<'py, PyAny>>> {
        if event.getattr(intern!(py, "is_captured"))?.is_truthy()? {
            // A graph runs again after its tensors are gone: their memory is the graph's.
            self.frame.streams.bind(py).call_method1(intern!(py, "record"), (PyList::new(py, tensors)?,))?;
            return Ok(Err(event));
        }
        let used = Used { event: Arc::new(event.unbind()), tensors: Arc::new(Mutex::new(tensors)) };
        let mut kept = self.locked();
        let still_used = kept.iter().position(|used| !used.is_released()).unwrap_or(kept.len());
        let released: Vec<_> = kept.drain(..still_used).collect();
        kept.push_back(used.clone());
        // Operations end in order: one that is over stands for those before it, as a question takes time.
        let middle = kept.len() / 2;
        let asked = (kept.len() > KEPT).then(|| kept[middle].event.clone());
        // The lock is not held while objects are asked or dropped: that may run Python code.
        drop(kept);
        drop(released);
        let Some(asked) = asked else { return Ok(Ok(used)) };
        if asked.bind(py).call_method0(intern!(py, "is_done"))?.is_truthy()? {
            let mut kept = self.locked();
            let end = kept.iter().position(|used| Arc::ptr_eq(&used.event, &asked)).map_or(0, |at| at + 1);
            let over: Vec<_> = kept.drain(..end).collect();
            drop(kept);
            over.iter().for_each(Used::release);
        }
        Ok(Ok(used))
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

impl Used {
    fn locked(&self) -> MutexGuard<'_, Tensors> {
        self.tensors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_released(&self) -> bool {
        self.locked().is_empty()
    }

    /// Lets the tensors go.
    fn release(&self) {
        let tensors = std::mem::take(&mut *self.locked());
        drop(tensors);
    }
}

/// Behind an operation in another stream than the caller's.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct BesideEvent {
    used: Used,
    /// The caller's stream.
    caller: u64,
}

#[pymethods]
impl BesideEvent {
    /// Work enqueued in `stream` (a raw handle) from now on runs after the operation.
    fn wait(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        let _call = Call::enter(py);
        let event = self.used.event.bind(py);
        match event.cast::<DeviceEvent>() {
            Ok(native) => native.get().wait(py, stream)?,
            Err(_) => drop(event.call_method1(intern!(py, "wait"), (stream,))?),
        }
        if stream == self.caller {
            self.used.release();
        }
        Ok(())
    }
}

/// The receiving half of an operation that was only sent. If it is dropped instead, it is enqueued in the stream of the
/// sending half.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct Receive {
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
        let _call = Call::enter(py);
        let calls = self.calls.get();
        let stream = calls.kinds.current(py)?;
        if calls.frame.last(py)? != Some(stream) {
            calls.frame.follow(py, stream)?;
        }
        let operation = self.operation.bind(py);
        finish(operation, stream)?;
        let (used, _outputs) = std::mem::take(&mut *self.used.lock().unwrap_or_else(PoisonError::into_inner));
        if stream != self.stream {
            drop(calls.keep(py, operation.call_method0(intern!(py, "event"))?, used)?);
        }
        Ok(())
    }
}
