//! Streams: ordered queues of work on a GPU, created here or by a caller.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::fmt;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crossrail_locks::PerProcess;
use crossrail_types::{Error, ErrorKind, Result, interrupt};
use cudarc::driver::sys::{CUcontext, CUstream, CUstream_flags};

use crate::context::Context;
use crate::raw::{Code, Raw};

pub(crate) const NOT_READY: Code = 600;

/// How long a wait busy-polls before it yields; most copies and kernels are shorter.
const POLL: Duration = Duration::from_micros(50);
/// The poll interval of a long wait.
const PAUSE: Duration = Duration::from_micros(20);

/// The number of hardware queues that the streams of a process share, unless CUDA_DEVICE_MAX_CONNECTIONS sets another,
/// and its maximum.
const CONNECTIONS: usize = 8;
const MOST_CONNECTIONS: usize = 32;

/// The number of this process's streams that may wait on a GPU at the same time, for a word or in a kernel.
///
/// One less than the number of hardware queues (CUDA_DEVICE_MAX_CONNECTIONS, 8 by default), so that one queue stays
/// free: if every queue has a waiting stream at its head, no kernel of any stream starts any more, whatever its
/// priority.
pub fn max_waiting_streams() -> usize {
    static MOST: PerProcess<OnceLock<usize>> = PerProcess::new();
    // Read once, like the driver, which reads the variable when CUDA is initialised.
    *MOST.get_or_init(|| connections(std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok().as_deref()) - 1)
}

fn connections(variable: Option<&str>) -> usize {
    variable.and_then(|text| text.trim().parse().ok()).unwrap_or(CONNECTIONS).clamp(1, MOST_CONNECTIONS)
}

/// An ordered queue of work on a GPU. Methods enqueue work and return at once, unless they are documented to wait. May
/// be used from any thread; the order between threads is that of their calls.
pub struct Stream {
    context: Context,
    raw: CUstream,
    owned: bool,
}

// SAFETY: a stream handle names a driver object that may be used from all threads concurrently.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: created by `with_priority` and not used afterwards; enqueued work still executes.
            let _ = self.context.current("stream", |raw| unsafe { (raw.cuStreamDestroy_v2)(self.raw) });
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:?} of {:?})", self.raw, self.context)
    }
}

impl Stream {
    /// Creates a stream that does not synchronise with the default stream.
    ///
    /// # Errors
    /// A failed call.
    pub fn new(context: &Context) -> Result<Stream> {
        Stream::with_priority(context, 0)
    }

    /// Like [`Stream::new`], with the highest priority.
    ///
    /// Streams of one priority share a few hardware queues (CUDA_DEVICE_MAX_CONNECTIONS, 8 by default). Work in this
    /// stream is therefore not queued behind callers' streams of normal priority, which may be waiting for it.
    ///
    /// # Errors
    /// A failed call.
    pub fn urgent(context: &Context) -> Result<Stream> {
        // Lower numbers are higher priorities; the driver clamps to its range.
        Stream::with_priority(context, c_int::MIN)
    }

    fn with_priority(context: &Context, priority: c_int) -> Result<Stream> {
        let mut stream: CUstream = std::ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `stream` is a valid out pointer.
        let make = |raw: &Raw| unsafe { (raw.cuStreamCreateWithPriority)(&mut stream, flags, priority) };
        context.run("stream", "cuStreamCreateWithPriority", make)?;
        Ok(Stream { context: context.clone(), raw: stream, owned: true })
    }

    /// Wraps a caller's stream by its raw handle (`torch.cuda.Stream.cuda_stream`; 0 is the default stream). The caller
    /// keeps ownership.
    ///
    /// # Safety
    /// The handle must be a live stream, and remain so while the result is used.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] if the stream belongs to another GPU or context; a failed call.
    pub unsafe fn borrow(context: &Context, handle: u64) -> Result<Stream> {
        let stream = handle as usize as CUstream;
        // Calls make their context current, and so a default stream's handle stands for the one of this context.
        if is_default(handle) || context.knows_stream(handle) {
            return Ok(Stream { context: context.clone(), raw: stream, owned: false });
        }
        let mut owner: CUcontext = std::ptr::null_mut();
        // SAFETY: the caller guarantees the handle; `owner` is a valid out pointer.
        context.run("stream", "cuStreamGetCtx", |raw| unsafe { (raw.cuStreamGetCtx)(stream, &mut owner) })?;
        if owner != context.raw() {
            let detail = format!("the stream {handle:#x} does not belong to cuda:{}", context.device().ordinal());
            return Err(Error::new(ErrorKind::Usage, "stream", detail)
                .with_hint("use a stream of the GPU that holds the memory"));
        }
        context.remember_stream(handle);
        Ok(Stream { context: context.clone(), raw: stream, owned: false })
    }

    /// The context of the stream.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The raw handle, for use with other libraries.
    pub fn handle(&self) -> u64 {
        self.raw as usize as u64
    }

    /// Whether all work enqueued so far has completed.
    ///
    /// # Errors
    /// A failed call; also the asynchronous failure of work enqueued earlier.
    pub fn is_done(&self) -> Result<bool> {
        // SAFETY: the stream is alive.
        let code = self.context.current("stream", |raw| unsafe { (raw.cuStreamQuery)(self.raw) })?;
        done(&self.context, "stream", "cuStreamQuery", code)
    }

    /// Waits until all work enqueued so far has completed.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] after `limit`; the work continues and may be waited for again. A failed call.
    pub fn wait(&self, limit: Duration) -> Result<()> {
        wait(&self.context, "stream", limit, || self.is_done())
    }

    /// Enqueues a copy of `len` bytes. Addresses may be device memory, pinned host memory, or memory of another GPU
    /// with peer access enabled.
    ///
    /// The driver treats an unknown address as pageable host memory, which it accesses on the calling thread. If
    /// another party may have freed the memory, use [`Stream::copy_within`], [`Stream::copy_in`] or
    /// [`Stream::copy_out`], which reject unknown addresses instead.
    ///
    /// # Safety
    /// Both ranges must stay valid until the copy has completed; until then nothing may write `src` or access `dst`.
    ///
    /// # Errors
    /// A failed call.
    pub unsafe fn copy(&self, dst: u64, src: u64, len: usize) -> Result<()> {
        // SAFETY: the caller guarantees the ranges.
        self.context.run("copy", "cuMemcpyAsync", |raw| unsafe { (raw.cuMemcpyAsync)(dst, src, len, self.raw) })
    }

    /// Enqueues a copy of `len` bytes between GPU addresses, of this GPU or of one it has peer access to.
    ///
    /// # Safety
    /// As [`Stream::copy`].
    ///
    /// # Errors
    /// A failed call, as for an address that is not GPU memory.
    pub unsafe fn copy_within(&self, dst: u64, src: u64, len: usize) -> Result<()> {
        // SAFETY: the caller guarantees the ranges.
        let copy = |raw: &Raw| unsafe { (raw.cuMemcpyDtoDAsync_v2)(dst, src, len, self.raw) };
        self.context.run("copy", "cuMemcpyDtoDAsync", copy)
    }

    /// Enqueues a copy of `len` bytes from pinned host memory to GPU memory.
    ///
    /// # Safety
    /// As [`Stream::copy`].
    ///
    /// # Errors
    /// A failed call, as for a destination that is not GPU memory.
    pub unsafe fn copy_in(&self, dst: u64, src: *const u8, len: usize) -> Result<()> {
        // SAFETY: the caller guarantees the ranges.
        let copy = |raw: &Raw| unsafe { (raw.cuMemcpyHtoDAsync_v2)(dst, src.cast(), len, self.raw) };
        self.context.run("copy", "cuMemcpyHtoDAsync", copy)
    }

    /// Enqueues a copy of `len` bytes from GPU memory to pinned host memory.
    ///
    /// # Safety
    /// As [`Stream::copy`].
    ///
    /// # Errors
    /// A failed call, as for a source that is not GPU memory.
    pub unsafe fn copy_out(&self, dst: *mut u8, src: u64, len: usize) -> Result<()> {
        // SAFETY: the caller guarantees the ranges.
        let copy = |raw: &Raw| unsafe { (raw.cuMemcpyDtoHAsync_v2)(dst.cast(), src, len, self.raw) };
        self.context.run("copy", "cuMemcpyDtoHAsync", copy)
    }

    /// Enqueues a fill of `len` bytes at `dst` with `value`.
    ///
    /// # Safety
    /// The range must stay valid until the fill has completed; until then nothing may access it.
    ///
    /// # Errors
    /// A failed call.
    pub unsafe fn fill(&self, dst: u64, value: u8, len: usize) -> Result<()> {
        // SAFETY: the caller guarantees the range.
        self.context.run("fill", "cuMemsetD8Async", |raw| unsafe { (raw.cuMemsetD8Async)(dst, value, len, self.raw) })
    }

    pub(crate) fn raw(&self) -> CUstream {
        self.raw
    }
}

/// Whether a handle stands for a default stream, of whichever context is current: the legacy one, by both of its names,
/// or the thread's.
pub(crate) fn is_default(handle: u64) -> bool {
    handle <= 2
}

/// Interprets the code of a query: whether the work has completed.
pub(crate) fn done(context: &Context, operation: &str, call: &str, code: Code) -> Result<bool> {
    if code == NOT_READY {
        return Ok(false);
    }
    context.check(operation, call, code).map(|()| true)
}

/// Polls until `is_done` or `limit`. The driver's own waits have no timeout, so this polls instead: spinning, then
/// yielding, then sleeping.
pub(crate) fn wait(
    context: &Context,
    operation: &str,
    limit: Duration,
    is_done: impl Fn() -> Result<bool>,
) -> Result<()> {
    let started = Instant::now();
    loop {
        if is_done()? {
            return Ok(());
        }
        match started.elapsed() {
            waited if waited >= limit || interrupt::raised() => {
                let operation = format!("{operation} on cuda:{}", context.device().ordinal());
                let error = Error::new(ErrorKind::Timeout, operation, "not completed").with_waited(waited);
                return Err(error.with_hint("the work continues and may be waited for again"));
            }
            waited if waited < POLL => std::hint::spin_loop(),
            waited if waited < 20 * POLL => std::thread::yield_now(),
            _ => std::thread::sleep(PAUSE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_sets_the_number_of_queues() {
        assert_eq!(
            [None, Some("32"), Some(" 1 "), Some("0"), Some("99"), Some("x")].map(connections),
            [8, 32, 1, 1, 32, 8]
        );
    }
}
