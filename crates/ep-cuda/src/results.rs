//! Memory of results: handles, regions of the rank layout, and counts reported to the host.

use std::sync::{Arc, Weak};

use crossrail_cuda::Context;
use crossrail_ep::{Config, Layout};
use crossrail_kernels::ep::Shape;
use crossrail_locks::Mutex;
use crossrail_types::{Error, ErrorKind, Result};

use crate::counts::{CountPool, Counts};
use crate::handles::{DeviceHandle, Held, Pool, layout_of};
use crate::regions::Regions;
use crate::sight::Sight;

/// See the module.
pub(crate) struct Results {
    /// Identifies the buffer, so that handles and regions of another one are refused.
    buffer: u64,
    /// Memory of handles: expert layout, rank layout.
    handles: [Option<Arc<Pool>>; 2],
    counts: Option<Arc<CountPool>>,
    regions: Regions,
    last_dispatch: Mutex<Weak<Held>>,
}

impl Results {
    /// Of the buffer `buffer`.
    pub(crate) fn new(
        buffer: u64,
        cuda: &Context,
        config: &Config,
        shape: &Shape,
        sight: &Arc<Sight>,
    ) -> Result<Results> {
        let pool = |layout: Layout| config.has(layout).then(|| Pool::new(cuda, shape.handle_bytes(layout_of(layout))));
        let counts = config.has(Layout::Rank).then(|| CountPool::new(cuda, shape, sight)).transpose()?;
        let handles = [pool(Layout::Expert), pool(Layout::Rank)];
        Ok(Results { buffer, handles, counts, regions: Regions::new(shape.regions), last_dispatch: Mutex::default() })
    }

    /// Identifies the buffer.
    pub(crate) fn buffer(&self) -> u64 {
        self.buffer
    }

    /// A handle for a dispatch of `tokens` tokens, with or without weights.
    pub(crate) fn handle(&self, layout: Layout, tokens: u32, weighted: bool, captured: bool) -> Result<DeviceHandle> {
        let pool = self.handles[usize::from(layout == Layout::Rank)].as_ref();
        let none = || Error::new(ErrorKind::Usage, "dispatch", format!("the buffer has no {layout} layout"));
        DeviceHandle::new(pool.ok_or_else(none)?, self.buffer, layout, (tokens, weighted), captured)
    }

    /// A dispatch with this handle was enqueued.
    pub(crate) fn dispatched(&self, handle: &DeviceHandle) {
        *self.last_dispatch.lock() = Arc::downgrade(&handle.0);
    }

    /// Handle of the last dispatch, if it still exists.
    pub(crate) fn last_dispatch(&self) -> Option<DeviceHandle> {
        self.last_dispatch.lock().upgrade().map(DeviceHandle)
    }

    /// A slot for the counts of a dispatch in the rank layout.
    pub(crate) fn counts(&self) -> Result<Option<Counts>> {
        self.counts.as_ref().map(CountPool::take).transpose()
    }

    /// Regions of the rank layout.
    pub(crate) fn regions(&self) -> &Regions {
        &self.regions
    }
}
