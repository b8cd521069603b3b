//! The buffer: one rank's heap in GPU memory, its kernels, and its connections to the other ranks.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossrail::{Context, Endpoint, Place};
use crossrail_control::{Group, RankState};
use crossrail_cuda::{Capture, Stream};
use crossrail_ep::hello::Parameters;
use crossrail_ep::meeting::{Meeting, random_id};
use crossrail_ep::{Config, Fault, Layout, Link, Plan};
use crossrail_kernels::ep::{Epochs, Shape};
use crossrail_types::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::completion::Events;
use crate::counts::CountPool;
use crate::device_reader::Reader;
use crate::fault_ring::Ring;
use crate::handles::{Pool, layout_of};
use crate::heap::{self, Heap};
use crate::inner::{Connections, InFlight, Inner, State};
use crate::kernel_cache;
use crate::lease::RegionLease;
use crate::losses;
use crate::options::{self, DeviceOptions};
use crate::peer::Peer;
use crate::regions::Regions;
use crate::setup_timings::{PhaseTimer, SetupTimings};

/// One rank's memory for dispatch and combine on a GPU, and its connections to the other ranks. Clones share it. Any
/// thread may use it, one at a time.
#[derive(Clone)]
pub struct DeviceBuffer(pub(crate) Arc<Inner>);

/// How long `destroy` waits for kernels beyond what they wait for other ranks.
const LAST_KERNELS: Duration = Duration::from_secs(2);

impl DeviceBuffer {
    /// Memory and kernels for `config` on this rank of `group`; nobody is connected yet. Buffers of one name belong
    /// together. Kernels that are not kept on disk are compiled now, which takes seconds. Where several ranks are in one
    /// process, none is made while operations of another wait for it: the driver loads kernels when those are over.
    ///
    /// # Errors
    /// `Usage` for numbers that make no sense, or that kernels cannot take; `Unsupported` with the reason where there is no
    /// CUDA; `Exhausted`, with the plan, when more is wanted than is free.
    pub fn new(
        group: &Group,
        context: &Context,
        name: &str,
        config: Config,
        options: DeviceOptions,
    ) -> Result<DeviceBuffer> {
        let mut timer = PhaseTimer::begin();
        let shape = options::shape(&config, &options)?;
        let me = group.rank();
        config.check_rank(me)?;
        let cuda = options::context(options.ordinal)?;
        options::plan(&config, &options, 0, Some(options::free(&cuda)?))?.check()?;
        let id = random_id()?;
        let parameters = Parameters::of(&config).on_gpu(shape.regions);
        timer.end("context");
        // Loading and allocating take about as long as each other.
        let (loaded, made) = kernel_cache::beside(&cuda, context.settings(), &shape, || {
            let node = options.node_of(group.node());
            let meeting = Meeting::new(group, context, name, id, node, config.share_node, parameters)?;
            meeting.begin()?;
            let bytes = usize::try_from(heap::bytes(&shape)).unwrap_or(usize::MAX);
            let memory = context.alloc_on(bytes, Place::Gpu(options.ordinal))?;
            Ok((memory, meeting))
        });
        timer.add(&loaded.took);
        let (kernels, (memory, meeting)) = (loaded.kernels?, made?);
        let blocks = options.blocks(kernels.most_blocks())?;
        let pool = |layout: Layout| config.has(layout).then(|| Pool::new(&cuda, shape.handle_bytes(layout_of(layout))));
        let (tell, lost) = channel();
        let ring = Ring::new(&cuda)?;
        let heap = Heap::new(memory.clone(), &shape);
        let mut peers: Vec<Option<Peer>> = (0..config.ranks).map(|_| None).collect();
        peers[me as usize] = Some(Peer::myself(me));
        for rank in 0..config.ranks {
            heap.set_peer(rank, heap.base())?;
            heap.set_mask(rank, rank != me)?;
        }
        let ranks = config.ranks as usize;
        let inner = Arc::new(Inner {
            id,
            name: name.to_owned(),
            me,
            context: context.clone(),
            meeting,
            kernels,
            _engine: loaded.engine,
            blocks,
            heap,
            memory,
            region: Mutex::default(),
            events: Events::new(&cuda),
            counts: config.has(Layout::Rank).then(|| CountPool::new(&cuda, &shape)).transpose()?,
            handles: [pool(Layout::Expert), pool(Layout::Rank)],
            regions: Regions::new(shape.regions),
            reader: Reader::new(&cuda),
            faults_at: ring.address(),
            tell,
            network: AtomicU64::new(0),
            in_flight: Arc::default(),
            state: Mutex::new(State::new(peers, ring)),
            connections: Mutex::new(Connections { generations: vec![0; ranks], ended: Vec::new() }),
            connecting: Mutex::new(()),
            setup_timings: Mutex::default(),
            config,
            options,
            shape,
            cuda,
        });
        // The closing thread frees nothing while kernels of this buffer may wait for other ranks.
        let asked: Weak<InFlight> = Arc::downgrade(&inner.in_flight);
        inner.cuda.defer_releases_while(move || asked.upgrade().map(|in_flight| in_flight.is_busy()));
        losses::start(&inner, lost)?;
        inner.meeting.announce()?;
        timer.end("rest");
        inner.setup_timings.lock().construct = timer.parts();
        Ok(DeviceBuffer(inner))
    }

    /// What a buffer would take of the GPU's memory, `unreachable` other ranks being out of its reach, and what is free there.
    ///
    /// # Errors
    /// `Usage` for numbers that make no sense, or that kernels cannot take.
    pub fn plan(config: &Config, options: &DeviceOptions, unreachable: u32) -> Result<Plan> {
        let free = options::context(options.ordinal).and_then(|context| options::free(&context)).ok();
        options::plan(config, options, unreachable, free)
    }

    /// What it was made for.
    pub fn config(&self) -> &Config {
        &self.0.config
    }

    /// The same as its kernels see it.
    pub fn shape(&self) -> &Shape {
        &self.0.shape
    }

    /// The GPU, in CUDA's order.
    pub fn ordinal(&self) -> u32 {
        self.0.options.ordinal
    }

    /// Multiprocessors that an operation takes.
    pub fn num_sms(&self) -> u32 {
        self.0.blocks
    }

    /// Bytes of the heap, in GPU memory.
    pub fn heap_bytes(&self) -> u64 {
        self.0.memory.len() as u64
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.0.me
    }

    /// As `crossrail_ep_host::ExpertBuffer::connect`. Only what changes is mapped; graphs that were captured stay good, and do
    /// not run meanwhile.
    ///
    /// # Errors
    /// As there; `Usage` while something that was sent is not received; `Unsupported` where only one of two GPUs reaches
    /// the other's memory.
    pub fn connect(&self, ranks: &[u32], activate: bool, timeout: Option<Duration>) -> Result<()> {
        self.0.connect(ranks, activate, timeout)
    }

    /// As `crossrail_ep_host::ExpertBuffer::disconnect`, once what was put in is done. Graphs that were captured must not run
    /// meanwhile: nobody tells the host when they do.
    ///
    /// # Errors
    /// As there; `Timeout` when operations are not done.
    pub fn disconnect(&self, ranks: &[u32]) -> Result<()> {
        self.0.disconnect(ranks)
    }

    /// As `crossrail_ep_host::ExpertBuffer::mask`; operations under way stop waiting for them too.
    ///
    /// # Errors
    /// As there.
    pub fn mask(&self, ranks: &[u32]) -> Result<()> {
        self.0.set_mask(ranks, true)
    }

    /// As `crossrail_ep_host::ExpertBuffer::unmask`, once what was put in is done.
    ///
    /// # Errors
    /// As there; `Timeout` when operations are not done.
    pub fn unmask(&self, ranks: &[u32]) -> Result<()> {
        self.0.set_mask(ranks, false)
    }

    /// Ranks that are connected but masked.
    pub fn masked(&self) -> Vec<u32> {
        let mut state = self.0.state.lock();
        self.0.process_losses(&mut state);
        state.peers.iter().flatten().filter(|peer| peer.masked).map(|peer| peer.rank).collect()
    }

    /// Ranks that are connected and not masked, this one included.
    pub fn active(&self) -> Vec<u32> {
        self.0.active()
    }

    /// Ranks that are connected, this one and masked ones included.
    pub fn connected(&self) -> Vec<u32> {
        self.0.state.lock().peers.iter().flatten().map(|peer| peer.rank).collect()
    }

    /// Ranks that were lost so far, in order: when an operation is done without a rank, that rank is told of by then (one
    /// that has left is masked, and told of when the next operation begins).
    pub fn faults(&self) -> Vec<Fault> {
        let mut state = self.0.state.lock();
        self.0.process_losses(&mut state);
        state.faults.clone()
    }

    /// How each connected rank is reached: `Heap` is over NVLink or PCIe by this rank's own kernels, `Network` by the
    /// host through the engine.
    pub fn links(&self) -> Vec<Link> {
        let mut state = self.0.state.lock();
        self.0.process_losses(&mut state);
        let peers = state.peers.iter().flatten();
        peers
            .map(|peer| Link {
                rank: peer.rank,
                kind: peer.kind(),
                masked: peer.masked,
                lanes: peer.endpoint().map(Endpoint::lanes).unwrap_or_default(),
            })
            .collect()
    }

    /// How long the parts of making it took, and of its last connect.
    pub fn setup_timings(&self) -> SetupTimings {
        self.0.setup_timings.lock().clone()
    }

    /// How many more results in the rank layout there is memory for, beside those in use and those of graphs.
    pub fn spare_regions(&self) -> u32 {
        self.0.regions.spare()
    }

    /// Bytes that the host has carried to ranks that this rank's GPU does not reach.
    pub fn network_bytes(&self) -> u64 {
        self.0.network.load(Ordering::Relaxed)
    }

    /// What this rank's heap says of the operations under way, in a few lines, whatever runs: for whoever must find out
    /// why they do not end. Only what lies before the results of the rank layout is read, some megabytes.
    ///
    /// # Errors
    /// What the driver says.
    pub fn report(&self) -> Result<String> {
        let shape = &self.0.shape;
        let parts = shape.heap();
        let len = if shape.rank_layout { parts.regions } else { parts.bytes };
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(usize::MAX)];
        self.0.memory.copy_to(0, &mut bytes)?;
        Ok(shape.report(&bytes))
    }

    /// A region for a result in the rank layout.
    ///
    /// # Errors
    /// `Exhausted` that names `regions` when all are in use; `Usage` when the buffer was not made for the rank layout.
    pub fn take_region(&self) -> Result<RegionLease> {
        RegionLease::take(&self.0, false)
    }

    /// A region for a result of a dispatch that will be put into `stream`. One that a graph captures is its own from then
    /// on: when its lease is dropped it is only lent to other captures, as memory of graphs is shared among graphs.
    ///
    /// # Safety
    /// `stream` must be a live stream's handle, or 0 for the default stream.
    ///
    /// # Errors
    /// As [`DeviceBuffer::take_region`]; what the driver says.
    pub unsafe fn take_region_for(&self, stream: u64) -> Result<RegionLease> {
        // SAFETY: the caller vouches for the stream.
        let stream = unsafe { Stream::borrow(&self.0.cuda, stream)? };
        RegionLease::take(&self.0, stream.capture()? != Capture::None)
    }

    /// Waits until what was put in is done on this rank's GPU, and every connected rank that is not masked has come here.
    ///
    /// # Errors
    /// `Timeout`; `Closed`; what the driver says.
    pub fn sync(&self, limit: Option<Duration>) -> Result<()> {
        self.0.sync(limit)
    }

    /// Ends all connections once kernels are done; graphs that were captured must not run any more. The memory goes with the last result that is a view of it.
    ///
    /// # Errors
    /// `Timeout` when kernels are not done in time: their memory is then kept for good. None of a second call.
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
    fn active(&self) -> Vec<u32> {
        let mut state = self.state.lock();
        self.process_losses(&mut state);
        state.peers.iter().flatten().filter(|peer| !peer.masked).map(|peer| peer.rank).collect()
    }

    fn set_mask(&self, ranks: &[u32], masked: bool) -> Result<()> {
        let what = if masked { "mask" } else { "unmask" };
        let mut state = self.state.lock();
        self.process_losses(&mut state);
        for rank in ranks {
            let peer = state.peers.get(*rank as usize).and_then(Option::as_ref);
            let Some(peer) = peer.filter(|peer| peer.rank != self.me) else {
                return Err(Error::new(ErrorKind::Usage, what, format!("rank {rank} is not a connected other rank")));
            };
            if !masked && !peer.is_alive() {
                let error = Error::new(ErrorKind::PeerDead, what, format!("the process of rank {rank} is gone"));
                return Err(error.with_hint("disconnect it; a new process can take its place"));
            }
        }
        let epochs = if masked { Epochs::default() } else { self.wait_until_idle(&state, what, None)? };
        for rank in ranks {
            let Some(peer) = &mut state.peers[*rank as usize] else { continue };
            if !masked {
                // What it was not sent meanwhile it need not take.
                self.set_taken(peer.rank, peer.mirror(), epochs)?;
                self.regions.clear(peer.rank);
            }
            self.heap.set_mask(peer.rank, masked)?;
            peer.masked = masked;
        }
        Ok(())
    }

    fn sync(&self, limit: Option<Duration>) -> Result<()> {
        let began = Instant::now();
        let limit = limit.unwrap_or(self.context.settings().timeout);
        let name = format!("ep-cuda/{}", self.name);
        loop {
            self.refuse_closed("sync")?;
            self.wait_for_kernels(Some(limit.saturating_sub(began.elapsed())))?;
            let ranks = self.active();
            let left = limit.saturating_sub(began.elapsed());
            match self.meeting.group.barrier(&name, &ranks, Some(left)) {
                // It is masked by whoever notices; the others meet again without it.
                Err(error) if error.kind == ErrorKind::PeerDead && began.elapsed() < limit => {
                    let died = |rank: u32| !matches!(self.meeting.group.state(rank), RankState::Alive);
                    let dead: Vec<u32> = ranks.into_iter().filter(|rank| *rank != self.me && died(*rank)).collect();
                    if dead.is_empty() {
                        return Err(error);
                    }
                    self.set_mask(&dead, true)?;
                }
                result => return result,
            }
        }
    }

    fn destroy(&self) -> Result<()> {
        // Whoever waits for others gives up, and lets go of the state.
        self.meeting.end();
        let _connecting = self.connecting.lock();
        let mut state = self.state.lock();
        if std::mem::replace(&mut state.closed, true) {
            return Ok(());
        }
        let limit = self.config.timeout.saturating_mul(2) + LAST_KERNELS;
        let done = self.wait_for_kernels(Some(limit));
        self.meeting.close();
        let peers: Vec<Peer> = state.peers.iter_mut().filter_map(Option::take).collect();
        drop(state);
        if let Err(error) = done {
            // Kernels that may still run must find their memory.
            std::mem::forget((peers, self.memory.clone(), self.kernels.clone()));
            self.meeting.worker.close();
            return Err(error);
        }
        for peer in peers {
            peer.close(crossrail_ep::meeting::CLOSE_TIMEOUT);
        }
        self.meeting.worker.close();
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let _ = self.destroy();
    }
}
