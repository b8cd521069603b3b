//! Arrays described by `__cuda_array_interface__`, versions 0 to 3.

use pyo3::exceptions::PyAttributeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyAny, PyDict, PyString, PyTuple};

use super::layout::{Axes, Piece, Refusal, malformed};
use crate::runtime::errors;

/// A parsed `__cuda_array_interface__`.
pub(crate) struct Described {
    pub(crate) piece: Piece,
    pub(crate) read_only: bool,
    /// Raw handle of the stream whose enqueued work must precede any access; `None`: no ordering needed.
    pub(crate) stream: Option<u64>,
}

/// Parses the interface of `object`; `None` when it has none.
///
/// Outer error: raised by the object itself. Inner error: the description is malformed.
pub(crate) fn described(object: &Bound<'_, PyAny>, operation: &str) -> PyResult<Option<Result<Described, Refusal>>> {
    let py = object.py();
    let interface = match object.getattr(intern!(py, "__cuda_array_interface__")) {
        Ok(interface) => interface,
        Err(error) if error.is_instance_of::<PyAttributeError>(py) => return Ok(None),
        Err(error) => return Err(errors::refused(object, operation, error)),
    };
    Ok(Some(match interface.cast::<PyDict>() {
        Ok(entries) => parse(entries),
        Err(_) => Err(malformed("its __cuda_array_interface__ is no dictionary")),
    }))
}

fn parse(entries: &Bound<'_, PyDict>) -> Result<Described, Refusal> {
    let version = entry(entries, "version")?.map_or(Ok(0), |version| number(&version, "version"))?;
    if !(0..=3).contains(&version) {
        let detail = format!("has version {version} of __cuda_array_interface__");
        return Err((detail, "versions 0 to 3 are supported"));
    }
    if entry(entries, "mask")?.is_some() {
        return Err(("has a mask".to_owned(), "make a copy without masked items"));
    }
    let shape = wanted(entries, "shape")?;
    let shape = numbers(&shape, "shape")?;
    let strides = entry(entries, "strides")?.map(|strides| numbers(&strides, "strides")).transpose()?;
    let item = item_size(&wanted(entries, "typestr")?)?;
    let (ptr, read_only) = data(&wanted(entries, "data")?)?;
    let axes = Axes { shape, strides, unit: item };
    Axes::count(axes.shape.len() as i64)?;
    let piece = axes.piece(ptr, item.unsigned_abs().saturating_mul(8))?;
    let stream = match entry(entries, "stream")? {
        Some(stream) if version >= 3 => match number(&stream, "stream")? {
            handle if handle > 0 => Some(handle.unsigned_abs()),
            handle => return Err(malformed(&format!("stream {handle}"))),
        },
        _ => None,
    };
    Ok(Described { piece, read_only, stream })
}

/// An entry that is there and not None.
fn entry<'py>(entries: &Bound<'py, PyDict>, name: &str) -> Result<Option<Bound<'py, PyAny>>, Refusal> {
    let found = entries.get_item(name).map_err(|_| malformed(name))?;
    Ok(found.filter(|value| !value.is_none()))
}

fn wanted<'py>(entries: &Bound<'py, PyDict>, name: &str) -> Result<Bound<'py, PyAny>, Refusal> {
    entry(entries, name)?.ok_or_else(|| malformed(&format!("its __cuda_array_interface__ has no {name}")))
}

fn number(value: &Bound<'_, PyAny>, name: &str) -> Result<i64, Refusal> {
    value.extract().map_err(|_| wrong(value, name))
}

fn numbers(value: &Bound<'_, PyAny>, name: &str) -> Result<Vec<i64>, Refusal> {
    let tuple = value.cast::<PyTuple>().map_err(|_| wrong(value, name))?;
    tuple.iter().map(|one| number(&one, name)).collect()
}

fn wrong(value: &Bound<'_, PyAny>, name: &str) -> Refusal {
    const SHOWN: usize = 60;
    let text = value.repr().map_or_else(|_| "something".to_owned(), |text| text.to_string());
    let cut: String = text.chars().take(SHOWN).collect();
    malformed(&format!("{name} {cut}"))
}

fn data(value: &Bound<'_, PyAny>) -> Result<(u64, bool), Refusal> {
    let pair: (Option<u64>, bool) = value.extract().map_err(|_| wrong(value, "data"))?;
    Ok((pair.0.unwrap_or(0), pair.1))
}

/// Bytes per item of a type text such as `<f4`, `|V2`, `<U8`, `<M8[ns]`.
fn item_size(value: &Bound<'_, PyAny>) -> Result<i64, Refusal> {
    let text = value.cast::<PyString>().map_err(|_| wrong(value, "typestr"))?.to_string();
    let malformed = || wrong(value, "typestr");
    let rest = text.strip_prefix(['<', '>', '|', '=']).unwrap_or(&text);
    let kind = rest.chars().next().ok_or_else(malformed)?;
    let digits = rest[kind.len_utf8()..].split('[').next().unwrap_or_default();
    let size: u32 = digits.parse().map_err(|_| malformed())?;
    let size = i64::from(size);
    match kind {
        'b' | 'i' | 'u' | 'f' | 'c' | 'm' | 'M' | 'V' | 'S' => Ok(size),
        'U' => Ok(size * 4),
        't' => Err(("has items of single bits".to_owned(), "view it as bytes")),
        'O' => Err(("holds Python objects".to_owned(), "object references are not valid in another process")),
        _ => Err(malformed()),
    }
}
