//! Streams: queues of work on a GPU, our own or a caller's.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::fmt;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crossrail_types::{Error, ErrorKind, Result, format_duration};
use cudarc::driver::sys::{CUcontext, CUstream, CUstream_flags};

use crate::context::Context;
use crate::raw::{Code, Raw};

pub(crate) const NOT_READY: Code = 600;

/// How long a wait polls without giving way; most copies and kernels are shorter.
const POLL: Duration = Duration::from_micros(50);
/// The pause between polls of a wait that turned out long.
const PAUSE: Duration = Duration::from_micros(20);

/// Queues of the GPU that a process's streams share, unless CUDA_DEVICE_MAX_CONNECTIONS says otherwise; and the most there are.
const CONNECTIONS: usize = 8;
const MOST_CONNECTIONS: usize = 32;

/// How many streams of this process may wait on one GPU at the same time, for a word or in a kernel, so that all others go
/// on: one less than there are queues, which CUDA_DEVICE_MAX_CONNECTIONS says (8 unless it is set). With one more, no
/// stream's kernels begin any longer, whatever its priority.
pub fn max_waiting_streams() -> usize {
    static MOST: OnceLock<usize> = OnceLock::new();
    // As the driver: what the variable says when CUDA begins counts.
    *MOST.get_or_init(|| connections(std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok().as_deref()) - 1)
}

fn connections(said: Option<&str>) -> usize {
    said.and_then(|text| text.trim().parse().ok()).unwrap_or(CONNECTIONS).clamp(1, MOST_CONNECTIONS)
}

/// A queue of work on one GPU. What is put in runs in order; nothing here waits unless it says so.
pub struct Stream {
    context: Context,
    raw: CUstream,
    owned: bool,
}

// SAFETY: a stream handle is a name for an object of the driver, which may be used from every thread at once.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: made by `new` and not used after this; work that is in it is still carried out.
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
    /// A new stream that does not wait for the default stream.
    ///
    /// # Errors
    /// A failed call.
    pub fn new(context: &Context) -> Result<Stream> {
        Stream::with_priority(context, 0)
    }

    /// Like [`Stream::new`]; its kernels start before those of other streams that wait. Streams of one priority share a
    /// few queues of the GPU (CUDA_DEVICE_MAX_CONNECTIONS, 8 by default); this one is not behind callers' streams of usual
    /// priority, which may wait for it.
    ///
    /// # Errors
    /// A failed call.
    pub fn urgent(context: &Context) -> Result<Stream> {
        // Lower is sooner; the driver takes the lowest there is.
        Stream::with_priority(context, c_int::MIN)
    }

    fn with_priority(context: &Context, priority: c_int) -> Result<Stream> {
        let mut stream: CUstream = std::ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `stream` is a valid place for one handle.
        let make = |raw: &Raw| unsafe { (raw.cuStreamCreateWithPriority)(&mut stream, flags, priority) };
        context.run("stream", "cuStreamCreateWithPriority", make)?;
        Ok(Stream { context: context.clone(), raw: stream, owned: true })
    }

    /// A stream of the caller's, by its raw handle (`torch.cuda.Stream.cuda_stream`; 0 is the default stream). It
    /// stays the caller's.
    ///
    /// # Safety
    /// The handle must be a live stream, and stay so as long as the result is used.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] when the stream is another GPU's or another context's; a failed call.
    pub unsafe fn borrow(context: &Context, handle: u64) -> Result<Stream> {
        let stream = handle as usize as CUstream;
        let mut owner: CUcontext = std::ptr::null_mut();
        // SAFETY: the caller vouches for the handle; `owner` is a valid place for one handle.
        context.run("stream", "cuStreamGetCtx", |raw| unsafe { (raw.cuStreamGetCtx)(stream, &mut owner) })?;
        if owner != context.raw() {
            let detail = format!("the stream {handle:#x} does not belong to cuda:{}", context.device().ordinal());
            return Err(Error::new(ErrorKind::Usage, "stream", detail)
                .with_hint("give a stream of the GPU whose memory is used"));
        }
        Ok(Stream { context: context.clone(), raw: stream, owned: false })
    }

    /// The context it belongs to.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The raw handle, to be given to others.
    pub fn handle(&self) -> u64 {
        self.raw as usize as u64
    }

    /// Whether everything put in so far is done.
    ///
    /// # Errors
    /// A failed call, also one that was put in earlier and failed since.
    pub fn is_done(&self) -> Result<bool> {
        // SAFETY: the stream is alive.
        let code = self.context.current("stream", |raw| unsafe { (raw.cuStreamQuery)(self.raw) })?;
        done(&self.context, "stream", "cuStreamQuery", code)
    }

    /// Waits until everything put in so far is done.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] after `limit`: the work goes on, and may still be waited for. A failed call.
    pub fn wait(&self, limit: Duration) -> Result<()> {
        wait(&self.context, "stream", limit, || self.is_done())
    }

    /// Puts a copy of `len` bytes in. Addresses may be of device memory, pinned host memory, or any GPU whose peer
    /// access is enabled.
    ///
    /// The driver takes an address that it does not know for ordinary host memory, which it touches on this thread: where
    /// somebody else may have freed the memory, use [`Stream::copy_within`], [`Stream::copy_in`] or [`Stream::copy_out`],
    /// which refuse such an address.
    ///
    /// # Safety
    /// Both areas must be valid until the copy is done; nobody may write `src`, or touch `dst`, meanwhile.
    ///
    /// # Errors
    /// A failed call.
    pub unsafe fn copy(&self, dst: u64, src: u64, len: usize) -> Result<()> {
        // SAFETY: the caller vouches for the areas.
        self.context.run("copy", "cuMemcpyAsync", |raw| unsafe { (raw.cuMemcpyAsync)(dst, src, len, self.raw) })
    }

    /// Puts a copy of `len` bytes from GPU memory to GPU memory in, also to and from another GPU's that this one reaches.
    ///
    /// # Safety
    /// As [`Stream::copy`].
    ///
    /// # Errors
    /// A failed call, such as for an address that is no GPU memory.
    pub unsafe fn copy_within(&self, dst: u64, src: u64, len: usize) -> Result<()> {
        // SAFETY: the caller vouches for the areas.
        let copy = |raw: &Raw| unsafe { (raw.cuMemcpyDtoDAsync_v2)(dst, src, len, self.raw) };
        self.context.run("copy", "cuMemcpyDtoDAsync", copy)
    }

    /// Puts a copy of `len` bytes from pinned host memory to GPU memory in.
    ///
    /// # Safety
    /// As [`Stream::copy`].
    ///
    /// # Errors
    /// A failed call, such as for a destination that is no GPU memory.
    pub unsafe fn copy_in(&self, dst: u64, src: *const u8, len: usize) -> Result<()> {
        // SAFETY: the caller vouches for the areas.
        let copy = |raw: &Raw| unsafe { (raw.cuMemcpyHtoDAsync_v2)(dst, src.cast(), len, self.raw) };
        self.context.run("copy", "cuMemcpyHtoDAsync", copy)
    }

    /// Puts a copy of `len` bytes from GPU memory to pinned host memory in.
    ///
    /// # Safety
    /// As [`Stream::copy`].
    ///
    /// # Errors
    /// A failed call, such as for a source that is no GPU memory.
    pub unsafe fn copy_out(&self, dst: *mut u8, src: u64, len: usize) -> Result<()> {
        // SAFETY: the caller vouches for the areas.
        let copy = |raw: &Raw| unsafe { (raw.cuMemcpyDtoHAsync_v2)(dst.cast(), src, len, self.raw) };
        self.context.run("copy", "cuMemcpyDtoHAsync", copy)
    }

    /// Puts a copy between two GPUs in, by the copy engines; it needs no peer access.
    ///
    /// # Safety
    /// As [`Stream::copy`]; `dst` must be memory of `to` and `src` memory of `from`.
    ///
    /// # Errors
    /// A failed call.
    pub unsafe fn copy_peer(&self, to: (&Context, u64), from: (&Context, u64), len: usize) -> Result<()> {
        // SAFETY: the caller vouches for the areas.
        self.context.run("copy", "cuMemcpyPeerAsync", |raw| unsafe {
            (raw.cuMemcpyPeerAsync)(to.1, to.0.raw(), from.1, from.0.raw(), len, self.raw)
        })
    }

    /// Puts in that `len` bytes from `dst` on become `value`.
    ///
    /// # Safety
    /// The area must be valid until it is done; nobody may touch it meanwhile.
    ///
    /// # Errors
    /// A failed call.
    pub unsafe fn fill(&self, dst: u64, value: u8, len: usize) -> Result<()> {
        // SAFETY: the caller vouches for the area.
        self.context.run("fill", "cuMemsetD8Async", |raw| unsafe { (raw.cuMemsetD8Async)(dst, value, len, self.raw) })
    }

    pub(crate) fn raw(&self) -> CUstream {
        self.raw
    }
}

/// A query's code as an answer.
pub(crate) fn done(context: &Context, operation: &str, call: &str, code: Code) -> Result<bool> {
    if code == NOT_READY {
        return Ok(false);
    }
    context.check(operation, call, code).map(|()| true)
}

/// Polls until `is_done`, or `limit`. The driver's own waits have no limit, so it is asked again and again: at once,
/// then with others given way to, then with pauses.
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
            waited if waited >= limit => {
                let operation = format!("{operation} on cuda:{}", context.device().ordinal());
                return Err(Error::new(
                    ErrorKind::Timeout,
                    operation,
                    format!("not done after {}", format_duration(limit)),
                )
                .with_hint("the work goes on and may be waited for again"));
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
    fn a_gpu_has_as_many_queues_as_the_environment_says() {
        assert_eq!(
            [None, Some("32"), Some(" 1 "), Some("0"), Some("99"), Some("x")].map(connections),
            [8, 32, 1, 1, 32, 8]
        );
    }
}
