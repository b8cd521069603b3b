//! Where memory is, as callers name it.

use crossrail::Place;
use pyo3::prelude::*;
use pyo3::types::PyBool;

use crate::runtime::errors::{self, OrRaise};

/// What `device` names: `cpu`, `cuda`, `cuda:1`, or a GPU's number. Others' objects (`torch.device`) count by their text.
pub(crate) fn parse(device: Option<&Bound<'_, PyAny>>) -> PyResult<Place> {
    let Some(device) = device.filter(|device| !device.is_none()) else { return Ok(Place::Host) };
    let py = device.py();
    if !device.is_instance_of::<PyBool>()
        && let Ok(number) = device.extract::<i64>()
    {
        let refused =
            |_| errors::usage(py, "device", format!("{number} is no device"), "cpu, cuda, cuda:1 or a number");
        return u32::try_from(number).map(Place::Gpu).map_err(refused);
    }
    device.str()?.to_string().parse().or_raise(py)
}
