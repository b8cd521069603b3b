//! Arrays of row addresses and of row numbers: read in place or converted in bulk, never item by item in Python.
#![allow(unsafe_code)]

use std::borrow::Cow;

use pyo3::prelude::*;

use super::lent::{self, Items};
use super::number::U32;
use crate::runtime::errors;

const HINT: &str = "pass a contiguous array of uint64 or int64";
const INDEX_HINT: &str = "pass a contiguous array of int32, uint32, int64 or uint64, or a list of int";

/// An Nx3 or Nx5 array of 64-bit numbers.
pub(crate) struct Table {
    items: Items,
    /// How many numbers a row has.
    pub(crate) width: usize,
}

impl Table {
    /// `None`: not an array at all.
    pub(crate) fn of(object: &Bound<'_, PyAny>, operation: &str) -> PyResult<Option<Table>> {
        if !lent::has_buffer(object) {
            return Ok(None);
        }
        let py = object.py();
        let items = Items::of(object, operation)?;
        let &[_, width] = items.shape.as_slice() else {
            let detail = format!("rows are an array of 2 axes, not {}", items.shape.len());
            return Err(errors::usage(py, operation, detail, "(address, length, device) each: shape (n, 3)"));
        };
        if items.size != 8 || !items.is_integer() {
            return Err(errors::usage(py, operation, "rows are 64-bit integers", HINT));
        }
        Ok(Some(Table { items, width }))
    }

    /// Its numbers, row by row.
    pub(crate) fn words(&self) -> Cow<'_, [u64]> {
        self.items.numbers::<u64>()
    }
}

/// Row numbers.
pub(crate) enum Index {
    Lent(Items),
    Owned(Vec<u32>),
}

impl Index {
    pub(crate) fn of(object: Option<&Bound<'_, PyAny>>, operation: &str) -> PyResult<Option<Index>> {
        let Some(object) = object.filter(|object| !object.is_none()) else { return Ok(None) };
        let py = object.py();
        if !lent::has_buffer(object) {
            let numbers = object.try_iter()?.map(|item| Ok(item?.extract::<U32>()?.0)).collect::<PyResult<Vec<u32>>>();
            let refused = |error: PyErr| errors::refused(object, operation, error);
            return numbers.map(|numbers| Some(Index::Owned(numbers))).map_err(refused);
        }
        let items = Items::of(object, operation)?;
        if items.shape.len() != 1 || !items.is_integer() {
            let detail = format!("row numbers are integers along one axis, not {} axes", items.shape.len());
            return Err(errors::usage(py, operation, detail, INDEX_HINT));
        }
        let wide = match items.size {
            4 if items.is_signed() => items.numbers::<i32>().iter().copied().map(u32::try_from).collect(),
            4 => return Ok(Some(Index::Lent(items))),
            8 if items.is_signed() => items.numbers::<i64>().iter().copied().map(u32::try_from).collect(),
            8 => items.numbers::<u64>().iter().copied().map(u32::try_from).collect::<Result<Vec<u32>, _>>(),
            size => {
                let detail = format!("row numbers of {size} bytes");
                return Err(errors::usage(py, operation, detail, INDEX_HINT));
            }
        };
        let refused = |_| errors::usage(py, operation, "a row number is not from 0 to 2**32 - 1", "");
        wide.map(|numbers| Some(Index::Owned(numbers))).map_err(refused)
    }

    pub(crate) fn numbers(&self) -> Cow<'_, [u32]> {
        match self {
            Index::Lent(items) => items.numbers::<u32>(),
            Index::Owned(numbers) => Cow::Borrowed(numbers),
        }
    }
}
