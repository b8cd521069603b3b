//! Values that are dropped on the release thread.
#![allow(unsafe_code)]

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::Arc;

use crate::context::Context;
use crate::release::{ReleaseThread, Timing};

/// A value that the release thread drops: for mappings, and for what must outlive them.
pub struct Deferred<T: Send + 'static> {
    value: ManuallyDrop<T>,
    timing: Timing,
    thread: Arc<ReleaseThread>,
}

impl<T: Send + 'static> Deferred<T> {
    /// A value whose drop does not wait for streams: dropped as soon as the release thread gets to it.
    pub fn new(value: T, context: &Context) -> Deferred<T> {
        Deferred::with_timing(value, Timing::Immediate, Arc::clone(context.release_thread()))
    }

    /// A value whose drop makes a call that waits for streams: dropped once no stream is known to wait
    /// ([`Context::defer_releases_while`]).
    pub fn when_idle(value: T, context: &Context) -> Deferred<T> {
        Deferred::with_timing(value, Timing::WhenIdle, Arc::clone(context.release_thread()))
    }

    pub(crate) fn with_timing(value: T, timing: Timing, thread: Arc<ReleaseThread>) -> Deferred<T> {
        Deferred { value: ManuallyDrop::new(value), timing, thread }
    }
}

impl<T: Send + 'static> Deref for Deferred<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: Send + fmt::Debug + 'static> fmt::Debug for Deferred<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.value.fmt(f)
    }
}

impl<T: Send + 'static> Drop for Deferred<T> {
    fn drop(&mut self) {
        // SAFETY: taken once, here, and not used afterwards.
        let value = unsafe { ManuallyDrop::take(&mut self.value) };
        self.thread.submit(self.timing, Box::new(move || drop(value)));
    }
}
