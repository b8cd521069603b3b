//! The Python worker object, which endpoints, requests and mappings hold. Its methods are in `worker_methods`, which
//! creates those objects: a single file would make the imports circular.

use pyo3::prelude::*;

use super::context::Context;
use crate::runtime::lifecycle::{self, Detached};

/// A listening address, the endpoints of its peers, and their progress.
///
/// As a context manager, the worker is closed at the end of the block.
///
/// Parameters
/// ----------
/// context : Context
/// listen : str or list of str, optional
///     Addresses ``host:port`` to listen at; by default loopback with a free port. Beyond
///     loopback a secret is required (CROSSRAIL_SECRET).
/// name : str, optional
///     Name of the worker, as its peers see it.
/// unix : bool
///     Whether to listen on a Unix socket, without which there is no shared memory.
/// background : bool
///     Whether to start a thread that makes progress. Without it only calls that wait,
///     `test` and `progress` make progress, and nothing can be awaited in asyncio.
/// admit : bool
///     Whether peers that connect are kept without `accept`; `peer` and `endpoints` return them.
///
/// Raises
/// ------
/// ConfigError
///     An address is beyond loopback and there is no secret.
/// UsageError
///     An address is invalid, or a port is in use.
/// IoError, ExhaustedError
///     The system refuses descriptors or threads.
///
/// Notes
/// -----
/// Thread safety: any thread may use the worker. A thread that waits makes progress for all
/// operations; while no thread waits, the background thread does. A forked child cannot use
/// the worker; see Context.
#[pyclass(module = "crossrail._native", frozen, weakref)]
pub(crate) struct Worker {
    native: Detached<crossrail::Worker>,
    context: Py<Context>,
    remembered: u64,
}

impl Worker {
    pub(super) fn new(native: crossrail::Worker, context: Py<Context>) -> Worker {
        Worker { remembered: lifecycle::remember(&native), native: Detached::new(native), context }
    }

    pub(crate) fn native(&self) -> &crossrail::Worker {
        &self.native
    }

    pub(super) fn py_context(&self) -> &Py<Context> {
        &self.context
    }

    pub(super) fn context(&self) -> &crossrail::Context {
        self.context.get().native()
    }

    pub(super) fn native_timeout(&self) -> std::time::Duration {
        self.context().settings().timeout
    }

    /// Unregisters the worker from cleanup at interpreter exit, after it was closed.
    pub(super) fn forget(&self) {
        lifecycle::forget(self.remembered);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.forget();
    }
}
