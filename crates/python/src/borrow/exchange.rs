//! Tensor metadata through DLPack's exchange table (`DLPackExchangeAPI`): one C call instead of five Python calls.
//!
//! PyTorch has the table from version 2.10 on, as an attribute of its class of tensors.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int, c_void};
use std::{ptr, slice};

use pyo3::ffi;
use pyo3::prelude::*;

use super::dlpack::{Device, DlTensor, Dtype};

/// Name of the capsule.
const TABLE: &CStr = c"dlpack_exchange_api";
/// Version of the table, of which this is a part.
const MAJOR: u32 = 1;

/// The beginning of `DLPackExchangeAPI`.
#[repr(C)]
struct Table {
    major: u32,
    _minor: u32,
    _former: *const Table,
    /// Functions that allocate, lend and take tensors.
    _others: [*const c_void; 3],
    describe: Option<DescribeFn>,
}

/// `(object, out) -> code`: describes a tensor, which keeps its memory; -1 with a Python exception.
type DescribeFn = unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int;

/// Reads the metadata of tensors of one class, by that class's exchange table.
#[derive(Clone, Copy)]
pub(crate) struct Exchange(DescribeFn);

/// Metadata of a tensor, borrowed: valid until the tensor is modified.
pub(crate) struct TensorMeta<'a> {
    pub(crate) address: u64,
    pub(crate) device: Device,
    pub(crate) dtype: Dtype,
    pub(crate) shape: &'a [i64],
    /// In items; None: contiguous.
    pub(crate) strides: Option<&'a [i64]>,
}

impl Exchange {
    /// The table in a capsule; None for any other object, or a table of another version.
    pub(crate) fn of(capsule: &Bound<'_, PyAny>) -> Option<Exchange> {
        // SAFETY: a capsule of this name holds such a table, which lives as long as the process; for any other object
        // the function returns null.
        let table = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), TABLE.as_ptr()) }.cast::<Table>();
        if table.is_null() {
            let _ = PyErr::take(capsule.py());
            return None;
        }
        // SAFETY: as above; tables of all versions begin with the number.
        if unsafe { (*table).major } != MAJOR {
            return None;
        }
        // SAFETY: as above, and the table is of this version.
        unsafe { (*table).describe }.map(Exchange)
    }

    /// Reads the metadata of `tensor`; None if the table's function fails.
    ///
    /// # Safety
    /// The object must be of exactly the class that has this table.
    pub(crate) unsafe fn describe<'a>(self, tensor: &'a Bound<'_, PyAny>) -> Option<TensorMeta<'a>> {
        let (device, dtype) = (Device { kind: 0, id: 0 }, Dtype { code: 0, bits: 0, lanes: 0 });
        let (data, shape, strides) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        let mut tensor_out = DlTensor { data, device, ndim: 0, dtype, shape, strides, byte_offset: 0 };
        // SAFETY: the caller vouches for the class; `tensor_out` is a valid out pointer, and the GIL is held.
        if unsafe { (self.0)(tensor.as_ptr().cast(), &mut tensor_out) } != 0 {
            let _ = PyErr::take(tensor.py());
            return None;
        }
        let axes = usize::try_from(tensor_out.ndim).ok()?;
        if axes > 0 && tensor_out.shape.is_null() {
            return None;
        }
        // SAFETY: the tensor, which is borrowed, holds as many extents and strides; nobody changes them while the GIL is
        // held and no code of Python's runs.
        let extents = |at: *mut i64| (axes > 0).then(|| unsafe { slice::from_raw_parts(at.cast_const(), axes) });
        let shape = extents(tensor_out.shape).unwrap_or_default();
        let strides =
            if tensor_out.strides.is_null() { None } else { Some(extents(tensor_out.strides).unwrap_or_default()) };
        let address = (tensor_out.data as u64).wrapping_add(tensor_out.byte_offset);
        Some(TensorMeta { address, device: tensor_out.device, dtype: tensor_out.dtype, shape, strides })
    }
}
