//! What all clones of a buffer share, and what its rooms need of each other: the state under its lock, waits for this
//! rank's kernels, the words that the host writes between operations.

use std::collections::VecDeque;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossrail::{Context, Memory, Region};
use crossrail_cuda::Context as Primary;
use crossrail_ep::meeting::Meeting;
use crossrail_ep::{Config, Fault};
use crossrail_kernels::Kernels;
use crossrail_kernels::ep::{EpKernels, Epochs, Shape};
use crossrail_locks::Mutex;
use crossrail_types::{Error, ErrorKind, Result};

use crate::agreement::Agreement;
use crate::completion::{Completion, Events};
use crate::counts::CountPool;
use crate::device_reader::Reader;
use crate::fault_ring::Ring;
use crate::handles::Pool;
use crate::heap::{Heap, set_taken};
use crate::news::{ConnectionEnd, News};
use crate::options::DeviceOptions;
use crate::outstanding::{Operation, Outstanding};
use crate::peer::Peer;
use crate::regions::{RegionView, Regions};
use crate::setup_timings::SetupTimings;
use crate::sight::{Members, Sight};

pub(crate) struct Inner {
    /// Identifies the buffer, so that handles and regions of another one are refused.
    pub(crate) id: u64,
    pub(crate) name: String,
    pub(crate) me: u32,
    pub(crate) config: Config,
    pub(crate) options: DeviceOptions,
    pub(crate) shape: Shape,
    /// What the heap is laid out for.
    pub(crate) room: Shape,
    /// The buffer whose heap and connections a variant uses.
    pub(crate) base: Option<Arc<Inner>>,
    /// Its variants, which hear of ended connections too.
    pub(crate) variants: Mutex<Vec<Weak<Inner>>>,
    pub(crate) context: Context,
    pub(crate) cuda: Primary,
    pub(crate) meeting: Arc<Meeting>,
    pub(crate) kernels: Arc<EpKernels>,
    /// The engine's kernels, kept loaded for it.
    pub(crate) _engine: Option<Arc<Kernels>>,
    /// Blocks of a launch.
    pub(crate) blocks: u32,
    pub(crate) memory: Memory,
    pub(crate) heap: Heap,
    /// The heap as a registered region, for ranks that cannot map it; registered on first use.
    pub(crate) region: Mutex<Option<Region>>,
    pub(crate) events: Arc<Events>,
    pub(crate) counts: Option<Arc<CountPool>>,
    /// Memory of handles: expert layout, rank layout.
    pub(crate) handles: [Option<Arc<Pool>>; 2],
    pub(crate) regions: Regions,
    pub(crate) reader: Reader,
    /// GPU address of the ring of faults.
    pub(crate) faults_at: u64,
    pub(crate) tell: Sender<News>,
    pub(crate) agreement: Arc<Agreement>,
    /// Bytes forwarded to ranks whose heaps this GPU cannot map.
    pub(crate) network: AtomicU64,
    pub(crate) in_flight: Arc<InFlight>,
    pub(crate) state: Mutex<State>,
    /// Locked while masks that depend on it are written, never while waiting for kernels or other ranks. Taken after
    /// `state` where both are held.
    pub(crate) connections: Mutex<Connections>,
    /// Serializes connect, disconnect and destroy; taken before `state`.
    pub(crate) connecting: Mutex<()>,
    pub(crate) setup_timings: Mutex<SetupTimings>,
    pub(crate) sight: Arc<Sight>,
}

/// The mutable state, under [`Inner::state`].
pub(crate) struct State {
    pub(crate) peers: Vec<Option<Peer>>,
    /// By rank: whether it was connected before, so that what it left in the heap must be cleared before it reconnects.
    pub(crate) stale: Vec<bool>,
    /// Of the heap: a buffer and its variants have it in common.
    pub(crate) outstanding: Arc<Mutex<Outstanding>>,
    pub(crate) ring: Ring,
    pub(crate) faults: Vec<Fault>,
    /// Losses of the agreement that were processed.
    pub(crate) losses_seen: usize,
    /// The max_rows overflow has been logged.
    pub(crate) overflow_reported: bool,
    pub(crate) generation: u64,
    pub(crate) closed: bool,
}

impl State {
    /// The state before any operation.
    pub(crate) fn new(peers: Vec<Option<Peer>>, ring: Ring, outstanding: Arc<Mutex<Outstanding>>) -> State {
        State {
            stale: vec![false; peers.len()],
            peers,
            outstanding,
            ring,
            faults: Vec::new(),
            losses_seen: 0,
            overflow_reported: false,
            generation: 0,
            closed: false,
        }
    }

    /// Ranks that are connected and not masked, this one included.
    pub(crate) fn active(&self) -> u32 {
        self.peers.iter().flatten().filter(|peer| !peer.masked).count() as u32
    }

    /// The same, by number.
    pub(crate) fn active_ranks(&self) -> Vec<u32> {
        self.peers.iter().flatten().filter(|peer| !peer.masked).map(|peer| peer.rank).collect()
    }

    /// How many ranks are how, for the page.
    fn members(&self) -> Members {
        let peers = || self.peers.iter().flatten();
        let masked = peers().filter(|peer| peer.masked).count() as u64;
        Members { connected: peers().count() as u64, masked, lost: self.faults.len() as u64 }
    }

    pub(crate) fn has_forwarded(&self) -> bool {
        self.peers.iter().flatten().any(|peer| peer.forwarded().is_some() && !peer.masked)
    }
}

/// Entries after which one looks for operations that are done.
const LOOK_AFTER: usize = 64;

/// Operations that may still run, in the order of submission, in which they also run.
#[derive(Default)]
pub(crate) struct InFlight(Mutex<VecDeque<Completion>>);

impl InFlight {
    pub(crate) fn push(&self, done: &Completion) {
        let mut in_flight = self.0.lock();
        in_flight.push_back(done.clone());
        // A query of an event takes a good part of a submission's time, so one stands for many operations.
        let middle = in_flight.len() / 2;
        if in_flight.len().is_multiple_of(LOOK_AFTER) && in_flight[middle].is_done().unwrap_or(true) {
            in_flight.drain(..=middle);
        }
    }

    pub(crate) fn all(&self) -> Vec<Completion> {
        self.0.lock().iter().cloned().collect()
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.0.lock().iter().rev().any(|done| !done.is_done().unwrap_or(true))
    }
}

/// What the watching thread knows of connections. Apart from the state, whose lock may be held for long.
pub(crate) struct Connections {
    /// By rank, the generation of its connection; 0 for none.
    pub(crate) generations: Vec<u64>,
    /// Ended connections that [`Inner::process_connection_ends`] has not processed yet.
    pub(crate) ended: Vec<ConnectionEnd>,
}

impl Inner {
    /// This buffer's variants.
    pub(crate) fn live_variants(&self) -> Vec<Arc<Inner>> {
        self.variants.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Shows which ranks are connected, masked and lost.
    pub(crate) fn show_members(&self, state: &State) {
        self.sight.members(state.members());
    }

    /// Shows that an operation was enqueued.
    pub(crate) fn show_begun(&self, kind: Operation, state: &State) {
        self.sight.begun(kind, state.members());
    }

    pub(crate) fn refuse_closed(&self, operation: &str) -> Result<()> {
        if self.meeting.is_ending() {
            return Err(Error::new(ErrorKind::Closed, operation, "the buffer was destroyed"));
        }
        Ok(())
    }

    /// Waits until no operation of this rank is in flight; returns the sequence numbers of the last ones.
    pub(crate) fn wait_until_idle(&self, state: &State, what: &str, limit: Option<Duration>) -> Result<Epochs> {
        if !state.outstanding.lock().is_idle() {
            let error = Error::new(ErrorKind::Usage, what, "an operation that was sent has not been received yet");
            return Err(error.with_hint("finish it first, on all ranks"));
        }
        self.wait_for_kernels(limit)?;
        self.heap.epochs()
    }

    /// Waits until all enqueued operations are done.
    pub(crate) fn wait_for_kernels(&self, limit: Option<Duration>) -> Result<()> {
        let limit = limit.unwrap_or(self.config.timeout.saturating_mul(2) + self.context.settings().timeout);
        let deadline = Instant::now() + limit;
        let in_flight = self.in_flight.all();
        let _waiting = self.sight.waiting("kernels", Instant::now(), &[]);
        in_flight.iter().try_for_each(|done| done.synchronize(deadline.saturating_duration_since(Instant::now())))
    }

    pub(crate) fn region_view(&self, index: u32) -> RegionView {
        let parts = &self.heap.parts;
        let start = self.heap.base() + parts.regions + u64::from(index) * parts.region_stride;
        RegionView {
            rows: start,
            scales: start + parts.region_scales,
            topk_idx: start + parts.region_idx,
            topk_weights: start + parts.region_weights,
            source: start + parts.region_source,
            most_rows: u64::from(self.shape.ranks) * u64::from(self.shape.max_tokens),
        }
    }

    /// Marks all slots between `rank` and this one as released: here, and, for a rank that cannot map this heap, in its
    /// mirror, from which the words are forwarded with the next operation.
    pub(crate) fn set_taken(&self, rank: u32, mirror: Option<&Memory>, epochs: Epochs) -> Result<()> {
        set_taken(&self.heap.memory, &self.heap.parts, rank, epochs)?;
        match mirror {
            Some(mirror) => set_taken(mirror, &self.heap.parts, self.me, epochs),
            None => Ok(()),
        }
    }
}
