//! The GPUs of one context, their allocations, and one stager for each in use.

mod alloc;
mod cuda;
mod ordering;
mod report;

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crossrail_cuda::{Absent, Cuda, Entered};
use crossrail_locks::Mutex;
use crossrail_shm::Arena;
use crossrail_types::{Error, ErrorKind, Result, Settings};

pub use alloc::DeviceAlloc;
pub use report::{CudaInfo, CudaState, GpuState, KernelCache};

use crate::pointer;
use crate::scratch::{Blocks, Scratch};
#[cfg(any(test, feature = "simulated-gpu"))]
use crate::simulated::Simulated;
use crate::staging::{StageStats, Stager};
use crate::stream_point::StreamPoint;
use crate::stream_support::StreamSupport;

/// The GPUs of one context. Any thread may use it.
pub struct Devices {
    settings: Settings,
    arena: Arc<Arena>,
    source: Source,
    open: Mutex<BTreeMap<u32, Arc<Device>>>,
}

/// Where a context's GPUs come from.
enum Source {
    Cuda(OnceLock<std::result::Result<Cuda, Absent>>),
    #[cfg(any(test, feature = "simulated-gpu"))]
    Simulated(Vec<Simulated>),
}

/// One GPU.
///
/// Any thread may use it. Calls take as long as the driver takes, so none is made under a worker's lock, except
/// [`Device::copy_in`] and [`Device::copy_out`] of a few bytes.
pub struct Device {
    ordinal: u32,
    settings: Settings,
    arena: Arc<Arena>,
    kind: Kind,
    stager: OnceLock<Stager>,
    /// Held while the stager is started, so that it is started once.
    starting_stager: Mutex<()>,
    stream_support: OnceLock<Arc<StreamSupport>>,
    /// Of short messages; `None`: there is no pinned memory for them.
    blocks: OnceLock<Option<Arc<Blocks>>>,
}

/// How long dropping a context waits until its GPU memory is freed; a busy GPU may take longer.
const CLOSING: Duration = Duration::from_secs(1);

enum Kind {
    Cuda(cuda::CudaDevice),
    #[cfg(any(test, feature = "simulated-gpu"))]
    Simulated(Simulated),
}

impl Devices {
    /// The GPUs of this machine. Does not load the driver yet.
    pub fn new(settings: &Settings, arena: Arc<Arena>) -> Arc<Devices> {
        Devices::with_source(settings, arena, Source::Cuda(OnceLock::new()))
    }

    /// `count` simulated GPUs, made of host memory.
    #[cfg(any(test, feature = "simulated-gpu"))]
    pub fn simulated(settings: &Settings, arena: Arc<Arena>, count: u32) -> Arc<Devices> {
        let gpus = (0..count).map(Simulated::new).collect();
        Devices::with_source(settings, arena, Source::Simulated(gpus))
    }

    fn with_source(settings: &Settings, arena: Arc<Arena>, source: Source) -> Arc<Devices> {
        Arc::new(Devices { settings: settings.clone(), arena, source, open: Mutex::default() })
    }

    /// Checks that `len` bytes at `ptr` are all memory of GPU `ordinal`, and returns that GPU.
    ///
    /// # Errors
    /// `Usage` that says what they are otherwise; `Unsupported` with the reason where there is no CUDA.
    pub fn check(&self, ptr: u64, len: usize, ordinal: u32) -> Result<Arc<Device>> {
        let device = self.device(ordinal)?;
        if len > 0 {
            device.check(ptr, len)?;
        }
        Ok(device)
    }

    /// The ordinal of the GPU that owns the memory at `ptr`. Any address may be passed; it is not dereferenced.
    ///
    /// # Errors
    /// `Usage` when it is no GPU's; `Unsupported` with the reason where there is no CUDA.
    pub fn owner(&self, ptr: u64) -> Result<u32> {
        let owner = match &self.source {
            Source::Cuda(_) => crossrail_cuda::owner(self.cuda()?, ptr)?,
            #[cfg(any(test, feature = "simulated-gpu"))]
            Source::Simulated(gpus) => gpus.iter().find(|gpu| gpu.check(ptr, 1).is_ok()).map(|gpu| gpu.ordinal()),
        };
        let unknown = || {
            let detail = format!("{ptr:#x} is no memory that the CUDA driver knows: freed, or of the host");
            Error::new(ErrorKind::Usage, "GPU memory", detail)
        };
        owner.ok_or_else(unknown)
    }

    /// GPU `ordinal`, opened on first use.
    ///
    /// # Errors
    /// `Usage` when there is none of that number; `Unsupported` with the reason where there is no CUDA.
    pub fn device(&self, ordinal: u32) -> Result<Arc<Device>> {
        let mut open = self.open.lock();
        if let Some(device) = open.get(&ordinal) {
            return Ok(device.clone());
        }
        let kind = match &self.source {
            Source::Cuda(_) => Kind::Cuda(cuda::CudaDevice::open(self.cuda()?, ordinal, self.settings.timeout)?),
            #[cfg(any(test, feature = "simulated-gpu"))]
            Source::Simulated(gpus) => Kind::Simulated(gpus.get(ordinal as usize).cloned().ok_or_else(|| {
                let detail = format!("there is no such GPU: {} are simulated", gpus.len());
                Error::new(ErrorKind::Usage, format!("cuda:{ordinal}"), detail)
            })?),
        };
        let (settings, arena) = (self.settings.clone(), self.arena.clone());
        let (stager, starting_stager, stream_support) = (OnceLock::new(), Mutex::new(()), OnceLock::new());
        let blocks = OnceLock::new();
        let device = Device { ordinal, settings, arena, kind, stager, starting_stager, stream_support, blocks };
        Ok(open.entry(ordinal).or_insert(Arc::new(device)).clone())
    }

    /// Allocates `len` zeroed bytes on GPU `ordinal` that other processes can map.
    ///
    /// # Errors
    /// `Exhausted` with the bytes asked for and free; `Unsupported` where its memory can't be shared; else as
    /// [`Devices::device`].
    pub fn alloc(&self, ordinal: u32, len: usize) -> Result<DeviceAlloc> {
        DeviceAlloc::new(&self.device(ordinal)?, len)
    }

    /// What CUDA has here, for `info`. Loads the driver, but creates no context and allocates no GPU memory.
    pub fn state(&self) -> CudaState {
        report::state(self)
    }

    /// The simulated GPU with that ordinal.
    #[cfg(any(test, feature = "simulated-gpu"))]
    pub fn simulation(&self, ordinal: u32) -> Option<Simulated> {
        match &self.source {
            Source::Simulated(gpus) => gpus.get(ordinal as usize).cloned(),
            Source::Cuda(_) => None,
        }
    }

    /// The driver.
    ///
    /// # Errors
    /// `Unsupported` with the reason where there is none, or the GPUs are simulated.
    pub fn cuda(&self) -> Result<&Cuda> {
        match &self.source {
            Source::Cuda(driver) => driver.get_or_init(Cuda::load).as_ref().map_err(|why| {
                let (reason, fix) = report::split(why);
                let error = Error::new(ErrorKind::Unsupported, "GPU memory", reason);
                match fix {
                    Some(fix) => error.with_hint(fix),
                    None => error,
                }
            }),
            #[cfg(any(test, feature = "simulated-gpu"))]
            Source::Simulated(_) => Err(Error::new(ErrorKind::Unsupported, "GPU memory", "these GPUs are simulated")),
        }
    }

    /// GPU `ordinal`, if it was opened.
    fn opened(&self, ordinal: u32) -> Option<Arc<Device>> {
        self.open.lock().get(&ordinal).cloned()
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        let open = std::mem::take(self.open.get_mut());
        if open.values().any(|device| device.cuda().is_some()) {
            drop(open);
            // A program that has closed everything must find the memory free.
            crossrail_cuda::wait_for_releases(CLOSING);
        }
    }
}

impl Device {
    /// The GPU's ordinal, as in `cuda:0`.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// The GPU's name in messages: `cuda:0`.
    pub fn name(&self) -> String {
        format!("cuda:{}", self.ordinal)
    }

    /// The context's settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The GPU's primary context; `None` for a simulated GPU.
    pub fn cuda(&self) -> Option<&crossrail_cuda::Context> {
        match &self.kind {
            Kind::Cuda(device) => Some(device.context()),
            #[cfg(any(test, feature = "simulated-gpu"))]
            Kind::Simulated(_) => None,
        }
    }

    /// Kernels and pinned words for callers' streams; `None` for a simulated GPU.
    pub fn stream_support(&self) -> Option<&Arc<StreamSupport>> {
        self.cuda().map(|context| self.stream_support.get_or_init(|| StreamSupport::of(context)))
    }

    /// The GPU's stager, started on first use. Pins the bounce memory, which takes tenths of a second: never call it
    /// under a worker's lock.
    ///
    /// # Errors
    /// `Config` when CROSSRAIL_BOUNCE is too small for the chunks; `Exhausted` when there is no memory for it; what
    /// the driver says. The next call tries again.
    pub fn stager(&self) -> Result<&Stager> {
        if let Some(stager) = self.stager.get() {
            return Ok(stager);
        }
        let _starting = self.starting_stager.lock();
        if let Some(stager) = self.stager.get() {
            return Ok(stager);
        }
        let stager = match &self.kind {
            Kind::Cuda(device) => Stager::cuda(device.context(), &self.settings, &self.arena),
            #[cfg(any(test, feature = "simulated-gpu"))]
            Kind::Simulated(gpu) => Stager::simulated(gpu, &self.settings, &self.arena),
        }?;
        Ok(self.stager.get_or_init(|| stager))
    }

    /// Makes the GPU's context current for several calls: each would do so on its own otherwise, which costs as much again.
    fn enter(&self) -> Result<Option<Entered<'_>>> {
        match &self.kind {
            Kind::Cuda(device) => device.context().enter().map(Some),
            #[cfg(any(test, feature = "simulated-gpu"))]
            Kind::Simulated(_) => Ok(None),
        }
    }

    /// Copies `bytes` to device memory at `ptr` and returns when they are there. Not ordered with any stream.
    ///
    /// # Errors
    /// `Usage` when the memory is not there (any more); `Timeout`; what the driver says.
    pub fn copy_in(&self, ptr: u64, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let _entered = self.enter()?;
        self.check(ptr, bytes.len())?;
        let blocks = self.blocks_of(bytes);
        let copied = match &self.kind {
            Kind::Cuda(device) => device.copy_in(ptr, bytes, blocks.is_some()),
            #[cfg(any(test, feature = "simulated-gpu"))]
            Kind::Simulated(gpu) => gpu.copy_in(ptr, bytes),
        };
        copied.inspect_err(|_| blocks.into_iter().for_each(|blocks| blocks.retire()))
    }

    /// Copies device memory at `ptr` into `bytes`. Not ordered with any stream.
    ///
    /// # Errors
    /// As [`Device::copy_in`].
    pub fn copy_out(&self, ptr: u64, bytes: &mut [u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let _entered = self.enter()?;
        self.check(ptr, bytes.len())?;
        let blocks = self.blocks_of(bytes);
        let copied = match &self.kind {
            Kind::Cuda(device) => device.copy_out(ptr, bytes, blocks.is_some()),
            #[cfg(any(test, feature = "simulated-gpu"))]
            Kind::Simulated(gpu) => gpu.copy_out(ptr, bytes),
        };
        copied.inspect_err(|_| blocks.into_iter().for_each(|blocks| blocks.retire()))
    }

    /// Host memory for `len` bytes that [`Device::copy_in`] or [`Device::copy_out`] is to copy. The first call allocates.
    pub fn scratch(&self, len: usize) -> Scratch {
        let blocks = self.blocks.get_or_init(|| match &self.kind {
            Kind::Cuda(device) => device.blocks().ok(),
            #[cfg(any(test, feature = "simulated-gpu"))]
            Kind::Simulated(gpu) => Some(gpu.blocks()),
        });
        blocks.as_ref().and_then(|blocks| blocks.lend(len)).unwrap_or_else(|| Scratch::plain(len))
    }

    /// The blocks that these bytes are in.
    fn blocks_of(&self, bytes: &[u8]) -> Option<&Blocks> {
        self.blocks.get()?.as_deref().filter(|blocks| blocks.hold(bytes))
    }

    /// [`Device::copy_in`] to a peer's memory that is mapped for this GPU.
    pub fn copy_in_mapped(&self, ptr: u64, bytes: &[u8]) -> Result<()> {
        match &self.kind {
            Kind::Cuda(device) => device.copy_in(ptr, bytes, false),
            #[cfg(any(test, feature = "simulated-gpu"))]
            Kind::Simulated(gpu) => gpu.copy_in(ptr, bytes),
        }
    }

    /// [`Device::copy_out`] of a peer's memory that is mapped for this GPU.
    pub fn copy_out_mapped(&self, ptr: u64, bytes: &mut [u8]) -> Result<()> {
        match &self.kind {
            Kind::Cuda(device) => device.copy_out(ptr, bytes, false),
            #[cfg(any(test, feature = "simulated-gpu"))]
            Kind::Simulated(gpu) => gpu.copy_out(ptr, bytes),
        }
    }

    /// The point that a caller's stream has reached when all that is in it now is complete.
    ///
    /// # Safety
    /// The handle must be a live stream.
    ///
    /// # Errors
    /// `Usage` when the stream is another GPU's, or is being captured; what the driver says.
    #[allow(unsafe_code)]
    pub unsafe fn stream_point(&self, stream: u64) -> Result<StreamPoint> {
        match &self.kind {
            // SAFETY: the caller vouches for the stream.
            Kind::Cuda(device) => unsafe { device.stream_point(stream) },
            #[cfg(any(test, feature = "simulated-gpu"))]
            Kind::Simulated(gpu) => gpu.stream_point(stream),
        }
    }

    /// Calls `body` with this GPU as the thread's current device.
    ///
    /// # Errors
    /// `body`'s; what the driver says.
    pub fn current<T, E: From<Error>>(
        &self,
        body: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        let _current = self.cuda().map(crossrail_cuda::Context::enter).transpose()?;
        body()
    }

    /// Calls `ask` with the handle of a stream of ours, before which another library orders its work (as DLPack
    /// exporters do). Returns its answer and the point at which that work is complete. The stream holds no other work,
    /// and the GPU is the thread's current one during the call.
    ///
    /// # Errors
    /// `ask`'s; `Usage` when its work is being captured; what the driver says.
    pub fn ordered<T, E: From<Error>>(
        &self,
        ask: impl FnOnce(u64) -> std::result::Result<T, E>,
    ) -> std::result::Result<(T, StreamPoint), E> {
        match &self.kind {
            Kind::Cuda(device) => device.ordered(ask),
            #[cfg(any(test, feature = "simulated-gpu"))]
            Kind::Simulated(gpu) => {
                let answer = ask(1)?;
                Ok((answer, gpu.stream_point(0)?))
            }
        }
    }

    /// Checks that `len` bytes at `ptr` are all memory of this GPU; `Usage` if not.
    pub fn check(&self, ptr: u64, len: usize) -> Result<()> {
        match &self.kind {
            Kind::Cuda(device) => pointer::check(device.context(), ptr, len),
            #[cfg(any(test, feature = "simulated-gpu"))]
            Kind::Simulated(gpu) => gpu.check(ptr, len),
        }
    }

    /// The bounce memory in use, in bytes, and what was staged through it.
    fn staged(&self) -> (u64, StageStats) {
        self.stager.get().map_or_else(Default::default, |stager| (stager.bounce_bytes(), stager.stats()))
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device({})", self.name())
    }
}
