//! The GPUs of this process, for copies between processes.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crossrail_cuda::{Cuda, Device, wait_for_releases};
use crossrail_types::{Error, ErrorKind, Result, Settings};

use crate::gpu::Gpu;
use crate::lock::locked;
use crate::note::Uuid;

/// The minimum time limit of a copy.
const MIN_COPY_LIMIT: Duration = Duration::from_secs(5);
/// How long dropping them waits for their memory to be released, which may take longer while a GPU is busy.
const RELEASE_LIMIT: Duration = Duration::from_secs(1);

/// The GPUs of this process, for copies between processes: contexts, streams and completion words.
///
/// There is one for each Crossrail context, shared by all of its links. Creating it initialises no GPU; each is set up
/// when its memory is first used. May be used from any thread.
pub struct Gpus {
    copy_limit: Duration,
    devices: Vec<(Device, Uuid)>,
    /// Indexed by ordinal; `None` until the GPU is first used.
    gpus: Mutex<Vec<Option<Arc<Gpu>>>>,
}

impl fmt::Debug for Gpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpus({})", self.devices.len())
    }
}

impl Gpus {
    /// The GPUs visible to this process. A copy may take as long as `settings.timeout`, but at least 5 s.
    ///
    /// # Errors
    /// A failed driver call.
    pub fn new(cuda: &Cuda, settings: &Settings) -> Result<Arc<Gpus>> {
        let devices = cuda.devices()?;
        let devices: Result<Vec<(Device, Uuid)>> =
            devices.into_iter().map(|device| device.uuid().map(|uuid| (device, uuid))).collect();
        let devices = devices?;
        let gpus = Mutex::new(devices.iter().map(|_| None).collect());
        Ok(Arc::new(Gpus { copy_limit: settings.timeout.max(MIN_COPY_LIMIT), devices, gpus }))
    }

    /// The number of copies started so far between GPU `cuda:ordinal` and memory of peers; `None` if it is not in use
    /// here.
    pub fn copied(&self, ordinal: u32) -> Option<u64> {
        let gpus = locked(&self.gpus);
        Some(gpus.get(usize::try_from(ordinal).ok()?)?.as_ref()?.copies())
    }

    /// Loads the row kernels of GPU `cuda:ordinal`, once. May take seconds if they must be compiled. Without them, copy
    /// engines move rows. Returns the reason if loading fails.
    pub fn load_kernels(&self, ordinal: u32, settings: &Settings) -> Option<String> {
        match self.gpu(ordinal) {
            Ok(gpu) => {
                gpu.load_kernels(settings);
                gpu.kernels().err().map(str::to_owned)
            }
            Err(error) => Some(error.to_string()),
        }
    }

    /// The GPU `cuda:ordinal`, set up if necessary.
    pub(crate) fn gpu(&self, ordinal: u32) -> Result<Arc<Gpu>> {
        let mut gpus = locked(&self.gpus);
        let missing = || Error::new(ErrorKind::Usage, format!("cuda:{ordinal}"), "no such GPU");
        let index = usize::try_from(ordinal).map_err(|_| missing())?;
        let (device, uuid) = self.devices.get(index).ok_or_else(missing)?;
        let entry = gpus.get_mut(index).ok_or_else(missing)?;
        if let Some(gpu) = entry {
            return Ok(Arc::clone(gpu));
        }
        let gpu = Arc::new(Gpu::new(device, *uuid)?);
        *entry = Some(Arc::clone(&gpu));
        Ok(gpu)
    }

    /// The GPU with this UUID, if it is visible to this process.
    pub(crate) fn device(&self, uuid: &Uuid) -> Option<&Device> {
        self.devices.iter().find(|(_, known)| known == uuid).map(|(device, _)| device)
    }

    /// The ordinals of the GPUs in use: first those that are set up here, then those that others in this process use.
    pub(crate) fn in_use(&self) -> Vec<u32> {
        let set_up: Vec<u32> = locked(&self.gpus).iter().flatten().map(|gpu| gpu.ordinal()).collect();
        let others = self.devices.iter().filter(|(device, _)| device.in_use().unwrap_or(false));
        let others: Vec<u32> = others.map(|(device, _)| device.ordinal()).filter(|at| !set_up.contains(at)).collect();
        [set_up, others].concat()
    }

    /// A GPU in use, whose context can be queried about any address of this process. Never initialises a GPU.
    pub(crate) fn any_in_use(&self) -> Result<Arc<Gpu>> {
        if let Some(gpu) = locked(&self.gpus).iter().flatten().next() {
            return Ok(Arc::clone(gpu));
        }
        let used = self.devices.iter().find(|(device, _)| device.in_use().unwrap_or(false));
        match used {
            Some((device, _)) => self.gpu(device.ordinal()),
            None => Err(Error::new(ErrorKind::Usage, "memory", "this process does not use a GPU yet")),
        }
    }

    /// The longest that a copy may take before it is given up.
    pub(crate) fn copy_limit(&self) -> Duration {
        self.copy_limit
    }
}

impl Drop for Gpus {
    fn drop(&mut self) {
        // A caller that has closed everything should find the memory free.
        locked(&self.gpus).clear();
        wait_for_releases(RELEASE_LIMIT);
    }
}
