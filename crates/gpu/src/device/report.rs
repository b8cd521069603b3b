//! What `info` reports about CUDA.

use std::path::PathBuf;

use crossrail_cuda::nvrtc::Cache;
use crossrail_cuda::{Absent, Device as Gpu};
use crossrail_types::Result;

use super::{Devices, Source};
use crate::staging::StageStats;

/// Whether CUDA is usable here, and what it offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CudaState {
    /// CUDA is not usable.
    Absent {
        /// Why.
        reason: String,
        /// What would help.
        fix: Option<String>,
    },
    /// The driver is loaded and sees GPUs.
    Present(CudaInfo),
}

/// What CUDA offers here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaInfo {
    /// The newest CUDA that the driver supports, such as `13.0`.
    pub driver: String,
    /// A row per GPU.
    pub devices: Vec<GpuState>,
    /// `peer_access[a][b]`: whether GPU `a` can access memory of GPU `b` directly; always true of itself.
    pub peer_access: Vec<Vec<bool>>,
    /// Where compiled kernels are cached; `None` when no folder is usable.
    pub kernel_cache: Option<KernelCache>,
    /// The kernel compiler: NVRTC's version and file; `Err`: why there is none, and the fix.
    pub compiler: std::result::Result<String, String>,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuState {
    /// Its ordinal, as in `cuda:0`.
    pub ordinal: u32,
    /// The vendor's name for it.
    pub name: String,
    /// What kernels are compiled for: `sm_90a`.
    pub arch: String,
    /// Its memory in bytes.
    pub memory: u64,
    /// Free bytes; known only of GPUs that this process uses.
    pub free: Option<u64>,
    /// Its PCI address, such as `0000:3b:00.0`.
    pub pci: String,
    /// Its NUMA node, where the machine says.
    pub numa_node: Option<u32>,
    /// Pinned bounce memory in bytes; 0 until a transfer is staged.
    pub bounce_bytes: u64,
    /// What was staged through it.
    pub staged: StageStats,
    /// Number of direct copies between it and GPU memory of peers on this machine.
    pub copied: u64,
}

/// Compiled kernels on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelCache {
    /// The folder.
    pub folder: PathBuf,
    /// Size of the cached kernels in bytes.
    pub bytes: u64,
}

/// The reason and the fix, out of the driver layer's one text.
pub(super) fn split(absent: &Absent) -> (String, Option<String>) {
    let text = absent.to_string();
    match text.rsplit_once("; ") {
        Some((reason, fix)) => (reason.to_owned(), Some(fix.to_owned())),
        None => (text, None),
    }
}

pub(super) fn state(devices: &Devices) -> CudaState {
    match &devices.source {
        Source::Cuda(driver) => match driver.get_or_init(crossrail_cuda::Cuda::load) {
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
        Source::Simulated(gpus) => {
            let rows = gpus.iter().map(|gpu| simulated_state(gpu, staged(devices, gpu.ordinal()))).collect();
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

#[cfg(any(test, feature = "simulated-gpu"))]
fn simulated_state(gpu: &crate::Simulated, (bounce_bytes, staged): (u64, StageStats)) -> GpuState {
    let total = gpu.memory();
    GpuState {
        ordinal: gpu.ordinal(),
        name: "simulated".to_owned(),
        arch: "none".to_owned(),
        memory: total,
        free: Some(total.saturating_sub(gpu.allocated())),
        pci: String::new(),
        numa_node: None,
        bounce_bytes,
        staged,
        copied: 0,
    }
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
            copied: 0,
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

/// The cache folder and its size; creates nothing.
fn kernel_cache(folder: Option<PathBuf>) -> Option<KernelCache> {
    let folder = folder.or_else(Cache::default_folder)?;
    let entries = std::fs::read_dir(&folder).into_iter().flatten().flatten();
    let kernels = entries.filter(|entry| entry.path().extension().is_some_and(|end| end == "cubin"));
    let bytes = kernels.filter_map(|entry| Some(entry.metadata().ok()?.len())).sum();
    Some(KernelCache { folder, bytes })
}
