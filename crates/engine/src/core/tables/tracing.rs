//! The optional trace of a worker: chunks, operations and copies as they happen. When off, each call costs one check of
//! an `Option`.

use std::time::Instant;

use crossrail_gpu::Span;
use crossrail_proto as proto;
use crossrail_sight::now_ns;
use crossrail_sight::trace::{Event, EventKind, Trace, flow};
use crossrail_types::{EndpointId, Head, LaneId};

use super::Tables;
use crate::core::Core;

/// Tracks of what belongs to an endpoint and to no lane are numbered from here.
const ENDPOINTS: u64 = 1 << 32;
/// Tracks of what a stager did are numbered from here, in the order in which they are first named.
const STAGERS: u64 = 2 << 32;

/// What a stager has a track for, on each GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::core) enum Staged {
    /// Copies into bounce slots.
    Packs,
    /// Copies out of bounce slots.
    Unpacks,
    /// Waits for a caller's stream, by its handle.
    Stream(u64),
}

/// See the module.
pub(super) struct Tracing {
    trace: Box<Trace>,
    /// This worker, as its peers name it.
    own: String,
    /// The machine's clock when the core's clock was 0.
    epoch_ns: u64,
    /// Kinds of work of the stagers, in the order of its tracks.
    staged: Vec<(u32, Staged)>,
}

impl Core {
    /// Records from now on. `own`: this worker's name.
    pub(crate) fn start_trace(&mut self, own: &str) {
        let epoch_ns = now_ns().saturating_sub(self.read_clock().0);
        let trace = Box::default();
        self.transfers.tables.tracing = Some(Tracing { trace, own: own.to_owned(), epoch_ns, staged: Vec::new() });
    }

    /// Ends the recording; the trace, and the name of this worker.
    pub(crate) fn take_trace(&mut self) -> Option<(Box<Trace>, String)> {
        let now = self.read_clock().0;
        self.transfers.tables.tracing.take().map(|mut tracing| {
            tracing.trace.finish(tracing.epoch_ns + now);
            (tracing.trace, tracing.own)
        })
    }
}

impl Tables {
    /// A lane gets that chunk to send.
    #[inline]
    pub(in crate::core) fn trace_sent(&mut self, endpoint: EndpointId, lane: LaneId, out: &proto::Out) {
        if self.tracing.is_some() {
            self.trace_chunk(endpoint, lane, &out.head, true);
        }
    }

    /// The head of a chunk has come in.
    #[inline]
    pub(in crate::core) fn trace_arriving(&mut self, endpoint: EndpointId, lane: LaneId, head: &Head) {
        if self.tracing.is_some() {
            self.trace_chunk(endpoint, lane, head, false);
        }
    }

    /// A payload has come in whole.
    #[inline]
    pub(in crate::core) fn trace_arrived(&mut self, lane: LaneId) {
        if let Some(tracing) = &mut self.tracing {
            tracing.trace.arrived(lane.0.into(), tracing.epoch_ns + self.clock.read().0);
        }
    }

    /// The peer has acknowledged so many chunks; the lane is lost: all of them.
    pub(in crate::core) fn trace_acknowledged(&mut self, lane: LaneId, chunks: u32) {
        if let Some(tracing) = &mut self.tracing {
            tracing.trace.acknowledged(lane.0.into(), tracing.epoch_ns + self.clock.read().0, chunks);
        }
    }

    /// Something without a lane ended just now, after `ns`.
    pub(in crate::core) fn trace_ended(&mut self, endpoint: EndpointId, kind: EventKind, ns: u64, bytes: u64) {
        let Some(tracing) = &mut self.tracing else { return };
        let track = ENDPOINTS + u64::from(endpoint.0);
        let peers = &self.peers;
        tracing.trace.name_track(track, || format!("operations with {}", peers.name(endpoint)));
        let end_ns = tracing.epoch_ns + self.clock.read().0;
        let begin_ns = end_ns.saturating_sub(ns);
        tracing.trace.add(Event { kind, track, begin_ns, end_ns, amount: bytes, flow: 0 });
    }

    /// A stager has done something on that GPU.
    #[cold]
    pub(in crate::core) fn trace_staged(&mut self, gpu: u32, kind: Staged, span: Span) {
        let Some(tracing) = &mut self.tracing else { return };
        let known = tracing.staged.iter().position(|known| *known == (gpu, kind));
        let at = known.unwrap_or_else(|| {
            tracing.staged.push((gpu, kind));
            tracing.staged.len() - 1
        });
        let track = STAGERS + at as u64;
        tracing.trace.name_track(track, || match kind {
            Staged::Packs => format!("stager of cuda:{gpu}, packs"),
            Staged::Unpacks => format!("stager of cuda:{gpu}, unpacks"),
            Staged::Stream(0) => format!("default stream of cuda:{gpu}"),
            Staged::Stream(handle) => format!("stream {handle:#x} of cuda:{gpu}"),
        });
        let kind = match kind {
            Staged::Packs => EventKind::Packed,
            Staged::Unpacks => EventKind::Unpacked,
            Staged::Stream(_) => EventKind::Gated,
        };
        let clock = &self.clock;
        let ns = |at: Instant| tracing.epoch_ns + clock.time(at).0;
        let (begin_ns, end_ns) = (ns(span.began), ns(span.ended));
        tracing.trace.staged(Event { kind, track, begin_ns, end_ns, amount: span.bytes, flow: 0 });
    }

    #[cold]
    fn trace_chunk(&mut self, endpoint: EndpointId, lane: LaneId, head: &Head, out: bool) {
        let Some(tracing) = &mut self.tracing else { return };
        let (track, now, bytes) = (lane.0.into(), tracing.epoch_ns + self.clock.read().0, head.payload_len() as u64);
        let peer = self.peers.get(endpoint).map_or("?", |peer| peer.name());
        let lanes = &self.lanes;
        tracing.trace.name_track(track, || format!("{} with {peer}", lanes.name(lane)));
        if out {
            tracing.trace.sent(track, now, bytes, flow(&head.0, &tracing.own, peer));
        } else {
            tracing.trace.arriving(track, now, bytes, flow(&head.0, peer, &tracing.own));
        }
    }
}
