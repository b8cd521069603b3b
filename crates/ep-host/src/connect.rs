//! Connecting and disconnecting ranks.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use crossrail::{Mapped, RegionKey, Shared};
use crossrail_ep::hello::Hello;
use crossrail_ep::meeting::{self, CLOSE_TIMEOUT, Connection, Greeted};
use crossrail_types::{Error, ErrorKind, Result};

use crate::heap::Heap;
use crate::local_rank::{GroupView, LocalRank};
use crate::peer::{NetworkParts, Peer};
use crate::plan::plan;

impl LocalRank {
    pub(crate) fn connect(&self, ranks: &[u32], activate: bool, timeout: Option<Duration>) -> Result<()> {
        let timeout = timeout.unwrap_or(self.context.settings().timeout);
        let deadline = Instant::now() + timeout;
        let mut view = self.view.lock();
        if view.closed {
            return Err(Error::new(ErrorKind::Closed, "connect", "the buffer was destroyed"));
        }
        let new = meeting::unconnected(ranks, self.config.ranks, |rank| view.peers[rank as usize].is_some())?;
        if new.is_empty() {
            return Ok(());
        }
        let alone = view.others(self.own.me).is_empty();
        let (connections, deadline) = self.meeting.connect(&new, deadline)?;
        let network = connections.iter().filter(|connection| !connection.is_shared()).count() as u32;
        plan(&self.config, network, 1)?.check()?;
        let greeted = self.meeting.greet(connections, deadline, |connection| self.hello(&mut view, connection))?;
        let mut peers = Vec::with_capacity(greeted.len());
        let mut counts = [view.operations, view.dispatches, view.combines];
        let mut number = 0;
        for greeted in greeted {
            for (mine, theirs) in counts.iter_mut().zip(greeted.received.counts) {
                *mine = (*mine).max(theirs);
            }
            number = number.max(greeted.received.view);
            let (rank, endpoint) = (greeted.connection.rank, greeted.connection.endpoint.clone());
            let met = self.meet(greeted, deadline);
            peers.push(met.map_err(|error| self.meeting.refusal_or(rank, &endpoint, error))?);
        }
        let endpoints: Vec<_> =
            peers.iter().filter_map(|peer| Some((peer.rank as u32, peer.endpoint()?.clone(), Vec::new()))).collect();
        self.meeting.all_ready(&endpoints, deadline)?;
        let floor = [counts[1], counts[2]];
        if floor != [view.dispatches, view.combines] {
            // The ranks connected so far, this one included, began later than the new ones.
            view.peers.iter_mut().flatten().for_each(|peer| peer.floor = floor);
        }
        [view.operations, view.dispatches, view.combines] = counts;
        if alone {
            view.broken = None;
            view.agreed = self.alone();
        }
        for mut peer in peers {
            peer.floor = floor;
            peer.masked = !activate;
            peer.inbox = peer.endpoint().and_then(|endpoint| self.notices_from(endpoint));
            let rank = peer.rank;
            view.peers[rank] = Some(peer);
        }
        view.restart(number);
        view.spin = spin_for(&view);
        view.show_members();
        Ok(())
    }

    /// Clears the control words of an earlier connection, and makes the hello for a new one.
    fn hello(&self, view: &mut GroupView, connection: &Connection) -> Result<Hello> {
        for word in self.own.heap.words(&self.own.areas, connection.rank as usize).0.iter().flatten() {
            word.announce(0);
        }
        view.generation += 1;
        let shared =
            if connection.is_shared() { Some(connection.endpoint.share(&self.memory)?.to_bytes()) } else { None };
        Ok(Hello {
            rank: self.own.me as u32,
            parameters: self.meeting.parameters().clone(),
            counts: [view.operations, view.dispatches, view.combines],
            view: view.agreed.number(),
            shared,
            inbox: 0,
            key: self.region.key().to_bytes(),
            generation: view.generation,
        })
    }

    fn meet(&self, greeted: Greeted, deadline: Instant) -> Result<Peer> {
        let Greeted { connection: Connection { rank, endpoint, .. }, sent, received: hello } = greeted;
        let rank = rank as usize;
        if let Some(shared) = &hello.shared {
            let left = deadline.saturating_duration_since(Instant::now());
            let mapped = endpoint.map(&Shared::from_bytes(shared)?, Some(left))?;
            let heap = self.check_heap(rank, &mapped)?;
            return Ok(Peer::mapped(rank, heap, mapped, endpoint));
        }
        let staging = usize::try_from(self.own.areas.staging_bytes()).unwrap_or(usize::MAX);
        let parts = NetworkParts {
            endpoint,
            key: RegionKey::from_bytes(&hello.key)?,
            region: self.region.clone(),
            writes_as: hello.generation,
            reads_as: sent.generation,
            staging: self.context.alloc(staging)?,
        };
        Ok(Peer::network(rank, parts))
    }

    fn check_heap(&self, rank: usize, mapped: &Mapped) -> Result<Heap> {
        if mapped.len() < self.own.areas.heap {
            let text =
                format!("the heap of rank {rank} has {} bytes where {} are needed", mapped.len(), self.own.areas.heap);
            return Err(Error::new(ErrorKind::Protocol, "connect", text));
        }
        // SAFETY: mapped page-aligned, of that size (just checked), and kept mapped by `mapped` beside it in the
        // peer.
        unsafe { Heap::new(mapped.ptr()) }
            .ok_or_else(|| Error::new(ErrorKind::Io, "connect", "the peer's heap has no address"))
    }

    pub(crate) fn disconnect(&self, ranks: &[u32]) -> Result<()> {
        let mut view = self.view.lock();
        meeting::check_others(ranks, self.own.me as u32, self.config.ranks, "disconnect")?;
        for rank in ranks {
            if let Some(peer) = view.peers[*rank as usize].take() {
                peer.close(CLOSE_TIMEOUT);
            }
        }
        view.restart(0);
        view.spin = spin_for(&view);
        view.show_members();
        Ok(())
    }

    pub(crate) fn destroy(&self) -> Result<()> {
        if !self.origin.is_here() {
            return Ok(());
        }
        // A thread that waits holds the lock, and releases it when it sees this.
        self.meeting.end();
        let mut view = self.view.lock();
        if std::mem::replace(&mut view.closed, true) {
            return Ok(());
        }
        self.meeting.close();
        for peer in view.peers.iter_mut().filter_map(Option::take) {
            peer.close(CLOSE_TIMEOUT);
        }
        drop(view);
        self.worker.close()
    }
}

impl Drop for LocalRank {
    fn drop(&mut self) {
        let _ = self.destroy();
    }
}

/// How long to spin before sleeping: long if each rank of the node has a processor of its own; otherwise spinning would
/// keep the awaited rank from running.
fn spin_for(view: &GroupView) -> Duration {
    let near = view.peers.iter().flatten().filter(|peer| !peer.is_network()).count();
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    Duration::from_micros(if near <= processors { 200 } else { 1 })
}
