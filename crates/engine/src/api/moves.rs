//! Moves: rows to rows, prepared once and started as often as wanted.
#![allow(unsafe_code)]

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use crossrail_gpu::StreamPoint;
use crossrail_locks::Mutex;
use crossrail_proto::RegionRef;
use crossrail_transport::List;
use crossrail_types::{Error, ErrorKind, OpId, Reason, Result};

use super::layout::Of;
use super::notices::check_len;
use super::{Endpoint, Layout, Op, Region, Request};
use crate::core::lists::{FollowUp, ListOperation, Part, SentDescription};
use crate::core::{Claim, OpKind};
use crate::memory::{Buffer, Place, Ready};
use crate::progress::{self, Progress};

/// Rows of GPU memory that are at least this long on average are staged one by one: their chunks are contiguous
/// already, and copy engines copy them.
const LONG_ROW: u64 = 256 << 10;

/// Which way a move goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoveKind {
    /// From the peer's rows to ours.
    Read,
    /// From our rows to the peer's.
    Write,
}

/// Options of a move. The index arrays and the notice are copied.
#[derive(Clone, Copy, Debug, Default)]
pub struct MoveOptions<'a> {
    /// The rows of the local layout, in their order; `None`: all.
    pub local_index: Option<&'a [u32]>,
    /// The rows of the remote layout: each moves to or from the row in the same place of the local one.
    pub remote_index: Option<&'a [u32]>,
    /// Raised at the peer ([`Worker::notices`](crate::Worker::notices)) once all bytes are in place, if it is not
    /// empty.
    pub notice: &'a [u8],
    /// Of a write: counted in the region of the first row of the remote layout once all bytes are there. Once for each
    /// start, and not if the move fails. Where there is one operation per run ([`Move::explain`]), the request may be
    /// finished a little earlier.
    pub imm: Option<u32>,
}

/// Options of one start of a move.
#[derive(Clone, Debug, Default)]
pub struct StartOptions<'a> {
    /// In place of the notice that it was prepared with; empty: none.
    pub notice: Option<&'a [u8]>,
    /// Only these, by their places in the indices; `None`: all.
    pub rows: Option<Range<u64>>,
    /// A point in a stream before which no row of GPU memory here is touched.
    pub after: Option<Ready>,
}

/// How a move is carried out, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoveExplain {
    /// `one transfer`, or `an operation per run`.
    pub how: String,
    /// Why.
    pub why: String,
    /// What the endpoint uses for long transfers.
    pub lane: String,
    /// As [`Move::rows`], [`Move::runs`] and [`Move::nbytes`].
    pub rows: u64,
    /// Pieces, when neighbours on both sides are joined.
    pub runs: u64,
    /// Bytes.
    pub nbytes: u64,
}

/// Rows that move to rows, prepared. It may be started again when it has finished; any thread may use it. Dropping it
/// does not cancel what was started.
pub struct Move {
    endpoint: Endpoint,
    kind: MoveKind,
    prepared: Arc<Prepared>,
    notice: Vec<u8>,
    imm: Option<u32>,
    /// The operation that was started last.
    started: Mutex<Option<OpId>>,
}

/// What operations of a move use.
struct Prepared {
    progress: Arc<Progress>,
    claim: Claim,
    local: Layout,
    remote: Layout,
    /// The regions of `local`.
    over: Arc<[RegionRef]>,
    own: Arc<List>,
    theirs: List,
    /// The view and what it depends on. `None`: there is GPU memory, and runs go one by one.
    view: Option<[Option<SentDescription>; 3]>,
}

impl Drop for Prepared {
    fn drop(&mut self) {
        let Some([Some(view), ..]) = self.view else { return };
        if self.progress.check_origin("drop").is_err() {
            return;
        }
        let (progress, claim) = (self.progress.clone(), self.claim.clone());
        self.progress.defer(Box::new(move || {
            let mut core = progress.core();
            core.withdraw(claim.id, &[view]);
            progress.after(core);
        }));
    }
}

/// Keeps a value until an operation is over, and drops it outside the worker's lock, under which operations end.
struct DropLater {
    progress: Arc<Progress>,
    what: Option<Arc<Prepared>>,
}

impl Drop for DropLater {
    fn drop(&mut self) {
        // Mostly others hold it, too.
        if let Some(last) = self.what.take().and_then(Arc::into_inner) {
            self.progress.defer(Box::new(move || drop(last)));
        }
    }
}

fn usage(detail: impl Into<String>) -> Error {
    Error::new(ErrorKind::Usage, "prepare", detail)
}

impl Endpoint {
    /// Prepares to move rows between `local`, a layout of this worker, and `remote`, one of this endpoint's peer. The
    /// rows are paired in their order, and those of a pair must be equally long.
    ///
    /// The peer is told of both layouts, once, and of the indices; none of that waits for it.
    ///
    /// # Errors
    /// `Usage`: rows that do not pair, an index beyond the layout, layouts of others, a notice that is too long;
    /// `Exhausted`: the peer would hold more lists of this end than it takes; `PeerDead`, `Closed`.
    pub fn prepare(&self, kind: MoveKind, local: &Layout, remote: &Layout, options: MoveOptions<'_>) -> Result<Move> {
        let progress = self.worker.progress_handle();
        progress.check_origin("prepare")?;
        let MoveOptions { local_index, remote_index, notice, imm } = options;
        check_len("prepare", notice)?;
        let over = match (&local.0.of, &remote.0.of) {
            (Of::Own(regions), Of::Peer(id, _)) if *id == self.id && regions.iter().all(|r| r.is_of(progress)) => {
                regions.iter().map(Region::entry).collect()
            }
            (Of::Own(_), Of::Peer(..)) => return Err(usage("a layout belongs to another worker or endpoint")),
            _ => return Err(usage("a move is between a layout of this worker and one of the peer's")),
        };
        if imm.is_some() && kind == MoveKind::Read {
            return Err(usage("only a write has an immediate"));
        }
        let (own, theirs) = (local.list(local_index)?, remote.list(remote_index)?);
        if !own.fits(&theirs) {
            let detail = match own.count() == theirs.count() {
                true => "rows of a pair that are not equally long".to_owned(),
                false => format!("{} local and {} remote rows", own.count(), theirs.count()),
            };
            return Err(usage(detail));
        }
        let host = local.is_host() && remote.is_host();
        let gpu = local.is_of_one_gpu() && remote.is_of_one_gpu();
        let mut core = progress.core();
        let sent = (|| {
            if !host && !gpu {
                return Ok(None);
            }
            let own_rows = local.describe(&mut core, self.id)?;
            if gpu && own_rows.is_none() && own.bytes() / own.count().max(1) >= LONG_ROW {
                return Ok(None);
            }
            let rows = remote.describe(&mut core, self.id)?.ok_or_else(|| usage("no rows"))?;
            let of = |list: &List| list.rows().even();
            let paired = own_rows.as_ref().map(|sent| (sent, own.index(), of(&own)));
            let view = core.describe_view(self.id, (&rows, theirs.index(), of(&theirs)), paired)?;
            Ok::<_, Error>(Some([Some(view), Some(rows), own_rows]))
        })();
        let claim = core.peers().claim(self.id);
        progress.after(core);
        let (local, remote, own) = (local.clone(), remote.clone(), Arc::new(own));
        let view = sent?;
        let prepared = Prepared { progress: progress.clone(), claim, local, remote, over, own, theirs, view };
        let (endpoint, prepared) = (self.clone(), Arc::new(prepared));
        Ok(Move { endpoint, kind, prepared, notice: notice.to_vec(), imm, started: Mutex::new(None) })
    }
}

impl Move {
    /// Bytes of all rows.
    pub fn nbytes(&self) -> u64 {
        self.prepared.own.bytes()
    }

    /// Rows.
    pub fn rows(&self) -> u64 {
        self.prepared.own.count()
    }

    /// Pieces that are left when rows that adjoin on both sides are joined. Takes one pass over the rows.
    pub fn runs(&self) -> u64 {
        self.prepared.own.runs(&self.prepared.theirs)
    }

    /// Whether it was started and has not finished.
    pub fn is_in_flight(&self) -> bool {
        let started = *self.started.lock();
        let core = self.prepared.progress.core_here();
        started.zip(core).is_some_and(|(op, mut core)| !core.operations().is_done(op))
    }

    /// How it goes, and why.
    pub fn explain(&self) -> MoveExplain {
        let (how, why) = match self.prepared.view {
            Some([_, _, own]) if !self.prepared.local.is_host() => (
                "one transfer",
                match own {
                    Some(_) => {
                        "the peer's GPU reaches all rows: a kernel copies them, or copy engines where runs are long"
                    }
                    None => {
                        "rows of GPU memory are gathered into chunks, which the lanes carry, and scattered from them"
                    }
                },
            ),
            Some([_, _, Some(_)]) => ("one transfer", "the peer reaches all rows: it copies between them"),
            Some(_) => ("one transfer", "host memory, which the lanes carry from rows to rows"),
            None => ("an operation per run", "rows of GPU memory that are long, or at one end alone"),
        };
        let lane = self.endpoint.explain().large;
        let (rows, runs, nbytes) = (self.rows(), self.runs(), self.nbytes());
        MoveExplain { how: how.to_owned(), why: why.to_owned(), lane, rows, runs, nbytes }
    }

    /// Starts it. Finished when all bytes are in place, as for a write or a read; the notice is then raised at the
    /// peer, and the immediate counted, with no further call here.
    ///
    /// # Errors
    /// `Usage`: it is in flight, or there are no such rows; `Region`: a local region was deregistered; `PeerDead`,
    /// `Closed`. In the request `Region`: the peer has deregistered one of its regions.
    pub fn start(&self, options: StartOptions<'_>) -> Result<Request> {
        let progress = &self.prepared.progress;
        progress.check_origin("start")?;
        let notice = options.notice.unwrap_or(&self.notice);
        check_len("start", notice)?;
        let own = &self.prepared.own;
        let rows = options.rows.clone().unwrap_or(0..own.count());
        if rows.start >= rows.end || rows.end > own.count() {
            let detail = format!("rows {}..{} of {}", rows.start, rows.end, own.count());
            return Err(Error::new(ErrorKind::Usage, "start", detail));
        }
        let after = if self.prepared.view.is_some() { self.to_wait_for(options.after.as_ref())? } else { None };
        let mut started = self.started.lock();
        let mut core = progress.core();
        if started.is_some_and(|op| !core.operations().is_done(op)) {
            return Err(Error::new(ErrorKind::Usage, "start", "the move is in flight")
                .with_reason(Reason::InFlight)
                .with_hint("wait for its request, or cancel it"));
        }
        self.prepared.local.check_live(&mut core)?;
        let (from, end) = (own.position(rows.start), own.position(rows.end));
        // Rows of no bytes are in no memory.
        let gpu = self.prepared.local.device(&mut core).filter(|_| end > from);
        let op = match self.prepared.view {
            Some(view) => {
                let kind = match self.kind {
                    MoveKind::Read => OpKind::Read,
                    MoveKind::Write => OpKind::Write,
                };
                let (local, notice) = (Part { list: own.clone(), from, gpu }, notice.to_vec());
                let over = self.prepared.over.clone();
                let keep = self.keep();
                let what =
                    ListOperation { kind, view, local, over, len: end - from, imm: self.imm, notice, keep, after };
                let op = core.start_list(self.endpoint.id, what);
                progress.after(core);
                op?
            }
            None => {
                drop(core);
                self.start_runs((from, end - from), notice, options.after)?
            }
        };
        *started = Some(op);
        Ok(Request::new(progress, op))
    }

    /// The GPU whose memory the local rows are, and the point in a stream of it, unless that is reached.
    fn to_wait_for(&self, after: Option<&Ready>) -> Result<Option<(u32, StreamPoint)>> {
        let Some(Ready(point)) = after else { return Ok(None) };
        let Prepared { progress, local, .. } = &*self.prepared;
        let Some(device) = local.device(&mut progress.core()).filter(|_| !local.is_host()) else { return Ok(None) };
        if point.is_reached()? {
            return Ok(None);
        }
        progress::admit_device(progress, &device)?;
        Ok(Some((device.ordinal(), point.clone())))
    }

    fn keep(&self) -> Arc<dyn Any + Send + Sync> {
        Arc::new(DropLater { progress: self.prepared.progress.clone(), what: Some(self.prepared.clone()) })
    }

    /// Starts an operation for each run: what links and staging of GPU memory know.
    fn start_runs(&self, (from, len): (u64, u64), notice: &[u8], after: Option<Ready>) -> Result<OpId> {
        let progress = &self.prepared.progress;
        let mut ops = self.runs_as_operations(from, len, after.as_ref())?;
        for op in &mut ops {
            progress::admit(progress, op.buffer())?;
        }
        let mut core = progress.core();
        // The lock was released since the first check.
        self.prepared.local.check_live(&mut core)?;
        let parent = core.start_batch(self.endpoint.id)?;
        let mut failure = None;
        for op in ops {
            let (submission, buffer) = op.submission();
            match core.submit(Some(self.endpoint.id), submission, buffer) {
                Ok(op) => {
                    if let Some(entry) = core.operations().op_mut(op) {
                        entry.set_over(self.prepared.over.clone());
                    }
                    core.operations().adopt(parent, op);
                }
                Err(error) => {
                    failure = Some(Box::new(error));
                    break;
                }
            }
        }
        // Runs end in any order: not with the last of them.
        let count = self.prepared.remote.first_key().map(|key| key.key).zip(self.imm);
        if (!notice.is_empty() || count.is_some())
            && let Some(entry) = core.operations().op_mut(parent)
        {
            entry.set_follow_up(FollowUp::Notify(count, notice.to_vec()));
        }
        core.operations().release(parent, failure);
        progress.after(core);
        Ok(parent)
    }

    fn runs_as_operations(&self, from: u64, len: u64, after: Option<&Ready>) -> Result<Vec<Op>> {
        let Prepared { local, remote, own, theirs, .. } = &*self.prepared;
        let Of::Peer(_, keys) = &remote.0.of else { return Err(usage("a layout of the peer's")) };
        let keep = self.keep();
        let (mut mine, mut there) = (own.cursor(from), theirs.cursor(from));
        let (mut a, mut b, mut left) = ((0, 0), (0, 0), len);
        let mut ops = Vec::new();
        while left > 0 {
            let piece = |cursor: &mut crossrail_transport::Cursor<'_>| cursor.piece(left);
            if a.1 == 0 {
                a = piece(&mut mine).ok_or_else(|| usage("fewer rows than bytes"))?;
            }
            if b.1 == 0 {
                b = piece(&mut there).ok_or_else(|| usage("fewer rows than bytes"))?;
            }
            let len = a.1.min(b.1);
            // A run of rows may go on in the next region, which adjoins.
            let (region, offset) = remote.locate(b.0).ok_or_else(|| usage("a row outside its region"))?;
            let key = &keys[region];
            let len = len.min(key.len() - offset);
            let (at, _) = local.locate(a.0).ok_or_else(|| usage("a row outside its region"))?;
            let len = len.min(local.left(at, a.0));
            // SAFETY: memory of regions that `keep` holds, and that `Layout::check_live` has found registered; of
            // ranges registered by address, whoever registered them answers for it.
            let buffer = unsafe {
                match local.place(at) {
                    Place::Host => Buffer::raw(a.0 as *mut u8, len as usize, Some(keep.clone())),
                    Place::Gpu(gpu) => Buffer::device(a.0, len as usize, gpu, Some(keep.clone()), after.cloned()),
                }
            };
            ops.push(match self.kind {
                MoveKind::Write => Op::Write { local: buffer, remote: key.clone(), offset, imm: None },
                MoveKind::Read => Op::Read { local: buffer, remote: key.clone(), offset },
            });
            (a, b, left) = ((a.0 + len, a.1 - len), (b.0 + len, b.1 - len), left - len);
        }
        Ok(ops)
    }
}

impl std::fmt::Debug for Move {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Move({:?}, {} rows, {} bytes)", self.kind, self.rows(), self.nbytes())
    }
}
