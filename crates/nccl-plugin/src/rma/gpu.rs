//! Copies to and from GPU memory: enqueued in one of our streams, complete once it has stored a word in pinned memory.
//!
//! NCCL's kernels may occupy every multiprocessor and wait for what these copies bring. So nothing here launches a kernel,
//! synchronizes or allocates once a group has its streams: copy engines copy, and streams store words.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crossrail_cuda::{Absent, Batch, Context, Cuda, Deferred, PinnedMemory, RegisteredMemory, Stream};
use crossrail_locks::PerProcess;
use crossrail_types::{Error, ErrorKind, Result};

use super::memory::Area;
use crate::log;

/// Polls without progress after which the driver is asked whether the stream has failed.
const EXAMINE_EVERY: u32 = 1 << 16;

/// Copies, and then words to be stored, in order.
#[derive(Debug, Default)]
pub(crate) struct Work {
    /// Destination, source and length; they have no order. One end is pinned memory.
    pub(crate) copies: Vec<(u64, u64, usize)>,
    /// Address and value of 64-bit words in GPU memory.
    pub(crate) stores: Vec<(u64, u64)>,
}

impl Work {
    pub(crate) fn is_empty(&self) -> bool {
        self.copies.is_empty() && self.stores.is_empty()
    }
}

/// Work of one GPU, in order. Points in it are numbered from 1 on.
pub(crate) trait Queue: Send {
    /// Enqueues the work, which is empty afterwards; returns the point after it.
    ///
    /// # Errors
    /// A failed driver call. The queue is unusable afterwards.
    fn submit(&mut self, work: &mut Work) -> Result<u64>;

    /// The newest point that was reached. What was stored and copied before it is visible to everyone.
    ///
    /// # Errors
    /// Why the pending work will never complete.
    fn reached(&mut self) -> Result<u64>;
}

/// One GPU.
pub(crate) trait Gpu: Send + Sync {
    fn ordinal(&self) -> u32;

    /// A queue of its own. Makes calls that may wait for kernels.
    fn queue(&self) -> Result<Box<dyn Queue>>;

    /// Pins an area until the result is dropped.
    fn pin(&self, area: &Arc<Area>) -> Result<Box<dyn Send + Sync>>;
}

/// The GPU whose memory this is.
///
/// # Errors
/// `Usage`: the driver knows no GPU for it; `Unsupported` with the reason where there is no CUDA, or the GPU lacks what is needed.
pub(crate) fn of(address: u64) -> Result<Arc<dyn Gpu>> {
    #[cfg(test)]
    if let Some(gpu) = super::tests::double::find(address) {
        return Ok(gpu);
    }
    static CUDA: PerProcess<OnceLock<std::result::Result<Cuda, Absent>>> = PerProcess::new();
    let absent = |why: &Absent| Error::new(ErrorKind::Unsupported, "regMrSym", why.to_string());
    let cuda = CUDA.get_or_init(Cuda::load).as_ref().map_err(absent)?;
    let ordinal = crossrail_cuda::owner(cuda, address)?.ok_or_else(|| {
        let detail = format!("{address:#x} is registered as memory of a GPU, which the driver does not know it as");
        Error::new(ErrorKind::Usage, "regMrSym", detail)
    })?;
    let device = cuda.device(ordinal)?;
    if !device.has_64bit_stream_ops()? {
        let detail = format!("streams of cuda:{ordinal} cannot store 64-bit words, which signals need");
        return Err(Error::new(ErrorKind::Unsupported, "regMrSym", detail));
    }
    Ok(Arc::new(CudaGpu { context: Context::primary(&device)?, ordinal }))
}

struct CudaGpu {
    context: Context,
    ordinal: u32,
}

impl Gpu for CudaGpu {
    fn ordinal(&self) -> u32 {
        self.ordinal
    }

    fn queue(&self) -> Result<Box<dyn Queue>> {
        let mark = PinnedMemory::new(&self.context, 64)?;
        // SAFETY: 64 bytes of our own.
        unsafe { mark.as_ptr().write_bytes(0, 64) };
        // Urgent streams do not share hardware queues with those whose kernels wait for our copies.
        let stream = Stream::urgent(&self.context)?;
        Ok(Box::new(CudaQueue { stream, mark, submitted: 0, reached: 0, idle: 0, takes_batches: Cell::new(true) }))
    }

    fn pin(&self, area: &Arc<Area>) -> Result<Box<dyn Send + Sync>> {
        let start = NonNull::new(area.at(0, area.len()));
        let start = start.ok_or_else(|| Error::new(ErrorKind::Io, "regMrSym", "no memory to pin"))?;
        // SAFETY: the area is kept with the registration, and dropped after it.
        let pinned = unsafe { RegisteredMemory::new(&self.context, start, area.len()) }?;
        Ok(Box::new(Deferred::when_idle((pinned, Arc::clone(area)), &self.context)))
    }
}

struct CudaQueue {
    stream: Stream,
    /// The stream stores the number of each point there.
    mark: PinnedMemory,
    submitted: u64,
    reached: u64,
    /// Polls since a point was reached.
    idle: u32,
    takes_batches: Cell<bool>,
}

impl CudaQueue {
    /// Enqueues copies: one by one once the driver has refused a batch, as of memory that it cannot locate.
    fn copy(&self, copies: &[(u64, u64, usize)]) -> Result<()> {
        if self.takes_batches.get() {
            // SAFETY: regions are accessed only while they are registered, and a fence waits for the accesses; areas and
            // marks outlive the queue's work.
            match unsafe { Batch(&self.stream).copy(copies) } {
                Ok(()) => return Ok(()),
                Err(error) => log::info(format_args!("RMA: copies are enqueued one by one: {error}")),
            }
            self.takes_batches.set(false);
        }
        // SAFETY: as above. Copies that were enqueued already are repeated.
        copies.iter().try_for_each(|(to, from, len)| unsafe { self.stream.copy(*to, *from, *len) })
    }
}

impl Queue for CudaQueue {
    fn submit(&mut self, work: &mut Work) -> Result<u64> {
        let _entered = self.stream.context().enter()?;
        self.submitted += 1;
        work.stores.push((self.mark.address(), self.submitted));
        let enqueued = self.copy(&work.copies).and_then(|()| {
            // SAFETY: as for copies.
            unsafe { Batch(&self.stream).store(&work.stores) }
        });
        work.copies.clear();
        work.stores.clear();
        enqueued.map(|()| self.submitted)
    }

    fn reached(&mut self) -> Result<u64> {
        // SAFETY: an aligned word of our own, which the stream stores.
        let now = unsafe { (*self.mark.as_ptr().cast::<AtomicU64>()).load(Ordering::Acquire) };
        if now != self.reached || now == self.submitted {
            (self.reached, self.idle) = (now, 0);
            return Ok(now);
        }
        self.idle = self.idle.wrapping_add(1);
        if self.idle.is_multiple_of(EXAMINE_EVERY) {
            // An error of the context ends the stream's work without the word.
            self.stream.is_done()?;
        }
        Ok(now)
    }
}

/// The queue of one thread, once the group has GPU memory.
#[derive(Default)]
pub(crate) struct Copier {
    queue: Option<Box<dyn Queue>>,
    submitted: u64,
    reached: u64,
}

impl Copier {
    pub(crate) fn open(&mut self, queue: Box<dyn Queue>) {
        self.queue = Some(queue);
    }

    /// Enqueues the work, which is empty afterwards; returns the point after it. Without work: a point already reached.
    ///
    /// # Errors
    /// As [`Queue::submit`].
    pub(crate) fn submit(&mut self, work: &mut Work) -> Result<u64> {
        if work.is_empty() {
            return Ok(0);
        }
        let queue = self.queue.as_mut();
        let queue = queue.ok_or_else(|| Error::new(ErrorKind::Io, "copy", "no queue of a GPU is open"))?;
        self.submitted = queue.submit(work)?;
        Ok(self.submitted)
    }

    /// Updates the newest point reached.
    ///
    /// # Errors
    /// As [`Queue::reached`].
    pub(crate) fn poll(&mut self) -> Result<bool> {
        if !self.is_busy() {
            return Ok(false);
        }
        let now = self.queue.as_mut().map_or(Ok(self.reached), |queue| queue.reached())?;
        let moved = now != self.reached;
        self.reached = now;
        Ok(moved)
    }

    /// Its work has failed: it is over.
    pub(crate) fn fail(&mut self) {
        self.queue = None;
        self.reached = self.submitted;
    }

    /// The point after all enqueued work.
    pub(crate) fn submitted(&self) -> u64 {
        self.submitted
    }

    pub(crate) fn has_reached(&self, point: u64) -> bool {
        self.reached >= point
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.reached < self.submitted
    }
}
