//! One peer: its memory as we reach it, ours as it does, and the copies between.
#![allow(unsafe_code)]

mod copies;

use std::collections::HashMap;
use std::fmt;
use std::mem;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_cuda::{Device, PointerInfo};
use crossrail_transport::{Descriptor, Direct, DirectKind, Job, Step, Window};
use crossrail_types::{Error, ErrorKind, Result, format_duration};

use self::copies::{Copying, Line, Stage, nothing};
use crate::domain::Domain;
use crate::driver::{Held, Known, Open};
use crate::exports::{Exports, MOST_PIECES};
use crate::freed::Heard;
use crate::imports::{Imports, Limits, Search, Sought, Span};
use crate::note::{Place, Uuid};
use crate::queue::{Outcome, Queue, Watch};
use crate::window;

/// What is kept open of one peer's memory.
const LIMITS: Limits = Limits { open: 2048, files: 128 };
/// Pieces that are opened before everything else gets its turn.
const OPENED_AT_ONCE: usize = 8;
/// Entries that may wait for room on the way to the peer.
const MOST_WAITING: usize = 2 * MOST_PIECES;
/// How often `tidy` does something, and how many pieces it then looks at.
const TIDY_EVERY: Duration = Duration::from_millis(100);
const TIDIED: usize = 64;

/// One peer on the same machine, as far as GPU memory is concerned.
///
/// It is driven under the worker's lock: no call waits for a GPU, but for [`Link::ended`] and the drop of a link whose
/// copies are under way. Notes from [`Link::outgoing`] go to the peer's [`Link::incoming`], in order; descriptors in
/// any way, and in any order with them.
///
/// What it opened is closed, and what it holds of our own memory is let go of, when it is dropped; what was mapped by
/// [`Direct::map`] stays until its own last user is gone.
pub struct Link {
    domain: Arc<Domain>,
    limit: Duration,
    exports: Exports<Known>,
    imports: Imports<Held, Open>,
    lines: Vec<Line>,
    copies: HashMap<u64, Copying>,
    last_copy: u64,
    /// The GPU of ours that was used last.
    device: Option<u32>,
    why_not: Option<String>,
    tidy_at: Instant,
    heard: Heard,
    /// GPUs of the peer's that none of ours could reach, and why.
    refused: Vec<(Uuid, String)>,
    /// What copies that never ended still hold.
    lost: Vec<Vec<Span<Open>>>,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (open, files) = self.imports.counts();
        let (told, copies) = (self.exports.len(), self.copies.len());
        write!(f, "Link({told} pieces told, {open} open, {files} files, {copies} copies)")
    }
}

impl Link {
    /// A link of which nothing is known. `limit`: how long an allocation that was named may take to arrive.
    pub fn new(domain: Arc<Domain>, limit: Duration) -> Link {
        Link {
            domain,
            limit,
            exports: Exports::new(),
            imports: Imports::new(LIMITS),
            lines: Vec::new(),
            copies: HashMap::new(),
            last_copy: 0,
            device: None,
            why_not: None,
            tidy_at: Instant::now(),
            heard: Heard::new(),
            refused: Vec::new(),
            lost: Vec::new(),
        }
    }

    /// Whether a descriptor is of GPU memory; shared memory has others.
    pub fn knows(descriptor: &Descriptor) -> bool {
        Place::decode(descriptor).is_ok()
    }

    /// The next note for the peer, and the files that go with it. It stays until [`Link::sent`].
    pub fn outgoing(&self) -> Option<(&[u8], Vec<BorrowedFd<'_>>)> {
        self.exports.ready()
    }

    /// The note was passed.
    pub fn sent(&mut self) {
        self.exports.passed();
        self.exports.prepare(&*self.domain);
    }

    /// A note of the peer's. With fewer files than it names, where this process had no descriptors left for them,
    /// `files` must be empty: they are asked for again when they are needed.
    ///
    /// # Errors
    /// The peer does not follow the protocol; the lane should fail.
    pub fn incoming(&mut self, note: &[u8], files: Vec<OwnedFd>) -> std::result::Result<(), String> {
        for id in self.imports.read(note, files)? {
            self.exports.again(id);
        }
        if self.exports.waiting() > MOST_WAITING {
            return Err("the peer asks for pieces of GPU memory faster than it takes the answers".into());
        }
        self.exports.prepare(&*self.domain);
        Ok(())
    }

    /// Why the last [`Direct::describe`] was `None`.
    pub fn why_not(&self) -> Option<&str> {
        self.why_not.as_deref()
    }

    /// `len` bytes at `address`, memory of ours, are about to be freed: the peer is told to let go of them. Memory that
    /// others free is noticed by and by, see [`Link::tidy`].
    pub fn freed(&mut self, address: u64, len: u64) {
        self.exports.freed(address, len);
        self.exports.prepare(&*self.domain);
    }

    /// Looks whether memory of ours that the peer was told of is still there, a few pieces at a time, so that neither
    /// end holds what its owner has freed. To be called now and then, also when nothing moves; called more often than ten
    /// times a second it only looks at what [`freed`](crate::freed()) has named. Whether there is something to tell.
    pub fn tidy(&mut self) -> bool {
        let now = Instant::now();
        let (news, due) = (self.heard.news(), now >= self.tidy_at);
        if self.exports.len() == 0 || (news.is_empty() && !due) {
            return self.exports.ready().is_some();
        }
        let Ok(asked) = self.domain.asked() else { return false };
        let _entered = asked.context.enter();
        for (address, len) in news {
            self.exports.look_at(&*self.domain, address, len);
        }
        if due {
            self.tidy_at = now + TIDY_EVERY;
            self.exports.tidy(&*self.domain, TIDIED);
        }
        self.exports.prepare(&*self.domain);
        self.exports.ready().is_some()
    }

    /// How many pieces of the peer's memory are open here.
    pub fn open_pieces(&self) -> usize {
        self.imports.counts().0
    }

    /// A job whose `state` this was is not wanted any more, and no longer stepped: whether its copy is off the memory. Ask
    /// until it is; never waits.
    pub fn stopped(&mut self, job_state: u64) -> bool {
        let Some(mut copying) = self.copies.remove(&job_state) else { return true };
        copying.stage = match copying.stage {
            Stage::Seeking(..) | Stage::Queued(..) => return true,
            Stage::Putting { line, spans, .. } => Stage::Flying { line, value: self.mark(line), spans, failed: None },
            flying => flying,
        };
        match self.look(&mut copying) {
            Outcome::Done | Outcome::Failed(_) => return true,
            Outcome::Pending => drop(self.copies.insert(job_state, copying)),
            Outcome::Stuck => {
                self.give_up(copying);
                return true;
            }
        }
        false
    }

    /// As [`Link::stopped`], but waits for it, for at most a bounded time: for a job that is dropped at once, as when the
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

    /// Looks at a copy that flies.
    fn look(&self, copying: &mut Copying) -> Outcome {
        let Stage::Flying { line, value, .. } = copying.stage else { return Outcome::Pending };
        if !Queue::is_said(value) {
            copying.watch.ask_always();
        }
        let queue = &self.lines[line].queue;
        let limit = self.domain.copy_limit();
        copying.watch.look(Instant::now(), limit, || queue.reached(value), || queue.ask())
    }

    /// A copy never ended: what it touches must stay.
    fn give_up(&mut self, copying: Copying) {
        if let Stage::Flying { line, spans, .. } = copying.stage {
            self.lines[line].queue.set_stuck();
            self.lost.push(spans);
        }
    }

    fn begin(&mut self, job: &mut Job) -> std::result::Result<Copying, String> {
        let place = Place::decode(&job.remote)?;
        let search = Search::new(place, job.len)?;
        let device = self.local_device(job.local as u64)?;
        self.device = Some(device);
        self.last_copy += 1;
        job.state = self.last_copy;
        Ok(Copying { watch: Watch::new(Instant::now()), stage: Stage::Seeking(search, device), _under_way: None })
    }

    /// The GPU that an address of ours is memory of.
    fn local_device(&self, address: u64) -> std::result::Result<u32, String> {
        let asked = self.domain.asked().map_err(|error| error.to_string())?;
        let device = PointerInfo::device_at(&asked.context, address).map_err(|error| error.to_string())?;
        device.ok_or_else(|| format!("{address:#x} is no memory of a GPU of this process"))
    }

    /// Goes on with a copy as far as it goes without waiting.
    ///
    /// # Safety
    /// As [`Direct::step`].
    unsafe fn go_on(&mut self, copying: &mut Copying, job: &Job) -> Step {
        // Dozens may wait, and are looked at in every pass.
        if copying.is_held(Instant::now()) {
            return Step::Waiting;
        }
        let Ok(asked) = self.domain.asked() else { return Step::Failed("no GPU is in use here".into()) };
        let _entered = asked.context.enter();
        if let Stage::Seeking(search, device) = &mut copying.stage {
            let sought = self.imports.seek(&*self.domain, search, *device, OPENED_AT_ONCE);
            match sought {
                Ok(Sought::All) => {}
                Ok(Sought::More) => return Step::Waiting,
                Ok(Sought::Missing) => return self.wait_for_note(copying, job),
                Ok(Sought::Again(id)) => {
                    self.exports.ask_again(id);
                    self.exports.prepare(&*self.domain);
                    return Step::Waiting;
                }
                Err(why) => {
                    self.remember(job, &why);
                    return Step::Failed(why);
                }
            }
            let (spans, device) = (mem::take(&mut search.spans), *device);
            let waiting = match self.domain.gpu(device) {
                Ok(gpu) => self.peer_of(&gpu, job).map(|peer| gpu.crowd.wait(peer, Instant::now())),
                Err(error) => return Step::Failed(error.to_string()),
            };
            copying.stage = Stage::Queued(spans, device, waiting);
        }
        if copying.is_held(Instant::now()) {
            return Step::Waiting;
        }
        if let Stage::Queued(spans, device, _) = &mut copying.stage {
            let (spans, device) = (mem::take(spans), *device);
            if let Err(why) = spans.iter().try_for_each(|span| span.open.check()) {
                return Step::Failed(why);
            }
            match self.launch(spans, device, job) {
                Ok(launched) => *copying = launched,
                Err(error) => return Step::Failed(error.to_string()),
            }
        }
        if let Stage::Putting { .. } = copying.stage {
            let putting = mem::replace(&mut copying.stage, nothing());
            // SAFETY: handed on; the spans are as long as the job together.
            copying.stage = unsafe { self.put(putting, job) };
        }
        Step::Waiting
    }

    fn wait_for_note(&self, copying: &Copying, job: &Job) -> Step {
        if copying.watch.waited(Instant::now()) < self.limit {
            return Step::Waiting;
        }
        let limit = format_duration(self.limit);
        Step::Failed(format!("the memory that {} bytes of the peer's lie in was not passed within {limit}", job.len))
    }

    /// Keeps in mind that a GPU of the peer's can't be reached, so that the next transfer is not even tried.
    fn remember(&mut self, job: &Job, why: &str) {
        let owner = Place::decode(&job.remote).ok().and_then(|place| self.imports.owner(place));
        let Some(owner) = owner.filter(|owner| self.refused.iter().all(|(known, _)| known != owner)) else { return };
        let reaches =
            |ordinal: &u32| self.domain.gpu(*ordinal).is_ok_and(|gpu| self.domain.check_reach(&gpu, &owner).is_ok());
        if !self.domain.in_use().iter().any(reaches) {
            self.refused.push((owner, why.to_owned()));
        }
    }

    fn place_of(&mut self, address: u64, len: usize) -> std::result::Result<Place, String> {
        let asked = self.domain.asked().map_err(|error| error.to_string())?;
        let _entered = asked.context.enter();
        let place = self.exports.describe(&*self.domain, address, len);
        self.exports.prepare(&*self.domain);
        place
    }

    /// As [`Direct::map`], for the GPU `cuda:ordinal` of this process.
    ///
    /// # Errors
    /// As there.
    pub fn map_on(&mut self, remote: &Descriptor, len: usize, ordinal: u32) -> Result<Option<Window>> {
        let refused = |kind: ErrorKind, why: String| Error::new(kind, "map", why).with_lane("cuda_ipc");
        let place = Place::decode(remote).map_err(|why| refused(ErrorKind::Region, why))?;
        let mut search = Search::new(place, len).map_err(|why| refused(ErrorKind::Region, why))?;
        match self.imports.seek(&*self.domain, &mut search, ordinal, MOST_PIECES) {
            Ok(Sought::All) => {}
            Ok(Sought::More | Sought::Missing) => return Ok(None),
            Ok(Sought::Again(id)) => {
                self.exports.ask_again(id);
                self.exports.prepare(&*self.domain);
                return Ok(None);
            }
            Err(why) => return Err(refused(ErrorKind::Region, why)),
        }
        let whole = self.imports.whole(place, len, ordinal);
        let (held, offset) = whole.ok_or_else(|| {
            refused(ErrorKind::Unsupported, format!("{len} bytes lie in more than {} allocations", LIMITS.open))
        })?;
        let owner = self.imports.owner(place);
        window::make(&self.domain, &held, offset, len, (ordinal, owner)).map(Some)
    }
}

impl Direct for Link {
    fn describe(&mut self, ptr: *const u8, len: usize) -> Option<(Descriptor, DirectKind)> {
        match self.place_of(ptr as u64, len) {
            Ok(place) => Some((place.encode(), DirectKind::CudaIpc)),
            Err(why) => {
                self.why_not = Some(why);
                None
            }
        }
    }

    fn reach(&mut self, remote: &Descriptor, len: usize) -> std::result::Result<DirectKind, String> {
        let place = Place::decode(remote)?;
        Search::<Open>::new(place, len)?;
        let owner = self.imports.owner(place);
        match self.refused.iter().find(|(known, _)| Some(*known) == owner) {
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
        let flies = |copying: &Copying| matches!(copying.stage, Stage::Flying { .. });
        let mut step = Step::Waiting;
        let mut copying = match self.copies.remove(&job.state) {
            Some(copying) => copying,
            None if job.state == 0 => match self.begin(job) {
                Ok(copying) => copying,
                Err(why) => return Step::Failed(why),
            },
            None => return Step::Failed("a copy that was given up before".into()),
        };
        if !flies(&copying) {
            // SAFETY: handed on.
            step = unsafe { self.go_on(&mut copying, job) };
        }
        if step == Step::Waiting {
            match (self.look(&mut copying), &mut copying.stage) {
                (Outcome::Pending, _) => {}
                (Outcome::Done, Stage::Flying { failed, .. }) => step = failed.take().map_or(Step::Done, Step::Failed),
                (Outcome::Done, _) => {}
                (Outcome::Failed(why), _) => step = Step::Failed(why),
                (Outcome::Stuck, _) => {
                    let (len, limit) = (job.len, format_duration(self.domain.copy_limit()));
                    self.give_up(copying);
                    return Step::Failed(format!("the copy of {len} bytes has not ended within {limit}"));
                }
            }
        }
        match step {
            Step::Waiting => drop(self.copies.insert(job.state, copying)),
            Step::Done => job.moved = job.len,
            _ => {}
        }
        step
    }

    fn stop(&mut self, _slot: u32) -> bool {
        true
    }

    fn close(&mut self, _slot: u32) {}

    fn share(&mut self, ptr: *const u8, len: usize) -> Result<Option<Descriptor>> {
        let place = self.place_of(ptr as u64, len);
        place
            .map(|place| Some(place.encode()))
            .map_err(|why| Error::new(ErrorKind::Unsupported, "share", why).with_lane("cuda_ipc"))
    }

    fn map(&mut self, remote: &Descriptor, len: usize) -> Result<Option<Window>> {
        let place = Place::decode(remote);
        let place = place.map_err(|why| Error::new(ErrorKind::Region, "map", why).with_lane("cuda_ipc"))?;
        let ordinal = match self.device.or_else(|| self.domain.in_use().first().copied()) {
            Some(device) => device,
            None if !self.imports.has_heard(place) => return Ok(None),
            // Nothing here uses a GPU: the owner's own reaches its memory best.
            None => self.imports.owner(place).and_then(|owner| self.domain.device(&owner)).map_or(0, Device::ordinal),
        };
        self.map_on(remote, len, ordinal)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let under_way: Vec<u64> = self.copies.keys().copied().collect();
        under_way.into_iter().for_each(|state| self.ended(state));
        for Line { gpu, queue, .. } in mem::take(&mut self.lines) {
            queue.retire(&gpu);
        }
        // Better mapped for ever than unmapped under a copy.
        mem::take(&mut self.lost).into_iter().for_each(mem::forget);
    }
}
