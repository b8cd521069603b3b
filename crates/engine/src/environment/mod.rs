//! Settings, memory, GPUs, network devices and processors of this process.

pub(crate) mod rails;
mod tcp_limits;

use std::sync::{Arc, OnceLock};

use crossrail_cuda_ipc::Gpus;
use crossrail_gpu::{CudaState, Devices};
use crossrail_locks::Mutex;
use crossrail_shm::Arena;
use crossrail_topology::{Cpus, Machine, NetDevice, Nic, Placement};
use crossrail_types::{Origin, Rails, Result, Settings};

pub(crate) use self::tcp_limits::TcpLimits;

/// One process's settings and devices, discovered once. Shared by a context and its workers; any thread may use it.
pub(crate) struct Environment {
    settings: Settings,
    origin: Origin,
    arena: Arc<Arena>,
    gpus: Arc<Devices>,
    /// Created by the first use of GPU memory of a peer on this machine; `Err`: why that is impossible.
    ipc_gpus: OnceLock<std::result::Result<Arc<Gpus>, String>>,
    /// There is some sign of a GPU.
    gpus_seen: bool,
    /// As last discovered.
    nics: Mutex<Arc<[Nic]>>,
    machine: Machine,
    cpus: Cpus,
    placement: Placement,
}

impl Environment {
    /// Has this process use that many of its processors for progress, for tests of machines that have as many.
    #[cfg(feature = "simulated-gpu")]
    pub(crate) fn with_cores(mut self, cores: usize) -> Environment {
        self.cpus.allowed = cores;
        self
    }

    /// Discovers the devices. `gpus` creates the list of GPUs; it loads no driver yet.
    ///
    /// # Errors
    /// `Config` for a device that is not there; `Io` when the system does not say which devices there are.
    pub(crate) fn new(
        settings: Settings,
        gpus: impl FnOnce(&Settings, Arc<Arena>) -> Arc<Devices>,
    ) -> Result<Environment> {
        crossrail_locks::watch_forks();
        crossrail_sight::export(&settings)?;
        let nics = Mutex::new(crossrail_topology::nics()?.into());
        let (machine, cpus) = (crossrail_topology::machine()?, crossrail_topology::cpus()?);
        if settings.tls.allows("shm") {
            // If it takes longer, a worker does it on a thread of its own.
            crossrail_shm::prepare_if_quick();
        }
        let gpus_seen = gpus_seen();
        let arena = Arena::new();
        let gpus = gpus(&settings, arena.clone());
        let ipc_gpus = OnceLock::new();
        let origin = Origin::here();
        let placement = Placement::here(settings.affinity);
        let environment =
            Environment { origin, arena, gpus, ipc_gpus, gpus_seen, nics, machine, cpus, placement, settings };
        environment.rails()?;
        Ok(environment)
    }

    /// Where threads that serve a device run.
    pub(crate) fn placement(&self) -> &Placement {
        &self.placement
    }

    /// The process that made it.
    pub(crate) fn origin(&self) -> Origin {
        self.origin
    }

    /// The settings.
    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Host memory that peers on this machine can map.
    pub(crate) fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// The GPUs. Nothing loads CUDA before one of them is named.
    pub(crate) fn gpus(&self) -> &Arc<Devices> {
        &self.gpus
    }

    /// What CUDA has here, with the direct copies of each GPU.
    pub(crate) fn cuda_state(&self) -> CudaState {
        let mut state = self.gpus.state();
        if let CudaState::Present(cuda) = &mut state {
            cuda.devices.iter_mut().for_each(|gpu| gpu.copied = self.copied(gpu.ordinal));
        }
        state
    }

    /// Direct copies so far between that GPU and GPU memory of peers on this machine.
    pub(crate) fn copied(&self, ordinal: u32) -> u64 {
        let gpus = self.ipc_gpus.get().and_then(|gpus| gpus.as_ref().ok());
        gpus.and_then(|gpus| gpus.copied(ordinal)).unwrap_or_default()
    }

    /// The means of copying GPU memory between processes; `Err`: why there is none. Loads CUDA.
    pub(crate) fn ipc_gpus(&self) -> std::result::Result<Arc<Gpus>, String> {
        let create = || {
            let gpus = self.gpus.cuda().and_then(|cuda| Gpus::new(cuda, &self.settings));
            gpus.map_err(|error| error.to_string())
        };
        self.ipc_gpus.get_or_init(create).clone()
    }

    /// Why GPU memory of a peer on this machine cannot be reached from here, if so. Does not load CUDA.
    pub(crate) fn no_cuda_ipc(&self) -> Option<String> {
        let tls = &self.settings.tls;
        if !self.gpus_seen {
            Some("no GPU".to_owned())
        } else if !tls.allows("cuda_ipc") {
            Some(format!("CROSSRAIL_TLS={tls} leaves it out"))
        } else if !tls.allows("shm") {
            Some(format!("it needs shm's Unix socket, and CROSSRAIL_TLS={tls} leaves shm out"))
        } else {
            None
        }
    }

    /// The network devices that carry data under the settings.
    pub(crate) fn rails(&self) -> Result<Vec<NetDevice>> {
        self.rails_among(&self.nics())
    }

    /// As [`Environment::rails`], for network devices discovered just now.
    pub(crate) fn rails_among(&self, nics: &[Nic]) -> Result<Vec<NetDevice>> {
        match rails::choose(&self.settings.net_devices, nics) {
            // No devices were requested, and other transports need none.
            Err(_) if self.settings.net_devices == Rails::default() => Ok(Vec::new()),
            chosen => chosen,
        }
    }

    /// All network devices.
    pub(crate) fn nics(&self) -> Arc<[Nic]> {
        self.nics.lock().clone()
    }

    /// Discovers the network devices again, because addresses have changed. Nothing changes if that leaves out a device
    /// that the settings name: it may be without an address for a moment.
    ///
    /// # Errors
    /// As [`Environment::new`].
    pub(crate) fn rediscover(&self) -> Result<()> {
        let nics = crossrail_topology::nics()?;
        self.rails_among(&nics)?;
        *self.nics.lock() = nics.into();
        Ok(())
    }

    pub(crate) fn machine(&self) -> &Machine {
        &self.machine
    }

    /// What TCP may use here.
    pub(crate) fn tcp_limits(&self) -> TcpLimits {
        TcpLimits::of(&self.settings, self.cores(), &self.rails().unwrap_or_default())
    }

    /// Processors that this process may use.
    pub(crate) fn cores(&self) -> usize {
        self.cpus.allowed.max(1)
    }
}

/// Whether there is any sign of a GPU that CUDA could use: on the bus, or, where that is hidden, a device file.
pub(crate) fn gpus_seen() -> bool {
    !crossrail_topology::gpus().is_empty()
        || ["/dev/nvidiactl", "/dev/dxg"].iter().any(|file| std::path::Path::new(file).exists())
}
