//! Packing for the MPI_Alltoallv baseline of dispatch and combine.
#![allow(unsafe_code)]

use std::sync::{Mutex, MutexGuard, PoisonError};

use crossrail_ep_host as ep;
use pyo3::prelude::*;

use crate::borrow::lent::{self, Use};
use crate::experts::host::Parameters;
use crate::runtime::errors::{self, OrRaise};

/// Packing and unpacking around MPI_Alltoallv for a dispatch and combine, with Crossrail's row kernels.
///
/// Arrays are bytes of the dtypes of `crossrail_bench::Alltoallv`; the caller allocates all of them.
#[pyclass(module = "crossrail._native", name = "_Alltoallv", frozen)]
pub(super) struct Alltoallv(Mutex<crossrail_bench::Alltoallv>);

impl Alltoallv {
    fn lock(&self) -> MutexGuard<'_, crossrail_bench::Alltoallv> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Alltoallv {
    /// `parameters`: as of an ExpertBuffer; its first layout counts. `dedup`: one row per token and rank.
    #[new]
    fn new(py: Python<'_>, parameters: Parameters, dedup: bool) -> PyResult<Alltoallv> {
        let config = parameters.config(py)?;
        let layout = config.layouts.first().copied().unwrap_or(ep::Layout::Expert);
        Ok(Alltoallv(Mutex::new(crossrail_bench::Alltoallv::new(config, layout, dedup).or_raise(py)?)))
    }

    #[getter]
    fn slots(&self) -> usize {
        self.lock().slots()
    }

    #[getter]
    fn row_bytes(&self) -> usize {
        self.lock().row_bytes()
    }

    #[getter]
    fn side_bytes(&self) -> usize {
        self.lock().side_bytes()
    }

    fn route(
        &self,
        topk_idx: &Bound<'_, PyAny>,
        topk_weights: &Bound<'_, PyAny>,
        counts: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (idx, weights) = (Array::read(topk_idx)?, Array::read(topk_weights)?);
        let mut counts = Array::written(counts)?;
        let py = topk_idx.py();
        self.lock().route(idx.of(py)?, weights.of(py)?, counts.of_mut(py)?).or_raise(py)
    }

    fn pack(
        &self,
        x: &Bound<'_, PyAny>,
        topk_idx: &Bound<'_, PyAny>,
        rows: &Bound<'_, PyAny>,
        sides: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (x_, idx) = (Array::read(x)?, Array::read(topk_idx)?);
        let (mut rows, mut sides) = (Array::written(rows)?, Array::written(sides)?);
        let py = x.py();
        self.lock().pack(x_.of(py)?, idx.of(py)?, rows.of_mut(py)?, sides.of_mut(py)?).or_raise(py)
    }

    fn unpack(
        &self,
        counts: &Bound<'_, PyAny>,
        rows: &Bound<'_, PyAny>,
        sides: &Bound<'_, PyAny>,
        x: &Bound<'_, PyAny>,
        scales: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let py = rows.py();
        let (counts, rows, sides) = (Array::read(counts)?, Array::read(rows)?, Array::read(sides)?);
        let (mut x, mut scales) = (Array::written(x)?, Array::written(scales)?);
        let (x, scales) = (x.of_mut(py)?, scales.of_mut(py)?);
        self.lock().unpack(counts.of(py)?, rows.of(py)?, sides.of(py)?, x, scales).or_raise(py)
    }

    fn expert_counts(&self) -> Vec<i32> {
        self.lock().expert_counts()
    }

    fn pack_back(&self, y: &Bound<'_, PyAny>, rows: &Bound<'_, PyAny>) -> PyResult<()> {
        let (y_, mut rows) = (Array::read(y)?, Array::written(rows)?);
        let py = y.py();
        self.lock().pack_back(y_.of(py)?, rows.of_mut(py)?).or_raise(py)
    }

    fn unpack_back(&self, rows: &Bound<'_, PyAny>, out: &Bound<'_, PyAny>) -> PyResult<()> {
        let (rows_, mut out) = (Array::read(rows)?, Array::written(out)?);
        let py = rows.py();
        self.lock().unpack_back(rows_.of(py)?, out.of_mut(py)?).or_raise(py)
    }
}

/// An array borrowed from Python for one call, with the GIL held throughout.
struct Array(lent::BorrowedBytes);

impl Array {
    fn read(object: &Bound<'_, PyAny>) -> PyResult<Array> {
        lent::bytes(object, Use::Read, "alltoallv").map(Array)
    }

    fn written(object: &Bound<'_, PyAny>) -> PyResult<Array> {
        lent::bytes(object, Use::Write, "alltoallv").map(Array)
    }

    /// Its elements.
    fn of<T: Number>(&self, py: Python<'_>) -> PyResult<&[T]> {
        self.fits::<T>(py)?;
        // SAFETY: alignment was checked, any bit pattern is valid for `T`, and no other thread writes while the GIL is
        // held.
        Ok(unsafe { std::slice::from_raw_parts(self.0.ptr.cast(), self.0.len / size_of::<T>()) })
    }

    fn of_mut<T: Number>(&mut self, py: Python<'_>) -> PyResult<&mut [T]> {
        self.fits::<T>(py)?;
        // SAFETY: as above, and writable.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.0.ptr.cast(), self.0.len / size_of::<T>()) })
    }

    fn fits<T>(&self, py: Python<'_>) -> PyResult<()> {
        if self.0.ptr.cast::<T>().is_aligned() && !self.0.ptr.is_null() {
            return Ok(());
        }
        Err(errors::usage(py, "alltoallv", "an array that is not aligned", "contiguous arrays of NumPy"))
    }
}

/// Types for which every bit pattern is a valid value.
trait Number {}
impl Number for u8 {}
impl Number for i32 {}
impl Number for i64 {}
impl Number for f32 {}
