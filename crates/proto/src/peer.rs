//! One connection's state machine. Its parts are structs of their own, each with its contract: [`Events`], [`Theirs`],
//! [`Lanes`], [`Stream`], [`Answers`], [`Calm`]. The rest are methods of [`Peer`]: `sending` (what a lane carries next),
//! `chunks` (and which chunk), `arriving` (heads and payloads that come in), `requests` (what the peer asks for), `counted`
//! (short messages, confirmed by a count), `kept` (messages before their receive), `outgoing` and `incoming` (the life of a
//! transfer at either end), `direct` (single copies), `unpack` (chunks by way of slots), `links` (up, down, silent),
//! `ending`.

mod answers;
mod arriving;
mod chunks;
mod counted;
mod direct;
mod ending;
mod events;
mod incoming;
mod kept;
mod lanes;
mod ledger;
mod links;
mod open;
mod outgoing;
mod requests;
mod sending;
mod stream;
mod theirs;
mod unpack;

use std::collections::VecDeque;

use crossrail_types::{EndpointId, OpId};
use slab::Slab;

use crate::frame::Target;
use crate::{Config, Event, Failure, Matcher, Offer, Operation, RegionRef, Short, Time};

use answers::Answers;
use counted::Calm;
use direct::JobOf;
use ending::Violations;
use events::Events;
use incoming::Incoming;
use kept::Kept;
use lanes::Lanes;
use ledger::{Delivered, Unconfirmed};
use outgoing::Outgoing;
use stream::Stream;
use theirs::Theirs;

/// One connection's protocol state.
#[derive(Debug)]
pub struct Peer {
    id: EndpointId,
    config: Config,
    answers: Answers,

    lanes: Lanes,
    stream: Stream,

    /// Operations that wait for credit or for the lane.
    queue: VecDeque<Queued>,
    /// What we have announced and not seen finished; the wire id is the index plus one.
    outs: Slab<Outgoing>,
    /// Those of `outs` that are operations of ours, not reads that we serve.
    own_active: u32,
    eager_bytes: u64,
    /// Messages of ours, and of the peer's, that are confirmed by counting.
    unconfirmed: Unconfirmed,
    delivered: Delivered,
    calm: Calm,
    /// Transfers with chunks to hand out, by index and serial, in turn.
    active: VecDeque<(u32, u32)>,
    /// The write whose bytes must follow at once.
    follow: Option<(u32, u32)>,

    ins: Slab<Incoming>,
    /// Unexpected messages, until the event that takes them away is taken.
    arrivals: Slab<Kept>,
    arrival_bytes: u64,
    /// The receive whose unexpected message is being copied out, and the peer's id of it.
    copied_out: Option<(OpId, u32)>,
    theirs: Theirs,

    /// The peer's accesses to our regions, until the event that ends them is taken.
    passives: Slab<()>,
    jobs: Slab<JobOf>,
    serial: u32,
    violations: Violations,
    events: Events,
}

#[derive(Clone, Copy, Debug)]
struct Queued {
    op: OpId,
    what: Operation,
    len: u64,
    offer: Option<Offer>,
    eager: bool,
    at: Time,
}

impl Peer {
    /// A connection without lanes.
    pub fn new(id: EndpointId, config: Config) -> Peer {
        let (unconfirmed, theirs) = (Unconfirmed::new(config.message_credit), Theirs::new(config.message_credit));
        let answers = Answers::new(config.message_credit, config.lazy_passes);
        let lanes = Lanes::new(&config);
        Peer {
            id,
            config,
            answers,
            lanes,
            stream: Stream::default(),
            queue: VecDeque::new(),
            outs: Slab::new(),
            own_active: 0,
            eager_bytes: 0,
            unconfirmed,
            delivered: Delivered::default(),
            calm: Calm::default(),
            active: VecDeque::new(),
            follow: None,
            ins: Slab::new(),
            arrivals: Slab::new(),
            arrival_bytes: 0,
            copied_out: None,
            theirs,
            passives: Slab::new(),
            jobs: Slab::new(),
            serial: 0,
            violations: Violations::default(),
            events: Events::default(),
        }
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
            None => self.queue.push_back(Queued { op, what, len, offer, eager, at: now }),
        }
    }

    /// A receive matched `arrival` of this peer ([`Matcher::post`]).
    pub fn accept(&mut self, now: Time, arrival: u32, op: OpId, capacity: u64) {
        self.stir();
        self.accept_kept(now, arrival, op, capacity);
    }

    /// Cancels an operation or a receive that this peer's message has matched; false if it is not under way here.
    ///
    /// [`Event::Done`] tells the outcome: it may have finished before the peer heard of it.
    pub fn cancel(&mut self, now: Time, op: OpId) -> bool {
        self.stir();
        if let Some(at) = self.queue.iter().position(|q| q.op == op) {
            self.queue.remove(at);
            self.events.fail(op, Failure::Cancelled, 0, 0);
            return true;
        }
        let why = Failure::Cancelled;
        self.abort_outgoing(op, &why) || self.end_arriving(op, &why) || self.end_receive(now, op, why)
    }

    /// The engine has deregistered a region: accesses under way fail, here and at the peer.
    ///
    /// Lanes are told at once to leave the peer's writes alone ([`Event::Revoke`]). What the peer reads must stay
    /// readable until its [`Event::Released`]: the peer would take a lane's filler for the region's bytes until it has
    /// heard of the failure, one round trip later. Direct copies, too, may touch the memory until then.
    pub fn region_gone(&mut self, now: Time, region: RegionRef) {
        self.stir();
        self.region_gone_incoming(now, region);
        self.region_gone_serves(region);
    }

    /// The next event. The ids that it names for the last time are free from now on.
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
            Event::Deliver { arrival, op, .. } => {
                self.copied_out = self.arrivals.try_remove(arrival as usize).map(|kept| (op, kept.their));
            }
            Event::DropArrival { arrival } => {
                self.arrivals.try_remove(arrival as usize);
            }
            Event::Released { passive, .. } => {
                self.passives.try_remove(passive as usize);
            }
            _ => {}
        }
        Some(event)
    }

    /// The next event, if it is the good end of a short message: for engines that would rather not move a whole
    /// [`Event`]. Whatever is not taken here comes from [`Peer::event`], in the same order.
    #[inline]
    pub fn short(&mut self) -> Option<Short> {
        self.events.take_short()
    }

    /// The next write with an immediate whose bytes are all in place: what [`Peer::event`] would report as
    /// [`Event::Imm`], ahead of other events. For engines to which later frames may refer to what such a write brought.
    pub fn arrived(&mut self) -> Option<(RegionRef, u32)> {
        self.events.take_arrived()
    }

    /// Finishes what is under way, then says goodbye: [`Peer::idle`] is true once the peer has heard it. Operations
    /// started later, here or there, fail with [`Failure::Closed`].
    pub fn close(&mut self, _now: Time) {
        self.stir();
        self.answers.close();
    }

    /// The peer is gone: all its operations fail with `why`. Messages that have come in whole can still be received.
    ///
    /// The engine has let go of all its lanes and given up its direct copies and unpacks before: none of them touches
    /// any memory.
    pub fn dead(&mut self, now: Time, why: Failure, matcher: &mut Matcher) {
        self.stir();
        if self.answers.die(&why) {
            self.forget_jobs();
            self.fail_all(now, &why, matcher);
            self.lanes.clear();
            self.stream.move_to(None, false);
        }
    }

    /// Why nothing more can be done with this peer, if so.
    pub fn failed(&self) -> Option<Failure> {
        self.answers.failed()
    }

    /// Whether an operation of this end or of the peer is in flight. Confirmations that are owed do not count.
    pub fn has_operations(&self) -> bool {
        !self.queue.is_empty()
            || !self.outs.is_empty()
            || self.own_active > 0
            || !self.ins.is_empty()
            || !self.jobs.is_empty()
            || self.stream.is_receiving()
    }

    /// Nothing under way and nothing owed. Messages that nobody has received do not count.
    pub fn idle(&self) -> bool {
        let told = self.answers.is_empty()
            && !self.delivered.owed()
            && self.follow.is_none()
            && self.stream.settled()
            && self.lanes.are_settled();
        let farewell = !self.answers.owes_bye() || !self.answers.live();
        !self.has_operations() && told && farewell && (self.stream.owed() == 0 || self.lanes.is_empty())
    }

    /// Bytes moved and bytes in all, of an operation under way here.
    pub fn progress(&self, op: OpId) -> Option<(u64, u64)> {
        if let Some(q) = self.queue.iter().find(|q| q.op == op) {
            return Some((0, q.len));
        }
        self.progress_outgoing(op).or_else(|| self.progress_incoming(op))
    }

    fn next_serial(&mut self) -> u32 {
        self.serial = self.serial.wrapping_add(1);
        self.serial
    }

    fn target(index: u32, serial: u32) -> Target {
        Target { index, serial }
    }
}
