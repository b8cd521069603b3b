//! Completion of operations: events in callers' streams.
#![allow(unsafe_code)]

use std::sync::{Arc, Weak};
use std::time::Duration;

use crossrail_cuda::{Context, Event, Stream};
use crossrail_locks::Mutex;
use crossrail_types::{Error, ErrorKind, Result};

/// Most idle events that are kept for reuse.
const KEPT: usize = 256;

/// A pool of events.
pub(crate) struct Events {
    context: Context,
    kept: Mutex<Vec<Event>>,
}

impl Events {
    pub(crate) fn new(context: &Context) -> Arc<Events> {
        Arc::new(Events { context: context.clone(), kept: Mutex::default() })
    }

    /// Records the completion of everything enqueued in `stream` so far.
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

/// Completion of an operation: an event behind it in its stream. Usable from any thread; clones are the same event.
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
    /// Whether the operation was captured in a graph; then only streams of the same capture can wait for it.
    pub fn is_captured(&self) -> bool {
        self.0.captured
    }

    /// Whether the operation is done.
    ///
    /// # Errors
    /// `Usage` for a captured operation; what the driver reports, including the loss of the GPU.
    pub fn is_done(&self) -> Result<bool> {
        self.refuse_captured()?;
        self.0.event.as_ref().map_or(Ok(true), Event::is_done)
    }

    /// Blocks until the operation is done.
    ///
    /// # Errors
    /// As [`Completion::is_done`]; `Timeout`.
    pub fn synchronize(&self, limit: Duration) -> Result<()> {
        self.refuse_captured()?;
        self.0.event.as_ref().map_or(Ok(()), |event| event.wait(limit))
    }

    /// Makes everything enqueued in `stream` from now on wait for the operation.
    ///
    /// # Safety
    /// `stream` must be a live stream's handle, or 0 for the default stream.
    ///
    /// # Errors
    /// `Usage` if the stream belongs to another GPU; what the driver reports.
    pub unsafe fn wait(&self, stream: u64) -> Result<()> {
        let _entered = self.0.context.enter()?;
        // SAFETY: the caller vouches for the stream.
        let stream = unsafe { Stream::borrow(&self.0.context, stream)? };
        self.before(&stream)
    }

    pub(crate) fn before(&self, stream: &Stream) -> Result<()> {
        self.0.event.as_ref().map_or(Ok(()), |event| stream.wait_for(event))
    }

    fn refuse_captured(&self) -> Result<()> {
        if self.0.captured {
            let error = Error::new(
                ErrorKind::Usage,
                "event",
                "the operation was captured in a graph, and runs when the graph is launched",
            );
            return Err(error.with_hint("synchronize with the stream in which the graph is launched"));
        }
        Ok(())
    }
}
