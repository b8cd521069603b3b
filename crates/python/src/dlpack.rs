//! Tensors lent through DLPack (host memory only).
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};

use crossrail_types::{Error, ErrorKind};
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors;
use crate::lent::Use;

const HOST: i32 = 1;
const PINNED_HOST: i32 = 3;
const READ_ONLY: u64 = 1;
/// Devices by number, as dlpack.h lists them.
const DEVICES: [(i32, &str); 11] = [
    (2, "cuda"),
    (4, "opencl"),
    (7, "vulkan"),
    (8, "metal"),
    (9, "vpi"),
    (10, "rocm"),
    (11, "rocm host"),
    (12, "an extension device"),
    (13, "cuda managed"),
    (14, "oneapi"),
    (16, "hexagon"),
];

#[repr(C)]
#[derive(Clone, Copy)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`: what a capsule named `dltensor` holds.
#[repr(C)]
struct Managed {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// `DLManagedTensorVersioned`: what a capsule named `dltensor_versioned` holds.
#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: DlTensor,
}

/// A tensor taken out of its capsule; its deleter is still to be called.
pub(crate) enum Tensor {
    Plain(*mut c_void),
    Versioned(*mut c_void),
}

impl Tensor {
    /// Calls the deleter. The GIL is held.
    pub(crate) fn release(self) {
        // SAFETY: the pointers come from capsules of these names, which this took over by renaming them; the
        // deleter is called once, since `self` is consumed.
        unsafe {
            match self {
                Tensor::Plain(tensor) => {
                    let tensor = tensor.cast::<Managed>();
                    if let Some(deleter) = (*tensor).deleter {
                        deleter(tensor);
                    }
                }
                Tensor::Versioned(tensor) => {
                    let tensor = tensor.cast::<Versioned>();
                    if let Some(deleter) = (*tensor).deleter {
                        deleter(tensor);
                    }
                }
            }
        }
    }
}

/// A tensor with what it says about itself.
pub(crate) struct Imported {
    pub(crate) tensor: Tensor,
    pub(crate) ptr: *mut u8,
    /// Bytes.
    pub(crate) len: usize,
    /// As NumPy and ml_dtypes name it.
    pub(crate) dtype: String,
    pub(crate) shape: Vec<i64>,
}

/// The tensor of `object`, if it lies in host memory in one piece.
pub(crate) fn import(object: &Bound<'_, PyAny>, used: Use, operation: &str) -> PyResult<Imported> {
    let py = object.py();
    let name = object.get_type().name()?.to_string();
    if !object.hasattr("__dlpack__")? || !object.hasattr("__dlpack_device__")? {
        return Err(errors::usage(
            py,
            operation,
            format!("a {name} has neither the buffer protocol nor DLPack"),
            "pass bytes, a bytearray, a memoryview, an array, a tensor or Context.alloc",
        ));
    }
    let (device, index): (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
    if device != HOST && device != PINNED_HOST {
        let known = DEVICES.iter().find(|(number, _)| *number == device);
        let device = known.map_or_else(|| format!("device type {device}"), |(_, name)| (*name).to_owned());
        return Err(errors::raise(
            py,
            &Error::new(ErrorKind::Unsupported, operation, format!("the {name} is on {device}:{index}"))
                .with_hint("this release moves host memory: copy it to the host first"),
        ));
    }
    let capsule = capsule(object)?;
    let (tensor, described, read_only) = take(&capsule)?;
    let checked = check(&described, read_only && used == Use::Write);
    match checked {
        Ok((ptr, len, shape)) => Ok(Imported { tensor, ptr, len, dtype: dtype_name(&described), shape }),
        Err((detail, hint)) => {
            tensor.release();
            Err(errors::usage(py, operation, format!("the {name} {detail}"), hint))
        }
    }
}

/// Asks for a versioned capsule; exporters that know none get the older call.
fn capsule<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    let version = PyDict::new(py);
    version.set_item("max_version", (1, 0))?;
    match object.call_method("__dlpack__", (), Some(&version)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => object.call_method0("__dlpack__"),
        answer => answer,
    }
}

fn take(capsule: &Bound<'_, PyAny>) -> PyResult<(Tensor, DlTensor, bool)> {
    const PLAIN: &CStr = c"dltensor";
    const VERSIONED: &CStr = c"dltensor_versioned";
    let object = capsule.as_ptr();
    // SAFETY: PyCapsule_IsValid takes any object. A capsule of one of these names holds the struct that DLPack
    // defines for it; renaming it makes this the owner, as DLPack prescribes.
    unsafe {
        if ffi::PyCapsule_IsValid(object, VERSIONED.as_ptr()) != 0 {
            let pointer = ffi::PyCapsule_GetPointer(object, VERSIONED.as_ptr());
            ffi::PyCapsule_SetName(object, c"used_dltensor_versioned".as_ptr());
            let managed = pointer.cast::<Versioned>();
            if (*managed).major != 1 {
                let major = (*managed).major;
                Tensor::Versioned(pointer).release();
                return Err(PyTypeError::new_err(format!("DLPack version {major} where at most 1 was asked for")));
            }
            return Ok((Tensor::Versioned(pointer), (*managed).tensor, (*managed).flags & READ_ONLY != 0));
        }
        if ffi::PyCapsule_IsValid(object, PLAIN.as_ptr()) != 0 {
            let pointer = ffi::PyCapsule_GetPointer(object, PLAIN.as_ptr());
            ffi::PyCapsule_SetName(object, c"used_dltensor".as_ptr());
            return Ok((Tensor::Plain(pointer), (*pointer.cast::<Managed>()).tensor, false));
        }
    }
    Err(PyTypeError::new_err("__dlpack__ returned no DLPack capsule"))
}

type Refusal = (String, &'static str);

fn dtype_name(tensor: &DlTensor) -> String {
    let (bits, name) = (tensor.bits, |name: &str| format!("{name}{}", tensor.bits));
    let name = match tensor.code {
        0 => name("int"),
        1 => name("uint"),
        2 => name("float"),
        4 => name("bfloat"),
        5 => name("complex"),
        6 => "bool".to_owned(),
        10 => "float8_e4m3fn".to_owned(),
        12 => "float8_e5m2".to_owned(),
        14 => "float8_e8m0fnu".to_owned(),
        code => format!("DLPack type {code} of {bits} bits"),
    };
    if tensor.lanes == 1 { name } else { format!("{name} x {}", tensor.lanes) }
}

/// Where the bytes are, if they lie in one piece, and the shape.
fn check(tensor: &DlTensor, refuse_read_only: bool) -> Result<(*mut u8, usize, Vec<i64>), Refusal> {
    let senseless = || ("describes itself in a way that makes no sense".to_owned(), "");
    if refuse_read_only {
        return Err(("is read-only".to_owned(), "receive into something writable"));
    }
    let ndim = usize::try_from(tensor.ndim).map_err(|_| senseless())?;
    if ndim > 0 && tensor.shape.is_null() {
        return Err(senseless());
    }
    let mut count: usize = 1;
    let mut contiguous = true;
    let mut shape = vec![0; ndim];
    for axis in (0..ndim).rev() {
        // SAFETY: DLPack says that shape has ndim entries, and strides too where it is not null.
        let (extent, stride) = unsafe {
            let stride = if tensor.strides.is_null() { None } else { Some(*tensor.strides.add(axis)) };
            (*tensor.shape.add(axis), stride)
        };
        shape[axis] = extent;
        let extent = usize::try_from(extent).map_err(|_| senseless())?;
        contiguous &= extent <= 1 || stride.is_none_or(|stride| usize::try_from(stride) == Ok(count));
        count = count.checked_mul(extent).ok_or_else(senseless)?;
    }
    let bits = usize::from(tensor.bits) * usize::from(tensor.lanes);
    let len = count.checked_mul(bits).ok_or_else(senseless)?.div_ceil(8);
    if !contiguous && count > 0 {
        return Err(("is not contiguous in C order".to_owned(), "make a contiguous copy"));
    }
    let offset = usize::try_from(tensor.byte_offset).map_err(|_| senseless())?;
    if len > 0 && tensor.data.is_null() {
        return Err(senseless());
    }
    Ok((tensor.data.cast::<u8>().wrapping_add(offset), len, shape))
}
