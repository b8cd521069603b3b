//! Dispatch: metadata first, so that every receiver knows where rows belong; rows once per rank; fan-out on arrival.
//!
//! Expert layout: rows go into the sender's slot of the receiver's heap, and from there to each expert; this rank's
//! own rows go straight to the experts. Rank layout: the receiver grants each source a place, and rows are written
//! there.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Instant;

use crossrail::Memory;
use crossrail_ep::{Bytes, Layout, Payload};
use crossrail_types::{Error, ErrorKind, Result};

use crate::buffer::{Inner, State};
use crate::heap::{HEADER, Header, flags};
use crate::operation::{Common, Machine, Pending, Timing, Wait};
use crate::peer::{Message, Span, staged_slot};
use crate::rank_layout;
use crate::routes::{Came, Handle, Routes, Sent};
use crate::send::{Target, micros};
use crate::tensor::Input;

/// How to dispatch.
#[derive(Clone, Debug)]
pub struct DispatchOptions {
    /// What is delivered.
    pub layout: Layout,
    /// Repeats the routing of an earlier dispatch, on every rank: `topk_idx` and `topk_weights` are not looked at,
    /// and no metadata is exchanged.
    pub handle: Option<Handle>,
    /// Rank layout: counts per expert are rounded up to a multiple of this.
    pub alignment: usize,
    /// The caller found something wrong: this rank takes part without rows, and the operation fails with this here and, with
    /// this rank named, on the others. Nothing else is looked at.
    pub refuse: Option<Error>,
}

impl Default for DispatchOptions {
    fn default() -> DispatchOptions {
        DispatchOptions { layout: Layout::Expert, handle: None, alignment: 1, refuse: None }
    }
}

/// A part of the buffer's memory. It is overwritten by the second dispatch after the one that gave it.
#[derive(Clone, Debug)]
pub struct Placed {
    /// The memory.
    pub memory: Memory,
    /// First byte.
    pub offset: usize,
    /// Bytes.
    pub len: usize,
}

/// What came.
#[derive(Clone, Debug)]
pub struct Dispatched {
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

pub(crate) struct Dispatch {
    pub(crate) common: Common,
    pub(crate) layout: Layout,
    alignment: usize,
    /// The how-manieth dispatch this is.
    epoch: u64,
    pub(crate) input: Input,
    pub(crate) sent: Arc<Sent>,
    cached: Option<Arc<Routes>>,
    /// Ranks whose slots are free and whose metadata was not sent yet.
    open: Vec<usize>,
    /// Ranks that have granted a place for our rows.
    pub(crate) granted: Vec<usize>,
    /// Rank layout: this rank's own rows are not in their place yet, which is known since then.
    pub(crate) own: Option<Instant>,
    metas_left: usize,
    /// Rows have places; not any more when a source of some was lost.
    laid_out: bool,
    /// Rows are waited for, and in the rank layout places were granted: once, whoever is lost later.
    rows_expected: bool,
    pub(crate) came: Vec<Came>,
    /// Sources whose rows are all here.
    pub(crate) here: Vec<bool>,
    /// Expert layout: rows per expert and source.
    ranges: Vec<i64>,
    counts: Vec<i32>,
    /// Rank layout: the place granted to each source.
    pub(crate) bases: Vec<u32>,
}

pub(crate) fn begin(inner: &Arc<Inner>, input: Input, options: DispatchOptions) -> Result<Pending<Dispatched>> {
    let mut state = inner.state.lock();
    if state.closed {
        return Err(Error::new(ErrorKind::Closed, "dispatch", "the buffer was destroyed"));
    }
    let config = &inner.config;
    let refused = options.refuse.clone().map_or_else(|| check(inner, &state, &options), Err);
    let DispatchOptions { layout, handle, alignment, .. } = if refused.is_ok() {
        options
    } else {
        DispatchOptions { layout: config.layouts[0], ..DispatchOptions::default() }
    };
    let cached = handle.map(|handle| handle.0);
    let routed = refused.and_then(|()| match &cached {
        Some(routes) if input.x.len() != routes.sent.tokens * inner.here.areas.wide => {
            let text = format!("x has {} bytes where the handle is of {} tokens", input.x.len(), routes.sent.tokens);
            Err(Error::new(ErrorKind::Usage, "dispatch", text))
        }
        Some(routes) => Ok(Arc::clone(&routes.sent)),
        None => {
            let active = |rank: usize| state.peers[rank].as_ref().is_some_and(|peer| !peer.masked);
            Sent::new(config, &input, &active).map(Arc::new)
        }
    });
    state.operations += 1;
    state.dispatches += 1;
    let epoch = state.dispatches;
    let mut common = Common::new("dispatch", state.operations, (epoch % 2) as usize, config.timeout);
    // Whatever is wrong with the call, the others are waiting for this rank: it takes part, without rows.
    let sent = routed.unwrap_or_else(|error| {
        common.fail(error);
        Arc::new(Sent::nothing(config.ranks as usize))
    });
    let active = state.active();
    for rank in &active {
        common.expect_number(*rank, Message::DispatchTaken, epoch.saturating_sub(2));
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
        granted: Vec::new(),
        own: None,
        metas_left: active.len(),
        laid_out: false,
        rows_expected: false,
        came: vec![Came::default(); ranks],
        here: vec![false; ranks],
        ranges: Vec::new(),
        counts: Vec::new(),
        bases: Vec::new(),
    });
    inner.look(dispatch.as_mut(), &mut state);
    drop(state);
    Ok(Pending::new(dispatch, Arc::clone(inner)))
}

fn check(inner: &Inner, state: &State, options: &DispatchOptions) -> Result<()> {
    let DispatchOptions { layout, alignment, ref handle, .. } = *options;
    let wrong = |text: String| Err(Error::new(ErrorKind::Usage, "dispatch", text));
    if !inner.config.has(layout) {
        return wrong(format!("the buffer was not made for the {layout} layout"));
    }
    if alignment == 0 || alignment > 1 << 20 {
        return wrong(format!("expert_alignment {alignment} is not from 1 to 2^20"));
    }
    if let Some(handle) = handle {
        if handle.0.buffer != inner.id {
            return wrong("the handle is another buffer's".into());
        }
        if handle.0.layout != layout {
            return wrong(format!("the handle is of the {} layout", handle.0.layout));
        }
    }
    if layout == Layout::Rank
        && let Some(rank) = state.suspects.iter().find(|(_, end)| end.is_alive()).map(|(rank, _)| rank)
    {
        let text = format!(
            "rank {rank} was masked but its process lives, and may still write where rows of the rank layout go"
        );
        return Err(Error::new(ErrorKind::PeerDead, "dispatch", text)
            .with_hint("end that process; the expert layout goes on working"));
    }
    Ok(())
}

impl Dispatch {
    /// Sends metadata, and in the expert layout rows, to the ranks that are open.
    fn send(&mut self, inner: &Inner, state: &mut State) {
        let (areas, me, parity) = (&inner.here.areas, inner.here.me, self.common.parity);
        let ranks = std::mem::take(&mut self.open);
        let mut targets = Vec::new();
        for rank in &ranks {
            let rank = *rank;
            let Some(peer) = &mut state.peers[rank] else { continue };
            peer.reclaim(false, parity, self.common.deadline);
            let slot = peer.slot(&inner.here, parity);
            let rows = self.sent.to[rank].tokens.len();
            let mut header = self.header(rows);
            let spans = if rows == 0 { 0 } else { 1 + usize::from(areas.scale > 0) };
            header.writes = peer.announce(false, parity, spans);
            let mut meta = Vec::new();
            if self.cached.is_none() && self.common.failure.is_none() {
                self.sent.metadata(&inner.config, areas, rank, &self.input, &mut meta);
            }
            // SAFETY: our slot in the peer's heap, or in staging: free, as the peer has taken the dispatch before the
            // last; the metadata of at most max_tokens rows fits.
            unsafe {
                slot.cast::<Header>().write_volatile(header);
                std::ptr::copy_nonoverlapping(meta.as_ptr(), slot.add(HEADER), meta.len());
            }
            // A peer that cannot be written to is dead, which is noticed where its answer is missed.
            let _ = peer.publish_meta(&inner.here, parity, self.common.number, HEADER + meta.len());
            match self.layout {
                _ if rows == 0 => {}
                // bf16 goes from x to the experts.
                Layout::Expert if rank == me && inner.config.payload == Payload::Bf16 => {}
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
        unsafe { inner.write_rows(&self.input.x, &self.sent, &targets, &mut self.common.timing) };
        for target in targets.iter().filter(|target| target.rank != me) {
            let rows = self.sent.to[target.rank].tokens.len();
            let (from, to) = (staged_slot(areas, parity), areas.slot(parity, me));
            let spans = [(areas.slot_rows(), rows * areas.row), (areas.slot_scales(), rows * areas.scale)];
            let spans: Vec<Span> = spans
                .iter()
                .filter(|(_, len)| *len > 0)
                .map(|(at, len)| Span { from: from + at, to: to + at, len: *len })
                .collect();
            self.publish(inner, state, target.rank, &spans);
        }
    }

    /// Publishes rows that were written, and accounts for them.
    pub(crate) fn publish(&mut self, inner: &Inner, state: &mut State, rank: usize, spans: &[Span]) {
        let areas = &inner.here.areas;
        let Some(peer) = &mut state.peers[rank] else { return };
        let bytes = (self.sent.to[rank].tokens.len() * (areas.row + areas.scale)) as u64;
        self.common.bytes.wire += bytes;
        if peer.is_network() {
            self.common.bytes.network += bytes;
        }
        // As above.
        let _ = peer.publish_rows(&inner.here, self.common.parity, self.common.number, spans);
    }

    fn header(&self, rows: usize) -> Header {
        if let Some(error) = &self.common.failure {
            return Header::failed(self.common.number, &error.detail);
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

    /// Reads the metadata of `source`; what it says is checked, not believed.
    fn read_meta(&mut self, inner: &Inner, source: usize) -> std::result::Result<Came, Error> {
        let (areas, config) = (&inner.here.areas, &inner.config);
        let slot = inner.here.heap.at(areas.slot(self.common.parity, source));
        // SAFETY: a slot of our heap, which its writer has published and leaves alone until we have taken it; any
        // bytes are a valid Header.
        let header = unsafe { slot.cast::<Header>().read_volatile() };
        if let Some(why) = header.failure() {
            let text = format!("the call of rank {source} failed: {why}");
            return Err(Error::new(ErrorKind::Usage, "dispatch", text)
                .with_hint("nothing was delivered; the next operation works"));
        }
        let rank_layout = header.flags & flags::RANK_LAYOUT != 0;
        let cached = header.flags & flags::CACHED != 0;
        if rank_layout != (self.layout == Layout::Rank) || cached != self.cached.is_some() {
            let what = if rank_layout == (self.layout == Layout::Rank) { "a handle" } else { "the layout" };
            let text = format!("rank {source} and rank {} disagree about {what}", inner.here.me);
            return Err(Error::new(ErrorKind::Mismatch, "dispatch", text));
        }
        let rows = header.rows as usize;
        let broken = |why: String| Error::new(ErrorKind::Protocol, "dispatch", format!("rank {source}: {why}"));
        if rows > config.max_tokens {
            return Err(broken(format!("{rows} rows where a rank sends at most {}", config.max_tokens)));
        }
        if let Some(routes) = &self.cached {
            let came = &routes.came[source];
            if came.tokens.len() != rows {
                return Err(broken(format!("{rows} rows where the handle has {}", came.tokens.len())));
            }
            return Ok(came.clone());
        }
        let mut meta = vec![0; rows * areas.meta_stride];
        // SAFETY: as above; max_tokens rows of metadata fit into a slot.
        unsafe { std::ptr::copy_nonoverlapping(slot.add(HEADER), meta.as_mut_ptr(), meta.len()) };
        Came::read(config, areas, &meta, header.flags & flags::WEIGHTS != 0).map_err(broken)
    }

    /// All metadata is here (or will not come): everything gets its place.
    fn lay_out(&mut self, inner: &Inner, state: &mut State) {
        self.laid_out = true;
        let first = !std::mem::replace(&mut self.rows_expected, true);
        let config = &inner.config;
        let (el, ranks) = (config.local_experts(), config.ranks as usize);
        let mut next = vec![0u32; el];
        self.ranges = vec![0; el * ranks];
        for (source, came) in self.came.iter_mut().enumerate() {
            let before = next.clone();
            came.places.clear();
            let places = self.layout == Layout::Expert;
            for expert in &came.experts {
                let place =
                    next.get_mut(usize::from(*expert)).map_or(u32::MAX, |next| std::mem::replace(next, *next + 1));
                if places {
                    came.places.push(place);
                }
            }
            for expert in 0..el {
                let count = next[expert] - before[expert];
                self.ranges[expert * ranks + source] = i64::from(before[expert]) << 32 | i64::from(count);
            }
        }
        self.counts = next.iter().map(|count| *count as i32).collect();
        if first {
            let others = (0..ranks).filter(|source| *source != inner.here.me && !self.came[*source].tokens.is_empty());
            for source in others.collect::<Vec<_>>() {
                self.common.expect(source, Message::Rows);
            }
        }
        match self.layout {
            Layout::Expert => {
                self.here[inner.here.me] = true;
                for source in 0..ranks {
                    if self.here[source] {
                        self.fan_out(inner, source);
                    }
                }
            }
            Layout::Rank if first => rank_layout::grant(self, inner, state),
            Layout::Rank => {}
        }
    }

    /// Copies the rows of `source` to each of their experts.
    fn fan_out(&mut self, inner: &Inner, source: usize) {
        let (areas, config) = (&inner.here.areas, &inner.config);
        let Some(experts) = &inner.experts else { return };
        let (base, topk) = (experts[self.common.parity].ptr(), config.topk);
        let most = config.ranks as usize * config.max_tokens;
        let scales_at = (config.local_experts() * most * areas.row).next_multiple_of(4096);
        let came = &self.came[source];
        let slot = inner.here.heap.at(areas.slot(self.common.parity, source));
        let direct = source == inner.here.me && config.payload == Payload::Bf16;
        let began = Instant::now();
        for row in 0..came.tokens.len() {
            let from = match direct {
                true => self.input.x.at(came.tokens[row] as usize * areas.wide, areas.wide),
                false => slot.wrapping_add(areas.slot_rows() + row * areas.row).cast_const(),
            };
            let from_scale = slot.wrapping_add(areas.slot_scales() + row * areas.scale).cast_const();
            for (_, expert, place) in came.selections(row, topk) {
                let at = expert * most + place;
                // SAFETY: experts and rows were checked, and an expert has at most `most` rows, so both places are
                // inside the area of this parity, which results of the dispatch before the last may still show but
                // nobody else writes.
                unsafe {
                    inner.rows.copy_row(base.add(at * areas.row), from, areas.row);
                    if areas.scale > 0 {
                        std::ptr::copy_nonoverlapping(from_scale, base.add(scales_at + at * areas.scale), areas.scale);
                    }
                }
            }
        }
        self.common.timing.copy_us += micros(began);
    }

    fn output(&mut self, inner: &Inner) -> Dispatched {
        let (areas, config, parity) = (&inner.here.areas, &inner.config, self.common.parity);
        let total: usize = self.came.iter().map(|came| came.tokens.len()).sum();
        let (memory, rows_at, scales_at, rows) = match &inner.experts {
            Some(experts) if self.layout == Layout::Expert => {
                let rows = config.local_experts() * config.ranks as usize * config.max_tokens;
                (&experts[parity], 0, (rows * areas.row).next_multiple_of(4096), rows)
            }
            _ => (&inner.memory, areas.rank_rows(parity), areas.rank_scales(parity), total),
        };
        let placed = |offset, len| Placed { memory: memory.clone(), offset, len };
        let mut offsets = vec![0u32];
        for came in &self.came {
            offsets.push(offsets.last().copied().unwrap_or(0) + came.tokens.len() as u32);
        }
        let unit = self.alignment as i32;
        let aligned = |count: &i32| (count + unit - 1) / unit * unit;
        let routes = Routes {
            buffer: inner.id,
            layout: self.layout,
            sent: Arc::clone(&self.sent),
            came: std::mem::take(&mut self.came),
            offsets,
            ranges: std::mem::take(&mut self.ranges),
        };
        self.common.bytes.logical = self.sent.selections * (areas.row + areas.scale) as u64;
        self.common.timing.total_us = micros(self.common.began);
        Dispatched {
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

impl Machine for Dispatch {
    type Output = Dispatched;

    fn common(&mut self) -> &mut Common {
        &mut self.common
    }

    fn arrived(&mut self, inner: &Inner, state: &mut State, wait: Wait) {
        match wait.message {
            Message::DispatchTaken => self.open.push(wait.rank),
            Message::Grant => self.granted.push(wait.rank),
            Message::Meta => {
                self.metas_left -= 1;
                match self.read_meta(inner, wait.rank) {
                    Ok(came) => self.came[wait.rank] = came,
                    Err(error) => {
                        self.common.fail(error);
                        // It may wait for a place, whatever it is that it sends.
                        rank_layout::grant_anything(inner, state, &self.common, wait.rank);
                    }
                }
            }
            _ => {
                self.here[wait.rank] = true;
                if self.layout == Layout::Expert {
                    self.fan_out(inner, wait.rank);
                }
            }
        }
    }

    fn lost(&mut self, _: &Inner, state: &mut State, wait: Wait) {
        match wait.message {
            Message::Meta => self.metas_left -= 1,
            Message::Rows => {
                // Its rows have places: those after them move up.
                self.came[wait.rank] = Came::default();
                self.laid_out = false;
                if self.layout == Layout::Rank
                    && let Some(end) = state.peers[wait.rank].as_ref().and_then(|peer| peer.endpoint().cloned())
                {
                    state.suspects.push((wait.rank, end));
                }
            }
            _ => {}
        }
    }

    fn settle(&mut self, inner: &Inner, state: &mut State) {
        if !self.open.is_empty() {
            self.send(inner, state);
        }
        if self.metas_left == 0 && !self.laid_out {
            self.lay_out(inner, state);
        }
        let own = rank_layout::own_place(self, inner, state);
        if own.is_some() || !self.granted.is_empty() {
            rank_layout::send(self, inner, state, own);
        }
    }

    fn finish(&mut self, inner: &Inner, state: &mut State) -> Dispatched {
        if self.layout == Layout::Rank {
            rank_layout::close_gaps(self, inner);
        }
        for rank in state.active() {
            if let Some(peer) = &mut state.peers[rank] {
                peer.take_dispatch(&inner.here, self.common.parity, self.epoch);
            }
        }
        self.output(inner)
    }
}
