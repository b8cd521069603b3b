//! Imports arrays through DLPack.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};

use pyo3::exceptions::{PyException, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use pyo3::{ffi, intern};

use super::layout::{Axes, Owner, Piece, Refusal, malformed};
use crate::runtime::errors;

pub(crate) const HOST: i32 = 1;
pub(crate) const CUDA: i32 = 2;
const CUDA_HOST: i32 = 3;
const CUDA_MANAGED: i32 = 13;
const READ_ONLY: u64 = 1;
/// The dtype code of handles, as which exporters may lend object references.
const OPAQUE: u8 = 3;
/// The dtype code of float8_e4m3fn.
pub(crate) const E4M3: u8 = 10;
/// Devices by number, as dlpack.h lists them, that no transport reaches.
const OTHERS: [(i32, &str); 12] = [
    (4, "opencl"),
    (7, "vulkan"),
    (8, "metal"),
    (9, "vpi"),
    (10, "rocm"),
    (11, "rocm host"),
    (12, "an extension device"),
    (14, "oneapi"),
    (15, "webgpu"),
    (16, "hexagon"),
    (17, "maia"),
    (18, "trainium"),
];

/// `DLTensor`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct DlTensor {
    pub(super) data: *mut c_void,
    pub(super) device: Device,
    pub(super) ndim: i32,
    pub(super) dtype: Dtype,
    pub(super) shape: *mut i64,
    pub(super) strides: *mut i64,
    pub(super) byte_offset: u64,
}

/// `DLDevice`, and what `__dlpack_device__` returns.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Device {
    pub(crate) kind: i32,
    pub(crate) id: i32,
}

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Dtype {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
}

/// `DLManagedTensor`: what a capsule named `dltensor` holds.
#[repr(C)]
pub(super) struct Managed {
    pub(super) tensor: DlTensor,
    pub(super) context: *mut c_void,
    pub(super) deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// `DLManagedTensorVersioned`: what a capsule named `dltensor_versioned` holds.
#[repr(C)]
pub(super) struct Versioned {
    pub(super) major: u32,
    pub(super) minor: u32,
    pub(super) context: *mut c_void,
    pub(super) deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    pub(super) flags: u64,
    pub(super) tensor: DlTensor,
}

pub(super) const PLAIN: &CStr = c"dltensor";
pub(super) const VERSIONED: &CStr = c"dltensor_versioned";

/// A tensor taken out of its capsule; its deleter is still to be called.
pub(crate) enum Tensor {
    Plain(*mut c_void),
    Versioned(*mut c_void),
}

impl Tensor {
    /// Calls the deleter. The GIL is held.
    pub(super) fn release(self) {
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

/// What a capsule held.
pub(crate) struct Imported {
    pub(crate) tensor: Tensor,
    pub(crate) device: Device,
    pub(crate) dtype: Dtype,
    pub(crate) read_only: bool,
    /// Where the bytes are and the shape, if they lie in one piece.
    pub(crate) piece: Result<(Piece, Vec<i64>), Refusal>,
}

impl Device {
    /// Host or CUDA GPU; error: the name of an unsupported device type. Pinned and managed memory are not told apart,
    /// because exporters report them inconsistently.
    pub(crate) fn owner(self) -> Result<Owner, String> {
        match self.kind {
            HOST | CUDA_HOST => Ok(Owner::Host),
            CUDA | CUDA_MANAGED => u32::try_from(self.id).map(Owner::Gpu).map_err(|_| format!("cuda:{}", self.id)),
            kind => {
                let known = OTHERS.iter().find(|(number, _)| *number == kind);
                let name = known.map_or_else(|| format!("device type {kind}"), |(_, name)| (*name).to_owned());
                Err(format!("{name}:{}", self.id))
            }
        }
    }
}

impl Dtype {
    /// As NumPy and ml_dtypes name it.
    pub(crate) fn name(self) -> String {
        let name = |name: &str| format!("{name}{}", self.bits);
        let name = match self.code {
            0 => name("int"),
            1 => name("uint"),
            2 => name("float"),
            4 => name("bfloat"),
            5 => name("complex"),
            6 => "bool".to_owned(),
            7 => "float8_e3m4".to_owned(),
            8 => "float8_e4m3".to_owned(),
            9 => "float8_e4m3b11fnuz".to_owned(),
            E4M3 => "float8_e4m3fn".to_owned(),
            11 => "float8_e4m3fnuz".to_owned(),
            12 => "float8_e5m2".to_owned(),
            13 => "float8_e5m2fnuz".to_owned(),
            14 => "float8_e8m0fnu".to_owned(),
            code => format!("DLPack type {code} of {} bits", self.bits),
        };
        if self.lanes == 1 { name } else { format!("{name} x {}", self.lanes) }
    }
}

/// The device that `object` reports by `__dlpack_device__`; `None` when it does not support DLPack.
///
/// Raises UsageError, with the exporter's reason, if the call fails.
pub(crate) fn device(object: &Bound<'_, PyAny>, operation: &str) -> PyResult<Option<Device>> {
    reported_device(object).map_err(|error| errors::refused(object, operation, error))
}

fn reported_device(object: &Bound<'_, PyAny>) -> PyResult<Option<Device>> {
    let py = object.py();
    let Some(ask) = object.getattr_opt(intern!(py, "__dlpack_device__"))? else { return Ok(None) };
    if !object.hasattr(intern!(py, "__dlpack__"))? {
        return Ok(None);
    }
    let (kind, id): (i32, i32) = ask.call0()?.extract()?;
    Ok(Some(Device { kind, id }))
}

/// Imports the tensor of `object`. `stream`: raw handle of the CUDA stream that the exporter must make wait for its
/// pending work (-1: no synchronization); `None` for host memory.
///
/// Raises UsageError, with the exporter's reason, if it refuses.
pub(crate) fn import(object: &Bound<'_, PyAny>, stream: Option<i64>, operation: &str) -> PyResult<Imported> {
    let capsule = match ask(object, stream) {
        Err(refusal) if refusal.is_instance_of::<PyException>(object.py()) => match bytes_of(object)? {
            Some(bytes) => ask(&bytes, stream),
            None => Err(refusal),
        },
        answer => answer,
    };
    take(&capsule.map_err(|error| errors::refused(object, operation, error))?)
}

/// A uint8 view of a PyTorch tensor whose dtype PyTorch cannot export through DLPack (fp8, in most versions). `None`:
/// not a PyTorch tensor, or refused for another reason. Never imports PyTorch.
fn bytes_of<'py>(object: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = object.py();
    let modules = py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?;
    let Ok(torch) = modules.get_item(intern!(py, "torch")) else { return Ok(None) };
    if !object.is_instance(&torch.getattr(intern!(py, "Tensor"))?)?
        || object.getattr(intern!(py, "requires_grad"))?.is_truthy()?
        || object.call_method0(intern!(py, "element_size"))?.extract::<usize>()? != 1
    {
        return Ok(None);
    }
    let bytes = torch.getattr(intern!(py, "uint8"))?;
    Ok(object.call_method1(intern!(py, "view"), (bytes,)).ok())
}

/// Requests a versioned capsule, and falls back to the unversioned call for older exporters.
fn ask<'py>(object: &Bound<'py, PyAny>, stream: Option<i64>) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    let lend = object.getattr(intern!(py, "__dlpack__"))?;
    let options = PyDict::new(py);
    if let Some(stream) = stream {
        options.set_item(intern!(py, "stream"), stream)?;
    }
    options.set_item(intern!(py, "max_version"), (1, 0))?;
    match lend.call((), Some(&options)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            options.del_item(intern!(py, "max_version"))?;
            lend.call((), Some(&options))
        }
        answer => answer,
    }
}

fn take(capsule: &Bound<'_, PyAny>) -> PyResult<Imported> {
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
                return Err(PyTypeError::new_err(format!("DLPack version {major} where 1 was asked for")));
            }
            let read_only = (*managed).flags & READ_ONLY != 0;
            return Ok(described(Tensor::Versioned(pointer), &(*managed).tensor, read_only));
        }
        if ffi::PyCapsule_IsValid(object, PLAIN.as_ptr()) != 0 {
            let pointer = ffi::PyCapsule_GetPointer(object, PLAIN.as_ptr());
            ffi::PyCapsule_SetName(object, c"used_dltensor".as_ptr());
            return Ok(described(Tensor::Plain(pointer), &(*pointer.cast::<Managed>()).tensor, false));
        }
    }
    Err(PyTypeError::new_err("__dlpack__ returned no DLPack capsule"))
}

/// # Safety
/// `lent` is a `DLTensor` of which `tensor` is the owner.
unsafe fn described(tensor: Tensor, lent: &DlTensor, read_only: bool) -> Imported {
    // SAFETY: the caller's promise.
    let piece = unsafe { piece(lent) };
    Imported { tensor, device: lent.device, dtype: lent.dtype, read_only, piece }
}

/// # Safety
/// `lent` is a `DLTensor`: its shape has `ndim` entries, and so have its strides where there are any.
unsafe fn piece(lent: &DlTensor) -> Result<(Piece, Vec<i64>), Refusal> {
    if lent.dtype.code == OPAQUE {
        return Err(("holds references (opaque handles)".to_owned(), "they are valid in this process only"));
    }
    let ndim = Axes::count(i64::from(lent.ndim))?;
    // SAFETY: the caller's promise; an array of no axes may leave both out.
    let listed = |first: *mut i64| unsafe {
        match (ndim, first.is_null()) {
            (0, _) => Some(Vec::new()),
            (_, true) => None,
            (_, false) => Some(std::slice::from_raw_parts(first, ndim).to_vec()),
        }
    };
    let shape = listed(lent.shape).ok_or_else(|| malformed(&format!("{ndim} axes and no shape")))?;
    let strides = listed(lent.strides);
    let bits = u64::from(lent.dtype.bits) * u64::from(lent.dtype.lanes);
    let at = (lent.data as usize as u64).checked_add(lent.byte_offset);
    let at = at.ok_or_else(|| malformed(&format!("an offset of {} bytes", lent.byte_offset)))?;
    let axes = Axes { shape, strides, unit: 1 };
    let piece = axes.piece(if lent.data.is_null() { 0 } else { at }, bits)?;
    Ok((piece, axes.shape))
}
