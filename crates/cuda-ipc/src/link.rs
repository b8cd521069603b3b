//! A peer: the memory exported to it and imported from it, and the copies between.
#![allow(unsafe_code)]

mod copies;
mod rows;

use std::collections::HashMap;
use std::fmt;
use std::mem;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_cuda::{Device, PointerInfo};
use crossrail_transport::{Descriptor, DirectKind, Domain, Job, Step, Window};
use crossrail_types::{Error, ErrorKind, Result, format_duration};

pub use self::copies::RowsCopy;
use self::copies::{CopyStage, LinkStreams, PendingCopy, RowsInFlight, is_long};
use crate::copy_stream::CopyOutcome;
use crate::driver::{Imported, OpenPiece, PieceIdentity};
use crate::exports::{Exports, MAX_PIECES};
use crate::free_log::FreeLogCursor;
use crate::gpu::Gpu;
use crate::gpus::Gpus;
use crate::imports::{Imports, Limits, Search, SearchOutcome, Span};
use crate::mapping;
use crate::note::{RemoteRange, Uuid};

/// What is kept open of a peer's memory.
const LIMITS: Limits = Limits { open: 2048, files: 128 };
/// Maximum number of pieces opened in one step: opening takes driver calls, under the worker's lock.
const OPENED_PER_STEP: usize = 8;
/// Maximum number of entries that may wait to be sent to the peer.
const MAX_QUEUED: usize = 2 * MAX_PIECES;
/// The interval at which `tidy` checks pieces, and the number it checks.
const TIDY_INTERVAL: Duration = Duration::from_millis(100);
const TIDIED_AT_ONCE: usize = 64;

/// The GPU memory shared with one peer on the same machine.
///
/// # Contract
///
/// The owner calls all methods under the worker's lock. No method waits for a GPU, except [`Link::ended`], and dropping
/// a link with copies in flight.
///
/// The owner sends each note of [`Link::outgoing`] to the peer's [`Link::incoming`], in order, and confirms it with
/// [`Link::sent`]. Descriptors may take any path and need no order relative to notes: a descriptor says which notes it
/// depends on, and a copy or mapping waits for these.
///
/// A job of [`Domain::step`] is stepped until it completes or fails. If it is abandoned before, [`Link::stopped`] must
/// be polled until it returns true before the memory may be reused; [`Link::ended`] does so at once.
///
/// [`Link::tidy`] should be called periodically, also when there is no traffic.
///
/// Dropping the link closes everything it opened and releases what it holds of this process's memory. Mappings made by
/// [`Domain::map`] live until their own last user drops them.
pub struct Link {
    gpus: Arc<Gpus>,
    /// How long to wait for the note that announces a piece.
    note_limit: Duration,
    exports: Exports<PieceIdentity>,
    imports: Imports<Imported, OpenPiece>,
    streams: LinkStreams,
    /// Copies by the `state` of their jobs.
    copies: HashMap<u64, PendingCopy>,
    last_copy: u64,
    /// The local GPU used last.
    device: Option<u32>,
    tidy_at: Instant,
    free_log: FreeLogCursor,
    /// GPUs of the peer to which no local GPU has access, and the reason.
    inaccessible: Vec<(Uuid, String)>,
    /// What a stuck copy may still access. Never closed.
    stuck: Vec<(Vec<Span<OpenPiece>>, Option<RowsInFlight>)>,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (open, files) = self.imports.counts();
        let (exported, copies) = (self.exports.len(), self.copies.len());
        write!(f, "Link({exported} pieces exported, {open} open, {files} files, {copies} copies)")
    }
}

impl Link {
    /// A link to a new peer. `note_limit`: how long a copy waits for the note that announces its memory.
    pub fn new(gpus: Arc<Gpus>, note_limit: Duration) -> Link {
        Link {
            gpus,
            note_limit,
            exports: Exports::new(),
            imports: Imports::new(LIMITS),
            streams: LinkStreams::default(),
            copies: HashMap::new(),
            last_copy: 0,
            device: None,
            tidy_at: Instant::now(),
            free_log: FreeLogCursor::new(),
            inaccessible: Vec::new(),
            stuck: Vec::new(),
        }
    }

    /// Whether a descriptor is one of GPU memory.
    pub fn knows(descriptor: &Descriptor) -> bool {
        RemoteRange::is_kind_of(descriptor)
    }

    /// The next note for the peer, with its file descriptors. It stays until [`Link::sent`].
    pub fn outgoing(&self) -> Option<(&[u8], Vec<BorrowedFd<'_>>)> {
        self.exports.pending_note()
    }

    /// Confirms that the note was sent.
    pub fn sent(&mut self) {
        self.exports.note_sent();
        self.exports.prepare_note(&*self.gpus);
    }

    /// Processes a note of the peer. If some of its file descriptors could not be received, because this process has
    /// none left, `files` must be empty; they are requested again when needed.
    ///
    /// # Errors
    /// The peer violates the protocol; the lane should fail.
    pub fn incoming(&mut self, note: &[u8], files: Vec<OwnedFd>) -> std::result::Result<(), String> {
        for id in self.imports.read(note, files)? {
            self.exports.resend(id);
        }
        if self.exports.queue_len() > MAX_QUEUED {
            return Err("the peer requests pieces of GPU memory faster than it reads the answers".into());
        }
        self.exports.prepare_note(&*self.gpus);
        Ok(())
    }

    /// Announces that `len` bytes of this process's memory at `address` are about to be freed, so that the peer closes
    /// them. Memory freed by others is detected by [`Link::tidy`].
    pub fn freed(&mut self, address: u64, len: u64) {
        self.exports.withdraw(address, len);
        self.exports.prepare_note(&*self.gpus);
    }

    /// Checks a few exported pieces, so that neither end keeps memory open that its owner has freed. Returns whether a
    /// note is to be sent.
    ///
    /// To be called periodically, also when there is no traffic. Calls more frequent than every 100 ms only check what
    /// [`announce_free`](crate::announce_free) has reported.
    pub fn tidy(&mut self) -> bool {
        let now = Instant::now();
        let (freed, due) = (self.free_log.take_new(), now >= self.tidy_at);
        if self.exports.len() == 0 || (freed.is_empty() && !due) {
            return self.exports.pending_note().is_some();
        }
        let Ok(gpu) = self.gpus.any_in_use() else { return false };
        let _entered = gpu.context.enter();
        for (address, len) in freed {
            self.exports.check_range(&*self.gpus, address, len);
        }
        if due {
            self.tidy_at = now + TIDY_INTERVAL;
            self.exports.tidy(&*self.gpus, TIDIED_AT_ONCE);
        }
        self.exports.prepare_note(&*self.gpus);
        self.exports.pending_note().is_some()
    }

    /// The number of the peer's pieces that are open.
    pub fn open_pieces(&self) -> usize {
        self.imports.counts().0
    }

    /// Stops a job that is no longer stepped, by its last `state`. Returns whether its copy has stopped accessing
    /// memory; call again until it has. Never waits.
    pub fn stopped(&mut self, job_state: u64) -> bool {
        let Some(mut copy) = self.copies.remove(&job_state) else { return true };
        copy.stage = match copy.stage {
            CopyStage::Seeking(..) | CopyStage::Queued(..) => return true,
            stage => self.streams.cut_short(stage),
        };
        match self.streams.poll(&mut copy, self.gpus.copy_limit()) {
            CopyOutcome::Done | CopyOutcome::Failed(_) => return true,
            CopyOutcome::Pending => drop(self.copies.insert(job_state, copy)),
            CopyOutcome::Stuck => {
                self.give_up(copy);
                return true;
            }
        }
        false
    }

    /// Like [`Link::stopped`], but waits, at most for the copy limit. For a job that is dropped at once, as when the
    /// peer is lost.
    pub fn ended(&mut self, job_state: u64) {
        for turn in 0_u32.. {
            match turn {
                _ if self.stopped(job_state) => return,
                0..1000 => std::hint::spin_loop(),
                1000..2000 => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(20)),
            }
        }
    }

    /// Gives up a copy that did not complete. The memory it may access stays open for ever.
    fn give_up(&mut self, copy: PendingCopy) {
        if let CopyStage::InFlight { stream, spans, .. } = copy.stage {
            self.streams.set_stuck(stream);
            self.stuck.push((spans, copy.rows));
        }
    }

    /// Polls a copy of `len` bytes, and keeps it if it is not over.
    fn settle(&mut self, mut copy: PendingCopy, state: u64, len: u64) -> Step {
        match (self.streams.poll(&mut copy, self.gpus.copy_limit()), &mut copy.stage) {
            (CopyOutcome::Done, CopyStage::InFlight { failed, .. }) => failed.take().map_or(Step::Done, Step::Failed),
            (CopyOutcome::Failed(why), _) => Step::Failed(why),
            (CopyOutcome::Stuck, _) => {
                let limit = format_duration(self.gpus.copy_limit());
                self.give_up(copy);
                Step::Failed(format!("the copy of {len} bytes did not complete within {limit}"))
            }
            (CopyOutcome::Pending | CopyOutcome::Done, _) => {
                self.copies.insert(state, copy);
                Step::Waiting
            }
        }
    }

    fn begin(&mut self, job: &mut Job) -> std::result::Result<PendingCopy, String> {
        let search = Search::new(RemoteRange::decode(&job.remote)?, job.len)?;
        let device = self.local_device(job.local as u64)?;
        self.device = Some(device);
        self.last_copy += 1;
        job.state = self.last_copy;
        Ok(PendingCopy::new(search, device))
    }

    /// The GPU that owns an address of this process.
    fn local_device(&self, address: u64) -> std::result::Result<u32, String> {
        let gpu = self.gpus.any_in_use().map_err(|error| error.to_string())?;
        let device = PointerInfo::device_at(&gpu.context, address).map_err(|error| error.to_string())?;
        device.ok_or_else(|| format!("{address:#x} is not GPU memory of this process"))
    }

    /// The other GPU of a long copy; `None` for short copies and those within one GPU, which are not scheduled.
    fn scheduled_peer(&self, gpu: &Gpu, job: &Job) -> Option<Uuid> {
        let owner = RemoteRange::decode(&job.remote).ok().and_then(|range| self.imports.owner(range));
        owner.filter(|owner| *owner != gpu.uuid && is_long(job.len))
    }

    /// Advances a copy that is not in flight yet, as far as possible without waiting.
    ///
    /// # Safety
    /// As [`Domain::step`].
    unsafe fn advance(&mut self, copy: &mut PendingCopy, job: &Job) -> Step {
        // Checked first because dozens of copies may wait for their turn, and every pass steps all of them.
        if copy.waits_for_turn(Instant::now()) {
            return Step::Waiting;
        }
        let Ok(any) = self.gpus.any_in_use() else { return Step::Failed("this process uses no GPU".into()) };
        let _entered = any.context.enter();
        if let CopyStage::Seeking(search, device) = &mut copy.stage {
            match self.imports.seek(&*self.gpus, search, *device, OPENED_PER_STEP) {
                Ok(SearchOutcome::Complete) => {}
                Ok(SearchOutcome::BudgetSpent) => return Step::Waiting,
                Ok(SearchOutcome::NoteMissing) => return self.wait_for_note(copy, job),
                Ok(SearchOutcome::ResendNeeded(id)) => {
                    self.exports.request_resend(id);
                    self.exports.prepare_note(&*self.gpus);
                    return Step::Waiting;
                }
                Err(why) => {
                    self.remember_inaccessible(job, &why);
                    return Step::Failed(why);
                }
            }
            let (spans, device) = (mem::take(&mut search.spans), *device);
            let queued = match self.gpus.gpu(device) {
                Ok(gpu) => self.scheduled_peer(&gpu, job).map(|peer| gpu.schedule.queue(peer, Instant::now())),
                Err(error) => return Step::Failed(error.to_string()),
            };
            copy.stage = CopyStage::Queued(spans, device, queued);
        }
        if copy.waits_for_turn(Instant::now()) {
            return Step::Waiting;
        }
        if let CopyStage::Queued(spans, device, _) = &mut copy.stage {
            let (spans, device) = (mem::take(spans), *device);
            if let Err(why) = spans.iter().try_for_each(|span| span.open.check()) {
                return Step::Failed(why);
            }
            let started = self.gpus.gpu(device).and_then(|gpu| {
                let peer = self.scheduled_peer(&gpu, job);
                self.streams.start(gpu, peer, spans, job)
            });
            match started {
                Ok(started) => *copy = started,
                Err(error) => return Step::Failed(error.to_string()),
            }
        }
        if let CopyStage::Submitting { .. } = copy.stage {
            let empty = CopyStage::Queued(Vec::new(), 0, None);
            let submitting = mem::replace(&mut copy.stage, empty);
            // SAFETY: guaranteed by the caller; the total length of the spans is that of the job.
            copy.stage = unsafe { self.streams.submit(submitting, job) };
        }
        Step::Waiting
    }

    fn wait_for_note(&self, copy: &PendingCopy, job: &Job) -> Step {
        if copy.watch.waited(Instant::now()) < self.note_limit {
            return Step::Waiting;
        }
        let limit = format_duration(self.note_limit);
        Step::Failed(format!("the peer did not announce the memory of a {}-byte transfer within {limit}", job.len))
    }

    /// Remembers a GPU of the peer to which no local GPU has access, so that later transfers are not attempted.
    fn remember_inaccessible(&mut self, job: &Job, why: &str) {
        let owner = RemoteRange::decode(&job.remote).ok().and_then(|range| self.imports.owner(range));
        let Some(owner) = owner.filter(|owner| self.inaccessible.iter().all(|(known, _)| known != owner)) else {
            return;
        };
        let has_access =
            |ordinal: &u32| self.gpus.gpu(*ordinal).is_ok_and(|gpu| self.gpus.check_reach(&gpu, &owner).is_ok());
        if !self.gpus.in_use().iter().any(has_access) {
            self.inaccessible.push((owner, why.to_owned()));
        }
    }
}

impl Domain for Link {
    fn describe(&mut self, ptr: *const u8, len: usize) -> std::result::Result<(Descriptor, DirectKind), String> {
        let gpu = self.gpus.any_in_use().map_err(|error| error.to_string())?;
        let _entered = gpu.context.enter();
        let range = self.exports.describe(&*self.gpus, ptr as u64, len);
        self.exports.prepare_note(&*self.gpus);
        Ok((range?.encode(), DirectKind::CudaIpc))
    }

    fn reach(&mut self, remote: &Descriptor, len: usize) -> std::result::Result<DirectKind, String> {
        let range = RemoteRange::decode(remote)?;
        Search::<OpenPiece>::new(range, len)?;
        let owner = self.imports.owner(range);
        match self.inaccessible.iter().find(|(known, _)| Some(*known) == owner) {
            Some((_, why)) => Err(why.clone()),
            None => Ok(DirectKind::CudaIpc),
        }
    }

    fn open(&mut self, _len: usize) -> Option<u32> {
        None
    }

    unsafe fn step(&mut self, job: &mut Job, _budget: usize) -> Step {
        if job.len == 0 {
            return Step::Done;
        }
        let mut step = Step::Waiting;
        let mut copy = match self.copies.remove(&job.state) {
            Some(copy) => copy,
            None if job.state == 0 => match self.begin(job) {
                Ok(copy) => copy,
                Err(why) => return Step::Failed(why),
            },
            None => return Step::Failed("the copy has been given up".into()),
        };
        if !copy.is_in_flight() {
            // SAFETY: guaranteed by the caller.
            step = unsafe { self.advance(&mut copy, job) };
        }
        if step == Step::Waiting {
            step = self.settle(copy, job.state, job.len as u64);
        }
        if step == Step::Done {
            job.moved = job.len;
        }
        step
    }

    fn stop(&mut self, _slot: u32) -> bool {
        true
    }

    fn close(&mut self, _slot: u32) {}

    fn share(&mut self, ptr: *const u8, len: usize) -> Result<Option<Descriptor>> {
        let described = self.describe(ptr, len);
        described.map(|(descriptor, _)| Some(descriptor)).map_err(|why| refused(ErrorKind::Unsupported, "share", why))
    }

    fn map(&mut self, remote: &Descriptor, len: usize, gpu: Option<u32>) -> Result<Option<Window>> {
        let range = RemoteRange::decode(remote).map_err(|why| refused(ErrorKind::Region, "map", why))?;
        let ordinal = match gpu.or(self.device).or_else(|| self.gpus.in_use().first().copied()) {
            Some(ordinal) => ordinal,
            None if !self.imports.has_read(range) => return Ok(None),
            // This process uses no GPU: the owner's has the shortest path to its memory.
            None => self.imports.owner(range).and_then(|owner| self.gpus.device(&owner)).map_or(0, Device::ordinal),
        };
        let mut search = Search::new(range, len).map_err(|why| refused(ErrorKind::Region, "map", why))?;
        match self.imports.seek(&*self.gpus, &mut search, ordinal, MAX_PIECES) {
            Ok(SearchOutcome::Complete) => {}
            Ok(SearchOutcome::BudgetSpent | SearchOutcome::NoteMissing) => return Ok(None),
            Ok(SearchOutcome::ResendNeeded(id)) => {
                self.exports.request_resend(id);
                self.exports.prepare_note(&*self.gpus);
                return Ok(None);
            }
            Err(why) => return Err(refused(ErrorKind::Region, "map", why)),
        }
        let pieces = self.imports.imported(range, len, ordinal).ok_or_else(|| {
            let why = format!("{len} bytes span more than {} allocations", LIMITS.open);
            refused(ErrorKind::Unsupported, "map", why)
        });
        let (pieces, offset) = pieces?;
        let owner = self.imports.owner(range);
        mapping::map_pieces(&self.gpus, &pieces, offset, len, (ordinal, owner)).map(Some)
    }
}

fn refused(kind: ErrorKind, operation: &str, why: String) -> Error {
    Error::new(kind, operation, why).with_lane("cuda_ipc")
}

impl Drop for Link {
    fn drop(&mut self) {
        let in_flight: Vec<u64> = self.copies.keys().copied().collect();
        in_flight.into_iter().for_each(|state| self.ended(state));
        self.streams.put_back();
        // Leaked deliberately: unmapping memory that a copy still accesses would destroy the context.
        mem::take(&mut self.stuck).into_iter().for_each(mem::forget);
    }
}
