//! The buffer: one rank's memory for dispatch and combine, and its connections to the other ranks.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use crossrail::{Context, Endpoint, Memory, Region, Worker};
use crossrail_control::Group;
use crossrail_ep::hello::Parameters;
use crossrail_ep::meeting::{Meeting, random_id};
use crossrail_ep::{Config, Fault, Layout, Link, LinkKind, Plan};
use crossrail_types::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::combine::{self, CombineOptions, Combined};
use crate::dispatch::{self, DispatchOptions, Dispatched};
use crate::heap::{Areas, Heap, expert_area};
use crate::operation::Pending;
use crate::peer::{Here, Peer};
use crate::plan::plan;
use crate::routes::Handle;
use crate::rows::Kernels;
use crate::sync;
use crate::tensor::{Input, Tensor};

/// One rank's memory for dispatch and combine, and its connections to the other ranks. Clones share it. Any thread
/// may use it, one at a time.
#[derive(Clone)]
pub struct ExpertBuffer(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    /// Tells buffers apart, handles too.
    pub(crate) id: u64,
    pub(crate) name: String,
    pub(crate) group: Group,
    pub(crate) context: Context,
    pub(crate) config: Config,
    pub(crate) here: Here,
    pub(crate) rows: &'static Kernels,
    pub(crate) memory: Memory,
    /// Expert layout: rows and scales by parity.
    pub(crate) experts: Option<[Memory; 2]>,
    pub(crate) worker: Worker,
    pub(crate) region: Region,
    pub(crate) state: Mutex<State>,
    /// Finds and greets the others. When it ends, whoever waits with the state locked gives up.
    pub(crate) meeting: Meeting,
}

/// What changes.
pub(crate) struct State {
    pub(crate) peers: Vec<Option<Peer>>,
    /// Operations, dispatches and combines begun so far: the same on every rank.
    pub(crate) operations: u64,
    pub(crate) dispatches: u64,
    pub(crate) combines: u64,
    pub(crate) faults: Vec<Fault>,
    /// Ranks that were lost while they had a place among our rows, and may still write there if they live.
    pub(crate) suspects: Vec<(usize, Endpoint)>,
    /// Numbers connections.
    pub(crate) generation: u32,
    /// Writes of other nodes that were seen.
    pub(crate) arrivals: u64,
    /// How long a wait spins before it sleeps.
    pub(crate) spin: Duration,
    pub(crate) closed: bool,
}

impl ExpertBuffer {
    /// What a buffer of `config` takes on one rank, `network` other ranks being on other nodes.
    ///
    /// # Errors
    /// As [`Config::check`].
    pub fn plan(config: &Config, network: u32) -> Result<Plan> {
        plan(config, network)
    }

    /// Memory for `config` on this rank of `group`; nobody is connected yet. Buffers of one name belong together.
    ///
    /// # Errors
    /// `Usage` for numbers that make no sense; `Exhausted`, with the plan, when more is wanted than is free.
    pub fn new(group: &Group, context: &Context, name: &str, config: Config) -> Result<ExpertBuffer> {
        config.check()?;
        let me = group.rank();
        config.check_rank(me)?;
        plan(&config, 0)?.check()?;
        let areas = Areas::new(&config);
        let memory = context.alloc(areas.heap)?;
        let experts = if config.has(Layout::Expert) {
            let bytes = usize::try_from(expert_area(&config, areas.row, areas.scale)).unwrap_or(usize::MAX);
            Some([context.alloc(bytes)?, context.alloc(bytes)?])
        } else {
            None
        };
        // SAFETY: freshly mapped, page-aligned, of this size, and kept by `memory` as long as Inner lives.
        let heap = unsafe { Heap::new(memory.ptr()) };
        let heap = heap.ok_or_else(|| Error::new(ErrorKind::Io, "ExpertBuffer", "the heap has no address"))?;
        let id = random_id()?;
        let (node, parameters) = (group.node().to_owned(), Parameters::of(&config));
        let meeting = Meeting::new(group, context, name, id, node, config.share_node, parameters)?;
        let worker = meeting.worker.clone();
        let region = worker.register(&memory)?;
        let mut peers: Vec<Option<Peer>> = (0..config.ranks).map(|_| None).collect();
        peers[me as usize] = Some(Peer::myself(me as usize));
        let inner = Inner {
            id,
            meeting,
            name: name.to_owned(),
            group: group.clone(),
            context: context.clone(),
            here: Here { heap, areas, me: me as usize },
            rows: Kernels::detect(),
            memory,
            experts,
            worker,
            region,
            config,
            state: Mutex::new(State {
                peers,
                operations: 0,
                dispatches: 0,
                combines: 0,
                faults: Vec::new(),
                suspects: Vec::new(),
                generation: 0,
                arrivals: 0,
                spin: Duration::ZERO,
                closed: false,
            }),
        };
        inner.meeting.announce()?;
        Ok(ExpertBuffer(Arc::new(inner)))
    }

    /// What it was made for.
    pub fn config(&self) -> &Config {
        &self.0.config
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.0.here.me as u32
    }

    /// Connects `ranks` (this one among them or not; those that are connected stay so), which call it too, and waits
    /// until all of them are; `activate`: operations include them from now on, otherwise they are masked at first.
    /// Called by ranks that are connected already and by new ones at the same point between operations.
    ///
    /// # Errors
    /// `Timeout` naming the ranks that did not come; `Mismatch` naming the rank and the parameter that differs;
    /// `PeerDead`. Ranks that were connected before stay connected.
    pub fn connect(&self, ranks: &[u32], activate: bool, timeout: Option<Duration>) -> Result<()> {
        self.0.connect(ranks, activate, timeout)
    }

    /// Ends the connections to `ranks`, between operations; they are not masked but absent. What others are connected
    /// to stays.
    ///
    /// # Errors
    /// `Usage` for a rank that is none, or this one.
    pub fn disconnect(&self, ranks: &[u32]) -> Result<()> {
        self.0.disconnect(ranks)
    }

    /// From now on operations neither send to `ranks` nor wait for them.
    ///
    /// # Errors
    /// `Usage` for a rank that is not connected, or this one.
    pub fn mask(&self, ranks: &[u32]) -> Result<()> {
        self.0.set_mask(ranks, true)
    }

    /// Takes masked ranks back, which do the same at the same point between operations.
    ///
    /// # Errors
    /// `Usage` for a rank that is not connected; `PeerDead` for one whose process is gone.
    pub fn unmask(&self, ranks: &[u32]) -> Result<()> {
        self.0.set_mask(ranks, false)
    }

    /// Ranks that are connected but masked.
    pub fn masked(&self) -> Vec<u32> {
        let state = self.0.state.lock();
        state.peers.iter().flatten().filter(|peer| peer.masked).map(|peer| peer.rank as u32).collect()
    }

    /// Ranks that are connected, this one and masked ones included.
    pub fn connected(&self) -> Vec<u32> {
        self.0.state.lock().peers.iter().flatten().map(|peer| peer.rank as u32).collect()
    }

    /// Ranks that were lost so far, in order.
    pub fn faults(&self) -> Vec<Fault> {
        self.0.state.lock().faults.clone()
    }

    /// How each connected rank is reached.
    pub fn links(&self) -> Vec<Link> {
        let state = self.0.state.lock();
        let peers = state.peers.iter().flatten();
        peers
            .map(|peer| Link {
                rank: peer.rank as u32,
                kind: match peer.endpoint() {
                    None => LinkKind::Myself,
                    Some(_) if peer.is_network() => LinkKind::Network,
                    Some(_) => LinkKind::Heap,
                },
                masked: peer.masked,
                lanes: peer.endpoint().map(Endpoint::lanes).unwrap_or_default(),
            })
            .collect()
    }

    /// Sends this rank's tokens to the ranks of their experts. `input` must stay as it is until the operation is
    /// finished.
    ///
    /// # Errors
    /// `Closed`. Whatever else is wrong with the call is said when the operation is finished, here and on every other rank.
    pub fn dispatch(&self, input: Input, options: DispatchOptions) -> Result<Pending<Dispatched>> {
        dispatch::begin(&self.0, input, options)
    }

    /// Brings the experts' outputs back. `y` is bf16: `[local experts, ranks * max_tokens, hidden]` as dispatch
    /// delivered (expert layout), or `[rows, hidden]` (rank layout). It must stay as it is until the operation is
    /// finished.
    ///
    /// # Errors
    /// As for [`ExpertBuffer::dispatch`].
    pub fn combine(&self, y: Tensor, handle: &Handle, options: CombineOptions) -> Result<Pending<Combined>> {
        combine::begin(&self.0, y, Some(handle), options)
    }

    /// Takes part in the others' dispatch although nothing can be dispatched here: as
    /// [`DispatchOptions::refuse`], for callers that have no input either.
    ///
    /// # Errors
    /// `Closed`; `why` when the operation is finished.
    pub fn refuse_dispatch(&self, why: Error) -> Result<Pending<Dispatched>> {
        let nothing = Tensor::from(Vec::<u8>::new());
        let input = Input { x: nothing.clone(), topk_idx: nothing, topk_weights: None };
        dispatch::begin(&self.0, input, DispatchOptions { refuse: Some(why), ..DispatchOptions::default() })
    }

    /// The same for the others' combine.
    ///
    /// # Errors
    /// As there.
    pub fn refuse_combine(&self, why: Error) -> Result<Pending<Combined>> {
        let nothing = Tensor::from(Vec::<u8>::new());
        combine::begin(&self.0, nothing, None, CombineOptions { refuse: Some(why), ..CombineOptions::default() })
    }

    /// Waits until every connected rank that is not masked has come here.
    ///
    /// # Errors
    /// `Mismatch` when another rank calls something else; `Closed`.
    pub fn sync(&self) -> Result<Pending<()>> {
        sync::begin(&self.0)
    }

    /// Ends all connections. The memory goes with the last result that is a view of it.
    ///
    /// # Errors
    /// None of a second call.
    pub fn destroy(&self) -> Result<()> {
        self.0.destroy()
    }
}

impl std::fmt::Debug for ExpertBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ExpertBuffer({:?}, rank {})", self.0.name, self.0.here.me)
    }
}

impl Inner {
    /// Says on stderr what went wrong without stopping anything.
    pub(crate) fn warn(&self, what: &dyn std::fmt::Display) {
        self.meeting.warn(what);
    }

    fn set_mask(&self, ranks: &[u32], masked: bool) -> Result<()> {
        let what = if masked { "mask" } else { "unmask" };
        let mut state = self.state.lock();
        let floor = [state.dispatches, state.combines];
        for rank in ranks {
            let peer = state.peers.get_mut(*rank as usize).and_then(Option::as_mut);
            let Some(peer) = peer.filter(|peer| peer.rank != self.here.me) else {
                return Err(Error::new(ErrorKind::Usage, what, format!("rank {rank} is not a connected other rank")));
            };
            if !masked && !peer.is_alive() {
                let error = Error::new(ErrorKind::PeerDead, what, format!("the process of rank {rank} is gone"));
                return Err(error.with_hint("disconnect it; a new process can take its place"));
            }
            if peer.masked && !masked {
                peer.floor = floor;
            }
            peer.masked = masked;
        }
        Ok(())
    }
}
