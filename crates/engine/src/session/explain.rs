//! Why an endpoint uses the links that it uses, and not the others.

use std::fmt;

use crossrail_types::format_size;

use super::costs::Cost;

/// One way to a peer that an endpoint could use.
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
    /// Expected to carry data but does not: a rail without counterpart or that did not come up, or single copies that
    /// the system does not permit.
    pub missed: bool,
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

impl Explain {
    /// What was expected to carry data and does not, with the reasons.
    pub fn missed(&self) -> Vec<(String, String)> {
        let missed = self.candidates.iter().filter(|way| way.missed);
        missed.map(|way| (way.lane.clone(), way.reason.clone().unwrap_or_default())).collect()
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
        missed: false,
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

    pub(crate) fn missed(self, reason: &str) -> Candidate {
        Candidate { missed: true, ..self.out(reason) }
    }
}

/// `64K.. shm(cma)`.
pub(crate) fn from_size(eager_max: usize, what: &str) -> String {
    format!("{}.. {what}", format_size(eager_max as u64 + 1))
}
