//! The rank layout: the receiver grants each source a place among its rows, and the source writes there.
#![allow(unsafe_code)]

use std::time::Instant;

use crossrail_ep::Layout;
use crossrail_types::{Error, ErrorKind};

use crate::local_rank::{GroupView, LocalRank};
use crate::operation::Common;
use crate::peer::{Message, Span, staged_slot, tag};
use crate::routes::{Received, Sent};
use crate::send::Target;

/// The places of one dispatch: those that this rank grants, and those that it was granted.
#[derive(Default)]
pub(crate) struct Grants {
    /// The first row granted to each source.
    bases: Vec<u32>,
    /// Ranks whose grant has arrived and that were not sent rows yet.
    granted: Vec<usize>,
    /// This rank's own rows are still to be written; since when their place is known.
    own_since: Option<Instant>,
}

/// Rows to be written now. Each target is a place that was granted, inside the peer's heap; or staging, which has room for
/// `max_tokens` rows; or this rank's own place: all sources together have at most `ranks * max_tokens` rows.
pub(crate) struct Batch {
    pub(crate) targets: Vec<Target>,
    /// What to publish to each other rank once the rows are written.
    pub(crate) spans: Vec<(usize, Vec<Span>)>,
}

impl Grants {
    /// Grants every source a place for the rows that it announced.
    pub(crate) fn grant(&mut self, local: &LocalRank, view: &mut GroupView, common: &Common, received: &[Received]) {
        let mut base = 0u32;
        self.bases = Vec::with_capacity(received.len());
        for (source, received) in received.iter().enumerate() {
            self.bases.push(base);
            let rows = received.tokens.len() as u32;
            if source != local.own.me
                && rows > 0
                && let Some(peer) = &mut view.peers[source]
            {
                peer.set_word(&local.own, common.parity, Message::Grant, word(common, base));
            }
            base += rows;
        }
        self.own_since = Some(Instant::now());
    }

    /// The grant of `rank` has arrived.
    pub(crate) fn received(&mut self, rank: usize) {
        self.granted.push(rank);
    }

    /// The rows that can be written now: for ranks whose grant has arrived, and this rank's own.
    pub(crate) fn take_batch(
        &mut self,
        local: &LocalRank,
        view: &GroupView,
        common: &mut Common,
        sent: &Sent,
    ) -> Batch {
        let own = self.take_own_place(local, view, common);
        let mut batch = Batch { targets: Vec::new(), spans: Vec::new() };
        for rank in std::mem::take(&mut self.granted) {
            if let Err(error) = batch.add(local, view, common.parity, rank, sent) {
                common.fail(error);
            }
        }
        batch.targets.extend(own);
        batch
    }

    /// This rank's own place, if its rows are to be written now: together with those for other ranks, so that each token is
    /// read and cast once; alone if no grant arrives for a while, or none is expected.
    fn take_own_place(&mut self, local: &LocalRank, view: &GroupView, common: &Common) -> Option<Target> {
        let since = self.own_since?;
        let expected = common.expected.iter().any(|expected| expected.message == Message::Grant);
        if expected && self.granted.is_empty() && since.elapsed() < view.spin / 10 {
            return None;
        }
        self.own_since = None;
        let (areas, me) = (&local.own.areas, local.own.me);
        let base = self.bases[me] as usize;
        Some(Target {
            rank: me,
            rows: local.own.heap.at(areas.rank_rows(common.parity) + base * areas.row),
            scales: local.own.heap.at(areas.rank_scales(common.parity) + base * areas.scale),
        })
    }

    /// Moves rows up over places that were granted to ranks that were lost.
    pub(crate) fn close_gaps(&self, local: &LocalRank, common: &Common, received: &[Received]) {
        let (areas, heap) = (&local.own.areas, &local.own.heap);
        let (rows, scales) = (heap.at(areas.rank_rows(common.parity)), heap.at(areas.rank_scales(common.parity)));
        let mut to = 0usize;
        for (received, base) in received.iter().zip(&self.bases) {
            let (count, from) = (received.tokens.len(), *base as usize);
            if from != to && count > 0 {
                // SAFETY: both ranges are inside the area, as to <= from; every source that is not lost has written its
                // rows.
                unsafe {
                    std::ptr::copy(rows.add(from * areas.row), rows.add(to * areas.row), count * areas.row);
                    std::ptr::copy(scales.add(from * areas.scale), scales.add(to * areas.scale), count * areas.scale);
                }
            }
            to += count;
        }
    }
}

impl Batch {
    /// Adds the rows for a rank whose grant has arrived.
    fn add(
        &mut self,
        local: &LocalRank,
        view: &GroupView,
        parity: usize,
        rank: usize,
        sent: &Sent,
    ) -> Result<(), Error> {
        let Some(peer) = &view.peers[rank] else { return Ok(()) };
        let areas = &local.own.areas;
        let most = local.config.ranks as usize * local.config.max_tokens;
        let words = local.own.heap.words(areas, rank);
        let base = Message::Grant.word(words, parity).observe() as u32 as usize;
        let rows = sent.to[rank].tokens.len();
        if base + rows > most {
            let text = format!("rank {rank} granted row {base} of {most} for {rows} rows");
            return Err(Error::new(ErrorKind::Protocol, "dispatch", text));
        }
        let rows_at = areas.rank_rows(parity) + base * areas.row;
        let scales_at = areas.rank_scales(parity) + base * areas.scale;
        if let Some(heap) = peer.heap(&local.own) {
            self.targets.push(Target { rank, rows: heap.at(rows_at), scales: heap.at(scales_at) });
            self.spans.push((rank, Vec::new()));
            return Ok(());
        }
        let slot = peer.slot(&local.own, parity);
        let from = staged_slot(areas, parity);
        let rows_span = Span { from: from + areas.slot_rows(), to: rows_at, len: rows * areas.row };
        let scales_span = Span { from: from + areas.slot_scales(), to: scales_at, len: rows * areas.scale };
        self.targets.push(Target {
            rank,
            rows: slot.wrapping_add(areas.slot_rows()),
            scales: slot.wrapping_add(areas.slot_scales()),
        });
        self.spans.push((rank, [rows_span, scales_span].into_iter().filter(|span| span.len > 0).collect()));
        Ok(())
    }
}

/// Grants a place to a rank whose rows will not be read, so that it does not time out waiting for the grant.
pub(crate) fn grant_anything(local: &LocalRank, view: &mut GroupView, common: &Common, source: usize) {
    if local.config.has(Layout::Rank)
        && let Some(peer) = &mut view.peers[source]
    {
        peer.set_word(&local.own, common.parity, Message::Grant, word(common, 0));
    }
}

/// The control word of a grant: the tag of the operation << 32 | the first row.
fn word(common: &Common, base: u32) -> u64 {
    tag(common.number) << 32 | u64::from(base)
}
