//! Primary contexts, which the CUDA runtime (and so PyTorch) uses too.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crossrail_types::{Error, ErrorKind, Reason, Result};
use cudarc::driver::sys::CUcontext;

use crate::device::Device;
use crate::driver::Cuda;
use crate::raw::{Code, Raw};
use crate::relaxed::Relaxed;
use crate::release::{ReleasePause, ReleaseThread};

const PEER_ACCESS_ALREADY_ENABLED: Code = 704;
/// Callers' streams that a context remembers: a program uses few.
const KNOWN_STREAMS: usize = 4;

/// The memory of a GPU at one moment, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Free memory.
    pub free: u64,
    /// Total memory.
    pub total: u64,
}

/// The primary context of a GPU, retained as long as a clone of this lives. Objects created in it hold a clone.
///
/// Operations never change the calling thread's current context: each makes this context current and restores the
/// previous one before it returns, so the caller's choice of device is not affected. Nor does an operation break a
/// graph capture on another thread ([`Cuda::relaxed`]). A thread that makes many calls in a row avoids the cost of both
/// with [`Context::enter`]. May be used from any thread.
#[derive(Clone)]
pub struct Context(Arc<Primary>);

struct Primary {
    device: Device,
    raw: CUcontext,
    release_thread: Arc<ReleaseThread>,
    /// Handles of callers' streams that were found to be of this context, the oldest replaced first; 0 for none.
    known_streams: [AtomicU64; KNOWN_STREAMS],
    next_known: AtomicUsize,
}

// SAFETY: a context handle names a driver object that may be used from all threads concurrently.
unsafe impl Send for Primary {}
// SAFETY: as above.
unsafe impl Sync for Primary {}

impl Drop for Primary {
    fn drop(&mut self) {
        let _relaxed = self.device.cuda().relaxed();
        // SAFETY: retained once, in `Context::primary`. A driver that is shutting down refuses the call and frees the
        // context itself.
        unsafe { (self.device.cuda().raw().cuDevicePrimaryCtxRelease_v2)(self.device.raw()) };
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context(cuda:{})", self.device().ordinal())
    }
}

impl Context {
    /// Retains the primary context of `device`, creating it if necessary, which takes some hundred MiB of GPU memory.
    ///
    /// # Errors
    /// [`ErrorKind::Exhausted`] if the GPU has no memory left for a context; a failed call.
    pub fn primary(device: &Device) -> Result<Context> {
        let cuda = device.cuda();
        let _relaxed = cuda.relaxed();
        let mut raw: CUcontext = std::ptr::null_mut();
        // SAFETY: `raw` is a valid out pointer.
        let code = unsafe { (cuda.raw().cuDevicePrimaryCtxRetain)(&mut raw, device.raw()) };
        cuda.check(&format!("cuda:{}", device.ordinal()), "cuDevicePrimaryCtxRetain", code)?;
        let (device, release_thread) = (device.clone(), ReleaseThread::current(cuda));
        let (known_streams, next_known) = Default::default();
        Ok(Context(Arc::new(Primary { device, raw, release_thread, known_streams, next_known })))
    }

    /// The GPU.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// The free and total memory of the GPU.
    ///
    /// # Errors
    /// A failed call.
    pub fn memory(&self) -> Result<MemoryInfo> {
        let (mut free, mut total) = (0_usize, 0_usize);
        self.run("memory", "cuMemGetInfo", |raw| {
            // SAFETY: both are valid out pointers.
            unsafe { (raw.cuMemGetInfo_v2)(&mut free, &mut total) }
        })?;
        Ok(MemoryInfo { free: free as u64, total: total as u64 })
    }

    /// Enables peer access: kernels and copies of this context may then access plain allocations of `peer`. Idempotent.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the hardware has no peer access between the two GPUs; a failed call.
    pub fn enable_peer(&self, peer: &Context) -> Result<()> {
        if !self.device().reaches(peer.device())? {
            let (own, other) = (self.device().ordinal(), peer.device().ordinal());
            let detail = format!("cuda:{own} has no peer access to cuda:{other}");
            return Err(Error::new(ErrorKind::Unsupported, "peer access", detail)
                .with_reason(Reason::DeviceUnsupported)
                .with_hint("copies between them are staged through host memory"));
        }
        self.run("peer access", "cuCtxEnablePeerAccess", |raw| {
            // SAFETY: both contexts are retained.
            match unsafe { (raw.cuCtxEnablePeerAccess)(peer.raw(), 0) } {
                PEER_ACCESS_ALREADY_ENABLED => 0,
                code => code,
            }
        })
    }

    /// Makes the context current on this thread until the result is dropped, so that calls in between need not do so
    /// individually.
    ///
    /// Meanwhile nothing else may change the thread's current context, so use this only in loops and threads of this
    /// library. Nested guards must be dropped in reverse order; one inside another of the same context makes no call.
    ///
    /// # Errors
    /// A failed call.
    pub fn enter(&self) -> Result<Entered<'_>> {
        if ENTERED.get() == self.raw() {
            return Ok(Entered { before: self.raw(), _undo: None });
        }
        let relaxed = self.cuda().relaxed();
        let pop = self.push("context")?;
        let before = ENTERED.replace(self.raw());
        Ok(Entered { before, _undo: Some((pop, relaxed)) })
    }

    /// Defers blocking releases while `waits` returns `Some(true)`; after `None` it is not called again.
    ///
    /// Some driver calls that release resources do not return while a stream waits. The release thread calls `waits`
    /// periodically as long as it has such calls to make, and makes them once no stream waits. `waits` must not block.
    pub fn defer_releases_while(&self, waits: impl Fn() -> Option<bool> + Send + Sync + 'static) {
        self.release_thread().add_probe(Arc::new(waits));
    }

    /// Keeps blocking releases from starting until the result is dropped; waits at most `limit` for one in progress.
    ///
    /// For callers that enqueue work which may wait for other ranks, and which [`Context::defer_releases_while`]
    /// reports only once it is enqueued. Without the pause, a release could start in between: it would wait for the
    /// enqueued work, and hold up the launches that this work waits for.
    pub fn pause_releases(&self, limit: Duration) -> ReleasePause {
        self.release_thread().pause(limit)
    }

    /// Whether a stream of this process is known to wait ([`Context::defer_releases_while`]), so that loading a kernel
    /// could block.
    pub fn has_waiting_stream(&self) -> bool {
        self.release_thread().has_waiting_stream()
    }

    pub(crate) fn raw(&self) -> CUcontext {
        self.0.raw
    }

    pub(crate) fn release_thread(&self) -> &Arc<ReleaseThread> {
        &self.0.release_thread
    }

    pub(crate) fn cuda(&self) -> &Cuda {
        self.0.device.cuda()
    }

    /// Makes a call with this context current. An error names `operation`, this GPU, and `call`.
    pub(crate) fn run(&self, operation: &str, call: &str, body: impl FnOnce(&Raw) -> Code) -> Result<()> {
        let code = self.current(operation, body)?;
        self.check(operation, call, code)
    }

    /// Like [`Context::run`], but returns the code of the call.
    pub(crate) fn current(&self, operation: &str, body: impl FnOnce(&Raw) -> Code) -> Result<Code> {
        let raw = self.cuda().raw();
        if ENTERED.get() == self.raw() {
            return Ok(body(raw));
        }
        let _relaxed = self.cuda().relaxed();
        let _pop = self.push(operation)?;
        Ok(body(raw))
    }

    /// Whether a caller's stream was found to be of this context.
    pub(crate) fn knows_stream(&self, handle: u64) -> bool {
        self.0.known_streams.iter().any(|known| known.load(Ordering::Relaxed) == handle)
    }

    /// Notes that a caller's stream, not a default stream, is of this context.
    pub(crate) fn remember_stream(&self, handle: u64) {
        let at = self.0.next_known.fetch_add(1, Ordering::Relaxed) % KNOWN_STREAMS;
        self.0.known_streams[at].store(handle, Ordering::Relaxed);
    }

    /// Makes the context current, unless the thread's current one is this, as it mostly is beside PyTorch.
    fn push(&self, operation: &str) -> Result<Pop<'_>> {
        let raw = self.cuda().raw();
        let mut current: CUcontext = std::ptr::null_mut();
        // SAFETY: `current` is a valid out pointer.
        if unsafe { (raw.cuCtxGetCurrent)(&mut current) } == 0 && current == self.raw() {
            return Ok(Pop(None, PhantomData));
        }
        // SAFETY: the context is retained; `Pop`, which is not `Send`, pops it on this thread.
        let code = unsafe { (raw.cuCtxPushCurrent_v2)(self.raw()) };
        self.check(operation, "cuCtxPushCurrent", code)?;
        Ok(Pop(Some(raw), PhantomData))
    }

    pub(crate) fn check(&self, operation: &str, call: &str, code: Code) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        self.cuda().check(&format!("{operation} on cuda:{}", self.device().ordinal()), call, code)
    }
}

thread_local! {
    /// The context of this thread's innermost `Entered`; null if there is none.
    static ENTERED: Cell<CUcontext> = const { Cell::new(std::ptr::null_mut()) };
}

/// A guard that keeps a context current on this thread; dropping it restores the previous context.
#[must_use = "the context is current only while this guard lives"]
pub struct Entered<'a> {
    before: CUcontext,
    /// Dropped in this order; None inside another guard of the same context.
    _undo: Option<(Pop<'a>, Relaxed<'a>)>,
}

impl fmt::Debug for Entered<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Entered")
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        ENTERED.set(self.before);
    }
}

/// Restores the previously current context, on the same thread; None: it is still current.
struct Pop<'a>(Option<&'a Raw>, PhantomData<*const ()>);

impl Drop for Pop<'_> {
    fn drop(&mut self) {
        let Some(raw) = self.0 else { return };
        let mut popped: CUcontext = std::ptr::null_mut();
        // SAFETY: pushed on this thread, which the type cannot leave; `popped` is a valid out pointer.
        unsafe { (raw.cuCtxPopCurrent_v2)(&mut popped) };
    }
}
