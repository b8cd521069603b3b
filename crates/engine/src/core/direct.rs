//! Direct copies: one end's part of moving a transfer's bytes with a single copy.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use crossrail_cuda_ipc::Link;
use crossrail_proto as proto;
use crossrail_transport::{Copy, Direct as _, Job, Step};
use crossrail_types::{EndpointId, LaneId};
use proto::{DirectId, Memory, Offer, Role};

use super::gpu::{self, Reach};
use super::tables::PeerState;
use super::{Core, Inside};

/// Bytes a direct copy may move before everything else gets its turn.
const COPY_BUDGET: usize = 1 << 20;

/// Up to so many bytes of GPU memory the receiving end copies; from there on it leaves that to the sending end. Writing
/// takes half a round trip more and carries more than reading does as soon as a GPU's links are busy both ways.
const FETCHED: usize = 1 << 20;
/// So long this end looks for the word of a peer that copies into its memory without a pause, in nanoseconds.
const AWAKE: u64 = 1_000_000_000;

/// The longest that a peer which is given up may take to stop copying into memory of ours. One that dies takes as long as
/// the driver takes to clean up behind it.
const PARTING: Duration = Duration::from_secs(2);

/// A copy under way.
pub(crate) struct Active {
    pub(crate) endpoint: EndpointId,
    pub(crate) lane: LaneId,
    pub(crate) id: DirectId,
    memory: Memory,
    job: Job,
    /// When a copy of GPU memory began, which goes on by itself; `None`: this thread copies.
    began: Option<Instant>,
    copy_ns: u64,
    pub(crate) stopping: bool,
}

impl Core {
    /// The protocol asks for a copy.
    pub(crate) fn begin(
        &mut self,
        endpoint: EndpointId,
        id: DirectId,
        memory: Memory,
        role: Role,
        offer: Offer,
        len: u64,
    ) {
        let now = self.st.now;
        let lane = self.st.peer(endpoint).and_then(|peer| peer.inside);
        let named = Link::knows(&offer.descriptor);
        // Between a GPU's memory and the host's there is no direct copy.
        let span = self.st.span(memory).filter(|(_, have, gpu)| *have >= len && gpu.is_some() == named);
        if named && span.is_some() {
            // Made here if it is not there; if that fails, so does what follows.
            let _ = self.link(endpoint);
        }
        let direct = lane.and_then(|id| gpu::direct(&mut self.inside, &mut self.st, endpoint, id, named));
        let (Some(lane), Some((local, ..)), Some(direct)) = (lane, span, direct) else {
            if let Some(peer) = self.st.peer(endpoint) {
                peer.peer.direct_failed(now, id);
            }
            return;
        };
        let len = len as usize;
        let reached = direct.reach(&offer.descriptor, len);
        let mine = match (&reached, role, offer.slot) {
            (Ok(_), Role::Pull, Some(_)) => direct.describe(local, len).map(|(descriptor, _)| descriptor),
            _ => None,
        };
        let kind = match reached {
            Ok(kind) => kind,
            Err(why) => return self.unreached(endpoint, id, (memory, role), named, &why),
        };
        if let Memory::Op(op) = memory
            && let Some(op) = self.st.ops.op_mut(op)
        {
            op.direct = Some(kind);
        }
        if named && role == Role::Pull && len > FETCHED && self.lend(endpoint, id, memory, (local, len)) {
            return;
        }
        if let (Some(descriptor), Some(peer)) = (mine, self.st.peer(endpoint)) {
            peer.peer.direct_invite(now, id, descriptor);
        }
        let copy = if role == Role::Pull { Copy::Pull } else { Copy::Push };
        let job = Job { slot: offer.slot, local, remote: offer.descriptor, len, copy, moved: 0, state: 0 };
        let began = named.then(Instant::now);
        self.jobs.push(Active { endpoint, lane, id, memory, job, began, copy_ns: 0, stopping: false });
        if offer.slot.is_none() {
            self.step(self.jobs.len() - 1);
        }
        // Who sleeps on the lanes has to look at it: no event tells of a copy.
        self.roused |= self.armed;
        self.kicked |= self.armed;
    }

    /// Leaves a copy into memory of a GPU of ours to the peer. False: this end has to copy.
    fn lend(&mut self, endpoint: EndpointId, id: DirectId, memory: Memory, (local, len): (*mut u8, usize)) -> bool {
        let now = self.st.now;
        let described = self.st.peer(endpoint).and_then(|peer| peer.reach.link()?.describe(local, len));
        let Some((descriptor, _)) = described else { return false };
        if !self.st.peer(endpoint).is_some_and(|peer| peer.peer.direct_lend(now, id, descriptor)) {
            return false;
        }
        if let Memory::Region { .. } = memory {
            // So that it is known to be in use until the protocol releases it.
            self.st.grant(endpoint, memory);
        }
        self.pass_notes(endpoint);
        // At once: dozens may be behind this one, each of which asks the driver, and the peer's links are idle until then.
        self.flush(endpoint);
        true
    }

    /// Whether a peer was left to copy into memory of a GPU of ours, not long ago.
    pub(crate) fn lends(&self) -> bool {
        let lends = |peer: &PeerState| match (&peer.reach, peer.peer.lending()) {
            (Reach::By(_), Some(since)) => self.st.now.since(since) < AWAKE,
            _ => false,
        };
        self.links > 0 && self.st.peers.iter().flatten().any(|peer| lends(peer))
    }

    /// A copy is not begun.
    fn unreached(&mut self, endpoint: EndpointId, id: DirectId, (memory, role): (Memory, Role), gpu: bool, why: &str) {
        if gpu {
            self.no_copy(endpoint, memory, role == Role::Help, why);
        }
        let now = self.st.now;
        let Some(peer) = self.st.peer(endpoint) else { return };
        peer.peer.direct_failed(now, id);
        if !gpu && !std::mem::replace(&mut peer.warned_direct, true) {
            let name = peer.name().to_owned();
            self.st.log.warn(format_args!("{name}: no single copy ({why}); through the shared ring instead"));
        }
    }

    /// Says that GPU memory was not copied. A push that the peer left to this end is nobody's last hope.
    fn no_copy(&mut self, endpoint: EndpointId, memory: Memory, push: bool, why: &str) {
        if !(push && matches!(memory, Memory::Op(_))) {
            return self.warn_gpu(endpoint, why);
        }
        let name = self.st.peer(endpoint).map_or_else(|| "?".to_owned(), |peer| peer.name().to_owned());
        self.st.log.info(format_args!("{name}: its GPU memory cannot be written ({why}); it reads ours instead"));
    }

    /// Whether a direct copy still touches that region.
    pub(crate) fn copies_in(&self, region: proto::RegionRef) -> bool {
        self.jobs.iter().any(|job| matches!(job.memory, Memory::Region { region: of, .. } if of == region))
    }

    /// One step of every copy; whether anything moved.
    pub(crate) fn step_jobs(&mut self) -> bool {
        let mut moved = false;
        let mut at = 0;
        while at < self.jobs.len() {
            let before = self.jobs.len();
            moved |= self.step(at);
            if self.jobs.len() >= before {
                at += 1;
            }
        }
        let Core { closing, inside, .. } = self;
        closing.retain(|(lane, slot)| {
            let direct = inside.iter_mut().find(|inside| inside.id == *lane).and_then(|inside| inside.lane.direct());
            let Some(direct) = direct else { return false };
            if direct.stop(*slot) {
                direct.close(*slot);
                return false;
            }
            true
        });
        moved
    }

    /// One step of one copy; the job is removed when it is over.
    fn step(&mut self, at: usize) -> bool {
        let active = &mut self.jobs[at];
        let (endpoint, gpu) = (active.endpoint, active.began.is_some());
        let direct = gpu::direct(&mut self.inside, &mut self.st, endpoint, active.lane, gpu);
        let Some(direct) = direct else {
            self.end(at, false);
            return true;
        };
        if active.stopping && gpu {
            let state = active.job.state;
            let link = self.st.peer(endpoint).and_then(|peer| peer.reach.link());
            let quiet = link.is_none_or(|link| link.stopped(state));
            if quiet {
                self.end(at, false);
            }
            return quiet;
        }
        if active.stopping {
            let quiet = active.job.slot.is_none_or(|slot| direct.stop(slot));
            if quiet {
                self.end(at, false);
            }
            return quiet;
        }
        let started = Instant::now();
        // SAFETY: `local` is the memory of an operation or a region that the protocol has not let go of: it is valid
        // for `len` bytes until the job ends, which it does before `Done`, `Released` or `deregister` return.
        let step = unsafe { direct.step(&mut active.job, COPY_BUDGET) };
        match step {
            Step::Moved(bytes) => {
                active.copy_ns += started.elapsed().as_nanos() as u64;
                bytes > 0
            }
            Step::Waiting => false,
            Step::Done => {
                active.copy_ns += active.began.unwrap_or(started).elapsed().as_nanos() as u64;
                self.end(at, true);
                true
            }
            Step::Failed(why) if gpu => {
                let (memory, push) = (active.memory, active.job.copy == Copy::Push);
                self.no_copy(endpoint, memory, push, &why);
                self.end(at, false);
                true
            }
            Step::Failed(why) => {
                let (endpoint, slot) = (active.endpoint, active.job.slot);
                // What this end has claimed is not copied: nobody may wait for it.
                if slot.is_some_and(|slot| !direct.stop(slot)) {
                    active.stopping = true;
                    return false;
                }
                let name = self.st.peer(endpoint).map_or_else(|| "?".to_owned(), |peer| peer.name().to_owned());
                self.st.log.warn(format_args!("{name}: a single copy failed ({why}); the rest goes in chunks"));
                self.end(at, false);
                true
            }
        }
    }

    /// Gives copies up, once those of GPU memory no longer touch it.
    pub(crate) fn drop_jobs(&mut self, which: impl Fn(&Active) -> bool) {
        let (gone, kept) = std::mem::take(&mut self.jobs).into_iter().partition(which);
        self.jobs = kept;
        let gone: Vec<Active> = gone;
        for active in gone.iter().filter(|active| active.began.is_some()) {
            if let Some(link) = self.st.peer(active.endpoint).and_then(|peer| peer.reach.link()) {
                link.ended(active.job.state);
            }
        }
    }

    /// Closes a lane polled here, once no direct copy touches memory any more: ours have ended before the lane says to the
    /// peer that they have, and those that were left to the peer before it is closed.
    pub(crate) fn part(&mut self, inside: Inside) {
        let Inside { id, endpoint, mut lane, .. } = inside;
        self.drop_jobs(|job| job.endpoint == endpoint && job.lane == id);
        let Some(peer) = self.st.peer(endpoint) else { return };
        let lent = matches!(peer.reach, Reach::By(_)) && peer.peer.lending().is_some();
        if lent && !lane.part(PARTING) {
            let name = peer.name().to_owned();
            self.st.log.error(format_args!(
                "{name}: it may write for a while yet into GPU memory that it was to write: nobody says it has stopped"
            ));
        }
    }

    fn end(&mut self, at: usize, done: bool) {
        let active = self.jobs.swap_remove(at);
        let now = self.st.tick();
        if let Some(peer) = self.st.peer(active.endpoint) {
            if done {
                peer.peer.direct_done(now, active.id, active.job.moved as u64, active.copy_ns);
            } else {
                peer.peer.direct_failed(now, active.id);
            }
        }
        self.settle(active.endpoint);
    }
}
