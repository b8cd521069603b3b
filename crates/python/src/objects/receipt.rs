use crossrail_bench::TransferReport;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyType};

use crate::borrow::loan::Call;
use crate::runtime::dicts::{rows, set_fields};
use crate::runtime::errors;

/// The record of a finished request: bytes, lanes, and a breakdown of the time in microseconds.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct Receipt(crossrail::Receipt);

impl From<crossrail::Receipt> for Receipt {
    fn from(native: crossrail::Receipt) -> Receipt {
        Receipt(native)
    }
}

#[pymethods]
impl Receipt {
    /// Payload bytes transferred; for a receive, those that arrived.
    #[getter]
    fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// Tag of the message; 0 for one-sided operations.
    #[getter]
    fn tag(&self) -> u64 {
        self.0.tag
    }

    /// Name of the peer.
    #[getter]
    fn peer(&self) -> String {
        self.0.peer().to_string()
    }

    /// Protocol: eager, direct(mapped), direct(cma), direct(cuda_ipc), chunks or batch.
    #[getter]
    fn protocol(&self) -> String {
        self.0.protocol.to_string()
    }

    /// One record per lane that carried bytes.
    #[getter]
    fn lanes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        rows(py, self.0.lanes(), |row, lane| {
            row.set_item("name", &*lane.name)?;
            set_fields!(row, lane; bytes, chunks, resent);
            Ok(())
        })
    }

    /// Time from the start until the other end had matched the operation.
    #[getter]
    fn match_us(&self) -> f64 {
        self.0.match_us
    }

    /// Time during which bytes were waiting while the window of every lane was full.
    #[getter]
    fn window_us(&self) -> f64 {
        self.0.window_us
    }

    /// Time during which bytes were on the wire.
    #[getter]
    fn wire_us(&self) -> f64 {
        self.0.wire_us
    }

    /// Time during which this end was copying, or the peer if it made the copy.
    #[getter]
    fn copy_us(&self) -> f64 {
        self.0.copy_us
    }

    /// Whether a direct copy was made by the sending end alone; otherwise by the receiving end, or by both.
    #[getter]
    fn pushed(&self) -> bool {
        self.0.pushed
    }

    /// Time during which GPU memory of this end was copied into bounce slots for sending.
    #[getter]
    fn pack_us(&self) -> f64 {
        self.0.pack_us
    }

    /// Time during which bytes were copied from bounce slots into GPU memory of this end.
    #[getter]
    fn unpack_us(&self) -> f64 {
        self.0.unpack_us
    }

    /// Time during which bytes were waiting for a free bounce slot.
    #[getter]
    fn slot_us(&self) -> f64 {
        self.0.slot_us
    }

    /// Time during which the connections of the transfer had nothing to do, and waited for staging at this end:
    /// `pack_us` for copies out of GPU memory, `unpack_us` for copies into it, `slot_us` for bounce memory.
    #[getter]
    fn held<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        held_dict(py, self.0.held())
    }

    /// Events during the transfer: lanes lost, fallbacks to slower transports.
    #[getter]
    fn notes(&self) -> Vec<String> {
        self.0.notes().to_vec()
    }

    /// Return the receipt as plain data, for JSON.
    fn as_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        report_dict(py, &TransferReport::from(&self.0))
    }

    /// Restore a receipt from `record`, the result of ``as_dict()`` in this process or another.
    ///
    /// Raises UsageError for an unknown protocol.
    #[classmethod]
    fn from_dict(cls: &Bound<'_, PyType>, record: Record) -> PyResult<Receipt> {
        let py = cls.py();
        let _call = Call::enter(py);
        let Some(protocol) = crossrail::Protocol::named(&record.protocol) else {
            let text = format!("{:?} is not a known protocol", record.protocol);
            return Err(errors::usage(py, "receipt", text, "the dict of Receipt.as_dict()"));
        };
        let lane = |lane: LaneRecord| crossrail::LaneShare {
            name: lane.name.into(),
            bytes: lane.bytes,
            chunks: lane.chunks,
            resent: lane.resent,
        };
        let HeldRecord { pack_us, unpack_us, slot_us } = record.held;
        let held = crossrail::HeldTimes { pack_us, unpack_us, slot_us };
        let lanes = record.lanes.into_iter().map(lane).collect();
        let mut receipt = crossrail::Receipt::restored(&record.peer, protocol, lanes, held, record.notes);
        (receipt.bytes, receipt.tag, receipt.pushed) = (record.bytes, record.tag, record.pushed);
        (receipt.match_us, receipt.window_us) = (record.match_us, record.window_us);
        (receipt.wire_us, receipt.copy_us) = (record.wire_us, record.copy_us);
        (receipt.pack_us, receipt.unpack_us, receipt.slot_us) = (record.pack_us, record.unpack_us, record.slot_us);
        Ok(Receipt(receipt))
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyDict>,))> {
        Ok((slf.get_type().getattr("from_dict")?, (slf.get().as_dict(slf.py())?,)))
    }

    fn __repr__(&self) -> String {
        let lanes: Vec<String> = self.0.lanes().iter().map(|lane| format!("{} {}", lane.name, lane.bytes)).collect();
        let (bytes, protocol) = (self.0.bytes, self.0.protocol);
        format!("<crossrail.Receipt {bytes} bytes, {protocol}, peer {}, lanes [{}]>", self.0.peer(), lanes.join(", "))
    }
}

/// A receipt as [`report_dict`] makes it.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Record {
    bytes: u64,
    tag: u64,
    peer: String,
    protocol: String,
    lanes: Vec<LaneRecord>,
    match_us: f64,
    window_us: f64,
    wire_us: f64,
    copy_us: f64,
    pushed: bool,
    pack_us: f64,
    unpack_us: f64,
    slot_us: f64,
    held: HeldRecord,
    notes: Vec<String>,
}

#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct LaneRecord {
    name: String,
    bytes: u64,
    chunks: u64,
    resent: u64,
}

#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct HeldRecord {
    pack_us: f64,
    unpack_us: f64,
    slot_us: f64,
}

/// A receipt of either end as plain data.
pub(crate) fn report_dict<'py>(py: Python<'py>, report: &TransferReport) -> PyResult<Bound<'py, PyDict>> {
    let all = PyDict::new(py);
    set_fields!(all, report; bytes, tag, peer, protocol);
    let lanes = rows(py, &report.lanes, |row, lane| {
        set_fields!(row, lane; name, bytes, chunks, resent);
        Ok(())
    })?;
    all.set_item("lanes", lanes)?;
    set_fields!(all, report; match_us, window_us, wire_us, copy_us, pushed, pack_us, unpack_us, slot_us);
    all.set_item("held", held_dict(py, report.held)?)?;
    all.set_item("notes", &report.notes)?;
    Ok(all)
}

fn held_dict(py: Python<'_>, held: crossrail::HeldTimes) -> PyResult<Bound<'_, PyDict>> {
    let all = PyDict::new(py);
    set_fields!(all, held; pack_us, unpack_us, slot_us);
    Ok(all)
}
