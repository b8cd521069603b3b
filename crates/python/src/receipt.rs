use crossrail_bench::TransferReport;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::context::rows;

/// What a finished request did: bytes, the lanes that carried them, and where the time went (microseconds).
#[pyclass(module = "crossrail._native", frozen)]
pub(crate) struct Receipt(crossrail::Receipt);

impl From<crossrail::Receipt> for Receipt {
    fn from(native: crossrail::Receipt) -> Receipt {
        Receipt(native)
    }
}

#[pymethods]
impl Receipt {
    /// Payload bytes moved; for a receive, those that arrived.
    #[getter]
    fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// The message's tag (0 for one-sided operations).
    #[getter]
    fn tag(&self) -> u64 {
        self.0.tag
    }

    /// The peer's name.
    #[getter]
    fn peer(&self) -> &str {
        self.0.peer()
    }

    /// How the bytes travelled: eager, direct(mapped), direct(cma), direct(cuda_ipc), chunks or batch.
    #[getter]
    fn protocol(&self) -> String {
        self.0.protocol.to_string()
    }

    /// A row per lane that carried bytes.
    #[getter]
    fn lanes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        rows(py, self.0.lanes(), |row, lane| {
            row.set_item("name", &*lane.name)?;
            row.set_item("bytes", lane.bytes)?;
            row.set_item("chunks", lane.chunks)?;
            row.set_item("resent", lane.resent)
        })
    }

    /// From start until the other end had matched it.
    #[getter]
    fn match_us(&self) -> f64 {
        self.0.match_us
    }

    /// Bytes were waiting and every lane's window was full.
    #[getter]
    fn window_us(&self) -> f64 {
        self.0.window_us
    }

    /// Bytes were on the wire.
    #[getter]
    fn wire_us(&self) -> f64 {
        self.0.wire_us
    }

    /// This end was copying, or the peer was, where that was left to it.
    #[getter]
    fn copy_us(&self) -> f64 {
        self.0.copy_us
    }

    /// A direct copy was made by the end that the bytes come from, alone; otherwise by the other, or by both.
    #[getter]
    fn pushed(&self) -> bool {
        self.0.pushed
    }

    /// Bytes of this end's GPU memory were copied to bounce slots, to be sent from there.
    #[getter]
    fn pack_us(&self) -> f64 {
        self.0.pack_us
    }

    /// Bytes were copied from bounce slots into this end's GPU memory.
    #[getter]
    fn unpack_us(&self) -> f64 {
        self.0.unpack_us
    }

    /// Bytes were waiting and no bounce slot was free.
    #[getter]
    fn slot_us(&self) -> f64 {
        self.0.slot_us
    }

    /// What happened on the way: lanes lost, slower paths taken.
    #[getter]
    fn notes(&self) -> Vec<String> {
        self.0.notes().to_vec()
    }

    /// All of it as plain data, for JSON.
    fn as_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        report_dict(py, &TransferReport::from(&self.0))
    }

    fn __repr__(&self) -> String {
        let lanes: Vec<String> = self.0.lanes().iter().map(|lane| format!("{} {}", lane.name, lane.bytes)).collect();
        let (bytes, protocol) = (self.0.bytes, self.0.protocol);
        format!("<crossrail.Receipt {bytes} bytes, {protocol}, peer {}, lanes [{}]>", self.0.peer(), lanes.join(", "))
    }
}

/// A receipt of either end as plain data.
pub(crate) fn report_dict<'py>(py: Python<'py>, report: &TransferReport) -> PyResult<Bound<'py, PyDict>> {
    let all = PyDict::new(py);
    all.set_item("bytes", report.bytes)?;
    all.set_item("tag", report.tag)?;
    all.set_item("peer", &report.peer)?;
    all.set_item("protocol", &report.protocol)?;
    let lanes = rows(py, &report.lanes, |row, lane| {
        row.set_item("name", &lane.name)?;
        row.set_item("bytes", lane.bytes)?;
        row.set_item("chunks", lane.chunks)?;
        row.set_item("resent", lane.resent)
    })?;
    all.set_item("lanes", lanes)?;
    all.set_item("match_us", report.match_us)?;
    all.set_item("window_us", report.window_us)?;
    all.set_item("wire_us", report.wire_us)?;
    all.set_item("copy_us", report.copy_us)?;
    all.set_item("pushed", report.pushed)?;
    all.set_item("pack_us", report.pack_us)?;
    all.set_item("unpack_us", report.unpack_us)?;
    all.set_item("slot_us", report.slot_us)?;
    all.set_item("notes", &report.notes)?;
    Ok(all)
}
