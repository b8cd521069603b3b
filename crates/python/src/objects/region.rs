use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyType};

use crate::borrow::loan::Call;
use crate::runtime::errors::{self, OrRaise};
use crate::runtime::lifecycle::Detached;
use crate::runtime::{gate, wait};

/// Registered memory that peers with its key can write and read. Created by `Worker.register`.
///
/// It is accessible until it is deregistered or dropped.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct Region {
    native: Detached<crossrail::Region>,
    timeout: Duration,
}

impl Region {
    pub(super) fn new(native: crossrail::Region, timeout: Duration) -> Region {
        Region { native: Detached::new(native), timeout }
    }

    pub(super) fn native(&self) -> &crossrail::Region {
        &self.native
    }
}

#[pymethods]
impl Region {
    /// The key that peers need to access the region. Whoever has it may write and read the region.
    fn key(&self) -> RegionKey {
        RegionKey(self.native.key())
    }

    fn __len__(&self) -> usize {
        usize::try_from(self.native.len()).unwrap_or(usize::MAX)
    }

    /// Deregister the region, and end all access to its memory.
    ///
    /// When this returns, neither a peer nor an operation of this process accesses the memory any
    /// more. Later accesses fail with RegionError at the accessing end, and so do transfers in
    /// flight, of peers and of this process: none of those succeeds or raises its notice.
    ///
    /// Raises
    /// ------
    /// RegionError
    ///     It was deregistered before.
    /// TimeoutError
    ///     After CROSSRAIL_TIMEOUT a peer that the text names may still access the memory, such as
    ///     one that is stopped. Do not reuse the memory before another call has returned.
    fn deregister(&self, py: Python<'_>) -> PyResult<()> {
        let _call = Call::enter(py);
        gate::detached(py, || self.native.deregister()).or_raise(py)
    }

    /// Return the number of writes with immediate `imm` that have arrived completely. Raises nothing.
    ///
    /// Of each region the first 65,536 different immediates are counted; the count of others is 0.
    fn imm_count(&self, py: Python<'_>, imm: u32) -> u64 {
        let _call = Call::enter(py);
        self.native.imm_count(imm)
    }

    /// Wait until `count` writes with immediate `imm` have arrived since the registration.
    ///
    /// Parameters
    /// ----------
    /// imm : int
    ///     32 bits.
    /// count : int
    /// timeout : float, optional
    ///     Maximum seconds to wait; CROSSRAIL_TIMEOUT by default.
    ///
    /// Raises
    /// ------
    /// TimeoutError
    ///     Fewer have arrived; the text says how many.
    /// RegionError
    ///     The region was deregistered.
    /// ExhaustedError
    ///     A region counts at most 65,536 distinct immediates; this one arrived after that many
    ///     others.
    #[pyo3(signature = (imm, count = 1, timeout = None))]
    fn wait_imm(&self, py: Python<'_>, imm: u32, count: u64, timeout: Option<f64>) -> PyResult<()> {
        let _call = Call::enter(py);
        let limit = wait::seconds(py, "wait_imm", timeout)?.unwrap_or(self.timeout);
        wait::bounded(py, limit, |left| self.native.wait_imm(imm, count, left))
    }

    fn __repr__(&self) -> String {
        format!("<crossrail.Region of {} bytes>", self.native.len())
    }
}

/// The key of a region: opaque bytes with a 128-bit random secret, to be sent to peers by any means.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct RegionKey(crossrail::RegionKey);

impl RegionKey {
    pub(super) fn native(&self) -> &crossrail::RegionKey {
        &self.0
    }
}

#[pymethods]
impl RegionKey {
    /// Restore a key from ``bytes(key)``. Raises UsageError if `data` is not a key.
    #[classmethod]
    fn from_bytes(cls: &Bound<'_, PyType>, data: &[u8]) -> PyResult<RegionKey> {
        let _call = Call::enter(cls.py());
        crossrail::RegionKey::from_bytes(data).map(RegionKey).or_raise(cls.py())
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyBytes>,))> {
        Ok((slf.get_type().getattr("from_bytes")?, (slf.get().__bytes__(slf.py()),)))
    }

    fn __bytes__<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.to_bytes())
    }

    /// Size of the region, in bytes.
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        usize::try_from(self.0.len()).map_err(|_| errors::usage(py, "region key", "claims too many bytes", ""))
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<RegionKey>().is_ok_and(|other| other.get().0 == self.0)
    }

    fn __hash__(&self, py: Python<'_>) -> PyResult<isize> {
        PyBytes::new(py, &self.0.to_bytes()).hash()
    }

    fn __repr__(&self) -> String {
        format!("<crossrail.RegionKey for {} bytes>", self.0.len())
    }
}
