use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossrail_gpu::Completion;
use crossrail_locks::Mutex;

/// Completions of stagers, until a thread with the worker's lock takes them. Any thread.
#[derive(Clone, Debug, Default)]
pub(crate) struct Inbox(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// There is something to take: completions, or free slots. Set after the completions were stored, cleared before
    /// they are taken, so that none is left behind.
    up: AtomicBool,
    completions: Mutex<Vec<Completion>>,
}

impl Inbox {
    /// Stores completions; none: slots are free.
    pub(crate) fn put(&self, mut completions: Vec<Completion>) {
        self.0.completions.lock().append(&mut completions);
        self.0.up.store(true, Ordering::Release);
    }

    /// Whether there is something. Costs one load.
    #[inline]
    pub(crate) fn is_up(&self) -> bool {
        self.0.up.load(Ordering::Relaxed)
    }

    pub(super) fn take(&self) -> Option<Vec<Completion>> {
        self.0.up.swap(false, Ordering::AcqRel).then(|| std::mem::take(&mut *self.0.completions.lock()))
    }
}
