//! libfabric on this machine, for `crossrail info` and `crossrail doctor --fabric`.
#![allow(unsafe_code)]

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use super::context::Context;
use crate::borrow::loan::Call;
use crate::runtime::dicts::set_fields;
use crate::runtime::errors::OrRaise;
use crate::runtime::gate;

/// libfabric's version, files and devices, with all limits; or why there is none. Loads the library.
#[pyfunction]
#[pyo3(signature = (context, provider = None))]
pub(super) fn fabric_state<'py>(
    py: Python<'py>,
    context: &Context,
    provider: Option<&str>,
) -> PyResult<Bound<'py, PyDict>> {
    let _call = Call::enter(py);
    let state = gate::detached(py, || crossrail::fabric_state(context.native(), provider));
    let all = PyDict::new(py);
    set_fields!(all, state; version, reason, fix, files, refused);
    let devices = PyList::empty(py);
    for device in state.devices {
        let row = PyDict::new(py);
        row.set_item("modes", device.attributes.modes())?;
        set_fields!(row, device; provider, name, gpu);
        set_fields!(
            row, device.attributes; mr_key_size, cq_data_size, tx_size, inject_size, iov_limit, rma_iov_limit,
            max_msg_size, rx_cq_data, nic, pci, speed, up
        );
        devices.append(row)?;
    }
    all.set_item("devices", devices)?;
    Ok(all)
}

/// Runs a test of a device. A provider may end the process: call it in one of its own.
#[pyfunction]
pub(super) fn fabric_test<'py>(
    py: Python<'py>,
    context: &Context,
    provider: &str,
    device: &str,
    test: &str,
) -> PyResult<Bound<'py, PyDict>> {
    let _call = Call::enter(py);
    facts(py, gate::detached(py, || crossrail::fabric_test(context.native(), provider, device, test)).or_raise(py)?)
}

/// Writes `pattern` over a device into memory that the caller keeps, and returns once it has arrived. A provider may end
/// the process: call it in one of its own.
#[pyfunction]
#[pyo3(signature = (context, provider, device, memory, pattern, gpu = None))]
pub(super) fn fabric_write_into<'py>(
    py: Python<'py>,
    context: &Context,
    provider: &str,
    device: &str,
    memory: (u64, usize),
    pattern: u8,
    gpu: Option<u32>,
) -> PyResult<Bound<'py, PyDict>> {
    let _call = Call::enter(py);
    // SAFETY: the caller keeps the memory; the function is private to the tools.
    let done = gate::detached(py, || unsafe {
        crossrail::fabric_write_into(context.native(), (provider, device), memory, gpu, pattern)
    });
    facts(py, done.or_raise(py)?)
}

fn facts(py: Python<'_>, facts: crossrail::FabricFacts) -> PyResult<Bound<'_, PyDict>> {
    let all = PyDict::new(py);
    for (name, value) in facts {
        all.set_item(name, value)?;
    }
    Ok(all)
}
