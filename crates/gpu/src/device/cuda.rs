//! A real GPU: small synchronous copies, and points in streams.
#![allow(unsafe_code)]

use std::sync::{Arc, Weak};
use std::time::Duration;

use crossrail_cuda::{Context, Cuda, Event, PinnedMemory, Stream};
use crossrail_locks::Mutex;
use crossrail_types::{Error, Result};

use super::ordering::{self, OrderingStreams};
use crate::scratch::{BLOCKS_LEN, Blocks};
use crate::stream_point::{Reached, StreamPoint};

/// Bytes of pinned memory that synchronous copies go through.
const AREA: usize = 1 << 20;

/// One GPU's primary context, and what synchronous copies need.
pub(super) struct CudaDevice {
    context: Context,
    limit: Duration,
    /// Made by the first copy.
    copies: Mutex<Option<Copies>>,
    ordering: OrderingStreams,
    /// Events of dropped [`StreamPoint`]s, for reuse.
    events: Arc<Mutex<Vec<Event>>>,
}

/// Events kept for reuse, at most.
const KEPT: usize = 64;

/// An event that returns to its pool when dropped.
struct PooledEvent {
    event: Option<Event>,
    pool: Weak<Mutex<Vec<Event>>>,
}

impl Reached for PooledEvent {
    fn is_reached(&self) -> Result<bool> {
        self.event.as_ref().map_or(Ok(true), Event::is_done)
    }
}

impl Drop for PooledEvent {
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
    /// A copy did not finish in time: the GPU may still access the area.
    stuck: bool,
}

impl CudaDevice {
    pub(super) fn open(cuda: &Cuda, ordinal: u32, limit: Duration) -> Result<CudaDevice> {
        let context = Context::primary(&cuda.device(ordinal)?)?;
        Ok(CudaDevice {
            context,
            limit,
            copies: Mutex::default(),
            ordering: OrderingStreams::default(),
            events: Arc::default(),
        })
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    /// Pinned memory for short messages.
    pub(super) fn blocks(&self) -> Result<Arc<Blocks>> {
        let memory = PinnedMemory::new(&self.context, BLOCKS_LEN)?;
        // SAFETY: its own bytes, which nobody uses yet.
        unsafe { memory.as_ptr().write_bytes(0, BLOCKS_LEN) };
        Ok(Blocks::new(memory.as_ptr(), Arc::new(memory)))
    }

    /// `pinned`: `bytes` are in a block.
    pub(super) fn copy_in(&self, ptr: u64, bytes: &[u8], pinned: bool) -> Result<()> {
        self.with(|copies, limit| {
            if pinned {
                // SAFETY: pinned memory that the caller holds; the target was checked by the caller.
                unsafe { copies.stream.copy_in(ptr, bytes.as_ptr(), bytes.len())? };
                return copies.finish(limit);
            }
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

    /// As [`CudaDevice::copy_in`].
    pub(super) fn copy_out(&self, ptr: u64, bytes: &mut [u8], pinned: bool) -> Result<()> {
        self.with(|copies, limit| {
            if pinned {
                // SAFETY: as above.
                unsafe { copies.stream.copy_out(bytes.as_mut_ptr(), ptr, bytes.len())? };
                return copies.finish(limit);
            }
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

    /// See [`super::Device::stream_point`].
    pub(super) unsafe fn stream_point(&self, stream: u64) -> Result<StreamPoint> {
        // SAFETY: the caller vouches for the stream.
        let stream = unsafe { Stream::borrow(&self.context, stream)? };
        ordering::refuse_captured(&stream)?;
        self.point(&stream)
    }

    /// See [`super::Device::ordered`].
    pub(super) fn ordered<T, E: From<Error>>(
        &self,
        ask: impl FnOnce(u64) -> std::result::Result<T, E>,
    ) -> std::result::Result<(T, StreamPoint), E> {
        self.ordering.ordered(&self.context, ask, |stream| self.point(stream))
    }

    fn point(&self, stream: &Stream) -> Result<StreamPoint> {
        let kept = self.events.lock().pop();
        let event = kept.map_or_else(|| Event::new(&self.context), Ok)?;
        event.record(stream)?;
        Ok(StreamPoint::new(stream.handle(), PooledEvent { event: Some(event), pool: Arc::downgrade(&self.events) }))
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
    /// Waits until all submitted work is complete.
    fn finish(&mut self, limit: Duration) -> Result<()> {
        self.stuck = true;
        self.done.record(&self.stream)?;
        self.done.wait(limit)?;
        self.stuck = false;
        Ok(())
    }
}
