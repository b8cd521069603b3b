//! Control connections: one per endpoint that needs it, over which ends announce lanes and learn of each other's death.

use std::collections::{HashMap, HashSet};
use std::io::{Read, Write};
use std::net::{IpAddr, TcpStream};
use std::os::fd::AsRawFd;

use crossrail_handshake::{Device, HELLO_MAX, Hello, Session, Stream, Ticket, decode_devices, encode_devices};
use crossrail_locks::Mutex;
use crossrail_tcp::LinkWatch;
use crossrail_topology::NetDevice;
use crossrail_types::{Checksum, EndpointId, Error, ErrorKind, Log, Reason, Result};

use super::Sessions;
use super::costs::EAGER_LIMIT;
use super::rail_pairs::{PeerRails, RailPair, again};
use super::transport::Announcement;
use super::{over_rails, placing};
use crate::core::{LostRail, Move, READABLE};
use crate::progress::{About, SessionEvents};

/// Bytes of an announcement: the transport's byte, two bytes of its own, and a zero.
const ANNOUNCEMENT_LEN: usize = 4;
/// Bytes behind it in a session with checksums: the first ones of its proof.
const ANNOUNCEMENT_SUM: usize = 8;
/// Announcement byte of an end that closes the session; reserved, no transport uses it.
const GOODBYE: u8 = 0xff;
/// First byte of an end's rails, which have changed since its hello: four bytes of length, as many bytes, and the first
/// ones of their proof. Reserved, too.
const DEVICES: u8 = 0xfe;
const DEVICES_HEAD: usize = 5;
const DEVICES_PROOF: usize = 16;

/// An announcement as it travels over that session's control connection.
fn announcement_bytes(ticket: &Ticket, announcement: [u8; ANNOUNCEMENT_LEN]) -> Vec<u8> {
    let mut bytes = announcement.to_vec();
    if ticket.checksum != Checksum::Off {
        bytes.extend_from_slice(&ticket.proof("announcement", &announcement)[..ANNOUNCEMENT_SUM]);
    }
    bytes
}

/// The `number`-th change of an end's rails, counted from 1, as it travels. `initiator`: that end has connected.
fn devices_bytes(ticket: &Ticket, initiator: bool, number: u32, devices: &[u8]) -> Vec<u8> {
    let length = (devices.len() as u32).to_le_bytes();
    [&[DEVICES], &length[..], devices, &devices_proof(ticket, initiator, number, devices)].concat()
}

fn devices_proof(ticket: &Ticket, initiator: bool, number: u32, devices: &[u8]) -> [u8; DEVICES_PROOF] {
    let counted = [&[u8::from(initiator)], &number.to_le_bytes()[..], devices].concat();
    let mut proof = [0; DEVICES_PROOF];
    proof.copy_from_slice(&ticket.proof("rails", &counted)[..DEVICES_PROOF]);
    proof
}

/// The control connections of one worker. Any thread; each method takes the lock for itself.
#[derive(Default)]
pub(super) struct ControlConnections {
    /// By session id.
    connections: Mutex<HashMap<[u8; 16], ControlConnection>>,
    watch: Mutex<Option<LinkWatch>>,
    /// Kinds of rejection that were logged.
    logged: Mutex<HashSet<ErrorKind>>,
}

struct ControlConnection {
    endpoint: EndpointId,
    ticket: Ticket,
    initiator: bool,
    stream: TcpStream,
    peer: Hello,
    /// What has been read of the connecting end's announcement.
    received: Vec<u8>,
    /// Bytes read after it.
    updates: Vec<u8>,
    /// Changes of rails sent and received.
    changes: [u32; 2],
    /// The peer's rails have changed, and [`Sessions::pair_again`] is due.
    changed: bool,
    announced: bool,
    /// Its connection has failed; the peer counts as alive as long as a lane does.
    lost: bool,
    /// TCP: the rails that lanes are dialled over, by number: all of them at the connecting end, those that it has
    /// dialled at the other.
    rails: HashMap<u16, RailPair>,
    /// TCP: messages up to here go with their first frame.
    eager_max: usize,
    /// TCP: messages take turns between endpoints to this peer.
    turns: bool,
    /// TCP: lanes that are up, and how many the connecting end announced.
    lanes: usize,
    expected: Option<usize>,
    accepted: bool,
}

/// An event on a control connection.
enum ControlEvent {
    Nothing,
    Announced(u8, Box<Announcement>),
    /// It has ended. `formed`: the endpoint was complete.
    Ended {
        why: String,
        formed: bool,
    },
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

impl ControlConnection {
    /// The control connection of a session, which has announced nothing yet.
    fn new(endpoint: EndpointId, ticket: Ticket, initiator: bool, stream: TcpStream, peer: Hello) -> ControlConnection {
        ControlConnection {
            endpoint,
            ticket,
            initiator,
            stream,
            peer,
            received: Vec::new(),
            updates: Vec::new(),
            changes: [0; 2],
            changed: false,
            announced: false,
            lost: false,
            rails: HashMap::new(),
            eager_max: EAGER_LIMIT,
            turns: false,
            lanes: 0,
            expected: None,
            accepted: false,
        }
    }

    fn read(&mut self, log: Log, known: impl Fn(u8) -> bool) -> ControlEvent {
        if self.lost {
            // After reporting an error, a socket reads as end of file; the peer's process has not exited.
            return ControlEvent::Nothing;
        }
        let mut buffer = [0; 64];
        let why = loop {
            match self.stream.read(&mut buffer) {
                // Closed by something in between, such as a middlebox with an idle timeout; or the peer's process has
                // exited, which redialling shows once its lanes have ended, too.
                Ok(0) => {
                    let event = self.announcement();
                    if !self.formed() {
                        break "it closed the control connection".to_owned();
                    }
                    self.lost = true;
                    let name = &self.peer.name;
                    log.info(format_args!("{name}: control connection: closed without a goodbye; its lanes go on"));
                    return event;
                }
                Ok(bytes) => {
                    let missing = if self.initiator { 0 } else { self.announced_in() - self.received.len() };
                    let (announcement, updates) = buffer[..bytes].split_at(missing.min(bytes));
                    self.received.extend_from_slice(announcement);
                    self.updates.extend_from_slice(updates);
                    if self.received == [GOODBYE] {
                        self.received.clear();
                        break "it closed the control connection".to_owned();
                    }
                    if self.received.first().is_some_and(|byte| !known(*byte)) {
                        break "it broke the protocol on the control connection".to_owned();
                    }
                    if !self.initiator
                        && let (None, true) = (self.announcement_received(), self.received.len() == self.announced_in())
                    {
                        let name = &self.peer.name;
                        log.warn(format_args!("{name}: control connection is corrupt: a checksum differs"));
                        break "the control connection is corrupt: the checksum of what it announced differs"
                            .to_owned();
                    }
                    if let Some(why) = self.take_updates() {
                        break why.to_owned();
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return self.announcement(),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    let event = self.announcement();
                    if !self.formed() {
                        break format!("control connection: {error}");
                    }
                    // The control device may be down, or a middlebox may have reset the connection; the peer counts as
                    // alive as long as a lane does. A process that exits closes the connection.
                    if !std::mem::replace(&mut self.lost, true) {
                        let name = &self.peer.name;
                        log.warn(format_args!("{name}: control connection: {error}; its lanes go on"));
                    }
                    return event;
                }
            }
        };
        // An announcement received before the end still counts: the peer may have connected, sent, and exited.
        self.announcement();
        ControlEvent::Ended { why, formed: self.formed() }
    }

    /// Whether the endpoint is complete as far as this connection is concerned.
    fn formed(&self) -> bool {
        self.initiator || self.announced
    }

    /// Acts on whole messages that follow the announcement; why the connection is over, if it is.
    fn take_updates(&mut self) -> Option<&'static str> {
        const BROKEN: &str = "it broke the protocol on the control connection";
        while let Some(kind) = self.updates.first() {
            if *kind == GOODBYE && self.updates.len() == 1 {
                return Some("it closed the control connection");
            }
            let Some(length) = self.updates.get(1..DEVICES_HEAD) else {
                return if *kind == DEVICES { None } else { Some(BROKEN) };
            };
            let length = length.try_into().map_or(usize::MAX, |bytes| u32::from_le_bytes(bytes) as usize);
            if *kind != DEVICES || length > HELLO_MAX {
                return Some(BROKEN);
            }
            let end = DEVICES_HEAD + length;
            let proof = self.updates.get(end..end + DEVICES_PROOF)?;
            let (bytes, number) = (&self.updates[DEVICES_HEAD..end], self.changes[1].wrapping_add(1));
            let is_proven = proof == devices_proof(&self.ticket, !self.initiator, number, bytes);
            let Some(devices) = decode_devices(bytes).ok().filter(|_| is_proven) else { return Some(BROKEN) };
            (self.peer.devices, self.changed, self.changes[1]) = (devices, true, number);
            self.updates.drain(..end + DEVICES_PROOF);
        }
        None
    }

    /// Sends this end's rails, which have changed.
    fn send_devices(&mut self, devices: &[u8]) {
        self.changes[0] = self.changes[0].wrapping_add(1);
        let bytes = devices_bytes(&self.ticket, self.initiator, self.changes[0], devices);
        // The socket is empty but for earlier changes. A peer that reads none of them until they fill it is stopped,
        // and a message that was sent in part makes the connection useless.
        if self.stream.write(&bytes).ok() != Some(bytes.len()) {
            self.lost = true;
            let _ = self.stream.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Bytes of an announcement, with its sum.
    fn announced_in(&self) -> usize {
        let sum = if self.ticket.checksum == Checksum::Off { 0 } else { ANNOUNCEMENT_SUM };
        ANNOUNCEMENT_LEN + sum
    }

    /// The announcement, if it has come whole, and as it was sent.
    fn announcement_received(&self) -> Option<[u8; ANNOUNCEMENT_LEN]> {
        let bytes = *self.received.first_chunk()?;
        (self.received == announcement_bytes(&self.ticket, bytes)).then_some(bytes)
    }

    fn announcement(&mut self) -> ControlEvent {
        match self.announcement_received() {
            Some(bytes) if !self.announced => {
                self.announced = true;
                let (endpoint, peer) = (self.endpoint, self.peer.clone());
                let announcement =
                    Announcement { endpoint, peer, session: self.ticket.session, argument: [bytes[1], bytes[2]] };
                ControlEvent::Announced(bytes[0], Box::new(announcement))
            }
            _ => ControlEvent::Nothing,
        }
    }
}

impl Drop for ControlConnection {
    /// Sends the goodbye. A process that exits in any other way sends none.
    fn drop(&mut self) {
        if !self.lost {
            // The socket has room for one byte, unless the peer does not read; then its lanes reveal the end.
            let _ = self.stream.write(&[GOODBYE]);
        }
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
        self.progress.connections().watch(fd, About::Session(endpoint))?;
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
                if let Err(error) = self.progress.connections().watch(found.fd(), About::Links) {
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

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use crossrail_types::LogLevel;

    use super::*;

    const TICKET: Ticket = Ticket { session: [3; 16], key: [5; 32], checksum: Checksum::Crc };
    const ANNOUNCED: [u8; ANNOUNCEMENT_LEN] = [b'R', 2, 0, 0];

    fn hello() -> Hello {
        Hello {
            worker: [1; 16],
            name: "the peer".to_owned(),
            boot_id: String::new(),
            pid: 1,
            release: String::new(),
            transports: Vec::new(),
            devices: Vec::new(),
            chunk: 1,
            window: 1,
            channels: 1,
            unix: None,
            token: [2; 16],
            control: Vec::new(),
            replaces: None,
            channels_max: 1,
            checksum: Checksum::Crc,
            network: 0,
            node: None,
        }
    }

    /// The accepting end's connection, to which `bytes` were sent before the peer closed it.
    fn given(ticket: Ticket, bytes: &[u8]) -> ControlConnection {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let stream = listener.accept().unwrap().0;
        peer.write_all(bytes).unwrap();
        drop(peer);
        ControlConnection::new(EndpointId(0), ticket, false, stream, hello())
    }

    /// What the accepting end makes of `bytes`, and of the end behind them: whether the endpoint was complete, and why
    /// it has ended.
    fn made_of(ticket: Ticket, bytes: &[u8]) -> (bool, String) {
        match given(ticket, bytes).read(Log(LogLevel::Off), |_| true) {
            ControlEvent::Ended { why, formed } => (formed, why),
            _ => panic!("its end was not noticed"),
        }
    }

    #[test]
    fn only_a_goodbye_ends_a_session_that_was_announced() {
        for ticket in [TICKET, Ticket { checksum: Checksum::Off, ..TICKET }] {
            let sent = announcement_bytes(&ticket, ANNOUNCED);
            let mut closed = given(ticket, &sent);
            assert!(matches!(closed.read(Log(LogLevel::Off), |_| true), ControlEvent::Announced(b'R', _)));
            assert!(closed.lost && matches!(closed.read(Log(LogLevel::Off), |_| true), ControlEvent::Nothing));
            assert!(made_of(ticket, &[&sent[..], &[GOODBYE]].concat()).0);
            assert!(!made_of(ticket, &[GOODBYE]).0, "it was given up before it was announced");
            assert!(made_of(ticket, &[&sent[..], b"x"].concat()).1.contains("broke the protocol"));
        }
    }

    #[test]
    fn rails_that_change_are_taken_in_their_order_and_with_their_proof_alone() {
        let device = |at: u8| Device {
            name: "eth1".to_owned(),
            address: std::net::IpAddr::from([10, 0, at, 2]),
            port: 7,
            speed_mbps: None,
            loopback: false,
        };
        let change = |number, at| devices_bytes(&TICKET, true, number, &encode_devices(&[device(at)]).unwrap());
        let announced = announcement_bytes(&TICKET, ANNOUNCED);
        let read = |parts: &[&[u8]]| {
            let mut of = given(TICKET, &[&announced, &parts.concat()[..]].concat());
            let event = of.read(Log(LogLevel::Off), |_| true);
            (of.peer.devices.clone(), of.changed, matches!(event, ControlEvent::Announced(..)))
        };
        assert_eq!(read(&[]), (vec![], false, true));
        assert_eq!(read(&[&change(1, 1)]), (vec![device(1)], true, true));
        assert_eq!(read(&[&change(1, 1), &change(2, 2)]), (vec![device(2)], true, true));
        let whole = change(1, 1);
        assert_eq!(read(&[&whole[..whole.len() - 1]]), (vec![], false, true), "a part is missing");
        assert_eq!(read(&[&change(2, 1)]).0, [], "one is missing");
        assert_eq!(read(&[&change(1, 1), &change(1, 1)]).0, [device(1)], "the same once more");
        let own = devices_bytes(&TICKET, false, 1, &encode_devices(&[device(1)]).unwrap());
        assert_eq!(read(&[&own]).0, [], "what this end itself would send");
        for at in 0..whole.len() {
            let mut other = whole.clone();
            other[at] ^= 1;
            assert_eq!(read(&[&other]).0, [], "byte {at}");
        }
        for garbage in [&b"x"[..], &[DEVICES, 255, 255, 255, 255], &[GOODBYE, GOODBYE]] {
            let bytes = [&announced, garbage].concat();
            assert!(made_of(TICKET, &bytes).1.contains("broke the protocol"), "{garbage:?}");
        }
        let (formed, why) = made_of(TICKET, &[&announced[..], &whole, &[GOODBYE]].concat());
        assert!(formed && why.contains("it closed the control connection"), "{why}");
    }

    #[test]
    fn an_announcement_that_is_changed_on_its_way_ends_the_session() {
        let sent = announcement_bytes(&TICKET, ANNOUNCED);
        assert_eq!(sent.len(), ANNOUNCEMENT_LEN + ANNOUNCEMENT_SUM);
        let (formed, why) = made_of(TICKET, &[&sent[..], &[GOODBYE]].concat());
        assert!(formed && why.contains("it closed the control connection"), "{why}");
        for at in 0..sent.len() {
            let mut changed = sent.clone();
            changed[at] ^= 1 << (at % 8);
            let (formed, why) = made_of(TICKET, &changed);
            assert!(!formed && why.contains("the checksum of what it announced differs"), "byte {at}: {why}");
            let (formed, why) = made_of(TICKET, &sent[..at]);
            assert!(!formed && why.contains("it closed the control connection"), "{at} bytes: {why}");
        }
        let (formed, why) = made_of(Ticket { key: [6; 32], ..TICKET }, &sent);
        assert!(!formed && why.contains("corrupt"), "an announcement of another session: {why}");
        // Without checksums only the announcement itself travels.
        let plain = Ticket { checksum: Checksum::Off, ..TICKET };
        assert_eq!(announcement_bytes(&plain, ANNOUNCED), ANNOUNCED);
        assert!(made_of(plain, &[&ANNOUNCED[..], &[GOODBYE]].concat()).0);
    }
}
