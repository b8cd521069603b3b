//! What the handles of one worker's objects share, and the requests that belong to nobody: of the pool, of the queue.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crossrail_locks::Mutex;
use crossrail_types::Reason;

use crate::failure::{Failure, Kept, usage};
use crate::waits::Waits;

/// What handles of a worker's objects share with it.
pub(crate) struct Shared {
    pub(crate) native: crossrail::Worker,
    pub(crate) context: crossrail::Context,
    pub(crate) has_background: bool,
    /// Threads that wait, to be interrupted.
    pub(crate) waits: Waits,
    /// Events that `xrail_worker_wait` has returned for.
    pub(crate) seen: AtomicU64,
    pub(crate) finished: Arc<Queue>,
    pub(crate) pool: Pool,
}

/// Finished requests of `XRAIL_QUEUE`, until they are taken.
#[derive(Default)]
pub(crate) struct Queue(Mutex<Queued>);

#[derive(Default)]
struct Queued {
    requests: VecDeque<Ended>,
    /// The worker's handle is freed: nobody takes any more.
    is_over: bool,
}

/// A request that nobody holds but the queue.
pub(crate) struct Ended(pub(crate) Box<Request>);

impl Queue {
    pub(crate) fn push(&self, ended: Ended) {
        let mut queued = self.0.lock();
        if queued.is_over {
            drop(queued);
            return drop(ended);
        }
        queued.requests.push_back(ended);
    }

    pub(crate) fn end(&self) {
        let left = {
            let mut queued = self.0.lock();
            queued.is_over = true;
            std::mem::take(&mut queued.requests)
        };
        drop(left);
    }

    pub(crate) fn take(&self, most: usize) -> Vec<Ended> {
        let mut queued = self.0.lock();
        let count = most.min(queued.requests.len());
        queued.requests.drain(..count).collect()
    }
}

impl Shared {
    /// Fails in a forked child of the process that has made the worker; not for a worker that is closed.
    pub(crate) fn check_origin(&self, operation: &str) -> Result<(), Box<Failure>> {
        match self.native.check(operation) {
            Err(error) if error.reason == Some(Reason::OtherProcess) => Err(error.into()),
            _ => Ok(()),
        }
    }
}

/// A handle. Freed ones go into their worker's [`Pool`].
pub(crate) struct Request {
    pub(crate) native: crossrail::Request,
    pub(crate) worker: Arc<Shared>,
    /// How it failed, once somebody has asked.
    pub(crate) error: OnceLock<Box<Kept>>,
    pub(crate) user: *mut c_void,
    /// [`FREE`], or who puts it into the worker's queue.
    pub(crate) queued: AtomicU8,
    /// The next in the pool.
    next: *mut Request,
}

/// Freed requests of a worker, each of which keeps the worker: an allocation and a reference for each operation would
/// cost more than all else that C adds to a short message.
///
/// Whoever finds it taken by another thread does without it, so that nobody waits, nor does a forked child for a thread
/// of its parent.
#[derive(Default)]
pub(crate) struct Pool {
    taken: AtomicBool,
    first: AtomicPtr<Request>,
}

/// Attempts to take a pool before it is closed; whoever has it is done after some instructions.
const CLOSE_ATTEMPTS: u32 = 10_000;

impl Pool {
    /// One of the pool, or a new one. Its operation is over, or none.
    #[inline(always)]
    pub(crate) fn take(worker: &Arc<Shared>) -> Box<Request> {
        let pool = &worker.pool;
        if !pool.taken.swap(true, Ordering::Acquire) {
            let first = pool.first.load(Ordering::Relaxed);
            // SAFETY: null, or a request that only the pool refers to; nobody else takes from it now.
            if let Some(request) = unsafe { first.as_ref() } {
                pool.first.store(request.next, Ordering::Relaxed);
                pool.taken.store(false, Ordering::Release);
                // SAFETY: from `into_raw`, and not in the pool any more.
                return unsafe { Box::from_raw(first) };
            }
            pool.taken.store(false, Ordering::Release);
        }
        Pool::make(worker)
    }

    #[cold]
    #[inline(never)]
    fn make(worker: &Arc<Shared>) -> Box<Request> {
        Box::new(Request {
            native: worker.native.idle_request(),
            worker: Arc::clone(worker),
            error: OnceLock::new(),
            user: null_mut(),
            queued: AtomicU8::new(FREE),
            next: null_mut(),
        })
    }

    /// Takes back a request that is over and has nothing left to drop; false: the pool is taken.
    ///
    /// # Safety
    /// From `into_raw`; after true it is the pool's.
    #[inline(always)]
    pub(crate) unsafe fn give_plain(request: *mut Request) -> bool {
        // SAFETY: the request keeps the worker, and is the caller's until the pool is let go.
        let (worker, next) = unsafe { (&(*request).worker, &raw mut (*request).next) };
        let pool = &worker.pool;
        if pool.taken.swap(true, Ordering::Acquire) {
            return false;
        }
        // SAFETY: as above.
        unsafe { next.write(pool.first.load(Ordering::Relaxed)) };
        pool.first.store(request, Ordering::Relaxed);
        pool.taken.store(false, Ordering::Release);
        true
    }

    /// Takes back a request that is over, or drops it.
    pub(crate) fn give(mut request: Box<Request>) {
        request.native.clear();
        request.error = OnceLock::new();
        let request = Box::into_raw(request);
        // SAFETY: from `into_raw` just now; not the pool's, it is dropped.
        if !unsafe { Pool::give_plain(request) } {
            // SAFETY: as above.
            drop(unsafe { Box::from_raw(request) });
        }
    }

    /// Drops its requests, which keep the worker, and takes none from now on: it stays taken.
    pub(crate) fn close(&self) {
        let attempt = || {
            !self.taken.swap(true, Ordering::Acquire) || {
                std::thread::yield_now();
                false
            }
        };
        if !(0..CLOSE_ATTEMPTS).any(|_| attempt()) {
            return; // in a forked child, whose parent had it taken
        }
        let mut next = self.first.swap(null_mut(), Ordering::Relaxed);
        while !next.is_null() {
            // SAFETY: from `into_raw`, and only the pool referred to it.
            next = unsafe { Box::from_raw(next) }.next;
        }
    }
}

// SAFETY: `user` is the program's, and only handed back.
unsafe impl Send for Request {}
// SAFETY: as above.
unsafe impl Sync for Request {}

/// Its owner may free it.
pub(crate) const FREE: u8 = 0;
/// It is to be queued once it is over; the call that starts it still uses it.
pub(crate) const STARTING: u8 = 1;
/// It belongs to the worker's queue.
pub(crate) const QUEUED: u8 = 2;
/// It was over before that call was: the call puts it into the queue.
pub(crate) const ENDED: u8 = 3;

/// Whether a handle's worker is that one.
pub(crate) fn same(operation: &str, one: &Arc<Shared>, other: &Arc<Shared>) -> Result<(), Box<Failure>> {
    if Arc::ptr_eq(one, other) { Ok(()) } else { Err(usage(operation, "handles of different workers")) }
}
