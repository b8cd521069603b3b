//! The memory of one operation, whatever it comes as: `Memory`, the buffer protocol, DLPack or
//! `__cuda_array_interface__`.
//!
//! What has the buffer protocol is host memory, so that is asked first: it costs least, and an object whose buffers
//! are refused is still asked whether it is a GPU's array.
#![allow(unsafe_code)]

use std::any::Any;
use std::sync::Arc;

use crossrail::{Buffer, Context, Place, Ready};
use crossrail_types::{Error, ErrorKind};
use pyo3::prelude::*;

use crate::cai;
use crate::dlpack::{self, Device};
use crate::errors;
use crate::layout::{Piece, Refusal, Whose};
use crate::lent::{self, LentTensor, Use};
use crate::memory::MemoryBase;
use crate::stream::Stream;

const HINT: &str = "memory of the host and of CUDA GPUs can be moved: copy it there first";
/// Tells an exporter that it has nothing to order.
const NO_ORDER: i64 = -1;

/// What an operation wants of the objects it is given.
pub(crate) struct Wanted<'a> {
    pub(crate) context: &'a Context,
    pub(crate) used: Use,
    /// The operation begins after the present work of this stream; `None`: after that of the stream the object names.
    pub(crate) stream: Option<Stream>,
    pub(crate) operation: &'a str,
}

impl Wanted<'_> {
    /// The memory of `object`, valid until the engine has done with it.
    pub(crate) fn of(&self, object: &Bound<'_, PyAny>) -> PyResult<Buffer> {
        if let Ok(memory) = object.cast::<MemoryBase>() {
            return self.memory(object, memory.get().native());
        }
        if lent::has_buffer(object) {
            match lent::bytes(object, self.used, self.operation) {
                Ok(lent) => {
                    self.refuse_stream(object.py())?;
                    return Ok(host(lent.ptr, lent.len, lent.keep));
                }
                Err(refused) if !on_gpu(object) => return Err(refused),
                Err(_) => {}
            }
        }
        if let Some(said) = dlpack::device(object)? {
            return self.tensor(object, said);
        }
        match cai::described(object, self.operation)? {
            Some(described) => self.interface(object, described),
            None => Err(errors::usage(
                object.py(),
                self.operation,
                format!("a {} has neither the buffer protocol nor DLPack nor __cuda_array_interface__", name(object)),
                "pass bytes, a bytearray, a memoryview, an array, a tensor or Context.alloc",
            )),
        }
    }

    fn tensor(&self, object: &Bound<'_, PyAny>, said: Device) -> PyResult<Buffer> {
        let py = object.py();
        let Whose::Gpu(ordinal) = whose(object, said, self.operation)? else {
            self.refuse_stream(py)?;
            let lent = tensor(object, said, None, self.used, self.operation)?;
            return Ok(host(lent.ptr as usize as *mut u8, lent.len, lent.keep));
        };
        let lent = |stream| tensor(object, said, Some(stream), self.used, self.operation).map_err(Failure::Python);
        let lend = || -> Result<(LentTensor, Ready), Failure> {
            py.detach(|| self.context.open_gpu(ordinal))?;
            match self.stream {
                None => Ready::ordered(self.context, ordinal, |handle| lent(handle.cast_signed())),
                Some(stream) => {
                    let tensor = self.context.on_gpu(ordinal, || lent(NO_ORDER))?;
                    Ok((tensor, self.after(ordinal, stream.handle)?))
                }
            }
        };
        let (tensor, after) = lend().map_err(|failure| self.restated(object, ordinal, failure))?;
        Ok(gpu(Piece { ptr: tensor.ptr, len: tensor.len }, ordinal, tensor.keep, Some(after)))
    }

    fn interface(&self, object: &Bound<'_, PyAny>, described: Result<cai::Described, Refusal>) -> PyResult<Buffer> {
        let py = object.py();
        let refuse = |refusal| refused(object, self.operation, refusal);
        let described = described.map_err(refuse)?;
        if described.read_only && self.used == Use::Write {
            return Err(refuse(read_only()));
        }
        if described.piece.len == 0 {
            return Ok(Buffer::from(Vec::new()));
        }
        let ordinal = py.detach(|| self.context.gpu_of(described.piece.ptr));
        let ordinal = ordinal.map_err(|error| self.restated(object, None, error.into()))?;
        let stream = self.stream.map(|stream| stream.handle).or(described.stream);
        let after = stream.map(|handle| self.after(ordinal, handle)).transpose();
        let after = after.map_err(|error| self.restated(object, ordinal, error.into()))?;
        let keep = lent::keep(lent::Loan::Object(object.clone().unbind()));
        Ok(gpu(described.piece, ordinal, keep, after))
    }

    fn memory(&self, object: &Bound<'_, PyAny>, memory: &crossrail::Memory) -> PyResult<Buffer> {
        let buffer = Buffer::from(memory);
        let Place::Gpu(ordinal) = memory.place() else {
            self.refuse_stream(object.py())?;
            return Ok(buffer);
        };
        let Some(stream) = self.stream else { return Ok(buffer) };
        let after = self.after(ordinal, stream.handle).and_then(|after| buffer.after(after));
        after.map_err(|error| self.restated(object, ordinal, error.into()))
    }

    /// The present work of a caller's stream.
    fn after(&self, ordinal: u32, handle: u64) -> crossrail_types::Result<Ready> {
        // SAFETY: that the stream is alive is the documented rule for callers.
        unsafe { Ready::on_stream(self.context, ordinal, handle) }
    }

    /// Host memory waits for no stream.
    fn refuse_stream(&self, py: Python<'_>) -> PyResult<()> {
        if self.stream.is_none() {
            return Ok(());
        }
        let detail = "a stream orders operations on GPU memory, and this is memory of the host";
        Err(errors::usage(py, self.operation, detail, "wait for the stream's work first"))
    }

    /// A failure that says whose memory it is about.
    fn restated(&self, object: &Bound<'_, PyAny>, ordinal: impl Into<Option<u32>>, failure: Failure) -> PyErr {
        let mut error = match failure {
            Failure::Python(error) => return error,
            Failure::Engine(error) => *error,
        };
        let place = ordinal.into().map_or_else(|| "a GPU".to_owned(), |ordinal| format!("cuda:{ordinal}"));
        error.detail = format!("the {} is memory of {place}: {}", name(object), error.detail);
        error.operation = self.operation.to_owned();
        errors::raise(object.py(), &error)
    }
}

/// Why memory of a GPU is not to be had.
enum Failure {
    Python(PyErr),
    Engine(Box<Error>),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Engine(Box::new(error))
    }
}

/// Memory of a GPU that `keep` keeps valid.
fn gpu(piece: Piece, ordinal: u32, keep: Arc<dyn Any + Send + Sync>, after: Option<Ready>) -> Buffer {
    if piece.len == 0 {
        return Buffer::from(Vec::new());
    }
    // SAFETY: its exporter says so, until the keeper is dropped; the engine asks the driver whether it is that GPU's
    // memory at all. That nobody else uses it meanwhile is the documented rule for callers.
    unsafe { Buffer::device(piece.ptr, piece.len, ordinal, Some(keep), after) }
}

/// Host memory that `keep` keeps valid.
fn host(ptr: *mut u8, len: usize, keep: Arc<dyn Any + Send + Sync>) -> Buffer {
    // SAFETY: valid for `len` bytes (writable where that was asked for) until the keeper is dropped. That nobody else
    // writes meanwhile is the documented rule for callers.
    unsafe { Buffer::raw(ptr, len, Some(keep)) }
}

fn on_gpu(object: &Bound<'_, PyAny>) -> bool {
    matches!(dlpack::device(object), Ok(Some(device)) if matches!(device.whose(), Ok(Whose::Gpu(_))))
}

/// Whose memory a DLPack device stands for.
pub(crate) fn whose(object: &Bound<'_, PyAny>, device: Device, operation: &str) -> PyResult<Whose> {
    let unreachable = |device| {
        let detail = format!("the {} is on {device}", name(object));
        errors::raise(object.py(), &Error::new(ErrorKind::Unsupported, operation, detail).with_hint(HINT))
    };
    device.whose().map_err(unreachable)
}

/// The tensor of `object`, which says that it is on `said`; `stream` as [`dlpack::import`] has it.
pub(crate) fn tensor(
    object: &Bound<'_, PyAny>,
    said: Device,
    stream: Option<i64>,
    used: Use,
    operation: &str,
) -> PyResult<LentTensor> {
    let imported = dlpack::import(object, stream, operation)?;
    // From here on the keeper calls the tensor's deleter.
    let keep = lent::keep(lent::Loan::Tensor(imported.tensor));
    let refuse = |refusal| Err(refused(object, operation, refusal));
    let there = imported.device.whose();
    if there != said.whose() {
        let named = |whose| match whose {
            Ok(Whose::Host) => "the host".to_owned(),
            Ok(Whose::Gpu(ordinal)) => format!("cuda:{ordinal}"),
            Err(name) => name,
        };
        return refuse((format!("says that it is on {}, and its capsule {}", named(said.whose()), named(there)), ""));
    }
    if imported.read_only && used == Use::Write {
        return refuse(read_only());
    }
    match imported.piece {
        Ok((Piece { ptr, len }, shape)) => Ok(LentTensor { ptr, len, dtype: imported.dtype, shape, keep }),
        Err(refusal) => refuse(refusal),
    }
}

fn read_only() -> Refusal {
    ("is read-only".to_owned(), "receive into something writable")
}

fn refused(object: &Bound<'_, PyAny>, operation: &str, (detail, hint): Refusal) -> PyErr {
    errors::usage(object.py(), operation, format!("the {} {detail}", name(object)), hint)
}

pub(crate) fn name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().name().map_or_else(|_| "object".to_owned(), |name| name.to_string())
}
