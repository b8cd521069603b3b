//! Control connections: one per endpoint that needs it, over which ends announce lanes and learn of each other's death.

use std::collections::{HashMap, HashSet};
use std::io::{Read, Write};
use std::net::{IpAddr, TcpStream};
use std::os::fd::AsRawFd;

use crossrail_handshake::{Hello, Session, Stream, Ticket};
use crossrail_locks::Mutex;
use crossrail_tcp::LinkWatch;
use crossrail_topology::NetDevice;
use crossrail_types::{Checksum, EndpointId, Error, ErrorKind, Log, Reason, Result};

use super::Sessions;
use super::costs::EAGER_LIMIT;
use super::rail_pairs::{PeerRails, RailPair};
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

/// An announcement as it travels over that session's control connection.
fn announcement_bytes(ticket: &Ticket, announcement: [u8; ANNOUNCEMENT_LEN]) -> Vec<u8> {
    let mut bytes = announcement.to_vec();
    if ticket.checksum != Checksum::Off {
        bytes.extend_from_slice(&ticket.proof("announcement", &announcement)[..ANNOUNCEMENT_SUM]);
    }
    bytes
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
            let pair = || RailPair { mine: mine.clone(), from: local, theirs };
            connection.rails.entry(rail).or_insert_with(pair);
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
                    self.received.extend_from_slice(&buffer[..bytes]);
                    if self.is_goodbye() {
                        self.received.pop();
                        break "it closed the control connection".to_owned();
                    }
                    if self.initiator || self.received.len() > self.announced_in() || !known(self.received[0]) {
                        break "it broke the protocol on the control connection".to_owned();
                    }
                    if let (None, true) = (self.announcement_received(), self.received.len() == self.announced_in()) {
                        let name = &self.peer.name;
                        log.warn(format_args!("{name}: control connection is corrupt: a checksum differs"));
                        break "the control connection is corrupt: the checksum of what it announced differs"
                            .to_owned();
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

    /// Whether the last byte received is the peer's goodbye: behind the announcement, or in its place.
    fn is_goodbye(&self) -> bool {
        let before = self.received.len() - 1;
        let expected = before == 0 || (!self.initiator && before == self.announced_in());
        expected && self.received[before] == GOODBYE
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
    }

    fn links_changed(&self) {
        let changes = self.control.watch.lock().as_mut().map(LinkWatch::changes).unwrap_or_default();
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
