//! Bookkeeping of a program that dispatches and combines with MPI_Alltoallv: sorts rows by destination, casts and packs
//! them, places received rows for the experts, and the reverse. Uses the row functions of our own data path, so that
//! the comparison measures transport and not copying.
//!
//! A **record** is one row that travels: one per selection, as MPI codes for such models have it, or with `dedup` one
//! per token and rank. Records go by destination rank, then token. Beside its row, each has a **side**: the row's
//! scales, then `slots` local experts (i32, -1: none) and as many weights (f32).
#![allow(unsafe_code)]

use crossrail_ep::{Config, Layout, Payload};
use crossrail_ep_host::rows::Kernels;
use crossrail_types::{Error, ErrorKind, Result};

/// One rank's bookkeeping: call [`route`](Alltoallv::route), exchange counts, [`pack`](Alltoallv::pack), exchange
/// sides and rows, [`unpack`](Alltoallv::unpack); then [`pack_back`](Alltoallv::pack_back), exchange rows,
/// [`unpack_back`](Alltoallv::unpack_back).
pub struct Alltoallv {
    config: Config,
    layout: Layout,
    dedup: bool,
    kernels: &'static Kernels,
    /// Index in the records for each selection `[tokens, topk]`, or `NONE`.
    records: Vec<u32>,
    weights: Vec<f32>,
    /// Records of each destination.
    counts: Vec<i32>,
    /// For each received record, `slots` places among the rows of their experts, and their weights.
    places: Vec<Place>,
    next: Vec<usize>,
    pointers: Vec<*const u16>,
    factors: Vec<f32>,
}

// SAFETY: `pointers` is scratch space within one call; nothing is kept there between calls.
unsafe impl Send for Alltoallv {}

#[derive(Clone, Copy)]
struct Place {
    /// The row in `[local experts * ranks * max_tokens]`, or `NONE`.
    row: u32,
    weight: f32,
}

const NONE: u32 = u32::MAX;

impl Alltoallv {
    /// For one rank of a group with these parameters.
    ///
    /// # Errors
    /// `Usage` as [`Config::check`].
    pub fn new(config: Config, layout: Layout, dedup: bool) -> Result<Alltoallv> {
        config.check()?;
        let (ranks, local) = (config.ranks as usize, config.local_experts());
        Ok(Alltoallv {
            config,
            layout,
            dedup,
            kernels: Kernels::detect(),
            records: Vec::new(),
            weights: Vec::new(),
            counts: vec![0; ranks],
            places: Vec::new(),
            next: vec![0; local],
            pointers: Vec::new(),
            factors: Vec::new(),
        })
    }

    /// Experts that one record may be for.
    pub fn slots(&self) -> usize {
        if self.dedup { self.config.topk } else { 1 }
    }

    /// Bytes of a record's row in dispatch.
    pub fn row_bytes(&self) -> usize {
        self.config.payload.row_bytes(self.config.hidden)
    }

    /// Bytes of a record's side.
    pub fn side_bytes(&self) -> usize {
        self.scale_bytes() + 8 * self.slots()
    }

    fn scale_bytes(&self) -> usize {
        self.config.payload.scale_bytes(self.config.hidden)
    }

    /// Sorts the selections of `topk_idx` (i64 `[tokens, topk]`) and counts the records of each rank.
    ///
    /// # Errors
    /// `Usage` for an invalid expert.
    pub fn route(&mut self, topk_idx: &[i64], topk_weights: &[f32], counts: &mut [i32]) -> Result<()> {
        let (topk, ranks) = (self.config.topk, self.config.ranks as usize);
        let experts = self.config.experts as i64;
        if topk_weights.len() != topk_idx.len() || counts.len() != ranks {
            return Err(usage("lengths of topk_idx, topk_weights and counts do not match"));
        }
        if topk_idx.iter().any(|expert| !(-1..experts).contains(expert)) {
            return Err(usage("topk_idx has an invalid expert"));
        }
        self.weights.clear();
        self.weights.extend_from_slice(topk_weights);
        self.records.clear();
        self.records.resize(topk_idx.len(), NONE);
        self.counts.fill(0);
        // First each selection's number among its destination's records, then, with the counts known, among all.
        for (token, chosen) in topk_idx.chunks_exact(topk).enumerate() {
            for (k, expert) in chosen.iter().enumerate().filter(|(_, expert)| **expert >= 0) {
                let rank = self.config.home(*expert as usize).0;
                let same = |other: &i64| *other >= 0 && self.config.home(*other as usize).0 == rank;
                let twin = chosen[..k].iter().position(same).filter(|_| self.dedup);
                self.records[token * topk + k] = match twin {
                    Some(first) => self.records[token * topk + first],
                    None => {
                        self.counts[rank] += 1;
                        self.counts[rank] as u32 - 1
                    }
                };
            }
        }
        let mut begin = vec![0u32; ranks];
        for rank in 1..ranks {
            begin[rank] = begin[rank - 1] + self.counts[rank - 1] as u32;
        }
        for (record, expert) in self.records.iter_mut().zip(topk_idx).filter(|(_, expert)| **expert >= 0) {
            *record += begin[self.config.home(*expert as usize).0];
        }
        counts.copy_from_slice(&self.counts);
        Ok(())
    }

    /// Fills the rows and sides of all records from `x` (bf16 `[tokens, hidden]`); a token is cast once.
    ///
    /// # Errors
    /// `Usage` for memory that is too small.
    pub fn pack(&self, x: &[u8], topk_idx: &[i64], rows: &mut [u8], sides: &mut [u8]) -> Result<()> {
        let (topk, hidden, slots) = (self.config.topk, self.config.hidden, self.slots());
        let (row, side, scale) = (self.row_bytes(), self.side_bytes(), self.scale_bytes());
        let records: usize = self.counts.iter().map(|count| *count as usize).sum();
        let tokens = self.records.len() / topk;
        if x.len() < tokens * hidden * 2 || rows.len() < records * row || sides.len() < records * side {
            return Err(usage("the memory is too small for the records"));
        }
        for record in sides[..records * side].chunks_exact_mut(side) {
            record[scale..scale + 4 * slots].fill(0xff);
        }
        let mut used = vec![0u8; records];
        for token in 0..tokens {
            let mut first: Option<usize> = None;
            for k in 0..topk {
                let record = self.records[token * topk + k];
                if record == NONE {
                    continue;
                }
                let at = record as usize;
                if used[at] == 0 {
                    self.fill(x, token, at, first, rows, sides);
                    first.get_or_insert(at);
                }
                let slot = scale + side * at + 4 * usize::from(used[at]);
                let expert = self.config.home(topk_idx[token * topk + k] as usize).1 as i32;
                sides[slot..slot + 4].copy_from_slice(&expert.to_le_bytes());
                let weight = slot + 4 * slots;
                sides[weight..weight + 4].copy_from_slice(&self.weights[token * topk + k].to_le_bytes());
                used[at] += 1;
            }
        }
        Ok(())
    }

    /// One record's row and scales, from `first`, which has the same token, or from the token.
    fn fill(&self, x: &[u8], token: usize, at: usize, first: Option<usize>, rows: &mut [u8], sides: &mut [u8]) {
        let (row, side, scale, hidden) = (self.row_bytes(), self.side_bytes(), self.scale_bytes(), self.config.hidden);
        if let Some(first) = first {
            sides.copy_within(first * side..first * side + scale, at * side);
            // SAFETY: both are records within `rows`, as was checked, and different ones.
            unsafe { self.kernels.copy_row(rows.as_mut_ptr().add(at * row), rows.as_ptr().add(first * row), row) };
            return;
        }
        let source = x[token * hidden * 2..][..hidden * 2].as_ptr();
        let target = rows[at * row..][..row].as_mut_ptr();
        match self.config.payload {
            // SAFETY: a whole row on either side, as the slices above say.
            Payload::Bf16 => unsafe { self.kernels.copy_row(target, source, row) },
            Payload::Fp8(kind) => {
                let scales = sides[at * side..][..scale].as_mut_ptr();
                // SAFETY: as above, and a scale per block at `scales`.
                unsafe { self.kernels.cast_row(source.cast(), hidden, target, scales, kind) };
            }
        }
    }

    /// Unpacks `counts` received records of each source: in the expert layout rows and scales into
    /// `[local experts, ranks * max_tokens, ..]`; in the rank layout only scales, as rows are already in place.
    ///
    /// # Errors
    /// `Usage` for memory that is too small; `Protocol` for a malformed side.
    pub fn unpack(&mut self, counts: &[i32], rows: &[u8], sides: &[u8], x: &mut [u8], scales: &mut [u8]) -> Result<()> {
        let (row, side, scale, slots) = (self.row_bytes(), self.side_bytes(), self.scale_bytes(), self.slots());
        let records: usize = counts.iter().map(|count| *count as usize).sum();
        let most = self.config.ranks as usize * self.config.max_tokens;
        let by_expert = self.layout == Layout::Expert;
        let places = if by_expert { self.config.local_experts() * most } else { records };
        if rows.len() < records * row || sides.len() < records * side || scales.len() < places * scale {
            return Err(usage("the memory is too small for the received records"));
        }
        if by_expert && x.len() < places * row {
            return Err(usage("x is too small"));
        }
        self.places.clear();
        self.next.fill(0);
        for (at, record) in sides[..records * side].chunks_exact(side).enumerate() {
            if !by_expert {
                scales[at * scale..][..scale].copy_from_slice(&record[..scale]);
                continue;
            }
            for slot in 0..slots {
                let expert = word(record, scale + 4 * slot) as i32;
                let weight = f32::from_bits(word(record, scale + 4 * slots + 4 * slot));
                if expert < 0 {
                    self.places.push(Place { row: NONE, weight });
                    continue;
                }
                let next = self.next.get_mut(expert as usize).filter(|next| **next < most);
                let next = next.ok_or_else(|| Error::new(ErrorKind::Protocol, "unpack", "malformed record side"))?;
                let place = expert as usize * most + *next;
                *next += 1;
                scales[place * scale..][..scale].copy_from_slice(&record[..scale]);
                // SAFETY: a whole row within `rows` and within `x`, as was checked.
                unsafe { self.kernels.copy_row(x.as_mut_ptr().add(place * row), rows.as_ptr().add(at * row), row) };
                self.places.push(Place { row: place as u32, weight });
            }
        }
        Ok(())
    }

    /// Rows of each local expert after [`unpack`](Alltoallv::unpack) in the expert layout.
    pub fn expert_counts(&self) -> Vec<i32> {
        self.next.iter().map(|next| *next as i32).collect()
    }

    /// Packs the rows to return, from `y` (bf16 `[local experts, ranks * max_tokens, hidden]`), in the order in which
    /// the records arrived; with `dedup` weighted and summed. Expert layout only: in the rank layout `y` is returned as
    /// is.
    ///
    /// # Errors
    /// `Usage` for memory that is too small.
    pub fn pack_back(&mut self, y: &[u8], rows: &mut [u8]) -> Result<()> {
        let (hidden, slots) = (self.config.hidden, self.slots());
        let most = self.config.local_experts() * self.config.ranks as usize * self.config.max_tokens;
        if y.len() < most * hidden * 2 || rows.len() < self.places.len() / slots * hidden * 2 {
            return Err(usage("the memory is too small for the returned rows"));
        }
        for (places, target) in self.places.chunks_exact(slots).zip(rows.chunks_exact_mut(hidden * 2)) {
            let there = places.iter().filter(|place| place.row != NONE);
            let at = |place: &Place| y[place.row as usize * hidden * 2..][..hidden * 2].as_ptr();
            if !self.dedup {
                for place in there {
                    // SAFETY: a whole row on either side, as the slices say.
                    unsafe { self.kernels.copy_row(target.as_mut_ptr(), at(place), hidden * 2) };
                }
                continue;
            }
            self.pointers.clear();
            self.factors.clear();
            for place in there {
                self.pointers.push(at(place).cast());
                self.factors.push(place.weight);
            }
            // SAFETY: whole rows, as the slices say; none overlaps the target, which is other memory.
            unsafe {
                let (rows, factors) = (&self.pointers[..], Some(&self.factors[..]));
                self.kernels.reduce_rows(target.as_mut_ptr().cast(), rows, factors, hidden);
            }
        }
        Ok(())
    }

    /// Sums the returned rows of each token into `out` (bf16 `[tokens, hidden]`); weighted where there is a row
    /// per selection.
    ///
    /// # Errors
    /// `Usage` for memory that is too small.
    pub fn unpack_back(&mut self, rows: &[u8], out: &mut [u8]) -> Result<()> {
        let (topk, hidden) = (self.config.topk, self.config.hidden);
        let records: usize = self.counts.iter().map(|count| *count as usize).sum();
        let tokens = self.records.len() / topk;
        if rows.len() < records * hidden * 2 || out.len() < tokens * hidden * 2 {
            return Err(usage("the memory is too small for the sums"));
        }
        for (token, target) in out.chunks_exact_mut(hidden * 2).take(tokens).enumerate() {
            let (mine, weights) = (&self.records[token * topk..][..topk], &self.weights[token * topk..][..topk]);
            self.pointers.clear();
            self.factors.clear();
            for (k, record) in mine.iter().enumerate().filter(|(_, record)| **record != NONE) {
                if self.dedup && mine[..k].contains(record) {
                    continue;
                }
                self.pointers.push(rows[*record as usize * hidden * 2..][..hidden * 2].as_ptr().cast());
                self.factors.push(weights[k]);
            }
            let factors = (!self.dedup).then_some(&self.factors[..]);
            // SAFETY: whole rows, as the slices say; `out` is other memory than `rows`.
            unsafe { self.kernels.reduce_rows(target.as_mut_ptr().cast(), &self.pointers, factors, hidden) };
        }
        Ok(())
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn usage(text: &str) -> Error {
    Error::new(ErrorKind::Usage, "alltoallv", text)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crossrail_ep::Scale;

    use super::*;

    const HIDDEN: usize = 128;
    const TOKENS: usize = 5;
    const RANKS: usize = 3;

    fn config(payload: Payload, layout: Layout) -> Config {
        Config {
            ranks: RANKS as u32,
            max_tokens: TOKENS,
            hidden: HIDDEN,
            experts: 6,
            topk: 3,
            payload,
            layouts: vec![layout],
            prereduce: true,
            share_node: true,
            timeout: Duration::from_secs(1),
            on_loss: crossrail_ep::OnLoss::Raise,
        }
    }

    fn bf16(value: f32) -> [u8; 2] {
        ((value.to_bits() >> 16) as u16).to_le_bytes()
    }

    fn wide(bytes: &[u8]) -> f32 {
        f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16)
    }

    /// Exchanges what every rank has for every other, `counts[source][destination]` records of `size` bytes.
    fn exchange(sent: &[Vec<u8>], counts: &[Vec<i32>], size: usize) -> Vec<Vec<u8>> {
        let begin = |source: usize, rank: usize| counts[source][..rank].iter().sum::<i32>() as usize * size;
        let part = |source: usize, rank: usize| &sent[source][begin(source, rank)..begin(source, rank + 1)];
        (0..RANKS).map(|rank| (0..RANKS).flat_map(|source| part(source, rank)).copied().collect()).collect()
    }

    const TOPK_IDX: [i64; 15] = [0, 1, 5, 3, -1, 2, 4, 5, 0, -1, -1, -1, 2, 3, 1];
    /// Those of a token sum to one, without those of -1.
    const WEIGHTS: [f32; 15] = [0.25, 0.25, 0.5, 0.5, 9.0, 0.5, 0.25, 0.5, 0.25, 9.0, 9.0, 9.0, 0.5, 0.25, 0.25];
    const VALUES: [f32; 4] = [1.0, 2.0, 4.0, 0.5];

    /// Dispatches and combines with experts that multiply by two: every token comes back doubled.
    fn round_trip(payload: Payload, layout: Layout, dedup: bool) {
        let x: Vec<u8> = (0..TOKENS * HIDDEN).flat_map(|i| bf16(VALUES[i % 4])).collect();
        let mut ranks: Vec<Alltoallv> =
            (0..RANKS).map(|_| Alltoallv::new(config(payload, layout), layout, dedup).unwrap()).collect();
        let (row, side) = (ranks[0].row_bytes(), ranks[0].side_bytes());
        let mut counts = vec![vec![0; RANKS]; RANKS];
        let (mut rows, mut sides) = (Vec::new(), Vec::new());
        for (rank, counts) in ranks.iter_mut().zip(&mut counts) {
            rank.route(&TOPK_IDX, &WEIGHTS, counts).unwrap();
            let records = counts.iter().sum::<i32>() as usize;
            assert_eq!(records, if dedup { 7 } else { 11 });
            let (mut sent, mut beside) = (vec![0; records * row], vec![0; records * side]);
            rank.pack(&x, &TOPK_IDX, &mut sent, &mut beside).unwrap();
            rows.push(sent);
            sides.push(beside);
        }
        let (came, beside) = (exchange(&rows, &counts, row), exchange(&sides, &counts, side));
        let back: Vec<Vec<i32>> = (0..RANKS).map(|to| (0..RANKS).map(|from| counts[from][to]).collect()).collect();
        let answered = ranks.iter_mut().enumerate().map(|(me, rank)| answer(rank, &back[me], &came[me], &beside[me]));
        let answers: Vec<Vec<u8>> = answered.collect();
        let returned = exchange(&answers, &back, HIDDEN * 2);
        for (rank, rows) in ranks.iter_mut().zip(&returned) {
            let mut out = vec![0xffu8; TOKENS * HIDDEN * 2];
            rank.unpack_back(rows, &mut out).unwrap();
            for (token, sums) in out.chunks_exact(HIDDEN * 2).enumerate() {
                for (i, value) in sums.chunks_exact(2).enumerate() {
                    let right = if token == 3 { 0.0 } else { 2.0 * VALUES[(token * HIDDEN + i) % 4] };
                    assert_eq!(wide(value), right, "token {token}, element {i}");
                }
            }
        }
    }

    /// What one rank's experts make of what came to it, as it goes back.
    fn answer(rank: &mut Alltoallv, counts: &[i32], came: &[u8], beside: &[u8]) -> Vec<u8> {
        let (row, side, slots) = (rank.row_bytes(), rank.side_bytes(), rank.slots());
        let (payload, by_expert) = (rank.config.payload, rank.layout == Layout::Expert);
        let scale = payload.scale_bytes(HIDDEN);
        let places = if by_expert { 2 * RANKS * TOKENS } else { came.len() / row };
        let (mut x, mut scales) = (vec![0; places * row], vec![0; places * scale]);
        rank.unpack(counts, came, beside, &mut x, &mut scales).unwrap();
        let delivered = if by_expert { &x } else { came };
        let mut y = vec![0; places * HIDDEN * 2];
        for (place, target) in y.chunks_exact_mut(HIDDEN * 2).enumerate() {
            let source = &delivered[place * row..][..row];
            match payload {
                Payload::Bf16 => target.copy_from_slice(source),
                // SAFETY: a whole row and its scales within the vectors.
                Payload::Fp8(kind) => unsafe {
                    let scales = scales[place * scale..].as_ptr();
                    rank.kernels.uncast_row(source.as_ptr(), scales, HIDDEN, target.as_mut_ptr().cast(), kind);
                },
            }
            // A row for several experts of the rank layout is weighted by them.
            let mut weight = 1.0;
            if !by_expert && rank.dedup {
                let of = &beside[place * side + scale..];
                let there = (0..slots).filter(|slot| word(of, 4 * slot) as i32 >= 0);
                weight = there.map(|slot| f32::from_bits(word(of, 4 * slots + 4 * slot))).sum();
            }
            for value in target.chunks_exact_mut(2) {
                let doubled = 2.0 * weight * wide(value);
                value.copy_from_slice(&bf16(doubled));
            }
        }
        if !by_expert {
            return y;
        }
        let mut rows = vec![0; came.len() / row * HIDDEN * 2];
        rank.pack_back(&y, &mut rows).unwrap();
        let arrived = beside.chunks_exact(side).flat_map(|one| (0..slots).map(move |slot| word(one, scale + 4 * slot)));
        let selections = arrived.filter(|expert| *expert as i32 >= 0).count();
        assert_eq!(rank.expert_counts().iter().sum::<i32>() as usize, selections);
        rows
    }

    #[test]
    fn every_token_comes_back() {
        for payload in [Payload::Bf16, Payload::Fp8(Scale::F32), Payload::Fp8(Scale::PowerOfTwo)] {
            for layout in [Layout::Expert, Layout::Rank] {
                for dedup in [false, true] {
                    round_trip(payload, layout, dedup);
                }
            }
        }
    }

    #[test]
    fn small_memory_and_wrong_experts_are_errors() {
        let mut rank = Alltoallv::new(config(Payload::Bf16, Layout::Expert), Layout::Expert, true).unwrap();
        assert_eq!(rank.route(&[0, 6, 1], &[1.0; 3], &mut [0; RANKS]).unwrap_err().kind, ErrorKind::Usage);
        rank.route(&[0, 2, 4], &[1.0; 3], &mut [0; RANKS]).unwrap();
        let x = vec![0; HIDDEN * 2];
        assert!(rank.pack(&x, &[0, 2, 4], &mut [0; 10], &mut [0; 1000]).is_err());
        assert!(rank.unpack_back(&[0; 10], &mut [0; HIDDEN * 2]).is_err());
        assert!(rank.unpack(&[1, 0, 0], &[0; 2 * HIDDEN], &[7; 100], &mut [0; 60 * HIDDEN], &mut []).is_err());
    }
}
