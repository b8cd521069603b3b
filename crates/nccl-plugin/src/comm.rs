//! Communicators and their requests.
//!
//! NCCL owns the buffers and uses a communicator from one thread at a time. Closing a communicator cancels what is
//! still in flight, so that the engine does not touch memory that NCCL frees next.
//!
//! NCCL's proxy tests every request in a tight loop. A test therefore only reads a flag that the engine sets: if it made
//! progress, the workers' threads, which move the data, would wait for their locks.
//!
//! Nor does NCCL's thread start transfers, where there are cores enough: it leaves them to the workers' threads, which send
//! side by side and never find their own lock taken.
//!
//! The messages of a communicator take turns between the workers. Both ends count those of each tag, so a receive is
//! posted at the worker to which the message that it matches goes.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossrail::{Buffer, Endpoint, Request, Worker};
use crossrail_locks::Mutex;
use crossrail_types::{Error, ErrorKind, Result};
use slab::Slab;

/// Most receives of one request.
pub(crate) const MAX_RECVS: usize = 8;
/// How long closing waits for cancelled requests whose memory a lane is still copying.
const CANCEL_LIMIT: Duration = Duration::from_secs(2);

/// The kind of a communicator's data messages.
pub(crate) const DATA: u64 = 2;
/// Bits of a listener's number in a tag.
pub(crate) const LISTENER_BITS: u32 = 20;

/// A message's tag: kind (4 bits), which of the listener's connections (8), listener (20), NCCL's tag (32).
pub(crate) fn tag(kind: u64, serial: u8, listener: u32, tag: i32) -> u64 {
    kind << 60 | u64::from(serial) << 52 | u64::from(listener) << 32 | u64::from(tag as u32)
}

/// One direction between two ranks: a send or a receive communicator.
pub(crate) struct Comm {
    /// One per worker; at least one.
    paths: Vec<Path>,
    tag: u64,
    peer: String,
    /// The workers' threads start transfers, not the caller.
    hands_over: bool,
    /// Messages so far of each of NCCL's tags, which are few.
    counts: Mutex<Vec<(i32, usize)>>,
    flights: Mutex<Slab<*mut Flight>>,
}

// SAFETY: the pointers are boxes that this communicator owns; each is dereferenced by `test` and `close`, which NCCL
// does not call at the same time.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

/// How one of our workers reaches the peer's worker of the same number.
pub(crate) struct Path {
    pub(crate) worker: Worker,
    /// The peer; `None`: this worker itself, which receives from whichever endpoint it sends to.
    pub(crate) endpoint: Option<Endpoint>,
}

/// A request of NCCL's: one send, or up to [`MAX_RECVS`] receives.
pub(crate) struct Flight {
    comm: *const Comm,
    key: usize,
    first: Arc<Part>,
    others: Vec<Arc<Part>>,
}

/// One transfer of a request, which a worker's thread starts and ends.
#[derive(Default)]
struct Part {
    /// `outcome` is there.
    is_over: AtomicBool,
    outcome: Mutex<Option<Result<u64>>>,
    stage: Mutex<Stage>,
}

#[derive(Default)]
enum Stage {
    /// The worker's thread will start it.
    #[default]
    Posted,
    Running(Request),
    /// Ended, or cancelled before the start.
    Over,
}

impl Part {
    fn start(self: &Arc<Part>, start: impl FnOnce() -> Result<Request>) {
        let mut stage = self.stage.lock();
        if matches!(*stage, Stage::Over) {
            return;
        }
        match start() {
            Ok(request) => {
                let ended = self.clone();
                request.on_complete(move |outcome| ended.finish(outcome.map(|receipt| receipt.bytes)));
                *stage = if self.is_over() { Stage::Over } else { Stage::Running(request) };
            }
            Err(error) => {
                *stage = Stage::Over;
                self.finish(Err(error));
            }
        }
    }

    fn finish(&self, outcome: Result<u64>) {
        *self.outcome.lock() = Some(outcome);
        self.is_over.store(true, Ordering::Release);
        // The request goes here, so that NCCL's thread need not lock the worker to drop it.
        if let Some(mut stage) = self.stage.try_lock() {
            *stage = Stage::Over;
        }
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// The bytes transferred, or why they were not; `None`: in flight.
    fn outcome(&self) -> Option<Result<u64>> {
        if self.is_over() { self.outcome.lock().clone() } else { None }
    }

    /// Cancels it; its request, if the engine may still be touching its memory.
    fn cancel(&self) -> Option<Request> {
        let stage = std::mem::replace(&mut *self.stage.lock(), Stage::Over);
        let Stage::Running(request) = stage else { return None };
        request.cancel();
        Some(request)
    }
}

/// One receive of a request.
#[derive(Clone, Copy)]
pub(crate) struct Receive {
    pub(crate) data: *mut c_void,
    pub(crate) len: usize,
    pub(crate) tag: i32,
}

impl Comm {
    pub(crate) fn new(paths: Vec<Path>, tag: u64, peer: String, hands_over: bool) -> Arc<Comm> {
        Arc::new(Comm { paths, tag, peer, hands_over, counts: Mutex::default(), flights: Mutex::default() })
    }

    /// The way of the next message with that tag of NCCL's.
    fn path(&self, tag: i32) -> &Path {
        let mut counts = self.counts.lock();
        let at = counts.iter().position(|(known, _)| *known == tag).unwrap_or_else(|| {
            counts.push((tag, 0));
            counts.len() - 1
        });
        let count = &mut counts[at].1;
        *count = count.wrapping_add(1);
        // Communicators begin with different workers, for those that send little.
        &self.paths[count.wrapping_add((self.tag >> 32) as usize) % self.paths.len()]
    }

    /// The peer's name.
    pub(crate) fn peer(&self) -> &str {
        &self.peer
    }

    /// Starts to send.
    ///
    /// # Errors
    /// What the engine reports.
    ///
    /// # Safety
    /// `data` is valid for `len` bytes and not written until the request has completed or the communicator is closed.
    pub(crate) unsafe fn send(&self, data: *mut c_void, len: usize, tag: i32) -> Result<*mut Flight> {
        let path = self.path(tag);
        let Some(endpoint) = path.endpoint.clone() else {
            return Err(Error::new(ErrorKind::Usage, "isend", "the communicator receives"));
        };
        let tag = self.tag | u64::from(tag as u32);
        // SAFETY: as promised by the caller; `Drop` ends the operation before the memory may be freed.
        let buffer = unsafe { Buffer::raw(data.cast(), len, None) };
        let part = self.post(&path.worker, move || endpoint.send(buffer, tag))?;
        Ok(self.launch(part, Vec::new()))
    }

    /// Starts to receive: each message into the buffer of the first receive with its tag.
    ///
    /// # Errors
    /// `Usage` for no receives or too many; else what the engine reports.
    ///
    /// # Safety
    /// Each receive's memory is valid for its length and not accessed until the request has completed or the
    /// communicator is closed.
    pub(crate) unsafe fn receive(&self, receives: &[Receive]) -> Result<*mut Flight> {
        let (Some((first, others)), true) = (receives.split_first(), receives.len() <= MAX_RECVS) else {
            let detail = format!("{} receives in one request; 1 to {MAX_RECVS} are possible", receives.len());
            return Err(Error::new(ErrorKind::Usage, "irecv", detail));
        };
        let start = |receive: &Receive| {
            // SAFETY: as promised by the caller; `Drop` ends the operation before the memory may be freed.
            let buffer = unsafe { Buffer::raw(receive.data.cast(), receive.len, None) };
            let path = self.path(receive.tag);
            let tag = self.tag | u64::from(receive.tag as u32);
            let (worker, endpoint) = (path.worker.clone(), path.endpoint.clone());
            self.post(&path.worker, move || worker.recv(buffer, tag, u64::MAX, endpoint.as_ref()))
        };
        let first = start(first)?;
        let mut parts = Vec::with_capacity(others.len());
        for other in others {
            match start(other) {
                Ok(part) => parts.push(part),
                Err(error) => {
                    parts.push(first);
                    return self.end(parts).and(Err(error));
                }
            }
        }
        Ok(self.launch(first, parts))
    }

    /// Has a transfer started.
    fn post(&self, worker: &Worker, start: impl FnOnce() -> Result<Request> + Send + 'static) -> Result<Arc<Part>> {
        let part = Arc::new(Part::default());
        if self.hands_over {
            let posted = part.clone();
            worker.defer(move || posted.start(start))?;
        } else {
            part.start(start);
        }
        Ok(part)
    }

    fn launch(&self, first: Arc<Part>, others: Vec<Arc<Part>>) -> *mut Flight {
        let mut flights = self.flights.lock();
        let entry = flights.vacant_entry();
        let flight = Box::into_raw(Box::new(Flight { comm: self, key: entry.key(), first, others }));
        entry.insert(flight);
        flight
    }

    /// Cancels requests and waits until the engine no longer uses their memory.
    ///
    /// # Errors
    /// `Timeout`: the engine may still use some of it.
    fn end(&self, parts: Vec<Arc<Part>>) -> Result<()> {
        let running: Vec<Request> = parts.iter().filter_map(|part| part.cancel()).collect();
        let deadline = Instant::now() + CANCEL_LIMIT;
        let mut used = 0;
        for request in &running {
            let outcome = request.wait(Some(deadline.saturating_duration_since(Instant::now())));
            used += usize::from(outcome.is_err_and(|error| error.kind == ErrorKind::Timeout));
        }
        if used == 0 {
            return Ok(());
        }
        let detail = format!("the memory of {used} requests may still be read or written: the peer has not ended them");
        Err(Error::new(ErrorKind::Timeout, "close", detail).with_peer(&self.peer).with_waited(CANCEL_LIMIT))
    }

    /// Ends all requests. On success, no request uses its memory any more.
    ///
    /// # Errors
    /// `Timeout`: something may.
    pub(crate) fn close(&self) -> Result<()> {
        let mut parts = Vec::new();
        for flight in std::mem::take(&mut *self.flights.lock()).drain() {
            // SAFETY: made by `launch`, and removed from the table when it is freed.
            let flight = unsafe { Box::from_raw(flight) };
            parts.push(flight.first);
            parts.extend(flight.others);
        }
        self.end(parts)
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        // Closed before, unless the library is unloaded: there is no caller to report to.
        let _ = self.close();
    }
}

/// Whether a request has completed. If so it is freed, and the bytes of each transfer are passed to `report`.
///
/// # Errors
/// Why a transfer failed; the request stays, and fails again.
///
/// # Safety
/// `flight` was returned by [`Comm::send`] or [`Comm::receive`], has not completed, and its communicator is open.
pub(crate) unsafe fn test(flight: *mut Flight, mut report: impl FnMut(usize, u64)) -> Result<bool> {
    // SAFETY: as promised by the caller.
    let this = unsafe { &*flight };
    // SAFETY: the communicator outlives its requests.
    let comm = unsafe { &*this.comm };
    let parts = || std::iter::once(&this.first).chain(&this.others);
    if !parts().all(|part| part.is_over()) {
        // A failure of one part need not wait for the others.
        return match parts().find_map(|part| part.outcome().and_then(Result::err)) {
            Some(error) => Err(error),
            None => Ok(false),
        };
    }
    let outcomes = parts().filter_map(|part| part.outcome()).collect::<Result<Vec<u64>>>()?;
    outcomes.into_iter().enumerate().for_each(|(index, bytes)| report(index, bytes));
    comm.flights.lock().remove(this.key);
    // SAFETY: made by `launch`; the table forgot it just now.
    drop(unsafe { Box::from_raw(flight) });
    Ok(true)
}
