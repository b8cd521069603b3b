//! The one entry to the measuring loops.

use crossrail_bench::{Case, End, EpWork, Role};
use crossrail_ep_host::Input;
use pyo3::prelude::*;

use super::watch::Watch;
use crate::borrow::loan::Call;
use crate::experts::host::{ExpertBuffer, read};
use crate::objects::context::Context;
use crate::objects::endpoint::Endpoint;
use crate::objects::group::Group;
use crate::objects::worker::Worker;
use crate::runtime::errors::{self, OrRaise};
use crate::runtime::gate;

/// Run this end's part of a measurement. Every end runs the same case.
///
/// Data is verified before and after the timing. Nothing is subtracted from samples, and none is left out.
///
/// Parameters
/// ----------
/// case : str
///     JSON: `what`, beside the fields of that kind. `latency` (round trips of one message each way, as osu_latency
///     counts) and `write` (one-sided, answered as soon as the other host sees them): `size`, `iters`, `warmup`.
///     `bandwidth` (windows of messages one way, each answered by one small reply, as osu_bw counts): these and
///     `window`. `p2p` (one transfer at a time, as both ends see it): `size`, `iters`, `warmup`, `verify` (`full`,
///     `quick` or `none`). The kinds that `crossrail bench` has beside these are those of
///     `crossrail_tools/cli/cases.py`.
/// context, worker : Context, Worker
///     This end's.
/// endpoints : list of Endpoint or None
///     Between two ends, the endpoint to the other one; in a mesh, that to each rank, with None for this one.
/// role : str
///     Which of two ends this is: `driver` measures, `echo` answers.
/// memory : str
///     The memory that this end moves: ``shared`` (`Context.alloc`), ``ordinary``, or a GPU such as ``cuda:0``.
/// rank : int
///     This rank of a mesh.
/// group, buffer, tensors : optional
///     Of cases about expert parallelism: the group, or a native buffer with x, topk_idx, topk_weights and y.
/// on_progress : callable, optional
///     ``on_progress(done, total)``, about ten times a second. An exception that it raises ends the run; so does the
///     answer ``False``, after which `p2p` returns what it has measured.
///
/// Returns
/// -------
/// str
///     JSON: `samples_us` (half round trips, or windows) with `size`, `batch` (messages per sample), `clock_us` (the
///     cost of a clock read, part of each sample) and `bytes_per_sample`; none at the echo end. Of `p2p` a list, each
///     with the `us` and `receipt` of `sender` and `receiver`, at both ends.
///
/// Raises
/// ------
/// UsageError
///     The case is unknown, or needs what was not passed.
/// MismatchError
///     The ends run different cases.
/// ProtocolError
///     Data did not verify at either end.
#[pyfunction]
#[pyo3(signature = (case, context, worker = None, endpoints = Vec::new(), *, role = "driver", memory = "ordinary", rank = 0, group = None, buffer = None, tensors = Vec::new(), on_progress = None))]
#[expect(clippy::too_many_arguments, reason = "keywords in Python")]
pub(super) fn bench(
    py: Python<'_>,
    case: &str,
    context: &Bound<'_, Context>,
    worker: Option<&Bound<'_, Worker>>,
    endpoints: Vec<Option<Bound<'_, Endpoint>>>,
    role: &str,
    memory: &str,
    rank: usize,
    group: Option<&Bound<'_, Group>>,
    buffer: Option<&Bound<'_, ExpertBuffer>>,
    tensors: Vec<Bound<'_, PyAny>>,
    on_progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    let _call = Call::enter(py);
    let case: Case = crossrail_bench::parsed(case).or_raise(py)?;
    let role = match role {
        "driver" => Role::Driver,
        "echo" => Role::Echo,
        other => return Err(errors::usage(py, "bench", format!("no role {other:?}"), "driver or echo")),
    };
    let memory = memory.parse().or_raise(py)?;
    let endpoints: Vec<_> =
        endpoints.iter().map(|endpoint| endpoint.as_ref().map(|endpoint| endpoint.get().native().clone())).collect();
    let work = match &tensors[..] {
        [x, topk_idx, topk_weights, y] => {
            let topk_weights = Some(read(topk_weights, "bench")?);
            let input = Input { x: read(x, "bench")?, topk_idx: read(topk_idx, "bench")?, topk_weights };
            Some(EpWork { input, y: read(y, "bench")? })
        }
        _ => None,
    };
    let mut watch = Watch { on_progress: on_progress.as_ref(), raised: None };
    let end = End {
        context: context.get().native(),
        worker: worker.map(|worker| worker.get().native()),
        endpoints: &endpoints,
        role,
        memory,
        rank,
        group: group.map(|group| group.get().native()),
        experts: buffer.map(|buffer| buffer.get().native()).zip(work.as_ref()),
        observer: &mut watch,
    };
    let outcome = gate::detached(py, || crossrail_bench::run(case, end));
    watch.raised.map_or_else(|| outcome.or_raise(py), Err)
}
