//! Cleanup at interpreter exit, and drops that must not hold the GIL.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};

use crossrail_locks::{Mutex, PerProcess};
use crossrail_types::Origin;
use pyo3::prelude::*;

use super::errors::OrRaise;
use super::gate::{self, Pass};

/// An engine object whose drop may block (it joins threads and notifies peers): dropped with the GIL released. Never
/// dropped in a forked child, since its threads, connections and shared memory belong to the parent.
pub(crate) struct Detached<T: Send> {
    inner: ManuallyDrop<T>,
    origin: Origin,
}

impl<T: Send> Detached<T> {
    pub(crate) fn new(inner: T) -> Detached<T> {
        Detached { inner: ManuallyDrop::new(inner), origin: Origin::here() }
    }

    /// Whether this is the process that made it.
    pub(crate) fn is_here(&self) -> bool {
        self.origin.is_here()
    }

    /// The object, in the process that made it. Raises UsageError in a forked child.
    pub(crate) fn here(&self, py: Python<'_>, operation: &str) -> PyResult<&T> {
        self.origin.check(operation).or_raise(py)?;
        Ok(&self.inner)
    }
}

impl<T: Send> Deref for Detached<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: Send> DerefMut for Detached<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

impl<T: Send> Drop for Detached<T> {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            return;
        }
        // SAFETY: taken once, on drop, after the last use.
        let inner = unsafe { ManuallyDrop::take(&mut self.inner) };
        let mut inner = Some(inner);
        let attached = Python::try_attach(|py| {
            let inner = inner.take();
            gate::detached(py, move || drop(inner));
        });
        if attached.is_none() {
            drop(inner);
        }
    }
}

/// An engine object whose drop takes the worker's lock, for a moment: the GIL is released only if that is held for longer.
pub(crate) struct Held<T>(ManuallyDrop<T>);

impl<T> Held<T> {
    #[inline]
    pub(crate) fn new(inner: T) -> Held<T> {
        Held(ManuallyDrop::new(inner))
    }
}

impl<T> Deref for Held<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> Drop for Held<T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: taken once, on drop, after the last use.
        let inner = unsafe { ManuallyDrop::take(&mut self.0) };
        let mut inner = Some(inner);
        Python::try_attach(|py| {
            let _pass = Pass::enter(py);
            drop(inner.take());
        });
    }
}

static NEXT: AtomicU64 = AtomicU64::new(0);
static WORKERS: PerProcess<Open<crossrail::Worker>> = PerProcess::new();
static BUFFERS: PerProcess<Open<crossrail_ep_host::ExpertBuffer>> = PerProcess::new();
static DEVICE_BUFFERS: PerProcess<Open<crossrail_ep_cuda::DeviceBuffer>> = PerProcess::new();

/// What this process has opened and not closed, by number.
struct Open<T: Send>(Mutex<HashMap<u64, Detached<T>>>);

impl<T: Send> Default for Open<T> {
    fn default() -> Open<T> {
        Open(Mutex::default())
    }
}

impl<T: Send> Open<T> {
    fn remember(&self, one: T) -> u64 {
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        self.0.lock().insert(id, Detached::new(one));
        id
    }

    /// Drops it detached, if this was its last handle.
    fn forget(&self, id: u64) {
        let one = self.0.lock().remove(&id);
        drop(one);
    }

    fn take(&self) -> Vec<Detached<T>> {
        std::mem::take(&mut *self.0.lock()).into_values().collect()
    }
}

/// Remembers a worker until [`forget`]: it is closed before the interpreter ends, so that no thread of it asks for
/// the GIL afterwards.
pub(crate) fn remember(worker: &crossrail::Worker) -> u64 {
    WORKERS.remember(worker.clone())
}

/// Drops the worker detached, if this was its last handle.
pub(crate) fn forget(id: u64) {
    WORKERS.forget(id);
}

/// Registers a buffer until [`forget_buffer`]: it is destroyed at interpreter exit, so that other ranks are notified at
/// once.
pub(crate) fn remember_buffer(buffer: &crossrail_ep_host::ExpertBuffer) -> u64 {
    BUFFERS.remember(buffer.clone())
}

/// Destroys a buffer that nobody can use any more.
pub(crate) fn forget_buffer(id: u64) {
    BUFFERS.forget(id);
}

/// As [`remember_buffer`], in GPU memory.
pub(crate) fn remember_device_buffer(buffer: &crossrail_ep_cuda::DeviceBuffer) -> u64 {
    DEVICE_BUFFERS.remember(buffer.clone())
}

/// As [`forget_buffer`], in GPU memory.
pub(crate) fn forget_device_buffer(id: u64) {
    DEVICE_BUFFERS.forget(id);
}

#[pyfunction]
fn _close_workers(py: Python<'_>) {
    gate::begin_to_close();
    let (buffers, on_gpus, left) = (BUFFERS.take(), DEVICE_BUFFERS.take(), WORKERS.take());
    gate::detached(py, || {
        // Errors are expected here: the other ranks may have exited.
        for buffer in buffers {
            let _ = buffer.destroy();
        }
        for buffer in on_gpus {
            let _ = buffer.destroy();
        }
        crossrail::close_all(left.iter().map(|worker| &**worker));
        drop(left);
    });
    gate::close(py);
}

/// Closes every worker when the interpreter ends.
pub(crate) fn at_exit(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let close = wrap_pyfunction!(_close_workers, module)?;
    module.py().import("atexit")?.call_method1("register", (close,))?;
    Ok(())
}
