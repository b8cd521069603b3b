//! The worker's lock, for threads that hold another lock of the program.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::Duration;

use crossrail_locks::{Mutex, MutexGuard};

use crate::core::Core;

/// A lock of the program, such as an interpreter lock, that threads may hold when they call a worker. A thread that
/// waits long for the worker's lock releases it meanwhile, so that other threads of the program continue.
#[derive(Clone, Copy, Debug)]
pub struct CallerLock {
    /// Returns true if the calling thread holds it.
    pub is_held: fn() -> bool,
    /// Runs the argument without it.
    pub without: fn(&mut (dyn FnMut() + Send)),
}

/// Leaked by [`set_caller_lock`].
static CALLER_LOCK: AtomicPtr<CallerLock> = AtomicPtr::new(ptr::null_mut());

/// Maximum wait for the worker's lock with the caller's lock held: most passes are shorter, and releasing the lock costs
/// more.
const BRIEF: Duration = Duration::from_micros(100);

/// Declares the lock that this program's threads may hold. The last call counts.
pub fn set_caller_lock(lock: CallerLock) {
    CALLER_LOCK.store(Box::into_raw(Box::new(lock)), Ordering::Release);
}

/// That lock, if the calling thread holds it.
#[allow(unsafe_code)]
fn held_lock() -> Option<&'static CallerLock> {
    // SAFETY: null, or a box that is never freed.
    let lock = unsafe { CALLER_LOCK.load(Ordering::Acquire).as_ref() };
    lock.filter(|lock| (lock.is_held)())
}

/// See the module.
pub(super) struct CoreLock(Mutex<Core>);

impl CoreLock {
    pub(super) fn new(core: Core) -> CoreLock {
        CoreLock(Mutex::new(core))
    }

    #[inline(always)]
    pub(super) fn lock(&self) -> MutexGuard<'_, Core> {
        match self.0.try_lock() {
            Some(core) => core,
            None => self.lock_contended(),
        }
    }

    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, Core>> {
        self.0.try_lock()
    }

    #[cold]
    #[inline(never)]
    fn lock_contended(&self) -> MutexGuard<'_, Core> {
        let Some(caller) = held_lock() else { return self.0.lock() };
        loop {
            if let Some(core) = self.0.try_lock_for(BRIEF) {
                return core;
            }
            // Released again: waiting for the caller's lock with the worker's held would delay all peers.
            (caller.without)(&mut || drop(self.0.lock()));
        }
    }
}
