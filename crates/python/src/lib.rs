//! Python bindings: conversion, the GIL and exceptions. What is done is done in the engine.
//!
//! Rules that hold throughout:
//! - whatever may wait or move much data runs detached (other Python threads run), and a signal that Python has a
//!   handler for ends every wait of the main thread at once ([`runtime`]);
//! - no thread that holds an engine lock ever waits for the GIL: buffers are handed back by [`borrow`], callbacks
//!   run without engine locks;
//! - when the interpreter ends, every worker is closed first, and threads that wait in here do not return ([`runtime::gate`]).
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
/// Sizes and offsets are bytes. Times that go in are seconds (`None`: the context's CROSSRAIL_TIMEOUT), times that
/// come out are microseconds (`_us`). Every object may be used from any thread at any time. Calls that wait or move
/// much data let other Python threads run, and Ctrl-C ends every wait. Every error is a `crossrail.CrossrailError`.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    crossrail_locks::watch_forks();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("ALL_BITS", u64::MAX)?;
    objects::add_to(module)?;
    experts::add_to(module)?;
    bench::add_to(module)?;
    runtime::lifecycle::at_exit(module)
}
