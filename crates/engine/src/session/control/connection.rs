//! One control connection: what travels over it, and its end.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::TcpStream;

use crossrail_handshake::{HELLO_MAX, Hello, Ticket, decode_devices};
use crossrail_types::{Checksum, EndpointId, Log};

use crate::session::costs::EAGER_LIMIT;
use crate::session::rail_pairs::RailPair;
use crate::session::transport::Announcement;

/// Bytes of an announcement: the transport's byte, two bytes of its own, and a zero.
pub(super) const ANNOUNCEMENT_LEN: usize = 4;
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
pub(super) fn announcement_bytes(ticket: &Ticket, announcement: [u8; ANNOUNCEMENT_LEN]) -> Vec<u8> {
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

/// One of them.
pub(super) struct ControlConnection {
    pub(super) endpoint: EndpointId,
    pub(super) ticket: Ticket,
    pub(super) initiator: bool,
    pub(super) stream: TcpStream,
    pub(super) peer: Hello,
    /// What has been read of the connecting end's announcement.
    received: Vec<u8>,
    /// Bytes read after it.
    updates: Vec<u8>,
    /// Changes of rails sent and received.
    changes: [u32; 2],
    /// The peer's rails have changed, and [`Sessions::pair_again`] is due.
    pub(super) changed: bool,
    pub(super) announced: bool,
    /// Its connection has failed; the peer counts as alive as long as a lane does.
    pub(super) lost: bool,
    /// TCP: the rails that lanes are dialled over, by number: all of them at the connecting end, those that it has
    /// dialled at the other.
    pub(super) rails: HashMap<u16, RailPair>,
    /// TCP: messages up to here go with their first frame.
    pub(super) eager_max: usize,
    /// TCP: messages take turns between endpoints to this peer.
    pub(super) turns: bool,
    /// TCP: lanes that are up, and how many the connecting end announced.
    pub(super) lanes: usize,
    pub(super) expected: Option<usize>,
    pub(super) accepted: bool,
}

/// An event on a control connection.
pub(super) enum ControlEvent {
    Nothing,
    Announced(u8, Box<Announcement>),
    /// It has ended. `formed`: the endpoint was complete.
    Ended {
        why: String,
        formed: bool,
    },
}

impl ControlConnection {
    /// The control connection of a session, which has announced nothing yet.
    pub(super) fn new(
        endpoint: EndpointId,
        ticket: Ticket,
        initiator: bool,
        stream: TcpStream,
        peer: Hello,
    ) -> ControlConnection {
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

    pub(super) fn read(&mut self, log: Log, known: impl Fn(u8) -> bool) -> ControlEvent {
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
    pub(super) fn formed(&self) -> bool {
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
    pub(super) fn send_devices(&mut self, devices: &[u8]) {
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

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use crossrail_handshake::{Device, encode_devices};
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
