//! Rows that a dispatch moves over each link, and its combine in the opposite direction, counted from a routing, or from what
//! kernels left in a rank's handle.

use super::{EP_NOWHERE, Layout, Shape, nodes_of};

/// Rows that a rank sends, or receives, by link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rows {
    /// To ranks of its node, without itself.
    pub near: u64,
    /// To other nodes.
    pub network: u64,
}

/// Rows of a dispatch by rank and link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkRows {
    node: usize,
    once: bool,
    /// By rank: rows that it sends, those that it forwards included.
    pub sent: Vec<Rows>,
    /// By rank: rows that it receives, those that it is to forward included.
    pub received: Vec<Rows>,
}

impl LinkRows {
    /// Of `ranks` ranks on nodes of `node` ranks each, where rows go once to each node, or (`once` is false) to each rank.
    pub fn new(ranks: u32, node: u32, once: bool) -> LinkRows {
        let none = vec![Rows::default(); ranks as usize];
        LinkRows { node: node.max(1) as usize, once, sent: none.clone(), received: none }
    }

    /// Adds a token of `source` that has experts on `homes`, which may repeat.
    pub fn add(&mut self, source: u32, homes: impl IntoIterator<Item = u32>) {
        let (source, ranks) = (source as usize, self.sent.len());
        let mut has = vec![false; ranks];
        for home in homes {
            if let Some(has) = has.get_mut(home as usize) {
                *has = true;
            }
        }
        for node in 0..ranks.div_ceil(self.node) {
            let members = node * self.node..((node + 1) * self.node).min(ranks);
            let homes: Vec<usize> = members.filter(|rank| has[*rank]).collect();
            let away = node != source / self.node;
            let from = if away && self.once && !homes.is_empty() {
                let gateway = node * self.node + source % self.node;
                self.row(source, gateway);
                gateway
            } else {
                source
            };
            homes.into_iter().filter(|rank| *rank != from).for_each(|rank| self.row(from, rank));
        }
    }

    fn row(&mut self, from: usize, to: usize) {
        let near = from / self.node == to / self.node;
        for rows in [&mut self.sent[from], &mut self.received[to]] {
            if near { rows.near += 1 } else { rows.network += 1 }
        }
    }

    /// Rows of all ranks.
    pub fn total(&self) -> Rows {
        self.sent
            .iter()
            .fold(Rows::default(), |sum, one| Rows { near: sum.near + one.near, network: sum.network + one.network })
    }
}

/// The link that rows take between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Not at all: the same rank, or one that is excluded.
    None,
    /// From GPU to GPU.
    Near,
    /// Over the network.
    Network,
}

/// Rows that one rank sent and received in a dispatch, by link; a combine moves as many in the opposite directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankRows {
    /// Selections of its own tokens.
    pub selections: u64,
    /// Rows that it sent for its own tokens.
    pub own: Rows,
    /// Rows that it sent to other ranks of its node for ranks of other nodes.
    pub forwarded: u64,
    /// Rows that it received, those that it forwarded included.
    pub received: Rows,
    /// As `own`, if a token had a row for each of its selections. 0 in the rank layout, which has none.
    pub own_each: Rows,
    /// As `received`, likewise.
    pub received_each: Rows,
}

impl Rows {
    fn add(&mut self, way: Way, rows: u64) {
        match way {
            Way::None => {}
            Way::Near => self.near += rows,
            Way::Network => self.network += rows,
        }
    }
}

impl RankRows {
    /// Counts the rows of a dispatch that is done at rank `me` from its handle, of which `handle` reads bytes by offset and
    /// length. `way`: how rows pass between it and a rank that it writes to.
    ///
    /// # Errors
    /// Those of `handle`.
    pub fn of(
        shape: &Shape,
        layout: Layout,
        me: u32,
        handle: &impl Fn(u64, usize) -> crossrail_types::Result<Vec<u8>>,
        way: impl Fn(u32) -> Way,
    ) -> crossrail_types::Result<RankRows> {
        let (parts, nodes) = (shape.handle(layout), nodes_of(shape));
        let (ranks, most, topk) = (shape.ranks as usize, shape.max_tokens as usize, shape.topk as usize);
        let words = |part: u64, count: usize| Ok::<_, crossrail_types::Error>(words_of(&handle(part, 4 * count)?));
        let tokens = words(parts.tokens, ranks)?;
        let tokens = |rank: u32| (tokens[rank as usize] as usize).min(most);
        let mut rows = RankRows::default();
        if layout == Layout::Rank && !shape.slotted() {
            let header = words(parts.header, 6)?;
            rows.selections = u64::from(header[4]) | u64::from(header[5]) << 32;
            let (sent, offsets) =
                (words(parts.sent_rows, header[2] as usize * ranks)?, words(parts.offsets, ranks + 1)?);
            for (place, _) in sent.iter().enumerate().filter(|(_, row)| **row != EP_NOWHERE) {
                rows.own.add(way((place % ranks) as u32), 1);
            }
            for (rank, pair) in (0..).zip(offsets.windows(2)) {
                rows.received.add(way(rank), u64::from(pair[1] - pair[0]));
            }
            return Ok(rows);
        }
        let own = words(parts.header, 6)?[2] as usize;
        let experts = words(parts.sent, own * topk)?;
        let home =
            |expert: &u32| (*expert / shape.local_experts() < shape.ranks).then(|| *expert / shape.local_experts());
        let mut met = vec![u64::MAX; ranks];
        for (token, experts) in (0u64..).zip(experts.chunks_exact(topk)) {
            for rank in experts.iter().filter_map(home) {
                rows.selections += 1;
                let to = nodes.gateways(me, rank).map_or(rank, |[theirs, _]| theirs);
                rows.own_each.add(way(to), 1);
                if std::mem::replace(&mut met[to as usize], token) != token {
                    rows.own.add(way(to), 1);
                }
            }
        }
        let present = handle(parts.present, ranks * most)?;
        for source in 0..shape.ranks {
            let from = nodes.gateways(me, source).map_or(source, |[_, mine]| mine);
            let here = &present[source as usize * most..][..tokens(source)];
            rows.received.add(way(from), here.iter().filter(|count| **count > 0).count() as u64);
            rows.received_each.add(way(from), here.iter().map(|count| u64::from(*count)).sum());
        }
        let column = nodes.column();
        let masks = words(parts.sent_rows, 2 * column as usize * most)?;
        for (number, masks) in (0..column).zip(masks.chunks_exact(2 * most)) {
            let source = (me + (number + 1) * shape.tuning.node) % shape.ranks;
            for mask in masks.as_chunks::<2>().0.iter().take(tokens(source)) {
                let [forwarded, selected] = *mask;
                rows.received.network += u64::from(selected != 0);
                rows.forwarded += u64::from((forwarded & !(1 << (me % shape.tuning.node))).count_ones());
            }
        }
        Ok(rows)
    }
}

fn words_of(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_goes_once_to_each_rank_or_to_each_node() {
        let homes = [0, 1, 1, 4, 5, 7, 9];
        let mut each = LinkRows::new(12, 4, false);
        each.add(0, homes);
        assert_eq!(each.total(), Rows { near: 1, network: 4 });
        let mut once = LinkRows::new(12, 4, true);
        once.add(0, homes);
        // Rank 4 is its gateway and has an expert itself; rank 8 has none.
        assert_eq!(
            (once.sent[0], once.sent[4], once.sent[8]),
            (Rows { near: 1, network: 2 }, Rows { near: 2, network: 0 }, Rows { near: 1, network: 0 })
        );
        assert_eq!((once.received[8], once.received[9]), (Rows { near: 0, network: 1 }, Rows { near: 1, network: 0 }));
    }

    /// As `crossrail plan --send node` computes: for each rank, tokens * nodes * (ranks of a node - 1) * ranks reached / ranks
    /// rows over NVLink, and tokens * (nodes - 1) * nodes reached / nodes over the network.
    #[test]
    fn rows_of_all_routings_are_those_of_the_plan() {
        let (experts, topk, ranks, node) = (12u32, 3u32, 6u32, 2u32);
        let nodes = ranks / node;
        let mut rows = LinkRows::new(ranks, node, true);
        let mut tokens = 0;
        for bits in (0..1u32 << experts).filter(|bits| bits.count_ones() == topk) {
            let chosen = (0..experts).filter(|expert| bits >> expert & 1 == 1);
            let homes: Vec<u32> = chosen.map(|expert| expert * ranks / experts).collect();
            (0..ranks).for_each(|source| rows.add(source, homes.iter().copied()));
            tokens += 1;
        }
        let choose = |from: u32, of: u32| (0..of).fold(1.0, |ways, k| ways * f64::from(from - k) / f64::from(k + 1));
        let reached =
            |units: u32| f64::from(units) * (1.0 - choose(experts - experts / units, topk) / choose(experts, topk));
        let near = f64::from(tokens * nodes * (node - 1)) * reached(ranks) / f64::from(ranks);
        let network = f64::from(tokens * (nodes - 1)) * reached(nodes) / f64::from(nodes);
        for one in &rows.sent {
            assert!((one.near as f64 - near).abs() < 1e-6 && (one.network as f64 - network).abs() < 1e-6, "{one:?}");
        }
    }

    /// Draws of `topk` of `experts` experts, the e-th with probability proportional to e^-skew, of which adjacent ones are on
    /// one rank: the busiest ranks are all on one node. Largest number of rows from the network at a rank, and the largest
    /// mean of a node's ranks.
    fn busiest(nodes: u32, node: u32, skew: f64) -> [f64; 2] {
        const EXPERTS: usize = 256;
        const TOPK: usize = 8;
        let (ranks, mut state) = (nodes * node, 7_u64);
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
        };
        let odds: Vec<f64> = (1..=EXPERTS).map(|number| -skew * (number as f64).ln()).collect();
        let mut rows = LinkRows::new(ranks, node, true);
        for source in 0..ranks {
            for _ in 0..256 {
                // The largest sums with Gumbel noise are a draw without replacement.
                let mut keys: Vec<(f64, usize)> =
                    odds.iter().map(|odds| odds - (-uniform().ln()).ln()).zip(0..).collect();
                keys.select_nth_unstable_by(TOPK, |one, other| other.0.total_cmp(&one.0));
                rows.add(source, keys[..TOPK].iter().map(|(_, expert)| (expert * ranks as usize / EXPERTS) as u32));
            }
        }
        let of_rank: Vec<f64> = rows.received.iter().map(|rows| rows.network as f64).collect();
        let means = of_rank.chunks(node as usize).map(|node| node.iter().sum::<f64>() / node.len() as f64);
        [of_rank.iter().copied().fold(0.0, f64::max), means.fold(0.0, f64::max)]
    }

    /// Rows by Zipf's law (1.2) load the busiest gateway of up to four nodes at most 15 % more than uniform ones. With more
    /// nodes the busiest node receives more, whichever of its ranks receive: its gateways share that evenly.
    #[test]
    fn gateways_of_equal_number_share_skewed_rows() {
        for (nodes, node) in [(2, 2), (2, 8), (4, 8), (8, 8)] {
            let ([even, _], [skewed, mean]) = (busiest(nodes, node, 0.0), busiest(nodes, node, 1.2));
            println!("{nodes} x {node}: {:.3} of uniform, {:.3} of the node's mean", skewed / even, skewed / mean);
            assert!(nodes > 4 || skewed <= 1.15 * even, "{skewed} of {even}");
            assert!(skewed <= 1.05 * mean, "{skewed} of {mean}");
        }
    }
}
