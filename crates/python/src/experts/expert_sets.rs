//! Recycling of output tensors, by reference count.
//!
//! A set is free when every tensor object is referenced by its ring only, and their storage by these tensors only: a
//! caller may keep a view. Until then the caller's data stays as it is, and others are made.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

/// Maximum number of cached sets. A program that follows DeepEP's rule holds two results at a time; one that holds more
/// gets uncached sets beyond this number.
const MOST_SETS: usize = 4;

/// A storage's `_cdata`, a base and tensors.
type Made = (usize, Option<Py<PyAny>>, Vec<Option<Py<PyAny>>>);

/// Shape and options that `torch.empty` is called with.
pub(super) type Fresh = (Py<PyTuple>, Py<PyDict>);

/// Tensors of one result in one storage.
pub(super) struct Set {
    /// Tensor that the others are views of; reused to make a set with another number of rows.
    base: Option<Py<PyAny>>,
    /// None where the result has no such part.
    pub(super) tensors: Vec<Option<Py<PyAny>>>,
    /// Their addresses, 0 for None.
    pub(super) addresses: Vec<u64>,
    /// Rows that they were made for.
    pub(super) rows: u32,
    /// Reference counts of each tensor, and of the storage, when the set is idle.
    idle: Vec<isize>,
    idle_storage: usize,
    /// The storage as PyTorch's `_cdata`.
    storage: usize,
    /// A call has claimed it and is about to return it.
    claimed: AtomicBool,
}

/// Exclusive claim on a set; dropped once the result holds references to its tensors.
pub(super) struct Claim {
    pub(super) set: Arc<Set>,
    /// The ring has its memory, which therefore outlasts the result.
    is_kept: bool,
}

impl Claim {
    /// New tensors that are never reused. `empty`: `torch.empty`.
    pub(super) fn fresh(py: Python<'_>, empty: &Py<PyAny>, parts: &[Option<Fresh>]) -> PyResult<Claim> {
        let make = |(shape, options): &Fresh| empty.call(py, (shape,), Some(options.bind(py)));
        let tensors = parts.iter().map(|part| part.as_ref().map(make).transpose()).collect::<PyResult<_>>()?;
        Ok(Claim { set: Set::of(py, None, tensors, 0, (0, 0))?, is_kept: false })
    }

    /// Tensors whose memory returns to PyTorch's allocator when the caller drops them.
    pub(super) fn unowned(&self) -> impl Iterator<Item = &Py<PyAny>> {
        self.set.tensors.iter().flatten().filter(|_| !self.is_kept)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.set.claimed.store(false, Ordering::Release);
    }
}

/// Sets of one kind, handed out in turn.
#[derive(Default)]
pub(super) struct Ring(Mutex<Vec<Arc<Set>>>);

impl Ring {
    fn locked(&self) -> MutexGuard<'_, Vec<Arc<Set>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn nth(&self, at: usize) -> Option<Arc<Set>> {
        self.locked().get(at).cloned()
    }

    /// Claims an idle set, or makes one. `make` is called with the base of an idle set of another number of rows, or
    /// None, and the number of sets in use; `uses` returns the reference count of a storage, and without it nothing is
    /// reused. `fresh`: make a new set and do not cache it.
    pub(super) fn take(
        &self,
        py: Python<'_>,
        rows: u32,
        (make, uses): (&Py<PyAny>, Option<&Py<PyAny>>),
        fresh: bool,
    ) -> PyResult<Claim> {
        let Some(uses) = uses.filter(|_| !fresh) else {
            return Ok(Claim { set: Set::make(py, make, None, rows, 0, None)?, is_kept: false });
        };
        let mut known = 0;
        // The lock is not held while Python code runs, which may let other threads in.
        while let Some(set) = self.nth(known) {
            let (at, set) = (known, &set);
            known += 1;
            if set.claimed.swap(true, Ordering::Acquire) {
                continue;
            }
            let claim = Claim { set: set.clone(), is_kept: true };
            if !set.is_idle(py, uses)? {
                continue;
            }
            if set.rows == rows {
                self.move_to_back(at, set);
                return Ok(claim);
            }
            let other = Set::make(py, make, Some(set), rows, 0, Some(uses))?;
            let mut sets = self.locked();
            let slot = sets.iter_mut().find(|one| Arc::ptr_eq(one, set));
            let claim = Claim { set: other.clone(), is_kept: slot.is_some() };
            if let Some(slot) = slot {
                *slot = other;
            }
            return Ok(claim);
        }
        let made = Set::make(py, make, None, rows, known, Some(uses))?;
        let mut sets = self.locked();
        let has_room = sets.len() < MOST_SETS;
        if has_room {
            sets.push(made.clone());
        }
        Ok(Claim { set: made, is_kept: has_room })
    }

    /// Moves the set to the end, so that the least recently used one is tried first.
    fn move_to_back(&self, at: usize, set: &Arc<Set>) {
        let mut sets = self.locked();
        if sets.get(at).is_some_and(|one| Arc::ptr_eq(one, set)) {
            sets[at..].rotate_left(1);
        }
    }
}

impl Set {
    /// Calls `make(base, rows, in_use)`. The set is claimed.
    fn make(
        py: Python<'_>,
        make: &Py<PyAny>,
        idle: Option<&Set>,
        rows: u32,
        in_use: usize,
        uses: Option<&Py<PyAny>>,
    ) -> PyResult<Arc<Set>> {
        let base = idle.and_then(|set| set.base.as_ref());
        let (storage, base, tensors): Made = make.call1(py, (base, rows, in_use))?.extract(py)?;
        // Temporaries of `make` are dropped by now, so this is the idle reference count, less the replaced set's
        // tensors.
        let replaced = idle.map_or(0, |set| set.tensors.len());
        let idle_storage = match uses {
            Some(uses) => uses.call1(py, (storage,))?.extract::<usize>(py)?.saturating_sub(replaced),
            None => 0,
        };
        Set::of(py, base, tensors, rows, (storage, idle_storage))
    }

    /// Tensors that nobody else holds, and their storage with the references that it has then. The set is claimed.
    fn of(
        py: Python<'_>,
        base: Option<Py<PyAny>>,
        tensors: Vec<Option<Py<PyAny>>>,
        rows: u32,
        (storage, idle_storage): (usize, usize),
    ) -> PyResult<Arc<Set>> {
        let address = |tensor: &Option<Py<PyAny>>| match tensor {
            Some(tensor) => tensor.bind(py).call_method0(intern!(py, "data_ptr"))?.extract(),
            None => Ok(0),
        };
        let addresses = tensors.iter().map(address).collect::<PyResult<_>>()?;
        let idle = tensors.iter().map(|tensor| tensor.as_ref().map_or(0, |tensor| tensor.get_refcnt(py))).collect();
        let claimed = AtomicBool::new(true);
        Ok(Arc::new(Set { base, tensors, addresses, rows, idle, idle_storage, storage, claimed }))
    }

    fn is_idle(&self, py: Python<'_>, uses: &Py<PyAny>) -> PyResult<bool> {
        let mut held = self.tensors.iter().zip(&self.idle);
        if held.any(|(tensor, idle)| tensor.as_ref().is_some_and(|tensor| tensor.get_refcnt(py) != *idle)) {
            return Ok(false);
        }
        Ok(uses.call1(py, (self.storage,))?.extract::<usize>(py)? == self.idle_storage)
    }

    /// A part that every result has.
    pub(super) fn part<'py>(&self, py: Python<'py>, at: usize) -> Bound<'py, PyAny> {
        self.tensors[at].as_ref().map_or_else(|| py.None().into_bound(py), |tensor| tensor.bind(py).clone())
    }
}
