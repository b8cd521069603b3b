//! The peers of one worker: the protocol's state, and what the engine keeps beside it.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Weak};

use crossrail_proto as proto;
use crossrail_transport::Loan;
use crossrail_types::{EndpointId, Error, ErrorKind, LaneId, Reason};
use proto::Time;

use super::bulk_lane::{Among, BulkLane};
use super::id_table::IdTable;
use super::message_rail::MessageRail;
use super::names::{Names, NamesOfPeer};
use super::returns::{Owner, Returns};
use super::rows::outbox::Outbox;
use super::totals::Copied;

/// Events that receipts can report, at most.
const NOTES_MAX: usize = 64;

/// Peers by endpoint. One that has ended stays until nobody refers to it ([`Transfers::free_ended`]): no handle of the
/// user, no message that nobody has received, no operation. Its id refers to nothing from then on.
///
/// [`Transfers::free_ended`]: super::Transfers
#[derive(Default)]
pub(crate) struct Peers {
    table: IdTable<Peer>,
}

/// Keeps the entry of a peer, dead or alive.
#[derive(Clone, Debug)]
pub(crate) struct Claim {
    pub(crate) id: EndpointId,
    _claims: Arc<()>,
}

impl Peers {
    /// An id for a peer that is to be added.
    pub(super) fn reserve(&mut self) -> EndpointId {
        EndpointId(self.table.reserve())
    }

    /// Adds a peer, whose protocol state must have been created for a reserved id.
    pub(super) fn add(&mut self, peer: Peer) {
        self.table.insert(peer.protocol.id().0, peer);
    }

    #[inline]
    pub(crate) fn get(&self, id: EndpointId) -> Option<&Peer> {
        self.table.get(id.0)
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, id: EndpointId) -> Option<&mut Peer> {
        self.table.get_mut(id.0)
    }

    /// Keeps the peer's entry until the claim is dropped, on any thread.
    pub(crate) fn claim(&mut self, id: EndpointId) -> Claim {
        let claims = self.get(id).and_then(|peer| peer.claims.upgrade()).unwrap_or_default();
        if let Some(peer) = self.get_mut(id) {
            peer.claims = Arc::downgrade(&claims);
        }
        Claim { id, _claims: claims }
    }

    pub(super) fn remove(&mut self, id: EndpointId) {
        self.table.remove(id.0);
    }

    /// Peers in the table, dead ones too.
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Peer> {
        self.table.iter().map(|(_, peer)| peer)
    }

    /// The ids of all peers, dead ones too. Borrows nothing, so that peers may be changed meanwhile.
    pub(crate) fn ids(&self) -> impl Iterator<Item = EndpointId> + use<> {
        self.iter().map(|peer| peer.protocol.id()).collect::<Vec<_>>().into_iter()
    }

    /// The ids of all peers that are alive.
    pub(crate) fn alive(&self) -> impl Iterator<Item = EndpointId> {
        self.iter().filter(|peer| peer.alive).map(|peer| peer.protocol.id())
    }

    /// The name of a peer, for messages.
    pub(crate) fn name(&self, id: EndpointId) -> String {
        self.get(id).map_or_else(|| "?".to_owned(), |peer| peer.name().to_owned())
    }

    /// The peer to which a lane leads.
    pub(crate) fn owner_of(&self, lane: LaneId) -> Option<EndpointId> {
        self.iter().find(|peer| peer.lanes.contains(&lane)).map(|peer| peer.protocol.id())
    }
}

/// One peer. Protected by the worker's lock.
///
/// It is alive until [`Peer::end`]; afterwards no operation is started with it, but its entry stays while anything
/// refers to it.
pub(crate) struct Peer {
    /// The protocol's state. Whoever calls it must settle the endpoint afterwards
    /// ([`Transfers::settle`](super::Transfers::settle)): the protocol's decisions take effect only then.
    pub(super) protocol: proto::Peer,
    name: Arc<str>,
    /// The number of its worker, which every description of that worker has.
    generation: u64,
    names: NamesOfPeer,
    /// What its claims share.
    claims: Weak<()>,
    alive: bool,
    /// [`Peer::say_goodbye`] was called: the connection's loss is no news.
    pub(super) is_closing: bool,
    why_ended: String,
    end_reason: Option<Reason>,
    /// The lane polled under the lock: shared memory, or the TCP connection for messages.
    message_lane: Option<LaneId>,
    pub(super) message_rail: MessageRail,
    bulk: Vec<Arc<BulkLane>>,
    lanes: Vec<LaneId>,
    /// Since when no lane is left, and how the last one ended: its process lives, and a rail may come back.
    stranded: Option<(Time, String)>,
    /// Rails whose lane was lost soon after it had come up, and how many times in a row.
    short_lived: HashMap<(u16, u16), u32>,
    /// Lanes lost and other events that receipts report.
    notes: VecDeque<(Time, String)>,
    warned_direct: bool,
    /// Lanes that have ended by memory for which no operation was found to blame.
    memory_faults: u32,
    /// What this end has copied directly, by the GPU whose memory it was; `None`: host memory.
    pub(super) copied: BTreeMap<Option<u32>, Copied>,
    /// What this end has told it of lists.
    pub(super) outbox: Outbox,
    /// Unexpected messages.
    arrivals: HashMap<u32, Arrival>,
    /// Its accesses to our regions.
    accesses: HashMap<u32, (proto::RegionRef, Arc<Loan>)>,
}

/// Cost of an unexpected message in addition to its bytes.
const ARRIVAL_EXTRA: u64 = 256;

struct Arrival {
    bytes: Box<[u8]>,
    loan: Arc<Loan>,
}

impl Peer {
    pub(crate) fn new(protocol: proto::Peer, name: &str, generation: u64) -> Peer {
        Peer {
            protocol,
            name: name.into(),
            generation,
            names: NamesOfPeer::new(name, ""),
            claims: Weak::new(),
            alive: true,
            is_closing: false,
            why_ended: String::new(),
            end_reason: None,
            message_lane: None,
            message_rail: MessageRail::default(),
            bulk: Vec::new(),
            lanes: Vec::new(),
            stranded: None,
            short_lived: HashMap::new(),
            notes: VecDeque::new(),
            warned_direct: false,
            memory_faults: 0,
            copied: BTreeMap::new(),
            outbox: Outbox::default(),
            arrivals: HashMap::new(),
            accesses: HashMap::new(),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn id(&self) -> EndpointId {
        self.protocol.id()
    }

    /// See [`Description::generation`](crate::Description::generation).
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    #[inline]
    pub(crate) fn names(&self) -> Names {
        self.names.names()
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
        self.is_closing = true;
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

    /// Whether it has ended, and neither a lane, a message that nobody has received nor a claim is left.
    pub(super) fn is_over(&self) -> bool {
        let is_used = self.alive || self.message_lane.is_some() || !self.bulk.is_empty() || self.has_operations();
        !is_used && self.arrivals.is_empty() && self.accesses.is_empty() && self.claims.strong_count() == 0
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
        let among = bulk.as_ref().and_then(|lane| lane.among);
        self.lanes.push(spec.id);
        self.stranded = None;
        self.bulk.extend(bulk);
        match among {
            Some(Among { place, begin_with }) => self.protocol.lane_up_among(now, spec, place, begin_with),
            None => self.protocol.lane_up(now, spec),
        }
    }

    /// Makes `id` the lane polled under the lock.
    pub(super) fn set_message_lane(&mut self, id: LaneId, name: &str) {
        self.message_lane = Some(id);
        self.names = NamesOfPeer::new(&self.name, name);
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

    /// The lane of a rail was lost: how many times in a row it was soon after it had come up, if this time it was.
    pub(super) fn rail_lost(&mut self, rail: (u16, u16), soon: bool) -> u32 {
        if !soon {
            self.short_lived.remove(&rail);
            return 0;
        }
        let times = self.short_lived.entry(rail).or_default();
        *times = times.saturating_add(1);
        *times
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

    /// A lane has ended by memory that cannot be accessed: how many have in a row for which no operation was found to blame.
    pub(super) fn memory_fault(&mut self, unexplained: bool) -> u32 {
        self.memory_faults = if unexplained { self.memory_faults + 1 } else { 0 };
        self.memory_faults
    }

    // ---- unexpected messages

    /// Memory for an unexpected message: its first byte, and the loan by which a lane may write there.
    pub(super) fn insert_arrival(&mut self, arrival: u32, len: usize, returns: &mut Returns) -> (*mut u8, Arc<Loan>) {
        let mut bytes: Box<[u8]> = vec![0; len].into();
        let (dst, loan) = (bytes.as_mut_ptr(), Arc::new(Loan::default()));
        self.drop_arrival(arrival, returns);
        self.arrivals.insert(arrival, Arrival { bytes, loan: loan.clone() });
        (dst, loan)
    }

    /// Cost of its unexpected messages.
    pub(super) fn arrival_bytes(&self) -> u64 {
        self.arrivals.values().map(|arrival| arrival.bytes.len() as u64 + ARRIVAL_EXTRA).sum()
    }

    /// Takes an unexpected message. No lane touches the bytes any more.
    pub(super) fn take_arrival(&mut self, arrival: u32, returns: &mut Returns) -> Option<Box<[u8]>> {
        let Arrival { bytes, loan } = self.arrivals.remove(&arrival)?;
        if loan.recall() {
            return Some(bytes);
        }
        let copy = bytes.clone();
        returns.await_loan(Owner::Memory(bytes), loan);
        Some(copy)
    }

    /// Forgets an unexpected message, if there is that one.
    pub(super) fn drop_arrival(&mut self, arrival: u32, returns: &mut Returns) {
        let Some(Arrival { bytes, loan }) = self.arrivals.remove(&arrival) else { return };
        if !loan.recall() {
            returns.await_loan(Owner::Memory(bytes), loan);
        }
    }

    // ---- its accesses to our regions

    /// The loan of an access, made when it is first asked for.
    pub(super) fn access_loan(&mut self, access: u32, region: proto::RegionRef) -> Arc<Loan> {
        self.accesses.entry(access).or_insert_with(|| (region, Arc::default())).1.clone()
    }

    /// The loans of its accesses to that region.
    pub(crate) fn accesses_to(&self, region: proto::RegionRef) -> impl Iterator<Item = &Arc<Loan>> {
        self.accesses.values().filter(move |(of, _)| *of == region).map(|(_, loan)| loan)
    }

    /// Its accesses, and the region of each.
    pub(super) fn accesses(&self) -> impl Iterator<Item = (u32, proto::RegionRef)> {
        self.accesses.iter().map(|(access, (region, _))| (*access, *region))
    }

    /// No lane may begin to touch the memory of that access any more.
    pub(super) fn recall_access(&mut self, access: u32) {
        if let Some((_, loan)) = self.accesses.get(&access) {
            loan.recall();
        }
    }

    /// The access is over. The region is in use until its loan is returned: that, if a lane keeps it.
    pub(super) fn end_access(&mut self, access: u32, returns: &mut Returns) -> Option<Arc<Loan>> {
        let (region, loan) = self.accesses.remove(&access).filter(|(_, loan)| !loan.recall())?;
        returns.await_loan(Owner::Access(region), Arc::clone(&loan));
        Some(loan)
    }
}
