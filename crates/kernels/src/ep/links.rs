//! Rows that a dispatch moves over each link, and its combine in the opposite direction, counted from a routing.

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
}
