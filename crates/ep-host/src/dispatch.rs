//! Dispatch: metadata first, so that every receiver knows where rows belong; rows once per rank; fan-out on arrival.
//!
//! Expert layout: rows are written into the sender's slot of the receiver's heap, and copied from there to each expert;
//! this rank's own rows go straight to the experts. Rank layout: the receiver grants each source a place, and the source
//! writes its rows there.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail::Memory;
use crossrail_ep::{Bytes, Layout, Payload};
use crossrail_locks::MutexGuard;
use crossrail_types::{Error, ErrorKind, Result, interrupt};

use crate::heap::{HEADER, Header, flags};
use crate::local_rank::{GroupView, LocalRank, Suspect};
use crate::operation::{Common, LIVENESS_INTERVAL, Operation, Pending, Timing};
use crate::peer::{Expected, Message, Span, staged_slot};
use crate::rank_layout::{self, Grants};
use crate::routes::{Handle, Received, Routes, Sent};
use crate::send::{Target, micros};
use crate::tensor::Input;

/// How long the connections of a process that has ended may take to end here, too.
const ENDING_MAX: Duration = Duration::from_secs(1);

/// How to dispatch.
#[derive(Clone, Debug)]
pub struct DispatchOptions {
    /// What is delivered.
    pub layout: Layout,
    /// Repeats the routing of an earlier dispatch, on every rank: `topk_idx` and `topk_weights` are ignored, and no
    /// metadata is exchanged.
    pub handle: Option<Handle>,
    /// Rank layout: counts per expert are rounded up to a multiple of this.
    pub alignment: usize,
    /// The caller's own error: this rank takes part without rows, and the operation fails with it here and, naming this
    /// rank, on the other ranks. All other arguments are ignored.
    pub refuse: Option<Error>,
}

impl Default for DispatchOptions {
    fn default() -> DispatchOptions {
        DispatchOptions { layout: Layout::Expert, handle: None, alignment: 1, refuse: None }
    }
}

/// A part of the buffer's memory. The second dispatch after the one that returned it overwrites it.
#[derive(Clone, Debug)]
pub struct Placed {
    /// The memory.
    pub memory: Memory,
    /// Offset of the first byte.
    pub offset: usize,
    /// Size in bytes.
    pub len: usize,
}

/// What a dispatch delivered.
#[derive(Clone, Debug)]
pub struct Dispatched {
    /// Ranks of the buffer without a part in the exchange, ascending: not connected, masked or lost.
    pub missing: Vec<u32>,
    /// For the combine.
    pub handle: Handle,
    /// Expert layout: `[local experts, ranks * max_tokens, hidden]`; rank layout: `[rows, hidden]`.
    pub rows: Placed,
    /// Their scales, `[.., hidden / 128]`, in fp8.
    pub scales: Option<Placed>,
    /// Rows of each local expert; in the rank layout rounded up to the alignment.
    pub counts: Vec<i32>,
    /// Where the time went.
    pub timing: Timing,
    /// What was moved.
    pub bytes: Bytes,
}

struct Dispatch {
    common: Common,
    layout: Layout,
    alignment: usize,
    /// Sequence number of this dispatch.
    epoch: u64,
    input: Input,
    sent: Arc<Sent>,
    cached: Option<Arc<Routes>>,
    /// Ranks whose slots are free and that were not sent metadata yet.
    open: Vec<usize>,
    /// Rank layout: the places that ranks grant each other.
    grants: Grants,
    /// Ranks whose metadata has not arrived.
    metas_left: usize,
    /// Rows have their places. Cleared when a source of rows is lost: those after them move up.
    laid_out: bool,
    /// Rows are expected, and in the rank layout places were granted: done once, even if a rank is lost later.
    rows_expected: bool,
    received: Vec<Received>,
    /// Sources whose rows have all arrived.
    rows_arrived: Vec<bool>,
    /// Expert layout: rows per expert and source.
    ranges: Vec<i64>,
    counts: Vec<i32>,
}

pub(crate) fn begin(local: &Arc<LocalRank>, input: Input, options: DispatchOptions) -> Result<Pending<Dispatched>> {
    let mut view = local.view.lock();
    if options.layout == Layout::Rank {
        await_suspects(local, &mut view);
    }
    if view.closed {
        return Err(Error::new(ErrorKind::Closed, "dispatch", "the buffer was destroyed"));
    }
    view.refuse_broken("dispatch")?;
    let config = &local.config;
    let refused = options.refuse.clone().map_or_else(|| check(local, &mut view, &options), Err);
    let DispatchOptions { layout, handle, alignment, .. } = if refused.is_ok() {
        options
    } else {
        DispatchOptions { layout: config.layouts[0], ..DispatchOptions::default() }
    };
    let cached = handle.map(|handle| handle.0);
    let routed = refused.and_then(|()| match &cached {
        Some(routes) if input.x.len() != routes.sent.tokens * local.own.areas.wide => {
            let text = format!("x has {} bytes where the handle is of {} tokens", input.x.len(), routes.sent.tokens);
            Err(Error::new(ErrorKind::Usage, "dispatch", text))
        }
        Some(routes) => Ok(Arc::clone(&routes.sent)),
        None => {
            let active = |rank: usize| view.peers[rank].as_ref().is_some_and(|peer| !peer.masked);
            Sent::new(config, layout, &input, &active).map(Arc::new)
        }
    });
    view.operations += 1;
    view.dispatches += 1;
    let (number, epoch) = (view.operations, view.dispatches);
    let mut common = Common::new(local, &mut view, "dispatch", number, (epoch % 2) as usize);
    if let Some(routes) = &cached {
        common.missing.extend(&routes.missing);
    }
    // Even if the call is invalid the other ranks wait for this one: it takes part, without rows.
    let sent = match routed {
        Ok(sent) if common.failure.is_none() => sent,
        routed => {
            if let Err(error) = routed {
                common.fail(error);
            }
            Arc::new(Sent::nothing(config.ranks as usize))
        }
    };
    let active = view.active();
    for rank in &active {
        common.expect_number(*rank, Message::DispatchReleased, epoch.saturating_sub(2));
        common.expect(*rank, Message::Meta);
    }
    let ranks = config.ranks as usize;
    let mut dispatch = Box::new(Dispatch {
        common,
        layout,
        alignment,
        epoch,
        input,
        sent,
        cached,
        open: Vec::new(),
        grants: Grants::default(),
        metas_left: active.len(),
        laid_out: false,
        rows_expected: false,
        received: vec![Received::default(); ranks],
        rows_arrived: vec![false; ranks],
        ranges: Vec::new(),
        counts: Vec::new(),
    });
    local.poll(dispatch.as_mut(), &mut view);
    drop(view);
    Ok(Pending::new(dispatch, Arc::clone(local)))
}

/// Waits briefly until no lost rank can still write: the notice of a loss may arrive before this rank sees the lost
/// rank's connections end.
fn await_suspects(local: &LocalRank, view: &mut MutexGuard<'_, GroupView>) {
    let until = Instant::now() + ENDING_MAX.min(local.config.timeout / 2);
    while !view.closed && view.suspect(&local.own).is_some() && Instant::now() < until && !interrupt::raised() {
        MutexGuard::unlocked(view, || std::thread::sleep(LIVENESS_INTERVAL));
    }
}

fn check(local: &LocalRank, view: &mut GroupView, options: &DispatchOptions) -> Result<()> {
    let DispatchOptions { layout, alignment, ref handle, .. } = *options;
    let wrong = |text: String| Err(Error::new(ErrorKind::Usage, "dispatch", text));
    if !local.config.has(layout) {
        return wrong(format!("the buffer was not made for the {layout} layout"));
    }
    if alignment == 0 || alignment > 1 << 20 {
        return wrong(format!("expert_alignment {alignment} is not from 1 to 2^20"));
    }
    if let Some(handle) = handle {
        if handle.0.buffer != local.id {
            return wrong("the handle is another buffer's".into());
        }
        if handle.0.layout != layout {
            return wrong(format!("the handle is of the {} layout", handle.0.layout));
        }
    }
    if layout == Layout::Rank
        && let Some(rank) = view.suspect(&local.own)
    {
        let text =
            format!("rank {rank} is lost, but its process is alive and may still write to rows of the rank layout");
        return Err(Error::new(ErrorKind::PeerDead, "dispatch", text)
            .with_hint("end that process; the expert layout still works"));
    }
    Ok(())
}

impl Dispatch {
    /// Sends metadata, and in the expert layout rows, to the ranks in `open`.
    fn send(&mut self, local: &LocalRank, view: &mut GroupView) {
        let (areas, me, parity) = (&local.own.areas, local.own.me, self.common.parity);
        let ranks = std::mem::take(&mut self.open);
        let mut targets = Vec::new();
        for rank in &ranks {
            let rank = *rank;
            let Some(peer) = &mut view.peers[rank] else { continue };
            let slot = peer.slot(&local.own, parity);
            let rows = self.sent.to[rank].tokens.len();
            let mut header = self.header(rows);
            let spans = if rows == 0 { 0 } else { 1 + usize::from(areas.scale > 0) };
            header.writes = peer.announce(false, parity, spans);
            let mut meta = Vec::new();
            if self.cached.is_none() && self.common.failure.is_none() {
                self.sent.metadata(&local.config, areas, rank, &self.input, &mut meta);
            }
            // SAFETY: our slot in the peer's heap, or in staging: free, as the peer has taken the dispatch before the
            // last; the metadata of at most max_tokens rows fits.
            unsafe {
                slot.cast::<Header>().write_volatile(header);
                std::ptr::copy_nonoverlapping(meta.as_ptr(), slot.add(HEADER), meta.len());
            }
            // A failed write means a dead peer, which is detected when its answer is overdue.
            let _ = peer.publish_meta(&local.own, parity, self.common.number, HEADER + meta.len());
            match self.layout {
                _ if rows == 0 => {}
                // bf16 goes from x to the experts.
                Layout::Expert if rank == me && local.config.payload == Payload::Bf16 => {}
                Layout::Expert => targets.push(Target {
                    rank,
                    rows: slot.wrapping_add(areas.slot_rows()),
                    scales: slot.wrapping_add(areas.slot_scales()),
                }),
                Layout::Rank if rank == me => {}
                Layout::Rank => self.common.expect(rank, Message::Grant),
            }
        }
        // SAFETY: slots have room for max_tokens rows, and are ours.
        unsafe { local.write_rows(&self.input.x, &self.sent, &targets, &mut self.common.timing) };
        for target in targets.iter().filter(|target| target.rank != me) {
            let rows = self.sent.to[target.rank].tokens.len();
            let (from, to) = (staged_slot(areas, parity), areas.slot(parity, me));
            let spans = [(areas.slot_rows(), rows * areas.row), (areas.slot_scales(), rows * areas.scale)];
            let spans: Vec<Span> = spans
                .iter()
                .filter(|(_, len)| *len > 0)
                .map(|(at, len)| Span { from: from + at, to: to + at, len: *len })
                .collect();
            self.publish(local, view, target.rank, &spans);
        }
    }

    /// Publishes written rows, and counts their bytes.
    fn publish(&mut self, local: &LocalRank, view: &mut GroupView, rank: usize, spans: &[Span]) {
        let areas = &local.own.areas;
        let Some(peer) = &mut view.peers[rank] else { return };
        let bytes = (self.sent.to[rank].tokens.len() * (areas.row + areas.scale)) as u64;
        self.common.bytes.wire += bytes;
        if peer.is_network() {
            self.common.bytes.network += bytes;
        }
        // As above.
        let _ = peer.publish_rows(&local.own, self.common.parity, self.common.number, spans);
    }

    fn header(&self, rows: usize) -> Header {
        if let Some(error) = &self.common.failure {
            return Header::failed(self.common.number, error);
        }
        let mut bits = 0;
        if self.sent.weighted {
            bits |= flags::WEIGHTS;
        }
        if self.layout == Layout::Rank {
            bits |= flags::RANK_LAYOUT;
        }
        if self.cached.is_some() {
            bits |= flags::CACHED;
        }
        Header::new(self.common.number, rows, bits)
    }

    /// Reads and checks the metadata of `source`.
    fn read_meta(&mut self, local: &LocalRank, source: usize) -> std::result::Result<Received, Error> {
        let (areas, config) = (&local.own.areas, &local.config);
        let slot = local.own.heap.at(areas.slot(self.common.parity, source));
        // SAFETY: a slot of our heap, which its writer has published and leaves alone until we have taken it; any
        // bytes are a valid Header.
        let header = unsafe { slot.cast::<Header>().read_volatile() };
        if let Some(error) = header.failure(source, "dispatch") {
            return Err(error);
        }
        let rank_layout = header.flags & flags::RANK_LAYOUT != 0;
        let cached = header.flags & flags::CACHED != 0;
        if rank_layout != (self.layout == Layout::Rank) || cached != self.cached.is_some() {
            let what = if rank_layout == (self.layout == Layout::Rank) { "a handle" } else { "the layout" };
            let text = format!("rank {source} and rank {} disagree about {what}", local.own.me);
            return Err(Error::new(ErrorKind::Mismatch, "dispatch", text));
        }
        let rows = header.rows as usize;
        let broken = |why: String| Error::new(ErrorKind::Protocol, "dispatch", format!("rank {source}: {why}"));
        if rows > config.max_tokens {
            return Err(broken(format!("{rows} rows where a rank sends at most {}", config.max_tokens)));
        }
        if let Some(routes) = &self.cached {
            let received = &routes.received[source];
            if received.tokens.len() != rows {
                return Err(broken(format!("{rows} rows where the handle has {}", received.tokens.len())));
            }
            return Ok(received.clone());
        }
        let mut meta = vec![0; rows * areas.meta_stride];
        // SAFETY: as above; max_tokens rows of metadata fit into a slot.
        unsafe { std::ptr::copy_nonoverlapping(slot.add(HEADER), meta.as_mut_ptr(), meta.len()) };
        Received::read(config, self.layout, areas, &meta, header.flags & flags::WEIGHTS != 0).map_err(broken)
    }

    /// Assigns every row its place: all metadata has arrived, or its sender is lost.
    fn lay_out(&mut self, local: &LocalRank, view: &mut GroupView) {
        self.laid_out = true;
        let first = !std::mem::replace(&mut self.rows_expected, true);
        let config = &local.config;
        let (el, ranks) = (config.local_experts(), config.ranks as usize);
        let mut next = vec![0u32; el];
        self.ranges = vec![0; el * ranks];
        for (source, received) in self.received.iter_mut().enumerate() {
            let before = next.clone();
            received.places.clear();
            let places = self.layout == Layout::Expert;
            for expert in &received.experts {
                let place =
                    next.get_mut(usize::from(*expert)).map_or(u32::MAX, |next| std::mem::replace(next, *next + 1));
                if places {
                    received.places.push(place);
                }
            }
            for expert in 0..el {
                let count = next[expert] - before[expert];
                self.ranges[expert * ranks + source] = i64::from(before[expert]) << 32 | i64::from(count);
            }
        }
        self.counts = next.iter().map(|count| *count as i32).collect();
        if first {
            let others =
                (0..ranks).filter(|source| *source != local.own.me && !self.received[*source].tokens.is_empty());
            for source in others.collect::<Vec<_>>() {
                self.common.expect(source, Message::Rows);
            }
        }
        match self.layout {
            Layout::Expert => {
                self.rows_arrived[local.own.me] = true;
                for source in 0..ranks {
                    if self.rows_arrived[source] {
                        self.fan_out(local, source);
                    }
                }
            }
            Layout::Rank if first => self.grants.grant(local, view, &self.common, &self.received),
            Layout::Rank => {}
        }
    }

    /// Copies the rows of `source` to each of their experts.
    fn fan_out(&mut self, local: &LocalRank, source: usize) {
        let (areas, config) = (&local.own.areas, &local.config);
        let Some(experts) = &local.experts else { return };
        let (base, topk) = (experts[self.common.parity].ptr(), config.topk);
        let most = config.ranks as usize * config.max_tokens;
        let scales_at = (config.local_experts() * most * areas.row).next_multiple_of(4096);
        let received = &self.received[source];
        let slot = local.own.heap.at(areas.slot(self.common.parity, source));
        let direct = source == local.own.me && config.payload == Payload::Bf16;
        let began = Instant::now();
        for row in 0..received.tokens.len() {
            let from = match direct {
                true => self.input.x.at(received.tokens[row] as usize * areas.wide, areas.wide),
                false => slot.wrapping_add(areas.slot_rows() + row * areas.row).cast_const(),
            };
            let from_scale = slot.wrapping_add(areas.slot_scales() + row * areas.scale).cast_const();
            for (_, expert, place) in received.selections(row, topk) {
                let at = expert * most + place;
                // SAFETY: experts and rows were checked, and an expert has at most `most` rows (Room), so both places are
                // inside the area of this parity, which results of the dispatch before the last may still show but
                // nobody else writes.
                unsafe {
                    local.kernels.copy_row(base.add(at * areas.row), from, areas.row);
                    if areas.scale > 0 {
                        std::ptr::copy_nonoverlapping(from_scale, base.add(scales_at + at * areas.scale), areas.scale);
                    }
                }
            }
        }
        self.common.timing.copy_us += micros(began);
    }

    fn output(&mut self, local: &LocalRank) -> Dispatched {
        let (areas, config, parity) = (&local.own.areas, &local.config, self.common.parity);
        let total: usize = self.received.iter().map(|received| received.tokens.len()).sum();
        let (memory, rows_at, scales_at, rows) = match &local.experts {
            Some(experts) if self.layout == Layout::Expert => {
                let rows = config.local_experts() * config.ranks as usize * config.max_tokens;
                (&experts[parity], 0, (rows * areas.row).next_multiple_of(4096), rows)
            }
            _ => (&local.memory, areas.rank_rows(parity), areas.rank_scales(parity), total),
        };
        let placed = |offset, len| Placed { memory: memory.clone(), offset, len };
        let mut offsets = vec![0u32];
        for received in &self.received {
            offsets.push(offsets.last().copied().unwrap_or(0) + received.tokens.len() as u32);
        }
        let unit = self.alignment as i32;
        let aligned = |count: &i32| (count + unit - 1) / unit * unit;
        let routes = Routes {
            buffer: local.id,
            layout: self.layout,
            sent: Arc::clone(&self.sent),
            received: std::mem::take(&mut self.received),
            offsets,
            ranges: std::mem::take(&mut self.ranges),
            missing: self.common.missing(),
        };
        self.common.bytes.logical = self.sent.selections * (areas.row + areas.scale) as u64;
        self.common.timing.total_us = micros(self.common.began);
        Dispatched {
            missing: routes.missing.clone(),
            handle: Handle(Arc::new(routes)),
            rows: placed(rows_at, rows * areas.row),
            scales: (areas.scale > 0).then(|| placed(scales_at, rows * areas.scale)),
            counts: match self.layout {
                Layout::Expert => std::mem::take(&mut self.counts),
                Layout::Rank => self.counts.iter().map(aligned).collect(),
            },
            timing: self.common.timing,
            bytes: self.common.bytes,
        }
    }
}

impl Operation for Dispatch {
    type Output = Dispatched;

    fn common(&mut self) -> &mut Common {
        &mut self.common
    }

    fn arrived(&mut self, local: &LocalRank, view: &mut GroupView, expected: Expected) {
        match expected.message {
            Message::DispatchReleased => self.open.push(expected.rank),
            Message::Grant => self.grants.received(expected.rank),
            Message::Meta => {
                self.metas_left -= 1;
                match self.read_meta(local, expected.rank) {
                    Ok(received) => self.received[expected.rank] = received,
                    Err(error) => {
                        self.common.fail(error);
                        // The sender may still wait for a grant.
                        rank_layout::grant_anything(local, view, &self.common, expected.rank);
                    }
                }
            }
            _ => {
                self.rows_arrived[expected.rank] = true;
                if self.layout == Layout::Expert {
                    self.fan_out(local, expected.rank);
                }
            }
        }
    }

    fn lost(&mut self, _: &LocalRank, view: &mut GroupView, expected: Expected) {
        match expected.message {
            Message::Meta => self.metas_left -= 1,
            Message::Rows => {
                // Rows after its places move up.
                self.received[expected.rank] = Received::default();
                self.laid_out = false;
                if self.layout == Layout::Rank
                    && let Some(end) = view.peers[expected.rank].as_ref().and_then(|peer| peer.endpoint().cloned())
                {
                    let Expected { rank, parity, number, .. } = expected;
                    view.suspects.push(Suspect { rank, endpoint: end, number, parity });
                }
            }
            _ => {}
        }
    }

    fn settle(&mut self, local: &LocalRank, view: &mut GroupView) {
        if !self.open.is_empty() {
            self.send(local, view);
        }
        if self.metas_left == 0 && !self.laid_out {
            self.lay_out(local, view);
        }
        let batch = self.grants.take_batch(local, view, &mut self.common, &self.sent);
        if !batch.targets.is_empty() {
            // SAFETY: see `Batch`.
            unsafe { local.write_rows(&self.input.x, &self.sent, &batch.targets, &mut self.common.timing) };
            for (rank, spans) in &batch.spans {
                self.publish(local, view, *rank, spans);
            }
        }
    }

    fn finish(&mut self, local: &LocalRank, view: &mut GroupView) -> Dispatched {
        if self.layout == Layout::Rank {
            self.grants.close_gaps(local, &self.common, &self.received);
        }
        for rank in view.active() {
            if let Some(peer) = &mut view.peers[rank] {
                peer.release_dispatch(&local.own, self.common.parity, self.epoch);
            }
        }
        self.output(local)
    }
}
