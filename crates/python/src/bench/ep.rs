//! Measures dispatch and combine, detached from the GIL; and packing for the MPI_Alltoallv baseline.
#![allow(unsafe_code)]

use std::sync::{Mutex, MutexGuard, PoisonError};

use crossrail_bench::{EpMode, EpPlan, EpWork};
use crossrail_ep_host as ep;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::watch::Watch;
use crate::borrow::lent::{self, Call, Use};
use crate::experts::host::{ExpertBuffer, Parameters, bytes_dict, parse_layout, read};
use crate::objects::context::Context;
use crate::runtime::dicts::set_fields;
use crate::runtime::errors::{self, OrRaise};
use crate::runtime::gate;

/// What a bench of dispatch and combine is to do, as a dict.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(super) struct Plan {
    mode: String,
    layout: String,
    cached: bool,
    iters: usize,
    warmup: usize,
}

/// Measure dispatch and combine at this rank. Every rank of the buffer calls it with the same plan.
///
/// A barrier precedes each iteration, outside of its time.
///
/// Parameters
/// ----------
/// buffer, context : ExpertBuffer, Context
///     The buffer, and what allocates the memory of the sums.
/// plan : dict
///     `mode` (`dispatch`, `combine` or `e2e`), `layout`, `cached` (dispatches reuse the routing of the
///     first), `iters` timed iterations after `warmup` others.
/// x, topk_idx, topk_weights : buffer
///     This rank's tokens, as bytes of bf16 `[T, hidden]`, i64 `[T, topk]` and f32 `[T, topk]`.
/// y : buffer
///     The outputs of its experts, as bytes of bf16 in the layout of the dispatch.
/// on_progress : callable, optional
///     `on_progress(done, total)`, some ten times per second. An exception in it ends the run.
///
/// Returns
/// -------
/// dict
///     Microseconds of each iteration: `total_us` and its parts `cast_us`, `copy_us`, `sum_us`, `wait_us`;
///     and the bytes moved by all timed iterations together.
///
/// Raises
/// ------
/// PeerDeadError
///     A rank was lost.
#[pyfunction]
#[pyo3(signature = (buffer, context, plan, x, topk_idx, topk_weights, y, on_progress = None))]
#[expect(clippy::too_many_arguments, reason = "what a dispatch and a combine take")]
pub(super) fn bench_ep<'py>(
    buffer: &Bound<'py, ExpertBuffer>,
    context: &Bound<'py, Context>,
    plan: Plan,
    x: &Bound<'py, PyAny>,
    topk_idx: &Bound<'py, PyAny>,
    topk_weights: &Bound<'py, PyAny>,
    y: &Bound<'py, PyAny>,
    on_progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let py = buffer.py();
    let _call = Call::enter(py);
    let mode = match plan.mode.as_str() {
        "dispatch" => EpMode::Dispatch,
        "combine" => EpMode::Combine,
        "e2e" => EpMode::EndToEnd,
        other => return Err(errors::usage(py, "bench", format!("no mode {other:?}"), "dispatch, combine or e2e")),
    };
    let layout = parse_layout(py, &plan.layout)?;
    let plan = EpPlan { mode, layout, cached: plan.cached, iters: plan.iters, warmup: plan.warmup };
    let topk_weights = Some(read(topk_weights, "bench")?);
    let input = ep::Input { x: read(x, "bench")?, topk_idx: read(topk_idx, "bench")?, topk_weights };
    let work = EpWork { input, y: read(y, "bench")? };
    let (buffer, context) = (buffer.get().native(), context.get().native());
    let mut watch = Watch { on_progress: on_progress.as_ref(), raised: None };
    let outcome = gate::detached(py, || crossrail_bench::expert_parallel(buffer, context, &work, plan, &mut watch));
    if let Some(raised) = watch.raised {
        return Err(raised);
    }
    let samples = outcome.or_raise(py)?;
    let all = PyDict::new(py);
    set_fields!(all, samples; total_us, cast_us, copy_us, sum_us, wait_us);
    all.set_item("bytes", bytes_dict(py, samples.bytes)?)?;
    all.set_item("lanes", samples.lanes)?;
    Ok(all)
}

/// Packing and unpacking around MPI_Alltoallv for a dispatch and combine, with Crossrail's row kernels.
///
/// Arrays are bytes of the dtypes of `crossrail_bench::Alltoallv`; the caller allocates all of them.
#[pyclass(module = "crossrail._native", name = "_Alltoallv", frozen)]
pub(super) struct Alltoallv(Mutex<crossrail_bench::Alltoallv>);

impl Alltoallv {
    fn lock(&self) -> MutexGuard<'_, crossrail_bench::Alltoallv> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Alltoallv {
    /// `parameters`: as of an ExpertBuffer; its first layout counts. `dedup`: one row per token and rank.
    #[new]
    fn new(py: Python<'_>, parameters: Parameters, dedup: bool) -> PyResult<Alltoallv> {
        let config = parameters.config(py)?;
        let layout = config.layouts.first().copied().unwrap_or(ep::Layout::Expert);
        Ok(Alltoallv(Mutex::new(crossrail_bench::Alltoallv::new(config, layout, dedup).or_raise(py)?)))
    }

    #[getter]
    fn slots(&self) -> usize {
        self.lock().slots()
    }

    #[getter]
    fn row_bytes(&self) -> usize {
        self.lock().row_bytes()
    }

    #[getter]
    fn side_bytes(&self) -> usize {
        self.lock().side_bytes()
    }

    fn route(
        &self,
        topk_idx: &Bound<'_, PyAny>,
        topk_weights: &Bound<'_, PyAny>,
        counts: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (idx, weights) = (Array::read(topk_idx)?, Array::read(topk_weights)?);
        let mut counts = Array::written(counts)?;
        let py = topk_idx.py();
        self.lock().route(idx.of(py)?, weights.of(py)?, counts.of_mut(py)?).or_raise(py)
    }

    fn pack(
        &self,
        x: &Bound<'_, PyAny>,
        topk_idx: &Bound<'_, PyAny>,
        rows: &Bound<'_, PyAny>,
        sides: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (x_, idx) = (Array::read(x)?, Array::read(topk_idx)?);
        let (mut rows, mut sides) = (Array::written(rows)?, Array::written(sides)?);
        let py = x.py();
        self.lock().pack(x_.of(py)?, idx.of(py)?, rows.of_mut(py)?, sides.of_mut(py)?).or_raise(py)
    }

    fn unpack(
        &self,
        counts: &Bound<'_, PyAny>,
        rows: &Bound<'_, PyAny>,
        sides: &Bound<'_, PyAny>,
        x: &Bound<'_, PyAny>,
        scales: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let py = rows.py();
        let (counts, rows, sides) = (Array::read(counts)?, Array::read(rows)?, Array::read(sides)?);
        let (mut x, mut scales) = (Array::written(x)?, Array::written(scales)?);
        let (x, scales) = (x.of_mut(py)?, scales.of_mut(py)?);
        self.lock().unpack(counts.of(py)?, rows.of(py)?, sides.of(py)?, x, scales).or_raise(py)
    }

    fn expert_counts(&self) -> Vec<i32> {
        self.lock().expert_counts()
    }

    fn pack_back(&self, y: &Bound<'_, PyAny>, rows: &Bound<'_, PyAny>) -> PyResult<()> {
        let (y_, mut rows) = (Array::read(y)?, Array::written(rows)?);
        let py = y.py();
        self.lock().pack_back(y_.of(py)?, rows.of_mut(py)?).or_raise(py)
    }

    fn unpack_back(&self, rows: &Bound<'_, PyAny>, out: &Bound<'_, PyAny>) -> PyResult<()> {
        let (rows_, mut out) = (Array::read(rows)?, Array::written(out)?);
        let py = rows.py();
        self.lock().unpack_back(rows_.of(py)?, out.of_mut(py)?).or_raise(py)
    }
}

/// An array borrowed from Python for one call, with the GIL held throughout.
struct Array(lent::BorrowedBytes);

impl Array {
    fn read(object: &Bound<'_, PyAny>) -> PyResult<Array> {
        lent::bytes(object, Use::Read, "alltoallv").map(Array)
    }

    fn written(object: &Bound<'_, PyAny>) -> PyResult<Array> {
        lent::bytes(object, Use::Write, "alltoallv").map(Array)
    }

    /// Its elements.
    fn of<T: Number>(&self, py: Python<'_>) -> PyResult<&[T]> {
        self.fits::<T>(py)?;
        // SAFETY: alignment was checked, any bit pattern is valid for `T`, and no other thread writes while the GIL is
        // held.
        Ok(unsafe { std::slice::from_raw_parts(self.0.ptr.cast(), self.0.len / size_of::<T>()) })
    }

    fn of_mut<T: Number>(&mut self, py: Python<'_>) -> PyResult<&mut [T]> {
        self.fits::<T>(py)?;
        // SAFETY: as above, and writable.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.0.ptr.cast(), self.0.len / size_of::<T>()) })
    }

    fn fits<T>(&self, py: Python<'_>) -> PyResult<()> {
        if self.0.ptr.cast::<T>().is_aligned() && !self.0.ptr.is_null() {
            return Ok(());
        }
        Err(errors::usage(py, "alltoallv", "an array that is not aligned", "contiguous arrays of NumPy"))
    }
}

/// Types for which every bit pattern is a valid value.
trait Number {}
impl Number for u8 {}
impl Number for i32 {}
impl Number for i64 {}
impl Number for f32 {}
