//! Number of times that a row crosses the network: the option, and its choice by cost.

use std::fmt;

use crossrail_ep::{Config, Layout};

/// Rate of a GPU's share of the network in bytes per nanosecond: a NIC of 400 Gb/s.
const RATE: f64 = 50.0;
/// Time of the second hop in nanoseconds: a flag in pinned memory, a copy to the ranks of the node, their flags. From the parts
/// that were measured alone; no GPU has run it.
const HOP_NS: f64 = 10_000.0;

/// Number of times that a row crosses the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SendOnce {
    /// Once for each rank that has one of its token's experts.
    #[default]
    PerRank,
    /// Once for each node, where one rank forwards it, and returns the node's sum. The expert layout needs prereduction; coded
    /// combines are refused.
    PerNode {
        /// Ranks of each node, which are adjacent; `None`: those of the group's nodes, all of whose ranks must have joined.
        ranks: Option<u32>,
    },
    /// The cheaper of the two for dispatches of as many tokens as a rank may send; once for each rank where the other is not
    /// possible.
    ByCost {
        /// As of `PerNode`.
        ranks: Option<u32>,
    },
}

/// Costs of both ways for nodes of some number of ranks, if all experts are selected alike.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Costs {
    /// Bytes of a full dispatch that one rank sends over the network: once for each rank, and once for each node.
    bytes: [f64; 2],
}

impl Costs {
    pub(crate) fn of(config: &Config, node: u32) -> Costs {
        let (ranks, node) = (f64::from(config.ranks), f64::from(node.max(1)));
        let nodes = ranks / node;
        let row = config.payload.row_bytes(config.hidden) + config.payload.scale_bytes(config.hidden);
        let rows = |units: f64, far: f64| config.max_tokens as f64 * reached(config, units) * far / units;
        let bytes = [rows(ranks, ranks - node), rows(nodes, nodes - 1.0)];
        Costs { bytes: bytes.map(|rows| rows * row as f64) }
    }

    /// True if the network's time that once for each node saves is more than the second hop takes.
    pub(crate) fn favour_nodes(&self) -> bool {
        self.saved_ns() > HOP_NS
    }

    fn saved_ns(&self) -> f64 {
        (self.bytes[0] - self.bytes[1]) / RATE
    }
}

impl fmt::Display for Costs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [rank, node] = self.bytes.map(|bytes| bytes / 1e6);
        write!(
            f,
            "a full dispatch takes {rank:.2} MB of the network once for each rank, {node:.2} MB once for each node: "
        )?;
        let (saved, hop) = (self.saved_ns() / 1e3, HOP_NS / 1e3);
        write!(f, "{saved:.1} us less at {RATE} GB/s, where the second hop takes {hop} us")
    }
}

/// Average number of `units` equal parts of the ranks that have one of a token's experts.
fn reached(config: &Config, units: f64) -> f64 {
    let experts = config.experts as f64;
    let missed = |k: usize| (experts - experts / units - k as f64).max(0.0) / (experts - k as f64);
    units * (1.0 - (0..config.topk).map(missed).product::<f64>())
}

/// A reason for which rows cannot go once to each node, of any size.
pub(crate) fn hindrance(config: &Config) -> Option<&'static str> {
    match config {
        Config { share_node: false, .. } => Some("ranks of a node share no memory"),
        Config { prereduce: false, .. } if config.has(Layout::Expert) => Some("a rank returns each expert's row"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crossrail_ep::{OnLoss, Payload, Scale};

    use super::*;

    fn config(max_tokens: usize, payload: Payload) -> Config {
        Config {
            ranks: 16,
            max_tokens,
            hidden: 7168,
            experts: 256,
            topk: 8,
            payload,
            layouts: vec![Layout::Expert],
            prereduce: true,
            share_node: true,
            timeout: Duration::from_secs(1),
            on_loss: OnLoss::Raise,
        }
    }

    #[test]
    fn few_tokens_go_directly() {
        let fp8 = Payload::Fp8(Scale::F32);
        let chosen = |tokens| Costs::of(&config(tokens, fp8), 8).favour_nodes();
        assert_eq!([1, 8, 128, 4096].map(chosen), [false, false, true, true]);
        // A node of one rank is that rank: nothing is saved.
        assert!(!Costs::of(&config(4096, fp8), 1).favour_nodes());
        let text = Costs::of(&config(128, Payload::Bf16), 8).to_string();
        assert!(text.contains("MB once for each node") && text.contains("the second hop takes 10 us"), "{text}");
    }

    /// Rows for each token of 16 ranks on two nodes, as `crossrail plan` computes them.
    #[test]
    fn rows_are_those_of_the_plan() {
        let costs = Costs::of(&config(1, Payload::Bf16), 8);
        let [rank, node] = costs.bytes.map(|bytes| bytes / 14336.0);
        assert!((rank - 3.261_639_766).abs() < 1e-6 && (node - 0.996_510_057).abs() < 1e-6, "{rank} {node}");
    }

    #[test]
    fn what_forbids_it_is_named() {
        let plain = config(8, Payload::Bf16);
        assert_eq!(hindrance(&plain), None);
        assert!(hindrance(&Config { share_node: false, ..plain.clone() }).is_some());
        assert!(hindrance(&Config { prereduce: false, ..plain.clone() }).is_some());
        assert_eq!(hindrance(&Config { prereduce: false, layouts: vec![Layout::Rank], ..plain }), None);
    }
}
