//! The peers of one worker: the protocol's state, and what the engine keeps beside it.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use crossrail_proto as proto;
use crossrail_transport::Grant;
use crossrail_types::{EndpointId, Error, ErrorKind, LaneId, Reason};
use parking_lot::Mutex;
use proto::Time;

use super::bulk_lane::BulkLane;
use super::sample::Copied;

/// Events that receipts can report, at most.
const NOTES_MAX: usize = 64;

/// What receipts call a peer and the lane of its messages.
///
/// Receipts outlive peers and workers, and counting their references would cost every short message two atomic
/// operations. So each distinct pair is stored once per process and never freed: peers that connect again under the
/// same name add nothing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Names(&'static (String, String));

impl Names {
    fn new(peer: &str, message_lane: &str) -> Names {
        static KNOWN: Mutex<BTreeSet<&'static (String, String)>> = Mutex::new(BTreeSet::new());
        let pair = (peer.to_owned(), message_lane.to_owned());
        let mut known = KNOWN.lock();
        let stored = known.get(&pair).copied().unwrap_or_else(|| Box::leak(Box::new(pair)));
        known.insert(stored);
        Names(stored)
    }

    pub(crate) fn peer(self) -> &'static str {
        &self.0.0
    }

    pub(crate) fn message_lane(self) -> &'static str {
        &self.0.1
    }
}

/// Every peer that the worker has had, by endpoint. Entries are never removed: requests refer to them by id.
#[derive(Default)]
pub(crate) struct Peers {
    entries: Vec<Peer>,
}

impl Peers {
    /// The id of the next peer that is added.
    pub(crate) fn next_id(&self) -> EndpointId {
        EndpointId(self.entries.len() as u32)
    }

    /// Adds a peer, whose protocol state must have been created for [`Peers::next_id`].
    pub(crate) fn add(&mut self, peer: Peer) {
        self.entries.push(peer);
    }

    #[inline]
    pub(crate) fn get(&self, id: EndpointId) -> Option<&Peer> {
        self.entries.get(id.0 as usize)
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, id: EndpointId) -> Option<&mut Peer> {
        self.entries.get_mut(id.0 as usize)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Peer> {
        self.entries.iter()
    }

    /// The ids of all peers, dead ones too. Borrows nothing, so that peers may be changed meanwhile.
    pub(crate) fn ids(&self) -> impl Iterator<Item = EndpointId> + use<> {
        (0..self.entries.len() as u32).map(EndpointId)
    }

    /// The ids of all peers that are alive.
    pub(crate) fn alive(&self) -> impl Iterator<Item = EndpointId> {
        self.ids().zip(&self.entries).filter(|(_, peer)| peer.alive).map(|(id, _)| id)
    }

    /// The name of a peer, for messages.
    pub(crate) fn name(&self, id: EndpointId) -> String {
        self.get(id).map_or_else(|| "?".to_owned(), |peer| peer.name().to_owned())
    }

    /// The peer to which a lane leads.
    pub(crate) fn owner_of(&self, lane: LaneId) -> Option<EndpointId> {
        self.ids().zip(&self.entries).find(|(_, peer)| peer.lanes.contains(&lane)).map(|(id, _)| id)
    }
}

/// One peer. Protected by the worker's lock.
///
/// It is alive until [`Peer::end`]; afterwards no operation is started with it, but its entry stays, so that requests
/// can still name it.
pub(crate) struct Peer {
    /// The protocol's state. Whoever calls it must settle the endpoint afterwards
    /// ([`Transfers::settle`](super::Transfers::settle)): the protocol's decisions take effect only then.
    pub(super) protocol: proto::Peer,
    names: Names,
    alive: bool,
    why_ended: String,
    end_reason: Option<Reason>,
    /// The lane polled under the lock: shared memory, or the TCP connection for messages.
    message_lane: Option<LaneId>,
    bulk: Vec<Arc<BulkLane>>,
    lanes: Vec<LaneId>,
    /// Since when no lane is left, and how the last one ended: its process lives, and a rail may come back.
    stranded: Option<(Time, String)>,
    /// Lanes lost and other events that receipts report.
    notes: VecDeque<(Time, String)>,
    warned_direct: bool,
    /// What this end has copied directly, by the GPU whose memory it was; `None`: host memory.
    pub(super) copied: BTreeMap<Option<u32>, Copied>,
    /// Unexpected messages.
    arrivals: HashMap<u32, Arrival>,
    /// Its accesses to our regions.
    accesses: HashMap<u32, (proto::RegionRef, Arc<Grant>)>,
}

struct Arrival {
    bytes: Box<[u8]>,
    grant: Arc<Grant>,
}

impl Peer {
    pub(crate) fn new(protocol: proto::Peer, name: &str) -> Peer {
        Peer {
            protocol,
            names: Names::new(name, ""),
            alive: true,
            why_ended: String::new(),
            end_reason: None,
            message_lane: None,
            bulk: Vec::new(),
            lanes: Vec::new(),
            stranded: None,
            notes: VecDeque::new(),
            warned_direct: false,
            copied: BTreeMap::new(),
            arrivals: HashMap::new(),
            accesses: HashMap::new(),
        }
    }

    pub(crate) fn name(&self) -> &str {
        self.names.peer()
    }

    #[inline]
    pub(crate) fn names(&self) -> Names {
        self.names
    }

    #[inline]
    pub(crate) fn is_alive(&self) -> bool {
        self.alive
    }

    /// Why it has ended, for errors.
    pub(crate) fn why_ended(&self) -> &str {
        &self.why_ended
    }

    /// The reason of its end that programs branch on, if it is known.
    pub(crate) fn end_reason(&self) -> Option<Reason> {
        self.end_reason
    }

    /// The error of an operation `what` with this peer, which has ended.
    pub(crate) fn dead(&self, what: &str) -> Error {
        let error = Error::new(ErrorKind::PeerDead, what, &self.why_ended).with_peer(self.name());
        Error { reason: self.end_reason, ..error }
    }

    /// No operation may be started with it any more; whether it was alive. Only the first reason is kept.
    pub(crate) fn end(&mut self, why: &str, reason: Option<Reason>) -> bool {
        let was_alive = std::mem::replace(&mut self.alive, false);
        if was_alive {
            self.why_ended = why.to_owned();
            self.end_reason = reason;
        }
        was_alive
    }

    /// The user has closed the endpoint: that is the reason to report, whatever ended it before.
    pub(crate) fn close(&mut self) {
        self.alive = false;
        self.why_ended = "the endpoint is closed".to_owned();
        self.end_reason = Some(Reason::Closed);
    }

    // ---- the protocol, for what is above the core

    /// Says goodbye once the peer has everything that it is owed.
    pub(crate) fn say_goodbye(&mut self, now: Time) {
        self.protocol.close(now);
    }

    /// A silent lane has turned out to be alive; `probe`: have its end acknowledge something.
    pub(crate) fn lane_is_alive(&mut self, now: Time, lane: LaneId, probe: bool) {
        self.protocol.lane_alive(now, lane);
        if probe {
            self.protocol.probe(lane);
        }
    }

    /// Whether operations with it are in flight, which its loss fails and a lost lane delays.
    pub(crate) fn has_operations(&self) -> bool {
        self.protocol.has_operations()
    }

    /// Whether nothing is in flight with it, and nothing owed to it.
    pub(crate) fn is_idle(&self) -> bool {
        self.protocol.idle()
    }

    // ---- lanes

    /// The lane polled under the lock.
    #[inline]
    pub(crate) fn message_lane(&self) -> Option<LaneId> {
        self.message_lane
    }

    pub(crate) fn lanes(&self) -> &[LaneId] {
        &self.lanes
    }

    #[inline]
    pub(crate) fn bulk(&self) -> &[Arc<BulkLane>] {
        &self.bulk
    }

    pub(crate) fn bulk_lane(&self, id: LaneId) -> Option<&Arc<BulkLane>> {
        self.bulk.iter().find(|lane| lane.id == id)
    }

    /// Adds a lane. `bulk`: it is polled outside the lock.
    pub(super) fn add_lane(&mut self, now: Time, spec: proto::LaneSpec, bulk: Option<Arc<BulkLane>>) {
        self.lanes.push(spec.id);
        self.stranded = None;
        self.bulk.extend(bulk);
        self.protocol.lane_up(now, spec);
    }

    /// Makes `id` the lane polled under the lock.
    pub(super) fn set_message_lane(&mut self, id: LaneId, name: &str) {
        self.message_lane = Some(id);
        self.names = Names::new(self.names.peer(), name);
    }

    /// Removes a lane; whether it was the last one.
    pub(super) fn remove_lane(&mut self, id: LaneId) -> bool {
        self.bulk.retain(|lane| lane.id != id);
        self.lanes.retain(|lane| *lane != id);
        if self.message_lane == Some(id) {
            self.message_lane = None;
        }
        self.lanes.is_empty()
    }

    /// No lane is polled under the lock any more.
    pub(super) fn clear_message_lane(&mut self) {
        self.message_lane = None;
    }

    /// Since when no lane is left, and how the last one ended.
    #[inline]
    pub(crate) fn stranded(&self) -> Option<&(Time, String)> {
        self.stranded.as_ref()
    }

    pub(super) fn set_stranded(&mut self, stranded: Option<(Time, String)>) {
        self.stranded = stranded;
    }

    // ---- what receipts and the log report

    /// Records an event for receipts.
    pub(super) fn note(&mut self, now: Time, what: String) {
        if self.notes.len() == NOTES_MAX {
            self.notes.pop_front();
        }
        self.notes.push_back((now, what));
    }

    /// Events since then.
    pub(super) fn notes_since(&self, since: Time) -> Vec<String> {
        self.notes.iter().filter(|(at, _)| *at >= since).map(|(_, what)| what.clone()).collect()
    }

    /// Whether this is the first direct copy with it that was not possible.
    pub(super) fn warns_of_direct(&mut self) -> bool {
        !std::mem::replace(&mut self.warned_direct, true)
    }

    // ---- unexpected messages

    /// Memory for an unexpected message: its first byte, and the grant under which a lane may write there.
    pub(super) fn insert_arrival(&mut self, arrival: u32, len: usize) -> (*mut u8, Arc<Grant>) {
        let mut bytes: Box<[u8]> = vec![0; len].into();
        let (dst, grant) = (bytes.as_mut_ptr(), Arc::new(Grant::default()));
        if let Some(old) = self.arrivals.insert(arrival, Arrival { bytes, grant: grant.clone() }) {
            old.grant.revoke();
        }
        (dst, grant)
    }

    /// Takes an unexpected message. No lane touches it any more.
    pub(super) fn take_arrival(&mut self, arrival: u32) -> Option<Box<[u8]>> {
        let kept = self.arrivals.remove(&arrival)?;
        kept.grant.revoke();
        Some(kept.bytes)
    }

    // ---- its accesses to our regions

    /// The grant of an access, created when it is first asked for.
    pub(super) fn access_grant(&mut self, access: u32, region: proto::RegionRef) -> Arc<Grant> {
        self.accesses.entry(access).or_insert_with(|| (region, Arc::default())).1.clone()
    }

    /// The grants of its accesses to that region.
    pub(crate) fn accesses_to(&self, region: proto::RegionRef) -> impl Iterator<Item = &Arc<Grant>> {
        self.accesses.values().filter(move |(of, _)| *of == region).map(|(_, grant)| grant)
    }

    /// No lane may touch the memory of that access any more.
    pub(super) fn revoke_access(&mut self, access: u32) {
        if let Some((_, grant)) = self.accesses.get(&access) {
            grant.revoke();
        }
    }

    /// The access is over.
    pub(super) fn end_access(&mut self, access: u32) {
        if let Some((_, grant)) = self.accesses.remove(&access) {
            grant.revoke();
        }
    }
}
