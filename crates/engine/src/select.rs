//! Which lanes an endpoint has, and why each other one not: a cost model, the same at both ends.
//!
//! The cost of a message is `latency + overhead + size / bandwidth`, the bandwidth being the smaller of the two
//! ends' (the model of UCX's protocol selection). The figures of a transport are those of its kind, but for a
//! network device's own speed; they choose between ways, they promise nothing.

use std::fmt;
use std::net::IpAddr;

use crossrail_handshake::Device;
use crossrail_topology::NetDevice;
use crossrail_types::{Error, ErrorKind, Result, TRANSPORTS, format_size};

/// What a way costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Cost {
    pub(crate) latency_us: f64,
    pub(crate) overhead_us: f64,
    /// GB/s, 1e9 bytes.
    pub(crate) gb_per_s: f64,
}

impl Cost {
    pub(crate) const SELF: Cost = Cost { latency_us: 0.1, overhead_us: 0.05, gb_per_s: 10.0 };
    // Two copies, but by two processes at once: more than one copy by the kernel, which also pins every page.
    pub(crate) const SHM_RING: Cost = Cost { latency_us: 0.2, overhead_us: 0.05, gb_per_s: 15.0 };
    pub(crate) const SHM_CMA: Cost = Cost { latency_us: 0.6, overhead_us: 1.5, gb_per_s: 14.0 };
    pub(crate) const SHM_MAPPED: Cost = Cost { latency_us: 0.6, overhead_us: 0.1, gb_per_s: 30.0 };
    pub(crate) const CUDA_IPC: Cost = Cost { latency_us: 4.0, overhead_us: 6.0, gb_per_s: 300.0 };
    const LOOPBACK: Cost = Cost { latency_us: 3.5, overhead_us: 1.0, gb_per_s: 6.0 };
    const NETWORK: Cost = Cost { latency_us: 15.0, overhead_us: 1.5, gb_per_s: 1.25 };

    /// Microseconds for `size` bytes.
    pub(crate) fn us(&self, size: u64) -> f64 {
        self.latency_us + self.overhead_us + size as f64 / (self.gb_per_s * 1e3)
    }

    pub(crate) fn rail(mine: Option<u32>, theirs: Option<u32>, loopback: bool) -> Cost {
        if loopback {
            return Cost::LOOPBACK;
        }
        let speed = match (mine, theirs) {
            (Some(mine), Some(theirs)) => Some(mine.min(theirs)),
            (one, other) => one.or(other),
        };
        Cost { gb_per_s: speed.map_or(Cost::NETWORK.gb_per_s, |mbps| f64::from(mbps) / 8e3), ..Cost::NETWORK }
    }
}

/// The size up to which `eager` costs less than a rendezvous by `bulk`, which takes a message back and forth first.
pub(crate) fn eager_max(eager: &Cost, bulk: &Cost, limit: usize) -> usize {
    let handshake = 2.0 * eager.latency_us + bulk.overhead_us;
    let per_byte = 1.0 / (eager.gb_per_s * 1e3) - 1.0 / (bulk.gb_per_s * 1e3);
    if per_byte <= 0.0 {
        return limit;
    }
    let bytes = (handshake / per_byte) as usize;
    // The largest power of two that is not beyond it, so that both ends round alike.
    (1 << bytes.max(1).ilog2()).clamp(1024, limit)
}

/// One way that an endpoint could have used.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// As `shm(cma)`, `tcp/eth1`.
    pub lane: String,
    /// `self`, `shm`, `cuda_ipc` or `tcp`.
    pub transport: String,
    /// The device, for `tcp`.
    pub device: Option<String>,
    /// What it was chosen for: `small`, `large`.
    pub chosen_for: Vec<String>,
    /// Microseconds of latency that the model assumes.
    pub latency_us: f64,
    /// GB/s (1e9 bytes) that the model assumes.
    pub gb_per_s: f64,
    /// Microseconds for 8 B, 1 MiB and 64 MiB; `None` if it cannot be used.
    pub score_us: Option<[f64; 3]>,
    /// Why it was not chosen.
    pub reason: Option<String>,
}

/// What an endpoint could have used, what it uses, and why not the rest.
#[derive(Clone, Debug, PartialEq)]
pub struct Explain {
    /// The peer.
    pub peer: String,
    /// What carries small messages.
    pub small: String,
    /// What carries large ones, from which size.
    pub large: String,
    /// `available  self shm tcp/eth1 ...`
    pub available: String,
    /// `selected   peer: small shm | 8K.. shm(cma)  [...]`
    pub selected: String,
    /// Every way, chosen or not.
    pub candidates: Vec<Candidate>,
}

impl Explain {
    pub(crate) fn new(peer: &str, small: String, large: String, tls: &str, candidates: Vec<Candidate>) -> Explain {
        let usable: Vec<_> =
            candidates.iter().filter(|way| way.score_us.is_some()).map(|way| way.lane.as_str()).collect();
        let out: Vec<_> = candidates
            .iter()
            .filter(|way| way.chosen_for.is_empty())
            .filter_map(|way| way.reason.as_ref().map(|reason| format!("{}: {reason}", way.lane)))
            .collect();
        let out = if out.is_empty() { String::new() } else { format!("  [{}]", out.join("; ")) };
        Explain {
            available: format!("available  {}   (CROSSRAIL_TLS={tls})", usable.join(" ")),
            selected: format!("selected   {peer}: small {small} | {large}{out}"),
            peer: peer.to_owned(),
            small,
            large,
            candidates,
        }
    }
}

impl fmt::Display for Explain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.available)?;
        writeln!(f, "{}", self.selected)?;
        writeln!(f, "{:<20} {:>10} {:>12} {:>12} {:>8}  why", "lane", "8 B us", "1 MiB us", "64 MiB us", "GB/s")?;
        for way in &self.candidates {
            let [small, middle, large] = match way.score_us {
                Some(scores) => scores.map(|us| format!("{us:.1}")),
                None => ["-", "-", "-"].map(str::to_owned),
            };
            let why = match &way.reason {
                Some(reason) => reason.clone(),
                None => format!("chosen: {}", way.chosen_for.join(", ")),
            };
            writeln!(f, "{:<20} {small:>10} {middle:>12} {large:>12} {:>8.2}  {why}", way.lane, way.gb_per_s)?;
        }
        Ok(())
    }
}

pub(crate) fn candidate(lane: &str, transport: &str, device: Option<&str>, cost: &Cost) -> Candidate {
    Candidate {
        lane: lane.to_owned(),
        transport: transport.to_owned(),
        device: device.map(str::to_owned),
        chosen_for: Vec::new(),
        latency_us: cost.latency_us,
        gb_per_s: cost.gb_per_s,
        score_us: Some([8, 1 << 20, 64 << 20].map(|size| cost.us(size))),
        reason: None,
    }
}

impl Candidate {
    pub(crate) fn chosen(mut self, what: &[&str]) -> Candidate {
        self.chosen_for = what.iter().map(|what| (*what).to_owned()).collect();
        self
    }

    pub(crate) fn slower(mut self) -> Candidate {
        self.reason = Some("slower".to_owned());
        self
    }

    pub(crate) fn out(mut self, reason: &str) -> Candidate {
        self.score_us = None;
        self.reason = Some(reason.to_owned());
        self
    }
}

/// `64K.. shm(cma)`.
pub(crate) fn from_size(eager_max: usize, what: &str) -> String {
    format!("{}.. {what}", format_size(eager_max as u64 + 1))
}

/// The transports that `require` names.
pub(crate) fn required(require: Option<&str>) -> Result<Option<Vec<String>>> {
    let Some(list) = require else { return Ok(None) };
    let names: Vec<String> = list.split(',').map(|name| name.trim().to_owned()).collect();
    match names.iter().find(|name| !TRANSPORTS.contains(&name.as_str())) {
        Some(unknown) => Err(Error::new(ErrorKind::Usage, "require", format!("no transport is called {unknown:?}"))
            .with_hint(format!("known: {}", TRANSPORTS.join(", ")))),
        None => Ok(Some(names)),
    }
}

/// One rail: a device here and the device there that it reaches.
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
    // Loopback is for when there is nothing else.
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
    fn eager_ends_where_a_rendezvous_is_cheaper() {
        let limit = eager_max(&Cost::SHM_RING, &Cost::SHM_MAPPED, 64 << 10);
        assert!((1 << 10..=32 << 10).contains(&limit), "{limit}");
        let ring = Cost::SHM_RING.us(limit as u64);
        let direct = 2.0 * Cost::SHM_RING.latency_us + Cost::SHM_MAPPED.overhead_us + Cost::SHM_RING.us(limit as u64);
        assert!(ring <= direct);
        assert_eq!(eager_max(&Cost::SHM_RING, &Cost::SHM_RING, 64 << 10), 64 << 10);
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

    #[test]
    fn unknown_required_transports_are_named() {
        assert!(required(Some("tcp,shm")).unwrap().is_some());
        let error = required(Some("tpc")).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Usage);
        assert!(error.detail.contains("tpc"));
    }
}
