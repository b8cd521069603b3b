//! One process's view of its devices and settings.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use crossrail_gpu::{CudaState, Devices};
use crossrail_tcp::Way as TcpWay;
use crossrail_topology::{Cpus, Distance, GpuSeen, Machine, NetDevice, Nic, Placement};
use crossrail_types::{Result, Settings};

use crate::environment::{self, Environment};
use crate::memory::{Backing, Memory, Place};
use crate::session::registry;
use crate::session::transport::{Availability, Local, Transport};

/// One process's view of its devices and settings; makes memory and workers. Clones share it. Any thread may use it.
///
/// A forked child cannot use what its parent made from a context: operations fail with `Usage` and the reason
/// [`OtherProcess`](crossrail_types::Reason::OtherProcess). It makes a context of its own.
#[derive(Clone)]
pub struct Context(Arc<Environment>);

/// The devices and transports of this process, and why those that are not used are not.
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
    /// Ways of the kernel to send over TCP: which of them are possible and used, and why not the others.
    pub tcp_ways: Vec<TcpWay>,
    /// Where threads that serve a network device or a GPU run.
    pub placement: Placement,
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
        Ok(Context(Arc::new(Environment::new(settings, Devices::new)?)))
    }

    /// A context with `count` GPUs that are made of host memory, for tests.
    ///
    /// # Errors
    /// As [`Context::new`].
    #[cfg(feature = "simulated-gpu")]
    pub fn with_simulated_gpus(settings: Settings, count: u32) -> Result<Context> {
        let simulated = |settings: &Settings, arena| Devices::simulated(settings, arena, count);
        Ok(Context(Arc::new(Environment::new(settings, simulated)?)))
    }

    /// A context that assumes that many processors, for tests.
    ///
    /// # Errors
    /// As [`Context::new`].
    #[cfg(feature = "simulated-gpu")]
    pub fn with_cores(settings: Settings, cores: usize) -> Result<Context> {
        Ok(Context(Arc::new(Environment::new(settings, Devices::new)?.with_cores(cores))))
    }

    /// The simulated GPU of that number, to be held, delayed and made to fail.
    #[cfg(feature = "simulated-gpu")]
    pub fn simulated_gpu(&self, ordinal: u32) -> Option<crossrail_gpu::Simulated> {
        self.0.gpus().simulation(ordinal)
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
        self.0.settings()
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
        self.0.origin().check("alloc")?;
        Ok(Memory(match place {
            Place::Host => Backing::Host(self.0.arena().alloc(len)?),
            Place::Gpu(ordinal) => Backing::Gpu(self.0.gpus().alloc(ordinal, len)?),
        }))
    }

    /// The address to listen at for peers on other machines: `0.0.0.0`, or `::` where no device but loopback has IPv4.
    pub fn anywhere(&self) -> IpAddr {
        let beyond = |is: fn(&IpAddr) -> bool| {
            self.0.nics().iter().any(|nic| nic.up && !nic.loopback && nic.addresses.iter().any(is))
        };
        if !beyond(IpAddr::is_ipv4) && beyond(IpAddr::is_ipv6) {
            Ipv6Addr::UNSPECIFIED.into()
        } else {
            Ipv4Addr::UNSPECIFIED.into()
        }
    }

    /// Describes the devices and transports of this process.
    ///
    /// # Errors
    /// `Io` when the system does not say what devices there are.
    pub fn info(&self) -> Result<Info> {
        self.0.origin().check("info")?;
        let (nics, gpus) = (crossrail_topology::nics()?, crossrail_topology::gpus());
        let cuda = self.0.cuda_state();
        let chosen = self.0.rails_among(&nics);
        let defaults = Settings::default().shown();
        let settings = self.0.settings().shown().into_iter().zip(defaults);
        let settings = settings
            .map(|((name, value), (_, usual))| (name.to_owned(), value.clone().unwrap_or_default(), value == usual))
            .collect();
        Ok(Info {
            machine: crossrail_topology::machine()?,
            cpus: crossrail_topology::cpus()?,
            transports: transports(&Local {
                settings: self.0.settings(),
                rails: chosen.as_deref().unwrap_or(&[]),
                tcp_limits: self.0.tcp_limits(),
                cuda: environment::gpus_seen().then_some(&cuda),
            }),
            devices: devices(self.0.settings(), &nics, chosen.as_deref().unwrap_or(&[])),
            tcp_ways: crossrail_tcp::ways(),
            placement: self.0.placement().clone(),
            distances: distances(&nics, &gpus),
            gpus,
            cuda,
            settings,
        })
    }

    /// Number of copies between that GPU and memory of peers on this machine that were started so far.
    pub fn copied(&self, ordinal: u32) -> u64 {
        self.0.copied(ordinal)
    }

    /// The settings and devices.
    pub(crate) fn environment(&self) -> &Arc<Environment> {
        &self.0
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Context({})", self.0.machine().hostname)
    }
}

/// What each transport can do.
fn transports(local: &Local<'_>) -> Vec<TransportInfo> {
    let settings = local.settings;
    let row = |transport: &Arc<dyn Transport>| {
        let name = transport.name();
        let left_out = || {
            let reason = format!("CROSSRAIL_TLS={} leaves it out", settings.tls);
            Availability::Unusable(reason, Some("set CROSSRAIL_TLS=all".to_owned()))
        };
        match transport.availability(local) {
            Availability::Usable(_) if !settings.tls.allows(name) => info(name, left_out()),
            availability => info(name, availability),
        }
    };
    registry::registered().iter().map(row).collect()
}

fn info(name: &str, availability: Availability) -> TransportInfo {
    let name = name.to_owned();
    match availability {
        Availability::Usable(detail) => TransportInfo { name, usable: true, detail, reason: None, fix: None },
        Availability::Unusable(reason, fix) => {
            TransportInfo { name, usable: false, detail: String::new(), reason: Some(reason), fix }
        }
    }
}

fn distances(nics: &[Nic], gpus: &[GpuSeen]) -> Vec<(String, Vec<Distance>)> {
    let real = nics.iter().filter(|nic| !nic.loopback);
    let far = |nic: &Nic| gpus.iter().map(|gpu| crossrail_topology::distance(nic, gpu)).collect();
    real.map(|nic| (nic.name.clone(), far(nic))).collect()
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
    use crate::environment::TcpLimits;
    use crossrail_gpu::CudaInfo;

    #[test]
    fn gpus_without_cuda_are_said_to_be_out_with_the_reason_and_the_fix() {
        let said = |cuda: Option<&CudaState>, tls: &str| {
            let settings = Settings::from_pairs([("CROSSRAIL_TLS", tls)]).expect("a setting");
            let local = Local { settings: &settings, rails: &[], tcp_limits: TcpLimits::of(&settings, 2, &[]), cuda };
            let row = transports(&local).into_iter().find(|row| row.name == "cuda_ipc").expect("a row");
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
