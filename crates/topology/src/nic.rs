//! Network interfaces and the hardware behind them.

use std::net::IpAddr;

use crossrail_types::{Error, Result};
use nix::net::if_::InterfaceFlags;
use nix::sys::socket::SockaddrStorage;

use crate::tree::{Tree, link_name, natural, pci_path, text};

/// A network interface as the kernel lists it in this network namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interface {
    /// The name, such as `eth1`.
    pub name: String,
    /// The interface index.
    pub index: u32,
    /// The hardware address, if it has one.
    pub mac: Option<[u8; 6]>,
    /// Its addresses, in the kernel's order.
    pub addresses: Vec<IpAddr>,
    /// Administratively up.
    pub up: bool,
    /// The link is up.
    pub running: bool,
    /// The loopback interface `lo`.
    pub loopback: bool,
}

/// A network interface and the hardware behind it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nic {
    /// The name, such as `eth1`.
    pub name: String,
    /// The interface index.
    pub index: u32,
    /// Its addresses, in the kernel's order, link-local ones included.
    pub addresses: Vec<IpAddr>,
    /// Administratively up.
    pub up: bool,
    /// The link is up.
    pub running: bool,
    /// The loopback interface `lo`.
    pub loopback: bool,
    /// No hardware of its own is visible: veth, bridge, tunnel, `lo`.
    pub virtual_: bool,
    /// The link rate in Mbit/s; `None` if the driver does not report it, and for virtual interfaces, whose drivers
    /// report an arbitrary one.
    pub speed_mbps: Option<u32>,
    /// The maximum transmission unit in bytes.
    pub mtu: Option<u32>,
    /// The NUMA node of the hardware.
    pub numa_node: Option<u32>,
    /// The PCI address of the hardware.
    pub pci: Option<String>,
    /// The PCI devices from the host bridge down to the hardware; empty if there is none.
    pub pci_path: Vec<String>,
    /// The kernel driver, or the kind of a virtual interface (`bridge`, `bond`, `vlan`).
    pub driver: Option<String>,
}

impl Tree {
    /// The network interfaces of this network namespace, ordered by index.
    ///
    /// # Errors
    /// `Io` if the operating system does not list them.
    pub fn nics(&self) -> Result<Vec<Nic>> {
        Ok(interfaces()?.into_iter().map(|interface| self.describe(interface)).collect())
    }

    /// Adds the data of sysfs to an interface, if sysfs shows the same interface.
    pub fn describe(&self, interface: Interface) -> Nic {
        let base = self.sys.join("class/net").join(&interface.name);
        let seen = natural(&base.join("ifindex")) == Some(interface.index)
            && interface.mac.is_none_or(|mac| text(&base.join("address")).is_none_or(|text| text == mac_text(mac)));
        let mut nic = Nic {
            name: interface.name,
            index: interface.index,
            addresses: interface.addresses,
            up: interface.up,
            running: interface.running,
            loopback: interface.loopback,
            virtual_: true,
            ..Nic::default()
        };
        if !seen {
            return nic;
        }
        let device = base.join("device");
        nic.virtual_ = !device.exists();
        nic.mtu = natural(&base.join("mtu"));
        if nic.virtual_ {
            let uevent = text(&base.join("uevent")).unwrap_or_default();
            nic.driver = uevent.lines().find_map(|line| Some(line.strip_prefix("DEVTYPE=")?.to_owned()));
            return nic;
        }
        nic.speed_mbps = natural(&base.join("speed")).filter(|speed| *speed > 0);
        nic.driver = link_name(&device.join("driver"));
        nic.pci_path = pci_path(&device);
        nic.pci = nic.pci_path.last().filter(|part| !part.starts_with("pci")).cloned();
        nic.numa_node = natural(&device.join("numa_node"))
            .or_else(|| natural(&self.sys.join("bus/pci/devices").join(nic.pci.as_ref()?).join("numa_node")));
        nic
    }
}

/// A NIC that need not have a network interface, by the PCI address of its hardware, such as `0000:36:00.0`.
pub(crate) fn hardware(tree: &Tree, name: &str, pci: &str) -> Nic {
    let device = tree.sys.join("bus/pci/devices").join(pci);
    Nic {
        name: name.to_owned(),
        pci: Some(pci.to_owned()),
        pci_path: pci_path(&device),
        numa_node: natural(&device.join("numa_node")),
        driver: link_name(&device.join("driver")),
        ..Nic::default()
    }
}

/// The interfaces listed by `getifaddrs`, ordered by index.
fn interfaces() -> Result<Vec<Interface>> {
    let failed = |call, errno: nix::Error| Error::io("list network interfaces", call, &errno.into());
    let mut found: Vec<Interface> = Vec::new();
    for entry in nix::ifaddrs::getifaddrs().map_err(|errno| failed("getifaddrs", errno))? {
        // An IPv4 label such as eth0:1 is an address of eth0.
        let name = entry.interface_name.split(':').next().unwrap_or_default().to_owned();
        let place = match found.iter().position(|interface| interface.name == name) {
            Some(place) => place,
            None => {
                let index = match nix::net::if_::if_nametoindex(name.as_str()) {
                    Ok(index) => index,
                    Err(nix::Error::ENODEV | nix::Error::ENXIO) => continue, // removed since
                    Err(errno) => return Err(failed("if_nametoindex", errno)),
                };
                let flags = entry.flags;
                found.push(Interface {
                    name,
                    index,
                    up: flags.contains(InterfaceFlags::IFF_UP),
                    running: flags.contains(InterfaceFlags::IFF_RUNNING),
                    loopback: flags.contains(InterfaceFlags::IFF_LOOPBACK),
                    ..Interface::default()
                });
                found.len() - 1
            }
        };
        let Some(address) = entry.address else { continue };
        if let Some(address) = ip(&address) {
            found[place].addresses.push(address);
        } else if let Some(link) = address.as_link_addr() {
            found[place].mac = link.addr().filter(|mac| *mac != [0; 6]);
        }
    }
    found.sort_by_key(|interface| interface.index);
    Ok(found)
}

fn ip(address: &SockaddrStorage) -> Option<IpAddr> {
    match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
        (Some(v4), _) => Some(v4.ip().into()),
        (None, Some(v6)) => Some(v6.ip().into()),
        (None, None) => None,
    }
}

fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Fake;

    const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

    fn eth1() -> Interface {
        Interface { name: "eth1".into(), index: 7, mac: Some(MAC), up: true, running: true, ..Interface::default() }
    }

    fn with_eth1() -> Fake {
        let fake = Fake::new();
        let device = "devices/pci0000:80/0000:80:01.0/0000:81:00.0";
        fake.file(&format!("{device}/numa_node"), "1");
        fake.link(&format!("{device}/driver"), "bus/pci/drivers/mlx5_core");
        let net = format!("{device}/net/eth1");
        for (name, text) in [("ifindex", "7"), ("address", "02:00:00:00:00:01"), ("mtu", "9000"), ("speed", "200000")] {
            fake.file(&format!("{net}/{name}"), text);
        }
        fake.link(&format!("{net}/device"), device);
        fake.link("class/net/eth1", &net);
        fake
    }

    #[test]
    fn hardware_is_described() {
        let fake = with_eth1();
        let nic = fake.tree().describe(eth1());
        assert_eq!(nic.pci.as_deref(), Some("0000:81:00.0"));
        assert_eq!(nic.pci_path, ["pci0000:80", "0000:80:01.0", "0000:81:00.0"]);
        assert_eq!((nic.speed_mbps, nic.mtu, nic.numa_node), (Some(200_000), Some(9000), Some(1)));
        assert_eq!(nic.driver.as_deref(), Some("mlx5_core"));
        assert!(!nic.virtual_);
    }

    #[test]
    fn sysfs_of_another_namespace_is_ignored() {
        let fake = with_eth1();
        for other in [Interface { index: 8, ..eth1() }, Interface { mac: Some([2, 0, 0, 0, 0, 9]), ..eth1() }] {
            let nic = fake.tree().describe(other);
            assert_eq!((nic.pci, nic.speed_mbps, nic.mtu, nic.virtual_), (None, None, None, true));
        }
    }

    #[test]
    fn meaningless_numbers_are_unknown() {
        let fake = with_eth1();
        let device = "devices/pci0000:80/0000:80:01.0/0000:81:00.0";
        fake.file(&format!("{device}/net/eth1/speed"), "-1");
        fake.file(&format!("{device}/numa_node"), "-1");
        let nic = fake.tree().describe(eth1());
        assert_eq!((nic.speed_mbps, nic.numa_node), (None, None));
    }

    #[test]
    fn a_nic_without_an_interface_is_found_by_its_pci_address() {
        let fake = Fake::new();
        let device = "devices/pci0000:10/0000:10:01.0/0000:11:00.0";
        fake.file(&format!("{device}/numa_node"), "1");
        fake.link("bus/pci/devices/0000:11:00.0", device);
        let nic = hardware(&fake.tree(), "rdmap17s0-rdm", "0000:11:00.0");
        assert_eq!((nic.name.as_str(), nic.numa_node), ("rdmap17s0-rdm", Some(1)));
        assert_eq!(nic.pci_path, ["pci0000:10", "0000:10:01.0", "0000:11:00.0"]);
        assert_eq!(hardware(&fake.tree(), "x", "0000:99:00.0").pci_path, Vec::<String>::new());
    }

    #[test]
    fn a_virtio_nic_has_the_pci_address_of_its_function() {
        let fake = Fake::new();
        let device = "devices/pci0000:00/0000:00:03.0/virtio2";
        fake.file("devices/pci0000:00/0000:00:03.0/numa_node", "0");
        fake.file(&format!("{device}/net/eth1/ifindex"), "7");
        fake.link(&format!("{device}/net/eth1/device"), device);
        fake.link("class/net/eth1", &format!("{device}/net/eth1"));
        fake.link("bus/pci/devices/0000:00:03.0", "devices/pci0000:00/0000:00:03.0");
        let nic = fake.tree().describe(eth1());
        assert_eq!((nic.pci.as_deref(), nic.numa_node), (Some("0000:00:03.0"), Some(0)));
    }

    #[test]
    fn a_virtual_interface_has_a_kind_but_no_speed() {
        let fake = Fake::new();
        fake.file("devices/virtual/net/br0/ifindex", "3");
        fake.file("devices/virtual/net/br0/speed", "10000");
        fake.file("devices/virtual/net/br0/uevent", "DEVTYPE=bridge\nINTERFACE=br0\n");
        fake.link("class/net/br0", "devices/virtual/net/br0");
        let nic = fake.tree().describe(Interface { name: "br0".into(), index: 3, ..Interface::default() });
        assert_eq!((nic.driver.as_deref(), nic.speed_mbps, nic.virtual_), (Some("bridge"), None, true));
    }

    #[test]
    fn this_machine_has_a_loopback_interface() {
        let nics = crate::nics().unwrap();
        let lo = nics.iter().find(|nic| nic.loopback).unwrap();
        assert!(lo.index > 0);
        assert!(!lo.up || lo.addresses.iter().any(IpAddr::is_loopback));
        assert!(nics.windows(2).all(|pair| pair[0].index < pair[1].index));
    }
}
