//! One connection's state machine.
//!
//! Its parts are structs of their own, each with its contract at the type: [`Lanes`], [`Stream`] and [`Answers`] (what
//! goes over them), [`Outs`] and [`Ins`] (transfers from here and towards us), [`Arrivals`] (messages before their
//! receive), [`Theirs`] and [`Accesses`] (ids of the peer's operations, and those that the engine holds), [`Delivered`] and
//! [`Calm`] (short messages), [`Events`]. [`Peer`] routes between them: `arriving` what comes in, `sending` what a lane
//! carries next, `transfers` what becomes of operations, `links` what becomes of lanes and of the connection.

mod accesses;
mod answers;
mod arriving;
mod calm;
mod credit;
mod events;
mod incoming;
mod kept;
mod lanes;
mod ledger;
mod links;
mod open;
mod outgoing;
mod sending;
mod stream;
mod theirs;
mod transfers;

use crossrail_types::{EndpointId, OpId};

use crate::{Config, Event, Failure, Matcher, Memory, Offer, Operation, RegionFault, RegionRef, Short, Time};

use accesses::Accesses;
use answers::Answers;
use calm::Calm;
use credit::Credit;
use events::Events;
use incoming::{InKind, Ins};
use kept::{Announced, Arrivals};
use lanes::Lanes;
use ledger::Delivered;
use links::Violations;
use open::What;
use outgoing::{Outs, Queued};
use stream::Stream;
use theirs::Theirs;

/// One connection's protocol state.
///
/// Owns its parts, and the order in which they are notified: a frame, a completion or a lost lane enters through a
/// public method, which calls the part concerned and passes the consequences to the others. No part knows `Peer`; parts
/// whose ends concern several borrow the others (`Context`). The caller holds one lock, and no method blocks.
// Every public method that may invalidate `Calm` first calls `Calm::stir`, except those that `Calm` itself speeds up.
#[derive(Debug)]
pub struct Peer {
    id: EndpointId,
    calm: Calm,
    lanes: Lanes,
    stream: Stream,
    answers: Answers,
    /// The peer's counted messages, as this end confirms them.
    delivered: Delivered,
    credit: Credit,
    outs: Outs,
    ins: Ins,
    arrivals: Arrivals,
    theirs: Theirs,
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
    answers: &'a mut Answers,
    theirs: &'a mut Theirs,
    accesses: &'a mut Accesses,
    events: &'a mut Events,
}

impl Context<'_> {
    /// A message does not fit into its receive: both ends hear so.
    fn truncated(&mut self, op: OpId, tag: u64, their: u32, message: u64, buffer: u64) {
        let why = Failure::Truncated { message, buffer };
        self.answers.tell_failed(their, &why, self.events);
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
        self.answers.tell_failed(their, why, self.events);
        self.theirs.free(their);
        true
    }
}

impl Peer {
    /// A connection without lanes.
    pub fn new(id: EndpointId, config: Config) -> Peer {
        Peer {
            id,
            calm: Calm::default(),
            lanes: Lanes::new(&config),
            stream: Stream::default(),
            answers: Answers::new(config.message_credit, config.lazy_passes),
            delivered: Delivered::default(),
            credit: Credit::new(&config),
            outs: Outs::default(),
            ins: Ins::default(),
            arrivals: Arrivals::new(config.eager_credit),
            theirs: Theirs::new(config.message_credit),
            accesses: Accesses::default(),
            violations: Violations::default(),
            events: Events::default(),
        }
    }

    /// The tables, and what they touch beside them.
    #[inline]
    fn parts(&mut self, now: Time) -> (&mut Outs, &mut Ins, &mut Arrivals, Context<'_>) {
        let Peer { outs, ins, arrivals, credit, lanes, stream, answers, theirs, accesses, events, .. } = self;
        (outs, ins, arrivals, Context { now, credit, lanes, stream, answers, theirs, accesses, events })
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
        self.stir();
        match self.answers.refusal() {
            Some(why) => self.events.fail(op, why, 0, 0),
            None => self.outs.enqueue(Queued { op, what, len, offer, eager, at: now }),
        }
    }

    /// A receive matched `arrival` of this peer ([`Matcher::post`]).
    pub fn accept(&mut self, now: Time, arrival: u32, op: OpId, capacity: u64) {
        self.stir();
        let (_, ins, arrivals, mut cx) = self.parts(now);
        if let Some(Announced { their, tag, len, offer }) = arrivals.accept(arrival, op, capacity, &mut cx) {
            ins.begin_transfer(their, InKind::Receive { op, tag }, len, offer, &mut cx);
        }
    }

    /// Cancels an operation or a receive that this peer's message has matched; false if it is not in flight here.
    ///
    /// [`Event::Done`] tells the outcome: it may have finished before the peer heard of it.
    pub fn cancel(&mut self, now: Time, op: OpId) -> bool {
        self.stir();
        self.end_queued(op, &Failure::Cancelled) || self.end_operation(now, op, &Failure::Cancelled)
    }

    /// The engine has deregistered a region: accesses in flight fail, here and at the peer.
    ///
    /// Lanes are told at once to leave the peer's writes alone ([`Event::Revoke`]). What the peer reads must stay
    /// readable until its [`Event::Released`]: the peer would take a lane's filler for the region's bytes until it has
    /// heard of the failure, one round trip later. Direct copies, too, may touch the memory until then.
    pub fn region_gone(&mut self, now: Time, region: RegionRef) {
        self.stir();
        let (outs, ins, _, mut cx) = self.parts(now);
        let why = Failure::Region(RegionFault::Gone);
        ins.end_writes(region, &why, &mut cx);
        for index in outs.serves_of(region) {
            outs.fail_serve(index, why.clone(), &mut cx);
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
            Event::Deliver { arrival, op, .. } => self.arrivals.taken(arrival, Some(op)),
            Event::DropArrival { arrival } => self.arrivals.taken(arrival, None),
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
        self.stir();
        self.answers.close();
    }

    /// Fails all operations with `why`: the peer is dead or was given up. Messages that were received in full can still
    /// be matched.
    ///
    /// Before this call the engine must have dropped all its lanes and abandoned its direct copies and unpacks: none of
    /// them may touch any memory.
    pub fn dead(&mut self, now: Time, why: Failure, matcher: &mut Matcher) {
        self.stir();
        if self.answers.die(&why) {
            self.accesses.forget_jobs();
            self.ins.forget_jobs();
            self.outs.forget_jobs();
            self.fail_all(now, &why, matcher);
            self.lanes.clear();
            self.stream.move_to(None, false);
        }
    }

    /// Why this peer cannot be used any more, if so.
    pub fn failed(&self) -> Option<Failure> {
        self.answers.failed()
    }

    /// Whether an operation of this end or of the peer is in flight. Confirmations that are owed do not count.
    pub fn has_operations(&self) -> bool {
        !self.outs.is_idle()
            || !self.credit.is_unused()
            || !self.ins.is_empty()
            || self.accesses.has_jobs()
            || self.stream.is_receiving()
    }

    /// Nothing in flight and nothing owed. Messages that nobody has received do not count.
    pub fn idle(&self) -> bool {
        let told = self.answers.is_empty()
            && !self.delivered.owed()
            && !self.outs.must_follow()
            && self.stream.settled()
            && self.lanes.are_settled();
        let farewell = !self.answers.owes_bye() || !self.answers.live();
        !self.has_operations() && told && farewell && (self.stream.owed() == 0 || self.lanes.is_empty())
    }

    /// Bytes moved and bytes in all, of an operation in flight here.
    pub fn progress(&self, op: OpId) -> Option<(u64, u64)> {
        let ours = self.outs.progress(op, |target| self.ins.received(target));
        ours.or_else(|| self.credit.progress(op)).or_else(|| self.ins.progress(op))
    }
}
