//! The native half of `crossrail.ExpertBuffer` in GPU memory: addresses and strides in, handles and events out. The
//! Python half (`crossrail`) validates the arrays; callers keep streams and arrays alive.
#![allow(unsafe_code)]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crossrail::Place;
use crossrail_ep::Layout;
use crossrail_ep_cuda as ep;
use crossrail_ep_cuda::arrays::Item;
use crossrail_ep_cuda::{EpCombineArgs, EpDispatchArgs};
use crossrail_types::{Error, ErrorKind, Result};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use super::device_args::{CombineArgs, DispatchArgs};
use super::device_array::DeviceArray;
use super::device_region::DeviceRegion;
use super::host::{Parameters, connect, fault_rows, link_rows, plan_dict, send_once};
use crate::borrow::loan::Call;
use crate::borrow::number::Flag;
use crate::borrow::{place, stream};
use crate::objects::context::Context;
use crate::objects::group::Group;
use crate::runtime::dicts::set_fields;
use crate::runtime::errors::{self, OrRaise};
use crate::runtime::lifecycle::{self, Detached};
use crate::runtime::{gate, wait};

/// The stream of an operation, and a stream whose work enqueued so far must precede it.
pub(super) type Streams = (u64, Option<u64>);

/// The native half of `crossrail.ExpertBuffer` on a GPU.
#[pyclass(module = "crossrail._native", frozen, weakref)]
pub(super) struct DeviceBuffer {
    native: Detached<ep::DeviceBuffer>,
    remembered: u64,
    /// Default timeout of the host's waits for the GPU.
    patience: Duration,
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        lifecycle::forget_device_buffer(self.remembered);
    }
}

impl DeviceBuffer {
    /// A dispatch in the expert layout.
    pub(super) fn begin_dispatch(
        &self,
        py: Python<'_>,
        args: EpDispatchArgs,
        streams: Streams,
        send_only: Flag,
    ) -> PyResult<DeviceOperation> {
        // SAFETY: the caller has seen to the addresses; that streams are alive is the documented rule for users.
        let dispatch = || unsafe { self.native.dispatch_expert(&args, streams.0, split(send_only)) };
        self.ordered(py, streams, dispatch)
    }

    /// A combine in the layout that the addresses are for. Raises UsageError for a handle of the other one.
    pub(super) fn begin_combine(
        &self,
        py: Python<'_>,
        (layout, args): (Layout, EpCombineArgs),
        handle: &DeviceHandle,
        streams: Streams,
        send_only: Flag,
    ) -> PyResult<DeviceOperation> {
        let (native, handle, split) = (&self.native, &handle.native, split(send_only));
        self.ordered(py, streams, || match layout {
            // SAFETY: as for a dispatch.
            Layout::Expert => unsafe { native.combine_expert(&args, handle, streams.0, split) },
            // SAFETY: as for a dispatch.
            Layout::Rank => unsafe { native.combine_rank(&args, handle, streams.0, split) },
        })
    }

    /// Calls `enqueue` for the first stream, after making it wait for the work enqueued so far in the second.
    fn ordered(
        &self,
        py: Python<'_>,
        (stream, after): Streams,
        enqueue: impl FnOnce() -> Result<ep::Enqueued> + Send,
    ) -> PyResult<DeviceOperation> {
        self.operation(py, stream, || {
            let Some(after) = after else { return enqueue() };
            let _entered = self.native.enter()?;
            // SAFETY: that streams are alive is the documented rule for users.
            unsafe { self.native.order(after, stream)? };
            enqueue()
        })
    }

    /// Enqueues a rank-layout dispatch with new routing in `stream`; returns it and the region for its result. None,
    /// with nothing enqueued, if `eager` is set and the stream is being captured. `count`: the host will read
    /// `DeviceOperation.counts`.
    pub(super) fn begin_new_rank_dispatch(
        &self,
        py: Python<'_>,
        args: EpDispatchArgs,
        stream: u64,
        count: bool,
        eager: bool,
    ) -> PyResult<Option<(DeviceOperation, DeviceRegion)>> {
        let native = self.native.here(py, "dispatch")?;
        let put = || {
            let _entered = native.enter()?;
            // SAFETY: that streams are alive is the documented rule for callers.
            let lease = unsafe { native.take_region_for(stream)? };
            if eager && lease.is_for_graph() {
                return Ok(None);
            }
            let of = ep::RankDispatch { region: &lease, cached: None, count };
            // SAFETY: the caller has seen to the addresses; nobody else has the region.
            let begun = unsafe { native.dispatch_rank(&args, of, stream, ep::Split::Whole)? };
            Ok(Some((begun, lease)))
        };
        let Some((begun, lease)) = gate::detached(py, put).or_raise(py)? else { return Ok(None) };
        let region = self.region(lease);
        region.used_by(stream, None);
        Ok(Some((self.begun(begun, stream), region)))
    }

    /// Whether a free region is left for an uncaptured rank-layout result.
    pub(super) fn has_spare_regions(&self) -> bool {
        self.native.spare_regions() > 0
    }

    fn region(&self, lease: ep::RegionLease) -> DeviceRegion {
        DeviceRegion::new(lease, self.native.shape(), self.native.ordinal())
    }

    fn begun(&self, enqueued: ep::Enqueued, stream: u64) -> DeviceOperation {
        let ep::Enqueued { handle, done, count, pending } = enqueued;
        let rest = Mutex::new(Rest { pending, done });
        DeviceOperation { handle, count, rest, stream, patience: self.patience }
    }

    /// What `enqueue` enqueues in `stream`.
    fn operation(
        &self,
        py: Python<'_>,
        stream: u64,
        enqueue: impl FnOnce() -> Result<ep::Enqueued> + Send,
    ) -> PyResult<DeviceOperation> {
        self.native.here(py, "experts")?;
        Ok(self.begun(gate::detached(py, enqueue).or_raise(py)?, stream))
    }
}

fn split(Flag(send_only): Flag) -> ep::Split {
    if send_only { ep::Split::Send } else { ep::Split::Whole }
}

#[pymethods]
impl DeviceBuffer {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "what a buffer is made for")]
    fn new(
        py: Python<'_>,
        context: &Bound<'_, Context>,
        group: &Bound<'_, Group>,
        name: String,
        parameters: Parameters,
        ordinal: u32,
        num_sms: Option<u32>,
        regions: u32,
        node: Option<u32>,
        between_nodes: Option<bool>,
        variants: bool,
        send: &str,
        node_ranks: Option<u32>,
    ) -> PyResult<DeviceBuffer> {
        let _call = Call::enter(py);
        let config = parameters.config(py)?;
        let (context, group) = (context.get().native().clone(), group.get().native().clone());
        let patience = config.timeout.saturating_mul(2) + context.settings().timeout;
        let send = send_once(py, send, node_ranks)?;
        let options =
            ep::DeviceOptions { ordinal, num_sms, regions, node, between_nodes, variants, send, ..Default::default() };
        let make = move || ep::DeviceBuffer::new(&group, &context, &name, config, options);
        let native = wait::on_own_thread(py, make)?;
        let remembered = lifecycle::remember_device_buffer(&native);
        Ok(DeviceBuffer { native: Detached::new(native), remembered, patience })
    }

    /// Other kernels on the same heap and connections: see `ep::DeviceBuffer::variant`.
    fn variant(&self, py: Python<'_>, parameters: Parameters) -> PyResult<DeviceBuffer> {
        let _call = Call::enter(py);
        let config = parameters.config(py)?;
        let native = self.native.here(py, "variant")?;
        let made = gate::detached(py, || native.variant(config)).or_raise(py)?;
        let remembered = lifecycle::remember_device_buffer(&made);
        Ok(DeviceBuffer { native: Detached::new(made), remembered, patience: self.patience })
    }

    #[getter]
    fn rank(&self) -> u32 {
        self.native.rank()
    }

    #[getter]
    fn ordinal(&self) -> u32 {
        self.native.ordinal()
    }

    #[getter]
    fn num_sms(&self) -> u32 {
        self.native.num_sms()
    }

    #[getter]
    fn heap_bytes(&self) -> u64 {
        self.native.heap_bytes()
    }

    /// State of the operations in flight, as recorded in this rank's heap; for debugging hangs.
    fn report(&self, py: Python<'_>) -> PyResult<String> {
        self.native.call(py, "report", |native| native.report())
    }

    #[getter]
    fn spare_regions(&self) -> u32 {
        self.native.spare_regions()
    }

    #[getter]
    fn network_bytes(&self) -> u64 {
        self.native.network_bytes()
    }

    fn connect(&self, py: Python<'_>, ranks: Vec<u32>, activate: Flag, timeout: Option<f64>) -> PyResult<()> {
        let _call = Call::enter(py);
        let native = self.native.here(py, "connect")?.clone();
        connect(py, timeout, move |limit| native.connect(&ranks, activate.0, limit))
    }

    fn disconnect(&self, py: Python<'_>, ranks: Vec<u32>) -> PyResult<()> {
        self.native.call(py, "disconnect", |native| native.disconnect(&ranks))
    }

    fn mask(&self, py: Python<'_>, ranks: Vec<u32>) -> PyResult<()> {
        self.native.call(py, "mask", |native| native.mask(&ranks))
    }

    fn unmask(&self, py: Python<'_>, ranks: Vec<u32>) -> PyResult<()> {
        self.native.call(py, "unmask", |native| native.unmask(&ranks))
    }

    fn masked(&self, py: Python<'_>) -> Vec<u32> {
        let _call = Call::enter(py);
        gate::detached(py, || self.native.masked())
    }

    fn connected(&self, py: Python<'_>) -> Vec<u32> {
        let _call = Call::enter(py);
        gate::detached(py, || self.native.connected())
    }

    fn missing(&self, py: Python<'_>) -> Vec<u32> {
        let _call = Call::enter(py);
        gate::detached(py, || self.native.missing())
    }

    fn faults<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let _call = Call::enter(py);
        fault_rows(py, gate::detached(py, || self.native.faults()))
    }

    fn links<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let _call = Call::enter(py);
        link_rows(py, gate::detached(py, || self.native.links()))
    }

    /// Ranks of each node if rows cross the network once for each node, else None; and why.
    #[getter]
    fn sending(&self) -> (Option<u32>, String) {
        match ep::SendOnce::of(&self.native) {
            (ep::SendOnce::PerNode { ranks }, why) => (ranks, why.to_owned()),
            (_, why) => (None, why.to_owned()),
        }
    }

    /// Bytes of a dispatch, and of a combine with its handle, by link.
    fn traffic<'py>(&self, py: Python<'py>, handle: &Bound<'_, DeviceHandle>) -> PyResult<Bound<'py, PyDict>> {
        let held = &handle.get().native;
        let traffic = self.native.call(py, "traffic", |native| native.traffic(held))?;
        let all = PyDict::new(py);
        for (operation, moved) in [("dispatch", traffic.dispatch), ("combine", traffic.combine)] {
            let links = PyDict::new(py);
            set_fields!(links, moved.links; nvlink_out, nvlink_in, network_out, network_in);
            all.set_item(operation, links)?;
        }
        Ok(all)
    }

    /// Waits for all enqueued GPU work, then for every connected, unmasked rank (a barrier).
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        let _call = Call::enter(py);
        let native = self.native.here(py, "sync")?.clone();
        wait::on_own_thread(py, move || native.sync(None))
    }

    fn destroy(&self, py: Python<'_>) -> PyResult<()> {
        let _call = Call::enter(py);
        if !self.native.is_here() {
            return Ok(());
        }
        gate::detached(py, || self.native.destroy()).or_raise(py)
    }

    /// Makes later work in stream `after` wait for the work enqueued so far in stream `before` (raw handles).
    fn order(&self, py: Python<'_>, before: u64, after: u64) -> PyResult<()> {
        // SAFETY: that streams are alive is the documented rule for callers.
        self.native.call(py, "order", |native| unsafe { native.order(before, after) })
    }

    /// Whether `stream` is being captured in a graph.
    pub(super) fn is_capturing(&self, py: Python<'_>, stream: u64) -> PyResult<bool> {
        let _call = Call::enter(py);
        // SAFETY: as above.
        unsafe { self.native.here(py, "is_capturing")?.is_capturing(stream) }.or_raise(py)
    }

    /// Memory of one result in the rank layout, for a dispatch in `stream`.
    fn take_region(&self, py: Python<'_>, stream: u64) -> PyResult<DeviceRegion> {
        // SAFETY: that streams are alive is the documented rule for callers.
        let lease = self.native.call(py, "take_region", |native| unsafe { native.take_region_for(stream) })?;
        Ok(self.region(lease))
    }

    /// Source token index of each of the first `count` rows of a rank-layout dispatch.
    fn sources(&self, py: Python<'_>, handle: &Bound<'_, DeviceHandle>, count: u64) -> PyResult<Py<DeviceArray>> {
        let _call = Call::enter(py);
        let held = handle.get().native.clone();
        let address = self.native.sources(&held).or_raise(py)?;
        let shape = self.native.shape();
        let most = u64::from(shape.ranks) * u64::from(shape.max_tokens);
        if count > most {
            return Err(errors::usage(py, "sources", format!("{count} rows, but the result has at most {most}"), ""));
        }
        DeviceArray::new(address, Item::I32, vec![count as i64], self.native.ordinal(), Arc::new(held)).object(py)
    }

    fn dispatch_expert(
        &self,
        py: Python<'_>,
        args: &Bound<'_, DispatchArgs>,
        stream: u64,
        send_only: Flag,
    ) -> PyResult<DeviceOperation> {
        let _call = Call::enter(py);
        self.begin_dispatch(py, args.borrow().0, (stream, None), send_only)
    }

    /// In the layout of the handle.
    fn combine(
        &self,
        py: Python<'_>,
        args: &Bound<'_, CombineArgs>,
        handle: &Bound<'_, DeviceHandle>,
        stream: u64,
        send_only: Flag,
    ) -> PyResult<DeviceOperation> {
        let _call = Call::enter(py);
        let (handle, args) = (handle.get(), args.borrow().0);
        self.begin_combine(py, (handle.native.layout(), args), handle, (stream, None), send_only)
    }

    /// `cached`: the routing of that dispatch is repeated. `count`: the host will ask for `DeviceOperation.counts`.
    #[expect(clippy::too_many_arguments, reason = "arguments of the kernel, host objects beside them, and the stream")]
    fn dispatch_rank(
        &self,
        py: Python<'_>,
        args: &Bound<'_, DispatchArgs>,
        region: &Bound<'_, DeviceRegion>,
        cached: Option<&Bound<'_, DeviceHandle>>,
        count: Flag,
        stream: u64,
        send_only: Flag,
    ) -> PyResult<DeviceOperation> {
        let _call = Call::enter(py);
        let (args, cached) = (args.borrow().0, cached.map(|handle| &handle.get().native));
        let of = ep::RankDispatch { region: region.get().lease(), cached, count: count.0 };
        // SAFETY: as for the expert layout; the region was taken for this dispatch, so that nobody else has it.
        self.operation(py, stream, || unsafe { self.native.dispatch_rank(&args, of, stream, split(send_only)) })
    }
}

/// An operation enqueued in a stream. If only its sending half was enqueued, dropping it enqueues the receiving half in
/// the same stream, because the other ranks wait for it.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct DeviceOperation {
    handle: ep::DeviceHandle,
    count: Option<ep::Counts>,
    rest: Mutex<Rest>,
    stream: u64,
    patience: Duration,
}

/// The half that is not enqueued yet, and the completion point of what is.
struct Rest {
    pending: Option<ep::Pending>,
    done: ep::Completion,
}

impl DeviceOperation {
    fn rest(&self) -> MutexGuard<'_, Rest> {
        self.rest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether `counts` would return without waiting, or were not requested.
    pub(super) fn has_counts(&self) -> bool {
        self.count.as_ref().is_none_or(|count| count.rows().is_some())
    }

    /// # Safety
    /// `stream` must be a live stream's handle, or 0.
    unsafe fn receive(&self, stream: u64) -> Result<()> {
        let mut rest = self.rest();
        let Some(pending) = rest.pending.as_mut() else {
            return Err(Error::new(ErrorKind::Usage, "finish", "the operation was finished already"));
        };
        // SAFETY: the caller vouches for the stream; the addresses are those of the operation's beginning.
        rest.done = unsafe { pending.finish_in(stream)? };
        rest.pending = None;
        Ok(())
    }
}

impl Drop for DeviceOperation {
    fn drop(&mut self) {
        let begun = self.rest().pending.is_some();
        if begun {
            // SAFETY: the stream of the sending half. Later calls report a failure.
            let _ = unsafe { self.receive(self.stream) };
        }
    }
}

#[pymethods]
impl DeviceOperation {
    /// Enqueues the receiving half in `stream`, after the sending half.
    pub(super) fn finish(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        let _call = Call::enter(py);
        // SAFETY: that streams are alive is the documented rule for callers.
        gate::detached(py, || unsafe { self.receive(stream) }).or_raise(py)
    }

    /// Whether `finish` is still to be called.
    #[getter]
    fn begun(&self) -> bool {
        self.rest().pending.is_some()
    }

    /// Handle of the routing; `rows`: number of rows of a rank-layout result.
    pub(super) fn handle(&self, rows: u64) -> DeviceHandle {
        DeviceHandle { native: self.handle.clone(), rows }
    }

    /// Event after everything enqueued so far.
    pub(super) fn event(&self) -> DeviceEvent {
        DeviceEvent { done: self.rest().done.clone(), patience: self.patience }
    }

    /// Waits for and returns the number of received rows, the rows of each local expert, and each rank's host word.
    /// Raises UsageError if the dispatch did not request counts.
    pub(super) fn counts(&self, py: Python<'_>) -> PyResult<(u32, Vec<i32>, Vec<u32>)> {
        let _call = Call::enter(py);
        let Some(count) = &self.count else {
            return Err(errors::usage(py, "dispatch", "the dispatch did not request counts", ""));
        };
        let (rows, experts) = wait::bounded(py, self.patience, |left| count.wait(left.unwrap_or(self.patience)))?;
        Ok((rows, experts, count.host_words()))
    }
}

/// The routing of a dispatch on a GPU: for its combine, and for dispatches in the rank layout that repeat it. Made by
/// `ExpertBuffer.dispatch`.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct DeviceHandle {
    native: ep::DeviceHandle,
    rows: u64,
}

#[pymethods]
impl DeviceHandle {
    /// "expert" or "rank".
    #[getter]
    fn layout(&self) -> String {
        self.native.layout().to_string()
    }

    /// Tokens that this rank sent.
    #[getter]
    pub(super) fn tokens(&self) -> u32 {
        self.native.tokens()
    }

    /// Rank layout: rows of the dispatch's output arrays; expert layout: rows of each expert's.
    #[getter]
    pub(super) fn rows(&self) -> u64 {
        self.rows
    }

    /// Whether weights went with this rank's tokens.
    #[getter]
    fn has_weights(&self) -> bool {
        self.native.has_weights()
    }

    fn __repr__(&self) -> String {
        format!("<crossrail.DeviceHandle, {} layout, {} tokens sent>", self.native.layout(), self.native.tokens())
    }
}

/// Completion event of an operation.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct DeviceEvent {
    done: ep::Completion,
    patience: Duration,
}

#[pymethods]
impl DeviceEvent {
    /// Work enqueued in `stream` (a raw handle) from now on runs after the operation.
    pub(super) fn wait(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        let _call = Call::enter(py);
        // SAFETY: that streams are alive is the documented rule for callers.
        gate::detached(py, || unsafe { self.done.wait(stream) }).or_raise(py)
    }

    /// Waits until the operation is done.
    #[pyo3(signature = (timeout = None))]
    fn synchronize(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let _call = Call::enter(py);
        let limit = wait::seconds(py, "synchronize", timeout)?.unwrap_or(self.patience);
        wait::bounded(py, limit, |left| self.done.synchronize(left.unwrap_or(limit)))
    }

    /// Whether the operation is done.
    pub(super) fn is_done(&self, py: Python<'_>) -> PyResult<bool> {
        let _call = Call::enter(py);
        gate::detached(py, || self.done.is_done()).or_raise(py)
    }

    /// Whether the operation was captured in a graph: then only streams of the same capture can wait for it.
    #[getter]
    fn is_captured(&self) -> bool {
        self.done.is_captured()
    }
}

/// Memory that a buffer would need on one rank, with `far` ranks whose heaps it cannot map.
#[pyfunction]
pub(super) fn device_plan(
    py: Python<'_>,
    parameters: Parameters,
    ordinal: u32,
    regions: u32,
    far: u32,
    send: String,
    node_ranks: Option<u32>,
) -> PyResult<Bound<'_, PyDict>> {
    let config = parameters.config(py)?;
    let send = send_once(py, &send, node_ranks)?;
    let options = ep::DeviceOptions { ordinal, regions, send, ..ep::DeviceOptions::default() };
    plan_dict(py, &gate::detached(py, || ep::DeviceBuffer::plan(&config, &options, far)).or_raise(py)?)
}

/// The GPU that `device` names (cuda, cuda:1, a number, a torch.device), None for the host.
#[pyfunction]
pub(super) fn device_of(device: Option<&Bound<'_, PyAny>>) -> PyResult<Option<u32>> {
    Ok(match place::parse(device)? {
        Place::Host => None,
        Place::Gpu(ordinal) => Some(ordinal),
    })
}

/// The raw handle of a stream, and the GPU that it says that it belongs to.
#[pyfunction]
pub(super) fn stream_of(stream: &Bound<'_, PyAny>, operation: &str) -> PyResult<(u64, Option<u32>)> {
    let parsed = stream::parse(Some(stream), operation)?;
    Ok(parsed.map_or((0, None), |stream| (stream.handle, stream.ordinal)))
}
