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
use super::expert_target::{Started, StreamOrder, Target, finish};
use super::tensor_kinds::Tensor;
use crate::borrow::loan::Call;
use crate::borrow::number::Flag;

/// Operations in other streams whose tensors are kept before completion is polled.
const KEPT: usize = 8;

type Tensors = Vec<Py<PyAny>>;

/// Tensors kept alive until an operation in another stream than the caller's completes: PyTorch's allocator does not
/// know of that stream.
#[derive(Clone)]
struct Used {
    /// Completion of the operation.
    event: Arc<Py<PyAny>>,
    /// Emptied once the caller's stream waits for the operation: reuse by the allocator is then ordered after it.
    tensors: Arc<Mutex<Tensors>>,
}
type Kept = VecDeque<Used>;

/// What the calls of a buffer have in common, read once.
#[derive(FromPyObject)]
struct Frame {
    /// A `DeviceBuffer`, or what has its methods.
    buffer: Target,
    arguments: Py<Arguments>,
    streams: StreamOrder,
    /// `(_cdata) -> count`: reference count of a storage; None where PyTorch does not expose it.
    uses: Option<Py<PyAny>>,
    /// `(base, rows, in_use) -> (_cdata, base, tensors)`. `outputs`: rows, scales or None, counts, ranges, source.
    /// `sums`: the sums of `rows` tokens, a view of `base`.
    outputs: Py<PyAny>,
    sums: Py<PyAny>,
    /// Allocate new tensors for every result: shapes and options of a dispatch's rows, scales or None, counts, ranges
    /// and source, and the options of the sums. A combine then also returns its operation.
    fresh: Option<(Vec<Option<Fresh>>, Py<PyDict>)>,
    /// `torch.empty`.
    empty_tensor: Py<PyAny>,
    /// Strides of the scales of outputs, in bytes.
    scale_strides: [u64; 3],
}

/// Dispatch and combine of one buffer. Usable from any thread, like the buffer.
///
/// Methods validate arguments before anything is enqueued, and raise UsageError. In strict (DeepEP) mode they return
/// None instead, and the caller determines which argument was wrong.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct ExpertCalls {
    frame: Frame,
    outputs: Ring,
    sums: Ring,
    /// Tensors of operations in other streams than the caller's, oldest first.
    kept: Mutex<Kept>,
    /// The stream for operations beside the caller's.
    own_stream: OnceLock<u64>,
}

/// Completion event of an operation in another stream than the caller's, and the tensors that it uses.
type Beside<'py> = (Bound<'py, PyAny>, Bound<'py, PyTuple>);
/// A dispatch: rows, scales or None, counts, ranges, source; the operation, its tokens, where it is in another stream, and
/// the hook.
type Dispatched<'py> = (Bound<'py, PyTuple>, Bound<'py, PyAny>, u32, Option<Beside<'py>>, Option<Bound<'py, Receive>>);
/// A combine: the sums; the operation if results are always new or only the sending half was enqueued; then as
/// `Dispatched`.
type Combined<'py> = (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>, Option<Beside<'py>>, Option<Bound<'py, Receive>>);

/// The stream of an operation, and its ordering.
struct Route {
    stream: u64,
    /// The caller's current stream, if `stream` must still be made to wait for it.
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

    /// Enqueues a dispatch. Returns rows, scales or None, counts, ranges and source; the operation, and its tokens;
    /// `(event, tensors)` with `beside`, which uses the buffer's own stream without making the caller's wait; and the
    /// hook with `send_only`.
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

    /// Enqueues a combine of the dispatch that returned `handle` and sent `tokens`. `topk_idx`: only its shape is
    /// checked. `wire`: row format, one of `EP_WIRE_`. Returns the sums; the operation if results are always new, or
    /// None; then as `dispatch`.
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
    /// Chooses the stream of the next operation, and orders it after the buffer's last one.
    fn route(&self, py: Python<'_>, beside: bool) -> PyResult<Route> {
        let frame = &self.frame;
        let current = frame.arguments.get().current(py)?;
        let stream = if beside { self.own_stream(py)? } else { current };
        let mut after = (stream != current).then_some(current);
        if frame.streams.is_another(py, stream)? {
            // If the current stream is being captured, the other one must join the capture before it waits for more.
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

    /// What a submitted operation returns: the operation, its event and tensors if it is in another stream, and the
    /// hook. If results are always new, `send_only` returns the operation and all its tensors instead of the hook.
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
            // Create the object only for callers that use it.
            let operation = self.frame.fresh.is_some().then(|| operation.object(py)).transpose()?;
            return Ok((operation, None, None));
        }
        let mut used: Tensors = inputs.into_iter().map(Bound::unbind).collect();
        let inputs = used.len();
        // A set owned by the ring may be reused as soon as the caller drops it: the operation that reuses it is ordered
        // after this one, and after the work of the caller's stream until then.
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

    /// Keeps tensors alive until `event` completes, because PyTorch's allocator does not know of the stream that uses
    /// them. Returns the event if it was captured.
    fn keep<'py>(
        &self,
        py: Python<'py>,
        event: Bound<'py, PyAny>,
        tensors: Tensors,
    ) -> PyResult<Result<Used, Bound<'py, PyAny>>> {
        if event.getattr(intern!(py, "is_captured"))?.is_truthy()? {
            // The graph may be replayed after its tensors are dropped: their memory belongs to the graph.
            self.frame.streams.call(intern!(py, "record"), (PyList::new(py, tensors)?,))?;
            return Ok(Err(event));
        }
        let used = Used { event: Arc::new(event.unbind()), tensors: Arc::new(Mutex::new(tensors)) };
        let mut kept = self.locked();
        let still_used = kept.iter().position(|used| !used.is_released()).unwrap_or(kept.len());
        let released: Vec<_> = kept.drain(..still_used).collect();
        kept.push_back(used.clone());
        // Operations complete in order, and a query is expensive: one completed operation implies those before it.
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

/// Completion event of an operation in another stream than the caller's.
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

/// Hook that enqueues the receiving half of an operation. If it is dropped uncalled, the receiving half is enqueued in
/// the stream of the sending half.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct Receive {
    // Dropped first: finishing needs the memory of the tensors.
    operation: Py<PyAny>,
    /// Tensors to keep alive until the operation completes, and results, which must not be reused until then.
    used: Mutex<(Tensors, Tensors)>,
    calls: Py<ExpertCalls>,
    stream: u64,
}

#[pymethods]
impl Receive {
    /// Enqueues the receiving half in the current stream. Raises UsageError on a second call.
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
