//! A GPU by CUDA: small synchronous copies, and what an address is.
#![allow(unsafe_code)]

use std::sync::{Arc, Weak};
use std::time::Duration;

use crossrail_cuda::{Context, Cuda, Event, MemoryKind, PinnedMemory, PointerInfo, Stream};
use crossrail_types::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use super::Ready;
use super::order::{self, Streams};
use super::ready::Point;

/// Pinned memory that synchronous copies go through.
const AREA: usize = 1 << 20;

/// One GPU's primary context, and what synchronous copies need.
pub(super) struct CudaDevice {
    context: Context,
    limit: Duration,
    /// Made by the first copy.
    copies: Mutex<Option<Copies>>,
    before: Streams,
    /// Events of `Ready`s that are gone.
    events: Arc<Mutex<Vec<Event>>>,
}

/// Events kept at most.
const KEPT: usize = 64;

/// An event that is used again when nobody asks for it any more.
pub(super) struct Kept {
    event: Option<Event>,
    pool: Weak<Mutex<Vec<Event>>>,
}

impl Kept {
    pub(super) fn is_done(&self) -> Result<bool> {
        self.event.as_ref().map_or(Ok(true), Event::is_done)
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let (Some(event), Some(pool)) = (self.event.take(), self.pool.upgrade()) {
            let mut pool = pool.lock();
            if pool.len() < KEPT {
                pool.push(event);
            }
        }
    }
}

struct Copies {
    stream: Stream,
    done: Event,
    area: PinnedMemory,
    /// A copy did not end in time: the area may still be in use.
    stuck: bool,
}

impl CudaDevice {
    pub(super) fn open(cuda: &Cuda, ordinal: u32, limit: Duration) -> Result<CudaDevice> {
        let context = Context::primary(&cuda.device(ordinal)?)?;
        Ok(CudaDevice { context, limit, copies: Mutex::default(), before: Streams::default(), events: Arc::default() })
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    pub(super) fn copy_in(&self, ptr: u64, bytes: &[u8]) -> Result<()> {
        self.with(|copies, limit| {
            for (part, at) in bytes.chunks(AREA).zip((ptr..).step_by(AREA)) {
                // SAFETY: the area has AREA bytes and no copy uses it; the target was checked by the caller.
                unsafe {
                    std::ptr::copy_nonoverlapping(part.as_ptr(), copies.area.as_ptr(), part.len());
                    copies.stream.copy_in(at, copies.area.as_ptr(), part.len())?;
                }
                copies.finish(limit)?;
            }
            Ok(())
        })
    }

    pub(super) fn copy_out(&self, ptr: u64, bytes: &mut [u8]) -> Result<()> {
        self.with(|copies, limit| {
            for (part, at) in bytes.chunks_mut(AREA).zip((ptr..).step_by(AREA)) {
                // SAFETY: the area has AREA bytes and no copy uses it; the source was checked by the caller.
                unsafe { copies.stream.copy_out(copies.area.as_ptr(), at, part.len())? };
                copies.finish(limit)?;
                // SAFETY: as above; the copy is done.
                unsafe { std::ptr::copy_nonoverlapping(copies.area.as_ptr(), part.as_mut_ptr(), part.len()) };
            }
            Ok(())
        })
    }

    /// Fills new memory with zeros.
    pub(super) fn zero(&self, ptr: u64, len: usize) -> Result<()> {
        self.with(|copies, limit| {
            // SAFETY: the memory is new and nobody else's.
            unsafe { copies.stream.fill(ptr, 0, len)? };
            copies.finish(limit)
        })
    }

    /// See [`super::Device::ready`].
    pub(super) unsafe fn ready(&self, stream: u64) -> Result<Ready> {
        // SAFETY: the caller vouches for the stream.
        let stream = unsafe { Stream::borrow(&self.context, stream)? };
        order::refuse_captured(&stream)?;
        self.point(&stream)
    }

    /// See [`super::Device::ordered`].
    pub(super) fn ordered<T, E: From<Error>>(
        &self,
        ask: impl FnOnce(u64) -> std::result::Result<T, E>,
    ) -> std::result::Result<(T, Ready), E> {
        self.before.ordered(&self.context, ask, |stream| self.point(stream))
    }

    fn point(&self, stream: &Stream) -> Result<Ready> {
        let kept = self.events.lock().pop();
        let event = kept.map_or_else(|| Event::new(&self.context), Ok)?;
        event.record(stream)?;
        Ok(Ready(Point::Cuda(Arc::new(Kept { event: Some(event), pool: Arc::downgrade(&self.events) }))))
    }

    fn with(&self, body: impl FnOnce(&mut Copies, Duration) -> Result<()>) -> Result<()> {
        let mut kept = self.copies.lock();
        let copies = match &mut *kept {
            Some(copies) => copies,
            empty => empty.insert(Copies {
                stream: Stream::urgent(&self.context)?, // as for staging
                done: Event::new(&self.context)?,
                area: PinnedMemory::new(&self.context, AREA)?,
                stuck: false,
            }),
        };
        if copies.stuck {
            copies.finish(self.limit)?;
        }
        body(copies, self.limit)
    }
}

impl Copies {
    /// Waits until everything put in is done.
    fn finish(&mut self, limit: Duration) -> Result<()> {
        self.stuck = true;
        self.done.record(&self.stream)?;
        self.done.wait(limit)?;
        self.stuck = false;
        Ok(())
    }
}

/// Whether `len` bytes at `ptr`, more than 0, are all memory of `context`'s GPU. Memory that moves between host and GPUs counts
/// as every GPU's.
pub(crate) fn check(context: &Context, ptr: u64, len: usize) -> Result<()> {
    let ordinal = context.device().ordinal();
    let usage = |detail: String| Error::new(ErrorKind::Usage, format!("memory of cuda:{ordinal}"), detail);
    let end = ptr.checked_add(len as u64).ok_or_else(|| usage(format!("{len} bytes at {ptr:#x} are no range")))?;
    let mut at = ptr;
    while at < end {
        let info = PointerInfo::of(context, at)?;
        let what = match (info.kind, info.device) {
            (MemoryKind::Managed, _) => None,
            (MemoryKind::Device, Some(owner)) if owner == ordinal => None,
            (MemoryKind::Device, Some(owner)) => Some(format!("memory of cuda:{owner}")),
            (MemoryKind::Device, None) => Some("memory of an unknown GPU".to_owned()),
            (MemoryKind::Pinned, _) => Some("pinned host memory".to_owned()),
            (MemoryKind::Unknown, _) => Some("no memory that the CUDA driver knows: freed, or of the host".to_owned()),
        };
        if let Some(what) = what {
            return Err(usage(if at == ptr {
                format!("{ptr:#x} is {what}")
            } else {
                format!("of {len} bytes at {ptr:#x} only the first {} are; what follows is {what}", at - ptr)
            })
            .with_hint("name the memory's own device, and a range inside one allocation"));
        }
        let known = info.base.saturating_add(info.len);
        // Where the driver does not say how far it goes, the last byte is asked for too.
        at = if known > at { known } else { (end - 1).max(at + 1) };
    }
    Ok(())
}
