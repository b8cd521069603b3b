//! Python bindings: argument conversion, the GIL, and exceptions. All real work is in the engine.
//!
//! Rules that hold throughout:
//! - calls that may block or copy much data release the GIL, and a signal with a Python handler interrupts every wait
//!   of the main thread at once ([`runtime`]);
//! - no thread that holds an engine lock waits for the GIL: [`borrow`] defers the release of buffers, and callbacks run
//!   without engine locks;
//! - at interpreter exit every worker is closed first, and threads blocked in native code do not return
//!   ([`runtime::gate`]).
//!
//! Folders use only those that stand above them: [`runtime`], [`borrow`], [`objects`], [`experts`], [`bench`].

mod bench;
mod borrow;
mod experts;
mod objects;
mod runtime;

use pyo3::prelude::*;

/// The native half of Crossrail, re-exported by `crossrail`.
///
/// Sizes and offsets are in bytes. Timeouts are in seconds (`None`: the context's CROSSRAIL_TIMEOUT); reported times
/// are in microseconds (`_us`). Every object may be used from any thread at any time. Calls that wait or move
/// much data let other Python threads run, and Ctrl-C ends every wait. Every error is a `crossrail.CrossrailError`.
// The GIL orders what `borrow` and `runtime::gate` do: an interpreter without it turns it on for this module. `pip`
// refuses to build for one (packaging/crossrail_build.py).
#[pymodule(gil_used = true)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    crossrail_locks::watch_forks();
    runtime::gate::share_with_workers();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("ALL_BITS", u64::MAX)?;
    objects::add_to(module)?;
    experts::add_to(module)?;
    bench::add_to(module)?;
    runtime::lifecycle::at_exit(module)
}
