//! What prepared operations ask of PyTorch's tensors: whether they are as prepared, and where they lie.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Alignment of rows, in bytes.
const ROW_UNIT: u64 = 16;

pub(crate) type Given<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

/// The value, or None for the caller of the closure around it.
macro_rules! some {
    ($value:expr) => {
        match $value {
            Some(value) => value,
            None => return Ok(None),
        }
    };
}
pub(crate) use some;

/// PyTorch's class of tensors, its dtypes and current stream, read once.
#[derive(FromPyObject)]
pub(crate) struct TensorKinds {
    /// `(ordinal) -> raw handle`: the current stream.
    current: Py<PyAny>,
    tensor: Py<PyAny>,
    pub(crate) bf16: Py<PyAny>,
    pub(crate) f32: Py<PyAny>,
    pub(crate) i32: Py<PyAny>,
    pub(crate) i64: Py<PyAny>,
    /// What `Tensor.get_device` gives.
    device: i64,
    pub(crate) ordinal: u32,
}

impl TensorKinds {
    /// Whether the object is a tensor.
    pub(crate) fn is_tensor(&self, object: &Bound<'_, PyAny>) -> PyResult<bool> {
        object.is_instance(self.tensor.bind(object.py()))
    }

    /// The caller's current stream.
    pub(crate) fn current(&self, py: Python<'_>) -> PyResult<u64> {
        self.current.bind(py).call1((self.ordinal,))?.extract()
    }

    /// Whether a tensor is of this dtype.
    pub(crate) fn is_dtype(&self, tensor: &Bound<'_, PyAny>, dtype: &Py<PyAny>) -> PyResult<bool> {
        let found = tensor.getattr_opt(intern!(tensor.py(), "dtype"))?;
        Ok(found.is_some_and(|found| found.is(dtype)))
    }

    /// Whether a tensor is of this dtype and on the buffer's GPU.
    fn is_here(&self, tensor: &Bound<'_, PyAny>, dtype: &Py<PyAny>) -> PyResult<bool> {
        let device = intern!(tensor.py(), "get_device");
        Ok(self.is_dtype(tensor, dtype)? && tensor.call_method0(device)?.extract::<i64>()? == self.device)
    }

    /// The address of a contiguous tensor of this dtype and shape on the buffer's GPU.
    pub(crate) fn small(&self, tensor: &Bound<'_, PyAny>, dtype: &Py<PyAny>, shape: &[u32]) -> PyResult<Option<u64>> {
        let fits = self.is_tensor(tensor)? && has_shape(tensor, shape)?;
        if fits { self.place(tensor, dtype) } else { Ok(None) }
    }

    /// The address of a contiguous tensor of this dtype on the buffer's GPU.
    pub(crate) fn place(&self, tensor: &Bound<'_, PyAny>, dtype: &Py<PyAny>) -> PyResult<Option<u64>> {
        let fits =
            self.is_here(tensor, dtype)? && tensor.call_method0(intern!(tensor.py(), "is_contiguous"))?.is_truthy()?;
        if fits { self.address(tensor).map(Some) } else { Ok(None) }
    }

    /// The address of a tensor that is as it should be.
    pub(crate) fn address(&self, tensor: &Bound<'_, PyAny>) -> PyResult<u64> {
        tensor.call_method0(intern!(tensor.py(), "data_ptr"))?.extract()
    }

    /// Both extents of a tensor of rows.
    pub(crate) fn extents(&self, object: &Bound<'_, PyAny>) -> PyResult<Option<(u32, u32)>> {
        if !self.is_tensor(object)? {
            return Ok(None);
        }
        Ok(object.getattr(intern!(object.py(), "shape"))?.extract().ok())
    }

    /// The address and strides, in items, of a tensor of this dtype and shape on the buffer's GPU.
    pub(crate) fn strided(
        &self,
        tensor: &Bound<'_, PyAny>,
        dtype: &Py<PyAny>,
        shape: [u32; 2],
    ) -> PyResult<Option<(u64, [u64; 2])>> {
        let fits = self.is_tensor(tensor)? && has_shape(tensor, &shape)? && self.is_here(tensor, dtype)?;
        if !fits {
            return Ok(None);
        }
        let (first, second) = tensor.call_method0(intern!(tensor.py(), "stride"))?.extract()?;
        Ok(Some((self.address(tensor)?, [first, second])))
    }

    /// The address of contiguous bf16 rows of this shape on the buffer's GPU, aligned as kernels want them.
    pub(crate) fn rows(&self, tensor: &Bound<'_, PyAny>, shape: &[u32]) -> PyResult<Option<u64>> {
        Ok(self.small(tensor, &self.bf16, shape)?.filter(is_aligned))
    }

    /// As `small`, and 0 for None.
    pub(crate) fn optional(&self, tensor: Given<'_, '_>, dtype: &Py<PyAny>, shape: &[u32]) -> PyResult<Option<u64>> {
        tensor.map_or(Ok(Some(0)), |tensor| self.small(tensor, dtype, shape))
    }
}

pub(crate) fn is_aligned(address: &u64) -> bool {
    address.is_multiple_of(ROW_UNIT)
}

pub(crate) fn has_shape(tensor: &Bound<'_, PyAny>, shape: &[u32]) -> PyResult<bool> {
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
