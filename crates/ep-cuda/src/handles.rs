//! Handles: the routing of a dispatch, in GPU memory that only kernels access, for its combine.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use crossrail_cuda::{Context, DeviceMemory};
use crossrail_ep::Layout;
use crossrail_kernels::ep as kernels;
use crossrail_locks::Mutex;
use crossrail_types::Result;

use crate::completion::Completion;

/// A pool of memory for handles of one layout.
pub(crate) struct Pool {
    context: Context,
    len: usize,
    free: Mutex<Vec<DeviceMemory>>,
    /// Memory of handles captured in graphs, which may be replayed at any time: never reused.
    kept: Mutex<Vec<DeviceMemory>>,
}

impl Pool {
    pub(crate) fn new(context: &Context, len: u64) -> Arc<Pool> {
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        Arc::new(Pool { context: context.clone(), len, free: Mutex::default(), kept: Mutex::default() })
    }

    /// Memory for a new handle. Operations of a buffer run one after the other on the GPU, so those that used it before
    /// are done when the next one runs.
    fn take(&self) -> Result<DeviceMemory> {
        if let Some(memory) = self.free.lock().pop() {
            return Ok(memory);
        }
        DeviceMemory::new(&self.context, self.len)
    }
}

/// The routing of a dispatch, for its combine and, in the rank layout, for dispatches that repeat it. Usable from any
/// thread; clones are the same handle. Its memory stays as long as a clone exists, or for good once a graph has
/// captured it.
#[derive(Clone)]
pub struct DeviceHandle(pub(crate) Arc<Held>);

pub(crate) struct Held {
    /// Id of its buffer.
    pub(crate) buffer: u64,
    pub(crate) layout: Layout,
    pub(crate) tokens: u32,
    /// Whether weights were sent with the dispatch.
    pub(crate) weighted: bool,
    memory: Mutex<Option<DeviceMemory>>,
    pub(crate) address: u64,
    captured: AtomicBool,
    last: Mutex<Option<Completion>>,
    pool: Weak<Pool>,
}

impl DeviceHandle {
    pub(crate) fn new(
        pool: &Arc<Pool>,
        buffer: u64,
        layout: Layout,
        (tokens, weighted): (u32, bool),
        captured: bool,
    ) -> Result<DeviceHandle> {
        let memory = pool.take()?;
        Ok(DeviceHandle(Arc::new(Held {
            buffer,
            layout,
            tokens,
            weighted,
            address: memory.address(),
            memory: Mutex::new(Some(memory)),
            captured: AtomicBool::new(captured),
            last: Mutex::default(),
            pool: Arc::downgrade(pool),
        })))
    }

    /// The layout of its dispatch.
    pub fn layout(&self) -> Layout {
        self.0.layout
    }

    /// This rank's tokens in its dispatch.
    pub fn tokens(&self) -> u32 {
        self.0.tokens
    }

    /// Whether weights were sent with its dispatch.
    pub fn has_weights(&self) -> bool {
        self.0.weighted
    }

    /// Records the completion of an operation that uses it.
    pub(crate) fn is_used_until(&self, done: &Completion) {
        if done.is_captured() {
            self.0.captured.store(true, Ordering::Relaxed);
        } else {
            *self.0.last.lock() = Some(done.clone());
        }
    }

    /// True if a graph has captured an operation that uses it.
    pub(crate) fn is_captured(&self) -> bool {
        self.0.captured.load(Ordering::Relaxed)
    }

    /// Completion of its last user.
    pub(crate) fn last(&self) -> Option<Completion> {
        self.0.last.lock().clone()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let (Some(memory), Some(pool)) = (self.memory.get_mut().take(), self.pool.upgrade()) else { return };
        if *self.captured.get_mut() {
            pool.kept.lock().push(memory);
        } else {
            pool.free.lock().push(memory);
        }
    }
}

impl std::fmt::Debug for DeviceHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DeviceHandle({} layout, {} tokens, buffer {:016x})", self.0.layout, self.0.tokens, self.0.buffer)
    }
}

/// A layout as the kernels crate names it.
pub(crate) fn layout_of(layout: Layout) -> kernels::Layout {
    match layout {
        Layout::Expert => kernels::Layout::Expert,
        Layout::Rank => kernels::Layout::Rank,
    }
}
