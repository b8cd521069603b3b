//! Points in callers' streams at which something is done, and numbers that the GPU tells the host.
#![allow(unsafe_code)]

use std::sync::{Arc, Weak};
use std::time::Duration;

use crossrail_cuda::{Context, Event, Stream};
use crossrail_types::{Error, ErrorKind, Result};
use parking_lot::Mutex;

/// Events kept at most.
const KEPT: usize = 256;

/// Events that nobody asks any more.
pub(crate) struct Events {
    context: Context,
    kept: Mutex<Vec<Event>>,
}

impl Events {
    pub(crate) fn new(context: &Context) -> Arc<Events> {
        Arc::new(Events { context: context.clone(), kept: Mutex::default() })
    }

    /// What is in `stream` now, as a point.
    pub(crate) fn record(self: &Arc<Self>, stream: &Stream, captured: bool) -> Result<Completion> {
        let kept = self.kept.lock().pop();
        let event = kept.map_or_else(|| Event::new(&self.context), Ok)?;
        event.record(stream)?;
        Ok(Completion(Arc::new(Point {
            event: Some(event),
            captured,
            events: Arc::downgrade(self),
            context: self.context.clone(),
        })))
    }
}

/// A point in a stream: behind an operation. Any thread.
#[derive(Clone)]
pub struct Completion(Arc<Point>);

struct Point {
    event: Option<Event>,
    captured: bool,
    events: Weak<Events>,
    context: Context,
}

impl Drop for Point {
    fn drop(&mut self) {
        if let (Some(event), Some(events)) = (self.event.take(), self.events.upgrade()) {
            let mut kept = events.kept.lock();
            if kept.len() < KEPT {
                kept.push(event);
            }
        }
    }
}

impl std::fmt::Debug for Completion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Completion({}{:?})", if self.0.captured { "captured, " } else { "" }, self.0.context)
    }
}

impl Completion {
    /// Whether the operation was captured in a graph: then only a stream of the same capture can wait for it.
    pub fn is_captured(&self) -> bool {
        self.0.captured
    }

    /// Whether the stream has come here.
    ///
    /// # Errors
    /// `Usage` for a captured one; what the driver says, also of a GPU that was lost since.
    pub fn is_done(&self) -> Result<bool> {
        self.refuse_captured()?;
        self.0.event.as_ref().map_or(Ok(true), Event::is_done)
    }

    /// Waits until the stream has come here.
    ///
    /// # Errors
    /// As [`Completion::is_done`]; `Timeout`.
    pub fn synchronize(&self, limit: Duration) -> Result<()> {
        self.refuse_captured()?;
        self.0.event.as_ref().map_or(Ok(()), |event| event.wait(limit))
    }

    /// What is put into `stream` from now on runs once the operation is done.
    ///
    /// # Safety
    /// `stream` must be a live stream's handle, or 0 for the default stream.
    ///
    /// # Errors
    /// `Usage`: it is another GPU's; what the driver says.
    pub unsafe fn wait(&self, stream: u64) -> Result<()> {
        // SAFETY: the caller vouches for the stream.
        let stream = unsafe { Stream::borrow(&self.0.context, stream)? };
        self.before(&stream)
    }

    pub(crate) fn before(&self, stream: &Stream) -> Result<()> {
        self.0.event.as_ref().map_or(Ok(()), |event| stream.wait_for(event))
    }

    fn refuse_captured(&self) -> Result<()> {
        if self.0.captured {
            let error =
                Error::new(ErrorKind::Usage, "event", "the operation was captured: it runs when its graph does");
            return Err(error.with_hint("wait for the stream that the graph was launched in"));
        }
        Ok(())
    }
}
