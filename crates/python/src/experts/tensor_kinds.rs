//! Metadata of PyTorch tensors passed as arguments of operations.
#![allow(unsafe_code)]

use std::borrow::Cow;

use crossrail_ep_cuda::arrays::{Array, Item, has_shape, unfit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::device_array::dtype;
use crate::borrow::dlpack::{CUDA, HOST};
use crate::borrow::exchange::{Exchange, TensorMeta};
use crate::objects::operand;
use crate::runtime::errors::{self, OrRaise};

/// An object of the caller's, and a tensor or none.
pub(super) type AnyRef<'a, 'py> = &'a Bound<'py, PyAny>;
pub(super) type Tensor<'a, 'py> = Option<AnyRef<'a, 'py>>;

/// PyTorch's class of tensors, its dtypes and current stream, read once.
#[derive(FromPyObject)]
pub(super) struct TensorKinds {
    /// `(ordinal) -> raw handle`: the current stream.
    current: Py<PyAny>,
    tensor: Py<PyAny>,
    /// The `torch.dtype` of each of `Item::ALL`; None where PyTorch has none.
    dtypes: Vec<Py<PyAny>>,
    /// What `Tensor.get_device` gives, and the `torch.device`.
    device: i64,
    on: Py<PyAny>,
    pub(super) ordinal: u32,
    /// Reads a tensor's metadata in one C call, where PyTorch has an exchange table.
    exchange: OptionalExchange,
}

/// The exchange table in a capsule, if it holds one of a known version.
struct OptionalExchange(Option<Exchange>);

impl<'py> FromPyObject<'py> for OptionalExchange {
    fn extract_bound(object: &Bound<'py, PyAny>) -> PyResult<OptionalExchange> {
        Ok(OptionalExchange(Exchange::of(object)))
    }
}

/// The parsed value; None on a UsageError, for which the caller builds the message.
pub(super) fn none_on_usage_error<T>(py: Python<'_>, read: PyResult<T>) -> PyResult<Option<T>> {
    read.map(Some).or_else(|error| if errors::is_usage(py, &error) { Ok(None) } else { Err(error) })
}

impl TensorKinds {
    /// Metadata of a tensor; None for a subclass, which may override the attributes.
    fn meta<'a>(&self, object: &'a Bound<'_, PyAny>) -> Option<TensorMeta<'a>> {
        let exchange = self.exchange.0?;
        if object.get_type_ptr().cast() != self.tensor.as_ptr() {
            return None;
        }
        // SAFETY: the table is that of this class.
        unsafe { exchange.describe(object) }
    }

    fn is_here(&self, meta: &TensorMeta<'_>) -> bool {
        match self.device {
            -1 => meta.device.kind == HOST,
            device => meta.device.kind == CUDA && i64::from(meta.device.id) == device,
        }
    }

    /// A tensor on the buffer's GPU as an array.
    pub(super) fn array<'a>(
        &self,
        tensor: &'a Bound<'_, PyAny>,
        name: (&'static str, &'static str),
    ) -> PyResult<Array<'a>> {
        if let Some(meta) = self.meta(tensor).filter(|meta| self.is_here(meta))
            && let Some(item) = Item::ALL.into_iter().find(|item| dtype(*item, true) == meta.dtype)
        {
            let (shape, strides) = (Cow::Borrowed(meta.shape), meta.strides.map(Cow::Borrowed));
            return Ok(Array { name, address: meta.address, dtype: Ok(item), shape, strides });
        }
        let py = tensor.py();
        if !tensor.is_instance(self.tensor.bind(py))? {
            let what = format!("is {}, but other arguments are PyTorch tensors", operand::one(tensor));
            return Err(unfit(name, &what)).or_raise(py);
        }
        if tensor.call_method0(intern!(py, "get_device"))?.extract::<i64>()? != self.device {
            let there = tensor.getattr(intern!(py, "device"))?;
            return Err(unfit(name, &format!("is on {there}, but the buffer is on {}", self.on))).or_raise(py);
        }
        let dtype = tensor.getattr(intern!(py, "dtype"))?;
        let known = self.dtypes.iter().zip(Item::ALL).find(|(known, _)| known.is(&dtype));
        let other = || dtype.to_string().trim_start_matches("torch.").to_owned();
        let dtype = known.map(|(_, item)| item).ok_or_else(other);
        let shape = Cow::Owned(shape(tensor)?);
        let is_whole = tensor.call_method0(intern!(py, "is_contiguous"))?.is_truthy()?;
        let strides = || tensor.call_method0(intern!(py, "stride"))?.extract().map(Cow::Owned);
        let strides = if is_whole { None } else { Some(strides()?) };
        Ok(Array { name, address: data_ptr(tensor)?, dtype, shape, strides })
    }

    /// Whether the object has this shape.
    pub(super) fn has_shape(&self, object: &Bound<'_, PyAny>, wanted: &[u64]) -> bool {
        match self.meta(object) {
            Some(meta) => has_shape(meta.shape, wanted),
            None => shape(object).is_ok_and(|shape| has_shape(&shape, wanted)),
        }
    }

    /// The caller's current stream.
    pub(super) fn current(&self, py: Python<'_>) -> PyResult<u64> {
        self.current.bind(py).call1((self.ordinal,))?.extract()
    }

    /// The address of a tensor that is as it should be.
    pub(super) fn address(&self, tensor: &Bound<'_, PyAny>) -> PyResult<u64> {
        self.meta(tensor).map_or_else(|| data_ptr(tensor), |meta| Ok(meta.address))
    }
}

fn shape(tensor: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    let shape = tensor.getattr(intern!(tensor.py(), "shape"))?;
    shape.cast::<PyTuple>()?.iter().map(|extent| extent.extract()).collect()
}

fn data_ptr(tensor: &Bound<'_, PyAny>) -> PyResult<u64> {
    tensor.call_method0(intern!(tensor.py(), "data_ptr"))?.extract()
}
