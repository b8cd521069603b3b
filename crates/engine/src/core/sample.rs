//! Samples of a worker's state for the process's page: taken under the lock, in small pieces that block nobody for
//! long.

use std::collections::HashMap;
use std::sync::Arc;

use crossrail_proto as proto;
use crossrail_sight::{Wait, now_ns};
use crossrail_transport::LaneStats;
use crossrail_types::{EndpointId, LaneId, OpId};

use super::Core;
use super::bulk_lane::{BulkLane, LaneEnd};
use super::operations::Op;
use super::outcome::OpKind;
use super::totals::{Copied, Totals};

/// Most peers of one sample: asking a socket for its statistics takes system calls, under the lock.
const PEERS_MAX: usize = 16;
/// Most entries of the table of operations that a sample goes through.
const OPERATIONS_MAX: usize = 16 << 10;

/// Start times of operations in flight, tracked from one sample to the next: recording each start would cost every
/// message something.
#[derive(Default)]
pub(crate) struct Since(HashMap<OpId, u64>);

/// A worker at one moment.
pub(crate) struct Sample {
    pub(crate) operations: u64,
    pub(crate) in_flight: u64,
    pub(crate) alive: u64,
    pub(crate) totals: Totals,
    pub(crate) wait: Option<Wait>,
    /// Some of the peers.
    pub(crate) peers: Vec<PeerSample>,
    /// The peer that the next sample begins with.
    pub(crate) next: u32,
    /// The lanes that were dropped since the last sample, whether or not one had shown them.
    pub(crate) ends: Vec<LaneEnd>,
}

/// One peer.
pub(crate) struct PeerSample {
    pub(crate) id: EndpointId,
    pub(crate) name: String,
    pub(crate) alive: bool,
    pub(crate) frames: (u32, u32),
    pub(crate) in_flight: u64,
    pub(crate) wait: Option<Wait>,
    pub(crate) copied: Vec<(Option<u32>, Copied)>,
    pub(crate) lanes: Vec<LaneSample>,
}

/// One lane.
pub(crate) struct LaneSample {
    pub(crate) id: LaneId,
    pub(crate) name: Arc<str>,
    /// `None`: ask the lane, without the worker's lock.
    pub(crate) stats: Option<LaneStats>,
    pub(crate) bulk: Option<Arc<BulkLane>>,
    pub(crate) load: proto::LaneLoad,
    pub(crate) stalls: u64,
    pub(crate) held_up: bool,
}

/// A lane that has ended.
#[derive(Clone, Copy, Default)]
pub(crate) struct EndedLane {
    /// Chunks that went over other lanes when it was lost.
    pub(crate) resent_chunks: u64,
    /// It ended because a checksum differed.
    pub(crate) is_corrupt: bool,
}

/// The operations with one peer.
#[derive(Default)]
struct InFlight {
    count: u64,
    wait: Option<Wait>,
}

impl Core {
    /// A sample that begins with the peer `from`, or with the first.
    pub(crate) fn sample(&mut self, from: u32, since: &mut Since) -> Sample {
        let count = self.peers().ids().count() as u32;
        let from = if from < count { from } else { 0 };
        let chosen: Vec<EndpointId> = self.peers().ids().skip(from as usize).take(PEERS_MAX).collect();
        let (mut by_peer, wait, in_flight) = self.waits(since, &chosen);
        let peers = chosen.iter().filter_map(|id| self.peer_sample(*id, by_peer.remove(id).unwrap_or_default()));
        let peers = peers.collect();
        let ends = self.transfers.polled.take_ends();
        let tables = &self.transfers.tables;
        Sample {
            operations: tables.operations.begun(),
            in_flight,
            alive: tables.peers.alive().count() as u64,
            totals: tables.totals.clone(),
            wait,
            peers,
            next: from + chosen.len() as u32,
            ends,
        }
    }

    /// What is known of a lane that has ended.
    pub(crate) fn ended_lane(&self, lane: LaneId) -> EndedLane {
        let record = self.transfers.tables.lanes.get(lane);
        record.map_or(EndedLane::default(), |lane| EndedLane {
            resent_chunks: lane.resent_chunks,
            is_corrupt: lane.is_corrupt,
        })
    }

    /// The operations in flight with each of the `chosen` peers, the oldest of all that waits for a peer, and their number.
    fn waits(
        &mut self,
        since: &mut Since,
        chosen: &[EndpointId],
    ) -> (HashMap<EndpointId, InFlight>, Option<Wait>, u64) {
        let (now, tables) = (now_ns(), &self.transfers.tables);
        let mut seen = HashMap::with_capacity(since.0.len());
        let mut by_peer: HashMap<EndpointId, InFlight> = HashMap::new();
        let (mut oldest, mut unmatched, mut count) = (None, None, 0);
        for (id, op) in tables.operations.in_flight(OPERATIONS_MAX).filter(|(_, op)| op.kind() != OpKind::Batch) {
            count += 1;
            let at = since.0.get(&id).copied().unwrap_or(now);
            seen.insert(id, at);
            let Some(endpoint) = op.endpoint() else {
                keep(&mut unmatched, op, at, || "any peer".to_owned());
                continue;
            };
            if chosen.contains(&endpoint) {
                let of = by_peer.entry(endpoint).or_default();
                of.count += 1;
                keep(&mut of.wait, op, at, || tables.peers.name(endpoint));
            }
            keep(&mut oldest, op, at, || tables.peers.name(endpoint));
        }
        since.0 = seen;
        // A receive from anybody may be meant to wait for ever.
        (by_peer, oldest.or(unmatched), count)
    }

    fn peer_sample(&mut self, id: EndpointId, of: InFlight) -> Option<PeerSample> {
        let super::Transfers { tables, polled, .. } = &mut self.transfers;
        let peer = tables.peers.get(id)?;
        let lanes = peer.lanes().iter().filter_map(|lane| {
            let record = tables.lanes.get(*lane)?;
            let load = peer.protocol.load(*lane).unwrap_or_default();
            Some(LaneSample {
                id: *lane,
                name: record.name().clone(),
                stats: polled.stats(*lane),
                bulk: peer.bulk_lane(*lane).cloned(),
                load,
                stalls: record.stalls,
                held_up: load.waits || record.is_held_up(),
            })
        });
        Some(PeerSample {
            id,
            name: peer.name().to_owned(),
            alive: peer.is_alive(),
            frames: peer.protocol.frames(),
            in_flight: of.count,
            wait: of.wait,
            copied: peer.copied.iter().map(|(gpu, copied)| (*gpu, *copied)).collect(),
            lanes: lanes.collect(),
        })
    }
}

/// Makes `op` the wait if it is older than what is there.
fn keep(wait: &mut Option<Wait>, op: &Op, since_ns: u64, whom: impl FnOnce() -> String) {
    if wait.as_ref().is_none_or(|known| since_ns < known.since_ns) {
        let operation = op.kind().name().to_owned();
        *wait = Some(Wait { operation, since_ns, number: op.tag(), whom: whom(), ranks: Vec::new() });
    }
}
