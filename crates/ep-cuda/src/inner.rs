//! What all clones of a buffer share: what it was made with, and its rooms, each with a file and private fields of its
//! own.

use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use crossrail::Context;
use crossrail_ep::Config;
use crossrail_kernels::ep::{Epochs, Shape};
use crossrail_locks::{Mutex, MutexGuard};
use crossrail_types::{Error, ErrorKind, Result};

use crate::heap::Heap;
use crate::launches::Launches;
use crate::membership::{Membership, State};
use crate::options::DeviceOptions;
use crate::proxy::Proxy;
use crate::results::Results;
use crate::setup_timings::SetupTimings;
use crate::sight::Sight;

/// How long the end of a buffer waits for kernels in addition to their own timeouts.
const LAST_KERNELS: Duration = Duration::from_secs(2);

pub(crate) struct Inner {
    pub(crate) name: String,
    pub(crate) me: u32,
    pub(crate) config: Config,
    pub(crate) options: DeviceOptions,
    /// Why rows cross the network as often as they do.
    pub(crate) sending: String,
    pub(crate) shape: Shape,
    pub(crate) context: Context,
    pub(crate) heap: Arc<Heap>,
    pub(crate) membership: Membership,
    pub(crate) launches: Launches,
    pub(crate) results: Results,
    /// Sends to ranks whose heaps this GPU cannot map; of the heap: a buffer and its variants have it in common.
    pub(crate) proxy: Arc<OnceLock<Proxy>>,
    pub(crate) setup_timings: Mutex<SetupTimings>,
    pub(crate) sight: Arc<Sight>,
    /// The buffer whose heap and connections a variant uses.
    pub(crate) base: Option<Arc<Inner>>,
    /// Its variants, which are told of ended connections too.
    pub(crate) variants: Mutex<Vec<Weak<Inner>>>,
}

impl Inner {
    /// The buffer's variants.
    pub(crate) fn variants(&self) -> Vec<Arc<Inner>> {
        self.variants.lock().iter().filter_map(Weak::upgrade).collect()
    }

    pub(crate) fn add_variant(&self, variant: &Arc<Inner>) {
        let mut variants = self.variants.lock();
        variants.retain(|variant| variant.strong_count() > 0);
        variants.push(Arc::downgrade(variant));
    }

    /// The state, in which the losses known by now are processed.
    pub(crate) fn current(&self) -> MutexGuard<'_, State> {
        let mut state = self.membership.lock();
        self.process_losses(&mut state);
        state
    }

    /// Shows which ranks are connected, masked and lost.
    pub(crate) fn show_members(&self, state: &State) {
        self.sight.members(state.members());
    }

    /// Waits until no operation of this rank is in flight; returns the sequence numbers of the last ones. `_state`: no
    /// other call begins one.
    pub(crate) fn wait_until_idle(&self, _state: &State, what: &str, limit: Option<Duration>) -> Result<Epochs> {
        if !self.launches.outstanding().is_idle() {
            let error = Error::new(ErrorKind::Usage, what, "an operation that was sent has not been received yet");
            return Err(error.with_hint("finish it first, on all ranks"));
        }
        self.wait_for_kernels(limit)?;
        self.heap.epochs()
    }

    /// How long kernels may take: their own timeouts, and then some.
    pub(crate) fn kernels_limit(&self) -> Duration {
        self.config.timeout.saturating_mul(2) + self.context.settings().timeout
    }

    /// Waits until all enqueued operations are done.
    pub(crate) fn wait_for_kernels(&self, limit: Option<Duration>) -> Result<()> {
        let _waiting = self.sight.waiting("kernels", Instant::now(), &[]);
        self.launches.wait(limit.unwrap_or(self.kernels_limit()))
    }

    /// The same, before the buffer ends.
    pub(crate) fn wait_for_last_kernels(&self) -> Result<()> {
        self.wait_for_kernels(Some(self.config.timeout.saturating_mul(2) + LAST_KERNELS))
    }
}
