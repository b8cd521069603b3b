//! A lease of a region: who may write it, who reads it, and when the next result may go there.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use crossrail_cuda::Stream;
use crossrail_types::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::completion::Completion;
use crate::inner::Inner;
use crate::regions::RegionView;

/// A region, lent until this is dropped. Any thread.
pub struct RegionLease {
    inner: Weak<Inner>,
    /// The heap stays as long as the lease.
    _heap: crossrail::Memory,
    pub(crate) buffer: u64,
    pub(crate) index: u32,
    view: RegionView,
    /// Streams that used it before: waited for by the first that writes it.
    before: Mutex<Vec<Completion>>,
    until: Mutex<Vec<Completion>>,
    /// It was taken for a stream that is being captured.
    for_graph: bool,
    /// A dispatch into it was captured in a graph.
    captured: AtomicBool,
}

impl RegionLease {
    pub(crate) fn take(inner: &Arc<Inner>, captured: bool) -> Result<RegionLease> {
        if inner.shape.regions == 0 {
            let text = "the buffer was not made for the rank layout";
            return Err(Error::new(ErrorKind::Usage, "dispatch", text));
        }
        inner.refuse_closed("dispatch")?;
        let (index, before) = inner.regions.take(captured)?;
        Ok(RegionLease {
            inner: Arc::downgrade(inner),
            _heap: inner.memory.clone(),
            buffer: inner.id,
            index,
            view: inner.region_view(index),
            before: Mutex::new(before),
            until: Mutex::default(),
            for_graph: captured,
            captured: AtomicBool::new(false),
        })
    }

    /// Which of the buffer's regions it is.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Whether it was taken for a stream that is being captured in a graph.
    pub fn is_for_graph(&self) -> bool {
        self.for_graph
    }

    /// Where its parts are. The memory stays as long as the lease, also when the buffer is destroyed.
    pub fn view(&self) -> RegionView {
        self.view
    }

    /// What is in `stream` now still uses the region: the next result comes into it only after that. Without any such call
    /// the region must be done with when the lease is dropped.
    ///
    /// # Safety
    /// `stream` must be a live stream's handle, or 0 for the default stream.
    ///
    /// # Errors
    /// What the driver says; `Usage` for another GPU's stream.
    pub unsafe fn free_after(&self, stream: u64) -> Result<()> {
        let Some(inner) = self.inner.upgrade() else { return Ok(()) };
        // SAFETY: the caller vouches for the stream.
        let stream = unsafe { Stream::borrow(&inner.cuda, stream)? };
        if stream.capture()? == crossrail_cuda::Capture::None {
            let done = inner.events.record(&stream, false)?;
            self.is_used_until(&done);
        }
        Ok(())
    }

    pub(crate) fn is_used_until(&self, done: &Completion) {
        if !done.is_captured() {
            let mut until = self.until.lock();
            until.retain(|done| !done.is_done().unwrap_or(false));
            until.push(done.clone());
        }
    }

    /// Lets `stream` write it.
    pub(crate) fn before(&self, stream: &Stream, captured: bool) -> Result<()> {
        let mut before = self.before.lock();
        before.retain(|done| !done.is_done().unwrap_or(false));
        if captured && !before.is_empty() {
            let text = "the region is still in use by what was put into streams before the capture";
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
            // If nobody wrote it, those before are still to be waited for.
            until.append(self.before.get_mut());
            inner.regions.give_back(self.index, until, *self.captured.get_mut());
        }
    }
}

impl std::fmt::Debug for RegionLease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RegionLease({} of buffer {:016x})", self.index, self.buffer)
    }
}
