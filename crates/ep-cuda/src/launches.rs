//! Launches of kernels: what runs them, which may still run, and which halves are still to be received.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossrail_cuda::{Context, Entered, ReleasePause, Stream};
use crossrail_kernels::Kernels;
use crossrail_kernels::ep::EpKernels;
use crossrail_locks::{Mutex, MutexGuard};
use crossrail_types::Result;

use crate::completion::{Completion, Events};
use crate::device_reader::Reader;
use crate::launch::Args;
use crate::outstanding::Outstanding;

/// How long a launch waits for memory that is being released.
const FREES: Duration = Duration::from_millis(100);
/// Every this many pushes, completed operations are removed.
const LOOK_AFTER: usize = 64;

/// See the module.
pub(crate) struct Launches {
    cuda: Context,
    kernels: Arc<EpKernels>,
    /// The engine's kernels, kept loaded for it.
    _engine: Option<Arc<Kernels>>,
    /// Blocks of a launch.
    blocks: u32,
    /// GPU address of the ring of faults.
    faults_at: u64,
    events: Arc<Events>,
    reader: Reader,
    in_flight: Arc<InFlight>,
    /// Of the heap: a buffer and its variants have it in common.
    outstanding: Arc<Mutex<Outstanding>>,
}

impl Launches {
    /// `blocks`: of a launch; `faults_at`: GPU address of the ring in which kernels report faults.
    pub(crate) fn new(
        cuda: &Context,
        kernels: Arc<EpKernels>,
        engine: Option<Arc<Kernels>>,
        blocks: u32,
        faults_at: u64,
    ) -> Launches {
        let launches = Launches {
            cuda: cuda.clone(),
            kernels,
            _engine: engine,
            blocks,
            faults_at,
            events: Events::new(cuda),
            reader: Reader::new(cuda),
            in_flight: Arc::default(),
            outstanding: Arc::default(),
        };
        // The driver would block a release until the kernels are done, and they may be waiting for other ranks.
        let asked: Weak<InFlight> = Arc::downgrade(&launches.in_flight);
        cuda.defer_releases_while(move || asked.upgrade().map(|in_flight| in_flight.is_busy()));
        launches
    }

    /// Of other kernels on the same heap, in one sequence with these.
    pub(crate) fn for_variant(&self, kernels: Arc<EpKernels>, blocks: u32, faults_at: u64) -> Launches {
        Launches {
            cuda: self.cuda.clone(),
            kernels,
            _engine: self._engine.clone(),
            blocks,
            faults_at,
            events: self.events.clone(),
            reader: Reader::new(&self.cuda),
            in_flight: self.in_flight.clone(),
            outstanding: self.outstanding.clone(),
        }
    }

    /// The GPU's context.
    pub(crate) fn cuda(&self) -> &Context {
        &self.cuda
    }

    /// Makes the GPU's context current until the result is dropped.
    pub(crate) fn enter(&self) -> Result<Entered<'_>> {
        self.cuda.enter()
    }

    /// # Safety
    /// `stream` must be a live stream's handle, or 0 for the default stream.
    pub(crate) unsafe fn stream(&self, stream: u64) -> Result<Stream> {
        // SAFETY: the caller vouches for the stream.
        unsafe { Stream::borrow(&self.cuda, stream) }
    }

    /// Blocks of a launch.
    pub(crate) fn blocks(&self) -> u32 {
        self.blocks
    }

    /// GPU address of the ring of faults.
    pub(crate) fn faults_at(&self) -> u64 {
        self.faults_at
    }

    /// Reads GPU memory that no kernel writes any more.
    pub(crate) fn reader(&self) -> &Reader {
        &self.reader
    }

    /// Split operations that were sent and not received yet.
    pub(crate) fn outstanding(&self) -> MutexGuard<'_, Outstanding> {
        self.outstanding.lock()
    }

    /// Records the completion of everything enqueued in `stream` so far.
    pub(crate) fn record(&self, stream: &Stream, captured: bool) -> Result<Completion> {
        self.events.record(stream, captured)
    }

    /// Enqueues a kernel. `early`: may overlap the preceding kernel of the stream ([`EpKernels::dispatch_expert`]).
    pub(crate) fn launch(&self, stream: &Stream, args: &Args, blocks: u32, early: bool) -> Result<()> {
        // SAFETY: heaps, table, ring and handle are ours, laid out for this shape, and kept until kernels are done; the
        // order of operations was checked; callers vouch for their own addresses.
        unsafe {
            match args {
                Args::DispatchExpert(args) => self.kernels.dispatch_expert(stream, args, blocks, early),
                Args::DispatchRank(args) => self.kernels.dispatch_rank(stream, args, blocks, early),
                Args::CombineExpert(args) => self.kernels.combine_expert(stream, args, blocks, early),
                Args::CombineRank(args) => self.kernels.combine_rank(stream, args, blocks, early),
            }
        }
    }

    /// Keeps memory from being released until the result is dropped. No release may start between a launch and its
    /// [`Launches::keep`]: the driver would wait for the kernel, and other ranks of this process could not launch the
    /// kernels that this one waits for.
    pub(crate) fn pause_releases(&self) -> ReleasePause {
        self.cuda.pause_releases(FREES)
    }

    /// Counts an operation as in flight until it is done.
    pub(crate) fn keep(&self, done: &Completion) {
        self.in_flight.push(done);
    }

    /// Waits until all enqueued operations are done.
    pub(crate) fn wait(&self, limit: Duration) -> Result<()> {
        let deadline = Instant::now() + limit;
        let in_flight = self.in_flight.all();
        in_flight.iter().try_for_each(|done| done.synchronize(deadline.saturating_duration_since(Instant::now())))
    }

    /// Never unloads the kernels, which may still run.
    pub(crate) fn leak(&self) {
        std::mem::forget(self.kernels.clone());
    }
}

/// Operations that may still run, in the order of submission, in which they also run.
#[derive(Default)]
struct InFlight(Mutex<VecDeque<Completion>>);

impl InFlight {
    fn push(&self, done: &Completion) {
        let mut in_flight = self.0.lock();
        in_flight.push_back(done.clone());
        // Querying an event costs a good part of a submission, so one query covers many operations.
        let middle = in_flight.len() / 2;
        if in_flight.len().is_multiple_of(LOOK_AFTER) && in_flight[middle].is_done().unwrap_or(true) {
            in_flight.drain(..=middle);
        }
    }

    fn all(&self) -> Vec<Completion> {
        self.0.lock().iter().cloned().collect()
    }

    fn is_busy(&self) -> bool {
        self.0.lock().iter().rev().any(|done| !done.is_done().unwrap_or(true))
    }
}
