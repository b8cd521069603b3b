//! What prepared operations ask of PyTorch's tensors: whether they are as prepared, and where they lie.
#![allow(unsafe_code)]

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::borrow::dlpack::{CUDA, HOST};
use crate::borrow::exchange::{Exchange, Seen};

/// Alignment of rows, in bytes.
const ROW_UNIT: u64 = 16;

/// A tensor of the caller, or none.
pub(super) type Tensor<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

/// The value, or None for the caller of the closure around it.
macro_rules! some {
    ($value:expr) => {
        match $value {
            Some(value) => value,
            None => return Ok(None),
        }
    };
}
pub(super) use some;

/// PyTorch's class of tensors, its dtypes and current stream, read once.
#[derive(FromPyObject)]
pub(super) struct TensorKinds {
    /// `(ordinal) -> raw handle`: the current stream.
    current: Py<PyAny>,
    tensor: Py<PyAny>,
    pub(super) bf16: Py<PyAny>,
    pub(super) f32: Py<PyAny>,
    pub(super) i32: Py<PyAny>,
    pub(super) i64: Py<PyAny>,
    /// What `Tensor.get_device` gives.
    device: i64,
    pub(super) ordinal: u32,
    /// How to look at a tensor in one call, where PyTorch has one.
    exchange: Known,
}

/// What a capsule holds, if it holds what is wanted.
struct Known(Option<Exchange>);

impl<'py> FromPyObject<'py> for Known {
    fn extract_bound(object: &Bound<'py, PyAny>) -> PyResult<Known> {
        Ok(Known(Exchange::of(object)))
    }
}

/// A dtype's kind and bits in DLPack.
type Item = (u8, u8);

impl TensorKinds {
    /// What a tensor says of itself; None for one of a subclass, whose attributes may say something else.
    fn seen<'a>(&self, object: &'a Bound<'_, PyAny>) -> Option<Seen<'a>> {
        let exchange = self.exchange.0?;
        if object.get_type_ptr().cast() != self.tensor.as_ptr() {
            return None;
        }
        // SAFETY: the table is that of this class.
        unsafe { exchange.look(object) }
    }

    /// What DLPack calls a dtype.
    fn item(&self, dtype: &Py<PyAny>) -> Option<Item> {
        let known = [(&self.bf16, (4, 16)), (&self.f32, (2, 32)), (&self.i32, (0, 32)), (&self.i64, (0, 64))];
        known.into_iter().find(|(known, _)| known.is(dtype)).map(|(_, item)| item)
    }

    /// Whether what was seen is of this dtype, if that can be told.
    fn is_item(&self, seen: &Seen<'_>, dtype: &Py<PyAny>) -> Option<bool> {
        let found = &seen.dtype;
        self.item(dtype).map(|(code, bits)| (found.code, found.bits, found.lanes) == (code, bits, 1))
    }

    /// What a tensor says of itself, if it can be told from that whether it is of this dtype and on the buffer's GPU, and
    /// whether it is.
    fn seen_as<'a>(&self, tensor: &'a Bound<'_, PyAny>, dtype: &Py<PyAny>) -> Option<(Seen<'a>, bool)> {
        let seen = self.seen(tensor)?;
        let is_here = match self.device {
            -1 => seen.device.kind == HOST,
            device => seen.device.kind == CUDA && i64::from(seen.device.id) == device,
        };
        let is_item = self.is_item(&seen, dtype)?;
        Some((seen, is_item && is_here))
    }

    /// Whether the object is a tensor.
    pub(super) fn is_tensor(&self, object: &Bound<'_, PyAny>) -> PyResult<bool> {
        object.is_instance(self.tensor.bind(object.py()))
    }

    /// The caller's current stream.
    pub(super) fn current(&self, py: Python<'_>) -> PyResult<u64> {
        self.current.bind(py).call1((self.ordinal,))?.extract()
    }

    /// Whether a tensor is of this dtype.
    pub(super) fn is_dtype(&self, tensor: &Bound<'_, PyAny>, dtype: &Py<PyAny>) -> PyResult<bool> {
        if let Some(is_item) = self.seen(tensor).and_then(|seen| self.is_item(&seen, dtype)) {
            return Ok(is_item);
        }
        let found = tensor.getattr_opt(intern!(tensor.py(), "dtype"))?;
        Ok(found.is_some_and(|found| found.is(dtype)))
    }

    /// Whether a tensor is of this dtype and on the buffer's GPU.
    fn is_here(&self, tensor: &Bound<'_, PyAny>, dtype: &Py<PyAny>) -> PyResult<bool> {
        let device = intern!(tensor.py(), "get_device");
        Ok(self.is_dtype(tensor, dtype)? && tensor.call_method0(device)?.extract::<i64>()? == self.device)
    }

    /// The address of a contiguous tensor of this dtype and shape on the buffer's GPU.
    pub(super) fn small(&self, tensor: &Bound<'_, PyAny>, dtype: &Py<PyAny>, shape: &[u32]) -> PyResult<Option<u64>> {
        if let Some((seen, fits)) = self.seen_as(tensor, dtype) {
            return Ok((fits && seen.has_shape(shape) && seen.is_contiguous()).then_some(seen.address));
        }
        let fits = self.is_tensor(tensor)? && has_shape(tensor, shape)?;
        if fits { self.place(tensor, dtype) } else { Ok(None) }
    }

    /// The address of a contiguous tensor of this dtype on the buffer's GPU.
    pub(super) fn place(&self, tensor: &Bound<'_, PyAny>, dtype: &Py<PyAny>) -> PyResult<Option<u64>> {
        if let Some((seen, fits)) = self.seen_as(tensor, dtype) {
            return Ok((fits && seen.is_contiguous()).then_some(seen.address));
        }
        let fits =
            self.is_here(tensor, dtype)? && tensor.call_method0(intern!(tensor.py(), "is_contiguous"))?.is_truthy()?;
        if fits { self.address(tensor).map(Some) } else { Ok(None) }
    }

    /// The address of a tensor that is as it should be.
    pub(super) fn address(&self, tensor: &Bound<'_, PyAny>) -> PyResult<u64> {
        if let Some(seen) = self.seen(tensor) {
            return Ok(seen.address);
        }
        tensor.call_method0(intern!(tensor.py(), "data_ptr"))?.extract()
    }

    /// Both extents of a tensor of rows.
    pub(super) fn extents(&self, object: &Bound<'_, PyAny>) -> PyResult<Option<(u32, u32)>> {
        if let Some(seen) = self.seen(object) {
            let &[rows, columns] = seen.shape else { return Ok(None) };
            return Ok(rows.try_into().ok().zip(columns.try_into().ok()));
        }
        if !self.is_tensor(object)? {
            return Ok(None);
        }
        Ok(object.getattr(intern!(object.py(), "shape"))?.extract().ok())
    }

    /// The address and strides, in items, of a tensor of this dtype and shape on the buffer's GPU.
    pub(super) fn strided(
        &self,
        tensor: &Bound<'_, PyAny>,
        dtype: &Py<PyAny>,
        shape: [u32; 2],
    ) -> PyResult<Option<(u64, [u64; 2])>> {
        if let Some((seen, fits)) = self.seen_as(tensor, dtype) {
            if !fits || !seen.has_shape(&shape) {
                return Ok(None);
            }
            let &[first, second] = seen.strides.unwrap_or(&[i64::from(shape[1]), 1]) else { return Ok(None) };
            let steps = first.try_into().ok().zip(second.try_into().ok());
            return Ok(steps.map(|(first, second)| (seen.address, [first, second])));
        }
        let fits = self.is_tensor(tensor)? && has_shape(tensor, &shape)? && self.is_here(tensor, dtype)?;
        if !fits {
            return Ok(None);
        }
        let (first, second) = tensor.call_method0(intern!(tensor.py(), "stride"))?.extract()?;
        Ok(Some((self.address(tensor)?, [first, second])))
    }

    /// The address of contiguous bf16 rows of this shape on the buffer's GPU, aligned as kernels want them.
    pub(super) fn rows(&self, tensor: &Bound<'_, PyAny>, shape: &[u32]) -> PyResult<Option<u64>> {
        Ok(self.small(tensor, &self.bf16, shape)?.filter(is_aligned))
    }

    /// Whether the object has this shape.
    pub(super) fn has_shape(&self, object: &Bound<'_, PyAny>, shape: &[u32]) -> bool {
        match self.seen(object) {
            Some(seen) => seen.has_shape(shape),
            None => matches!(has_shape(object, shape), Ok(true)),
        }
    }

    /// As `small`, and 0 for None.
    pub(super) fn optional(&self, tensor: Tensor<'_, '_>, dtype: &Py<PyAny>, shape: &[u32]) -> PyResult<Option<u64>> {
        tensor.map_or(Ok(Some(0)), |tensor| self.small(tensor, dtype, shape))
    }
}

pub(super) fn is_aligned(address: &u64) -> bool {
    address.is_multiple_of(ROW_UNIT)
}

fn has_shape(tensor: &Bound<'_, PyAny>, shape: &[u32]) -> PyResult<bool> {
    let found = tensor.getattr(intern!(tensor.py(), "shape"))?;
    let found = found.cast::<PyTuple>()?;
    if found.len() != shape.len() {
        return Ok(false);
    }
    for (found, wanted) in found.iter().zip(shape) {
        if found.extract::<i64>()? != i64::from(*wanted) {
            return Ok(false);
        }
    }
    Ok(true)
}
