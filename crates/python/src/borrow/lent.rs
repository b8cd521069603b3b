//! Borrows the memory of Python objects for the duration of an operation.
#![allow(unsafe_code)]

use std::any::Any;
use std::borrow::Cow;
use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use crossrail_types::Result;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyByteArray, PyBytes, PyMemoryView, PyType};

use super::dlpack::Dtype;
use super::loan::{Call, Loan, Pinned, View, keep};
use crate::runtime::errors::OrRaise;
use crate::runtime::lifecycle::Detached;
use crate::runtime::{errors, gate};

const WRITABLE: c_int = 0x1;
const C_CONTIGUOUS: c_int = 0x38;
const FULL_RO: c_int = 0x11c;
const FORMAT: c_int = 0x4;
const POINTER: ffi::Py_ssize_t = size_of::<*const c_void>() as ffi::Py_ssize_t;

unsafe extern "C" {
    fn PyObject_CheckBuffer(object: *mut ffi::PyObject) -> c_int;
    fn PyObject_GetBuffer(object: *mut ffi::PyObject, view: *mut View, flags: c_int) -> c_int;
    fn PyBuffer_FillInfo(
        view: *mut View,
        object: *mut ffi::PyObject,
        memory: *mut c_void,
        len: ffi::Py_ssize_t,
        readonly: c_int,
        flags: c_int,
    ) -> c_int;
}

/// The borrowed bytes as a slice; `ptr` may be null if `len` is 0.
///
/// # Safety
/// `ptr` is valid for reading `len` bytes as long as the result is used.
pub(super) unsafe fn slice<'a>(ptr: *const u8, len: usize) -> &'a [u8] {
    // SAFETY: the caller's promise.
    if len == 0 { &[] } else { unsafe { std::slice::from_raw_parts(ptr, len) } }
}

/// As [`slice`], mutable.
///
/// # Safety
/// `ptr` is valid for writing `len` bytes as long as the result is used, and nobody else uses them.
pub(super) unsafe fn slice_mut<'a>(ptr: *mut u8, len: usize) -> &'a mut [u8] {
    // SAFETY: the caller's promise.
    if len == 0 { &mut [] } else { unsafe { std::slice::from_raw_parts_mut(ptr, len) } }
}

/// Fills `view` for an exporter of plain writable bytes.
///
/// # Safety
/// `view` and `object` are what the interpreter passed to a `bf_getbuffer` slot; `memory` is valid for `len` bytes
/// while `object` lives.
pub(crate) unsafe fn export(
    view: *mut View,
    object: *mut ffi::PyObject,
    memory: *mut u8,
    len: usize,
    flags: c_int,
) -> c_int {
    // SAFETY: the caller's promise is what this function asks for; a length in memory fits Py_ssize_t.
    unsafe { PyBuffer_FillInfo(view, object, memory.cast(), len as ffi::Py_ssize_t, 0, flags) }
}

/// What an operation does with the memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    Read,
    Write,
}

impl<T: Send + Sync> Detached<T> {
    /// Runs `work` as a call from Python, without the GIL. Raises as `here`, or the error of `work`.
    pub(crate) fn call<R: Send>(
        &self,
        py: Python<'_>,
        operation: &str,
        work: impl FnOnce(&T) -> Result<R> + Send,
    ) -> PyResult<R> {
        let _call = Call::enter(py);
        let native = self.here(py, operation)?;
        gate::detached(py, || work(native)).or_raise(py)
    }
}

/// Memory that stays valid until `keep` is dropped.
pub(crate) struct BorrowedBytes {
    pub(crate) ptr: *mut u8,
    pub(crate) len: usize,
    pub(crate) keep: Arc<dyn Any + Send + Sync>,
}

/// A tensor's memory, which stays valid until `keep` is dropped.
pub(crate) struct BorrowedTensor {
    pub(crate) ptr: u64,
    pub(crate) len: usize,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<i64>,
    pub(crate) keep: Arc<dyn Any + Send + Sync>,
}

/// Numbers of an array: its memory in C order, with their size and kind.
pub(crate) struct Items {
    /// Stored as an integer so that the struct is `Send` and `Sync`.
    address: usize,
    len: usize,
    _keep: Arc<dyn Any + Send + Sync>,
    /// Bytes of one.
    pub(super) size: usize,
    /// Type code, as in Python's `struct` module.
    kind: u8,
    pub(super) shape: Vec<usize>,
}

/// Types of which every pattern of bits is a value.
pub(super) trait Number: Copy {}
impl Number for u32 {}
impl Number for i32 {}
impl Number for u64 {}
impl Number for i64 {}

impl Items {
    pub(super) fn of(object: &Bound<'_, PyAny>, operation: &str) -> PyResult<Items> {
        let mut view = View::EMPTY;
        // SAFETY: `view` is ours and `object` is valid.
        if unsafe { PyObject_GetBuffer(object.as_ptr(), &raw mut view, C_CONTIGUOUS | FORMAT) } != 0 {
            return Err(why_refused(object, Use::Read, operation));
        }
        // SAFETY: the exporter filled the view just now: a format is a C string, a shape has `ndim` extents.
        let (format, shape) = unsafe {
            let format = if view.format.is_null() { &[] } else { CStr::from_ptr(view.format).to_bytes() };
            let axes = if view.shape.is_null() { 0 } else { usize::try_from(view.ndim).unwrap_or(0) };
            let extents = (0..axes).map(|axis| usize::try_from(*view.shape.add(axis)).unwrap_or(0));
            (format.to_vec(), extents.collect())
        };
        // One type code, optionally after a prefix for native byte order.
        let kind = match format.as_slice() {
            [kind] | [b'@' | b'=' | b'<', kind] => *kind,
            _ => 0,
        };
        let (address, len, size) = (view.buf as usize, view.len as usize, view.itemsize as usize);
        Ok(Items { address, len, _keep: keep(Loan::View(view, pinned(object))), size, kind, shape })
    }

    pub(super) fn is_integer(&self) -> bool {
        self.is_signed() || matches!(self.kind, b'I' | b'L' | b'Q' | b'N')
    }

    pub(super) fn is_signed(&self) -> bool {
        matches!(self.kind, b'i' | b'l' | b'q' | b'n')
    }

    /// The memory as numbers of type `T`, whose size the caller has checked; copied if unaligned.
    pub(super) fn numbers<T: Number>(&self) -> Cow<'_, [T]> {
        let (ptr, count) = (self.address as *const T, self.len / size_of::<T>());
        if count == 0 {
            Cow::Borrowed(&[])
        } else if ptr.is_aligned() {
            // SAFETY: lent, aligned, and every pattern of bits is a number. Callers change arrays that they pass at
            // their own risk, as with every buffer.
            Cow::Borrowed(unsafe { std::slice::from_raw_parts(ptr, count) })
        } else {
            // SAFETY: as above; reads need no alignment.
            Cow::Owned((0..count).map(|at| unsafe { ptr.add(at).read_unaligned() }).collect())
        }
    }
}

/// Whether `object` has the buffer protocol.
pub(crate) fn has_buffer(object: &Bound<'_, PyAny>) -> bool {
    // SAFETY: a valid object; the function only looks at its type.
    unsafe { PyObject_CheckBuffer(object.as_ptr()) != 0 }
}

/// The memory of something with the buffer protocol.
pub(crate) fn bytes(object: &Bound<'_, PyAny>, used: Use, operation: &str) -> PyResult<BorrowedBytes> {
    let mut view = View::EMPTY;
    let flags = if used == Use::Write { C_CONTIGUOUS | WRITABLE } else { C_CONTIGUOUS };
    // SAFETY: `view` is ours and `object` is valid.
    if unsafe { PyObject_GetBuffer(object.as_ptr(), &raw mut view, flags) } != 0 {
        return Err(why_refused(object, used, operation));
    }
    // Items smaller than a pointer cannot hold references: skip the second request.
    if view.itemsize >= POINTER
        && let Some(items) = references(object)
    {
        // SAFETY: filled just above, released once.
        unsafe { view.release() };
        return Err(errors::usage(
            object.py(),
            operation,
            format!("the items of the {} are references ({items}), which are valid in this process only", name(object)),
            "convert it to a dtype without references, or send the bytes of pickle.dumps",
        ));
    }
    let (ptr, len) = (view.buf.cast::<u8>(), view.len as usize);
    // The view stays exported, and so valid, until the keeper is dropped.
    Ok(BorrowedBytes { ptr, len, keep: keep(Loan::View(view, pinned(object))) })
}

/// A weak reference to the array that owns the memory of `object`, if a NumPy array does.
///
/// NumPy counts no exports: `resize(refcheck=False)` would free memory that an operation in flight uses. But it never
/// resizes an array to which there are weak references.
fn pinned(object: &Bound<'_, PyAny>) -> Option<Pinned> {
    static ARRAY: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let py = object.py();
    // Fast path for the most common types: no lookup of NumPy.
    if object.is_exact_instance_of::<PyBytes>() || object.is_exact_instance_of::<PyByteArray>() {
        return None;
    }
    let array = ARRAY.import(py, "numpy", "ndarray").ok()?;
    let mut owner = object.clone();
    if let Ok(view) = object.cast::<PyMemoryView>() {
        owner = view.getattr("obj").ok()?;
    }
    if !owner.is_instance(array).ok()? {
        return None;
    }
    // NumPy collapses chains of views: the base of a view is the owner.
    if let Ok(base) = owner.getattr("base")
        && base.is_instance(array).ok()?
    {
        owner = base;
    }
    // SAFETY: a valid object; the result is a new reference, or null with an exception set.
    let reference = unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyWeakref_NewRef(owner.as_ptr(), ptr::null_mut())) };
    reference.ok().map(|reference| Pinned(reference.unbind()))
}

/// The dtype or buffer format of items that refer to Python objects or are pointers; `None`: plain data.
#[cold]
fn references(object: &Bound<'_, PyAny>) -> Option<String> {
    let dtype = || object.getattr("dtype").ok();
    let mut view = View::EMPTY;
    // SAFETY: `view` is ours and `object` is valid.
    let refers = if unsafe { PyObject_GetBuffer(object.as_ptr(), &raw mut view, FULL_RO) } == 0 {
        // SAFETY: filled just above and not released yet; a format is a C string.
        let format = (!view.format.is_null()).then(|| unsafe { CStr::from_ptr(view.format) }.to_owned());
        // SAFETY: as above, released once.
        unsafe { view.release() };
        let format = format?;
        let format = format.to_string_lossy();
        if !format_refers(&format) {
            return None;
        }
        format!("format {format}")
    } else {
        // NumPy has no format for some of its dtypes. Only some of those hold references.
        drop(PyErr::fetch(object.py()));
        if !dtype()?.getattr("hasobject").and_then(|refers| refers.is_truthy()).unwrap_or(false) {
            return None;
        }
        "no format".to_owned()
    };
    Some(dtype().map_or(refers, |dtype| format!("dtype {dtype}")))
}

/// Whether items of this format (PEP 3118, as `struct` with extensions) contain object references or pointers.
fn format_refers(format: &str) -> bool {
    // A field's name stands between colons, behind its type.
    let types: String = format.split(':').step_by(2).collect();
    let mut kinds = types.chars().peekable();
    while let Some(kind) = kinds.next() {
        match kind {
            'O' | '&' | 'X' | 'z' => return true,
            // `Zf`, `Zd` and `Zg` are complex numbers; alone, it is ctypes' pointer to wide characters.
            'Z' if kinds.next_if(|part| "fdg".contains(*part)).is_none() => return true,
            _ => {}
        }
    }
    false
}

fn name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().name().map_or_else(|_| "object".to_owned(), |name| name.to_string())
}

/// Has `copy` read the bytes of `data`, host memory, without the GIL.
pub(crate) fn copy_from(
    data: &Bound<'_, PyAny>,
    operation: &str,
    copy: impl FnOnce(&[u8]) -> Result<()> + Send,
) -> PyResult<()> {
    let _call = Call::enter(data.py());
    let lent = bytes(data, Use::Read, operation)?;
    // SAFETY: lent for the call, and an empty piece may have no address.
    let from = unsafe { slice(lent.ptr, lent.len) };
    gate::detached(data.py(), || copy(from)).or_raise(data.py())
}

/// Has `copy` fill `target`, writable host memory, without the GIL.
pub(crate) fn copy_into(
    target: &Bound<'_, PyAny>,
    operation: &str,
    copy: impl FnOnce(&mut [u8]) -> Result<()> + Send,
) -> PyResult<()> {
    let _call = Call::enter(target.py());
    let lent = bytes(target, Use::Write, operation)?;
    // SAFETY: lent for the call, writable, and an empty piece may have no address.
    let into = unsafe { slice_mut(lent.ptr, lent.len) };
    gate::detached(target.py(), || copy(into)).or_raise(target.py())
}

/// Error for a refused buffer request: retries with weaker requirements to find the reason.
#[cold]
fn why_refused(object: &Bound<'_, PyAny>, used: Use, operation: &str) -> PyErr {
    let py = object.py();
    let refusal = PyErr::fetch(py);
    let name = name(object);
    let mut view = View::EMPTY;
    // SAFETY: `view` is ours and `object` is valid.
    if unsafe { PyObject_GetBuffer(object.as_ptr(), &raw mut view, FULL_RO) } != 0 {
        drop(PyErr::fetch(py));
        return errors::usage(py, operation, format!("the {name} does not export its memory: {refusal}"), "");
    }
    let readonly = view.readonly != 0;
    // SAFETY: filled just above, released once.
    unsafe { view.release() };
    if readonly && used == Use::Write {
        return errors::usage(
            py,
            operation,
            format!("the {name} is read-only"),
            "receive into a bytearray, a writable array or Context.alloc",
        );
    }
    errors::usage(
        py,
        operation,
        format!("the {name} is not contiguous in C order"),
        "numpy.ascontiguousarray makes a contiguous copy",
    )
}
