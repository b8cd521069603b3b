//! References into Python that operations hold, and their release.
//!
//! The engine drops a loan where the operation ends: on a progress thread, with its lock held. Waiting for the GIL there
//! would deadlock, and running a destructor could. So finished loans are queued. The next call from Python releases
//! them; without one, a thread of this module does. (`Py_AddPendingCall` would need no thread, but before CPython 3.12
//! it reads the state of whichever thread holds the GIL, which that thread may free meanwhile.)
#![allow(unsafe_code)]

use std::any::Any;
use std::cell::Cell;
use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use crossrail_locks::{Condvar, Mutex, PerProcess, signals_blocked};
use pyo3::ffi;
use pyo3::prelude::*;

use super::dlpack;
use crate::runtime::gate::{CallbackPass, Pass};

/// Delay before the thread releases finished loans: a call from Python releases them without a switch of threads.
const QUIET: Duration = Duration::from_millis(10);

/// `Py_buffer` of every CPython since 3.3; PyO3 declares it only from the 3.11 stable ABI on, where it is the same.
#[repr(C)]
pub(crate) struct View {
    pub(super) buf: *mut c_void,
    obj: *mut ffi::PyObject,
    pub(super) len: ffi::Py_ssize_t,
    pub(super) itemsize: ffi::Py_ssize_t,
    pub(super) readonly: c_int,
    pub(super) ndim: c_int,
    pub(super) format: *mut c_char,
    pub(super) shape: *mut ffi::Py_ssize_t,
    strides: *mut ffi::Py_ssize_t,
    suboffsets: *mut ffi::Py_ssize_t,
    internal: *mut c_void,
}

unsafe extern "C" {
    fn PyBuffer_Release(view: *mut View);
}

impl View {
    pub(super) const EMPTY: View = View {
        buf: ptr::null_mut(),
        obj: ptr::null_mut(),
        len: 0,
        itemsize: 0,
        readonly: 0,
        ndim: 0,
        format: ptr::null_mut(),
        shape: ptr::null_mut(),
        strides: ptr::null_mut(),
        suboffsets: ptr::null_mut(),
        internal: ptr::null_mut(),
    };

    /// Resets `obj`, as the buffer protocol requires of an exporter that refuses.
    pub(crate) fn forget(&mut self) {
        self.obj = ptr::null_mut();
    }

    /// Gives the memory back to its exporter.
    ///
    /// # Safety
    /// `PyObject_GetBuffer` filled it, and the GIL is held.
    pub(super) unsafe fn release(mut self) {
        // SAFETY: the caller's promise; once, since `self` is consumed.
        unsafe { PyBuffer_Release(&raw mut self) }
    }
}

/// Keeps a NumPy array from being resized in place.
pub(crate) struct Pinned(#[expect(dead_code, reason = "held")] pub(super) Py<PyAny>);

/// A reference into Python that must be released with the GIL held.
pub(crate) enum Loan {
    View(View, Option<Pinned>),
    Tensor(dlpack::Tensor),
    Object(Py<PyAny>),
}

// SAFETY: a loan is only touched by `give_back`, with the GIL held.
unsafe impl Send for Loan {}

impl Loan {
    /// With the GIL held; may run destructors of Python objects.
    fn give_back(self) {
        match self {
            Loan::View(view, pinned) => {
                drop(pinned);
                // SAFETY: a loan holds a view that was filled, and the caller holds the GIL.
                unsafe { view.release() }
            }
            Loan::Tensor(tensor) => tensor.release(),
            Loan::Object(object) => drop(object),
        }
    }
}

/// Queues its loan for release when the engine drops it.
struct Keeper(Option<Loan>);

// SAFETY: nothing is reachable through a shared reference.
unsafe impl Sync for Keeper {}

impl Drop for Keeper {
    fn drop(&mut self) {
        if let Some(loan) = self.0.take() {
            QUEUE.here().add(loan);
        }
    }
}

/// A keeper that queues `loan` for release when its last reference is dropped.
pub(crate) fn keep(loan: Loan) -> Arc<dyn Any + Send + Sync> {
    Arc::new(Keeper(Some(loan)))
}

/// Loans whose operations have ended.
#[derive(Default)]
struct Queue {
    finished: Mutex<Vec<Loan>>,
    /// False only if `finished` is empty; read without the lock.
    waiting: AtomicBool,
    /// Notified when `waiting` becomes true outside of calls from Python.
    arrived: Condvar,
    /// Number of drains so far.
    drained: AtomicU64,
    thread: OnceLock<()>,
}

/// A forked child never releases loans made before the fork: operations of its parent use them.
static QUEUE: PerProcess<Queue> = PerProcess::new();

thread_local! {
    /// Nesting depth of calls from Python on this thread; the outermost drains the queue when it returns.
    static CALLS: Cell<u32> = const { Cell::new(0) };
}

impl Queue {
    /// Any thread, with or without the GIL and locks of the engine.
    fn add(&'static self, loan: Loan) {
        self.finished.lock().push(loan);
        let first = !self.waiting.swap(true, Ordering::AcqRel);
        if first && CALLS.get() == 0 {
            // If no thread can be started, the next call from Python releases the loans.
            self.thread.get_or_init(|| {
                let builder = thread::Builder::new().name("crossrail-release".to_owned());
                let _ = signals_blocked(|| builder.spawn(|| self.serve()));
            });
            self.arrived.notify_one();
        }
    }

    /// Releases every queued loan. Requires the GIL; holds no lock, because destructors may run.
    #[cold]
    fn drain(&self) {
        self.drained.fetch_add(1, Ordering::Relaxed);
        self.waiting.store(false, Ordering::Release);
        let finished = std::mem::take(&mut *self.finished.lock());
        finished.into_iter().for_each(Loan::give_back);
    }

    /// Drains the queue whenever calls from Python have not done so for [`QUIET`]; until the interpreter ends.
    fn serve(&self) {
        loop {
            let mut finished = self.finished.lock();
            while finished.is_empty() {
                self.arrived.wait(&mut finished);
            }
            drop(finished);
            let before = self.drained.load(Ordering::Relaxed);
            thread::sleep(QUIET);
            if self.drained.load(Ordering::Relaxed) != before {
                continue;
            }
            let Some(_pass) = CallbackPass::offered() else { return };
            if Python::try_attach(|_| self.drain()).is_none() {
                return;
            }
        }
    }
}

/// Guard for a call from Python: when the outermost one is dropped, finished loans are released.
pub(crate) struct Call<'py> {
    _attached: Python<'py>,
    /// Dropped last: destructors run Python code.
    _pass: Pass,
}

impl<'py> Call<'py> {
    #[inline]
    pub(crate) fn enter(py: Python<'py>) -> Call<'py> {
        let pass = Pass::enter(py);
        CALLS.set(CALLS.get() + 1);
        Call { _attached: py, _pass: pass }
    }
}

impl Drop for Call<'_> {
    #[inline]
    fn drop(&mut self) {
        let depth = CALLS.get() - 1;
        CALLS.set(depth);
        if depth == 0 && QUEUE.waiting.load(Ordering::Acquire) {
            QUEUE.here().drain();
        }
    }
}
