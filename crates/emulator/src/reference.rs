//! What dispatch and combine mean, in the plainest code: routings to try, and what must come out, to the bit. As
//! `python/crossrail/ref` says it, and the row kernels of `crates/ep`; written once more, so that neither is trusted.
//!
//! A rank that takes no part (`active` is false) sends nothing, and nothing is sent to it: what it is given and what
//! is expected of it is empty. bf16 values are their bits.

use crossrail_kernels::ep::Shape;

use super::Numbers;
use super::coding::Coding;
pub use super::wire::{BLOCK, Wire, narrow, widen};

/// Which token of which rank goes where.
#[derive(Clone, Debug)]
pub struct Routing {
    /// Tokens of each rank.
    pub tokens: Vec<usize>,
    /// By rank: experts, [tokens][K], -1 for none; those made here are distinct in a token.
    pub idx: Vec<Vec<i32>>,
    /// By rank: weights, [tokens][K].
    pub weights: Vec<Vec<f32>>,
    /// Which ranks take part.
    pub active: Vec<bool>,
}

/// How tokens choose their experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// All alike.
    Even,
    /// A third of them dropped.
    Dropped,
    /// Most go to the first experts.
    Skewed,
    /// All to experts of one rank, as far as they reach.
    OneRank,
    /// No token selects an expert.
    None,
}

impl Choice {
    /// One of them.
    pub fn random(numbers: &mut Numbers) -> Choice {
        use Choice::{Dropped, Even, None, OneRank, Skewed};
        [Even, Even, Even, Dropped, Dropped, Skewed, Skewed, OneRank, None][numbers.below(9) as usize]
    }
}

impl Routing {
    /// Token counts from 0 to M, any choice, weights of both signs.
    pub fn random(numbers: &mut Numbers, shape: &Shape) -> Routing {
        let most = shape.max_tokens as usize;
        let tokens: Vec<usize> = (0..shape.ranks)
            .map(|_| match numbers.below(6) {
                0 => 0,
                1 => most,
                _ => numbers.below(most as u64 + 1) as usize,
            })
            .collect();
        let choice = Choice::random(numbers);
        Routing::of(numbers, shape, &tokens, choice)
    }

    /// With so many tokens on each rank.
    pub fn of(numbers: &mut Numbers, shape: &Shape, tokens: &[usize], choice: Choice) -> Routing {
        let favourite = numbers.below(shape.ranks.into()) as i32 * shape.local_experts() as i32;
        let mut one_token = |idx: &mut Vec<i32>| {
            let begin = idx.len();
            for _ in 0..shape.topk {
                let expert = match choice {
                    Choice::None => -1,
                    Choice::Dropped if numbers.once_in(3) => -1,
                    Choice::OneRank => favourite + numbers.below(shape.local_experts().into()) as i32,
                    Choice::Skewed if !numbers.once_in(4) => numbers.below(u64::from(shape.experts).div_ceil(4)) as i32,
                    _ => numbers.below(shape.experts.into()) as i32,
                };
                // Distinct: where it is taken already, there is none.
                idx.push(if idx[begin..].contains(&expert) { -1 } else { expert });
            }
        };
        let idx: Vec<Vec<i32>> = tokens
            .iter()
            .map(|count| {
                let mut idx = Vec::new();
                (0..*count).for_each(|_| one_token(&mut idx));
                idx
            })
            .collect();
        let mut weight = || (numbers.below(2000) as f32 - 700.0) / 1000.0;
        let weights = idx.iter().map(|idx| idx.iter().map(|_| weight()).collect()).collect();
        Routing { tokens: tokens.to_vec(), idx, weights, active: vec![true; tokens.len()] }
    }

    /// The same, without these ranks.
    pub fn without(mut self, ranks: &[usize]) -> Routing {
        for &rank in ranks {
            self.active[rank] = false;
            self.tokens[rank] = 0;
            self.idx[rank].clear();
            self.weights[rank].clear();
        }
        self
    }

    /// The expert of a selection, if there is one whose rank takes part.
    pub fn expert(&self, shape: &Shape, source: usize, token: usize, k: usize) -> Option<usize> {
        let expert = usize::try_from(self.idx[source][token * shape.topk as usize + k]).ok()?;
        self.active[expert / shape.local_experts() as usize].then_some(expert)
    }

    fn weight(&self, shape: &Shape, source: usize, token: usize, k: usize) -> f32 {
        self.weights[source][token * shape.topk as usize + k]
    }

    /// The expert of a token's k-th selection as a number among those of `rank`, if it is there.
    fn local(&self, shape: &Shape, source: usize, token: usize, k: usize, rank: usize) -> Option<usize> {
        let local = shape.local_experts() as usize;
        self.expert(shape, source, token, k).filter(|expert| expert / local == rank).map(|expert| expert % local)
    }
}

/// bf16 rows of ordinary size, with some zeros, large and tiny values, and now and then infinities and NaN.
pub fn random_rows(numbers: &mut Numbers, count: usize, hidden: usize) -> Vec<u16> {
    let strange = numbers.once_in(4);
    let mut one = || {
        let bits = numbers.any();
        let ordinary = narrow(((bits >> 8) as i32 as f32) / 2f32.powi(29));
        match bits & 0xff {
            0..4 => 0,
            4..8 => 0x8000,
            8..16 => narrow(widen(ordinary) * 300.0),
            16..24 => narrow(widen(ordinary) * 1e-6),
            24 if strange => [0x7f80, 0xff80, 0x7fc0, 0x7f7f, 0xff7f, 0x0001][(bits >> 40) as usize % 6],
            _ => ordinary,
        }
    };
    (0..count * hidden).map(|_| one()).collect()
}

/// What the expert layout delivers to one rank. Rows of an expert are by source rank, then token.
#[derive(Clone, Debug)]
pub struct ByExpert {
    /// By local expert: source rank and token of each row.
    pub rows: Vec<Vec<(usize, usize)>>,
    /// [El][R]: where the rows of a source begin << 32 | how many there are.
    pub ranges: Vec<i64>,
}

/// What the expert layout delivers, by rank.
pub fn by_expert(shape: &Shape, routing: &Routing) -> Vec<ByExpert> {
    let (local, ranks) = (shape.local_experts() as usize, shape.ranks as usize);
    let mut all: Vec<ByExpert> =
        (0..ranks).map(|_| ByExpert { rows: vec![Vec::new(); local], ranges: vec![0; local * ranks] }).collect();
    for source in 0..ranks {
        for token in 0..routing.tokens[source] {
            for k in 0..shape.topk as usize {
                if let Some(expert) = routing.expert(shape, source, token, k) {
                    all[expert / local].rows[expert % local].push((source, token));
                }
            }
        }
        for one in all.iter_mut() {
            for (expert, rows) in one.rows.iter().enumerate() {
                let count = rows.iter().filter(|(from, _)| *from == source).count();
                one.ranges[expert * ranks + source] = ((rows.len() - count) as i64) << 32 | count as i64;
            }
        }
    }
    all
}

/// A row of the rank layout.
#[derive(Clone, Debug, PartialEq)]
pub struct RankRow {
    /// The rank that sent it.
    pub source: usize,
    /// The token at its source.
    pub token: usize,
    /// [K]: local experts, -1 for those elsewhere.
    pub idx: Vec<i64>,
    /// [K]: 0 where `idx` is -1.
    pub weights: Vec<f32>,
}

/// What the rank layout delivers to one rank.
#[derive(Clone, Debug)]
pub struct ByRank {
    /// In their order.
    pub rows: Vec<RankRow>,
    /// [El]: selections, rounded up to the alignment.
    pub counts: Vec<i32>,
    /// [R + 1]: the first row of each source, and the end.
    pub offsets: Vec<i64>,
}

/// What the rank layout delivers, by rank.
pub fn by_rank(shape: &Shape, routing: &Routing, alignment: i32) -> Vec<ByRank> {
    (0..shape.ranks as usize).map(|rank| one_by_rank(shape, routing, alignment, rank)).collect()
}

fn one_by_rank(shape: &Shape, routing: &Routing, alignment: i32, rank: usize) -> ByRank {
    let mut one = ByRank { rows: Vec::new(), counts: vec![0; shape.local_experts() as usize], offsets: vec![0] };
    for source in 0..shape.ranks as usize {
        for token in 0..routing.tokens[source] {
            let locals: Vec<Option<usize>> =
                (0..shape.topk as usize).map(|k| routing.local(shape, source, token, k, rank)).collect();
            if locals.iter().all(Option::is_none) {
                continue;
            }
            locals.iter().flatten().for_each(|local| one.counts[*local] += 1);
            let weights = locals.iter().enumerate();
            let weights = weights.map(|(k, local)| local.map_or(0.0, |_| routing.weight(shape, source, token, k)));
            one.rows.push(RankRow {
                source,
                token,
                weights: weights.collect(),
                idx: locals.iter().map(|local| local.map_or(-1, |local| local as i64)).collect(),
            });
        }
        one.offsets.push(one.rows.len() as i64);
    }
    one.counts.iter_mut().for_each(|count| *count = (*count + alignment - 1) / alignment * alignment);
    one
}

/// The experts' outputs of one rank, bf16: in the expert layout rows of an expert begin at local expert * R * M.
#[derive(Clone, Debug)]
pub struct Outputs {
    /// Elements of a row.
    pub hidden: usize,
    /// bf16, row by row.
    pub values: Vec<u16>,
}

impl Outputs {
    /// One row.
    pub fn row(&self, row: usize) -> &[u16] {
        &self.values[row * self.hidden..][..self.hidden]
    }
}

/// The rows that combine gives to each rank in the expert layout, bf16 [tokens][H]. `weighted`: with the routing's
/// weights. `biases`: by rank, rows to add, each [tokens][H].
pub fn combine_expert(
    shape: &Shape,
    routing: &Routing,
    outputs: &[Outputs],
    weighted: bool,
    biases: &[Vec<Vec<u16>>],
) -> Vec<Vec<u16>> {
    combine_expert_coded(shape, routing, outputs, weighted, biases, Coding::Bf16)
}

/// The same with rows that are coded on their way to other ranks.
pub fn combine_expert_coded(
    shape: &Shape,
    routing: &Routing,
    outputs: &[Outputs],
    weighted: bool,
    biases: &[Vec<Vec<u16>>],
    coding: Coding,
) -> Vec<Vec<u16>> {
    let (local, most) = (shape.local_experts() as usize, (shape.ranks * shape.max_tokens) as usize);
    let delivered = by_expert(shape, routing);
    let mut results = Vec::new();
    for source in 0..shape.ranks as usize {
        let mut result = Vec::new();
        for token in 0..routing.tokens[source] {
            let mut sums: Vec<Option<Sum>> = vec![None; shape.ranks as usize];
            let mut total = Sum::new(shape);
            for k in 0..shape.topk as usize {
                let Some(expert) = routing.expert(shape, source, token, k) else { continue };
                let (rank, within) = (expert / local, expert % local);
                // An expert that is selected twice has two rows.
                let nth = (0..k).filter(|k| routing.expert(shape, source, token, *k) == Some(expert)).count();
                let rows = delivered[rank].rows[within].iter().enumerate();
                let (row, _) = rows.filter(|(_, row)| **row == (source, token)).nth(nth).unwrap();
                let values = outputs[rank].row(within * most + row);
                let weight = weighted.then(|| routing.weight(shape, source, token, k));
                // Without prereduction a rank returns as many rows of a token as it may have experts of it.
                let before = (0..k).filter(|k| routing.local(shape, source, token, *k, rank).is_some()).count();
                if !shape.prereduce && before >= local {
                    continue;
                }
                if shape.prereduce {
                    sums[rank].get_or_insert_with(|| Sum::new(shape)).add(values, weight);
                } else {
                    total.add_values(&coding.carried(values, rank == source), weight);
                }
            }
            if shape.tuning.node > 0 {
                // Ranks of a node in order, rounded, then nodes in order.
                for node in sums.chunks(shape.tuning.node as usize).filter(|node| node.iter().any(Option::is_some)) {
                    let mut whole = Sum::new(shape);
                    node.iter().flatten().for_each(|sum| whole.add(&sum.rounded(), None));
                    total.add(&whole.rounded(), None);
                }
                sums.clear();
            }
            for (rank, sum) in sums.iter().enumerate() {
                let Some(sum) = sum else { continue };
                total.add_values(&coding.carried(&sum.rounded(), rank == source), None);
            }
            biases.get(source).into_iter().flatten().for_each(|bias| total.add(token_of(bias, token, shape), None));
            result.extend(total.rounded());
        }
        results.push(result);
    }
    results
}

/// The rows that combine gives to each rank in the rank layout, bf16 [tokens][H]; and the weights that come back with
/// them, f32 [tokens][K], of `weights`: by rank [rows][K], or empty.
pub fn combine_rank(
    shape: &Shape,
    routing: &Routing,
    outputs: &[Outputs],
    weights: &[Vec<f32>],
    biases: &[Vec<Vec<u16>>],
) -> Vec<(Vec<u16>, Vec<f32>)> {
    let delivered = by_rank(shape, routing, 1);
    let topk = shape.topk as usize;
    let mut results = Vec::new();
    for source in 0..shape.ranks as usize {
        let (mut result, mut sums) = (Vec::new(), Vec::new());
        for token in 0..routing.tokens[source] {
            let mut total = Sum::new(shape);
            biases.get(source).into_iter().flatten().for_each(|bias| total.add(token_of(bias, token, shape), None));
            let mut back = vec![0f32; topk];
            // In the order of the token's last selections there; once per node, in the order of ranks.
            let last =
                |rank: &usize| (0..topk).rev().find(|k| routing.local(shape, source, token, *k, *rank).is_some());
            let mut ranks: Vec<usize> = (0..delivered.len()).collect();
            let node = shape.tuning().node as usize;
            if node == 0 {
                ranks.sort_by_key(last);
            }
            for ranks in ranks.chunks(node.max(1)) {
                let (mut part, mut part_back, mut count) = (Sum::new(shape), vec![0f32; topk], 0);
                for rank in ranks {
                    let one = &delivered[*rank];
                    let found = one.rows.iter().position(|row| (row.source, row.token) == (source, token));
                    let Some(row) = found else { continue };
                    part.add(outputs[*rank].row(row), None);
                    if let Some(weights) = weights.get(*rank) {
                        add_all(&mut part_back, &weights[row * topk..]);
                    }
                    count += 1;
                }
                if count > 0 {
                    // A node's sum is rounded; a row alone is rounded already.
                    total.add(&part.rounded(), None);
                    add_all(&mut back, &part_back);
                }
            }
            result.extend(total.rounded());
            sums.extend(back);
        }
        results.push((result, sums));
    }
    results
}

/// Adds to each sum its number.
fn add_all(sums: &mut [f32], numbers: &[f32]) {
    sums.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number);
}

fn token_of<'a>(rows: &'a [u16], token: usize, shape: &Shape) -> &'a [u16] {
    &rows[token * shape.hidden as usize..][..shape.hidden as usize]
}

/// A sum in fp32, each product and each sum rounded once.
#[derive(Clone, Debug)]
struct Sum(Vec<f32>);

impl Sum {
    fn new(shape: &Shape) -> Sum {
        Sum(vec![0.0; shape.hidden as usize])
    }

    fn add(&mut self, row: &[u16], weight: Option<f32>) {
        let values: Vec<f32> = row.iter().map(|bits| widen(*bits)).collect();
        self.add_values(&values, weight);
    }

    fn add_values(&mut self, row: &[f32], weight: Option<f32>) {
        for (sum, value) in self.0.iter_mut().zip(row) {
            *sum += weight.map_or(*value, |weight| value * weight);
        }
    }

    fn rounded(&self) -> Vec<u16> {
        self.0.iter().map(|sum| narrow(*sum)).collect()
    }
}
