//! Control connections: one per endpoint that needs it, over which ends announce lanes and learn of each other's death.

mod connection;

use std::collections::{HashMap, HashSet};
use std::io::Write;
use std::net::{IpAddr, TcpStream};
use std::os::fd::AsRawFd;

use crossrail_handshake::{Device, Hello, Session, Stream, Ticket, encode_devices};
use crossrail_locks::Mutex;
use crossrail_tcp::LinkWatch;
use crossrail_topology::NetDevice;
use crossrail_types::{Checksum, EndpointId, Error, ErrorKind, Log, Reason, Result};

use self::connection::{ControlConnection, ControlEvent, announcement_bytes};
use super::Sessions;
use super::costs::EAGER_LIMIT;
use super::rail_pairs::{PeerRails, RailPair, again};
use super::{over_rails, placing};
use crate::core::{LostRail, Move, READABLE};
use crate::progress::{About, SessionEvents};

/// The control connections of one worker. Any thread; each method takes the lock for itself.
#[derive(Default)]
pub(super) struct ControlConnections {
    /// By session id.
    connections: Mutex<HashMap<[u8; 16], ControlConnection>>,
    watch: Mutex<Option<LinkWatch>>,
    /// Kinds of rejection that were logged.
    logged: Mutex<HashSet<ErrorKind>>,
}

/// Everything needed to redial a lost TCP lane.
pub(super) struct Redial {
    pub(super) ticket: Ticket,
    pub(super) rail: RailPair,
}

impl ControlConnections {
    /// An endpoint's rails, for further connections over them; `None`: it has no control connection.
    pub(super) fn rails(&self, endpoint: EndpointId) -> Option<PeerRails> {
        self.with(endpoint, |connection| {
            Some(PeerRails {
                peer: connection.peer.name.clone(),
                ticket: connection.ticket,
                initiator: connection.initiator,
                pairs: connection.rails.iter().map(|(rail, pair)| (*rail, pair.clone())).collect(),
            })
        })
    }

    /// The key of a session's lanes; `None`: there is no such session.
    pub(super) fn key(&self, session: &[u8; 16]) -> Option<[u8; 32]> {
        self.connections.lock().get(session).map(|connection| connection.ticket.key)
    }

    /// The endpoint of a session.
    pub(super) fn endpoint(&self, session: &[u8; 16]) -> Option<EndpointId> {
        self.connections.lock().get(session).map(|connection| connection.endpoint)
    }

    /// Records the rails of an endpoint, for dialling lost lanes again, and the largest message that goes with its
    /// first frame over them.
    pub(super) fn set_rails(&self, endpoint: EndpointId, rails: Vec<RailPair>, eager_max: usize) {
        self.with(endpoint, |connection| {
            connection.rails = (0..).zip(rails).collect();
            connection.eager_max = eager_max;
            Some(())
        });
    }

    /// Records a rail that the peer has dialled from its address `from`, for dialling it from here: nothing where the
    /// peer does not listen at that address.
    pub(super) fn add_rail(&self, endpoint: EndpointId, rail: u16, mine: &NetDevice, local: IpAddr, from: IpAddr) {
        self.with(endpoint, |connection| {
            let theirs = connection.peer.devices.iter().find(|device| device.address == from)?.clone();
            connection.rails.insert(rail, RailPair { mine: mine.clone(), from: local, theirs });
            Some(())
        });
    }

    /// Announces this end's rails, which have changed, to all peers; their endpoints.
    pub(super) fn announce_devices(&self, devices: &[Device]) -> Vec<EndpointId> {
        let Some(bytes) = encode_devices(devices) else { return Vec::new() };
        let mut connections = self.connections.lock();
        let formed = connections.values_mut().filter(|connection| connection.formed() && !connection.lost);
        formed
            .map(|connection| {
                connection.send_devices(&bytes);
                connection.endpoint
            })
            .collect()
    }

    /// True if the peer has announced other rails since the last call.
    fn take_changed(&self, endpoint: EndpointId) -> bool {
        self.with(endpoint, |connection| Some(std::mem::take(&mut connection.changed))).unwrap_or(false)
    }

    /// Has lost lanes dialled between the addresses that the devices of both ends have now. `mine`: our rails.
    pub(super) fn pair_again(&self, endpoint: EndpointId, mine: &[NetDevice]) {
        self.with(endpoint, |connection| {
            for pair in connection.rails.values_mut() {
                if let Some(found) = again(pair, mine, &connection.peer.devices) {
                    *pair = found;
                }
            }
            Some(())
        });
    }

    /// Largest message that goes to this peer with its first frame over TCP.
    pub(super) fn eager_max(&self, endpoint: EndpointId) -> usize {
        self.with(endpoint, |connection| Some(connection.eager_max)).unwrap_or(EAGER_LIMIT)
    }

    /// Messages take turns between endpoints to this peer.
    pub(super) fn set_turns(&self, endpoint: EndpointId) {
        self.with(endpoint, |connection| {
            connection.turns = true;
            Some(())
        });
    }

    /// Whether this end connected.
    pub(super) fn is_initiator(&self, endpoint: EndpointId) -> bool {
        self.with(endpoint, |connection| Some(connection.initiator)).unwrap_or(false)
    }

    /// Whether the control connection has failed, so that it does not show the end of the peer's process.
    pub(super) fn is_lost(&self, endpoint: EndpointId) -> bool {
        self.with(endpoint, |connection| Some(connection.lost)).unwrap_or(false)
    }

    /// How many TCP lanes the connecting end has announced.
    pub(super) fn expect_lanes(&self, endpoint: EndpointId, count: usize) {
        self.with(endpoint, |connection| {
            connection.expected = Some(count);
            Some(())
        });
    }

    /// One more TCP lane is up.
    pub(super) fn count_lane(&self, endpoint: EndpointId) {
        self.with(endpoint, |connection| {
            connection.lanes += 1;
            Some(())
        });
    }

    /// The peer, once all TCP lanes that it announced are up; `None` before that, and after the first call that
    /// returned it.
    pub(super) fn take_complete(&self, endpoint: EndpointId) -> Option<Hello> {
        self.with(endpoint, |connection| {
            let waits = connection.expected.is_none_or(|expected| connection.lanes < expected);
            if connection.initiator || connection.accepted || waits {
                return None;
            }
            connection.accepted = true;
            Some(connection.peer.clone())
        })
    }

    /// Number of accepted connections without a complete endpoint.
    pub(super) fn unformed(&self) -> usize {
        let unformed = |connection: &&ControlConnection| !connection.initiator && !connection.accepted;
        self.connections.lock().values().filter(unformed).count()
    }

    /// What it takes to dial a lost lane again; `None`: the peer cannot be reached over that rail from here.
    pub(super) fn redial(&self, lost: &LostRail) -> Option<Redial> {
        self.with(lost.endpoint, |connection| {
            let rail = if placing::is_of(lost) { lost.rail & 0xff } else { lost.rail };
            let rail = connection.rails.get(&rail)?.clone();
            Some(Redial { ticket: connection.ticket, rail })
        })
    }

    /// How many connections both ends would serve on each rail, and the numbers of the rails that can be dialled from
    /// here.
    pub(super) fn room(&self, endpoint: EndpointId, me: &Hello) -> Option<(u32, Vec<u16>)> {
        self.with(endpoint, |connection| {
            Some((me.channels_with(&connection.peer), connection.rails.keys().copied().collect()))
        })
    }

    /// Whether a rejection of this kind is the first.
    pub(super) fn is_first(&self, kind: ErrorKind) -> bool {
        self.logged.lock().insert(kind)
    }

    /// The checksum of an endpoint's lanes over TCP.
    pub(super) fn checksum(&self, endpoint: EndpointId) -> Checksum {
        self.with(endpoint, |connection| Some(connection.ticket.checksum)).unwrap_or_default()
    }

    /// Closes a session; its endpoint.
    pub(super) fn remove(&self, session: &[u8; 16]) -> Option<EndpointId> {
        self.connections.lock().remove(session).map(|connection| connection.endpoint)
    }

    /// Closes the control connection of an endpoint.
    pub(super) fn end(&self, endpoint: EndpointId) {
        self.connections.lock().retain(|_, connection| connection.endpoint != endpoint);
    }

    pub(super) fn clear(&self) {
        self.connections.lock().clear();
        self.watch.lock().take();
    }

    fn with<T>(&self, endpoint: EndpointId, body: impl FnOnce(&mut ControlConnection) -> Option<T>) -> Option<T> {
        self.connections.lock().values_mut().find(|connection| connection.endpoint == endpoint).and_then(body)
    }

    /// Reads what has arrived. `known`: whether a transport announces itself by that byte.
    fn read(&self, endpoint: EndpointId, log: Log, known: impl Fn(u8) -> bool) -> ControlEvent {
        let event = self.with(endpoint, |connection| Some(connection.read(log, known)));
        let event = event.unwrap_or(ControlEvent::Nothing);
        if let ControlEvent::Ended { .. } = event {
            self.end(endpoint);
        }
        event
    }
}

impl Sessions {
    /// Announces a transport to the peer of a TCP session and keeps its control connection for `endpoint`.
    ///
    /// # Errors
    /// `Unsupported` for a Unix session; `Io` when the connection has failed.
    pub(super) fn announce(
        &self,
        endpoint: EndpointId,
        session: Session,
        announcement: u8,
        argument: [u8; 2],
    ) -> Result<()> {
        let failed = |error: &std::io::Error| Error::io("connect", "send", error).with_peer(&session.peer.name);
        if let Stream::Tcp(control) = &session.stream {
            let mut control: &TcpStream = control;
            let bytes = announcement_bytes(&session.ticket, [announcement, argument[0], argument[1], 0]);
            control.write_all(&bytes).map_err(|error| failed(&error))?;
        }
        self.keep_control(endpoint, session, true)
    }

    /// Keeps the control connection of a TCP session for `endpoint`.
    ///
    /// # Errors
    /// `Unsupported` for a Unix session; `Io` when the system refuses.
    pub(super) fn keep_control(&self, endpoint: EndpointId, session: Session, initiator: bool) -> Result<()> {
        let Session { stream, peer, ticket, .. } = session;
        let Stream::Tcp(stream) = stream else {
            let error = Error::new(ErrorKind::Unsupported, "connect", "a Unix session has no control connection");
            return Err(error.with_peer(peer.name));
        };
        let failed = |error: &std::io::Error| Error::io("connect", "fcntl", error).with_peer(&peer.name);
        stream.set_nonblocking(true).map_err(|error| failed(&error))?;
        let fd = stream.as_raw_fd();
        let connection = ControlConnection::new(endpoint, ticket, initiator, stream, peer);
        self.control.connections.lock().insert(ticket.session, connection);
        self.progress.connections().watch(fd, About::Session(endpoint), true)?;
        self.progress.connections().wake_driver();
        self.watch_links();
        Ok(())
    }

    /// Closes a session that another one replaces.
    pub(super) fn replaced(&self, session: &[u8; 16]) {
        if let Some(endpoint) = self.control.remove(session) {
            self.forget(endpoint);
        }
    }

    /// Drops an endpoint that no caller has seen yet.
    fn forget(&self, endpoint: EndpointId) {
        let mut core = self.progress.core();
        if let Some(peer) = core.peers().get_mut(endpoint) {
            peer.end("never came up", Some(Reason::ConnectionClosed));
        }
        core.transfers().kill(endpoint, "never came up", Some(Reason::ConnectionClosed));
        self.progress.after(core);
    }

    /// Handles the exit of the peer's process: first delivers what it had sent.
    pub(super) fn peer_ended(&self, endpoint: EndpointId, why: &str) {
        let mut core = self.progress.core();
        let lanes = core.peers().get(endpoint).map(|peer| peer.bulk().to_vec()).unwrap_or_default();
        core.pass(true, true);
        self.progress.after(core);
        for lane in &lanes {
            lane.set_ready(READABLE);
        }
        self.progress.connections().pump(&self.progress);
        let mut core = self.progress.core();
        core.pass(true, true);
        core.transfers().kill(endpoint, why, Some(Reason::ProcessEnded));
        self.progress.after(core);
    }

    /// Closes the control connection of an endpoint that was closed here.
    pub(crate) fn end_session(&self, endpoint: EndpointId) {
        let why = self.progress.core().peers().get(endpoint).map(|peer| peer.why_ended().to_owned());
        self.placings.end(|ended| ended == endpoint, &why.unwrap_or_else(|| "the endpoint was closed".to_owned()));
        self.control.end(endpoint);
    }

    // ---- link events

    /// Listens to the kernel's link events from the first network lane on.
    fn watch_links(&self) {
        let mut watch = self.control.watch.lock();
        if watch.is_some() {
            return;
        }
        match LinkWatch::new() {
            Ok(found) => {
                if let Err(error) = self.progress.connections().watch(found.fd(), About::Links, true) {
                    self.log.debug(format_args!("no link events: {error}"));
                    return;
                }
                *watch = Some(found);
            }
            Err(error) => self.log.debug(format_args!("no link events: {error}")),
        }
    }
}

impl SessionEvents for Sessions {
    fn rail_lost(&self, lost: LostRail) {
        self.redialer.lost(self, lost);
    }

    fn outgrown(&self, endpoint: EndpointId) {
        over_rails::widen(self, endpoint);
    }

    /// Endpoints among which messages take turns load the rails evenly without it.
    fn faster_rail(&self, Move { endpoint, rail, channel }: Move) {
        if !self.control.with(endpoint, |connection| Some(connection.turns)).unwrap_or(false) {
            self.redialer.more(self, LostRail { endpoint, rail, channel, reported: true, short_lived: 0 });
        }
    }

    fn endpoint_ended(&self, endpoint: EndpointId) {
        self.end_session(endpoint);
        super::crowd::check(self);
    }

    /// A control connection has become readable: the announcement, or its end.
    fn control_readable(&self, endpoint: EndpointId) {
        let known = |byte| self.transports.by_announcement(byte).is_some();
        match self.control.read(endpoint, self.log, known) {
            ControlEvent::Nothing if self.control.is_lost(endpoint) => self.redialer.control_lost(self, endpoint),
            ControlEvent::Nothing => {}
            ControlEvent::Announced(byte, announcement) => {
                let (Some(transport), Some(me)) = (self.transports.by_announcement(byte), self.me.upgrade()) else {
                    return;
                };
                if let Err(error) = transport.announced(&me, *announcement) {
                    self.control.end(endpoint);
                    self.peer_ended(endpoint, &error.to_string());
                }
            }
            ControlEvent::Ended { why, formed: true } => self.peer_ended(endpoint, &why),
            // The peer gave up before there was an endpoint.
            ControlEvent::Ended { .. } => self.forget(endpoint),
        }
        if self.control.take_changed(endpoint) {
            self.log.debug(format_args!("a peer's rails have changed; lost ones are dialled at its new addresses"));
            self.pair_again(endpoint);
            self.redialer.nudge();
        }
    }

    fn links_changed(&self) {
        let (changes, addresses) = {
            let mut watch = self.control.watch.lock();
            let changes = watch.as_mut().map(LinkWatch::changes).unwrap_or_default();
            (changes, watch.as_mut().is_some_and(LinkWatch::take_addresses_changed))
        };
        if addresses {
            self.addresses_changed();
        }
        for change in changes {
            if change.up {
                self.redialer.nudge();
                continue;
            }
            self.progress.interface_down(&change.name);
            self.placings.interface_down(&change.name);
        }
    }
}
