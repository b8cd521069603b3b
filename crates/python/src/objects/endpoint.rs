use crossrail::Place;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};

use super::mapped::Mapped;
use super::moves::{self, Description, Layout, Move};
use super::operand::OperandSpec;
use super::region::RegionKey;
use super::request::Request;
use super::worker::Worker;
use crate::borrow::lent::Use;
use crate::borrow::loan::Call;
use crate::borrow::number::{U32, U64};
use crate::borrow::{place, stream};
use crate::runtime::dicts::{rows, set_fields};
use crate::runtime::errors::OrRaise;
use crate::runtime::lifecycle::Detached;
use crate::runtime::{errors, gate, wait};

/// A peer of a worker, and the lanes to it. Created by `Worker.connect` and `Worker.accept`.
///
/// Notes
/// -----
/// Thread safety: any thread may use the endpoint.
#[pyclass(module = "crossrail._native", frozen)]
pub(crate) struct Endpoint {
    native: Detached<crossrail::Endpoint>,
    worker: Py<Worker>,
}

impl Endpoint {
    pub(super) fn new(native: crossrail::Endpoint, worker: Py<Worker>) -> Endpoint {
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
    fn peer(&self, py: Python<'_>) -> String {
        let _call = Call::enter(py);
        self.native.peer()
    }

    /// Number of the endpoint, unique within its worker.
    #[getter]
    fn id(&self) -> u32 {
        self.native.id()
    }

    /// Number of the peer's worker, as `Description.generation`.
    ///
    /// Two processes may have one name, but never one number.
    #[getter]
    fn generation(&self, py: Python<'_>) -> u64 {
        let _call = Call::enter(py);
        self.native.generation()
    }

    /// Whether the peer is alive, as far as is known.
    #[getter]
    fn is_alive(&self, py: Python<'_>) -> bool {
        let _call = Call::enter(py);
        self.native.is_alive()
    }

    /// Send a tagged message. The operation is finished when its bytes are in the receiver's buffer.
    ///
    /// Parameters
    /// ----------
    /// buffer
    ///     Contiguous memory of any size, including 0: an object with the buffer protocol, DLPack
    ///     or ``__cuda_array_interface__``. It stays exported until the request is finished; do
    ///     not write to it before.
    /// tag : int
    ///     64 bits.
    /// stream : optional
    ///     GPU memory is read behind the work enqueued so far in this stream, by default the
    ///     array's own: a raw handle, or an object with ``cuda_stream`` or ``__cuda_stream__``.
    ///
    /// Returns
    /// -------
    /// Request
    ///     Waiting for it may also raise TruncatedError and CancelledError.
    ///
    /// Raises
    /// ------
    /// UsageError
    ///     The buffer is not contiguous, or does not describe its memory correctly.
    /// UnsupportedError
    ///     No lane can access the memory.
    /// PeerDeadError, ClosedError
    #[pyo3(signature = (buffer, tag = U64(0), *, stream = None), text_signature = "($self, buffer, tag=0, *, stream=None)")]
    fn send(&self, buffer: &Bound<'_, PyAny>, tag: U64, stream: Option<&Bound<'_, PyAny>>) -> PyResult<Request> {
        let py = buffer.py();
        let _call = Call::enter(py);
        let lent = self.lent(buffer, Use::Read, stream, "send")?;
        self.start(py, lent, |lent| self.native.send(lent, tag.0))
    }

    /// Write into a region of the peer. The operation is finished when the bytes are there.
    ///
    /// Parameters
    /// ----------
    /// local
    ///     Contiguous memory; as for `send`.
    /// remote : RegionKey
    ///     Key of the peer's region.
    /// offset : int
    ///     Offset in the region, in bytes.
    /// imm : int, optional
    ///     32-bit immediate, which the owner of the region counts once the bytes are there; see
    ///     `Region.wait_imm`.
    /// stream : optional
    ///     As for `send`.
    ///
    /// Returns
    /// -------
    /// Request
    ///     Waiting for it raises RegionError if the key is wrong, the region is no longer
    ///     registered, or the range is out of bounds.
    ///
    /// Raises
    /// ------
    /// UsageError, UnsupportedError, PeerDeadError, ClosedError
    ///     As for `send`.
    #[pyo3(signature = (local, remote, offset = U64(0), imm = None, *, stream = None),
        text_signature = "($self, local, remote, offset=0, imm=None, *, stream=None)")]
    fn write(
        &self,
        local: &Bound<'_, PyAny>,
        remote: &Bound<'_, RegionKey>,
        offset: U64,
        imm: Option<U32>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Request> {
        let py = local.py();
        let _call = Call::enter(py);
        let lent = self.lent(local, Use::Read, stream, "write")?;
        let key = remote.get().native();
        self.start(py, lent, |lent| self.native.write(lent, key, offset.0, imm.map(|imm| imm.0)))
    }

    /// Read from a region of the peer into `local`, writable memory.
    ///
    /// Parameters, errors and the request as for `write`.
    #[pyo3(signature = (local, remote, offset = U64(0), *, stream = None),
        text_signature = "($self, local, remote, offset=0, *, stream=None)")]
    fn read(
        &self,
        local: &Bound<'_, PyAny>,
        remote: &Bound<'_, RegionKey>,
        offset: U64,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Request> {
        let py = local.py();
        let _call = Call::enter(py);
        let lent = self.lent(local, Use::Write, stream, "read")?;
        let key = remote.get().native();
        self.start(py, lent, |lent| self.native.read(lent, key, offset.0))
    }

    /// Start several operations in one call, with one request that is finished when all are.
    ///
    /// Parameters
    /// ----------
    /// operations : sequence of tuple
    ///     ``("send", buffer, tag)``, ``("recv", buffer, tag, mask)``,
    ///     ``("write", local, remote, offset[, imm])`` or ``("read", local, remote, offset)``.
    ///
    /// Returns
    /// -------
    /// Request
    ///     It fails with the first error, after all operations have ended.
    ///
    /// Raises
    /// ------
    /// UsageError
    ///     An operation is malformed; none is started.
    fn batch(&self, operations: &Bound<'_, PyAny>) -> PyResult<Request> {
        let py = operations.py();
        let _call = Call::enter(py);
        let list = parse_operations(operations, self.worker.get().context())?;
        let place = list.iter().map(place_of).find(|place| *place != Place::Host).unwrap_or_default();
        let native = gate::detached(py, || self.native.batch(list)).or_raise(py)?;
        Ok(Request::new(native, self.worker.clone_ref(py), place))
    }

    /// Make a list of rows of the peer's registered memory.
    ///
    /// Parameters
    /// ----------
    /// rows
    ///     As for `Worker.layout`, with a `RegionKey` in place of a region.
    /// description : Description, optional
    ///     The peer's, in whose regions rows of addresses lie.
    ///
    /// Returns
    /// -------
    /// Layout
    ///     Whether the peer still has the memory is found out by the moves.
    ///
    /// Raises
    /// ------
    /// UsageError
    ///     The rows are malformed.
    /// RegionError
    ///     A row does not lie in one of the regions.
    /// PeerDeadError, ClosedError
    #[pyo3(signature = (rows, description = None))]
    fn layout(&self, rows: &Bound<'_, PyAny>, description: Option<&Bound<'_, Description>>) -> PyResult<Layout> {
        moves::remote(&self.native, rows, description)
    }

    /// Prepare a transfer between rows of two layouts, which may be started many times.
    ///
    /// Parameters
    /// ----------
    /// op : str
    ///     ``"write"`` (local to remote) or ``"read"``.
    /// local, remote : Layout
    /// local_index, remote_index : array or sequence of int, optional
    ///     Which rows, in which order: contiguous int32, uint32, int64 or uint64, or a sequence of
    ///     int; all rows in order by default. They are copied.
    /// notice : bytes
    ///     As for `Move.start`.
    /// imm : int, optional
    ///     Of a write: counted in the region of the first row of `remote` once all bytes are there,
    ///     once for each start, and not if the move fails.
    ///
    /// Returns
    /// -------
    /// Move
    ///
    /// Raises
    /// ------
    /// UsageError
    ///     The two ends differ in the number or the lengths of their rows, or an index is out of
    ///     bounds.
    /// PeerDeadError, ClosedError
    #[pyo3(signature = (op, local, remote, local_index = None, remote_index = None, *, notice = Vec::new(), imm = None),
        text_signature = "($self, op, local, remote, local_index=None, remote_index=None, *, notice=b'', imm=None)")]
    #[expect(clippy::too_many_arguments, reason = "as Python's callers name them")]
    fn prepare(
        &self,
        py: Python<'_>,
        op: &str,
        local: &Layout,
        remote: &Layout,
        local_index: Option<&Bound<'_, PyAny>>,
        remote_index: Option<&Bound<'_, PyAny>>,
        notice: Vec<u8>,
        imm: Option<U32>,
    ) -> PyResult<Move> {
        let wanted = moves::PrepareArgs { op, local_index, remote_index, notice: &notice, imm };
        moves::prepare(py, &self.native, self.worker.clone_ref(py), local, remote, &wanted)
    }

    /// Raise a notice at the peer, which gets it by `Worker.notices`.
    ///
    /// It is not ordered with other operations.
    ///
    /// Parameters
    /// ----------
    /// data : bytes
    ///
    /// Returns
    /// -------
    /// Request
    ///     Finished when the peer has it. A peer that does not read its notices delays it. Waiting for
    ///     it raises ExhaustedError if the peer has no room, also because of other connections.
    ///
    /// Raises
    /// ------
    /// UsageError
    ///     It is too long.
    /// PeerDeadError, ClosedError
    fn notify(&self, py: Python<'_>, data: &[u8]) -> PyResult<Request> {
        let _call = Call::enter(py);
        let native = gate::detached(py, || self.native.notify(data)).or_raise(py)?;
        Ok(Request::new(native, self.worker.clone_ref(py), Place::Host))
    }

    /// Share memory with the peer, which can map it with `Endpoint.map` and the bytes returned.
    ///
    /// Nothing is copied. The bytes are not secret: no other process can use them. Sharing does
    /// not keep the memory allocated: once it is freed, the peer can no longer map it.
    ///
    /// Parameters
    /// ----------
    /// memory
    ///     A `Memory`, part of one, or an array on a GPU.
    ///
    /// Returns
    /// -------
    /// bytes
    ///
    /// Raises
    /// ------
    /// UsageError
    ///     Host memory that this Context has not allocated.
    /// UnsupportedError
    ///     There is no shared-memory lane, or GPU memory that cannot be exported; the text has the
    ///     reason.
    /// TimeoutError
    ///     The peer does not read.
    /// PeerDeadError, ClosedError
    fn share<'py>(&self, memory: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
        let py = memory.py();
        let _call = Call::enter(py);
        let lent = self.lent(memory, Use::Write, None, "share")?;
        let endpoint = self.native.clone();
        let shared = wait::on_own_thread(py, move || endpoint.share_buffer(lent))?;
        Ok(PyBytes::new(py, &shared.to_bytes()))
    }

    /// Map memory that the peer has shared, waiting until the description has arrived.
    ///
    /// Parameters
    /// ----------
    /// shared : bytes
    ///     The result of the peer's `Endpoint.share`.
    /// device : str, optional
    ///     The GPU that shall access GPU memory, such as ``cuda:0``. By default one that this
    ///     process already uses, else the owner's if it is visible here.
    /// timeout : float, optional
    ///     Maximum seconds to wait; CROSSRAIL_TIMEOUT by default.
    ///
    /// Returns
    /// -------
    /// Mapped
    ///
    /// Raises
    /// ------
    /// TimeoutError
    ///     Nothing with these bytes was shared over this endpoint.
    /// RegionError
    ///     The peer has freed the memory, or the GPU cannot access it.
    /// UsageError
    ///     The bytes are malformed, there is no such GPU, or a GPU was given for host memory.
    /// UnsupportedError, PeerDeadError, ClosedError
    #[pyo3(signature = (shared, timeout = None, *, device = None))]
    fn map(
        &self,
        py: Python<'_>,
        shared: &[u8],
        timeout: Option<f64>,
        device: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<Mapped>> {
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
        Py::new(py, Mapped::new(native, self.worker.clone_ref(py)))
    }

    /// Return all lanes considered for this peer, with their scores or the reasons why they are not used.
    fn explain(&self, py: Python<'_>) -> Explain {
        let _call = Call::enter(py);
        Explain(gate::detached(py, || self.native.explain()))
    }

    /// Return the running totals of every lane, headers included.
    fn lanes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let _call = Call::enter(py);
        lane_reports(py, gate::detached(py, || self.native.lanes()))
    }

    /// Finish the operations in flight and close the endpoint.
    ///
    /// Later operations of either end fail with ClosedError.
    ///
    /// Parameters
    /// ----------
    /// timeout : float, optional
    ///     Maximum seconds to wait; CROSSRAIL_TIMEOUT by default.
    ///
    /// Raises
    /// ------
    /// TimeoutError
    ///     An operation did not finish; the endpoint is closed nevertheless. If the peer may still
    ///     access memory of operations, they end once it has confirmed that it does not.
    #[pyo3(signature = (timeout = None))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let _call = Call::enter(py);
        let timeout = wait::seconds(py, "close", timeout)?;
        let endpoint = self.native.clone();
        wait::on_own_thread(py, move || endpoint.close(timeout))
    }

    /// The worker of the endpoint.
    #[getter]
    fn worker(&self, py: Python<'_>) -> Py<Worker> {
        self.worker.clone_ref(py)
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let _call = Call::enter(py);
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
        OperandSpec { context: self.worker.get().context(), used, stream, operation }.of(object)
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
        let native = if quick { start(buffer) } else { gate::detached(py, || start(buffer)) };
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

/// One record per lane.
pub(crate) fn lane_reports(py: Python<'_>, lanes: Vec<crossrail::LaneReport>) -> PyResult<Bound<'_, PyList>> {
    rows(py, lanes, |row, lane| {
        // A lane is named transport/device#channel.
        let device = lane.name.split_once('/').map_or("", |(_, device)| device.split('#').next().unwrap_or(device));
        row.set_item("device", device)?;
        set_fields!(row, lane; name, transport, alive, tx_bytes, rx_bytes, retransmits);
        Ok(())
    })
}

/// Why an endpoint uses its lanes. Printed, it is a table.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct Explain(crossrail::Explain);

#[pymethods]
impl Explain {
    /// The peer's name.
    #[getter]
    fn peer(&self) -> &str {
        &self.0.peer
    }

    /// The lane for small messages.
    #[getter]
    fn small(&self) -> &str {
        &self.0.small
    }

    /// The lanes for large messages.
    #[getter]
    fn large(&self) -> &str {
        &self.0.large
    }

    /// One line on what was available with the current settings.
    #[getter]
    fn available(&self) -> &str {
        &self.0.available
    }

    /// One line on what was chosen.
    #[getter]
    fn selected(&self) -> &str {
        &self.0.selected
    }

    /// All lanes considered. Scores are the estimated microseconds of a message of 8 B, 1 MiB and 64 MiB.
    #[getter]
    fn candidates<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let _call = Call::enter(py);
        rows(py, &self.0.candidates, |row: &Bound<'py, PyDict>, candidate| {
            set_fields!(row, candidate; lane, transport, device, chosen_for, latency_us, gb_per_s);
            row.set_item("score_us_8b", candidate.score_us.map(|scores| scores[0]))?;
            row.set_item("score_us_1m", candidate.score_us.map(|scores| scores[1]))?;
            row.set_item("score_us_64m", candidate.score_us.map(|scores| scores[2]))?;
            set_fields!(row, candidate; reason, missed);
            Ok(())
        })
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("<crossrail.Explain of {}>", self.0.peer)
    }
}

/// Operations of a batch, as tuples.
fn parse_operations(list: &Bound<'_, PyAny>, context: &crossrail::Context) -> PyResult<Vec<crossrail::Op>> {
    list.try_iter()?.map(|item| operation(&item?, context)).collect()
}

fn operation(item: &Bound<'_, PyAny>, context: &crossrail::Context) -> PyResult<crossrail::Op> {
    let py = item.py();
    let malformed = || {
        errors::usage(
            py,
            "batch",
            format!("{} is no operation", item.repr().map_or_else(|_| "this".to_owned(), |text| text.to_string())),
            "(\"send\", buffer, tag), (\"recv\", buffer, tag, mask), (\"write\", local, key, offset[, imm]) or \
             (\"read\", local, key, offset)",
        )
    };
    let parts = item.cast::<PyTuple>().map_err(|_| malformed())?;
    let name: String = parts.get_item(0).and_then(|name| name.extract()).map_err(|_| malformed())?;
    let key = |at: usize| -> PyResult<crossrail::RegionKey> {
        Ok(parts.get_item(at)?.cast::<RegionKey>().map_err(|_| malformed())?.get().native().clone())
    };
    let lent = |used, operation| OperandSpec { context, used, stream: None, operation }.of(&parts.get_item(1)?);
    let number = |at: usize| -> PyResult<u64> { Ok(parts.get_item(at)?.extract::<U64>()?.0) };
    Ok(match (name.as_str(), parts.len()) {
        ("send", 3) => crossrail::Op::Send { buffer: lent(Use::Read, "send")?, tag: number(2)? },
        ("recv", 4) => crossrail::Op::Recv { buffer: lent(Use::Write, "recv")?, tag: number(2)?, mask: number(3)? },
        ("write", 4 | 5) => crossrail::Op::Write {
            local: lent(Use::Read, "write")?,
            remote: key(2)?,
            offset: number(3)?,
            imm: match parts.get_item(4) {
                Ok(imm) => imm.extract::<Option<U32>>()?.map(|imm| imm.0),
                Err(_) => None,
            },
        },
        ("read", 4) => crossrail::Op::Read { local: lent(Use::Write, "read")?, remote: key(2)?, offset: number(3)? },
        _ => return Err(malformed()),
    })
}
