//! The lease of a region to one result: which streams must be waited for before the next result is written there.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use crossrail_cuda::Stream;
use crossrail_locks::Mutex;
use crossrail_types::{Error, ErrorKind, Result};

use crate::completion::Completion;
use crate::inner::Inner;
use crate::regions::RegionView;

/// Completions that a lease keeps before it queries and removes those that are done.
const MANY: usize = 8;

/// A region, leased until this is dropped. Usable from any thread.
pub struct RegionLease {
    inner: Weak<Inner>,
    /// Keeps the heap as long as the lease.
    _heap: crossrail::Memory,
    pub(crate) buffer: u64,
    pub(crate) index: u32,
    view: RegionView,
    /// Completions of its previous users; the first stream that writes it waits for them.
    before: Mutex<Vec<Completion>>,
    until: Mutex<Vec<Completion>>,
    /// Whether it was taken for a stream under capture.
    for_graph: bool,
    /// Whether a dispatch into it was captured in a graph.
    captured: AtomicBool,
}

impl RegionLease {
    pub(crate) fn take(inner: &Arc<Inner>, captured: bool) -> Result<RegionLease> {
        if inner.shape.regions == 0 {
            let text = "the buffer was not made for the rank layout";
            return Err(Error::new(ErrorKind::Usage, "dispatch", text));
        }
        inner.membership.refuse_closed("dispatch")?;
        let (index, before) = inner.results.regions().take(captured)?;
        Ok(RegionLease {
            inner: Arc::downgrade(inner),
            _heap: inner.heap.memory(),
            buffer: inner.results.buffer(),
            index,
            view: inner.heap.region_view(index),
            before: Mutex::new(before),
            until: Mutex::default(),
            for_graph: captured,
            captured: AtomicBool::new(false),
        })
    }

    /// Its index among the buffer's regions.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Whether it was taken for a stream under capture.
    pub fn is_for_graph(&self) -> bool {
        self.for_graph
    }

    /// Addresses of its parts, valid as long as the lease, even if the buffer is destroyed.
    pub fn view(&self) -> RegionView {
        self.view
    }

    /// Makes the next result wait for the work that is in `stream` now. Without such a call, all use of the region must
    /// have ended when the lease is dropped.
    ///
    /// # Safety
    /// `stream` must be a live stream's handle, or 0 for the default stream.
    ///
    /// # Errors
    /// What the driver reports; `Usage` for another GPU's stream.
    pub unsafe fn free_after(&self, stream: u64) -> Result<()> {
        let Some(inner) = self.inner.upgrade() else { return Ok(()) };
        let _entered = inner.launches.enter()?;
        // SAFETY: the caller vouches for the stream.
        let stream = unsafe { inner.launches.stream(stream)? };
        if stream.capture()? == crossrail_cuda::Capture::None {
            let done = inner.launches.record(&stream, false)?;
            self.is_used_until(&done);
        }
        Ok(())
    }

    pub(crate) fn is_used_until(&self, done: &Completion) {
        if !done.is_captured() {
            let mut until = self.until.lock();
            // A query of the driver costs more than keeping the few events that most leases have.
            if until.len() >= MANY {
                until.retain(|done| !done.is_done().unwrap_or(false));
            }
            until.push(done.clone());
        }
    }

    /// Makes `stream` wait for previous users, so that it may write the region.
    pub(crate) fn before(&self, stream: &Stream, captured: bool) -> Result<()> {
        let mut before = self.before.lock();
        before.retain(|done| !done.is_done().unwrap_or(false));
        if captured && !before.is_empty() {
            let text = "work enqueued before the capture still uses the region";
            let error = Error::new(ErrorKind::Usage, "dispatch", text);
            return Err(error.with_hint("synchronize before the capture, or take the region earlier"));
        }
        for done in before.drain(..) {
            done.before(stream)?;
        }
        if captured {
            self.captured.store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl Drop for RegionLease {
    fn drop(&mut self) {
        if let Some(inner) = self.inner.upgrade() {
            let mut until = std::mem::take(self.until.get_mut());
            // If the lease was never written, its previous users have not been waited for yet.
            until.append(self.before.get_mut());
            inner.results.regions().give_back(self.index, until, *self.captured.get_mut());
        }
    }
}

impl std::fmt::Debug for RegionLease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RegionLease({} of buffer {:016x})", self.index, self.buffer)
    }
}
