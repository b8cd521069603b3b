//! The control plane's measuring loop, run detached.

use crossrail::Place;
use crossrail_bench::{ControlPlan, Step, StepSamples};
use crossrail_ep::{Config, Layout, OnLoss, Payload, Scale};
use crossrail_ep_cuda::DeviceOptions;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::watch::Watch;
use crate::borrow::lent::Call;
use crate::objects::context::Context;
use crate::objects::group::Group;
use crate::runtime::errors::{self, OrRaise};
use crate::runtime::gate;

/// Measure the steps of an ExpertBuffer's life cycle at this rank. Every rank of the group calls it with the
/// same plan.
///
/// A barrier of all ranks precedes each step, and a message over every new connection follows it, both
/// outside of its time.
///
/// Parameters
/// ----------
/// group, context : Group, Context
///     The group, and what the buffers are made from.
/// op : str
///     `init`, `connect`, `disconnect`, `reconnect`, `destroy`, or `cycle` for all five. Steps that must
///     precede it run too, but are not reported.
/// rounds, warmup : int
///     Timed rounds, and untimed ones before them.
/// max_tokens_per_rank, hidden, num_experts, topk, dispatch_dtype
///     As of ExpertBuffer.
/// device : str, optional
///     A GPU as `cuda:0`, for buffers in its memory.
/// on_progress : callable, optional
///     `on_progress(done, total)`, between rounds. An exception in it ends the run.
///
/// Returns
/// -------
/// dict
///     Microseconds by step, `rounds` of each; and by `step/part` those of its parts, where known.
///
/// Raises
/// ------
/// CrossrailError
///     As ExpertBuffer and Group.barrier.
#[pyfunction]
#[pyo3(signature = (group, context, *, op, rounds, max_tokens_per_rank, hidden, num_experts, topk, dispatch_dtype = "fp8", device = None, warmup = 0, on_progress = None))]
#[allow(clippy::too_many_arguments)] // keywords in Python
pub(super) fn bench_control<'py>(
    group: &Bound<'py, Group>,
    context: &Bound<'py, Context>,
    op: &str,
    rounds: usize,
    max_tokens_per_rank: usize,
    hidden: usize,
    num_experts: usize,
    topk: usize,
    dispatch_dtype: &str,
    device: Option<&str>,
    warmup: usize,
    on_progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let py = group.py();
    let _call = Call::enter(py);
    let only = Step::CYCLE.into_iter().find(|step| step.name() == op);
    if only.is_none() && op != "cycle" {
        return Err(errors::usage(py, "bench", format!("no op {op:?}"), "cycle or one of its steps"));
    }
    let payload = match dispatch_dtype {
        "bf16" => Payload::Bf16,
        "fp8" => Payload::Fp8(Scale::F32),
        other => return Err(errors::usage(py, "bench", format!("no dispatch_dtype {other:?}"), "fp8 or bf16")),
    };
    let (group, context) = (group.get().native(), context.get().native());
    let config = Config {
        ranks: group.size(),
        max_tokens: max_tokens_per_rank,
        hidden,
        experts: num_experts,
        topk,
        payload,
        layouts: vec![Layout::Expert, Layout::Rank],
        prereduce: true,
        share_node: true,
        timeout: context.settings().timeout,
        on_loss: OnLoss::Raise,
    };
    let device = device.map(|name| gpu(py, name)).transpose()?;
    let device = device.map(|ordinal| DeviceOptions { ordinal, ..DeviceOptions::default() });
    let plan = ControlPlan { config, only, rounds, warmup, device };
    let mut watch = Watch { on_progress: on_progress.as_ref(), raised: None };
    let outcome = gate::detached(py, || crossrail_bench::control(group, context, &plan, &mut watch));
    if let Some(raised) = watch.raised {
        return Err(raised);
    }
    let samples = PyDict::new(py);
    for StepSamples { step, us, parts } in outcome.or_raise(py)? {
        samples.set_item(step.name(), us)?;
        for (part, us) in parts {
            samples.set_item(format!("{}/{part}", step.name()), us)?;
        }
    }
    Ok(samples)
}

/// The number of a GPU.
fn gpu(py: Python<'_>, name: &str) -> PyResult<u32> {
    match name.parse::<Place>().or_raise(py)? {
        Place::Gpu(ordinal) => Ok(ordinal),
        Place::Host => Err(errors::usage(py, "bench", "the device is not a GPU", "pass a GPU, such as cuda:0")),
    }
}
