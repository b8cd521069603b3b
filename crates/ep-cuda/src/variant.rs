//! Variants of a buffer: other kernels on the same heap and connections. Making one takes no other rank.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use crossrail_ep::meeting::random_id;
use crossrail_ep::{Config, Layout};
use crossrail_locks::Mutex;
use crossrail_types::{Error, ErrorKind, Result};

use crate::buffer::DeviceBuffer;
use crate::device_reader::Reader;
use crate::fault_ring::Ring;
use crate::handles::{Pool, layout_of};
use crate::heap::Heap;
use crate::inner::{Connections, Inner, State};
use crate::kernel_cache;
use crate::options;
use crate::peer::Peer;
use crate::regions::Regions;
use crate::sight::Sight;

/// How long the end of a variant waits for kernels in addition to their own timeouts.
const LAST_KERNELS: Duration = Duration::from_secs(2);

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
        base.refuse_closed("ExpertBuffer")?;
        let (options, cuda) = (base.options.clone(), base.cuda.clone());
        let like =
            Config { payload: config.payload, topk: config.topk, timeout: config.timeout, ..base.config.clone() };
        if !options.variants || config.has(Layout::Rank) || config != like {
            let text = "variants differ in payload and topk only, and are in the expert layout";
            return Err(Error::new(ErrorKind::Usage, "ExpertBuffer", text));
        }
        let shape = options::shape(&config, &options)?;
        let heap = Heap::new(base.memory.clone(), &shape, &base.room)?;
        let kernels = kernel_cache::load(&cuda, base.context.settings(), &shape)?;
        let blocks = options.blocks(kernels.most_blocks())?;
        let ring = Ring::new(&cuda)?;
        let mut state = base.state.lock();
        if state.closed {
            return Err(Error::new(ErrorKind::Closed, "ExpertBuffer", "the buffer was destroyed"));
        }
        base.process_losses(&mut state);
        let peers = state.peers.iter().map(|peer| peer.as_ref().map(Peer::for_variant)).collect();
        // Held until the variant is known, so that no connection ends unheard in between.
        let connections = base.connections.lock();
        let heard = Connections { generations: connections.generations.clone(), ended: connections.ended.clone() };
        // The heap's bytes are in the row of the buffer that it was made from.
        let sight = Sight::new(base.context.settings(), &base.name, (base.me, config.ranks), options.ordinal, 0);
        let inner = Arc::new(Inner {
            id: random_id()?,
            name: base.name.clone(),
            me: base.me,
            context: base.context.clone(),
            meeting: base.meeting.clone(),
            kernels,
            _engine: base._engine.clone(),
            blocks,
            heap,
            memory: base.memory.clone(),
            region: Mutex::default(),
            events: base.events.clone(),
            counts: None,
            handles: [Some(Pool::new(&cuda, shape.handle_bytes(layout_of(Layout::Expert)))), None],
            regions: Regions::new(0),
            reader: Reader::new(&cuda),
            faults_at: ring.address(),
            tell: base.tell.clone(),
            agreement: base.agreement.clone(),
            network: AtomicU64::new(0),
            in_flight: base.in_flight.clone(),
            state: Mutex::new(State::new(peers, ring, state.outstanding.clone())),
            connections: Mutex::new(heard),
            connecting: Mutex::new(()),
            setup_timings: Mutex::default(),
            sight: Arc::new(sight),
            config,
            options,
            shape,
            room: base.room,
            base: Some(base.clone()),
            variants: Mutex::default(),
            cuda,
        });
        let mut variants = base.variants.lock();
        variants.retain(|variant| variant.strong_count() > 0);
        variants.push(Arc::downgrade(&inner));
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
        let mut state = self.state.lock();
        self.process_losses(&mut state);
        self.connections.lock().generations[rank as usize] = peer.map_or(0, |peer| peer.generation);
        state.peers[rank as usize] = peer.map(Peer::for_variant);
        self.show_members(&state);
    }

    /// Ends a variant once kernels are done.
    pub(crate) fn end_variant(&self) -> Result<()> {
        if std::mem::replace(&mut self.state.lock().closed, true) {
            return Ok(());
        }
        let done = self.wait_for_kernels(Some(self.config.timeout.saturating_mul(2) + LAST_KERNELS));
        if done.is_err() {
            // Kernels that may still run need their code: leak it.
            std::mem::forget(self.kernels.clone());
        }
        done
    }
}
