//! One process's view of its devices and settings.

use std::sync::{Arc, OnceLock};

use crossrail_cuda_ipc::{Copied, Domain};
use crossrail_shm::Arena;
use crossrail_topology::{Cpus, Distance, GpuSeen, Machine, NetDevice, Nic};
use crossrail_types::{Result, Settings, TRANSPORTS};

use crate::buffer::{Backing, Memory, Place};
use crate::rails;
use crossrail_gpu::{CudaState, Devices};

/// One process's view of its devices and settings; makes memory and workers. Clones share it. Any thread may use it.
#[derive(Clone)]
pub struct Context(Arc<Inner>);

struct Inner {
    settings: Settings,
    arena: Arc<Arena>,
    gpus: Arc<Devices>,
    domain: OnceLock<std::result::Result<Arc<Domain>, String>>,
    /// Whether there is any sign of a GPU.
    gpus_seen: bool,
    nics: Vec<Nic>,
    machine: Machine,
    cpus: Cpus,
}

/// What there is to move bytes with, and why what is not used is not.
#[derive(Clone, Debug)]
pub struct Info {
    /// The machine.
    pub machine: Machine,
    /// Its processors, as far as this process may use them.
    pub cpus: Cpus,
    /// A row per transport.
    pub transports: Vec<TransportInfo>,
    /// A row per network device.
    pub devices: Vec<DeviceInfo>,
    /// Graphics processors that were seen.
    pub gpus: Vec<GpuSeen>,
    /// What CUDA has here, or why there is none.
    pub cuda: CudaState,
    /// How far each network device is from each of `gpus`, in their order.
    pub distances: Vec<(String, Vec<Distance>)>,
    /// Each setting's name and value, and whether that is the default.
    pub settings: Vec<(String, String, bool)>,
}

/// One transport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransportInfo {
    /// Its name in `CROSSRAIL_TLS`.
    pub name: String,
    /// Whether it can be used here.
    pub usable: bool,
    /// What it can do.
    pub detail: String,
    /// Why it cannot be used.
    pub reason: Option<String>,
    /// What to do about that.
    pub fix: Option<String>,
}

/// One network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its name in `CROSSRAIL_NET_DEVICES`.
    pub name: String,
    /// The interface.
    pub interface: String,
    /// The address that lanes are bound to.
    pub address: Option<std::net::IpAddr>,
    /// The link's rate in Mbit/s, where known.
    pub speed_mbps: Option<u32>,
    /// The NUMA node of the hardware, where known.
    pub numa_node: Option<u32>,
    /// Whether it is a rail under the present settings.
    pub chosen: bool,
    /// Why it is not.
    pub reason: Option<String>,
}

impl Context {
    /// A context with these settings.
    ///
    /// # Errors
    /// `Config` for a device that is not there; `Io` when the system does not say what devices there are.
    pub fn new(settings: Settings) -> Result<Context> {
        Context::made(settings, Devices::new)
    }

    /// A context with `count` GPUs that are made of host memory, for tests.
    ///
    /// # Errors
    /// As [`Context::new`].
    #[cfg(feature = "simulated-gpu")]
    pub fn with_simulated_gpus(settings: Settings, count: u32) -> Result<Context> {
        Context::made(settings, |settings, arena| Devices::simulated(settings, arena, count))
    }

    /// The simulated GPU of that number, to be held, delayed and made to fail.
    #[cfg(feature = "simulated-gpu")]
    pub fn simulated_gpu(&self, ordinal: u32) -> Option<crossrail_gpu::Simulated> {
        self.0.gpus.simulation(ordinal)
    }

    fn made(settings: Settings, gpus: impl FnOnce(&Settings, Arc<Arena>) -> Arc<Devices>) -> Result<Context> {
        let nics = crossrail_topology::nics()?;
        let (machine, cpus) = (crossrail_topology::machine()?, crossrail_topology::cpus()?);
        if settings.tls.allows("shm") {
            // A worker does it otherwise, on a thread of its own.
            crossrail_shm::prepare_if_quick();
        }
        let gpus_seen = gpus_seen();
        let arena = Arena::new();
        let gpus = gpus(&settings, arena.clone());
        let context =
            Context(Arc::new(Inner { arena, gpus, domain: OnceLock::new(), gpus_seen, nics, machine, cpus, settings }));
        context.devices()?;
        Ok(context)
    }

    /// A context with the settings of the environment.
    ///
    /// # Errors
    /// `Config` for an unknown `CROSSRAIL_` variable or a value that does not parse; else as [`Context::new`].
    pub fn from_env() -> Result<Context> {
        Context::new(Settings::from_env()?)
    }

    /// The settings.
    pub fn settings(&self) -> &Settings {
        &self.0.settings
    }

    /// `len` bytes of zeroed memory that peers on this machine can map, so that it moves with one plain copy.
    ///
    /// # Errors
    /// `Exhausted`, naming the bytes asked for.
    pub fn alloc(&self, len: usize) -> Result<Memory> {
        self.alloc_on(len, Place::Host)
    }

    /// `len` bytes of zeroed memory there that peers on this machine can map.
    ///
    /// # Errors
    /// `Exhausted`, naming the bytes asked for; for a GPU `Usage` when there is none of that number, `Unsupported`
    /// with the reason where there is no CUDA, and what its driver says.
    pub fn alloc_on(&self, len: usize, place: Place) -> Result<Memory> {
        Ok(Memory(match place {
            Place::Host => Backing::Host(self.0.arena.alloc(len)?),
            Place::Gpu(ordinal) => Backing::Gpu(self.0.gpus.alloc(ordinal, len)?),
        }))
    }

    /// What there is to move bytes with.
    ///
    /// # Errors
    /// `Io` when the system does not say what devices there are.
    pub fn info(&self) -> Result<Info> {
        let (nics, gpus) = (crossrail_topology::nics()?, crossrail_topology::gpus());
        let cuda = self.cuda_state();
        let chosen = rails::choose(&self.0.settings.net_devices, &nics);
        let defaults = Settings::default().shown();
        let settings = self.0.settings.shown().into_iter().zip(defaults);
        let settings = settings
            .map(|((name, value), (_, usual))| (name.to_owned(), value.clone().unwrap_or_default(), value == usual))
            .collect();
        Ok(Info {
            machine: crossrail_topology::machine()?,
            cpus: crossrail_topology::cpus()?,
            transports: transports(&self.0.settings, chosen.as_deref().unwrap_or(&[]), gpus_seen().then_some(&cuda)),
            devices: devices(&self.0.settings, &nics, chosen.as_deref().unwrap_or(&[])),
            distances: distances(&nics, &gpus),
            gpus,
            cuda,
            settings,
        })
    }

    fn cuda_state(&self) -> CudaState {
        let mut state = self.0.gpus.state();
        if let CudaState::Present(cuda) = &mut state {
            cuda.devices.iter_mut().for_each(|gpu| gpu.copied = self.copied(gpu.ordinal));
        }
        state
    }

    /// What copied between that GPU and memory of peers on this machine so far; nothing if it was not used so.
    pub fn copied(&self, ordinal: u32) -> Copied {
        let domain = self.0.domain.get().and_then(|domain| domain.as_ref().ok());
        domain.and_then(|domain| domain.copied(ordinal)).unwrap_or_default()
    }

    /// The GPUs; nothing loads CUDA before one of them is named.
    pub(crate) fn gpus(&self) -> &Arc<Devices> {
        &self.0.gpus
    }

    /// What copies of GPU memory between processes go by; `Err`: why there is none. Loads CUDA.
    pub(crate) fn domain(&self) -> std::result::Result<Arc<Domain>, String> {
        let make = || {
            let domain = self.0.gpus.cuda().and_then(|cuda| Domain::new(cuda, &self.0.settings));
            domain.map_err(|error| error.to_string())
        };
        self.0.domain.get_or_init(make).clone()
    }

    /// Why GPU memory of a peer on this machine cannot be reached from here, if so. Does not ask CUDA.
    pub(crate) fn no_cuda_ipc(&self) -> Option<String> {
        let tls = &self.0.settings.tls;
        if !self.0.gpus_seen {
            Some("no GPU".to_owned())
        } else if !tls.allows("cuda_ipc") {
            Some(format!("CROSSRAIL_TLS={tls} leaves it out"))
        } else if !tls.allows("shm") {
            Some(format!("it needs shm's Unix socket, and CROSSRAIL_TLS={tls} leaves shm out"))
        } else {
            None
        }
    }

    pub(crate) fn arena(&self) -> &Arc<Arena> {
        &self.0.arena
    }

    /// The rails that the settings allow.
    pub(crate) fn devices(&self) -> Result<Vec<NetDevice>> {
        rails::choose(&self.0.settings.net_devices, &self.0.nics)
    }

    pub(crate) fn nics(&self) -> &[Nic] {
        &self.0.nics
    }

    pub(crate) fn machine(&self) -> &Machine {
        &self.0.machine
    }

    pub(crate) fn cores(&self) -> usize {
        self.0.cpus.allowed.max(1)
    }

    /// The transports that the settings allow, by name.
    pub(crate) fn transports(&self) -> Vec<String> {
        TRANSPORTS.iter().filter(|name| self.0.settings.tls.allows(name)).map(|name| (*name).to_owned()).collect()
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Context({})", self.0.machine.hostname)
    }
}

/// What each transport can do. `cuda`: what CUDA has here, where there is any sign of a GPU.
fn transports(settings: &Settings, rails: &[NetDevice], cuda: Option<&CudaState>) -> Vec<TransportInfo> {
    TRANSPORTS
        .iter()
        .map(|&name| {
            let detail = match name {
                "self" => "a worker with itself".to_owned(),
                // Whether it works is found out by doing it.
                "shm" => match Arena::new().alloc(1) {
                    Ok(_) => {
                        "rings, mapped memory (Context.alloc); single copy by CMA is tried with each peer".to_owned()
                    }
                    Err(error) => return unusable(name, error.to_string(), error.hint),
                },
                "cuda_ipc" => {
                    match cuda {
                        None => return unusable(name, "no GPU".to_owned(), None),
                        Some(CudaState::Absent { reason, fix }) => return unusable(name, reason.clone(), fix.clone()),
                        Some(CudaState::Present(_)) => {}
                    }
                    if !settings.tls.allows("shm") && settings.tls.allows(name) {
                        let reason =
                            format!("it needs shm's Unix socket, and CROSSRAIL_TLS={} leaves shm out", settings.tls);
                        return unusable(name, reason, Some("add shm to CROSSRAIL_TLS".to_owned()));
                    }
                    "one copy between GPUs of this machine; tried with each peer".to_owned()
                }
                _ => {
                    let names: Vec<_> = rails.iter().map(|rail| rail.name.as_str()).collect();
                    format!("{} rails: {}", rails.len(), names.join(" "))
                }
            };
            if !settings.tls.allows(name) {
                let reason = format!("CROSSRAIL_TLS={} leaves it out", settings.tls);
                return unusable(name, reason, Some("set CROSSRAIL_TLS=all".to_owned()));
            }
            if name == "tcp" && rails.is_empty() {
                return unusable(name, "no network device is left".to_owned(), None);
            }
            TransportInfo { name: name.to_owned(), usable: true, detail, reason: None, fix: None }
        })
        .collect()
}

/// Whether there is any sign of a GPU that CUDA could use: on the bus, or, where that is hidden, a device file.
fn gpus_seen() -> bool {
    !crossrail_topology::gpus().is_empty()
        || ["/dev/nvidiactl", "/dev/dxg"].iter().any(|file| std::path::Path::new(file).exists())
}

fn distances(nics: &[Nic], gpus: &[GpuSeen]) -> Vec<(String, Vec<Distance>)> {
    let real = nics.iter().filter(|nic| !nic.loopback);
    let far = |nic: &Nic| gpus.iter().map(|gpu| crossrail_topology::distance(nic, gpu)).collect();
    real.map(|nic| (nic.name.clone(), far(nic))).collect()
}

fn unusable(name: &str, reason: String, fix: Option<String>) -> TransportInfo {
    TransportInfo { name: name.to_owned(), usable: false, detail: String::new(), reason: Some(reason), fix }
}

fn devices(settings: &Settings, nics: &[Nic], chosen: &[NetDevice]) -> Vec<DeviceInfo> {
    let mut rows: Vec<DeviceInfo> = chosen
        .iter()
        .map(|rail| DeviceInfo {
            name: rail.name.clone(),
            interface: rail.interface.clone(),
            address: Some(rail.address),
            speed_mbps: rail.speed_mbps,
            numa_node: rail.numa_node,
            chosen: true,
            reason: None,
        })
        .collect();
    for nic in nics {
        if chosen.iter().any(|rail| rail.interface == nic.name) {
            continue;
        }
        let reason = if !nic.up {
            "it is down".to_owned()
        } else if !nic.running {
            "it has no carrier".to_owned()
        } else if nic.addresses.is_empty() {
            "it has no address".to_owned()
        } else {
            format!("CROSSRAIL_NET_DEVICES={} leaves it out", settings.net_devices)
        };
        rows.push(DeviceInfo {
            name: nic.name.clone(),
            interface: nic.name.clone(),
            address: nic.addresses.first().copied(),
            speed_mbps: nic.speed_mbps,
            numa_node: nic.numa_node,
            chosen: false,
            reason: Some(reason),
        });
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossrail_gpu::CudaInfo;

    #[test]
    fn gpus_without_cuda_are_said_to_be_out_with_the_reason_and_the_fix() {
        let said = |cuda: Option<&CudaState>, tls: &str| {
            let settings = Settings::from_pairs([("CROSSRAIL_TLS", tls)]).expect("a setting");
            let row = transports(&settings, &[], cuda).into_iter().find(|row| row.name == "cuda_ipc").expect("a row");
            (row.usable, row.reason, row.fix)
        };
        assert_eq!(said(None, "all"), (false, Some("no GPU".to_owned()), None));
        let (reason, fix) = ("the CUDA driver is too old".to_owned(), Some("update it".to_owned()));
        let absent = CudaState::Absent { reason: reason.clone(), fix: fix.clone() };
        assert_eq!(said(Some(&absent), "all"), (false, Some(reason), fix));
        let compiler = Err("not here".to_owned());
        let info =
            CudaInfo { driver: "13.0".into(), devices: vec![], peer_access: vec![], kernel_cache: None, compiler };
        let present = CudaState::Present(info);
        assert_eq!(said(Some(&present), "all"), (true, None, None));
        let (usable, reason, fix) = said(Some(&present), "cuda_ipc");
        assert!(!usable && reason.is_some_and(|why| why.contains("shm")) && fix.is_some());
    }
}
