//! The measuring loop of a mesh, run detached.

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
use crate::runtime::dicts::{copied_dict, rows};
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

/// Measure every ordered pair of ranks alone, then all to all at once, at this rank. Every rank calls it with
/// the same plan.
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
/// rank : int
///     This rank.
/// memory : str
///     As of `bench_latency`.
/// on_progress : callable, optional
///     `on_progress(done, total)`, in pairs. An exception in it ends the run.
///
/// Returns
/// -------
/// dict
///     `pairs`: for each target a `receipt` of one message, `rate` (windows as of `bench_bandwidth`) and
///     `latency`. `all_us`: microseconds until everything that this rank sent was delivered, and `all_bytes`
///     sent in each exchange. `slowest`: for each message of the slowest exchange its `target`, and
///     microseconds from the barrier until it was `posted_us`, `matched_us`, `copied_us` (0 if the receiver
///     copied) and `finished_us` (noticed by this rank, in the order of posting). `copied`: copies between
///     this rank's GPU and others in the timed exchanges, `by_engine`.
#[pyfunction]
#[pyo3(signature = (context, worker, peers, plan, *, rank, memory = "ordinary", on_progress = None))]
pub(super) fn bench_mesh<'py>(
    context: &Bound<'py, Context>,
    worker: &Bound<'py, Worker>,
    peers: Vec<Option<Bound<'py, Endpoint>>>,
    plan: Plan,
    rank: usize,
    memory: &str,
    on_progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
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
    let mut watch = Watch { on_progress: on_progress.as_ref(), raised: None };
    let outcome = gate::detached(py, || {
        let observer = &mut watch;
        crossrail_bench::mesh(&mut MeshRank { context, worker, rank, peers: &peers, memory, observer }, plan)
    });
    if let Some(raised) = watch.raised {
        return Err(raised);
    }
    let samples = outcome.or_raise(py)?;
    let all = PyDict::new(py);
    let pairs = rows(py, samples.pairs, |row, pair| {
        row.set_item("target", pair.target)?;
        row.set_item("receipt", report_dict(py, &pair.transfer)?)?;
        row.set_item("rate", samples_dict(py, &pair.rate)?)?;
        row.set_item("latency", samples_dict(py, &pair.latency)?)
    })?;
    all.set_item("pairs", pairs)?;
    all.set_item("all_us", samples.all_us)?;
    all.set_item("all_bytes", samples.all_bytes)?;
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
