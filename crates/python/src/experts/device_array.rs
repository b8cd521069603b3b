//! Arrays in GPU memory that Crossrail owns: results of GPU expert buffers, and inputs made without another framework.

use std::any::Any;
use std::sync::Arc;

use crossrail::Place;
use crossrail_ep_cuda::arrays::Item;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::borrow::dlpack::{self, Dtype};
use crate::borrow::export::{Export, Exporter};
use crate::borrow::loan::Call;
use crate::objects::memory::MemoryBase;
use crate::runtime::errors;

/// Item types of our arrays, by name.
const ALL: [Item; 6] = [Item::Bf16, Item::E4m3, Item::F32, Item::I32, Item::I64, Item::U8];

/// DLPack dtype of `item`. fp8 is exported as uint8, since most consumers do not know the type, unless the consumer
/// supports it (`names_fp8`, DLPack 1.1).
pub(super) fn dtype(item: Item, names_fp8: bool) -> Dtype {
    let code = match item {
        Item::E4m3 if names_fp8 => dlpack::E4M3,
        Item::E4m3 | Item::U8 | Item::U16 => 1,
        Item::Bf16 => 4,
        Item::F32 => 2,
        Item::I32 | Item::I64 => 0,
    };
    Dtype { code, bits: 8 * item.bytes() as u8, lanes: 1 }
}

/// `typestr` of `item` for `__cuda_array_interface__`; bf16 and fp8, which it lacks, as unsigned integers.
fn typestr(item: Item) -> &'static str {
    match item {
        Item::E4m3 | Item::U8 => "|u1",
        Item::Bf16 | Item::U16 => "<u2",
        Item::F32 => "<f4",
        Item::I32 => "<i4",
        Item::I64 => "<i8",
    }
}

/// A C-contiguous array in GPU memory. It stays allocated as long as anything created from it.
///
/// Other libraries share its memory by DLPack and ``__cuda_array_interface__``:
/// ``torch.from_dlpack(array)``, ``cupy.from_dlpack(array)``. fp8 is exported as uint8 (its
/// bits), and bf16 by ``__cuda_array_interface__`` as uint16.
///
/// Parameters
/// ----------
/// memory : Memory
///     Memory of a GPU, from ``Context.alloc(nbytes, "cuda:0")``.
/// dtype : str
///     bfloat16, float8_e4m3fn, float32, int32, int64 or uint8.
/// shape : sequence of int
/// offset : int
///     Offset of the array in `memory`, in bytes.
///
/// Raises
/// ------
/// UsageError
///     The array does not fit.
#[pyclass(module = "crossrail._native", extends = Exporter, frozen)]
pub(super) struct DeviceArray {
    pub(super) address: u64,
    pub(super) items: Item,
    pub(super) shape: Vec<i64>,
    pub(super) ordinal: u32,
    keep: Arc<dyn Any + Send + Sync>,
}

impl DeviceArray {
    pub(super) fn new(
        address: u64,
        items: Item,
        shape: Vec<i64>,
        ordinal: u32,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> DeviceArray {
        DeviceArray { address, items, shape, ordinal, keep }
    }

    /// A DLPack capsule of it, of the form that all consumers take; of fp8 if the consumer `names_fp8`.
    pub(super) fn capsule<'py>(&self, py: Python<'py>, names_fp8: bool) -> PyResult<Bound<'py, PyAny>> {
        self.export(dtype(self.items, names_fp8)).capsule(py, None, None, None)
    }

    pub(super) fn object(self, py: Python<'_>) -> PyResult<Py<DeviceArray>> {
        Py::new(py, self.exporting())
    }

    fn exporting(self) -> PyClassInitializer<DeviceArray> {
        Exporter::with(self.export(dtype(self.items, false)), self)
    }

    fn export(&self, dtype: Dtype) -> Export {
        let (ptr, len) = (self.address as usize as *mut u8, self.nbytes());
        let bytes = Export::bytes(ptr, len, Place::Gpu(self.ordinal), self.keep.clone());
        bytes.of(dtype, typestr(self.items), self.shape.clone())
    }
}

/// Bytes of an array of that shape; `None` when that is more than any memory.
fn bytes(items: Item, shape: &[i64]) -> Option<usize> {
    shape.iter().try_fold(items.bytes() as usize, |bytes, extent| bytes.checked_mul(usize::try_from(*extent).ok()?))
}

#[pymethods]
impl DeviceArray {
    #[new]
    #[pyo3(signature = (memory, dtype, shape, offset = 0))]
    fn of(
        memory: &Bound<'_, MemoryBase>,
        dtype: &str,
        shape: Vec<i64>,
        offset: usize,
    ) -> PyResult<PyClassInitializer<DeviceArray>> {
        let py = memory.py();
        let _call = Call::enter(py);
        let wrong = |detail: String, hint: &str| errors::usage(py, "DeviceArray", detail, hint);
        let native = memory.get().native();
        let Place::Gpu(ordinal) = native.place() else {
            return Err(wrong("the memory is on the host".to_owned(), "Context.alloc(nbytes, \"cuda:0\")"));
        };
        let Some(items) = ALL.into_iter().find(|item| item.name() == dtype) else {
            let names: Vec<&str> = ALL.iter().map(|items| items.name()).collect();
            return Err(wrong(format!("no dtype {dtype:?}"), &names.join(", ")));
        };
        let end = bytes(items, &shape).and_then(|bytes| bytes.checked_add(offset));
        if end.is_none_or(|end| end > native.len()) {
            let detail = format!("{dtype} {shape:?} from byte {offset} on is more than {} bytes", native.len());
            return Err(wrong(detail, ""));
        }
        if !offset.is_multiple_of(items.bytes() as usize) {
            return Err(wrong(format!("offset {offset} is not a multiple of {}", items.bytes() as usize), ""));
        }
        let address = native.ptr() as usize as u64 + offset as u64;
        Ok(DeviceArray::new(address, items, shape, ordinal, Arc::new(native.clone())).exporting())
    }

    /// Address of the first element.
    #[getter]
    fn address(&self) -> u64 {
        self.address
    }

    /// The device, such as ``cuda:1``.
    #[getter]
    fn device(&self) -> String {
        Place::Gpu(self.ordinal).to_string()
    }

    /// Name of the dtype.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.items.name()
    }

    /// The shape.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// Size in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        bytes(self.items, &self.shape).unwrap_or(0)
    }

    /// Return the first `count` entries along the first axis, without a copy. Raises UsageError if there are fewer.
    fn first(&self, py: Python<'_>, count: i64) -> PyResult<Py<DeviceArray>> {
        let _call = Call::enter(py);
        let most = self.shape.first().copied().unwrap_or(0);
        if !(0..=most).contains(&count) {
            return Err(errors::usage(py, "first", format!("{count} of {most} entries"), ""));
        }
        let mut shape = self.shape.clone();
        shape[0] = count;
        DeviceArray::new(self.address, self.items, shape, self.ordinal, self.keep.clone()).object(py)
    }

    fn __len__(&self) -> usize {
        self.shape.first().map_or(0, |extent| *extent as usize)
    }

    fn __repr__(&self) -> String {
        format!("<crossrail.DeviceArray {} {:?} on {}>", self.items.name(), self.shape, Place::Gpu(self.ordinal))
    }
}
