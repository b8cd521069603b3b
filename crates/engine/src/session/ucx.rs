//! UCX over the rails: lanes that are dialled, lost and dialled again as TCP's are, and carried by UCX.
//!
//! Used where it gains something: if `CROSSRAIL_TLS` names it, or if UCX finds an RDMA device. docs/guides/ucx.md says
//! more.

use std::collections::HashMap;
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;

use crossrail_locks::{Mutex, PerProcess};
use crossrail_transport::Lane;
use crossrail_types::{Error, ErrorKind, Filter, Log, Result, Settings};
use crossrail_ucx::{Class, Fabric, Library, Resource};

use super::carrier::{Carrier, Join, Obstacle};
use super::transport::{Availability, Local};

/// RDMA devices, as the kernel lists them.
const DEVICES: &str = "/sys/class/infiniband";

/// See the module.
pub(super) struct Ucx;

impl Carrier for Ucx {
    fn name(&self) -> &'static str {
        "ucx"
    }

    fn class(&self) -> u16 {
        1
    }

    fn announcement(&self) -> u8 {
        b'U'
    }

    fn availability(&self, local: &Local<'_>) -> Availability {
        if !local.settings.tls.allows(self.name()) {
            // The settings say so themselves; UCX need not be loaded for that.
            return Availability::Usable(String::new());
        }
        match open(local.settings) {
            Err(unused) => Availability::Unusable(unused.why, unused.fix),
            Ok((library, fabric)) => {
                let list: Vec<String> = fabric.resources().iter().map(ToString::to_string).collect();
                let files = crossrail_ucx::loaded_files();
                let twice = match files.len() {
                    0 | 1 => String::new(),
                    count => format!("; {count} libraries called libucp are loaded here: {}", files.join(" ")),
                };
                Availability::Usable(format!("UCX {}: {}{twice}", library.version(), list.join(" ")))
            }
        }
    }

    fn is_offered(&self, settings: &Settings) -> bool {
        open(settings).is_ok()
    }

    fn obstacle(&self, settings: &Settings) -> Option<Obstacle> {
        open(settings).err()
    }

    fn join(&self, stream: TcpStream, join: Join<'_>) -> Result<Box<dyn Lane>> {
        let fabric = fabric(join.settings, join.interface, join.loopback)?;
        Ok(Box::new(crossrail_ucx::attach(stream, &fabric, join.id, join.label, join.deadline)?))
    }
}

/// UCX with everything that the settings let it use, if it is used at all.
fn open(settings: &Settings) -> std::result::Result<(&'static Library, Arc<Fabric>), Obstacle> {
    let named = matches!(&settings.tls, Filter::Only(_)) && settings.tls.allows("ucx");
    let nics = std::fs::read_dir(DEVICES).is_ok_and(|mut devices| devices.next().is_some());
    if !named && !nics {
        let fix = "with an RDMA NIC UCX is used by itself; CROSSRAIL_TLS=ucx uses it over TCP and memory, too";
        return Err(Obstacle { why: "no RDMA device is here".to_owned(), fix: Some(fix.to_owned()) });
    }
    let library = library(settings)?;
    let fabric = cached(library, settings.tls.of_ucx(), None)?;
    if !named && !fabric.resources().iter().any(|resource| resource.class() == Class::Rdma) {
        let fix = "`ucx_info -d` lists what UCX finds; PyPI's libucx has no InfiniBand, distributions' UCX has";
        return Err(Obstacle { why: "UCX finds no RDMA device".to_owned(), fix: Some(fix.to_owned()) });
    }
    Ok((library, fabric))
}

fn library(settings: &Settings) -> Result<&'static Library> {
    Library::load(settings.ucx_library.as_deref(), Log(settings.log)).map_err(Error::from)
}

/// The context of a rail: within this machine UCX's transports over memory, else those of the device.
///
/// # Errors
/// `Unsupported` when UCX has nothing there, with what it has.
fn fabric(settings: &Settings, interface: Option<&str>, loopback: bool) -> Result<Arc<Fabric>> {
    let library = library(settings)?;
    let all = cached(library, settings.tls.of_ucx(), None)?;
    let Some((transports, device)) = choose(all.resources(), interface, loopback, interface_of) else {
        let list: Vec<String> = all.resources().iter().map(ToString::to_string).collect();
        let place = interface.unwrap_or("this address");
        let detail = format!("UCX has no transport over {place}; it has {}", list.join(" "));
        return Err(Error::new(ErrorKind::Unsupported, "ucx", detail)
            .with_hint("CROSSRAIL_TLS, UCX_TLS and UCX_NET_DEVICES may leave it out"));
    };
    cached(library, Some(transports), device)
}

/// The network interface of an RDMA device such as `mlx5_0:1`, if it has one.
fn interface_of(device: &str) -> Option<String> {
    let name = device.split(':').next()?;
    let path = Path::new(DEVICES).join(name).join("device/net");
    Some(std::fs::read_dir(path).ok()?.next()?.ok()?.file_name().to_string_lossy().into_owned())
}

/// UCX's transports, and its network device, for a rail.
fn choose(
    resources: &[Resource],
    interface: Option<&str>,
    loopback: bool,
    interface_of: impl Fn(&str) -> Option<String>,
) -> Option<(Vec<String>, Option<String>)> {
    let names = |fits: &dyn Fn(&Resource) -> bool| {
        let mut names: Vec<String> =
            resources.iter().filter(|found| fits(found)).map(|found| found.transport.clone()).collect();
        names.sort();
        names.dedup();
        names
    };
    if loopback {
        let memory = names(&|found| found.class() == Class::Memory);
        if memory.iter().any(|name| Class::carries_messages(name)) {
            return Some((memory, None));
        }
    }
    let is_of = |device: &str| interface_of(device).as_deref() == interface;
    let rdma = resources.iter().find(|found| found.class() == Class::Rdma && is_of(&found.device));
    if let Some(found) = rdma.filter(|_| interface.is_some()) {
        let device = found.device.clone();
        return Some((names(&|other| other.device == device), Some(device)));
    }
    let socket =
        resources.iter().find(|found| found.class() == Class::Tcp && Some(found.device.as_str()) == interface)?;
    Some((vec![socket.transport.clone()], Some(socket.device.clone())))
}

/// A context for that choice, opened once in this process.
fn cached(library: &'static Library, transports: Option<Vec<String>>, device: Option<String>) -> Result<Arc<Fabric>> {
    type Choice = (Option<Vec<String>>, Option<String>);
    static OPEN: PerProcess<Mutex<HashMap<Choice, Arc<Fabric>>>> = PerProcess::new();
    let mut open = OPEN.lock();
    let key = (transports, device);
    if let Some(fabric) = open.get(&key) {
        return Ok(fabric.clone());
    }
    let fabric = Fabric::open(library, key.0.as_deref(), key.1.as_deref())?;
    open.insert(key, fabric.clone());
    Ok(fabric)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resources(list: &str) -> Vec<Resource> {
        let parts = list.split(' ').filter_map(|text| text.split_once('/'));
        parts.map(|(transport, device)| Resource { transport: transport.into(), device: device.into() }).collect()
    }

    #[test]
    fn a_rail_is_carried_by_memory_by_its_nic_or_by_tcp() {
        let all = resources(
            "self/memory0 tcp/lo tcp/eth0 tcp/ens1 sysv/memory posix/memory cma/memory rc_mlx5/mlx5_0:1 ud_mlx5/mlx5_0:1",
        );
        let interface_of = |device: &str| (device == "mlx5_0:1").then(|| "ens1".to_owned());
        let of = |names: &[&str], device: Option<&str>| {
            Some((names.iter().map(|name| (*name).to_owned()).collect(), device.map(str::to_owned)))
        };
        assert_eq!(choose(&all, Some("lo"), true, interface_of), of(&["cma", "posix", "sysv"], None));
        assert_eq!(choose(&all, Some("ens1"), false, interface_of), of(&["rc_mlx5", "ud_mlx5"], Some("mlx5_0:1")));
        assert_eq!(choose(&all, Some("eth0"), false, interface_of), of(&["tcp"], Some("eth0")));
        assert_eq!(choose(&all, Some("eth9"), false, interface_of), None);
        assert_eq!(choose(&resources("tcp/lo"), Some("lo"), true, interface_of), of(&["tcp"], Some("lo")));
        assert_eq!(choose(&all, None, false, interface_of), None);
        let copies = resources("tcp/lo cma/memory");
        assert_eq!(choose(&copies, Some("lo"), true, interface_of), of(&["tcp"], Some("lo")));
    }
}
