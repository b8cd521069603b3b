//! Lists of rows, and moves between two of them.

use std::ops::Range;

use crossrail::{Addresses, MoveKind, MoveOptions, Place, Row, StartOptions};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PySlice, PyTuple};

use super::region::{Region, RegionKey};
use super::request::Request;
use super::worker::Worker;
use crate::borrow::loan::Call;
use crate::borrow::number::{U32, U64};
use crate::borrow::rows::{Index, Table};
use crate::borrow::stream;
use crate::runtime::dicts::set_fields;
use crate::runtime::errors::{self, OrRaise};
use crate::runtime::gate;
use crate::runtime::lifecycle::Detached;

/// A worker's name, address, and regions with their keys, received from the worker.
///
/// Parameters
/// ----------
/// data : bytes
///     The result of the other worker's `Worker.describe`. Nothing in it is trusted.
///
/// Raises
/// ------
/// UsageError
///     `data` is no description.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct Description(crossrail::Description);

impl Description {
    pub(super) fn native(&self) -> &crossrail::Description {
        &self.0
    }
}

#[pymethods]
impl Description {
    #[new]
    fn new(py: Python<'_>, data: &[u8]) -> PyResult<Description> {
        crossrail::Description::parse(data).map(Description).or_raise(py)
    }

    /// The worker's name.
    #[getter]
    fn name(&self) -> &str {
        self.0.name()
    }

    /// The worker's address, for `Worker.connect`.
    #[getter]
    fn address<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.address())
    }

    /// A number that differs for every worker that ever existed.
    #[getter]
    fn generation(&self) -> u64 {
        self.0.generation()
    }

    /// Address, size in bytes and device of every region.
    #[getter]
    fn regions(&self) -> Vec<(u64, u64, String)> {
        self.0.regions().iter().map(|region| (region.base, region.len(), region.place().to_string())).collect()
    }

    /// Return the regions of both. Raises MismatchError if `other` is of another worker.
    fn merge(&self, py: Python<'_>, other: &Description) -> PyResult<Description> {
        let mut union = self.0.clone();
        union.merge(&other.0).or_raise(py)?;
        Ok(Description(union))
    }

    fn __repr__(&self) -> String {
        format!("<crossrail.Description of {}, {} regions>", self.0.name(), self.0.regions().len())
    }
}

/// Rows of registered memory, of this worker or of a peer. Created by `Worker.layout` and `Endpoint.layout`.
///
/// It is checked when it is made, and installed at a peer at its first use there.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct Layout(Detached<crossrail::Layout>);

impl Layout {
    fn new(native: crossrail::Layout) -> Layout {
        Layout(Detached::new(native))
    }
}

#[pymethods]
impl Layout {
    /// Number of rows.
    #[getter]
    fn rows(&self) -> u64 {
        self.0.rows()
    }

    /// Number of runs of rows of equal length at equal distances, which is what it takes to describe it.
    #[getter]
    fn strides(&self) -> usize {
        self.0.strides()
    }

    /// Bytes of all rows.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.nbytes()
    }

    /// Cut each row into `parts` of equal length, and return part `index` of each.
    ///
    /// Raises UsageError if a row's length is not a multiple of `parts`.
    fn split(&self, py: Python<'_>, parts: U64, index: U64) -> PyResult<Layout> {
        gate::detached(py, || self.0.split(parts.0, index.0)).or_raise(py).map(Layout::new)
    }

    /// Return the rows from `first` up to `last`, which is not included.
    ///
    /// Raises UsageError if there are not that many.
    fn slice(&self, py: Python<'_>, first: U64, last: U64) -> PyResult<Layout> {
        gate::detached(py, || self.0.slice(first.0, last.0)).or_raise(py).map(Layout::new)
    }

    fn __repr__(&self) -> String {
        format!("<crossrail.Layout of {} rows, {} bytes>", self.0.rows(), self.0.nbytes())
    }
}

/// A prepared transfer between rows of two layouts. Created by `Endpoint.prepare`.
///
/// Dropping it does not cancel it.
///
/// Notes
/// -----
/// Thread safety: any thread may use the move; it is in flight once at a time.
#[pyclass(module = "crossrail._native", frozen, weakref)]
pub(super) struct Move {
    native: Detached<crossrail::Move>,
    worker: Py<Worker>,
}

#[pymethods]
impl Move {
    /// Start it. It may be started again once it is finished.
    ///
    /// Parameters
    /// ----------
    /// notice : bytes, optional
    ///     Raised at the peer, by `Worker.notices`, once all bytes are in place; none if empty. By
    ///     default the notice that it was prepared with.
    /// rows : slice or range, optional
    ///     Which of its rows to move, without a step; all by default.
    /// stream : optional
    ///     GPU memory of this end is accessed behind the work enqueued so far in this stream: a
    ///     raw handle, or an object with ``cuda_stream`` or ``__cuda_stream__``.
    ///
    /// Returns
    /// -------
    /// Request
    ///     Waiting for it raises RegionError if memory of the peer was deregistered since.
    ///
    /// Raises
    /// ------
    /// UsageError
    ///     It is in flight, or there are no such rows.
    /// RegionError
    ///     Memory of this end was deregistered since.
    /// PeerDeadError, ClosedError
    #[pyo3(signature = (*, notice = None, rows = None, stream = None))]
    fn start(
        &self,
        py: Python<'_>,
        notice: Option<&[u8]>,
        rows: Option<&Bound<'_, PyAny>>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Request> {
        let _call = Call::enter(py);
        let rows = rows.map(|rows| range(rows, self.native.rows())).transpose()?;
        let after = match stream::parse(stream, "start")? {
            None => None,
            Some(stream) => {
                let context = self.worker.get().context();
                let ordinal = stream.ordinal.unwrap_or(0);
                Some(after(context, ordinal, stream.handle).or_raise(py)?)
            }
        };
        let options = StartOptions { notice, rows, after };
        let native = gate::detached(py, || self.native.start(options)).or_raise(py)?;
        Ok(Request::new(native, self.worker.clone_ref(py), Place::Host))
    }

    /// Return whether it was started and is not finished, without making progress.
    fn is_in_flight(&self, py: Python<'_>) -> bool {
        gate::detached(py, || self.native.is_in_flight())
    }

    /// Bytes of all its rows.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.native.nbytes()
    }

    /// Number of its rows.
    #[getter]
    fn rows(&self) -> u64 {
        self.native.rows()
    }

    /// Number of pieces left when rows that are neighbours at both ends are joined. Counted when asked for.
    #[getter]
    fn runs(&self, py: Python<'_>) -> u64 {
        gate::detached(py, || self.native.runs())
    }

    /// Return which lane it uses, how its bytes are moved, and why.
    fn explain<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let explain = gate::detached(py, || self.native.explain());
        let all = PyDict::new(py);
        set_fields!(all, explain; lane, how, why, rows, runs, nbytes);
        Ok(all)
    }

    fn __repr__(&self) -> String {
        format!("<crossrail.Move of {} rows, {} bytes>", self.native.rows(), self.native.nbytes())
    }
}

#[allow(unsafe_code)]
fn after(context: &crossrail::Context, ordinal: u32, handle: u64) -> crossrail::Result<crossrail::Ready> {
    // SAFETY: that the stream is alive is the documented rule for callers.
    unsafe { crossrail::Ready::on_stream(context, ordinal, handle) }
}

/// A slice or range without a step, of `count` rows.
fn range(rows: &Bound<'_, PyAny>, count: u64) -> PyResult<Range<u64>> {
    let py = rows.py();
    let refused = || errors::usage(py, "start", "rows: a slice or range without a step", "rows=slice(0, 100)");
    if let Ok(slice) = rows.cast::<PySlice>() {
        let length = isize::try_from(count).unwrap_or(isize::MAX);
        let indices = slice.indices(length)?;
        if indices.step != 1 {
            return Err(refused());
        }
        let (first, last) = (indices.start.unsigned_abs() as u64, indices.stop.unsigned_abs() as u64);
        return Ok(first..last.max(first));
    }
    let number = |name| rows.getattr(name).and_then(|value| value.extract::<u64>()).map_err(|_| refused());
    if number("step")? != 1 {
        return Err(refused());
    }
    Ok(number("start")?..number("stop")?)
}

/// Parses rows given as tuples: (region, offset, length) or (region, offset, length, stride, count).
fn tuples<'py, T: PyClassOf, R>(
    rows: &Bound<'py, PyAny>,
    operation: &str,
    native: impl Fn(&Bound<'py, PyAny>) -> Option<R>,
) -> PyResult<Vec<(R, [u64; 4])>> {
    let py = rows.py();
    let malformed = || {
        let detail = format!("a row is ({}, offset, length) or ({}, offset, length, stride, count)", T::NAME, T::NAME);
        errors::usage(py, operation, detail, "or pass an array of addresses")
    };
    let one = |(row, item): (usize, PyResult<Bound<'py, PyAny>>)| -> PyResult<(R, [u64; 4])> {
        let item = item?;
        let parts = item.cast::<PyTuple>().map_err(|_| malformed())?;
        let region = parts.get_item(0).ok().and_then(|region| native(&region)).ok_or_else(malformed)?;
        let number = |at: usize| -> PyResult<u64> {
            let wrong = |error| errors::in_argument(py, operation, &format!("rows[{row}][{at}]"), error);
            parts.get_item(at)?.extract::<U64>().map(|number| number.0).map_err(wrong)
        };
        match parts.len() {
            3 => Ok((region, [number(1)?, number(2)?, number(2)?, 1])),
            5 => Ok((region, [number(1)?, number(2)?, number(3)?, number(4)?])),
            _ => Err(malformed()),
        }
    };
    let rows = rows.try_iter().map_err(|error| errors::in_argument(py, operation, "rows", error))?;
    rows.enumerate().map(one).collect()
}

/// Name of a row's first item, for error messages.
trait PyClassOf {
    const NAME: &'static str;
}

impl PyClassOf for Region {
    const NAME: &'static str = "Region";
}

impl PyClassOf for RegionKey {
    const NAME: &'static str = "RegionKey";
}

fn as_rows<R>(rows: &[(R, [u64; 4])]) -> Vec<Row<'_, R>> {
    rows.iter()
        .map(|(region, [offset, len, stride, count])| Row {
            region,
            offset: *offset,
            len: *len,
            stride: *stride,
            count: *count,
        })
        .collect()
}

/// Native regions of Python's.
pub(super) fn regions(given: &Bound<'_, PyAny>) -> PyResult<Vec<crossrail::Region>> {
    given.try_iter()?.map(|region| Ok(region?.cast::<Region>()?.get().native().clone())).collect()
}

/// `Worker.layout`.
pub(super) fn local(worker: &Worker, rows: &Bound<'_, PyAny>, of: Option<&Bound<'_, PyAny>>) -> PyResult<Layout> {
    let py = rows.py();
    let _call = Call::enter(py);
    let native = if let Some(table) = Table::of(rows, "layout")? {
        let Some(of) = of else {
            return Err(errors::usage(py, "layout", "rows of addresses need regions=", "the regions that they lie in"));
        };
        let regions = regions(of)?;
        gate::detached(py, || {
            let words = table.words();
            worker.native().layout_at(&regions, Addresses::new(&words, table.width)?)
        })
    } else {
        let rows =
            tuples::<Region, _>(rows, "layout", |region| Some(region.cast::<Region>().ok()?.get().native().clone()))?;
        gate::detached(py, || worker.native().layout(&as_rows(&rows)))
    };
    native.or_raise(py).map(Layout::new)
}

/// `Endpoint.layout`.
pub(super) fn remote(
    endpoint: &crossrail::Endpoint,
    rows: &Bound<'_, PyAny>,
    of: Option<&Bound<'_, Description>>,
) -> PyResult<Layout> {
    let py = rows.py();
    let _call = Call::enter(py);
    let native = if let Some(table) = Table::of(rows, "layout")? {
        let Some(of) = of else {
            let hint = "the peer's Worker.describe, as a Description";
            return Err(errors::usage(py, "layout", "rows of addresses need a description", hint));
        };
        let description = of.get().native();
        gate::detached(py, || {
            let words = table.words();
            endpoint.layout_at(description, Addresses::new(&words, table.width)?)
        })
    } else {
        let key = |key: &Bound<'_, PyAny>| Some(key.cast::<RegionKey>().ok()?.get().native().clone());
        let rows = tuples::<RegionKey, _>(rows, "layout", key)?;
        gate::detached(py, || endpoint.layout(&as_rows(&rows)))
    };
    native.or_raise(py).map(Layout::new)
}

/// Arguments of `Endpoint.prepare` other than the layouts.
pub(super) struct PrepareArgs<'a, 'py> {
    pub(super) op: &'a str,
    pub(super) local_index: Option<&'a Bound<'py, PyAny>>,
    pub(super) remote_index: Option<&'a Bound<'py, PyAny>>,
    pub(super) notice: &'a [u8],
    pub(super) imm: Option<U32>,
}

/// `Endpoint.prepare`.
pub(super) fn prepare(
    py: Python<'_>,
    endpoint: &crossrail::Endpoint,
    worker: Py<Worker>,
    local: &Layout,
    remote: &Layout,
    wanted: &PrepareArgs<'_, '_>,
) -> PyResult<Move> {
    let _call = Call::enter(py);
    let kind = match wanted.op {
        "read" => MoveKind::Read,
        "write" => MoveKind::Write,
        other => {
            return Err(errors::usage(py, "prepare", format!("{other:?} is no operation"), "\"read\" or \"write\""));
        }
    };
    let local_index = Index::of(wanted.local_index, "prepare", "local_index")?;
    let remote_index = Index::of(wanted.remote_index, "prepare", "remote_index")?;
    let (notice, imm) = (wanted.notice, wanted.imm.map(|imm| imm.0));
    let native = gate::detached(py, || {
        let (ours, theirs) = (local_index.as_ref().map(Index::numbers), remote_index.as_ref().map(Index::numbers));
        let options = MoveOptions { local_index: ours.as_deref(), remote_index: theirs.as_deref(), notice, imm };
        endpoint.prepare(kind, &local.0, &remote.0, options)
    });
    Ok(Move { native: Detached::new(native.or_raise(py)?), worker })
}

/// Join adjacent and overlapping rows of an Nx3 or Nx5 array of addresses: what to register for them.
///
/// Returns
/// -------
/// list of (int, int, int)
///     Address, bytes and device, sorted.
#[pyfunction]
pub(super) fn merged_rows(rows: &Bound<'_, PyAny>) -> PyResult<Vec<(u64, u64, u64)>> {
    let py = rows.py();
    let _call = Call::enter(py);
    let Some(table) = Table::of(rows, "merged_rows")? else {
        return Err(errors::usage(py, "merged_rows", "rows of addresses are an array", ""));
    };
    gate::detached(py, || {
        let words = table.words();
        Ok(Addresses::new(&words, table.width)?.merged())
    })
    .or_raise(py)
}

/// Deregisters regions within one CROSSRAIL_TIMEOUT; those that were deregistered before are left out.
///
/// Raises TimeoutError as `Region.deregister`.
#[pyfunction]
pub(super) fn _deregister(regions: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = regions.py();
    let _call = Call::enter(py);
    let regions = self::regions(regions)?;
    gate::detached(py, || crossrail::Region::deregister_all(&regions)).or_raise(py)
}
