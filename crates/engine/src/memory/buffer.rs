//! Memory that an operation reads or writes: host memory or GPU memory.
#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crossrail_gpu::{Device, DeviceAlloc, Scratch, StreamPoint};
use crossrail_shm::Segment;
use crossrail_types::{Error, ErrorKind, Result};

use super::gpu_times::GpuTimes;

/// A kind of memory: host memory, or that of one GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Place {
    /// Host memory.
    #[default]
    Host,
    /// Memory of the GPU with this ordinal, in CUDA's order.
    Gpu(u32),
}

/// Host or GPU memory, ours or a peer's: determines which link accesses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Host,
    Gpu,
}

impl Space {
    /// Of the memory of that GPU, if there is one.
    #[inline]
    pub(crate) fn of<T>(gpu: Option<T>) -> Space {
        if gpu.is_some() { Space::Gpu } else { Space::Host }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Host => f.write_str("cpu"),
            Place::Gpu(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl std::str::FromStr for Place {
    type Err = Error;

    /// `cpu`, `cuda` (the first GPU), or `cuda:1`; `Usage` for anything else.
    fn from_str(text: &str) -> Result<Place> {
        let gpu = match text.trim() {
            "cpu" => return Ok(Place::Host),
            "cuda" => Some(0),
            text => text.strip_prefix("cuda:").and_then(|number| number.parse().ok()),
        };
        gpu.map(Place::Gpu)
            .ok_or_else(|| usage("device", &format!("{text:?} is no device")).with_hint("cpu, cuda or cuda:1"))
    }
}

/// Memory that peers on the same machine can map, so that transfers to them are one plain copy without a system call:
/// from [`Context::alloc`](crate::Context::alloc) or [`Context::alloc_on`](crate::Context::alloc_on). Zeroed when new;
/// freed when the last clone and the last request that uses it are dropped.
///
/// A peer may write into it at any time while it is registered or receiving, so Rust references to its bytes
/// are never handed out; use [`Memory::copy_to`] and [`Memory::fill_from`].
#[derive(Clone, Debug)]
pub struct Memory(pub(crate) Backing);

#[derive(Clone, Debug)]
pub(crate) enum Backing {
    Host(Segment),
    Gpu(DeviceAlloc),
}

impl Memory {
    /// Address of the first byte: a host address, or a device address that the CPU must not dereference.
    pub fn ptr(&self) -> *mut u8 {
        match &self.0 {
            Backing::Host(segment) => segment.ptr(),
            Backing::Gpu(memory) => memory.ptr() as *mut u8,
        }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        match &self.0 {
            Backing::Host(segment) => segment.len(),
            Backing::Gpu(memory) => memory.len(),
        }
    }

    /// Whether it holds no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where it is.
    pub fn place(&self) -> Place {
        match &self.0 {
            Backing::Host(_) => Place::Host,
            Backing::Gpu(memory) => Place::Gpu(memory.device().ordinal()),
        }
    }

    /// Copies `bytes` to `offset` and returns when they are there. Not ordered with work in any GPU stream.
    ///
    /// # Errors
    /// `Usage` when they do not fit; for GPU memory `Timeout` (`CROSSRAIL_TIMEOUT`) and the driver's errors.
    pub fn fill_from(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        check(self.len(), offset, bytes.len(), "fill_from")?;
        match &self.0 {
            // SAFETY: in bounds by the check; the segment stays mapped while `self` lives.
            Backing::Host(segment) => unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), segment.ptr().add(offset), bytes.len());
            },
            Backing::Gpu(memory) => memory.device().copy_in(memory.ptr() + offset as u64, bytes)?,
        }
        Ok(())
    }

    /// Copies from `offset` into `bytes`. Not ordered with work in any GPU stream.
    ///
    /// # Errors
    /// `Usage` when the range is out of bounds; for GPU memory as [`Memory::fill_from`].
    pub fn copy_to(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        check(self.len(), offset, bytes.len(), "copy_to")?;
        match &self.0 {
            // SAFETY: in bounds by the check; the segment stays mapped while `self` lives.
            Backing::Host(segment) => unsafe {
                std::ptr::copy_nonoverlapping(segment.ptr().add(offset), bytes.as_mut_ptr(), bytes.len());
            },
            Backing::Gpu(memory) => memory.device().copy_out(memory.ptr() + offset as u64, bytes)?,
        }
        Ok(())
    }

    /// The part `range` of it, as an operation's buffer. Errors with `Usage` when the range is out of bounds.
    pub fn slice(&self, range: Range<usize>) -> Result<Buffer> {
        let len =
            range.end.checked_sub(range.start).ok_or_else(|| usage("slice", "the range ends before it starts"))?;
        check(self.len(), range.start, len, "slice")?;
        let mut buffer = Buffer::from(self);
        buffer.ptr = buffer.ptr.wrapping_add(range.start);
        buffer.len = len;
        Ok(buffer)
    }

    /// The memory of a GPU; `None` for host memory.
    pub(crate) fn on_gpu(&self) -> Option<&DeviceAlloc> {
        match &self.0 {
            Backing::Host(_) => None,
            Backing::Gpu(memory) => Some(memory),
        }
    }
}

/// Whether `len` bytes at `offset` are inside a memory of `whole` bytes.
pub(crate) fn check(whole: usize, offset: usize, len: usize, operation: &str) -> Result<()> {
    match offset.checked_add(len) {
        Some(end) if end <= whole => Ok(()),
        _ => Err(usage(operation, &format!("{len} bytes at {offset} of a memory of {whole} bytes"))),
    }
}

fn usage(operation: &str, detail: &str) -> Error {
    Error::new(ErrorKind::Usage, operation, detail)
}

/// Whatever keeps an operation's bytes alive until it is finished.
// A tag of its own: otherwise the kind is decoded from the capacity of the `Vec`, several times per message.
#[repr(u8)]
pub(crate) enum Keep {
    Nothing,
    Segment(#[allow(dead_code)] Segment),
    Gpu(#[allow(dead_code)] DeviceAlloc),
    Vec(Vec<u8>),
    /// A copy, what keeps the original, and a token of the copy.
    Copy(#[allow(dead_code)] Box<(Scratch, Keep, Arc<()>)>),
    /// Bytes gathered from rows, and what keeps the rows.
    Packed(#[allow(dead_code)] Box<(Vec<u8>, Keep)>),
    Shared(#[allow(dead_code)] Arc<dyn Any + Send + Sync>),
}

impl Keep {
    /// Moves it to `to`, which keeps nothing.
    #[inline(always)]
    pub(crate) fn move_to(&mut self, to: &mut Keep) {
        debug_assert!(matches!(to, Keep::Nothing));
        match self {
            Keep::Nothing => {}
            Keep::Segment(segment) => {
                // SAFETY: as for `drop_segment`. By its pointer alone: copied as a whole, it would be read in pieces
                // longer than those in which it has just been written, for which the processor waits until they are in
                // its cache.
                let segment = unsafe { std::ptr::read(segment) };
                // SAFETY: `self` was read above, and `to` keeps nothing: neither is to be dropped.
                unsafe {
                    std::ptr::write(self, Keep::Nothing);
                    std::ptr::write(to, Keep::Segment(segment));
                }
            }
            _ => self.swap_with(to),
        }
    }

    #[inline(never)]
    fn swap_with(&mut self, other: &mut Keep) {
        std::mem::swap(self, other);
    }

    /// Drops what is known to be a segment.
    #[inline(always)]
    pub(crate) fn drop_segment(&mut self) {
        if let Keep::Segment(segment) = self {
            // SAFETY: the segment is moved out of `self`, which is overwritten at once without being dropped: it is
            // owned once all the time, and nothing in between can panic. (`mem::replace` moves the longest kind,
            // twice.)
            let segment = unsafe { std::ptr::read(segment) };
            // SAFETY: a reference; see above.
            unsafe { std::ptr::write(self, Keep::Nothing) };
            drop(segment);
        }
    }
}

/// The bytes of one operation, kept alive until the operation is finished.
pub struct Buffer {
    pub(crate) ptr: *mut u8,
    pub(crate) len: usize,
    pub(crate) keep: Keep,
    /// `None`: host memory.
    pub(crate) gpu: Option<Box<OnGpu>>,
}

/// What is known of GPU memory.
pub(crate) struct OnGpu {
    pub(crate) ordinal: u32,
    /// The GPU, once the driver has confirmed that the memory belongs to it.
    pub(crate) device: Option<Arc<Device>>,
    pub(crate) after: Option<StreamPoint>,
    /// Staging times of the operation that uses it.
    pub(crate) times: GpuTimes,
}

// SAFETY: a Buffer owns (or, for `raw` and `device`, was promised) memory that any thread may touch until it is
// dropped.
unsafe impl Send for Buffer {}

impl Buffer {
    /// Memory that the caller owns.
    ///
    /// # Safety
    /// `ptr` must be valid for `len` bytes, for writing if the operation receives, until `keep` is dropped or,
    /// without `keep`, until the operation is finished; nothing may write to it while it is sent, nor access
    /// it while it is received into.
    pub unsafe fn raw(ptr: *mut u8, len: usize, keep: Option<Arc<dyn Any + Send + Sync>>) -> Buffer {
        Buffer { ptr, len, keep: keep.map_or(Keep::Nothing, Keep::Shared), gpu: None }
    }

    /// Memory of GPU `ordinal` that the caller owns. The operation checks with the driver that it belongs to that GPU,
    /// and accesses it only once `after` is reached; later operations of the same endpoint wait behind it, so that
    /// messages keep their order.
    ///
    /// # Safety
    /// As [`Buffer::raw`], for the GPU: from `after` on nothing may write to it while it is sent, nor touch it while
    /// it is received into.
    pub unsafe fn device(
        ptr: u64,
        len: usize,
        ordinal: u32,
        keep: Option<Arc<dyn Any + Send + Sync>>,
        after: Option<Ready>,
    ) -> Buffer {
        let after = after.map(|after| after.0);
        let gpu = Some(Box::new(OnGpu { ordinal, device: None, after, times: GpuTimes::default() }));
        Buffer { ptr: ptr as *mut u8, len, keep: keep.map_or(Keep::Nothing, Keep::Shared), gpu }
    }

    #[cold]
    fn of_gpu(memory: &DeviceAlloc) -> Buffer {
        let device = memory.device().clone();
        let (ptr, len) = (memory.ptr() as *mut u8, memory.len());
        let gpu = OnGpu { ordinal: device.ordinal(), device: Some(device), after: None, times: GpuTimes::default() };
        Buffer { ptr, len, keep: Keep::Gpu(memory.clone()), gpu: Some(Box::new(gpu)) }
    }

    /// The same GPU memory, accessed only once `after` is reached.
    ///
    /// # Errors
    /// `Usage` for host memory.
    pub fn after(mut self, after: Ready) -> Result<Buffer> {
        match &mut self.gpu {
            Some(gpu) => {
                gpu.after = Some(after.0);
                Ok(self)
            }
            None => Err(usage("after", "host memory waits for no stream")),
        }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it is.
    pub fn place(&self) -> Place {
        self.gpu.as_ref().map_or(Place::Host, |gpu| Place::Gpu(gpu.ordinal))
    }
}

impl From<&Memory> for Buffer {
    #[inline]
    fn from(memory: &Memory) -> Buffer {
        match &memory.0 {
            Backing::Host(segment) => {
                let (ptr, len) = (segment.ptr(), segment.len());
                Buffer { ptr, len, keep: Keep::Segment(segment.clone()), gpu: None }
            }
            Backing::Gpu(memory) => Buffer::of_gpu(memory),
        }
    }
}

impl From<Vec<u8>> for Buffer {
    fn from(mut bytes: Vec<u8>) -> Buffer {
        Buffer { ptr: bytes.as_mut_ptr(), len: bytes.len(), keep: Keep::Vec(bytes), gpu: None }
    }
}

impl From<Box<[u8]>> for Buffer {
    fn from(bytes: Box<[u8]>) -> Buffer {
        Vec::from(bytes).into()
    }
}

/// A point in a stream of the caller's, before which an operation does not access its memory.
#[derive(Clone, Debug)]
pub struct Ready(pub(crate) StreamPoint);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_written_as_they_are_read() {
        for (text, place) in [("cpu", Place::Host), ("cuda:0", Place::Gpu(0)), ("cuda:7", Place::Gpu(7))] {
            assert_eq!(text.parse::<Place>().unwrap(), place);
            assert_eq!(place.to_string(), text);
        }
        assert_eq!("cuda".parse::<Place>().unwrap(), Place::Gpu(0));
        for text in ["gpu", "cuda:", "cuda:x", "cuda:-1", "", "mps:0"] {
            assert_eq!(text.parse::<Place>().unwrap_err().kind, ErrorKind::Usage, "{text}");
        }
    }
}
