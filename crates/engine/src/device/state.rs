//! What `info` says of CUDA.

use std::path::PathBuf;

use crossrail_cuda::nvrtc::Cache;
use crossrail_cuda::{Absent, Device as Gpu};
use crossrail_cuda_ipc::Copied;
use crossrail_types::Result;

use super::{Devices, Makes};
use crate::staging::StageStats;

/// Whether there is CUDA here, and what it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CudaState {
    /// There is none.
    Absent {
        /// Why.
        reason: String,
        /// What would help.
        fix: Option<String>,
    },
    /// There is a driver, and it sees GPUs.
    Present(CudaInfo),
}

/// What CUDA has here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaInfo {
    /// The newest CUDA that the driver supports, such as `13.0`.
    pub driver: String,
    /// A row per GPU.
    pub devices: Vec<GpuState>,
    /// Whether the first can reach the second's memory without the host, by numbers; with itself always.
    pub peer_access: Vec<Vec<bool>>,
    /// Where compiled kernels are kept; `None` when no folder can be used.
    pub kernel_cache: Option<KernelCache>,
    /// What compiles kernels: NVRTC's version and file; `Err`: why there is none, and what would help.
    pub compiler: std::result::Result<String, String>,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuState {
    /// Its number, as in `cuda:0`.
    pub ordinal: u32,
    /// The maker's name.
    pub name: String,
    /// What kernels are compiled for: `sm_90a`.
    pub arch: String,
    /// Its memory in bytes.
    pub memory: u64,
    /// What of it is free; known only of GPUs that this process uses.
    pub free: Option<u64>,
    /// Its PCI address, such as `0000:3b:00.0`.
    pub pci: String,
    /// Its NUMA node, where the machine says.
    pub numa_node: Option<u32>,
    /// Pinned host memory that carries chunks from and to it, in bytes; 0 until it is used so.
    pub bounce_bytes: u64,
    /// What went through that.
    pub staged: StageStats,
    /// What copied between it and memory of peers on this machine.
    pub copied: Copied,
}

/// Compiled kernels on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelCache {
    /// The folder.
    pub folder: PathBuf,
    /// What the kernels in it take, in bytes.
    pub bytes: u64,
}

/// Why there is no CUDA, and what would help.
pub(super) fn split(absent: &Absent) -> (String, Option<String>) {
    let text = absent.to_string();
    match text.rsplit_once("; ") {
        Some((reason, fix)) => (reason.to_owned(), Some(fix.to_owned())),
        None => (text, None),
    }
}

pub(super) fn state(devices: &Devices) -> CudaState {
    match &devices.makes {
        Makes::Cuda(driver) => match driver.get_or_init(crossrail_cuda::Cuda::load) {
            Err(why) => {
                let (reason, fix) = split(why);
                CudaState::Absent { reason, fix }
            }
            Ok(cuda) => present(devices, cuda).map_or_else(
                |error| CudaState::Absent { reason: error.to_string(), fix: error.hint.clone() },
                CudaState::Present,
            ),
        },
        #[cfg(any(test, feature = "simulated-gpu"))]
        Makes::Simulated(gpus) => {
            let rows = gpus.iter().map(|gpu| gpu.state(staged(devices, gpu.ordinal()))).collect();
            let peer_access = (0..gpus.len()).map(|a| (0..gpus.len()).map(|b| a == b).collect()).collect();
            CudaState::Present(CudaInfo {
                driver: "simulated".to_owned(),
                devices: rows,
                peer_access,
                kernel_cache: None,
                compiler: Err("simulated GPUs have no kernels".to_owned()),
            })
        }
    }
}

fn staged(devices: &Devices, ordinal: u32) -> (u64, StageStats) {
    devices.opened(ordinal).map_or_else(Default::default, |device| device.staged())
}

fn present(devices: &Devices, cuda: &crossrail_cuda::Cuda) -> Result<CudaInfo> {
    let gpus = cuda.devices()?;
    let row = |gpu: &Gpu| -> Result<GpuState> {
        let opened = devices.opened(gpu.ordinal());
        let (bounce_bytes, staged) = staged(devices, gpu.ordinal());
        let free = opened.as_ref().and_then(|device| Some(device.cuda()?.memory().ok()?.free));
        Ok(GpuState {
            ordinal: gpu.ordinal(),
            name: gpu.name()?,
            arch: gpu.arch()?.to_string(),
            memory: gpu.memory()?,
            free,
            pci: gpu.pci()?,
            numa_node: gpu.numa_node()?,
            bounce_bytes,
            staged,
            copied: Copied::default(),
        })
    };
    let reach = |a: &Gpu, b: &Gpu| if a.ordinal() == b.ordinal() { Ok(true) } else { a.reaches(b) };
    let version = cuda.version();
    Ok(CudaInfo {
        driver: format!("{}.{}", version / 1000, version % 1000 / 10),
        devices: gpus.iter().map(row).collect::<Result<_>>()?,
        peer_access: gpus
            .iter()
            .map(|a| gpus.iter().map(|b| reach(a, b)).collect::<Result<_>>())
            .collect::<Result<_>>()?,
        kernel_cache: kernel_cache(devices.settings.cache_dir.clone()),
        compiler: crossrail_kernels::compiler(cuda).map_err(|error| match &error.hint {
            Some(hint) => format!("{}; {hint}", error.detail),
            None => error.detail,
        }),
    })
}

/// The folder and what is in it; nothing is made.
fn kernel_cache(folder: Option<PathBuf>) -> Option<KernelCache> {
    let folder = folder.or_else(Cache::default_folder)?;
    let entries = std::fs::read_dir(&folder).into_iter().flatten().flatten();
    let kernels = entries.filter(|entry| entry.path().extension().is_some_and(|end| end == "cubin"));
    let bytes = kernels.filter_map(|entry| Some(entry.metadata().ok()?.len())).sum();
    Some(KernelCache { folder, bytes })
}
