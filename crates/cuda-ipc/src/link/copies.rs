//! Copies under way: the streams that they go into, and what is put there.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_cuda::{Context, MemoryKind, PointerInfo};
use crossrail_transport::{Copy, Job};
use crossrail_types::{Error, ErrorKind, Result};

use super::Link;
use crate::crowd::{UnderWay, Waiting};
use crate::domain::Gpu;
use crate::driver::Open;
use crate::imports::{Search, Span};
use crate::note::{Place, Uuid};
use crate::queue::{Queue, Watch};

/// How long a copy lets others be first: those of another worker may have ended without anybody having looked.
const PATIENCE: Duration = Duration::from_millis(50);
/// Copies that are put in before everything else gets its turn.
const PUT_AT_ONCE: usize = 64;
/// Copies up to that have streams of their own, so that they do not wait behind long ones.
const SHORT: usize = 512 << 10;
/// Streams for each GPU, direction and kind of copy: short ones, and long ones.
const SHORT_LINES: usize = 4;
const LONG_LINES: usize = 2;

/// A stream of one GPU and direction.
pub(super) struct Line {
    pub(super) gpu: Arc<Gpu>,
    copy: Copy,
    kind: Kind,
    pub(super) queue: Queue,
}

/// What kind of copies goes into a line: those of different kinds do not wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Short,
    Long,
}

/// One copy under way.
pub(super) struct Copying {
    pub(super) watch: Watch,
    pub(super) stage: Stage,
    /// Of a long copy to or from another GPU.
    pub(super) _under_way: Option<UnderWay>,
}

pub(super) enum Stage {
    /// The peer's pieces are being opened, for the GPU of that number.
    Seeking(Search<Open>, u32),
    /// They are open; others' copies are before this one.
    Queued(Vec<Span<Open>>, u32, Option<Waiting>),
    /// Pieces from `next` on are still to be put in.
    Putting { line: usize, spans: Vec<Span<Open>>, next: usize, done: usize },
    /// All is in. `failed`: something could not be put in; what was is waited for.
    Flying { line: usize, value: u64, spans: Vec<Span<Open>>, failed: Option<String> },
}

impl Copying {
    /// Whether others come first.
    pub(super) fn is_held(&self, now: Instant) -> bool {
        let Stage::Queued(_, _, Some(waiting)) = &self.stage else { return false };
        self.watch.waited(now) < PATIENCE && !waiting.may_begin(now)
    }
}

impl Link {
    /// The word behind what is in a line.
    pub(super) fn mark(&mut self, line: usize) -> u64 {
        let Line { gpu, queue, .. } = &mut self.lines[line];
        queue.mark(gpu)
    }

    /// The other GPU of a long copy; nothing for short ones, and those within one GPU.
    pub(super) fn peer_of(&self, gpu: &Gpu, job: &Job) -> Option<Uuid> {
        let owner = Place::decode(&job.remote).ok().and_then(|place| self.imports.owner(place));
        owner.filter(|owner| *owner != gpu.uuid && job.len > SHORT)
    }

    /// A line for a copy whose parts are all open.
    pub(super) fn launch(&mut self, spans: Vec<Span<Open>>, device: u32, job: &Job) -> Result<Copying> {
        let gpu = self.domain.gpu(device)?;
        let peer = self.peer_of(&gpu, job);
        let under_way = peer.map(|peer| gpu.crowd.begin(peer, job.len as u64));
        let kind = if job.len <= SHORT { Kind::Short } else { Kind::Long };
        gpu.count_copy();
        let line = self.line(gpu, job.copy, kind)?;
        let stage = Stage::Putting { line, spans, next: 0, done: 0 };
        Ok(Copying { watch: Watch::new(Instant::now()), stage, _under_way: under_way })
    }

    /// Puts some more parts in, and the word behind the last.
    ///
    /// # Safety
    /// As [`Direct::step`]; the spans must be as long as the job together.
    pub(super) unsafe fn put(&mut self, stage: Stage, job: &Job) -> Stage {
        let Stage::Putting { line, spans, mut next, mut done } = stage else { return stage };
        let mut failed = None;
        while let Some(span) = spans.get(next).filter(|_| failed.is_none()) {
            let (dst, src) = ends(job, done, span);
            let Line { gpu, queue, .. } = &mut self.lines[line];
            let there = whole(&gpu.context, job.local as u64 + done as u64, span.len);
            // SAFETY: the peer's end is open for this GPU and in bounds, which `seek` checked; ours is the caller's, and
            // is there. They don't overlap: one is the peer's, or the peer is this process and copies onto itself.
            match there.and_then(|()| unsafe { queue.copy(dst, src, span.len) }) {
                Ok(()) => (next, done) = (next + 1, done + span.len),
                Err(error) => failed = Some(error.to_string()),
            }
            if next.is_multiple_of(PUT_AT_ONCE) && next < spans.len() && failed.is_none() {
                return Stage::Putting { line, spans, next, done };
            }
        }
        Stage::Flying { line, value: self.mark(line), spans, failed }
    }

    /// A stream for that GPU, direction and kind: one in which nothing is, or a new one, or the one with least.
    fn line(&mut self, gpu: Arc<Gpu>, copy: Copy, kind: Kind) -> Result<usize> {
        let (mut best, mut count) = (None, 0);
        for (index, line) in self.lines.iter().enumerate() {
            let fits = (line.gpu.ordinal(), line.copy, line.kind) == (gpu.ordinal(), copy, kind);
            if !fits || line.queue.is_stuck() {
                continue;
            }
            count += 1;
            let depth = line.queue.depth();
            if depth == 0 {
                return Ok(index);
            }
            if best.is_none_or(|(least, _)| depth < least) {
                best = Some((depth, index));
            }
        }
        let most = match kind {
            Kind::Short => SHORT_LINES,
            Kind::Long => LONG_LINES,
        };
        match best {
            Some((_, index)) if count >= most => Ok(index),
            _ => {
                let queue = gpu.queue()?;
                self.lines.push(Line { gpu, copy, kind, queue });
                Ok(self.lines.len() - 1)
            }
        }
    }
}

/// Whether `len` bytes at `address`, memory of ours, are all there at this moment: somebody may have freed them since the
/// transfer was asked for, and a copy engine that meets a hole loses the whole context.
fn whole(context: &Context, address: u64, len: usize) -> Result<()> {
    let (mut at, end) = (address, address.saturating_add(len as u64));
    while at < end {
        let there = match PointerInfo::extent(context, at)? {
            Some((base, len)) => Some(base.saturating_add(len as u64)),
            // Memory of pools is known by its attributes alone.
            None => {
                let info = PointerInfo::of(context, at)?;
                (info.kind == MemoryKind::Device).then(|| info.base.saturating_add(info.len))
            }
        };
        at = there.filter(|behind| *behind > at).ok_or_else(|| {
            Error::new(ErrorKind::Usage, "copy", format!("the memory at {at:#x} was freed")).with_lane("cuda_ipc")
        })?;
    }
    Ok(())
}

/// A stage to leave in place of one that is taken apart.
pub(super) fn nothing() -> Stage {
    Stage::Putting { line: 0, spans: Vec::new(), next: 0, done: 0 }
}

/// Where a part's bytes go, and where they are.
fn ends(job: &Job, done: usize, span: &Span<Open>) -> (u64, u64) {
    let (ours, theirs) = (job.local as u64 + done as u64, span.open.address() + span.offset);
    match job.copy {
        Copy::Pull => (ours, theirs),
        Copy::Push => (theirs, ours),
    }
}
