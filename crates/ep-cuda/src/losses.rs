//! Who notices that a rank is gone while kernels wait for it: a thread that sleeps until a connection ends.

use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Weak};

use crossrail::{Endpoint, ErrorKind, Request};
use crossrail_ep::Fault;
use crossrail_types::{Error, Result};

use crate::fault_ring::{self, is_masked_by_kernels, reason, stage};
use crate::inner::{ConnectionEnd, Inner, State};
use crate::peer::Departure;

/// The tag of a message that never comes: its receive ends with the connection.
const LIFE: u64 = 0x4550_0000_0001_0003;

/// Lets `tell` know when the connection ends.
pub(crate) fn on_end(inner: &Inner, rank: u32, generation: u64, endpoint: &Endpoint) -> Result<Request> {
    let tell: Sender<ConnectionEnd> = inner.tell.clone();
    let life = inner.meeting.worker.recv(Vec::new(), LIFE, u64::MAX, Some(endpoint))?;
    life.on_complete(move |end| {
        if let Err(error) = end {
            // Nobody listens any more when the buffer is gone.
            let _ = tell.send(ConnectionEnd { rank, generation, error });
        }
    });
    Ok(life)
}

/// The thread; it ends with the buffer.
pub(crate) fn start(inner: &Arc<Inner>, lost: Receiver<ConnectionEnd>) -> Result<()> {
    let buffer: Weak<Inner> = Arc::downgrade(inner);
    let body = move || {
        while let Ok(lost) = lost.recv() {
            let Some(inner) = buffer.upgrade() else { return };
            inner.connection_ended(lost);
        }
    };
    let thread = std::thread::Builder::new().name("crossrail-ep-watch".into()).spawn(body);
    thread.map(drop).map_err(|error| Error::io("ExpertBuffer", "a thread", &error))
}

impl Inner {
    /// Acts on what kernels have told of lost ranks, and on connections that have ended.
    pub(crate) fn process_losses(&self, state: &mut State) {
        for told in state.ring.read() {
            if let Some(what) = fault_ring::own(&told) {
                // Once: what is captured is replayed often.
                if !std::mem::replace(&mut state.overflow_reported, true) {
                    self.meeting.warn(&what);
                }
                continue;
            }
            let (kind, what) = stage(told.stage);
            let Some(peer) = state.peers.get_mut(told.rank as usize).and_then(Option::as_mut) else { continue };
            // A rank that the host has masked since was lost all the same, unless that was said.
            let was_masked = std::mem::replace(&mut peer.masked, true);
            if was_masked {
                continue;
            }
            if !is_masked_by_kernels(&told) {
                self.mask_in_kernels(told.rank);
            }
            let alive = peer.endpoint().cloned().filter(Endpoint::is_alive);
            let why = peer.end().unwrap_or_else(|| reason(&told, self.config.timeout));
            let fault = Fault {
                rank: told.rank,
                operation: kind.name(),
                number: told.epoch,
                stage: what,
                why,
                left: state.active(),
            };
            if let Some(endpoint) = alive.filter(|_| self.shape.rank_layout) {
                self.regions.suspect(told.rank, &endpoint);
            }
            self.meeting.warn(&fault);
            state.faults.push(fault);
        }
        self.process_connection_ends(state);
    }

    /// An operation with ranks that have left is begun: they are lost to it.
    pub(crate) fn record_departures(&self, state: &mut State) {
        for at in 0..state.peers.len() {
            let departure = state.peers[at]
                .as_mut()
                .and_then(|peer| peer.departure.as_mut())
                .filter(|departure| !departure.reported);
            if let Some(departure) = departure {
                departure.reported = true;
                let why = departure.why.clone();
                self.record_departure(state, at as u32, &why);
            }
        }
    }

    /// Masks a rank whose connection has ended.
    fn connection_ended(&self, lost: ConnectionEnd) {
        // At once, as whoever has the state may wait for kernels that wait for that rank. It is noted before: whoever sees
        // that an operation went on without the rank is told of it then.
        let mut connections = self.connections.lock();
        let rank = lost.rank;
        let is_current = connections.generations[rank as usize] == lost.generation;
        connections.ended.push(lost);
        if is_current {
            self.mask_in_kernels(rank);
        }
        drop(connections);
        let mut state = self.state.lock();
        self.process_losses(&mut state);
    }

    /// Acts on connections that have ended. A rank that died is a fault now; one that has left is one only if an operation
    /// with it is begun.
    pub(crate) fn process_connection_ends(&self, state: &mut State) {
        let ended = std::mem::take(&mut self.connections.lock().ended);
        for lost in ended {
            let peer = state.peers.get_mut(lost.rank as usize).and_then(Option::as_mut);
            let peer = peer.filter(|peer| peer.generation == lost.generation && peer.departure.is_none());
            let Some(peer) = peer else { continue };
            let dead = lost.error.kind == ErrorKind::PeerDead;
            let why = match dead {
                true => peer.end().unwrap_or_else(|| lost.error.detail.clone()),
                false => "it has left".to_owned(),
            };
            peer.departure = Some(Departure { why: why.clone(), reported: dead || peer.masked });
            let was_masked = std::mem::replace(&mut peer.masked, true);
            // It may have been unmasked meanwhile.
            self.mask_in_kernels(lost.rank);
            if dead && !was_masked {
                self.record_departure(state, lost.rank, &why);
            }
        }
    }

    /// Has kernels leave a rank out, those under way too.
    pub(crate) fn mask_in_kernels(&self, rank: u32) {
        if let Err(error) = self.heap.set_mask(rank, true) {
            self.meeting.warn(&error);
        }
    }

    /// Records that a rank is gone.
    pub(crate) fn record_departure(&self, state: &mut State, rank: u32, why: &str) {
        let left = state.active();
        let fault = Fault { rank, operation: "connection", number: 0, stage: "it", why: why.to_owned(), left };
        self.meeting.warn(&fault);
        state.faults.push(fault);
    }
}
