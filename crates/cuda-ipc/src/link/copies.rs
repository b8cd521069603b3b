//! Copies in flight: their states, and the streams they are enqueued in.
#![allow(unsafe_code)]

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_cuda::{Context, MemoryKind, PointerInfo};
use crossrail_transport::{Copy, Job, List};
use crossrail_types::{Error, ErrorKind, Result};

use crate::copy_stream::{CompletionWatch, CopyOutcome, CopyStream};
use crate::driver::OpenPiece;
use crate::gpu::Gpu;
use crate::imports::{Search, Span};
use crate::note::Uuid;
use crate::row_table::LentTable;
use crate::schedule::{ActiveCopy, QueuedCopy};

/// How long a copy waits for its turn. Then it starts anyway: the copies before it may belong to another worker that
/// has not polled them, although they have completed.
const MAX_TURN_WAIT: Duration = Duration::from_millis(50);
/// Maximum number of spans enqueued in one step.
const SPANS_PER_STEP: usize = 64;
/// Maximum size of a short copy. Short copies have streams of their own, so that they do not wait behind long ones.
const SHORT: usize = 512 << 10;
/// Maximum number of streams per GPU and direction, for short and for long copies.
const SHORT_STREAMS: usize = 4;
const LONG_STREAMS: usize = 2;

/// Copies of different classes use different streams and do not wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamClass {
    Short,
    Long,
}

/// A stream of one GPU, for one direction and class of copies.
struct LinkStream {
    gpu: Arc<Gpu>,
    direction: Copy,
    class: StreamClass,
    stream: CopyStream,
}

/// A copy that has been requested and has not completed.
pub(super) struct PendingCopy {
    pub(super) watch: CompletionWatch,
    pub(super) stage: CopyStage,
    /// For a long copy to or from another GPU.
    _active: Option<ActiveCopy>,
    /// For a copy of rows.
    pub(super) rows: Option<RowsInFlight>,
}

pub(super) enum CopyStage {
    /// The peer's pieces are being opened, for the GPU with this ordinal.
    Seeking(Search<OpenPiece>, u32),
    /// The pieces are open; for a long copy, it waits for its turn.
    Queued(Vec<Span<OpenPiece>>, u32, Option<QueuedCopy>),
    /// The spans from `next` on are still to be enqueued in stream `stream`; `done` bytes have been.
    Submitting { stream: usize, spans: Vec<Span<OpenPiece>>, next: usize, done: usize },
    /// Copy engines move rows: those from byte `done` of the lists on are still to be enqueued in stream `stream`.
    Rows { stream: usize, done: u64 },
    /// Everything has been enqueued, followed by `marker`. `failed`: enqueueing failed part way, and the rest is
    /// awaited.
    InFlight { stream: usize, marker: u64, spans: Vec<Span<OpenPiece>>, failed: Option<String> },
}

impl PendingCopy {
    pub(super) fn new(search: Search<OpenPiece>, device: u32) -> PendingCopy {
        let stage = CopyStage::Seeking(search, device);
        PendingCopy { watch: CompletionWatch::new(Instant::now()), stage, _active: None, rows: None }
    }

    pub(super) fn of_rows(watch: CompletionWatch, stage: CopyStage, rows: RowsInFlight) -> PendingCopy {
        PendingCopy { watch, stage, _active: None, rows: Some(rows) }
    }

    /// Whether it waits for its turn.
    pub(super) fn waits_for_turn(&self, now: Instant) -> bool {
        let CopyStage::Queued(_, _, Some(queued)) = &self.stage else { return false };
        self.watch.waited(now) < MAX_TURN_WAIT && !queued.may_start(now)
    }

    pub(super) fn is_in_flight(&self) -> bool {
        matches!(self.stage, CopyStage::InFlight { .. })
    }
}

/// Rows to copy between GPU memory of this process and memory of the peer.
#[derive(Clone)]
pub struct RowsCopy {
    /// This process's rows.
    pub local: Arc<List>,
    /// The peer's, by addresses at which this process has mapped them ([`Domain::map`](crossrail_transport::Domain::map)).
    /// Those in the same place are of the same length.
    pub remote: Arc<List>,
    /// The first byte to copy, counted in the lists.
    pub from: u64,
    /// Bytes to copy.
    pub len: u64,
    /// Which way.
    pub copy: Copy,
    /// What keeps the peer's rows mapped.
    pub keep: Arc<dyn Any + Send + Sync>,
}

/// A copy of rows that has been started, and what it needs until it is over.
pub(super) struct RowsInFlight {
    pub(super) copy: RowsCopy,
    pub(super) table: Option<LentTable>,
}

/// Whether a copy of `len` bytes is scheduled: copies up to 512 KiB start at once.
pub(super) fn is_long(len: usize) -> bool {
    len > SHORT
}

/// The streams of a link.
#[derive(Default)]
pub(super) struct LinkStreams(Vec<LinkStream>);

impl LinkStreams {
    /// Starts a copy whose pieces are all open. `peer`: the other GPU, for a long copy.
    pub(super) fn start(
        &mut self,
        gpu: Arc<Gpu>,
        peer: Option<Uuid>,
        spans: Vec<Span<OpenPiece>>,
        job: &Job,
    ) -> Result<PendingCopy> {
        let active = peer.map(|peer| gpu.schedule.start(peer, job.len as u64));
        gpu.count_copy();
        let class = if is_long(job.len) { StreamClass::Long } else { StreamClass::Short };
        let stream = self.choose(gpu, job.copy, class)?;
        let stage = CopyStage::Submitting { stream, spans, next: 0, done: 0 };
        Ok(PendingCopy { watch: CompletionWatch::new(Instant::now()), stage, _active: active, rows: None })
    }

    /// Enqueues further spans, and a marker behind the last one.
    ///
    /// # Safety
    /// As [`Domain::step`](crossrail_transport::Domain::step); the total length of the spans must be that of the job.
    pub(super) unsafe fn submit(&mut self, stage: CopyStage, job: &Job) -> CopyStage {
        let CopyStage::Submitting { stream: index, spans, mut next, mut done } = stage else { return stage };
        let LinkStream { gpu, stream, .. } = &mut self.0[index];
        let mut failed = None;
        while let Some(span) = spans.get(next).filter(|_| failed.is_none()) {
            let (dst, src) = addresses(job, done, span);
            let local = check_local(&gpu.context, job.local as u64 + done as u64, span.len);
            // SAFETY: the peer's range is open for this GPU and in bounds, as checked by `Imports::seek`; the local
            // range is guaranteed by the caller, and was just checked. They do not overlap: they belong to different
            // processes, or the peer is in this process and copies onto itself.
            match local.and_then(|()| unsafe { stream.copy(dst, src, span.len) }) {
                Ok(()) => (next, done) = (next + 1, done + span.len),
                Err(error) => failed = Some(error.to_string()),
            }
            if next.is_multiple_of(SPANS_PER_STEP) && next < spans.len() && failed.is_none() {
                return CopyStage::Submitting { stream: index, spans, next, done };
            }
        }
        CopyStage::InFlight { stream: index, marker: stream.enqueue_marker(), spans, failed }
    }

    /// Stops enqueueing a copy: what has been enqueued becomes the copy in flight.
    pub(super) fn cut_short(&mut self, stage: CopyStage) -> CopyStage {
        match stage {
            CopyStage::Submitting { stream, spans, .. } => {
                let marker = self.0[stream].stream.enqueue_marker();
                CopyStage::InFlight { stream, marker, spans, failed: None }
            }
            CopyStage::Rows { stream, .. } => {
                let marker = self.0[stream].stream.enqueue_marker();
                CopyStage::InFlight { stream, marker, spans: Vec::new(), failed: None }
            }
            stage => stage,
        }
    }

    /// The state of a copy in flight; `Pending` for others.
    pub(super) fn poll(&self, copy: &mut PendingCopy, limit: Duration) -> CopyOutcome {
        let CopyStage::InFlight { stream, marker, .. } = copy.stage else { return CopyOutcome::Pending };
        if !CopyStream::is_reachable(marker) {
            copy.watch.query_always();
        }
        let stream = &self.0[stream].stream;
        copy.watch.poll(Instant::now(), limit, || stream.has_reached(marker), || stream.query())
    }

    /// Takes a stream out of use because a copy in it did not complete.
    pub(super) fn set_stuck(&mut self, stream: usize) {
        self.0[stream].stream.set_stuck();
    }

    /// A stream that was chosen.
    pub(super) fn stream(&mut self, index: usize) -> &mut CopyStream {
        &mut self.0[index].stream
    }

    /// Returns all streams to their GPUs.
    pub(super) fn put_back(&mut self) {
        for LinkStream { gpu, stream, .. } in self.0.drain(..) {
            gpu.put_back(stream);
        }
    }

    /// A stream of this GPU, direction and class: an idle one, a new one, or else the one with the fewest copies.
    pub(super) fn choose(&mut self, gpu: Arc<Gpu>, direction: Copy, class: StreamClass) -> Result<usize> {
        let (mut best, mut count) = (None, 0);
        for (index, known) in self.0.iter().enumerate() {
            let fits = (known.gpu.ordinal(), known.direction, known.class) == (gpu.ordinal(), direction, class);
            if !fits || known.stream.is_stuck() {
                continue;
            }
            count += 1;
            let depth = known.stream.depth();
            if depth == 0 {
                return Ok(index);
            }
            if best.is_none_or(|(least, _)| depth < least) {
                best = Some((depth, index));
            }
        }
        let max = match class {
            StreamClass::Short => SHORT_STREAMS,
            StreamClass::Long => LONG_STREAMS,
        };
        match best {
            Some((_, index)) if count >= max => Ok(index),
            _ => {
                let stream = gpu.take_stream()?;
                self.0.push(LinkStream { gpu, direction, class, stream });
                Ok(self.0.len() - 1)
            }
        }
    }
}

/// Checks that `len` bytes of this process's memory at `address` are all mapped. Its owner may have freed some since
/// the transfer was requested, and a copy engine that accesses an unmapped address destroys the whole context.
pub(super) fn check_local(context: &Context, address: u64, len: usize) -> Result<()> {
    let (mut at, end) = (address, address.saturating_add(len as u64));
    while at < end {
        let mapped = match PointerInfo::extent(context, at)? {
            Some((base, len)) => Some(base.saturating_add(len as u64)),
            // Memory of pools is known by its attributes only.
            None => {
                let info = PointerInfo::of(context, at)?;
                (info.kind == MemoryKind::Device).then(|| info.base.saturating_add(info.len))
            }
        };
        at = mapped.filter(|end| *end > at).ok_or_else(|| {
            Error::new(ErrorKind::Usage, "copy", format!("the memory at {at:#x} was freed")).with_lane("cuda_ipc")
        })?;
    }
    Ok(())
}

/// The destination and source addresses of a span.
fn addresses(job: &Job, done: usize, span: &Span<OpenPiece>) -> (u64, u64) {
    let (local, remote) = (job.local as u64 + done as u64, span.open.address() + span.offset);
    match job.copy {
        Copy::Pull => (local, remote),
        Copy::Push => (remote, local),
    }
}
