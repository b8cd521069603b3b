//! [`PerProcess`]: statics with one value per process, so that a forked child starts with its own.
#![allow(unsafe_code)]

use std::fmt;
use std::ops::Deref;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use crossrail_types::{Origin, count_fork};

/// A value that exists once per process, made by [`Default`] when the process first uses it. For statics with locks.
///
/// A thread of the parent may hold such a lock at the moment of a fork, in the middle of a change; the child has no
/// thread that would ever release it. So the child inherits nothing: it creates its own value on first use, and the
/// parent's value stays in its memory, untouched. No fork waits for a lock, and no lock order is needed at a fork.
pub struct PerProcess<T: 'static>(AtomicPtr<Made<T>>);

struct Made<T> {
    origin: Origin,
    value: T,
}

// SAFETY: it hands out shared references to values that it has made itself and never drops.
unsafe impl<T: Send + Sync> Sync for PerProcess<T> {}

impl<T> PerProcess<T> {
    /// A static that no process has used.
    pub const fn new() -> PerProcess<T> {
        PerProcess(AtomicPtr::new(null_mut()))
    }
}

impl<T: Default> PerProcess<T> {
    #[cold]
    fn make(&self) -> &T {
        watch_forks();
        let own = Box::into_raw(Box::new(Made { origin: Origin::here(), value: T::default() }));
        let mut known = self.0.load(Ordering::Acquire);
        loop {
            // SAFETY: null, or a value that is never dropped once the static refers to it.
            if let Some(made) = unsafe { known.as_ref() }.filter(|made| made.origin.is_here()) {
                // SAFETY: from `into_raw` just above; nobody else has seen it.
                drop(unsafe { Box::from_raw(own) });
                return &made.value;
            }
            match self.0.compare_exchange(known, own, Ordering::AcqRel, Ordering::Acquire) {
                // SAFETY: never dropped from here on.
                Ok(_) => return unsafe { &(*own).value },
                // Another thread of this process won the race.
                Err(now) => known = now,
            }
        }
    }

    /// The value of this process.
    #[inline]
    pub fn here(&self) -> &T {
        // SAFETY: null, or a value that is never dropped once the static refers to it.
        match unsafe { self.0.load(Ordering::Acquire).as_ref() } {
            Some(made) if made.origin.is_here() => &made.value,
            _ => self.make(),
        }
    }
}

impl<T: Default> Deref for PerProcess<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        self.here()
    }
}

impl<T: Default> Default for PerProcess<T> {
    fn default() -> PerProcess<T> {
        PerProcess::new()
    }
}

impl<T> fmt::Debug for PerProcess<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PerProcess").finish_non_exhaustive()
    }
}

extern "C" fn in_child() {
    count_fork();
}

/// Registers a fork handler that increments the fork count, which [`Origin`] compares, in every child. Any thread, any
/// number of times.
pub fn watch_forks() {
    static WATCHING: AtomicBool = AtomicBool::new(false);
    if WATCHING.load(Ordering::Acquire) {
        return;
    }
    // Concurrent callers all register the handler, so that none returns before it is registered; counting a fork more
    // than once is harmless, because only a change of the count matters.
    // SAFETY: the handler only adds to an atomic counter, which any thread may do at any time. It fails only without
    // memory; then forks go unnoticed.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    WATCHING.store(true, Ordering::Release);
}
