//! One pass of progress under the worker's lock: the lanes polled there, the protocol's events, direct copies.
#![allow(unsafe_code)]

mod bulk_lane;
mod direct;
mod failure;
pub(crate) mod gpu;
mod operations;
mod peer_memory;
mod receipt;
mod submit;
mod tables;

use std::collections::VecDeque;
use std::time::Instant;

use crossrail_gpu::Completion;
use crossrail_proto as proto;
use crossrail_transport::{Lane, LaneError, Place, Post, Sink, Tx};
use crossrail_types::{EndpointId, Head, LaneId, OpId};
use proto::{Event, Memory};

use self::direct::Active;
use self::gpu::{Gate, Inbox, Work};

pub(crate) use self::bulk_lane::{BulkLane, READABLE, WRITABLE};
pub(crate) use self::operations::{Callback, gone};
pub(crate) use self::receipt::{Collected, outcome, render};
pub use self::receipt::{LaneShare, Protocol, Receipt};
pub(crate) use self::tables::{LaneState, PeerState, State};

/// Bytes a lane may move in each direction before the others get their turn.
const LANE_BUDGET: usize = 1 << 20;
/// Passes between two looks at the clock.
const CLOCK_EVERY: u32 = 64;
/// Idle passes between two looks at the peer's count of delivered messages, unless a caller waits for that: each look
/// takes the cache line away from the peer, whose next message would be late by as much.
const COUNTS_EVERY: u32 = 8;
/// Passes between two looks at idle sockets while shared-memory lanes are being spun on.
const SOCKETS_EVERY: u32 = 16;

/// A lane polled under the lock.
pub(crate) struct Inside {
    pub(crate) id: LaneId,
    pub(crate) endpoint: EndpointId,
    pub(crate) lane: Box<dyn Lane>,
    /// Looking costs a system call.
    pub(crate) socket: bool,
}

/// A rail that was lost, for whoever redials.
#[derive(Clone, Debug)]
pub(crate) struct Lost {
    pub(crate) endpoint: EndpointId,
    pub(crate) rail: u16,
    pub(crate) channel: u16,
}

/// See the module.
pub(crate) struct Core {
    pub(crate) st: State,
    /// What GPUs' stagers have finished.
    pub(crate) inbox: Inbox,
    pub(crate) inside: Vec<Inside>,
    pub(crate) jobs: Vec<Active>,
    /// Cursors of finished copies in which the peer was still touching a piece.
    pub(crate) closing: Vec<(LaneId, u32)>,
    /// Receives that wait for memory of a GPU.
    pub(crate) receives: Gate,
    /// A lane has something that it is to ask for itself.
    turns: bool,
    /// Links to GPU memory of peers.
    pub(crate) links: u32,
    /// Connections are carried by threads of their own.
    pub(crate) threads: bool,
    passes: u32,
    sockets_only: bool,
    /// The lanes' peers ring before they expect us to look.
    pub(crate) armed: bool,
    /// Callers that are making progress at this moment, callers that sleep until something finishes, and how many
    /// times a caller has made progress: by these the background thread knows whether it is needed.
    pub(crate) spinning: u32,
    pub(crate) sleepers: u32,
    /// Waits for something else than an operation's end: told whenever anything has happened.
    pub(crate) observers: u32,
    pub(crate) activity: u64,
    pub(crate) closed: bool,
    pub(crate) suspects: Vec<(EndpointId, LaneId)>,
    pub(crate) lost: Vec<Lost>,
    /// Endpoints that died, whose control connections are to go.
    pub(crate) ended: Vec<EndpointId>,
    /// Endpoints whose TCP connections wait for this: some were told to go, or have bytes to carry.
    pub(crate) kicked: bool,
    /// With it: lanes under the lock wait, too.
    pub(crate) roused: bool,
    /// Endpoints made by peers, for `accept`.
    pub(crate) arrived: VecDeque<EndpointId>,
}

struct InsideSink<'a> {
    st: &'a mut State,
    endpoint: EndpointId,
    /// Whether there is anything to carry; most polls find nothing and should cost nothing.
    wants: bool,
    fault: Option<String>,
}

impl Sink for InsideSink<'_> {
    #[inline]
    fn wants(&self) -> bool {
        self.wants
    }

    #[inline]
    fn next(&mut self, lane: LaneId) -> Option<Tx> {
        if self.wants { self.st.next(self.endpoint, lane) } else { None }
    }

    #[inline]
    fn sent(&mut self, lane: LaneId, token: u64) {
        self.st.sent(lane, token);
    }

    #[inline]
    fn place(&mut self, lane: LaneId, head: &Head) -> Place {
        self.st.place(self.endpoint, lane, head)
    }

    #[inline]
    fn placed(&mut self, lane: LaneId, token: u64) {
        if let Err(why) = self.st.placed(self.endpoint, lane, token) {
            self.fail(why);
        }
    }
}

impl InsideSink<'_> {
    #[cold]
    fn fail(&mut self, why: String) {
        self.fault.get_or_insert(why);
    }
}

impl Core {
    pub(crate) fn new(st: State, inbox: Inbox, threads: bool) -> Core {
        Core {
            st,
            inbox,
            inside: Vec::new(),
            jobs: Vec::new(),
            closing: Vec::new(),
            receives: Gate::default(),
            turns: false,
            links: 0,
            threads,
            passes: 0,
            sockets_only: true,
            armed: false,
            spinning: 0,
            sleepers: 0,
            observers: 0,
            activity: 0,
            closed: false,
            suspects: Vec::new(),
            lost: Vec::new(),
            ended: Vec::new(),
            kicked: false,
            roused: false,
            arrived: VecDeque::new(),
        }
    }

    /// Polls every inside lane once and acts on what came; whether anything moved. `probe`: look also at sockets of which
    /// epoll has said nothing. `ask`: a caller waits for a send to be confirmed.
    #[inline]
    pub(crate) fn pass(&mut self, probe: bool, ask: bool) -> bool {
        self.passes = self.passes.wrapping_add(1);
        if self.passes.is_multiple_of(CLOCK_EVERY) {
            self.timers();
        }
        let sockets = probe && (self.sockets_only || self.passes.is_multiple_of(SOCKETS_EVERY));
        // Where connections are carried by threads of their own, those do what follows from it: a caller that took it
        // for progress would never leave them the lock.
        let mut moved = self.inbox.is_up() && self.read_inbox() && !self.threads;
        let mut at = 0;
        while at < self.inside.len() {
            let inside = &mut self.inside[at];
            let (endpoint, id) = (inside.endpoint, inside.id);
            let probe = sockets || !inside.socket;
            let wants = self.st.wants(endpoint, id);
            let mut sink = InsideSink { st: &mut self.st, endpoint, wants, fault: None };
            let polled = inside.lane.poll(&mut sink, LANE_BUDGET, probe);
            let polled = match sink.fault {
                Some(why) => Err(LaneError::Protocol(why)),
                None => polled,
            };
            match polled {
                Ok(true) => {
                    moved = true;
                    self.settle(endpoint);
                }
                Ok(false) => {
                    if wants {
                        self.flush(endpoint);
                    }
                    if (ask || self.passes.is_multiple_of(COUNTS_EVERY)) && self.st.awaits_count(endpoint) {
                        moved |= self.collect_count(at);
                    }
                }
                Err(error) => {
                    let lane = self.inside.swap_remove(at);
                    self.recount();
                    self.settle(endpoint);
                    self.part(lane);
                    self.lane_lost(endpoint, id, &error);
                    moved = true;
                    continue;
                }
            }
            at += 1;
        }
        if self.links > 0 {
            moved |= self.pump_notes(moved);
        }
        if !self.jobs.is_empty() || !self.closing.is_empty() {
            moved |= self.step_jobs();
        }
        moved
    }

    /// Applies the count of delivered messages that the peer of the lane at `at` has published; whether it was news.
    fn collect_count(&mut self, at: usize) -> bool {
        let inside = &mut self.inside[at];
        let endpoint = inside.endpoint;
        // An error is reported by the next poll, too.
        let Ok(Some(count)) = inside.lane.published() else { return false };
        let now = self.st.now;
        let Some(peer) = self.st.peer(endpoint) else { return false };
        // A count that is impossible breaks the peer off, which is one of its events.
        let news = peer.peer.published(now, count).is_err() || peer.peer.has_events();
        if news {
            self.settle(endpoint);
        }
        news
    }

    /// Shows the peer how many of its messages have been delivered here.
    #[inline]
    fn publish_count(&mut self, endpoint: EndpointId) {
        let Some(peer) = self.st.peer(endpoint) else { return };
        let Some((id, count)) = peer.inside.and_then(|id| Some((id, peer.peer.untold(id)?))) else { return };
        // What this end sends must be on the lane before the count says that it was.
        if self.st.lane(id).is_none_or(|lane| !lane.caps.counts || lane.pending.is_some()) {
            return;
        }
        let Some(inside) = self.inside.iter_mut().find(|inside| inside.id == id) else { return };
        if inside.lane.publish(count)
            && let Some(peer) = self.st.peer(endpoint)
        {
            peer.peer.told(count);
        }
    }

    /// How many passes there were, modulo 2^32.
    pub(crate) fn passes(&self) -> u32 {
        self.passes
    }

    /// Whether something must be looked at again without any event telling so.
    pub(crate) fn busy(&self) -> bool {
        self.awaits_copy() || !self.closing.is_empty() || self.inbox.is_up()
    }

    /// Whether a copy is under way whose end only who looks sees: one of this end's, or one that was left to a peer.
    pub(crate) fn awaits_copy(&self) -> bool {
        !self.jobs.is_empty() || self.lends()
    }

    pub(crate) fn add_inside(&mut self, inside: Inside) {
        let name = self.st.lane(inside.id).map_or_else(|| "?".into(), |lane| lane.name.clone());
        if let Some(peer) = self.st.peer(inside.endpoint) {
            peer.set_inside(inside.id, name);
        }
        self.inside.push(inside);
        self.recount();
    }

    pub(crate) fn recount(&mut self) {
        self.sockets_only =
            self.inside.iter().all(|lane| lane.socket) && self.inside.iter().filter(|lane| lane.socket).count() <= 2;
    }

    /// Reads the clock and lets the protocol look for silent lanes.
    #[inline(always)]
    pub(crate) fn timers(&mut self) {
        let now = self.st.tick();
        if self.links > 0 {
            self.tidy_links();
        }
        for index in 0..self.st.peers.len() {
            let id = EndpointId(index as u32);
            let Some(peer) = self.st.peer(id) else { continue };
            if peer.stranded.is_some() {
                self.see_to_stranded(id, now);
            } else if peer.alive && peer.peer.timeout().is_some_and(|at| at <= now) {
                peer.peer.on_timeout(now);
                self.settle(id);
            }
        }
    }

    /// Asks every inside lane's peer to ring before it expects us to look. False: there is work already.
    pub(crate) fn arm(&mut self) -> bool {
        for at in 0..self.inside.len() {
            if self.st.awaits_count(self.inside[at].endpoint) {
                self.collect_count(at);
            }
        }
        for at in 0..self.inside.len() {
            if !self.inside[at].lane.arm() {
                for inside in &mut self.inside[..=at] {
                    inside.lane.disarm();
                }
                return false;
            }
        }
        self.armed = true;
        true
    }

    /// Somebody looks again by itself. Whether the lanes had been armed.
    #[inline]
    pub(crate) fn disarm(&mut self) -> bool {
        let was = std::mem::replace(&mut self.armed, false);
        if was {
            for inside in &mut self.inside {
                inside.lane.disarm();
            }
        }
        was
    }

    /// When the protocol next wants to be woken.
    pub(crate) fn next_timer(&self) -> Option<Instant> {
        let at =
            self.st.peers.iter().flatten().filter(|peer| peer.alive).filter_map(|peer| peer.peer.timeout()).min()?;
        Some(self.st.instant(at))
    }

    /// Acts on everything the protocol has decided for one peer, and sends what it wants sent.
    #[inline]
    pub(crate) fn settle(&mut self, endpoint: EndpointId) {
        if self.observers > 0 {
            self.st.ops.finished = true;
        }
        if !self.st.arrived.is_empty() {
            for (endpoint, short) in std::mem::take(&mut self.st.arrived) {
                self.apply(endpoint, short.into());
            }
        }
        while let Some(short) = self.st.peer(endpoint).and_then(|peer| peer.peer.short()) {
            if !self.st.ops.finish_short(endpoint, short) {
                self.apply(endpoint, short.into());
            }
        }
        while let Some(event) = self.st.peer(endpoint).and_then(|peer| peer.peer.event()) {
            self.apply(endpoint, event);
        }
        if let Some(peer) = self.st.peer(endpoint)
            && peer.inside.is_some_and(|id| peer.peer.presses(id))
        {
            self.flush(endpoint);
            let turns = std::mem::take(&mut self.turns);
            self.roused |= turns;
            self.kicked |= turns;
        }
        self.publish_count(endpoint);
        self.kick(endpoint);
    }

    /// [`Core::settle`] after something that came while, perhaps, no caller makes progress: then nobody would soon send
    /// the few acknowledgements that may ride along with a message. The background thread may sleep by timers that it
    /// looked at before they were owed, or, on a busy machine, get its turn long after whoever it has just woken.
    pub(crate) fn settle_aside(&mut self, endpoint: EndpointId) {
        self.settle(endpoint);
        if (self.armed || self.spinning == 0)
            && let Some(peer) = self.st.peer(endpoint)
        {
            peer.peer.flush();
            self.settle(endpoint);
        }
    }

    /// Hands the peer's messages to its message lane, as far as that has room.
    #[inline]
    pub(crate) fn flush(&mut self, endpoint: EndpointId) {
        let Some(id) = self.st.peer(endpoint).and_then(|peer| peer.inside) else { return };
        let Some(at) = self.inside.iter().position(|lane| lane.id == id) else { return };
        if self.st.lane(id).is_some_and(|lane| lane.staged.is_some()) {
            // Chunks of GPU memory have their turns: the lane asks for what is next when it is polled.
            self.turns = true;
            return;
        }
        let mut failed = None;
        while self.st.lane(id).is_some_and(|lane| lane.pending.is_none()) && self.st.wants(endpoint, id) {
            let now = self.st.now;
            let Some(out) = self.st.peer(endpoint).and_then(|peer| peer.peer.next(now, id)) else { break };
            if out.chunk && self.st.stage(endpoint, id, &out) {
                self.turns = true;
                break;
            }
            let Some(mut tx) = self.st.tx(endpoint, id, &out) else { continue };
            match self.inside[at].lane.post(&tx) {
                Ok(Post::Taken | Post::Held) => {}
                Ok(Post::Full) => {
                    self.st.keep(endpoint, id, &out.body, &mut tx);
                    if let Some(lane) = self.st.lane(id) {
                        lane.pending = Some(tx);
                    }
                }
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        if let Some(error) = failed {
            let lane = self.inside.swap_remove(at);
            self.part(lane);
            self.recount();
            self.lane_lost(endpoint, id, &error);
        }
    }

    /// Tells the connections outside the lock that there is something for them.
    #[inline]
    fn kick(&mut self, endpoint: EndpointId) {
        let Some(Some(peer)) = self.st.peers.get(endpoint.0 as usize) else { return };
        for lane in &peer.bulk {
            // One that has as many chunks ahead as it may comes for more when those have gone.
            let full = matches!(self.st.lanes.get(lane.id.0 as usize), Some(Some(state)) if state.is_full());
            let wanted = if full { peer.peer.wants_but_chunks(lane.id) } else { peer.peer.wants(lane.id) };
            if wanted {
                lane.wanted.raise();
                self.kicked = true;
            }
        }
    }

    pub(crate) fn apply(&mut self, endpoint: EndpointId, event: Event) {
        match event {
            Event::Done { op, result, progress, tag } => {
                if let Some(slot) = self.st.ops.op_mut(op).and_then(|op| op.slot.take())
                    && let Some(lane) = self.st.peer(endpoint).and_then(|peer| peer.inside)
                {
                    self.closing.push((lane, slot));
                }
                if self.st.ops.op(op).is_some_and(|op| op.gpu.is_some()) {
                    self.st.let_go(endpoint, |memory| *memory == Memory::Op(op));
                }
                self.st.finish(endpoint, op, result, progress, tag);
            }
            Event::Deliver { arrival, op, len } => self.deliver(endpoint, arrival, op, len),
            Event::DropArrival { arrival } => {
                if let Some(peer) = self.st.peer(endpoint) {
                    peer.take_arrival(arrival);
                }
            }
            Event::Direct { job, memory, role, offer, len } => self.begin(endpoint, job, memory, role, offer, len),
            Event::StopDirect { job } => {
                for active in &mut self.jobs {
                    if active.endpoint == endpoint && active.id == job {
                        active.stopping = true;
                    }
                }
            }
            Event::Imm { region, imm } => {
                self.st.regions.count(region, imm);
                self.st.ops.finished = true;
            }
            Event::Revoke { memory: Memory::Op(op) } => {
                if let Some(op) = self.st.ops.op_mut(op) {
                    op.revoke();
                }
            }
            Event::Revoke { memory: Memory::Region { passive, .. } } => {
                if let Some(peer) = self.st.peer(endpoint) {
                    peer.revoke(passive);
                }
            }
            Event::Released { passive } => {
                self.st
                    .let_go(endpoint, |memory| matches!(memory, Memory::Region { passive: of, .. } if *of == passive));
                if let Some(peer) = self.st.peer(endpoint) {
                    peer.release(passive);
                }
            }
            Event::Acked { lane, chunks } => self.st.acked(lane, chunks),
            Event::Suspect { lane } => self.suspects.push((endpoint, lane)),
            Event::LaneLost { lane, requeued_chunks, requeued_bytes } => {
                let name = self.st.lane(lane).map_or_else(|| "?".into(), |lane| lane.name.clone());
                let now = self.st.now;
                if let Some(peer) = self.st.peer(endpoint).filter(|_| requeued_chunks > 0) {
                    let what = format!("{requeued_chunks} chunks ({requeued_bytes} bytes) went over the others");
                    peer.note(now, format!("lane {name} lost; {what}"));
                }
            }
            Event::Broken { why } => self.kill(endpoint, &why),
            Event::Bye => {
                if let Some(peer) = self.st.peer(endpoint) {
                    peer.alive = false;
                    peer.why_dead = "the peer closed the connection".to_owned();
                }
                self.st.ops.finished = true;
            }
        }
    }

    /// An unexpected message goes to its receive.
    fn deliver(&mut self, endpoint: EndpointId, arrival: u32, id: OpId, len: u32) {
        let Some(bytes) = self.st.peer(endpoint).and_then(|peer| peer.take_arrival(arrival)) else { return };
        let Some(op) = self.st.ops.op(id) else { return };
        let bytes = &bytes[..bytes.len().min(op.len).min(len as usize)];
        let Some(gpu) = op.ordinal() else {
            // SAFETY: `op.ptr` is valid for `op.len` bytes until the operation is finished.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), op.ptr, bytes.len()) };
            return;
        };
        let (dst, now) = (op.ptr as u64, self.st.now);
        if let Err(why) = self.st.copy_in(gpu, dst, bytes)
            && let Some(peer) = self.st.peer(endpoint)
        {
            peer.peer.fail(now, Memory::Op(id), why);
        }
    }

    /// Stagers have finished work of this worker's. With nothing in `done`: slots are free.
    pub(crate) fn staged(&mut self, done: Vec<Completion>) {
        let mut touched = Vec::new();
        for done in done {
            let ticket = done.ticket;
            match self.st.staging.take(ticket) {
                Some(Work::Gate) => self.open_gate(ticket, done.result),
                Some(work) => touched.extend(self.st.stage_done(work, done)),
                // It was given up; a slot that it brings back is free now.
                None => {}
            }
        }
        self.st.supply_all();
        self.st.retry_waiting();
        touched.dedup();
        for endpoint in touched {
            self.settle_aside(endpoint);
        }
        self.st.ops.finished |= self.observers > 0;
        // Whoever sleeps on the lanes has to look at them.
        self.roused |= std::mem::take(&mut self.st.staging.inside);
        self.kicked = true;
    }

    // ---- the worker's end

    /// Tells every peer what it is owed, and says goodbye where nothing is under way.
    pub(crate) fn farewell(&mut self) {
        let now = self.st.tick();
        for index in 0..self.st.peers.len() {
            let id = EndpointId(index as u32);
            let Some(peer) = self.st.peer(id).filter(|peer| peer.alive) else { continue };
            peer.peer.flush();
            peer.peer.close(now);
            self.settle(id);
        }
    }

    /// Ends every endpoint, when the worker closes.
    pub(crate) fn close(&mut self) {
        for index in 0..self.st.peers.len() {
            let id = EndpointId(index as u32);
            if let Some(peer) = self.st.peer(id) {
                if std::mem::replace(&mut peer.alive, false) {
                    peer.why_dead = "the worker is closed".to_owned();
                }
                self.kill(id, "the worker is closed");
            }
        }
    }

    // ---- regions

    /// Ends access to a region: later ones are refused, those under way fail. False: it was ended already.
    pub(crate) fn region_gone(&mut self, region: proto::RegionRef) -> bool {
        if !self.st.regions.retire(region) {
            return false;
        }
        let now = self.st.tick();
        for index in 0..self.st.peers.len() {
            let id = EndpointId(index as u32);
            let Some(peer) = self.st.peer(id) else { continue };
            peer.peer.region_gone(now, region);
            self.settle(id);
        }
        true
    }

    /// Whether a peer's lane or a direct copy may still touch that region.
    pub(crate) fn region_in_use(&self, region: proto::RegionRef) -> bool {
        self.copies_in(region) || self.st.peers.iter().flatten().any(|peer| peer.passives_of(region).next().is_some())
    }
}
