//! Detection of lost ranks by faults that kernels report, closed connections, and notices of other ranks. A thread
//! waits for the latter two, so that a rank is masked even while every other thread waits for kernels that wait for it.

use std::collections::HashSet;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossrail::{Endpoint, ErrorKind, Receipt};
use crossrail_ep::{Fault, OnLoss};
use crossrail_types::{Error, Result};

use crate::connection_event::{ConnectionEnd, ConnectionEvent};
use crate::fault_ring::{self, is_masked_by_kernels, reason, stage};
use crate::inner::Inner;
use crate::membership::State;
use crate::peer::{Departure, Peer};

/// Maximum time by which the rails of a connection end earlier than the connection itself.
const WITH_CONNECTION: Duration = Duration::from_millis(200);

/// Starts the watching thread, which ends with the buffer.
pub(crate) fn start(inner: &Arc<Inner>, events: Receiver<ConnectionEvent>) -> Result<()> {
    let buffer: Weak<Inner> = Arc::downgrade(inner);
    let body = move || {
        // Rails that have ended, perhaps because the connection ends.
        let mut ended: Vec<(Instant, ConnectionEnd)> = Vec::new();
        // Connections that have ended by themselves.
        let mut over: HashSet<(u32, u64)> = HashSet::new();
        loop {
            let first = ended.first().map(|(at, _)| at.saturating_duration_since(Instant::now()));
            let event = match first {
                Some(left) => events.recv_timeout(left),
                None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            let Some(inner) = buffer.upgrade() else { return };
            let event = match event {
                Ok(event) => event,
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    let (_, end) = ended.remove(0);
                    inner.rails_ended(&end);
                    continue;
                }
            };
            match event {
                ConnectionEvent::Rails { rank, generation, .. } if over.contains(&(rank, generation)) => {}
                ConnectionEvent::Rails { rank, generation, why } => {
                    if inner.membership.generation(rank) == generation {
                        inner.mask_in_kernels(rank);
                    }
                    let error = Error::new(ErrorKind::PeerDead, "rails", why);
                    ended.push((Instant::now() + WITH_CONNECTION, ConnectionEnd { rank, generation, error }));
                }
                ConnectionEvent::Ended(lost) => {
                    let (rank, generation) = (lost.rank, lost.generation);
                    over.insert((rank, generation));
                    ended.retain(|(_, end)| (end.rank, end.generation) != (rank, generation));
                    inner.connection_ended(lost);
                }
                ConnectionEvent::Notice { rank, generation, receipt } => {
                    inner.notice_arrived(rank, generation, &receipt)
                }
            }
        }
    };
    let thread = std::thread::Builder::new().name("crossrail-ep-watch".into()).spawn(body);
    thread.map(drop).map_err(|error| Error::io("ExpertBuffer", "a thread", &error))
}

impl Inner {
    /// Processes new faults from the ring and ended connections: masks the ranks and records them.
    pub(crate) fn process_losses(&self, state: &mut State) {
        for told in state.reported_faults() {
            if let Some(what) = fault_ring::own(&told) {
                if state.is_first_overflow() {
                    self.membership.meeting().warn(&what);
                }
                continue;
            }
            let (kind, what) = stage(told.stage);
            let Some(peer) = state.peer_mut(told.rank) else { continue };
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

    /// Masks ranks that, by the agreement, others or a variant of the buffer have lost.
    fn process_agreed_losses(&self, state: &mut State) {
        let agreement = self.membership.agreement();
        for loss in state.agreed_losses(agreement) {
            let peer = state.peer_mut(loss.rank).filter(|peer| peer.generation == loss.generation);
            let Some(peer) = peer.filter(|peer| !peer.masked) else { continue };
            peer.masked = true;
            let alive = peer.endpoint().cloned().filter(Endpoint::is_alive);
            self.suspect(loss.rank, alive.as_ref());
            self.record_departure(state, loss.rank, &loss.why);
        }
        if agreement.is_evicted() {
            state.peers_mut().filter(|peer| peer.rank != self.me).for_each(|peer| peer.masked = true);
        }
    }

    /// A rank that is masked although it lives may still write into regions.
    fn suspect(&self, rank: u32, alive: Option<&Endpoint>) {
        if let Some(endpoint) = alive.filter(|_| self.shape.rank_layout) {
            self.results.regions().suspect(rank, endpoint);
        }
    }

    /// Records ranks that left regularly, now that an operation begins without them.
    pub(crate) fn record_departures(&self, state: &mut State) {
        let unreported = |peer: &mut Peer| {
            let departure = peer.departure.as_mut().filter(|departure| !departure.reported)?;
            departure.reported = true;
            Some((peer.rank, departure.why.clone()))
        };
        let departed: Vec<(u32, String)> = state.peers_mut().filter_map(unreported).collect();
        departed.iter().for_each(|(rank, why)| self.record_departure(state, *rank, why));
    }

    /// Masks a rank whose connection has ended.
    fn connection_ended(&self, lost: ConnectionEnd) {
        let rank = lost.rank;
        let dead = lost.error.kind == ErrorKind::PeerDead;
        let is_current = self.membership.queue_end(&lost, || self.mask_in_kernels(rank));
        if dead && is_current && self.base.is_none() {
            let why = self.membership.agreement().end_of(rank);
            self.propose(rank, &why.unwrap_or_else(|| lost.error.detail.clone()));
        }
        self.variants().iter().for_each(|variant| variant.connection_ended(lost.clone()));
        self.process_if_free();
    }

    /// Rails have ended a while ago: the connection is as good as ended, if it has not by itself.
    fn rails_ended(&self, end: &ConnectionEnd) {
        if self.membership.generation(end.rank) == end.generation {
            self.connection_ended(end.clone());
        }
    }

    /// Handles a notice of another rank.
    fn notice_arrived(&self, rank: u32, generation: u64, receipt: &Receipt) {
        if let Err(error) = self.membership.agreement().handle_notice(rank, generation, receipt) {
            self.membership.meeting().warn(&format!("a notice of rank {rank}: {error}"));
        }
        self.variants().iter().for_each(|variant| variant.process_if_free());
        self.process_if_free();
    }

    /// Processes losses unless a call holds the state; the next call then does. Waiting for that call could deadlock:
    /// its kernels may wait for a rank whose loss is still unprocessed.
    fn process_if_free(&self) {
        if let Some(mut state) = self.membership.try_lock() {
            self.process_losses(&mut state);
        }
    }

    /// Removes a lost rank from the view and notifies the others.
    fn propose(&self, rank: u32, why: &str) {
        if let Err(error) = self.membership.agreement().lose(rank, why) {
            self.membership.meeting().warn(&error);
        }
    }

    /// Processes ended connections. A rank that died is a fault at once; one that left regularly becomes one only when
    /// an operation begins without it.
    pub(crate) fn process_connection_ends(&self, state: &mut State) {
        for lost in self.membership.take_ends() {
            let peer = state.peer_mut(lost.rank);
            let peer = peer.filter(|peer| peer.generation == lost.generation && peer.departure.is_none());
            let Some(peer) = peer else { continue };
            let dead = lost.error.kind == ErrorKind::PeerDead;
            let why = match dead {
                true => peer.end().unwrap_or_else(|| lost.error.detail.clone()),
                false => "it has left".to_owned(),
            };
            peer.departure = Some(Departure { why: why.clone(), is_dead: dead, reported: dead || peer.masked });
            let was_masked = std::mem::replace(&mut peer.masked, true);
            // The mask that `queue_end` set may have been cleared since.
            self.mask_in_kernels(lost.rank);
            if dead && !was_masked {
                self.record_departure(state, lost.rank, &why);
            }
        }
    }

    /// Masks a rank for kernels, including those in flight.
    pub(crate) fn mask_in_kernels(&self, rank: u32) {
        if let Err(error) = self.heap.set_mask(rank, true) {
            self.membership.meeting().warn(&error);
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
        self.membership.meeting().warn(&fault);
        self.propose(fault.rank, &fault.why);
        state.record(fault);
        self.show_members(state);
    }

    /// Fails if the others go on without this rank; or if a rank was lost that the caller has not masked or disconnected
    /// since, unless the buffer masks lost ranks.
    pub(crate) fn refuse_losses(&self, state: &State, operation: &str) -> Result<()> {
        self.membership.agreement().refuse_evicted(operation)?;
        let lost = state.peers().find_map(|peer| peer.lost.as_ref());
        match lost.filter(|_| self.config.on_loss == OnLoss::Raise) {
            None => Ok(()),
            Some(fault) => Err(Error::new(ErrorKind::PeerDead, operation, fault.to_string())
                .with_peer(format!("rank {}", fault.rank))
                .with_hint("mask or disconnect it on all other ranks to continue without it, or use on_loss=\"mask\"")),
        }
    }
}
