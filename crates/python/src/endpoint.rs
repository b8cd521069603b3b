use crossrail::Place;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::context::rows;
use crate::errors::OrRaise;
use crate::lent::{Call, Use};
use crate::lifecycle::Detached;
use crate::mapped::Mapped;
use crate::operand::Wanted;
use crate::region::RegionKey;
use crate::request::Request;
use crate::worker::{Worker, parse_operations};
use crate::{errors, place, stream, wait};

/// One peer of a worker and the lanes to it. Made by `Worker.connect` and `Worker.accept`.
#[pyclass(module = "crossrail._native", frozen)]
pub(crate) struct Endpoint {
    native: Detached<crossrail::Endpoint>,
    worker: Py<Worker>,
}

impl Endpoint {
    pub(crate) fn new(native: crossrail::Endpoint, worker: Py<Worker>) -> Endpoint {
        Endpoint { native: Detached::new(native), worker }
    }

    pub(crate) fn native(&self) -> &crossrail::Endpoint {
        &self.native
    }
}

#[pymethods]
impl Endpoint {
    /// The peer's name.
    #[getter]
    fn peer(&self) -> String {
        self.native.peer()
    }

    /// A number that tells this worker's endpoints apart.
    #[getter]
    fn id(&self) -> u32 {
        self.native.id()
    }

    /// Whether the peer is there, as far as is known.
    #[getter]
    fn is_alive(&self) -> bool {
        self.native.is_alive()
    }

    /// Sends a tagged message, of any size from 0. Finished when its bytes are in the receiver's buffer.
    ///
    /// `buffer` stays exported until the request is finished; do not write to it before. GPU memory is read after the
    /// work that the array's own stream, or `stream`, has now: a raw handle, or an object with `cuda_stream` or
    /// `__cuda_stream__`.
    ///
    /// Raises UsageError (a buffer that is not contiguous, or not where it says), UnsupportedError (memory that nothing
    /// here reaches), PeerDeadError, ClosedError; the request also TruncatedError and CancelledError.
    #[pyo3(signature = (buffer, tag = 0, *, stream = None))]
    fn send(&self, buffer: &Bound<'_, PyAny>, tag: u64, stream: Option<&Bound<'_, PyAny>>) -> PyResult<Request> {
        let py = buffer.py();
        let _call = Call::enter(py);
        let lent = self.lent(buffer, Use::Read, stream, "send")?;
        self.start(py, lent, |lent| self.native.send(lent, tag))
    }

    /// Writes into the peer's region, at `offset` of it. Finished when the bytes are there; the region's owner then
    /// counts `imm` (32 bits), if there is one.
    ///
    /// Raises as `send`; the request RegionError when the key is wrong, the region gone or the range not inside it.
    /// `stream` as for `send`.
    #[pyo3(signature = (local, remote, offset = 0, imm = None, *, stream = None))]
    fn write(
        &self,
        local: &Bound<'_, PyAny>,
        remote: &Bound<'_, RegionKey>,
        offset: u64,
        imm: Option<u32>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Request> {
        let py = local.py();
        let _call = Call::enter(py);
        let lent = self.lent(local, Use::Read, stream, "write")?;
        let key = remote.get().native();
        self.start(py, lent, |lent| self.native.write(lent, key, offset, imm))
    }

    /// Reads from the peer's region, at `offset` of it, into `local`. Raises as `write`; `stream` as for `send`.
    #[pyo3(signature = (local, remote, offset = 0, *, stream = None))]
    fn read(
        &self,
        local: &Bound<'_, PyAny>,
        remote: &Bound<'_, RegionKey>,
        offset: u64,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Request> {
        let py = local.py();
        let _call = Call::enter(py);
        let lent = self.lent(local, Use::Write, stream, "read")?;
        let key = remote.get().native();
        self.start(py, lent, |lent| self.native.read(lent, key, offset))
    }

    /// Starts several operations in one call; one request for all, finished when all are.
    ///
    /// Each is a tuple: ("send", buffer, tag), ("recv", buffer, tag, mask), ("write", local, key, offset, imm) or
    /// ("read", local, key, offset). The request fails with the first failure, after all have ended.
    ///
    /// Raises UsageError for anything else; nothing is started then.
    fn batch(&self, operations: &Bound<'_, PyAny>) -> PyResult<Request> {
        let py = operations.py();
        let _call = Call::enter(py);
        let list = parse_operations(operations, self.worker.get().context())?;
        let place = list.iter().map(place_of).find(|place| *place != Place::Host).unwrap_or_default();
        let native = py.detach(|| self.native.batch(list)).or_raise(py)?;
        Ok(Request::new(native, self.worker.clone_ref(py), place))
    }

    /// Lets the peer map `memory` (`Endpoint.map` there, with these bytes): a `Memory`, part of one, or an array of a GPU.
    /// Nothing is copied, and the bytes returned are no secret: they mean nothing to anybody else. It keeps nothing alive:
    /// once the memory is freed the peer can no longer map it.
    ///
    /// Raises UsageError (host memory that is not this Context's), UnsupportedError with the reason (no shared-memory lane,
    /// GPU memory that can't be passed on), TimeoutError (the peer does not read), PeerDeadError, ClosedError.
    fn share<'py>(&self, memory: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
        let py = memory.py();
        let _call = Call::enter(py);
        let lent = self.lent(memory, Use::Write, None, "share")?;
        let endpoint = self.native.clone();
        let shared = wait::apart(py, move || endpoint.share_buffer(lent))?;
        Ok(PyBytes::new(py, &shared.to_bytes()))
    }

    /// Maps memory that the peer has shared (`Endpoint.share` there), waiting at most `timeout` seconds until it has
    /// arrived. GPU memory is mapped for the GPU `device`, as `cuda:0`; None: one that this process uses already, else the
    /// owner's where it is visible here.
    ///
    /// Raises TimeoutError (nothing of that name was shared over this endpoint), RegionError (the peer has freed it, or
    /// the GPU can't reach it), UsageError (bytes that are no description; no such GPU, or a GPU for memory of the host),
    /// UnsupportedError, PeerDeadError, ClosedError.
    #[pyo3(signature = (shared, timeout = None, *, device = None))]
    fn map(
        &self,
        py: Python<'_>,
        shared: &[u8],
        timeout: Option<f64>,
        device: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Mapped> {
        let _call = Call::enter(py);
        let shared = crossrail::Shared::from_bytes(shared).or_raise(py)?;
        let gpu = match place::parse(device)? {
            Place::Gpu(ordinal) => Some(ordinal),
            Place::Host if device.is_some_and(|device| !device.is_none()) && shared.is_gpu() => {
                let (what, hint) = ("memory of a GPU is mapped for GPUs only", "name one of this process: cuda:0");
                return Err(errors::usage(py, "map", what, hint));
            }
            Place::Host => None,
        };
        let limit = wait::seconds(py, "map", timeout)?.unwrap_or(self.worker.get().native_timeout());
        let native = wait::bounded(py, limit, |left| self.native.map_on(&shared, gpu, left))?;
        Ok(Mapped::new(native, self.worker.clone_ref(py)))
    }

    /// Every lane that was considered for this peer, with its score or the reason it is out.
    fn explain(&self, py: Python<'_>) -> Explain {
        Explain(py.detach(|| self.native.explain()))
    }

    /// The running totals of every lane, headers included.
    fn lanes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        lane_reports(py, py.detach(|| self.native.lanes()))
    }

    /// Finishes what is under way, at most `timeout` seconds, and says goodbye: later operations of either end fail
    /// with ClosedError. Raises TimeoutError when something did not finish; the endpoint is closed all the same.
    #[pyo3(signature = (timeout = None))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let _call = Call::enter(py);
        let timeout = wait::seconds(py, "close", timeout)?;
        let endpoint = self.native.clone();
        wait::apart(py, move || endpoint.close(timeout))
    }

    /// The worker it belongs to.
    #[getter]
    fn worker(&self, py: Python<'_>) -> Py<Worker> {
        self.worker.clone_ref(py)
    }

    fn __repr__(&self) -> String {
        format!("<crossrail.Endpoint {} to {}>", self.native.id(), self.native.peer())
    }
}

impl Endpoint {
    fn lent(
        &self,
        object: &Bound<'_, PyAny>,
        used: Use,
        stream: Option<&Bound<'_, PyAny>>,
        operation: &str,
    ) -> PyResult<crossrail::Buffer> {
        let stream = stream::parse(stream, operation)?;
        Wanted { context: self.worker.get().context(), used, stream, operation }.of(object)
    }

    /// Small operations are started with the GIL held: to let it go costs more than they do.
    #[inline]
    fn start(
        &self,
        py: Python<'_>,
        buffer: crossrail::Buffer,
        start: impl FnOnce(crossrail::Buffer) -> crossrail::Result<crossrail::Request> + Send,
    ) -> PyResult<Request> {
        const SMALL: usize = 8 << 10;
        let place = buffer.place();
        let quick = buffer.len() <= SMALL && place == Place::Host;
        let native = if quick { start(buffer) } else { py.detach(|| start(buffer)) };
        Ok(Request::new(native.or_raise(py)?, self.worker.clone_ref(py), place))
    }
}

fn place_of(op: &crossrail::Op) -> Place {
    use crossrail::Op;
    match op {
        Op::Send { buffer, .. } | Op::Recv { buffer, .. } => buffer.place(),
        Op::Write { local, .. } | Op::Read { local, .. } => local.place(),
    }
}

/// A row per lane.
pub(crate) fn lane_reports(py: Python<'_>, lanes: Vec<crossrail::LaneReport>) -> PyResult<Bound<'_, PyList>> {
    rows(py, lanes, |row, lane| {
        // A lane is named transport/device#channel.
        let device = lane.name.split_once('/').map_or("", |(_, device)| device.split('#').next().unwrap_or(device));
        row.set_item("device", device)?;
        row.set_item("name", &lane.name)?;
        row.set_item("transport", lane.transport)?;
        row.set_item("alive", lane.alive)?;
        row.set_item("tx_bytes", lane.tx_bytes)?;
        row.set_item("rx_bytes", lane.rx_bytes)?;
        row.set_item("retransmits", lane.retransmits)
    })
}

/// Why an endpoint uses the lanes it uses. As text it is a table.
#[pyclass(module = "crossrail._native", frozen)]
pub(crate) struct Explain(crossrail::Explain);

#[pymethods]
impl Explain {
    /// The peer's name.
    #[getter]
    fn peer(&self) -> &str {
        &self.0.peer
    }

    /// What small messages use.
    #[getter]
    fn small(&self) -> &str {
        &self.0.small
    }

    /// What large messages use.
    #[getter]
    fn large(&self) -> &str {
        &self.0.large
    }

    /// The line on what was available under the present settings.
    #[getter]
    fn available(&self) -> &str {
        &self.0.available
    }

    /// The line on what was chosen.
    #[getter]
    fn selected(&self) -> &str {
        &self.0.selected
    }

    /// Every lane that was considered. Scores are estimated microseconds of a message of 8 bytes, 1 MiB and 64 MiB.
    #[getter]
    fn candidates<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        rows(py, &self.0.candidates, |row: &Bound<'py, PyDict>, candidate| {
            row.set_item("lane", &candidate.lane)?;
            row.set_item("transport", &candidate.transport)?;
            row.set_item("device", &candidate.device)?;
            row.set_item("chosen_for", &candidate.chosen_for)?;
            row.set_item("latency_us", candidate.latency_us)?;
            row.set_item("gb_per_s", candidate.gb_per_s)?;
            row.set_item("score_us_8b", candidate.score_us.map(|scores| scores[0]))?;
            row.set_item("score_us_1m", candidate.score_us.map(|scores| scores[1]))?;
            row.set_item("score_us_64m", candidate.score_us.map(|scores| scores[2]))?;
            row.set_item("reason", &candidate.reason)
        })
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("<crossrail.Explain of {}>", self.0.peer)
    }
}
