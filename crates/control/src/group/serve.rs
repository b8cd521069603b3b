//! The built-in store in rank 0's process.

use std::io::{self, ErrorKind as IoKind};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crossrail_locks::{Mutex, PerProcess};
use crossrail_types::{Error, ErrorKind, Result, Settings};

use crate::StoreServer;

/// How long to probe for a listener; one on this machine accepts at once.
const PROBE_TIMEOUT: Duration = Duration::from_millis(500);

/// The stores of this process by address; groups with the same address share one.
static RUNNING: PerProcess<Mutex<Vec<Running>>> = PerProcess::new();

type Running = (String, Weak<StoreServer>);

/// A reference to a store that runs in this process; dropping the last one stops it.
#[derive(Debug)]
pub(super) struct Served {
    server: Arc<StoreServer>,
    /// The address at which this process reaches it.
    pub(super) address: String,
}

impl Served {
    /// Whether no other group of this process uses the store.
    pub(super) fn is_last(&self) -> bool {
        Arc::strong_count(&self.server) == 1
    }
}

/// Starts the store at `address` (`tcp://host:port`), unless it belongs to another machine or is being served.
pub(super) fn start(address: &str, settings: &Settings) -> Result<Option<Served>> {
    let Some(place) = address.strip_prefix("tcp://") else { return Ok(None) };
    let mut running = RUNNING.lock();
    running.retain(|(_, server)| server.strong_count() > 0);
    let known = running.iter().find(|(known, _)| known == address);
    if let Some(server) = known.and_then(|(_, server)| server.upgrade()) {
        return Ok(Some(Served { server, address: address.to_owned() }));
    }
    // The client reports names that do not resolve.
    let Some(own) = place.to_socket_addrs().ok().and_then(|mut all| all.find(|all| is_own(all.ip()))) else {
        return Ok(None);
    };
    match probe(own) {
        Ok(()) => return Ok(None),
        Err(why) if matches!(why.kind(), IoKind::NetworkUnreachable | IoKind::HostUnreachable) => {
            return Err(unreachable(own, &why));
        }
        Err(_) => {}
    }
    let listen = listen_text(place, own, settings.secret.is_some() || settings.secret_file.is_some());
    match StoreServer::start(&listen, settings) {
        Ok(server) => {
            let server = Arc::new(server);
            let chosen = own.port() == 0;
            let address = if chosen { server.address() } else { address.to_owned() };
            if !chosen {
                running.push((address.clone(), Arc::downgrade(&server)));
            }
            Ok(Some(Served { server, address }))
        }
        // Another process has started it meanwhile.
        Err(_) if probe(own).is_ok() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether the address belongs to this machine.
fn is_own(ip: IpAddr) -> bool {
    TcpListener::bind((ip, 0)).is_ok()
}

/// Succeeds if a process listens there. Port 0, which is yet to be chosen, is refused by the system.
fn probe(at: SocketAddr) -> io::Result<()> {
    TcpStream::connect_timeout(&at, PROBE_TIMEOUT).map(drop)
}

/// An address of this machine to which nothing can be sent, because its device is down.
fn unreachable(own: SocketAddr, why: &io::Error) -> Error {
    let hint =
        if own.ip().is_loopback() { "bring it up: ip link set lo up" } else { "bring up the device that has it" };
    Error::new(ErrorKind::Unreachable, "store", format!("{own}, an address of this machine: {why}"))
        .with_io(why)
        .with_hint(hint)
}

/// The address to bind. A host's own name often resolves to loopback on the host only, so with a secret the store
/// listens on every address.
fn listen_text(place: &str, own: SocketAddr, secret: bool) -> String {
    let named_loopback = place.parse::<SocketAddr>().is_ok_and(|place| place.ip().is_loopback())
        || place.rsplit_once(':').is_some_and(|(host, _)| host == "localhost");
    if !secret || named_loopback {
        return own.to_string();
    }
    match own {
        SocketAddr::V4(own) => format!("0.0.0.0:{}", own.port()),
        SocketAddr::V6(own) => format!("[::]:{}", own.port()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hosts_own_name_that_is_loopback_there_is_served_to_other_hosts_with_a_secret() {
        let own: SocketAddr = "127.0.1.1:7400".parse().unwrap();
        let cases = [
            ("node7:7400", false, "127.0.1.1:7400"),
            ("node7:7400", true, "0.0.0.0:7400"),
            ("127.0.1.1:7400", true, "127.0.1.1:7400"),
            ("localhost:7400", true, "127.0.1.1:7400"),
        ];
        for (place, secret, listen) in cases {
            assert_eq!(listen_text(place, own, secret), listen, "{place}");
        }
        assert!(is_own(own.ip()));
    }
}
