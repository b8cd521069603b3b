//! Metadata of GPU arrays of frameworks other than PyTorch, read through DLPack or `__cuda_array_interface__`.

use std::borrow::Cow;

use crossrail_ep_cuda::arrays::{Array, Item, unfit};
use pyo3::exceptions::{PyKeyError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::device_array::DeviceArray;
use crate::borrow::number::Flag;
use crate::objects::{operand, span};
use crate::runtime::errors::{self, OrRaise};

/// Values of DLPack's stream argument.
const NO_ORDER: i64 = -1;
const DEFAULT_STREAM: i64 = 1;

/// An array on GPU `ordinal`, for an operation in a stream that the caller has `ordered`, or in the default one. What is
/// kept beside `value` goes to `keep`.
pub(super) fn array<'a, 'py>(
    value: &'a Bound<'py, PyAny>,
    (name, writable): ((&'static str, &'static str), bool),
    (ordinal, ordered): (u32, bool),
    keep: &mut Vec<Bound<'py, PyAny>>,
) -> PyResult<Array<'a>> {
    let py = value.py();
    let is_here = |there: u32| {
        let error = || unfit(name, &format!("is on cuda:{there}, but the buffer is on cuda:{ordinal}"));
        if there == ordinal { Ok(()) } else { Err(error()).or_raise(py) }
    };
    let array = |address, dtype, shape| Array { name, address, dtype, shape, strides: None };
    if let Ok(ours) = value.cast::<DeviceArray>().map(Bound::get) {
        return is_here(ours.ordinal).map(|()| array(ours.address, Ok(ours.items), Cow::Borrowed(&ours.shape[..])));
    }
    if value.hasattr(intern!(py, "__dlpack__"))? {
        let before = if ordered { NO_ORDER } else { DEFAULT_STREAM };
        let (lent, there) = span::lent_on_gpu(value, name.0, writable, before)?;
        keep.push(span::keeper(py, lent.keep)?);
        return is_here(there).map(|()| array(lent.ptr, Item::named(lent.dtype.name()), Cow::Owned(lent.shape)));
    }
    let interface = value.getattr_opt(intern!(py, "__cuda_array_interface__"))?;
    let Some(Ok(interface)) = interface.map(Bound::cast_into::<PyDict>) else {
        let error = unfit(name, &format!("is {}, not an array in GPU memory", operand::one(value)));
        return Err(error.with_hint("pass tensors on the GPU, or a crossrail.DeviceArray")).or_raise(py);
    };
    let (array, read_only) = described(&interface, name).map_err(|error| {
        let error = error.value(py).repr().map_or_else(|_| "its values".to_owned(), |text| text.to_string());
        errors::raise(py, &unfit(name, &format!("has an invalid __cuda_array_interface__: {error}")))
    })?;
    if read_only && writable { Err(unfit(name, "is read-only")).or_raise(py) } else { Ok(array) }
}

/// The array that `__cuda_array_interface__` describes, and whether it is read-only.
fn described<'a>(interface: &Bound<'_, PyDict>, name: (&'static str, &'static str)) -> PyResult<(Array<'a>, bool)> {
    let wanted = |key: &'static str| interface.get_item(key)?.ok_or_else(|| PyKeyError::new_err(key));
    let shape: Vec<i64> = wanted("shape")?.extract()?;
    let (address, Flag(read_only)): (Option<u64>, Flag) = wanted("data")?.extract()?;
    let dtype = match &*wanted("typestr")?.str()?.to_cow()? {
        "<i4" => Ok(Item::I32),
        "<i8" => Ok(Item::I64),
        "<f4" => Ok(Item::F32),
        "|u1" => Ok(Item::U8),
        "<u2" => Ok(Item::U16),
        other => Err(other.to_owned()),
    };
    let item = dtype.as_ref().map_or(1, |item| item.bytes() as i64);
    let strides: Option<Vec<i64>> = interface.get_item("strides")?.map_or(Ok(None), |strides| strides.extract())?;
    let fits = strides.as_ref().is_none_or(|strides| strides.len() == shape.len());
    if !fits || shape.iter().any(|&extent| extent < 0) {
        return Err(PyValueError::new_err("shape and strides"));
    }
    let strides = strides.map(|strides| strides.iter().map(|stride| stride.div_euclid(item)).collect());
    let (address, shape) = (address.unwrap_or(0), Cow::Owned(shape));
    Ok((Array { name, address, dtype, shape, strides }, read_only))
}
