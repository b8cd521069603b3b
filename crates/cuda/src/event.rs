//! Events: points in a stream.
#![allow(unsafe_code)]

use std::time::Duration;

use crossrail_types::Result;
use cudarc::driver::sys::{CUevent, CUevent_flags};

use crate::context::Context;
use crate::raw::Raw;
use crate::stream::{Stream, done, wait};

const NO_FLAGS: u32 = 0;

/// A point in a stream, to be asked about and waited for; made once and recorded often.
pub struct Event {
    context: Context,
    raw: CUevent,
}

// SAFETY: an event handle is a name for an object of the driver, which may be used from every thread at once.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `make` and not used after this; the driver keeps what streams still wait for.
        let _ = self.context.current("event", |raw| unsafe { (raw.cuEventDestroy_v2)(self.raw) });
    }
}

impl Stream {
    /// What is put in from now on waits until `event` has come.
    ///
    /// # Errors
    /// A failed call.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        // SAFETY: both are alive; the driver keeps what it needs of the event.
        let wait = |raw: &Raw| unsafe { (raw.cuStreamWaitEvent)(self.raw(), event.raw(), NO_FLAGS) };
        self.context().run("stream", "cuStreamWaitEvent", wait)
    }
}

impl Event {
    /// An event that only says whether it has come: the cheap one.
    ///
    /// # Errors
    /// A failed call.
    pub fn new(context: &Context) -> Result<Event> {
        Event::make(context, CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// An event that also knows when it came, for [`Event::since`].
    ///
    /// # Errors
    /// A failed call.
    pub fn timed(context: &Context) -> Result<Event> {
        Event::make(context, CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn make(context: &Context, flags: CUevent_flags) -> Result<Event> {
        let mut event: CUevent = std::ptr::null_mut();
        // SAFETY: `event` is a valid place for one handle.
        context.run("event", "cuEventCreate", |raw| unsafe { (raw.cuEventCreate)(&mut event, flags as u32) })?;
        Ok(Event { context: context.clone(), raw: event })
    }

    /// Comes once everything that is in `stream` now is done. What it was recorded for before no longer counts.
    ///
    /// # Errors
    /// A failed call, such as for a stream of another GPU.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both are alive.
        self.context.run("event", "cuEventRecord", |raw| unsafe { (raw.cuEventRecord)(self.raw, stream.raw()) })
    }

    /// Whether it has come; an event that was never recorded has.
    ///
    /// # Errors
    /// A failed call, also one that was put in before the event and failed since.
    pub fn is_done(&self) -> Result<bool> {
        // SAFETY: the event is alive.
        let code = self.context.current("event", |raw| unsafe { (raw.cuEventQuery)(self.raw) })?;
        done(&self.context, "event", "cuEventQuery", code)
    }

    /// Waits until it has come.
    ///
    /// # Errors
    /// `ErrorKind::Timeout` after `limit`; a failed call.
    pub fn wait(&self, limit: Duration) -> Result<()> {
        wait(&self.context, "event", limit, || self.is_done())
    }

    /// The time from `earlier` to this one; both must be timed and have come.
    ///
    /// # Errors
    /// A failed call.
    pub fn since(&self, earlier: &Event) -> Result<Duration> {
        let mut milliseconds = 0_f32;
        // SAFETY: both are alive; `milliseconds` is a valid place for one number.
        self.context.run("event", "cuEventElapsedTime", |raw| unsafe {
            (raw.cuEventElapsedTime)(&mut milliseconds, earlier.raw, self.raw)
        })?;
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).unwrap_or_default())
    }

    pub(crate) fn raw(&self) -> CUevent {
        self.raw
    }
}
