//! Operations of an expert buffer in the expert layout on PyTorch tensors, prepared.
//!
//! A call reads its arguments as all calls do, takes output tensors, and goes to the device layer at once.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crossrail_ep::Layout;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use super::arguments::Arguments;
use super::device::DeviceEvent;
use super::expert_sets::{Claim, Fresh, Ring};
use super::expert_target::{Started, Target, Turns, finish};
use super::tensor_kinds::Tensor;
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
    arguments: Py<Arguments>,
    streams: Turns,
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
    /// Strides of the scales of outputs, in bytes.
    scale_strides: [u64; 3],
}

/// Dispatch and combine of one buffer. Usable from any thread, like the buffer.
///
/// Methods raise UsageError for an argument that does not fit, before anything is enqueued; where arguments must be as
/// DeepEP's they give None, and the caller finds out which one.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct ExpertCalls {
    frame: Frame,
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
        let (frame, (outputs, sums, kept, own_stream)) = (frame.extract()?, Default::default());
        Ok(ExpertCalls { frame, outputs, sums, kept, own_stream })
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
        let (frame, arguments) = (&calls.frame, calls.frame.arguments.get());
        let mut reading = arguments.reading("dispatch", beside.0 || send_only.0);
        let read = reading.inputs(x, [Some(topk_idx), topk_weights, stats, waits]);
        let read = arguments.settled(py, read)?;
        // DeepEP casts rows to fp8, and takes none.
        let Some(mut args) = read.filter(|args| args.x_fp8 == 0 || !arguments.strict) else { return Ok(None) };
        let route = calls.route(py, beside.0)?;
        let set = match &frame.fresh {
            Some((parts, _)) => Claim::fresh(py, &frame.empty_tensor, parts)?,
            None => calls.outputs.take(py, 0, (&frame.outputs, frame.uses.as_ref()), route.captured)?,
        };
        args.out_scale_strides = frame.scale_strides;
        [args.out_x, args.out_scales, args.out_counts, args.out_ranges, args.out_source] =
            set.set.addresses.as_slice().try_into().unwrap_or_default();
        let operation = frame.buffer.dispatch(py, args, (route.stream, route.after), send_only)?.object(py)?;
        let tensors = PyTuple::new(py, set.set.tensors.iter().map(|one| one.as_ref().map(|one| one.bind(py))))?;
        let begun = Started::Object(operation.clone());
        let (_, beside, hook) = calls.submitted(slf, begun, (reading.used, Some(&set)), &route, send_only)?;
        Ok(Some((tensors, operation, args.common.tokens, beside, hook)))
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
        let (frame, arguments) = (&calls.frame, calls.frame.arguments.get());
        if topk_idx.is_some_and(|idx| !arguments.has_shape(idx, &[tokens.into(), arguments.sizes.topk])) {
            return Ok(None);
        }
        let mut reading = arguments.reading("combine", beside.0 || send_only.0);
        let of = (Layout::Expert, 0, tokens);
        let read = reading.outputs(of, y, [topk_weights, None, out, waits]);
        let Some(mut args) = arguments.settled(py, read)? else { return Ok(None) };
        let route = calls.route(py, beside.0)?;
        let made = match (out, &frame.fresh) {
            (Some(_), _) => None,
            (None, Some((_, options))) => {
                let shape = PyTuple::new(py, [tokens.into(), arguments.sizes.hidden])?.unbind();
                Some(Claim::fresh(py, &frame.empty_tensor, &[Some((shape, options.clone_ref(py)))])?)
            }
            (None, None) => Some(calls.sums.take(py, tokens, (&frame.sums, frame.uses.as_ref()), route.captured)?),
        };
        args.wire = wire;
        if let Some(made) = &made {
            args.out = made.set.addresses[0];
        }
        let operation = frame.buffer.combine(py, args, handle, (route.stream, route.after), send_only)?;
        let sums = made.as_ref().map(|made| made.set.part(py, 0));
        let Some(answer) = sums.as_ref().or(out).cloned() else { return Ok(None) };
        let used = (reading.used, made.as_ref());
        let (operation, beside, hook) = calls.submitted(slf, operation, used, &route, send_only)?;
        Ok(Some((answer, operation, beside, hook)))
    }
}

impl ExpertCalls {
    /// The stream of the next operation, which comes behind the buffer's last one.
    fn route(&self, py: Python<'_>, beside: bool) -> PyResult<Route> {
        let frame = &self.frame;
        let current = frame.arguments.get().current(py)?;
        let stream = if beside { self.own_stream(py)? } else { current };
        let mut after = (stream != current).then_some(current);
        if frame.streams.is_another(py, stream)? {
            // A capture that the current stream is in takes the other one in before that is made to wait for more.
            after.take().map_or(Ok(()), |after| frame.buffer.order(py, after, stream))?;
            frame.streams.call(intern!(py, "follow"), (stream,))?;
        }
        let captured = frame.buffer.is_capturing(py, after.unwrap_or(stream))?;
        Ok(Route { stream, after, current, captured })
    }

    /// The stream for operations beside the caller's: always the same.
    fn own_stream(&self, py: Python<'_>) -> PyResult<u64> {
        if let Some(stream) = self.own_stream.get() {
            return Ok(*stream);
        }
        let stream = self.frame.streams.call(intern!(py, "beside"), ())?.extract(py)?;
        Ok(*self.own_stream.get_or_init(|| stream))
    }

    /// What the caller gets of an operation that was submitted: itself, where it is in another stream, and the hook. Where
    /// every result is new, whoever has only sent gets the operation and all its tensors in place of the hook.
    #[expect(clippy::type_complexity, reason = "the ends of `Dispatched` and `Combined`")]
    fn submitted<'py>(
        &self,
        slf: &Bound<'py, Self>,
        operation: Started<'py>,
        (inputs, set): (Vec<Bound<'py, PyAny>>, Option<&Claim>),
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
        let mut used: Tensors = inputs.into_iter().map(Bound::unbind).collect();
        let inputs = used.len();
        // A set of the ring's may be handed out again as soon as the caller lets it go: the operation that gets it comes
        // after this one, and after what the caller's stream does until then.
        used.extend(set.into_iter().flat_map(Claim::unowned).map(|tensor| tensor.clone_ref(py)));
        let outputs = set.into_iter().flat_map(|claim| claim.set.tensors.iter().flatten());
        if send_only && self.frame.fresh.is_some() {
            let (operation, used) = (operation.object(py)?, PyTuple::new(py, used)?);
            return Ok((Some(operation.clone()), Some((operation, used)), None));
        }
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
            self.frame.streams.call(intern!(py, "record"), (PyList::new(py, tensors)?,))?;
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
        let stream = calls.frame.arguments.get().current(py)?;
        calls.frame.streams.follow(py, stream)?;
        let operation = self.operation.bind(py);
        finish(operation, stream)?;
        let (used, _outputs) = std::mem::take(&mut *self.used.lock().unwrap_or_else(PoisonError::into_inner));
        if stream != self.stream {
            drop(calls.keep(py, operation.call_method0(intern!(py, "event"))?, used)?);
        }
        Ok(())
    }
}
