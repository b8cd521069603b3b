//! What NCCL learns of the device: one, whose rails are Crossrail's.

use std::ffi::CString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;
use std::path::Path;

use crossrail::{Context, DeviceInfo};
use crossrail_topology::Nic;
use crossrail_types::Result;

/// Mbit/s of a rail whose speed is unknown; NCCL's own sockets assume the same.
const UNKNOWN_MBPS: u32 = 10_000;
/// Mbit/s of rails that never leave this machine, together: what the engine's cost model assumes of loopback.
const LOOPBACK_MBPS: u32 = 48_000;
/// One-way latency in microseconds that the engine's cost model assumes of a network and of loopback.
const NETWORK_US: f32 = 15.0;
const LOOPBACK_US: f32 = 3.5;

/// The device's properties, as far as they do not depend on the table's version.
#[derive(Debug)]
pub(crate) struct Device {
    /// `crossrail`, and the names of the rails.
    pub(crate) name: CString,
    /// Name of the RMA plugin's device: NCCL identifies devices by their names.
    pub(crate) rma_name: CString,
    /// The PCI device of the fastest rail, in sysfs; `None` if there is none.
    pub(crate) pci_path: Option<CString>,
    /// Equal in all processes that use the same rails of the same machine.
    pub(crate) guid: u64,
    /// The sum of the rails' speeds in Mbit/s.
    pub(crate) speed_mbps: u32,
    /// Microseconds.
    pub(crate) latency_us: f32,
    /// Hash of the machine's boot id.
    pub(crate) machine: u64,
    /// The machine's name.
    pub(crate) host: String,
    /// Addresses of rails that reach other machines, the fastest first.
    pub(crate) addresses: Vec<IpAddr>,
    /// The rails, for the log.
    pub(crate) rails: String,
}

impl Device {
    /// Describes the rails of `context`.
    ///
    /// # Errors
    /// `Io` when the system does not list its devices.
    pub(crate) fn describe(context: &Context) -> Result<Device> {
        let info = context.info()?;
        let nics = crossrail_topology::nics()?;
        let rails: Vec<&DeviceInfo> = info.devices.iter().filter(|device| device.chosen).collect();
        Ok(from_rails(&rails, &nics, &info.machine.boot_id, &info.machine.hostname))
    }
}

fn from_rails(rails: &[&DeviceInfo], nics: &[Nic], boot_id: &str, host: &str) -> Device {
    let is_local = |rail: &DeviceInfo| rail.address.is_some_and(|address| address.is_loopback());
    let mut remote: Vec<&DeviceInfo> = rails.iter().copied().filter(|rail| !is_local(rail)).collect();
    remote.sort_by_key(|rail| std::cmp::Reverse(rail.speed_mbps));
    let used = if remote.is_empty() { rails.to_vec() } else { remote.clone() };
    let speed = |rail: &&DeviceInfo| rail.speed_mbps.unwrap_or(UNKNOWN_MBPS);
    let speed_mbps = if remote.is_empty() { LOOPBACK_MBPS } else { remote.iter().map(speed).sum() };
    let pci = |rail: &&DeviceInfo| nics.iter().find(|nic| nic.name == rail.interface)?.pci.clone();
    let names: Vec<&str> = used.iter().map(|rail| rail.name.as_str()).collect();
    let shown = |rail: &&DeviceInfo| match rail.speed_mbps {
        Some(mbps) => format!("{} ({mbps} Mbit/s)", rail.name),
        None => rail.name.clone(),
    };
    let named = |kind: &str| CString::new(format!("{kind}:{}", names.join("+")).replace('\0', "")).unwrap_or_default();
    Device {
        name: named("crossrail"),
        rma_name: named("crossrail-rma"),
        pci_path: remote.first().and_then(pci).and_then(|pci| sysfs_path(&pci)),
        guid: hash(&(boot_id, &names)),
        speed_mbps,
        latency_us: if remote.is_empty() { LOOPBACK_US } else { NETWORK_US },
        machine: hash(&boot_id),
        host: host.to_owned(),
        addresses: remote.iter().filter_map(|rail| rail.address).filter(|ip| !is_link_local(ip)).collect(),
        rails: used.iter().map(shown).collect::<Vec<_>>().join(", "),
    }
}

/// The path that NCCL's topology search expects: below `/sys/devices`, without links.
fn sysfs_path(pci: &str) -> Option<CString> {
    let path = std::fs::canonicalize(Path::new("/sys/bus/pci/devices").join(pci)).ok()?;
    CString::new(path.into_os_string().into_encoded_bytes()).ok()
}

/// An address that means nothing without its interface.
fn is_link_local(ip: &IpAddr) -> bool {
    matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

/// The same in every process of a release.
fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rail(name: &str, address: [u8; 4], speed_mbps: Option<u32>) -> DeviceInfo {
        DeviceInfo {
            name: name.to_owned(),
            interface: name.to_owned(),
            address: Some(address.into()),
            speed_mbps,
            numa_node: None,
            chosen: true,
            reason: None,
        }
    }

    #[test]
    fn speeds_add_up_and_loopback_counts_only_alone() {
        let (slow, fast) = (rail("eth0", [10, 0, 0, 1], None), rail("eth1", [10, 0, 1, 1], Some(100_000)));
        let lo = rail("127.0.0.1", [127, 0, 0, 1], None);
        let device = from_rails(&[&slow, &lo, &fast], &[], "boot", "host");
        assert_eq!((device.speed_mbps, device.latency_us), (110_000, NETWORK_US));
        assert_eq!(device.name.to_str(), Ok("crossrail:eth1+eth0"));
        assert_eq!(device.addresses, [IpAddr::from([10, 0, 1, 1]), IpAddr::from([10, 0, 0, 1])]);
        let local = from_rails(&[&lo], &[], "boot", "host");
        assert_eq!((local.speed_mbps, local.latency_us, local.addresses.len()), (LOOPBACK_MBPS, LOOPBACK_US, 0));
    }

    #[test]
    fn ids_are_those_of_the_machine_and_its_rails() {
        let (one, two) = (rail("eth0", [10, 0, 0, 1], None), rail("eth1", [10, 0, 1, 1], None));
        let guid = |rails: &[&DeviceInfo], boot: &str| from_rails(rails, &[], boot, "host").guid;
        assert_eq!(guid(&[&one], "a"), guid(&[&one], "a"));
        assert_ne!(guid(&[&one], "a"), guid(&[&one], "b"));
        assert_ne!(guid(&[&one], "a"), guid(&[&two], "a"));
    }
}
