//! Detection of lost ranks: faults that kernels report, connections that end, and what other ranks tell. A thread waits
//! for the latter two, so that a rank is masked even while every other thread waits for kernels that wait for it.

use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Weak};

use crossrail::{Endpoint, ErrorKind, Receipt, Request};
use crossrail_ep::{Fault, OnLoss};
use crossrail_types::{Error, Result};

use crate::fault_ring::{self, is_masked_by_kernels, reason, stage};
use crate::inner::{Inner, State};
use crate::news::{ConnectionEnd, News};
use crate::peer::Departure;

/// Tag of a message that is never sent: its receive fails when the connection ends.
const LIFE: u64 = 0x4550_0000_0001_0003;

/// Reports the end of the connection to the watching thread.
pub(crate) fn on_end(inner: &Inner, rank: u32, generation: u64, endpoint: &Endpoint) -> Result<Request> {
    let tell: Sender<News> = inner.tell.clone();
    let life = inner.meeting.worker.recv(Vec::new(), LIFE, u64::MAX, Some(endpoint))?;
    life.on_complete(move |end| {
        if let Err(error) = end {
            // Fails only when the buffer is gone.
            let _ = tell.send(News::Ended(ConnectionEnd { rank, generation, error }));
        }
    });
    Ok(life)
}

/// Starts the watching thread, which ends with the buffer.
pub(crate) fn start(inner: &Arc<Inner>, news: Receiver<News>) -> Result<()> {
    let buffer: Weak<Inner> = Arc::downgrade(inner);
    let body = move || {
        while let Ok(news) = news.recv() {
            let Some(inner) = buffer.upgrade() else { return };
            match news {
                News::Ended(lost) => inner.connection_ended(lost),
                News::Notice { rank, generation, receipt } => inner.notice_arrived(rank, generation, &receipt),
            }
        }
    };
    let thread = std::thread::Builder::new().name("crossrail-ep-watch".into()).spawn(body);
    thread.map(drop).map_err(|error| Error::io("ExpertBuffer", "a thread", &error))
}

impl Inner {
    /// Processes new faults from the ring and ended connections: masks the ranks and records them.
    pub(crate) fn process_losses(&self, state: &mut State) {
        for told in state.ring.read() {
            if let Some(what) = fault_ring::own(&told) {
                // Logged once, because graphs may be replayed often.
                if !std::mem::replace(&mut state.overflow_reported, true) {
                    self.meeting.warn(&what);
                }
                continue;
            }
            let (kind, what) = stage(told.stage);
            let Some(peer) = state.peers.get_mut(told.rank as usize).and_then(Option::as_mut) else { continue };
            // Recorded once: a rank that is masked was recorded, or masked by the caller.
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
                masked: true,
            };
            self.suspect(told.rank, alive.as_ref());
            self.record(state, fault);
        }
        self.process_connection_ends(state);
        self.process_agreed_losses(state);
    }

    /// Follows the agreement: masks ranks that others, or a variant of the buffer, have lost.
    fn process_agreed_losses(&self, state: &mut State) {
        for loss in self.agreement.losses_since(&mut state.losses_seen) {
            let peer = state.peers[loss.rank as usize].as_mut().filter(|peer| peer.generation == loss.generation);
            let Some(peer) = peer.filter(|peer| !peer.masked) else { continue };
            peer.masked = true;
            let alive = peer.endpoint().cloned().filter(Endpoint::is_alive);
            self.suspect(loss.rank, alive.as_ref());
            self.record_departure(state, loss.rank, &loss.why);
        }
        if self.agreement.is_evicted() {
            state.peers.iter_mut().flatten().filter(|peer| peer.rank != self.me).for_each(|peer| peer.masked = true);
        }
    }

    /// A rank that is masked although it lives may still write into regions.
    fn suspect(&self, rank: u32, alive: Option<&Endpoint>) {
        if let Some(endpoint) = alive.filter(|_| self.shape.rank_layout) {
            self.regions.suspect(rank, endpoint);
        }
    }

    /// Records ranks that left regularly, now that an operation begins without them.
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
        // Mask without the state's lock: its holder may be waiting for kernels that wait for this rank. The end is
        // queued first, so that a caller who sees an operation complete without the rank also finds the fault.
        let mut connections = self.connections.lock();
        let rank = lost.rank;
        let is_current = connections.generations[rank as usize] == lost.generation;
        let dead = lost.error.kind == ErrorKind::PeerDead;
        connections.ended.push(lost.clone());
        if is_current {
            self.mask_in_kernels(rank);
        }
        drop(connections);
        if dead && is_current && self.base.is_none() {
            self.propose(rank, &self.agreement.end_of(rank).unwrap_or_else(|| lost.error.detail.clone()));
        }
        self.live_variants().iter().for_each(|variant| variant.connection_ended(lost.clone()));
        self.process_if_free();
    }

    /// Hears what another rank tells.
    fn notice_arrived(&self, rank: u32, generation: u64, receipt: &Receipt) {
        if let Err(error) = self.agreement.hear(rank, generation, receipt) {
            self.meeting.warn(&format!("a notice of rank {rank}: {error}"));
        }
        self.live_variants().iter().for_each(|variant| variant.process_if_free());
        self.process_if_free();
    }

    /// Processes losses, unless a call holds the state: the next call then does. It may wait for kernels that wait for
    /// a rank whose loss is yet to be heard of.
    fn process_if_free(&self) {
        if let Some(mut state) = self.state.try_lock() {
            self.process_losses(&mut state);
        }
    }

    /// Takes a lost rank out of the view, and tells the others.
    fn propose(&self, rank: u32, why: &str) {
        if let Err(error) = self.agreement.lose(rank, why) {
            self.meeting.warn(&error);
        }
    }

    /// Processes ended connections. A rank that died is a fault at once; one that left regularly becomes one only when
    /// an operation begins without it.
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
            peer.departure = Some(Departure { why: why.clone(), is_dead: dead, reported: dead || peer.masked });
            let was_masked = std::mem::replace(&mut peer.masked, true);
            // The mask that `connection_ended` set may have been cleared since.
            self.mask_in_kernels(lost.rank);
            if dead && !was_masked {
                self.record_departure(state, lost.rank, &why);
            }
        }
    }

    /// Masks a rank for kernels, including those in flight.
    pub(crate) fn mask_in_kernels(&self, rank: u32) {
        if let Err(error) = self.heap.set_mask(rank, true) {
            self.meeting.warn(&error);
        }
    }

    /// Records the loss of a rank whose connection ended.
    pub(crate) fn record_departure(&self, state: &mut State, rank: u32, why: &str) {
        let left = state.active();
        let fault =
            Fault { rank, operation: "connection", number: 0, stage: "it", why: why.to_owned(), left, masked: true };
        self.record(state, fault);
    }

    /// Logs a loss, and keeps it for [`Inner::refuse_losses`].
    pub(crate) fn record(&self, state: &mut State, fault: Fault) {
        self.meeting.warn(&fault);
        if let Some(peer) = state.peers.get_mut(fault.rank as usize).and_then(Option::as_mut) {
            peer.lost = Some(fault.clone());
        }
        self.propose(fault.rank, &fault.why);
        state.faults.push(fault);
        self.show_members(state);
    }

    /// Fails if the others go on without this rank; or if a rank was lost that the caller has not masked or disconnected
    /// since, unless the buffer masks lost ranks.
    pub(crate) fn refuse_losses(&self, state: &State, operation: &str) -> Result<()> {
        self.agreement.refuse_evicted(operation)?;
        let lost = state.peers.iter().flatten().find_map(|peer| peer.lost.as_ref());
        match lost.filter(|_| self.config.on_loss == OnLoss::Raise) {
            None => Ok(()),
            Some(fault) => Err(Error::new(ErrorKind::PeerDead, operation, fault.to_string())
                .with_peer(format!("rank {}", fault.rank))
                .with_hint("mask or disconnect it on all other ranks to continue without it, or use on_loss=\"mask\"")),
        }
    }
}
