//! The interpreter's end, and what is dropped with the GIL held.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::ffi;
use pyo3::prelude::*;

/// Something of the engine whose end may wait (threads are joined, peers told): it is dropped detached.
pub(crate) struct Detached<T: Send>(ManuallyDrop<T>);

impl<T: Send> Detached<T> {
    pub(crate) fn new(inner: T) -> Detached<T> {
        Detached(ManuallyDrop::new(inner))
    }
}

impl<T: Send> Deref for Detached<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Send> Drop for Detached<T> {
    fn drop(&mut self) {
        // SAFETY: taken once, here, where nobody can use it any more.
        let inner = unsafe { ManuallyDrop::take(&mut self.0) };
        let mut inner = Some(inner);
        let attached = Python::try_attach(|py| {
            let inner = inner.take();
            py.detach(move || drop(inner));
        });
        if attached.is_none() {
            drop(inner);
        }
    }
}

static ENDING: AtomicBool = AtomicBool::new(false);
static NEXT: AtomicU64 = AtomicU64::new(0);
static WORKERS: Mutex<Option<HashMap<u64, crossrail::Worker>>> = Mutex::new(None);

fn workers() -> MutexGuard<'static, Option<HashMap<u64, crossrail::Worker>>> {
    WORKERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Remembers a worker until [`forget`]: it is closed before the interpreter ends, so that no thread of it asks for
/// the GIL afterwards.
pub(crate) fn remember(worker: &crossrail::Worker) -> u64 {
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    workers().get_or_insert_default().insert(id, worker.clone());
    id
}

/// Drops the worker detached, if this was its last handle.
pub(crate) fn forget(id: u64) {
    let worker = workers().as_mut().and_then(|workers| workers.remove(&id));
    if let Some(worker) = worker {
        drop(Detached::new(worker));
    }
}

/// Whether Python may still be called.
pub(crate) fn running() -> bool {
    !ENDING.load(Ordering::Acquire)
}

/// Runs `call` on the interpreter's main thread, soon. Any thread, with or without the GIL.
pub(crate) fn ask_main_thread(call: extern "C" fn(*mut c_void) -> c_int) {
    // SAFETY: both may be called from any thread; before ENDING is set the interpreter is whole. A full queue is
    // no loss: the next call from Python does the same work.
    unsafe {
        if running() && ffi::Py_IsInitialized() != 0 {
            ffi::Py_AddPendingCall(Some(call), ptr::null_mut());
        }
    }
}

#[pyfunction]
fn _close_workers(py: Python<'_>) {
    let left: Vec<_> = workers().take().into_iter().flatten().map(|(_, worker)| worker).collect();
    py.detach(|| {
        for worker in &left {
            worker.close();
        }
        drop(left);
    });
    ENDING.store(true, Ordering::Release);
}

/// Closes every worker when the interpreter ends.
pub(crate) fn at_exit(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let close = wrap_pyfunction!(_close_workers, module)?;
    module.py().import("atexit")?.call_method1("register", (close,))?;
    Ok(())
}
