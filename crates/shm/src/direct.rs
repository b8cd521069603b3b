//! Single-copy access to the peer's memory.
//!
//! A transfer that both ends copy is divided by a cursor (see `cursor`). When one end can't copy a piece that it has
//! claimed, it marks the cursor as failed: `step` is `Failed` at both ends from then on, and `Done` is never reached.
//! The transfer's owner then calls `stop` until it is true (nothing is being copied any more) and moves *all* of it in
//! chunks; which pieces had arrived isn't recorded. The same holds for a copy that was stopped half-way.
//!
//! A cursor's owner should close it only when the other end has stopped asking for it: an end that comes late finds
//! the outcome until the cursor is used again (the one unused longest is), and `Failed` after that.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use crossrail_transport::{Copy, Descriptor, DirectKind, Domain, HALVES_MAX, Job, Step, Window};
use crossrail_types::{Error, ErrorKind};

use crate::cma::{Process, piece};
use crate::copy;
use crate::cursor::{Claim, Start, piece_len};
use crate::lane::ShmLane;
use crate::memory::{Mapping, identity, verified_size};
use crate::peer_segment::{Identity, PeerSegment};

const MAPPED: u8 = 1;
const ADDRESS: u8 = 2;
const GONE: &str = "the peer's process is gone";
/// Bytes copied by one call for a row of jobs.
const ROW_MAX: usize = 256 << 10;

/// Where the other end of a copy is.
enum Remote {
    Mapped(*mut u8),
    Process(Process, u64),
}

fn encode(kind: u8, id: u32, place: u64) -> Descriptor {
    let mut bytes = [0; 24];
    bytes[0] = kind;
    bytes[4..8].copy_from_slice(&id.to_le_bytes());
    bytes[8..16].copy_from_slice(&place.to_le_bytes());
    bytes
}

/// A descriptor of memory to be mapped: of that segment and no other, whichever lane it is shown to.
fn encode_mapped(id: u32, offset: u64, identity: Identity) -> Descriptor {
    let mut bytes = encode(MAPPED, id, offset);
    bytes[16..].copy_from_slice(&identity.to_le_bytes());
    bytes
}

fn word(descriptor: &Descriptor, at: usize) -> u64 {
    descriptor[at..].first_chunk::<8>().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// The address of `len` bytes at `place` of the peer's segment `id`.
fn inside(map: &Mapping, id: u32, place: u64, len: usize) -> Result<*mut u8, String> {
    match usize::try_from(place).ok().and_then(|at| at.checked_add(len)) {
        Some(end) if end <= map.len() => Ok(map.ptr().wrapping_add(end - len)),
        _ => Err(format!("{len} bytes at {place} are not inside segment {id} of {} bytes", map.len())),
    }
}

/// Where this end claims pieces.
fn start_of(job: &Job) -> Start {
    if job.copy == Copy::Pull || job.len > HALVES_MAX { Start::Front } else { Start::Back }
}

fn refused(kind: ErrorKind, operation: &str, why: impl Into<String>) -> Error {
    Error::new(kind, operation, why).with_lane("shm")
}

impl ShmLane {
    /// Resolves the peer's descriptor, which is untrusted.
    fn resolve(&mut self, descriptor: &Descriptor, len: usize) -> Result<Remote, String> {
        let [kind, _, _, _, a, b, c, d, ..] = *descriptor;
        let place = word(descriptor, 8);
        match kind {
            MAPPED => {
                let id = u32::from_le_bytes([a, b, c, d]);
                Ok(Remote::Mapped(inside(self.segment(id)?, id, place, len)?))
            }
            ADDRESS => self.process.clone().map(|process| Remote::Process(process, place)),
            kind => Err(format!("a memory descriptor of kind {kind}")),
        }
    }

    /// The peer's segment `id`, mapped now if it wasn't.
    fn segment(&mut self, id: u32) -> Result<&Mapping, String> {
        if !self.segments.contains_key(&id) {
            self.service_socket().map_err(|e| e.to_string())?;
        }
        match self.mapped(id) {
            Ok(Some((map, _))) => Ok(map),
            Ok(None) => Err(format!("segment {id} is gone or was never passed")),
            Err(error) => Err(error.detail),
        }
    }

    /// As `segment`, of what has been read from the socket; `None`: that segment is not among it.
    fn mapped(&mut self, id: u32) -> crossrail_types::Result<Option<(&Arc<Mapping>, Identity)>> {
        let Some(segment) = self.segments.get_mut(&id) else { return Ok(None) };
        if let PeerSegment::Passed(fd) = segment {
            let size = verified_size(fd).map_err(|why| refused(ErrorKind::Protocol, "map", why))?;
            let failed = |call: &str, e: io::Error| match e.raw_os_error() {
                Some(libc::ENOMEM | libc::EAGAIN) => refused(ErrorKind::Exhausted, "map", format!("{call}: {e}")),
                _ => Error::io("map", call, &e).with_lane("shm"),
            };
            let which = identity(fd.as_fd()).map_err(|e| failed("fstat", e))?;
            let map = Mapping::new(fd.as_fd(), size).map_err(|e| failed(&format!("mmap of {size} bytes"), e))?;
            *segment = PeerSegment::Mapped(Arc::new(map), which);
        }
        match segment {
            PeerSegment::Mapped(map, which) => Ok(Some((map, *which))),
            PeerSegment::Lost(why) => {
                let why = format!("segment {id}: {why}");
                Err(refused(ErrorKind::Exhausted, "map", why)
                    .with_hint("map segments as they come, or raise ulimit -n"))
            }
            PeerSegment::Passed(_) => Ok(None),
        }
    }

    /// Copies `len` bytes at `at`.
    ///
    /// # Safety
    /// As `Domain::step`; `at + len <= job.len`, and `remote` was resolved for `job.len` bytes.
    unsafe fn copy_piece(job: &Job, remote: &Remote, at: usize, len: usize) -> Result<(), Step> {
        let local = job.local.wrapping_add(at);
        let there = match *remote {
            Remote::Mapped(there) => there.wrapping_add(at),
            // SAFETY: by the contract.
            Remote::Process(process, address) => unsafe {
                return process.copy(job.copy, local, address.wrapping_add(at as u64), len);
            },
        };
        let (to, from) = if job.copy == Copy::Pull { (local, there) } else { (there, local) };
        // SAFETY: by the contract; the mapping covers the range. The peer may write there meanwhile: then the bytes are
        // garbage, which it could have put there before.
        unsafe { copy::bytes(to, from, len) };
        Ok(())
    }

    /// Whether it is still safe to copy from or to the peer's process: its PID may have been reused. Costs a system
    /// call, so call it only before copies.
    fn is_there(&self, remote: &Remote) -> bool {
        matches!(remote, Remote::Mapped(_)) || self.wire.peer_is_there()
    }

    /// The whole copy is this end's.
    ///
    /// # Safety
    /// As `Domain::step`.
    unsafe fn step_alone(job: &mut Job, remote: &Remote, budget: usize) -> Step {
        // Nobody else waits for a part of it, so one copy takes all of the budget: fewer system calls with CMA.
        let len = budget.max(piece_len(job.len)).min(job.len - job.moved.min(job.len));
        // SAFETY: by the contract; moved + len <= job.len.
        if let Err(step) = unsafe { Self::copy_piece(job, remote, job.moved, len) } {
            return step;
        }
        job.moved += len;
        if job.moved == job.len { Step::Done } else { Step::Moved(len) }
    }

    /// Both ends claim pieces.
    ///
    /// # Safety
    /// As `Domain::step`.
    unsafe fn step_shared(&self, slot: u32, job: &mut Job, remote: &Remote, budget: usize) -> Step {
        let piece = piece_len(job.len);
        let pieces = job.len.div_ceil(piece);
        let from = start_of(job);
        let helps = job.helps || job.len > HALVES_MAX;
        let mut moved = 0;
        while moved < budget.max(1) {
            let index = match self.cursors.claim(slot, pieces, from, helps) {
                Claim::Piece(index) => index,
                Claim::Done => return Step::Done,
                Claim::Waiting if moved == 0 => return Step::Waiting,
                Claim::Waiting => break,
                Claim::Over(why) => return Step::Failed(why.into()),
            };
            let at = index * piece;
            let len = piece.min(job.len - at);
            let copied = match moved == 0 && !self.is_there(remote) {
                true => Err(Step::Failed(GONE.to_owned())),
                // SAFETY: by the contract; index < pieces, so at + len <= job.len.
                false => unsafe { Self::copy_piece(job, remote, at, len) },
            };
            self.cursors.settle(slot, copied.is_ok());
            if let Err(step) = copied {
                return step;
            }
            job.moved += len;
            moved += len;
        }
        Step::Moved(moved)
    }
}

impl Domain for ShmLane {
    fn describe(&mut self, ptr: *const u8, len: usize) -> Result<(Descriptor, DirectKind), String> {
        if let Some((segment, offset)) = self.arena.lookup(ptr, len)
            && self.wire.send_segment(segment.id(), segment.borrow_fd()).is_ok()
        {
            return Ok((encode_mapped(segment.id(), offset, segment.identity()), DirectKind::Mapped));
        }
        let address = || (encode(ADDRESS, 0, ptr as u64), DirectKind::Cma);
        self.peer_has_cma.then(address).ok_or_else(|| "the peer may not read memory of this process".to_owned())
    }

    fn reach(&mut self, remote: &Descriptor, len: usize) -> Result<DirectKind, String> {
        match self.resolve(remote, len)? {
            Remote::Mapped(_) => Ok(DirectKind::Mapped),
            Remote::Process(..) => match (&self.report().cma_pull, &self.report().cma_push) {
                (Err(why), Err(_)) => Err(why.clone()),
                _ => Ok(DirectKind::Cma),
            },
        }
    }

    fn open(&mut self, _len: usize) -> Option<u32> {
        self.cursors.open()
    }

    unsafe fn step(&mut self, job: &mut Job, budget: usize) -> Step {
        let remote = match self.resolve(&job.remote, job.len) {
            Ok(remote) => remote,
            Err(why) => return Step::Failed(why),
        };
        match job.slot {
            None if !self.is_there(&remote) => Step::Failed(GONE.to_owned()),
            // SAFETY: handed on.
            None => unsafe { Self::step_alone(job, &remote, budget) },
            // SAFETY: handed on.
            Some(slot) => unsafe { self.step_shared(slot, job, &remote, budget) },
        }
    }

    unsafe fn step_row(&mut self, row: &mut [&mut Job]) -> Result<usize, (usize, Step)> {
        let (Ok(process), Some(copy)) = (self.process.as_ref().copied(), row.first().map(|job| job.copy)) else {
            return Ok(0);
        };
        let (mut claimed, mut bytes) = (Vec::with_capacity(row.len()), 0);
        for (number, job) in row.iter().enumerate() {
            let (Some(slot), ADDRESS, piece) = (job.slot, job.remote[0], piece_len(job.len)) else { continue };
            while job.copy == copy
                && bytes + piece <= ROW_MAX
                && let Claim::Piece(index) = self.cursors.claim(slot, job.len.div_ceil(piece), start_of(job), job.helps)
            {
                let len = piece.min(job.len - index * piece);
                claimed.push((number, slot, index * piece, len));
                bytes += len;
            }
        }
        if claimed.is_empty() {
            return Ok(0);
        }
        let place = |job: &Job, at: usize| word(&job.remote, 8).wrapping_add(at as u64);
        let mine: Vec<_> =
            claimed.iter().map(|(of, _, at, len)| piece(row[*of].local.wrapping_add(*at), *len)).collect();
        let theirs: Vec<_> =
            claimed.iter().map(|(of, _, at, len)| piece(place(row[*of], *at) as *mut u8, *len)).collect();
        let there = self.wire.peer_is_there();
        // SAFETY: by the contract: every piece is inside its job.
        let whole = there && unsafe { process.call(copy, &mine, &theirs) }.is_ok_and(|copied| copied == bytes);
        let mut failed = None;
        for (number, slot, at, len) in claimed {
            let job = &mut *row[number];
            let copied = match whole {
                true => Ok(()),
                false if !there => Err(Step::Failed(GONE.to_owned())),
                // Which of them cannot be copied is found out one by one.
                // SAFETY: as above.
                false => unsafe { process.copy(copy, job.local.wrapping_add(at), place(job, at), len) },
            };
            self.cursors.settle(slot, copied.is_ok());
            match copied {
                Ok(()) => job.moved += len,
                Err(step) => failed = failed.or(Some((number, step))),
            }
        }
        failed.map_or(Ok(bytes), Err)
    }

    fn stop(&mut self, slot: u32) -> bool {
        self.cursors.stop(slot)
    }

    fn close(&mut self, slot: u32) {
        self.cursors.close(slot);
    }

    fn share(&mut self, ptr: *const u8, len: usize) -> crossrail_types::Result<Option<Descriptor>> {
        let Some((segment, offset)) = self.arena.lookup(ptr, len) else {
            let why = format!("{len} bytes that are not of this context's shared memory");
            return Err(refused(ErrorKind::Unsupported, "share", why));
        };
        match self.wire.send_segment(segment.id(), segment.borrow_fd()) {
            Ok(()) => Ok(Some(encode_mapped(segment.id(), offset, segment.identity()))),
            Err(e) => match e.raw_os_error() {
                // The peer has yet to read what it was sent, or it is gone, which the next poll finds out.
                Some(libc::EAGAIN | libc::ENOBUFS | libc::EPIPE | libc::ECONNRESET) => {
                    self.wants_room = true;
                    Ok(None)
                }
                Some(libc::ETOOMANYREFS) => {
                    let why = format!("sendmsg: {e}: the peer has yet to receive the descriptors it was sent");
                    Err(refused(ErrorKind::Exhausted, "share", why).with_hint("raise ulimit -n"))
                }
                _ => Err(Error::io("share", "sendmsg", &e).with_lane("shm")),
            },
        }
    }

    fn map(&mut self, remote: &Descriptor, len: usize, _gpu: Option<u32>) -> crossrail_types::Result<Option<Window>> {
        let [kind, _, _, _, a, b, c, d, ..] = *remote;
        if kind != MAPPED {
            return Err(refused(ErrorKind::Region, "map", format!("a memory descriptor of kind {kind}")));
        }
        let id = u32::from_le_bytes([a, b, c, d]);
        if !self.segments.contains_key(&id) {
            self.service_socket().map_err(|e| refused(ErrorKind::Protocol, "map", e.to_string()))?;
        }
        if self.gone.contains(&id) {
            return Err(refused(ErrorKind::Region, "map", format!("segment {id}: its owner has freed it")));
        }
        let Some((map, which)) = self.mapped(id)? else { return Ok(None) };
        if which != word(remote, 16) {
            let why = format!("segment {id} is not the one described: the descriptor was made for another connection");
            return Err(refused(ErrorKind::Region, "map", why));
        }
        let ptr = inside(map, id, word(remote, 8), len).map_err(|why| refused(ErrorKind::Region, "map", why))?;
        Ok(Some(Window { ptr, len, device: None, keep: Arc::clone(map) as _ }))
    }
}
