use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossrail_gpu::Completion;
use parking_lot::Mutex;

use crate::core::Core;

/// What stagers have finished, until somebody with the worker's lock takes it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Inbox(Arc<Letters>);

#[derive(Debug, Default)]
struct Letters {
    /// There are some.
    up: AtomicBool,
    done: Mutex<Vec<Completion>>,
}

impl Inbox {
    pub(crate) fn put(&self, mut done: Vec<Completion>) {
        self.0.done.lock().append(&mut done);
        self.0.up.store(true, Ordering::Release);
    }

    /// Whether there is something. Costs one look at a flag.
    #[inline]
    pub(crate) fn is_up(&self) -> bool {
        self.0.up.load(Ordering::Relaxed)
    }

    fn take(&self) -> Option<Vec<Completion>> {
        self.0.up.swap(false, Ordering::AcqRel).then(|| std::mem::take(&mut *self.0.done.lock()))
    }
}

impl Core {
    /// Acts on what stagers have finished; whether there was anything.
    #[cold]
    pub(crate) fn read_inbox(&mut self) -> bool {
        let Some(done) = self.inbox.take() else { return false };
        self.staged(done);
        true
    }
}
