//! Variants of a buffer: other kernels on the same heap and connections. Creating one involves no other rank.

use std::sync::Arc;

use crossrail_ep::meeting::random_id;
use crossrail_ep::{Config, Layout};
use crossrail_locks::Mutex;
use crossrail_types::{Error, ErrorKind, Result};

use crate::buffer::DeviceBuffer;
use crate::fault_ring::Ring;
use crate::inner::Inner;
use crate::kernel_cache;
use crate::options;
use crate::peer::Peer;
use crate::results::Results;
use crate::sight::Sight;

impl DeviceBuffer {
    /// A buffer for operations with another payload or number of experts per token, on the heap and the connections of
    /// this one, which was made with [`crate::DeviceOptions::variants`]. No other rank takes part: each makes its own
    /// before its first operation. Kernels that are not cached on disk are compiled now.
    ///
    /// Operations of a buffer and its variants are one sequence, the same on all ranks. Only the buffer connects and
    /// disconnects ranks, for its variants too. A variant ends with the buffer at the latest.
    ///
    /// # Errors
    /// `Usage` for a configuration that differs in anything else; `Closed`; what the driver and the compiler report.
    pub fn variant(&self, config: Config) -> Result<DeviceBuffer> {
        let base = self.0.base.as_ref().unwrap_or(&self.0);
        base.membership.refuse_closed("ExpertBuffer")?;
        let (options, cuda) = (base.options.clone(), base.launches.cuda());
        let like =
            Config { payload: config.payload, topk: config.topk, timeout: config.timeout, ..base.config.clone() };
        if !options.variants || config.has(Layout::Rank) || config != like {
            let text = "variants differ in payload and topk only, and are in the expert layout";
            return Err(Error::new(ErrorKind::Usage, "ExpertBuffer", text));
        }
        let shape = options::shape(&config, &options)?;
        let heap = Arc::new(base.heap.for_variant(&shape)?);
        let kernels = kernel_cache::load(cuda, base.context.settings(), &shape)?;
        let blocks = options.blocks(kernels.most_blocks())?;
        let ring = Ring::new(cuda, &shape)?;
        let mut state = base.membership.lock();
        state.refuse_closed("ExpertBuffer")?;
        base.process_losses(&mut state);
        // The heap's bytes are in the row of the buffer that it was made from.
        let sight = Sight::new(base.context.settings(), &base.name, (base.me, config.ranks), options.ordinal, 0);
        let sight = Arc::new(sight);
        let launches = base.launches.for_variant(kernels, blocks, ring.address());
        let results = Results::new(random_id()?, cuda, &config, &shape, &sight)?;
        let inner = base.membership.share(&state, ring, |membership| {
            let inner = Arc::new(Inner {
                name: base.name.clone(),
                me: base.me,
                config,
                options,
                sending: base.sending.clone(),
                shape,
                context: base.context.clone(),
                heap,
                membership,
                launches,
                results,
                proxy: base.proxy.clone(),
                setup_timings: Mutex::default(),
                sight,
                base: Some(base.clone()),
                variants: Mutex::default(),
            });
            base.add_variant(&inner);
            inner
        });
        Ok(DeviceBuffer(inner))
    }
}

impl Inner {
    pub(crate) fn refuse_variant(&self, operation: &str) -> Result<()> {
        if self.base.is_none() {
            return Ok(());
        }
        let text = "a variant has the connections of the buffer that it was made from";
        Err(Error::new(ErrorKind::Usage, operation, text).with_hint(format!("{operation} that buffer")))
    }

    /// The buffer that this variant was made from has connected or disconnected a rank.
    pub(crate) fn follow_base(&self, rank: u32, peer: Option<&Peer>) {
        let mut state = self.current();
        self.membership.set_generation(rank, peer.map_or(0, |peer| peer.generation));
        state.replace(rank, peer.map(Peer::for_variant));
        self.show_members(&state);
    }

    /// Ends a variant once kernels are done.
    pub(crate) fn end_variant(&self) -> Result<()> {
        if self.membership.lock().close() {
            return Ok(());
        }
        let done = self.wait_for_last_kernels();
        if done.is_err() {
            self.launches.leak();
        }
        done
    }
}
