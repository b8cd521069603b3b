//! Pairing of our network devices with the peer's.

use std::collections::BTreeMap;
use std::net::IpAddr;

use crossrail_handshake::{Device, Ticket};
use crossrail_topology::NetDevice;

/// One rail: one of our devices, and the peer's device that it reaches.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RailPair {
    pub(crate) mine: NetDevice,
    pub(crate) from: IpAddr,
    pub(crate) theirs: Device,
}

/// The rails of an endpoint, and the rights to make connections over them.
pub(super) struct PeerRails {
    pub(super) peer: String,
    pub(super) ticket: Ticket,
    /// This end has connected.
    pub(super) initiator: bool,
    /// The rails that can be dialled from here, by number.
    pub(super) pairs: BTreeMap<u16, RailPair>,
}

/// Proximity of the peer, for the choice of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Near {
    /// On another machine, or in another network namespace of this one: loopback does not reach it, and an address that
    /// both ends have names each end itself.
    Apart,
    /// On this machine; its network namespace is not known.
    OnMachine,
    /// In this network namespace: all its addresses are ours, too, and the kernel takes loopback to each of them.
    InNamespace,
}

impl Near {
    /// Proximity of two processes, by the boot id and the network namespace of each.
    pub(crate) fn of(mine: (&str, u64), theirs: (&str, u64)) -> Near {
        match (mine.0 == theirs.0, mine.1, theirs.1) {
            (false, ..) => Near::Apart,
            (true, 0, _) | (true, _, 0) => Near::OnMachine,
            (true, mine, theirs) if mine == theirs => Near::InNamespace,
            (true, ..) => Near::Apart,
        }
    }
}

/// The pairs without loopback: for where that fails.
pub(crate) fn beyond_loopback(mine: &[NetDevice], theirs: &[Device], near: Near) -> Vec<RailPair> {
    let mine: Vec<NetDevice> = mine.iter().filter(|device| !device.loopback).cloned().collect();
    pair(&mine, theirs, near)
}

/// Pairs our devices with the peer's: those whose addresses share the longest prefix first, each once. What is left
/// over at either end has no counterpart and carries nothing, see [`without_counterpart`] and [`unreached`].
pub(crate) fn pair(mine: &[NetDevice], theirs: &[Device], near: Near) -> Vec<RailPair> {
    let ours = |address: &IpAddr| mine.iter().any(|device| device.addresses.contains(address));
    let mut ways: Vec<(u32, usize, usize, IpAddr)> = Vec::new();
    for (at, device) in mine.iter().enumerate() {
        for (to, remote) in theirs.iter().enumerate() {
            let reaches =
                if remote.loopback { near != Near::Apart } else { near != Near::Apart || !ours(&remote.address) };
            let fits = device.loopback == remote.loopback && reaches;
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
        // A device is listed once for each of its addresses.
        for (used, device) in used_theirs.iter_mut().zip(theirs) {
            *used |= device.name == theirs[to].name;
        }
        pairs.push((at, RailPair { mine: mine[at].clone(), from, theirs: theirs[to].clone() }));
    }
    // Loopback only if there is no other pair, or if the others would use it too, under another name.
    let over_loopback = near == Near::InNamespace && pairs.iter().any(|(_, pair)| pair.mine.loopback);
    if pairs.iter().any(|(_, pair)| pair.mine.loopback == over_loopback) {
        pairs.retain(|(_, pair)| pair.mine.loopback == over_loopback);
    }
    pairs.sort_by_key(|(at, _)| *at);
    pairs.into_iter().map(|(_, pair)| pair).collect()
}

/// The two devices of `pair`, at their present addresses. `None`: one of them is not there, or they have
/// no addresses of one family.
pub(crate) fn again(pair: &RailPair, mine: &[NetDevice], theirs: &[Device]) -> Option<RailPair> {
    let device = mine.iter().find(|device| device.name == pair.mine.name)?;
    let remotes = theirs.iter().filter(|remote| remote.name == pair.theirs.name);
    let ways = remotes.flat_map(|remote| {
        device.addresses.iter().filter_map(move |from| Some((prefix(*from, remote.address)?, *from, remote)))
    });
    // Of several as near, the previous pair.
    let known = |from: IpAddr, to: IpAddr| (from == pair.from) as u32 + (to == pair.theirs.address) as u32;
    let (_, from, theirs) = ways.max_by_key(|(bits, from, to)| (*bits, known(*from, to.address)))?;
    Some(RailPair { mine: device.clone(), from, theirs: theirs.clone() })
}

/// Why `device`, one of ours, is in none of the `pairs`.
pub(crate) fn without_counterpart(device: &NetDevice, theirs: &[Device], pairs: &[RailPair]) -> String {
    if device.loopback {
        return match pairs.first() {
            Some(pair) if !pair.mine.loopback => "loopback is used only if no other device reaches the peer".to_owned(),
            _ => "the peer offers no loopback device that it could reach".to_owned(),
        };
    }
    let offered: Vec<&Device> = theirs.iter().filter(|remote| !remote.loopback).collect();
    if offered.is_empty() {
        return "the peer offers loopback only".to_owned();
    }
    let names = names(offered.iter().map(|remote| remote.name.as_str()));
    let family = |a: &IpAddr, b: &IpAddr| a.is_ipv4() == b.is_ipv4();
    let reaches = |remote: &&Device| device.addresses.iter().any(|from| family(from, &remote.address));
    if !offered.iter().any(reaches) {
        return format!("the peer offers {names}, none with an address of its family ({})", device.address);
    }
    if offered.iter().all(|remote| device.addresses.contains(&remote.address) || !reaches(remote)) {
        return format!("the peer has the address {} of this device itself", device.address);
    }
    if pairs.iter().any(|pair| pair.mine.loopback) {
        return "the peer is in this network namespace, where loopback reaches it".to_owned();
    }
    format!("the peer offers {names} only, which our other devices reach")
}

/// The names of the peer's devices that none of the `pairs` reaches: loopback ones only if that is all we use.
pub(crate) fn unreached(theirs: &[Device], pairs: &[RailPair]) -> Vec<String> {
    let local = pairs.iter().all(|pair| pair.mine.loopback);
    let left = |device: &&Device| device.loopback == local && pairs.iter().all(|pair| pair.theirs.name != device.name);
    let mut found: Vec<String> = theirs.iter().filter(left).map(|device| device.name.clone()).collect();
    found.dedup();
    found
}

/// Names in one list, without duplicates.
fn names<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let mut list: Vec<&str> = names.collect();
    list.dedup();
    list.join(" ")
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
    fn what_is_left_over_has_a_reason() {
        let mine = ["1", "2", "3"].map(|n| net(&format!("eth{n}"), &format!("10.0.{n}.1"), false));
        let theirs = offering(&[
            ("lo", "127.0.0.1", true),
            ("eth1", "10.0.1.2", false),
            ("eth1", "fd00::2", false),
            ("eth2", "10.0.2.2", false),
        ]);
        let pairs = pair(&mine, &theirs, Near::Apart);
        let why = without_counterpart(&mine[2], &theirs, &pairs);
        assert_eq!(why, "the peer offers eth1 eth2 only, which our other devices reach");
        assert!(unreached(&theirs, &pairs).is_empty(), "loopback was not to be reached");
        assert_eq!(unreached(&theirs, &pair(&mine[..1], &theirs, Near::Apart)), ["eth2"]);
        let other = net("eth6", "fd00::1", false);
        assert!(without_counterpart(&other, &theirs[3..], &[]).contains("none with an address of its family"));
        assert_eq!(without_counterpart(&mine[0], &theirs[..1], &[]), "the peer offers loopback only");
        let lo = net("lo", "127.0.0.1", true);
        assert!(without_counterpart(&lo, &theirs, &pairs).contains("only if no other device"));
    }

    #[test]
    fn a_device_with_several_addresses_is_one_counterpart() {
        let mut both = net("eth1", "10.0.1.1", false);
        both.addresses.push("fd00:1::1".parse().unwrap());
        let mine = [both, net("eth2", "10.0.2.1", false)];
        let theirs = offering(&[("eth1", "10.0.1.2", false), ("eth1", "fd00:1::2", false)]);
        let pairs = pair(&mine, &theirs, Near::Apart);
        assert_eq!(pairs.len(), 1, "eth2 must not be paired with the other address of eth1");
        assert_eq!(pairs[0].theirs.address, theirs[1].address);
    }

    #[test]
    fn devices_whose_addresses_change_are_paired_again() {
        let pair_of = |mine: &str, theirs: &str| RailPair {
            mine: net("eth1", mine, false),
            from: mine.parse().unwrap(),
            theirs: offering(&[("enp1", theirs, false)]).remove(0),
        };
        let before = pair_of("10.0.1.1", "10.0.1.2");
        for (mine, theirs) in [("10.0.1.1", "10.0.1.9"), ("10.0.1.7", "10.0.1.2"), ("192.168.4.1", "192.168.4.2")] {
            let (here, there) = (
                [net("eth1", mine, false), net("eth2", "10.0.1.1", false)],
                [("enp2", "10.0.1.2", false), ("enp1", "fd00::1", false), ("enp1", theirs, false)],
            );
            assert_eq!(again(&before, &here, &offering(&there)), Some(pair_of(mine, theirs)));
        }
        assert_eq!(again(&before, &[net("eth2", "10.0.1.1", false)], &offering(&[("enp1", "10.0.1.2", false)])), None);
        assert_eq!(again(&before, std::slice::from_ref(&before.mine), &offering(&[("enp1", "fd00::1", false)])), None);
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
            names(pair(&mine, &theirs, Near::OnMachine)),
            [of("eth1", "b"), of("eth2", "a")],
            "loopback only without others"
        );
        let local = offering(&[("eth1", "10.0.1.1", false), ("eth2", "10.0.2.1", false), ("lo", "127.0.0.1", true)]);
        assert_eq!(names(pair(&mine, &local, Near::InNamespace)), [of("lo", "lo")], "within one network namespace");
        assert_eq!(
            names(pair(&mine[1..], &local, Near::InNamespace)),
            [of("eth1", "eth1"), of("eth2", "eth2")],
            "without lo"
        );
        assert_eq!(names(pair(&mine[..1], &theirs, Near::OnMachine)), [of("lo", "l")]);
        assert!(pair(&mine[..1], &theirs, Near::Apart).is_empty(), "loopback does not reach another machine");
        assert!(pair(&[net("eth1", "fe00::1", false)], &theirs, Near::OnMachine).is_empty(), "families do not mix");
    }

    #[test]
    fn an_address_that_both_ends_have_is_no_sign_of_one_namespace() {
        let mine = [net("lo", "127.0.0.1", true), net("docker0", "172.17.0.1", false), net("eth0", "10.9.0.1", false)];
        let theirs =
            offering(&[("lo", "127.0.0.1", true), ("docker0", "172.17.0.1", false), ("eth0", "10.9.0.2", false)]);
        for near in [Near::Apart, Near::OnMachine] {
            let names: Vec<_> = pair(&mine, &theirs, near).into_iter().map(|pair| pair.mine.name).collect();
            assert!(names.contains(&"eth0".to_owned()) && !names.contains(&"lo".to_owned()), "{near:?}: {names:?}");
        }
        let pairs = pair(&mine, &theirs, Near::Apart);
        assert_eq!(pairs.len(), 1, "what both ends call 172.17.0.1 connects neither to the other");
        let why = without_counterpart(&mine[1], &theirs[1..2], &pairs);
        assert_eq!(why, "the peer has the address 172.17.0.1 of this device itself");
        let beyond = beyond_loopback(&mine, &theirs, Near::InNamespace);
        assert!(!beyond.is_empty() && beyond.iter().all(|pair| !pair.mine.loopback));
        assert!(pair(&mine[..1], &theirs, Near::Apart).is_empty(), "loopback ends at the namespace");
    }

    #[test]
    fn how_near_a_peer_is_depends_on_its_namespace() {
        let near = |boot_id, network| Near::of(("here", 7), (boot_id, network));
        assert_eq!(near("here", 7), Near::InNamespace);
        assert_eq!((near("here", 8), near("there", 7)), (Near::Apart, Near::Apart));
        assert_eq!((near("here", 0), Near::of(("here", 0), ("here", 7))), (Near::OnMachine, Near::OnMachine));
    }
}
