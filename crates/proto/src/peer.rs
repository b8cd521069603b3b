//! One connection's state machine.
//!
//! Its parts are structs of their own, each with its contract at the type: [`Lanes`], [`Stream`] and [`ControlQueue`]
//! (what goes over them), [`OutgoingOps`] and [`IncomingTransfers`] (transfers from here and towards us),
//! [`UnexpectedMessages`] (messages before their receive), [`PeerOps`] and [`Accesses`] (ids of the peer's operations,
//! and those that the engine holds), [`Delivered`] and [`FastPath`] (short messages), [`Events`]. [`Peer`] routes
//! between them: `arriving` what comes in, `sending` what a lane carries next, `transfers` what becomes of operations,
//! `links` what becomes of lanes and of the connection.

mod accesses;
mod arriving;
mod control_queue;
mod credit;
mod events;
mod fast_path;
mod incoming;
mod lanes;
mod ledger;
mod links;
mod open;
mod outgoing;
mod peer_ops;
mod sending;
mod stream;
mod transfers;
mod unexpected;

use crossrail_types::{EndpointId, OpId};

use crate::{Config, Event, Failure, Matcher, Memory, Offer, Operation, RegionFault, RegionRef, Short, Time};

use accesses::Accesses;
use control_queue::ControlQueue;
use credit::Credit;
use events::Events;
use fast_path::FastPath;
use incoming::{InKind, IncomingTransfers};
use lanes::Lanes;
use ledger::Delivered;
use links::Violations;
use open::What;
use outgoing::{OutgoingOps, Queued};
use peer_ops::PeerOps;
use stream::Stream;
use unexpected::{Announced, UnexpectedMessages};

/// One connection's protocol state.
///
/// Owns its parts, and the order in which they are notified: a frame, a completion or a lost lane enters through a
/// public method, which calls the part concerned and passes the consequences to the others. No part knows `Peer`; parts
/// whose ends concern several borrow the others (`Context`). The caller holds one lock, and no method blocks.
// Every public method that may invalidate `FastPath` first calls `FastPath::invalidate`, except those that `FastPath`
// itself speeds up.
#[derive(Debug)]
pub struct Peer {
    id: EndpointId,
    fast_path: FastPath,
    lanes: Lanes,
    stream: Stream,
    control: ControlQueue,
    /// The peer's counted messages, as this end confirms them.
    delivered: Delivered,
    credit: Credit,
    outgoing: OutgoingOps,
    incoming: IncomingTransfers,
    unexpected: UnexpectedMessages,
    peer_ops: PeerOps,
    accesses: Accesses,
    violations: Violations,
    events: Events,
}

/// Parts that transfers and messages use besides their own table, borrowed for one step.
struct Context<'a> {
    now: Time,
    credit: &'a mut Credit,
    lanes: &'a mut Lanes,
    stream: &'a mut Stream,
    control: &'a mut ControlQueue,
    peer_ops: &'a mut PeerOps,
    accesses: &'a mut Accesses,
    events: &'a mut Events,
}

impl Context<'_> {
    /// A message does not fit into its receive: fails it at both ends.
    fn truncated(&mut self, op: OpId, tag: u64, their: u32, message: u64, buffer: u64) {
        let why = Failure::Truncated { message, buffer };
        self.control.push_failed(their, &why, self.events);
        self.events.fail(op, why, 0, tag);
    }

    /// Ends a receive whose message is just coming in; false: there is none.
    fn end_arriving(&mut self, of: OpId, why: &Failure) -> bool {
        let Some(What::Receive { op, their, tag }) = self.stream.receiving().map(|open| open.what) else {
            return false;
        };
        if op != of {
            return false;
        }
        self.stream.drop_open(self.lanes);
        self.events.revoke(Memory::Op(op));
        self.events.fail(op, why.clone(), 0, tag);
        self.control.push_failed(their, why, self.events);
        self.peer_ops.free(their);
        true
    }
}

impl Peer {
    /// A connection without lanes.
    pub fn new(id: EndpointId, config: Config) -> Peer {
        Peer {
            id,
            fast_path: FastPath::default(),
            lanes: Lanes::new(&config),
            stream: Stream::default(),
            control: ControlQueue::new(config.message_credit, config.lazy_passes),
            delivered: Delivered::default(),
            credit: Credit::new(&config),
            outgoing: OutgoingOps::default(),
            incoming: IncomingTransfers::default(),
            unexpected: UnexpectedMessages::new(config.eager_credit),
            peer_ops: PeerOps::new(config.message_credit),
            accesses: Accesses::default(),
            violations: Violations::default(),
            events: Events::default(),
        }
    }

    /// The tables, and what they touch beside them.
    #[inline]
    fn parts(&mut self, now: Time) -> (&mut OutgoingOps, &mut IncomingTransfers, &mut UnexpectedMessages, Context<'_>) {
        let Peer { outgoing, incoming, unexpected, credit, lanes, stream, control, peer_ops, accesses, events, .. } =
            self;
        (outgoing, incoming, unexpected, Context { now, credit, lanes, stream, control, peer_ops, accesses, events })
    }

    /// Which peer this is.
    pub fn id(&self) -> EndpointId {
        self.id
    }

    /// Starts an operation of `len` bytes. Its memory must stay as it is until [`Event::Done`].
    ///
    /// `offer` (of that memory) lets the peer copy it directly, if it is too long to go with its first frame. Without
    /// `eager` no byte of it goes with a first frame, in either direction, however few there are: chunks carry them.
    #[inline]
    pub fn start(&mut self, now: Time, op: OpId, what: Operation, len: u64, offer: Option<Offer>, eager: bool) {
        self.fast_path.invalidate();
        match self.control.refusal() {
            Some(why) => self.events.fail(op, why, 0, 0),
            None => self.outgoing.enqueue(Queued { op, what, len, offer, eager, at: now }),
        }
    }

    /// True if a write of `len` bytes that starts now would be spread over several rails with other short operations.
    /// For engines that could send the same bytes as an [`Operation::Put`], which would not.
    pub fn spreads_write(&self, now: Time, len: u64) -> bool {
        let in_flight = self.outgoing.short_bytes_to_come(self.lanes.spread_above());
        self.lanes.spreads(now, len, in_flight, self.stream.load())
    }

    /// A receive matched `arrival` of this peer ([`Matcher::post`]).
    pub fn accept(&mut self, now: Time, arrival: u32, op: OpId, capacity: u64) {
        self.fast_path.invalidate();
        let (_, incoming, unexpected, mut cx) = self.parts(now);
        let Some(Announced { their, tag, len, offer, number }) = unexpected.accept(arrival, op, capacity, &mut cx)
        else {
            return;
        };
        let kind = InKind::Receive { op, tag };
        match number {
            Some(number) => incoming.begin_unasked(their, kind, len, number, &mut cx),
            None => incoming.begin_transfer(their, kind, len, offer, &mut cx),
        }
    }

    /// Cancels an operation or a receive that this peer's message has matched; false if it is not in flight here. `why`:
    /// [`Failure::Cancelled`], or [`Failure::Withdrawn`] if its memory was deregistered.
    ///
    /// [`Event::Done`] tells the outcome: it may have finished before the request reached the peer.
    pub fn cancel(&mut self, now: Time, op: OpId, why: &Failure) -> bool {
        self.withdraw(op, why) || self.end_operation(now, op, why)
    }

    /// The engine has deregistered a region: accesses in flight fail, here and at the peer.
    ///
    /// Lanes are told at once to leave the peer's writes alone ([`Event::Revoke`]). What the peer reads must stay
    /// readable until its [`Event::Released`]: the peer would take a lane's filler for the region's bytes until it has
    /// heard of the failure, one round trip later. Direct copies, too, may touch the memory until then.
    pub fn region_gone(&mut self, now: Time, region: RegionRef) {
        self.fast_path.invalidate();
        let (outgoing, incoming, _, mut cx) = self.parts(now);
        let why = Failure::Region(RegionFault::Gone);
        incoming.end_writes(region, &why, &mut cx);
        for index in outgoing.serves_of(region) {
            outgoing.fail_serve(index, why.clone(), &mut cx);
        }
    }

    /// The next event. Ids whose last use it is are free from now on.
    #[inline]
    pub fn event(&mut self) -> Option<Event> {
        if let Some(short) = self.events.take_short() {
            return Some(short.into());
        }
        if self.events.are_short() { None } else { self.longer_event() }
    }

    fn longer_event(&mut self) -> Option<Event> {
        let event = self.events.take()?;
        match event {
            Event::Deliver { arrival, op, .. } => self.unexpected.taken(arrival, Some(op)),
            Event::DropArrival { arrival } => self.unexpected.taken(arrival, None),
            Event::Released { passive, .. } => self.accesses.end(passive),
            _ => {}
        }
        Some(event)
    }

    /// The next event, if it is the success of a short message: spares the caller moving a whole [`Event`]. Other
    /// events come from [`Peer::event`], in the same order.
    #[inline]
    pub fn short(&mut self) -> Option<Short> {
        self.events.take_short()
    }

    /// The next write with an immediate whose bytes are all in place: what [`Peer::event`] would report as
    /// [`Event::Imm`], ahead of other events. For engines to which later frames may refer to what such a write brought.
    pub fn arrived(&mut self) -> Option<(RegionRef, u32)> {
        self.events.take_arrived()
    }

    /// Finishes what is in flight, then sends a goodbye: [`Peer::idle`] is true once the peer has received it.
    /// Operations started later, at either end, fail with [`Failure::Closed`].
    pub fn close(&mut self, _now: Time) {
        self.fast_path.invalidate();
        self.control.close();
    }

    /// Fails all operations with `why`: the peer is dead or was given up. Messages that were received in full can still
    /// be matched.
    ///
    /// Before this call the engine must have dropped all its lanes and abandoned its direct copies and unpacks: none of
    /// them may touch any memory.
    pub fn dead(&mut self, now: Time, why: Failure, matcher: &mut Matcher) {
        self.fast_path.invalidate();
        if self.control.die(&why) {
            self.accesses.forget_jobs();
            self.incoming.forget_jobs();
            self.outgoing.forget_jobs();
            self.fail_all(now, &why, matcher);
            self.lanes.clear();
            self.stream.move_to(None, false);
        }
    }

    /// Drops unexpected messages of a peer that is [dead](Peer::dead), which no receive has taken.
    pub fn forget_messages(&mut self, now: Time, matcher: &mut Matcher) {
        let id = self.id;
        let (_, _, unexpected, mut cx) = self.parts(now);
        unexpected.forget_all(id, matcher, &mut cx);
    }

    /// Why this peer cannot be used any more, if so.
    pub fn failed(&self) -> Option<Failure> {
        self.control.failed()
    }

    /// Whether an operation of this end or of the peer is in flight. Confirmations that are owed do not count.
    pub fn has_operations(&self) -> bool {
        !self.outgoing.is_idle()
            || !self.credit.is_unused()
            || !self.incoming.is_empty()
            || self.accesses.has_jobs()
            || self.stream.is_receiving()
    }

    /// Nothing in flight and nothing owed. Messages that nobody has received do not count.
    pub fn idle(&self) -> bool {
        let nothing_owed = self.control.is_empty()
            && !self.delivered.owed()
            && !self.outgoing.must_follow()
            && self.stream.settled()
            && self.lanes.are_settled();
        let farewell = !self.control.owes_bye() || !self.control.live();
        !self.has_operations() && nothing_owed && farewell && (self.stream.owed() == 0 || self.lanes.is_empty())
    }

    /// Bytes moved and bytes in all, of an operation in flight here.
    pub fn progress(&self, op: OpId) -> Option<(u64, u64)> {
        let ours = self.outgoing.progress(op, |target| self.incoming.received(target));
        ours.or_else(|| self.credit.progress(op)).or_else(|| self.incoming.progress(op))
    }
}
