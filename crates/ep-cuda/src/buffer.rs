//! The buffer: one rank's heap in GPU memory, its kernels, and its connections to the other ranks.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use crossrail::{Context, Endpoint, Place};
use crossrail_control::Group;
use crossrail_cuda::{Capture, Entered};
use crossrail_ep::hello::Parameters;
use crossrail_ep::meeting::{Meeting, random_id};
use crossrail_ep::{Config, Fault, Link, Plan};
use crossrail_kernels::ep::{Epochs, Shape, nodes_of};
use crossrail_locks::Mutex;
use crossrail_types::{Error, ErrorKind, Result};

use crate::agreement::Agreement;
use crate::fault_ring::Ring;
use crate::handles::{DeviceHandle, layout_of};
use crate::heap::{self, Heap};
use crate::inner::Inner;
use crate::kernel_cache;
use crate::launches::Launches;
use crate::lease::RegionLease;
use crate::losses;
use crate::membership::{Membership, State};
use crate::moved;
use crate::options::{self, DeviceOptions};
use crate::peer::Peer;
use crate::proxy::{self, FarRank};
use crate::results::Results;
use crate::setup_timings::{PhaseTimer, SetupTimings};
use crate::sight::Sight;

/// A rank's memory for dispatch and combine on a GPU, and its connections to the other ranks. Clones share it. Any
/// thread may use it; calls are serialized by a lock.
#[derive(Clone)]
pub struct DeviceBuffer(pub(crate) Arc<Inner>);

/// How often a barrier that failed checks whether a connection has ended.
const LOSS_INTERVAL: Duration = Duration::from_millis(20);

impl DeviceBuffer {
    /// Allocates memory and loads kernels for `config` on this rank of `group`; no rank is connected yet. Buffers of
    /// the same name connect to each other. Kernels that are not cached on disk are compiled now, which takes seconds.
    /// Where several ranks share a process, none may be constructed while operations of another wait for it: the driver
    /// loads kernels only after those have finished.
    ///
    /// # Errors
    /// `Usage` for invalid numbers, or numbers beyond the kernels' limits; `Unsupported` with the reason where there is
    /// no CUDA; `Exhausted`, with the plan, if the GPU has too little free memory.
    pub fn new(
        group: &Group,
        context: &Context,
        name: &str,
        config: Config,
        options: DeviceOptions,
    ) -> Result<DeviceBuffer> {
        let mut timer = PhaseTimer::begin();
        let (options, sending) = options.resolved(&config, group)?;
        let shape = options::shape(&config, &options)?;
        let me = group.rank();
        config.check_rank(me)?;
        let cuda = options::context(options.ordinal)?;
        let far = nodes_of(&shape).far(shape.tuning().inboxes);
        options::plan(&config, &options, far, Ok(options::free(&cuda)?))?.check()?;
        let id = random_id()?;
        let room = options::room(&shape, &options);
        let parameters = Parameters::of(&config).on_gpu(shape.regions, shape.slotted()).once_per(shape.tuning().node);
        timer.end("context");
        // Loading kernels and allocating the heap take about the same time.
        let (loaded, made) = kernel_cache::load_beside(&cuda, context.settings(), &shape, || {
            let node = options.node_of(group.node());
            let meeting = Meeting::new(group, context, name, id, node, config.share_node, parameters)?;
            meeting.begin()?;
            let bytes = usize::try_from(heap::bytes(&room)).unwrap_or(usize::MAX);
            let memory = context.alloc_on(bytes, Place::Gpu(options.ordinal))?;
            Ok((memory, meeting))
        });
        timer.add(&loaded.took);
        let (kernels, (memory, meeting)) = (loaded.kernels?, made?);
        let blocks = options.blocks(kernels.most_blocks())?;
        let (events, arriving) = channel();
        let ring = Ring::new(&cuda, &shape)?;
        let heap = Arc::new(Heap::new(memory, &shape, &room, me)?);
        for rank in 0..config.ranks {
            heap.clear_path(rank)?;
            heap.set_mask(rank, rank != me)?;
        }
        heap.set_rings(&vec![[0, 0]; proxy::lanes(config.ranks)])?;
        let sight = Sight::new(context.settings(), name, (me, config.ranks), options.ordinal, heap.len());
        let sight = Arc::new(sight);
        let worker = meeting.worker.clone();
        let agreement = Agreement::new(me, config.ranks, config.on_loss, heap.clone(), worker, events.clone());
        let launches = Launches::new(&cuda, kernels, loaded.engine, blocks, ring.address());
        let inner = Arc::new(Inner {
            name: name.to_owned(),
            me,
            context: context.clone(),
            heap,
            membership: Membership::new(meeting, agreement, events, State::alone(me, config.ranks, ring)),
            launches,
            results: Results::new(id, &cuda, &config, &shape, &sight)?,
            proxy: Arc::default(),
            setup_timings: Mutex::default(),
            sight,
            base: None,
            variants: Mutex::default(),
            config,
            options,
            sending,
            shape,
        });
        losses::start(&inner, arriving)?;
        inner.show_members(&inner.membership.lock());
        inner.membership.meeting().announce()?;
        timer.end("rest");
        inner.setup_timings.lock().construct = timer.parts();
        Ok(DeviceBuffer(inner))
    }

    /// GPU memory that a buffer would need, with `unreachable` ranks whose heaps the GPU cannot map, and what is free.
    ///
    /// # Errors
    /// `Usage` for invalid numbers, or numbers beyond the kernels' limits.
    pub fn plan(config: &Config, options: &DeviceOptions, unreachable: u32) -> Result<Plan> {
        let free = options::context(options.ordinal).and_then(|context| options::free(&context));
        options::plan(config, options, unreachable, free.map_err(|error| error.to_string()))
    }

    /// Its configuration.
    pub fn config(&self) -> &Config {
        &self.0.config
    }

    /// The configuration as its kernels were compiled for it.
    pub fn shape(&self) -> &Shape {
        &self.0.shape
    }

    /// The GPU, in CUDA's order.
    pub fn ordinal(&self) -> u32 {
        self.0.options.ordinal
    }

    /// Multiprocessors that an operation occupies.
    pub fn num_sms(&self) -> u32 {
        self.0.launches.blocks()
    }

    /// Bytes of the heap, in GPU memory.
    pub fn heap_bytes(&self) -> u64 {
        self.0.heap.len()
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.0.me
    }

    /// As `crossrail_ep_host::ExpertBuffer::connect`. Only changes are mapped. Captured graphs stay valid, but must
    /// not run during the call.
    ///
    /// # Errors
    /// As there; `Usage` while a sent operation has not been received; `Unsupported` if only one of two GPUs can map
    /// the other's memory.
    pub fn connect(&self, ranks: &[u32], activate: bool, timeout: Option<Duration>) -> Result<()> {
        self.0.connect(ranks, activate, timeout)
    }

    /// As `crossrail_ep_host::ExpertBuffer::disconnect`, once enqueued operations are done. Captured graphs must not
    /// run during the call: the host does not see their launches.
    ///
    /// # Errors
    /// As there; `Timeout` when operations are not done.
    pub fn disconnect(&self, ranks: &[u32]) -> Result<()> {
        self.0.disconnect(ranks)
    }

    /// As `crossrail_ep_host::ExpertBuffer::mask`; operations in flight stop waiting for them too.
    ///
    /// # Errors
    /// As there.
    pub fn mask(&self, ranks: &[u32]) -> Result<()> {
        self.0.set_mask(ranks, true)
    }

    /// As `crossrail_ep_host::ExpertBuffer::unmask`, once enqueued operations are done. Where the ranks have agreed to go
    /// on without one that lives, it and the others are connected again: the call returns once all have made it.
    ///
    /// # Errors
    /// As there, and of [`DeviceBuffer::connect`]; `Timeout` when operations are not done.
    pub fn unmask(&self, ranks: &[u32]) -> Result<()> {
        self.0.reinstate(ranks)
    }

    /// Ranks that are connected but masked.
    pub fn masked(&self) -> Vec<u32> {
        self.0.current().peers().filter(|peer| peer.masked).map(|peer| peer.rank).collect()
    }

    /// Ranks that are connected and not masked, this one included.
    pub fn active(&self) -> Vec<u32> {
        self.0.current().active_ranks()
    }

    /// Number of this rank's view, as `crossrail_ep_host::ExpertBuffer::view`. It counts for buffers that mask lost ranks.
    pub fn view(&self) -> u64 {
        let _state = self.0.current();
        self.0.membership.agreement().number()
    }

    /// Ranks that are connected, this one and masked ones included.
    pub fn connected(&self) -> Vec<u32> {
        self.0.membership.lock().peers().map(|peer| peer.rank).collect()
    }

    /// Ranks without a part in the operations that are done, ascending: not connected, masked or lost.
    pub fn missing(&self) -> Vec<u32> {
        self.0.current().missing(self.0.me, nodes_of(&self.0.shape))
    }

    /// Ranks lost so far, in order. When an operation has completed without a rank, that rank is listed; a rank that
    /// left regularly is masked at once and listed when the next operation begins.
    pub fn faults(&self) -> Vec<Fault> {
        self.0.current().faults().to_vec()
    }

    /// How each connected rank is reached: `Heap` by this rank's kernels, over NVLink, PCIe or through memory of the host,
    /// `Network` through pinned memory and threads of the buffer.
    pub fn links(&self) -> Vec<Link> {
        let link = |peer: &Peer| Link {
            rank: peer.rank,
            kind: peer.kind(),
            masked: peer.masked,
            lanes: peer.endpoint().map(Endpoint::lanes).unwrap_or_default(),
            missed: peer.endpoint().map(|endpoint| endpoint.explain().missed()).unwrap_or_default(),
            gateway: nodes_of(&self.0.shape).gateways(self.0.me, peer.rank).map(|[theirs, _]| theirs),
            proxy: peer.far().map(|far| far.reported().0),
        };
        self.0.current().peers().map(link).collect()
    }

    /// Durations of the phases of construction and of the last connect.
    pub fn setup_timings(&self) -> SetupTimings {
        self.0.setup_timings.lock().clone()
    }

    /// How many more results in the rank layout there is memory for, not counting regions in use or reserved for
    /// graphs.
    pub fn spare_regions(&self) -> u32 {
        self.0.results.regions().spare()
    }

    /// Bytes that the connected ranks whose heaps this GPU cannot map were sent so far.
    pub fn network_bytes(&self) -> u64 {
        self.0.membership.lock().peers().filter_map(Peer::far).map(|far| far.sent_bytes()).sum()
    }

    /// A few lines on the operations in flight, read from this rank's heap while kernels run: to diagnose operations
    /// that do not finish. Reads some megabytes, everything that precedes the regions of the rank layout.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn report(&self) -> Result<String> {
        let report = self.0.heap.report()?;
        let far: Vec<Arc<FarRank>> = self
            .0
            .membership
            .try_lock()
            .map_or_else(Vec::new, |state| state.peers().filter_map(Peer::far).cloned().collect());
        Ok(far.iter().fold(report, |report, far| format!("{report}\n    {far}")))
    }

    /// A region for a result in the rank layout.
    ///
    /// # Errors
    /// `Exhausted` that names `regions` when all are in use; `Usage` when the buffer was not made for the rank layout.
    pub fn take_region(&self) -> Result<RegionLease> {
        RegionLease::take(&self.0, false)
    }

    /// A region for a result of a dispatch that will be enqueued in `stream`. A region that a graph has captured is
    /// reserved for graphs from then on: after its lease is dropped, only other captures get it.
    ///
    /// # Safety
    /// `stream` must be a live stream's handle, or 0 for the default stream.
    ///
    /// # Errors
    /// As [`DeviceBuffer::take_region`]; what the driver reports.
    pub unsafe fn take_region_for(&self, stream: u64) -> Result<RegionLease> {
        let _entered = self.0.launches.enter()?;
        // SAFETY: the caller vouches for the stream.
        let stream = unsafe { self.0.launches.stream(stream)? };
        RegionLease::take(&self.0, stream.capture()? != Capture::None)
    }

    /// GPU address of the source tokens of a rank-layout dispatch: u32 for each row, the number that its token had on
    /// the rank that sent it. Valid in stream order after the dispatch, and as long as a clone of the handle exists.
    ///
    /// # Errors
    /// `Usage`: the handle is of another buffer, or of the expert layout.
    pub fn sources(&self, handle: &DeviceHandle) -> Result<u64> {
        let layout = crossrail_ep::Layout::Rank;
        self.0.check_handle(handle, layout, "sources")?;
        Ok(handle.0.address + self.0.shape.handle(layout_of(layout)).source)
    }

    /// Makes everything enqueued in stream `after` from now on wait for what is in stream `before`.
    ///
    /// # Safety
    /// Both must be live streams' handles, or 0 for the default stream.
    ///
    /// # Errors
    /// `Usage` for a stream of another GPU; what the driver reports.
    pub unsafe fn order(&self, before: u64, after: u64) -> Result<()> {
        let _entered = self.0.launches.enter()?;
        // SAFETY: the caller vouches for the streams.
        let (before, after) = unsafe { (self.0.launches.stream(before)?, self.0.launches.stream(after)?) };
        self.0.launches.record(&before, false)?.before(&after)
    }

    /// Makes the GPU's context current until the result is dropped, for several calls in a row.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn enter(&self) -> Result<Entered<'_>> {
        self.0.launches.enter()
    }

    /// Whether `stream` is being captured in a graph.
    ///
    /// # Safety
    /// `stream` must be a live stream's handle, or 0 for the default stream.
    ///
    /// # Errors
    /// `Usage` for a stream of another GPU, or the default stream during a capture; what the driver reports.
    pub unsafe fn is_capturing(&self, stream: u64) -> Result<bool> {
        // SAFETY: the caller vouches for the stream.
        let stream = unsafe { self.0.launches.stream(stream)? };
        Ok(stream.capture()? != Capture::None)
    }

    /// Waits until enqueued operations are done on this rank's GPU and every connected, unmasked rank has called
    /// `sync`.
    ///
    /// # Errors
    /// `Timeout`; `Closed`; what the driver reports; `PeerDead` when a rank was lost, unless the buffer masks lost ranks.
    pub fn sync(&self, limit: Option<Duration>) -> Result<()> {
        self.0.sync(limit)
    }

    /// Closes all connections once kernels are done; captured graphs must not run afterwards. The memory is freed with
    /// the last result that is a view of it.
    ///
    /// # Errors
    /// `Timeout` if kernels do not finish in time: their memory is then leaked. A second call does nothing.
    pub fn destroy(&self) -> Result<()> {
        self.0.destroy()
    }
}

impl std::fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DeviceBuffer({:?}, rank {}, cuda:{})", self.0.name, self.0.me, self.0.options.ordinal)
    }
}

impl Inner {
    /// Unmasks ranks. Those removed from the view, whose epochs differ, reconnect.
    fn reinstate(&self, ranks: &[u32]) -> Result<()> {
        let agreement = self.membership.agreement();
        let others = {
            let state = self.current();
            self.check_others(&state, ranks, "unmask")?;
            state.peers().map(|peer| peer.rank).filter(|rank| *rank != self.me).collect::<Vec<_>>()
        };
        let out_of_sync = agreement.out_of_sync(ranks);
        if out_of_sync.is_empty() {
            return self.set_mask(ranks, false);
        }
        self.refuse_variant("unmask")?;
        refuse_dead(&self.membership.lock(), &out_of_sync)?;
        self.disconnect(if agreement.is_evicted() { &others } else { &out_of_sync })?;
        self.connect(&out_of_sync, true, None)?;
        let masked: Vec<u32> = ranks.iter().copied().filter(|rank| !out_of_sync.contains(rank)).collect();
        if masked.is_empty() { Ok(()) } else { self.set_mask(&masked, false) }
    }

    fn check_others(&self, state: &State, ranks: &[u32], what: &str) -> Result<()> {
        let other = |rank: &u32| *rank != self.me && state.peer(*rank).is_some();
        ranks.iter().find(|rank| !other(rank)).map_or(Ok(()), |rank| {
            Err(Error::new(ErrorKind::Usage, what, format!("rank {rank} is not a connected other rank")))
        })
    }

    fn set_mask(&self, ranks: &[u32], masked: bool) -> Result<()> {
        let what = if masked { "mask" } else { "unmask" };
        let mut state = self.current();
        self.check_others(&state, ranks, what)?;
        let alive = |rank: &&u32| state.peer(**rank).is_some_and(Peer::is_alive);
        if let Some(rank) = ranks.iter().find(|rank| !masked && !alive(rank)) {
            return Err(gone(*rank));
        }
        let epochs = if masked { Epochs::default() } else { self.wait_until_idle(&state, what, None)? };
        for rank in ranks {
            let Some(peer) = state.peer_mut(*rank) else { continue };
            if !masked {
                // It was sent nothing while it was masked, so no slot waits for its acknowledgement.
                self.heap.set_taken(peer.rank, peer.apart(), epochs)?;
                self.results.regions().clear(peer.rank);
            }
            self.heap.set_mask(peer.rank, masked)?;
            peer.masked = masked;
            peer.lost = None;
        }
        self.membership.agreement().restart(&state.active_ranks());
        self.show_members(&state);
        Ok(())
    }

    fn sync(&self, limit: Option<Duration>) -> Result<()> {
        let began = Instant::now();
        let limit = limit.unwrap_or(self.context.settings().timeout);
        let name = format!("ep-cuda/{}", self.name);
        let (group, agreement) = (&self.membership.meeting().group, self.membership.agreement());
        self.sight.synchronising();
        loop {
            self.membership.refuse_closed("sync")?;
            self.wait_for_kernels(Some(limit.saturating_sub(began.elapsed())))?;
            moved::show(self);
            let ranks = self.current().active_ranks();
            agreement.refuse_evicted("sync")?;
            let changes = group.changes();
            let left = limit.saturating_sub(began.elapsed());
            let others: Vec<u32> = ranks.iter().copied().filter(|rank| *rank != self.me).collect();
            let waiting = self.sight.waiting("sync", began, &others);
            let met = group.barrier(&name, &ranks, Some(left));
            drop(waiting);
            match met {
                // Whether the rank is lost is for its connection to say: its lease may have ended while it lives. Each
                // rank repeats the barrier, without those that are lost.
                Err(error) if error.kind == ErrorKind::PeerDead && began.elapsed() < limit => {
                    if self.current().active_ranks() == ranks {
                        self.refuse_losses(&self.membership.lock(), "sync")?;
                        group.wait_change(changes, Instant::now() + LOSS_INTERVAL);
                    }
                }
                Err(error) => return agreement.refuse_evicted("sync").and(Err(error)),
                Ok(()) => return self.refuse_losses(&self.membership.lock(), "sync"),
            }
        }
    }

    fn destroy(&self) -> Result<()> {
        let membership = &self.membership;
        if self.base.is_some() {
            return self.end_variant();
        }
        // Waits for other ranks end now, and release the state's lock.
        membership.meeting().end();
        let _changing = membership.begin_change();
        let mut state = membership.lock();
        if state.close() {
            return Ok(());
        }
        for variant in self.variants() {
            variant.membership.lock().close();
        }
        let done = self.wait_for_last_kernels();
        membership.meeting().close();
        let peers = state.take_all();
        membership.agreement().disconnected(&(0..self.config.ranks).collect::<Vec<_>>(), &[]);
        drop(state);
        let worker = &membership.meeting().worker;
        if let Err(error) = done {
            // Kernels that may still run need their memory.
            self.heap.leak();
            self.launches.leak();
            std::mem::forget(peers);
            std::mem::forget(self.proxy.clone());
            // The first error is the one to report.
            let _ = worker.close();
            return Err(error);
        }
        for peer in peers {
            self.let_go(&peer);
            peer.close(crossrail_ep::meeting::CLOSE_TIMEOUT);
        }
        worker.close()
    }
}

/// Fails for a rank that has died. One that has only closed its connection may be about to connect again.
fn refuse_dead(state: &State, ranks: &[u32]) -> Result<()> {
    let departure = |rank: u32| state.peer(rank).and_then(|peer| peer.departure.as_ref());
    let dead = |rank: &&u32| departure(**rank).is_some_and(|departure| departure.is_dead);
    ranks.iter().find(dead).map_or(Ok(()), |rank| Err(gone(*rank)))
}

fn gone(rank: u32) -> Error {
    Error::new(ErrorKind::PeerDead, "unmask", format!("the process of rank {rank} is gone"))
        .with_hint("disconnect it; a new process can take its place")
}

impl Drop for Inner {
    fn drop(&mut self) {
        let _ = self.destroy();
    }
}
