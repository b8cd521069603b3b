//! The measuring loop of dispatch and combine in GPU memory, run detached.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crossrail_bench::DeviceEpWork;
use crossrail_ep_cuda::{DeviceOptions, LinkKind, SendOnce};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use super::watch::Watch;
use crate::borrow::loan::Call;
use crate::experts::host::{Parameters, parse_layout, send_once};
use crate::objects::context::Context;
use crate::objects::group::Group;
use crate::runtime::errors::{self, OrRaise};
use crate::runtime::gate;
use crate::runtime::lifecycle::Detached;

/// Where a bench's buffer is, as a dict.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(super) struct On {
    ordinal: u32,
    num_sms: Option<u32>,
    cast_before: bool,
    send: String,
}

/// A buffer in GPU memory with the tensors of its operations, for measurements. Every rank of the group makes it.
///
/// Parameters
/// ----------
/// name : str
///     Name of the buffers that belong together.
/// parameters : dict
///     The parameters of an ExpertBuffer, with one layout.
/// on : dict
///     The GPU (`ordinal`), `num_sms` (None means all), `cast_before` (rows are given as fp8), and `send` as ExpertBuffer.
/// x, topk_idx, topk_weights : buffer
///     This rank's tokens, as bytes of bf16 `[T, hidden]`, i64 `[T, topk]` and f32 `[T, topk]`.
/// outputs : buffer
///     bf16 `[n, hidden]`: row i of the experts' outputs is row i mod n of these.
///
/// Raises
/// ------
/// CrossrailError
///     As ExpertBuffer.
#[pyclass(module = "crossrail._native", name = "_DeviceEp", frozen)]
pub(super) struct DeviceEp(Mutex<Detached<Option<crossrail_bench::DeviceEp>>>);

impl DeviceEp {
    fn lock(&self) -> MutexGuard<'_, Detached<Option<crossrail_bench::DeviceEp>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` detached.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut crossrail_bench::DeviceEp) -> crossrail_types::Result<T> + Send,
    ) -> PyResult<T> {
        let _call = Call::enter(py);
        let closed = || crossrail_types::Error::new(crossrail_types::ErrorKind::Closed, "bench", "the bench is closed");
        gate::detached(py, || self.lock().as_mut().ok_or_else(closed).and_then(work)).or_raise(py)
    }
}

#[pymethods]
impl DeviceEp {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "what a dispatch and a combine take")]
    fn new(
        group: &Bound<'_, Group>,
        context: &Bound<'_, Context>,
        name: &str,
        parameters: Parameters,
        on: On,
        x: &[u8],
        topk_idx: &[u8],
        topk_weights: &[u8],
        outputs: &[u8],
    ) -> PyResult<DeviceEp> {
        let py = group.py();
        let _call = Call::enter(py);
        let layout = match parameters.only_layout() {
            Some(layout) => parse_layout(py, layout)?,
            None => return Err(errors::usage(py, "bench", "several layouts", "one")),
        };
        let config = parameters.config(py)?;
        let (group, context) = (group.get().native(), context.get().native());
        let work = DeviceEpWork { layout, cast_before: on.cast_before, x, topk_idx, topk_weights, outputs };
        let send = send_once(py, &on.send, None)?;
        let options = DeviceOptions { ordinal: on.ordinal, num_sms: on.num_sms, send, ..DeviceOptions::default() };
        let made =
            gate::detached(py, || crossrail_bench::DeviceEp::new((group, context), name, config, options, &work));
        Ok(DeviceEp(Mutex::new(Detached::new(Some(made.or_raise(py)?)))))
    }

    /// Run one dispatch into poisoned memory.
    ///
    /// Returns
    /// -------
    /// dict of bytes
    ///     `counts`, `x`, `scales` (fp8), and `ranges` and `source` (expert layout) or `offsets`, `topk_idx` and
    ///     `topk_weights` (rank layout).
    fn dispatch<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let parts = self.with(py, crossrail_bench::DeviceEp::dispatch)?;
        let all = PyDict::new(py);
        for (name, bytes) in parts {
            all.set_item(name, PyBytes::new(py, &bytes))?;
        }
        Ok(all)
    }

    /// Run one combine with the last dispatch's handle: bf16 `[T, hidden]`, as bytes.
    fn combine<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &self.with(py, crossrail_bench::DeviceEp::combine)?))
    }

    /// Measure. Every rank calls it with the same plan, after a dispatch.
    ///
    /// Parameters
    /// ----------
    /// plan : str
    ///     JSON: `mode` (`dispatch`, `combine` or `e2e`), `clock` (`gpu`: events around the operation; `host`: from the
    ///     call until it is complete), `cached`, `iters`, `warmup`.
    /// on_progress : callable, optional
    ///     `on_progress(done, total)`, some ten times per second. An exception in it ends the run.
    ///
    /// Returns
    /// -------
    /// str
    ///     JSON: `samples_us`, and the `bytes` of one iteration.
    #[pyo3(signature = (plan, on_progress = None))]
    fn measure(&self, py: Python<'_>, plan: &str, on_progress: Option<Py<PyAny>>) -> PyResult<String> {
        let plan = crossrail_bench::parsed(plan).or_raise(py)?;
        let mut watch = Watch { on_progress: on_progress.as_ref(), raised: None };
        let outcome = self.with(py, |rig| crossrail_bench::json(&rig.measure(plan, &mut watch)?));
        watch.raised.map_or(outcome, Err)
    }

    /// The buffer's `heap_bytes` of GPU memory, `num_sms`, and `links`: how each rank is reached (`self`, `heap`,
    /// `network`), `rails`: bytes that each has carried so far to ranks on other nodes, and `send`: "rank" or "node".
    fn facts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let facts = self.with(py, |rig| {
            let buffer = rig.buffer();
            let links = buffer.links();
            let mut rails: BTreeMap<String, u64> = BTreeMap::new();
            for rail in links.iter().filter_map(|link| link.proxy.as_ref()).flat_map(|proxy| &proxy.rails) {
                *rails.entry(rail.name.clone()).or_default() += rail.sent_bytes;
            }
            let kinds: Vec<_> = links.iter().map(|link| kind_of(link.kind)).collect();
            let send = if matches!(SendOnce::of(buffer).0, SendOnce::PerNode { .. }) { "node" } else { "rank" };
            Ok((buffer.heap_bytes(), buffer.num_sms(), kinds, rails, send))
        })?;
        let all = PyDict::new(py);
        all.set_item("heap_bytes", facts.0)?;
        all.set_item("num_sms", facts.1)?;
        all.set_item("links", facts.2)?;
        all.set_item("rails", facts.3)?;
        all.set_item("send", facts.4)?;
        Ok(all)
    }

    /// Destroy the buffer and free all its memory.
    fn close(&self, py: Python<'_>) {
        gate::detached(py, || drop(self.lock().take()));
    }
}

fn kind_of(link: LinkKind) -> &'static str {
    match link {
        LinkKind::Myself => "self",
        LinkKind::Heap => "heap",
        LinkKind::Network => "network",
    }
}
