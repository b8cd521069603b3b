//! Connecting and disconnecting ranks.
#![allow(unsafe_code)]

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossrail::{Mapped, RegionKey, Shared};
use crossrail_ep::hello::Hello;
use crossrail_ep::meeting::{self, End, GOODBYE, Greeted};
use crossrail_types::{Error, ErrorKind, Result};

use crate::buffer::{Inner, State};
use crate::heap::Heap;
use crate::peer::{NetworkParts, Peer};
use crate::plan::plan;

impl State {
    /// Connected ranks that are not masked, without `me`.
    pub(crate) fn others(&self, me: usize) -> Vec<usize> {
        let peers = self.peers.iter().flatten();
        peers.filter(|peer| !peer.masked && peer.rank != me).map(|peer| peer.rank).collect()
    }

    /// The same with `me`.
    pub(crate) fn active(&self) -> Vec<usize> {
        self.peers.iter().flatten().filter(|peer| !peer.masked).map(|peer| peer.rank).collect()
    }
}

impl Inner {
    pub(crate) fn connect(&self, ranks: &[u32], activate: bool, timeout: Option<Duration>) -> Result<()> {
        let timeout = timeout.unwrap_or(self.context.settings().timeout);
        let deadline = Instant::now() + timeout;
        let mut state = self.state.lock();
        if state.closed {
            return Err(Error::new(ErrorKind::Closed, "connect", "the buffer was destroyed"));
        }
        let new = meeting::missing(ranks, self.config.ranks, |rank| state.peers[rank as usize].is_some())?;
        if new.is_empty() {
            return Ok(());
        }
        let (ends, deadline) = self.meeting.connect(&new, deadline)?;
        let network = ends.iter().filter(|end| !end.is_shared()).count() as u32;
        plan(&self.config, network)?.check()?;
        let greeted = self.meeting.greet(ends, deadline, |end| self.hello(&mut state, end))?;
        let mut peers = Vec::with_capacity(greeted.len());
        let mut counts = [state.operations, state.dispatches, state.combines];
        for greeted in greeted {
            for (mine, theirs) in counts.iter_mut().zip(greeted.heard.counts) {
                *mine = (*mine).max(theirs);
            }
            let (rank, endpoint) = (greeted.end.rank, greeted.end.endpoint.clone());
            let met = self.meet(greeted, deadline);
            peers.push(met.map_err(|error| self.meeting.why(rank, &endpoint, error))?);
        }
        let endpoints: Vec<_> =
            peers.iter().filter_map(|peer| Some((peer.rank as u32, peer.endpoint()?.clone(), Vec::new()))).collect();
        self.meeting.all_ready(&endpoints, deadline)?;
        let floor = [counts[1], counts[2]];
        if floor != [state.dispatches, state.combines] {
            // Those connected so far, this rank itself among them, came later than the others too.
            state.peers.iter_mut().flatten().for_each(|peer| peer.floor = floor);
        }
        [state.operations, state.dispatches, state.combines] = counts;
        for mut peer in peers {
            peer.floor = floor;
            peer.masked = !activate;
            let rank = peer.rank;
            state.peers[rank] = Some(peer);
        }
        state.spin = spin_for(&state);
        Ok(())
    }

    /// Clears what an earlier connection left, and makes the hello for a new one.
    fn hello(&self, state: &mut State, end: &End) -> Result<Hello> {
        for word in self.here.heap.words(&self.here.areas, end.rank as usize).0.iter().flatten() {
            word.store(0, Ordering::Release);
        }
        state.generation += 1;
        let shared = if end.is_shared() { Some(end.endpoint.share(&self.memory)?.to_bytes()) } else { None };
        Ok(Hello {
            rank: self.here.me as u32,
            parameters: self.meeting.parameters().clone(),
            counts: [state.operations, state.dispatches, state.combines],
            shared,
            key: self.region.key().to_bytes(),
            generation: state.generation,
        })
    }

    fn meet(&self, greeted: Greeted, deadline: Instant) -> Result<Peer> {
        let Greeted { end: End { rank, endpoint, .. }, said, heard: hello } = greeted;
        let rank = rank as usize;
        if let Some(shared) = &hello.shared {
            let left = deadline.saturating_duration_since(Instant::now());
            let mapped = endpoint.map(&Shared::from_bytes(shared)?, Some(left))?;
            let heap = self.check_heap(rank, &mapped)?;
            return Ok(Peer::mapped(rank, heap, mapped, endpoint));
        }
        let staging = usize::try_from(self.here.areas.staging_bytes()).unwrap_or(usize::MAX);
        let parts = NetworkParts {
            endpoint,
            key: RegionKey::from_bytes(&hello.key)?,
            region: self.region.clone(),
            writes_as: hello.generation,
            reads_as: said.generation,
            staging: self.context.alloc(staging)?,
        };
        Ok(Peer::network(rank, parts))
    }

    fn check_heap(&self, rank: usize, mapped: &Mapped) -> Result<Heap> {
        if mapped.len() < self.here.areas.heap {
            let text =
                format!("the heap of rank {rank} has {} bytes where {} are needed", mapped.len(), self.here.areas.heap);
            return Err(Error::new(ErrorKind::Protocol, "connect", text));
        }
        // SAFETY: mapped page-aligned, of that size (just checked), and kept mapped by `mapped` beside it in the
        // peer.
        unsafe { Heap::new(mapped.ptr()) }
            .ok_or_else(|| Error::new(ErrorKind::Io, "connect", "the peer's heap has no address"))
    }

    pub(crate) fn disconnect(&self, ranks: &[u32]) -> Result<()> {
        let mut state = self.state.lock();
        meeting::others(ranks, self.here.me as u32, self.config.ranks, "disconnect")?;
        for rank in ranks {
            if let Some(peer) = state.peers[*rank as usize].take() {
                peer.close(GOODBYE);
            }
        }
        state.spin = spin_for(&state);
        Ok(())
    }

    pub(crate) fn destroy(&self) -> Result<()> {
        // Whoever waits holds the state, and lets go of it when it sees this.
        self.meeting.end();
        let mut state = self.state.lock();
        if std::mem::replace(&mut state.closed, true) {
            return Ok(());
        }
        self.meeting.close();
        for peer in state.peers.iter_mut().filter_map(Option::take) {
            peer.close(GOODBYE);
        }
        drop(state);
        self.worker.close();
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let _ = self.destroy();
    }
}

/// How long to spin before sleeping: long while each rank of the node has a processor to itself, else it would only
/// keep the one from running that is waited for.
fn spin_for(state: &State) -> Duration {
    let near = state.peers.iter().flatten().filter(|peer| !peer.is_network()).count();
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    Duration::from_micros(if near <= processors { 200 } else { 1 })
}
