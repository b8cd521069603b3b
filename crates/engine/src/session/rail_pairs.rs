//! Pairing of our network devices with the peer's.

use std::net::IpAddr;

use crossrail_handshake::Device;
use crossrail_topology::NetDevice;

/// One rail: one of our devices, and the peer's device that it reaches.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RailPair {
    pub(crate) mine: NetDevice,
    pub(crate) from: IpAddr,
    pub(crate) theirs: Device,
}

/// Pairs our devices with the peer's: those whose addresses share the longest prefix first, each once. What is left
/// over at either end has no counterpart and carries nothing.
pub(crate) fn pair(mine: &[NetDevice], theirs: &[Device], same_machine: bool) -> Vec<RailPair> {
    let mut ways: Vec<(u32, usize, usize, IpAddr)> = Vec::new();
    for (at, device) in mine.iter().enumerate() {
        for (to, remote) in theirs.iter().enumerate() {
            let fits = device.loopback == remote.loopback && (!device.loopback || same_machine);
            let best = device.addresses.iter().filter_map(|from| Some((prefix(*from, remote.address)?, *from))).max();
            if let Some((bits, from)) = best.filter(|_| fits) {
                ways.push((bits, at, to, from));
            }
        }
    }
    ways.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2)));
    let mut pairs: Vec<(usize, RailPair)> = Vec::new();
    let (mut used_mine, mut used_theirs) = (vec![false; mine.len()], vec![false; theirs.len()]);
    for (_, at, to, from) in ways {
        if used_mine[at] || used_theirs[to] {
            continue;
        }
        used_mine[at] = true;
        used_theirs[to] = true;
        pairs.push((at, RailPair { mine: mine[at].clone(), from, theirs: theirs[to].clone() }));
    }
    // Loopback only if there is no other pair.
    if pairs.iter().any(|(_, pair)| !pair.mine.loopback) {
        pairs.retain(|(_, pair)| !pair.mine.loopback);
    }
    pairs.sort_by_key(|(at, _)| *at);
    pairs.into_iter().map(|(_, pair)| pair).collect()
}

/// Leading bits that two addresses of one family share.
fn prefix(a: IpAddr, b: IpAddr) -> Option<u32> {
    match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => Some((a.to_bits() ^ b.to_bits()).leading_zeros()),
        (IpAddr::V6(a), IpAddr::V6(b)) => Some((a.to_bits() ^ b.to_bits()).leading_zeros()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(name: &str, address: &str, loopback: bool) -> NetDevice {
        let address: IpAddr = address.parse().unwrap();
        NetDevice {
            name: name.to_owned(),
            interface: name.to_owned(),
            address,
            addresses: vec![address],
            index: 1,
            speed_mbps: None,
            loopback,
            numa_node: None,
        }
    }

    #[test]
    fn a_prefix_is_counted_within_one_family() {
        let of = |a: &str, b: &str| prefix(a.parse().unwrap(), b.parse().unwrap());
        assert_eq!(of("10.0.1.1", "10.0.1.2"), Some(30));
        assert_eq!(of("10.0.1.1", "10.0.1.1"), Some(32));
        assert_eq!(of("10.0.1.1", "::1"), None);
    }

    fn offering(devices: &[(&str, &str, bool)]) -> Vec<Device> {
        let device = |&(name, address, loopback): &(&str, &str, bool)| Device {
            name: name.to_owned(),
            address: address.parse().unwrap(),
            port: 1,
            speed_mbps: None,
            loopback,
        };
        devices.iter().map(device).collect()
    }

    #[test]
    fn rails_are_paired_by_the_longest_common_prefix_each_once() {
        let mine = [net("lo", "127.0.0.1", true), net("eth1", "10.0.1.1", false), net("eth2", "10.0.2.1", false)];
        let theirs = offering(&[
            ("a", "10.0.2.2", false),
            ("b", "10.0.1.2", false),
            ("c", "10.9.9.9", false),
            ("l", "127.0.0.1", true),
        ]);
        let names = |pairs: Vec<RailPair>| -> Vec<(String, String)> {
            pairs.into_iter().map(|pair| (pair.mine.name, pair.theirs.name)).collect()
        };
        let of = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        assert_eq!(
            names(pair(&mine, &theirs, true)),
            [of("eth1", "b"), of("eth2", "a")],
            "loopback only without others"
        );
        assert_eq!(names(pair(&mine[..1], &theirs, true)), [of("lo", "l")]);
        assert!(pair(&mine[..1], &theirs, false).is_empty(), "loopback does not reach another machine");
        assert!(pair(&[net("eth1", "fe00::1", false)], &theirs, true).is_empty(), "families do not mix");
    }
}
