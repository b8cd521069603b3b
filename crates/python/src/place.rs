//! Where memory is, as callers name it: `cpu`, `cuda:1`.

use pyo3::prelude::*;
use pyo3::types::PyBool;

use crate::errors;

/// The GPU that `device` names, by ordinal; `None` is the host. Objects of others (`torch.device`) count by their text.
pub(crate) fn parse(device: Option<&Bound<'_, PyAny>>, operation: &str) -> PyResult<Option<u32>> {
    let Some(device) = device.filter(|device| !device.is_none()) else { return Ok(None) };
    let refused = |text: &str| {
        errors::usage(device.py(), operation, format!("{text} is no device"), "cpu, cuda, cuda:1, or a GPU's number")
    };
    if !device.is_instance_of::<PyBool>()
        && let Ok(number) = device.extract::<i64>()
    {
        return u32::try_from(number).map(Some).map_err(|_| refused(&number.to_string()));
    }
    let text = device.str()?.to_string();
    match text.as_str() {
        "cpu" => Ok(None),
        "cuda" => Ok(Some(0)),
        text => {
            let digits = text.strip_prefix("cuda:").filter(|rest| rest.bytes().all(|byte| byte.is_ascii_digit()));
            digits.and_then(|digits| digits.parse().ok()).map(Some).ok_or_else(|| refused(&format!("{text:?}")))
        }
    }
}

/// As [`parse`] reads it.
pub(crate) fn text(gpu: Option<u32>) -> String {
    gpu.map_or_else(|| "cpu".to_owned(), |ordinal| format!("cuda:{ordinal}"))
}
