//! The rank layout: each source is granted a place among the receiver's rows and writes there.
#![allow(unsafe_code)]

use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::buffer::{Inner, State};
use crate::dispatch::Dispatch;
use crate::operation::Common;
use crate::peer::{Message, Span, staged_slot};
use crate::send::Target;
use crossrail_ep::Layout;
use crossrail_types::{Error, ErrorKind};

/// Tells every source where its rows go, and remembers it of this rank's own.
pub(crate) fn grant(dispatch: &mut Dispatch, inner: &Inner, state: &mut State) {
    let (me, parity) = (inner.here.me, dispatch.common.parity);
    let mut base = 0u32;
    dispatch.bases = Vec::with_capacity(dispatch.came.len());
    for (source, came) in dispatch.came.iter().enumerate() {
        dispatch.bases.push(base);
        let rows = came.tokens.len() as u32;
        if source != me
            && rows > 0
            && let Some(peer) = &mut state.peers[source]
        {
            peer.tell(&inner.here, parity, Message::Grant, word(&dispatch.common, base));
        }
        base += rows;
    }
    dispatch.own = Some(Instant::now());
}

/// A place for a rank whose rows will not be looked at.
pub(crate) fn grant_anything(inner: &Inner, state: &mut State, common: &Common, source: usize) {
    if inner.config.has(Layout::Rank)
        && let Some(peer) = &mut state.peers[source]
    {
        peer.tell(&inner.here, common.parity, Message::Grant, word(common, 0));
    }
}

fn word(common: &Common, base: u32) -> u64 {
    common.number << 32 | u64::from(base)
}

/// This rank's own place, if its rows are to be written now: together with those for ranks that have granted a place, so
/// that each token is read and cast once; alone if no such rank comes for a while, or there is none.
pub(crate) fn own_place(dispatch: &mut Dispatch, inner: &Inner, state: &State) -> Option<Target> {
    let since = dispatch.own?;
    let expected = dispatch.common.waits.iter().any(|wait| wait.message == Message::Grant);
    if expected && dispatch.granted.is_empty() && since.elapsed() < state.spin / 10 {
        return None;
    }
    dispatch.own = None;
    let (areas, me, parity) = (&inner.here.areas, inner.here.me, dispatch.common.parity);
    let base = dispatch.bases[me] as usize;
    Some(Target {
        rank: me,
        rows: inner.here.heap.at(areas.rank_rows(parity) + base * areas.row),
        scales: inner.here.heap.at(areas.rank_scales(parity) + base * areas.scale),
    })
}

/// Writes the rows for ranks that have granted a place, and this rank's own.
pub(crate) fn send(dispatch: &mut Dispatch, inner: &Inner, state: &mut State, own: Option<Target>) {
    let (areas, parity) = (&inner.here.areas, dispatch.common.parity);
    let most = inner.config.ranks as usize * inner.config.max_tokens;
    let granted = std::mem::take(&mut dispatch.granted);
    let mut targets = Vec::with_capacity(granted.len() + 1);
    let mut spans: Vec<Vec<Span>> = Vec::with_capacity(granted.len());
    for rank in &granted {
        let Some(peer) = &state.peers[*rank] else { continue };
        let words = inner.here.heap.words(areas, *rank);
        let base = Message::Grant.word(words, parity).load(Ordering::Acquire) as u32 as usize;
        let rows = dispatch.sent.to[*rank].tokens.len();
        if base + rows > most {
            let text = format!("rank {rank} granted row {base} of {most} for {rows} rows");
            dispatch.common.fail(Error::new(ErrorKind::Protocol, "dispatch", text));
            continue;
        }
        let rows_at = areas.rank_rows(parity) + base * areas.row;
        let scales_at = areas.rank_scales(parity) + base * areas.scale;
        match peer.heap(&inner.here) {
            Some(heap) => {
                targets.push(Target { rank: *rank, rows: heap.at(rows_at), scales: heap.at(scales_at) });
                spans.push(Vec::new());
            }
            None => {
                let slot = peer.slot(&inner.here, parity);
                let from = staged_slot(areas, parity);
                let rows_span = Span { from: from + areas.slot_rows(), to: rows_at, len: rows * areas.row };
                let scales_span = Span { from: from + areas.slot_scales(), to: scales_at, len: rows * areas.scale };
                targets.push(Target {
                    rank: *rank,
                    rows: slot.wrapping_add(areas.slot_rows()),
                    scales: slot.wrapping_add(areas.slot_scales()),
                });
                spans.push([rows_span, scales_span].into_iter().filter(|span| span.len > 0).collect());
            }
        }
    }
    targets.extend(own);
    // SAFETY: the places that were granted, inside the peers' heaps by the check above; or staging, which has room
    // for max_tokens rows; or our own place: all sources together have at most ranks * max_tokens rows.
    unsafe { inner.write_rows(&dispatch.input.x, &dispatch.sent, &targets, &mut dispatch.common.timing) };
    for (target, spans) in targets.iter().zip(&spans) {
        dispatch.publish(inner, state, target.rank, spans);
    }
}

/// Moves rows up over places that were granted to ranks that were lost.
pub(crate) fn close_gaps(dispatch: &Dispatch, inner: &Inner) {
    let (areas, parity) = (&inner.here.areas, dispatch.common.parity);
    let (rows, scales) = (inner.here.heap.at(areas.rank_rows(parity)), inner.here.heap.at(areas.rank_scales(parity)));
    let mut to = 0usize;
    for (came, base) in dispatch.came.iter().zip(&dispatch.bases) {
        let (count, from) = (came.tokens.len(), *base as usize);
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
