//! Connects to a store and completes the handshake.

use std::io::ErrorKind as IoKind;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use crossrail_handshake::{Secret, resolve, store};
use crossrail_types::{Error, ErrorKind, Reason, Result};
use socket2::{SockRef, TcpKeepalive};

/// The address of a store: `host:port`.
#[derive(Clone, Debug)]
pub(super) struct StoreAddress(String);

impl StoreAddress {
    /// Parses an address without its scheme.
    ///
    /// # Errors
    /// `Config`: it is not of the form `host:port`.
    pub(super) fn parse(text: &str) -> Result<StoreAddress> {
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
        Ok(StoreAddress(text.to_owned()))
    }

    pub(super) fn address(&self) -> String {
        format!("tcp://{}", self.0)
    }

    fn resolve(&self, operation: &str, deadline: Instant) -> Result<Vec<SocketAddr>> {
        if let Ok(address) = self.0.parse::<SocketAddr>() {
            return Ok(vec![address]);
        }
        // `parse` has checked the form.
        let (host, port) = self.0.rsplit_once(':').unwrap_or((&self.0, ""));
        let host = host.trim_start_matches('[').trim_end_matches(']');
        resolve(operation, host, port.parse().unwrap_or_default(), deadline).map_err(|e| e.with_peer(self.address()))
    }
}

/// First and longest pause before a store that is busy is tried again.
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(20);

/// Connects to the store and completes the handshake; tries again until `deadline` where too many clients have not
/// proved themselves. The stream is in nonblocking mode.
///
/// # Errors
/// `Unreachable`: no process listens there, or it closed the connection. `Timeout`. `Refused`: the secret. `Mismatch`:
/// the version. `Protocol`: the listener is not a store. `Exhausted`: the store accepts no more clients.
pub(super) fn dial(store: &StoreAddress, secret: &Secret, operation: &str, deadline: Instant) -> Result<TcpStream> {
    let mut pause = PAUSE_MIN;
    loop {
        match attempt(store, secret, operation, deadline) {
            Err(error) if error.reason == Some(Reason::Busy) && Instant::now() + pause < deadline => {
                std::thread::sleep(pause);
                pause = (pause * 2).min(PAUSE_MAX);
            }
            outcome => return outcome,
        }
    }
}

fn attempt(store: &StoreAddress, secret: &Secret, operation: &str, deadline: Instant) -> Result<TcpStream> {
    let mut last = None;
    for address in store.resolve(operation, deadline)? {
        match connect(store, address, operation, deadline) {
            Ok(stream) => {
                store::connect(stream.as_fd(), secret, operation, &store.address(), deadline)?;
                stream.set_nonblocking(true).map_err(|e| Error::io(operation, "fcntl", &e))?;
                return Ok(stream);
            }
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| Error::new(ErrorKind::Unreachable, operation, "no address").with_peer(store.address())))
}

fn connect(store: &StoreAddress, address: SocketAddr, operation: &str, deadline: Instant) -> Result<TcpStream> {
    let fail = |kind, detail: String| Error::new(kind, operation, detail).with_peer(store.address());
    let silent = || {
        fail(ErrorKind::Unreachable, "connect: no process listens there".to_owned())
            .with_reason(Reason::NotListening)
            .with_hint("the store may not have started yet, or has ended")
    };
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(fail(ErrorKind::Timeout, "no time left to connect".to_owned()));
    }
    let stream = TcpStream::connect_timeout(&address, left).map_err(|e| match e.kind() {
        IoKind::ConnectionRefused => silent().with_io(&e),
        IoKind::TimedOut => fail(ErrorKind::Unreachable, "connect: no response in time".to_owned())
            .with_reason(Reason::NoResponse)
            .with_io(&e)
            .with_hint("check that the address is right and that no firewall drops the port"),
        _ => fail(ErrorKind::Unreachable, format!("connect: {e}")).with_io(&e),
    })?;
    // A connection to a free local port can, rarely, connect to itself.
    if stream.local_addr().ok() == stream.peer_addr().ok() {
        return Err(silent());
    }
    let alive = TcpKeepalive::new().with_time(Duration::from_secs(5)).with_interval(Duration::from_secs(2));
    let set = stream.set_nodelay(true).and_then(|()| SockRef::from(&stream).set_tcp_keepalive(&alive.with_retries(3)));
    set.map_err(|e| Error::io(operation, "setsockopt", &e).with_peer(store.address()))?;
    Ok(stream)
}
