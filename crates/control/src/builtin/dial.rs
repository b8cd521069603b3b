//! From an address to a proven connection.

use std::io::{ErrorKind as IoKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crossrail_types::{Error, ErrorKind, Result};
use socket2::{SockRef, TcpKeepalive};

use super::greeting::{
    self, CHALLENGE_LEN, Challenge, FLAG_SECRET, Kind, PRELUDE_LEN, PROOF_LEN, REJECT_LEN, Reject, Reply, VERSION,
};

const SAME_SECRET: &str = "set the same CROSSRAIL_SECRET or CROSSRAIL_SECRET_FILE at all ends";

/// A store's place: `host:port`.
#[derive(Clone, Debug)]
pub(super) struct Place(String);

impl Place {
    /// Out of an address without its scheme.
    ///
    /// # Errors
    /// `Config`: it is not of the form `host:port`.
    pub(super) fn parse(text: &str) -> Result<Place> {
        let (host, port) = text.rsplit_once(':').unwrap_or((text, ""));
        let bare_v6 = host.contains(':') && !(host.starts_with('[') && host.ends_with(']'));
        if host.is_empty() || bare_v6 || !port.parse::<u16>().is_ok_and(|port| port > 0) {
            return Err(Error::new(
                ErrorKind::Config,
                "CROSSRAIL_STORE",
                format!("\"tcp://{text}\" names no host and port"),
            )
            .with_hint("accepted: tcp://host:port, such as tcp://10.0.0.1:7400 or tcp://[fd00::1]:7400"));
        }
        Ok(Place(text.to_owned()))
    }

    pub(super) fn address(&self) -> String {
        format!("tcp://{}", self.0)
    }

    /// A name may take the resolver longer than there is time: it is asked by a thread of its own.
    fn resolve(&self, operation: &str, deadline: Instant) -> Result<Vec<SocketAddr>> {
        if let Ok(address) = self.0.parse::<SocketAddr>() {
            return Ok(vec![address]);
        }
        let fail = |kind, detail: String| Error::new(kind, operation, detail).with_peer(self.address());
        let (said, heard) = mpsc::sync_channel(1);
        let name = self.0.clone();
        let thread = std::thread::Builder::new().name("crossrail-dns".to_owned());
        thread
            .spawn(move || said.send(name.to_socket_addrs().map(Iterator::collect::<Vec<_>>)))
            .map_err(|e| fail(ErrorKind::Exhausted, format!("spawn a thread: {e}")))?;
        match heard.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(Ok(found)) if !found.is_empty() => Ok(found),
            Ok(Ok(_)) => Err(fail(ErrorKind::Unreachable, "its name has no address".to_owned())),
            Ok(Err(e)) => Err(fail(ErrorKind::Unreachable, format!("its name does not resolve: {e}"))),
            Err(_) => Err(fail(ErrorKind::Timeout, "its name was not resolved in time".to_owned())),
        }
    }
}

/// Connects and proves that both ends know the same secret. The stream is in nonblocking mode.
///
/// # Errors
/// `Unreachable`: nobody listens there, or it closed. `Timeout`. `Refused`: the secret. `Mismatch`: the version.
/// `Protocol`: something else than a store listens there. `Exhausted`: the store takes no more clients.
pub(super) fn dial(place: &Place, secret: Option<&[u8]>, operation: &str, deadline: Instant) -> Result<TcpStream> {
    let mut last = None;
    for address in place.resolve(operation, deadline)? {
        match connect(place, address, operation, deadline) {
            Ok(stream) => {
                let mut talk = Talk { stream, place, operation, deadline };
                talk.greet(secret)?;
                return Ok(talk.stream);
            }
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| Error::new(ErrorKind::Unreachable, operation, "no address").with_peer(place.address())))
}

fn connect(place: &Place, address: SocketAddr, operation: &str, deadline: Instant) -> Result<TcpStream> {
    let fail = |kind, detail: String| Error::new(kind, operation, detail).with_peer(place.address());
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(fail(ErrorKind::Timeout, "no time left to connect".to_owned()));
    }
    let stream = TcpStream::connect_timeout(&address, left).map_err(|e| match e.kind() {
        IoKind::ConnectionRefused => fail(ErrorKind::Unreachable, "connect: nobody listens there".to_owned())
            .with_hint("the store may not have started yet, or has ended"),
        IoKind::TimedOut => fail(ErrorKind::Unreachable, "connect: no answer in time".to_owned())
            .with_hint("check that the address is right and no firewall is in between"),
        _ => fail(ErrorKind::Unreachable, format!("connect: {e}")),
    })?;
    // A port of this machine that nobody listens at can, rarely, be connected to itself.
    if stream.local_addr().ok() == stream.peer_addr().ok() {
        return Err(fail(ErrorKind::Unreachable, "connect: nobody listens there".to_owned()));
    }
    let alive = TcpKeepalive::new().with_time(Duration::from_secs(5)).with_interval(Duration::from_secs(2));
    let set = stream.set_nodelay(true).and_then(|()| SockRef::from(&stream).set_tcp_keepalive(&alive.with_retries(3)));
    set.map_err(|e| Error::io(operation, "setsockopt", &e).with_peer(place.address()))?;
    Ok(stream)
}

struct Talk<'a> {
    stream: TcpStream,
    place: &'a Place,
    operation: &'a str,
    deadline: Instant,
}

impl Talk<'_> {
    fn error(&self, kind: ErrorKind, detail: impl Into<String>) -> Error {
        Error::new(kind, self.operation, detail).with_peer(self.place.address())
    }

    fn malformed(&self, text: &str) -> Error {
        self.error(ErrorKind::Protocol, text).with_hint("check that CROSSRAIL_STORE is the address of a store")
    }

    fn greet(&mut self, secret: Option<&[u8]>) -> Result<()> {
        let challenge_bytes = self.message::<CHALLENGE_LEN>(Kind::Challenge)?;
        let challenge = Challenge::decode(&challenge_bytes).map_err(|text| self.malformed(&text))?;
        if !(challenge.version_min..=challenge.version_max).contains(&VERSION) {
            let (min, max) = (challenge.version_min, challenge.version_max);
            let text = format!("store protocol version {VERSION} here, {min} to {max} at the store");
            return Err(self.error(ErrorKind::Mismatch, text).with_hint("run the same Crossrail release at all ends"));
        }
        let refused = match (secret.is_some(), challenge.flags) {
            (false, 0) | (true, FLAG_SECRET) => None,
            (false, FLAG_SECRET) => Some("the store has a secret, this end has none"),
            (true, 0) => Some("this end has a secret, the store has none"),
            (_, flags) => {
                let text = format!("the store asks for a proof of an unknown kind ({flags:#04x})");
                return Err(self.error(ErrorKind::Mismatch, text));
            }
        };
        if let Some(text) = refused {
            return Err(self.error(ErrorKind::Refused, text).with_hint(SAME_SECRET));
        }
        let mut reply = Reply { version: VERSION, flags: challenge.flags, nonce: [0; 32], mac: [0; 32] };
        getrandom::fill(&mut reply.nonce).map_err(|e| self.error(ErrorKind::Io, format!("getrandom: {e}")))?;
        let secret = secret.unwrap_or_default();
        reply.mac = greeting::client_proof(secret, &challenge_bytes, &reply.encode());
        let reply = reply.encode();
        self.stream.write_all(&reply).map_err(|e| self.broken(&e))?;
        let proof = self.message::<PROOF_LEN>(Kind::Proof)?;
        let proof = greeting::decode_proof(&proof).map_err(|text| self.malformed(&text))?;
        if !greeting::store_holds(secret, &challenge_bytes, &reply, &proof) {
            return Err(self.error(ErrorKind::Refused, "the store does not know the secret").with_hint(SAME_SECRET));
        }
        self.stream.set_nonblocking(true).map_err(|e| Error::io(self.operation, "fcntl", &e))
    }

    /// One message of the greeting, or the error that a rejection in its place is.
    fn message<const N: usize>(&mut self, kind: Kind) -> Result<[u8; N]> {
        let mut prelude = [0; PRELUDE_LEN];
        self.read(&mut prelude)?;
        match greeting::decode_prelude(&prelude).map_err(|text| self.malformed(&text))? {
            Kind::Reject => {
                let mut bytes = [0; REJECT_LEN];
                bytes[..PRELUDE_LEN].copy_from_slice(&prelude);
                self.read(&mut bytes[PRELUDE_LEN..])?;
                let reject = Reject::decode(&bytes).map_err(|text| self.malformed(&text))?;
                let error = self.error(reject.kind, reject.text);
                Err(if error.kind == ErrorKind::Refused { error.with_hint(SAME_SECRET) } else { error })
            }
            found if found == kind => {
                let mut bytes = [0; N];
                bytes[..PRELUDE_LEN].copy_from_slice(&prelude);
                self.read(&mut bytes[PRELUDE_LEN..])?;
                Ok(bytes)
            }
            found => Err(self.malformed(&format!("{found:?} in the greeting where {kind:?} belongs"))),
        }
    }

    fn read(&mut self, mut bytes: &mut [u8]) -> Result<()> {
        while !bytes.is_empty() {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self
                    .error(ErrorKind::Timeout, "something listens there and does not greet as a store does")
                    .with_hint("check that CROSSRAIL_STORE is the address of a store"));
            }
            let set = self.stream.set_read_timeout(Some(left.max(Duration::from_millis(1))));
            set.map_err(|e| Error::io(self.operation, "setsockopt", &e))?;
            match self.stream.read(bytes) {
                Ok(0) => return Err(self.error(ErrorKind::Unreachable, "it closed the connection while greeting")),
                Ok(read) => bytes = &mut bytes[read..],
                Err(e) if matches!(e.kind(), IoKind::WouldBlock | IoKind::TimedOut | IoKind::Interrupted) => {}
                Err(e) => return Err(self.broken(&e)),
            }
        }
        Ok(())
    }

    fn broken(&self, e: &std::io::Error) -> Error {
        self.error(ErrorKind::Unreachable, format!("the connection broke while greeting: {e}"))
    }
}
