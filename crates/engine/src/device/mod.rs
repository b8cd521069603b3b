//! GPUs as the engine sees them: whose memory an address is, memory of their own, and one stager for each in use.
//!
//! ```text
//! Devices   per context: the driver, loaded by the first call that needs it
//! Device    one GPU                       DeviceAlloc   memory of it that other processes can map
//! Ready     a point in a caller's stream  Calls         kernels and words for callers' streams
//! CudaState what `info` says of all this
//! ```
//!
//! Nothing here loads CUDA before memory of a GPU is named or `state` is asked.

mod alloc;
mod calls;
mod cuda;
mod order;
mod ready;
#[cfg(any(test, feature = "simulated-gpu"))]
pub(crate) mod simulated;
mod state;

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crossrail_cuda::{Absent, Cuda};
use crossrail_shm::Arena;
use crossrail_types::{Error, ErrorKind, Result, Settings};
use parking_lot::Mutex;

pub(crate) use alloc::DeviceAlloc;
pub(crate) use calls::{Calls, Use, Word};
pub(crate) use cuda::check as check_cuda;
pub use ready::Ready;
pub use state::{CudaInfo, CudaState, GpuState, KernelCache};

use crate::staging::{StageStats, Stager};

/// The GPUs of one context. Any thread.
pub(crate) struct Devices {
    settings: Settings,
    arena: Arc<Arena>,
    makes: Makes,
    open: Mutex<BTreeMap<u32, Arc<Device>>>,
}

/// Where GPUs come from.
enum Makes {
    Cuda(OnceLock<std::result::Result<Cuda, Absent>>),
    #[cfg(any(test, feature = "simulated-gpu"))]
    Simulated(Vec<simulated::Simulated>),
}

/// One GPU. Any thread; calls may take as long as the driver takes, so none is made under a worker's lock except
/// `copy_in` and `copy_out` of few bytes.
pub(crate) struct Device {
    ordinal: u32,
    settings: Settings,
    arena: Arc<Arena>,
    kind: Kind,
    stager: OnceLock<Stager>,
    making: Mutex<()>,
    calls: OnceLock<Arc<Calls>>,
}

/// How long the end of a context waits for its GPUs' memory to be given back, which may take longer when a GPU is busy.
const CLOSING: Duration = Duration::from_secs(1);

enum Kind {
    Cuda(cuda::CudaDevice),
    #[cfg(any(test, feature = "simulated-gpu"))]
    Simulated(simulated::Simulated),
}

impl Devices {
    /// The GPUs of this machine. Loads nothing yet.
    pub(crate) fn new(settings: &Settings, arena: Arc<Arena>) -> Arc<Devices> {
        Devices::made(settings, arena, Makes::Cuda(OnceLock::new()))
    }

    /// `count` GPUs that are made of host memory.
    #[cfg(any(test, feature = "simulated-gpu"))]
    pub(crate) fn simulated(settings: &Settings, arena: Arc<Arena>, count: u32) -> Arc<Devices> {
        let gpus = (0..count).map(simulated::Simulated::new).collect();
        Devices::made(settings, arena, Makes::Simulated(gpus))
    }

    fn made(settings: &Settings, arena: Arc<Arena>, makes: Makes) -> Arc<Devices> {
        Arc::new(Devices { settings: settings.clone(), arena, makes, open: Mutex::default() })
    }

    /// Whether `len` bytes at `ptr` are all memory of GPU `ordinal`; that GPU.
    ///
    /// # Errors
    /// `Usage` that says what they are otherwise; `Unsupported` with the reason where there is no CUDA.
    pub(crate) fn check(&self, ptr: u64, len: usize, ordinal: u32) -> Result<Arc<Device>> {
        let device = self.device(ordinal)?;
        if len > 0 {
            device.check(ptr, len)?;
        }
        Ok(device)
    }

    /// The GPU whose memory `ptr` is, by number. Any number may be asked for; nothing is read there.
    ///
    /// # Errors
    /// `Usage` when it is no GPU's; `Unsupported` with the reason where there is no CUDA.
    pub(crate) fn owner(&self, ptr: u64) -> Result<u32> {
        let owner = match &self.makes {
            Makes::Cuda(_) => crossrail_cuda::owner(self.cuda()?, ptr)?,
            #[cfg(any(test, feature = "simulated-gpu"))]
            Makes::Simulated(gpus) => gpus.iter().find(|gpu| gpu.check(ptr, 1).is_ok()).map(|gpu| gpu.ordinal()),
        };
        let stranger = || {
            let detail = format!("{ptr:#x} is no memory that the CUDA driver knows: freed, or of the host");
            Error::new(ErrorKind::Usage, "GPU memory", detail)
        };
        owner.ok_or_else(stranger)
    }

    /// GPU `ordinal`, opened by the first call.
    ///
    /// # Errors
    /// `Usage` when there is none of that number; `Unsupported` with the reason where there is no CUDA.
    pub(crate) fn device(&self, ordinal: u32) -> Result<Arc<Device>> {
        let mut open = self.open.lock();
        if let Some(device) = open.get(&ordinal) {
            return Ok(device.clone());
        }
        let kind = match &self.makes {
            Makes::Cuda(_) => Kind::Cuda(cuda::CudaDevice::open(self.cuda()?, ordinal, self.settings.timeout)?),
            #[cfg(any(test, feature = "simulated-gpu"))]
            Makes::Simulated(gpus) => Kind::Simulated(gpus.get(ordinal as usize).cloned().ok_or_else(|| {
                let detail = format!("there is no such GPU: {} are simulated", gpus.len());
                Error::new(ErrorKind::Usage, format!("cuda:{ordinal}"), detail)
            })?),
        };
        let (settings, arena) = (self.settings.clone(), self.arena.clone());
        let (stager, making, calls) = (OnceLock::new(), Mutex::new(()), OnceLock::new());
        let device = Device { ordinal, settings, arena, kind, stager, making, calls };
        Ok(open.entry(ordinal).or_insert(Arc::new(device)).clone())
    }

    /// `len` zeroed bytes of GPU `ordinal`, which other processes can map.
    ///
    /// # Errors
    /// `Exhausted` with the bytes asked for and free; `Unsupported` where its memory can't be shared; else as
    /// [`Devices::device`].
    pub(crate) fn alloc(&self, ordinal: u32, len: usize) -> Result<DeviceAlloc> {
        DeviceAlloc::new(&self.device(ordinal)?, len)
    }

    /// What there is, for `info`. Loads the driver, but makes no context and takes no GPU memory.
    pub(crate) fn state(&self) -> CudaState {
        state::state(self)
    }

    /// The simulated GPU of that number.
    #[cfg(any(test, feature = "simulated-gpu"))]
    pub(crate) fn simulation(&self, ordinal: u32) -> Option<simulated::Simulated> {
        match &self.makes {
            Makes::Simulated(gpus) => gpus.get(ordinal as usize).cloned(),
            Makes::Cuda(_) => None,
        }
    }

    /// The driver.
    ///
    /// # Errors
    /// `Unsupported` with the reason where there is none, or the GPUs are simulated.
    pub(crate) fn cuda(&self) -> Result<&Cuda> {
        match &self.makes {
            Makes::Cuda(driver) => driver.get_or_init(Cuda::load).as_ref().map_err(|why| {
                let (reason, fix) = state::split(why);
                let error = Error::new(ErrorKind::Unsupported, "GPU memory", reason);
                match fix {
                    Some(fix) => error.with_hint(fix),
                    None => error,
                }
            }),
            #[cfg(any(test, feature = "simulated-gpu"))]
            Makes::Simulated(_) => Err(Error::new(ErrorKind::Unsupported, "GPU memory", "these GPUs are simulated")),
        }
    }

    /// The devices that were opened, by number.
    fn opened(&self, ordinal: u32) -> Option<Arc<Device>> {
        self.open.lock().get(&ordinal).cloned()
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        let open = std::mem::take(self.open.get_mut());
        if open.values().any(|device| device.cuda().is_some()) {
            drop(open);
            // Whoever has closed everything finds the memory free.
            crossrail_cuda::settled(CLOSING);
        }
    }
}

impl Device {
    /// Its number, as in `cuda:0`.
    pub(crate) fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Its name in texts.
    pub(crate) fn name(&self) -> String {
        format!("cuda:{}", self.ordinal)
    }

    /// The context's settings.
    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Its context; `None` when it is simulated.
    pub(crate) fn cuda(&self) -> Option<&crossrail_cuda::Context> {
        match &self.kind {
            Kind::Cuda(device) => Some(device.context()),
            #[cfg(any(test, feature = "simulated-gpu"))]
            Kind::Simulated(_) => None,
        }
    }

    /// What callers' streams need of it; `None` when it is simulated.
    pub(crate) fn calls(&self) -> Option<&Arc<Calls>> {
        self.cuda().map(|context| self.calls.get_or_init(|| Calls::of(context)))
    }

    /// Its stager, made by the first call: pins the bounce memory, which takes long. Never under a worker's lock.
    ///
    /// # Errors
    /// `Config` when CROSSRAIL_BOUNCE is too small for the chunks; `Exhausted` when there is no memory for it; what
    /// the driver says. The next call tries again.
    pub(crate) fn stager(&self) -> Result<&Stager> {
        if let Some(stager) = self.stager.get() {
            return Ok(stager);
        }
        let _making = self.making.lock();
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

    /// Copies `bytes` to device memory at `ptr`, and returns when they are there. Ordered with nothing else.
    ///
    /// # Errors
    /// `Usage` when the memory is not there (any more); `Timeout`; what the driver says.
    pub(crate) fn copy_in(&self, ptr: u64, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.check(ptr, bytes.len())?;
        match &self.kind {
            Kind::Cuda(device) => device.copy_in(ptr, bytes),
            #[cfg(any(test, feature = "simulated-gpu"))]
            Kind::Simulated(gpu) => gpu.copy_in(ptr, bytes),
        }
    }

    /// Copies device memory at `ptr` into `bytes`. Ordered with nothing else.
    ///
    /// # Errors
    /// As [`Device::copy_in`].
    pub(crate) fn copy_out(&self, ptr: u64, bytes: &mut [u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.check(ptr, bytes.len())?;
        match &self.kind {
            Kind::Cuda(device) => device.copy_out(ptr, bytes),
            #[cfg(any(test, feature = "simulated-gpu"))]
            Kind::Simulated(gpu) => gpu.copy_out(ptr, bytes),
        }
    }

    /// [`Device::copy_in`] to a peer's memory that is mapped for this GPU.
    pub(crate) fn copy_in_mapped(&self, ptr: u64, bytes: &[u8]) -> Result<()> {
        match &self.kind {
            Kind::Cuda(device) => device.copy_in(ptr, bytes),
            #[cfg(any(test, feature = "simulated-gpu"))]
            Kind::Simulated(gpu) => gpu.copy_in(ptr, bytes),
        }
    }

    /// [`Device::copy_out`] of a peer's memory that is mapped for this GPU.
    pub(crate) fn copy_out_mapped(&self, ptr: u64, bytes: &mut [u8]) -> Result<()> {
        match &self.kind {
            Kind::Cuda(device) => device.copy_out(ptr, bytes),
            #[cfg(any(test, feature = "simulated-gpu"))]
            Kind::Simulated(gpu) => gpu.copy_out(ptr, bytes),
        }
    }

    /// What is in that stream of a caller's now, as something to wait for.
    ///
    /// # Safety
    /// The handle must be a live stream.
    ///
    /// # Errors
    /// `Usage` when the stream is another GPU's, or is being captured; what the driver says.
    #[allow(unsafe_code)]
    pub(crate) unsafe fn ready(&self, stream: u64) -> Result<Ready> {
        match &self.kind {
            // SAFETY: the caller vouches for the stream.
            Kind::Cuda(device) => unsafe { device.ready(stream) },
            #[cfg(any(test, feature = "simulated-gpu"))]
            Kind::Simulated(gpu) => gpu.ready(stream),
        }
    }

    /// Calls `body` with this GPU as the thread's current one.
    ///
    /// # Errors
    /// `body`'s; what the driver says.
    pub(crate) fn current<T, E: From<Error>>(
        &self,
        body: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        let _current = self.cuda().map(crossrail_cuda::Context::enter).transpose()?;
        body()
    }

    /// Lets `ask` put work of somebody else's before a stream of ours, given by its handle; what it says, and that work
    /// as something to wait for. No other operation's work is waited for. The GPU is the thread's current one meanwhile.
    ///
    /// # Errors
    /// `ask`'s; `Usage` when its work is being captured; what the driver says.
    pub(crate) fn ordered<T, E: From<Error>>(
        &self,
        ask: impl FnOnce(u64) -> std::result::Result<T, E>,
    ) -> std::result::Result<(T, Ready), E> {
        match &self.kind {
            Kind::Cuda(device) => device.ordered(ask),
            #[cfg(any(test, feature = "simulated-gpu"))]
            Kind::Simulated(gpu) => {
                let answer = ask(1)?;
                Ok((answer, gpu.ready(0)?))
            }
        }
    }

    /// Whether `len` bytes at `ptr` are all memory of this GPU.
    pub(crate) fn check(&self, ptr: u64, len: usize) -> Result<()> {
        match &self.kind {
            Kind::Cuda(device) => check_cuda(device.context(), ptr, len),
            #[cfg(any(test, feature = "simulated-gpu"))]
            Kind::Simulated(gpu) => gpu.check(ptr, len),
        }
    }

    /// The bounce memory in use, in bytes, and what went through it.
    fn staged(&self) -> (u64, StageStats) {
        self.stager.get().map_or_else(Default::default, |stager| (stager.bounce_bytes(), stager.stats()))
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device({})", self.name())
    }
}
