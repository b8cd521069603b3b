//! The native half of `crossrail.ExpertBuffer`: numbers and memory in, memory and numbers out. What the arrays mean is
//! said in `crossrail.experts`.
#![allow(unsafe_code)]

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crossrail_ep_host as ep;
use crossrail_types::{Error, ErrorKind, Result};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::borrow::lent::{self, Use};
use crate::borrow::loan::Call;
use crate::objects::context::Context;
use crate::objects::endpoint::lane_reports;
use crate::objects::group::Group;
use crate::objects::span::Span;
use crate::runtime::dicts::{rows, set_fields};
use crate::runtime::errors::{self, OrRaise};
use crate::runtime::lifecycle::{self, Detached};
use crate::runtime::{gate, wait};

/// What a buffer is made for, as a dict.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Parameters {
    ranks: u32,
    max_tokens: usize,
    hidden: usize,
    experts: usize,
    topk: usize,
    dispatch_dtype: String,
    scale: String,
    layouts: Vec<String>,
    prereduce: bool,
    share_node: bool,
    timeout: f64,
    on_loss: String,
}

impl Parameters {
    /// The layout, if there is one and no other.
    pub(crate) fn only_layout(&self) -> Option<&str> {
        match self.layouts.as_slice() {
            [layout] => Some(layout),
            _ => None,
        }
    }

    pub(crate) fn config(self, py: Python<'_>) -> PyResult<ep::Config> {
        let layouts = self.layouts.iter().map(|layout| parse_layout(py, layout)).collect::<PyResult<_>>()?;
        Ok(ep::Config {
            ranks: self.ranks,
            max_tokens: self.max_tokens,
            hidden: self.hidden,
            experts: self.experts,
            topk: self.topk,
            payload: parse_payload(py, &self.dispatch_dtype, &self.scale)?,
            layouts,
            prereduce: self.prereduce,
            share_node: self.share_node,
            timeout: wait::seconds(py, "ExpertBuffer", Some(self.timeout))?.unwrap_or_default(),
            on_loss: match self.on_loss.as_str() {
                "raise" => ep::OnLoss::Raise,
                "mask" => ep::OnLoss::Mask,
                other => {
                    return Err(errors::usage(py, "ExpertBuffer", format!("no on_loss {other:?}"), "raise or mask"));
                }
            },
        })
    }
}

/// Connects a buffer's ranks by `call`, which is given the time that it may take.
pub(super) fn connect(
    py: Python<'_>,
    timeout: Option<f64>,
    call: impl FnOnce(Option<Duration>) -> Result<()> + Send + 'static,
) -> PyResult<()> {
    let _call = Call::enter(py);
    let limit = wait::seconds(py, "connect", timeout)?;
    wait::on_own_thread(py, move || call(limit))
}

pub(crate) fn parse_layout(py: Python<'_>, layout: &str) -> PyResult<ep::Layout> {
    match layout {
        "expert" => Ok(ep::Layout::Expert),
        "rank" => Ok(ep::Layout::Rank),
        other => Err(errors::usage(py, "layout", format!("no layout {other:?}"), "expert or rank")),
    }
}

fn parse_payload(py: Python<'_>, dtype: &str, scale: &str) -> PyResult<ep::Payload> {
    let scale = match scale {
        "f32" => ep::Scale::F32,
        "power2" => ep::Scale::PowerOfTwo,
        "ue8m0" => ep::Scale::Ue8m0,
        other => return Err(errors::usage(py, "scale", format!("no scale {other:?}"), "f32, power2 or ue8m0")),
    };
    match dtype {
        "bf16" => Ok(ep::Payload::Bf16),
        "fp8" => Ok(ep::Payload::Fp8(scale)),
        other => Err(errors::usage(py, "dispatch_dtype", format!("no dispatch_dtype {other:?}"), "fp8 or bf16")),
    }
}

/// The native half of `crossrail.ExpertBuffer`.
#[pyclass(module = "crossrail._native", frozen, weakref)]
pub(crate) struct ExpertBuffer {
    native: Detached<ep::ExpertBuffer>,
    remembered: u64,
}

impl ExpertBuffer {
    pub(crate) fn native(&self) -> &ep::ExpertBuffer {
        &self.native
    }
}

impl Drop for ExpertBuffer {
    fn drop(&mut self) {
        lifecycle::forget_buffer(self.remembered);
    }
}

#[pymethods]
impl ExpertBuffer {
    #[new]
    fn new(
        py: Python<'_>,
        context: &Bound<'_, Context>,
        group: &Bound<'_, Group>,
        name: String,
        parameters: Parameters,
    ) -> PyResult<ExpertBuffer> {
        let _call = Call::enter(py);
        let config = parameters.config(py)?;
        let (context, group) = (context.get().native().clone(), group.get().native().clone());
        let native = wait::on_own_thread(py, move || ep::ExpertBuffer::new(&group, &context, &name, config))?;
        Ok(ExpertBuffer { remembered: lifecycle::remember_buffer(&native), native: Detached::new(native) })
    }

    #[getter]
    fn rank(&self) -> u32 {
        self.native.rank()
    }

    fn connect(&self, py: Python<'_>, ranks: Vec<u32>, activate: bool, timeout: Option<f64>) -> PyResult<()> {
        let _call = Call::enter(py);
        let native = self.native.clone();
        connect(py, timeout, move |limit| native.connect(&ranks, activate, limit))
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

    fn faults<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let _call = Call::enter(py);
        fault_rows(py, gate::detached(py, || self.native.faults()))
    }

    fn links<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let _call = Call::enter(py);
        link_rows(py, gate::detached(py, || self.native.links()))
    }

    /// `x`, `topk_idx`, `topk_weights`: bytes of bf16, i64 and f32.
    #[pyo3(signature = (x, topk_idx, topk_weights, layout, handle, alignment))]
    #[expect(clippy::too_many_arguments, reason = "what a dispatch takes")]
    fn dispatch(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        topk_idx: &Bound<'_, PyAny>,
        topk_weights: Option<&Bound<'_, PyAny>>,
        layout: &str,
        handle: Option<&Bound<'_, Handle>>,
        alignment: usize,
    ) -> PyResult<PendingDispatch> {
        let _call = Call::enter(py);
        let input = ep::Input {
            x: read(x, "dispatch")?,
            topk_idx: read(topk_idx, "dispatch")?,
            topk_weights: topk_weights.map(|weights| read(weights, "dispatch")).transpose()?,
        };
        let handle = handle.map(|handle| handle.get().0.clone());
        let layout = parse_layout(py, layout)?;
        let options = ep::DispatchOptions { layout, handle, alignment, ..ep::DispatchOptions::default() };
        let pending = gate::detached(py, || self.native.dispatch(input, options)).or_raise(py)?;
        Ok(PendingDispatch(Running::new(pending)))
    }

    /// `y`, `bias`, `out`: bytes of bf16; `topk_weights`: of f32.
    #[pyo3(signature = (y, handle, topk_weights, bias, out))]
    fn combine(
        &self,
        y: &Bound<'_, PyAny>,
        handle: &Bound<'_, Handle>,
        topk_weights: Option<&Bound<'_, PyAny>>,
        bias: Vec<Bound<'_, PyAny>>,
        out: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PendingCombine> {
        let py = handle.py();
        let _call = Call::enter(py);
        let y = read(y, "combine")?;
        let options = ep::CombineOptions {
            weights: topk_weights.map(|weights| read(weights, "combine")).transpose()?,
            bias: bias.iter().map(|bias| read(bias, "combine")).collect::<PyResult<_>>()?,
            out: out.map(|out| written(out, "combine")).transpose()?,
            refuse: None,
        };
        let handle = &handle.get().0;
        let pending = gate::detached(py, || self.native.combine(y, handle, options)).or_raise(py)?;
        Ok(PendingCombine(Running::new(pending)))
    }

    /// Joins the collective dispatch as failed, so that the other ranks do not wait for this one.
    fn refuse_dispatch(&self, py: Python<'_>, why: String) -> PyResult<PendingDispatch> {
        let _call = Call::enter(py);
        let why = Error::new(ErrorKind::Usage, "dispatch", why);
        let pending = gate::detached(py, || self.native.refuse_dispatch(why)).or_raise(py)?;
        Ok(PendingDispatch(Running::new(pending)))
    }

    /// Joins the collective combine as failed, so that the other ranks do not wait for this one.
    fn refuse_combine(&self, py: Python<'_>, why: String) -> PyResult<PendingCombine> {
        let _call = Call::enter(py);
        let why = Error::new(ErrorKind::Usage, "combine", why);
        let pending = gate::detached(py, || self.native.refuse_combine(why)).or_raise(py)?;
        Ok(PendingCombine(Running::new(pending)))
    }

    /// Waits at a barrier for all connected, unmasked ranks.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        let _call = Call::enter(py);
        let pending = gate::detached(py, || self.native.sync()).or_raise(py)?;
        Running::new(pending).finish(py)
    }

    fn destroy(&self, py: Python<'_>) -> PyResult<()> {
        let _call = Call::enter(py);
        gate::detached(py, || self.native.destroy()).or_raise(py)
    }
}

/// The bytes of an array that an operation reads.
pub(crate) fn read(object: &Bound<'_, PyAny>, operation: &str) -> PyResult<ep::Tensor> {
    let lent = lent::bytes(object, Use::Read, operation)?;
    // SAFETY: valid until the keeper is dropped; that nobody writes meanwhile is the documented rule for callers.
    Ok(unsafe { ep::Tensor::raw(lent.ptr, lent.len, Some(lent.keep)) })
}

/// The bytes of an array that an operation writes.
fn written(object: &Bound<'_, PyAny>, operation: &str) -> PyResult<ep::TensorMut> {
    let lent = lent::bytes(object, Use::Write, operation)?;
    // SAFETY: as above, and writable.
    Ok(unsafe { ep::TensorMut::raw(lent.ptr, lent.len, Some(lent.keep)) })
}

/// An operation in flight. If dropped unfinished it completes in the background, because the other ranks wait for it.
struct Running<T: Send + 'static>(Mutex<Option<ep::Pending<T>>>);

/// Time slice of an operation that completes in the background; other operations get a turn in between.
const TURN: Duration = Duration::from_millis(10);

impl<T: Send + 'static> Running<T> {
    fn new(pending: ep::Pending<T>) -> Running<T> {
        Running(Mutex::new(Some(pending)))
    }

    fn lock(&self) -> MutexGuard<'_, Option<ep::Pending<T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn finish_within(&self, limit: Duration) -> Result<Option<T>> {
        let mut running = self.lock();
        let Some(pending) = running.as_mut() else {
            return Err(Error::new(ErrorKind::Usage, "finish", "the operation was finished already"));
        };
        let outcome = pending.finish_within(limit);
        if !matches!(outcome, Ok(None)) {
            *running = None;
        }
        outcome
    }

    fn finish(&self, py: Python<'_>) -> PyResult<T> {
        let _call = Call::enter(py);
        wait::bounded(py, wait::FOREVER, |left| {
            let result = self.finish_within(left.unwrap_or(wait::FOREVER))?;
            result.ok_or_else(|| Error::new(ErrorKind::Timeout, "finish", "not finished"))
        })
    }
}

impl<T: Send + 'static> Drop for Running<T> {
    fn drop(&mut self) {
        let Some(mut pending) = self.lock().take() else { return };
        let go_on = move || while let Ok(None) = pending.finish_within(TURN) {};
        // Without a thread the closure is dropped, and with it the operation, which is finished here then.
        let _ = std::thread::Builder::new().name("crossrail-finish".to_owned()).spawn(go_on);
    }
}

/// A dispatch that was begun.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct PendingDispatch(Running<ep::Dispatched>);

#[pymethods]
impl PendingDispatch {
    fn finish(&self, py: Python<'_>) -> PyResult<Dispatched> {
        let _call = Call::enter(py);
        self.0.finish(py).map(Dispatched)
    }
}

/// A combine that was begun.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct PendingCombine(Running<ep::Combined>);

#[pymethods]
impl PendingCombine {
    fn finish(&self, py: Python<'_>) -> PyResult<Combined> {
        let _call = Call::enter(py);
        let ep::Combined { missing, out, timing, bytes } = self.0.finish(py)?;
        Ok(Combined { missing, out: Mutex::new(out), timing, bytes })
    }
}

/// Result of a host-memory dispatch.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct Dispatched(ep::Dispatched);

#[pymethods]
impl Dispatched {
    #[getter]
    fn handle(&self) -> Handle {
        Handle(self.0.handle.clone())
    }

    /// Ranks that did not take part in the exchange.
    #[getter]
    fn missing(&self) -> Vec<u32> {
        self.0.missing.clone()
    }

    /// The rows' bytes.
    #[getter]
    fn rows(&self) -> Span {
        placed(&self.0.rows)
    }

    /// Their scales' bytes, in fp8.
    #[getter]
    fn scales(&self) -> Option<Span> {
        self.0.scales.as_ref().map(placed)
    }

    /// Rows of each local expert, i32.
    #[getter]
    fn counts(&self) -> Span {
        self.0.counts.clone().into()
    }

    #[getter]
    fn timing<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        timing_dict(py, &self.0.timing)
    }

    #[getter]
    fn bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        bytes_dict(py, self.0.bytes)
    }
}

fn placed(placed: &ep::Placed) -> Span {
    let memory = placed.memory.clone();
    // SAFETY: a part of that memory, which lives as long as any clone of it.
    unsafe { Span::new(memory.ptr().wrapping_add(placed.offset), placed.len, memory) }
}

/// The sums.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct Combined {
    /// Ranks without a part in the sums.
    #[pyo3(get)]
    missing: Vec<u32>,
    out: Mutex<Option<Vec<u16>>>,
    timing: ep::Timing,
    bytes: ep::Bytes,
}

#[pymethods]
impl Combined {
    /// Bytes of bf16, once; None where the caller gave the memory.
    fn take(&self) -> Option<Span> {
        self.out.lock().unwrap_or_else(PoisonError::into_inner).take().map(Span::from)
    }

    #[getter]
    fn timing<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        timing_dict(py, &self.timing)
    }

    #[getter]
    fn bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        bytes_dict(py, self.bytes)
    }
}

/// The routing of a dispatch: for its combine, and for dispatches that repeat it. Made by `ExpertBuffer.dispatch`.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct Handle(ep::Handle);

#[pymethods]
impl Handle {
    /// "expert" or "rank".
    #[getter]
    fn layout(&self) -> String {
        self.0.layout().to_string()
    }

    /// Tokens that this rank sent.
    #[getter]
    fn tokens(&self) -> usize {
        self.0.tokens()
    }

    /// Number of received rows.
    #[getter]
    fn rows(&self) -> usize {
        self.0.rows()
    }

    /// Whether any rank sent weights.
    #[getter]
    fn has_weights(&self) -> bool {
        self.0.has_weights()
    }

    fn __repr__(&self) -> String {
        let (layout, sent, came) = (self.0.layout(), self.0.tokens(), self.0.rows());
        format!("<crossrail.Handle, {layout} layout, {sent} tokens sent, {came} rows received>")
    }

    /// i64 [local experts, ranks].
    #[pyo3(name = "_ranges")]
    fn ranges(&self) -> Span {
        self.0.ranges().to_vec().into()
    }

    /// i64 [ranks + 1].
    #[pyo3(name = "_offsets")]
    fn offsets(&self) -> Span {
        self.0.offsets().into()
    }

    /// i64 [rows, topk].
    #[pyo3(name = "_topk_idx")]
    fn topk_idx(&self, py: Python<'_>) -> Span {
        let _call = Call::enter(py);
        gate::detached(py, || self.0.topk_idx()).into()
    }

    /// f32 [rows, topk].
    #[pyo3(name = "_topk_weights")]
    fn topk_weights(&self, py: Python<'_>) -> Span {
        let _call = Call::enter(py);
        gate::detached(py, || self.0.topk_weights()).into()
    }

    /// i32 [experts, most]; -1 where no row is.
    #[pyo3(name = "_sources")]
    fn sources(&self, py: Python<'_>, experts: usize, most: usize) -> Span {
        let _call = Call::enter(py);
        let fill = || {
            let mut tokens = vec![-1i32; experts.saturating_mul(most)];
            self.0.sources(most, &mut tokens);
            tokens
        };
        gate::detached(py, fill).into()
    }
}

/// The number of times that a row crosses the network: "rank", "node" or "auto"; `node_ranks`: ranks of each node.
pub(crate) fn send_once(py: Python<'_>, send: &str, node_ranks: Option<u32>) -> PyResult<crossrail_ep_cuda::SendOnce> {
    match send {
        "rank" => Ok(crossrail_ep_cuda::SendOnce::PerRank),
        "node" => Ok(crossrail_ep_cuda::SendOnce::PerNode { ranks: node_ranks }),
        "auto" => Ok(crossrail_ep_cuda::SendOnce::ByCost { ranks: node_ranks }),
        _ => Err(errors::usage(py, "ExpertBuffer", format!("send is {send:?}, not 'rank', 'node' or 'auto'"), "")),
    }
}

pub(super) fn fault_rows(py: Python<'_>, faults: Vec<ep::Fault>) -> PyResult<Bound<'_, PyList>> {
    rows(py, faults, |row, fault| {
        row.set_item("text", fault.to_string())?;
        set_fields!(row, fault; rank, operation, number, stage, why, left, masked);
        Ok(())
    })
}

pub(super) fn link_rows(py: Python<'_>, links: Vec<ep::Link>) -> PyResult<Bound<'_, PyList>> {
    rows(py, links, |row, link| {
        row.set_item("rank", link.rank)?;
        let kind = match link.kind {
            ep::LinkKind::Myself => "self",
            ep::LinkKind::Heap => "heap",
            ep::LinkKind::Network => "network",
        };
        row.set_item("kind", kind)?;
        set_fields!(row, link; masked, missed, gateway);
        row.set_item("proxy", link.proxy.map(|proxy| proxy_dict(py, proxy)).transpose()?)?;
        row.set_item("lanes", lane_reports(py, link.lanes)?)
    })
}

fn proxy_dict(py: Python<'_>, proxy: ep::ProxyReport) -> PyResult<Bound<'_, PyDict>> {
    let all = PyDict::new(py);
    set_fields!(all, proxy; commands, sent_bytes, pending, in_flight, bursts);
    all.set_item("burst_s", proxy.burst_ns as f64 / 1e9)?;
    let rails = rows(py, proxy.rails, |row, rail| {
        set_fields!(row, rail; name, lost, sent_bytes, received_bytes);
        Ok(())
    })?;
    all.set_item("rails", rails)?;
    Ok(all)
}

fn timing_dict<'py>(py: Python<'py>, timing: &ep::Timing) -> PyResult<Bound<'py, PyDict>> {
    let all = PyDict::new(py);
    set_fields!(all, timing; cast_us, copy_us, sum_us, wait_us, total_us);
    Ok(all)
}

pub(crate) fn bytes_dict(py: Python<'_>, bytes: ep::Bytes) -> PyResult<Bound<'_, PyDict>> {
    let all = PyDict::new(py);
    set_fields!(all, bytes; logical, wire, network);
    Ok(all)
}

/// Memory that a buffer would need on one rank, with `network` ranks on other nodes.
#[pyfunction]
pub(super) fn expert_plan(
    py: Python<'_>,
    parameters: Parameters,
    network: u32,
    sharing: u32,
) -> PyResult<Bound<'_, PyDict>> {
    plan_dict(py, &ep::ExpertBuffer::plan(&parameters.config(py)?, network, sharing).or_raise(py)?)
}

pub(super) fn plan_dict<'py>(py: Python<'py>, plan: &ep::Plan) -> PyResult<Bound<'py, PyDict>> {
    let kinds = PyDict::new(py);
    for (kind, bytes) in &plan.kinds {
        kinds.set_item(kind, bytes)?;
    }
    let all = PyDict::new(py);
    all.set_item("bytes", kinds)?;
    all.set_item("total", plan.total())?;
    all.set_item("local_ranks", plan.sharing)?;
    set_fields!(all, plan; free, largest_tokens, pinned);
    all.set_item("text", plan.to_string())?;
    Ok(all)
}
