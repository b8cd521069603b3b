//! How the ranks of a buffer are reached.

use crossrail::LaneReport;
use crossrail::placing::RailReport;

/// How a rank is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// The rank is this one.
    Myself,
    /// Both map the other's heap.
    Heap,
    /// Through one-sided writes of the engine.
    Network,
}

/// How a rank is reached.
#[derive(Clone, Debug, PartialEq)]
pub struct Link {
    /// The rank.
    pub rank: u32,
    /// The kind of link.
    pub kind: LinkKind,
    /// Whether the rank is masked.
    pub masked: bool,
    /// The engine's lanes to the rank, with the bytes that each carried; empty for this rank itself.
    pub lanes: Vec<LaneReport>,
    /// Rails and copies that were expected to carry data to the rank and do not, with the reasons.
    pub missed: Vec<(String, String)>,
    /// Rank of its node to which this rank's rows for it are sent, once for each node; `None`: to the rank itself.
    pub gateway: Option<u32>,
    /// Report of the threads of a buffer in GPU memory on a rank of another node; `None` for other ranks.
    pub proxy: Option<ProxyReport>,
}

/// Report of the threads of a buffer in GPU memory on one rank of another node, up to a tenth of a second old.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProxyReport {
    /// Commands of kernels that were read.
    pub commands: u64,
    /// Bytes that these named, and that were sent.
    pub sent_bytes: u64,
    /// Commands that were read and are not sent yet.
    pub pending: u64,
    /// Writes that were sent and are not confirmed yet.
    pub in_flight: u64,
    /// Bursts of commands that are in place at the rank.
    pub bursts: u64,
    /// Nanoseconds that they took, added up: each from the time when its first command was read until all were in place.
    pub burst_ns: u64,
    /// The rails that carry them.
    pub rails: Vec<ProxyRail>,
}

/// A rail of a [`ProxyReport`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyRail {
    /// Its name, as `tcp/eth1`.
    pub name: String,
    /// Reason for which connections of it were lost that are not replaced; `None`: all are up.
    pub lost: Option<String>,
    /// Bytes sent, heads included.
    pub sent_bytes: u64,
    /// Bytes received, heads included.
    pub received_bytes: u64,
}

impl ProxyRail {
    /// Totals of a rail, without the object that uses it in its name: `tcp/eth1:placing#2`.
    pub fn of(rail: &RailReport) -> ProxyRail {
        ProxyRail {
            name: rail.name.split(":placing").next().unwrap_or_default().to_owned(),
            lost: rail.lost.clone(),
            sent_bytes: rail.tx_bytes,
            received_bytes: rail.rx_bytes,
        }
    }

    /// Adds the totals of another connection over the same rail.
    pub fn add(&mut self, other: ProxyRail) {
        self.lost = self.lost.take().or(other.lost);
        self.sent_bytes += other.sent_bytes;
        self.received_bytes += other.received_bytes;
    }
}
