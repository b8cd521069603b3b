//! Events: points in a stream that can be queried and waited for.
#![allow(unsafe_code)]

use std::time::Duration;

use crossrail_types::Result;
use cudarc::driver::sys::{CUevent, CUevent_flags};

use crate::context::Context;
use crate::raw::Raw;
use crate::stream::{Stream, done, wait};

const NO_FLAGS: u32 = 0;

/// A point in a stream that can be queried and waited for. Create it once and record it often.
pub struct Event {
    context: Context,
    raw: CUevent,
}

// SAFETY: an event handle names a driver object that may be used from all threads concurrently.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created by `make` and not used afterwards; the driver retains events that streams wait for.
        let _ = self.context.current("event", |raw| unsafe { (raw.cuEventDestroy_v2)(self.raw) });
    }
}

impl Stream {
    /// Makes work enqueued from now on wait for `event`. Does not wait on the host.
    ///
    /// # Errors
    /// A failed call.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        // SAFETY: both are alive; the driver retains what it needs of the event.
        let wait = |raw: &Raw| unsafe { (raw.cuStreamWaitEvent)(self.raw(), event.raw(), NO_FLAGS) };
        self.context().run("stream", "cuStreamWaitEvent", wait)
    }
}

impl Event {
    /// Creates an event without a timestamp, which is cheaper.
    ///
    /// # Errors
    /// A failed call.
    pub fn new(context: &Context) -> Result<Event> {
        Event::make(context, CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// Creates an event with a timestamp, for [`Event::since`].
    ///
    /// # Errors
    /// A failed call.
    pub fn timed(context: &Context) -> Result<Event> {
        Event::make(context, CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn make(context: &Context, flags: CUevent_flags) -> Result<Event> {
        let mut event: CUevent = std::ptr::null_mut();
        // SAFETY: `event` is a valid out pointer.
        context.run("event", "cuEventCreate", |raw| unsafe { (raw.cuEventCreate)(&mut event, flags as u32) })?;
        Ok(Event { context: context.clone(), raw: event })
    }

    /// Records the event: it completes once all work enqueued in `stream` so far has completed. Replaces an earlier
    /// recording.
    ///
    /// # Errors
    /// A failed call, as for a stream of another GPU.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both are alive.
        self.context.run("event", "cuEventRecord", |raw| unsafe { (raw.cuEventRecord)(self.raw, stream.raw()) })
    }

    /// Whether the event has completed; true for an event that was never recorded.
    ///
    /// # Errors
    /// A failed call; also the asynchronous failure of work enqueued before the event.
    pub fn is_done(&self) -> Result<bool> {
        // SAFETY: the event is alive.
        let code = self.context.current("event", |raw| unsafe { (raw.cuEventQuery)(self.raw) })?;
        done(&self.context, "event", "cuEventQuery", code)
    }

    /// Waits until the event has completed.
    ///
    /// # Errors
    /// `ErrorKind::Timeout` after `limit`; a failed call.
    pub fn wait(&self, limit: Duration) -> Result<()> {
        wait(&self.context, "event", limit, || self.is_done())
    }

    /// The time from `earlier` to this event. Both must have timestamps and have completed.
    ///
    /// # Errors
    /// A failed call.
    pub fn since(&self, earlier: &Event) -> Result<Duration> {
        let mut milliseconds = 0_f32;
        // SAFETY: both are alive; `milliseconds` is a valid out pointer.
        self.context.run("event", "cuEventElapsedTime", |raw| unsafe {
            (raw.cuEventElapsedTime)(&mut milliseconds, earlier.raw, self.raw)
        })?;
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).unwrap_or_default())
    }

    pub(crate) fn raw(&self) -> CUevent {
        self.raw
    }
}
