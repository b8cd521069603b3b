//! The public handle of a buffer.

use std::sync::Arc;
use std::time::Duration;

use crossrail::{Context, Endpoint};
use crossrail_control::Group;
use crossrail_ep::{Config, Fault, Link, LinkKind, Plan};
use crossrail_types::{Error, Result};

use crate::combine::{self, CombineOptions, Combined};
use crate::dispatch::{self, DispatchOptions, Dispatched};
use crate::local_rank::LocalRank;
use crate::operation::Pending;
use crate::plan::plan;
use crate::routes::Handle;
use crate::sync;
use crate::tensor::{Input, Tensor};

/// One rank's memory for dispatch and combine, and its connections to the other ranks. Clones share both. Any thread may
/// call it; calls from several threads are serialised.
#[derive(Clone)]
pub struct ExpertBuffer(pub(crate) Arc<LocalRank>);

impl ExpertBuffer {
    /// The memory that a buffer of `config` needs on one rank when `network` other ranks are on other nodes, where
    /// `sharing` ranks take the memory of this machine.
    ///
    /// # Errors
    /// As [`Config::check`].
    pub fn plan(config: &Config, network: u32, sharing: u32) -> Result<Plan> {
        plan(config, network, sharing)
    }

    /// Allocates the memory for `config` on this rank of `group`; no other rank is connected yet. Buffers of the same
    /// name on different ranks belong together.
    ///
    /// # Errors
    /// `Usage` for an invalid configuration; `Exhausted`, with the plan, when it needs more memory than is free.
    pub fn new(group: &Group, context: &Context, name: &str, config: Config) -> Result<ExpertBuffer> {
        Ok(ExpertBuffer(Arc::new(LocalRank::new(group, context, name, config)?)))
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.0.config
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.0.own.me as u32
    }

    /// Connects to `ranks`, and returns once all of them are connected. It is collective: all of `ranks`, and those that
    /// are connected already, call it at the same point between operations. `ranks` may include this rank and connected
    /// ones. With `activate` the next operations include the new ranks; otherwise they start masked.
    ///
    /// # Errors
    /// `Timeout` naming the ranks that are missing; `Mismatch` naming the rank and the parameter that differs;
    /// `PeerDead`. Ranks that were connected before stay connected.
    pub fn connect(&self, ranks: &[u32], activate: bool, timeout: Option<Duration>) -> Result<()> {
        self.0.origin.check("connect")?;
        self.0.connect(ranks, activate, timeout)
    }

    /// Closes the connections to `ranks`, between operations. They are then absent, not masked. Connections between other
    /// ranks are not affected.
    ///
    /// # Errors
    /// `Usage` for a number that is not a rank of this buffer, or is this rank.
    pub fn disconnect(&self, ranks: &[u32]) -> Result<()> {
        self.0.origin.check("disconnect")?;
        self.0.disconnect(ranks)
    }

    /// Masks `ranks`: operations neither send to them nor wait for them.
    ///
    /// # Errors
    /// `Usage` for a rank that is not connected, or this one.
    pub fn mask(&self, ranks: &[u32]) -> Result<()> {
        self.0.set_mask(ranks, true)
    }

    /// Includes masked ranks again. They must unmask this rank at the same point between operations.
    ///
    /// # Errors
    /// `Usage` for a rank that is not connected; `PeerDead` for one whose process has ended.
    pub fn unmask(&self, ranks: &[u32]) -> Result<()> {
        self.0.set_mask(ranks, false)
    }

    /// Connected ranks that are masked.
    pub fn masked(&self) -> Vec<u32> {
        let view = self.0.view.lock();
        view.peers.iter().flatten().filter(|peer| peer.masked).map(|peer| peer.rank as u32).collect()
    }

    /// Connected ranks, including this one and masked ones.
    pub fn connected(&self) -> Vec<u32> {
        self.0.view.lock().peers.iter().flatten().map(|peer| peer.rank as u32).collect()
    }

    /// Number of this rank's view, which is equal on all ranks that continue together: it grows with every rank that is
    /// lost and masked, and whenever the caller changes who takes part.
    pub fn view(&self) -> u64 {
        self.0.view.lock().agreed.number()
    }

    /// Ranks lost so far, in order.
    pub fn faults(&self) -> Vec<Fault> {
        self.0.view.lock().faults.clone()
    }

    /// How each connected rank is reached.
    pub fn links(&self) -> Vec<Link> {
        let view = self.0.view.lock();
        let peers = view.peers.iter().flatten();
        peers
            .map(|peer| Link {
                rank: peer.rank as u32,
                kind: match peer.endpoint() {
                    None => LinkKind::Myself,
                    Some(_) if peer.is_network() => LinkKind::Network,
                    Some(_) => LinkKind::Heap,
                },
                masked: peer.masked,
                gateway: None,
                lanes: peer.endpoint().map(Endpoint::lanes).unwrap_or_default(),
                missed: peer.endpoint().map(|endpoint| endpoint.explain().missed()).unwrap_or_default(),
                proxy: None,
            })
            .collect()
    }

    /// Sends this rank's tokens to the ranks of their experts. `input` must not change until the operation is finished.
    ///
    /// # Errors
    /// `Closed`. Any other error of the call is reported when the operation is finished, here and on every other rank.
    pub fn dispatch(&self, input: Input, options: DispatchOptions) -> Result<Pending<Dispatched>> {
        self.0.origin.check("dispatch")?;
        dispatch::begin(&self.0, input, options)
    }

    /// Returns the experts' outputs to the tokens' ranks and sums them there. `y` is bf16:
    /// `[local experts, ranks * max_tokens, hidden]`, as dispatch delivered (expert layout), or `[rows, hidden]` (rank
    /// layout). It must not change until the operation is finished.
    ///
    /// # Errors
    /// As for [`ExpertBuffer::dispatch`].
    pub fn combine(&self, y: Tensor, handle: &Handle, options: CombineOptions) -> Result<Pending<Combined>> {
        self.0.origin.check("combine")?;
        combine::begin(&self.0, y, Some(handle), options)
    }

    /// Takes part in the other ranks' dispatch without rows, because this rank's call is invalid: as
    /// [`DispatchOptions::refuse`], for callers that have no input.
    ///
    /// # Errors
    /// `Closed`; `why` when the operation is finished.
    pub fn refuse_dispatch(&self, why: Error) -> Result<Pending<Dispatched>> {
        self.0.origin.check("dispatch")?;
        let nothing = Tensor::from(Vec::<u8>::new());
        let input = Input { x: nothing.clone(), topk_idx: nothing, topk_weights: None };
        dispatch::begin(&self.0, input, DispatchOptions { refuse: Some(why), ..DispatchOptions::default() })
    }

    /// Takes part in the other ranks' combine without rows, because this rank's call is invalid.
    ///
    /// # Errors
    /// `Closed`; `why` when the operation is finished.
    pub fn refuse_combine(&self, why: Error) -> Result<Pending<Combined>> {
        self.0.origin.check("combine")?;
        let nothing = Tensor::from(Vec::<u8>::new());
        combine::begin(&self.0, nothing, None, CombineOptions { refuse: Some(why), ..CombineOptions::default() })
    }

    /// Barrier: finishes once every connected rank that is not masked has called it.
    ///
    /// # Errors
    /// `Mismatch` when another rank calls another operation; `Closed`.
    pub fn sync(&self) -> Result<Pending<()>> {
        self.0.origin.check("sync")?;
        sync::begin(&self.0)
    }

    /// Closes all connections. The memory is freed with the last result that refers to it. A second call does nothing.
    ///
    /// # Errors
    /// None at present.
    pub fn destroy(&self) -> Result<()> {
        self.0.destroy()
    }
}

impl std::fmt::Debug for ExpertBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ExpertBuffer({:?}, rank {})", self.0.name, self.0.own.me)
    }
}
