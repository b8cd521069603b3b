//! The measuring loop of unpacking, run detached.

use crossrail::{ErrorKind, Place};
use crossrail_bench::{UnpackFrom, UnpackPlan, UnpackTimes};
use crossrail_types::Error;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::watch::Watch;
use crate::borrow::lent::Call;
use crate::objects::context::Context;
use crate::runtime::dicts::set_fields;
use crate::runtime::errors::{self, OrRaise};
use crate::runtime::gate;

/// What a bench of unpacking is to do, as a dict.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(super) struct Plan {
    device: String,
    size: usize,
    fragment: usize,
    source: String,
    modes: Vec<String>,
    iters: usize,
    warmup: usize,
}

/// Measure the ways to unpack fragments in shuffled slots into contiguous GPU memory.
///
/// Parameters
/// ----------
/// context : Context
///     Devices and settings.
/// plan : dict
///     `size` bytes as fragments of `fragment` bytes, the GPU `device`, `modes` (`kernel`, `d2d`, `host`), and
///     `source`: where the fragments are, `pinned` host memory or the `device`'s own.
/// on_progress : callable, optional
///     `on_progress(done, total)`, some ten times per second. An exception in it ends the run.
///
/// Returns
/// -------
/// dict
///     `pieces` (entries of the list), `contiguous` (one copy of as many bytes), and `modes`: for each mode
///     `samples_us`, from the call until the last byte is in place, and `gpu_us`, the GPU's part (empty for
///     modes that need the host in between).
///
/// Raises
/// ------
/// UnsupportedError
///     CUDA is not available; the error states why.
/// ProtocolError
///     A byte is not where it belongs.
/// UsageError, ExhaustedError
///     The plan is invalid, or there is not enough memory.
#[pyfunction]
#[pyo3(signature = (context, plan, *, on_progress = None))]
pub(super) fn bench_unpack<'py>(
    context: &Bound<'py, Context>,
    plan: Plan,
    on_progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let py = context.py();
    let _call = Call::enter(py);
    let ordinal = match plan.device.parse::<Place>().or_raise(py)? {
        Place::Gpu(ordinal) => ordinal,
        Place::Host => return Err(errors::usage(py, "bench", "the device is not a GPU", "pass a GPU, such as cuda:0")),
    };
    let from = match plan.source.as_str() {
        "pinned" => UnpackFrom::Pinned,
        "device" => UnpackFrom::Device,
        other => return Err(errors::usage(py, "bench", format!("no source {other:?}"), "pinned or device")),
    };
    let unknown = |error: Error| Error::new(ErrorKind::Usage, "bench", error.detail).with_hint("kernel, d2d or host");
    let modes: Result<Vec<_>, Error> = plan.modes.iter().map(|mode| mode.parse().map_err(unknown)).collect();
    let Plan { size, fragment, iters, warmup, .. } = plan;
    let plan = UnpackPlan { ordinal, size, fragment, from, modes: modes.or_raise(py)?, iters, warmup };
    let settings = context.get().native().settings();
    let mut watch = Watch { on_progress: on_progress.as_ref(), raised: None };
    let outcome = gate::detached(py, || crossrail_bench::unpack(settings, &plan, &mut watch));
    if let Some(raised) = watch.raised {
        return Err(raised);
    }
    let samples = outcome.or_raise(py)?;
    let all = PyDict::new(py);
    all.set_item("pieces", samples.pieces)?;
    all.set_item("contiguous", times_dict(py, samples.contiguous)?)?;
    let modes = PyDict::new(py);
    for (mode, times) in samples.modes {
        modes.set_item(mode.to_string(), times_dict(py, times)?)?;
    }
    all.set_item("modes", modes)?;
    Ok(all)
}

fn times_dict(py: Python<'_>, times: UnpackTimes) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    set_fields!(dict, times; samples_us, gpu_us);
    Ok(dict)
}
