//! Two ends: latency, bandwidth, transfers, and the rates of plugins and plain sockets.

use crossrail_bench::{
    BandwidthPlan, LatencyPlan, MemoryKind, NetPluginPlan, P2pIteration, P2pPlan, RawTcpPlan, Role, Session,
};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use super::watch::{Watch, samples_dict};
use crate::borrow::lent::Call;
use crate::objects::context::Context;
use crate::objects::endpoint::Endpoint;
use crate::objects::receipt::report_dict;
use crate::objects::worker::Worker;
use crate::runtime::dicts::{rows, set_fields};
use crate::runtime::errors::{self, OrRaise};
use crate::runtime::gate;

struct Ends<'a, 'py> {
    context: &'a Bound<'py, Context>,
    worker: &'a Bound<'py, Worker>,
    endpoint: &'a Bound<'py, Endpoint>,
    role: &'a str,
    memory: &'a str,
    on_progress: Option<Py<PyAny>>,
}

impl Ends<'_, '_> {
    fn run<T: Send>(
        &self,
        py: Python<'_>,
        bench: impl FnOnce(&mut Session<'_>) -> crossrail_types::Result<T> + Send,
    ) -> PyResult<T> {
        let _call = Call::enter(py);
        let role = match self.role {
            "driver" => Role::Driver,
            "echo" => Role::Echo,
            other => return Err(errors::usage(py, "bench", format!("no role {other:?}"), "driver or echo")),
        };
        let memory = self.memory.parse::<MemoryKind>().or_raise(py)?;
        let (context, worker) = (self.context.get().native(), self.worker.get().native());
        let endpoint = self.endpoint.get().native();
        let mut watch = Watch { on_progress: self.on_progress.as_ref(), raised: None };
        let outcome = gate::detached(py, || {
            bench(&mut Session { context, worker, endpoint, role, memory, observer: &mut watch })
        });
        match watch.raised {
            Some(raised) => Err(raised),
            None => outcome.or_raise(py),
        }
    }
}

/// Measure round trips of one message each way, as osu_latency does.
///
/// Both ends call this with the same plan. Data is verified before and after the timing.
///
/// Parameters
/// ----------
/// size : int
///     Bytes per message.
/// iters, warmup : int
///     Timed round trips, and untimed ones before them.
/// memory : str
///     ``shared`` (`Context.alloc`), ``ordinary``, or a GPU such as ``cuda:0``.
/// on_progress : callable, optional
///     ``on_progress(done, total)`` is called about ten times a second. An exception that it
///     raises ends the run; so does the answer ``False``, after which `bench_p2p` returns what
///     it has measured.
///
/// Raises
/// ------
/// MismatchError
///     The plans of the ends differ.
/// ProtocolError
///     Data did not verify at either end.
#[pyfunction]
#[pyo3(signature = (context, worker, endpoint, *, role, size, iters, warmup = 100, memory = "ordinary", on_progress = None))]
#[allow(clippy::too_many_arguments)] // keywords in Python
pub(super) fn bench_latency<'py>(
    context: &Bound<'py, Context>,
    worker: &Bound<'py, Worker>,
    endpoint: &Bound<'py, Endpoint>,
    role: &str,
    size: usize,
    iters: usize,
    warmup: usize,
    memory: &str,
    on_progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let py = context.py();
    let ends = Ends { context, worker, endpoint, role, memory, on_progress };
    let plan = LatencyPlan { size, iters, warmup };
    let samples = ends.run(py, |session| crossrail_bench::latency(session, plan))?;
    samples_dict(py, &samples)
}

/// Measure one-sided writes that the other host answers with a write as soon as it observes them.
///
/// A sample is half a round trip. Both ends call this; parameters as for `bench_latency`.
#[pyfunction]
#[pyo3(signature = (context, worker, endpoint, *, role, size, iters, warmup = 100, memory = "ordinary", on_progress = None))]
#[allow(clippy::too_many_arguments)] // keywords in Python
pub(super) fn bench_write<'py>(
    context: &Bound<'py, Context>,
    worker: &Bound<'py, Worker>,
    endpoint: &Bound<'py, Endpoint>,
    role: &str,
    size: usize,
    iters: usize,
    warmup: usize,
    memory: &str,
    on_progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let py = context.py();
    let ends = Ends { context, worker, endpoint, role, memory, on_progress };
    let plan = LatencyPlan { size, iters, warmup };
    let samples = ends.run(py, |session| crossrail_bench::write_latency(session, plan))?;
    samples_dict(py, &samples)
}

/// Measure plain TCP sockets between the two ends: an upper bound for a transfer of `size` bytes.
///
/// Both ends call this. The driver names its `devices` (the other end none), with `channels`
/// connections each. Runs `iters` samples, or fewer if they take more than two seconds.
/// Returns `samples_us`, `bytes_per_sample`, and the addresses used as `ways`. Raises IoError
/// at both ends if connections cannot be established; the endpoint remains usable.
#[pyfunction]
#[pyo3(signature = (context, worker, endpoint, *, role, size, iters = 3, devices = Vec::new(), channels = 1))]
#[allow(clippy::too_many_arguments)] // keywords in Python
pub(super) fn bench_raw_tcp<'py>(
    context: &Bound<'py, Context>,
    worker: &Bound<'py, Worker>,
    endpoint: &Bound<'py, Endpoint>,
    role: &str,
    size: usize,
    iters: usize,
    devices: Vec<String>,
    channels: usize,
) -> PyResult<Bound<'py, PyDict>> {
    let py = context.py();
    let ends = Ends { context, worker, endpoint, role, memory: "ordinary", on_progress: None };
    let plan = RawTcpPlan { size, iters, devices, channels };
    let samples = ends.run(py, |session| crossrail_bench::raw_tcp(session, &plan))?;
    let all = PyDict::new(py);
    set_fields!(all, samples; samples_us, bytes_per_sample, ways);
    Ok(all)
}

/// Measure windows of messages one way, each answered by one small reply, as osu_bw does.
///
/// Both ends call this: `iters` timed windows of `window` messages after `warmup` untimed
/// ones. Other parameters as for `bench_latency`.
#[pyfunction]
#[pyo3(signature = (context, worker, endpoint, *, role, size, iters, warmup = 10, window = 64, memory = "ordinary", on_progress = None))]
#[allow(clippy::too_many_arguments)] // keywords in Python
pub(super) fn bench_bandwidth<'py>(
    context: &Bound<'py, Context>,
    worker: &Bound<'py, Worker>,
    endpoint: &Bound<'py, Endpoint>,
    role: &str,
    size: usize,
    iters: usize,
    warmup: usize,
    window: usize,
    memory: &str,
    on_progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let py = context.py();
    let ends = Ends { context, worker, endpoint, role, memory, on_progress };
    let plan = BandwidthPlan { size, iters, warmup, window };
    let samples = ends.run(py, |session| crossrail_bench::bandwidth(session, plan))?;
    samples_dict(py, &samples)
}

/// Measure large transfers from the driver to the echo end, one at a time, as seen by both ends.
///
/// Both ends call this: `iters` timed transfers of `size` bytes after `warmup` untimed ones,
/// verified byte by byte: each (`verify` ``full``), only the first and the last (``quick``), or
/// ``none``. Other parameters as for `bench_latency`.
#[pyfunction]
#[pyo3(signature = (context, worker, endpoint, *, role, size, iters, warmup = 2, memory = "ordinary", verify = "full", on_progress = None))]
#[allow(clippy::too_many_arguments)] // keywords in Python
pub(super) fn bench_p2p<'py>(
    context: &Bound<'py, Context>,
    worker: &Bound<'py, Worker>,
    endpoint: &Bound<'py, Endpoint>,
    role: &str,
    size: usize,
    iters: usize,
    warmup: usize,
    memory: &str,
    verify: &str,
    on_progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyList>> {
    let py = context.py();
    let ends = Ends { context, worker, endpoint, role, memory, on_progress };
    let plan = P2pPlan { size, iters, warmup, verify: verify.parse().or_raise(py)? };
    let iterations = ends.run(py, |session| crossrail_bench::p2p(session, plan))?;
    transfers(py, iterations)
}

fn transfers(py: Python<'_>, iterations: Vec<P2pIteration>) -> PyResult<Bound<'_, PyList>> {
    rows(py, iterations, |row, iteration| {
        let ends = [
            ("sender", iteration.us_sender, iteration.sender),
            ("receiver", iteration.us_receiver, iteration.receiver),
        ];
        for (name, us, report) in ends {
            let end = PyDict::new(py);
            end.set_item("us", us)?;
            end.set_item("receipt", report_dict(py, &report)?)?;
            row.set_item(name, end)?;
        }
        Ok(())
    })
}

/// Measure large transfers through a network plugin of NCCL, as `bench_p2p` does through Crossrail.
///
/// Both ends call this with the path of their own plugin (versions 4 to 12). Data goes over all
/// devices of the plugin, with the context's chunk, window and channels; the endpoint carries
/// what the ends agree on. Returns what `bench_p2p` returns, with a lane per device. Raises
/// UsageError for a library that is no such plugin, and IoError, TimeoutError or ProtocolError,
/// naming the plugin's function, for what it returns that it may not.
#[pyfunction]
#[pyo3(signature = (context, worker, endpoint, *, role, path, size, iters, warmup = 2, verify = "full", on_progress = None))]
#[allow(clippy::too_many_arguments)] // keywords in Python
pub(super) fn bench_net_plugin<'py>(
    context: &Bound<'py, Context>,
    worker: &Bound<'py, Worker>,
    endpoint: &Bound<'py, Endpoint>,
    role: &str,
    path: std::path::PathBuf,
    size: usize,
    iters: usize,
    warmup: usize,
    verify: &str,
    on_progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyList>> {
    let py = context.py();
    let ends = Ends { context, worker, endpoint, role, memory: "ordinary", on_progress };
    let plan = NetPluginPlan { path, transfers: P2pPlan { size, iters, warmup, verify: verify.parse().or_raise(py)? } };
    let iterations = ends.run(py, |session| crossrail_bench::net_plugin(session, &plan))?;
    transfers(py, iterations)
}
