//! Direct copies: this end's part of moving a transfer's bytes with a single copy.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_cuda_ipc::{Link, RowsCopy};
use crossrail_proto as proto;
use crossrail_sight::trace::EventKind;
use crossrail_transport::{Copy, HALVES_MAX, Job, List, Step, copy_between};
use crossrail_types::{EndpointId, LaneId};
use proto::{DirectId, Memory, Offer, Role};

use super::gpu::{GpuMemory, NoteFailed};
use super::lingering::Lingering;
use super::peer_memory::{create_domain, domain, space_of};
use super::peers::Peer;
use super::polled_lanes::{PolledLane, PolledLanes};
use super::rows::part::is_paired;
use super::rows::view::View;
use super::tables::Tables;
use crate::memory::{Space, check_mapped};

/// Bytes that a direct copy may move before everything else gets its turn; those in halves together.
const COPY_BUDGET: usize = 1 << 20;

/// Consecutive copies with one peer whose own half this end makes before it helps with the other half of the oldest
/// one. Each end works ahead on its half, so that a peer that lags by less does not change which memory is in which
/// cache; one that lags further, or does not copy at all, delays a transfer by at most this many copies.
const AHEAD: usize = 8;

/// GPU memory up to this length is copied by the receiving end; longer transfers are left to the sending end. Writing
/// takes half a round trip more, and carries more than reading as soon as a GPU's links are busy in both directions.
const FETCH_MAX: usize = 1 << 20;

/// How long to busy-poll for the completion of a peer that copies into our memory, in nanoseconds.
const LEND_POLL_NS: u64 = 1_000_000_000;

/// How long the announcement of a peer's memory may take.
const ANNOUNCE_LIMIT: Duration = Duration::from_secs(5);

/// All direct copies that this end makes. Protected by the worker's lock.
///
/// A copy is begun at the protocol's request ([`DirectCopies::begin`]), advances in every pass
/// ([`DirectCopies::step`]), and ends by telling the protocol; the caller then settles the endpoint. A copy that the
/// protocol wants stopped ([`DirectCopies::stop`]) ends once nothing touches the memory any more.
#[derive(Default)]
pub(super) struct DirectCopies {
    /// Oldest first.
    copies: VecDeque<ActiveCopy>,
    /// Bytes that this thread has copied in this pass.
    spent: usize,
    /// When it last had copied some, or began the pass.
    copied: Option<Instant>,
    /// Cursors of finished copies in which the peer was still copying a piece.
    closing: Vec<(LaneId, u32)>,
    /// Closed lanes whose peer may be copying.
    pub(super) lingering: Lingering,
}

struct ActiveCopy {
    endpoint: EndpointId,
    lane: LaneId,
    id: DirectId,
    memory: Memory,
    job: Job,
    /// When a copy of GPU memory began, which the GPU makes by itself; `None`: this thread copies.
    began: Option<Instant>,
    copy_ns: u64,
    stopping: bool,
    /// This end has copied its half; the other half is the peer's.
    waits: bool,
    /// The lists to copy between, instead of the job's memory.
    pair: Option<Pair>,
}

impl ActiveCopy {
    fn new(
        (endpoint, lane, id): (EndpointId, LaneId, DirectId),
        memory: Memory,
        space: Space,
        job: Job,
        pair: Option<Pair>,
    ) -> ActiveCopy {
        let began = (space == Space::Gpu).then(Instant::now);
        ActiveCopy { endpoint, lane, id, memory, job, began, copy_ns: 0, stopping: false, waits: false, pair }
    }

    fn space(&self) -> Space {
        Space::of(self.began)
    }

    /// Whether each end copies its own half.
    fn is_in_halves(&self) -> bool {
        self.job.slot.is_some() && self.job.len <= HALVES_MAX && !self.stopping
    }
}

/// Rows of ours and of the peer, as a view pairs them.
enum Pair {
    Host(HostPair),
    Gpu(GpuPair),
}

/// A view of GPU memory: the copy begins once the peer's memory is mapped.
struct GpuPair {
    view: Arc<View>,
    from: u64,
}

impl GpuPair {
    /// Advances the copy, which the GPU makes by itself.
    ///
    /// # Safety
    /// Our rows must be valid, for writing when `job.copy` is `Pull`, until the copy has ended.
    unsafe fn step(&self, link: &mut Link, job: &mut Job, waited: Duration) -> Step {
        if job.state == 0 {
            let (remote, keep) = match self.view.theirs(link) {
                Ok(Some(found)) => found,
                Ok(None) if waited < ANNOUNCE_LIMIT => return Step::Waiting,
                Ok(None) => return Step::Failed("the peer did not announce the memory of its rows".to_owned()),
                Err(why) => return Step::Failed(why),
            };
            let (local, from, len) = (self.view.list.clone(), self.from, job.len as u64);
            let copy = RowsCopy { local, remote, from, len, copy: job.copy, keep };
            // SAFETY: by the contract; the peer's rows are mapped for as long as `keep` is held.
            match unsafe { link.start_rows(copy) } {
                Ok(state) => job.state = state,
                Err(why) => return Step::Failed(why),
            }
        }
        // SAFETY: as above.
        let step = unsafe { link.step_rows(job.state) };
        if step == Step::Done {
            job.moved = job.len;
        }
        step
    }
}

/// Rows of host memory, those of the peer mapped here.
struct HostPair {
    own: Arc<List>,
    theirs: Arc<List>,
    /// Where the copy begins in both.
    from: u64,
}

impl HostPair {
    /// Copies about a [`COPY_BUDGET`].
    ///
    /// # Safety
    /// As [`Domain::step`], for our rows.
    unsafe fn step(&self, job: &mut Job) -> Step {
        let len = COPY_BUDGET.min(job.len - job.moved) as u64;
        let at = self.from + job.moved as u64;
        let (own, theirs) = ((&*self.own, at), (&*self.theirs, at));
        let (to, from) = if job.copy == Copy::Pull { (own, theirs) } else { (theirs, own) };
        // SAFETY: by the contract; the peer's rows stay mapped while its view does. It may write there meanwhile.
        unsafe { copy_between(to, from, len) };
        job.moved += len as usize;
        if job.moved == job.len { Step::Done } else { Step::Moved(len as usize) }
    }
}

/// What the protocol asks for.
pub(super) struct Request {
    pub(super) endpoint: EndpointId,
    pub(super) id: DirectId,
    pub(super) memory: Memory,
    pub(super) role: Role,
    pub(super) offer: Offer,
    pub(super) len: u64,
}

/// What [`DirectCopies::begin`] leaves to the caller.
pub(super) enum Started {
    /// Nothing.
    Done,
    /// A copy is in flight whose completion no event reports: a thread that sleeps on the lanes must poll it instead.
    Copying,
    /// The peer copies; its messages are to be flushed.
    Lent(Result<(), NoteFailed>),
}

/// What copies use while they advance.
pub(super) struct Context<'a> {
    pub(super) tables: &'a mut Tables,
    pub(super) gpu: &'a mut GpuMemory,
    pub(super) polled: &'a mut PolledLanes,
}

impl Context<'_> {
    fn failed(&mut self, endpoint: EndpointId, id: DirectId) {
        let now = self.tables.clock.now();
        if let Some(peer) = self.tables.peers.get_mut(endpoint) {
            peer.protocol.direct_failed(now, id);
        }
    }

    /// A copy was not begun.
    fn unreachable(&mut self, request: &Request, space: Space, why: &str) {
        if space == Space::Gpu {
            self.warn_gpu(request.endpoint, request.memory, request.role == Role::Help, why);
        }
        self.failed(request.endpoint, request.id);
        let tables = &mut self.tables;
        let Some(peer) = tables.peers.get_mut(request.endpoint) else { return };
        if space == Space::Host && peer.warns_of_direct() {
            let name = peer.name();
            tables.log.warn(format_args!("{name}: no single copy ({why}); falling back to the shared ring"));
        }
    }

    /// Logs that GPU memory was not copied. A failed push is not an error: the peer falls back to pulling.
    fn warn_gpu(&mut self, endpoint: EndpointId, memory: Memory, push: bool, why: &str) {
        let Context { tables, gpu, .. } = self;
        if !(push && matches!(memory, Memory::Op(_))) {
            return gpu.warn(tables, endpoint, why);
        }
        let name = tables.peers.name(endpoint);
        tables.log.info(format_args!("{name}: cannot write its GPU memory ({why}); falling back to reads by the peer"));
    }
}

impl DirectCopies {
    pub(super) fn is_empty(&self) -> bool {
        self.copies.is_empty()
    }

    /// Whether there is anything to do in a pass.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.copies.is_empty() && self.closing.is_empty()
    }

    /// True while a copy is made with that peer, by either end.
    pub(super) fn is_with(&self, endpoint: EndpointId) -> bool {
        self.copies.iter().any(|copy| copy.endpoint == endpoint) || self.lingering.is_with(endpoint)
    }

    /// Whether a copy still touches that region.
    pub(super) fn uses_region(&self, region: proto::RegionRef) -> bool {
        let of = |memory: &Memory| matches!(memory, Memory::Region { region: of, .. } if *of == region);
        self.copies.iter().any(|copy| of(&copy.memory))
    }

    /// The peers with which a copy still touches one of those regions.
    pub(super) fn peers_at<'a>(&'a self, regions: &'a [proto::RegionRef]) -> impl Iterator<Item = EndpointId> + 'a {
        let of = |memory: &Memory| matches!(memory, Memory::Region { region, .. } if regions.contains(region));
        self.copies.iter().filter(move |copy| of(&copy.memory)).map(|copy| copy.endpoint)
    }

    /// Begins a copy, or has the protocol know that it cannot be made.
    pub(super) fn begin(&mut self, context: &mut Context<'_>, request: Request) -> Started {
        let Request { endpoint, id, memory, role, ref offer, len } = request;
        if is_paired(offer) {
            return self.begin_pair(context, &request);
        }
        let space = space_of(&offer.descriptor);
        let lane = context.tables.peers.get(endpoint).and_then(|peer| peer.message_lane());
        // There is no direct copy between GPU memory and host memory.
        let extent = context.tables.extent(memory);
        let local = extent.filter(|(_, have, owner)| *have >= len && Space::of(*owner) == space).map(|(ptr, ..)| ptr);
        let domain = local
            .and_then(|_| create_domain(context.tables, (context.gpu, context.polled), (endpoint, lane), space).ok());
        let (Some(lane), Some(local), Some(domain)) = (lane, local, domain) else {
            context.failed(endpoint, id);
            return Started::Done;
        };
        let len = len as usize;
        let reached = domain.reach(&offer.descriptor, len);
        let ours = match (&reached, role, offer.slot) {
            (Ok(_), Role::Pull, Some(_)) => domain.describe(local, len).ok().map(|(descriptor, _)| descriptor),
            _ => None,
        };
        let kind = match reached {
            Ok(kind) => kind,
            Err(why) => {
                context.unreachable(&request, space, &why);
                return Started::Done;
            }
        };
        if let Memory::Op(op) = memory
            && let Some(op) = context.tables.operations.op_mut(op)
        {
            op.set_direct(kind);
        }
        if space == Space::Gpu
            && role == Role::Pull
            && len > FETCH_MAX
            && let Some(lent) = lend(context, &request, (local, len))
        {
            return Started::Lent(lent);
        }
        let now = context.tables.clock.now();
        if let (Some(descriptor), Some(peer)) = (ours, context.tables.peers.get_mut(endpoint)) {
            peer.protocol.direct_invite(now, id, descriptor);
        }
        let copy = if role == Role::Pull { Copy::Pull } else { Copy::Push };
        let job = Job { slot: offer.slot, local, remote: offer.descriptor, len, copy, moved: 0, state: 0, helps: true };
        let alone = offer.slot.is_none();
        self.copies.push_back(ActiveCopy::new((endpoint, lane, id), memory, space, job, None));
        if alone {
            self.copied = Some(Instant::now());
            self.step_one(context, self.copies.len() - 1, COPY_BUDGET);
        }
        Started::Copying
    }

    /// [`DirectCopies::begin`] between the lists of a view. What cannot be copied is carried.
    fn begin_pair(&mut self, context: &mut Context<'_>, request: &Request) -> Started {
        let Request { endpoint, id, memory, role, offer, len } = request;
        let Memory::Region { region, base, .. } = *memory else {
            context.failed(*endpoint, *id);
            return Started::Done;
        };
        let view = context.tables.hosted.view(region).cloned();
        let lane = context.tables.peers.get(*endpoint).and_then(|peer| peer.message_lane());
        let space = Space::of(view.as_ref().and_then(|view| view.gpu()));
        let domain = create_domain(context.tables, (context.gpu, context.polled), (*endpoint, lane), space).ok();
        let pair = view.zip(domain).and_then(|(view, domain)| match space {
            Space::Gpu => Some(Pair::Gpu(GpuPair { view, from: base })),
            Space::Host => {
                let (own, (theirs, _)) = (view.list.clone(), view.theirs(domain).ok()??);
                Some(Pair::Host(HostPair { own, theirs, from: base }))
            }
        });
        let (Some(lane), Some(pair)) = (lane, pair) else {
            context.failed(*endpoint, *id);
            return Started::Done;
        };
        let copy = if *role == Role::Pull { Copy::Pull } else { Copy::Push };
        let (local, remote, len) = (std::ptr::null_mut(), offer.descriptor, *len as usize);
        let job = Job { slot: None, local, remote, len, copy, moved: 0, state: 0, helps: true };
        self.copies.push_back(ActiveCopy::new((*endpoint, lane, *id), *memory, space, job, Some(pair)));
        self.copied = Some(Instant::now());
        self.step_one(context, self.copies.len() - 1, COPY_BUDGET);
        Started::Copying
    }

    /// The protocol wants that copy stopped.
    pub(super) fn stop(&mut self, endpoint: EndpointId, id: DirectId) {
        for copy in &mut self.copies {
            if copy.endpoint == endpoint && copy.id == id {
                copy.stopping = true;
            }
        }
    }

    /// The cursor of an operation that has ended is to be closed, once the peer does not copy through it any more.
    pub(super) fn close_cursor(&mut self, lane: LaneId, cursor: u32) {
        self.closing.push((lane, cursor));
    }

    /// Advances the copies; whether anything moved, and the endpoints to settle. `crowded`: threads take turns on this
    /// processor, so a half left to the peer would wait for the peer's turn.
    pub(super) fn step(&mut self, context: &mut Context<'_>, crowded: bool) -> (bool, Vec<EndpointId>) {
        let mut ended = Vec::new();
        (self.copied, self.spent) = (Some(Instant::now()), 0);
        let moved = self.step_row(context, crowded) | self.step_each(context, false, &mut ended)
            || self.step_each(context, true, &mut ended);
        self.closing.retain(|(lane, cursor)| {
            let Some(domain) = context.polled.domain(*lane) else { return false };
            if domain.stop(*cursor) {
                domain.close(*cursor);
                return false;
            }
            true
        });
        (moved, ended)
    }

    /// Advances every copy, of those that are divided in halves this end's half of the oldest ones; with `helps` only
    /// one of those, by a piece of the other half. Whether anything moved.
    fn step_each(&mut self, context: &mut Context<'_>, helps: bool, ended: &mut Vec<EndpointId>) -> bool {
        let (mut moved, mut at) = (false, 0);
        let (mut tried, mut waits) = ((None, 0), None);
        let most = if helps { 1 } else { COPY_BUDGET };
        while at < self.copies.len() {
            let (before, active) = (self.copies.len(), &mut self.copies[at]);
            let endpoint = active.endpoint;
            let mut budget = COPY_BUDGET;
            if active.is_in_halves() {
                budget = most.saturating_sub(self.spent);
                // In a row with one peer: one that has stopped does not delay copies with others.
                let row = if tried.0 == Some(endpoint) { tried.1 } else { 0 };
                if row == AHEAD || budget == 0 {
                    at += 1;
                    continue;
                }
                tried = (Some(endpoint), row + 1);
                // The peer goes by age, too.
                if active.waits && waits == tried.0 && !helps {
                    at += 1;
                    continue;
                }
                active.job.helps = helps;
            } else if helps {
                at += 1;
                continue;
            }
            moved |= self.step_one(context, at, budget);
            if self.copies.len() < before {
                if ended.last() != Some(&endpoint) {
                    ended.push(endpoint);
                }
            } else {
                if self.copies[at].waits {
                    waits = Some(endpoint);
                }
                at += 1;
            }
        }
        moved
    }

    /// Advances this end's halves of the oldest copies with the same peer at once, or both halves, where its link can.
    /// Whether anything moved.
    fn step_row(&mut self, context: &mut Context<'_>, both: bool) -> bool {
        if self.copies.len() < 2 {
            return false;
        }
        let Some((endpoint, lane)) = self.copies.iter().find(|of| of.is_in_halves()).map(|of| (of.endpoint, of.lane))
        else {
            return false;
        };
        let Some(domain) = context.polled.domain(lane) else { return false };
        let (mut places, mut row) = ([0; AHEAD], Vec::with_capacity(AHEAD));
        for (at, of) in self.copies.iter_mut().enumerate() {
            if row.len() < AHEAD && of.is_in_halves() && of.endpoint == endpoint && of.lane == lane {
                (of.job.helps, places[row.len()]) = (both, at);
                row.push(&mut of.job);
            }
        }
        let count = row.len();
        // SAFETY: as in `step_one`, for every job.
        match unsafe { domain.step_row(&mut row) } {
            Ok(0) => false,
            Ok(bytes) => {
                self.spent = bytes;
                let each = self.lap() / count as u64;
                places[..count].iter().for_each(|at| self.copies[*at].copy_ns += each);
                true
            }
            Err((number, step)) => self.advanced(context, places[number], step),
        }
    }

    /// Advances one copy, which is removed when it is over. Whether anything moved.
    fn step_one(&mut self, context: &mut Context<'_>, at: usize, budget: usize) -> bool {
        let active = &mut self.copies[at];
        let (endpoint, space, state) = (active.endpoint, active.space(), active.job.state);
        if active.stopping && space == Space::Gpu {
            let stopped = context.gpu.existing_link(endpoint).is_none_or(|link| link.stopped(state));
            if stopped {
                self.end(context, at, false);
            }
            return stopped;
        }
        if let Some(Pair::Gpu(pair)) = &active.pair {
            let waited = active.began.map_or(Duration::ZERO, |began| began.elapsed());
            let step = match context.gpu.existing_link(endpoint) {
                // SAFETY: our rows are those of regions that the protocol has not released, and are not until the copy
                // ends.
                Some(link) => unsafe { pair.step(link, &mut active.job, waited) },
                None => Step::Failed("the link to the peer's GPU memory has ended".to_owned()),
            };
            return self.advanced(context, at, step);
        }
        let Some(domain) = domain((context.gpu, context.polled), (endpoint, Some(active.lane)), space) else {
            self.end(context, at, false);
            return true;
        };
        if active.stopping {
            let stopped = active.job.slot.is_none_or(|cursor| domain.stop(cursor));
            if stopped {
                self.end(context, at, false);
            }
            return stopped;
        }
        let before = active.job.moved;
        // SAFETY: `local` is the memory of an operation or a region that the protocol has not released: it is valid for
        // `len` bytes until the copy ends, which it does before `Done`, `Released` or `deregister` return.
        let step = unsafe {
            match &active.pair {
                Some(Pair::Host(pair)) => pair.step(&mut active.job),
                _ => domain.step(&mut active.job, budget),
            }
        };
        let bytes = active.job.moved - before;
        if space == Space::Host && bytes > 0 {
            self.spent += bytes;
            let took = self.lap();
            self.copies[at].copy_ns += took;
        }
        self.advanced(context, at, step)
    }

    /// Nanoseconds since this thread had last copied something in this pass.
    fn lap(&mut self) -> u64 {
        let now = Instant::now();
        self.copied.replace(now).map_or(0, |before| (now - before).as_nanos() as u64)
    }

    /// Acts on a step of a copy. Whether anything moved.
    fn advanced(&mut self, context: &mut Context<'_>, at: usize, step: Step) -> bool {
        let active = &mut self.copies[at];
        let endpoint = active.endpoint;
        match step {
            Step::Moved(bytes) => bytes > 0,
            Step::Waiting => {
                active.waits = true;
                false
            }
            Step::Done => {
                active.copy_ns += active.began.map_or(0, |began| began.elapsed().as_nanos() as u64);
                self.end(context, at, true);
                true
            }
            Step::Failed(why) | Step::Unmapped(why) if active.space() == Space::Gpu => {
                let (memory, push) = (active.memory, active.job.copy == Copy::Push);
                context.warn_gpu(endpoint, memory, push, &why);
                self.end(context, at, false);
                true
            }
            Step::Unmapped(why) => {
                let (memory, local, len) = (active.memory, active.job.local as usize, active.job.len);
                let here = check_mapped("copy", local, len).is_err();
                let end = if here { "at this end" } else { "at the peer" };
                context.tables.fail_memory(endpoint, memory, format!("{end} it is not mapped any more ({why})"));
                self.give_up(context, at)
            }
            Step::Failed(why) => {
                let name = context.tables.peers.name(endpoint);
                let log = context.tables.log;
                log.warn(format_args!("{name}: a single copy failed ({why}); the rest goes in chunks"));
                self.give_up(context, at)
            }
        }
    }

    /// A copy of host memory has failed. Whether it is over.
    fn give_up(&mut self, context: &mut Context<'_>, at: usize) -> bool {
        // What this end has claimed is not copied: the peer must not wait for it.
        let active = &mut self.copies[at];
        let (cursor, domain) = (active.job.slot, context.polled.domain(active.lane));
        if cursor.zip(domain).is_some_and(|(cursor, domain)| !domain.stop(cursor)) {
            active.stopping = true;
            return false;
        }
        self.end(context, at, false);
        true
    }

    fn end(&mut self, context: &mut Context<'_>, at: usize, done: bool) {
        let Some(active) = self.copies.remove(at) else { return };
        let tables = &mut context.tables;
        let now = tables.clock.read();
        let ordinal = tables.extent(active.memory).and_then(|(.., gpu)| gpu);
        if done {
            tables.trace_ended(active.endpoint, EventKind::Copied, active.copy_ns, active.job.moved as u64);
        }
        if let Some(peer) = tables.peers.get_mut(active.endpoint) {
            if done {
                peer.copied.entry(ordinal).or_default().add(active.job.moved as u64, active.copy_ns);
                peer.protocol.direct_done(now, active.id, active.job.moved as u64, active.copy_ns);
            } else {
                peer.protocol.direct_failed(now, active.id);
            }
        }
    }

    /// Abandons the selected copies, once those of GPU memory no longer touch it.
    fn abandon(&mut self, gpu: &mut GpuMemory, which: impl Fn(&ActiveCopy) -> bool) {
        let (gone, kept): (VecDeque<_>, VecDeque<_>) = std::mem::take(&mut self.copies).into_iter().partition(which);
        self.copies = kept;
        for copy in gone.iter().filter(|copy| copy.space() == Space::Gpu) {
            if let Some(link) = gpu.existing_link(copy.endpoint) {
                link.ended(copy.job.state);
            }
        }
    }

    /// Abandons all copies with that peer.
    pub(super) fn abandon_endpoint(&mut self, gpu: &mut GpuMemory, endpoint: EndpointId) {
        self.abandon(gpu, |copy| copy.endpoint == endpoint);
    }

    /// Abandons all copies over that lane, which has ended.
    pub(super) fn abandon_lane(&mut self, gpu: &mut GpuMemory, lane: LaneId) {
        self.abandon(gpu, |copy| copy.lane == lane);
        self.closing.retain(|(of, _)| *of != lane);
    }

    /// Closes a lane polled under the lock. Our copies end before the lane notifies the peer of that; memory that
    /// the peer may be copying from or to stays lent until the peer has ended its side ([`Lingering`]).
    pub(super) fn close_lane(&mut self, tables: &mut Tables, gpu: &mut GpuMemory, polled: PolledLane) {
        let PolledLane { id, endpoint, lane, .. } = polled;
        self.abandon(gpu, |copy| copy.endpoint == endpoint && copy.lane == id);
        let exposed = tables.peers.get(endpoint).map_or_else(Vec::new, |peer| peer.protocol.exposed());
        let loans = exposed.into_iter().filter_map(|memory| tables.loan(endpoint, memory));
        let kept = loans.map(|loan| loan.hold(id)).collect();
        self.lingering.close((endpoint, tables.peers.name(endpoint)), lane, kept);
    }
}

/// Whether a peer was left to copy into memory of a GPU of ours, not long ago.
pub(super) fn is_lending(tables: &Tables, gpu: &GpuMemory) -> bool {
    if !gpu.has_links() {
        return false;
    }
    let now = tables.clock.now();
    let lends = |peer: &Peer| {
        let since = peer.protocol.lending();
        gpu.is_linked(peer.protocol.id()) && since.is_some_and(|since| now.since(since) < LEND_POLL_NS)
    };
    tables.peers.iter().any(lends)
}

/// Leaves a copy into GPU memory of ours to the peer. `None`: this end has to copy.
fn lend(
    context: &mut Context<'_>,
    request: &Request,
    (local, len): (*mut u8, usize),
) -> Option<Result<(), NoteFailed>> {
    let (endpoint, id, memory) = (request.endpoint, request.id, request.memory);
    let Context { tables, gpu, polled } = context;
    let (descriptor, _) = domain((gpu, polled), (endpoint, None), Space::Gpu)?.describe(local, len).ok()?;
    let now = tables.clock.now();
    if !tables.peers.get_mut(endpoint).is_some_and(|peer| peer.protocol.direct_lend(now, id, descriptor)) {
        return None;
    }
    tables.hold_region(endpoint, memory);
    Some(gpu.pass_notes(tables, polled, endpoint).map(drop))
}
