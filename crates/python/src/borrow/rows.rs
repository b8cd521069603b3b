//! Arrays of row addresses and of row numbers: read in place or converted in bulk, never item by item in Python.
#![allow(unsafe_code)]

use std::borrow::Cow;

use pyo3::exceptions::PyTypeError;
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
    /// The numbers of the argument `name`.
    pub(crate) fn of(object: Option<&Bound<'_, PyAny>>, operation: &str, name: &str) -> PyResult<Option<Index>> {
        let Some(object) = object.filter(|object| !object.is_none()) else { return Ok(None) };
        let py = object.py();
        if !lent::has_buffer(object) {
            let items = object.try_iter().map_err(|error| errors::in_argument(py, operation, name, error))?;
            let number = |(at, item): (usize, PyResult<Bound<'_, PyAny>>)| {
                let wrong = |error| errors::in_argument(py, operation, &format!("{name}[{at}]"), error);
                item?.extract::<U32>().map(|number| number.0).map_err(wrong)
            };
            return Ok(Some(Index::Owned(items.enumerate().map(number).collect::<PyResult<Vec<u32>>>()?)));
        }
        let items = Items::of(object, operation)?;
        if !matches!(items.size, 4 | 8) {
            let detail = format!("{name}: row numbers of {} bytes", items.size);
            return Err(errors::usage(py, operation, detail, INDEX_HINT));
        }
        if !items.is_integer() {
            return Err(PyTypeError::new_err(format!("{operation}: {name}: its items are not integers; {INDEX_HINT}")));
        }
        if items.shape.len() != 1 {
            let detail = format!("{name}: row numbers are along one axis, not {}", items.shape.len());
            return Err(errors::usage(py, operation, detail, INDEX_HINT));
        }
        let wide = match items.size {
            4 if items.is_signed() => narrow(&items.numbers::<i32>()),
            4 => return Ok(Some(Index::Lent(items))),
            8 if items.is_signed() => narrow(&items.numbers::<i64>()),
            _ => narrow(&items.numbers::<u64>()),
        };
        let refused = |(at, number): (usize, i128)| {
            let detail = format!("{name}[{at}]: {number} is not an unsigned number of 32 bits");
            errors::usage(py, operation, detail, "pass a number from 0 to 2**32 - 1")
        };
        wide.map(|numbers| Some(Index::Owned(numbers))).map_err(refused)
    }

    pub(crate) fn numbers(&self) -> Cow<'_, [u32]> {
        match self {
            Index::Lent(items) => items.numbers::<u32>(),
            Index::Owned(numbers) => Cow::Borrowed(numbers),
        }
    }
}

/// These numbers in 32 bits; or the first that does not fit, and where.
fn narrow<T: Copy + Into<i128>>(numbers: &[T]) -> Result<Vec<u32>, (usize, i128)> {
    let one = |(at, number): (usize, &T)| {
        let number = (*number).into();
        u32::try_from(number).map_err(|_| (at, number))
    };
    numbers.iter().enumerate().map(one).collect()
}
