//! Who takes part: the connected ranks, those that are masked or lost, and the calls that change them.
//!
//! The state's lock serializes calls, and its holder may wait for kernels. The generations of connections have a lock of
//! their own, so that a rank can be masked meanwhile.

use std::sync::Arc;
use std::sync::mpsc::Sender;

use crossrail::{Endpoint, Request};
use crossrail_ep::Fault;
use crossrail_ep::meeting::Meeting;
use crossrail_kernels::ep::{EpFault, Nodes};
use crossrail_locks::{Mutex, MutexGuard};
use crossrail_types::{Error, ErrorKind, Result};

use crate::agreement::{Agreement, Loss};
use crate::connection_event::{ConnectionEnd, ConnectionEvent};
use crate::fault_ring::Ring;
use crate::peer::Peer;
use crate::proxy::Lost;
use crate::sight::Members;

/// Tag of a message that is never sent: its receive fails when the connection ends.
const LIFE: u64 = 0x4550_0000_0001_0003;

/// See the module.
pub(crate) struct Membership {
    meeting: Arc<Meeting>,
    agreement: Arc<Agreement>,
    events: Sender<ConnectionEvent>,
    state: Mutex<State>,
    /// Locked while masks that depend on it are written, never while waiting for kernels or other ranks. Taken after
    /// `state` where both are held.
    connections: Mutex<Connections>,
    /// Serializes connect, disconnect and destroy; taken before `state`.
    changing: Mutex<()>,
}

/// What the watching thread knows of connections.
#[derive(Clone)]
struct Connections {
    /// By rank, the generation of its connection; 0 for none.
    generations: Vec<u64>,
    /// Ended connections that [`Membership::take_ends`] has not returned yet.
    ended: Vec<ConnectionEnd>,
}

impl Membership {
    /// Of a buffer of its own; `events`: where ended connections are announced.
    pub(crate) fn new(
        meeting: Meeting,
        agreement: Agreement,
        events: Sender<ConnectionEvent>,
        state: State,
    ) -> Membership {
        let connections = Connections { generations: vec![0; state.peers.len()], ended: Vec::new() };
        Membership {
            meeting: Arc::new(meeting),
            agreement: Arc::new(agreement),
            events,
            state: Mutex::new(state),
            connections: Mutex::new(connections),
            changing: Mutex::default(),
        }
    }

    /// Calls `make` with the membership of a variant, which has these connections; `state`: this one's. No connection ends
    /// unheard before `make` returns. `ring`: where the variant's kernels report faults.
    pub(crate) fn share<T>(&self, state: &State, ring: Ring, make: impl FnOnce(Membership) -> T) -> T {
        let peers = state.peers.iter().map(|peer| peer.as_ref().map(Peer::for_variant)).collect();
        let connections = self.connections.lock();
        make(Membership {
            meeting: self.meeting.clone(),
            agreement: self.agreement.clone(),
            events: self.events.clone(),
            state: Mutex::new(State::new(peers, ring)),
            connections: Mutex::new(connections.clone()),
            changing: Mutex::default(),
        })
    }

    pub(crate) fn meeting(&self) -> &Meeting {
        &self.meeting
    }

    pub(crate) fn agreement(&self) -> &Agreement {
        &self.agreement
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// The state, unless a call holds it.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, State>> {
        self.state.try_lock()
    }

    /// Keeps other calls from connecting, disconnecting or destroying until the result is dropped. Taken before the
    /// state's lock.
    pub(crate) fn begin_change(&self) -> MutexGuard<'_, ()> {
        self.changing.lock()
    }

    pub(crate) fn refuse_closed(&self, operation: &str) -> Result<()> {
        if self.meeting.is_ending() {
            return Err(Error::new(ErrorKind::Closed, operation, "the buffer was destroyed"));
        }
        Ok(())
    }

    /// Announces the end of the connection to the watching thread. The result never completes before.
    pub(crate) fn watch(&self, rank: u32, generation: u64, endpoint: &Endpoint) -> Result<Request> {
        let events = self.events.clone();
        let life = self.meeting.worker.recv(Vec::new(), LIFE, u64::MAX, Some(endpoint))?;
        life.on_complete(move |end| {
            if let Err(error) = end {
                // Fails only when the buffer is gone.
                let _ = events.send(ConnectionEvent::Ended(ConnectionEnd { rank, generation, error }));
            }
        });
        Ok(life)
    }

    /// From now on, the connection to `rank` is the one of that generation; 0: there is none.
    pub(crate) fn set_generation(&self, rank: u32, generation: u64) {
        self.connections.lock().generations[rank as usize] = generation;
    }

    /// The same, with `publish`, which sets the mask for kernels: the connection's end masks the rank only afterwards.
    pub(crate) fn publish(&self, rank: u32, generation: u64, publish: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut connections = self.connections.lock();
        connections.generations[rank as usize] = generation;
        publish()
    }

    /// A callback that announces the end of rails.
    pub(crate) fn rails_watch(&self) -> Lost {
        let events = self.events.clone();
        Box::new(move |rank, generation, why| {
            // The receiver may have ended with the buffer.
            let _ = events.send(ConnectionEvent::Rails { rank, generation, why: why.to_owned() });
        })
    }

    /// The generation of the connection to a rank; 0 for none.
    pub(crate) fn generation(&self, rank: u32) -> u64 {
        self.connections.lock().generations[rank as usize]
    }

    /// Queues the end of a connection for the next call, and calls `mask` if the rank has no newer one; returns whether.
    ///
    /// The state's lock is not taken: its holder may be waiting for kernels that wait for this rank. The end is queued
    /// first, so that a caller who sees an operation complete without the rank also finds the fault.
    pub(crate) fn queue_end(&self, end: &ConnectionEnd, mask: impl FnOnce()) -> bool {
        let mut connections = self.connections.lock();
        let is_current = connections.generations[end.rank as usize] == end.generation;
        connections.ended.push(end.clone());
        if is_current {
            mask();
        }
        is_current
    }

    /// Ended connections since the last call.
    pub(crate) fn take_ends(&self) -> Vec<ConnectionEnd> {
        std::mem::take(&mut self.connections.lock().ended)
    }
}

/// The mutable state, under [`Membership::lock`].
pub(crate) struct State {
    peers: Vec<Option<Peer>>,
    /// By rank: whether it was connected before, so that what it left in the heap must be cleared before it reconnects.
    stale: Vec<bool>,
    ring: Ring,
    faults: Vec<Fault>,
    /// Losses of the agreement that were processed.
    losses_seen: usize,
    /// The max_rows overflow has been logged.
    overflow_reported: bool,
    generation: u64,
    closed: bool,
}

impl State {
    /// The state before any operation.
    pub(crate) fn new(peers: Vec<Option<Peer>>, ring: Ring) -> State {
        State {
            stale: vec![false; peers.len()],
            peers,
            ring,
            faults: Vec::new(),
            losses_seen: 0,
            overflow_reported: false,
            generation: 0,
            closed: false,
        }
    }

    /// The state of rank `me` of `ranks`, which is connected to no other.
    pub(crate) fn alone(me: u32, ranks: u32, ring: Ring) -> State {
        State::new((0..ranks).map(|rank| (rank == me).then(|| Peer::myself(me))).collect(), ring)
    }

    /// A connected rank.
    pub(crate) fn peer(&self, rank: u32) -> Option<&Peer> {
        self.peers.get(rank as usize).and_then(Option::as_ref)
    }

    /// A connected rank.
    pub(crate) fn peer_mut(&mut self, rank: u32) -> Option<&mut Peer> {
        self.peers.get_mut(rank as usize).and_then(Option::as_mut)
    }

    /// All connected ranks, ascending, this one included.
    pub(crate) fn peers(&self) -> impl Iterator<Item = &Peer> {
        self.peers.iter().flatten()
    }

    /// The same.
    pub(crate) fn peers_mut(&mut self) -> impl Iterator<Item = &mut Peer> {
        self.peers.iter_mut().flatten()
    }

    /// Sets or removes the connection to a rank; returns the one before.
    pub(crate) fn replace(&mut self, rank: u32, peer: Option<Peer>) -> Option<Peer> {
        std::mem::replace(&mut self.peers[rank as usize], peer)
    }

    /// Removes all connections.
    pub(crate) fn take_all(&mut self) -> Vec<Peer> {
        self.peers.iter_mut().filter_map(Option::take).collect()
    }

    /// The generation of a new connection.
    pub(crate) fn next_generation(&mut self) -> u64 {
        self.generation += 1;
        self.generation
    }

    /// The rank is about to connect. Returns whether it was connected before, and may have left something in the heap.
    pub(crate) fn mark_stale(&mut self, rank: u32) -> bool {
        std::mem::replace(&mut self.stale[rank as usize], true)
    }

    /// Connected ranks that are not masked, this one included.
    fn unmasked(&self) -> impl Iterator<Item = &Peer> {
        self.peers().filter(|peer| !peer.masked)
    }

    /// How many ranks are connected and not masked, this one included.
    pub(crate) fn active(&self) -> u32 {
        self.unmasked().count() as u32
    }

    /// The same, by number.
    pub(crate) fn active_ranks(&self) -> Vec<u32> {
        self.unmasked().map(|peer| peer.rank).collect()
    }

    /// Ranks that are not connected, or masked, ascending; and those that rank `me` reaches only through such a rank.
    pub(crate) fn missing(&self, me: u32, nodes: Nodes) -> Vec<u32> {
        let is_out = |rank: u32| self.peer(rank).is_none_or(|peer| peer.masked);
        let ranks = 0..self.peers.len() as u32;
        ranks
            .filter(|rank| {
                is_out(*rank) || nodes.gateways(me, *rank).is_some_and(|passed| passed.into_iter().any(is_out))
            })
            .collect()
    }

    /// Counts of ranks by state, for the metrics page.
    pub(crate) fn members(&self) -> Members {
        let masked = self.peers().filter(|peer| peer.masked).count() as u64;
        Members { connected: self.peers().count() as u64, masked, lost: self.faults.len() as u64 }
    }

    /// Ranks that are reached through the proxy, as bits.
    pub(crate) fn far_ranks(&self) -> Vec<u64> {
        let mut words = vec![0; self.peers.len().div_ceil(64)];
        for peer in self.peers().filter(|peer| peer.far().is_some()) {
            words[peer.rank as usize / 64] |= 1 << (peer.rank % 64);
        }
        words
    }

    /// Faults that kernels have reported since the last call.
    pub(crate) fn reported_faults(&mut self) -> Vec<EpFault> {
        self.ring.read()
    }

    /// Notes that rows came beyond max_rows. Returns whether that is the first time: graphs may be replayed often.
    pub(crate) fn is_first_overflow(&mut self) -> bool {
        !std::mem::replace(&mut self.overflow_reported, true)
    }

    /// Ranks that the agreement has lost since the last call.
    pub(crate) fn agreed_losses(&mut self, agreement: &Agreement) -> Vec<Loss> {
        agreement.losses_since(&mut self.losses_seen)
    }

    /// Keeps a fault; the rank is lost until the caller masks, unmasks or disconnects it.
    pub(crate) fn record(&mut self, fault: Fault) {
        if let Some(peer) = self.peer_mut(fault.rank) {
            peer.lost = Some(fault.clone());
        }
        self.faults.push(fault);
    }

    /// Ranks lost so far, in order.
    pub(crate) fn faults(&self) -> &[Fault] {
        &self.faults
    }

    /// Ends the buffer; returns whether it had ended before.
    pub(crate) fn close(&mut self) -> bool {
        std::mem::replace(&mut self.closed, true)
    }

    pub(crate) fn refuse_closed(&self, operation: &str) -> Result<()> {
        if self.closed {
            return Err(Error::new(ErrorKind::Closed, operation, "the buffer was destroyed"));
        }
        Ok(())
    }
}
