//! Selection of the network devices that `CROSSRAIL_NET_DEVICES` allows.

use std::net::{IpAddr, Ipv4Addr};

use crossrail_types::{Error, ErrorKind, Filter, Result};

use crate::nic::Nic;

const SETTING: &str = "CROSSRAIL_NET_DEVICES";

/// A network device that may carry data: an interface, or one of its local addresses. Each is one rail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetDevice {
    /// The name as configured, such as `eth1` or `127.0.0.2`.
    pub name: String,
    /// The interface the address belongs to.
    pub interface: String,
    /// The address to bind to: the first IPv4 one, else the first IPv6 one that is not link-local.
    pub address: IpAddr,
    /// All addresses to bind to, one per address family or subnet, `address` first.
    pub addresses: Vec<IpAddr>,
    /// The interface index.
    pub index: u32,
    /// The link rate in Mbit/s, if known.
    pub speed_mbps: Option<u32>,
    /// It reaches this machine only.
    pub loopback: bool,
    /// The NUMA node of the hardware, if known.
    pub numa_node: Option<u32>,
}

/// Selects the devices of `nics` that `filter` allows.
///
/// `all` selects every interface that is up and running and has an address, with `lo` last, for peers on this machine.
/// A list keeps its order, and every device in it must be usable. Any listed address in 127.0.0.0/8 is a device of
/// `lo`, so that one machine can have several rails.
///
/// # Errors
/// `Config` for an unknown device (the error lists the known ones), an unusable device (with the reason), an address
/// listed twice, and an empty selection.
pub fn select(filter: &Filter, nics: &[Nic]) -> Result<Vec<NetDevice>> {
    let chosen = match filter {
        Filter::All => everything(nics),
        Filter::Only(names) => {
            let chosen = names.iter().map(|name| named(name, nics)).collect::<Result<Vec<_>>>()?;
            for (index, device) in chosen.iter().enumerate() {
                if let Some(twin) = chosen[..index].iter().find(|twin| twin.address == device.address) {
                    let text = format!("{} and {} both have the address {}", twin.name, device.name, device.address);
                    return Err(Error::new(ErrorKind::Config, SETTING, text).with_hint("list each device once"));
                }
            }
            chosen
        }
        Filter::Except(names) => {
            for name in names {
                find(name, nics)?;
            }
            let excluded = |name: &str| names.iter().any(|known| known == name);
            everything(nics)
                .into_iter()
                .filter(|device| !excluded(&device.interface))
                .filter_map(|device| without(device, &excluded))
                .collect()
        }
    };
    if chosen.is_empty() {
        return Err(Error::new(ErrorKind::Config, SETTING, format!("`{filter}` leaves no usable network device"))
            .with_hint(known(nics)));
    }
    Ok(chosen)
}

/// The device without its excluded addresses; `None` if no address is left.
fn without(mut device: NetDevice, excluded: &impl Fn(&str) -> bool) -> Option<NetDevice> {
    device.addresses.retain(|address| !excluded(&address.to_string()));
    device.address = *device.addresses.first()?;
    Some(device)
}

fn everything(nics: &[Nic]) -> Vec<NetDevice> {
    let usable = |nic: &&Nic| nic.up && nic.running;
    let real = nics.iter().filter(usable).filter(|nic| !nic.loopback);
    let lo = nics.iter().filter(usable).filter(|nic| nic.loopback);
    real.chain(lo).filter_map(|nic| device(&nic.name, nic, bindable(nic))).collect()
}

fn named(name: &str, nics: &[Nic]) -> Result<NetDevice> {
    let (nic, address) = find(name, nics)?;
    let unusable = |why: &str| Error::new(ErrorKind::Config, SETTING, format!("{name} {why}")).with_hint(known(nics));
    if !nic.up {
        let down =
            if nic.name == name { "is down".to_owned() } else { format!("belongs to {}, which is down", nic.name) };
        return Err(unusable(&down).with_hint(format!("ip link set {} up, or {}", nic.name, known(nics))));
    }
    if !nic.running {
        return Err(unusable("has no link"));
    }
    let addresses = address.map_or_else(|| bindable(nic), |address| vec![address]);
    device(name, nic, addresses).ok_or_else(|| unusable("has no address to bind to"))
}

/// The interface with the given name or local address; also the address if `name` is one.
fn find<'a>(name: &str, nics: &'a [Nic]) -> Result<(&'a Nic, Option<IpAddr>)> {
    if let Some(nic) = nics.iter().find(|nic| nic.name == name) {
        return Ok((nic, None));
    }
    let unknown =
        |what: &str| Err(Error::new(ErrorKind::Config, SETTING, format!("{name} {what}")).with_hint(known(nics)));
    let Ok(address) = name.parse::<IpAddr>() else {
        return unknown("is not a network interface of this machine");
    };
    let of_lo = |nic: &&Nic| nic.loopback && matches!(address, IpAddr::V4(v4) if v4.is_loopback());
    match nics.iter().find(|nic| nic.addresses.contains(&address)).or_else(|| nics.iter().find(of_lo)) {
        Some(_) if is_link_local(&address) => unknown("is link-local; use a global address of its interface instead"),
        Some(nic) => Ok((nic, Some(address))),
        None => unknown("is not an address of this machine"),
    }
}

fn device(name: &str, nic: &Nic, addresses: Vec<IpAddr>) -> Option<NetDevice> {
    Some(NetDevice {
        name: name.to_owned(),
        interface: nic.name.clone(),
        address: *addresses.first()?,
        addresses,
        index: nic.index,
        speed_mbps: nic.speed_mbps,
        loopback: nic.loopback,
        numa_node: nic.numa_node,
    })
}

/// The addresses that can be bound without a scope id, IPv4 first.
fn bindable(nic: &Nic) -> Vec<IpAddr> {
    let usable = nic.addresses.iter().copied().filter(|address| !is_link_local(address));
    let (mut addresses, v6): (Vec<_>, Vec<_>) = usable.partition(IpAddr::is_ipv4);
    // lo may have further addresses; 127.0.0.1 comes first because every machine has it.
    addresses.sort_by_key(|address| nic.loopback && *address != IpAddr::V4(Ipv4Addr::LOCALHOST));
    addresses.extend(v6);
    addresses
}

fn is_link_local(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(_) => false,
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

/// The hint that lists the known devices: `known: eth0 (192.0.2.2), lo (127.0.0.1)`.
fn known(nics: &[Nic]) -> String {
    let each = nics.iter().map(|nic| {
        let state = match (nic.up, nic.running, bindable(nic).first()) {
            (false, ..) => "down".to_owned(),
            (_, false, _) => "no link".to_owned(),
            (.., None) => "no address".to_owned(),
            (.., Some(address)) => address.to_string(),
        };
        format!("{} ({state})", nic.name)
    });
    format!("known: {}", each.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nic(name: &str, index: u32, addresses: &[&str]) -> Nic {
        Nic {
            name: name.into(),
            index,
            addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
            up: true,
            running: true,
            loopback: name == "lo",
            ..Nic::default()
        }
    }

    fn machine() -> Vec<Nic> {
        vec![
            nic("lo", 1, &["127.0.0.1", "::1"]),
            nic("eth0", 2, &["fe80::2", "fd00::2", "192.0.2.2"]),
            nic("eth1", 3, &["fe80::3", "2001:db8::3"]),
            Nic { up: false, running: false, ..nic("eth2", 4, &["192.0.2.4"]) },
            nic("eth3", 5, &["fe80::5"]),
            Nic { running: false, ..nic("eth4", 6, &["192.0.2.6"]) },
        ]
    }

    fn only(names: &[&str]) -> Filter {
        Filter::Only(names.iter().map(|name| (*name).to_owned()).collect())
    }

    fn except(names: &[&str]) -> Filter {
        Filter::Except(names.iter().map(|name| (*name).to_owned()).collect())
    }

    fn shown(filter: &Filter) -> Vec<String> {
        let devices = select(filter, &machine()).unwrap();
        devices.iter().map(|device| format!("{}={}@{}", device.name, device.address, device.interface)).collect()
    }

    fn refused(filter: &Filter) -> String {
        let error = select(filter, &machine()).unwrap_err();
        assert_eq!((error.kind, error.operation.as_str()), (ErrorKind::Config, SETTING));
        error.to_string()
    }

    #[test]
    fn all_is_every_usable_interface_and_lo_last() {
        assert_eq!(shown(&Filter::All), ["eth0=192.0.2.2@eth0", "eth1=2001:db8::3@eth1", "lo=127.0.0.1@lo"]);
        let devices = select(&Filter::All, &machine()).unwrap();
        assert!(devices[2].loopback && !devices[0].loopback);
        assert_eq!(devices[0].addresses, ["192.0.2.2", "fd00::2"].map(|text| text.parse::<IpAddr>().unwrap()));
    }

    #[test]
    fn a_list_keeps_its_order() {
        assert_eq!(shown(&only(&["eth1", "eth0"])), ["eth1=2001:db8::3@eth1", "eth0=192.0.2.2@eth0"]);
    }

    #[test]
    fn local_addresses_are_devices() {
        assert_eq!(
            shown(&only(&["127.0.0.1", "127.0.0.2", "fd00::2", "::1"])),
            ["127.0.0.1=127.0.0.1@lo", "127.0.0.2=127.0.0.2@lo", "fd00::2=fd00::2@eth0", "::1=::1@lo"]
        );
        assert!(select(&only(&["127.0.0.9"]), &machine()).unwrap()[0].loopback);
    }

    #[test]
    fn exclusion_is_by_interface_or_address() {
        assert_eq!(shown(&except(&["eth0"])), ["eth1=2001:db8::3@eth1", "lo=127.0.0.1@lo"]);
        assert_eq!(shown(&except(&["192.0.2.2", "lo"])), ["eth0=fd00::2@eth0", "eth1=2001:db8::3@eth1"]);
        assert_eq!(shown(&except(&["eth2", "eth0", "lo"])), ["eth1=2001:db8::3@eth1"]);
    }

    #[test]
    fn an_unknown_device_lists_the_known_ones() {
        let known = "known: lo (127.0.0.1), eth0 (192.0.2.2), eth1 (2001:db8::3), eth2 (down), eth3 (no address), eth4 (no link)";
        for filter in [only(&["eth0", "eth9"]), except(&["eth9"])] {
            let text = refused(&filter);
            assert!(text.contains("eth9 is not a network interface of this machine") && text.contains(known), "{text}");
        }
        for address in ["192.0.2.77", "2001:db8::77", "128.0.0.1"] {
            assert!(refused(&only(&[address])).contains("is not an address of this machine"));
        }
    }

    #[test]
    fn an_unusable_device_says_why() {
        assert!(refused(&only(&["eth2"])).contains("eth2 is down; ip link set eth2 up"));
        assert!(refused(&only(&["192.0.2.4"])).contains("belongs to eth2, which is down"));
        assert!(refused(&only(&["eth3"])).contains("has no address"));
        assert!(refused(&only(&["eth4"])).contains("has no link"));
        assert!(refused(&only(&["fe80::2"])).contains("link-local"));
    }

    #[test]
    fn one_address_cannot_be_two_devices() {
        assert!(refused(&only(&["lo", "127.0.0.1"])).contains("lo and 127.0.0.1 both have the address 127.0.0.1"));
        assert!(refused(&only(&["eth0", "192.0.2.2"])).contains("list each device once"));
    }

    #[test]
    fn nothing_left_is_an_error() {
        assert!(refused(&except(&["eth0", "eth1", "lo"])).contains("leaves no usable network device"));
        assert!(select(&Filter::All, &[]).is_err());
    }

    #[test]
    fn this_machine_offers_four_loopback_rails() {
        let nics = crate::nics().unwrap();
        let names = ["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"];
        match select(&only(&names), &nics) {
            Ok(devices) => assert!(devices.iter().all(|device| device.loopback && device.interface == "lo")),
            Err(error) => assert!(error.detail.contains("down"), "{error}"), // a bare network namespace
        }
    }
}
