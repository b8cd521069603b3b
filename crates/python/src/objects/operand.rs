//! Resolves the memory of one operation from `Memory`, the buffer protocol, DLPack or `__cuda_array_interface__`.
//!
//! The buffer protocol is tried first: it is the cheapest, and always host memory. If the object refuses, the GPU
//! protocols are tried.
#![allow(unsafe_code)]

use std::any::Any;
use std::sync::Arc;

use crossrail::{Buffer, Context, Place, Ready};
use crossrail_types::{Error, ErrorKind};
use pyo3::prelude::*;

use super::memory::MemoryBase;
use crate::borrow::cai;
use crate::borrow::dlpack::{self, Device};
use crate::borrow::layout::{Owner, Piece, Refusal};
use crate::borrow::lent::{self, BorrowedTensor, Use};
use crate::borrow::loan::{Loan, keep};
use crate::borrow::stream::Stream;
use crate::runtime::errors::{self, OrRaise};
use crate::runtime::gate;

const HINT: &str = "only host memory and CUDA GPU memory can be transferred: copy it there first";
/// DLPack stream argument: the exporter need not synchronize.
const NO_ORDER: i64 = -1;

/// Requirements of an operation on its operands.
pub(super) struct OperandSpec<'a> {
    pub(super) context: &'a Context,
    pub(super) used: Use,
    /// The operation is ordered after this stream's pending work; `None`: after that of the stream the object reports.
    pub(super) stream: Option<Stream>,
    pub(super) operation: &'a str,
}

/// Memory of an object, valid until `keep` is dropped.
pub(super) struct Operand {
    pub(super) piece: Piece,
    pub(super) place: Place,
    keep: Keep,
    after: Option<Ready>,
}

enum Keep {
    Memory(crossrail::Memory),
    Loan(Arc<dyn Any + Send + Sync>),
}

/// How an operation is ordered after pending work on an object's memory.
enum Order {
    /// By [`OperandSpec::stream`].
    Ready,
    /// By the exporter, which makes this stream wait for its pending work.
    Before(i64),
}

impl OperandSpec<'_> {
    /// The memory of `object`, valid until the engine has done with it.
    pub(super) fn of(&self, object: &Bound<'_, PyAny>) -> PyResult<Buffer> {
        let Operand { piece, place, keep, after } = self.operand(object, &Order::Ready)?;
        let keep = match keep {
            Keep::Memory(memory) => {
                let buffer = Buffer::from(&memory);
                return after.map_or(Ok(buffer), |after| Buffer::from(&memory).after(after)).or_raise(object.py());
            }
            Keep::Loan(keep) => keep,
        };
        // SAFETY: valid for `len` bytes (writable where that was asked for) until the keeper is dropped, says its
        // exporter; of a GPU's, the engine asks the driver too. That nobody else uses it meanwhile is the documented
        // rule for callers.
        Ok(unsafe {
            match place {
                Place::Host => Buffer::raw(piece.ptr as usize as *mut u8, piece.len, Some(keep)),
                Place::Gpu(_) if piece.len == 0 => Buffer::from(Vec::new()),
                Place::Gpu(ordinal) => Buffer::device(piece.ptr, piece.len, ordinal, Some(keep), after),
            }
        })
    }

    /// The memory of `object`, for work enqueued in `stream` itself. A DLPack exporter makes `stream` wait for its
    /// pending work, unless the caller passed the stream: then the caller is responsible for ordering.
    pub(super) fn on(&self, object: &Bound<'_, PyAny>, stream: u64) -> PyResult<Operand> {
        // DLPack's number for the default stream.
        const DEFAULT: i64 = 1;
        let before = match (self.stream, stream) {
            (Some(_), _) => NO_ORDER,
            (None, 0) => DEFAULT,
            (None, handle) => handle.cast_signed(),
        };
        self.operand(object, &Order::Before(before))
    }

    fn operand(&self, object: &Bound<'_, PyAny>, order: &Order) -> PyResult<Operand> {
        if let Ok(memory) = object.cast::<MemoryBase>() {
            return self.memory(object, memory.get().native(), order);
        }
        if lent::has_buffer(object) {
            match lent::bytes(object, self.used, self.operation) {
                Ok(lent) => {
                    self.refuse_stream(object.py())?;
                    return Ok(on_host(lent.ptr as usize as u64, lent.len, lent.keep));
                }
                Err(refused) if !on_gpu(object) => return Err(refused),
                Err(_) => {}
            }
        }
        if let Some(said) = dlpack::device(object, self.operation)? {
            return self.tensor(object, said, order);
        }
        match cai::described(object, self.operation)? {
            Some(described) => self.interface(object, described, order),
            None => Err(errors::usage(
                object.py(),
                self.operation,
                format!("{} has neither the buffer protocol nor DLPack nor __cuda_array_interface__", one(object)),
                "pass bytes, a bytearray, a memoryview, an array, a tensor or Context.alloc",
            )),
        }
    }

    fn tensor(&self, object: &Bound<'_, PyAny>, said: Device, order: &Order) -> PyResult<Operand> {
        let py = object.py();
        let Owner::Gpu(ordinal) = owner(object, said, self.operation)? else {
            self.refuse_stream(py)?;
            let lent = tensor(object, said, None, self.used, self.operation)?;
            return Ok(on_host(lent.ptr, lent.len, lent.keep));
        };
        let lent = |stream| tensor(object, said, Some(stream), self.used, self.operation).map_err(Failure::Python);
        let lend = || -> Result<(BorrowedTensor, Option<Ready>), Failure> {
            gate::detached(py, || self.context.open_gpu(ordinal))?;
            match (order, self.stream) {
                (Order::Before(handle), _) => Ok((self.context.on_gpu(ordinal, || lent(*handle))?, None)),
                (Order::Ready, None) => {
                    let ordered = |handle: u64| lent(handle.cast_signed());
                    Ready::ordered(self.context, ordinal, ordered).map(|(tensor, after)| (tensor, Some(after)))
                }
                (Order::Ready, Some(stream)) => {
                    let tensor = self.context.on_gpu(ordinal, || lent(NO_ORDER))?;
                    Ok((tensor, Some(self.after(ordinal, stream.handle)?)))
                }
            }
        };
        let (tensor, after) = lend().map_err(|failure| self.with_place(object, ordinal, failure))?;
        let piece = Piece { ptr: tensor.ptr, len: tensor.len };
        Ok(Operand { piece, place: Place::Gpu(ordinal), keep: Keep::Loan(tensor.keep), after })
    }

    fn interface(
        &self,
        object: &Bound<'_, PyAny>,
        described: Result<cai::Described, Refusal>,
        order: &Order,
    ) -> PyResult<Operand> {
        let py = object.py();
        let refuse = |refusal| refused(object, self.operation, refusal);
        let described = described.map_err(refuse)?;
        if described.read_only && self.used == Use::Write {
            return Err(refuse(read_only()));
        }
        let keep = keep(Loan::Object(object.clone().unbind()));
        if described.piece.len == 0 {
            return Ok(on_host(described.piece.ptr, 0, keep));
        }
        let ordinal = gate::detached(py, || self.context.gpu_of(described.piece.ptr));
        let ordinal = ordinal.map_err(|error| self.with_place(object, None, error.into()))?;
        let after = match order {
            Order::Ready => self.stream.map(|stream| stream.handle).or(described.stream),
            // The interface has no call that orders pending work before a stream; the caller is responsible.
            Order::Before(_) => None,
        };
        let after = after.map(|handle| self.after(ordinal, handle)).transpose();
        let after = after.map_err(|error| self.with_place(object, ordinal, error.into()))?;
        Ok(Operand { piece: described.piece, place: Place::Gpu(ordinal), keep: Keep::Loan(keep), after })
    }

    fn memory(&self, object: &Bound<'_, PyAny>, memory: &crossrail::Memory, order: &Order) -> PyResult<Operand> {
        let piece = Piece { ptr: memory.ptr() as usize as u64, len: memory.len() };
        let after = match (memory.place(), order, self.stream) {
            (Place::Host, ..) => {
                self.refuse_stream(object.py())?;
                None
            }
            (Place::Gpu(ordinal), Order::Ready, Some(stream)) => Some(
                self.after(ordinal, stream.handle).map_err(|error| self.with_place(object, ordinal, error.into()))?,
            ),
            _ => None,
        };
        Ok(Operand { piece, place: memory.place(), keep: Keep::Memory(memory.clone()), after })
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

    /// Adds the object and its device to an engine error.
    fn with_place(&self, object: &Bound<'_, PyAny>, ordinal: impl Into<Option<u32>>, failure: Failure) -> PyErr {
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

/// Why GPU memory cannot be accessed.
enum Failure {
    Python(PyErr),
    Engine(Box<Error>),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Engine(Box::new(error))
    }
}

/// Host memory that `keep` keeps valid.
fn on_host(ptr: u64, len: usize, keep: Arc<dyn Any + Send + Sync>) -> Operand {
    Operand { piece: Piece { ptr, len }, place: Place::Host, keep: Keep::Loan(keep), after: None }
}

fn on_gpu(object: &Bound<'_, PyAny>) -> bool {
    matches!(dlpack::device(object, ""), Ok(Some(device)) if matches!(device.owner(), Ok(Owner::Gpu(_))))
}

/// The owner of the memory of a DLPack device; raises `UnsupportedError` for other kinds of device.
pub(super) fn owner(object: &Bound<'_, PyAny>, device: Device, operation: &str) -> PyResult<Owner> {
    let unreachable = |device| {
        let detail = format!("the {} is on {device}", name(object));
        errors::raise(object.py(), &Error::new(ErrorKind::Unsupported, operation, detail).with_hint(HINT))
    };
    device.owner().map_err(unreachable)
}

/// The tensor of `object`, which says that it is on `said`; `stream` as [`dlpack::import`] has it.
pub(super) fn tensor(
    object: &Bound<'_, PyAny>,
    said: Device,
    stream: Option<i64>,
    used: Use,
    operation: &str,
) -> PyResult<BorrowedTensor> {
    let imported = dlpack::import(object, stream, operation)?;
    // From here on the keeper calls the tensor's deleter.
    let keep = keep(Loan::Tensor(imported.tensor));
    let refuse = |refusal| Err(refused(object, operation, refusal));
    let there = imported.device.owner();
    if there != said.owner() {
        let named = |owner| match owner {
            Ok(Owner::Host) => "the host".to_owned(),
            Ok(Owner::Gpu(ordinal)) => format!("cuda:{ordinal}"),
            Err(name) => name,
        };
        return refuse((format!("claims to be on {}, its capsule is on {}", named(said.owner()), named(there)), ""));
    }
    if imported.read_only && used == Use::Write {
        return refuse(read_only());
    }
    match imported.piece {
        Ok((Piece { ptr, len }, shape)) => Ok(BorrowedTensor { ptr, len, dtype: imported.dtype, shape, keep }),
        Err(refusal) => refuse(refusal),
    }
}

fn read_only() -> Refusal {
    ("is read-only".to_owned(), "receive into a writable array")
}

fn refused(object: &Bound<'_, PyAny>, operation: &str, (detail, hint): Refusal) -> PyErr {
    errors::usage(object.py(), operation, format!("the {} {detail}", name(object)), hint)
}

/// `an int`, `a str`: an object of its type.
pub(crate) fn one(object: &Bound<'_, PyAny>) -> String {
    let name = name(object);
    let article = if name.starts_with(['a', 'e', 'i', 'o', 'A', 'E', 'I', 'O']) { "an" } else { "a" };
    format!("{article} {name}")
}

pub(super) fn name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().name().map_or_else(|_| "object".to_owned(), |name| name.to_string())
}
