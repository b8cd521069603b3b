//! The control connections of TCP sessions, the kernel's link events, and what it takes to dial a lane.

use std::collections::{HashMap, HashSet};
use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crossrail_handshake::{self as handshake, Hello, LaneName, LanePurpose};
use crossrail_tcp::{Binding, LinkWatch};
use crossrail_types::{EndpointId, ErrorKind, Result};
use parking_lot::Mutex;

use super::Sessions;
use super::rail_pairs::RailPair;
use crate::core::{LostRail, READABLE};
use crate::progress::About;

/// The longest one lane's dialling may take.
pub(crate) const DIAL_MAX: Duration = Duration::from_secs(3);
/// The channel number of a rail's message connection.
pub(crate) const MESSAGE_CHANNEL: u16 = u16::MAX;
/// What the connecting end says on the control connection once all its lanes are up, followed by their number.
pub(crate) const READY: u8 = b'R';

/// The sessions of one worker.
#[derive(Default)]
pub(crate) struct Links {
    pub(crate) sessions: Mutex<HashMap<[u8; 16], Link>>,
    pub(crate) watch: Mutex<Option<LinkWatch>>,
    /// Kinds of rejection that were logged.
    pub(crate) said: Mutex<HashSet<ErrorKind>>,
}

/// One TCP session.
pub(crate) struct Link {
    pub(crate) endpoint: EndpointId,
    pub(crate) ticket: handshake::Ticket,
    pub(crate) initiator: bool,
    pub(crate) control: TcpStream,
    pub(crate) peer: Hello,
    pub(crate) rails: Vec<RailPair>,
    /// Lanes that are up, and how many the connecting end announced.
    pub(crate) lanes: usize,
    pub(crate) expected: Option<usize>,
    pub(crate) accepted: bool,
    pub(crate) heard: Vec<u8>,
}

/// Everything needed to dial one lane again.
pub(crate) struct Redial {
    pub(crate) ticket: handshake::Ticket,
    pub(crate) rail: RailPair,
    pub(crate) name: LaneName,
}

impl Links {
    pub(crate) fn clear(&self) {
        self.sessions.lock().clear();
        self.watch.lock().take();
    }
}

impl Sessions {
    // ---- control connections

    /// Something came in on a control connection: the announcement, or its end.
    pub(crate) fn control_readable(&self, endpoint: EndpointId) {
        let mut sessions = self.control.sessions.lock();
        let Some(link) = sessions.values_mut().find(|link| link.endpoint == endpoint) else { return };
        let mut buffer = [0; 64];
        let end = loop {
            match link.control.read(&mut buffer) {
                Ok(0) => {
                    break Some(
                        "it closed the control connection (its process has ended, or gave this one up)".to_owned(),
                    );
                }
                Ok(bytes) => {
                    link.heard.extend_from_slice(&buffer[..bytes]);
                    if link.initiator || link.heard.len() > 4 || link.heard[0] != READY {
                        break Some("it broke the protocol on the control connection".to_owned());
                    }
                    if let [_, low, high, _] = link.heard[..] {
                        link.expected = Some(usize::from(u16::from_le_bytes([low, high])));
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break None,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                // The control device may be gone; the peer is not, as long as a lane says so.
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {
                    break Some(format!("control connection: {error}"));
                }
                Err(error) => {
                    self.log.warn(format_args!("{}: control connection: {error}; its lanes go on", link.peer.name));
                    break None;
                }
            }
        };
        if let Some(why) = end {
            let (ended, formed) = (link.ticket.session, link.initiator || link.expected.is_some());
            sessions.remove(&ended);
            drop(sessions);
            if formed {
                self.peer_ended(endpoint, &why);
            } else {
                // The peer thought better of it before it was an endpoint.
                self.forget(endpoint);
            }
            return;
        }
        drop(sessions);
        self.check_ready(endpoint);
    }

    /// Drops a session that another one takes the place of.
    pub(crate) fn replaced(&self, session: &[u8; 16]) {
        let old = self.control.sessions.lock().remove(session);
        if let Some(link) = old {
            self.forget(link.endpoint);
        }
    }

    /// Drops an endpoint that nobody has seen yet.
    fn forget(&self, endpoint: EndpointId) {
        let mut core = self.progress.core();
        if let Some(peer) = core.peers().get_mut(endpoint) {
            peer.end("never came up");
        }
        core.transfers().kill(endpoint, "never came up");
        self.progress.after(core);
    }

    /// The peer's process is gone: what it had sent is delivered first.
    fn peer_ended(&self, endpoint: EndpointId, why: &str) {
        let mut core = self.progress.core();
        let lanes = core.peers().get(endpoint).map(|peer| peer.bulk().to_vec()).unwrap_or_default();
        core.pass(true, true);
        self.progress.after(core);
        for lane in &lanes {
            lane.set_ready(READABLE);
        }
        self.progress.pump_connections();
        let mut core = self.progress.core();
        core.pass(true, true);
        core.transfers().kill(endpoint, why);
        self.progress.after(core);
    }

    /// Hands the endpoint to `accept` once all its lanes are up.
    pub(crate) fn check_ready(&self, endpoint: EndpointId) {
        let mut sessions = self.control.sessions.lock();
        let Some(link) = sessions.values_mut().find(|link| link.endpoint == endpoint) else { return };
        if link.initiator || link.accepted || link.expected.is_none_or(|expected| link.lanes < expected) {
            return;
        }
        link.accepted = true;
        let peer = link.peer.clone();
        drop(sessions);
        self.accepted_over(endpoint, &peer);
        self.arrived(endpoint);
    }

    /// Forgets a session whose endpoint was closed from here.
    pub(crate) fn end_session(&self, endpoint: EndpointId) {
        self.control.sessions.lock().retain(|_, link| link.endpoint != endpoint);
    }

    /// What it takes to dial a lost lane again; `None` if that is the peer's business, or there is nothing to save.
    pub(crate) fn redial(&self, lost: &LostRail) -> Option<Redial> {
        if !self.progress.core().peers().get(lost.endpoint).is_some_and(|peer| peer.is_alive()) {
            return None;
        }
        let sessions = self.control.sessions.lock();
        let link = sessions.values().find(|link| link.endpoint == lost.endpoint && link.initiator)?;
        let rail = link.rails.get(usize::from(lost.rail))?.clone();
        let purpose = if lost.channel == MESSAGE_CHANNEL { LanePurpose::Message } else { LanePurpose::Bulk };
        let name = LaneName { rail: lost.rail, channel: lost.channel, purpose };
        Some(Redial { ticket: link.ticket, rail, name })
    }

    // ---- link events

    /// Listens to the kernel's link events from the first network lane on.
    pub(crate) fn watch_links(&self) {
        let mut watch = self.control.watch.lock();
        if watch.is_some() {
            return;
        }
        match LinkWatch::new() {
            Ok(found) => {
                if let Err(error) = self.progress.watch(found.fd(), About::Links) {
                    self.log.debug(format_args!("no link events: {error}"));
                    return;
                }
                *watch = Some(found);
            }
            Err(error) => self.log.debug(format_args!("no link events: {error}")),
        }
    }

    pub(crate) fn links_changed(&self) {
        let changes = self.control.watch.lock().as_mut().map(LinkWatch::changes).unwrap_or_default();
        for change in changes {
            if change.up {
                self.redialer.nudge();
                continue;
            }
            self.progress.interface_down(&change.name);
        }
    }
}

/// Dials one lane from its own device.
pub(crate) fn dial(
    ticket: &handshake::Ticket,
    rail: &RailPair,
    name: LaneName,
    deadline: Instant,
) -> Result<TcpStream> {
    let from = binding(&rail.mine, rail.from);
    let to = SocketAddr::new(rail.theirs.address, rail.theirs.port);
    handshake::dial_lane(ticket, &from, to, name, deadline)
}

/// What lanes of that device are bound to.
pub(crate) fn binding(device: &crossrail_topology::NetDevice, address: std::net::IpAddr) -> Binding {
    // A loopback address is a device of its own; binding to `lo` would add nothing.
    Binding { device: (!device.loopback).then(|| device.interface.clone()), address }
}
