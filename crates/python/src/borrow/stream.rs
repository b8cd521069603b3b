//! CUDA streams as callers name them.

use pyo3::intern;
use pyo3::prelude::*;

use crate::runtime::errors;

/// A caller's stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream {
    /// The raw handle; 0 and 1 are the legacy default stream, 2 is the calling thread's.
    pub(crate) handle: u64,
    /// The GPU that it belongs to, where the object says so.
    pub(crate) ordinal: Option<u32>,
}

/// A raw handle, or an object with `cuda_stream` (PyTorch) or `__cuda_stream__` (CuPy, cuda.core).
pub(crate) fn parse(stream: Option<&Bound<'_, PyAny>>, operation: &str) -> PyResult<Option<Stream>> {
    let Some(stream) = stream.filter(|stream| !stream.is_none()) else { return Ok(None) };
    let py = stream.py();
    let refused = || {
        let text = stream.repr().map_or_else(|_| "this".to_owned(), |text| text.to_string());
        let hint = "pass a raw handle, or an object with cuda_stream or __cuda_stream__";
        errors::usage(py, operation, format!("{text} is not a CUDA stream"), hint)
    };
    let handle = if let Some(handle) = stream.getattr_opt(intern!(py, "cuda_stream"))? {
        handle.extract().map_err(|_| refused())?
    } else if let Some(protocol) = stream.getattr_opt(intern!(py, "__cuda_stream__"))? {
        // A method by the protocol; a plain attribute in its first users.
        let answer = if protocol.is_callable() { protocol.call0()? } else { protocol };
        let (_version, handle): (i64, u64) = answer.extract().map_err(|_| refused())?;
        handle
    } else {
        stream.extract::<u64>().map_err(|_| refused())?
    };
    Ok(Some(Stream { handle, ordinal: ordinal(stream)? }))
}

/// `torch.cuda.Stream.device.index` or `cupy.cuda.Stream.device_id`.
fn ordinal(stream: &Bound<'_, PyAny>) -> PyResult<Option<u32>> {
    let py = stream.py();
    let at = match stream.getattr_opt(intern!(py, "device"))? {
        Some(device) => device.getattr_opt(intern!(py, "index"))?,
        None => stream.getattr_opt(intern!(py, "device_id"))?,
    };
    Ok(at.and_then(|at| at.extract().ok()))
}
