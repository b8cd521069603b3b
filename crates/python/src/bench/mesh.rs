//! The measuring loops of a mesh, run detached.

use std::time::Duration;

use crossrail_bench::{MeshPlan, MeshRank};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::watch::{Watch, samples_dict};
use crate::borrow::lent::Call;
use crate::objects::context::Context;
use crate::objects::endpoint::Endpoint;
use crate::objects::receipt::report_dict;
use crate::objects::worker::Worker;
use crate::runtime::dicts::{copied_dict, rows, set_fields};
use crate::runtime::errors::{self, OrRaise};
use crate::runtime::gate;

/// What a bench of a mesh is to do, as a dict.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(super) struct Plan {
    size: usize,
    iters: usize,
    warmup: usize,
    window: usize,
    small: usize,
    trips: usize,
    patience: f64,
}

/// Measure one ordered pair of ranks, while the others wait. Every rank calls it with the same pairs and plan, in the
/// same order.
///
/// Parameters
/// ----------
/// context, worker : Context, Worker
///     This rank's.
/// peers : list of Endpoint or None
///     The endpoint to each rank; None for this one.
/// plan : dict
///     `size` (bytes of a message), `iters` timed windows after `warmup` others, `window` (messages in flight
///     to one rank), `small` (bytes of the messages whose latency is measured) and their `trips`, `patience`
///     (seconds to wait for ranks that are measuring).
/// pair : tuple of int
///     The rank that sends, and the one that receives.
/// rank : int
///     This rank.
/// memory : str
///     As of `bench_latency`.
///
/// Returns
/// -------
/// dict or None
///     At the rank that sends: the `target`, a `receipt` of one message, `rate` (windows as of `bench_bandwidth`)
///     and `latency`.
#[pyfunction]
#[pyo3(signature = (context, worker, peers, plan, pair, *, rank, memory = "ordinary"))]
pub(super) fn bench_mesh_pair<'py>(
    context: &Bound<'py, Context>,
    worker: &Bound<'py, Worker>,
    peers: Vec<Option<Bound<'py, Endpoint>>>,
    plan: Plan,
    pair: (usize, usize),
    rank: usize,
    memory: &str,
) -> PyResult<Option<Bound<'py, PyDict>>> {
    let py = context.py();
    let Some(samples) = measure(context, worker, peers, plan, (rank, memory), |mine, plan| {
        crossrail_bench::mesh_pair(mine, pair, plan)
    })?
    else {
        return Ok(None);
    };
    let all = PyDict::new(py);
    all.set_item("target", samples.target)?;
    all.set_item("receipt", report_dict(py, &samples.transfer)?)?;
    all.set_item("rate", samples_dict(py, &samples.rate)?)?;
    all.set_item("latency", samples_dict(py, &samples.latency)?)?;
    Ok(Some(all))
}

/// Measure all to all: every rank sends to all others at once. Every rank calls it with the same plan.
///
/// Parameters are those of `bench_mesh_pair`.
///
/// Returns
/// -------
/// dict
///     `all_us`: microseconds until everything that this rank sent was delivered, and `all_bytes`
///     sent in each exchange. `slowest`: for each message of the slowest exchange its `target`, and
///     microseconds from the barrier until it was `posted_us`, `matched_us`, `copied_us` (0 if the receiver
///     copied) and `finished_us` (noticed by this rank, in the order of posting). `copied`: copies between
///     this rank's GPU and others in the timed exchanges, `by_engine`.
#[pyfunction]
#[pyo3(signature = (context, worker, peers, plan, *, rank, memory = "ordinary"))]
pub(super) fn bench_mesh_all<'py>(
    context: &Bound<'py, Context>,
    worker: &Bound<'py, Worker>,
    peers: Vec<Option<Bound<'py, Endpoint>>>,
    plan: Plan,
    rank: usize,
    memory: &str,
) -> PyResult<Bound<'py, PyDict>> {
    let py = context.py();
    let samples = measure(context, worker, peers, plan, (rank, memory), crossrail_bench::mesh_all)?;
    let all = PyDict::new(py);
    set_fields!(all, samples; all_us, all_bytes);
    let slowest = rows(py, samples.slowest, |row, message| {
        row.set_item("target", message.target)?;
        row.set_item("posted_us", message.posted)?;
        row.set_item("matched_us", message.matched)?;
        row.set_item("copied_us", message.copied)?;
        row.set_item("finished_us", message.finished)
    })?;
    all.set_item("slowest", slowest)?;
    all.set_item("copied", copied_dict(py, samples.copied)?)?;
    Ok(all)
}

/// Runs `measured` detached, as the rank of a mesh.
fn measure<T: Send>(
    context: &Bound<'_, Context>,
    worker: &Bound<'_, Worker>,
    peers: Vec<Option<Bound<'_, Endpoint>>>,
    plan: Plan,
    (rank, memory): (usize, &str),
    measured: impl FnOnce(&mut MeshRank<'_>, MeshPlan) -> crossrail_types::Result<T> + Send,
) -> PyResult<T> {
    let py = context.py();
    let _call = Call::enter(py);
    let memory = memory.parse().or_raise(py)?;
    let patience = Duration::try_from_secs_f64(plan.patience)
        .map_err(|_| errors::usage(py, "bench", format!("a patience of {} s", plan.patience), "seconds, as 60"))?;
    let Plan { size, iters, warmup, window, small, trips, .. } = plan;
    let plan = MeshPlan { size, iters, warmup, window, small, trips, patience };
    let peers: Vec<Option<crossrail::Endpoint>> =
        peers.iter().map(|peer| peer.as_ref().map(|peer| peer.get().native().clone())).collect();
    let (context, worker) = (context.get().native(), worker.get().native());
    let mut watch = Watch { on_progress: None, raised: None };
    let outcome = gate::detached(py, || {
        let observer = &mut watch;
        measured(&mut MeshRank { context, worker, rank, peers: &peers, memory, observer }, plan)
    });
    watch.raised.map_or_else(|| outcome.or_raise(py), Err)
}
