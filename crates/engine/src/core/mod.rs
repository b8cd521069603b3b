//! The state under one worker's lock, and one pass of progress over it.
//!
//! ```text
//! Core            starts and cancels operations; one pass of progress; the end
//!   Transfers     polls lanes, carries out what the protocol decides, ends lanes and peers
//!     Tables      Operations, Peers, Lanes, Regions: what ids refer to
//!     GpuMemory   staging, IPC links, operations that wait for streams
//!     PolledLanes the lanes polled under the lock
//!     DirectCopies  copies that this end makes
//!     WakeUps     who makes progress, and whom to wake
//! ```
//!
//! None of the five holds another: [`Transfers`] lends them to each other for one call.
//! [`DataPath`](data_path::DataPath) is what it lends to a lane that is polled: the tables and GPU memory.

mod bulk_lane;
mod chunk_queue;
mod clock;
mod collecting;
mod data_path;
mod direct;
mod failure;
pub(crate) mod gpu;
mod id_table;
mod lanes;
mod left;
mod lingering;
pub(crate) mod lists;
mod message_rail;
mod names;
mod operations;
mod outcome;
mod peer_memory;
mod peers;
mod polled_lanes;
mod receipt;
mod resting;
mod returns;
pub(crate) mod rows;
mod sample;
mod submit;
mod tables;
mod totals;
mod transfers;
mod wake_ups;

use std::sync::Arc;
use std::time::Instant;

use crossrail_proto as proto;
use crossrail_shm::Arena;
use crossrail_types::{EndpointId, Log, Reason};

pub(crate) use self::bulk_lane::{Among, BulkLane, Flag, LaneEnd, READABLE, WRITABLE};
pub(crate) use self::collecting::{outcome, render};
use self::gpu::{GpuMemory, Inbox};
pub(crate) use self::lanes::LaneRecord;
pub(crate) use self::lingering::{Lingering, still_used};
pub(crate) use self::operations::{CALLBACKS, FINISHED, FOLLOW_UPS, OpStatus, Operations, Received, Wanted};
pub(crate) use self::outcome::{OpKind, Submission, gone};
pub(crate) use self::peers::{Claim, Peer, Peers};
pub(crate) use self::receipt::{Callback, Collected};
pub use self::receipt::{HeldTimes, LaneShare, Protocol, Receipt};
use self::resting::Rounds;
use self::returns::Owner;
pub(crate) use self::returns::RETURN_MAX;
pub(crate) use self::sample::{EndedLane, LaneSample, PeerSample, Sample, Since};
pub(crate) use self::submit::Early;
use self::tables::Tables;
use self::transfers::PollResult;
pub(crate) use self::transfers::{Deferred, LostRail, Move, Transfers};
pub(crate) use self::wake_ups::WakeUps;

/// Passes between two reads of the clock.
const CLOCK_EVERY: u32 = 64;
/// Idle passes between two reads of the peer's count of delivered messages, unless a caller waits for it: each read
/// takes the cache line away from the peer, whose next message would be late by as much.
const COUNTS_EVERY: u32 = 64;
/// Passes between two polls of idle sockets while shared-memory lanes are being polled.
const SOCKETS_EVERY: u32 = 16;

/// Everything that one worker's lock protects.
///
/// Any method may be called with the lock held. The rules:
///
/// - After every call into the protocol ([`Peer`]) the endpoint is settled ([`Transfers::settle`]): the protocol's
///   decisions are queued until then.
/// - Nothing here waits, except for a GPU that stops touching memory which is about to be the user's again.
/// - What must be done without the lock (callbacks, wake-ups, lost rails) is left for
///   [`Progress::after`](crate::progress::Progress::after), which releases the lock.
pub(crate) struct Core {
    transfers: Transfers,
    /// Connections are polled by threads of their own.
    threads: bool,
    passes: u32,
    rounds: Rounds,
    closed: bool,
}

impl Core {
    pub(crate) fn new(log: Log, arena: Arc<Arena>, inbox: Inbox) -> Core {
        let transfers = Transfers::new(Tables::new(log, arena), GpuMemory::new(inbox));
        Core { transfers, threads: false, passes: 0, rounds: Rounds::default(), closed: false }
    }

    // ---- the parts

    /// Operations, peers and lanes in motion.
    #[inline]
    pub(crate) fn transfers(&mut self) -> &mut Transfers {
        &mut self.transfers
    }

    #[inline]
    pub(crate) fn operations(&mut self) -> &mut Operations {
        &mut self.transfers.tables.operations
    }

    #[inline]
    pub(crate) fn peers(&mut self) -> &mut Peers {
        &mut self.transfers.tables.peers
    }

    #[inline]
    pub(crate) fn wake_ups(&mut self) -> &mut WakeUps {
        &mut self.transfers.wake_ups
    }

    /// When the clock was last read.
    #[inline]
    pub(crate) fn now(&self) -> proto::Time {
        self.transfers.tables.clock.now()
    }

    /// Reads the clock.
    pub(crate) fn read_clock(&mut self) -> proto::Time {
        self.transfers.tables.clock.read()
    }

    pub(crate) fn take_deferred(&mut self) -> Deferred {
        std::mem::take(&mut self.transfers.deferred)
    }

    #[inline]
    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Connections are polled by threads of their own from now on.
    pub(crate) fn use_threads(&mut self) {
        self.threads = true;
    }

    /// Connections are polled by threads of their own.
    #[inline]
    pub(crate) fn has_threads(&self) -> bool {
        self.threads
    }

    // ---- progress

    /// Polls every lane under the lock once and acts on what arrived; whether anything moved. `probe`: poll also
    /// sockets of which epoll has reported nothing. `ask`: a caller waits for a send to be confirmed.
    #[inline]
    pub(crate) fn pass(&mut self, probe: bool, ask: bool) -> bool {
        self.passes = self.passes.wrapping_add(1);
        if self.passes.is_multiple_of(CLOCK_EVERY) {
            self.tick();
        }
        let sockets = probe && (self.passes.is_multiple_of(SOCKETS_EVERY) || self.transfers.polled.sockets_only());
        // Where connections have threads of their own, those threads act on completions: a caller that counted
        // completions as progress would never release the lock to them.
        let mut moved = self.transfers.gpu.has_completions() && self.complete_staging() && !self.threads;
        let collect = ask || self.passes.is_multiple_of(COUNTS_EVERY);
        let mut at = 0;
        while let Some(result) = self.transfers.poll_lane(at, sockets, collect) {
            match result {
                PollResult::Moved => moved = true,
                PollResult::Idle => {}
                PollResult::Ended => {
                    moved = true;
                    continue;
                }
            }
            at += 1;
        }
        if self.transfers.gpu.has_links() {
            moved |= self.transfers.exchange_notes((moved, self.passes));
        }
        if !self.transfers.direct.is_idle() {
            moved |= self.transfers.step_direct();
        }
        moved
    }

    /// Receives the peer's next message without a pass, if it is short and nothing else has to be looked at before it;
    /// what became of it. `endpoint`: the peer, `None` for the only one that there is. `spins`: how often to look
    /// again.
    #[inline]
    pub(crate) fn receive_short(
        &mut self,
        endpoint: Option<EndpointId>,
        spins: u32,
        wanted: Option<Wanted<'_>>,
    ) -> Received {
        let passes = self.passes.wrapping_add(1);
        // Every SOCKETS_EVERY passes a whole one is due: for the clock, and for other lanes.
        if passes.is_multiple_of(SOCKETS_EVERY) {
            return Received::Nothing;
        }
        let Some(endpoint) = endpoint.or_else(|| self.transfers.polled.only_endpoint()) else {
            return Received::Nothing;
        };
        let received = self.transfers.receive_short(endpoint, spins, wanted);
        if received != Received::Nothing {
            self.passes = passes;
        }
        received
    }

    /// Reads the count of delivered messages that the peer has published; whether it has changed.
    #[inline]
    pub(crate) fn collect(&mut self, endpoint: Option<EndpointId>) -> bool {
        endpoint.is_some_and(|endpoint| self.transfers.collect_count(endpoint))
    }

    /// Whether something must be polled because no event reports it.
    pub(crate) fn is_busy(&self) -> bool {
        let Transfers { tables, gpu, direct, .. } = &self.transfers;
        !direct.is_idle() || direct::is_lending(tables, gpu) || gpu.has_completions()
    }

    /// Whether a copy is in flight whose completion can only be polled: one of this end's, or one that the peer makes.
    pub(crate) fn awaits_copy(&self) -> bool {
        let Transfers { tables, gpu, direct, .. } = &self.transfers;
        !direct.is_empty() || direct::is_lending(tables, gpu)
    }

    /// When the protocol next needs the clock.
    pub(crate) fn next_timer(&self) -> Option<Instant> {
        let tables = &self.transfers.tables;
        let alive = tables.peers.iter().filter(|peer| peer.is_alive());
        let returns = tables.operations.returns.timer(tables.clock.now());
        let lingering = self.transfers.direct.lingering.timer(tables.clock.now());
        let at = alive.filter_map(|peer| peer.protocol.timeout()).chain(returns).chain(lingering).min()?;
        Some(tables.clock.instant(at))
    }

    // ---- direct copies and GPU memory

    /// Acts on completions of the stagers; whether there were any.
    #[cold]
    pub(crate) fn complete_staging(&mut self) -> bool {
        let Some(changes) = self.transfers.gpu.complete(&mut self.transfers.tables) else { return false };
        self.start_released(changes.released);
        for (ticket, result) in changes.reached {
            lists::stream_reached(&mut self.transfers, ticket, result);
        }
        for endpoint in changes.endpoints {
            self.transfers.settle_aside(endpoint);
        }
        if self.transfers.wake_ups.is_observed() {
            self.transfers.tables.operations.report();
        }
        if changes.polled_lane_ready {
            self.transfers.wake_ups.want_driver();
        }
        self.transfers.wake_ups.want_connections();
        true
    }

    // ---- regions

    /// Ends all access to a region, by peers and by our operations: later ones are refused, those in flight fail.
    /// False: there is no such region.
    pub(crate) fn end_region(&mut self, region: proto::RegionRef) -> bool {
        let tables = &mut self.transfers.tables;
        if !tables.regions.is_known(region) {
            return false;
        }
        if tables.regions.retire(region) {
            let now = tables.clock.read();
            let over = tables.hosted.over(region);
            for id in tables.peers.ids() {
                let Some(peer) = self.transfers.tables.peers.get_mut(id) else { continue };
                peer.protocol.region_gone(now, region);
                over.iter().for_each(|access| peer.protocol.region_gone(now, *access));
                self.transfers.settle(id);
            }
        }
        for op in self.transfers.tables.operations.over_region(region) {
            self.cancel(op, Early::Withdrawn);
        }
        self.transfers.tables.operations.report();
        true
    }

    /// True if a peer's lane, a direct copy or one of our operations may still touch that region.
    pub(crate) fn is_region_used(&self, region: proto::RegionRef) -> bool {
        let tables = &self.transfers.tables;
        if !tables.operations.over_region(region).is_empty() {
            return true;
        }
        let used = |region: proto::RegionRef| {
            let by = |peer: &Peer| peer.accesses_to(region).next().is_some();
            self.transfers.direct.uses_region(region)
                || tables.operations.returns.has_region(region)
                || tables.peers.iter().any(by)
        };
        used(region) || tables.hosted.over(region).into_iter().any(used)
    }

    /// Recalls the memory of a region from every lane. Whether one keeps it still.
    pub(crate) fn recall_region(&mut self, region: proto::RegionRef) -> bool {
        let Tables { peers, operations, hosted, .. } = &mut self.transfers.tables;
        for of in hosted.over(region).into_iter().chain([region]) {
            for loan in peers.iter().flat_map(|peer| peer.accesses_to(of)) {
                if !loan.recall() {
                    operations.returns.await_loan(Owner::Access(region), Arc::clone(loan));
                }
            }
        }
        operations.returns.has_region(region)
    }

    /// Whether a lane keeps memory of a region.
    pub(crate) fn is_region_kept(&self, region: proto::RegionRef) -> bool {
        self.transfers.tables.operations.returns.has_region(region)
    }

    /// Forgets a region whose access has ended; nothing touches its memory after this.
    pub(crate) fn remove_region(&mut self, region: proto::RegionRef) {
        let Transfers { tables, gpu, .. } = &mut self.transfers;
        for access in tables.hosted.over(region) {
            gpu.release_region(tables, access);
            tables.hosted.released(access);
        }
        gpu.release_region(tables, region);
        tables.regions.remove(region);
    }

    // ---- the end

    /// Sends every peer what it is owed, and says goodbye where nothing is in flight.
    pub(crate) fn say_goodbye(&mut self) {
        let now = self.transfers.tables.clock.read();
        for id in self.transfers.tables.peers.ids() {
            let peer = self.transfers.tables.peers.get_mut(id);
            let Some(peer) = peer.filter(|peer| peer.is_alive()) else { continue };
            peer.protocol.flush();
            peer.say_goodbye(now);
            self.transfers.settle(id);
        }
    }

    /// Ends every endpoint, when the worker closes.
    pub(crate) fn close(&mut self) {
        self.closed = true;
        for id in self.transfers.tables.peers.ids() {
            if let Some(peer) = self.transfers.tables.peers.get_mut(id) {
                peer.end("the worker is closed", Some(Reason::Closed));
            }
            self.transfers.kill(id, "the worker is closed", Some(Reason::Closed));
        }
    }
}

impl Core {
    /// True if that peer, whose lanes are closed, may still be accessing memory of this end.
    pub(crate) fn lingers(&self, endpoint: EndpointId) -> bool {
        self.transfers.direct.lingering.is_with(endpoint)
    }

    /// Closed lanes whose peers may still be accessing memory of this end.
    pub(crate) fn take_lingering(&mut self) -> Lingering {
        std::mem::take(&mut self.transfers.direct.lingering)
    }
}

/// The names of the peers with which that region is still in use.
pub(crate) fn users_of_region(core: &Core, region: proto::RegionRef) -> Vec<String> {
    let tables = &core.transfers.tables;
    let mut all = tables.hosted.over(region);
    all.push(region);
    let own = tables.operations.over_region(region).into_iter().filter_map(|op| tables.operations.op(op)?.endpoint());
    let lingering = core.transfers.direct.lingering.endpoints().filter(|_| core.is_region_kept(region));
    let busy: Vec<_> = own.chain(core.transfers.direct.peers_at(&all)).chain(lingering).collect();
    let uses = |peer: &&Peer| {
        busy.contains(&peer.protocol.id()) || all.iter().any(|of| peer.accesses_to(*of).next().is_some())
    };
    tables.peers.iter().filter(uses).map(|peer| peer.name().to_owned()).collect()
}
