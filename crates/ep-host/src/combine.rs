//! Combine: each rank returns the outputs of its experts to the tokens' ranks, which sum them.
//!
//! Expert layout: a token's outputs on one rank are weighted and summed there (fp32, in the order of k) and returned as
//! one bf16 row; without `prereduce` each output is returned, and the source weights and sums. Rank layout: one row per
//! token and rank is returned as the caller computed it. The source sums rows in fp32, in the order of ranks (without
//! `prereduce`, of k), bias last.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Instant;

use crossrail_ep::{Bytes, Layout, MOST_TOPK};
use crossrail_types::{Error, ErrorKind, Result};

use crate::heap::{HEADER, Header};
use crate::local_rank::{GroupView, LocalRank};
use crate::operation::{Common, Operation, Pending, Timing};
use crate::peer::{Expected, Message};
use crate::routes::{Destination, Handle, Routes};
use crate::send::micros;
use crate::tensor::{Tensor, TensorMut};

/// How to combine.
#[derive(Default)]
pub struct CombineOptions {
    /// f32 `[tokens, topk]`: expert layout, if the dispatch had none. Without weights, outputs are summed as they are.
    pub weights: Option<Tensor>,
    /// bf16 `[tokens, hidden]` each, added to the result; at most two.
    pub bias: Vec<Tensor>,
    /// bf16 `[tokens, hidden]`, for the result; allocated if not given.
    pub out: Option<TensorMut>,
    /// As [`DispatchOptions::refuse`](crate::DispatchOptions::refuse).
    pub refuse: Option<Error>,
}

/// The result of a combine.
#[derive(Debug)]
pub struct Combined {
    /// Ranks of the buffer without a part in the sums, ascending: not connected, masked or lost, at this combine or at its
    /// dispatch.
    pub missing: Vec<u32>,
    /// bf16 `[tokens, hidden]`; `None` if the caller provided the memory.
    pub out: Option<Vec<u16>>,
    /// Where the time went.
    pub timing: Timing,
    /// What was moved.
    pub bytes: Bytes,
}

/// What must arrive before rows can be returned to a rank, as bits of `missing`.
const SLOT: u8 = 1;
const WEIGHTS: u8 = 2;

struct Combine {
    common: Common,
    epoch: u64,
    y: Tensor,
    routes: Arc<Routes>,
    weights: Option<Tensor>,
    bias: Vec<Tensor>,
    out: TensorMut,
    own_out: Option<Vec<u16>>,
    /// What is missing before rows can be returned to each rank.
    missing: Vec<u8>,
    ready: Vec<usize>,
    /// Ranks whose slots are free and that were not sent weights yet.
    open: Vec<usize>,
    /// Ranks whose rows have arrived.
    rows_arrived: Vec<bool>,
    /// The weights that each source sent with this combine.
    asked: Vec<Vec<f32>>,
}

pub(crate) fn begin(
    local: &Arc<LocalRank>,
    y: Tensor,
    handle: Option<&Handle>,
    options: CombineOptions,
) -> Result<Pending<Combined>> {
    let mut view = local.view.lock();
    if view.closed {
        return Err(Error::new(ErrorKind::Closed, "combine", "the buffer was destroyed"));
    }
    view.refuse_broken("combine")?;
    let wide = local.own.areas.wide;
    let CombineOptions { weights, bias, out, refuse } = options;
    let ours = handle.map(|handle| Arc::clone(&handle.0)).filter(|routes| routes.buffer == local.id);
    let (routes, problem) = match (ours, refuse) {
        (_, Some(error)) => (Arc::new(Routes::nothing(local)), Some(error)),
        (None, None) => {
            let error = Error::new(ErrorKind::Usage, "combine", "the handle is another buffer's");
            (Arc::new(Routes::nothing(local)), Some(error))
        }
        (Some(routes), None) => {
            let problem = check(local, &routes, &y, weights.as_ref(), &bias, out.as_ref()).err();
            (routes, problem)
        }
    };
    let (out, own_out) = match out {
        Some(out) => (out, None),
        None => {
            let mut own = vec![0u16; routes.sent.tokens * wide / 2];
            // SAFETY: the vector's buffer, which moves with it into the operation and is not touched otherwise until
            // the end.
            (unsafe { TensorMut::raw(own.as_mut_ptr().cast(), own.len() * 2, None) }, Some(own))
        }
    };
    view.operations += 1;
    view.combines += 1;
    let (number, epoch) = (view.operations, view.combines);
    let mut common = Common::new(local, &mut view, "combine", number, (epoch % 2) as usize);
    common.missing.extend(&routes.missing);
    if let Some(error) = problem {
        common.fail(error);
    }
    let ranks = local.config.ranks as usize;
    let mut combine = Combine {
        common,
        epoch,
        y,
        weights,
        bias,
        out,
        own_out,
        missing: vec![0; ranks],
        ready: Vec::new(),
        open: Vec::new(),
        rows_arrived: vec![false; ranks],
        asked: vec![Vec::new(); ranks],
        routes,
    };
    for rank in view.others(local.own.me) {
        combine.missing[rank] = SLOT;
        combine.common.expect_number(rank, Message::CombineReleased, epoch.saturating_sub(2));
        let received = &combine.routes.received[rank];
        if combine.weighs_here(local) && !received.tokens.is_empty() && received.weights.is_empty() {
            combine.missing[rank] |= WEIGHTS;
            combine.common.expect(rank, Message::Weights);
        }
        combine.common.expect(rank, Message::Back);
    }
    let mut combine = Box::new(combine);
    local.poll(combine.as_mut(), &mut view);
    drop(view);
    Ok(Pending::new(combine, Arc::clone(local)))
}

fn check(
    local: &LocalRank,
    routes: &Routes,
    y: &Tensor,
    weights: Option<&Tensor>,
    bias: &[Tensor],
    out: Option<&TensorMut>,
) -> Result<()> {
    let wrong = |text: String| Err(Error::new(ErrorKind::Usage, "combine", text));
    let (config, wide, tokens) = (&local.config, local.own.areas.wide, routes.sent.tokens);
    let (rows, shape) = match routes.layout {
        Layout::Expert => {
            let most = config.ranks as usize * config.max_tokens;
            (config.local_experts() * most, format!("[{}, {most}, {}]", config.local_experts(), config.hidden))
        }
        Layout::Rank => {
            let rows = routes.offsets.last().copied().unwrap_or(0) as usize;
            (rows, format!("[{rows}, {}]", config.hidden))
        }
    };
    if y.len() != rows * wide {
        return wrong(format!("y: expected {} bytes, bf16 {shape}, got {}", rows * wide, y.len()));
    }
    if let Some(weights) = weights {
        if routes.layout == Layout::Rank {
            return wrong("topk_weights with the rank layout, whose rows are summed as they are".into());
        }
        if routes.sent.weighted {
            return wrong("topk_weights were given to dispatch already".into());
        }
        if weights.len() != tokens * config.topk * 4 {
            let want = tokens * config.topk * 4;
            return wrong(format!(
                "topk_weights: expected {want} bytes, f32 [{tokens}, {}], got {}",
                config.topk,
                weights.len()
            ));
        }
    }
    if bias.len() > 2 {
        return wrong(format!("{} biases are more than 2", bias.len()));
    }
    let lens = bias.iter().map(|bias| ("bias", bias.len())).chain(out.map(|out| ("out", out.len())));
    for (name, len) in lens {
        if len != tokens * wide {
            return wrong(format!(
                "{name}: expected {} bytes, bf16 [{tokens}, {}], got {len}",
                tokens * wide,
                config.hidden
            ));
        }
    }
    Ok(())
}

impl Combine {
    /// Whether the experts' ranks weight and sum.
    fn weighs_here(&self, local: &LocalRank) -> bool {
        self.routes.layout == Layout::Expert && local.config.prereduce
    }

    fn cleared(&mut self, rank: usize, what: u8) {
        let before = self.missing[rank];
        self.missing[rank] = before & !what;
        if before != 0 && self.missing[rank] == 0 {
            self.ready.push(rank);
        }
    }

    /// Sends the weights of our rows, if the dispatch had none.
    fn send_weights(&mut self, local: &LocalRank, view: &mut GroupView, rank: usize) {
        let (topk, parity, number) = (local.config.topk, self.common.parity, self.common.number);
        let tokens = &self.routes.sent.to[rank].tokens;
        if self.routes.sent.weighted || !self.weighs_here(local) || tokens.is_empty() {
            return;
        }
        let Some(peer) = &mut view.peers[rank] else { return };
        let weights = self.weights.as_ref().filter(|_| self.common.failure.is_none());
        let rows = if weights.is_some() { tokens.len() } else { 0 };
        let to = peer.back(&local.own, parity).wrapping_add(local.own.areas.back_weights());
        // SAFETY: our slot in the peer's heap, or in staging; free, as the peer has released the combine before the
        // last. It has room for the weights of max_tokens rows.
        unsafe {
            to.cast::<Header>().write_volatile(Header::new(number, rows, 0));
            if let Some(weights) = weights {
                for (row, token) in tokens.iter().enumerate() {
                    let from = weights.at(*token as usize * topk * 4, topk * 4);
                    std::ptr::copy_nonoverlapping(from, to.add(HEADER + row * topk * 4), topk * 4);
                }
            }
        }
        // A failed write means a dead peer, which is detected when its answer is overdue.
        let _ = peer.publish_weights(&local.own, parity, number, HEADER + rows * topk * 4);
    }

    fn read_weights(&mut self, local: &LocalRank, rank: usize) -> Result<()> {
        let (areas, topk) = (&local.own.areas, local.config.topk);
        let from = local.own.heap.at(areas.back(self.common.parity, rank) + areas.back_weights());
        // SAFETY: a slot of our heap, published by its writer.
        let header = unsafe { from.cast::<Header>().read_volatile() };
        let (rows, have) = (header.rows as usize, self.routes.received[rank].tokens.len());
        if rows != 0 && rows != have {
            let text = format!("rank {rank}: weights of {rows} rows where it sent {have}");
            return Err(Error::new(ErrorKind::Protocol, "combine", text));
        }
        let mut weights = vec![0f32; rows * topk];
        // SAFETY: as above; `have` rows are at most max_tokens.
        unsafe { std::ptr::copy_nonoverlapping(from.add(HEADER), weights.as_mut_ptr().cast::<u8>(), rows * topk * 4) };
        self.asked[rank] = weights;
        Ok(())
    }

    /// Writes the rows returned to one rank.
    fn send_back(&mut self, local: &LocalRank, view: &mut GroupView, rank: usize) {
        let (areas, parity, number) = (&local.own.areas, self.common.parity, self.common.number);
        let Some(peer) = &mut view.peers[rank] else { return };
        let slot = peer.back(&local.own, parity);
        let rows_at = slot.wrapping_add(areas.back_rows());
        let rows = if self.common.failure.is_some() { 0 } else { self.routes.received[rank].tokens.len() };
        let began = Instant::now();
        let mut written = 0;
        let mut scratch = Gather::default();
        for row in 0..rows {
            // SAFETY: our slot in the peer's heap, or staging, which is free (as above) and has room for what
            // max_tokens rows bring back.
            written += unsafe { self.write_back(local, rank, row, rows_at.wrapping_add(written), &mut scratch) };
        }
        if self.weighs_here(local) {
            self.common.timing.sum_us += micros(began);
        } else {
            self.common.timing.copy_us += micros(began);
        }
        let mut header = match &self.common.failure {
            Some(error) => Header::failed(number, error),
            None => Header::new(number, rows, 0),
        };
        header.writes = peer.announce(true, parity, usize::from(written > 0));
        // SAFETY: as above.
        unsafe { slot.cast::<Header>().write_volatile(header) };
        let _ = peer.publish_back(&local.own, parity, number, written);
        self.common.bytes.wire += written as u64;
        if peer.is_network() {
            self.common.bytes.network += written as u64;
        }
    }

    /// Writes what one row returns to `to`, and returns its size in bytes.
    ///
    /// # Safety
    /// `to` has room for it.
    unsafe fn write_back(&self, local: &LocalRank, rank: usize, row: usize, to: *mut u8, gather: &mut Gather) -> usize {
        let wide = local.own.areas.wide;
        if self.routes.layout == Layout::Rank {
            let at = (self.routes.offsets[rank] as usize + row) * wide;
            // SAFETY: room by the contract; y has all rows (checked).
            unsafe { local.kernels.copy_row(to, self.y.at(at, wide), wide) };
            return wide;
        }
        self.gather(local, rank, row, gather);
        if local.config.prereduce {
            let weights = if gather.weights.is_empty() { None } else { Some(&gather.weights[..]) };
            // SAFETY: as above.
            unsafe { local.kernels.reduce_rows(to.cast(), &gather.rows, weights, local.config.hidden) };
            return wide;
        }
        for (index, from) in gather.rows.iter().enumerate() {
            // SAFETY: as above.
            unsafe { local.kernels.copy_row(to.wrapping_add(index * wide), from.cast(), wide) };
        }
        gather.rows.len() * wide
    }

    /// The experts' outputs for one row, by k, and their weights.
    fn gather(&self, local: &LocalRank, rank: usize, row: usize, gather: &mut Gather) {
        let (topk, wide) = (local.config.topk, local.own.areas.wide);
        let most = local.config.ranks as usize * local.config.max_tokens;
        let received = &self.routes.received[rank];
        let weights = if received.weights.is_empty() { &self.asked[rank] } else { &received.weights };
        gather.rows.clear();
        gather.weights.clear();
        for (k, expert, place) in received.selections(row, topk) {
            gather.rows.push(self.y.at((expert * most + place) * wide, wide).cast());
            if let Some(weight) = weights.get(row * topk + k) {
                gather.weights.push(*weight);
            }
        }
    }

    /// Sums each token's rows.
    fn sum(&mut self, local: &LocalRank) {
        let began = Instant::now();
        let (hidden, wide, me) = (local.config.hidden, local.own.areas.wide, local.own.me);
        if self.asked[me].is_empty()
            && let Some(weights) = self.weights.as_ref().filter(|_| self.weighs_here(local))
        {
            let all: Vec<f32> = weights.words::<4>().map(f32::from_ne_bytes).collect();
            let topk = local.config.topk;
            let tokens = &self.routes.received[me].tokens;
            self.asked[me] =
                tokens.iter().flat_map(|token| all[*token as usize * topk..][..topk].iter().copied()).collect();
        }
        let late: Vec<f32> = match &self.weights {
            Some(weights) => weights.words::<4>().map(f32::from_ne_bytes).collect(),
            None => Vec::new(),
        };
        let mut own = vec![0u16; hidden];
        let mut gather = Gather::default();
        let (mut rows, mut weights): (Vec<*const u16>, Vec<f32>) = (Vec::new(), Vec::new());
        for token in 0..self.routes.sent.tokens {
            rows.clear();
            weights.clear();
            if self.routes.layout == Layout::Expert && !local.config.prereduce {
                self.selected(local, token, &late, &mut rows, &mut weights);
            } else {
                for destination in self.routes.sent.destinations_of(token) {
                    rows.extend(self.row_of(local, destination, &mut own, &mut gather));
                }
            }
            for bias in &self.bias {
                rows.push(bias.at(token * wide, wide).cast());
                if !weights.is_empty() {
                    weights.push(1.0);
                }
            }
            let weights = if weights.is_empty() { None } else { Some(&weights[..]) };
            // SAFETY: `out` has all tokens (checked); rows lie in y, in our heap's slots, in `own` or in a bias.
            unsafe { local.kernels.reduce_rows(self.out.at(token * wide, wide).cast(), &rows, weights, hidden) };
        }
        self.common.timing.sum_us += micros(began);
    }

    /// The row that one rank returned for a token; `None` if the rank is lost.
    fn row_of(
        &self,
        local: &LocalRank,
        destination: &Destination,
        own: &mut [u16],
        gather: &mut Gather,
    ) -> Option<*const u16> {
        let (areas, rank, row) = (&local.own.areas, destination.rank as usize, destination.row as usize);
        if rank == local.own.me {
            if self.routes.layout == Layout::Rank {
                return Some(self.y.at((self.routes.offsets[rank] as usize + row) * areas.wide, areas.wide).cast());
            }
            // SAFETY: `own` has one row.
            unsafe { self.write_back(local, rank, row, own.as_mut_ptr().cast(), gather) };
            return Some(own.as_ptr());
        }
        let slot = areas.back(self.common.parity, rank) + areas.back_rows();
        self.rows_arrived[rank].then(|| local.own.heap.at(slot + row * areas.wide).cast_const().cast())
    }

    /// Without `prereduce`: a token's outputs in the order of k, and their weights.
    fn selected(
        &self,
        local: &LocalRank,
        token: usize,
        late: &[f32],
        rows: &mut Vec<*const u16>,
        weights: &mut Vec<f32>,
    ) {
        let (areas, topk, sent) = (&local.own.areas, local.config.topk, &self.routes.sent);
        let given = if sent.weighted { &sent.weights[..] } else { late };
        let mut taken = [0usize; MOST_TOPK];
        let mut gather = Gather::default();
        for k in 0..topk {
            let home = sent.expert_ranks[token * topk + k];
            let Some((at, destination)) =
                sent.destinations_of(token).iter().enumerate().find(|(_, destination)| destination.rank == home)
            else {
                continue;
            };
            let nth = taken[at];
            taken[at] += 1;
            let rank = destination.rank as usize;
            let row: *const u16 = if rank == local.own.me {
                self.gather(local, rank, destination.row as usize, &mut gather);
                gather.rows[nth]
            } else if self.rows_arrived[rank] {
                let at = sent.to[rank].first[destination.row as usize] as usize + nth;
                let slot = areas.back(self.common.parity, rank) + areas.back_rows();
                local.own.heap.at(slot + at * areas.wide).cast_const().cast()
            } else {
                continue;
            };
            rows.push(row);
            if let Some(weight) = given.get(token * topk + k) {
                weights.push(*weight);
            }
        }
    }

    fn read_back(&mut self, local: &LocalRank, rank: usize) {
        let at = local.own.areas.back(self.common.parity, rank);
        // SAFETY: a slot of our heap, published by its writer.
        let header = unsafe { local.own.heap.at(at).cast::<Header>().read_volatile() };
        let want = self.routes.sent.to[rank].tokens.len();
        if let Some(error) = header.failure(rank, "combine") {
            self.common.fail(error);
        } else if header.rows as usize != want {
            let text = format!(
                "rank {rank} returned {} rows, but {want} were sent: the ranks combine different dispatches",
                header.rows
            );
            self.common.fail(Error::new(ErrorKind::Mismatch, "combine", text));
        } else {
            self.rows_arrived[rank] = true;
        }
    }
}

/// Rows to be summed, and their weights.
#[derive(Default)]
struct Gather {
    rows: Vec<*const u16>,
    weights: Vec<f32>,
}

// SAFETY: the pointers that a Combine keeps are those of its `out`, which it owns or was promised; it moves between
// threads as a whole.
unsafe impl Send for Combine {}

impl Operation for Combine {
    type Output = Combined;

    fn common(&mut self) -> &mut Common {
        &mut self.common
    }

    fn arrived(&mut self, local: &LocalRank, _: &mut GroupView, expected: Expected) {
        match expected.message {
            Message::CombineReleased => {
                self.open.push(expected.rank);
                self.cleared(expected.rank, SLOT);
            }
            Message::Weights => {
                if let Err(error) = self.read_weights(local, expected.rank) {
                    self.common.fail(error);
                }
                self.cleared(expected.rank, WEIGHTS);
            }
            _ => self.read_back(local, expected.rank),
        }
    }

    fn lost(&mut self, _: &LocalRank, _: &mut GroupView, _: Expected) {}

    fn settle(&mut self, local: &LocalRank, view: &mut GroupView) {
        for rank in std::mem::take(&mut self.open) {
            self.send_weights(local, view, rank);
        }
        for rank in std::mem::take(&mut self.ready) {
            self.send_back(local, view, rank);
        }
    }

    fn finish(&mut self, local: &LocalRank, view: &mut GroupView) -> Combined {
        if self.common.failure.is_none() {
            self.sum(local);
        }
        for rank in view.others(local.own.me) {
            if let Some(peer) = &mut view.peers[rank] {
                peer.release_combine(&local.own, self.common.parity, self.epoch);
            }
        }
        let selections: usize = self
            .routes
            .received
            .iter()
            .map(|received| received.experts.iter().filter(|expert| **expert != crate::routes::NO_EXPERT).count())
            .sum();
        self.common.bytes.logical = (selections * local.own.areas.wide) as u64;
        self.common.timing.total_us = micros(self.common.began);
        let missing = self.common.missing();
        Combined { missing, out: self.own_out.take(), timing: self.common.timing, bytes: self.common.bytes }
    }
}
